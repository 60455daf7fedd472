"""A plan's step on a platform, ready to be simulated: its interval, what is changed for a what-if, a session's anchor.

An experiment of the workflow is predicted from the files of its task graph and its session; its number is that of
``trioflow simulate --anchor session``. What the operators' times rest on travels in the metadata of the graph, which
``parallel.extrapolate.extrapolate_experiment`` writes. The anchor is the machine's speed when steps were measured, and
who slows whom.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import numpy as np
from msgspec import Struct, structs

from trioflow.base.errors import InputError, TableError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import find_traits
from trioflow.base.provenance import read_json
from trioflow.costmodel.collectives.model import load_collective_model
from trioflow.costmodel.uncertainty import calibrate_interval, find_kind
from trioflow.engine.result import Result, measure_concurrency
from trioflow.engine.simulate import DEFAULTS as UNCHANGED
from trioflow.engine.simulate import End, SimulationOptions, simulate, simulate_ends
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.network.collectives import CollectiveCost
from trioflow.parallel.extrapolate import release_sends
from trioflow.parallel.memory.peak import LIKELY, count_needed, count_plan_outside, count_wanted, load_survival
from trioflow.parallel.plan import describe_plan
from trioflow.parallel.task_graph import GraphMetadata, TaskGraph, load_task_graph
from trioflow.prediction.question import SESSION, Options
from trioflow.tables import PHASES
from trioflow.trace.store import Trace, load_trace

_NAMED = 8


def scale_operators(graph: TaskGraph, scales: Sequence[tuple[str, float]]) -> TaskGraph:
    """Return a task graph whose operators take a factor as long where a pattern fits (``aten::mm``, ``mm``, ``*``, ``?``).

    One that several fit takes their product. Raises InputError when none fits, or a factor is not positive.
    """
    for pattern, factor in scales:
        check_factor(factor, f"--scale-operator {pattern}")
        names = graph.compute_names
        meant = [name for name in names if _fits(name, pattern)]
        if not meant:
            some = ", ".join(names[:_NAMED])
            raise InputError(
                f"--scale-operator {pattern}: no operator of the step has such a name",
                fix=f"{_guess(pattern, names)}the step has {some}{' and others' if len(names) > _NAMED else ''}",
            )
        graph = graph.scale_compute(meant, factor)
    return graph


def _guess(word: str, names: Sequence[str]) -> str:
    """Return the pattern that was meant by a word out of the middle of a name; empty where there is none."""
    near = next((name for name in names if word.lower() in name.lower()), None)
    if near is None or not word:
        return ""
    first = near.lower().index(word.lower())
    return f"did you mean '*{near[first : first + len(word)]}*', which {near} fits? "


def list_rank_scales(slow_ranks: Sequence[tuple[int, float]], ranks: int) -> list[float]:
    """Return each rank's factor on compute [ranks], 1 by default; InputError for no such rank or a bad factor."""
    scales = [1.0] * ranks
    for rank, factor in slow_ranks:
        check_factor(factor, f"--slow-rank {rank}")
        if not 0 <= rank < ranks:
            raise InputError(f"--slow-rank {rank}: the plan has ranks 0 to {ranks - 1}")
        scales[rank] *= factor
    return scales


def check_factor(factor: float, flag: str) -> None:
    """Refuse a factor that no time can be multiplied by. Raises InputError when it is not positive and finite."""
    if not 0 < factor < math.inf:
        raise InputError(f"{flag}: the factor {factor:g} is not positive")


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition("::")[2], pattern)


