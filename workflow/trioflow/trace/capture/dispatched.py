"""Recording a rank's step below autograd: every operator on local tensors, every message.

A mode of PyTorch's dispatcher sees what a step runs once sharded tensors have been replaced by the
rank's own parts, so that shapes and work are the rank's. The same holds for real tensors and for
fake ones. What a compiled graph runs is not dispatched and not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trioflow.base.errors import InputError
from trioflow.trace.assemble import ObservedOperator
from trioflow.trace.capture.streams import StreamLog
from trioflow.trace.program import CALLS
from trioflow.trace.tensors import TensorRef

_DTYPES = {
    torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16", torch.int64: "long int", torch.int32: "int",
    torch.int16: "short int", torch.int8: "signed char", torch.uint8: "unsigned char",
    torch.bool: "bool", torch.complex64: "c10::complex<float>",
}  # fmt: skip
"""Element types as PyTorch's profiler writes them."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_UNSEEN = ("profiler", "prim", "debugprims")
"""Namespaces of calls that do nothing to tensors."""
_UNSEEN_CALLS = ("_wrap_tensor_autograd", "record_stream", "check_for_nan")
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What wrappers of models put into the paths of modules."""


_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Namespaces of calls that communicate, or wait for those that do."""
_WAITS = ("wait_tensor",)
_SILENT = ("send", "isend", "barrier", "monitored_barrier_")
"""Calls that write into none of their arguments."""
_ENDS = {"send": "dst", "isend": "dst", "recv_": "src", "irecv": "src"}
_ROOTS = ("root_rank", "src")


class ProgramRecorder(TorchDispatchMode):  # type: ignore[misc]  # mypy does not read torch
    """Notes each operator of a step, each message, and what waits for what.

    ``clock``: time of a call's start or end; None times nothing. ``kind``: ``cuda``, or ``cpu`` for
    PyTorch's stand-ins. ``messages`` are entries of the fact ``communication``, ``spans`` the clock
    around each operator.
    """

    def __init__(self, clock: Callable[[], Any] | None = None, kind: str = "cpu") -> None:
        super().__init__()
        self.operators: list[ObservedOperator] = []
        self.messages: list[dict[str, Any]] = []
        self.streams = StreamLog(kind)
        self.spans: list[tuple[Any, Any]] = []
        self._clock = clock or (lambda: None)
        self._places = _Places()
        self._pending: dict[int, list[int]] = {}
        self._makers: dict[int, int] = {}

    @property
    def optimizer(self) -> str:
        """Name of the optimizer that updated; none if none did."""
        return self._places.optimizer

    @contextmanager
    def recording(self) -> Iterator[ProgramRecorder]:
        """Record what runs inside."""
        with self._places.following(), self.streams.following(), self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call and note it; a call on sharded tensors comes again with the rank's own."""
        if not all(one in _PLAIN for one in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name
        space, _, call = name.partition("::")
        if space in _UNSEEN or call in _UNSEEN_CALLS:
            return func(*args, **kwargs)
        began = self._clock()
        result = func(*args, **kwargs)
        self.spans.append((began, self._clock()))
        self._note(func, name, args, kwargs, result)
        return result

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        phase, module = self._places.find()
        communicates = name.partition("::")[0] in _COMMUNICATION
        one = ObservedOperator(name, phase, module, "collective" if communicates else "compute")
        schema = func._schema
        given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
        order = [(place, given.get(a.name)) for place, a in enumerate(schema.arguments)]
        one.inputs = [ref for place, value in order for ref in _refer(value, place)]
        outputs = result if isinstance(result, tuple) else (result,)
        one.outputs = [ref for place, value in enumerate(outputs) for ref in _refer(value, place)]
        one.written = _find_written(schema) if communicates else _written(schema)
        self._join(one)
        place = len(self.operators)
        message = _describe_message(name, given, result) if communicates else None
        self.operators.append(one)
        self.streams.add(place, beside=message is not None and bool(message["asynchronous"]))
        self._wait(one, place)
        if message is not None:
            self.messages.append({"op_id": place, **message})
            brought = {ref.storage for ref in one.inputs if ref.argument in one.written}
            for storage in brought | {ref.storage for ref in one.outputs}:
                self._pending.setdefault(storage, []).append(place)

    def _join(self, one: ObservedOperator) -> None:
        """Join a backward operator to its forward by the number of autograd's node."""
        if one.phase == "backward":
            node = torch._C._current_autograd_node()
            made = None if node is None else self._makers.get(node._sequence_nr())
            if made is not None:
                one.forward, one.sequence_number = made, node._sequence_nr()
                one.module = one.module or self.operators[made].module
        elif one.phase == "forward" and torch.is_grad_enabled():
            # Autograd numbered the node of this call just before.
            number = torch.autograd._get_sequence_nr() - 1
            if self._makers.setdefault(number, len(self.operators)) == len(self.operators):
                one.sequence_number = number

    def _wait(self, one: ObservedOperator, place: int) -> None:
        """Let messages be waited for by the first operator that uses what they bring."""
        used = {ref.storage for ref in one.inputs}
        for storage in used | {ref.storage for ref in one.outputs}:
            for message in self._pending.pop(storage, []):
                if storage in used:  # else the memory was given back and is another's now
                    self.streams.waits.append((place, message))


class _Places:
    """Where in the step a call is made: its phase, and the module whose forward runs."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._stack: list[str] = []
        self._updates = self._learnt = False
        self.optimizer = "none"

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow modules and optimizers."""
        with ExitStack() as hooks:
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
                register_optimizer_step_pre_hook(self._begin_update),
                register_optimizer_step_post_hook(self._end_update),
            ):
                hooks.callback(handle.remove)
            yield

    def find(self) -> tuple[str, str]:
        """Return the phase and the path of the module of the call that is made now.

        What follows a backward outside any module and records no gradient, clipping for instance,
        belongs to the update.
        """
        module = self._stack[-1] if self._stack else ""
        if torch._C._current_graph_task_id() != -1:
            self._learnt = True
            return "backward", module
        closing = self._learnt and not self._stack and not torch.is_grad_enabled()
        return "optimizer" if self._updates or closing else "forward", module

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if id(module) not in self._paths:
            for path, inner in module.named_modules():
                own = reduce(lambda name, word: name.replace(word, ""), _WRAPPERS, f"{path}.")
                self._paths.setdefault(id(inner), own.removesuffix("."))
        self._stack.append(self._paths[id(module)])

    def _leave(self, *_: Any) -> None:
        self._stack.pop()

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._updates, self.optimizer = True, type(optimizer).__name__.lower()

    def _end_update(self, *_: Any) -> None:
        self._updates = False


