"""The cost estimate of a plan: the step that its units' summed times give, and what a rank holds at least.

A schedule's own table says in which order stages compute. Messages, copies and compute each run in a stream, one after
the other, as the simulation's tasks do; no links are shared. Under ``fully_shard`` the order is that of
``programs.units``.
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import structs

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
from trioflow.parallel.splits.sharding import EXPERTS_UNIT, build_units, partition_stages, place_parameters
from trioflow.parallel.splits.tensor_parallel import style_of
from trioflow.parallel.splits.tensor_split import find_expert_modules, prepare_split
from trioflow.sweeps.unit_costs import Floats, UnitCosts, UnitWork, find_units
from trioflow.trace.store import pipeline_units

_INPUT_SHARE = 0.5
"""Part of backward that makes the gradient of a stage's input: two products of equal size, one for it."""


class StepEstimate(NamedTuple):
    """Estimated step [s], and what the fullest rank holds at least [bytes], never too much."""

    time_s: float
    least_bytes: int


def estimate_step(costs: UnitCosts, plan: Plan, batch: int) -> StepEstimate:
    """Return the cost estimate of a plan on some samples; PlanError when it fits neither model nor batch."""
    samples = micro_batch_sizes(plan, batch)[0]
    update_host_s = None
    if plan.shards_units and plan.pipeline == 1:
        time_s = _time_micro_steps(costs, plan, costs.work_of(plan, samples)) + costs.sharded_update_s(plan)
    else:
        time_s = _time_pipeline(costs, plan, samples)
        if plan.sharding == "zero1":
            update_s, update_host_s = _time_partitioned(costs, plan, samples)
            time_s += update_s
        time_s += _time_late_launches(costs, plan, samples)
    time_s = max(time_s, _time_host(costs, plan, samples, update_host_s))
    return StepEstimate(time_s, _count_least_bytes(costs, plan, samples))


def _sum_stages(units: Sequence[Floats], begins: Sequence[int]) -> Floats:
    """Return sums of some values of units over those of each stage [values, stages]."""
    return np.add.reduceat(np.stack(units), begins[:-1], axis=1)


def _schedule_of(plan: Plan) -> tuple[str, int, int, int]:
    """Return what decides the actions of a plan's pipeline."""
    return (plan.schedule, plan.pipeline, plan.pieces, plan.stages_per_rank)


@derived(lambda plan, samples: (*style_of(plan), *_schedule_of(plan), plan.shards, samples))
def _time_partitioned(costs: UnitCosts, plan: Plan, samples: int) -> tuple[float, float]:
    """Return the longest update of a rank's own parameters on its device and on its host, each with the broadcasts of all [s]."""
    work, begins, schedule = costs.work_of_operators(plan, samples), costs.cut(plan.stages), plan_schedule(plan)
    placed = place_parameters(work.trace, find_units(work.trace), {})
    units = [
        {u for stage in schedule.stages_of_rank(rank) for u in range(*begins[stage : stage + 2])}
        for rank in range(schedule.ranks)
    ]
    updates_s, hosts_s = [], []
    for partition in partition_stages(work.trace, plan, placed, units):
        parts = (*partition.parameters, *partition.experts)
        sent_s = sum(costs.messages.data_s(plan, "broadcast", p.size_bytes) for part in parts for p in part)
        for operators, shares in zip(partition.operators, partition.shares, strict=True):
            updates_s.append(sum(float(work.alone_s[op]) * shares.get(op, 1.0) for op in operators) + sent_s)
            hosts_s.append(float(work.launch_s[list(operators)].sum()) + sent_s)
    return max(updates_s), max(hosts_s)


def _time_host(costs: UnitCosts, plan: Plan, samples: int, update_s: float | None) -> float:
    """Return what the busiest rank's host takes to launch a step [s]; it waits for no message.

    ``update_s``: the optimizer's part with what is sent behind it, where replicas share it by parameters [s].
    """
    each = np.array([plan.pieces, plan.pieces, float(update_s is None)])
    (stages,) = _sum_stages([costs.work_of(plan, samples).host_s @ each], costs.cut(plan.stages))
    schedule = plan_schedule(plan)
    return (update_s or 0.0) + max(float(stages[schedule.stages_of_rank(rank)].sum()) for rank in range(schedule.ranks))


