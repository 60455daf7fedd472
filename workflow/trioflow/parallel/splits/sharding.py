"""Who holds, updates and reduces which parameters among data-parallel ranks: FSDP's units, ZeRO's partitions.

Which parameters each operator of the optimizer updates is found first (`find_owners`): whether a loop or one operator
over all (``foreach``, ``fused``), a rank does the work, and holds the state, of its own parameters.

``fsdp`` (and ``zero3``, the same) is ``fully_shard`` as PyTorch's own examples apply it: to each inner unit of the
model's chain by itself, then to the whole model, whose root keeps what is left, the first and the last unit
(`build_units`). ``zero2`` is ``fully_shard`` with ``reshard_after_forward=False``, ``hsdp`` with a mesh of two
dimensions. ``zero1`` is DDP with ``ZeroRedundancyOptimizer``: each rank updates its part of the parameters and
broadcasts them (`partition_optimizer`). Each stage of a pipeline has one of its own, and so have experts, over the ranks
that hold the same ones.

References: PyTorch 2.13 ``torch/distributed/fsdp/_fully_shard``,
``torch/distributed/optim/zero_redundancy_optimizer.py`` (``_partition_parameters``, ``_broadcast_params_from_rank``).
"""

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import SLICED
from trioflow.parallel.model_graph import ModelGraph, of_model
from trioflow.parallel.splits.pipeline import (
    Parameter,
    assign_units,
    find_tied,
    is_inside,
    list_parameters,
    loss_operators,
)
from trioflow.parallel.splits.tensor_split import TensorSplit, kind_of_module, list_untrained, scale_work
from trioflow.trace.store import Trace, pipeline_units


class Owners(Struct, frozen=True):
    """Parameters, as places in ``list_parameters``, and what belongs to them."""

    # Optimizer operator to the parameters that it updates; those of its module, or all, where the
    # trace does not say
    of_operator: dict[int, frozenset[int]]
    # Storage of a parameter, its gradient, its optimizer state, or of what the optimizer makes for
    # it in passing, to the parameter
    of_storage: dict[int, int]


@of_model
def find_owners(trace: ModelGraph) -> Owners:
    """Return what belongs to which parameter; nothing where the trace lists no parameters.

    State tensors are recognised by operators that mix them with a parameter or gradient: lists name these in one order.
    Numbers, such as counts of steps, belong to the parameters updated next.
    """
    try:
        parameters = list_parameters(trace)
    except PlanError:
        return Owners({}, {})
    storage, shapes = trace.storage, trace.shape
    owner: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        for known in (parameter.storage_id, parameter.gradient_storage_id):
            if known >= 0:
                owner[known] = index
    rows = [row for row in trace.rows if row.phase == "optimizer"]
    owners: dict[int, frozenset[int]] = {}
    for _ in range(2):  # the second pass knows the states that the first one met late
        for row in rows:
            lists = [[i for i in side if shapes[i]] for side in (row.input_ids, row.output_ids)]
            owned = {owner[storage[i]] for side in lists for i in side if storage[i] in owner}
            order = _find_order([owner.get(storage[i], -1) for i in lists[0]], len(owned))
            for side in lists:
                _follow_order(side, order, storage, shapes, owner)
            owners[row.op_id] = frozenset(owned)
    following: frozenset[int] = frozenset()
    for op_id in reversed(owners):
        following = owners[op_id] = owners[op_id] or following
    for row in rows:
        if not owners[row.op_id]:
            owners[row.op_id] = _guess_owners(parameters, row.module)
    return Owners(owners, owner)


def _find_order(owners: Sequence[int], count: int) -> list[int]:
    """Return the order of parameters in the lists of an operator; empty where they have no common one."""
    if not count or len(owners) % count:
        return []
    for begin in range(0, len(owners), count):
        part = list(owners[begin : begin + count])
        if -1 not in part and len(set(part)) == count:
            return part
    return []


def _follow_order(
    tensors: Sequence[int],
    order: Sequence[int],
    storage: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    owner: dict[int, int],
) -> None:
    """Give the tensors of an operator's lists their parameters."""
    count = len(order)
    if not count or len(tensors) % count:
        return
    for place, index in enumerate(tensors):
        # Of one parameter, a state may have any shape; among several, the shape confirms the place.
        if count == 1 or shapes[index] == shapes[tensors[place % count]]:
            owner.setdefault(storage[index], order[place % count])


