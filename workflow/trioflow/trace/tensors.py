"""Telling tensors apart: identities, categories, and what grows with the batch.

The profiler reuses tensor and storage ids once memory is freed, so identities
hold only between two writes: every operator that returns memory that none of
its inputs owns starts a new storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import pandas as pd

from trioflow import tables
from trioflow.trace.execution_trace import TensorRef

_STATISTICS = {"aten::batch_norm": (3, 4), "aten::native_batch_norm": (3, 4)}
"""Arguments that hold running statistics: updated without being returned."""


@dataclass
class _Storage:
    """One allocation between two writes by a fresh owner."""

    producer: int | None
    producer_phase: str
    read_in: set[str] = field(default_factory=set)
    updated_in: set[str] = field(default_factory=set)
    statistics: bool = False
    scales: bool = False
    consumers: int = 0
    category: str = ""


@dataclass
class _Tensor:
    storage: int
    shape: tuple[int, ...]
    dtype: str
    elem_bytes: int
    last_op: int


@dataclass
class OperatorTensors:
    """The tensors of one operator.

    Attributes
    ----------
    inputs, outputs : list of int
        Indices of tensors.
    aliases : list of bool
        For each output, whether it is memory of an input.
    in_place : bool
        Whether the operator writes into its first argument.
    """

    name: str
    phase: str
    inputs: list[int]
    outputs: list[int]
    aliases: list[bool]
    in_place: bool


class TensorTracker:
    """Follows the tensors through one step, operator by operator."""

    def __init__(self) -> None:
        self.storages: list[_Storage] = []
        self.tensors: list[_Tensor] = []
        self.uses: list[OperatorTensors] = []
        self._live: dict[int, int] = {}
        self._made: set[tuple[int | None, int]] = set()
        self._known: dict[tuple[int, int, tuple[int, ...]], int] = {}

    def visit(
        self,
        name: str,
        phase: str,
        inputs: list[TensorRef],
        outputs: list[TensorRef],
        made_inside: list[TensorRef],
    ) -> OperatorTensors:
        """Record one operator; operators must come in order of start.

        `made_inside` are the results of the operators that it encloses: autograd
        may save one of them for backward although the operator does not return it.
        """
        op_id = len(self.uses)
        in_place = name.endswith("_") and not name.endswith("__")
        statistics = _STATISTICS.get(name, ())
        owned = {ref.storage for ref in inputs}
        use = OperatorTensors(name, phase, [], [], [], in_place)
        for ref in inputs:
            if ref.shape == () and (self._live.get(ref.storage), ref.tensor) not in self._made:
                # A number of the calling program, wrapped: its memory is in no operator's result.
                self._live.pop(ref.storage, None)
            index = self._tensor(ref, op_id, None, "")
            storage = self.storages[self.tensors[index].storage]
            storage.read_in.add(phase)
            storage.consumers += 1
            storage.statistics |= ref.argument in statistics
            if in_place and ref.argument == 0:
                storage.updated_in.add(phase)
            use.inputs.append(index)
        returned = {ref.storage for ref in outputs}
        for ref in made_inside:
            if ref.storage not in owned and ref.storage not in returned:
                self._live[ref.storage] = len(self.storages)
                self.storages.append(_Storage(op_id, phase))
            self._made.add((self._live.get(ref.storage), ref.tensor))
        for ref in outputs:
            alias = ref.storage in owned
            if not alias and not any(
                self.tensors[i].storage == self._live.get(ref.storage) for i in use.outputs
            ):
                self._live.pop(ref.storage, None)
            use.outputs.append(self._tensor(ref, op_id, op_id, phase))
            self._made.add((self._live[ref.storage], ref.tensor))
            use.aliases.append(alias)
        self.uses.append(use)
        return use

    def _tensor(self, ref: TensorRef, op_id: int, producer: int | None, phase: str) -> int:
        if ref.storage not in self._live:
            self._live[ref.storage] = len(self.storages)
            self.storages.append(_Storage(producer, phase))
        storage = self._live[ref.storage]
        key = (storage, ref.tensor, ref.shape)
        if key not in self._known:
            self._known[key] = len(self.tensors)
            self.tensors.append(_Tensor(storage, ref.shape, ref.dtype, ref.elem_bytes, op_id))
        index = self._known[key]
        self.tensors[index].last_op = op_id
        return index

    def category(self, index: int) -> str:
        """Return the category of a tensor; valid after `classify`."""
        return self.storages[self.tensors[index].storage].category

    def scales(self, index: int) -> bool:
        """Tell whether a tensor grows with the batch; valid after `classify`."""
        return self.storages[self.tensors[index].storage].scales

    def size_bytes(self, index: int) -> int:
        """Return the size of a tensor [bytes]."""
        tensor = self.tensors[index]
        return prod(tensor.shape) * tensor.elem_bytes

    def classify(self, batch: int) -> None:
        """Give every storage its category, then follow the batch through the step."""
        last_forward = max(
            (i for i, use in enumerate(self.uses) if use.phase == "forward"), default=-1
        )
        for storage in self.storages:
            storage.category = _categorise(storage, last_forward)
        for tensor in self.tensors:
            storage = self.storages[tensor.storage]
            if storage.category == "input" and tensor.shape and tensor.shape[0] == batch:
                storage.scales = True
        made: dict[int | None, list[int]] = {}
        for index, tensor in enumerate(self.tensors):
            made.setdefault(self.storages[tensor.storage].producer, []).append(index)
        for op_id, use in enumerate(self.uses):
            shapes = [self.tensors[i].shape for i in use.inputs if self.scales(i)]
            for index in made.get(op_id, []):  # also what it kept for backward without returning it
                storage = self.storages[self.tensors[index].storage]
                if storage.category in ("activation", "output"):
                    storage.scales |= _grows(self.tensors[index].shape, shapes, batch)

    def table(self, owners: dict[int, str]) -> pd.DataFrame:
        """Return the tensor table; `owners` maps tensors to the module that they belong to."""
        rows = [
            {
                "tensor_id": index,
                "storage_id": tensor.storage,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "elem_bytes": tensor.elem_bytes,
                "category": self.category(index),
                "module": owners.get(index, ""),
                "producer_op_id": self.storages[tensor.storage].producer,
                "last_op_id": tensor.last_op,
            }
            for index, tensor in enumerate(self.tensors)
        ]
        frame = pd.DataFrame(rows, columns=tables.TENSORS.names)
        for column in ("producer_op_id", "last_op_id"):
            frame[column] = frame[column].astype("Int64")
        return frame


def _categorise(storage: _Storage, last_forward: int) -> str:
    """Return the category that the uses of a storage give it."""
    if storage.producer is None:
        return _categorise_outside(storage)
    if storage.producer_phase == "backward" and "optimizer" in storage.read_in:
        return "gradient"
    if storage.producer_phase == "optimizer":
        return "optimizer_state"
    return "output" if storage.producer == last_forward else "activation"


def _categorise_outside(storage: _Storage) -> str:
    """Return the category of memory that existed before the step."""
    if "optimizer" in storage.updated_in:
        return "parameter" if "forward" in storage.read_in else "optimizer_state"
    if storage.read_in <= {"optimizer"}:
        return "optimizer_state"
    if storage.statistics or "forward" in storage.updated_in:
        return "buffer"
    return "input"


def _grows(shape: tuple[int, ...], inputs: list[tuple[int, ...]], batch: int) -> bool:
    """Tell whether a fresh result grows with the batch, given the inputs that do.

    A vector grows when it has an entry a sample (or a token); anything larger
    when a dimension is a multiple of the batch, unless its shape is an input's
    without the batch dimension (a sum over the batch).
    """
    if not inputs or not shape:
        return False
    sums = [other[1:] for other in inputs if other[:1] == (batch,)]
    if batch > 1:  # at batch 1 a kept dimension of a sum looks like the batch itself
        sums += [(1, *rest) for rest in sums]
    if shape in sums:
        return False
    if len(shape) == 1:
        return any(
            shape[0] == prod(other[:k]) and shape[0] % batch == 0
            for other in inputs
            for k in range(1, len(other) + 1)
        )
    return any(size % batch == 0 for size in shape)
