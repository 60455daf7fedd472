"""Simulate one training step: task graph and platform in, timeline and summary out; `simulate` is the door.

`simulate_ends` runs the same graph again with the times of an interval's ends. Before it runs, a graph is prepared:
collectives become flows, or an algorithm's messages where the plan or the caller names one, ranks that do the same are
executed once (``folding.fold``), and collectives that nothing disturbs are one event, where exact.

A collective's kernels take multiprocessors and memory bandwidth from what is computed beside them. A platform says by
how much: ``compute_slowdown_during_collective``, 1 where it does not. A task of work w that runs beside collectives for
a time o takes w + o (1 - 1/s): while they run it advances at one s-th of its rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.arguments import Flag, declare, documented, settle_fields
from trioflow.base.columns import Columns, Texts
from trioflow.base.derived import Derives, derived, key_of
from trioflow.base.errors import InputError, SimulationError
from trioflow.base.experiments import Plan
from trioflow.engine.compiled.run import is_repaid, run_program, supports
from trioflow.engine.folding.fold import CannotFoldError, FoldedProgram, TooLargeError, check_expansion, fold_program
from trioflow.engine.program import (
    Case,
    Exchanges,
    ExchangeTraffic,
    Execution,
    Flags,
    Floats,
    Ints,
    Program,
    build_programs,
    check_scale,
    spread_scale,
)
from trioflow.engine.result import (
    Executed,
    LaneIntervals,
    RankTimes,
    Result,
    Summary,
    TimelineSummary,
    find_confidence,
    gather_traffic,
    keep_pieces,
    measure_shares,
    merge_lanes,
    select_communication,
    select_compute,
    summarize_tasks,
    warn_of_parts,
)
from trioflow.hardware.machine import Platform, is_rank_node, narrow_links
from trioflow.network.algorithms.catalogue import Algorithms, read_algorithms, spell_algorithm
from trioflow.network.collectives import Bound, CollectiveCost, CollectiveFlows, CollectivePlanner
from trioflow.network.message_planner import Chunks, CollectiveMessages, MessagePlanner, RunAlone, sum_rounds
from trioflow.network.networks import (
    DEFAULT_NETWORK,
    NETWORKS,
    AnyNetwork,
    ContentionFreeNetwork,
    FairShareNetwork,
    FlowShape,
    compute_max_min_rates,
    find_network,
    find_slack,
    make_network,
)
from trioflow.network.routing import find_router
from trioflow.parallel.task_graph import Fold, TaskGraph

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")


def choose_algorithms(
    plan: Plan, algorithms: Algorithms | None, chunks: Chunks | None
) -> tuple[Algorithms | None, Chunks]:
    """Return the algorithms and chunks asked for (short names too), or the graph's plan; InputError when one is unknown."""
    if algorithms is None and plan.algorithms != "none":
        algorithms = plan.algorithms
    if isinstance(algorithms, str):
        algorithms = read_algorithms(algorithms)
    elif algorithms is not None:
        algorithms = {name: spell_algorithm(word) for name, word in algorithms.items()}
    if chunks is None:
        chunks = Chunks(plan.chunks, float(plan.chunk_bytes) or math.inf)
    return algorithms, chunks


MOST_USES = 256
"""Planners are made anew after so many simulations, so that what they remember has an end."""


class _Planners(Derives, Struct, eq=False, dict=True):
    """What plans a platform's collectives; finding routes takes longer than a folded simulation."""

    platform: Platform
    collectives: CollectiveCost | None
    uses: int = 0

    @derived(most=6)  # the three ends of an interval, with an algorithm and without
    def choose(self, bound: Bound, algorithms: Algorithms | None, chunks: Chunks) -> CollectivePlanner:
        """Return what turns collectives into messages, or flows without an algorithm; InputError as ``MessagePlanner``."""
        if algorithms is None and bound == "time_s":
            return CollectivePlanner(self.platform, self.collectives, bound)
        if algorithms is None:
            return self.choose("time_s", None, chunks).rebound(bound)
        run_alone = make_run_alone(self.platform)
        return MessagePlanner(self.platform, algorithms, run_alone, self.collectives, bound, chunks)


