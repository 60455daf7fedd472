"""Whether a trace, edited or not, agrees with itself: its tables with one another, and its facts with its tables.

Each check names what must hold and finds the first row where it does not, over whole columns, so
that loading stays fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.errors import TraceError
from trioflow.trace.facts import Entry, Facts

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


class _Columns:
    """The columns of a trace as the checks take them; each is made once, when asked for."""

    def __init__(self, trace: _Trace) -> None:
        self.operators, self.tensors, self.facts = trace.operators, trace.tensors, trace.facts
        self.count, self.batch = len(trace.operators), trace.facts.batch

    def numbers(self, name: str, absent: int = -1, table: str = "operators") -> NDArray[np.int64]:
        """Return a whole-numbered column; what is missing as another number."""
        column = getattr(self, table)[name]
        return np.asarray(column.fillna(absent), dtype=np.int64)

    @cached_property
    def phases(self) -> NDArray[np.str_]:
        """Each operator's phase."""
        return np.asarray(self.operators["phase"], dtype=str)

    @cached_property
    def tensor_bytes(self) -> list[int]:
        """Each tensor's size [bytes]."""
        pairs = zip(self.tensors["shape"], self.tensors["elem_bytes"], strict=True)
        return [prod(shape) * int(size) for shape, size in pairs]

    @cached_property
    def gradients(self) -> Sequence[Entry]:
        """The facts of the gradients."""
        return self.facts.gradients


Found = tuple[str, str, str]
"""Where something does not hold (file, place) and what it is."""


def _row(wrong: NDArray[np.bool_], column: str, problem: Callable[[int], str]) -> Found | None:
    """Return the first row of the operators of which something is wrong."""
    row = int(np.argmax(wrong)) if len(wrong) else 0
    if not len(wrong) or not wrong[row]:
        return None
    return "operators", f"row {row}, column {column}", problem(row)


def _phases_are_named(c: _Columns) -> Found | None:
    return _row(c.phases == "", "phase", lambda row: "the phase is empty")


def _counts_agree(c: _Columns) -> Found | None:
    flop = sum(c.operators["flop"].tolist())  # of Python: a million tokens overflow 64 bits
    for name, said, found in (
        ("operators", c.facts.operators, c.count),
        ("flop", c.facts.flop, flop),
    ):
        if isinstance(said, int) and said != found:
            return "facts", name, f"{said} is said, the operators have {found}"
    return None


def _works_are_possible(c: _Columns) -> Found | None:
    for name in ("flop", "read_bytes", "write_bytes", "device_ns", "cpu_ns"):
        numbers = c.operators[name].tolist()  # of Python: their sum cannot overflow
        if (max(numbers, default=0) if name == "flop" else sum(numbers)) >= MOST_WORK:
            row = max(range(len(numbers)), key=numbers.__getitem__)
            problem = (
                f"{numbers[row]} of {c.operators['name'].iloc[row]!r:.60} is more than any step"
            )
            return "operators", f"row {row}, column {name}", problem
    return None


def _parts_fit_into_wholes(c: _Columns) -> Found | None:
    for name in ("flop", "read_bytes", "write_bytes"):
        whole, part = c.numbers(name), c.numbers(f"batch_{name}")
        found = _row(
            part > whole,
            f"batch_{name}",
            lambda row, p=part, w=whole: f"{p[row]} grow with the batch, of {w[row]} in all",  # type: ignore[misc]
        )
        if found:
            return found
    return None


def _forward_operators_come_before(c: _Columns) -> Found | None:
    forward = c.numbers("forward_op_id")
    outside = (forward < -1) | (forward >= np.arange(c.count))
    return _row(
        outside, "forward_op_id", lambda row: f"{forward[row]} is not an operator before it"
    )


