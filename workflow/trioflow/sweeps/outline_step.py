"""The step of an outline: a schedule's actions with summed times, gradients exchanged, memory at least.

Outlines of ``fully_shard``: the order of ``programs.units`` with sums, clocks for compute and communicator.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from trioflow.base.derived import derived
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import find_traits
from trioflow.parallel.extrapolate import holds_host
from trioflow.parallel.plan import micro_batch_sizes
from trioflow.parallel.programs.units import cost_units
from trioflow.parallel.schedules.build import plan_schedule
from trioflow.parallel.schedules.table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE_KINDS,
    FORWARD,
    Action,
    Schedule,
    leaves,
    recomputed_pairs,
    take_turns,
)
from trioflow.parallel.splits.pipeline import BALANCES, Parameter, list_parameters
from trioflow.parallel.splits.routing import find_expert_modules
from trioflow.parallel.splits.sharding import EXPERTS_UNIT, build_units, partition_stages, place_parameters
from trioflow.parallel.splits.tensor_parallel import style_of
from trioflow.parallel.splits.vocabulary import prepare_split
from trioflow.sweeps.outline import Floats, Outline, UnitWork, find_units, sum_stages
from trioflow.trace.store import pipeline_units


class Shard(NamedTuple):
    """What one unit of ``fully_shard`` takes beside its operators [s]; its parameters once gathered [bytes]."""

    gather_s: float = 0.0
    copy_out_s: float = 0.0
    accumulate_s: float = 0.0
    reduce_copy_s: float = 0.0
    scatter_s: float = 0.0
    whole_bytes: float = 0.0  # none of what nobody trains, which backward may not need


class Part(NamedTuple):
    """A piece of the model in order: its unit of ``fully_shard``, None where the root has it, and its work [s]."""

    shard: Shard | None
    forward_s: float
    backward_s: float


class StageTimes(NamedTuple):
    """What a pipeline's stage takes under ``fully_shard`` [s].

    ``forward_s``, ``backward_s``: of one micro-batch, waits for units given up included. ``behind_s``: reducing
    gradients behind the last one. ``first_s``: the first stage's wait for units that later stay.
    """

    forward_s: list[float]
    backward_s: list[float]
    behind_s: list[float]
    first_s: float


@dataclass
class _Clocks:
    """When compute and communicator are free, and when the last reduction has ended [s]."""

    compute_s: float = 0.0
    network_s: float = 0.0
    reduced_s: float = 0.0
    beside: bool = True

    def gather(self, shard: Shard, not_before_s: float) -> float:
        """Return when a unit's parameters have arrived."""
        if not self.beside:
            not_before_s = self.compute_s
        self.network_s = max(self.network_s, not_before_s) + shard.gather_s
        if not self.beside:
            self.compute_s = self.network_s = max(self.network_s, self.compute_s)
        return self.network_s

    def copy_out(self, shard: Shard, arrived_s: float) -> None:
        self.compute_s = max(self.compute_s, arrived_s) + shard.copy_out_s

    def reduce(self, shard: Shard, adds: bool = False) -> None:
        self.compute_s = max(self.compute_s, self.reduced_s) + shard.reduce_copy_s
        self.network_s = max(self.network_s, self.compute_s) + shard.scatter_s
        self.network_s += shard.accumulate_s * adds
        self.reduced_s = self.network_s
        if not self.beside:
            self.compute_s = self.reduced_s


def time_accumulated(outline: Outline, plan: Plan, work: UnitWork) -> float:
    """Return the forwards, backwards and exchanges of a plan without a pipeline [s]."""
    parts, root = _list_parts(outline, plan, work, 0, outline.units)
    clocks = _Clocks(beside=outline.traces[0].facts.device != "cpu")
    for number in range(plan.accumulate):
        reduces, adds = plan.sums_shards or number == plan.accumulate - 1, number > 0
        asked_s = _play_forward(clocks, parts, root)
        gathers = plan.sharding != "zero2"
        _play_backward(clocks, parts, gathers, asked_s, adds, reduces, plan.sums_shards)
        clocks.compute_s += root.accumulate_s * (adds and not plan.sums_shards)
        if reduces:
            clocks.reduce(root, adds and plan.sums_shards)
            clocks.compute_s = max(clocks.compute_s, clocks.reduced_s)
    return clocks.compute_s


