"""How far a prediction may be off: intervals of operators, collectives and whole steps, the word beside them, and jitter.

All rest on what predictions missed that they were not fitted to. The 80 % interval of a step comes about in this order:

1. Compute has a low and a high factor (`Uncertainty.compute`): `combine_intervals` of how much the traced step's repeats
   differ, of times that a model gave a device, of operators at other sizes, and of what brings operators to their step.
2. The step is simulated again with all compute at its low end and every collective at its ``low_s``, and with all high.
3. `Uncertainty.widen`: it is at least as wide as steps were off that left what was recorded in the same way
   (`least_half_width`, ``data/step_residuals.tsv``).
4. `calibrate_interval`: the logarithms of its ends are scaled to what judged steps of its kind show
   (``data/step_calibration.tsv``).

Operators that were timed alone sum to more than the step they were taken from: each row holds what the timer shows where
nothing runs. The single-GPU step's measured time shows how much of that is left to take off (`StepAnchor`).

Jitter (`Spread`): logarithms of times over their medians are taken apart into what a whole step shares, what a rank keeps,
what a micro-batch of a replica keeps on all its stages in both passes (its samples are longer or shorter), and what is new
in each pass of a rank. Of exchanges it is their length once all are ready.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trioflow.base.arguments import check_argument
from trioflow.base.columns import Columns
from trioflow.base.errors import InputError
from trioflow.base.plan_row import Plan
from trioflow.base.provenance import PACKAGE, read_json, read_table
from trioflow.base.units import format_time
from trioflow.costmodel.features import (
    Floats,
    OperatorModel,
    RowCostModel,
    looks_at_rows,
    price_columns,
    reprice_columns,
)
from trioflow.costmodel.operators.curves import Key, lookup_order
from trioflow.trace.store import Trace

if TYPE_CHECKING:
    from trioflow.costmodel.collectives.model import MessageCurve


COVERAGE = (0.1, 0.9)
"""Quantiles at the ends of an 80 % interval."""

CONFIDENCES = ("measured", "interpolated", "extrapolated", "uncalibrated")
"""What a time rests on, from the best to the worst."""


def find_worst(confidences: Iterable[str]) -> str:
    """Return the worst word of some."""
    return max(confidences, key=CONFIDENCES.index)


SHORTEST_S = 1e-9
"""Times are clipped to the clock's nanosecond before a logarithm is taken."""

WIDEST_FACTOR = 100.0
"""Intervals end here; two orders of magnitude either way already say that nothing is known."""
WIDEST_LOG = math.log(WIDEST_FACTOR)

NEAREST_DISTANCE = math.log(2.0)
"""Sizes nearer than twofold show a capture's noise, which does not grow with the distance."""

ASSUMED = "assumed: nothing to estimate it from"

ASSUMED_FACTOR = 2.0
"""Either way, where nothing was held out: a convention, nothing measured backs it."""


class Interval(Struct, frozen=True):
    """80 % of the logarithms of measured over predicted time."""

    low_log: float  # Ends of the interval; not above and not below 0
    high_log: float
    residuals: int  # How many residuals they come from; 0 for an assumption

    @property
    def ends(self) -> tuple[float, float]:
        """Factors of the interval's ends."""
        return math.exp(self.low_log), math.exp(self.high_log)


class Band(Interval, frozen=True):
    """Quantiles of the logarithm of recorded over predicted time, at some distance from what was recorded."""

    # Median absolute logarithm of the ratio between the two sizes' predictions, for rescaling; 0
    # otherwise. The band widens and narrows in proportion with it.
    distance: float = 0.0

    def factors(self, distances: Floats) -> tuple[Floats, Floats]:
        """Return low and high factors at some logarithmic distances from the recorded size."""
        scale = np.ones_like(distances)
        if self.distance > 0:
            scale = distances / max(self.distance, NEAREST_DISTANCE)
        low = np.exp(np.maximum(self.low_log * scale, -WIDEST_LOG))
        return low, np.exp(np.minimum(self.high_log * scale, WIDEST_LOG))


ASSUMED_BAND = Band(-math.log(ASSUMED_FACTOR), math.log(ASSUMED_FACTOR), 0)


