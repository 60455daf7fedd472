"""From a task graph to what an engine executes: plain numbers, checked once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from trioflow.errors import SimulationError
from trioflow.network.collectives import CollectivePlanner, FlowSpec
from trioflow.parallel.task_graph import TaskGraph
from trioflow.tables import records

TIMED_KINDS = ("compute", "memcpy", "host")
"""Kinds of task whose duration the graph states."""

COMPUTE_STREAM = "compute"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tasks that start and end together: a collective's members, or a send and its recv.

    Attributes
    ----------
    members : tuple of int
        Their ``task_id``, ascending.
    flows : tuple of FlowSpec
        What they put on the network; the exchange ends with the last flow.
    duration_s : float
        How long it lasts where there are no flows [s].
    """

    members: tuple[int, ...]
    flows: tuple[FlowSpec, ...]
    duration_s: float = 0.0


@dataclass(frozen=True)
class Program:
    """A task graph ready to run.

    Attributes
    ----------
    streams : list of (int, str)
        Rank and stream in which each task runs.
    names : list of str
        Name of each task, for messages.
    durations_s : list of float
        Scaled duration of each task [s]; not used for members of exchanges.
    predecessors : list of tuple of int
        For each task, the tasks that must have ended: its dependencies and the
        task before it in its stream.
    exchanges : list of Exchange
        All exchanges.
    exchange_of : list of int or None
        Index of the exchange that a task is a member of.
    confidences : list of (str, int, str)
        Collective, ranks and confidence of every exchange with flows.
    warnings : list of str
        What the reader must know, without repeats.
    """

    streams: list[tuple[int, str]]
    names: list[str]
    durations_s: list[float]
    predecessors: list[tuple[int, ...]]
    exchanges: list[Exchange]
    exchange_of: list[int | None]
    confidences: list[tuple[str, int, str]]
    warnings: list[str]

    def describe(self, task: int) -> str:
        """Name a task for a message."""
        rank, stream = self.streams[task]
        return f"task {task} '{self.names[task]}' (rank {rank}, {stream})"


def build_program(
    graph: TaskGraph,
    planner: CollectivePlanner,
    *,
    ranks: int,
    communication_on_compute_stream: bool = False,
    compute_scale: float | Sequence[float] = 1.0,
    communication_scale: float = 1.0,
) -> Program:
    """Check a task graph and turn it into a program.

    Parameters
    ----------
    graph : TaskGraph
        What to execute.
    planner : CollectivePlanner
        Turns exchanges into flows.
    ranks : int
        Ranks that the platform has.
    communication_on_compute_stream : bool
        Whether collectives queue in their rank's ``compute`` stream.
    compute_scale : float or sequence of float
        Factor on compute, memcpy and host durations, one or one per rank.
    communication_scale : float
        Factor on every communication time.

    Raises
    ------
    SimulationError
        When a task has no duration or size, a rank is not on the platform, a
        dependency names no task, the members of an exchange do not fit
        together, or a scale is not positive.
    """
    tasks = graph.tasks
    count = len(tasks)
    if tasks["task_id"].tolist() != list(range(count)):
        raise SimulationError("the tasks of the graph are not numbered 0, 1, 2, ... row by row")
    rank_of = [int(rank) for rank in tasks["rank"]]
    beyond = [rank for rank in rank_of if not 0 <= rank < ranks]
    if beyond:
        raise SimulationError(
            f"the graph has tasks of rank {max(beyond)} and the platform has {ranks} ranks; "
            "choose a larger platform or fewer ranks in the plan"
        )
    scales = _spread_scale(compute_scale, ranks)
    _check_scale(communication_scale, "communication_scale")
    streams = _place_tasks(tasks, rank_of, communication_on_compute_stream)
    maker = _ExchangeMaker(tasks, planner, communication_scale)
    exchange_of: list[int | None] = [None] * count
    for index, exchange in enumerate(maker.exchanges):
        for member in exchange.members:
            exchange_of[member] = index
    names = [str(name) for name in tasks["name"]]
    durations_s = [0.0] * count
    for task, duration_s in enumerate(tasks["duration_s"].tolist()):
        if exchange_of[task] is None:
            if pd.isna(duration_s) or not 0 <= duration_s < math.inf:
                raise SimulationError(
                    f"task {task} '{names[task]}' of rank {rank_of[task]} has the duration "
                    f"{duration_s}; a {tasks['kind'].iloc[task]} task needs one in seconds"
                )
            durations_s[task] = duration_s * scales[rank_of[task]]
    return Program(
        streams=streams,
        names=names,
        durations_s=durations_s,
        predecessors=_collect_predecessors(graph, streams),
        exchanges=maker.exchanges,
        exchange_of=exchange_of,
        confidences=maker.confidences,
        warnings=list(dict.fromkeys(maker.warnings)),
    )


