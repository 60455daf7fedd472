"""The first job of a sweep: predict a chunk of its scenarios."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.units import format_time
from trioflow.sweeps.chunks import Chunk, find_chunk
from trioflow.sweeps.description import Sweep, load_sweep
from trioflow.sweeps.workshop import OK, Workshop

TABLE = "sweep_results"
_REPORT_EVERY_S = 5.0
"""How often a job says how far it has come."""


def simulate_sweep(description: str | Path, digest: str, target: str | Path, size: int = 0) -> None:
    """Predict the scenarios of one chunk into ``target``, a Parquet file of ``tables.SWEEP_RESULTS``, whole or not.

    They are numbered from 0 in the chunk's order, so that the file stays right when others come or go. Raises
    TrioflowError when there is no such chunk, a scenario's file is missing or broken, or the table cannot be written.
    """
    sweep = load_sweep(description)
    chunk = find_chunk(sweep, digest, size)
    rows = _predict_chunk(sweep, chunk)
    with written(target):
        tables.write_table(rows, TABLE, target, {"sweep": sweep.name, "chunk": digest})


def _predict_chunk(sweep: Sweep, chunk: Chunk) -> pd.DataFrame:
    """Return the rows of a chunk, numbered from 0; says on standard output how far it has come."""
    workshop = Workshop(sweep.traces, sweep.platforms, interval=sweep.interval)
    began_s = reported_s = time.monotonic()
    rows = []
    count = len(chunk.numbers)
    print(f"sweep {sweep.name}, chunk {chunk.digest}: {count} scenarios", flush=True)
    for place, number in enumerate(chunk.numbers):
        rows.append(workshop.predict(place, sweep.scenarios[number]))
        now_s = time.monotonic()
        if now_s - reported_s >= _REPORT_EVERY_S or place + 1 == count:
            reported_s = now_s
            print(
                f"{place + 1} of {count} scenarios, {workshop.graphs} graphs, "
                f"{sum(row['status'] != OK for row in rows)} without a time, "
                f"after {format_time(now_s - began_s)}",
                flush=True,
            )
    return make_frame(rows)


def make_frame(rows: Sequence[dict[str, object]]) -> pd.DataFrame:
    """Return rows as a frame of ``tables.SWEEP_RESULTS``."""
    frame = pd.DataFrame(rows, columns=tables.SWEEP_RESULTS.names)
    for field in tables.SWEEP_RESULTS:
        if field.type == tables.INT:
            frame[field.name] = frame[field.name].astype("Int64")
        elif field.type == tables.FLOAT:
            frame[field.name] = frame[field.name].astype("float64")
    return frame


@contextmanager
def written(target: str | Path) -> Iterator[None]:
    """Turn what keeps a block from writing, an OSError such as of a full disk, into one sentence of InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", file=target,
            fix="make room, then start Snakemake again: what is finished is kept",
        ) from None  # fmt: skip
