"""A trace in TrioSim's own format, ``trace.csv`` and ``tensor.csv`` (`write_triosim`).

What that cannot hold is lost: fractions of a microsecond, host time, module names, element types (sizes remain), what was
joined, and facts.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.base.provenance import atomic_path
from trioflow.tables import records
from trioflow.trace.facts import UNTIMED
from trioflow.trace.importers.sources import CsvColumn
from trioflow.trace.importers.triosim import TENSOR_COLUMNS, TENSOR_FILE, TRACE_COLUMNS, TRACE_FILE
from trioflow.trace.store import Trace

_DEVICE = 0

# What the format calls an operator's arguments, in order; the last name holds for all further ones.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "aten::conv1d aten::conv2d aten::conv3d aten::linear": ("input", "weight", "bias=None"),
    "aten::batch_norm": ("input", "weight", "bias", "running_mean", "running_var"),
    "aten::layer_norm aten::group_norm": ("input", "weight", "bias"),
    "aten::embedding": ("weight", "indices"),
    "aten::cross_entropy_loss": ("input", "target"),
    "aten::addmm": ("bias", "input", "weight"),
}
_TYPES = {name: types for names, types in _ARGUMENTS.items() for name in names.split()}


def write_triosim(trace: Trace, folder: str | Path) -> None:
    """Write a trace as TrioSim reads it.

    ``trace``: any trace with device times, imported or captured. ``folder``: where ``trace.csv`` and ``tensor.csv`` go;
    each appears complete or not at all. Raises TraceError when the trace holds no times.

    Times are whole microseconds, rounded so that the sum over the operators is kept: the end of each operator is
    rounded, not its duration. Where the trace does not know an operator's first kernel start and last kernel end
    (``facts.span_ns``), both time columns are equal. Where it does not say which operators TrioSim's tensor parallelism
    splits (``facts.tp_flagged``), these are the products and convolutions with a parameter and their gradients.
    """
    if trace.facts.step_time_source == UNTIMED:
        raise TraceError(
            f"the trace of {trace.facts.workload} holds no times, TrioSim needs them",
            fix="export a trace that was captured on a device",
        )
    rows = records(trace.operators)
    tensors = records(trace.tensors, "shape", "elem_bytes", "storage_id", "category")
    folder = Path(folder)
    _write(folder / TENSOR_FILE, TENSOR_COLUMNS, _tensor_lines(rows, tensors))
    _write(folder / TRACE_FILE, TRACE_COLUMNS, _operator_lines(trace, rows, tensors))


def _write(path: Path, columns: Mapping[str, CsvColumn], lines: Iterable[Sequence[Any]]) -> None:
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([column.titles[0] for column in columns.values()])
        writer.writerows(lines)


def _operator_lines(trace: Trace, rows: list[dict[str, Any]], tensors: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """Yield the rows of ``trace.csv``."""
    elements = [_count(tensor) for tensor in tensors]
    busy_us = _to_whole_us([row["device_ns"] for row in rows])
    spans = trace.facts.span_ns or []
    known = len(spans) == len(rows)
    span_us = _to_whole_us(spans) if known else busy_us
    flagged = _find_flagged(trace, rows, tensors)
    for row, busy, span in zip(rows, busy_us, span_us, strict=True):
        ids = [row["input_ids"], row["output_ids"]]
        yield [
            row["op_id"] + 1,
            row["name"],
            *(_list(i + 1 for i in one) for one in ids),
            max(busy, span),
            busy,
            *(_list(elements[i] for i in one) for one in ids),
            _DEVICE,
            row["phase"],
            int(row["op_id"] in flagged),
        ]


def _tensor_lines(rows: list[dict[str, Any]], tensors: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """Yield the rows of ``tensor.csv``: the tensors of every operator, inputs before outputs."""
    index = 0
    for row in rows:
        uses = [
            *((i, _name_input(row, k, tensors[i])) for k, i in enumerate(row["input_ids"])),
            *((i, "output") for i in row["output_ids"]),
        ]
        for i, kind in uses:
            tensor = tensors[i]
            defined = tensor["elem_bytes"] > 0
            yield [
                index,
                i + 1,
                f"[{', '.join(map(str, tensor['shape']))}]" if defined else "[]",
                _count(tensor),
                tensor["elem_bytes"],
                kind,
                # Tensors and their memory are numbered apart, as in the published files.
                len(tensors) + tensor["storage_id"] + 1 if defined else 0,
                _DEVICE,
            ]
            index += 1


def _name_input(row: dict[str, Any], place: int, tensor: dict[str, Any]) -> str:
    """Return the type of an operator's input."""
    types = _TYPES.get(row["name"])
    if types:
        return types[min(place, len(types) - 1)]
    if row["phase"] == "backward" and place == 0:
        return "grad_output"
    if tensor["category"] == "parameter" and row["phase"] != "optimizer":
        return "weight" if len(tensor["shape"]) > 1 else "bias"
    return "input"


def _find_flagged(trace: Trace, rows: list[dict[str, Any]], tensors: list[dict[str, Any]]) -> set[int]:
    """Return the operators that TrioSim's tensor parallelism splits."""
    if trace.facts.tp_flagged is not None:
        return set(trace.facts.tp_flagged)
    flagged: set[int] = set()
    for row in rows:
        reads = any(tensors[i]["category"] == "parameter" for i in row["input_ids"])
        differentiates = row["phase"] == "backward" and row["forward_op_id"] in flagged
        if row["flop"] > 0 and (differentiates or (row["phase"] == "forward" and reads)):
            flagged.add(row["op_id"])
    return flagged


def _count(tensor: dict[str, Any]) -> int:
    """Return a tensor's elements; an undefined one, without a type, has none."""
    return prod(tensor["shape"]) if tensor["elem_bytes"] else 0


def _list(numbers: Iterable[int]) -> str:
    return f"[{'; '.join(map(str, numbers))}]"


def _to_whole_us(times_ns: Iterable[int]) -> list[int]:
    """Return durations in whole microseconds whose running sums are the rounded running sums."""
    rounded, end_ns, before = [], 0, 0
    for time_ns in times_ns:
        end_ns += int(time_ns)
        after = (end_ns + 500) // 1000
        rounded.append(after - before)
        before = after
    return rounded
