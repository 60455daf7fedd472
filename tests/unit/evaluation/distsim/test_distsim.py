"""Closed forms of a pipeline's throughput, against the engine and against made-up steps.

Activity errors of made-up steps whose deviations are known.

Timestamp errors of made-up steps whose deviations are known.

The page of DistSim's evaluation, from a made-up run of one experiment on two ranks.
"""

import itertools
import re

import numpy as np
import pandas as pd
import pytest
from captured import with_steady_times
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import write_json
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Link, Platform, name_rank_node
from trioflow.hardware.platform import BUILDERS
from trioflow.measure.records import RECORDED_EVENTS, STEP_MARKS
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.sweeps.description import fill_values
from trioflow.sweeps.scenarios import OK, PREDICTED, make_frame
from trioflow_evaluation.distsim.page import (
    CAPTIONS,
    build_distsim_page,
    draw_errors,
    draw_timestamps,
    list_activity,
    read_benchmarks,
)
from trioflow_evaluation.distsim.recorded import (
    align_sequences,
    bubble_throughput,
    compare_events,
    compare_marks,
    compare_throughput,
    fill_micro_batches,
    find_best_rates,
    map_clock,
    match_events,
    measure_spread,
    predict_by_rates,
    simulate_marks,
    split_formula,
)
from trioflow_evaluation.published.judge import AnalyticalModel
from trioflow_evaluation.tables import ANALYTICAL
from trioflow_evaluation.vtrain.model import PartTimes, build_step

from evaluation.distsim.distsim_case import PARTS, STEP_S, make_events, make_marks, make_timeline

STAGES = 4


def simulate_steps(counts, forward_s=(1.0,) * STAGES, update_s=0.0) -> pd.DataFrame:
    """Steps of a pipeline of some stages whose backward takes twice as long, by the engine."""
    links = BUILDERS["switch"](STAGES, 1e18, 0.0)
    machine = Platform("fast", Device("chip", "gpu", 10**9, {}), STAGES, tuple(links))
    times = PartTimes([[f] for f in forward_s], [[2 * f] for f in forward_s], [update_s] * STAGES, [0] * STAGES, 1)
    steps = [simulate(build_step(times, m), machine).summary.step_time_s for m in counts]
    return pd.DataFrame(
        {"micro_batches": counts, "batch": counts, "step_time_s": steps, "pipeline": STAGES, "reason": ""}
    )


def test_equal_stages_follow_the_bubble_alone() -> None:
    found = compare_throughput(simulate_steps([1, 2, 4, 8, 16]))
    assert found["simulated"].tolist() == pytest.approx(found["ideal"].tolist(), rel=1e-6)
    assert found["ideal"].iloc[0] == 1.0
    assert bubble_throughput(10**9, 4) == pytest.approx(4), "without a bubble all stages work"


def test_unequal_stages_are_as_few_equal_ones_as_the_slowest_allows() -> None:
    rows = simulate_steps([1, 2, 4, 8, 16], forward_s=(1.0, 1.0, 1.0, 2.0))
    parts = split_formula(rows)
    assert (parts.further_s, parts.stages) == pytest.approx((6.0, 2.5), rel=1e-6)
    assert parts.once_s == pytest.approx(0, abs=1e-5)
    found = compare_throughput(rows)
    assert [parts.throughput(m) for m in found["micro_batches"]] == pytest.approx(found["simulated"].tolist(), rel=1e-6)
    assert found["deviation"].iloc[-1] < -0.1


def test_what_the_second_micro_batch_adds_is_told() -> None:
    rows = simulate_steps([1, 2, 4, 8])
    rows.loc[rows["micro_batches"] > 1, "step_time_s"] += 1.5
    parts = split_formula(rows)
    assert parts.once_s == pytest.approx(1.5, rel=1e-5)
    assert parts.throughput(1) == 1.0


@pytest.mark.parametrize(
    ("change", "words"), [(lambda rows: rows.assign(step_time_s=[None] * 3, reason="too large"), "too large")]
)
def test_a_curve_without_times_or_norm_is_refused(change, words) -> None:
    with pytest.raises(InputError, match=words):
        compare_throughput(change(simulate_steps([1, 2, 4])))


def compare(events, marks=None, mark_s=0.0):
    marks = make_marks() if marks is None else marks
    return compare_events(events, marks, make_timeline(), mark_s).set_index("rank")


