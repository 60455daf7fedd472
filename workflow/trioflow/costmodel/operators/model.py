"""The cost model of operators: how long one takes that was not measured, or not at this size.

`OperatorCostModel.predict` gives times of operators, `OperatorCostModel.rescale` those of operators whose time is known
at another size: monotone in the size, and at most in proportion to it.

Every model of trioflow's own rescales through :func:`rescale_rows`. A model's curve says how a time
changes; whatever it says, twice the batch takes neither less time nor more than twice. Where a data
sheet bounds times, no operator is faster than its roofline, and none is lost below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field, structs

from trioflow.base.columns import Columns, as_texts
from trioflow.base.errors import InputError
from trioflow.base.provenance import stamp, write_json
from trioflow.costmodel.features import (
    FEATURES,
    SHIPPED_MODELS,
    Floats,
    RowCostModel,
    Rows,
    base_class,
    feature_matrix,
    from_json,
    read_model_file,
    to_json,
)
from trioflow.costmodel.new_gpu.rules import CARRY_OVER, TENSOR_CLASSES, device_rates, roofline_s
from trioflow.costmodel.operators.curves import (
    ANY,
    CALLS,
    FLOP_TOLERANCE,
    NOTHING_S,
    PRODUCTS,
    ClassCurve,
    Flags,
    Key,
    Positions,
    class_positions,
    find_class,
    load_small_kernels,
    predict_rows,
    read_columns,
    recorded_times,
    scale_products,
    sized_rows,
)
from trioflow.costmodel.uncertainty import WIDEST_FACTOR, Band, StepBand, find_band, log_distance
from trioflow.hardware.machine import FALLBACK_PRECISION, DeviceSheet, find_sheet

RowTimes = Callable[[Columns], Floats]
"""Predicts the time [s] of rows as ``curves.sized_rows`` returns them."""

_FAR = 16.0
"""Growth at which it is decided which dimensions of a product grow: far enough to tell them apart."""

_MOST_DOUBLINGS = 20
"""Doublings of a size that are followed; what lies beyond takes the last one's time."""


class Resizing(Struct, frozen=True):
    """Rows at two sizes."""

    # As ``curves.sized_rows``, at the recorded and at the wanted size; the second's products are
    # still those of the first.
    rows: Columns
    resized: Columns
    unchanged: Flags  # Rows of equal size
    recorded_s: Floats  # Recorded times [s]


def resize_rows(operators: Columns, target: Columns, *, products: bool) -> Resizing:
    """Read recorded operators and their other sizes; TableError where columns or values do not fit."""
    rows = sized_rows(operators, products=products)
    after = feature_matrix(target)
    resized = rows.assign(**dict(zip(FEATURES, after.T, strict=True)))
    unchanged = (read_columns(rows, FEATURES) == after).all(axis=1)
    return Resizing(rows, resized, unchanged, recorded_times(operators))


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


def _both(resizing: Resizing, at: Positions) -> list[Columns]:
    """Return some rows at both sizes, with the products of each."""
    rows, resized = resizing.rows.take(at), resizing.resized.take(at)
    if PRODUCTS[0] in rows:
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
        changes = np.where(np.isnan(curve[:, step]), change, curve[:, step])
        within = np.clip(changes, change * np.minimum(factor, 1), change * np.maximum(factor, 1))
        change = np.where(np.isnan(curve[:, step]), change, within)
    return np.asarray(change, np.float64)


class _Line(Struct, frozen=True):
    """Rows at any growth: sizes and products change in proportion with it."""

    rows: Columns  # At the recorded size
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

    def ask(self, number: Positions, sizes: Floats) -> Columns:
        """Return some of the rows, each at a growth."""
        line = np.maximum(self.first[number] + (sizes - 1)[:, None] * self.slope[number], 0.0)
        whole = slice(len(FEATURES), len(FEATURES) + 4)  # batch, m, n and k of a product
        line[:, whole] = np.where(self.first[number, whole] > 0, np.maximum(line[:, whole].round(), 1.0), 0.0)
        return self.rows.take(number).assign(**dict(zip(self.names, line.T, strict=True)))


def _on_line(resizing: Resizing, at: Positions, growth: Floats) -> _Line:
    """Return the line on which rows lie at the recorded and at the wanted growth."""
    names = list(FEATURES)
    rows = resizing.rows.take(at)
    first, last = (read_columns(each, names) for each in (rows, resizing.resized.take(at)))
    slope, wanted = (last - first) / (growth - 1)[:, None], np.empty((len(first), 0))
    if PRODUCTS[0] in rows:
        far = np.maximum(first + (_FAR - 1) * slope, 0.0)
        products = read_columns(rows, PRODUCTS)
        grown = scale_products(products, first, far)
        wanted = scale_products(products, first, last)[:, :4]
        names = [*names, *PRODUCTS]
        first = np.hstack([first, products])
        slope = np.hstack([slope, (grown - products) / (_FAR - 1)])
    return _Line(rows, names, first, slope, wanted)


