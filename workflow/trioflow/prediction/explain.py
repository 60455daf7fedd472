"""What measured steps say of a machine: a few physical numbers, fitted with priors, that explain how predictions missed.

Each measured time is predicted by ``predict`` itself on the platform with other numbers (``hardware.platform``). Times of
a simulated step are convex and piecewise linear in what its parts take, so a secant for each number stands for the
simulator between two runs of it; the fit is repeated where the simulated step and the secants disagree at its answer.
The maximum a posteriori is found by ``scipy.optimize.least_squares`` on logarithms, with a row for each prior. Priors
have heavy tails (Student's t), so that one number takes what one number explains; the posterior's spread is that of the
Jacobian at the answer (Laplace's approximation).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import least_squares

from trioflow.costmodel.features import Floats
from trioflow.hardware.platform import EXCHANGE, MICRO_BATCH, Corrections


@dataclass(frozen=True)
class Component:
    """A part of the machine that may differ from its description.

    ``cause``: what deviates where this does. ``spread``, ``tail``: scale and degrees of freedom of the prior of its
    logarithm. ``unit``: 0 for a factor on what is described; of what is described as 0 [s], the log is that of 1 + value /
    unit. ``known``: a fault that is known to happen, as the middle and the spread of its logarithm and minus twice that of its
    odds. ``probe``: another value at which the step is simulated to learn how far it depends on it.
    """

    name: str
    cause: str
    spread: float
    tail: float
    probe: float
    unit: float = 0.0
    known: tuple[float, float, float] | None = None

    @property
    def plain(self) -> float:
        """The number of the description."""
        return 0.0 if self.unit else 1.0

    def value(self, log: float) -> float:
        """Return the number of a logarithm."""
        return self.unit * math.expm1(log) if self.unit else math.exp(log)

    def surprise(self, log: float) -> float:
        """Return the square root of what a logarithm adds to minus twice the prior's, signed."""
        square = (self.tail + 1) * math.log1p((log / self.spread) ** 2 / self.tail)
        if self.known is not None:
            middle, spread, odds = self.known
            square = min(square, odds + ((log - middle) / spread) ** 2)
        return math.copysign(math.sqrt(square), log)


COMPONENTS = (
    Component("compute", "compute", 0.07, 4, 1.25),
    Component("communication", "network", 0.15, 4, 1.5),
    Component("between_nodes", "network", 0.6, 4, 3.0),
    Component("between_nodes_step_s", "network", 1.0, 4, 50e-6, 1e-5),
    Component(EXCHANGE, "network", 1.0, 4, 300e-6, 1e-5),
    Component("launches", "launches", 0.2, 4, 2.0),
    Component(MICRO_BATCH, "engine", 1.2, 1, 0.0, 1e-5),
)
"""Spreads: the median error of a step's compute and of a node's collectives on the pages of cost models; of networks
between nodes a factor of 1.8 either way and 17 us a step, so that public clusters (a fifth of the rate, 75 us) lie at
two spreads; of launches, what different hosts differ by. An engine at fault is rare, and may cost anything up to
seconds: the heaviest tail."""
SIGMAS = {"step": 0.06, "compute": 0.08, "communication": 0.3, "collective": 0.15}
"""Standard deviation of the logarithm of measured over predicted by what was measured, where nothing deviates."""
NAMED = 0.1
"""A component is named where it changes some step by more, and its number is further from 1 than its own spread."""
_WIDEST, _MOST = math.log(100.0), 20.0
_GRID = np.concatenate([np.linspace(-_WIDEST, 0, 24), np.linspace(0.1, 16, 80)])
_MOST_ROUNDS, _AGREE, _FURTHER = 3, 0.01, 30.0


@dataclass(frozen=True)
class MeasuredTime:
    """A measured time [s], and the function that predicts it on the platform with some corrections.

    ``pieces``: micro-batches that one rank runs in it, 0 where it is no step.
    """

    name: str
    measured_s: float
    predict: Callable[[Corrections], float]
    kind: str = "step"
    pieces: int = 0


@dataclass(frozen=True)
class Estimate:
    """A component's number with the ends of its 80 % interval, and by how much it changes the steps, as a share."""

    component: Component
    value: float
    low: float
    high: float
    effect: float

    @property
    def deviates(self) -> bool:
        """Whether the measured times say that it is not as described."""
        return not self.low <= self.component.plain <= self.high and abs(self.effect) > NAMED


@dataclass(frozen=True)
class Explanation:
    """What a fit gives: estimates of components on which the times depend, and times before and after it [rows] [s]."""

    estimates: list[Estimate] = field(default_factory=list)
    before_s: list[float] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)

    @property
    def corrections(self) -> dict[str, float]:
        """The numbers, by component; those that change no time by a thousandth are left as described."""
        return {one.component.name: one.value for one in self.estimates if abs(one.effect) > _AGREE / 10}

    @property
    def cause(self) -> str:
        """What explains most of what deviates: network, engine, compute or launches; empty where nothing does."""
        effects: dict[str, float] = {}
        for one in self.estimates:
            effects[one.component.cause] = effects.get(one.component.cause, 0.0) + one.effect
        cause = max(effects, key=lambda name: abs(effects[name]), default="")
        return cause if cause and abs(effects[cause]) > NAMED else ""


