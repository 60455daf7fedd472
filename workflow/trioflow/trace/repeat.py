"""A trace with one block of it repeated by depth, for models too large to capture whole; `repeat_block` is the door.

A captured block's rows stand for those of every further one: each distinct event is measured once,
as in G. Lu et al., "DistSim", CF 2023.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from trioflow.base.errors import TraceError
from trioflow.base.units import ns_to_s
from trioflow.tables import records
from trioflow.trace.block import Block, BlockName, Lists, Row, find_block, is_spanning
from trioflow.trace.facts import UNTIMED, Entry, Facts
from trioflow.trace.store import Trace, lay_end_to_end, pipeline_units, tensor_bytes

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[int, int | None]
"""An operator or a storage of the captured trace and the copy it is of; None for one of no copy."""


class Repetition:
    """Writes the tables of the deeper model.

    ``trace``: the captured step; ``block``: its block; ``copies``: occurrences of the block.
    """

    def __init__(self, trace: Trace, block: Block, copies: int) -> None:
        self.trace, self.block, self.copies = trace, block, copies
        self.old = records(trace.tensors)
        self.storage = [int(row["storage_id"]) for row in self.old]
        self.size = tensor_bytes(trace)
        self.views: dict[int, list[int]] = {}
        for index, storage in enumerate(self.storage):
            self.views.setdefault(storage, []).append(index)
        self.only_inside = self._only_inside()
        handed = dict.fromkeys(block.forward_chain.values(), copies - 1)
        self.handed = handed | dict.fromkeys(block.backward_chain.values(), 0)
        self.places = self._order()
        self.new_op = {place: op_id for op_id, place in enumerate(self.places)}
        self.new_tensor: dict[tuple[Key, int, int | None], int] = {}
        self.new_storage: dict[Key, int] = {}
        self.last_use: list[int] = []
        self.from_sequence, self.sequence_step = self._sequence()
        self.parameter_ratio = self._parameter_ratio()

    def _only_inside(self) -> set[int]:
        """Return the tensors that the block alone uses, be it on memory of all copies."""
        used: dict[bool, set[int]] = {True: set(), False: set()}
        members = self.block.members
        for row in self.block.rows:
            used[row["op_id"] in members].update(row["input_ids"], row["output_ids"])
        return used[True] - used[False]

    def _order(self) -> list[Key]:
        """Return the operators of the new step in order."""
        block, places = self.block, list[Key]()
        parts = {part.start: part for part in (block.forward, *block.optimizer)}
        if block.backward:
            parts[block.backward.start] = block.backward
        op_id = 0
        while op_id < len(block.rows):
            part = parts.get(op_id)
            if part is None:
                places.append((op_id, None))
                op_id += 1
                continue
            order = range(self.copies)
            for copy in reversed(order) if part == block.backward else order:
                places += [(member, copy) for member in part]
            op_id = part.stop
        return places

    def _sequence(self) -> tuple[int, int]:
        """Return the block's first sequence number and how many numbers a copy takes."""

        def numbers(ops: Sequence[int]) -> list[int]:
            listed = (self.block.rows[op]["sequence_number"] for op in ops)
            return [int(number) for number in listed if number is not None]

        forward = self.block.forward
        own = numbers(forward)
        if not own:
            return 0, 0
        later = [n for n in numbers(range(forward.stop, len(self.block.rows))) if n > max(own)]
        behind = [op for op in range(forward.stop, len(self.block.rows)) if self.block.rows[op]["phase"] == "forward"]
        follows = [n for n in numbers(behind) if n > min(own)]
        last = max([*own, *(n for n in later if not follows)])
        return min(own), (min(follows) if follows else last + 1) - min(own)

    def _parameter_ratio(self) -> float:
        """Return the parameters' bytes after over before."""
        sizes = [(g["name"], int(g["size_bytes"])) for g in self.trace.facts.gradients]
        block_bytes = sum(size for name, size in sizes if self.block.name.holds(name))
        total = sum(size for _, size in sizes)
        return 1 + (self.copies - 1) * block_bytes / total if total else 1.0

    def find_op(self, op_id: int, copy: int) -> int:
        """Return the new number of an operator, of a copy where it is the block's."""
        return self.new_op.get((op_id, copy), self.new_op.get((op_id, None), -1))

    def find_storage(self, storage: int, copy: int) -> int:
        """Return the new number of a storage, of a copy where each has its own; -1 for none."""
        return self.new_storage.get((storage, copy), self.new_storage.get((storage, None), -1))

    def operators(self) -> pd.DataFrame:
        """Return the operator table, laid end to end in time."""
        rows = []
        for op_id, (old, copy) in enumerate(self.places):
            row = {**self.block.rows[old], "op_id": op_id}
            self._renumber(row, old, copy)
            if is_spanning(row["name"]):
                self._extend(row, self.block.lists.get(old))
            else:
                for column in ("input_ids", "output_ids"):
                    row[column] = [self._tensor(i, self._key(i, copy), op_id, copy) for i in row[column]]
            rows.append(row)
        frame = _like(self.trace.operators, rows)
        lay_end_to_end(frame)
        return frame

    def _is_before(self, old: int, row: Row) -> bool:
        """Return whether an operator, or the one that it differentiates, ran before the block."""
        forward = old if row["phase"] == "forward" else row["forward_op_id"]
        return forward is not None and forward < self.block.forward.start

    def _renumber(self, row: Row, old: int, copy: int | None) -> None:
        """Write the new module, sequence number and forward operator into a row."""
        row["module"] = self.block.name.renumber(row["module"], copy or 0, self.copies)
        number, forward = row["sequence_number"], row["forward_op_id"]
        if number is not None and copy is not None:
            row["sequence_number"] = number + copy * self.sequence_step
        elif number is not None and number >= self.from_sequence and not self._is_before(old, row):
            row["sequence_number"] = number + (self.copies - 1) * self.sequence_step
        if forward is not None:
            row["forward_op_id"] = self.find_op(forward, copy or 0)

    def _key(self, index: int, copy: int | None) -> Key:
        """Return the storage that a copy's operator (or one of no copy) uses for an old tensor."""
        storage, block = self.storage[index], self.block
        if copy is None:
            return storage, self.handed.get(storage, 0) if storage in block.own else None
        if copy > 0 and storage in block.forward_chain:
            return block.forward_chain[storage], copy - 1
        if copy < self.copies - 1 and storage in block.backward_chain:
            return block.backward_chain[storage], copy + 1
        return storage, copy if storage in block.own else None

    def _tensor(self, index: int, key: Key, op_id: int, copy: int | None = None) -> int:
        """Return the new number of a tensor on a storage; `op_id`, of a copy, uses it."""
        variant = None
        if index in self.only_inside:
            variant = copy
        elif self.storage[index] != key[0]:  # handed on: the same tensor of another storage
            like = [self.old[index][column] for column in ("shape", "dtype")]
            for other in self.views[key[0]]:
                same_kind = [self.old[other][column] for column in ("shape", "dtype")] == like
                if same_kind and other not in self.only_inside:
                    index = other
                    break
        self.new_storage.setdefault(key, len(self.new_storage))
        number = self.new_tensor.setdefault((key, index, variant), len(self.new_tensor))
        if number == len(self.last_use):
            self.last_use.append(op_id)
        self.last_use[number] = max(op_id, self.last_use[number])
        return number

    def _extend(self, row: Row, lists: Lists | None) -> None:
        """Give an operator over the whole model's parameters those of the copies."""
        op_id = int(row["op_id"])
        before = {side: list(row[f"{side}_ids"]) for side in ("input", "output")}
        old_bytes = int(row["read_bytes"]) + int(row["write_bytes"])
        first = ratio = self.parameter_ratio
        moved: dict[str, tuple[int, int]] = {}
        for side, ids in before.items():
            # Lists that cannot be distinguished stay as they are, and grow as the parameters do.
            entries = self._entries(ids, lists) if lists else [(i, None) for i in range(len(ids))]
            row[f"{side}_ids"] = [self._tensor(ids[i], self._listed_key(ids[i], copy), op_id) for i, copy in entries]
            shapes = row[f"{side}_shapes"]
            if len(shapes) == len(ids):
                row[f"{side}_shapes"] = [shapes[i] for i, _ in entries]
            moved[side] = sum(self.size[i] for i in ids), sum(self.size[ids[i]] for i, _ in entries)
            if lists and side == "input":
                ratio = len(entries) / len(ids)
                whole = len(lists.names)
                start = sum(self.size[i] for i in ids[:whole])
                grown = sum(self.size[ids[i]] for i, _ in entries if i < whole)
                first = grown / start if start else ratio
        for column, side in (("read_bytes", "input"), ("write_bytes", "output")):
            old, new = moved[side]
            exact = lists is not None and row[column] == old
            row[column] = new if exact else round(row[column] * first)
        new_bytes = int(row["read_bytes"]) + int(row["write_bytes"])
        row["device_ns"] = round(row["device_ns"] * (new_bytes / old_bytes if old_bytes else ratio))
        row["cpu_ns"], row["kernels"] = round(row["cpu_ns"] * ratio), round(row["kernels"] * ratio)

    def _listed_key(self, index: int, copy: int | None) -> Key:
        """Return the storage of a list's entry; `copy` is None for another parameter's."""
        if copy is None or self.storage[index] not in self.block.own:
            return self._key(index, None)
        return self.storage[index], copy

    def _entries(self, ids: Sequence[int], lists: Lists) -> list[Key]:
        """Return the old place and the copy of every entry of the longer lists, in order."""
        entries: list[Key] = []
        run: list[int] = []
        for place in range(len(ids) + 1):
            owner = lists.owner(ids, place) if place < len(ids) else None
            inside = owner is not None and self.block.name.holds(owner)
            if run and not (inside and place % len(lists.names)):
                entries += [(member, copy) for copy in range(self.copies) for member in run]
                run = []
            if inside:
                run.append(place)
            elif place < len(ids):
                entries.append((place, None))
        return entries

    def tensors(self) -> pd.DataFrame:
        """Return the tensor table; call `operators` first."""
        named = {index for _, index, _ in self.new_tensor}
        for index in range(len(self.old)):
            if index not in named:  # a tensor that no operator names
                self._tensor(index, self._key(index, None), -1)
        rows = []
        for tensor_id, (key, index, variant) in enumerate(self.new_tensor):
            row, on = self.old[index], self.old[self.views[key[0]][0]]
            last, producer = self.last_use[tensor_id], on["producer_op_id"]
            if last < 0 and row["last_op_id"] is not None:
                last = self.find_op(row["last_op_id"], 0)
            handed_on = key[1] is not None and key[1] < self.copies - 1
            category = "activation" if handed_on and on["category"] == "output" else on["category"]
            same = key[0] == self.storage[index] or variant is not None
            module, of = row["module"] if same else on["module"], key[1] or 0
            rows.append(
                {
                    **row,
                    "tensor_id": tensor_id,
                    "storage_id": self.new_storage[key],
                    "category": category,
                    "module": self.block.name.renumber(module, of if variant is None else variant, self.copies),
                    "producer_op_id": None if producer is None else self.find_op(producer, key[1] or 0),
                    "last_op_id": last if last >= 0 else None,
                }
            )
        return _like(self.trace.tensors, rows)