def with_times(prices: Columns, time_s: Floats) -> Columns:
    """Return predictions with other times, their intervals as wide in relation to them as before."""
    ratio = time_s / np.maximum(prices["time_s"], NOTHING_S)
    return prices.assign(time_s=time_s, low_s=prices["low_s"] * ratio, high_s=prices["high_s"] * ratio)


def roofline_times(rows: Rows, sheet: DeviceSheet, precision: str) -> Floats:
    """Return the least time that a sheet allows rows [s]; all but products runs on vector units."""
    flop, read, write = read_columns(rows, FEATURES).T
    return roofline_s(flop, read + write, device_rates(rows, sheet, precision), CARRY_OVER)


def bound_times(
    time_s: Floats, launch_s: Floats, rows: Columns, sheet: DeviceSheet, precisions: Mapping[str, str]
) -> Floats:
    """Return predicted times inside the bounds of a data sheet [s].

    Between the roofline (of the fastest precision where ``precisions`` lacks the class) and a
    launch, or ``WIDEST_FACTOR`` times the roofline.
    """
    fastest = max(sheet.peak_flop_per_s, key=sheet.peak_flop_per_s.__getitem__)
    names = as_texts(rows["operator_class"])
    bases = map(base_class, names.words)
    ran = [precisions.get(base, fastest) if base in TENSOR_CLASSES else FALLBACK_PRECISION for base in bases]
    least = np.zeros(len(time_s))
    for precision in sorted(set(ran)):
        at = np.array([one == precision for one in ran])[names.codes]
        least[at] = roofline_times(rows.take(at), sheet, precision)
    return np.clip(time_s, least, launch_s + WIDEST_FACTOR * least)


KIND = "operator_cost_model"
FORMAT = 1


class _ClassEntry(Struct, frozen=True):
    """One class and phase of a file; parts that it borrows from a wider class are null."""

    operator_class: str
    phase: str
    curve: ClassCurve | None
    predict_band: Band | None
    rescale_band: Band | None


