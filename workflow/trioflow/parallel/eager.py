"""Eager sends: messages that move once they are sent, whether or not their receiver waits for them.

MPI and gloo keep small messages in a buffer, NCCL what its channels' buffers hold where it does not write into the
receiver's memory. A receive becomes an arrival, matched with the send, beside its rank's work, and in its place a wait
of no length. A sender is busy until its message has arrived; arrivals from one sender keep their order.
"""

from dataclasses import replace

import numpy as np
import pandas as pd

from trioflow.parallel.folded import FoldedTaskGraph
from trioflow.parallel.task_graph import TaskGraph

ARRIVALS = "arrivals"
"""What streams of arrivals are called; the second and later ones of a rank have a number behind it."""


def release_sends(graph: TaskGraph, largest_bytes: float) -> TaskGraph:
    """Return a graph, folded as this one, whose messages of at most ``largest_bytes`` and of no given duration are eager."""
    if not largest_bytes or "recv" not in graph.kinds:
        return graph
    fold = graph.fold if isinstance(graph, FoldedTaskGraph) else None
    if fold is not None and fold.coarser is None:
        return FoldedTaskGraph(replace(fold, graph=_release(fold.graph, largest_bytes)))
    return _release(graph, largest_bytes)


def _release(graph: TaskGraph, largest_bytes: float) -> TaskGraph:
    tasks = graph.tasks
    sizes = tasks["message_bytes"].to_numpy(dtype=np.float64, na_value=np.nan)
    eager = (tasks["kind"] == "recv").to_numpy(dtype=bool) & (sizes <= largest_bytes)
    # Each arrival stands before its wait.
    place = np.arange(len(tasks)) + np.cumsum(eager)
    wait = place[eager]
    new = tasks.take(np.repeat(np.arange(len(tasks)), 1 + eager)).reset_index(drop=True)
    new["task_id"] = pd.array(np.arange(len(new)), dtype="Int64")
    lanes = tasks.loc[eager, ["rank", "stream", "peer"]].astype({"peer": object})
    lane = lanes.groupby(["rank", "stream", "peer"], dropna=False, sort=False).ngroup()
    number = lane.groupby(lanes["rank"]).rank("dense").astype(int) - 1
    names = [f"{ARRIVALS} {n}" if n else ARRIVALS for n in number]
    new.loc[wait - 1, "stream"] = names
    new.loc[wait, "kind"] = "host"
    new.loc[wait, "name"] = [f"wait for {name}" for name in tasks.loc[eager, "name"]]
    new.loc[wait, "duration_s"] = 0.0
    new.loc[wait, ["match_id", "peer", "message_bytes"]] = pd.NA
    ends = np.vstack(
        [
            place[graph.dependencies[["task_id", "depends_on"]].to_numpy(dtype=np.int64)],
            np.column_stack([wait, wait - 1]),
        ]
    )
    ends = ends[np.argsort(ends[:, 0], kind="stable")]
    return TaskGraph(new, pd.DataFrame(ends, columns=["task_id", "depends_on"]), graph.metadata)
