from dataclasses import asdict, replace
from math import prod

import pytest
from captured import make_once
from same_model import ProportionalModel
from same_step import assert_same_step, category_bytes
from trioflow.base.errors import InputError, PlanError
from trioflow.base.precision_recipes import RECIPES
from trioflow.costmodel.choices import PREDICTED, host_times
from trioflow.formats.megatron import read_megatron
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.parallel.splits.pipeline import find_gradients, list_added_gradients, list_parameters
from trioflow.parallel.splits.tensor_parallel import split_operators
from trioflow.parallel.splits.tensor_split import prepare_split
from trioflow.trace.language import make
from trioflow.trace.language.read import published_models
from trioflow.trace.language.sizes import LanguageModel, LanguageStep
from trioflow.trace.store import Trace, load_trace, tensor_bytes

pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

SMALL = LanguageModel("small", 4, 64, 4, 2, 16, 96, 256)
GPT = replace(
    SMALL,
    name="gpt",
    kv_heads=4,
    norm="layer",
    activation="gelu_tanh",
    gated=False,
    query_bias=True,
    output_bias=True,
    feed_forward_bias=True,
    positions="learned",
    longest=32,
    tied=True,
    dropout=0.1,
)
EXPERTS = replace(SMALL, name="experts", experts=8, experts_per_token=2, feed_forward=48, shared_feed_forward=64)
LATENT = replace(
    EXPERTS,
    name="latent",
    layers=5,
    kv_heads=4,
    head_size=24,
    rotary_size=8,
    value_size=16,
    latent=32,
    query_latent=40,
    query_norm=True,
    dense_layers=2,
    dense_feed_forward=128,
)
WINDOWED = replace(
    EXPERTS,
    name="windowed",
    window=4,
    sinks=True,
    router_bias=True,
    query_bias=True,
    output_bias=True,
    feed_forward_bias=True,
    shared_feed_forward=0,
)
STEP = LanguageStep(32, 2, "megatron-bf16")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder in which each trace is made once for all tests."""
    return make_once(tmp_path_factory, "language-traces", lambda _: None)


@pytest.fixture(autouse=True)
def own_cache(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


NORMED = replace(SMALL, name="normed", query_norm=True)
BOTH = [
    (GPT, "megatron-bf16"),
    (NORMED, "bf16"),
    *(
        pytest.param(model, precision, marks=pytest.mark.slow)
        for model, precision in ((SMALL, "bf16"), (SMALL, "megatron-bf16"), (GPT, "bf16"), (NORMED, "megatron-bf16"))
    ),
]
"""In the fast tier every precision once, with the models that have most in a block; in the slow one each with each."""


@pytest.mark.parametrize(("model", "precision"), BOTH)
def test_one_block_repeated_is_the_model_captured_whole(model, precision, monkeypatch):
    step = replace(STEP, precision=precision)
    made = make.make_trace(model, step)
    monkeypatch.setattr(make, "CAPTURED_BLOCKS", model.layers)
    monkeypatch.setattr(make, "MODULES", ("tables",))  # another name in the cache
    captured = make.make_trace(model, step)
    assert captured.facts.repeated is None
    assert_same_step(made, captured)
    assert category_bytes(made) == category_bytes(captured)


@pytest.mark.parametrize("model", [SMALL, GPT, EXPERTS, LATENT, WINDOWED], ids=lambda model: model.name)
def test_a_trace_has_the_parameters_that_the_sizes_say(model):
    trace = make.make_trace(model, STEP)
    counted = sum(g["size_bytes"] for g in trace.facts.gradients) // 2
    assert counted == model.parameters
    assert trace.facts.language_model["parameters"] == model.parameters


def test_flops_are_six_a_parameter_and_token_beside_attention_and_lookup():
    model = replace(published_models()["llama-3.1-8b"], layers=2)
    trace = make.make_trace(model, LanguageStep(1024, 1, "megatron-bf16"))
    products = 6 * (model.parameters - model.vocabulary * model.hidden) * 1024
    width = model.heads * model.head_size
    # Forward two products, backward five: flash attention computes the scores again.
    attention = 14 * model.layers * width * 1024**2
    assert int(trace.operators["flop"].sum()) == pytest.approx(products + attention, rel=2e-4)
    assert model.flop_per_token(1024) * 1024 == pytest.approx(
        products + 6 * model.vocabulary * model.hidden * 1024 + attention * 12 / 14, rel=1e-9
    )


@pytest.mark.parametrize(
    "name",
    [
        "bf16",
        "fsdp2-mixed",
        "fsdp2-bf16-reduce",
        "megatron-bf16",
        "pure-bf16",
        "megatron-fp16",
        "megatron-fp16-fp32-reduce",
        "megatron-bf16-reduce",
    ],
)
def test_a_recipe_decides_the_formats_of_what_is_held(name):
    trace, recipe = (make.make_trace(SMALL, replace(STEP, precision=name, sequence=40)), RECIPES[name])
    held, count = category_bytes(trace), SMALL.parameters
    assert held["parameter"] == recipe.parameter_bytes * count
    assert held["gradient"] == recipe.gradient_bytes * count
    states = 2 * recipe.state_bytes + recipe.main_parameter_bytes
    if recipe.keeps_main_gradients and recipe.gradient_bytes < 4:
        states += 4  # the update's own copy of the gradients
    assert held["optimizer_state"] == pytest.approx(states * count, rel=0.01)  # counts of steps
    assert trace.facts.precision == ("fp16" if "fp16" in name else "bf16")
    assert trace.facts.precision_recipe == (None if name == "bf16" else name)
    # What becomes a gradient when it is cast, or added to another, is as large whatever the batch.
    weights = {tuple(sorted(p["shape"])) for p in trace.facts.parameters}
    shape = trace.tensors["shape"].tolist()
    backward = trace.operators[(trace.operators["phase"] == "backward") & (trace.operators["name"] == "aten::mm")]
    found = {True: 0, False: 0}
    for row in backward.itertuples():
        found[tuple(sorted(shape[row.output_ids[0]])) in weights] += row.batch_write_bytes
    assert found[True] == 0 < found[False]


def test_flash_attention_keeps_no_scores_and_eager_does():
    kept = {
        kind: category_bytes(make.make_trace(SMALL, replace(STEP, attention=kind)))["activation"]
        for kind in ("flash", "fused-softmax", "eager")
    }
    scores = STEP.batch * SMALL.heads * STEP.sequence**2
    assert kept["eager"] - kept["flash"] >= SMALL.layers * scores * (4 + 2)
    # One kernel from the products to the probabilities, all in half precision.
    assert kept["eager"] - kept["fused-softmax"] >= SMALL.layers * scores * 4


def test_what_is_dropped_is_remembered_in_a_byte_an_element():
    trace = make.make_trace(replace(GPT, attention_dropout=0.1), replace(STEP, attention="fused-softmax"))
    masks = trace.tensors[trace.tensors["dtype"] == "bool"]
    tokens, scores = STEP.batch * STEP.sequence, STEP.batch * GPT.heads * STEP.sequence**2
    # Behind the embedding, and twice in each block; attention's weights once.
    elements = (2 * GPT.layers + 1) * tokens * GPT.hidden + GPT.layers * scores
    assert sum(prod(shape) for shape in masks["shape"]) == elements
    assert set(masks["elem_bytes"]) == {1}


def test_a_trace_is_kept_and_a_damaged_one_made_again(tmp_path, monkeypatch):
    first = make.make_trace(SMALL, STEP)
    with monkeypatch.context() as patch:
        patch.setattr(make, "_capture", None)
        assert_same_step(make.make_trace(SMALL, STEP), first)
    name = f"{make._name(SMALL.name, [asdict(SMALL), asdict(STEP.settle())])}.trace"
    content = (make.cache_folder() / name).read_bytes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make.cache_folder().mkdir(parents=True)
    (make.cache_folder() / name).write_bytes(content[:1000])
    assert_same_step(make.make_trace(SMALL, STEP), first)
    assert len(list(make.cache_folder().iterdir())) == 1


def test_a_model_by_name_is_a_trace_wherever_one_is_asked_for():
    trace = load_trace("llama-3.2-1b", sequence=64, precision="megatron-bf16")
    assert trace.facts.language_model["layers"] == 16
    with pytest.raises(InputError, match="sequence of a trace that was captured"):
        load_trace("gpt2-tiny-b8", sequence=64)
    with pytest.raises(InputError, match="has 2048 positions"):
        load_trace("gpt3-175b", sequence=4096)


def test_without_torch_the_extra_is_named(tmp_path, monkeypatch):
    import sys

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "trioflow.trace.capture.meta", None)
    with pytest.raises(InputError, match=r"pip install '.*\[capture\]'"):
        make.make_trace(SMALL, STEP)


@pytest.mark.parametrize("model", [pytest.param(EXPERTS, marks=pytest.mark.slow), LATENT], ids=lambda model: model.name)
def test_one_block_with_experts_repeated_is_the_model_captured_whole(model, monkeypatch):
    made = make.make_trace(model, STEP)
    assert made.facts.repeated
    monkeypatch.setattr(make, "CAPTURED_BLOCKS", model.layers)
    monkeypatch.setattr(make, "MODULES", ("tables",))  # another name in the cache
    assert_same_step(made, make.make_trace(model, STEP))


def attention_of(trace):
    """FLOPs of attention, forward and backward, by block."""
    rows = trace.operators[trace.operators["name"].str.contains("scaled_dot_product")]
    return rows.groupby(rows["module"].str.split(".").str[2])["flop"].sum().to_dict()


def test_flops_of_latent_attention_are_those_of_its_products():
    model = replace(published_models()["deepseek-v3"], layers=4)
    trace = make.make_trace(model, LanguageStep(512, 1, "megatron-bf16"))
    products = 6 * (model.active_parameters - model.vocabulary * model.hidden) * 512
    keys, values = model.heads * 192, model.heads * 128
    attention = 2 * 512**2 * (4 * keys + 3 * values)  # scores three times and again, values thrice
    assert set(attention_of(trace).values()) == {attention}
    found = int(trace.operators["flop"].sum())
    assert found == pytest.approx(products + model.layers * attention, rel=2e-4)
    assert trace.facts.causal_attention
    # One kernel: no table of scores is made, in whatever format.
    most = max(prod(shape) for shape in trace.tensors["shape"] if len(shape) == 4)
    assert most == 512 * model.heads * 256  # keys and values of the second product


def test_attention_in_a_window_computes_as_many_scores_as_its_tokens_read():
    long = replace(STEP, sequence=128)
    half, whole = (attention_of(make.make_trace(replace(WINDOWED, window=window), long)) for window in (4, 0))
    assert whole["0"] == half["1"] == half["3"]
    assert half["0"] == half["2"] == whole["0"] * 2 * 4 // 128
    model = replace(WINDOWED, window=4)
    dropped = replace(model, window=0).flop_per_token(128) - model.flop_per_token(128)
    assert dropped == 12 * 2 * model.heads * model.head_size * (128 - 8)


def test_ranks_of_latent_attention_hold_its_narrow_products_whole():
    trace = make.make_trace(LATENT, STEP)
    split = split_operators(trace, 2)
    for name, share in (("q_a_proj", 1), ("kv_a_proj", 1), ("q_b_proj", 2), ("kv_b_proj", 2)):
        rows = trace.operators["module"].str.fullmatch(rf"model\.layers\.\d+\.self_attn\.{name}")
        rows &= trace.operators["flop"] > 0
        assert rows.sum() == 3 * LATENT.layers
        assert (split.operators.to_frame().loc[rows, "flop"] * share == trace.operators.loc[rows, "flop"]).all()
    sums = [e.size_bytes for held in split.after.values() for e in held]
    narrow = STEP.batch * STEP.sequence * 2
    assert sums.count(narrow * LATENT.latent) == sums.count(narrow * LATENT.query_latent) == LATENT.layers


def test_biases_of_experts_are_added_behind_the_sum_of_shards():
    plain = replace(WINDOWED, feed_forward_bias=False)
    exchanges = [
        sorted(e.size_bytes for e in split_operators(make.make_trace(m, STEP), 2).exchanges) for m in (plain, WINDOWED)
    ]
    assert exchanges[0] == exchanges[1]


def test_flops_of_experts_are_six_a_parameter_that_a_token_passes():
    model = replace(published_models()["mixtral-8x7b"], layers=2)
    trace = make.make_trace(model, LanguageStep(512, 1, "megatron-bf16"))
    products = 6 * (model.active_parameters - model.vocabulary * model.hidden) * 512
    attention = 14 * model.layers * model.heads * model.head_size * 512**2
    assert int(trace.operators["flop"].sum()) == pytest.approx(products + attention, rel=2e-4)
    assert "auxiliary loss is left out" in " ".join(trace.facts.warnings)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_need_weights_in_half_precision(precision):
    with pytest.raises(InputError, match=r"grouped GEMMs.*use one of fsdp2-mixed, .*megatron-bf16"):
        make.make_trace(EXPERTS, replace(STEP, precision=precision))


def test_ranks_that_split_experts_share_their_products_and_add_up_once():
    trace = make.make_trace(EXPERTS, STEP)
    split = split_operators(trace, 2)
    grouped = trace.operators["name"] == "aten::_grouped_mm"
    assert (split.operators.to_frame().loc[grouped, "flop"] * 2 == trace.operators.loc[grouped, "flop"]).all()
    rows = STEP.batch * STEP.sequence * EXPERTS.experts_per_token
    modules = trace.operators["module"].str.fullmatch(r"model\.layers\.\d+\.mlp\.\w+_proj")
    of_experts = [e.size_bytes for op, found in split.after.items() if modules[op] for e in found]
    # Forward adds up what leaves the experts, backward what entered them by gate and up.
    assert of_experts == [rows * EXPERTS.hidden * 2] * 2 * EXPERTS.layers


def test_every_rank_of_fsdp_holds_a_part_of_each_expert():
    found = {p.name: p for p in list_parameters(make.make_trace(EXPERTS, STEP))}
    weight = found["model.layers.0.mlp.gate_up_proj.weight"]
    assert weight.shape == (8, 64, 96)
    assert weight.padded_bytes(32) == weight.size_bytes
    assert weight.padded_bytes(48) == weight.size_bytes * 96 // 64
    split = {p.name: p for p in list_parameters(make.make_trace(EXPERTS, STEP), 4)}
    assert split["model.layers.0.mlp.gate_up_proj.weight"].shape == (8, 64, 24)
    assert split["model.layers.0.mlp.down_proj.weight"].shape == (8, 12, 64)


def test_layers_that_read_the_same_are_one_product_in_megatron():
    apart, fused = (make.make_trace(SMALL, replace(STEP, fusion=word)) for word in ("flash-attn", "layers"))
    names = [trace.operators["name"].value_counts() for trace in (apart, fused)]
    assert [name["aten::linear"] for name in names] == [7 * SMALL.layers + 1, 4 * SMALL.layers + 1]
    assert names[1]["aten::glu"] == SMALL.layers and "aten::silu" not in names[1]
    work = [trace.operators["flop"].sum() for trace in (apart, fused)]
    parameters = [trace.facts.language_model["parameters"] for trace in (apart, fused)]
    assert work[0] == work[1] and parameters[0] == parameters[1]


@pytest.mark.parametrize("model", [SMALL, EXPERTS], ids=lambda model: model.name)
def test_products_add_to_main_gradients_in_megatron(model):
    cast, added = (make.make_trace(model, replace(STEP, fusion=word)) for word in ("layers", ""))
    assert list_added_gradients(cast) == frozenset()
    own = list_added_gradients(added)
    sizes = {g["name"]: g["size_bytes"] for g in cast.facts.gradients}
    assert own and all(("proj" in name or "head" in name or "gate" in name) == (name in own) for name in sizes)
    names = [trace.operators["name"].value_counts()["aten::to"] for trace in (cast, added)]
    assert names[0] - names[1] == len(own)
    # What they add to is the gradient that was cast to, as large as before and of the same parameter.
    held = find_gradients(added)
    size = dict(zip(added.tensors["storage_id"], tensor_bytes(added), strict=True))
    assert {name: size[held[name]] for name in own} == {name: sizes[name] * 2 for name in own}
    ready = [g["ready_after_op_id"] for g in added.facts.gradients if g["name"] in own]
    made = added.operators.iloc[ready]
    assert (made["write_bytes"] > 0).all() and not made["batch_write_bytes"].any()


def test_gradients_are_added_by_products_only_where_they_are_kept_in_fp32():
    with pytest.raises(InputError, match=r"--fusion gradients: with --precision nanotron-bf16 no product adds.*fp8"):
        make.make_trace(SMALL, replace(STEP, precision="nanotron-bf16", fusion="gradients"))


def test_further_micro_batches_add_only_what_no_product_adds():
    found = []
    for word in ("layers", ""):
        trace = make.make_trace(SMALL, replace(STEP, fusion=word))
        timed = Trace(trace.operators.assign(device_ns=1000), trace.tensors, trace.facts)
        graph = extrapolate(timed, make_plan(accumulate=2), ProportionalModel())
        rows = graph.tasks[graph.tasks["name"] == "gradient accumulation"]
        found.append(float(rows["duration_s"].sum()))
    assert 0 < found[1] < found[0] / 2


@pytest.mark.parametrize("precision", ["pure-bf16", "bf16"])
def test_eager_operators_of_a_block_are_those_that_transformers_runs(precision):
    pytest.importorskip("transformers", reason="the other model comes from transformers")
    from trioflow.trace.capture.meta import capture_meta

    model = replace(published_models()["llama-3.2-1b"], layers=2)
    row = {"workload": "x", "layers": 2, "sequence": 64, "optimizer": "adamw-fused", "precision": precision}
    theirs = capture_meta(row | {"family": "transformers", "model": "llama-3.2-1b"}, 2)
    ours = make.make_trace(model, LanguageStep(64, 2, precision))
    assert ours.facts.language_model["fusion"] == "eager"
    found, due = (count_block(trace) for trace in (ours, theirs))
    assert found == due and sum(due.values()) > 100


def count_block(trace):
    """What forward and backward of the second block run: how often each operator, with the bytes that it moves."""
    work = ["phase", "name", "flop", "read_bytes", "write_bytes"]
    rows = trace.operators[trace.operators["module"].str.startswith("model.layers.1")]
    rows = rows[(rows["phase"] != "optimizer") & (rows["read_bytes"] + rows["write_bytes"] > 0)]
    return rows[work].value_counts().to_dict()


def test_what_a_compiler_fuses_moves_fewer_bytes_and_computes_the_same():
    traces = {
        word: make.make_trace(SMALL, LanguageStep(32, 2, "fsdp2-mixed", fusion=word))
        for word in ("eager", "flash-attn", "compile", "liger")
    }
    assert len({trace.operators["flop"].sum() for trace in traces.values()}) == 1
    moved = {word: trace.operators[["read_bytes", "write_bytes"]].sum().sum() for word, trace in traces.items()}
    assert moved["eager"] > moved["flash-attn"] > moved["compile"]
    kept = {word: category_bytes(trace)["activation"] for word, trace in traces.items()}
    assert kept["eager"] > kept["flash-attn"] > kept["compile"]
    for trace in traces.values():
        assert {g["name"] for g in trace.facts.gradients} >= {"lm_head.weight", "model.norm.weight"}
    # Scores stay in half precision and are read once each way.
    loss = traces["compile"].operators
    loss = loss[loss["name"].str.contains("cross_entropy")]
    scores = 2 * 32 * SMALL.vocabulary * 2
    assert loss["read_bytes"].between(scores, 1.1 * scores).all() and len(loss) == 2
    assert loss["write_bytes"].max() == scores


def test_liger_has_no_more_scores_than_those_of_a_piece():
    wide = replace(SMALL, vocabulary=1024)
    trace = make.make_trace(wide, LanguageStep(32, 2, "fsdp2-mixed", fusion="liger"))
    scores = [shape for shape in trace.tensors["shape"] if len(shape) == 2 and shape[-1] == 1024]
    assert {tuple(shape) for shape in scores} == {(4, 1024), (64, 1024)}  # a weight, turned
    names = trace.operators["name"].value_counts()
    assert names["trioflow::cross_entropy"] == names["aten::addmm_"] == 64 // 4
    with pytest.raises(PlanError, match="--fusion liger"):
        prepare_split(trace, make_plan(tensor=2))


@pytest.mark.parametrize(
    ("precision", "fusion"),
    [
        ("fsdp2-mixed", "eager"),
        ("bf16", "eager"),
        ("pure-bf16", "eager"),
        ("nanotron-bf16", "flash-attn"),
        ("megatron-bf16", "gradients"),
        ("fp8", "gradients"),
        ("megatron-tf32", "gradients"),
    ],
)
def test_a_recipe_runs_its_framework_s_kernels(precision, fusion):
    assert LanguageStep(8, 1, precision).settle().fusion == fusion


@pytest.mark.parametrize(
    ("arguments", "attention", "fusion"),
    [
        ({}, "cudnn", ""),
        ({"no-gradient-accumulation-fusion": True}, "cudnn", "layers"),
        ({"attention-backend": "flash"}, "flash", ""),
        ({"bf16": False}, "eager", ""),
    ],
)
def test_megatron_says_what_runs_as_one_kernel(arguments, attention, fusion):
    given = {
        "num-layers": 2,
        "hidden-size": 64,
        "num-attention-heads": 4,
        "seq-length": 32,
        "bf16": True,
        "swiglu": True,
    }
    found = read_megatron({**given, "max-position-embeddings": 32, **arguments, "vocab-size": 100}, "x", "x")
    assert (found.step["attention"], found.step["fusion"]) == (attention, fusion)


def test_a_block_s_graphs_are_launched_once_each_way(cache):
    times = {}
    for graphs in (False, True):
        trace = make.make_trace(SMALL, replace(STEP, cuda_graphs=graphs))
        timed = trace.operators.assign(device_ns=(trace.operators["flop"] + trace.operators["write_bytes"] > 0) * 1000)
        facts = replace(trace.facts, step_time_source=PREDICTED)
        times[graphs] = host_times(replace(trace, facts=facts), timed, 1e-6)
        block = timed["module"].str.match(r"model\.layers\.\d+").to_numpy()
        phase = timed["phase"].to_numpy()
        inside = block & (phase != "optimizer")
        if graphs:
            assert times[True][inside].sum() == pytest.approx(2 * SMALL.layers * 1e-6)
    assert times[False][inside].sum() > 10 * times[True][inside].sum()
    assert (times[False][~inside] == times[True][~inside]).all()
    with pytest.raises(InputError, match="--cuda-graphs: how many tokens an expert gets"):
        make.make_trace(EXPERTS, replace(STEP, cuda_graphs=True))


@pytest.mark.parametrize("precision", ["bf16", "megatron-fp16"])
def test_experts_in_another_format_than_bf16_are_refused(precision):
    with pytest.raises(InputError, match=f"--precision {precision}: experts are computed .* in bf16"):
        make.make_trace(EXPERTS, replace(STEP, precision=precision))


def test_where_no_recipe_is_named_dense_models_and_experts_have_one_that_runs():
    for model in (SMALL, EXPERTS):
        trace = make.make_trace(model, LanguageStep(32, 2))
        assert trace.facts.recipe.name == "megatron-bf16"
