"""The page of cost models, from made-up cases."""

import re

import pytest
from test_report_page import Page
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow_evaluation.tables import SUMMARY
from trioflow_evaluation.validation.page import build_validation_page

from evaluation.validation.validation_cases import A100, make_cases, write_files


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
    told = (
        "Of these 5.0 points, 4.0 come from NVIDIA H100 80GB HBM3 (1 of 3 cases, 12.0 % on average)"
    )
    assert told in text
    opened = re.sub(r"<details.*?</summary>.*?</details>", "", text, flags=re.DOTALL)
    assert told in opened and "where it was measured" not in opened, (
        "tables when they are asked for"
    )


def test_everything_linked_exists_and_nothing_comes_from_outside(built):
    folder, _, text = built
    parsed = Page(text)
    assert {place.removeprefix("#") for place in parsed.links if place.startswith("#")} <= set(
        parsed.addresses
    )
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
    assert [row[:4] for row in rows] == [
        ["gemm", "flop", "5.0", "0.987"],
        ["view", "none", "5.0", ""],
    ]


def test_equal_cases_give_equal_pages(built, tmp_path):
    files, diagnoses = write_files(tmp_path)
    page = tmp_path / "report/cost_models.html"
    build_validation_page(files, diagnoses, page, tmp_path / "report/validation.parquet")
    # A longer folder's name may wrap.
    told, before = (
        re.sub(' class="(long|medium)"', "", text) for text in (page.read_text(), built[2])
    )
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
