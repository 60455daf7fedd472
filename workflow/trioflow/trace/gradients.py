"""Which parameter each gradient belongs to, and in which order gradients become ready."""

from __future__ import annotations

from bisect import bisect_left
from math import prod
from typing import Any

from trioflow.trace.kineto import Event
from trioflow.trace.tensors import TensorTracker

_ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


def join_gradients(
    step: Event,
    uses: list[Event],
    rows: list[dict[str, Any]],
    tracker: TensorTracker,
    parameters: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return one entry a parameter, in the order in which its gradient became ready.

    Autograd hands a gradient to its parameter right after the operator that
    made it; that operator's forward read the parameter.

    Parameters
    ----------
    step : Event
        The profiled step, with children.
    uses, rows, tracker
        Its outermost operators, their rows and their tensors.
    parameters : list of dict
        ``name``, ``shape`` and ``elem_bytes`` in the model's order; may be empty.

    Returns
    -------
    list of dict
        ``name``, ``module``, ``index`` (place in the model's order, or -1),
        ``size_bytes`` and ``ready_after_op_id``.
    """
    free = {i: (str(p["name"]), tuple(p["shape"])) for i, p in enumerate(parameters)}
    # What accumulation itself runs (a detach, an addition) makes no gradient.
    makers = [i for i, row in enumerate(rows) if row["forward_op_id"] is not None]
    starts = [uses[i].start_ns for i in makers]
    taken: set[int] = set()
    entries: list[dict[str, Any]] = []
    for event in (e for e in step.walk() if e.name == _ACCUMULATE):
        before = bisect_left(starts, event.start_ns)
        op_id = makers[before - 1] if before else -1
        found = _find_parameter(op_id, rows, tracker, taken)
        if found is None:
            continue
        taken.add(tracker.tensors[found].storage)
        tensor = tracker.tensors[found]
        module = rows[rows[op_id]["forward_op_id"]]["module"]
        index = _match_name(free, module, tensor.shape)
        entries.append(
            {
                "name": free.pop(index)[0] if index is not None else f"{module}.{len(entries)}",
                "module": module,
                "index": -1 if index is None else index,
                "size_bytes": prod(tensor.shape) * tensor.elem_bytes,
                "ready_after_op_id": op_id,
            }
        )
    return entries


def _find_parameter(
    op_id: int, rows: list[dict[str, Any]], tracker: TensorTracker, taken: set[int]
) -> int | None:
    """Return the parameter whose gradient the operators up to `op_id` have just made."""
    if op_id < 0 or rows[op_id]["forward_op_id"] is None:
        return None
    forward = rows[rows[op_id]["forward_op_id"]]
    made = {tuple(shape) for shape in rows[op_id]["output_shapes"]}
    candidates = [
        i
        for i in forward["input_ids"]
        if tracker.category(i) == "parameter" and tracker.tensors[i].storage not in taken
    ]
    exact = [i for i in candidates if tracker.tensors[i].shape in made]
    chosen = exact or candidates
    return chosen[0] if chosen else None


def _match_name(
    free: dict[int, tuple[str, tuple[int, ...]]], module: str, shape: tuple[int, ...]
) -> int | None:
    """Return the index of the unassigned parameter of that module and shape."""
    own = [
        i for i, (name, size) in free.items() if size == shape and name.rpartition(".")[0] == module
    ]
    below = [
        i for i, (name, size) in free.items() if size == shape and name.startswith(f"{module}.")
    ]
    chosen = own or below
    return chosen[0] if chosen else None
