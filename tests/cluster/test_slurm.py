"""The workflow through a real SLURM, with a job and the controller killed on the way."""

from __future__ import annotations

import hashlib
import subprocess
import time
from pathlib import Path

import pytest
from cluster_project import ClusterProject, copy_project
from single_node import SingleNode, wait_until

pytestmark = pytest.mark.slow

TARGETS = ("sweeps",)
SWEEP = """\
description: "a few plans, two in a job"
chunk: 2
grid:
  - {trace: gpt2-tiny-b8, platform: [h100x8-nvlink, a100x4-nvlink], ranks: [2, 4], pipeline: [1, 2]}
"""
PROFILE = (
    "--workflow-profile", "profiles/slurm", "--slurm-status-command", "squeue", "--slurm-no-account",
    "--slurm-init-seconds-before-status-checks", "2",
)  # fmt: skip
"""The profile, with what a SLURM without an accounting database needs besides."""


def digest_tables(project: ClusterProject) -> dict[str, str]:
    """Return a digest of every table that a run made."""
    results = project.folder / "results"
    return {
        str(path.relative_to(results)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(results.rglob("*.parquet"))
    }


def test_a_run_through_slurm_survives_kills_and_ends_as_a_local_run(
    project: ClusterProject, executors: Path, slurm: SingleNode, tmp_path: Path
) -> None:
    local = ClusterProject(copy_project(tmp_path / "local").folder, executors)
    for copy in (project, local):
        for path in (copy.folder / "config/sweeps").glob("*.yaml"):
            path.unlink()
        (copy.folder / "config/sweeps/small.yaml").write_text(SWEEP)
    local.snakemake("--", *TARGETS)

    process = subprocess.Popen(
        project.command(*PROFILE, "--", *TARGETS), cwd=project.folder, env=project.environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_until(lambda: bool(slurm.running_jobs()), "a job that runs")
    victim = slurm.running_jobs()[0]
    slurm.ask("scancel", "--signal=KILL", "--full", victim)
    wait_until(lambda: victim not in slurm.running_jobs(), "the end of the killed job")
    wait_until(lambda: bool(slurm.running_jobs()), "a job after the killed one")
    slurm.kill_controller()
    time.sleep(2)
    slurm.start_controller()
    try:
        told, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert "Trying to restart job" in told

    assert digest_tables(project) == digest_tables(local)
    assert len(digest_tables(local)) > 3
    assert "Nothing to be done" in project.snakemake(*PROFILE, "--", *TARGETS)
