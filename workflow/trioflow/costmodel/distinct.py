"""Operators that did the same: a model that looks at rows is asked once for all that are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.costmodel.interface import OperatorModel, looks_at_rows

PLACE = (
    "op_id", "module", "start_ns", "cpu_ns", "input_ids", "output_ids", "sequence_number",
    "forward_op_id",
)  # fmt: skip
"""Columns that say where and when an operator ran, and not what it did."""
_FEW = 64
"""Operators from which on looking for equal ones takes less than asking for all."""


def predict_distinct(model: OperatorModel, operators: pd.DataFrame) -> pd.DataFrame:
    """Return what ``model.predict`` says of operators."""
    if not looks_at_rows(model) or len(operators) < _FEW:
        return model.predict(operators)
    first, place = find_distinct(operators)
    return model.predict(operators.iloc[first]).iloc[place].set_axis(operators.index)


def rescale_distinct(
    model: OperatorModel, operators: pd.DataFrame, target: pd.DataFrame
) -> pd.DataFrame:
    """Return what ``model.rescale`` says of recorded operators at other sizes."""
    if not looks_at_rows(model) or len(operators) < _FEW:
        return model.rescale(operators, target)
    first, place = find_distinct(operators, target)
    found = model.rescale(operators.iloc[first], target.iloc[first])
    return found.iloc[place].set_axis(operators.index)


def find_distinct(*frames: pd.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first of all equal rows, and for each row which of these it equals [operators].

    ``frames``: tables of as many operators; rows are equal where they are in each of them.
    """
    numbers = number_rows(*frames)
    return np.unique(numbers, return_index=True)[1].astype(np.int64), numbers


def number_rows(*frames: pd.DataFrame) -> NDArray[np.int64]:
    """Return a number for each row, equal for rows that say that the same was done, from 0 in their order [operators]."""
    numbers = np.zeros(len(frames[0]), dtype=np.int64)
    known: dict[str, Any] = {}
    for frame in frames:
        for name in frame.columns:
            if name in PLACE or (name in known and _is_same(known[name], frame[name])):
                continue
            known[name] = frame[name]
            numbers = _join(numbers, _number_cells(frame[name]))
    return numbers


def _join(numbers: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    both = numbers * (int(others.max(initial=0)) + 1) + others
    joined: NDArray[np.int64] = pd.factorize(both)[0].astype(np.int64)
    return joined


def _number_cells(column: pd.Series[Any]) -> NDArray[np.int64]:
    """Return equal numbers for equal cells; lists are compared as text."""
    cells: Any = column
    if column.dtype == object:
        cells = np.array([str(cell) for cell in column.tolist()], dtype=object)
    numbers: NDArray[np.int64] = pd.factorize(cells, use_na_sentinel=False)[0].astype(np.int64)
    return numbers


def _is_same(one: pd.Series[Any], other: pd.Series[Any]) -> bool:
    """Return whether two columns are plainly equal: lists where they are the same objects."""
    if one.dtype == object:
        pairs = zip(one.tolist(), other.tolist(), strict=True)
        return all(a is b for a, b in pairs)
    return bool(np.array_equal(one.array, other.array)) if one is not other else True
