"""What every builder of a topology is made with: pairs of links, checks, names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import Link, is_rank_node, name_rank_node

NodeBuilder = Callable[[int], list[Link]]
"""A builder whose parameters are chosen: it takes a number of ranks and returns links."""

MOST_PARTS = 1 << 16
"""Ranks, switches or ports of a network; more is taken for a mistake."""
_MOST_LINKS = 1 << 22
"""Of a network that a builder makes, two for each pair of nodes joined."""


def join(one: str, other: str, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join two nodes with a link each way."""
    return [
        Link(one, other, bandwidth_bytes_per_s, latency_s),
        Link(other, one, bandwidth_bytes_per_s, latency_s),
    ]


def join_pairs(
    pairs: Iterable[tuple[str, str]], bandwidth_bytes_per_s: float, latency_s: float
) -> list[Link]:
    """Join many pairs of nodes, each with a link each way; see ``join``."""
    return [
        link for one, other in pairs for link in join(one, other, bandwidth_bytes_per_s, latency_s)
    ]


def join_all(nodes: Iterable[str], bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join every two of some nodes with a link each way; see ``join``."""
    return join_pairs(itertools.combinations(nodes, 2), bandwidth_bytes_per_s, latency_s)


def name_ranks(ranks: int, first: int = 0) -> list[str]:
    """Return the nodes of consecutive ranks; PlatformError where there are fewer than 1."""
    check_count("ranks", ranks)
    return [name_rank_node(rank) for rank in range(first, first + ranks)]


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise PlatformError for a parameter that is not a whole number, or is out of range."""
    if value != int(value) or not least <= value <= MOST_PARTS:
        raise PlatformError(
            f"{value!r} is out of range", place=name,
            fix=f"write a whole number from {least} to {MOST_PARTS}",
        )  # fmt: skip


def check_links(name: str, links: int) -> None:
    """Raise PlatformError for a parameter that makes more links than can be kept."""
    if links > _MOST_LINKS:
        raise PlatformError(
            f"makes {links} links, {_MOST_LINKS} are the most", place=name, fix="write less"
        )


def check_positive(name: str, value: float) -> None:
    """Raise PlatformError for a parameter that is not above zero, or infinite."""
    if not 0 < value < math.inf:
        raise PlatformError(f"{value!r} is out of range", place=name, fix="write a number above 0")


def rename(links: Iterable[Link], names: Callable[[str], str]) -> list[Link]:
    """Return links between nodes of other names."""
    return [
        Link(names(link.source), names(link.target), link.bandwidth_bytes_per_s, link.latency_s)
        for link in links
    ]


def find_nodes(links: Iterable[Link]) -> list[str]:
    """Return the nodes that links join, in the order in which they appear."""
    return list(dict.fromkeys(node for link in links for node in (link.source, link.target)))


def read_rank(node: str) -> int:
    """Return the rank that a node is; -1 for a node that is not a rank."""
    return int(node.removeprefix("rank")) if is_rank_node(node) else -1
