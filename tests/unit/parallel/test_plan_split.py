"""What tensor parallelism cuts in traces that name no rules."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
from trioflow.base.errors import PlanError
from trioflow.parallel.plan import check_plan, fit_framework, make_plan, named_plan
from trioflow.parallel.splits.tensor_split import kind_of_module
from trioflow.parallel.splits.vocabulary import (
    LAYERS,
    VOCABULARY,
    find_layers,
    prepare_split,
    split_like_megatron,
)
from trioflow.trace.store import Trace, load_trace


@pytest.fixture(scope="module")
def tiny():
    return load_trace("gpt2-tiny-b8")


def renamed(trace: Trace, modules: dict[str, str]) -> Trace:
    named = trace.operators["module"].map(lambda module: modules.get(module, ""))
    return Trace(trace.operators.assign(module=named), trace.tensors, trace.facts)


def test_megatron_s_rules_are_those_whose_modules_the_trace_has(tiny):
    first = str(tiny.operators["module"][tiny.operators["module"] != ""].iloc[0])
    trace = renamed(tiny, {first: "transformer.h.3.mlp.c_fc"})
    told = split_like_megatron(trace).facts.tensor_split
    assert told == {"*.mlp.c_fc": "column"}
    assert not set(LAYERS) & set(VOCABULARY)
    with pytest.raises(PlanError, match="no module of"):
        split_like_megatron(renamed(tiny, {first: "lm_head"}))


def test_a_table_of_another_tool_is_cut_by_the_names_of_its_modules(tiny):
    first, second = [m for m in dict.fromkeys(tiny.operators["module"]) if m][:2]
    named = renamed(tiny, {first: "transformer.h.3.mlp.c_fc", second: "lm_head"})
    nameless = replace(named.facts, tensor_split=None)
    trace = Trace(named.operators, named.tensors, nameless)
    for vocabulary, wanted in ((False, set()), (True, {"lm_head"})):
        plan = make_plan(tensor=2, vocabulary_parallel=vocabulary)
        check_plan(plan, trace, 8)
        rules = prepare_split(trace, plan).facts.tensor_split
        assert set(rules) == {"*.mlp.c_fc"} | wanted
    other = renamed(trace, {first: "elsewhere"})
    with pytest.raises(PlanError, match="no layers that a tensor split cuts"):
        check_plan(make_plan(tensor=2), other, 8)


def test_a_trace_s_own_rules_go_before_names(tiny):
    assert prepare_split(tiny, make_plan(tensor=2)) is tiny


def test_megatron_s_plan_shares_the_vocabulary_where_the_model_has_one(tiny):
    def shares(trace, name="tp"):
        return fit_framework(named_plan(name, 2), trace).vocabulary_parallel

    assert shares(tiny) and not shares(tiny, "tp-layers")
    first, second = [m for m in dict.fromkeys(tiny.operators["module"]) if m][:2]
    for head, shared in (("lm_head", True), ("elsewhere", False)):
        named = renamed(tiny, {first: "transformer.h.3.mlp.c_fc", second: head})
        nameless = replace(named.facts, tensor_split=None)
        assert shares(Trace(named.operators, named.tensors, nameless)) == shared
    wordless = Trace(tiny.operators, tiny.tensors.assign(category="buffer"), tiny.facts)
    assert not shares(wordless)
    # Megatron-LM's messages go beside backward's products, whoever asked for its recipe.
    for recipe, name, overlap in (
        ("megatron-bf16", "none", "backward"),
        ("nanotron-bf16", "none", "none"),
        ("megatron-bf16", "1f1b", "backward"),
        ("megatron-bf16", "zero-bubble", "none"),
    ):
        facts = replace(tiny.facts, precision_recipe=recipe, language_model={"layers": 2})
        stages = 2 if name != "none" else 1
        plan = make_plan(
            tensor=2, pipeline=stages, schedule=name, micro_batches=2 if stages > 1 else None
        )
        found = fit_framework(plan, Trace(tiny.operators, tiny.tensors, facts))
        assert found.tensor_overlap == overlap, (recipe, name)
    for overlap in ("none", "backward"):  # who names it is followed
        plan = make_plan(tensor=2, tensor_overlap=overlap)
        assert (
            fit_framework(plan, Trace(tiny.operators, tiny.tensors, facts)).tensor_overlap
            == overlap
        )
    # Who asks for it by its column is told that there is none.
    assert fit_framework(
        make_plan(tensor=2, vocabulary_parallel=True), wordless
    ).vocabulary_parallel


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("Qwen2ForCausalLM", {}),
        ("MistralForCausalLM", {}),
        ("LlamaForCausalLM", {}),
        ("ViTForImageClassification", {}),
        (
            "WhisperForConditionalGeneration",
            {
                "encoder_layers": 1,
                "decoder_layers": 1,
                "d_model": 32,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
            },
        ),
    ],
)
def test_every_product_of_a_block_is_cut_by_its_name(model, sizes):
    torch = pytest.importorskip("torch", reason="the models are PyTorch's")
    pytest.importorskip("transformers", reason="the models come from transformers")
    from trioflow.trace.workloads.build import _import_transformers

    library = _import_transformers("test")
    kind = getattr(library, model)
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.device("meta"):
        built = kind(kind.config_class(**(sizes or small)))
    modules = dict(built.named_modules())
    trace = SimpleNamespace(operators=pd.DataFrame({"module": list(modules)}))
    rules = find_layers(trace)
    products = {
        name: module
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear) and any(part.isdigit() for part in name.split("."))
    }
    kinds = {name: kind_of_module(name, rules) for name in products}
    assert products and set(kinds.values()) == {"column", "row"}, kinds
    ends = ("o_proj", "out_proj", "down_proj", "fc2", "output.dense")
    assert {n for n, found in kinds.items() if found == "row"} == {
        n for n in kinds if n.endswith(ends)
    }


def test_a_recipe_of_fully_shard_is_refused_where_nothing_is_sharded(tiny):
    facts = replace(tiny.facts, precision_recipe="fsdp2-mixed")
    trace = Trace(tiny.operators, tiny.tensors, facts)
    for name in ("fsdp", "zero2", "zero3"):
        check_plan(named_plan(name, 2), trace, 8)
    for name in ("ddp", "distributed", "tp", "1f1b"):
        with pytest.raises(PlanError, match="fsdp2-mixed is what fully_shard computes in"):
            check_plan(named_plan(name, 2), trace, 8)
