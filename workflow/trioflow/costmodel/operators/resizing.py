"""Recorded operators at other sizes: monotone in the size, and at most in proportion to it.

Every model of trioflow's own rescales through :func:`rescale_rows`. A model's curve says how a time
changes; whatever it says, twice the batch takes neither less time nor more than twice. Where a data
sheet bounds times, no operator is faster than its roofline, and none is lost below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from trioflow.base.errors import TableError
from trioflow.costmodel.features import FEATURES, Floats, base_class, feature_matrix
from trioflow.costmodel.intervals import WIDEST_FACTOR
from trioflow.costmodel.new_gpu.rules import CARRY_OVER, TENSOR_CLASSES, device_rates, roofline_s
from trioflow.costmodel.operators.class_curves import NOTHING_S, Flags, Positions, recorded_times, sized_rows
from trioflow.costmodel.operators.products import FLOP_TOLERANCE, PRODUCTS, read_columns, scale_products
from trioflow.hardware.device_sheet import FALLBACK_PRECISION, DeviceSheet

RowTimes = Callable[[pd.DataFrame], Floats]
"""Predicts the time [s] of rows as ``rows.sized_rows`` returns them."""

_FAR = 16.0
"""Growth at which it is decided which dimensions of a product grow: far enough to tell them apart."""

_MOST_DOUBLINGS = 20
"""Doublings of a size that are followed; what lies beyond takes the last one's time."""


@dataclass(frozen=True)
class Resizing:
    """Rows at two sizes."""

    # As ``rows.sized_rows``, at the recorded and at the wanted size; the second's products are
    # still those of the first.
    rows: pd.DataFrame
    resized: pd.DataFrame
    unchanged: Flags  # Rows of equal size
    recorded_s: Floats  # Recorded times [s]


def resize_rows(operators: pd.DataFrame, target: pd.DataFrame, *, products: bool) -> Resizing:
    """Read recorded operators and their other sizes; TableError where columns, values or rows do not fit."""
    if not operators.index.equals(target.index):
        raise TableError(
            "recorded and target operators have different rows",
            fix="give the same operators in the same order, with other sizes",
        )
    rows = sized_rows(operators, products=products)
    after = feature_matrix(target)
    resized = rows.assign(**dict(zip(FEATURES, after.T, strict=True)))
    before = read_columns(rows, FEATURES)
    recorded_s: Floats = np.asarray(recorded_times(operators), dtype=np.float64)
    return Resizing(rows, resized, np.asarray((before == after).all(axis=1)), recorded_s)


def rescale_rows(resizing: Resizing, row_times: RowTimes, *, waves: bool = True) -> Floats:
    """Return the times at the wanted sizes [s]; unchanged rows keep the recorded time exactly.

    A row grows by the size (FLOPs, bytes) that changes most. The curve is evaluated at the wanted
    size and its halves (or doublings) to the recorded one; from one to the next the time may
    neither fall nor more than double. ``waves``: whether its steps in between are trusted, as on
    the GPU fitted on; else times are interpolated. A row with sizes that grow and shrink stays
    between the smallest and largest ratio; one without work before gets the difference added.
    """
    before, after = (read_columns(frame, FEATURES) for frame in (resizing.rows, resizing.resized))
    ratio = np.divide(after, before, out=np.ones_like(after), where=before > 0)
    low, high = ratio.min(axis=1), ratio.max(axis=1)
    known = ~resizing.unchanged & (before > 0).any(axis=1)
    mixed = known & ((low < 1) == (high > 1))
    change = np.ones(len(before))
    at = np.flatnonzero(known & ~mixed)
    if len(at):
        growth = np.where(high[at] > 1, high[at], low[at])
        growth = np.clip(growth, 2.0**-_MOST_DOUBLINGS, 2.0**_MOST_DOUBLINGS)
        line = _on_line(resizing, at, growth)
        mixed[at] = line.misses(growth)
        change[at] = (_follow if waves else _interpolate)(line, growth, row_times)
    at = np.flatnonzero(mixed)
    if len(at):
        old, new = (row_times(frame) for frame in _both(resizing, at))
        change[at] = np.clip(new / np.maximum(old, NOTHING_S), low[at], high[at])
    time_s = resizing.recorded_s * change
    at = np.flatnonzero(~resizing.unchanged & ~known)
    if len(at):
        old, new = (row_times(frame) for frame in _both(resizing, at))
        time_s[at] += np.maximum(new - old, 0.0)
    return np.asarray(time_s, np.float64)


