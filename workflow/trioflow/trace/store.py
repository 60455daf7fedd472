"""A trace on disk: the operator table, the tensor table and the facts of one step.

What a trace holds, in one row: its source, its size, and how much of the device's time it explains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.errors import TraceError, suggest
from trioflow.base.input_files import parse_json
from trioflow.base.provenance import digest_file, read_json, write_json
from trioflow.base.units import format_time, ns_to_s
from trioflow.tables import PHASES
from trioflow.trace.consistency import check_trace
from trioflow.trace.facts import DIGESTS, STEP_TIME_SOURCES, UNTIMED, Facts, check_facts
from trioflow.trace.pack import MEMBERS, TABLES, describe_member, open_pack, read_member, write_pack

SEPARATOR = "; "


def coverage_of_trace(trace: Trace) -> float | None:
    """Return the share of the measured time that operators with a name explain.

    Of kernels' time on a device of its own, of the step on a CPU; None without times, 1 where
    nothing else was timed.
    """
    facts = trace.facts
    source = facts.step_time_source
    if source == UNTIMED:
        return None
    if facts.device == "cuda" and facts.joined_share is not None:
        return float(facts.joined_share)
    if source == "busy":
        return 1.0
    return ns_to_s(float(trace.operators["device_ns"].sum())) / float(facts.step_time_s)


def summarise_trace(trace: Trace, name: str) -> dict[str, Any]:
    """Return a row of ``tables.TRACES``, called ``name``."""
    operators, facts = trace.operators, trace.facts
    counts = operators["phase"].value_counts()
    unjoined = list(facts.unjoined or [])
    return {
        "trace": name,
        "workload": facts.workload,
        "source": str(facts.source or "capture"),
        "device": facts.device_name,
        "batch": facts.batch,
        "precision": str(facts.precision or ""),
        "optimizer": str(facts.optimizer or ""),
        "step_time_source": str(facts.step_time_source or "un-profiled"),
        "step_time_s": float(facts.step_time_s),
        **{f"{phase}_operators": int(counts.get(phase, 0)) for phase in PHASES},
        "kernels": int(operators["kernels"].sum()),
        "device_s": ns_to_s(float(operators["device_ns"].sum())),
        "coverage": coverage_of_trace(trace),
        "flop": sum(operators["flop"].tolist()),
        "read_bytes": int(operators["read_bytes"].sum()),
        "write_bytes": int(operators["write_bytes"].sum()),
        "parameter_bytes": sum(int(g["size_bytes"]) for g in facts.gradients),
        "not_joined": SEPARATOR.join(unjoined),
        "warnings": SEPARATOR.join(w for w in facts.warnings if w not in unjoined),
    }


def describe_step(row: dict[str, Any]) -> str:
    """Say how long a summarised step took, by which clock, and how much of it operators explain."""
    source = row["step_time_source"]
    if source == UNTIMED:
        return "shapes captured, no timings; times will be predicted"
    return (
        f"{format_time(row['step_time_s'])} ({STEP_TIME_SOURCES[source]}); "
        f"{format_time(row['device_s'])} in operators, coverage {row['coverage']:.1%}"
    )


MOST_UNNAMED = 0.5
"""Share of the time in operators whose tensors, or whose results, nobody recorded: from there on what needs them is refused."""


@dataclass(repr=False)
class Trace:
    """One training step of one rank."""

    operators: pd.DataFrame  # columns of ``tables.OPERATORS``, in order of start
    tensors: pd.DataFrame  # columns of ``tables.TENSORS``
    facts: Facts  # what is known of the step beside its tables

    @cached_property
    def unshaped_share(self) -> float:
        """Share of forward's and backward's time in operators whose tensors nobody recorded."""
        return self._share_without("input_ids", "output_ids")

    @cached_property
    def names_results(self) -> bool:
        """Whether it is recorded what operators make, and so what a step holds."""
        return self._share_without("output_ids") < MOST_UNNAMED

    def _share_without(self, *columns: str) -> float:
        """Return the share of the time, of an untimed step the number, of operators of which all columns are empty."""
        operators = self.operators
        passes = (operators["kind"] == "compute") & (operators["phase"] != "optimizer")
        time_ns = operators["device_ns"].to_numpy(dtype=np.float64) * passes
        time_ns = time_ns if time_ns.any() else passes.to_numpy(dtype=np.float64)
        cells = zip(*(operators[name].tolist() for name in columns), strict=True)
        bare = np.array([not any(map(len, row)) for row in cells], dtype=bool)
        return float(time_ns[bare].sum() / max(time_ns.sum(), 1.0))

    def __repr__(self) -> str:
        facts, step_s = self.facts, self.facts.step_time_s
        return (
            f"<Trace {facts.workload}, batch {facts.batch}, on {facts.device_name}: "
            f"{len(self.operators)} operators, step {format_time(step_s) if step_s else 'without a time'}>"
        )


def save_trace(trace: Trace, folder: str | Path) -> None:
    """Write ``operators.parquet``, ``tensors.parquet`` and ``trace.json`` (with their digests), once all are checked.

    Raises TraceError when a fact is missing or impossible, or the trace contradicts itself,
    TableError when a table breaks its schema.
    """
    facts = trace.facts.to_dict()
    check_facts(facts, Path(folder) / "trace.json")
    arrow = {}
    for frame, name in ((trace.operators, "operators"), (trace.tensors, "tensors")):
        file = Path(folder) / f"{name}.parquet"
        arrow[file] = tables.to_arrow(frame, name, file)
        tables.validate(arrow[file], name, file)
    check_trace(trace, folder)
    stamp = {"workload": trace.facts.workload, "batch": trace.facts.batch}
    for file, table in arrow.items():
        tables.write_arrow(table, file, stamp)
    digests = {name: digest_file(Path(folder) / name) for name in TABLES}
    digests["trace.json"] = _digest_facts(facts)
    write_json(Path(folder) / "trace.json", {**facts, DIGESTS: digests})


def load_trace(folder: str | Path, **step: Any) -> Trace:
    """Read a trace, from a folder, a pack or the name of one that ships with trioflow.

    ``folder``: a trace; or a language model by its name or its configuration, whose trace is made
    (``trace.language.read.find_configuration``). ``**step``: of such a model alone: ``sequence``
    [tokens], ``batch`` [samples], ``precision`` (a recipe), ``attention``, ``fusion``, ``cuda_graphs``, ``freeze``, ``lora``, ``lora_targets``, ``lora_dropout`` and ``optimizer``, as in
    ``trace.language.sizes.LanguageStep``. Raises TraceError when there is no such trace, a fact is
    missing, the trace contradicts itself, or a pack is damaged. Raises TableError when a table
    breaks its schema. Raises InputError when a configuration is invalid, or something is asked of a
    trace that only a model has.
    """
    path = find_trace(folder)
    if not (path / "trace.json").exists():
        configuration = language_models().find_configuration(folder)
        if configuration is not None:
            return cast("Trace", language_models().trace_of(configuration, step))
    if path.exists():
        refuse_step(step, str(folder))
    if path.is_file():
        return read_pack(path)
    if not (path / "trace.json").exists():
        shipped, models = shipped_traces(), language_models().published_models()
        raise TraceError(
            "no trace here: trace.json is missing"
            if path.exists()
            else "no trace here, and no language model is known by this name",
            file=path,
            fix=f"{suggest(str(folder), [*shipped, *models])}give a folder that `trioflow capture` or "
            f"`trioflow import` wrote, a file of `trioflow pack`, one of the shipped traces ({', '.join(shipped)}), "
            f"or a language model by its configuration's file or its name ({', '.join(models)})",
        )
    content = read_json(path / "trace.json", TraceError)
    operators, tensors = (tables.read_table(path / name, name.removesuffix(".parquet")) for name in TABLES)
    return _accept_trace(content, operators, tensors, path, lambda name: digest_file(path / name))


def refuse_step(step: Mapping[str, Any], file: str) -> None:
    """Raise TraceError when something of a step is asked for that only a language model's trace is made for."""
    asked = [name for name, value in step.items() if value is not None]
    if asked:
        raise TraceError(
            f"{' and '.join(asked)} of a trace that was captured or imported cannot be chosen",
            file=file,
            fix="leave it out, or name a model, such as llama-3.1-8b",
        )


