"""Frozen parameters and adapters of language models by name: sizes, gradients, plans, words."""

import json
from dataclasses import replace
from math import prod

import pytest
from captured import make_once, with_steady_times
from same_model import ProportionalModel
from same_step import assert_same_step
from trioflow import make_plan, predict, search
from trioflow.base.errors import InputError
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow.parallel.splits.tensor_split import find_layers, kind_of_module
from trioflow.trace.language import make
from trioflow.trace.language.sizes import LanguageModel, LanguageStep

pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

SMALL = LanguageModel("small", 4, 64, 4, 2, 16, 96, 256)
EXPERTS = replace(SMALL, name="experts", experts=8, experts_per_token=2, feed_forward=48)
LATENT = replace(
    SMALL, name="latent", kv_heads=4, head_size=24, rotary_size=8, value_size=16, latent=32, query_latent=40
)
STEP = LanguageStep(32, 2, "megatron-bf16")
LORA = {"lora": 4}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    cache = make_once(tmp_path_factory, "language-traces", lambda _: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("bf16", {"lora": 4, "lora_targets": "q,k,v,o,gate,up,down", "lora_dropout": 0.1}),
        ("pure-bf16", LORA),
        ("megatron-bf16", LORA),
        ("megatron-bf16", {"freeze": "model.embed_tokens,*.mlp"}),
    ],
)
def test_one_block_repeated_is_the_model_captured_whole(precision, words, monkeypatch):
    step = replace(STEP, precision=precision, **words)
    repeated = make.make_trace(SMALL, step)
    monkeypatch.setattr(make, "CAPTURED_BLOCKS", SMALL.layers)
    assert_same_step(repeated, make._capture(SMALL, step.settle()))


def test_patterns_with_numbers_freeze_single_blocks():
    trace = make.make_trace(SMALL, replace(STEP, freeze="model.embed_tokens,model.layers.[0-1]"))
    trained = {g["name"].removeprefix("model.") for g in trace.facts.gradients}
    assert {n.split(".")[1] for n in trained if n.startswith("layers")} == {"2", "3"}
    products = trace.operators.query("phase == 'backward' and flop > 0")["module"]
    assert not any(products.str.startswith(f"model.layers.{i}.").any() for i in range(2))


@pytest.mark.parametrize(
    ("model", "words", "count"),
    [
        # 4 blocks of 64 wide: queries of 64, keys and values of 32 with two heads of 16.
        (SMALL, {}, 4 * 4 * (64 + 64 + 64 + 32)),
        (SMALL, {"lora_targets": "q_proj,down"}, 4 * 4 * (64 + 64 + 96 + 64)),
        (SMALL, {"lora_targets": "all-linear"}, 4 * 4 * (2 * 128 + 2 * 96 + 3 * 160)),
    ],
)
def test_adapters_have_as_many_parameters_as_peft_s(model, words, count):
    trace = make.make_trace(model, replace(STEP, precision="pure-bf16", lora=4, **words))
    assert trace.facts.language_model["trained_parameters"] == count
    trained = [p for p in trace.facts.parameters if not p["frozen"]]
    assert {p["elem_bytes"] for p in trained} == {4}  # in fp32, as PEFT's
    frozen = sum(prod(p["shape"]) for p in trace.facts.parameters if p["frozen"])
    assert frozen == model.parameters
    assert len(trace.facts.gradients) == len(trained)


