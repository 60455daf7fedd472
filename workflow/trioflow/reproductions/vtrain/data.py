"""vTrain's published iteration times, the all-reduces measured beside them, and what the numbers themselves show.

A measured time carries noise. The checks at the end are of relations that hold exactly in a sum of
parts, each looked up or profiled once, and in no measurement.

References
----------
J. Bang et al., "vTrain", MICRO 2024; repository VIA-Research/vTrain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow.base.errors import TableError
from trioflow.base.units import ms_to_s, ns_to_s
from trioflow.costmodel.collectives.model import count_steps, wire_factor
from trioflow.costmodel.collectives.published import PUBLIC_TABLES, PublicTable
from trioflow.costmodel.features import Floats
from trioflow.reproductions.tables import CHECKS

GROUPS, PLANS, UNCALIBRATED = "vtrain-a100", "vtrain-a100-plans", "vtrain-a100-uncalibrated"
SETS = (GROUPS, PLANS, UNCALIBRATED)
"""Every row thrice: predicted without its model's size, without its plan, and with nothing fitted."""
FILE = "VIA-Research+vTrain/data/ground_truth_single.csv"
"""Key in a data folder."""
_ALL_REDUCES = "vtrain/all-reduce-a100"
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
    """Read every row of the file of iteration times [s], with ``micro_batches`` of one replica.

    Raises TableError when it is missing, lacks a column or holds a combination that no step can
    have.
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
    """Measured all-reduces: straight lines between sizes; beyond, the last bandwidth; below, the least time (latency).

    Ranks not measured: the nearest fewer (else more), as many wire bytes taking as long, the
    shortest time once a ring's step.
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


def _all_reduce_tables() -> list[PublicTable]:
    """Return the public tables of the A100's all-reduces, one a number of ranks."""
    return [table for table in PUBLIC_TABLES if table.dataset == _ALL_REDUCES]


def read_all_reduces(data_folder: str | Path, rounds: Iterable[int] = (0, 1)) -> AllReduceCurves:
    """Read the all-reduces measured beside the iteration times, the mean of ``rounds`` (0 out of place, 1 in place).

    Raises TableError when a file is missing or breaks its format.
    """
    sizes, times = {}, {}
    for table in _all_reduce_tables():
        path = Path(data_folder) / table.key
        if not path.exists():
            raise TableError("no such file", file=path, fix=f"retrieve {_ALL_REDUCES}")
        samples = table.read(path, table.platform, table.dataset)
        samples = samples[samples["round"].isin(list(rounds))]
        points = samples.groupby("message_bytes")["time_ns"].mean()
        ranks = int(samples["ranks"].iloc[0])
        sizes[ranks] = points.index.to_numpy(np.float64)
        times[ranks] = np.array([ns_to_s(time_ns) for time_ns in points])
    return AllReduceCurves(sizes, times)


EXACT_S = 1e-9
"""The file's times have six decimals of a millisecond: a nanosecond."""
_ALL_BUT = {
    "micro_batches": ["hidden", "layers", "tensor", "data", "pipeline", "micro_batch"],
    "data": ["hidden", "layers", "tensor", "pipeline", "micro_batch", "micro_batches"],
}  # fmt: skip


def check_composition(rows: pd.DataFrame, reduces: AllReduceCurves) -> pd.DataFrame:
    """Test relations between rows: ``CHECKS``; ``reduces``: all-reduces in place, what a table look-up would read."""
    deviations = {
        "a further micro-batch takes always the same time": _bend_of_micro_batches(rows),
        "two replicas take longer than one by the same time, whatever the micro-batches": _spread_of_replicas(rows),
        "two replicas take longer than one by an entry of the all-reduce table": _distance_to_table(rows, reduces),
    }  # fmt: skip
    found = [
        (check, len(values), int((values <= EXACT_S).sum()), float(values.max(initial=0.0)))
        for check, values in deviations.items()
    ]
    return pd.DataFrame(found, columns=CHECKS.names)


def _bend_of_micro_batches(rows: pd.DataFrame) -> Any:
    """Return how far times at 3 or 4 numbers of micro-batches lie off the line through two of them [s]."""
    found = []
    for counts, times in _series(rows, "micro_batches"):
        if len(counts) < 3:
            continue
        slope = (times[1] - times[0]) / (counts[1] - counts[0])
        line = times[0] + slope * (counts - counts[0])
        found.append(np.abs(times - line).max())
    return np.array(found)


def _extra_of_replicas(rows: pd.DataFrame) -> pd.DataFrame:
    """Return by how much two replicas take longer than one, of otherwise equal rows."""
    found = rows.pivot_table(index=_ALL_BUT["data"], columns="data", values="measured_s")
    if not {1, 2} <= set(found.columns):
        return pd.DataFrame({"extra_s": []})
    return (found[2] - found[1]).dropna().rename("extra_s").reset_index()


def _spread_of_replicas(rows: pd.DataFrame) -> Any:
    """Return the range of that time over micro-batches, for each model and plan [s]."""
    extra = _extra_of_replicas(rows)
    if extra.empty:
        return np.zeros(0)
    spread = extra.groupby(["hidden", "layers", "tensor", "pipeline"])["extra_s"].agg(np.ptp)
    return spread.to_numpy(np.float64)


def _distance_to_table(rows: pd.DataFrame, reduces: AllReduceCurves) -> Any:
    """Return how far that time is from the nearest measured all-reduce among two ranks [s]."""
    extra = _extra_of_replicas(rows)
    if extra.empty:
        return np.zeros(0)
    times = extra["extra_s"].to_numpy(np.float64)
    table = reduces.times_s[2]
    inside = times[times <= table.max()]  # longer ones are beyond the table's largest message
    return np.abs(inside[:, None] - table[None, :]).min(axis=1)


def _series(rows: pd.DataFrame, varied: str) -> Iterator[tuple[Any, Any]]:
    """Yield values and times of rows that differ in one column alone."""
    keys: Sequence[str] = _ALL_BUT[varied]
    for _, group in rows.groupby(list(keys)):
        ordered = group.sort_values(varied)
        yield ordered[varied].to_numpy(np.float64), ordered["measured_s"].to_numpy(np.float64)
