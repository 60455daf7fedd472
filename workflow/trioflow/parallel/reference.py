"""The operators that a plan starts from, and their times at other sizes: what grows with the batch, what stays.

Of several traces `choose_reference` takes the batch nearest to what is needed. Their times are recorded, or those that
``costmodel.choices`` predicted for another device, which stand in the same columns. `PricedModel` resizes them with
a cost model. Parameters, gradients, optimizer state and the operators on them never scale with the batch; activations
do. The operator table keeps the two parts apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trioflow.base.columns import Columns, Texts
from trioflow.base.derived import Derives, derived
from trioflow.base.errors import PlanError, TraceError
from trioflow.costmodel.choices import host_times, rescale_distinct
from trioflow.costmodel.features import WORK, OperatorModel, price_columns, resize_batch
from trioflow.parallel.model_graph import ModelGraph, of_model
from trioflow.parallel.splits.tensor_split import Shares, TensorSplit, scale_operator_rows
from trioflow.trace.store import Trace


class Reference(Derives, Struct, frozen=True, eq=False, dict=True):
    """Recorded operators to start from."""

    trace: ModelGraph  # the trace nearest in batch; its tensors give the sizes of messages
    # Its operators: as recorded, or, between two traces, at the wanted batch
    operators: Columns
    batch: float  # samples that ``operators`` stand for
    # Batch of each trace used to the share of the step's time that it decides
    shares: dict[int, float]

    def price(self, model: OperatorModel) -> PricedModel:
        """Return its operators with what predicts them at other sizes, the same object while the model is the same."""
        known: PricedModel | None = self.results.get("priced")
        if known is None or known.model is not model:
            known = self.results["priced"] = PricedModel(self, model)
        return known


def choose_reference(traces: Sequence[Trace], batch: float) -> Reference:
    """Return the operators to extrapolate from at some batch; PlanError when traces are of different workloads or devices.

    Between two traces of the same operators each time is interpolated linearly in the batch. Otherwise the nearest
    trace is taken as recorded, the larger of two equally near (by ratio), as a small batch hides what grows.
    """
    _check_same(traces)
    first, *others = map(ModelGraph.of, traces)
    return _choose_reference(first, others, batch)


@derived()
def _choose_reference(first: ModelGraph, others: Sequence[ModelGraph], batch: float) -> Reference:
    ordered = sorted([first, *others], key=lambda t: t.facts.batch)
    nearest = min(reversed(ordered), key=lambda t: round(abs(float(np.log(batch / t.facts.batch))), 9))
    traced = nearest.facts.batch
    lower = [t for t in ordered if t.facts.batch < batch]
    upper = [t for t in ordered if t.facts.batch > batch]
    if traced == batch or not lower or not upper:
        return Reference(nearest, nearest.operator_columns, traced, {traced: 1.0})
    low, high = lower[-1], upper[0]
    if low.operator_columns["name"].tolist() != high.operator_columns["name"].tolist():
        return Reference(nearest, nearest.operator_columns, traced, {traced: 1.0})
    span = high.facts.batch - low.facts.batch
    weight = float((batch - low.facts.batch) / span)
    mixed = {
        name: ((1 - weight) * low.operator_columns[name] + weight * high.operator_columns[name])
        .round()
        .astype(np.int64)
        for name in ("device_ns", "cpu_ns")
    }
    operators = resize_batch(nearest.operator_columns, batch / traced).assign(**mixed)
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


@of_model
def without_communication(trace: ModelGraph) -> ModelGraph:
    """Return a trace whose communication takes no time: a plan brings its own, so a parallel run's must not count."""
    communicates = trace.operator_columns["kind"].isin(["collective"])
    if not communicates.any():
        return trace
    if communicates.all():
        raise TraceError(
            f"the trace of {trace.facts.workload} holds messages alone: no plan can be made of it",
            fix="simulate it with --as-traced",
        )
    operators = _silence(trace.operator_columns, ("device_ns", "cpu_ns"))
    warning = f"{int(communicates.sum())} communication operators of the traced run are left out"
    facts = replace(trace.facts, warnings=[*trace.facts.warnings, warning])
    return trace.replace(facts, operators)


def silence_messages(trace: Trace) -> Trace:
    """Return a trace whose rows of communication take no device and do no work."""
    return trace.replace(trace.facts, _silence(trace.operator_columns, ("device_ns", *WORK)))


