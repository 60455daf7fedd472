"""Peak memory of a rank: what must be held at once in one step."""

from __future__ import annotations

import pandas as pd

from trioflow.experiments import Plan
from trioflow.parallel.pipeline import assign_units
from trioflow.parallel.tensor_parallel import is_sharded
from trioflow.trace.store import Trace, pipeline_units, tensor_bytes


def estimate_peak_memory(trace: Trace, plan: Plan, batch: int, cut: list[list[str]]) -> int:
    """Return the peak of the fullest rank [bytes].

    Parameters
    ----------
    trace, plan, batch
        As in ``extrapolate``.
    cut : list of list of str
        Units of each pipeline stage.

    Returns
    -------
    int
        Parameters, gradients, optimizer state and buffers, DDP's buckets, and
        the activations that forward keeps for backward, over all micro-batches
        in flight (GPipe holds them all).

    Notes
    -----
    A first estimate: operators' workspaces, allocator fragmentation and the
    communication library's own buffers are left out, so the true peak is higher.
    Under tensor parallelism only split parameters and their gradients shrink;
    optimizer state and activations are counted whole, so the peak is too high.
    """
    rules = trace.facts.get("tensor_split", {}) if plan.tensor > 1 else {}
    sharded = {
        int(g[key])
        for g in trace.facts.get("gradients", [])
        if is_sharded(g, rules)
        for key in ("parameter_storage_id", "gradient_storage_id")
    }
    frame = _storages(trace)
    grown = frame["category"].isin(["activation", "output", "input"])
    frame.loc[grown, "bytes"] *= batch / plan.data / int(trace.facts["batch"])
    frame.loc[frame["storage_id"].isin(sharded), "bytes"] /= plan.tensor
    stage_of_unit = {unit: stage for stage, units in enumerate(cut) for unit in units}
    names = list(pipeline_units(trace))
    if plan.pipeline > 1:
        unit_of = assign_units(trace)
        frame["stage"] = [stage_of_unit[names[unit_of[op]]] for op in frame["op_id"]]
    else:
        frame["stage"] = 0
    held = frame[frame["held"]]
    gradient_bytes = held[held["category"] == "gradient"].groupby("stage")["bytes"].sum()
    total = held.groupby("stage")["bytes"].sum()
    if plan.data > 1:  # buckets hold a second copy of every gradient
        total = total.add(gradient_bytes, fill_value=0.0)
    return int(total.max()) if len(total) else 0


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
