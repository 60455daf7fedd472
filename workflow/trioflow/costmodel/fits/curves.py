"""Fit the curves of operators: collect the rows, fit each form, and choose one for each class of operators.

Fits are least squares by scikit-learn and SciPy. Rows are operators of all traces, and pairs of batches
(`collect_rows`, `pair_rows`). `fit_class_curves` is the door.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.errors import InputError, TableError, how_to_install
from trioflow.costmodel.features import FEATURES, HOST_ONLY, Floats, TraceLike, base_class
from trioflow.costmodel.operators.curves import (
    ANY,
    CALLS,
    KERNELS,
    MOST_SPLITS,
    NOTHING_S,
    PRODUCTS,
    SIZES,
    SPLITS,
    TILE_SETS,
    ClassCurve,
    Curve,
    Flags,
    Key,
    evaluate_roofline,
    find_class,
    pad_flop,
    problem_sizes,
    recorded_times,
    sized_rows,
    tile_costs,
    work_matrix,
)

Indices = NDArray[np.int64]

_CLEARLY_LESS = 0.999
"""A candidate replaces an earlier, simpler one only when it misses less by more than this: what
differs by less is decided by the data's noise."""

_SAME = 1 - 1e-9
"""Cosine of the angle above which two columns say the same."""


def choose_least(misses: Sequence[float]) -> int:
    """Return the position of the least miss; a later, less simple one must be below ``_CLEARLY_LESS`` of the best."""
    best = 0
    for place, miss in enumerate(misses):
        if miss < _CLEARLY_LESS * misses[best]:
            best = place
    return best


def solve_nonnegative(columns: Floats, target: Floats) -> tuple[Floats, float]:
    """Return the non-negative coefficients that miss a target least, and the root of the squares.

    Scikit-learn's estimator on the triangle of columns (n, p; p small) and target. Of columns that say the same the first
    one alone takes part: which one it gets decides how the fit goes on beyond what was measured. Raises InputError without
    scikit-learn.
    """
    try:
        from sklearn import config_context
        from sklearn.linear_model import LinearRegression
    except ImportError:
        raise InputError("fits need scikit-learn", fix=how_to_install("fit")) from None
    triangle = np.asarray(np.linalg.qr(np.column_stack([columns, target]), mode="r"))
    table, goal = triangle[:, :-1], triangle[:, -1]
    sizes = np.linalg.norm(table, axis=0)
    units = table / np.where(sizes > 0, sizes, 1.0)
    repeated = np.triu(units.T @ units > _SAME, 1).any(axis=0)
    units = np.where(repeated, 0.0, units)
    with config_context(assume_finite=True, skip_parameter_validation=True):  # a third of the time
        solution = LinearRegression(positive=True, fit_intercept=False).fit(units, goal).coef_
    return np.asarray(solution / np.where(sizes > 0, sizes, 1.0), np.float64), float(
        np.linalg.norm(units @ solution - goal)
    )


def split_groups(groups: NDArray[Any]) -> Iterator[tuple[Indices, Indices]]:
    """Yield what is known and what is left out, group by group: places among ``groups``, one entry a row.

    A lone group is known and left out: it has nothing else to be predicted from. Raises InputError without scikit-learn.
    """
    try:
        from sklearn.model_selection import LeaveOneGroupOut
    except ImportError:
        raise InputError("fits need scikit-learn", fix=how_to_install("fit")) from None
    everything = np.arange(len(groups))
    if len(set(groups.tolist())) < 2:
        yield everything, everything
    else:
        yield from LeaveOneGroupOut().split(everything, groups=groups)


def solve(columns: Floats, target: Floats) -> Floats:
    """Return the coefficients that miss a target least, the shortest of those that nothing decides."""
    return np.asarray(np.linalg.lstsq(columns, target)[0], np.float64)


_EDGE_COSTS = (0.0, 8.0, 32.0)
"""Cost of loading a tile's edges, in multiply-adds an element: small tiles reuse less of them."""

_RESIDENT = (1, 2)
"""Blocks of threads that a multiprocessor runs at a time."""

SHORTEST_S = 1e-6
"""Below a microsecond [s] a profiler's clock decides: weights do not grow any further."""

