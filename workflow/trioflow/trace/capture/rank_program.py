"""One process runs a user's own sharded step as a rank of many (PyTorch's ``fake`` process group): a trace."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from types import BuiltinFunctionType, FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from trioflow.base.errors import InputError, TrioflowError
from trioflow.base.provenance import host_environment, stamp
from trioflow.base.units import s_to_ns
from trioflow.trace.assemble import assemble_trace
from trioflow.trace.capture.dispatched import (
    ProgramRecorder,
    device_clock,
    host_clock,
    read_spans,
)
from trioflow.trace.capture.fake_profile import NotingFakeMode
from trioflow.trace.capture.meta import DEVICE, TARGETS, fused_attention
from trioflow.trace.capture.workload import choose_device, device_name
from trioflow.trace.facts import UNTIMED, Facts
from trioflow.trace.profile.profiler_fields import precision_of
from trioflow.trace.store import Trace
from trioflow.trace.workloads.user_model import call_user_function

import_module("torch.distributed._tools.fake_collectives")  # messages of tensors without data
_WARM_UP = 2
_STEPS = 5
"""Steps that are recorded, and as many timed without the recorder, where they take time."""
_WORDS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def capture_rank(
    row: Mapping[str, Any], batch: int, *, world_size: int, rank: int = 0, device: str = "auto",
    target: str | None = None,
) -> Trace:  # fmt: skip
    """Return the program of one rank of many: its operators, its messages, and what waits for what.

    ``row``'s ``model`` is ``module:function``, called with the process group set up, with the row
    (and ``batch``) if it takes an argument; it returns the step, a function or an object's
    ``step``. ``device``: ``meta`` for tensors without data, ``cpu``, ``cuda`` or ``auto``.
    ``target``: whose optimizers and attention are chosen, ``cuda`` (default without data) or
    ``cpu``; times on another one are not kept. Facts: ``trace.program``. Raises InputError when
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
        except (
            DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException,
        ) as error:  # fmt: skip
            raise InputError(
                f"{row['model']}: {error.func} does not run on tensors without values, and --device "
                "meta computes none",
                fix="use --device cpu",
            ) from error
    if not recorder.operators:
        raise InputError(f"the step of {row['model']} runs no operator of PyTorch")
    facts = {
        **_describe(row, batch, where, times_s, timed),
        **({"target": target} if where == DEVICE or not timed else {}),
        **({"causal_attention": masks == {True}} if masks else {}),
        **_describe_program(recorder, rank, world_size),
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
    known = {
        **{word: str(value) for word, value in words.items()},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    before = {word: os.environ.get(word) for word in _WORDS}
    os.environ.update(known)
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
            mock.patch.object(PipelineStage, "_warmup_forward_vote", vote),
            mock.patch.object(
                PipelineStage,
                "_warmup_backward_result",
                lambda self, received_result=None: self.trioflow_vote,
            ),
            mock.patch.object(dist, "init_process_group", lambda *_, **__: None),
            mock.patch.object(dist, "destroy_process_group", lambda *_, **__: None),
            mock.patch.object(DistributedDataParallel, "__init__", replicate),
        ):
            yield
    finally:
        dist.destroy_process_group()
        for word, value in before.items():
            os.environ.pop(word, None)
            if value is not None:
                os.environ[word] = value


def _sum_bucket(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket as DDP does without a hook; a fake message has no result that DDP could read."""
    dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


_sum_bucket.__annotations__.clear()  # DDP reads them, and these are text


@contextmanager
def _gpu_optimizers() -> Iterator[None]:
    """Let optimizers choose as on a GPU: one call over many tensors."""
    module = import_module("torch.optim.optimizer")
    devices = module._get_foreach_kernels_supported_devices()
    with mock.patch.object(
        module, "_get_foreach_kernels_supported_devices", lambda: [*devices, "cpu"]
    ):
        yield


@contextmanager
def _without_values(mode: NotingFakeMode) -> Iterator[None]:
    """Make tensors without data; meshes of ranks, whose values are read, keep theirs."""

    def refuse(*_: Any, **__: Any) -> None:
        raise InputError(
            "DistributedDataParallel reads the data of its parameters, and --device meta has none",
            fix="use --device cpu",
        )

    with ExitStack() as changed:
        for name, held in list(vars(DeviceMesh).items()):
            kind = type(held) if isinstance(held, staticmethod | classmethod) else None
            if kind is not None or isinstance(held, FunctionType):
                made = _keep_values(held.__func__ if kind else held)
                changed.enter_context(
                    mock.patch.object(DeviceMesh, name, kind(made) if kind else made)
                )
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
        found = getattr(torch, name)
        return _keep_values(found) if isinstance(found, BuiltinFunctionType) else found


def _describe_program(recorder: ProgramRecorder, rank: int, world_size: int) -> dict[str, Any]:
    """Return what was recorded of a step while it ran: its optimizer, its streams, its messages."""
    streams = recorder.streams
    return {
        "optimizer": recorder.optimizer,
        "program": {
            "rank": rank, "world_size": world_size,
            "streams": streams.list_streams(), "waits": streams.list_waits(),
        },
        "communication": recorder.messages,
    }  # fmt: skip


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


def _run(
    step: Callable[[], Any], where: str, timed: bool
) -> tuple[ProgramRecorder, list[float], list[list[float]]]:
    """Return a recorded step, and of several the times without recorder and of each operator [s]."""
    clock = {"cpu": host_clock, "cuda": device_clock}.get(where) if timed else None
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
            "two steps ran other operators: what the step does depends on its data",
            fix="let it do the same each time",
        )
    return recorders[-1], times_s, spans_s


def _call(step: Callable[[], Any]) -> None:
    """Run the step; InputError says where it failed."""
    try:
        step()
    except (
        TrioflowError, DataDependentOutputException, DynamicOutputShapeException,
        UnsupportedOperatorException,
    ):  # fmt: skip
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:300] or "no message"
        raise InputError(
            f"the step failed ({type(error).__name__}: {words})",
            fix="make it run on real ranks first; values that come from other ranks are not there",
        ) from error


def _describe(
    row: Mapping[str, Any], batch: int, where: str, times_s: Sequence[float], timed: bool
) -> dict[str, Any]:
    """Return the facts that the recorder does not hold."""
    found = {
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
    return found | ({"step_times_s": list(times_s), "host": host_environment()} if timed else {})


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
