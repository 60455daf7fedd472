"""What a campaign does, in order of value: ceilings, workloads, sweeps, then the rest."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.campaign.sweep_points import (
    MATRIX_OPERATIONS,
    OPERATIONS,
    count_levels,
    list_points,
)  # fmt: skip

DATA = Path(__file__).parent.parent / "data"
_CATALOGS = (DATA / "catalog.tsv", DATA / "workloads.tsv")
"""Tables of workloads that ship; the first one present is the default."""

PRECISIONS = ("tf32", "bf16", "fp32", "fp16")
"""Precisions of the sweeps, most useful first."""

_FURTHER_PRECISIONS = ("bf16", "tf32", "fp32", "fp16")
"""Precisions that a workload is captured in beside its own, most useful first."""

BATCHES = (128, 256, 32, 64, 8)
"""Batches of every workload beside those of its row, most useful first; TrioSim's paper used 128."""

_MULTIPLES = (4, 2)
"""Multiples of a row's first batch, for models too large for the batches above."""

_POINTS_PER_ITEM = 24
"""A killed call loses at most one item: a few seconds of points."""

CEILINGS = ("copy", "matmul", "host_copies", "launch")
ESTIMATES_S = {"ceiling": 6.0, "workload": 25.0}
"""First guesses, replaced by what items of the kind really took."""
_POINT_S = 0.25
"""First guess for one timed point and phase [s]."""


@dataclass(frozen=True)
class Item:
    """One thing to do; finished whole or not at all."""

    name: str  # unique, and usable as a file name
    kind: str
    position: int  # place in the order of value, from 0
    estimate_s: float  # first guess of its time [s]
    # What its kind needs: the part to measure, the row and batch, the points.
    arguments: Mapping[str, Any] = field(default_factory=dict)


def read_rows(path: str | Path | None = None) -> list[dict[str, Any]]:
    """Read the table of workloads without what the analysis side needs to check it.

    ``path``: a table like ``config/workloads.tsv``; by default the catalogue that ships. Raises
    InputError when the table is missing or a row lacks its name or batches.
    """
    file = Path(path) if path else next((p for p in _CATALOGS if p.exists()), _CATALOGS[-1])
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream, delimiter="\t"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=file) from None
    return [_typed(row, number, file) for number, row in enumerate(rows, start=2)]


def _typed(row: Mapping[str, str | None], line: int, file: Path) -> dict[str, Any]:
    """Return a row with numbers as numbers and cells that do not apply as None."""
    cells: dict[str, Any] = {}
    for key, text in row.items():
        word = (text or "").strip()
        cells[key] = None if word in ("", "-") else int(word) if word.isdigit() else word
    place = f"line {line}"
    if not cells.get("workload"):
        raise InputError("the workload has no name", file=file, place=place)
    try:
        batches = [int(word) for word in str(cells.get("batches") or "").split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise InputError(
            f"{cells.get('batches')!r} are not batch sizes", file=file, place=f"{place}, batches",
            fix="give whole numbers with commas between",
        )  # fmt: skip
    return {**cells, "batches": tuple(batches)}


def batch_ladder(batches: Iterable[int]) -> list[int]:
    """Return the batches to capture, most useful first: the row's own, then those of all."""
    listed = list(batches)
    return list(dict.fromkeys([*listed, *BATCHES, *(listed[0] * times for times in _MULTIPLES)]))


def list_items(
    rows: Iterable[Mapping[str, Any]], *, device: str = "cuda", quick: bool = False
) -> list[Item]:
    """Return everything that there is to do, in order of value.

    ``device``: where it runs; a CPU has fewer precisions. ``quick``: a few small items by the same
    code, to try it out.
    """
    keyed: list[tuple[tuple[int, ...], Item]] = []
    for number, part in enumerate(CEILINGS):
        keyed.append(
            ((0, number), Item(f"ceiling-{part}", "ceiling", 0, ESTIMATES_S["ceiling"], {"part": part}))
        )  # fmt: skip
    for number, row in enumerate(rows):
        keyed += [((*key, number), item) for key, item in _workload_items(row, device, quick)]
    keyed += _sweep_items(device, quick)
    keyed.sort(key=lambda pair: pair[0])
    items = [
        Item(item.name, item.kind, position, item.estimate_s, item.arguments)
        for position, (_, item) in enumerate(keyed)
    ]
    names = [item.name for item in items]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"the item {twice} is listed twice", fix="name each workload once")
    return items


def _workload_items(
    row: Mapping[str, Any], device: str, quick: bool
) -> Iterator[tuple[tuple[int, ...], Item]]:
    """Yield a workload's items with their key: the rank of batch and precision together.

    One batch in the workload's own precision comes before all sweeps; a second
    batch and a second precision, worth the same, before the finest sweeps.
    """
    own = str(row.get("precision") or "fp32")
    batches = [min(row["batches"])] if quick else batch_ladder(row["batches"])
    allowed = _FURTHER_PRECISIONS if device == "cuda" else ("bf16", "fp32")
    precisions = [own] if quick else [own, *(p for p in allowed if p != own)]
    for b, batch in enumerate(batches):
        for p, precision in enumerate(precisions):
            tier = {0: 1, 1: 5}.get(b + p, 7)
            name = f"{row['workload']}-b{batch}-{precision}"
            arguments = {"row": {**row, "precision": precision}, "batch": batch}
            item = Item(name, "workload", 0, ESTIMATES_S["workload"], arguments)
            yield (tier, b + p, p), item


def _sweep_items(device: str, quick: bool) -> list[tuple[tuple[int, ...], Item]]:
    """Return the sweeps: coarse ones of matrix work and of the rest, then finer ones."""
    keyed: list[tuple[tuple[int, ...], Item]] = []
    for o, operation in enumerate(OPERATIONS):
        matrix = operation in MATRIX_OPERATIONS
        for level in range(1 if quick else count_levels(operation)):
            points = list_points(operation, level, quick)
            for p, precision in enumerate(_precisions_of(operation, device)):
                for part in range(0, len(points), _POINTS_PER_ITEM):
                    some = points[part : part + _POINTS_PER_ITEM]
                    phases = 1 if operation in ("gemm", "bmm", "optimizer") else 2
                    item = Item(
                        f"sweep-{operation}-{precision}-{level}-{part // _POINTS_PER_ITEM}",
                        "sweep", 0, _POINT_S * phases * len(some) + 1.0,
                        {"operation": operation, "precision": precision, "points": some},
                    )  # fmt: skip
                    tier = (2 if matrix else 3) if level == 0 else 4 if matrix and level == 1 else 6
                    keyed.append(((tier, level, p, o, part), item))
    return keyed


def _precisions_of(operation: str, device: str) -> tuple[str, ...]:
    """Return the precisions in which an operation is measured."""
    if device == "cpu":
        return ("fp32",) if operation == "optimizer" else ("fp32", "bf16")
    if operation in MATRIX_OPERATIONS:
        return PRECISIONS
    return ("fp32",) if operation == "optimizer" else ("fp32", "bf16", "fp16")
