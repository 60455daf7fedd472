"""A repeated block of a model in a trace: its operators, and what flows through it; `find_block` is the door.

Optimizer operators over the parameters of the whole model at once, foreach and fused, have lists in one order
(`Lists`), which a block has its part of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.tables import records
from trioflow.trace.store import Trace

Row = dict[str, Any]


def is_spanning(name: str) -> bool:
    """Return whether an operator works on lists of tensors."""
    operator = name.rpartition("::")[2]
    return operator.startswith(("_foreach_", "_fused_"))


@dataclass(frozen=True)
class Lists:
    """What one operator over lists works on."""

    names: tuple[str, ...]  # parameters, in the order of each list
    # inputs, outputs: ``tensor_id`` of its arguments and results: whole lists, then what belongs to
    # no parameter.
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def owner(self, ids: Sequence[int], place: int) -> str | None:
        """Return the parameter of an entry; None for what follows the last whole list."""
        whole = len(ids) // len(self.names) * len(self.names)
        return self.names[place % len(self.names)] if place < whole else None

    def owners(self) -> dict[int, str]:
        """Return the parameter of each tensor."""
        return {
            index: name
            for ids in (self.inputs, self.outputs)
            for place, index in enumerate(ids)
            if (name := self.owner(ids, place)) is not None
        }


def resolve_lists(trace: Trace, rows: list[Row]) -> tuple[dict[int, Lists], dict[int, str]]:
    """Return what each operator over lists works on, by ``op_id``, and the parameter of each listed ``tensor_id``.

    A list of parameters or gradients gives the order; of nothing else (step counts come first) that
    of the next operator. Operators whose lists cannot be distinguished are left out.
    """
    storage = trace.tensors["storage_id"].tolist()
    known: dict[int, str] = {}
    for gradient in trace.facts.gradients:
        for key in ("parameter_storage_id", "gradient_storage_id"):
            if gradient.get(key, -1) >= 0:
                known[gradient[key]] = gradient["name"]
    spanning = [row for row in rows if is_spanning(row["name"])]
    orders = [_order(row, storage, known) for row in spanning]
    # A gradient that no operator returned leaves a gap; the list of parameters has none.
    groups = [max((g for g in orders if set(g) >= set(o)), key=len) if o else o for o in orders]
    resolved: dict[int, Lists] = {}
    owner: dict[int, str] = {}
    for place, row in enumerate(spanning):
        nearest = [g for g in groups[place:] if g] or [g for g in reversed(groups[:place]) if g]
        if not nearest or len(row["input_ids"]) < len(nearest[0]):
            continue
        lists = Lists(nearest[0], tuple(row["input_ids"]), tuple(row["output_ids"]))
        named = lists.owners()
        if any(known.get(storage[i], name) != name for i, name in named.items()):
            continue
        resolved[int(row["op_id"])] = lists
        owner |= named
    return resolved, owner


def _order(row: Row, storage: list[int], known: dict[int, str]) -> tuple[str, ...]:
    """Return the parameters of an operator's longest list that identifies them, in order."""
    best: list[str] = []
    run: list[str] = []
    for index in row["input_ids"]:
        name = known.get(storage[index])
        if name is None or name in run:
            run = []
        if name is not None:
            run.append(name)
        if len(run) > len(best):
            best = list(run)
    return tuple(best)


Kind = tuple[tuple[int, ...], str]
"""Shape and element type of a tensor."""


@dataclass(frozen=True)
class BlockName:
    """The path of a numbered block: ``blocks.1`` is number 1 below ``blocks``."""

    prefix: str
    number: int

    @classmethod
    def parse(cls, path: str) -> BlockName:
        """Split a path at its last dot; TraceError where it does not end in a number."""
        prefix, _, number = path.rpartition(".")
        if not number.isdecimal():
            raise TraceError(
                f"{path!r} is not a block in a row of equal ones",
                fix="name a module whose path ends in its number, such as blocks.1",
            )
        return cls(prefix, int(number))

    @property
    def path(self) -> str:
        """The whole path."""
        return f"{self.prefix}.{self.number}" if self.prefix else str(self.number)

    def sibling(self, step: int) -> BlockName:
        """Return the block some places further on."""
        return BlockName(self.prefix, self.number + step)

    def holds(self, path: str) -> bool:
        """Return whether a module or parameter is the block or lies inside it."""
        return path == self.path or path.startswith(f"{self.path}.")

    def split(self, path: str) -> tuple[int, str] | None:
        """Return the number and the rest of a path below the same prefix; None for another path."""
        rest = path
        if self.prefix:
            if not path.startswith(f"{self.prefix}."):
                return None
            rest = path[len(self.prefix) + 1 :]
        number, dot, rest = rest.partition(".")
        return (int(number), dot + rest) if number.isdecimal() else None

    def renumber(self, path: str, position: int, copies: int) -> str:
        """Return a path's new name when the block occurs `copies` times; ``position``: of which copy, from 0."""
        parts = self.split(path)
        if parts is None or parts[0] < self.number:
            return path
        number = parts[0] + (position if parts[0] == self.number else copies - 1)
        return f"{BlockName(self.prefix, number).path}{parts[1]}"


