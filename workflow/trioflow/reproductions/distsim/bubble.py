"""Throughput of a pipeline over the number of micro-batches, normalised to one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from trioflow.errors import InputError


def bubble_throughput(micro_batches: int, stages: int) -> float:
    """Return the ideal throughput with m micro-batches over that with one.

    Parameters
    ----------
    micro_batches, stages : int
        m and p, at least 1.

    Notes
    -----
    Let every one of p stages take t for the forward and backward of a
    micro-batch together, and messages no time. The last stage begins after
    p - 1 stages before it have done their forward of the first micro-batch,
    works on m micro-batches without a gap, and the first stage ends after the
    p - 1 backwards of the last one: T(m) = (m + p - 1) t, of which
    (p - 1) / (m + p - 1) is the bubble. Samples a second are m / T(m), so that

        throughput(m) / throughput(1) = m T(1) / T(m) = m p / (m + p - 1),

    which begins at 1 and rises towards p. It holds for GPipe and 1F1B alike;
    unequal stages, updates and messages are left out.

    Raises
    ------
    InputError
        When a number is below 1.
    """
    if min(micro_batches, stages) < 1:
        raise InputError(f"{micro_batches} micro-batches on {stages} stages is no pipeline")
    return micro_batches * stages / (micro_batches + stages - 1)


class StepParts(NamedTuple):
    """Step of one micro-batch, time of every further one, and what the second adds once, all [s]."""

    first_s: float
    further_s: float
    once_s: float

    def throughput(self, micro_batches: int) -> float:
        """Return the throughput over that of one micro-batch.

        Notes
        -----
        With unequal stages one micro-batch takes the sum of all of them, and
        every further one the slowest, so that T(m) = T(1) + (m - 1) t with t
        of the slowest: the bubble's formula with T(1) / t stages. From the
        second micro-batch on every stage adds gradients to those it has before
        it passes its own on, as PyTorch's backward does: what that takes on
        the way through all stages is added once. Of 1F1B the formula holds
        where the last stage is the slowest.
        """
        if micro_batches == 1:
            return 1.0
        step_s = self.first_s + self.once_s + (micro_batches - 1) * self.further_s
        return micro_batches * self.first_s / step_s

    @property
    def stages(self) -> float:
        """Equal stages with the same bubble."""
        return self.first_s / self.further_s


def split_step(rows: pd.DataFrame) -> StepParts:
    """Return the parts of a step from the two largest numbers of micro-batches and one.

    Parameters
    ----------
    rows : DataFrame
        ``micro_batches`` and ``step_time_s`` [s]: one micro-batch and two
        larger numbers at least.

    Raises
    ------
    InputError
        When there are fewer.
    """
    ordered = rows.sort_values("micro_batches")
    counts, times_s = ordered["micro_batches"].tolist(), ordered["step_time_s"].tolist()
    if len(counts) < 3 or counts[0] != 1:
        raise InputError("a step is split from one micro-batch and two larger numbers of them")
    further_s = float(times_s[-1] - times_s[-2]) / (counts[-1] - counts[-2])
    first_s = float(times_s[0])
    return StepParts(
        first_s, further_s, float(times_s[-1]) - first_s - (counts[-1] - 1) * further_s
    )


def compare_throughput(rows: pd.DataFrame) -> pd.DataFrame:
    """Return simulated and ideal throughput over the batch, both 1 at one micro-batch.

    Parameters
    ----------
    rows : DataFrame
        Of ``tables.SWEEP_RESULTS``, one plan at several numbers of micro-batches.

    Returns
    -------
    DataFrame
        ``micro_batches``, ``batch``, ``step_time_s`` [s], ``simulated``,
        ``ideal``, ``deviation`` (simulated over ideal less one).

    Raises
    ------
    InputError
        When a step has no time or none has one micro-batch.
    """
    unknown = rows[rows["step_time_s"].isna()]
    if len(unknown):
        raise InputError(f"a batch has no step time: {unknown['reason'].iloc[0]}")
    ordered = rows.sort_values("micro_batches", ignore_index=True)
    found = ordered[["micro_batches", "batch", "step_time_s"]].astype(
        {"micro_batches": int, "batch": int, "step_time_s": float}
    )
    first = found[found["micro_batches"] == 1]
    if first.empty:
        raise InputError("no batch of one micro-batch to normalise to")
    rate = found["batch"] / found["step_time_s"]
    found["simulated"] = rate / rate[first.index[0]]
    stages = int(ordered["pipeline"].iloc[0])
    ideal: Sequence[float] = [bubble_throughput(m, stages) for m in found["micro_batches"]]
    found["ideal"] = ideal
    found["deviation"] = found["simulated"] / found["ideal"] - 1.0
    return found
