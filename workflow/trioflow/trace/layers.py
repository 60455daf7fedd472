"""Finding the repeated blocks of a model: consecutively numbered pieces of equal operators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trioflow.errors import TraceError
from trioflow.tables import records
from trioflow.trace.block import BlockName, Row
from trioflow.trace.store import Trace, pipeline_units


@dataclass(frozen=True)
class Stack:
    """Blocks that follow one another.

    Attributes
    ----------
    names : tuple of BlockName
        The blocks in order.
    repeated : str
        Path of the one whose copies stand for further layers.
    """

    names: tuple[BlockName, ...]
    repeated: str

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.names)

    @property
    def text(self) -> str:
        """First and last block, for messages."""
        return " to ".join(dict.fromkeys((self.names[0].path, self.names[-1].path)))


def find_layers(trace: Trace) -> list[Stack]:
    """Return the stacks of blocks that a model's number of layers counts.

    Parameters
    ----------
    trace : Trace
        One step of the model.

    Returns
    -------
    list of Stack
        The only stack; of several, those whose depth is the workload row's
        number of layers.

    Raises
    ------
    TraceError
        When there is none, several and nothing tells which, or the blocks of a
        stack differ so that none stands for the others.
    """
    stacks = _find_stacks(trace)
    if not stacks:
        raise TraceError(
            "the model has no repeated block: none of its units or modules are numbered in a row",
            fix="name one for trioflow.trace.repeat.repeat_block",
        )
    if len(stacks) > 1:
        layers = str(trace.facts.get("row", {}).get("layers", ""))
        counted = [names for names in stacks if str(len(names)) == layers]
        if not counted:
            found = ", ".join(f"{len(n)} of {n[0].prefix}" for n in stacks)
            raise TraceError(
                f"the model has several stacks of blocks ({found}) and nothing tells which to repeat",
                fix="name one block for trioflow.trace.repeat.repeat_block",
            )
        stacks = counted
    rows = records(trace.operators)
    return [Stack(tuple(names), _choose(rows, names).path) for names in stacks]


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