class OperatorCostModel(RowCostModel, Struct, frozen=True, dict=True):
    """Curves of every class and phase of operators on one device."""

    method: str  # Name in ``METHODS``
    device_name: str
    curves: Mapping[Key, ClassCurve]  # With the wider classes that stand in for unknown ones
    # Spread of held-out residuals of :meth:`predict` and :meth:`rescale`.
    predict_bands: Mapping[Key, Band]
    rescale_bands: Mapping[Key, Band]
    steps: Mapping[str, StepBand]  # Held-out error of step sums, for ``predict`` and ``rescale``
    facts: Mapping[str, Any] = field(default_factory=dict)  # Traces that it was fitted to
    products: bool = False  # With matrix products and kinds (``curves.sized_rows``)
    shipped: bool = False  # With trioflow: the device is a shipped sheet's, whatever sheets a user has

    @cached_property
    def sheet(self) -> DeviceSheet | None:
        """The data sheet of the device that it was fitted on; None without one."""
        return find_sheet(self.device_name, own=not self.shipped)

    def price(self, operators: Columns) -> Columns:
        """Predict operators.

        ``extrapolated``: outside the fitted sizes, or a class never fitted; on a GPU with a sheet inside its bounds.
        """
        rows = sized_rows(operators, products=self.products)
        outside = self._outside(rows)
        time_s = self._bounded(rows, self.row_times(rows), outside)
        return self._between(rows, time_s, self.predict_bands, np.ones(len(time_s)), outside)

    def reprice(self, operators: Columns, target: Columns) -> Columns:
        """Return recorded time x predict(target) / predict(recorded), inside the bounds of `rescale_rows`.

        Of unchanged size exactly the recorded time, without an interval. The interval grows with that ratio's logarithm,
        from captures at two batches by models that did not see the workload.
        """
        sizing = resize_rows(operators, target, products=self.products)
        time_s = rescale_rows(sizing, self.row_times)
        distances = np.where(sizing.unchanged, 0.0, log_distance(sizing.recorded_s, time_s))
        outside = self._outside(sizing.resized) & ~sizing.unchanged
        prices = self._between(sizing.rows, time_s, self.rescale_bands, distances, outside)
        ends = {end: np.where(sizing.unchanged, time_s, prices[end]) for end in ("low_s", "high_s")}
        return prices.assign(**ends)

    def row_times(self, rows: Rows) -> Floats:
        """Predict the time [s] of rows as `sized_rows` returns them."""
        return predict_rows(self.curves, rows)

    def in_steps(self) -> OperatorCostModel:
        """Return the model of operators as they queue up in a step, where classes were timed call by call.

        The constant of their curves is what a timer and a launch take where nothing else runs: 7 to 100 us. In a step
        the launch is the host's, and no small kernel takes longer than public profiles show
        (``curves.load_small_kernels``).
        """
        timed = {name for name, how in dict(self.facts.get("timed") or {}).items() if how == CALLS}
        if not timed:
            return self
        known = load_small_kernels()
        curves = dict(self.curves)
        for (name, phase), curve in self.curves.items():
            if name in timed or name == ANY:
                curves[name, phase] = curve.queued(known.get(base_class(name), known[ANY]))
        return structs.replace(self, curves=curves)

    def step_interval(self, kind: str = "rescale", distance: float | None = None) -> tuple[float, float]:
        """Return factors below and above 1: the 80 % interval of a step's compute.

        ``kind``: ``rescale`` or ``predict``, else InputError; ``distance``: log of rescaled over
        recorded compute (``StepBand.half_at``).
        """
        half = self._step(kind).half_at(distance)
        return float(np.exp(-half)), float(np.exp(half))

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say in words what :meth:`step_interval` was estimated from."""
        band = self._step(kind)
        return f"{band.basis}; {band.workloads} workloads, {band.steps} steps"

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Write JSON, equal bytes for equal models; digests of ``inputs`` are kept."""
        curves, predicted, rescaled = self.curves, self.predict_bands, self.rescale_bands
        entries = [
            _ClassEntry(*key, curves.get(key), predicted.get(key), rescaled.get(key))
            for key in sorted({*curves, *predicted, *rescaled})
        ]
        write_json(
            path,
            {
                "kind": KIND,
                "format": FORMAT,
                "method": self.method,
                "device_name": self.device_name,
                "features": list(FEATURES),
                "classes": to_json(entries),
                "steps": to_json(self.steps),
                "facts": dict(self.facts),
                "products": self.products,
                "provenance": stamp(inputs, device_name=self.device_name, method=self.method),
            },
        )

    def _bounded(self, rows: Columns, time_s: Floats, outside: Flags) -> Floats:
        """Keep times outside the fitted range inside the bounds of the device's sheet, if it has one."""
        sheet = self.sheet if outside.any() else None
        if sheet is None:
            return time_s
        beyond = rows.take(outside)
        nothing = beyond.assign(**{name: np.zeros(beyond.rows) for name in (*FEATURES, *PRODUCTS) if name in rows})
        precisions = dict(self.facts.get("precisions") or {})
        launch_s = self.row_times(nothing)
        result = time_s.copy()
        result[outside] = bound_times(time_s[outside], launch_s, beyond, sheet, precisions)
        return result

    def _step(self, kind: str) -> StepBand:
        if kind not in self.steps:
            raise InputError(f"unknown kind of step interval {kind!r}", fix=f"use {' or '.join(self.steps)}")
        return self.steps[kind]

    def _between(
        self, rows: Columns, time_s: Floats, bands: Mapping[Key, Band], distances: Floats, outside: Flags
    ) -> Columns:
        """Return a prediction: times with the interval of their class at distances from what was recorded."""
        low, high = np.ones(len(time_s)), np.ones(len(time_s))
        for operator_class, phase, positions in class_positions(rows):
            low[positions], high[positions] = find_band(bands, operator_class, phase).factors(distances[positions])
        return Columns({"time_s": time_s, "low_s": time_s * low, "high_s": time_s * high, "extrapolated": outside})

    def _outside(self, rows: Columns) -> Flags:
        """Return which rows lie outside the fitted range of their class."""
        features = read_columns(rows, FEATURES)
        outside = np.ones(len(features), dtype=bool)
        for operator_class, phase, positions in class_positions(rows):
            key, curve = find_class(self.curves, operator_class, phase)
            if key == (operator_class, phase):
                outside[positions] = ~curve.covers(features[positions])
        return outside


def load_operator_model(path: str | Path) -> OperatorCostModel:
    """Read what :meth:`OperatorCostModel.save` wrote; InputError where it is missing, incomplete or another file."""
    known = {"format": FORMAT, "features": list(FEATURES)}
    model = read_model_file(path, KIND, "an operator cost model", known, _model)
    return structs.replace(model, shipped=Path(path).resolve().is_relative_to(SHIPPED_MODELS))


def _model(content: dict[str, Any]) -> OperatorCostModel:
    """Return a file's model; of a class, what is null is borrowed from a wider one."""
    entries = {(one.operator_class, one.phase): one for one in from_json(content["classes"], list[_ClassEntry])}
    curves = {key: one.curve for key, one in entries.items() if one.curve}
    if (ANY, ANY) not in curves:
        raise ValueError("the curve of all operators is missing")
    return OperatorCostModel(
        str(content["method"]),
        str(content["device_name"]),
        curves,
        {key: one.predict_band for key, one in entries.items() if one.predict_band},
        {key: one.rescale_band for key, one in entries.items() if one.rescale_band},
        {kind: from_json(content["steps"][kind], StepBand) for kind in ("predict", "rescale")},
        dict(content["facts"]),
        bool(content.get("products", False)),
    )


@cache
def load_shipped_models() -> dict[str, OperatorCostModel]:
    """Return the models that ship, a GPU's by the name of its sheet."""
    return {path.parent.name: load_operator_model(path) for path in sorted(SHIPPED_MODELS.glob("*/operators.json"))}
