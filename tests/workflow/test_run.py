"""Real runs of the workflow with stand-ins for the scripts: order, exclusiveness, killing."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from project_copy import Project


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.02)


def overlap(one: tuple[str, float, float], other: tuple[str, float, float]) -> bool:
    return one[1] < other[2] and other[1] < one[2]


def test_on_two_cores_nothing_runs_beside_a_measurement_and_a_second_run_does_nothing(
    undisturbed: Project, tmp_path: Path
) -> None:
    project = Project(tmp_path / "project")
    shutil.copytree(undisturbed.folder, project.folder, copy_function=shutil.copy2)
    text = (project.folder / "said").read_text()
    assert "Using workflow specific profile profiles/default" in text
    jobs = project.ran()
    assert len(jobs) == len(set(jobs)) == 4 + 4 + 1 + 2 + 2 + 2 + 1 + 1 + 3 + 3 + 3
    alone = [job for job in jobs if job[0] in ("capture", "calibrate")]
    for one in alone:
        for other in jobs:
            assert one == other or not overlap(one, other), f"{one[0]} ran beside {other[0]}"
    before = project.results()
    assert "Nothing to be done" in project.snakemake()
    assert project.ran() == jobs and project.results() == before


def test_with_cores_to_spare_two_measurements_still_take_turns(stand_in: Project) -> None:
    stand_in.snakemake("--cores", "8", "traces", "calibrations")
    alone = [job for job in stand_in.ran() if job[0] in ("capture", "calibrate")]
    assert len(alone) == 6
    for number, one in enumerate(alone):
        for other in alone[number + 1 :]:
            assert not overlap(one, other)


def test_one_core_is_enough(stand_in: Project) -> None:
    stand_in.snakemake("--cores", "1", "partitions")
    assert {rule for rule, _, _ in stand_in.ran()} == {"capture", "merge", "partition"}


@pytest.mark.parametrize(
    "paused", [pytest.param("merge", marks=pytest.mark.slow), pytest.param("simulate", marks=pytest.mark.slow)]
)
def test_a_run_killed_half_way_ends_with_the_same_result(stand_in: Project, undisturbed: Project, paused: str) -> None:
    """Kill it as hard as can be, lock and half-written outputs left behind."""
    (stand_in.folder / "pause").write_text(paused)
    process = subprocess.Popen(
        stand_in.command(),
        cwd=stand_in.folder,
        env=stand_in.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(stand_in.folder / "waiting", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (stand_in.folder / "pause").unlink()
    assert "half written" in stand_in.results().values()
    assert "locked" in stand_in.snakemake(status=1)

    unlock = subprocess.run(
        [sys.executable, "workflow/unlock_stale.py"], cwd=stand_in.folder, capture_output=True, text=True
    )
    assert unlock.returncode == 0 and "removing the lock" in unlock.stdout
    before = {rule for rule, _, _ in stand_in.ran()}
    stand_in.snakemake()
    results = stand_in.results()
    assert "half written" not in results.values()
    assert paused not in before
    assert sum(rule == "capture" for rule, _, _ in stand_in.ran()) == 4, "what was done stays done"
    assert "Nothing to be done" in stand_in.snakemake()
    assert results == undisturbed.results()


def test_unlocking_waits_for_jobs_that_outlived_their_snakemake(stand_in: Project) -> None:
    (stand_in.folder / "pause").write_text("capture")
    process = subprocess.Popen(
        stand_in.command(),
        cwd=stand_in.folder,
        env=stand_in.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(stand_in.folder / "waiting", process)
    command = [sys.executable, "workflow/unlock_stale.py"]
    busy = subprocess.run(command, cwd=stand_in.folder, capture_output=True, text=True)
    assert busy.returncode == 2 and f"process {process.pid}" in busy.stderr

    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    unlock = subprocess.Popen(command, cwd=stand_in.folder, stdout=subprocess.PIPE, text=True)
    assert unlock.stdout is not None
    assert "waiting for a job of a killed run" in unlock.stdout.readline()
    assert unlock.poll() is None
    (stand_in.folder / "pause").unlink()
    rest, _ = unlock.communicate()
    assert unlock.returncode == 0 and "removing the lock" in rest


def test_without_a_lock_unlocking_says_nothing(project: Project) -> None:
    run = subprocess.run(
        [sys.executable, "workflow/unlock_stale.py"], cwd=project.folder, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_failing_job_stands_in_its_log_and_leaves_no_output(project: Project) -> None:
    """The real merge on a broken trace: one clear sentence, nothing partial."""
    (project.folder / "scripts/capture.py").write_text(
        "for path in snakemake.output:\n    open(path, 'w').write('not a trace')\n"
    )
    text = project.snakemake("results/operator_tables/cnn-b8/trace.json", status=1)
    log = (project.folder / "results/logs/merge/cnn-b8.log").read_text()
    sentence = log.strip().splitlines()[-1]
    assert "environment.json" in sentence and "not valid JSON" in sentence
    assert sentence in text and "Traceback" not in log
    assert not list((project.folder / "results/operator_tables").rglob("*.*"))
