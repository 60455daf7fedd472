from dataclasses import replace

import pytest
from captured import BATCH, capture_raw
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow_evaluation.one_process.gathered_layers import (
    find_gathered_layers,
    gather_rules,
    split_gathered,
)

MODEL = ProportionalModel()


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Traces of small models, captured once each."""
    from trioflow.trace.profile.merge import merge_trace

    pytest.importorskip("torch", reason="capture needs torch (extra [capture])")
    known = {}

    def find(model):
        if model not in known:
            row = {"workload": f"test-{model}", "family": "user", "model": f"{model}:make",
                   "optimizer": "sgd", "precision": "fp32"}  # fmt: skip
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
    assert (
        split.operators.loc[layers, "write_bytes"] * 2 == whole.loc[layers, "write_bytes"]
    ).all()
    norms = whole["name"].str.contains("batch_norm") & (whole["phase"] != "optimizer")
    for column in ("read_bytes", "write_bytes"):
        assert (split.operators.loc[norms, column] == whole.loc[norms, column]).all()
    norm_bytes = sum(
        g["size_bytes"]
        for g in cnn_trace.facts.gradients
        if "bn" in g["name"] or "downsample.1" in g["name"]
    )
    assert split.gathered_bytes == norm_bytes
    assert split.input_bytes == (BATCH * 3 * 32 * 32 * 4,)


def test_backward_of_a_layer_reads_its_input_whole(cnn_trace):
    split = split_gathered(cnn_trace, 4)
    whole = cnn_trace.operators
    row = whole[
        (whole["name"] == "aten::convolution_backward") & (whole["module"] == "layer4.1.conv2")
    ]
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
        "0": ("output", 8), "1": ("input", 4), "3": ("input", 1), "5": ("output", 6), "8": ("output", 5),
    }  # fmt: skip
    split = split_gathered(trace, 2)
    pixels = BATCH * 64 * 4
    assert exchanges(split.after) == [
        ("all_gather", 8 * pixels), ("all_reduce", 8 * pixels), ("all_reduce", 8 * pixels),
        ("all_gather", 6 * pixels), ("all_gather", BATCH * 6 * 4),
    ]  # fmt: skip
    assert exchanges(split.before) == [
        ("reduce_scatter", BATCH * 6 * 4), ("reduce_scatter", 6 * pixels),
        ("all_reduce", 8 * pixels), ("all_reduce", 8 * pixels), ("reduce_scatter", 8 * pixels),
    ]  # fmt: skip
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
    assert graph.metadata.plan_text.endswith("outputs of layers gathered")
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
    names = transformer_trace.operators["name"].replace(
        {"aten::linear": "aten::add", "aten::embedding": "aten::add"}
    )
    bare = replace(transformer_trace, operators=transformer_trace.operators.assign(name=names))
    with pytest.raises(PlanError, match="no linear, convolution or embedding layer"):
        split_gathered(bare, 2)
