"""Rows of public measurements."""

from pathlib import Path

import pytest
from trioflow.base.errors import InputError
from trioflow_evaluation.figures.points import (
    list_published_rows,
    list_validation_rows,
    shorten_device,
)

from evaluation.figures.figure_cases import make_validation, write, write_files


def test_whole_training_steps_of_the_shipped_model_are_taken(tmp_path: Path) -> None:
    file = write(make_validation("batch-change", "shipped"), "validation", tmp_path / "one.parquet")
    rows = list_validation_rows(file, "batch-change")
    assert [row["predicted_s"] for row in rows] == [1.1, 0.98]
    assert [row["series"] for row in rows] == ["whole step", "operator sum"]
    assert {row["evidence"] for row in rows} == {"measured, public"}
    assert rows[0]["source_gpu"] == rows[0]["device"] == "NVIDIA A100 80GB PCIe"
    assert rows[0]["workload"] == "bert"


def test_another_gpu_is_told_with_where_it_comes_from(tmp_path: Path) -> None:
    file = write(make_validation("new-gpu", "ours"), "validation", tmp_path / "one.parquet")
    row = list_validation_rows(file, "new-gpu")[0]
    assert row["label"] == "H100 to A100 PCIe" and row["source_gpu"] != row["device"]


def test_a_set_without_such_a_case_is_named(tmp_path: Path) -> None:
    file = write(make_validation("new-gpu", "nobody"), "validation", tmp_path / "one.parquet")
    with pytest.raises(InputError, match="no whole training step in the set new-gpu"):
        list_validation_rows(file, "new-gpu")


def test_public_cases_are_chosen_by_their_plan(tmp_path: Path) -> None:
    files = write_files(tmp_path)["published"]
    rows = list_published_rows(files, ("DDP", "PP"))
    assert [(row["case"], row["family"], row["micro_batches"]) for row in rows] == [
        ("public-ddp", "DDP", 0),
        ("public-pp", "PP", 1),
    ]
    assert rows[0]["device"] == "NVIDIA A100-SXM4-80GB"
    assert rows[0]["panel"] == "traced on another GPU"
    assert list_published_rows(files, ("single",))[0]["panel"] == "traced on the same GPU"
    with pytest.raises(InputError, match="no public case with a plan of the kind DataParallel"):
        list_published_rows(files, ("DataParallel",))
    with pytest.raises(InputError, match="no file at all"):
        list_published_rows([], ("DDP",))


def test_devices_are_told_apart_in_few_letters() -> None:
    names = (
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA H100 80GB HBM3",
        "Tesla V100-PCIE-32GB",
    )
    assert [shorten_device(name) for name in names] == [
        "A100",
        "A100 PCIE 40GB",
        "H100",
        "V100 PCIE 32GB",
    ]
