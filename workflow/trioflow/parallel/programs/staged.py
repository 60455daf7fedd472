"""One rank's step: the actions of its row of the schedule, the gradients' sums, the update.

Operators run in their order, messages between stages and collectives go where the schedule and the split put them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from trioflow.base.plan_row import SLICED
from trioflow.parallel.memory.profile import AGAIN
from trioflow.parallel.programs.builder import ProgramBuilder, RankProgram, StageWork, attend, multiply
from trioflow.parallel.programs.offload import ActivationMover, HostOptimizer
from trioflow.parallel.programs.together import run_together
from trioflow.parallel.schedules.table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE_KINDS,
    FORWARD,
    FORWARD_ONLY,
    MESSAGE_KINDS,
    RECV_B,
    RECV_F,
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
from trioflow.parallel.splits.tensor_split import (
    AFTER,
    BEFORE,
    CONTEXT,
    EXPERT_DOMAIN,
    EXPERT_NODES,
    EXPERT_SLICES,
    EXPERTS,
    TENSOR,
    Exchange,
)
from trioflow.parallel.task_graph import BuilderMark

FINDS_OVERFLOW = "aten::_amp_foreach_non_finite_check_and_unscale_"
"""Operator of ``GradScaler`` that unscales gradients and notes whether any is not finite."""
_PHASES = {FORWARD: "forward", RECV_F: "forward", SEND_F: "forward"}


class _Recorded(NamedTuple):
    """An action's tasks for a micro-batch, and what further ones depend on behind them."""

    micro_batch: int
    begin: BuilderMark
    end: BuilderMark
    changes: list[tuple[int, str, float]]  # what the rank held more, or less, from a task on
    dropped: list[tuple[int, frozenset[int]]]  # gradients that it dropped before a task
    again: list[tuple[int, int]]  # stages and regions that ran again
    state: dict[str, Any]  # the rank's, tasks by how long before the next one they are


def _move(tasks: Any, shift: int) -> Any:
    """Return tasks further on: one or none, several, or those of some keys."""
    if isinstance(tasks, dict):
        return {key: task + shift for key, task in tasks.items()}
    if isinstance(tasks, list):
        return [task + shift for task in tasks]
    return None if tasks is None else tasks + shift


