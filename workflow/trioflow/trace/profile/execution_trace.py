"""PyTorch's execution trace: operators with their tensors, read and joined to Kineto's events of the same calls."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Raw, Struct
from msgspec.json import Decoder

from trioflow.base.errors import TraceError
from trioflow.trace.profile.events import Event
from trioflow.trace.profile.kineto import VALUE, decode_file
from trioflow.trace.profile.profiler_fields import element_bytes, element_type, kineto_words, load_fields
from trioflow.trace.tensors import TensorRef

_LIST = "GenericList["
TENSOR = "Tensor("
_ALIASES = re.compile(r"\([a-z*](?:\|[a-z])*(!?)(?: -> [a-z*|]+)?\)")
"""What a signature says of an argument's memory: ``(a)``, or ``(a!)`` where it is written."""
_LISTS = re.compile(r"\[[^\]]*\]|Dict\([^()]*\)")


@dataclass(slots=True)
class Node:
    """One node: an operator or an annotation."""

    # node_id, parent: ids of the node and of the one that encloses it.
    node_id: int
    parent: int
    name: str
    record_id: int  # number that Kineto gives the same call, 0 for none
    thread: int  # thread, as this file counts them
    schema: str  # the operator's signature; empty where unknown
    # inputs, outputs: its tensors, those in lists included.
    inputs: list[TensorRef]
    outputs: list[TensorRef]
    devices: frozenset[str]  # devices that hold them
    sequence_number: int | None = None  # autograd's number of the call

    @property
    def written(self) -> frozenset[int] | None:
        """Arguments that the signature marks as written; None without a signature."""
        return written_arguments(self.schema)


def written_arguments(schema: str) -> frozenset[int] | None:
    """Return the places of arguments that a signature, ``aten::add_.Tensor(Tensor(a!) self, ...)``, marks with ``!``."""
    if not schema:
        return None
    plain = _LISTS.sub("", _ALIASES.sub(lambda match: match[1], schema))
    arguments = plain.partition("(")[2].partition(")")[0].split(",")
    places = [argument for argument in arguments if argument.strip() != "*"]
    return frozenset(place for place, argument in enumerate(places) if "!" in argument)


class _File(Struct):
    """What is read of a file; each node is decoded by itself."""

    nodes: list[Raw]
    schema: str = ""


_FILE = Decoder(_File)


def read_nodes(path: str | Path) -> list[Node]:
    """Return the nodes of an execution trace, in order of node id.

    Raises TraceError when its schema or an element type is unknown, or a node is incomplete,
    repeated, contradicts itself or encloses itself.
    """
    content = decode_file(path, _FILE)
    layout = _choose_layout(content.schema, path)
    nodes: dict[int, Node] = {}
    calls: dict[int, int] = {}
    for row, raw in enumerate(content.nodes):
        place = f"nodes[{row}]"
        try:
            node = _read_node(VALUE.decode(raw), layout)
        except UnknownTypeError as error:
            raise TraceError(
                str(error),
                file=path,
                place=place,
                fix="check the file; a new type's size goes into profiler_fields.json",
            ) from None
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise TraceError(f"incomplete node ({error!r})", file=path, place=place, fix="capture it again") from None
        if node.node_id in nodes:
            raise TraceError(f"node id {node.node_id} occurs twice", file=path, place=place, fix="capture it again")
        other = calls.setdefault(node.record_id, node.node_id)
        if node.record_id and other != node.node_id:
            raise TraceError(
                f"nodes {other} and {node.node_id} are both the call {node.record_id}",
                file=path,
                place=place,
                fix="capture it again",
            )
        nodes[node.node_id] = node
    _check_parents(nodes, path)
    return [nodes[key] for key in sorted(nodes)]


class UnknownTypeError(ValueError):
    """An element type that the table of fields does not hold."""


def _choose_layout(schema: str, path: str | Path) -> Mapping[str, Any]:
    """Return where the nodes of a file's schema hold what is read."""
    known = {word: layout for layout in load_fields()["execution_trace"]["layouts"] for word in layout["schemas"]}
    layout = next((layout for word, layout in known.items() if schema.startswith(word)), None)
    if layout is None:
        raise TraceError(
            f"schema {schema!r} is not known",
            file=path,
            place="schema",
            fix=f"use PyTorch with an execution trace of schema {', '.join(known)}",
        )
    return layout  # type: ignore[no-any-return]


