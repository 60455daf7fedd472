"""What a call of ``torch.distributed`` sends, in the words of a trace.

Names, arguments and meaning of the calls: the operators ``c10d``, ``_c10d_functional`` and
``_dtensor`` of PyTorch 2.13 (``torch/csrc/distributed/c10d/Ops.cpp``, ``Functional.cpp``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

from trioflow.base.errors import InputError

COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Namespaces of calls that communicate, or wait for those that do."""


class _Call(NamedTuple):
    """A call: its collective, and the argument that holds the whole buffer (empty: the results)."""

    collective: str
    whole: str


_CALLS = {
    "allreduce_": _Call("all_reduce", "tensors"),
    "allreduce_coalesced_": _Call("all_reduce", "tensors"),
    "broadcast_": _Call("broadcast", "tensors"),
    "reduce_": _Call("reduce", "tensors"),
    "_allgather_base_": _Call("all_gather", "output_tensor"),
    "allgather_": _Call("all_gather", "output_tensors"),
    "allgather_coalesced_": _Call("all_gather", "output_lists"),
    "allgather_into_tensor_coalesced_": _Call("all_gather", "outputs"),
    "_reduce_scatter_base_": _Call("reduce_scatter", "input_tensor"),
    "reduce_scatter_": _Call("reduce_scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": _Call("reduce_scatter", "inputs"),
    "alltoall_base_": _Call("all_to_all", "input"),
    "alltoall_": _Call("all_to_all", "input_tensors"),
    "gather_": _Call("gather", "output_tensors"),
    "scatter_": _Call("scatter", "input_tensors"),
    "send": _Call("send", "tensors"),
    "recv_": _Call("recv", "tensors"),
    "barrier": _Call("barrier", ""),
    "monitored_barrier_": _Call("barrier", ""),
    "all_reduce": _Call("all_reduce", "input"),
    "all_reduce_coalesced": _Call("all_reduce", "inputs"),
    "broadcast": _Call("broadcast", "input"),
    "all_gather_into_tensor": _Call("all_gather", ""),
    "all_gather_into_tensor_out": _Call("all_gather", ""),
    "all_gather_into_tensor_coalesced": _Call("all_gather", ""),
    "reduce_scatter_tensor": _Call("reduce_scatter", "input"),
    "reduce_scatter_tensor_out": _Call("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": _Call("reduce_scatter", "inputs"),
    "all_to_all_single": _Call("all_to_all", "input"),
    "shard_dim_alltoall": _Call("all_to_all", "input"),
    "isend": _Call("send", "tensor"),
    "irecv": _Call("recv", "tensor"),
}  # fmt: skip
"""Calls by name; a functional one's name may end in ``_`` as well."""
_WAITS = ("wait_tensor",)
_SILENT = ("send", "isend", "barrier", "monitored_barrier_")
"""Calls that write into none of their arguments."""
_ENDS = {"send": "dst", "isend": "dst", "recv_": "src", "irecv": "src"}
_ROOTS = ("root_rank", "src")
_FUNCTIONAL = "_c10d_functional"


def describe_message(name: str, given: dict[str, Any], result: Any) -> dict[str, Any] | None:
    """Return what a call sends; None of one that waits.

    ``name``: with its namespace; ``given``: its arguments by name; ``result``: what it returned.
    The entry's keys are those of the fact ``communication``.

    Raises
    ------
    InputError
        When the call is not known.
    """
    space, _, call = name.partition("::")
    if call in _WAITS:
        return None
    known = _CALLS.get(call) or (
        _CALLS.get(call.removesuffix("_")) if "functional" in space else None
    )
    if known is None:
        raise InputError(
            f"the step calls {name}, which trioflow does not know",
            fix="use a collective of torch.distributed that is not deprecated",
        )
    group = _find_group(given)
    ranks = dist.get_process_group_ranks(group)
    buffer = given.get(known.whole) if known.whole else result
    tensors = [t for t in tree_leaves(buffer) if isinstance(t, torch.Tensor)]
    entry: dict[str, Any] = {
        "name": known.collective,
        "message_bytes": sum(t.numel() * t.element_size() for t in tensors),
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        "group": str(group.group_name),
        "asynchronous": bool(given.get("async_op", True)),
    }
    if known.collective == "barrier":  # NCCL's is a sum of one number
        return entry | {
            "name": "all_reduce",
            "message_bytes": 4,
            "ranks": ranks,
            "asynchronous": False,
        }
    if call in _ENDS:
        return entry | {"ranks": ranks, "peer": ranks[int(given[_ENDS[call]])]}
    first = next((int(given[word]) for word in _ROOTS if word in given), 0)
    return entry | {"ranks": [*ranks[first:], *ranks[:first]]}


def find_written(schema: Any) -> frozenset[int]:
    """Return the arguments that a call that communicates writes into."""
    space, _, call = schema.name.partition("::")
    if space != "c10d":
        marked = (a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        return frozenset(place for place, writes in enumerate(marked) if writes)
    return frozenset() if call in _SILENT else frozenset([0])


def _find_group(given: dict[str, Any]) -> dist.ProcessGroup:
    """Return the process group that a call names."""
    held = given.get("process_group", given.get("group_name"))
    if isinstance(held, str):
        return _resolve_process_group(held)
    return held if isinstance(held, dist.ProcessGroup) else dist.ProcessGroup.unbox(held)
