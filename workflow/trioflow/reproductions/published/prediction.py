"""One public case predicted: traces, plan and machine in, a step with its interval and parts out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from trioflow.costmodel.choices import Collectives
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.costmodel.interface import OperatorModel
from trioflow.costmodel.platform_collectives import PlatformCollectives
from trioflow.costmodel.step_anchor import NONE as UNANCHORED
from trioflow.costmodel.step_anchor import RATIO, anchor_step
from trioflow.hardware.device_sheet import load_device
from trioflow.hardware.machine import Platform
from trioflow.parallel.plan import micro_batch_sizes
from trioflow.parallel.reference import choose_reference
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.answer import Prediction, predict_step
from trioflow.prediction.assembly import predict, prepare_step
from trioflow.prediction.options import CLOSED_FORM, Options
from trioflow.prediction.step import Step
from trioflow.report.causes import ScaledCollectives, Settings
from trioflow.reproductions.published.baselines import (
    AnalyticalModel,
    predict_by_triosim,
    read_recorded_step,
)
from trioflow.reproductions.published.rows import PublishedRow
from trioflow.reproductions.published.source import PublishedSource
from trioflow.trace.store import Trace

LARGE_BYTES = 512 * 1024 * 1024
"""A message whose time is bandwidth alone: what the baseline's one bandwidth is read from [bytes]."""


@dataclass(frozen=True)
class UpkeepModel:
    """An operator model with dearer or cheaper copies into and out of gradient buckets."""

    # Of the GPU. A trace's own operators are rescaled; what a plan asks to be predicted is upkeep
    # (`parallel.splits.updates.predict_elementwise`).
    base: OperatorModel
    factor: float

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Predict upkeep from its sizes, and change it."""
        found = self.base.predict(operators)
        return found.assign(**{c: self.factor * found[c] for c in ("time_s", "low_s", "high_s")})

    def __getattr__(self, name: str) -> Any:
        """Everything else is the base's."""
        return getattr(self.base, name)


@dataclass
class PreparedCase:
    """A row with its traces in the measured GPU's times, and its machine."""

    row: PublishedRow
    times: DeviceTimes
    platform: Platform
    collectives: Collectives | None
    # Interval of a whole step told by its operators, relative to the step.
    band: tuple[float, float] = (1.0, 1.0)
    _steps: dict[tuple[str, float, bool], Step] = field(default_factory=dict, repr=False)

    @property
    def rank_batch(self) -> int:
        """Samples that a rank computes at a time."""
        return micro_batch_sizes(self.row.made_plan, self.row.batch)[0]

    @property
    def reference(self) -> Trace:
        """The trace that the prediction starts from."""
        return choose_reference(self.times.traces, self.rank_batch).trace

    @property
    def set_name(self) -> str:
        """Set of the row."""
        return self.row.set

    @property
    def case_name(self) -> str:
        """Name of the row."""
        return self.row.case

    def has(self, need: str) -> bool:
        """Tell whether the case has what a change needs; see ``causes.Change``."""
        plan = self.row.made_plan
        communicates = self.collectives is not None and plan.ranks > 1
        own = self.times.confidence == "measured"
        known = {
            "communication": communicates,
            "collectives": communicates,
            "replicas": plan.data > 1,
            "overlap": plan.data > 1,
            "shards": plan.tensor > 1,
            "anchor": own and anchor_step(self.reference, RATIO).scale != 1.0,
        }
        return known.get(need, False)

    def predict(self) -> Prediction:
        """Simulate the step, with its interval and parts."""
        return predict_step(self._step(Settings()))

    @property
    def task_graph(self) -> TaskGraph:
        """The step that the prediction simulates."""
        return self._step(Settings()).graph

    def predict_changed(self, settings: Settings) -> float:
        """Return the step with something changed [s]."""
        step = self._step(settings)
        options = replace(step.options, compute_scale=settings.compute, interval=False)
        changed = replace(
            step, platform=settings.arrange(self.platform), collectives=self._collectives(settings),
            options=options,
        )  # fmt: skip
        return predict_step(changed).step_time_s

    def _step(self, chosen: Settings) -> Step:
        """Return the step under some settings of its graph."""
        key = (chosen.anchor, chosen.copies, chosen.vocabulary)
        if key not in self._steps:
            model = UpkeepModel(self.times.model, chosen.copies)
            plan = self.row.made_plan
            if plan.vocabulary_parallel:
                plan = replace(plan, vocabulary_parallel=chosen.vocabulary)
            self._steps[key] = prepare_step(
                replace(self.times, model=model), plan, self.platform, batch=self.row.batch,
                options=Options(
                    anchor=chosen.anchor, anchor_band=self.band,
                    collectives=self.collectives or CLOSED_FORM,
                ),
            )  # fmt: skip
        return self._steps[key]

    def predict_analytically(self) -> float:
        """Return the step from data sheets alone: rates, links, no overlap lost [s]."""
        sheet = load_device(self.row.gpu)
        precision = str(self.reference.facts.precision or "fp32")
        model = AnalyticalModel.of_sheet(sheet, precision)
        times = replace(self.times, model=model)
        return predict(
            times, self.row.made_plan, self.platform, batch=self.row.batch, anchor=UNANCHORED,
            collectives=CLOSED_FORM, interval=False,
        ).step_time_s  # fmt: skip

    def predict_like_triosim(self) -> float | None:
        """Return the step by TrioSim's public rules from the same recorded times [s]."""
        plan = self.row.made_plan
        step = read_recorded_step(self.reference)
        return predict_by_triosim(step, plan, self.row.batch, self.one_bandwidth())

    def one_bandwidth(self) -> float:
        """Return the machine's one bandwidth for the rules: a large message over its time [bytes/s]."""
        if self.collectives is None or self.row.ranks == 1:
            return float(min(link.bandwidth_bytes_per_s for link in self.platform.links))
        sends = self.row.made_plan.pipeline > 1
        told = self.collectives.time_s(
            "send" if sends else "all_reduce", self.row.ranks, LARGE_BYTES
        )
        return LARGE_BYTES / told.time_s

    def _collectives(self, chosen: Settings) -> Any:
        found = self.collectives
        if found is None:
            return None
        if chosen.method and isinstance(found, PlatformCollectives):
            found = found.using(chosen.method)
        if (chosen.bandwidth, chosen.latency) == (1.0, 1.0):
            return found
        return ScaledCollectives(found, chosen.bandwidth, chosen.latency)


def prepare_case(
    row: PublishedRow,
    source: PublishedSource,
    *,
    traces: tuple[str, ...] | None = None,
    band: tuple[float, float] = (1.0, 1.0),
) -> PreparedCase:
    """Read what a row's prediction starts from.

    ``traces``: other traces than the row's: the oracle's; ``band``: interval of a whole step told
    by its operators, relative to the step.
    """
    given = source.traces_of(row, traces)
    platform, collectives = source.load_machine(row)
    return PreparedCase(row, source.device_times(given, row.gpu), platform, collectives, band)
