"""Tree algorithms: data climbs to the root, comes down from it, or both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trioflow.network.algorithms.pattern import (
    SUMS_OR_COPIES,
    Algorithm,
    Pattern,
    concatenate,
    fill,
    make_messages,
    merge,
)

Members = NDArray[np.int64]


def _chain_parents(members: int) -> Members:
    """Return the parents of a chain 0, 1, 2, ... [members]; the root's is -1."""
    return np.arange(members) - 1


def binomial_parents(members: int) -> Members:
    """Return the parents of a binomial tree [members]: a rank without its lowest set bit."""
    rank = np.arange(members)
    parent = rank & (rank - 1)
    parent[0] = -1
    return parent


def binary_parents(members: int) -> Members:
    """Return the parents of NCCL's binary tree [members] (NVIDIA/nccl, ``src/graph/trees.cc``).

    In order: odd ranks are leaves, a rank whose lowest set bit is b has its parent at distance b, on the side where bit
    2b gets set, or on the other where that falls off the end. Rank 0 is the root, with one child; the depth is
    ceil(log2 n).
    """
    rank = np.arange(members)
    bit = rank & -rank
    above = (rank ^ bit) | (bit << 1)
    parent = np.where(above < members, above, rank ^ bit)
    parent[0] = -1
    return parent


def second_binary_parents(members: int) -> Members:
    """Return the parents of the other tree of NCCL's pair [members], with the first's leaves inside.

    An even number of ranks mirrors the first tree, an odd one shifts it by a rank.

    References: NVIDIA/nccl, ``src/graph/trees.cc``; P. Sanders, J. Speck, J. L. Traeff, Two-tree algorithms, Parallel
    Computing 35(12), 2009, doi:10.1016/j.parco.2009.09.001.
    """
    rank = np.arange(members)
    place = members - 1 - rank if members % 2 == 0 else (rank + 1) % members
    parent = np.full(members, -1)
    first = binary_parents(members)
    parent[place] = np.where(first < 0, -1, place[first])
    return parent


def count_levels(parent: Members) -> Members:
    """Return each member's distance from the root [members]."""
    level = np.full(len(parent), -1)
    parents = parent.tolist()
    for member in range(len(parents)):
        way, at = [], member
        while at >= 0 and level[at] < 0:
            way.append(at)
            at = parents[at]
        above = int(level[at]) if at >= 0 else -1
        for distance, passed in enumerate(reversed(way), 1):
            level[passed] = above + distance
    return level


def build_tree(
    collective: str, parent: Members, chunks: int, turn: Members | None = None
) -> Pattern:
    """Return broadcast, reduce or all_reduce (and barrier) on a tree, pipelined; ``parent`` is -1 for the root.

    ``turn``: step in which a member hears from its parent, later than that does; by default its depth, less one.
    """
    members = len(parent)
    root = int(np.flatnonzero(parent < 0)[0])
    turns = count_levels(parent) - 1 if turn is None else turn
    child = np.flatnonzero(parent >= 0)
    height = int(turns[child].max(initial=-1)) + 1
    parts = np.zeros((len(child), 1), dtype=np.int32)
    batches = []
    if collective != "broadcast":
        up = height - 1 - turns[child]
        batches.append(
            make_messages(up, child, parent[child], parts, chunks=chunks, lag=1, reduces=True)
        )
    if collective != "reduce":
        down = turns[child] + (0 if collective == "broadcast" else height)
        batches.append(make_messages(down, parent[child], child, parts, chunks=chunks, lag=1))
    origin = root if collective == "broadcast" else -1
    destination = root if collective == "reduce" else -1
    return Pattern(
        members, concatenate(batches), fill(chunks, origin), fill(chunks, destination), chunks
    )


def _build_chain(collective: str, members: int, chunks: int) -> Pattern:
    """Return a collective along a chain, as NCCL's trees have within a node."""
    return build_tree(collective, _chain_parents(members), chunks)


def _build_binary_tree(collective: str, members: int, chunks: int) -> Pattern:
    """Return a collective on NCCL's binary tree."""
    return build_tree(collective, binary_parents(members), chunks)


def _build_double_binary_tree(collective: str, members: int, chunks: int) -> Pattern:
    """Return a collective on two binary trees that carry half of the data each.

    For all_reduce both span all ranks with different roots, as in NCCL; a single root hangs above both, over the
    others.
    """
    if collective in ("all_reduce", "barrier"):
        pair = binary_parents(members), second_binary_parents(members)
    else:
        pair = (
            _hang(binary_parents(members - 1)),
            _hang(second_binary_parents(members - 1)),
        )
    one, other = (build_tree(collective, parent, chunks) for parent in pair)
    return merge(one, other)


def _hang(parent: Members) -> Members:
    """Put a new member 0 above the root of a tree."""
    return np.concatenate(([-1], parent + 1))


ALGORITHMS = (
    Algorithm("chain", _build_chain, SUMS_OR_COPIES),
    Algorithm("binary_tree", _build_binary_tree, SUMS_OR_COPIES, short="tree"),
    Algorithm("double_binary_tree", _build_double_binary_tree, SUMS_OR_COPIES, short="double_tree"),
)
