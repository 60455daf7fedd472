import numpy as np
import pandas as pd
import pytest
from trioflow import tables
from trioflow_evaluation.tables import PARAMETERS
from trioflow_evaluation.vtrain import judge as vtrain_fit
from trioflow_evaluation.vtrain.data import GROUPS, PLANS, UNCALIBRATED, check_composition
from trioflow_evaluation.vtrain.judge import LEFT_OUT, VtrainTables, judge_rows
from trioflow_evaluation.vtrain.model import FORMS, list_parameters
from vtrain_rows import REDUCES, make_rows, time_rows

START = np.array([parameter.start for parameter in list_parameters()])


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    plans = ((1, 2, 1), (2, 1, 1), (1, 1, 2))
    return time_rows(make_rows(plans=plans, micro_batches=(2,)), 1.3 * START, FORMS[0])


@pytest.fixture(scope="module")
def judged(rows: pd.DataFrame) -> VtrainTables:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vtrain_fit, "MOST_ROUNDS", 6)
        return judge_rows(rows, REDUCES, check_composition(rows, REDUCES))


def test_every_row_is_in_every_set_and_fits_the_schema(
    rows: pd.DataFrame, judged: VtrainTables
) -> None:
    table = tables.to_arrow(judged.cases, "published_cases")
    tables.validate(table, "published_cases")
    for name in (GROUPS, PLANS, UNCALIBRATED):
        mine = judged.cases[judged.cases["set"] == name]
        assert len(mine) == len(rows) == mine["case"].nunique()
        assert mine["measured_s"].to_numpy() == pytest.approx(rows["measured_s"].to_numpy())


def test_what_was_left_out_stands_in_the_row(rows: pd.DataFrame, judged: VtrainTables) -> None:
    for name, columns in LEFT_OUT.items():
        mine = judged.cases[judged.cases["set"] == name].reset_index(drop=True)
        for column in columns:
            named = mine["learned_from"].str.extract(rf"{column} (\d+)")[0].astype(int)
            assert (named == rows[column]).all()


def test_parameters_of_every_fold_are_listed(judged: VtrainTables) -> None:
    tables.validate(
        tables.to_arrow(judged.parameters, "parameters", schema=PARAMETERS),
        "parameters",
        schema=PARAMETERS,
    )
    folds = judged.parameters.groupby(["set", "fold"]).size()
    assert (folds == len(START)).all()
    assert len(folds) == 1 + 4 + 3  # a fit on all rows, four models, three plans
    assert (judged.parameters["value"] >= judged.parameters["low"] * (1 - 1e-9)).all()
    assert (judged.parameters["value"] <= judged.parameters["high"] * (1 + 1e-9)).all()
