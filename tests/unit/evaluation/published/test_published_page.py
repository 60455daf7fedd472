"""The page of public cases, and the README's block, from made-up cases."""

import re

import pandas as pd
import pytest
from page_numbers import describe_published
from test_report_page import Page
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.report.attribution import CAUSES
from trioflow.report.attribution_section import draw_tornado, summarise_changes
from trioflow.report.pages import write_time
from trioflow.report.style import save_figure
from trioflow_evaluation.published.cases import DISCLOSED, list_disclosures
from trioflow_evaluation.published.judge import ANCHORS, PROPORTIONAL, RESCALED, list_residuals
from trioflow_evaluation.published.page import (
    build_published_page,
    draw_cases,
    read_cases,
    sum_growth,
)

from evaluation.published.published_cases import make_case, make_cases

CAUSE_ROWS = [
    ("h100-4gpu", "a", "part", "compute", "", 0.9),
    ("h100-4gpu", "a", "part", "communication that no compute hides", "", 0.1),
    ("h100-4gpu", "a", "part", "waiting", "", 0.02),
    ("h100-4gpu", "a", "replaced", "compute", "measured on one such GPU at the same batch", 1.01),
    ("h100-4gpu", "a", "sensitivity", "compute time", "x 1.1", 1.122),
    ("h100-4gpu", "b", "sensitivity", "compute time", "x 1.1", 2.0),
    ("h100-4gpu", "a", "sensitivity", "latency of collectives", "x 2", 1.03),
    ("resnet50-a40", "e", "growth", "forward: convolution", PROPORTIONAL, 1.5),
    ("resnet50-a40", "e", "growth", "forward: convolution", RESCALED, 0.7),
    ("resnet50-a40", "e", "growth", "optimizer: optimizer", PROPORTIONAL, 0.4),
    ("resnet50-a40", "e", "growth", "optimizer: optimizer", RESCALED, 0.1),
]
ANCHOR_ROWS = [("NVIDIA A40", "m", "train", 1, 4, 1.0, 1.01, 1.05, 1.2)]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    files = []
    cases = make_cases()
    for name, rows in cases.groupby("set"):
        files.append(folder / f"published/{name}.parquet")
        tables.write_table(rows, "published_cases", files[-1])
    causes = folder / "published/h100-4gpu-causes.parquet"
    frame = pd.DataFrame(CAUSE_ROWS, columns=CAUSES.names)
    tables.write_table(frame, "causes", causes, schema=CAUSES)
    anchors = folder / "published/anchors.parquet"
    frame = pd.DataFrame(ANCHOR_ROWS, columns=ANCHORS.names)
    tables.write_table(frame, "anchors", anchors, schema=ANCHORS)
    page, table = folder / "report/published.html", folder / "report/published.parquet"
    scores = build_published_page(files[::-1], [causes], anchors, page, table)
    return folder, scores, page.read_text(encoding="utf-8")


def test_every_case_and_its_error_stand_on_the_page(built):
    _, _, text = built
    rows: dict[str, list[str]] = {}
    for row in Page(text).rows:
        if len(row) > 5:
            rows.setdefault(row[0], row)
    for case in make_cases().to_dict("records"):
        told = rows[case["case"]]
        assert float(told[1]) == case["measured_s"]
        assert float(told[3]) == pytest.approx(case["predicted_s"] / case["measured_s"] - 1)
    assert (rows["a"][4], rows["c"][4]) == ("yes", "no")
    assert "gpipe4-m1, 4 GPUs, 4" in text


def test_the_page_is_whole_and_needs_nothing_from_outside(built):
    folder, _, text = built
    parsed = Page(text)
    anchors = {place.removeprefix("#") for place in parsed.links if place.startswith("#")}
    assert anchors <= set(parsed.addresses)
    assert "http://" not in text and "https://" not in text
    for name, shown in (
        ("h100-4gpu", "data"),
        ("resnet50-a40", "data"),
        ("h100-4gpu-sensitivity", "src"),
    ):
        assert f'{shown}="published/{name}.svg"' in text
        for suffix in ("svg", "png"):
            assert (folder / f"report/published/{name}.{suffix}").stat().st_size > 0
    assert not (folder / "report/published/resnet50-a40-sensitivity.svg").exists()
    assert text.index('id="h100-4gpu"') < text.index('id="resnet50-a40"')
    assert '<section id="h100-4gpu"><h2>' in text, (
        "the first set is open, others when they are asked for"
    )
    assert '<section id="resnet50-a40"><details class="fold"><summary>' in text


def test_an_aim_is_reached_or_not_as_the_scores_say(built):
    _, scores, _ = built
    ours = scores[scores["model"] == "trioflow"].set_index("set")
    assert ours.loc["h100-4gpu", "mean_absolute_error"] > 0.04
    rows = describe_published(make_cases()).body.splitlines()
    assert any(row.startswith("| Four H100") and "| 4 % | 9.0 % |" in row for row in rows)
    assert len({row.count("|") for row in rows if row.startswith("|")}) == 1
    good = make_cases().assign(predicted_s=make_cases()["measured_s"])
    assert "**0.0 %**" in describe_published(good).body
    assert "(TrioSim's public rules)" in describe_published(make_cases()).body


