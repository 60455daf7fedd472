"""Carry a finished run into the repository: README's figure and tables, and the shipped example.

Reads ``results/`` as `make reproduce` left it and, where they were run, `snakemake validation published` and `make bench`
(docs/bench.tsv). Writes README.md between its markers, docs/figures/, and workflow/trioflow/data/: one trace, the cost models
and the platform, under the name of the kind of machine they were measured on.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from trioflow.costmodel.validation_tables import read_validation_table
from trioflow.hardware.platform import load_platform, save_platform
from trioflow.provenance import read_json, write_json
from trioflow.report.published_readme import update_published
from trioflow.report.readme import (
    update_readme,
    update_speed,
    update_validation,
    write_errors_page,
)
from trioflow.report.speeds import read_speeds
from trioflow.tables import read_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
DATA = ROOT / "workflow" / "trioflow" / "data"
TRACE = "gpt2-tiny-b8"
NAME = "cpu2-gloo"


def publish_readme() -> None:
    """Copy the figure and rewrite the table of errors."""
    figure = ROOT / "docs" / "figures" / "predicted_vs_measured.png"
    figure.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(RESULTS / "report" / "figures" / figure.name, figure)
    errors = read_table(RESULTS / "report" / "error.parquet", "errors")
    update_readme(ROOT / "README.md", errors, figure)
    write_errors_page(ROOT / "docs" / "errors.md", errors)


def publish_plan_errors() -> None:
    """Rewrite the plans' own errors that `trioflow search` takes its probabilities from."""
    errors = read_table(RESULTS / "report" / "error.parquet", "errors")
    lines = [
        "# Signed errors of predicted steps of parallel plans: trioflow's own runs over gloo on one machine,",
        "# those of docs/errors.md (make publish; none left out).",
        "workload\tplan\terror",
    ]
    parallel = errors[errors["ranks"] > 1]
    for workload, plan, error in zip(
        parallel["workload"], parallel["plan"], parallel["relative_error"], strict=True
    ):
        lines.append(f"{workload}\t{plan}\t{error:.3f}")
    (DATA / "plan_errors.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def publish_validation() -> None:
    """Rewrite the table of the cost models' validation, where a run has judged them."""
    summary = RESULTS / "report" / "validation.parquet"
    if summary.is_file():
        update_validation(ROOT / "README.md", read_validation_table(summary, "summary"))


def publish_published() -> None:
    """Rewrite the table of public measured steps, where a run has predicted them."""
    cases = RESULTS / "report" / "published.parquet"
    if cases.is_file():
        update_published(ROOT / "README.md", read_table(cases, "published_cases"))


def publish_speed() -> None:
    """Rewrite the table of speeds, where `make bench` measured them."""
    speeds = ROOT / "docs" / "bench.tsv"
    if speeds.is_file():
        update_speed(ROOT / "README.md", read_speeds(speeds))


def publish_example() -> None:
    """Copy what the quick start reads: a trace, a platform, its cost models."""
    source, target = RESULTS / "operator_tables" / TRACE, DATA / "traces" / TRACE
    target.mkdir(parents=True, exist_ok=True)
    for name in ("operators.parquet", "tensors.parquet"):
        shutil.copyfile(source / name, target / name)
    write_json(target / "trace.json", read_json(source / "trace.json"))
    models = DATA / "cost_models" / NAME
    models.mkdir(parents=True, exist_ok=True)
    for name in ("operators.json", "collectives.json"):
        shutil.copyfile(RESULTS / "cost_models" / "this-machine" / name, models / name)
    machine = load_platform(RESULTS / "platforms" / "this-machine.yaml")
    save_platform(replace(machine, name=NAME), DATA / "platforms" / f"{NAME}.yaml")
    shutil.copyfile(ROOT / "config" / "workloads.tsv", DATA / "workloads.tsv")


def main() -> None:
    """Publish a finished run."""
    publish_readme()
    publish_plan_errors()
    publish_validation()
    publish_published()
    publish_speed()
    publish_example()


if __name__ == "__main__":
    main()
