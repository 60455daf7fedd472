"""The operator and tensor tables of a model in which one block occurs several times."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from trioflow.tables import records
from trioflow.trace.block import Block, Row
from trioflow.trace.spanning import Lists, is_spanning
from trioflow.trace.store import Trace, tensor_bytes

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
            found = (self.block.rows[op]["sequence_number"] for op in ops)
            return [int(number) for number in found if number is not None]

        forward = self.block.forward
        mine = numbers(forward)
        if not mine:
            return 0, 0
        later = [n for n in numbers(range(forward.stop, len(self.block.rows))) if n > max(mine)]
        behind = [op for op in range(forward.stop, len(self.block.rows))
                  if self.block.rows[op]["phase"] == "forward"]  # fmt: skip
        follows = [n for n in numbers(behind) if n > min(mine)]
        last = max([*mine, *(n for n in later if not follows)])
        return min(mine), (min(follows) if follows else last + 1) - min(mine)

    def _parameter_ratio(self) -> float:
        """Return the parameters' bytes after over before."""
        sizes = [(g["name"], int(g["size_bytes"])) for g in self.trace.facts.gradients]
        mine = sum(size for name, size in sizes if self.block.name.holds(name))
        total = sum(size for _, size in sizes)
        return 1 + (self.copies - 1) * mine / total if total else 1.0

    def find_op(self, op_id: int, copy: int) -> int:
        """Return the new number of an operator, of a copy where it is the block's."""
        return self.new_op.get((op_id, copy), self.new_op.get((op_id, None), -1))

    def find_storage(self, storage: int, copy: int) -> int:
        """Return the new number of a storage, of a copy where each has its own; -1 for none."""
        return self.new_storage.get((storage, copy), self.new_storage.get((storage, None), -1))

    def operators(self) -> pd.DataFrame:
        """Return the operator table, laid end to end in time."""
        rows, now_ns = [], 0
        for op_id, (old, copy) in enumerate(self.places):
            row = {**self.block.rows[old], "op_id": op_id}
            self._renumber(row, old, copy)
            if is_spanning(row["name"]):
                self._extend(row, self.block.lists.get(old))
            else:
                for column in ("input_ids", "output_ids"):
                    row[column] = [
                        self._tensor(i, self._key(i, copy), op_id, copy) for i in row[column]
                    ]
            row["start_ns"] = now_ns + int(row["cpu_ns"])
            now_ns = row["start_ns"] + int(row["device_ns"])
            rows.append(row)
        return _like(self.trace.operators, rows)

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
                found = [self.old[other][column] for column in ("shape", "dtype")] == like
                if found and other not in self.only_inside:
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
            row[f"{side}_ids"] = [
                self._tensor(ids[i], self._listed_key(ids[i], copy), op_id) for i, copy in entries
            ]
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
                    "module": self.block.name.renumber(
                        module, of if variant is None else variant, self.copies
                    ),
                    "producer_op_id": None
                    if producer is None
                    else self.find_op(producer, key[1] or 0),
                    "last_op_id": last if last >= 0 else None,
                }
            )
        return _like(self.trace.tensors, rows)


def _like(frame: pd.DataFrame, rows: list[Row]) -> pd.DataFrame:
    """Return rows as a table with another's columns and their types."""
    return pd.DataFrame(
        {
            column: pd.Series([row[column] for row in rows], dtype=frame[column].dtype)
            for column in frame.columns
        }
    )
