import re
from dataclasses import replace
from functools import cache
from math import prod

import pytest
from captured import BERT, CNN, TRANSFORMER, capture_raw
from same_model import ProportionalModel
from same_step import assert_same_step, category_bytes
from trioflow.base.errors import TraceError
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.trace.profile.merge import merge_trace
from trioflow.trace.repeat import repeat_block, repeat_layers
from trioflow.trace.store import Trace, load_trace, save_trace

ROWS = {row["workload"]: row for row in (TRANSFORMER, BERT, CNN)}
OPTIMIZERS = ["adamw-foreach", "adamw-fused", "sgd-foreach", "sgd-fused"]


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    """Capture a row with some changes, each once."""

    @cache
    def find(workload, **changes):
        row = {**ROWS[workload], **changes}
        return merge_trace(capture_raw(row, tmp_path_factory.mktemp("raw")))

    return find


@pytest.fixture
def deep_transformer(capture):
    return capture("test-transformer", layers=4)


@pytest.mark.parametrize(("name", "row"), [("transformer_trace", TRANSFORMER), ("bert_trace", BERT)])
def test_a_repeated_step_is_the_captured_deeper_one(name, row, request, capture):
    captured = capture(row["workload"], layers=4)
    made = repeat_layers(request.getfixturevalue(name), 4)
    assert_same_step(made, captured)
    assert category_bytes(made) == category_bytes(captured)
    assert made.facts.row == captured.facts.row
    assert made.facts.repeated == [{"block": "blocks.1", "copies": 3}]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_over_all_parameters_grows_but_occurs_once(optimizer, capture):
    shallow = capture("test-transformer", optimizer=optimizer)
    captured = capture("test-transformer", optimizer=optimizer, layers=4)
    made = repeat_layers(shallow, 4)
    assert_same_step(made, captured)
    spans = made.operators["name"].str.contains("_foreach_|_fused_")
    assert spans.sum() == shallow.operators["name"].str.contains("_foreach_|_fused_").sum() > 0
    last = made.operators[spans].iloc[-1]
    before = shallow.operators[shallow.operators["name"] == last["name"]].iloc[-1]
    sizes = [sum(g["size_bytes"] for g in t.facts.gradients) for t in (made, shallow)]
    assert last["device_ns"] == pytest.approx(before["device_ns"] * sizes[0] / sizes[1], rel=0.01)


def test_an_unreadable_list_grows_as_the_parameters_do(capture):
    shallow = capture("test-transformer", optimizer="sgd-foreach")
    unknown = [{**g, "parameter_storage_id": -1, "gradient_storage_id": -1} for g in shallow.facts.gradients]
    blind = Trace(shallow.operators, shallow.tensors, replace(shallow.facts, gradients=unknown))
    told, guessed = repeat_block(shallow, "blocks.1", 3), repeat_block(blind, "blocks.1", 3)
    for column in ("read_bytes", "write_bytes", "device_ns"):
        mine = [t.operators[t.operators["phase"] == "optimizer"][column].tolist() for t in (told, guessed)]
        assert mine[1] == pytest.approx(mine[0], rel=1e-3), column


def test_resnet18_repeated_stage_by_stage_is_resnet34(cnn_trace, capture):
    made = cnn_trace
    for block, copies in (("layer1.1", 2), ("layer2.1", 3), ("layer3.1", 5), ("layer4.1", 2)):
        made = repeat_block(made, block, copies)
    assert_same_step(made, capture("test-cnn", model="resnet34"))
    # Published for torchvision's resnet34.
    assert sum(prod(p["shape"]) for p in made.facts.parameters) == 21_797_672


