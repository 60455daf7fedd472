"""80 % intervals of every judged set, beside one interval for all of its cases from the errors of other groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow.base.provenance import atomic_path
from trioflow.costmodel.intervals import COVERAGE, SHORTEST_S
from trioflow.report.errors import interval_score
from trioflow.report.pages import NOTHING, write_markdown, write_percent
from trioflow.reproductions.clusters.parts import plain_model
from trioflow.reproductions.published.cases import describe_set
from trioflow.reproductions.readme import publish_block
from trioflow.reproductions.validation.aims import SETS
from trioflow.reproductions.vtrain.data import GROUPS, PLANS
from trioflow.tables import records

FEWEST = 20
"""Sets of fewer cases say little of a coverage."""
_RECORDED, _NEW_GPU = 0.25, 0.60
"""Mean widths that were aimed at: shapes and devices that were recorded, and GPUs that were not."""
_WIDTH_AIMS = {"batch-change": _RECORDED, "new-gpu": _NEW_GPU}
_STEPS = {
    "batch-change": "operator_sum",
    "new-gpu": "operator_sum",
    "leave-workload-out": "operator_sum",
}
"""Quantities of the sets whose cases are whole steps; of the other sets there is one."""
Lister = Callable[[pd.DataFrame], Iterator[tuple[str, float | None, pd.DataFrame]]]
"""Yields name, width aimed at, and cases of a table's sets."""
_ENDS = ["measured_s", "predicted_s", "low_s", "high_s"]


def list_errors(errors: pd.DataFrame) -> Iterator[tuple[str, float | None, pd.DataFrame]]:
    """Yield name, width aimed at, and cases of a live run (``tables.ERRORS``); groups are workloads."""
    cases = errors.rename(columns={"simulated_s": "predicted_s"}).assign(group=errors["workload"])
    yield "live steps on 1 and 2 ranks", _RECORDED, cases


def list_published(cases: pd.DataFrame) -> Iterator[tuple[str, float | None, pd.DataFrame]]:
    """Yield the same of ``tables.PUBLISHED_CASES``: steps of GPUs by set, vTrain's by what is left out."""
    vtrain = cases["case"].str.startswith("gpt-h")
    steps = cases[~vtrain]
    yield "public steps on up to eight GPUs", _RECORDED, steps.assign(group=steps["set"])
    for name in (GROUPS, PLANS):
        mine = cases[cases["set"] == name]
        plan = mine["plan"].str.rpartition("-m")[0]
        yield (
            describe_set(name).title,
            _RECORDED,
            mine.assign(group=mine["workload"] if name == GROUPS else plan),
        )


def list_validation(cases: pd.DataFrame) -> Iterator[tuple[str, float | None, pd.DataFrame]]:
    """Yield the same of ``tables.VALIDATION``: of each set the model that ships; groups are devices."""
    for name, words in SETS.items():
        mine = cases[(cases["set"] == name) & (cases["model"] == words.ours)]
        if name in _STEPS:
            whole = mine["group"].isin(["inf", "train"]) & (mine["quantity"] == _STEPS[name])
            mine = mine[whole]
        yield (
            f"cost models: {words.title[:1].lower()}{words.title[1:]}",
            _WIDTH_AIMS.get(name),
            mine.assign(group=mine["device"]),
        )


def list_clusters(steps: pd.DataFrame) -> Iterator[tuple[str, float | None, pd.DataFrame]]:
    """Yield the same of nanotron's runs (``tables.CLUSTER_STEPS``), by their expected steps; groups are models."""
    cases = steps.drop(columns="predicted_s").rename(columns={"expected_s": "predicted_s"})
    yield "nanotron's runs on 8 to 512 H100", None, cases.assign(group=cases["parameters"])


def list_rates(rates: pd.DataFrame) -> Iterator[tuple[str, float | None, pd.DataFrame]]:
    """Yield the same of Megatron-Bridge's rates (``tables.CLUSTER_RATES``), as times; groups are models."""
    ends = (("measured", "measured"), ("predicted", "predicted"), ("low", "high"), ("high", "low"))
    times = {f"{time}_s": 1.0 / rates[f"{rate}_tokens_per_s"] for time, rate in ends}
    group = rates["model"].map(plain_model)
    yield "Megatron-Bridge's rates on 8 to 1,024 H100", None, rates.assign(**times, group=group)


def score_set(name: str, aim: float | None, cases: pd.DataFrame) -> dict[str, Any] | None:
    """Return how well a set's intervals hold; none where fewer than ``FEWEST`` cases have one.

    ``cases``: measured_s, predicted_s, low_s, high_s [s] and group. Returns share inside, mean
    width over the measured value, mean `interval_score` of logarithms; with ``naive_``, those of
    the prediction times the quantiles of all other groups.
    """
    known = cases.dropna(subset=_ENDS)
    if len(known) < FEWEST or known["group"].nunique() < 2:
        return None
    ratio = known["measured_s"] / known["predicted_s"]
    naive = known.copy()
    for group in known["group"].unique():
        mine = known["group"] == group
        for end, quantile in zip(("low_s", "high_s"), COVERAGE, strict=True):
            naive.loc[mine, end] = known.loc[mine, "predicted_s"] * ratio[~mine].quantile(quantile)
    row: dict[str, Any] = {"set": name, "cases": len(known), "width_aim": aim}
    for before, frame in (("", known), ("naive_", naive)):
        measured_s, low_s, high_s = (
            frame[end].to_numpy(np.float64) for end in ("measured_s", "low_s", "high_s")
        )
        found = {
            "inside": ((low_s <= measured_s) & (measured_s <= high_s)).mean(),
            "width": ((high_s - low_s) / measured_s).mean(),
            "score": interval_score(*(np.log(np.maximum(one, SHORTEST_S)) for one in (low_s, high_s, measured_s))).mean(),
        }  # fmt: skip
        row |= {before + name: round(float(value), 4) for name, value in found.items()}
    return row


def record_intervals(path: Path, found: Mapping[Lister, pd.DataFrame]) -> pd.DataFrame:
    """Score tables that a run judged (by what lists their sets), keep the rows of others, and return the list at ``path``."""
    known = pd.read_csv(path, sep="\t") if path.is_file() else pd.DataFrame()
    scored = [score_set(*one) for lister, table in found.items() for one in lister(table)]
    new = pd.DataFrame([row for row in scored if row is not None])
    kept = known[~known["set"].isin(new["set"])] if len(known) and len(new) else known
    rows = pd.concat([kept, new], ignore_index=True).sort_values("set", ignore_index=True)
    with atomic_path(path) as temporary:
        rows.to_csv(temporary, sep="\t", index=False)
    return rows


def publish_intervals(root: Path, intervals: pd.DataFrame) -> bool:
    """Rewrite the table of docs/judging.md; return whether it changed. Raises as ``readme.publish``."""
    heads = (
        "judged set", "cases", "inside, aim 75 to 90 %", "mean width", "aim", "score",
        "one interval for all: inside", "mean width", "score",
    )  # fmt: skip
    rows = [
        (
            row["set"], f"{row['cases']:,}", write_percent(row["inside"], 0), write_percent(row["width"], 0),
            NOTHING if row["width_aim"] is None else write_percent(row["width_aim"], 0), f"{row['score']:.2f}",
            write_percent(row["naive_inside"], 0), write_percent(row["naive_width"], 0), f"{row['naive_score']:.2f}",
        )
        for row in records(intervals)
    ]  # fmt: skip
    return publish_block(root, "judging.md", "intervals", write_markdown(heads, rows))
