"""Which jobs run, and which run again after an edit: asked of Snakemake itself."""

import csv
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import networkx
import pytest
from project_copy import ROOT, Project
from trioflow.datasets.catalogue import load_catalogue
from trioflow_evaluation.fits.collectives import PUBLIC_TABLES

STAGES = {
    "traces",
    "operator_tables",
    "calibrations",
    "cost_models",
    "partitions",
    "measurements",
    "task_graphs",
    "timelines",
}


def read_rows(name: str) -> list[dict[str, str]]:
    with (ROOT / "config" / f"{name}.tsv").open() as stream:
        return list(csv.DictReader(stream, delimiter="\t"))


def test_the_projects_own_tables_give_the_expected_jobs(project: Project) -> None:
    for name in ("workloads", "experiments"):
        text = (ROOT / "config" / f"{name}.tsv").read_text()
        (project.folder / "config" / f"{name}.tsv").write_text(text)
    traces = sum(len(row["batches"].split(",")) for row in read_rows("workloads"))
    experiments = read_rows("experiments")
    measured = len({row["workload"] for row in experiments})
    assert project.planned() == {
        "capture": traces,
        "merge": traces,
        "fit_operators": 1,
        "partition": measured,
        "calibrate": measured,
        "measure": measured,
        "fit_collectives": 1,
        "describe_machine": 1,
        "extrapolate": len(experiments),
        "simulate": len(experiments),
        "attribute": 1,
        "report": 1,
        "describe_traces": 1,
    }


def test_the_docs_draw_the_stages_as_snakemake_joins_them() -> None:
    """A stage is a file of rules; partitions, which two stages share, and what follows anyway are left out."""
    drawn = re.search(r"```mermaid\n(.*?)```", (ROOT / "docs/cite.md").read_text(), re.DOTALL)
    assert drawn
    words = [re.findall(r"\w+", line) for line in drawn[1].splitlines() if "-->" in line]
    edges = {edge for line in words for edge in pairwise(line)}
    command = [sys.executable, "-m", "snakemake", "--rulegraph", "mermaid-js"]
    graph = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = dict(re.findall(r"(id\d+)\[(\w+)\]", graph))
    stages = {
        rule: path.stem
        for path in (ROOT / "rules").glob("*.smk")
        for rule in re.findall(r"^rule (\w+):", path.read_text(), re.MULTILINE)
    } | {"partition": "partition"}
    ends = re.findall(r"(id\d+) --> (id\d+)", graph)
    joined = {(stages[names[a]], stages[names[b]]) for a, b in ends if names[b] != "all"}
    before = {one for one, other in joined if other == "partition"}
    joined |= {(a, b) for a in before for one, b in joined if one == "partition"}
    whole = networkx.DiGraph((a, b) for a, b in joined if a != b and "partition" not in (a, b))
    assert set(networkx.transitive_reduction(whole).edges) == edges


def test_the_catalog_s_entry_plans_the_same_jobs(project: Project, default_jobs: dict[str, int]) -> None:
    jobs = project.planned("--snakefile", "workflow/Snakefile")
    assert jobs == {**default_jobs, "default": 1}


def test_every_stage_is_a_target_and_together_they_leave_only_the_pages(
    project: Project, default_jobs: dict[str, int]
) -> None:
    expected = {**default_jobs, **dict.fromkeys(STAGES, 1)}
    for page in ("attribute", "report", "describe_traces"):
        expected.pop(page)
    assert project.planned(*sorted(STAGES)) == expected
    assert project.planned("traces") == {"traces": 1, "capture": 4}


def test_stages_that_need_no_real_runs_ask_for_none(project: Project) -> None:
    assert "calibrate" not in project.planned("operator_tables", "partitions")
    assert "fit_operators" not in project.planned("measurements"), "truth depends on no cost model"


def test_nothing_that_is_predicted_rests_on_a_measured_step_of_a_plan(undisturbed: Project) -> None:
    """The truth, and what it is made of, are read by what comes after the predictions."""
    lines = undisturbed.snakemake("--detailed-summary").splitlines()
    rows = [line.split("\t") for line in lines if line.startswith("results/")]
    rules, inputs = {row[0]: row[2] for row in rows}, {row[0]: row[4].split(",") for row in rows}
    truth = {path for path in inputs if path.startswith(("results/measurements/", "results/sessions/"))}
    assert {rules[path] for path in truth} == {"measure", "calibrate"}
    assert {rules[path] for path, needed in inputs.items() if truth & set(needed)} == {"measure", "attribute", "report"}
    reached, todo = set[str](), {path for path in inputs if path.startswith("results/timelines/")}
    while todo:
        reached |= todo
        todo = {needed for path in todo for needed in inputs.get(path, [])} - reached
    assert {"simulate", "extrapolate", "calibrate"} <= {rules.get(path) for path in reached}
    assert not reached & truth


def test_when_all_is_made_nothing_is_done(finished: Project) -> None:
    assert "Nothing to be done" in finished.snakemake()
    said = finished.snakemake("--report", "results/report/snakemake.html")
    assert "Report created" in said and "Warning" not in said


def test_the_validation_is_asked_for_and_needs_the_public_data_of_every_set(
    project: Project, default_jobs: dict[str, int]
) -> None:
    jobs = project.planned("validation")
    groups = ["triosim", "neusight", "aiconfigurator/gemm-a100", "aiconfigurator/gemm-h100"]
    files = load_catalogue().select_files([*groups, "aiconfigurator/gemm-h200"])
    keys = {file.key for file in files} | {table.key for table in PUBLIC_TABLES}
    assert jobs == {
        "retrieve": len(keys),
        "validate_operators": 3,
        "validate_new_gpu": 1,
        "validate_collectives": 1,
        "diagnose_operators": 1,
        "fit_new_gpu": 1,
        "describe_cost_models": 1,
        "validation": 1,
    }
    assert not jobs.keys() & default_jobs.keys(), "the default run needs no public data"
    one = project.planned("results/validation/collectives.parquet")
    assert one == {"retrieve": len({t.key for t in PUBLIC_TABLES}), "validate_collectives": 1}


