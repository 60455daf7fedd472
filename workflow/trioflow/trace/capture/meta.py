"""The operator graph of a training step without a device: shapes and work, no times.

Profiling a step on fake tensors: shapes without memory, and no computing.

The profiler sees the operators that a real step would run, from the outermost
call down to where PyTorch hands over to the fake tensors' rules. What these do
is not the model's and is taken out of the profile. Three things differ from a
real step and are put right here:

- all fake tensors lie at address zero, so the profiler takes them for one
  piece of memory; which tensors share memory is noted call by call instead;
- autograd adds further gradients to a fake one out of place, where it would
  reuse a real one that nobody else holds;
- annotations are calls like any other, and begin inside the hand-over.

Uses names that PyTorch keeps to itself (``FakeTensorMode``,
``_RecordFunctionFast``); checked with PyTorch 2.13 against captures on a CPU.
"""

import copy
import gzip
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._C._profiler import _RecordFunctionFast
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    _device_handler,
)
from torch.utils._pytree import tree_leaves

from trioflow.base.errors import InputError, TraceError
from trioflow.base.provenance import stamp, write_json
from trioflow.base.settings import CONFIGURED
from trioflow.trace.capture.workload import TrainingStep, describe_model, profile_with_tensors
from trioflow.trace.facts import UNTIMED
from trioflow.trace.profile.execution_trace import list_tensors
from trioflow.trace.profile.kineto import ABSENT
from trioflow.trace.profile.merge import merge_trace
from trioflow.trace.repeat import repeat_block
from trioflow.trace.store import Trace
from trioflow.trace.workloads.build import build_workload
from trioflow.trace.workloads.precision import choose_optimizer, choose_precision

_DEVICE = torch.ops.prim.device.default
_HAND_OVER = "PythonDispatchMode"
"""What the profiler calls PyTorch's hand-over of a call to fake tensors."""
_FAKE, _NOTE = "trioflow: fake call", "trioflow: tensors of fake call "
_WRITTEN = "trioflow: written by fake call"
_ZERO = {torch.bool: False, torch.complex64: 0j, torch.complex128: 0j}
_ACCUMULATES = "autograd::engine::evaluate_function: "
_UNDEFINED = "Tensor(nullptr"
"""Type of an absent tensor."""

_Json = dict[str, Any]
Tensor = list[Any]
"""A tensor in an execution trace: id, storage, offset, elements, bytes each, device."""


@dataclass(frozen=True)
class _FakeCall:
    """One call on fake tensors."""

    storages: list[int]  # address of the storage of each of its tensors, arguments first
    of_view: bool  # whether its first argument is a view, and so holds what it is a view of


class NotingFakeMode(FakeTensorMode):  # type: ignore[misc]  # mypy does not read torch
    """Makes fake tensors, and notes in which memory (``calls``) the tensors of every call lie.

    ``values_read``: how often the program asked for a tensor's number, and got zero.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.calls: list[_FakeCall] | None = None
        self.values_read = self.calls_made = 0
        self.most_calls: float = float("inf")
        self._kept: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so no call is kept from it: that cost more than the call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call on fake tensors and note which ones they were."""
        if func is _DEVICE:  # eight of nine calls ask only where a tensor lies
            return _device_handler(args)
        if self.calls is None or func.namespace not in ("aten", "prims"):
            return self._run(func, types, args, kwargs)
        with _RecordFunctionFast(_FAKE):
            result = self._run(func, types, args, kwargs)
            made = _tensor_leaves(result)
            used = [*_tensor_leaves((args, kwargs)), *made]
            # Kept, so that no address is given twice. Tensors are not: autograd counts their holders.
            storages = [t.untyped_storage() for t in used]
            self._kept += storages
            with _RecordFunctionFast(f"{_NOTE}{len(self.calls)}", used):  # the profiler's ids
                view = bool(used) and used[0]._is_view()
                self.calls.append(_FakeCall([storage._cdata for storage in storages], view))
        if not made and func._schema.is_mutable:
            # A real call over lists encloses one a tensor, which returns what it wrote.
            with _RecordFunctionFast(_WRITTEN, _written(func, args, kwargs or {})):
                pass
        return result

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a call on fake tensors; a number asked of one is zero."""
        self.calls_made += 1
        if self.calls_made > self.most_calls:
            raise InputError(
                f"more than {self.most_calls // 2:,} operators a step: it loops over tokens, which real runs do in one kernel",
                fix="capture the model on a GPU with that kernel: trioflow capture module:function",
            )
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            self.values_read += 1
            return _ZERO.get(args[0].dtype, 0.0 if args[0].dtype.is_floating_point else 0)


def _tensor_leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that a call writes into."""
    given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    marked = (a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write)
    return _tensor_leaves([given[name] for name in marked if name in given])