def test_readme_has_a_line_for_each_set():
    result = describe_published(make_cases())
    assert len(result.lines) == make_cases()["set"].nunique() and result.page == "published.md"
    told = dict(result.lines)["Four H100: data, tensor and pipeline parallelism"]
    assert told.startswith("9.0 %") and told.endswith(" cases)")
    with pytest.raises(InputError, match="no public case"):
        describe_published(make_cases().head(0))


def test_points_without_a_traced_gpu_leave_no_residual():
    none = pd.DataFrame(columns=ANCHORS.names)
    left = list_residuals(none, make_cases())
    assert left
    assert not list_residuals(none, make_cases().assign(source_gpu=""))


def test_what_a_change_does_is_averaged_over_the_cases_that_have_it():
    causes = pd.DataFrame(CAUSE_ROWS, columns=CAUSES.names)
    told = summarise_changes(make_cases(), causes, "h100-4gpu").set_index("parameter")
    assert told.index[0] == "compute time"
    assert told.loc["compute time", "cases"] == 2
    assert told.loc["compute time", "change"] == pytest.approx((0.1 + (2.0 / 1.9 - 1)) / 2)
    assert told.loc["compute time", "error"] == pytest.approx(0.122 / 2)
    assert told.loc["latency of collectives", "base_error"] == pytest.approx(0.02)


def test_many_cases_are_drawn_as_points_and_none_is_refused():
    many = pd.DataFrame([make_case(f"case {n}", "ddp4", 1.0 + n, 1.1 + n) for n in range(60)])
    figure = draw_cases(many, "h100-4gpu")
    assert len(figure.axes) == 1
    assert len(draw_cases(make_cases(), "h100-4gpu").axes[0].get_yticklabels()) == 3
    with pytest.raises(InputError, match="no case"):
        draw_cases(many, "none")
    with pytest.raises(InputError, match="no sensitivity"):
        draw_tornado(pd.DataFrame(columns=["parameter"]), "none")


def test_a_case_that_stands_twice_is_refused(tmp_path):
    file = tmp_path / "cases.parquet"
    tables.write_table(make_cases(), "published_cases", file)
    with pytest.raises(InputError, match="stands twice"):
        read_cases([file, file])
    tables.write_table(make_cases().head(0), "published_cases", file)
    with pytest.raises(InputError, match="no public case to report"):
        read_cases([file])


def test_an_error_at_a_batch_that_was_not_traced_is_a_sum_of_parts(built):
    causes = pd.DataFrame(CAUSE_ROWS, columns=CAUSES.names)
    parts = sum_growth(make_cases(), causes, "resnet50-a40").loc["e"]
    # Operators: 1.9 s in proportion, 0.8 s as predicted, of a step predicted at 1.0 and measured at 2.5 s.
    assert parts[["growth", "plan", "rest"]].tolist() == pytest.approx([-0.44, 0.08, -0.24])
    assert parts[["growth", "plan", "rest"]].sum() == pytest.approx(parts["error"]) == -0.6
    text = built[2].partition('<section id="resnet50-a40">')[2].partition("</section>")[0]
    for value in (-0.44, 0.08, -0.24):
        assert any(
            abs(float(key) - value) < 1e-9
            for key in re.findall('data-sort="(-?[0-9][0-9.e-]*)"', text)
        )
    assert "holds 0 of 1" in text.replace("&nbsp;", " ")
    assert sum_growth(make_cases(), causes, "h100-4gpu").empty


def test_every_score_of_every_set_stands_in_the_summary(built):
    _, scores, text = built
    summary = text.partition('<section id="summary">')[2].partition("</section>")[0]
    keys = (
        "mean_absolute_error",
        "median_absolute_error",
        "worst_error",
        "bias",
        "rank_correlation",
        "coverage",
        "mean_relative_width",
        "interval_score",
    )
    for row in scores[scores["model"] == "trioflow"].to_dict("records"):
        for key in keys:
            value = row[key]
            assert pd.isna(value) or f'data-sort="{float(value)!r}"' in summary, (row["set"], key)


def test_what_was_chosen_with_results_in_sight_is_said_beside_the_sets_concerned(built):
    text = built[2].partition('<section id="disclosed">')[2].partition("</section>")[0]
    assert text.count("<li>") == len(DISCLOSED) == 2
    for words in ("timer", "copies", "embedding and head", "interval"):
        assert words in text
    assert len(list_disclosures({"resnet50-h100"})) == 1
    assert list_disclosures({"vtrain-a100"}) == []


def test_a_row_of_the_figure_says_its_numbers(tmp_path):
    cases = make_cases()
    name = str(cases["set"].iloc[0])
    rows = cases[cases["set"] == name]
    text = save_figure(draw_cases(cases, name), tmp_path / "figure")[0].read_text(encoding="utf-8")
    notes = re.findall("<title>(.+?): measured .+?</title>", text)
    assert notes == [*rows["case"]], "from the top down"
    assert f"trioflow {write_time(rows['predicted_s'].iloc[0])} (" in text
