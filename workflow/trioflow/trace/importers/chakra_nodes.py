"""The nodes of one Chakra file: read, checked, and put in an order that their dependencies allow."""

from __future__ import annotations

import ast
import heapq
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.tables import CATEGORIES
from trioflow.trace.importers.chakra_messages import NODE_TYPES, read_attributes, read_messages
from trioflow.trace.profile.execution_trace import UNDEFINED
from trioflow.trace.profile.profiler_fields import element_bytes, element_type
from trioflow.trace.tensors import TensorRef

OWN = "trioflow."
"""Prefix of the attributes that only trioflow writes."""

_TYPE_NAMES = {number: name for name, number in NODE_TYPES.items() if number}
_NEGATIVE = 1 << 63
_LONGEST_US = 10**12
"""Eleven days: no node and no step of a training run takes longer."""
_TENSOR, _LIST = "Tensor(", "GenericList["
_MOST_ELEMENTS = 1 << 48
"""No memory of one device holds more."""
_DEEPEST = 400
"""Calls inside one another; programs nest a few dozen."""
_BARE = re.compile(r"\b(?:nan|inf)\b")
"""Numbers that Python prints but does not read back."""


@dataclass
class ChakraNode:
    """One node of a file."""

    node_id: int
    name: str
    kind: str  # a key of ``chakra_messages.NODE_TYPES``
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
                f"{name} is {value!r:.40}", file=self.file, place=self.place,
                fix="write a whole number of 0 or more",
            )  # fmt: skip
        return int(value)

    def text(self, name: str) -> str:
        """Return an attribute that is text, empty where absent; TraceError for anything else."""
        value = self.attributes.get(name)
        if value is not None and not isinstance(value, str):
            raise TraceError(
                f"{name} is {value!r:.40}", file=self.file, place=self.place, fix="write it as text"
            )
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
            values, shapes, kinds = (read_text(text) for text in self.sides[side])
            found: list[TensorRef] = []
            for argument, (value, shape, word) in enumerate(
                zip(values, shapes, kinds, strict=True)
            ):
                parts = [(value, shape, word)]
                if word.startswith(_LIST) and _TENSOR in word:
                    words = word[len(_LIST) : -1].split(",")
                    parts = list(zip(value, shape, words, strict=True))
                found += [_tensor(*part, argument) for part in parts if part[2].startswith(_TENSOR)]
            if categories:
                if not isinstance(categories, list) or not set(categories) <= {"", *CATEGORIES}:
                    raise ValueError(f"{categories!r:.60} are not categories")
                pairs = zip(found, categories, strict=True)
                found = [TensorRef(*_fields(ref), category=word) for ref, word in pairs]
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise TraceError(
                f"its {side} are not a list of tensors ({error})", file=self.file, place=self.place,
                fix="write values, shapes and types as PyTorch's execution trace does",
            ) from None  # fmt: skip
        return found


def _fields(ref: TensorRef) -> tuple[int, int, int, tuple[int, ...], str, int]:
    return ref.tensor, ref.storage, ref.elem_bytes, ref.shape, ref.dtype, ref.argument


def read_text(text: str) -> list[Any]:
    """Read a list that JSON or Python wrote; nothing for empty text."""
    if not text:
        return []
    found: Any = None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes within text
                found = ast.literal_eval(_BARE.sub("None", text))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"{text!r:.60} cannot be read") from None
    if not isinstance(found, list):
        raise ValueError(f"{text!r:.60} is not a list")
    return found


def _tensor(value: Any, shape: Any, word: str, argument: int) -> TensorRef:
    """Return one tensor; its value is [tensor, storage, offset, elements, element bytes, device]."""
    numbers = [*value[:5], *shape]
    if len(value) < 5 or any(part.__class__ is not int or part < 0 for part in numbers):
        raise ValueError(f"{value!r:.60} of shape {shape!r:.40} is not a tensor")
    if max(numbers) > _NEGATIVE - 1 or prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"{value!r:.60} of shape {shape!r:.40} fits no memory")
    dtype, size = element_type(word[len(_TENSOR) : -1]), value[4]
    known = element_bytes(dtype)
    if dtype not in UNDEFINED and known is None:
        raise ValueError(f"unknown element type {dtype!r}")
    if size and known and size != known:
        raise ValueError(f"{size} bytes for an element of type {dtype}")
    if dtype not in UNDEFINED and prod(shape) != value[3]:
        raise ValueError(f"{value[3]} elements in a tensor of shape {shape}")
    return TensorRef(value[0], value[1], size, tuple(shape), dtype, argument)


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
                f"node id {node.node_id} occurs twice", file=path, place=place,
                fix="give every node of the file an id of its own",
            )  # fmt: skip
        nodes[node.node_id] = node
    dropped = 0
    for node in nodes.values():
        dropped += sum(other not in nodes for other in node.ctrl_deps)
        node.ctrl_deps = [other for other in node.ctrl_deps if other in nodes]
        for other in node.data_deps:
            if other not in nodes:
                raise TraceError(
                    f"it depends on node {other}, which is not in the file",
                    file=path, place=node.place, fix="write all nodes of the rank into one file",
                )  # fmt: skip
    _check_span(nodes, path)
    ordered = _order(nodes, path)
    _enclose(ordered, nodes)
    if OWN + "nodes" in metadata and metadata[OWN + "nodes"] != len(nodes):
        raise TraceError(
            f"{len(nodes)} nodes of {metadata[OWN + 'nodes']}", file=path, fix="the file is cut: export or copy it again"
        )  # fmt: skip
    said = f"{dropped} control dependencies on nodes that are not in the file are dropped: it may be cut"
    return metadata, ordered, [said] if dropped else []


