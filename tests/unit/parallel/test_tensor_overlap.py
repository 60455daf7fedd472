"""Messages of tensor parallelism beside products: who waits for whom, what travels, and what is left exposed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.engine.simulate import SimulationOptions, simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.folded import FoldedTaskGraph
from trioflow.parallel.plan import make_plan
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.task_graph import TaskGraph
from trioflow.trace.language.megatron import parse_arguments, read_megatron
from trioflow.trace.store import Trace, load_trace

BATCH, LAYERS = 8, 4
ACTIVATION = BATCH * 128 * 256 * 4
"""Bytes of what goes in or out of a layer of the trace, all tokens."""
RANKS = 4
SPLIT: dict[str, Any] = {"tensor": RANKS, "sequence_parallel": True}


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The shipped trace, as if a GPU had run it: the host runs beside the device."""
    shipped = load_trace("gpt2-tiny-b8")
    return Trace(shipped.operators, shipped.tensors, replace(shipped.facts, device="cuda"))


def build(trace: Trace, how: str, **degrees: Any) -> TaskGraph:
    plan = make_plan(**{**SPLIT, "tensor_overlap": how, **degrees})
    return extrapolate(trace, plan, ProportionalModel(), batch=BATCH * plan.data)


def tasks_of(graph: TaskGraph, stream: str = "tensor") -> pd.DataFrame:
    tasks = graph.tasks
    return tasks[(tasks["rank"] == 0) & (tasks["stream"] == stream)]


def list_waits(graph: TaskGraph, task: int) -> set[int]:
    """What a task waits for, directly."""
    edges = graph.dependencies
    return set(edges.loc[edges["task_id"] == task, "depends_on"])


def test_backward_sums_beside_the_product_that_needs_no_sum(trace):
    graph, waiting = build(trace, "backward"), build(trace, "none")
    tasks = graph.tasks.set_index("task_id")
    ours = tasks_of(graph)
    sums = ours[(ours["name"] == "reduce_scatter") & (ours["phase"] == "backward")]
    assert len(sums) == 2 * LAYERS  # queries, keys and values; the first layer behind them
    for task in sums["task_id"]:
        computed = tasks.loc[[t for t in list_waits(graph, task) if tasks.stream[t] == "compute"]]
        product = computed.iloc[-1]
        own = tasks_of(graph, "compute")
        behind = own[own["task_id"] > computed.index[-1]]
        awaiting = [t for t in behind["task_id"] if task in list_waits(graph, t)]
        between = behind[behind["task_id"] < awaiting[0]]
        flops = trace.operators["flop"].iloc[between["op_id"].astype(int)]
        assert (flops > 0).sum() == 1  # the weight's gradient alone
        assert trace.operators["flop"].iloc[int(product["op_id"])] > 0
    # The input is gathered again for the weight's gradient, beside that of the input.
    gathers = [tasks_of(g, s) for g, s in ((graph, "tensor"), (waiting, "tensor"))]
    counts = [(frame["name"] == "all_gather").sum() for frame in gathers]
    assert counts[0] - counts[1] == 2 * LAYERS
    assert set(ours["message_bytes"].astype(int)) >= {ACTIVATION}