def pack_trace(trace: str | Path, target: str | Path) -> dict[str, Any]:
    """Write a trace (folder, shipped name or pack) into one file; the same trace gives the same bytes.

    ``target`` appears complete or not at all. Returns the manifest: format, versions, ``digest`` of
    all members, ``files`` (bytes and SHA-256), ``provenance`` (`pack.REPEATED_FACTS` that it has).
    Raises TraceError when there is no such trace, or the target is a folder or lies in none,
    TableError when a table breaks its schema.
    """
    target = Path(target)
    if not target.parent.is_dir():
        raise TraceError("there is no such folder", file=target.parent, fix="make it first")
    if target.is_dir():
        raise TraceError("this is a folder", file=target, fix="name a file, such as trace.zip")
    facts = load_trace(trace).facts.to_dict()
    path = find_trace(trace)
    members = open_pack(path) if path.is_file() else {name: (path / name).read_bytes() for name in MEMBERS}
    return write_pack(target, members, facts)


def read_pack(file: str | Path) -> Trace:
    """Read a trace from a pack; TraceError as `pack.open_pack` or where it contradicts itself, TableError as its tables."""
    members = open_pack(file)
    facts = parse_json(
        members["trace.json"], file, TraceError, "trace.json", "pack the trace again, or copy the file again"
    )
    operators, tensors = (read_member(members[f"{name}.parquet"], name, file) for name in ("operators", "tensors"))
    return _accept_trace(facts, operators, tensors, file, lambda name: describe_member(members[name])["sha256"])