def _find_planners(platform: Platform, collectives: CollectiveCost | None) -> _Planners:
    """Return a platform's planners, the same ones while its collectives' model is the same."""
    known: _Planners | None = platform.results.get("planners")
    if known is None or known.collectives is not collectives or known.uses >= MOST_USES:
        known = platform.results["planners"] = _Planners(platform, collectives)
    known.uses += 1
    return known


@derived()
def keep_slack(platform: Platform) -> frozenset[int]:
    """Return the links of a platform that hold no flow between ranks back: see `find_slack`."""
    return find_slack(find_router(platform), is_rank_node)


def make_run_alone(platform: Platform) -> RunAlone:
    """Return what runs a collective by itself, its messages sharing the platform's links."""

    def run(plan: CollectiveMessages) -> float:
        program = _make_program(plan)
        network = FairShareNetwork(platform.links, platform.routing)
        compiled = is_repaid(program.events)
        return float(run_program(program, network, compiled=compiled).end_s[0])

    return run


def _make_program(plan: CollectiveMessages) -> Program:
    """Return a program of one task, which stands for all members of the collective."""
    one, none = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    ends = np.array([0, 1], dtype=np.int64)
    exchanges = Exchanges(one, one, ends, [plan], one, np.zeros(1), [], [])
    name = plan.pattern.collective
    return Program(one, one, ["alone"], Texts.of([name]), Texts.of(["collective"]), np.zeros(1), none, none, exchanges)


def aggregate_program(program: Program, network: AnyNetwork) -> tuple[Program, int, Floats]:
    """Replace collectives of messages by single events where that changes the result by rounding alone.

    Returns the given one where nothing can be replaced; how many exchanges are one event now; and what they move over
    each link [links] [bytes], which no engine counts then. A collective becomes one event when both of these hold.

    *No other traffic is on its links while it runs.* Call two exchanges neighbours if they cross a common link, and
    take the classes of exchanges that are joined by chains of neighbours. In a class in which every exchange has a
    member in one and the same stream of one rank, no two run at the same time: tasks of a stream run one after the
    other, a member runs from the start of its exchange to its end, and bytes move only in between. A class of one
    exchange needs no such stream. So at any time all flows on the links of a collective of such a class are its own.

    *Its messages form rounds.* The algorithm has rounds (see ``MessagePattern.round_blocks``), all pairs have the same
    latency l and, all moving, the same rate r. Then all messages of a round start at one time t, by induction: those of
    the first when the collective starts; and if those of a round start at t, their bytes begin to move at (t + l), all
    at once and so at the rate r until they end, at (t + l) + size / r for all; whatever waits for them starts then.

    Only networks whose rates are known here take part.
    """
    exchanges = program.exchanges
    plans: list[ExchangeTraffic] = list(exchanges.plans)
    if not (supports(network) and any(isinstance(plan, CollectiveMessages) for plan in plans)):
        return program, 0, np.zeros(0)
    assert isinstance(network, FairShareNetwork | ContentionFreeNetwork)
    alone = _find_undisturbed(program)
    widths, shared = network.capacities_bytes_per_s, isinstance(network, FairShareNetwork)
    times = np.bincount(exchanges.plan_of[exchanges.plan_of >= 0], minlength=len(plans))
    moved_bytes, lasting_s = np.zeros(len(widths)), np.full(len(plans) + 1, math.nan)
    for number, plan in enumerate(plans):
        if not (alone[number] and isinstance(plan, CollectiveMessages) and plan.flow_count):
            continue
        rate = _find_rate(plan, widths, shared)
        if rate is None:
            continue
        lasting_s[number], size_bytes = sum_rounds(plan, rate)
        links, crossings = plan.shape.crossings
        moved_bytes[links] += times[number] * crossings * size_bytes
        none, nobody = np.zeros(0), plan.shape.choose(np.zeros(0, dtype=np.int64))
        plans[number] = CollectiveFlows(nobody, none, none, none, plan.confidence, plan.warning)
    of_exchange = lasting_s[exchanges.plan_of]
    replaced = ~np.isnan(of_exchange)
    durations_s = np.where(replaced, of_exchange, exchanges.durations_s)
    changed = structs.replace(program, exchanges=structs.replace(exchanges, plans=plans, durations_s=durations_s))
    return changed, int(replaced.sum()), moved_bytes


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
    return np.append(most == in_class, False)[class_of_plan]


