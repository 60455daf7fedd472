"""Intervals of all judged sets: beside one interval for all, kept from run to run, and on the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from page_numbers import (
    FEWEST,
    list_clusters,
    list_errors,
    list_published,
    list_rates,
    list_validation,
    markers,
    publish_intervals,
    record_intervals,
    score_set,
)
from trioflow_evaluation.vtrain.data import GROUPS, PLANS

COLUMNS = ["measured_s", "predicted_s", "low_s", "high_s"]


def make_cases(count: int = 40) -> pd.DataFrame:
    """Cases of two groups: the one predicted right or 10 % too slow in turn, the other 20 % too fast."""
    own = np.where(np.arange(count) % 2 == 0, 1.0, 1 / 1.1)
    measured = np.where(np.arange(count) < count // 2, own, 1.25)
    rows = pd.DataFrame({"measured_s": measured, "predicted_s": 1.0, "low_s": 0.95, "high_s": 1.05})
    return rows.assign(group=np.where(np.arange(count) < count // 2, "a", "b"))


def test_a_set_stands_beside_the_errors_of_other_groups() -> None:
    row = score_set("x", 0.25, make_cases())
    assert row is not None
    assert (row["cases"], row["inside"], row["naive_inside"]) == (40, 0.25, 0.0), (
        "each group has the other's errors"
    )
    width = (10 * 0.1 + 10 * 0.11 + 20 * 0.08) / 40
    log_width = np.log(1.05 / 0.95)
    miss = (10 * np.log(0.95 * 1.1) + 20 * np.log(1.25 / 1.05)) / 40
    assert row["width"] == pytest.approx(width, abs=1e-4)
    assert row["score"] == pytest.approx(log_width + 10 * miss, abs=1e-4)
    # Of a the prediction times 1.25, of b from 1 / 1.1 to 1.
    assert row["naive_width"] == pytest.approx(
        (20 * 0.0 + 20 * (1 - 1 / 1.1) / 1.25) / 40, abs=1e-4
    )


def test_few_cases_or_one_group_say_nothing() -> None:
    assert score_set("x", None, make_cases(FEWEST - 2)) is None
    assert score_set("x", None, make_cases().assign(group="a")) is None
    refused = make_cases(FEWEST)
    refused.loc[0, "predicted_s"] = np.nan
    assert score_set("x", None, refused) is None


def test_runs_keep_the_sets_of_others_and_the_page_shows_all(tmp_path: Path) -> None:
    live = make_cases().rename(columns={"group": "workload", "predicted_s": "simulated_s"})
    nanotron = make_cases().rename(columns={"group": "parameters"}).assign(set="runs")
    rates = 1 / make_cases()[COLUMNS]
    rates.columns = [f"{name}_tokens_per_s" for name in ("measured", "predicted", "high", "low")]
    bridge = rates.assign(model=["Llama3 8B"] * 20 + ["Llama3 70B"] * 20)
    path = tmp_path / "intervals.tsv"
    first = record_intervals(path, {list_errors: live, list_rates: bridge})
    assert first["inside"].tolist() == [0.25, 0.25] and first["width_aim"].isna().tolist() == [
        True,
        False,
    ]
    again = record_intervals(path, {list_errors: live.assign(high_s=1.3), list_clusters: nanotron})
    assert (
        len(again) == 3 and again.set_index("set")["inside"]["live steps on 1 and 2 ranks"] == 0.75
    )
    page = tmp_path / "docs" / "judging.md"
    page.parent.mkdir()
    page.write_text("\n".join(markers("intervals")))
    assert publish_intervals(tmp_path, again) and not publish_intervals(tmp_path, again)
    assert "| live steps on 1 and 2 ranks | 40 | 75 % |" in page.read_text()
    assert page.read_text().count("nanotron") == 1


def test_public_steps_are_one_set_and_vtrain_two() -> None:
    steps = make_cases(24).assign(
        case="vgg", set=["a"] * 12 + ["b"] * 12, workload="w", plan="ddp4"
    )
    models = (
        make_cases()
        .assign(case="gpt-h1-l2", set=GROUPS, plan="t2-d1-p1-m4")
        .rename(columns={"group": "workload"})
    )
    plans = make_cases().assign(case="gpt-h1-l2", set=PLANS, workload="w")
    plans["plan"] = ["t2-d1-p1-m4", "t2-d1-p1-m8"] * 10 + ["t1-d1-p2-m4"] * 20
    rows = [score_set(*one) for one in list_published(pd.concat([steps, models, plans]))]
    assert [row and row["cases"] for row in rows] == [24, 40, 40]
    groups = dict(
        enumerate(
            one[2]["group"].nunique() for one in list_published(pd.concat([steps, models, plans]))
        )
    )
    assert groups == {0: 2, 1: 2, 2: 2}, "micro-batches of one plan are one group"


def test_cost_models_are_judged_by_whole_steps_of_the_model_that_ships() -> None:
    cases = make_cases().rename(columns={"group": "device"})
    found = []
    for group, quantity, model in (
        ("train", "operator_sum", "ours"),
        ("train forward", "operator_sum", "ours"),
        ("train", "end_to_end", "ours"),
        ("train", "operator_sum", "li"),
    ):
        found.append(cases.assign(set="new-gpu", group=group, quantity=quantity, model=model))
    sets = {name: (aim, len(rows)) for name, aim, rows in list_validation(pd.concat(found))}
    assert sets["cost models: another GPU"] == (0.6, 40)
    assert sum(count for _, count in sets.values()) == 40