def _check_scale(scale: float, name: str) -> None:
    if not 0 < scale < math.inf:
        raise SimulationError(f"{name} is {scale!r}; give a positive factor")


def _spread_scale(scale: float | Sequence[float], ranks: int) -> list[float]:
    """Return one compute scale for each rank."""
    if isinstance(scale, int | float):
        scales = [float(scale)] * ranks
    else:
        scales = [float(value) for value in scale]
    if len(scales) != ranks:
        raise SimulationError(
            f"compute_scale has {len(scales)} values for {ranks} ranks; give one for each rank"
        )
    for value in scales:
        _check_scale(value, "compute_scale")
    return scales


def _place_tasks(
    tasks: pd.DataFrame, rank_of: list[int], communication_on_compute_stream: bool
) -> list[tuple[int, str]]:
    """Return the rank and stream that every task runs in."""
    streams = []
    for rank, stream, kind in zip(rank_of, tasks["stream"], tasks["kind"], strict=True):
        moved = communication_on_compute_stream and kind == "collective"
        streams.append((rank, COMPUTE_STREAM if moved else str(stream)))
    return streams


def _collect_predecessors(
    graph: TaskGraph, streams: list[tuple[int, str]]
) -> list[tuple[int, ...]]:
    """Return, for each task, its dependencies and the task before it in its stream."""
    found: list[dict[int, None]] = [{} for _ in streams]
    edges = graph.dependencies
    for task, other in zip(edges["task_id"].tolist(), edges["depends_on"].tolist(), strict=True):
        for end in (task, other):
            if not 0 <= end < len(streams):
                raise SimulationError(f"a dependency names task {end}, which does not exist")
        found[task][other] = None
    last: dict[tuple[int, str], int] = {}
    for task, stream in enumerate(streams):
        if stream in last:
            found[task][last[stream]] = None
        last[stream] = task
    return [tuple(others) for others in found]