def simulate_interval(
    graph: TaskGraph,
    platform: Platform,
    collectives: CollectiveCost | None = None,
    options: SimulationOptions = UNCHANGED,
    **changes: Any,
) -> Result:
    """Simulate a task graph, and the ends of its 80 % interval beside it; arguments and errors as in ``engine.simulate.simulate``.

    Low ends of compute and collectives are taken together, and high ends: fully correlated errors make the interval
    wide rather than narrow. Without a measured cost, communication has no interval of its own.
    """
    uncertainty = graph.metadata.uncertainty
    ends = [End("low_s", uncertainty.compute[0]), End("high_s", uncertainty.compute[1])]
    nominal, at_ends = simulate_ends(graph, platform, collectives, replace(options, **changes), ends)
    (low_s, low_wall_s), (high_s, high_wall_s) = at_ends
    low_s, high_s = uncertainty.widen(nominal.summary.step_time_s, low_s, high_s)
    wall_s = nominal.summary.simulator_wall_s + low_wall_s + high_wall_s
    return structs.replace(
        nominal, summary=replace(nominal.summary, low_s=low_s, high_s=high_s, simulator_wall_s=wall_s)
    )


class Simulated(Struct, frozen=True):
    """A simulated step: ``graph`` has the session's ``factors`` on each rank's phases, ``trace_only_s`` has not [s]."""

    result: Result
    graph: TaskGraph
    factors: list[Factors] | None = None
    trace_only_s: float | None = None


@dataclass(frozen=True)
class Step:
    """One training step of a plan on a platform, ready to be simulated.

    ``graph`` is before a session's ``anchor``; ``collectives`` None for the ring's closed form; ``traces`` with the
    device's times, which rest on ``cost_model`` with ``confidence``. ``fewer``: the same step with fewer micro-batches, where ``graph`` does not hold all
    of them: what is asked lies ``beyond`` the two, in differences between them.
    """

    graph: TaskGraph
    platform: Platform
    collectives: CollectiveCost | None
    traces: Sequence[Trace]
    options: Options
    cost_model: str
    confidence: str
    warnings: tuple[str, ...] = ()
    anchor: SessionAnchor | None = None
    fewer: Step | None = None
    beyond: float = 0.0

    @property
    def trace(self) -> Trace:
        """The trace whose operators the task graph names."""
        return next(trace for trace in self.traces if trace.facts.batch == self.graph.metadata.traced_batch)

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of the fullest rank [bytes]."""
        return self.graph.metadata.peak_memory_bytes

    @property
    def known_peak_bytes(self) -> int | None:
        """The same; None where no memory is estimated [bytes]."""
        return self.peak_memory_bytes if self.graph.metadata.memory else None

    @property
    def outside_bytes(self) -> int:
        """What a rank's device holds beside the peak: context and communicators [bytes]."""
        counted = count_plan_outside(self.graph.metadata.plan, self.platform.device.kind)
        return counted + round(self.platform.corrections.get("outside_bytes", 0.0))

    @property
    def room_bytes(self) -> float:
        """What a rank's allocator may hold: what context and communicators leave of its device [bytes]."""
        return self.platform.device.memory_bytes - self.outside_bytes

    @property
    def fit_probability(self) -> float | None:
        """Probability that no rank runs out of memory; None where no memory is estimated."""
        if not self.graph.metadata.memory:
            return None
        return load_survival().find_probability(self.needed_bytes, self.room_bytes)

    @property
    def fits_memory(self) -> bool | None:
        """Whether the step more likely fits its devices than not; None where no memory is estimated."""
        return None if self.fit_probability is None else self.fit_probability >= LIKELY

    @property
    def reserved_bytes(self) -> int:
        """What the fullest rank's allocator is expected to hold; its peak on a CPU [bytes]."""
        reserved = [int(entry.get("reserved_bytes", 0)) for entry in self.graph.metadata.memory]
        return max(reserved, default=0) or self.peak_memory_bytes

    @property
    def wanted_bytes(self) -> int:
        """What the fullest rank's allocator would hold on a device with more memory; its peak on a CPU [bytes]."""
        return max(map(count_wanted, self.graph.metadata.memory), default=0)

    @property
    def needed_bytes(self) -> float:
        """What the rank that needs most needs of its device to survive, as ``memory.peak`` counts it [bytes]."""
        return count_needed(self.graph.metadata.memory)

    @property
    def kind(self) -> str:
        """Which kind of step it is: a row of ``data/step_calibration.tsv``."""
        metadata = self.graph.metadata
        words = (metadata.uncertainty.confidence, self.confidence)
        return find_kind(metadata.plan, metadata.ranks, self.platform.ranks_per_node or metadata.ranks, words)

    def _calibrate(self, result: Result) -> Result:
        """Return a result whose interval is as wide as the errors of judged steps of its kind ask for."""
        summary = result.summary
        if summary.low_s is None or summary.high_s is None or summary.step_time_s <= 0:
            return result
        low_s, high_s = calibrate_interval(self.kind, summary.step_time_s, (summary.low_s, summary.high_s))
        return structs.replace(result, summary=replace(summary, low_s=low_s, high_s=high_s))

    def replace_options(self, **changes: Any) -> Step:
        """Return the same step with some other options of its simulation."""
        fewer = self.fewer and self.fewer.replace_options(**changes)
        return replace(self, options=replace(self.options, **changes), fewer=fewer)

    def settle(self, anchor: SessionAnchor) -> list[Factors]:
        """Return a session's factors on each rank's phases."""
        unrecorded = replace(self.options, record_links=False)
        return settle_contention(self.graph, self.platform, self.collectives, anchor, unrecorded)

    def simulate(self) -> Simulated:
        """Simulate the step. Raises SimulationError or InputError as ``engine.simulate.simulate``."""
        if self.fewer is not None:
            few, many = self.fewer.simulate(), replace(self, fewer=None).simulate()
            ends = few.result.summary, many.result.summary
            took_s = sum(one.simulator_wall_s for one in ends)
            summary = replace(_extend(*ends, self.beyond), simulator_wall_s=took_s)
            return structs.replace(many, result=structs.replace(many.result, summary=summary))
        run = simulate_interval if self.options.interval else simulate
        if self.anchor is None:
            result = run(self.graph, self.platform, self.collectives, self.options)
            return Simulated(self._calibrate(result), self.graph)
        factors = self.settle(self.anchor)
        graph = apply_factors(self.graph, factors)
        result = run(graph, self.platform, self.collectives, self.options)
        unanchored = simulate(self.graph, self.platform, self.collectives, self.options, record_links=False)
        return Simulated(self._calibrate(result), graph, factors, unanchored.summary.step_time_s)


