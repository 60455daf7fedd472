"""Forms of an operator's cost as a function of its sizes, and how each is fitted.

Every form is monotone in every feature: its coefficients are not negative.
All minimise relative errors, so that a short operator counts as a long one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import lsq_linear, nnls

from trioflow.costmodel.features import FEATURES, Floats

SHORTEST_S = 1e-6
"""Below a microsecond [s] a profiler's clock decides: weights do not grow any further."""

MAX_POWER = 1.0
"""No operator's time grows faster than in proportion with one of its sizes."""


@dataclass(frozen=True)
class Curve:
    """One fitted form.

    Attributes
    ----------
    form : str
        Name in ``FORMS``.
    coefficients : tuple of float
        As the form defines them, none negative: a time [s] first, then slopes
        [s/flop, s/byte] or, for ``power``, exponents.
    """

    form: str
    coefficients: tuple[float, ...]

    def predict(self, features: Floats) -> Floats:
        """Return the time [s] of every row of features, shape (n, 3) to (n,)."""
        return FORMS[self.form].evaluate(features, np.asarray(self.coefficients, np.float64))

    def scaled(self, factor: float) -> Curve:
        """Return the curve whose every time is ``factor`` times this one's."""
        # A power law has one coefficient in seconds, its level; the others are exponents.
        times = 1 if self.form == "power" else len(self.coefficients)
        scaled = tuple(value * factor for value in self.coefficients[:times])
        return Curve(self.form, scaled + self.coefficients[times:])


@dataclass(frozen=True)
class Form:
    """How one form is fitted, evaluated, and how many coefficients it has."""

    fit: Callable[[Floats, Floats], Floats]
    evaluate: Callable[[Floats, Floats], Floats]
    coefficients: int


def fit_curve(form: str, features: Floats, time_s: Floats) -> Curve:
    """Fit one form to operators.

    Parameters
    ----------
    form : str
        Name in ``FORMS``.
    features : ndarray
        Shape (n, 3), n at least 1: flop [flop], read and written bytes [bytes].
    time_s : ndarray
        Shape (n,), recorded times [s].
    """
    return Curve(form, tuple(float(value) for value in FORMS[form].fit(features, time_s)))


def driver_of(features: Floats, time_s: Floats) -> int:
    """Return the column of the feature that correlates best with the time.

    Notes
    -----
    The rule of Li's model: an operator is operation-, input- or output-driven.
    Ties, and features that do not vary, go to the earlier column.

    References
    ----------
    Y. Li, Y. Sun, A. Jog, "Path Forward Beyond Simulators: Fast and Accurate
    GPU Execution Time Prediction for DNN Workloads", MICRO 2023 (known to us
    by its abstract and by descriptions of it).
    """
    best, driver = -np.inf, 0
    for column in range(features.shape[1]):
        values = features[:, column]
        if len(values) > 1 and np.ptp(values) > 0 and np.ptp(time_s) > 0:
            correlation = float(np.corrcoef(values, time_s)[0, 1])
            if correlation > best + 1e-12:
                best, driver = correlation, column
    return driver


def _solve(columns: Floats, time_s: Floats) -> Floats:
    """Minimise squared relative errors with coefficients that are not negative."""
    weights = 1.0 / np.maximum(time_s, SHORTEST_S)
    scale = np.max(columns, axis=0, initial=0.0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(columns / scale * weights[:, None], time_s * weights)
    return np.asarray(solution / scale, np.float64)


def _with_constant(columns: Floats) -> Floats:
    return np.hstack([np.ones((len(columns), 1)), columns])


def _fit_constant(features: Floats, time_s: Floats) -> Floats:
    return np.array([float(np.median(time_s))])


def _constant(features: Floats, coefficients: Floats) -> Floats:
    return np.full(len(features), coefficients[0])


def _fit_linear(features: Floats, time_s: Floats) -> Floats:
    return _solve(_with_constant(features), time_s)


def _linear(features: Floats, coefficients: Floats) -> Floats:
    return np.asarray(coefficients[0] + features @ coefficients[1:], np.float64)


def _fit_driver(features: Floats, time_s: Floats) -> Floats:
    driver = driver_of(features, time_s)
    fitted = _solve(_with_constant(features[:, [driver]]), time_s)
    coefficients = np.zeros(1 + features.shape[1])
    coefficients[0], coefficients[1 + driver] = fitted
    return coefficients


def _fit_roofline(features: Floats, time_s: Floats) -> Floats:
    """Alternate between who is bound by what and a fit of constant, compute and memory slopes."""
    data = features[:, 1] + features[:, 2]
    both = _with_constant(np.column_stack([features[:, 0], data]))
    current = best = _solve(both, time_s)
    best_error = np.inf
    for _ in range(20):
        relative = (_roofline(features, current) - time_s) / np.maximum(time_s, SHORTEST_S)
        error = float(np.sum(relative**2))
        if error >= best_error:
            break
        best, best_error = current, error
        compute = features[:, 0] * current[1] > data * current[2]
        columns = both.copy()
        columns[~compute, 1] = 0.0
        columns[compute, 2] = 0.0
        current = _solve(columns, time_s)
    return best


def _roofline(features: Floats, coefficients: Floats) -> Floats:
    data = features[:, 1] + features[:, 2]
    bound = np.maximum(features[:, 0] * coefficients[1], data * coefficients[2])
    return np.asarray(coefficients[0] + bound, np.float64)


def _fit_power(features: Floats, time_s: Floats) -> Floats:
    """Least squares of the logarithm, every exponent between 0 and 1."""
    logs = np.log1p(features)
    centre = logs.mean(axis=0)
    target = np.log(np.maximum(time_s, SHORTEST_S))
    bounds = ([-np.inf] + [0.0] * len(FEATURES), [np.inf] + [MAX_POWER] * len(FEATURES))
    solution = lsq_linear(_with_constant(logs - centre), target, bounds=bounds, method="bvls").x
    exponents = np.clip(solution[1:], 0.0, MAX_POWER)
    return np.concatenate([[float(np.exp(solution[0] - centre @ exponents))], exponents])


def _power(features: Floats, coefficients: Floats) -> Floats:
    return np.asarray(coefficients[0] * np.exp(np.log1p(features) @ coefficients[1:]), np.float64)


FORMS: dict[str, Form] = {
    "constant": Form(_fit_constant, _constant, 1),
    "linear": Form(_fit_linear, _linear, 4),
    "driver": Form(_fit_driver, _linear, 4),
    "roofline": Form(_fit_roofline, _roofline, 3),
    "power": Form(_fit_power, _power, 4),
}
"""constant; constant + slopes; constant + the driver's slope; constant + max(compute, memory); power law."""
