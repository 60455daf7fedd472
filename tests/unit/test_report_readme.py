"""The parts of the README that are rewritten from the tables of a run."""

import re
from pathlib import Path

import pytest
from report_run import PLANS, experiments_of, write_run
from reproductions.validation.validation_cases import make_cases
from trioflow.base.errors import InputError, TableError
from trioflow.costmodel.judging import score_cases
from trioflow.report.errors import build_error_table
from trioflow.report.inputs import load_report_inputs
from trioflow.reproductions.readme import (
    COLUMNS,
    ERRORS,
    SPEED,
    VALIDATION,
    markers,
    read_speeds,
    update_readme,
    update_speed,
    update_validation,
    write_errors_page,
    write_speeds,
)

BEGIN, END = markers(ERRORS)
SMALL = [("vgg11", 8, 0.3, 140, 28_000_000)]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    files = write_run(tmp_path_factory.mktemp("run"), SMALL, scale=0.1)
    inputs = load_report_inputs(files, experiments_of(SMALL), PLANS)
    return build_error_table(inputs.experiments, inputs.measurements, inputs.summaries)


def test_rewriting_twice_changes_nothing_more_and_nothing_outside(errors, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"# top\n\n{BEGIN}\nold 99 %\n{END}\n\ntail\n")
    figure = tmp_path / "docs" / "errors.svg"
    figure.parent.mkdir()
    figure.write_text("<svg/>")
    assert update_readme(readme, errors, figure) is True
    text = readme.read_text()
    assert text.startswith(f"# top\n\n{BEGIN}\n") and text.endswith(f"\n{END}\n\ntail\n")
    assert "old 99 %" not in text
    assert "](docs/errors.svg)" in text
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert sum(line.count(" %") for line in table) == len(errors) + errors["plan"].nunique()
    for row in errors.to_dict("records"):
        line = next(line for line in table if line.startswith(f"| {row['plan']} |"))
        assert f"{abs(100 * row['relative_error']):.1f} %" in line
    assert f"{100 * errors['relative_error'].abs().mean():.1f} %" in text
    assert update_readme(readme, errors, figure) is False
    assert readme.read_text() == text


def test_the_page_of_errors_holds_every_experiment_with_its_times(errors, tmp_path):
    page = tmp_path / "errors.md"
    write_errors_page(page, errors)
    lines = page.read_text().splitlines()
    for row in errors.to_dict("records"):
        line = next(line for line in lines if line.startswith(f"| {row['experiment']} |"))
        assert line.count("|") == 9
        assert f"{abs(100 * row['relative_error']):.1f} %" in line


@pytest.mark.parametrize(
    "text",
    ["nothing", f"{BEGIN}\n", f"{END}\n", f"{BEGIN}{BEGIN}{END}", f"{END}\n{BEGIN}\n"],
)
def test_missing_doubled_or_swapped_markers_are_refused(errors, tmp_path, text):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(InputError, match="marker"):
        update_readme(readme, errors)
    assert readme.read_text() == text


def test_missing_readme_figure_and_experiments_are_refused(errors, tmp_path):
    readme = tmp_path / "README.md"
    with pytest.raises(InputError, match="no such file"):
        update_readme(readme, errors)
    readme.write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(InputError, match="no such figure"):
        update_readme(readme, errors, tmp_path / "none.svg")
    with pytest.raises(InputError, match="no experiment"):
        update_readme(readme, errors.head(0))


def test_the_validation_block_holds_a_row_for_every_aim(tmp_path):
    begin, end = markers(VALIDATION)
    readme = tmp_path / "README.md"
    readme.write_text(f"top\n{BEGIN}\n5 %\n{END}\n{begin}\nold 99 %\n{end}\ntail\n")
    scores = score_cases(make_cases(), ["set", "quantity", "group", "model"])
    assert update_validation(readme, scores) is True
    text = readme.read_text()
    assert text.startswith(f"top\n{BEGIN}\n5 %\n{END}\n{begin}\n") and text.endswith(
        f"\n{end}\ntail\n"
    )
    assert "old 99 %" not in text
    row = "| another batch, sum of operators | 3 | 3 % | 5.0 % | 50.0 % (proportional) | \u2013 | 100 % |"
    assert row in text
    assert "| another batch, training, sum of operators | 2 | 3 % | **1.5 %** |" in text
    assert "| oracle + 2 points | **5.0 %** | 5.0 % (proportional) | 4.0 % | \u2013 |" in text
    assert len(text.splitlines()) < 25
    assert update_validation(readme, scores) is False


