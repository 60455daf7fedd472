"""The measured side of a public case: a time, where it stands, and how far repeats spread."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from trioflow.errors import InputError, TrioflowError
from trioflow.provenance import PACKAGE, read_json
from trioflow.reproductions.published.rows import PublishedRow
from trioflow.units import ms_to_s

THROUGHPUT = PACKAGE / "data" / "resnet50_throughput.tsv"
"""Published throughput; a row a GPU and number of GPUs, each with its source."""
THROUGHPUT_WORD = "throughput of "


@dataclass(frozen=True)
class Measured:
    """A measured step.

    Attributes
    ----------
    time_s : float
        The step [s].
    source : str
        File that says it.
    spread : float or None
        Half the range of repeats over their median; None where the source
        tells one number only.
    """

    time_s: float
    source: str
    spread: float | None = None


def read_measured(row: PublishedRow, data_folder: str | Path) -> Measured:
    """Return the measured time of a row.

    Parameters
    ----------
    row : PublishedRow
        Its ``measured`` names a sidecar of NeuSight's (``e2e_latency`` in ms),
        or a GPU of the shipped table of throughputs.
    data_folder : path
        Retrieved data or a mirror of it.

    Raises
    ------
    InputError
        When the file or the entry is missing or holds no positive time.
    """
    if row.measured.startswith(THROUGHPUT_WORD):
        return _read_throughput(row.measured.removeprefix(THROUGHPUT_WORD), row)
    file = Path(data_folder) / row.measured
    try:
        content = read_json(file)
    except (OSError, ValueError, TrioflowError) as error:
        raise InputError(
            f"the measured time of {row.case} cannot be read ({type(error).__name__})", file=file,
            fix="run `snakemake published`, which retrieves it",
        ) from None  # fmt: skip
    value = content.get("e2e_latency") if isinstance(content, dict) else None
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{value!r} is no time", file=file, place="e2e_latency")
    return Measured(ms_to_s(float(value)), row.measured)


def _read_throughput(device: str, row: PublishedRow) -> Measured:
    with THROUGHPUT.open(encoding="utf-8") as stream:
        entries = list(csv.DictReader(stream, delimiter="\t"))
    for entry in entries:
        if entry["device"] == device and int(entry["gpus"]) == row.ranks:
            if int(entry["batch_per_gpu"]) * row.ranks != row.batch:
                raise InputError(
                    f"{row.case} asks for {row.batch} samples, measured were "
                    f"{entry['batch_per_gpu']} on each of {row.ranks} GPUs", file=THROUGHPUT,
                )  # fmt: skip
            return Measured(row.batch / float(entry["images_per_s"]), entry["source"])
    known = sorted({entry["device"] for entry in entries})
    raise InputError(
        f"no throughput of {row.ranks} x {device!r}", file=THROUGHPUT, fix=f"use {', '.join(known)}"
    )
