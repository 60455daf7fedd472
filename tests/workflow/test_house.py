"""The form of the house: rules, scripts, environments, generated files, Makefile."""

import ast
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import trioflow
import yaml
from project_copy import ROOT, Project
from trioflow.base.plan_row import SCHEDULE_GROUP, SCHEDULES
from trioflow.base.plugins import list_plugins
from trioflow_evaluation.vtrain.model import SETS

RULE_FILES = [*sorted((ROOT / "rules").rglob("*.smk")), ROOT / "rules/evaluation/Snakefile"]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
MEASURING = {"capture", "calibrate", "sweep_operation"}
WITH_TORCH = MEASURING | {"judge_clusters", "judge_cluster_steps", "judge_cluster_peaks", "judge_bridge"}


def read_rules() -> dict[str, str]:
    """The text of every rule that runs a script, by its name."""
    rules = {}
    for file in RULE_FILES:
        parts = re.split(r"^rule (\w+):$", file.read_text(), flags=re.MULTILINE)[1:]
        rules |= dict(zip(parts[::2], parts[1::2], strict=True))
    return {name: text for name, text in rules.items() if "    output:" in text}


RULES = read_rules()


EXECUTORS = ("slurm", "kubernetes", "cluster")
"""Extras that stay out of the tested environment: each slows every start of Snakemake."""


def read_pins(name: str = "requirements") -> dict[str, str]:
    lines = (ROOT / f"envs/{name}.lock").read_text().splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in pins}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_one_name_and_every_declaration(name: str) -> None:
    text = RULES[name]
    place = re.search(rf'"(?:\.\./)+scripts/(\w+/|){name}\.py"', text)
    assert place is not None
    assert f'library_digest("{place[1]}{name}")' in text, "an edit of the library would go unseen"
    assert f'"<logs>/{name}' in text and f'"<benchmarks>/{name}' in text
    environment = "capture" if name in WITH_TORCH else "analysis"
    assert f'../envs/{environment}.yaml"' in text
    assert "    message:" in text
    assert ("mem_mb=" in text) == ("runtime=" in text)
    assert "mem_mb=2000,\n        runtime=10,\n" not in text, "the profiles' own default"
    assert ("measurement=1" in text) == ("threads: 2" in text) == (name in MEASURING)
    assert "    run:" not in text and "    shell:" not in text


def test_every_script_has_its_rule_and_stays_small() -> None:
    assert {script.stem for script in SCRIPTS} == set(RULES)
    for script in SCRIPTS:
        text = script.read_text()
        assert len(text.splitlines()) <= 30, script.name
        assert "__future__" not in text, "Snakemake puts lines before it: a SyntaxError"
        ast.parse(text)


def test_the_snakefile_stays_small_and_rules_hold_no_code() -> None:
    assert len((ROOT / "Snakefile").read_text().splitlines()) <= 70
    for file in [ROOT / "Snakefile", *RULE_FILES]:
        text = file.read_text()
        assert "lambda" not in text
        assert not re.search(r"^\s*(import|from) workflow", text, re.MULTILINE), "replaces Snakemake's own"
    for file in RULE_FILES:
        head = "\n".join(file.read_text().splitlines()[:8])
        for word in ("Purpose", "Inputs", "Outputs"):
            assert f"# {word}:" in head, f"{file.name} does not say its {word.lower()}"


def test_rules_are_read_without_numpy() -> None:
    """Each start of Snakemake would pay half a second for it, and each job that it starts."""
    texts = [file.read_text() for file in (ROOT / "Snakefile", *RULE_FILES)]
    found = re.compile(r"^from trioflow[^(\n]*(?:\([^)]*\))?$", re.MULTILINE)
    lines = [line for text in texts for line in found.findall(text)]
    assert len(lines) >= 5
    program = "\n".join(["import sys", *lines, "sys.exit('numpy' in sys.modules)"])
    subprocess.run([sys.executable, "-c", program], check=True)


def test_rules_name_the_sets_of_vtrains_points_as_the_library_does() -> None:
    text = (ROOT / "rules/evaluation/vtrain.smk").read_text().partition("VTRAIN_SETS = ")[2]
    assert ast.literal_eval(text.partition("\n")[0]) == list(SETS)


def test_snakemake_finds_nothing_to_complain_about(project: Project) -> None:
    assert "good condition" in project.snakemake("--lint")


