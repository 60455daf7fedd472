"""Sweeps through Snakemake: chunks as jobs, nothing lost and nothing predicted twice."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from captured import make_once
from project_copy import Project, copy_project
from test_run import wait_for
from trioflow.sweeps.figures import collect_sweep
from trioflow.sweeps.scenarios import simulate_sweep

SWEEP = """\
description: a small sweep
chunk: 4
defaults: {platform: dgx-a100}
grid:
  - {trace: gpt2-tiny-b8, ranks: [2, 8, 16], tensor: [1, 2]}
list:
  - {trace: gpt2-tiny-b8, data: 2, batch: 100000}
"""
TABLE = "results/sweeps/small/results.parquet"
PAUSING = '''"""Stands in for the prediction of a chunk: the second one waits for ever while told to pause."""
import time
from pathlib import Path
target = Path(snakemake.output[0])
if Path("pause").exists() and len(list(target.parent.glob("*.parquet"))):
    target.write_text("half written")
    Path("waiting").touch()
    while Path("pause").exists():
        time.sleep(0.02)
target.write_text("finished")
with open("ran", "a") as log:
    log.write(f"{target.stem} 0 0\\n")
'''


FAILING = '''"""Stands in for the prediction of a chunk: none is done within the first limit."""
from pathlib import Path
with open("limits", "a") as log:
    log.write(f"{snakemake.resources.runtime}\\n")
assert snakemake.resources.runtime > 60
Path(snakemake.output[0]).touch()
'''

CHUNKS = 3


def add_sweep(project: Project, text: str = SWEEP) -> Project:
    for file in (project.folder / "config/sweeps").glob("*.yaml"):
        file.unlink()
    (project.folder / "config/sweeps/small.yaml").write_text(text)
    return project


@pytest.fixture
def sweep(project: Project) -> Project:
    return add_sweep(project)


@pytest.fixture(scope="session")
def done_once(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy in which the real sweep has run; to be copied, not edited."""

    def run(folder: Path) -> None:
        add_sweep(copy_project(folder / "project")).snakemake(TABLE)

    return Project(make_once(tmp_path_factory, "sweep", run) / "project")


@pytest.fixture
def done(done_once: Project, tmp_path: Path) -> Project:
    shutil.copytree(done_once.folder, tmp_path / "done", copy_function=shutil.copy2)
    return Project(tmp_path / "done")


def chunk_files(project: Project) -> list[Path]:
    return sorted((project.folder / "results/sweeps/small/chunks").glob("*.parquet"))


def start(project: Project) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        project.command(TABLE, "--cores", "1"),
        cwd=project.folder,
        env=project.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def test_each_sweep_is_a_target_and_so_are_all(sweep: Project, default_jobs: dict[str, int]) -> None:
    jobs = sweep.planned(TABLE)
    assert jobs == {"simulate_sweep": CHUNKS, "collect_sweep": 1}
    assert sweep.planned("sweeps") == {"simulate_sweep": CHUNKS, "collect_sweep": 1, "sweeps": 1}
    assert "simulate_sweep" not in default_jobs, "sweeps are asked for"


def test_a_mistake_in_a_description_is_told_when_its_sweep_is_asked_for(sweep: Project) -> None:
    sweep.edit("config/sweeps/small.yaml", "tensor:", "tenser:")
    text = sweep.snakemake("--dry-run", TABLE, status=1)
    assert "grid.0.tenser: unknown key 'tenser'; did you mean tensor?" in text
    sweep.planned()


def test_a_finished_sweep_has_table_figures_and_progress_and_is_done(done: Project) -> None:
    folder = done.folder / "results/sweeps/small"
    figures = {"answer.html", "throughput.svg", "throughput.png", "memory.svg", "memory.png"}
    names = {"results.parquet", "chunks", *figures}
    assert {path.name for path in folder.iterdir()} == names
    assert len(chunk_files(done)) == CHUNKS
    logs = [path.read_text() for path in (done.folder / "results/logs/simulate_sweep/small").iterdir()]
    assert all("chunk" in log and "of" in log.splitlines()[-1] for log in logs) and len(logs) == CHUNKS
    assert done.planned(TABLE) == {}


def test_more_scenarios_leave_finished_chunks_alone(done: Project) -> None:
    before = {path: path.stat().st_mtime_ns for path in chunk_files(done)}
    done.append("config/sweeps/small.yaml", "  - {trace: resnet50-b128, data: 2}\n")
    jobs = done.planned(TABLE)
    assert jobs["simulate_sweep"] == 1 and jobs["collect_sweep"] == 1
    assert {path: path.stat().st_mtime_ns for path in chunk_files(done)} == before


def test_an_edit_of_the_library_predicts_again_and_one_of_the_figures_only_draws(done: Project) -> None:
    done.append("workflow/trioflow/sweeps/figures.py", "\n# edited\n")
    assert done.planned(TABLE).keys() == {"collect_sweep"}
    done.append("workflow/trioflow/parallel/extrapolate.py", "\n# edited\n")
    assert done.planned(TABLE)["simulate_sweep"] == CHUNKS