class StepBand(Struct, frozen=True):
    """Interval of a whole step's compute, from the errors of step sums."""

    half_log: float  # Half width of the 80 % interval of the logarithm
    workloads: int  # Workloads and steps (captures, or pairs of them) that it comes from
    steps: int
    mean_absolute_error: float | None  # Of the held-out step sums
    basis: str  # What was left out, in words
    # Root mean square logarithm of the ratio between the two steps' times, not below
    # ``NEAREST_DISTANCE``, for rescaled steps; 0 otherwise.
    distance: float = 0.0

    def half_at(self, distance: float | None) -> float:
        """Return the half width at a logarithmic distance from the captured step, in proportion to it.

        Nearer than twofold is noise, which does not grow; without a distance it is that of the
        fit's pairs.
        """
        half = self.half_log
        if distance is not None and self.distance > 0:
            half *= max(abs(distance), NEAREST_DISTANCE) / self.distance
        return min(half, WIDEST_LOG)


def log_distance(before_s: Floats, after_s: Floats) -> Floats:
    """Return the absolute logarithm of the ratio of two times [s]."""
    before, after = np.maximum(before_s, SHORTEST_S), np.maximum(after_s, SHORTEST_S)
    return np.asarray(np.abs(np.log(after / before)), np.float64)


_STUDENT = (
    3.0776835371752544,
    1.8856180831641272,
    1.637744353696209,
    1.533206274058944,
    1.4758840488244815,
    1.4397557472651483,
    1.4149239276505086,
    1.3968153097438654,
    1.3830287383966329,
    1.372183641110336,
    1.3634303180205407,
    1.356217334023205,
    1.3501712887800552,
    1.345030374454651,
    1.3406056078504558,
    1.3367571673273153,
    1.3333793897216268,
    1.3303909435699093,
    1.3277282090267986,
    1.3253407069850465,
    1.3231878738651728,
    1.321236741613362,
    1.3194602398161621,
    1.3178359336731498,
    1.31634507267387,
    1.3149718642705175,
    1.3137029128292737,
    1.3125267815926664,
    1.311433647301551,
    1.3104150253913955,
    1.3094635494946454,
    1.3085727931295192,
    1.3077371244508864,
    1.30695158712643,
    1.3062118020160345,
    1.3055138855362491,
    1.3048543814976248,
    1.3042302038905027,
    1.303638588621274,
    1.3030770526071949,
)
"""Student's 90 % quantiles, from one degree of freedom on: importing scipy takes longer than a step's answer."""