@dataclass
class Block:
    """One block of a trace."""

    name: BlockName  # its path
    rows: list[Row]  # all operators of the trace
    # forward, backward: ``op_id`` of its operators, operators between it and the block before
    # included.
    forward: range
    backward: range
    optimizer: list[range] = field(default_factory=list)  # its parameters' updates, run by run
    # Operators over the parameters of the whole model (foreach, fused).
    lists: dict[int, Lists] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)  # storages that each copy has for itself
    # Storage that the block reads from before it, to the one it hands on.
    forward_chain: dict[int, int] = field(default_factory=dict)
    # Storage of the gradient that it receives, to the one it hands on.
    backward_chain: dict[int, int] = field(default_factory=dict)

    @property
    def members(self) -> set[int]:
        """``op_id`` of all its operators."""
        return {op for part in (self.forward, self.backward, *self.optimizer) for op in part}


def find_block(trace: Trace, path: str) -> Block:
    """Return a block's operators, its storages and what flows through it.

    ``trace``: one step of a model of repeated blocks; ``path``: module path of the block, such as
    ``blocks.1``. Raises TraceError when there is no such block, its operators are not next to one
    another or its output does not fit the next block's input.
    """
    rows, name = records(trace.operators), BlockName.parse(path)
    forward = _find_forward(rows, name)
    block = Block(name, rows, forward, _find_backward(rows, name, forward))
    block.lists, owner = resolve_lists(trace, rows)
    block.optimizer = _find_optimizer(block, owner)
    _Storages(trace, block).describe()
    return block


def _find_forward(rows: list[Row], name: BlockName) -> range:
    forward = [row for row in rows if row["phase"] == "forward"]
    operators = [int(row["op_id"]) for row in forward if name.holds(row["module"])]
    if not operators:
        known = {name.split(row["module"]) for row in forward} - {None}
        numbers = sorted({parts[0] for parts in known if parts})
        raise TraceError(
            f"the trace has no block {name.path!r}",
            fix=f"blocks there: {', '.join(BlockName(name.prefix, n).path for n in numbers)}"
            if numbers
            else "name a module of the operator table, such as blocks.1",
        )
    first, last = operators[0], operators[-1]
    others = {
        step: [int(row["op_id"]) for row in forward if name.sibling(step).holds(row["module"])] for step in (-1, 1)
    }
    if others[-1] and others[-1][-1] < first:
        first = others[-1][-1] + 1  # what runs between two blocks is repeated with them
    elif not others[-1] and others[1] and others[1][0] > last:
        last = others[1][0] - 1
    inside = range(first, last + 1)
    for op_id in inside:
        parts = name.split(rows[op_id]["module"])
        if rows[op_id]["phase"] != "forward" or (parts and parts[0] != name.number):
            raise TraceError(
                f"block {name.path!r} is not one piece of the forward pass: operator {op_id} "
                f"({rows[op_id]['name']} of {rows[op_id]['module'] or 'no module'}) runs inside it",
                fix="name a block that runs once and by itself",
            )
    return inside


def _find_backward(rows: list[Row], name: BlockName, forward: range) -> range:
    """Find the backward operators; one without a forward goes with the one before it."""
    operators: list[int] = []
    inside = False
    for row in rows:
        if row["phase"] != "backward":
            continue
        if row["forward_op_id"] is not None:
            inside = row["forward_op_id"] in forward
        elif row["module"]:
            inside = name.holds(row["module"])
        if inside:
            operators.append(int(row["op_id"]))
    if not operators:
        return range(0)
    between = sorted(set(range(operators[0], operators[-1] + 1)) - set(operators))
    if between:
        raise TraceError(
            f"block {name.path!r} is not one piece of the backward pass: operator {between[0]} "
            f"({rows[between[0]]['name']} of {rows[between[0]]['module'] or 'no module'}) runs inside it"
        )
    return range(operators[0], operators[-1] + 1)


def _find_optimizer(block: Block, owner: dict[int, str]) -> list[range]:
    """Find the updates of the block's parameters; one of no module goes with the next that has one.

    `owner` names the parameter of each scalar state that lists alone give away.
    """
    operators: list[int] = []
    inside = False
    for row in reversed(block.rows):
        op_id = int(row["op_id"])
        if row["phase"] != "optimizer" or op_id in block.lists or is_spanning(row["name"]):
            inside = False
            continue
        names = {owner[i] for i in row["input_ids"] if i in owner}
        if row["module"]:
            inside = block.name.holds(row["module"])
        elif len(names) == 1:
            inside = block.name.holds(names.pop())
        if inside:
            operators.append(op_id)
    # Numbers of a run grow as their places do.
    runs = groupby(enumerate(reversed(operators)), lambda item: item[1] - item[0])
    parts = [[op_id for _, op_id in run] for _, run in runs]
    return [range(part[0], part[-1] + 1) for part in parts]


