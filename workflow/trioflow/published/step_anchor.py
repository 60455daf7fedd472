"""Operators timed one by one, and the whole step that they came from: what the timer adds.

A table of operators that were timed alone sums to more than the step it was
taken from: each row holds what the timer shows where nothing runs. The
single-GPU step's measured time tells how much of that is left to take off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow.costmodel.features import Floats
from trioflow.costmodel.interface import OperatorModel
from trioflow.errors import InputError
from trioflow.trace.store import Trace

TIMER, RATIO, NONE = "timer", "ratio", "none"
WAYS = (TIMER, RATIO, NONE)
"""Ways to bring operators to their step: less the timer, one factor, or as they are."""

_NUMBERS = ["time_s", "low_s", "high_s"]


@dataclass(frozen=True)
class StepAnchor:
    """What makes the operators of a trace sum to its measured step.

    Attributes
    ----------
    timer_s : float
        Taken off the time of every operator that takes any [s].
    scale : float
        Factor on what is left.
    """

    timer_s: float = 0.0
    scale: float = 1.0


def anchor_step(trace: Trace, way: str = TIMER) -> StepAnchor:
    """Return the anchor of a trace at its own measured step.

    Parameters
    ----------
    trace : Trace
        Fact ``measured_end_to_end_s`` [s]; without it nothing changes.
    way : {"timer", "ratio", "none"}
        timer: the excess of the operators over the step is spread over them
        equally, up to what the timer shows where nothing runs
        (``timer_floor_s``); a factor makes up for the rest. ratio: the factor
        alone.

    Raises
    ------
    InputError
        When the way is unknown or the trace holds no times.
    """
    if way not in WAYS:
        raise InputError(f"no way to anchor is called {way!r}", fix=f"use {', '.join(WAYS)}")
    step_s = trace.facts.get("measured_end_to_end_s")
    if step_s is None or way == NONE:
        return StepAnchor()
    time_s = trace.operators["device_ns"].to_numpy(np.float64) * 1e-9
    timed, total_s = int((time_s > 0).sum()), float(time_s.sum())
    if not timed:
        raise InputError("a trace without times has no step to anchor")
    timer_s = 0.0
    if way == TIMER and total_s > step_s:
        timer_s = min(
            float(trace.facts.get("timer_floor_s") or 0.0), (total_s - float(step_s)) / timed
        )
    left_s = float(np.maximum(time_s - timer_s, 0.0).sum())
    return StepAnchor(timer_s, float(step_s) / left_s)


@dataclass(frozen=True)
class AnchoredModel:
    """An operator model whose every time is that of an operator within a step.

    Attributes
    ----------
    base : OperatorModel
        Fitted to operators timed alone.
    timer_s : float
        Taken off each of its times [s].
    copies : float
        Factor on predicted upkeep (copies into and out of gradient buckets),
        for sensitivities.

    Notes
    -----
    A trace's own operators are rescaled; what a plan asks to be predicted is
    upkeep, on a GPU as single element-wise operators of the forward phase
    (`parallel.staged_work.predict_elementwise`).
    """

    base: OperatorModel
    timer_s: float = 0.0
    copies: float = 1.0

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Predict upkeep from its sizes."""
        found = self._less(self.base.predict(operators))
        found[_NUMBERS] *= self.copies
        return found

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Rescale recorded operators, then take the timer off."""
        return self._less(self.base.rescale(operators, target))

    def step_interval(
        self, kind: str = "rescale", distance: float | None = None
    ) -> tuple[float, float]:
        """Return the base's interval."""
        return self.base.step_interval(kind, distance)

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Return the base's words."""
        return self.base.step_interval_basis(kind)

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Refuse: the anchor belongs to one trace.

        Raises
        ------
        InputError
            Always.
        """
        raise InputError("an anchored model has no file", file=path, fix="save its base")

    def _less(self, found: pd.DataFrame) -> pd.DataFrame:
        frame = found.copy()
        for column in _NUMBERS:
            times: Floats = frame[column].to_numpy(np.float64)
            frame[column] = np.maximum(times - self.timer_s, 0.0)
        return frame


def judge_anchors(
    source: Trace, target: Trace, model: OperatorModel, resized: pd.DataFrame
) -> dict[str, Any]:
    """Return what every way says of a target's measured step, from the source's operators.

    Parameters
    ----------
    source, target : Trace
        One model on one GPU at two batches, each with its measured step.
    model : OperatorModel
        Fitted without the model.
    resized : DataFrame
        The source's operators at the target's batch.

    Returns
    -------
    dict
        ``measured_s`` and, for each of ``WAYS``, its prediction [s].
    """
    answers: dict[str, Any] = {"measured_s": float(target.facts["measured_end_to_end_s"])}
    for way in WAYS:
        anchor = anchor_step(source, way)
        told = AnchoredModel(model, anchor.timer_s).rescale(source.operators, resized)
        answers[way] = anchor.scale * float(told["time_s"].sum())
    return answers