def student_quantile(freedom: int) -> float:
    """Return Student's 90 % quantile, the upper end of ``COVERAGE``, with some degrees of freedom."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    from scipy.special import stdtrit

    return float(stdtrit(freedom, COVERAGE[1]))


def find_band(bands: Mapping[Key, Band], operator_class: str, phase: str) -> Band:
    """Return the band of a class or of the narrowest wider one; an assumed one where there is none."""
    for key in lookup_order(operator_class, phase):
        if key in bands:
            return bands[key]
    return ASSUMED_BAND


def combine_intervals(*intervals: tuple[float, float]) -> tuple[float, float]:
    """Return the interval of a product of factors with independent errors, around one."""
    spreads = [np.sqrt(sum(np.log(i[side]) ** 2 for i in intervals)) for side in (0, 1)]
    return (float(np.exp(-spreads[0])), float(np.exp(spreads[1])))


@dataclass(frozen=True)
class Uncertainty:
    """How far a step may be off, before judged steps of its kind say more: 80 % intervals, and what they rest on."""

    compute: tuple[float, float] = (1.0, 1.0)  # factors on compute at the ends of the interval
    confidence: str = "measured"  # of compute: one of ``CONFIDENCES``
    least_half_log: float = 0.0  # least half width of the step's interval, as a logarithm, without its first call
    first_call_s: float = 0.0  # a call that initialises stays as it was recorded, on the way through every step [s]

    def __post_init__(self) -> None:
        low, high = interval = self.compute
        if not 0 < low <= high < math.inf:
            raise InputError(
                f"{interval!r} is not an interval of compute factors",
                place="uncertainty.compute",
                fix="give a low and a high factor, such as [0.9, 1.1]",
            )

    def widen(self, step_s: float, low_s: float, high_s: float) -> tuple[float, float]:
        """Return the ends of a step's interval, from a step and its times with all parts at one end [s].

        Shared links can turn a faster part into a slower whole; the interval still holds it.
        """
        least, fixed_s = math.exp(self.least_half_log), min(self.first_call_s, step_s)
        return (
            min(low_s + fixed_s * (1 - self.compute[0]), fixed_s + (step_s - fixed_s) / least),
            max(high_s - fixed_s * (self.compute[1] - 1), fixed_s + (step_s - fixed_s) * least),
        )


TIMER, RATIO, UNANCHORED = "timer", "ratio", "none"
ANCHOR_WAYS = (TIMER, RATIO, UNANCHORED)
"""Ways to bring operators to their step: less the timer, one factor, or as they are."""

SHIPPED_BAND = PACKAGE / "data/cost_models/step-anchor/band.json"
"""From `published.judge.measure_band`, over every public pair of single-GPU steps."""

_NUMBERS = ["time_s", "low_s", "high_s"]


class StepAnchor(Struct, frozen=True):
    """What makes the operators of a trace sum to its measured step."""

    timer_s: float = 0.0  # Taken off the time of every operator that takes any [s]
    scale: float = 1.0  # Factor on what is left

    def apply(self, time_s: Floats) -> Floats:
        """Return times of operators within the step [s] from those timed alone."""
        return np.maximum(time_s - self.timer_s, 0.0) * self.scale


class Anchoring(Struct, frozen=True):
    """How the operators of a trace are brought to its measured step."""

    way: str = TIMER  # One of ``ANCHOR_WAYS``
    # 80 % interval of a whole step summed from its operators, relative to the step; by default the one
    # that ships, where the anchor changes anything.
    band: tuple[float, float] | None = None

    def change(self, trace: Trace, model: OperatorModel) -> tuple[OperatorModel, StepAnchor]:
        """Return the model of operators within the step, and the anchor; see `anchor_step`."""
        anchor = anchor_step(trace, self.way)
        return (model if anchor == StepAnchor() else AnchoredModel(model, anchor)), anchor

    def interval(self, anchor: StepAnchor) -> tuple[float, float]:
        """Return what the anchor adds to the interval of the step's compute."""
        if self.band is not None:
            return self.band
        return (1.0, 1.0) if anchor == StepAnchor() else load_band()


@cache
def load_band(path: str | Path = SHIPPED_BAND) -> tuple[float, float]:
    """Return the shipped interval of whole steps summed from operators, relative to the step."""
    band = read_json(path)
    return float(band["low"]), float(band["high"])


def describe_anchor(anchor: StepAnchor) -> list[str]:
    """Say what an anchor does to the operators; nothing where it does nothing."""
    if anchor == StepAnchor():
        return []
    taken = f"{format_time(anchor.timer_s)} of timer taken off each, what is left" if anchor.timer_s else "all"
    return [
        f"the trace's operators were timed one by one: {taken} times {anchor.scale:.3f}, so that"
        " they sum to the step that was measured around them (--anchor)"
    ]


def anchor_step(trace: Trace, anchor: str = TIMER) -> StepAnchor:
    """Return the anchor of a trace at its own ``measured_end_to_end_s``; without it nothing changes.

    ``timer``: the excess of the operators over the step is spread over them equally, up to what the
    timer shows where nothing runs (``timer_floor_s``); a factor makes up for the rest. ``ratio``:
    the factor alone. Raises InputError when the way is unknown or the trace holds no times.
    """
    if anchor not in ANCHOR_WAYS:
        raise InputError(f"unknown anchor {anchor!r}", fix=f"use {', '.join(ANCHOR_WAYS)}")
    step_s = trace.facts.measured_end_to_end_s
    if step_s is None or anchor == UNANCHORED:
        return StepAnchor()
    time_s = trace.operator_columns["device_ns"] * 1e-9
    timed, total_s = int((time_s > 0).sum()), float(time_s.sum())
    if not timed:
        raise InputError("a trace without times has no step to anchor")
    timer_s = 0.0
    if anchor == TIMER and total_s > step_s:
        timer_s = min(float(trace.facts.timer_floor_s or 0.0), (total_s - float(step_s)) / timed)
    left_s = float(StepAnchor(timer_s).apply(time_s).sum())
    return StepAnchor(timer_s, float(step_s) / left_s)