def _guess_owners(parameters: Sequence[Parameter], module: str) -> frozenset[int]:
    """Return the parameters that an operator without known tensors may update."""
    trained = [i for i, p in enumerate(parameters) if p.trained] or list(range(len(parameters)))
    return frozenset([i for i in trained if parameters[i].module == module] or trained)


@of_model
def list_updates(trace: ModelGraph) -> list[int]:
    """Return the optimizer operators on more than single numbers, such as a count of steps."""
    return [row.op_id for row in trace.rows if row.phase == "optimizer" and any(map(len, row.input_shapes))]


def share_updates(
    trace: Trace, sizes: Sequence[float], held_bytes: Sequence[float], operators: Iterable[int] | None = None
) -> dict[int, float]:
    """Return the part of optimizer operators' work, of all or some, on what a rank holds: ``held`` of parameters' ``sizes`` [bytes]."""
    owners = find_owners(trace).of_operator
    shares: dict[int, float] = {}
    for op_id in list_updates(trace) if operators is None else operators:
        owned = owners.get(op_id, ())
        if whole := sum(sizes[i] for i in owned):
            shares[op_id] = sum(held_bytes[i] for i in owned) / whole
    return shares


@of_model
def share_optimizer(
    trace: ModelGraph, operators: Sequence[int], sizes: Sequence[float], placed: Sequence[frozenset[int]], stage: int
) -> tuple[list[int], dict[int, float]]:
    """Return a stage's optimizer operators, and its part of those that update parameters of several stages.

    ``operators``: those assigned to the stage; ``sizes`` [bytes] and ``placed`` (stages) have an entry a parameter.
    """
    here = set(operators)
    for op_id, parameters in find_owners(trace).of_operator.items():
        stages = frozenset[int]().union(*map(placed.__getitem__, parameters))
        if len(stages) > 1:
            (here.add if stage in stages else here.discard)(op_id)
    held_bytes = [n * (stage in at) for n, at in zip(sizes, placed, strict=True)]
    shares = share_updates(trace, sizes, held_bytes, [op for op in list_updates(trace) if op in here])
    return sorted(here), {op: share for op, share in shares.items() if share < 1}


def shard_updates(trace: ModelGraph, degree: int) -> dict[int, float]:
    """Return the part of the optimizer's operators that is left to one tensor-parallel rank."""
    try:
        sizes, held_bytes = ([float(p.size_bytes) for p in list_parameters(trace, ranks)] for ranks in (1, degree))
    except PlanError:  # names of modules are all that is known
        rules = trace.facts.tensor_split or {}
        return {op: 1 / degree for op in list_updates(trace) if kind_of_module(trace.rows[op].module, rules)}
    return share_updates(trace, sizes, held_bytes)


def held_sizes(trace: Trace, plan: Plan) -> list[float]:
    """Return what one rank of each parameter's stage updates of it [bytes]; rank 0's padding included."""
    if plan.tensor_style == "gather":
        # Every parameter is shared by all, those that no layer splits too.
        return [p.size_bytes / plan.tensor for p in list_parameters(trace)]
    parameters = list_parameters(trace, plan.tensor, plan.expert_parts)
    if plan.sharding in SLICED:
        # Buckets are cut into equal slices wherever parameters begin and end.
        return [p.size_bytes / plan.shards_of(p.experts) for p in parameters]
    if not plan.shards_units:
        return [float(p.size_bytes) for p in parameters]
    shards = [plan.shards_of(p.experts) for p in parameters]
    return [p.padded_bytes(n) / n for p, n in zip(parameters, shards, strict=True)]


@of_model
def share_storages(
    trace: ModelGraph, plan: Plan, here: frozenset[int] | None = None, kept: frozenset[int] | None = None
) -> dict[int, float]:
    """Return the part of each parameter, its gradient and state that a rank holds, by storage.

    ``here``, ``held``: places in ``list_parameters`` of what it updates, and of what it has with gradients; all by
    default.
    """
    shares, owners, of_parameter = _share_owned(trace, plan)
    for places, which in ((here, ~of_parameter), (kept, of_parameter)):
        if places is not None:
            shares = np.where(which & ~np.isin(owners, list(places)), 0.0, shares)
    return dict(zip(find_owners(trace).of_storage, shares.tolist(), strict=True))


