"""What the engine executes: a task graph as plain numbers, checked once, and the times that it ends with.

`build_program` turns tasks into arrays: durations, and who waits for whom. Tasks that start and end together, a
collective's members or a send and its receive, make an exchange; `make_exchanges` asks the planner for the time and the
flows of each different one. The engine fills an `Execution`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from trioflow.base.columns import ABSENT, Columns, Texts
from trioflow.base.errors import SimulationError
from trioflow.base.runs import count_up, find_firsts, number_keys
from trioflow.hardware.machine import Platform
from trioflow.network.collectives import CollectiveFlows, CollectivePlanner
from trioflow.network.message_planner import CollectiveMessages
from trioflow.network.networks import NEVER_S
from trioflow.parallel.task_graph import TaskGraph, make_frame
from trioflow.tables import records


def _read_first_word(name: str) -> str:
    """Return the word of a collective's name that says which one it is; empty for none."""
    return (name.split(maxsplit=1) or [""])[0]


def read_group(text: str) -> tuple[int, ...] | None:
    """Return the ranks of a group that is written as a text, None for any other text."""
    try:
        return tuple(int(rank) for rank in text.split(","))
    except ValueError:
        return None


def _list_rows(tasks: Columns, rows: Ints) -> list[dict[str, Any]]:
    """Return some tasks as dictionaries, for messages."""
    return records(make_frame(tasks.take(rows)))


def _name_task(row: dict[str, Any]) -> str:
    """Name a task for a message."""
    return f"task {row['task_id']} '{row['name']}' of rank {row['rank']}"


_FAULTS = {
    "kinds": "match {match_id} joins tasks of the kinds {kinds}: {tasks}",
    "ends": "match {match_id} needs one send and one recv and has {ends}",
    "group": "the members of match {match_id} differ in their group: {groups}",
    "name": "the members of match {match_id} differ in their name: {names}",
    "text": "{first} has the group {group!r}; write its ranks joined by commas",
    "members": "the group {ranks} of match {match_id} does not match its tasks: {missing}{tasks}",
    "peer": "{one} has the peer {peer} and is matched with {other}",
    "size": "the sizes of one {word} differ: {sizes}",
    "time": "{first} needs either message_bytes or, on every member, duration_s",
    "duration": "{odd} has the duration {lasts}; a collective or message needs one in seconds, or message_bytes",
}
"""What may be wrong with the tasks of one match, in the order in which it is looked for."""


def _describe_fault(fault: str, rows: list[dict[str, Any]]) -> str:
    """Say what is wrong with the tasks of one match, rows of ``tables.TASKS`` with None for nulls."""

    def each(text: str) -> str:
        return "; ".join(text.format(task=_name_task(row), **row) for row in rows)

    group = read_group(str(rows[0]["group"])) or ()
    absent = ", ".join(map(str, sorted(set(group) - {row["rank"] for row in rows})))
    odd = next((row for row in rows if not 0 <= (row["duration_s"] or 0.0) < math.inf), rows[0])
    ends = [row for row in rows if row["kind"] == "send"] + [row for row in rows if row["kind"] != "send"]
    wrong = next((pair for pair in (ends, ends[::-1]) if pair[0]["peer"] not in (None, pair[-1]["rank"])), ends)
    return _FAULTS[fault].format(
        match_id=rows[0]["match_id"],
        kinds=", ".join(sorted({str(row["kind"]) for row in rows})),
        tasks=each("{task}"),
        ends=each("the {kind} {task}"),
        groups=each("{task} has {group}"),
        names=each("{task} has {name}"),
        sizes=each("{task} has {message_bytes} bytes"),
        first=_name_task(rows[0]),
        group=rows[0]["group"],
        ranks=list(group),
        missing=absent and f"rank {absent} never joins; ",
        one=_name_task(wrong[0]),
        peer=wrong[0]["peer"],
        other=_name_task(wrong[-1]),
        word=_read_first_word(str(rows[0]["name"])) if rows[0]["kind"] == "collective" else "send",
        odd=_name_task(odd),
        lasts=odd["duration_s"],
    )


_TIMED_KINDS = ("compute", "memcpy", "host")
"""Kinds of task whose duration the graph states."""

SEND, RECV, COLLECTIVE, OTHER = range(4)
_SHOWN_TASKS = 4
"""Tasks of an exchange that an error names."""
_NONE = -1

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

ExchangeTraffic = CollectiveFlows | CollectiveMessages
"""What one collective puts on the network."""


