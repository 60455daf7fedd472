"""Peak memory of a rank: what must be held at once in one step."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from trioflow.experiments import Plan
from trioflow.parallel.pipeline import assign_units, boundary_bytes
from trioflow.parallel.schedule_checks import measure_held
from trioflow.parallel.schedule_table import Schedule
from trioflow.parallel.sharding import ShardedUnit, build_units
from trioflow.parallel.tensor_parallel import is_sharded
from trioflow.parallel.zero_optimizer import partition_optimizer
from trioflow.trace.store import Trace, pipeline_units, tensor_bytes


def estimate_peak_memory(
    trace: Trace, plan: Plan, sizes: Sequence[int], cut: list[list[str]], schedule: Schedule
) -> int:
    """Return the peak of the fullest rank [bytes].

    Parameters
    ----------
    trace, plan
        As in ``extrapolate``.
    sizes : sequence of int
        Samples of each micro-batch of one replica.
    cut : list of list of str
        Units of each pipeline stage.
    schedule : Schedule
        Its order decides how many micro-batches are in flight on each rank.

    Returns
    -------
    int
        Parameters, gradients, optimizer state, buffers and inputs of the rank's
        stages, or its shards of them and the units that are whole at one time;
        DDP's buckets, and the activations that forward keeps for backward, of
        the micro-batches in flight when they come to most. Before a
        recomputation only a stage's input is kept.

    Notes
    -----
    A first estimate: operators' workspaces, allocator fragmentation and the
    communication library's own buffers are left out, so the true peak is higher.
    Where I and W run apart, activations are held until W.
    Sharded units are taken to be at their fullest when the activations are.
    Under tensor parallelism only split parameters and their gradients shrink;
    optimizer state and activations are counted whole, so the peak is too high.
    """
    frame = _sized_storages(trace, plan)
    frame["stage"] = _stage_of_storages(trace, frame, cut)
    traced = int(trace.facts["batch"])
    held = frame[frame["held"]]
    flows = held["category"].isin(["activation", "output"])
    full = held[flows].groupby("stage")["bytes"].sum().to_dict()
    inputs = _stage_inputs(trace, cut) if len(cut) > 1 else {}

    def size(stage: int, micro_batch: int) -> tuple[float, float]:
        share = sizes[micro_batch] / traced
        return full.get(stage, 0.0) * share, inputs.get(stage, 0) * share

    fixed = held[~flows].copy()
    fixed.loc[fixed["category"] == "input", "bytes"] *= sum(sizes) / traced
    whole = _share_storages(fixed, trace, plan)
    total = fixed.groupby("stage")["bytes"].sum().to_dict()
    if plan.shards_units:
        total[0] = total.get(0, 0.0) + whole
    elif plan.data > 1:  # buckets hold a second copy of every gradient
        gradients = fixed[fixed["category"] == "gradient"].groupby("stage")["bytes"].sum()
        total = {s: total.get(s, 0.0) + gradients.get(s, 0.0) for s in range(len(cut))}
    peaks = [
        sum(total.get(stage, 0.0) for stage in schedule.stages_of_rank(rank)) + activations
        for rank, activations in enumerate(measure_held(schedule, size))
    ]
    return int(max(peaks, default=0))


def _share_storages(fixed: pd.DataFrame, trace: Trace, plan: Plan) -> float:
    """Leave a rank its part of what is shared, in place; return what is whole at one time [bytes]."""
    category = fixed["category"]
    if plan.sharding == "zero1":
        share = max(partition_optimizer(trace, plan.data).shares)
        fixed.loc[category == "optimizer_state", "bytes"] *= share
    if not plan.shards_units:
        return 0.0
    units = build_units(trace, plan.tensor)
    sizes = [unit.gathered_bytes(plan.shards) for unit in units]
    used = sum(p.size_bytes for unit in units for p in unit.parameters)
    shared = category.isin(["parameter", "gradient", "optimizer_state"])
    fixed.loc[shared, "bytes"] *= sum(sizes) / max(plan.shards * used, 1)
    return measure_whole(units, plan.shards, plan.sharding != "zero2", plan.accumulate)


def measure_whole(
    units: Sequence[ShardedUnit], shards: int, reshards: bool, micro_steps: int
) -> float:
    """Return the most that is not sharded at one time of backward under ``fully_shard`` [bytes].

    Parameters
    ----------
    units : sequence of ShardedUnit
        In the order of forward, the root at the end.
    shards : int
        Ranks that share each parameter.
    reshards : bool
        Whether units but the root give their parameters up after forward.
    micro_steps : int
        Steps whose gradients are added up, whole until the last.

    Notes
    -----
    The root is whole from its forward to the end of backward, its gradients
    too. Of the others, one is whole with its gradients, and these a second
    time in the input of its reduce-scatter, while the parameters of the unit
    before it arrive.
    """
    whole = [unit.gathered_bytes(shards) for unit in units]
    gradients = [unit.reduced_bytes(shards) for unit in units]
    inner = range(len(units) - 1)
    if reshards:
        peaks = [whole[i] + (whole[i - 1] if i else 0) for i in inner]
    else:
        peaks = [sum(whole[: i + 1]) for i in inner]
    kept = sum(gradients) - gradients[-1] if micro_steps > 1 else 0
    at_unit = [
        peaks[i] + 2 * gradients[i] - (gradients[i] if micro_steps > 1 else 0) for i in inner
    ]
    return float(whole[-1] + gradients[-1] + kept + max([*at_unit, gradients[-1]]))


def _sized_storages(trace: Trace, plan: Plan) -> pd.DataFrame:
    """Return the storages, split parameters and their gradients at one shard's size."""
    rules = trace.facts.get("tensor_split", {}) if plan.tensor > 1 else {}
    sharded = {
        int(g[key])
        for g in trace.facts.get("gradients", [])
        if is_sharded(g, rules)
        for key in ("parameter_storage_id", "gradient_storage_id")
    }
    frame = _storages(trace)
    frame.loc[frame["storage_id"].isin(sharded), "bytes"] /= plan.tensor
    return frame


