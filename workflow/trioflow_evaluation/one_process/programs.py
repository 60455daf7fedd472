"""Plans whose ranks are devices of one process: its threads launch work in turn, and copy the model to each.

The first device hands out its inputs, broadcasts parameters and buffers (coalesced), gathers the outputs, computes the
loss of the whole batch, hands their gradients out, and adds up all gradients (coalesced). It alone runs the optimizer.
Nothing overlaps: copies and collectives run in the compute streams.

Under the interpreter's lock the forward launches of all devices stand in one queue, the first device's ``host`` stream.
Backward runs in autograd's own thread of each device, which holds no lock. Broadcasts and sums are NCCL's; without it
copies from and to the first device. What ``replicate`` costs the interpreter, a walk over all modules, is left out.

References: PyTorch 2.13
``torch/nn/parallel/{data_parallel,replicate,scatter_gather,parallel_apply,_functions,comm}.py``,
``torch/csrc/cuda/comm.cpp``, ``torch/csrc/autograd/python_engine.cpp`` (``thread_init`` releases the lock).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.parallel.model_graph import ModelGraph
from trioflow.parallel.plan import replica_sizes
from trioflow.parallel.programs.builder import ProgramBuilder
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.programs.stages import StageWorks
from trioflow.parallel.splits.pipeline import list_parameters
from trioflow.parallel.splits.tensor_split import find_loss
from trioflow.parallel.task_graph import TaskGraph

from trioflow_evaluation.one_process.gathered_layers import coalesce, gather_rules, list_inputs, split_gathered


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
    found = {key: held for key, held in made.items() if key in read}
    if not found:
        raise PlanError(
            "the trace shows no output of the model that its loss reads, so none can be gathered",
            fix="use ddp, or capture the step with its tensors",
        )
    return found


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
        return [*replica_sizes(plan, batch), batch]

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