class Exchanges(Struct, frozen=True, eq=False):
    """Tasks that start and end together: a collective's members, or a send and its recv."""

    of_task: Ints  # exchange that each task is a member of, -1 for none [tasks]
    members: Ints  # their ``task_id``, ascending, one exchange after the other [members]
    first_members: Ints  # where the members of each begin in ``members`` [exchanges + 1]
    plans: list[ExchangeTraffic]  # what exchanges put on the network; one with flows ends with its last flow
    plan_of: Ints  # plan of each exchange, -1 for none [exchanges]
    durations_s: Floats  # how long each one lasts where there are no flows [exchanges] [s]
    # Collective, ranks and confidence of every plan [plans]
    confidences: list[tuple[str, int, str]]
    warnings: list[str]  # what the reader must know, without repeats

    @property
    def flow_counts(self) -> Ints:
        """Flows of each exchange [exchanges]."""
        counts = [plan.flow_count for plan in self.plans]
        return np.array([*counts, 0], dtype=np.int64)[self.plan_of]

    def stretch(self, factor: float) -> Exchanges:
        """Return them slower by a factor; the links are made narrower by it elsewhere."""
        plans: list[ExchangeTraffic] = [plan.stretch(factor) for plan in self.plans]
        return structs.replace(self, plans=plans, durations_s=self.durations_s * factor)


def make_exchanges(tasks: Columns, planner: CollectivePlanner) -> Exchanges:
    """Join the tasks of one ``match_id`` into exchanges; ``planner`` is asked once for each different one.

    Raises SimulationError when members do not fit together, or there is neither a size nor durations.
    """
    rows = ExchangeRows(tasks)
    faults = rows.find_faults()
    for match in np.flatnonzero(np.logical_or.reduce([*faults.values()]))[:1].tolist():
        fault = next(word for word in _FAULTS if faults[word][match])
        members = _list_rows(tasks, rows.task[rows.first[match] : rows.first[match + 1]])
        raise SimulationError(_describe_fault(fault, members))
    plan_of, firsts = rows.number_plans(rows.find_groups())
    plans: list[ExchangeTraffic] = []
    confidences: list[tuple[str, int, str]] = []
    for match in firsts.tolist():
        collective, group = rows.read_group(match)
        try:
            plan = planner.build(collective, rows.read_size(match), group)
        except SimulationError as problem:
            first, last = rows.first[match], rows.first[match + 1]
            waiting = [_name_task(row) for row in _list_rows(tasks, rows.task[first:last][:_SHOWN_TASKS])]
            more = f" and {last - first - _SHOWN_TASKS} more" if last - first > _SHOWN_TASKS else ""
            raise SimulationError(f"{', '.join(waiting)}{more}: {problem}") from None
        plans.append(plan)
        confidences.append((collective, len(group), plan.confidence))
    warnings = list(dict.fromkeys(plan.warning for plan in plans if plan.warning))
    return rows.assemble(plans, plan_of, confidences, warnings)


