"""The whole chain for real, on tiny workloads: captured, measured, predicted, reported."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from project_copy import Project
from trioflow.tables import read_table

SMALLER = {
    "warm_up: 5": "warm_up: 1",
    "timed_steps: 15": "timed_steps: 2",
    "profiled_steps: 7": "profiled_steps: 2",
    "rounds: 15": "rounds: 2",
}


@pytest.mark.slow
def test_the_whole_chain_survives_being_killed_while_it_measures(project: Project) -> None:
    for old, new in SMALLER.items():
        project.edit("config/config.yaml", old, new)
    process = subprocess.Popen(
        project.command(), cwd=project.folder, env=project.environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    while not list((project.folder / "results").glob("logs/measure/*.log")):
        assert process.poll() is None, "the run ended before anything was measured"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    captured = {
        path: path.stat().st_mtime_ns
        for path in (project.folder / "results/traces").rglob("environment.json")
    }
    project.snakemake("--unlock")
    project.snakemake()

    errors = read_table(project.folder / "results/report/error.parquet", "errors")
    assert errors["experiment"].tolist() == ["cnn-batch4", "cnn-ddp2", "gpt-tp2"]
    assert errors["ranks"].tolist() == [1, 2, 2]
    assert captured, "the first run got as far as a trace"
    assert all(path.stat().st_mtime_ns == made for path, made in captured.items())
    assert "Nothing to be done" in project.snakemake()
    assert "Report created" in project.snakemake("--report", "results/report/snakemake.html")
    page = (project.folder / "results/report/index.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "") and "gpt-tp2" in page
