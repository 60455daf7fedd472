"""Scenarios of a figure: predicted as a sweep's, and told as what was only simulated."""

from pathlib import Path

import pytest
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.sweeps.description import fill_values
from trioflow.sweeps.workshop import Workshop, list_sweep_files
from trioflow_evaluation.figures.build import predict_scenarios
from trioflow_evaluation.figures.points import BUSY, list_predicted_rows

from evaluation.figures.figure_cases import make_sweep, write

DESCRIPTION = """\
description: "two plans"
grid:
  - {trace: gpt2-tiny-b8, platform: dgx-a100, tensor: [1, 2]}
list:
  - {trace: gpt2-tiny-b8, platform: dgx-a100, tensor: 3}
"""


def test_scenarios_are_predicted_as_a_sweep_predicts_them(tmp_path: Path) -> None:
    description = tmp_path / "two.yaml"
    description.write_text(DESCRIPTION)
    assert list_sweep_files(description) == []
    frame = predict_scenarios(description, tmp_path / "two.parquet")
    again = tables.read_table(tmp_path / "two.parquet", "sweep_results")
    assert frame["status"].tolist() == ["ok", "ok", "infeasible"]
    given = fill_values({"trace": "gpt2-tiny-b8", "platform": "dgx-a100", "tensor": 2})
    assert again["step_time_s"][1] == Workshop().predict(0, given)["step_time_s"]
    rows = list_predicted_rows([tmp_path / "two.parquet"], label="{trace} at {batch}")
    assert [row["plan"] for row in rows] == ["single", "TP", "TP"]
    assert rows[2]["predicted_s"] is None and "cannot be shared" in rows[2]["reason"]
    assert rows[0]["label"] == "gpt2-tiny-b8 at 8" and rows[1]["ranks"] == 2


def test_files_that_do_not_ship_are_told_to_the_workflow(tmp_path: Path) -> None:
    description = tmp_path / "own.yaml"
    description.write_text(
        "description: own\nlist: [{trace: own, platform: dgx-a100}]\ntraces: {own: results/imported/own}\n"
    )
    files = list_sweep_files(description)
    assert "results/imported/own/trace.json" in files


def test_predictions_are_marked_and_those_without_a_step_stay(tmp_path: Path) -> None:
    file = write(make_sweep(), "sweep_results", tmp_path / "net.parquet")
    rows = list_predicted_rows([file], series="{gpus}")
    assert {row["evidence"] for row in rows} == {"only simulated"}
    assert all(row["measured_s"] is None for row in rows)
    assert [row["series"] for row in rows] == ["2 A40", "4 A100", "2 A40"]
    assert [row["family"] for row in rows] == ["DDP", "PP", "DDP"]
    assert [row["micro_batches"] for row in rows] == [0, 2, 0]
    assert (rows[2]["status"], rows[2]["predicted_s"]) == ("out of memory", None)


def test_busy_times_keep_the_interval_in_proportion(tmp_path: Path) -> None:
    file = write(make_sweep(), "sweep_results", tmp_path / "net.parquet")
    row = list_predicted_rows([file], quantity=BUSY)[0]
    assert (row["low_s"], row["predicted_s"], row["high_s"]) == (0.75, 1.0, 1.5)
    assert row["quantity"] == "busy time"


def test_no_scenario_is_an_error(tmp_path: Path) -> None:
    file = write(make_sweep()[:0], "sweep_results", tmp_path / "empty.parquet")
    with pytest.raises(InputError, match=r"no predicted scenario in .*empty\.parquet"):
        list_predicted_rows([file])
