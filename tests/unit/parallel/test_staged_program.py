"""The graph of a scheduled pipeline: every rank runs its row, and what it waits for."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from captured import BATCH
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.ideal_run import count_in_flight, run_ideally
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.base.plan_row import SCHEDULES, ScheduleTraits
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import describe_plan, make_plan, micro_batch_sizes, named_plan
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.schedules import build
from trioflow.parallel.schedules.build import (
    add_communication,
    build_schedule,
    check_schedule,
    lower_schedule,
    parse_action,
    read_schedule,
    write_schedule,
)
from trioflow.parallel.schedules.table import Action, Schedule, leaves
from trioflow.parallel.splits.pipeline import (
    chunk_samples,
    find_tied,
    loss_operators,
    split_samples,
    stages_of_operators,
)
from trioflow.parallel.task_graph import TaskGraphBuilder
from trioflow.tables import records
from trioflow.trace.store import Trace

MODEL = ProportionalModel()
HALVES = [["embedding", "blocks.0"], ["blocks.1", "head"]]
"""Stages of the small transformer that do not depend on its times."""
SHAPES = {
    **{name: (2, 4, sizes.stages if sizes.fixed else 2) for name, sizes in SCHEDULES.items()},
    "looped-bfs": (2, 3, 2),
    "dualpipev": (2, 5, 2),
    "gpipe-recompute": (2, 4, 1),
}
"""Ranks, micro-batches and stages a rank; odd micro-batches where a schedule takes them."""


def plan_of(name, **degrees):
    p, m, v = SHAPES[name]
    return make_plan(pipeline=p, schedule=name, micro_batches=m, stages_per_rank=v, **degrees)


def runs_of(graph, rank):
    """Return the order in which a rank's actions compute, as cells of a schedule."""
    tasks = graph.tasks[(graph.tasks["rank"] == rank) & graph.tasks["micro_batch"].notna()]
    runs = []
    for row in records(tasks[tasks["op_id"].notna()]):
        again = row["name"].startswith("recompute ")
        letter = "R" if again else {"forward": "F", "backward": "B"}[row["phase"]]
        cell = f"{row['stage']}{letter}{row['micro_batch']}"
        if not runs or runs[-1] != cell:
            runs.append(cell)
    return runs


def run_graph(graph):
    """Run a graph with messages that take no time; return the end of every task."""
    rows = records(graph.tasks)
    waits, matches, streams = {}, {}, {}
    for edge in records(graph.dependencies):
        waits.setdefault(edge["task_id"], []).append(edge["depends_on"])
    for row in rows:
        before = streams.setdefault((row["rank"], row["stream"]), [])
        waits.setdefault(row["task_id"], []).extend(before[-1:])
        before.append(row["task_id"])
        key = ("alone", row["task_id"]) if row["match_id"] is None else row["match_id"]
        matches.setdefault(key, []).append(row["task_id"])
    ends, left = {}, list(matches.values())
    while left:
        stuck = []
        for group in left:
            sources = [s for task in group for s in waits[task]]
            if all(source in ends for source in sources):
                length = max(rows[task]["duration_s"] or 0.0 for task in group)
                end = max((ends[source] for source in sources), default=0.0) + length
                ends.update(dict.fromkeys(group, end))
            else:
                stuck.append(group)
        assert len(stuck) < len(left), "the graph cannot go on"
        left = stuck
    return ends


@pytest.mark.parametrize("name", SHAPES)
def test_work_is_the_same_whatever_the_schedule(name, transformer_trace):
    plan = plan_of(name)
    graph = extrapolate(transformer_trace, plan, MODEL, batch=8)
    operators = graph.tasks[graph.tasks["op_id"].notna()]
    again = operators["name"].str.startswith("recompute ")
    runs = operators[~again].groupby(["op_id", "micro_batch"], dropna=False).size()
    both = runs[runs > 1]
    names = transformer_trace.operators.loc[both.index.get_level_values(0), "name"]
    # Only norms make both kinds of gradient in this model, and only where I and W are apart.
    rows = build_schedule(name, plan.pipeline, plan.micro_batches, plan.stages_per_rank).rows
    apart = any(action.kind == "W" for row in rows for action in leaves(row))
    assert set(names) == ({"aten::native_layer_norm_backward"} if apart else set())
    assert set(operators["op_id"]) == set(range(len(transformer_trace.operators)))
    m = SHAPES[name][1]
    forward = transformer_trace.operators.query("phase == 'forward'")["op_id"]
    repeated = (m - 1) * (len(forward) - len(loss_operators(transformer_trace)))
    assert again.sum() == (repeated if name == "gpipe-recompute" else 0)


