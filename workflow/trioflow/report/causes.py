"""What an error is made of: parts of the step, measured values in place of predicted ones, sensitivities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pandas as pd
import pyarrow as pa

from trioflow.costmodel.choices import Collectives
from trioflow.costmodel.collectives.model import CollectiveTime
from trioflow.costmodel.steps import NONE, RATIO, TIMER
from trioflow.hardware.machine import Platform
from trioflow.tables import FLOAT, TEXT, column

SERIAL, FULL = "none", "full"
"""Overlap of collectives with compute, where a sensitivity sets it."""


@dataclass(frozen=True)
class Settings:
    """What a sensitivity changes; the prediction itself has none changed."""

    anchor: str = TIMER  # one of ``steps.ANCHOR_WAYS``
    copies: float = 1.0  # factor on copies into and out of gradient buckets
    vocabulary: bool = True  # whether tensor parallelism cuts embedding and head
    # none: collectives wait for compute and compute for them. full: neither waits. Empty: as the
    # platform has it.
    overlap: str = ""
    # compute, bandwidth, latency: factors on compute times, and on the bandwidth and the latency of
    # measured collectives.
    compute: float = 1.0
    bandwidth: float = 1.0
    latency: float = 1.0
    method: str = ""  # way to predict collectives; the platform's own where empty
    # host, sharing: factors on the host's costs of parallel plans, and on what ranks lose by
    # computing at the same time; of cases that have them.
    host: float = 1.0
    sharing: float = 1.0

    def arrange(self, platform: Platform) -> Platform:
        """Return a platform with the overlap of these settings."""
        if not self.overlap:
            return platform
        return replace(platform, communication_on_compute_stream=self.overlap == SERIAL)


@dataclass(frozen=True)
class ScaledCollectives:
    """Measured collectives with another bandwidth or latency."""

    base: Collectives  # as measured
    # bandwidth, latency: factors; a collective's latency is its time for an empty message.
    bandwidth: float
    latency: float

    def time_s(self, collective: str, ranks: int, message_bytes: float) -> CollectiveTime:
        """Return the changed time of a collective, its interval in proportion."""
        predicted = self.base.time_s(collective, ranks, message_bytes)
        start_s = min(self.base.time_s(collective, ranks, 0).time_s, predicted.time_s)
        time_s = start_s * self.latency + (predicted.time_s - start_s) / self.bandwidth
        factor = time_s / predicted.time_s if predicted.time_s else 1.0
        return CollectiveTime(
            time_s, predicted.low_s * factor, predicted.high_s * factor, predicted.confidence
        )


CAUSES = pa.schema([
    column("set", TEXT, "set of cases"),
    column("case", TEXT, "name of the case"),
    column("role", TEXT, "part, a share of the predicted step; replaced, a model exchanged for measured values; sensitivity, a parameter changed; growth, a class of operators at another batch"),
    column("parameter", TEXT, "what the part is, was exchanged or was changed"),
    column("setting", TEXT, "how it was changed; empty for a part"),
    column("time_s", FLOAT, "the part, or the step predicted so", "s"),
])  # fmt: skip
"""Rows of ``results/published/<set>-causes.parquet`` and ``results/report/causes.parquet``."""

PART, REPLACED, SENSITIVITY, GROWTH = "part", "replaced", "sensitivity", "growth"


class _ExplainedStep(Protocol):
    """A predicted step, its compute and the communication that no compute hides [s]."""

    @property
    def step_time_s(self) -> float:
        """The step [s]."""

    @property
    def compute_s(self) -> float:
        """Time in which a rank computes [s]."""

    @property
    def exposed_communication_s(self) -> float:
        """Communication that no compute hides [s]."""


class _ExplainedCase(Protocol):
    """A case that can be predicted again with something changed."""

    @property
    def set_name(self) -> str:
        """Set of the case."""

    @property
    def case_name(self) -> str:
        """Name of the case."""

    def has(self, need: str) -> bool:
        """Return whether the case has what a change needs; of what it does not know, nothing."""

    def predict(self) -> _ExplainedStep:
        """Return the prediction with its parts."""

    def predict_changed(self, settings: Settings) -> float:
        """Return the step with something changed [s]."""


@dataclass(frozen=True)
class Change:
    """One change of a sensitivity."""

    # parameter, setting: what is changed and how, in words.
    parameter: str
    setting: str
    settings: Settings  # the changed settings
    # What a case must have (``ExplainedCase.has``): communication, collectives, overlap, serial,
    # replicas, shards, anchor, session, sharing, host, or nothing.
    needs: str = ""


CHANGES: tuple[Change, ...] = (
    Change("compute time", "x 0.9", Settings(compute=0.9)),
    Change("compute time", "x 1.1", Settings(compute=1.1)),
    Change("bandwidth of collectives", "x 0.8", Settings(bandwidth=0.8), "communication"),
    Change("bandwidth of collectives", "x 1.25", Settings(bandwidth=1.25), "communication"),
    Change("latency of collectives", "x 0.5", Settings(latency=0.5), "communication"),
    Change("latency of collectives", "x 2", Settings(latency=2.0), "communication"),
    Change("overlap of collectives and compute", "none", Settings(overlap=SERIAL), "overlap"),
    Change("overlap of collectives and compute", "full", Settings(overlap=FULL), "serial"),
    Change("model of collectives", "NCCL's formula", Settings(method="nccl"), "collectives"),
    Change("model of collectives", "one bandwidth", Settings(method="one-bandwidth"), "collectives"),
    Change("copies of gradients", "none", Settings(copies=0.0), "replicas"),
    Change("copies of gradients", "x 2", Settings(copies=2.0), "replicas"),
    Change("cut of embedding and head", "none", Settings(vocabulary=False), "shards"),
    Change("anchor at the step of one GPU", "one factor", Settings(anchor=RATIO), "anchor"),
    Change("anchor at the step of one GPU", "none", Settings(anchor=NONE), "anchor"),
    Change("anchor at the session's steps of one rank", "none", Settings(anchor=NONE), "session"),
    Change("slowdown of ranks that compute at once", "none", Settings(sharing=0.0), "sharing"),
    Change("slowdown of ranks that compute at once", "x 2", Settings(sharing=2.0), "sharing"),
    Change("host's costs of parallel plans", "none", Settings(host=0.0), "host"),
    Change("host's costs of parallel plans", "x 2", Settings(host=2.0), "host"),
)  # fmt: skip
"""In the order of the table. The sizes of the steps are conventions, equal for all sets."""


def explain_cases(cases: Sequence[_ExplainedCase], oracles: Sequence[float | None]) -> pd.DataFrame:
    """Return parts, replacements and sensitivities (``CAUSES``) of one set's cases; ``oracles``: with measured compute [s]."""
    rows = []
    for case, oracle_s in zip(cases, oracles, strict=True):
        predicted = case.predict()
        head = (case.set_name, case.case_name)
        rows.append((*head, PART, "compute", "", predicted.compute_s))
        rows.append(
            (
                *head,
                PART,
                "communication that no compute hides",
                "",
                predicted.exposed_communication_s,
            )
        )
        rest_s = max(
            predicted.step_time_s - predicted.compute_s - predicted.exposed_communication_s, 0.0
        )
        rows.append((*head, PART, "waiting", "", rest_s))
        if oracle_s is not None and not pd.isna(oracle_s):
            rows.append(
                (
                    *head,
                    REPLACED,
                    "compute",
                    "measured on one such GPU at the same batch",
                    float(oracle_s),
                )
            )
        for change in CHANGES:
            if not change.needs or case.has(change.needs):
                time_s = case.predict_changed(change.settings)
                rows.append((*head, SENSITIVITY, change.parameter, change.setting, time_s))
    return pd.DataFrame(rows, columns=CAUSES.names)
