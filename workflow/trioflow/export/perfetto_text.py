"""Columns of a timeline as the text of Chrome's JSON trace events, a whole column at a time."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trioflow.base.provenance import atomic_path
from trioflow.base.units import NS_PER_S, NS_PER_US

Ints = NDArray[np.int64]
Piece: TypeAlias = "str | pa.Array"
"""A part of every event of a kind: the same text in all, or a column of texts."""

CHUNK = 1 << 17
"""Events made into text at a time: what they take stays small beside the timeline."""
LEVEL = 2
"""Of compression: further levels take longer than all else together and save a fifth."""
_HEAD, _TAIL = b'{"displayTimeUnit":"ms","traceEvents":[', b"]}\n"
_GZIP = 16
"""Added to zlib's window bits it asks for gzip's frame, without a name or a time of day."""
_FRACTIONS = pa.array([f".{number:03d}" for number in range(NS_PER_US)])


def round_to_ns(times_s: pd.Series[float]) -> Ints:
    """Return times in whole nanoseconds [s to ns], as ``units.s_to_ns`` does one."""
    return np.rint(times_s.to_numpy(np.float64) * NS_PER_S).astype(np.int64)


def write_integers(values: Ints) -> pa.Array:
    """Return whole numbers as text."""
    return pc.cast(pa.array(values), pa.string())


def write_microseconds(times_ns: Ints) -> pa.Array:
    """Return times [ns] as text in microseconds, every digit of them."""
    whole, rest = np.divmod(times_ns, NS_PER_US)
    return pc.binary_join_element_wise(write_integers(whole), _FRACTIONS.take(pa.array(rest)), "")


def write_texts(values: Iterable[Any]) -> pa.Array:
    """Return texts in quotes, as JSON writes them."""
    codes, found = pd.factorize(pd.Series(values, dtype="str"), use_na_sentinel=False)
    return pa.array([json.dumps(str(text)) for text in found], pa.string()).take(pa.array(codes))


def write_argument(name: str, values: pd.Series[Any]) -> pa.Array:
    """Return ``,"name":value`` where there is a value, and nothing elsewhere."""
    absent = values.isna().to_numpy(dtype=bool)
    if absent.all():
        return pa.array([""] * len(values), pa.string())
    if pd.api.types.is_numeric_dtype(values):
        text = write_integers(values.to_numpy(dtype=np.int64, na_value=0))
    else:
        text = write_texts(values)
        absent = absent | (values == "").to_numpy(dtype=bool, na_value=True)
    pair = pc.binary_join_element_wise(f',"{name}":', text, "")
    return pc.if_else(pa.array(absent), "", pair)


def join_pieces(pieces: Sequence[Piece]) -> bytes:
    """Return events, one after the other, each begun by a comma."""
    joined = pc.binary_join_element_wise(",{", *pieces, "}", "")
    if isinstance(joined, pa.ChunkedArray):
        joined = joined.combine_chunks()
    offsets = np.frombuffer(joined.buffers()[1], dtype=np.int32)[joined.offset :]
    begin, end = int(offsets[0]), int(offsets[len(joined)])
    return joined.buffers()[2][begin:end].to_pybytes() if end > begin else b""


def cut_rows(count: int) -> Iterator[slice]:
    """Yield the rows of a table piece by piece."""
    for begin in range(0, count, CHUNK):
        yield slice(begin, min(begin + CHUNK, count))


def write_events(path: str | Path, texts: Iterable[bytes]) -> None:
    """Write events as a trace, atomically; compressed when the name ends in ``.gz``.

    ``texts``: from :func:`join_pieces`.
    """
    packer = zlib.compressobj(LEVEL, wbits=zlib.MAX_WBITS + _GZIP)
    packed = str(path).endswith(".gz")
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        for text in _frame_events(texts):
            stream.write(packer.compress(text) if packed else text)
        if packed:
            stream.write(packer.flush())


def _frame_events(texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the whole trace: the first event has no comma before it."""
    yield _HEAD
    first = True
    for text in texts:
        yield text[1:] if first else text
        first = first and not text
    yield _TAIL
