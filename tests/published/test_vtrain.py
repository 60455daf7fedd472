"""vTrain's 1,440 iteration times: what they are, and errors on rows left out of the fit."""

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from judged import read_or_make
from trioflow import tables
from trioflow.report.errors import share_in_order
from trioflow_evaluation.vtrain.judge import IN_PLACE, LEFT_OUT, leave_out, number_groups, predict_ridge
from trioflow_evaluation.vtrain.model import WAITS, StepModel, check_composition, read_all_reduces, read_iteration_times

REACHED = {"vtrain-a100": (0.055, 0.95), "vtrain-a100-plans": (0.055, 0.95)}
"""Mean absolute error and share of pairs in order that each set must keep."""
ROWS, PLANS = 1440, 18


def share_ordered(rows: pd.DataFrame, times: npt.NDArray[np.float64]) -> float:
    """Pairs of equal GPUs, batch, hidden size and layers, more than 5 % apart."""
    question = ["gpus", "batch", "hidden", "layers"]
    return share_in_order(rows.assign(predicted_s=times), question, apart=0.05)


@pytest.fixture(scope="module")
def rows(mirror: Path) -> pd.DataFrame:
    return read_iteration_times(mirror)


@pytest.fixture(scope="module")
def judged(mirror: Path, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Predictions of each set's rows, in their order; `oracle_s` knows the blocks' time."""
    model = StepModel.build(rows, read_all_reduces(mirror))

    def make(name: str) -> pd.DataFrame:
        groups = number_groups(rows, LEFT_OUT[name])
        found, _ = leave_out(model, groups, WAITS[:1])
        return found.assign(regression_s=predict_ridge(rows, groups), measured_s=rows["measured_s"])

    return {
        name: read_or_make(
            f"published/{name}.parquet", lambda path: tables.read_table(path, "published_cases"), partial(make, name)
        )
        for name in LEFT_OUT
    }


def test_every_row_is_there_once(rows: pd.DataFrame) -> None:
    assert len(rows) == ROWS
    assert not rows.drop(columns="measured_s").duplicated().any()
    assert rows.groupby(["tensor", "data", "pipeline"]).ngroups == PLANS


def test_the_times_are_sums_of_parts(mirror: Path, rows: pd.DataFrame) -> None:
    checks = check_composition(rows, read_all_reduces(mirror, IN_PLACE))
    assert (checks["compared"] >= 40).all()
    assert (checks["exact"] == checks["compared"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", REACHED)
def test_left_out_rows_keep_their_limits(name: str, rows: pd.DataFrame, judged: dict[str, pd.DataFrame]) -> None:
    found, measured = judged[name], rows["measured_s"]
    assert found["measured_s"].tolist() == measured.tolist()
    error = np.abs(found["predicted_s"] / measured - 1).mean()
    ordered = share_ordered(rows, found["predicted_s"].to_numpy())
    assert error < REACHED[name][0] and ordered > REACHED[name][1]
    inside = found["measured_s"].between(found["low_s"], found["high_s"]).mean()
    assert 0.7 < inside < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", REACHED)
def test_a_regression_on_the_same_rows_is_worse(name: str, rows: pd.DataFrame, judged: dict[str, pd.DataFrame]) -> None:
    ours, plain = (judged[name][column].to_numpy() for column in ("predicted_s", "regression_s"))
    measured = rows["measured_s"].to_numpy()
    assert np.abs(ours / measured - 1).mean() < 0.95 * np.abs(plain / measured - 1).mean()
    assert share_ordered(rows, ours) > share_ordered(rows, plain)


@pytest.mark.slow
def test_known_blocks_leave_the_rest_right(rows: pd.DataFrame, judged: dict[str, pd.DataFrame]) -> None:
    known = judged["vtrain-a100"]["oracle_s"].to_numpy()
    assert np.isfinite(known).all()
    assert np.abs(known / rows["measured_s"] - 1).mean() < 0.012
    assert share_ordered(rows, known) > 0.999
