"""Rings, meshes and tori: ranks joined to their neighbours, without switches.

What every builder of a topology is made with: pairs of links, checks, names.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

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
    return [Link(one, other, bandwidth_bytes_per_s, latency_s), Link(other, one, bandwidth_bytes_per_s, latency_s)]


def join_pairs(pairs: Iterable[tuple[str, str]], bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join many pairs of nodes, each with a link each way; see ``join``."""
    return [link for one, other in pairs for link in join(one, other, bandwidth_bytes_per_s, latency_s)]


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
            f"{value!r} is out of range", place=name, fix=f"write a whole number from {least} to {MOST_PARTS}"
        )


def check_links(name: str, links: int) -> None:
    """Raise PlatformError for a parameter that makes more links than can be kept."""
    if links > _MOST_LINKS:
        raise PlatformError(f"makes {links} links, {_MOST_LINKS} are the most", place=name, fix="write less")


def check_positive(name: str, value: float) -> None:
    """Raise PlatformError for a parameter that is not above zero, or infinite."""
    if not 0 < value < math.inf:
        raise PlatformError(f"{value!r} is out of range", place=name, fix="write a number above 0")


def rename(links: Iterable[Link], names: Callable[[str], str]) -> list[Link]:
    """Return links between nodes of other names."""
    return [Link(names(link.source), names(link.target), link.bandwidth_bytes_per_s, link.latency_s) for link in links]


def find_nodes(links: Iterable[Link]) -> list[str]:
    """Return the nodes that links join, in the order in which they appear."""
    return list(dict.fromkeys(node for link in links for node in (link.source, link.target)))


def list_reached(pairs: Iterable[tuple[str, str]], start: str) -> set[str]:
    """Return the nodes that ways from a node lead to, it among them; ``pairs``: where each way leads from and to."""
    onward: dict[str, list[str]] = {}
    for source, target in pairs:
        onward.setdefault(source, []).append(target)
    reached, todo = {start}, [start]
    while todo:
        new = set(onward.get(todo.pop(), ())) - reached
        reached |= new
        todo += new
    return reached


def read_rank(node: str) -> int:
    """Return the rank that a node is; -1 for a node that is not a rank."""
    return int(node.removeprefix("rank")) if is_rank_node(node) else -1


def build_ring(ranks: int, bandwidth_bytes_per_s: float, latency_s: float, *, chords: bool = False) -> list[Link]:
    """Join every rank to its two neighbours, both ways.

    ``ranks``: n; two make one pair of links, one makes none. ``bandwidth_bytes_per_s``,
    ``latency_s``: each link, per direction [bytes/s], [s]. ``chords``: whether every rank is joined
    to its most distant one, too.

    Nodes: n. Links: 0 for n = 1, 2 for n = 2, otherwise 2 n; with chords and n > 3 another n where
    n is even (one partner each) and 2 n where it is odd (two most distant ranks each). Diameter
    without chords: floor(n / 2).
    """
    pairs = _pair(name_ranks(ranks), chords)
    return join_pairs(pairs, bandwidth_bytes_per_s, latency_s)


