"""From a raw profile to the operator and tensor tables, and whether its parts agree; `merge_trace` is the door.

An operator is an outermost ATen (or library) one; on a CPU its device time is its own and its
children's self time, the host's before it (interpreter, autograd engine) kept apart. `observe_step` makes observed
operators of a step's events.

`list_doubts` says whether a profile agrees with itself and with the execution trace of the same step. The same call
stands on host and device, in one file and the other: where accounts differ, something was lost. Each doubt is a sentence
with the number of cases and the first of them.
"""

import re
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from math import isclose
from pathlib import Path
from statistics import median
from typing import Any

from trioflow.base.columns import ABSENT
from trioflow.base.errors import TraceError
from trioflow.base.provenance import digest_file, read_json, stamp
from trioflow.base.units import format_time, ns_to_s
from trioflow.trace.assemble import ObservedOperator, ReadyGradient, assemble_trace
from trioflow.trace.facts import check_facts
from trioflow.trace.profile.events import (
    DEVICE,
    HOST,
    LAUNCHES,
    MODULE,
    PARAMETERS,
    RAW_FILES,
    STEP,
    UNSIZED,
    Event,
    Shapes,
    busy_ns,
    charge_apart,
    find_shapes,
    is_host_copy,
    is_operator,
    span_ns,
    sum_flop,
    tensors_of_event,
)
from trioflow.trace.profile.execution_trace import Links, Node, link_nodes, read_nodes
from trioflow.trace.profile.kineto import read_profile
from trioflow.trace.profile.profiler_fields import kineto_words
from trioflow.trace.profile.steps import (
    ROUNDING_NS,
    StepEvents,
    StepTimes,
    find_spans,
    load_step,
    measure_repeats,
    median_times,
    times_of_step,
)
from trioflow.trace.store import Trace, save_trace
from trioflow.trace.tensors import MadeInside, may_multiply

_NODE = re.compile(r"\wBackward\d*$")
"""Autograd's nodes, and the events that evaluate them."""


def list_doubts(step: StepEvents, links: Links | None, nodes: Sequence[Node] | None) -> list[str]:
    """Return what in one step's files contradicts the rest, a sentence each; ``links``: each event's node."""
    doubts = [*_doubt_order(step), *_doubt_device(step)]
    if links is not None and nodes is not None:
        doubts += _doubt_pair(step, links, nodes)
    return doubts


def count_rounds(step: StepEvents) -> int:
    """Return how often an unmarked step repeats itself: 1 where it shows no repetition.

    It does where its operators are the same sequence over and over, to the end, or where its
    backward passes are and operators run between them. Layers alone are not: what is
    before and after them runs once.
    """
    words = kineto_words("backward")
    calls = [(e.name, str(e.details.get("shapes"))) for e in step.operators]
    period = _period(calls)
    if period:
        return len(calls) // period
    passes = [e for e in step.root.walk() if e.name.startswith(words)]
    period = _period([e.name for e in passes])
    if not period:
        return 1
    forward = sorted(e.start_ns for e in step.operators if not any(a.name.startswith(words) for a in e.ancestors()))
    for place in range(period, len(passes), period):
        since, until = passes[place - 1].start_ns, passes[place].start_ns
        if bisect_left(forward, since) == bisect_left(forward, until):
            return 1
    return len(passes) // period


def _period(words: Sequence[Hashable]) -> int:
    """Return after how many words a sequence repeats to its end, at least once whole; 0 for never."""
    longest = [0] * len(words)  # the longest start of the sequence that ends here
    for place in range(1, len(words)):
        length = longest[place - 1]
        while length and words[place] != words[length]:
            length = longest[length - 1]
        longest[place] = length + (words[place] == words[length])
    period = len(words) - longest[-1] if words else 0
    return period if 2 * period <= len(words) else 0


def list_overlaps(operators: Iterable[Event]) -> list[str]:
    """Return a doubt where the host's outermost operators overlap in time."""
    names = [one.name for _, one in _find_overlaps(e for e in operators if e.category in HOST)]
    return _doubt(names, "operators run while another one does, on a thread of their own")