def time_stages(outline: Outline, plan: Plan, work: UnitWork, begins: Sequence[int]) -> StageTimes:
    """Return what the stages of a pipeline take, their gradients' sums left out."""
    found = StageTimes([], [], [], 0.0)
    first_s = 0.0
    for begin, end in itertools.pairwise(begins):
        parts, root = _list_parts(outline, plan, work, begin, end)
        plain_s = [sum(part.forward_s for part in parts), sum(part.backward_s for part in parts)]
        clocks = _Clocks(beside=outline.traces[0].facts.device != "cpu")
        _play_forward(clocks, parts, root)
        first_s = first_s or clocks.compute_s - plain_s[0]
        if plan.sharding != "zero2":
            inner = _Clocks(beside=clocks.beside)
            _play_forward(inner, parts, Shard())  # the root is gathered once
            plain_s[0] = inner.compute_s
        # Behind the first of backwards in a row all units stay gathered.
        if plan.sharding != "zero2" and not find_traits(plan.schedule).turns_once:
            clocks = _Clocks(beside=clocks.beside)
            _play_backward(clocks, parts, True, clocks.compute_s)
            plain_s[1] = clocks.compute_s
        behind = _Clocks()
        for shard in (root, *(part.shard for part in parts if part.shard)):
            behind.reduce(shard)
        found.forward_s.append(plain_s[0])
        found.backward_s.append(plain_s[1])
        found.behind_s.append(behind.reduced_s)
    return found._replace(first_s=first_s)


