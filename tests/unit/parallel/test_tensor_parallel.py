"""Messages of tensor parallelism beside products: who waits for whom, what travels, and what is left exposed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from captured import BATCH, capture_raw
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.engine.simulate import SimulationOptions, simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.splits.tensor_parallel import split_for_plan, split_operators
from trioflow.parallel.splits.vocabulary import find_vocabulary, prepare_split
from trioflow.parallel.task_graph import FoldedTaskGraph, TaskGraph
from trioflow.trace.language.megatron import parse_arguments, read_megatron
from trioflow.trace.store import Trace, load_trace
from trioflow_evaluation.one_process.gathered_layers import find_gathered_layers, gather_rules, split_gathered

MODEL = ProportionalModel()
TOKENS, HIDDEN, WORDS, HEADS, LAYERS = BATCH * 16, 32, 128, 4, 2
ACTIVATION = 4 * TOKENS * HIDDEN


def split_of(trace, tensor=2, **styles):
    plan = make_plan(tensor=tensor, **styles)
    prepared = prepare_split(trace, plan)
    return prepared, split_for_plan(prepared, plan)


def rows_of(trace, split, module, phase="forward", name=""):
    whole = trace.operators
    chosen = (whole["module"] == module) & (whole["phase"] == phase) & (whole["write_bytes"] > 0)
    chosen &= whole["name"].str.contains(name)
    return whole[chosen], split.operators[chosen]


def messages(graph, rank=0):
    tasks = graph.tasks[(graph.tasks["rank"] == rank) & graph.tasks["message_bytes"].notna()]
    return list(zip(tasks["name"], tasks["message_bytes"].astype(int), strict=True))


def test_shards_of_a_fused_projection_are_whole_heads(transformer_trace):
    """With as many ranks as heads, each has the query, key and value of one."""
    _, split = split_of(transformer_trace, HEADS)
    whole, shard = rows_of(transformer_trace, split, "blocks.0.attention.qkv")
    head = HIDDEN // HEADS
    assert shard["write_bytes"].tolist() == [4 * TOKENS * 3 * head]
    assert shard["flop"].tolist() == [2 * TOKENS * HIDDEN * 3 * head]
    assert shard["read_bytes"].tolist() == [4 * (TOKENS * HIDDEN + 3 * head * (HIDDEN + 1))]
    # All but the weight and its bias grows with the batch, and is not cut as they are.
    assert shard["batch_read_bytes"].tolist() == [4 * TOKENS * HIDDEN]
    whole, shard = rows_of(transformer_trace, split, "blocks.0.attention", name="scaled_dot")
    assert (shard["flop"] * HEADS).tolist() == whole["flop"].tolist()
    assert shard["read_bytes"].tolist() == [3 * 4 * TOKENS * head]


def test_sequence_parallel_cuts_what_lies_between_by_tokens(transformer_trace):
    _, plain = split_of(transformer_trace)
    _, split = split_of(transformer_trace, sequence_parallel=True)
    _, norm = rows_of(transformer_trace, split, "blocks.1.norm1")
    assert norm["read_bytes"].tolist() == [ACTIVATION // 2 + 2 * 4 * HIDDEN]
    assert norm["write_bytes"].tolist() == [ACTIVATION // 2]
    _, back = rows_of(transformer_trace, split, "blocks.1.norm1", "backward", "native_layer_norm")
    assert back["write_bytes"].tolist() == [ACTIVATION // 2 + 2 * 4 * HIDDEN]
    _, residual = rows_of(transformer_trace, split, "blocks.0", name="add")
    assert residual["read_bytes"].tolist() == [ACTIVATION] * 2
    # Split layers, embeddings, head and loss do as much as without it.
    same = ~transformer_trace.operators["module"].str.contains("norm")
    same &= ~transformer_trace.operators["module"].isin(["blocks.0", "blocks.1"])
    for column in ("flop", "read_bytes", "write_bytes"):
        assert split.operators.loc[same, column].equals(plain.operators.loc[same, column])


def test_sequence_parallel_moves_the_bytes_of_the_all_reduces(transformer_trace):
    plain = messages(extrapolate(transformer_trace, make_plan(tensor=2), MODEL))
    plan = make_plan(tensor=2, sequence_parallel=True)
    found = messages(extrapolate(transformer_trace, plan, MODEL))
    layer = [("all_gather", ACTIVATION), ("reduce_scatter", ACTIVATION)] * 2
    norms = 2 * 4 * HIDDEN * (2 * LAYERS + 1)
    assert found == [
        *layer * LAYERS,
        ("all_gather", ACTIVATION),  # the head's input
        *layer * LAYERS,
        ("all_gather", ACTIVATION),  # the embedding's gradient
        ("all_reduce", norms),
    ]
    assert plain == [("all_reduce", ACTIVATION)] * 4 * LAYERS


def test_gradients_of_a_ranks_own_tokens_are_added_up(transformer_trace, bert_trace):
    _, split = split_of(transformer_trace, sequence_parallel=True)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in split.partial_gradients} == {
        "norm1",
        "norm2",
        "norm",
    }
    _, split = split_of(bert_trace, sequence_parallel=True)
    # The dense layer before the head works on tokens too, a row split's bias does not.
    assert {"head.transform.0.weight", "head.transform.0.bias"} <= split.partial_gradients
    assert not any("projection" in name or "down" in name for name in split.partial_gradients)


def test_stages_hand_over_a_ranks_tokens(transformer_trace):
    stages = [["embedding", "blocks.0"], ["blocks.1", "head"]]
    sizes = {}
    for sequence in (False, True):
        plan = make_plan(tensor=2, pipeline=2, micro_batches=2, sequence_parallel=sequence)
        graph = extrapolate(transformer_trace, plan, MODEL, stages=stages)
        sizes[sequence] = [size for name, size in messages(graph) if "send" in name]
    assert sizes[False] == [2 * size for size in sizes[True]] and sizes[True]


@pytest.mark.parametrize("schedule", ["zero-bubble", "gpipe-recompute"])
def test_exchanges_stay_whole_where_backward_runs_in_parts(transformer_trace, schedule):
    plan = make_plan(tensor=2, pipeline=2, schedule=schedule, micro_batches=2, sequence_parallel=True)
    graph = extrapolate(transformer_trace, plan, MODEL)
    tasks = graph.tasks[graph.tasks["kind"] == "collective"]
    assert (tasks.groupby("match_id")["rank"].nunique() == 2).all()
    per_layer = tasks[(tasks["rank"] == 0) & (tasks["name"] == "reduce_scatter")]
    runs = 3 if schedule == "gpipe-recompute" else 2
    backward, forward = 2 * 2, 2 * runs
    layers = sum("blocks" in unit for unit in graph.metadata.stages[0])
    assert len(per_layer) == layers * (backward + forward)


@pytest.mark.parametrize(
    ("fixture", "problem"),
    [("transformer_trace", "16 tokens a sample cannot be shared by 3 ranks"), ("cnn_trace", "looks no tokens up")],
)
def test_tokens_that_cannot_be_shared_are_refused(fixture, problem, request):
    with pytest.raises(PlanError, match=problem):
        split_operators(request.getfixturevalue(fixture), 3, sequence=True)


def test_vocabulary_parallel_splits_embedding_head_and_loss(transformer_trace):
    trace, split = split_of(transformer_trace, vocabulary_parallel=True)
    _, table = rows_of(trace, split, "embedding.token")
    assert table["read_bytes"].tolist() == [4 * WORDS * HIDDEN // 2 + 8 * TOKENS]
    assert table["write_bytes"].tolist() == [ACTIVATION]
    _, head = rows_of(trace, split, "head.vocabulary")
    assert head["flop"].tolist() == [2 * TOKENS * HIDDEN * WORDS // 2]
    assert head["write_bytes"].tolist() == [4 * TOKENS * WORDS // 2]
    whole, loss = rows_of(trace, split, "", "backward", "log_softmax")
    assert (loss["read_bytes"] * 2).tolist() == whole["read_bytes"].tolist()
    _, position = rows_of(trace, split, "embedding.position")
    assert position["read_bytes"].tolist() == [4 * 16 * HIDDEN + 8 * 16]
    found = messages(extrapolate(transformer_trace, make_plan(tensor=2, vocabulary_parallel=True), MODEL))
    layers, token = [("all_reduce", ACTIVATION)] * 2 * LAYERS, ("all_reduce", 4 * TOKENS)
    whole = ("all_reduce", ACTIVATION)
    assert found == [whole, *layers, token, token, token, whole, *layers]


def test_a_vocabulary_that_does_not_divide_is_padded(transformer_trace):
    plan = make_plan(tensor=3, vocabulary_parallel=True)
    prepared = prepare_split(transformer_trace, plan)
    sizes = {g["name"]: g["size_bytes"] for g in prepared.facts.gradients}
    assert sizes["embedding.token.weight"] == sizes["head.vocabulary.weight"] == 129 * HIDDEN * 4
    shapes = {p["name"]: p["shape"] for p in prepared.facts.parameters}
    assert shapes["embedding.token.weight"] == [129, HIDDEN]
    assert shapes["embedding.position.weight"] == [16, HIDDEN]
    graph = extrapolate(transformer_trace, make_plan(tensor=4, data=2, vocabulary_parallel=True), MODEL)
    reduced = [size for name, size in messages(graph) if name == "all_reduce" and size > 10 * ACTIVATION]
    assert not reduced  # no rank's bucket holds a whole vocabulary


def test_a_tied_weight_is_one_shard_for_embedding_and_head(tied_trace):
    plan = make_plan(tensor=2, vocabulary_parallel=True)
    found = find_vocabulary(tied_trace, 2)
    assert found.modules == ("0", "3.vocabulary") and len(found.weights) == 1
    trace, split = split_of(tied_trace, vocabulary_parallel=True)
    assert {split.operators.loc[op, "module"] for op in split.after} == {"0", "3.vocabulary", ""}
    # Both parts of its gradient are shards, and so is their sum.
    whole, parts = trace.operators, split.operators
    backward = (whole["phase"] == "backward") & (whole["write_bytes"] == 4 * 128 * 32)
    assert backward.sum() >= 3
    assert (parts.loc[backward, "write_bytes"] == 2 * 128 * 32).all()
    # In a pipeline the stages that share it add up shards.
    cut = [["embedding", "first"], ["second", "head"]]
    graph = extrapolate(tied_trace, make_plan(tensor=2, pipeline=2, vocabulary_parallel=True), MODEL, stages=cut)
    assert ("all_reduce", 2 * 128 * 32) in messages(graph)
    assert plan.vocabulary_parallel


def test_models_without_words_have_no_vocabulary(cnn_trace):
    with pytest.raises(PlanError, match="no embedding of its tokens"):
        prepare_split(cnn_trace, make_plan(tensor=2, vocabulary_parallel=True))


def test_a_gradient_as_large_as_a_weight_is_no_part_of_it() -> None:
    """With as many tokens as outputs, the gradient of a layer's input has its weight's shape."""
    trace = load_trace("gpt2-tiny-b8")
    row = trace.facts.row
    assert trace.facts.batch * int(row["sequence"]) == 4 * int(row["hidden"])
    tasks = extrapolate(trace, make_plan(tensor=2), ProportionalModel()).tasks
    sums = tasks[(tasks["rank"] == 0) & (tasks["name"] == "all_reduce")]
    assert sums.groupby("phase").size().to_dict() == {
        "backward": 2 * int(row["layers"]),
        "forward": 2 * int(row["layers"]),
    }


SAMPLES, BLOCKS = 8, 4
LAYER_BYTES = SAMPLES * 128 * 256 * 4
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
    return extrapolate(trace, plan, ProportionalModel(), batch=SAMPLES * plan.data)


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
    assert len(sums) == 2 * BLOCKS  # queries, keys and values; the first layer behind them
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
    assert counts[0] - counts[1] == 2 * BLOCKS
    assert set(ours["message_bytes"].astype(int)) >= {LAYER_BYTES}


def test_pieces_of_a_product_are_a_share_of_it_and_of_its_message(trace):
    graph, waiting = build(trace, "products"), build(trace, "none")
    shifts = tasks_of(graph)[lambda frame: frame["name"] == "shift"]
    # Forward of four linear layers a block, and the input's gradient of two.
    assert len(shifts) == 6 * BLOCKS * (RANKS - 1)
    assert set(shifts["message_bytes"].astype(int)) == {LAYER_BYTES // RANKS}
    ours, theirs = (tasks_of(g, "compute") for g in (graph, waiting))
    assert (ours["name"] == "sum of blocks").sum() == 2 * BLOCKS
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
    product = trace.operators[(trace.operators["flop"] > 0) & trace.operators["module"].str.endswith("qkv")]
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


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Traces of small models, captured once each."""
    from trioflow.trace.profile.merge import merge_trace

    pytest.importorskip("torch", reason="capture needs torch (extra [capture])")
    known = {}

    def find(model):
        if model not in known:
            row = {
                "workload": f"test-{model}",
                "family": "user",
                "model": f"{model}:make",
                "optimizer": "sgd",
                "precision": "fp32",
            }
            known[model] = merge_trace(capture_raw(row, tmp_path_factory.mktemp(model)))
        return known[model]

    return find


