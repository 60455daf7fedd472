"""The algorithms: rings, trees, halving and doubling, hierarchies, direct exchanges and in-network reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trioflow.network.algorithms.pattern import (
    OF_GROUPS,
    SUMS_OR_COPIES,
    WITH_BARRIER,
    Algorithm,
    Index,
    Offsets,
    Pattern,
    PatternMessages,
    check_entries,
    concatenate,
    embed,
    fill,
    in_sequence,
    make_messages,
    merge,
    one_each,
    relabel,
    reverse,
)

Members = NDArray[np.int64]


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
    # The last member of those looked at stands for what is above the root.
    above = np.append(parent, -1)
    level = (above >= 0).astype(np.int64)
    while (above >= 0).any():  # twice as far up each time
        level, above = level + level[above], above[above]
    return level[:-1]


def build_tree(collective: str, parent: Members, chunks: int, turn: Members | None = None) -> Pattern:
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
        batches.append(make_messages(up, child, parent[child], parts, chunks=chunks, lag=1, reduces=True))
    if collective != "reduce":
        down = turns[child] + (0 if collective == "broadcast" else height)
        batches.append(make_messages(down, parent[child], child, parts, chunks=chunks, lag=1))
    origin = root if collective == "broadcast" else -1
    destination = root if collective == "reduce" else -1
    return Pattern(members, concatenate(batches), fill(chunks, origin), fill(chunks, destination), chunks)


def _build_chain(collective: str, members: int, chunks: int) -> Pattern:
    """Return a collective along a chain, as NCCL's trees have within a node."""
    return build_tree(collective, np.arange(members) - 1, chunks)


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
        pair = (_hang(binary_parents(members - 1)), _hang(second_binary_parents(members - 1)))
    one, other = (build_tree(collective, parent, chunks) for parent in pair)
    return merge(one, other)


