"""Aims beside what was reached.

What a missed aim's error is made of.

The page of cost models, from made-up cases.

Scores of predictions with intervals.
"""

import re

import pandas as pd
import pytest
from test_report_page import Page
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.report.errors import score_cases
from trioflow_evaluation.tables import SUMMARY
from trioflow_evaluation.validation.operators import GROUPS, RANK_CASES
from trioflow_evaluation.validation.operators import SET as COLLECTIVES
from trioflow_evaluation.validation.page import AIMS, SETS, build_validation_page, reach_aims, select_cases, split_error

from evaluation.validation.validation_cases import A100, H100, make_cases, write_files


@pytest.fixture(scope="module")
def reached():
    cases = make_cases()
    cases = cases[cases["group"] != "inf forward"]
    entries = reach_aims(score_cases(cases, ["set", "quantity", "group", "model"]))
    return {entry.what: entry for entry in entries}


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
    assert entry.aim == pytest.approx(0.04 + 0.02)
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


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("validation")
    files, diagnoses = write_files(folder)
    page, table = folder / "report/cost_models.html", folder / "report/validation.parquet"
    summary = build_validation_page(files, diagnoses, page, table)
    return folder, summary, page.read_text(encoding="utf-8")


def test_the_table_of_scores_is_what_the_page_was_made_from(built):
    folder, summary, _ = built
    stored = tables.read_table(folder / "report/validation.parquet", "summary", SUMMARY)
    assert stored.equals(summary.astype(stored.dtypes.to_dict()))
    row = summary.set_index(["set", "quantity", "group", "model"]).loc[
        ("batch-change", "operator_sum", "train", "shipped")
    ]
    assert row["mean_absolute_error"] == pytest.approx(0.015)
    assert row["worst_error"] == pytest.approx(0.02)
    best_first = summary[summary["group"] == "train"]["model"]
    assert list(best_first)[:2] == ["shipped", "proportional"]


def test_a_phase_that_is_the_whole_step_is_told_once(built):
    assert "inf forward" not in set(built[1]["group"])
    assert "inf" in set(built[1]["group"])


def test_every_step_stands_on_the_page_with_the_error_of_every_model(built):
    parsed = Page(built[2])
    assert ["net inf 2 -> 8", "NVIDIA H100 80GB HBM3", "1.0"] in [r[:3] for r in parsed.rows]
    listed = next(row for row in parsed.rows if row[:2] == ["net train 8 -> 2", A100])
    assert float(listed[3]) == pytest.approx(-0.01) and listed[4] == "yes"
    assert float(listed[5]) == pytest.approx(-0.1)
    steps = make_cases().query("quantity in ('operator_sum', 'end_to_end') and model == 'shipped'")
    kept = steps[steps["group"] != "inf forward"]
    assert sum(row[0] in set(kept["case"]) for row in parsed.rows if row) == len(kept)


def test_aims_are_told_beside_what_was_reached(built):
    rows = {row[0]: row for row in Page(built[2]).rows if row}
    missed, reached = rows["another batch, sum of operators"], rows["another batch, end to end"]
    assert (missed[4], reached[4]) == ("no", "yes")
    assert float(missed[3]) == pytest.approx(0.05)
    assert "oracle + 2 points" in built[2]


def test_a_missed_aim_says_what_its_error_is_made_of(built):
    text = re.sub(r"&nbsp;", " ", built[2])
    told = "Of these 5.0 points, 4.0 come from NVIDIA H100 80GB HBM3 (1 of 3 cases, 12.0 % on average)"
    assert told in text
    opened = re.sub(r"<details.*?</summary>.*?</details>", "", text, flags=re.DOTALL)
    assert told in opened and "where it was measured" not in opened, "tables when they are asked for"