_MOST_OPERATORS = 1_500_000
"""Operators of all micro-batches of a replica up to which all are simulated: some 0.6 GB."""
_FEWER, _MORE = 2, 3
"""Micro-batches, in pipeline degrees, of the two steps from which a longer one follows. From twice the degree on, each
further round of micro-batches takes the same time and memory; where weights' gradients are computed apart, memory
grows otherwise later on, and all are simulated."""


def choose_counts(plan: Plan, batch: int, operators: int, options: Options) -> tuple[int, int] | None:
    """Return two numbers of micro-batches from which a pipeline of very many follows; None where all are simulated."""
    fewer, more = _FEWER * plan.pipeline, _MORE * plan.pipeline
    whole = batch % (plan.data * plan.micro_batches) == 0
    wanted = options.draws or options.record_links or options.schedule or options.anchor == SESSION
    many = plan.micro_batches * operators > _MOST_OPERATORS and plan.micro_batches > 2 * more
    steady = not find_traits(plan.schedule).splits
    return (fewer, more) if plan.pipeline > 1 and steady and many and whole and not wanted else None


def extend_step(fewer: Step, more: Step, plan: Plan, batch: int) -> Step:
    """Return the step of a plan of very many micro-batches from two of fewer; its task graph is that of ``more``."""
    few, many = fewer.graph.metadata, more.graph.metadata
    counts = few.plan.micro_batches, many.plan.micro_batches
    beyond = (plan.micro_batches - counts[1]) / (counts[1] - counts[0])
    grown = ("baseline_step_time_s", "peak_memory_bytes", "memory")
    first_call_s = _extend(few.uncertainty.first_call_s, many.uncertainty.first_call_s, beyond)
    text = many.plan_text.replace(describe_plan(many.plan, many.batch), describe_plan(plan, batch))
    metadata = replace(
        many,
        plan=plan,
        batch=batch,
        plan_text=text,
        uncertainty=replace(many.uncertainty, first_call_s=first_call_s),
        **{name: _extend(getattr(few, name), getattr(many, name), beyond) for name in grown},
    )
    graph = copy(more.graph)
    graph.metadata = metadata
    warning = (
        f"of {plan.micro_batches} micro-batches {counts[1]} were simulated: each further round takes as long as the last"
        f" {counts[1] - counts[0]}, and the timeline ends with these"
    )
    return replace(more, graph=graph, warnings=(*more.warnings, warning), fewer=fewer, beyond=beyond)


