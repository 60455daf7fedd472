"""nanotron's runs: every row is read, and a sample of the peaks is predicted as the page does it.

PEFT's own fine-tuning runs on one L40S: trained parameters, peaks and times of the methods that adapters are.
"""

import itertools
import json
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mirror import find_public
from trioflow import make_plan, predict, tables
from trioflow.hardware.machine import list_devices
from trioflow.hardware.platform import load_platform
from trioflow.parallel.memory.peak import HELD_BESIDE, LIKELY
from trioflow.prediction.question import time_operators
from trioflow_evaluation.clusters.bridge import FOLDER, judge_peaks, read_cases
from trioflow_evaluation.clusters.page import build_clusters_page, choose_plans, predict_steps, score_ways
from trioflow_evaluation.clusters.parts import PARTS
from trioflow_evaluation.clusters.scores import (
    BEFORE,
    FAILED,
    FITTED,
    RAN,
    RAN_OUT,
    find_odds,
    is_fitted_on,
    join_parts,
    list_needs,
    score_steps,
)
from trioflow_evaluation.clusters.steps import (
    DEVICE,
    PLATFORM,
    Run,
    cut_stages,
    find_run_sizes,
    join_network,
    judge_memory,
    judge_steps,
    predict_run,
    read_runs,
    simulate_pieces,
    trace_run,
)
from trioflow_evaluation.tables import CLUSTER_MEMORY, CLUSTER_PEAKS, CLUSTER_STEPS

pytest.importorskip("torch")

LIMITS = {"median": 0.08, "most": 0.3}
"""Errors of the peaks that the sample must keep."""
PEAK_LIMIT = 0.05
"""Largest error of the sampled peaks of Megatron-LM, experts among them: the aim of its median."""
STEP_LIMIT = 0.1
"""Median error of its steps."""


@pytest.fixture(scope="module")
def runs(mirror: Path) -> list[Run]:
    return read_runs(mirror)


@pytest.fixture(scope="module")
def sample(runs: list[Run]) -> list[Run]:
    """The first run of each tensor and pipeline degree up to 4, and some that failed."""
    small = [r for r in runs if r.parameters == 1.34 and r.tensor <= 4 and r.pipeline <= 4]
    chosen = {(r.tensor, r.pipeline): r for r in reversed(small) if r.ran and r.nodes <= 2}
    return [*chosen.values(), *[r for r in small if r.status == RAN_OUT][:2]]


@pytest.fixture(scope="module")
def cases(sample: list[Run]):
    return judge_memory(sample)


def test_every_run_is_read_and_names_its_ranks(runs: list[Run]) -> None:
    assert Counter(run.status for run in runs) == {"Success": 1765, "OOM": 1917, "Other": 422}
    assert Counter(run.set for run in runs if run.ran)[BEFORE] == 478
    assert all(run.data * run.tensor * run.pipeline == 8 * run.nodes for run in runs if run.ran)
    assert all(
        find_run_sizes(run).parameters == pytest.approx(run.parameters * 1e9, rel=0.01)
        for run in {(r.hidden, r.key_values, r.vocabulary): r for r in runs}.values()
    )


def test_a_run_that_failed_otherwise_is_not_judged_by_its_memory(runs: list[Run]) -> None:
    """Eight ask for 256 ranks to share 128 attention heads, which no model takes."""
    refused = [run for run in runs if run.tensor == 256]
    assert [run.status for run in refused] == ["Other"] * 8
    assert list(judge_memory(refused).columns) == CLUSTER_MEMORY.names and judge_memory(refused).empty


def test_every_run_is_in_one_part(runs: list[Run]) -> None:
    parts = [[run for run in runs if run.part == part] for part in PARTS]
    assert sorted(map(id, itertools.chain(*parts))) == sorted(map(id, runs))
    assert all(len({(run.parameters, run.tensor) for run in part}) <= 1 for part in parts)


