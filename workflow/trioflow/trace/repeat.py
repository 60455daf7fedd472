"""Repeating one block of a trace by depth, for models too large to capture whole.

A captured block's rows stand for those of every further one: each distinct event is measured once,
as in G. Lu et al., "DistSim", CF 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from trioflow.base.errors import TraceError
from trioflow.base.units import ns_to_s
from trioflow.tables import records
from trioflow.trace.block import BlockName, Row, find_block
from trioflow.trace.facts import UNTIMED, Entry, Facts
from trioflow.trace.repeat_tables import Repetition
from trioflow.trace.store import Trace, pipeline_units


def repeat_layers(trace: Trace, layers: int) -> Trace:
    """Return a trace of the same model with more layers.

    The block comes from the pipeline units, else the modules: consecutively numbered pieces of
    equal operators; the last is repeated, or the last but one where it differs, in each stack
    (encoder, decoder) as deep as the row's layers. Raises TraceError when there is no such block or
    blocks differ, nothing says which stack counts, or fewer layers are asked for than captured.
    """
    for stack in find_layers(trace):
        if layers < stack.count:
            raise TraceError(
                f"{layers} layers: the trace holds {stack.count} already ({stack.text})",
                fix=f"ask for at least {stack.count}, or capture fewer",
            )
        trace = repeat_block(trace, stack.repeated, layers - stack.count + 1)
    row = trace.facts.row or {}
    if "layers" in row:  # two stacks counted it twice
        facts = replace(trace.facts, row={**row, "layers": str(layers)})
        trace = Trace(trace.operators, trace.tensors, facts)
    return trace


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
    found = find_block(trace, block)
    repetition = Repetition(trace, found, copies)
    operators, tensors = repetition.operators(), repetition.tensors()
    facts = _repeat_facts(trace.facts, found.name, copies, repetition)
    facts = replace(
        facts,
        operators=len(operators),
        backward_operators_joined=int(operators["forward_op_id"].notna().sum()),
        flop=sum(operators["flop"].tolist()),
    )
    added_ns = {
        column: int(operators[column].sum() - trace.operators[column].sum())
        for column in ("device_ns", "cpu_ns")
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


class Places(Protocol):
    """Where the operators and storages of the captured trace went."""

    def find_op(self, op_id: int, copy: int) -> int:
        """Return the new number of an operator."""

    def find_storage(self, storage: int, copy: int) -> int:
        """Return the new number of a storage, or -1."""


def _repeat_facts(facts: Facts, name: BlockName, copies: int, places: Places) -> Facts:
    """Return the facts with the block's part of each repeated; ``places``: where operators and storages went."""
    row = dict(facts.row or {})
    if str(row.get("layers", "")).isdecimal():
        row["layers"] = str(int(row["layers"]) + copies - 1)
    # What was measured of the shallow model holds for no other.
    other = {key: value for key, value in facts.other.items() if not key.startswith("peak_")}
    return replace(
        facts,
        parameters=None
        if facts.parameters is None
        else _repeat_named(facts.parameters, name, copies),
        buffers=None if facts.buffers is None else _repeat_named(facts.buffers, name, copies),
        units=None if facts.units is None else _repeat_units(facts.units, name, copies),
        tensor_split=None
        if facts.tensor_split is None
        else _repeat_patterns(facts.tensor_split, name, copies),
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
        modules = _repeat_runs(
            unit["modules"], name.holds, lambda m, c: name.renumber(m, c, copies), copies
        )
        if whole(unit):
            modules = [name.renumber(module, copy, copies) for module in unit["modules"]]
        title = name.renumber(unit["name"], copy, copies)
        if title == unit["name"] and copy:
            title = f"{title}, copy {copy}"
        return {**unit, "name": title, "modules": modules}

    def whole(unit: Entry) -> bool:
        return bool(unit["modules"]) and all(name.holds(m) for m in unit["modules"])

    return _repeat_runs(units, whole, rename, copies)


def _repeat_patterns(rules: Mapping[str, str], name: BlockName, copies: int) -> dict[str, str]:
    """Repeat rules that name the block's own modules; a pattern such as ``blocks.*`` fits all."""
    items = _repeat_runs(
        rules.items(),
        lambda item: name.holds(item[0]),
        lambda item, copy: (name.renumber(item[0], copy, copies), item[1]),
        copies,
    )
    return dict(items)


def _repeat_gradients(facts: Facts, name: BlockName, copies: int, places: Places) -> list[Entry]:
    """Repeat the block's gradients: deepest copy first, as backward makes them ready."""
    gradients = facts.gradients
    known = facts.parameters or []
    mine = [i for i, p in enumerate(known) if name.holds(p["name"])] or [
        g["index"] for g in gradients if name.holds(g["name"]) and g.get("index", -1) >= 0
    ]

    def place(index: int, inside: bool, copy: int) -> int:
        if index < 0 or not mine or index < min(mine):
            return index
        return index + len(mine) * (copy if inside else copies - 1)

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


@dataclass(frozen=True)
class _Stack:
    """Blocks that follow one another."""

    names: tuple[BlockName, ...]  # the blocks in order
    repeated: str  # path of the one whose copies stand for further layers

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.names)

    @property
    def text(self) -> str:
        """First and last block, for messages."""
        return " to ".join(dict.fromkeys((self.names[0].path, self.names[-1].path)))


def find_layers(trace: Trace) -> list[_Stack]:
    """Return the stacks of blocks that a model's number of layers counts: the only one, or those of the row's depth.

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
            found = ", ".join(f"{len(n)} of {n[0].prefix}" for n in stacks)
            raise TraceError(
                f"the model has several stacks of blocks ({found}) and nothing says which to repeat",
                fix="name one block for trioflow.trace.repeat.repeat_block",
            )
        stacks = counted
    rows = records(trace.operators)
    return [_Stack(tuple(names), _choose(rows, names).path) for names in stacks]


def _find_stacks(trace: Trace) -> list[list[BlockName]]:
    """Return the runs of consecutive numbers, one a prefix, in order of appearance."""
    units = pipeline_units(trace)
    if units:
        paths: Iterable[str] = [modules[0] for modules in units.values() if len(modules) == 1]
    else:
        paths = [_outermost_number(module) for module in dict.fromkeys(trace.operators["module"])]
    found: dict[str, list[BlockName]] = {}
    for path in dict.fromkeys(paths):
        if path.rpartition(".")[2].isdecimal():
            name = BlockName.parse(path)
            found.setdefault(name.prefix, []).append(name)
    return [
        names
        for names in found.values()
        if [n.number for n in names] == list(range(names[0].number, names[0].number + len(names)))
        and (len(names) > 1 or names[0].number == 0)
    ]


def _outermost_number(module: str) -> str:
    """Return a module's path up to its first number; nothing where it has none."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[: place + 1])
    return ""


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
        f"blocks {names[0].path} and {names[place].path} run different operators, "
        "so none stands for the others",
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