Option = tuple[int, float, int, int]

Solve = Callable[[Floats], tuple[Floats, float]]
"""Fits non-negative coefficients to columns; returns them and the residual."""


def fit_tiles(work: Floats, sm_count: float, solve: Solve) -> Floats:
    """Choose tiles and fit a time to rows of ``FEATURES`` and ``PRODUCTS``, shape (n, 11).

    Returns constant [s], slopes over padded FLOPs [s/flop] and bytes [s/byte]; multiprocessors,
    tile set, edge cost, most splits, blocks a multiprocessor. Source: S. Lee et al. (NeuSight),
    ASPLOS 2025: time of a tile times waves; here the ragged last wave's utilisation follows from
    counting them.
    """
    sizes = problem_sizes(work)
    data = work[:, 1] + work[:, 2]
    options: list[Option] = []
    fitted: list[Floats] = []
    misses: list[float] = []
    for edge in _EDGE_COSTS:
        for resident in _RESIDENT:
            costs = tile_costs(sizes, sm_count, edge, resident, max(MOST_SPLITS))
            for splits in MOST_SPLITS:
                least = np.minimum.reduce(costs[: SPLITS.index(splits) + 1])
                for number, tiles in enumerate(TILE_SETS):
                    if edge and len(tiles) == 1:
                        continue  # the same for all products: the slope holds it
                    padded = pad_flop(least, tiles, sizes, work)
                    columns = np.column_stack([np.ones(len(work)), padded, data])
                    coefficients, residual = solve(columns)
                    options.append((number, edge, splits, resident))
                    fitted.append(coefficients)
                    misses.append(residual)
    best = choose_least(misses)
    number, edge, splits, resident = options[best]
    return np.array([*fitted[best], sm_count, number, edge, splits, resident], np.float64)


_CACHE_BYTES = tuple(float(2**power) for power in range(22, 28))
"""Sizes [bytes] among which a fit looks for the knee of a cache: 4 to 128 MiB."""

_SAME_CORRELATION = 1e-6
"""Features that correlate with the time as well as this are equal drivers; the earlier is taken."""

_KEPT_CURVES = 10_000
"""Curves that `fit_curve` keeps; each takes some 300 bytes."""

_kept_curves: dict[bytes, Curve] = {}


@dataclass(frozen=True)
class Sample:
    """What a curve is fitted to."""

    # Shape (n, 3), n at least 1: flop [flop], read and written bytes [bytes]; or (n, 11) with the
    # columns ``curves.PRODUCTS``.
    features: Floats
    time_s: Floats  # Shape (n,), recorded times [s]
    # Shape (n,), how much each squared relative error counts; 1 by default.
    weights: Floats | None = None
    sm_count: float = 1.0  # Multiprocessors of the device; 1 where it has none

    @property
    def data(self) -> Floats:
        """Bytes read and written [bytes]."""
        return np.asarray(self.features[:, 1] + self.features[:, 2], np.float64)

    def solve(self, columns: Floats) -> tuple[Floats, float]:
        """Fit non-negative coefficients of columns to the times; return them and the residual."""
        weights = 1.0 / np.maximum(self.time_s, SHORTEST_S)
        if self.weights is not None:
            weights = weights * np.sqrt(self.weights)
        scale = np.max(columns, axis=0, initial=0.0)
        scale[scale == 0] = 1.0
        solution, residual = solve_nonnegative(columns / scale * weights[:, None], self.time_s * weights)
        return solution / scale, residual


def fit_curve(
    form: str, features: Floats, time_s: Floats, weights: Floats | None = None, sm_count: float = 1.0
) -> Curve:
    """Fit one form of ``FORMS`` to operators (:class:`Sample`); the latest ``_KEPT_CURVES`` fits are kept for other folds."""
    given = [features, time_s] if weights is None else [features, time_s, weights]
    digest = hashlib.sha256(f"{form} {sm_count!r} {features.shape}".encode())
    for values in given:
        digest.update(np.asarray(values, np.float64).tobytes())
    key = digest.digest()
    curve = _kept_curves.pop(key, None)
    if curve is None:
        sample = Sample(features, time_s, weights, sm_count)
        curve = Curve(form, tuple(float(value) for value in _FITS[form](sample)))
        if len(_kept_curves) == _KEPT_CURVES:
            del _kept_curves[next(iter(_kept_curves))]
    _kept_curves[key] = curve
    return curve