def test_a_recording_of_what_was_simulated_has_no_error() -> None:
    found = compare(make_events(), mark_s=1e-3)
    assert found["activity_error"].tolist() == pytest.approx([0, 0], abs=1e-9)
    assert found["matched"].tolist() == found["events"].tolist() == [18, 18]
    assert found["matched_time"].tolist() == pytest.approx([1, 1])
    assert found["step_error"].tolist() == pytest.approx([0, 0])
    assert found["mark_slowdown"].tolist() == pytest.approx([5e-3 / STEP_S] * 2)


def test_events_of_one_rank_that_are_late_are_its_error_alone() -> None:
    late = make_events(lambda rank, phase, number, time_s: time_s + 0.3 * rank)
    found = compare(late)
    compute, ends = 14, 14 + 18
    assert found.loc[1, "start_error"] == pytest.approx(0.3 / STEP_S)
    assert found.loc[1, "activity_error"] == pytest.approx(0.3 / STEP_S * 2 * compute / ends)
    assert found.loc[0, "activity_error"] == pytest.approx(0, abs=1e-9)


def test_a_message_counts_by_its_end() -> None:
    events = make_events()
    messages = events["kind"] != "compute"
    early = events.copy()
    early.loc[messages, "start_s"] -= 1.0
    assert compare(early)["activity_error"].max() == pytest.approx(0, abs=1e-9)
    late = events.copy()
    late.loc[messages, "end_s"] += 0.1
    assert compare(late)["activity_error"].tolist() == pytest.approx([0.1 / STEP_S * 4 / 32] * 2)


def test_ranks_and_micro_batches_that_are_mixed_up_are_errors() -> None:
    swapped = make_events()
    swapped["rank"] = 1 - swapped["rank"]
    assert compare(swapped)["activity_error"].min() > 0.1
    mixed = make_events()
    forward = (mixed["phase"] == "forward") & (mixed["kind"] == "compute")
    mixed.loc[forward, "micro_batch"] = 1 - mixed.loc[forward, "micro_batch"]
    shifted = 2 * 6 * 1.0 / 32 / STEP_S
    assert compare(mixed)["activity_error"].tolist() == pytest.approx([shifted] * 2)


def test_what_one_side_lacks_shifts_nothing_and_is_told() -> None:
    events = make_events()
    extra = events[events["name"] == "aten::gelu"].assign(name="aten::detach")
    more = pd.concat([events, extra], ignore_index=True)
    found = compare(more)
    assert found["activity_error"].max() == pytest.approx(0, abs=1e-9)
    assert found["matched"].tolist() == [18, 18] and found["events"].tolist() == [20, 20]
    assert found["matched_time"].max() < 1
    fewer = events.drop(index=events.index[(events["name"] == "aten::mm") & (events["rank"] == 0)][0])
    found = compare(fewer)
    assert found.loc[0, "matched"] == 17
    assert found["activity_error"].max() < 0.1, "only the place of one of two equal names is open"


def test_collectives_are_left_open_where_their_number_differs() -> None:
    events, timeline = make_events(), fill_micro_batches(make_timeline())
    own = events[events["rank"] == 0]
    sends = own.index[own["kind"] == "send"]
    pairs = match_events(own.drop(index=sends[0]), timeline[timeline["rank"] == 0])
    assert not pairs["recorded"].isin(sends).any()
    assert len(pairs) == 18 - 2


def test_the_profilers_own_time_is_taken_out() -> None:
    def slow(rank: int, phase: str, number: int, time_s: float) -> float:
        return 1.5 * time_s

    events = make_events(slow)
    messages = events["kind"] != "compute"
    events.loc[messages, ["start_s", "end_s"]] *= 1.5
    found = compare(events, make_marks(profiled=slow))
    assert found["start_error"].max() == pytest.approx(0, abs=1e-9)
    assert found["profiler_slowdown"].tolist() == pytest.approx([0.5] * 2)
    assert found["profiled_error"].min() > 0.1


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 1, 3], [2, 1, 3, 1], 3),
        ([1, 9, 2, 9, 3, 9], [1, 2, 3], 3),
        ([1, 2], [2, 1], 1),
    ],
)
def test_the_longest_common_sequence_rises_and_agrees(first, second, size) -> None:
    pairs = align_sequences(np.array(first, dtype=int), np.array(second, dtype=int))
    assert len(pairs) == size
    assert all(first[i] == second[j] for i, j in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(pairs))