def _time_late_launches(costs: UnitCosts, plan: Plan, samples: int) -> float:
    """Return how long the first stage's device idles because its host launches forward more slowly than it computes [s].

    Backward hides its own launches, but with accumulation a slow host falls further behind in each micro-step. Of a
    pipeline the first forward alone counts: later launches of one stage run while another computes.
    """
    work, first = costs.work_of(plan, samples), slice(costs.cut(plan.stages)[1])
    forward_s, backward_s = (
        float((work.host_s[first, place] - device_s[first]).sum())
        for place, device_s in enumerate((work.forward_s, work.backward_s))
    )
    before = plan.pieces - 1 if plan.pipeline == 1 else 0
    return max(forward_s + before * max(forward_s + backward_s, 0.0), 0.0)


_Ends = tuple[list[float], dict[int, tuple[float, float]]]
"""When each rank is free, and when each stage's last backward began and ended [s]."""


def _key_of_computing(plan: Plan, samples: int) -> tuple[Hashable, ...]:
    """Return what decides a schedule's computing; sharding counts only under ``fully_shard``."""
    shards = (plan.sharding, plan.shards, plan.sums_shards) if plan.shards_units else ()
    return (*style_of(plan), *_schedule_of(plan), plan.data, plan.recompute, samples, *shards)


@derived(_key_of_computing)
def _time_computing(costs: UnitCosts, plan: Plan, samples: int) -> tuple[_Ends, float, Floats]:
    """Return when a schedule's computing ends, gradients' sums over micro-batches included.

    Also, under ``fully_shard``, the first stage's wait for units that stay gathered, and each stage's reductions [stages] [s].
    """
    work, begins, schedule = costs.work_of(plan, samples), costs.cut(plan.stages), plan_schedule(plan)
    if holds_host(plan, costs.recipe.framework):
        slower_s = np.maximum(np.stack([work.forward_s, work.backward_s], 1), work.host_s[:, :2])
        work = replace(work, forward_s=slower_s[:, 0], backward_s=slower_s[:, 1])
    add_s = costs.gradient_sums_of(plan).add_s * (1 - 1 / schedule.micro_batches)  # behind all micro-batches but one
    forward_s, backward_s, add_s = _sum_stages((work.forward_s, work.backward_s, add_s), begins)
    first_s, reduce_s = 0.0, np.zeros_like(forward_s)
    if plan.shards_units:
        forward_s, backward_s, reduce_s, first_s = _time_stages(costs, plan, work, begins)
    times_s = {FORWARD: forward_s.tolist(), BACKWARD: (backward_s + add_s).tolist()}
    send_s = [costs.messages.send_s(plan, round(float(work.send_bytes[end - 1]))) for end in begins[1:-1]]
    return _play(schedule, times_s, send_s), first_s, reduce_s


def _time_pipeline(costs: UnitCosts, plan: Plan, samples: int) -> float:
    """Return the time of the schedule, the buckets, and the optimizer unless replicas share it by parameters [s]."""
    schedule, ((ranks_s, last), wait_s, reduce_s) = plan_schedule(plan), _time_computing(costs, plan, samples)
    buckets = plan.data > 1 and not plan.shards_units
    copied = buckets and not costs.lies_in_buckets(plan)
    sums, state = costs.gradient_sums_of(plan), costs.state_of(plan)
    units = (
        sums.copy_s * copied,
        sums.return_s * copied + costs.work_of(plan, samples).update_s * (plan.sharding != "zero1") / plan.shards,
        state.gradient_bytes,
        state.parameter_bytes,
    )
    copy_s, behind_s, gradient_bytes, parameter_bytes = _sum_stages(units, costs.cut(plan.stages))
    whole = plan.sharding != "distributed" or costs.recipe.reduces_whole
    end_s = 0.0
    for rank, free_s in enumerate(ranks_s):
        stages = schedule.stages_of_rank(rank)
        computed_s = free_s + copy_s[stages].sum()
        sent_s, gathered_s = computed_s * costs.platform.communication_on_compute_stream * buckets, 0.0
        for stage in stages if buckets else ():
            (begin_s, done_s), made_bytes, whole_bytes = last[stage], 0, max(round(gradient_bytes[stage]), 1)
            byte_s = (done_s - begin_s + copy_s[stage]) / whole_bytes  # made evenly over a backward
            for size, count in _list_buckets(costs, plan, gradient_bytes[stage]):
                # Among equal buckets the first or the last decides the end.
                exchange_s = costs.messages.data_s(plan, "all_reduce" if whole else "reduce_scatter", size)
                first_s, last_s = (begin_s + byte_s * (made_bytes + size * place) for place in (1, count))
                sent_s = max(max(sent_s, first_s) + count * exchange_s, last_s + exchange_s)
                made_bytes += size * count
            if plan.sharding == "distributed":
                weights = _list_buckets(costs, plan, parameter_bytes[stage])
                gathered_s += sum(many * costs.messages.data_s(plan, "all_gather", one) for one, many in weights)
        end_s = max(end_s, max(computed_s, sent_s) + (behind_s + reduce_s)[stages].sum() + gathered_s)
    return wait_s + float(end_s)


