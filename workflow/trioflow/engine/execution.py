"""What an engine returns, and what it says when tasks wait for ever."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trioflow.engine.program import Floats, Ints, Program
from trioflow.network.interface import NEVER_S

_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of flows' ways over links, each at one rate.

    Attributes
    ----------
    flow_id : ndarray of int
        Which flow, in the order in which they started [pieces].
    plan, pair : ndarray of int
        Plan that it belongs to, and which flow or pair of its shape it is [pieces].
    begin_s, end_s : ndarray of float
        When its bytes moved at that rate [pieces] [s].
    rate_bytes_per_s : ndarray of float
        How fast [pieces] [bytes/s].
    """

    flow_id: Ints
    plan: Ints
    pair: Ints
    begin_s: Floats
    end_s: Floats
    rate_bytes_per_s: Floats


@dataclass(frozen=True, eq=False)
class Execution:
    """When every task ran.

    Attributes
    ----------
    start_s, end_s : ndarray of float
        Start and end of each task after the start of the step [tasks] [s].
    events : int
        Starts and ends of tasks and of flows.
    link_bytes : mapping of (str, str) to float
        Bytes moved over each directed link [bytes].
    reshared_flows : int
        Rates computed by a network that shares links, a flow counted each time.
    pieces : Pieces or None
        Of its flows, where the network was to keep them.
    """

    start_s: Floats
    end_s: Floats
    events: int
    link_bytes: Mapping[tuple[str, str], float]
    reshared_flows: int
    pieces: Pieces | None = None


def explain_deadlock(program: Program, end_s: Floats) -> str:
    """Say which tasks wait for each other, following one of the circles.

    Parameters
    ----------
    program : Program
        What was executed.
    end_s : ndarray of float
        End of each task [tasks]; ``NEVER_S`` for those that never ran [s].
    """
    never = end_s == NEVER_S
    stuck = never.nonzero()[0].tolist()
    ranks = sorted(set(program.ranks[never].tolist()))
    predecessors = program.list_predecessors()
    exchanges = program.exchanges

    def lane(task: int) -> tuple[int, int]:
        return int(program.ranks[task]), int(program.streams[task])

    def blocker(task: int) -> tuple[int, str]:
        for other in predecessors[task]:
            if never[other]:
                same = lane(other) == lane(task) and other < task
                return other, "which is before it in its stream" if same else "its dependency"
        # All that it depends on has ended, so it is a member that waits for another member,
        # and that one waits for something before it.
        index = int(exchanges.of_task[task])
        first, last = exchanges.first_members[index : index + 2]
        partners = (
            (member, "its partner")
            for member in exchanges.members[first:last].tolist()
            if any(never[other] for other in predecessors[member])
        )
        return next(partners, (task, "as its time is endless"))

    chain, task = {stuck[0]: 0}, stuck[0]
    while (task := blocker(task)[0]) not in chain:
        chain[task] = len(chain)
    circle = list(chain)[chain[task] :]
    steps = []
    for one in circle[:_SHOWN]:
        other, why = blocker(one)
        steps.append(f"{program.describe(one)} waits for {program.describe(other)}, {why}")
    if len(circle) > _SHOWN:
        steps.append(f"and {len(circle) - _SHOWN} more")
    return (
        f"deadlock: {len(stuck)} tasks of rank {', '.join(map(str, ranks))} wait for each other "
        f"and never start: {'; '.join(steps)}"
    )
