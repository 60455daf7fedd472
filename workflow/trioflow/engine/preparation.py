"""A task graph made ready to run: identical ranks once, undisturbed collectives as one event, where exact."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError, SimulationError
from trioflow.engine.compiled.run import is_repaid, run_compiled, supports
from trioflow.engine.exchanges import Plan, make_exchanges
from trioflow.engine.folding.classes import find_fold
from trioflow.engine.folding.fold import FoldedProgram, TooLargeError, check_expansion
from trioflow.engine.folding.traffic import CannotFoldError
from trioflow.engine.planning import keep_folded
from trioflow.engine.program import (
    Case,
    Execution,
    Flags,
    Floats,
    Ints,
    Program,
    build_program,
    change_case,
)
from trioflow.engine.reference import run_reference
from trioflow.engine.result import Executed
from trioflow.engine.timeline import RankTimes, TimelineSummary, summarize_tasks
from trioflow.hardware.machine import Link, Platform
from trioflow.network.fair_share import FairShareNetwork, FlowShape, compute_max_min_rates
from trioflow.network.interface import Network
from trioflow.network.messages import CollectiveMessages, CollectiveRounds
from trioflow.network.networks import ContentionFreeNetwork
from trioflow.parallel.folded import Fold, FoldedTaskGraph
from trioflow.parallel.task_graph import TaskGraph


def aggregate_program(program: Program, network: Network) -> tuple[Program, int]:
    """Replace collectives of messages by single events where that changes no bit of the result.

    Returns the given one where nothing can be replaced; ``aggregated``: exchanges that are one event now. A collective
    becomes one event when both of these hold.

    *No other traffic is on its links while it runs.* Call two exchanges neighbours if they cross a common link, and
    take the classes of exchanges that are joined by chains of neighbours. In a class in which every exchange has a
    member in one and the same stream of one rank, no two run at the same time: tasks of a stream run one after the
    other, a member runs from the start of its exchange to its end, and bytes move only in between. A class of one
    exchange needs no such stream. So at any time all flows on the links of a collective of such a class are its own.

    *Its messages form rounds.* The algorithm has rounds (see ``MessagePattern.round_blocks``), all pairs have the same
    latency l and, all moving, the same rate r. Then all messages of a round start at one time t, by induction: those of
    the first when the collective starts; and if those of a round start at t, their bytes begin to move at (t + l), all
    at once and so at the rate r until they end, at (t + l) + size / r for all; whatever waits for them starts then.
    Those are the operations that the engines do on each message, so the collective's end has the same bits. Bytes on a
    link are added up in the same order too.

    Only networks whose rates are known here take part.
    """
    if type(network) not in (FairShareNetwork, ContentionFreeNetwork):
        return program, 0
    exchanges = program.exchanges
    if not any(isinstance(plan, CollectiveMessages) for plan in exchanges.plans):
        return program, 0
    assert isinstance(network, FairShareNetwork | ContentionFreeNetwork)
    alone = _find_undisturbed(program)
    rates = _Rates(network.capacities_bytes_per_s, isinstance(network, FairShareNetwork))
    plans: list[Plan] = list(exchanges.plans)
    for number, plan in enumerate(exchanges.plans):
        if alone[number] and isinstance(plan, CollectiveMessages) and plan.flow_count:
            plans[number] = rates.aggregate(plan) or plan
    replaced = np.array([isinstance(plan, CollectiveRounds) for plan in plans] + [False])
    count = int(replaced[exchanges.plan_of].sum())
    return replace(program, exchanges=replace(exchanges, plans=plans)), count


def _find_undisturbed(program: Program) -> Flags:
    """Return which plans' exchanges share no link with others that run at the same time [plans]."""
    exchanges = program.exchanges
    class_of_plan = _classify(exchanges.plans)
    count = len(exchanges.plan_of)
    class_of = np.append(class_of_plan, -1)[exchanges.plan_of]
    exchange = np.repeat(np.arange(count), np.diff(exchanges.first_members))
    member_class = class_of[exchange]
    counted = member_class >= 0
    tasks = exchanges.members[counted]
    lane = program.ranks[tasks] * len(program.stream_names) + program.streams[tasks]
    lanes = int(lane.max(initial=0)) + 1
    keys, present = np.unique(member_class[counted] * lanes + lane, return_counts=True)
    classes = int(class_of_plan.max(initial=-1)) + 1
    most = np.zeros(classes, dtype=np.int64)
    # An exchange has at most one member on a rank, so a lane counts each exchange once.
    np.maximum.at(most, keys // lanes, present)
    in_class = np.bincount(class_of[class_of >= 0], minlength=classes)
    ordered: Flags = np.append(most == in_class, False)[class_of_plan]
    return ordered


def _classify(plans: list[Plan]) -> Ints:
    """Return a class for each plan, equal where chains of common links join them, shape by shape; -1 without links."""
    numbers: dict[FlowShape, int] = {}
    parent: list[int] = []
    owner: dict[int, int] = {}

    def find(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    shapes = {plan.shape for plan in plans if not isinstance(plan, CollectiveRounds)}
    several = len(shapes) > 1
    found: list[int] = []
    for plan in plans:
        if isinstance(plan, CollectiveRounds) or not len(plan.shape.hops):
            found.append(-1)
            continue
        if plan.shape not in numbers:
            numbers[plan.shape] = len(parent)
            parent.append(len(parent))
            # Nothing has to be joined where all plans have one shape, as a thousand ranks' often.
            for link in np.unique(plan.shape.hops).tolist() if several else ():
                parent[find(owner.setdefault(link, parent[-1]))] = find(numbers[plan.shape])
        found.append(numbers[plan.shape])
    return np.array([find(number) if number >= 0 else -1 for number in found], dtype=np.int64)


class _Rates:
    """Rates of collectives that have the links of a network to themselves."""

    def __init__(self, widths: Sequence[float], shared: bool) -> None:
        self._shared = shared
        self._widths = np.array(widths, dtype=np.float64)
        self._links: dict[FlowShape, tuple[Ints, Ints]] = {}

    def aggregate(self, plan: CollectiveMessages) -> CollectiveRounds | None:
        """Return a collective as one event, or None where its rounds are not alike."""
        blocks = plan.pattern.round_blocks
        latencies_s = plan.latencies_s
        if blocks is None or (latencies_s != latencies_s[0]).any():
            return None
        if not (0 <= latencies_s[0] < math.inf and 0 <= plan.block_bytes < math.inf):
            return None  # The engines say what is wrong with it.
        if plan.shape not in self._links:
            links, crossings = np.unique(plan.shape.hops, return_counts=True)
            self._links[plan.shape] = (links, crossings)
        rates = self._compute(plan)
        if not (rates > 0).all() or (rates != rates[0]).any():
            return None
        sizes_bytes = blocks.astype(np.float64) * plan.block_bytes
        links, crossings = self._links[plan.shape]
        return CollectiveRounds(
            np.full(len(blocks), latencies_s[0]), sizes_bytes / rates[0], sizes_bytes, links,
            crossings, plan.confidence, plan.warning,
        )  # fmt: skip

    def _compute(self, plan: CollectiveMessages) -> Floats:
        """Return the rate of each pair's message when all move [pairs] [bytes/s]."""
        caps, shape = plan.max_rates_bytes_per_s, plan.shape
        if self._shared and (self._links[shape][1] > 1).any():
            widths = self._widths.tolist()
            return np.array(compute_max_min_rates(shape.routes, widths, caps.tolist()))
        # Each pair has its links to itself, and a share of one part is the whole.
        narrowest = np.minimum.reduceat(self._widths[shape.hops], shape.first_hops[:-1])
        return np.minimum(caps, narrowest)


FOLDS = ("auto", True, False)
"""Whether identical ranks are executed once: where that is exact and pays off, where it is exact,
or never."""
_LOOKED_AT_FROM_TASKS = 50_000
"""From here on looking through a graph's tables for identical ranks costs less than it saves."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """What an engine is given, and how its answer is read."""

    # Of all ranks, or of one of each class, with the times of each case
    programs: list[Program]
    make_network: Callable[[], Network]  # makes an unused network to run one on
    # The way back to all ranks, where identical ones are executed once
    folded: FoldedProgram | None = None
    unfolded_reason: str = ""  # why all ranks are executed; empty where they are not

    @property
    def program(self) -> Program:
        """The program of the first case."""
        return self.programs[0]

    def summarize(self, execution: Execution) -> TimelineSummary:
        """Sum up all ranks."""
        program = self.program
        summary = summarize_tasks(program.ranks, *program.works, execution.start_s, execution.end_s)
        if self.folded is None:
            return summary
        fold = self.folded.fold
        of_class = [row[1:] for row in summary.per_rank]
        per_rank = [RankTimes(r, *of_class[k]) for r, k in enumerate(fold.class_of.tolist())]
        return replace(summary, per_rank=per_rank, ranks=fold.ranks)

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
            return partial(_build_timeline, graph, self.program, execution)
        return partial(_expand_timeline, self.folded.fold, self.program, execution)

    def make_executed(self, graph: TaskGraph, execution: Execution) -> Callable[[], Executed]:
        """Return what makes the timeline of the tasks that were executed."""
        fold = None if self.folded is None else self.folded.fold
        return partial(_build_executed, fold, self.program, graph, execution)


@dataclass(frozen=True, eq=False)
class Ran:
    """What an engine did."""

    program: Program  # what was executed
    network: Network  # what it ran on
    execution: Execution  # when its tasks ran
    engine: str  # which engine it was
    aggregated: int  # exchanges that were one event; see `aggregate_program`
    wall_s: float  # wall time of the event loop [s]


def run_prepared(ready: Prepared, engine: str, aggregate: bool, case: int = 0) -> Ran:
    """Run a case of what is ready with the engine of ``SimulationOptions``; errors as the engines."""
    program, mover, aggregated = ready.programs[case], ready.make_network(), 0
    if aggregate:
        program, aggregated = aggregate_program(program, mover)
    if engine == "auto":
        compiled = supports(mover) and is_repaid(program.events * len(ready.programs))
        engine = "compiled" if compiled else "reference"
    begin_s = time.perf_counter()
    execution = {"compiled": run_compiled, "reference": run_reference}[engine](program, mover)
    return Ran(program, mover, execution, engine, aggregated, time.perf_counter() - begin_s)


def prepare(
    graph: TaskGraph,
    cases: Sequence[Case],
    make_network: Callable[[], Network],
    platform: Platform,
    *,
    fold: str | bool = "auto",
    unfolded_reason: str = "not asked for",
    communication_scale: float = 1.0,
) -> Prepared:
    """Make a task graph ready to run, with the times of one or several cases.

    Raises SimulationError as ``program.build_program``; TooLargeError where all ranks' tasks do not fit into memory;
    InputError when ``fold`` is not auto, True or False. For auto, graphs that do not say which ranks are identical must
    have ``_LOOKED_AT_FROM_TASKS`` tasks; ``unfolded_reason`` says why not, where ``fold`` says no. ``make_network``
    makes an unused one of all links.
    """
    if fold not in FOLDS:
        raise InputError(f"fold is {fold!r}", fix='give "auto", True or False')
    options: dict[str, Any] = {
        "ranks": platform.ranks,
        "communication_on_compute_stream": platform.communication_on_compute_stream,
        "communication_scale": communication_scale,
    }
    reason = unfolded_reason
    if fold:
        try:
            known, whole = _find_fold(graph, fold is True), make_network()
            folded = keep_folded(known, cases, whole, platform).stretch(communication_scale)
            kind = type(whole)
            return Prepared(
                folded.programs, lambda: folded.make_network(kind, make_network), folded
            )
        except TooLargeError:
            raise
        except (CannotFoldError, SimulationError, InputError) as problem:
            # Where the graph is wrong, the program of all ranks says it best.
            reason = str(problem)
    if isinstance(graph, FoldedTaskGraph) and graph.fold is not None:
        check_expansion(graph.fold, reason)
    first = cases[0]
    program = build_program(graph, first.planner, compute_scale=first.compute_scale, **options)
    programs = [program]
    for case in cases[1:]:
        exchanges = make_exchanges(graph.tasks, case.planner, communication_scale)
        programs.append(change_case(program, graph, exchanges, case, platform.ranks))
    return Prepared(programs, make_network, None, reason)


def _find_fold(graph: TaskGraph, small_ones: bool) -> Fold:
    """Return the identical ranks of a graph, those that it was built with or those that it shows."""
    fold = graph.fold if isinstance(graph, FoldedTaskGraph) else None
    if fold is not None:
        return fold
    if not small_ones and len(graph.tasks) < _LOOKED_AT_FROM_TASKS:
        raise CannotFoldError("a graph this small is simulated as fast with all its ranks")
    return find_fold(graph)


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


def _expand_timeline(fold: Fold, program: Program, execution: Execution) -> pd.DataFrame:
    """Return the timeline of all ranks, from one rank of each class."""
    check_expansion(fold, "a timeline of them is asked for")
    row = fold.row_of_task
    times = (execution.start_s[row], execution.end_s[row])
    return _assemble(fold.whole, program.streams[row], program.stream_names, *times)


def _build_executed(
    fold: Fold | None, program: Program, graph: TaskGraph, execution: Execution
) -> Executed:
    """Return the timeline of the tasks that were executed."""
    timeline = _build_timeline(graph if fold is None else fold.graph, program, execution)
    if fold is None:
        return Executed(graph, timeline, np.unique(program.ranks))
    return Executed(fold.graph, timeline, fold.representatives[fold.class_of])
