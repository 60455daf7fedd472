"""Tensors and FLOPs of operators: identities, categories, what grows with the batch.

`count_flop` counts from an operator's shapes, multiply and add as two, as PyTorch's ``torch.utils.flop_counter``: only
matrix products, convolutions and attention count.

`TensorTracker` tells tensors apart. The profiler reuses tensor and storage ids once memory is freed, so identities
hold only between two writes: every operator that returns memory that none of
its inputs owns starts a new storage. That may happen inside one operator: what
it returns can lie where a passing result lay that autograd keeps something of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import pandas as pd

from trioflow import tables
from trioflow.trace.profile.profiler_fields import load_fields

Shape = Sequence[int]
_Formula = Callable[[Sequence[Shape], Sequence[Shape]], int]


def _matmul(left: Shape, right: Shape) -> int:
    """2 x (elements of the left matrix) x (columns of the right one)."""
    return 2 * prod(left) * (right[-1] if len(right) > 1 else 1)


def _is_transposed(large: Shape, small: Shape, weight: Shape) -> bool:
    """Recognize a transposed convolution by its weight, whose first dimension is then the input's (``small``).

    Where input and result have as many channels: if the result is larger.
    """
    if large[1] == small[1] == weight[0]:
        return prod(large[2:]) > prod(small[2:])
    return weight[0] == small[1]


def _transposed(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """2 x input elements x weight elements per input channel: each is scattered by its filters."""
    return 2 * prod(inputs[0]) * prod(inputs[1][1:])


def _convolution(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """2 x output elements x weight elements per output channel (groups included)."""
    if _is_transposed(outputs[0], inputs[0], inputs[1]):
        return _transposed(inputs, outputs)
    return 2 * prod(outputs[0]) * prod(inputs[1][1:])


def _convolution_backward(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Gradient of the input and of the weight: each as many as the forward; absent ones none."""
    gradient, given, weight = inputs[:3]
    wanted = sum(1 for shape in outputs[:2] if prod(shape) > 0 and len(shape) > 1)
    return wanted * _convolution([given, weight], [gradient])


