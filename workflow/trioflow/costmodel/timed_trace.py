"""Times for a trace that has none: an operator graph captured without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from trioflow.costmodel.features import Floats
from trioflow.costmodel.interface import OperatorModel
from trioflow.costmodel.intervals import WIDEST_FACTOR, combine_intervals
from trioflow.costmodel.new_gpu import new_gpu_interval
from trioflow.costmodel.overrides import Overrides, apply_overrides
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace
from trioflow.units import ns_to_s, s_to_ns

PREDICTED = "predicted"
"""The fact ``step_time_source`` of a trace whose times a model gave."""
NO_HOST = "; host time is not part of them"
"""How the warning of such times ends where the platform does not say what a launch takes."""


@dataclass(frozen=True)
class TimedTrace:
    """A trace with predicted times, and how sure they are.

    Attributes
    ----------
    trace : Trace
        ``device_ns`` of every operator is predicted, ``cpu_ns`` is 0; its step
        time is their sum.
    times : DataFrame
        ``time_s``, ``low_s``, ``high_s`` [s] and ``extrapolated`` of every operator.
    low_s, high_s : float
        80 % interval of the sum [s].
    """

    trace: Trace
    times: pd.DataFrame
    low_s: float
    high_s: float


def time_trace(
    trace: Trace,
    model: OperatorModel,
    *,
    device_name: str | None = None,
    overrides: Overrides | None = None,
    device: str = "cuda",
) -> TimedTrace:
    """Predict the time of every operator of a trace.

    Parameters
    ----------
    trace : Trace
        Its own times, if it has any, are not read.
    model : OperatorModel
        Predicts from names, shapes and sizes.
    device_name : str, optional
        Device that the times are of; the model's by default.
    overrides : Overrides, optional
        Times that come from elsewhere.
    device : {"cuda", "cpu"}
        Kind of device that the times are of.

    Raises
    ------
    InputError
        When the model cannot predict without recorded times, or an override
        fits no operator.

    Notes
    -----
    The interval of the sum is the held-out error of whole steps that the model
    predicted from shapes alone, joined with that of the operators which nobody
    measured alike: those err together. On a GPU, what moves no byte (a view, say)
    launches no kernel and takes no time. Host time is not part of it: what the
    device computes is a lower bound of the step where launches are slower.
    """
    times = model.predict(trace.operators)
    if device == "cuda":
        work = trace.operators[["flop", "read_bytes", "write_bytes"]].to_numpy()
        times.loc[(work == 0).all(axis=1), ["time_s", "low_s", "high_s"]] = 0.0
    if overrides is not None:
        times = apply_overrides(trace.operators, times, overrides)
    total_s = float(times["time_s"].sum())
    low, high = combine_intervals(model.step_interval("predict"), _beyond(times, total_s))
    device_name = device_name or str(getattr(model, "device_name", "unknown"))
    operators = trace.operators.copy()
    nanoseconds = [s_to_ns(time_s) for time_s in times["time_s"]]
    operators["device_ns"] = np.asarray(nanoseconds, dtype=np.int64)
    operators["cpu_ns"] = np.int64(0)
    ends = operators["device_ns"].cumsum()
    operators["start_ns"] = ends - operators["device_ns"]
    share = float(times.loc[times["extrapolated"].astype(bool), "time_s"].sum()) / max(
        total_s, 1e-12
    )
    basis = model.step_interval_basis("predict")
    facts = replace(
        trace.facts,
        device=device,
        device_name=device_name,
        step_time_s=float(ends.iloc[-1]) / 1e9 if len(ends) else 0.0,
        step_time_source=PREDICTED,
        step_times_s=[],
        predicted_times={"interval": [low, high], "basis": basis, "extrapolated_share": share},
        warnings=trace.facts.warn(
            f"no time was recorded: all are predicted by the cost model of {device_name}, "
            f"{share:.0%} of them outside the sizes that it was fitted to{NO_HOST}"
        ),
    )
    return TimedTrace(Trace(operators, trace.tensors, facts), times, total_s * low, total_s * high)


def _beyond(times: pd.DataFrame, total_s: float) -> tuple[float, float]:
    """Return the interval, relative to the sum, of all extrapolated operators at the same ends."""
    beyond = times[times["extrapolated"].astype(bool)]
    if not total_s or beyond.empty:
        return 1.0, 1.0
    below_s = float((beyond["time_s"] - beyond["low_s"]).sum())
    above_s = float((beyond["high_s"] - beyond["time_s"]).sum())
    return max(1.0 - below_s / total_s, 1.0 / WIDEST_FACTOR), 1.0 + above_s / total_s


def host_times(trace: Trace, operators: pd.DataFrame, launch_s: float) -> Floats:
    """Return the host time of some of a trace's operators [s].

    The recorded one; where times were predicted, ``launch_s`` of each that runs
    on the device: PyTorch's host time of a view is a small part of a kernel's.
    """
    if trace.facts.step_time_source == PREDICTED and launch_s:
        return np.where(operators["device_ns"].to_numpy() > 0, launch_s, 0.0)
    return np.array([ns_to_s(t) for t in operators["cpu_ns"]], dtype=np.float64)


def mention_launches(warnings: Sequence[str], launch_s: float) -> list[str]:
    """Return warnings that say what a launch was taken to last, in place of saying that none was."""
    said = f"; the host takes {launch_s * 1e6:.3g} us for each"
    return [text.replace(NO_HOST, said) if launch_s else text for text in warnings]


def times_interval(facts: Facts) -> tuple[float, float]:
    """Return the 80 % interval, relative, of times that were not recorded on their device.

    Times carried over from another GPU, and times that a model gave, have one
    in the facts of their trace; recorded times have (1, 1).
    """
    told = facts.predicted_times
    if told:
        low, high = told["interval"]
        return float(low), float(high)
    return new_gpu_interval(facts)