def _silence(operators: Columns, names: Sequence[str]) -> Columns:
    """Return operators in which some columns of the communication are 0."""
    others = ~operators["kind"].isin(["collective"])
    return operators.assign(**{name: operators[name] * others for name in names})


class OperatorTimes(Struct, dict=True):
    """Times of the operators at one micro-batch's size."""

    # Time on the device and host time before it [s] [operators]
    device_s: NDArray[np.float64]
    host_s: NDArray[np.float64]
    separate_host: bool  # whether the host runs beside the device (a GPU) or is the device (a CPU)

    @cached_property
    def lists(self) -> tuple[list[float], list[float]]:
        """The same two as lists, of which one operator is read sooner."""
        return self.device_s.tolist(), self.host_s.tolist()


class PricedModel(Derives, Struct, frozen=True, eq=False, dict=True):
    """Operators to start from, and the model that predicts their times at other sizes."""

    reference: Reference
    model: OperatorModel

    def predict_times(
        self, split: TensorSplit, factors: Sequence[float], launch_s: float
    ) -> tuple[list[OperatorTimes], bool]:
        """Return the times of a rank's operators for each micro-batch, and whether any is out of the model's range."""
        of_factors = [self._predict_for(split, factor, launch_s) for factor in factors]
        return [times for times, _ in of_factors], any(beyond for _, beyond in of_factors)

    @derived()
    def _predict_for(self, split: TensorSplit, factor: float, launch_s: float) -> tuple[OperatorTimes, bool]:
        trace, recorded = self.reference.trace, self.reference.operators
        host_s = host_times(trace, recorded, launch_s)
        device_s, beyond = predict_operator_times(recorded, resize_batch(split.operators, factor), self.model)
        return OperatorTimes(device_s, host_s, trace.facts.device == "cuda"), beyond

    @derived()
    def predict_updates(self, split: TensorSplit, parts: Sequence[Shares]) -> list[dict[int, float]]:
        """Return the time of some optimizer operators for each of several shares of their work [s]."""
        chosen = [list(shares) for shares in parts]
        if not any(chosen):
            return [{} for _ in parts]
        ops = [op for of_part in chosen for op in of_part]
        factors = np.array([share for shares in parts for share in shares.values()], dtype=float)
        before, after = (table.take(np.array(ops)) for table in (self.reference.operators, split.operators))
        after = scale_operator_rows(after, np.arange(len(ops)), factors)
        device_s, _ = predict_operator_times(before, after, self.model)
        times = iter(device_s.tolist())
        return [{op: next(times) for op in of_part} for of_part in chosen]

    @derived()
    def predict_elementwise(self, name: str, sizes: Sequence[int], reads: int) -> Columns:
        """Predict one element-wise operator over gradients of some sizes [bytes]: columns of `OperatorModel`.

        On a CPU the optimizer's class predicts what happens to gradients. On a GPU that class holds calls over lists of
        tensors, some 30 us each, which no copy is: there the phase is forward.
        """
        count, none = len(sizes), np.zeros(len(sizes), dtype=np.int64)
        phase = "forward" if self.reference.trace.facts.device == "cuda" else "optimizer"
        shapes = np.fromiter(([[size // 4]] for size in sizes), dtype=object, count=count)
        rows = Columns(
            {
                **{
                    column: Texts.of([word] * count)
                    for column, word in (("name", name), ("phase", phase), ("module", ""))
                },
                **dict.fromkeys(("flop", "kernels"), none),
                "read_bytes": reads * np.array(sizes, dtype=np.int64),
                "write_bytes": np.array(sizes, dtype=np.int64),
                "input_shapes": np.fromiter((shape * reads for shape in shapes), dtype=object, count=count),
                "output_shapes": shapes,
                "dtype": Texts.of(["float"] * count),
            }
        )
        return price_columns(self.model, rows)


def predict_operator_times(
    operators: Columns, target: Columns, model: OperatorModel
) -> tuple[NDArray[np.float64], bool]:
    """Return each operator's device time at the target work [s], and whether any is out of range; host time does not scale."""
    prices = rescale_distinct(model, operators, target)
    return prices["time_s"], bool(prices["extrapolated"].any())