def driver_of(features: Floats, time_s: Floats) -> int:
    """Return the column that correlates best with the time; the earlier of ties and constants.

    The rule of Li's model (Y. Li, Y. Sun, A. Jog, Path Forward Beyond Simulators, MICRO 2023, known
    to us by its abstract and descriptions of it).
    """
    best, driver = -np.inf, 0
    for column in range(features.shape[1]):
        values = features[:, column]
        if len(values) > 1 and np.ptp(values) > 0 and np.ptp(time_s) > 0:
            correlation = float(np.corrcoef(values, time_s)[0, 1])
            if correlation > best + _SAME_CORRELATION:
                best, driver = correlation, column
    return driver


def _with_constant(columns: Floats) -> Floats:
    return np.hstack([np.ones((len(columns), 1)), columns])


def _fit_constant(sample: Sample) -> Floats:
    return np.array([float(np.median(sample.time_s))])


def _fit_linear(sample: Sample) -> Floats:
    return sample.solve(_with_constant(sample.features[:, :SIZES]))[0]


def _fit_driver(sample: Sample) -> Floats:
    driver = driver_of(sample.features[:, :SIZES], sample.time_s)
    fitted, _ = sample.solve(_with_constant(sample.features[:, [driver]]))
    coefficients = np.zeros(1 + SIZES)
    coefficients[0], coefficients[1 + driver] = fitted
    return coefficients


def _fit_roofline(sample: Sample) -> Floats:
    """Alternate between who is bound by what and a fit of constant, compute and memory slopes."""
    flop, data = sample.features[:, 0], sample.data
    both = _with_constant(np.column_stack([flop, data]))
    current = best = sample.solve(both)[0]
    best_error = np.inf
    for _ in range(20):
        relative = evaluate_roofline(sample.features, current) - sample.time_s
        relative = relative / np.maximum(sample.time_s, SHORTEST_S)
        squares = relative**2 if sample.weights is None else relative**2 * sample.weights
        error = float(np.sum(squares))
        if error >= best_error:
            break
        best, best_error = current, error
        compute = flop * current[1] > data * current[2]
        columns = both.copy()
        columns[~compute, 1] = 0.0
        columns[compute, 2] = 0.0
        current = sample.solve(columns)[0]
    return best


def _fit_bytes(sample: Sample) -> Floats:
    return sample.solve(_with_constant(sample.data[:, None]))[0]


def _fit_cached(sample: Sample) -> Floats:
    """Fit a slope, a knee where a cache overflows, and what is added to the slope above it."""
    fitted, misses = [], []
    for knee in _CACHE_BYTES:
        above = np.maximum(sample.data - knee, 0.0)
        columns = _with_constant(np.column_stack([sample.data, above]))
        coefficients, residual = sample.solve(columns)
        fitted.append(np.append(coefficients, knee))
        misses.append(residual)
    return fitted[choose_least(misses)]


def _fit_tile(sample: Sample) -> Floats:
    return fit_tiles(sample.features, sample.sm_count, sample.solve)


_FITS: dict[str, Callable[[Sample], Floats]] = {
    "constant": _fit_constant,
    "linear": _fit_linear,
    "driver": _fit_driver,
    "roofline": _fit_roofline,
    "bytes": _fit_bytes,
    "cached": _fit_cached,
    "tile": _fit_tile,
}
"""Fits by form; ``overlapped`` is that of the tables that ship, fitted by the evaluation."""


IDENTITY = ["name", "phase", "module", "occurrence"]
"""What shows that operators of two captures of one workload are the same one."""


