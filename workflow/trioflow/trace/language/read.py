"""From a name or a file to a language model, and to the trace of its training step.

Language models by transformers' ``config.json``, read as transformers reads it.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.input_files import LARGEST_JSON_BYTES, parse_json, parse_toml, read_text
from trioflow.base.provenance import read_own_records, read_table
from trioflow.base.yaml_files import parse_yaml
from trioflow.trace.language.launch import find_framework, read_launch
from trioflow.trace.language.make import make_network_trace, make_trace
from trioflow.trace.language.megatron import parse_arguments, read_megatron
from trioflow.trace.language.sizes import Configuration, Fields, LanguageModel, LanguageStep, Network, note_unknown
from trioflow.trace.store import Trace

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
    return read_own_records("trace/language/read")


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
            other = f"experts and latent attention of a {kind} are not built"
            raw.refuse((field,), refused.get(field, other))
    given = {aliases.get(field, field): value for field, value in content.items()}
    found = Fields({**defaults, **{n: v for n, v in given.items() if n not in foreign}}, file)
    found.taken |= {*own, *refused}
    notes = note_unknown(found.list_unknown(HARMLESS))
    model = _read_family(found, name, family, notes)
    quantized = found.take("quantization_config")
    stated = Fields(quantized if isinstance(quantized, Mapping) else {}, file)
    if method := stated.word("quant_method", _QUANTIZED, "none"):
        notes.append(f"weights are in the format of --precision, not in {method} as in the file")
    head = str(found.take("architectures") or "LMHead")
    if not any(word in head for word in ("ForCausalLM", "LMHead")):
        notes.append(f"the head scores all words, as a causal language model's, not as {head:.60}")
    left = [f"{n} {v}" for n, v in defaults.items() if n not in given and type(v) is int]
    if left:
        notes.append(f"left out, so as transformers has it for {kind}: {', '.join(left)}")
    longest = found.size("max_position_embeddings") if found.take("max_position_embeddings") else 0
    return Configuration(model.check(file), notes=tuple(notes), max_positions=longest)


def _read_family(found: Fields, name: str, family: Mapping[str, Any], notes: list[str]) -> LanguageModel:
    hidden, heads = found.size("hidden_size"), found.size("num_attention_heads")
    layers, built = found.size("num_hidden_layers"), dict(family.get("built", {}))
    if family.get("divides") and hidden % heads:
        raise InputError(
            f"{heads} attention heads do not divide hidden_size {hidden}: transformers refuses it",
            file=found.file,
            place="num_attention_heads",
        )
    each, learned = max(hidden // heads, 1), built.get("positions") == "learned"
    grouped = not family.get("ungrouped")
    if "attention_bias" in family and found.flag("attention_bias"):
        built |= {"query_bias": True, "output_bias": True}
    if "mlp_bias" in family:
        built["feed_forward_bias"] = found.flag("mlp_bias")
    more = _read_window(found, family, layers, notes) | _read_experts(found, family)
    if "kv_lora_rank" in family:
        sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
        more |= found.read_latent(*sizes)
    values: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": found.size("num_key_value_heads", heads) if grouped else heads,
        "head_size": found.size("head_dim", each) if grouped else each,
        "feed_forward": found.size(family.get("width", "intermediate_size"), 4 * hidden if learned else None),
        "vocabulary": found.size("vocab_size"),
        "longest": found.size("max_position_embeddings") if learned else 0,
        "activation": found.word("hidden_act", ACTIVATIONS, "silu"),
        "tied": found.flag("tie_word_embeddings"),
        "dropout": found.share("resid_pdrop", 0.0),
        "attention_dropout": found.share("attention_dropout", 0.0),
    }
    return LanguageModel(name=name, **values | built | more)


def _read_experts(found: Fields, family: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of experts and of the first blocks without them; InputError where others have none."""
    if "experts" not in family:
        return {}
    alone = found.take("mlp_only_layers") or []
    if not isinstance(alone, list) or alone != list(range(len(alone))):
        raise InputError(
            f"mlp_only_layers {alone!r:.40}: blocks without experts are built as the first ones alone",
            file=found.file,
            place="mlp_only_layers",
        )
    named = found.take("first_k_dense_replace")
    first = found.size("first_k_dense_replace") if named else len(alone)
    shared = found.size("n_shared_experts") if found.take("n_shared_experts") else 0
    return {
        "experts": found.size(family["experts"]),
        "experts_per_token": found.size("num_experts_per_tok"),
        "shared_feed_forward": shared * found.size(family["width"]),
        "dense_layers": first,
        "dense_feed_forward": found.size("intermediate_size") if first else 0,
    }


