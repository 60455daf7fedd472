"""Actions of a schedule on one rank: operators in their order, messages between stages, what waits for what.

Tasks written many at once: operators with nothing between them, and micro-batches that are like another.

What lies in the host's memory: the optimizer with its state, or activations between their uses.

``optimizer``: gradients go to the host in a stream ``offload`` as soon as they are final (a bucket once it is reduced,
a sharded unit once scattered). The host updates all at once, and the parameters come back.

``activations``: what a unit keeps for backward goes to the host after its forward, beside the next unit's, and comes
back beside the backward of the unit behind it. Two units' are on the device at any time, so the last two never leave
it.

The host updates as one fused operator: parameters, gradients and states read once, parameters and states written once.
Copies run at the rate of a rank's own link, in both directions at once; that ranks may share the host's memory is in
the platform's rate or nowhere.

References: J. Ren et al., ZeRO-Offload, arXiv 2101.06840; activations: PyTorch ``torch.autograd.graph.save_on_cpu``,
here overlapped as in M. Rhu et al., vDNN, arXiv 1602.08124.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np

from trioflow.parallel.memory.profile import AGAIN
from trioflow.parallel.programs.builder import (
    UNITS_ON_DEVICE,
    HostRates,
    OffloadedActivations,
    ProgramBuilder,
    RankProgram,
    StageWork,
    attend,
    multiply,
)
from trioflow.parallel.schedules.table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FORWARD_ONLY,
    RECV_B,
    RECV_F,
    SEND_F,
    TRAIN,
    Action,
)
from trioflow.parallel.splits.pipeline import Bucket
from trioflow.parallel.splits.tensor_split import (
    AFTER,
    BEFORE,
    EXPERT_DOMAIN,
    EXPERT_NODES,
    EXPERT_SLICES,
    EXPERTS,
    TENSOR,
    StageExchange,
)
from trioflow.parallel.task_graph import Mark


def add_operators(
    rank: StageActions,
    op_ids: Sequence[int],
    micro_batch: int | None,
    phase: str = "",
    prefix: str = "",
    device_s: Mapping[int, float] | None = None,
) -> None:
    """Add operators that wait for nothing but one another; ``device_s``: of those whose time is not the program's [s]."""
    program, own_s, rest = rank.program, device_s or {}, list(op_ids[1:])
    for op_id in op_ids[:1]:
        name = prefix + program.names[op_id]
        rank.operator(op_id, micro_batch, 0.0, 1.0, name, phase, own_s.get(op_id))
    if not rest:
        return
    times, graph = program.times[rank.times_of(micro_batch)], program.graph
    on_device_s, host_s = times.device_s[rest], times.host_s[rest]
    if own_s:
        pairs = zip(rest, on_device_s.tolist(), strict=True)
        on_device_s = np.array([own_s.get(op_id, given_s) for op_id, given_s in pairs])
    names = [prefix + program.names[op_id] for op_id in rest]
    phases = phase or [program.phases[op_id] for op_id in rest]
    common: dict[str, Any] = {"rank": rank.rank, "micro_batch": micro_batch, "stage": rank.stage_field()}
    first, count = graph.next_task, len(rest)
    rank.last = first + count - 1
    if not times.separate_host:
        graph.add_rows(
            count,
            (),
            stream="compute",
            kind="compute",
            name=names,
            op_id=rest,
            phase=phases,
            duration_s=(on_device_s + host_s).tolist(),
            **common,
        )
        return
    # Launch and operator in turn; each operator waits for its launch.
    rank.launched, rank.last = first + 2 * count - 2, first + 2 * count - 1
    waits = np.arange(first, first + 2 * count).reshape(-1, 2)[:, ::-1]
    graph.add_rows(
        2 * count,
        waits.ravel().tolist(),
        stream=["host", "compute"] * count,
        kind=["host", "compute"] * count,
        op_id=_twice(rest),
        phase=phases if isinstance(phases, str) else _twice(phases),
        name=[word for name in names for word in (f"launch {name}", name)],
        duration_s=np.column_stack((host_s, on_device_s)).ravel().tolist(),
        **common,
    )


def _twice(values: Sequence[Any]) -> list[Any]:
    return [value for value in values for _ in range(2)]