def exchanges(held):
    return [(e.collective, e.size_bytes) for _, found in sorted(held.items()) for e in found]


def test_every_layer_of_a_cnn_is_gathered_and_scattered(cnn_trace):
    split = split_gathered(cnn_trace, 2)
    whole = cnn_trace.operators
    layers = whole["name"].isin(["aten::conv2d", "aten::linear"]) & (whole["phase"] == "forward")
    outputs = whole.loc[layers, "write_bytes"].tolist()
    assert len(outputs) == 21
    assert exchanges(split.after) == [("all_gather", size) for size in outputs]
    # Backward comes the other way, except for the two branches of a block.
    assert sorted(exchanges(split.before)) == sorted(("reduce_scatter", size) for size in outputs)
    assert all(e.copied for held in split.after.values() for e in held)
    assert (split.operators.loc[layers, "flop"] * 2 == whole.loc[layers, "flop"]).all()
    assert (split.operators.loc[layers, "write_bytes"] * 2 == whole.loc[layers, "write_bytes"]).all()
    norms = whole["name"].str.contains("batch_norm") & (whole["phase"] != "optimizer")
    for column in ("read_bytes", "write_bytes"):
        assert (split.operators.loc[norms, column] == whole.loc[norms, column]).all()
    norm_bytes = sum(
        g["size_bytes"] for g in cnn_trace.facts.gradients if "bn" in g["name"] or "downsample.1" in g["name"]
    )
    assert split.gathered_bytes == norm_bytes
    assert split.input_bytes == (BATCH * 3 * 32 * 32 * 4,)