def _extend(one: Any, other: Any, beyond: float) -> Any:
    """Return what follows behind two results, number by number, at so many of their differences beyond the second."""
    if isinstance(other, int | float) and not isinstance(other, bool):
        value = other + beyond * (other - one)
        return round(value) if isinstance(other, int) else value
    if is_dataclass(other):
        names = [cell.name for cell in fields(other)]
        parts = {name: _extend(getattr(one, name), getattr(other, name), beyond) for name in names}
        return replace(cast("Any", other), **parts)
    if isinstance(other, dict) and one.keys() == other.keys():
        return {name: _extend(one[name], value, beyond) for name, value in other.items()}
    if isinstance(other, list | tuple) and len(one) == len(other):
        cells = [_extend(a, b, beyond) for a, b in zip(one, other, strict=True)]
        return type(other)(*cells) if hasattr(other, "_fields") else type(other)(cells)
    return other


def load_experiment(
    graph_folder: str | Path,
    platform: str | Path,
    collectives: str | Path,
    session: str | Path,
    trace_folders: Sequence[str | Path],
) -> tuple[Step, SessionAnchor]:
    """Return an experiment's step, and the anchor of its session.

    Raises TrioflowError when a file is missing or wrong, or the session is of another workload or capture.
    """
    graph = load_task_graph(graph_folder)
    machine = load_platform(Path(platform), graph.metadata.ranks)
    traces = [load_trace(path) for path in trace_folders]
    times = graph.metadata.operator_times
    if times is None:
        raise TableError(
            "no key 'operator_times'",
            file=Path(graph_folder) / "tasks.parquet",
            place="metadata",
            fix="make the task graph with the workflow",
        )
    anchor = read_session(session, graph.metadata, traces, machine)
    step = Step(
        release_sends(graph, machine.eager_send_bytes),
        machine,
        load_collective_model(collectives),
        traces,
        Options(anchor=SESSION, session=session, record_links=True),
        times.cost_model,
        times.confidence,
        tuple(times.warnings),
        anchor,
    )
    return step, anchor


_CONTENTION_ROUNDS = 4
"""Passes that settle how long ranks compute at the same time."""
_SAME = 1e-6
"""Steps closer than this relative to each other are the same capture's."""

Factors = Mapping[str, float]
"""Phase to the factor from traced to measured compute."""


class SessionAnchor(Struct, frozen=True):
    """Factors from traced compute to a session's, for each phase."""

    quiet: Factors  # with one rank busy
    busy: list[Factors]  # of each rank, with all ranks busy at once

    def mix(self, concurrency: Sequence[float]) -> list[Factors]:
        """Return each rank's factors when others compute beside it for a share of its time."""
        return [
            {phase: self.quiet[phase] + share * (busy[phase] - self.quiet[phase]) for phase in PHASES}
            for busy, share in zip(self.busy, concurrency, strict=True)
        ]


def read_session(
    path: str | Path, metadata: GraphMetadata, traces: Sequence[Trace], platform: Platform
) -> SessionAnchor:
    """Return the anchor of a task graph by a ``session.json`` of ``measure.session.calibrate_workload``.

    Raises InputError when that measured another workload, device, batches or captures, or fewer ranks.
    """
    session = read_json(path)
    problem = next(_list_mismatches(session, metadata, traces, platform), "")
    if problem:
        raise InputError(
            f"the session does not anchor this step: {problem}",
            file=path,
            fix="give the session that measured this workload on this platform, or leave the anchor out",
        )
    return choose_anchor(session, metadata)