def _take(message: Any, path: Path, place: str) -> ChakraNode:
    """Return one node, its own values checked."""
    where = f"node {message.id}, {place}"
    if message.type not in _TYPE_NAMES:
        raise TraceError(
            f"{message.type} is not a node type", file=path, place=where,
            fix=f"use one of {', '.join(f'{n} ({w})' for n, w in _TYPE_NAMES.items())}",
        )  # fmt: skip
    for name in ("start_time_micros", "duration_micros"):
        value = getattr(message, name)
        if value >= _NEGATIVE:
            raise TraceError(
                f"{name} is negative ({value - 2 * _NEGATIVE})", file=path, place=where,
                fix="convert the trace again",
            )  # fmt: skip
    if message.duration_micros > _LONGEST_US:
        raise TraceError(
            f"{message.duration_micros} microseconds are not a node time",
            file=path, place=where, fix="convert the trace again",
        )  # fmt: skip
    sides = {
        side: (info.values, info.shapes, info.types)
        for side in ("inputs", "outputs")
        for info in [getattr(message, side)]
    }
    return ChakraNode(
        message.id, message.name, _TYPE_NAMES[message.type], list(message.ctrl_deps),
        list(message.data_deps), message.start_time_micros, message.duration_micros,
        read_attributes(message), sides, path,
    )  # fmt: skip


def _check_span(nodes: Mapping[int, ChakraNode], path: Path) -> None:
    """Refuse starts that lie further apart than any step is long."""
    timed = [node for node in nodes.values() if node.start_us]
    if not timed:
        return
    first, last = (choose(timed, key=lambda node: node.start_us) for choose in (min, max))
    if last.start_us - first.start_us > _LONGEST_US:
        raise TraceError(
            f"it starts {last.start_us - first.start_us} microseconds after node {first.node_id}",
            file=path, place=last.place, fix="convert the trace again",
        )  # fmt: skip


def _order(nodes: Mapping[int, ChakraNode], path: Path) -> list[ChakraNode]:
    """Return the nodes so that each follows its dependencies, otherwise by start and id."""
    followers: dict[int, list[ChakraNode]] = {}
    missing: dict[int, int] = {}
    for node in nodes.values():
        needed = {*node.ctrl_deps, *node.data_deps}
        missing[node.node_id] = len(needed)
        for other in needed:
            followers.setdefault(other, []).append(node)
    ready = [(n.start_us, n.node_id) for n in nodes.values() if not missing[n.node_id]]
    heapq.heapify(ready)
    found: list[ChakraNode] = []
    while ready:
        found.append(nodes[heapq.heappop(ready)[1]])
        for follower in followers.get(found[-1].node_id, ()):
            missing[follower.node_id] -= 1
            if not missing[follower.node_id]:
                heapq.heappush(ready, (follower.start_us, follower.node_id))
    if len(found) < len(nodes):
        stuck = {key for key, count in missing.items() if count}
        at, seen = min(stuck), set[int]()
        while at not in seen:
            seen.add(at)
            at = min(o for o in (*nodes[at].ctrl_deps, *nodes[at].data_deps) if o in stuck)
        raise TraceError(
            "it waits, in a circle, for itself", file=path, place=nodes[at].place,
            fix="break the cycle among ctrl_deps and data_deps",
        )  # fmt: skip
    return found


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
                f"more than {_DEEPEST} calls enclose it", file=node.file, place=node.place,
                fix="check start_time_micros and ctrl_deps",
            )  # fmt: skip
