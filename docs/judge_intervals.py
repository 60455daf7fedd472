"""How wide intervals of steps must be: measured steps beside the intervals of their predictions, other groups left out.

``python docs/judge_intervals.py`` reads docs/interval_cases.tsv, fits the factors of
workflow/trioflow/data/step_calibration.tsv and writes the tables of docs/accuracy.md. With a folder of public data
behind it, cases on clusters are predicted anew before (nanotron's by a draw; an hour on one core); a second folder, of
results, gives live and public steps of one node.

A case's ends are those before the factor: logarithms over the prediction. A group is what shares framework, cluster and
source of the model; no group is judged by a factor that was fitted on its own cases.
"""

from __future__ import annotations

import json
import math
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from page_numbers import publish_block
from trioflow.base.errors import TrioflowError
from trioflow.base.experiments import Plan
from trioflow.base.provenance import atomic_path
from trioflow.costmodel.uncertainty import CALIBRATION, CONFIDENCES, ONE_NODE, RECORDED, load_calibration
from trioflow.parallel.plan import make_plan
from trioflow.prediction.assembly import Prediction, predict
from trioflow.prediction.question import Options, time_operators
from trioflow.report.pages import write_markdown, write_percent
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.read import published_models
from trioflow.trace.language.sizes import LanguageStep
from trioflow.trace.store import pipeline_units
from trioflow_evaluation.clusters import bridge, steps
from trioflow_evaluation.clusters.parts import extend_steps

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "docs" / "interval_cases.tsv"
COVERAGE = 0.8
"""Share of cases that an interval is to hold."""
RUNS, SEED = 90, 35
"""Runs of nanotron that are drawn, of those that ran, without pipelines before their fix and runs that were fitted on."""
LIVE, PUBLIC = "trioflow's own steps on 1 and 2 processors", "public steps on up to eight GPUs"
BRIDGE, NANOTRON, MLPERF = ("Megatron-Bridge, H100", "nanotron, H100, bf16", "MLPerf Training, H100, FP8")
Case = dict[str, Any]


def describe_case(name: str, group: str, case: str, measured_s: float, ends: Any, kind: str, word: str) -> Case:
    """Return a case; ``ends`` are the step and the ends of its interval before the factor [s]."""
    step_s, low_s, high_s = ends
    logs = zip(("low", "high", "measured"), (low_s, high_s, measured_s), strict=True)
    return {
        "set": name,
        "group": group,
        "case": case,
        "kind": kind,
        "confidence": word,
        **{end: round(math.log(time_s / step_s), 4) for end, time_s in logs},
    }


def list_rates(data: Path) -> Iterator[Case]:
    """Yield Megatron-Bridge's rows that are predicted."""
    files = sorted(data.glob("NVIDIA-NeMo+Megatron-Bridge/docs/performance-summary*.md"))
    for rate in bridge.read_rates(files):
        precision = bridge._PRECISIONS[rate.precision]
        asked = replace(rate, release="", precision=precision, measured_tokens_per_s=0.0)
        bridge._simulate.cache_clear()
        if found := _follow(bridge, partial(bridge.predict_step_s, asked)):
            measured_s = rate.batch * rate.sequence / rate.gpus / rate.measured_tokens_per_s
            name = f"{rate.gpus} GPUs, {rate.precision or 'FP8'}, {rate.release}"
            yield describe_case(BRIDGE, bridge.plain_model(rate.model), name, measured_s, *found)


def list_runs(data: Path) -> Iterator[Case]:
    """Yield some of nanotron's runs that nothing was fitted on, each on its own job's network."""
    runs = [run for run in steps.read_runs(data) if run.ran and run.set != steps.BEFORE]
    random.Random(SEED).shuffle(runs)
    for run in [run for run in runs if run.set == steps.RAN][:RUNS]:
        platform = steps.load_own_platform(run)
        times = time_operators(steps.trace_run(run), steps.DEVICE)
        if found := _follow(steps, partial(steps.predict_run, run, times, platform)):
            degrees = f"DP{run.data} TP{run.tensor} PP{run.pipeline}"
            name = f"{run.nodes} nodes {degrees} {run.micro_batch} x {run.accumulate}"
            group = f"{run.parameters:g} B, network: {run.network}"
            yield describe_case(NANOTRON, group, name, run.measured_step_s, *found)


_MLPERF = {
    ("gpt3", "3"): (2048, "fp8-bf16-reduce", 4, 8, 1, 12, 1),
    ("gpt3", "4"): (2048, "fp8-params-bf16-reduce", 4, 8, 1, 4, 2),
    ("gpt3", "4, from 1,000 nodes on"): (2048, "fp8-params-bf16-reduce", 4, 6, 1, 8, 1),
    ("llama31_405b", "5"): (8192, "fp8-params-bf16-reduce", 8, 8, 2, 8, 1),
}
"""By benchmark and round: tokens of a sample, precision, tensor, pipeline and context degree, stages of a rank, samples of
a micro-batch, as NVIDIA's config_DGXH100_*.sh and config_common.sh of that round say (v3.1 names no stages: v3.0's).
Parameters are gathered under the next forward, as v3.0's conf/*.yaml and v5.0's exports say."""
_NETWORKS = {"gpt3": "gpt3-175b", "llama31_405b": "llama-3.1-405b"}