def _list_buckets(costs: UnitCosts, plan: Plan, gradient_bytes: float) -> list[tuple[int, int]]:
    """Return the sizes of a stage's buckets [bytes], each with how many there are; the first has a limit of its own."""
    left, width = round(float(gradient_bytes)), costs.recipe.bucket_width
    if plan.sharding == "distributed" and costs.recipe.reduces_whole:
        return [(left, 1)]
    first, limit = min(round(plan.first_bucket_bytes * width), left), round(plan.bucket_bytes * width)
    more, rest = divmod(left - first, limit)
    return [(size, count) for size, count in ((first, 1), (limit, more), (rest, 1)) if size * count > 0]


class _Turn(NamedTuple):
    """One action in an order in which all can run: what it waits for comes first.

    ``source``: place of the action that it waits for, from 1; 0 for none. ``link``: stage behind which the message
    crosses to another rank; -1 for no message.
    """

    rank: int
    stage: int
    kind: str
    source: int
    link: int


@derived()
def _order(schedule: Schedule) -> tuple[_Turn, ...]:
    """Return the compute actions of a schedule in an order in which each finds what it waits for."""
    rows = [[a for a in leaves(row) if a.kind in COMPUTE_KINDS] for row in schedule.rows]
    rank_of, last = schedule.rank_of_stage, schedule.stages - 1
    made: dict[tuple[bool, int, int | None] | None, int] = {None: 0}

    def find_needed(action: Action) -> tuple[bool, int, int | None] | None:
        forth = action.kind == FORWARD
        if action.kind == BACKWARD_WEIGHT or action.stage == (0 if forth else last):
            return None
        return forth, action.stage + (-1 if forth else 1), action.micro_batch

    turns: list[_Turn] = []
    for rank, action in take_turns(rows, lambda _, one: find_needed(one) in made):
        needed, forth = find_needed(action), action.kind == FORWARD
        crosses = needed is not None and rank_of[needed[1]] != rank
        link = action.stage - forth if crosses else -1
        turns.append(_Turn(rank, action.stage, action.kind, made[needed], link))
        if action.kind != BACKWARD_WEIGHT:
            made.setdefault((forth, action.stage, action.micro_batch), len(turns))
    return tuple(turns)


def _play(schedule: Schedule, times_s: dict[str, list[float]], send_s: Sequence[float]) -> _Ends:
    """Return when each rank is free and when each stage's last backward began and ended [s].

    ``times_s``: of forward and backward on each stage; ``send_s``: of the messages behind each stage but the last.
    """
    times_s = {
        **times_s,
        BACKWARD_INPUT: [time_s * _INPUT_SHARE for time_s in times_s[BACKWARD]],
        BACKWARD_WEIGHT: [time_s * (1 - _INPUT_SHARE) for time_s in times_s[BACKWARD]],
    }
    wait_s = [*send_s, 0.0]
    free_s, ends_s = [0.0] * schedule.ranks, [0.0]
    last: dict[int, tuple[float, float]] = {}
    for rank, stage, kind, source, link in _order(schedule):
        begin_s = max(free_s[rank], ends_s[source] + wait_s[link])
        free_s[rank] = end_s = begin_s + times_s[kind][stage]
        ends_s.append(end_s)
        if kind in (BACKWARD, BACKWARD_WEIGHT):
            last[stage] = (begin_s, end_s)
    return free_s, last


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