class StagedRank(RankProgram):
    """Writes one rank's tasks by its row of the schedule.

    Kinds of plan change what goes before an operator of a micro-batch (``enter``) and behind it (``leave``), or one of
    the other methods. ``dispatches``: split layers cost the host what PyTorch's sharded tensors do. ``repeats``:
    micro-batches of one size run the same tasks, which are repeated; ``repeated_tasks`` and ``repeated_state`` name
    attributes that they depend on and change. ``in_rows``: operators with nothing between them may be added at once.
    ``launches``: forward operators are launched by a task of the host even where it does not run ahead.
    """

    alike = (False, True, True, True)
    dispatches = True
    repeats = True
    repeated_tasks: tuple[str, ...] = ("last", "launched", "waits", "read_by_host")
    repeated_state: tuple[str, ...] = ()
    in_rows = True
    launches = False

    def __init__(self, program: ProgramBuilder, data: int, pipeline: int, tensor: int) -> None:
        super().__init__(program, data, pipeline, tensor)
        self.schedule = program.schedule
        self.stages = program.schedule.stages_of_rank(pipeline)
        self.one_stage = program.schedule.stages == 1
        self.stage = self.stages[0]
        self.received: dict[Action, int] = {}
        self.unawaited: list[int] = []
        self.read_by_host: list[int] = []  # what its next launch waits for
        self.beside: dict[int, list[int]] = {}  # exchanges that are waited for behind an operator
        self.turns: list[int] = []  # exchanges of experts, where two actions run together
        self.ended: dict[str, int] = {}  # last computes of two such, by phase
        self.kind_before = ""
        self.forwards: set[Action] = set()
        self.backwards: Counter[int] = Counter()
        self.repeated: set[tuple[int, int, int]] = set()
        self.reduced: list[int] = []
        self.due: dict[int, list[int]] = {}  # buckets that an operator of the running backward makes ready
        self.begun: dict[int, dict[int, list[int]]] = {}  # by stage, gathers of its buckets that run
        # Of a forward that gathers weights: buckets by their first reader, and those that are still to be read
        self.readers: dict[int, list[int]] = {}
        self.gathered: list[int] = []
        turns = [one.stage for one in leaves(self.schedule.rows[pipeline]) if one.kind == FORWARD]
        self.first_turns = {stage: turns.index(stage) for stage in dict.fromkeys(turns)}
        mode, offloaded, updates = program.mode, program.offloaded, program.plan.offload == "optimizer"
        self.mover = ActivationMover(self, offloaded) if offloaded and mode != FORWARD_ONLY else None
        self.host_optimizer = HostOptimizer(self) if updates and mode == TRAIN else None
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}
        self._crowded: dict[int, set[int]] = {}
        plan = program.plan
        self.tensor_group = [program.rank_of(data, pipeline, t) for t in range(plan.tensor)]
        self.data_group = [program.rank_of(d, pipeline, tensor) for d in range(plan.replicas)]
        # Replicas that share what is sharded next to each other; those of another group hold the same share.
        first, shards = data - data % plan.shards, plan.shards
        self.shard_group = self.data_group[first : first + shards]
        self.shard_replicas = self.data_group[data % shards :: shards]
        first = data - data % plan.context
        self.context_group = self.data_group[first : first + plan.context]
        # Experts' own grid over the ranks of a stage: those that cut one expert next to each other.
        first, end = (program.rank_of(0, p, 0) for p in (pipeline, pipeline + 1))
        grid = np.arange(first, end).reshape(-1, plan.expert, plan.expert_cut)
        group, owner, cut = np.argwhere(grid == self.rank)[0].tolist()
        self.expert_group, self.expert_replicas = grid[group, :, cut].tolist(), grid[:, owner, cut].tolist()
        # Those of them in this rank's group, and the ranks of other groups that hold the same share.
        count = plan.shards_of(experts=True)
        self.expert_shards = self.expert_replicas[group - group % count :][:count]
        domains, hop = plan.expert_hops
        self.exchange_groups = {
            TENSOR: self.tensor_group,
            CONTEXT: self.context_group,
            EXPERTS: self.expert_group,
            EXPERT_SLICES: grid[group, owner].tolist(),
            EXPERT_NODES: self.expert_group[owner % hop :: hop] if domains else [],
            EXPERT_DOMAIN: self.expert_group[owner - owner % hop :][:hop] if domains else [],
        }

    @property
    def work(self) -> StageWork:
        """The work of the stage whose action runs."""
        return self.program.stages[self.stage]

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
            elif action.kind in MESSAGE_KINDS:
                self.move(action)
            elif action.kind == UNSHARD:
                self.unshard()
            elif action.kind == RESHARD:
                self.reshard()
            else:
                self.await_sends(bool(self.schedule.traits.waits))
                self.reduce_stage()
                if self.work.scale_s:
                    self.compute("gradient scaling", self.work.scale_s, phase="backward")

    def add(self, stream: str, kind: str, name: str, **fields: Any) -> int:
        """Add one task of the stage whose action runs and return its ``task_id``; see ``TaskGraphBuilder.add``."""
        return super().add(stream, kind, name, stage=self.stage_field(), **fields)

    def compute(self, name: str, duration_s: float, kind: str = "compute", **fields: Any) -> None:
        """Add one task to the compute stream; it waits for what was handed to `waits`."""
        self.last = self.add("compute", kind, name, after=self.waits, duration_s=duration_s, **fields)
        self.waits = []

    def stage_field(self) -> int | None:
        """Return the stage that tasks name; None where there is but one."""
        return None if self.one_stage else self.stage

    def operators(
        self,
        op_ids: Sequence[int],
        micro_batch: int | None,
        phase: str,
        called: str = "{}",
        extra_s: Any = 0.0,
        part: float = 1.0,
        own_s: Mapping[int, float] = {},
    ) -> None:
        """Add operators that wait for nothing but one another, each behind its launch where the host runs beside the device.

        ``called``: their names' pattern; ``extra_s``: more host time, of all or of each [s]; ``part``: of their time
        that they take; ``own_s``: of those whose time is not the program's [s].
        """
        if not op_ids:
            return
        program, count, first = self.program, len(op_ids), self.program.graph.next_task
        times = program.times[self.times_of(micro_batch)]
        names, (device_s, host_s) = program.name_operators(called), times.lists
        extras_s = extra_s if isinstance(extra_s, list) else [extra_s] * count
        launches_s = [host_s[op_id] + more_s for op_id, more_s in zip(op_ids, extras_s, strict=True)]
        times_s = [own_s.get(op_id, device_s[op_id] * part) for op_id in op_ids]
        fields: dict[str, Any] = {"phase": phase, "micro_batch": micro_batch, "stage": self.stage_field()}
        edges = [(first, task) for task in dict.fromkeys(self.waits)]
        if times.separate_host or (self.launches and micro_batch is not None and phase == "forward"):
            # Launch and operator in turn; each operator waits for its launch.
            before = self.read_by_host if times.separate_host else (self.last, *self.waits)
            edges = [(first, task) for task in dict.fromkeys(before) if task is not None]
            edges += [(first + 1, task) for task in (*dict.fromkeys(self.waits), first)]
            edges += [(launch + 1, launch) for launch in range(first + 2, first + 2 * count, 2)]
            self.launched, self.read_by_host = first + 2 * count - 2, []
            columns = {
                "stream": ["host", "compute"] * count,
                "name": [name for op_id in op_ids for name in names[op_id]],
                "op_id": [op_id for op_id in op_ids for _ in names[op_id]],
                "duration_s": [*chain(*zip(launches_s, times_s, strict=True))],
            }
            columns["kind"], count = columns["stream"], 2 * count
        else:
            columns = {
                "stream": "compute",
                "kind": "compute",
                "name": [names[op_id][1] for op_id in op_ids],
                "op_id": [*op_ids],
                "duration_s": [time_s + launch_s for time_s, launch_s in zip(times_s, launches_s, strict=True)],
            }
        program.graph.add_rows(count, [*chain(*edges)], rank=self.rank, **columns, **fields)
        self.last, self.waits = first + count - 1, []

    def times_of(self, micro_batch: int | None) -> int:
        """Return which of the program's times hold for a micro-batch."""
        return micro_batch or 0

    def collective(
        self,
        name: str,
        key: tuple[Any, ...],
        size_bytes: int,
        group: list[int],
        phase: str,
        stream: str = "communication",
        turn: int = 0,
    ) -> int:
        """Add this rank's part of a collective, after all computed so far; ``key``, ``turn``: see ``ProgramBuilder.match``."""
        return self.add(
            stream,
            "collective",
            name,
            after=(self.last, *self.waits),
            message_bytes=size_bytes,
            phase=phase,
            group=self.program.name_group(group),
            match_id=self.program.match(*key, turn=turn),
        )

    def move(self, action: Action) -> None:
        """Add a send to, or a receive from, a neighbouring stage."""
        direction, sends = _PHASES.get(action.kind, "backward"), action.kind in (SEND_F, SEND_B)
        step = 1 if action.kind in (SEND_F, RECV_B) else -1
        boundary = min(action.stage, action.stage + step)
        assert action.micro_batch is not None
        early = not sends and self.schedule.traits.one_process
        task = self.add(
            "send" if sends else "receive",
            "send" if sends else "recv",
            f"{'send' if sends else 'recv'} {direction}",
            after=() if early else (self.ended.get(direction, self.last) if sends else self.last,),
            # A gradient comes back as large as the activation that went.
            message_bytes=self.program.stages[boundary].send_bytes[action.micro_batch],
            peer=self.program.rank_of(self.data, self.program.rank_of_stage[action.stage + step], self.tensor),
            phase=direction,
            micro_batch=action.micro_batch,
            match_id=self.program.match("p2p", boundary, direction, self.data, self.tensor, turn=action.micro_batch),
        )
        if sends:
            self.unawaited.append(task)
        else:
            self.received[action] = task

    def compute_action(self, action: Action) -> None:
        """Run one action's operators once what they need is there."""
        assert action.micro_batch is not None
        again = action.kind == FORWARD and action in self.forwards
        if action.kind == FORWARD and not again:
            self._begin_gathers(len(self.forwards))
        if not again:
            self._await_messages(action)
        if action.kind == FORWARD:
            self.forwards.add(action)
            self._run_forward(action.micro_batch, again)
        else:
            self._run_backward(action.kind, action.micro_batch)
        # In a run of forwards, or of backwards, a send is waited for after the next of them.
        self.await_sends(self.schedule.traits.waits == "each")
        self.kind_before = action.kind

    def _await_messages(self, action: Action) -> None:
        """Let the next task wait for the action's input, and for a send that runs with it."""
        receive = RECV_F if action.kind == FORWARD else RECV_B
        task = None
        if action.kind != BACKWARD_WEIGHT:
            task = self.received.pop(Action(action.stage, receive, action.micro_batch), None)
        if task is not None:
            self.waits.append(task)
        if self.program.messages_hold_host:
            self.read_by_host += [one for one in (task, self.last) if one is not None]
        self.await_sends(bool(self.schedule.traits.waits) and action.kind != self.kind_before)

    def await_sends(self, due: bool = True) -> None:
        """Let the next task wait for every send so far, where that is due."""
        if due:
            self.waits += self.unawaited
            self.unawaited.clear()

    def _chunk_overhead(self, phase: str, micro_batch: int) -> None:
        cost = self.program.host.get("pipeline_micro_batch_s", 0.0)
        if not self.one_stage and cost:
            self.compute("pipeline: chunk", cost, "host", phase=phase, micro_batch=micro_batch)
        beyond_s = self.program.host.get("micro_batch_s", 0.0)
        if beyond_s and phase == "forward":
            fields: dict[str, Any] = {"phase": phase, "micro_batch": micro_batch}
            if self.program.times[self.times_of(micro_batch)].separate_host:
                self.add("host", "host", "micro-batch: engine", duration_s=beyond_s, **fields)
            self.compute("micro-batch: engine", beyond_s, "host", **fields)

    def _run_forward(self, micro_batch: int, again: bool) -> None:
        if again:
            self._run_operators((FORWARD, again), self.work.recomputed, micro_batch, self.repeats)
            return
        self._chunk_overhead("forward", micro_batch)
        first = sum(action.stage == self.stage for action in self.forwards) == 1
        ahead = first and self.program.plan.gather_overlap and self.program.mode == TRAIN
        op_ids = self.work.forward
        self.readers = self.work.first_readers if ahead else {}
        self.gathered = [index for op_id in op_ids for index in self.readers.get(op_id, ())] if ahead else []
        self._run_operators((FORWARD, again), op_ids, micro_batch, self.repeats and not ahead)
        self.readers = {}
        self.begun.pop(self.stage, None)

    def _run_operators(self, what: tuple[str, bool], op_ids: Sequence[int], micro_batch: int, repeats: bool) -> None:
        """Run an action's operators; all but the first, which waits for what the action waits for, may be repeated tasks."""
        if not repeats or self.mover or self.program.plan.expert_overlap or len(op_ids) < 2:
            self._run_all(what, micro_batch, op_ids)
            return
        self._run_all(what, micro_batch, op_ids[:1])
        graph, changes, dropped = self.program.graph, self.memory.changes, self.memory.dropped
        key = (*what, self.stage, self.program.factors[micro_batch], str(self._note()))
        recorded = self._recorded.get(key)
        if recorded is None:
            begin, known, before = graph.mark(), (len(changes), len(dropped)), set(self.repeated)
            self._run_all(what, micro_batch, op_ids[1:])
            again = [(stage, index) for stage, index, _ in self.repeated - before]
            remaining = changes[known[0] :], dropped[known[1] :]
            self._recorded[key] = _Recorded(micro_batch, begin, graph.mark(), *remaining, again, self._note())
            return
        shift = graph.repeat(recorded.begin, recorded.end, micro_batch, micro_batch - recorded.micro_batch)
        changes += [(task + shift, name, size) for task, name, size in recorded.changes]
        dropped += [(task + shift, gradients) for task, gradients in recorded.dropped]
        self.repeated.update((*place, micro_batch) for place in recorded.again)
        for name, value in recorded.state.items():
            setattr(self, name, _move(value, graph.next_task) if name in self.repeated_tasks else copy(value))

    def _note(self) -> dict[str, Any]:
        """Return what further tasks depend on, tasks by how long before the next one they are."""
        tasks = {name: _move(getattr(self, name), -self.program.graph.next_task) for name in self.repeated_tasks}
        return tasks | {name: copy(getattr(self, name)) for name in self.repeated_state}

    def _run_all(self, what: tuple[str, bool], micro_batch: int, op_ids: Sequence[int]) -> None:
        """Run operators of a kind of action one after the other, those with nothing between them at once."""
        kind, again = what
        phase, called = ("backward", AGAIN + "{}") if again else (_PHASES.get(kind, "backward"), "{}")
        if self.stage not in self._crowded:
            self._crowded[self.stage] = self.find_crowded()
        # These need other work around them; the rest are added in one go. A region runs before the first that needs it.
        needed = {} if again else {i: op_id for op_id in reversed(op_ids) for i in self._needs(op_id, micro_batch)}
        crowded = {*self._crowded[self.stage], *self.due, *self.readers, *needed.values()}
        for alone, some in groupby(op_ids, (crowded if self.in_rows else set(op_ids)).__contains__):
            if not alone:
                self.operators(list(some), micro_batch, phase, called)
                continue
            for op_id in some:
                if not again:
                    self.enter(op_id, micro_batch)
                self._run(op_id, micro_batch, kind, phase, again, called)
                if not again:
                    self.leave(op_id, micro_batch)

    def find_crowded(self) -> set[int]:
        """Return the operators of the stage beside which messages or copies go, or that run in parts."""
        work = self.work
        exchanges = (one for beside in (work.before, work.after) for one in chain(*beside.values()))
        crowded = {*work.before, *work.after, *work.attentions, *work.input_share}
        return crowded.union((one.beside for one in exchanges), self.mover.operators if self.mover else ())

    def enter(self, op_id: int, micro_batch: int) -> None:
        """Bring back, or compute again, what an operator needs and the device has not kept."""
        for index in self.readers.get(op_id, ()):
            self._await_weights(index)
        if self.mover:
            self.mover.before(op_id, micro_batch)
        for index in self._needs(op_id, micro_batch):
            self.repeated.add((self.stage, index, micro_batch))
            self._run_all((FORWARD, True), micro_batch, self.work.regions[index].operators)

    def leave(self, op_id: int, micro_batch: int) -> None:
        """Do what is due behind an operator."""
        if self.mover:
            self.mover.after(op_id, micro_batch)
        for index in self.due.pop(op_id, ()):
            self.reduce_bucket(index)

    def _needs(self, op_id: int, micro_batch: int) -> list[int]:
        """Return the places of the regions that run again before an operator of backward."""
        regions = self.work.regions_before.get(op_id, ())
        return [index for index in regions if (self.stage, index, micro_batch) not in self.repeated]

    def _run(self, op_id: int, micro_batch: int, kind: str, phase: str, again: bool, called: str) -> None:
        """Run one operator between the collectives that go before and after it."""
        reduces, part = True, 1.0
        if kind in (BACKWARD_INPUT, BACKWARD_WEIGHT) and op_id in self.work.input_share:
            # One operator of both I and W: each time for one kind of gradient.
            reduces, share, called = kind == BACKWARD_INPUT, self.work.input_share[op_id], f"{called} ({kind})"
            part = share if reduces else 1.0 - share
        before = self.work.before.get(op_id, []) if reduces else []
        after = self.work.after.get(op_id, []) if reduces else []
        key = (op_id, again)
        for index, exchange in enumerate(before):
            self._exchange(exchange, (*key, "before", index), micro_batch, phase)
        host_of = "forward" if again else phase
        dispatch_s = self.program.host.get(f"tensor_parallel_{host_of}_s", 0.0) * self.dispatches
        extra_s = dispatch_s * sum(exchange.group == TENSOR for exchange in (*before, *after))
        inside = next((one for one in (*before, *after) if one.blocks > 1), None)
        if inside:
            place = (TENSOR, self.data, *key, "block")
            multiply(self, inside, inside in before, place, op_id, micro_batch, phase, called, extra_s, part)
        elif op_id in self.work.attentions:
            attend(self, op_id, micro_batch, again, phase, called, extra_s, part)
        else:
            self.operators([op_id], micro_batch, phase, called, extra_s, part)
        self.waits += self.beside.pop(op_id, [])
        for index, exchange in enumerate(after):
            self._exchange(exchange, (*key, "after", index), micro_batch, phase)

    def _exchange(self, exchange: Exchange, key: tuple[Any, ...], micro_batch: int, phase: str) -> None:
        """Run a collective beside an operator, and the copy that brings its buffer into order."""
        if exchange.blocks > 1:  # goes with the operator itself
            return
        of_experts = exchange.group not in (TENSOR, CONTEXT)
        copy_s = exchange.copies_s[micro_batch] if exchange.copies_s else 0.0
        of = {"phase": phase, "micro_batch": micro_batch}
        size = exchange.sizes_bytes[micro_batch]
        if of_experts:  # what leaves and what arrives are two buffers
            self.hold("message", size)
        if copy_s and exchange.copied == BEFORE:
            self.compute(f"copy into {exchange.collective}", copy_s, "memcpy", **of)
        group = self.exchange_groups[exchange.group]
        place = (TENSOR, self.data) if exchange.group == TENSOR else (exchange.group, group[0])
        # NCCL has a stream for each communicator: what replicas gather and reduce holds up none of these.
        task = self.collective(exchange.collective, (*place, *key), size, group, phase, exchange.group, micro_batch)
        beside = exchange.beside
        (self.waits if beside < 0 else self.beside.setdefault(beside, [])).append(task)
        self.turns += [task] if of_experts else []
        if exchange.awaited and phase == "forward":
            self.read_by_host.append(task)
        if copy_s and exchange.copied == AFTER:
            self.compute(f"copy out of {exchange.collective}", copy_s, "memcpy", **of)
        if of_experts:
            self.hold("message", -size)

    def _run_backward(self, kind: str, micro_batch: int) -> None:
        """Compute, hand over buckets after a stage's last micro-batch, add gradients up."""
        work, done, makes_gradients = self.work, self.backwards[self.stage], kind != BACKWARD_INPUT
        op_ids = {BACKWARD: work.backward, BACKWARD_INPUT: work.backward_input, BACKWARD_WEIGHT: work.backward_weight}[
            kind
        ]
        self._chunk_overhead("backward", micro_batch)
        last = done == self.schedule.micro_batches - 1
        buckets = work.buckets if makes_gradients and (last or self.program.plan.reduces_each) else []
        swapped, self.due = self.program.split.swapped, {}
        ready = accumulate((swapped.get(b.ready_after_op_id, b.ready_after_op_id) for b in buckets), max)
        places = np.searchsorted(np.sort(op_ids), [*ready]).tolist() if buckets else []
        for index, place in enumerate(places):
            self.due.setdefault(op_ids[place] if place < len(op_ids) else -1, []).append(index)
        self._run_operators((kind, False), op_ids, micro_batch, self.repeats and not buckets)
        for index in self.due.pop(-1, ()):
            self.reduce_bucket(index)
        if done and makes_gradients and work.accumulate_s:
            self.compute("gradient accumulation", work.accumulate_s, phase="backward", micro_batch=micro_batch)
        self.backwards[self.stage] += makes_gradients
        if buckets and not last:  # DDP sends buffers before the next forward, as it does behind each exchange
            self._end_buckets()
            self.broadcast_buffers()

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

    def reduce_bucket(self, index: int) -> None:
        """Copy a bucket's gradients in and start its all-reduce; send them to the host if asked to."""
        bucket = self.work.buckets[index]
        ready, size = self.last, bucket.size_bytes
        plan, recipe, done = self.program.plan, self.program.recipe, self.backwards[self.stage]
        scatters = plan.sharding in SLICED and plan.sharding not in recipe.sums_whole
        if plan.replicas > 1:
            if self.work.bucket_copy_s:
                copy_s = self.work.bucket_copy_s[index]
                self.compute(f"copy into bucket {index}", copy_s, "memcpy", phase="backward")
            group, others = self.expert_replicas if bucket.experts else self.data_group, list[int]()
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
        self.await_sends(not self.schedule.traits.one_process)
        if self.program.mode == TRAIN:
            self.update()
        if self.program.tail_s or self.waits:
            self.compute("host: end of step", self.program.tail_s, "host")

    def update(self) -> None:
        """Run the optimizer."""
        if self.host_optimizer:
            self.host_optimizer.update()
            return
        if self.program.partitions:
            self._update_partition()
            return
        update_s, names = self.program.host.get("tensor_parallel_update_s", 0.0), self.program.names
        for stage in self.stages:
            self.stage = stage
            op_ids = self.work.optimizer
            ends = [place + 1 for place, op_id in enumerate(op_ids) if names[op_id] == FINDS_OVERFLOW]
            for some in np.split(op_ids, ends):  # behind the search for overflow shards may agree
                extras_s = [update_s * (op_id in self.program.split.sharded_updates) for op_id in some.tolist()]
                self.operators(some.tolist(), None, "optimizer", extra_s=extras_s, own_s=self.work.update_s)
        if not self.program.plan.gather_overlap:
            self._gather_weights()

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

    def _await_weights(self, index: int) -> None:
        """Wait for a bucket's weights before the operator that is the first to read one, and gather the next bucket's.

        So Megatron-LM's ``finish_param_sync`` does, where that gather has not begun.
        """
        begun = self.begun.setdefault(self.stage, {})
        self.waits += begun.pop(index, []) or self._gather_bucket(index, "forward")
        self.gathered.remove(index)
        for following in self.gathered[:1]:
            if following not in begun:
                begun[following] = self._gather_bucket(following, "forward")

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

    def _update_partition(self) -> None:
        """Update this rank's parameters, then broadcast all of its group's, owner by owner; experts behind the others."""
        partition = self.program.partitions[self.pipeline]
        place = self.data % self.program.plan.shards
        times_s = self.program.update_s[self.pipeline][place]
        self.operators(list(partition.operators[place]), None, "optimizer", own_s=times_s)
        source, broadcasts = self.last, []
        kinds = ((self.shard_group, partition.parameters), (self.expert_shards, partition.experts))
        for ranks, parts in kinds:
            for owner, parameters in enumerate(parts if len(ranks) > 1 else ()):
                group = self.program.name_group(ranks, owner) if parameters else ""
                broadcasts += [
                    self.add(
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