def _accept_trace(
    content: Any, operators: pd.DataFrame, tensors: pd.DataFrame, file: str | Path, digest: Callable[[str], str]
) -> Trace:
    """Make a trace of what a folder or a pack holds, once it agrees with itself.

    ``content``: of ``trace.json``; ``digest``: of a table's file, by its name. An edit is
    legitimate as long as everything agrees, but no measurement: it gets a warning. Raises
    TraceError when a fact is missing or impossible, or the trace contradicts itself.
    """
    if not isinstance(content, dict):
        raise TraceError("not a JSON object", file=file, place="trace.json", fix="capture it again")
    check_facts(content, Path(file) / "trace.json")
    facts = {name: fact for name, fact in content.items() if name != DIGESTS}
    digests = content.get(DIGESTS) or {}
    trace = Trace(operators, tensors, Facts.read(facts))
    check_trace(trace, file)
    now = {"trace.json": _digest_facts(facts), **{name: digest(name) for name in TABLES}}
    edited = [name for name in now if digests and digests.get(name) != now[name]]
    if edited:
        warnings = trace.facts.warn(
            f"{' and '.join(edited)} {'was' if len(edited) == 1 else 'were'} edited after the trace"
            " was captured or imported: its members agree with one another, but are not what was recorded"
        )
        trace = replace(trace, facts=replace(trace.facts, warnings=warnings))
    return trace


def _digest_facts(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of facts, whatever the form in which they are written."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def pipeline_units(trace: Trace) -> dict[str, list[str]]:
    """Return the units a pipeline can be cut between, in order, with their modules."""
    return {str(unit["name"]): list(unit["modules"]) for unit in trace.facts.units or []}


def language_models() -> ModuleType:
    """Return ``trace.language.read``, found at run time: it needs what captures, which rules that read traces do not."""
    return import_module(f"{__package__}.language.read")


def is_model(name: str | Path) -> bool:
    """Return whether a name or path stands for a language model; InputError where it is one that is not built."""
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