def collect_rows(traces: Sequence[TraceLike], *, products: bool = False) -> pd.DataFrame:
    """Join the operators of all traces of one device, whatever their order.

    Raises InputError when there is no operator or several devices are mixed. Raises TraceError when
    a trace lacks a fact. Raises TableError when a table lacks a column or a value is out of range.
    """
    frames = []
    ordered = sorted(traces, key=lambda trace: (trace.facts.workload, trace.facts.batch))
    devices = sorted({trace.facts.device_name for trace in ordered})
    if len(devices) > 1:
        raise InputError(
            f"traces of several devices in one fit: {'; '.join(devices)}", fix="fit a model for each device"
        )
    for number, trace in enumerate(ordered):
        frame = trace_rows(trace.operators, products=products)
        frame.insert(0, "workload", trace.facts.workload)
        frame.insert(1, "batch", trace.facts.batch)
        frame.insert(2, "trace", number)
        frame["mode"] = str(trace.facts.mode or "train")
        frame["precision"] = str(trace.facts.precision or "")
        frame["timed"] = CALLS if trace.facts.timer_floor_s is not None else KERNELS
        frames.append(frame)
    if not frames or not sum(len(frame) for frame in frames):
        raise InputError("no operator to fit", fix="give at least one trace with operators")
    return pd.concat(frames, ignore_index=True)


def trace_rows(operators: pd.DataFrame, *, products: bool = False) -> pd.DataFrame:
    """Return the columns that a fit needs of one operator table, rows numbered from 0."""
    needed = ("op_id", "name", "phase", "module", "device_ns", *FEATURES)
    missing = [name for name in needed if name not in operators.columns]
    if missing:
        raise TableError(f"operator table has no column {', '.join(missing)}")
    rows = operators[["op_id", "name", "phase", "module"]].reset_index(drop=True)
    wrong = rows.index[~rows["phase"].isin(tables.PHASES)]
    if len(wrong):
        raise TableError(
            f"{rows['phase'].iloc[wrong[0]]!r} is not one of {', '.join(tables.PHASES)}",
            place=f"row {wrong[0]}, column phase",
        )
    rows["occurrence"] = rows.groupby(["name", "phase", "module"]).cumcount()
    sized = sized_rows(operators, products=products)
    rows[["operator_class", *FEATURES]] = sized[["operator_class", *FEATURES]]
    if products:
        rows[[*PRODUCTS]] = sized[[*PRODUCTS]]
    rows["time_s"] = recorded_times(operators)
    return rows


def pair_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Pair the row labels of the same operator of one workload at two batches, both ways; may be empty."""
    columns = ["workload", "recorded", "target", "recorded_trace", "target_trace"]
    pairs = []
    # Training and inference of one model are different steps of one workload.
    series = ["workload", "mode"] if "mode" in rows.columns else ["workload"]
    for names, group in rows.groupby(series, sort=True):
        workload = str(names[0])
        captures = list(group.groupby("trace", sort=True))
        for (first, a), (second, b) in itertools.permutations(captures, 2):
            if a["batch"].iloc[0] == b["batch"].iloc[0]:
                continue
            joined = _join(a, b)
            pairs.append(
                joined[["recorded", "target"]].assign(workload=workload, recorded_trace=first, target_trace=second)
            )
    if not pairs:
        return pd.DataFrame({name: pd.Series(dtype="int64") for name in columns})
    return pd.concat(pairs, ignore_index=True)[columns]


def _join(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Join two captures: row by row where both ran the same operators, else by identity."""
    sequence = ["name", "phase"]
    if len(a) == len(b) and (a[sequence].to_numpy() == b[sequence].to_numpy()).all():
        return pd.DataFrame({"recorded": a.index, "target": b.index})
    left = a[IDENTITY].assign(recorded=a.index)
    return left.merge(b[IDENTITY].assign(target=b.index), on=IDENTITY)


def trace_names(traces: Iterable[TraceLike]) -> list[str]:
    """Return workload and batch of each trace, sorted, for the stamp of a model."""
    return sorted(f"{trace.facts.workload}-b{trace.facts.batch}" for trace in traces)


_MIN_ROWS = 4
"""A class with fewer operators borrows the shape of a wider one."""


@dataclass(frozen=True)
class CurveRecipe:
    """How the curves of all classes are fitted."""

    form: str  # Name in ``curves.FORMS`` for every class that ``chosen`` lacks
    chosen: Mapping[Key, str] = field(default_factory=dict)  # Forms of single classes
    sm_count: float = 1.0  # Multiprocessors of the device; 1 where it has none
    # Whether equal operators of equal time (layers that were repeated) count once, and operators
    # that took no time (they launch nothing) not at all.
    distinct: bool = False


