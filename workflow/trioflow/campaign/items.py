"""What a campaign does, in order of value: ceilings, workloads, sweeps, then the rest; and what is finished.

The sizes that sweeps measure, coarse to fine, by the names that results carry; plain data, no torch.

Those of training steps, by orders of magnitude at level 0 and between them at 1 and 2.
"""

from __future__ import annotations

import csv
import json
import math
import random
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.provenance import read_json, write_json
from trioflow.campaign.compaction import Content

Point = dict[str, Any]

MATRIX_OPERATIONS = ("gemm", "linear", "conv2d", "attention", "bmm")
"""Operations that matrix units run: measured in TF32 too."""

OPERATIONS = (
    *MATRIX_OPERATIONS, "layer_norm", "batch_norm", "softmax", "elementwise", "optimizer",
    "reduction", "embedding", "cross_entropy", "max_pool2d", "cat",
)  # fmt: skip
"""All operations, most useful first."""

_MEBI = 1 << 20


def count_levels(operation: str) -> int:
    """Return how many levels an operation has, coarse to fine."""
    return 3 if operation in ("gemm", "linear", "conv2d", "attention") else 2


def list_points(operation: str, level: int, quick: bool = False) -> list[Point]:
    """Return the sizes of one level (0 the coarsest) of an operation's sweep; levels do not overlap."""
    if quick:
        return _QUICK[operation]
    seen = [p for lower in range(level) for p in _POINTS[operation](lower)]
    fresh: list[Point] = []
    for point in _POINTS[operation](level):
        if point not in seen and point not in fresh:
            fresh.append(point)
    return fresh


def _gemm(level: int) -> list[Point]:
    if level == 0:
        sizes = [(s, s, s) for s in (256, 1024, 2048, 4096, 8192)]
        sizes += [(8192, 768, 768), (8192, 3072, 768), (128, 4096, 25088), (16, 4096, 4096)]
    elif level == 1:
        sizes = list(product((128, 512, 2048, 8192), (128, 512, 2048, 8192), (64, 512, 4096)))
    else:
        sizes = _scattered((16, 16_384), (16, 16_384), (16, 8_192), count=48)
    return [{"m": m, "n": n, "k": k} for m, n, k in sizes]