def host_clock() -> float:
    """Return the host's clock [s]."""
    return time.perf_counter()


def device_clock() -> torch.cuda.Event:
    """Return a mark in the current stream of the GPU, to be read once the step is done."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def read_spans(spans: list[tuple[Any, Any]]) -> list[float]:
    """Return how long each span lasted [s]."""
    if spans and isinstance(spans[0][0], torch.cuda.Event):
        torch.cuda.synchronize()
        return [began.elapsed_time(ended) / 1e3 for began, ended in spans]
    return [ended - began for began, ended in spans]


def _refer(value: Any, place: int) -> list[TensorRef]:
    """Return the tensors of one argument or result."""
    found = []
    for one in tree_leaves(value):
        if isinstance(one, torch.Tensor) and one.layout is torch.strided:
            kind = _DTYPES.get(one.dtype, str(one.dtype).replace("torch.float", "c10::Float"))
            storage, shape = one.untyped_storage()._cdata, tuple(map(int, one.shape))
            found.append(TensorRef(id(one), storage, one.element_size(), shape, kind, place))
    return found


def _written(schema: Any) -> frozenset[int]:
    """Return the arguments that a call writes into."""
    marked = (a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return frozenset(place for place, writes in enumerate(marked) if writes)


def _describe_message(name: str, given: dict[str, Any], result: Any) -> dict[str, Any] | None:
    """Return what a call sends, an entry of the fact ``communication``; None of one that waits.

    ``given``: its arguments by name. Raises InputError when the call is not known.
    """
    space, _, call = name.partition("::")
    if call in _WAITS:
        return None
    known = CALLS.get(call) or (
        CALLS.get(call.removesuffix("_")) if "functional" in space else None
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


def _find_written(schema: Any) -> frozenset[int]:
    """Return the arguments that a call that communicates writes into."""
    space, _, call = schema.name.partition("::")
    if space != "c10d":
        return _written(schema)
    return frozenset() if call in _SILENT else frozenset([0])


def _find_group(given: dict[str, Any]) -> dist.ProcessGroup:
    """Return the process group that a call names."""
    held = given.get("process_group", given.get("group_name"))
    if isinstance(held, str):
        return _resolve_process_group(held)
    return held if isinstance(held, dist.ProcessGroup) else dist.ProcessGroup.unbox(held)
