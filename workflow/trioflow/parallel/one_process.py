"""Plans whose ranks are devices of one process: its threads launch work in turn, for all of them.

Python threads take turns under the interpreter's lock, so that the forward
launches of all devices stand in one queue, the first device's ``host`` stream,
one operator after the other. Backward runs in autograd's own thread of each
device, which holds no lock: its launches keep a queue for each device.

References
----------
PyTorch 2.13 ``torch/nn/parallel/parallel_apply.py``,
``torch/csrc/autograd/python_engine.cpp`` (``thread_init`` releases the lock).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trioflow.parallel.staged_program import StagedRank
from trioflow.parallel.task_graph import TaskGraph


def share_host(graph: TaskGraph) -> TaskGraph:
    """Return a graph whose forward launches of all ranks stand in one queue of the first rank.

    Parameters
    ----------
    graph : TaskGraph
        Ranks one after the other, each with launches in its ``host`` stream.

    Returns
    -------
    TaskGraph
        The same tasks, numbered so that the ranks' launches alternate;
        unchanged where nothing is launched.
    """
    tasks = graph.tasks
    launches = ((tasks["stream"] == "host") & (tasks["phase"] == "forward")).to_numpy(dtype=bool)
    if not launches.any():
        return graph
    turn = np.zeros(len(tasks), dtype=np.int64)
    ranks = tasks["rank"].to_numpy(dtype=np.int64)
    for rank in np.unique(ranks):
        mine = ranks == rank
        turn[mine] = np.cumsum(launches[mine])
    order = np.argsort(turn, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    moved = tasks.copy()
    moved.loc[launches, "rank"] = int(ranks.min())
    moved = moved.iloc[order].reset_index(drop=True)
    moved["task_id"] = np.arange(len(moved))
    moved = moved.astype({"task_id": tasks["task_id"].dtype})
    dependencies = graph.dependencies.copy()
    for column in dependencies:
        dependencies[column] = number[dependencies[column].to_numpy()]
    return TaskGraph(moved, dependencies, graph.metadata)


class ProcessRank(StagedRank):
    """Writes the tasks of one device of a process that drives several."""

    def launch_alone(
        self, op_id: int, micro_batch: int, device_s: float, host_s: float, name: str, phase: str
    ) -> None:
        """Add a forward operator whose launch takes its turn, whether or not the host runs ahead."""
        fields: dict[str, Any] = {"phase": phase, "op_id": op_id, "micro_batch": micro_batch}
        ahead = self.program.times[0].separate_host
        self.launched = self.program.graph.add(
            self.rank, "host", "host", f"launch {name}",
            after=() if ahead else (self.last, *self.waits), duration_s=host_s, **fields,
        )  # fmt: skip
        self.waits.append(self.launched)
        self.compute(name, device_s, **fields)

    def operator(
        self, op_id: int, micro_batch: int | None, extra_s: float = 0.0, part: float = 1.0,
        name: str = "", phase: str = "", device_s: float | None = None,
    ) -> None:  # fmt: skip
        """Add one operator; forward ones are launched under the interpreter's lock."""
        phase = phase or self.program.phases[op_id]
        if phase != "forward" or micro_batch is None:
            super().operator(op_id, micro_batch, extra_s, part, name, phase, device_s)
            return
        times = self.program.times[self.times_of(micro_batch)]
        device_s = float(times.device_s[op_id]) * part if device_s is None else device_s
        host_s = float(times.host_s[op_id]) + extra_s
        name = name or self.program.names[op_id]
        self.launch_alone(op_id, micro_batch, device_s, host_s, name, phase)


class GatherRank(ProcessRank):
    """Writes one device's tasks when every layer's outputs are split and gathered."""

    dispatches = False

    def broadcast_buffers(self) -> None:
        """Make the parameters that no layer splits whole, after the last step has changed them."""
        size = self.program.split.gathered_bytes
        if size:
            task = self.collective(
                "all_gather", ("parameters",), size, self.tensor_group, "forward"
            )
            self.waits.append(task)

    def _run_forward(self, micro_batch: int, again: bool) -> None:
        split, factors = self.program.split, self.program.factors
        for index, size in enumerate(split.input_bytes):
            key = ("inputs", micro_batch, again, index)
            task = self.collective(
                "broadcast", key, round(size * factors[micro_batch]), self.tensor_group, "forward"
            )
            self.waits.append(task)
        super()._run_forward(micro_batch, again)

    def _run(self, op_id: int, *rest: Any, **options: Any) -> None:
        if not (self.tensor and op_id in self.program.split.first_rank_only):
            super()._run(op_id, *rest, **options)

    def _run_backward(self, kind: str, micro_batch: int) -> None:
        super()._run_backward(kind, micro_batch)
        size = self.program.split.gathered_bytes
        if size:
            key = ("gradients", micro_batch)
            self.waits.append(
                self.collective("reduce_scatter", key, size, self.tensor_group, "backward")
            )
