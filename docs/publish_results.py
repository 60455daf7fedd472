"""Carry a finished run into the repository: README's figure and tables, and the shipped example.

Reads ``results/`` as `make reproduce` left it and, where they were run, `snakemake validation published clusters` and
`make bench` (docs/bench.tsv). Writes README.md between its markers, docs/figures/, and workflow/trioflow/data/: one trace, the cost models
and the platform, under the name of the kind of machine they were measured on.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from trioflow.base.provenance import read_json, write_json
from trioflow.costmodel.spread import write_spreads
from trioflow.costmodel.steps import (
    BATCH,
    StepResidual,
    load_residuals,
    write_node_residuals,
    write_residuals,
)
from trioflow.hardware.platform import load_platform, save_platform
from trioflow.reproductions.clusters.aims import describe_causes, judge_aims
from trioflow.reproductions.clusters.beyond import fit_node_residuals
from trioflow.reproductions.clusters.bridge_page import write_rates_table
from trioflow.reproductions.drift.jobs import JOBS_FOLDER, fit_jobs
from trioflow.reproductions.drift.page import describe_drift
from trioflow.reproductions.published.judge import ANCHORS, list_residuals, way_of_plan
from trioflow.reproductions.readme import (
    read_speeds,
    update_bridge,
    update_clusters,
    update_drift,
    update_published,
    update_readme,
    update_speed,
    update_validation,
    write_errors_page,
)
from trioflow.reproductions.tables import (
    CLUSTER_MEMORY,
    CLUSTER_RATES,
    CLUSTER_STEPS,
    DRIFT_CAUSES,
    DRIFT_HALVES,
    read_validation_table,
)
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


def publish_step_residuals() -> None:
    """Rewrite how far steps were off that leave what was recorded; the public ones where a run judged them."""
    errors = read_table(RESULTS / "report" / "error.parquet", "errors")
    own = [
        StepResidual(
            BATCH if row["ranks"] == 1 else way_of_plan(row["plan"]), "cpu", row["workload"],
            row["experiment"], int(row["ranks"]), row["relative_error"],
        )
        for row in errors.to_dict("records")
    ]  # fmt: skip
    cases, anchors = RESULTS / "report" / "published.parquet", RESULTS / "published/anchors.parquet"
    public = [one for one in load_residuals() if one.device_kind == "cuda"]
    if cases.is_file() and anchors.is_file():
        pairs = read_table(anchors, "anchors", schema=ANCHORS)
        public = list_residuals(pairs, read_table(cases, "published_cases"))
    write_residuals([*own, *public])


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


def publish_clusters() -> None:
    """Rewrite the lines on nanotron's runs and what they took over nodes, where a run has predicted them."""
    memory, steps = (RESULTS / "clusters" / f"{name}.parquet" for name in ("memory", "steps"))
    if steps.is_file():
        held = memory.is_file()
        cases = read_table(memory, "cluster_memory", CLUSTER_MEMORY) if held else None
        timed = read_table(steps, "cluster_steps", CLUSTER_STEPS)
        write_node_residuals(fit_node_residuals(timed))
        lines, causes = judge_aims(cases, timed), describe_causes(timed)
        update_clusters(ROOT / "README.md", ROOT / "docs" / "clusters.md", lines, causes)


def publish_bridge() -> None:
    """Rewrite the lines on Megatron-Bridge's rates, where a run has predicted them."""
    rates = RESULTS / "clusters" / "rates.parquet"
    if rates.is_file():
        cases = read_table(rates, "cluster_rates", CLUSTER_RATES)
        update_bridge(ROOT / "docs" / "megatron_bridge.md", write_rates_table(cases))


def publish_spread() -> None:
    """Rewrite the spread of recorded jobs that ships, and what it was judged by, where their data were retrieved."""
    jobs = sorted((RESULTS / "data" / JOBS_FOLDER).glob("*.parquet"))
    if jobs:
        write_spreads(fit_jobs(jobs))
    halves, causes = (RESULTS / "drift" / f"{name}.parquet" for name in ("halves", "causes"))
    if halves.is_file() and causes.is_file():
        judged = read_table(halves, "drift_halves", DRIFT_HALVES)
        caused = read_table(causes, "drift_causes", DRIFT_CAUSES)
        update_drift(ROOT / "docs" / "spread.md", describe_drift(judged, caused))


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
    publish_step_residuals()
    publish_validation()
    publish_published()
    publish_clusters()
    publish_bridge()
    publish_spread()
    publish_speed()
    publish_example()


if __name__ == "__main__":
    main()
