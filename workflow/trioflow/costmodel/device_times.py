"""Traces and a cost model for the device that is asked about, whatever device was traced."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trioflow.costmodel.interface import OperatorModel, RowModel
from trioflow.costmodel.methods import make_unfitted_model
from trioflow.costmodel.new_gpu import retime_trace
from trioflow.costmodel.new_gpu_operators import derive_operator_model
from trioflow.costmodel.overrides import Overrides, override_trace
from trioflow.costmodel.step_precision import class_precision, in_precision
from trioflow.costmodel.timed_trace import time_trace
from trioflow.errors import InputError
from trioflow.hardware.device_names import is_processor
from trioflow.hardware.device_sheet import FALLBACK_PRECISION, DeviceSheet, find_device, find_sheet
from trioflow.trace.facts import UNTIMED
from trioflow.trace.store import Trace

EXTRAPOLATED, UNCALIBRATED = "extrapolated", "uncalibrated"


@dataclass
class DeviceTimes:
    """What a plan on a device is built from.

    Attributes
    ----------
    traces : list of Trace
        With the times of the device asked for, as far as anything tells them.
    model : OperatorModel
        Rescales them to other sizes.
    model_text : str
        Name and method of the model, and what the times rest on.
    confidence : str
        measured, extrapolated (another GPU's trace or no recorded time, with
        an interval from devices or workloads left out) or uncalibrated (another
        processor's, or from elsewhere).
    warnings : list of str
        What the reader must know.
    """

    traces: list[Trace]
    model: OperatorModel
    model_text: str
    confidence: str = "measured"
    warnings: list[str] = field(default_factory=list)

    def doubt(self, confidence: str, warning: str = "") -> None:
        """Lower the confidence, and say why."""
        if self.confidence != UNCALIBRATED:
            self.confidence = confidence
        if warning:
            self.warnings.append(warning)


def prepare_device_times(
    traces: Sequence[Trace],
    device_name: str,
    models: Mapping[str, RowModel],
    *,
    overrides: Overrides | None = None,
) -> DeviceTimes:
    """Bring traces to the device that is asked about, and choose the cost model.

    Parameters
    ----------
    traces : sequence of Trace
        One workload at one or several batches, all recorded or none.
    device_name : str
        Of the platform's device.
    models : mapping of str to RowModel
        The ones to choose from, by the name that they are shown under.
    overrides : Overrides, optional
        Operator times from elsewhere, at the sizes of the one trace.

    Returns
    -------
    DeviceTimes
        The model is the first one of the device. A GPU without one gets the
        model of the GPU nearest to it (`nearest_model`), carried over by the
        new-GPU rule; a processor that of another processor, with a warning. A
        GPU never gets a processor's model.
        Recorded times of another GPU are carried over by the same rule; those
        of a processor stay as they are, with a warning.

    Raises
    ------
    InputError
        When there is no model at all, or none of a GPU for a GPU, none can time
        an untimed trace, or overrides come with several traces.
    PlatformError
        When a GPU has neither a model nor a sheet.
    TraceError
        When a trace of another GPU does not say its precision.
    """
    if not models:
        raise InputError("no operator cost model ships", fix="give one with --cost-model")
    _check_overrides(overrides, traces)
    untimed = [trace.facts.step_time_source == UNTIMED for trace in traces]
    if any(untimed) and not all(untimed):
        raise InputError(
            "some of the traces hold no times", fix="give traces with times, or without"
        )
    precision = str(traces[0].facts.precision or FALLBACK_PRECISION)
    traced = traces[0].facts.device_name
    sheets = find_sheet(traced), find_sheet(device_name)
    same = traced == device_name or (sheets[0] is not None and sheets[0] == sheets[1])
    carried = not (untimed[0] or same or None in sheets)
    lent = not (untimed[0] or same or carried)
    # Times that stay those of the traced device are rescaled by that device's model.
    on_gpu = not is_processor(device_name) if untimed[0] else traces[0].facts.device == "cuda"
    found = choose_operator_model(
        models, traced if lent else device_name, precision, on_gpu, find_mask(traces[0])
    )
    if untimed[0]:
        fitted = class_precision(found.model, "gemm")
        if fitted not in (None, precision):
            found.doubt(
                EXTRAPOLATED,
                f"the cost model knows matrix products in {fitted}, and the trace's run in {precision}: "
                "their times are those of the former",
            )
        _time(found, traces, device_name, sheets[1], overrides)
        return found
    found.traces = list(traces)
    if carried and sheets[1] is not None:
        found.traces = [retime_trace(trace, sheets[1]) for trace in traces]
        found.doubt(EXTRAPOLATED)
    if lent:
        found.doubt(UNCALIBRATED, _of_another(traced, device_name))
    found.model_text += ", anchored on the recorded times" + (f" of {traced}" if carried else "")
    if overrides is not None:
        found.traces = [override_trace(found.traces[0], overrides)]
        found.doubt(UNCALIBRATED)
    return found


def lend_recorded_times(
    traces: Sequence[Trace], name: str, device_name: str, overrides: Overrides | None = None
) -> DeviceTimes:
    """Return the traces as they are, with a model that is made of their own times.

    Parameters
    ----------
    traces, device_name, overrides
        As in :func:`prepare_device_times`.
    name : str
        One of ``methods.UNFITTED``.

    Raises
    ------
    InputError
        When a trace holds no times.
    """
    if any(trace.facts.step_time_source == UNTIMED for trace in traces):
        raise InputError(f"the cost model {name!r} needs a trace with times")
    _check_overrides(overrides, traces)
    given = list(traces)
    found = DeviceTimes(given, make_unfitted_model(name, given), f"{name}, of the recorded times")
    if overrides is not None:
        found.traces = [override_trace(given[0], overrides)]
        found.doubt(UNCALIBRATED)
    traced = given[0].facts.device_name
    if traced != device_name:
        found.doubt(UNCALIBRATED, _of_another(traced, device_name))
    return found


def _check_overrides(overrides: Overrides | None, traces: Sequence[Trace]) -> None:
    """Refuse times for sizes that nobody can tell."""
    if overrides is not None and len(traces) > 1:
        raise InputError(
            f"{len(traces)} traces were given with operator times from elsewhere",
            file=overrides.file, fix="give the one trace whose sizes the times are for",
        )  # fmt: skip


def _of_another(traced: str, device_name: str) -> str:
    return f"compute times are those of the traced device ({traced}), not of {device_name}"


def _time(
    found: DeviceTimes, traces: Sequence[Trace], device_name: str, sheet: DeviceSheet | None,
    overrides: Overrides | None,
) -> None:  # fmt: skip
    """Give untimed traces the times that the model predicts."""
    if found.confidence == UNCALIBRATED:
        raise InputError(
            f"the trace holds no times, and no cost model of {device_name} can predict them",
            fix="choose a platform whose device has one, give one with --cost-model, or capture the "
            "workload on a device",
        )
    found.traces = [
        time_trace(
            trace, found.model, device_name=device_name, overrides=overrides,
            device="cpu" if sheet is None else "cuda",
        ).trace
        for trace in traces
    ]  # fmt: skip
    found.model_text += ", from shapes alone"
    found.doubt(EXTRAPOLATED if overrides is None else UNCALIBRATED)


def choose_operator_model(
    models: Mapping[str, RowModel],
    device_name: str,
    precision: str,
    on_gpu: bool,
    causal: bool | None = None,
) -> DeviceTimes:
    """Return the model of a device, or what comes nearest; without traces yet.

    Raises
    ------
    InputError
        When a GPU has only processors' models to choose from.
    PlatformError
        When a GPU has neither a model nor a sheet.
    """
    sheet = find_sheet(device_name)
    for name, model in models.items():
        if _is_of(model, device_name, sheet):
            own = model if sheet is None else in_precision(model, sheet, precision, causal)
            return DeviceTimes([], own, f"{name} ({_method(own)})")
    if sheet is not None:
        nearest = nearest_model(models, sheet, precision)
        if nearest is not None:
            source = find_device(_device(models[nearest]))
            # Products on tensor cores come from a table; what is carried over is the rest.
            carried = FALLBACK_PRECISION if sheet.runs_on_tensor_cores(precision) else precision
            derived = derive_operator_model(models[nearest], sheet, precision=carried)
            model = in_precision(derived, sheet, precision, causal)
            found = DeviceTimes([], model, f"{nearest} ({_method(model)})")
            found.doubt(
                EXTRAPOLATED,
                f"no cost model of {device_name}: that of {source.driver_name} is carried over by the "
                "rule for new GPUs; a capture on the device itself would replace it",
            )
            return found
    if sheet is not None:
        raise InputError(
            f"no cost model of a GPU for {device_name}: {', '.join(models)} is of a processor",
            fix="leave --cost-model out, or give one of a GPU",
        )
    if on_gpu:
        find_device(device_name)  # it says what to write down, and where
    # A processor lends its shape to processors; a GPU model is the last resort.
    alike = [name for name, model in models.items() if find_sheet(_device(model)) is None]
    name = (alike or list(models))[-1]
    found = DeviceTimes([], models[name], f"{name} ({_method(models[name])}), of another device")
    found.doubt(
        UNCALIBRATED,
        f"no cost model of {device_name}: recorded times are rescaled with the shape of "
        f"{_device(models[name])}'s; fit one with `trioflow fit`",
    )
    return found


def find_mask(trace: Trace) -> bool | None:
    """Return whether a trace's attention is causal, as its capture or its workload says; None unknown."""
    if trace.facts.causal_attention is not None:
        return trace.facts.causal_attention
    said = dict(trace.facts.row or {}).get("causal")
    return {"true": True, "false": False}.get(str(said).lower())


def nearest_model(
    models: Mapping[str, RowModel], target: DeviceSheet, precision: str
) -> str | None:
    """Return the name of the model whose GPU is nearest to a target; None without a GPU's model.

    Notes
    -----
    A board of the same chip is nearer than any other; then the distance is
    that of the logarithms of memory bandwidth and of peak rate at the
    precision. Equal ones in the order of the models.
    """
    known = {name: find_sheet(_device(model)) for name, model in models.items()}

    def distance(sheet: DeviceSheet) -> tuple[bool, float]:
        ratios = (
            sheet.memory_bandwidth_bytes_per_s / target.memory_bandwidth_bytes_per_s,
            sheet.peak(precision) / target.peak(precision),
        )
        return sheet.chip != target.chip, sum(abs(math.log(ratio)) for ratio in ratios)

    near = {name: distance(sheet) for name, sheet in known.items() if sheet is not None}
    return min(near, key=near.__getitem__, default=None)


def _device(model: OperatorModel) -> str:
    return str(getattr(model, "device_name", ""))


def _method(model: OperatorModel) -> str:
    return str(getattr(model, "method", type(model).__name__))


def _is_of(model: OperatorModel, device_name: str, sheet: DeviceSheet | None) -> bool:
    """Tell whether a model is of a device, by name or by its sheet."""
    own = _device(model)
    return own == device_name or (sheet is not None and find_sheet(own) == sheet)
