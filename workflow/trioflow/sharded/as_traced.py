"""The task graph of ranks that run traced programs: operators, streams and messages are the trace's; no plan is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import MsgspecError, Struct, convert
from numpy.typing import NDArray

from trioflow.base.errors import PlanError, TraceError
from trioflow.base.units import ns_to_s
from trioflow.costmodel.choices import PREDICTED, find_launch_s, host_times, mention_launches, times_interval
from trioflow.costmodel.uncertainty import ALONE, COLLECTIVES, Uncertainty, combine_intervals, least_half_width
from trioflow.parallel.extrapolate import phase_times, repeat_interval
from trioflow.parallel.plan import AS_TRACED, make_plan
from trioflow.parallel.task_graph import Family, Fold, GraphMetadata, TaskGraph, TaskGraphBuilder
from trioflow.trace.facts import POINT_TO_POINT, Facts
from trioflow.trace.store import Trace

_FULL_BUFFERS = ("all_reduce", "broadcast", "reduce")
"""Collectives whose buffer does not depend on how many ranks there are."""


Ints = NDArray[np.int64]


class Message(Struct, frozen=True):
    """One message of a rank's program, an entry of the fact ``communication``."""

    op_id: int
    name: str
    message_bytes: int
    ranks: tuple[int, ...]
    group: str = ""
    asynchronous: bool = True
    peer: int | None = None
    tag: int = 0  # sends and receives of one tag meet in order

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the group, ascending."""
        return tuple(sorted(self.ranks))


@dataclass(frozen=True)
class TracedProgram:
    """What a rank sends, and what of its operators waits for what."""

    rank: int
    world_size: int
    messages: Mapping[int, Message]  # by the operator
    streams: Mapping[int, int]  # of operators that are not in the first one
    waits: Mapping[int, Sequence[int]]  # earlier operators that one waits for


def read_program(facts: Facts, operators: int) -> TracedProgram:
    """Return the program that the facts of a trace hold; TraceError where there is none, or it contradicts itself."""
    known, place = facts.program, "program"
    if known is None:
        raise TraceError(
            f"the trace of {facts.workload} does not hold the messages of a rank of a parallel run",
            fix="capture it with --world-size, or import a profile whose communication says its group",
        )
    try:
        rank, world_size = int(known["rank"]), int(known["world_size"])
        place = "communication"
        messages = convert(facts.communication or [], list[Message])
        for one in messages:
            among = rank in one.ranks and 0 <= min(one.ranks) <= max(one.ranks) < world_size
            if (
                not among
                or len({*one.ranks}) < len(one.ranks)
                or one.message_bytes < 0
                or (one.name in POINT_TO_POINT and one.peer not in one.ranks)
            ):
                raise ValueError(
                    f"{one.name} of {one.message_bytes} bytes among the ranks {list(one.ranks)}, to or from {one.peer}"
                )
        place = "program.streams"
        streams = {int(i): int(number) for number, ids in known["streams"].items() for i in ids}
        place = "program.waits"
        waits: dict[int, list[int]] = {}
        for op_id, earlier in known["waits"]:
            if not 0 <= int(earlier) < int(op_id) < operators:
                raise ValueError(f"operator {op_id} waits for {earlier}")
            waits.setdefault(int(op_id), []).append(int(earlier))
        named = [*(m.op_id for m in messages), *streams]
        if not all(0 <= op_id < operators for op_id in named) or not 0 <= rank < world_size:
            raise ValueError("it names operators or ranks that are not there")
    except (KeyError, TypeError, ValueError, AttributeError, MsgspecError) as error:
        words = f"{error} is missing" if isinstance(error, KeyError) else error
        raise TraceError(f"{words}", file="trace.json", place=place, fix="capture it again") from None
    return TracedProgram(rank, world_size, {m.op_id: m for m in messages}, streams, waits)


@dataclass(frozen=True, eq=False)
class _Rank:
    """A traced rank."""

    trace: Trace
    program: TracedProgram


def build_traced_graph(
    traces: Sequence[Trace], *, ranks: int | None = None, host: Mapping[str, float] | None = None
) -> TaskGraph:
    """Return what every rank does that runs a traced program: one for all, or for each place in a group that sends.

    ``ranks`` may take the place of those of the run where the program does not depend on their number; ``host`` are the
    platform's named costs [s]. Raises TraceError when a trace holds no program, PlanError when the traces do not go
    together, leave ranks out, or depend on the number of ranks.
    """
    given = [_Rank(trace, read_program(trace.facts, len(trace.operators))) for trace in traces]
    world = given[0].program.world_size
    _check_given(given, world)
    ranks = world if ranks is None else ranks
    tilings = _tile_groups(given, world, ranks)
    class_of, chosen = _assign_ranks(given, tilings, world, ranks)
    builder, matches = TaskGraphBuilder(), _Matches(ranks)
    launch_s = find_launch_s(host or {}, given[0].trace.facts)
    representatives = np.unique(class_of, return_index=True)[1]
    for number, rank in enumerate(representatives.tolist()):
        _Writer(builder, matches, tilings, rank, class_of == number, chosen[number], launch_s).run()
    fold = Fold(
        builder.build(_describe(given, ranks, launch_s)),
        class_of,
        representatives.astype(np.int64),
        np.array(matches.family_of, dtype=np.int64),
        matches.families,
    )
    problem = fold.find_problem()
    if problem:
        raise PlanError(
            f"the programs of the ranks do not fit together: {problem}", fix="give the trace of a rank of each kind"
        )
    return TaskGraph.of_fold(fold) if len(representatives) < ranks else fold.expand()


def _check_given(given: Sequence[_Rank], world: int) -> None:
    """Refuse traces of several runs, or of one rank twice."""
    sizes = {one.program.world_size for one in given}
    own = [one.program.rank for one in given]
    if len(sizes) > 1 or len(set(own)) < len(own):
        raise PlanError(
            f"the traces are of the ranks {', '.join(map(str, own))} of {' and '.join(map(str, sorted(sizes)))}",
            fix="give one trace a rank, all of one run",
        )


def _tile_groups(given: Sequence[_Rank], world: int, ranks: int) -> dict[tuple[int, ...], _Tiling]:
    """Return for each traced group those that all ranks are in; PlanError where none, or its size counts and changes."""
    tilings: dict[tuple[int, ...], _Tiling] = {}
    for one in given:
        for message in one.program.messages.values():
            group = message.members
            if ranks != world:
                _check_resized(message, group, one, world)
            if group not in tilings:
                every = ranks == world == len(given)  # none stands for another: groups need not lie alike
                same = resize_group(group, world, ranks)
                tilings[group] = _set_apart(group, ranks) if every else tile_ranks(same, ranks, group)
    return tilings


def _check_resized(message: Message, group: tuple[int, ...], one: _Rank, world: int) -> None:
    """Refuse another number of ranks where it changes what a rank computes or sends."""
    if resize_group(group, world, 2 * world) == group:
        return
    phase = str(one.trace.operators["phase"].iloc[message.op_id])
    sums_forward = message.name == "all_reduce" and phase == "forward"
    if message.name not in _FULL_BUFFERS or sums_forward:
        where = f" in {phase}" if sums_forward else ""
        raise PlanError(
            f"--ranks would change the group {','.join(map(str, group))}, whose {message.name}{where} depends on "
            f"its size, as the operators around it do",
            fix=f"leave it out ({world} ranks were traced), or capture the step with another --world-size",
        )


def _assign_ranks(
    given: Sequence[_Rank], tilings: Mapping[tuple[int, ...], _Tiling], world: int, ranks: int
) -> tuple[np.ndarray, list[_Rank]]:
    """Return each rank's class, and the traced rank of each; PlanError when a place of a sending group was not traced."""
    own = {one.program.rank: one for one in given} if ranks == world else {}
    sends = sorted({m.members for one in given for m in one.program.messages.values() if m.name in POINT_TO_POINT})
    if not sends:
        runs = [own.get(rank, given[0]) for rank in range(ranks)]
    else:
        tiling = tilings[sends[0]]
        places = {int(tiling.place_of[one.program.rank]): one for one in reversed(given)}
        missing = [place for place in range(len(sends[0])) if place not in places]
        if missing:
            ranks_missing = [int(tiling.groups[0][place]) for place in missing]
            raise PlanError(
                f"rank {given[0].program.rank} exchanges messages with the ranks "
                f"{', '.join(map(str, sends[0]))}, which do not all do the same",
                fix=f"give traces of the ranks {', '.join(map(str, ranks_missing))} as well",
            )
        runs = [own.get(rank, places[int(tiling.place_of[rank])]) for rank in range(ranks)]
    place: dict[_Rank, int] = {}
    return np.array([place.setdefault(one, len(place)) for one in runs], dtype=np.int64), [*place]


