"""An experiment of the workflow, predicted as ``trioflow simulate --anchor session`` predicts it.

The two jobs of an experiment meet in the folder of its task graph: what the operators' times rest
on travels in the graph's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trioflow.costmodel.collectives import load_collective_model
from trioflow.experiments import Plan
from trioflow.hardware.platform import load_platform
from trioflow.parallel.task_graph import load_task_graph
from trioflow.prediction.anchors import SessionAnchor, read_session
from trioflow.prediction.options import SESSION, Options
from trioflow.prediction.step import Step, build_graph, time_operators
from trioflow.provenance import read_json
from trioflow.trace.store import load_trace


def extrapolate_experiment(
    trace_folders: Sequence[str | Path],
    operator_model: str | Path,
    partition_file: str | Path,
    platform: str | Path,
    experiment: Mapping[str, Any],
    plan: Mapping[str, Any],
    folder: str | Path,
) -> None:
    """Build the task graph of one experiment and write it into a folder.

    Parameters
    ----------
    trace_folders : sequence of path
        Traces of the workload, the one that plans start from first.
    operator_model, partition_file, platform : path
        Fitted operator model, stages and platform file.
    experiment, plan : mapping
        Rows of ``experiments.tsv`` and ``plans.tsv``.
    folder : path
        Where ``tasks.parquet`` and ``dependencies.parquet`` go.
    """
    chosen, machine = Plan(**plan), load_platform(Path(platform))
    stages = read_json(partition_file)["stages"].get(str(chosen.stages))
    options = Options(cost_model=str(operator_model), stages=stages)
    times = time_operators(list(trace_folders), machine.device.name, options)
    graph = build_graph(
        times, chosen, batch=int(experiment["batch"]), host=machine.host, options=options
    )
    graph.metadata["experiment"] = experiment["experiment"]
    graph.metadata["operator_times"] = {
        "cost_model": times.model_text, "confidence": times.confidence, "warnings": times.warnings,
    }  # fmt: skip
    graph.save(folder)


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
        Task graph of ``extrapolate_experiment``.
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
    machine = load_platform(Path(platform), int(graph.metadata["ranks"]))
    traces = [load_trace(path) for path in trace_folders]
    times = graph.metadata["operator_times"]
    anchor = read_session(session, graph.metadata, traces, machine)
    step = Step(
        graph, machine, load_collective_model(collectives), traces,
        Options(anchor=SESSION, session=session, record_links=True),
        times["cost_model"], times["confidence"], tuple(times["warnings"]), anchor,
    )  # fmt: skip
    return step, anchor