@pytest.mark.parametrize(
    "plan",
    [
        replace(make_plan(data=2), first_bucket_bytes=4096, bucket_bytes=20000),
        make_plan(tensor=2),
        make_plan(pipeline=2, micro_batches=2),
        make_plan(pipeline=4, micro_batches=4),
    ],
    ids=["ddp", "tp", "gpipe2", "gpipe4"],
)
def test_plans_send_what_the_captured_deeper_model_sends(plan, transformer_trace, deep_transformer):
    made = repeat_layers(transformer_trace, 4)
    names = [unit["name"] for unit in made.facts.units]
    cut = {1: None, 2: [names[:3], names[3:]], 4: [names[:2], [names[2]], [names[3]], names[4:]]}
    graphs = [
        extrapolate(trace, plan, ProportionalModel(), stages=cut[plan.pipeline]) for trace in (made, deep_transformer)
    ]
    shapes = [
        graph.tasks[["rank", "stream", "kind", "name", "message_bytes", "group", "op_id"]].astype(str)
        for graph in graphs
    ]
    assert shapes[0].equals(shapes[1])
    assert graphs[0].dependencies.equals(graphs[1].dependencies)
    assert graphs[0].metadata.peak_memory_bytes == graphs[1].metadata.peak_memory_bytes


def test_the_step_grows_by_what_was_added(transformer_trace):
    made = repeat_block(transformer_trace, "blocks.0", 3)
    work = [int(t.operators[["device_ns", "cpu_ns"]].to_numpy().sum()) for t in (transformer_trace, made)]
    grown_s = made.facts.step_time_s - transformer_trace.facts.step_time_s
    assert grown_s == pytest.approx((work[1] - work[0]) / 1e9)
    assert made.facts.step_time_source == "repeated"
    ratio = made.facts.step_time_s / transformer_trace.facts.step_time_s
    assert made.facts.step_times_s == pytest.approx([ratio * t for t in transformer_trace.facts.step_times_s])
    start, device, host = (made.operators[c].to_numpy() for c in ("start_ns", "device_ns", "cpu_ns"))
    assert (start[1:] == start[:-1] + device[:-1] + host[1:]).all()
    block = transformer_trace.operators["module"].str.startswith("blocks.0")
    copies = made.operators["module"].str.match(r"blocks\.[012](\.|$)")
    for column in ("device_ns", "cpu_ns"):
        once = int(transformer_trace.operators.loc[block, column].sum())
        assert int(made.operators.loc[copies, column].sum()) == 3 * once


def test_where_the_host_runs_beside_the_device_the_longer_of_both_is_added(transformer_trace):
    cuda = replace(transformer_trace, facts=replace(transformer_trace.facts, device="cuda"))
    made = repeat_block(cuda, "blocks.0", 2)
    added = [made.operators[c].sum() - cuda.operators[c].sum() for c in ("device_ns", "cpu_ns")]
    assert made.facts.step_time_s - cuda.facts.step_time_s == pytest.approx(max(added) / 1e9)


def test_an_untimed_trace_stays_untimed(transformer_trace):
    operators = transformer_trace.operators.assign(start_ns=0, device_ns=0, cpu_ns=0)
    facts = replace(transformer_trace.facts, step_time_s=0.0, step_time_source="none")
    made = repeat_layers(replace(transformer_trace, operators=operators, facts=facts), 3)
    assert made.facts.step_time_source == "none" and made.facts.step_time_s == 0.0


def test_what_was_measured_of_the_shallow_model_goes(transformer_trace):
    facts = replace(transformer_trace.facts, other={"peak_allocated_bytes": 1, "core": 0})
    made = repeat_layers(replace(transformer_trace, facts=facts), 3)
    assert "core" in made.facts.other and "peak_allocated_bytes" not in made.facts.other


def test_one_layer_is_enough_where_all_are_alike(deep_transformer, capture):
    made = repeat_layers(capture("test-transformer", layers=1), 4)
    assert_same_step(made, deep_transformer)


def test_repeating_twice_is_repeating_further(transformer_trace):
    at_once = repeat_block(transformer_trace, "blocks.1", 3)
    in_turn = repeat_block(repeat_block(transformer_trace, "blocks.1", 2), "blocks.2", 2)
    assert_same_step(in_turn, at_once)
    first = repeat_block(transformer_trace, "blocks.0", 3)
    assert_same_step(first, at_once)


def test_a_repeated_trace_is_a_trace(transformer_trace, tmp_path):
    made = repeat_layers(transformer_trace, 3)
    save_trace(made, tmp_path)
    again = load_trace(tmp_path)
    assert again.operators.astype(str).equals(made.operators.astype(str))
    assert again.tensors.astype(str).equals(made.tensors.astype(str))
    assert repeat_layers(transformer_trace, 2).operators.equals(transformer_trace.operators)