def compare_both(marks, timeline=None):
    found = compare_marks(marks, make_timeline() if timeline is None else timeline, "x", "gpipe2")
    return found.set_index(["rank", "phase", "micro_batch"])


def test_a_step_that_runs_as_simulated_has_no_error_and_every_part_is_there() -> None:
    found = compare_both(make_marks())
    assert set(found.index) == {(r, p, m) for r, parts in PARTS.items() for p, m, *_ in parts}
    assert found[["start_error", "end_error"]].max().max() == pytest.approx(0, abs=1e-12)
    assert (found["stage"] == found.index.get_level_values("rank")).all()
    assert found.loc[(1, "backward", 1), "simulated_end_s"] == pytest.approx(7.5)
    assert (found["rounds"] == 3).all()


def test_a_part_that_begins_late_and_ends_later_has_just_these_errors() -> None:
    def late(rank: int, phase: str, number: int, time_s: float) -> float:
        if (rank, phase, number) == (1, "backward", 0):
            return time_s + (0.1 if time_s == 3.5 else 0.5)
        return time_s

    found = compare_both(make_marks(late))
    row = found.loc[(1, "backward", 0)]
    assert (row["start_bias"], row["end_bias"]) == pytest.approx((-0.1 / STEP_S, -0.5 / STEP_S))
    assert (row["start_error"], row["end_error"]) == pytest.approx((0.1 / STEP_S, 0.5 / STEP_S))
    others = found.drop(index=[(1, "backward", 0)])
    assert others[["start_error", "end_error"]].max().max() == pytest.approx(0, abs=1e-12)


def test_errors_are_medians_of_rounds_not_errors_of_medians() -> None:
    marks = make_marks()
    chosen = (marks["phase"] == "forward") & (marks["rank"] == 1) & (marks["micro_batch"] == 1)
    for number, shift_s in enumerate((-0.4, 0.4, 0.3)):
        mine = chosen & (marks["round"] == number)
        marks.loc[mine, "start_ns"] += round(shift_s * 1e9)
    row = compare_both(marks).loc[(1, "forward", 1)]
    assert row["start_error"] == pytest.approx(0.4 / STEP_S)
    assert row["start_bias"] == pytest.approx(-0.3 / STEP_S)


def test_marks_of_ranks_and_micro_batches_that_are_mixed_up_are_errors() -> None:
    swapped = make_marks()
    swapped["rank"] = 1 - swapped["rank"]
    assert compare_both(swapped)["start_error"].max() > 0.1
    mixed = make_marks()
    forward = mixed["phase"] == "forward"
    mixed.loc[forward, "micro_batch"] = 1 - mixed.loc[forward, "micro_batch"]
    errors = compare_both(mixed)["start_error"]
    assert errors.xs("forward", level="phase").min() == pytest.approx(1 / STEP_S)
    assert errors.xs("backward", level="phase").max() == pytest.approx(0, abs=1e-12)


def test_a_clock_that_starts_elsewhere_is_seen() -> None:
    moved = make_marks(lambda rank, phase, number, time_s: time_s + (0.2 if rank else 0.0))
    found = compare_both(moved)["start_bias"]
    assert found.xs(1, level="rank").tolist() == pytest.approx([-0.2 / STEP_S] * 5)
    assert found.xs(0, level="rank").abs().max() == pytest.approx(0, abs=1e-12)


def test_messages_are_no_part_but_exchanged_gradients_are() -> None:
    timeline = make_timeline()
    alone = timeline[timeline["micro_batch"].fillna(0) == 0]
    reduce = alone.iloc[[0]].assign(
        rank=1, kind="collective", phase="backward", start_s=5.5, end_s=6.5, micro_batch=pd.array([pd.NA], "Int64")
    )
    marks = simulate_marks(pd.concat([alone, reduce])).set_index(["rank", "phase", "micro_batch"])
    assert marks.loc[(1, "backward", 0), "end_s"] == 6.5, "the only micro-batch waits for them"
    assert marks.loc[(1, "forward", 0), "start_s"] == 1.5, "the message came before"
    several = fill_micro_batches(pd.concat([timeline, reduce]))
    assert several.iloc[-1]["micro_batch"] is pd.NA


