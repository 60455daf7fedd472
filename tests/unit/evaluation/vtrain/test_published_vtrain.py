from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.report.errors import score_published
from trioflow.sweeps.search_space import RankedStep, probability_faster
from trioflow.tables import PUBLISHED_CASES, write_table
from trioflow_evaluation.chances import measure_miss, render_chances
from trioflow_evaluation.tables import CHECKS, PARAMETERS
from trioflow_evaluation.vtrain.judge import NOTHING, WHOLE, describe_plans, score_plan_chances
from trioflow_evaluation.vtrain.model import GROUPS, PLANS, UNCALIBRATED, list_fitted_parameters
from trioflow_evaluation.vtrain.page import build_vtrain_page, is_composed, read_sizes, render_checks, render_summary
from vtrain_rows import make_rows


def make_cases(name: str) -> pd.DataFrame:
    rows = make_rows(plans=((1, 2, 1), (2, 1, 1), (1, 1, 2)), micro_batch=(1, 2))
    work = rows["layers"] * rows["micro_batches"] * rows["micro_batch"] * rows["hidden"] / 1e6
    frame = pd.DataFrame(
        {
            "set": name,
            "workload": "gpt-h" + rows["hidden"].astype(str) + "-l" + rows["layers"].astype(str),
            "plan": describe_plans(rows),
            "batch": rows["batch"],
            "ranks": rows["gpus"],
            "measured_s": work,
            "predicted_s": 1.1 * work,
            "low_s": work,
            "high_s": 1.2 * work,
            "oracle_s": 1.01 * work,
            "triosim_s": np.nan,
            "analytical_s": 0.5 * work,
            "regression_s": 1.06 * work,
            "spread": np.nan,
        }
    )
    frame["case"] = frame["workload"] + "-" + frame["plan"] + "-b" + frame["batch"].astype(str)
    texts = [column for column in PUBLISHED_CASES.names if column not in frame]
    return frame.assign(**dict.fromkeys(texts, "x"))[PUBLISHED_CASES.names]


def make_checks(exact: int) -> pd.DataFrame:
    return pd.DataFrame([("a relation", 10, exact, 0.0)], columns=CHECKS.names)


def write_inputs(folder: Path) -> list[Path]:
    files = []
    for name in (GROUPS, PLANS, UNCALIBRATED):
        files.append(folder / f"{name}.parquet")
        write_table(make_cases(name), "published_cases", files[-1])
    rows = [
        (name, fold, "a form", p.name, p.start, p.unit, p.low, p.high, p.meaning)
        for name, fold in ((WHOLE, NOTHING), (GROUPS, "layers 4"))
        for p in list_fitted_parameters().itertuples()
    ]
    tables = {
        "parameters": (pd.DataFrame(rows, columns=PARAMETERS.names), PARAMETERS),
        "checks": (make_checks(10), CHECKS),
    }
    for name, (frame, schema) in tables.items():
        files.append(folder / f"{name}.parquet")
        write_table(frame, name, files[-1], None, schema)
    return files


def test_sizes_come_back_from_the_names() -> None:
    sized = read_sizes(make_cases(GROUPS))
    expected = make_rows(plans=((1, 2, 1), (2, 1, 1), (1, 1, 2)), micro_batch=(1, 2))
    names = ["hidden", "layers", "tensor", "data", "pipeline", "micro_batches", "micro_batch", "batch"]
    pd.testing.assert_frame_equal(sized[names], expected[names])
    assert sized["error"].to_numpy() == pytest.approx(0.1)


def test_the_page_holds_figures_scores_and_parameters(tmp_path: Path) -> None:
    *cases, parameters, checks = write_inputs(tmp_path)
    page = tmp_path / "report" / "page.html"
    scores = build_vtrain_page(cases, parameters, checks, page)
    text = page.read_text()
    for name in ("predictions",):
        assert f"published_vtrain/{name}.svg" in text
        assert (page.parent / "published_vtrain" / f"{name}.png").stat().st_size > 1000
    assert all(p.name in text for p in list_fitted_parameters().itertuples())
    assert "10.0&nbsp;%" in text and "missed" in text
    assert text.count("Whole plans (tensor, data, pipeline) left out: the probability that search states") == 1
    ours = scores.set_index(["set", "model"]).loc[(GROUPS, "trioflow")]
    assert ours["mean_absolute_error"] == pytest.approx(0.1)


def test_of_two_plans_the_probability_is_the_one_that_search_states() -> None:
    cases = (
        make_cases(GROUPS)
        .iloc[:4]
        .assign(workload="one", batch=8, ranks=2, predicted_s=[1.0, 1.5, 3.0, 1.0], measured_s=[1.0, 0.9, 2.0, 9.0])
    )
    cases["high_s"] = 1.2 * cases["predicted_s"]
    cases.loc[cases.index[3], "batch"] = 16
    groups = score_plan_chances(cases)
    assert groups["pairs"].sum() == 3, "another batch is another question"
    stated = probability_faster(RankedStep(1.0, 0.2, 0.0), RankedStep(1.5, 0.2, 0.0))
    row = groups[(groups["low"] < stated) & (stated <= groups["high"])].iloc[0]
    assert (row["pairs"], row["won"]) == (3, pytest.approx(2 / 3)), "1.0 s was not before 1.5 s"
    assert measure_miss(groups) == pytest.approx(row["stated"] - 2 / 3)
    assert score_plan_chances(cases.assign(measured_s=1.0))["won"].tolist() == [0.5]
    assert "without runs over nodes" not in render_chances(groups, "x")


def test_a_missing_set_leaves_nothing_behind(tmp_path: Path) -> None:
    first, _, third, parameters, checks = write_inputs(tmp_path)
    with pytest.raises(InputError, match=PLANS):
        build_vtrain_page([first, third], parameters, checks, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_composed_times_are_called_so_and_others_are_not() -> None:
    assert is_composed(make_checks(10)) and not is_composed(make_checks(9))
    assert not is_composed(make_checks(0).assign(compared=0))
    assert "added up from parts" in render_checks(make_checks(10))
    assert "added up from parts" not in render_checks(make_checks(9))
    scores = score_published(pd.concat([make_cases(name) for name in (GROUPS, PLANS, UNCALIBRATED)]))
    assert "sums of parts" in render_summary(scores, make_checks(10))
    assert "sums of parts" not in render_summary(scores, make_checks(9))
