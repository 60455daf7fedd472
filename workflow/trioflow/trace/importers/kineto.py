"""A trace from a profile that somebody else took: Kineto, with or without the execution trace."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trioflow.base.columns import ABSENT
from trioflow.base.errors import TraceError
from trioflow.base.provenance import digest_file, stamp
from trioflow.base.units import format_time, ns_to_s
from trioflow.hardware.machine import is_processor, list_devices, load_device, read_name
from trioflow.trace.assemble import ObservedOperator, assemble_trace
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile.events import DEVICE, LAUNCHES, Event, busy_ns, check_types
from trioflow.trace.profile.execution_trace import Links, Node, link_nodes, read_nodes
from trioflow.trace.profile.kineto import Profile, read_profile
from trioflow.trace.profile.merge import Observation, count_rounds, coverage_of, list_doubts, observe_step, set_times
from trioflow.trace.profile.messages import describe_program, list_buckets
from trioflow.trace.profile.profiler_fields import kineto_words, load_fields, precision_of
from trioflow.trace.profile.steps import (
    BY_OPTIMIZER,
    WHOLE,
    Span,
    StepEvents,
    StepTimes,
    count_graphs,
    find_period_ns,
    find_spans,
    load_step,
    median_times,
    times_of_step,
)
from trioflow.trace.store import Trace

_UNSAID = "unknown"
_VENDORS: Mapping[str, Mapping[str, list[str]]] = load_fields()["vendors"]
"""By vendor, the words in its devices' names (``device_words``) and the prefixes of its driver's calls (``driver_calls``)."""
_TF32 = "tf32"
_SHAPELESS = (
    "the profile holds no shapes (record_shapes=True records them): only the recorded step itself can be answered for"
)
_HOST_MEMORY = 0
"""What ``[memory]`` events call a processor's memory."""
_MOST_STEPS = 30
"""Of more profiled steps, evenly spaced ones are taken."""


def import_kineto(kineto: str | Path, execution_trace: str | Path | None, options: ImportOptions) -> Trace:
    """Build a trace from PyTorch's own profile files, plain or gzipped.

    Without the ``execution_trace`` of the same run, shapes come from the profile
    (``record_shapes=True``; without them the trace has times alone); results and identities, so
    bytes written, memory and tensor splits, are then unknown, but for the peak that the profiler's
    ``[memory]`` events show (``profile_memory=True``). Raises TraceError when a file is broken, the
    two do not belong together, or a fact is neither there nor among the options.
    """
    return import_profile(read_profile(kineto), execution_trace, options)


