"""Merging a raw profile into the operator and tensor tables.

An operator is an outermost ATen (or library) operator: one that no other
operator encloses. Its device time on a CPU is its own and its children's self
time; the host time before it (interpreter, autograd engine) is kept apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.errors import TraceError
from trioflow.provenance import digest_file, read_json, stamp
from trioflow.trace.execution_trace import Node, read_nodes
from trioflow.trace.flops import count_flop
from trioflow.trace.gradients import join_gradients, own_optimizer_operators
from trioflow.trace.kernels import index_kernels, kernels_of
from trioflow.trace.kineto import (
    DEVICE,
    MODULE,
    Event,
    find_steps,
    is_operator,
    nest,
    outermost_operators,
    read_events,
)  # fmt: skip
from trioflow.trace.store import REQUIRED_FACTS, Trace, check_facts, save_trace
from trioflow.trace.tensors import OperatorTensors, TensorTracker
from trioflow.trace.timing import StepTimes, median_step_times, times_of_step
from trioflow.units import ns_to_s

RAW_FILES = (
    "kineto.json.gz",
    "execution_trace.json.gz",
    "environment.json",
    "kineto_steps.json.gz",
)
_EVALUATE = "autograd::engine::evaluate_function"


def merge_trace_folder(source: str | Path, target: str | Path) -> None:
    """Merge the raw profile in one folder into a trace in another.

    Raises
    ------
    TraceError
        When a raw file is missing, broken or does not fit the others.
    """
    save_trace(merge_trace(source), target)


def merge_trace(folder: str | Path) -> Trace:
    """Merge the profile, the execution trace and the environment of one captured step.

    ``kineto_steps.json.gz``, where present, gives the median times of several
    lightly profiled steps in place of the single step's.

    Raises
    ------
    TraceError
        When a raw file is missing, broken or does not fit the others.
    """
    folder = Path(folder)
    environment = read_json(folder / "environment.json")
    path = folder / "kineto.json.gz"
    events = read_events(path)
    nest(events)
    step = find_steps(events, path)[0]
    uses = outermost_operators(step)
    if not uses:
        raise TraceError("the step holds no operator", file=path, fix="capture it again")
    nodes = {n.record_id: n for n in read_nodes(folder / "execution_trace.json.gz")}
    _check_environment(environment, folder / "environment.json")
    rows, tracker, unjoined = _describe(uses, nodes, int(environment["batch"]))
    warnings = list(environment.get("warnings", []))
    if unjoined:
        warnings.append(f"{unjoined} of {len(uses)} operators are not in the execution trace")
    kernels = index_kernels(e for e in events if e.category in DEVICE)
    for row, use in zip(rows, uses, strict=True):
        row["kernels"] = len(kernels_of(use, kernels))
    times = _choose_times(folder, [e.name for e in uses], times_of_step(step, kernels), warnings)
    _place(rows, times.without_overhead(environment["step_time_s"]))
    gradients = join_gradients(step, uses, rows, tracker, environment.get("parameters", []))
    known = len(environment.get("parameters", []))
    if len(gradients) < known:
        warnings.append(f"{known - len(gradients)} of {known} parameters have no gradient here")
    own_optimizer_operators(rows, tracker, gradients)
    frame = pd.DataFrame(rows, columns=tables.OPERATORS.names)
    for column in ("batch_dim", "sequence_number", "forward_op_id"):
        frame[column] = frame[column].astype("Int64")
    profiled_s = ns_to_s(times.total_ns)
    facts = {
        **environment,
        **stamp(
            torch=environment.get("torch"),
            seed=environment.get("seed"),
        ),
        # Under their bare names: the same profile is the same trace wherever it lies.
        "inputs": {
            name: digest_file(folder / name)[:16] for name in RAW_FILES if (folder / name).exists()
        },
        "profiled_step_s": profiled_s,
        "profiler_overhead": profiled_s / environment["step_time_s"] - 1,
        "tail_s": ns_to_s(times.without_overhead(environment["step_time_s"]).tail_ns),
        "gradients": gradients,
        "operators": len(rows),
        "operators_without_tensors": unjoined,
        "backward_operators_joined": int(frame["forward_op_id"].notna().sum()),
        "flop": int(frame["flop"].sum()),
        "warnings": warnings,
    }
    return Trace(frame, tracker.table(_owners(rows, tracker)), facts)


def _check_environment(environment: Any, path: Path) -> None:
    """Check the facts that merging and every later stage rely on."""
    if not isinstance(environment, dict):
        raise TraceError("not a JSON object", file=path)
    for name in REQUIRED_FACTS:
        if name not in environment:
            raise TraceError(f"the fact {name!r} is missing", file=path, fix="capture it again")
    check_facts(environment, path)


def _choose_times(
    folder: Path, names: list[str], single: StepTimes, warnings: list[str]
) -> StepTimes:
    """Return the median of the lightly profiled steps, or the single one where they do not fit."""
    light = folder / "kineto_steps.json.gz"
    if light.exists():
        times = median_step_times(light, names)
        if times is not None:
            return times
        warnings.append("the lightly profiled steps ran other operators: one profiled step is used")
    return single


def _place(rows: list[dict[str, Any]], times: StepTimes) -> None:
    """Write the times into the rows and lay the operators end to end."""
    now = 0
    for row, device_ns, cpu_ns in zip(rows, times.device_ns, times.cpu_ns, strict=True):
        row["device_ns"], row["cpu_ns"] = int(device_ns), int(cpu_ns)
        now += row["cpu_ns"]
        row["start_ns"] = now
        now += row["device_ns"]


def _describe(
    uses: list[Event], nodes: dict[int, Node], batch: int
) -> tuple[list[dict[str, Any]], TensorTracker, int]:
    """Return one row an operator, its tensors, and how many operators had none recorded."""
    tracker, unjoined = TensorTracker(), 0
    rows: list[dict[str, Any]] = []
    for op_id, event in enumerate(uses):
        node = nodes.get(event.record_id) if event.record_id is not None else None
        unjoined += node is None
        phase, module = _place_in_model(event)
        inside = (nodes.get(e.record_id) for e in event.walk() if e.record_id is not None)
        made = [ref for inner in inside if inner is not None for ref in inner.outputs]
        tracker.visit(
            event.name, phase, node.inputs if node else [], node.outputs if node else [], made
        )
        rows.append(
            {"op_id": op_id, "name": event.name, "phase": phase, "module": module, "kernels": 0}
        )
    _join_backward(uses, rows)
    tracker.classify(batch)
    for row, event, use in zip(rows, uses, tracker.uses, strict=True):
        row.update(_work(event, nodes, use, tracker, batch))
    return rows, tracker, unjoined


def _place_in_model(event: Event) -> tuple[str, str]:
    """Return the phase and the innermost module that enclose an operator."""
    phase, module = "forward", ""
    for above in event.ancestors():
        if above.name.startswith(MODULE) and not module:
            module = above.name[len(MODULE) :]
        if above.name.startswith(_EVALUATE):
            phase = "backward"
        elif above.name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
            phase = "optimizer"
    return phase, module


def _join_backward(uses: list[Event], rows: list[dict[str, Any]]) -> None:
    """Join backward operators to their forward by autograd's sequence number.

    An operator that makes no autograd node carries the number of the next one
    that does; the last forward operator with a number is therefore its maker.
    """
    makers: dict[int, int] = {}
    for row, event in zip(rows, uses, strict=True):
        row["sequence_number"], row["forward_op_id"] = None, None
        if row["phase"] == "forward":
            numbers = [e.sequence_number for e in event.walk() if e.sequence_number is not None]
            for number in numbers:
                makers[number] = row["op_id"]
            row["sequence_number"] = numbers[0] if numbers else None
    for row, event in zip(rows, uses, strict=True):
        if row["phase"] != "backward":
            continue
        for above in event.ancestors():
            if above.sequence_number is not None and above.sequence_number in makers:
                row["sequence_number"] = above.sequence_number
                row["forward_op_id"] = makers[above.sequence_number]
                row["module"] = rows[row["forward_op_id"]]["module"]
                break


def _work(
    event: Event, nodes: dict[int, Node], use: OperatorTensors, tracker: TensorTracker, batch: int
) -> dict[str, Any]:
    """Return an operator's FLOPs, bytes, shapes and what of them grows with the batch."""
    flop = _count(event, nodes)
    view = bool(use.outputs) and all(use.aliases) and not use.in_place
    moved_in, moved_out = ([], []) if view else (use.inputs, use.outputs)
    if use.in_place and not use.outputs:
        moved_out = use.inputs[:1]
    grows = use.phase != "optimizer" and any(tracker.scales(i) for i in use.inputs)
    shapes = [list(tracker.tensors[i].shape) for i in use.outputs]
    first = tracker.tensors[(use.inputs or use.outputs)[0]] if use.inputs or use.outputs else None
    batch_dim = None
    if use.outputs and tracker.scales(use.outputs[0]):
        batch_dim = next((d for d, size in enumerate(shapes[0]) if size % batch == 0), None)
    return {
        "flop": flop,
        "read_bytes": sum(tracker.size_bytes(i) for i in moved_in),
        "write_bytes": sum(tracker.size_bytes(i) for i in moved_out),
        "batch_flop": flop if grows else 0,
        "batch_read_bytes": sum(tracker.size_bytes(i) for i in moved_in if tracker.scales(i)),
        "batch_write_bytes": sum(tracker.size_bytes(i) for i in moved_out if tracker.scales(i)),
        "input_ids": use.inputs,
        "output_ids": use.outputs,
        "input_shapes": [list(tracker.tensors[i].shape) for i in use.inputs],
        "output_shapes": shapes,
        "dtype": first.dtype if first else "",
        "batch_dim": batch_dim,
    }


def _count(event: Event, nodes: dict[int, Node]) -> int:
    """Return the FLOPs of the outermost events that a formula knows."""
    if is_operator(event.name):
        node = nodes.get(event.record_id) if event.record_id is not None else None
        if node is not None:
            flop = count_flop(
                event.name, [ref.shape for ref in node.inputs], [ref.shape for ref in node.outputs]
            )
            if flop is not None:
                return flop
    return sum(_count(child, nodes) for child in event.children)


def _owners(rows: list[dict[str, Any]], tracker: TensorTracker) -> dict[int, str]:
    """Return the module of each parameter (its reader's) and of each activation (its maker's)."""
    owners: dict[int, str] = {}
    for row in rows:
        if row["phase"] == "forward":
            for index in (*row["input_ids"], *row["output_ids"]):
                kept = (
                    tracker.category(index) in ("parameter", "buffer") or index in row["output_ids"]
                )
                if kept and row["module"]:
                    owners.setdefault(index, row["module"])
    return owners
