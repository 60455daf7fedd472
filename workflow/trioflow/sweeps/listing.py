"""What Snakemake asks of the sweeps before any job runs: which there are, their chunks and files."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from trioflow.errors import InputError
from trioflow.settings import NAME
from trioflow.sweeps.chunks import cut_chunks, list_chunk_files
from trioflow.sweeps.description import load_sweep


def list_sweeps(folder: str | Path) -> dict[str, str]:
    """Return the descriptions in a folder by name; none where there is no such folder.

    Raises
    ------
    InputError
        When a file's name is no name.
    """
    found = {}
    for path in sorted(Path(folder).glob("*.yaml")):
        if not re.fullmatch(NAME, path.stem):
            raise InputError(
                f"{path.stem!r} is no name of small letters, digits and single hyphens",
                file=path, fix="rename the file",
            )  # fmt: skip
        found[path.stem] = str(path)
    return found


@cache
def plan_sweep(description: str, size: int) -> dict[str, list[str]]:
    """Return the files that each chunk of a sweep needs, shipped ones apart, by the chunk's digest.

    A description is read once in a run of Snakemake.

    Raises
    ------
    InputError
        As ``description.load_sweep``.
    """
    sweep = load_sweep(description)
    return {
        chunk.digest: list_chunk_files(sweep, chunk.numbers) for chunk in cut_chunks(sweep, size)
    }
