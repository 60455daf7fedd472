"""What a simulation says: its timeline, its summary, what crossed the links, and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.errors import SimulationError
from trioflow.engine.link_traffic import LinkTraffic
from trioflow.engine.program import Execution, Program
from trioflow.engine.timeline import TimelineSummary
from trioflow.parallel.task_graph import TaskGraph


@dataclass(frozen=True, kw_only=True)
class Summary(TimelineSummary):
    """What a simulation came to, and how it was run.

    ``low_s``, ``high_s``: ends of the 80 % interval of the step, of ``simulate_interval`` [s]. ``expected_s``: what the
    step is expected to take where real runs showed the simulation to miss something [s]; the interval is its own then.
    ``events``: starts and ends of tasks and flows that were executed. ``link_bytes``: what crossed each link, by
    ``source->target`` [bytes]. ``confidence``: the worst of the collectives that take a share of the step, see
    ``certainty``; measured where nothing communicates. ``warnings``: what the reader must know, the graph's first.
    ``network``, ``engine``: how flows shared links, and which engine ran: compiled or reference. ``aggregated``:
    collectives that were one event; only with algorithms. ``folded``: whether identical ranks were executed once:
    ``events`` and ``aggregated`` then count what was executed. ``unfolded_reason``: why they were not; empty where they
    were. ``executed_ranks``: how many ranks were executed. ``simulator_wall_s``: wall time of the event loop, the only
    entry that differs between two runs [s].
    """

    low_s: float | None = None
    high_s: float | None = None
    expected_s: float | None = None
    events: int
    link_bytes: dict[str, float]
    confidence: str
    warnings: list[str]
    network: str
    engine: str
    aggregated: int | None = None
    folded: bool
    unfolded_reason: str
    executed_ranks: int
    simulator_wall_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON holds of it: optional entries only where there is something in them."""
        found = {cell.name: getattr(self, cell.name) for cell in fields(self)}
        found["per_rank"] = [row._asdict() for row in self.per_rank]
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Executed:
    """The tasks that were executed: those of all ranks, or of one rank of each class."""

    graph: TaskGraph
    timeline: pd.DataFrame  # columns of ``tables.TIMELINE``, a row for each task of the graph
    like: NDArray[np.int64]  # executed rank that does the same as each rank that has tasks [ranks]


@dataclass(frozen=True)
class Result:
    """What a simulation says, its tables made when asked for.

    ``traffic``: what crossed the links, with ``record_links``, for ``link_traffic.measure_links`` and ``link_rates``.
    """

    make_timeline: Callable[[], pd.DataFrame]
    make_executed: Callable[[], Executed]
    summary: Summary
    traffic: LinkTraffic | None = None

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """Columns of ``tables.TIMELINE`` of all ranks, a row a task by ``task_id``; ``stream`` is the one in which it ran."""
        return self.make_timeline()

    @cached_property
    def executed(self) -> Executed:
        """What was executed, which is small where identical ranks were executed once."""
        return self.make_executed()


CONFIDENCES = ("measured", "interpolated", "extrapolated", "uncalibrated")
"""From the best to the worst."""

_DECIDING_SHARE = 0.05
"""Parts that take a smaller share of the step are named, but decide no word: a convention."""

Part = tuple[str, int, str]
"""Collective, ranks and confidence."""


def measure_shares(program: Program, execution: Execution) -> dict[Part, float]:
    """Return the share of the step of each kind of exchange on the rank where it takes most.

    Raises SimulationError when the cost model states a word that is not one of ``CONFIDENCES``.
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
        note = (
            f" ({share:.1%} of the step, too little to decide the word of confidence)"
            if small
            else ""
        )
        warnings.append(f"{collective} on {ranks} ranks: its time is {word}, not measured{note}")
    return warnings
