"""Rows of the table of speeds: what was measured, the aim, and what a peer took for the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Peer:
    """What another simulator took for the same question.

    Attributes
    ----------
    name : str
        Simulator.
    least_s : float
        Its time [s]; the least where several runs differed, or what it had taken when it was stopped.
    text : str
        Its time in words; from ``least_s`` without.
    """

    name: str
    least_s: float
    text: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes
    ----------
    what : str
        What was done.
    value : float
        What it took or reached.
    unit : str
        Of the value: s, or a rate.
    aim : float or None
        What it should take at most (s) or reach at least (a rate), in the unit.
    detail : str
        What else is worth knowing, events for instance.
    peer : Peer or None
        Another simulator's time for the same.
    headline : bool
        Whether the row also stands in the README.
    """

    what: str
    value: float
    unit: str = "s"
    aim: float | None = None
    detail: str = ""
    peer: Peer | None = None
    headline: bool = False

    @property
    def ratio(self) -> float | None:
        """How many times as long as the value the peer took."""
        return self.peer.least_s / self.value if self.peer and self.value else None

    def as_record(self) -> dict[str, Any]:
        """Return the row as plain columns."""
        peer = self.peer or Peer("", 0.0)
        return {
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "aim": self.aim,
            "detail": self.detail,
            "peer": peer.name,
            "peer_time": peer.text or (f"{peer.least_s:g} s" if self.peer else ""),
            "ratio": self.ratio,
            "headline": self.headline,
        }


def time_s(run: Callable[[], object], repeats: int = 5, *, warm_up: bool = True) -> float:
    """Return the median wall time of a call, after one that is not timed [s]."""
    if warm_up:
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def list_rows(found: Iterable[Row]) -> list[Row]:
    """Return rows as they come, told one by one: a whole run takes many minutes."""
    rows = []
    for row in found:
        rows.append(row)
        print(f"{row.what}: {row.value:.3g} {row.unit} {row.detail}", flush=True)
    return rows