def test_graphs_of_equal_stages_have_the_ideal_bubbles(transformer_trace):
    operators = transformer_trace.operators.copy()
    inside = operators["module"].str.startswith("blocks") & (operators["phase"] != "optimizer")
    operators["cpu_ns"] = 0
    operators["device_ns"] = np.where(inside & (operators["flop"] > 0), 10_000_000, 0)
    even = Trace(operators, transformer_trace.tensors, replace(transformer_trace.facts, tail_s=0))

    def waits(name):
        plan = make_plan(pipeline=2, schedule=name, micro_batches=4, stages_per_rank=1)
        graph = extrapolate(even, plan, MODEL, batch=4 * BATCH, stages=HALVES)
        graph.tasks.loc[graph.tasks["op_id"].isna(), "duration_s"] = 0.0
        ends = run_graph(graph)
        return max(ends.values()) / graph.tasks.groupby("rank")["duration_s"].sum().max()

    assert waits("1f1b") == pytest.approx(1 + 1 / 4)
    assert waits("gpipe") == pytest.approx(1 + 1 / 4)
    assert waits("zero-bubble") < waits("1f1b") - 0.05


def test_batches_are_cut_as_the_frameworks_cut_them():
    assert split_samples(10, 4) == [3, 3, 2, 2]
    assert chunk_samples(10, 4) == [3, 3, 3, 1]
    assert chunk_samples(5, 4) == [2, 2, 1]  # fewer than asked for
    assert chunk_samples(7, 4) == [2, 2, 2, 1] and chunk_samples(6, 4) == [2, 2, 2] and chunk_samples(3, 4) == [1, 1, 1]
    pipe = named_plan("gpipe-recompute", 2, 4)
    assert micro_batch_sizes(pipe, 5) == [2, 2, 1]
    assert "gpipe-recompute, mbs up to 2, 3 micro-batches" in describe_plan(pipe, 5)
    for batch, m in itertools.product(range(1, 30), range(1, 10)):
        if batch >= m:
            assert sum(split_samples(batch, m)) == sum(chunk_samples(batch, m)) == batch


def test_a_trace_without_tensors_cannot_be_split(transformer_trace):
    operators = transformer_trace.operators.copy()
    for column in ("input_ids", "output_ids"):
        operators[column] = [[] for _ in range(len(operators))]
    blind = replace(transformer_trace, operators=operators)
    plan = make_plan(pipeline=2, schedule="zero-bubble", micro_batches=2)
    with pytest.raises(PlanError, match="pipeline cannot be predicted"):
        extrapolate(blind, plan, MODEL, batch=2 * BATCH)


def test_tied_parameters_are_found_and_added_up_between_stages(tied_trace):
    cut = [["embedding"], ["first", "second"], ["head"]]
    stage_of = stages_of_operators(tied_trace, cut)
    (tied,) = find_tied(tied_trace, stage_of)
    assert tied.size_bytes == 128 * 32 * 4 and tied.stages == (0, 2)
    assert {tied_trace.operators.loc[o, "name"] for o in tied.sums} == {"aten::add"}
    for data in (1, 2):
        plan = make_plan(data=data, pipeline=3, schedule="1f1b", micro_batches=4)
        graph = extrapolate(tied_trace, plan, MODEL, batch=8 * data, stages=cut)
        tasks = graph.tasks
        assert not set(tasks["op_id"].dropna()) & tied.sums
        reduces = tasks[(tasks["name"] == "all_reduce") & (tasks["message_bytes"] == tied.size_bytes)]
        groups = [f"{d},{2 * data + d}" for d in range(data)]
        between = reduces[reduces["group"].isin(groups)]
        assert sorted(between["group"]) == sorted(groups * 2)
        if data == 2:  # every stage's own copy is in a bucket of its replicas first
            buckets = tasks[(tasks["name"] == "all_reduce") & ~tasks.index.isin(between.index)]
            total = buckets.groupby("rank")["message_bytes"].sum()
            assert min(total[0], total[4]) >= tied.size_bytes
        run_graph(graph)
        # Both copies are updated, after the sum.
        update = tied_trace.operators.query("phase == 'optimizer' and module == '0'")["op_id"]
        done = tasks[tasks["op_id"].isin(update)]
        assert set(done["rank"]) == {r for g in groups for r in map(int, g.split(","))}
        assert done["task_id"].min() > between["task_id"].min()


