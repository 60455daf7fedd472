"""A trace: the operator table, the tensor table and the facts of one step; its folder, its pack, and what must agree in it.

`load_trace` and `save_trace` read and write a folder; `pack_trace` puts tables and facts with their digests into one
file, to carry from one site to another. `check_trace` says whether a trace, edited or not, agrees with itself: its
tables with one another, and its facts with its tables. Each check names what must hold and finds the first row where it
does not, over whole columns, so that loading stays fast. `summarise_trace` is a trace in one row: its source, its size,
and how much of the device's time it explains.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import chain
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trioflow import __version__, tables
from trioflow.base.columns import Columns, as_columns
from trioflow.base.errors import InputError, TraceError, suggest
from trioflow.base.input_files import LARGEST_JSON_BYTES, check_file, parse_json
from trioflow.base.provenance import atomic_path, digest_file, read_json, write_json
from trioflow.base.units import format_bytes, format_time, ns_to_s
from trioflow.tables import PHASES
from trioflow.trace.facts import DIGESTS, STEP_TIME_SOURCES, UNTIMED, Facts, check_facts

if TYPE_CHECKING:
    import pandas as pd

    from trioflow.trace.language.sizes import Configuration, ConfiguredModel

_MOST_OF_STEP = 2.0
"""Device time of compute over the step's own time; a device computes one instant once."""
_MOST_OF_BUSY_STEP = 10.0
"""The same on a processor, either way: other programs take turns there, in the step or in its profile."""
MOST_WORK = 1 << 60
"""Operations of one operator, bytes or nanoseconds of all; more than any step has."""
MOST_ELEMENTS = 1 << 40
"""Elements of one tensor: a trillion, more than any device holds."""
_FIX = "import or capture it again, or undo the edit"


def tensor_bytes(trace: Trace) -> list[int]:
    """Return the size of every tensor of a trace, by ``tensor_id`` [bytes]."""
    columns = (trace.tensor_columns[name].tolist() for name in ("shape", "elem_bytes"))
    return [prod(shape) * int(size) for shape, size in zip(*columns, strict=True)]


def lay_end_to_end(operators: pd.DataFrame) -> None:
    """Give every operator its start [ns]: host time before it, then its own."""
    operators["start_ns"] = (operators["cpu_ns"] + operators["device_ns"]).cumsum() - operators["device_ns"]


Found = tuple[str, str, str]
"""Where something does not hold (file, place) and what it is."""


def _rows(wrong: NDArray[np.bool_], column: str, problem: Callable[[int], str]) -> Iterator[Found]:
    """Yield the rows of the operators of which something is wrong."""
    for row in np.flatnonzero(wrong).tolist():
        yield "operators", f"row {row}, column {column}", problem(row)


def _check_works(trace: Trace) -> Iterator[Found]:
    """Check that phases are named, work is possible and adds up, and parts fit into wholes."""
    yield from _rows(trace.operator_columns["phase"].isin([""]), "phase", lambda row: "the phase is empty")
    for name in ("flop", "read_bytes", "write_bytes", "device_ns", "cpu_ns"):
        numbers = trace.operator_columns[name].tolist()  # of Python: their sum cannot overflow
        if (max(numbers, default=0) if name == "flop" else sum(numbers)) >= MOST_WORK:
            row = max(range(len(numbers)), key=numbers.__getitem__)
            what = f"{numbers[row]} of {trace.operator_columns['name'].tolist()[row]!r:.60}"
            yield "operators", f"row {row}, column {name}", f"{what} is more than any step"
    flop = sum(trace.operator_columns["flop"].tolist())  # of Python: a million tokens overflow 64 bits
    counts = (("operators", trace.facts.operators, trace.operator_columns.rows), ("flop", trace.facts.flop, flop))
    for name, stated, counted in counts:
        if isinstance(stated, int) and stated != counted:
            yield "facts", name, f"{stated} is stated, but the operators have {counted}"
    for name in ("flop", "read_bytes", "write_bytes"):
        whole, part = trace.operator_columns[name], trace.operator_columns[f"batch_{name}"]
        for row in np.flatnonzero(part > whole).tolist():
            problem = f"{part[row]} grow with the batch, of {whole[row]} in all"
            yield "operators", f"row {row}, column batch_{name}", problem