@of_model
def _share_owned(trace: ModelGraph, plan: Plan) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the same where nothing is left out, whose each is, and whether it is no state [storages]."""
    owners = find_owners(trace).of_storage
    if not owners:
        return np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)
    whole, parts = list_parameters(trace), list_parameters(trace, plan.tensor, plan.expert_parts)
    updated, main = held_sizes(trace, plan), trace.facts.recipe.main_parameter_bytes
    weights = weigh_parameters(trace, plan)
    shares, of_parameter = [], []
    for storage, index in owners.items():
        parameter, size = parts[index], max(whole[index].size_bytes, 1)
        split = parameter.size_bytes / size
        if storage == parameter.storage_id:
            # What is sharded of a trained one is the main weight, kept as a state.
            state = plan.shards_units and main and parameter.trained
            shares.append(0.0 if state else weights[index] / size)
        else:
            shares.append(split if storage == parameter.gradient_storage_id else updated[index] / size)
        of_parameter.append(storage in (parameter.storage_id, parameter.gradient_storage_id))
    return np.array(shares), np.array([*owners.values()]), np.array(of_parameter)


def weigh_parameters(trace: Trace, plan: Plan) -> list[float]:
    """Return what a rank of its stage holds of each parameter, sharded ones as main weights where a recipe has such [bytes]."""
    parameters = list_parameters(trace, plan.tensor, plan.expert_parts)
    if not plan.shards_units:
        return [float(p.size_bytes) for p in parameters]
    main = trace.facts.recipe.main_parameter_bytes
    sizes = zip(parameters, held_sizes(trace, plan), strict=True)
    return [size * (main or p.elem_bytes) / p.elem_bytes for p, size in sizes]


def split_updates(trace: Trace, plan: Plan, split: TensorSplit) -> TensorSplit:
    """Leave each rank its shards of the optimizer's work, dispatched as PyTorch's sharded tensors are."""
    if not (plan.shards_units or plan.sharding in SLICED):
        return split
    before = [float(p.size_bytes) for p in list_parameters(trace, plan.tensor, plan.expert_parts)]
    return _cut_updates(trace, split, before, held_sizes(trace, plan), plan.shards_units)


@of_model
def _cut_updates(
    trace: ModelGraph, split: TensorSplit, before: Sequence[float], after: Sequence[float], dispatched: bool
) -> TensorSplit:
    shares = share_updates(trace, before, after)
    operators = scale_work(split.operators, shares)
    cut = split.sharded_updates | (set(shares) if dispatched else set())
    return structs.replace(split, operators=operators, sharded_updates=cut)


@of_model
def place_parameters(
    trace: ModelGraph, stage_of: NDArray[np.int64], tied: Mapping[str, Collection[int]]
) -> list[frozenset[int]]:
    """Return the stages of each parameter: of its update, else of what reads it; none where nothing does.

    Several stages hold a copy of ``tied`` ones.
    """
    places: dict[str, frozenset[int]] = {}
    untrained = {int(e["parameter_storage_id"]): str(e["name"]) for e in list_untrained(trace)}
    if untrained:
        for stage, row in zip(stage_of.tolist(), trace.rows, strict=True):
            for name in {untrained[at] for at in row.reads if at in untrained}:
                places[name] = places.get(name, frozenset()) | {stage}
    for gradient in trace.facts.gradients:
        name = str(gradient["name"])
        made = frozenset([int(stage_of[int(gradient["ready_after_op_id"])])])
        places[name] = frozenset(tied[name]) if name in tied else made
    try:
        parameters = list_parameters(trace)
    except PlanError:
        return []
    if any(p.unread for p in parameters):
        stages = dict(zip((row.module for row in trace.rows), stage_of.tolist(), strict=True))
        for parameter in (p for p in parameters if p.unread):
            around = [m for m in stages if m and f"{parameter.name}.".startswith(f"{m}.")]
            if around:
                places[parameter.name] = frozenset([stages[max(around, key=len)]])
    return [places.get(p.name, frozenset()) for p in parameters]


EXPERTS_UNIT = ".experts"
"""End of the name of a unit of experts, behind that of the unit that they are inside."""


class ShardedUnit(Struct, frozen=True):
    """Parameters that are gathered, and whose gradients are reduced, together."""

    name: str  # unit of the trace; empty for the root
    parameters: tuple[Parameter, ...]  # what it manages
    # Its first and last forward operator
    first_forward: int
    last_forward: int
    # The first and last backward operator of these
    first_backward: int
    last_backward: int
    # Whether its input has a gradient. Otherwise autograd never comes back to it, and its gradients
    # are reduced at the end of backward.
    in_graph: bool
    experts: bool = False  # whether its parameters are a layer's experts, shared by other ranks


@of_model
def build_units(trace: ModelGraph, tensor: int = 1, expert: int = 1, apart: bool = False) -> list[ShardedUnit]:
    """Return the units of ``fully_shard``, in the order of forward, and the root at the end.

    Where experts lie ``apart`` (`Plan.places_experts`) those of a unit are one of their own inside it, as in
    torchtitan; it stands before the unit, since it ends before it. Raises PlanError when the trace does not say which
    parameters there are.

    A unit that shares a parameter with another one is left to the root: two units of ``fully_shard`` cannot own one
    parameter.
    """
    if not pipeline_units(trace) and (wrapped := _find_units(trace)):
        entries = [{"name": name, "modules": modules} for name, modules in wrapped.items()]
        trace = trace.with_facts(replace(trace.facts, units=entries))
    parameters, units = list_parameters(trace, tensor, expert), pipeline_units(trace)
    owner = {p.name: _find_unit(p.name, units) for p in parameters}
    tied = find_tied(trace, assign_units(trace)) if units else []
    shared = {unit for entry in tied for unit in entry.stages}
    inner = [
        index
        for index, (name, paths) in enumerate(units.items())
        if 0 < index < len(units) - 1
        and index not in shared
        and any(owner[p.name] == index and is_inside(p.name, paths) for p in parameters)
    ]
    made = [
        _place_unit(trace, name, paths, [p for p in parameters if owner[p.name] == index and not (p.experts and apart)])
        for index, (name, paths) in enumerate(units.items())
        if index in inner
    ]
    first = min((owner[p.name] for p in parameters if p.trained), default=len(units))
    made = [
        structs.replace(unit, in_graph=first < index and unit.last_backward >= 0)
        for unit, index in zip(made, inner, strict=True)
    ]
    rest = tuple(p for p in parameters if owner[p.name] not in inner)
    ordered = _in_order(made)
    if apart:
        experts = {
            list(units)[index]: [p for p in parameters if owner[p.name] == index and p.experts] for index in inner
        }
        ordered = [part for unit in ordered for part in (*_place_experts(trace, unit, experts[unit.name]), unit)]
    return [*ordered, _place_root(trace, rest)]


def _place_experts(trace: ModelGraph, unit: ShardedUnit, parameters: list[Parameter]) -> list[ShardedUnit]:
    """Return the unit of the experts inside another one; none where it has no experts."""
    if not parameters:
        return []
    modules = sorted({p.module for p in parameters})
    placed = _place_unit(trace, f"{unit.name}{EXPERTS_UNIT}", modules, parameters)
    return [structs.replace(placed, experts=True)]


def build_stage_units(
    trace: ModelGraph, plan: Plan, placed: Sequence[frozenset[int]], stage_of: NDArray[np.int64], stage: int
) -> list[ShardedUnit]:
    """Return the units of one pipeline stage, to which ``fully_shard`` is applied by itself.

    Inner units stay what they are. The root keeps the rest: of the first and last stage embedding and head, of others
    none. ``placed``: stages that update each parameter; ``stage_of``: of each operator.
    """
    *inner, root = build_units(trace, plan.tensor, plan.expert_parts, plan.places_experts)
    here = set(np.flatnonzero(stage_of == stage).tolist())
    of_stage = [unit for unit in inner if unit.first_forward in here]
    if stage:  # what another rank sends has a gradient
        of_stage = [structs.replace(unit, in_graph=unit.last_backward >= 0) for unit in of_stage]
    names = {
        p.name
        for p, stages in zip(list_parameters(trace, plan.tensor), placed, strict=True)
        if stage in stages or not (stages or stage)
    }
    rest = tuple(p for p in root.parameters if p.name in names)
    return [*of_stage, _place_root(trace, rest, here)]


@of_model
def _find_units(trace: ModelGraph) -> dict[str, list[str]]:
    """Return the units of a model that names none: its repeated blocks, and what lies before and behind.

    Blocks are numbered children of a module of which two in a row hold parameters of the same names, in modules of
    their own; blocks inside blocks do not count.
    """
    names = [p.name for p in list_parameters(trace)]
    children: dict[str, dict[str, list[str]]] = {}
    for name in names:
        parts = name.split(".")
        for place in (i for i, part in enumerate(parts[:-1]) if part.isdigit()):
            block = ".".join(parts[: place + 1])
            siblings = children.setdefault(".".join(parts[:place]), {})
            siblings.setdefault(block, []).append(".".join(parts[place + 1 :]))
    blocks: list[str] = []
    for _, inside in sorted(children.items(), key=lambda item: item[0].count(".")):
        alike = [set(inner) for inner in inside.values() if any("." in name for name in inner)]
        # The first of several often has a parameter more.
        if any(one <= other or other <= one for one, other in pairwise(alike)):
            blocks += [block for block in inside if not is_inside(block, blocks)]
    modules = {row.module for row in trace.rows}
    if not blocks or not all(any(is_inside(m, [block]) for m in modules) for block in blocks):
        return {}
    first = next(i for i, name in enumerate(names) if is_inside(name, blocks))
    before, behind = (
        list(dict.fromkeys(n.rpartition(".")[0] for n in part if not is_inside(n, blocks)))
        for part in (names[:first], names[first:])
    )
    return {"before": before, **{block: [block] for block in blocks}, "behind": behind}


def describe_units(trace: Trace) -> str:
    """Return what is gathered together, such as ``units: 12 x transformer.h.* + rest``."""
    names = [re.sub(r"\d+$", "*", unit.name) for unit in build_units(trace) if unit.name]
    if not names:
        return "units: the whole model at once"
    counts = Counter(names)
    kinds = [f"{count} x {name}" if count > 1 else name for name, count in counts.items()]
    return f"units: {' + '.join([*kinds, 'rest'])}"


def _find_unit(name: str, units: dict[str, list[str]]) -> int:
    return next((i for i, paths in enumerate(units.values()) if is_inside(name, paths)), -1)


def _place_unit(trace: ModelGraph, name: str, paths: list[str], parameters: list[Parameter]) -> ShardedUnit:
    """Find a unit's operators: those of its modules that have parameters."""
    wrapped = [path for path in paths if any(is_inside(p.name, [path]) for p in parameters)]
    modules = {module for module in {row.module for row in trace.forward} if is_inside(module, wrapped)}
    forward = [row.op_id for row in trace.forward if row.module in modules]
    backward = sorted(row.op_id for op_id in forward for row in trace.backward_of.get(op_id, ()))
    if not forward or not (backward or all(p.frozen for p in parameters)):
        raise PlanError(
            f"unit {name} has parameters, but the step runs no operator of it in both directions",
            fix="use a plan without sharding",
        )
    begin, end = (backward[0], backward[-1]) if backward else _NEVER
    return ShardedUnit(name, tuple(parameters), forward[0], forward[-1], begin, end, in_graph=True)


