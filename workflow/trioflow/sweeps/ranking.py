"""Which plan is better, how sure that is, and which ones no other beats in everything."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from trioflow.costmodel.step_residuals import COLLECTIVES, PIPELINE, load_residuals

QUANTILE = statistics.NormalDist().inv_cdf(0.9)
"""The ends of an 80 % interval lie this many standard deviations from the middle."""
ASSUMPTION = (
    "log-normal errors: that of compute is one factor common to all plans, that of communication "
    "another, and they act on each plan as far as its step depends on them; what the plans of a "
    "workload do not share is taken from trioflow's own measured runs"
)


@dataclass(frozen=True)
class Prediction:
    """A plan's step, and how far it moves with what is uncertain.

    Attributes
    ----------
    time_s : float
        Predicted step [s].
    compute_log, communication_log : float
        Logarithm of the step at the high end of the compute times, and of
        communication besides, over the predicted one.
    """

    time_s: float
    compute_log: float
    communication_log: float


def probability_faster(one: Prediction, other: Prediction) -> float:
    """Return the probability that the first of two plans takes less time.

    Parameters
    ----------
    one, other : Prediction
        Of one model on one platform.

    Notes
    -----
    `ASSUMPTION`: errors that both plans share cancel as far as both steps
    depend on them alike. The share that is a plan's own has the standard
    deviation `own_deviation`. Across workloads and platforms it is not meant.
    """
    shared = (
        (one.compute_log - other.compute_log) ** 2
        + (one.communication_log - other.communication_log) ** 2
    ) / QUANTILE**2
    deviation = math.sqrt(shared + 2 * own_deviation() ** 2)
    return statistics.NormalDist(0.0, deviation).cdf(math.log(other.time_s / one.time_s))


@cache
def own_deviation() -> float:
    """Return the standard deviation of the logarithm of a plan's own error, from measured plans.

    Notes
    -----
    Each workload's mean error is taken off, since its plans share it; one
    degree of freedom a workload is lost. What the measurements themselves
    scatter is still in it, so that it is rather too large.
    """
    groups: dict[str, list[float]] = {}
    for one in load_residuals():
        if one.way in (COLLECTIVES, PIPELINE) and one.device_kind == "cpu":
            groups.setdefault(one.workload, []).append(one.log_error)
    squares = sum((e - statistics.fmean(g)) ** 2 for g in groups.values() for e in g)
    return math.sqrt(squares / sum(len(g) - 1 for g in groups.values()))


def find_front(rows: Sequence[Mapping[str, float]], columns: Sequence[str]) -> list[int]:
    """Return the places of the rows that no other row beats: as good in every column, better in one.

    Parameters
    ----------
    rows : sequence of mapping
        Numbers by column; less is better.
    columns : sequence of str
        The columns to compare.

    Returns
    -------
    list of int
        In the order of ``rows``; of equal rows the first.
    """
    values = [tuple(row[column] for column in columns) for row in rows]
    found: list[int] = []
    for place in sorted(range(len(values)), key=lambda i: (values[i], i)):
        mine = values[place]
        beaten = any(all(a <= b for a, b in zip(values[i], mine, strict=True)) for i in found)
        if not beaten:
            found.append(place)
    return sorted(found)
