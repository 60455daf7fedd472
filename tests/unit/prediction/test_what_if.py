"""What a faster network, slower operators and a slow rank make of a step.

Draws of a predicted step: deterministic, without spread the step itself, and comparable between plans.

What measured steps say of a machine: numbers that were put into it come out again, and the cause is named.

Where a simulated step goes.
"""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from few_facts import few_facts
from same_model import ProportionalModel
from trioflow import Options, load_named_platform, tables
from trioflow.base.errors import InputError
from trioflow.base.precision_recipes import NANOTRON
from trioflow.cli.main import main
from trioflow.costmodel.uncertainty import Spread
from trioflow.engine.result import measure_concurrency
from trioflow.engine.simulate import SimulationOptions
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.hardware.platform import EXCHANGE, Corrections, correct_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.task_graph import GraphMetadata, TaskGraph, TaskGraphBuilder
from trioflow.prediction.assembly import Prediction, predict
from trioflow.prediction.breakdown import build_breakdown
from trioflow.prediction.explain import MeasuredTime, explain
from trioflow.prediction.step import SessionAnchor, apply_factors, choose_anchor, settle_contention
from trioflow.trace.store import Trace, load_trace

TRACE, PLATFORM = "gpt2-tiny-b8", "dgx-h100"


def ask(**options: object) -> Prediction:
    return predict(TRACE, named_plan("ddp", 4), PLATFORM, interval=False, **options)  # type: ignore[arg-type]


def test_operators_take_their_factor_whether_ranks_are_folded_or_not() -> None:
    plain = ask()
    tasks = plain.task_graph.tasks
    meant = (tasks["kind"] == "compute") & tasks["name"].str.endswith("::linear") & (tasks["rank"] == 0)
    more_s = float(tasks["duration_s"][meant].sum())
    assert more_s > 0
    for fold in (True, False):
        scaled = ask(operator_scales=[("linear", 2.0)], fold=fold)
        assert scaled.compute_s == pytest.approx(plain.compute_s + more_s)
        assert "assumed: operators linear take 2 times as long" in scaled.warnings
    undone = ask(operator_scales=[("*", 2.0), ("*", 0.5)])
    assert undone.compute_s == pytest.approx(plain.compute_s)


def test_the_others_wait_for_a_slow_rank() -> None:
    plain, slow = ask(), ask(slow_ranks=[(3, 2.0)])
    assert slow.compute_s == pytest.approx(2 * plain.compute_s)
    assert slow.step_time_s > 1.9 * plain.step_time_s
    by_rank = slow.breakdown("rank").set_index("name")["compute_s"]
    assert by_rank["3"] == pytest.approx(2 * by_rank["0"])
    both = ask(slow_ranks=[(3, 2.0)], compute_scale=1.5)
    assert both.compute_s == pytest.approx(3 * plain.compute_s), "a slow rank left out what all take longer"


