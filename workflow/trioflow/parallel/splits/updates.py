"""Which parameters each operator of the optimizer updates, and a rank's part of its work.

Whether a loop or one operator over all (``foreach``, ``fused``), a rank does the work, and holds the state, of its own
parameters.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import SLICED
from trioflow.costmodel.features import FEATURES
from trioflow.costmodel.interface import OperatorModel
from trioflow.parallel.reference import predict_operator_times
from trioflow.parallel.remembered import remembered
from trioflow.parallel.splits.pipeline import Parameter, list_parameters
from trioflow.parallel.splits.tensor_split import TensorSplit, kind_of_module, list_untrained
from trioflow.tables import records
from trioflow.trace.store import Trace

Shares = Mapping[int, float]
"""Optimizer operator to the part of its work that a rank does."""


@dataclass(frozen=True)
class Owners:
    """Parameters, as places in ``list_parameters``, and what belongs to them."""

    # Optimizer operator to the parameters that it updates; those of its module, or all, where the
    # trace does not say
    of_operator: dict[int, frozenset[int]]
    # Storage of a parameter, its gradient, its optimizer state, or of what the optimizer makes for
    # it in passing, to the parameter
    of_storage: dict[int, int]


@remembered
def find_owners(trace: Trace) -> Owners:
    """Return what belongs to which parameter; nothing where the trace lists no parameters.

    State tensors are recognised by operators that mix them with a parameter or gradient: lists name these in one order.
    Numbers, such as counts of steps, belong to the parameters updated next.
    """
    try:
        parameters = list_parameters(trace)
    except PlanError:
        return Owners({}, {})
    storage = trace.tensors["storage_id"].tolist()
    shapes = [tuple(shape) for shape in trace.tensors["shape"]]
    owner: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        for known in (parameter.storage_id, parameter.gradient_storage_id):
            if known >= 0:
                owner[known] = index
    updates = trace.operators[trace.operators["phase"] == "optimizer"]
    rows = records(updates, "op_id", "module", "input_ids", "output_ids")
    found: dict[int, frozenset[int]] = {}
    for _ in range(2):  # the second pass knows the states that the first one met late
        for row in rows:
            lists = [[i for i in row[side] if shapes[i]] for side in ("input_ids", "output_ids")]
            mine = {owner[storage[i]] for side in lists for i in side if storage[i] in owner}
            order = _find_order([owner.get(storage[i], -1) for i in lists[0]], len(mine))
            for side in lists:
                _follow_order(side, order, storage, shapes, owner)
            found[int(row["op_id"])] = frozenset(mine)
    following: frozenset[int] = frozenset()
    for op_id in reversed(found):
        following = found[op_id] = found[op_id] or following
    for row in rows:
        if not found[int(row["op_id"])]:
            found[int(row["op_id"])] = _guess_owners(parameters, str(row["module"]))
    return Owners(found, owner)


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


@remembered
def list_updates(operators: pd.DataFrame) -> list[int]:
    """Return the optimizer operators on more than single numbers, such as a count of steps."""
    columns = (operators[name] for name in ("op_id", "phase", "input_shapes"))
    return [
        int(op)
        for op, phase, shapes in zip(*columns, strict=True)
        if phase == "optimizer" and any(len(shape) for shape in shapes)
    ]


def share_updates(
    trace: Trace, sizes: Sequence[float], held: Sequence[float], operators: Iterable[int]
) -> dict[int, float]:
    """Return the part of some optimizer operators' work on what a rank holds: ``held`` of parameters' ``sizes`` [bytes]."""
    owners = find_owners(trace).of_operator
    shares: dict[int, float] = {}
    for op_id in operators:
        mine = owners.get(op_id, ())
        if whole := sum(sizes[i] for i in mine):
            shares[op_id] = sum(held[i] for i in mine) / whole
    return shares


def shard_updates(trace: Trace, degree: int) -> dict[int, float]:
    """Return the part of the optimizer's operators that is left to one tensor-parallel rank."""
    updates = list_updates(trace.operators)
    try:
        whole, mine = list_parameters(trace), list_parameters(trace, degree)
    except PlanError:  # names of modules are all that is known
        rules = dict(trace.facts.tensor_split or {})
        modules = trace.operators.loc[updates, "module"]
        cut = [bool(kind_of_module(str(module), rules)) for module in modules]
        return {op: 1 / degree for op, found in zip(updates, cut, strict=True) if found}
    sizes, held = ([float(p.size_bytes) for p in side] for side in (whole, mine))
    return share_updates(trace, sizes, held, updates)


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


@remembered
def share_storages(
    trace: Trace, plan: Plan, here: frozenset[int] | None = None, held: frozenset[int] | None = None
) -> dict[int, float]:
    """Return the part of each parameter, its gradient and state that a rank holds, by storage.

    ``here``, ``held``: places in ``list_parameters`` of what it updates, and of what it has with gradients; all by
    default.
    """
    owners = find_owners(trace).of_storage
    if not owners:
        return {}
    whole, mine = list_parameters(trace), list_parameters(trace, plan.tensor, plan.expert_parts)
    updated, main = held_sizes(trace, plan), trace.facts.recipe.main_parameter_bytes
    weights = weigh_parameters(trace, plan)
    shares: dict[int, float] = {}
    for storage, index in owners.items():
        parameter, size = mine[index], max(whole[index].size_bytes, 1)
        split = parameter.size_bytes / size
        if storage == parameter.storage_id:
            # What is sharded of a trained one is the main weight, kept as a state.
            state = plan.shards_units and main and parameter.trained
            shares[storage] = 0.0 if state else weights[index] / size
        elif storage == parameter.gradient_storage_id:
            shares[storage] = split
        else:
            shares[storage] = updated[index] / size
        of_model = storage in (parameter.storage_id, parameter.gradient_storage_id)
        places = held if of_model else here
        if places is not None and index not in places:
            shares[storage] = 0.0
    return shares


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