def build_double_ring(
    ranks: int, bandwidth_bytes_per_s: float, latency_s: float, *, chords: bool = False
) -> list[Link]:
    """Make two rings of half the ranks each and join them rank to rank.

    ``ranks``: n, even (else PlatformError): the first half is one ring, the second half the other,
    and rank r is joined to rank r + n / 2. ``bandwidth_bytes_per_s``, ``latency_s``: each link, per
    direction [bytes/s], [s]. ``chords``: whether either ring has the links across of
    ``build_ring``.

    Nodes: n. Links: those of two rings of n / 2, and n between them. Diameter without chords:
    floor(n / 4) + 1.

    Source: Q. Luo et al., Hop: Heterogeneity-aware Decentralized Training, ASPLOS 2019,
    arXiv:1902.01064: with chords, its ring-based and double-ring graphs.
    """
    nodes = name_ranks(ranks)
    if ranks % 2:
        raise PlatformError(f"{ranks} ranks do not make two equal rings", place="ranks", fix="use an even number")
    one, other = nodes[: ranks // 2], nodes[ranks // 2 :]
    pairs = [*_pair(one, chords), *_pair(other, chords), *zip(one, other, strict=True)]
    return join_pairs(pairs, bandwidth_bytes_per_s, latency_s)


def _pair(nodes: Sequence[str], chords: bool) -> list[tuple[str, str]]:
    """Return every two nodes that a ring joins, once each, lower place first."""
    count = len(nodes)
    reaches = [1, count // 2] if chords else [1]
    places = {
        (min(place, other), max(place, other))
        for reach in reaches
        for place in range(count)
        if (other := (place + reach) % count) != place
    }
    return [(nodes[one], nodes[other]) for one, other in sorted(places)]


_CUBE_MESH = {
    (0, 1): 1,
    (0, 2): 1,
    (0, 3): 2,
    (0, 4): 2,
    (1, 2): 2,
    (1, 3): 1,
    (1, 5): 2,
    (2, 3): 2,
    (2, 6): 1,
    (3, 7): 1,
    (4, 5): 1,
    (4, 6): 1,
    (4, 7): 2,
    (5, 6): 2,
    (5, 7): 1,
    (6, 7): 2,
}
"""NVLinks between every two GPUs of a DGX-1 with V100: six a GPU, on four neighbours, two of them doubly."""


def build_mesh(
    ranks: int, bandwidth_bytes_per_s: float, latency_s: float, *, rows: int, columns: int, layers: int = 1
) -> list[Link]:
    """Join every rank to its neighbours in a grid of two or three dimensions.

    ``ranks``: rows x columns x layers. ``bandwidth_bytes_per_s``, ``latency_s``: each link, per
    direction [bytes/s], [s]. ``rows``, ``columns``, ``layers``: r, c and l; the rank at (layer,
    row, column) is (layer r + row) c + column. Raises PlatformError when an extent is below 1, or
    the grid has another number of places.

    Nodes: r c l. Links: 2 ((r-1) c l + r (c-1) l + r c (l-1)). Diameter: r + c + l - 3.
    """
    pairs = _pair_neighbours(ranks, (layers, rows, columns), wrapped=False)
    return join_pairs(pairs, bandwidth_bytes_per_s, latency_s)


def build_torus(
    ranks: int, bandwidth_bytes_per_s: float, latency_s: float, *, rows: int, columns: int, layers: int = 1
) -> list[Link]:
    """Join every rank to its neighbours in a grid whose lines are rings.

    ``ranks``, ``rows``, ``columns``, ``layers``, refused and numbered as in ``build_mesh``.
    ``bandwidth_bytes_per_s``, ``latency_s``: each link, per direction [bytes/s], [s].

    Nodes: r c l. Links: 2 r c l (e(r) + e(c) + e(l)), where e(k) is 1 for k > 2, 1/2 for k = 2
    (both ways round are one link) and 0 for k = 1. Diameter: floor(r / 2) + floor(c / 2) + floor(l
    / 2).
    """
    pairs = _pair_neighbours(ranks, (layers, rows, columns), wrapped=True)
    return join_pairs(pairs, bandwidth_bytes_per_s, latency_s)


def build_cube_mesh(ranks: int, bandwidth_bytes_per_s: float, latency_s: float) -> list[Link]:
    """Join eight ranks as NVLink joins the V100 GPUs of a DGX-1: the hybrid cube mesh.

    ``ranks``: 8, else PlatformError. ``bandwidth_bytes_per_s``: one NVLink, per direction
    [bytes/s]; a double link has twice that. ``latency_s``: of each link [s].

    Nodes: 8. Links: 32 (16 pairs of ranks, 8 of them joined doubly: 24 NVLinks). Diameter: 2. PCIe,
    which joins the others on the machine, is left out: libraries route over a GPU between.

    Source: NVIDIA DGX-1 With Tesla V100 System Architecture, WP-08437-002, 2017, figure of the
    NVLink topology, and the link table that ``nvidia-smi topo -m`` prints there (both from memory,
    not re-read).
    """
    if ranks != 8:
        raise PlatformError(f"a cube mesh has 8 ranks, not {ranks}", place="ranks", fix="write 8")
    nodes = name_ranks(ranks)
    links = []
    for (one, other), width in _CUBE_MESH.items():
        links += join(nodes[one], nodes[other], width * bandwidth_bytes_per_s, latency_s)
    return links


def _pair_neighbours(ranks: int, shape: Sequence[int], *, wrapped: bool) -> list[tuple[str, str]]:
    """Return every two neighbours of a grid, once each, in the order of ranks."""
    for name, extent in zip(("layers", "rows", "columns"), shape, strict=True):
        check_count(name, extent)
    if math.prod(shape) != ranks:
        layers, rows, columns = shape
        depth = f" x {layers} layers" if layers > 1 else ""
        raise PlatformError(
            f"{rows} rows x {columns} columns{depth} make {math.prod(shape)} places for {ranks} ranks",
            place="rows",
            fix="choose rows, columns and layers whose product is the ranks",
        )
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    pairs: dict[tuple[int, int], None] = {}
    for rank, place in enumerate(itertools.product(*map(range, shape))):
        for at, extent, stride in zip(place, shape, strides, strict=True):
            if at + 1 < extent:
                pairs[rank, rank + stride] = None
            elif wrapped and extent > 2:
                pairs[rank - (extent - 1) * stride, rank] = None
    nodes = name_ranks(ranks)
    return [(nodes[one], nodes[other]) for one, other in pairs]
