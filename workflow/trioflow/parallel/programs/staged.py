"""One rank's step: the actions of its row of the schedule, the gradients' sums, the update.

A forward and another micro-batch's backward that run together: exchanges of one's tokens beside the other's compute.

As Megatron-LM's combined 1F1B runs them, and DeepSeek's DualPipe: the two take turns at each exchange of experts. So
while the gradients of one's combined tokens travel, the other computes attention and router; while those of its
dispatched tokens travel, the first one's experts; and so on, layer by layer, the backward from its last. Each waits for
its own exchanges alone. Layers without experts run in one turn with the next.

Left out: gradients of weights that are computed behind those of inputs, so that more hides the exchange
(``--delay-wgrad-compute``), and copies in and out of order, which run with the compute here.

References: Megatron-LM ``megatron/core/models/common/model_chunk_schedule_plan.py``
(``TransformerLayerSchedulePlan.run``), ``megatron/core/pipeline_parallel/combined_1f1b.py``.

Sharded data parallelism: one rank's tasks under ``fully_shard``.

FSDP2 gathers a unit's parameters before its forward and, where they were given up in between, before its backward; it
reduces its gradients after its backward. The order in which it asks for collectives, and what each waits for, is
PyTorch's:

- Copies into an all-gather run in a stream of their own (``copy``), so that the next unit's may run beside the current
  unit's compute: the host asks for it as soon as it has launched that compute. An all-gather waits until the result of
  the last but one has been copied out, so two are in flight at most.
- All-gathers and reduce-scatters run in the stream ``communication`` in the order in which they were asked for: they
  share one communicator, which runs its collectives one after the other whatever streams they come from.
- In backward a unit asks for the all-gather of the unit before it once its own parameters are there.
- Each of several micro-steps reduces its gradients, and adds its shards to those of the ones before in the stream of
  its last collective; the next waits for it. With ``no_sync`` gradients are added up whole, and the last micro-step
  reduces the sum.
- A unit copies its gradients into the input of a reduce-scatter once the reduce-scatter before has ended. The optimizer
  waits for the last.
- On a device without streams, a CPU, copies run in turn with compute, and each collective ends before anything else
  begins.
- Under fp16 one all-reduce of four bytes follows the check for overflows.
- Between groups (hybrid sharding) an all-reduce follows each reduce-scatter, in a stream and a communicator of its own.
- Each stage of a pipeline is sharded by itself. Every micro-batch's forward gathers and gives up its units (``fsdp``)
  or finds them there (``zero2``, ``reshard_after_forward=False``, torchtitan's default in pipelines); after a backward
  they stay, and gradients are kept whole and added up. Behind the last backward of a stage they are reduced, the root's
  first, and then divided. The runtime of several stages a rank asks for all of a stage's units before it computes
  (UNSHARD), and keeps three stages at most.

References: PyTorch 2.13 ``torch/distributed/fsdp/_fully_shard/{_fsdp_state,_fsdp_param_group,_fsdp_collectives}.py``;
``torch/distributed/pipelining/stage.py`` (``backward_maybe_with_nosync``, ``perform_reduce_grad``) and ``schedules.py``
(``_add_unshard_reshard``); torchtitan ``models/llama3/infra/parallelize.py`` (``reshard_after_forward_policy``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.experiments import Plan
from trioflow.base.plan_row import SLICED
from trioflow.parallel.programs.actions import StageActions, add_operators
from trioflow.parallel.programs.builder import ProgramBuilder, UnitWork
from trioflow.parallel.schedules.table import (
    COMPUTE_KINDS,
    FORWARD,
    FORWARD_ONLY,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    TRAIN,
    UNSHARD,
    Action,
    leaves,
)
from trioflow.parallel.splits.pipeline import Bucket, list_added_gradients
from trioflow.parallel.splits.sharding import ShardedUnit
from trioflow.trace.store import Trace


@dataclass(frozen=True)
class _Way:
    """Tasks of one of the two actions, in a row."""

    begin: int
    end: int
    turns: list[int]  # behind which tasks the other has its turn: a ``task_id`` each
    last: int  # of its compute
    changes: slice  # of what the rank holds


def run_together(rank: StagedRank, forward: Action, backward: Action) -> None:
    """Write two actions of a rank, one behind the other, and then in turns; the backward begins."""
    graph, memory = rank.program.graph, rank.memory
    mark, before, held = graph.mark(), rank.last, len(memory.changes)
    ways: list[_Way] = []
    left: list[int] = []
    for action in (backward, forward):
        begin, rank.last, rank.turns, rank.stage = graph.next_task, before, [], action.stage
        rank.compute_action(action)
        assert rank.last is not None
        changes = slice(held, len(memory.changes))
        ways.append(_Way(begin, graph.next_task, rank.turns, rank.last, changes))
        # What is left to be waited for at the end of one is nothing for the other.
        left, rank.waits, held = left + rank.waits, [], len(memory.changes)
    moved = graph.reorder(mark, _take_turns(ways))

    def find(task: int) -> int:
        return int(moved[task - mark.tasks]) if task >= mark.tasks else task

    for way in ways:  # what is held from the next task on is held from behind a way's last
        memory.changes[way.changes] = [
            (find(task) if task < way.end else find(way.end - 1) + 1, name, size)
            for task, name, size in memory.changes[way.changes]
        ]
    rank.ended = {"backward": find(ways[0].last), "forward": find(ways[1].last)}
    rank.last = max(rank.ended.values())
    rank.launched = None if rank.launched is None else find(rank.launched)
    rank.waits, rank.reduced = [find(task) for task in left], [find(task) for task in rank.reduced]


def _take_turns(ways: Sequence[_Way]) -> NDArray[np.int64]:
    """Return the tasks of both ways in turns."""
    pieces = []
    for way in ways:
        # Exchanges right behind one another are one turn.
        turns = [task for task in way.turns if task + 1 not in way.turns]
        pieces.append(np.split(np.arange(way.begin, way.end), [t + 1 - way.begin for t in turns]))
    count = max(map(len, pieces))
    found = [part[turn] for turn in range(count) for part in pieces if turn < len(part)]
    return np.concatenate(found).astype(np.int64)


FINDS_OVERFLOW = "aten::_amp_foreach_non_finite_check_and_unscale_"
"""Operator of ``GradScaler`` that unscales gradients and notes whether any is not finite."""


class StagedRank(StageActions):
    """Writes one rank's tasks by its row of the schedule."""

    alike = (False, True, True, True)

    def __init__(self, program: ProgramBuilder, data: int, pipeline: int, tensor: int) -> None:
        super().__init__(program, data, pipeline, tensor)
        self.reduced: list[int] = []
        self.begun: dict[int, dict[int, list[int]]] = {}  # by stage, gathers of its buckets that run
        turns = [one.stage for one in leaves(self.schedule.rows[pipeline]) if one.kind == FORWARD]
        self.first_turns = {stage: turns.index(stage) for stage in dict.fromkeys(turns)}

    def run(self) -> None:
        """Write the whole step."""
        self.broadcast_buffers()
        for cell in self.schedule.rows[self.pipeline]:
            if cell and cell.parts and self.program.plan.expert_overlap:
                run_together(self, *cell.parts)
            else:
                self._run_cell(cell)
        self.finish()

    def _run_cell(self, cell: Action | None) -> None:
        """Run the actions of a cell one behind the other."""
        for action in leaves((cell,)):
            self.stage = action.stage
            if action.kind in COMPUTE_KINDS:
                self.ended = {}
                self.compute_action(action)
            elif action.kind in (RECV_F, RECV_B):
                self.received[action] = self.move("recv", action)
            elif action.kind in (SEND_F, SEND_B):
                self.unawaited.append(self.move("send", action))
            elif action.kind == UNSHARD:
                self.unshard()
            elif action.kind == RESHARD:
                self.reshard()
            elif action.kind == REDUCE_GRAD:
                if self.schedule.traits.waits:
                    self.await_all_sends()
                self.reduce_stage()
                if self.work.scale_s:
                    self.compute("gradient scaling", self.work.scale_s, phase="backward")

    def gathers_ahead(self) -> bool:
        """Return whether the weights of the stage, whose first forward begins, are gathered during it."""
        first = sum(action.stage == self.stage for action in self.forwards) == 1
        program = self.program
        return first and program.plan.gather_overlap and program.mode == TRAIN

    def compute_action(self, action: Action) -> None:
        """Run one action's operators; before a forward gathers of later stages' weights begin."""
        if action.kind == FORWARD and action not in self.forwards:
            self._begin_gathers(len(self.forwards))
        super().compute_action(action)

    def _begin_gathers(self, turn: int) -> None:
        """Begin to gather stages ahead of their turn, as Megatron-LM does where a rank has several.

        Those of the first two stages begin with the step; each further one's where the first micro-batch of the stage
        before comes to the last rank, so that all ranks begin at once (``forward_backward_pipelining_with_interleaving``).
        """
        if not self.program.plan.gather_overlap or self.program.mode != TRAIN:
            return
        order = [*self.first_turns]
        due = order[:2] if not turn and len(order) > 1 else []
        due += [after for before, after in pairwise(order[1:]) if self.first_turns[before] == turn + self.pipeline]
        here = self.stage
        for stage in due:
            self.stage = stage
            self.begun[stage] = {
                index: self._gather_bucket(index, "forward") for index in range(len(self.work.gathered_bytes))
            }
        self.stage = here

    def unshard(self) -> None:
        """Gather a stage's parameters, where they are shared."""

    def reshard(self) -> None:
        """Give a stage's gathered parameters up."""

    def reduce_stage(self) -> None:
        """Reduce what a stage has kept back until its last micro-batch."""

    def broadcast_buffers(self) -> None:
        """DDP: rank 0 of the replicas sends its buffers before forward."""
        hooks_s = self.program.host.get("data_parallel_step_s", 0.0)
        if self.program.plan.replicas > 1 and hooks_s and self.program.mode != FORWARD_ONLY:
            self.compute("data_parallel: hooks", hooks_s, "host")
        for stage in self.stages:
            self.stage = stage
            for index, size in enumerate(self.work.buffer_bytes):
                key = ("buffers", self.stage, self.tensor, index, self.backwards[stage])
                task = self.collective("broadcast", key, size, self.data_group, "forward")
                self.waits.append(task)

    def reduce_bucket(self, index: int, bucket: Bucket) -> None:
        """Copy a bucket's gradients in and start its all-reduce; send them to the host if asked to."""
        ready, size = self.last, bucket.size_bytes
        plan, recipe, done = self.program.plan, self.program.recipe, self.backwards[self.stage]
        scatters = plan.sharding in SLICED and plan.sharding not in recipe.sums_whole
        if plan.replicas > 1:
            if self.work.bucket_copy_s:
                copy_s = self.work.bucket_copy_s[index]
                self.compute(f"copy into bucket {index}", copy_s, "memcpy", phase="backward")
            group, others = self._replicas_of(bucket), list[int]()
            if scatters and plan.shard > 1:
                group, others = self._shards_of(bucket), self.shard_replicas
            if len(group) > 1:
                key = ("bucket", self.stage, group[0], index, done)
                name = "reduce_scatter" if scatters else "all_reduce"
                ready = self.collective(name, key, size, group, "backward")
                self.reduced.append(ready)
            if others:  # right behind the scatter, which it waits for (Megatron-LM's one stream for both)
                key = ("shard", self.stage, others[0], index, done)
                part = size // len(group)
                self.reduced.append(self.collective("all_reduce", key, part, others, "backward"))
        if plan.sums_shards:  # each replica keeps its slice, and adds those of further micro-steps to it
            self.drop(self.work.bucket_storages[index])
            kept = size * recipe.gradient_bytes / recipe.reduce_bytes / plan.shards_of(bucket.experts)
            self.hold("gradient", 0.0 if done else kept)
            self.waits += self.reduced[-1:] * recipe.waits_for_buckets
        if self.host_optimizer:
            self.host_optimizer.send(ready, size, self.work.bucket_storages[index])

    def begin_again(self) -> None:
        """DDP: wait for the buckets, and send buffers before the next forward, as it does behind each exchange."""
        self._end_buckets()
        self.broadcast_buffers()

    def _end_buckets(self) -> None:
        """Wait for what has been reduced, and copy it back."""
        self.waits += self.reduced
        self.reduced = []
        for stage in self.stages:
            self.stage = stage
            for index, return_s in enumerate(self.work.bucket_return_s):
                self.compute(f"copy from bucket {index}", return_s, "memcpy", phase="backward")

    def finish(self) -> None:
        """Wait for buckets and copy back, add up tied gradients, update."""
        self._end_buckets()
        self._reduce_partial()
        if self.program.mode != FORWARD_ONLY:
            self._reduce_tied()
        if not self.schedule.traits.one_process:
            self.await_all_sends()
        if self.program.mode == TRAIN:
            self.update()
        if self.program.tail_s or self.waits:
            self.compute("host: end of step", self.program.tail_s, "host")

    def update(self) -> None:
        """Run the optimizer."""
        if self.host_optimizer:
            self.host_optimizer.update()
            return
        update_s = self.program.host.get("tensor_parallel_update_s", 0.0)
        for stage in self.stages:
            self.stage = stage
            if self.in_rows and not update_s:
                self._update_at_once()
                continue
            for op_id in self.work.optimizer:
                sharded = int(op_id) in self.program.split.sharded_updates
                extra_s = update_s if sharded else 0.0
                self.operator(int(op_id), None, extra_s, device_s=self.work.update_s.get(int(op_id)))
        if not self.program.plan.gather_overlap:
            self._gather_weights()

    def _update_at_once(self) -> None:
        """Add the optimizer's operators of a stage; behind the search for overflow shards may agree."""
        names, op_ids = self.program.names, self.work.optimizer.tolist()
        for place, op_id in enumerate(op_ids):
            if names[op_id] == FINDS_OVERFLOW:
                add_operators(self, op_ids[:place], None, device_s=self.work.update_s)
                self.operator(op_id, None, device_s=self.work.update_s.get(op_id))
                op_ids = op_ids[place + 1 :]
                break
        add_operators(self, op_ids, None, device_s=self.work.update_s)

    def _gather_weights(self) -> None:
        """Hand every replica the slices of each bucket's weights that the others have updated."""
        for stage in self.stages:
            self.stage = stage
            into_s, back_s = self.work.gather_copies_s
            # The slices of all replicas one behind another, and what PyTorch gathers for them.
            copies_bytes = 2 * sum(self.work.gathered_bytes) * bool(into_s)
            self.hold("gathered", copies_bytes)
            if into_s:
                self.compute("copy into gathered weights", into_s, "memcpy", phase="optimizer")
            for index in range(len(self.work.gathered_bytes)):
                self.waits += self._gather_bucket(index, "optimizer")
            if back_s:
                self.compute("copy from gathered weights", back_s, "memcpy", phase="optimizer")
            self.hold("gathered", -copies_bytes)

    def _gather_bucket(self, index: int, phase: str) -> list[int]:
        """Gather a bucket's weights from the replicas that updated slices of them; nothing where one holds it alone."""
        group = self._shards_of(self.work.buckets[index])
        key, size = ("weights", self.stage, group[0], index), self.work.gathered_bytes[index]
        return [self.collective("all_gather", key, size, group, phase)] if len(group) > 1 else []

    def gather_ahead(self, run: Callable[[Sequence[int]], None], op_ids: Sequence[int]) -> None:
        """Run a stage's first forward; before an operator that is the first to read a bucket's weights they are waited for.

        Then the next bucket's gather begins, as Megatron-LM's ``finish_param_sync`` does, where it has not begun.
        """
        readers, begun, begin = self.work.first_readers, self.begun.pop(self.stage, {}), 0
        left = [index for op_id in op_ids for index in readers.get(op_id, ())]
        for place, op_id in enumerate(op_ids):
            for index in readers.get(op_id, ()):
                run(op_ids[begin:place])
                self.waits += begun.pop(index, []) or self._gather_bucket(index, "forward")
                left.remove(index)
                begin = place
                if left and left[0] not in begun:
                    begun[left[0]] = self._gather_bucket(left[0], "forward")
        run(op_ids[begin:])

    def _replicas_of(self, bucket: Bucket) -> list[int]:
        """Return the ranks that hold the same parameters as a bucket's."""
        return self.expert_replicas if bucket.experts else self.data_group

    def _shards_of(self, part: Bucket | ShardedUnit) -> list[int]:
        """Return the ranks of one group that each hold, or update, a slice of a bucket or a unit."""
        return self.expert_shards if part.experts else self.shard_group

    def _reduce_partial(self) -> None:
        """Add up the gradients that each tensor-parallel rank has of its own tokens, all at once."""
        for stage in self.stages:
            self.stage = stage
            size = self.work.partial_bytes
            if not size:
                continue
            copy_s = self.work.partial_copy_s
            self.compute("copy into sum of tokens", copy_s, "memcpy", phase="backward")
            key = ("tokens", self.data, stage)
            self.waits.append(self.collective("all_reduce", key, size, self.tensor_group, "backward"))
            self.compute("copy from sum of tokens", copy_s, "memcpy", phase="backward")

    def _reduce_tied(self) -> None:
        """Add up the gradients of parameters that stages of several ranks share, as Megatron does."""
        place = self.program.rank_of_stage
        for index, tied in enumerate(self.program.tied):
            ranks = sorted({place[stage] for stage in tied.stages})
            if self.pipeline not in ranks or len(ranks) == 1:
                continue
            self.stage = next(s for s in tied.stages if s in self.stages)
            group = [self.program.rank_of(self.data, rank, self.tensor) for rank in ranks]
            key = ("tied", self.data, self.tensor, index)
            self.waits.append(self.collective("all_reduce", key, tied.size_bytes, group, "backward"))