def _read_window(found: Fields, family: Mapping[str, Any], layers: int, notes: list[str]) -> dict[str, Any]:
    """Return the window of every other block; windows of other blocks are not followed, and said.

    Raises InputError for blocks that attend in another way.
    """
    usual = family.get("windowed", "")
    off = "use_sliding_window" in family and not found.flag("use_sliding_window")
    kinds = found.take("layer_types") or [
        _WINDOWED
        if usual == "all" or (i % 2 == 0 if usual == "even" else i >= found.size("max_window_layers"))
        else _WHOLE
        for i in range(layers if usual else 0)
    ]
    if not isinstance(kinds, list) or {*map(str, kinds)} - {_WINDOWED, _WHOLE} or (usual and len(kinds) != layers):
        raise InputError(
            f"{kinds!r:.60} are not {layers} of {_WINDOWED} and {_WHOLE}, which alone are built",
            file=found.file,
            place="layer_types",
            fix="capture the model: module:function",
        )
    if off or _WINDOWED not in kinds or (usual != "even" and not found.take("sliding_window")):
        return {}
    window = found.size("sliding_window")
    if kinds == [_WHOLE if i % 2 else _WINDOWED for i in range(layers)]:
        return {"window": window}
    notes.append(
        f"attention's sliding_window of {window} tokens, in {kinds.count(_WINDOWED)} of {layers} blocks, is not followed:"
        " all are read"
    )
    return {}


_HUGGINGFACE = "config.json"
YAML, TEXT, TOML = (".yaml", ".yml"), (".sh", ".txt", ".args"), ".toml"
_MEGATRON_ARGUMENTS = "MODEL_ARGS"
"""Section of Megatron-LM's ``model_config.yaml``."""
_LAYERS = {
    f"{dashes}{name}"
    for dashes in ("--", "")
    for name in ("num-layers", "num_layers", "encoder-num-layers", "encoder_num_layers")
}
"""Arguments of which Megatron-LM needs one."""
_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_HARMLESS_OF_NANOTRON = HARMLESS | {
    "is_llama_config",
    "is_qwen2_config",
    "rope_interleaved",
    "rope_seq_len_interpolation_factor",
}
"""Fields of nanotron's YAML that change nothing here."""


def find_configuration(name: str | Path) -> Configuration | Network | None:
    """Return the configuration that a published name or a path stands for; None where it is something else.

    Files: Hugging Face's JSON (or its folder), Megatron-LM's arguments as YAML or command line,
    nanotron's YAML. Raises InputError when one is not such a configuration.
    """
    path = Path(name)
    if path.is_dir() and (path / _HUGGINGFACE).is_file() and not (path / "trace.json").exists():
        path = path / _HUGGINGFACE
    if path.is_file() and path.suffix in (".json", TOML, *YAML, *TEXT):
        return _read_network(path) or read_configuration(path)
    model = None if path.exists() else published_models().get(_plain_name(str(name)))
    if model is None:
        return None
    row = next(row for row in read_table(TABLE) if row["name"] == model.name)
    notes = (f"{row['left_out']} is not built, and left out",) if row["left_out"] else ()
    return Configuration(model, notes=notes, max_positions=int(row["max_positions"]))


def _read_network(path: Path) -> Network | None:
    """Return the network of a ``config.json`` that is no decoder built here; None for any other file."""
    text = read_text(path, InputError, LARGEST_JSON_BYTES) if path.suffix == ".json" else "null"
    content = parse_json(text, path, InputError)
    kind = str(content.get("model_type", content.get("_class_name", ""))) if isinstance(content, Mapping) else ""
    if not kind or (kind in known_families() and content.get("is_encoder_decoder") is not True):
        return None
    return Network(_name_file(path), kind, json.dumps(content, sort_keys=True), str(path))


def _name_file(path: Path) -> str:
    name = path.parent.name if path.stem in ("config", "model_config") else path.stem
    return name or path.stem


def _plain_name(name: str) -> str:
    """Return a model's name without the marks that repositories of weights put around it."""
    plain = name.rpartition("/")[2].lower().replace("_", "-")
    return plain.removeprefix("meta-").removesuffix("-hf")


def read_configuration(path: Path) -> Configuration:
    """Return what the file of a decoder says; InputError as `find_configuration`, or where it is another network."""
    return parse_configuration(read_text(path, InputError, LARGEST_JSON_BYTES), str(path))


def parse_configuration(text: str, file: str) -> Configuration:
    """Return what a configuration's text says, read by the ending of its ``file``; InputError as `read_configuration`."""
    path = Path(file)
    name = _name_file(path)
    if path.suffix in TEXT:
        arguments = parse_arguments(text, file)
        if not _LAYERS & set(arguments):
            raise InputError("no command line of Megatron-LM: --num-layers is missing", file=file)
        return read_megatron(arguments, file, name)
    content = {".json": parse_json, TOML: parse_toml}.get(path.suffix, parse_yaml)(text, path, InputError)
    if isinstance(content, Mapping):
        if find_framework(content):
            return read_launch(content, text, file, published_models())
        arguments = content.get(_MEGATRON_ARGUMENTS, content)
        if content.get("model_type") in known_families():
            return read_huggingface(content, file, name)
        if isinstance(arguments, Mapping) and _LAYERS & set(arguments):
            return read_megatron(arguments, file, name)
        if isinstance(content.get("model"), Mapping) and "model_config" in content["model"]:
            return _read_nanotron(content, file, name)
    raise InputError(
        "no configuration of a language model",
        file=file,
        fix="give a config.json of Hugging Face (with model_type), Megatron-LM's model_config.yaml (with"
        " MODEL_ARGS), a nanotron YAML (with model.model_config), or a launch configuration of torchtitan, Megatron Bridge,"
        " DeepSpeed or Accelerate",
    )


