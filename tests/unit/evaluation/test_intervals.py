"""Intervals of all judged sets: beside one interval for all, kept from run to run, and on the page."""

from pathlib import Path

import judge_intervals
import numpy as np
import pandas as pd
import pytest
from page_numbers import (
    FEWEST,
    list_published,
    list_validation,
    markers,
    publish_intervals,
    record_intervals,
    score_set,
)
from trioflow.costmodel.uncertainty import CONFIDENCES, load_calibration
from trioflow_evaluation.vtrain.model import GROUPS, PLANS

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
    assert (row["cases"], row["inside"], row["naive_inside"]) == (40, 0.25, 0.0), "each group has the other's errors"
    width = (10 * 0.1 + 10 * 0.11 + 20 * 0.08) / 40
    log_width = np.log(1.05 / 0.95)
    miss = (10 * np.log(0.95 * 1.1) + 20 * np.log(1.25 / 1.05)) / 40
    assert row["width"] == pytest.approx(width, abs=1e-4)
    assert row["score"] == pytest.approx(log_width + 10 * miss, abs=1e-4)
    # Of a the prediction times 1.25, of b from 1 / 1.1 to 1.
    assert row["naive_width"] == pytest.approx((20 * 0.0 + 20 * (1 - 1 / 1.1) / 1.25) / 40, abs=1e-4)


def test_few_cases_or_one_group_say_nothing() -> None:
    assert score_set("x", None, make_cases(FEWEST - 2)) is None
    assert score_set("x", None, make_cases().assign(group="a")) is None
    refused = make_cases(FEWEST)
    refused.loc[0, "predicted_s"] = np.nan
    assert score_set("x", None, refused) is None


def test_runs_keep_the_sets_of_others_and_the_page_shows_all(tmp_path: Path) -> None:
    models, plans = make_points()
    path = tmp_path / "intervals.tsv"
    first = record_intervals(path, {list_published: pd.concat([models, plans])})
    assert first["inside"].tolist() == [0.25, 0.25]
    again = record_intervals(path, {list_published: plans.assign(high_s=1.3)})
    assert sorted(again["inside"]) == [0.25, 0.75]
    page = tmp_path / "docs" / "accuracy.md"
    page.parent.mkdir()
    page.write_text("\n".join(markers("intervals")))
    assert publish_intervals(tmp_path, again) and not publish_intervals(tmp_path, again)
    assert page.read_text().count("| 40 | 75 % |") == 1


def make_points() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Cases of vTrain's points, models left out and plans left out."""
    cases = make_cases().assign(case="gpt-h1-l2", plan="t2-d1-p1-m4", set=GROUPS)
    plans = ["t2-d1-p1-m4", "t2-d1-p1-m8"] * 10 + ["t1-d1-p2-m4"] * 20
    return cases.rename(columns={"group": "workload"}), cases.assign(set=PLANS, workload="w", plan=plans).drop(
        columns="group"
    )


def test_micro_batches_of_one_plan_are_one_group() -> None:
    sets = list(list_published(pd.concat(make_points())))
    assert [(len(rows), rows["group"].nunique()) for _, _, rows in sets] == [(40, 2), (40, 2)]


CASES = judge_intervals.read_cases()


def test_shipped_factors_are_those_of_the_judged_steps() -> None:
    for kind, own in CASES.groupby("kind"):
        assert load_calibration()[kind][0] == pytest.approx(judge_intervals.find_scale(own), abs=6e-4)


def test_intervals_hold_steps_of_groups_that_they_were_not_fitted_to() -> None:
    judged = judge_intervals.leave_out(CASES, "group")
    for name, own in judged.groupby("set"):
        if len(own) >= FEWEST:
            assert 0.75 <= own["inside"].mean() <= 0.9, name
    kinds = judged.groupby("kind")["width"].mean()
    assert kinds["one node"] <= 0.3
    half = judged[(judged["kind"] == "several nodes") & (judged["set"] == judge_intervals.NANOTRON)]
    assert half["width"].mean() <= 0.4


def test_no_case_counts_for_its_own_group() -> None:
    rows = pd.DataFrame({"measured": [0.1, 0.2, 1.0], "low": -0.1, "high": 0.1, "kind": "k", "group": ["a", "a", "b"]})
    judged = judge_intervals.leave_out(rows, "group")
    assert judge_intervals.find_scale(rows) == pytest.approx(10.0)
    assert judged["inside"].tolist() == [1.0, 1.0, 0.0]
    assert judged["width"].iloc[2] == pytest.approx((np.exp(0.2) - np.exp(-0.2)) / np.exp(1.0))


def test_words_of_confidence_are_ordered_by_errors() -> None:
    errors = np.expm1(-CASES["measured"]).abs().groupby(CASES["confidence"])
    for found in (errors.median(), errors.mean()):
        assert found[list(CONFIDENCES)].is_monotonic_increasing


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
