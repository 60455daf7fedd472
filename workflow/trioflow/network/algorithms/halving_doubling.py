"""Recursive halving and doubling: logarithmic numbers of steps, distances in powers of two."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trioflow.network.algorithms.pattern import (
    OF_GROUPS,
    Algorithm,
    Messages,
    Pattern,
    concatenate,
    fill,
    in_sequence,
    make_messages,
    one_each,
    reverse,
)
from trioflow.network.algorithms.trees import binomial_parents, build_tree


def _build_halving_doubling(collective: str, members: int, chunks: int) -> Pattern:
    """Return a collective of halving and doubling exchanges.

    all_reduce: with p the largest power of two in n ranks, the n - p ranks beyond it first add their vector to that of
    rank r - p; the p halve (at distance p/2, p/4, ... 1) and double back; the n - p then receive the result: MPICH's
    fold. all_gather: doubling at distance 1, 2, 4, ... where n is a power of two; otherwise rank r sends in step s the
    min(2^s, n - 2^s) parts r, r - 1, ... to rank r + 2^s (Bruck). reduce_scatter is all_gather backwards, barrier
    Bruck's of nothing. broadcast and reduce take a binomial tree, in chunks; scatter and gather one whose messages
    carry the parts of a whole subtree.

    References: R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005, doi:10.1177/1094342005051521; J. Bruck and
    others, TPDS 8(11), 1997, doi:10.1109/71.642949.
    """
    blocks = members * chunks
    own, root, every = one_each(members, chunks), fill(blocks, 0), fill(blocks, -1)
    if collective == "all_reduce":
        return _build_all_reduce(members, chunks)
    if collective in ("all_gather", "barrier"):
        barrier = collective == "barrier"
        return Pattern(members, _gather_all(members, chunks, barrier), own, every, blocks)
    if collective == "reduce_scatter":
        backwards = reverse(_gather_all(members, chunks), reduces=True)
        return Pattern(members, backwards, every, own, blocks)
    if collective in ("broadcast", "reduce"):
        parent = binomial_parents(members)
        return build_tree(collective, parent, chunks, turn=_binomial_turns(members))
    down = _scatter(members, chunks)
    if collective == "scatter":
        return Pattern(members, down, root, own, blocks)
    return Pattern(members, reverse(down, reduces=False), own, root, blocks)


def largest_power(members: int) -> int:
    """Return the largest power of two that is not above a positive number."""
    return 1 << (members.bit_length() - 1)


def _double(members: int, chunks: int) -> Messages:
    """All-gather between partners; a power of two of members."""
    rank = np.arange(members)
    batches: list[Messages] = []
    mask = 1
    while mask < members:
        window = (rank & ~(mask - 1))[:, None] + np.arange(mask)
        batches.append(make_messages(len(batches), rank, rank ^ mask, window, chunks=chunks))
        mask *= 2
    return concatenate(batches)


def _circulate(members: int, chunks: int) -> Messages:
    """All-gather of Bruck; any number of members."""
    rank = np.arange(members)
    batches: list[Messages] = []
    reach = 1
    while reach < members:
        parts = (rank[:, None] - np.arange(min(reach, members - reach))) % members
        target = (rank + reach) % members
        batches.append(make_messages(len(batches), rank, target, parts, chunks=chunks))
        reach *= 2
    return concatenate(batches)


def _gather_all(members: int, chunks: int, barrier: bool = False) -> Messages:
    paired = members == largest_power(members) and not barrier
    return _double(members, chunks) if paired else _circulate(members, chunks)


def _build_all_reduce(members: int, chunks: int) -> Pattern:
    power = largest_power(members)
    doubling = _double(power, chunks)
    phases = [reverse(doubling, reduces=True), doubling]
    blocks = power * chunks
    if power < members:
        beyond = np.arange(power, members)
        whole = np.tile(np.arange(power), (len(beyond), 1))
        fold = make_messages(0, beyond, beyond - power, whole, chunks=chunks, reduces=True)
        phases = [fold, *phases, reverse(fold, reduces=False)]
    every = fill(blocks, -1)
    return Pattern(members, in_sequence(phases), every, every, blocks)


def _binomial_turns(members: int) -> NDArray[np.int64]:
    """Step in which a member hears from its parent: far members first, as with one port."""
    rank = np.arange(members)
    low = np.maximum(rank & -rank, 1)
    height = (members - 1).bit_length()
    turns: NDArray[np.int64] = height - 1 - np.log2(low).astype(np.int64)
    return turns


def _scatter(members: int, chunks: int) -> Messages:
    """Scatter down a binomial tree; member r passes on the parts of r to r + lowest bit - 1."""
    turn, parent = _binomial_turns(members), binomial_parents(members)
    batches = []
    for member in sorted(range(1, members), key=lambda rank: (int(turn[rank]), rank)):
        subtree = np.arange(member, min(member + (member & -member), members))[None, :]
        batches.append(
            make_messages(int(turn[member]), int(parent[member]), member, subtree, chunks=chunks)
        )
    return concatenate(batches)


ALGORITHMS = (
    Algorithm(
        "halving_doubling",
        _build_halving_doubling,
        tuple(name for name in OF_GROUPS if name != "all_to_all"),
    ),
)
