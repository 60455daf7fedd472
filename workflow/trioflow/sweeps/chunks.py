"""Scenarios cut into jobs, and what Snakemake asks of the sweeps before any job runs.

The first job of a sweep: predict a chunk of its scenarios.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.units import format_time
from trioflow.sweeps.description import PARAMETERS, Sweep, load_sweep
from trioflow.sweeps.workshop import OK, Workshop
from trioflow.trace.pack import MEMBERS

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
            f"cannot be written: {error.strerror or error}",
            file=target,
            fix="make room, then start Snakemake again: what is finished is kept",
        ) from None


@cache
def plan_sweep(description: str, size: int) -> dict[str, list[str]]:
    """Return the files that each chunk needs, shipped ones apart, by the chunk's digest; InputError as ``load_sweep``."""
    sweep = load_sweep(description)
    return {
        chunk.digest: list_chunk_files(sweep, chunk.numbers) for chunk in cut_chunks(sweep, size)
    }


SIMULATED_ONLY = (
    "platform",
    "network",
    "compute_scale",
    "communication_scale",
    "rank_spread",
    "seed",
)
"""Parameters that leave operators and their sizes alone: scenarios that differ in these only stay together."""
_PACK_ENDINGS = (".zip", ".trace")
"""What a pack that is not there yet is recognised by."""
_FIRST = ("trace", "cost_model", "override", "tensor", "samples", "micro_batches", "batch")
"""Parameters that decide the sizes of operators, the most expensive to have again first."""
_GRAPH = (
    *_FIRST,
    *(name for name in PARAMETERS if name not in _FIRST and name not in SIMULATED_ONLY),
)
"""Parameters that decide a graph, the device apart."""
JOBS, LEAST_CHUNK, LARGEST_CHUNK = 16, 64, 8192
"""Of a sweep whose chunks nobody sized: jobs at least, and scenarios of each; docs/sweeps.md says why."""


@dataclass(frozen=True)
class Chunk:
    """Scenarios of one job."""

    # Of all that the job depends on: its scenarios, the files behind their names, and whether there
    # are intervals. The name of its file.
    digest: str
    # Numbers of its scenarios in the sweep, in the order in which they run
    numbers: tuple[int, ...]


def choose_size(count: int) -> int:
    """Return a chunk's default size: at least `JOBS` jobs of 64 to 8192, doubled so that edits seldom cut anew."""
    size = LEAST_CHUNK
    while size * JOBS < count and size < LARGEST_CHUNK:
        size *= 2
    return size


def cut_chunks(sweep: Sweep, size: int = 0) -> list[Chunk]:
    """Cut the scenarios of a sweep into chunks of at most ``size``; the description's own goes before, `choose_size` for 0.

    Sorted so that those of one graph, then of one set of operator sizes, follow one another. A chunk also ends where,
    at least half full, the digest of a group says so: places that stay when scenarios come or go elsewhere, so most
    finished chunks of an edited sweep are kept.
    """
    scenarios = sweep.scenarios
    size = sweep.chunk or size or choose_size(len(scenarios))
    graph = scenarios.rank(_GRAPH)
    keys = [*graph, *scenarios.rank(SIMULATED_ONLY)]
    order = np.lexsort(keys[::-1]) if keys else np.arange(len(scenarios))
    follows = np.zeros(len(scenarios) - 1, dtype=bool)
    for rank in graph:
        follows |= rank[order[1:]] != rank[order[:-1]]
    # Places behind the last scenario of each graph
    ends = np.flatnonzero(follows) + 1
    chunks: list[Chunk] = []
    first = 0
    while first < len(order):
        last = min(first + size, len(order))
        low, high = np.searchsorted(ends, [first + (size + 1) // 2, last])
        for end in ends[low:high]:
            values = scenarios[order[end - 1]]
            key = [values[name] for name in _GRAPH]
            if hashlib.sha256(json.dumps(key).encode()).digest()[0] < 32:
                last = int(end)
                break
        numbers = tuple(order[first:last].tolist())
        chunks.append(Chunk(_digest_chunk(sweep, numbers), numbers))
        first = last
    return chunks


def find_chunk(sweep: Sweep, digest: str, size: int = 0) -> Chunk:
    """Return the chunk of a digest; InputError when there is none: the description changed since the job was planned."""
    for chunk in cut_chunks(sweep, size):
        if chunk.digest == digest:
            return chunk
    raise InputError(
        f"the sweep {sweep.name} has no chunk {digest}: its description changed after the run was planned",
        fix="start Snakemake again",
    )


def list_chunk_files(sweep: Sweep, numbers: Sequence[int]) -> list[str]:
    """Return the files that some scenarios need, those that ship apart."""
    used = sweep.scenarios.different
    traces = sorted({*used("trace", numbers)} & set(sweep.traces))
    files = [part for name in traces for path in sweep.traces[name] for part in _list_parts(path)]
    platforms = sorted({*used("platform", numbers)} & set(sweep.platforms))
    files += [sweep.platforms[name] for name in platforms]
    return [*files, *sorted({*used("override", numbers)} - {""})]


def list_sweep_files(description: str | Path) -> list[str]:
    """Return the files that all scenarios of a description need, those that ship apart."""
    sweep = load_sweep(description)
    return list_chunk_files(sweep, range(len(sweep.scenarios)))


def _list_parts(trace: str) -> list[str]:
    """Return the files of a trace: the pack, or those of the folder, which may still have to be made."""
    packed = Path(trace).is_file() or Path(trace).suffix in _PACK_ENDINGS
    if packed and not Path(trace).is_dir():
        return [trace]
    return [f"{trace}/{name}" for name in MEMBERS]


def _digest_chunk(sweep: Sweep, numbers: Sequence[int]) -> str:
    used = sweep.scenarios.list_columns(numbers)
    files = {
        "traces": {name: sweep.traces.get(name) for name in used["trace"]},
        "platforms": {name: sweep.platforms.get(name) for name in used["platform"]},
    }
    text = json.dumps([len(numbers), used, files, sweep.interval], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
