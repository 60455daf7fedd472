"""Mutations of PyTorch's profiles and execution traces."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from mutation_kinds import (
    ANY,
    CALLS,
    Made,
    Maker,
    Sheet,
    change_head,
    change_one,
    is_number,
    sort_of,
    starts_work,
)


def _borrow(where: str, keys: tuple[str, ...], evidence: str) -> Maker:
    """Make a kind that gives an entry an id of another one."""

    def change(
        chance: random.Random, sheet: Sheet, entry: dict[str, Any]
    ) -> tuple[str, str] | None:
        own = [key for key in keys if key in entry.get(where, {})]
        if not own:
            return None
        key = chance.choice(own)
        others = [
            e[where][key]
            for e in sheet.entries
            if key in e.get(where, {}) and e[where][key] != entry[where][key]
        ]
        if not others:
            return None
        before, entry[where][key] = entry[where][key], chance.choice(others)
        known = evidence
        if key == "Sequence number":
            known = ""
        elif key == "Record function id":
            known = "an id that stands twice"
        elif key == "correlation":
            known = "a launch without its kernel" if starts_work(entry) else ""
        elif entry.get("cat") not in ("cpu_op", None):
            known = ""  # a kernel's: read only where its launch is missing
        return f"{key}: {before} -> {entry[where][key]}", known

    return change_one(change)


def _move(chance: random.Random, sheet: Sheet, event: dict[str, Any]) -> tuple[str, str] | None:
    """Shift a host call so that it ends after, or begins before, what encloses it."""
    same = [
        e
        for e in sheet.entries
        if e.get("ph") == "X"
        and e.get("tid") == event["tid"]
        and e["dur"] > 4
        and e["ts"] < event["ts"]
        and event["ts"] + event["dur"] < e["ts"] + e["dur"]
        and e.get("cat") != "Trace"
    ]
    if not same:
        return None
    above = min(same, key=lambda e: e["dur"])
    event["ts"] = above["ts"] + above["dur"] / 2
    event["dur"] = above["dur"]
    return f"begins inside {above['name']!r} and ends {above['dur'] / 2} us after it", "its end"


def _scale(chance: random.Random, sheet: Sheet, event: dict[str, Any]) -> tuple[str, str]:
    factor = chance.choice([0, 0.1, 0.5, 2, 10, 1000])
    event["dur"] = type(event["dur"])(event["dur"] * factor)
    return f"duration times {factor}", ""


def _shift(chance: random.Random, sheet: Sheet, event: dict[str, Any]) -> tuple[str, str]:
    by = chance.choice([-1e6, -100, -3, 3, 100, 1e6, 1e9])
    event["ts"] = type(event["ts"])(event["ts"] + by)
    called = sheet.paired and event.get("cat") in CALLS and abs(by) >= 1e6
    return f"start moved by {by} us", "the execution trace" if called else ""


def _list_under(key: str, how: str) -> Maker:
    """Make a kind that changes an event's list of shapes or of types."""

    def change(
        chance: random.Random, sheet: Sheet, event: dict[str, Any]
    ) -> tuple[str, str] | None:
        cells = event["args"][key]
        full = [i for i, cell in enumerate(cells) if cell and event["args"]["Input Dims"][i]]
        if how == "missing":
            del event["args"][key]
            return f"{key} dropped", ""
        if not full:
            return None
        place = chance.choice(full)
        before = cells[place]
        cells[place] = {
            "negative": lambda: [-1, *before[1:]],
            "word": lambda: "floot",
            "other": lambda: chance.choice(["double", "c10::Half", "int", "bool"]),
            "larger": lambda: [before[0] * 2, *before[1:]] if is_number(before[0]) else [before],
            "short": lambda: before[1:],
        }[how]()
        evidence = {"negative": "its sign", "word": "every known type"}.get(how, "")
        if sheet.paired and key == "Input Dims":
            evidence = "the execution trace"
        return f"{key}[{place}]: {before} -> {cells[place]}", evidence

    return change_one(change, lambda e: bool(e.get("args", {}).get(key)))


