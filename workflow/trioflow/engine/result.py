"""What a simulation says: its timeline, its summary, what crossed the links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import pandas as pd

from trioflow.engine.link_traffic import LinkTraffic
from trioflow.engine.timeline import TimelineSummary


@dataclass(frozen=True, kw_only=True)
class Summary(TimelineSummary):
    """What a simulation came to, and how it was run.

    Attributes
    ----------
    low_s, high_s : float, optional
        Ends of the 80 % interval of the step, of ``simulate_interval`` [s].
    events : int
        Starts and ends of tasks and flows that were executed.
    link_bytes : dict of str to float
        What crossed each link, by ``source->target`` [bytes].
    confidence : str
        The worst of the collectives that take a share of the step, see
        ``certainty``; measured where nothing communicates.
    warnings : list of str
        What the reader must know, the graph's first.
    network, engine : str
        How flows shared links, and which engine ran: compiled or reference.
    aggregated : int, optional
        Collectives that were one event; only with algorithms.
    folded : bool
        Whether identical ranks were executed once: ``events`` and ``aggregated`` then count what
        was executed.
    unfolded_reason : str
        Why they were not; empty where they were.
    executed_ranks : int
        How many ranks were executed.
    simulator_wall_s : float
        Wall time of the event loop, the only entry that differs between two runs [s].
    """

    low_s: float | None = None
    high_s: float | None = None
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


@dataclass(frozen=True)
class Result:
    """What a simulation says.

    Attributes
    ----------
    make_timeline : callable
        Makes the timeline, of all ranks.
    summary : Summary
        What it came to.
    traffic : LinkTraffic or None
        What crossed the links, with ``record_links``: for
        ``link_traffic.measure_links`` and ``link_rates``.
    """

    make_timeline: Callable[[], pd.DataFrame]
    summary: Summary
    traffic: LinkTraffic | None = None

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """Columns of ``tables.TIMELINE``, one row a task, in the order of ``task_id``.

        ``stream`` is the one in which the task ran. It is made when it is
        asked for: where identical ranks were executed once, it is longer than
        what was executed.
        """
        return self.make_timeline()