def _classify(plans: list[ExchangeTraffic]) -> Ints:
    """Return a class for each plan, equal where chains of common links join them, shape by shape; -1 without links."""
    shaped = [plan.shape if len(plan.shape.hops) else None for plan in plans]
    shapes = dict.fromkeys(shape for shape in shaped if shape)
    classes = np.zeros(len(shapes), dtype=np.int64)
    if len(shapes) > 1:  # nothing has to be joined where all plans have one shape, as a thousand ranks' often
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        crossing = np.repeat(np.arange(len(shapes)), [len(shape.hops) for shape in shapes])
        links = len(shapes) + np.concatenate([shape.hops for shape in shapes])
        size = int(links.max()) + 1
        edges = coo_array((np.ones(len(links), dtype=np.int8), (crossing, links)), (size, size))
        classes = connected_components(edges, directed=False)[1].astype(np.int64)
    class_of: dict[FlowShape | None, int] = dict(zip(shapes, classes.tolist(), strict=False))
    return np.array([class_of.get(shape, -1) for shape in shaped], dtype=np.int64)


def _find_rate(plan: CollectiveMessages, widths: Floats, shared: bool) -> float | None:
    """Return the rate of every message with a network's links to the collective itself [bytes/s]; None where rounds are not alike."""
    latencies_s, caps, shape = plan.latencies_s, plan.max_rates_bytes_per_s, plan.shape
    if plan.pattern.round_blocks is None or (latencies_s != latencies_s[0]).any():
        return None
    if not (0 <= latencies_s[0] < math.inf and 0 <= plan.block_bytes < math.inf):
        return None  # The engines say what is wrong with it.
    if shared and (shape.crossings[1] > 1).any():
        rates = compute_max_min_rates(*shape.routes, widths, caps)
    else:  # each pair has its links to itself, and a share of one part is the whole
        rates = np.minimum(caps, np.minimum.reduceat(widths[shape.hops], shape.first_hops[:-1]))
    return float(rates[0]) if rates[0] > 0 and (rates == rates[0]).all() else None


UNKNOWN_RANKS = "the graph does not say which ranks are identical"
"""Why all ranks are simulated of a graph that was read from a file or whose tables were read."""


class Prepared(Struct, frozen=True, eq=False):
    """What an engine is given, and how its answer is read."""

    # Of all ranks, or of one of each class, with the times of each case
    programs: list[Program]
    make_network: Callable[[], AnyNetwork]  # makes an unused network to run one on
    # The way back to all ranks, where identical ones are executed once
    folded: FoldedProgram | None = None
    unfolded_reason: str = ""  # why all ranks are executed; empty where they are not

    def summarize(self, execution: Execution) -> TimelineSummary:
        """Sum up all ranks."""
        program = self.programs[0]
        tasks = Columns({"kind": program.kinds, "stream": Texts(program.streams, program.stream_names)})
        works = select_compute(tasks), select_communication(tasks)
        summary = summarize_tasks(program.ranks, *works, execution.start_s, execution.end_s)
        if self.folded is None:
            return summary
        fold = self.folded.fold
        of_class = [row[1:] for row in summary.per_rank]
        per_rank = [RankTimes(r, *of_class[k]) for r, k in enumerate(fold.class_of.tolist())]
        return replace(summary, per_rank=per_rank, ranks=fold.ranks)


