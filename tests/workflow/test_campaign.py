"""A campaign on a CPU, and how it ends when its time is up."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from project_copy import Project
from trioflow import tables
from trioflow.costmodel.fits.operators import fit_named_model
from trioflow.trace.store import load_trace

ITEMS = """\
order kind item precisions sizes
10 sweep gemm fp32 quick
20 capture gpt fp32 2,4
30 sweep softmax none quick
"""
COLLECT = ("--keep-going", "--forcerun", "collect_campaign", "--", "results/campaign/items.parquet")


def write_items(project: Project, text: str = ITEMS) -> None:
    (project.folder / "config/campaign.tsv").write_text(text.replace(" ", "\t"))


def test_what_is_measured_comes_back_as_packs_that_a_model_is_fitted_to(project: Project) -> None:
    pytest.importorskip("torch", reason="a campaign needs torch (extra [capture])")
    write_items(project)
    said = project.snakemake("--keep-going", "campaign", status=1)
    assert "no size of softmax in none could be timed" in said
    project.snakemake(*COLLECT)
    folder = project.folder / "results/campaign"
    items = tables.read_table(folder / "items.parquet", "campaign_items")
    assert dict(zip(items["name"], items["status"], strict=True)) == {
        "gemm-fp32-quick": "done",
        "gpt-fp32-b2": "done",
        "gpt-fp32-b4": "done",
        "softmax-none-quick": "failed",
    }
    assert "no size of softmax" in items["error"].iloc[-1]
    times = tables.read_table(folder / "operation_times.parquet", "operation_times")
    assert set(times["operation"]) == {"gemm"}
    assert times.attrs["sweeps"]["gemm-fp32-quick"]["device"] == "cpu"
    packs = sorted(folder.glob("traces/*.pack"))
    assert [pack.stem for pack in packs] == ["gpt-fp32-b2", "gpt-fp32-b4"]
    model, _ = fit_named_model([load_trace(pack) for pack in packs], "auto")
    assert model.device_name
    assert project.planned("campaign") == {"sweep_operation": 1, "campaign": 1}, "only what failed is tried again"


def test_when_the_time_is_up_the_item_that_runs_is_finished_and_none_is_started(stand_in: Project) -> None:
    write_items(stand_in)
    (stand_in.folder / "pause").write_text("sweep_operation")
    process = subprocess.Popen(
        stand_in.command("--keep-going", "campaign"),
        cwd=stand_in.folder,
        env=stand_in.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (stand_in.folder / "waiting").exists():
        assert process.poll() is None, "the run ended before its time was up"
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    (stand_in.folder / "pause").unlink()
    process.wait()
    assert [rule for rule, _, _ in stand_in.ran()] == ["sweep_operation"], "the first of the table, alone"
    assert set(stand_in.planned("campaign").values()) == {2, 1}, "the others are still to do"
    assert (stand_in.folder / "results/campaign/sweeps/gemm-fp32-quick.parquet").exists()
    assert not list(Path(stand_in.folder / "results/campaign/sweeps").glob("softmax*"))


def test_where_a_batch_fails_larger_ones_are_not_tried(stand_in: Project) -> None:
    write_items(stand_in)
    (stand_in.folder / "scripts/capture.py").write_text("raise MemoryError\n")
    stand_in.snakemake("--keep-going", "campaign", status=1)
    logs = sorted(path.name for path in (stand_in.folder / "results/logs/capture").glob("*"))
    assert [rule for rule, _, _ in stand_in.ran()] == ["sweep_operation"] * 2 and logs == ["gpt-fp32-b2.log"]
