"""Carry a finished run into the repository: README's lines, the tables of docs, and the shipped example.

Reads ``results/`` as `make reproduce` left it and, where they were run, `snakemake validation published clusters` and
`make bench` (docs/bench.tsv). Writes rows of README.md, lines of docs/accuracy.md, blocks of docs/, docs/figures/, and workflow/trioflow/data/:
one trace, the cost models and the platform, under the name of the kind of machine they were measured on.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import judge_intervals
import pandas as pd
import seaborn
from matplotlib import pyplot
from page_numbers import (
    Lister,
    Result,
    describe_bridge,
    describe_clusters,
    describe_errors,
    describe_jobs,
    describe_published,
    describe_validation,
    list_published,
    list_validation,
    publish,
    publish_block,
    publish_intervals,
    publish_spreads,
    record_intervals,
    record_run,
)
from scipy.stats import beta
from trioflow.base.experiments import load_plans
from trioflow.base.provenance import read_json, write_json
from trioflow.base.yaml_files import read_yaml
from trioflow.costmodel.collectives.model import load_collective_model
from trioflow.costmodel.uncertainty import BATCH, CAPTURES, StepResidual, load_residuals, load_spreads, pool_captures
from trioflow.hardware.platform import write_content
from trioflow.parallel.memory.peak import load_survival
from trioflow.tables import read_table
from trioflow.trace.facts import Facts
from trioflow_evaluation.clusters.page import describe_causes, judge_aims
from trioflow_evaluation.clusters.scores import (
    choose_cases,
    judge_survival,
    mark_crowded,
    tabulate_reliability,
    write_survival,
    write_survival_scores,
)
from trioflow_evaluation.drift.judge import JOBS_FOLDER, fit_jobs, write_spreads
from trioflow_evaluation.published.judge import ANCHORS, list_residuals, way_of_plan, write_residuals
from trioflow_evaluation.tables import CLUSTER_MEMORY, CLUSTER_RATES, CLUSTER_STEPS, DRIFT_CAUSES, DRIFT_HALVES, SUMMARY

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from speeds import describe_speeds, read_speeds  # noqa: E402

RESULTS = ROOT / "results"
DATA = ROOT / "workflow" / "trioflow" / "data"
TRACE = "gpt2-tiny-b8"
NAME = "cpu2-gloo"


def list_results() -> Iterator[tuple[str, Result]]:
    """Yield, by topic, what a run found; topics that no run has judged are left out."""
    report, clusters, drift = (RESULTS / name for name in ("report", "clusters", "drift"))
    table = report / "error.parquet"
    errors = read_table(table, "errors")
    plans = load_plans(ROOT / "config" / "plans.tsv")
    yield ("errors", describe_errors(errors, record_run(ROOT / "docs" / "runs.tsv", table, errors, plans)))
    if (summary := report / "validation.parquet").is_file():
        yield "validation", describe_validation(read_table(summary, "summary", SUMMARY))
    if (cases := report / "published.parquet").is_file():
        yield "published", describe_published(read_table(cases, "published_cases"))
    if (steps := clusters / "steps.parquet").is_file():
        timed = read_table(steps, "cluster_steps", CLUSTER_STEPS)
        memory = clusters / "memory.parquet"
        held = read_table(memory, "cluster_memory", CLUSTER_MEMORY) if memory.is_file() else None
        timed = timed if held is None else mark_crowded(held, timed)
        yield "clusters", describe_clusters(judge_aims(held, timed), describe_causes(timed))
    if (rates := clusters / "rates.parquet").is_file():
        yield "bridge", describe_bridge(read_table(rates, "cluster_rates", CLUSTER_RATES))
    if (halves := drift / "halves.parquet").is_file():
        judged = read_table(halves, "drift_halves", DRIFT_HALVES)
        caused = read_table(drift / "causes.parquet", "drift_causes", DRIFT_CAUSES)
        yield "drift", describe_jobs(judged, caused)
    if (speeds := ROOT / "docs" / "bench.tsv").is_file():
        yield "speed", describe_speeds(read_speeds(speeds))


def publish_figure() -> None:
    """Copy the figure of README."""
    figure = ROOT / "docs" / "figures" / "predicted_vs_measured.png"
    figure.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(RESULTS / "report" / "figures" / figure.name, figure)


def publish_survival() -> None:
    """Rewrite the odds that ship and the tables of docs/memory.md, where a run has predicted nanotron's memory."""
    if (memory := RESULTS / "clusters" / "memory.parquet").is_file():
        cases = choose_cases(read_table(memory, "cluster_memory", CLUSTER_MEMORY))
        write_survival(cases)
        load_survival.cache_clear()
        judged = judge_survival(cases)
        publish_block(ROOT, "memory.md", "memory", write_survival_scores(judged))
        draw_reliability(judged, ROOT / "docs" / "figures" / "memory_reliability.png")


