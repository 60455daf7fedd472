"""One curve for every class and phase of operators, and what stands in where rows are few."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow.costmodel.curves import Curve, driver_of, fit_curve
from trioflow.costmodel.features import FEATURES, HOST_ONLY, Floats, base_class
from trioflow.errors import InputError

MIN_ROWS = 4
"""A class with fewer operators borrows the shape of a wider one."""

NOTHING_S = 1e-12
"""No operator takes a picosecond [s]; a prediction below it is none."""

ANY = "*"
"""Stands for every class or every phase."""

Key = tuple[str, str]
Flags = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.intp]


@dataclass(frozen=True)
class ClassCurve:
    """The fitted curve of one class and phase.

    Attributes
    ----------
    curve : Curve
        Time [s] over the features.
    low, high : tuple of float
        Range of each feature in the rows fitted, in the order of ``FEATURES``.
    rows : int
        Operators of the class itself.
    driver : str
        Feature that correlates best with the time.
    shape_of : str
        Where the curve's shape comes from: ``own``, or the class and phase
        that lent it (scaled to this class's rows).
    """

    curve: Curve
    low: tuple[float, ...]
    high: tuple[float, ...]
    rows: int
    driver: str
    shape_of: str

    def covers(self, features: Floats) -> Flags:
        """Tell which rows of features lie inside the fitted range; booleans, shape (n,)."""
        inside = (features >= np.asarray(self.low)) & (features <= np.asarray(self.high))
        return np.asarray(inside.all(axis=1))


def lookup_order(operator_class: str, phase: str) -> Iterator[Key]:
    """Yield the keys under which a class is looked for: itself, then ever wider ones.

    A kind of convolution falls back to all convolutions of the phase, then to
    everything in the phase, then to everything.
    """
    yield operator_class, phase
    if base_class(operator_class) != operator_class:
        yield base_class(operator_class), phase
    yield ANY, phase
    yield ANY, ANY


def fit_class_curves(rows: pd.DataFrame, form: str) -> dict[Key, ClassCurve]:
    """Fit every class and phase, and the wider classes that stand in.

    Parameters
    ----------
    rows : DataFrame
        As ``operator_rows.collect_rows`` returns them; at least one row.
    form : str
        Name in ``curves.FORMS``.

    Returns
    -------
    dict of (class, phase) to ClassCurve
        Every class and phase in the rows, every base class of a kind of
        convolution, every phase as ``("*", phase)``, and ``("*", "*")``.

    Notes
    -----
    A class is fitted on its own when it has ``MIN_ROWS`` operators of at least
    two different sizes. One with fewer takes the shape of the next wider class
    (:func:`lookup_order`). Operators that move no data (views) get one time,
    whatever their size. Every curve is then scaled so that its sum over the
    class's rows is the recorded one: relative errors decide the shape, which
    is all that rescaling uses, and sums decide the level. (Held-out sums of
    steps came out 6 to 11 points nearer than without the scaling.)
    """
    times = rows["time_s"].to_numpy(np.float64)
    features = rows[list(FEATURES)].to_numpy(np.float64)
    classes, phases = rows["operator_class"], rows["phase"]
    masks: dict[Key, Flags] = {(ANY, ANY): np.ones(len(rows), dtype=bool)}
    for phase in sorted(phases.unique()):
        masks[ANY, phase] = (phases == phase).to_numpy()
    bases = classes.map(base_class)
    for names in (bases, classes):
        for name, phase in sorted(set(zip(names, phases, strict=True))):
            masks[str(name), str(phase)] = ((names == name) & (phases == phase)).to_numpy()
    fitted: dict[Key, ClassCurve] = {}
    for key in sorted(masks, key=_widest_first):
        mask = masks[key]
        fitted[key] = _fit_one(key, features[mask], times[mask], form, fitted)
    return fitted


def _widest_first(key: Key) -> tuple[int, Key]:
    """Order keys so that every class comes after those that it may borrow from."""
    name, phase = key
    return (0 if phase == ANY else 1 if name == ANY else 2 if "/" not in name else 3), key


def _fit_one(
    key: Key, features: Floats, times: Floats, form: str, wider: Mapping[Key, ClassCurve]
) -> ClassCurve:
    """Fit one class, or borrow the shape of a wider one."""
    shape_of = "own"
    if key[0] in HOST_ONLY:
        curve = fit_curve("constant", features, times)
    elif len(wider) and (len(times) < MIN_ROWS or len(np.unique(features, axis=0)) < 2):
        lender = next(k for k in lookup_order(*key) if k in wider)
        curve, shape_of = wider[lender].curve, f"{lender[0]} {lender[1]}"
    else:
        curve = fit_curve(form, features, times)
    guessed_s = float(curve.predict(features).sum())
    if guessed_s > 0:
        curve = curve.scaled(float(times.sum()) / guessed_s)
    return ClassCurve(
        curve,
        tuple(features.min(axis=0).tolist()),
        tuple(features.max(axis=0).tolist()),
        len(times),
        FEATURES[driver_of(features, times)],
        shape_of,
    )


def find_class(
    curves: Mapping[Key, ClassCurve], operator_class: str, phase: str
) -> tuple[Key, ClassCurve]:
    """Return the curve of a class, or of the narrowest wider class that was fitted.

    Raises
    ------
    InputError
        When not even the curve of everything is there.
    """
    for key in lookup_order(operator_class, phase):
        if key in curves:
            return key, curves[key]
    raise InputError(
        f"the cost model has no curve for {operator_class} in {phase}", fix="fit the model again"
    )


def class_positions(rows: pd.DataFrame) -> Iterator[tuple[str, str, Positions]]:
    """Yield every class and phase of rows, in order, with the positions of its rows."""
    names = rows["operator_class"].to_numpy(dtype=object)
    phases = rows["phase"].to_numpy(dtype=object)
    for name, phase in sorted(set(zip(names, phases, strict=True))):
        yield str(name), str(phase), np.flatnonzero((names == name) & (phases == phase))


def predict_rows(curves: Mapping[Key, ClassCurve], rows: pd.DataFrame) -> Floats:
    """Predict the time [s] of rows that carry ``operator_class``, ``phase`` and the features."""
    features = rows[list(FEATURES)].to_numpy(np.float64)
    result = np.zeros(len(rows))
    for operator_class, phase, positions in class_positions(rows):
        _, found = find_class(curves, operator_class, phase)
        result[positions] = found.curve.predict(features[positions])
    return result


def rescale_times(
    time_s: Floats, predicted_s: Floats, target_s: Floats, unchanged: Flags
) -> Floats:
    """Scale recorded times by the ratio of two predictions.

    Parameters
    ----------
    time_s, predicted_s, target_s : ndarray
        Recorded time, prediction at the recorded and at the target size [s].
    unchanged : ndarray of bool
        Operators whose size did not change; they keep the recorded time exactly.

    Notes
    -----
    Where the prediction at the recorded size is next to nothing, a ratio to it
    means nothing and the predicted difference is added instead.
    """
    usable = predicted_s > NOTHING_S
    ratio = np.divide(target_s, predicted_s, out=np.ones_like(time_s), where=usable)
    scaled = np.where(usable, time_s * ratio, np.maximum(time_s + (target_s - predicted_s), 0.0))
    return np.asarray(np.where(unchanged, time_s, scaled), np.float64)