def test_an_imported_schedule_is_executed(transformer_trace, tmp_path):
    write_schedule(build_schedule("1f1b", 2, 4), tmp_path / "mine.csv")
    given = read_schedule(tmp_path / "mine.csv")
    plan = make_plan(pipeline=2, micro_batches=4)
    graph = extrapolate(transformer_trace, plan, MODEL, batch=8, schedule=given)
    assert runs_of(graph, 0)[:4] == ["0F0", "0F1", "0B0", "0F2"]
    other = make_plan(pipeline=2, micro_batches=8)
    with pytest.raises(PlanError, match="has 2 ranks, 2 stages and 4 micro-batches, the plan 2, 2 and 8"):
        extrapolate(transformer_trace, other, MODEL, batch=8, schedule=given)


def test_stages_of_all_ranks_must_exist_in_the_model(cnn_trace):
    plan = make_plan(pipeline=4, schedule="interleaved", micro_batches=4, stages_per_rank=4)
    with pytest.raises(PlanError, match="16 stages, but the model can be cut into 10 pieces"):
        extrapolate(cnn_trace, plan, MODEL)


SHARDED = {"fsdp": ("1f1b", 8), "fsdp of stages": ("interleaved", 8)}


STEPPED = {"fsdp in steps": {}, "zero2 in steps": {}, "hsdp in steps": {"shard": 2}}


@pytest.mark.parametrize("name", [*SHAPES, "tensor", "recompute", *SHARDED, *STEPPED])
def test_copied_micro_batches_are_those_that_run_one_by_one(monkeypatch, transformer_trace, name):
    if name == "tensor":
        plan = make_plan(data=2, tensor=2, accumulate=4)
    elif name == "recompute":
        plan = make_plan(2, 1, 2, "1f1b", 8, recompute="full")
    elif name in SHARDED:
        plan = make_plan(2, 1, 2, *SHARDED[name], sharding=name.split()[0])
    elif name in STEPPED:
        plan = make_plan(4, accumulate=6, recompute="full", sharding=name.split()[0], **STEPPED[name])
    else:
        plan = plan_of(name, data=2, tensor=1 if name in ("zero-bubble", "zbv", "dualpipev") else 2)
    batch = plan.data * plan.pieces * BATCH
    host = {"pipeline_micro_batch_s": 1e-4, "tensor_parallel_forward_s": 1e-5}
    ask = partial(extrapolate, transformer_trace, plan, MODEL, batch=batch, host=host)
    added = Counter()
    monkeypatch.setattr(StagedRank, "in_rows", False)
    for name in ("add", "add_rows"):
        monkeypatch.setattr(TaskGraphBuilder, name, count_calls(getattr(TaskGraphBuilder, name), added))
    copied, calls = ask(), added.total()
    monkeypatch.setattr(StagedRank, "repeats", False)
    assert_same(copied, ask())
    assert calls < 0.8 * (added.total() - calls), "further micro-batches are copied"


STAGED = {
    "ddp": {},
    "zero1": {"sharding": "zero1"},
    "distributed": {"sharding": "distributed"},
    "fsdp": {"sharding": "fsdp"},
    "hsdp": {"sharding": "hsdp", "shard": 2},
    "optimizer on the host": {"sharding": "fsdp", "offload": "optimizer"},
}


