"""How far a simulated step can be trusted: one word, and the parts that nothing measured backs."""

from __future__ import annotations

import numpy as np

from trioflow.engine.program import Execution, Program
from trioflow.errors import SimulationError

CONFIDENCES = ("measured", "interpolated", "extrapolated", "uncalibrated")
"""From the best to the worst."""

_DECIDING_SHARE = 0.05
"""Parts that take a smaller share of the step are named, but decide no word: a convention."""

Part = tuple[str, int, str]
"""Collective, ranks and confidence."""


def measure_shares(program: Program, execution: Execution) -> dict[Part, float]:
    """Return the share of the step that each kind of exchange takes on the rank where it takes most.

    Parameters
    ----------
    program : Program
        What was executed.
    execution : Execution
        When its tasks ran.

    Raises
    ------
    SimulationError
        When the cost model states a word that is not one of ``CONFIDENCES``.
    """
    exchanges = program.exchanges
    unknown = sorted({word for _, _, word in exchanges.confidences} - set(CONFIDENCES))
    if unknown:
        raise SimulationError(
            f"the cost model states the confidence {unknown[0]!r}; "
            f"known are {', '.join(CONFIDENCES)}"
        )
    exchange = np.repeat(np.arange(len(exchanges.plan_of)), np.diff(exchanges.first_members))
    plan, tasks = exchanges.plan_of[exchange], exchanges.members
    step_s = float(execution.end_s.max(initial=0.0))
    ranks = int(program.ranks.max(initial=0)) + 1
    lasted_s = execution.end_s[tasks] - execution.start_s[tasks]
    shares: dict[Part, float] = {}
    for part in dict.fromkeys(exchanges.confidences):
        numbers = [n for n, other in enumerate(exchanges.confidences) if other == part]
        if not any(exchanges.plans[n].flow_count for n in numbers):
            continue
        chosen = np.isin(plan, numbers)
        most_s = np.bincount(program.ranks[tasks[chosen]], lasted_s[chosen], ranks).max()
        shares[part] = float(most_s) / step_s if step_s > 0 else 0.0
    return shares


def find_confidence(shares: dict[Part, float]) -> str:
    """Return the worst word of parts that, with those of worse words, take a share that counts."""
    for place in range(len(CONFIDENCES) - 1, 0, -1):
        worse = CONFIDENCES[place:]
        if sum(share for part, share in shares.items() if part[2] in worse) >= _DECIDING_SHARE:
            return CONFIDENCES[place]
    return CONFIDENCES[0]


def warn_of_parts(shares: dict[Part, float]) -> list[str]:
    """Name the collectives whose times nothing measured backs; those that decided no word with their share."""
    decided = CONFIDENCES.index(find_confidence(shares))
    warnings = []
    for (collective, ranks, word), share in sorted(shares.items()):
        if word not in CONFIDENCES[2:]:
            continue
        small = CONFIDENCES.index(word) > decided
        told = f" ({share:.1%} of the step, which decides no confidence)" if small else ""
        warnings.append(f"{collective} on {ranks} ranks: its time is {word}, not measured{told}")
    return warnings