def fit_class_curves(rows: pd.DataFrame, form: str | CurveRecipe) -> dict[Key, ClassCurve]:
    """Fit every class and phase, and the wider classes that stand in: ``("*", phase)``, ``("*", "*")``.

    ``benchmark`` rows, measured alone, together count as much as a class's others, whose level is
    kept; ``count``: how often a row occurs. A class needs ``_MIN_ROWS`` operators of two sizes, or
    takes the next wider one's shape (:func:`lookup_order`). Views get one time. Every curve is
    scaled to the class's recorded sum: relative errors decide the shape, sums the level (held-out
    sums came out 6 to 11 points nearer so).
    """
    recipe = CurveRecipe(form) if isinstance(form, str) else form
    if recipe.distinct:
        rows = rows[(rows["time_s"] > 0) | rows["operator_class"].isin(HOST_ONLY)]
    times = rows["time_s"].to_numpy(np.float64)
    work = work_matrix(rows)
    alone = np.zeros(len(rows), dtype=bool)
    if "benchmark" in rows.columns:
        alone = rows["benchmark"].to_numpy(dtype=bool)
    counts = rows["count"].to_numpy(np.float64) if "count" in rows.columns else None
    classes, phases = rows["operator_class"], rows["phase"]
    masks: dict[Key, Flags] = {(ANY, ANY): ~alone if (~alone).any() else ~alone | True}
    for phase in sorted(phases.unique()):
        own = (phases == phase).to_numpy()
        masks[ANY, phase] = own & ~alone if (own & ~alone).any() else own
    bases = classes.map(base_class)
    for names in (bases, classes):
        for name, phase in sorted(set(zip(names, phases, strict=True))):
            masks[str(name), str(phase)] = ((names == name) & (phases == phase)).to_numpy()
    fitted: dict[Key, ClassCurve] = {}
    for key in sorted(masks, key=_widest_first):
        mask = masks[key]
        often = None if counts is None else counts[mask]
        fitted[key] = _fit_one(key, work[mask], times[mask], alone[mask], often, recipe, fitted)
    return fitted


def _widest_first(key: Key) -> tuple[int, Key]:
    """Order keys so that every class comes after those that it may borrow from."""
    name, phase = key
    return (0 if phase == ANY else 1 if name == ANY else 2 if "/" not in name else 3), key


def _fit_one(
    key: Key,
    features: Floats,
    times: Floats,
    alone: Flags,
    counts: Floats | None,
    recipe: CurveRecipe,
    wider: Mapping[Key, ClassCurve],
) -> ClassCurve:
    sizes = features[:, : len(FEATURES)]
    ends = zip(sizes.min(axis=0).tolist(), sizes.max(axis=0).tolist(), strict=True)
    shape_of = "own"
    distinct = len(np.unique(features, axis=0))
    few = (distinct if recipe.distinct else len(times)) < _MIN_ROWS or distinct < 2
    if key[0] in HOST_ONLY:
        curve = fit_curve("constant", features, times)
    elif len(wider) and few:
        lender, lent = find_class({k: wider[k] for k in wider if k[1] in (key[1], ANY)}, *key)
        curve, shape_of = lent, f"{lender[0]} {lender[1]}"
    else:
        form = recipe.chosen.get(key, recipe.form)
        curve = _fit_shape(form, features, times, alone, recipe)
    curve = _set_level(curve, features, times, alone, counts)
    driver = FEATURES[driver_of(sizes, times)]
    rows = len(times) if counts is None else int(counts.sum())
    valid_range = dict(zip(FEATURES, ends, strict=True))
    return ClassCurve(curve.form, curve.coefficients, valid_range, rows, driver, shape_of)


def _fit_shape(form: str, features: Floats, times: Floats, alone: Flags, recipe: CurveRecipe) -> Curve:
    """Fit one form to operators; ``alone`` marks those that were measured alone."""
    if recipe.distinct:
        _, first = np.unique(np.column_stack([features, times, alone]), axis=0, return_index=True)
        first.sort()
        features, times, alone = features[first], times[first], alone[first]
    weights = None
    if alone.any() and not alone.all():
        weights = np.where(alone, (~alone).sum() / alone.sum(), 1.0)
    return fit_curve(form, features, times, weights, recipe.sm_count)


