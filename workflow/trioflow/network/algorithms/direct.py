"""Direct algorithms: every rank sends what it owes straight to who needs it, all at once."""

from __future__ import annotations

import numpy as np

from trioflow.network.algorithms.pattern import (
    WITH_BARRIER,
    Algorithm,
    Pattern,
    fill,
    in_sequence,
    make_messages,
    one_each,
    reverse,
)


def _build_direct(collective: str, members: int, chunks: int) -> Pattern:
    """Return a direct collective: one step, in which nothing waits; all_reduce two, reduce_scatter and all_gather.

    Rows go by distance, r to r + 1, then to r + 2, ...: so every rank sends to and hears from one at a time.
    """
    if collective in ("broadcast", "reduce", "send"):
        return _build_star(collective, members, chunks)
    if collective in ("scatter", "gather"):
        return _build_parts(collective, members, chunks)
    blocks = members * chunks
    own, every = one_each(members, chunks), fill(blocks, -1)
    rank, distance = np.arange(members), np.arange(1, members)[:, None]
    source = np.broadcast_to(rank, (members - 1, members)).reshape(-1)
    target = ((rank + distance) % members).reshape(-1)
    if collective == "all_to_all":
        parts = (source * members + target)[:, None]
        origin = np.repeat(rank, blocks).astype(np.int32)
        exchange = make_messages(0, source, target, parts, chunks=chunks)
        return Pattern(members, exchange, origin, np.tile(own, members), blocks)
    spread = make_messages(0, source, target, source[:, None], chunks=chunks)
    collect = make_messages(0, source, target, target[:, None], chunks=chunks, reduces=True)
    if collective in ("all_gather", "barrier"):
        return Pattern(members, spread, own, every, blocks)
    if collective == "reduce_scatter":
        return Pattern(members, collect, every, own, blocks)
    return Pattern(members, in_sequence([collect, spread]), every, every, blocks)


def _build_parts(collective: str, members: int, chunks: int) -> Pattern:
    """Return scatter or gather."""
    child, blocks = np.arange(1, members), members * chunks
    own, root = one_each(members, chunks), fill(blocks, 0)
    down = make_messages(0, 0, child, child[:, None], chunks=chunks)
    if collective == "scatter":
        return Pattern(members, down, root, own, blocks)
    return Pattern(members, reverse(down, reduces=False), own, root, blocks)


def _build_star(collective: str, members: int, chunks: int) -> Pattern:
    """Return broadcast, reduce or send."""
    child = np.arange(1, members)
    down = make_messages(0, 0, child, np.zeros((len(child), 1)), chunks=chunks)
    root, every, second = (fill(chunks, end) for end in (0, -1, 1))
    if collective == "reduce":
        return Pattern(members, reverse(down, reduces=True), every, root, chunks)
    return Pattern(members, down, root, second if collective == "send" else every, chunks)


ALGORITHMS = (Algorithm("direct", _build_direct, WITH_BARRIER),)
