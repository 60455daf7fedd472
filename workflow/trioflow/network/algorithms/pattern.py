"""The messages that one collective is made of, and what each of them waits for.

Builders (``algorithms.builders``) put a `Pattern` together; `assemble` makes a `MessageSchedule` of it, in which what a
message waits for follows from what it carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct, structs
from numpy.typing import ArrayLike, NDArray

from trioflow.base.errors import InputError
from trioflow.base.runs import count_up, list_runs
from trioflow.costmodel.collectives.model import COLLECTIVES


class Waits(NamedTuple):
    """Pairs of rows; rows beyond the messages are joins."""

    waiter: Offsets
    awaited: Offsets
    join_member: Index
    join_step: Index


def assemble(
    pattern: Pattern, algorithm: str, collective: str, endpoints: tuple[int | str, ...], message_bytes: float
) -> MessageSchedule:
    """Turn a pattern into a schedule; the endpoints are ranks, then switches."""
    if pattern.previous is None:
        messages, after_first, after = _order_with_joins(pattern, len(endpoints))
    else:
        messages, previous = _order(pattern.messages, pattern.previous)
        waiting = previous >= 0
        after_first = count_up(waiting)
        after = previous[waiting].astype(np.int32)
    block_bytes = message_bytes / pattern.pieces
    return MessageSchedule(
        algorithm,
        collective,
        endpoints,
        message_bytes,
        messages.source,
        messages.target,
        np.diff(messages.first) * block_bytes,
        messages.step,
        messages.channel,
        after_first,
        after,
        Contents(messages.reduces, messages.first, messages.block, pattern.origin, pattern.destination, block_bytes),
    )


def _order(messages: PatternMessages, previous: Offsets) -> tuple[PatternMessages, Offsets]:
    """Return messages by step, and the one that each waits for, or -1."""
    if np.all(messages.step[1:] >= messages.step[:-1]):
        return messages, previous
    order = np.argsort(messages.step, kind="stable")
    place = np.empty(len(order) + 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    place[-1] = -1  # nobody's place
    return _pick(messages, order), place[previous[order]]


def _order_with_joins(pattern: Pattern, members: int) -> tuple[PatternMessages, Offsets, Index]:
    """Return messages and joins by step, and what each waits for."""
    messages = pattern.messages
    waits = _derive_waits(messages, members, len(pattern.origin))
    joins = len(waits.join_member)
    joined = concatenate(
        [
            messages,
            PatternMessages(
                waits.join_step,
                waits.join_member,
                waits.join_member,
                np.zeros(joins, dtype=np.int8),
                np.zeros(joins, dtype=np.bool_),
                np.zeros(joins + 1, dtype=np.int64),
                np.zeros(0, dtype=np.int32),
            ),
        ]
    )
    rank = 2 * joined.step.astype(np.int64) + 1
    rank[len(messages) :] -= 1  # a join comes before the messages of the step that need it
    order = np.argsort(rank, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    after_first, after = pack_waits(place[waits.waiter], place[waits.awaited], len(order))
    return _pick(joined, order), after_first, after


def _pick(messages: PatternMessages, order: Offsets) -> PatternMessages:
    lengths = np.diff(messages.first)[order]
    return PatternMessages(
        messages.step[order],
        messages.source[order],
        messages.target[order],
        messages.channel[order],
        messages.reduces[order],
        count_up(lengths),
        messages.block[list_runs(messages.first[:-1][order], lengths)],
    )


def _derive_waits(messages: PatternMessages, members: int, blocks: int) -> Waits:
    """Find what each message waits for: whoever brought what it carries.

    A read at the source needs the writes of smaller steps since the last one that replaced the block; nothing where the
    source has had it from the start. Where w writes serve r reads and w r > w + r, a join stands between: w + r waits
    instead of w r, which a thousand ranks could not store.
    """
    entry = np.repeat(np.arange(len(messages)), np.diff(messages.first))
    count = len(entry)
    none = np.zeros(0, dtype=np.int32)
    if not count:
        return Waits(entry, entry, none, none)
    span = 2 * (int(messages.step.max()) + 1)
    time = 2 * messages.step.astype(np.int64)[entry]
    code = np.empty(2 * count, dtype=np.int64)  # reads, then writes
    code[:count] = (messages.source.astype(np.int64)[entry] * blocks + messages.block) * span + time
    time += 1
    code[count:] = (messages.target.astype(np.int64)[entry] * blocks + messages.block) * span + time
    del time
    order = np.argsort(code, kind="stable")
    place = code[order] // span
    begins = np.concatenate(([True], place[1:] != place[:-1]))
    del code, place
    writes = order >= count
    row = entry[order - count * writes]
    del order
    begins |= writes & ~messages.reduces[row]
    start = np.maximum.accumulate(np.where(begins, np.arange(2 * count), 0))
    before: Offsets = np.cumsum(writes) - writes
    low = before[start]
    needs = ~writes & (before > low)
    return _connect(messages, row[needs], low[needs], before[needs], row[writes])


def _connect(messages: PatternMessages, reader: Offsets, low: Offsets, high: Offsets, writer: Offsets) -> Waits:
    """Join readers with writers ``writer[low:high]``, straight or through a join."""
    _, group, size = np.unique(low * (len(writer) + 1) + high, return_inverse=True, return_counts=True)
    width, sharing = high - low, size[group]
    joined = width * sharing > width + sharing
    straight = ~joined
    waiter = [np.repeat(reader[straight], width[straight])]
    awaited = [writer[list_runs(low[straight], width[straight])]]
    _, pick, join = np.unique(group[joined], return_index=True, return_inverse=True)
    number = len(messages) + np.arange(len(pick))
    member = messages.source[reader[joined][pick]]
    step = np.full(len(pick), np.iinfo(np.int32).max, dtype=np.int32)
    np.minimum.at(step, join, messages.step[reader[joined]])
    waiter += [reader[joined], np.repeat(number, width[joined][pick])]
    awaited += [number[join], writer[list_runs(low[joined][pick], width[joined][pick])]]
    return Waits(np.concatenate(waiter), np.concatenate(awaited), member, step)


Index = NDArray[np.int32]
Offsets = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Contents(Struct, frozen=True, eq=False):
    """What the messages carry; an engine needs none of it, a proof all of it."""

    # The target adds what arrives to what it holds; otherwise it replaces it [messages]
    reduces: Flags
    first: Offsets  # message m carries ``block[first[m]:first[m + 1]]`` [messages + 1]
    block: Index  # equal pieces of the data, numbered from 0 [entries]
    # Member that holds the block at the start; -1: every rank has its own contribution to it
    # [blocks]
    origin: Index
    destination: Index  # member that must hold the block at the end; -1: every rank [blocks]
    block_bytes: float  # size of one block [bytes]


class MessageSchedule(Struct, frozen=True, eq=False):
    """Messages of one collective, in an order in which nothing waits for a later row."""

    # What the messages carry out
    algorithm: str
    collective: str
    # The group's ranks in its own order, then the names of switches that take part. ``source`` and
    # ``target`` count in it.
    endpoints: tuple[int | str, ...]
    message_bytes: float  # size of the collective, as in ``tables.TASKS`` [bytes]
    # Who sends to whom. Equal ends are a join: it moves nothing, takes no time and stands for a set
    # of messages that several others wait for [messages].
    source: Index
    target: Index
    # Bytes moved. Blocks are equal, fractions of a byte included, so that equal ranks stay equal
    # [messages].
    size_bytes: NDArray[np.float64]
    # Where in the algorithm the message belongs; never decreases. It says nothing about time: only
    # ``after`` does [messages].
    step: Index
    # Independent connections between the same two ranks have different ones [messages]
    channel: NDArray[np.int8]
    # Message m starts when all of ``after[after_first[m]:after_first[m + 1]]`` have arrived
    # [messages + 1]
    after_first: Offsets
    after: Index  # rows, ascending within a message and all smaller than the message's own [waits]
    contents: Contents  # what the messages carry

    def __len__(self) -> int:
        return len(self.source)

    @property
    def joins(self) -> Flags:
        """Rows that move nothing [messages]."""
        return np.asarray(self.source == self.target)

    @property
    def ranks(self) -> int:
        """Members that are ranks; they come first in ``endpoints``."""
        return sum(not isinstance(end, str) for end in self.endpoints)


def pack_waits(waiter: Offsets, awaited: Offsets, messages: int) -> tuple[Offsets, Index]:
    """Turn pairs of a row and an awaited one into sorted compressed rows: starts [messages + 1], awaited [waits]."""
    code = np.sort(waiter * messages + awaited)
    if len(code):
        code = code[np.concatenate(([True], code[1:] != code[:-1]))]
    rows = code // messages if messages else code
    return count_up(np.bincount(rows, minlength=messages)), (code - rows * messages).astype(np.int32)


def order_connections(schedule: MessageSchedule) -> MessageSchedule:
    """Let each connection (channel, source, target) carry one message at a time, in the order of the rows.

    Fairly shared links would let all chunks of a pipeline leave at once and arrive together.
    """
    rows = np.flatnonzero(~schedule.joins)
    ends, channels = len(schedule.endpoints), int(schedule.channel.max(initial=0)) + 1
    key = schedule.source[rows].astype(np.int64) * ends + schedule.target[rows]
    key = key * channels + schedule.channel[rows]
    order = np.argsort(key, kind="stable")
    same = key[order][1:] == key[order][:-1]
    sorted_rows = rows[order]
    counts = np.diff(schedule.after_first)
    waiter = np.concatenate((np.repeat(np.arange(len(schedule)), counts), sorted_rows[1:][same]))
    awaited = np.concatenate((schedule.after, sorted_rows[:-1][same]))
    first, after = pack_waits(waiter.astype(np.int64), awaited.astype(np.int64), len(schedule))
    return structs.replace(schedule, after_first=first, after=after)


_MOST_ENTRIES = 1 << 28
"""Blocks in messages beyond which a table is refused: several gigabytes."""


class PatternMessages(Struct, frozen=True, eq=False):
    """Columns as in ``MessageSchedule`` and ``Contents``; what arrived at the source in smaller steps is seen."""

    step: Index
    source: Index
    target: Index
    channel: NDArray[np.int8]
    reduces: Flags
    first: Offsets
    block: Index

    def __len__(self) -> int:
        return len(self.step)


class Pattern(Struct, frozen=True, eq=False):
    """An algorithm on members 0 to n - 1, of which 0 is the root."""

    members: int  # ranks
    messages: PatternMessages  # what they send
    # As in ``Contents`` [blocks]
    origin: Index
    destination: Index
    pieces: int  # blocks that make up the collective's ``message_bytes``
    switches: int = 0  # members beyond the ranks
    # Where every message waits for one other at most: that one, or -1. Without it the waits are
    # derived from the contents [messages].
    previous: Offsets | None = None


WITH_BARRIER = (*COLLECTIVES, "barrier")
OF_GROUPS = tuple(name for name in WITH_BARRIER if name != "send")
"""All collectives that messages carry out; those of more than a pair."""
SUMS_OR_COPIES = ("all_reduce", "broadcast", "reduce", "barrier")
"""Collectives in which every message holds the whole buffer's sum or copy."""