def test_a_damaged_chunk_is_named_and_only_it_is_predicted_again(done: Project) -> None:
    damaged = chunk_files(done)[0]
    damaged.write_bytes(damaged.read_bytes()[:-50])
    text = done.snakemake(TABLE, status=1)
    name = damaged.relative_to(done.folder)
    assert f"remove {name} and start Snakemake again" in text
    assert not (done.folder / TABLE).exists(), "no table of a damaged chunk"
    damaged.unlink()
    assert done.planned(TABLE) == {"simulate_sweep": 1, "collect_sweep": 1}


def test_one_process_and_another_order_give_the_bytes_of_snakemakes_jobs(
    done: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(done.folder)
    description, again = "config/sweeps/small.yaml", tmp_path / "again"
    for chunk in chunk_files(done)[::-1]:
        simulate_sweep(description, chunk.stem, again / "chunks" / chunk.name, size=64)
    chunks = [again / "chunks" / chunk.name for chunk in chunk_files(done)]
    collect_sweep(description, chunks, again / "results.parquet", again, size=64)
    for path in [*chunk_files(done), *(done.folder / "results/sweeps/small").glob("*.*")]:
        other = again / path.relative_to(done.folder / "results/sweeps/small")
        # Bokeh numbers the parts of a page by what the process drew before.
        numbered = re.compile(rb'"p[0-9]{4,}"')
        assert numbered.sub(b"", other.read_bytes()) == numbered.sub(b"", path.read_bytes()), path.name


def test_data_that_is_not_there_is_named_before_anything_runs(sweep: Project) -> None:
    sweep.append("config/sweeps/small.yaml", "  - {trace: own, data: 2}\ntraces: {own: traces/own-b8}\n")
    text = sweep.snakemake(TABLE, status=1)
    assert "Missing input files" in text and "traces/own-b8/trace.json" in text
    assert not chunk_files(sweep)
    shutil.copytree(sweep.folder / "workflow/trioflow/data/traces/gpt2-tiny-b8", sweep.folder / "traces/own-b8")
    assert sweep.planned(TABLE)["simulate_sweep"] >= 2


def test_a_killed_sweep_keeps_what_is_finished_and_a_second_one_does_not_interfere(sweep: Project) -> None:
    (sweep.folder / "scripts/simulate_sweep.py").write_text(PAUSING)
    (sweep.folder / "scripts/collect_sweep.py").write_text(
        "for path in snakemake.output:\n    open(path, 'w').write('collected')\n"
    )
    (sweep.folder / "pause").touch()
    process = start(sweep)
    wait_for(sweep.folder / "waiting", process)
    text = sweep.snakemake(TABLE, status=1)
    assert "locked" in text and "no other Snakemake process" in text
    assert process.poll() is None and len(sweep.ran()) == 1
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (sweep.folder / "pause").unlink()
    assert {path.read_text() for path in chunk_files(sweep)} == {"finished", "half written"}

    unlock = [sys.executable, "workflow/unlock_stale.py"]
    subprocess.run(unlock, cwd=sweep.folder, check=True, capture_output=True)
    sweep.snakemake(TABLE)
    ran = [name for name, _, _ in sweep.ran()]
    assert len(ran) == len(set(ran)) == CHUNKS, "the finished chunk is not predicted twice"
    assert {path.read_text() for path in chunk_files(sweep)} == {"finished"}
    assert (sweep.folder / TABLE).read_text() == "collected"


def test_a_chunk_that_is_sent_again_has_twice_the_time(sweep: Project) -> None:
    (sweep.folder / "scripts/simulate_sweep.py").write_text(FAILING)
    (sweep.folder / "scripts/collect_sweep.py").write_text(
        "for path in snakemake.output:\n    open(path, 'w').write('collected')\n"
    )
    sweep.snakemake(TABLE, "--retries", "1")
    assert sorted((sweep.folder / "limits").read_text().split()) == ["120"] * CHUNKS + ["60"] * CHUNKS


def test_a_full_disk_fails_the_job_in_one_sentence_and_the_next_start_goes_on(done: Project) -> None:
    """A limit on the size of files stands in for a full disk: writing stops half-way."""
    lost = chunk_files(done)[0]
    lost.unlink()
    script = done.folder / "scripts/simulate_sweep.py"
    text = script.read_text()
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    script.write_text(text.replace("from pathlib", limit + "from pathlib", 1))
    done.snakemake(str(lost.relative_to(done.folder)), status=1)
    script.write_text(text)
    log = (done.folder / f"results/logs/simulate_sweep/small/{lost.stem}.log").read_text()
    assert "cannot be written: " in log and "File too large; make room" in log and "Traceback" not in log
    assert not lost.exists() and not list(lost.parent.glob(".*")), "nothing half-written"
    assert done.planned(TABLE).keys() == {"simulate_sweep", "collect_sweep"}
