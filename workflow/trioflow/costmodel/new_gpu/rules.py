"""Rules that carry an operator's time from one GPU to another by their data sheets."""

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from trioflow.base.columns import Columns, as_texts
from trioflow.base.plugins import list_plugins, load_plugin
from trioflow.costmodel.features import FEATURES, Floats, Rows, Table, base_class
from trioflow.costmodel.operators.curves import ANY, recorded_times, sized_rows
from trioflow.costmodel.uncertainty import SHORTEST_S
from trioflow.hardware.machine import FALLBACK_PRECISION, DeviceSheet

TENSOR_CLASSES = frozenset({"gemm", "convolution", "convolution_backward", "attention"})
"""Classes whose arithmetic runs on tensor cores where precision and device have them."""

TENSOR_SUFFIX = ":tensor"
_BEYOND = 0.5
"""Share of the logarithm that is believed below the least power per rate that was fitted: half-way
between following an exponent to where no GPU was and stopping at the last one."""

SHARPNESS = 4.0
"""How sharply the power-limited rate meets the unlimited one; a smooth corner can be fitted."""

Positions = npt.NDArray[np.intp]
_WATT_PER_FLOP_UNIT = 1e12
"""Power per rate is counted in W per Tflop/s, a number near 10."""


class Exponents(Struct, frozen=True):
    """What is fitted of one class of operators."""

    # Exponent with which the reached share of the peak grows with the board's power per peak rate,
    # while power is the limit.
    power: float
    saturation: float  # Power per peak rate from which on power is not a limit [W/(Tflop/s)]
    # Roofline time of an operator that takes twice as long as a long one would, in relation to its
    # roofline [s].
    short_s: float
    shape: float  # Exponent of that loss
    rows: int = 0  # Pairs of measurements fitted
    low_s: float = 0.0  # Range of the roofline times fitted [s]
    high_s: float = 0.0
    # Least power per peak rate fitted [W/(Tflop/s)]; below it ``_BEYOND`` of the logarithm is
    # believed.
    least_power: float = 0.0


CARRY_OVER = Exponents(0.0, 1.0, SHORTEST_S, 1.0)
"""Nothing fitted: the reached share of the roofline stays what it is."""


class Rates(Struct, frozen=True):
    """What rows meet on one device, one entry a row."""

    peak_flop_per_s: Floats  # Peaks of the data sheet
    bandwidth_bytes_per_s: Floats
    power_per_rate: Floats  # Power limit over peak rate [W/(Tflop/s)]


def size_rows(operators: Table) -> Table:
    """Return class, phase, features, products and ``time_s`` [s] of operators; TableError where a column or value is wrong."""
    return sized_rows(operators, products=True, kinds=False).assign(time_s=recorded_times(operators))


def device_rates(rows: Rows, device: DeviceSheet, precision: str) -> Rates:
    """Return the peaks that rows meet on a device: products at the precision, all else on vector units."""
    products = as_texts(rows["operator_class"]).holds(lambda name: base_class(name) in TENSOR_CLASSES)
    peak = np.where(products, device.peak(precision), device.peak(FALLBACK_PRECISION))
    return Rates(
        peak,
        np.full(len(peak), device.memory_bandwidth_bytes_per_s),
        device.power_limit_w / (peak / _WATT_PER_FLOP_UNIT),
    )


def class_key(operator_class: str, on_tensor_cores: bool) -> str:
    """Return the key under which a class's exponents are kept."""
    base = base_class(operator_class)
    return f"{base}{TENSOR_SUFFIX}" if on_tensor_cores and base in TENSOR_CLASSES else base


def find_exponents(fitted: Mapping[str, Exponents], key: str) -> tuple[Exponents, bool]:
    """Return the exponents of a key, and whether they are its own.

    A class that was never fitted takes those of all classes off the tensor cores (arithmetic of products those of matrix
    products first); on them, those of matrix products, or else nothing is adjusted.
    """
    if key in fitted:
        return fitted[key], True
    lenders = ("gemm", ANY) if key in TENSOR_CLASSES else (ANY,)
    if key.endswith(TENSOR_SUFFIX):
        lenders = (f"gemm{TENSOR_SUFFIX}",)
    for lender in lenders:
        if lender in fitted:
            return fitted[lender], False
    return CARRY_OVER, False


def roofline_s(flop: Floats, data_bytes: Floats, rates: Rates, exponents: Exponents) -> Floats:
    """Return the time at the reachable rate or the memory's, whichever is longer [s]."""
    compute_s = flop / (rates.peak_flop_per_s * reachable_share(rates.power_per_rate, exponents))
    return np.asarray(np.maximum(compute_s, data_bytes / rates.bandwidth_bytes_per_s), np.float64)


