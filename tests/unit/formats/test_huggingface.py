"""A config.json is read as transformers reads it: parameters of random configurations, against its own models."""

import pytest
from fuzz import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from trioflow.base.errors import InputError
from trioflow.formats.huggingface import known_families, read_huggingface

pytest.importorskip("transformers", reason="the models come from transformers")

SIZES = {
    "hidden_size": (64, 96, 100),
    "intermediate_size": (48, 128),
    "moe_intermediate_size": (40,),
    "num_attention_heads": (4, 6, 8),
    "num_key_value_heads": (1, 2, None),
    "head_dim": (16, 24, None),
    "vocab_size": (100, 300),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "tie_word_embeddings": (True, False, None),
    "num_experts": (4,),
    "num_local_experts": (4,),
    "n_routed_experts": (4,),
    "num_experts_per_tok": (2,),
    "n_shared_experts": (1, 2, None),
    "first_k_dense_replace": (0, 1, None),
    "q_lora_rank": (32, None),
    "kv_lora_rank": (24,),
    "qk_nope_head_dim": (16,),
    "qk_rope_head_dim": (8,),
    "v_head_dim": (12,),
    "hidden_act": ("silu", "gelu", "relu"),
    "n_embd": (32, 40),
    "n_layer": (1, 3),
    "n_head": (4,),
    "n_positions": (32,),
    "n_inner": (50, None),
    "mlp_only_layers": ([], [0], None),
    "sliding_window": (16, None),
    "use_sliding_window": (True, False),
    "decoder_sparse_step": (1,),
}
FEW = {"num_hidden_layers": 3, "vocab_size": 301, "pad_token_id": 0}
"""What every configuration has, so that a model is made in milliseconds; gpt2 calls its layers by another name too."""
FIELDS = st.fixed_dictionaries({}, optional={n: st.sampled_from(v) for n, v in SIZES.items()})


def count_theirs(kind, content):
    """Parameters of transformers' own model on the meta device; None where it refuses to make one."""
    import torch
    from trioflow.trace.workloads.configured import import_transformers

    library = import_transformers("a model")
    try:
        config = library.AutoConfig.for_model(kind, **content)
        with torch.device("meta"):
            model = library.AutoModelForCausalLM.from_config(config)
    except Exception:
        return None
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", known_families())
@settings(deadline=None, max_examples=count_examples(100))
@given(fields=FIELDS)
def test_random_configurations_have_as_many_parameters_as_transformers_models(kind, fields):
    drawn = {**FEW, **fields}
    if "n_layer" in drawn and kind == "gpt2":
        drawn |= {"num_hidden_layers": drawn["n_layer"]}
    try:
        ours = read_huggingface({"model_type": kind, **drawn}, "config.json", "x").model.parameters
    except InputError:
        return  # a size that is missing, or heads that do not divide
    theirs = count_theirs(kind, drawn)
    assert theirs is None or ours == theirs
