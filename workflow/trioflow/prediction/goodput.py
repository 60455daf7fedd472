"""What is left of a long run when it is stopped by failures, and how often to save its state.

Failures come at random (exponentially), also while state is saved or read back; work since the last checkpoint is lost
(J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006: the expected time of
an interval in closed form).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trioflow.base.errors import InputError

_HALVINGS = 100


@dataclass(frozen=True)
class Faults:
    """How a run is stopped and goes on."""

    gpu_hours_per_failure: float  # GPU-hours between failures that stop the whole run
    checkpoint_s: float = 0.0  # time in which the run waits for its state to be saved [s]
    restart_s: float = 0.0  # from a failure to the first step after it [s]

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--gpu-hours-per-failure", self.gpu_hours_per_failure, math.nextafter(0.0, 1.0)),
            ("--checkpoint-s", self.checkpoint_s, 0.0),
            ("--restart-s", self.restart_s, 0.0),
        ):
            if not least <= value < math.inf:
                wanted = "positive" if least else "0 or more"
                raise InputError(f"{flag} {value:g}: expected a number that is {wanted}")

    def mtbf_s(self, ranks: int) -> float:
        """Return the mean time between failures of a run on ``ranks`` GPUs [s]."""
        return self.gpu_hours_per_failure * 3600.0 / ranks


def choose_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the work between two checkpoints that leaves the most goodput [s].

    It solves exp((t + d) / m) (1 - t / m) = 1 with the checkpoint's time d and the mean time between failures m; sqrt(2
    d m) is its first order (J. W. Young, 1974).
    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = middle + checkpoint_s / mtbf_s + math.log1p(-middle) > 0
        low, high = (middle, high) if above else (low, middle)
    return low * mtbf_s


def measure_goodput(faults: Faults, interval_s: float, ranks: int) -> float:
    """Return the share of a run's time that goes into steps whose work is kept."""
    mtbf_s = faults.mtbf_s(ranks)
    work, whole = interval_s / mtbf_s, (interval_s + faults.checkpoint_s) / mtbf_s
    if not whole:  # saved at no cost after every step: a failure costs its restart alone
        return math.exp(-faults.restart_s / mtbf_s)
    try:
        return work / (math.exp(faults.restart_s / mtbf_s) * math.expm1(whole))
    except OverflowError:
        return 0.0
