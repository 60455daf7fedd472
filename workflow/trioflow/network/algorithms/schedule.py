"""The table of messages that one collective is made of, free of any engine."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int32]
Offsets = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Contents:
    """What the messages carry; an engine needs none of it, a proof all of it.

    Attributes
    ----------
    reduces : ndarray of bool [messages]
        The target adds what arrives to what it holds; otherwise it replaces it.
    first : ndarray of int64 [messages + 1]
        Message m carries ``block[first[m]:first[m + 1]]``.
    block : ndarray of int32 [entries]
        Equal pieces of the data, numbered from 0.
    origin : ndarray of int32 [blocks]
        Member that holds the block at the start; -1: every rank has its own
        contribution to it.
    destination : ndarray of int32 [blocks]
        Member that must hold the block at the end; -1: every rank.
    block_bytes : float
        Size of one block [bytes].
    """

    reduces: Flags
    first: Offsets
    block: Index
    origin: Index
    destination: Index
    block_bytes: float


@dataclass(frozen=True, eq=False)
class Schedule:
    """Messages of one collective, in an order in which nothing waits for a later row.

    Attributes
    ----------
    algorithm, collective : str
        What the messages carry out.
    endpoints : tuple of int or str
        The group's ranks in its own order, then the names of switches that
        take part. ``source`` and ``target`` count in it.
    message_bytes : float
        Size of the collective, as in ``tables.TASKS`` [bytes].
    source, target : ndarray of int32 [messages]
        Who sends to whom. Equal ends are a join: it moves nothing, takes no
        time and stands for a set of messages that several others wait for.
    size_bytes : ndarray of float64 [messages]
        Bytes moved. Blocks are equal, fractions of a byte included, so that
        equal ranks stay equal.
    step : ndarray of int32 [messages]
        Where in the algorithm the message belongs; never decreases. It says
        nothing about time: only ``after`` does.
    channel : ndarray of int8 [messages]
        Independent connections between the same two ranks have different ones.
    after_first : ndarray of int64 [messages + 1]
        Message m starts when all of ``after[after_first[m]:after_first[m + 1]]``
        have arrived.
    after : ndarray of int32 [waits]
        Rows, ascending within a message and all smaller than the message's own.
    contents : Contents
        What the messages carry.
    """

    algorithm: str
    collective: str
    endpoints: tuple[int | str, ...]
    message_bytes: float
    source: Index
    target: Index
    size_bytes: NDArray[np.float64]
    step: Index
    channel: NDArray[np.int8]
    after_first: Offsets
    after: Index
    contents: Contents

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

    @property
    def nbytes(self) -> int:
        """Memory of all columns [bytes]."""
        columns = [getattr(part, field.name) for part in (self, self.contents)
                   for field in fields(part)]  # fmt: skip
        return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))


def pack_waits(waiter: Offsets, awaited: Offsets, messages: int) -> tuple[Offsets, Index]:
    """Turn pairs into compressed rows: sorted, each pair once.

    Parameters
    ----------
    waiter, awaited : ndarray of int64 [pairs]
        Row ``waiter[i]`` waits for row ``awaited[i]``.
    messages : int
        Rows in all.

    Returns
    -------
    first : ndarray of int64 [messages + 1]
    after : ndarray of int32 [waits]
    """
    code = np.sort(waiter * messages + awaited)
    if len(code):
        code = code[np.concatenate(([True], code[1:] != code[:-1]))]
    rows = code // messages if messages else code
    first = np.zeros(messages + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=messages), out=first[1:])
    return first, (code - rows * messages).astype(np.int32)


def order_connections(schedule: Schedule) -> Schedule:
    """Let each connection carry one message at a time, in the order of the rows.

    Returns
    -------
    Schedule
        The same messages; each also waits for the row before it on the same
        channel from the same source to the same target.

    Notes
    -----
    The builders leave this out: sharing is the network's business. A network
    that shares links fairly would however let all chunks of a pipeline leave
    at once and arrive together; a real connection sends them one by one.
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
    return replace(schedule, after_first=first, after=after)