def _list_mismatches(
    session: Mapping[str, Any], metadata: GraphMetadata, traces: Sequence[Trace], platform: Platform
) -> Iterator[str]:
    """Yield what of a session is not the task graph's; each only makes sense where the last is not."""
    anchors, ranks = session.get("anchors", {}), metadata.ranks
    if not anchors:
        yield "it holds no single-rank steps (anchors)"
    if session.get("workload", metadata.workload) != metadata.workload:
        yield f"it measured {session['workload']}, not {metadata.workload}"
    devices = session.get("device_names") or [platform.device.name]
    if devices[0] != platform.device.name:
        yield f"it ran on {devices[0]}, and the platform's device is {platform.device.name}"
    captured = {str(trace.facts.batch): float(trace.facts.step_time_s) for trace in traces}
    for batch in metadata.trace_shares:
        if batch not in anchors:
            yield f"it has no step of the traced batch {batch}, only of {', '.join(anchors)}"
        traced_s = float(anchors[batch].get("traced_step_s") or 0.0)
        if traced_s and abs(traced_s - captured[batch]) > _SAME * traced_s:
            yield (
                f"it belongs to another capture at batch {batch}, whose step took {traced_s:.6g} s"
                f" and this trace's {captured[batch]:.6g} s"
            )
        busy = len(anchors[batch].get("busy", []))
        if ranks > 1 and busy < ranks:
            yield f"{busy} ranks were busy at once, and the plan has {ranks}"


def choose_anchor(session: Mapping[str, Any], metadata: GraphMetadata) -> SessionAnchor:
    """Return the anchor of an experiment from the session's own single-rank steps.

    The machine drifts between capture and measurement, and ranks that compute at once slow each other down,
    memory-bound phases most: both show in the session's repeats of traced steps, which communicate nothing.
    """
    ranks, shares = metadata.ranks, metadata.trace_shares
    traced, anchors = metadata.traced_phases_s, session["anchors"]

    def factors(by_phase: Mapping[str, Mapping[str, float]]) -> Factors:
        return {
            phase: float(sum(shares[b] * by_phase[b][phase] / traced[b][phase] for b in shares)) for phase in PHASES
        }

    quiet = factors({batch: anchors[batch]["single"] for batch in shares})
    if ranks == 1:
        return SessionAnchor(quiet, [quiet])
    busy = [{batch: anchors[batch]["busy"][rank] for batch in shares} for rank in range(ranks)]
    return SessionAnchor(quiet, [factors(of_rank) for of_rank in busy])


def apply_factors(graph: TaskGraph, factors: Sequence[Factors]) -> TaskGraph:
    """Return a graph whose compute takes each rank's and phase's factor as long.

    Copies of gradients and tasks of no phase, bound by memory and host, take the optimizer's.
    """
    tasks = graph.task_columns
    by_phase = np.array([[of_rank[phase] for phase in PHASES] for of_rank in factors])
    phase = np.full(tasks.rows, PHASES.index("optimizer"))
    for place, name in enumerate(PHASES):
        phase[tasks["phase"].isin([name]) & ~tasks["kind"].isin(["memcpy"])] = place
    scaled = tasks.assign(duration_s=tasks["duration_s"] * by_phase[tasks["rank"], phase])
    return TaskGraph(scaled, graph.wait_columns, graph.metadata)


def settle_contention(
    graph: TaskGraph,
    platform: Platform,
    collectives: CollectiveCost | None,
    anchor: SessionAnchor,
    options: SimulationOptions,
) -> list[Factors]:
    """Return each rank's factors on compute, given how long the ranks compute together (a few iterations).

    A pipeline's ranks wait and then compute alone, at the quiet speed; replicas compute side by side all the time.
    """
    factors = anchor.mix([1.0] * len(anchor.busy))
    for _ in range(_CONTENTION_ROUNDS if len(anchor.busy) > 1 else 0):
        result = simulate(apply_factors(graph, factors), platform, collectives, options)
        factors = anchor.mix(measure_concurrency(result.timeline_columns))
    return factors
