"""A trace on disk: the operator table, the tensor table and the facts of one step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pandas as pd

from trioflow import tables
from trioflow.errors import TraceError
from trioflow.input_files import check_values
from trioflow.provenance import digest_file, read_json, write_json
from trioflow.trace.consistency import check_trace
from trioflow.units import format_time

REQUIRED_FACTS = ("workload", "batch", "device_name", "step_time_s")
STEP_TIME_SOURCES = {
    "un-profiled": "median of steps that ran without the profiler",
    "profiled": "the profiled step's own duration, the profiler's time included",
    "device period": "from one profiled step's end to the next one's on the device, which runs"
    " behind the host",
    "busy": "time in which the device was busy: no host time, no idle time",
    "repeated": "a captured step, one of its blocks repeated",
    "predicted": "the sum of operator times that a cost model gave",
    "none": "the trace holds no times",
}
"""What ``step_time_s`` is, by the fact ``step_time_source``."""
UNTIMED = "none"
TABLES = ("operators.parquet", "tensors.parquet")
DIGESTS = "digests"
"""Fact with the SHA-256 of both tables and of the other facts as they were saved; no trace in memory has it."""


@dataclass(repr=False)
class Trace:
    """One training step of one rank.

    Attributes
    ----------
    operators : DataFrame
        Columns of ``tables.OPERATORS``, in order of start.
    tensors : DataFrame
        Columns of ``tables.TENSORS``.
    facts : dict
        ``workload``, ``batch`` [samples], ``device_name``, ``step_time_s``
        (the step [s]), ``step_time_source`` (a key of `STEP_TIME_SOURCES`),
        ``step_times_s``, ``profiled_step_s``,
        ``tail_s`` (host time after the last operator [s]), ``gradients`` (one
        entry a parameter, in the order in which gradients become ready),
        ``units``, ``tensor_split``, ``environment``, ``warnings``.
    """

    operators: pd.DataFrame
    tensors: pd.DataFrame
    facts: dict[str, Any]

    def __repr__(self) -> str:
        workload, batch, device = (
            self.facts.get(name, "unknown") for name in ("workload", "batch", "device_name")
        )
        step_s = self.facts.get("step_time_s") or 0.0
        return (
            f"<Trace {workload}, batch {batch}, on {device}: {len(self.operators)} operators, "
            f"step {format_time(step_s) if step_s else 'without a time'}>"
        )


def save_trace(trace: Trace, folder: str | Path) -> None:
    """Write ``operators.parquet``, ``tensors.parquet`` and ``trace.json`` into a folder.

    All three are checked before the first is written; ``trace.json`` holds
    their digests, so that whoever reads them can say whether they were edited.

    Raises
    ------
    TraceError
        When a fact is missing or impossible, or the trace contradicts itself.
    TableError
        When a table breaks its schema.
    """
    check_facts(trace.facts, Path(folder) / "trace.json")
    for frame, name in ((trace.operators, "operators"), (trace.tensors, "tensors")):
        file = Path(folder) / f"{name}.parquet"
        tables.validate(tables.to_arrow(frame, name, file), name, file)
    check_trace(trace, folder)
    stamp = {"workload": trace.facts["workload"], "batch": trace.facts["batch"]}
    tables.write_table(trace.operators, "operators", Path(folder) / "operators.parquet", stamp)
    tables.write_table(trace.tensors, "tensors", Path(folder) / "tensors.parquet", stamp)
    digests = {name: digest_file(Path(folder) / name) for name in TABLES}
    digests["trace.json"] = _digest_facts(trace.facts)
    write_json(Path(folder) / "trace.json", {**trace.facts, DIGESTS: digests})


def load_trace(folder: str | Path, **step: Any) -> Trace:
    """Read a trace, from a folder, a pack or the name of one that ships with trioflow.

    Parameters
    ----------
    folder : str or path
        A trace; or a language model by its name or its configuration, whose trace is made
        (``trace.language.read.find_configuration``).
    **step
        Of such a model alone: ``sequence`` [tokens], ``batch`` [samples], ``precision`` (a recipe),
        ``attention`` and ``optimizer``, as in ``trace.language.step.LanguageStep``.

    Raises
    ------
    TraceError
        When there is no such trace, a fact is missing, the trace contradicts
        itself, or a pack is damaged.
    TableError
        When a table breaks its schema.
    InputError
        When a configuration is none, or something is asked of a trace that only a model has.
    """
    path = find_trace(folder)
    if not (path / "trace.json").exists():
        configuration = language_models().find_configuration(folder)
        if configuration is not None:
            return cast("Trace", language_models().trace_of(configuration, step))
    asked = [name for name, value in step.items() if value is not None]
    if asked:
        raise TraceError(
            f"{' and '.join(asked)} of a trace that was captured or imported cannot be chosen",
            file=folder, fix="leave it out, or name a model, such as llama-3.1-8b",
        )  # fmt: skip
    if path.is_file():
        from trioflow.trace.pack import read_pack

        return read_pack(path)
    if not (path / "trace.json").exists():
        raise TraceError(
            "no trace here: trace.json is missing",
            file=path,
            fix="give a folder that `trioflow capture` or `trioflow import` wrote, a file of `trioflow pack`, "
            f"one of the shipped traces ({', '.join(shipped_traces())}), or a language model by its configuration's "
            f"file or its name ({', '.join(language_models().published_models())})",
        )
    facts = read_json(path / "trace.json", TraceError)
    operators, tensors = (
        tables.read_table(path / name, name.removesuffix(".parquet")) for name in TABLES
    )
    return accept_trace(facts, operators, tensors, path, lambda name: digest_file(path / name))


def accept_trace(
    facts: Any,
    operators: pd.DataFrame,
    tensors: pd.DataFrame,
    file: str | Path,
    digest: Callable[[str], str],
) -> Trace:
    """Make a trace of what a folder or a pack holds, once it agrees with itself.

    Parameters
    ----------
    facts : object
        Content of ``trace.json``.
    operators, tensors : DataFrame
        The tables, as their schemas want them.
    file : path
        The folder or the pack, for messages.
    digest : callable
        Takes a table's name and returns the SHA-256 of its file.

    Returns
    -------
    Trace
        With a warning where members are not what was written: an edit is
        legitimate as long as everything agrees, but no measurement.

    Raises
    ------
    TraceError
        When a fact is missing or impossible, or the trace contradicts itself.
    """
    if not isinstance(facts, dict):
        raise TraceError("not a JSON object", file=file, place="trace.json", fix="capture it again")
    check_facts(facts, Path(file) / "trace.json")
    digests = facts.pop(DIGESTS, {})
    trace = Trace(operators, tensors, facts)
    check_trace(trace, file)
    now = {"trace.json": _digest_facts(facts), **{name: digest(name) for name in TABLES}}
    edited = [name for name in now if digests and digests.get(name) != now[name]]
    if edited:
        facts["warnings"] = [
            *facts.get("warnings", []),
            f"{' and '.join(edited)} {'was' if len(edited) == 1 else 'were'} edited after the trace"
            " was captured or imported: its members agree with one another, but are not what was recorded",
        ]
    return trace


def _digest_facts(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of facts, whatever the form in which they are written."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def check_facts(facts: Mapping[str, Any], file: str | Path | None = None) -> None:
    """Check the facts that every later stage relies on.

    Raises
    ------
    TraceError
        When a fact is missing or of another type, a number is none, the batch
        is no positive whole number, the step takes no time although the trace
        is timed, or an entry of a list lacks what a plan needs.
    """
    check_values(dict(facts), file or "trace.json", TraceError)
    for name in REQUIRED_FACTS:
        if name not in facts:
            raise TraceError(f"the fact {name!r} is missing", file=file, fix="capture it again")
    for name, value in facts.items():
        kind = next((known for known, names in _KINDS.items() if name in names), "")
        if name.endswith("_s") and not isinstance(value, list):
            kind = "time"
        if kind and value is not None and not _TESTS[kind](value):
            raise TraceError(f"{value!r:.40} is not a {kind}", file=file, place=str(name))
    batch, step_s = facts["batch"], facts["step_time_s"]
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise TraceError(f"{batch!r:.40} is no number of samples", file=file, place="batch")
    source = facts.get("step_time_source", "un-profiled")
    if source not in STEP_TIME_SOURCES:
        raise TraceError(
            f"{source!r:.40} is none of {', '.join(STEP_TIME_SOURCES)}", file=file,
            place="step_time_source",
        )  # fmt: skip
    if step_s is None or (step_s == 0) != (source == UNTIMED):
        raise TraceError(f"{step_s!r} is no time of a step", file=file, place="step_time_s")
    for name in ("workload", "device_name"):
        if facts[name] is None:
            raise TraceError("None is not a text", file=file, place=name)
    for key, needed in _LISTS.items():
        _check_list(facts.get(key, []), key, needed, file)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS = {
    "text": (
        "workload", "device_name", "device", "precision", "optimizer", "source", "mode", "model", "torch",
        "trioflow_version", "step_time_source",
    ),
    "number": ("joined_share", "seed", "profiler_overhead", "operators", "flop", "device_events"),
    "list of times": ("step_times_s", "span_ns"),
    "mapping of texts": ("tensor_split", "row", "inputs", "digests"),
    "mapping": ("host", "language_model"),
}  # fmt: skip
"""What optional facts are, where they are there; what ends in ``_s`` and is no list is a time."""
_TESTS: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "number": _is_number,
    "time": lambda value: _is_number(value) and value >= 0,
    "list of times": lambda value: (
        isinstance(value, list) and all(_is_number(one) and one >= 0 for one in value)
    ),
    "mapping of texts": lambda value: (
        isinstance(value, dict) and all(isinstance(one, str) for one in value.values())
    ),
    "mapping": lambda value: isinstance(value, dict),
}
_LISTS: dict[str, dict[str, type]] = {
    "gradients": {"name": str, "module": str, "size_bytes": int, "ready_after_op_id": int},
    "parameters": {"name": str, "shape": list},
    "units": {"name": str, "modules": list},
    "buffers": {"name": str},
    "repeated": {"block": str, "copies": int},
    "warnings": {},
    "unjoined": {},
}
"""Facts that are lists, and what an entry must hold; nothing where it is text."""


def _check_list(
    entries: Any, key: str, needed: Mapping[str, type], file: str | Path | None
) -> None:
    """Refuse a list of facts that lacks something or holds another type."""
    if not isinstance(entries, list):
        raise TraceError(f"{entries!r:.40} is no list", file=file, place=key)
    for row, entry in enumerate(entries):
        place = f"{key}[{row}]"
        known = isinstance(entry, dict if needed else str)
        if not known:
            raise TraceError(f"{entry!r:.40} is no entry", file=file, place=place)
        for name, kind in needed.items():
            if name not in entry:
                raise TraceError(f"{name} is missing", file=file, place=place)
            value = entry[name]
            member = int if name == "shape" else str
            if not isinstance(value, kind) or (
                isinstance(value, list) and not all(isinstance(one, member) for one in value)
            ):
                raise TraceError(f"{value!r:.40} is no {name}", file=file, place=f"{place}.{name}")


def tensor_bytes(trace: Trace) -> list[int]:
    """Return the size of every tensor of a trace, by ``tensor_id`` [bytes]."""
    tensors = trace.tensors
    return [
        prod(shape) * int(elem)
        for shape, elem in zip(tensors["shape"], tensors["elem_bytes"], strict=True)
    ]


def pipeline_units(trace: Trace) -> dict[str, list[str]]:
    """Return the units a pipeline can be cut between, in order, with their modules."""
    return {str(unit["name"]): list(unit["modules"]) for unit in trace.facts.get("units", [])}


def language_models() -> ModuleType:
    """Return ``trace.language.read``, which makes traces of models by their configuration.

    Found at run time: it needs all that captures, and a rule that reads traces does not.
    """
    return import_module(f"{__package__}.language.read")


def is_model(name: str | Path) -> bool:
    """Tell whether a name or a path stands for a language model, and not for a trace.

    Raises
    ------
    InputError
        When a file is a configuration of a model that is not built.
    """
    if (find_trace(name) / "trace.json").exists():
        return False
    return language_models().find_configuration(name) is not None


_PACKAGE = Path(__file__).parent.parent
SHIPPED = _PACKAGE / "data" / "traces"
"""Folder of the traces inside the package."""


def shipped_traces() -> list[str]:
    """Return the names of the traces inside the package."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/trace.json"))


def find_trace(name: str | Path) -> Path:
    """Return the folder or the pack of a trace: a path that exists, or else a shipped one's folder."""
    path, shipped = Path(name), SHIPPED / Path(name).name
    return shipped if not path.exists() and str(name) == path.name and shipped.exists() else path


def find_operators(name: str | Path) -> Path:
    """Return the file that holds a trace's operators: their table, or the pack."""
    path = find_trace(name)
    return path if path.is_file() else path / "operators.parquet"
