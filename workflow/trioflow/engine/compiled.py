"""The compiled engine: the rules of the reference on arrays, for large graphs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trioflow.engine import layout
from trioflow.engine.compilation import execute
from trioflow.engine.exchanges import Plan
from trioflow.engine.execution import Execution, Pieces, explain_deadlock
from trioflow.engine.program import Program
from trioflow.engine.reference import run_reference
from trioflow.engine.state import make_state
from trioflow.errors import InputError, SimulationError
from trioflow.network.collectives import CollectiveFlows
from trioflow.network.contention_free import ContentionFreeNetwork
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.interface import NEVER_S, Network
from trioflow.network.messages import CollectiveRounds

_ROOM = 2
"""Pieces of flows for which there is room at first, for every event of a program."""


def supports(network: Network) -> bool:
    """Tell whether the compiled engine knows how a network shares its links."""
    return type(network) in (FairShareNetwork, ContentionFreeNetwork)


def run_compiled(program: Program, network: Network) -> Execution:
    """Execute a program; the result equals that of ``run_reference`` bit for bit.

    Parameters
    ----------
    program : Program
        What to execute.
    network : FairShareNetwork or ContentionFreeNetwork
        Unused network: says which links there are and whether flows share
        them. It stays unused.

    Raises
    ------
    SimulationError
        As ``run_reference``, with the same words.
    InputError
        When the network is of another kind, which only the reference drives.
    """
    if not isinstance(network, FairShareNetwork | ContentionFreeNetwork) or not supports(network):
        raise InputError(
            f"the compiled engine does not know the network {type(network).__name__}",
            fix="choose the engine reference or auto",
        )
    if not all(_can_end(plan) for plan in program.exchanges.plans):
        return run_reference(program, network)  # It says which flow has what wrong.
    shared = isinstance(network, FairShareNetwork)
    keep = network.pieces is not None
    state = make_state(program, network.links, shared, _ROOM * program.events if keep else 0)
    execute(state)
    if keep and state.count[layout.PIECES] > len(state.pieces):
        # How many there are is only known afterwards; the second run is the same as the first.
        state = make_state(program, network.links, shared, int(state.count[layout.PIECES]))
        execute(state)
    start_s, end_s = state.tasks["start_s"].copy(), state.tasks["end_s"].copy()
    if (end_s == NEVER_S).any():
        raise SimulationError(explain_deadlock(program, end_s))
    return Execution(
        start_s,
        end_s,
        int(state.count[layout.EVENTS]),
        _name_bytes(network, state.links["moved_bytes"].tolist()),
        int(state.count[layout.RESHARED]),
        _read_pieces(state) if keep else None,
    )


def _name_bytes(
    network: FairShareNetwork | ContentionFreeNetwork, moved_bytes: list[float]
) -> dict[tuple[str, str], float]:
    """Return what moved over each link by its ends; of links side by side, over the last."""
    ends = network.link_bytes
    if len(ends) == len(moved_bytes):  # The usual case: the names are there already.
        return dict(zip(ends, moved_bytes, strict=True))
    pairs = zip(network.links, moved_bytes, strict=True)
    return {(link.source, link.target): moved for link, moved in pairs}


def _read_pieces(state: Any) -> Pieces:
    """Return the pieces of flows that were kept."""
    kept = state.pieces[: state.count[layout.PIECES]]
    first, last = state.plans["first_flow"], state.plans["last_flow"]
    plan = np.repeat(np.arange(len(state.plans)), last - first)[kept["flow"]]
    columns = (kept[name].copy() for name in ("begin_s", "end_s", "rate"))
    return Pieces(kept["flow_id"].copy(), plan, kept["flow"] - first[plan], *columns)


def _can_end(plan: Plan) -> bool:
    """Tell whether a network would take all flows of a plan; see ``interface.check_flow``."""
    if isinstance(plan, CollectiveRounds):
        return True
    sizes_bytes = plan.sizes_bytes if isinstance(plan, CollectiveFlows) else plan.block_bytes
    known = [(column >= 0) & (column < math.inf) for column in (sizes_bytes, plan.latencies_s)]
    return all(np.all(one) for one in (*known, plan.max_rates_bytes_per_s > 0))
