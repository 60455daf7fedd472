"""What a model of operator cost is asked, an operator's class, phase and sizes, and what it must answer.

What decides an operator's cost: its class, its phase and three sizes.

An operator belongs to a class by its own name, and a convolution also by its shapes, never by the
workload that it was traced in.

What a model of operator cost must offer, and how models of other packages are found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow.base.errors import TableError
from trioflow.base.plugins import load_plugin
from trioflow.base.provenance import read_own_table
from trioflow.trace.facts import Facts

Floats = npt.NDArray[np.float64]

FEATURES = ("flop", "read_bytes", "write_bytes")
"""Columns of the operator table that a regression may use."""

HOST_ONLY = frozenset({"view"})
"""Classes whose operators leave the data where they are; their cost does not follow any size."""

_SMALL_CHANNELS = 4
"""A convolution over this many channels or fewer is an image's first layer."""

_WEIGHT_INPUT = {"convolution": 1, "convolution_backward": 2}
"""Which tensor input of a convolution is its weight."""


def _split_names() -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return whole names and, longest first, beginnings of names, each with its class."""
    whole, beginnings = {}, []
    for row in read_own_table("costmodel/features"):
        for name in row["names"].split():
            if name.endswith("*"):
                beginnings.append((name.removesuffix("*"), row["operator_class"]))
            else:
                whole[name] = row["operator_class"]
    return whole, sorted(beginnings, key=lambda item: (-len(item[0]), item))


_WHOLE, _BEGINNINGS = _split_names()
_AUTOGRAD_NODE = re.compile(r"(?:^|[ :])([A-Z]\w*?)Backward\d*$")
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])")
_BACKWARD_ENDINGS = ("_backward_data", "_backward", "_backward_overrideable")


def resize_batch(operators: pd.DataFrame, factor: float) -> pd.DataFrame:
    """Return a copy of the operators with the FLOPs and bytes of ``factor`` times the batch; fixed parts stay."""
    target = operators.copy()
    for column in FEATURES:
        growing = operators[f"batch_{column}"]
        target[column] = (operators[column] - growing + growing * factor).round().astype("int64")
        target[f"batch_{column}"] = (growing * factor).round().astype("int64")
    return target


@lru_cache(maxsize=4096)
def class_of_name(name: str) -> str:
    """Return the class that an ATen name alone says, namespace, overload and in-place underscore or not.

    transcendental is element-wise too, but bound by arithmetic; reshape is a view or a copy, the
    name does not say; of a view no data moves; optimizer is one call over a list of tensors.
    """
    base, backward = plain_operator_name(name)
    found = _class_of_base(base)
    if backward:
        # A view's gradient is written into a zeroed tensor of the full size.
        return {"convolution": "convolution_backward", "view": "memory"}.get(found, found)
    return "convolution_backward" if found == "convolution" and "_backward" in base else found


@lru_cache(maxsize=4096)
def plain_operator_name(name: str) -> tuple[str, bool]:
    """Return an operator's name without decoration, and whether it is a gradient's.

    Also of an autograd node as profilers show it: ``autograd::engine::evaluate_function: AddmmBackward0`` is ``addmm``,
    True; ``aten::add_`` is ``add``, False.
    """
    node = _AUTOGRAD_NODE.search(name)
    if node:
        return _WORD_START.sub("_", node[1]).lower(), True
    base = name.rpartition("::")[2].partition(".")[0].strip("_")
    for ending in _BACKWARD_ENDINGS:
        if base.endswith(ending):
            return base.removesuffix(ending), True
    return base, False


def _class_of_base(base: str) -> str:
    if base in _WHOLE:
        return _WHOLE[base]
    for beginning, operator_class in _BEGINNINGS:
        if base.startswith(beginning):
            return operator_class
    return "other"


def classify(operators: pd.DataFrame) -> pd.Series[str]:
    """Return the class of every operator, index-aligned; convolutions with ``/`` and their kind, where shapes are known.

    Raises TableError when the column ``name`` is missing.
    """
    if "name" not in operators.columns:
        raise TableError("operator table has no column name", fix="give the columns of operators")
    classes = [class_of_name(str(name)) for name in operators["name"].tolist()]
    if "input_shapes" in operators.columns:
        outputs: Iterable[object] = (
            operators["output_shapes"].tolist() if "output_shapes" in operators.columns else [None] * len(operators)
        )
        for row, (inputs, output) in enumerate(zip(operators["input_shapes"].tolist(), outputs, strict=True)):
            if classes[row] in _WEIGHT_INPUT:
                classes[row] = _detailed(classes[row], read_shapes(inputs), read_shapes(output))
    return pd.Series(classes, index=operators.index, dtype=object, name="operator_class")


def base_class(operator_class: str) -> str:
    """Return the class without the kind of convolution."""
    return operator_class.partition("/")[0]


def read_shapes(value: object) -> tuple[tuple[int, ...], ...]:
    """Read a cell of shapes, nested lists or arrays; empty where it is missing."""
    if value is None or isinstance(value, float):
        return ()
    return tuple(tuple(int(size) for size in shape) for shape in value)  # type: ignore[attr-defined]


def _detailed(operator_class: str, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> str:
    """Append the kind of convolution to the class where the shapes are known."""
    position = _WEIGHT_INPUT[operator_class]
    if len(inputs) <= position or len(inputs[position]) < 3:
        return operator_class
    data = inputs[position - 1]
    if len(data) != len(inputs[position]):
        return operator_class
    result: Sequence[int] = inputs[0] if operator_class == "convolution_backward" else []
    if operator_class == "convolution" and outputs:
        result = outputs[0]
    return f"{operator_class}/{convolution_kind(data, inputs[position], result)}"


def convolution_kind(data: Sequence[int], weight: Sequence[int], result: Sequence[int]) -> str:
    """Return which kernels of a library run a convolution: by shapes of input, weight and result (may be empty).

    One of grouped, small_channels (an image's first layer), pointwise (kernel of one element),
    strided, dense.
    """
    if weight[1] and data[1] != weight[1]:
        return "grouped"
    if weight[1] <= _SMALL_CHANNELS:
        return "small_channels"
    if all(size == 1 for size in weight[2:]):
        return "pointwise"
    # Padding changes an output by a few elements; a stride at least halves it.
    if (
        len(result) == len(data)
        and any(2 * after <= before + 1 for before, after in zip(data[2:], result[2:], strict=True))
        and any(after > 1 for after in result[2:])
    ):
        return "strided"
    return "dense"


def feature_matrix(operators: pd.DataFrame) -> Floats:
    """Return flop, read_bytes and write_bytes of every operator, shape (operators, 3).

    Raises TableError with the row, when a value is missing, negative or not a number.
    """
    missing = [name for name in FEATURES if name not in operators.columns]
    if missing:
        raise TableError(f"operator table has no column {', '.join(missing)}")
    matrix = np.column_stack(
        [pd.to_numeric(operators[name], errors="coerce").to_numpy(np.float64, na_value=np.nan) for name in FEATURES]
    )
    wrong = np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))
    if len(wrong):
        row, column = (int(value) for value in wrong[0])
        raise TableError(
            f"{operators[FEATURES[column]].iloc[row]} is negative or not a number",
            place=f"row {row}, column {FEATURES[column]}",
            fix="count flop and bytes again with this version of trioflow",
        )
    return matrix


ENTRY_POINTS = "trioflow.operator_models"
"""Group under which a package registers a fit function (:class:`OperatorModelFit`) by its name."""


@runtime_checkable
class TraceLike(Protocol):
    """The parts of a trace that a fit reads."""

    @property
    def operators(self) -> pd.DataFrame:
        """Columns of ``tables.OPERATORS``."""

    @property
    def facts(self) -> Facts:
        """What is known of the step: its workload, batch and device at least."""


@runtime_checkable
class OperatorModel(Protocol):
    """A fitted model of operator cost; predictions have ``time_s``, ``low_s``, ``high_s`` (80 %) [s], ``extrapolated``.

    One whose answer depends on an operator's name, shapes and sizes alone may declare ``by_row =
    True``: it is then asked once for equal operators, ``device_times.PLACE`` left aside (:func:`looks_at_rows`).
    """

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Predict operators from their names and sizes alone."""

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Predict recorded operators at other sizes; unchanged sizes keep the recorded time."""

    def step_interval(self, kind: str = "rescale", distance: float | None = None) -> tuple[float, float]:
        """Return the 80 % interval of a step's compute over its prediction; it may widen with the log ``distance``."""

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say in words what the step interval was estimated from."""


@runtime_checkable
class FittedModel(OperatorModel, Protocol):
    """A model that a fit makes."""

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Write the model as JSON."""


@runtime_checkable
class RowModel(OperatorModel, Protocol):
    """A model from which others are derived: it looks at each row by itself."""

    by_row: ClassVar[bool]

    @property
    def device_name(self) -> str:
        """Name of the GPU or processor, as its driver reports it."""

    @property
    def method(self) -> str:
        """Name of what was fitted, for a reader."""

    def row_times(self, rows: pd.DataFrame) -> Floats:
        """Predict the time [s] of rows as ``operators.curves.sized_rows`` returns them."""


def looks_at_rows(model: OperatorModel) -> bool:
    """Return whether a model declares that it looks at each operator by itself."""
    return bool(getattr(model, "by_row", False))


class OperatorModelFit(Protocol):
    """A fit function as registered under ``trioflow.operator_models``."""

    def __call__(self, traces: Sequence[TraceLike]) -> tuple[FittedModel, pd.DataFrame]:
        """Fit traces; return the model and a table of ``tables.OPERATOR_FIT``."""


def find_operator_model(method: str, known: Iterable[str] = ()) -> OperatorModelFit:
    """Return the fit function registered under a name; InputError where none or several are, or it cannot be loaded."""
    return load_plugin(ENTRY_POINTS, method, known, what="operator model")