def _both(resizing: Resizing, at: Positions) -> list[pd.DataFrame]:
    """Return some rows at both sizes, with the products of each."""
    rows, resized = (frame.iloc[at].reset_index(drop=True) for frame in (resizing.rows, resizing.resized))
    if PRODUCTS[0] in rows.columns:
        sizes = (read_columns(frame, FEATURES) for frame in (rows, resized))
        products = scale_products(read_columns(rows, PRODUCTS), *sizes)
        resized = resized.assign(**dict(zip(PRODUCTS, products.T, strict=True)))
    return [rows, resized]


def _interpolate(line: _Line, growth: Floats, row_times: RowTimes) -> Floats:
    """Return the change of times, on a straight line from one doubling of a size to the next."""
    octave = np.floor(np.abs(np.log2(growth)) + 1e-9) * np.where(growth >= 1, 1, -1)
    marks = [2.0**octave, 2.0 ** (octave + np.where(growth >= 1, 1, -1))]
    near, far = (_follow(line, mark, row_times) for mark in marks)
    share = (growth - marks[0]) / (marks[1] - marks[0])
    return np.asarray(near + share * (far - near), np.float64)


def _follow(line: _Line, growth: Floats, row_times: RowTimes) -> Floats:
    """Return the change of times of rows whose sizes all grow, or all shrink."""
    up = growth >= 1
    # The wanted growth, and its halves down to the last one that grows at all (or the reverse).
    doublings = np.floor(np.abs(np.log2(growth)) + 1e-9).astype(int)
    number = np.repeat(np.arange(len(growth)), doublings + 2)
    place = np.concatenate([np.arange(count + 2) for count in doublings])
    halved = np.maximum(doublings[number] + 1 - place, 0)
    sizes = np.where(up[number], growth[number] / 2.0**halved, growth[number] * 2.0**halved)
    sizes = np.where(place == 0, 1.0, sizes)
    asked_s = row_times(line.ask(number, sizes))
    curve = np.full((len(growth), place.max() + 1), np.nan)
    curve[number, place] = asked_s / np.maximum(asked_s[place == 0], NOTHING_S)[number]
    first = np.where(up, growth / 2.0**doublings, growth * 2.0**doublings)
    change = np.ones(len(growth))
    for step in range(1, curve.shape[1]):
        factor = first if step == 1 else np.where(up, 2.0, 0.5)
        said = np.where(np.isnan(curve[:, step]), change, curve[:, step])
        within = np.clip(said, change * np.minimum(factor, 1), change * np.maximum(factor, 1))
        change = np.where(np.isnan(curve[:, step]), change, within)
    return np.asarray(change, np.float64)


