"""The example project: copied out, its parts installed, run from a local git address."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from project_copy import ROOT, copy_project
from trioflow.tables import read_table


def run(*words: str | Path, folder: Path, **environment: str) -> str:
    """Run a command and return what it prints; fail with all of it."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with the project as it lies here."""
    folder = copy_project(tmp_path / "repository").folder
    for name in ("config", "envs"):
        shutil.rmtree(folder / name)
        shutil.copytree(ROOT / name, folder / name)
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    run("git", "init", "--quiet", "--initial-branch=main", folder=folder)
    run("git", "add", "--all", folder=folder)
    run("git", *author, "commit", "--quiet", "--message=as it is", folder=folder)
    return folder


def test_the_workflow_catalog_finds_what_it_asks_for() -> None:
    """Snakemake's catalog of workflows: standardized usage, as its page "add your workflow" lists it."""
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert usage.keys() == {"mandatory-flags", "software-stack-deployment", "report"}
    assert usage["mandatory-flags"].keys() == {"desc", "flags"}
    assert (ROOT / "Snakefile").exists() and list((ROOT / "rules").rglob("*.smk"))
    assert 'configfile: "config/config.yaml"' in (ROOT / "Snakefile").read_text()
    for name in ("config/config.yaml", "config/README.md", "LICENSE"):
        assert (ROOT / name).stat().st_size > 100, name
    readme = (ROOT / "README.md").read_text().lower()
    assert "snakemake" in readme and "workflow" in readme
    text = "\n".join(path.read_text() for path in (ROOT / "rules").rglob("*.smk"))
    jobs = [rule for rule in re.split(r"^\s*(?:rule|checkpoint)\b", text, flags=re.M) if "script:" in rule]
    assert usage["software-stack-deployment"] == {"conda": True}
    assert len(jobs) > 20 and all("conda:" in rule for rule in jobs)
    assert usage["report"] is True and "report(" in text


@pytest.mark.slow
def test_the_example_runs_with_parts_of_its_own(repository: Path, tmp_path: Path) -> None:
    mine, parts = tmp_path / "mine", tmp_path / "parts"
    shutil.copytree(ROOT / "examples/own_project", mine)
    run("git", "clone", "--quiet", f"file://{repository}", "trioflow", folder=mine)
    words = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--target", parts)
    run(sys.executable, "-m", "pip", *words, "./package", folder=mine)
    told = {
        "PYTHONPATH": f"{parts}:{mine / 'trioflow/workflow'}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    run(sys.executable, "-m", "snakemake", "--cores", "2", folder=mine, **told)

    errors = read_table(mine / "results/report/error.parquet", "errors")
    assert errors["experiment"].tolist() == ["mixer-batch4", "mixer-ddp2"]
    answer = json.loads((mine / "results/own/answer.json").read_text())
    assert answer["plan"] == "half-half" and answer["platform"] == "our-node"
    assert answer["network"] == "slow_start" and answer["ranks"] == 4
    assert "DP2 x PP2" in answer["plan_text"] and "all-forward" in answer["plan_text"]

    quick = ("simulate", "results/operator_tables/mixer-b8", "--plan", "half-half", "--ranks", "4")
    platform = ("--platform", "our-node.yaml", "--collectives", "results/own/collectives.json")
    plain = run(sys.executable, "-m", "trioflow", *quick, *platform, "--json", folder=mine, **told).splitlines()
    assert json.loads(plain[-1] if plain[-1].startswith("{") else plain[0])["step_time_s"] < (answer["step_time_s"])
