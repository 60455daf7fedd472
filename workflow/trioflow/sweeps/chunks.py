"""Scenarios cut into jobs, and what Snakemake asks of the sweeps before any job runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.sweeps.description import DEFAULT_CHUNK, Sweep, load_sweep
from trioflow.trace.pack import MEMBERS


@cache
def plan_sweep(description: str, size: int) -> dict[str, list[str]]:
    """Return the files that each chunk of a sweep needs, shipped ones apart, by the chunk's digest.

    A description is read once in a run of Snakemake. Raises InputError as
    ``description.load_sweep``.
    """
    sweep = load_sweep(description)
    return {
        chunk.digest: list_chunk_files(sweep, chunk.numbers) for chunk in cut_chunks(sweep, size)
    }


SIMULATED_ONLY = (
    "platform", "network", "compute_scale", "communication_scale", "rank_spread", "seed",
)  # fmt: skip
"""Parameters that leave operators and their sizes alone: scenarios that differ in these only stay together."""
_PACK_ENDINGS = (".zip", ".trace")
"""What a pack that is not there yet is recognised by."""
_FIRST = ("trace", "cost_model", "override", "tensor", "samples", "micro_batches", "batch")
"""Parameters that decide the sizes of operators, the most expensive to have again first."""


@dataclass(frozen=True)
class Chunk:
    """Scenarios of one job."""

    # Of all that the job depends on: its scenarios, the files behind their names, and whether there
    # are intervals. The name of its file.
    digest: str
    # Numbers of its scenarios in the sweep, in the order in which they run
    numbers: tuple[int, ...]


def cut_chunks(sweep: Sweep, size: int = 0) -> list[Chunk]:
    """Cut the scenarios of a sweep into chunks of at most ``size``.

    ``size``: scenarios of a chunk; the description's own number goes before it, `DEFAULT_CHUNK` is
        taken for 0.

    Scenarios are sorted so that those of one graph, then those of one set of
    operator sizes, follow one another. Besides at its full size a chunk that
    is at least half full ends where the digest of a group of scenarios says
    so. These places stay where they are when scenarios come or go elsewhere,
    so that most finished chunks of an edited sweep are kept.
    """
    size = sweep.chunk or size or DEFAULT_CHUNK
    scenarios = sweep.scenarios
    order = sorted(range(len(scenarios)), key=lambda n: _sort_key(scenarios[n]))
    chunks: list[Chunk] = []
    open_chunk: list[int] = []
    for place, number in enumerate(order):
        open_chunk.append(number)
        following = scenarios[order[place + 1]] if place + 1 < len(order) else None
        last_of_graph = following is None or _graph_key(scenarios[number]) != _graph_key(following)
        full = len(open_chunk) >= size
        ends = last_of_graph and 2 * len(open_chunk) >= size and _is_cut(scenarios[number])
        if full or ends or following is None:
            chunks.append(Chunk(_digest_chunk(sweep, open_chunk), tuple(open_chunk)))
            open_chunk = []
    return chunks


def find_chunk(sweep: Sweep, digest: str, size: int = 0) -> Chunk:
    """Return the chunk of a digest.

    Raises InputError when the sweep has none: its description changed since the job was planned.
    """
    for chunk in cut_chunks(sweep, size):
        if chunk.digest == digest:
            return chunk
    raise InputError(
        f"the sweep {sweep.name} has no chunk {digest}: its description changed after the run was planned",
        fix="start Snakemake again",
    )


def list_chunk_files(sweep: Sweep, numbers: Sequence[int]) -> list[str]:
    """Return the files that some scenarios need, those that ship apart."""
    used = [sweep.scenarios[number] for number in numbers]
    traces = sorted({values["trace"] for values in used} & set(sweep.traces))
    files = [part for name in traces for path in sweep.traces[name] for part in _list_parts(path)]
    platforms = sorted({values["platform"] for values in used} & set(sweep.platforms))
    files += [sweep.platforms[name] for name in platforms]
    return [*files, *sorted({values["override"] for values in used} - {""})]


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


def _graph_key(values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what decides a graph, the device apart."""
    first = tuple(values[name] for name in _FIRST)
    rest = tuple(
        values[name] for name in values if name not in _FIRST and name not in SIMULATED_ONLY
    )
    return first + rest


def _sort_key(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*_graph_key(values), *(values[name] for name in SIMULATED_ONLY))


def _is_cut(values: Mapping[str, Any]) -> bool:
    """Return whether a chunk may end after the scenarios of a graph: after one graph in eight."""
    return hashlib.sha256(json.dumps(_graph_key(values)).encode()).digest()[0] < 32


def _digest_chunk(sweep: Sweep, numbers: Sequence[int]) -> str:
    used = [sweep.scenarios[number] for number in numbers]
    files = {
        "traces": {v["trace"]: sweep.traces.get(v["trace"]) for v in used},
        "platforms": {v["platform"]: sweep.platforms.get(v["platform"]) for v in used},
    }
    text = json.dumps([used, files, sweep.interval], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
