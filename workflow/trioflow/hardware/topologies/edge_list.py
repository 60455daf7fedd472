"""Networks from a file: one link a row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from trioflow.base.errors import PlatformError, suggest
from trioflow.base.input_files import parse_cells, read_text
from trioflow.hardware.machine import Link, name_rank_node
from trioflow.hardware.topologies.wiring import find_nodes, read_rank

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
            file=edges_file, fix=f"name the ranks rank0 to rank{ranks - 1}, or raise the ranks",
        )  # fmt: skip
    known = set(nodes)
    missing = [name for rank in range(ranks) if (name := name_rank_node(rank)) not in known]
    if missing and ranks > 1:
        raise PlatformError(
            f"no link reaches {missing[0]}", file=edges_file,
            fix=f"{suggest(missing[0], [n for n in nodes if read_rank(n) < 0])}name the {ranks} ranks rank0 to rank{ranks - 1}, other nodes freely",
        )  # fmt: skip
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
    for line, row in _read_rows(path):
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


def _read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number of each line that holds a link, and its cells by column."""
    if not path.exists():
        raise PlatformError(
            "no such file", file=path, fix="a path starts at the platform file's folder"
        )
    kept = [
        (number, line)
        for number, line in enumerate(read_text(path, PlatformError).splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if len(kept) < 2:
        raise PlatformError(
            "holds no links", file=path, fix=f"write a line {','.join(COLUMNS)} and one a link"
        )
    delimiter = "\t" if "\t" in kept[0][1] else ","
    text = "\n".join(line for _, line in kept)
    rows = [cells for _, cells in parse_cells(text, path, PlatformError, delimiter)]
    header = [cell.strip() for cell in rows[0]]
    _check_header(header, path, kept[0][0])
    for (number, _), cells in zip(kept[1:], rows[1:], strict=False):
        if len(cells) != len(header):
            raise PlatformError(
                f"{len(cells)} cells and {len(header)} columns", file=path, place=f"line {number}",
                fix=f"write {', '.join(header)}",
            )  # fmt: skip
        yield number, {name: cell.strip() for name, cell in zip(header, cells, strict=True)}


def _check_header(header: list[str], path: Path, line: int) -> None:
    place = f"line {line}"
    unknown = [name for name in header if name not in COLUMNS]
    missing = [name for name in COLUMNS if name not in header]
    if unknown:
        raise PlatformError(
            f"unknown column {unknown[0]!r}", file=path, place=place,
            fix=f"{suggest(unknown[0], missing)}the columns are {', '.join(COLUMNS)}",
        )  # fmt: skip
    if missing:
        raise PlatformError(
            f"the column {missing[0]!r} is missing", file=path, place=place, fix="add it"
        )
    if len(set(header)) != len(header):
        raise PlatformError("a column stands twice", file=path, place=place, fix="keep one")


def _read_node(text: str, path: Path, line: int, column: str) -> str:
    """Return a node's name, refusing what could be read two ways."""
    place = f"line {line}, column {column}"
    if not text or any(character.isspace() for character in text):
        raise PlatformError(
            f"{text!r} is not the name of a node",
            file=path,
            place=place,
            fix="write it without spaces",
        )
    rank = read_rank(text)
    if rank >= 0 and text != name_rank_node(rank):
        raise PlatformError(
            f"{text!r} is not the name of a rank", file=path, place=place,
            fix=f"write {name_rank_node(rank)}",
        )  # fmt: skip
    return text


def _read_number(text: str, path: Path, line: int, column: str) -> float:
    """Return a bandwidth above zero or a latency of zero or more."""
    place = f"line {line}, column {column}"
    try:
        value = float(text)
    except ValueError:
        raise PlatformError(
            f"{text!r} is not a number", file=path, place=place,
            fix="write a plain number such as 25e9, without a unit",
        ) from None  # fmt: skip
    least = "0 or more" if column == "latency_s" else "more than 0"
    if not math.isfinite(value) or value < 0 or (value == 0 and column != "latency_s"):
        raise PlatformError(
            f"{text} is out of range", file=path, place=place, fix=f"write {least}, finite"
        )
    return value
