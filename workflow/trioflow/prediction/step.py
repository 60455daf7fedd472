"""A plan's step, put together once: times of operators, task graph, collectives, warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trioflow.costmodel.choices import (
    choose_times,
    find_collectives,
    load_collectives,
    load_named_platform,
)
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.engine.simulate import Result, simulate, simulate_interval
from trioflow.experiments import Plan
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import OFFLOAD_RATES, describe_unmeasured
from trioflow.network.collectives import CollectiveCost
from trioflow.network.measured_links import hold_to_links
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.given import read_stages
from trioflow.parallel.pipeline import BALANCES
from trioflow.parallel.plan import micro_batch_sizes
from trioflow.parallel.reference import choose_reference
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.anchors import (
    Factors,
    SessionAnchor,
    apply_factors,
    find_session,
    read_session,
    settle_contention,
)
from trioflow.prediction.options import CLOSED_FORM, DEFAULTS, SESSION, Options
from trioflow.trace.store import Trace, load_trace

Traces = str | Path | Trace | DeviceTimes | Sequence[str | Path | Trace]
"""What a prediction starts from: a trace or its name, several of one workload at other batches, or
traces that have the device's times already, with their cost model."""


@dataclass(frozen=True)
class Simulated:
    """A simulated step.

    Attributes
    ----------
    result : Result
        With the ends of the interval, where the options ask for them.
    graph : TaskGraph
        What was simulated: with a session's factors on its compute, where there is a session.
    factors : list of mapping, optional
        The session's factors on each rank's phases.
    trace_only_s : float, optional
        The step without the session's factors [s].
    """

    result: Result
    graph: TaskGraph
    factors: list[Factors] | None = None
    trace_only_s: float | None = None


@dataclass(frozen=True)
class Step:
    """One training step of a plan on a platform, ready to be simulated.

    Attributes
    ----------
    graph : TaskGraph
        What every rank does, before a session's anchor.
    platform : Platform
        The machine.
    collectives : CollectiveCost or None
        Its measured collectives; None for the ring's closed form.
    traces : sequence of Trace
        Those that the graph was made from, with the device's times.
    options : Options
        Assumptions.
    cost_model, confidence : str
        What the operators' times rest on, and how far they can be trusted.
    warnings : tuple of str
        What the reader must know before anything is simulated.
    anchor : SessionAnchor, optional
        Of the session, where the options ask for one.
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

    @property
    def trace(self) -> Trace:
        """The trace whose operators the task graph names."""
        return choose_traced(self.traces, self.graph)

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of the fullest rank [bytes]."""
        return int(self.graph.metadata["peak_memory_bytes"])

    @property
    def fits_memory(self) -> bool:
        """Whether the fullest rank's peak fits its device."""
        return self.peak_memory_bytes <= self.platform.device.memory_bytes

    def settle(self, anchor: SessionAnchor) -> list[Factors]:
        """Return a session's factors on each rank's phases."""
        unrecorded = replace(self.options, record_links=False)
        return settle_contention(self.graph, self.platform, self.collectives, anchor, unrecorded)

    def simulate(self) -> Simulated:
        """Simulate the step.

        Raises
        ------
        SimulationError, InputError
            As ``engine.simulate.simulate``.
        """
        run = simulate_interval if self.options.interval else simulate
        if self.anchor is None:
            result = run(self.graph, self.platform, self.collectives, self.options)
            return Simulated(result, self.graph)
        factors = self.settle(self.anchor)
        graph = apply_factors(self.graph, factors)
        result = run(graph, self.platform, self.collectives, self.options)
        unanchored = simulate(
            self.graph, self.platform, self.collectives, self.options, record_links=False
        )
        return Simulated(result, graph, factors, float(unanchored.summary["step_time_s"]))


def prepare_step(
    traces: Traces,
    plan: Plan,
    platform: Platform | str | Path,
    *,
    batch: int | None = None,
    options: Options = DEFAULTS,
) -> Step:
    """Put a plan's step together.

    Parameters
    ----------
    traces : Traces
        One step on one rank; further ones of the same workload at other batches help where
        micro-batches are smaller.
    plan : Plan
        Degrees, schedule, micro-batches, bucket limits.
    platform : Platform, str or path
        The machine, by name, by file or as an object with at least the plan's ranks.
    batch : int, optional
        Samples of the whole step; by default every replica runs the (first) trace's own batch.
    options : Options, optional
        Everything else that is assumed.

    Raises
    ------
    TrioflowError
        When anything of it does not fit.
    """
    if not isinstance(platform, Platform):
        platform = load_named_platform(str(platform), plan.ranks)
    times = time_operators(traces, platform.device.name, options)
    graph = build_graph(times, plan, batch=batch, host=platform.host, options=options)
    return join_step(graph, times, platform, options)