class Algorithm(Struct, frozen=True):
    """An algorithm as ``builders.ALGORITHMS`` lists it."""

    name: str  # full name, with underscores
    # Makes the messages from the collective, the number of members and of the chunks that each
    # message is cut into
    build: Callable[[str, int, int], Pattern]
    collectives: tuple[str, ...]  # what it does, of ``WITH_BARRIER``
    short: str = ""  # short name on the command line, "" without one
    switches: int = 0  # switches that compute, beyond the ranks


def make_messages(
    step: ArrayLike,
    source: ArrayLike,
    target: ArrayLike,
    parts: ArrayLike,
    *,
    chunks: int = 1,
    lag: int = 0,
    reduces: bool = False,
) -> PatternMessages:
    """Make a batch of messages that carry equally many blocks.

    Each of ``parts`` is cut into ``chunks`` messages, ``lag`` steps apart; block ``part * chunks + k`` is chunk k of a
    part.
    """
    table = np.atleast_2d(np.asarray(parts, dtype=np.int32))
    rows, width = table.shape
    check_entries(rows * width * chunks)
    chunk = np.arange(chunks, dtype=np.int32)[:, None]

    def column(values: ArrayLike, shift: int = 0) -> Index:
        wide = np.broadcast_to(np.asarray(values, dtype=np.int32), (rows,))[None, :]
        return np.ascontiguousarray(wide + shift * chunk).reshape(-1).astype(np.int32)

    count = rows * chunks
    return PatternMessages(
        column(step, lag),
        column(source),
        column(target),
        np.zeros(count, dtype=np.int8),
        np.full(count, reduces),
        np.arange(count + 1, dtype=np.int64) * width,
        (table[None] * np.int32(chunks) + chunk[:, :, None]).reshape(-1),
    )


