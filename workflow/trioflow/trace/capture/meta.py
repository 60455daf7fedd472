"""The operator graph of a training step without a device: shapes and work, no times."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from trioflow.base.errors import InputError
from trioflow.base.provenance import stamp, write_json
from trioflow.trace.capture.fake_profile import NotingFakeMode, profile_fake_step
from trioflow.trace.capture.training_step import TrainingStep
from trioflow.trace.capture.workload import describe_model
from trioflow.trace.facts import UNTIMED
from trioflow.trace.profile.merge import merge_trace
from trioflow.trace.store import Trace
from trioflow.trace.workloads.build import build_workload
from trioflow.trace.workloads.precision import choose_optimizer, choose_precision

TARGETS = ("cuda", "cpu")
"""Kinds of processor whose operators are captured."""
DEVICE = "meta"
"""The fact ``device`` of such a trace."""
_PLACE = torch.device("cpu")


def capture_meta(
    row: Mapping[str, Any], batch: int, *, target: str = "cuda", seed: int = 0
) -> Trace:
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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        masks: set[bool] = set()
        attention = fused_attention(masks) if target == "cuda" else nullcontext()
        try:
            model = _profile(chosen, batch, seed, mode, attention, folder)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
        ) as error:
            raise InputError(
                f"workload {row['workload']}: {error.func} does not run on tensors without values, "
                "and --device meta computes none",
                fix="capture it on a device",
            ) from error
        found = {"target": target} | ({"causal_attention": masks == {True}} if masks else {})
        write_json(folder / "environment.json", _describe(row, batch, seed, mode) | model | found)
        trace = merge_trace(folder)
    return _without_times(trace)


def _profile(
    row: Mapping[str, Any], batch: int, seed: int, mode: NotingFakeMode,
    attention: AbstractContextManager[None], folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Run a step on fake tensors under the profiler; return the facts of its model."""
    workload = build_workload(row, seed, "meta")
    with mode, attention:
        _move_to_fake(workload.model)
        step = TrainingStep(workload, workload.model, batch, _PLACE, seed)
        step()  # makes the optimizer's states
        profile_fake_step(step, workload.model, mode, folder)
        return describe_model(workload)


@contextmanager
def fused_attention(masks: set[bool]) -> Iterator[None]:
    """Let PyTorch's attention drop nothing: a CPU has no fused one with dropout, a GPU has.

    Values of another size than keys go through cuDNN's kernel, the only fused one of PyTorch that takes them, and so
    does what `torch.nn.attention.sdpa_kernel` leaves to it. Whether the calls are causal goes into ``masks``: no
    operator's shapes say it.
    """
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention

    def fused(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **named: Any,
    ) -> Any:  # fmt: skip
        masks.add(bool(is_causal))
        backends = torch.backends.cuda
        chosen = backends.cudnn_sdp_enabled() and not backends.flash_sdp_enabled()
        if attn_mask is None and (chosen or query.shape[-1] != value.shape[-1]):
            cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
            return cudnn(query, key, value, None, query.requires_grad, 0.0, is_causal)[0]
        return attention(query, key, value, attn_mask, 0.0, is_causal, **named)

    functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = attention


def _move_to_fake(model: torch.nn.Module) -> None:
    """Replace a model's tensors on the meta device by fake ones; shared ones stay shared."""
    known: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_PLACE
            ).requires_grad_(tensor.requires_grad)
            known[id(tensor)] = (
                torch.nn.Parameter(made, tensor.requires_grad)
                if isinstance(tensor, torch.nn.Parameter)
                else made
            )
        return known[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in held.items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    held[name] = fake(value)


def _describe(
    row: Mapping[str, Any], batch: int, seed: int, mode: NotingFakeMode
) -> dict[str, Any]:
    """Return the facts that do not come from the profile."""
    warnings = []
    if mode.values_read:
        warnings.append(
            f"the step asked tensors for {mode.values_read} numbers; without computing they are 0"
        )
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
        "warnings": warnings,
    }


def _without_times(trace: Trace) -> Trace:
    """Return the trace without the times that fake tensors took."""
    number = trace.operators["sequence_number"]  # autograd counts on from step to step
    operators = trace.operators.assign(
        start_ns=0, device_ns=0, cpu_ns=0, sequence_number=number - number.min()
    )
    facts = replace(
        trace.facts, source="capture without data", step_time_s=0.0, step_time_source=UNTIMED,
        step_times_s=[], tail_s=0.0, inputs=None, profiled_step_s=None, profiler_overhead=None, span_s=None,
    )  # fmt: skip
    return Trace(operators, trace.tensors, facts)
