"""Chakra files taken apart by hand: protocol buffers' wire format, and the schema's field numbers.

Nothing here uses trioflow or protobuf, so that what is written is checked
against the published numbers and not against itself.
"""

import struct
from pathlib import Path
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VALUES = {
    3: "double_val",
    7: "int32_val",
    9: "int64_val",
    13: "uint64_val",
    27: "bool_val",
    28: "bool_list",
    29: "string_val",
    30: "string_list",
}
"""Fields of AttributeProto that the tests meet."""


def take_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def fields(data: bytes) -> list[tuple[int, Any]]:
    """Pairs of field number and value of one message."""
    found, at = [], 0
    while at < len(data):
        key, at = take_varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = take_varint(data, at)
        elif wire == BYTES:
            size, at = take_varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            width, code = {FIXED64: (8, "<d"), FIXED32: (4, "<f")}[wire]
            value, at = struct.unpack(code, data[at : at + width])[0], at + width
        found.append((number, value))
    return found


def messages(path: Path) -> list[bytes]:
    data, at, found = Path(path).read_bytes(), 0, []
    while at < len(data):
        size, at = take_varint(data, at)
        found.append(data[at : at + size])
        at += size
    assert at == len(data)
    return found


def packed(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = take_varint(data, at)
        found.append(value)
    return found


def attribute(data: bytes) -> tuple[str, str, Any]:
    """Name, field and value of one AttributeProto."""
    parts = dict(fields(data))
    name = parts.pop(1).decode()
    ((number, value),) = parts.items()
    kind = VALUES[number]
    if kind.startswith("string"):
        value = value.decode() if kind.endswith("val") else [v.decode() for _, v in fields(value)]
    elif kind == "bool_list":
        value = [bool(v) for n, raw in fields(value) if n == 1 for v in packed(raw)]
    elif kind == "bool_val":
        value = bool(value)
    return name, kind, value


def node(data: bytes) -> dict[str, Any]:
    """One Node: id=1, name=2, type=3, ctrl_deps=4, data_deps=5, duration_micros=7, attr=10."""
    found: dict[str, Any] = {
        "id": 0,
        "name": "",
        "ctrl_deps": [],
        "data_deps": [],
        "duration": 0,
        "attr": {},
        "kinds": {},
        "inputs": {},
        "outputs": {},
        "fields": set(),
    }
    for number, value in fields(data):
        found["fields"].add(number)
        if number == 10:
            name, kind, content = attribute(value)
            found["attr"][name], found["kinds"][name] = content, kind
        elif number in (4, 5):
            found["ctrl_deps" if number == 4 else "data_deps"] += packed(value)
        elif number in (8, 9):
            sides = {1: "values", 2: "shapes", 3: "types"}
            texts = {sides[n]: text.decode() for n, text in fields(value)}
            found["inputs" if number == 8 else "outputs"] = texts
        else:
            word = {1: "id", 2: "name", 3: "type", 6: "start", 7: "duration"}[number]
            found[word] = value.decode() if number == 2 else value
    return found


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Version and attributes of the metadata, and the nodes."""
    head, *rest = messages(path)
    metadata: dict[str, Any] = {}
    for number, value in fields(head):
        if number == 1:
            metadata["version"] = value.decode()
        else:
            assert number == 2
            name, _, content = attribute(value)
            metadata[name] = content
    return metadata, [node(one) for one in rest]
