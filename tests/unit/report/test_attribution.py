"""Errors divided among models: a world in which the truth of every part is known."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from same_model import ProportionalModel
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import write_json
from trioflow.base.units import s_to_ns
from trioflow.costmodel.collectives.model import CollectiveTime
from trioflow.costmodel.fits.collectives import fit_collective_model
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder, TimesOrigin
from trioflow.prediction.question import Options
from trioflow.prediction.step import SessionAnchor, Step
from trioflow.report.attribution import (
    ATTRIBUTION,
    CAUSES,
    COMMUNICATION,
    COMPUTE,
    FULL,
    HOST,
    OVERLAP,
    REMAINDER,
    SERIAL,
    LiveCase,
    Settings,
    attribute_errors,
    build_attribution,
    explain_live,
    measure_parts,
    share_change,
    share_host,
)
from trioflow.report.attribution_section import (
    describe_attribution,
    draw_attribution,
    list_cancelled,
    render_attribution,
    score_experiments,
    summarise_live_changes,
)
from trioflow.trace.store import load_trace, save_trace

ONES = {"forward": 1.0, "backward": 1.0, "optimizer": 1.0}
SLOW = {"forward": 1.5, "backward": 1.5, "optimizer": 1.5}
LINKS = (Link("rank0", "rank1", 1e9, 0.0), Link("rank1", "rank0", 1e9, 0.0))
MACHINE = Platform("two", Device("d", "cpu", 10**9, {}), 2, LINKS)
SERIAL_MACHINE = replace(MACHINE, communication_on_compute_stream=True)


class Straight:
    """Collectives of one latency and one bandwidth."""

    def time_s(self, collective: str, ranks: int, message_bytes: float) -> CollectiveTime:
        time_s = 0.1 + message_bytes / 1e9
        return CollectiveTime(time_s, time_s, time_s, "measured")


def make_graph(plan: str, compute: float = 1.0, host: float = 1.0) -> TaskGraph:
    """Return a step of two ranks (one for single): operators, an exchange, the optimizer."""
    builder = TaskGraphBuilder()
    match = builder.new_match()
    for rank in range(1 if plan == "single" else 2):
        add = builder.add
        add(rank, "compute", "host", "wrap", duration_s=0.2 * host)
        first = add(rank, "compute", "compute", "f", duration_s=1.0 * compute, phase="forward")
        last = add(rank, "compute", "compute", "b", duration_s=2.0 * compute, phase="backward")
        if plan == "pipeline":
            kind, peer = (("send", 1), ("recv", 0))[rank]
            stream = "send" if rank == 0 else "receive"
            exchange = add(
                rank,
                stream,
                kind,
                kind,
                after=[last] if rank == 0 else [],
                peer=peer,
                match_id=match,
                message_bytes=200_000_000,
            )
        elif plan != "single":
            exchange = add(
                rank,
                "communication",
                "collective",
                "all_reduce",
                match_id=match,
                group="0,1",
                message_bytes=300_000_000,
                after=[first] if plan == "beside" else [last],
            )
        after = [last] if plan == "single" else [exchange, last]
        add(rank, "compute", "compute", "o", duration_s=0.5 * compute, phase="optimizer", after=after)
    return builder.build()


def make_case(plan: str, machine: Platform = MACHINE) -> LiveCase:
    graph = make_graph(plan)
    ranks = int(graph.tasks["rank"].nunique())
    anchor = SessionAnchor(ONES, [ONES] * ranks)
    step = Step(graph, machine, Straight(), [], Options(interval=False), "made up", "measured")  # type: ignore[arg-type]
    return LiveCase(step, anchor, anchor.busy, share_host(graph, np.zeros(0)))


def record(graph: TaskGraph, machine: Platform, communication: float = 1.0, speed: float = 1.0):
    """Return what a profile at another speed would hold of a step; the host shows as gaps."""
    result = simulate(graph, machine, Straight(), communication_scale=communication)
    timeline = result.timeline
    shown = timeline[timeline["kind"] != "host"].copy()
    shown[["start_s", "end_s"]] *= speed
    return shown.assign(experiment="made-up"), result.summary.step_time_s


@pytest.mark.parametrize("speed", [1.0, 1.7])
def test_parts_are_what_each_model_was_made_to_miss(speed):
    case = make_case("blocking")
    timeline, measured_s = record(make_graph("blocking", 1.2, 3.0), MACHINE, 2.0, speed)
    table = attribute_errors({"made-up": case}, {"made-up": measured_s}, timeline)
    parts = table.set_index("part")["signed_time"]
    # One after the other, so each model's miss is its part, whatever the order.
    expected = {COMPUTE: -0.2 * 3.5, COMMUNICATION: -0.4, HOST: -0.4, REMAINDER: 0.0}
    assert parts.to_dict() == pytest.approx(expected, abs=1e-9)
    alone = table.set_index("part")["alone_s"]
    assert alone[COMPUTE] == pytest.approx(case.predict().step_time_s + 0.7)
    assert table["profile_factor"].unique() == pytest.approx(1 / speed)
    assert table["error"].sum() == pytest.approx(case.predict().step_time_s / measured_s - 1)


def test_a_plan_that_hides_has_its_overlap_exchanged():
    case = make_case("beside", SERIAL_MACHINE)
    assert case.hides and not make_case("blocking").hides
    timeline, measured_s = record(make_graph("beside"), MACHINE)
    table = attribute_errors({"made-up": case}, {"made-up": measured_s}, timeline)
    parts = table.set_index("part")["signed_time"]
    # All 0.4 s are hidden in truth, none in the prediction.
    assert parts[OVERLAP] == pytest.approx(0.4)
    assert parts.drop(OVERLAP).abs().max() == pytest.approx(0.0, abs=1e-9)


def test_half_hidden_is_half_hidden():
    timeline, measured_s = record(make_graph("beside"), MACHINE)
    at = (timeline["rank"] == 0) & (timeline["phase"] == "backward")
    begun = timeline["kind"] == "collective"
    middle = float(timeline.loc[begun, ["start_s", "end_s"]].iloc[0].mean())
    timeline.loc[at, "start_s"] = middle
    assert measure_parts(timeline, measured_s, beside=True).hidden == pytest.approx(0.75)


def test_messages_are_paired_and_last_from_when_both_ends_are_there():
    case = make_case("pipeline")
    timeline, measured_s = record(make_graph("pipeline"), MACHINE, 2.0)
    early = timeline["kind"] == "recv"
    timeline.loc[early, "start_s"] = 0.0  # a receiver may wait from the start
    found = measure_parts(timeline, measured_s, beside=case.hides)
    assert found.exchanges_s == pytest.approx(2 * case.exchanges_s)
    assert found.hidden is None
    lost = timeline[timeline["rank"] == 0]
    assert measure_parts(lost, measured_s, beside=False).exchanges_s is None
    assert measure_parts(timeline.head(0), measured_s, beside=False) is None


def test_own_time_of_a_collective_leaves_waiting_out():
    timeline, measured_s = record(make_graph("blocking"), MACHINE)
    waits = (timeline["kind"] == "collective") & (timeline["rank"] == 0)
    timeline.loc[waits, "start_s"] -= 1.0
    found = measure_parts(timeline, measured_s, beside=False)
    assert found.exchanges_s == pytest.approx(0.4)
    # The operator that ran until then has waited for it.
    assert found.compute_s[(0, "backward")] == pytest.approx(1.0)


def test_one_rank_is_all_compute_and_an_unprofiled_plan_all_remainder():
    cases = {"alone": make_case("single"), "lost": make_case("blocking")}
    empty = tables.empty("rank_timelines")
    table = attribute_errors(cases, {"alone": 3.0, "lost": 5.0}, empty)
    assert table["part"].tolist() == [COMPUTE, REMAINDER]
    assert table["signed_time"].tolist() == pytest.approx([0.7, -0.9])
    assert table["profile_factor"].isna().all()


def test_shares_depend_on_no_order_and_sum_to_the_change():
    sizes = {"a": 2.0, "b": 3.0, "c": 5.0}

    def predict(replaced):
        left = [size for name, size in sizes.items() if name not in replaced]
        return math.prod(left)

    found = share_change(list(sizes), predict)
    mean = dict.fromkeys(sizes, 0.0)
    for order in itertools.permutations(sizes):
        for at, name in enumerate(order):
            mean[name] += (predict(order[:at]) - predict(order[: at + 1])) / 6
    assert found == pytest.approx(mean)
    assert sum(found.values()) == pytest.approx(30.0 - 1.0)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (Settings(compute=1.1), Settings()),
        (Settings(host=2.0), Settings(host=0.0)),
        (Settings(bandwidth=0.5), Settings()),
        (Settings(latency=2.0), Settings()),
        (Settings(overlap=SERIAL), Settings(overlap=FULL)),
        (Settings(sharing=2.0), Settings(sharing=0.0)),
        (Settings(), Settings(anchor="none")),
    ],
)
def test_a_change_moves_the_step_the_right_way(slower, faster):
    case = replace(make_case("beside", SERIAL_MACHINE), factors=[SLOW, SLOW])
    assert case.predict_changed(slower) > case.predict_changed(faster)
    assert case.predict_changed(Settings()) == case.predict().step_time_s


def test_ranks_that_were_far_faster_together_than_alone_give_no_negative_times():
    case = make_case("beside", SERIAL_MACHINE)
    fast = {phase: 0.1 * factor for phase, factor in case.anchor.quiet.items()}
    assert replace(case, factors=[fast, fast]).predict_changed(Settings(sharing=2.0)) > 0


def test_only_what_an_experiment_has_is_changed():
    told = explain_live({"a": make_case("blocking"), "b": make_case("single")})
    changed = told[told["role"] == "sensitivity"].groupby("case")["parameter"].agg(set)
    assert "latency of collectives" in changed["a"] and "host's costs of parallel plans" in changed["a"]
    assert "overlap of collectives and compute" not in changed["a"], "nothing can hide"
    assert changed["b"] == {"compute time", "anchor at the session's steps of one rank"}


def test_hosts_share_is_of_operators_and_host_tasks_only():
    builder = TaskGraphBuilder()
    builder.add(0, "compute", "host", "h", duration_s=1.0)
    builder.add(0, "compute", "compute", "a", duration_s=2.0, op_id=1)
    builder.add(0, "compute", "compute", "a", duration_s=0.2, op_id=0)
    builder.add(0, "compute", "memcpy", "c", duration_s=1.0)
    share = share_host(builder.build(), np.array([0.5, 0.5]))
    assert share.tolist() == pytest.approx([1.0, 0.25, 1.0, 0.0])


@pytest.fixture
def run():
    """A divided error and the row that it belongs to."""
    timeline, measured_s = record(make_graph("blocking", 1.2, 3.0), MACHINE, 2.0)
    case = make_case("blocking")
    table = attribute_errors({"made-up": case}, {"made-up": measured_s}, timeline)
    row = dict.fromkeys(tables.ERRORS.names, 1.0) | {
        "experiment": "made-up",
        "workload": "w",
        "plan": "p",
        "set": "live",
        "batch": 4,
        "ranks": 2,
        "measured_s": measured_s,
        "simulated_s": case.predict().step_time_s,
        "measured_low_s": measured_s,
        "measured_high_s": 1.1 * measured_s,
        "low_s": 0.1,
        "high_s": 0.2,
        "relative_error": case.predict().step_time_s / measured_s - 1,
    }
    return table, pd.DataFrame([row]), explain_live({"made-up": case})


def test_the_section_shows_every_part_and_the_sum(run):
    table, errors, _ = run
    text = render_attribution(table, errors)
    for part in table["error"]:
        assert f'data-sort="{float(part)!r}"' in text
    assert float(errors["relative_error"].iloc[0]).__repr__() in text
    assert "over the 1 experiments on several ranks" in describe_attribution(table)
    assert "No step" in describe_attribution(table.assign(measured_by="", profile_factor=None))
    figure = draw_attribution(table, errors)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert sum(widths) == pytest.approx(100 * float(errors["relative_error"].iloc[0]))
    with pytest.raises(InputError, match="error of 'made-up' was not divided"):
        draw_attribution(table.head(0), errors)


def test_sensitivities_and_scores_take_the_experiments_as_one_set(run):
    _, errors, causes = run
    found = summarise_live_changes(errors, causes).set_index(["parameter", "setting"])
    step_s = float(errors["simulated_s"].iloc[0])
    assert found.loc[("compute time", "x 1.1"), "change"] == pytest.approx(0.1 * 3.7 / step_s)  # the host too
    other = errors.assign(experiment="b", plan="q", measured_s=2.0, simulated_s=9.0, trace_only_s=0.5)
    scores = score_experiments(pd.concat([errors, other])).set_index("model")
    assert scores.loc["trioflow", "pairs"] == 1
    assert scores.loc["trioflow", "rank_correlation"] == -1.0
    assert scores.loc["trace only", "rank_correlation"] == 1.0
    assert scores["coverage"].notna().tolist() == [True, False, False]


EXPERIMENT = {"experiment": "gpt-ddp2", "workload": "gpt2-tiny", "plan": "ddp2", "batch": 16}


def write_files(folder):
    """Write a run of one experiment whose profile is its prediction, 10 % slower; return files and the step."""
    trace = load_trace("gpt2-tiny-b8")
    trace = replace(trace, facts=replace(trace.facts, workload="gpt2-tiny"))
    graph = extrapolate(trace, make_plan(data=2), ProportionalModel())
    origin = TimesOrigin("c", "measured", [])
    graph.metadata = replace(graph.metadata, experiment="gpt-ddp2", operator_times=origin)
    save_trace(trace, folder / "operator_tables/gpt2-tiny-b8")
    graph.save(folder / "task_graphs/gpt-ddp2")
    samples = [
        {
            "platform": "p",
            "library": "l",
            "collective": "all_reduce",
            "ranks": 2,
            "message_bytes": size,
            "round": number,
            "time_ns": 10_000 + size // 10,
        }
        for size in (10**4, 10**6, 10**8)
        for number in range(3)
    ]
    model = fit_collective_model(pd.DataFrame(samples))
    model.save(folder / "collectives.json")
    (folder / "this-machine.yaml").write_text(
        "{name: this-machine, ranks: 2, communication_on_compute_stream: true, device: {name: d, kind: cpu, "
        "memory_bytes: {value: 1000000000, source: s}, peak_flop_per_s: {}}, links: ["
        + ", ".join(
            f"{{from: rank{a}, to: rank{1 - a}, bandwidth_bytes_per_s: {{value: 1.0e9, source: s}}, "
            "latency_s: {value: 1.0e-5, source: s}}"
            for a in (0, 1)
        )
        + "]}"
    )
    home = folder / "measurements/gpt2-tiny"
    batch = str(trace.facts.batch)
    told = {**graph.metadata.traced_phases_s[batch], "step": 1.0}
    write_json(home / "session.json", {"anchors": {batch: {"single": told, "busy": [told, told]}}})
    machine = load_platform(folder / "this-machine.yaml", 2)
    result = simulate(graph, machine, model)
    timeline = result.timeline
    timeline[["start_s", "end_s"]] *= 1.1
    shown = timeline[timeline["kind"] != "host"].assign(experiment="gpt-ddp2")
    tables.write_table(shown, "rank_timelines", home / "rank_timelines.parquet")
    step_s = result.summary.step_time_s
    rows = [
        {
            "workload": "gpt2-tiny",
            "series": "distributed",
            "plan": "ddp2",
            "batch": 16,
            "round": number,
            "rank": rank,
            "step_ns": s_to_ns(2 * step_s),
        }
        for number in range(3)
        for rank in (0, 1)
    ]
    tables.write_table(pd.DataFrame(rows), "measurements", home / "measurements.parquet")
    return [path for path in folder.rglob("*") if path.is_file()], step_s


def test_a_run_on_disk_is_divided_whole_or_not_at_all(tmp_path):
    files, step_s = write_files(tmp_path / "run")
    made = tmp_path / "made"
    made.mkdir()
    target, other = made / "attribution.parquet", made / "causes.parquet"
    for lost, words in (
        ("tasks.parquet", r"gpt-ddp2 has no tasks\.parquet"),
        ("trace.json", "gpt2-tiny has no trace"),
        ("collectives.json", "this machine has no collectives"),
        ("measurements.parquet", "gpt2-tiny has no measurements"),
    ):
        left = [file for file in files if file.name != lost]
        with pytest.raises(InputError, match=words):
            build_attribution([EXPERIMENT], left, target, other)
        assert not list(made.iterdir())
    build_attribution([EXPERIMENT], files, target, other)
    parts = tables.read_table(target, "attribution", ATTRIBUTION)
    # Everything was measured at half the predicted speed, evenly.
    assert parts["error"].sum() == pytest.approx(-0.5)
    sizes = parts.set_index("part")["signed_time"]
    assert sizes[COMPUTE] < -0.5 * step_s
    assert abs(sizes[REMAINDER]) < 0.05 * step_s
    causes = tables.read_table(other, "causes", CAUSES)
    assert set(causes["case"]) == {"gpt-ddp2"} and len(parts.attrs["inputs"]) > 5
    first = target.read_bytes()
    build_attribution([EXPERIMENT], files[::-1], target, other)
    assert tables.read_table(target, "attribution", ATTRIBUTION).equals(parts)
    assert first


def test_parts_that_cancel_are_told_beside_a_small_error_and_others_are_not():
    parts = [("a", -0.16), ("a", -0.14), ("a", 0.30), ("a", 0.001), ("b", 0.2), ("b", 0.1), ("c", 0.01), ("c", -0.01)]
    table = pd.DataFrame(parts, columns=["experiment", "error"])
    assert list_cancelled(table) == {"a": "\u221216, \u221214, +30 cancel"}