def list_submissions(data: Path) -> Iterator[Case]:
    """Yield MLPerf's language models on H100: median of the logged steps, else of blocks."""
    for log in sorted(data.glob("mlcommons+training_results_v*/*/results/*_n*/*/result_0.txt")):
        benchmark, system, round_number = log.parts[-2], log.parts[-3], log.parts[-6][-3:]
        counted = re.search(r"_n(\d+)_", system)
        nodes = int(counted[1]) if counted else 0
        big = ", from 1,000 nodes on" * (nodes > 1000 and round_number == "4.0")
        plan = _MLPERF.get((benchmark, round_number[0] + big))
        if plan is None or not nodes or not re.search("h100|eos", system.lower()):
            continue
        batch, measured_s = read_submission(log)
        cluster = re.split(r"_|-", system)[0]
        ask = partial(predict_submission, _NETWORKS[benchmark], plan, 8 * nodes, batch)
        if found := _follow(sys.modules[__name__], ask):
            name = f"{nodes} nodes, v{round_number}"
            yield describe_case(MLPERF, f"{benchmark}, {cluster}", name, measured_s, *found)


def read_submission(log: Path) -> tuple[int, float]:
    """Return the samples of a step and its median time [s]; of gpt3 the log counts tokens, 2,048 a sample."""
    lines = [json.loads(line.partition(":::MLLOG")[2]) for line in log.read_text().splitlines() if ":::MLLOG" in line]
    batch = next(one["value"] for one in lines if one["key"] == "global_batch_size")
    stats = [one["value"] for one in lines if one["key"] == "tracked_stats"]
    times_s = [value for one in stats for name, value in one.items() if name.startswith("train_step_tim")]
    begun: dict[str, Any] = {}
    for one in [] if times_s else lines:
        if one["key"] == "block_stop":
            count = begun["metadata"]["epoch_count"] / 2048 / batch
            times_s.append((one["time_ms"] - begun["time_ms"]) / 1e3 / count)
        begun = one if one["key"] == "block_start" else begun
    return batch, statistics.median(times_s)


def predict_submission(network: str, row: tuple[Any, ...], ranks: int, batch: int) -> Any:
    """Return the step and the ends of its interval [s]: two and three rounds of micro-batches, and what follows of them."""
    sequence, precision, tensor, pipeline, context, stages, samples = row
    times = time_operators(
        make_trace(published_models()[network], LanguageStep(sequence, samples, precision)), steps.DEVICE
    )
    cut = bridge.cut_stages(list(pipeline_units(times.traces[0])), pipeline * stages)
    data = ranks // (tensor * pipeline * context)

    def simulate(pieces: float) -> Any:
        columns = {"context": context, "context_method": "ring"} if context > 1 else {}
        plan: Plan = make_plan(
            data,
            tensor,
            pipeline=pipeline,
            schedule="interleaved",
            stages_per_rank=stages,
            sharding="distributed",
            micro_batches=round(pieces),
            sequence_parallel=True,
            vocabulary_parallel=True,
            tensor_overlap="products",
            gather_overlap=True,
            **columns,
        )
        whole = data * samples * round(pieces)
        found = predict(times, plan, bridge.PLATFORM, batch=whole, options=Options(stages=cut, memory=False))
        return np.array([found.step_time_s, found.low_s, found.high_s])

    return extend_steps(simulate, batch / (data * samples), 3 * pipeline, 2 * pipeline)


def _follow(module: Any, ask: Callable[[], Any]) -> tuple[Any, str, str] | None:
    """Return what a module predicts before the factor, with kind and word of its last prediction; None where refused."""
    last: list[Prediction] = []
    own = module.predict

    def follow(*arguments: Any, **options: Any) -> Prediction:
        last.append(own(*arguments, **options))
        return last[-1]

    free = {kind: (1.0, word) for kind, (_, word) in load_calibration().items()}
    with (
        patch("trioflow.costmodel.uncertainty.load_calibration", lambda: free),
        patch.object(module, "predict", follow),
    ):
        try:
            ends = ask()
        except TrioflowError as error:
            print(f"refused: {error}", flush=True)
            return None
    return ends, last[-1].step.kind, last[-1].confidence