SHARDED = "sharded"
"""Exchanges of units' parameters and gradients: the ranks of a group number them as they come."""


class _Recorded(NamedTuple):
    """Tasks that ran for a micro-batch, and the rank's state behind them."""

    begin: Mark
    end: Mark
    exchanges: list[tuple[Any, ...]]  # keys of their exchanges
    last: int | None
    launched: int | None
    waits: list[int]
    held: list[tuple[int, str, float]]  # what the rank held more, or less, from a task on
    again: list[tuple[int, int]]  # stages and regions that ran again
    state: tuple[Any, ...]  # of what ``rank.repeated_tasks`` and ``rank.repeated_state`` name


class Repetition:
    """Copies the tasks of a rank's actions from one micro-batch to others of the same size.

    ``exchanged``: keys of exchanges joined since a recording began; the fourth part is the micro-batch, or the last one
    its number under ``SHARDED``, which ``numbered`` have got.
    """

    def __init__(self, rank: StageActions) -> None:
        self.rank = rank
        self.exchanged: list[tuple[Any, ...]] = []
        self.numbered = 0
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}

    def run(
        self, what: tuple[Any, ...], operators: Sequence[int], micro_batch: int, run: Callable[[Sequence[int]], None]
    ) -> None:
        """Run an action's operators, or copy all but the first, which waits for what the action waits for."""
        rank, graph = self.rank, self.rank.program.graph
        run(operators[:1])
        if len(operators) < 2:
            return
        key = (*what, rank.program.factors[micro_batch], self._note())
        memory, found = rank.memory, self._recorded.get(key)
        if found is None:
            begin, self.exchanged, held = graph.mark(), [], len(memory.changes)
            before = set(rank.repeated)
            run(operators[1:])
            state = (list(self.exchanged), rank.last, rank.launched, list(rank.waits))
            changes = memory.changes[held:]
            again = [(stage, index) for stage, index, _ in rank.repeated - before]
            self._recorded[key] = _Recorded(begin, graph.mark(), *state, changes, again, self._note())
            return
        matches = [self._match_again(key, micro_batch) for key in found.exchanges]
        shift = graph.repeat(found.begin, found.end, matches, micro_batch)
        rank.last = None if found.last is None else found.last + shift
        rank.launched = None if found.launched is None else found.launched + shift
        rank.waits = [task + shift for task in found.waits]
        memory.changes += [(task + shift, name, size) for task, name, size in found.held]
        rank.repeated.update((*place, micro_batch) for place in found.again)
        self._recall(found.state)

    def number(self, group: Sequence[int]) -> int:
        """Return the match of the next exchange of some ranks that has a number of its own."""
        self.numbered += 1
        key = (SHARDED, *group, self.numbered)
        self.exchanged.append(key)
        return self.rank.program.match(*key)

    def _match_again(self, key: tuple[Any, ...], micro_batch: int) -> int:
        """Return the match of an exchange like another one, of another micro-batch."""
        if key[0] == SHARDED:
            return self.number(key[1:-1])
        return self.rank.program.match(*key[:3], micro_batch, *key[4:])

    def _note(self) -> tuple[Any, ...]:
        """Return the rank's own state, its tasks by how long before the next one they are."""
        now, rank = self.rank.program.graph.next_task, self.rank
        found = [_move(getattr(rank, name), -now) for name in rank.repeated_tasks]
        for name in rank.repeated_state:
            value = getattr(rank, name)
            found.append(frozenset(value) if isinstance(value, set) else value)
        return tuple(found)

    def _recall(self, state: tuple[Any, ...]) -> None:
        """Bring the rank into a state that was noted."""
        now, rank = self.rank.program.graph.next_task, self.rank
        names = (*rank.repeated_tasks, *rank.repeated_state)
        for place, (name, value) in enumerate(zip(names, state, strict=True)):
            kind = type(getattr(rank, name))
            noted = _move(value, now) if place < len(rank.repeated_tasks) else value
            setattr(rank, name, kind(noted) if isinstance(noted, tuple | frozenset) else noted)


