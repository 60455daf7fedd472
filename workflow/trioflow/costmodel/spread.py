"""How much the same work differs from step to step, rank to rank and micro-batch to micro-batch.

Logarithms of times over their medians are taken apart into what a whole step shares, what a rank keeps,
what a micro-batch of a replica keeps on all its stages in both passes (its samples are longer or
shorter), and what is new in each pass of a rank. Of exchanges it is their length once all are ready.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.arguments import check_argument
from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE, read_table
from trioflow.costmodel.collectives.model import MessageCurve

SHIPPED_SPREADS = PACKAGE / "data" / "spread.tsv"
"""From ``trioflow_evaluation.drift.judge.fit_jobs``, over all recorded steps of each public job."""


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the logarithm of times over their medians."""

    step_log: float = 0.0  # Shared by all of a step: clocks, temperature
    rank_log: float = 0.0  # Kept by a rank: a slower device
    micro_batch_log: float = 0.0  # Shared by all passes of a replica's micro-batch: its samples
    pass_log: float = 0.0  # New in each pass of a micro-batch through a rank
    exchange_log: float = 0.0  # New in each exchange, from when all its members are ready
    operator_log: float = 0.0  # New in each operator, whose mean is its time: a pass of many keeps its own
    # Of a step's, and of a rank's, factor to the next step's: 1 of what a rank keeps for good
    step_autocorrelation: float = 0.0
    rank_autocorrelation: float = 0.0


PARTS = tuple(part.name for part in fields(Spread) if part.name.endswith("_log"))
LAGS = ("step_autocorrelation", "rank_autocorrelation")
"""Autocorrelations, and parts: the names of a spread's numbers."""


@dataclass(frozen=True)
class MeasuredSpread:
    """The spread of one recorded job."""

    device_kind: str  # ``cpu`` or ``gpu``
    job: str  # Job that it was measured on
    ranks: int  # Recorded ranks
    steps: int  # Recorded steps
    slow_ranks: int  # Ranks further from the others than a normal spread explains; not part of rank_log
    spread: Spread
    source: str  # Data set, file and licence


def _combine_parts(parts: Iterable[Spread]) -> Spread:
    """Return root mean squares of some jobs' spreads; autocorrelations as their variances weigh them."""
    known = list(parts)
    squares = {name: [getattr(one, name) ** 2 for one in known] for name in PARTS}
    found = {name: math.sqrt(np.mean(each)) for name, each in squares.items()}
    for name in LAGS:
        weights = squares[name.replace("autocorrelation", "log")]
        lags = [getattr(one, name) for one in known]
        found[name] = float(np.average(lags, weights=weights)) if any(weights) else 0.0
    return Spread(**found)


def choose_spread(device_kind: str, rows: Sequence[MeasuredSpread] | None = None) -> tuple[Spread, str]:
    """Return the spread of a kind of device, or the widest known of each part, and where it comes from in words."""
    known = load_spreads() if rows is None else rows
    own = [one for one in known if one.device_kind == device_kind]
    jobs = ", ".join(
        f"{one.job} ({one.ranks} {'rank' if one.ranks == 1 else 'ranks'}, {one.steps} steps)" for one in own or known
    )
    if own:
        return _combine_parts(one.spread for one in own), f"as recorded in {jobs}"
    widest = {name: max(getattr(one.spread, name) for one in known) for name in (*PARTS, *LAGS)}
    words = f"nobody measured the spread of {device_kind} ranks: the widest known, of {jobs}"
    return Spread(**widest), words


CAPTURES = "captures"
"""Job of a spread that captured steps of one rank tell."""


def pool_captures(
    repeats: Sequence[Mapping[str, Any]], curves: Iterable[MessageCurve], device_kind: str, source: str
) -> MeasuredSpread:
    """Return the spread that captures of single ranks and measured collectives tell; InputError where a number lacks.

    ``repeats``: that fact of each trace, of each part the median: a disturbed capture does not set
    it. One rank's steps: what they share counts as its own. ``curves``: rounds of each collective
    and size, whose variances add up as in a step.
    """
    names = ("step_log", "pass_log", "operator_log", "autocorrelation")
    try:
        rows = np.array([[float(one[name]) for name in names] for one in repeats])
        steps = sum(int(one["steps"]) for one in repeats)
    except (KeyError, TypeError, ValueError):
        raise InputError("the fact 'repeats' lacks a number", fix="merge the captures again") from None
    if not len(rows):
        raise InputError("no captured step was repeated", fix="capture several steps of each workload")
    rank_log, pass_log, operator_log, lag = np.median(rows, axis=0).tolist()
    times_s, widths = (
        np.concatenate([np.zeros(0), *parts])
        for parts in zip(*((one.median_s, np.log(one.high_factor / one.low_factor)) for one in curves), strict=True)
    )
    exchange_log = float(np.linalg.norm(times_s * widths) / np.linalg.norm(times_s) / _NORMAL_80)
    spread = Spread(
        rank_log=rank_log,
        pass_log=pass_log,
        operator_log=operator_log,
        rank_autocorrelation=lag,
        exchange_log=exchange_log,
    )
    return MeasuredSpread(device_kind, f"{len(rows)} {CAPTURES}", 1, steps, 0, spread, source)


_NORMAL_80 = 2.5631
"""Width of the middle 80 % of a normal, in standard deviations."""
_COUNTS = ("ranks", "steps", "slow_ranks")
HEADER = ["device_kind", "job", *_COUNTS, *PARTS, *LAGS, "source"]


@cache
def load_spreads(path: Path = SHIPPED_SPREADS) -> tuple[MeasuredSpread, ...]:
    """Read the spreads that ship, or others of ``trioflow_evaluation.drift.judge.write_spreads``."""
    return tuple(
        MeasuredSpread(
            device_kind=row["device_kind"],
            job=row["job"],
            **{name: int(row[name]) for name in _COUNTS},
            spread=Spread(**{name: float(row[name]) for name in (*PARTS, *LAGS)}),
            source=row["source"],
        )
        for row in read_table(path)
    )


def draw_normals(seed: int, part: int, of: int, shape: tuple[int, ...], lag: float = 0.0) -> NDArray[np.float64]:
    """Return normal numbers that depend on the seed, the part and what they are of, and on nothing else.

    The first rows of a taller array are those of a lower one, so plans of one seed share them.
    ``lag``: autocorrelation along the last axis, whose places are consecutive steps.
    """
    found = np.random.default_rng([seed, part, of]).standard_normal(shape)
    if lag:
        fresh = math.sqrt(1 - lag**2)
        for step in range(1, shape[-1]):
            found[..., step] = lag * found[..., step - 1] + fresh * found[..., step]
    return found


_MOST_DRAWS = 100_000
"""Draws of one step."""


def check_draws(draws: int, seed: int) -> None:
    """Refuse numbers of draws and seeds that mean nothing: InputError."""
    draws, seed = check_argument("draws", draws, "int"), check_argument("seed", seed, "int")
    if not 0 <= draws <= _MOST_DRAWS:
        raise InputError(f"{draws} draws", fix=f"give 0 to {_MOST_DRAWS}")
    if seed < 0:
        raise InputError(f"the seed {seed} is negative", fix="give 0 or more")
