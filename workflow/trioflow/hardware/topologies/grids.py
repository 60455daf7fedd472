"""Links of rings, meshes and tori, whose ranks are joined to their neighbours without switches, and of edge lists in files.

What every builder of a topology is made with stands here too: pairs of links, checks, names.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from trioflow.base.errors import PlatformError, suggest
from trioflow.base.input_files import read_rows, read_text
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
    return join_pairs(_pair(name_ranks(ranks), chords), bandwidth_bytes_per_s, latency_s)


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
    return join_pairs(_pair_neighbours(ranks, (layers, rows, columns), wrapped=False), bandwidth_bytes_per_s, latency_s)


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
    return join_pairs(_pair_neighbours(ranks, (layers, rows, columns), wrapped=True), bandwidth_bytes_per_s, latency_s)


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


COLUMNS = ("source", "target", "bandwidth_bytes_per_s", "latency_s")


def build_edge_list(ranks: int, *, edges_file: Path, both_ways: bool = False) -> list[Link]:
    """Read the links of a network from a file, whose nodes are its own.

    ``ranks``: n; the file names each of them, from rank0 on. ``edges_file``: comma- or
    tab-separated, as ``read_edge_list`` reads it; ``both_ways``: each row is a link each way.
    Raises PlatformError as ``read_edge_list``, when a rank is missing, or the file names more of
    them.

    Nodes: those that the file names. Links: its rows, or twice as many with ``both_ways``.
    """
    links = read_edge_list(edges_file, both_ways=both_ways)
    nodes = find_nodes(links)
    beyond = sorted((rank, node) for node in nodes if (rank := read_rank(node)) >= ranks)
    if beyond:
        raise PlatformError(
            f"{beyond[0][1]} is named and the platform has {ranks} ranks",
            file=edges_file,
            fix=f"name the ranks rank0 to rank{ranks - 1}, or raise the ranks",
        )
    known = set(nodes)
    missing = [name for rank in range(ranks) if (name := name_rank_node(rank)) not in known]
    if missing and ranks > 1:
        raise PlatformError(
            f"no link reaches {missing[0]}",
            file=edges_file,
            fix=f"{suggest(missing[0], [n for n in nodes if read_rank(n) < 0])}name the {ranks} ranks rank0 to rank{ranks - 1}, other nodes freely",
        )
    return links


def read_edge_list(path: str | Path, *, both_ways: bool = False) -> list[Link]:
    """Read links from a comma- or tab-separated file, in its order.

    The first line names the columns source, target, bandwidth_bytes_per_s and latency_s in any
    order; empty lines and those that start with ``#`` are skipped. ``both_ways``: each line is a
    link each way. Raises PlatformError, with file, line and column, when the file is missing or
    empty, a column is missing or unknown, or a line does not hold a new link between two named
    nodes with numbers in range.
    """
    path = Path(path)
    links: list[Link] = []
    lines: dict[tuple[str, str], int] = {}
    # Lines that are left out keep their numbers.
    kept = ["" if one.lstrip()[:1] in ("", "#") else one for one in read_file(path).splitlines()]
    written = list(filter(None, kept))
    if len(written) < 2:
        raise PlatformError("holds no links", file=path, fix=f"write a line {','.join(COLUMNS)} and one a link")
    delimiter = "\t" if "\t" in written[0] else ","
    rows = read_rows("\n".join(kept), path, COLUMNS, (), PlatformError, delimiter)
    for line, row in rows:
        source, target = (_read_node(row[name], path, line, name) for name in COLUMNS[:2])
        bandwidth, latency_s = (_read_number(row[name], path, line, name) for name in COLUMNS[2:])
        ends = [(source, target), (target, source)] if both_ways else [(source, target)]
        for one, other in ends:
            problem, fix = "", "write one link with the bandwidths added"
            if one == other:
                problem, fix = f"the link joins {one} to itself", "leave the line out"
            elif (one, other) in lines:
                problem = f"a second link from {one} to {other}, after line {lines[one, other]}"
                if both_ways:
                    fix = "write each pair of nodes once, or leave both_ways out"
            if problem:
                raise PlatformError(problem, file=path, place=f"line {line}", fix=fix)
            lines[one, other] = line
            links.append(Link(one, other, bandwidth, latency_s))
    return links


def read_file(path: Path) -> str:
    """Return the text of a file that a topology names; PlatformError where there is none."""
    if not path.exists():
        raise PlatformError("no such file", file=path, fix="a path starts at the platform file's folder")
    return read_text(path, PlatformError)


def _read_node(text: str, path: Path, line: int, column: str) -> str:
    """Return a node's name, refusing what could be read two ways."""
    place = f"line {line}, column {column}"
    if not text or any(character.isspace() for character in text):
        raise PlatformError(
            f"{text!r} is not the name of a node", file=path, place=place, fix="write it without spaces"
        )
    rank = read_rank(text)
    if rank >= 0 and text != name_rank_node(rank):
        raise PlatformError(
            f"{text!r} is not the name of a rank", file=path, place=place, fix=f"write {name_rank_node(rank)}"
        )
    return text


def _read_number(text: str, path: Path, line: int, column: str) -> float:
    """Return a bandwidth above zero or a latency of zero or more."""
    place = f"line {line}, column {column}"
    try:
        value = float(text)
    except ValueError:
        raise PlatformError(
            f"{text!r} is not a number", file=path, place=place, fix="write a plain number such as 25e9, without a unit"
        ) from None
    least = "0 or more" if column == "latency_s" else "more than 0"
    if not math.isfinite(value) or value < 0 or (value == 0 and column != "latency_s"):
        raise PlatformError(f"{text} is out of range", file=path, place=place, fix=f"write {least}, finite")
    return value