class _Streams:
    """When compute, messages and the last reduction are done under ``fully_shard`` [s]; a CPU does all in one stream."""

    def __init__(self, device: str | None) -> None:
        self.free_s = {"compute": 0.0, "messages": 0.0}
        self.messages = "compute" if device == "cpu" else "messages"
        self.reduced_s = 0.0

    def compute(self, time_s: float, after_s: float = 0.0) -> float:
        """Compute when what came before is done, not before a time; return the end."""
        end_s = self.free_s["compute"] = max(self.free_s["compute"], after_s) + time_s
        return end_s

    def send(self, time_s: float, after_s: float) -> float:
        """Run a collective likewise."""
        end_s = self.free_s[self.messages] = max(self.free_s[self.messages], after_s) + time_s
        return end_s

    def reduce(self, shard: Shard, adds: bool = False) -> None:
        """Reduce a unit's gradients, and add its shards to those of the micro-steps before."""
        copied_s = self.compute(shard.reduce_copy_s, self.reduced_s)
        self.reduced_s = self.send(shard.scatter_s + shard.accumulate_s * adds, copied_s)

    def forward(self, parts: Sequence[Part], root: Shard) -> float:
        """Gather the root, then each unit beside the one before, two in flight at most; return when the last is there.

        The host is ahead, and asks for backward's first one then.
        """
        copied_s = [0.0, self.compute(root.copy_out_s, self.send(root.gather_s, self.compute(0.0)))]
        for shard, forward_s, _ in parts:
            if shard:
                copied_s.append(self.compute(shard.copy_out_s, self.send(shard.gather_s, copied_s[-2])))
            self.compute(forward_s)
        return copied_s[-1]

    def backward(
        self, parts: Sequence[Part], gathers: bool, asked_s: float, adds: bool, reduces: bool, shards: bool
    ) -> None:
        """Gather each unit while the one behind it computes; add up, whole or as ``shards``, and reduce what each made."""
        coming = [part.shard for part in parts if part.shard] if gathers else []
        arrives_s = self.send(coming[-1].gather_s, asked_s) if coming else 0.0
        for shard, _, backward_s in reversed(parts):
            if shard and coming:
                copied_s = self.compute(coming.pop().copy_out_s, arrives_s)
                arrives_s = self.send(coming[-1].gather_s, copied_s) if coming else 0.0
            self.compute(backward_s)
            if shard:
                self.compute(shard.accumulate_s * (adds and not shards))
            if shard and reduces:
                self.reduce(shard, adds and shards)


def _time_micro_steps(costs: UnitCosts, plan: Plan, work: UnitWork) -> float:
    """Return the forwards, backwards and exchanges of a sharded plan without a pipeline [s]."""
    parts, root = _list_parts(costs, plan, work, 0, costs.units)
    streams, shards = _Streams(costs.traces[0].facts.device), plan.sums_shards
    for number in range(plan.accumulate):
        reduces, adds = shards or number == plan.accumulate - 1, number > 0
        asked_s = streams.forward(parts, root)
        streams.backward(parts, plan.sharding != "zero2", asked_s, adds, reduces, shards)
        streams.compute(root.accumulate_s * (adds and not shards))
        if reduces:
            streams.reduce(root, adds and shards)
            streams.compute(0.0, streams.reduced_s)
    return streams.compute(0.0)


def _time_stages(
    costs: UnitCosts, plan: Plan, work: UnitWork, begins: Sequence[int]
) -> tuple[Floats, Floats, Floats, float]:
    """Return what the stages of a pipeline take under ``fully_shard``, their gradients' sums left out.

    Forward and backward of one micro-batch, waits for units given up included; reducing gradients behind the last one
    [stages] [s]; the first stage's wait for units that later stay [s].
    """
    device = costs.traces[0].facts.device
    gives_up, turns_once = plan.sharding != "zero2", find_traits(plan.schedule).turns_once
    rows, first_s = [], 0.0
    for begin, end in itertools.pairwise(begins):
        parts, root = _list_parts(costs, plan, work, begin, end)
        forward_s, backward_s = (sum(times_s) for times_s in list(zip(*parts, strict=True))[1:])
        streams = _Streams(device)
        streams.forward(parts, root)
        first_s = first_s or streams.compute(0.0) - forward_s
        if gives_up:
            streams = _Streams(device)
            streams.forward(parts, Shard())  # the root is gathered once
            forward_s = streams.compute(0.0)
        # Behind the first of backwards in a row all units stay gathered.
        if gives_up and not turns_once:
            streams = _Streams(device)
            streams.backward(parts, True, 0.0, False, False, False)
            backward_s = streams.compute(0.0)
        streams = _Streams("cuda")
        for shard in (root, *(part.shard for part in parts if part.shard)):
            streams.reduce(shard)
        rows.append((forward_s, backward_s, streams.reduced_s))
    return *np.array(rows).T, first_s


