"""The operators of a training step without a device, on fake tensors: shapes and work, no times; `capture_meta` is the door.

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

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
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
from trioflow.base.provenance import stamp
from trioflow.base.settings import CONFIGURED
from trioflow.trace.assemble import assemble_trace
from trioflow.trace.capture.workload import TrainingStep, describe_model, profile_with_tensors
from trioflow.trace.facts import UNTIMED
from trioflow.trace.profile.execution_trace import UNDEFINED, Links, Node, link_nodes, read_nodes
from trioflow.trace.profile.kineto import Profile, read_profile
from trioflow.trace.profile.merge import coverage_of, observe_step
from trioflow.trace.profile.steps import StepEvents, find_spans, load_step
from trioflow.trace.repeat import repeat_block
from trioflow.trace.store import Trace
from trioflow.trace.tensors import TensorRef
from trioflow.trace.workloads.build import build_workload, choose_optimizer, choose_precision

_DEVICE = torch.ops.prim.device.default
_GROUPED = torch.ops.aten._grouped_mm.default
_HAND_OVER = "PythonDispatchMode"
"""What the profiler calls PyTorch's hand-over of a call to fake tensors."""
_FAKE, _NOTE = "trioflow: fake call", "trioflow: tensors of fake call "
_WRITTEN = "trioflow: written by fake call"
_ZERO = {torch.bool: False, torch.complex64: 0j, torch.complex128: 0j}
_ACCUMULATES = "autograd::engine::evaluate_function: "
_Identity = tuple[int, int, int]
"""Number of a tensor, its elements, and the bytes of each."""


@dataclass(frozen=True)
class _FakeCall:
    """One call on fake tensors."""

    storages: list[int]  # address of the storage of each of its tensors, arguments first
    keeps_first: bool  # whether its first argument is a view, which holds what it is a view of, or has gaps


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
                keeps = bool(used) and (used[0]._is_view() or not _is_dense(used[0]))
                self.calls.append(_FakeCall([storage._cdata for storage in storages], keeps))
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
        if func is _GROUPED and args[0].dtype is not torch.bfloat16:  # PyTorch's rule for its shape knows bf16 alone
            halves = [tensor.to(torch.bfloat16) for tensor in args[:2]]
            return super().__torch_dispatch__(func, types, (*halves, *args[2:]), kwargs).to(args[0].dtype)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            self.values_read += 1
            return _ZERO.get(args[0].dtype, 0.0 if args[0].dtype.is_floating_point else 0)


def _tensor_leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps or overlaps."""
    steps = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    filled = accumulate((size for _, size in steps), mul, initial=1)
    return [stride for stride, _ in steps] == [*filled][: len(steps)]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that a call writes into."""
    given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    marked = (a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write)
    return _tensor_leaves([given[name] for name in marked if name in given])


def profile_fake_step(
    run: Callable[[], None], model: torch.nn.Module, mode: NotingFakeMode
) -> tuple[StepEvents, Links]:
    """Profile one step inside a fake mode; return its events, and the node of each with its tensors."""
    with tempfile.TemporaryDirectory() as temporary:
        nodes_file, events_file = Path(temporary) / "nodes.json", Path(temporary) / "events.json"
        mode.calls = []
        profiler = profile_with_tensors(run, model, nodes_file)
        calls, mode.calls = mode.calls, None
        profiler.export_chrome_trace(str(events_file))
        profile, nodes = read_profile(events_file), read_nodes(nodes_file)
    profile.drop(_find_fakes(profile))
    step = load_step(profile, find_spans(profile)[0])
    renamed = _repair_nodes(nodes, calls)
    for event in step.root.walk():
        event.name = renamed.get(event.record_id, event.name)
    return step, link_nodes(list(step.root.walk()), nodes)


def _find_fakes(profile: Profile) -> NDArray[np.bool_]:
    """Return which events are hand-overs, or what fake tensors do inside them; annotations are kept."""
    calls, threads = profile.is_category("cpu_op"), profile.columns["thread"]
    fakes, inside = profile.is_named(_FAKE), profile.is_named(_HAND_OVER)
    for thread in np.unique(threads):
        ends_ns = np.where(fakes & (threads == thread), profile.end_ns, -1)
        inside |= (threads == thread) & (profile.end_ns <= np.maximum.accumulate(ends_ns))
    return calls & inside


def _list_defined(refs: Sequence[TensorRef]) -> list[tuple[int, TensorRef]]:
    """Return the tensors that are there, with their places."""
    return [(place, ref) for place, ref in enumerate(refs) if ref.dtype not in UNDEFINED]


def _repair_nodes(nodes: list[Node], calls: list[_FakeCall]) -> dict[int | None, str]:
    """Give tensors their storages, and place further gradients; return new names by record id."""
    nodes.sort(key=lambda node: node.record_id)
    _join_storages(nodes, calls)
    for node in nodes:
        if node.name == _WRITTEN:
            node.outputs = [*node.inputs]
    by_id = {node.node_id: node for node in nodes}
    fake: set[int] = set()
    for node in nodes:  # what encloses a node comes before it
        if node.name == _FAKE or node.parent in fake:
            fake.add(node.node_id)
    keeping = {
        by_id[by_id[node.parent].parent].parent
        for node in nodes
        if node.name.startswith(_NOTE) and _call_of(node, calls).keeps_first
    }
    real = [node for node in nodes if node.node_id not in fake and node.name != _HAND_OVER]
    return _add_in_place(real, by_id, keeping)