def _find_overlaps(events: Iterable[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield, for each event that begins while an earlier one runs, of these the one that ends last, and it."""
    last: Event | None = None
    for one in sorted(events, key=lambda e: (e.start_ns, e.end_ns)):
        if last is not None and one.start_ns < last.end_ns - ROUNDING_NS:
            yield last, one
        if last is None or one.end_ns > last.end_ns:
            last = one


def _doubt(names: Sequence[str], what: str) -> list[str]:
    return [f"{len(names)} {what} (first: {names[0]:.60})"] if names else []


def _doubt_order(step: StepEvents) -> list[str]:
    """Doubt operators of the forward pass after backward began, and those that overlap."""
    words, phases = kineto_words("backward"), _find_phases(step)
    bare = [
        event.name
        for event in step.root.walk()
        if _NODE.search(event.name) and not any(a.name.startswith(words) for a in (event, *event.ancestors()))
    ]
    began = phases.index("backward") if "backward" in phases else len(phases)
    events = zip(step.operators[began:], phases[began:], strict=True)
    late = [event.name for event, phase in events if phase == "forward" and event.category == "cpu_op"]
    return [
        *_doubt(late, "operators count as forward although backward began before them"),
        *_doubt(bare, "calls are named after autograd's nodes and run outside its backward pass"),
        *list_overlaps(step.operators),
    ]


def _doubt_device(step: StepEvents) -> list[str]:
    """Doubt launches without a kernel, and kernels that do not follow their launches."""
    calls = [e for e in step.root.walk() if e.category in LAUNCHES]
    kernels = [k for ks in step.launched for k in ks]
    started = {k.correlation for k in kernels}
    words = kineto_words("starts_work")
    lost = [e.name for e in calls if e.name.startswith(words) and e.correlation not in started]
    doubts = _doubt(lost, "launches have no kernel in the profile")
    doubts += _doubt([k.name for k in step.adopted], "kernels have no launch and go to the call that they name")
    if step.stray:
        doubts.append(f"{step.stray} kernels after the step have no launch: some may be the step's")
    rows = zip(step.launched, step.communicates, strict=True)
    computing = [k for ks, moves in rows if not moves for k in ks if k.category == "kernel"]
    pairs = _find_overlaps(computing)
    beside = [k.name for last, k in pairs if k.details.get("stream") != last.details.get("stream")]
    doubts += _doubt_streams(kernels, {e.correlation: e for e in calls})
    # Communication goes by names not known here.
    return doubts + _doubt(
        beside,
        "kernels start while one of another stream runs, and count as computing although they or"
        " that one may communicate",
    )


def _doubt_streams(kernels: Sequence[Event], launches: Mapping[int | None, Event]) -> list[str]:
    """Doubt kernels of one stream that overlap or do not run in the order of their launches."""
    streams: dict[str, list[tuple[Event, Event | None]]] = {}
    for kernel in sorted(kernels, key=lambda k: (k.start_ns, k.end_ns)):
        launch = None if kernel.correlation is None else launches.get(kernel.correlation)
        streams.setdefault(str(kernel.details.get("stream")), []).append((kernel, launch))
    early, swapped, overlapping = [], [], []
    for queue in streams.values():
        early += [k.name for k, by in queue if by and k.start_ns < by.start_ns - ROUNDING_NS]
        overlapping += [k.name for _, k in _find_overlaps(kernel for kernel, _ in queue)]
        for (_, first), (other, second) in pairwise(queue):
            if first is not None and second is not None and first.start_ns > second.end_ns:
                swapped.append(other.name)
    return [
        *_doubt(early, "kernels start before their launch"),
        *_doubt(swapped, "kernels of a stream run in another order than they were launched"),
        *_doubt(overlapping, "kernels start while another one of their stream runs"),
    ]


def _doubt_pair(step: StepEvents, links: Links, nodes: Sequence[Node]) -> list[str]:
    """Doubt calls that one of the two files lacks or describes otherwise."""
    # Annotations may be the profiler's own.
    calls = [e for e in step.root.walk() if e.category == "cpu_op"]
    missing = [e.name for e in calls if e not in links]
    used = {node.node_id for node in links.values()}
    numbers = [n.node_id for n in links.values()]
    first, last = (min(numbers), max(numbers)) if numbers else (0, -1)
    extra = [n.name for n in nodes if n.node_id not in used and first <= n.node_id <= last and is_operator(n.name)]
    by_id = {n.node_id: n for n in nodes}
    pairs = [(event, links[event]) for event in step.root.walk() if event in links]
    marked = [event.name for event, node in pairs if node.schema and event.category != "cpu_op"]
    shapes = [event.name for event, node in pairs if not _same_shapes(event, node)]
    numbered = [(event.name, {event.sequence_number, node.sequence_number}) for event, node in pairs]
    sequences = [name for name, known in numbered if len(known) > 1 and not known & {None, ABSENT}]
    callers = []
    for event, node in pairs:
        caller = next((links[a] for a in event.ancestors() if a in links), None)
        above = by_id.get(node.parent)
        if above is not caller and (caller is not None or (above is not None and above.record_id)):
            callers.append(event.name)
    return [
        *_doubt(missing, "calls of the profile are not in the execution trace"),
        *_doubt(extra, "operators of the execution trace are not in the profile"),
        *_doubt(marked, "operators are annotations in the profile"),
        *_doubt(shapes, "calls have other shapes in the profile than in the execution trace"),
        *_doubt(callers, "calls have another caller in the profile than in the execution trace"),
        *_doubt(sequences, "calls have another sequence number in the execution trace"),
    ]


def _same_shapes(event: Event, node: Node) -> bool:
    """Compare the shapes of single tensors that both files give; lists are not in the profile."""
    shapes, types = event.details.get("shapes"), event.details.get("types")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return True
    if any(word.startswith(("TensorList", "GenericList")) for word in types):
        return True
    ours = [tuple(shape) for shape, word in zip(shapes, types, strict=False) if word not in UNSIZED]
    return ours == [ref.shape for ref in node.inputs if ref.elem_bytes]


_GRAPH = re.compile(r"^graph_\d+_")
"""How Inductor's kernels for a processor begin: with the number of the graph that calls them."""
_ACCUMULATING = "torch::autograd::AccumulateGrad"
_ACCUMULATE = f"autograd::engine::evaluate_function: {_ACCUMULATING}"


def find_ready(step: Event, uses: list[Event], forward: list[int | None]) -> list[ReadyGradient]:
    """Return, for each gradient that autograd accumulates, the operator after which it is ready.

    Autograd hands a gradient over right after its maker; what accumulation runs makes none.
    ``forward``: what each of ``uses``, the step's outermost operators, differentiates.
    """
    makers = [i for i, joined in enumerate(forward) if joined is not None]
    starts = [uses[i].start_ns for i in makers]
    ready = []
    for event in step.walk():
        place = bisect_left(starts, event.start_ns) if event.name == _ACCUMULATE else 0
        if place:
            ready.append(ReadyGradient(makers[place - 1], _accumulated_shape(event)))
    return ready


def _accumulated_shape(event: Event) -> tuple[int, ...] | None:
    """Return the shape of the gradient that an accumulation was given, where profiled."""
    for inner in event.children:
        shapes = inner.details.get("shapes")
        if inner.name == _ACCUMULATING and isinstance(shapes, list) and shapes:
            return tuple(shapes[0])
    return None


@dataclass
class Observation:
    """What one profiled step shows."""

    operators: list[ObservedOperator]  # without times
    ready: list[ReadyGradient]  # from ``find_ready``
    without_tensors: int = 0  # operators whose tensors nothing gives
    unjoined: list[str] = field(default_factory=list)  # what could not be joined, a sentence each
    # What else the reader must know of what was read, a sentence each.
    notes: list[str] = field(default_factory=list)


def observe_step(step: StepEvents, links: Links | None) -> Observation:
    """Describe the operators of a step.

    ``step``: the loaded step. ``links``: the execution trace's node of each event; None to take
    what the profile itself holds, which is neither the identity nor the results of a tensor.
    """
    observation, numbers = Observation([], []), count(1)
    noted = (links.get(e) for e in step.root.children if e.name == PARAMETERS) if links else ()
    parameters = {ref.storage for node in noted if node is not None for ref in node.inputs}
    rows = zip(step.operators, _find_phases(step), step.launched, step.communicates, strict=True)
    for event, phase, kernels, communicates in rows:
        one = ObservedOperator(_name(event, kernels), phase, _find_module(event), kernels=len(kernels))
        one.kind = _kind(kernels, communicates)
        one.kernel_names = frozenset(kernel.name for kernel in kernels)
        joined = event.category == "cpu_op"
        if links is None and joined:
            one.inputs, one.written = tensors_of_event(event, numbers), None
            one.flop = sum_flop(event, find_shapes)
            joined = bool(one.inputs) or {"shapes", "types"} <= set(event.details)
        elif links is not None and joined:
            joined = _describe_tensors(one, event, links)
            one.inputs = [
                replace(ref, category="parameter") if ref.storage in parameters else ref for ref in one.inputs
            ]
        observation.without_tensors += not joined
        observation.operators.append(one)
    _join_backward(step.operators, observation.operators)
    observation.ready = find_ready(step.root, step.operators, [one.forward for one in observation.operators])
    observation.unjoined = _list_unjoined(step, observation.without_tensors)
    observation.notes = _list_notes(step)
    return observation


def _describe_tensors(one: ObservedOperator, event: Event, links: Links) -> bool:
    """Fill in an operator's tensors from its node; return whether it has one."""
    node = links.get(event)
    if node is None:
        return False
    one.inputs, one.outputs, one.written = node.inputs, node.outputs, node.written
    one.made = [
        MadeInside(ref, tuple(inner.inputs))
        for inner in (links.get(e) for e in event.walk_by_end() if e is not event)
        if inner is not None
        for ref in inner.outputs
    ]

    def find(call: Event) -> tuple[Shapes, Shapes] | None:
        known = links.get(call)
        if known is None:
            return None
        return ([r.shape for r in known.inputs], [r.shape for r in known.outputs])

    one.flop = sum_flop(event, find)
    return True


def _name(event: Event, kernels: Sequence[Event]) -> str:
    """Return an operator's name; of a bare launch what encloses it, or its kernel."""
    if event.category == "cpu_op":
        return event.name if "::" in event.name else f"kernel::{_GRAPH.sub('', event.name)}"
    above = next((e for e in event.ancestors() if e.category == "cpu_op"), None)
    if event.category in DEVICE:
        above = None
    if event.name.startswith(kineto_words("graph_launch")):
        return f"kernel::{event.name}"
    if above is not None and "::" not in above.name:  # a compiled kernel, such as Triton's
        return f"kernel::{above.name}"
    return f"kernel::{kernels[0].name.partition('<')[0].partition('(')[0].strip()}"


def _kind(kernels: Sequence[Event], communicates: bool) -> str:
    """Separate communication of the traced run and copies to or from the device from compute."""
    if communicates:
        return "collective"
    return "memcpy" if kernels and all(is_host_copy(k) for k in kernels) else "compute"


def _find_phases(step: StepEvents) -> list[str]:
    """Return the phase of each of a step's operators: that of its outermost annotation, else forward.

    What runs behind the last backward operator of a step with an optimizer works on gradients or weights (norms are
    clipped, a scaler checks them, means of weights move), once a step: it is the optimizer's, unless there are
    products, as in another forward pass.
    """
    words = {name: phase for phase in ("backward", "optimizer") for name in kineto_words(phase)}
    begins = tuple(words)
    phases = []
    for event in step.operators:
        names = [above.name for above in event.ancestors() if above.name.startswith(begins)]
        phases.append(next((phase for word, phase in words.items() if names and names[-1].startswith(word)), "forward"))
    behind = len(phases) - phases[::-1].index("backward") if "backward" in phases else len(phases)
    rest = [i for i in range(behind, len(phases)) if phases[i] == "forward" and not step.communicates[i]]
    if "optimizer" in phases and not any(may_multiply(step.operators[i].name) for i in rest):
        for i in rest:
            phases[i] = "optimizer"
    return phases


def _find_module(event: Event) -> str:
    """Return the module that encloses an operator.

    trioflow's annotations carry a module's dotted path; PyTorch's own ``nn.Module: Conv2d_3`` a
    class and a running number, joined here from the outside in.
    """
    native, classes = kineto_words("module")[1], []
    for above in event.ancestors():
        if above.name.startswith(MODULE):
            return above.name[len(MODULE) :]
        if above.name.startswith(native):
            classes.append(above.name[len(native) :])
    return ".".join(reversed(classes))


def _join_backward(events: Sequence[Event], operators: list[ObservedOperator]) -> None:
    """Join backward operators to their forward by autograd's sequence number.

    An operator that makes no autograd node carries the number of the next one that does; the last
    forward operator with a number is therefore its maker.
    """
    makers: dict[int, int] = {}
    for place, (one, event) in enumerate(zip(operators, events, strict=True)):
        if one.phase == "forward":
            numbers = [e.sequence_number for e in event.walk() if e.sequence_number is not None]
            for number in numbers:
                makers[number] = place
            one.sequence_number = numbers[0] if numbers else None
    for one, event in zip(operators, events, strict=True):
        if one.phase != "backward":
            continue
        for above in event.ancestors():
            joined = above.sequence_number
            if joined is not None and joined in makers:
                one.sequence_number, one.forward = joined, makers[joined]
                one.module = operators[makers[joined]].module
                break


def _list_unjoined(step: StepEvents, without_tensors: int) -> list[str]:
    """Say what could not be joined."""
    warnings = []
    for kernels, why in (
        (step.loose, "launched outside any operator"),
        (step.unjoined, "without a launch in the profile"),
    ):
        if kernels:
            time_s = ns_to_s(sum(k.end_ns - k.start_ns for k in kernels))
            warnings.append(f"{len(kernels)} device events ({format_time(time_s)}) {why}")
    if without_tensors:
        warnings.append(f"{without_tensors} of {len(step.operators)} operators have no tensors recorded")
    return warnings


def _list_notes(step: StepEvents) -> list[str]:
    """Say what of a step is left out, and what of it is communication."""
    notes = []
    if step.earlier:
        time_s = ns_to_s(sum(k.end_ns - k.start_ns for k in step.earlier))
        notes.append(
            f"{len(step.earlier)} device events ({format_time(time_s)}) were launched before the"
            " profile began: they are the step before's and left out"
        )
    if any(step.communicates):
        notes.append(_describe_communication(step))
    return notes + ([] if step.on_device else _list_fused(step))


def _list_fused(step: StepEvents) -> list[str]:
    """Say how much of a processor's compiled graphs lies in kernels that nobody names."""
    begins = kineto_words("compiled_graph")
    graphs = [event for event in step.root.walk() if event.name.startswith(begins)]
    inside = {e for graph in graphs for e in graph.walk()}
    left = sum(graph.end_ns - graph.start_ns for graph in graphs)
    left -= sum(e.end_ns - e.start_ns for e in step.operators if e in inside)
    if not graphs:
        return []
    return [
        f"{len(graphs)} graphs of torch.compile: {format_time(ns_to_s(left))} of them are no operator's but fused kernels'"
        " without a name, and count as the host's (torch._inductor.config.cpp.enable_kernel_profile = True names them)"
    ]


def _describe_communication(step: StepEvents) -> str:
    """Say how much a step of a parallel run communicates, and how much of it beside compute."""
    count = sum(step.communicates)
    text = f"{count} operators communicate: the trace is of a parallel run"
    charged = charge_apart(step.launched, step.communicates)
    apart = sum(ns for ns, moves in zip(charged, step.communicates, strict=True) if moves)
    if not apart:
        return text
    beside = sum(charged) - busy_ns(k for kernels in step.launched for k in kernels)
    return (
        f"{text} ({format_time(ns_to_s(apart))} of communication, {format_time(ns_to_s(beside))} of it beside compute)"
    )


def coverage_of(step: StepEvents) -> dict[str, Any]:
    """Return how much of the device's time operators explain.

    ``joined_share`` of events' summed time lies in operators; ``span_s``: from each operator's
    first kernel to its last [s], as a reading that counts gaps gives it.
    """
    every = [k for kernels in step.launched for k in kernels]
    missed = {*step.loose, *step.unjoined}
    total = sum(k.end_ns - k.start_ns for k in every)
    inside = sum(k.end_ns - k.start_ns for k in every if k not in missed)
    return {
        "device_events": len(every),
        "joined_share": inside / total if total else 1.0,
        "span_s": ns_to_s(sum(span_ns(kernels) for kernels in step.launched)),
        "streams": len({str(k.details.get("stream")) for k in every}),
    }


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
    optimizer = environment.get("optimizer", "none")
    if (optimizer != "none") != any(one.phase == "optimizer" for one in seen.operators):
        raise TraceError(
            f"the environment names the optimizer {environment.get('optimizer')!r} and the step"
            f" {'updates parameters' if optimizer == 'none' else 'shows no update'}",
            file=path,
            fix="capture it again",
        )
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
        "repeats": measure_repeats(
            times.repeats_ns, [one.phase for one in seen.operators], [one.name for one in seen.operators]
        ),
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


def set_times(operators: list[ObservedOperator], times: StepTimes) -> None:
    """Give operators their times, in whole nanoseconds."""
    for one, device_ns, cpu_ns in zip(operators, times.device_ns, times.cpu_ns, strict=True):
        one.device_ns, one.cpu_ns = int(device_ns), int(cpu_ns)


def _choose_times(folder: Path, step: StepEvents, warnings: list[str]) -> StepTimes:
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
