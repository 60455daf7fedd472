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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trioflow.base.plan_row import SLICED
from trioflow.parallel.programs.actions import (
    StageActions,
    add_operators,
)
from trioflow.parallel.programs.builder import ProgramBuilder
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
from trioflow.parallel.splits.pipeline import Bucket
from trioflow.parallel.splits.sharding import ShardedUnit


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
        self.begun: dict[
            int, dict[int, list[int]]
        ] = {}  # by stage, gathers of its buckets that run
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
        due += [
            after
            for before, after in pairwise(order[1:])
            if self.first_turns[before] == turn + self.pipeline
        ]
        here = self.stage
        for stage in due:
            self.stage = stage
            self.begun[stage] = {
                index: self._gather_bucket(index, "forward")
                for index in range(len(self.work.gathered_bytes))
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
            if (
                others
            ):  # right behind the scatter, which it waits for (Megatron-LM's one stream for both)
                key = ("shard", self.stage, others[0], index, done)
                part = size // len(group)
                self.reduced.append(self.collective("all_reduce", key, part, others, "backward"))
        if (
            plan.sums_shards
        ):  # each replica keeps its slice, and adds those of further micro-steps to it
            self.drop(self.work.bucket_storages[index])
            kept = (
                size * recipe.gradient_bytes / recipe.reduce_bytes / plan.shards_of(bucket.experts)
            )
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
                self.operator(
                    int(op_id), None, extra_s, device_s=self.work.update_s.get(int(op_id))
                )
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
            self.waits.append(
                self.collective("all_reduce", key, size, self.tensor_group, "backward")
            )
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
            self.waits.append(
                self.collective("all_reduce", key, tied.size_bytes, group, "backward")
            )


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