@pytest.mark.parametrize("side", ["recording", "simulation"])
def test_a_part_that_one_side_lacks_is_named(side: str) -> None:
    marks, timeline = make_marks(), make_timeline()
    for_good = {"recording": marks, "simulation": timeline}[side]
    gone = (for_good["rank"] == 1) & (for_good["phase"] == "backward")
    gone &= for_good["micro_batch"] == 1
    kept = for_good[~gone.fillna(False)]
    with pytest.raises(InputError, match=f"the {side} has no backward of micro-batch 1 on rank 1"):
        compare_both(*((kept, timeline) if side == "recording" else (marks, kept)))


def test_without_rounds_of_marks_alone_there_is_nothing_to_compare() -> None:
    marks = make_marks()
    with pytest.raises(InputError, match="no round of x"):
        compare_both(marks[marks["recording"] == "profile"])


def test_the_spread_of_rounds_is_theirs_alone() -> None:
    marks = make_marks()
    assert measure_spread(marks) == {0: 0, 1: 0}
    mine = (marks["rank"] == 1) & (marks["round"] == 2) & (marks["phase"] != "")
    marks.loc[mine, ["start_ns", "end_ns"]] += round(0.3e9)
    assert measure_spread(marks) == pytest.approx({0: 0, 1: 0.3 / STEP_S / 3})


def test_a_slower_profiled_step_is_mapped_back_part_by_part() -> None:
    def slow(rank: int, phase: str, number: int, time_s: float) -> float:
        return 2 * time_s if time_s <= 2 else time_s + 2

    knots, plain_s = map_clock(make_marks(profiled=slow), 0)
    assert np.interp([0.0, 2.0, 4.0, 9.0, 12.0], knots, plain_s) == pytest.approx([0, 1, 2, 7, 10])


PLANS = [
    {"plan": "single", "data": 1, "tensor": 1, "pipeline": 1},
    {"plan": "gpipe2", "data": 1, "tensor": 1, "pipeline": 2},
]
EXPERIMENTS = [
    {"experiment": "alone", "set": "live", "workload": "w", "plan": "single", "batch": 2},
    {"experiment": "x", "set": "live", "workload": "w", "plan": "gpipe2", "batch": 2},
]
BENCHMARKS = {
    "capture/w-b2": 10.0,
    "capture/w-large-b2": 1000.0,
    "merge/w-b2": 2.0,
    "partition/w": 0.5,
    "extrapolate/x": 1.0,
    "extrapolate/alone": 1.0,
    "simulate/x": 3.0,
    "simulate/alone": 2.0,
    "calibrate/w": 100.0,
    "fit_operators": 4.0,
    "fit_collectives": 1.0,
    "describe_machine": 1.0,
}


def write_run(folder):
    """Write what the workflow would leave; return the files by their kind."""
    home, search = folder / "measurements/w", folder / "studies/distsim_search.svg"
    tables.write_table(make_marks(), "m", home / "step_marks.parquet", schema=STEP_MARKS)
    tables.write_table(make_events(), "e", home / "recorded_events.parquet", schema=RECORDED_EVENTS)
    steps = [
        ("w", series, plan, 2, number, rank, round(STEP_S * 1e9))
        for series, plan, ranks in (("single", "single", 1), ("distributed", "single", 1), ("distributed", "gpipe2", 2))
        for number in range(3)
        for rank in range(ranks)
    ]
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
            "scenario": m,
            **fill_values({"trace": "t", "platform": "p", "pipeline": 4, "micro_batches": m, "batch": m}),
            "workload": "g",
            "status": OK,
            "reason": "",
            **dict.fromkeys(PREDICTED),
            "step_time_s": 3.0 + m,
        }
        for m in (1, 2, 4)
    ]
    tables.write_table(make_frame(rows), "sweep_results", folder / "throughput.parquet")
    search.parent.mkdir()
    for suffix in (".svg", ".png"):
        search.with_suffix(suffix).write_text("a figure")
    return {
        "sessions": [home / "session.json"],
        "recordings": [home / "measurements.parquet"],
        "timelines": [folder / f"timelines/{n}/timeline.parquet" for n in ("x", "alone")],
        "benchmarks": sorted((folder / "benchmarks").rglob("*.tsv")),
        "analytical": [folder / "analytical.parquet"],
        "throughput": [folder / "throughput.parquet"],
        "search": [search],
    }


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
