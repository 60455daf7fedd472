"""Language models by transformers' ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioflow.base.errors import InputError
from trioflow.trace.language.configuration import Configuration, Fields, note_unknown
from trioflow.trace.language.sizes import LanguageModel

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
}  # fmt: skip
HARMLESS = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "bos_token_id",
    "eos_token_id", "pad_token_id", "initializer_range", "rms_norm_eps", "layer_norm_epsilon",
    "use_cache", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings",
    "pretraining_tp", "_name_or_path", "name_or_path", "max_window_layers", "n_ctx", "embd_pdrop", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "scale_attn_weights", "_attn_implementation", "id2label", "label2id",
    "router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "norm_topk_prob", "quantization_config", "unsloth_version", "layer_types", "output_past", "return_dict",
})  # fmt: skip
"""Fields that change no operator of a training step."""
_EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
_DENSE_BLOCKS = ("mlp_only_layers",)
_LATENT = ("q_lora_rank", "kv_lora_rank")


def read_huggingface(content: Mapping[str, Any], file: str, name: str) -> Configuration:
    """Return the model of a ``config.json``.

    Parameters
    ----------
    content : mapping
        The file's content.
    file, name : str
        For messages, and what to call the model.

    Raises
    ------
    InputError
        When the model's type is not one of those built here, a size is missing, or a field makes it a
        network that is not built (experts, latent attention).
    """
    found = Fields(content, file)
    kind = str(found.take("model_type", ""))
    if kind not in _LLAMA_LIKE or "experts" not in _LLAMA_LIKE[kind]:
        found.refuse(_EXPERTS, f"experts of a {kind or 'model without model_type'} are not built")
    found.refuse(_LATENT, "latent attention is not built from a configuration")
    if kind == "gpt2":
        model = _read_gpt2(found, name)
    elif kind in _LLAMA_LIKE:
        model = _read_llama(found, name, kind)
    else:
        raise InputError(
            f"model_type {kind!r} is not built from a configuration", file=file, place="model_type",
            fix=f"use one of {', '.join((*_LLAMA_LIKE, 'gpt2'))}, or capture the model: module:function",
        )  # fmt: skip
    notes = note_unknown(found.list_unknown(HARMLESS))
    window = found.content.get("sliding_window")
    if window is not None and found.content.get("use_sliding_window", True):
        notes.append(f"attention's sliding_window of {window} tokens is not followed: all are read")
    return Configuration(model.check(file), notes=tuple(notes))


_LLAMA_LIKE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"kv_heads": 8},
    "qwen2": {"query_bias": True},
    "qwen3": {"query_norm": True, "head_size": 128},
    "mixtral": {"kv_heads": 8, "experts": "num_local_experts", "width": "intermediate_size"},
    "qwen3_moe": {
        "query_norm": True, "head_size": 128, "experts": "num_experts",
        "width": "moe_intermediate_size",
    },
}  # fmt: skip
"""Families of one shape, and what differs where the file does not say."""


def _read_llama(found: Fields, name: str, kind: str) -> LanguageModel:
    usual = _LLAMA_LIKE[kind]
    hidden, heads = found.size("hidden_size"), found.size("num_attention_heads")
    biased = found.flag("attention_bias")
    found.taken |= {"sliding_window", "use_sliding_window", "intermediate_size"}
    experts = chosen = 0
    if "experts" in usual:
        found.refuse(_DENSE_BLOCKS, "blocks without experts among those with them are not built")
        found.refuse(("decoder_sparse_step",), "blocks without experts are not built")
        experts, chosen = found.size(usual["experts"]), found.size("num_experts_per_tok")
    return LanguageModel(
        name=name,
        layers=found.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=found.size("num_key_value_heads", usual.get("kv_heads", heads)),
        head_size=found.size("head_dim", usual.get("head_size", max(hidden // heads, 1))),
        feed_forward=found.size(usual.get("width", "intermediate_size")),
        vocabulary=found.size("vocab_size"),
        activation=found.word("hidden_act", ACTIVATIONS, "silu"),
        query_bias=bool(usual.get("query_bias")) or biased,
        output_bias=biased,
        feed_forward_bias=found.flag("mlp_bias"),
        query_norm=bool(usual.get("query_norm")),
        tied=found.flag("tie_word_embeddings"),
        attention_dropout=found.share("attention_dropout", 0.0),
        experts=experts,
        experts_per_token=chosen,
    )


def _read_gpt2(found: Fields, name: str) -> LanguageModel:
    hidden, heads = found.size("n_embd"), found.size("n_head")
    return LanguageModel(
        name=name,
        layers=found.size("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=max(hidden // heads, 1),
        feed_forward=found.size("n_inner", 4 * hidden),
        vocabulary=found.size("vocab_size"),
        positions="learned",
        longest=found.size("n_positions", 1024),
        norm="layer",
        activation=found.word("activation_function", ACTIVATIONS, "gelu_new"),
        gated=False,
        query_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        tied=found.flag("tie_word_embeddings", True),
        dropout=found.share("resid_pdrop", 0.1),
        attention_dropout=found.share("attn_pdrop", 0.1),
    )
