"""Mutations of Chakra files: fields, ids, dependencies and types of messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from mutation_kinds import NUMBER, Made, Maker, Sheet

_LENGTHS = "a message's length"
_TENSORS = "a tensor's shape, type and elements, of which each follows from the others"


def _frame(messages: list[bytes]) -> bytes:
    found = bytearray()
    for message in messages:
        size = len(message)
        while size > 127:
            found.append(size & 127 | 128)
            size >>= 7
        found.append(size)
        found += message
    return bytes(found)


@cache
def _parse(raw: bytes, kind: str) -> Any:
    from trioflow.trace.importers.chakra_nodes import _message_class

    return _message_class(kind).FromString(raw)


def _copy(sheet: Sheet, place: int) -> Any:
    message = type(_parse(sheet.entries[place], "Node" if place else "GlobalMetadata"))()
    message.CopyFrom(_parse(sheet.entries[place], "Node" if place else "GlobalMetadata"))
    return message


def _is_needed(sheet: Sheet, node_id: int) -> bool:
    nodes = (_parse(raw, "Node") for raw in sheet.entries[1:])
    return any(node_id in (*node.ctrl_deps, *node.data_deps) for node in nodes)


def _node(change: Callable[[random.Random, Sheet, Any], tuple[str, str] | None]) -> Maker:
    def make(chance: random.Random, sheet: Sheet) -> Made | None:
        place = chance.randrange(1, len(sheet.entries))
        node = _copy(sheet, place)
        said = change(chance, sheet, node)
        if said is None:
            return None
        messages = list(sheet.entries)
        messages[place] = node.SerializeToString()
        return _frame(messages), f"node {place} {node.name!r}: {said[0]}", said[1]

    return make


def _other(chance: random.Random, sheet: Sheet) -> Any:
    return _parse(chance.choice(sheet.entries[1:]), "Node")


def _id(chance: random.Random, sheet: Sheet, node: Any) -> tuple[str, str]:
    needed = _is_needed(sheet, node.id)
    new = chance.choice([_other(chance, sheet).id, 10**9, (1 << 64) - 1])
    before, node.id = node.id, new
    return f"id {before} -> {new}", "the nodes that wait for it" if needed else ""


def _kind(chance: random.Random, sheet: Sheet, node: Any) -> tuple[str, str]:
    before, node.type = node.type, chance.choice([t for t in range(-1, 10) if t != node.type])
    return f"type {before} -> {node.type}", ""


def _dependency(how: str) -> Maker:
    def change(chance: random.Random, sheet: Sheet, node: Any) -> tuple[str, str] | None:
        side = chance.choice([node.ctrl_deps, node.data_deps])
        if how == "unknown":
            side.append(10**9)
            return "waits for a node that is not there", "the ids"
        if how == "gone":
            if not side:
                return None
            del side[:]
            return "waits for nothing", ""
        if how == "circle":
            side.append(node.id)
            return "waits for itself", "itself"
        side.append(_other(chance, sheet).id)
        return f"waits for {side[-1]} too", ""

    return _node(change)


def _time(chance: random.Random, sheet: Sheet, node: Any) -> tuple[str, str]:
    name = chance.choice(["start_time_micros", "duration_micros"])
    value = getattr(node, name)
    words = [
        0,
        1,
        value // 2,
        value * 2,
        value * 1000,
        10**12,
        1 << 62,
        (1 << 63) - 1,
        (1 << 64) - 7,
    ]
    setattr(node, name, min(chance.choice(words), (1 << 64) - 1))
    return f"{name} {value} -> {getattr(node, name)}", ""


def _text(how: str) -> Maker:
    def change(chance: random.Random, sheet: Sheet, node: Any) -> tuple[str, str] | None:
        sides = [
            s for s in (node.inputs, node.outputs) if "Tensor(" in s.types and "float" in s.types
        ]
        if not sides:
            return None
        side = chance.choice(sides)
        if how == "dtype":
            after = chance.choice(["floot", "double", "c10::Half"])
            side.types = side.types.replace("float", after, 1)
            return f"types -> {side.types:.60}", _TENSORS
        name = "shapes" if how == "shape" else chance.choice(["values", "shapes", "types"])
        before = getattr(side, name)
        if how == "garbage":
            words = ["[[", "{}", "[]", "nan", "[None]", "[[1,2,0,99999999999999999999,4,'']]", ""]
            setattr(side, name, chance.choice(words))
            return f"{name} -> {getattr(side, name)}", _TENSORS
        numbers = [n for n in NUMBER.finditer(before) if n[0] != "0"]
        if not numbers or name != "shapes":
            return None
        found = chance.choice(numbers)
        words = [f"-{found[0]}", str(int(found[0]) * 2), "9" * 30, "1.5", "None"]
        side.shapes = before[: found.start()] + chance.choice(words) + before[found.end() :]
        return f"shapes {before:.60} -> {side.shapes:.60}", _TENSORS

    return _node(change)


def _attribute(chance: random.Random, message: Any) -> str | None:
    """Drop an attribute of a message or give it another value."""
    if not message.attr:
        return None
    place = chance.randrange(len(message.attr))
    one = message.attr[place]
    action = chance.randrange(4)
    note = one.name
    if action == 0:
        del message.attr[place]
    elif action == 1:
        one.name += "x"
    elif action == 2 and one.WhichOneof("value") == "int64_val":
        one.int64_val = chance.choice([-1, 0, one.int64_val // 2, 1 << 62, -(1 << 63)])
    else:
        words = [
            ("string_val", "z"),
            ("int64_val", 1 << 62),
            ("double_val", float("nan")),
            ("bool_val", True),
            ("string_val", ""),
        ]
        setattr(one, *chance.choice(words))
    return f"attribute {note}: {['dropped', 'renamed', 'changed', 'retyped'][action]}"


def _node_attribute(chance: random.Random, sheet: Sheet, node: Any) -> tuple[str, str] | None:
    note = _attribute(chance, node)
    return None if note is None else (note, "")


def _metadata(chance: random.Random, sheet: Sheet) -> Made | None:
    message = _copy(sheet, 0)
    note = _attribute(chance, message)
    if note is None:
        return None
    return _frame([message.SerializeToString(), *sheet.entries[1:]]), note, ""


def _messages(how: str) -> Maker:
    def make(chance: random.Random, sheet: Sheet) -> Made:
        messages = list(sheet.entries)
        place, other = (chance.randrange(1, len(messages)) for _ in range(2))
        evidence = ""
        if how == "remove":
            needed = _is_needed(sheet, _parse(messages[place], "Node").id)
            evidence = "the nodes that wait for it" if needed else ""
            del messages[place]
        elif how == "double":
            messages.insert(place, messages[place])
            evidence = "an id that stands twice"
        else:
            messages[place], messages[other] = messages[other], messages[place]
        return _frame(messages), f"{how}: message {place}, {other}", evidence

    return make


CHAKRA: dict[str, Maker] = {
    "another's id": _node(_id),
    "type changed": _node(_kind),
    "dependency added": _dependency("more"),
    "dependency unknown": _dependency("unknown"),
    "dependencies removed": _dependency("gone"),
    "waits for itself": _dependency("circle"),
    "time changed": _node(_time),
    "unknown dtype": _text("dtype"),
    "shape changed": _text("shape"),
    "tensor text spoilt": _text("garbage"),
    "attribute changed": _node(_node_attribute),
    "header changed": _metadata,
    "entry removed": _messages("remove"),
    "entry twice": _messages("double"),
    "entries exchanged": _messages("exchange"),
}
