"""Plans whose ranks are devices of one process: ``torch.nn.DataParallel``, and the library ``tensor_parallel``.

DataParallel's threads launch work in turn, and copy the model to each device.

The first device hands out its inputs, broadcasts parameters and buffers (coalesced), gathers the outputs, computes the
loss of the whole batch, hands their gradients out, and adds up all gradients (coalesced). It alone runs the optimizer.
Nothing overlaps: copies and collectives run in the compute streams.

Under the interpreter's lock the forward launches of all devices stand in one queue, the first device's ``host`` stream.
Backward runs in autograd's own thread of each device, which holds no lock. Broadcasts and sums are NCCL's; without it
copies from and to the first device. What ``replicate`` costs the interpreter, a walk over all modules, is left out.

References: PyTorch 2.13
``torch/nn/parallel/{data_parallel,replicate,scatter_gather,parallel_apply,_functions,comm}.py``,
``torch/csrc/cuda/comm.cpp``, ``torch/csrc/autograd/python_engine.cpp`` (``thread_init`` releases the lock).

The library splits any layers by their outputs: every linear, convolution and embedding layer's, which an all-gather makes
whole; what lies between runs whole on every rank. The gradient of a layer's whole input is one rank's part of a sum: the
gather's backward, a reduce-scatter, adds up and leaves each rank its outputs' gradient. Grouped convolutions, and a head
that shares an embedding's weight, are split by inputs and summed by an all-reduce, in backward as well.

Parameters that no layer splits are shared out too: one all-gather a step, one reduce-scatter after backward. One
process drives all ranks, its first one hands out the inputs in every forward and alone computes the loss.

The library's configurations for some transformers, column and row splits, are Megatron's (``tensor_parallel``); this is
its default. Linear layers are recognized by their operators: products with a parameter. Release 2.0.0 shares unsplit
parameters out in its class ``TensorParallel``; its function ``tensor_parallel`` on request.

References: BlackSamorez/tensor_parallel (2023-08): ``config.py`` (default configuration), ``communications.py``
(AllGather with ReduceScatter as backward), ``sharding.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from trioflow.base.columns import Columns
from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.base.units import BYTES_PER_MIB
from trioflow.costmodel.features import FEATURES, WORK, class_of_name
from trioflow.parallel.model_graph import ModelGraph, Operator, of_model
from trioflow.parallel.programs.builder import ProgramBuilder
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.programs.stages import StageWorks
from trioflow.parallel.splits.pipeline import chunk_samples, list_parameters
from trioflow.parallel.splits.tensor_split import AFTER, BEFORE, Exchange, TensorSplit, find_loss, list_untrained
from trioflow.parallel.task_graph import TaskGraph
from trioflow.tables import records
from trioflow.trace.store import Trace

OUTPUT, _INPUT = "output", "input"
_LAYERS = ("gemm", "convolution", "embedding")


BUFFER_BYTES = 10 * BYTES_PER_MIB
"""Limit of a buffer, as ``torch/csrc/utils/tensor_flatten.cpp`` (``take_tensors``) and ``torch/_utils.py`` have it: ``comm.broadcast_coalesced`` and ``comm.reduce_add_coalesced``."""
_Sized = Sequence[tuple[int, int]]
"""Tensors by size and by width of an element [bytes]."""


def coalesce(tensors: _Sized, limit: int = BUFFER_BYTES, *, sums: bool = False) -> list[int]:
    """Return the buffers of a coalesced broadcast, or sum, by width of elements [bytes]; ``tensors``: size, width [bytes].

    A broadcast's closes at ``limit``, a sum's before a tensor would bring it above.
    """
    waiting: dict[int, int] = {}
    closed = []
    for size, width in tensors:
        full = sums and 0 < waiting.get(width, 0) > limit - size
        if full:
            closed.append(waiting[width])
        waiting[width] = size if full else waiting.get(width, 0) + size
        if not sums and waiting[width] >= limit:
            closed.append(waiting[width])
            waiting[width] = 0
    return [*closed, *(size for size in waiting.values() if size)]


def list_inputs(trace: Trace, operators: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return the step's inputs that operators read, by storage: size for the traced batch, element width [bytes].

    Only tensors whose first dimension is the batch: what is of one sample is made on every device.
    """
    batch, tensors = trace.facts.batch, trace.tensors
    columns = (tensors[name].tolist() for name in ("storage_id", "category", "shape", "elem_bytes"))
    storage, category, shape, elem = columns
    inputs: dict[int, tuple[int, int]] = {}
    for ids in trace.operators["input_ids"].iloc[list(operators)]:
        for index in ids:
            if category[index] == "input" and list(shape[index][:1]) == [batch]:
                width = int(elem[index])
                size = prod(shape[index]) * width
                inputs[storage[index]] = max((size, width), inputs.get(storage[index], (0, width)))
    return inputs