class ExchangeRows:
    """The tasks of exchanges as columns, match by match in the order in which these appear."""

    def __init__(self, tasks: Columns) -> None:
        known = {"send": SEND, "recv": RECV, "collective": COLLECTIVE, **dict.fromkeys(_TIMED_KINDS, _NONE)}
        kinds = tasks["kind"]
        kind = np.array([known.get(word, OTHER) for word in kinds.words], dtype=np.int64)[kinds.codes]
        task = np.flatnonzero(kind != _NONE)
        match = tasks["match_id"][task]
        if (match == ABSENT).any():
            row = _list_rows(tasks, task[match == ABSENT][:1])[0]
            raise SimulationError(f"{_name_task(row)} has no match_id, so nothing can join it")
        match = number_keys(match)
        order = np.argsort(match, kind="stable")
        self.tasks = tasks.rows
        self.task, self.match = task[order], match[order]
        self.first = count_up(np.bincount(match))
        self.kind = kind[self.task]
        columns = (tasks[name][self.task] for name in ("rank", "message_bytes", "peer", "duration_s"))
        self.rank, self.size, self.peer, self.duration_s = columns
        self.name, self.group = (tasks[name].codes[self.task] for name in ("name", "group"))
        # A collective's name begins with the word that says which one it is.
        words = Texts.of(map(_read_first_word, tasks["name"].words))
        self.word = np.where(self.kind == COLLECTIVE, np.append(words.codes, _NONE)[self.name], _NONE)
        self._words = words.words
        self._groups = [read_group(text) for text in tasks["group"].words]

    def number_plans(self, groups: Ints) -> tuple[Ints, Ints]:
        """Give numbers to the different exchanges that have a size: collective, size and group.

        Returns each match's, -1 for those of a given time [matches], and each number's first match [plans], by
        ``groups`` [matches].
        """
        begin = self.first[:-1]
        sized = self.size[begin] != ABSENT
        plan_of = np.full(len(begin), _NONE, dtype=np.int64)
        sizes, size = np.unique(self.size[begin], return_inverse=True)
        keys = ((self.word[begin] + 1) * len(sizes) + size) * (int(groups.max(initial=0)) + 1) + groups
        plan_of[sized] = number_keys(keys[sized])
        return plan_of, find_firsts(plan_of)

    def assemble(
        self, plans: list[ExchangeTraffic], plan_of: Ints, confidences: list[tuple[str, int, str]], warnings: list[str]
    ) -> Exchanges:
        """Return the exchanges of these matches, numbered as the matches are."""
        begin = self.first[:-1]
        of_task = np.full(self.tasks, _NONE, dtype=np.int64)
        of_task[self.task] = self.match
        timed = self.size[begin] == ABSENT
        durations_s = np.zeros(len(begin))
        if timed.any():
            durations_s[timed] = np.maximum.reduceat(self.duration_s, begin)[timed]
        return Exchanges(of_task, self.task, self.first, plans, plan_of, durations_s, confidences, warnings)

    def find_groups(self) -> Ints:
        """Return a number for the group of each match, equal for equal ones [matches]."""
        sender, receiver = self._find_ends()
        ends = self.rank[sender] * (int(self.rank.max(initial=0)) + 1) + self.rank[receiver]
        begin = self.first[:-1]
        joined = len(self._groups) + ends
        numbers: Ints = np.where(self.kind[begin] == COLLECTIVE, self.group[begin], joined)
        return numbers

    def read_size(self, match: int) -> int:
        """Return the size of a match that has one [bytes]."""
        return int(self.size[self.first[match]])

    def read_collective(self, match: int) -> str:
        """Return which collective a match is; a message is a send."""
        word = self.word[self.first[match]]
        return "send" if word == _NONE else self._words[word]

    def read_group(self, match: int) -> tuple[str, tuple[int, ...]]:
        """Return the collective and the group of a match that is known to fit."""
        row = self.first[match]
        if self.kind[row] == COLLECTIVE:
            group = self._groups[self.group[row]]
            return self._words[self.word[row]], group or ()
        ends = self.rank[row : self.first[match + 1]].tolist()
        return "send", tuple(ends if self.kind[row] == SEND else ends[::-1])

    def find_faults(self, whole: bool = True) -> dict[str, Flags]:
        """Return by each word of ``_FAULTS`` the matches that it holds of [matches].

        Without ``whole`` those are left out that only all members of a match show.
        """
        begin = self.first[:-1]
        if not len(begin):
            return {}
        least, most = (end.reduceat(self.kind, begin) for end in (np.minimum, np.maximum))
        collective, pair = (least == most) & (least == COLLECTIVE), (least == SEND) & (most == RECV)
        pair &= np.diff(self.first) == 2
        lacking = np.logical_or.reduceat(np.isnan(self.duration_s), begin)
        wrong = np.logical_or.reduceat((self.duration_s < 0) | np.isinf(self.duration_s), begin)
        timed = self.size[begin] == ABSENT
        faults = {
            "kinds": ~collective & (most >= COLLECTIVE),
            "ends": ~pair & (most <= RECV),
            "name": collective & self._differ(self.name),
            "size": self._differ(self.size),
            "time": timed == lacking,
            "duration": timed & wrong,
        }
        if whole:
            unread = np.array([group is None for group in self._groups] + [True])[self.group[begin]]
            one, other = self._find_ends()
            peers = ((self.peer[a] != ABSENT) & (self.peer[a] != self.rank[b]) for a, b in ((one, other), (other, one)))
            faults["group"], faults["text"] = collective & self._differ(self.group), collective & unread
            faults["members"], faults["peer"] = collective & ~self._fit_groups(), pair & np.logical_or(*peers)
        return faults

    def _differ(self, column: Ints) -> Flags:
        """Return in which matches rows have different values [matches]."""
        begin = self.first[:-1]
        different: Flags = np.minimum.reduceat(column, begin) != np.maximum.reduceat(column, begin)
        return different

    def _fit_groups(self) -> Flags:
        """Return which matches have one task on each rank of the group that all name [matches]."""
        begin, counts = self.first[:-1], np.diff(self.first)
        lengths = np.array([*(-1 if g is None else len(g) for g in self._groups), -1])
        group = self.group[begin]
        fits: Flags = ~self._differ(self.group) & (lengths[group] == counts)
        # Compare the sorted ranks with the sorted group, where their numbers agree.
        ranks = np.concatenate([sorted(g or ()) for g in self._groups] or [[]]).astype(np.int64)
        starts = count_up(np.maximum(lengths[:-1], 0))
        present = self.rank[np.lexsort((self.rank, self.match))]
        row = np.flatnonzero(fits[self.match])
        place = row - begin[self.match[row]]
        different = ranks[starts[self.group[row]] + place] != present[row]
        fits[self.match[row[different]]] = False
        return fits

    def _find_ends(self) -> tuple[Ints, Ints]:
        """Return the rows of sender and receiver, where a match has one of each [matches]."""
        one = self.first[:-1]
        other = np.minimum(one + 1, max(len(self.kind) - 1, 0))
        forward = self.kind[one] == SEND
        return np.where(forward, one, other), np.where(forward, other, one)