@pytest.mark.parametrize("name", STAGED)
def test_tasks_of_a_pipeline_name_their_rank_s_stage(transformer_trace, name):
    """Collectives, copies and launches too: else a breakdown by stage counts them to the first one."""
    plan = make_plan(4, 1, 2, "1f1b", 4, **STAGED[name])
    rates = dict.fromkeys(("host_link_bandwidth_bytes_per_s", "host_update_bytes_per_s"), 1e10)
    host = rates | {"sharded_forward_s": 1e-5, "sharded_backward_s": 1e-5}
    tasks = extrapolate(transformer_trace, plan, MODEL, batch=plan.data * plan.pieces * BATCH, host=host).tasks
    assert (tasks["stage"] == tasks["rank"] // plan.data).all()


def test_a_stage_without_gradients_copies_none_to_or_from_buckets(transformer_trace):
    facts = transformer_trace.facts
    trained = tuple(g for g in facts.gradients if g["name"].startswith("head"))
    trace = Trace(transformer_trace.operators, transformer_trace.tensors, replace(facts, gradients=trained))
    plan = make_plan(2, 1, 2, "1f1b", 2)
    tasks = extrapolate(trace, plan, MODEL, batch=plan.data * plan.pieces * BATCH).tasks
    assert {*tasks["stage"][tasks["name"].str.contains("bucket")]} == {1}


IN_ROWS = {
    **{name: {} for name in SHAPES},
    "tensor": {"data": 2, "tensor": 2, "accumulate": 2},
    "zero1": {"data": 2, "sharding": "zero1"},
    "fsdp": {"data": 2, "sharding": "fsdp"},
    "full": {"data": 2, "recompute": "full"},
    "selective": {"data": 2, "recompute": "selective"},
    "ring": {"data": 2, "context": 2, "context_method": "ring"},
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", IN_ROWS)
def test_operators_added_at_once_are_those_added_one_by_one(monkeypatch, transformer_trace, name, device):
    """With launches of the host in turn with operators, and without."""
    facts = replace(transformer_trace.facts, device=device)
    trace = Trace(transformer_trace.operators, transformer_trace.tensors, facts)
    plan = make_plan(**IN_ROWS[name]) if IN_ROWS[name] else plan_of(name, data=2)
    ask = partial(extrapolate, trace, plan, MODEL, batch=plan.data * plan.pieces * BATCH)
    added = Counter()
    for name in ("add", "add_rows"):
        monkeypatch.setattr(TaskGraphBuilder, name, count_calls(getattr(TaskGraphBuilder, name), added))
    at_once, calls = ask(), added.total()
    monkeypatch.setattr(StagedRank, "in_rows", False)
    assert_same(at_once, ask())
    assert calls < 0.9 * (added.total() - calls), "rows are added at once"


def assert_same(one, other):
    pd.testing.assert_frame_equal(one.tasks, other.tasks)
    pd.testing.assert_frame_equal(one.dependencies, other.dependencies)
    assert one.metadata.memory == other.metadata.memory


def count_calls(function, calls):
    def counted(*given, **named):
        calls[function.__name__] += 1
        return function(*given, **named)

    return counted


RANKS_AND_MICRO_BATCHES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 8, 16)))


def schedule_of(*rows, micro_batches=1):
    """Return a schedule from lines of cells."""
    return Schedule("", micro_batches, tuple(tuple(parse_action(c) for c in row.split()) for row in rows))


@pytest.mark.parametrize(("p", "m"), RANKS_AND_MICRO_BATCHES)
def test_the_bubble_of_gpipe_is_its_closed_form(p, m):
    run = run_ideally(build_schedule("gpipe", p, m))
    assert run.idle_share == pytest.approx((p - 1) / (m + p - 1))
    assert run.makespan == pytest.approx(3 * (m + p - 1))
    assert count_in_flight(build_schedule("gpipe", p, m)) == (m,) * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in RANKS_AND_MICRO_BATCHES if m >= p])
def test_1f1b_idles_as_gpipe_and_holds_less(p, m):
    schedule = build_schedule("1f1b", p, m)
    assert run_ideally(schedule).idle_share == pytest.approx((p - 1) / (m + p - 1))
    assert count_in_flight(schedule) == tuple(min(p - rank, m) for rank in range(p))


@pytest.mark.parametrize(("p", "v", "rounds"), list(itertools.product((2, 3, 4, 8), (1, 2, 4), (1, 2, 3))))
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(p, v, rounds):
    m = rounds * p
    schedule = build_schedule("interleaved", p, m, v)
    # Over what a rank computes: (p - 1) / (v m), Narayanan et al., section 2.2.
    run = run_ideally(schedule)
    assert run.makespan / max(run.busy) - 1 == pytest.approx((p - 1) / (v * m))
    ahead = [min((v - 1) * p + 2 * (p - 1 - rank), m * v) for rank in range(p)]
    assert count_in_flight(schedule) == tuple(min(a + 1, m * v) for a in ahead)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16), (4, 16)])
