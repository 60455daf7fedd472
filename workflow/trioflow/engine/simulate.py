"""Simulate one training step: task graph and platform in, timeline and summary out.

A collective's kernels take multiprocessors and memory bandwidth from what is computed beside them. A platform says by
how much: ``compute_slowdown_during_collective``, 1 where it does not. A task of work w that runs beside collectives for
a time o takes w + o (1 - 1/s): while they run it advances at one s-th of its rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.arguments import settle_fields
from trioflow.base.errors import InputError, SimulationError
from trioflow.engine.link_traffic import gather_traffic, keep_pieces
from trioflow.engine.planning import (
    choose_algorithms,
    keep_links,
    keep_slack,
    make_planner,
    name_links,
)
from trioflow.engine.preparation import Prepared, Ran, prepare, run_prepared
from trioflow.engine.program import Case, check_scale
from trioflow.engine.result import Result, Summary, find_confidence, measure_shares, warn_of_parts
from trioflow.hardware.machine import Platform
from trioflow.network.algorithms.catalogue import Algorithms
from trioflow.network.collectives import Bound, CollectiveCost
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.interface import Network
from trioflow.network.message_planner import Chunks
from trioflow.network.networks import DEFAULT_NETWORK, make_network
from trioflow.parallel.task_graph import TaskGraph

ENGINES = ("auto", "compiled", "reference")
"""Engines by name; all give the same bits."""


@dataclass(frozen=True)
class SimulationOptions:
    """How a task graph is simulated.

    Attributes
    ----------
    compute_scale : float or sequence of float
        Factor on the durations of compute, memcpy and host tasks: one for
        all, or one for each rank of the platform.
    communication_scale : float
        Factor on every communication time.
    network : str
        How flows share links: see ``networks.find_network``.
    engine : {"auto", "compiled", "reference"}
        Which engine runs it; auto takes the one that answers first. Both give
        the same bits.
    algorithms : str or mapping of str to str, optional
        Algorithm of each collective, or one for all but sends: see
        ``message_planner.MessagePlanner``. Such a collective is simulated
        message by message. Without one, in the graph's plan neither, it is a
        flow between every two neighbours, from its start to its end.
    chunks : Chunks, optional
        Pieces that each message of an algorithm is cut into; the plan's, else
        one, unless given.
    aggregate : bool
        Whether a collective of an algorithm may be one event where that
        changes no bit of the result; see ``preparation.aggregate_program``.
    record_links : bool
        Whether to keep what crossed the links, and when; only of trioflow's
        networks ``fair_share`` and ``contention_free``. No ranks are folded then.
    fold : {"auto", True, False}
        Whether identical ranks are executed once, where that changes no bit
        of the times; see ``folding``. Auto leaves out what does not pay off:
        see ``preparation.prepare``.
    """

    compute_scale: float | Sequence[float] = 1.0
    communication_scale: float = 1.0
    network: str = DEFAULT_NETWORK
    engine: str = "auto"
    algorithms: Algorithms | None = None
    chunks: Chunks | None = None
    aggregate: bool = True
    record_links: bool = False
    fold: str | bool = "auto"

    def __post_init__(self) -> None:
        settle_fields(self)
        check_scale(self.communication_scale, "communication_scale")
        if isinstance(self.compute_scale, Real):
            object.__setattr__(self, "compute_scale", float(self.compute_scale))

    def scale_compute(self, factor: float) -> SimulationOptions:
        """Return the same with compute that takes a factor as long."""
        if isinstance(self.compute_scale, float):
            return replace(self, compute_scale=self.compute_scale * factor)
        return replace(self, compute_scale=[value * factor for value in self.compute_scale])


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


def simulate_interval(
    graph: TaskGraph,
    platform: Platform,
    collectives: CollectiveCost | None = None,
    options: SimulationOptions = DEFAULTS,
    **changes: Any,
) -> Result:
    """Simulate a task graph, and the ends of its 80 % interval beside it; arguments and errors as in ``simulate``.

    ``graph.metadata`` holds the interval of compute times and the least half width of the step's. Links are recorded of
    the nominal run. Low ends of compute and collectives are taken together, and high ends: fully correlated errors make
    the interval wide rather than narrow. Without a measured cost, communication has no interval of its own.
    """
    nominal_options = replace(options, **changes)
    low, high = graph.metadata.compute_interval
    ends = [_End("low_s", low), _End("high_s", high)]
    nominal, at_ends = _simulate_ends(graph, platform, collectives, nominal_options, ends)
    step_time_s = nominal.summary.step_time_s
    # Shared links can turn a faster part into a slower whole; the interval still holds it.
    least = math.exp(graph.metadata.least_half_log)
    # A call that initialises stays as it was recorded, on the way through every step.
    fixed_s = min(graph.metadata.first_call_s, step_time_s)
    (low_s, low_wall_s), (high_s, high_wall_s) = at_ends
    summary = replace(
        nominal.summary,
        low_s=min(low_s + fixed_s * (1 - low), fixed_s + (step_time_s - fixed_s) / least),
        high_s=max(high_s - fixed_s * (high - 1), fixed_s + (step_time_s - fixed_s) * least),
        simulator_wall_s=nominal.summary.simulator_wall_s + low_wall_s + high_wall_s,
    )
    return replace(nominal, summary=summary)


@dataclass(frozen=True)
class _End:
    """An end of an interval: which of a collective's times is taken, and a factor on compute."""

    bound: Bound
    compute_factor: float


