"""An operator model that answers the same question only once."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.costmodel.interface import OperatorModel, looks_at_rows

_PLACE = (
    "op_id", "module", "start_ns", "cpu_ns", "input_ids", "output_ids", "sequence_number",
    "forward_op_id",
)  # fmt: skip
"""Columns that say where and when an operator ran, and not what it did."""


class MemoModel:
    """Remembers the predictions of another model; equal questions get the same answer.

    Attributes
    ----------
    asked, answered : int
        Questions, and those that the model itself had to answer.

    Notes
    -----
    Plans that share the size of a micro-batch and the tensor degree ask the
    same, and most of building a graph is prediction. Questions are compared by
    a digest of every column, so nothing that a model may read is left out. The
    frames are shared: callers must not write into them, and none does.

    A model that looks at each row by itself (``interface.looks_at_rows``), and
    so not at the columns of `_PLACE`, is asked once for equal rows, of which the
    repeated blocks of a network have many. Any other gets whole frames.
    """

    def __init__(self, model: OperatorModel) -> None:
        self.model = model
        self.asked = self.answered = 0
        self._by_row = looks_at_rows(model)
        self._predicted: dict[bytes, pd.DataFrame] = {}
        self._rows: dict[Hashable, tuple[Any, ...]] = {}
        self._answer = pd.DataFrame()
        self._kept: dict[int, tuple[pd.DataFrame, bytes, NDArray[np.int64]]] = {}

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Predict operators from their names and sizes alone."""
        key = digest_frame(operators)
        self.asked += 1
        if key not in self._predicted:
            predict = self._predict_rows if self._by_row and len(operators) else self._predict
            self._predicted[key] = predict(operators)
        return self._predicted[key]

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Predict recorded operators at other sizes."""
        _, digest, rows = self._keep(operators)
        key = digest + digest_frame(target)
        self.asked += 1
        if key not in self._predicted:
            self.answered += 1
            if self._by_row and len(operators):
                pairs = np.column_stack([rows, number_rows(target)])
                _, first, inverse = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
                found = self.model.rescale(operators.iloc[first], target.iloc[first])
                self._predicted[key] = found.iloc[inverse.ravel()].set_axis(operators.index)
            else:
                self._predicted[key] = self.model.rescale(operators, target)
        return self._predicted[key]

    def step_interval(
        self, kind: str = "rescale", distance: float | None = None
    ) -> tuple[float, float]:
        """Return the model's own interval."""
        return self.model.step_interval(kind, distance)

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say what the model's interval was estimated from."""
        return self.model.step_interval_basis(kind)

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Write the model itself."""
        self.model.save(path, inputs)

    def _predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        self.answered += 1
        return self.model.predict(operators)

    def _predict_rows(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Ask for those rows alone that were never asked for."""
        keys = list(zip(*_list_columns(operators), strict=True))
        places = {key: place for place, key in enumerate(keys) if key not in self._rows}
        if places:
            found = self._predict(operators.iloc[list(places.values())])
            self._answer = found.iloc[:0]
            values = found.itertuples(index=False, name=None)
            self._rows.update(zip(places, values, strict=True))
        rows = [self._rows[key] for key in keys]
        answer = pd.DataFrame(rows, columns=self._answer.columns, index=operators.index)
        return answer.astype(self._answer.dtypes.to_dict())

    def _keep(self, frame: pd.DataFrame) -> tuple[pd.DataFrame, bytes, NDArray[np.int64]]:
        """Digest and number a frame once; it is kept so that its identity stays its own."""
        if id(frame) not in self._kept:
            self._kept[id(frame)] = (frame, digest_frame(frame), number_rows(frame))
        return self._kept[id(frame)]


def digest_frame(frame: pd.DataFrame) -> bytes:
    """Return a digest of a frame's index, column names and values."""
    digest = hashlib.sha256()
    for name in frame.columns:
        column = frame[name]
        digest.update(f"{name} {column.dtype} {len(column)};".encode())
        if column.dtype.kind in "iufb":
            digest.update(column.to_numpy().tobytes())
        else:
            digest.update(pickle.dumps(column.tolist(), protocol=5))
    digest.update(pickle.dumps(frame.index.tolist(), protocol=5))
    return digest.digest()


def number_rows(operators: pd.DataFrame) -> NDArray[np.int64]:
    """Return a number for each row, equal for rows that say that the same was done [operators]."""
    codes = [pd.factorize(np.array(column, dtype=object))[0] for column in _list_columns(operators)]
    if not len(operators):
        return np.zeros(0, dtype=np.int64)
    _, inverse = np.unique(np.column_stack(codes), axis=0, return_inverse=True)
    return inverse.ravel().astype(np.int64)


def _list_columns(operators: pd.DataFrame) -> list[list[Any]]:
    """Return the columns that say what operators do, lists as text so that they can be compared."""
    columns = []
    for name in operators.columns:
        if name not in _PLACE:
            column = operators[name]
            values = column.tolist()
            columns.append(values if column.dtype.kind in "iufb" else [str(v) for v in values])
    return columns