_SHOWN = 8


class Pieces(Struct, frozen=True, eq=False):
    """Parts of flows' ways over links, each at one rate."""

    flow_id: Ints  # which flow, in the order in which they started [pieces]
    # Plan that it belongs to, and which flow or pair of its shape it is [pieces]
    plan: Ints
    pair: Ints
    # When its bytes moved at that rate [pieces] [s]
    begin_s: Floats
    end_s: Floats
    rate_bytes_per_s: Floats  # how fast [pieces] [bytes/s]


class Execution(Struct, frozen=True, eq=False):
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


COMPUTE_STREAM = "compute"
COMMUNICATION_KINDS = ("collective", "send", "recv")
"""Kinds of task that move data between ranks."""


class Program(Struct, frozen=True, eq=False, dict=True):
    """A task graph ready to run."""

    ranks: Ints  # rank of each task [tasks]
    streams: Ints  # number, in ``stream_names``, of the stream that each task runs in [tasks]
    stream_names: list[str]  # names of streams; a stream is one of a rank
    names: Texts  # name of each task, for messages
    kinds: Texts  # kind of each task
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
        known = {name: getattr(self, name) for name in ("missing", "successors", "first_successors")}
        other = structs.replace(self, durations_s=durations_s, exchanges=exchanges)
        vars(other).update(known)
        return other

    def stretch(self, factor: float) -> Program:
        """Return it with communication that takes a factor as long; the links are made narrower by it elsewhere."""
        return self if factor == 1 else self.change_times(self.durations_s, self.exchanges.stretch(factor))

    def list_predecessors(self) -> list[list[int]]:
        """Return, for each task, what it waits for; the one before it in its stream comes last."""
        predecessors: list[list[int]] = [[] for _ in self.ranks]
        for task, other in zip(self.waiting.tolist(), self.awaited.tolist(), strict=True):
            predecessors[task].append(other)
        return predecessors

    def describe(self, task: int) -> str:
        """Name a task for a message."""
        stream = self.stream_names[self.streams[task]]
        return f"task {task} '{self.names[task]}' (rank {self.ranks[task]}, {stream})"


class Case(Struct, frozen=True):
    """Times that a graph is run with: what gives those of its exchanges, and a factor on all others."""

    planner: CollectivePlanner
    compute_scale: float | Sequence[float] = 1.0


def build_program(
    graph: TaskGraph,
    planner: CollectivePlanner | Exchanges,
    *,
    ranks: int,
    communication_on_compute_stream: bool = False,
    compute_scale: float | Sequence[float] = 1.0,
) -> Program:
    """Check a task graph and turn it into a program.

    Raises SimulationError when a task has no duration or size, a rank is not on the platform, a dependency names no
    task, the members of an exchange do not fit together, or a scale is not positive. ``planner`` may be the exchanges,
    made already; ``compute_scale`` is on compute, memcpy and host durations, one or one per rank. Columns are checked
    at once; a row only to say what is wrong with it.
    """
    tasks = graph.task_columns
    if not np.array_equal(tasks["task_id"], np.arange(tasks.rows)):
        raise SimulationError("the tasks of the graph are not numbered 0, 1, 2, ... row by row")
    rank_of = tasks["rank"]
    beyond = (rank_of < 0) | (rank_of >= ranks)
    if beyond.any():
        raise SimulationError(
            f"the graph has tasks of rank {rank_of[beyond].max()} and the platform has {ranks} "
            "ranks; choose a larger platform or fewer ranks in the plan"
        )
    scales = spread_scale(compute_scale, ranks)
    streams, stream_names = _place_tasks(tasks, communication_on_compute_stream)
    exchanges = planner if isinstance(planner, Exchanges) else make_exchanges(tasks, planner)
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


