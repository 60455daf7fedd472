"""The nodes of one Chakra file: read, checked, and put in an order that their dependencies allow; files written too.

A Chakra file is one ``GlobalMetadata`` and then ``Node`` messages, each behind
its length as a varint; its JSON form, which ``chakra_jsonizer`` writes, has the
same messages one after another, or as a list, gzipped or not. Messages are built at run time from their description.
Field numbers: et_def.proto of mlcommons/chakra at 21585d8.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, proto, text_format
from google.protobuf.message import DecodeError

from trioflow.base.errors import TraceError
from trioflow.base.provenance import PACKAGE
from trioflow.tables import CATEGORIES
from trioflow.trace.profile.execution_trace import UNDEFINED, list_tensors, read_tensor
from trioflow.trace.profile.kineto import open_json
from trioflow.trace.tensors import TensorRef

_SCHEMA_VERSION = "0.0.4"
"""Version of Chakra's schema that is described."""

NODE_TYPES = {
    "INVALID_NODE": 0,
    "METADATA_NODE": 1,
    "MEM_LOAD_NODE": 2,
    "MEM_STORE_NODE": 3,
    "COMP_NODE": 4,
    "COMM_SEND_NODE": 5,
    "COMM_RECV_NODE": 6,
    "COMM_COLL_NODE": 7,
}
COMM_TYPES = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "reduce_scatter_block": 8,
    "barrier": 9,
}

_PACKAGE = "trioflow.chakra"
_MESSAGES = PACKAGE / "data" / "trace" / "importers" / "chakra_nodes.textproto"
"""What each message holds, as protobuf describes it."""
_JSON = re.compile(rb'\s*(\[\s*)?\{\s*(\}|"(version|attr|workload_graph)")')
"""How JSON forms begin; the last word is of a form that older feeders read, and that is not read here."""
_BETWEEN, _HEAD_BYTES = re.compile(r"[\s,]*"), 64
_LARGEST_MESSAGE_BYTES = 1 << 26
"""Far above any node, far below what would fill the memory when a length is garbage."""


@cache
def _message_class(name: str) -> Any:
    """Return the class of a message, in a pool of its own: others may define Chakra too."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


@cache
def _pool() -> Any:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_MESSAGES.read_text(encoding="utf-8"), descriptor_pb2.FileDescriptorProto()))
    return pool


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


_KINDS = {bool: "bool_val", int: "int64_val", str: "string_val", list: "string_list"}


def add_attributes(message: Any, values: Mapping[str, Any], kind: str = "") -> None:
    """Add attributes, but for those that are None; ``kind``: the field of all, by default that of each one's type."""
    for name, value in values.items():
        if value is not None:
            add_attribute(message, name, kind or _KINDS[value.__class__], value)


def sort_by_waiting(
    waits: Mapping[int, Iterable[int]], key: Callable[[int], Any] | None = None
) -> tuple[list[int], int | None]:
    """Return the numbers in dependency order, ties by ``key``, and None; on a cycle an empty list and one of its numbers."""
    import networkx

    graph = networkx.DiGraph(dict.fromkeys(waits, ()))
    graph.add_edges_from((other, one) for one, others in waits.items() for other in others)
    try:
        return list(networkx.lexicographical_topological_sort(graph, key)), None
    except networkx.NetworkXUnfeasible:
        return [], min(networkx.find_cycle(graph))[0]


def read_attributes(message: Any) -> dict[str, Any]:
    """Return the attributes of a message by name; lists as lists, None for no value."""
    attributes: dict[str, Any] = {}
    for attribute in message.attr:
        kind = attribute.WhichOneof("value")
        value: Any = getattr(attribute, kind) if kind else None
        attributes[attribute.name] = list(value.values) if kind and kind.endswith("_list") else value
    return attributes


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
    with open_json(path) as read:
        head = read(_HEAD_BYTES)
        text = (head + read(sys.maxsize)).decode("utf-8") if _JSON.match(head) else None
    if not head:
        raise TraceError("the file is empty", file=path, fix="write it again")
    yield from _read_binary(path) if text is None else _read_json(text, path)


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
        except (ValueError, KeyError, AttributeError, RecursionError, json_format.ParseError) as error:
            raise TraceError(
                f"no message of Chakra's JSON form: {' '.join(str(error).split()):.200}",
                file=path,
                place=place,
                fix="write or copy the file again, or give the binary file",
            ) from None
        between = _BETWEEN.match(text, begin)
        begin, number = (between.end() if between else begin), number + 1
    if is_list and text[begin:end] != "]":
        raise TraceError("the list of messages is cut", file=path, fix="write or copy the file again")


class _Messages(io.BufferedReader):
    """A file of messages, none of which is larger than a node can be."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return some bytes; ValueError where a length asks for more than any message has."""
        if size is not None and size > _LARGEST_MESSAGE_BYTES:
            raise ValueError(f"a message of {size} bytes is not a Chakra node")
        return super().read(size)