class AnchoredModel(RowCostModel, Struct, frozen=True):
    """An operator model whose every time is that of an operator within a step."""

    base: OperatorModel  # Fitted to operators timed alone
    anchor: StepAnchor  # What each of its times is changed by

    @property
    def by_row(self) -> bool:
        """Whether the base looks at each operator by itself; anchoring does."""
        return looks_at_rows(self.base)

    def price(self, operators: Columns) -> Columns:
        """Predict operators from their sizes, then anchor them."""
        return self._anchored(price_columns(self.base, operators))

    def reprice(self, operators: Columns, target: Columns) -> Columns:
        """Rescale recorded operators, then anchor them."""
        return self._anchored(reprice_columns(self.base, operators, target))

    def step_interval(self, kind: str = "rescale", distance: float | None = None) -> tuple[float, float]:
        """Return the base's interval."""
        return self.base.step_interval(kind, distance)

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Return the base's words."""
        return self.base.step_interval_basis(kind)

    def _anchored(self, prices: Columns) -> Columns:
        return prices.assign(**{name: self.anchor.apply(prices[name]) for name in _NUMBERS})


SHIPPED = PACKAGE / "data" / "step_residuals.tsv"

BATCH, ALONE, COLLECTIVES, PIPELINE = "batch", "alone", "collectives", "pipeline"
RESIDUAL_WAYS = (BATCH, ALONE, COLLECTIVES, PIPELINE)
"""Ways to leave a recorded step: another batch a rank; no whole step was timed, operators alone;
ranks that exchange tensors; ranks that wait for each other's micro-batches."""
CONTEXT = "context"
"""A way of which no measured step ships, so that ``ASSUMED_FACTOR`` stands: more than two ranks share a sequence.
Some took 1.7 times as long as predicted."""

FEWEST_OF_STEPS = 2
"""A kind of device with fewer borrows from the others."""


class StepResidual(Struct, frozen=True):
    """A predicted step that was measured, too."""

    way: str  # One of ``RESIDUAL_WAYS``: what of it was not recorded
    device_kind: str  # PyTorch's type of the device, ``cpu`` or ``cuda``
    workload: str  # Model; the prediction's operator model did not see it
    case: str  # Device and plan, for the reader
    ranks: int  # Ranks of the measured step
    error: float  # Predicted over measured, less 1

    @property
    def log_error(self) -> float:
        """Logarithm of predicted over measured."""
        return math.log1p(self.error)


@cache
def load_residuals(path: Path = SHIPPED) -> tuple[StepResidual, ...]:
    """Read the residuals that ship, or others of ``published.judge.write_residuals``."""
    return tuple(
        StepResidual(**{**row, "ranks": int(row["ranks"]), "error": float(row["error"])})  # type: ignore[arg-type]
        for row in read_table(path)
    )


def least_half_width(groups: Iterable[str], device_kind: str, workload: str, ranks: int = 1) -> float:
    """Return the least half width of a step's 80 % interval, as a logarithm.

    As ``fits.operators.fit_step_band`` for each of the independent ``ways`` that leave what was
    recorded, without the workload's own residuals (no step judges itself); the other kind of device
    (``device_kind``: PyTorch's type, ``cpu`` or ``cuda``) stands in below ``FEWEST_OF_STEPS``. Beyond the most ranks measured it grows with the
    doublings.
    """
    return math.sqrt(sum(_half_of_way(group, device_kind, workload, ranks) ** 2 for group in groups))


@cache
def _half_of_way(group: str, device_kind: str, workload: str, ranks: int) -> float:
    own = spell_workload(workload)
    rows = [one for one in load_residuals() if one.way == group and one.workload != own]
    same = [one for one in rows if one.device_kind == device_kind]
    if len({one.workload for one in same}) >= FEWEST_OF_STEPS:
        rows = same
    if not rows:
        return math.log(ASSUMED_FACTOR)
    squares: dict[str, list[float]] = {}
    for one in rows:
        squares.setdefault(one.workload, []).append(one.log_error**2)
    mean = float(np.mean([np.mean(errors) for errors in squares.values()]))
    half = student_quantile(len(squares)) * math.sqrt(mean)
    most = max(one.ranks for one in rows)
    return half * max(1.0, math.log2(ranks) / math.log2(most) if most > 1 else 1.0)