class _ExchangeMaker:
    """Joins the tasks of one ``match_id`` into exchanges, and checks that they fit."""

    def __init__(self, tasks: pd.DataFrame, planner: CollectivePlanner, scale: float) -> None:
        self._planner, self._scale = planner, scale
        self.exchanges: list[Exchange] = []
        self.confidences: list[tuple[str, int, str]] = []
        self.warnings: list[str] = []
        columns = ["task_id", "rank", "kind", "name", "message_bytes", "duration_s", "group"]
        columns += ["peer", "match_id"]
        matches: dict[int, list[dict[str, Any]]] = {}
        for row in records(tasks[~tasks["kind"].isin(TIMED_KINDS)], *columns):
            if row["match_id"] is None:
                raise SimulationError(f"{_name(row)} has no match_id, so nothing can join it")
            matches.setdefault(int(row["match_id"]), []).append(row)
        for match, members in matches.items():
            kinds = sorted({str(member["kind"]) for member in members})
            if kinds == ["collective"]:
                self._add(members, *self._check_collective(match, members))
            elif set(kinds) <= {"send", "recv"}:
                self._add(members, "send", self._check_message(match, members))
            else:
                raise SimulationError(
                    f"match {match} joins tasks of the kinds {', '.join(kinds)}: "
                    + "; ".join(_name(member) for member in members)
                )

    def _check_collective(
        self, match: int, members: list[dict[str, Any]]
    ) -> tuple[str, tuple[int, ...]]:
        """Return the collective and its group, when all members agree."""
        for column in ("group", "name"):
            if len({member[column] for member in members}) > 1:
                raise SimulationError(
                    f"the members of match {match} differ in their {column}: "
                    + "; ".join(f"{_name(m)} has {m[column]}" for m in members)
                )
        try:
            group = tuple(int(rank) for rank in str(members[0]["group"]).split(","))
        except ValueError:
            raise SimulationError(
                f"{_name(members[0])} has the group {members[0]['group']!r}; "
                "write its ranks joined by commas"
            ) from None
        present = [int(member["rank"]) for member in members]
        missing = sorted(set(group) - set(present))
        if missing or sorted(present) != sorted(group):
            raise SimulationError(
                f"the group {list(group)} of match {match} does not match its tasks: "
                + (f"rank {', '.join(map(str, missing))} never joins; " if missing else "")
                + "; ".join(_name(member) for member in members)
            )
        return str(members[0]["name"]).split(maxsplit=1)[0], group

    def _check_message(self, match: int, members: list[dict[str, Any]]) -> tuple[int, int]:
        """Return sender and receiver, when there is one of each."""
        if sorted(str(member["kind"]) for member in members) != ["recv", "send"]:
            raise SimulationError(
                f"match {match} needs one send and one recv and has "
                + "; ".join(f"the {member['kind']} {_name(member)}" for member in members)
            )
        send, recv = sorted(members, key=lambda member: str(member["kind"]), reverse=True)
        for one, other in ((send, recv), (recv, send)):
            if one["peer"] is not None and int(one["peer"]) != int(other["rank"]):
                raise SimulationError(
                    f"{_name(one)} has the peer {one['peer']} and is matched with {_name(other)}"
                )
        return int(send["rank"]), int(recv["rank"])

    def _add(self, members: list[dict[str, Any]], collective: str, group: tuple[int, ...]) -> None:
        """Make one exchange of checked members."""
        tasks = tuple(sorted(int(member["task_id"]) for member in members))
        sizes = {member["message_bytes"] for member in members}
        durations = [member["duration_s"] for member in members]
        if len(sizes) > 1:
            raise SimulationError(
                f"the sizes of one {collective} differ: "
                + "; ".join(f"{_name(m)} has {m['message_bytes']} bytes" for m in members)
            )
        size = sizes.pop()
        if (size is None) == (None in durations):
            raise SimulationError(
                f"{_name(members[0])} needs either message_bytes or, on every member, duration_s"
            )
        if size is None:
            self.exchanges.append(Exchange(tasks, (), max(durations) * self._scale))
            return
        planned = self._planner.build(collective, int(size), group)
        flows = tuple(_stretch(planned.flows, self._scale))
        self.exchanges.append(Exchange(tasks, flows))
        if flows:
            self.confidences.append((collective, len(group), planned.confidence))
        if planned.warning:
            self.warnings.append(planned.warning)


def _stretch(flows: Iterable[FlowSpec], scale: float) -> Iterable[FlowSpec]:
    """Make flows slower; the links are made narrower by the same factor elsewhere."""
    for flow in flows:
        rate = flow.max_rate_bytes_per_s / scale
        yield FlowSpec(flow.source, flow.target, flow.size_bytes, flow.latency_s * scale, rate)


def _name(row: dict[Any, Any]) -> str:
    return f"task {row['task_id']} '{row['name']}' of rank {row['rank']}"
