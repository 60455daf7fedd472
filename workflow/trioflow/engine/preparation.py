"""A task graph made ready to run: with identical ranks once where that is exact, else all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.engine.aggregates import aggregate_program
from trioflow.engine.compiled import is_repaid, run_compiled, supports
from trioflow.engine.exchanges import Planner
from trioflow.engine.folding import FoldedProgram, TooLargeError, check_expansion, fold_program
from trioflow.engine.folding_classes import find_fold
from trioflow.engine.folding_traffic import CannotFoldError
from trioflow.engine.program import COMPUTE_STREAM, Execution, Program, build_program
from trioflow.engine.reference import run_reference
from trioflow.engine.timeline import RankTimes, TimelineSummary, select_kinds, summarize_tasks
from trioflow.errors import InputError, SimulationError
from trioflow.hardware.machine import Link, Platform
from trioflow.network.interface import Network
from trioflow.parallel.folded import Fold, FoldedTaskGraph
from trioflow.parallel.task_graph import TaskGraph

FOLDS = ("auto", True, False)
"""Whether identical ranks are executed once: where that is exact and pays off, where it is exact,
or never."""
_LOOKED_AT_FROM_TASKS = 50_000
"""From here on looking through a graph's tables for identical ranks costs less than it saves."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """What an engine is given, and how its answer is read.

    Attributes
    ----------
    program : Program
        Of all ranks, or of one of each class.
    network : Network
        Unused network to run it on.
    folded : FoldedProgram or None
        The way back to all ranks, where identical ones are executed once.
    unfolded_reason : str
        Why all ranks are executed; empty where they are not.
    """

    program: Program
    network: Network
    folded: FoldedProgram | None = None
    unfolded_reason: str = ""

    def summarize(self, graph: TaskGraph, execution: Execution) -> TimelineSummary:
        """Sum up all ranks of a graph."""
        if self.folded is None:
            return _summarize(graph, self.program, execution)
        fold = self.folded.fold
        told = _summarize(fold.graph, self.program, execution)
        of_class = [row[1:] for row in told.per_rank]
        per_rank = [RankTimes(r, *of_class[k]) for r, k in enumerate(fold.class_of.tolist())]
        return replace(told, per_rank=per_rank, ranks=fold.ranks)

    def count_ranks(self, graph: TaskGraph) -> int:
        """Return how many ranks are executed."""
        if self.folded is None:
            return int(graph.tasks["rank"].nunique())
        return len(self.folded.fold.representatives)

    def list_link_bytes(
        self, execution: Execution, links: Sequence[Link]
    ) -> dict[tuple[str, str], float]:
        """Return the bytes that moved over each link, by its ends [bytes]."""
        if self.folded is None:
            return dict(execution.link_bytes)
        return self.folded.spread_bytes(execution.link_bytes, links)

    def make_timeline(self, graph: TaskGraph, execution: Execution) -> Callable[[], pd.DataFrame]:
        """Return what makes the timeline of all tasks of a graph."""
        if self.folded is None:
            return lambda: _build_timeline(graph, self.program, execution)
        fold, program = self.folded.fold, self.program

        def expand() -> pd.DataFrame:
            check_expansion(fold, "a timeline of them is asked for")
            row = fold.row_of_task
            times = (execution.start_s[row], execution.end_s[row])
            return _assemble(fold.whole, program.streams[row], program.stream_names, *times)

        return expand


@dataclass(frozen=True, eq=False)
class Ran:
    """What an engine did.

    Attributes
    ----------
    program : Program
        What was executed.
    execution : Execution
        When its tasks ran.
    engine : str
        Which engine it was.
    aggregated : int
        Exchanges that were one event; see ``aggregates``.
    wall_s : float
        Wall time of the event loop [s].
    """

    program: Program
    execution: Execution
    engine: str
    aggregated: int
    wall_s: float


def run_prepared(ready: Prepared, engine: str, aggregate: bool) -> Ran:
    """Run what is ready.

    Parameters
    ----------
    ready : Prepared
        Its network is used then.
    engine : {"auto", "compiled", "reference"}
        Which engine runs it; auto takes the one that answers first.
    aggregate : bool
        Whether a collective of an algorithm may be one event where that
        changes no bit.

    Raises
    ------
    SimulationError, InputError
        As the engines.
    """
    program, mover, aggregated = ready.program, ready.network, 0
    if aggregate:
        program, aggregated = aggregate_program(program, mover)
    if engine == "auto":
        compiled = supports(mover) and is_repaid(program.events)
        engine = "compiled" if compiled else "reference"
    begin_s = time.perf_counter()
    execution = {"compiled": run_compiled, "reference": run_reference}[engine](program, mover)
    return Ran(program, execution, engine, aggregated, time.perf_counter() - begin_s)


def prepare(
    graph: TaskGraph,
    planner: Planner,
    network: Network,
    links: Sequence[Link],
    platform: Platform,
    *,
    fold: str | bool = "auto",
    unfolded_reason: str = "not asked for",
    compute_scale: float | Sequence[float] = 1.0,
    communication_scale: float = 1.0,
) -> Prepared:
    """Make a task graph ready to run.

    Parameters
    ----------
    graph : TaskGraph
        What to execute.
    planner : Planner
        Turns exchanges into flows or messages.
    network : Network
        Unused network on the platform's links.
    links : sequence of Link
        Its links.
    platform : Platform
        How many ranks there are, and in which stream collectives run.
    fold : {"auto", True, False}
        Whether identical ranks may be executed once; see ``folding``. For
        auto, graphs that do not say which ranks are identical must have
        ``_LOOKED_AT_FROM_TASKS`` tasks.
    unfolded_reason : str
        Why not, where ``fold`` says no.
    compute_scale, communication_scale
        As for ``program.build_program``.

    Raises
    ------
    SimulationError
        As ``program.build_program``; TooLargeError where the tasks of all
        ranks are needed and would not fit into memory.
    InputError
        When ``fold`` is none of these.
    """
    if fold not in FOLDS:
        raise InputError(f"fold is {fold!r}", fix='give "auto", True or False')
    options: dict[str, Any] = {
        "ranks": platform.ranks,
        "communication_on_compute_stream": platform.communication_on_compute_stream,
        "compute_scale": compute_scale,
        "communication_scale": communication_scale,
    }
    reason = unfolded_reason
    if fold:
        try:
            known = _find_fold(graph, fold is True)
            folded = fold_program(known, planner, network, links, **options)
            return Prepared(folded.program, folded.make_network(network), folded)
        except TooLargeError:
            raise
        except (CannotFoldError, SimulationError, InputError) as problem:
            # Where the graph is wrong, the program of all ranks says it best.
            reason = str(problem)
    if isinstance(graph, FoldedTaskGraph) and graph.fold is not None:
        check_expansion(graph.fold, reason)
    return Prepared(build_program(graph, planner, **options), network, None, reason)


def _find_fold(graph: TaskGraph, small_ones: bool) -> Fold:
    """Return the identical ranks of a graph, those that it was built with or those that it shows."""
    fold = graph.fold if isinstance(graph, FoldedTaskGraph) else None
    if fold is not None:
        return fold
    if not small_ones and len(graph.tasks) < _LOOKED_AT_FROM_TASKS:
        raise CannotFoldError("a graph this small is simulated as fast with all its ranks")
    return find_fold(graph)


def _summarize(graph: TaskGraph, program: Program, execution: Execution) -> TimelineSummary:
    """Sum up a program's tasks without making their timeline."""
    names = np.array([*program.stream_names, ""]) == COMPUTE_STREAM
    computes, communicates = select_kinds(graph.tasks["kind"], lambda: names[program.streams])
    return summarize_tasks(
        program.ranks, computes, communicates, execution.start_s, execution.end_s
    )


def _build_timeline(graph: TaskGraph, program: Program, execution: Execution) -> pd.DataFrame:
    """Return the timeline of a program's tasks: columns of ``tables.TIMELINE``."""
    times = (execution.start_s, execution.end_s)
    return _assemble(graph, program.streams, program.stream_names, *times)


def _assemble(
    graph: TaskGraph, streams: Any, names: Sequence[str], start_s: Any, end_s: Any
) -> pd.DataFrame:
    texts = pd.array(names, dtype="str").take(streams)
    timeline: pd.DataFrame = graph.tasks.reset_index(drop=True).assign(
        stream=pd.Series(texts, dtype="str"), start_s=start_s, end_s=end_s
    )[tables.TIMELINE.names]
    timeline.attrs = {}
    return timeline
