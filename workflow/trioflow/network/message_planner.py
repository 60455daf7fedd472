"""Collectives message by message: which algorithm carries each out, between which nodes, and how fast.

`MessagePlanner` is the door. A `MessagePattern` is an algorithm on so many members, `CollectiveMessages` one collective
of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from trioflow.base.errors import InputError, SimulationError
from trioflow.base.runs import count_up
from trioflow.costmodel.collectives.model import SHIFT
from trioflow.hardware.machine import Platform, is_rank_node, name_rank_node
from trioflow.network.algorithms.catalogue import (
    Algorithms,
    build_message_schedule,
    choose_algorithm,
    count_switches,
    split_levels,
)
from trioflow.network.algorithms.pattern import WITH_BARRIER, MessageSchedule, check_entries, order_connections
from trioflow.network.collectives import (
    UNCALIBRATED,
    Bound,
    CollectiveCost,
    CollectiveFlows,
    CollectivePlanner,
    warn_of_speed,
)
from trioflow.network.networks import Floats, FlowShape

Index = NDArray[np.int32]

JOIN = -1
"""Pair of a row that moves nothing."""
_ROTATIONS = ("all_reduce", "barrier", "reduce_scatter", "all_gather", "all_to_all")


class MessageTable(Struct, frozen=True, eq=False):
    """The messages of a pattern; nothing waits for a later row, and every join for something."""

    pairs: Index  # different (source, target) among the endpoints [pairs, 2]
    # Pair that each message goes between, ``JOIN`` for a row that moves nothing and takes no time
    # [messages]
    pair_of: Index
    blocks: Index  # blocks that each message carries [messages]
    missing: Index  # how many rows must have arrived before each leaves [messages]
    # Where the rows that wait for each begin in ``successors`` [messages + 1]
    first_successors: Index
    successors: Index  # rows, ascending, for one row after the other [waits]
    # Pair of each connection (source, target and channel), which carries one message after the
    # other [connections]
    connections: Index

    @property
    def joins(self) -> int:
        """Rows that move nothing."""
        return int(np.count_nonzero(self.pair_of == JOIN))


class MessagePattern:
    """An algorithm on so many members: shared by its collectives of all sizes and groups.

    In every round of a ring each rank sends as much to the next one: known without the table, which is made when asked
    for. In chunks, a round is one of them on every link: by the time a link is free for one, what that waits for has
    come in a round before.
    """

    def __init__(
        self,
        collective: str,
        algorithm: str,
        ranks: int,
        ranks_per_node: int | None = None,
        switches: int = 0,
        chunks: int = 1,
    ) -> None:
        self.collective, self.algorithm, self.ranks = collective, algorithm, ranks
        self._ranks_per_node, self._switches = ranks_per_node, switches
        self.chunks = 1 if collective == "barrier" else chunks
        self._rotates = algorithm == "ring" and collective in _ROTATIONS and ranks > 1

    @cached_property
    def table(self) -> MessageTable:
        """The messages."""
        if self.round_blocks is not None and self.chunks == 1:
            return _tabulate_rotation(self.pairs, self.round_blocks)
        return tabulate(self.schedule)

    @cached_property
    def pairs(self) -> Index:
        """Different (source, target) among the endpoints [pairs, 2]."""
        if not self._rotates:
            return self.table.pairs
        rank = np.arange(self.ranks, dtype=np.int32)
        return np.column_stack([rank, (rank + 1) % self.ranks]).astype(np.int32)

    @cached_property
    def pieces(self) -> int:
        """Blocks that make up the collective's ``message_bytes``."""
        if self._rotates:
            return self.ranks * self.chunks
        block_bytes = self.schedule.contents.block_bytes
        return round(self.schedule.message_bytes / block_bytes) if block_bytes else 1

    @cached_property
    def messages(self) -> int:
        """Messages, without joins."""
        rounds = self.round_blocks
        if rounds is not None:
            return len(rounds) * self.ranks
        return len(self.table.pair_of) - self.table.joins

    @cached_property
    def round_blocks(self) -> Index | None:
        """Blocks of every message of each round [rounds], None for an algorithm without rounds.

        Every pair carries one message of as many blocks, which waits for its own connection's of the round before, and
        for others of earlier rounds only.
        """
        if not self._rotates:
            return None
        if self.collective == "all_to_all":
            blocks = np.arange(self.ranks - 1, 0, -1, dtype=np.int32)
        else:
            both = 2 if self.collective in ("all_reduce", "barrier") else 1
            blocks = np.ones(both * (self.ranks - 1), dtype=np.int32)
        check_entries(len(blocks) * self.ranks * self.chunks)
        return np.repeat(blocks, self.chunks)

    @cached_property
    def schedule(self) -> MessageSchedule:
        """The algorithm's messages on members 0, 1, 2, ..., one at a time on each connection."""
        made = build_message_schedule(
            self.collective,
            self.ranks,
            0.0 if self.collective == "barrier" else 1.0,
            algorithm=self.algorithm,
            chunks=self.chunks,
            ranks_per_node=self._ranks_per_node,
            switches=[str(number) for number in range(self._switches)],
        )
        return order_connections(made)