def _stage_of_storages(trace: Trace, frame: pd.DataFrame, cut: list[list[str]]) -> list[int]:
    if len(cut) == 1:
        return [0] * len(frame)
    stage_of_unit = {unit: stage for stage, units in enumerate(cut) for unit in units}
    names, unit_of = list(pipeline_units(trace)), assign_units(trace)
    return [stage_of_unit[names[unit_of[op]]] for op in frame["op_id"]]


def _stage_inputs(trace: Trace, cut: list[list[str]]) -> dict[int, int]:
    """Return what each stage but the first receives for the traced batch [bytes]."""
    unit_of = assign_units(trace)
    ends = [sum(len(units) for units in cut[:stage]) for stage in range(len(cut))]
    return {stage: boundary_bytes(trace, unit_of, ends[stage]) for stage in range(1, len(cut))}


def _storages(trace: Trace) -> pd.DataFrame:
    """Return one row a storage: its size, category, an operator that uses it, and if it is held."""
    tensors = trace.tensors
    frame = pd.DataFrame(
        {
            "storage_id": tensors["storage_id"].astype("int64"),
            "category": tensors["category"],
            "bytes": [float(size) for size in tensor_bytes(trace)],
            "op_id": tensors["producer_op_id"].fillna(tensors["last_op_id"]).astype("int64"),
            "made": tensors["producer_op_id"].notna(),
            "last": tensors["last_op_id"].astype("int64"),
        }
    )
    frame = frame.groupby("storage_id", as_index=False).agg(
        {"category": "first", "bytes": "max", "op_id": "min", "made": "first", "last": "max"}
    )
    phases = trace.operators["phase"]
    made_forward = frame["made"] & (phases.loc[frame["op_id"]].to_numpy() == "forward")
    used_backward = phases.loc[frame["last"]].to_numpy() == "backward"
    kept = frame["category"].isin(["parameter", "gradient", "buffer", "input"])
    state = (frame["category"] == "optimizer_state") & ~frame["made"]
    frame["held"] = kept | state | (made_forward & used_backward)
    return frame