def _tensors_are_possible(c: _Columns) -> Found | None:
    """Take a type's size of an element from its first row; an undefined tensor has size 0."""
    sizes: dict[str, int] = {}
    columns = (c.tensors[name].tolist() for name in ("shape", "elem_bytes", "dtype"))
    for row, (shape, size, kind) in enumerate(zip(*columns, strict=True)):
        known = sizes.setdefault(kind, size)
        if size < 0 or size != known:
            problem = f"{size} bytes an element of {kind!r:.40}, and {known} in another row"
            problem = f"{size} is not an element size" if size < 0 else problem
            return "tensors", f"row {row}, column elem_bytes", problem
        if len(shape) and (min(shape) < 0 or prod(shape) > MOST_ELEMENTS):
            return "tensors", f"row {row}, column shape", f"{list(shape)!r:.60} is not a shape"
    return None


def _tensors_name_operators(c: _Columns) -> Found | None:
    for name in ("producer_op_id", "last_op_id"):
        wrong = (found := c.numbers(name, table="tensors")) >= c.count
        wrong |= found < -1
        if wrong.any():
            row = int(np.argmax(wrong))
            problem = f"operator {found[row]} does not exist"
            return "tensors", f"row {row}, column {name}", problem
    return None


def _operators_name_tensors(c: _Columns) -> Found | None:
    shapes = [list(shape) for shape in c.tensors["shape"]]
    for side in ("input", "output"):
        ids, recorded = c.operators[f"{side}_ids"], c.operators[f"{side}_shapes"]
        flat = list(chain.from_iterable(ids))
        if flat and not 0 <= min(flat) <= max(flat) < len(shapes):
            row = next(r for r, one in enumerate(ids) if any(not 0 <= i < len(shapes) for i in one))
            return "operators", f"row {row}, column {side}_ids", "a tensor does not exist"
        same = list(chain.from_iterable(recorded)) == [shapes[i] for i in flat]
        if flat and not same:
            for row, (one, given) in enumerate(zip(ids, recorded, strict=True)):
                if one and [shapes[i] for i in one] != [list(shape) for shape in given]:
                    problem = f"{given!r:.60} are not the shapes of these tensors"
                    return "operators", f"row {row}, column {side}_shapes", problem
    return None


def _sizes_grow_with_the_batch(c: _Columns) -> Found | None:
    dims, recorded = c.numbers("batch_dim"), c.operators["output_shapes"].tolist()
    for row in np.flatnonzero(dims >= 0).tolist():
        shapes, dim = recorded[row], int(dims[row])
        if not shapes or dim >= len(shapes[0]) or shapes[0][dim] % c.batch:
            problem = f"dimension {dim} of {shapes!r:.60} is not a multiple of the batch, {c.batch}"
            return "operators", f"row {row}, column batch_dim", problem
    return None


def _inputs_have_the_batch(c: _Columns) -> Found | None:
    """Look for the batch among the inputs' sizes, where all growth with it begins."""
    inputs = c.tensors["shape"][c.tensors["category"] == "input"]
    grows = bool(c.operators["batch_read_bytes"].any())
    if grows and len(inputs) and not any(c.batch in shape for shape in inputs):
        return "facts", "batch", f"no input of the step has {c.batch} samples"
    return None


def _named_tensors_are_possible(c: _Columns) -> Found | None:
    for key, entries in (("parameters", c.facts.parameters), ("buffers", c.facts.buffers)):
        for row, one in enumerate(entries or []):
            size, shape = one.get("elem_bytes", 1), one.get("shape", [])
            if not isinstance(size, int) or size < 1:
                return "facts", f"{key}[{row}].elem_bytes", f"{size!r:.40} is not an element size"
            if not all(isinstance(part, int) and part >= 0 for part in shape):
                return "facts", f"{key}[{row}].shape", f"{shape!r:.60} is not a shape"
    return None


def _gradients_are_of_the_step(c: _Columns) -> Found | None:
    for row, one in enumerate(c.gradients):
        place, ready = f"gradients[{row}]", one["ready_after_op_id"]
        if not 0 <= ready < c.count:
            problem = f"operator {ready} does not exist"
            return "facts", f"{place}.ready_after_op_id", problem
        if one["size_bytes"] < 1:
            return "facts", f"{place}.size_bytes", f"{one['size_bytes']} is not a size"
    return None