_NEVER = (-1, -1)
"""First and last backward operator of a unit that autograd does not come to: all below it is frozen too."""


def _in_order(units: list[ShardedUnit]) -> list[ShardedUnit]:
    """End each unit's backward before the unit before it begins its own."""
    begins = [unit.first_backward for unit in units]
    return [
        structs.replace(unit, last_backward=min(unit.last_backward, begins[i - 1] - 1))
        if i and begins[i - 1] > unit.first_backward
        else unit
        for i, unit in enumerate(units)
    ]


def _place_root(
    trace: ModelGraph, parameters: tuple[Parameter, ...], here: Container[int] | None = None
) -> ShardedUnit:
    """Return the root of some operators: its backward begins behind the loss, which is not part of the model."""
    loss = loss_operators(trace)
    forward = [row.op_id for row in trace.forward if here is None or row.op_id in here]
    behind = sorted(
        row.op_id
        for forward_op_id, rows in trace.backward_of.items()
        for row in rows
        if forward_op_id not in loss and (here is None or row.op_id in here)
    )
    if not forward or not (behind or here is not None):
        raise PlanError("the trace has no forward and backward to shard", fix="trace a whole step")
    begin, end = (behind[0], behind[-1]) if behind else _NEVER
    return ShardedUnit("", parameters, forward[0], forward[-1], begin, end, in_graph=False)