def cut_row(operators: Columns, row: Mapping[str, Any], part: float, shares: Mapping[str, float]) -> None:
    """Write a shard's work into one row of the operators in place: its part of the FLOPs, its shares of the bytes."""
    for column in FEATURES:
        share = part if column == "flop" else shares[column]
        for name in (column, f"batch_{column}"):
            operators[name][row["op_id"]] = round(int(row[name]) * share)


@dataclass(frozen=True)
class _GatheredLayer:
    """A layer that is split; gathers pad shards to equal sizes.

    A grouped convolution is split inside each group, so a depthwise one is whole on the first rank; its bias, and that
    of a head with an embedding's weight, stays whole everywhere.
    """

    op_id: int  # its forward operator
    module: str  # its module
    split: str  # output or input: what its ranks share
    # Storage and shape of its weight
    weight: int
    shape: tuple[int, ...]
    # Storages of the parameters that are cut, and of all else that it reads
    parameters: frozenset[int]
    inputs: frozenset[int]
    channels: int  # what is shared: channels of its output or its input
    # Its output for the traced batch [bytes], and the part of it that grows with the batch
    output_bytes: int
    growing: float

    def exchange(self, name: str, degree: int) -> Exchange:
        """Return a collective over its output; gathers and scatters bring it into order."""
        if name == "all_reduce":
            return Exchange(name, self.output_bytes, growing=self.growing)
        padded = round(self.output_bytes * self.part(degree) * degree)
        copied = AFTER if name == "all_gather" else BEFORE
        return Exchange(name, padded, copied, growing=self.growing)

    def part(self, degree: int) -> float:
        """Return the largest rank's part; channels that do not divide make one more of them."""
        return -(-self.channels // degree) / self.channels


@of_model
def find_gathered_layers(trace: ModelGraph) -> list[_GatheredLayer]:
    """Return the layers that are split by outputs or by inputs, in the order of forward."""
    loss, work = find_loss(trace), trace.operators[["batch_write_bytes", "write_bytes"]].to_numpy()
    rows = [
        (row, place)
        for row in trace.forward
        if row.op_id not in loss and class_of_name(row.name) in _LAYERS and (place := row.matrix) is not None
    ]
    looked_up = {row.reads[place] for row, place in rows if row.looks_up}
    layers = []
    for row, place in rows:
        if not row.output_ids:
            continue
        weight = row.reads[place]
        split, channels = _choose_split(row, place, weight in looked_up)
        parameters = {trace.storage[i] for i in row.weights} if split == OUTPUT else {weight}
        layers.append(
            _GatheredLayer(
                row.op_id,
                row.module,
                split,
                weight,
                tuple(row.input_shapes[place]),
                frozenset(parameters),
                frozenset({*row.reads} - parameters),
                channels,
                trace.size[row.output_ids[0]],
                float(work[row.op_id, 0] / row.write_bytes) if row.write_bytes else 1.0,
            )
        )
    return layers


def _choose_split(row: Operator, place: int, looked_up: bool) -> tuple[str, int]:
    """Return whether a layer's outputs or inputs are shared, and how many channels these have."""
    shapes, output = row.input_shapes, row.output_shapes[0]
    kind = class_of_name(row.name)
    if kind == "convolution":
        data, weight = shapes[place - 1], shapes[place]
        # A transposed one's weight names its inputs first.
        transposed = "transpose" in row.name
        whole = int(output[1] if transposed else data[1])
        if weight[1] == whole:
            return OUTPUT, int(output[1])
        return _INPUT, int(data[1]) * int(weight[1]) // whole
    if kind == "gemm" and looked_up:
        return _INPUT, int(shapes[place][-1])
    return OUTPUT, int(output[-1])


@of_model
def gather_rules(trace: ModelGraph) -> dict[str, str]:
    """Return column or row by split module: a weight's first dimension, the second of an embedding or a head tied to it."""
    lookups = {row.op_id for row in trace.forward if row.looks_up}
    layers = find_gathered_layers(trace)
    by_rows = {layer.weight for layer in layers if layer.op_id in lookups}
    kinds = {layer.weight: "row" if layer.weight in by_rows else "column" for layer in layers}
    rules = {layer.module: kinds[layer.weight] for layer in layers}
    for gradient in (*trace.facts.gradients, *list_untrained(trace)):
        owned = kinds.get(int(gradient.get("parameter_storage_id", -1)))
        if owned:
            rules.setdefault(str(gradient["module"]), owned)
    return rules


class _Cutter:
    """Writes one rank's work into the operators of split layers, and places their exchanges."""

    def __init__(self, trace: ModelGraph, degree: int, layers: list[_GatheredLayer]) -> None:
        self.degree = degree
        self.layers = {layer.op_id: layer for layer in layers}
        self.storage, self.category, self.size, self.shape = trace.storage, trace.category, trace.size, trace.shape
        columns = trace.operator_columns
        self.split = TensorSplit(columns.assign(**{name: columns[name].copy() for name in WORK}))
        self.begun: set[int] = set()

    def visit(self, row: dict[str, Any]) -> None:
        """Take one operator in."""
        if row["phase"] == "forward" and row["op_id"] in self.layers:
            self._forward(row, self.layers[row["op_id"]])
        elif row["phase"] == "backward" and row["forward_op_id"] in self.layers:
            self._backward(row, self.layers[row["forward_op_id"]])

    def _forward(self, row: dict[str, Any], layer: _GatheredLayer) -> None:
        part, whole = layer.part(self.degree), layer.split == _INPUT
        cut_row(
            self.split.operators,
            row,
            part,
            {
                "read_bytes": self._share(row["input_ids"], row["read_bytes"], part, layer, cut_data=whole),
                "write_bytes": 1.0 if whole else part,
            },
        )
        self.split.add(AFTER, layer.op_id, layer.exchange("all_reduce" if whole else "all_gather", self.degree))

    def _backward(self, row: dict[str, Any], layer: _GatheredLayer) -> None:
        if layer.op_id not in self.begun:
            self.begun.add(layer.op_id)
            whole = layer.split == _INPUT
            name = "all_reduce" if whole else "reduce_scatter"
            self.split.add(BEFORE, int(row["op_id"]), layer.exchange(name, self.degree))
        part = layer.part(self.degree)
        makes = [i for i in row["output_ids"] if self._is_gradient(i, layer)]
        reads = any(self.storage[i] in layer.parameters for i in row["input_ids"])
        if not makes and not reads:  # sums of what several readers of one tensor found
            return
        cut_row(
            self.split.operators,
            row,
            part,
            {
                "read_bytes": self._share(row["input_ids"], row["read_bytes"], part, layer, back=True),
                "write_bytes": self._share(
                    row["output_ids"], row["write_bytes"], part, layer, cut_data=layer.split == _INPUT
                ),
            },
        )

    def _is_gradient(self, index: int, layer: _GatheredLayer) -> bool:
        """Return whether a tensor is a parameter's gradient, or a part of a shared weight's."""
        if self.category[index] == "gradient":
            return True
        makes = self.category[index] == "activation" and self.storage[index] not in layer.inputs
        return makes and self.shape[index] in (layer.shape, layer.shape[::-1])

    def _share(
        self,
        indices: list[int],
        total: int,
        part: float,
        layer: _GatheredLayer,
        cut_data: bool = False,
        back: bool = False,
    ) -> float:
        """Return the part of some tensors' bytes that one rank moves.

        Cut are parameters and their gradients, input and its gradient of a layer split by inputs, and the incoming
        gradient of one split by outputs.
        """
        by_input = layer.split == _INPUT
        moved = whole = 0.0
        for index in indices:
            size = self.size[index]
            cut = cut_data and self.category[index] != "parameter"
            if self.storage[index] in layer.parameters or self._is_gradient(index, layer):
                cut = True
            elif back:
                cut = (self.storage[index] in layer.inputs) == by_input
            moved += size * (part if cut else 1.0)
            whole += size
        return moved / whole if whole and total else 1.0


@of_model
def split_gathered(trace: ModelGraph, degree: int) -> TensorSplit:
    """Return one rank's operators when all layers' outputs are split and gathered; PlanError when there is no such layer."""
    layers = find_gathered_layers(trace)
    if not layers:
        raise PlanError(
            f"tensor degree {degree}: the trace shows no linear, convolution or embedding layer to split",
            fix="use data or pipeline parallelism, or a trace with its tensors",
        )
    cutter = _Cutter(trace, degree, layers)
    rows = records(trace.operators)
    for row in rows:
        cutter.visit(row)
        if row["phase"] == "optimizer" and any(len(shape) for shape in row["input_shapes"]):
            part = 1.0 / degree
            cut_row(cutter.split.operators, row, part, dict.fromkeys(FEATURES, part))
    split, loss = cutter.split, find_loss(trace)
    of_loss = {int(r["op_id"]) for r in rows if r["phase"] == "backward" and r["forward_op_id"] in loss}
    split.first_rank_only = frozenset(loss | of_loss)
    model = [int(r["op_id"]) for r in rows if r["phase"] == "forward" and r["op_id"] not in loss]
    split.input_bytes = tuple(coalesce(list(list_inputs(trace, model).values())))
    cut = {storage for layer in layers for storage in layer.parameters | layer.inputs}
    split.gathered_bytes = sum(
        int(g["size_bytes"]) for g in trace.facts.gradients if int(g.get("parameter_storage_id", -1)) not in cut
    )
    return split


@dataclass
class ReplicaWork:
    """What one step of DataParallel moves."""

    replicas: int  # devices that get any samples
    # Each tensor's part on each device [tensors, devices] [bytes]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    # Coalesced buffers, in order [bytes]
    broadcasts: tuple[int, ...]
    sums: tuple[int, ...]
    # Time to copy tensors into each of them [s]
    broadcast_copies_s: tuple[float, ...]
    sum_copies_s: tuple[float, ...]
    # Time to copy the first device's own part of each output [s]
    output_copies_s: tuple[float, ...]
    # Operators of the loss, which the first device alone runs
    loss: frozenset[int]
    loss_backward: frozenset[int]
    # Inputs and targets of the first device's own samples, which are views of the whole [bytes]
    spare_bytes: int
    # Task in which the first rank launched the loss, once it has
    loss_launched: int | None = None


def share_host(graph: TaskGraph) -> TaskGraph:
    """Return a graph whose ranks' forward launches, where there are any, alternate in one queue of the first rank."""
    tasks = graph.tasks
    launches = (tasks["stream"] == "host") & (tasks["phase"] == "forward")
    if not launches.any():
        return graph
    turn = launches.groupby(tasks["rank"]).cumsum()
    order = np.argsort(turn.to_numpy(), kind="stable")
    ranks = tasks["rank"].mask(launches, tasks["rank"].min())
    moved = tasks.assign(rank=ranks).iloc[order].reset_index(drop=True)
    moved["task_id"] = tasks["task_id"].to_numpy()
    number = np.argsort(order)
    return TaskGraph(
        moved.astype({"task_id": tasks["task_id"].dtype}),
        graph.dependencies.apply(lambda ids: number[ids.to_numpy()]),
        graph.metadata,
    )


class _ProcessRank(StagedRank):
    """Writes the tasks of one device of a process that drives several."""

    alike = (False, False, False, False)
    repeats = in_rows = False
    launches = True  # forward operators take turns under the interpreter's lock
    complete = staticmethod(share_host)


class GatherRank(_ProcessRank):
    """Writes one device's tasks when every layer's outputs are split and gathered."""

    dispatches = False
    find_rules, split = staticmethod(gather_rules), staticmethod(split_gathered)

    def broadcast_buffers(self) -> None:
        """Make the parameters that no layer splits whole, after the last step has changed them."""
        size = self.program.split.gathered_bytes
        if size:
            task = self.collective("all_gather", ("parameters",), size, self.tensor_group, "forward")
            self.waits.append(task)

    def _run_forward(self, micro_batch: int, again: bool) -> None:
        split, factors = self.program.split, self.program.factors
        for index, size in enumerate(split.input_bytes):
            key = ("inputs", micro_batch, again, index)
            task = self.collective("broadcast", key, round(size * factors[micro_batch]), self.tensor_group, "forward")
            self.waits.append(task)
        super()._run_forward(micro_batch, again)

    def _run(self, op_id: int, *rest: Any, **options: Any) -> None:
        if not (self.tensor and op_id in self.program.split.first_rank_only):
            super()._run(op_id, *rest, **options)

    def _run_backward(self, kind: str, micro_batch: int) -> None:
        super()._run_backward(kind, micro_batch)
        size = self.program.split.gathered_bytes
        if size:
            key = ("gradients", micro_batch)
            self.waits.append(self.collective("reduce_scatter", key, size, self.tensor_group, "backward"))


_OF_REPLICA, _OF_WHOLE = 0, 1
"""Micro-batches of tasks: a device's own samples, and the whole batch of the loss."""


def build_replicas(works: StageWorks) -> ReplicaWork:
    """Return what a step of DataParallel moves.

    Raises PlanError when the trace does not say which parameters there are, or shows no output that the loss reads.
    """
    trace, parts, copies_s = works.trace, works.factors[:-1], works.copies_s
    loss = find_loss(trace)
    model = [row.op_id for row in trace.forward if row.op_id not in loss]
    everything = sum(size for size, _ in list_inputs(trace, [*model, *loss]).values())
    inputs = _share_out([size for size, _ in list_inputs(trace, model).values()], parts)
    outputs = _share_out(list(_find_outputs(trace, loss).values()), parts)
    parameters = [(p.size_bytes, p.elem_bytes) for p in list_parameters(trace)]
    buffers = [(prod(b["shape"]) * int(b["elem_bytes"]), int(b["elem_bytes"])) for b in trace.facts.buffers or []]
    broadcasts = [*coalesce(parameters), *coalesce(buffers)]
    sums = coalesce(parameters, sums=True)
    return ReplicaWork(
        len(parts),
        inputs,
        outputs,
        tuple(broadcasts),
        tuple(sums),
        tuple(copies_s(broadcasts)),
        tuple(copies_s(sums)),
        tuple(copies_s([each[0] for each in outputs])),
        loss,
        frozenset(row.op_id for op in loss for row in trace.backward_of.get(op, ())),
        round(everything * parts[0]),
    )


def _share_out(sizes: Sequence[int], parts: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(round(size * part) for part in parts) for size in sizes)


def _find_outputs(trace: ModelGraph, loss: frozenset[int]) -> dict[int, int]:
    """Return what the model makes and the loss reads: storage and size for the traced batch [bytes]."""
    made: dict[int, int] = {}
    for row in (row for row in trace.forward if row.op_id not in loss):
        for index, storage in zip(row.output_ids, row.makes, strict=True):
            if trace.category[index] in ("activation", "output"):
                made[storage] = max(trace.size[index], made.get(storage, 0))
    read = {storage for op in loss for storage in trace.rows[op].reads}
    outputs = {key: size_bytes for key, size_bytes in made.items() if key in read}
    if not outputs:
        raise PlanError(
            "the trace shows no output of the model that its loss reads, so none can be gathered",
            fix="use ddp, or capture the step with its tensors",
        )
    return outputs


class ReplicaRank(_ProcessRank):
    """Writes the tasks of one device under DataParallel; ``data`` is its number."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.moved: ReplicaWork = self.program.shared
        self.devices = list(range(self.moved.replicas))
        self.is_first = self.data == 0

    share = staticmethod(build_replicas)

    @staticmethod
    def list_samples(plan: Plan, batch: int) -> list[int]:
        """Return each replica's own samples and the whole batch of the loss."""
        return [*chunk_samples(batch, plan.data), batch]

    @staticmethod
    def factors_of(program: ProgramBuilder, rank: int) -> Sequence[float]:
        """Return a device's own samples, and the first one's whole batch, over the traced ones."""
        own = program.factors[rank : rank + 1] if rank < program.shared.replicas else [0.0]
        return [*own, program.factors[-1]] if rank == 0 else own

    def times_of(self, micro_batch: int | None) -> int:
        """Return the device's own samples' times, or the whole batch's."""
        return len(self.program.times) - 1 if micro_batch == _OF_WHOLE else self.data

    def run(self) -> None:
        """Write the whole step."""
        if self.data >= len(self.devices):  # fewer samples than devices
            self.compute("DataParallel: no samples", 0.0, "host")
            return
        work, loss = self.work, self.moved.loss
        self.hold("input", -self.moved.spare_bytes if self.is_first else 0)
        self._hand_out("inputs", self.moved.inputs, "forward")
        for index, size in enumerate(self.moved.broadcasts):
            copy_s = self.moved.broadcast_copies_s[index] if self.is_first else 0.0
            self._collect("broadcast", index, size, copy_s, "forward")
        for op_id in work.forward:
            if op_id not in loss:
                self.operators([op_id], _OF_REPLICA, "forward")
        self._gather_outputs()
        if self.is_first:
            self._run_loss()
        self._hand_out("output gradients", self.moved.outputs, "backward")
        for op_id in work.backward:
            if op_id not in self.moved.loss_backward:
                self.operators([op_id], _OF_REPLICA, "backward")
        for index, size in enumerate(self.moved.sums):
            self.hold("gathered", size if self.is_first else 0)
            self._collect("reduce", index, size, self.moved.sum_copies_s[index], "backward")
        if self.is_first:
            self.hold("gathered", -sum(self.moved.sums))
            self.update()
            if self.program.tail_s:
                self.compute("host: end of step", self.program.tail_s, "host")

    def _run_loss(self) -> None:
        """Run the loss of the whole batch, forward and backward; replicas begin theirs then."""
        for phase, operators in (("forward", self.moved.loss), ("backward", self.moved.loss_backward)):
            for op_id in sorted(operators):
                self.operators([op_id], _OF_WHOLE, phase)
        self.moved.loss_launched = self.launched
        self.hold("message", -sum(sum(each) for each in self.moved.outputs))

    def _gather_outputs(self) -> None:
        whole = sum(sum(each) for each in self.moved.outputs)
        self.hold("message", whole if self.is_first else 0)
        for index, sizes in enumerate(self.moved.outputs):
            if self.is_first:
                copy_s = self.moved.output_copies_s[index]
                self.compute("copy into gather", copy_s, "memcpy", phase="forward")
            for device in self.devices[1:]:
                self._move("outputs", index, device, 0, sizes[device], "forward")

    def _hand_out(self, what: str, tensors: Sequence[Sequence[int]], phase: str) -> None:
        """Copy each device's part of the first device's tensors to it."""
        for index, sizes in enumerate(tensors):
            for device in self.devices[1:]:
                self._move(what, index, 0, device, sizes[device], phase)
        if phase == "backward" and not self.is_first and self.program.times[0].separate_host:
            # A device's backward is not launched before that of the loss.
            self.add(
                "host",
                "host",
                "autograd: wait for the loss",
                phase=phase,
                after=(self.moved.loss_launched,),
                duration_s=0.0,
            )

    def _move(self, what: str, index: int, source: int, target: int, size: int, phase: str) -> None:
        """Add this device's end of a copy between two devices, in its compute stream."""
        if self.data not in (source, target) or not size:
            return
        kind, peer = ("send", target) if self.data == source else ("recv", source)
        self.last = self.add(
            "compute",
            kind,
            f"{kind} {what}",
            after=self.waits,
            message_bytes=size,
            peer=peer,
            phase=phase,
            match_id=self.program.match(what, index, source, target),
        )
        self.waits = []

    def _collect(self, name: str, index: int, size: int, copy_s: float, phase: str) -> None:
        """Copy tensors into a buffer and take part in its collective, in the compute stream."""
        if copy_s:
            self.compute(f"copy into {name}", copy_s, "memcpy", phase=phase)
        if len(self.devices) == 1:
            return
        self.last = self.add(
            "compute",
            "collective",
            name,
            after=self.waits,
            message_bytes=size,
            phase=phase,
            group=",".join(map(str, self.devices)),
            match_id=self.program.match(name, index),
        )
        self.waits = []