class Ran(Struct, frozen=True, eq=False):
    """What an engine did."""

    program: Program  # what was executed
    network: AnyNetwork  # what it ran on
    execution: Execution  # when its tasks ran
    engine: str  # which engine it was
    aggregated: int  # exchanges that were one event; see `aggregate_program`
    wall_s: float  # wall time of the event loop [s]


def run_prepared(ready: Prepared, options: SimulationOptions) -> list[Ran]:
    """Run each case of what is ready; errors as the engines."""
    ran, engine = [], options.engine
    for every in ready.programs:
        program, mover, aggregated = every, ready.make_network(), 0
        if options.aggregate and not options.record_links:
            program, aggregated, moved_bytes = aggregate_program(every, mover)
        if options.engine == "auto":
            compiled = supports(mover) and is_repaid(program.events * len(ready.programs))
            engine = "compiled" if compiled else "reference"
        begin_s = time.perf_counter()
        execution = run_program(program, mover, compiled=engine == "compiled")
        wall_s = time.perf_counter() - begin_s
        if aggregated:
            link_bytes = dict(execution.link_bytes)
            for link, size in zip(mover.links, moved_bytes.tolist(), strict=True):  # type: ignore[union-attr]
                link_bytes[link[:2]] += size
            execution = structs.replace(execution, link_bytes=link_bytes)
        ran.append(Ran(program, mover, execution, engine, aggregated, wall_s))
    return ran


def prepare(
    graph: TaskGraph,
    platform: Platform,
    collectives: CollectiveCost | None,
    options: SimulationOptions,
    ends: Sequence[End],
    reason: str = "not asked for",
) -> Prepared:
    """Make a task graph ready to run, with the times of some ends of an interval.

    Raises SimulationError as ``program.build_program``; TooLargeError where all ranks' tasks do not fit into memory;
    ``reason``: why identical ranks are not executed once where ``options`` do not let them.
    """
    algorithms, chunks = choose_algorithms(graph.metadata.plan, options.algorithms, options.chunks)
    fold, scale = graph.fold, options.communication_scale
    # Algorithms may let flows start at switches.
    slack = keep_slack(platform) if algorithms is None else frozenset()

    def make_whole() -> AnyNetwork:
        mover = make_network(options.network, narrow_links(platform.links, scale), platform.routing)
        if isinstance(mover, FairShareNetwork):
            mover.slack = slack
        if options.record_links:
            keep_pieces(mover)
        return mover

    planners = _find_planners(platform, collectives)
    cases = [
        Case(
            planners.choose(end.bound, algorithms, chunks),
            np.multiply(options.compute_scale, end.compute_factor).tolist(),
        )
        for end in ends
    ]
    make = find_network(options.network)
    if options.fold:
        reason = "what crossed the links was asked for" if options.record_links else ""
    if not reason and fold is None:
        reason = UNKNOWN_RANKS
    elif not reason and options.network not in NETWORKS:
        reason = f"the network {options.network} is not known to treat like flows alike"
    if fold is not None:
        made, reason = _write_programs(fold, cases, slack, platform, reason)
    else:
        made = build_programs(graph, cases, [case.planner for case in cases], platform)
    if isinstance(made, FoldedProgram):
        folded = made.stretch(scale)
        return Prepared(folded.programs, lambda: folded.make_network(make, make_whole), folded)
    return Prepared([program.stretch(scale) for program in made], make_whole, None, reason)


@derived(
    lambda cases, slack, platform, reason: (
        key_of(([(case.planner, case.compute_scale) for case in cases], slack)),
        reason,
    ),
    most=2,  # consecutive scenarios of a sweep ask for the same
)
def _write_programs(
    fold: Fold, cases: Sequence[Case], slack: frozenset[int], platform: Platform, reason: str
) -> tuple[FoldedProgram | list[Program], str]:
    """Return the program of one rank of each class; for a reason, or where that is not exact, those of all ranks, and why."""
    if not reason:
        try:
            return fold_program(fold, cases, slack, platform), ""
        except TooLargeError:
            raise
        except (CannotFoldError, SimulationError, InputError) as problem:
            reason = str(problem)  # where the graph is wrong, the program of all ranks says it best
    check_expansion(fold, reason)
    return build_programs(fold.whole, cases, [case.planner for case in cases], platform), reason