def test_backward_of_a_layer_reads_its_input_whole(cnn_trace):
    split = split_gathered(cnn_trace, 4)
    whole = cnn_trace.operators
    row = whole[(whole["name"] == "aten::convolution_backward") & (whole["module"] == "layer4.1.conv2")]
    shard = split.operators.loc[row.index[0]]
    activation, weight = BATCH * 512 * 4, 512 * 512 * 9 * 4
    assert shard["read_bytes"] == activation // 4 + activation + weight // 4
    assert shard["write_bytes"] == activation + weight // 4
    assert shard["flop"] * 4 == row["flop"].iloc[0]


def test_channels_that_do_not_divide_are_padded(cnn_trace):
    split = split_gathered(cnn_trace, 3)
    last = max(split.after)
    assert cnn_trace.operators.loc[last, "module"] == "fc"
    assert exchanges({last: split.after[last]}) == [("all_gather", BATCH * 3 * 334 * 4)]
    assert split.operators.loc[last, "write_bytes"] == BATCH * 334 * 4


def test_grouped_convolutions_are_split_by_inputs_and_summed(captured):
    trace = captured("grouped_model")
    layers = {layer.module: layer for layer in find_gathered_layers(trace)}
    assert {m: (layer.split, layer.channels) for m, layer in layers.items()} == {
        "0": ("output", 8),
        "1": ("input", 4),
        "3": ("input", 1),
        "5": ("output", 6),
        "8": ("output", 5),
    }
    split = split_gathered(trace, 2)
    pixels = BATCH * 64 * 4
    assert exchanges(split.after) == [
        ("all_gather", 8 * pixels),
        ("all_reduce", 8 * pixels),
        ("all_reduce", 8 * pixels),
        ("all_gather", 6 * pixels),
        ("all_gather", BATCH * 6 * 4),
    ]
    assert exchanges(split.before) == [
        ("reduce_scatter", BATCH * 6 * 4),
        ("reduce_scatter", 6 * pixels),
        ("all_reduce", 8 * pixels),
        ("all_reduce", 8 * pixels),
        ("reduce_scatter", 8 * pixels),
    ]
    grouped, depthwise = (split.operators.loc[layers[m].op_id] for m in ("1", "3"))
    assert grouped["write_bytes"] == 8 * pixels  # a partial sum
    assert grouped["read_bytes"] == 4 * pixels + 8 * 2 * 9 * 4 + 8 * 4
    whole = trace.operators.loc[layers["3"].op_id]
    assert depthwise["flop"] == whole["flop"] and depthwise["read_bytes"] == whole["read_bytes"]


