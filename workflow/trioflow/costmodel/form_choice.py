"""Which form a class of operators gets: what leaving whole workloads out says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from trioflow.costmodel.class_curves import NOTHING_S, Recipe, fit_shape, set_level
from trioflow.costmodel.features import FEATURES, Floats
from trioflow.costmodel.least_squares import choose_least
from trioflow.costmodel.products import PRODUCTS, work_matrix

Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

CLEARLY = 0.8
"""A form replaces a method's first one when it misses a fifth less: with three or four workloads,
smaller differences are chance."""

FEWEST = 4
"""A class with fewer distinct operators keeps the first form."""

IDENTITY = ("operator_class", *FEATURES, *PRODUCTS)
"""What makes two operators the same work."""


@dataclass(frozen=True)
class ClassRows:
    """The distinct operators of one class and phase.

    Attributes
    ----------
    work : ndarray
        Shape (n, 11), features and products.
    times : ndarray
        Shape (n,), [s].
    counts : ndarray
        Shape (n,), how often each occurs in its trace.
    groups : ndarray
        Shape (n,), what is left out together.
    pairs : ndarray
        Shape (p, 2), places of one operator at two batches.
    """

    work: Floats
    times: Floats
    counts: Floats
    groups: npt.NDArray[np.object_] | Indices
    pairs: Indices

    @classmethod
    def of(cls, rows: pd.DataFrame, pairs: Indices) -> ClassRows:
        """Take them from rows that have ``row``, ``count`` and ``workload``.

        Parameters
        ----------
        rows : DataFrame
            Of one class.
        pairs : ndarray
            Shape (p, 2), values of ``row``, of any class.
        """
        place = np.full(int(max(rows["row"].max(), pairs.max(initial=0))) + 1, -1, dtype=np.int64)
        place[rows["row"].to_numpy(np.int64)] = np.arange(len(rows))
        mine = place[pairs] if len(pairs) else np.zeros((0, 2), dtype=np.int64)
        groups = rows["workload"].to_numpy(dtype=object)
        return cls(
            work_matrix(rows),
            rows["time_s"].to_numpy(np.float64),
            rows["count"].to_numpy(np.float64),
            groups if len(set(groups)) > 1 else np.arange(len(rows)) % 2,
            mine[(mine >= 0).all(axis=1)],
        )


def choose_form(
    rows: ClassRows, alone: Floats, alone_s: Floats, forms: Sequence[str], sm: float
) -> str:
    """Return the form that clearly misses least when workloads are left out, else the first.

    Among those that do, one that is hardly better than an earlier one is not taken.

    Parameters
    ----------
    rows : ClassRows
        What is judged; of one workload, alternate operators are left out.
    alone, alone_s : ndarray
        Work, shape (m, 11), and times [s] of operators measured alone; those
        equal to a judged one do not take part.
    forms : sequence of str
        Names in ``curves.FORMS``.
    sm : float
        Multiprocessors of the device.

    Notes
    -----
    Judged are the held-out times themselves and those rescaled between
    batches: both as absolute errors over the time, and their mean.
    """
    if len(rows.times) < FEWEST:
        return forms[0]
    scores = []
    folds = [_fold(rows, alone, alone_s, group) for group in sorted(set(rows.groups))]
    for form in forms:
        predicted = np.zeros(len(rows.times))
        recipe = Recipe(form, {}, sm, distinct=True)
        for out, work, times, counts, flags in folds:
            curve = fit_shape(form, work, times, flags, recipe)
            level = set_level(curve, work, times, flags, counts)
            predicted[out] = level.predict(rows.work[out])
        scores.append(_score(rows, predicted))
    best = choose_least(scores)
    return forms[best] if scores[best] < CLEARLY * scores[0] else forms[0]


Fold = tuple[Flags, Floats, Floats, Floats, Flags]


def _fold(rows: ClassRows, alone: Floats, alone_s: Floats, group: object) -> Fold:
    """Return who is left out, and work, times, counts and kind of what remains."""
    out = np.asarray(rows.groups == group)
    seen = set(map(tuple, rows.work[out].tolist()))
    new = np.array([tuple(work) not in seen for work in alone.tolist()], dtype=bool)
    work = np.vstack([rows.work[~out], alone[new]]) if new.any() else rows.work[~out]
    times = np.concatenate([rows.times[~out], alone_s[new]])
    counts = np.concatenate([rows.counts[~out], np.ones(int(new.sum()))])
    flags = np.arange(len(times)) >= int((~out).sum())
    return out, work, times, counts, flags


def _score(rows: ClassRows, predicted: Floats) -> float:
    """Return the mean of both errors: of predicted and of rescaled times."""
    weights = rows.counts
    missed = np.abs(predicted - rows.times)
    error = float(np.sum(missed * weights) / np.sum(rows.times * weights))
    if not len(rows.pairs):
        return error
    recorded, target = rows.pairs.T
    ratio = predicted[target] / np.maximum(predicted[recorded], NOTHING_S)
    missed = np.abs(rows.times[recorded] * ratio - rows.times[target])
    shares = weights[target]
    return (error + float(np.sum(missed * shares) / np.sum(rows.times[target] * shares))) / 2
