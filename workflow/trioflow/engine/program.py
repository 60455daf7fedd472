"""What an engine executes, plain numbers checked once, and what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.errors import SimulationError
from trioflow.engine.exchanges import Exchanges, Planner, make_exchanges
from trioflow.network.interface import NEVER_S
from trioflow.parallel.task_graph import TaskGraph

_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of flows' ways over links, each at one rate."""

    flow_id: Ints  # which flow, in the order in which they started [pieces]
    # Plan that it belongs to, and which flow or pair of its shape it is [pieces]
    plan: Ints
    pair: Ints
    # When its bytes moved at that rate [pieces] [s]
    begin_s: Floats
    end_s: Floats
    rate_bytes_per_s: Floats  # how fast [pieces] [bytes/s]


@dataclass(frozen=True, eq=False)
class Execution:
    """When every task ran."""

    # Start and end of each task after the start of the step [tasks] [s]
    start_s: Floats
    end_s: Floats
    events: int  # starts and ends of tasks and of flows
    link_bytes: Mapping[tuple[str, str], float]  # bytes moved over each directed link [bytes]
    reshared_flows: int  # rates computed by a network that shares links, a flow counted each time
    pieces: Pieces | None = None  # of its flows, where the network was to keep them


def explain_deadlock(program: Program, end_s: Floats) -> str:
    """Describe one circle of tasks that wait for each other; ``end_s`` of those that never ran is ``NEVER_S``."""
    never = end_s == NEVER_S
    stuck = never.nonzero()[0].tolist()
    ranks = sorted(set(program.ranks[never].tolist()))
    predecessors = program.list_predecessors()
    exchanges = program.exchanges

    def lane(task: int) -> tuple[int, int]:
        return int(program.ranks[task]), int(program.streams[task])

    def blocker(task: int) -> tuple[int, str]:
        for other in predecessors[task]:
            if never[other]:
                same = lane(other) == lane(task) and other < task
                return other, "which is before it in its stream" if same else "its dependency"
        # All that it depends on has ended, so it is a member that waits for another member,
        # and that one waits for something before it.
        index = int(exchanges.of_task[task])
        first, last = exchanges.first_members[index : index + 2]
        partners = (
            (member, "its partner")
            for member in exchanges.members[first:last].tolist()
            if any(never[other] for other in predecessors[member])
        )
        return next(partners, (task, "as its time is endless"))

    chain, task = {stuck[0]: 0}, stuck[0]
    while (task := blocker(task)[0]) not in chain:
        chain[task] = len(chain)
    circle = list(chain)[chain[task] :]
    steps = []
    for one in circle[:_SHOWN]:
        other, why = blocker(one)
        steps.append(f"{program.describe(one)} waits for {program.describe(other)}, {why}")
    if len(circle) > _SHOWN:
        steps.append(f"and {len(circle) - _SHOWN} more")
    return (
        f"deadlock: {len(stuck)} tasks of rank {', '.join(map(str, ranks))} wait for each other "
        f"and never start: {'; '.join(steps)}"
    )


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

COMPUTE_STREAM = "compute"
COMMUNICATION_KINDS = ("collective", "send", "recv")
"""Kinds of task that move data between ranks."""