@pytest.mark.parametrize(
    "plan",
    [
        named_plan("ddp", 2),
        named_plan("fsdp", 2),
        named_plan("zero1", 2),
        named_plan("distributed", 2),
        make_plan(tensor=2, sequence_parallel=True, vocabulary_parallel=True),
        make_plan(tensor=2),
        make_plan(data=2, tensor=2, pipeline=2, micro_batches=2),
        make_plan(context=2),
        make_plan(data=2, expert=2),
        make_plan(data=2, expert=2, sharding="fsdp"),
        make_plan(pipeline=2, schedule="zero-bubble"),
        make_plan(data=2, sharding="fsdp", recompute="full"),
    ],
    ids=lambda plan: plan.plan,
)
@pytest.mark.parametrize("words", [LORA, {"freeze": "model.embed_tokens,*.mlp*"}], ids=["lora", "freeze"])
def test_every_plan_holds_a_share_of_frozen_weights(plan, words):
    model = EXPERTS if plan.expert > 1 else SMALL
    peaks = []
    for more in ({}, words):
        trace = with_steady_times(make.make_trace(model, replace(STEP, batch=4, **more)))
        graph = extrapolate(trace, plan, ProportionalModel(), batch=4 * plan.data, stages="count")
        peaks.append({r: e["categories"] for e in graph.metadata.memory for r in e["ranks"]})
    adapters = 2 * 4 * (224 + 64) * 4  # in bf16, all of them on one rank
    for rank, held in peaks[0].items():
        other, kept = peaks[1][rank], STEP.precision == "megatron-bf16"
        before, after = held.get("parameter", 0), other["parameter"]
        if plan.shards_units and kept:  # what is sharded of a trained one is its main weight, a state
            assert before == 0 and after <= held["optimizer_state"] / 3 + 2 * adapters
        else:
            assert before <= after <= before + adapters * ("lora" in words)
        assert other.get("input", 0) <= held.get("input", 0) + 64  # 8 adapters' scales are numbers
        assert other.get("optimizer_state", 0) < held["optimizer_state"]


def test_adapted_layers_are_known_by_name_as_their_layers_are():
    made = make.make_trace(SMALL, replace(STEP, precision="bf16", lora=4))
    rules = find_layers(made)
    for module in {p["name"].rpartition(".")[0] for p in made.facts.parameters}:
        assert kind_of_module(module, rules) == kind_of_module(module, made.facts.tensor_split)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"lora_targets": "q"}, "without --lora"),
        ({"lora": -1}, "--lora -1 is below 0"),
        ({"lora": 4, "lora_targets": "nothing"}, "no linear layer is called nothing"),
        ({"lora": 4, "lora_dropout": 1.0}, "not a share below 1"),
        ({"freeze": "layer.0"}, "fits no parameter"),
    ],
)
def test_words_that_fit_nothing_are_refused(words, message):
    with pytest.raises(InputError, match=message):
        make.make_trace(SMALL, LanguageStep(32, 2, "bf16", **words))


def test_latent_attention_has_default_targets():
    trace = make.make_trace(LATENT, LanguageStep(32, 2, "pure-bf16", lora=4))
    assert trace.facts.language_model["trained_parameters"] == 4 * 4 * (40 + 96 + 32 + 4 * 32)


def test_predict_and_search_take_the_same_words(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = {"sequence": 64, "precision": "pure-bf16"}
    peaks, plans, flops, trained = [], [], [], []
    for more in ({}, {"lora": 8}, {"lora": 8, "lora_targets": "all-linear"}, {"freeze": "*.mlp"}):
        found = predict(tmp_path, make_plan(), "dgx-a100", batch=1, interval=False, **words, **more)
        answer = found.to_dict()
        peaks.append(answer["memory"][0]["peak_bytes"])
        flops.append(answer["model_flop_per_s_per_gpu"] / answer["tokens_per_s_per_gpu"])
        trained.append(answer.get("trained_parameters", answer["parameters"]))
        ranking = search(str(tmp_path), 1, "dgx-a100", batch=1, **words, **more)["ranking"]
        plans += [row["peak_memory_bytes"] for row in ranking if row["recompute"] == "none"]
    assert len(set(peaks)) == 4 and max(peaks) == peaks[0] and min(peaks) == peaks[1]
    assert plans == peaks
    whole = trained[0]
    less = [2 * whole - 6 * trained[1], 2 * whole - 6 * trained[2], 2 * (whole - trained[3])]
    assert [flops[0] - one for one in flops[1:]] == pytest.approx(less)
