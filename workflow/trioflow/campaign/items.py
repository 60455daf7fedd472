"""What a campaign does, in order of value: ceilings, workloads, sweeps, then the rest.

Operations, their sizes and priorities stand in ``data/campaign/items.toml``; nothing here needs torch.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE
from trioflow.base.shipped import read_own_records

Point = dict[str, Any]

OPERATIONS = read_own_records("campaign/items")
"""What is timed alone, most useful first: sizes, precisions, and a priority for each of its levels."""

PRECISIONS = ("bf16", "tf32", "fp32", "fp16")
"""Precisions that a workload is captured in beside its own, most useful first."""
BATCHES, MULTIPLES = (128, 256, 32, 64, 8), (4, 2)
"""Batches of every workload beside those of its row, most useful first; and multiples of the row's first."""
WORKLOAD_PRIORITIES = (1, 5, 7)
"""Of a workload as its row says; with another batch or precision; with anything further."""
ON_CPU = ("", "fp32", "bf16")
"""Precisions that a CPU is measured in."""

_POINTS_PER_ITEM = 24
"""A killed call loses at most one item: a few seconds of points."""
_POINT_S, _WORKLOAD_S = 0.25, 25.0
"""First guesses for one timed point and phase, and for a workload at its row's first batch [s]."""


@dataclass(frozen=True)
class Item:
    """One thing to do; finished whole or not at all."""

    name: str  # unique, and usable as a file name
    kind: str  # ceiling, workload or sweep
    position: int  # place in the order of value, from 0
    estimate_s: float  # first guess of its time [s]
    group: str = ""  # items of one operation or workload: how long one took says how long others take
    # What its kind needs: row and batch, or operation, precision and points.
    arguments: Mapping[str, Any] = field(default_factory=dict)


def list_points(operation: str, level: int, quick: bool = False) -> list[Point]:
    """Return the sizes of one level (0 the coarsest) of an operation's sweep; levels do not overlap."""
    swept = OPERATIONS[operation]
    return [
        dict(zip(swept["sizes"], values, strict=True))
        for grid in (swept["quick"] if quick else swept["levels"][level])
        for values in product(*(axis if isinstance(axis, list) else [axis] for axis in grid))
    ]


def read_rows(path: str | Path | None = None) -> list[dict[str, Any]]:
    """Read a table of workloads (by default the catalogue) without the checks of ``base.experiments``, which need more packages.

    Raises InputError when it is missing or a row lacks its name or batches.
    """
    file = Path(path or PACKAGE / "data/catalog.tsv")
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream, delimiter="\t"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=file) from None
    return [_read_cells(row, file, f"line {line}") for line, row in enumerate(rows, start=2)]


def _read_cells(row: Mapping[str, str | None], file: Path, place: str) -> dict[str, Any]:
    """Return a row with numbers as numbers and cells that do not apply as None."""
    words = {key: (text or "").strip() for key, text in row.items()}
    cells = {key: None if word in ("", "-") else int(word) if word.isdigit() else word for key, word in words.items()}
    batches = [int(word) for word in words.get("batches", "").split(",") if word.isdigit()]
    if not cells.get("workload"):
        raise InputError("the workload has no name", file=file, place=place)
    if ",".join(map(str, batches)) != words.get("batches") or min(batches, default=0) < 1:
        raise InputError(
            f"{words.get('batches')!r} are not batch sizes",
            file=file,
            place=f"{place}, batches",
            fix="give whole numbers with commas between",
        )
    return {**cells, "batches": tuple(batches)}


def list_items(rows: Iterable[Mapping[str, Any]], *, device: str = "cuda", quick: bool = False) -> list[Item]:
    """Return everything that there is to do, in order of value; a CPU has fewer precisions, ``quick`` takes a few small items."""
    keyed = list(_list_sweeps(device, quick))
    for number, row in enumerate(rows):
        keyed += [((*key, number), item) for key, item in _list_captures(row, device, quick)]
    keyed.sort(key=lambda pair: pair[0])
    items = [replace(item, position=position) for position, (_, item) in enumerate(keyed)]
    names = {item.name: item for item in items}
    twice = [item.name for item in items if names[item.name] is not item]
    if twice:
        raise InputError(f"the item {twice[0]} is listed twice", fix="name each workload once")
    return items


def _list_captures(row: Mapping[str, Any], device: str, quick: bool) -> Iterator[tuple[tuple[int, ...], Item]]:
    """Yield a workload's items with their keys: priority, then rank of batch and precision together."""
    own, first = str(row.get("precision") or "fp32"), row["batches"][0]
    listed = [*row["batches"], *BATCHES, *(first * factor for factor in MULTIPLES)]
    batches = [min(row["batches"])] if quick else dict.fromkeys(listed)
    others = [p for p in PRECISIONS if p != own and (device == "cuda" or p in ON_CPU)]
    for b, batch in enumerate(batches):
        for p, precision in enumerate([own] if quick else [own, *others]):
            item = Item(
                f"{row['workload']}-b{batch}-{precision}",
                "workload",
                0,
                _WORKLOAD_S * max(1.0, batch / first),
                str(row["workload"]),
                {"row": {**row, "precision": precision}, "batch": batch},
            )
            yield (WORKLOAD_PRIORITIES[min(b + p, 2)], b + p, p), item


def _list_sweeps(device: str, quick: bool) -> Iterator[tuple[tuple[int, ...], Item]]:
    """Yield the ceilings, whose priority is 0, and the sweeps, some points an item, with their keys."""
    for o, (operation, swept) in enumerate(OPERATIONS.items()):
        for level, priority in enumerate(swept["priorities"][: 1 if quick else None]):
            points = list_points(operation, level, quick)
            allowed = [p for p in swept["precisions"] if device == "cuda" or p in ON_CPU]
            for p, precision in enumerate(allowed):
                for part in range(0, len(points), _POINTS_PER_ITEM):
                    some = points[part : part + _POINTS_PER_ITEM]
                    kind = "sweep" if priority else "ceiling"
                    place = [str(level), str(part // _POINTS_PER_ITEM)] if priority else []
                    yield (
                        (priority, level, p, o, part),
                        Item(
                            "-".join([kind, operation, *filter(None, [precision]), *place]),
                            kind,
                            0,
                            _POINT_S * 2 * len(some) + 1.0,
                            operation,
                            {"operation": operation, "precision": precision, "points": some},
                        ),
                    )
