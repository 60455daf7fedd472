"""vTrain's published iteration times and the all-reduces measured beside them.

References
----------
J. Bang et al., "vTrain", MICRO 2024; repository VIA-Research/vTrain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from trioflow.costmodel.collectives import count_steps, wire_factor
from trioflow.costmodel.features import Floats
from trioflow.costmodel.nccl_tables import PUBLIC_TABLES, PublicTable
from trioflow.errors import TableError
from trioflow.units import ms_to_s, ns_to_s

GROUPS, PLANS, UNCALIBRATED = "vtrain-a100", "vtrain-a100-plans", "vtrain-a100-uncalibrated"
SETS = (GROUPS, PLANS, UNCALIBRATED)
"""Every row thrice: predicted without its model's size, without its plan, and with nothing fitted."""
FILE = "VIA-Research+vTrain/data/ground_truth_single.csv"
"""Key in a data folder."""
ALL_REDUCES = "vtrain/all-reduce-a100"
"""Dataset of the all-reduces, given to every prediction and fitted to nothing here."""
COLUMNS: Mapping[str, str] = {
    "# GPUs": "gpus", "global batch": "batch", "micro batch": "micro_batch", "hidden size": "hidden",
    "attention heads": "heads", "# layers": "layers", "sequence length": "sequence",
    "tensor parallelism": "tensor", "data parallelism": "data", "pipeline parallelism": "pipeline",
    "iteration time (ms)": "measured_s",
}  # fmt: skip
"""Columns of the file, and their names here; times become seconds."""
SHAPE = ["hidden", "heads", "sequence", "tensor", "micro_batch"]
"""Columns that say what one block computes on one rank."""


def read_iteration_times(data_folder: str | Path) -> pd.DataFrame:
    """Read every row of the file of iteration times.

    The values of ``COLUMNS`` and ``micro_batches`` (of one replica), in the file's order;
    ``measured_s`` is what the file says [s].

    Raises
    ------
    TableError
        When the file is missing, lacks a column or holds a combination that no step can have.
    """
    path = Path(data_folder) / FILE
    try:
        frame = pd.read_csv(path, encoding="utf-8-sig")
    except FileNotFoundError:
        raise TableError(
            "no such file", file=path, fix="retrieve vtrain/iteration-times-a100, or name a mirror"
        ) from None
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise TableError(f"no column {', '.join(missing)}", file=path, fix="retrieve it again")
    frame = frame[list(COLUMNS)].rename(columns=COLUMNS)
    frame["measured_s"] = frame["measured_s"].map(ms_to_s)
    frame["micro_batches"] = frame["batch"] // (frame["data"] * frame["micro_batch"])
    _check_rows(frame, path)
    return frame


def _check_rows(frame: pd.DataFrame, path: Path) -> None:
    """Refuse rows whose degrees do not make the step that they name."""
    degrees = frame["tensor"] * frame["data"] * frame["pipeline"]
    whole = frame["data"] * frame["micro_batch"] * frame["micro_batches"]
    wrong = {
        "the degrees' product is not the number of GPUs": degrees != frame["gpus"],
        "the batch is not a whole number of micro-batches": whole != frame["batch"],
        "the layers do not fill the stages evenly": frame["layers"] % frame["pipeline"] != 0,
        "the time is not positive": ~(frame["measured_s"] > 0),
    }
    for problem, found in wrong.items():
        if found.any():
            row = int(np.flatnonzero(found)[0])
            raise TableError(problem, file=path, place=f"row {row}", fix="retrieve it again")


@dataclass(frozen=True)
class AllReduceCurves:
    """Measured all-reduces: a straight line between measured sizes.

    Notes
    -----
    Beyond the largest size its bandwidth holds on; below the smallest one its
    time does, because latency is all that is left. Among ranks that were not
    measured the nearest fewer (else more) tell: as many bytes on the wire take as
    long, the shortest time once for each step of the ring.
    """

    # By number of ranks: sizes [bytes], rising, and their times [s].
    sizes_bytes: Mapping[int, Floats]
    times_s: Mapping[int, Floats]

    def predict(self, ranks: int, size_bytes: Floats) -> Floats:
        """Return the times [s] of messages [bytes] among some ranks; nothing among one."""
        size_bytes = np.asarray(size_bytes, np.float64)
        if ranks == 1:
            return np.zeros_like(size_bytes)
        fewer = [known for known in self.sizes_bytes if known <= ranks]
        known = max(fewer) if fewer else min(self.sizes_bytes)
        sizes, times = self.sizes_bytes[known], self.times_s[known]
        wire = wire_factor("all_reduce", ranks) / wire_factor("all_reduce", known)
        steps = count_steps("all_reduce", ranks) / count_steps("all_reduce", known)
        like = np.interp(size_bytes * wire, sizes, times)
        like *= np.maximum(size_bytes * wire / sizes[-1], 1.0)
        return np.asarray(like + times[0] * (steps - 1.0), np.float64)

    def widen(self, ranks: int) -> float:
        """Return how much wider an interval is, as a logarithm, by doublings beyond the measured ranks."""
        most = max(self.sizes_bytes, default=ranks)
        return max(1.0, math.log2(ranks) / math.log2(most)) if ranks > most else 1.0


def all_reduce_tables() -> list[PublicTable]:
    """Return the public tables of the A100's all-reduces, one a number of ranks."""
    return [table for table in PUBLIC_TABLES if table.dataset == ALL_REDUCES]


def read_all_reduces(data_folder: str | Path, rounds: Iterable[int] = (0, 1)) -> AllReduceCurves:
    """Read the all-reduces that were measured beside the iteration times.

    ``rounds``: 0 out of place, 1 in place; their mean counts.

    Raises
    ------
    TableError
        When a file is missing or breaks its format.
    """
    sizes, times = {}, {}
    for table in all_reduce_tables():
        path = Path(data_folder) / table.key
        if not path.exists():
            raise TableError("no such file", file=path, fix=f"retrieve {ALL_REDUCES}")
        samples = table.read(path, table.platform, table.dataset)
        samples = samples[samples["round"].isin(list(rounds))]
        points = samples.groupby("message_bytes")["time_ns"].mean()
        ranks = int(samples["ranks"].iloc[0])
        sizes[ranks] = points.index.to_numpy(np.float64)
        times[ranks] = np.array([ns_to_s(time_ns) for time_ns in points])
    return AllReduceCurves(sizes, times)
