"""Baselines of public cases: TrioSim's public rules and an analytical model.

What its public code (commit 3fb3c06) printed for its VGG-13 trace (held in
``tests/published/test_triosim_rules.py``): times and tensors are proportional to the batch,
parameters too; a replica's optimizer never waits for communication; any all-reduce takes its bytes
over one bandwidth. Pipelines of several micro-batches, which that code lets a device run at once,
are left out.

Sources: Y. Li et al., "TrioSim", ISCA 2025, https://github.com/sarchlab/triosim; G. Lu et al.,
"DistSim", CF 2023: this analytical model missed its measurements by 26.1 % on average and 40.4 % at
worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError
from trioflow.base.experiments import Plan
from trioflow.costmodel.features import Floats, class_of_name
from trioflow.hardware.device_sheet import DeviceSheet
from trioflow.tables import records
from trioflow.trace.store import Trace, tensor_bytes

_DEFAULT_BANDWIDTH_BYTES_PER_S = 65.0e9
"""What the code takes by default: bytes of an all-reduce or a message over this are its time."""
_TAGGED = ("gemm", "convolution", "convolution_backward")


@dataclass(frozen=True)
class RecordedStep:
    """What the rules read of a trace."""

    time_s: np.ndarray  # recorded times [s]
    output_bytes: np.ndarray  # bytes of all results [bytes]
    # Operators that tensor parallelism divides: products and convolutions that read a parameter,
    # and their gradients.
    tagged: np.ndarray
    forward: np.ndarray  # operators of the forward phase
    parameter_bytes: float  # all parameters [bytes]
    batch: int


def read_recorded_step(trace: Trace) -> RecordedStep:
    """Return what the rules read of a trace; InputError where it holds no times."""
    operators = trace.operators
    timed = operators["device_ns"].to_numpy() > 0
    if not timed.any():
        raise InputError("TrioSim's rules need recorded times", fix="give a trace with times")
    size, category = tensor_bytes(trace), trace.tensors["category"].tolist()
    chosen = operators[timed]
    rows = records(chosen, "op_id", "name", "phase", "input_ids", "output_ids", "forward_op_id")
    tags = dict(_tag(rows, category))
    return RecordedStep(
        chosen["device_ns"].to_numpy(np.float64) * 1e-9,
        np.array([sum(size[i] for i in row["output_ids"]) for row in rows], np.float64),
        np.array([tags[row["op_id"]] for row in rows]),
        (chosen["phase"] == "forward").to_numpy(),
        float(sum(int(entry["size_bytes"]) for entry in trace.facts.gradients)),
        trace.facts.batch,
    )


def _tag(rows: list[dict[str, object]], category: list[str]) -> Iterator[tuple[object, bool]]:
    """Yield each operator's number and whether tensor parallelism divides it."""
    tags: dict[object, bool] = {}
    for row in rows:
        ids = row["input_ids"]
        assert isinstance(ids, list)
        known = any(category[i] == "parameter" for i in ids)
        tag = class_of_name(str(row["name"])) in _TAGGED
        if row["phase"] == "backward":
            known = tags.get(row["forward_op_id"], known)
        tags[row["op_id"]] = tag and known
        yield row["op_id"], tag and known


def predict_by_triosim(
    step: RecordedStep,
    plan: Plan,
    batch: int,
    bandwidth_bytes_per_s: float = _DEFAULT_BANDWIDTH_BYTES_PER_S,
    *,
    overlap: bool = True,
) -> float | None:
    """Return the time of a step by TrioSim's public rules [s]; None for a plan that they do not know.

    ``overlap``: false for its standard data parallelism, which adds the all-reduce. Raises
    InputError when the bandwidth, of every collective and message, is not positive.
    """
    if not bandwidth_bytes_per_s > 0:
        raise InputError(f"{bandwidth_bytes_per_s} bytes/s is not a bandwidth")
    degrees = [d for d in (plan.data, plan.tensor, plan.pipeline) if d > 1]
    if len(degrees) > 1 or plan.sharding != "none" or plan.pieces > 1 or plan.stages_per_rank > 1:
        return None
    factor = batch / plan.data / step.batch
    time_s, bytes_s = factor * step.time_s, factor / bandwidth_bytes_per_s
    whole_s = float(time_s.sum())
    if plan.data > 1 and not overlap:
        return whole_s + step.parameter_bytes * bytes_s
    if plan.tensor > 1:
        cut_s = float(time_s[step.tagged].sum())
        moved = float(step.output_bytes[step.tagged].sum()) / plan.tensor
        return whole_s - cut_s + cut_s / plan.tensor + moved * bytes_s
    if plan.pipeline > 1:
        crossing = sum(_crossing_bytes(step, where, plan.pipeline) for where in (True, False))
        return whole_s + crossing * bytes_s
    return whole_s


def _crossing_bytes(step: RecordedStep, forward: bool, stages: int) -> float:
    """Return the results of each stage's last operator; stages hold equally many operators."""
    sent = step.output_bytes[step.forward == forward]
    ends = [stage * len(sent) // stages for stage in range(1, stages)]
    return float(sum(sent[end - 1] for end in ends if end))


@dataclass(frozen=True)
class AnalyticalModel:
    """A device by its rates alone: an operator model without coefficients."""

    # Rate of arithmetic [flop/s] and bandwidth of memory [bytes/s].
    flop_per_s: float
    bytes_per_s: float
    device_name: str  # device that the rates are of
    source: str
    by_row: ClassVar[bool] = True

    @classmethod
    def of_sheet(cls, sheet: DeviceSheet, precision: str) -> AnalyticalModel:
        """Return the model of a data sheet, with products in a precision."""
        peak = sheet.peak(precision)
        return cls(peak, sheet.memory_bandwidth_bytes_per_s, sheet.driver_name, "data-sheet rates")

    def time_operators(self, operators: pd.DataFrame) -> Floats:
        """Return work over rate plus bytes over bandwidth [s], shape (operators,)."""
        flop = operators["flop"].to_numpy(np.float64)
        moved = (operators["read_bytes"] + operators["write_bytes"]).to_numpy(np.float64)
        return flop / self.flop_per_s + moved / self.bytes_per_s

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Return the operators' times, without an interval."""
        time_s = self.time_operators(operators)
        columns = {"time_s": time_s, "low_s": time_s, "high_s": time_s, "extrapolated": False}
        return pd.DataFrame(columns, index=operators.index)

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Return the same at the target's sizes; recorded times do not count."""
        return self.predict(target)

    def step_interval(
        self, kind: str = "rescale", distance: float | None = None
    ) -> tuple[float, float]:
        """Return no interval: rates say nothing of their error."""
        return (1.0, 1.0)

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Return that the interval rests on nothing."""
        return f"none: {self.source}"

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Refuse: there are no coefficients."""
        raise InputError("this operator model has no file", file=path, fix="name it instead")
