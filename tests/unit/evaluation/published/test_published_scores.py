"""Scores of public cases, against numbers worked out by hand."""

import pandas as pd
import pytest
from trioflow.report.scores import APART, list_plan_pairs, list_scaling, score_published
from trioflow_evaluation.published.judge import find_band

from evaluation.published.published_cases import make_case, make_cases


@pytest.fixture(scope="module")
def scores():
    return score_published(make_cases()).set_index(["set", "model"])


def test_errors_are_those_of_every_case(scores):
    ours = scores.loc[("h100-4gpu", "trioflow")]
    assert ours["cases"] == 3
    assert ours["mean_absolute_error"] == pytest.approx((0.02 + 0.05 + 0.2) / 3)
    assert ours["median_absolute_error"] == pytest.approx(0.05)
    assert ours["worst_error"] == pytest.approx(0.2)
    assert ours["bias"] == pytest.approx((0.02 - 0.05 + 0.2) / 3)


def test_intervals_are_ours_alone(scores):
    ours = scores.loc[("h100-4gpu", "trioflow")]
    assert ours["coverage"] == pytest.approx(2 / 3)
    assert ours["mean_relative_width"] == pytest.approx(0.2 * (1.02 + 0.95 + 1.2) / 3)
    missed = (0.9 * 3.6 - 3.0) / 3.0
    assert ours["interval_score"] == pytest.approx(ours["mean_relative_width"] + 10 * missed / 3)
    assert pd.isna(scores.loc[("h100-4gpu", "analytical")]["coverage"])


def test_who_predicts_nothing_has_no_row(scores):
    assert ("h100-4gpu", "regression") not in scores.index
    assert ("resnet50-a40", "analytical") not in scores.index
    assert scores.loc[("h100-4gpu", "oracle")]["cases"] == 1


def test_the_order_of_plans_is_counted_in_pairs(scores):
    assert scores.loc[("h100-4gpu", "trioflow")]["rank_correlation"] == 1
    assert scores.loc[("h100-4gpu", "analytical")]["rank_correlation"] == -1
    rules = scores.loc[("h100-4gpu", "TrioSim's public rules")]
    assert (rules["pairs"], rules["ordered"]) == (3, pytest.approx(2 / 3))


def test_plans_of_nearly_one_time_or_of_other_batches_make_no_pair():
    rows = [
        make_case("a", "ddp4", 1.0, 1.0),
        make_case("b", "tp4", 1.0 + APART / 2, 1.0),
        make_case("c", "gpipe4-m1", 9.0, 1.0, batch=8),
        make_case("d", "ddp4", 9.0, 1.0),
    ]
    pairs = [(one["case"], other["case"]) for one, other in list_plan_pairs(pd.DataFrame(rows))]
    assert pairs == [("b", "d")]


def test_scaling_is_apart_from_the_error_of_one_gpu(scores):
    told = list_scaling(make_cases())
    assert told[["case", "ranks"]].to_numpy().tolist() == [["e", 2]]
    assert told["measured"][0] == pytest.approx(0.8)
    assert told["error"][0] == pytest.approx(0.25)
    ours = scores.loc[("resnet50-a40", "trioflow")]
    assert ours["scaling_error"] == pytest.approx(0.25)
    assert ours["single_error"] == pytest.approx(0.5)


def test_a_band_leaves_the_judged_workload_out():
    anchors = pd.DataFrame(
        {
            "workload": ["seen"] * 11 + ["judged"] * 50,
            "measured_s": [1.0] * 61,
            "timer_s": [0.95 + 0.01 * n for n in range(11)] + [9.0] * 50,
        }
    )
    low, high = find_band(anchors, "judged")
    assert low == pytest.approx(1 / 1.04, rel=1e-3)
    assert high == pytest.approx(1 / 0.96, rel=1e-3)
    assert find_band(anchors.head(7), "judged") == (1.0, 1.0)