def test_the_network_is_as_many_times_as_fast(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", TRACE, "--plan", "ddp", "--ranks", "4", "--platform", PLATFORM]
    assert ask(communication_scale=0.5).communication_s == pytest.approx(ask().communication_s / 2)
    assert main([*words, "--scale-network", "2"]) == 0
    assert "assumed: network 2 times as fast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--scale-operator", "Norm", "2"], "did you mean '*norm*', which aten::"),
        (["--scale-operator", "conv9d", "2"], "no operator of the step has such a name; the step has aten::"),
        (["--scale-operator", "mm", "two"], "'two' is not a number"),
        (["--slow-rank", "4", "2"], "the plan has ranks 0 to 3"),
        (["--slow-rank", "1", "0"], "--slow-rank 1: the factor 0 is not positive"),
        (["--scale-network", "nan"], "--scale-network: the factor nan is not positive"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = ["simulate", TRACE, "--plan", "ddp", "--ranks", "4", "--platform", PLATFORM]
    assert main([*step, *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_processor_s_times_are_not_a_gpu_s() -> None:
    """The shipped trace's step takes 0.4 s on one core."""
    answer = ask()
    assert answer.step_time_s < 0.1
    assert answer.confidence == "extrapolated"
    assert any("are a processor" in warning for warning in answer.warnings)


WIDE = Spread(0.01, 0.05, 0.02, 0.02, 0.05)


def draw(plan, **changes):
    return predict(TRACE, plan, PLATFORM, batch=32, **changes).draws


def test_without_spread_every_draw_is_the_simulated_step() -> None:
    told = predict(TRACE, named_plan("ddp", 4), PLATFORM, draws=3, spread=Spread())
    assert told.draws.step_s == pytest.approx([told.step_time_s] * 3, rel=1e-12)
    assert all(one["wait_s"] == pytest.approx(one["steady_wait_s"]) for one in told.draws.waits)


def test_a_seed_gives_its_steps_again_and_folding_changes_none() -> None:
    plan = named_plan("ddp", 4)
    first = draw(plan, draws=9, seed=3).step_s
    assert np.array_equal(first, draw(plan, draws=9, seed=3).step_s)
    assert first == pytest.approx(draw(plan, draws=9, seed=3, fold=False).step_s, rel=1e-12)
    assert not np.array_equal(first, draw(plan, draws=9, seed=4).step_s)


def test_ranks_that_differ_wait_and_the_slowest_sets_the_step() -> None:
    told = predict(TRACE, named_plan("ddp", 8), PLATFORM, draws=200, spread=WIDE)
    assert told.draws.expected_s > told.step_time_s * 1.02
    (data,) = told.draws.waits
    assert (data["group"], data["exchanges"] > 0) == ("data", True)
    assert data["wait_s"] > data["steady_wait_s"]
    shares = [one["share"] for one in told.draws.late]
    assert len(shares) == 8
    assert sum(shares) == pytest.approx(1.0, abs=0.02)


def test_what_is_new_in_each_operator_averages_out_but_not_between_exchanges() -> None:
    """Tensor-parallel ranks meet after a few operators: they lose what one rank alone does not."""
    noise, steady = Spread(operator_log=0.3), Spread()
    gains = []
    for plan in (named_plan("single", 1), named_plan("tp", 2)):
        drawn, told = (
            predict(TRACE, plan, PLATFORM, draws=20, spread=one, batch=8).draws.step_s for one in (noise, steady)
        )
        gains.append(drawn.mean() / told.mean() - 1)
        assert len(set(drawn.tolist())) == 20
    assert abs(gains[0]) < gains[1] / 3


def test_stages_of_a_replica_share_its_micro_batches() -> None:
    """Only the spread of micro-batches: a pipeline without replicas has no rank that differs from others."""
    plan = make_plan(pipeline=2, micro_batches=1, schedule="gpipe")
    told = predict(TRACE, plan, PLATFORM, draws=40, spread=Spread(micro_batch_log=0.1), batch=8)
    step = predict(TRACE, plan, PLATFORM, draws=40, spread=Spread(step_log=0.1), batch=8)
    # One micro-batch in all passes spreads the step as a factor on the whole step does.
    assert np.log(told.draws.step_s).std() == pytest.approx(np.log(step.draws.step_s).std(), rel=0.5)


def test_two_plans_are_compared_draw_by_draw() -> None:
    ours = draw(make_plan(data=4), draws=50, seed=1)
    slow = draw(make_plan(data=4), draws=50, seed=1, slow_ranks=[(0, 2.0)])
    assert (ours.beats(slow), slow.beats(ours), ours.beats(ours)) == (1.0, 0.0, 0.5)
    with pytest.raises(InputError, match="drawn apart"):
        ours.beats(draw(make_plan(data=4), draws=50, seed=2))


def test_the_command_draws_what_python_draws_and_nothing_without(capsys) -> None:
    words = ["simulate", TRACE, "--plan", "ddp", "--ranks", "4", "--platform", PLATFORM]
    assert main([*words, "--draws", "20", "--seed", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["draws"] == predict(TRACE, named_plan("ddp", 4), PLATFORM, draws=20, seed=5).draws.to_dict()
    assert main([*words, "--draws", "20"]) == 0
    text = capsys.readouterr().out
    assert "sampled" in text
    assert "of its exchanges" in text
    assert main([*words, "--json"]) == 0
    assert "draws" not in json.loads(capsys.readouterr().out)
    assert main([*words, "--draws", "-1"]) == 2


def phases(forward, backward, optimizer):
    return {"forward": forward, "backward": backward, "optimizer": optimizer}


SESSION = {
    "anchors": {
        "4": {"single": phases(1.1, 1.1, 1.1), "busy": [phases(1.2, 1.2, 1.2), phases(1.3, 1.3, 2.6)]},
        "16": {"single": phases(3.0, 3.0, 3.0), "busy": [phases(3.2, 3.2, 3.2), phases(3.6, 3.6, 3.6)]},
    }
}
TRACED = {"4": phases(1.0, 1.0, 1.0), "16": phases(2.0, 2.0, 2.0)}


def anchor_of(ranks, **shares):
    shares = {batch.removeprefix("b"): share for batch, share in shares.items()}
    metadata = GraphMetadata(ranks=ranks, trace_shares=shares, traced_phases_s=TRACED)
    return choose_anchor(SESSION, metadata)


LINKS = (Link("rank0", "rank1", 1e9, 0.0), Link("rank1", "rank0", 1e9, 0.0))
ONE_RANK = Platform("two", Device("d", "cpu", 10**9, {}), 2, LINKS)


def test_one_rank_is_anchored_on_the_quiet_step():
    assert anchor_of(1, b4=1.0) == SessionAnchor(phases(1.1, 1.1, 1.1), [phases(1.1, 1.1, 1.1)])


def test_several_ranks_have_their_own_busy_phases():
    anchor = anchor_of(2, b4=1.0)
    assert anchor.quiet == phases(1.1, 1.1, 1.1)
    assert anchor.busy == [phases(1.2, 1.2, 1.2), phases(1.3, 1.3, 2.6)]


def test_between_two_traces_the_anchors_mix_by_their_share_of_time():
    anchor = anchor_of(2, b4=0.25, b16=0.75)
    assert anchor.quiet["forward"] == pytest.approx(0.25 * 1.1 + 0.75 * 1.5)
    assert anchor.busy[1]["optimizer"] == pytest.approx(0.25 * 2.6 + 0.75 * 1.8)


def test_factors_go_to_their_rank_and_phase():
    builder = TaskGraphBuilder()
    for rank in (0, 1):
        builder.add(rank, "compute", "compute", "a", duration_s=1.0, phase="forward")
        builder.add(rank, "compute", "memcpy", "b", duration_s=1.0, phase="backward")
        builder.add(rank, "compute", "host", "c", duration_s=1.0)
    graph = apply_factors(builder.build(), [phases(2.0, 3.0, 5.0), phases(7.0, 11.0, 13.0)])
    assert graph.tasks["duration_s"].tolist() == [2.0, 5.0, 5.0, 7.0, 13.0, 13.0]


def timeline(*tasks):
    rows = [{"rank": r, "stream": "compute", "kind": "compute", "start_s": a, "end_s": b} for r, a, b in tasks]
    return pd.DataFrame(rows)


def test_concurrency_is_the_share_of_compute_beside_others():
    assert measure_concurrency(timeline((0, 0.0, 4.0), (1, 3.0, 5.0))) == [0.25, 0.5]
    assert measure_concurrency(timeline((0, 0.0, 1.0), (1, 1.0, 2.0))) == [0.0, 0.0]
    assert measure_concurrency(timeline((0, 0.0, 1.0))) == [0.0]
    three = timeline((0, 0.0, 2.0), (1, 0.0, 1.0), (2, 0.0, 2.0))
    assert measure_concurrency(three) == [0.75, 1.0, 0.75]


@pytest.mark.parametrize(("chained", "factor"), [(False, 2.0), (True, 1.0)])
def test_ranks_slow_each_other_only_while_both_compute(chained, factor):
    builder = TaskGraphBuilder()
    first = builder.add(0, "compute", "compute", "a", duration_s=1.0)
    builder.add(1, "compute", "compute", "b", duration_s=1.0, after=[first] if chained else [])
    anchor = SessionAnchor(phases(1.0, 1.0, 1.0), [phases(2.0, 2.0, 2.0)] * 2)
    factors = settle_contention(builder.build(), ONE_RANK, None, anchor, SimulationOptions())
    assert factors == [phases(factor, factor, factor)] * 2


def test_modules_come_from_the_trace_that_the_graph_names():
    trace = load_trace("gpt2-tiny-b8")
    small = replace(trace, facts=replace(trace.facts, batch=2))
    for batch, found in ((4, small), (16, trace)):  # two replicas
        graph = extrapolate([trace, small], make_plan(data=2), ProportionalModel(), batch=batch)
        assert graph.metadata.traced_batch == found.facts.batch


def step(pieces: int, work_s: float, launches: int, nodes: int, corrections: Corrections) -> float:
    """Return the time of a step of our own: micro-batches that compute or wait for the host, then messages [s]."""
    some = dict(corrections)
    work_s *= some.get("compute", 1.0)
    host_s = launches * 30e-6 * some.get("launches", 1.0)
    bytes_s = 0.05 * some.get("between_nodes", 1.0) * (nodes > 1)
    steps_s = 40 * (nodes - 1) * some.get("between_nodes_step_s", 0.0)
    inside_s = 0.02 * some.get("communication", 1.0)
    return (
        pieces * (max(work_s, host_s) + inside_s + some.get("micro_batch_s", 0.0)) + max(bytes_s - 0.02, 0.0) + steps_s
    )


ROWS = ((1, 0.2, 1000, 1), (8, 0.05, 1000, 8), (2, 0.01, 4000, 4), (1, 0.1, 100, 32))


@pytest.mark.parametrize(
    ("truth", "cause"),
    [
        ({"between_nodes": 6.0}, "network"),
        ({"between_nodes_step_s": 75e-6}, "network"),
        ({"micro_batch_s": 1.2}, "engine"),
        ({"launches": 2.5}, "launches"),
        ({"compute": 1.3}, "compute"),
        ({}, ""),
    ],
)
def test_what_deviates_is_named_and_other_steps_come_right(truth: dict[str, float], cause: str) -> None:
    rows = [MeasuredTime(f"{row}", step(*row, truth), partial(step, *row), pieces=row[0]) for row in ROWS]
    explanation = explain(rows)
    assert explanation.cause == cause
    assert {one.component.name for one in explanation.estimates if one.deviates} == set(truth)
    for one in explanation.estimates:
        if one.component.name in truth:
            assert one.low < truth[one.component.name] < one.high
    other = (4, 0.08, 2000, 16)
    measured, before, after = (step(*other, some) for some in (truth, {}, explanation.corrections))
    assert abs(after / measured - 1) <= max(abs(before / measured - 1) / 2, 0.01)


@pytest.mark.parametrize(
    ("row", "measured_s", "cause"),
    [((8, 0.05, 1000, 8), 9.0, "engine"), ((1, 0.05, 100, 64), 0.3, "network"), ((8, 0.05, 1000, 1), 0.58, "")],
)
def test_one_step_is_explained_by_what_is_likeliest(
    row: tuple[int, float, int, int], measured_s: float, cause: str
) -> None:
    explanation = explain([MeasuredTime("one", measured_s, partial(step, *row), pieces=row[0])])
    assert explanation.cause == cause
    assert explanation.after_s[0] == pytest.approx(measured_s, rel=0.05)


def test_corrections_change_the_step_where_they_belong() -> None:
    """A micro-batch's time is there once for each, bytes between nodes only where there are nodes."""
    options = Options(sequence=128, interval=False, memory=False)
    machine = load_named_platform("dgx-h100", 16)

    def ask(ranks: int, corrections: Corrections) -> float:
        plan = make_plan(data=ranks, accumulate=4)
        corrected = correct_platform(replace(machine, ranks=ranks), corrections)
        return predict("gpt2", plan, corrected, batch=4 * ranks, options=options).step_time_s

    alone_s, two_s = ask(8, {}), ask(16, {})
    assert ask(16, {"micro_batch_s": 0.5}) == pytest.approx(two_s + 2.0)
    assert ask(8, {"between_nodes": 50.0}) == alone_s
    assert ask(16, {"between_nodes": 50.0}) > two_s
    assert ask(16, {"between_nodes_step_s": 1e-2}) > two_s + 0.1
    assert ask(8, {"compute": 100.0}) > 5 * alone_s


def test_corrections_are_added_to_those_that_a_platform_has() -> None:
    platform = replace(load_named_platform("dgx-h100", 16), corrections={"compute": 2.0})
    more = {"compute": 1.5, "between_nodes_step_s": 1e-5, "micro_batch_s": 0.1, "launches": 3.0}
    again = correct_platform(platform, more)
    assert again.corrections == {"compute": 3.0, "between_nodes_step_s": 1e-5}
    assert again.host["micro_batch_s"] == 0.1
    assert again.host["launch_pytorch_s"] == 3 * platform.host["launch_pytorch_s"]


def test_what_an_exchange_takes_reaches_the_hosts_of_nanotrons_runs_over_nodes() -> None:
    platform, plan = load_named_platform("p5-h100", 16), make_plan(data=2, tensor=8)
    slower = correct_platform(platform, {EXCHANGE: 300e-6})
    key = "tensor_parallel_forward_s"
    before, after = (one.host_of(plan, NANOTRON).get(key, 0.0) for one in (platform, slower))
    assert after - before == pytest.approx(8 * 300e-6)


@pytest.fixture
def broken_down():
    """Two ranks of one stage each: an operator of h.0.a, one of h.1, an all-reduce, an update."""
    builder = TaskGraphBuilder()
    times = []
    for rank in (0, 1):
        fields = {"stage": rank, "micro_batch": 0}
        builder.add(rank, "compute", "compute", "mm", phase="forward", op_id=0, duration_s=1.0, **fields)
        builder.add(rank, "compute", "compute", "mm", phase="backward", op_id=1, duration_s=2.0, **fields)
        builder.add(
            rank,
            "communication",
            "collective",
            "all_reduce",
            phase="backward",
            message_bytes=100 * (rank + 1),
            group="0,1",
            match_id=0,
            **fields,
        )
        builder.add(rank, "compute", "compute", "add_", phase="optimizer", op_id=2, duration_s=1.0, **fields)
        times += [(0.0, 1.0), (1.0, 3.0 + rank), (3.0, 6.0), (6.0, 7.0)]
    graph = builder.build()
    timeline = graph.tasks.assign(start_s=[start for start, _ in times], end_s=[end for _, end in times])[
        tables.TIMELINE.names
    ]
    operators = pd.DataFrame(
        {
            "module": ["h.0.a", "h.1", "h.0.b"],
            "phase": ["forward", "backward", "optimizer"],
            "output_shapes": [[[8, 4]], [[2]], [[3]]],
        }
    )
    gradients = [{"module": "h.0.a", "size_bytes": 64, "ready_after_op_id": 1}]
    return graph, timeline, Trace(operators, pd.DataFrame(), few_facts(gradients=gradients))


def test_ranks_add_up_to_the_step(broken_down):
    found = build_breakdown(*broken_down, "rank").set_index("name")
    assert found.index.tolist() == ["0", "1"]
    assert found["compute_s"].tolist() == [4.0, 5.0]
    assert found["communication_s"].tolist() == [3.0, 3.0]
    assert found["exposed_communication_s"].tolist() == [3.0, 2.0], "rank 1 still computed"
    assert found["idle_s"].tolist() == [0.0, 0.0]
    assert found["message_bytes"].tolist() == [100, 200]
    assert found["optimizer_s"].tolist() == [1.0, 1.0]
    assert found["gradient_bytes"].tolist() == [64, 64], "each rank finishes the one gradient"


def test_stages_are_told_apart_and_without_a_pipeline_there_is_one(broken_down):
    graph, timeline, trace = broken_down
    assert build_breakdown(graph, timeline, trace, "stage")["name"].tolist() == ["0", "1"]
    alone = timeline.assign(stage=pd.array([None] * len(timeline), dtype="Int64"))
    (row,) = build_breakdown(graph, alone, trace, "stage").to_dict("records")
    assert (row["name"], row["ranks"], row["compute_s"]) == ("0", 2, 4.5)
    assert row["gradient_bytes"] == 64, "one gradient, although two ranks finish it"


def test_what_a_host_launches_beside_the_device_is_no_compute_of_a_phase():
    builder = TaskGraphBuilder()
    for stream, kind in (("host", "host"), ("compute", "compute"), ("compute", "host")):
        builder.add(0, stream, kind, "mm", phase="forward", op_id=0, duration_s=1.0)
    graph = builder.build()
    times = {"start_s": [0.0, 1.0, 2.0], "end_s": [1.0, 2.0, 3.0]}
    timeline = graph.tasks.assign(**times)[tables.TIMELINE.names]
    operators = pd.DataFrame({"module": ["h"], "phase": ["forward"], "output_shapes": [[[1]]]}, index=[0])
    trace = Trace(operators, pd.DataFrame(), few_facts())
    for by in ("rank", "module"):
        (row,) = build_breakdown(graph, timeline, trace, by).to_dict("records")
        assert (row["compute_s"], row["forward_s"]) == (2.0, 2.0), by


def test_what_hides_communication_of_a_stage_is_all_that_its_rank_computes():
    """A rank with two stages: one computes while the other one's message moves."""
    builder = TaskGraphBuilder()
    for rank in (0, 1):
        for stage in (rank, rank + 2):
            builder.add(rank, "compute", "compute", "mm", phase="forward", op_id=0, duration_s=1.0, stage=stage)
    builder.add(0, "send", "send", "send", message_bytes=8, match_id=0, peer=1, stage=0)
    builder.add(1, "receive", "recv", "recv", message_bytes=8, match_id=0, peer=0, stage=1)
    graph = builder.build()
    times = [(0.0, 1.0), (1.0, 4.0), (6.0, 7.0), (7.0, 8.0), (2.0, 6.0), (2.0, 6.0)]
    timeline = graph.tasks.assign(start_s=[start for start, _ in times], end_s=[end for _, end in times])[
        tables.TIMELINE.names
    ]
    operators = pd.DataFrame({"module": ["h"], "phase": ["forward"], "output_shapes": [[[1]]]})
    trace = Trace(operators, pd.DataFrame(), few_facts())
    found = build_breakdown(graph, timeline, trace, "stage").set_index("name")
    assert found["communication_s"].tolist() == [4.0, 4.0, 0.0, 0.0]
    assert found["exposed_communication_s"].tolist() == [2.0, 4.0, 0.0, 0.0]
    assert found["idle_s"].tolist() == [3.0, 3.0, 5.0, 7.0]


def test_modules_tell_gradients_and_shapes(broken_down):
    graph, timeline, trace = broken_down
    found = build_breakdown(graph, timeline, trace, "module").set_index("name")
    assert found.index.tolist() == ["h.0", "h.1"]
    assert found["compute_s"].tolist() == [2.0, 2.5]
    assert found["gradient_bytes"].tolist() == [64, 0]
    assert found.loc["h.0", "output_shapes"] == [[8, 4]]
    assert found["communication_s"].isna().all()
    deep = build_breakdown(graph, timeline, trace, "module", depth=3)
    assert deep["name"].tolist() == ["h.0.a", "h.1", "h.0.b"]


def test_a_breakdown_is_a_table(broken_down, tmp_path):
    for by in ("rank", "stage", "module"):
        path = tmp_path / f"{by}.parquet"
        tables.write_table(build_breakdown(*broken_down, by), "breakdown", path)
        assert len(tables.read_table(path, "breakdown"))


def test_wrong_questions_are_refused(broken_down):
    with pytest.raises(InputError, match="no breakdown by 'layer'"):
        build_breakdown(*broken_down, "layer")
    with pytest.raises(InputError, match="depth 0"):
        build_breakdown(*broken_down, "module", depth=0)
    empty = TaskGraph(broken_down[0].tasks.iloc[:0], broken_down[0].dependencies)
    assert build_breakdown(empty, broken_down[1].iloc[:0], broken_down[2], "rank").empty
