"""Which parameter each gradient belongs to, and in which order gradients become ready."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from trioflow.trace.tensors import TensorTracker

_CAST = "aten::to"


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
    free = {
        i: (str(p["name"]), tuple(p["shape"]))
        for i, p in enumerate(parameters)
        if not p.get("frozen")
    }
    taken: set[int] = set()
    entries: list[dict[str, Any]] = []
    for op_id, shape in _candidates(rows, tracker) if ready is None else ready:
        found = _find_parameter(op_id, shape, rows, tracker, taken)
        if found is None:
            continue
        tensor = tracker.tensors[found]
        made = _find_gradient(rows, op_id, tracker, tensor.shape, taken)
        taken |= {tensor.storage, made}
        module = rows[rows[op_id]["forward_op_id"]]["module"]
        index = _match_name(free, module, tensor.shape)
        entries.append(
            {
                "name": free.pop(index)[0]
                if index is not None
                else f"{module or 'parameter'}.{len(entries)}",
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
    found: list[ReadyGradient] = []
    for row in rows:
        if row["phase"] == "backward" and row["forward_op_id"] is not None:
            read = set(rows[row["forward_op_id"]]["input_ids"])
            count = sum(tracker.category(i) == "parameter" for i in read)
            found += [ReadyGradient(row["op_id"])] * count
    return found


def _find_parameter(
    op_id: int,
    shape: tuple[int, ...] | None,
    rows: list[dict[str, Any]],
    tracker: TensorTracker,
    taken: set[int],
) -> int | None:
    """Return the parameter whose gradient the operators up to `op_id` have just made."""
    if op_id < 0 or rows[op_id]["forward_op_id"] is None:
        return None
    forward = rows[rows[op_id]["forward_op_id"]]
    made = {tuple(s) for s in rows[op_id]["output_shapes"]} if shape is None else {shape}
    candidates = [
        i
        for i in forward["input_ids"]
        if tracker.category(i) == "parameter" and tracker.tensors[i].storage not in taken
    ]
    # A frozen weight may be as large as a trained bias: the optimizer updates the one of them.
    candidates.sort(key=lambda i: not tracker.storages[tracker.tensors[i].storage].updated_in)
    exact = [i for i in candidates if tracker.tensors[i].shape in made]
    chosen = exact or candidates
    return chosen[0] if chosen else None


def _find_gradient(
    rows: list[dict[str, Any]],
    op_id: int,
    tracker: TensorTracker,
    shape: tuple[int, ...],
    taken: set[int],
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