def test_parts_are_joined_with_the_empty_ones(steps, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.parquet" for name in ("one", "none", "other", "all")]
    for path, rows in zip(paths, (steps[:1], judge_steps([]), steps[1:]), strict=False):
        tables.write_table(rows, "cluster_steps", path, {}, CLUSTER_STEPS)
    join_parts(paths[:3], "cluster_steps", paths[3])
    joined = tables.read_table(paths[3], "cluster_steps", CLUSTER_STEPS)
    assert joined["predicted_s"].tolist() == steps["predicted_s"].tolist()


def test_the_host_s_time_of_p5_is_that_of_the_runs_that_wait_for_it(runs: list[Run]) -> None:
    """Fitted where fitting is allowed: 1.34 B on 1 and 2 nodes, one sample over 4 and 8 GPUs."""
    bound = [
        run
        for run in runs
        if run.ran
        and run.parameters == 1.34
        and run.nodes <= 2
        and run.tensor in (4, 8)
        and run.pipeline == run.micro_batch == 1
    ]
    assert len(bound) == 7
    piece_s = np.median([run.measured_step_s / run.accumulate for run in bound])
    operators = trace_run(bound[0]).operators
    works = (operators[["flop", "read_bytes", "write_bytes"]] > 0).any(axis=1)
    launches = int((works & operators["phase"].isin(["forward", "backward"])).sum())
    shipped = load_platform("p5-h100", 8).host["launch_nanotron_s"]
    assert shipped == pytest.approx(piece_s / launches, rel=2e-3)


def test_stages_are_nanotron_s(runs: list[Run]) -> None:
    """A stage ends with the block that reaches its share: 5 layers of 16 on the first of 4, a quarter exactly."""
    run = next(r for r in runs if r.parameters == 1.34)
    trace = trace_run(run)
    layers = [len(stage) for stage in cut_stages(trace, run._replace(pipeline=4))]
    assert layers == [1 + 5, 5, 5, 1 + 1]
    assert sum(map(len, cut_stages(trace, run._replace(pipeline=16)))) == 18


def test_sampled_peaks_keep_their_limits(cases) -> None:
    ran = cases[cases["set"] != FAILED]
    assert set(ran["set"]) <= {RAN, FITTED} and len(ran) >= 8
    error = np.abs(ran["reserved_bytes"] / ran["measured_bytes"] - 1)
    assert error.median() < LIMITS["median"] and error.max() < LIMITS["most"]
    assert (ran["allocated_bytes"] < ran["reserved_bytes"]).all()
    assert (find_odds(list_needs(ran)) >= LIKELY).mean() >= 0.95


@pytest.fixture(scope="module")
def peaks(mirror):
    """Megatron-LM's tests: one stage, stages, several a rank, each with another attention or sharding."""
    chosen = (
        "gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files",
        "gpt/gpt3_mcore_te_tp2_pp2",
        "gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline",
        "gpt/gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist",
        "moe/gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4",
        "bert/bert_mcore_tp2_pp2",
    )
    files = [file for name in chosen for file in (mirror / FOLDER / name).glob("*.json")]
    return judge_peaks(read_cases(files))


def test_peaks_of_megatron_s_tests_keep_their_limit(peaks) -> None:
    assert len(peaks) == 11
    predicted = peaks[peaks["refused"] == ""]
    assert set(peaks.loc[peaks["refused"] != "", "suite"]) == {"bert"}
    error = predicted["predicted_bytes"].astype(float) / predicted["measured_bytes"] - 1
    assert error.abs().max() < PEAK_LIMIT


def test_the_page_tells_errors_and_why_runs_failed(cases, steps, peaks, tmp_path: Path) -> None:
    names = ("m.parquet", "s.parquet", "p.parquet", "clusters.html")
    memory, timed, tests, page = (tmp_path / name for name in names)
    tables.write_table(peaks, "cluster_peaks", tests, {}, CLUSTER_PEAKS)
    tables.write_table(cases, "cluster_memory", memory, {}, CLUSTER_MEMORY)
    judged = steps.assign(set=[FITTED, *[RAN] * (len(steps) - 1)])  # all of them may be fitted on
    tables.write_table(judged, "cluster_steps", timed, {}, CLUSTER_STEPS)
    build_clusters_page(memory, timed, tests, page)
    text = page.read_text()
    assert "Odds of survival" in text and "What odds come to" in text
    assert "Errors of the steps" in text and "smallest tensor" in text
    first = text.partition("Odds of survival")[2].partition("<tbody>")[2].partition("</tr>")[0]
    assert "all" in first and "nanotron" not in first, "no model has 0 parameters"


@pytest.mark.slow
def test_what_the_allocator_holds_beside_is_what_meets_the_runs_that_may_be_fitted_on_best(runs: list[Run]) -> None:
    """Each share by itself: a tenth more or less takes less than 1 % off the mean error over the 90 runs."""
    given = [run for run in runs if run.set == FITTED and is_fitted_on(run.parameters, run.nodes)]
    cases = judge_memory(given)
    assert len(cases) == 90

    def miss(**changed: float) -> float:
        shares = {**HELD_BESIDE, **changed}
        held = cases["allocated_bytes"] + sum(cases[name] * part for name, part in shares.items())
        return float(np.abs(held / cases["measured_bytes"] - 1).mean())

    assert miss() == pytest.approx(np.abs(cases["reserved_bytes"] / cases["measured_bytes"] - 1).mean())
    for name, share in HELD_BESIDE.items():
        assert miss() <= 1.01 * min(miss(**{name: share * factor}) for factor in (0.9, 1.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "tensor"), [("exchange_per_rank_s", (2, 4, 8)), ("exchange_per_rank_beyond_node_s", (16,))]
)
def test_what_an_exchange_keeps_the_host_follows_from_the_runs_that_may_be_fitted_on(
    runs: list[Run], key: str, tensor: tuple[int, ...]
) -> None:
    """Slow hosts' runs of 1.34 B whose host decides: pipelines inside a node, groups of 16 on two; the median of what each needs."""
    bound = [
        run
        for run in runs
        if run.set == FITTED
        and run.network == "slow"
        and run.tensor in tensor
        and (run.pipeline > 1 and run.micro_batch == 1 if run.tensor <= 8 else run.micro_batch <= 32)
    ]
    assert len(bound) == 5
    times, platform = (time_operators(trace_run(bound[0]), DEVICE), load_platform("p5-h100-slow", 8 * bound[0].nodes))
    shipped = platform.host[key]
    bare = replace(platform, host={**platform.host, key: 0.0})
    needed = []
    for run in bound:
        own = [join_network(run, machine) for machine in (platform, bare)]
        with_s, without_s = (predict_run(run, times, machine)[0] for machine in own)
        needed.append(shipped * (run.measured_step_s - without_s) / (with_s - without_s))
    assert np.median(needed) == pytest.approx(shipped, rel=0.02)


@pytest.fixture(scope="module")
def steps(runs: list[Run]):
    """Runs of the smallest model on 1 and 2 nodes: one stage, or stages of one GPU."""
    chosen = {
        (r.tensor, r.pipeline): r
        for r in runs
        if r.ran
        and r.parameters == 1.34
        and r.nodes <= 2
        and r.accumulate > 6
        and (r.tensor == 1 or r.pipeline == 1)
        and r.tensor * r.pipeline <= 4
    }
    return judge_steps(chosen.values())


def test_sampled_steps_keep_their_limits(steps) -> None:
    assert len(steps) >= 4 and (steps["refused"] == "").all()
    scores = score_steps(steps).set_index("group")
    assert scores.loc["all runs", "median_error"] < STEP_LIMIT
    assert (steps["low_s"] < steps["predicted_s"]).all()
    assert (steps["predicted_s"] < steps["high_s"]).all()
    cells = choose_plans(steps, predict_steps(steps))
    assert (cells["trioflow"] >= 0).all() and (cells["runs"] > 1).all()


def test_micro_batches_beyond_a_full_pipeline_add_equal_times(runs: list[Run]) -> None:
    """What is not simulated is extrapolated: beside the whole step it is off by rounding."""
    run = next(r for r in runs if r.ran and r.parameters == 1.34 and r.nodes == 1 and r.tensor == 2 and r.pipeline == 2)
    run = run._replace(accumulate=10, measured_step_s=1.0)
    platform = load_platform(PLATFORM, 8)
    times = time_operators(trace_run(run), platform.device.name)
    stages = cut_stages(times.traces[0], run)
    whole = simulate_pieces(run, times, platform, stages, run.accumulate)
    assert predict_run(run, times, platform) == pytest.approx(whole, rel=1e-3)


def test_scores_count_refused_plans_as_missed() -> None:
    rows = [
        {
            "set": RAN,
            "parameters": 1.34,
            "nodes": 1,
            "tensor": t,
            "pipeline": 1,
            "micro_batch": 1,
            "measured_s": m,
            "mfu": 0.3,
            "predicted_s": p,
            "network": "one node",
            "low_s": p * 0.9,
            "high_s": p * 1.1,
        }
        for t, m, p in ((1, 1.0, 1.04), (2, 2.0, 0.9), (4, 3.0, float("nan")))
    ]
    cases = pd.DataFrame(rows)
    found = score_steps(cases).iloc[0]
    assert found["cases"] == 3 and found["within_10"] == found["covered"] == pytest.approx(1 / 3)
    assert found["within_50"] == pytest.approx(1 / 3) and found["in_order"] == 0.0


def make_cases(runs: list[Run]) -> pd.DataFrame:
    """All runs, with predictions of 0.4 MFU and 0.1 s that nothing was simulated for."""
    ran = [run for run in runs if run.ran]
    rows = [
        {
            **r._asdict(),
            "set": r.set,
            "network": r.network,
            "parameters": r.parameters,
            "predicted_s": r.measured_step_s * r.mfu / 0.4 + 0.1,
            "measured_s": r.measured_step_s,
        }
        for r in ran
    ]
    return pd.DataFrame(rows).assign(low_s=0.0, high_s=0.0)


def test_ways_that_simulate_nothing_are_beside_the_prediction(runs: list[Run]) -> None:
    cases = make_cases(runs)
    steps = predict_steps(cases)
    assert all(len(step_s) == 1765 for step_s in steps.values())
    fitted = cases[cases["set"] == FITTED]
    middle = np.median(steps["constant MFU"][fitted.index] / fitted["measured_s"])
    assert middle == pytest.approx(1.0, rel=1e-6)
    scores = score_ways(cases, steps).set_index("group")
    assert scores.loc["boosted trees", "median_error"] < scores.loc["constant MFU", "median_error"]
    assert predict_steps(cases)["boosted trees"].tolist() == steps["boosted trees"].tolist()
    cells = choose_plans(cases, steps)
    assert len(cells) == 58 and (cells["runs"] > 1).all()
    assert (cells["chosen_tokens_per_s"] <= cells["best_tokens_per_s"]).all()
    loss = 1 - cells["chosen_tokens_per_s"] / cells["best_tokens_per_s"]
    assert loss.tolist() == pytest.approx(cells["trioflow"].tolist())


def test_plans_without_any_prediction_lose_all() -> None:
    cases = pd.DataFrame(
        {
            "parameters": 1.34,
            "nodes": 1,
            "tensor": [1, 2],
            "pipeline": 1,
            "data": [8, 4],
            "zero": 0,
            "micro_batch": 1,
            "accumulate": 4,
            "network": "one node",
            "measured_s": [1.0, 2.0],
        }
    )
    cell = choose_plans(cases, {"trioflow": np.array([np.nan, 0.9])}).iloc[0]
    assert (cell["trioflow"], cell["rule"], cell["constant MFU"]) == (0.5, 0.0, 0.25)
    assert cell["best"] == "1 x 1 x 8, micro-batch 1, ZeRO 0"
    cell = choose_plans(cases, {"trioflow": np.array([np.nan, np.nan])}).iloc[0]
    assert cell["trioflow"] == 1.0 and cell["chosen"] == "all refused"


pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

MLP = {"lora": 10, "lora_targets": "gate,up,down"}
RUNS = {
    "full-finetuning--llama-3.2-3B-lr_0.00001": {},
    "ln_tuning--llama-3.2-3B-default": {"freeze": "*.embed_tokens,*_proj"},
    "lora--llama-3.2-3B-rank10-target-mlp": MLP,
    "lora--llama-3.2-3B-rank32": {"lora": 32},
    "lora--llama-3.2-3B-rank32-lorafa": {"lora": 32, "freeze": "*.lora_A"},
    "lora--llama-3.2-3B-rank32-mica": {"lora": 32, "freeze": "*.lora_B"},
    "lora--llama-3.2-3B-rank64": {"lora": 64},
    "lora--llama-3.2-3B-rank64-rslora": {"lora": 64},
}
"""Runs whose network is one of ours, and what it is called here. The embedding is the head too."""
LONGEST, MEAN = 768, 210


@pytest.mark.slow
def test_peft_s_runs_take_the_memory_and_time_predicted(tmp_path):
    files = find_public(["peft/runs"], least=len(RUNS))
    sheet = "l40s" if "l40s" in list_devices() else "l4"  # peaks are the same on any
    rate = "{{value: {}, source: one GPU sends nothing}}".format
    links = f"builder: switch, bandwidth_bytes_per_s: {rate('25.0e9')}, latency_s: {rate('5.0e-6')}"
    platform = tmp_path / "box.yaml"
    platform.write_text(
        f"name: box\ndevice: {{sheet: {sheet}}}\nranks: 1\ntopology: {{{links}}}\n"
        "communication_on_compute_stream: false\n"
    )
    peaks, times = [], []
    for file in files:
        run, words = json.loads(file.read_text())["train_info"], RUNS[file.stem]
        asked = {"batch": 4, "precision": "pure-bf16", "interval": False, **words}
        longest, mean = (
            predict("llama-3.2-3b", make_plan(), platform, sequence=n, **asked).to_dict() for n in (LONGEST, MEAN)
        )
        if words:
            assert longest["trained_parameters"] == run["num_trainable_params"]
        step_s = statistics.median(m["train time"] for m in run["metrics"] if "train time" in m) / 250
        assert longest["fit_probability"] > 0.9, "it ran on that card"
        peaks.append(abs(longest["memory"][0]["reserved_bytes"] / run["accelerator_memory_max"] - 1))
        times.append(abs(mean["step_time_s"] / step_s - 1))
    assert statistics.median(peaks) < 0.08 and max(peaks) < 0.12
    if sheet == "l40s":
        assert statistics.median(times) < 0.2
