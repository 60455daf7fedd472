"""From observed operators, the profiler's or another tool's, to a trace: identities, work, what grows with the batch.

`assemble_trace` is the door, where all sources of traces end. `join_gradients` says which parameter each gradient
belongs to, and in which order gradients become ready.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from trioflow import tables
from trioflow.trace.facts import Facts, check_facts
from trioflow.trace.store import Trace, check_trace, lay_end_to_end
from trioflow.trace.tensors import MadeInside, OperatorTensors, TensorRef, TensorTracker, count_flop, may_multiply

_CAST = "aten::to"
_MAY_LACK = tables.NULLABLE["operators"]


class ReadyGradient(NamedTuple):
    """A gradient as autograd hands it over: the operator that made it, and its shape if known."""

    op_id: int
    shape: tuple[int, ...] | None = None


def join_gradients(
    rows: list[dict[str, Any]],
    tracker: TensorTracker,
    parameters: list[dict[str, Any]],
    ready: Sequence[ReadyGradient] | None = None,
) -> list[dict[str, Any]]:
    """Return one entry a parameter, in the order in which its gradient became ready.

    ``parameters`` in the model's order, perhaps none; ``ready``: from `find_ready`, or None to try
    every backward operator. ``index``: place in the model's order, or -1; ``gradient_storage_id``:
    -1 where the operator does not return it.
    """
    free = {i: (str(p["name"]), tuple(p["shape"])) for i, p in enumerate(parameters) if not p.get("frozen")}
    taken: set[int] = set()
    entries: list[dict[str, Any]] = []
    for op_id, shape in _candidates(rows, tracker) if ready is None else ready:
        parameter = _find_parameter(op_id, shape, rows, tracker, taken)
        if parameter is None:
            continue
        tensor = tracker.tensors[parameter]
        made = _find_gradient(rows, op_id, tracker, tensor.shape, taken)
        taken |= {tensor.storage, made}
        module = rows[rows[op_id]["forward_op_id"]]["module"]
        index = _match_name(free, module, tensor.shape)
        entries.append(
            {
                "name": free.pop(index)[0] if index is not None else f"{module or 'parameter'}.{len(entries)}",
                "module": module,
                "index": -1 if index is None else index,
                "size_bytes": prod(tensor.shape) * tensor.elem_bytes,
                "ready_after_op_id": op_id,
                "parameter_storage_id": tensor.storage,
                "gradient_storage_id": made,
            }
        )
    return entries


def _candidates(rows: list[dict[str, Any]], tracker: TensorTracker) -> list[ReadyGradient]:
    """Return every backward operator as often as its forward operator reads a parameter."""
    return [
        ReadyGradient(row["op_id"])
        for row in rows
        if row["phase"] == "backward" and row["forward_op_id"] is not None
        for index in set(rows[row["forward_op_id"]]["input_ids"])
        if tracker.category(index) == "parameter"
    ]


def _find_parameter(
    op_id: int, shape: tuple[int, ...] | None, rows: list[dict[str, Any]], tracker: TensorTracker, taken: set[int]
) -> int | None:
    """Return the parameter whose gradient the operators up to `op_id` have just made."""
    if op_id < 0 or rows[op_id]["forward_op_id"] is None:
        return None
    forward = rows[rows[op_id]["forward_op_id"]]
    made = {tuple(s) for s in rows[op_id]["output_shapes"]} if shape is None else {shape}
    candidates = _untaken(forward["input_ids"], tracker, taken)
    # A frozen weight may be as large as a trained bias: the optimizer updates the one of them.
    candidates.sort(key=lambda i: not tracker.storages[tracker.tensors[i].storage].updated_in)
    exact = [i for i in candidates if tracker.tensors[i].shape in made]
    if shape and not exact:  # A sum hands its gradient on as it is, without an operator: (1 + weight) of Gemma's norms
        sums = [row for row in rows[: forward["op_id"]] if not {*row["output_ids"]}.isdisjoint(forward["input_ids"])]
        read = [i for row in sums for i in _untaken(row["input_ids"], tracker, taken)]
        exact = [i for i in read if tracker.tensors[i].shape == shape]
    chosen = exact or candidates
    return chosen[0] if chosen else None


def _untaken(ids: Sequence[int], tracker: TensorTracker, taken: set[int]) -> list[int]:
    """Return those tensors that are parameters without a gradient yet."""
    return [i for i in ids if tracker.category(i) == "parameter" and tracker.tensors[i].storage not in taken]


def _find_gradient(
    rows: list[dict[str, Any]], op_id: int, tracker: TensorTracker, shape: tuple[int, ...], taken: set[int]
) -> int:
    """Return the storage of the first result of that shape that is not another gradient.

    Gradients that are kept in another format than they were made in are cast one after the other
    before the first of them is handed over.
    """
    first = op_id
    while rows[op_id]["name"] == _CAST == rows[first - 1]["name"]:
        first -= 1
    for index in (i for row in rows[first : op_id + 1] for i in row["output_ids"]):
        tensor = tracker.tensors[index]
        if tensor.shape == shape and tensor.storage not in taken:
            return int(tensor.storage)
    return -1


def own_optimizer_operators(
    rows: list[dict[str, Any]], tracker: TensorTracker, gradients: list[dict[str, Any]]
) -> None:
    """Write into each optimizer operator's row the module of the parameter that it updates.

    State tensors are recognised by the operators that mix them with a parameter or a gradient; an
    operator over several modules keeps none.
    """
    owner = {entry["parameter_storage_id"]: entry["module"] for entry in gradients}
    owner |= {entry["gradient_storage_id"]: entry["module"] for entry in gradients}
    owner.pop(-1, None)
    updates = [row for row in rows if row["phase"] == "optimizer"]
    for _ in range(2):  # the second pass knows the states that the first one met late
        for row in updates:
            used = (tracker.tensors[i] for i in (*row["input_ids"], *row["output_ids"]))
            # Step counts and wrapped numbers belong to no parameter.
            storages = {tensor.storage for tensor in used if tensor.shape != ()}
            modules = {owner[s] for s in storages if s in owner}
            if len(modules) == 1:
                row["module"] = modules.pop()
                for storage in storages:
                    owner.setdefault(storage, row["module"])


def _match_name(free: dict[int, tuple[str, tuple[int, ...]]], module: str, shape: tuple[int, ...]) -> int | None:
    """Return the index of the unassigned parameter of that module and shape."""
    own = [i for i, (name, size) in free.items() if size == shape and name.rpartition(".")[0] == module]
    below = [i for i, (name, size) in free.items() if size == shape and name.startswith(f"{module}.")]
    chosen = own or below
    return chosen[0] if chosen else None


@dataclass
class ObservedOperator:
    """One outermost operator of a step as a source describes it."""

    # name, phase, module: as in ``tables.OPERATORS``; the phase is forward, backward or optimizer.
    name: str
    phase: str
    module: str = ""
    # ``compute``, ``memcpy`` for a copy to or from the device, or ``collective`` for communication
    # of the run that was traced.
    kind: str = "compute"
    # inputs, outputs: its tensors, with the source's own ids; ids may be reused once memory is
    # freed.
    inputs: list[TensorRef] = field(default_factory=list)
    outputs: list[TensorRef] = field(default_factory=list)
    # Results of the operators that it encloses, with what they were made from.
    made: list[MadeInside] = field(default_factory=list)
    # Arguments that it writes in place; None where only its name shows it.
    written: frozenset[int] | None = None
    flop: int | None = None  # operations; None to count them from the name and the shapes
    # kernels, device_ns, cpu_ns: as in ``tables.OPERATORS``.
    kernels: int = 0
    device_ns: int = 0
    cpu_ns: int = 0
    kernel_names: frozenset[str] = frozenset()  # names of its kernels, where the source has them
    # sequence_number, forward: autograd's number, and the place of the forward operator that it
    # differentiates.
    sequence_number: int | None = None
    forward: int | None = None


def assemble_trace(
    operators: Sequence[ObservedOperator],
    facts: Mapping[str, Any],
    *,
    ready: Sequence[ReadyGradient] | None = None,
    file: str | Path | None = None,
) -> Trace:
    """Build a trace from the outermost operators of one step, in order of start.

    ``parameters`` (name, shape, elem_bytes in the model's order) names gradients; ``ready``: these
    in the order in which they become ready; None takes every backward operator of a forward one
    with parameters. ``file``: what the operators were read from, for messages: the trace is checked
    then. Raises TraceError when a fact that every later stage needs is missing or impossible, or the
    trace contradicts itself.
    """
    check_facts(facts)
    batch, tracker = int(facts["batch"]), TensorTracker()
    for one in operators:
        tracker.visit(one.name, one.phase, one.inputs, one.outputs, one.made, one.written)
    tracker.classify(batch)
    rows = [
        _describe(op_id, one, use, tracker, batch)
        for op_id, (one, use) in enumerate(zip(operators, tracker.uses, strict=True))
    ]
    gradients = join_gradients(rows, tracker, facts.get("parameters", []), ready)
    own_optimizer_operators(rows, tracker, gradients)
    frame = pd.DataFrame(rows, columns=tables.OPERATORS.names).astype(dict.fromkeys(_MAY_LACK, "Int64"))
    lay_end_to_end(frame)
    known = sum(not entry.get("frozen") for entry in facts.get("parameters", []))
    warnings = list(facts.get("warnings", []))
    learns = any(one.phase == "backward" for one in operators)
    if learns and len(gradients) < known:
        warnings.append(f"{known - len(gradients)} of {known} parameters have no gradient here")
    if frame["flop"].any() and not frame["batch_read_bytes"].any():
        warnings.append(f"no input has {batch} samples: nothing is taken to grow with the batch")
    uncounted = _warn_uncounted(operators, rows)
    warnings += [uncounted] if uncounted else []
    content = {
        **facts,
        "gradients": gradients or facts.get("gradients", []),
        "operators": len(rows),
        "backward_operators_joined": int(frame["forward_op_id"].notna().sum()),
        "flop": sum(frame["flop"].tolist()),
        "warnings": warnings,
    }
    if "parameters" not in facts and (parameters := _list_parameters(rows, tracker, gradients)):
        content["parameters"] = parameters
    trace = Trace(frame, tracker.table(_owners(rows, tracker)), Facts.read(content))
    if file is not None:
        check_trace(trace, file)
    return trace


def _list_parameters(
    rows: list[dict[str, Any]], tracker: TensorTracker, gradients: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the parameters in the order in which the step reads them, where some show to be frozen; else none."""
    names = {(g["parameter_storage_id"], g["size_bytes"]): g["name"] for g in gradients}
    trained = {storage for storage, _ in names}
    owners, parameters = _owners(rows, tracker), dict[int, dict[str, Any]]()
    for index, tensor in enumerate(tracker.tensors):
        at, storage = tensor.storage, tracker.storages[tensor.storage]
        frozen = storage.category == "parameter" and storage.weight and not storage.updated_in and at not in trained
        name = names.get((at, tracker.size_bytes(index)), frozen and f"{owners.get(index) or 'parameter'}.frozen{at}")
        if name and at not in parameters:
            entry = {"name": name, "shape": list(tensor.shape), "elem_bytes": tensor.elem_bytes}
            parameters[at] = {**entry, "frozen": frozen, "storage_id": at}
    return list(parameters.values()) if any(entry["frozen"] for entry in parameters.values()) else []


def _warn_uncounted(operators: Sequence[ObservedOperator], rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Name the operators whose work no formula counts, with their share of the operators' time."""
    computing = [(one, row) for one, row in zip(operators, rows, strict=True) if one.kind == "compute"]
    time_ns = sum(int(row["device_ns"]) for _, row in computing)
    uncounted: dict[str, tuple[int, int]] = {}
    for one, row in computing:
        timed = row["device_ns"] > 0 or not time_ns
        if timed and not row["flop"] and may_multiply(one.name, one.kernel_names):
            calls, spent_ns = uncounted.get(one.name, (0, 0))
            uncounted[one.name] = calls + 1, spent_ns + int(row["device_ns"])
    if not uncounted:
        return None
    first = sorted(uncounted, key=lambda name: (-uncounted[name][1], name))[:3]
    parts = [
        f"{name} ({uncounted[name][1] / time_ns:.1%} of the time)"
        if time_ns
        else f"{name} ({uncounted[name][0]} calls)"
        for name in first
    ]
    more = f" and {len(uncounted) - len(first)} more" if len(uncounted) > len(first) else ""
    return f"FLOPs are missing for want of a rule, shapes or constants: {', '.join(parts)}{more}"


def _describe(
    op_id: int, one: ObservedOperator, use: OperatorTensors, tracker: TensorTracker, batch: int
) -> dict[str, Any]:
    """Return an operator's row: its work, its shapes and what of them grows with the batch."""
    shapes = [[list(tracker.tensors[i].shape) for i in ids] for ids in (use.inputs, use.outputs)]
    flop = one.flop
    if flop is None:
        flop = count_flop(one.name, *shapes) or 0
    moved_in, moved_out = tracker.moved(use)
    grows = use.phase != "optimizer" and any(tracker.scales(i) for i in use.inputs)
    first = tracker.tensors[(use.inputs or use.outputs)[0]] if use.inputs or use.outputs else None
    batch_dim = None
    if use.outputs and tracker.scales(use.outputs[0]):
        batch_dim = next((d for d, size in enumerate(shapes[1][0]) if size % batch == 0), None)
    return {
        "op_id": op_id,
        "name": one.name,
        "phase": one.phase,
        "kind": one.kind,
        "module": one.module,
        "device_ns": one.device_ns,
        "cpu_ns": one.cpu_ns,
        "kernels": one.kernels,
        "flop": flop,
        "read_bytes": sum(tracker.size_bytes(i) for i in moved_in),
        "write_bytes": sum(tracker.size_bytes(i) for i in moved_out),
        "batch_flop": flop if grows else 0,
        "batch_read_bytes": sum(tracker.size_bytes(i) for i in moved_in if tracker.scales(i)),
        "batch_write_bytes": sum(tracker.size_bytes(i) for i in moved_out if tracker.scales(i)),
        "input_ids": use.inputs,
        "output_ids": use.outputs,
        "input_shapes": shapes[0],
        "output_shapes": shapes[1],
        "dtype": first.dtype if first else "",
        "batch_dim": batch_dim,
        "sequence_number": one.sequence_number,
        "forward_op_id": one.forward,
    }


def _owners(rows: list[dict[str, Any]], tracker: TensorTracker) -> dict[int, str]:
    """Return the module of each parameter (its reader's) and of each activation (its maker's)."""
    return {
        index: row["module"]
        for row in reversed(rows)  # the first one that uses a tensor counts
        if row["phase"] == "forward" and row["module"]
        for index in (*row["input_ids"], *row["output_ids"])
        if index in row["output_ids"] or tracker.category(index) in ("parameter", "buffer")
    }
