"""Rules for a new GPU that only the validation compares: by bandwidth, Li's and Habitat's.

Each takes operators (``costmodel.new_gpu.rules.size_rows``), the two devices' sheets and the precision, and returns
times [s] and which rows are outside what it was fitted to: none, as nothing is.
"""

import numpy as np
import numpy.typing as npt
import pandas as pd
from trioflow.costmodel.features import FEATURES, Floats
from trioflow.costmodel.new_gpu.rules import device_rates
from trioflow.costmodel.operators.curves import read_columns
from trioflow.hardware.machine import DeviceSheet

Predicted = tuple[Floats, npt.NDArray[np.bool_]]


def apply_bandwidth(rows: pd.DataFrame, source: DeviceSheet, target: DeviceSheet, *_: object) -> Predicted:
    """Scale every time with the ratio of the memories' bandwidths [s]."""
    ratio = source.memory_bandwidth_bytes_per_s / target.memory_bandwidth_bytes_per_s
    return rows["time_s"].to_numpy(np.float64) * ratio, np.zeros(len(rows), dtype=bool)


def apply_li(rows: pd.DataFrame, source: DeviceSheet, target: DeviceSheet, *_: object) -> Predicted:
    """Regress every class and phase on the source, and scale the slopes with the bandwidth [s].

    Li's inter-GPU, kernel-wise rule (Y. Li, Y. Sun, A. Jog, "Path Forward Beyond Simulators", MICRO
    2023) as secondary sources give it: time = a + b x driver, the best correlated of operations,
    input and output, b in inverse proportion with the bandwidth; a is 0 in a class of one size. The
    paper's text was not at hand: rule and kernels' classes are unverified.
    """
    ratio = source.memory_bandwidth_bytes_per_s / target.memory_bandwidth_bytes_per_s
    times = rows["time_s"].to_numpy(np.float64)
    features = read_columns(rows, FEATURES)
    result = times.copy()
    for _, group in rows.groupby(["operator_class", "phase"], sort=True):
        at = group.index.to_numpy()
        driver = features[at][:, _best_driver(features[at], times[at])]
        constant, slope = _fit_line(driver, times[at])
        result[at] = constant + slope * ratio * driver
    return result, np.zeros(len(rows), dtype=bool)


def _best_driver(features: Floats, times: Floats) -> int:
    """Return the column that correlates best with the times; the first largest where none does."""
    scores = []
    for column in features.T:
        varied = column.std() > 0 and times.std() > 0
        scores.append(float(np.corrcoef(column, times)[0, 1]) if varied else -1.0)
    if max(scores) <= 0:
        return int(np.argmax(features.sum(axis=0) > 0))
    return int(np.argmax(scores))


def _fit_line(driver: Floats, times: Floats) -> tuple[float, float]:
    """Return constant and slope, neither negative, by least squares."""
    spread = float(((driver - driver.mean()) ** 2).sum())
    if spread > 0:
        slope = float(((driver - driver.mean()) * (times - times.mean())).sum()) / spread
        constant = float(times.mean() - slope * driver.mean())
        if slope >= 0 and constant >= 0:
            return constant, slope
    square = float((driver**2).sum())
    if square == 0:
        return float(times.mean()), 0.0
    return 0.0, float((driver * times).sum()) / square


def apply_habitat(
    rows: pd.DataFrame, source: DeviceSheet, target: DeviceSheet, precision: str, *_: object
) -> Predicted:
    """Scale by Habitat's wave scaling: bandwidth, clock and multiprocessors [s].

    T x (BW ratio)^g x (clock ratio x SM ratio)^(1-g); g is 1 - 0.5 I/R up to the target's ridge
    point R, 0.5 R/I beyond (I: arithmetic intensity). Its trained networks are not part of it.
    Source: G. X. Yu et al., "Habitat", USENIX ATC 2021.
    """
    data = np.maximum((rows["read_bytes"] + rows["write_bytes"]).to_numpy(np.float64), 1.0)
    intensity = rows["flop"].to_numpy(np.float64) / data
    rates = device_rates(rows, target, precision)
    ridge = rates.peak_flop_per_s / rates.bandwidth_bytes_per_s
    share = intensity / ridge
    gamma = np.where(share <= 1.0, 1.0 - 0.5 * share, 0.5 / np.maximum(share, 1.0))
    bandwidth = source.memory_bandwidth_bytes_per_s / target.memory_bandwidth_bytes_per_s
    clocks = [sheet.numbers.get("boost_clock_hz", np.nan) for sheet in (source, target)]
    compute = (clocks[0] / clocks[1]) * (source.sm_count / target.sm_count)
    times = rows["time_s"].to_numpy(np.float64) * bandwidth**gamma * compute ** (1.0 - gamma)
    return times, np.zeros(len(rows), dtype=bool)