def _move(tasks: Any, shift: int) -> Any:
    """Return tasks further on: one or none, several, or pairs of something and its task."""
    if tasks is None or isinstance(tasks, int):
        return tasks if tasks is None else tasks + shift
    if isinstance(tasks, dict):
        return tuple((name, task + shift) for name, task in tasks.items())
    return tuple((one[0], one[1] + shift) if isinstance(one, tuple) else one + shift for one in tasks)


class ActivationMover:
    """Writes the copies of one rank's activations to the host and back."""

    def __init__(
        self, rank: RankProgram, plan: OffloadedActivations, rates: HostRates, factors: Sequence[float]
    ) -> None:
        self.rank, self.plan, self.rates, self.factors = rank, plan, rates, factors
        self.begins = {unit.begins: number for number, unit in enumerate(plan.units)}
        self.ends = {unit.ends: number for number, unit in enumerate(plan.units)}
        self.gone: dict[tuple[int, int], int] = {}
        self.back: dict[tuple[int, int], int] = {}
        self.entered: set[tuple[int, int]] = set()

    def before_forward(self, op_id: int, micro_batch: int) -> None:
        """Wait, before a unit, until the memory of the last but one is free."""
        before = self.begins.get(op_id, -1) - UNITS_ON_DEVICE
        task = self.gone.get((before, micro_batch))
        if task is not None:
            self.rank.waits.append(task)
            self._hold(before, micro_batch, -1)

    def after_forward(self, op_id: int, micro_batch: int) -> None:
        """Send what a unit keeps to the host."""
        unit = self.ends.get(op_id, -1)
        if self.plan.leaves(unit):
            after = (self.rank.last,)
            self.gone[unit, micro_batch] = self._copy("offload", "forward", unit, micro_batch, after)

    def before_backward(self, op_id: int, micro_batch: int) -> None:
        """Wait for what a unit needs, and ask for what the unit before it will need."""
        unit = self.plan.unit_of.get(op_id, -1)
        if unit < 0 or (unit, micro_batch) in self.entered:
            return
        self.entered.add((unit, micro_batch))
        self._fetch(unit, micro_batch)
        if (unit, micro_batch) in self.back:
            self.rank.waits.append(self.back[unit, micro_batch])
        self._fetch(unit - 1, micro_batch)

    def _fetch(self, unit: int, micro_batch: int) -> None:
        """Bring a unit's activations back, unless they are there or on their way."""
        key = (unit, micro_batch)
        if self.plan.leaves(unit) and key not in self.back and key in self.gone:
            self._hold(unit, micro_batch, 1)
            after = (self.rank.last, self.gone[key])
            self.back[key] = self._copy("fetch", "backward", unit, micro_batch, after)

    def _hold(self, unit: int, micro_batch: int, sign: int) -> None:
        size = sign * self.plan.units[unit].scale(self.factors[micro_batch])
        self.rank.hold("activation", size)

    def _copy(self, stream: str, phase: str, unit: int, micro_batch: int, after: Sequence[int | None]) -> int:
        size = self.plan.units[unit].scale(self.factors[micro_batch])
        return self.rank.program.graph.add(
            self.rank.rank,
            stream,
            "memcpy",
            f"{stream} activations",
            after=after,
            duration_s=self.rates.copy_s(size),
            phase=phase,
            micro_batch=micro_batch,
        )


class HostOptimizer:
    """Writes one rank's gradients' way to the host, the update there, and the parameters' way back."""

    def __init__(self, rank: RankProgram, rates: HostRates) -> None:
        self.rank, self.rates = rank, rates
        self.sent_bytes = 0.0
        self.copies: list[int] = []

    def send(self, after: int | None, size_bytes: float, storages: frozenset[int]) -> None:
        """Send gradients that are final after a task; the device's are dropped."""
        self.sent_bytes += size_bytes
        copy = self.rank.program.graph.add(
            self.rank.rank,
            "offload",
            "memcpy",
            "offload gradients",
            after=(after,),
            duration_s=self.rates.copy_s(size_bytes),
            phase="backward",
        )
        self.copies.append(copy)
        self.rank.drop(storages)

    def update(self) -> None:
        """Update on the host once all gradients are there, and bring the parameters back."""
        rank = self.rank
        graph, moved = rank.program.graph, self.sent_bytes * rank.program.update_bytes_per_byte
        updated = graph.add(
            rank.rank,
            "host",
            "host",
            "optimizer on the host",
            after=(*self.copies, *rank.waits),
            duration_s=moved / self.rates.update_bytes_per_s,
            phase="optimizer",
        )
        rank.waits.append(
            graph.add(
                rank.rank,
                "fetch",
                "memcpy",
                "fetch parameters",
                after=(updated,),
                duration_s=self.rates.copy_s(self.sent_bytes),
                phase="optimizer",
            )
        )


