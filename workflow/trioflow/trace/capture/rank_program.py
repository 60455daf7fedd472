"""The trace of a user's own sharded step, which one process runs as a rank of many; `capture_rank` is the door.

The other ranks are PyTorch's ``fake`` process group. The step is recorded below autograd: every operator on local
tensors, every message, which stream each call goes to, and which streams wait for one another. A mode of PyTorch's
dispatcher sees what a step runs once sharded tensors have been replaced by the rank's own parts, so that shapes and work
are the rank's. The same holds for real tensors and for fake ones. What a compiled graph runs is not dispatched and not
seen.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from importlib import import_module
from types import BuiltinFunctionType, FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trioflow.base.errors import InputError, TrioflowError
from trioflow.base.provenance import host_environment, stamp
from trioflow.base.units import s_to_ns
from trioflow.trace.assemble import ObservedOperator, assemble_trace
from trioflow.trace.capture.meta import DEVICE, TARGETS, NotingFakeMode, fused_attention
from trioflow.trace.capture.workload import choose_device, device_name
from trioflow.trace.facts import CALLS, UNTIMED, Facts
from trioflow.trace.profile.profiler_fields import precision_of
from trioflow.trace.store import Trace
from trioflow.trace.tensors import TensorRef
from trioflow.trace.workloads.recipe import call_user_function

_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.int64: "long int",
    torch.int32: "int",
    torch.int16: "short int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
    torch.complex64: "c10::complex<float>",
}
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
        one.written = _find_written(schema)
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
        self._paths: dict[torch.nn.Module, str] = {}
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
        if module not in self._paths:
            for path, inner in module.named_modules():
                own = reduce(lambda name, word: name.replace(word, ""), _WRAPPERS, f"{path}.")
                self._paths.setdefault(inner, own.removesuffix("."))
        self._stack.append(self._paths[module])

    def _leave(self, *_: Any) -> None:
        self._stack.pop()

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._updates, self.optimizer = True, type(optimizer).__name__.lower()

    def _end_update(self, *_: Any) -> None:
        self._updates = False


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
    references = []
    for one in tree_leaves(value):
        if isinstance(one, torch.Tensor) and one.layout is torch.strided:
            kind = _DTYPES.get(one.dtype, str(one.dtype).replace("torch.float", "c10::Float"))
            storage, shape = one.untyped_storage()._cdata, tuple(map(int, one.shape))
            references.append(TensorRef(id(one), storage, one.element_size(), shape, kind, place))
    return references


def _describe_message(name: str, given: dict[str, Any], result: Any) -> dict[str, Any] | None:
    """Return what a call sends, an entry of the fact ``communication``; None of one that waits.

    ``given``: its arguments by name. Raises InputError when the call is not known.
    """
    space, _, call = name.partition("::")
    if call in _WAITS:
        return None
    known = CALLS.get(call) or (CALLS.get(call.removesuffix("_")) if "functional" in space else None)
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
        return entry | {"name": "all_reduce", "message_bytes": 4, "ranks": ranks, "asynchronous": False}
    if call in _ENDS:
        return entry | {"ranks": ranks, "peer": ranks[int(given[_ENDS[call]])]}
    first = next((int(given[word]) for word in _ROOTS if word in given), 0)
    return entry | {"ranks": [*ranks[first:], *ranks[:first]]}


def _find_written(schema: Any) -> frozenset[int]:
    """Return the arguments that a call writes into; schemas of messages do not say it."""
    space, _, call = schema.name.partition("::")
    if space == "c10d":
        return frozenset(() if call in _SILENT else (0,))
    marked = (a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return frozenset(place for place, writes in enumerate(marked) if writes)


def _find_group(given: dict[str, Any]) -> dist.ProcessGroup:
    """Return the process group that a call names."""
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return _resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


_MARK = "_trioflow_mark"


class StreamLog:
    """Notes the streams of operators, and which earlier ones they wait for, of a step that runs.

    On a CPU, PyTorch's stand-ins ``torch.cpu.Stream`` and ``torch.cpu.Event`` are asked what a
    GPU's would be. Stream 0 is the one that the step starts in.
    """

    def __init__(self, kind: str) -> None:
        self._device: Any = torch.cuda if kind == "cuda" else torch.cpu
        self._numbers: dict[Any, int] = {}
        self._last: dict[int, int] = {}
        self._owed: dict[int, list[int]] = {}
        self.of: list[int] = []
        self.waits: list[tuple[int, int]] = []

    def add(self, op_id: int, beside: bool) -> None:
        """Note that an operator is next in the current stream; one ``beside`` it holds nothing up."""
        number = self._current()
        self.of.append(number)
        self.waits += [(op_id, earlier) for earlier in self._owed.get(number, [])]
        if not beside:
            self._owed.pop(number, None)
            self._last[number] = op_id

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what streams are asked to wait for; the current one is number 0."""
        stream, event, log = self._device.Stream, self._device.Event, self
        self._current()

        def wait_stream(one: Any, other: Any) -> None:
            log._owe(one, log._reached(other))

        def record_event(one: Any, event: Any = None) -> Any:
            made = log._device.Event() if event is None else event
            setattr(made, _MARK, log._reached(one))
            return made

        def record(one: Any, stream: Any = None) -> None:
            setattr(one, _MARK, log._reached(stream or log._device.current_stream()))

        def wait_event(one: Any, event: Any) -> None:
            log._owe(one, getattr(event, _MARK, []))

        def wait(one: Any, stream: Any = None) -> None:
            log._owe(stream or log._device.current_stream(), getattr(one, _MARK, []))

        with ExitStack() as changed:
            for owner, function in (
                (stream, wait_stream),
                (stream, record_event),
                (stream, wait_event),
                (event, record),
                (event, wait),
            ):
                changed.enter_context(_following(owner, function))
            yield

    def _current(self) -> int:
        return self._number(self._device.current_stream())

    def _number(self, stream: Any) -> int:
        key = getattr(stream, "cuda_stream", stream)
        return self._numbers.setdefault(key, len(self._numbers))

    def _reached(self, stream: Any) -> list[int]:
        """Return what a stream has been asked to do last, and what it was to wait for after that."""
        number = self._number(stream)
        last = [self._last[number]] if number in self._last else []
        return [*last, *self._owed.get(number, [])]

    def _owe(self, stream: Any, operators: list[int]) -> None:
        owed = self._owed.setdefault(self._number(stream), [])
        owed += [one for one in operators if one not in owed]