@remembered
def _cut_updates(
    trace: Trace, split: TensorSplit, before: Sequence[float], after: Sequence[float], dispatched: bool
) -> TensorSplit:
    shares = share_updates(trace, before, after, list_updates(trace.operators))
    operators = scale_work(split.operators, shares)
    cut = split.sharded_updates | (set(shares) if dispatched else set())
    return replace(split, operators=operators, sharded_updates=cut)


def scale_work(operators: pd.DataFrame, shares: Shares) -> pd.DataFrame:
    """Return a copy of the operators in which some do a share of their work; KeyError for one that is not there."""
    chosen = list(shares)
    rows = operators.index.get_indexer(pd.Index(chosen, dtype="int64"))
    if (rows < 0).any():
        raise KeyError(f"no operators {[chosen[i] for i in np.flatnonzero(rows < 0)]}")
    return _scale_rows(operators, rows, np.array([shares[op] for op in chosen], dtype=float))


def _scale_rows(operators: pd.DataFrame, rows: NDArray[np.intp], factors: NDArray[np.float64]) -> pd.DataFrame:
    scaled: dict[str, Any] = {}
    for column in (*FEATURES, *(f"batch_{column}" for column in FEATURES)):
        cells = operators[column].to_numpy(dtype=np.int64)
        part = np.ceil(cells[rows].astype(float) * factors).astype(np.int64)
        cells = cells.copy()
        cells[rows] = part
        scaled[column] = pd.Series(cells, operators.index, operators[column].dtype)
    return operators.assign(**scaled)


@remembered
def predict_updates(
    recorded: pd.DataFrame, operators: pd.DataFrame, parts: Sequence[Shares], model: OperatorModel
) -> list[dict[int, float]]:
    """Return the time of some optimizer operators for each of several shares of their work [s]."""
    chosen = [list(shares) for shares in parts]
    if not any(chosen):
        return [{} for _ in parts]
    ops = [op for of_part in chosen for op in of_part]
    factors = np.array([share for shares in parts for share in shares.values()], dtype=float)
    before, after = (f.loc[ops].reset_index(drop=True) for f in (recorded, operators))
    after = _scale_rows(after, np.arange(len(ops)), factors)
    device_s, _ = predict_operator_times(before, after, model)
    times = iter(device_s.tolist())
    return [{op: next(times) for op in of_part} for of_part in chosen]


def place_parameters(
    trace: Trace, stage_of: NDArray[np.int64], tied: Mapping[str, Collection[int]]
) -> list[frozenset[int]]:
    """Return the stages of each parameter: of its update, else of what reads it; none where nothing does.

    Several stages hold a copy of ``tied`` ones.
    """
    found: dict[str, frozenset[int]] = {}
    untrained = {int(e["parameter_storage_id"]): str(e["name"]) for e in list_untrained(trace)}
    if untrained:
        storage = trace.tensors["storage_id"].tolist()
        for stage, ids in zip(stage_of.tolist(), trace.operators["input_ids"], strict=True):
            for name in {untrained[storage[i]] for i in ids if storage[i] in untrained}:
                found[name] = found.get(name, frozenset()) | {stage}
    for gradient in trace.facts.gradients:
        name = str(gradient["name"])
        made = frozenset([int(stage_of[int(gradient["ready_after_op_id"])])])
        found[name] = frozenset(tied[name]) if name in tied else made
    try:
        parameters = list_parameters(trace)
    except PlanError:
        return []
    if any(p.unread for p in parameters):
        stages = dict(zip(trace.operators["module"], stage_of.tolist(), strict=True))
        for parameter in (p for p in parameters if p.unread):
            around = [m for m in stages if m and f"{parameter.name}.".startswith(f"{m}.")]
            if around:
                found[parameter.name] = frozenset([stages[max(around, key=len)]])
    return [found.get(p.name, frozenset()) for p in parameters]


def upkeep_phase(trace: Trace) -> str:
    """Return the phase whose element-wise operators resemble copies and sums of gradients."""
    return "forward" if trace.facts.device == "cuda" else "optimizer"


_PREDICTED = ("time_s", "low_s", "high_s", "extrapolated")


@remembered
def predict_elementwise(
    model: OperatorModel, name: str, sizes: Sequence[int], reads: int, phase: str = "optimizer"
) -> dict[str, NDArray[Any]]:
    """Predict one element-wise operator over tensors of some sizes [bytes]: columns of `OperatorModel`.

    On a CPU the optimizer's class predicts what happens to gradients. On a GPU that class holds calls over lists of
    tensors, some 30 us each, which no copy is: there the phase is forward.
    """
    if not sizes:
        return {column: np.zeros(0) for column in _PREDICTED}
    rows = pd.DataFrame(
        {
            "name": name,
            "phase": phase,
            "module": "",
            "flop": 0,
            "kernels": 0,
            "read_bytes": [reads * size for size in sizes],
            "write_bytes": sizes,
            "input_shapes": [[[size // 4]] * reads for size in sizes],
            "output_shapes": [[[size // 4]] for size in sizes],
            "dtype": "float",
        }
    )
    found = model.predict(rows)
    return {column: found[column].to_numpy() for column in _PREDICTED}