def _read_node(raw: Any, layout: Mapping[str, Any]) -> Node:
    words, attributes = load_fields()["execution_trace"]["attributes"], raw
    if layout["attributes"]:
        attributes = {entry["name"]: entry.get("value") for entry in raw[layout["attributes"]]}
    devices: set[str] = set()
    return Node(
        _whole(raw["id"]),
        _whole(raw.get(layout["parent"]) or 0),
        str(raw["name"]),
        _whole(attributes.get(words["record_id"]) or 0),
        _whole(attributes.get(words["thread"]) or 0),
        str(attributes.get(words["schema"]) or ""),
        _tensors(raw, layout["inputs"], devices),
        [ref for ref in _tensors(raw, layout["outputs"], devices) if ref.dtype not in UNDEFINED],
        frozenset(devices),
        attributes.get(words["sequence_number"]),
    )


def _whole(value: Any) -> int:
    if value.__class__ is not int:
        raise ValueError(f"{value!r:.40} is not a whole number")
    return int(value)


def _tensors(raw: Any, side: Mapping[str, Sequence[str]], devices: set[str]) -> list[TensorRef]:
    """Collect the tensors among a node's values, those in lists included."""
    columns = []
    for word in ("values", "shapes", "types"):
        column = raw
        for key in side[word]:
            column = column[key]
        columns.append(column)
    parts = list(list_tensors(*columns))
    devices |= {str(value[5]) if len(value) > 5 else "" for value, *_ in parts}
    return [read_tensor(*part) for part in parts]


def list_tensors(
    values: Iterable[Any], shapes: Iterable[Any], kinds: Iterable[str]
) -> Iterator[tuple[Any, Any, str, int]]:
    """Yield value, shape, type and argument of the tensors among a node's values, those in lists included."""
    for argument, (value, shape, kind) in enumerate(zip(values, shapes, kinds, strict=True)):
        parts = [(value, shape, kind)]
        if kind.startswith(_LIST) and TENSOR in kind:
            parts = list(zip(value, shape, kind[len(_LIST) : -1].split(","), strict=True))
        yield from ((*part, argument) for part in parts if part[2].startswith(TENSOR))


def read_tensor(value: Any, shape: Any, kind: str, argument: int, *, unsized: bool = False) -> TensorRef:
    """Return one tensor; its value is [tensor, storage, offset, elements, element bytes, device].

    ``unsized``: whether 0 may stand for the bytes of an element. Raises UnknownTypeError (a ValueError) or ValueError
    where it is no tensor, or contradicts itself.
    """
    sizes = tuple(_whole(part) for part in shape)
    tensor, storage, _, elements, size = numbers = [_whole(part) for part in value[:5]]
    if min(*numbers, *sizes) < 0 or max(*numbers, prod(sizes)) > MOST_NUMBER:
        raise ValueError(f"a tensor of shape {shape!r:.60} fits no memory")
    dtype = element_type(kind[len(TENSOR) : -1])
    if dtype not in UNDEFINED:
        if element_bytes(dtype) is None:
            raise UnknownTypeError(f"unknown element type {dtype!r}")
        if size != element_bytes(dtype) and (size or not unsized):
            raise ValueError(f"{size} bytes for an element of type {dtype}")
        if elements != prod(sizes):
            raise ValueError(f"{elements} elements in a tensor of shape {list(sizes)}")
    return TensorRef(tensor, storage, size, sizes, dtype, argument)


MOST_NUMBER = (1 << 63) - 1
"""No memory of one device holds more elements, and no tensor has a larger number."""
UNDEFINED = ("nullptr (uninitialized)", "undefined", "Undefined", "")
"""Types of an argument that may be a tensor and was none."""


