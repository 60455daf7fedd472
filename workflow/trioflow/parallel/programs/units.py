"""Sharded data parallelism: one rank's tasks under ``fully_shard``.

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
from typing import Any

from trioflow.base.experiments import Plan
from trioflow.parallel.programs.builder import UnitWork
from trioflow.parallel.programs.staged import FINDS_OVERFLOW, StagedRank
from trioflow.parallel.schedules.table import Action
from trioflow.parallel.splits.pipeline import list_added_gradients
from trioflow.parallel.splits.sharding import ShardedUnit
from trioflow.trace.store import Trace

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
    costs = []
    added, facts = list_added_gradients(trace), trace.facts
    for unit in units:
        shards = plan.shards_of(unit.experts)
        made = sum(p.padded_bytes(shards) for p in unit.parameters if p.trained)
        gathered, reduced = sum(p.padded_bytes(shards) for p in unit.parameters), round(made * facts.reduced_width)
        kept, whole = round(made * facts.kept_width / shards), not plan.sums_shards
        parts = [p.size_bytes for p in unit.parameters if p.trained and (p.name not in added or not whole)]
        gradients = parts if whole else [round(size * kept / max(sum(parts), 1)) for size in parts]
        further = micro_steps > 1
        costs.append(
            UnitWork(
                unit,
                gathered,
                reduced,
                kept,
                elementwise("aten::copy_", [gathered // shards] if gathered else [], 2),
                elementwise("aten::copy_", [gathered] if gathered else [], 2),
                elementwise("aten::copy_", [reduced] if reduced and not facts.recipe.shards_main else [], 2),
                elementwise("aten::add_", gradients, 2) if further else 0.0,
            )
        )
    return costs


class UnitRank(StagedRank):
    """Writes the tasks of one rank under ``fully_shard``.

    ``of_stage``: places of each stage's units, its root the last. ``whole``: units whose parameters are gathered, or on
    their way. ``arriving``: unit to its all-gather that nothing has waited for. ``fence``: what the next all-gather
    waits for. ``copied_out``: copy out of forward's last all-gather, which the next but one waits for. ``asked``:
    exchanges of units so far in the action that runs, or between actions.
    """

    repeated_tasks = (*StagedRank.repeated_tasks, "arriving", "fence", "copied_out", "reduced")
    repeated_state = ("whole", "gathering", "scattering", "asked", "summed")

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.repeats = self.repeats and not (self.one_stage and self.host_optimizer)
        self.summed = (False, False)  # whether the running backward adds gradients, and whether it is the last
        self.units: list[UnitWork] = []
        self.of_stage: dict[int, range] = {}
        for stage in self.stages:
            begin = len(self.units)
            self.units += self.program.stages[stage].units
            self.of_stage[stage] = range(begin, len(self.units))
        self.action: tuple[Any, ...] = ()
        self.turn = self.asked = 0
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

    def compute_action(self, action: Action) -> None:
        """Run one action; its exchanges are counted by themselves, so that other micro-batches may repeat them."""
        between, self.asked = self.asked, 0
        self.action, self.turn = (action.kind, action.stage, action in self.forwards), action.micro_batch or 0
        super().compute_action(action)
        self.action, self.turn, self.asked = (), 0, between

    def _run_operators(self, *action: Any) -> None:
        """Run them beside what other stages have gathered, and beside a fence that nothing will pass."""
        here = {index for index in self.of_stage[self.stage] if self.units[index].gathered_bytes}
        whole, arriving = self.whole - here, {i: self.arriving[i] for i in self.arriving.keys() - here}
        self.whole, self.arriving = self.whole & here, {i: self.arriving[i] for i in self.arriving.keys() & here}
        fence, self.fence = ([], self.fence) if self.whole < here else (self.fence, [])
        super()._run_operators(*action)
        self.whole, self.arriving, self.fence = self.whole | whole, self.arriving | arriving, fence + self.fence

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
        done, last = self.backwards[self.stage], self.schedule.micro_batches - 1
        self.summed = (self.one_stage and done > 0, self.one_stage and done == last)
        super()._run_backward(kind, micro_batch)
        self.summed = (False, False)
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

    def enter(self, op_id: int, micro_batch: int) -> None:
        """Wait also for the parameters of a unit that begins here."""
        for index in self.returns.get(op_id, ()):
            self._enter_backward(index)
        super().enter(op_id, micro_batch)
        if op_id in self.begins:
            self._hooks("forward")
            self._gather(self.begins[op_id], "forward")
            self._await(self.begins[op_id], "forward")

    def leave(self, op_id: int, micro_batch: int) -> None:
        """Give up also the parameters, or reduce the gradients, of a unit that ends here."""
        if op_id in self.ends and self.program.plan.sharding != "zero2":
            self._give_up(self.ends[op_id])
        elif op_id in self.leaves and self.one_stage:
            self._reduce(self.leaves[op_id], self.backwards[self.stage])
        super().leave(op_id, micro_batch)

    def find_crowded(self) -> set[int]:
        """Return also the operators with which a unit's parameters come and go."""
        return super().find_crowded().union(self.begins, self.ends, self.returns, self.leaves)

    def operators(self, op_ids: Sequence[int], micro_batch: int | None, *rest: Any, **options: Any) -> None:
        """Add operators; whether scaled gradients are finite is agreed upon by all shards."""
        super().operators(op_ids, micro_batch, *rest, **options)
        if micro_batch is None and op_ids and self.program.names[op_ids[-1]] == FINDS_OVERFLOW:
            group = self.shard_group
            self.waits.append(self._add_collective("all_reduce", self.last, FLAG_BYTES, group, "optimizer"))

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
            self.launched = self.add("host", "host", "fully_shard: hooks", phase=phase, duration_s=cost)
        else:
            self.compute("fully_shard: hooks", cost, "host", phase=phase)

    def _give_up(self, index: int) -> None:
        if index in self.whole:
            self.hold("gathered", -self.units[index].gathered_bytes)
        self.whole.discard(index)

    def _add_collective(
        self, name: str, after: int | None, size: int, group: list[int], phase: str, stream: str = "communication"
    ) -> int:
        """Add this rank's part of a collective of some of the data-parallel ranks; none of one rank alone."""
        if len(group) == 1 and after is not None:
            return after
        self.asked += 1
        task = self.add(
            stream,
            "collective",
            name,
            after=(after,),
            message_bytes=size,
            phase=phase,
            group=self.program.name_group(group),
            match_id=self.program.match("units", *group, *self.action, self.asked, turn=self.turn),
        )
        if not self.program.streams:
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
        if self.program.streams:
            after = (self.launched, *fence)
            copy: int | None = self.add("copy", "memcpy", name, after=after, duration_s=unit.copy_in_s, phase=phase)
        else:  # one thread does everything in turn
            self.waits += fence
            self.compute(name, unit.copy_in_s, "memcpy", phase=phase)
            copy = self.last
        group = self._shards_of(unit.unit)
        self.arriving[index] = self._add_collective("all_gather", copy, unit.gathered_bytes, group, phase)

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
        size_bytes = unit.reduced_bytes + further * unit.kept_bytes
        self.hold("gathered", size_bytes - self.scattering)
        self.scattering = size_bytes
        self.compute("copy into reduce-scatter", unit.reduce_copy_s, "memcpy", phase="backward")
        made = frozenset(p.gradient_storage_id for p in unit.unit.parameters)
        self.drop(made)
        self.hold("gradient", 0 if further else unit.kept_bytes)
        group, of = self._shards_of(unit.unit), {"phase": "backward"}
        self.reduced = [self._add_collective("reduce_scatter", self.last, unit.reduced_bytes, group, **of)]
        if len(self.shard_replicas) > 1:
            part = unit.reduced_bytes // self.program.plan.shards_of(unit.unit.experts)
            after, group = self.reduced[-1], self.shard_replicas
            self.reduced.append(self._add_collective("all_reduce", after, part, group, **of, stream="all_reduce"))
        if self.host_optimizer:
            self.host_optimizer.send(self.reduced[-1], unit.kept_bytes, frozenset())
            self.hold("gradient", 0 if further else -unit.kept_bytes)
        elif further and self.program.streams:
            stream = "all_reduce" if len(self.shard_replicas) > 1 else "communication"
            time_s, ready = unit.accumulate_s, (self.reduced[-1],)
            self.reduced.append(self.add(stream, "compute", _ADDS_UP, after=ready, duration_s=time_s, **of))
        elif further:
            self.compute(_ADDS_UP, unit.accumulate_s, **of)
