"""Recorded times nearest to what a plan needs, and the work of operators at another size: what grows, what stays.

Parameters, gradients, optimizer state and the operators on them never scale with the batch; activations do. The
operator table keeps the two parts apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.errors import PlanError, TraceError
from trioflow.costmodel.device_times import host_times, rescale_distinct
from trioflow.costmodel.features import FEATURES, OperatorModel, resize_batch
from trioflow.parallel.remembered import remembered
from trioflow.trace.store import Trace


@dataclass(frozen=True)
class Reference:
    """Recorded operators to start from."""

    trace: Trace  # the trace nearest in batch; its tensors give the sizes of messages
    # Its operators: as recorded, or, between two traces, at the wanted batch
    operators: pd.DataFrame
    batch: float  # samples that ``operators`` stand for
    # Batch of each trace used to the share of the step's time that it decides
    shares: dict[int, float]


@remembered
def choose_reference(traces: Sequence[Trace], batch: float) -> Reference:
    """Return the operators to extrapolate from at some batch; PlanError when traces are of different workloads or devices.

    Between two traces of the same operators each time is interpolated linearly in the batch. Otherwise the nearest
    trace is taken as recorded, the larger of two equally near (by ratio), as a small batch hides what grows.
    """
    _check_same(traces)
    ordered = sorted(traces, key=lambda t: t.facts.batch)
    nearest = min(reversed(ordered), key=lambda t: round(abs(float(np.log(batch / t.facts.batch))), 9))
    traced = nearest.facts.batch
    lower = [t for t in ordered if t.facts.batch < batch]
    upper = [t for t in ordered if t.facts.batch > batch]
    if traced == batch or not lower or not upper:
        return Reference(nearest, nearest.operators, traced, {traced: 1.0})
    low, high = lower[-1], upper[0]
    if low.operators["name"].tolist() != high.operators["name"].tolist():
        return Reference(nearest, nearest.operators, traced, {traced: 1.0})
    span = high.facts.batch - low.facts.batch
    weight = float((batch - low.facts.batch) / span)
    operators = resize_batch(nearest.operators, batch / traced)
    for column in ("device_ns", "cpu_ns"):
        mixed = (1 - weight) * low.operators[column] + weight * high.operators[column]
        operators[column] = mixed.round().astype("int64")
    parts = {
        low.facts.batch: (1 - weight) * float(low.facts.step_time_s),
        high.facts.batch: weight * float(high.facts.step_time_s),
    }
    total = sum(parts.values())
    return Reference(nearest, operators, batch, {b: part / total for b, part in parts.items()})


def _check_same(traces: Sequence[Trace]) -> None:
    """Refuse traces that do not show one workload on one device."""
    for key in ("workload", "device_name", "precision", "optimizer"):
        values = {str(getattr(trace.facts, key) or "") for trace in traces}
        if len(values) > 1:
            raise PlanError(
                f"the traces differ in {key}: {', '.join(sorted(values))}",
                fix="give traces of one workload on one device, at different batches",
            )


@remembered
def without_communication(trace: Trace) -> Trace:
    """Return a trace whose communication takes no time: a plan brings its own, so a parallel run's must not count."""
    communicates = trace.operators["kind"] == "collective"
    if not communicates.any():
        return trace
    if communicates.all():
        raise TraceError(
            f"the trace of {trace.facts.workload} holds messages alone: no plan can be made of it",
            fix="simulate it with --as-traced",
        )
    operators = trace.operators.copy()
    operators.loc[communicates, ["device_ns", "cpu_ns"]] = 0
    warning = f"{int(communicates.sum())} communication operators of the traced run are left out"
    facts = replace(trace.facts, warnings=[*trace.facts.warnings, warning])
    return Trace(operators, trace.tensors, facts)


def silence_messages(trace: Trace) -> Trace:
    """Return a trace whose rows of communication take no device and do no work."""
    operators = trace.operators.copy()
    columns = ["device_ns", *FEATURES, *(f"batch_{name}" for name in FEATURES)]
    operators.loc[operators["kind"] == "collective", columns] = 0
    return Trace(operators, trace.tensors, trace.facts)


@dataclass
class OperatorTimes:
    """Times of the operators at one micro-batch's size."""

    # Time on the device and host time before it [s] [operators]
    device_s: NDArray[np.float64]
    host_s: NDArray[np.float64]
    separate_host: bool  # whether the host runs beside the device (a GPU) or is the device (a CPU)


def predict_times(
    reference: Reference, operators: pd.DataFrame, factors: Sequence[float], model: OperatorModel, launch_s: float
) -> tuple[list[OperatorTimes], bool]:
    """Return the times of a rank's operators for each micro-batch, and whether any is out of the model's range."""
    found = {f: _predict_for(reference, operators, f, model, launch_s) for f in set(factors)}
    return [found[factor][0] for factor in factors], any(beyond for _, beyond in found.values())


@remembered
def _predict_for(
    reference: Reference, operators: pd.DataFrame, factor: float, model: OperatorModel, launch_s: float
) -> tuple[OperatorTimes, bool]:
    """Return the operators' times for one micro-batch, and whether any is out of the model's range."""
    host_s = host_times(reference.trace, reference.operators, launch_s)
    target = resize_batch(operators, factor)
    device_s, beyond = predict_operator_times(reference.operators, target, model)
    return OperatorTimes(device_s, host_s, reference.trace.facts.device == "cuda"), beyond


def predict_operator_times(
    operators: pd.DataFrame, target: pd.DataFrame, model: OperatorModel
) -> tuple[NDArray[np.float64], bool]:
    """Return each operator's device time at the target work [s], and whether any is out of range; host time does not scale."""
    predicted = rescale_distinct(model, operators, target)
    return predicted["time_s"].to_numpy(dtype=np.float64), bool(predicted["extrapolated"].any())