def profile_fake_step(step: Callable[[], None], model: torch.nn.Module, mode: NotingFakeMode, folder: Path) -> None:
    """Profile one step inside a fake mode, and write both files as `trioflow.trace.capture.workload` does."""
    with tempfile.TemporaryDirectory() as temporary:
        nodes, events = Path(temporary) / "nodes.json", Path(temporary) / "events.json"
        mode.calls = []
        profiler = profile_with_tensors(step, model, nodes)
        calls, mode.calls = mode.calls, None
        profiler.export_chrome_trace(str(events))
        kineto, trace = json.loads(events.read_text()), json.loads(nodes.read_text())
    kineto["traceEvents"] = list(_without_fakes(kineto["traceEvents"]))
    renamed = _repair_nodes(trace["nodes"], calls)
    for event in kineto["traceEvents"]:
        event["name"] = renamed.get(_record(event) or ABSENT, event["name"])
    trace["nodes"] = [node for node in trace["nodes"] if node["name"] != _HAND_OVER]
    _nest_alike(kineto["traceEvents"], trace["nodes"])
    _write(kineto, folder / "kineto.json.gz")
    _write(trace, folder / "execution_trace.json.gz")


def _write(content: _Json, path: Path) -> None:
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, compresslevel=1) as packed:
        packed.write(json.dumps(content).encode())


def _without_fakes(events: Iterable[_Json]) -> Iterator[_Json]:
    """Leave out the hand-overs and what fake tensors do inside them; keep annotations."""
    until: dict[Any, float] = {}
    for event in sorted(events, key=lambda e: (float(e.get("ts", 0)), -float(e.get("dur", 0)))):
        if event.get("ph") != "X" or event.get("cat") != "cpu_op":
            yield event
            continue
        end = float(event["ts"]) + float(event["dur"])
        limit = until.get(event["tid"], float("-inf"))
        if event["name"] == _FAKE:
            until[event["tid"]] = max(end, limit)
        elif end > limit and event["name"] != _HAND_OVER:
            yield event


def _record(event: _Json) -> int | None:
    found: int | None = event.get("args", {}).get("Record function id")
    return found


def _nest_alike(events: Iterable[_Json], nodes: list[_Json]) -> None:
    """Let calls have the callers that they have in the profile, hand-overs left out; events come in order of start."""
    by_record = {_attribute(node, "rf_id")["value"]: node for node in nodes}
    root = next(node["id"] for node in nodes if node["name"].endswith("|thread]"))
    open_calls: dict[Any, list[tuple[float, int]]] = {}
    for event in events:
        node = by_record.get(_record(event) or ABSENT)
        if event.get("ph") != "X" or node is None:
            continue
        stack = open_calls.setdefault(event["tid"], [])
        while stack and float(event["ts"]) >= stack[-1][0]:
            stack.pop()
        node["ctrl_deps"] = stack[-1][1] if stack else root
        stack.append((float(event["ts"]) + float(event["dur"]), node["id"]))


def _tensors(side: _Json) -> list[Tensor]:
    """Return the tensors among a node's values, those in lists included, absent ones not."""
    parts = list_tensors(side["values"], side["shapes"], side["types"])
    return [value for value, _, kind, _ in parts if not kind.startswith(_UNDEFINED)]


def _attribute(node: _Json, name: str) -> _Json:
    return next(entry for entry in node["attrs"] if entry["name"] == name)


def _repair_nodes(nodes: list[_Json], calls: list[_FakeCall]) -> dict[int, str]:
    """Give tensors their storages, place further gradients, drop fake calls; return new names by record id."""
    nodes.sort(key=lambda node: int(_attribute(node, "rf_id")["value"]))
    _join_storages(nodes, calls)
    for node in nodes:
        if node["name"] == _WRITTEN:
            node["outputs"] = copy.deepcopy(node["inputs"])
    by_id = {node["id"]: node for node in nodes}
    fake: set[int] = set()
    for node in nodes:  # what encloses a node comes before it
        if node["name"] == _FAKE or node["ctrl_deps"] in fake:
            fake.add(node["id"])
    views = {
        by_id[by_id[node["ctrl_deps"]]["ctrl_deps"]]["ctrl_deps"]
        for node in nodes
        if node["name"].startswith(_NOTE) and _call_of(node, calls).of_view
    }
    nodes[:] = [node for node in nodes if node["id"] not in fake]
    return _add_in_place([node for node in nodes if node["name"] != _HAND_OVER], by_id, views)


def _call_of(note: _Json, calls: list[_FakeCall]) -> _FakeCall:
    return calls[int(note["name"][len(_NOTE) :])]


