"""Fits of collectives: samples reduced to points, curves through them, factors on NCCL's formulas, intervals from what is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd
from msgspec import structs

from trioflow.base.errors import InputError, TableError
from trioflow.base.units import NS_PER_S, ns_to_s
from trioflow.costmodel.collectives.model import (
    COLLECTIVES,
    INTERPOLATIONS,
    CollectiveCostModel,
    CollectiveCurve,
    Key,
    MessageCurve,
    interpolate_time,
)
from trioflow.costmodel.collectives.platform import (
    AT,
    LARGE_BYTES,
    METHODS,
    OPERATION,
    PARTS,
    PROTOCOLS,
    RANKS,
    RANKS_BEYOND,
    RELATIVES,
    SHAPES,
    SITUATIONS,
    SIZE,
    SIZE_BEYOND,
    BandKey,
    Calibration,
    Choices,
    CollectiveMethod,
    MeasuredCurves,
    Nccl,
    NcclMachine,
    PlatformCollectives,
    choose,
    load_constants,
    place,
    rank_situation,
    scale_choices,
    size_class,
)
from trioflow.costmodel.features import Floats
from trioflow.costmodel.fits.curves import choose_least, solve
from trioflow.costmodel.operators.curves import rounded
from trioflow.costmodel.uncertainty import COVERAGE, WIDEST_LOG, Interval
from trioflow.tables import COLLECTIVE_SAMPLES, LOST_NS


def fit_message_curve(sizes_bytes: Floats, times_ns: Floats) -> MessageCurve:
    """Reduce samples, one entry each in bytes and ns (positive), to a monotone curve.

    A size at which half of the samples are lost in noise (``LOST_NS``) was not measured: where another was, it takes
    the time of the sizes around it.
    """
    sizes = np.unique(sizes_bytes)
    measured = [np.median(times_ns[sizes_bytes == size]) > LOST_NS for size in sizes]
    sizes = sizes[measured] if any(measured) else sizes
    times_s = np.array([ns_to_s(float(value)) for value in times_ns])
    groups = [times_s[sizes_bytes == size] for size in sizes]
    medians = np.array([float(np.median(group)) for group in groups])
    quantiles = np.array([np.quantile(group, COVERAGE) for group in groups])
    return MessageCurve(
        message_bytes=sizes,
        median_s=medians,
        time_s=_monotone(medians),
        low_factor=np.minimum(quantiles[:, 0] / medians, 1.0),
        high_factor=np.maximum(quantiles[:, 1] / medians, 1.0),
        repeats=np.array([float(len(group)) for group in groups]),
    )


def _monotone(times_s: Floats) -> Floats:
    """Make times ascend; those that do already stay exactly as they are."""
    from scipy.optimize import isotonic_regression

    if np.all(np.diff(times_s) >= 0):
        return times_s.copy()
    return np.asarray(np.exp(isotonic_regression(np.log(times_s)).x), np.float64)


def _leave_sizes_out(curve: MessageCurve, method: str) -> Floats:
    """Return the relative error at every interior size, predicted from the other sizes' medians."""
    sizes, medians_s, errors = curve.message_bytes, curve.median_s, []
    for position in range(1, len(sizes) - 1):
        others, known_s = np.delete(sizes, position), np.delete(medians_s, position)
        predicted_s = interpolate_time(others, _monotone(known_s), float(sizes[position]), method)
        errors.append(float(predicted_s / medians_s[position] - 1.0))
    return np.array(errors, np.float64)


MAX_POINTS = 48
"""Denser curves are replaced by as many points, evenly spaced in the logarithm of the size."""

_REWEIGHTINGS = 10
"""Rounds that turn least squares into least absolute errors, to let outliers go."""

_SMALLEST_WEIGHT_LOG = 1e-3


