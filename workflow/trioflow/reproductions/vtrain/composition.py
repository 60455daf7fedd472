"""Where vTrain's iteration times come from: what the numbers themselves tell.

A measured time carries noise. These are checks of relations that hold exactly
in a sum of parts, each looked up or profiled once, and in no measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from trioflow.reproductions.tables import CHECKS
from trioflow.reproductions.vtrain.data import AllReduceCurves

EXACT_S = 1e-9
"""The file's times have six decimals of a millisecond: a nanosecond."""
ALL_BUT = {
    "micro_batches": ["hidden", "layers", "tensor", "data", "pipeline", "micro_batch"],
    "data": ["hidden", "layers", "tensor", "pipeline", "micro_batch", "micro_batches"],
}  # fmt: skip


def check_composition(rows: pd.DataFrame, reduces: AllReduceCurves) -> pd.DataFrame:
    """Test relations between rows.

    ``rows``: as ``vtrain_data.read_iteration_times`` returns them; ``reduces``: all-reduces in
    place: what a table look-up would read.

    Columns of ``CHECKS``.
    """
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
    found = rows.pivot_table(index=ALL_BUT["data"], columns="data", values="measured_s")
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
    keys: Sequence[str] = ALL_BUT[varied]
    for _, group in rows.groupby(list(keys)):
        ordered = group.sort_values(varied)
        yield ordered[varied].to_numpy(np.float64), ordered["measured_s"].to_numpy(np.float64)
