"""Networks from a file: one link a row."""

import math
from pathlib import Path

from trioflow.base.errors import PlatformError, suggest
from trioflow.base.input_files import read_rows, read_text
from trioflow.hardware.machine import Link, name_rank_node
from trioflow.hardware.topologies.grids import find_nodes, read_rank

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