CALIBRATION = PACKAGE / "data" / "step_calibration.tsv"

RECORDED, ONE_NODE, NODES, MANY_NODES, TENSOR_OVER_NODES, LONG_CONTEXT = (
    "recorded",
    "one node",
    "several nodes",
    "hundreds of nodes",
    "tensor over nodes",
    "long context",
)
"""Kinds of steps, as they were judged: a recorded step as it is; ranks of one node, of several, of more than any network was
measured on; tensor groups that do not fit a node; sequences that more than two ranks share."""
MOST_NODES = 248
"""Of the measured networks between nodes (``data/node_networks.tsv``)."""


@cache
def load_calibration(path: Path = CALIBRATION) -> dict[str, tuple[float, str]]:
    """Return of each kind of step the factor on the logarithms of its interval's ends, and its best word of confidence."""
    return {row["kind"]: (float(row["scale"]), row["word"]) for row in read_table(path)}


def find_kind(plan: Plan, ranks: int, ranks_per_node: int, confidences: Iterable[str]) -> str:
    """Return which kind a plan's step is: a row of ``data/step_calibration.tsv``; ``confidences``: of its compute."""
    kinds = {
        RECORDED: ranks == 1 and set(confidences) == {CONFIDENCES[0]},
        TENSOR_OVER_NODES: plan.tensor > ranks_per_node,
        LONG_CONTEXT: plan.context > 2,
        MANY_NODES: ranks > MOST_NODES * ranks_per_node,
        NODES: ranks > ranks_per_node,
        ONE_NODE: True,
    }
    return next(kind for kind, holds in kinds.items() if holds)


def calibrate_interval(kind: str, step_s: float, ends_s: Sequence[float]) -> list[float]:
    """Return the ends of a step's interval as wide as the errors of judged steps of its kind ask for [s]."""
    scale, _ = load_calibration()[kind]
    return [step_s * (end_s / step_s) ** scale for end_s in ends_s]


def spell_workload(name: str) -> str:
    """Return a workload's name as the residuals spell it."""
    return name.replace("_", "-").lower()


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

    device_kind: str  # Kind of the platform's device, ``cpu`` or ``gpu``
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
    halves = {name: math.sqrt(np.mean(each)) for name, each in squares.items()}
    for name in LAGS:
        weights = squares[name.replace("autocorrelation", "log")]
        lags = [getattr(one, name) for one in known]
        halves[name] = float(np.average(lags, weights=weights)) if any(weights) else 0.0
    return Spread(**halves)


def choose_spread(device_kind: str, rows: Sequence[MeasuredSpread] | None = None) -> tuple[Spread, str]:
    """Return the spread of a kind of device (``cpu`` or ``gpu``), or the widest known of each part, and where it comes from in words."""
    known = load_spreads() if rows is None else rows
    own = [one for one in known if one.device_kind == device_kind]
    jobs = ", ".join(
        f"{one.job} ({one.ranks} {'rank' if one.ranks == 1 else 'ranks'}, {one.steps} steps)" for one in own or known
    )
    if own:
        return _combine_parts(one.spread for one in own), f"as recorded in {jobs}"
    widest = {name: max(getattr(one.spread, name) for one in known) for name in (*PARTS, *LAGS)}
    return Spread(**widest), f"nobody measured the spread of {device_kind} ranks: the widest known, of {jobs}"


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
    normals = np.random.default_rng([seed, part, of]).standard_normal(shape)
    if lag:
        fresh = math.sqrt(1 - lag**2)
        for step in range(1, shape[-1]):
            normals[..., step] = lag * normals[..., step - 1] + fresh * normals[..., step]
    return normals


_MOST_DRAWS = 100_000
"""Draws of one step."""


def check_draws(draws: int, seed: int) -> None:
    """Refuse numbers of draws and seeds that mean nothing: InputError."""
    draws, seed = check_argument("draws", draws, "int"), check_argument("seed", seed, "int")
    if not 0 <= draws <= _MOST_DRAWS:
        raise InputError(f"{draws} draws", fix=f"give 0 to {_MOST_DRAWS}")
    if seed < 0:
        raise InputError(f"the seed {seed} is negative", fix="give 0 or more")