def _check_parents(nodes: Mapping[int, Node], path: str | Path) -> None:
    """Refuse nodes that enclose one another; a root may name itself."""
    above = {key: {node.parent} - {key} for key, node in nodes.items()}
    try:
        TopologicalSorter(above).prepare()
    except CycleError as error:
        raise TraceError(
            f"node {error.args[1][0]} encloses itself", file=path, place="nodes", fix="capture it again"
        ) from None


T = TypeVar("T")
Links = dict[Event, Node]
"""Node of an event, by the event's ``id()``."""


def link_nodes(events: Sequence[Event], nodes: Sequence[Node]) -> Links:
    """Return the execution trace's node of every event (operators, annotations, in order) that has one.

    From PyTorch 2.2 on both have the same number, which counts where the names agree. Before, calls
    of a thread match those of a thread that made the same calls in order, but for `MOST_UNMATCHED`
    at most; ``agreement`` names those. Annotations of the profiler's steps and of communication are
    matched with nothing.
    """
    events = [e for e in events if e.category in ("cpu_op", "user_annotation")]
    if any(e.record_id is not None for e in events):
        by_record = {n.record_id: n for n in nodes if n.record_id}
        pairs = ((e, by_record.get(e.record_id or 0)) for e in events)
        return {e: n for e, n in pairs if n is not None and n.name == e.name}
    return _link_by_order(events, nodes)


MOST_UNMATCHED = 0.02
"""Share of a thread's calls that may lack a partner in the other file of the same run."""


def _link_by_order(events: Sequence[Event], nodes: Sequence[Node]) -> Links:
    """Match threads by the names of their calls, then call by call."""
    words = (*kineto_words("step"), *kineto_words("asynchronous"))
    ours = _by_thread((e.thread, e) for e in events if not e.name.startswith(words))
    theirs = _by_thread(
        (n.thread, n) for n in sorted(nodes, key=lambda n: n.record_id) if n.record_id and not n.name.startswith(words)
    )
    links: Links = {}
    for find in (_find_sequence, _align):
        for calls in sorted(ours, key=len, reverse=True):
            names = [e.name for e in calls]
            for place, candidates in enumerate(theirs):
                pairs = find(names, [n.name for n in candidates])
                if pairs:
                    links |= {calls[one]: candidates[other] for one, other in pairs}
                    ours.remove(calls)
                    del theirs[place]
                    break
    return links


def _by_thread(pairs: Iterable[tuple[int, T]]) -> list[list[T]]:
    """Return what each thread did, in order."""
    threads: dict[int, list[T]] = {}
    for thread, one in pairs:
        threads.setdefault(thread, []).append(one)
    return list(threads.values())


Pairs = list[tuple[int, int]]
"""Places of the same call in two sequences."""


def _find_sequence(names: list[str], within: list[str]) -> Pairs:
    """Pair a sequence of names with where it stands as one piece in a longer one, if once only."""
    limit = len(within) - len(names)
    places = [i for i in range(limit + 1) if within[i : i + len(names)] == names]
    return [(i, places[0] + i) for i in range(len(names))] if len(places) == 1 else []


def _align(names: list[str], others: list[str]) -> Pairs:
    """Pair two sequences of names in order, with the fewest left over; none where those are many.

    Source: E. W. Myers, An O(ND) difference algorithm and its variations, Algorithmica 1 (1986),
    fig. 2.
    """
    most = int(MOST_UNMATCHED * (len(names) + len(others)))
    best: dict[int, tuple[int, Any]] = {1: (0, None)}  # by diagonal: how far, and the runs of pairs before
    for edits in range(most + 1):
        for diagonal in range(-edits, edits + 1, 2):
            left, before = best.get(diagonal - 1, (-2, None))
            at, before = max(best.get(diagonal + 1, (-1, None)), (left + 1, before), key=itemgetter(0))
            start = at
            while at < len(names) and at - diagonal < len(others) and names[at] == others[at - diagonal]:
                at += 1
            best[diagonal] = at, (before, start, at, diagonal)
            if at >= len(names) and at - diagonal >= len(others):
                pairs, run = Pairs(), best[diagonal][1]
                while run is not None:
                    run, start, end, shift = run
                    pairs = [(place, place - shift) for place in range(start, end)] + pairs
                return pairs
    return []
