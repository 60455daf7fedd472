"""Chakra's messages, built at run time from the tables below, and files of them.

A Chakra file is one ``GlobalMetadata`` and then ``Node`` messages, each behind
its length as a varint; its JSON form, which ``chakra_jsonizer`` writes, has the
same messages one after another, or as a list, gzipped or not. Field numbers: et_def.proto of mlcommons/chakra at
21585d8.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, proto
from google.protobuf.message import DecodeError

from trioflow.base.errors import TraceError
from trioflow.base.input_files import check_file

_SCHEMA_VERSION = "0.0.4"
"""Version of Chakra's schema that the tables below describe."""

NODE_TYPES = {
    "INVALID_NODE": 0, "METADATA_NODE": 1, "MEM_LOAD_NODE": 2, "MEM_STORE_NODE": 3, "COMP_NODE": 4,
    "COMM_SEND_NODE": 5, "COMM_RECV_NODE": 6, "COMM_COLL_NODE": 7,
}  # fmt: skip
COMM_TYPES = {
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5,
    "all_to_all": 6, "reduce_scatter": 7, "reduce_scatter_block": 8, "barrier": 9,
}  # fmt: skip

_VALUES = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32",
    "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
"""Types of an attribute's value: each has a field for one and, right after it, for a list."""
_FIRST_VALUE = 3
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    **{f"{word}_list_values": (("values", 1, f"{word}*"),) for word in _VALUES},
    "IOInfo": (("values", 1, "string"), ("shapes", 2, "string"), ("types", 3, "string")),
    "Node": (
        ("id", 1, "uint64"), ("name", 2, "string"), ("type", 3, "int32"),
        ("ctrl_deps", 4, "uint64*"), ("data_deps", 5, "uint64*"),
        ("start_time_micros", 6, "uint64"), ("duration_micros", 7, "uint64"),
        ("inputs", 8, "IOInfo"), ("outputs", 9, "IOInfo"), ("attr", 10, "AttributeProto*"),
    ),
    "GlobalMetadata": (("version", 1, "string"), ("attr", 2, "AttributeProto*")),
}  # fmt: skip
"""Fields of each message: name, number, type; a star for a repeated one.

A node's type is an enumeration in Chakra; on the wire that is an int32.
"""

_PACKAGE = "trioflow.chakra"
_JSON = re.compile(rb'\s*(\[\s*)?\{\s*(\}|"(version|attr|workload_graph)")')
"""How JSON forms begin; the last word is of a form that older feeders read, and that is not read here."""
_BETWEEN, _GZIP, _HEAD_BYTES = re.compile(r"[\s,]*"), b"\x1f\x8b", 64
_LONGEST_VARINT = 10
_LARGEST_MESSAGE_BYTES = 1 << 26
"""Far above any node, far below what would fill the memory when a length is garbage."""


@cache
def _message_class(name: str) -> Any:
    """Return the class of a message, in a pool of its own: others may define Chakra too."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="trioflow/chakra.proto", package=_PACKAGE, syntax="proto3"
    )
    attribute = file.message_type.add(name="AttributeProto")
    _add_field(attribute, "name", 1, "string")
    _add_field(attribute, "doc_string", 2, "string")
    attribute.oneof_decl.add(name="value")
    for place, word in enumerate(_VALUES):
        number = _FIRST_VALUE + 2 * place
        _add_field(attribute, f"{word}_val", number, word).oneof_index = 0
        _add_field(attribute, f"{word}_list", number + 1, f"{word}_list_values").oneof_index = 0
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields:
            _add_field(message, *field)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_field(message: Any, name: str, number: int, kind: str) -> Any:
    word = descriptor_pb2.FieldDescriptorProto
    bare = kind.rstrip("*")
    field = message.field.add(name=name, number=number)
    field.label = word.LABEL_REPEATED if kind.endswith("*") else word.LABEL_OPTIONAL
    if bare in _VALUES:
        field.type = getattr(word, f"TYPE_{bare.upper()}")
    else:
        field.type = word.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{bare}"
    return field


def new_node(node_id: int, name: str, node_type: str) -> Any:
    """Return a Node message; ``node_type`` is a key of `NODE_TYPES`."""
    return _message_class("Node")(id=node_id, name=name, type=NODE_TYPES[node_type])


def new_metadata() -> Any:
    """Return a GlobalMetadata message of the version that is written."""
    return _message_class("GlobalMetadata")(version=_SCHEMA_VERSION)


def add_attribute(message: Any, name: str, kind: str, value: Any) -> None:
    """Add an attribute; ``kind`` is a field such as ``int64_val`` or ``bool_list``."""
    attribute = message.attr.add(name=name)
    if kind.endswith("_list"):
        values = getattr(attribute, kind)
        values.SetInParent()
        values.values.extend(value)
    else:
        setattr(attribute, kind, value)


def read_attributes(message: Any) -> dict[str, Any]:
    """Return the attributes of a message by name; lists as lists, None for no value."""
    found: dict[str, Any] = {}
    for attribute in message.attr:
        kind = attribute.WhichOneof("value")
        value: Any = getattr(attribute, kind) if kind else None
        found[attribute.name] = list(value.values) if kind and kind.endswith("_list") else value
    return found


def write_messages(path: str | Path, messages: Iterable[Any]) -> None:
    """Write messages behind their lengths, one after another."""
    with Path(path).open("wb") as stream:
        target: Any = stream  # any binary stream will do
        for message in messages:
            proto.serialize_length_prefixed(message, target)


def read_messages(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yield a Chakra file's metadata, then its nodes, with their places, one at a time in memory.

    Raises TraceError when the file is missing, empty, cut short or no Chakra file.
    """
    path = Path(path)
    check_file(path, TraceError)
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            if not size:
                raise TraceError("the file is empty", file=path, fix="write it again")
            head = stream.read(len(_GZIP))
            opened: Any = gzip.open if head == _GZIP else open
            with opened(path, "rb") as text:
                if _JSON.match(text.read(_HEAD_BYTES)):
                    text.seek(0)
                    yield from _read_json(text.read().decode("utf-8"), path)
                    return
            stream.seek(0)
            for number, (place, raw) in enumerate(_split(stream, size, path)):
                yield place, _parse("Node" if number else "GlobalMetadata", raw, path, place)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(
            f"cannot be read: {error}", file=path, fix="write or copy it again"
        ) from None


