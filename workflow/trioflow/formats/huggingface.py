"""Language models by transformers' ``config.json``, read as transformers reads it."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.provenance import read_own_records
from trioflow.formats.fields import Fields, note_unknown
from trioflow.trace.language.sizes import Configuration, ConfigurationFile, ConfiguredModel, LanguageModel

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}
HARMLESS = frozenset(
    {
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "rms_norm_eps",
        "layer_norm_epsilon",
        "use_cache",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "max_position_embeddings",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "pretraining_tp",
        "_name_or_path",
        "name_or_path",
        "max_window_layers",
        "n_ctx",
        "embd_pdrop",
        "summary_activation",
        "hidden_activation",
        "is_encoder_decoder",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "scale_attn_weights",
        "_attn_implementation",
        "id2label",
        "label2id",
        "router_aux_loss_coef",
        "output_router_logits",
        "router_jitter_noise",
        "norm_topk_prob",
        "unsloth_version",
        "output_past",
        "return_dict",
        "n_group",
        "topk_group",
        "topk_method",
        "scoring_func",
        "routed_scaling_factor",
        "seq_aux",
        "aux_loss_alpha",
        "ep_size",
        "auto_map",
        "qk_head_dim",
        "rope_interleave",
        "swiglu_limit",
        "swiglu_alpha",
        "initial_context_length",
        "experts_per_token",
        "head_dim",
        "num_key_value_heads",
    }
)
"""Fields that change no operator of a training step."""
_OTHER_NETWORKS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
)
"""Fields that a family without them has no use for, and that stand in files of others than it."""
_TRAITS = ("null", "refused", "built", "aliases", "experts", "width", "divides", "ungrouped", "windowed")
"""What a family's record has beside the defaults of fields."""
_WINDOWED, _WHOLE = "sliding_attention", "full_attention"
_QUANTIZED = {"none": "", "fp8": "fp8", "mxfp4": "mxfp4"}
"""Formats in which weights are handed out that are trained in another one."""


@cache
def known_families() -> dict[str, dict[str, Any]]:
    """Return what a configuration's fields stand for where it leaves them out, and what code settles, by ``model_type``."""
    return read_own_records("formats/huggingface")


def read_huggingface(content: Mapping[str, Any], file: str, name: str) -> Configuration:
    """Return the model of a ``config.json``'s ``content``, to be called ``name``.

    Its ``model_type`` is one of `known_families`. Raises InputError when a size is missing, or a field makes it another
    network (blocks without experts in between, other attention).
    """
    kind = str(content.get("model_type", ""))
    family = known_families()[kind]
    defaults = {field: value for field, value in family.items() if field not in _TRAITS}
    own, refused = {*defaults, *family.get("null", ())}, family.get("refused", {})
    foreign = {n for one in known_families().values() for n in (*one, *one.get("null", ()))} - own
    aliases = family.get("aliases", {})
    raw = Fields(content, file)
    for field in content:
        if aliases.get(field) in content and content[field] != content[aliases[field]]:
            raise InputError(f"{field} and {aliases[field]} are one size, and differ", file=file)
        if field in refused or (field in _OTHER_NETWORKS and aliases.get(field, field) in foreign):
            raw.refuse((field,), refused.get(field, f"experts and latent attention of a {kind} are not built"))
    given = {aliases.get(field, field): value for field, value in content.items()}
    fields = Fields({**defaults, **{n: v for n, v in given.items() if n not in foreign}}, file)
    fields.taken |= {*own, *refused}
    quantized, head = fields.take("quantization_config"), str(fields.take("architectures") or "LMHead")
    notes = note_unknown(fields.list_unknown(HARMLESS), fields.taken)
    alternates, window = _read_window(fields, family)
    model = _read_family(fields, name, family, window if alternates else 0)
    stated = Fields(quantized if isinstance(quantized, Mapping) else {}, file)
    if method := stated.word("quant_method", _QUANTIZED, "none"):
        notes.append(f"weights are in the format of --precision, not in {method} as in the file")
    if not any(word in head for word in ("ForCausalLM", "LMHead")):
        notes.append(f"the head scores all words, as a causal language model's, not as {head:.60}")
    left = [f"{n} {v}" for n, v in defaults.items() if n not in given and type(v) is int]
    if left:
        notes.append(f"left out, so as transformers has it for {kind}: {', '.join(left)}")
    longest = fields.size("max_position_embeddings") if fields.take("max_position_embeddings") else 0
    return Configuration(
        model.check(file), notes=tuple(notes), max_positions=longest, ignored_window=0 if alternates else window
    )