def make_movers(rank: RankProgram) -> tuple[ActivationMover | None, HostOptimizer | None]:
    """Return what moves a rank's activations and its gradients to the host, where its plan asks for it."""
    program = rank.program
    rates = program.rates
    if rates is None or program.mode == FORWARD_ONLY:
        return None, None
    if program.offloaded is not None:
        return ActivationMover(rank, program.offloaded, rates, program.factors), None
    return None, HostOptimizer(rank, rates) if program.mode == TRAIN else None


_PHASES = {FORWARD: "forward", RECV_F: "forward", SEND_F: "forward"}


class StageActions(RankProgram):
    """Writes the actions of one rank's row of the schedule.

    ``dispatches``: split layers cost the host what PyTorch's sharded tensors do. ``repeats``: micro-batches of one size
    run the same tasks, which are copied; ``repeated_tasks`` and ``repeated_state`` name attributes that they depend on
    and change beside. ``in_rows``: operators with nothing between them may be added at once.
    """

    dispatches = True
    repeats = True
    repeated_tasks: tuple[str, ...] = ()
    repeated_state: tuple[str, ...] = ()
    in_rows = True

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
        self.mover, self.host_optimizer = make_movers(self)
        self.repetition = Repetition(self)
        self._crowded: dict[int, set[int]] = {}
        plan = program.plan
        self.tensor_group = [program.rank_of(data, pipeline, t) for t in range(plan.tensor)]
        self.data_group = [program.rank_of(d, pipeline, tensor) for d in range(plan.replicas)]
        # Replicas that share what is sharded next to each other; those of another group hold the same share.
        first, shards = data - data % plan.shards, plan.shards
        self.shard_group = self.data_group[first : first + shards]
        self.shard_replicas = self.data_group[data % shards :: shards]
        first = data - data % plan.context
        self.context_group = [program.rank_of(d, pipeline, tensor) for d in range(first, first + plan.context)]
        # Experts' own grid over the ranks of a stage: those that cut one expert next to each other.
        first, end = (program.rank_of(0, p, 0) for p in (pipeline, pipeline + 1))
        inside, at = plan.expert * plan.expert_cut, self.rank - first
        begin = self.rank - at % inside + at % plan.expert_cut
        self.expert_group = list(range(begin, begin + inside, plan.expert_cut))
        self.expert_replicas = list(range(first + at % inside, end, inside))
        # Those of them in this rank's group, and the ranks of other groups that hold the same share.
        count = plan.shards_of(experts=True)
        place = self.expert_replicas.index(self.rank)
        self.expert_shards = self.expert_replicas[place - place % count :][:count]
        domains, hop = plan.expert_hops
        place = self.expert_group.index(self.rank)
        self.exchange_groups = {
            TENSOR: self.tensor_group,
            EXPERTS: self.expert_group,
            EXPERT_SLICES: [self.rank - at % plan.expert_cut + i for i in range(plan.expert_cut)],
            EXPERT_NODES: self.expert_group[place % hop :: hop] if domains else [],
            EXPERT_DOMAIN: self.expert_group[place - place % hop :][:hop] if domains else [],
        }

    @property
    def work(self) -> StageWork:
        """The work of the stage whose action runs."""
        return self.program.stages[self.stage]

    def compute(self, name: str, duration_s: float, kind: str = "compute", **fields: Any) -> None:
        """Add one task to the compute stream; it waits for what was handed to `waits`."""
        self.last = self.program.graph.add(
            self.rank,
            "compute",
            kind,
            name,
            after=self.waits,
            duration_s=duration_s,
            stage=self.stage_field(),
            **fields,
        )
        self.waits = []

    def stage_field(self) -> int | None:
        """Return the stage that tasks name; None where there is but one."""
        return None if self.one_stage else self.stage

    def operator(
        self,
        op_id: int,
        micro_batch: int | None,
        extra_s: float = 0.0,
        part: float = 1.0,
        name: str = "",
        phase: str = "",
        device_s: float | None = None,
    ) -> None:
        """Add one operator, after its launch where the host runs beside the device."""
        program = self.program
        times = program.times[self.times_of(micro_batch)]
        device_s = float(times.device_s[op_id]) * part if device_s is None else device_s
        host_s = float(times.host_s[op_id])
        name = name or program.names[op_id]
        fields: dict[str, Any] = {"phase": phase or program.phases[op_id], "op_id": op_id, "micro_batch": micro_batch}
        if times.separate_host:
            self.launched = program.graph.add(
                self.rank,
                "host",
                "host",
                f"launch {name}",
                after=self.read_by_host,
                duration_s=host_s + extra_s,
                stage=self.stage_field(),
                **fields,
            )
            self.read_by_host = []
            self.waits.append(self.launched)
            self.compute(name, device_s, **fields)
        else:
            self.compute(name, device_s + host_s + extra_s, **fields)

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
    ) -> int:
        """Add this rank's part of a collective, after all computed so far."""
        self.repetition.exchanged.append(key)
        return self.program.graph.add(
            self.rank,
            stream,
            "collective",
            name,
            after=(self.last, *self.waits),
            message_bytes=size_bytes,
            phase=phase,
            stage=self.stage_field(),
            group=self.program.name_group(group),
            match_id=self.program.match(*key),
        )

    def move(self, kind: str, action: Action) -> int:
        """Add a send to, or a receive from, a neighbouring stage."""
        direction = _PHASES.get(action.kind, "backward")
        ahead = action.kind in (SEND_F, RECV_B)
        boundary = action.stage if ahead else action.stage - 1
        peer = self.program.rank_of_stage[action.stage + (1 if ahead else -1)]
        assert action.micro_batch is not None
        early = kind == "recv" and self.schedule.traits.one_process
        # A gradient comes back as large as the activation that went.
        size = self.program.stages[boundary].send_bytes[action.micro_batch]
        ends = (boundary, direction, action.micro_batch, self.data, self.tensor)
        last = self.ended.get(direction, self.last) if kind == "send" else self.last
        return self.program.graph.add(
            self.rank,
            "send" if kind == "send" else "receive",
            kind,
            f"{kind} {direction}",
            after=() if early else (last,),
            message_bytes=size,
            peer=self.program.rank_of(self.data, peer, self.tensor),
            stage=self.stage_field(),
            phase=direction,
            micro_batch=action.micro_batch,
            match_id=self.program.match("p2p", *ends),
        )

    def compute_action(self, action: Action) -> None:
        """Run one action's operators once what they need is there."""
        assert action.micro_batch is not None
        again = action.kind == FORWARD and action in self.forwards
        if not again:
            self._await_messages(action)
        if action.kind == FORWARD:
            self.forwards.add(action)
            self._run_forward(action.micro_batch, again)
        else:
            self._run_backward(action.kind, action.micro_batch)
        self._await_sends(action.kind)

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
        if self.schedule.traits.waits and action.kind != self.kind_before:
            self.await_all_sends()

    def _await_sends(self, kind: str) -> None:
        """In a run of forwards, or of backwards, a send is waited for after the next of them."""
        if self.schedule.traits.waits == "each":
            self.await_all_sends()
        self.kind_before = kind

    def await_all_sends(self) -> None:
        """Let the next task wait for every send so far."""
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
                self.program.graph.add(
                    self.rank,
                    "host",
                    "host",
                    "micro-batch: engine",
                    duration_s=beyond_s,
                    stage=self.stage_field(),
                    **fields,
                )
            self.compute("micro-batch: engine", beyond_s, "host", **fields)

    def _run_forward(self, micro_batch: int, again: bool) -> None:
        if not again:
            self._chunk_overhead("forward", micro_batch)

        def run(op_ids: Sequence[int]) -> None:
            if not self.mover:
                self._run_all(op_ids, micro_batch, "forward", again)
                return
            for op_id in op_ids:
                self.mover.before_forward(op_id, micro_batch)
                self._run_all([op_id], micro_batch, "forward", again)
                self.mover.after_forward(op_id, micro_batch)

        operators = self.work.recomputed if again else self.work.forward.tolist()
        ahead = not again and self.gathers_ahead()
        write = partial(self.gather_ahead, run) if ahead else run
        self._run_operators((FORWARD, again), operators, micro_batch, write, self.repeats and not ahead)

    def gathers_ahead(self) -> bool:
        """Return whether the stage's weights are gathered during the forward that begins."""
        return False

    def gather_ahead(self, run: Callable[[Sequence[int]], None], op_ids: Sequence[int]) -> None:
        """Run forward operators, each bucket of weights gathered before its first reader."""
        run(op_ids)

    def _run_operators(
        self,
        what: tuple[Any, ...],
        operators: Sequence[int],
        micro_batch: int,
        run: Callable[[Sequence[int]], None],
        repeats: bool,
    ) -> None:
        alone = self.mover or self.work.attentions or self.program.plan.expert_parts > 1
        if repeats and not alone:
            self.repetition.run((*what, self.stage), operators, micro_batch, run)
            return
        run(operators)

    def _run_all(self, op_ids: Sequence[int], micro_batch: int, phase: str, again: bool = False) -> None:
        """Run operators one after the other, those with nothing between them at once."""
        prefix, when = (AGAIN, "backward") if again else ("", phase)
        for plain, some in groupby(op_ids, self.is_plain):
            if plain:
                add_operators(self, list(some), micro_batch, when, prefix)
                continue
            for op_id in some:
                name = prefix and prefix + self.program.names[op_id]
                self._run(op_id, micro_batch, phase, again=again, name=name)

    def is_plain(self, op_id: int) -> bool:
        """Return whether nothing goes with an operator of the stage, so that others may be added with it."""
        if self.stage not in self._crowded:
            self._crowded[self.stage] = self.find_crowded()
        return self.in_rows and not self.mover and op_id not in self._crowded[self.stage]

    def find_crowded(self) -> set[int]:
        """Return the operators of the stage beside which messages go, or that run in parts."""
        work = self.work
        exchanges = (one for beside in (work.before, work.after) for one in chain(*beside.values()))
        found = {*work.before, *work.after, *work.attentions, *work.input_share}
        return found.union(one.beside for one in exchanges)

    def _run(
        self,
        op_id: int,
        micro_batch: int,
        phase: str,
        part: float = 1.0,
        again: bool = False,
        name: str = "",
        reduces: bool = True,
    ) -> None:
        """Run one operator between the collectives that go before and after it."""
        before = self.work.before.get(op_id, []) if reduces else []
        after = self.work.after.get(op_id, []) if reduces else []
        dispatch_s = self.program.host.get(f"tensor_parallel_{phase}_s", 0.0) * self.dispatches
        when = "backward" if again else phase
        key = (op_id, micro_batch, again)
        for index, exchange in enumerate(before):
            self._exchange(exchange, (*key, "before", index), micro_batch, when)
        extra_s = dispatch_s * sum(exchange.group == TENSOR for exchange in (*before, *after))
        inside = next((one for one in (*before, *after) if one.blocks > 1), None)
        if inside:
            place, of = (TENSOR, self.data, *key, "block"), (extra_s, part, name, when)
            multiply(self, inside, inside in before, place, op_id, micro_batch, *of)
        elif op_id in self.work.attentions:
            attend(self, op_id, micro_batch, again, extra_s, part, name, when)
        else:
            self.operator(op_id, micro_batch, extra_s, part, name, when)
        self.waits += self.beside.pop(op_id, [])
        for index, exchange in enumerate(after):
            self._exchange(exchange, (*key, "after", index), micro_batch, when)

    def _exchange(self, exchange: StageExchange, key: tuple[Any, ...], micro_batch: int, phase: str) -> None:
        """Run a collective beside an operator, and the copy that brings its buffer into order."""
        if exchange.blocks > 1:  # goes with the operator itself
            return
        of_tensor = exchange.group == TENSOR
        copy_s = exchange.copies_s[micro_batch] if exchange.copies_s else 0.0
        of = {"phase": phase, "micro_batch": micro_batch}
        size = exchange.sizes_bytes[micro_batch]
        if not of_tensor:  # what leaves and what arrives are two buffers
            self.hold("message", size)
        if copy_s and exchange.copied == BEFORE:
            self.compute(f"copy into {exchange.collective}", copy_s, "memcpy", **of)
        group = self.exchange_groups[exchange.group]
        place = (TENSOR, self.data) if of_tensor else (exchange.group, group[0])
        # NCCL has a stream for each communicator: what replicas gather and reduce holds up none of these.
        task = self.collective(exchange.collective, (*place, *key), size, group, phase, exchange.group)
        beside = exchange.beside
        (self.waits if beside < 0 else self.beside.setdefault(beside, [])).append(task)
        self.turns += [] if of_tensor else [task]
        if exchange.awaited and phase == "forward":
            self.read_by_host.append(task)
        if copy_s and exchange.copied == AFTER:
            self.compute(f"copy out of {exchange.collective}", copy_s, "memcpy", **of)
        if not of_tensor:
            self.hold("message", -size)

    def _run_backward(self, kind: str, micro_batch: int) -> None:
        """Compute, hand over buckets after a stage's last micro-batch, add gradients up."""
        work = self.work
        operators: Sequence[int] = {
            BACKWARD: work.backward.tolist(),
            BACKWARD_INPUT: work.backward_input,
            BACKWARD_WEIGHT: work.backward_weight,
        }[kind]
        self._chunk_overhead("backward", micro_batch)
        makes_gradients = kind != BACKWARD_INPUT
        done = self.backwards[self.stage]
        ends = done == self.schedule.micro_batches - 1 or self.program.plan.reduces_each
        buckets = list(enumerate(work.buckets)) if makes_gradients and ends else []
        swapped = self.program.split.swapped

        def run(places: Sequence[int]) -> None:
            held: list[int] = []  # operators that can be added at once

            def add_held() -> None:
                self._run_all(held, micro_batch, "backward")
                held.clear()

            for place in places:
                op_id = swapped.get(place, place)
                if self.is_plain(op_id) and not self._needs(op_id, micro_batch):
                    held.append(op_id)
                else:
                    add_held()
                    run_one(op_id)
                while buckets and swapped.get(at := buckets[0][1].ready_after_op_id, at) <= place:
                    add_held()
                    self.reduce_bucket(*buckets.pop(0))
            add_held()

        def run_one(op_id: int) -> None:
            self._prepare_backward(op_id, micro_batch)
            share = None if kind == BACKWARD else work.input_share.get(op_id)
            if share is None:
                self._run(op_id, micro_batch, "backward")
            else:  # one operator of both I and W: each time for one kind of gradient
                of_input = kind == BACKWARD_INPUT
                part, name = share if of_input else 1.0 - share, self.program.names[op_id]
                self._run(op_id, micro_batch, "backward", part, name=f"{name} ({kind})", reduces=of_input)

        self._run_operators((kind,), operators, micro_batch, run, self.repeats and not buckets)
        for index, bucket in buckets:
            self.reduce_bucket(index, bucket)
        if done and makes_gradients and work.accumulate_s:
            of: dict[str, Any] = {"phase": "backward", "micro_batch": micro_batch}
            self.compute("gradient accumulation", work.accumulate_s, **of)
        self.backwards[self.stage] += makes_gradients
        if ends and work.buckets and done < self.schedule.micro_batches - 1:
            self.begin_again()

    def _prepare_backward(self, op_id: int, micro_batch: int) -> None:
        """Bring back, or compute again, what an operator needs and the device has not kept."""
        if self.mover:
            self.mover.before_backward(op_id, micro_batch)
        for index in self._needs(op_id, micro_batch):
            self.repeated.add((self.stage, index, micro_batch))
            self._run_all(self.work.regions[index].operators, micro_batch, "forward", again=True)

    def _needs(self, op_id: int, micro_batch: int) -> list[int]:
        """Return the places of the regions that run again before an operator of backward."""
        return [
            index
            for index, region in enumerate(self.work.regions)
            if op_id in region.needed_by and (self.stage, index, micro_batch) not in self.repeated
        ]

    def reduce_bucket(self, index: int, bucket: Bucket) -> None:
        """Do what is due when all gradients of a bucket are there."""
        raise NotImplementedError

    def begin_again(self) -> None:
        """Do what is due between a backward that has reduced buckets and another micro-step's forward."""