def draw_reliability(judged: pd.DataFrame, path: Path) -> None:
    """Draw which share of nanotron's runs survived whose odds were in each bin, with its 90 % interval and their count."""
    bins = tabulate_reliability(judged)
    lost, survived = bins["runs"] * (1 - bins["survived"]), bins["runs"] * bins["survived"]
    ends = beta.ppf([[0.05], [0.95]], survived + 0.5, lost + 0.5)
    seaborn.set_theme(style="whitegrid")
    figure, axes = pyplot.subplots(figsize=(5.2, 4.9), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", label="odds that come true")
    axes.vlines(bins["odds"], *ends, color="C0", alpha=0.5, label="90 % interval of so many runs")
    points = {"color": "C0", "s": 60, "label": "runs, with their number", "legend": False}
    seaborn.scatterplot(bins, x="odds", y="survived", ax=axes, **points)
    for number, (_, row) in enumerate(bins.iterrows()):
        beside = (6, 5 if number % 2 else -12)
        place = (row["odds"], row["survived"])
        axes.annotate(f"{row['runs']:,.0f}", place, xytext=beside, textcoords="offset points")
    axes.set(xlabel="predicted probability to survive", ylabel="share that survived", xlim=(-0.05, 1.12))
    figure.legend(loc="outside lower center")
    figure.savefig(path, dpi=110)


def publish_spread() -> None:
    """Rewrite the spreads that ship, and the table of docs.

    Rows of the run's captures and of recorded jobs are new where their repeats and data are there.
    """
    jobs = sorted((RESULTS / "data" / JOBS_FOLDER).glob("*.parquet"))
    paths = sorted((RESULTS / "operator_tables").glob("*/trace.json"))
    traces = [Facts.read(read_json(path), path) for path in paths]
    repeats = [one.repeats for one in traces if one.repeats]
    model = load_collective_model(RESULTS / "cost_models" / "this-machine" / "collectives.json")
    source = (
        f"repeats of captured steps, {traces[0].device_name}; rounds of collectives, {model.library} (make reproduce)"
    )
    kind = "gpu" if traces[0].device == "cuda" else "cpu"
    known = load_spreads()
    own = [one for one in known if one.job.endswith(CAPTURES)]
    if repeats:
        own = [pool_captures(repeats, model.curves.values(), kind, source)]
    recorded = fit_jobs(jobs) if jobs else [one for one in known if not one.job.endswith(CAPTURES)]
    write_spreads([*own, *recorded])
    load_spreads.cache_clear()
    publish_spreads(ROOT, load_spreads())


def publish_intervals_of_sets() -> None:
    """Rewrite how well intervals hold, of the sets that a run judged, and how wide those of steps are."""
    report = RESULTS / "report"
    found: dict[Lister, pd.DataFrame] = {}
    validated = sorted((RESULTS / "validation").glob("*.parquet"))
    if validated:
        tables = [read_table(path, "validation") for path in validated]
        found[list_validation] = pd.concat([one for one in tables if len(one)], ignore_index=True)
    if (cases := report / "published.parquet").is_file():
        found[list_published] = read_table(cases, "published_cases")
    publish_intervals(ROOT, record_intervals(ROOT / "docs" / "intervals.tsv", found))
    judge_intervals.main(results=str(RESULTS))


def publish_step_residuals() -> None:
    """Rewrite how far steps were off that leave what was recorded; the public ones where a run judged them."""
    errors = read_table(RESULTS / "report" / "error.parquet", "errors")
    own = [
        StepResidual(
            BATCH if row["ranks"] == 1 else way_of_plan(row["plan"]),
            "cpu",
            row["workload"],
            row["experiment"],
            int(row["ranks"]),
            row["relative_error"],
        )
        for row in errors.to_dict("records")
    ]
    cases, anchors = RESULTS / "report" / "published.parquet", RESULTS / "published/anchors.parquet"
    public = [one for one in load_residuals() if one.device_kind == "cuda"]
    if cases.is_file() and anchors.is_file():
        pairs = read_table(anchors, "anchors", schema=ANCHORS)
        public = list_residuals(pairs, read_table(cases, "published_cases"))
    write_residuals([*own, *public])


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
    machine = read_yaml(RESULTS / "platforms" / "this-machine.yaml")
    write_content({**machine, "name": NAME}, DATA / "platforms" / f"{NAME}.yaml")
    shutil.copyfile(ROOT / "config" / "workloads.tsv", DATA / "workloads.tsv")


def main() -> None:
    """Publish a finished run."""
    publish_figure()
    for topic, result in list_results():
        publish(ROOT, topic, result)
    publish_step_residuals()
    publish_survival()
    publish_spread()
    publish_intervals_of_sets()
    publish_example()


if __name__ == "__main__":
    main()
