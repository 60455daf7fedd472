"""Tensor parallelism: what cannot be split, how a vocabulary is padded, layers whose outputs are gathered.

Messages and their overlap, golden answers keep (`made.step`) and tests/conformance compares with PyTorch.
"""

from dataclasses import replace
from typing import Any

import pytest
from captured import BATCH, capture_raw
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.formats.megatron import parse_arguments, read_megatron
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.parallel.splits.tensor_parallel import split_operators
from trioflow.parallel.splits.tensor_split import prepare_split
from trioflow.parallel.task_graph import TaskGraph
from trioflow.trace.store import Trace, load_trace
from trioflow_evaluation.one_process.programs import find_gathered_layers, gather_rules, split_gathered

MODEL = ProportionalModel()
TOKENS, HIDDEN, WORDS, HEADS, LAYERS = BATCH * 16, 32, 128, 4, 2
ACTIVATION = 4 * TOKENS * HIDDEN


def messages(graph, rank=0):
    tasks = graph.tasks[(graph.tasks["rank"] == rank) & graph.tasks["message_bytes"].notna()]
    return list(zip(tasks["name"], tasks["message_bytes"].astype(int), strict=True))


@pytest.mark.parametrize(
    ("fixture", "problem"),
    [("transformer_trace", "16 tokens a sample cannot be shared by 3 ranks"), ("cnn_trace", "looks no tokens up")],
)
def test_tokens_that_cannot_be_shared_are_refused(fixture, problem, request):
    with pytest.raises(PlanError, match=problem):
        split_operators(request.getfixturevalue(fixture), 3, sequence=True)


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


def test_models_without_words_have_no_vocabulary(cnn_trace):
    with pytest.raises(PlanError, match="no embedding of its tokens"):
        prepare_split(cnn_trace, make_plan(tensor=2, vocabulary_parallel=True))


SAMPLES, BLOCKS = 8, 4
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
    grouped, depthwise = (split.operators.to_frame().loc[layers[m].op_id] for m in ("1", "3"))
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
    assert (split.operators.to_frame().loc[back, "flop"] * 2 == trace.operators.loc[back, "flop"]).all()


def test_a_model_without_layers_is_refused(transformer_trace):
    names = transformer_trace.operators["name"].replace({"aten::linear": "aten::add", "aten::embedding": "aten::add"})
    bare = replace(transformer_trace, operators=transformer_trace.operators.assign(name=names))
    with pytest.raises(PlanError, match="no linear, convolution or embedding layer"):
        split_gathered(bare, 2)