def _gradients_stand_once(c: _Columns) -> Found | None:
    for key in ("name", "parameter_storage_id"):
        known = Counter(one[key] for one in c.gradients if one.get(key) is not None)
        twice = [value for value, count in known.items() if count > 1]
        if twice:
            row = [one.get(key) for one in c.gradients].index(twice[0])
            return "facts", f"gradients[{row}].{key}", f"{twice[0]!r:.60} stands twice"
    return None


def _gradients_are_as_large_as_parameters(c: _Columns) -> Found | None:
    shapes: dict[str, int] = {
        one["name"]: prod(one["shape"]) * int(one["elem_bytes"])
        for one in c.facts.parameters or []
        if isinstance(one.get("elem_bytes"), int)
    }
    for row, one in enumerate(c.gradients):
        due = shapes.get(one["name"])
        if due is not None and one["size_bytes"] != due:
            problem = f"{one['size_bytes']} bytes, its parameter has {due}"
            return "facts", f"gradients[{row}].size_bytes", problem
    return None


def _works_fit_to_tensors(c: _Columns) -> Found | None:
    """Compare an operator's bytes with all that its tensors hold; one in place may write its inputs."""
    sizes, inputs = c.tensor_bytes, c.operators["input_ids"].tolist()
    in_place = [str(name).endswith("_") for name in c.operators["name"]]
    for name, side in (("read_bytes", "input_ids"), ("write_bytes", "output_ids")):
        moved, ids = c.numbers(name).tolist(), c.operators[side].tolist()
        for row, (said, one) in enumerate(zip(moved, ids, strict=True)):
            writes_more = bool(one) and side == "output_ids" and in_place[row]
            held = sum(sizes[i] for i in ({*one, *inputs[row]} if writes_more else one))
            if one and said > held:
                problem = f"{said}, and its tensors hold {held}"
                return "operators", f"row {row}, column {name}", problem
    return None


def _times_fit_into_the_step(c: _Columns) -> Found | None:
    """Compare sums: a device computes one instant once, and a CPU's step is nothing but operators."""
    source, step_s = (c.facts.step_time_source or "un-profiled"), c.facts.step_time_s
    if source == "none" or not c.count:
        return None
    computes = np.asarray(c.operators["kind"], dtype=str) != "collective"
    device, host = c.numbers("device_ns"), c.numbers("cpu_ns")
    device_s, all_s = float(device[computes].sum()) / 1e9, float((device + host).sum()) / 1e9
    on_cpu, problem = c.facts.device == "cpu", ""
    most = _MOST_OF_BUSY_STEP if on_cpu else _MOST_OF_STEP
    if not device.any():
        problem = f"all are 0 in a step of {step_s} s"
    elif device_s > most * step_s:
        problem = f"the operators take {device_s:.6g} s, more than the step, {step_s} s"
    elif all_s * most < step_s and (source == "busy" or (source == "un-profiled" and on_cpu)):
        problem = f"the operators take {all_s:.6g} s, and nothing else is in the step, {step_s} s"
    return ("operators", "column device_ns", problem) if problem else None


CHECKS: tuple[Callable[[_Columns], Found | None], ...] = (
    _phases_are_named,
    _works_are_possible,
    _counts_agree,
    _parts_fit_into_wholes,
    _forward_operators_come_before,
    _tensors_are_possible,
    _tensors_name_operators,
    _operators_name_tensors,
    _sizes_grow_with_the_batch,
    _inputs_have_the_batch,
    _named_tensors_are_possible,
    _gradients_are_of_the_step,
    _gradients_stand_once,
    _gradients_are_as_large_as_parameters,
    _works_fit_to_tensors,
    _times_fit_into_the_step,
)


def check_trace(trace: _Trace, file: str | Path) -> None:
    """Refuse a trace that contradicts itself; its facts have passed ``store.check_facts``, its tables their schemas.

    Raises TraceError with ``file``, table (or facts), place and what does not hold.
    """
    columns = _Columns(trace)
    for check in CHECKS:
        found = check(columns)
        if found:
            member, place, problem = found
            raise TraceError(problem, file=file, place=f"{member}, {place}", fix=_FIX)