def _read_json(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the messages of the JSON form; TraceError where it is cut or holds another message."""
    decoder, number, end = json.JSONDecoder(), 0, len(text.rstrip())
    begin = text.index("{")
    is_list = "[" in text[:begin]
    while begin < end - is_list:
        place = f"message {number}, character {begin}"
        try:
            content, begin = decoder.raw_decode(text, begin)
            if isinstance(content.get("type"), str):
                content["type"] = NODE_TYPES[content["type"]]
            name = "Node" if number else "GlobalMetadata"
            yield place, json_format.ParseDict(content, _message_class(name)())
        except (
            ValueError,
            KeyError,
            AttributeError,
            RecursionError,
            json_format.ParseError,
        ) as error:
            raise TraceError(
                f"no message of Chakra's JSON form: {error}", file=path, place=place,
                fix="write or copy the file again, or give the binary file",
            ) from None  # fmt: skip
        between = _BETWEEN.match(text, begin)
        begin, number = (between.end() if between else begin), number + 1
    if is_list and text[begin:end] != "]":
        raise TraceError(
            "the list of messages is cut", file=path, fix="write or copy the file again"
        )


def _split(stream: BinaryIO, size: int, path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each message's bytes and its place."""
    begin = number = 0
    while begin < size:
        place = f"message {number}, byte {begin}"
        length, width = _read_length(stream, path, place)
        left = size - begin - width
        if length > left:
            raise TraceError(
                f"a message of {length} bytes where {left} are left", file=path, place=place,
                fix="write or copy the file again, or give a Chakra execution trace",
            )  # fmt: skip
        if length > _LARGEST_MESSAGE_BYTES:
            raise TraceError(
                f"a message of {length} bytes is not a Chakra node", file=path, place=place,
                fix="give a Chakra execution trace",
            )  # fmt: skip
        yield place, stream.read(length)
        begin += width + length
        number += 1


def _read_length(stream: BinaryIO, path: Path, place: str) -> tuple[int, int]:
    """Return a varint and the bytes that it takes."""
    length = 0
    for width in range(_LONGEST_VARINT):
        byte = stream.read(1)
        if not byte:
            raise TraceError(
                "the file ends inside a message's length", file=path, place=place,
                fix="write or copy the file again",
            )  # fmt: skip
        length |= (byte[0] & 0x7F) << (7 * width)
        if byte[0] < 0x80:
            return length, width + 1
    raise TraceError(
        "no message's length is found here", file=path, place=place,
        fix="give a Chakra execution trace",
    )  # fmt: skip


def _parse(name: str, raw: bytes, path: Path, place: str) -> Any:
    message = _message_class(name)()
    fix = "give a Chakra execution trace"
    try:
        message.ParseFromString(raw)
    except DecodeError:
        raise TraceError(f"this is not a {name} message", file=path, place=place, fix=fix) from None
    known_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != known_bytes:
        raise TraceError(
            f"a {name} has fields that schema {_SCHEMA_VERSION} does not know",
            file=path, place=place, fix=fix,
        )  # fmt: skip
    return message
