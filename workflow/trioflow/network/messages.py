"""Collectives message by message: what an algorithm sends, and one collective of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trioflow.network.algorithms.catalogue import build_schedule
from trioflow.network.algorithms.pattern import Schedule, check_entries, order_connections
from trioflow.network.fair_share import FlowShape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Index = NDArray[np.int32]

JOIN = -1
"""Pair of a row that moves nothing."""
_ROTATIONS = ("all_reduce", "barrier", "reduce_scatter", "all_gather", "all_to_all")


@dataclass(frozen=True, eq=False)
class MessageTable:
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
    def schedule(self) -> Schedule:
        """The algorithm's messages on members 0, 1, 2, ..., one at a time on each connection."""
        made = build_schedule(
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
        pairs,
        np.tile(own, rounds),
        np.repeat(round_blocks, ranks),
        missing,
        first,
        later.ravel().astype(np.int32),
        own,
    )


def tabulate(schedule: Schedule) -> MessageTable:
    """Turn a schedule around: from what each row waits for to what waits for it."""
    count, ends = len(schedule), len(schedule.endpoints)
    joins = schedule.joins
    keys = schedule.source.astype(np.int64) * ends + schedule.target
    found, codes = np.unique(keys[~joins], return_inverse=True)
    pair_of = np.full(count, JOIN, dtype=np.int32)
    pair_of[~joins] = codes
    channels = int(schedule.channel.max(initial=0)) + 1
    connections = np.unique(codes * channels + schedule.channel[~joins]) // channels
    missing = np.diff(schedule.after_first).astype(np.int32)
    waiter = np.repeat(np.arange(count, dtype=np.int32), missing)
    first = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(np.bincount(schedule.after, minlength=count), out=first[1:])
    return MessageTable(
        np.column_stack([found // ends, found % ends]).astype(np.int32),
        pair_of,
        np.diff(schedule.contents.first).astype(np.int32),
        missing,
        first,
        # Stable, so that the rows that wait for one stay ascending.
        waiter[np.argsort(schedule.after, kind="stable")],
        connections.astype(np.int32),
    )


@dataclass(frozen=True, eq=False)
class CollectiveMessages:
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
        return replace(
            self,
            latencies_s=self.latencies_s * factor,
            max_rates_bytes_per_s=self.max_rates_bytes_per_s / factor,
        )


@dataclass(frozen=True, eq=False)
class CollectiveRounds:
    """One collective whose rounds nothing disturbs: its end is known when it starts."""

    # Latency of each round's messages, and how long their bytes move [rounds] [s]
    latencies_s: Floats
    moving_s: Floats
    sizes_bytes: Floats  # size of each message of a round [rounds] [bytes]
    # Links that it crosses, and how many of its pairs cross each [links]
    links: Ints
    crossings: Ints
    # As for ``CollectiveMessages``
    confidence: str
    warning: str = ""

    @property
    def flow_count(self) -> int:
        """Flows that it starts: none."""
        return 0
