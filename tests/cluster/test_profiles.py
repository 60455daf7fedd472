"""The profiles for clusters: what they plan, and the generic one at work."""

import os
import subprocess
from pathlib import Path

import pytest
from cluster_project import ROOT, ClusterProject
from trioflow.sweeps.description import load_sweep
from trioflow.sweeps.figures import collect_sweep
from trioflow.sweeps.scenarios import cut_chunks, simulate_sweep

pytestmark = pytest.mark.slow

SWEEP = """\
description: a small sweep
chunk: 3
grid: {trace: gpt2-tiny-b8, platform: dgx-a100, data: [1, 2, 4], tensor: [1, 2]}
"""


@pytest.mark.parametrize("profile", ["slurm", "kubernetes", "cluster"])
def test_a_profile_plans_the_same_jobs_as_a_local_run(project: ClusterProject, profile: str) -> None:
    words = ("published_traces", "validation")
    assert project.planned("--workflow-profile", f"profiles/{profile}", "--", *words) == (project.planned("--", *words))


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
        folder,
        "qsub",
        '#!/bin/sh\necho "$@" >> "$QUEUE/submitted"\nfor script; do :; done\nid=$(date +%N)\n'
        '(sh "$script" > "$QUEUE/$id.log" 2>&1; echo $? > "$QUEUE/$id") &\necho "$id"\n',
    )
    write_program(folder, "qstat", '#!/bin/sh\ntest ! -e "$QUEUE/$2"\n')
    write_program(
        folder,
        "qacct",
        '#!/bin/sh\ntest -e "$QUEUE/$2" || exit 1\necho "failed       0"\necho "exit_status  $(cat "$QUEUE/$2")"\n',
    )
    write_program(folder, "qdel", "#!/bin/sh\n")
    queue = tmp_path / "queue"
    queue.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE", str(queue))
    return queue


@pytest.mark.parametrize(("code", "told"), [("0", "success"), ("1", "failed"), ("", "running"), ("137", "failed")])
def test_the_queue_and_its_accounting_tell_what_became_of_a_job(grid_engine: Path, code: str, told: str) -> None:
    if code:
        (grid_engine / "77").write_text(code)
    status = ROOT / "profiles/cluster/status.py"
    run = subprocess.run([status, "77"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == told


def test_the_generic_profile_submits_jobs_with_their_resources_and_changes_no_result(
    project: ClusterProject, grid_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that a queue's jobs predicted, in whatever order, are those of this process, byte by byte."""
    description = "config/sweeps/small.yaml"
    (project.folder / description).write_text(SWEEP)
    target = "results/sweeps/small/results.parquet"
    project.snakemake("--workflow-profile", "profiles/cluster", "--", target)
    submitted = (grid_engine / "submitted").read_text().splitlines()
    assert len(submitted) == len(cut_chunks(load_sweep(project.folder / description))) + 1 == 3
    assert all("-l h_vmem=" in line and "-pe smp" in line for line in submitted)

    monkeypatch.chdir(project.folder)
    here = []
    for chunk in cut_chunks(load_sweep(description)):
        here.append(tmp_path / f"{chunk.digest}.parquet")
        simulate_sweep(description, chunk.digest, here[-1])
        there = Path("results/sweeps/small/chunks") / here[-1].name
        assert here[-1].read_bytes() == there.read_bytes()
    collect_sweep(description, here[::-1], tmp_path / "all.parquet", tmp_path)
    assert (tmp_path / "all.parquet").read_bytes() == Path(target).read_bytes()