def check_entries(count: int) -> None:
    """Refuse, with InputError, a table of more than ``_MOST_ENTRIES`` blocks, which would fill the memory."""
    if count > _MOST_ENTRIES:
        raise InputError(
            f"the messages would list {count} blocks, more than {_MOST_ENTRIES}",
            fix="take fewer ranks or chunks, or another algorithm (hierarchical needs far fewer)",
        )


def concatenate(batches: Sequence[PatternMessages]) -> PatternMessages:
    """Put batches one after another, as they are."""
    kinds = {"step": np.int32, "source": np.int32, "target": np.int32, "channel": np.int8, "reduces": np.bool_}
    columns: dict[str, Any] = {
        name: np.concatenate([np.zeros(0, kind), *(getattr(batch, name) for batch in batches)]).astype(kind)
        for name, kind in {**kinds, "block": np.int32}.items()
    }
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *(np.diff(batch.first) for batch in batches)])
    return PatternMessages(first=count_up(lengths), **columns)


def in_sequence(phases: Sequence[PatternMessages]) -> PatternMessages:
    """Put phases one after another in steps too; their messages wait for data only."""
    shifted, steps = [], 0
    for phase in phases:
        shifted.append(structs.replace(phase, step=(phase.step + steps).astype(np.int32)))
        steps += _count_steps(phase)
    return concatenate(shifted)


