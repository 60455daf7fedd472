"""The parts of the README that are rewritten from the tables of a run."""

from pathlib import Path

import pytest
from report.validation_cases import make_cases
from report_run import PLANS, experiments_of, write_run
from trioflow.costmodel.validation_scores import score_cases
from trioflow.errors import InputError
from trioflow.report.errors import build_error_table
from trioflow.report.inputs import load_report_inputs
from trioflow.report.readme import ERRORS, VALIDATION, markers, update_readme, update_validation

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
    for row in errors.to_dict("records"):
        line = next(
            line for line in text.splitlines() if line.startswith(f"| {row['experiment']} |")
        )
        assert line.count("|") == 9
        assert f"{abs(100 * row['relative_error']):.1f} %" in line
    assert f"{100 * errors['relative_error'].abs().mean():.1f} %" in text
    assert update_readme(readme, errors, figure) is False
    assert readme.read_text() == text


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


def test_the_projects_readme_has_both_blocks():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    for block in (ERRORS, VALIDATION):
        assert [text.count(marker) for marker in markers(block)] == [1, 1]
    assert len(text.splitlines()) <= 150
