"""A sweep through a real SLURM, with jobs that hang, a job and the controller killed on the way."""

import hashlib
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cluster_project import PATIENCE_S, ClusterProject, copy_project
from single_node import SingleNode, wait_until

pytestmark = pytest.mark.slow

TARGETS = ("sweeps",)
SWEEP = """\
description: "a few plans, two in a job"
chunk: 2
grid:
  - {trace: gpt2-tiny-b8, platform: [h100x8-nvlink, a100x4-nvlink], ranks: [2, 4], pipeline: [1, 2]}
"""
STUCK = """\
import os, time
for name in ("hangs", "killed") if os.path.exists("stuck") and snakemake.resources.runtime == 1 else ():
    try:
        with open(name, "x") as marker:
            marker.write("{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format(**os.environ))
        time.sleep(3600)
    except FileExistsError:
        pass
"""
"""Put before the script of a chunk: beside a file ``stuck`` the first two that are tried hang."""
PROFILE = (
    "--workflow-profile",
    "profiles/slurm",
    "--slurm-status-command",
    "squeue",
    "--slurm-no-account",
    "--slurm-init-seconds-before-status-checks",
    "2",
    "--slurm-array-limit",
    "3",
    "--set-resources",
    "simulate_sweep:runtime=attempt",
    "simulate_sweep:mem_mb=2000",
)
"""The profile, with what a SLURM without an accounting database needs besides."""


def end_processes(folder: Path) -> None:
    """End what runs for a folder: SLURM ends a job's script, and may leave the Snakemake that waits for it."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and str(folder) in (entry / "cmdline").read_text():
                os.kill(int(entry.name), signal.SIGKILL)


def digest_tables(project: ClusterProject) -> dict[str, str]:
    """Return a digest of every table that a run made."""
    results = project.folder / "results"
    return {
        str(path.relative_to(results)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(results.rglob("*.parquet"))
    }


def test_a_sweep_of_arrays_survives_kills_and_a_hang_and_ends_as_a_local_one(
    project: ClusterProject, executors: Path, slurm: SingleNode, tmp_path: Path
) -> None:
    """A task is killed, another hangs until its time limit, the controller crashes: no byte differs."""
    local = ClusterProject(copy_project(tmp_path / "local").folder, executors)
    for copy in (project, local):
        for path in (copy.folder / "config/sweeps").glob("*.yaml"):
            path.unlink()
        (copy.folder / "config/sweeps/small.yaml").write_text(SWEEP)
        script = copy.folder / "scripts/simulate_sweep.py"
        script.write_text(STUCK + script.read_text())
    local.snakemake("--", *TARGETS)
    chunks = list((local.folder / "results/sweeps/small/chunks").iterdir())

    (project.folder / "stuck").touch()
    process = subprocess.Popen(
        project.command(*PROFILE, "--", *TARGETS),
        cwd=project.folder,
        env=project.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    killed = project.folder / "killed"
    wait_until(lambda: killed.exists() and bool(killed.read_text()), "a second chunk that hangs")
    slurm.ask("scancel", "--signal=KILL", "--full", killed.read_text())
    wait_until(lambda: killed.read_text() not in slurm.running_jobs(), "the end of the killed job")
    slurm.kill_controller()
    time.sleep(2)
    slurm.start_controller()
    try:
        told, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        end_processes(project.folder)
    assert process.returncode == 0, told
    assert told.count("Trying to restart job") >= 2, told
    assert "SLURM status is: 'TIMEOUT'" in told, told
    arrays = re.findall("Submitted array job with Snakemake IDs ([0-9,]+)", told)
    assert len({job for ids in arrays for job in ids.split(",")}) == len(chunks) > len(arrays) > 1

    assert digest_tables(project) == digest_tables(local)
    assert len(digest_tables(local)) > 3
    assert "Nothing to be done" in project.snakemake(*PROFILE, "--", *TARGETS)