def _list_parts(costs: UnitCosts, plan: Plan, work: UnitWork, begin: int, end: int) -> tuple[list[Part], Shard]:
    """Return the pieces of some of the model's units, and what their root takes.

    Blocks that only their parameters name share the work evenly.
    """
    inner, roots = _list_shards(costs, plan)
    shards = inner[begin:end] if plan.pipeline > 1 else inner
    times_s = np.stack([work.forward_s, work.backward_s])[:, begin:end]
    pieces = len(shards) // (end - begin)
    times_s = np.repeat(times_s / pieces, pieces, axis=1)
    parts = [Part(*part) for part in zip(shards, *times_s.tolist(), strict=True)]
    return parts, Shard(*map(sum, zip(*roots[begin:end], strict=True)))


@derived(lambda p: (*style_of(p), p.shards, p.pieces > 1, p.sums_shards, p.data, p.pipeline))
def _list_shards(costs: UnitCosts, plan: Plan) -> tuple[list[Shard | None], list[Shard]]:
    """Return what each inner unit takes, in order of the model's units, and what the root takes of each of these."""
    trace = prepare_split(costs.traces[0], plan)

    def elementwise_s(name: str, sizes: Sequence[int], reads: int) -> float:
        return float(costs.priced.predict_elementwise(name, sizes, reads)["time_s"].sum())

    *inner, root = build_units(trace, plan.tensor, plan.expert_parts, plan.places_experts)
    at: dict[int, list[Parameter]] = {}
    placed = place_parameters(trace, find_units(trace), {})
    unit_of = {p.name: min(where, default=0) for p, where in zip(list_parameters(trace), placed, strict=True)}
    for parameter in root.parameters:
        at.setdefault(unit_of[parameter.name], []).append(parameter)
    units = [*inner, *(structs.replace(root, parameters=tuple(parameters)) for parameters in at.values())]
    shards = [
        Shard(
            costs.messages.data_s(plan, "all_gather", one.gathered_bytes, one.unit.experts),
            one.copy_out_s,
            one.accumulate_s,
            one.reduce_copy_s,
            costs.messages.data_s(plan, "reduce_scatter", one.reduced_bytes, one.unit.experts),
            float(one.gathered_bytes) if one.reduced_bytes else 0.0,
        )
        for one in cost_units(units, plan, plan.pieces, elementwise_s, trace)
    ]
    by_name: dict[str, Shard] = {}
    for unit, shard in zip(inner, shards, strict=False):
        # Experts go with the unit that they are inside.
        name = unit.name.removesuffix(EXPERTS_UNIT) if unit.experts else unit.name
        by_name[name] = Shard(*map(sum, zip(by_name.get(name, Shard()), shard, strict=True)))
    of_root = dict(zip(at, shards[len(inner) :], strict=True))
    names = list(pipeline_units(trace)) or [*by_name] or [""]
    return [by_name.get(name) for name in names], [of_root.get(unit, Shard()) for unit in range(costs.units)]


class _Held(NamedTuple):
    """What ranks hold of stages at one time or another, each state once, rank by rank.

    ``in_flight``: micro-batches [states, stages], from ``first_state`` on of each rank [ranks]; ``behind``: behind each
    backward, ``summing``: whether gradients are still added up, ``ran``: whether the backward was the stage's
    [backwards, stages], from ``first_backward`` on of each rank [ranks]; ``on_rank``: its stages [ranks, stages].
    """

    in_flight: Floats
    first_state: list[int]
    behind: Floats
    summing: Floats
    ran: Floats
    first_backward: list[int]
    on_rank: Floats


