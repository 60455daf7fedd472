"""Aims beside what was reached."""

import pytest
from trioflow.report.scores import score_cases
from trioflow_evaluation.validation.aims import AIMS, SETS, reach_aims
from trioflow_evaluation.validation.operators import GROUPS, RANK_CASES
from trioflow_evaluation.validation.operators import SET as COLLECTIVES

from evaluation.validation.validation_cases import make_cases


@pytest.fixture(scope="module")
def reached():
    cases = make_cases()
    cases = cases[cases["group"] != "inf forward"]
    entries = reach_aims(score_cases(cases, ["set", "quantity", "group", "model"]))
    return {entry.aim.title: entry for entry in entries}


def test_groups_of_an_aim_are_pooled_case_by_case(reached):
    ours = reached["another batch, sum of operators"].ours
    assert ours["cases"] == 3
    assert ours["mean_absolute_error"] == pytest.approx((0.02 + 0.01 + 0.12) / 3)
    assert ours["bias"] == pytest.approx((0.02 - 0.01 + 0.12) / 3)
    assert ours["coverage"] == pytest.approx(1.0)
    assert ours["mean_relative_width"] == pytest.approx((0.12 + 0.09 + 0.22) / 3)
    assert not reached["another batch, sum of operators"].reached
    assert reached["another batch, training, sum of operators"].reached
    assert reached["another batch, training, sum of operators"].ours["cases"] == 2


def test_a_limit_over_the_oracle_moves_with_it(reached):
    entry = reached["another batch, end to end"]
    assert entry.limit == pytest.approx(0.04 + 0.02)
    assert entry.reached


def test_what_is_given_the_answer_is_no_rival(reached):
    """The oracle's 4 % are better than the 5 % of both models."""
    assert reached["another batch, end to end"].best_model == "proportional"


def test_what_was_not_judged_is_not_told(reached):
    assert not any("GPU" in title for title in reached)
    assert reached["collectives, 4 ranks from 2 and 8"].ours["cases"] == 1


def test_aims_name_groups_that_the_sets_have():
    named = {group for aim in AIMS if aim.set == COLLECTIVES for group in aim.groups}
    ranks = {f"{asked} ranks from {a} and {b}" for asked, (a, b), _ in RANK_CASES}
    known = {*GROUPS.values()} | {
        f"{name}, {part.removeprefix('sizes ')}" for name in ranks for part in GROUPS.values()
    }
    assert named <= known
    assert {aim.set for aim in AIMS} <= set(SETS)
