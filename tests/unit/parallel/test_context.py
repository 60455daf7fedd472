"""Context parallelism: one rank's work, its messages and its memory are a share of a sequence's."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.base.precision_recipes import choose_recipe
from trioflow.costmodel.intervals import ASSUMED_FACTOR
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.folded import FoldedTaskGraph
from trioflow.parallel.plan import check_plan, make_plan
from trioflow.parallel.programs.blocks import size_attentions
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.splits.context import check_context, find_attentions, split_context
from trioflow.parallel.splits.tensor_parallel import split_for_plan
from trioflow.parallel.splits.tensor_split import SharedAttention
from trioflow.parallel.splits.vocabulary import prepare_split
from trioflow.parallel.task_graph import TaskGraph
from trioflow.trace.store import Trace, load_trace

BATCH, TOKENS, WIDTH = 8, 128, 256
KEYS = BATCH * TOKENS * WIDTH * 4
"""Bytes of the traced keys; values are as many."""
PLANS: list[tuple[dict[str, Any], int]] = [
    ({"context": 4}, 1),
    ({"context": 2, "context_method": "all-gather", "data": 2}, 1),
    ({"context": 2, "context_method": "all-to-all", "tensor": 2}, 1),
    ({"context": 2, "data": 4, "sharding": "hsdp", "shard": 4}, 1),
    ({"context": 4, "data": 2, "sharding": "hsdp", "shard": 2}, 1),
    ({"context": 2, "data": 2, "sharding": "fsdp"}, 1),
    ({"context": 2, "tensor": 2, "pipeline": 2, "schedule": "1f1b", "sequence_parallel": True}, 2),
]
"""Plans, and how many classes of ranks each has."""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace("gpt2-tiny-b8")


def build(trace: Trace, **degrees: Any) -> TaskGraph:
    plan = make_plan(**degrees)
    return extrapolate(trace, plan, ProportionalModel(), batch=BATCH * plan.data)


def list_messages(graph: TaskGraph, rank: int = 0) -> list[tuple[str, str, int, str]]:
    """What the ranks of a sequence send: collective, phase, bytes, ranks."""
    tasks = graph.tasks[(graph.tasks["rank"] == rank) & (graph.tasks["stream"] == "context")]
    columns = (tasks[c] for c in ("name", "phase", "message_bytes", "group"))
    return [tuple(row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize(("degrees", "classes"), PLANS, ids=str)
def test_expands_to_what_building_every_rank_gives(degrees, classes, trace, monkeypatch):
    folded = build(trace, **degrees)
    assert isinstance(folded, FoldedTaskGraph) and folded.fold is not None
    assert len(folded.fold.representatives) == classes
    monkeypatch.setattr(StagedRank, "alike", (False,) * 4)
    whole = build(trace, **degrees)
    columns = ["rank", "stream", "kind", "name", "duration_s", "message_bytes", "peer"]
    assert folded.tasks[columns].equals(whole.tasks[columns])
    assert folded.tasks["group"].astype(str).tolist() == whole.tasks["group"].astype(str).tolist()
    assert folded.dependencies.to_numpy().tolist() == whole.dependencies.to_numpy().tolist()
    for one in (folded, whole):  # each exchange has as many members as its group
        members = one.tasks[one.tasks["kind"] == "collective"].groupby("match_id")["rank"]
        groups = one.tasks.dropna(subset="match_id").groupby("match_id")["group"].first()
        named = {match: str(text).count(",") + 1 for match, text in groups.items()}
        assert all(len(ranks) == named[match] for match, ranks in members)


def test_ring_hands_keys_values_and_their_gradients_on(trace):
    graph = build(trace, context=4, data=2)
    messages = list_messages(graph, rank=5)
    each = 2 * KEYS // 4
    forward = [m for m in messages if m[1] == "forward"]
    assert forward == [("shift", "forward", each, "4,5,6,7")] * 3 * 4  # layers
    backward = [m for m in messages if m[1] == "backward"]
    assert backward == [("shift", "backward", each, "4,5,6,7")] * (3 + 4) * 4
    gradients = graph.tasks[(graph.tasks["rank"] == 5) & (graph.tasks["name"] == "all_reduce")]
    assert {str(group) for group in gradients["group"]} == {"0,1,2,3,4,5,6,7"}


def test_ring_overlaps_its_blocks(trace):
    graph = build(trace, context=2)
    mine = graph.tasks[graph.tasks["rank"] == 0].set_index("task_id")
    waits = graph.dependencies.groupby("task_id")["depends_on"].agg(list)
    shift = mine.index[mine["name"] == "shift"][0]
    blocks = mine.index[mine["name"].str.contains("attention") & (mine["kind"] == "compute")]
    assert shift < blocks[0] < blocks[1]
    assert shift not in waits.get(blocks[0], []) and shift in waits[blocks[1]]


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("all-gather", [("all_gather", 1)] * 2, [("reduce_scatter", 1)] * 2),
        ("all-to-all", [("all_to_all", 2)] * 4, [("all_to_all", 2)] * 4),
    ],
)
def test_other_methods_move_keys_and_values_or_heads(method, forward, backward, trace):
    messages = list_messages(build(trace, context=2, context_method=method))
    for phase, expected in (("forward", forward), ("backward", backward)):
        told = [(name, size) for name, of, size, _ in messages if of == phase]
        assert told == [(name, KEYS // part) for name, part in expected] * 4


@pytest.mark.parametrize("method", ["ring", "all-gather", "all-to-all"])
def test_work_and_memory_are_a_ranks_tokens(method, trace):
    degree = 4
    whole = make_plan()
    alone = split_for_plan(prepare_split(trace, whole), whole)
    split = split_context(alone, trace, degree, method)
    steps = alone.operators["phase"] != "optimizer"
    flop = split.operators["flop"][steps]
    assert (flop == alone.operators["flop"][steps] // degree).all()
    work = ["flop", "read_bytes", "write_bytes", "batch_read_bytes", "batch_write_bytes"]
    updates = split.operators.loc[~steps, work].to_numpy().tolist()
    assert updates == alone.operators.loc[~steps, work].to_numpy().tolist()
    peaks = [
        extrapolate(
            trace, make_plan(**given), ProportionalModel(), batch=32 * BATCH
        ).metadata.memory[0]
        for given in ({}, {"context": degree, "context_method": method})
    ]
    one, shared = (peak["categories"] for peak in peaks)
    assert shared["parameter"] == one["parameter"]
    assert shared["activation"] == pytest.approx(one["activation"] / degree, rel=0.02)
    assert shared["input"] == pytest.approx(one["input"] / degree, rel=0.1)


def test_attention_lasts_as_long_as_its_blocks(trace):
    whole, shared = build(trace), build(trace, context=4)
    op = min(find_attentions(trace))
    times = []
    for graph in (whole, shared):
        mine = graph.tasks[(graph.tasks["rank"] == 0) & (graph.tasks["op_id"] == op)]
        times.append(mine.loc[mine["name"].str.contains("attention"), "duration_s"].to_numpy())
    host_s = trace.operators.at[op, "cpu_ns"] / 1e9
    # The model counts bytes: a first block reads and writes a quarter of them, the others three
    # quarters of that.
    first = (times[0][0] - host_s) / 4
    assert times[1] - host_s == pytest.approx(first * np.array([1.0, 0.75, 0.75, 0.75]), rel=1e-3)


def test_a_ring_adds_up_by_several_passes_under_pytorch_and_by_one_under_megatron(trace):
    """Beside a block's own time; in fp32 under PyTorch, in the format of activations under Megatron-LM."""
    shared = SharedAttention("ring", 4, None, 100.0, 50.0, 50.0)
    forward, backward = shared, replace(shared, forward=0)
    added = {}
    for name in ("bf16", "fsdp2-mixed", "megatron-bf16"):
        works = size_attentions(
            {0: forward, 1: backward},
            [1.0],
            lambda sizes: [float(s) for s in sizes],
            choose_recipe(name),
            {},
        )
        added[name] = [works[op].merge_s[0] for op in (0, 1)]
    assert added["megatron-bf16"] == [100, 200]
    assert added["bf16"] == added["fsdp2-mixed"] == [100 * 2 * 4, 200 * 2 * 2.5]