def reachable_share(power_per_rate: Floats, exponents: Exponents) -> Floats:
    """Return the share of the peak rate that the board's power allows, 0 to 1."""
    below = np.minimum(power_per_rate / max(exponents.least_power, SHORTEST_S), 1.0)
    believed = power_per_rate / below ** (1.0 - _BEYOND)
    lack = (exponents.saturation / believed) ** SHARPNESS
    return np.asarray((1.0 + lack) ** (-exponents.power / SHARPNESS), np.float64)


def expected_s(flop: Floats, data_bytes: Floats, rates: Rates, exponents: Exponents) -> tuple[Floats, Floats]:
    """Return the roofline time, and what of it the class is expected to take [s].

    Roofline x (1 + (short / roofline) ^ shape): short operators do not fill a device, and reach less of its roofline.
    Waves of tiles over the multiprocessors are not counted: they made no held-out error smaller, and more
    multiprocessors at one peak rate slower.
    """
    roofline = np.maximum(roofline_s(flop, data_bytes, rates, exponents), SHORTEST_S)
    lost = (exponents.short_s / roofline) ** exponents.shape
    return roofline, roofline * (1.0 + lost)


def _apply_ours(
    rows: Rows,
    source: DeviceSheet,
    target: DeviceSheet,
    precision: str,
    floor_s: float,
    fitted: Mapping[str, Exponents],
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Carry the reached share of the roofline over; times [s], and rows outside the fitted classes or range."""
    times, flop, read, write = (np.asarray(rows[name], np.float64) for name in ("time_s", *FEATURES))
    data = read + write
    before, after = (device_rates(rows, device, precision) for device in (source, target))
    tensor = source.runs_on_tensor_cores(precision) or target.runs_on_tensor_cores(precision)
    classes = as_texts(rows["operator_class"])
    result, outside = times.copy(), np.zeros(len(times), dtype=bool)
    for key in sorted({class_key(name, tensor) for name in classes.words}):
        of_key = classes.holds(lambda name, key=key: class_key(name, tensor) == key)  # type: ignore[misc]
        at = np.flatnonzero(of_key & (flop + data > 0) & (times > 0))
        exponents, own = find_exponents(fitted, key)
        old, new = _select(before, at), _select(after, at)
        floor = np.minimum(floor_s, times[at])
        roof_old, cost_old = expected_s(flop[at], data[at], old, exponents)
        roof_new, cost_new = expected_s(flop[at], data[at], new, exponents)
        net = (times[at] - floor) * cost_new / cost_old
        # No share above 1 unless the source has it too (a cache serves it there).
        bare_old = np.maximum(roofline_s(flop[at], data[at], old, CARRY_OVER), SHORTEST_S)
        bare_new = np.maximum(roofline_s(flop[at], data[at], new, CARRY_OVER), SHORTEST_S)
        least = bare_new * np.minimum(1.0, (times[at] - floor) / bare_old)
        result[at] = floor + np.maximum(net, least)
        inside = [(exponents.low_s <= roof) & (roof <= exponents.high_s) for roof in (roof_old, roof_new)]
        outside[at] = ~(inside[0] & inside[1]) if own else True
    return result, outside


def _select(rates: Rates, at: Positions) -> Rates:
    return Rates(rates.peak_flop_per_s[at], rates.bandwidth_bytes_per_s[at], rates.power_per_rate[at])


DEFAULT_RULE = "ours"
RULES = {DEFAULT_RULE: _apply_ours}
RULE_GROUP = "trioflow.new_gpu_rules"
"""Group under which packages register rules, called as ``apply_rule`` calls them; the validation judges each beside ours."""


def list_rules() -> list[str]:
    """Return the names of trioflow's rule and of those that packages register."""
    return list_plugins(RULE_GROUP, RULES)


@cache
def find_rule(name: str) -> Callable[..., tuple[Floats, npt.NDArray[np.bool_]]]:
    """Return a rule of ``RULES`` or ``RULE_GROUP``; InputError when unknown, ambiguous or broken."""
    return RULES.get(name) or load_plugin(RULE_GROUP, name, RULES, what="rule for a new GPU")


def apply_rule(
    rule: str,
    rows: Rows,
    source: DeviceSheet,
    target: DeviceSheet,
    *,
    precision: str,
    floor_s: float,
    fitted: Mapping[str, Exponents],
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Apply a rule of :func:`list_rules`: times [s], and which rows are outside what it was fitted to.

    A package's rule is given a frame.
    """
    given = rows.to_frame() if isinstance(rows, Columns) and rule not in RULES else rows
    return find_rule(rule)(given, source, target, precision, floor_s, fitted)