def _set_device(
    chance: random.Random, sheet: Sheet, event: dict[str, Any]
) -> tuple[str, str] | None:
    if "device" not in event.get("args", {}):
        return None
    event["args"]["device"] = chance.choice([1, 5, "cuda:1", -1])
    return f"device -> {event['args']['device']!r}", "the other kernels' device"


def _set_category(chance: random.Random, sheet: Sheet, event: dict[str, Any]) -> tuple[str, str]:
    before = event.get("cat")
    words = [
        "cpu_op",
        "user_annotation",
        "kernel",
        "cuda_runtime",
        "gpu_memcpy",
        "cpu_operator",
        "",
    ]
    event["cat"] = chance.choice([word for word in words if word != before])
    evidence = ""
    if sheet.paired and before in CALLS and event["name"] != "trioflow: step":
        evidence = "the execution trace"
    elif "correlation" in event.get("args", {}) and starts_work(event):
        evidence = "a launch without its kernel"
    return f"{before!r} -> {event['cat']!r}", evidence


def _remove_annotation(chance: random.Random, sheet: Sheet) -> Made | None:
    places = [i for i, e in enumerate(sheet.entries) if sort_of(e) == "annotation"]
    words = sorted({sheet.entries[i]["name"].partition("#")[0].partition(":")[0] for i in places})
    if not words:
        return None
    word = chance.choice(words)
    gone = [i for i in places if sheet.entries[i]["name"].startswith(word)]
    if chance.random() < 0.5:
        gone = [chance.choice(gone)]
    evidence = "the execution trace" if sheet.paired and word != "trioflow" else ""
    return sheet.render({i: [] for i in gone}), f"{len(gone)} of {word!r} removed", evidence


_TIMED: Callable[[dict[str, Any]], bool] = lambda e: {"ts", "dur", "tid"} <= set(e)  # noqa: E731
PROFILE: dict[str, Maker] = {
    **ANY,
    "another's id": _borrow(
        "args", ("Record function id", "External id", "Sequence number", "correlation"), "its owner"
    ),
    "correlation removed": change_one(
        lambda c, s, e: (
            f"correlation {e['args'].pop('correlation')} removed",
            "a launch without its kernel" if starts_work(e) else "",
        ),
        lambda e: "correlation" in e.get("args", {}),
    ),
    "calls cross": change_one(_move, lambda e: _TIMED(e) and e.get("cat") == "cpu_op"),
    "duration scaled": change_one(_scale, _TIMED),
    "start shifted": change_one(_shift, _TIMED),
    "unknown dtype": _list_under("Input type", "word"),
    "other dtype": _list_under("Input type", "other"),
    "negative shape": _list_under("Input Dims", "negative"),
    "shape missing": _list_under("Input Dims", "missing"),
    "shape changed": _list_under("Input Dims", "larger"),
    "shape shortened": _list_under("Input Dims", "short"),
    "device changed": change_one(_set_device, lambda e: "device" in e.get("args", {})),
    "category renamed": change_one(_set_category),
    "annotation removed": _remove_annotation,
}


# Execution traces


def _side(
    chance: random.Random, node: dict[str, Any]
) -> tuple[list[Any], list[Any], list[str]] | None:
    """Return values, shapes and types of one side that has a tensor."""
    sides = []
    for side in ("inputs", "outputs"):
        if isinstance(node[side], dict):
            columns = [node[side][key] for key in ("values", "shapes", "types")]
        else:
            columns = [node[side], node[f"{side[:-1]}_shapes"], node[f"{side[:-1]}_types"]]
        if any(t.startswith("Tensor(") and "nullptr" not in t for t in columns[2]):
            sides.append(tuple(columns))
    return chance.choice(sides) if sides else None  # type: ignore[return-value]


