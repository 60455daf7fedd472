"""Copies of the project, in the states that the tests start from."""

import json
import shutil
from pathlib import Path

import pytest
from captured import make_once
from project_copy import STAND_IN, Project, copy_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A fresh copy, nothing run yet."""
    return copy_project(tmp_path / "project")


def copy_stand_in(folder: Path) -> Project:
    """Copy the project with stand-ins for its scripts."""
    project = copy_project(folder)
    for script in (project.folder / "scripts").rglob("*.py"):
        script.write_text(STAND_IN)
    return project


@pytest.fixture
def stand_in(tmp_path: Path) -> Project:
    """A fresh copy whose scripts are stand-ins."""
    return copy_stand_in(tmp_path / "project")


@pytest.fixture(scope="session")
def default_jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Jobs that a fresh copy plans where nothing is asked for, by rule."""

    def plan(folder: Path) -> None:
        jobs = copy_project(folder / "project").planned()
        (folder / "jobs.json").write_text(json.dumps(jobs))

    found: dict[str, int] = json.loads((make_once(tmp_path_factory, "default-jobs", plan) / "jobs.json").read_text())
    return found


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy with stand-ins that ran from begin to end, all that it wrote in ``said``; not to be edited."""

    def run(folder: Path) -> None:
        copy_stand_in(folder / "project").snakemake()

    return Project(make_once(tmp_path_factory, "undisturbed", run) / "project")


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy with real scripts whose outputs count as made; to be copied, not edited."""

    def finish(folder: Path) -> None:
        project = copy_project(folder / "project")
        for line in project.snakemake("--summary").splitlines():
            path = line.partition("\t")[0]
            if path.startswith("results/"):
                (project.folder / path).parent.mkdir(parents=True, exist_ok=True)
                (project.folder / path).write_text(path)
        project.snakemake("--touch", "--forceall")

    return Project(make_once(tmp_path_factory, "finished", finish) / "project")


@pytest.fixture
def finished(finished_once: Project, tmp_path: Path) -> Project:
    """A copy with real scripts in which everything is up to date."""
    folder = tmp_path / "finished"
    shutil.copytree(finished_once.folder, folder, copy_function=shutil.copy2)
    return Project(folder)
