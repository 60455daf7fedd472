"""Operator models by name: which there are, how each is fitted, which need no fit."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from trioflow.costmodel.baselines import ProportionalModel, fit_recorded
from trioflow.costmodel.device_fit import DeviceLimits, fit_device_model
from trioflow.costmodel.interface import OperatorModel, TraceLike, find_operator_model
from trioflow.costmodel.operators import METHODS, fit_operator_model
from trioflow.errors import InputError
from trioflow.hardware.device_sheet import FALLBACK_PRECISION

AUTO = "auto"
GPU_ONLY = ("tile", "shipped")
"""Methods that need a GPU's data sheet: how many multiprocessors make a wave, its peak rates."""
METHOD_NAMES = (AUTO, *METHODS, *GPU_ONLY)
"""What a fit can be asked for by name, besides what packages register."""
UNFITTED = ("recorded", "proportional")
"""Models that a trace alone makes."""


def fit_named_model(
    traces: Sequence[TraceLike], method: str = AUTO
) -> tuple[OperatorModel, pd.DataFrame]:
    """Fit an operator model by the name of its method.

    Parameters
    ----------
    traces : sequence of trace
        Of one device.
    method : str
        A name in ``METHOD_NAMES``, or one that a package registers under the
        entry points ``trioflow.operator_models``. ``auto`` is ``regression``,
        which won on a processor (``fit_operator_model``).

    Returns
    -------
    model : OperatorModel
        The fitted model.
    fit : DataFrame
        Columns of ``tables.OPERATOR_FIT``.

    Raises
    ------
    InputError
        When the method is unknown or there is nothing to fit.
    PlatformError
        When a method for GPUs is asked for and the device has no data sheet.

    Notes
    -----
    ``shipped`` chooses the form of every class by leaving whole workloads out
    inside the given traces; it needs several of them.
    """
    if method in GPU_ONLY:
        if not traces:
            raise InputError("there is no trace to fit")
        facts = traces[0].facts
        precision = str(facts.precision or FALLBACK_PRECISION)
        limits = DeviceLimits.of(facts.device_name, precision)
        return fit_device_model(traces, limits, method=method)
    if method not in METHOD_NAMES:
        return find_operator_model(method, METHOD_NAMES)(traces)
    return fit_operator_model(traces, method="regression" if method == AUTO else method)


def make_unfitted_model(name: str, traces: Sequence[TraceLike]) -> OperatorModel:
    """Return a model that is made of recorded times alone.

    ``recorded`` answers only for the sizes that were recorded;
    ``proportional`` is the rule of TrioSim's public code, a baseline.

    Raises
    ------
    InputError
        When the name is unknown.
    """
    if name == "recorded":
        return fit_recorded(traces)
    if name == "proportional":
        return ProportionalModel(device_name=traces[0].facts.device_name)
    raise InputError(f"no model is called {name!r}", fix=f"use one of {', '.join(UNFITTED)}")
