"""What each unit of a model costs on a platform: summed work, state, gradients, and the times of messages.

Thousands of plans cannot be built task by task in seconds. Splits, sizes, times and costs of collectives are the task
graph's, summed over each unit; `step_estimate` makes a step of them. The best plans are then simulated in full, and how
far the estimates were off is reported.

Messages are timed as when all groups of their kind send at once, and nobody else does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trioflow.base.derived import Derives, derived
from trioflow.base.experiments import Plan
from trioflow.base.precision_recipes import PrecisionRecipe
from trioflow.costmodel.choices import DeviceTimes, find_launch_s, host_times
from trioflow.hardware.machine import Platform, name_rank_node
from trioflow.network.collectives import CollectiveCost, CollectivePlanner
from trioflow.network.networks import FlowShape
from trioflow.parallel.backward import plan_recomputation
from trioflow.parallel.memory.profile import StorageTable, build_storage_table
from trioflow.parallel.model_graph import ModelGraph, of_model
from trioflow.parallel.plan import choose_stages
from trioflow.parallel.reference import choose_reference, predict_operator_times, without_communication
from trioflow.parallel.splits.pipeline import BALANCES, assign_units, boundary_bytes, list_parameters, partition
from trioflow.parallel.splits.sharding import find_owners, place_parameters, share_storages, split_updates
from trioflow.parallel.splits.tensor_parallel import split_for_plan, style_of
from trioflow.parallel.splits.tensor_split import (
    EXPERT_DOMAIN,
    EXPERT_NODES,
    EXPERT_SLICES,
    EXPERTS,
    TENSOR,
    Exchange,
    TensorSplit,
    is_sharded,
    prepare_split,
)
from trioflow.trace.store import pipeline_units

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class OperatorWork:
    """One rank's operators for one micro-batch of some samples, ``factor`` times the traced ones.

    ``alone_s``: of each operator [operators] [s]; ``spent_s``: of each unit's phases [units, phases] [s]; ``host_s``,
    ``launch_s``: what a host that runs ahead (``beside``) takes, likewise [s].
    """

    trace: ModelGraph
    factor: float
    alone_s: Floats
    spent_s: Floats
    host_s: Floats
    launch_s: Floats
    beside: bool


@dataclass(frozen=True)
class UnitWork:
    """What each unit of the model takes on one rank, for one micro-batch of some samples."""

    # Time of each unit's operators and of the tensor-parallel exchanges beside them, what backward
    # computes again included [units] [s]
    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    host_s: Floats  # of a host that runs ahead of its device, forward, backward, optimizer [units, 3] [s]
    activation_bytes: Floats  # what forward keeps for backward [units] [bytes]
    send_bytes: Floats  # what goes from each unit to the next one [units] [bytes]


@dataclass(frozen=True)
class UnitState:
    """What each unit keeps on one tensor-parallel rank, whatever the batch."""

    # Parameters, their gradients, optimizer state, and buffers [units] [bytes]
    parameter_bytes: Floats
    gradient_bytes: Floats
    state_bytes: Floats
    buffer_bytes: Floats


@dataclass(frozen=True)
class GradientSums:
    """What gradients of one tensor-parallel rank take beside their operators."""

    # Copying each unit's gradients into buckets, copying them back, and adding a further micro-
    # batch's [units] [s]
    copy_s: Floats
    return_s: Floats
    add_s: Floats


Grid = tuple[int, int, int, int, int, int]

_EXPERT_REPLICAS = "replicas of experts"


class MessageTimes(Derives):
    """Times of collectives and sends on a platform, each found once.

    Groups of one kind run side by side and get a max-min share of links; those of different kinds are taken not to
    meet.
    """

    def __init__(self, platform: Platform, collectives: CollectiveCost | None) -> None:
        self._planner = CollectivePlanner(platform, collectives)

    def exposed_s(self, plan: Plan, op_id: int, exchange: Exchange, factor: float, beside_s: Floats) -> float:
        """Return how long a collective at an operator keeps a rank waiting, at so many times the traced batch [s].

        What operators hide is taken off ``beside_s``, the times that they have left [operators] [s].
        """
        time_s = self._time_s(plan, exchange.group, exchange.collective, exchange.scale(factor))
        over = op_id if exchange.blocks > 1 else exchange.beside
        if over < 0:
            return time_s
        hidden_s = min(time_s, float(beside_s[over]))
        hidden_s *= 1 - (exchange.blocks > 1) / exchange.blocks
        beside_s[over] -= hidden_s
        return time_s - hidden_s

    def data_s(self, plan: Plan, collective: str, size_bytes: int, experts: bool = False) -> float:
        """Return the time of a collective of the replicas, of all or those of the same experts [s]."""
        return self._time_s(plan, _EXPERT_REPLICAS if experts else "data", collective, size_bytes)

    def send_s(self, plan: Plan, size_bytes: int) -> float:
        """Return the time of a message from one stage to the next [s]."""
        return self._time_s(plan, "pipeline", "send", size_bytes)

    @derived(lambda plan, axis, collective, size_bytes: (_grid_of(plan), axis, collective, size_bytes), most=1_000_000)
    def _time_s(self, plan: Plan, axis: str, collective: str, size_bytes: int) -> float:
        grid = _grid_of(plan)
        groups = list_groups(grid, axis)
        if len(groups[0]) < 2 or not size_bytes:
            return 0.0
        first = groups[0][:2] if collective == "send" else groups[0]
        flows = self._planner.build(collective, size_bytes, first)
        if not flows.flow_count:
            return 0.0
        shared = min(self._share_rate(grid, axis, collective == "send"), 1.0)
        rates = np.minimum(flows.max_rates_bytes_per_s, flows.shape.rates_bytes_per_s * shared)
        moving_s = np.divide(
            flows.sizes_bytes, rates, out=np.zeros_like(flows.sizes_bytes), where=flows.sizes_bytes > 0
        )
        return float((flows.latencies_s + moving_s).max())

    @derived()
    def _share_rate(self, grid: Grid, axis: str, sends: bool) -> float:
        """Return the slowest flow's rate with all groups moving, over that with one alone."""
        groups = list_groups(grid, axis)
        return _rate_of(groups, sends, self._planner) / _rate_of(groups[:1], sends, self._planner)


