"""From a name or a file to a language model, and to the trace of its training step."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.input_files import LARGEST_JSON_BYTES, parse_json, read_text
from trioflow.base.yaml_files import parse_yaml
from trioflow.trace.language.configuration import Configuration, Fields, note_unknown
from trioflow.trace.language.huggingface import ACTIVATIONS, HARMLESS, read_huggingface
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.megatron import parse_arguments, read_megatron
from trioflow.trace.language.sizes import LanguageModel, LanguageStep
from trioflow.trace.store import Trace

_HUGGINGFACE = "config.json"
YAML, TEXT = (".yaml", ".yml"), (".sh", ".txt", ".args")
_MEGATRON_ARGUMENTS = "MODEL_ARGS"
"""Section of Megatron-LM's ``model_config.yaml``."""
_LAYERS = {f"{dashes}{name}" for dashes in ("--", "") for name in ("num-layers", "num_layers", "encoder-num-layers", "encoder_num_layers")}  # fmt: skip
"""Arguments of which Megatron-LM needs one."""
_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_HARMLESS_OF_NANOTRON = HARMLESS | {"is_llama_config", "is_qwen2_config", "rope_interleaved", "rope_seq_len_interpolation_factor"}  # fmt: skip
"""Fields of nanotron's YAML that change nothing here."""


def find_configuration(name: str | Path) -> Configuration | None:
    """Return the configuration that a published name or a path stands for; None where it is something else.

    Files: Hugging Face's JSON (or its folder), Megatron-LM's arguments as YAML or command line,
    nanotron's YAML. Raises InputError when one is not such a configuration, or the model is not
    built here.
    """
    path = Path(name)
    if path.is_dir() and (path / _HUGGINGFACE).is_file() and not (path / "trace.json").exists():
        return read_configuration(path / _HUGGINGFACE)
    if path.is_file() and path.suffix in (".json", *YAML, *TEXT):
        return read_configuration(path)
    model = None if path.exists() else published_models().get(_plain_name(str(name)))
    return None if model is None else Configuration(model, notes=_note_left_out(model.name))


@cache
def _note_left_out(name: str) -> tuple[str, ...]:
    """Return what a model known by name has and this one has not."""
    said = next(row["left_out"] for row in read_table() if row["name"] == name)
    return (f"{said} is not built, and left out",) if said else ()


def _plain_name(name: str) -> str:
    """Return a model's name without the marks that repositories of weights put around it."""
    plain = name.rpartition("/")[2].lower().replace("_", "-")
    return plain.removeprefix("meta-").removesuffix("-hf")


def read_configuration(path: Path) -> Configuration:
    """Return what a configuration file says; InputError as `find_configuration`."""
    file, text = str(path), read_text(path, InputError, LARGEST_JSON_BYTES)
    name = path.parent.name if path.stem in ("config", "model_config") else path.stem
    name = name or path.stem
    if path.suffix in TEXT:
        arguments = parse_arguments(text, file)
        if not _LAYERS & set(arguments):
            raise InputError("no command line of Megatron-LM: --num-layers is missing", file=file)
        return read_megatron(arguments, file, name)
    content = (
        parse_json(text, path, InputError) if path.suffix == ".json" else parse_yaml(text, path)
    )
    if isinstance(content, Mapping):
        arguments = content.get(_MEGATRON_ARGUMENTS, content)
        if "model_type" in content:
            return read_huggingface(content, file, name)
        if isinstance(arguments, Mapping) and _LAYERS & set(arguments):
            return read_megatron(arguments, file, name)
        if isinstance(content.get("model"), Mapping) and "model_config" in content["model"]:
            return _read_nanotron(content, file, name)
    raise InputError(
        "no configuration of a language model",
        file=file,
        fix="give a config.json of Hugging Face (with model_type), Megatron-LM's model_config.yaml (with"
        " MODEL_ARGS) or a nanotron YAML (with model.model_config)",
    )


def _read_nanotron(content: Mapping[str, Any], file: str, name: str) -> Configuration:
    """Return what a nanotron configuration says, to be called ``name``.

    Of ``model.model_config``, and ``parallelism``, ``tokens``, ``optimizer`` where present. Raises
    InputError when a size is missing, or the model has experts.
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
    named = {"sequence": "sequence_length", "batch": "micro_batch_size"}
    step: dict[str, Any] = {
        field: tokens.size(name) for field, name in named.items() if tokens.take(name)
    }
    kind = Fields(section, file).word("dtype", _FORMATS, "bfloat16")
    adds_up = Fields(_section(content, "optimizer"), file).flag("accumulate_grad_in_fp32", True)
    step["precision"] = kind if kind != "bf16" else "nanotron-bf16" if adds_up else "pure-bf16"
    return Configuration(
        model.check(file), step, _read_nanotron_degrees(content, file),
        accumulate=tokens.size("batch_accumulation_per_replica", 1),
        notes=tuple(note_unknown(found.list_unknown(_HARMLESS_OF_NANOTRON))),
    )  # fmt: skip


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


def trace_of(found: Configuration, asked: Mapping[str, Any]) -> Trace:
    """Return the trace of a configuration's training step; what is ``asked`` of a ``LanguageStep`` wins over the file.

    Raises InputError when nothing says how long a sample is, or as ``make_trace``.
    """
    said = {**found.step, **{name: value for name, value in asked.items() if value is not None}}
    if "sequence" not in said:
        raise InputError(
            f"nothing says how many tokens a sample of {found.model.name} has",
            fix="give --sequence, for example --sequence 8192",
        )
    trace = make_trace(found.model, LanguageStep(**said))
    if not found.notes:
        return trace
    warnings = trace.facts.warn(*found.notes)
    return replace(trace, facts=replace(trace.facts, warnings=warnings))


TABLE = Path(__file__).parent.parent.parent / "data" / "language_models.tsv"
"""A row a model: the fields of `LanguageModel`, the published number of parameters, how far ours may
be from it, where the sizes stand, and what of the model is not built."""


@cache
def published_models() -> dict[str, LanguageModel]:
    """Return the models that are known by name."""
    return {row["name"]: _read_row(row) for row in read_table()}


def read_table() -> list[dict[str, str]]:
    """Return the rows of the table as text."""
    with TABLE.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream, delimiter="\t"))


def _read_row(row: dict[str, str]) -> LanguageModel:
    readers: dict[str, Any] = {"int": int, "float": float, "bool": lambda text: text == "true"}
    values = {
        field.name: readers.get(str(field.type), str)(row[field.name])
        for field in fields(LanguageModel)
        if field.name in row
    }
    return LanguageModel(**values).check(str(TABLE.name))