def _check_references(trace: Trace) -> Iterator[Found]:
    """Check that operators come after those that they differentiate, and tensors name operators that are there."""
    forward = trace.operator_columns["forward_op_id"]
    outside = (forward < -1) | (forward >= np.arange(trace.operator_columns.rows))
    yield from _rows(outside, "forward_op_id", lambda row: f"{forward[row]} is not an operator before it")
    yield from _check_tensors(trace)
    for name in ("producer_op_id", "last_op_id"):
        numbers = trace.tensor_columns[name]
        for row in np.flatnonzero((numbers >= trace.operator_columns.rows) | (numbers < -1)).tolist():
            problem = f"operator {numbers[row]} does not exist"
            yield "tensors", f"row {row}, column {name}", problem


def _check_tensors(trace: Trace) -> Iterator[Found]:
    """Take a type's size of an element from its first row; an undefined tensor has size 0."""
    sizes: dict[str, int] = {}
    columns = (trace.tensor_columns[name].tolist() for name in ("shape", "elem_bytes", "dtype"))
    for row, (shape, size, kind) in enumerate(zip(*columns, strict=True)):
        known = sizes.setdefault(kind, size)
        if size < 0 or size != known:
            problem = f"{size} bytes an element of {kind!r:.40}, and {known} in another row"
            problem = f"{size} is not an element size" if size < 0 else problem
            yield "tensors", f"row {row}, column elem_bytes", problem
        if len(shape) and (min(shape) < 0 or prod(shape) > MOST_ELEMENTS):
            yield "tensors", f"row {row}, column shape", f"{list(shape)!r:.60} is not a shape"


def _check_shapes(trace: Trace) -> Iterator[Found]:
    """Compare the shapes that operators recorded with those of the tensors that they name."""
    shapes = [list(shape) for shape in trace.tensor_columns["shape"]]
    for side in ("input", "output"):
        ids, recorded = trace.operator_columns[f"{side}_ids"], trace.operator_columns[f"{side}_shapes"]
        flat = list(chain.from_iterable(ids))
        if flat and not 0 <= min(flat) <= max(flat) < len(shapes):
            row = next(r for r, one in enumerate(ids) if any(not 0 <= i < len(shapes) for i in one))
            yield "operators", f"row {row}, column {side}_ids", "a tensor does not exist"
        if not flat or list(chain.from_iterable(recorded)) == [shapes[i] for i in flat]:
            continue
        for row, (one, given) in enumerate(zip(ids, recorded, strict=True)):
            if one and [shapes[i] for i in one] != [list(shape) for shape in given]:
                problem = f"{given!r:.60} are not the shapes of these tensors"
                yield "operators", f"row {row}, column {side}_shapes", problem


def _check_batch(trace: Trace) -> Iterator[Found]:
    """Look for the batch among the sizes that grow with it, and the inputs', where all growth begins."""
    dims, recorded = trace.operator_columns["batch_dim"], trace.operator_columns["output_shapes"].tolist()
    for row in np.flatnonzero(dims >= 0).tolist():
        shapes, dim = recorded[row], int(dims[row])
        if not shapes or dim >= len(shapes[0]) or shapes[0][dim] % trace.facts.batch:
            problem = f"dimension {dim} of {shapes!r:.60} is not a multiple of the batch, {trace.facts.batch}"
            yield "operators", f"row {row}, column batch_dim", problem
    inputs = trace.tensor_columns.take(trace.tensor_columns["category"].isin(["input"]))["shape"].tolist()
    grows = bool(trace.operator_columns["batch_read_bytes"].any())
    if grows and len(inputs) and not any(trace.facts.batch in shape for shape in inputs):
        yield "facts", "batch", f"no input of the step has {trace.facts.batch} samples"


def _check_gradients(trace: Trace) -> Iterator[Found]:
    """Check that gradients are of the step, stand once, and are as large as their parameters."""
    for row, one in enumerate(trace.facts.gradients):
        ready = one["ready_after_op_id"]
        if not 0 <= ready < trace.operator_columns.rows:
            place = f"gradients[{row}].ready_after_op_id"
            yield "facts", place, f"operator {ready} does not exist"
    for key in ("name", "parameter_storage_id"):
        values = [one.get(key) for one in trace.facts.gradients]
        for value, count in Counter(values).items():
            if count > 1 and value is not None:
                place = f"gradients[{values.index(value)}].{key}"
                yield "facts", place, f"{value!r:.60} stands twice"
    due_bytes: dict[str, int] = {
        one["name"]: prod(one["shape"]) * int(one["elem_bytes"])
        for one in trace.facts.parameters or []
        if isinstance(one.get("elem_bytes"), int)
    }
    for row, one in enumerate(trace.facts.gradients):
        size, due = one["size_bytes"], due_bytes.get(one["name"])
        if due is not None and size != due:
            place = f"gradients[{row}].size_bytes"
            yield "facts", place, f"{size} bytes, its parameter has {due}"