def test_the_default_profile_limits_measurements_and_mends_killed_runs() -> None:
    profile = yaml.safe_load((ROOT / "profiles/default/config.yaml").read_text())
    assert profile["resources"] == ["measurement=1"] and profile["rerun-incomplete"] is True
    assert profile["cores"] == 2, "capture and measure take two threads: both"
    for name in ("default", "slurm", "cluster", "kubernetes"):
        text = (ROOT / f"profiles/{name}/config.yaml").read_text()
        assert {"runtime=10", "mem_mb=2000", "disk_mb=2000"} <= set(yaml.safe_load(text)["default-resources"]), name
    slurm = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())
    assert slurm["executor"] == "slurm" and slurm["resources"] == ["measurement=1"]


def test_every_figure_of_snakemakes_report_has_a_caption() -> None:
    captions = re.findall(r'caption="\.\./(workflow/[\w/]+\.rst)"', RULES["report"])
    assert len(captions) == RULES["report"].count("report(\n") >= 5
    for caption in captions:
        assert len((ROOT / caption).read_text().split()) > 10, caption


def test_generated_files_have_not_drifted_from_their_sources() -> None:
    spec = importlib.util.spec_from_file_location("build_reference", ROOT / "docs/build_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files = module.build_files()
    for path, text in files.items():
        assert (ROOT / path).read_text() == text, f"{path} is out of date: make docs"
    written = {path.relative_to(ROOT) for path in (ROOT / "workflow/schemas").glob("*.json")}
    by_hand = {Path(f"workflow/schemas/{name}.schema.json") for name in ("config", "datasets", "device", "platform")}
    assert written - by_hand == {path for path in files if path.suffix == ".json"}


def test_the_lock_pins_everything_exactly_and_names_no_host() -> None:
    text = (ROOT / "envs/requirements.lock").read_text()
    for line in text.splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", line), line
    assert "://" not in text and "--" not in text
    pins = read_pins()
    assert (pins["torch"], pins["torchvision"]) == ("2.13.0", "0.28.0"), "the pair that match"
    assert not any(name.startswith(("nvidia", "triton", "trioflow")) for name in pins)


def test_the_lock_holds_every_dependency_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    executors = [extras.pop(name) for name in EXECUTORS]
    pins = read_pins()
    both = set(pins) & set(read_pins("executors"))
    assert all(pins[name] == read_pins("executors")[name] for name in both)
    groups = [project["dependencies"], *extras.values(), *executors]
    pins |= read_pins("executors")
    packaging = pytest.importorskip("packaging.requirements")
    for line in itertools.chain.from_iterable(groups):
        requirement = packaging.Requirement(line)
        if requirement.name == "trioflow":
            assert requirement.extras <= extras.keys()
            continue
        version = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{line} against {version}"


def test_the_docs_name_every_schedule() -> None:
    said = (ROOT / "docs/plans.md").read_text().partition("Pipeline schedules: ")[2].partition(", or a schedule of")[0]
    assert sorted(re.findall(r"`([^`]+)`", said)) == list_plugins(SCHEDULE_GROUP, SCHEDULES)


def test_the_package_and_the_citation_say_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == trioflow.__version__
    assert citation["license"] == project["license"]
    assert citation["authors"] == project["authors"]
    assert citation["keywords"] == project["keywords"]


def test_every_form_of_an_issue_asks_for_what_doctor_prints() -> None:
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 2
    for form in forms:
        content = yaml.safe_load(form.read_text())
        required = {p["id"] for p in content["body"] if p.get("validations", {}).get("required")}
        assert content["name"] and {"command", "answer", "doctor"} <= required, form.name


@pytest.mark.parametrize("name", ["analysis", "capture"])
def test_conda_environments_carry_the_locks_pins_and_install_the_library(name: str) -> None:
    content = yaml.safe_load((ROOT / f"envs/{name}.yaml").read_text())
    lines = next(entry for entry in content["dependencies"] if isinstance(entry, dict))["pip"]
    found = dict(line.lower().split("==") for line in lines)
    pins = read_pins()
    assert {key: pins[key] for key in found} == found
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.split(r"[>=<]", line)[0] for line in project["dependencies"]}
    assert core <= set(found)
    assert ({"torch", "torchvision"} <= set(found)) == (name == "capture")
    install = ROOT / f"envs/{name}.post-deploy.sh"
    assert "--editable ." in install.read_text()
    subprocess.run(["bash", "-n", install], check=True)


def test_ci_is_one_executable_script_that_calls_the_tests() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash") and "set -euo pipefail" in text
    for word in ("make lint", "make test", "make reproduce"):
        assert word in text
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for word in ("ruff check", "ruff format --check", "mypy", "snakefmt", "--lint"):
        assert word in lint
    usual, few = (yaml.safe_load((ROOT / name).read_text()) for name in ("config/config.yaml", ".ci/few_rounds.yaml"))
    for stage, settings in few.items():
        assert settings.items() != usual[stage].items(), stage
        assert all(0 < count <= usual[stage][name] for name, count in settings.items()), stage


