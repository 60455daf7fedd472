import pytest
from captured import BATCH
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.parallel.splits.tensor_parallel import split_for_plan, split_operators
from trioflow.parallel.splits.vocabulary import find_vocabulary, prepare_split
from trioflow.trace.store import load_trace

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
        *layer * LAYERS, ("all_gather", ACTIVATION),  # the head's input
        *layer * LAYERS, ("all_gather", ACTIVATION),  # the embedding's gradient
        ("all_reduce", norms),
    ]  # fmt: skip
    assert plain == [("all_reduce", ACTIVATION)] * 4 * LAYERS


def test_gradients_of_a_ranks_own_tokens_are_added_up(transformer_trace, bert_trace):
    _, split = split_of(transformer_trace, sequence_parallel=True)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in split.partial_gradients} == {
        "norm1", "norm2", "norm",
    }  # fmt: skip
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
    plan = make_plan(
        tensor=2, pipeline=2, schedule=schedule, micro_batches=2, sequence_parallel=True
    )
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
)  # fmt: skip
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
    found = messages(
        extrapolate(transformer_trace, make_plan(tensor=2, vocabulary_parallel=True), MODEL)
    )
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
    graph = extrapolate(
        transformer_trace, make_plan(tensor=4, data=2, vocabulary_parallel=True), MODEL
    )
    reduced = [
        size for name, size in messages(graph) if name == "all_reduce" and size > 10 * ACTIVATION
    ]
    assert not reduced  # no rank's bucket holds a whole vocabulary


def test_a_tied_weight_is_one_shard_for_embedding_and_head(tied_trace):
    plan = make_plan(tensor=2, vocabulary_parallel=True)
    found = find_vocabulary(tied_trace, 2)
    assert found.modules == ("0", "3.vocabulary") and len(found.weights) == 1
    trace, split = split_of(tied_trace, vocabulary_parallel=True)
    assert {split.operators.loc[op, "module"] for op in split.after} == {
        "0", "3.vocabulary", "",
    }  # fmt: skip
    # Both parts of its gradient are shards, and so is their sum.
    whole, parts = trace.operators, split.operators
    backward = (whole["phase"] == "backward") & (whole["write_bytes"] == 4 * 128 * 32)
    assert backward.sum() >= 3
    assert (parts.loc[backward, "write_bytes"] == 2 * 128 * 32).all()
    # In a pipeline the stages that share it add up shards.
    cut = [["embedding", "first"], ["second", "head"]]
    graph = extrapolate(
        tied_trace, make_plan(tensor=2, pipeline=2, vocabulary_parallel=True), MODEL, stages=cut
    )
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
        "backward": 2 * int(row["layers"]), "forward": 2 * int(row["layers"]),
    }  # fmt: skip