def _read_family(fields: Fields, name: str, family: Mapping[str, Any], window: int) -> LanguageModel:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    built = dict(family.get("built", {}))
    if family.get("divides") and hidden % heads:
        raise InputError(
            f"{heads} attention heads do not divide hidden_size {hidden}: transformers refuses it",
            file=fields.file,
            place="num_attention_heads",
        )
    each, learned = max(hidden // heads, 1), built.get("positions") == "learned"
    grouped = not family.get("ungrouped")
    if "attention_bias" in family and fields.flag("attention_bias"):
        built |= {"query_bias": True, "output_bias": True}
    if "mlp_bias" in family:
        built["feed_forward_bias"] = fields.flag("mlp_bias")
    more = _read_experts(fields, family)
    if "kv_lora_rank" in family:
        sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
        more |= fields.read_latent(*sizes)
    values: dict[str, Any] = {
        "layers": fields.size("num_hidden_layers"),
        "window": window,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": fields.size("num_key_value_heads", heads) if grouped else heads,
        "head_size": fields.size("head_dim", each) if grouped else each,
        "feed_forward": fields.size(family.get("width", "intermediate_size"), 4 * hidden if learned else None),
        "vocabulary": fields.size("vocab_size"),
        "longest": fields.size("max_position_embeddings") if learned else 0,
        "activation": fields.word("hidden_act", ACTIVATIONS, "silu"),
        "tied": fields.flag("tie_word_embeddings"),
        "dropout": fields.share("resid_pdrop", 0.0),
        "attention_dropout": fields.share("attention_dropout", 0.0),
    }
    return LanguageModel(name=name, **values | built | more)


def _read_experts(fields: Fields, family: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of experts and of the first blocks without them; InputError where others have none."""
    if "experts" not in family:
        return {}
    alone = fields.take("mlp_only_layers") or []
    if not isinstance(alone, list) or alone != list(range(len(alone))):
        raise InputError(
            f"mlp_only_layers {alone!r:.40}: blocks without experts are built as the first ones alone",
            file=fields.file,
            place="mlp_only_layers",
        )
    first = fields.size("first_k_dense_replace") if fields.take("first_k_dense_replace") else len(alone)
    shared = fields.size("n_shared_experts") if fields.take("n_shared_experts") else 0
    return {
        "experts": fields.size(family["experts"]),
        "experts_per_token": fields.size("num_experts_per_tok"),
        "shared_feed_forward": shared * fields.size(family["width"]),
        "dense_layers": first,
        "dense_feed_forward": fields.size("intermediate_size") if first else 0,
    }


def _read_window(fields: Fields, family: Mapping[str, Any]) -> tuple[bool, int]:
    """Return whether every other block from the first on attends within a window, and the window, 0 without one.

    Raises InputError for blocks that attend in another way.
    """
    layers, usual = fields.size("num_hidden_layers"), family.get("windowed", "")
    off = "use_sliding_window" in family and not fields.flag("use_sliding_window")
    kinds = fields.take("layer_types") or [
        _WINDOWED
        if usual == "all" or (i % 2 == 0 if usual == "even" else i >= fields.size("max_window_layers"))
        else _WHOLE
        for i in range(layers if usual else 0)
    ]
    if not isinstance(kinds, list) or {*map(str, kinds)} - {_WINDOWED, _WHOLE} or (usual and len(kinds) != layers):
        raise InputError(
            f"{kinds!r:.60} are not {layers} of {_WINDOWED} and {_WHOLE}, which alone are built",
            file=fields.file,
            place="layer_types",
            fix="capture the model: module:function",
        )
    if off or _WINDOWED not in kinds or (usual != "even" and not fields.take("sliding_window")):
        return False, 0
    return kinds == [_WHOLE if i % 2 else _WINDOWED for i in range(layers)], fields.size("sliding_window")


def read_file(file: ConfigurationFile) -> Configuration | ConfiguredModel | None:
    """Return the model of a ``config.json``, or the network that is no decoder built here; None for another file.

    Raises InputError as `read_huggingface`.
    """
    kind = str(file.content.get("model_type", file.content.get("_class_name", "")))
    if kind in known_families() and file.content.get("is_encoder_decoder") is not True:
        return read_huggingface(file.content, file.file, file.name)
    if not kind or not file.file.endswith(".json"):
        return None
    return ConfiguredModel(file.name, kind, json.dumps(file.content, sort_keys=True), file.file)
