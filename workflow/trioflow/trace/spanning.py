"""Optimizer operators over the parameters of the whole model at once, foreach and fused: lists in one order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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

    def tensors_of(self, chosen: Callable[[str], bool]) -> set[int]:
        """Return the tensors of some parameters."""
        return {index for index, name in self.owners().items() if chosen(name)}


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
    found: dict[int, Lists] = {}
    owner: dict[int, str] = {}
    for place, row in enumerate(spanning):
        nearest = [g for g in groups[place:] if g] or [g for g in reversed(groups[:place]) if g]
        if not nearest or len(row["input_ids"]) < len(nearest[0]):
            continue
        lists = Lists(nearest[0], tuple(row["input_ids"]), tuple(row["output_ids"]))
        named = lists.owners()
        if any(known.get(storage[i], name) != name for i, name in named.items()):
            continue
        found[int(row["op_id"])] = lists
        owner |= named
    return found, owner


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