@dataclass(frozen=True)
class _Line:
    """Rows at any growth: sizes and products change in proportion with it."""

    rows: pd.DataFrame  # At the recorded size
    names: list[str]  # The columns that change
    first: Floats  # Shape (rows, columns): their values, and what a growth by 1 adds
    slope: Floats
    last: Floats  # Batch, m, n and k of the wanted products, shape (rows, 4); none where there are no products

    def misses(self, growth: Floats) -> Flags:
        """Return which products are on no line: several dimensions change, or they do not give the FLOPs."""
        sizes = slice(len(FEATURES), len(FEATURES) + 4)
        if self.first.shape[1] <= len(FEATURES):
            return np.zeros(len(growth), dtype=bool)
        line = self.first + (growth - 1)[:, None] * self.slope
        flop, known = line[:, 0] / np.maximum(self.first[:, 0], 1.0), self.first[:, 3] > 0
        sized = np.maximum(line[:, sizes].round(), 1.0) / np.maximum(self.first[:, sizes], 1.0)
        far = np.abs(sized.prod(axis=1) / np.maximum(flop, 1e-12) - 1) > FLOP_TOLERANCE
        slope = self.slope[:, sizes]
        far |= (slope < 0).any(axis=1) & (slope > 0).any(axis=1)
        # Few experts of a larger batch, each cut, are fewer problems too: the line grows by one dimension.
        there = np.maximum(line[:, sizes].round(), 1.0) / np.maximum(self.last, 1.0)
        far |= (np.abs(np.log(there)) > FLOP_TOLERANCE).any(axis=1)
        return np.asarray(known & (self.first[:, 0] > 0) & far)

    def ask(self, number: Positions, sizes: Floats) -> pd.DataFrame:
        """Return some of the rows, each at a growth."""
        line = np.maximum(self.first[number] + (sizes - 1)[:, None] * self.slope[number], 0.0)
        whole = slice(len(FEATURES), len(FEATURES) + 4)  # batch, m, n and k of a product
        line[:, whole] = np.where(self.first[number, whole] > 0, np.maximum(line[:, whole].round(), 1.0), 0.0)
        rows = self.rows.iloc[number].reset_index(drop=True)
        return rows.assign(**dict(zip(self.names, line.T, strict=True)))


def _on_line(resizing: Resizing, at: Positions, growth: Floats) -> _Line:
    """Return the line on which rows lie at the recorded and at the wanted growth."""
    names = list(FEATURES)
    rows = resizing.rows.iloc[at].reset_index(drop=True)
    first, last = (read_columns(frame, names) for frame in (rows, resizing.resized.iloc[at]))
    slope, wanted = (last - first) / (growth - 1)[:, None], np.empty((len(first), 0))
    if PRODUCTS[0] in rows.columns:
        far = np.maximum(first + (_FAR - 1) * slope, 0.0)
        products = read_columns(rows, PRODUCTS)
        grown = scale_products(products, first, far)
        wanted = scale_products(products, first, last)[:, :4]
        names = [*names, *PRODUCTS]
        first = np.hstack([first, products])
        slope = np.hstack([slope, (grown - products) / (_FAR - 1)])
    return _Line(rows, names, first, slope, wanted)


def with_times(found: pd.DataFrame, time_s: Floats) -> pd.DataFrame:
    """Return predictions with other times, their intervals as wide in relation to them as before."""
    middle = np.maximum(found["time_s"].to_numpy(np.float64), NOTHING_S)
    ends = {end: time_s * found[end].to_numpy(np.float64) / middle for end in ("low_s", "high_s")}
    return found.assign(time_s=time_s, **ends)


def roofline_times(rows: pd.DataFrame, sheet: DeviceSheet, precision: str) -> Floats:
    """Return the least time that a sheet allows rows [s]; all but products runs on vector units."""
    flop, read, write = read_columns(rows, FEATURES).T
    sized = rows if PRODUCTS[0] in rows.columns else rows.assign(**dict.fromkeys(PRODUCTS, 0.0))
    return roofline_s(flop, read + write, device_rates(sized, sheet, precision), CARRY_OVER)


def bound_times(
    time_s: Floats, launch_s: Floats, rows: pd.DataFrame, sheet: DeviceSheet, precisions: Mapping[str, str]
) -> Floats:
    """Return predicted times inside the bounds of a data sheet [s].

    Between the roofline (of the fastest precision where ``precisions`` lacks the class) and a
    launch, or ``WIDEST_FACTOR`` times the roofline.
    """
    bases = rows["operator_class"].map(base_class)
    fastest = max(sheet.peak_flop_per_s, key=sheet.peak_flop_per_s.__getitem__)
    ran = bases.map(lambda name: precisions.get(name, fastest))
    ran = ran.where(bases.isin(TENSOR_CLASSES), FALLBACK_PRECISION)
    least = np.zeros(len(rows))
    for precision in sorted(set(ran)):
        at = (ran == precision).to_numpy()
        least[at] = roofline_times(rows[at], sheet, precision)
    return np.asarray(np.clip(time_s, least, launch_s + WIDEST_FACTOR * least), np.float64)
