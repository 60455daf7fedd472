"""Language models, and how they are trained, by nanotron's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trioflow.trace.language.configuration import Configuration, Fields, note_unknown
from trioflow.trace.language.huggingface import ACTIVATIONS, HARMLESS
from trioflow.trace.language.sizes import LanguageModel

_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_HARMLESS = HARMLESS | {"is_llama_config", "is_qwen2_config", "rope_interleaved", "rope_seq_len_interpolation_factor"}  # fmt: skip


def read_nanotron(content: Mapping[str, Any], file: str, name: str) -> Configuration:
    """Return what a nanotron configuration says.

    Parameters
    ----------
    content : mapping
        The file's content: ``model.model_config``, and ``parallelism``, ``tokens``, ``optimizer``
        where they are there.
    file, name : str
        For messages, and what to call the model.

    Raises
    ------
    InputError
        When a size is missing, or the model has experts.
    """
    section = _section(content, "model")
    found = Fields(_section(section, "model_config"), file)
    found.refuse(
        ("num_experts", "moe_config"), "mixtures of experts are not built from a configuration"
    )
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
    step: dict[str, Any] = {}
    if tokens.take("sequence_length"):
        step["sequence"] = tokens.size("sequence_length")
    if tokens.take("micro_batch_size"):
        step["batch"] = tokens.size("micro_batch_size")
    kind = Fields(section, file).word("dtype", _FORMATS, "bfloat16")
    adds_up = Fields(_section(content, "optimizer"), file).flag("accumulate_grad_in_fp32", True)
    step["precision"] = kind if kind != "bf16" else "nanotron-bf16" if adds_up else "pure-bf16"
    return Configuration(
        model.check(file), step, _read_degrees(content, file),
        accumulate=tokens.size("batch_accumulation_per_replica", 1),
        notes=tuple(note_unknown(found.list_unknown(_HARMLESS))),
    )  # fmt: skip


def _section(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    return dict(section) if isinstance(section, Mapping) else {}


def _read_degrees(content: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the columns of a plan that the file settles; nanotron states its data degree too."""
    section = _section(content, "parallelism")
    if not section:
        return {}
    said = Fields(section, file)
    engine = said.word("pp_engine", {"1f1b": "1f1b", "afab": "gpipe"}, "1f1b")
    degrees: dict[str, Any] = {
        "data": said.size("dp", 1), "tensor": said.size("tp", 1), "pipeline": said.size("pp", 1),
    }  # fmt: skip
    mode = str(said.take("tp_mode", "REDUCE_SCATTER")).upper()
    degrees["sequence_parallel"] = degrees["tensor"] > 1 and mode == "REDUCE_SCATTER"
    degrees["vocabulary_parallel"] = degrees["tensor"] > 1
    if degrees["pipeline"] > 1:
        degrees["schedule"] = engine
    if Fields(_section(content, "optimizer"), file).take("zero_stage", 0) and degrees["data"] > 1:
        degrees["sharding"] = "distributed"
    if said.flag("recompute_layer"):
        degrees["recompute"] = "full"
    return degrees
