"""Mutations of comma-separated tables: cells, rows and columns."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Callable

from mutation_kinds import NUMBER, Made, Maker, Sheet

_TIMES = (
    "Operator_cudatime",
    "Operator_cudatimenooverlap",
    "fw_latency",
    "bw_latency",
    "acc_latency",
)
_SHAPES = ("TensorShape", "output_shape", "input_shapes")
_COUNTS = ("TensorNumElement", "InputSize", "OutputSize")
_WORDS = {"stage": ("forward", "backward", "optimizer"), "op": ("call_function", "call_module")}
_DTYPES = ("torch.float64", "torch.float16", "torch.int64", "torch.bool", "torch.floot")

Rows = list[list[str]]
Change = Callable[[random.Random, Rows], "tuple[str, str] | None"]


def _table(change: Change) -> Maker:
    def make(chance: random.Random, sheet: Sheet) -> Made | None:
        rows = [list(row) for row in sheet.entries]
        said = change(chance, rows)
        if said is None:
            return None
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue().encode(), *said

    return make


def _against(rows: Rows, row: int, column: int) -> str:
    """Return what speaks against a change of one cell."""
    title = rows[0][column].strip()
    if title in (*_COUNTS, "TensorShape"):
        return "shapes, elements and sizes, of which each follows from the others"
    if title in ("Operator_input", "Operator_output"):
        return "the tensor table's order and sizes"
    if title == "gpuid":
        return "the other rows' device"
    if title == "Index":
        return "the count of the rows"
    if title in ("_input_nodes", "input_shapes"):
        return "the rows that it reads"
    if title in ("output_shape", "Name") and _is_read(rows, row):
        return "the rows that read it"
    return ""


def _is_read(rows: Rows, row: int) -> bool:
    """Tell whether another row of a graph reads this one."""
    if "Name" not in rows[0]:
        return False
    name, column = rows[row][rows[0].index("Name")], rows[0].index("_input_nodes")
    return any(f"{name}: None" in other[column] for other in rows[1:])


def _cell(how: str, titles: tuple[str, ...] = ()) -> Maker:
    """Make a kind that changes one cell, of some columns or of any."""

    def change(chance: random.Random, rows: Rows) -> tuple[str, str] | None:
        columns = [i for i, t in enumerate(rows[0]) if not titles or t.strip() in titles]
        if not columns or len(rows) < 3:
            return None
        row, column = chance.randrange(1, len(rows)), chance.choice(columns)
        before = rows[row][column]
        evidence = _against(rows, row, column)
        after = _spoil(chance, how, before, [r[column] for r in rows[1:]])
        if after is None or after == before:
            return None
        rows[row][column] = after
        note = f"row {row}, {rows[0][column]}: {before!r:.40} -> {after!r:.40}"
        return note, evidence

    return _table(change)


def _spoil(chance: random.Random, how: str, before: str, column: list[str]) -> str | None:
    """Return another text for a cell."""
    numbers = list(NUMBER.finditer(before))
    if how == "empty":
        return ""
    if how == "type":
        return chance.choice(["text", "1.5", "[1; 2]", "None", "True", "{}", "1e3", "٣", "(1, 2)"])
    if how == "other":
        return chance.choice(column)
    if how == "dtype":
        return chance.choice(_DTYPES)
    if how == "word":
        return chance.choice([*_WORDS["stage"], "training", "Forward"])
    if not numbers:
        return None
    found = chance.choice(numbers)
    value = float(found[0])
    after = {
        "number": lambda: chance.choice(
            [
                f"-{found[0]}",
                "-1",
                str(10**18),
                str(2**63),
                str(10**40),
                "nan",
                "inf",
                "1e308",
                f"{found[0]}.5",
                f"{found[0]}000",
            ]
        ),
        "double": lambda: str(int(value * 2) or 1),
        "gone": lambda: "",
        "scale": lambda: str(int(value * factor) if "." not in found[0] else value * factor),
        "device": lambda: "1" if found[0] == "0" else "0",
        "one more": lambda: str(int(value) + 1),
    }
    factor = chance.choice([0, 0.1, 0.5, 2, 10, 1000])
    return before[: found.start()] + after[how]() + before[found.end() :]


def _rows(how: str) -> Maker:
    """Make a kind that moves whole rows."""

    def change(chance: random.Random, rows: Rows) -> tuple[str, str] | None:
        if len(rows) < 4:
            return None
        row, other = chance.sample(range(1, len(rows)), 2)
        evidence = "the rows that read it" if _is_read(rows, row) else ""
        if rows[0][0] == "Index" or (rows[0][0] == "OperatorID" and how == "exchange"):
            evidence = "the count of the rows"
        if how == "remove":
            del rows[row]
        elif how == "double":
            rows.insert(row, rows[row])
            evidence = "itself"
        elif how == "exchange":
            rows[row], rows[other] = rows[other], rows[row]
        elif how == "phase":
            if "stage" not in rows[0]:
                return None
            column, word = rows[0].index("stage"), chance.choice(_WORDS["stage"])
            rows[1:] = [r for r in rows[1:] if r[column] != word]
            return f"rows of {word} removed", evidence
        else:
            rows[row] = rows[row][: chance.randrange(len(rows[row]))]
        return f"{how}: row {row}, {other}", evidence

    return _table(change)


def _columns(how: str) -> Maker:
    """Make a kind that changes whole columns."""

    def change(chance: random.Random, rows: Rows) -> tuple[str, str] | None:
        one, other = chance.sample(range(len(rows[0])), 2)
        note = f"{how}: {rows[0][one]}, {rows[0][other]}"
        evidence = ""
        if how == "remove":
            for row in rows:
                del row[one]
        elif how == "rename":
            rows[0][one] += chance.choice(["x", " ", "_"])
        elif how == "double":
            for row in rows:
                row.append(row[one])
        else:
            rows[0][one], rows[0][other] = rows[0][other], rows[0][one]
        return note, evidence

    return _table(change)


TABLE: dict[str, Maker] = {
    "cell emptied": _cell("empty"),
    "type changed": _cell("type"),
    "number changed": _cell("number"),
    "another row's value": _cell("other"),
    "shape changed": _cell("double", _SHAPES),
    "shape shortened": _cell("gone", _SHAPES),
    "element count changed": _cell("one more", _COUNTS),
    "element size changed": _cell("double", ("TensorEachByte",)),
    "duration scaled": _cell("scale", _TIMES),
    "device changed": _cell("device", ("gpuid",)),
    "phase changed": _cell("word", ("stage",)),
    "other dtype": _cell("dtype", ("dtype",)),
    "another's id": _cell(
        "other",
        (
            "OperatorID",
            "Operator_input",
            "Operator_output",
            "TensorID",
            "TensorStorgeid",
            "_input_nodes",
            "Name",
        ),
    ),
    "row removed": _rows("remove"),
    "row twice": _rows("double"),
    "rows exchanged": _rows("exchange"),
    "row cut": _rows("cut"),
    "phase removed": _rows("phase"),
    "column removed": _columns("remove"),
    "column renamed": _columns("rename"),
    "column twice": _columns("double"),
    "titles exchanged": _columns("exchange"),
}
