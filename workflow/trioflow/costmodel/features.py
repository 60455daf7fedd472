"""What decides an operator's cost, its class, its phase and three sizes, and what a model of it must offer.

An operator belongs to a class by its own name (`classify`), and a convolution also by its shapes, never by the workload
that it was traced in. Its sizes are FLOPs, bytes read and bytes written. `OperatorModel` is what every model of operator
cost answers; `find_operator_model` finds how models of other packages are fitted. Their files are JSON, never code, and
records as their entries are (`read_model_file`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from trioflow.base.columns import Columns, Texts, as_columns
from trioflow.base.errors import InputError, TableError
from trioflow.base.plugins import load_plugin
from trioflow.base.provenance import PACKAGE, read_json, read_own_table
from trioflow.tables import NULLABLE
from trioflow.trace.facts import Facts

if TYPE_CHECKING:
    import pandas as pd

SHIPPED_MODELS = PACKAGE / "data" / "cost_models"
"""A folder for each platform or device."""
Parsed = TypeVar("Parsed")


def read_model_file(
    path: str | Path,
    kind: str,
    what: str,
    known: Mapping[str, Any],
    parse: Callable[[dict[str, Any]], Parsed] | type[Parsed],
) -> Parsed:
    """Read a model file by its ``kind`` (``what`` in words), with entries ``known`` that must agree.

    ``parse``: makes the model of the file's content, or the record that it is.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise InputError(f"not {what}", file=path, fix="give a file that a fit wrote")
    if any(content.get(key) != value for key, value in known.items()):
        stated = " with ".join(f"{key} {content.get(key)!r}" for key in known)
        raise InputError(
            f"{stated} is not known",
            file=path,
            place=next(iter(known)),
            fix="fit the model again with this version of trioflow",
        )
    try:
        return from_json(content, parse) if isinstance(parse, type) else parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"incomplete or damaged ({error!r})", file=path, fix="fit the model again") from None


def to_json(record: Any) -> Any:
    """Return a record, a dataclass or a mapping of them, as plain values; arrays and tuples become lists."""
    return msgspec.to_builtins(record, enc_hook=lambda value: value.tolist())


def from_json(content: Any, kind: type[Parsed]) -> Parsed:
    """Return plain values as a record; ValueError names the place of what does not fit. Lists become arrays where due."""
    return msgspec.convert(content, kind, dec_hook=lambda _, value: np.asarray(value, np.float64))


def rows_to_json(records: Mapping[Any, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return records by keys of several parts as rows with these under ``names``, in order of the keys."""
    return [{**dict(zip(names, key, strict=True)), **to_json(records[key])} for key in sorted(records)]


def rows_from_json(rows: Iterable[Mapping[str, Any]], names: Sequence[str], kind: type[Parsed]) -> dict[Any, Parsed]:
    """Read what :func:`rows_to_json` gave."""
    return {tuple(row[name] for name in names): from_json(row, kind) for row in rows}


Table = TypeVar("Table", "pd.DataFrame", Columns)
Floats = npt.NDArray[np.float64]

FEATURES = ("flop", "read_bytes", "write_bytes")
"""Columns of the operator table that a regression may use."""

WORK = (*FEATURES, *(f"batch_{name}" for name in FEATURES))
"""All columns of an operator's work, the parts that grow with the batch last."""

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


def resize_batch(operators: Table, factor: float) -> Table:
    """Return the operators with the FLOPs and bytes of ``factor`` times the batch; fixed parts stay."""
    changed = {}
    for column in FEATURES:
        size, growing = (np.asarray(operators[name], np.int64) for name in (column, f"batch_{column}"))
        changed[column] = (size - growing + growing * factor).round().astype(np.int64)
        changed[f"batch_{column}"] = (growing * factor).round().astype(np.int64)
    return operators.assign(**changed)


class Rows(Protocol):
    """A table as what predicts reads it: columns by name, of `Columns` or of a frame."""

    def __getitem__(self, name: str, /) -> Any:
        """Return a column."""

    def __contains__(self, name: object, /) -> bool:
        """Return whether there is a column."""


@lru_cache(maxsize=4096)
def class_of_name(name: str) -> str:
    """Return the class that an ATen name alone says, namespace, overload and in-place underscore or not.

    transcendental is element-wise too, but bound by arithmetic; reshape is a view or a copy, the
    name does not say; of a view no data moves; optimizer is one call over a list of tensors.
    """
    base, backward = plain_operator_name(name)
    operator_class = _class_of_base(base)
    if backward:
        # A view's gradient is written into a zeroed tensor of the full size.
        return {"convolution": "convolution_backward", "view": "memory"}.get(operator_class, operator_class)
    return "convolution_backward" if operator_class == "convolution" and "_backward" in base else operator_class


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


def classify(operators: Rows) -> list[str]:
    """Return the class of every operator; convolutions with ``/`` and their kind, where shapes are known.

    Raises TableError when the column ``name`` is missing.
    """
    if "name" not in operators:
        raise TableError("operator table has no column name", fix="give the columns of operators")
    classes = [class_of_name(str(name)) for name in operators["name"].tolist()]
    convolutions = [row for row, name in enumerate(classes) if name in _WEIGHT_INPUT]
    if convolutions and "input_shapes" in operators:
        inputs = operators["input_shapes"].tolist()
        outputs = operators["output_shapes"].tolist() if "output_shapes" in operators else [None] * len(classes)
        for row in convolutions:
            classes[row] = _detailed(classes[row], read_shapes(inputs[row]), read_shapes(outputs[row]))
    return classes


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


def feature_matrix(operators: Rows) -> Floats:
    """Return flop, read_bytes and write_bytes of every operator, shape (operators, 3).

    Raises TableError with the row, when a value is missing, negative or not a number.
    """
    missing = [name for name in FEATURES if name not in operators]
    if missing:
        raise TableError(f"operator table has no column {', '.join(missing)}")
    matrix = np.column_stack([read_numbers(operators[name]) for name in FEATURES])
    wrong = np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))
    if len(wrong):
        row, column = (int(value) for value in wrong[0])
        raise TableError(
            f"{operators[FEATURES[column]].tolist()[row]} is negative or not a number",
            place=f"row {row}, column {FEATURES[column]}",
            fix="count flop and bytes again with this version of trioflow",
        )
    return matrix


