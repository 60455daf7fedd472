"""The page of DistSim's evaluation, from a made-up run of one experiment on two ranks."""

import re

import pandas as pd
import pytest
from captured import with_steady_times
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import write_json
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Link, Platform, name_rank_node
from trioflow.measure.records import RECORDED_EVENTS, STEP_MARKS
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.sweeps.description import fill_values
from trioflow.sweeps.workshop import OK, PREDICTED, make_frame
from trioflow_evaluation.distsim.page import (
    CAPTIONS,
    build_distsim_page,
    draw_errors,
    draw_timestamps,
    list_activity,
    read_benchmarks,
)
from trioflow_evaluation.distsim.recorded import find_best_rates, predict_by_rates
from trioflow_evaluation.published.prediction import AnalyticalModel
from trioflow_evaluation.tables import ANALYTICAL

from evaluation.distsim.distsim_case import STEP_S, make_events, make_marks, make_timeline

PLANS = [
    {"plan": "single", "data": 1, "tensor": 1, "pipeline": 1},
    {"plan": "gpipe2", "data": 1, "tensor": 1, "pipeline": 2},
]
EXPERIMENTS = [
    {"experiment": "alone", "set": "live", "workload": "w", "plan": "single", "batch": 2},
    {"experiment": "x", "set": "live", "workload": "w", "plan": "gpipe2", "batch": 2},
]
BENCHMARKS = {
    "capture/w-b2": 10.0, "capture/w-large-b2": 1000.0, "merge/w-b2": 2.0, "partition/w": 0.5,
    "extrapolate/x": 1.0, "extrapolate/alone": 1.0, "simulate/x": 3.0, "simulate/alone": 2.0,
    "calibrate/w": 100.0, "fit_operators": 4.0, "fit_collectives": 1.0, "describe_machine": 1.0,
}  # fmt: skip


def write_run(folder):
    """Write what the workflow would leave; return the files by their kind."""
    home, search = folder / "measurements/w", folder / "studies/distsim_search.svg"
    tables.write_table(make_marks(), "m", home / "step_marks.parquet", schema=STEP_MARKS)
    tables.write_table(make_events(), "e", home / "recorded_events.parquet", schema=RECORDED_EVENTS)
    steps = [
        ("w", series, plan, 2, number, rank, round(STEP_S * 1e9))
        for series, plan, ranks in (("single", "single", 1), ("distributed", "single", 1), ("distributed", "gpipe2", 2))
        for number in range(3) for rank in range(ranks)
    ]  # fmt: skip
    frame = pd.DataFrame(steps, columns=tables.MEASUREMENTS.names)
    tables.write_table(frame, "measurements", home / "measurements.parquet")
    write_json(home / "session.json", {"mark_s": 1e-6, "ranks": 2})
    for name in ("x", "alone"):
        timeline = make_timeline(lambda rank, phase, number, time_s: time_s + 0.2 * rank)
        tables.write_table(timeline, "timeline", folder / f"timelines/{name}/timeline.parquet")
        write_json(folder / f"timelines/{name}/summary.json", {"simulator_wall_s": 0.25})
    for name, time_s in BENCHMARKS.items():
        file = folder / f"benchmarks/{name}.tsv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"s\th:m:s\n{time_s}\t0:00:00\n")
    rates = pd.DataFrame([("x", "gpipe2", 2, 1e9, 1e9, STEP_S / 2)], columns=ANALYTICAL.names)
    tables.write_table(rates, "a", folder / "analytical.parquet", schema=ANALYTICAL)
    rows = [
        {
            "scenario": m, **fill_values({"trace": "t", "platform": "p", "pipeline": 4, "micro_batches": m, "batch": m}),
            "workload": "g", "status": OK, "reason": "", **dict.fromkeys(PREDICTED), "step_time_s": 3.0 + m,
        }
        for m in (1, 2, 4)
    ]  # fmt: skip
    tables.write_table(make_frame(rows), "sweep_results", folder / "throughput.parquet")
    search.parent.mkdir()
    for suffix in (".svg", ".png"):
        search.with_suffix(suffix).write_text("a figure")
    return {
        "sessions": [home / "session.json"], "recordings": [home / "measurements.parquet"],
        "timelines": [folder / f"timelines/{n}/timeline.parquet" for n in ("x", "alone")],
        "benchmarks": sorted((folder / "benchmarks").rglob("*.tsv")),
        "analytical": [folder / "analytical.parquet"],
        "throughput": [folder / "throughput.parquet"], "search": [search],
    }  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distsim")
    files = write_run(folder)
    page = folder / "report/distsim.html"
    return build_distsim_page(files, EXPERIMENTS, PLANS, page), page