def test_a_tied_head_is_split_by_inputs(captured):
    trace = captured("tied_model")
    layers = {layer.module: layer for layer in find_gathered_layers(trace)}
    assert layers["0"].split == "output" and layers["3.vocabulary"].split == "input"
    logits = BATCH * 8 * 128 * 4
    split = split_gathered(trace, 2)
    head = layers["3.vocabulary"].op_id
    assert exchanges({head: split.after[head]}) == [("all_reduce", logits)]
    assert ("all_reduce", logits) in exchanges(split.before)
    assert gather_rules(trace)["0"] == gather_rules(trace)["3.vocabulary"] == "row"
    # Products of backward are halves, of the shared weight's gradient too.
    back = (trace.operators["phase"] == "backward") & (trace.operators["flop"] > 0)
    assert (split.operators.loc[back, "flop"] * 2 == trace.operators.loc[back, "flop"]).all()


def test_only_the_first_rank_computes_the_loss(transformer_trace):
    graph = extrapolate(transformer_trace, named_plan("tp-gather", 2), MODEL)
    assert graph.metadata.plan_text.endswith("layer outputs gathered")
    tasks = graph.tasks
    loss = tasks[tasks["name"].str.contains("cross_entropy|nll_loss|log_softmax")]
    assert set(loss["rank"]) == {0} and len(loss) >= 3
    updates = tasks[(tasks["phase"] == "optimizer") & (tasks["kind"] == "compute")]
    assert updates.groupby("rank").size().nunique() == 1
    starts = tasks[(tasks["rank"] == 1) & tasks["message_bytes"].notna()]
    assert starts["name"].tolist()[:2] == ["all_gather", "broadcast"]
    assert starts["name"].tolist()[-1] == "reduce_scatter"
    copies = tasks[(tasks["rank"] == 0) & (tasks["kind"] == "memcpy")]
    assert set(copies["name"]) == {"copy out of all_gather", "copy into reduce_scatter"}
    # Each copy reads and writes its whole buffer once, the target read as well.
    first = copies[copies["name"] == "copy out of all_gather"]["duration_s"].iloc[0]
    assert first == pytest.approx(3 * BATCH * 16 * 32 * 4 / MODEL.bytes_per_s)