@dataclass(frozen=True, eq=False)
class Program:
    """A task graph ready to run."""

    ranks: Ints  # rank of each task [tasks]
    streams: Ints  # number, in ``stream_names``, of the stream that each task runs in [tasks]
    stream_names: list[str]  # names of streams; a stream is one of a rank
    names: pd.Series[str]  # name of each task, for messages
    kinds: pd.Series[str]  # kind of each task
    durations_s: Floats  # scaled duration of each task [tasks], 0 for members of exchanges [s]
    # Pairs [pairs] of a task and one that must have ended before it starts: first what the graph
    # says, then, for each task, the one before it in its stream
    waiting: Ints
    awaited: Ints
    exchanges: Exchanges  # tasks that start and end together

    @property
    def events(self) -> int:
        """Starts and ends of tasks and of flows, when it has run."""
        return 2 * (len(self.ranks) + int(self.exchanges.flow_counts.sum()))

    @cached_property
    def works(self) -> tuple[Flags, Flags]:
        """Which tasks keep a device, and which move data [tasks]."""
        names = np.array([*self.stream_names, ""]) == COMPUTE_STREAM
        return select_kinds(self.kinds, lambda: names[self.streams])

    @cached_property
    def missing(self) -> Ints:
        """For each task, how many others must have ended before it [tasks]."""
        return np.bincount(self.waiting, minlength=len(self.ranks)).astype(np.int64)

    @cached_property
    def successors(self) -> Ints:
        """The tasks that wait for each task, ascending, one task after the other [pairs]."""
        count = len(self.ranks)
        if not count:
            return np.zeros(0, dtype=np.int64)
        keys = self.awaited * count + self.waiting
        keys.sort()
        return keys % count

    @cached_property
    def first_successors(self) -> Ints:
        """Where the successors of each task begin in ``successors`` [tasks + 1]."""
        return count_up(np.bincount(self.awaited, minlength=len(self.ranks)))

    def change_times(self, durations_s: Floats, exchanges: Exchanges) -> Program:
        """Return the same tasks with other times, and exchanges with other plans: who waits for whom is worked out once."""
        assert self.works is not None
        assert self.missing is not None and self.successors is not None
        assert self.first_successors is not None
        other = copy(self)
        other.__dict__.update(durations_s=durations_s, exchanges=exchanges)
        return other

    def list_predecessors(self) -> list[list[int]]:
        """Return, for each task, what it waits for; the one before it in its stream comes last."""
        found: list[list[int]] = [[] for _ in self.ranks]
        for task, other in zip(self.waiting.tolist(), self.awaited.tolist(), strict=True):
            found[task].append(other)
        return found

    def describe(self, task: int) -> str:
        """Name a task for a message."""
        stream = self.stream_names[self.streams[task]]
        return f"task {task} '{self.names.iloc[task]}' (rank {self.ranks[task]}, {stream})"