def _grid_of(plan: Plan) -> Grid:
    """Return what decides the groups of a plan."""
    return plan.data, plan.tensor, plan.pipeline, plan.expert, plan.expert_cut, plan.expert_hops[1]


def _rate_of(groups: Sequence[Sequence[int]], sends: bool, planner: CollectivePlanner) -> float:
    """Return the slowest max-min rate of flows between all neighbours in some rings or chains."""
    pairs = [
        (name_rank_node(a), name_rank_node(b))
        for group in groups
        for a, b in zip(group, group[1:] if sends else [*group[1:], group[0]], strict=False)
    ]
    return float(FlowShape(tuple(pairs), planner.router).rates_bytes_per_s.min())


_AXES = {"pipeline": (1, 2, 0), "data": (0, 2, 1), TENSOR: (0, 1, 2)}
"""Order in which pipeline, data and tensor places are listed, the group's own last."""
_EXPERT_AXES = {
    EXPERTS: ((0, 4, 1, 2, 3), 2),
    EXPERT_DOMAIN: ((0, 4, 1, 2, 3), 1),
    EXPERT_NODES: ((0, 4, 1, 3, 2), 1),
    _EXPERT_REPLICAS: ((0, 4, 2, 3, 1), 1),
    EXPERT_SLICES: ((0, 1, 2, 3, 4), 1),
}
"""The same of stages, replicas of experts, domains, experts of a domain and cuts of an expert; how many are the group's."""