def _read_binary(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the messages of the binary form; TraceError where it is cut or holds another message."""
    with _Messages(io.FileIO(path)) as stream:
        for number in count():
            name, place = ("Node" if number else "GlobalMetadata", f"message {number}, byte {stream.tell()}")
            try:
                message = proto.parse_length_prefixed(_message_class(name), stream)  # type: ignore[arg-type]
                if message is None:
                    return
                known_bytes = message.ByteSize()
                message.DiscardUnknownFields()
                if message.ByteSize() != known_bytes:
                    raise ValueError(f"it has fields that schema {_SCHEMA_VERSION} does not know")
            except (DecodeError, ValueError, EOFError, IndexError) as error:
                raise TraceError(
                    f"this is not a {name} message: {error}",
                    file=path,
                    place=place,
                    fix="write or copy the file again, or give a Chakra execution trace",
                ) from None
            yield place, message


OWN = "trioflow."
"""Prefix of the attributes that only trioflow writes."""

_TYPE_NAMES = {number: name for name, number in NODE_TYPES.items() if number}
_NEGATIVE = 1 << 63
_LONGEST_US = 10**12
"""Eleven days: no node and no step of a training run takes longer."""
_DEEPEST = 400
"""Calls inside one another; programs nest a few dozen."""
_BARE = re.compile(r"\b(?:nan|inf)\b")
"""Numbers that Python prints but does not read back."""


@dataclass
class ChakraNode:
    """One node of a file."""

    node_id: int
    name: str
    kind: str  # a key of ``NODE_TYPES``
    ctrl_deps: list[int]
    data_deps: list[int]
    # start_us, duration_us: as the file states them, 0 for absent [us].
    start_us: int
    duration_us: int
    attributes: dict[str, Any]  # by name
    # ``inputs`` and ``outputs`` as text: values, shapes, types.
    sides: dict[str, tuple[str, str, str]]
    file: Path
    # The operator or annotation that called it, where the file says so.
    enclosing: ChakraNode | None = None
    depth: int = 0  # how many enclose it

    @property
    def place(self) -> str:
        """Name the node for a message."""
        return f"node {self.node_id} {self.name[:60]!r}"

    @property
    def on_cpu(self) -> bool:
        """Whether the host runs it."""
        return self.attributes.get("is_cpu_op") is True

    def number(self, name: str) -> int | None:
        """Return an attribute that is a whole number of 0 or more, None where absent; TraceError for anything else."""
        value = self.attributes.get(name)
        if value is None:
            return None
        if value.__class__ is not int or not 0 <= value < _NEGATIVE:
            raise TraceError(
                f"{name} is {value!r:.40}", file=self.file, place=self.place, fix="write a whole number of 0 or more"
            )
        return int(value)

    def text(self, name: str) -> str:
        """Return an attribute that is text, empty where absent; TraceError for anything else."""
        value = self.attributes.get(name)
        if value is not None and not isinstance(value, str):
            raise TraceError(f"{name} is {value!r:.40}", file=self.file, place=self.place, fix="write it as text")
        return value or ""

    @cached_property
    def inputs(self) -> list[TensorRef]:
        """Tensors read."""
        return self._tensors("inputs")

    @cached_property
    def outputs(self) -> list[TensorRef]:
        """Tensors returned, without results that are undefined."""
        return [ref for ref in self._tensors("outputs") if ref.dtype not in UNDEFINED]

    def _tensors(self, side: str) -> list[TensorRef]:
        """Read one side's tensors, those in lists included."""
        categories = self.attributes.get(f"{OWN}{side[:-1]}_categories")
        try:
            columns = (read_text(text) for text in self.sides[side])
            references = [read_tensor(*part, unsized=True) for part in list_tensors(*columns)]
            if categories:
                if not isinstance(categories, list) or not set(categories) <= {"", *CATEGORIES}:
                    raise ValueError(f"{categories!r:.60} are not categories")
                pairs = zip(references, categories, strict=True)
                references = [replace(ref, category=word) for ref, word in pairs]
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise TraceError(
                f"its {side} are not a list of tensors ({error})",
                file=self.file,
                place=self.place,
                fix="write values, shapes and types as PyTorch's execution trace does",
            ) from None
        return references


def read_text(text: str) -> list[Any]:
    """Read a list that JSON or Python wrote; nothing for empty text."""
    if not text:
        return []
    value: Any = None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes within text
                value = ast.literal_eval(_BARE.sub("None", text))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"{text!r:.60} cannot be read") from None
    if not isinstance(value, list):
        raise ValueError(f"{text!r:.60} is not a list")
    return value


