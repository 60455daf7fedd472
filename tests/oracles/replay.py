"""Plain twins that check schedules: who ends up with what, and how long it takes."""

import heapq
from collections.abc import Callable, Sequence
from typing import Literal

from trioflow.base.errors import SimulationError
from trioflow.network.algorithms.pattern import MessageSchedule

Pick = Callable[[Sequence[int]], int]
Holding = dict[int, int]
"""Contributions that a member holds of each block: bit r is rank r's."""

_HELD_BY = {
    "all_reduce": ("all", "all"),
    "reduce_scatter": ("all", "each"),
    "all_gather": ("each", "all"),
    "broadcast": ("root", "all"),
    "reduce": ("all", "root"),
    "scatter": ("root", "each"),
    "gather": ("each", "root"),
    "send": ("root", "second"),
}
Wiring = Literal["links", "ports"]


def replay_schedule(schedule: MessageSchedule, pick: Pick) -> list[Holding]:
    """Run the messages in any order that respects the waits, and check each step.

    Parameters
    ----------
    schedule : Schedule
        Small: everything is plain Python.
    pick : function of a sequence of int
        Which of the rows that could go on does so, as its place in the
        sequence. A row goes on twice: the message leaves (and reads its
        source), the message arrives (and writes).

    Returns
    -------
    list of dict [endpoints]
        What each holds at the end.

    Raises
    ------
    SimulationError
        When a message sends what its source does not have or what changes on
        the way, a contribution is added twice, or messages wait for ever.
    """
    waiting, followers = _index_waits(schedule)
    holdings = start_holdings(schedule)
    possible = [row for row, count in enumerate(waiting) if not count]
    leaving: dict[int, list[tuple[int, int]]] = {}
    done = 0
    while possible:
        row = possible.pop(pick(possible))
        if row not in leaving:
            leaving[row] = _read(schedule, holdings, row)
            possible.append(row)
            continue
        if _read(schedule, holdings, row) != leaving[row]:
            raise SimulationError(f"row {row}: what it carries changed on the way")
        _write(schedule, holdings, row, leaving[row])
        done += 1
        for follower in followers[row]:
            waiting[follower] -= 1
            if not waiting[follower]:
                possible.append(follower)
    if done < len(schedule):
        raise SimulationError(f"{len(schedule) - done} messages wait for ever")
    return holdings


def start_holdings(schedule: MessageSchedule) -> list[Holding]:
    """Return what each endpoint holds before the first message."""
    holdings: list[Holding] = [{} for _ in schedule.endpoints]
    for block, origin in enumerate(schedule.contents.origin.tolist()):
        for rank in range(schedule.ranks):
            if origin in (-1, rank):
                holdings[rank][block] = 1 << rank
    return holdings


def check_promise(schedule: MessageSchedule, holdings: list[Holding]) -> None:
    """Check that a replay left every rank with what the collective promises.

    Raises
    ------
    SimulationError
        When the blocks are not those of the collective, or a rank that must
        hold one does not, or lacks a contribution.
    """
    _check_blocks(schedule)
    origin, destination = schedule.contents.origin, schedule.contents.destination
    everyone = (1 << schedule.ranks) - 1
    for block, (start, end) in enumerate(zip(origin.tolist(), destination.tolist(), strict=True)):
        wanted = everyone if start < 0 else 1 << start
        for rank in range(schedule.ranks) if end < 0 else [end]:
            found = holdings[rank].get(block)
            if found != wanted:
                raise SimulationError(
                    f"{schedule.algorithm} {schedule.collective}: rank {rank} holds "
                    f"{found} of block {block}, not {wanted}"
                )


def _check_blocks(schedule: MessageSchedule) -> None:
    """Check who holds which blocks at both ends, and that they make up the message."""
    contents, ranks = schedule.contents, schedule.ranks
    pairs = list(zip(contents.origin.tolist(), contents.destination.tolist(), strict=True))
    each = set(range(ranks))
    sets = {"all": {-1}, "root": {0}, "second": {1}, "each": each}
    if schedule.collective == "all_to_all":
        wanted, whole = {(a, b) for a in each for b in each}, ranks
    elif schedule.collective == "barrier":
        starts, whole = {start for start, _ in pairs}, 1
        wanted = {(start, -1) for start in (each if starts == each else {-1})}
    else:
        start_kind, end_kind = _HELD_BY[schedule.collective]
        wanted, whole = {(a, b) for a in sets[start_kind] for b in sets[end_kind]}, 1
    counts = {pair: pairs.count(pair) for pair in set(pairs)}
    total = len(pairs) * contents.block_bytes
    expected = schedule.message_bytes * whole
    alone = ranks == 1  # every block is where it must be
    if not alone and (set(counts) != wanted or len(set(counts.values())) != 1):
        raise SimulationError(f"{schedule.collective}: its blocks are {counts}")
    if abs(total - expected) > 1e-9 * expected:
        raise SimulationError(f"{schedule.collective}: blocks hold {total} bytes, not {expected}")