_Times = list[tuple[float, float]]
"""Time of the step at each end, and wall time of its event loop [s]."""


def _simulate_ends(
    graph: TaskGraph, platform: Platform, collectives: CollectiveCost | None,
    options: SimulationOptions, ends: Sequence[_End],
) -> tuple[Result, _Times]:  # fmt: skip
    """Simulate a graph, and at the ends of its interval: with other times on the same links, where they are.

    A simulation each where algorithms differ at the ends, collectives slow compute down, or links are recorded
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
    graph: TaskGraph, platform: Platform, collectives: CollectiveCost | None,
    options: SimulationOptions, bound: Bound,
) -> Result:  # fmt: skip
    """Simulate; where collectives slow compute down, until its times are those of their own run."""
    slowdown = platform.compute_slowdown_during_collective
    if slowdown == 1 or not graph.kinds >= {"collective", "compute"}:
        return _simulate_once(graph, platform, collectives, options, bound)[0]
    return _stretch_compute(
        graph, slowdown, lambda one: _simulate_once(one, platform, collectives, options, bound)[0]
    )


def _simulate_once(
    graph: TaskGraph, platform: Platform, collectives: CollectiveCost | None,
    options: SimulationOptions, bound: Bound, ends: Sequence[_End] = (),
) -> tuple[Result, _Times]:  # fmt: skip
    """Simulate; and with the times of some ends of an interval, on what was made ready once."""
    engine = options.engine
    if engine not in ENGINES:
        raise InputError(
            f"no engine is called {engine!r}", fix=f"choose one of {', '.join(ENGINES)}"
        )
    ready = _make_ready(graph, platform, collectives, options, bound, ends)
    try:
        ran = [run_prepared(ready, engine, options.aggregate, n) for n in range(1 + len(ends))]
    except SimulationError as error:
        if ready.folded is None:
            raise
        # Errors name all ranks.
        unfolded = replace(options, fold=False)
        ready = _make_ready(graph, platform, collectives, unfolded, bound, ends, reason=str(error))
        ran = [run_prepared(ready, engine, options.aggregate, n) for n in range(1 + len(ends))]
    result = _read_result(graph, platform, options, ready, ran[0])
    return result, [(float(one.execution.end_s.max(initial=0.0)), one.wall_s) for one in ran[1:]]


def _make_ready(
    graph: TaskGraph, platform: Platform, collectives: CollectiveCost | None,
    options: SimulationOptions, bound: Bound, ends: Sequence[_End], reason: str = "not asked for",
) -> Prepared:  # fmt: skip
    """Return what an engine is given."""
    algorithms, chunks = choose_algorithms(graph.metadata.plan, options.algorithms, options.chunks)

    def make_mover() -> Network:
        links = keep_links(platform, options.communication_scale)
        mover = make_network(options.network, links, platform.routing)
        if isinstance(mover, FairShareNetwork) and algorithms is None:
            # Algorithms may let flows start at switches.
            mover.leave_out(keep_slack(platform))
        if options.record_links:
            keep_pieces(mover)
        return mover

    cases = []
    for end in (_End(bound, 1.0), *ends):
        planner = make_planner(platform, collectives, end.bound, algorithms, chunks)
        cases.append(Case(planner, options.scale_compute(end.compute_factor).compute_scale))
    if options.record_links and options.fold:
        reason = "what crossed the links was asked for"
    return prepare(
        graph, cases, make_mover, platform,
        fold=False if options.record_links else options.fold, unfolded_reason=reason,
        communication_scale=options.communication_scale,
    )  # fmt: skip


def _read_result(
    graph: TaskGraph, platform: Platform, options: SimulationOptions, ready: Prepared, ran: Ran,
) -> Result:  # fmt: skip
    """Return what a run says of all ranks."""
    execution = ran.execution
    traffic = gather_traffic(ran.program, execution, ran.network) if options.record_links else None
    moved = ready.list_link_bytes(execution, platform.links)
    shares = measure_shares(ran.program, execution)
    found = [*ran.program.exchanges.warnings, *warn_of_parts(shares)]
    algorithms, _ = choose_algorithms(graph.metadata.plan, options.algorithms, options.chunks)
    summary = Summary(
        **vars(ready.summarize(execution)),
        events=execution.events,
        link_bytes={name: moved[ends] for ends, name in name_links(platform) if ends in moved},
        confidence=find_confidence(shares),
        warnings=list(dict.fromkeys([*graph.metadata.warnings, *found])),
        network=options.network,
        engine=ran.engine,
        aggregated=None if algorithms is None else ran.aggregated,
        folded=ready.folded is not None,
        unfolded_reason=ready.unfolded_reason,
        executed_ranks=ready.count_ranks(graph),
        simulator_wall_s=ran.wall_s,
    )
    return Result(
        ready.make_timeline(graph, execution), ready.make_executed(graph, execution), summary,
        traffic,
    )  # fmt: skip


ROUNDS = 200
"""Runs after which the times are taken as they are."""
CLOSE = 1e-9
"""Change from one run to the next, over the step time, that counts as settled."""
_PATIENCE = 20
"""Runs after which each change is halved: tasks and collectives that chase one another settle then."""


def _stretch_compute(
    graph: TaskGraph, slowdown: float, run: Callable[[TaskGraph], Result]
) -> Result:
    """Return a simulation in which compute takes ``slowdown`` (above 1) as long beside a collective.

    Durations are stretched by the overlap of the run before until they agree with their own run, so any engine and
    network serve; a warning says if they had not settled.
    """
    base_s = graph.tasks["duration_s"].to_numpy(dtype=float)
    compute = ((graph.tasks["kind"] == "compute") & (graph.tasks["stream"] == "compute")).to_numpy()
    stretched_s = base_s
    for number in range(ROUNDS):
        tasks = graph.tasks.assign(duration_s=stretched_s)
        result = run(TaskGraph(tasks, graph.dependencies, graph.metadata))
        overlap_s = measure_overlap(result.timeline)
        wanted_s = np.where(compute, base_s + overlap_s * (1.0 - 1.0 / slowdown), base_s)
        moved_s = np.abs(wanted_s - stretched_s)[compute].max(initial=0.0)
        if moved_s <= CLOSE * result.summary.step_time_s:
            return result
        part = 1.0 if number < _PATIENCE else 0.5
        stretched_s = np.where(compute, stretched_s + part * (wanted_s - stretched_s), base_s)
    warning = f"compute beside collectives had not settled after {ROUNDS} runs"
    warnings = [*result.summary.warnings, warning]
    return replace(result, summary=replace(result.summary, warnings=warnings))


def measure_overlap(timeline: pd.DataFrame) -> NDArray[np.float64]:
    """Return for how long collectives of its rank run beside each task [tasks] [s]."""
    overlap_s = np.zeros(len(timeline))
    columns = (timeline[name].to_numpy() for name in ("rank", "kind", "start_s", "end_s"))
    rank, kind, start_s, end_s = columns
    for one in np.unique(rank[kind == "collective"]):
        mine = rank == one
        times_s, covered_s = _cover(*(t[mine & (kind == "collective")] for t in (start_s, end_s)))
        inside = (np.interp(t[mine], times_s, covered_s) for t in (end_s, start_s))
        overlap_s[mine] = np.subtract(*inside)
    return overlap_s


def _cover(
    starts_s: NDArray[np.float64], ends_s: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return instants, and how much of the time until each is covered by any of some intervals."""
    times_s, covered_s, until_s, total_s = [0.0], [0.0], 0.0, 0.0
    for start_s, end_s in sorted(zip(starts_s.tolist(), ends_s.tolist(), strict=True)):
        begin_s = max(start_s, until_s)
        if end_s > begin_s:
            times_s += [begin_s, end_s]
            covered_s += [total_s, total_s + end_s - begin_s]
            total_s, until_s = covered_s[-1], end_s
    return np.array(times_s), np.array(covered_s)
