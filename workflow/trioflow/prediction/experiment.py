"""An experiment of the workflow, predicted from the files of its task graph and its session.

Its number is that of ``trioflow simulate --anchor session``. What the operators' times rest on travels
in the metadata of the graph, which ``assembly.extrapolate_experiment`` writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trioflow.costmodel.collectives import load_collective_model
from trioflow.errors import TableError
from trioflow.hardware.platform import load_platform
from trioflow.parallel.task_graph import load_task_graph
from trioflow.prediction.anchors import SessionAnchor, read_session
from trioflow.prediction.options import SESSION, Options
from trioflow.prediction.step import Step
from trioflow.trace.store import load_trace


def load_experiment(
    graph_folder: str | Path,
    platform: str | Path,
    collectives: str | Path,
    session: str | Path,
    trace_folders: Sequence[str | Path],
) -> tuple[Step, SessionAnchor]:
    """Return an experiment's step, and the anchor of the session that measured it.

    Parameters
    ----------
    graph_folder : path
        Task graph of ``assembly.extrapolate_experiment``.
    platform, collectives, session : path
        Platform file, fitted collective model and ``session.json``.
    trace_folders : sequence of path
        Traces that the task graph was made from.

    Raises
    ------
    TrioflowError
        When a file is missing or wrong, or the session is of another workload or capture.
    """
    graph = load_task_graph(graph_folder)
    machine = load_platform(Path(platform), graph.metadata.ranks)
    traces = [load_trace(path) for path in trace_folders]
    times = graph.metadata.operator_times
    if times is None:
        raise TableError(
            "no key 'operator_times'", file=Path(graph_folder) / "tasks.parquet", place="metadata",
            fix="make the task graph with the workflow",
        )  # fmt: skip
    anchor = read_session(session, graph.metadata, traces, machine)
    step = Step(
        graph, machine, load_collective_model(collectives), traces,
        Options(anchor=SESSION, session=session, record_links=True),
        times.cost_model, times.confidence, tuple(times.warnings), anchor,
    )  # fmt: skip
    return step, anchor