def _check_bytes(trace: Trace) -> Iterator[Found]:
    """Compare an operator's bytes with all that its tensors hold; one in place may write its inputs."""
    sizes, inputs = tensor_bytes(trace), trace.operator_columns["input_ids"].tolist()
    in_place = [str(name).endswith("_") for name in trace.operator_columns["name"].tolist()]
    for name, side in (("read_bytes", "input_ids"), ("write_bytes", "output_ids")):
        moved, ids = trace.operator_columns[name].tolist(), trace.operator_columns[side].tolist()
        for row, (stated_bytes, one) in enumerate(zip(moved, ids, strict=True)):
            writes_more = bool(one) and side == "output_ids" and in_place[row]
            size_bytes = sum(sizes[i] for i in ({*one, *inputs[row]} if writes_more else one))
            if one and stated_bytes > size_bytes:
                problem = f"{stated_bytes} bytes, but its tensors hold {size_bytes} bytes"
                yield "operators", f"row {row}, column {name}", problem


def _check_times(trace: Trace) -> Iterator[Found]:
    """Compare sums: a device computes one instant once, and a CPU's step is nothing but operators."""
    source, step_s = (trace.facts.step_time_source or "un-profiled"), trace.facts.step_time_s
    if source == "none" or not trace.operator_columns.rows:
        return
    computes = ~trace.operator_columns["kind"].isin(["collective"])
    device, host = trace.operator_columns["device_ns"], trace.operator_columns["cpu_ns"]
    device_s, all_s = float(device[computes].sum()) / 1e9, float((device + host).sum()) / 1e9
    on_cpu, place = trace.facts.device == "cpu", "column device_ns"
    most = _MOST_OF_BUSY_STEP if on_cpu else _MOST_OF_STEP
    if not device.any():
        yield "operators", place, f"all are 0 in a step of {step_s} s"
    if device_s > most * step_s:
        problem = f"the operators take {device_s:.6g} s, more than the step, {step_s} s"
        yield "operators", place, problem
    if all_s * most < step_s and (source == "busy" or (source == "un-profiled" and on_cpu)):
        problem = f"the operators take {all_s:.6g} s, and nothing else is in the step, {step_s} s"
        yield "operators", place, problem


CHECKS: tuple[Callable[[Trace], Iterator[Found]], ...] = (
    _check_works,
    _check_references,
    _check_shapes,
    _check_batch,
    _check_gradients,
    _check_bytes,
    _check_times,
)
"""In this order: each relies on what those before it found to hold."""


def check_trace(trace: Trace, file: str | Path) -> None:
    """Refuse a trace that contradicts itself; its facts have passed ``store.check_facts``, its tables their schemas.

    Raises TraceError with ``file``, table (or facts), place and what does not hold.
    """
    trace = Trace(trace.operator_columns, trace.tensor_columns, trace.facts)
    for member, place, problem in chain.from_iterable(check(trace) for check in CHECKS):
        raise TraceError(problem, file=file, place=f"{member}, {place}", fix=_FIX)


FORMAT, VERSION = "trioflow trace", 1
MANIFEST = "pack.json"
TABLES = ("operators.parquet", "tensors.parquet")
MEMBERS = (*TABLES, "trace.json")
"""Files of a trace, in the order in which a pack holds them."""
REPEATED_FACTS = (
    "workload",
    "batch",
    "device_name",
    "precision",
    "optimizer",
    "source",
    "files",
    "seed",
    "torch",
    "trioflow_version",
    "host",
    "driver",
    "cuda",
)
"""Facts that the manifest repeats, so that a pack says where it comes from without being unpacked."""
_LARGEST_TABLE_BYTES = 1 << 30
"""A compressed table of a trace; those of 100,000 operators have some 10 MB."""
_DATE = (1980, 1, 1, 0, 0, 0)
"""Zip's first date: the time of packing is not part of the content."""
_AGAIN = "pack the trace again, or copy the file again"