def _tensor(how: str) -> Maker:
    """Make a kind that changes one tensor of a node."""

    def change(chance: random.Random, sheet: Sheet, node: dict[str, Any]) -> tuple[str, str] | None:
        side = _side(chance, node)
        if side is None:
            return None
        values, shapes, types = side
        place = chance.choice(
            [i for i, t in enumerate(types) if t.startswith("Tensor(") and "nullptr" not in t]
        )
        shape, value = shapes[place], values[place]
        evidence = "a tensor's shape, type and elements, of which each follows from the others"
        if how in ("negative", "larger", "short") and not shape:
            return None
        if how == "negative":
            shape[0] = -shape[0] or -1
        elif how == "larger":
            shape[chance.randrange(len(shape))] *= 2
        elif how == "short":
            shape.pop(chance.randrange(len(shape)))
        elif how == "elements":
            value[3] += chance.choice([-1, 1, 10**6])
        elif how == "size":
            value[4] = chance.choice([n for n in (0, 1, 2, 3, 8) if n != value[4]])
        elif how == "word":
            types[place] = "Tensor(floot)"
        elif how == "other":
            types[place] = chance.choice(
                [
                    w
                    for w in ("Tensor(double)", "Tensor(c10::Half)", "Tensor(bool)")
                    if w != types[place]
                ]
            )
        elif how == "device":
            value[5], evidence = "cuda:5", "the other tensors' device"
        elif how == "tensor":
            value[0], evidence = value[0] + chance.randrange(1, 50), ""
        else:
            value[1], evidence = value[1] + chance.randrange(1, 50), ""
        if how in ("larger", "short") and not value[3]:
            evidence = ""  # no elements before and after
        return f"{value} of shape {shape} is {types[place]}", evidence

    return change_one(change, lambda node: _side(random.Random(0), node) is not None)


def _attribute(node: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((a for a in node.get("attrs", []) if a["name"] == name), None)


def _parent_key(node: dict[str, Any]) -> str:
    return "ctrl_deps" if "ctrl_deps" in node else "parent"


def _borrow_node(what: str) -> Maker:
    def change(chance: random.Random, sheet: Sheet, node: dict[str, Any]) -> tuple[str, str] | None:
        other = chance.choice(sheet.entries)
        if what == "id":
            node["id"] = other["id"]
            return f"id -> {node['id']}", "an id that stands twice"
        if what == "parent":
            key = _parent_key(node)
            node[key] = other["id"]
            return f"{key} -> {node[key]}", "the profile"
        for holder, key in ((node, "rf_id"), (_attribute(node, "rf_id"), "value")):
            source = other if key == "rf_id" else _attribute(other, "rf_id")
            if holder and source and key in holder and holder[key] and source[key]:
                if holder[key] == source[key]:
                    return None
                holder[key] = source[key]
                return f"rf_id -> {holder[key]}", "an id that stands twice"
        return None

    return change_one(change)


def _circle(chance: random.Random, sheet: Sheet) -> Made | None:
    """Point a node's parent at a node below it."""
    place = chance.randrange(len(sheet.entries))
    below = next(
        (n for n in sheet.entries if n[_parent_key(n)] == sheet.entries[place]["id"] != n["id"]),
        None,
    )
    if below is None:
        return None
    node = copy.deepcopy(sheet.entries[place])
    node[_parent_key(node)] = below["id"]
    return sheet.render({place: [node]}), f"parent of {node['id']} -> {below['id']}", "itself"


def _schema(chance: random.Random, sheet: Sheet) -> Made:
    word = chance.choice(["2.0", "", "1.0.1", "1.0.2", "1.1.1", "x", None])
    return sheet.render({}, {**sheet.head, "schema": word}), f"schema -> {word!r}", ""


GRAPH: dict[str, Maker] = {
    **ANY,
    "another's id": _borrow_node("id"),
    "another's rf_id": _borrow_node("rf_id"),
    "another parent": _borrow_node("parent"),
    "parent below": _circle,
    "unknown dtype": _tensor("word"),
    "other dtype": _tensor("other"),
    "negative shape": _tensor("negative"),
    "shape changed": _tensor("larger"),
    "shape shortened": _tensor("short"),
    "element count changed": _tensor("elements"),
    "element size changed": _tensor("size"),
    "device changed": _tensor("device"),
    "tensor id changed": _tensor("tensor"),
    "storage id changed": _tensor("storage"),
    "schema changed": _schema,
}
FACTS: dict[str, Maker] = {"header changed": change_head}
