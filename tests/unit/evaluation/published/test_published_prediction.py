"""A public case predicted from the shipped trace: what changes move which way, and what is told of it."""

from dataclasses import replace

import pytest
from trioflow.costmodel.choices import DeviceTimes
from trioflow.costmodel.collectives.platform import load_platform_collectives
from trioflow.costmodel.features import SHIPPED_MODELS
from trioflow.costmodel.operators.model import load_shipped_models
from trioflow.hardware.platform import load_platform
from trioflow.report.attribution import CHANGES, ScaledCollectives, Settings, explain_cases
from trioflow.trace.store import Trace, load_trace
from trioflow_evaluation.published.cases import PublishedRow
from trioflow_evaluation.published.judge import PROPORTIONAL, RESCALED, PreparedCase, describe_learning, explain_growth

BAND = (0.9, 1.2)


def make_case(plan: str = "ddp", ranks: int = 4, batch: int = 32, **facts: object) -> PreparedCase:
    trace = load_trace("gpt2-tiny-b8")
    operators = trace.operators.assign(device_ns=20 * trace.operators["device_ns"])
    total_s = float(operators["device_ns"].sum()) * 1e-9
    told = {"device_name": "NVIDIA H100 80GB HBM3", "device": "cuda", "measured_end_to_end_s": 1.1 * total_s}
    trace = Trace(operators, trace.tensors, replace(trace.facts, **(told | facts)))
    row = PublishedRow(
        "case",
        "made-up",
        "gpt2-tiny",
        ("trace",),
        "h100x8-nvlink",
        "h100-sxm",
        plan,
        ranks,
        0,
        batch,
        "whole step",
        "throughput of nothing",
        "",
    )
    model = load_shipped_models()["h100-sxm"]
    collectives = load_platform_collectives(SHIPPED_MODELS / "h100x8-nvlink/collectives.json")
    times = DeviceTimes([trace], model, "h100-sxm")
    return PreparedCase(row, times, load_platform("h100x8-nvlink", ranks), collectives, BAND)


@pytest.fixture(scope="module")
def replicas():
    return make_case()


def test_one_gpu_at_its_own_batch_is_its_measured_step_with_the_band():
    case = make_case("single", 1, 8)
    told = case.predict()
    step_s = case.reference.facts.measured_end_to_end_s
    assert told.step_time_s == pytest.approx(step_s, rel=0.05)  # the host's times come on top
    assert told.low_s <= BAND[0] * told.step_time_s * 1.05
    assert told.high_s >= told.step_time_s


def test_replicas_take_longer_than_one_gpu(replicas):
    assert replicas.rank_batch == 8
    told = replicas.predict()
    assert told.low_s < told.step_time_s < told.high_s
    assert told.step_time_s > make_case("single", 1, 8).predict().step_time_s


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (Settings(compute=1.1), Settings()),
        (Settings(copies=5.0), Settings(copies=0.0)),
        (Settings(overlap="none"), Settings()),
        (Settings(bandwidth=0.01), Settings()),
        (Settings(latency=1000.0), Settings()),
        (Settings(), Settings(anchor="none")),
    ],
)
def test_a_change_moves_the_step_the_right_way(replicas, slower, faster):
    assert replicas.predict_changed(slower) > replicas.predict_changed(faster)


def test_nothing_changed_is_the_prediction(replicas):
    assert replicas.predict_changed(Settings()) == replicas.predict().step_time_s


def test_collectives_scale_by_what_is_not_latency():
    base = load_platform_collectives(SHIPPED_MODELS / "h100x8-nvlink/collectives.json")
    told, start = base.time_s("all_reduce", 4, 1e8), base.time_s("all_reduce", 4, 0)
    half = ScaledCollectives(base, 0.5, 1.0).time_s("all_reduce", 4, 1e8)
    assert half.time_s == pytest.approx(2 * told.time_s - start.time_s)
    assert half.high_s / half.time_s == pytest.approx(told.high_s / told.time_s)
    later = ScaledCollectives(base, 1.0, 3.0).time_s("all_reduce", 4, 1e8)
    assert later.time_s == pytest.approx(told.time_s + 2 * start.time_s)


def test_baselines_start_from_the_same_times(replicas):
    recorded_s = float(replicas.reference.operators["device_ns"].sum()) * 1e-9
    assert replicas.predict_like_triosim() == pytest.approx(recorded_s)
    assert 0 < replicas.predict_analytically() < recorded_s


def test_times_carried_over_from_another_gpu_have_no_step_to_anchor(replicas):
    carried = make_case()
    carried.times.confidence = "extrapolated"
    assert not carried.has("anchor")
    assert replicas.has("anchor") and not replicas.has("host")
    assert carried.predict().confidence == "extrapolated"
    assert "step of one GPU" in describe_learning(replicas)
    assert "step of one GPU" not in describe_learning(carried)


def test_causes_are_parts_replacements_and_what_a_case_has(replicas):
    told = explain_cases([("four", "case", replicas, 0.5)])
    parts = told[told["role"] == "part"]["time_s"].sum()
    assert parts == pytest.approx(replicas.predict().step_time_s)
    assert told[told["role"] == "replaced"]["time_s"].tolist() == [0.5]
    changed = told[told["role"] == "sensitivity"]["parameter"]
    assert "copies of gradients" in set(changed)
    assert "cut of embedding and head" not in set(changed)
    alone = explain_cases([("four", "case", make_case("single", 1, 8), None)])
    changed = set(alone[alone["role"] == "sensitivity"]["parameter"])
    assert changed == {"compute time", "anchor at the step of one GPU"}
    assert {c.parameter for c in CHANGES} > changed


def test_growth_is_told_of_whole_steps_at_another_batch_without_an_anchor():
    case = make_case("single", 1, 16, measured_end_to_end_s=None)
    told = explain_growth([case])
    sums = told.groupby("setting")["time_s"].sum()
    recorded_s = float(case.reference.operators["device_ns"].sum()) * 1e-9
    assert sums[PROPORTIONAL] == pytest.approx(2 * recorded_s)
    tasks = case.task_graph.tasks
    assert sums[RESCALED] == pytest.approx(tasks[tasks["op_id"].notna()]["duration_s"].sum())
    assert told["parameter"].str.contains(": ").all() and set(told["role"]) == {"growth"}
    same_batch = make_case("single", 1, 8, measured_end_to_end_s=None)
    cut = make_case("tp", 4, 32, measured_end_to_end_s=None)
    anchored = make_case("single", 1, 16)
    assert explain_growth([same_batch, cut, anchored]).empty