def _read_nanotron(content: Mapping[str, Any], file: str, name: str) -> Configuration:
    """Return what a nanotron configuration says, to be called ``name``.

    Of ``model.model_config``, and ``parallelism``, ``tokens``, ``optimizer`` where present. Raises
    InputError when a size is missing, or the model has experts.
    """
    section = _section(content, "model")
    found = Fields(_section(section, "model_config"), file)
    found.refuse(("num_experts", "moe_config"), "mixtures of experts are not built from a configuration")
    hidden, heads = found.size("hidden_size"), found.size("num_attention_heads")
    model = LanguageModel(
        name=name,
        layers=found.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=found.size("num_key_value_heads", heads),
        head_size=found.size("head_dim", max(hidden // heads, 1)),
        feed_forward=found.size("intermediate_size"),
        vocabulary=found.size("vocab_size"),
        activation=found.word("hidden_act", ACTIVATIONS, "silu"),
        query_bias=found.flag("attention_bias"),
        tied=found.flag("tie_word_embeddings"),
    )
    tokens = Fields(_section(content, "tokens"), file)
    named = {"sequence": "sequence_length", "batch": "micro_batch_size"}
    step: dict[str, Any] = {field: tokens.size(name) for field, name in named.items() if tokens.take(name)}
    kind = Fields(section, file).word("dtype", _FORMATS, "bfloat16")
    adds_up = Fields(_section(content, "optimizer"), file).flag("accumulate_grad_in_fp32", True)
    step["precision"] = kind if kind != "bf16" else "nanotron-bf16" if adds_up else "pure-bf16"
    return Configuration(
        model.check(file),
        step,
        _read_nanotron_degrees(content, file),
        accumulate=tokens.size("batch_accumulation_per_replica", 1),
        notes=tuple(note_unknown(found.list_unknown(_HARMLESS_OF_NANOTRON))),
    )


def _section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    return dict(section) if isinstance(section, Mapping) else {}


def _read_nanotron_degrees(content: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the columns of a plan that the file settles; nanotron states its data degree too."""
    section = _section(content, "parallelism")
    if not section:
        return {}
    said = Fields(section, file)
    data, tensor, pipeline = (said.size(name, 1) for name in ("dp", "tp", "pp"))
    engine = said.word("pp_engine", {"1f1b": "1f1b", "afab": "gpipe"}, "1f1b")
    scatters = str(said.take("tp_mode", "REDUCE_SCATTER")).upper() == "REDUCE_SCATTER"
    shares = Fields(_section(content, "optimizer"), file).take("zero_stage", 0) and data > 1
    return {
        "data": data,
        "tensor": tensor,
        "pipeline": pipeline,
        "sequence_parallel": tensor > 1 and scatters,
        "vocabulary_parallel": tensor > 1,
        **({"schedule": engine} if pipeline > 1 else {}),
        **({"sharding": "distributed"} if shares else {}),
        **({"recompute": "full"} if said.flag("recompute_layer") else {}),
    }


def trace_of(found: Configuration | Network, asked: Mapping[str, Any]) -> Trace:
    """Return the trace of a configuration's training step; what is ``asked`` of a ``LanguageStep`` wins over the file.

    A sequence that nobody gives is the model's usual one, and ``sequence_assumed`` in the facts. Raises InputError as
    ``make_trace``.
    """
    if isinstance(found, Network):
        return make_network_trace(found, {name: value for name, value in asked.items() if value is not None})
    stated = {**found.step, **{name: value for name, value in asked.items() if value is not None}}
    trace = make_trace(found.model, LanguageStep(**{"sequence": found.usual_sequence, **stated}))
    changes: dict[str, Any] = {"warnings": trace.facts.warn(*found.notes)} if found.notes else {}
    if "sequence" not in stated:
        changes["language_model"] = {**(trace.facts.language_model or {}), "sequence_assumed": True}
    return replace(trace, facts=replace(trace.facts, **changes)) if changes else trace


TABLE = Path(__file__).parent.parent.parent / "data" / "language_models.tsv"
"""A row a model: the fields of `LanguageModel`, the published number of parameters, how far ours may
be from it, where the sizes stand, and what of the model is not built; ``max_positions``: of its config.json."""


@cache
def published_models() -> dict[str, LanguageModel]:
    """Return the models that are known by name."""
    return {row["name"]: _read_row(row) for row in read_table(TABLE)}


def _read_row(row: dict[str, str]) -> LanguageModel:
    readers: dict[str, Any] = {"int": int, "float": float, "bool": lambda text: text == "true"}
    values = {
        field.name: readers.get(getattr(field.type, "__name__", str(field.type)), str)(row[field.name])
        for field in fields(LanguageModel)
        if field.name in row
    }
    return LanguageModel(**values).check(str(TABLE.name))
