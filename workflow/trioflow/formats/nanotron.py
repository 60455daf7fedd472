"""Language models, and how they are trained, by nanotron's YAML."""

from collections.abc import Mapping
from typing import Any

from trioflow.formats.fields import Fields, note_unknown
from trioflow.formats.huggingface import ACTIVATIONS, HARMLESS
from trioflow.trace.language.sizes import Configuration, ConfigurationFile, LanguageModel

_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_HARMLESS = HARMLESS | {"is_llama_config", "is_qwen2_config", "rope_interleaved", "rope_seq_len_interpolation_factor"}
"""Fields of nanotron's YAML that change nothing here."""


def read_file(given: ConfigurationFile) -> Configuration | None:
    """Return what a nanotron configuration says; None for another file.

    Of ``model.model_config``, and ``parallelism``, ``tokens``, ``optimizer`` where present. Raises
    InputError when a size is missing, or the model has experts.
    """
    content, file = given.content, given.file
    section = _section(content, "model")
    if "model_config" not in section:
        return None
    fields = Fields(_section(section, "model_config"), file)
    fields.refuse(("num_experts", "moe_config"), "mixtures of experts are not built from a configuration")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    model = LanguageModel(
        name=given.name,
        layers=fields.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        head_size=fields.size("head_dim", max(hidden // heads, 1)),
        feed_forward=fields.size("intermediate_size"),
        vocabulary=fields.size("vocab_size"),
        activation=fields.word("hidden_act", ACTIVATIONS, "silu"),
        query_bias=fields.flag("attention_bias"),
        tied=fields.flag("tie_word_embeddings"),
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
        notes=tuple(note_unknown(fields.list_unknown(_HARMLESS), fields.taken)),
    )


def _section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    return dict(section) if isinstance(section, Mapping) else {}


def _read_nanotron_degrees(content: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the columns of a plan that the file settles; nanotron states its data degree too."""
    section = _section(content, "parallelism")
    if not section:
        return {}
    fields = Fields(section, file)
    data, tensor, pipeline = (fields.size(name, 1) for name in ("dp", "tp", "pp"))
    engine = fields.word("pp_engine", {"1f1b": "1f1b", "afab": "gpipe"}, "1f1b")
    scatters = str(fields.take("tp_mode", "REDUCE_SCATTER")).upper() == "REDUCE_SCATTER"
    shares = Fields(_section(content, "optimizer"), file).take("zero_stage", 0) and data > 1
    return {
        "data": data,
        "tensor": tensor,
        "pipeline": pipeline,
        "sequence_parallel": tensor > 1 and scatters,
        "vocabulary_parallel": tensor > 1,
        **({"schedule": engine} if pipeline > 1 else {}),
        **({"sharding": "distributed"} if shares else {}),
        **({"recompute": "full"} if fields.flag("recompute_layer") else {}),
    }
