"""Merging a raw profile into the operator and tensor tables.

An operator is an outermost ATen (or library) one; on a CPU its device time is its own and its
children's self time, the host's before it (interpreter, autograd engine) kept apart.
"""

from collections.abc import Mapping, Sequence
from math import isclose
from pathlib import Path
from statistics import median
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.base.provenance import digest_file, read_json, stamp
from trioflow.base.units import ns_to_s
from trioflow.trace.assemble import ObservedOperator, assemble_trace
from trioflow.trace.facts import check_facts
from trioflow.trace.profile.events import RAW_FILES, STEP
from trioflow.trace.profile.execution_trace import link_nodes, read_nodes
from trioflow.trace.profile.kineto import read_profile
from trioflow.trace.profile.observe import coverage_of, list_doubts, observe_step
from trioflow.trace.profile.steps import (
    Step,
    StepTimes,
    find_spans,
    load_step,
    measure_repeats,
    median_times,
    times_of_step,
)
from trioflow.trace.store import Trace, save_trace


def merge_trace_folder(source: str | Path, target: str | Path) -> None:
    """Merge the raw profile in one folder into a trace in another; TraceError where a raw file is missing or does not fit."""
    save_trace(merge_trace(source), target)


def merge_trace(folder: str | Path) -> Trace:
    """Merge the profile, the execution trace and the environment of one captured step.

    ``kineto_steps.json.gz``, where present, gives the median times. Raises TraceError when a raw
    file is missing, broken or does not fit.
    """
    folder = Path(folder)
    environment = _read_environment(folder / "environment.json")
    path = folder / "kineto.json.gz"
    profile = read_profile(path)
    span = find_spans(profile)[0]
    if span.name != STEP:
        raise TraceError(f"the annotation {STEP!r} is missing", file=path, fix="capture it again")
    step = load_step(profile, span)
    if not step.operators:
        raise TraceError("the step holds no operator", file=path, fix="capture it again")
    nodes = read_nodes(folder / "execution_trace.json.gz")
    links = link_nodes(list(step.root.walk()), nodes)
    seen = observe_step(step, links)
    _check_optimizer(environment, seen.operators, path)
    warnings = [*environment.get("warnings", []), *seen.unjoined, *seen.notes, *list_doubts(step, links, nodes)]
    times = _choose_times(folder, step, warnings)
    clean = times.without_overhead(environment["step_time_s"])
    set_times(seen.operators, clean)
    profiled_s = ns_to_s(times.total_ns)
    facts = {
        "source": "capture",
        "step_time_source": "un-profiled",
        **environment,
        **stamp(torch=environment.get("torch"), seed=environment.get("seed")),
        # Under their bare names: the same profile is the same trace wherever it lies.
        "inputs": {name: digest_file(folder / name)[:16] for name in RAW_FILES if (folder / name).exists()},
        "profiled_step_s": profiled_s,
        "profiler_overhead": profiled_s / environment["step_time_s"] - 1,
        "repeats": _measure_repeats(times, seen.operators),
        "tail_s": ns_to_s(clean.tail_ns),
        "operators_without_tensors": seen.without_tensors,
        "unjoined": seen.unjoined,
        "warnings": warnings,
        **coverage_of(step),
    }
    file = folder / "execution_trace.json.gz"
    return assemble_trace(seen.operators, facts, ready=seen.ready, file=file)


def _read_environment(file: Path) -> dict[str, Any]:
    """Read the capture's own description, checked as far as merging relies on it."""
    environment = read_json(file, TraceError)
    if not isinstance(environment, dict):
        raise TraceError("not a JSON object", file=file, fix="capture it again")
    check_facts(environment, file)
    times = environment.get("step_times_s")
    if times is not None:
        usable = times and min(times) > 0
        if not usable or not isclose(median(times), environment["step_time_s"]):
            raise TraceError(
                f"{environment['step_time_s']} s is not the median of step_times_s",
                file=file,
                place="step_time_s",
                fix="capture it again",
            )
    return environment


def _check_optimizer(environment: Mapping[str, Any], operators: Sequence[ObservedOperator], path: Path) -> None:
    """Refuse a step whose updates are said to be there and are not annotated, or the reverse."""
    said = environment.get("optimizer", "none") != "none"
    if said != any(one.phase == "optimizer" for one in operators):
        raise TraceError(
            f"the environment names the optimizer {environment.get('optimizer')!r} and the step"
            f" {'shows no update' if said else 'updates parameters'}",
            file=path,
            fix="capture it again",
        )


def _measure_repeats(times: StepTimes, operators: Sequence[ObservedOperator]) -> dict[str, Any] | None:
    """Return the spread of the lightly profiled steps; None where there are none."""
    if times.repeats_ns is None:
        return None
    phases, names = [one.phase for one in operators], [one.name for one in operators]
    return measure_repeats(times.repeats_ns, phases, names)


def set_times(operators: list[ObservedOperator], times: StepTimes) -> None:
    """Give operators their times, in whole nanoseconds."""
    for one, device_ns, cpu_ns in zip(operators, times.device_ns, times.cpu_ns, strict=True):
        one.device_ns, one.cpu_ns = int(device_ns), int(cpu_ns)


def _choose_times(folder: Path, step: Step, warnings: list[str]) -> StepTimes:
    """Return the median of the lightly profiled steps, or the single one where they do not fit."""
    light = folder / "kineto_steps.json.gz"
    if light.exists():
        profile = read_profile(light)
        spans = find_spans(profile)
        names = [e.name for e in step.operators]
        times = median_times((load_step(profile, span) for span in spans), names)
        if times is not None and times.steps == len(spans):
            return times
        warnings.append("the lightly profiled steps ran other operators: one profiled step is used")
    return times_of_step(step)