class OptimizerPartition(Struct, frozen=True):
    """Who updates what, of ranks that hold the same parameters."""

    # Parameters of each replica, in the order in which it broadcasts them
    parameters: tuple[tuple[Parameter, ...], ...]
    # Optimizer operators of each replica, those over several parameters included
    operators: tuple[tuple[int, ...], ...]
    # Operators over the parameters of several ranks, such as a fused update; each rank runs them on
    # its own part
    shared: tuple[int, ...]
    shares: tuple[dict[int, float], ...]  # part of each shared operator that each replica runs
    # Experts of each of the ranks that hold the same ones, which an optimizer of their own shares out
    experts: tuple[tuple[Parameter, ...], ...] = ()

    def owned_by(self, replica: int) -> frozenset[str]:
        """Return the names of what a replica updates; those that share experts are next to each other."""
        kinds = (kind for kind in (self.parameters, self.experts) if kind)
        parts = (kind[replica * len(kind) // len(self.parameters)] for kind in kinds)
        return frozenset(p.name for part in parts for p in part)


def partition_parameters(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the parameters of each rank, by elements: the largest first, each to the rank with the least so far."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = sums.index(min(sums))
        parts[rank].append(index)
        sums[rank] += sizes[index]
    return parts


@of_model
def partition_optimizer(
    trace: ModelGraph, ranks: int, expert: int = 1, here: frozenset[int] | None = None, tensor: int = 1
) -> OptimizerPartition:
    """Return which replica updates which parameters of a trace, and by which operators.

    ``ranks``: those of a group that shares the optimizer; ``tensor``: those that cut layers. ``expert``: consecutive replicas that each hold a part of the experts; who holds the same ones shares out those.
    ``here``: places in ``list_parameters`` of what the ranks' stages hold; all by default. Raises PlanError when the
    trace does not say which parameters there are.
    """
    parameters = list_parameters(trace, tensor, expert)
    sizes = [prod(p.shape) for p in parameters]
    placed = range(len(parameters)) if here is None else sorted(here)
    trained = [i for i in placed if not parameters[i].frozen]
    parts: list[list[list[int]]] = []
    owners: list[set[int]] = [set() for _ in range(ranks)]
    ranks_of: dict[int, range] = {}
    for of_experts, alike in ((False, 1), (True, expert)):
        apart = [i for i in trained if (parameters[i].experts and expert > 1) == of_experts]
        cut = partition_parameters([sizes[i] for i in apart], ranks // alike)
        parts.append([[apart[i] for i in part] for part in cut])
        for place, part in enumerate(parts[-1]):
            of_part = range(place * alike, (place + 1) * alike)
            ranks_of |= dict.fromkeys(part, of_part)
            for rank in of_part:
                owners[rank].update(part)
    operators: list[list[int]] = [[] for _ in range(ranks)]
    shared = []
    for op_id, updated in find_owners(trace).of_operator.items():
        of = sorted({rank for index in updated for rank in ranks_of.get(index, ())})
        if any(not updated <= owners[rank] for rank in of):
            shared.append(op_id)
        for rank in of:
            operators[rank].append(op_id)
    of_all = sorted(set(shared) & set(list_updates(trace)))
    dense, experts = (tuple(tuple(parameters[i] for i in part) for part in of_kind) for of_kind in parts)
    return OptimizerPartition(
        dense,
        tuple(map(tuple, operators)),
        tuple(shared),
        tuple(share_updates(trace, sizes, [n * (i in own) for i, n in enumerate(sizes)], of_all) for own in owners),
        experts if expert > 1 else (),
    )


def partition_stages(
    trace: Trace, plan: Plan, placed: Sequence[frozenset[int]], stages_of: Sequence[Iterable[int]]
) -> list[OptimizerPartition]:
    """Return, of ZeRO-1, who updates what of each of the pipeline's ranks, which have ``held`` places; else nothing."""
    if plan.sharding != "zero1":
        return []
    here: list[frozenset[int] | None] = [None]
    if plan.pipeline > 1:
        here = [frozenset(i for i, at in enumerate(placed) if not at.isdisjoint(indices)) for indices in stages_of]
    return [partition_optimizer(trace, plan.shards, plan.expert, indices, plan.tensor) for indices in here]
