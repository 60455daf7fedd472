"""From a name or a file to a language model, and to the trace of its training step (`find_configuration`, `trace_of`).

What reads a file is registered: Hugging Face's, Megatron-LM's, nanotron's and launch configurations by ``formats``.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from trioflow.base.errors import InputError
from trioflow.base.input_files import LARGEST_JSON_BYTES, parse_json, parse_toml, read_text
from trioflow.base.plugins import load_plugins
from trioflow.base.provenance import read_table
from trioflow.base.yaml_files import parse_yaml
from trioflow.trace.language.sizes import Configuration, ConfigurationFile, ConfiguredModel, LanguageModel, LanguageStep
from trioflow.trace.store import Trace

READER_GROUP = "trioflow.configurations"
"""Group of functions that return the `Configuration` or `ConfiguredModel` of a `ConfigurationFile`, None for another's."""
_HUGGINGFACE = "config.json"
YAML, TEXT, TOML = (".yaml", ".yml"), (".sh", ".txt", ".args"), ".toml"


def find_configuration(name: str | Path) -> Configuration | ConfiguredModel | None:
    """Return the configuration that a published name or a path stands for; None where it is something else.

    Files: Hugging Face's JSON (or its folder), and those of other readers. Raises InputError when one is not such a
    configuration.
    """
    path = Path(name)
    if path.is_dir() and (path / _HUGGINGFACE).is_file() and not (path / "trace.json").exists():
        path = path / _HUGGINGFACE
    if path.is_file() and path.suffix in (".json", TOML, *YAML, *TEXT):
        return parse_configuration(read_text(path, InputError, LARGEST_JSON_BYTES), str(path))
    return None if path.exists() else _read_published().get(_plain_name(str(name)))


def _plain_name(name: str) -> str:
    """Return a model's name without the marks that repositories of weights put around it."""
    plain = name.rpartition("/")[2].lower().replace("_", "-")
    return plain.removeprefix("meta-").removesuffix("-hf")


def open_configuration(text: str, file: str) -> ConfigurationFile:
    """Return what readers get of a file, its text parsed by its ending; InputError where that is broken."""
    path = Path(file)
    name = path.parent.name if path.stem in ("config", "model_config") else path.stem
    parse = {".json": parse_json, TOML: parse_toml}.get(path.suffix, parse_yaml)
    content = {} if path.suffix in TEXT else parse(text, path, InputError)
    return ConfigurationFile(name or path.stem, file, text, content if isinstance(content, Mapping) else {})


def parse_configuration(text: str, file: str) -> Configuration | ConfiguredModel:
    """Return what a configuration's text says; InputError where it is none, or of something that is not built."""
    opened = open_configuration(text, file)
    for read in load_plugins(READER_GROUP, what="reader of configurations"):
        configuration: Configuration | ConfiguredModel | None = read(opened)
        if configuration:
            return configuration
    raise InputError(
        "no configuration of a language model",
        file=file,
        fix="give a config.json of Hugging Face (with model_type), Megatron-LM's model_config.yaml (with"
        " MODEL_ARGS), a nanotron YAML (with model.model_config), or a launch configuration of torchtitan, Megatron Bridge,"
        " DeepSpeed or Accelerate",
    )


def trace_of(configuration: Configuration | ConfiguredModel, wanted: Mapping[str, Any]) -> Trace:
    """Return the trace of a configuration's training step; what is ``asked`` of a ``LanguageStep`` wins over the file.

    A sequence that nobody gives is the model's usual one, and ``sequence_assumed`` in the facts, as
    ``precision_assumed``. Raises InputError as ``make_trace``.
    """
    from trioflow.trace.language.make import make_network_trace, make_trace  # a recorded trace needs neither

    wanted = {name: value for name, value in wanted.items() if value is not None}
    if isinstance(configuration, ConfiguredModel):
        return make_network_trace(configuration, wanted)
    stated = {**configuration.step, **wanted}
    step = LanguageStep(**{"sequence": configuration.usual_sequence, **stated})
    trace, notes = make_trace(configuration.model, step), list(configuration.notes)
    if 0 < configuration.ignored_window < step.sequence:
        notes.append(
            f"attention's sliding_window of {configuration.ignored_window} tokens is not followed: all {step.sequence} are read"
        )
    changes: dict[str, Any] = {"warnings": trace.facts.warn(*notes)} if notes else {}
    assumed = {f"{name}_assumed": True for name in ("sequence", "precision") if name not in stated}
    if assumed:
        changes["language_model"] = {**(trace.facts.language_model or {}), **assumed}
    return trace.replace(replace(trace.facts, **changes)) if changes else trace


TABLE = Path(__file__).parent.parent.parent / "data" / "language_models.tsv"
"""A row a model: the fields of `LanguageModel`, the published number of parameters, how far ours may
be from it, where the sizes stand, and what of the model is not built; ``max_positions``: of its config.json."""


def published_models() -> dict[str, LanguageModel]:
    """Return the models that are known by name."""
    return {name: one.model for name, one in _read_published().items()}


@cache
def _read_published() -> dict[str, Configuration]:
    return {row["name"]: _read_row(row) for row in read_table(TABLE)}


def _read_row(row: dict[str, str]) -> Configuration:
    notes = (f"{row['left_out']} is not built, and left out",) if row["left_out"] else ()
    model = msgspec.convert(row, LanguageModel, strict=False).check(str(TABLE.name))
    return Configuration(model, notes=notes, max_positions=int(row["max_positions"]))
