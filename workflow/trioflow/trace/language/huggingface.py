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
    "n_group", "topk_group", "topk_method", "scoring_func", "routed_scaling_factor", "seq_aux", "aux_loss_alpha",
    "ep_size", "auto_map", "qk_head_dim", "rope_interleave", "swiglu_limit", "initial_context_length",
    "experts_per_token", "head_dim", "num_key_value_heads",
})  # fmt: skip
"""Fields that change no operator of a training step."""
_EXPERTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
_DENSE_BLOCKS = ("mlp_only_layers",)
_LATENT = ("q_lora_rank", "kv_lora_rank")
_TURNS = ("sliding_attention", "full_attention")
"""What attention of gpt-oss does in even blocks and in odd ones."""


def read_huggingface(content: Mapping[str, Any], file: str, name: str) -> Configuration:
    """Return the model of a ``config.json``'s ``content``, to be called ``name``.

    Raises InputError when the type is not built here, a size is missing, or a field makes it
    another network (blocks without experts in between, other attention).
    """
    found = Fields(content, file)
    kind = str(found.take("model_type", ""))
    if kind not in _LLAMA_LIKE or "experts" not in _LLAMA_LIKE[kind]:
        found.refuse(_EXPERTS, f"experts of a {kind or 'model without model_type'} are not built")
    if not _LLAMA_LIKE.get(kind, {}).get("latent"):
        found.refuse(_LATENT, f"latent attention of a {kind} is not built")
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
    if window is not None and not model.window and found.content.get("use_sliding_window", True):
        notes.append(f"attention's sliding_window of {window} tokens is not followed: all are read")
    return Configuration(model.check(file), notes=tuple(notes))


_DEEPSEEK = {
    "experts": "n_routed_experts", "width": "moe_intermediate_size", "latent": True, "query_norm": True,
}  # fmt: skip
_LLAMA_LIKE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"kv_heads": 8},
    "qwen2": {"query_bias": True},
    "qwen3": {"query_norm": True, "head_size": 128},
    "phi3": {},
    "gemma": {"head_size": 256, "activation": "gelu_pytorch_tanh", "tied": True},
    "mixtral": {"kv_heads": 8, "experts": "num_local_experts", "width": "intermediate_size"},
    "qwen3_moe": {
        "query_norm": True, "head_size": 128, "experts": "num_experts",
        "width": "moe_intermediate_size",
    },
    "deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK,
    "gpt_oss": {
        "kv_heads": 8, "head_size": 64, "experts": "num_local_experts", "width": "intermediate_size",
        "biased": True, "windowed": True,
    },
}  # fmt: skip
"""Families of one shape, and what differs where the file does not say."""


def _read_llama(found: Fields, name: str, kind: str) -> LanguageModel:
    usual = _LLAMA_LIKE[kind]
    hidden, heads = found.size("hidden_size"), found.size("num_attention_heads")
    all_biased = bool(usual.get("biased"))
    biased = found.flag("attention_bias", all_biased)
    found.taken |= {"sliding_window", "use_sliding_window", "intermediate_size"}
    experts = chosen = 0
    if "experts" in usual:
        found.refuse(_DENSE_BLOCKS, "blocks without experts among those with them are not built")
        found.refuse(("decoder_sparse_step",), "blocks without experts are not built")
        experts, chosen = found.size(usual["experts"]), found.size("num_experts_per_tok")
    more: dict[str, Any] = {}
    if usual.get("latent"):
        more = _read_deepseek(found)
    elif usual.get("windowed"):
        more = {"window": _read_window(found), "sinks": True, "router_bias": True}
    return LanguageModel(
        name=name,
        layers=found.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=found.size("num_key_value_heads", usual.get("kv_heads", heads)),
        head_size=more.pop("head_size", None)
        or found.size("head_dim", usual.get("head_size", max(hidden // heads, 1))),
        feed_forward=found.size(usual.get("width", "intermediate_size")),
        vocabulary=found.size("vocab_size"),
        activation=found.word("hidden_act", ACTIVATIONS, usual.get("activation", "silu")),
        query_bias=bool(usual.get("query_bias")) or biased,
        output_bias=biased,
        feed_forward_bias=found.flag("mlp_bias", all_biased),
        query_norm=bool(usual.get("query_norm")),
        tied=found.flag("tie_word_embeddings", bool(usual.get("tied"))),
        attention_dropout=found.share("attention_dropout", 0.0),
        experts=experts,
        experts_per_token=chosen,
        **more,
    )


def _read_deepseek(found: Fields) -> dict[str, Any]:
    """Return the sizes of latent attention, of shared experts and of the first blocks."""
    found.refuse(("attention_bias",), "biases of latent attention are not built")
    found.refuse(("moe_layer_freq",), "blocks without experts among those with them are not built")
    found.refuse(("index_topk", "index_n_heads"), "attention that chooses its tokens is not built")
    rotated, whole = found.size("qk_rope_head_dim"), found.size("qk_nope_head_dim")
    shared = found.size("n_shared_experts") if found.take("n_shared_experts") else 0
    dense = found.size("first_k_dense_replace") if found.take("first_k_dense_replace") else 0
    return {
        "head_size": whole + rotated, "rotary_size": rotated, "value_size": found.size("v_head_dim"),
        "latent": found.size("kv_lora_rank"),
        "query_latent": found.size("q_lora_rank") if found.take("q_lora_rank") else 0,
        "shared_feed_forward": shared * found.size("moe_intermediate_size"),
        "dense_layers": dense, "dense_feed_forward": found.size("intermediate_size") if dense else 0,
    }  # fmt: skip


def _read_window(found: Fields) -> int:
    """Return the tokens that every other block's attention reads."""
    kinds = found.take("layer_types") or []
    if not isinstance(kinds, list) or any(
        kind != _TURNS[place % 2] for place, kind in enumerate(kinds)
    ):
        raise InputError(
            f"blocks do not take turns as {', '.join(_TURNS)}", file=found.file, place="layer_types",
            fix="capture the model: module:function",
        )  # fmt: skip
    return found.size("sliding_window")


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
