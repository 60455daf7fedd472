"""Mutations of trace folders: columns of their tables, facts, and both against one another."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from trioflow import tables
from trioflow.trace.store import load_trace, save_trace

Change = Callable[[random.Random, Path], "str | None"]
"""Changes a folder; returns what speaks against the change, nothing for a possible value."""


def _table(name: str, change: Callable[[random.Random, Any], str | None]) -> Change:
    def make(chance: random.Random, folder: Path) -> str | None:
        file = folder / f"{name}.parquet"
        frame = tables.read_table(file, name)
        evidence = change(chance, frame)
        pq.write_table(tables.to_arrow(frame, name), file)
        return evidence

    return make


def _scale(columns: tuple[str, ...], factors: tuple[float, ...], evidence: str) -> Any:
    """Scale whole columns: times, work, sizes."""

    def change(chance: random.Random, frame: Any) -> str:
        column = chance.choice(columns)
        frame[column] = (frame[column] * chance.choice(factors)).round().astype("int64")
        return evidence

    return change


def _cell(column: str, values: Callable[[random.Random, Any, int], Any], evidence: str) -> Any:
    """Give one cell another value."""

    def change(chance: random.Random, frame: Any) -> str:
        rows = [row for row, value in enumerate(frame[column]) if value is not None]
        if frame[column].dtype == "Int64":
            rows = frame[column].dropna().index.tolist()
        row = chance.choice(rows)
        frame.at[row, column] = values(chance, frame, row)
        return evidence

    return change


def _exchange_ids(chance: random.Random, frame: Any) -> str:
    rows = [row for row, ids in enumerate(frame["input_ids"]) if ids]
    shapes = frame["input_shapes"]
    one = chance.choice(rows)
    other = chance.choice([row for row in rows if shapes[row] != shapes[one]])
    for row, ids in ((one, frame.at[other, "input_ids"]), (other, frame.at[one, "input_ids"])):
        frame.at[row, "input_ids"] = ids
    return "the shapes of the tensors"


def _grow_shape(chance: random.Random, frame: Any) -> str:
    rows = [row for row, shape in enumerate(frame["shape"]) if len(shape) and min(shape) > 0]
    row = chance.choice(rows)
    frame.at[row, "shape"] = [frame.at[row, "shape"][0] * 2, *frame.at[row, "shape"][1:]]
    return "the operators that name it"


def _facts(change: Callable[[random.Random, dict[str, Any]], str]) -> Change:
    def make(chance: random.Random, folder: Path) -> str:
        facts = json.loads((folder / "trace.json").read_text())
        evidence = change(chance, facts)
        (folder / "trace.json").write_text(json.dumps(facts))
        return evidence

    return make


def _gradient(key: str, values: Callable[[random.Random, dict[str, Any]], Any]) -> Any:
    def change(chance: random.Random, facts: dict[str, Any]) -> str:
        chance.choice(facts["gradients"])[key] = values(chance, facts)
        return "the operators and the parameters"

    return change


def _copy_gradient(chance: random.Random, facts: dict[str, Any]) -> str:
    facts["gradients"].append(copy.deepcopy(chance.choice(facts["gradients"])))
    return "itself"


def _set(key: str, values: tuple[Any, ...], evidence: str) -> Any:
    def change(chance: random.Random, facts: dict[str, Any]) -> str:
        facts[key] = chance.choice(values)
        return evidence

    return change


def _write_key_twice(chance: random.Random, folder: Path) -> str:
    text = (folder / "trace.json").read_text()
    keys = [f'"{key}":' for key in json.loads(text) if f'"{key}":' in text]
    key = chance.choice(keys)
    (folder / "trace.json").write_text(text.replace(key, f"{key} 1, {key}", 1))
    return "itself"


def _cut(chance: random.Random, folder: Path) -> str:
    file = folder / chance.choice(("operators.parquet", "tensors.parquet", "trace.json"))
    content = file.read_bytes()
    file.write_bytes(content[: chance.randrange(len(content) - 2)])
    return "its own form"


def _drop_rows(chance: random.Random, folder: Path) -> str:
    file = folder / "operators.parquet"
    table = pq.read_table(file)
    pq.write_table(table.slice(0, chance.randrange(1, len(table))), file)
    return "the count of operators, and what names them"


FOLDER: dict[str, Change] = {
    "times scaled": _table(
        "operators", _scale(("device_ns",), (1000, 100, 0.001, 0), "the step's time")
    ),
    "work scaled": _table(
        "operators",
        _scale(("flop", "read_bytes", "write_bytes"), (-1, 1000), "sums, signs and sizes"),
    ),
    "elements' size scaled": _table("tensors", _scale(("elem_bytes",), (-1,), "its sign")),
    "element's size changed": _table(
        "tensors", _cell("elem_bytes", lambda c, f, r: f.at[r, "elem_bytes"] * 2 + 1, "its type")
    ),
    "ids exchanged": _table("operators", _exchange_ids),
    "id out of range": _table(
        "operators",
        _cell("forward_op_id", lambda c, f, r: len(f) + c.randrange(9), "the operators"),
    ),
    "producer out of range": _table(
        "tensors", _cell("producer_op_id", lambda c, f, r: 10**6, "the operators")
    ),
    "row numbers wrong": _table(
        "operators", _cell("op_id", lambda c, f, r: r + 1, "the rows' count")
    ),
    "shape changed": _table("tensors", _grow_shape),
    "phase emptied": _table(
        "operators", _cell("phase", lambda c, f, r: "", "every operator has one")
    ),
    "operators removed": _drop_rows,
    "gradient nowhere": _facts(
        _gradient("ready_after_op_id", lambda c, f: c.choice((-1, 10**6, f["operators"])))
    ),
    "gradient's size": _facts(_gradient("size_bytes", lambda c, f: c.choice((-4, 0, 3)))),
    "gradient twice": _facts(_copy_gradient),
    "batch changed": _facts(_set("batch", (1, 2, 3, 4, 16, 0, -8, 1.5), "the shapes")),
    "step's time changed": _facts(
        _set("step_time_s", (0, -1, 1e3, 1e-6, "1"), "the operators' times")
    ),
    "counts changed": _facts(_set("operators", (1, 10**6, "x"), "the operators")),
    "type changed": _facts(
        lambda c, f: _set(
            c.choice(("workload", "step_time_source", "tensor_split", "gradients", "units")),
            (7, -1, [1], True),
            "its kind",
        )(c, f)
    ),
    "key twice": _write_key_twice,
    "file cut": _cut,
}
"""Contradictions; every one of them has to be refused, with digests and without."""
EDITS: dict[str, Change] = {
    "a time changed": _table(
        "operators",
        _cell("device_ns", lambda c, f, r: f.at[r, "device_ns"] + 1 + c.randrange(9), ""),
    ),
    "a kind renamed": _table(
        "operators",
        _cell("kind", lambda c, f, r: "memcpy" if f.at[r, "kind"] == "compute" else "compute", ""),
    ),
    "a name changed": _table("operators", _cell("name", lambda c, f, r: f.at[r, "name"] + "x", "")),
    "a fact changed": _facts(_set("seed", (11, 12, 13), "")),
}
"""Possible values in the place of others: taken, and said."""


class FolderBench:
    """A small trace's folder, changed and read again and again."""

    def __init__(self, name: str, folder: Path) -> None:
        self.clean, self.changed = folder / "clean", folder / "changed"
        save_trace(load_trace(name), self.clean)

    def change(self, kind: str, seed: int, digests: bool = True) -> tuple[Path, str | None]:
        """Change a fresh copy; return it, with what speaks against the change."""
        shutil.rmtree(self.changed, ignore_errors=True)
        shutil.copytree(self.clean, self.changed)
        if not digests:  # as folders of older versions are
            facts = json.loads((self.changed / "trace.json").read_text())
            del facts["digests"]
            (self.changed / "trace.json").write_text(json.dumps(facts))
        chance = random.Random(f"{kind}/{seed}")
        return self.changed, (FOLDER | EDITS)[kind](chance, self.changed)