def _like(frame: pd.DataFrame, rows: list[Row]) -> pd.DataFrame:
    """Return rows as a table with another's columns and their types."""
    import pandas as pd

    return pd.DataFrame(
        {column: pd.Series([row[column] for row in rows], dtype=frame[column].dtype) for column in frame.columns}
    )


def repeat_layers(trace: Trace, layers: int) -> Trace:
    """Return a trace of the same model with more layers.

    The block comes from the pipeline units, else the modules: consecutively numbered pieces of
    equal operators; the last is repeated, or the last but one where it differs, in each stack
    (encoder, decoder) as deep as the row's layers. Raises TraceError when there is no such block or
    blocks differ, nothing says which stack counts, or fewer layers are asked for than captured.
    """
    for names, repeated in find_block_stacks(trace):
        if layers < len(names):
            ends = " to ".join(dict.fromkeys((names[0].path, names[-1].path)))
            raise TraceError(
                f"{layers} layers: the trace holds {len(names)} already ({ends})",
                fix=f"ask for at least {len(names)}, or capture fewer",
            )
        trace = repeat_block(trace, repeated, layers - len(names) + 1)
    row = dict(trace.facts.row or {})
    row |= {"layers": str(layers)} if "layers" in row else {}  # two stacks counted it twice
    return trace.replace(replace(trace.facts, row=row or None))