def explain(rows: Sequence[MeasuredTime], components: Sequence[Component] = COMPONENTS) -> Explanation:
    """Fit components to measured times; errors as those of the rows' predictions."""
    before = np.array([row.predict({}) for row in rows])
    measured = np.array([row.measured_s for row in rows])
    secants = {one: _probe(rows, one, before, measured) for one in components}
    used = [one for one, slopes in secants.items() if np.any(np.abs(slopes) > 0)]
    if not used:
        return Explanation([], before.tolist(), before.tolist())
    slopes = np.stack([secants[one] for one in used], axis=1)
    sigmas = np.array([SIGMAS[row.kind] for row in rows])
    plain = np.array([one.plain for one in used])
    at, times = plain, before
    for _ in range(_MOST_ROUNDS):
        model = _Model(used, at, times, slopes, measured, sigmas)
        logs, covariance = model.fit()
        values = model.values(logs)
        expected = model.times_s(values)
        times = np.array([row.predict(_name(used, values)) for row in rows])
        if np.all(np.abs(np.log(times / expected)) < _AGREE):
            break
        at, slopes = values, slopes.copy()
        for place in range(len(used)):
            changed = np.where(np.arange(len(used)) == place, plain, values)
            if np.max(np.abs(slopes[:, place] * (values - plain)[place]) / times) > _AGREE:
                others = np.array([row.predict(_name(used, changed)) for row in rows])
                slopes[:, place] = (times - others) / (values[place] - plain[place])
    deviations = _P80 * np.sqrt(np.diag(covariance))
    estimates = []
    for place, one in enumerate(used):
        low, high = (max(one.value(logs[place] + end), 0.0) for end in (-deviations[place], deviations[place]))
        share = slopes[:, place] * (values - plain)[place] / times
        effect = float(share[np.argmax(np.abs(share))])
        estimates.append(Estimate(one, float(values[place]), low, high, effect))
    return Explanation(estimates, before.tolist(), times.tolist())


_P80 = statistics.NormalDist().inv_cdf(0.9)


def _name(used: Sequence[Component], values: Floats) -> dict[str, float]:
    return {one.name: float(value) for one, value in zip(used, values, strict=True)}


def _probe(rows: Sequence[MeasuredTime], component: Component, before: Floats, measured: Floats) -> Floats:
    """Return by how much each time grows with a component's number [rows]."""
    probe = component.probe
    if component.name == MICRO_BATCH:
        beyond = [
            (time_s - predicted_s) / row.pieces
            for row, time_s, predicted_s in zip(rows, measured, before, strict=True)
            if row.pieces
        ]
        if not beyond:
            return np.zeros(len(rows))
        probe = max(component.unit, statistics.median(beyond))
    for far in (probe, component.plain + _FURTHER * (probe - component.plain)):
        times = np.array([row.predict({component.name: far}) for row in rows])
        if np.any(np.abs(times - before) > _AGREE * before):  # else what it changes may be hidden
            break
    return np.asarray((times - before) / (far - component.plain))


@dataclass(frozen=True)
class _Model:
    """Times as planes through the simulated ones [rows], and what they are fitted to."""

    used: Sequence[Component]
    at: Floats
    times: Floats
    slopes: Floats
    measured: Floats
    sigmas: Floats

    def values(self, logs: Floats) -> Floats:
        return np.array([one.value(log) for one, log in zip(self.used, logs, strict=True)])

    def times_s(self, values: Floats) -> Floats:
        return np.asarray(np.maximum(self.times + self.slopes @ (values - self.at), self.times / 1e3))

    def residuals(self, logs: Floats) -> Floats:
        rows = np.log(self.times_s(self.values(logs)) / self.measured) / self.sigmas
        priors = [one.surprise(log) for one, log in zip(self.used, logs, strict=True)]
        return np.concatenate([rows, priors])

    def fit(self) -> tuple[Floats, Floats]:
        """Return the logarithms at the best of several starts, and their covariance."""
        lowest = np.array([0.0 if one.unit else -_WIDEST for one in self.used])
        starts = [np.zeros(len(self.used))]
        for place in range(len(self.used)):
            along = np.zeros((len(_GRID), len(self.used)))
            along[:, place] = np.maximum(_GRID, lowest[place])
            starts.append(along[np.argmin([np.sum(self.residuals(one) ** 2) for one in along])])
        fits = [least_squares(self.residuals, start, bounds=(lowest, _MOST)) for start in starts]
        best = min(fits, key=lambda one: float(one.cost))
        spreads = np.array([one.spread for one in self.used])
        rows = np.asarray(best.jac)[: len(self.measured)]
        # Of the priors the curvature at 1: a heavy tail has none that a spread could be read off.
        return best.x, np.linalg.inv(rows.T @ rows + np.diag(1 / spreads**2))
