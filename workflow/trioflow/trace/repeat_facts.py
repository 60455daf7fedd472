"""The facts of a model in which one block occurs several times: parameters, gradients, units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from trioflow.trace.block import BlockName

Entry = dict[str, Any]
T = TypeVar("T")


class Places(Protocol):
    """Where the operators and storages of the captured trace went."""

    def find_op(self, op_id: int, copy: int) -> int:
        """Return the new number of an operator."""

    def find_storage(self, storage: int, copy: int) -> int:
        """Return the new number of a storage, or -1."""


def repeat_facts(
    facts: Mapping[str, Any], name: BlockName, copies: int, places: Places
) -> dict[str, Any]:
    """Return the facts with the block's part of each repeated.

    Parameters
    ----------
    facts : mapping
        Facts of the captured trace.
    name : BlockName
        The block.
    copies : int
        Its occurrences.
    places : Places
        Where operators and storages went.
    """
    changed = dict(facts)
    for key in ("parameters", "buffers"):
        if key in facts:
            changed[key] = _repeat_named(facts[key], name, copies)
    if "units" in facts:
        changed["units"] = _repeat_units(facts["units"], name, copies)
    if "tensor_split" in facts:
        changed["tensor_split"] = _repeat_patterns(facts["tensor_split"], name, copies)
    changed["gradients"] = _repeat_gradients(facts, name, copies, places)
    row = dict(facts.get("row", {}))
    if str(row.get("layers", "")).isdecimal():
        row["layers"] = str(int(row["layers"]) + copies - 1)
        changed["row"] = row
    # What was measured of the shallow model holds for no other.
    changed = {key: value for key, value in changed.items() if not key.startswith("peak_")}
    changed["repeated"] = [
        *facts.get("repeated", []),
        {"block": name.path, "copies": copies},
    ]
    return changed


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


def _repeat_gradients(
    facts: Mapping[str, Any], name: BlockName, copies: int, places: Places
) -> list[Entry]:
    """Repeat the block's gradients: deepest copy first, as backward makes them ready."""
    gradients = list(facts.get("gradients", []))
    known = facts.get("parameters") or []
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