def _scattered(*limits: tuple[int, int], count: int) -> list[tuple[int, int, int]]:
    """Return log-uniform sizes of a fixed seed; every third one is aligned to nothing."""
    source = random.Random(0)
    chosen = []
    for number in range(count):
        sizes = []
        for low, high in limits:
            size = round(math.exp(source.uniform(math.log(low), math.log(high))))
            sizes.append(size if number % 3 == 0 else max(8, size // 8 * 8))
        chosen.append((sizes[0], sizes[1], sizes[2]))
    return chosen


def _bmm(level: int) -> list[Point]:
    if level == 0:
        sizes = [(b, s, s, 64) for b, s in ((96, 128), (384, 512), (1536, 128), (64, 1024))]
        sizes += [(b, s, 64, s) for b, s in ((96, 128), (384, 512), (64, 1024))]
    else:
        heads = product((12, 48, 192, 768), (64, 256, 1024), (64, 128))
        sizes = [size for b, s, d in heads for size in ((b, s, s, d), (b, s, d, s))]
        sizes = [(b, m, n, k) for b, m, n, k in sizes if b * m * max(n, k) <= 1 << 29]
    return [{"b": b, "m": m, "n": n, "k": k} for b, m, n, k in sizes]


def _linear(level: int) -> list[Point]:
    if level == 0:
        sizes = [(t, 768, w) for t in (512, 4096, 16_384) for w in (768, 3072)]
        sizes += [(128, 25_088, 4096), (128, 4096, 4096), (128, 2048, 1000), (4096, 768, 50_257)]
    elif level == 1:
        widths = ((512, 2048), (1024, 1024), (1024, 4096), (4096, 1024), (2048, 8192))
        sizes = [(t, i, o) for t in (128, 1024, 8192) for i, o in widths]
        sizes += [(t, i, o) for t in (8, 32, 256) for i, o in ((512, 1000), (4096, 4096))]
    else:
        sizes = _scattered((8, 32_768), (64, 8_192), (64, 8_192), count=32)
    return [{"tokens": t, "inputs": i, "outputs": o} for t, i, o in sizes]


_LAYERS = (
    (3, 224, 64, 3, 1), (3, 224, 64, 7, 2), (64, 56, 64, 3, 1), (64, 56, 256, 1, 1),
    (128, 28, 128, 3, 1), (256, 14, 256, 3, 1), (512, 7, 512, 3, 1), (512, 28, 512, 3, 1),
    (1024, 14, 256, 1, 1), (128, 28, 32, 3, 1),
)  # fmt: skip
_MORE_LAYERS = (
    (64, 224, 64, 3, 1), (64, 112, 128, 3, 1), (256, 56, 256, 3, 1), (512, 14, 512, 3, 1),
    (64, 56, 128, 3, 2), (128, 56, 128, 3, 2), (256, 56, 512, 1, 2), (512, 28, 1024, 1, 2),
    (256, 56, 64, 1, 1), (2048, 7, 512, 1, 1), (512, 7, 2048, 1, 1), (256, 56, 128, 1, 1),
    (96, 56, 128, 1, 1), (512, 14, 128, 1, 1), (128, 14, 32, 3, 1), (1024, 7, 128, 1, 1),
)  # fmt: skip


def _conv2d(level: int) -> list[Point]:
    layers, batches = (_LAYERS, (32, 128)) if level == 0 else (_LAYERS, (8, 64, 256))
    sizes = [(b, *layer) for layer in layers for b in batches]
    if level == 1:
        sizes += [(b, *layer) for layer in _MORE_LAYERS for b in (32, 128)]
    layout = "contiguous"
    if level == 2:
        sizes = [(64, *layer) for layer in (*_LAYERS, *_MORE_LAYERS)]
        layout = "channels_last"
    return [
        {
            "batch": b, "channels": c, "height": s, "width": s, "outputs": o, "kernel": k,
            "stride": step, "padding": k // 2, "groups": 1, "layout": layout,
        }
        for b, c, s, o, k, step in sizes
    ]  # fmt: skip


def _attention(level: int) -> list[Point]:
    if level == 0:
        sizes = [(8, 12, s, 64) for s in (128, 512, 2048)] + [(128, 12, 128, 64), (2, 32, 4096, 64)]
        sizes += [(16, 16, 512, 64)]
    elif level == 1:
        sizes = [
            (b, h, s, d)
            for b, h, s, d in product((1, 8, 64), (8, 16), (64, 256, 1024), (64, 128))
            if b * h * s * s <= 1 << 29
        ]
    else:
        sizes = [(8, 12, s, 64) for s in (256, 1024)]
    backends = ("default",) if level < 2 else ("flash", "efficient", "math", "cudnn")
    return [
        {
            "batch": b, "heads": h, "sequence": s, "head_width": d, "causal": causal,
            "backend": backend,
        }
        for b, h, s, d in sizes
        for causal in (True, False)
        for backend in backends
    ]  # fmt: skip


def _rows(level: int) -> list[Point]:
    if level == 0:
        sizes = [(r, w) for r in (512, 8192, 65_536) for w in (768, 4096)]
    else:
        sizes = list(product((128, 2048, 16_384, 131_072), (64, 256, 512, 1024, 2048)))
        sizes += [(1000, 50_257), (8192, 1000)]
    return [{"rows": r, "width": w} for r, w in sizes]


def _batch_norm(level: int) -> list[Point]:
    maps = ((64, 112), (64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7))
    batches = (32, 128) if level == 0 else (8, 64, 256)
    return [{"batch": b, "channels": c, "height": s, "width": s} for b in batches for c, s in maps]


def _elementwise(level: int) -> list[Point]:
    names, sizes = ["relu", "gelu", "add", "copy"], [1 << 14, _MEBI, 1 << 24, 1 << 27]
    if level:
        names += ["mul", "tanh", "silu", "dropout", "cast"]
        sizes = [1 << 10, 1 << 17, _MEBI, 1 << 22, 1 << 24, 1 << 26]
    return [{"function": n, "elements": e} for n in names for e in sizes]


def _reduction(level: int) -> list[Point]:
    names = ("sum", "mean_rows") if level == 0 else ("sum_rows", "sum_columns", "amax", "norm")
    sizes = (
        ((1024, 1024), (16_384, 4096)) if level == 0 else ((256, 1024), (8192, 768), (65_536, 512))
    )
    return [{"function": n, "rows": r, "width": w} for n in names for r, w in sizes]


def _embedding(level: int) -> list[Point]:
    tokens = (4096, 65_536) if level == 0 else (128, 1024, 16_384)
    tables = ((50_257, 768), (32_128, 512)) if level == 0 else ((30_522, 1024), (128_256, 2048))
    return [{"tokens": t, "vocabulary": v, "width": w} for t in tokens for v, w in tables]


def _cross_entropy(level: int) -> list[Point]:
    sizes = (
        ((128, 1000), (4096, 50_257))
        if level == 0
        else ((32, 1000), (1024, 30_522), (8192, 32_128))
    )
    return [{"rows": r, "classes": c} for r, c in sizes]


def _max_pool2d(level: int) -> list[Point]:
    batches = (32, 128) if level == 0 else (8, 256)
    maps = ((64, 112, 3, 2), (64, 224, 2, 2), (512, 28, 2, 2))
    return [
        {"batch": b, "channels": c, "height": s, "width": s, "kernel": k, "stride": step}
        for b in batches
        for c, s, k, step in maps
    ]


def _cat(level: int) -> list[Point]:
    counts = (2, 16) if level == 0 else (4, 32)
    return [{"tensors": n, "elements": e} for n in counts for e in (1 << 16, 1 << 20, 1 << 22)]


def _optimizer(level: int) -> list[Point]:
    names = ("sgd", "adam", "adamw")
    ways = ("foreach", "fused") if level == 0 else ("foreach", "fused", "loop")
    groups = (
        ((16, _MEBI), (160, 1 << 18), (16, 1 << 24))
        if level == 0
        else ((1, 1 << 12), (64, 1 << 12), (64, _MEBI), (300, 1 << 16))
    )
    return [
        {"optimizer": n, "implementation": way, "tensors": t, "elements": e}
        for t, e in groups
        for n in names
        for way in ways
    ]


_POINTS = {
    "gemm": _gemm, "bmm": _bmm, "linear": _linear, "conv2d": _conv2d, "attention": _attention,
    "layer_norm": _rows, "softmax": _rows, "batch_norm": _batch_norm, "elementwise": _elementwise,
    "reduction": _reduction, "embedding": _embedding, "cross_entropy": _cross_entropy,
    "max_pool2d": _max_pool2d, "cat": _cat, "optimizer": _optimizer,
}  # fmt: skip

_QUICK: dict[str, list[Point]] = {
    "gemm": [{"m": 16, "n": 24, "k": 8}, {"m": 64, "n": 64, "k": 64}],
    "bmm": [{"b": 2, "m": 8, "n": 8, "k": 4}],
    "linear": [{"tokens": 16, "inputs": 8, "outputs": 24}],
    "conv2d": [{
        "batch": 2, "channels": 3, "height": 8, "width": 8, "outputs": 4, "kernel": 3,
        "stride": 1, "padding": 1, "groups": 1, "layout": "contiguous",
    }],
    "attention": [{
        "batch": 2, "heads": 2, "sequence": 16, "head_width": 8, "causal": True,
        "backend": "default",
    }],
    "layer_norm": [{"rows": 16, "width": 32}],
    "softmax": [{"rows": 16, "width": 32}],
    "batch_norm": [{"batch": 2, "channels": 4, "height": 4, "width": 4}],
    "elementwise": [
        {"function": n, "elements": 256}
        for n in ("relu", "gelu", "add", "copy", "mul", "tanh", "silu", "dropout", "cast")
    ],
    "reduction": [
        {"function": n, "rows": 8, "width": 16}
        for n in ("sum", "mean_rows", "sum_rows", "sum_columns", "amax", "norm")
    ],
    "embedding": [{"tokens": 16, "vocabulary": 32, "width": 8}],
    "cross_entropy": [{"rows": 8, "classes": 10}],
    "max_pool2d": [{"batch": 2, "channels": 4, "height": 8, "width": 8, "kernel": 2, "stride": 2}],
    "cat": [{"tensors": 2, "elements": 64}],
    "optimizer": [
        {"optimizer": n, "implementation": way, "tensors": 2, "elements": 64}
        for n in ("sgd", "adam", "adamw")
        for way in ("foreach", "fused", "loop")
    ],
}  # fmt: skip


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
    """Read the table of workloads (by default the catalogue), without what the analysis side needs to check it.

    Raises InputError when it is missing or a row lacks its name or batches.
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
    """Return everything that there is to do, in order of value; a CPU has fewer precisions, ``quick`` takes a few small items."""
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


_SCRATCH = ".trioflow-scratch-"
_RESULT, _RUNNING, _SESSIONS = "result.json", "running.json", "sessions.json"


@dataclass
class Result:
    """What came of one item."""

    status: str = "done"  # as in the table of items; pending is never stored
    error: str = ""  # text of the error; empty for none
    time_ns: int = 0  # how long the item took [ns]
    session: int = 0
    facts: dict[str, Any] = field(default_factory=dict)  # what else is known of it
    rows: list[dict[str, Any]] = field(default_factory=list)
    # Raw files of a captured workload, packed.
    files: dict[str, Content] = field(default_factory=dict)
    elsewhere: bool = False  # whether its content lies in an earlier pack that is not at hand


class State:
    """Finished items and past calls, kept in a folder, where what an interrupted call left half-written is removed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._items = self.folder / "items"
        self._items.mkdir(parents=True, exist_ok=True)
        for rest in self.folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(rest, ignore_errors=True)
        sessions = self.folder / _SESSIONS
        self.sessions: list[dict[str, Any]] = read_json(sessions) if sessions.exists() else []
        self.results = {path.name: self._load(path) for path in sorted(self._items.iterdir())}
        running = self.folder / _RUNNING
        self.interruptions: dict[str, list[float | None]] = {}
        """How long each unfinished item ran before its call stopped it [s]; None: killed with it."""
        if running.exists():
            self.interruptions = {k: list(v) for k, v in read_json(running)["ran_s"].items()}

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a folder that is removed afterwards."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=_SCRATCH) as folder:
            yield Path(folder)

    def store(self, name: str, result: Result) -> None:
        """Write a finished item; it appears whole or not at all."""
        with self.scratch() as folder:
            whole = folder / name
            whole.mkdir()
            for file, content in result.files.items():
                (whole / f"{file}.zst").write_bytes(content.packed)
            facts = {
                "status": result.status, "error": result.error, "time_ns": result.time_ns,
                "session": result.session, "facts": result.facts, "rows": result.rows,
                "elsewhere": result.elsewhere,
                "files": {file: content.size_bytes for file, content in result.files.items()},
            }  # fmt: skip
            (whole / _RESULT).write_text(json.dumps(facts, allow_nan=False))
            target = self._items / name
            if target.exists():
                shutil.rmtree(target)
            whole.rename(target)
        # Contents stay on disk: a campaign's captures need not fit in memory beside a model.
        self.results[name] = self._load(self._items / name)

    def _load(self, path: Path) -> Result:
        facts = read_json(path / _RESULT)
        sizes = facts.pop("files")
        try:
            return Result(**facts, files={f: Content(b"", s) for f, s in sizes.items()})
        except TypeError as error:
            raise InputError(
                f"not a result of this version ({error})", file=path / _RESULT,
                fix="start in an empty output folder",
            ) from None  # fmt: skip

    def load_files(self, name: str) -> dict[str, Content]:
        """Return the packed files of a finished item."""
        sizes = self.results[name].files
        return {
            file: Content((self._items / name / f"{file}.zst").read_bytes(), content.size_bytes)
            for file, content in sizes.items()
        }

    def packed_bytes(self, name: str) -> int:
        """Return the size of an item's packed files [bytes]."""
        return sum(p.stat().st_size for p in (self._items / name).glob("*.zst"))

    def begin(self, name: str) -> None:
        """Note that an item runs, so that a call that is killed leaves a trace of why."""
        ran = {**self.interruptions, name: [*self.interruptions.get(name, []), None]}
        write_json(self.folder / _RUNNING, {"ran_s": ran})

    def end(self) -> None:
        """Note that no item runs."""
        write_json(self.folder / _RUNNING, {"ran_s": self.interruptions})

    def interrupt(self, name: str, ran_s: float) -> None:
        """Note that this call stopped an item after some seconds [s]."""
        self.interruptions.setdefault(name, []).append(ran_s)
        self.end()

    def write_sessions(self) -> None:
        """Write the list of calls."""
        write_json(self.folder / _SESSIONS, self.sessions)

    def take_over(self, other: State) -> int:
        """Copy another state's finished items that this one lacks; return how many."""
        missing = [name for name in other.results if name not in self.results]
        shift = len(self.sessions)
        for name in missing:
            result = replace(other.results[name], files=other.load_files(name))
            result.session += shift
            self.store(name, result)
        for name, ran_s in other.interruptions.items():
            if name not in self.results:
                self.interruptions.setdefault(name, ran_s)
        if missing:
            self.sessions += other.sessions
            self.write_sessions()
        self.end()
        return len(missing)

    def discard(self) -> None:
        """Remove all of it, when all of it is packed; what others put into the folder stays."""
        shutil.rmtree(self._items)
        for name in (_RUNNING, _SESSIONS):
            (self.folder / name).unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def forget(self, statuses: tuple[str, ...]) -> None:
        """Forget items of some statuses, so that they are tried again."""
        for name in [n for n, r in self.results.items() if r.status in statuses]:
            shutil.rmtree(self._items / name)
            del self.results[name]
            self.interruptions.pop(name, None)


def result_of_row(row: Mapping[str, Any]) -> Result:
    """Return the result that a row of the packed table of items stands for, without content."""
    return Result(
        str(row["status"]), str(row["error"]), int(row["time_ns"]), int(row["session"] or 0),
        json.loads(row["facts"]),
    )  # fmt: skip