def select_kinds(
    kinds: pd.Series[str], on_compute_stream: Callable[[], NDArray[np.bool_]]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return what ``timeline.select_compute`` and ``select_communication`` say of tasks of these kinds [tasks].

    ``on_compute_stream`` is only called where there are host tasks.
    """
    codes, found = pd.factorize(kinds)
    names = [str(name) for name in found]
    computes, communicates, hosts = (
        np.array([name in chosen for name in names] + [False])[codes]
        for chosen in (("compute", "memcpy"), COMMUNICATION_KINDS, ("host",))
    )
    if "host" in names:
        computes = computes | (hosts & on_compute_stream())
    return computes, communicates


def count_up(counts: NDArray[np.integer]) -> Ints:
    """Return where each of some consecutive runs begins, and where the last one ends."""
    firsts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=firsts[1:])
    return firsts


@dataclass(frozen=True)
class Case:
    """Times that a graph is run with: what gives those of its exchanges, and a factor on all others."""

    planner: Planner
    compute_scale: float | Sequence[float] = 1.0


def build_program(
    graph: TaskGraph,
    planner: Planner | Exchanges,
    *,
    ranks: int,
    communication_on_compute_stream: bool = False,
    compute_scale: float | Sequence[float] = 1.0,
    communication_scale: float = 1.0,
) -> Program:
    """Check a task graph and turn it into a program.

    Raises SimulationError when a task has no duration or size, a rank is not on the platform, a dependency names no
    task, the members of an exchange do not fit together, or a scale is not positive. ``planner`` may be the exchanges,
    made already; ``compute_scale`` is on compute, memcpy and host durations, one or one per rank. Columns are checked
    at once; a row only to say what is wrong with it.
    """
    tasks = graph.tasks
    count = len(tasks)
    if not np.array_equal(tasks["task_id"].to_numpy(), np.arange(count)):
        raise SimulationError("the tasks of the graph are not numbered 0, 1, 2, ... row by row")
    rank_of = tasks["rank"].to_numpy(dtype=np.int64)
    beyond = (rank_of < 0) | (rank_of >= ranks)
    if beyond.any():
        raise SimulationError(
            f"the graph has tasks of rank {rank_of[beyond].max()} and the platform has {ranks} "
            "ranks; choose a larger platform or fewer ranks in the plan"
        )
    scales = _spread_scale(compute_scale, ranks)
    check_scale(communication_scale, "communication_scale")
    streams, stream_names = _place_tasks(tasks, communication_on_compute_stream)
    exchanges = planner if isinstance(planner, Exchanges) else make_exchanges(tasks, planner, communication_scale)
    waiting, awaited = collect_waits(graph, rank_of * len(stream_names) + streams)
    return Program(
        ranks=rank_of,
        streams=streams,
        stream_names=stream_names,
        names=tasks["name"],
        kinds=tasks["kind"],
        durations_s=_read_durations(tasks, rank_of, exchanges) * scales[rank_of],
        waiting=waiting,
        awaited=awaited,
        exchanges=exchanges,
    )


def change_case(program: Program, graph: TaskGraph, exchanges: Exchanges, case: Case, ranks: int) -> Program:
    """Return a graph's program with another case's times and ``exchanges``; SimulationError for a scale not positive."""
    scales = _spread_scale(case.compute_scale, ranks)
    durations_s = _read_durations(graph.tasks, program.ranks, exchanges) * scales[program.ranks]
    return program.change_times(durations_s, exchanges)


def check_scale(scale: float, name: str) -> None:
    """Raise SimulationError when a factor is not positive."""
    if not 0 < scale < math.inf:
        raise SimulationError(f"{name} is {scale!r}; give a positive factor")


def _spread_scale(scale: float | Sequence[float], ranks: int) -> Floats:
    scales = [float(scale)] * ranks if isinstance(scale, int | float) else [float(value) for value in scale]
    if len(scales) != ranks:
        raise SimulationError(f"compute_scale has {len(scales)} values for {ranks} ranks; give one for each rank")
    for value in dict.fromkeys(scales):
        check_scale(value, "compute_scale")
    return np.array(scales, dtype=np.float64)


def _place_tasks(tasks: pd.DataFrame, communication_on_compute_stream: bool) -> tuple[Ints, list[str]]:
    """Return the number of the stream that every task runs in, and the streams' names."""
    codes, found = pd.factorize(tasks["stream"])
    names = [str(name) for name in found]
    if communication_on_compute_stream:
        moved = (tasks["kind"] == "collective").to_numpy(dtype=bool)
        if COMPUTE_STREAM not in names:
            names.append(COMPUTE_STREAM)
        codes = np.where(moved, names.index(COMPUTE_STREAM), codes)
    return codes.astype(np.int64), names


def _read_durations(tasks: pd.DataFrame, rank_of: Ints, exchanges: Exchanges) -> Floats:
    """Return the duration of every task by itself, and 0 for members of exchanges [s]."""
    durations_s = tasks["duration_s"].to_numpy(dtype=np.float64, na_value=math.nan)
    alone = exchanges.of_task < 0
    wrong = alone & ~((durations_s >= 0) & (durations_s < math.inf))
    if wrong.any():
        task = int(np.argmax(wrong))
        raise SimulationError(
            f"task {task} '{tasks['name'].iloc[task]}' of rank {rank_of[task]} has the duration "
            f"{durations_s[task]}; a {tasks['kind'].iloc[task]} task needs one in seconds"
        )
    return np.where(alone, durations_s, 0.0)


def collect_waits(graph: TaskGraph, lanes: Ints) -> tuple[Ints, Ints]:
    """Return pairs (task, task that it waits for): the graph's dependencies, then the previous task of its lane.

    ``lanes``: a number for the rank and stream of each task [tasks]. SimulationError when a dependency names no task.
    """
    count = len(lanes)
    waiting, awaited = (graph.dependencies[column].to_numpy(dtype=np.int64) for column in ("task_id", "depends_on"))
    wrong = ((waiting < 0) | (waiting >= count)) | ((awaited < 0) | (awaited >= count))
    if wrong.any():
        row = int(np.argmax(wrong))
        end = waiting[row] if not 0 <= waiting[row] < count else awaited[row]
        raise SimulationError(f"a dependency names task {end}, which does not exist")
    order = np.argsort(lanes, kind="stable")
    same = lanes[order[1:]] == lanes[order[:-1]]
    return (np.concatenate([waiting, order[1:][same]]), np.concatenate([awaited, order[:-1][same]]))


def number_lanes(timeline: pd.DataFrame) -> Ints:
    """Return a number for the rank and stream of each task of a timeline [tasks]."""
    streams = pd.factorize(timeline["stream"])[0].astype(np.int64)
    lanes: Ints = timeline["rank"].to_numpy(np.int64) * (int(streams.max(initial=0)) + 1) + streams
    return lanes