AFTER_COLLECTIVES = {
    "fit_collectives": 1,
    "describe_machine": 1,
    "extrapolate": 3,
    "simulate": 3,
    "attribute": 1,
    "report": 1,
}
AFTER_SESSIONS = {"measure": 2, **AFTER_COLLECTIVES}
AFTER_TRACES = {
    "merge": 4,
    "describe_traces": 1,
    "fit_operators": 1,
    "partition": 2,
    "calibrate": 2,
    "extrapolate": 3,
    **AFTER_SESSIONS,
}


@pytest.mark.parametrize(
    ("edited", "expected"),
    [
        ("workflow/trioflow/report/build.py", {"report": 1}),
        ("workflow/trioflow/network/networks.py", {"simulate": 3, "attribute": 1, "report": 1}),
        ("workflow/trioflow/trace/profile/merge.py", AFTER_TRACES),
        ("workflow/trioflow/base/errors.py", {"capture": 4, **AFTER_TRACES}),
        ("scripts/report.py", {"report": 1}),
        ("workflow/trioflow/data/report/sections/attribution.rst", {"report": 1}),
        ("scripts/fit_collectives.py", AFTER_COLLECTIVES),
    ],
)
def test_an_edit_runs_again_just_what_depends_on_it(finished: Project, edited: str, expected: dict[str, int]) -> None:
    finished.append(edited, "\n# edited\n")
    assert finished.planned() == expected


def test_edits_of_what_no_result_depends_on_run_nothing(finished: Project) -> None:
    for edited in (
        "workflow/trioflow/campaign/items.py",
        "workflow/unlock_stale.py",
        "envs/requirements.lock",
        "workflow/report/workflow.rst",
    ):
        finished.append(edited, "\n# edited\n")
    assert finished.planned() == {}


def test_a_module_that_a_module_imports_counts_too(finished: Project) -> None:
    """The engine's rule imports units through other modules only."""
    finished.append("workflow/trioflow/base/units.py", "\n# edited\n")
    assert finished.planned().keys() >= {"merge", "simulate", "report"}


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("config/config.yaml", "timed_steps: 15", "timed_steps: 17", {"capture": 4, **AFTER_TRACES}),
        ("config/config.yaml", "rounds: 15", "rounds: 17", {"calibrate": 2, **AFTER_SESSIONS}),
        (
            "config/workloads.tsv",
            "cnn\ttorchvision\tresnet18\t8,2\t32",
            "cnn\ttorchvision\tresnet18\t8,2\t64",
            {"capture": 2, **AFTER_TRACES, "merge": 2, "partition": 1, "calibrate": 1, "measure": 1},
        ),
        (
            "config/experiments.tsv",
            "gpt-tp2\tlive\tgpt\ttp2\t4",
            "gpt-tp2\tlive\tgpt\ttp2\t2",
            {**AFTER_SESSIONS, "calibrate": 1, "measure": 1},
        ),
    ],
)
def test_a_changed_setting_runs_again_just_what_it_concerns(
    finished: Project, file: str, old: str, new: str, expected: dict[str, int]
) -> None:
    finished.edit(file, old, new)
    assert finished.planned() == expected


def test_a_new_experiment_leaves_traces_and_other_graphs_alone(finished: Project) -> None:
    finished.append("config/experiments.tsv", "cnn-gpipe\tlive\tcnn\tgpipe2-m2\t8\n")
    jobs = finished.planned()
    assert "capture" not in jobs and "merge" not in jobs and "fit_operators" not in jobs
    assert jobs["calibrate"] == 1, "the session of its workload only"
    assert jobs["partition"] == 1 and jobs["simulate"] == 4


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("config/config.yaml", "seed: 0", "sed: 0", ["config/config.yaml, sed", "unknown key", "seed?"]),
        ("config/config.yaml", "rounds: 15", "rounds: many", ["measure.rounds", "'many'"]),
        (
            "config/experiments.tsv",
            "\tddp2\t",
            "\tdpd2\t",
            ["config/experiments.tsv, row 2 (line 3), column plan", "'dpd2'", "did you mean ddp2?"],
        ),
    ],
)
def test_a_mistake_in_the_configuration_is_told_with_its_place_and_fix(
    project: Project, file: str, old: str, new: str, words: list[str]
) -> None:
    project.edit(file, old, new)
    text = project.snakemake("--dry-run", status=1)
    for word in words:
        assert word in text
    assert not (project.folder / "results").exists()


def test_the_workflow_can_be_imported_as_a_module(project: Project, tmp_path: Path) -> None:
    user = tmp_path / "user"
    user.mkdir()
    (project.folder / "config").rename(user / "config")
    (user / "Snakefile").write_text(
        'configfile: "config/config.yaml"\n\n'
        f'module trioflow:\n    snakefile: "{project.folder}/Snakefile"\n    config: config\n\n'
        "use rule * from trioflow\n"
    )
    (user / "workflow").symlink_to(project.folder / "workflow")
    jobs = Project(user).planned("all", "--cores", "2")
    assert jobs["capture"] == 4 and jobs["simulate"] == 3


def test_results_go_where_the_configuration_says(project: Project) -> None:
    project.edit("config/config.yaml", "results: results", "results: elsewhere/run1")
    text = project.snakemake("--summary")
    assert "elsewhere/run1/report/index.html" in text
    assert "results/" not in text