def _call_of(note: Node, calls: list[_FakeCall]) -> _FakeCall:
    return calls[int(note.name[len(_NOTE) :])]


def _join_storages(nodes: list[Node], calls: list[_FakeCall]) -> None:
    """Write its storage's number into every tensor, from the notes of the calls, each from its call on: ids come again."""
    inside: dict[int, list[Node]] = {}
    for node in nodes:
        inside.setdefault(node.parent, []).append(node)
    number: dict[int, int] = {}  # from 1 on: 0 is an absent tensor's
    storage: dict[_Identity, int] = {}
    waiting: dict[_Identity, list[tuple[list[TensorRef], int]]] = {}

    def identify(ref: TensorRef) -> _Identity:
        return ref.tensor, prod(ref.shape), ref.elem_bytes

    def write(refs: list[TensorRef]) -> None:
        for place, ref in _list_defined(refs):
            if identify(ref) in storage:
                refs[place] = replace(ref, storage=storage[identify(ref)])
            else:  # from before the step: the first call on it shows
                waiting.setdefault(identify(ref), []).append((refs, place))

    def settle(identity: _Identity, own: int) -> None:
        storage[identity] = own
        for refs, place in waiting.pop(identity, []):
            refs[place] = replace(refs[place], storage=own)

    def visit(node: Node) -> None:
        if node.name.startswith(_NOTE):
            pointers = _call_of(node, calls).storages
            for (_, ref), pointer in zip(_list_defined(node.inputs), pointers, strict=True):
                settle(identify(ref), number.setdefault(pointer, len(number) + 1))
            return
        write(node.inputs)
        for child in inside.get(node.node_id, []):
            if child is not node:
                visit(child)
        write(node.outputs)

    ids = {node.node_id for node in nodes}
    for node in nodes:
        if node.parent not in ids or node.parent == node.node_id:
            visit(node)
    for place, identity in enumerate(sorted(waiting)):
        settle(identity, len(number) + 1 + place)


def _add_in_place(nodes: list[Node], by_id: dict[int, Node], keeping: set[int]) -> dict[int | None, str]:
    """Make autograd's additions to gradients that nobody else holds in place, but for calls that keep their first argument."""
    last_read = {ref.storage: place for place, node in enumerate(nodes) for _, ref in _list_defined(node.inputs)}
    renamed: dict[int | None, str] = {}
    same: dict[tuple[int, int], tuple[int, int]] = {}
    moved: dict[int, int] = {}
    for place, node in enumerate(nodes):
        first = next((ref for _, ref in _list_defined(node.inputs)), None)
        is_kept = node.node_id in keeping or (first is not None and last_read[first.storage] > place)
        for refs in (node.inputs, node.outputs):
            for at, ref in _list_defined(refs):
                tensor, storage = same.get((ref.tensor, ref.storage), (ref.tensor, ref.storage))
                refs[at] = replace(ref, tensor=tensor, storage=moved.get(storage, storage))
        above = by_id.get(node.parent, node).name
        if node.name == "aten::add" and above.startswith(_ACCUMULATES) and not is_kept:
            node.name = renamed[node.record_id] = "aten::add_"
            node.schema = str(torch.ops.aten.add_.Tensor._schema)
        elif node.name != "aten::lift_fresh":  # a number of the program, made a fake tensor
            continue
        (_, used), *_ = _list_defined(node.inputs)
        (at, made), *_ = _list_defined(node.outputs)
        same[made.tensor, made.storage], moved[made.storage] = (used.tensor, used.storage), used.storage
        node.outputs[at] = replace(made, tensor=used.tensor, storage=used.storage)
    return renamed


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
    masks: set[bool] = set()
    attention = fused_attention(masks) if target == "cuda" else nullcontext()
    try:
        workload = build_workload(chosen, seed, "meta")
        with mode, attention:
            _move_to_fake(workload.model)
            run = TrainingStep(workload, workload.model, batch, _PLACE, seed)
            run()  # makes the optimizer's states
            step, links = profile_fake_step(run, workload.model, mode)
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
    seen = observe_step(step, links)
    read = [f"the step asked tensors for {mode.values_read} numbers; without computing they are 0"]
    facts = {
        **stamp(torch=str(torch.__version__), seed=seed),
        "inputs": None,
        "source": "capture without data",
        "batch": batch,
        "device": DEVICE,
        "device_name": "none",
        "workload": str(row["workload"]),
        "row": {key: str(value) for key, value in row.items()},
        **choose_precision(str(row.get("precision") or "fp32"), str(row["workload"])).describe(),
        "optimizer": str(row["optimizer"]),
        "step_time_s": 0.0,
        "step_time_source": UNTIMED,
        "step_times_s": [],
        "tail_s": 0.0,
        **model,
        "target": target,
        **({"causal_attention": masks == {True}} if masks else {}),
        **coverage_of(step),
        "span_s": None,
        "operators_without_tensors": seen.without_tensors,
        "unjoined": seen.unjoined,
        "warnings": [*(read if mode.values_read else ()), *workload.notes, *seen.unjoined, *seen.notes],
    }
    trace = assemble_trace(seen.operators, facts, ready=seen.ready, file=str(row["workload"]))
    number = trace.operators["sequence_number"]  # autograd counts on from step to step
    trace = Trace(trace.operators.assign(sequence_number=number - number.min()), trace.tensors, trace.facts)
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
        for attributes in (module._parameters, module._buffers, vars(module)):
            for name, value in attributes.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    attributes[name] = fake(value)
