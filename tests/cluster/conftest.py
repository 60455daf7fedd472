"""Snakemake's executors in a folder of their own, and a SLURM of one node."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_project import ROOT, ClusterProject, copy_project
from single_node import SingleNode, find_obstacle


@pytest.fixture(scope="session")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pinned executors; they do not enter the environment of the other tests."""
    folder = tmp_path_factory.mktemp("executors")
    words = ["--quiet", "--no-deps", "--target", str(folder), "--requirement", "envs/executors.lock"]
    run = subprocess.run([sys.executable, "-m", "pip", "install", *words], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"the executors cannot be installed here: {run.stderr.strip()[-200:]}")
    return folder


@pytest.fixture
def project(tmp_path: Path, executors: Path) -> ClusterProject:
    """A fresh copy of the project with the executors, nothing run yet."""
    return ClusterProject(copy_project(tmp_path / "project").folder, executors)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SingleNode]:
    """A SLURM of one node that takes jobs."""
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    cluster = SingleNode(tmp_path / "slurm")
    cluster.folder.mkdir()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
