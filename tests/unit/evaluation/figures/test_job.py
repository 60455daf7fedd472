"""A figure's files: vector and raster pictures and the table, the same on every run."""

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from test_report_page import Page
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow_evaluation.figures.build import make_figure
from trioflow_evaluation.figures.page import build_figures_page
from trioflow_evaluation.tables import EVIDENCE, HOP, SHARES, SIMULATOR_TIMES, WAFER

from evaluation.figures.figure_cases import make_plans, write_files
from evaluation.studies.test_study_page import make_hop, make_wafer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    files = write_files(folder)
    times = pd.DataFrame(
        [
            {
                "trace": "net-b8",
                "workload": "net",
                "family": "DDP",
                "plan": "2 data",
                "ranks": 2,
                "events": 100,
                "repeats": 3,
                "build_s": 0.1,
                "wall_s": 0.02,
                "wall_low_s": 0.01,
                "wall_high_s": 0.03,
                "step_s": 1.0,
            }
        ]
    )
    tables.write_table(times, "times", folder / "times.parquet", schema=SIMULATOR_TIMES)
    tables.write_table(make_wafer(), "study", folder / "wafer.parquet", schema=WAFER)
    hop = make_hop()
    tables.write_table(hop, "study", folder / "hop.parquet", schema=HOP)
    files |= {"times": [str(folder / "times.parquet")]}
    for name, kind in (
        ("fig08", ""),
        ("fig13", ""),
        ("fig14", ""),
        ("fig15", "wafer"),
        ("fig16", "hop"),
    ):
        study = {"study": [str(folder / f"{kind}.parquet")]} if kind else {}
        make_figure(name, {**files, **study}, make_plans(), folder / "drawn" / name)
    return folder


def test_every_figure_is_there_as_vectors_pixels_and_numbers(made: Path) -> None:
    drawn = made / "drawn"
    assert {path.name for path in drawn.iterdir()} == {
        f"fig{number}.{suffix}"
        for number in ("08", "13", "14", "15", "16")
        for suffix in ("pdf", "svg", "png", "parquet")
    }
    assert all((drawn / f"fig{n}.pdf").read_bytes().startswith(b"%PDF") for n in ("08", "13", "16"))
    assert len(tables.read_table(drawn / "fig08.parquet", "fig08", schema=EVIDENCE)) == 4
    assert len(tables.read_table(drawn / "fig13.parquet", "fig13", schema=SHARES)) == 8
    assert b"/Type3" not in (drawn / "fig08.pdf").read_bytes(), "text stays text"


def test_the_same_tables_give_the_same_bytes(made: Path) -> None:
    files = write_files(made) | {"times": [str(made / "times.parquet")]}
    make_figure("fig08", files, make_plans(), made / "again" / "fig08")
    for suffix in ("pdf", "svg", "png", "parquet"):
        name = f"fig08.{suffix}"
        assert (made / "again" / name).read_bytes() == (made / "drawn" / name).read_bytes(), suffix


def test_the_table_says_which_files_it_was_made_from(made: Path) -> None:
    told = str(pq.read_metadata(made / "drawn" / "fig08.parquet").metadata)
    assert "error.parquet" in told and "net.parquet" in told


def test_nothing_is_written_where_a_set_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fig08: no file of its errors"):
        make_figure("fig08", {}, make_plans(), tmp_path / "fig08")
    assert not list(tmp_path.iterdir())


def test_the_page_shows_every_figure_with_its_three_labels(made: Path) -> None:
    page = made / "report" / "figures.html"
    build_figures_page(sorted(str(path) for path in (made / "drawn").iterdir()), page)
    text = page.read_text(encoding="utf-8")
    found = Page(text)
    drawn = [f"../drawn/fig{number}.svg" for number in ("08", "13", "14", "15", "16")]
    assert found.sources == [*drawn, "pages.js"]
    assert all((page.parent / source).exists() for source in (*found.sources,))
    for label in ("measured here", "measured, public", "only simulated", "paper, other cases"):
        assert text.count(f"<dt>{label}</dt>") >= 5, label
    assert "DDP, 2 A40: 2.91" in text and "92.21" in text
    assert "<dt>only simulated</dt><dd>3 rows</dd>" in text
    assert "9 GB do not fit 8 GB" in text.replace("&nbsp;", " ")


def test_a_page_of_nothing_and_a_figure_without_picture_are_errors(
    made: Path, tmp_path: Path
) -> None:
    page = tmp_path / "figures.html"
    with pytest.raises(InputError, match="no figure to show"):
        build_figures_page([], page)
    with pytest.raises(InputError, match="the figure fig08 has no picture"):
        build_figures_page([made / "drawn" / "fig08.parquet"], page)
    assert not page.exists()
