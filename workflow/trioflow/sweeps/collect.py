"""The second job of a sweep: all chunks together, sorted by scenario, and the figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from trioflow import tables
from trioflow.errors import InputError
from trioflow.provenance import stamp
from trioflow.sweeps.chunk_job import TABLE, written
from trioflow.sweeps.chunks import Chunk, cut_chunks
from trioflow.sweeps.description import load_sweep


def collect_sweep(
    description: str | Path, chunks: Sequence[str | Path], target: str | Path, figures: str | Path,
    size: int = 0,
) -> None:  # fmt: skip
    """Put the chunks of a sweep together, sorted by scenario, and draw its figures.

    Parameters
    ----------
    description : path
        ``config/sweeps/<name>.yaml``.
    chunks : sequence of path
        One file for each chunk, named by its digest, in any order.
    target : path
        Parquet file of ``tables.SWEEP_RESULTS``.
    figures : path
        Folder of ``throughput`` and ``memory``, as SVG and PNG.
    size : int
        As for ``chunks.cut_chunks``.

    Raises
    ------
    InputError
        When a chunk is missing, damaged or not the one that its name says.
    """
    from trioflow.report.style import save_figure
    from trioflow.sweeps.figures import draw_memory, draw_throughput

    sweep = load_sweep(description)
    files = {Path(path).stem: Path(path) for path in chunks}
    parts = []
    for chunk in cut_chunks(sweep, size):
        if chunk.digest not in files:
            raise InputError(
                f"the chunk {chunk.digest} of the sweep {sweep.name} is missing",
                file=description, fix="start Snakemake again: the description has changed",
            )  # fmt: skip
        parts.append(read_chunk(files[chunk.digest], chunk))
    rows = pd.concat(parts, ignore_index=True).sort_values("scenario", ignore_index=True)
    with written(target):
        tables.write_table(rows, TABLE, target, {"sweep": sweep.name, **stamp()})
        for name, draw in (("throughput", draw_throughput), ("memory", draw_memory)):
            save_figure(draw(rows, sweep.description), Path(figures) / name)
    told = rows["status"].value_counts().to_dict()
    print(", ".join(f"{count} {status}" for status, count in sorted(told.items())))


def read_chunk(file: Path, chunk: Chunk) -> pd.DataFrame:
    """Return the rows of a chunk's file with their numbers in the sweep.

    Raises
    ------
    InputError
        When the file is damaged or holds another chunk; the fix is to remove it.
    """
    fix = f"remove {file} and start Snakemake again: only this chunk is predicted anew"
    try:
        rows = tables.read_table(file, TABLE)
    except InputError as error:
        raise InputError(error.problem, file=file, place=error.place, fix=fix) from None
    found = rows.attrs.get("chunk"), rows["scenario"].tolist()
    if found != (chunk.digest, list(range(len(chunk.numbers)))):
        raise InputError("it holds another chunk than its name says", file=file, fix=fix)
    rows["scenario"] = pd.array(chunk.numbers, dtype="Int64")
    rows.attrs = {}
    return rows