def test_pieces_of_a_product_are_a_share_of_it_and_of_its_message(trace):
    graph, waiting = build(trace, "products"), build(trace, "none")
    shifts = tasks_of(graph)[lambda frame: frame["name"] == "shift"]
    # Forward of four linear layers a block, and the input's gradient of two.
    assert len(shifts) == 6 * LAYERS * (RANKS - 1)
    assert set(shifts["message_bytes"].astype(int)) == {ACTIVATION // RANKS}
    ours, theirs = (tasks_of(g, "compute") for g in (graph, waiting))
    assert (ours["name"] == "sum of blocks").sum() == 2 * LAYERS
    ours = ours[ours["op_id"].notna()]
    times = [frame.groupby("op_id")["duration_s"].sum() for frame in (ours, theirs)]
    assert np.allclose(times[0], times[1][times[0].index])
    launches = [len(tasks_of(g, "host")) for g in (graph, waiting)]
    assert launches[0] == launches[1]  # one launch for all pieces


@pytest.mark.parametrize("scale", [200.0, 4000.0])
def test_what_is_exposed_shrinks_to_the_first_or_the_last_piece(scale, trace):
    """Of n pieces a rank multiplies one while none travels, and the others as fast as they come."""
    platform, options = load_platform("h100x8-nvlink"), SimulationOptions(communication_scale=scale)
    graphs = [build(trace, how) for how in ("none", "backward", "products")]
    runs = [simulate(graph, platform, options=options) for graph in graphs]
    times = [run.summary.step_time_s for run in runs]
    # Where messages are short, adding up pieces costs more than they do; where they are long, gathering again does.
    assert times[1] < times[0] if scale < 1000 else times[2] < times[1]
    timeline = runs[2].timeline.assign(op_id=graphs[2].tasks["op_id"])
    rows = timeline[timeline["rank"] == 0]
    shift_s = (rows["end_s"] - rows["start_s"])[rows["name"] == "shift"].median()
    product = trace.operators[
        (trace.operators["flop"] > 0) & trace.operators["module"].str.endswith("qkv")
    ]
    op_id = int(product["op_id"].iloc[0])
    blocks = rows[(rows["stream"] == "compute") & (rows["op_id"] == op_id)]
    block_s = float((blocks["end_s"] - blocks["start_s"]).median())
    assert len(blocks) == RANKS
    taken_s = blocks["end_s"].max() - blocks["start_s"].min()
    assert taken_s == pytest.approx((RANKS - 1) * max(shift_s, block_s) + block_s, rel=1e-6)


@pytest.mark.parametrize("how", ["backward", "products"])
@pytest.mark.parametrize(
    "degrees",
    [
        {},
        {"data": 2, "sharding": "distributed"},
        {"data": 2, "sharding": "fsdp"},
        {"pipeline": 2, "schedule": "1f1b", "micro_batches": 4},
        {"pipeline": 2, "schedule": "gpipe", "recompute": "full"},
    ],
    ids=str,
)
def test_expands_to_what_building_every_rank_gives(how, degrees, trace, monkeypatch):
    folded = build(trace, how, **degrees)
    assert isinstance(folded, FoldedTaskGraph)
    monkeypatch.setattr(folded.__class__, "alike", (False,) * 4, raising=False)
    monkeypatch.setattr(StagedRank, "alike", (False,) * 4)
    whole = build(trace, how, **degrees)
    columns = ["rank", "stream", "kind", "name", "duration_s", "message_bytes"]
    assert folded.tasks[columns].equals(whole.tasks[columns])
    members = whole.tasks[whole.tasks["kind"] == "collective"].groupby("match_id")["rank"].count()
    groups = whole.tasks.dropna(subset="match_id").groupby("match_id")["group"].first()
    named = {match: str(text).count(",") + 1 for match, text in groups.items() if text}
    assert all(members[match] == count for match, count in named.items() if match in members)


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ({"tensor": 1, "sequence_parallel": False}, "without tensor parallelism"),
        ({"sequence_parallel": False}, "without sequence parallelism"),
        ({"tensor_style": "gather", "sequence_parallel": False}, "all wait"),
        ({"pipeline": 2, "schedule": "zero-bubble", "micro_batches": 4}, "apart is not simulated"),
    ],
)
def test_what_does_not_go_together_is_refused(degrees, said, trace):
    with pytest.raises(PlanError, match=said):
        build(trace, "products", **degrees)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "products"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "backward"),
        ("--bf16", None),
    ],
)
def test_megatron_overlaps_what_its_arguments_say(words, found):
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64"
    read = read_megatron(parse_arguments(f"{sizes} {words}", "run.sh"), "run.sh", "small")
    assert read.degrees.get("tensor_overlap") == found
    assert not any("tp-comm-overlap" in note for note in read.notes)
