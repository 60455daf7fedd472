"""README's rows, and the lines and blocks of docs, that are rewritten from the tables of a run."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evaluation.validation.validation_cases import make_cases
from page_numbers import Result, describe_errors, describe_validation, markers, publish, publish_spreads, record_run
from report_run import PLANS, experiments_of, write_run
from trioflow.base.errors import InputError
from trioflow.base.experiments import Plan
from trioflow.costmodel.uncertainty import load_spreads
from trioflow.report.errors import build_error_table, score_cases
from trioflow.report.inputs import load_report_inputs

ROOT = Path(__file__).parents[2]
ROWS = {row["plan"]: Plan(**row) for row in PLANS}
OLDER_RUN = "run\texperiments\tmean_absolute_error\tbias\n1\t26\t0.063\t\n"
BEGIN, END = markers("errors")
SMALL = [("vgg11", 8, 0.3, 140, 28_000_000)]
RESULT = Result("page.md", [("first", "1 %"), ("second", "2 %")], "the table", [("all", "3", "1.5 %", "80 %")])
LINE = re.compile(r"^- \[(.*?)\]\((.*?)\): (.*) <!-- (\w+) -->$", re.MULTILINE)
ROW = re.compile(r"^\| \[(.*?)\]\(docs/(.*?)\) \| (.*) <!-- (\w+) --> \|$", re.MULTILINE)
ROW_OLD = "| old | <!-- errors --> |\n"


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    files = write_run(tmp_path_factory.mktemp("run"), SMALL, scale=0.1)
    inputs = load_report_inputs(files, experiments_of(SMALL), PLANS)
    return build_error_table(inputs.experiments, inputs.measurements, inputs.summaries)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text(f"# top\n\n{BEGIN}\nold 99 %\n{END}\n\ntail\n")
    (tmp_path / "docs/accuracy.md").write_text("# top\n- old <!-- errors -->\n- x <!-- other -->\ntail\n")
    (tmp_path / "README.md").write_text(f"# top\n{ROW_OLD}tail\n")
    return tmp_path


def test_publishing_twice_changes_nothing_more_and_nothing_outside(root):
    assert publish(root, "errors", RESULT) is True
    names = ("README.md", "docs/accuracy.md", "docs/page.md")
    readme, listed, page = ((root / name).read_text() for name in names)
    assert readme == "# top\n| [all](docs/page.md) | 3 | 1.5 % | 80 % <!-- errors --> |\ntail\n"
    assert page == f"# top\n\n{BEGIN}\nthe table\n{END}\n\ntail\n"
    assert listed == (
        "# top\n- [first](page.md): 1 % <!-- errors -->\n"
        "- [second](page.md): 2 % <!-- errors -->\n- x <!-- other -->\ntail\n"
    )
    assert publish(root, "errors", RESULT) is False
    assert publish(root, "errors", Result("page.md", RESULT.lines[:1])) is True
    left = listed.replace("- [second](page.md): 2 % <!-- errors -->\n", "")
    assert (root / "docs/accuracy.md").read_text() == left and (root / "README.md").read_text() == readme
    assert (root / "docs/page.md").read_text() == page


@pytest.mark.parametrize("text", ["nothing", f"{BEGIN}\n", f"{END}\n", f"{BEGIN}{BEGIN}{END}", f"{END}\n{BEGIN}\n"])
def test_missing_doubled_or_swapped_markers_are_refused_and_nothing_is_written(root, text):
    (root / "docs/page.md").write_text(text)
    before = (root / "README.md").read_text()
    with pytest.raises(InputError, match="marker"):
        publish(root, "errors", RESULT)
    assert (root / "docs/page.md").read_text() == text
    assert (root / "README.md").read_text() == before


def test_a_missing_page_list_readme_or_line_is_refused_and_nothing_is_written(root):
    before = (root / "docs/page.md").read_text()
    for name in ("README.md", "docs/accuracy.md"):
        text = (root / name).read_text()
        (root / name).write_text("# top\n")
        with pytest.raises(InputError, match="no line ends with"):
            publish(root, "errors", RESULT)
        assert (root / "docs/page.md").read_text() == before
        (root / name).write_text(text)
    (root / "README.md").unlink()
    with pytest.raises(InputError, match="no such file"):
        publish(root, "errors", RESULT)
    with pytest.raises(InputError, match="no such file"):
        publish(root, "errors", Result("none.md", RESULT.lines, "x"))
    assert (root / "docs/page.md").read_text() == before


def test_every_experiment_stands_with_its_error_and_its_times(errors, tmp_path):
    table, runs = tmp_path / "error.parquet", tmp_path / "runs.tsv"
    table.write_bytes(b"the run")
    runs.write_text(OLDER_RUN)
    found = record_run(runs, table, errors, ROWS)
    result = describe_errors(errors, found)
    lines = result.body.splitlines()
    matrix = [line for line in lines if line.count("|") == errors["workload"].nunique() + 3]
    assert sum(line.count(" %") for line in matrix) == len(errors) + errors["plan"].nunique()
    for row in errors.to_dict("records"):
        signed = f"{abs(100 * row['relative_error']):.1f} %"
        assert signed in next(line for line in matrix if line.startswith(f"| {row['plan']} |"))
        line = next(line for line in lines if line.startswith(f"| {row['experiment']} |"))
        assert line.count("|") == 9 and signed in line
    with pytest.raises(InputError, match="no experiment"):
        describe_errors(errors.head(0), found)


def test_a_run_is_listed_once_and_readme_gives_the_range_of_all(errors, tmp_path):
    table, runs = tmp_path / "error.parquet", tmp_path / "runs.tsv"
    table.write_bytes(b"the run")
    runs.write_text(OLDER_RUN)
    found = record_run(runs, table, errors, ROWS)
    assert found["run"].tolist()[0] == "1" and len(found) == 2
    once = runs.read_text()
    assert len(record_run(runs, table, errors, ROWS)) == 2 and runs.read_text() == once
    mean = errors["relative_error"].abs().mean()
    low, high = sorted([round(mean, 4), 0.063])
    result = describe_errors(errors, found)
    assert f"different machines: {100 * low:.1f} %, {100 * high:.1f} % (" in result.body
    ((what, reached),) = result.lines
    assert what.startswith(f"{len(errors)} steps")
    assert reached.startswith(f"{100 * low:.1f} % to {100 * high:.1f} % mean absolute error in 2 full runs")


def test_bias_coverage_and_kinds_of_plans_are_those_of_the_runs_that_have_them(errors, tmp_path):
    runs = tmp_path / "runs.tsv"
    runs.write_text(OLDER_RUN)
    plans = ["tp2", "fsdp2", "single", "single"]
    rows = ROWS | {"fsdp2": replace(ROWS["ddp2"], plan="fsdp2", sharding="fsdp")}
    for number, shift in enumerate((0.0, 0.02)):
        table = tmp_path / str(number)
        table.write_bytes(str(number).encode())
        relative = [-0.1 + shift, 0.06 + shift, 0.0, 0.04]
        run = errors.head(4).assign(
            plan=plans,
            relative_error=relative,
            simulated_s=[1 + one for one in relative],
            measured_s=1.0,
            low_s=[0.9, 0.9, 0.9, 1.1],
            high_s=1.2,
        )
        found = record_run(runs, table, run, rows)
    assert found["bias"].tolist()[1:] == [0.0, 0.01] and np.isnan(found["bias"][0])
    result = describe_errors(run, found)
    assert result.lines[0][1].endswith(
        "in the last 2, on average, bias +0.5 %, tensor parallelism off by 9.0 %, FSDP by 7.0 %, "
        "inside the 80 % interval 75 %"
    )
    assert "| mean | 5.0 % | +0.5 % | 9.0 % | 7.0 % | 75 % | 25 % |" in result.body
    assert result.body.count("| mean |") == 1


def test_the_table_of_spreads_is_that_of_the_spreads_that_ship(tmp_path):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/spread.md"
    page.write_text((ROOT / "docs/spread.md").read_text())
    assert publish_spreads(tmp_path, load_spreads()) is False
    assert publish_spreads(tmp_path, load_spreads()[:1]) is True
    assert "| gpu | trace-" not in page.read_text()


def test_the_validation_holds_a_row_for_every_aim():
    scores = score_cases(make_cases(), ["set", "quantity", "group", "model"])
    result = describe_validation(scores)
    row = "| another batch, sum of operators | 3 | 3 % | 5.0 % | 50.0 % (proportional) | \u2013 | 100 % |"
    assert row in result.body
    assert "| another batch, training, sum of operators | 2 | 3 % | **1.5 %** |" in result.body
    assert "| oracle + 2 points | **5.0 %** | 5.0 % (proportional) | 4.0 % | \u2013 |" in result.body
    assert len(result.body.splitlines()) < 25
    ((_, reached),) = result.lines
    assert "another batch 5.0 %" in reached
    with pytest.raises(InputError, match="no aim was judged"):
        describe_validation(scores[scores["group"] == "inf forward"])


def test_each_number_of_readme_and_of_the_list_stands_on_the_page_behind_its_link():
    readme, text = (ROOT / "README.md").read_text(), (ROOT / "docs/accuracy.md").read_text()
    lines, rows = LINE.findall(text), ROW.findall(readme)
    assert len(rows) == readme.count("<!-- ") == 5 and len(readme.splitlines()) <= 120
    assert {topic for *_, topic in lines} == {
        "errors",
        "published",
        "clusters",
        "bridge",
        "drift",
        "validation",
        "speed",
    }
    for _, page, reached, topic in lines + rows:
        shown = (ROOT / "docs" / (page if page[0] != "#" else "accuracy.md")).read_text()
        assert topic == "speed" or all(shown.count(marker) == 1 for marker in markers(topic))
        if topic not in ("errors", "drift"):  # a range over runs, and the worst of a column
            for number in re.findall(r"\d[\d.]* %|\*\*.*?\*\*", reached):
                assert number in shown, (number, page)


def test_prose_is_at_most_120_characters_wide():
    """Rows of tables, commands, and what a run writes aside."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "workflow/DESIGN.md"]
    pages += sorted((ROOT / "docs").glob("*.md"))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if re.search("[Gg]enerated by|^Written by", text, re.MULTILINE):
            continue
        text = re.sub(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->|^```.*?^```", "", text, flags=re.S | re.M)
        wide = [line for line in LINE.sub("", text).splitlines() if len(line) > 120]
        wide = [line for line in wide if line[:1] != "|" and " " in line.strip("`, ")]
        assert not wide, (page.name, wide[:2])