def test_without_units_the_modules_tell_the_blocks(transformer_trace):
    operators = transformer_trace.operators.copy()
    operators["module"] = operators["module"].str.replace("blocks.", "transformer.h.")
    renamed = [
        {k: v.replace("blocks.", "transformer.h.") if isinstance(v, str) else v for k, v in g.items()}
        for g in transformer_trace.facts.gradients
    ]
    facts = replace(transformer_trace.facts, units=None, row=None, gradients=renamed, parameters=[])
    made = repeat_layers(Trace(operators, transformer_trace.tensors, facts), 3)
    assert made.facts.repeated == [{"block": "transformer.h.1", "copies": 2}]
    assert [g["index"] for g in made.facts.gradients] == [
        g["index"] for g in repeat_layers(transformer_trace, 3).facts.gradients
    ]
    assert {"transformer.h.2.attention.qkv"} <= set(made.operators["module"])


def stretch(trace, block, column, value):
    operators = trace.operators.copy()
    chosen = operators[operators["module"].str.startswith(f"{block}.") & (operators["flop"] > 0)]
    operators.loc[chosen.index[0], column] = value
    return replace(trace, operators=operators)


def test_a_first_or_last_block_may_differ_where_others_agree(deep_transformer):
    first, last = (stretch(deep_transformer, f"blocks.{i}", "flop", 1) for i in (0, 3))
    assert repeat_layers(first, 5).facts.repeated == [{"block": "blocks.3", "copies": 2}]
    assert repeat_layers(last, 5).facts.repeated == [{"block": "blocks.2", "copies": 2}]
    both = stretch(first, "blocks.3", "flop", 2)
    assert repeat_layers(both, 5).facts.repeated == [{"block": "blocks.2", "copies": 2}]
    with pytest.raises(TraceError, match=r"blocks\.0 and blocks\.1 run different operators"):
        repeat_layers(stretch(deep_transformer, "blocks.1", "flop", 1), 5)


@pytest.mark.parametrize(
    ("block", "copies", "words"),
    [
        ("layer1", 2, "'layer1' is not a block"),
        ("layer1.5", 2, "no block 'layer1.5'; blocks there: layer1.0, layer1.1"),
        ("stage.0", 2, "no block 'stage.0'; name a module"),
        ("layer2.0", 2, "shape [4, 128, 4, 4] in forward but takes none like it"),
        ("layer1.1", 0, "0 copies"),
    ],
)
def test_what_cannot_be_repeated_is_refused(block, copies, words, cnn_trace):
    with pytest.raises(TraceError, match=re.escape(words)):
        repeat_block(cnn_trace, block, copies)


def test_layers_that_cannot_be_told_are_refused(cnn_trace, transformer_trace):
    with pytest.raises(TraceError, match=r"several stacks of blocks .*2 of layer1"):
        repeat_layers(cnn_trace, 4)
    with pytest.raises(TraceError, match=r"1 layers: the trace holds 2 already \(blocks.0 to blocks.1\)"):
        repeat_layers(transformer_trace, 1)
    none = replace(transformer_trace.facts, units=[{"name": "all", "modules": ["head"]}])
    with pytest.raises(TraceError, match="no repeated block"):
        repeat_layers(replace(transformer_trace, facts=none), 4)


def test_a_block_that_hands_no_gradient_on_is_refused(transformer_trace):
    # What a model does whose first block reads its input: nothing flows back through it.
    cut = transformer_trace.operators["module"].str.startswith("embedding")
    backward = transformer_trace.operators["phase"] == "backward"
    kept = transformer_trace.operators[~(cut & backward)].reset_index(drop=True)
    number = {old: new for new, old in enumerate(kept["op_id"])}
    kept["op_id"] = range(len(kept))
    kept["forward_op_id"] = kept["forward_op_id"].map(number, na_action="ignore").astype("Int64")
    with pytest.raises(TraceError, match=r"nothing that block 'blocks.0' makes in backward is read"):
        repeat_block(replace(transformer_trace, operators=kept), "blocks.0", 2)
