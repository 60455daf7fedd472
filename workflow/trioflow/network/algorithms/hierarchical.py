"""Hierarchical algorithms: one algorithm within nodes, another between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trioflow.network.algorithms.pattern import (
    Index,
    Messages,
    Pattern,
    concatenate,
    embed,
    fill,
    in_sequence,
)

Build = Callable[[str], Pattern]
_ROOTED = ("broadcast", "reduce", "scatter", "gather")
_INWARDS_LAST = ("all_gather", "broadcast", "scatter")


def build_hierarchical(
    collective: str, inner: Build, outer: Build, chunks: int, scattered: bool
) -> Pattern:
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
        phases = [
            grid.inside(within),
            grid.across(between, rooted=not scattered),
            grid.inside(inner(way_out)),
        ]
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
        return cls(
            between.members,
            within.members,
            within.switches,
            chunks,
            place_of[::chunks],
            node_of[::chunks],
        )

    @property
    def blocks(self) -> int:
        return len(self.place_of) * len(self.node_of) * self.chunks

    def inside(self, within: Pattern, apart: bool = False) -> Messages:
        """Return a pattern on every node, for all outer parts or for the node's own."""
        inner_parts, ranks = np.arange(len(self.place_of)), self.nodes * self.places
        batches = []
        for node in range(self.nodes):
            outer_parts = (
                np.flatnonzero(self.node_of == node) if apart else np.arange(len(self.node_of))
            )
            members = np.append(
                node * self.places + np.arange(self.places),
                ranks + node * self.switches + np.arange(self.switches),
            )
            table = self._number(inner_parts[:, None], outer_parts[None, :])
            batches.append(embed(within.messages, members, table))
        return concatenate(batches)

    def across(self, between: Pattern, rooted: bool) -> Messages:
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