def execute_schedule(
    schedule: MessageSchedule, duration_s: Callable[[int, int, float], float], wiring: Wiring = "links"
) -> float:
    """Return when the last message arrives, each link or port carrying one at a time [s].

    Parameters
    ----------
    schedule : Schedule
        Small.
    duration_s : function of (int, int, float)
        What a message takes, from its source, target and size [bytes] to [s].
    wiring : {"links", "ports"}
        One message at a time per directed link (of a channel); or one out of
        and one into each rank, whatever the other end, as behind a switch.

    Notes
    -----
    Whenever something ends, messages that may leave and find their link or
    both ports idle do so, in the order of the rows.
    """
    waiting, followers = _index_waits(schedule)
    needs = _name_resources(schedule, wiring)
    ends = list(zip(schedule.source.tolist(), schedule.target.tolist(), strict=True))
    ready = [row for row, count in enumerate(waiting) if not count]
    busy: set[tuple[object, ...]] = set()
    flying: list[tuple[float, int]] = []
    now_s = 0.0
    while ready or flying:
        held = []
        for row in sorted(ready):
            if busy & needs[row]:
                held.append(row)
                continue
            busy |= needs[row]
            source, target = ends[row]
            join = source == target
            spent_s = 0.0 if join else duration_s(source, target, float(schedule.size_bytes[row]))
            heapq.heappush(flying, (now_s + spent_s, row))
        ready, now_s = held, flying[0][0]
        while flying and flying[0][0] == now_s:
            _, row = heapq.heappop(flying)
            busy -= needs[row]
            for follower in followers[row]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)
    if any(waiting):
        raise SimulationError(f"{sum(map(bool, waiting))} messages wait for ever")
    return now_s


def _name_resources(schedule: MessageSchedule, wiring: Wiring) -> list[set[tuple[object, ...]]]:
    """Return what each row occupies while it is on its way."""
    ranks = schedule.ranks
    columns = (schedule.source.tolist(), schedule.target.tolist(), schedule.channel.tolist())
    found: list[set[tuple[object, ...]]] = []
    for source, target, channel in zip(*columns, strict=True):
        if source == target:
            found.append(set())
        elif wiring == "links":
            found.append({(source, target, channel)})
        else:
            ports = {("out", source), ("in", target)}
            found.append({port for port in ports if port[1] < ranks})
    return found


def _index_waits(schedule: MessageSchedule) -> tuple[list[int], list[list[int]]]:
    """Return how many rows each row waits for, and which rows wait for it."""
    first, after = schedule.after_first.tolist(), schedule.after.tolist()
    followers: list[list[int]] = [[] for _ in range(len(schedule))]
    for row in range(len(schedule)):
        for other in after[first[row] : first[row + 1]]:
            followers[other].append(row)
    return [first[row + 1] - first[row] for row in range(len(schedule))], followers


def _blocks(schedule: MessageSchedule, row: int) -> list[int]:
    contents = schedule.contents
    found: list[int] = contents.block[contents.first[row] : contents.first[row + 1]].tolist()
    return found


def _read(schedule: MessageSchedule, holdings: list[Holding], row: int) -> list[tuple[int, int]]:
    source = int(schedule.source[row])
    missing = [block for block in _blocks(schedule, row) if block not in holdings[source]]
    if missing:
        raise SimulationError(f"row {row}: member {source} does not have blocks {missing}")
    return [(block, holdings[source][block]) for block in _blocks(schedule, row)]


def _write(schedule: MessageSchedule, holdings: list[Holding], row: int, carried: list[tuple[int, int]]) -> None:
    target = holdings[int(schedule.target[row])]
    for block, arrives in carried:
        held = target.get(block, 0) if schedule.contents.reduces[row] else 0
        if held & arrives:
            raise SimulationError(f"row {row}: block {block} is added twice")
        target[block] = held | arrives