def _build_timeline(graph: TaskGraph, fold: Fold | None, program: Program, execution: Execution) -> Columns:
    """Return the timeline of all ranks: columns of ``tables.TIMELINE``."""
    if fold is None:
        return _assemble(graph.task_columns, program, execution)
    check_expansion(fold, "a timeline of them is asked for")
    return _assemble(fold.whole.task_columns, program, execution, fold.row_of_task)


def _assemble(tasks: Columns, program: Program, execution: Execution, row: Any = slice(None)) -> Columns:
    """Return the timeline of tasks of which each ran as a row of what was executed."""
    stream = Texts(program.streams[row], program.stream_names)
    ran = tasks.assign(stream=stream, start_s=execution.start_s[row], end_s=execution.end_s[row])
    return Columns({name: ran[name] for name in tables.TIMELINE.names})


ENGINES = ("auto", "compiled", "reference")
"""Engines by name; all give the same bits."""


@documented
@dataclass(frozen=True)
class SimulationOptions:
    """How a task graph is simulated."""

    compute_scale: float | Sequence[float] = declare(
        "factor on the durations of compute, memcpy and host tasks: one for all, or one for each rank of the platform",
        1.0,
    )
    communication_scale: float = declare("factor on every communication time", 1.0)
    network: str = declare(
        f"how messages share links: {', '.join(NETWORKS)}, or one that a package registers, such as circuit",
        DEFAULT_NETWORK,
        Flag("NAME"),
    )
    engine: str = declare(
        "which engine runs it: auto (the one that answers first), compiled or reference; both give the same bits",
        "auto",
    )
    algorithms: Algorithms | None = declare(
        "algorithm of each collective, or one for all but sends: see ``message_planner.MessagePlanner``. Such a collective"
        " is simulated message by message. Without one, in the graph's plan neither, it is a flow between every two"
        " neighbours, from its start to its end",
        None,
    )
    chunks: Chunks | None = declare(
        "pieces that each message of an algorithm is cut into; the plan's, else one, unless given", None
    )
    aggregate: bool = declare(
        "whether a collective of an algorithm may be one event where that changes the result by rounding alone; not with"
        " record_links",
        True,
    )
    record_links: bool = declare(
        "whether to keep what crossed the links, and when; only of trioflow's networks ``fair_share`` and"
        " ``contention_free``. Every rank is simulated then",
        False,
    )
    fold: bool = declare(
        "simulate every rank, also where ranks do the same and simulating them once is exact",
        True,
        Flag(name="--no-fold"),
    )

    def __post_init__(self) -> None:
        settle_fields(self)
        check_scale(self.communication_scale, "communication_scale")
        if isinstance(self.compute_scale, Real):
            object.__setattr__(self, "compute_scale", float(self.compute_scale))

    def scale_compute(self, factor: float | Sequence[float]) -> Self:
        """Return the same with compute that takes a factor as long: one for all, or one for each rank of the platform."""
        each = spread_scale(self.compute_scale, len(factor)) if isinstance(factor, Sequence) else self.compute_scale
        return replace(self, compute_scale=np.multiply(each, factor).tolist())


DEFAULTS = SimulationOptions()


def simulate(
    graph: TaskGraph,
    platform: Platform,
    collectives: CollectiveCost | None = None,
    options: SimulationOptions = DEFAULTS,
    **changes: Any,
) -> Result:
    """Simulate a task graph on a platform, with ``collectives`` as measured, else the ring's closed form over its links.

    Raises SimulationError when tasks wait for each other for ever, an exchange lacks a member, a task has no duration,
    or no route joins two ranks (``program.build_program``); there is no number then. Raises InputError when network,
    engine or algorithm is unknown or does not fit, the compiled engine does not know the network, or that cannot record
    its links.

    Tasks of one (rank, stream) run in the order of ``task_id``; a collective starts when all members could and ends for
    all at once; a message moves when send and recv could both start. On a platform with
    ``communication_on_compute_stream`` collectives queue in the ``compute`` stream of their rank, by ``task_id``.
    """
    return _simulate(graph, platform, collectives, replace(options, **changes), "time_s")