def build_programs(
    graph: TaskGraph, cases: Sequence[Case], planners: Sequence[CollectivePlanner | Exchanges], platform: Platform
) -> list[Program]:
    """Return a graph's program with the times of each case, as ``build_program``; ``planners``: those of the cases, or what they made."""
    first = build_program(
        graph,
        planners[0],
        ranks=platform.ranks,
        compute_scale=cases[0].compute_scale,
        communication_on_compute_stream=platform.communication_on_compute_stream,
    )
    programs = [first]
    for case, planner in zip(cases[1:], planners[1:], strict=True):
        exchanges = planner if isinstance(planner, Exchanges) else make_exchanges(graph.task_columns, planner)
        scales = spread_scale(case.compute_scale, platform.ranks)
        durations_s = _read_durations(graph.task_columns, first.ranks, exchanges) * scales[first.ranks]
        programs.append(first.change_times(durations_s, exchanges))
    return programs


def check_scale(scale: float, name: str) -> None:
    """Raise SimulationError when a factor is not positive."""
    if not 0 < scale < math.inf:
        raise SimulationError(f"{name} is {scale!r}; give a positive factor")


def spread_scale(scale: float | Sequence[float], ranks: int) -> Floats:
    """Return the factor of each rank [ranks]; SimulationError when they are not as many, or one is not positive."""
    scales = [float(scale)] * ranks if isinstance(scale, int | float) else [float(value) for value in scale]
    if len(scales) != ranks:
        raise SimulationError(f"compute_scale has {len(scales)} values for {ranks} ranks; give one for each rank")
    for value in dict.fromkeys(scales):
        check_scale(value, "compute_scale")
    return np.array(scales, dtype=np.float64)


def _place_tasks(tasks: Columns, communication_on_compute_stream: bool) -> tuple[Ints, list[str]]:
    """Return the number of the stream that every task runs in, and the streams' names."""
    codes, names = tasks["stream"].codes.astype(np.int64), [*tasks["stream"].words]
    if communication_on_compute_stream:
        if COMPUTE_STREAM not in names:
            names.append(COMPUTE_STREAM)
        codes[tasks["kind"].isin(["collective"])] = names.index(COMPUTE_STREAM)
    return codes, names


def _read_durations(tasks: Columns, rank_of: Ints, exchanges: Exchanges) -> Floats:
    """Return the duration of every task by itself, and 0 for members of exchanges [s]."""
    durations_s = tasks["duration_s"]
    alone = exchanges.of_task < 0
    wrong = alone & ~((durations_s >= 0) & (durations_s < math.inf))
    if wrong.any():
        task = int(np.argmax(wrong))
        raise SimulationError(
            f"task {task} '{tasks['name'][task]}' of rank {rank_of[task]} has the duration "
            f"{durations_s[task]}; a {tasks['kind'][task]} task needs one in seconds"
        )
    return np.where(alone, durations_s, 0.0)


def collect_waits(graph: TaskGraph, lanes: Ints) -> tuple[Ints, Ints]:
    """Return pairs (task, task that it waits for): the graph's dependencies, then the previous task of its lane.

    ``lanes``: a number for the rank and stream of each task [tasks]. SimulationError when a dependency names no task.
    """
    count, waits = len(lanes), graph.wait_columns
    waiting, awaited = waits["task_id"], waits["depends_on"]
    wrong = ((waiting < 0) | (waiting >= count)) | ((awaited < 0) | (awaited >= count))
    if wrong.any():
        row = int(np.argmax(wrong))
        end = waiting[row] if not 0 <= waiting[row] < count else awaited[row]
        raise SimulationError(f"a dependency names task {end}, which does not exist")
    order = np.argsort(lanes, kind="stable")
    same = lanes[order[1:]] == lanes[order[:-1]]
    return (np.concatenate([waiting, order[1:][same]]), np.concatenate([awaited, order[:-1][same]]))


def number_lanes(timeline: Columns) -> Ints:
    """Return a number for the rank and stream of each task of a timeline [tasks]."""
    stream = timeline["stream"]
    lanes: Ints = timeline["rank"] * (len(stream.words) + 1) + stream.codes
    return lanes