class PartitionedRank(StagedRank):
    """Writes the tasks of one rank under DDP with ``ZeroRedundancyOptimizer``."""

    alike = (False, True, False, True)

    def update(self) -> None:
        """Update this rank's parameters, then broadcast all of its group's, owner by owner; experts behind the others."""
        partition = self.program.partitions[self.pipeline]
        place = self.data % self.program.plan.shards
        times_s = self.program.update_s[self.pipeline][place]
        for op_id in partition.operators[place]:
            self.operator(op_id, None, device_s=times_s.get(op_id))
        source, broadcasts = self.last, []
        kinds = ((self.shard_group, partition.parameters), (self.expert_shards, partition.experts))
        for ranks, parts in kinds:
            for owner, parameters in enumerate(parts if len(ranks) > 1 else ()):
                group = self.program.name_group(ranks, owner) if parameters else ""
                broadcasts += [
                    self.program.graph.add(
                        self.rank,
                        "communication",
                        "collective",
                        "broadcast",
                        after=(source,),
                        message_bytes=parameter.size_bytes,
                        phase="optimizer",
                        group=group,
                        match_id=self.program.match("update", group, index),
                    )
                    for index, parameter in enumerate(parameters)
                ]
        self.waits += broadcasts


FLAG_BYTES = 4
"""Size of that note, of which ranks with shards of the gradients take the largest (PyTorch 2.13,
``torch/distributed/tensor/_dispatch.py``, ``found_inf_reduce_handler``). DDP's ranks have the same
gradients, and ask one another for nothing."""
_ADDS_UP = "gradient accumulation"
_Elementwise = Callable[[str, Sequence[int], int], float]
"""Predicts an element-wise operator over tensors of some sizes: name, sizes [bytes], reads to time [s]."""


