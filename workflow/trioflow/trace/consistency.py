"""Whether a trace, edited or not, agrees with itself: its tables with one another, and its facts with its tables.

Each check names what must hold and finds the first row where it does not, over whole columns, so
that loading stays fast.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.errors import TraceError
from trioflow.trace.facts import Facts

_MOST_OF_STEP = 2.0
"""Device time of compute over the step's own time; a device computes one instant once."""
_MOST_OF_BUSY_STEP = 10.0
"""The same on a processor, either way: other programs take turns there, in the step or in its profile."""
MOST_WORK = 1 << 60
"""Operations of one operator, bytes or nanoseconds of all; more than any step has."""
MOST_ELEMENTS = 1 << 40
"""Elements of one tensor: a trillion, more than any device holds."""
_FIX = "import or capture it again, or undo the edit"


class _Trace(Protocol):
    """`trace.store.Trace`, which uses this module."""

    operators: pd.DataFrame
    tensors: pd.DataFrame
    facts: Facts


def tensor_bytes(trace: _Trace) -> list[int]:
    """Return the size of every tensor of a trace, by ``tensor_id`` [bytes]."""
    columns = (trace.tensors[name].tolist() for name in ("shape", "elem_bytes"))
    return [prod(shape) * int(size) for shape, size in zip(*columns, strict=True)]


class _Columns:
    """The columns of a trace as the checks take them; each is made once, when asked for."""

    def __init__(self, trace: _Trace) -> None:
        self.operators, self.tensors, self.facts = trace.operators, trace.tensors, trace.facts
        self.count, self.batch = len(trace.operators), trace.facts.batch

    def numbers(self, name: str, absent: int = -1, table: str = "operators") -> NDArray[np.int64]:
        """Return a whole-numbered column; what is missing as another number."""
        column = getattr(self, table)[name]
        return np.asarray(column.fillna(absent), dtype=np.int64)


Found = tuple[str, str, str]
"""Where something does not hold (file, place) and what it is."""


def _rows(wrong: NDArray[np.bool_], column: str, problem: Callable[[int], str]) -> Iterator[Found]:
    """Yield the rows of the operators of which something is wrong."""
    for row in np.flatnonzero(wrong).tolist():
        yield "operators", f"row {row}, column {column}", problem(row)


def _check_works(c: _Columns) -> Iterator[Found]:
    """Check that phases are named, work is possible and adds up, and parts fit into wholes."""
    phases = np.asarray(c.operators["phase"], dtype=str)
    yield from _rows(phases == "", "phase", lambda row: "the phase is empty")
    for name in ("flop", "read_bytes", "write_bytes", "device_ns", "cpu_ns"):
        numbers = c.operators[name].tolist()  # of Python: their sum cannot overflow
        if (max(numbers, default=0) if name == "flop" else sum(numbers)) >= MOST_WORK:
            row = max(range(len(numbers)), key=numbers.__getitem__)
            what = f"{numbers[row]} of {c.operators['name'].iloc[row]!r:.60}"
            yield "operators", f"row {row}, column {name}", f"{what} is more than any step"
    flop = sum(c.operators["flop"].tolist())  # of Python: a million tokens overflow 64 bits
    counts = (("operators", c.facts.operators, c.count), ("flop", c.facts.flop, flop))
    for name, stated, counted in counts:
        if isinstance(stated, int) and stated != counted:
            yield "facts", name, f"{stated} is stated, but the operators have {counted}"
    for name in ("flop", "read_bytes", "write_bytes"):
        whole, part = c.numbers(name), c.numbers(f"batch_{name}")
        for row in np.flatnonzero(part > whole).tolist():
            problem = f"{part[row]} grow with the batch, of {whole[row]} in all"
            yield "operators", f"row {row}, column batch_{name}", problem


def _check_references(c: _Columns) -> Iterator[Found]:
    """Check that operators come after those that they differentiate, and tensors name operators that are there."""
    forward = c.numbers("forward_op_id")
    outside = (forward < -1) | (forward >= np.arange(c.count))
    yield from _rows(outside, "forward_op_id", lambda row: f"{forward[row]} is not an operator before it")
    yield from _check_tensors(c)
    for name in ("producer_op_id", "last_op_id"):
        numbers = c.numbers(name, table="tensors")
        for row in np.flatnonzero((numbers >= c.count) | (numbers < -1)).tolist():
            problem = f"operator {numbers[row]} does not exist"
            yield "tensors", f"row {row}, column {name}", problem


def _check_tensors(c: _Columns) -> Iterator[Found]:
    """Take a type's size of an element from its first row; an undefined tensor has size 0."""
    sizes: dict[str, int] = {}
    columns = (c.tensors[name].tolist() for name in ("shape", "elem_bytes", "dtype"))
    for row, (shape, size, kind) in enumerate(zip(*columns, strict=True)):
        known = sizes.setdefault(kind, size)
        if size < 0 or size != known:
            problem = f"{size} bytes an element of {kind!r:.40}, and {known} in another row"
            problem = f"{size} is not an element size" if size < 0 else problem
            yield "tensors", f"row {row}, column elem_bytes", problem
        if len(shape) and (min(shape) < 0 or prod(shape) > MOST_ELEMENTS):
            yield "tensors", f"row {row}, column shape", f"{list(shape)!r:.60} is not a shape"


def _check_shapes(c: _Columns) -> Iterator[Found]:
    """Compare the shapes that operators recorded with those of the tensors that they name."""
    shapes = [list(shape) for shape in c.tensors["shape"]]
    for side in ("input", "output"):
        ids, recorded = c.operators[f"{side}_ids"], c.operators[f"{side}_shapes"]
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