class End(Struct, frozen=True):
    """An end of an interval: which of a collective's times is taken, and a factor on compute."""

    bound: Bound
    compute_factor: float


_Times = list[tuple[float, float]]
"""Time of the step at each end, and wall time of its event loop [s]."""


def simulate_ends(
    graph: TaskGraph,
    platform: Platform,
    collectives: CollectiveCost | None,
    options: SimulationOptions,
    ends: Sequence[End],
) -> tuple[Result, _Times]:
    """Simulate a graph; and with the times of some ends of an interval, on the same links where they are; errors as `simulate`.

    Links are recorded of the nominal run. A simulation each where algorithms differ at the ends, collectives slow compute down, or links are recorded
    (unfolded).
    """
    unrecorded = replace(options, record_links=False)
    algorithms, _ = choose_algorithms(graph.metadata.plan, options.algorithms, options.chunks)
    apart = platform.compute_slowdown_during_collective != 1 or options.record_links
    if algorithms is None and not apart:
        return _simulate_once(graph, platform, collectives, options, "time_s", ends)
    nominal = _simulate(graph, platform, collectives, options, "time_s")
    at_ends = []
    for end in ends:
        scaled = unrecorded.scale_compute(end.compute_factor)
        at_end = _simulate(graph, platform, collectives, scaled, end.bound).summary
        at_ends.append((at_end.step_time_s, at_end.simulator_wall_s))
    return nominal, at_ends


def _simulate(
    graph: TaskGraph, platform: Platform, collectives: CollectiveCost | None, options: SimulationOptions, bound: Bound
) -> Result:
    """Simulate; where collectives slow compute down, until its times are those of their own run."""
    slowdown = platform.compute_slowdown_during_collective
    if slowdown == 1 or not graph.kinds >= {"collective", "compute"}:
        return _simulate_once(graph, platform, collectives, options, bound)[0]
    return _stretch_compute(graph, slowdown, lambda one: _simulate_once(one, platform, collectives, options, bound)[0])


def _simulate_once(
    graph: TaskGraph,
    platform: Platform,
    collectives: CollectiveCost | None,
    options: SimulationOptions,
    bound: Bound,
    ends: Sequence[End] = (),
) -> tuple[Result, _Times]:
    """Simulate; and with the times of some ends of an interval, on what was made ready once."""
    if options.engine not in ENGINES:
        raise InputError(f"no engine is called {options.engine!r}", fix=f"choose one of {', '.join(ENGINES)}")
    every = (End(bound, 1.0), *ends)
    ready = prepare(graph, platform, collectives, options, every)
    try:
        ran, *others = run_prepared(ready, options)
    except SimulationError as error:
        if ready.folded is None:
            raise
        # Errors name all ranks.
        ready = prepare(graph, platform, collectives, replace(options, fold=False), every, str(error))
        ran, *others = run_prepared(ready, options)
    result = _read_result(graph, platform, options, ready, ran)
    return result, [(float(one.execution.end_s.max(initial=0.0)), one.wall_s) for one in others]