def join_step(
    graph: TaskGraph, times: DeviceTimes, platform: Platform, options: Options = DEFAULTS
) -> Step:
    """Put a task graph together with the platform that runs it.

    Parameters
    ----------
    graph : TaskGraph
        Of ``build_graph``, with the platform's host costs.
    times : DeviceTimes
        What it was built from.
    platform, options
        As for ``prepare_step``.

    Raises
    ------
    InputError
        When there is no such model of collectives, or a session does not anchor the step.
    """
    collectives = choose_collectives(platform, options)
    anchor = None
    if options.anchor == SESSION:
        path = options.session or find_session(str(graph.metadata["workload"]))
        anchor = read_session(path, graph.metadata, times.traces, platform)
    warnings = [*times.warnings, *_list_doubts(graph, platform, collectives, options)]
    return Step(
        graph, platform, collectives, times.traces, options, times.model_text, times.confidence,
        tuple(warnings), anchor,
    )  # fmt: skip


def time_operators(
    traces: Traces,
    device_name: str,
    options: Options = DEFAULTS,
) -> DeviceTimes:
    """Return traces with a device's times, and the operator model for it.

    Raises
    ------
    InputError, TraceError
        As ``costmodel.choices.choose_times``.
    """
    if isinstance(traces, DeviceTimes):
        return traces
    return choose_times(load_traces(traces), device_name, options.cost_model, options.override)


def load_traces(traces: Traces) -> list[Trace]:
    """Return traces, those given by name loaded.

    Raises
    ------
    TraceError
        As ``trace.store.load_trace``.
    """
    if isinstance(traces, DeviceTimes):
        return traces.traces
    several = [traces] if isinstance(traces, str | Path | Trace) else traces
    return [one if isinstance(one, Trace) else load_trace(one) for one in several]


def build_graph(
    times: DeviceTimes,
    plan: Plan,
    *,
    batch: int | None = None,
    host: Mapping[str, float] | None = None,
    options: Options = DEFAULTS,
) -> TaskGraph:
    """Return what every rank does in a plan's step.

    Parameters
    ----------
    times : DeviceTimes
        Traces with a device's times, and the model that rescales them.
    plan, batch, options
        As for ``prepare_step``.
    host : mapping, optional
        The platform's named host costs [s].

    Raises
    ------
    PlanError
        When the plan does not fit the model or the batch.
    """
    stages = options.stages
    if isinstance(stages, str) and stages not in BALANCES:
        stages = read_stages(stages)
    return extrapolate(
        times.traces, plan, times.model, batch=batch, host=host, stages=stages,
        schedule=options.schedule, mode=options.mode, last_batch=options.last_batch,
        anchoring=options.anchoring,
    )  # fmt: skip


def choose_collectives(
    platform: Platform,
    options: Options = DEFAULTS,
    method: str | None = None,
) -> CollectiveCost | None:
    """Return the model of collectives, or None for the ring's closed form.

    Parameters
    ----------
    platform : Platform
        Takes its own measured ones, where there are any and the options name no others.
    options : Options
        ``collectives``.
    method : str, optional
        Way to predict them from what was measured.

    Raises
    ------
    InputError
        When there is no such model, or it cannot predict by the method.
    """
    given = options.collectives
    if given == CLOSED_FORM:
        return None
    if given is not None and not isinstance(given, str | Path):
        return given
    path = find_collectives(platform, None if given is None else str(given))
    if path is None:
        return None
    found = load_collectives(path, method)
    return hold_to_links(found, platform) if _is_of(found, platform, options) else found


def doubt_collectives(
    collectives: CollectiveCost | None, platform: Platform, options: Options = DEFAULTS
) -> list[str]:
    """Return what to say of measured collectives whose machine, or its links, is another one."""
    if collectives is None:
        return []
    doubts = [str(getattr(collectives, "warning", ""))]
    if not _is_of(collectives, platform, options):
        measured = getattr(collectives, "platform", options.collectives)
        doubts.append(
            f"the collectives given were measured on {measured}, and the platform is {platform.name}: "
            "their times are taken as they are"
        )
    return [doubt for doubt in doubts if doubt]


def _is_of(collectives: CollectiveCost, platform: Platform, options: Options) -> bool:
    """Tell whether collectives are the platform's own, by the name that they were found or made under."""
    given = options.collectives
    if given is None or not isinstance(given, str | Path):
        return True
    names = (platform.name, platform.node_collectives)
    return str(given) in names or getattr(collectives, "platform", None) in names


def choose_traced(traces: Sequence[Trace], graph: TaskGraph) -> Trace:
    """Return the trace whose operators a task graph names, of those that it was made from."""
    sizes = micro_batch_sizes(Plan(**graph.metadata["plan"]), int(graph.metadata["batch"]))
    return choose_reference(traces, sizes[0]).trace


def _list_doubts(
    graph: TaskGraph, platform: Platform, collectives: CollectiveCost | None, options: Options
) -> list[str]:
    """Return what was never measured of links, collectives and host, where the step needs it."""
    doubts: list[Any] = []
    if graph.kinds & {"collective", "send"} and collectives is None:
        doubts += [
            f"no measured collectives for {platform.name}: ring closed form over its data-sheet links",
            describe_unmeasured(platform),
        ]
    guessed = [key for key in platform.unmeasured if key.startswith(OFFLOAD_RATES)]
    if graph.metadata["plan"]["offload"] != "none" and guessed:
        doubts.append(
            f"rates of the host of {platform.name} were never measured: peaks of data sheets"
        )
    doubts += doubt_collectives(collectives, platform, options)
    return [doubt for doubt in doubts if doubt]
