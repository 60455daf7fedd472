"""What a missed aim's error is made of."""

import pytest
from trioflow_evaluation.validation.aims import (
    AIMS,
    select_cases,
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
