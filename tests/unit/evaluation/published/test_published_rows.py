"""The table of public cases: what it may hold, and what is said of a wrong cell."""

import json
from pathlib import Path

import pytest
from trioflow.base.errors import InputError, TableError
from trioflow.base.experiments import load_imports
from trioflow_evaluation.published.cases import PublishedRow, load_published_rows, rows_of_set
from trioflow_evaluation.published.judge import read_measured

ROOT = Path(__file__).resolve().parents[4]
TABLE = ROOT / "config/published.tsv"
CELLS = {
    "case": "one",
    "set": "some",
    "workload": "model",
    "traces": "model-b1,model-b4",
    "platform": "h100x8-nvlink",
    "gpu": "h100-sxm",
    "plan": "ddp",
    "ranks": "4",
    "micro_batches": "0",
    "batch": "8",
    "mode": "whole step",
    "measured": "a/b.json",
    "changes": "-",
}


def write_table(folder: Path, **changed: str) -> Path:
    cells = CELLS | changed
    file = folder / "published.tsv"
    file.write_text("\t".join(cells) + "\n" + "\t".join(cells.values()) + "\n")
    return file


def make_row(folder: Path, **changed: str) -> PublishedRow:
    return next(iter(load_published_rows(write_table(folder, **changed)).values()))


def test_the_project_s_table_names_traces_that_exist_and_plans_that_fit():
    rows = load_published_rows(TABLE)
    imports = load_imports(ROOT / "config/imports.tsv")
    assert {row.set for row in rows.values()} == {
        "h100-4gpu",
        "resnet50-h100",
        "resnet50-a40",
        "resnet50-a100",
    }
    assert {name for row in rows.values() for name in row.traces} <= set(imports)
    assert all(row.made_plan.ranks == row.ranks for row in rows.values())
    assert {row.plan_name for row in rows_of_set(rows, "h100-4gpu", TABLE)} == {
        "ddp4",
        "tp4",
        "gpipe4-m1",
    }


def test_a_row_is_read(tmp_path):
    row = make_row(tmp_path)
    assert row.traces == ("model-b1", "model-b4")
    assert (row.ranks, row.micro_batches, row.batch, row.changes) == (4, 0, 8, "")
    assert row.made_plan.data == 4


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"ranks": "four"}, "column ranks"),
        ({"batch": "0"}, "column batch"),
        ({"batch": "6"}, "column batch"),
        ({"plan": "ddq"}, "column plan"),
        ({"plan": "single"}, "column plan"),
        ({"gpu": "-"}, "column gpu"),
        ({"sett": "x"}, "'sett'"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path, changed, told):
    with pytest.raises(TableError) as raised:
        make_row(tmp_path, **changed)
    assert told in str(raised.value)


def test_a_case_stands_once_and_a_set_must_exist(tmp_path):
    file = write_table(tmp_path)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, lines[1]]) + "\n")
    with pytest.raises(TableError, match="'one' stands already in row 1"):
        load_published_rows(file)
    rows = load_published_rows(write_table(tmp_path))
    with pytest.raises(TableError, match="no row of the set 'other'"):
        rows_of_set(rows, "other", file)


def test_a_missing_table_or_column_is_named(tmp_path):
    with pytest.raises(TableError, match="no such file"):
        load_published_rows(tmp_path / "none.tsv")
    (tmp_path / "short.tsv").write_text("case\tset\n")
    with pytest.raises(TableError, match="column 'workload' is missing"):
        load_published_rows(tmp_path / "short.tsv")


def test_a_measured_time_comes_from_a_sidecar(tmp_path):
    row = make_row(tmp_path)
    (tmp_path / "a").mkdir()
    file = tmp_path / "a/b.json"
    file.write_text(json.dumps({"e2e_latency": 12.5}))
    found = read_measured(row, tmp_path)
    assert (found.time_s, found.source, found.spread) == (0.0125, "a/b.json", None)
    file.write_text(json.dumps({"e2e_latency": 0}))
    with pytest.raises(InputError, match="0 is not a time"):
        read_measured(row, tmp_path)
    file.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read_measured(row, tmp_path)


def test_a_measured_time_comes_from_a_throughput(tmp_path):
    told = {"measured": "throughput of NVIDIA A40", "ranks": "2", "batch": "992"}
    found = read_measured(make_row(tmp_path, **told), tmp_path)
    assert found.time_s == pytest.approx(992 / 782.43)
    assert "2xA40" in found.source
    with pytest.raises(InputError, match="496 on each of 2 GPUs"):
        read_measured(make_row(tmp_path, **told | {"batch": "990"}), tmp_path)
    with pytest.raises(InputError, match="no throughput of 2 x 'NVIDIA A41'"):
        read_measured(
            make_row(tmp_path, **told | {"measured": "throughput of NVIDIA A41"}), tmp_path
        )