def read_numbers(column: Any) -> Floats:
    """Return a column's numbers, NaN for what is none."""
    if isinstance(column, Texts):
        column = column.tolist()
    try:
        return np.asarray(column, np.float64)
    except (TypeError, ValueError):
        import pandas as pd

        return pd.to_numeric(pd.Series(column), errors="coerce").to_numpy(np.float64, na_value=np.nan)


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
    True``: it is then asked once for equal operators, ``choices.PLACE`` left aside (:func:`looks_at_rows`).
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

    @property
    def device_name(self) -> str:
        """Name of the GPU or processor, as its driver reports it."""

    @property
    def method(self) -> str:
        """Name of what was fitted, for a reader."""

    def price(self, operators: Columns) -> Columns:
        """Predict operators."""

    def reprice(self, operators: Columns, target: Columns) -> Columns:
        """Rescale operators."""

    def row_times(self, rows: Rows) -> Floats:
        """Predict the time [s] of rows as ``curves.sized_rows`` returns them."""


def looks_at_rows(model: OperatorModel) -> bool:
    """Return whether a model declares that it looks at each operator by itself."""
    return bool(getattr(model, "by_row", False))


class RowCostModel:
    """A model of trioflow's own, which looks at each row by itself: of frames it answers frames, of columns columns."""

    @property
    def by_row(self) -> bool:
        """Whether an answer depends on an operator's name, shapes and sizes alone."""
        return True

    def predict(self, operators: Table) -> Table:
        """Predict operators from their names, shapes and sizes alone; times are not read.

        Raises TableError when a column is missing or a size out of range.
        """
        return as_given(self.price(as_columns(operators)), operators)

    def rescale(self, operators: Table, target: Table) -> Table:
        """Predict recorded operators at the ``flop`` and bytes of ``target``, which has the same rows.

        Raises TableError when a column, value or row does not fit.
        """
        if not isinstance(operators, Columns) and not operators.index.equals(target.index):
            raise TableError(
                "recorded and target operators have different rows",
                fix="give the same operators in the same order, with other sizes",
            )
        return as_given(self.reprice(as_columns(operators), as_columns(target)), operators)

    def price(self, operators: Columns) -> Columns:
        """Predict operators; see `OperatorModel`."""
        raise NotImplementedError

    def reprice(self, operators: Columns, target: Columns) -> Columns:
        """Rescale operators; see `OperatorModel`."""
        raise NotImplementedError


def as_given(prices: Columns, operators: Table) -> Table:
    """Return a prediction as columns, or as a frame with the rows of the frame that was given."""
    return prices if isinstance(operators, Columns) else prices.to_frame().set_axis(operators.index)


def price_columns(model: OperatorModel, operators: Columns) -> Columns:
    """Return what ``model.predict`` says of operators; a model of another package is given a frame."""
    if isinstance(model, RowCostModel):
        return model.price(operators)
    return _read_prices(model.predict(operators.to_frame(NULLABLE["operators"])))


def reprice_columns(model: OperatorModel, operators: Columns, target: Columns) -> Columns:
    """Return what ``model.rescale`` says of operators, as `price_columns`."""
    if isinstance(model, RowCostModel):
        return model.reprice(operators, target)
    return _read_prices(model.rescale(*(table.to_frame(NULLABLE["operators"]) for table in (operators, target))))


def _read_prices(table: Table) -> Columns:
    """Return what a model of another package says; its ``extrapolated`` may be of any type that is true or false."""
    prices = as_columns(table)
    return prices.assign(extrapolated=np.asarray(prices["extrapolated"], dtype=bool))


class OperatorModelFit(Protocol):
    """A fit function as registered under ``trioflow.operator_models``."""

    def __call__(self, traces: Sequence[TraceLike]) -> tuple[FittedModel, pd.DataFrame]:
        """Fit traces; return the model and a table of ``tables.OPERATOR_FIT``."""


def find_operator_model(method: str, known: Iterable[str] = ()) -> OperatorModelFit:
    """Return the fit function registered under a name; InputError where none or several are, or it cannot be loaded."""
    return load_plugin(ENTRY_POINTS, method, known, what="operator model")