@derived()
def _count_held(schedule: Schedule) -> _Held:
    """Return what ranks hold of stages; a forward that is run again counts from its second run on."""
    again, stages = recomputed_pairs(schedule), schedule.stages
    states: list[tuple[int, ...]] = []
    backwards: list[tuple[int, ...]] = []
    first_state, first_backward = [], []
    for row in schedule.rows:
        is_held: dict[tuple[int, int | None], bool] = {}
        now, done = [0] * stages, [0] * stages
        seen, behind = {tuple(now)}, {(0,) * 3 * stages}
        for action in leaves(row):
            pair, stage = (action.stage, action.micro_batch), action.stage
            before = is_held.get(pair, False)
            if action.kind == FORWARD:
                is_held[pair] = pair not in again or pair in is_held
            elif action.kind in (BACKWARD, BACKWARD_WEIGHT):
                is_held.pop(pair, None)
            now[stage] += is_held.get(pair, False) - before
            seen.add(tuple(now))
            if action.kind == BACKWARD:
                summing = [0 < count < schedule.micro_batches for count in done]
                summing[stage] = True
                behind.add((*now, *summing, *(other == stage for other in range(stages))))
                done[stage] += 1
        first_state.append(len(states))
        first_backward.append(len(backwards))
        states += seen
        backwards += behind
    in_flight = np.array(states, dtype=np.float64)
    kept, open_sums, ran = np.array(backwards, dtype=np.float64).reshape(-1, 3, stages).transpose(1, 0, 2)
    on_rank = np.eye(schedule.ranks)[:, [at for _, at in sorted(schedule.rank_of_stage.items())]]
    return _Held(in_flight, first_state, kept, open_sums, ran, first_backward, on_rank)


@derived(lambda plan, samples: (*_key_of_computing(plan, samples), plan.sharding, plan.shards))
def _count_least_bytes(costs: UnitCosts, plan: Plan, samples: int) -> int:
    """Return what the fullest rank holds at least [bytes]: where stages of equal time do not fit, stages of equal layers are tried."""
    cuts = {tuple(costs.cut(plan.stages, balance)) for balance in BALANCES[: 1 + (plan.pipeline > 1)]}
    return min(_count_bytes(costs, plan, costs.work_of(plan, samples), cut) for cut in cuts)


def _count_bytes(costs: UnitCosts, plan: Plan, work: UnitWork, begins: Sequence[int]) -> int:
    """Return what the fullest rank holds at least when stages begin at the units ``begins`` [bytes].

    Parameters, state and buffers, with the activations in flight or, after backward, all gradients; main gradients that
    nobody shards all the time. What is computed again needs nothing. Of sharded units the shards alone count, but in a
    pipeline gradients are whole until the last micro-batch, and parameters behind each backward.
    """
    state, recipe, counts = costs.state_of(plan), costs.recipe, _count_held(plan_schedule(plan))
    shards = plan.shards if plan.shards_units else 1
    # Where main weights are what is sharded, they are a state.
    weights = not (plan.shards_units and recipe.main_parameter_bytes)
    standing, gradients, activations = _sum_stages(
        (
            state.parameter_bytes / shards * weights + state.state_bytes / plan.shards + state.buffer_bytes,
            state.gradient_bytes / shards,
            work.activation_bytes,
        ),
        begins,
    )
    main = costs.lies_in_buckets(plan) and not plan.shards_units
    buckets = plan.data > 1 and not (plan.shards_units or main)
    standing, gradients = counts.on_rank @ standing, counts.on_rank @ gradients
    in_flight = np.maximum.reduceat(counts.in_flight @ activations, counts.first_state)
    comes = in_flight + gradients if main else np.maximum(in_flight, gradients)
    # Of experts the trace does not say which gradient is whose.
    if shards > 1 and plan.pipeline > 1 and not find_expert_modules(costs.traces[0]):
        # Gradients lie in the format that they are reduced in, until the stage's last micro-batch.
        reduced_bytes = state.gradient_bytes * recipe.reduce_bytes / recipe.gradient_bytes
        inner, roots = _list_shards(costs, plan)
        whole_bytes = [
            root.whole_bytes + (one.whole_bytes if one else 0.0) for one, root in zip(inner, roots, strict=True)
        ]
        summed, parameters = _sum_stages((reduced_bytes, np.array(whole_bytes)), begins)
        behind = counts.behind @ activations + counts.summing @ summed + counts.ran @ parameters
        comes = np.maximum(comes, np.maximum.reduceat(behind, counts.first_backward))
    return int((standing + gradients * buckets + comes).max())