@contextmanager
def _following(owner: type, function: Callable[..., Any]) -> Iterator[None]:
    """Let a method be noted as well as done."""
    name = function.__name__
    done = getattr(owner, name)

    def both(one: Any, *args: Any, **named: Any) -> Any:
        result = done(one, *args, **named)
        noted = function(one, *args, **named)
        if result is not None and name == "record_event":
            setattr(result, _MARK, getattr(noted, _MARK))
        return noted if result is None else result

    with mock.patch.object(owner, name, both):
        yield


import_module("torch.distributed._tools.fake_collectives")  # messages of tensors without data
_WARM_UP = 2
_STEPS = 5
"""Steps that are recorded, and as many timed without the recorder, where they take time."""


def capture_rank(
    row: Mapping[str, Any],
    batch: int,
    *,
    world_size: int,
    rank: int = 0,
    device: str = "auto",
    target: str | None = None,
) -> Trace:
    """Return the program of one rank of many: its operators, its messages, and what waits for what.

    ``row``'s ``model`` is ``module:function``, called with the process group set up, with the row
    (and ``batch``) if it takes an argument; it returns the step, a function or an object's
    ``step``. ``device``: ``meta`` for tensors without data, ``cpu``, ``cuda`` or ``auto``.
    ``target``: whose optimizers and attention are chosen, ``cuda`` (default without data) or
    ``cpu``; times on another one are not kept. Facts: ``program``, as `trace.facts` says. Raises InputError when
    rank, device or batch are impossible, the function is unusable, or the step needs what fake
    groups or tensors do not have.
    """
    if batch < 1:
        raise InputError(f"batch {batch} is not positive")
    if not 0 <= rank < world_size:
        raise InputError(f"--rank {rank} is not one of {world_size} ranks, 0 to {world_size - 1}")
    where = DEVICE if device == DEVICE else choose_device(device)
    target = target or ("cuda" if where == DEVICE else where)
    if target not in TARGETS:
        raise InputError(f"unknown target {target!r}", fix=f"use {' or '.join(TARGETS)}")
    timed = where == target
    with _fake_ranks(rank, world_size), ExitStack() as changed:
        masks: set[bool] = set()
        if target == "cuda" and where != "cuda":
            changed.enter_context(fused_attention(masks))
            changed.enter_context(_gpu_optimizers())
        mode = NotingFakeMode() if where == DEVICE else None
        changed.enter_context(_without_values(mode) if mode else nullcontext())
        try:
            step = _make_step(row, batch)
            recorder, times_s, spans_s = _run(step, where, timed)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise InputError(
                f"{row['model']}: {error.func} does not run on tensors without values, and --device meta computes none",
                fix="use --device cpu",
            ) from error
    if not recorder.operators:
        raise InputError(f"the step of {row['model']} runs no operator of PyTorch")
    streams = recorder.streams
    facts = {
        **_describe(row, batch, where, times_s, timed),
        **({"target": target} if where == DEVICE or not timed else {}),
        **({"causal_attention": masks == {True}} if masks else {}),
        "optimizer": recorder.optimizer,
        "program": {
            "rank": rank,
            "world_size": world_size,
            "streams": {
                str(n): [i for i, own in enumerate(streams.of) if own == n] for n in sorted({*streams.of} - {0})
            },
            "waits": [list(pair) for pair in sorted(set(streams.waits))],
        },
        "communication": recorder.messages,
    }
    if timed:
        _set_times(recorder, spans_s, float(facts["step_time_s"]))
    trace = assemble_trace(recorder.operators, facts, ready=[])
    return Trace(trace.operators, trace.tensors, _name_precision(trace))