def list_results(results: Path) -> Iterator[Case]:
    """Yield live and public steps of one node out of a run's tables; the factor that is shipped is taken off again."""
    report = results / "report"
    for name, table, group in ((LIVE, "error", "workload"), (PUBLIC, "published", "set")):
        if not (report / f"{table}.parquet").is_file():
            continue
        rows = pd.read_parquet(report / f"{table}.parquet").rename(
            columns={"simulated_s": "predicted_s", "experiment": "case"}
        )
        for row in rows[~rows["case"].str.startswith("gpt-h")].to_dict("records"):
            kind = RECORDED if row["confidence"] == CONFIDENCES[0] and row["ranks"] == 1 else ONE_NODE
            step_s, scale = row["predicted_s"], load_calibration()[kind][0]
            ends = [step_s * (row[end] / step_s) ** (1 / scale) for end in ("low_s", "high_s")]
            yield describe_case(
                name, row[group], row["case"], row["measured_s"], [step_s, *ends], kind, row["confidence"]
            )


def find_scale(cases: pd.DataFrame) -> float:
    """Return the factor on intervals with which they hold ``COVERAGE`` of some cases, groups weighing the same."""
    side = np.where(cases["measured"] > 0, cases["high"], cases["low"])
    needed = (cases["measured"] / side).sort_values()
    weights = 1.0 / cases.groupby("group")["measured"].transform("size")[needed.index]
    return float(needed[weights.cumsum() >= COVERAGE * weights.sum()].iloc[0])


def leave_out(cases: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return the cases with ``inside`` and ``width`` (of the measured step) of intervals from the others of their kind."""
    found = []
    for (kind, name), own in cases.groupby(["kind", by]):
        others = cases[(cases["kind"] == kind) & (cases[by] != name)]
        scale = find_scale(others) if len(others) else math.nan
        low, high = own["low"] * scale, own["high"] * scale
        width = (np.exp(high) - np.exp(low)) / np.exp(own["measured"])
        inside = ((low <= own["measured"]) & (own["measured"] <= high)).astype(float)
        found.append(own.assign(width=width, inside=inside.where(low.notna())))
    return pd.concat(found).assign(error=lambda rows: np.expm1(-rows["measured"]).abs())


def write_calibration(cases: pd.DataFrame) -> None:
    """Write the factor of each kind, from all its cases; kinds without cases keep what stands there."""
    lines = CALIBRATION.read_text(encoding="utf-8").splitlines()
    for place, line in enumerate(lines):
        kind, *rest = line.split("\t")
        own = cases[cases["kind"] == kind]
        if len(own):
            basis = f"{len(own)} steps of {own['group'].nunique()} groups"
            lines[place] = "\t".join([kind, f"{find_scale(own):.3f}", rest[1], basis])
    CALIBRATION.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_tables(cases: pd.DataFrame) -> str:
    """Return the tables of docs/accuracy.md."""
    judged = leave_out(cases, "group").assign(far=leave_out(cases, "set")["inside"])
    heads = (
        "",
        "cases",
        "groups",
        "inside, aim 75 to 90 %",
        "its set left out",
        "mean width",
        "median error",
        "mean error",
    )
    tables = []
    for title, by in (
        ("judged set", ["set"]),
        ("set and kind", ["set", "kind"]),
        ("word of confidence", ["confidence"]),
    ):
        rows = []
        for key, own in judged.groupby(by):
            shares = (
                own["inside"].mean(),
                own["far"].mean(),
                own["width"].mean(),
                own["error"].median(),
                own["error"].mean(),
            )
            cells = [
                write_percent(None if math.isnan(one) else one, 0 if place < 3 else 1)
                for place, one in enumerate(shares)
            ]
            rows.append((", ".join(key), f"{len(own)}", f"{own['group'].nunique()}", *cells))
        if by == ["confidence"]:
            rows.sort(key=lambda row: CONFIDENCES.index(row[0]))
        tables.append(write_markdown((title, *heads[1:]), rows))
    return "\n\n".join(tables)


def read_cases() -> pd.DataFrame:
    """Return the cases of docs/interval_cases.tsv."""
    return pd.read_csv(CASES, sep="\t", comment="#")


def main(data: str = "", results: str = "") -> None:
    """Predict the cases that were asked for anew, fit, and write."""
    cases = read_cases()
    new = [one for lister in (list_rates, list_runs, list_submissions) if data for one in lister(Path(data))]
    new += list_results(Path(results)) if results else ()
    if new:
        kept = cases[~cases["set"].isin({one["set"] for one in new})]
        cases = pd.concat([kept, pd.DataFrame(new)], ignore_index=True).sort_values(["set", "group", "case"])
        with atomic_path(CASES) as temporary:
            cases.to_csv(temporary, sep="\t", index=False)
    write_calibration(cases)
    publish_block(ROOT, "accuracy.md", "calibration", write_tables(cases))


if __name__ == "__main__":
    main(*sys.argv[1:])