def _grouped(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Products of groups: each row of the left side, or column of the right one, is in one group.

    A side of two dimensions holds all groups behind one another, one of three a matrix a group;
    groups of rows, of columns or of the inner dimension are together as large as that dimension.
    """
    left, right = inputs[:2]
    return 2 * prod(left[1:] if len(left) > len(right) else left) * right[-1]


def _recurrent(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """2 x steps x samples x elements of all weight matrices: each is applied once a step.

    Of layers, directions, gates and projections alike; biases and states are not matrices, packed
    sequences have one dimension for steps and samples.
    """
    steps = prod(inputs[0][:-1])
    return 2 * steps * sum(prod(s) for s in inputs[1:] if len(s) == 2 and s[0] != steps)


def _recurrent_layer(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count one layer in one direction: its two matrices follow its input."""
    return _recurrent(inputs[:3], outputs)


def _twice(forward: _Formula) -> _Formula:
    """Gradients of the input and of the weights: twice the forward."""
    return lambda inputs, outputs: 2 * forward(inputs, outputs)


def _attention(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Scores and mixture: 2 x batch x heads x queries x keys x (head + value size)."""
    query, key, value = inputs[:3]
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_of_rows(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count attention where heads follow positions: batch x positions x heads x size."""
    batch, queries, heads, size = inputs[0]
    return 2 * batch * heads * queries * inputs[1][1] * (size + inputs[2][3])


def _attention_backward(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Five products: scores again, and gradients of value, mixture, query, key."""
    query, key, value = inputs[1:4]
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


_OPERATORS: tuple[tuple[_Formula, str], ...] = (
    (lambda inputs, _: _matmul(inputs[0], inputs[1]), "mm bmm matmul mv _scaled_mm _int_mm"),
    (lambda inputs, _: _matmul(inputs[1], inputs[2]), "addmm addmm_ baddbmm addbmm addmv"),
    (_grouped, "_grouped_mm _scaled_grouped_mm"),
    (lambda inputs, _: 2 * prod(inputs[0]) * inputs[1][0], "linear"),
    (
        _convolution,
        "conv1d conv2d conv3d convolution _convolution convolution_overrideable cudnn_convolution"
        " cudnn_convolution_relu miopen_convolution mkldnn_convolution _slow_conv2d_forward _conv_depthwise2d",
    ),
    (
        _transposed,
        "conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution_transpose miopen_convolution_transpose",
    ),
    (_convolution_backward, "convolution_backward"),
    (_recurrent, "lstm gru rnn_tanh rnn_relu _cudnn_rnn miopen_rnn"),
    (_recurrent_layer, "mkldnn_rnn_layer"),
    (_twice(_recurrent), "_cudnn_rnn_backward miopen_rnn_backward"),
    (_twice(_recurrent_layer), "mkldnn_rnn_layer_backward"),
    (_attention_of_rows, "_flash_attention_forward _efficient_attention_forward flash_attn::_flash_attn_forward"),
    (
        _attention,
        "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu",
    ),
    (
        _attention_backward,
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward"
        " _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward",
    ),
)
FORMULAS: dict[str, _Formula] = {
    name if "::" in name else f"aten::{name}": formula for formula, names in _OPERATORS for name in names.split()
}


def count_flop(name: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int | None:
    """Return the operations of one ATen operator from its tensors' shapes, or None where no formula applies."""
    formula = FORMULAS.get(name)
    if formula is None:
        return None
    try:
        return formula(inputs, outputs)
    except (IndexError, ValueError):
        return None


def may_multiply(name: str, kernels: Iterable[str] = ()) -> bool:
    """Recognize an operator whose work may be a product by a word of its name or by its kernels'."""
    words = load_fields()["products"]
    parts = set(re.split(r"[^a-z0-9]+", name.rpartition("::")[2].lower()))
    kernel = re.compile("|".join(words["kernels"]))
    return not parts.isdisjoint(words["operators"]) or any(kernel.search(one.lower()) for one in kernels)


_STATISTICS = {"aten::batch_norm": (3, 4), "aten::native_batch_norm": (3, 4)}
"""Arguments that hold running statistics: updated without being returned."""
WEIGHTS: dict[str, tuple[int, ...]] = {
    "aten::conv1d": (1, 2),
    "aten::conv2d": (1, 2),
    "aten::conv3d": (1, 2),
    "aten::linear": (1, 2),
    "aten::embedding": (0,),
    "aten::layer_norm": (2, 3),
    "aten::batch_norm": (1, 2),
    "aten::group_norm": (2, 3),
    "aten::rms_norm": (2,),
}
"""Arguments that hold parameters in PyTorch's own modules."""


@dataclass(frozen=True)
class TensorRef:
    """One use of a tensor by one operator; ids are the source's and may be reused."""

    # tensor, storage: the source's ids of the tensor and of the memory that it is a view of.
    tensor: int
    storage: int
    elem_bytes: int  # size of an element [bytes]
    shape: tuple[int, ...]  # sizes of the dimensions
    dtype: str  # element type
    argument: int  # place among the operator's arguments or results; members of a list share it
    # Category of its memory where the source says it; empty to find it out from the tensor's uses.
    category: str = ""


@dataclass(frozen=True)
class MadeInside:
    """A result of an enclosed operator, with that operator's inputs."""

    ref: TensorRef
    sources: tuple[TensorRef, ...] = ()


@dataclass
class _Storage:
    """One allocation between two writes by a fresh owner.

    `made_from` holds, for a result of an enclosed operator, the storages that it was computed from
    and the shapes in which they were read.
    """

    producer: int | None
    producer_phase: str
    made_from: list[tuple[_Storage, tuple[int, ...]]] | None = None
    shape: tuple[int, ...] = ()
    read_in: set[str] = field(default_factory=set)
    updated_in: set[str] = field(default_factory=set)
    statistics: bool = False
    weight: bool = False
    scales: bool = False
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
    """The tensors of one operator."""

    name: str
    phase: str
    # inputs, outputs: indices of tensors.
    inputs: list[int]
    outputs: list[int]
    aliases: list[bool]  # for each output, whether it is memory of an input
    written: list[int]  # those inputs that the operator writes in place


_BECOMES_GRADIENT = ("aten::to", "aten::_to_copy", "aten::add", "aten::add_")
"""Operators that make a gradient out of one in another format, or out of two that share a weight."""


class TensorTracker:
    """Follows the tensors through one step, operator by operator."""

    def __init__(self) -> None:
        self.storages: list[_Storage] = []
        self.tensors: list[_Tensor] = []
        self.uses: list[OperatorTensors] = []
        self._live: dict[int, int] = {}
        self._inside: dict[int, list[_Storage]] = {}
        self._made: set[tuple[int | None, int, tuple[int, ...], str]] = set()
        self._known: dict[tuple[int, int, tuple[int, ...]], int] = {}

    def visit(
        self,
        name: str,
        phase: str,
        inputs: list[TensorRef],
        outputs: list[TensorRef],
        made_inside: list[MadeInside],
        written: frozenset[int] | None = None,
    ) -> OperatorTensors:
        """Record one operator; operators must come in order of start.

        `made_inside` are the results of the operators that it encloses, in order of end: autograd
        may save one of them for backward although the operator does not return it. `written` are
        the arguments that it writes in place; None to go by the name's ending.
        """
        op_id = len(self.uses)
        if written is None:
            in_place = name.endswith("_") and not name.endswith("__")
            written = frozenset([0] if in_place else [])
        use = OperatorTensors(name, phase, [], [], [], [])
        for ref in inputs:
            self._read(ref, use, op_id, written)
        owned = {ref.storage for ref in inputs}
        returned = {ref.storage for ref in outputs}
        passing: dict[int, _Storage] = {}  # where later the operator's own result lies
        for inner in made_inside:
            if inner.ref.storage not in owned:
                self._keep(inner, op_id, phase, passing, inner.ref.storage in returned)
            self._made.add(self._identify(inner.ref))
        for ref in outputs:
            alias = ref.storage in owned
            if not alias and not any(self.tensors[i].storage == self._live.get(ref.storage) for i in use.outputs):
                self._live.pop(ref.storage, None)
            use.outputs.append(self._tensor(ref, op_id, op_id, phase))
            self._made.add(self._identify(ref))
            use.aliases.append(alias)
        self.uses.append(use)
        return use

    def _identify(self, ref: TensorRef) -> tuple[int | None, int, tuple[int, ...], str]:
        """Return what distinguishes a tensor from all others that are there; one of a freed id differs in shape."""
        return self._live.get(ref.storage), ref.tensor, ref.shape, ref.dtype

    def _read(self, ref: TensorRef, use: OperatorTensors, op_id: int, written: frozenset[int]) -> None:
        """Record one input of an operator."""
        if ref.shape == () and not ref.category and self._identify(ref) not in self._made:
            # A number of the calling program, wrapped: its memory is in no operator's result.
            self._live.pop(ref.storage, None)
        index = self._tensor(ref, op_id, None, "")
        storage = self.storages[self.tensors[index].storage]
        storage.read_in.add(use.phase)
        storage.statistics |= ref.argument in _STATISTICS.get(use.name, ())
        storage.weight |= not ref.category and ref.argument in WEIGHTS.get(use.name, ())
        if ref.argument in written:
            storage.updated_in.add(use.phase)
            use.written.append(index)
        use.inputs.append(index)

    def _keep(self, inner: MadeInside, op_id: int, phase: str, passing: dict[int, _Storage], passes: bool) -> None:
        """Start the storage of an enclosed operator's result, or note what was written into it.

        One that `passes`, as its id is the operator's result's in the end, is known to this
        operator alone.
        """

        def find(storage: int) -> _Storage | None:
            live = self._live.get(storage)
            return passing.get(storage) or (None if live is None else self.storages[live])

        sources = [
            (root, ref.shape)
            for ref in inner.sources
            if ref.storage != inner.ref.storage and (root := find(ref.storage)) is not None
        ]
        if any(ref.storage == inner.ref.storage for ref in inner.sources):
            made = find(inner.ref.storage)
            if made is not None and made.producer == op_id:
                (made.made_from or []).extend(sources)
            return
        made = _Storage(op_id, phase, sources, inner.ref.shape)
        self._inside.setdefault(op_id, []).append(made)
        if passes:
            passing[inner.ref.storage] = made
            return
        self._live[inner.ref.storage] = len(self.storages)
        self.storages.append(made)

    def moved(self, use: OperatorTensors) -> tuple[list[int], list[int]]:
        """Return the tensors whose bytes an operator reads and writes; a view moves none."""
        if use.outputs and all(use.aliases) and not use.written:
            return [], []
        returned = {self.tensors[i].storage for i in use.outputs}
        extra = [i for i in use.written if self.tensors[i].storage not in returned]
        return use.inputs, [*use.outputs, *extra]

    def _tensor(self, ref: TensorRef, op_id: int, producer: int | None, phase: str) -> int:
        if ref.storage not in self._live:
            self._live[ref.storage] = len(self.storages)
            self.storages.append(_Storage(producer, phase))
        storage = self._live[ref.storage]
        self.storages[storage].category = self.storages[storage].category or ref.category
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
        """Return whether a tensor grows with the batch; valid after `classify`."""
        return self.storages[self.tensors[index].storage].scales

    def size_bytes(self, index: int) -> int:
        """Return the size of a tensor [bytes]."""
        tensor = self.tensors[index]
        return prod(tensor.shape) * tensor.elem_bytes

    def classify(self, batch: int) -> None:
        """Give every storage its category, then follow the batch through the step."""
        last_forward = max((i for i, use in enumerate(self.uses) if use.phase == "forward"), default=-1)
        inner = (storage for storages in self._inside.values() for storage in storages)
        for storage in (*self.storages, *inner):
            storage.category = storage.category or _categorise(storage, last_forward)
        fixed = self._find_early_gradients()
        for tensor in self.tensors:
            storage = self.storages[tensor.storage]
            if storage.category == "input" and tensor.shape and tensor.shape[0] == batch:
                storage.scales = True
        if not any(storage.scales for storage in self.storages):
            self._find_samples(batch)
        returned: dict[int | None, list[int]] = {}
        for index, tensor in enumerate(self.tensors):
            returned.setdefault(self.storages[tensor.storage].producer, []).append(index)
        for op_id, use in enumerate(self.uses):
            for storage in self._inside.get(op_id, []):  # kept for backward without being returned
                storage.scales |= self._kept_grows(storage, batch)
            shapes = [self.tensors[i].shape for i in use.inputs if self.scales(i)]
            for index in returned.get(op_id, []):
                storage = self.storages[self.tensors[index].storage]
                grows = storage.category in ("activation", "output") and self.tensors[index].storage not in fixed
                if storage.made_from is None and grows:
                    storage.scales |= _grows(self.tensors[index].shape, shapes, batch)

    def _find_samples(self, batch: int) -> None:
        """Take for samples what the step itself draws or collates: as many, of nothing that was learned."""
        learned = {i for i, one in enumerate(self.storages) if one.producer is None and one.category != "input"}
        for use in self.uses:
            made = [self.tensors[i] for i, alias in zip(use.outputs, use.aliases, strict=True) if not alias]
            if use.phase != "forward" or any(self.tensors[i].storage in learned for i in use.inputs):
                learned |= {tensor.storage for tensor in made}
            elif use.name != "aten::arange":
                for storage in (self.storages[t.storage] for t in made if t.shape[:1] == (batch,)):
                    storage.category, storage.scales = "input", True

    def _find_early_gradients(self) -> set[int]:
        """Return the storages of gradients before they are cast or added up: as large whatever the batch."""
        early: set[int] = set()
        for use in reversed(self.uses):
            if use.phase != "backward" or use.name not in _BECOMES_GRADIENT:
                continue
            made = {self.tensors[i].storage for i in use.outputs}
            if any(s in early or self.storages[s].category == "gradient" for s in made):
                shapes = {self.tensors[i].shape for i in use.outputs}
                read = (self.tensors[i] for i in use.inputs if self.tensors[i].shape in shapes)
                early |= {tensor.storage for tensor in read}
        return early

    def _kept_grows(self, storage: _Storage, batch: int) -> bool:
        """Return whether an enclosed operator's result grows, given what it was made from."""
        read = [shape for source, shape in storage.made_from or [] if source.scales]
        return storage.category in ("activation", "output") and _grows(storage.shape, read, batch)

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
        return frame.astype(dict.fromkeys(tables.NULLABLE["tensors"], "Int64"))


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
    return "parameter" if storage.weight else "input"


def _grows(shape: tuple[int, ...], inputs: list[tuple[int, ...]], batch: int) -> bool:
    """Return whether a fresh result grows with the batch, given the inputs that do.

    A vector grows when it has an entry a sample (or a token); anything larger when a dimension is a
    multiple of the batch, unless its shape is an input's without the batch dimension (a sum over
    the batch).
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
            shape[0] == prod(other[:k]) and shape[0] % batch == 0 for other in inputs for k in range(1, len(other) + 1)
        )
    return any(size % batch == 0 for size in shape)