def repeat_block(trace: Trace, block: str, copies: int) -> Trace:
    """Return a trace in which one block (a path such as ``blocks.1``) occurs ``copies`` times in sequence.

    Forward operators of each copy follow those of the block, backward ones come in reverse depth;
    each has its own parameters, gradients, states and activations, and works on the output of the
    one before. ``facts.repeated`` lists ``block`` and ``copies`` of each call. Raises TraceError
    when there is no such block, it cannot follow itself or `copies` is not positive.

    An optimizer operator over all parameters (foreach, fused) still occurs once: its device time
    grows with its bytes, host time and kernels with its tensors. The step grows by the operators'
    added time, beside a device (CUDA) by the larger of device's and host's. Operators outside stay,
    although a few (before the first update) grow a little with depth.
    """
    if copies < 1:
        raise TraceError(f"{copies} copies of block {block!r}", fix="ask for one or more")
    if copies == 1:
        return trace
    template = find_block(trace, block)
    repetition = Repetition(trace, template, copies)
    operators, tensors = repetition.operators(), repetition.tensors()
    facts = _repeat_facts(trace.facts, template.name, copies, repetition)
    facts = replace(
        facts,
        operators=len(operators),
        flop=sum(operators["flop"].tolist()),
        other={**facts.other, "backward_operators_joined": int(operators["forward_op_id"].notna().sum())},
    )
    added_ns = {
        column: int(operators[column].sum() - trace.operators[column].sum()) for column in ("device_ns", "cpu_ns")
    }
    return Trace(operators, tensors, _grow_step(facts, added_ns))