def _count_steps(messages: PatternMessages) -> int:
    """Return how many steps messages span, from step 0."""
    return int(messages.step.max(initial=-1)) + 1


def reverse(messages: PatternMessages, reduces: bool) -> PatternMessages:
    """Run messages backwards in time and direction; scatter becomes gather, with copies.

    Where each block spreads to every rank once (all_gather, broadcast), its way is a tree, which backwards collects
    every contribution once (reduce_scatter, reduce).
    """
    last = _count_steps(messages) - 1
    return structs.replace(
        messages,
        step=(last - messages.step).astype(np.int32),
        source=messages.target,
        target=messages.source,
        reduces=np.full(len(messages), reduces),
    )


def embed(messages: PatternMessages, members: ArrayLike, blocks: ArrayLike) -> PatternMessages:
    """Give messages other members, and each of their blocks a set of blocks."""
    place = np.asarray(members, dtype=np.int32)
    table = np.asarray(blocks, dtype=np.int32)
    return structs.replace(
        messages,
        source=place[messages.source],
        target=place[messages.target],
        first=messages.first * table.shape[1],
        block=table[messages.block].reshape(-1),
    )


def merge(one: Pattern, other: Pattern) -> Pattern:
    """Let two patterns over the same ranks each move half of the data on its own channel."""
    blocks, rows = len(one.origin), len(one.messages)
    second = structs.replace(
        other.messages,
        block=(other.messages.block + blocks).astype(np.int32),
        channel=(other.messages.channel + 1).astype(np.int8),
    )
    previous = None
    if one.previous is not None and other.previous is not None:
        shifted = np.where(other.previous < 0, -1, other.previous + rows)
        previous = np.concatenate((one.previous, shifted))
    return Pattern(
        one.members,
        concatenate([one.messages, second]),
        np.concatenate((one.origin, other.origin)),
        np.concatenate((one.destination, other.destination)),
        one.pieces + other.pieces,
        previous=previous,
    )


def relabel(pattern: Pattern, members: ArrayLike) -> Pattern:
    """Give the members of a pattern without switches other numbers."""
    place = np.asarray(members, dtype=np.int32)
    ends = np.append(place, np.int32(-1))  # so that -1 stays -1
    blocks = np.arange(len(pattern.origin))[:, None]
    return structs.replace(
        pattern,
        messages=embed(pattern.messages, place, blocks),
        origin=ends[pattern.origin],
        destination=ends[pattern.destination],
    )


def fill(count: int, member: int) -> Index:
    """Return the same member for each of so many blocks."""
    return np.full(count, member, dtype=np.int32)


def one_each(members: int, chunks: int) -> Index:
    """Return member i for the blocks of part i, as many parts as members."""
    return np.repeat(np.arange(members, dtype=np.int32), chunks)