def read_chakra_nodes(path: str | Path) -> tuple[dict[str, Any], list[ChakraNode], list[str]]:
    """Return a file's metadata, its nodes in order of start as far as dependencies allow, and what to warn of.

    A control dependency on a node that is not in the file is dropped: converters leave out callers. Raises
    TraceError when the file is not a Chakra file or is cut, an id occurs twice or is unknown, a type is unknown, a time is negative, or nodes wait for one another.
    """
    path = Path(path)
    metadata: dict[str, Any] = {}
    nodes: dict[int, ChakraNode] = {}
    for number, (place, message) in enumerate(read_messages(path)):
        if not number:
            metadata = read_attributes(message)
            continue
        node = _take(message, path, place)
        if node.node_id in nodes:
            raise TraceError(
                f"node id {node.node_id} occurs twice",
                file=path,
                place=place,
                fix="give every node of the file an id of its own",
            )
        nodes[node.node_id] = node
    dropped = 0
    for node in nodes.values():
        dropped += sum(other not in nodes for other in node.ctrl_deps)
        node.ctrl_deps = [other for other in node.ctrl_deps if other in nodes]
        for other in node.data_deps:
            if other not in nodes:
                raise TraceError(
                    f"it depends on node {other}, which is not in the file",
                    file=path,
                    place=node.place,
                    fix="write all nodes of the rank into one file",
                )
    _check_span(nodes, path)
    ordered = _order(nodes, path)
    _enclose(ordered, nodes)
    if OWN + "nodes" in metadata and metadata[OWN + "nodes"] != len(nodes):
        raise TraceError(
            f"{len(nodes)} nodes of {metadata[OWN + 'nodes']}",
            file=path,
            fix="the file is cut: export or copy it again",
        )
    warning = f"{dropped} control dependencies on nodes that are not in the file are dropped: it may be cut"
    return metadata, ordered, [warning] if dropped else []


def _take(message: Any, path: Path, place: str) -> ChakraNode:
    """Return one node, its own values checked."""
    where = f"node {message.id}, {place}"
    if message.type not in _TYPE_NAMES:
        raise TraceError(
            f"{message.type} is not a node type",
            file=path,
            place=where,
            fix=f"use one of {', '.join(f'{n} ({w})' for n, w in _TYPE_NAMES.items())}",
        )
    for name in ("start_time_micros", "duration_micros"):
        value = getattr(message, name)
        if value >= _NEGATIVE:
            raise TraceError(
                f"{name} is negative ({value - 2 * _NEGATIVE})", file=path, place=where, fix="convert the trace again"
            )
    if message.duration_micros > _LONGEST_US:
        raise TraceError(
            f"{message.duration_micros} microseconds are not a node time",
            file=path,
            place=where,
            fix="convert the trace again",
        )
    sides = {
        side: (info.values, info.shapes, info.types)
        for side in ("inputs", "outputs")
        for info in [getattr(message, side)]
    }
    return ChakraNode(
        message.id,
        message.name,
        _TYPE_NAMES[message.type],
        list(message.ctrl_deps),
        list(message.data_deps),
        message.start_time_micros,
        message.duration_micros,
        read_attributes(message),
        sides,
        path,
    )


def _check_span(nodes: Mapping[int, ChakraNode], path: Path) -> None:
    """Refuse starts that lie further apart than any step is long."""
    timed = [node for node in nodes.values() if node.start_us]
    if not timed:
        return
    first, last = (choose(timed, key=lambda node: node.start_us) for choose in (min, max))
    if last.start_us - first.start_us > _LONGEST_US:
        raise TraceError(
            f"it starts {last.start_us - first.start_us} microseconds after node {first.node_id}",
            file=path,
            place=last.place,
            fix="convert the trace again",
        )


def _order(nodes: Mapping[int, ChakraNode], path: Path) -> list[ChakraNode]:
    """Return the nodes so that each follows its dependencies, otherwise by start and id."""
    waits = {key: (*node.ctrl_deps, *node.data_deps) for key, node in nodes.items()}
    ordered, stuck = sort_by_waiting(waits, lambda key: (nodes[key].start_us, key))
    if stuck is not None:
        raise TraceError(
            "it waits, in a circle, for itself",
            file=path,
            place=nodes[stuck].place,
            fix="break the cycle among ctrl_deps and data_deps",
        )
    return [nodes[key] for key in ordered]


def _enclose(ordered: list[ChakraNode], nodes: Mapping[int, ChakraNode]) -> None:
    """Note which node called which: PyTorch's converter keeps the caller in ``ctrl_deps``.

    Others keep the order of a stream there, so a caller must also enclose the host's node in time;
    a device's node starts later, and its caller is of the host.
    """
    if not any(node.start_us for node in ordered):
        return
    for node in ordered:
        for other in (*node.ctrl_deps, *(() if node.on_cpu else node.data_deps)):
            above = nodes[other]
            if above is node or not (above.on_cpu or above.kind == "METADATA_NODE"):
                continue
            end_us = above.start_us + above.duration_us
            within = above.start_us <= node.start_us and (
                node.start_us + node.duration_us <= end_us + 1  # whole microseconds
            )
            if within or not node.on_cpu:
                node.enclosing, node.depth = above, above.depth + 1
                break
        if node.depth > _DEEPEST:
            raise TraceError(
                f"more than {_DEEPEST} calls enclose it",
                file=node.file,
                place=node.place,
                fix="check start_time_micros and ctrl_deps",
            )
