"""What an error is made of: parts of the step, measured values in place of predicted ones, sensitivities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import pyarrow as pa

from trioflow.published.prediction import PreparedCase, Settings
from trioflow.published.step_anchor import NONE, RATIO
from trioflow.table_columns import FLOAT, TEXT, column

CAUSES = pa.schema([
    column("set", TEXT, "set of cases"),
    column("case", TEXT, "name of the case"),
    column("role", TEXT, "part, a share of the predicted step; replaced, a model exchanged for measured values; sensitivity, a parameter changed"),
    column("parameter", TEXT, "what the part is, was exchanged or was changed"),
    column("setting", TEXT, "how it was changed; empty for a part"),
    column("time_s", FLOAT, "the part, or the step predicted so", "s"),
])  # fmt: skip
"""Rows of ``results/published/<set>-causes.parquet``."""

PART, REPLACED, SENSITIVITY = "part", "replaced", "sensitivity"


@dataclass(frozen=True)
class Change:
    """One change of a sensitivity.

    Attributes
    ----------
    parameter, setting : str
        What is changed and how, in words.
    settings : Settings
        The changed settings.
    needs : str
        What a case must have: collectives, replicas, shards, anchor, or
        nothing.
    """

    parameter: str
    setting: str
    settings: Settings
    needs: str = ""


CHANGES: tuple[Change, ...] = (
    Change("compute time", "x 0.9", Settings(compute=0.9)),
    Change("compute time", "x 1.1", Settings(compute=1.1)),
    Change("bandwidth of collectives", "x 0.8", Settings(bandwidth=0.8), "collectives"),
    Change("bandwidth of collectives", "x 1.25", Settings(bandwidth=1.25), "collectives"),
    Change("latency of collectives", "x 0.5", Settings(latency=0.5), "collectives"),
    Change("latency of collectives", "x 2", Settings(latency=2.0), "collectives"),
    Change("overlap of collectives and compute", "none", Settings(overlap=False), "replicas"),
    Change("model of collectives", "NCCL's formula", Settings(method="nccl"), "collectives"),
    Change("model of collectives", "one bandwidth", Settings(method="one-bandwidth"), "collectives"),
    Change("copies of gradients", "none", Settings(copies=0.0), "replicas"),
    Change("copies of gradients", "x 2", Settings(copies=2.0), "replicas"),
    Change("cut of embedding and head", "none", Settings(vocabulary=False), "shards"),
    Change("anchor at the step of one GPU", "one factor", Settings(anchor=RATIO), "anchor"),
    Change("anchor at the step of one GPU", "none", Settings(anchor=NONE), "anchor"),
)  # fmt: skip
"""In the order of the table. The sizes of the steps are conventions, equal for all sets."""


def explain_cases(cases: Sequence[PreparedCase], oracles: Sequence[float | None]) -> pd.DataFrame:
    """Return parts, replacements and sensitivities of some cases.

    Parameters
    ----------
    cases : sequence of PreparedCase
        Of one set.
    oracles : sequence of float or None
        Each case's prediction with measured compute [s].

    Returns
    -------
    DataFrame
        Columns ``CAUSES``.
    """
    rows = []
    for case, oracle_s in zip(cases, oracles, strict=True):
        told = case.predict()
        head = (case.row.set, case.row.case)
        rows.append((*head, PART, "compute", "", told.compute_s))
        rows.append((*head, PART, "communication that no compute hides", "", told.exposed_s))
        rest_s = max(told.time_s - told.compute_s - told.exposed_s, 0.0)
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
            if _applies(change, case):
                time_s = case.predict_changed(change.settings)
                rows.append((*head, SENSITIVITY, change.parameter, change.setting, time_s))
    return pd.DataFrame(rows, columns=CAUSES.names)


def _applies(change: Change, case: PreparedCase) -> bool:
    """Tell whether a case has what a change needs."""
    plan = case.row.made_plan
    known = {
        "": True,
        "collectives": case.collectives is not None and plan.ranks > 1,
        "replicas": plan.data > 1,
        "shards": plan.tensor > 1,
        "anchor": case.anchor(RATIO).scale != 1.0,
    }
    return known[change.needs]