def test_a_validation_without_aims_is_refused(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("\n".join(markers(VALIDATION)))
    scores = score_cases(make_cases(), ["set", "quantity", "group", "model"])
    with pytest.raises(InputError, match="no aim was judged"):
        update_validation(readme, scores[scores["group"] == "inf forward"])


def speed(**fields):
    row = {"what": "answer", "value": 1.5, "unit": "s", "aim": 2.0, "detail": "many | events",
           "peer": "", "peer_time": "", "ratio": None, "headline": True}  # fmt: skip
    return {**row, **fields}


def test_the_speed_block_holds_the_headlines_with_aims_and_peers(tmp_path):
    begin, end = markers(SPEED)
    readme, table = tmp_path / "README.md", tmp_path / "bench.tsv"
    readme.write_text(f"top\n{begin}\nold 9 s\n{end}\ntail\n")
    rows = [
        speed(), speed(what="hidden", headline=False), speed(what="slow", value=2.5),
        speed(what="rate", unit="M events/s", value=3.25, aim=3.0),
        speed(what="low rate", unit="M events/s", value=2.5, aim=3.0),
        speed(what="peer", value=0.004, aim=None, peer="Other", peer_time="18 to 29 s", ratio=4500.0),
    ]  # fmt: skip
    write_speeds(rows, table)
    assert update_speed(readme, read_speeds(table)) is True
    text = readme.read_text()
    assert text.startswith(f"top\n{begin}\n") and text.endswith(f"\n{end}\ntail\n")
    assert "old 9 s" not in text and "hidden" not in text and "events |" not in text
    table_lines = text.partition(f"{begin}\n")[2].partition(f"\n{end}")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table_lines[2:]]
    nobody = "\u2013"
    assert cells == [
        ["answer", "**1.5 s**", "2 s", nobody],
        ["slow", "2.5 s", "2 s", nobody],
        ["rate", "**3.25 M events/s**", "3 M events/s", nobody],
        ["low rate", "2.5 M events/s", "3 M events/s", nobody],
        ["peer", "4 ms", nobody, "Other 18 to 29 s: 4500"],
    ]
    assert update_speed(readme, read_speeds(table)) is False
    write_speeds([speed(headline=False)], table)
    with pytest.raises(InputError, match="no speed is a headline"):
        update_speed(readme, read_speeds(table))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "its columns are not"),
        ("what\tvalue\n", "its columns are not"),
        ("\t".join(COLUMNS) + "\nx\tsoon\ts\t\t\t\t\t\t\n", "row 0, column value: 'soon' is not a number"),
        ("\t".join(COLUMNS) + "\nx\t\ts\t\t\t\t\t\t\n", "'' is not a number"),
    ],
)  # fmt: skip
def test_a_table_of_speeds_of_another_kind_is_refused(text, told, tmp_path):
    (tmp_path / "t.tsv").write_text(text)
    with pytest.raises(TableError, match=told):
        read_speeds(tmp_path / "t.tsv")
    with pytest.raises(TableError, match="no such file"):
        read_speeds(tmp_path / "none.tsv")


def test_the_projects_readme_has_both_blocks():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    for block in (ERRORS, VALIDATION):
        assert [text.count(marker) for marker in markers(block)] == [1, 1]
    assert len(text.splitlines()) <= 160


def test_prose_is_at_most_120_characters_wide():
    """Rows of tables, commands, and blocks that a run writes aside."""
    root = Path(__file__).parents[2]
    pages = [root / "README.md", root / "CONTRIBUTING.md", root / "workflow/DESIGN.md"]
    pages += sorted((root / "docs").glob("*.md"))
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if re.search("[Gg]enerated by|^Written by", text, re.MULTILINE):
            continue
        text = re.sub(
            r"<!-- (\w+):begin -->.*?<!-- \1:end -->|^```.*?^```", "", text, flags=re.S | re.M
        )
        wide = [line for line in text.splitlines() if len(line) > 120]
        wide = [line for line in wide if line[:1] != "|" and " " in line.strip("`, ")]
        assert not wide, (page.name, wide[:2])
