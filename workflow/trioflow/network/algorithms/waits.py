"""From a pattern to a schedule: what each message waits for, found from what it carries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trioflow.network.algorithms.pattern import (
    Contents,
    Index,
    Messages,
    Offsets,
    Pattern,
    Schedule,
    concatenate,
    pack_waits,
)


class Waits(NamedTuple):
    """Pairs of rows; rows beyond the messages are joins."""

    waiter: Offsets
    awaited: Offsets
    join_member: Index
    join_step: Index


def assemble(
    pattern: Pattern,
    algorithm: str,
    collective: str,
    endpoints: tuple[int | str, ...],
    message_bytes: float,
) -> Schedule:
    """Turn a pattern into a schedule; the endpoints are ranks, then switches."""
    if pattern.previous is None:
        messages, after_first, after = _order_with_joins(pattern, len(endpoints))
    else:
        messages, previous = _order(pattern.messages, pattern.previous)
        waiting = previous >= 0
        after_first = np.zeros(len(messages) + 1, dtype=np.int64)
        np.cumsum(waiting, out=after_first[1:])
        after = previous[waiting].astype(np.int32)
    block_bytes = message_bytes / pattern.pieces
    return Schedule(
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
        Contents(
            messages.reduces,
            messages.first,
            messages.block,
            pattern.origin,
            pattern.destination,
            block_bytes,
        ),
    )


def _order(messages: Messages, previous: Offsets) -> tuple[Messages, Offsets]:
    """Return messages by step, and the one that each waits for, or -1."""
    if np.all(messages.step[1:] >= messages.step[:-1]):
        return messages, previous
    order = np.argsort(messages.step, kind="stable")
    place = np.empty(len(order) + 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    place[-1] = -1  # nobody's place
    return _pick(messages, order), place[previous[order]]


def _order_with_joins(pattern: Pattern, members: int) -> tuple[Messages, Offsets, Index]:
    """Return messages and joins by step, and what each waits for."""
    messages = pattern.messages
    waits = _derive_waits(messages, members, len(pattern.origin))
    joins = len(waits.join_member)
    joined = concatenate(
        [
            messages,
            Messages(
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


def _pick(messages: Messages, order: Offsets) -> Messages:
    lengths = np.diff(messages.first)[order]
    first = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(lengths, out=first[1:])
    return Messages(
        messages.step[order],
        messages.source[order],
        messages.target[order],
        messages.channel[order],
        messages.reduces[order],
        first,
        messages.block[_spread(messages.first[:-1][order], lengths)],
    )


def _derive_waits(messages: Messages, members: int, blocks: int) -> Waits:
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


def _connect(
    messages: Messages, reader: Offsets, low: Offsets, high: Offsets, writer: Offsets
) -> Waits:
    """Join readers with writers ``writer[low:high]``, straight or through a join."""
    _, group, size = np.unique(
        low * (len(writer) + 1) + high, return_inverse=True, return_counts=True
    )
    width, sharing = high - low, size[group]
    joined = width * sharing > width + sharing
    straight = ~joined
    waiter = [np.repeat(reader[straight], width[straight])]
    awaited = [writer[_spread(low[straight], width[straight])]]
    _, pick, join = np.unique(group[joined], return_index=True, return_inverse=True)
    number = len(messages) + np.arange(len(pick))
    member = messages.source[reader[joined][pick]]
    step = np.full(len(pick), np.iinfo(np.int32).max, dtype=np.int32)
    np.minimum.at(step, join, messages.step[reader[joined]])
    waiter += [reader[joined], np.repeat(number, width[joined][pick])]
    awaited += [number[join], writer[_spread(low[joined][pick], width[joined][pick])]]
    return Waits(np.concatenate(waiter), np.concatenate(awaited), member, step)


def _spread(low: Offsets, width: Offsets) -> Offsets:
    """Return low, low + 1, ... of each range, one range after the other."""
    ends = np.cumsum(width)
    shift = np.repeat(low - (ends - width), width)
    return shift + np.arange(len(shift))