@dataclass(frozen=True)
class _Tiling:
    """Groups of one shape that hold every rank once."""

    groups: Ints  # ascending within each [groups, members]
    group_of: Ints  # group that each rank is in [ranks]
    place_of: Ints  # and its place there [ranks]


def _set_apart(group: Sequence[int], ranks: int) -> _Tiling:
    """Return a group alone, others in none."""
    group_of, place_of = np.full(ranks, -1, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    group_of[[*group]], place_of[[*group]] = 0, np.arange(len(group))
    return _Tiling(np.array([group], dtype=np.int64), group_of, place_of)


def tile_ranks(group: Sequence[int], ranks: int, traced: Sequence[int]) -> _Tiling:
    """Return the groups that ranks are in, given one of them, which PlanError names as ``traced``.

    The lowest rank that is in none yet is the first of the next of the same shape: a mesh has no other way. Raises
    PlanError when such groups do not hold every rank once.
    """
    shape = np.array(sorted(group), dtype=np.int64) - min(group)
    group_of = np.full(ranks, -1, dtype=np.int64)
    place_of = np.zeros(ranks, dtype=np.int64)
    tiles: list[Ints] = []
    for rank in range(ranks):
        if group_of[rank] >= 0:
            continue
        members = rank + shape
        if members[-1] >= ranks or (group_of[members] >= 0).any():
            break
        group_of[members], place_of[members] = len(tiles), np.arange(len(members))
        tiles.append(members)
    if (group_of < 0).any() or not np.array_equal(tiles[group_of[min(group)]], min(group) + shape):
        raise PlanError(
            f"{ranks} ranks do not lie in groups as {','.join(map(str, traced))}",
            fix="give the trace of every rank, or another number of ranks",
        )
    return _Tiling(np.stack(tiles), group_of, place_of)


def resize_group(group: Sequence[int], world: int, ranks: int) -> tuple[int, ...]:
    """Return a group of a run of ``world`` ranks as it is in one of ``ranks``: resized if it reaches over all ranks evenly."""
    members = sorted(group)
    step = members[1] - members[0] if len(members) > 1 else world
    reaches = step * len(members) == world and members == list(range(members[0], members[0] + world, step))
    if not reaches or len(members) < 2 or ranks % step:
        return tuple(members)
    return tuple(range(members[0], members[0] + ranks, step))


class _Matches:
    """Numbers of exchanges, and the groups that each takes place in."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.families: list[Family] = []
        self.family_of: list[int] = []
        self._known: dict[object, int] = {}
        self._numbers: dict[object, int] = {}

    def number(self, family: object, groups: np.ndarray, key: object) -> int:
        """Return the number of an exchange in groups that stand for one another."""
        if family not in self._known:
            self._known[family] = len(self.families)
            group_of = np.full(self.ranks, -1, dtype=np.int64)
            group_of[groups.ravel()] = np.repeat(np.arange(len(groups)), groups.shape[1])
            self.families.append(Family(groups, group_of))
        if (family, key) not in self._numbers:
            self._numbers[family, key] = len(self.family_of)
            self.family_of.append(self._known[family])
        return self._numbers[family, key]


class _Writer:
    """Writes the tasks of one representative."""

    def __init__(
        self,
        builder: TaskGraphBuilder,
        matches: _Matches,
        tilings: Mapping[tuple[int, ...], _Tiling],
        rank: int,
        alike: np.ndarray,
        traced: _Rank,
        launch_s: float,
    ) -> None:
        self.builder, self.matches, self.tilings = builder, matches, tilings
        self.rank, self.alike, self.program = rank, alike, traced.program
        self.trace = traced.trace
        operators = self.trace.operators
        self.device_s = [ns_to_s(t) for t in operators["device_ns"]]
        self.host_s = host_times(self.trace, operators, launch_s)
        self.beside = self.trace.facts.device == "cuda"
        self.task_of: dict[int, list[int]] = {}
        self.last: dict[int, list[int]] = {}  # what the next operator of each stream comes after
        self.launched: int | None = None
        self.counts: dict[object, int] = {}
        groups = sorted({m.group for m in self.program.messages.values()})
        self.lanes = {group: f"communication{f' {place}' if place else ''}" for place, group in enumerate(groups)}

    def run(self) -> None:
        """Write the whole step."""
        columns = ("op_id", "name", "phase", "kind")
        operators = self.trace.operators
        for op_id, name, phase, kind in zip(*(operators[c].tolist() for c in columns), strict=True):
            stream = self.program.streams.get(op_id, 0)
            after = list(self.last.get(stream, []))
            for earlier in self.program.waits.get(op_id, ()):
                after += self.task_of[earlier]
            after = list(dict.fromkeys(after))
            message = self.program.messages.get(op_id)
            if self.beside and self.host_s[op_id]:
                self.launched = self.builder.add(
                    self.rank,
                    "host",
                    "host",
                    f"launch {name}",
                    duration_s=float(self.host_s[op_id]),
                    phase=phase,
                    op_id=op_id,
                )
            if message is not None and len(message.ranks) > 1:
                task = self._send(message, phase, after)
                self.task_of[op_id] = [task]
                self.last[stream] = after if message.asynchronous else [task]
                continue
            if kind != "collective" and (self.device_s[op_id] or self.host_s[op_id]):
                after = [self._compute(op_id, name, phase, kind, stream, after)]
            self.last[stream] = self.task_of[op_id] = after
        tail_s = float(self.trace.facts.tail_s or 0.0)
        if tail_s:
            ends = [task for tasks in self.last.values() for task in tasks]
            self.builder.add(
                self.rank, "compute", "host", "host: end of step", after=list(dict.fromkeys(ends)), duration_s=tail_s
            )

    def _compute(self, op_id: int, name: str, phase: str, kind: str, stream: int, after: list[int]) -> int:
        """Add one operator; on a processor its host time is its own."""
        lane = f"stream {stream}" if stream else "compute"
        duration_s = self.device_s[op_id] + (0.0 if self.beside else float(self.host_s[op_id]))
        return self.builder.add(
            self.rank, lane, kind, name, after=[*after, self.launched], duration_s=duration_s, phase=phase, op_id=op_id
        )

    def _send(self, message: Message, phase: str, after: list[int]) -> int:
        """Add one message, after what its stream did before and its launch."""
        tiling = self.tilings[message.members]
        own = tiling.groups[tiling.group_of[self.rank]].tolist()
        first = tuple(tiling.groups[0].tolist())  # one for all groups that lie alike
        waits = [*after, self.launched]
        common = {"phase": phase, "message_bytes": message.message_bytes, "op_id": message.op_id}
        traced = self.program.rank
        if message.peer is not None:
            place = message.members.index(message.peer)
            here = message.members.index(traced)
            ends = (here, place) if message.name == "send" else (place, here)
            key = (first, *ends)
            tagged = (message.tag, self._count((*key, message.name, message.tag)))
            groups = tiling.groups[:, list(ends)]
            lane = "send" if message.name == "send" else "receive"
            return self.builder.add(
                self.rank,
                lane,
                message.name,
                f"{message.name} {phase}",
                after=waits,
                peer=own[place],
                match_id=self.matches.number(key, groups, tagged),
                **common,
            )
        order = [message.members.index(one) for one in message.ranks]
        if len(own) != len(order):
            order = list(range(len(own)))
        number = self._count(first)
        return self.builder.add(
            self.rank,
            self.lanes[message.group],
            "collective",
            message.name,
            after=waits,
            group=",".join(str(own[place]) for place in order),
            match_id=self.matches.number((first, tuple(order)), tiling.groups[:, order], number),
            **common,
        )

    def _count(self, key: object) -> int:
        self.counts[key] = self.counts.get(key, -1) + 1
        return self.counts[key]


def _describe(given: Sequence[_Rank], ranks: int, launch_s: float) -> GraphMetadata:
    """Return where the graph comes from."""
    facts, world = given[0].trace.facts, given[0].program.world_size
    own = ", ".join(str(one.program.rank) for one in given)
    changed = "" if ranks == world else f", on {ranks}"
    interval = combine_intervals(repeat_interval(facts), times_interval(facts))
    carried = times_interval(facts) != (1.0, 1.0)
    kind, workload = str(facts.device or "cpu"), str(facts.model or facts.workload)
    departures = {
        COLLECTIVES: any(one.program.messages for one in given),
        ALONE: facts.step_time_source not in ("un-profiled", PREDICTED),
    }
    left = [name for name, leaves in departures.items() if leaves]
    return GraphMetadata(
        workload=facts.workload,
        plan=replace(make_plan(), plan=AS_TRACED),
        plan_text=f"as traced on rank{'s' * (len(given) > 1)} {own} of {world}{changed}, {facts.batch} samples per rank",
        ranks=ranks,
        batch=facts.batch,
        traced_batch=facts.batch,
        trace_shares={str(facts.batch): 1.0},
        traced_phases_s={str(facts.batch): phase_times(given[0].trace)},
        device_name=facts.device_name,
        baseline_step_time_s=float(facts.step_time_s),
        uncertainty=Uncertainty(
            interval,
            "extrapolated" if carried else "measured",
            least_half_width(left, kind, workload, ranks),
            float(facts.first_call_s or 0.0),
        ),
        warnings=mention_launches(facts.warnings, launch_s, facts),
    )