def _check_batch(c: _Columns) -> Iterator[Found]:
    """Look for the batch among the sizes that grow with it, and the inputs', where all growth begins."""
    dims, recorded = c.numbers("batch_dim"), c.operators["output_shapes"].tolist()
    for row in np.flatnonzero(dims >= 0).tolist():
        shapes, dim = recorded[row], int(dims[row])
        if not shapes or dim >= len(shapes[0]) or shapes[0][dim] % c.batch:
            problem = f"dimension {dim} of {shapes!r:.60} is not a multiple of the batch, {c.batch}"
            yield "operators", f"row {row}, column batch_dim", problem
    inputs = c.tensors["shape"][c.tensors["category"] == "input"]
    grows = bool(c.operators["batch_read_bytes"].any())
    if grows and len(inputs) and not any(c.batch in shape for shape in inputs):
        yield "facts", "batch", f"no input of the step has {c.batch} samples"


def _check_parameters(c: _Columns) -> Iterator[Found]:
    for key, entries in (("parameters", c.facts.parameters), ("buffers", c.facts.buffers)):
        for row, one in enumerate(entries or []):
            size, shape = one.get("elem_bytes", 1), one.get("shape", [])
            if not isinstance(size, int) or size < 1:
                yield "facts", f"{key}[{row}].elem_bytes", f"{size!r:.40} is not an element size"
            if not all(isinstance(part, int) and part >= 0 for part in shape):
                yield "facts", f"{key}[{row}].shape", f"{shape!r:.60} is not a shape"


def _check_gradients(c: _Columns) -> Iterator[Found]:
    """Check that gradients are of the step, stand once, and are as large as their parameters."""
    for row, one in enumerate(c.facts.gradients):
        ready = one["ready_after_op_id"]
        if not 0 <= ready < c.count:
            place = f"gradients[{row}].ready_after_op_id"
            yield "facts", place, f"operator {ready} does not exist"
        if one["size_bytes"] < 1:
            yield "facts", f"gradients[{row}].size_bytes", f"{one['size_bytes']} is not a size"
    for key in ("name", "parameter_storage_id"):
        values = [one.get(key) for one in c.facts.gradients]
        for value, count in Counter(values).items():
            if count > 1 and value is not None:
                place = f"gradients[{values.index(value)}].{key}"
                yield "facts", place, f"{value!r:.60} stands twice"
    due_bytes: dict[str, int] = {
        one["name"]: prod(one["shape"]) * int(one["elem_bytes"])
        for one in c.facts.parameters or []
        if isinstance(one.get("elem_bytes"), int)
    }
    for row, one in enumerate(c.facts.gradients):
        size, due = one["size_bytes"], due_bytes.get(one["name"])
        if due is not None and size != due:
            place = f"gradients[{row}].size_bytes"
            yield "facts", place, f"{size} bytes, its parameter has {due}"


def _check_bytes(c: _Columns) -> Iterator[Found]:
    """Compare an operator's bytes with all that its tensors hold; one in place may write its inputs."""
    sizes, inputs = tensor_bytes(c), c.operators["input_ids"].tolist()
    in_place = [str(name).endswith("_") for name in c.operators["name"]]
    for name, side in (("read_bytes", "input_ids"), ("write_bytes", "output_ids")):
        moved, ids = c.numbers(name).tolist(), c.operators[side].tolist()
        for row, (stated_bytes, one) in enumerate(zip(moved, ids, strict=True)):
            writes_more = bool(one) and side == "output_ids" and in_place[row]
            size_bytes = sum(sizes[i] for i in ({*one, *inputs[row]} if writes_more else one))
            if one and stated_bytes > size_bytes:
                problem = f"{stated_bytes} bytes, but its tensors hold {size_bytes} bytes"
                yield "operators", f"row {row}, column {name}", problem


def _check_times(c: _Columns) -> Iterator[Found]:
    """Compare sums: a device computes one instant once, and a CPU's step is nothing but operators."""
    source, step_s = (c.facts.step_time_source or "un-profiled"), c.facts.step_time_s
    if source == "none" or not c.count:
        return
    computes = np.asarray(c.operators["kind"], dtype=str) != "collective"
    device, host = c.numbers("device_ns"), c.numbers("cpu_ns")
    device_s, all_s = float(device[computes].sum()) / 1e9, float((device + host).sum()) / 1e9
    on_cpu, place = c.facts.device == "cpu", "column device_ns"
    most = _MOST_OF_BUSY_STEP if on_cpu else _MOST_OF_STEP
    if not device.any():
        yield "operators", place, f"all are 0 in a step of {step_s} s"
    if device_s > most * step_s:
        problem = f"the operators take {device_s:.6g} s, more than the step, {step_s} s"
        yield "operators", place, problem
    if all_s * most < step_s and (source == "busy" or (source == "un-profiled" and on_cpu)):
        problem = f"the operators take {all_s:.6g} s, and nothing else is in the step, {step_s} s"
        yield "operators", place, problem


CHECKS: tuple[Callable[[_Columns], Iterator[Found]], ...] = (
    _check_works,
    _check_references,
    _check_shapes,
    _check_batch,
    _check_parameters,
    _check_gradients,
    _check_bytes,
    _check_times,
)
"""In this order: each relies on what those before it found to hold."""


def check_trace(trace: _Trace, file: str | Path) -> None:
    """Refuse a trace that contradicts itself; its facts have passed ``store.check_facts``, its tables their schemas.

    Raises TraceError with ``file``, table (or facts), place and what does not hold.
    """
    columns = _Columns(trace)
    for member, place, problem in chain.from_iterable(check(columns) for check in CHECKS):
        raise TraceError(problem, file=file, place=f"{member}, {place}", fix=_FIX)