_FLOWING = ("activation", "input", "output", "gradient")
"""Categories of what blocks hand on; a gradient of one sample may end as that of a table of positions."""


class _Storages:
    """Finds which storages each copy has for itself, and which hand on from block to block."""

    def __init__(self, trace: Trace, block: Block) -> None:
        self.block, self.rows = block, block.rows
        tensors = trace.tensors
        self.storage = [int(s) for s in tensors["storage_id"]]
        self.category = tensors["category"].tolist()
        self.kinds = [(tuple(shape), dtype) for shape, dtype in zip(tensors["shape"], tensors["dtype"], strict=True)]
        made = records(tensors, "storage_id", "producer_op_id")
        self.producer = {row["storage_id"]: row["producer_op_id"] for row in made}
        self.alone = not any(block.name.sibling(step).holds(row["module"]) for row in self.rows for step in (-1, 1))

    def describe(self) -> None:
        """Fill in the block's storages."""
        block = self.block
        members = block.members
        inside = self._used(lambda op: op in members)
        outside = self._used(lambda op: op not in members and op not in block.lists)
        made = {s for s, op in self.producer.items() if op in members}
        # The step's inputs: with one block alone nothing says whose they are.
        places = zip(self.storage, self.category, self.kinds, strict=True)
        shared = {s for s, category, (shape, _) in places if self.alone and category == "input" and shape}
        entering = {s for s in inside - outside if self.producer[s] is None} - shared
        listed = {
            self.storage[i]
            for lists in block.lists.values()
            for i, name in lists.owners().items()
            if block.name.holds(name)
        }
        block.own = made | entering | (listed - outside)
        block.forward_chain = self._chain(block.forward, "forward")
        if block.backward:
            block.backward_chain = self._chain(block.backward, "backward")

    def _used(self, chosen: Callable[[int], bool]) -> set[int]:
        """Return the storages that some operators use."""
        return {
            self.storage[i]
            for row in self.rows
            if chosen(int(row["op_id"]))
            for i in (*row["input_ids"], *row["output_ids"])
        }

    def _chain(self, part: range, phase: str) -> dict[int, int]:
        """Pair what a pass of the block receives with what it hands on, by shape and order."""
        before = {int(r["op_id"]) for r in self.rows[: part.start] if r["phase"] == phase}
        after = [r for r in self.rows[part.stop :] if r["phase"] == phase]
        given = {s for s, op in self.producer.items() if op in before}
        if phase == "forward":  # the model's own input may feed a first block
            given |= {s for s, op in self.producer.items() if op is None}
        wanted = {self.storage[i] for row in after for i in row["input_ids"]}
        if not after and phase == "forward":  # the model ends here: its output is handed on
            wanted = {self.storage[i] for i in self.rows[part.stop - 1]["output_ids"]}
        received = self._kinds_on(part, given - self.block.own, "input_ids")
        made = {s for s in self.block.own & wanted if self.producer[s] in part}
        pairs = self._pair(received, self._kinds_on(part, made, "output_ids"), phase)
        if not pairs and not wanted & set(received):
            raise TraceError(
                f"nothing that block {self.block.name.path!r} makes in {phase} is read after it",
                fix="repeat a block further from the model's input",
            )
        return pairs

    def _kinds_on(self, part: range, among: set[int], column: str) -> dict[int, set[Kind]]:
        """Return the shapes and types under which a part uses some storages."""
        kinds: dict[int, set[Kind]] = {}
        for row in self.rows[part.start : part.stop]:
            for i in row[column]:
                flows = self.category[i] in _FLOWING
                if self.storage[i] in among and flows and self.kinds[i][0]:
                    kinds.setdefault(self.storage[i], set()).add(self.kinds[i])
        return kinds

    def _pair(self, received: dict[int, set[Kind]], handed: dict[int, set[Kind]], phase: str) -> dict[int, int]:
        """Give each storage handed on the one received in its place: the latest made first.

        One of the same shape, or else, in backward, of as many elements: a view at the block's
        border runs nothing there, so the gradient has one shape before it and another after it.
        """
        pairs: dict[int, int] = {}
        order = sorted(received, key=lambda s: -1 if self.producer[s] is None else self.producer[s])
        for storage in sorted(handed, key=lambda s: self.producer[s], reverse=True):
            left = [s for s in order if s not in pairs]
            fits = [s for s in left if received[s] & handed[storage]]
            if not fits and phase == "backward":
                fits = [s for s in left if _sizes(received[s]) & _sizes(handed[storage])]
            if not fits:
                shape = list(sorted(handed[storage])[0][0])
                raise TraceError(
                    f"block {self.block.name.path!r} hands on a tensor of shape {shape} in {phase} "
                    "but takes none like it, so it cannot follow itself",
                    fix="repeat a block whose input and output are alike",
                )
            pairs[fits[-1]] = storage
        return pairs


def _sizes(kinds: set[Kind]) -> set[tuple[int, str]]:
    """Return the elements and types of some kinds of tensor."""
    return {(prod(shape), dtype) for shape, dtype in kinds}
