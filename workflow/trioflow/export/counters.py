"""Curves over time that a timeline is shown with: what links move, and what ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.engine.networks import find_network
from trioflow.network.contention_free import ContentionFreeNetwork
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.link_usage import Simulated, link_rates

LINK_UNIT = "bytes/s"
MEMORY, MEMORY_UNIT = "memory", "bytes"
MOST_POINTS = 2000
"""Points of a rank's memory curve; longer ones keep the most of each stretch."""
_HELD_BY_DEVICE = ("compute", "memcpy", "host")


def can_count_links(network: str) -> bool:
    """Tell whether a network can be simulated with ``record_links=True``.

    Parameters
    ----------
    network : str
        As for ``engine.networks.find_network``.
    """
    return find_network(network) in (FairShareNetwork, ContentionFreeNetwork)


def count_link_rates(result: Simulated) -> pd.DataFrame:
    """Return the rate of every link that bytes moved over, as ``write_perfetto`` takes curves.

    Parameters
    ----------
    result : Simulated
        Simulated with ``record_links=True``.

    Returns
    -------
    DataFrame
        ``rank`` (null: a link is of no rank), ``counter``, ``unit``,
        ``time_s`` [s] and ``value`` [bytes/s].

    Raises
    ------
    InputError
        When the result holds no traffic.
    """
    rates = link_rates(result)
    return pd.DataFrame({
        "rank": pd.array([None] * len(rates), dtype="Int64"),
        "counter": rates["link"],
        "unit": LINK_UNIT,
        "time_s": rates["time_s"],
        "value": rates["rate_bytes_per_s"],
    })  # fmt: skip


def count_memory(
    curves: Sequence[Mapping[str, Any]], timeline: pd.DataFrame, most_points: int = MOST_POINTS
) -> pd.DataFrame:
    """Return what every rank holds over time, as ``write_perfetto`` takes curves.

    Parameters
    ----------
    curves : sequence of mapping
        ``metadata.memory_curves`` of the task graph: ``ranks`` that are
        alike, ``places`` among a rank's tasks, and the ``bytes`` that it holds
        from there on.
    timeline : DataFrame
        Columns of ``tables.TIMELINE``, of the same graph.
    most_points : int
        Points of a rank; of more, neighbours are joined and keep their most.

    Returns
    -------
    DataFrame
        ``rank``, ``counter``, ``unit``, ``time_s`` [s] and ``value`` [bytes].

    Notes
    -----
    Memory is handed out in the order of the program, whenever the device runs
    (``parallel.memory_profile``). A change is shown when the device begins
    the task at which it happens; of communication, whose streams run ahead
    or behind, at the latest begin of computation before it.
    """
    order = np.argsort(timeline["rank"].to_numpy(np.int64), kind="stable")
    rank = timeline["rank"].to_numpy(np.int64)[order]
    start_s = timeline["start_s"].to_numpy(np.float64)[order]
    computes = timeline["kind"].isin(_HELD_BY_DEVICE).to_numpy(dtype=bool)[order]
    shown_s = np.where(computes, start_s, 0.0)
    ranks, times_s, values = [], [], []
    for curve in curves:
        places = np.asarray(curve["places"], dtype=np.int64)
        held = np.asarray(curve["bytes"], dtype=np.int64)
        places, held = _thin(places, held, most_points)
        for one in curve["ranks"]:
            first, last = np.searchsorted(rank, [one, one + 1])
            known = places < last - first
            reached_s = np.maximum.accumulate(shown_s[first:last])[places[known]]
            ranks.append(np.full(len(reached_s), one, dtype=np.int64))
            times_s.append(reached_s)
            values.append(held[known])
    none = np.zeros(0)
    return pd.DataFrame({
        "rank": pd.array(np.concatenate([none.astype(np.int64), *ranks]), dtype="Int64"),
        "counter": MEMORY,
        "unit": MEMORY_UNIT,
        "time_s": np.concatenate([none, *times_s]),
        "value": np.concatenate([none, *values]),
    })  # fmt: skip


def _thin(
    places: NDArray[np.int64], held: NDArray[np.int64], most_points: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join neighbours until there are few enough points; each shows the most of its stretch, the last the end."""
    if len(places) <= most_points:
        return places, held
    firsts = np.unique(np.linspace(0, len(places) - 1, most_points).astype(np.int64))
    return places[firsts], np.maximum.reduceat(held, firsts)
