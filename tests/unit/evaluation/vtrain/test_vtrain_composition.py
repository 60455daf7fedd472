import numpy as np
import pandas as pd
from trioflow_evaluation.tables import CHECKS
from trioflow_evaluation.vtrain.data import AllReduceCurves, check_composition
from trioflow_evaluation.vtrain.judge import list_parameters
from trioflow_evaluation.vtrain.model import FORMS
from vtrain_rows import REDUCES, make_rows, time_rows

START = np.array([parameter.start for parameter in list_parameters()])


def make_composed() -> tuple[pd.DataFrame, AllReduceCurves]:
    plans = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1))
    rows = make_rows(hidden=(512,), layers=(4,), plans=plans, micro_batches=(2, 4, 8))
    rows = time_rows(rows, START, FORMS[0])
    alone = rows[rows["data"] == 1].reset_index(drop=True)
    both = rows[rows["data"] == 2].reset_index(drop=True)
    added = both["measured_s"] - alone["measured_s"]
    table = AllReduceCurves({2: np.arange(1.0, len(added) + 1)}, {2: np.sort(added.to_numpy())})
    return rows, table


def test_a_sum_of_parts_is_told() -> None:
    rows, table = make_composed()
    checks = check_composition(rows, table)
    assert list(checks.columns) == CHECKS.names
    assert (checks["compared"] > 0).all()
    assert (checks["exact"] == checks["compared"]).all()


def test_noise_of_a_ten_thousandth_is_told_too() -> None:
    rows, table = make_composed()
    noise = np.random.default_rng(2).normal(1.0, 1e-4, len(rows))
    checks = check_composition(rows.assign(measured_s=rows["measured_s"] * noise), table)
    assert (checks["exact"] < checks["compared"]).all()
    assert (checks["worst_s"] > 1e-9).all()


def test_rows_without_pairs_are_nothing_to_compare() -> None:
    rows = make_rows(hidden=(512,), layers=(4,), plans=((1, 4, 1),))
    assert (check_composition(rows, REDUCES)["compared"] == 0).all()