@contextmanager
def _fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Set up the fake process group; stages that ask each other whether all have their shapes get this one's answer."""
    if dist.is_initialized():
        raise InputError("a process group is set up already", fix="capture in a process of its own")
    words = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    replaced = DistributedDataParallel.__init__

    def replicate(self: Any, *args: Any, **named: Any) -> None:
        replaced(self, *args, **named)
        self.register_comm_hook(self.process_group, _sum_bucket)

    def vote(self: Any, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
        given = not InferenceMode.needs_dynamic(self._user_meta, has_backward)
        self.trioflow_vote = torch.tensor([int(given)], dtype=torch.int32)
        return self.trioflow_vote

    try:
        with (
            mock.patch.dict(os.environ, {name: str(n) for name, n in words.items()} | address),
            mock.patch.object(PipelineStage, "_warmup_forward_vote", vote),
            mock.patch.object(
                PipelineStage, "_warmup_backward_result", lambda self, received_result=None: self.trioflow_vote
            ),
            mock.patch.object(dist, "init_process_group", lambda *_, **__: None),
            mock.patch.object(dist, "destroy_process_group", lambda *_, **__: None),
            mock.patch.object(DistributedDataParallel, "__init__", replicate),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket as DDP does without a hook; a fake message has no result that DDP could read."""
    dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


_sum_bucket.__annotations__.clear()  # DDP reads them, and these are text


def _gpu_optimizers() -> AbstractContextManager[Any]:
    """Let optimizers choose as on a GPU: one call over many tensors."""
    module = import_module("torch.optim.optimizer")
    devices = [*module._get_foreach_kernels_supported_devices(), "cpu"]
    return mock.patch.object(module, "_get_foreach_kernels_supported_devices", lambda: devices)


@contextmanager
def _without_values(mode: NotingFakeMode) -> Iterator[None]:
    """Make tensors without data; meshes of ranks, whose values are read, keep theirs."""

    def refuse(*_: Any, **__: Any) -> None:
        raise InputError(
            "DistributedDataParallel reads the data of its parameters, and --device meta has none",
            fix="use --device cpu",
        )

    with ExitStack() as changed:
        for name, attribute in list(vars(DeviceMesh).items()):
            kind = type(attribute) if isinstance(attribute, staticmethod | classmethod) else None
            if kind is not None or isinstance(attribute, FunctionType):
                made = _keep_values(attribute.__func__ if kind else attribute)
                changed.enter_context(mock.patch.object(DeviceMesh, name, kind(made) if kind else made))
        changed.enter_context(mock.patch.object(device_mesh, "torch", _TorchWithValues()))
        changed.enter_context(mock.patch.object(DistributedDataParallel, "__init__", refuse))
        changed.enter_context(mode)
        yield


def _keep_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose tensors have data, whatever the mode."""

    def call(*args: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **named)

    return call


class _TorchWithValues:
    """What ``torch`` is to the module of meshes: its functions make tensors with data."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(torch, name)
        return _keep_values(attribute) if isinstance(attribute, BuiltinFunctionType) else attribute


def _make_step(row: Mapping[str, Any], batch: int) -> Callable[[], Any]:
    """Call the user's function and return the step that it makes."""
    made = call_user_function({**row, "batch": batch})
    step = getattr(made, "step", made)
    if not callable(step) or isinstance(step, torch.nn.Module):
        raise InputError(
            f"{row['model']} returns a {type(made).__name__}, not a step",
            fix="return a function without arguments that runs one training step of this rank",
        )
    return step  # type: ignore[no-any-return]


def _run(step: Callable[[], Any], where: str, timed: bool) -> tuple[ProgramRecorder, list[float], list[list[float]]]:
    """Return a recorded step, and of several the times without recorder and of each operator [s]."""
    clock = {"cpu": time.perf_counter, "cuda": device_clock}.get(where) if timed else None
    times_s: list[float] = []
    spans_s: list[list[float]] = []
    for _ in range(_WARM_UP):
        _call(step)
    for _ in range(_STEPS if timed else 0):
        began = time.perf_counter()
        _call(step)
        if where == "cuda":
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - began)
    recorders = []
    for _ in range(_STEPS if timed else 1):
        recorder = ProgramRecorder(clock, "cuda" if where == "cuda" else "cpu")
        with recorder.recording():
            _call(step)
        recorders.append(recorder)
        if timed:
            spans_s.append(read_spans(recorder.spans))
    names = [one.name for one in recorders[-1].operators]
    if any([one.name for one in recorder.operators] != names for recorder in recorders):
        raise InputError(
            "two steps ran other operators: what the step does depends on its data", fix="let it do the same each time"
        )
    return recorders[-1], times_s, spans_s


def _call(step: Callable[[], Any]) -> None:
    """Run the step; InputError says where it failed."""
    try:
        step()
    except (TrioflowError, DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:300] or "no message"
        raise InputError(
            f"the step failed ({type(error).__name__}: {words})",
            fix="make it run on real ranks first; values that come from other ranks are not there",
        ) from error


def _describe(row: Mapping[str, Any], batch: int, where: str, times_s: Sequence[float], timed: bool) -> dict[str, Any]:
    """Return the facts that the recorder does not hold."""
    parts = {
        **stamp(torch=str(torch.__version__)),
        "source": "capture of a rank",
        "workload": str(row["workload"]),
        "batch": batch,
        "device": where if timed else DEVICE,
        "device_name": device_name(where) if timed else "none",
        "precision": "fp32",
        "step_time_s": statistics.median(times_s) if timed else 0.0,
        "step_time_source": "un-profiled" if timed else UNTIMED,
    }
    return parts | ({"step_times_s": list(times_s), "host": host_environment()} if timed else {})


def _set_times(recorder: ProgramRecorder, spans_s: list[list[float]], step_s: float) -> None:
    """Give operators their median times; what the step lasts longer is the host's, the same before each, messages nothing."""
    medians_s = [statistics.median(one) for one in zip(*spans_s, strict=True)]
    sent = {int(message["op_id"]) for message in recorder.messages}
    computing = [i for i in range(len(medians_s)) if i not in sent]
    host_s = max(step_s - sum(medians_s), 0.0) / max(len(computing), 1)
    for place in computing:
        recorder.operators[place].device_ns = s_to_ns(medians_s[place])
        recorder.operators[place].cpu_ns = s_to_ns(host_s)


def _name_precision(trace: Trace) -> Facts:
    """Return the facts with the precision of the operators that do most of the work."""
    work = trace.operators.groupby("dtype")["flop"].sum()
    word = precision_of(str(work.idxmax())) if len(work) and work.max() else ""
    return replace(trace.facts, precision=word or "fp32")