def _grow_step(facts: Facts, added_ns: dict[str, int]) -> Facts:
    """Return the facts with the step's time after some operators were added."""
    before_s = float(facts.step_time_s)
    if facts.step_time_source == UNTIMED:
        return facts
    beside = facts.device == "cuda"
    added_s = ns_to_s(max(added_ns.values()) if beside else sum(added_ns.values()))
    after_s = before_s + added_s
    # The repeats keep their relative spread, which is what is read of them.
    times = [float(t) * after_s / before_s for t in facts.step_times_s or []]
    return replace(facts, step_time_s=after_s, step_times_s=times, step_time_source="repeated")


T = TypeVar("T")


def _repeat_facts(facts: Facts, name: BlockName, copies: int, places: Repetition) -> Facts:
    """Return the facts with the block's part of each repeated; ``places``: where operators and storages went."""
    row = dict(facts.row or {})
    if str(row.get("layers", "")).isdecimal():
        row["layers"] = str(int(row["layers"]) + copies - 1)
    # What was measured of the shallow model holds for no other.
    other = {key: value for key, value in facts.other.items() if not key.startswith("peak_")}
    return replace(
        facts,
        parameters=None if facts.parameters is None else _repeat_named(facts.parameters, name, copies),
        buffers=None if facts.buffers is None else _repeat_named(facts.buffers, name, copies),
        units=None if facts.units is None else _repeat_units(facts.units, name, copies),
        # Rules that name the block's own modules are repeated; a pattern such as ``blocks.*`` fits all.
        tensor_split=None
        if facts.tensor_split is None
        else dict(
            _repeat_runs(
                facts.tensor_split.items(),
                lambda item: name.holds(item[0]),
                lambda item, copy: (name.renumber(item[0], copy, copies), item[1]),
                copies,
            )
        ),
        gradients=_repeat_gradients(facts, name, copies, places),
        row=None if facts.row is None else row,
        repeated=[*(facts.repeated or []), {"block": name.path, "copies": copies}],
        other=other,
    )


def _repeat_runs(
    entries: Iterable[T], inside: Callable[[T], bool], make: Callable[[T, int], T], copies: int
) -> list[T]:
    """Repeat each run of entries inside the block in place; `make` renames one for a copy."""
    result: list[T] = []
    run: list[T] = []
    for entry in entries:
        if inside(entry):
            run.append(entry)
            continue
        result += [make(one, copy) for copy in range(copies if run else 0) for one in run]
        run = []
        result.append(make(entry, 0))
    return result + [make(one, copy) for copy in range(copies) for one in run]


def _repeat_named(entries: Iterable[Entry], name: BlockName, copies: int) -> list[Entry]:
    """Repeat the block's parameters or buffers, in the model's order."""
    return _repeat_runs(
        entries,
        lambda entry: name.holds(entry["name"]),
        lambda entry, copy: {**entry, "name": name.renumber(entry["name"], copy, copies)},
        copies,
    )


def _repeat_units(units: Iterable[Entry], name: BlockName, copies: int) -> list[Entry]:
    """Repeat the unit that is the block, or the block among a unit's modules."""

    def rename(unit: Entry, copy: int) -> Entry:
        modules = _repeat_runs(unit["modules"], name.holds, lambda m, c: name.renumber(m, c, copies), copies)
        if whole(unit):
            modules = [name.renumber(module, copy, copies) for module in unit["modules"]]
        title = name.renumber(unit["name"], copy, copies)
        if title == unit["name"] and copy:
            title = f"{title}, copy {copy}"
        return {**unit, "name": title, "modules": modules}

    def whole(unit: Entry) -> bool:
        return bool(unit["modules"]) and all(name.holds(m) for m in unit["modules"])

    return _repeat_runs(units, whole, rename, copies)