def test_weight_gradients_fill_the_bubble(p, m):
    schedule = build_schedule("zero-bubble", p, m)
    # ZB-H1: a third of 1F1B's bubble, (p - 1)(F + B - 2 W) for F = I = W, in 1F1B's memory.
    assert run_ideally(schedule).makespan - 3 * m == pytest.approx(p - 1)
    assert run_ideally(build_schedule("1f1b", p, m)).makespan - 3 * m == pytest.approx(3 * (p - 1))
    assert count_in_flight(schedule) == (p,) * p
    # ZBV: the last rank never waits between its first and its last action, nor any other.
    fold = build_schedule("zbv", p, m, 2)
    run = run_ideally(fold)
    assert run.makespan - 6 * m == pytest.approx(p - 1)
    assert max(count_in_flight(fold)) <= 2 * p


def test_the_old_pipe_computes_all_but_one_forward_twice():
    p, m = 3, 4
    schedule = build_schedule("gpipe-recompute", p, m)
    assert [str(a) for a in schedule.rows[1]] == [
        "1F0",
        "1F1",
        "1F2",
        "1F3",
        "1B3",
        "1F2",
        "1B2",
        "1F1",
        "1B1",
        "1F0",
        "1B0",
    ]
    assert run_ideally(schedule).busy == (m + 2 * m + m - 1,) * p
    assert count_in_flight(schedule) == (1,) * p  # the last micro-batch, or the recomputed one
    assert build_schedule("gpipe-recompute", p, 1).rows == build_schedule("gpipe", p, 1).rows
    lowered = add_communication(schedule)
    sends = [str(a) for a in lowered.rows[0] if a.kind == "SEND_F"]
    assert sends == ["0SEND_F0", "0SEND_F1", "0SEND_F2", "0SEND_F3"]  # none for a second forward
    check_schedule(lowered)
    # A recomputation needs no gradient: it starts while the next stage is still in its backward.
    ends = run_ideally(schedule).ends
    assert ends[Action(0, "F", 0)] - 1 < ends[Action(1, "B", 0)]


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 6), st.integers(1, 12), st.integers(1, 4))
def test_every_schedule_that_is_built_is_complete_and_ends(name, p, m, v):
    try:
        schedule = build_schedule(name, p, m, v)
    except PlanError:
        assume(False)
    lowered = lower_schedule(schedule)
    for table in (schedule, add_communication(schedule), lowered):
        check_schedule(table)
        assert table.stages == p * v and table.ranks == p
    forwards = [str(a) for row in schedule.rows for a in leaves(row) if a.kind == "F"]
    assert len(set(forwards)) == p * v * m
    # With messages or without, what ranks compute and wait for is the same.
    assert run_ideally(lowered).makespan == run_ideally(schedule).makespan
    sends = [a for row in lowered.rows for a in row if a.kind in ("SEND_F", "SEND_B")]
    places = schedule.rank_of_stage
    crossings = sum(places[s] != places[s + 1] for s in range(p * v - 1))
    assert len(sends) == 2 * m * crossings


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_survives_its_file(name, tmp_path):
    schedule = build_schedule(name, 2, 4, SCHEDULES[name].stages)
    for table in (schedule, lower_schedule(schedule)):
        write_schedule(table, tmp_path / "a.csv")
        assert read_schedule(tmp_path / "a.csv", name) == table


def test_actions_that_overlap_are_read_and_run(tmp_path):
    path = tmp_path / "overlap.csv"
    path.write_text("0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,1B1,0B0,0B1\r\n")
    schedule = read_schedule(path)
    assert schedule.stages == 2 and schedule.micro_batches == 2
    assert str(schedule.rows[0][3]) == "(1F1;1B0)OVERLAP_F_B"
    assert run_ideally(schedule).makespan == 4 * 1 + 4 * 2
    write_schedule(schedule, path)
    assert path.read_text() == "0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,1B1,0B0,0B1\n"