def _join_storages(nodes: list[_Json], calls: list[_FakeCall]) -> None:
    """Write its storage's number into every tensor, from the notes of the calls, each from its call on: ids come again."""
    inside: dict[int, list[_Json]] = {}
    for node in nodes:
        inside.setdefault(node["ctrl_deps"], []).append(node)
    number: dict[int, int] = {}  # from 1 on: 0 is an absent tensor's
    storage: dict[tuple[int, ...], int] = {}
    waiting: dict[tuple[int, ...], list[Tensor]] = {}

    def write(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            identity = tensor[0], tensor[3], tensor[4]
            if identity in storage:
                tensor[1] = storage[identity]
            else:  # from before the step: the first call on it shows
                waiting.setdefault(identity, []).append(tensor)

    def note(tensors: list[Tensor], pointers: list[int]) -> None:
        for tensor, pointer in zip(tensors, pointers, strict=True):
            identity = tensor[0], tensor[3], tensor[4]
            storage[identity] = number.setdefault(pointer, len(number) + 1)
            for earlier in waiting.pop(identity, []):
                earlier[1] = storage[identity]

    def visit(node: _Json) -> None:
        if node["name"].startswith(_NOTE):
            note(_tensors(node["inputs"]), _call_of(node, calls).storages)
            return
        write(_tensors(node["inputs"]))
        for child in inside.get(node["id"], []):
            if child is not node:
                visit(child)
        write(_tensors(node["outputs"]))

    ids = {node["id"] for node in nodes}
    for node in nodes:
        if node["ctrl_deps"] not in ids or node["ctrl_deps"] == node["id"]:
            visit(node)
    for place, (_, tensors) in enumerate(sorted(waiting.items())):
        for tensor in tensors:
            tensor[1] = len(number) + 1 + place


def _add_in_place(nodes: list[_Json], by_id: dict[int, _Json], views: set[int]) -> dict[int, str]:
    """Make autograd's additions to gradients that nobody else holds in place; `views`: calls whose first argument is one."""
    last_read = {t[1]: place for place, n in enumerate(nodes) for t in _tensors(n["inputs"])}
    renamed: dict[int, str] = {}
    same: dict[tuple[int, int], Tensor] = {}
    moved: dict[int, int] = {}
    for place, node in enumerate(nodes):
        used, made = _tensors(node["inputs"]), _tensors(node["outputs"])
        held = node["id"] in views or (bool(used) and last_read[used[0][1]] > place)
        for tensor in (*used, *made):
            tensor[:] = same.get((tensor[0], tensor[1]), tensor)
            tensor[1] = moved.get(tensor[1], tensor[1])
        above = by_id.get(node["ctrl_deps"], node)["name"]
        if node["name"] == "aten::add" and above.startswith(_ACCUMULATES) and not held:
            if not _is_dense(node["inputs"]["shapes"][0], node["inputs"]["strides"][0]):
                continue
            node["name"] = "aten::add_"
            renamed[int(_attribute(node, "rf_id")["value"])] = node["name"]
            _attribute(node, "op_schema")["value"] = str(torch.ops.aten.add_.Tensor._schema)
        elif node["name"] != "aten::lift_fresh":  # a number of the program, made a fake tensor
            continue
        same[made[0][0], made[0][1]], moved[made[0][1]] = list(used[0]), used[0][1]
        made[0][:] = used[0]
    return renamed


def _is_dense(shape: list[int], strides: list[int]) -> bool:
    """Return whether a tensor fills its memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


TARGETS = ("cuda", "cpu")
"""Kinds of processor whose operators are captured."""
DEVICE = "meta"
"""The fact ``device`` of such a trace."""
_PLACE = torch.device("cpu")
_FAILURES = (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError, NotImplementedError)
_MOST_CALLS = 40_000
"""Calls of a step given by a configuration, beyond which it loops over tokens, which real runs do in one kernel."""


def capture_meta(row: Mapping[str, Any], batch: int, *, target: str = "cuda", seed: int = 0) -> Trace:
    """Return the operators of one training step without computing it.

    The step of `trioflow.trace.capture.workload.capture_workload` runs on fake tensors, a
    millisecond an operator. ``target``: what operators are for, ``cuda`` or ``cpu``; ``seed`` could
    show in an error only. All but times is as of a capture on one CPU core: ``device`` is ``meta``,
    ``device_name`` and ``step_time_source`` ``none``, ``step_time_s`` 0. Raises InputError when the
    batch is not positive, the target unknown, the row unusable, or a shape depends on values.

    The tensors lie on a CPU: fake ones on ``cuda`` need a PyTorch built with it (in a CPU build
    autograd ends the process). For a GPU the optimizer runs over lists (``foreach``), and attention
    is fused with dropout too; it keeps its CPU name (``..._for_cpu``), with the same work. A number
    asked of a tensor (``item``) is zero unless known without computing; the trace's warnings count
    those.
    """
    if batch < 1:
        raise InputError(f"batch {batch} is not positive")
    if target not in TARGETS:
        raise InputError(f"unknown target {target!r}", fix=f"use {' or '.join(TARGETS)}")
    chosen = {**row, "optimizer": choose_optimizer(str(row["optimizer"]), target)}
    mode = NotingFakeMode()
    if row["family"] == CONFIGURED:
        mode.most_calls = _MOST_CALLS
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        masks: set[bool] = set()
        attention = fused_attention(masks) if target == "cuda" else nullcontext()
        try:
            workload = build_workload(chosen, seed, "meta")
            with mode, attention:
                _move_to_fake(workload.model)
                step = TrainingStep(workload, workload.model, batch, _PLACE, seed)
                step()  # makes the optimizer's states
                profile_fake_step(step, workload.model, mode, folder)
                model = describe_model(workload)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise InputError(
                f"workload {row['workload']}: {error.func} does not run on tensors without values, "
                "and --device meta computes none",
                fix="capture it on a device",
            ) from error
        except _FAILURES as error:
            if row["family"] != CONFIGURED:
                raise
            raise InputError(
                f"{row['model']} does not run on inputs of the sizes in its configuration ({error})"
            ) from error
        found = {"target": target} | ({"causal_attention": masks == {True}} if masks else {})
        described = _describe(row, batch, seed, mode)
        described["warnings"] += workload.notes
        write_json(folder / "environment.json", described | model | found)
        trace = merge_trace(folder)
    trace = _without_times(trace)
    for block, copies in workload.repeats.items():
        trace = repeat_block(trace, block, copies)
    counted = sum(prod(entry["shape"]) for entry in trace.facts.parameters or ())
    if workload.parameters not in (0, counted):
        raise TraceError(f"{counted:,} parameters, and the whole model has {workload.parameters:,}")
    return trace


def fused_attention(masks: set[bool]) -> AbstractContextManager[Any]:
    """Let PyTorch's attention drop nothing: a CPU has no fused one with dropout, a GPU has.

    Values of another size than keys go through cuDNN's kernel, the only fused one of PyTorch that takes them, and so
    does what `torch.nn.attention.sdpa_kernel` leaves to it. Whether the calls are causal goes into ``masks``: no
    operator's shapes say it.
    """
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention

    def fused(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **named: Any,
    ) -> Any:
        masks.add(bool(is_causal))
        backends = torch.backends.cuda
        chosen = backends.cudnn_sdp_enabled() and not backends.flash_sdp_enabled()
        if attn_mask is None and (chosen or query.shape[-1] != value.shape[-1]):
            cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
            return cudnn(query, key, value, None, query.requires_grad, 0.0, is_causal)[0]
        return attention(query, key, value, attn_mask, 0.0, is_causal, **named)

    return mock.patch.object(functional, "scaled_dot_product_attention", fused)


def _move_to_fake(model: torch.nn.Module) -> None:
    """Replace a model's tensors on the meta device by fake ones; shared ones stay shared."""
    known: dict[torch.Tensor, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in known:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_PLACE).requires_grad_(
                tensor.requires_grad
            )
            known[tensor] = (
                torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made
            )
        return known[tensor]

    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in held.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    held[name] = fake(value)


def _describe(row: Mapping[str, Any], batch: int, seed: int, mode: NotingFakeMode) -> dict[str, Any]:
    """Return the facts that do not come from the profile."""
    read = mode.values_read
    asked = f"the step asked tensors for {read} numbers; without computing they are 0"
    return {
        **stamp(torch=str(torch.__version__), seed=seed),
        "batch": batch,
        "device": DEVICE,
        "device_name": "none",
        "workload": str(row["workload"]),
        "row": {key: str(value) for key, value in row.items()},
        **choose_precision(str(row.get("precision") or "fp32"), str(row["workload"])).describe(),
        "optimizer": str(row["optimizer"]),
        "step_time_s": 1.0,  # merging divides by it
        "warnings": [asked] if read else [],
    }


def _without_times(trace: Trace) -> Trace:
    """Return the trace without the times that fake tensors took."""
    number = trace.operators["sequence_number"]  # autograd counts on from step to step
    operators = trace.operators.assign(start_ns=0, device_ns=0, cpu_ns=0, sequence_number=number - number.min())
    facts = replace(
        trace.facts,
        source="capture without data",
        step_time_s=0.0,
        step_time_source=UNTIMED,
        step_times_s=[],
        tail_s=0.0,
        inputs=None,
        profiled_step_s=None,
        profiler_overhead=None,
        span_s=None,
    )
    return Trace(operators, trace.tensors, facts)
