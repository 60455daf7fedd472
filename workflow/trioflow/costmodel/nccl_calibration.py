"""NCCL's formulas, scaled to measured times: few factors, the choice of algorithm untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from trioflow.costmodel.features import Floats
from trioflow.costmodel.least_squares import choose_least, solve
from trioflow.costmodel.nccl_formula import PROTOCOLS, Choices, NcclMachine, choose

IN_SWITCH_SCALES = (1.0, 1.25, 1.5)
"""Tried for the bandwidth of in-switch reduction, which NCCL finds on the machine."""

PULL = 0.05
"""Weight that keeps a factor near one where no measured message needs it."""
OUTLIER_LOG = 0.1
"""Residuals beyond this count less than their square (soft L1)."""
TOLERANCE = 1e-14
POLISHING_STEPS = 400
DIGITS = 12
_PARTS = 3


@dataclass(frozen=True)
class Calibration:
    """Factors of one operation on one platform.

    Attributes
    ----------
    scales : tuple of float
        Logarithms: fixed part, hops, bandwidth, each for LL, LL128, Simple.
    in_switch_scale : float
        As in :func:`nccl_formula.choose`.
    """

    scales: tuple[float, ...] = (0.0,) * (_PARTS * len(PROTOCOLS))
    in_switch_scale: float = 1.0

    def apply(self, choices: Choices) -> Floats:
        """Return the times [s] of chosen messages."""
        return _scale(np.asarray(self.scales), choices)


def _scale(scales: Floats, choices: Choices) -> Floats:
    factors = np.exp(scales.reshape(_PARTS, len(PROTOCOLS)))[:, choices.protocol]
    time_s = choices.base_s * factors[0] + choices.hop_s * factors[1] + choices.wire_s / factors[2]
    return np.asarray(time_s, np.float64)


def _slopes(scales: Floats, choices: Choices) -> Floats:
    """Return the derivatives of the logarithms of times, then of the pull, by the factors."""
    factors = np.exp(scales.reshape(_PARTS, len(PROTOCOLS)))[:, choices.protocol]
    parts = np.array(
        [choices.base_s * factors[0], choices.hop_s * factors[1], -choices.wire_s / factors[2]]
    )
    time_s = _scale(scales, choices)
    slopes = np.zeros((len(time_s), len(scales)))
    rows = np.arange(len(time_s))
    for part in range(_PARTS):
        slopes[rows, part * len(PROTOCOLS) + choices.protocol] = parts[part] / time_s
    return np.concatenate([slopes, PULL * np.eye(len(scales))])


def _polish(
    scales: Floats, misses: Callable[[Floats], Floats], slopes: Callable[[Floats], Floats]
) -> Floats:
    """Go on to where the gradient vanishes, so that other machines find the same factors.

    A solver that watches the cost stops at half the digits. Steps are those of
    reweighted least squares, whose fixed point is the soft L1's minimum.
    """
    start = scales
    for _ in range(POLISHING_STEPS):
        miss, slope = misses(scales), slopes(scales)
        root = 1.0 / np.sqrt(np.sqrt(1.0 + (miss / OUTLIER_LOG) ** 2))
        step = solve(slope * root[:, None], miss * root)
        scales = scales - step
        if np.max(np.abs(step)) < TOLERANCE:
            return scales
    return start  # no minimum within reach: what the solver found stands


def choose_rows(
    collective: str, rows: pd.DataFrame, machine: NcclMachine, constants: Mapping[str, Any],
    in_switch_scale: float = 1.0,
) -> Choices:  # fmt: skip
    """Return the choices of a table's messages: ``ranks``, ``nodes``, ``message_bytes`` [bytes]."""
    algorithm = np.empty(len(rows), object)
    protocol = np.zeros(len(rows), np.int64)
    parts = np.zeros((_PARTS, len(rows)))
    ranks, nodes = rows["ranks"].to_numpy(), rows["nodes"].to_numpy()
    sizes = rows["message_bytes"].to_numpy(np.float64)
    for group in sorted(set(zip(ranks.tolist(), nodes.tolist(), strict=True))):
        at = (ranks == group[0]) & (nodes == group[1])
        found = choose(collective, *group, sizes[at], machine, constants, in_switch_scale)
        algorithm[at], protocol[at] = found.algorithm, found.protocol
        parts[:, at] = found.base_s, found.hop_s, found.wire_s
    return Choices(algorithm.tolist(), protocol, *parts)


def calibrate(
    collective: str, rows: pd.DataFrame, machine: NcclMachine, constants: Mapping[str, Any]
) -> Calibration:
    """Fit the factors of one operation.

    Parameters
    ----------
    collective : str
        The operation.
    rows : DataFrame
        ``ranks``, ``nodes``, ``message_bytes`` [bytes], ``time_s`` [s]; a row
        a message.
    machine : NcclMachine
        The machine.
    constants : mapping
        Of :func:`nccl_formula.load_constants`.

    Notes
    -----
    Logarithms of times are fitted, every message with the same weight; the
    bandwidth of in-switch reduction is the one of ``IN_SWITCH_SCALES`` that
    fits best.
    """
    from scipy.optimize import least_squares

    target = np.log(rows["time_s"].to_numpy(np.float64))
    tried = [1.0]
    if machine.in_switch_reduction and collective == "all_reduce":
        tried = list(IN_SWITCH_SCALES)
    costs, fitted = [], []
    for in_switch_scale in tried:
        choices = choose_rows(collective, rows, machine, constants, in_switch_scale)

        def misses(scales: Floats, choices: Choices = choices) -> Floats:
            return np.concatenate([np.log(_scale(scales, choices)) - target, PULL * scales])

        def slopes(scales: Floats, choices: Choices = choices) -> Floats:
            return _slopes(scales, choices)

        start = np.zeros(_PARTS * len(PROTOCOLS))
        found = least_squares(misses, start, jac=slopes, loss="soft_l1", f_scale=OUTLIER_LOG)
        polished = _polish(np.asarray(found.x, np.float64), misses, slopes)
        # Factors that no message needs end within rounding of 0, differently on each machine.
        scales = tuple(round(float(scale), DIGITS) + 0.0 for scale in polished)
        costs.append(float(found.cost))
        fitted.append(Calibration(scales, in_switch_scale))
    return fitted[choose_least(costs)]