def test_a_step_of_ci_that_fails_beside_others_fails_it_where_it_is_waited_for() -> None:
    functions = (ROOT / ".ci/run").read_text().partition("install_programs() {")[0]
    steps = "beside lint true; beside site false; step lint join lint; step site join site; echo later"
    run = subprocess.run(["bash", "-c", f"{functions}\n{steps}"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and "later" not in run.stdout
    assert re.search(r"^lint took \d+ s beside other steps$", run.stdout, re.MULTILINE)
    assert "passed: lint" in run.stdout
    assert "FAILED: site (exit 1)" in run.stdout and "passed: site" not in run.stdout


def run_make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_make_without_a_fit_python_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "envs").mkdir()
    for name in ("Makefile", "pyproject.toml", "envs/requirements.lock"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    run = run_make(tmp_path, f"PYTHONS={old} no-such-python")
    assert run.returncode != 0
    assert "trioflow needs Python 3.11 or newer" in run.stderr and "PYTHON=" in run.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_reproduce_ends_with_both_reports_and_does_nothing_twice(stand_in: Project) -> None:
    """The real Makefile over stand-in scripts; Snakemake's report is made from real figures only."""
    folder = stand_in.folder
    tools = folder / ".venv/bin"
    tools.mkdir(parents=True)
    (folder / ".venv/.stamp").touch()
    python = f'#!/bin/sh\nPYTHONPATH="{folder}/workflow" exec "{sys.executable}" "$@"\n'
    snakemake = (
        f'#!/bin/sh\n[ "$1" = --report ] && {{ echo made > "$2"; exit; }}\nexec "{tools}/python" -m snakemake "$@"\n'
    )
    for name, text in (("python", python), ("snakemake", snakemake)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / "envs/requirements.lock").touch()
    for name in ("Makefile", "pyproject.toml"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
        os.utime(folder / name, (0, 0))
    os.utime(folder / "envs/requirements.lock", (0, 0))

    first = run_make(folder, "reproduce")
    assert first.returncode == 0, first.stdout + first.stderr
    report = folder / "results/report/snakemake.html"
    assert report.read_text() == "made\n" and "results/report/index.html" in first.stdout
    jobs, made = stand_in.ran(), report.stat().st_mtime_ns
    lock = folder / ".snakemake/locks/0.output.lock"  # as a killed run leaves it
    lock.parent.mkdir(exist_ok=True)
    lock.write_text("results/report/index.html\n")
    second = run_make(folder, "reproduce")
    assert second.returncode == 0 and "removing the lock" in second.stdout
    assert "Nothing to be done" in second.stdout + second.stderr
    assert stand_in.ran() == jobs and report.stat().st_mtime_ns == made


def test_the_homes_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = [line for line in text.splitlines() if " | `" in line]
    assert len(rows) >= 15
    for place in re.findall(r"`([\w./-]+/[\w.-]*)`", "\n".join(rows)):
        homes = (ROOT / place, ROOT / "workflow" / "trioflow" / place)
        assert any(home.exists() for home in homes), place
    files = {path.name for folder in ("tests", "workflow") for path in (ROOT / folder).rglob("*.py")}
    assert not set(re.findall(r"`(\w+\.py)`", text)) - files


def test_the_rooms_that_design_draws_exist() -> None:
    text = (ROOT / "workflow/DESIGN.md").read_text().partition("| Room | Files |")[2]
    rows = text.partition("\n\n")[0].splitlines()[2:]
    assert len(rows) >= 10
    for row in rows:
        room, files = (cell.strip() for cell in row.strip("|").split("|"))
        home = ROOT / "workflow/trioflow" / room.strip("`")
        for name in re.findall(r"`(\w+)/?`", files):
            assert (home / f"{name}.py").exists() or (home / name).is_dir(), f"{room}: {name}"
        # A command's modules are named as the command is.
        files_there = {file.stem for file in home.glob("[a-z]*") if file.suffix != ".pyi"}  # stubs are generated
        missing = files_there - set(re.findall(r"\w+", files))
        assert not missing or room == "`cli`", f"{room} has no place for {missing}"
    drawn = {row.split("|")[1].strip(" `") for row in rows}
    rooms = {file.parent.name for file in (ROOT / "workflow/trioflow").glob("*/__init__.py")}
    assert rooms == drawn