def test_everything_linked_exists_and_nothing_comes_from_outside(built):
    folder, _, text = built
    parsed = Page(text)
    assert {place.removeprefix("#") for place in parsed.links if place.startswith("#")} <= set(parsed.addresses)
    figures = {"cost_models/batch-change.svg", "cost_models/collectives.svg"}
    figures |= {"cost_models/a100-pcie-80gb.svg"}
    assert set(parsed.sources) == figures | {"pages.js"}
    for source in figures:
        assert (folder / "report" / source).stat().st_size > 2000
    assert not re.search(r"(?:https?:)?//[a-z]", text)
    names = {path.name for path in (folder / "report").iterdir()}
    assert names == {"cost_models.html", "validation.parquet", "cost_models", "pages.js"}


def test_the_fit_of_every_class_is_told(built):
    rows = [row for row in Page(built[2]).rows if row and row[0] in ("gemm", "view")]
    assert [row[:4] for row in rows] == [["gemm", "flop", "5.0", "0.987"], ["view", "none", "5.0", ""]]


def test_equal_cases_give_equal_pages(built, tmp_path):
    files, diagnoses = write_files(tmp_path)
    page = tmp_path / "report/cost_models.html"
    build_validation_page(files, diagnoses, page, tmp_path / "report/validation.parquet")
    # A longer folder's name may wrap.
    told, before = (re.sub(' class="(long|medium)"', "", text) for text in (page.read_text(), built[2]))
    assert told.replace(tmp_path.name, "X") == before.replace(built[0].name, "X")


def test_unknown_sets_no_cases_and_foreign_tables_leave_nothing(tmp_path):
    files, diagnoses = write_files(tmp_path)
    page, table = tmp_path / "report/page.html", tmp_path / "report/scores.parquet"
    cases = make_cases()
    tables.write_table(cases.assign(set="batch"), "validation", files[0])
    with pytest.raises(InputError, match=r"'batch'.*use batch-change"):
        build_validation_page(files, diagnoses, page, table)
    tables.write_table(cases.head(0), "validation", files[0])
    with pytest.raises(InputError, match="no validation case"):
        build_validation_page(files[:1], diagnoses, page, table)
    with pytest.raises(TableError, match="diagnosed operators table of this version"):
        build_validation_page(files[1:], diagnoses[::-1], page, table)
    assert not (tmp_path / "report").exists()


ROWS = pd.DataFrame(
    {
        "set": "s",
        "quantity": "q",
        "device": "d",
        "model": ["a", "a", "b"],
        "measured_s": [1.0, 2.0, 1.0],
        "predicted_s": [1.1, 1.0, 3.0],
        "low_s": [0.9, 0.5, None],
        "high_s": [1.2, 1.5, None],
        "oracle_s": [1.0, 2.2, None],
        "extrapolated": [0.0, 0.5, 1.0],
    }
)


def test_scores_of_hand_worked_cases():
    found = score_cases(ROWS).set_index("model")
    a = found.loc["a"]
    assert a["bias"] == pytest.approx((0.1 - 0.5) / 2)
    assert a["mean_absolute_error"] == pytest.approx(0.3)
    assert a["worst_error"] == pytest.approx(-0.5)
    assert a["oracle_mean_absolute_error"] == pytest.approx(0.05)
    assert (a["oracle_cases"], a["beside_oracle_error"]) == (2, pytest.approx(0.3))
    assert a["extrapolated"] == pytest.approx(0.25)
    assert a["coverage"] == pytest.approx(0.5)
    assert a["mean_relative_width"] == pytest.approx((0.3 + 0.5) / 2)
    assert a["interval_score"] == pytest.approx((0.3 + 0.5 + 10 * 0.5 / 2) / 2)


def test_models_without_intervals_have_no_coverage():
    b = score_cases(ROWS).set_index("model").loc["b"]
    assert (b["cases"], b["intervals"]) == (1, 0)
    assert pd.isna(b["coverage"])
    assert b["oracle_cases"] == 0 and pd.isna(b["beside_oracle_error"])
    assert b["mean_absolute_error"] == pytest.approx(2.0)