def test_a_table_of_positions_does_not_grow_with_the_batch(transformer_trace):
    def gathered(batch):
        graph = extrapolate(transformer_trace, named_plan("tp-gather", 2), MODEL, batch=batch)
        tasks = graph.tasks[(graph.tasks["rank"] == 0) & (graph.tasks["name"] == "all_gather")]
        return tasks["message_bytes"].tolist()

    one, two = gathered(BATCH), gathered(2 * BATCH)
    assert [b / a for a, b in zip(one, two, strict=True)] == [1, 2, 1, *[2] * (len(one) - 3)]


def test_forward_launches_of_one_process_take_turns(transformer_trace):
    steady = replace(transformer_trace, facts=replace(transformer_trace.facts, device="cuda"))
    graph = extrapolate(steady, named_plan("tp-gather", 3), MODEL)
    host = graph.tasks[(graph.tasks["stream"] == "host")]
    forward = host[host["phase"] == "forward"]
    assert set(forward["rank"]) == {0}
    of = graph.dependencies.merge(forward[["task_id"]], left_on="depends_on", right_on="task_id")
    of = of.sort_values(["depends_on", "task_id_x"])
    launched = graph.tasks.set_index("task_id").loc[of["task_id_x"], "rank"].tolist()
    assert launched[:6] == [0, 1, 2, 0, 1, 2]
    assert forward["task_id"].is_monotonic_increasing
    assert set(host[host["phase"] == "backward"]["rank"]) == {0, 1, 2}


def test_a_model_without_layers_is_refused(transformer_trace):
    names = transformer_trace.operators["name"].replace({"aten::linear": "aten::add", "aten::embedding": "aten::add"})
    bare = replace(transformer_trace, operators=transformer_trace.operators.assign(name=names))
    with pytest.raises(PlanError, match="no linear, convolution or embedding layer"):
        split_gathered(bare, 2)
