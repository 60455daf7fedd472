"""The recorded times nearest to what a plan needs, when a workload was traced at several batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from trioflow.errors import PlanError
from trioflow.parallel.remembered import remembered
from trioflow.parallel.sizing import resize_batch
from trioflow.trace.store import Trace


@dataclass(frozen=True)
class Reference:
    """Recorded operators to start from.

    Attributes
    ----------
    trace : Trace
        The trace nearest in batch; its tensors give the sizes of messages.
    operators : DataFrame
        Its operators: as recorded, or, between two traces, at the wanted batch.
    batch : float
        Samples that ``operators`` stand for.
    shares : dict of int to float
        Batch of each trace used to the share of the step's time that it decides.
    """

    trace: Trace
    operators: pd.DataFrame
    batch: float
    shares: dict[int, float]


@remembered
def choose_reference(traces: Sequence[Trace], batch: float) -> Reference:
    """Return the operators to extrapolate from at some batch.

    Between two traces that ran the same operators, each operator's time is
    interpolated linearly in the batch: a part that does not grow and one that
    does. Otherwise the nearest trace is taken as recorded, the larger of two
    equally near (by ratio), because a small batch hides what grows.

    Parameters
    ----------
    traces : sequence of Trace
        One workload on one device, at different batches.
    batch : float
        Samples of one forward pass.

    Raises
    ------
    PlanError
        When the traces are of different workloads or devices.
    """
    _check_same(traces)
    ordered = sorted(traces, key=lambda t: t.facts.batch)
    nearest = min(
        reversed(ordered), key=lambda t: round(abs(float(np.log(batch / t.facts.batch))), 9)
    )
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
