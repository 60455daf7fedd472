"""How much the same work differs from step to step, rank to rank and micro-batch to micro-batch.

Logarithms of times over their medians are taken apart into what a whole step shares, what a rank keeps,
what a micro-batch of a replica keeps on all its stages in both passes (its samples are longer or
shorter), and what is new in each pass of a rank. Of exchanges it is their length once all are ready.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.arguments import check_argument
from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import PACKAGE
from trioflow.base.shipped import read_table
from trioflow.costmodel.collectives.model import MessageCurve

_SHIPPED_SPREADS = PACKAGE / "data" / "spread.tsv"
"""From ``trioflow_evaluation.drift.judge.fit_jobs``, over all recorded steps of each public job."""
_NORMAL_PER_DEVIATION = 1.4826
"""Standard deviation of a normal over its median distance from the median."""


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the logarithm of times over their medians."""

    step_log: float = 0.0  # Shared by all of a step: clocks, temperature
    rank_log: float = 0.0  # Kept by a rank: a slower device
    micro_batch_log: float = 0.0  # Shared by all passes of a replica's micro-batch: its samples
    pass_log: float = 0.0  # New in each pass of a micro-batch through a rank
    exchange_log: float = 0.0  # New in each exchange, from when all its members are ready
    operator_log: float = (
        0.0  # New in each operator, whose mean is its time: a pass of many keeps its own
    )
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
    slow_ranks: (
        int  # Ranks further from the others than a normal spread explains; not part of rank_log
    )
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


def choose_spread(
    device_kind: str, rows: Sequence[MeasuredSpread] | None = None
) -> tuple[Spread, str]:
    """Return the spread of a kind of device, or the widest known of each part, and where it comes from in words."""
    known = load_spreads() if rows is None else rows
    own = [one for one in known if one.device_kind == device_kind]
    jobs = ", ".join(
        f"{one.job} ({one.ranks} {'rank' if one.ranks == 1 else 'ranks'}, {one.steps} steps)"
        for one in own or known
    )
    if own:
        return _combine_parts(one.spread for one in own), f"as recorded in {jobs}"
    widest = {name: max(getattr(one.spread, name) for one in known) for name in (*PARTS, *LAGS)}
    words = f"nobody measured the spread of {device_kind} ranks: the widest known, of {jobs}"
    return Spread(**widest), words


CAPTURES = "captures"
"""Job of a spread that captured steps of one rank tell."""