def list_groups(grid: Grid, axis: str) -> list[list[int]]:
    """Return the groups of ranks along an axis: tensor fastest, then data, then pipeline.

    Those of experts exchange tokens, or hold the same experts.
    """
    data, tensor, pipeline, expert, cut, hop = grid
    ranks = np.arange(pipeline * data * tensor)
    order, own = (_AXES[axis], 1) if axis in _AXES else _EXPERT_AXES[axis]
    places: tuple[int, ...] = (pipeline, data, tensor)
    if axis in _EXPERT_AXES:
        places = (pipeline, -1, expert // (hop or expert), hop or expert, cut)
    groups = ranks.reshape(places).transpose(order)
    listed: list[list[int]] = groups.reshape(-1, math.prod(groups.shape[-own:])).tolist()
    return listed


_Allocations = tuple[StorageTable, NDArray[np.int64], NDArray[np.bool_]]
_PHASE_NUMBERS = {"forward": 0, "backward": 1, "optimizer": 2}
_DISPATCHES = tuple(f"tensor_parallel_{phase}_s" for phase in ("forward", "backward", "update"))


class UnitCosts(Derives):
    """Sums of a model's work on one platform (with the ranks of the plans), each made once; ``times`` of the device."""

    def __init__(self, times: DeviceTimes, platform: Platform, collectives: CollectiveCost | None = None) -> None:
        self.traces = [without_communication(trace) for trace in times.traces]
        self.recipe: PrecisionRecipe = self.traces[0].facts.recipe
        self.model, self.platform = times.model, platform
        self.messages = MessageTimes(platform, collectives)
        self.units = max(len(pipeline_units(self.traces[0])), 1)
        self.priced = choose_reference(self.traces, self.traces[0].facts.batch).price(self.model)

    def lies_in_buckets(self, plan: Plan) -> bool:
        """Whether a plan's gradients are added up where they are exchanged, and never copied."""
        return plan.sharding == "distributed" or self.recipe.keeps_main_gradients

    @derived()
    def cut(self, stages: int, balance: str = BALANCES[0]) -> list[int]:
        """Return where each stage begins among the units, and the last ends; PlanError when nothing says where to cut."""
        if stages == 1:
            return [0, self.units]
        sizes = [len(stage) for stage in partition(self.traces[0], stages, balance)]
        return [0, *np.cumsum(sizes).tolist()]

    @derived(
        lambda p, samples: (*style_of(p), p.data, p.pipeline, p.recompute, ":" in p.recompute and p.stages, samples)
    )
    def work_of(self, plan: Plan, samples: int) -> UnitWork:
        """Return the work of one micro-batch of some samples: with exchanges, and what is computed again."""
        done = self.work_of_operators(plan, samples)
        split, unit_of = split_prepared(done.trace, plan), find_units(done.trace)
        again = _list_recomputed(done.trace, plan)
        spent_s = done.spent_s.copy()
        spent_s[:, 1] += _sum(unit_of[again], done.alone_s[again], self.units)
        repeated = set(again.tolist())
        phase, host_s = _number_phases(done.trace), done.host_s.copy()
        host_s[:, 1] += _sum(unit_of[again], done.launch_s[again], self.units)
        host = self.platform.host_of(plan, self.recipe.framework)
        beside_s = done.alone_s.copy()
        for side in (split.before, split.after):
            for op_id, exchanges in side.items():
                each_s = host.get(_DISPATCHES[phase[op_id]], 0.0)
                many = sum(one.group == TENSOR for one in exchanges)
                host_s[unit_of[op_id], phase[op_id]] += each_s * many * done.beside
                time_s = sum(self.messages.exposed_s(plan, op_id, one, done.factor, beside_s) for one in exchanges)
                spent_s[unit_of[op_id], phase[op_id]] += time_s
                if op_id in repeated:
                    spent_s[unit_of[op_id], 1] += time_s
        return UnitWork(
            spent_s[:, 0],
            spent_s[:, 1],
            spent_s[:, 2],
            host_s,
            self._sum_activations(done.trace, plan, done.factor, again),
            _list_sends(done.trace) * done.factor,
        )

    @derived(lambda plan, samples: (*style_of(plan), samples))
    def work_of_operators(self, plan: Plan, samples: int) -> OperatorWork:
        """Return the work of a rank's operators at a micro-batch of some samples."""
        reference = choose_reference(self.traces, samples)
        trace = reference.trace
        factor = samples / trace.facts.batch
        launch_s = find_launch_s(self.platform.host, trace.facts)
        (times,), _ = reference.price(self.model).predict_times(split_prepared(trace, plan), [factor], launch_s)
        device_s, host_s = times.device_s, times.host_s
        operator, unit, share = _spread_updates(trace)
        place = unit * 3 + _number_phases(trace)[operator]
        device, host = (
            _sum(place, values[operator] * share, self.units * 3).reshape(-1, 3) for values in (device_s, host_s)
        )
        if times.separate_host:  # a GPU's host runs ahead of it; a CPU does both itself
            return OperatorWork(trace, factor, device_s, device, host, host_s, True)
        return OperatorWork(trace, factor, device_s + host_s, device + host, 0 * host, 0 * host_s, False)

    def _sum_activations(self, trace: ModelGraph, plan: Plan, factor: float, again: NDArray[np.int64]) -> Floats:
        """Return what each unit keeps for backward, without what is computed again [units] [bytes]."""
        table, first, kept = _list_allocations(trace, plan)
        unit, kept = find_units(trace)[first], kept & ~np.isin(first, again)
        sizes = table.bytes * (1 - table.growing + table.growing * factor)
        return _sum(unit[kept], sizes[kept], self.units)

    @derived(style_of)
    def state_of(self, plan: Plan) -> UnitState:
        """Return what a rank keeps whatever the batch."""
        trace = self.traces[0]
        table, first, _ = _list_allocations(trace, plan)
        unit = find_units(trace)[first]
        # One operator may update parameters of many units; state lies where its parameter does.
        owners, unit_of = (find_owners(trace).of_storage, dict(zip(table.storage_id, unit, strict=True)))
        parameters = list_parameters(trace) if owners else []
        for place, storage in enumerate(table.storage_id.tolist()):
            if storage in owners:
                unit[place] = unit_of.get(parameters[owners[storage]].storage_id, unit[place])
        return UnitState(
            *(
                _sum(unit, np.where(table.category == name, table.bytes, 0.0), self.units)
                for name in ("parameter", "gradient", "optimizer_state", "buffer")
            )
        )

    @derived(style_of)
    def gradient_sums_of(self, plan: Plan) -> GradientSums:
        """Return what gradients take beside the operators that make them."""
        trace = self.traces[0]
        gradients = trace.facts.gradients
        rules = dict(trace.facts.tensor_split or {})
        ready = np.array([int(g["ready_after_op_id"]) for g in gradients], dtype=np.int64)
        sizes = [int(g["size_bytes"]) // (plan.tensor if is_sharded(g, rules) else 1) for g in gradients]

        def make(name: str, reads: int = 2) -> Floats:
            times_s = self.priced.predict_elementwise(name, sizes, reads)["time_s"]
            return _sum(find_units(trace)[ready], times_s, self.units)

        adds = make("aten::add_", 0 if trace.facts.recipe.made_bytes else 2)
        return GradientSums(make("aten::mul"), make("aten::copy_"), adds)

    @derived(lambda plan: (*style_of(plan), plan.shards))
    def sharded_update_s(self, plan: Plan) -> float:
        """Return the optimizer's time on one rank's shards of the whole model [s]."""
        trace = self.traces[0]
        split = split_updates(prepare_split(trace, plan), plan, split_prepared(trace, plan))
        updates = trace.operator_columns["phase"].isin(["optimizer"])
        recorded, target = trace.operator_columns.take(updates), split.operators.take(updates)
        device_s, _ = predict_operator_times(recorded, target, self.model)
        host_s = host_times(trace, recorded, find_launch_s(self.platform.host, trace.facts)).sum()
        return float(device_s.sum() + (0.0 if trace.facts.device == "cuda" else host_s))


def _sum(places: NDArray[np.int64], values: Floats, count: int) -> Floats:
    """Return the sum of values at each place."""
    return np.bincount(places, values, count).astype(np.float64)


def find_units(trace: ModelGraph) -> NDArray[np.int64]:
    """Return the unit of each operator; the first of a model that names none."""
    return assign_units(trace) if pipeline_units(trace) else np.zeros(trace.operator_columns.rows, dtype=np.int64)


def split_prepared(trace: ModelGraph, plan: Plan) -> TensorSplit:
    """Return a plan's rank's operators, of a trace without the rules by which the plan cuts its layers."""
    return split_for_plan(prepare_split(trace, plan), plan)


@of_model
def _number_phases(trace: ModelGraph) -> NDArray[np.int64]:
    return np.array([_PHASE_NUMBERS[str(phase)] for phase in trace.operator_columns["phase"].tolist()], dtype=np.int64)


@partial(of_model, key=lambda plan: (plan.recompute, plan.stages))
def _list_recomputed(trace: ModelGraph, plan: Plan) -> NDArray[np.int64]:
    """Return the forward operators that backward runs again."""
    cut = choose_stages(trace, plan, None) if ":" in plan.recompute else []
    regions = plan_recomputation(trace, plan.recompute, cut)
    return np.array([op for region in regions for op in region.operators], dtype=np.int64)


@of_model
def _list_sends(trace: ModelGraph) -> Floats:
    """Return what the traced batch sends from each unit to the next [units] [bytes]."""
    sizes = [boundary_bytes(trace, cut) for cut in range(1, len(pipeline_units(trace)))]
    return np.array([*sizes, 0.0])


@partial(of_model, key=style_of)
def _list_allocations(trace: ModelGraph, plan: Plan) -> _Allocations:
    """Return a rank's allocations, the first operator that uses each, and whether backward needs it."""
    # Of one tensor-parallel rank: what replicas share is taken from the sums.
    shares = share_storages(prepare_split(trace, plan), replace(plan, sharding="none"))
    table = build_storage_table(trace, split_prepared(trace, plan).operators, shares)
    begins, storages, _ = table.uses
    counts = np.diff(begins)
    user = np.repeat(np.arange(len(counts)), counts)
    first, last = (np.zeros(len(table.bytes), dtype=np.int64) for _ in range(2))
    # Written backwards, so that the first user stands; forwards, so that the last one does.
    first[storages[::-1]] = user[::-1]
    last[storages] = user
    outlives = _number_phases(trace)[last] == _PHASE_NUMBERS["backward"]
    return table, first, table.made & (table.category == "activation") & outlives


@of_model
def _spread_updates(trace: ModelGraph) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Return the parts of all operators: which operator, in which unit of those it updates, and the part of its work."""
    unit_of = find_units(trace)
    parts = {op: {int(unit): 1.0} for op, unit in enumerate(unit_of)}
    placed = place_parameters(trace, unit_of, {})
    owners = find_owners(trace).of_operator
    bytes_of = [p.size_bytes for p in list_parameters(trace)] if owners else []
    for op, owned in owners.items():
        sizes = Counter[int]()
        for index in owned:
            for unit in placed[index]:
                sizes[unit] += bytes_of[index]
        if len(sizes) > 1:
            parts[op] = {unit: size / sizes.total() for unit, size in sizes.items()}
    rows = [(op, unit, share) for op, at in parts.items() for unit, share in at.items()]
    operators, units, shares = zip(*rows, strict=True)
    return np.array(operators), np.array(units), np.array(shares)