def test_1f1b_of_fewer_micro_batches_than_stages_is_megatron_s():
    """As ``forward_backward_pipelining_without_interleaving``: min(p - rank - 1, m) warm-up forwards."""
    p, m = 4, 2
    for rank, row in enumerate(build_schedule("1f1b", p, m).rows):
        warm_up = min(p - rank - 1, m)
        kinds = ["F"] * warm_up + ["F", "B"] * (m - warm_up) + ["B"] * warm_up
        assert [action.kind for action in leaves(row)] == kinds
    assert count_in_flight(build_schedule("1f1b", p, m)) == (2, 2, 2, 1)
    check_schedule(lower_schedule(build_schedule("1f1b", p, 1)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("interleaved", 4, 9, 2), "9 micro-batches do not divide into 2 rounds on 4 ranks"),
        (("zero-bubble", 2, 5, 1), "5 micro-batches do not divide into 2 rounds on 2 ranks"),
        (("zbv", 4, 8, 3), "3 stages a rank, but this schedule has 2"),
        (("gpipe", 4, 8, 2), "2 stages a rank, but this schedule has 1"),
        (("gpipe", 0, 8, 1), "0 ranks are too few"),
        (("gpipe", 2, 0, 1), "0 micro-batches are too few"),
        (("fifo", 2, 2, 1), "no schedule is called 'fifo'"),
    ],
)
def test_shapes_that_a_schedule_does_not_allow_are_refused(call, words):
    with pytest.raises(PlanError, match=words):
        build_schedule(*call)


def test_a_schedule_that_leaves_out_stages_is_refused(monkeypatch):
    """One that never looks at its stages a rank, and is not declared as ``fixed``, runs half the model."""
    monkeypatch.setitem(SCHEDULES, "half", ScheduleTraits())
    monkeypatch.setitem(build.ORDERS, "half", build.ORDERS["gpipe"])
    assert build_schedule("half", 2, 4, 1).stages == 2
    words = "'half' has 2 ranks, 2 stages and 4 micro-batches, the plan 2, 4 and 4"
    with pytest.raises(PlanError, match=words):
        build_schedule("half", 2, 4, 2)
    monkeypatch.setitem(SCHEDULES, "half", ScheduleTraits(fixed=True))
    with pytest.raises(PlanError, match="this schedule has 1"):
        build_schedule("half", 2, 4, 2)


@pytest.mark.parametrize(
    ("rows", "micro_batches", "words"),
    [
        (["0F0 0B0", "1B0 1F0"], 1, "rank 1: 1B0 comes after nothing of its micro-batch"),
        (["0F0 0B0 0B0"], 1, "0B0 comes after F, B"),
        (["0F0 0W0 0I0"], 1, "0W0 comes after F"),
        (["0F0 0I0"], 1, "stage 0 runs only F, I of micro-batch 0"),
        (["0F0 0B0", "1F0 1B0"], 2, "stage 0 runs only nothing of micro-batch 1"),
        (["0F0 0B0", "0F0 0B0"], 1, "stage 0 is on rank 0 and on rank 1"),
        (["0F0 0B0", "2F0 2B0"], 1, "stage 1 is on no rank"),
        (["0F0 0F1 0B0"], 1, "0F1 names a micro-batch beyond the last, 0"),
        (["0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0"], 2, ""),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], 2, "no rank can go on .rank 0 before 0B0, rank 1 before 1F1"),
        (["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"], 1, "deadlock"),
        (["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"], 1, "give every send its receive"),
        (["0F0 0RECV_F0 0B0"], 1, "0RECV_F0 has no other rank"),
        (
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
                "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
            ],
            2,
            "message 0 from rank 0 to rank 1 leaves stage 0 with micro-batch 0, but 1",
        ),
        (["0F0 0B0", ""], 1, "rank 1 has no actions"),
    ],
)
def test_schedules_that_cannot_run_are_refused(rows, micro_batches, words):
    schedule = schedule_of(*rows, micro_batches=micro_batches)
    if not words:  # another order of backwards is legal
        check_schedule(schedule)
        return
    with pytest.raises(PlanError, match=words):
        check_schedule(schedule)


@pytest.mark.parametrize("cell", ["F0", "0F", "0X1", "0F0 1", "0UNSHARD1", "(0F0)OVERLAP_F_B", "-1F0"])
def test_cells_that_name_no_action_are_refused(cell, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(f"0F0,0B0\n1F0,{cell}\n")
    with pytest.raises(PlanError, match=r"bad\.csv, line 2, cell 2: .* is not an action; write stage"):
        read_schedule(path)


def test_files_that_hold_no_schedule_are_refused(tmp_path):
    with pytest.raises(PlanError, match="no such file"):
        read_schedule(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(PlanError, match=r"empty\.csv: the schedule has no actions"):
        read_schedule(tmp_path / "empty.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not UTF-8"):
        read_schedule(tmp_path / "bytes.csv")
    (tmp_path / "half.csv").write_text("0F0\n")
    with pytest.raises(PlanError, match=r"half\.csv: rank 0: stage 0 runs only F"):
        read_schedule(tmp_path / "half.csv")