def cost_units(
    units: Sequence[ShardedUnit], plan: Plan, micro_steps: int, elementwise: _Elementwise, trace: Trace
) -> list[UnitWork]:
    """Return the units with the sizes of their messages and the time of their copies.

    A copy is one operator over all of a unit's parameters (``all_gather_copy_in``, ``split_with_sizes_copy``,
    ``chunk_cat``); the target counts as read. Where ``fully_shard`` brings gradients into another format, ``chunk_cat``
    does it: the trace's casts are that copy.
    """
    found = []
    added, casts = list_added_gradients(trace), trace.facts.recipe.shards_main
    for unit in units:
        shards = plan.shards_of(unit.experts)
        gathered, reduced = unit.gathered_bytes(shards), unit.reduced_bytes(shards)
        kept, whole = unit.kept_bytes(shards), not plan.sums_shards
        parts = [p.size_bytes for p in unit.parameters if p.trained and (p.name not in added or not whole)]
        gradients = parts if whole else [round(size * kept / max(sum(parts), 1)) for size in parts]
        further = micro_steps > 1
        found.append(
            UnitWork(
                unit,
                gathered,
                reduced,
                kept,
                elementwise("aten::copy_", [gathered // shards] if gathered else [], 2),
                elementwise("aten::copy_", [gathered] if gathered else [], 2),
                elementwise("aten::copy_", [reduced] if reduced and not casts else [], 2),
                elementwise("aten::add_", gradients, 2) if further else 0.0,
            )
        )
    return found


class UnitRank(StagedRank):
    """Writes the tasks of one rank under ``fully_shard``.

    ``of_stage``: places of each stage's units, its root the last. ``whole``: units whose parameters are gathered, or on
    their way. ``arriving``: unit to its all-gather that nothing has waited for. ``fence``: what the next all-gather
    waits for. ``copied_out``: copy out of forward's last all-gather, which the next but one waits for.
    """

    repeated_tasks = ("arriving", "fence", "copied_out", "reduced")
    repeated_state = ("whole", "gathering", "scattering")

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.repeats = self.repeats and not self.one_stage  # whose backward reduces what it makes
        self.units: list[UnitWork] = []
        self.of_stage: dict[int, range] = {}
        works = [(stage, self.program.stages[stage].sharded) for stage in self.stages]
        for stage, work in works:
            assert work is not None
            self.of_stage[stage] = range(len(self.units), len(self.units) + len(work.units))
            self.units += work.units
            self.sharding = work
        self.whole: set[int] = set()
        self.arriving: dict[int, int] = {}
        self.fence: list[int] = []
        self.copied_out: int | None = None
        self.gathering = 0  # result of the last all-gather of forward, kept until the next has arrived
        self.scattering = 0  # input of the last reduce-scatter, kept until the next
        self.inner = [i for places in self.of_stage.values() for i in places[:-1]]
        self.begins = {self.units[i].unit.first_forward: i for i in self.inner}
        self.ends = {self.units[i].unit.last_forward: i for i in self.inner}
        self.returns: dict[int, list[int]] = {}
        for index in reversed(range(len(self.units))):  # a root before its last unit
            self.returns.setdefault(self.units[index].unit.first_backward, []).append(index)
        self.leaves = {u.unit.last_backward: i for i, u in enumerate(self.units) if u.unit.in_graph}

    @property
    def root(self) -> int:
        """Place of the root of the stage whose action runs."""
        return self.of_stage[self.stage][-1]

    def broadcast_buffers(self) -> None:
        """Each rank keeps buffers of its own."""

    def unshard(self) -> None:
        """Ask for all parameters of a stage; who computes next waits for all of them."""
        for index in (self.root, *self.of_stage[self.stage][:-1]):
            self._gather(index, "forward")

    def reshard(self) -> None:
        """Give all parameters of a stage up."""
        for index in self.of_stage[self.stage]:
            self._give_up(index)

    def reduce_stage(self) -> None:
        """Reduce a stage's gradients behind its last micro-batch."""
        if self.one_stage or self.backwards[self.stage] < self.schedule.micro_batches:
            return
        places = self.of_stage[self.stage]
        for index in (self.root, *places[:-1]):
            self._give_up(index)
            if self.units[index].reduced_bytes:
                self._scatter(index)
        self.waits += self.reduced
        self.reduced = []
        self.hold("gathered", -self.scattering)
        self.scattering = 0

    def _run_forward(self, micro_batch: int, again: bool) -> None:
        self._await_stage("forward")
        self.fence += [] if self.last is None else [self.last]
        self._hooks("forward")
        self._gather(self.root, "forward")
        self._await(self.root, "forward")
        super()._run_forward(micro_batch, again)
        self._open_fence()
        self.hold("gathered", -self.gathering)
        self.gathering = 0

    def _await_stage(self, phase: str) -> None:
        """Wait for all parameters of a stage that the pipeline's runtime has asked for."""
        if not self.one_stage:
            for index in self.of_stage[self.stage]:
                self._await(index, phase)

    def _run_backward(self, kind: str, micro_batch: int) -> None:
        self._await_stage("backward")
        super()._run_backward(kind, micro_batch)
        if not self.one_stage:
            return
        # Autograd does not come back to these: PyTorch's last callback of backward sees to them.
        late = [i for i in self.inner if not self.units[i].unit.in_graph]
        for index in (self.root, *late):
            self._reduce(index, self.backwards[self.stage] - 1)
        last = self.backwards[self.stage] == self.schedule.micro_batches
        if last or self.program.plan.sums_shards:  # PyTorch ends each backward that reduces
            self.hold("gathered", -self.scattering)
            self.scattering = 0
        if not last and self.program.plan.sums_shards:
            self.waits += self.reduced
            self.reduced = []

    def _run(self, op_id: int, micro_batch: int, phase: str, *rest: Any, **options: Any) -> None:
        forward, backward = phase == "forward", phase == "backward"
        if options.get("again"):  # in backward parameters are there already
            forward = False
        if forward and op_id in self.begins:
            self._enter_forward(self.begins[op_id])
        super()._run(op_id, micro_batch, phase, *rest, **options)
        if forward and op_id in self.ends and self.sharding.reshards:
            self._give_up(self.ends[op_id])
        elif backward and op_id in self.leaves and self.one_stage:
            self._reduce(self.leaves[op_id], self.backwards[self.stage])

    def find_crowded(self) -> set[int]:
        """Return also the operators with which a unit's parameters come and go."""
        return super().find_crowded().union(self.begins, self.ends, self.returns, self.leaves)

    def _prepare_backward(self, op_id: int, micro_batch: int) -> None:
        for index in self.returns.get(op_id, ()):
            self._enter_backward(index)
        super()._prepare_backward(op_id, micro_batch)

    def operator(self, op_id: int, micro_batch: int | None, *rest: Any, **options: Any) -> None:
        """Add an operator; whether scaled gradients are finite is agreed upon by all shards."""
        super().operator(op_id, micro_batch, *rest, **options)
        if micro_batch is None and self.program.names[op_id] == FINDS_OVERFLOW:
            found = self._add_collective(
                "communication", "all_reduce", self.last, FLAG_BYTES, self.shard_group, "optimizer"
            )
            self.waits.append(found)

    def _enter_forward(self, index: int) -> None:
        self._hooks("forward")
        self._gather(index, "forward")
        self._await(index, "forward")

    def _enter_backward(self, index: int) -> None:
        """Wait for a unit's parameters, and ask for those of the unit whose turn is next."""
        unit = self.units[index]
        if not unit.gathered_bytes:  # a root without parameters asks for nothing
            return
        self._hooks("backward")
        self._gather(index, "backward")
        self._await(index, "backward")
        if index > self.of_stage[self.stage][0]:
            self._gather(index - 1, "backward")

    def _hooks(self, phase: str) -> None:
        cost = self.program.host.get(f"sharded_{phase}_s", 0.0)
        if not cost:
            return
        if self.program.times[0].separate_host:
            self.launched = self.program.graph.add(
                self.rank, "host", "host", "fully_shard: hooks", phase=phase, duration_s=cost
            )
        else:
            self.compute("fully_shard: hooks", cost, "host", phase=phase)

    def _give_up(self, index: int) -> None:
        if index in self.whole:
            self.hold("gathered", -self.units[index].gathered_bytes)
        self.whole.discard(index)

    def _add_collective(
        self, stream: str, name: str, after: int | None, size: int, group: list[int], phase: str
    ) -> int:
        """Add this rank's part of a collective of some of the data-parallel ranks; none of one rank alone."""
        if len(group) == 1 and after is not None:
            return after
        task = self.program.graph.add(
            self.rank,
            stream,
            "collective",
            name,
            after=(after,),
            message_bytes=size,
            phase=phase,
            group=self.program.name_group(group),
            match_id=self.repetition.number(group),
        )
        if not self.sharding.beside:
            self.waits.append(task)
        return task

    def _gather(self, index: int, phase: str) -> None:
        """Ask for a unit's parameters, unless they are there or on their way."""
        unit = self.units[index]
        if index in self.whole or not unit.gathered_bytes:
            return
        self.whole.add(index)
        self.hold("gathered", unit.gathered_bytes)
        name, fence = "copy into all-gather", self.fence
        self.fence = []
        if self.sharding.beside:
            copy: int | None = self.program.graph.add(
                self.rank, "copy", "memcpy", name, after=(self.launched, *fence), duration_s=unit.copy_in_s, phase=phase
            )
        else:  # one thread does everything in turn
            self.waits += fence
            self.compute(name, unit.copy_in_s, "memcpy", phase=phase)
            copy = self.last
        self.arriving[index] = self._add_collective(
            "communication", "all_gather", copy, unit.gathered_bytes, self._shards_of(unit.unit), phase
        )

    def _await(self, index: int, phase: str) -> None:
        """Let compute wait for a unit's parameters, and copy them out."""
        if index not in self.arriving:
            return
        if phase == "forward":
            self._open_fence()
        self.waits.append(self.arriving.pop(index))
        size = self.units[index].gathered_bytes
        self.hold("gathered", size)
        self.compute("copy out of all-gather", self.units[index].copy_out_s, "memcpy", phase=phase)
        # Forward keeps a result until the next one has been copied out, backward drops it at once.
        self.hold("gathered", -self.gathering if phase == "forward" else -size)
        self.gathering = size if phase == "forward" else self.gathering
        if phase == "forward":
            self.copied_out = self.last
        elif self.last is not None:
            self.fence.append(self.last)

    def _open_fence(self) -> None:
        """Let the next all-gather wait for the last copy out of forward, whose result it replaces."""
        self.fence += [] if self.copied_out is None else [self.copied_out]
        self.copied_out = None

    def _reduce(self, index: int, micro_step: int) -> None:
        """Give a unit's parameters up; reduce its gradients, or add them up until the last micro-step."""
        unit = self.units[index]
        self._give_up(index)
        if not unit.reduced_bytes:
            return
        self._hooks("backward")
        if self.program.plan.sums_shards:
            self._scatter(index, further=micro_step > 0)
            return
        if micro_step and unit.accumulate_s:
            self.compute(_ADDS_UP, unit.accumulate_s, phase="backward")
        if micro_step == self.schedule.micro_batches - 1:
            self._scatter(index)

    def _scatter(self, index: int, further: bool = False) -> None:
        """Reduce a unit's gradients and leave this rank its shard; a ``further`` one is added to the first."""
        unit = self.units[index]
        self.waits += self.reduced[:1]
        held = unit.reduced_bytes + further * unit.kept_bytes
        self.hold("gathered", held - self.scattering)
        self.scattering = held
        self.compute("copy into reduce-scatter", unit.reduce_copy_s, "memcpy", phase="backward")
        made = frozenset(p.gradient_storage_id for p in unit.unit.parameters)
        self.drop(made)
        self.hold("gradient", 0 if further else unit.kept_bytes)
        scattered = self._add_collective(
            "communication", "reduce_scatter", self.last, unit.reduced_bytes, self._shards_of(unit.unit), "backward"
        )
        self.reduced = [scattered]
        if len(self.shard_replicas) > 1:
            part = unit.reduced_bytes // self.program.plan.shards_of(unit.unit.experts)
            self.reduced.append(
                self._add_collective("all_reduce", "all_reduce", scattered, part, self.shard_replicas, "backward")
            )
        if self.host_optimizer:
            self.host_optimizer.send(self.reduced[-1], unit.kept_bytes, frozenset())
            self.hold("gradient", 0 if further else -unit.kept_bytes)
        elif further and self.sharding.beside:
            stream = "all_reduce" if len(self.shard_replicas) > 1 else "communication"
            self.reduced.append(
                self.program.graph.add(
                    self.rank,
                    stream,
                    "compute",
                    _ADDS_UP,
                    after=(self.reduced[-1],),
                    duration_s=unit.accumulate_s,
                    phase="backward",
                )
            )
        elif further:
            self.compute(_ADDS_UP, unit.accumulate_s, phase="backward")