def test_errors_are_those_of_the_experiment_and_stand_beside_distsims(built) -> None:
    found, page = built
    assert set(found.timestamps["experiment"]) == {"x"}
    assert found.timestamps.loc[found.timestamps["rank"] == 1, "start_error"].tolist() == (
        pytest.approx([0.2 / STEP_S] * 5)
    )
    assert found.analytical["error"].tolist() == pytest.approx([-0.5])
    text = page.read_text()
    for words in ("1.71 %", "4.19 %", "3.51 %", "26.1 %", "12.9 %", "other cases", "uncalibrated"):
        assert words in text.replace("&nbsp;", " "), words
    assert "Megatron-LM's published curve is not in our data" in text.replace("&#x27;", "'")


def test_every_figure_is_there_says_what_was_measured_and_every_address_opens(built) -> None:
    _, page = built
    addresses = re.findall(r'<img src="([^"]+)"', page.read_text())
    assert {a.rpartition("/")[2] for a in addresses} == {f"{name}.svg" for name in CAPTIONS}
    for address in addresses:
        for suffix in (".svg", ".png"):
            assert (page.parent / address).with_suffix(suffix).stat().st_size > 0
    for name, caption in CAPTIONS.items():
        assert ("easured:" in caption) != ("Simulated only" in caption), name


def test_costs_are_of_the_workloads_own_jobs_and_all_its_ranks(built) -> None:
    costs = built[0].costs.iloc[0]
    assert (costs["capture_s"], costs["fit_s"]) == (12.0, 6.0), "not of another workload's trace"
    assert (costs["extrapolate_s"], costs["simulate_s"], costs["engine_s"]) == (2.5, 5.0, 0.5)
    assert costs["direct_s"] == pytest.approx(3 * STEP_S + 3 * 2 * STEP_S)
    assert (costs["steps"], costs["session_s"]) == (6, 200.0)
    assert costs["share"] == pytest.approx(12 / (9 * STEP_S))


def test_the_same_run_gives_the_same_bytes(built, tmp_path) -> None:
    page = tmp_path / "report/distsim.html"
    build_distsim_page(write_run(tmp_path), EXPERIMENTS, PLANS, page)
    for file in sorted(built[1].parent.rglob("*.*")):
        assert file.read_bytes() == (page.parent / file.relative_to(built[1].parent)).read_bytes()


def test_a_run_of_single_ranks_or_without_benchmarks_leaves_nothing(tmp_path) -> None:
    files = write_run(tmp_path)
    page = tmp_path / "report/distsim.html"
    with pytest.raises(InputError, match="no experiment has several ranks"):
        build_distsim_page(files, EXPERIMENTS[:1], PLANS, page)
    broken = tmp_path / "benchmarks/simulate/x.tsv"
    broken.write_text("")
    with pytest.raises(TableError, match="no benchmark"):
        build_distsim_page(files, EXPERIMENTS, PLANS, page)
    with pytest.raises(TableError, match="no benchmark"):
        read_benchmarks([tmp_path / "benchmarks/nowhere.tsv"])
    assert not page.parent.exists()


def test_figures_show_every_experiment_and_rank(built) -> None:
    found = built[0]
    (axes,) = draw_errors(list_activity(found.activity), "error", largest=0.04).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["x"]
    drawn = {float(x) for dots in axes.collections for x, _ in dots.get_offsets()}
    assert {float(error) for error in found.activity["activity_error"] * 100} <= drawn
    panels = [axes for axes in draw_timestamps(found.timestamps).axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in panels] == ["x"]
    assert len(panels[0].collections[0].get_offsets()) == 2 * len(found.timestamps)


def test_the_best_rates_are_of_long_operators_and_decide_every_time(transformer_trace) -> None:
    transformer_trace = with_steady_times(transformer_trace)
    rates = find_best_rates([transformer_trace])
    operators = transformer_trace.operators
    time_s = operators["device_ns"] / 1e9
    long = time_s >= 0.005 * time_s.sum()
    assert rates.flop_per_s == pytest.approx((operators["flop"] / time_s)[long].max())
    assert (rates.time_operators(operators)[long] <= 2 * time_s[long]).all()

    links = (
        Link(name_rank_node(0), name_rank_node(1), 1e30, 0.0),
        Link(name_rank_node(1), name_rank_node(0), 1e30, 0.0),
    )
    machine = Platform("free links", Device("chip", "cpu", 10**9, {}), 2, links)
    batch = transformer_trace.facts.batch
    alone_s = predict_by_rates([transformer_trace], rates, make_plan(), batch, machine, None)
    assert alone_s == pytest.approx(rates.time_operators(operators).sum(), rel=1e-3)

    plan, batch = make_plan(data=2), 2 * batch
    step_s = predict_by_rates([transformer_trace], rates, plan, batch, machine, None)
    assert step_s > alone_s, "gradients are copied into buckets and back"
    slow = AnalyticalModel(rates.flop_per_s / 10, rates.bytes_per_s / 10, "slow", "made up")
    slower_s = predict_by_rates([transformer_trace], slow, plan, batch, machine, None)
    assert slower_s == pytest.approx(10 * step_s, rel=0.01), "no recorded time counts"
    recorded = simulate(extrapolate(transformer_trace, plan, slow, batch=batch), machine).summary
    assert recorded.step_time_s != pytest.approx(slower_s)
