"""Tables as numpy columns: what a prediction computes on. A frame of pandas is made of one only where a user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trioflow.base.errors import TableError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

ABSENT = -1
"""Stands for a missing value in a column of whole numbers that may lack some: numbers, sizes and places are 0 or more."""


class Texts(Struct, frozen=True, eq=False):
    """A column of text that holds each different text once."""

    codes: NDArray[np.signedinteger]  # place in ``words`` of each row's text, ABSENT where it is missing [rows]
    words: Sequence[str]

    @classmethod
    def of(cls, texts: Iterable[str | None]) -> Texts:
        """Return a column of texts, its words in the order in which they come first."""
        places: dict[str, int] = {}
        codes = [ABSENT if text is None else places.setdefault(text, len(places)) for text in texts]
        return cls(np.array(codes, dtype=np.int32), list(places))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int | np.integer) -> str | None:
        return None if self.codes[row] == ABSENT else self.words[self.codes[row]]

    def take(self, rows: NDArray[Any] | slice) -> Texts:
        """Return some rows: by place, by mask or a slice."""
        return Texts(self.codes[rows], self.words)

    def put(self, rows: NDArray[Any], texts: Iterable[str]) -> Texts:
        """Return the column with other texts in some rows, each its own."""
        new, codes = Texts.of([*self.words, *texts]), self.codes.copy()
        codes[rows] = new.codes[len(self.words) :]
        return Texts(codes, new.words)

    def isin(self, words: Iterable[str]) -> NDArray[np.bool_]:
        """Return which rows are one of some words [rows]."""
        return self.holds(set(words).__contains__)

    def holds(self, test: Callable[[str], object]) -> NDArray[np.bool_]:
        """Return for which rows' texts a test holds [rows]."""
        rows: NDArray[np.bool_] = np.array([*map(bool, map(test, self.words)), False])[self.codes]
        return rows

    def tolist(self) -> list[str | None]:
        """Return every row's text, None where it is missing."""
        words = [*self.words, None]
        return [words[code] for code in self.codes.tolist()]


Column = NDArray[Any] | Texts


def as_texts(column: Iterable[str] | Texts) -> Texts:
    """Return a column of text of a table or a frame."""
    return column if isinstance(column, Texts) else Texts.of(column)


class Columns(Mapping[str, Any]):
    """A table: columns of as many rows, by name; lists of numbers or shapes are arrays of objects."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = dict(columns)

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def __iter__(self) -> Any:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self._columns.values()), ()))

    @property
    def nbytes(self) -> int:
        """Memory of the rows; texts are few [bytes]."""
        return sum(c.codes.nbytes if isinstance(c, Texts) else c.nbytes for c in self._columns.values())

    def take(self, rows: NDArray[Any] | slice) -> Columns:
        """Return some rows: by place, by mask or a slice."""
        return Columns({name: c.take(rows) if isinstance(c, Texts) else c[rows] for name, c in self._columns.items()})

    def assign(self, **changed: Column) -> Columns:
        """Return the table with other or further columns."""
        return Columns({**self._columns, **changed})

    @classmethod
    def concat(cls, tables: Sequence[Columns]) -> Columns:
        """Return tables of the same columns one behind the other."""
        return cls({name: _join([table[name] for table in tables]) for name in tables[0]})

    @classmethod
    def of_arrow(cls, table: pa.Table) -> Columns:
        """Return a table's columns, as `of_frame`."""
        return cls({name: read_arrow_column(table.column(name)) for name in table.column_names})

    @classmethod
    def of_frame(cls, frame: pd.DataFrame, nullable: Iterable[str] = ()) -> Columns:
        """Return a frame's columns: text as `Texts`, whole numbers that lack some with ABSENT, lists as objects.

        ``nullable``: columns of whole numbers that may lack some, of whatever type pandas made them. Raises TableError
        where one of them is negative, which would read as missing.
        """
        whole = frame.astype({name: "Int64" for name in nullable if name in frame.columns})
        for name in whole.select_dtypes("Int64"):
            for row in np.flatnonzero(whole[name].lt(0).fillna(False))[:1]:
                raise TableError(
                    f"{whole[name].iloc[row]} is negative",
                    place=f"row {row}, column {name}",
                    fix="leave the cell empty where the number is missing",
                )
        return cls({str(name): _read_column(whole[name]) for name in whole.columns})

    def to_frame(self, nullable: Iterable[str] = ()) -> pd.DataFrame:
        """Return the table as a frame; ABSENT is missing in the ``nullable`` columns."""
        import pandas as pd

        columns: dict[str, Any] = {
            name: pd.array([*c.words, None], dtype="str").take(c.codes) if isinstance(c, Texts) else c
            for name, c in self._columns.items()
        }
        for name in set(nullable) & columns.keys():
            columns[name] = pd.arrays.IntegerArray(columns[name], columns[name] == ABSENT)
        return pd.DataFrame(columns)  # a copy, so that who changes it does not change the columns


def _join(columns: Sequence[Any]) -> Column:
    if not isinstance(columns[0], Texts):
        return np.concatenate(columns)
    words = Texts.of(chain.from_iterable(column.words for column in columns))
    firsts = np.cumsum([0, *(len(column.words) for column in columns)])
    codes = [np.where(c.codes == ABSENT, ABSENT, c.codes + first) for c, first in zip(columns, firsts, strict=False)]
    return Texts(np.append(words.codes, ABSENT).astype(np.int32)[np.concatenate(codes)], words.words)


def read_arrow_column(column: pa.ChunkedArray) -> Any:
    """Return a column of a table, with ABSENT where a whole number is missing; what comes of Parquet may be shared memory."""
    array = column.unify_dictionaries().combine_chunks()
    kind = str(array.type)
    if kind.startswith("dictionary"):
        return Texts(_read_numbers(array.indices, np.dtype(np.int32)), array.dictionary.to_pylist())
    if kind == "string":
        return Texts.of(array.to_pylist())
    if kind in ("int64", "double"):
        return _read_numbers(array, np.dtype(np.int64 if kind == "int64" else np.float64))
    return np.fromiter(array.to_pylist(), dtype=object, count=len(array))


def _read_numbers(array: pa.Array, kind: np.dtype[Any]) -> NDArray[Any]:
    """Return an array's numbers; what is missing as ABSENT, or not a number."""
    if not array.null_count:
        return np.from_dlpack(array)
    rows = slice(array.offset, array.offset + len(array))
    buffers = array.buffers()
    validity, values = np.frombuffer(buffers[0], np.uint8), np.frombuffer(buffers[1], kind)
    present = np.unpackbits(validity, bitorder="little")[rows].astype(bool)
    return np.where(present, values[rows], np.array(ABSENT if kind.kind == "i" else np.nan, dtype=kind))


def _read_column(column: pd.Series[Any]) -> Column:
    kind = str(column.dtype)
    if kind == "object" and all(isinstance(cell, str) for cell in column):
        kind = "str"
    if kind in ("str", "string", "category"):
        return Texts.of(column.astype(object).where(column.notna(), None))
    if kind == "Int64":
        return column.to_numpy(dtype=np.int64, na_value=ABSENT)
    return column.to_numpy(dtype=np.float64, na_value=np.nan) if kind == "Float64" else column.to_numpy()


def as_columns(table: Any, nullable: Iterable[str] = ()) -> Columns:
    """Return the columns of a frame, as `Columns.of_frame`; of columns themselves."""
    return table if isinstance(table, Columns) else Columns.of_frame(table, nullable)