def _set_level(curve: Curve, features: Floats, times: Floats, alone: Flags, counts: Floats | None = None) -> Curve:
    """Scale a curve to the sum of the times, of those not measured alone where there are any."""
    judged = np.ones(len(times), dtype=bool) if alone.all() else ~alone
    guessed, known = curve.predict(features[judged]), times[judged]
    if counts is not None:
        guessed, known = guessed * counts[judged], known * counts[judged]
    guessed_s = float(guessed.sum())
    return curve.scaled(float(known.sum()) / guessed_s) if guessed_s > 0 else curve


def rescale_times(time_s: Floats, predicted_s: Floats, target_s: Floats, unchanged: Flags) -> Floats:
    """Scale recorded times [s] by the ratio of two predictions; unchanged rows keep theirs exactly.

    Where next to nothing is predicted at the recorded size, the difference is added instead.
    """
    usable = predicted_s > NOTHING_S
    ratio = np.divide(target_s, predicted_s, out=np.ones_like(time_s), where=usable)
    scaled = np.where(usable, time_s * ratio, np.maximum(time_s + (target_s - predicted_s), 0.0))
    return np.asarray(np.where(unchanged, time_s, scaled), np.float64)


_CLEARLY = 0.8
"""A form replaces a method's first one when it misses a fifth less: with three or four workloads,
smaller differences are chance."""

FEWEST = 4
"""A class with fewer distinct operators keeps the first form."""

SAME_WORK = ("operator_class", *FEATURES, *PRODUCTS)
"""What makes two operators the same work."""


@dataclass(frozen=True)
class ClassRows:
    """The distinct operators of one class and phase."""

    work: Floats  # Shape (n, 11), features and products
    times: Floats  # Shape (n,), [s]
    counts: Floats  # Shape (n,), how often each occurs in its trace
    groups: npt.NDArray[np.object_] | Indices  # Shape (n,), what is left out together
    pairs: Indices  # Shape (p, 2), places of one operator at two batches

    @classmethod
    def of(cls, rows: pd.DataFrame, pairs: Indices) -> ClassRows:
        """Take them from rows of one class; ``pairs`` holds values of ``row`` of any class, shape (p, 2)."""
        place = np.full(int(max(rows["row"].max(), pairs.max(initial=0))) + 1, -1, dtype=np.int64)
        place[rows["row"].to_numpy(np.int64)] = np.arange(len(rows))
        class_pairs = place[pairs] if len(pairs) else np.zeros((0, 2), dtype=np.int64)
        groups = rows["workload"].to_numpy(dtype=object)
        return cls(
            work_matrix(rows),
            rows["time_s"].to_numpy(np.float64),
            rows["count"].to_numpy(np.float64),
            groups if len(set(groups)) > 1 else np.arange(len(rows)) % 2,
            class_pairs[(class_pairs >= 0).all(axis=1)],
        )


def choose_form(rows: ClassRows, alone: Floats, alone_s: Floats, forms: Sequence[str], sm: float) -> str:
    """Return the form that clearly misses least when workloads are left out, else the first.

    By the mean of the errors of held-out times and of those rescaled between batches; of one
    workload, alternate operators are left out. ``alone``: work, shape (m, 11), and times [s] of
    operators measured alone; those equal to a judged one do not take part.
    """
    if len(rows.times) < FEWEST:
        return forms[0]
    scores = []
    folds = [_fold(rows, alone, alone_s, group) for group in sorted(set(rows.groups))]
    for form in forms:
        predicted = np.zeros(len(rows.times))
        recipe = CurveRecipe(form, {}, sm, distinct=True)
        for out, work, times, counts, flags in folds:
            curve = _fit_shape(form, work, times, flags, recipe)
            level = _set_level(curve, work, times, flags, counts)
            predicted[out] = level.predict(rows.work[out])
        scores.append(_score(rows, predicted))
    best = choose_least(scores)
    return forms[best] if scores[best] < _CLEARLY * scores[0] else forms[0]


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