def _hang(parent: Members) -> Members:
    """Put a new member 0 above the root of a tree."""
    return np.concatenate(([-1], parent + 1))


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
    messages = PatternMessages(
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


def _double(members: int, chunks: int) -> PatternMessages:
    """All-gather between partners; a power of two of members."""
    rank = np.arange(members)
    batches: list[PatternMessages] = []
    mask = 1
    while mask < members:
        window = (rank & ~(mask - 1))[:, None] + np.arange(mask)
        batches.append(make_messages(len(batches), rank, rank ^ mask, window, chunks=chunks))
        mask *= 2
    return concatenate(batches)


def _circulate(members: int, chunks: int) -> PatternMessages:
    """All-gather of Bruck; any number of members."""
    rank = np.arange(members)
    batches: list[PatternMessages] = []
    reach = 1
    while reach < members:
        parts = (rank[:, None] - np.arange(min(reach, members - reach))) % members
        target = (rank + reach) % members
        batches.append(make_messages(len(batches), rank, target, parts, chunks=chunks))
        reach *= 2
    return concatenate(batches)


def _gather_all(members: int, chunks: int, barrier: bool = False) -> PatternMessages:
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


def _scatter(members: int, chunks: int) -> PatternMessages:
    """Scatter down a binomial tree; member r passes on the parts of r to r + lowest bit - 1."""
    turn, parent = _binomial_turns(members), binomial_parents(members)
    batches = []
    for member in sorted(range(1, members), key=lambda rank: (int(turn[rank]), rank)):
        subtree = np.arange(member, min(member + (member & -member), members))[None, :]
        batches.append(make_messages(int(turn[member]), int(parent[member]), member, subtree, chunks=chunks))
    return concatenate(batches)


def _build_direct(collective: str, members: int, chunks: int) -> Pattern:
    """Return a direct collective: one step, in which nothing waits; all_reduce two, reduce_scatter and all_gather.

    Rows go by distance, r to r + 1, then to r + 2, ...: so every rank sends to and hears from one at a time.
    """
    if collective in ("broadcast", "reduce", "send", "scatter", "gather"):
        return _build_star(collective, members, chunks)
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


def _build_star(collective: str, members: int, chunks: int) -> Pattern:
    """Return what goes between the root and each other rank: all of it, or in scatter and gather its part."""
    child, apart = np.arange(1, members), collective in ("scatter", "gather")
    down = make_messages(0, 0, child, child[:, None] if apart else np.zeros((len(child), 1)), chunks=chunks)
    blocks = members * chunks if apart else chunks
    root, others = fill(blocks, 0), fill(blocks, 1 if collective == "send" else -1)
    others = one_each(members, chunks) if apart else others
    if collective in ("reduce", "gather"):
        return Pattern(members, reverse(down, reduces=not apart), others, root, blocks)
    return Pattern(members, down, root, others, blocks)


def _build_in_network(collective: str, members: int, chunks: int) -> Pattern:
    """Return a collective of one message up to a switch and one down per rank (and chunk, once it is complete).

    all_reduce: whole vectors up, the sum down. reduce_scatter: up all but a rank's own part, down the others' sum of
    it. all_gather: own part up, all others down. broadcast: up from the root, down to the others; reduce the other way.

    References: R. L. Graham and others, SHArP, COMHPC 2016, doi:10.1109/COMHPC.2016.006.
    """
    rank, switch = np.arange(members), members
    blocks = members * chunks
    own, every = one_each(members, chunks), fill(blocks, -1)
    others = (rank[:, None] + np.arange(1, members)) % members
    ends = {"origin": every, "destination": every}
    up_parts, down_parts, width = rank[:, None], others, members
    senders, receivers = rank, rank
    sums_up = sums_down = False
    if collective == "all_gather":
        ends["origin"] = own
    elif collective == "reduce_scatter":
        up_parts, down_parts = others, rank[:, None]
        sums_up = sums_down = True
        ends["destination"] = own
    else:
        width, root = 1, fill(chunks, 0)
        ends = {"origin": fill(chunks, -1), "destination": fill(chunks, -1)}
        sums_up = collective != "broadcast"
        if collective == "broadcast":
            senders, receivers, ends["origin"] = rank[:1], rank[1:], root
        elif collective == "reduce":
            senders, receivers, ends["destination"] = rank[1:], rank[:1], root
            sums_down = True
        up_parts = np.zeros((len(senders), 1), dtype=np.int64)
        down_parts = np.zeros((len(receivers), 1), dtype=np.int64)
    up = make_messages(0, senders, switch, up_parts, chunks=chunks, lag=1, reduces=sums_up)
    down = make_messages(1, switch, receivers, down_parts, chunks=chunks, lag=1, reduces=sums_down)
    return Pattern(members, concatenate([up, down]), ends["origin"], ends["destination"], width * chunks, switches=1)


Build = Callable[[str], Pattern]
_ROOTED = ("broadcast", "reduce", "scatter", "gather")
_INWARDS_LAST = ("all_gather", "broadcast", "scatter")


def build_hierarchical(collective: str, inner: Build, outer: Build, chunks: int, scattered: bool) -> Pattern:
    """Return a collective of nodes that hold equally many ranks, which follow one another; the root is the first.

    ``inner``, ``outer``: the pattern on a node's ranks, and on as many ranks as nodes. all_reduce ``scattered``:
    reduce_scatter within nodes, all_reduce of each part between its holders, all_gather within; otherwise reduce to
    each node's first rank, all_reduce between those, broadcast within.

    Phases follow by their data alone: in chunks, the second begins when the first chunk is through the first. Rooted
    collectives cross nodes between first ranks, others between equal places, each for its own part: an all_to_all first
    takes everything, within the node, to the rank of the target's place. With a switch inside, each node has one, in
    order; the outer one is last.
    """
    if collective in ("all_reduce", "barrier"):
        way_in, way_out = ("reduce_scatter", "all_gather") if scattered else ("reduce", "broadcast")
        within, between = inner(way_in), outer("all_reduce")
        grid = _Grid.lay(collective, within, between, chunks)
        phases = [grid.inside(within), grid.across(between, rooted=not scattered), grid.inside(inner(way_out))]
        origin = destination = fill(grid.blocks, -1)
    else:
        within, between = inner(collective), outer(collective)
        grid = _Grid.lay(collective, within, between, chunks)
        phases = [
            grid.inside(within, apart=collective in ("scatter", "gather", "all_to_all")),
            grid.across(between, rooted=collective in _ROOTED),
        ]
        if collective in _INWARDS_LAST:
            phases.reverse()
        origin = grid.combine(between.origin, within.origin)
        destination = grid.combine(between.destination, within.destination)
    pieces = within.pieces * between.pieces // chunks
    switches = between.members * within.switches + between.switches
    members = within.members * between.members
    return Pattern(members, in_sequence(phases), origin, destination, pieces, switches)


class _Grid(NamedTuple):
    """Ranks (node, place); blocks (inner part, outer part, chunk), numbered in that order."""

    # Nodes, and ranks of each
    nodes: int
    places: int
    switches: int  # switches in a node
    chunks: int  # chunks of both patterns
    place_of: Index  # place whose ranks take the part across nodes [inner parts]
    node_of: Index  # node within which the part moves, where it does not in all [outer parts]

    @classmethod
    def lay(cls, collective: str, within: Pattern, between: Pattern, chunks: int) -> _Grid:
        place_of = within.origin if collective == "all_gather" else within.destination
        node_of = between.destination if collective == "scatter" else between.origin
        return cls(between.members, within.members, within.switches, chunks, place_of[::chunks], node_of[::chunks])

    @property
    def blocks(self) -> int:
        return len(self.place_of) * len(self.node_of) * self.chunks

    def inside(self, within: Pattern, apart: bool = False) -> PatternMessages:
        """Return a pattern on every node, for all outer parts or for the node's own."""
        inner_parts, ranks = np.arange(len(self.place_of)), self.nodes * self.places
        batches = []
        for node in range(self.nodes):
            outer_parts = np.flatnonzero(self.node_of == node) if apart else np.arange(len(self.node_of))
            members = np.append(
                node * self.places + np.arange(self.places), ranks + node * self.switches + np.arange(self.switches)
            )
            table = self._number(inner_parts[:, None], outer_parts[None, :])
            batches.append(embed(within.messages, members, table))
        return concatenate(batches)

    def across(self, between: Pattern, rooted: bool) -> PatternMessages:
        """Return a pattern between ranks of equal place, or between the first of each node."""
        outer_parts, ranks = np.arange(len(self.node_of)), self.nodes * self.places
        batches = []
        for place in range(1 if rooted else self.places):
            inner_parts = np.arange(len(self.place_of))
            if not rooted:
                inner_parts = np.flatnonzero(self.place_of == place)
            members = np.append(
                np.arange(self.nodes) * self.places + place,
                ranks + self.nodes * self.switches + np.arange(between.switches),
            )
            table = self._number(inner_parts[None, :], outer_parts[:, None])
            batches.append(embed(between.messages, members, table))
        return concatenate(batches)

    def combine(self, outer: Index, inner: Index) -> Index:
        """Return the rank of each block from its node and its place, -1 for every rank."""
        node = outer[:: self.chunks][None, :]
        place = inner[:: self.chunks][:, None]
        rank = np.where((node < 0) & (place < 0), -1, node * self.places + place)
        return np.repeat(rank.reshape(-1), self.chunks).astype(np.int32)

    def _number(self, inner: NDArray[np.int64], outer: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the blocks of each part [parts * chunks, parts of the other pattern]."""
        part = inner * len(self.node_of) + outer
        chunk = np.arange(self.chunks)[None, :, None]
        return (part[:, None, :] * self.chunks + chunk).reshape(-1, part.shape[1])


ALGORITHMS = (
    Algorithm("ring", build_ring, OF_GROUPS),
    Algorithm("bidirectional_ring", _build_bidirectional_ring, OF_GROUPS, short="ring2"),
    Algorithm("chain", _build_chain, SUMS_OR_COPIES),
    Algorithm("binary_tree", _build_binary_tree, SUMS_OR_COPIES, short="tree"),
    Algorithm("double_binary_tree", _build_double_binary_tree, SUMS_OR_COPIES, short="double_tree"),
    Algorithm("halving_doubling", _build_halving_doubling, tuple(name for name in OF_GROUPS if name != "all_to_all")),
    Algorithm("direct", _build_direct, WITH_BARRIER),
    Algorithm("in_network", _build_in_network, (*SUMS_OR_COPIES, "reduce_scatter", "all_gather"), switches=1),
)
"""All that take no other algorithm in; `hierarchical` is made of two of these."""