def size_whole(outline: Outline, plan: Plan, work: UnitWork, begins: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return the parameters and gradients that each stage holds whole behind a backward [bytes].

    Gradients lie in the format that they are reduced in, until the stage's last micro-batch.
    """
    sized = outline.recipe.reduce_bytes / outline.recipe.gradient_bytes
    gradients = sum_stages(outline.state_of(plan).gradient_bytes * sized, begins)
    parameters = []
    for begin, end in itertools.pairwise(begins):
        parts, root = _list_parts(outline, plan, work, begin, end)
        inner = (part.shard.whole_bytes for part in parts if part.shard)
        parameters.append(root.whole_bytes + sum(inner))
    return parameters, gradients


def _play_forward(clocks: _Clocks, parts: Sequence[Part], root: Shard) -> float:
    """Gather the root, then each unit beside the one before, two in flight at most; return when the last unit is there.

    The host is ahead, and asks for backward's first one then.
    """
    clocks.copy_out(root, clocks.gather(root, clocks.compute_s))
    copied_s = [0.0, clocks.compute_s]
    for part in parts:
        if part.shard:
            arrived_s = clocks.gather(part.shard, copied_s[-2])
            clocks.copy_out(part.shard, arrived_s)
            copied_s.append(clocks.compute_s)
        clocks.compute_s += part.forward_s
    return copied_s[-1]


def _play_backward(
    clocks: _Clocks,
    parts: Sequence[Part],
    gathers: bool,
    asked_s: float,
    adds: bool = False,
    reduces: bool = False,
    shards: bool = False,
) -> None:
    """Gather each unit while the one behind it computes; add up, whole or as ``shards``, and reduce what each has made."""
    coming = [part.shard for part in parts if part.shard] if gathers else []
    arrives_s = clocks.gather(coming[-1], asked_s) if coming else 0.0
    for part in reversed(parts):
        if part.shard and coming:
            clocks.copy_out(coming.pop(), arrives_s)
            if coming:
                arrives_s = clocks.gather(coming[-1], clocks.compute_s)
        clocks.compute_s += part.backward_s
        if part.shard:
            clocks.compute_s += part.shard.accumulate_s * (adds and not shards)
        if part.shard and reduces:
            clocks.reduce(part.shard, adds and shards)


def _list_parts(outline: Outline, plan: Plan, work: UnitWork, begin: int, end: int) -> tuple[list[Part], Shard]:
    """Return the pieces of some of the model's units, and what their root takes."""
    inner, rest = _list_shards(outline, plan)
    here = [rest[unit] for unit in range(begin, end) if unit in rest]
    root = Shard(*(sum(times) for times in zip(Shard(), *here, strict=True)))
    names = list(pipeline_units(outline.traces[0]))
    if not names:  # blocks that only their parameters name share the work evenly
        shards: list[Shard | None] = [*inner.values()] or [None]
        each = [float(times_s.sum()) / len(shards) for times_s in (work.forward_s, work.backward_s)]
        return [Part(shard, *each) for shard in shards], root
    parts = [
        Part(inner.get(names[unit]), float(work.forward_s[unit]), float(work.backward_s[unit]))
        for unit in range(begin, end)
    ]
    return parts, root


@derived(lambda p: (*style_of(p), p.shards, p.pieces > 1, p.sums_shards, p.data, p.pipeline))
def _list_shards(outline: Outline, plan: Plan) -> tuple[dict[str, Shard], dict[int, Shard]]:
    """Return what each inner unit takes, by its name, and what the root takes of each of the model's units."""
    trace = prepare_split(outline.traces[0], plan)

    def elementwise_s(name: str, sizes: Sequence[int], reads: int) -> float:
        return float(outline.priced.predict_elementwise(name, sizes, reads)["time_s"].sum())

    *inner, root = build_units(trace, plan.tensor, plan.expert_parts, plan.places_experts)
    at: dict[int, list[Parameter]] = {}
    placed = place_parameters(trace, find_units(trace), {})
    unit_of = {p.name: min(where, default=0) for p, where in zip(list_parameters(trace), placed, strict=True)}
    for parameter in root.parameters:
        at.setdefault(unit_of[parameter.name], []).append(parameter)
    units = [*inner, *(replace(root, parameters=tuple(held)) for held in at.values())]
    works = cost_units(units, plan, plan.pieces, elementwise_s, trace)
    shards = [
        Shard(
            outline.messages.data_s(plan, "all_gather", one.gathered_bytes, one.unit.experts),
            one.copy_out_s,
            one.accumulate_s,
            one.reduce_copy_s,
            outline.messages.data_s(plan, "reduce_scatter", one.reduced_bytes, one.unit.experts),
            float(one.gathered_bytes) if one.reduced_bytes else 0.0,
        )
        for one in works
    ]
    count, found = len(inner), dict[str, Shard]()
    for unit, shard in zip(inner, shards[:count], strict=True):
        # Experts go with the unit that they are inside.
        name = unit.name.removesuffix(EXPERTS_UNIT) if unit.experts else unit.name
        found[name] = Shard(*map(sum, zip(found.get(name, Shard()), shard, strict=True)))
    return found, dict(zip(at, shards[count:], strict=True))


_INPUT_SHARE = 0.5
"""Part of backward that makes the gradient of a stage's input: two products of equal size, one for it."""


class Step(NamedTuple):
    """What an outline says of a plan: estimated step [s], and what the fullest rank holds at least [bytes], never too much."""

    time_s: float
    least_bytes: int


class _Turn(NamedTuple):
    """One action in an order in which all can run: its rank, stage, kind, and the action it waits for."""

    rank: int
    stage: int
    kind: str
    source: int
    ships: bool


def outline_step(outline: Outline, plan: Plan, batch: int) -> Step:
    """Estimate a plan's step and least memory, not of DataParallel; PlanError when it fits neither model nor batch."""
    samples = micro_batch_sizes(plan, batch)[0]
    work = outline.work_of(plan, samples)
    begins = outline.cut(plan.stages)
    schedule = plan_schedule(plan)
    if holds_host(plan, outline.recipe.framework):
        slower_s = np.maximum(np.stack([work.forward_s, work.backward_s], 1), work.host_s[:, :2])
        work = replace(work, forward_s=slower_s[:, 0], backward_s=slower_s[:, 1])
    update_host_s = None
    if plan.shards_units and plan.pipeline == 1:
        time_s = time_accumulated(outline, plan, work) + outline.sharded_update_s(plan)
    else:
        time_s = _time_stages(outline, plan, work, begins, schedule)
        if plan.sharding == "zero1":
            update_s, update_host_s = _time_partitioned(outline, plan, samples, begins, schedule)
            time_s += update_s
    time_s = max(time_s, _time_host(plan, work, begins, schedule, update_host_s))
    # Where stages of equal time do not fit, those of as many layers are tried.
    cuts = [begins, outline.cut(plan.stages, BALANCES[1])] if plan.pipeline > 1 else [begins]
    least = min(_count_least_bytes(outline, plan, work, cut, schedule) for cut in cuts)
    return Step(time_s, least)


@derived(lambda plan, samples, *cut: (*style_of(plan), *_schedule_of(plan), plan.shards, samples))
def _time_partitioned(
    outline: Outline, plan: Plan, samples: int, begins: Sequence[int], schedule: Schedule
) -> tuple[float, float]:
    """Return the longest update of a rank's own parameters with the broadcasts of all, and its host's time [s]."""
    done = outline.work_of_operators(plan, samples)
    placed = place_parameters(done.trace, find_units(done.trace), {})
    units = [
        {u for stage in schedule.stages_of_rank(rank) for u in range(*begins[stage : stage + 2])}
        for rank in range(schedule.ranks)
    ]
    updates_s, hosts_s = [], []
    for partition in partition_stages(done.trace, plan, placed, units):
        parts = (*partition.parameters, *partition.experts)
        sizes = [parameter.size_bytes for part in parts for parameter in part]
        sent_s = sum(outline.messages.data_s(plan, "broadcast", size) for size in sizes)
        for mine, shares in zip(partition.operators, partition.shares, strict=True):
            own_s = sum(float(done.alone_s[op]) * shares.get(op, 1.0) for op in mine)
            updates_s.append(own_s + sent_s)
            hosts_s.append(float(done.launch_s[list(mine)].sum()))
    return max(updates_s), max(hosts_s)


def _time_host(plan: Plan, work: UnitWork, begins: Sequence[int], schedule: Schedule, update_s: float | None) -> float:
    """Return what the busiest rank's host takes to launch a step [s]; it waits for no message.

    ``update_s``: the optimizer's part, where replicas share it by parameters [s].
    """
    each = np.array([plan.pieces, plan.pieces, float(update_s is None)])
    stages = sum_stages(work.host_s @ each, begins)
    return (update_s or 0.0) + max(
        sum(stages[stage] for stage in schedule.stages_of_rank(rank)) for rank in range(schedule.ranks)
    )


def _time_stages(outline: Outline, plan: Plan, work: UnitWork, begins: Sequence[int], schedule: Schedule) -> float:
    """Return the time of the schedule, the buckets, and the optimizer unless replicas share it [s]."""
    upkeep = outline.upkeep_of(plan)
    copied = plan.data > 1 and not (plan.shards_units or outline.lies_in_buckets(plan))
    copy_s, return_s = (sum_stages(one * copied, begins) for one in (upkeep.copy_s, upkeep.return_s))
    # Gradients are added up after every micro-batch but the first.
    add_s = upkeep.add_s * (1 - 1 / schedule.micro_batches)
    forward_s = sum_stages(work.forward_s, begins)
    backward_s = sum_stages(work.backward_s + add_s, begins)
    sharded = time_stages(outline, plan, work, begins) if plan.shards_units else None
    if sharded:
        added_s = sum_stages(add_s, begins)
        forward_s = sharded.forward_s
        backward_s = [a + b for a, b in zip(sharded.backward_s, added_s, strict=True)]
    send_s = [outline.messages.send_s(plan, round(float(work.send_bytes[end - 1]))) for end in begins[1:-1]]
    turns = _order(schedule)
    busy_until, last_backward = _play(schedule.ranks, turns, forward_s, backward_s, send_s)
    mine = 0.0 if plan.sharding == "zero1" else 1 / plan.shards
    update_s = sum_stages(work.update_s * mine, begins)
    if sharded:
        return sharded.first_s + max(
            played_s + sum(sharded.behind_s[s] + update_s[s] for s in schedule.stages_of_rank(rank))
            for rank, played_s in enumerate(busy_until)
        )
    state = outline.state_of(plan)
    gradient_bytes, parameter_bytes = (sum_stages(one, begins) for one in (state.gradient_bytes, state.parameter_bytes))
    end_s = 0.0
    for rank, played_s in enumerate(busy_until):
        sent_s, gathered_s, stages = 0.0, 0.0, schedule.stages_of_rank(rank)
        free_s = played_s + sum(copy_s[stage] for stage in stages)
        for stage in stages:
            begin_s, done_s = last_backward[stage]
            done_s += copy_s[stage]
            sent_s = _send_buckets(outline, plan, gradient_bytes[stage], begin_s, done_s, sent_s)
            gathered_s += _gather_weights(outline, plan, parameter_bytes[stage])
        if outline.platform.communication_on_compute_stream and plan.data > 1:
            sent_s = free_s + _sum_buckets(outline, plan, [gradient_bytes[s] for s in stages])
        mine_s = sum(return_s[stage] + update_s[stage] for stage in stages)
        end_s = max(end_s, max(free_s, sent_s) + mine_s + gathered_s)
    return end_s


def _list_buckets(outline: Outline, plan: Plan, gradient_bytes: float) -> list[int]:
    """Return the sizes of a stage's buckets [bytes]: one of the first limit, others of theirs."""
    left, width = round(gradient_bytes), outline.recipe.bucket_width
    if _reduces_whole(outline, plan):
        return [left]
    first = min(round(plan.first_bucket_bytes * width), left)
    more, rest = divmod(left - first, round(plan.bucket_bytes * width))
    return [size for size in (first, *[round(plan.bucket_bytes * width)] * more, rest) if size > 0]


def _time_buckets(outline: Outline, plan: Plan, collective: str, sizes: Sequence[int]) -> list[float]:
    """Return the time of a collective of the replicas over each bucket [s]; most are of one size."""
    times_s = {size: outline.messages.data_s(plan, collective, size) for size in set(sizes)}
    return [times_s[size] for size in sizes]


def _reduces_whole(outline: Outline, plan: Plan) -> bool:
    return plan.sharding == "distributed" and outline.recipe.reduces_whole


def _send_buckets(
    outline: Outline, plan: Plan, gradient_bytes: float, begin_s: float, done_s: float, sent_s: float
) -> float:
    """Return when a stage's last bucket has been summed, gradients made evenly over a backward [s]."""
    if plan.data == 1:
        return sent_s
    sizes = _list_buckets(outline, plan, gradient_bytes)
    made, total = 0, sum(sizes)
    times_s = _time_buckets(outline, plan, _exchange_of(outline, plan), sizes)
    for size, time_s in zip(sizes, times_s, strict=True):
        made += size
        ready_s = begin_s + (done_s - begin_s) * made / total
        sent_s = max(sent_s, ready_s) + time_s
    return sent_s


def _exchange_of(outline: Outline, plan: Plan) -> str:
    scatters = plan.sharding == "distributed" and not _reduces_whole(outline, plan)
    return "reduce_scatter" if scatters else "all_reduce"


def _gather_weights(outline: Outline, plan: Plan, parameter_bytes: float) -> float:
    """Return the time in which replicas that updated slices gather a stage's weights [s]."""
    if plan.sharding != "distributed":
        return 0.0
    sizes = _list_buckets(outline, plan, parameter_bytes)
    return sum(_time_buckets(outline, plan, "all_gather", sizes))


def _sum_buckets(outline: Outline, plan: Plan, gradients_bytes: Sequence[float]) -> float:
    exchange = _exchange_of(outline, plan)
    sizes = [size for each in gradients_bytes for size in _list_buckets(outline, plan, each)]
    return sum(_time_buckets(outline, plan, exchange, sizes))


def _play(
    ranks: int, turns: Sequence[_Turn], forward_s: Sequence[float], backward_s: Sequence[float], send_s: Sequence[float]
) -> tuple[list[float], dict[int, tuple[float, float]]]:
    """Run a schedule's actions; return when each rank is free and when each stage's last backward ran [s]."""
    free_s = [0.0] * ranks
    ends: list[float] = []
    last: dict[int, tuple[float, float]] = {}
    for turn in turns:
        whole_s = forward_s[turn.stage] if turn.kind == FORWARD else backward_s[turn.stage]
        if turn.kind not in (FORWARD, BACKWARD):
            whole_s *= _INPUT_SHARE if turn.kind == BACKWARD_INPUT else 1 - _INPUT_SHARE
        begin_s = free_s[turn.rank]
        if turn.source >= 0:
            arrives_s = ends[turn.source]
            if turn.ships:
                arrives_s += send_s[turn.stage - 1 if turn.kind == FORWARD else turn.stage]
            begin_s = max(begin_s, arrives_s)
        end_s = begin_s + whole_s
        ends.append(end_s)
        free_s[turn.rank] = end_s
        if turn.kind not in (FORWARD, BACKWARD_INPUT):
            last[turn.stage] = (begin_s, end_s)
    return free_s, last


def _schedule_of(plan: Plan) -> tuple[str, int, int, int]:
    """Return what decides the actions of a plan's pipeline."""
    return (plan.schedule, plan.pipeline, plan.pieces, plan.stages_per_rank)


@derived()
def _order(schedule: Schedule) -> tuple[_Turn, ...]:
    """Return the compute actions of a schedule in an order in which each finds what it waits for."""
    rows = [[a for a in leaves(row) if a.kind in COMPUTE_KINDS] for row in schedule.rows]
    rank_of, last = schedule.rank_of_stage, schedule.stages - 1
    found: dict[tuple[str, int, int | None] | None, int] = {None: -1}
    turns: list[_Turn] = []

    def find_needed(action: Action) -> tuple[str, int, int | None] | None:
        if action.kind == FORWARD and action.stage:
            return FORWARD, action.stage - 1, action.micro_batch
        if action.kind in (BACKWARD, BACKWARD_INPUT) and action.stage < last:
            return BACKWARD, action.stage + 1, action.micro_batch
        return None

    for rank, action in take_turns(rows, lambda _, one: find_needed(one) in found):
        needed = find_needed(action)
        ships = needed is not None and rank_of[needed[1]] != rank
        if action.kind != BACKWARD_WEIGHT:
            kind = FORWARD if action.kind == FORWARD else BACKWARD
            found.setdefault((kind, action.stage, action.micro_batch), len(turns))
        turns.append(_Turn(rank, action.stage, action.kind, found[needed], ships))
    return tuple(turns)


class _Held(NamedTuple):
    """What a rank's stages hold at one time or another, each state once.

    ``in_flight``: micro-batches [states, stages]; ``behind``: behind each backward, ``summing``: whether gradients are
    still added up, ``ran``: whether the backward was the stage's [backwards, stages].
    """

    in_flight: Floats
    behind: Floats
    summing: Floats
    ran: Floats


@derived()
def _count_held(schedule: Schedule) -> list[_Held]:
    """Return what the stages of each rank hold; a forward that is run again counts from its second run on."""
    again = recomputed_pairs(schedule)
    found = []
    for rank, row in enumerate(schedule.rows):
        column = {stage: place for place, stage in enumerate(schedule.stages_of_rank(rank))}
        held: dict[tuple[int, int | None], bool] = {}
        now, done = [0] * len(column), [0] * len(column)
        seen, behind = {tuple(now)}, set[tuple[int, ...]]()
        for action in leaves(row):
            pair, place = (action.stage, action.micro_batch), column[action.stage]
            before = held.get(pair, False)
            if action.kind == FORWARD:
                held[pair] = pair not in again or pair in held
            elif action.kind in (BACKWARD, BACKWARD_WEIGHT):
                held.pop(pair, None)
            now[place] += held.get(pair, False) - before
            seen.add(tuple(now))
            if action.kind == BACKWARD:
                ran = [other == place for other in range(len(column))]
                summing = [0 < count < schedule.micro_batches for count in done]
                summing[place] = True
                behind.add((*now, *summing, *ran))
                done[place] += 1
        states = np.array(sorted(behind), dtype=np.float64).reshape(-1, 3, len(column))
        counts = np.array(sorted(seen), dtype=np.float64)
        found.append(_Held(counts, states[:, 0], states[:, 1], states[:, 2]))
    return found


def _count_least_bytes(outline: Outline, plan: Plan, work: UnitWork, begins: Sequence[int], schedule: Schedule) -> int:
    """Return what the fullest rank holds at least [bytes].

    Parameters, state and buffers, with the activations in flight or, after backward, all gradients; main gradients that
    nobody shards all the time. What is computed again needs nothing. Of sharded units the shards alone count, but in a
    pipeline gradients are whole until the last micro-batch, and parameters behind each backward.
    """
    state = outline.state_of(plan)
    shards = plan.shards if plan.shards_units else 1
    state_shards = plan.shards
    # Where main weights are what is sharded, they are a state.
    weights = not (plan.shards_units and outline.recipe.main_parameter_bytes)
    standing = sum_stages(
        state.parameter_bytes / shards * weights + state.state_bytes / state_shards + state.buffer_bytes, begins
    )
    gradients = sum_stages(state.gradient_bytes / shards, begins)
    activations = sum_stages(work.activation_bytes, begins)
    counts = _count_held(schedule)
    main = outline.lies_in_buckets(plan) and not plan.shards_units
    buckets = plan.data > 1 and not (plan.shards_units or main)
    # Of experts the trace does not say which gradient is whose.
    knows = shards > 1 and plan.pipeline > 1 and not find_expert_modules(outline.traces[0])
    whole = size_whole(outline, plan, work, begins) if knows else ()
    most = 0.0
    for rank, held in enumerate(counts):
        stages = list(schedule.stages_of_rank(rank))
        own = np.array([activations[stage] for stage in stages])
        in_flight = float((held.in_flight @ own).max())
        mine = sum(gradients[stage] for stage in stages)
        total = sum(standing[stage] for stage in stages) + mine * buckets
        comes = in_flight + mine if main else max(in_flight, mine)
        if whole and len(held.behind):
            parameters, summed = (np.array([sizes[stage] for stage in stages]) for sizes in whole)
            behind = held.behind @ own + held.summing @ summed + held.ran @ parameters
            comes = max(comes, float(behind.max()))
        most = max(most, total + comes)
    return int(most)