def write_pack(target: str | Path, members: Mapping[str, bytes], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write a pack of `MEMBERS`, stored as they are (compressors differ), complete or not at all; return its manifest."""
    files = {name: describe_member(content) for name, content in members.items()}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "trioflow_version": __version__,
        "digest": _digest_all(files),
        "files": files,
        "provenance": {name: facts[name] for name in REPEATED_FACTS if name in facts},
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    with atomic_path(target) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, content in {MANIFEST: text.encode(), **members}.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return manifest


def open_pack(file: str | Path) -> dict[str, bytes]:
    """Return the content of a pack's members, checked against its digests.

    Raises TraceError when it is not a pack, of a later version, cut off or different.
    """
    check_file(file, TraceError)
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if MANIFEST not in names:
                raise TraceError("no pack of a trace: pack.json is missing", file=file, fix=_AGAIN)
            _check_sizes(archive, file)
            content = parse_json(archive.read(MANIFEST), file, TraceError, MANIFEST, _AGAIN)
            manifest = _check_manifest(content, file)
            if sorted(names) != sorted([MANIFEST, *MEMBERS]):
                odd = sorted({MANIFEST, *MEMBERS} ^ set(names)) or sorted(names)
                raise TraceError(
                    f"members are missing, unknown or there twice: {', '.join(odd)}", file=file, fix=_AGAIN
                )
            members = {name: archive.read(name) for name in MEMBERS}
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise TraceError(f"not a readable pack of a trace ({error})", file=file, fix=_AGAIN) from None
    for name, content in members.items():
        if describe_member(content) != manifest["files"][name]:
            raise TraceError("differs from its digest", file=file, place=name, fix=_AGAIN)
    return members


def _check_sizes(archive: zipfile.ZipFile, file: str | Path) -> None:
    """Refuse members that say they are larger than any; no more than they say is ever read."""
    for member in archive.infolist():
        largest = _LARGEST_TABLE_BYTES if member.filename.endswith(".parquet") else LARGEST_JSON_BYTES
        if member.file_size > largest:
            raise TraceError(
                f"takes {format_bytes(member.file_size)}, more than any of a trace",
                file=file,
                place=member.filename,
                fix="check what it is",
            )


def _check_manifest(manifest: Any, file: str | Path) -> dict[str, Any]:
    """Return a manifest that holds what a reader needs."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise TraceError("no pack of a trace", file=file, place=MANIFEST, fix=_AGAIN)
    version = manifest.get("version")
    if version != VERSION:
        raise TraceError(
            f"version {version!r} of packs is not known here, {VERSION} is",
            file=file,
            place=MANIFEST,
            fix="use the version of trioflow that packed it, or a later one",
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or sorted(files) != sorted(MEMBERS):
        raise TraceError("it does not list its members", file=file, place=MANIFEST, fix=_AGAIN)
    if manifest.get("digest") != _digest_all(files):
        raise TraceError("the digest of all members is wrong", file=file, place=MANIFEST, fix=_AGAIN)
    return manifest


def read_member(content: bytes, name: str, file: str | Path) -> Columns:
    """Read the table ``name`` from its Parquet bytes; errors name the pack."""
    try:
        return tables.read_columns(pa.BufferReader(content), name)
    except InputError as error:
        place = ", ".join(part for part in (f"{name}.parquet", error.place) if part)
        raise type(error)(error.problem, file=file, place=place, fix=error.fix) from None


def describe_member(content: bytes) -> dict[str, Any]:
    """Return the size and the SHA-256 of a member, as the manifest holds them."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _digest_all(files: Mapping[str, Any]) -> str:
    """Return one digest of the members' digests, in their order."""
    text = "".join(f"{name} {json.dumps(files[name], sort_keys=True)}\n" for name in MEMBERS)
    return hashlib.sha256(text.encode()).hexdigest()


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
    return ns_to_s(float(trace.operator_columns["device_ns"].sum())) / float(facts.step_time_s)


def summarise_trace(trace: Trace, name: str) -> dict[str, Any]:
    """Return a row of ``tables.TRACES``, called ``name``."""
    operators, facts = trace.operator_columns, trace.facts
    counts = Counter(operators["phase"].tolist())
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
        **{f"{phase}_operators": counts[phase] for phase in PHASES},
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


class _Table:
    """A table of a trace: as it was given, a frame or columns; a frame as soon as one is asked for, as that may be changed."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trace: Trace | None, owner: type) -> pd.DataFrame:
        if trace is None:
            raise AttributeError(self.name)  # a field without a default
        table = vars(trace)[self.name]
        if isinstance(table, Columns):
            numbers = [name for name, column in table.items() if getattr(column, "dtype", None) == np.int64]
            table = vars(trace)[self.name] = table.to_frame(numbers)
        return cast("pd.DataFrame", table)

    def __set__(self, trace: Trace, table: pd.DataFrame | Columns) -> None:
        vars(trace)[self.name] = table


@dataclass(repr=False, eq=False)
class Trace:
    """One training step of one rank."""

    operators: _Table = _Table()  # columns of ``tables.OPERATORS``, in order of start
    tensors: _Table = _Table()  # columns of ``tables.TENSORS``
    facts: Facts  # type: ignore[misc]  # what is known of the step beside its tables; no table has a default

    @property
    def operator_columns(self) -> Columns:
        """The operators, without a frame."""
        return as_columns(vars(self)["operators"], tables.NULLABLE["operators"])

    @property
    def tensor_columns(self) -> Columns:
        """The tensors, without a frame."""
        return as_columns(vars(self)["tensors"], tables.NULLABLE["tensors"])

    def replace(self, facts: Facts, operators: pd.DataFrame | Columns | None = None) -> Self:
        """Return a trace of the same tensors with other facts, and with other operators where given."""
        tables = vars(self)
        return type(self)(tables["operators"] if operators is None else operators, tables["tensors"], facts)

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
        operators = self.operator_columns
        passes = operators["kind"].isin(["compute"]) & ~operators["phase"].isin(["optimizer"])
        time_ns = operators["device_ns"] * passes.astype(np.float64)
        time_ns = time_ns if time_ns.any() else passes.astype(np.float64)
        cells = zip(*(operators[name].tolist() for name in columns), strict=True)
        bare = np.array([not any(map(len, row)) for row in cells], dtype=bool)
        return float(time_ns[bare].sum() / max(time_ns.sum(), 1.0))

    def __repr__(self) -> str:
        facts, step_s = self.facts, self.facts.step_time_s
        return (
            f"<Trace {facts.workload}, batch {facts.batch}, on {facts.device_name}: "
            f"{self.operator_columns.rows} operators, step {format_time(step_s) if step_s else 'without a time'}>"
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
    path, model = find_trace(folder), find_language_model(folder)
    if model is not None:
        return cast("Trace", language_models().trace_of(model, step))
    if path.exists():
        refuse_step(step, str(folder))
    if path.is_file():
        return read_pack(path)
    if not (path / "trace.json").exists():
        named = [*shipped_traces(), *language_models().published_models()]
        raise TraceError(
            "no trace here: trace.json is missing"
            if path.exists()
            else "no such file"
            if path.suffix in (".json", ".yaml", ".yml", ".toml", ".sh")
            else "no trace here, and no language model is known by this name",
            file=path,
            fix=f"{suggest(str(folder), named)}`trioflow models` lists the names; else give a configuration's file, or "
            "what `trioflow capture`, `trioflow import` or `trioflow pack` wrote",
        )
    content = read_json(path / "trace.json", TraceError)
    operators, tensors = (tables.read_columns(path / name, name.removesuffix(".parquet")) for name in TABLES)
    return _accept_trace(content, operators, tensors, path, lambda name: digest_file(path / name))


def refuse_step(step: Mapping[str, Any], file: str) -> None:
    """Raise TraceError when something of a step is asked for that only a language model's trace is made for."""
    changed = [name for name, value in step.items() if value is not None]
    if changed:
        raise TraceError(
            f"{' and '.join(changed)} of a trace that was captured or imported cannot be chosen",
            file=file,
            fix="leave it out, or name a model, such as llama-3.1-8b",
        )


def pack_trace(trace: str | Path, target: str | Path) -> dict[str, Any]:
    """Write a trace (folder, shipped name or pack) into one file; the same trace gives the same bytes.

    ``target`` appears complete or not at all. Returns the manifest: format, versions, ``digest`` of
    all members, ``files`` (bytes and SHA-256), ``provenance`` (`REPEATED_FACTS` that it has).
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
    """Read a trace from a pack; TraceError as `open_pack` or where it contradicts itself, TableError as its tables."""
    members = open_pack(file)
    facts = parse_json(
        members["trace.json"], file, TraceError, "trace.json", "pack the trace again, or copy the file again"
    )
    operators, tensors = (read_member(members[f"{name}.parquet"], name, file) for name in ("operators", "tensors"))
    return _accept_trace(facts, operators, tensors, file, lambda name: describe_member(members[name])["sha256"])


def _accept_trace(
    content: Any, operators: Columns, tensors: Columns, file: str | Path, digest: Callable[[str], str]
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
        trace = trace.replace(replace(trace.facts, warnings=warnings))
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


def find_language_model(name: str | Path) -> Configuration | ConfiguredModel | None:
    """Return the model that a name or path stands for, None for a trace; InputError where it is one that is not built."""
    if (find_trace(name) / "trace.json").exists():
        return None
    return cast("Configuration | ConfiguredModel | None", language_models().find_configuration(name))


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