def pool_captures(
    repeats: Sequence[Mapping[str, Any]],
    curves: Iterable[MessageCurve],
    device_kind: str,
    source: str,
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
        raise InputError(
            "the fact 'repeats' lacks a number", fix="merge the captures again"
        ) from None
    if not len(rows):
        raise InputError(
            "no captured step was repeated", fix="capture several steps of each workload"
        )
    rank_log, pass_log, operator_log, lag = np.median(rows, axis=0).tolist()
    times_s, widths = (
        np.concatenate([np.zeros(0), *parts])
        for parts in zip(
            *((one.median_s, np.log(one.high_factor / one.low_factor)) for one in curves),
            strict=True,
        )
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
_HEADER = ["device_kind", "job", *_COUNTS, *PARTS, *LAGS, "source"]


@cache
def load_spreads(path: Path = _SHIPPED_SPREADS) -> tuple[MeasuredSpread, ...]:
    """Read spreads of `write_spreads`; TableError where a row is incomplete, a cell wrong, or there is no row."""
    found = []
    for place, row in enumerate(read_table(path), start=1):
        try:
            ranks, steps, slow = (int(row[name]) for name in _COUNTS)
            parts = {name: float(row[name]) for name in (*PARTS, *LAGS)}
            one = MeasuredSpread(
                row["device_kind"], row["job"], ranks, steps, slow, Spread(**parts), row["source"]
            )
        except (KeyError, TypeError, ValueError):
            raise TableError(f"{row} is not a spread", file=path, place=f"row {place}") from None
        if not all(0 <= parts[name] < math.inf for name in PARTS):
            raise TableError(
                "a spread is negative or endless",
                file=path,
                place=f"row {place}",
                fix="write standard deviations of logarithms, 0 or more",
            )
        if not all(-1 < parts[name] < 1 for name in LAGS):
            raise TableError(
                "an autocorrelation is not between -1 and 1", file=path, place=f"row {place}"
            )
        found.append(one)
    if not found:
        raise TableError("no spread", file=path, fix="rebuild it with `make publish`")
    return tuple(found)


def write_spreads(rows: Iterable[MeasuredSpread], path: Path = _SHIPPED_SPREADS) -> None:
    """Write spreads as `load_spreads` reads them."""
    lines = [
        "# How much the same work differs: standard deviations of logarithms of times over their medians, of recorded",
        "# jobs (docs/spread.md says what each part is; rebuilt by make publish). slow_ranks: ranks that a normal spread",
        "# does not explain, left out of rank_log: such a rank is a scenario (--slow-rank). Autocorrelations are those of",
        "# one step's factor with the next step's.",
        "\t".join(_HEADER),
    ]
    for one in rows:
        parts = [f"{getattr(one.spread, name):.4g}" for name in (*PARTS, *LAGS)]
        counts = [str(number) for number in (one.ranks, one.steps, one.slow_ranks)]
        lines.append("\t".join([one.device_kind, one.job, *counts, *parts, one.source]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


_FEW_DEVIATIONS = 5.0
"""Robust standard deviations from the other ranks beyond which a rank counts as slow, not as spread."""


def fit_spread(
    passes: pd.DataFrame, exchanges: pd.DataFrame, *, lasting: bool = True
) -> tuple[Spread, list[int]]:
    """Return the spread of a recorded job, and the ranks that are slower than it explains.

    ``passes``: step, replica, stage, rank, phase, micro_batch, time_s; ``exchanges``: step,
    exchange (the same text each step), time_s from when all were ready [s]. ``lasting``: whether
    what a rank keeps over all steps counts into ``rank_log``. Means over what shares a part
    estimate it, less the variance over n of parts below.
    """
    work = ["rank", "phase"]
    logs = np.log(passes["time_s"]) - np.log(passes.groupby(work)["time_s"].transform("median"))
    step = logs.groupby(passes["step"]).transform("mean")
    own = [passes[name] for name in ("step", "replica", "micro_batch")]
    micro_batch = (logs - step).groupby(own).transform("mean")
    kept = (logs - step - micro_batch).groupby([passes["step"], passes["rank"]]).transform("mean")
    rest = logs - step - micro_batch - kept
    variance = {name: float(part.var()) for name, part in (("pass", rest), ("kept", kept))}
    variance["micro_batch"] = float(micro_batch.var()) - variance["pass"] / _count(passes, own)
    replicas = passes["replica"].nunique() * passes["micro_batch"].nunique()
    variance["step"] = float(step.var()) - variance["micro_batch"] / replicas
    lasting_log, slow = _find_lasting(passes)
    always = lasting_log**2 if lasting else 0.0
    variance |= {"rank": always + variance["kept"]}
    step_log, rank_log, micro_batch_log, pass_log = (
        math.sqrt(max(0.0, variance[name])) for name in ("step", "rank", "micro_batch", "pass")
    )
    series = (
        passes[["step", "rank"]].assign(step_log=step, kept=kept).groupby(["step", "rank"]).first()
    )
    step_lag = _find_lag(series["step_log"].unstack().iloc[:, :1], 0.0)
    rank_lag = _find_lag(series["kept"].unstack(), always)
    found = Spread(
        step_log,
        rank_log,
        micro_batch_log,
        pass_log,
        _spread_exchanges(exchanges),
        step_autocorrelation=step_lag,
        rank_autocorrelation=rank_lag,
    )
    return found, slow


_MOST_LAG = 0.99
"""A factor that never changed in the recorded steps may yet change."""


def _find_lag(series: pd.DataFrame, always: float) -> float:
    """Return the autocorrelation of factors (logarithms, a row a step) from a step to the next; 0 without any.

    ``always``: variance of what they keep in all steps, which is not in them.
    """
    apart = (series - series.mean()).to_numpy()
    first = np.flatnonzero(np.diff(series.index.to_numpy()) == 1)
    whole = always + float((apart[first] ** 2 + apart[first + 1] ** 2).sum()) / (
        2 * apart[first].size or 1
    )
    if not len(first) or whole <= 0:
        return 0.0
    lag = (always + float((apart[first] * apart[first + 1]).mean())) / whole
    return min(max(lag, -_MOST_LAG), _MOST_LAG)


def _count(passes: pd.DataFrame, keys: Sequence[pd.Series]) -> float:
    return float(passes.groupby(list(keys)).size().mean())


def _find_lasting(passes: pd.DataFrame) -> tuple[float, list[int]]:
    """Return how far ranks of a stage lie from one another over all steps, and which lie further."""
    medians = passes.groupby(["rank", "stage", "phase"], as_index=False)["time_s"].median()
    alike = medians.groupby(["stage", "phase"])["time_s"].transform("median")
    logs = np.log(medians["time_s"] / alike).groupby(medians["rank"]).mean()
    deviation = _NORMAL_PER_DEVIATION * float((logs - logs.median()).abs().median())
    far = logs - logs.median() > _FEW_DEVIATIONS * deviation
    near = medians[~medians["rank"].isin(logs.index[far])]
    means = np.log(near["time_s"]).groupby([near["stage"], near["phase"]]).transform("mean")
    own = (np.log(near["time_s"]) - means).groupby(near["rank"]).mean()
    free = len(own) - near["stage"].nunique()  # A mean of each stage was taken off.
    lasting_log = math.sqrt(float((own**2).sum()) / free) if free > 0 else 0.0
    return lasting_log, sorted(int(rank) for rank in logs.index[far])


def _spread_exchanges(exchanges: pd.DataFrame) -> float:
    """Return the standard deviation of a normal with the exchanges' median distance from their medians."""
    times_s = exchanges["time_s"].clip(lower=1e-9)
    logs = np.log(times_s / times_s.groupby(exchanges["exchange"]).transform("median"))
    return _NORMAL_PER_DEVIATION * float(np.median(np.abs(logs)))


def draw_normals(
    seed: int, part: int, of: int, shape: tuple[int, ...], lag: float = 0.0
) -> NDArray[np.float64]:
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
