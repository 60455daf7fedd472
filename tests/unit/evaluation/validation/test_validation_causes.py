"""What a missed aim's error is made of."""

from __future__ import annotations

import pytest
from trioflow_evaluation.validation.aims import (
    AIMS,
    select_cases,
    split_case,
    split_error,
)

from evaluation.validation.validation_cases import A100, H100, make_cases

SUMS = next(aim for aim in AIMS if aim.title == "another batch, sum of operators")


def test_the_parts_of_an_error_add_up_to_it():
    rows = select_cases(make_cases(), SUMS)
    split = split_error(rows)
    assert list(split["part"]) == [H100, A100]
    assert split["points"].sum() == pytest.approx(rows["error"].abs().mean()) == pytest.approx(0.05)
    first = split.iloc[0]
    assert first["points"] == pytest.approx(0.04)
    assert first["without"] == pytest.approx(0.015)
    assert first["oracle_error"] == 0 and first["beside_oracle"] == pytest.approx(0.12)


def test_a_sum_is_split_by_class_and_by_how_much_each_grew():
    cases = make_cases()
    row = select_cases(cases, SUMS).query("group == 'inf'").to_dict("records")[0]
    split = split_case(cases, row).set_index("group")
    assert list(split.index) == ["gemm forward", "elementwise forward"]
    assert split["points"].sum() == pytest.approx(row["error"])
    gemm = split.loc["gemm forward"]
    assert gemm["points"] == pytest.approx(0.10)
    assert gemm["measured_growth"] == pytest.approx(0.75 / 0.5)
    assert gemm["predicted_growth"] == pytest.approx(0.85 / 0.5)


def test_a_case_without_operators_is_not_split():
    cases = make_cases()
    row = select_cases(cases, SUMS).query("group == 'train'").to_dict("records")[0]
    assert split_case(cases, row).empty