def _read_result(graph: TaskGraph, platform: Platform, options: SimulationOptions, ready: Prepared, ran: Ran) -> Result:
    """Return what a run says of all ranks."""
    execution = ran.execution
    traffic = gather_traffic(ran.program, execution, ran.network) if options.record_links else None
    folded, moved = ready.folded, execution.link_bytes
    shares = measure_shares(ran.program, execution)
    warnings = [*ran.program.exchanges.warnings, *warn_of_parts(shares)]
    algorithms, _ = choose_algorithms(graph.metadata.plan, options.algorithms, options.chunks)
    summary = Summary(
        **vars(ready.summarize(execution)),
        events=execution.events,
        count_link_bytes=partial(folded.spread_bytes, moved, platform.links) if folded else partial(dict, moved),
        confidence=find_confidence(shares),
        warnings=list(dict.fromkeys([*graph.metadata.warnings, *warnings])),
        network=options.network,
        engine=ran.engine,
        aggregated=None if algorithms is None else ran.aggregated,
        folded=folded is not None,
        unfolded_reason=ready.unfolded_reason,
        executed_ranks=len(np.unique(ran.program.ranks)) if folded is None else len(folded.fold.representatives),
        simulator_wall_s=ran.wall_s,
    )
    fold = None if folded is None else folded.fold
    kept = graph if fold is None else fold.graph
    like = np.unique(ran.program.ranks) if fold is None else fold.representatives[fold.class_of]
    executed = Executed(partial(_assemble, kept.task_columns, ready.programs[0], execution), kept, like)
    return Result(partial(_build_timeline, graph, fold, ready.programs[0], execution), executed, summary, traffic)


ROUNDS = 200
"""Runs after which the times are taken as they are."""
CLOSE = 1e-9
"""Change from one run to the next, over the step time, that counts as settled."""
_PATIENCE = 20
"""Runs after which each change is halved: tasks and collectives that chase one another settle then."""


def _stretch_compute(graph: TaskGraph, slowdown: float, run: Callable[[TaskGraph], Result]) -> Result:
    """Return a simulation in which compute takes ``slowdown`` (above 1) as long beside a collective.

    Durations are stretched by the overlap of the run before until they agree with their own run, so any engine and
    network serve; a warning says if they had not settled.
    """
    tasks = graph.task_columns
    base_s, compute = tasks["duration_s"], tasks["kind"].isin(["compute"]) & tasks["stream"].isin(["compute"])
    stretched_s = base_s
    for number in range(ROUNDS):
        result = run(TaskGraph(tasks.assign(duration_s=stretched_s), graph.wait_columns, graph.metadata))
        overlap_s = measure_overlap(result.timeline_columns)
        wanted_s = np.where(compute, base_s + overlap_s * (1.0 - 1.0 / slowdown), base_s)
        moved_s = np.abs(wanted_s - stretched_s)[compute].max(initial=0.0)
        if moved_s <= CLOSE * result.summary.step_time_s:
            return result
        part = 1.0 if number < _PATIENCE else 0.5
        stretched_s = np.where(compute, stretched_s + part * (wanted_s - stretched_s), base_s)
    warning = f"compute beside collectives had not settled after {ROUNDS} runs"
    warnings = [*result.summary.warnings, warning]
    return structs.replace(result, summary=replace(result.summary, warnings=warnings))


def measure_overlap(timeline: pd.DataFrame | Columns) -> NDArray[np.float64]:
    """Return for how long collectives of its rank run beside each task [tasks] [s]."""
    overlap_s = np.zeros(len(timeline["rank"]))
    rank, start_s, end_s = (np.asarray(timeline[name], dtype=np.float64) for name in ("rank", "start_s", "end_s"))
    moves = np.asarray(timeline["kind"].isin(["collective"]), dtype=bool)
    for one in np.unique(rank[moves]):
        of_rank = rank == one
        bounds = (moves & of_rank).nonzero()[0]
        moving = merge_lanes(LaneIntervals(np.zeros_like(bounds), start_s[bounds], end_s[bounds]))
        times_s = np.column_stack([moving.start_s, moving.end_s]).ravel()
        # How much of the time until each of these instants is covered.
        covered_s = np.repeat(np.append(0.0, np.cumsum(moving.end_s - moving.start_s)), 2)[1:-1]
        inside = (np.interp(t[of_rank], times_s, covered_s) for t in (end_s, start_s))
        overlap_s[of_rank] = np.subtract(*inside) if len(times_s) else 0.0
    return overlap_s