def _repeat_gradients(facts: Facts, name: BlockName, copies: int, places: Repetition) -> list[Entry]:
    """Repeat the block's gradients: deepest copy first, as backward makes them ready."""
    gradients = facts.gradients
    known = facts.parameters or []
    of_block = [i for i, p in enumerate(known) if name.holds(p["name"])] or [
        g["index"] for g in gradients if name.holds(g["name"]) and g.get("index", -1) >= 0
    ]

    def place(index: int, inside: bool, copy: int) -> int:
        if index < 0 or not of_block or index < min(of_block):
            return index
        return index + len(of_block) * (copy if inside else copies - 1)

    result: list[Entry] = []
    for entry in gradients:
        inside = name.holds(entry["name"])
        for copy in reversed(range(copies if inside else 1)):
            changed = dict(entry)
            for key in ("name", "module"):
                changed[key] = name.renumber(entry[key], copy, copies)
            changed["ready_after_op_id"] = places.find_op(entry["ready_after_op_id"], copy)
            if "index" in entry:
                changed["index"] = place(entry["index"], inside, copy)
            for key in ("parameter_storage_id", "gradient_storage_id"):
                if key in entry:
                    changed[key] = places.find_storage(entry[key], copy)
            result.append(changed)
    return sorted(result, key=lambda entry: int(entry["ready_after_op_id"]))


def find_block_stacks(trace: Trace) -> list[tuple[list[BlockName], str]]:
    """Return the stacks of blocks that a model's number of layers counts: the only one, or those of the row's depth.

    Of each its blocks in order, and the path of the one whose copies stand for further layers.
    Raises TraceError when there is none, nothing says which, or a stack's blocks differ so that
    none stands for the others.
    """
    stacks = _find_stacks(trace)
    if not stacks:
        raise TraceError(
            "the model has no repeated block: none of its units or modules are numbered in a row",
            fix="name one for trioflow.trace.repeat.repeat_block",
        )
    if len(stacks) > 1:
        layers = str((trace.facts.row or {}).get("layers", ""))
        counted = [names for names in stacks if str(len(names)) == layers]
        if not counted:
            listed = ", ".join(f"{len(n)} of {n[0].prefix}" for n in stacks)
            raise TraceError(
                f"the model has several stacks of blocks ({listed}) and nothing says which to repeat",
                fix="name one block for trioflow.trace.repeat.repeat_block",
            )
        stacks = counted
    rows = records(trace.operators)
    return [(names, _choose(rows, names).path) for names in stacks]


def _find_stacks(trace: Trace) -> list[list[BlockName]]:
    """Return the runs of consecutive numbers, one a prefix, in order of appearance."""
    units = pipeline_units(trace)
    if units:
        paths: Iterable[str] = [modules[0] for modules in units.values() if len(modules) == 1]
    else:
        paths = [_outermost_number(module) for module in dict.fromkeys(trace.operators["module"])]
    stacks: dict[str, list[BlockName]] = {}
    for path in dict.fromkeys(paths):
        if path.rpartition(".")[2].isdecimal():
            name = BlockName.parse(path)
            stacks.setdefault(name.prefix, []).append(name)
    return [
        names
        for names in stacks.values()
        if [n.number for n in names] == list(range(names[0].number, names[0].number + len(names)))
        and (len(names) > 1 or names[0].number == 0)
    ]


def _outermost_number(module: str) -> str:
    """Return a module's path up to its first number; nothing where it has none."""
    match = re.match(r"(?:[^.]*\.)*?\d+(?![^.])", module)
    return match[0] if match else ""


def _choose(rows: list[Row], names: list[BlockName]) -> BlockName:
    """Return the block that stands for further ones: the last that another one equals."""
    made = [_signature(rows, name) for name in names]
    if len(set(made[1:])) <= 1 and (len(made) != 2 or made[0] == made[1]):
        return names[-1]
    inner = made[1:-1]
    if len(set(inner)) == 1 and (len(inner) > 1 or inner[0] == made[0]):
        return names[-2]
    place = next(i for i, one in enumerate(made) if one != made[0])
    raise TraceError(
        f"blocks {names[0].path} and {names[place].path} run different operators, so none stands for the others",
        fix="capture at least 4 layers if only the first and the last differ, "
        "or name one block for trioflow.trace.repeat.repeat_block",
    )


def _signature(rows: list[Row], name: BlockName) -> tuple[tuple[object, ...], ...]:
    """Return what a block runs: names, phases, shapes and work of its operators."""
    return tuple(
        (
            row["name"],
            row["phase"],
            row["module"][len(name.path) :],
            str(row["input_shapes"]),
            str(row["output_shapes"]),
            row["flop"],
        )
        for row in rows
        if row["phase"] != "optimizer" and name.holds(row["module"])
    )