def _tabulate_rotation(pairs: Index, round_blocks: Index) -> MessageTable:
    """Return what ``tabulate`` makes of a ring's schedule, without one.

    A message from r waits, in the round before, for the one that brought its data to r and the one before it from r.
    """
    ranks, rounds = len(pairs), len(round_blocks)
    count = rounds * ranks
    missing = np.full(count, 2, dtype=np.int32)
    missing[:ranks] = 0
    waiting = 2 * (count - ranks)
    first = np.minimum(2 * np.arange(count + 1), waiting).astype(np.int32)
    own = np.arange(ranks, dtype=np.int32)
    both = np.sort(np.column_stack([own, (own + 1) % ranks]), axis=1).ravel()
    later = np.arange(1, rounds, dtype=np.int32)[:, None] * np.int32(ranks) + both
    return MessageTable(
        pairs, np.tile(own, rounds), np.repeat(round_blocks, ranks), missing, first, later.ravel().astype(np.int32), own
    )


def tabulate(schedule: MessageSchedule) -> MessageTable:
    """Turn a schedule around: from what each row waits for to what waits for it."""
    count, ends = len(schedule), len(schedule.endpoints)
    joins = schedule.joins
    keys = schedule.source.astype(np.int64) * ends + schedule.target
    distinct, codes = np.unique(keys[~joins], return_inverse=True)
    pair_of = np.full(count, JOIN, dtype=np.int32)
    pair_of[~joins] = codes
    channels = int(schedule.channel.max(initial=0)) + 1
    connections = np.unique(codes * channels + schedule.channel[~joins]) // channels
    missing = np.diff(schedule.after_first).astype(np.int32)
    waiter = np.repeat(np.arange(count, dtype=np.int32), missing)
    first = count_up(np.bincount(schedule.after, minlength=count)).astype(np.int32)
    return MessageTable(
        np.column_stack([distinct // ends, distinct % ends]).astype(np.int32),
        pair_of,
        np.diff(schedule.contents.first).astype(np.int32),
        missing,
        first,
        # Stable, so that the rows that wait for one stay ascending.
        waiter[np.argsort(schedule.after, kind="stable")],
        connections.astype(np.int32),
    )


class CollectiveMessages(Struct, frozen=True, eq=False):
    """One collective, message by message, and how far its time can be trusted."""

    pattern: MessagePattern  # what is sent
    shape: FlowShape  # ends and routes of the pattern's pairs
    block_bytes: float  # size of a block [bytes]
    # Of the messages of each pair [pairs] [s], [bytes/s]
    latencies_s: Floats
    max_rates_bytes_per_s: Floats
    confidence: str  # one of measured, interpolated, extrapolated, uncalibrated
    warning: str = ""  # what the reader must know; empty for nothing

    @property
    def flow_count(self) -> int:
        """Flows that it starts."""
        return self.pattern.messages

    def stretch(self, factor: float) -> CollectiveMessages:
        """Return it slower by a factor; the links are made narrower by it elsewhere."""
        return structs.replace(
            self, latencies_s=self.latencies_s * factor, max_rates_bytes_per_s=self.max_rates_bytes_per_s / factor
        )


RunAlone = Callable[[CollectiveMessages], float]
"""Says how long a collective takes on the platform's links with nothing else there [s]."""

_CLOSE = 1e-10
"""Relative distance from the measured time at which the search for it ends."""
_MOST_RUNS = 60


class Chunks(NamedTuple):
    """Into how many pieces messages are cut: so many, or as many as keep below a size [bytes]."""

    number: int = 1
    largest_bytes: float = math.inf


_MOST_CHUNKS = 1 << 16
"""Pieces of one message; NCCL's own are 128 KiB or more."""
WHOLE = Chunks()
"""Messages in one piece."""


class MessagePlanner(CollectivePlanner):
    """Turns collectives into messages, remembering what it has made; InputError for unknown collectives or odd chunks.

    ``algorithms``: of each collective, as for ``catalogue.choose_algorithm``, or one for all but sends; what is left
    out remains flows as of ``CollectivePlanner``. ``run_alone``: runs a collective by itself; measured_time where no
    formula says how long it takes. ``chunks``: pieces of each message; with a size, as many as keep each block, as one
    piece of the algorithm has it, at or below it.
    """

    def __init__(
        self,
        platform: Platform,
        algorithms: Algorithms,
        run_alone: RunAlone,
        cost: CollectiveCost | None = None,
        bound: Bound = "time_s",
        chunks: Chunks = WHOLE,
    ) -> None:
        if chunks.number < 1 or not chunks.largest_bytes > 0:
            raise InputError(
                f"messages in {chunks.number} chunks of up to {chunks.largest_bytes:g} bytes",
                fix="give at least one chunk, of more than 0 bytes",
            )
        if not isinstance(algorithms, str):
            for name in algorithms:
                if name not in WITH_BARRIER:
                    raise InputError(
                        f"no collective is called {name!r}",
                        place="algorithms",
                        fix=f"use some of {', '.join(WITH_BARRIER)}",
                    )
        super().__init__(platform, cost, bound)
        self._algorithms, self._run_alone, self._chunks = algorithms, run_alone, chunks
        self._find_pattern = cache(MessagePattern)

    def _build(  # type: ignore[override]
        self, collective: str, message_bytes: int, group: tuple[int, ...]
    ) -> CollectiveMessages | CollectiveFlows:
        """Return one collective.

        Raises SimulationError as ``CollectivePlanner.build``, InputError when the algorithm is unknown, does not do the
        collective, or does not fit the platform's nodes or switches.

        Without a measured cost a message has its route's latency and moves as fast as the links let it. With a measured
        time T latencies stay, and how long bytes move is multiplied by one factor f, so that the undisturbed collective
        lasts T: f > 1 caps every message at 1 / f of what it could have alone, f < 1 cuts the sizes (bytes counted on
        links are too few). Where T is less than the latencies, they shrink and no bytes move. Of equal rounds the time
        is linear in f; elsewhere f is found by runs of the collective alone.
        """
        algorithm = self._choose(collective)
        if algorithm is None:
            return super()._build(collective, message_bytes, group)
        if len(set(group)) != len(group) or (collective == "send" and len(group) != 2):
            raise SimulationError(f"{collective}: the group {list(group)} does not fit it")
        pattern, shape = self._find_shape(collective, message_bytes, group, algorithm)
        latencies_s = shape.latencies_s
        pairs = len(shape.pairs)
        plain = CollectiveMessages(
            pattern,
            shape,
            message_bytes / pattern.pieces,
            latencies_s,
            np.full(pairs, math.inf),
            UNCALIBRATED if pairs else "measured",
        )
        measured_time = self.find_time(collective, message_bytes, group) if pairs else None
        if measured_time is None:
            return plain
        measured, time_s = measured_time
        fitted, alone_s = _fit_messages(plain, time_s, self._run_alone)
        warning = warn_of_speed(collective, len(group), alone_s, time_s, self._platform)
        return structs.replace(fitted, confidence=measured.confidence, warning=warning)

    def kind(self, collective: str, message_bytes: int) -> object:
        """Return what collectives share whose shapes are the same in any group."""
        if self._choose(collective) is None:
            return super().kind(collective, message_bytes)
        return collective, message_bytes

    def shape(self, collective: str, message_bytes: int, group: tuple[int, ...]) -> FlowShape:
        """Return between whom a collective runs and over which links."""
        algorithm = self._choose(collective)
        if algorithm is None:
            return super().shape(collective, message_bytes, group)
        return self._find_shape(collective, message_bytes, group, algorithm)[1]

    def _choose(self, collective: str) -> str | None:
        if isinstance(self._algorithms, str):
            return None if collective in ("send", SHIFT) else self._algorithms
        return self._algorithms.get(collective)

    def _find_shape(
        self, collective: str, message_bytes: int, group: tuple[int, ...], algorithm: str
    ) -> tuple[MessagePattern, FlowShape]:
        """Return what is sent and between whom, the same one for all equal ones."""
        count = len(group)
        per_node = self._count_per_node(collective, group, algorithm)
        name = choose_algorithm(collective, algorithm, count, per_node)
        switches = count_switches(collective, algorithm, count, per_node)
        within = per_node if split_levels(name) else None
        pattern = self._find_pattern(collective, name, count, within, switches, self._chunks.number)
        block_bytes = message_bytes / pattern.pieces
        if block_bytes > self._chunks.largest_bytes:
            chunks = pattern.chunks * math.ceil(block_bytes / self._chunks.largest_bytes)
            if chunks > _MOST_CHUNKS:
                raise InputError(
                    f"{collective} of {message_bytes:,.0f} bytes in {chunks:,} chunks of"
                    f" {self._chunks.largest_bytes:g} bytes",
                    fix=f"give chunks of at least {math.ceil(block_bytes / _MOST_CHUNKS):,} bytes",
                )
            pattern = self._find_pattern(collective, name, count, within, switches, chunks)
        if (pattern, group) not in self._shapes:
            nodes = [name_rank_node(rank) for rank in group]
            nodes += self._find_switches(name, nodes, per_node, switches)
            pairs = tuple((nodes[source], nodes[target]) for source, target in pattern.pairs)
            self._shapes[pattern, group] = FlowShape(pairs, self.router)
        return pattern, self._shapes[pattern, group]

    def _count_per_node(self, collective: str, group: tuple[int, ...], algorithm: str) -> int | None:
        """Return how many members of a group are in each node, for hierarchical algorithms."""
        if not algorithm.startswith("hierarchical"):
            return None
        per_node = self._platform.ranks_per_node
        if per_node is None:
            raise InputError(
                f"{collective}: {algorithm} needs nodes, and {self._platform.name} has none",
                fix="state ranks_per_node in the platform, or choose another algorithm",
            )
        runs = [len(list(run)) for _, run in groupby(rank // per_node for rank in group)]
        nodes = len({rank // per_node for rank in group})
        if len(set(runs)) != 1 or len(runs) != nodes:
            raise InputError(
                f"{collective}: {algorithm} needs as many ranks of the group in each node, one "
                f"node after the other, and {list(group)} has runs of {runs}",
                fix="choose another algorithm",
            )
        return runs[0]

    def _find_switches(self, name: str, nodes: Sequence[str], per_node: int | None, switches: int) -> list[str]:
        """Return the switches that compute: each has links to and from all its ranks."""
        if not switches:
            return []
        levels = split_levels(name)
        if levels is None or per_node is None:
            return [self._find_switch(nodes, ())]
        on_route: list[str] = []
        if levels.inner == "in_network":
            for first in range(0, len(nodes), per_node):
                on_route.append(self._find_switch(nodes[first : first + per_node], on_route))
        if levels.outer == "in_network":
            on_route.append(self._find_switch(nodes, on_route))
        return on_route

    def _find_switch(self, nodes: Sequence[str], taken: Sequence[str]) -> str:
        joined = {(link.source, link.target) for link in self._platform.links}
        for switch in sorted({link.source for link in self._platform.links} - set(taken)):
            both_ways = all((node, switch) in joined and (switch, node) in joined for node in nodes)
            if both_ways and not is_rank_node(switch):
                return switch
        raise InputError(
            f"in_network: no switch of {self._platform.name} has links to all of {', '.join(nodes)}",
            fix="choose another algorithm",
        )


def _fit_messages(plain: CollectiveMessages, time_s: float, run_alone: RunAlone) -> tuple[CollectiveMessages, float]:
    """Make an undisturbed collective last a time, and return its own [s]; SimulationError when no factor gives that."""
    rate = _find_common_rate(plain)
    widths = plain.shape.widths_bytes_per_s if rate is None else np.full(len(plain.latencies_s), rate)

    def measure(messages: CollectiveMessages) -> float:
        return run_alone(messages) if rate is None else sum_rounds(messages, rate)[0]

    def slow_down(factor: float) -> CollectiveMessages:
        if factor < 1:
            return structs.replace(plain, block_bytes=plain.block_bytes * factor)
        return structs.replace(plain, max_rates_bytes_per_s=widths / factor)

    empty = structs.replace(plain, block_bytes=0.0)
    latency_s = measure(empty)
    alone_s = measure(plain)
    if time_s <= latency_s or alone_s == latency_s:
        if not latency_s:  # Nothing takes any time here: let all messages wait equally.
            empty = structs.replace(empty, latencies_s=np.ones(len(plain.latencies_s)))
        factor = time_s / measure(empty)
        return structs.replace(empty, latencies_s=empty.latencies_s * factor), alone_s
    factor = (time_s - latency_s) / (alone_s - latency_s)
    if rate is not None:
        return slow_down(factor), alone_s
    return _search(slow_down, factor, time_s, latency_s, measure), alone_s


def _search(
    slow_down: Callable[[float], CollectiveMessages], factor: float, time_s: float, latency_s: float, measure: RunAlone
) -> CollectiveMessages:
    """Find the factor by secants; by halves, where a secant came out on the same side again."""
    below, above = (0.0, latency_s), (math.inf, math.inf)
    rose = None
    for _ in range(_MOST_RUNS):
        fitted = slow_down(factor)
        found_s = measure(fitted)
        if abs(found_s - time_s) <= _CLOSE * time_s:
            return fitted
        again, rose = rose == (found_s < time_s), found_s < time_s
        if rose:
            below = (factor, found_s)
        else:
            above = (factor, found_s)
        if above[0] == math.inf:
            factor *= (time_s - latency_s) / (found_s - latency_s)
            continue
        share = 0.5 if again else (time_s - below[1]) / (above[1] - below[1])
        rose = None if again else rose
        factor = below[0] + (above[0] - below[0]) * share
    raise SimulationError(
        f"{fitted.pattern.algorithm} {fitted.pattern.collective} on {fitted.pattern.ranks} ranks "
        f"cannot be made to last {time_s!r} s"
    )


def _find_common_rate(messages: CollectiveMessages) -> float | None:
    """Return the rate of all messages of a round, None where they are not all alike [bytes/s]."""
    if messages.pattern.round_blocks is None:
        return None
    rates, latencies_s = messages.shape.rates_bytes_per_s, messages.latencies_s
    alike = (rates == rates[0]).all() and (latencies_s == latencies_s[0]).all()
    return float(rates[0]) if alike else None


def sum_rounds(messages: CollectiveMessages, rate: float) -> tuple[float, float]:
    """Return how long rounds of equal messages take one after the other [s], and what each pair sends [bytes]."""
    blocks = messages.pattern.round_blocks
    assert blocks is not None
    moved_bytes = int(blocks.sum()) * messages.block_bytes
    return len(blocks) * float(messages.latencies_s[0]) + moved_bytes / rate, moved_bytes