def median_points(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the median ``time_s`` [s] and ``rounds`` of the repeats of every message, sorted by key.

    Raises TableError when a column is missing or a collective is unknown. Raises InputError when
    there is no sample.
    """
    key = ["collective", "ranks", "nodes", "library", "dataset", "message_bytes"]
    _check_samples(samples, [*key, "time_ns"])
    times = samples.groupby(key, sort=True)["time_ns"]
    points = times.median().rename("time_s").to_frame() / NS_PER_S
    return points.assign(rounds=times.size()).reset_index()


def each_curve(points: pd.DataFrame) -> Iterator[tuple[Key, pd.DataFrame]]:
    """Yield the points of every collective, ranks and nodes, in order."""
    ordered = points.sort_values(["collective", "ranks", "nodes", "message_bytes"])
    for key, rows in ordered.groupby(["collective", "ranks", "nodes"], sort=True):
        collective, ranks, nodes = cast(tuple[str, int, int], key)
        yield (str(collective), int(ranks), int(nodes)), rows


def thin(points: pd.DataFrame) -> pd.DataFrame:
    """Replace dense curves by at most ``MAX_POINTS`` points each.

    They are the corners of the line with the least absolute relative error over all measured times.
    """
    parts = []
    for _, rows in each_curve(points):
        if len(rows) <= MAX_POINTS:
            parts.append(rows)
            continue
        sizes, times = rows["message_bytes"].to_numpy(np.float64), rows["time_s"].to_numpy()
        corners = _space_evenly(sizes)
        thinned = rows.iloc[[int(np.searchsorted(sizes, c)) for c in corners]]
        parts.append(thinned.assign(time_s=_fit_corners(sizes, times, corners)))
    return pd.concat(parts, ignore_index=True)


def _space_evenly(sizes: Floats) -> Floats:
    wanted = np.geomspace(sizes[0], sizes[-1], MAX_POINTS)
    after = np.clip(np.searchsorted(sizes, wanted), 1, len(sizes) - 1)
    nearest = np.where(wanted - sizes[after - 1] < sizes[after] - wanted, after - 1, after)
    return np.asarray(sizes[np.unique(nearest)], np.float64)


def _fit_corners(sizes: Floats, times: Floats, corners: Floats) -> Floats:
    """Return the corners' times: least absolute relative error by reweighted least squares."""
    hats = np.column_stack([np.interp(sizes, corners, unit) for unit in np.eye(len(corners))])
    relative = hats / times[:, None]
    weights = np.ones(len(sizes))
    corner_times: Floats = times[np.searchsorted(sizes, corners)]
    for _ in range(_REWEIGHTINGS):
        root = np.sqrt(weights)
        corner_times = solve(relative * root[:, None], root)
        missed = np.abs(np.sum(relative * corner_times, axis=1) - 1.0)
        weights = 1.0 / np.maximum(missed, _SMALLEST_WEIGHT_LOG)
    return np.asarray(np.maximum(corner_times, times.min()), np.float64)


def make_curves(points: pd.DataFrame) -> dict[Key, CollectiveCurve]:
    """Return a monotone curve for every key; InputError where two libraries or datasets measured the same."""
    curves = {}
    for key, rows in each_curve(points):
        sources = sorted(set(zip(rows["library"].tolist(), rows["dataset"].tolist(), strict=True)))
        if len(sources) > 1:
            raise InputError(
                f"{key[0]} on {key[1]} ranks of {key[2]} nodes was measured more than once: "
                + ", ".join(f"{library} of {dataset}" for library, dataset in sources),
                fix="fit a model for each",
            )
        times = rows["time_s"].to_numpy(np.float64)
        if np.any(np.diff(times) < 0):
            times = np.array([rounded(value) for value in _monotone(times)])
        curves[key] = CollectiveCurve(
            rows["message_bytes"].to_numpy(np.float64), times, *sources[0], int(rows["rounds"].sum())
        )
    return curves


def halve(points: pd.DataFrame) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Return both choices of keeping every other size of each curve and leaving the rest."""
    order = points.groupby(["collective", "ranks", "nodes"])["message_bytes"].rank(method="first")
    odd = order.astype(int) % 2 == 1
    return [(points[odd], points[~odd]), (points[~odd], points[odd])]


def fit_collective_model(samples: pd.DataFrame) -> CollectiveCostModel:
    """Fit a curve for every (collective, ranks) of an undisturbed sweep, ``tables.COLLECTIVE_SAMPLES``.

    One interpolation serves the whole model, so that few sizes do not choose it. Raises TableError when a
    column is missing or a value out of range, InputError when there is no sample, or platforms or libraries
    are mixed.
    """
    _check_samples(samples, COLLECTIVE_SAMPLES.names)
    for name in ("platform", "library"):
        names = sorted(samples[name].astype(str).unique())
        if len(names) > 1:
            raise InputError(
                f"samples of several values of {name} in one fit: {', '.join(names)}", fix="fit a model for each"
            )
    curves: dict[tuple[str, int], MessageCurve] = {}
    for key, rows in samples.groupby(["collective", "ranks"], sort=True):
        collective, ranks = cast(tuple[str, int], key)
        curves[str(collective), int(ranks)] = fit_message_curve(
            rows["message_bytes"].to_numpy(np.float64), rows["time_ns"].to_numpy(np.float64)
        )
    left_out = {name: {key: _leave_sizes_out(curve, name) for key, curve in curves.items()} for name in INTERPOLATIONS}
    every = {name: np.concatenate([*errors.values()]) for name, errors in left_out.items()}
    comparison = {name: float(np.mean(np.abs(errors))) if len(errors) else None for name, errors in every.items()}
    chosen = INTERPOLATIONS[choose_least([comparison[name] or 0.0 for name in INTERPOLATIONS])]
    for key, errors in left_out[chosen].items():
        if len(errors):
            miss = math.sqrt(float(np.mean(np.log1p(errors) ** 2)))
            curves[key] = structs.replace(curves[key], miss_factor=math.exp(miss))
    return CollectiveCostModel(
        platform=str(samples["platform"].iloc[0]),
        library=str(samples["library"].iloc[0]),
        interpolation=chosen,
        curves=curves,
        comparison=comparison,
    )


def _check_samples(samples: pd.DataFrame, columns: Sequence[str]) -> None:
    """Refuse samples without a column or a row, of unknown collectives, or with numbers that mean nothing."""
    missing = [name for name in columns if name not in samples.columns]
    if missing:
        raise TableError(f"collective samples have no column {', '.join(missing)}")
    if samples.empty:
        raise InputError("no collective sample to fit", fix="measure at least one collective")
    rows = samples.reset_index(drop=True)
    for row in rows.index[~rows["collective"].isin(COLLECTIVES)]:
        problem, fix = f"unknown collective {rows['collective'][row]!r}", f"use one of {', '.join(COLLECTIVES)}"
        raise TableError(problem, place=f"row {row}, column collective", fix=fix)
    for name, least in (("ranks", 2), ("message_bytes", 0), ("time_ns", 1)):
        for row in rows.index[~(rows[name] >= least)]:
            raise TableError(f"{rows[name][row]} is below {least}", place=f"row {row}, column {name}")


def fit_nccl(points: pd.DataFrame, machine: NcclMachine, library: str) -> Nccl:
    """Calibrate every operation, within and between nodes apart."""
    constants = load_constants(library)
    calibrations = {
        (str(collective), "between" if between else "within"): calibrate(str(collective), rows, machine, constants)
        for (collective, between), rows in points.groupby(["collective", points["nodes"] > 1])
    }
    return Nccl(machine, library, calibrations)


def choose_shape(points: pd.DataFrame, form: Nccl) -> str:
    """Return the shape that misses every other size (large ones, where there are any) least, predicted from the rest."""
    misses: dict[str, list[float]] = {shape: [] for shape in SHAPES}
    for kept, left in halve(points):
        curves = make_curves(kept)
        for key, rows in each_curve(left):
            if key not in curves:
                continue
            x = curves[key].message_bytes
            sizes = rows["message_bytes"].to_numpy(np.float64)
            inside = (sizes > x[0]) & (sizes < x[-1]) & (sizes >= LARGE_BYTES)
            if inside.any():
                times = rows["time_s"].to_numpy()[inside]
                for shape in SHAPES:
                    predicted = MeasuredCurves(curves, form, shape).predict(key, sizes[inside])
                    misses[shape].extend(np.abs(predicted / times - 1.0).tolist())
    missed = [float(np.mean(misses[shape])) if misses[shape] else 0.0 for shape in SHAPES]
    return SHAPES[choose_least(missed)]


MIN_RESIDUALS = 8
"""Fewer residuals give no quantile that is finite at this coverage."""

_BEYOND_DOUBLINGS = 3
"""Largest sizes that are left out to learn how predictions fare above all measured sizes."""

Fit = Callable[[pd.DataFrame], Mapping[str, CollectiveMethod]]

_BAND_DIGITS = 9


def conformal_band(residuals: Floats) -> Interval:
    """Return the split-conformal interval of residuals, half of the misses on each side.

    Source: V. Vovk, A. Gammerman, G. Shafer, Algorithmic Learning in a Random World, Springer 2005:
    of n residuals the ceil((n + 1)(1 - a))-th smallest covers the next one with probability 1 - a.
    """
    values = np.sort(residuals)
    count = len(values)
    rank = math.ceil((count + 1) * COVERAGE[1])
    # The formulas' factors and their logarithms carry three digits less than the times.
    high = rounded(values[min(rank, count) - 1], _BAND_DIGITS)
    low = rounded(values[max(count - rank, 0)], _BAND_DIGITS)
    return Interval(max(min(low, 0.0), -WIDEST_LOG), min(max(high, 0.0), WIDEST_LOG), count)


def _residuals(
    name: str, situation: str, place: str, rows: pd.DataFrame, predicted_s: Floats, doublings: Floats | float = 1.0
) -> pd.DataFrame:
    """Return logarithms of measured over predicted times, for one doubling of the distance, with what they are of."""
    logs = np.log(rows["time_s"].to_numpy(np.float64) / predicted_s) / doublings
    sizes = [size_class(size) for size in rows["message_bytes"].tolist()]
    return pd.DataFrame({"name": name, "situation": situation, "place": place, "sizes": sizes, "log": logs})


def fit_collective_bands(
    points: pd.DataFrame, samples: pd.DataFrame, fit: Fit, names: Iterable[str], situations: Iterable[str] = SITUATIONS
) -> dict[str, dict[BandKey, Interval]]:
    """Return the bands of every method (of some ``SITUATIONS``), from points that it did not see.

    At a measured message the samples' repeats give the band.
    """
    wanted = set(situations)
    judgements = list(_leave_repeats(samples, list(names)) if AT in wanted else ())
    left_out = [
        *(_leave_sizes(points) if wanted & {SIZE, SIZE_BEYOND} else ()),
        *(_leave_ranks(points) if wanted & {RANKS, RANKS_BEYOND} else ()),
        *(_leave_operations(points) if OPERATION in wanted else ()),
    ]
    for kept, judged in left_out:
        methods = fit(kept) if judged else {}
        for key, situation, rows, doublings in judged:
            sizes = rows["message_bytes"].to_numpy(np.float64)
            judgements += [
                _residuals(name, situation, place(key[2]), rows, method.predict(key, sizes), doublings)
                for name, method in methods.items()
            ]
    bands: dict[str, dict[BandKey, Interval]] = {}
    for group, logs in (
        pd.concat(judgements).groupby(["name", "situation", "place", "sizes"])["log"] if judgements else ()
    ):
        name, *where = cast(tuple[str, str, str, str], group)
        if len(logs) >= MIN_RESIDUALS:
            bands.setdefault(name, {})[cast(BandKey, tuple(where))] = conformal_band(logs.to_numpy())
    return bands


def _leave_repeats(samples: pd.DataFrame, names: list[str]) -> Iterator[pd.DataFrame]:
    """Yield residuals of each repeat of a message from the median of its others, which every method predicts."""
    key = ["collective", "ranks", "nodes", "message_bytes", "library", "dataset"]
    ordered = samples.sort_values([*key, "time_ns"])
    counts = ordered.groupby(key)["time_ns"].transform("size")
    for count in sorted(set(counts) - {1}):
        same = ordered[counts == count]
        times = same["time_ns"].to_numpy(np.float64).reshape(-1, count)
        heads = same.iloc[::count]
        for repeat in range(count):
            others = np.median(np.delete(times, repeat, axis=1), axis=1)
            rows = heads.assign(time_s=times[:, repeat])
            for between, name in ((False, "within"), (True, "between")):
                at = ((rows["nodes"] > 1) == between).to_numpy()
                yield from (_residuals(method, AT, name, rows[at], others[at]) for method in names)


LeftOut = tuple[pd.DataFrame, list[tuple[Key, str, pd.DataFrame, Any]]]
"""Points that are kept, and those of a key to predict from them: situation, rows, doublings of the distance."""


def _leave_sizes(points: pd.DataFrame) -> Iterator[LeftOut]:
    """Let both halves of the sizes predict each other, and all but the largest the largest."""
    for kept, left in halve(points):
        spans = {key: rows["message_bytes"].agg(["min", "max"]) for key, rows in each_curve(kept)}
        inside = (
            (key, rows[rows["message_bytes"].between(*spans[key])]) for key, rows in each_curve(left) if key in spans
        )
        yield kept, [(key, SIZE, rows, 1.0) for key, rows in inside if len(rows)]
    top = points.groupby(["collective", "ranks", "nodes"])["message_bytes"].transform("max")
    far = points["message_bytes"] * 2**_BEYOND_DOUBLINGS > top
    ends = {key: float(rows["message_bytes"].max()) for key, rows in each_curve(points[~far])}
    yield (
        points[~far],
        [
            (key, SIZE_BEYOND, rows, np.maximum(np.log2(rows["message_bytes"].to_numpy(np.float64) / ends[key]), 1.0))
            for key, rows in each_curve(points[far])
            if key in ends
        ],
    )


def _leave_ranks(points: pd.DataFrame) -> Iterator[LeftOut]:
    for _, left in points.groupby(["nodes", "ranks"]):
        kept = points.drop(left.index)
        judged = []
        for key, rows in each_curve(left):
            if known := _known_ranks(kept, key):
                situation, doublings = rank_situation(key[1], known)
                judged.append((key, situation, rows, max(doublings, 1.0)))
        yield kept, judged


def _known_ranks(points: pd.DataFrame, key: Key) -> list[int]:
    same = (points["collective"] == key[0]) & (points["nodes"] == key[2])
    return sorted({int(n) for n in points.loc[same, "ranks"]})


def _leave_operations(points: pd.DataFrame) -> Iterator[LeftOut]:
    """Leave every operation out; its relatives speak for it."""
    for collective, left in points.groupby("collective", sort=True):
        kept = points.drop(left.index)
        within = kept["nodes"] == 1
        yield (
            kept,
            [
                (key, OPERATION, rows, 1.0)
                for key, rows in each_curve(left)
                if {*kept.loc[within == (key[2] == 1), "collective"]} & {*RELATIVES[str(collective)]}
            ],
        )


def fit_platform_collectives(
    samples: pd.DataFrame,
    platform: str,
    library: str,
    machine: NcclMachine,
    notes: str = "",
    provenance: Mapping[str, Any] | None = None,
    situations: Iterable[str] = SITUATIONS,
    others: Mapping[str, Callable[[pd.DataFrame], CollectiveMethod]] | None = None,
) -> PlatformCollectives:
    """Fit every method and its intervals to samples as ``tables.COLLECTIVE_SAMPLES``, each key from one library and dataset.

    The library's version chooses NCCL's constants; ``network_bytes_per_s`` comes from measurements
    between nodes where unknown. ``others``: what is fitted beside them to compare, and not saved. Raises TableError
    when a column is missing or a collective unknown, InputError when there is no sample, or two sources measured the
    same.
    """
    points = thin(median_points(samples))
    machine, others = _add_network(machine, points), others or {}

    def fit(rows: pd.DataFrame) -> dict[str, CollectiveMethod]:
        form = fit_nccl(rows, machine, library)
        measured = MeasuredCurves(make_curves(rows), form, choose_shape(rows, form))
        return {"measured": measured, "nccl": form, **{name: fit_other(rows) for name, fit_other in others.items()}}

    bands = fit_collective_bands(points, samples, fit, (*METHODS, *others), situations)
    return PlatformCollectives(
        platform, library, "measured", machine, fit(points), bands, notes, dict(provenance or {})
    )


def _add_network(machine: NcclMachine, points: pd.DataFrame) -> NcclMachine:
    """Return the machine with a rank's share of the network, read off the largest messages.

    From a send between nodes, or else the ring's bytes of the collective with fewest ranks a node.
    """
    between = points[points["nodes"] > 1]
    if machine.network_bytes_per_s is not None or between.empty:
        return machine
    sends = between[between["collective"] == "send"]
    rows = sends if len(sends) else between
    per_node = rows["ranks"] / rows["nodes"]
    rows = rows[per_node == per_node.min()]
    top = rows[rows["message_bytes"] == rows["message_bytes"].max()].iloc[0]
    factor = 1.0 if len(sends) else 2.0 * (top["ranks"] - 1) / top["ranks"]
    rate = factor * top["message_bytes"] / top["time_s"] / float(per_node.min() if not len(sends) else 1)
    return structs.replace(machine, network_bytes_per_s=float(rate))


_IN_SWITCH_SCALES = (1.0, 1.25, 1.5)
"""Tried for the bandwidth of in-switch reduction, which NCCL finds on the machine."""

_PULL = 0.05
"""Weight that keeps a factor near one where no measured message needs it."""

_OUTLIER_LOG = 0.1
"""Residuals beyond this count less than their square (soft L1)."""

_TOLERANCE = 1e-14
"""Relative change of loss and factors at which the search ends."""

_DIGITS = 9
"""Decimal places of a fitted factor's logarithm."""


def choose_rows(
    collective: str,
    rows: pd.DataFrame,
    machine: NcclMachine,
    constants: Mapping[str, Any],
    in_switch_scale: float = 1.0,
) -> Choices:
    """Return the choices of a table's messages: ``ranks``, ``nodes``, ``message_bytes`` [bytes]."""
    algorithm = np.empty(len(rows), object)
    protocol = np.zeros(len(rows), np.int64)
    parts = np.zeros((PARTS, len(rows)))
    ranks, nodes = rows["ranks"].to_numpy(), rows["nodes"].to_numpy()
    sizes = rows["message_bytes"].to_numpy(np.float64)
    for group in sorted(set(zip(ranks.tolist(), nodes.tolist(), strict=True))):
        at = (ranks == group[0]) & (nodes == group[1])
        chosen = choose(collective, *group, sizes[at], machine, constants, in_switch_scale)
        algorithm[at], protocol[at] = chosen.algorithm, chosen.protocol
        parts[:, at] = chosen.base_s, chosen.hop_s, chosen.wire_s
    return Choices(algorithm.tolist(), protocol, *parts)


def calibrate(collective: str, rows: pd.DataFrame, machine: NcclMachine, constants: Mapping[str, Any]) -> Calibration:
    """Fit the factors of one operation to logarithms of ``time_s`` [s] of some messages [bytes].

    The in-switch bandwidth is the one of ``_IN_SWITCH_SCALES`` that fits best.
    """
    from scipy.optimize import least_squares

    target = np.log(rows["time_s"].to_numpy(np.float64))
    tried = [1.0]
    if machine.in_switch_reduction and collective == "all_reduce":
        tried = list(_IN_SWITCH_SCALES)
    costs, fitted = [], []
    for in_switch_scale in tried:
        choices = choose_rows(collective, rows, machine, constants, in_switch_scale)

        def misses(scales: Any, choices: Choices = choices) -> Any:
            return np.concatenate([np.log(scale_choices(scales, choices)) - target, _PULL * scales])

        solution = least_squares(
            misses,
            np.zeros(PARTS * len(PROTOCOLS)),
            jac="cs",  # exact: the step along the imaginary axis loses no digit
            loss="soft_l1",
            f_scale=_OUTLIER_LOG,
            ftol=_TOLERANCE,
            xtol=_TOLERANCE,
            gtol=_TOLERANCE,
        )
        scales = tuple(round(float(scale), _DIGITS) + 0.0 for scale in solution.x)
        costs.append(float(solution.cost))
        fitted.append(Calibration(scales, in_switch_scale))
    return fitted[choose_least(costs)]
