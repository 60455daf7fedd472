"""What turns a graph's collectives into flows or messages: its plan's word, or the caller's."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trioflow.engine.alone import make_run_alone
from trioflow.engine.exchanges import Planner
from trioflow.hardware.machine import Platform
from trioflow.network.algorithms.names import Algorithms, read_algorithms, spell_algorithm
from trioflow.network.collectives import Bound, CollectiveCost, CollectivePlanner
from trioflow.network.message_planner import WHOLE, Chunks, MessagePlanner


def choose_algorithms(
    metadata: Mapping[str, Any], algorithms: Algorithms | None, chunks: Chunks | None
) -> tuple[Algorithms | None, Chunks]:
    """Return the algorithms and chunks that a caller asks for, or else the graph's plan.

    Parameters
    ----------
    metadata : mapping
        Of the graph; its ``plan`` may hold ``algorithms``, ``chunks`` and
        ``chunk_bytes``, as a row of ``plans.tsv`` does.
    algorithms : str or mapping of str to str or None
        As for ``simulate.simulate``; short names are welcome.
    chunks : Chunks or None
        As for ``simulate.simulate``.

    Raises
    ------
    InputError
        When an algorithm or a collective is unknown.
    """
    plan = metadata.get("plan")
    plan = plan if isinstance(plan, Mapping) else {}
    if algorithms is None and plan.get("algorithms", "none") != "none":
        algorithms = str(plan["algorithms"])
    if isinstance(algorithms, str):
        algorithms = read_algorithms(algorithms)
    elif algorithms is not None:
        algorithms = {name: spell_algorithm(word) for name, word in algorithms.items()}
    if chunks is None:
        largest_bytes = float(plan.get("chunk_bytes", 0)) or math.inf
        chunks = Chunks(int(plan.get("chunks", WHOLE.number)), largest_bytes)
    return algorithms, chunks


def make_planner(
    platform: Platform,
    collectives: CollectiveCost | None,
    bound: Bound,
    algorithms: Algorithms | None,
    chunks: Chunks,
) -> Planner:
    """Return what turns collectives into messages, or into flows where no algorithm is given.

    Raises
    ------
    InputError
        As ``MessagePlanner``.
    """
    if algorithms is None:
        return keep_planner(platform, collectives, bound)
    run_alone = make_run_alone(platform)
    return MessagePlanner(platform, algorithms, run_alone, collectives, bound, chunks)


_kept: OrderedDict[tuple[int, int, Bound], _Kept] = OrderedDict()
MOST_KEPT = 12
"""Planners that are kept: of a few platforms, and of the three ends of an interval."""
MOST_USES = 256
"""A planner is made anew after so many simulations, so that what it remembers has an end."""


@dataclass
class _Kept:
    """A planner, what it was made from, and how often it has been used."""

    platform: Platform
    collectives: CollectiveCost | None
    planner: CollectivePlanner
    uses: int = 0


def keep_planner(
    platform: Platform, collectives: CollectiveCost | None, bound: Bound
) -> CollectivePlanner:
    """Return the planner of a platform object: the same one for many simulations on it.

    Notes
    -----
    Finding routes takes longer than simulating a folded graph does. A planner
    only remembers what it would find again, so that sharing it changes nothing.
    """
    key = (id(platform), id(collectives), bound)
    kept = _kept.get(key)
    if kept is None or kept.uses >= MOST_USES:
        # What is kept is held on to, so that nothing else gets its identity.
        planner = CollectivePlanner(platform, collectives, bound)
        kept = _kept[key] = _Kept(platform, collectives, planner)
    _kept.move_to_end(key)
    while len(_kept) > MOST_KEPT:
        _kept.popitem(last=False)
    kept.uses += 1
    return kept.planner
