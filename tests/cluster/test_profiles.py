"""The profiles for clusters: what they plan, and the generic one at work."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cluster_project import ROOT, ClusterProject

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("profile", ["slurm", "kubernetes", "cluster"])
def test_a_profile_plans_the_same_jobs_as_a_local_run(
    project: ClusterProject, profile: str
) -> None:
    words = ("published_traces", "validation")
    assert project.planned("--workflow-profile", f"profiles/{profile}", "--", *words) == (
        project.planned("--", *words)
    )


def write_program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def grid_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for Grid Engine's commands that run a job at once in the background."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_program(
        folder, "qsub",
        '#!/bin/sh\necho "$@" >> "$QUEUE/submitted"\nfor script; do :; done\nid=$(date +%N)\n'
        '(sh "$script" > "$QUEUE/$id.log" 2>&1; echo $? > "$QUEUE/$id") &\necho "$id"\n',
    )  # fmt: skip
    write_program(folder, "qstat", '#!/bin/sh\ntest ! -e "$QUEUE/$2"\n')
    write_program(
        folder, "qacct",
        '#!/bin/sh\ntest -e "$QUEUE/$2" || exit 1\necho "failed       0"\n'
        'echo "exit_status  $(cat "$QUEUE/$2")"\n',
    )  # fmt: skip
    write_program(folder, "qdel", "#!/bin/sh\n")
    queue = tmp_path / "queue"
    queue.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE", str(queue))
    return queue


@pytest.mark.parametrize(
    ("code", "told"), [("0", "success"), ("1", "failed"), ("", "running"), ("137", "failed")]
)
def test_the_queue_and_its_accounting_tell_what_became_of_a_job(
    grid_engine: Path, code: str, told: str
) -> None:
    if code:
        (grid_engine / "77").write_text(code)
    status = ROOT / "profiles/cluster/status.py"
    run = subprocess.run([status, "77"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == told


def test_the_generic_profile_submits_jobs_with_their_resources(
    project: ClusterProject, grid_engine: Path
) -> None:
    target = "results/studies/hop.parquet"
    jobs = project.planned("--", target)
    project.snakemake("--workflow-profile", "profiles/cluster", "--", target)
    submitted = (grid_engine / "submitted").read_text().splitlines()
    assert len(submitted) == sum(jobs.values())
    assert all("-l h_vmem=" in line and "-pe smp" in line for line in submitted)
    assert (project.folder / target).exists()
