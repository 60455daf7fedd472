"""Ring algorithms: every rank sends to the next one only, in one direction or in two."""

from __future__ import annotations

import numpy as np

from trioflow.network.algorithms.pattern import (
    OF_GROUPS,
    Algorithm,
    Messages,
    Offsets,
    Pattern,
    check_entries,
    concatenate,
    fill,
    make_messages,
    merge,
    one_each,
    relabel,
)
from trioflow.network.algorithms.trees import build_tree


def build_ring(collective: str, members: int, chunks: int) -> Pattern:
    """Return a ring collective in one direction; a message waits for the one that brought its data.

    reduce_scatter: in step t rank r adds to and passes on part r - t - 1, so that after n - 1 steps rank r holds the
    sum of part r. all_gather: in step t rank r passes on part r - t. all_reduce is one after the other. broadcast and
    reduce are chains, in chunks. In a scatter the farthest rank's part leaves first, in a gather the nearest arrives
    first, so the root's link never idles. In step t of an all_to_all a rank passes on, in one message, what came from t
    ranks before and goes beyond it.

    References: P. Patarasuk, X. Yuan, JPDC 69(2), 2009, doi:10.1016/j.jpdc.2008.09.002.
    """
    if collective in ("broadcast", "reduce"):
        rank = np.arange(members)
        parent = rank - 1 if collective == "broadcast" else (rank + 1) % members
        parent[0] = -1
        return build_tree(collective, parent, chunks)
    if collective in ("scatter", "gather"):
        return _build_relay(collective, members, chunks)
    if collective == "all_to_all":
        return _build_all_to_all(members, chunks)
    return _build_rotation(collective, members, chunks)


def _build_bidirectional_ring(collective: str, members: int, chunks: int) -> Pattern:
    """Return a ring collective with half of the data in either direction; of two ranks, with one link each way, one ring."""
    one = build_ring(collective, members, chunks)
    if members < 3:
        return one
    return merge(one, relabel(one, -np.arange(members) % members))


def _previous(steps: int, members: int, chunks: int) -> Offsets:
    """Return, for rows in order (step, chunk, rank), the row from the rank before, a step earlier."""
    step = np.arange(steps, dtype=np.int64)[:, None, None]
    chunk = np.arange(chunks, dtype=np.int64)[None, :, None]
    before = (np.arange(members, dtype=np.int64) - 1) % members
    return np.where(step > 0, ((step - 1) * chunks + chunk) * members + before, -1).reshape(-1)


def _build_rotation(collective: str, members: int, chunks: int) -> Pattern:
    """Return all_reduce (and barrier), reduce_scatter or all_gather."""
    sums = 0 if collective == "all_gather" else members - 1
    steps = sums + (0 if collective == "reduce_scatter" else members - 1)
    shape = (steps, chunks, members)
    count = steps * chunks * members
    check_entries(count)
    step = np.arange(steps, dtype=np.int32)[:, None, None]
    chunk = np.arange(chunks, dtype=np.int32)[None, :, None]
    rank = np.arange(members, dtype=np.int32)
    part = (rank - step - np.int32(sums > 0)) % np.int32(members)
    messages = Messages(
        np.broadcast_to(step, shape).reshape(-1),
        np.broadcast_to(rank, shape).reshape(-1),
        np.broadcast_to((rank + 1) % np.int32(members), shape).reshape(-1),
        np.zeros(count, dtype=np.int8),
        np.broadcast_to(step < sums, shape).reshape(-1),
        np.arange(count + 1, dtype=np.int64),
        (part * np.int32(chunks) + chunk).reshape(-1),
    )
    blocks = members * chunks
    own = one_each(members, chunks)
    return Pattern(
        members,
        messages,
        own if collective == "all_gather" else fill(blocks, -1),
        own if collective == "reduce_scatter" else fill(blocks, -1),
        blocks,
        previous=_previous(steps, members, chunks),
    )


def _build_relay(collective: str, members: int, chunks: int) -> Pattern:
    """Return scatter or gather: each rank's part passes through the ranks between it and the root."""
    check_entries(members * (members - 1) // 2 * chunks)
    scatter = collective == "scatter"
    distance, hop = np.tril_indices(members, -1)  # a part that far goes through hops 0 to d - 1
    if scatter:
        part, source, step = distance, hop, members - 1 - distance + hop
    else:
        part = members - distance
        source, step = part + hop, hop
    messages = make_messages(step, source, (source + 1) % members, part[:, None], chunks=chunks)
    row = np.arange(len(part))
    before = np.where(hop > 0, row - 1, -1)
    shift = len(part) * np.arange(chunks)[:, None]
    blocks = members * chunks
    own, root = one_each(members, chunks), fill(blocks, 0)
    return Pattern(
        members,
        messages,
        root if scatter else own,
        own if scatter else root,
        blocks,
        previous=np.where(before >= 0, before + shift, -1).reshape(-1),
    )


def _build_all_to_all(members: int, chunks: int) -> Pattern:
    check_entries(members * members * (members - 1) // 2 * chunks)
    rank = np.arange(members)
    batches = []
    for step in range(members - 1):
        origin = (rank - step) % members
        beyond = (rank[:, None] + np.arange(1, members - step)) % members
        parts = origin[:, None] * members + beyond
        batches.append(make_messages(step, rank, (rank + 1) % members, parts, chunks=chunks))
    return Pattern(
        members,
        concatenate(batches),
        np.repeat(rank, members * chunks).astype(np.int32),
        np.tile(one_each(members, chunks), members),
        members * chunks,
        previous=_previous(members - 1, members, chunks),
    )


ALGORITHMS = (
    Algorithm("ring", build_ring, OF_GROUPS),
    Algorithm("bidirectional_ring", _build_bidirectional_ring, OF_GROUPS, short="ring2"),
)
