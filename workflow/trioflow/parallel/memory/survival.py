"""The probability that a run's memory suffices, by how real runs ended that were predicted to need so much.

What a rank needs is its allocated peak and a share of what its allocator would keep beside it, since a full allocator
gives its cache back, but not what lies in pieces. The logarithm of the memory that a run really takes over that is
logistic; a run survives where it is no more than what context and communicators leave of its device, but for a few that
fail whatever they need. All four numbers come from runs that succeeded or ran out of memory
(``data/memory_survival.tsv``).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.provenance import PACKAGE
from trioflow.base.shipped import read_table

SURVIVAL = PACKAGE / "data/memory_survival.tsv"
LIKELY = 0.5
"""Least probability with which a step counts as one that fits."""
DOUBTED = 0.9
"""Least probability with which nobody is warned."""


@dataclass(frozen=True)
class Survival:
    """How runs end by what they are predicted to need.

    ``location_log``, ``scale_log``: median and scale of the logarithm of taken over needed memory; ``kept_share``: of
    what an allocator keeps free, what it needs; ``lapse``: share of runs that fail whatever they need.
    """

    location_log: float
    scale_log: float
    kept_share: float
    lapse: float

    def count_needed(self, entry: Mapping[str, Any]) -> float:
        """Return what the ranks of an entry of ``estimate_memory`` need [bytes]."""
        peak_bytes = int(entry["peak_bytes"])
        return peak_bytes + self.kept_share * (count_wanted(entry) - peak_bytes)

    def find_probability(self, needed_bytes: float, room_bytes: float) -> float:
        """Return the probability that a rank that needs so much survives in the room it has [bytes]."""
        return float(self.find_probabilities(np.array([needed_bytes]), np.array([room_bytes]))[0])

    def find_probabilities(
        self, needed_bytes: NDArray[np.float64], room_bytes: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the same of many ranks."""
        beyond = np.log(np.maximum(needed_bytes, 1.0) / np.maximum(room_bytes, 1e-3))
        exponent = np.clip((beyond + self.location_log) / self.scale_log, -700.0, 700.0)
        return np.asarray((1 - self.lapse) / (1 + np.exp(exponent)))

    def find_limit(self, probability: float, room_bytes: float) -> float:
        """Return the most that a rank may need to survive with a probability, of those that do not lapse [bytes]."""
        odds = math.log(probability / (1 - probability))
        return room_bytes * math.exp(-self.location_log - self.scale_log * odds)


@cache
def load_survival(left_out: str = "") -> Survival:
    """Return the shipped numbers, or those that were fitted without a model's runs where any were fitted on."""
    rows = {row["left_out"]: row for row in read_table(SURVIVAL)}
    row = rows.get(left_out, rows[""])
    return Survival(*(float(row[field.name]) for field in fields(Survival)))


def count_wanted(entry: Mapping[str, Any]) -> int:
    """Return what the allocator of the ranks of an entry of ``estimate_memory`` would hold without a limit [bytes]."""
    held = entry.get("wanted_bytes", entry.get("reserved_bytes", 0))
    return max(int(held), int(entry["peak_bytes"]))


def count_needed(memory: Sequence[Mapping[str, Any]]) -> float:
    """Return what the rank that needs most needs [bytes]; 0 where no memory is known.

    Ranks run the same program and their errors are alike, so it is the first to fail.
    """
    return max(map(load_survival().count_needed, memory), default=0.0)


def describe_probability(probability: float) -> str:
    """Return a probability in words that promise nothing: ``97 % likely to fit``."""
    if probability > 0.995:
        return "over 99 % likely to fit"
    return "less than 1 % likely to fit" if probability < 0.005 else f"{probability * 100:.0f} % likely to fit"
