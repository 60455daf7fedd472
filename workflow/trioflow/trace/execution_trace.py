"""Reading PyTorch's execution trace: operators and annotations with their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioflow.errors import TraceError
from trioflow.trace.kineto import read_json_trace

SCHEMAS = ("1.1.",)
"""Versions whose fields this reader knows (prefixes)."""


@dataclass(frozen=True)
class TensorRef:
    """One use of a tensor by one node; ids are the profiler's and are reused."""

    tensor: int
    storage: int
    elem_bytes: int
    shape: tuple[int, ...]
    dtype: str
    argument: int


@dataclass
class Node:
    """One node: an operator or an annotation."""

    node_id: int
    name: str
    record_id: int
    inputs: list[TensorRef]
    outputs: list[TensorRef]


def _tensors(side: Any, place: str, file: str | Path) -> list[TensorRef]:
    """Collect the tensors among a node's values, those in lists included."""
    found: list[TensorRef] = []
    sides = zip(side["values"], side["shapes"], side["types"], strict=True)
    for argument, (value, shape, kind) in enumerate(sides):
        pending = [(value, shape, kind)]
        if kind.startswith("GenericList[Tensor"):
            kinds = kind[len("GenericList[") : -1].split(",")
            pending = list(zip(value, shape, kinds, strict=True))
        for one, sizes, word in pending:
            if not word.startswith("Tensor("):
                continue
            if not (
                isinstance(one, list) and len(one) >= 5 and all(isinstance(i, int) for i in one[:5])
            ):
                raise TraceError(f"{one!r} is no tensor", file=file, place=place)
            found.append(
                TensorRef(one[0], one[1], one[4], tuple(sizes), word[len("Tensor(") : -1], argument)
            )
    return found


def read_nodes(path: str | Path) -> list[Node]:
    """Return the nodes of an execution trace, in order of node id (order of start).

    Raises
    ------
    TraceError
        When the file is no execution trace of a known schema, or a node is
        incomplete or repeated.
    """
    content = read_json_trace(path)
    if not isinstance(content, dict) or not isinstance(content.get("nodes"), list):
        raise TraceError("the key nodes is missing", file=path, fix="give an execution trace")
    schema = str(content.get("schema", ""))
    if not schema.startswith(SCHEMAS):
        raise TraceError(
            f"schema {schema!r} is not known", file=path, place="schema",
            fix=f"use PyTorch with an execution trace of schema {', '.join(s + 'x' for s in SCHEMAS)}",
        )  # fmt: skip
    nodes: dict[int, Node] = {}
    for row, raw in enumerate(content["nodes"]):
        place = f"nodes[{row}]"
        try:
            attributes = {entry["name"]: entry.get("value") for entry in raw["attrs"]}
            node = Node(
                int(raw["id"]), str(raw["name"]), int(attributes.get("rf_id") or 0),
                _tensors(raw["inputs"], place, path),
                _tensors(raw["outputs"], place, path),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"incomplete node ({error!r})", file=path, place=place) from None
        if node.node_id in nodes:
            raise TraceError(f"node id {node.node_id} occurs twice", file=path, place=place)
        nodes[node.node_id] = node
    return [nodes[key] for key in sorted(nodes)]