def test_sequences_that_many_ranks_share_are_as_uncertain_as_what_nobody_measured(trace):
    halves = [build(trace, context=ranks).metadata.least_half_log for ranks in (2, 4)]
    assert math.hypot(halves[0], math.log(ASSUMED_FACTOR)) == pytest.approx(halves[1], rel=0.3)
    assert halves[1] > math.log(1.7), "some ran 1.7 times as long"


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"context": 3}, "128 tokens a sample are not 6 equal chunks"),
        ({"context": 8, "context_method": "all-to-all"}, "4 attention heads cannot be shared by 8"),
        ({"context": 2, "tensor": 4, "context_method": "all-to-all"}, "shared by 8 ranks"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(degrees, words, trace):
    with pytest.raises(PlanError, match=words):
        check_plan(make_plan(**degrees), trace, BATCH)


def test_models_without_known_attention_are_refused():
    with pytest.raises(PlanError, match="does not say how many tokens"):
        check_context(load_trace("vgg11-b128"), make_plan(context=2))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"context_method": "all-to-all"}, "without context parallelism"),
        ({"context": 2, "data": 2, "replication": "dp"}, "context parallelism"),
        ({"context": 2, "tensor": 2, "tensor_style": "gather"}, "gather with context"),
        ({"context": 4, "data": 3, "sharding": "hsdp", "shard": 6}, "sequences that 4 share"),
    ],
)
def test_columns_that_do_not_go_together_are_refused(columns, words):
    with pytest.raises(PlanError, match=words):
        make_plan(**columns)