def import_profile(profile: Profile, execution_trace: str | Path | None, options: ImportOptions) -> Trace:
    """Build a trace from a profile that was read, as `import_kineto`.

    Of several steps the one that the execution trace covers best describes the operators, the last
    of equals; times are medians over at most `_MOST_STEPS` steps that ran the same operators. Steps
    that launch CUDA graphs are left out unless most do. A step's duration includes the profiler's
    own time.
    """
    nodes = read_nodes(execution_trace) if execution_trace is not None else None
    every = find_spans(profile)
    spans, graphs = _leave_graphs(profile, every)
    step, links = _choose_step(profile, spans, nodes)
    _check_tensors(step, links, nodes, profile, execution_trace)
    seen = observe_step(step, links)
    _check_marks(profile, spans, step, seen)
    sample = spans[:: -(-len(spans) // _MOST_STEPS)]
    times = _find_times(profile, sample, step)
    set_times(seen.operators, times)
    first_call = _find_first_call(step, times)
    shaped = nodes is not None or any("shapes" in e.details for e in step.operators)
    warnings = [] if shaped else [_SHAPELESS]
    warnings += [*graphs, *_list_warnings(seen, sample, times, nodes is None, first_call)]
    warnings += list_doubts(step, links, nodes)
    following = spans if len(spans) == len(every) else []
    step_ns, step_time_source = _find_step_time(profile, following, step, times)
    program = describe_program(profile.header, step, seen.operators)
    files = [profile.path, *([] if execution_trace is None else [execution_trace])]
    facts = {
        **stamp(),
        "workload": options.workload or profile.path.name.partition(".")[0],
        "batch": int(options.need("batch", profile.path, _find_batch(seen.operators))),
        "device": "cuda" if step.on_device else "cpu",
        "device_name": _name_device(profile, step, options),
        "precision": str(options.need("precision", profile.path, _find_precision(step, seen.operators))),
        "optimizer": options.optimizer or _find_optimizer(step),
        "operators_without_tensors": seen.without_tensors,
        "unjoined": seen.unjoined,
        **coverage_of(step),
        "source": "Kineto" if nodes is None else "Kineto and execution trace",
        "step_time_s": ns_to_s(step_ns),
        "step_time_source": step_time_source,
        "profiled_step_s": ns_to_s(times.total_ns),
        "profiled_steps": times.steps,
        "tail_s": ns_to_s(times.tail_ns),
        "inputs": {file.name: digest_file(file)[:16] for file in map(Path, files) if file.is_file()},
        "first_call_s": first_call and ns_to_s(first_call.end_ns - first_call.start_ns),
        "recorded_memory": _find_recorded_memory(profile, step) if nodes is None else None,
        "warnings": warnings,
        **program,
    }
    if not shaped:
        facts["gradients"] = list_buckets(program, seen.operators)
    return assemble_trace(seen.operators, facts, ready=seen.ready, file=files[-1])


def _leave_graphs(profile: Profile, spans: list[Span]) -> tuple[list[Span], list[str]]:
    """Return the steps without CUDA graphs unless they are fewer, and what to say of graphs."""
    counts = count_graphs(profile, spans)
    plain = [span for span, count in zip(spans, counts, strict=True) if not count]
    if len(plain) == len(spans):
        return spans, []
    text = f"CUDA graphs are launched {sum(counts)} times in {len(spans) - len(plain)} of {len(spans)} steps"
    if 2 * len(plain) >= len(spans):
        return plain, [f"{text}: these steps are left out"]
    return spans, [f"{text}: each is one operator, and what it holds has no shapes"]


def _find_first_call(step: StepEvents, times: StepTimes) -> Event | None:
    """Return the driver's call that takes most of the only step, as the first one does, which initialises; else None."""
    waiting = kineto_words("waiting")
    calls = [e for e in step.root.walk() if e.category in LAUNCHES and not e.name.startswith(waiting)]
    longest = max(calls, key=lambda e: e.end_ns - e.start_ns, default=None)
    if longest is None or times.steps > 1:
        return None
    return longest if 2 * (longest.end_ns - longest.start_ns) > times.total_ns else None


def _find_recorded_memory(profile: Profile, step: StepEvents) -> dict[str, Any] | None:
    """Return the most that the device's allocator held in a step [bytes], as the profiler's ``[memory]`` events say."""
    if not step.on_device:
        return None
    events = np.array(profile.memory, dtype=np.int64).reshape(-1, 5)
    events = events[np.argsort(events[:, 0], kind="stable")]
    stamps, kinds, numbers, _, _ = events.T
    events = events[(kinds != _HOST_MEMORY) & (numbers == _device_of(step)) & (stamps < step.root.end_ns)]
    before = int(np.searchsorted(events[:, 0], step.root.start_ns))
    allocated, reserved = events[max(before - 1, 0) :, 3:].T
    if not len(allocated):
        return None
    return {"peak_bytes": int(allocated.max()), "reserved_bytes": int(reserved.max())}


def _find_times(profile: Profile, sample: Sequence[Span], step: StepEvents) -> StepTimes:
    """Return medians over the steps that ran what the described one did; at least its own times."""
    names, calls = [e.name for e in step.operators], _calls(step)
    alike = (one for span in sample if _calls(one := load_step(profile, span)) == calls)
    return median_times(alike, names) or times_of_step(step)


def _calls(step: StepEvents) -> list[Any]:
    """Return the shapes of a step's operators, where known, and which launched kernels (with time, unless they were lost)."""
    rows = zip(step.operators, step.launched, strict=True)
    return [(e.details.get("shapes"), bool(kernels)) for e, kernels in rows]


def _choose_step(
    profile: Profile, spans: Sequence[Span], nodes: Sequence[Node] | None
) -> tuple[StepEvents, Links | None]:
    """Return the step to describe, with its links to the execution trace."""
    chosen = spans[-1]
    if nodes is not None and len(spans) > 1:
        counts = [_count_joined(profile, span, nodes) for span in spans]
        chosen = spans[max(range(len(spans)), key=lambda i: (counts[i], i))]
    step = load_step(profile, chosen)
    if not step.operators:
        raise TraceError("the step holds no operator", file=profile.path, fix="capture it again")
    if nodes is None:
        return step, None
    return step, link_nodes(list(step.root.walk()), nodes)


def _count_joined(profile: Profile, span: Span, nodes: Sequence[Node]) -> int:
    """Return how many calls of a step the execution trace may hold too."""
    rows = profile.rows_between(span.start_ns, span.end_ns)
    records = profile.columns["record_id"][rows]
    if (records != ABSENT).any():
        return int(np.isin(records, [n.record_id for n in nodes if n.record_id]).sum())
    step = load_step(profile, span)  # a version that numbers calls otherwise
    return len(link_nodes(list(step.root.walk()), nodes))


def _check_tensors(
    step: StepEvents,
    links: Links | None,
    nodes: Sequence[Node] | None,
    profile: Profile,
    execution_trace: str | Path | None,
) -> None:
    """Refuse files that do not belong together, or mix devices."""
    if links is None or nodes is None:
        check_types(step.root.walk(), profile.path)
        return
    joined = sum(1 for e in step.operators if e in links)
    calls = sum(1 for e in step.operators if e.category == "cpu_op")
    if joined < calls / 2:
        raise TraceError(
            f"only {joined} of {calls} operators of {profile.path.name} are in it: the files are of different runs",
            file=execution_trace,
            fix="give the execution trace of the same step",
        )
    devices = {d for n in links.values() for d in n.devices} - {"", "cpu", "meta"}
    if len(devices) > 1:
        raise TraceError(
            f"tensors lie on the devices {', '.join(sorted(devices))}",
            file=execution_trace,
            fix="capture a step on one device",
        )
    if devices and not step.on_device:
        raise TraceError(
            f"tensors lie on {devices.pop()} and no kernel is recorded: no GPU events",
            file=profile.path,
            fix="profile with ProfilerActivity.CUDA among the activities",
        )


def _check_marks(profile: Profile, spans: Sequence[Span], step: StepEvents, seen: Observation) -> None:
    """Say how a profile without marked steps is taken; refuse one that repeats itself."""
    if spans[0].name.startswith(BY_OPTIMIZER):
        seen.notes.append("the profile marks no step: one lasts from optimizer step to optimizer step")
    if spans[0].name != WHOLE:
        return
    seen.notes.append("the profile marks no step: all of it is taken as one")
    rounds = count_rounds(step)
    updates = sum(e.name.startswith(kineto_words("optimizer_step")) for e in step.root.walk())
    if rounds > 1 and not updates:
        raise TraceError(
            f"the profile marks no step and repeats the same calls {rounds} times: it holds several steps",
            file=profile.path,
            fix="profile with torch.profiler.schedule and call step(), or profile one step alone",
        )


def _find_step_time(profile: Profile, spans: Sequence[Span], step: StepEvents, times: StepTimes) -> tuple[float, str]:
    """Return how long a step takes [ns], and by which clock (a key of ``STEP_TIME_SOURCES``).

    The host's annotation gives it unless the device runs behind: then the time between two steps'
    ends on the device does, or, of a single step, the time that the device was busy.
    """
    period_ns = find_period_ns(profile, spans)
    if period_ns is not None and period_ns > times.total_ns:
        return period_ns, "device period"
    busy = float(busy_ns(kernel for kernels in step.launched for kernel in kernels))
    return (busy, "busy") if busy > times.total_ns else (times.total_ns, "profiled")


def _find_batch(operators: Sequence[ObservedOperator]) -> int | None:
    """Return the samples of an image batch that the step begins with; None for anything else."""
    first = next((one.inputs for one in operators if one.inputs and one.kind == "compute"), [])
    return first[0].shape[0] if first and len(first[0].shape) == 4 else None


def _find_precision(step: StepEvents, operators: Sequence[ObservedOperator]) -> str | None:
    """Return the precision of the operators that do most of the work.

    Kernels that use TF32 carry it in their names; without such a name fp32 and tf32 look alike, and
    None is returned.
    """
    work: dict[str, int] = {}
    for one in operators:
        if one.flop and one.inputs:
            word = precision_of(one.inputs[0].dtype)
            if word is not None:
                work[word] = work.get(word, 0) + one.flop
    precision = max(work, key=lambda word: work[word]) if work else ""
    if not precision and any(_TF32 in k.name.lower() for ks in step.launched for k in ks):
        return _TF32
    return precision or None


def _find_optimizer(step: StepEvents) -> str:
    """Return the optimizer's name as its annotation gives it; ``none`` without one."""
    prefix = kineto_words("optimizer_step")[0]
    for event in step.root.walk():
        if event.name.startswith(prefix):
            return event.name[len(prefix) :].partition(".")[0].lower() or _UNSAID
    return "none"


def _list_warnings(
    seen: Observation, spans: Sequence[Span], times: StepTimes, alone: bool, first_call: Event | None
) -> list[str]:
    """Return what the reader of a prediction must know."""
    warnings = [*seen.unjoined, *seen.notes]
    if times.steps < len(spans):
        warnings.append(
            f"{len(spans) - times.steps} of {len(spans)} steps ran other operators, shapes or kernels:"
            " what a step does may depend on its data"
        )
    if first_call is not None:
        call_s = ns_to_s(first_call.end_ns - first_call.start_ns)
        warnings.append(
            f"one call, {first_call.name}, takes {format_time(call_s)} of the step's {format_time(ns_to_s(times.total_ns))}: "
            "the device's initialisation by the looks of it, which other steps do not have; profile a later step"
        )
    if alone:
        warnings.append("no execution trace: bytes written and activations' memory are unknown")
    return warnings


def _name_device(profile: Profile, step: StepEvents, options: ImportOptions) -> str:
    """Return the name of the device that a step ran on, from the file and the options.

    Devices without the kernels' number (ROCm counts processors too) are it where all have one name;
    a name that many chips share counts as none. Raises TraceError when the device's events are of
    another kind or missing, or ``--gpu`` contradicts the file.
    """
    if profile.foreign:
        word, number = max(profile.foreign.items(), key=lambda item: item[1])
        raise TraceError(
            f"the profile is of a device that trioflow does not read ({number} events of the category {word})",
            file=profile.path,
            fix="give a profile of a GPU, or of a run on the processor alone",
        )
    if not step.on_device:
        _check_processor(profile, options)
        return str(options.need("gpu", profile.path))
    device = _listed_name(profile, step)
    if options.gpu is None:
        return str(options.need("gpu", profile.path, device))
    if device is None or device in kineto_words("shared_device_name"):
        _check_vendor(profile, device, options.gpu)
        return options.gpu
    if read_name(device).fits(read_name(options.gpu)):
        return device
    return str(options.need("gpu", profile.path, device))


def _device_of(step: StepEvents) -> Any:
    """Return the number of the device that a step ran on."""
    return next(k.details.get("device", 0) for ks in step.launched for k in ks)


def _listed_name(profile: Profile, step: StepEvents) -> str | None:
    """Return the device's name in the file's header; None where there is none."""
    listed = profile.header.get(kineto_words("devices")[0])
    named = [
        (properties.get("id"), properties["name"])
        for properties in (listed if isinstance(listed, list) else [])
        if isinstance(properties, dict) and isinstance(properties.get("name"), str)
    ]
    names = {name for _, name in named}
    own = [name for number, name in named if number == _device_of(step)]
    return own[-1] if own else (names.pop() if len(names) == 1 else None)


def _check_processor(profile: Profile, options: ImportOptions) -> None:
    """Refuse a run on an accelerator without its device events, whatever ``--gpu`` says."""
    words = kineto_words("accelerator_call")
    sign = next((name for name in profile.names if name.startswith(words)), None)
    if profile.is_category(*DEVICE).any():
        sign = sign or "kernels of other steps"
    if sign is not None:
        raise TraceError(
            f"the run used an accelerator ({sign}) and its device events are not in the profile",
            file=profile.path,
            fix="profile with ProfilerActivity.CUDA among the activities",
        )
    if options.gpu is not None and _is_gpu(options.gpu):
        raise TraceError(
            f"--gpu names the GPU {options.gpu} and the profile holds no device event: the step ran on a processor",
            file=profile.path,
            fix="name the processor, or profile with ProfilerActivity.CUDA among the activities",
        )


def _is_gpu(name: str) -> bool:
    """Return whether a name is a GPU's: of a product with a sheet, or with a vendor's word for GPUs."""
    sheets = (load_device(device) for device in list_devices())
    products = {read_name(one).product for sheet in sheets for one in sheet.driver_names}
    return read_name(name).product in products or _vendor_of(name) is not None


def _check_vendor(profile: Profile, recorded: str | None, given: str) -> None:
    """Refuse a processor, and a GPU of another vendor than the file's device or driver calls."""
    launched = profile.is_category(*LAUNCHES)
    calls = [profile.names[code] for code in set(profile.columns["name"][launched].tolist())]
    seen = _vendor_of(recorded or "") or _vendor_of_calls(calls)
    named = "a processor" if is_processor(given) else _vendor_of(given)
    if seen is not None and named is not None and seen != named:
        raise TraceError(
            f"the profile is of a device of {seen}, --gpu says {given}",
            file=profile.path,
            fix="leave --gpu out or correct it",
        )


def _vendor_of(name: str) -> str | None:
    """Return whose GPU goes by a name; None where no word says."""
    parts = re.split("[-_ ]+", name.lower())
    words = _VENDORS["device_words"].items()
    return next((vendor for vendor, begins in words if any(part.startswith(tuple(begins)) for part in parts)), None)


def _vendor_of_calls(names: Iterable[str]) -> str | None:
    """Return whose driver some calls are of; None where they are of several, or of none known."""
    prefixes = {v: tuple(words) for v, words in _VENDORS["driver_calls"].items()}
    vendors = {v for name in names for v, words in prefixes.items() if name.startswith(words)}
    return vendors.pop() if len(vendors) == 1 else None
