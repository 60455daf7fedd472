"""The work of operators at another batch or on a shard: what grows, what stays.

Parameters, gradients, optimizer state and the operators on them never scale
with the batch; activations do. The operator table keeps the two parts apart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.costmodel.interface import OperatorModel
from trioflow.parallel.remembered import remembered
from trioflow.trace.store import Trace

WORK = ("flop", "read_bytes", "write_bytes")


@remembered
def without_communication(trace: Trace) -> Trace:
    """Return a trace whose communication takes no time; the same trace where it has none.

    A trace of one rank of a parallel run holds that run's communication. A
    plan brings its own, so the recorded one must not count as compute.
    """
    communicates = trace.operators["kind"] == "collective"
    if not communicates.any():
        return trace
    operators = trace.operators.copy()
    operators.loc[communicates, ["device_ns", "cpu_ns"]] = 0
    warning = f"{int(communicates.sum())} communication operators of the traced run are left out"
    facts = replace(trace.facts, warnings=[*trace.facts.warnings, warning])
    return Trace(operators, trace.tensors, facts)


def resize_batch(operators: pd.DataFrame, factor: float) -> pd.DataFrame:
    """Return the operators with the work of ``factor`` times the batch.

    Parameters
    ----------
    operators : DataFrame
        Columns of ``tables.OPERATORS``.
    factor : float
        New batch over traced batch.

    Returns
    -------
    DataFrame
        A copy whose ``flop``, ``read_bytes``, ``write_bytes`` (and their
        ``batch_`` parts) are those of the new batch.
    """
    target = operators.copy()
    for column in WORK:
        growing = operators[f"batch_{column}"]
        target[column] = (operators[column] - growing + growing * factor).round().astype("int64")
        target[f"batch_{column}"] = (growing * factor).round().astype("int64")
    return target


def predict_operator_times(
    operators: pd.DataFrame, target: pd.DataFrame, model: OperatorModel
) -> tuple[NDArray[np.float64], bool]:
    """Return each operator's device time at the target work [s], and whether any is out of range.

    The recorded device time is rescaled by the model; the host time before an
    operator does not depend on its size and is not part of the result.
    """
    predicted = model.rescale(operators, target)
    return predicted["time_s"].to_numpy(dtype=np.float64), bool(predicted["extrapolated"].any())
