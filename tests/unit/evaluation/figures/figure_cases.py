"""Made-up tables behind the figures: four measured steps, public cases, and predictions."""

from pathlib import Path
from typing import Any

import pandas as pd
from trioflow import tables
from trioflow.base.experiments import Plan
from trioflow.sweeps.description import fill_values
from trioflow.sweeps.scenarios import make_frame
from trioflow_evaluation.tables import EVIDENCE

PLANS = [
    Plan("single", 1, 1, 1, "none", 1, 1, 1),
    Plan("two-replicas", 2, 1, 1, "none", 1, 1, 1),
    Plan("two-shards", 1, 2, 1, "none", 1, 1, 1),
    Plan("two-stages", 1, 1, 2, "gpipe", 4, 1, 1),
    Plan("split", 2, 1, 1, "none", 1, 1, 1, sharding="fsdp"),
]
LIVE = (
    ("one", "single", 4, 1.0, 0.9),
    ("replicas", "two-replicas", 8, 1.0, 1.2),
    ("shards", "two-shards", 4, 2.0, 2.2),
    ("stages", "two-stages", 4, 1.5, 3.0),
    ("sharded", "split", 8, 1.0, 1.0),
)
"""Experiment, plan, batch, measured and predicted step [s]."""


def make_plans() -> list[dict[str, Any]]:
    return [vars(plan) for plan in PLANS]


def make_errors(keep: tuple[str, ...] = ()) -> pd.DataFrame:
    rows = [
        {
            "experiment": name,
            "set": "live",
            "workload": "model",
            "plan": plan,
            "ranks": 2,
            "batch": batch,
            "measured_s": measured_s,
            "measured_low_s": measured_s,
            "measured_high_s": measured_s,
            "rounds": 3,
            "simulated_s": predicted_s,
            "low_s": 0.8 * predicted_s,
            "high_s": 1.3 * predicted_s,
            "relative_error": predicted_s / measured_s - 1,
            "trace_only_s": predicted_s,
            "trace_only_error": 0.0,
            "baseline_s": 1.0,
            "baseline_error": 0.0,
            "compute_s": 0.6 * predicted_s,
            "communication_s": 0.2 * predicted_s,
            "exposed_communication_s": 0.1 * predicted_s,
            "confidence": "interpolated",
            "source": "this machine",
            "simulator_wall_s": 0.01,
            "warnings": "",
        }
        for name, plan, batch, measured_s, predicted_s in LIVE
        if not keep or name in keep
    ]
    return pd.DataFrame(rows, columns=tables.ERRORS.names)


def make_profile(experiments: tuple[str, ...]) -> pd.DataFrame:
    """Return profiles of 10 s: rank 0 computes 6 s, moves data 3 s (1 s hidden), and waits 2 s."""
    tasks = [
        (0, "compute", 0.0, 4.0),
        (0, "compute", 5.0, 7.0),
        (0, "collective", 6.0, 9.0),
        (0, "host", 9.0, 10.0),
        (1, "compute", 0.0, 3.0),
        (1, "collective", 6.0, 9.0),
        (1, "host", 9.0, 10.0),
    ]
    rows = [
        {
            "experiment": name,
            "task_id": at,
            "rank": rank,
            "stream": "compute",
            "kind": kind,
            "name": "task",
            "phase": "",
            "start_s": start_s,
            "end_s": end_s,
            "message_bytes": None,
            "match_id": None,
            "micro_batch": None,
            "stage": None,
        }
        for name in experiments
        for at, (rank, kind, start_s, end_s) in enumerate(tasks)
    ]
    frame = pd.DataFrame(rows, columns=tables.RANK_TIMELINES.names)
    return frame.astype(dict.fromkeys(("message_bytes", "match_id", "micro_batch", "stage"), "Int64"))


def make_sweep() -> pd.DataFrame:
    """Return a step under data parallelism, one under a pipeline, and one that does not fit."""
    common = {"workload": "net", "status": "ok", "reason": "", "confidence": "extrapolated"}
    rows: list[dict[str, Any]] = []
    for number, given in enumerate(
        (
            {"platform": "a40x2-pcie", "device_name": "NVIDIA A40", "data": 2, "ranks": 2},
            {
                "platform": "a100x4-nvlink",
                "device_name": "NVIDIA A100-SXM4-80GB",
                "pipeline": 4,
                "ranks": 4,
                "schedule": "gpipe",
                "micro_batches": 2,
                "data": 1,
            },
        )
    ):
        values = fill_values({"trace": "net-b8", **given})
        rows.append(
            {
                **values,
                **common,
                **given,
                "scenario": number,
                "batch": 16,
                "samples": 8,
                "shard": 0,
                "plan_text": "told",
                "graph": "0",
                "step_time_s": 2.0,
                "low_s": 1.5,
                "high_s": 3.0,
                "samples_per_s": 8.0,
                "busy_s": 1.0,
                "compute_s": 1.2,
                "communication_s": 0.6,
                "exposed_communication_s": 0.4,
                "peak_memory_bytes": 1,
                "memory_bytes": 2,
                "events": 10,
            }
        )
    full = {**rows[0], "scenario": 2, "trace": "large-b8", "status": "out of memory", "reason": "9 GB do not fit 8 GB"}
    for name in ("step_time_s", "low_s", "high_s", "busy_s", "compute_s", "events"):
        full[name] = None
    frame = make_frame([*rows, full])
    counts = ["micro_batches", "stages_per_rank", "first_bucket_bytes"]
    frame[counts] = frame[counts].clip(lower=1)
    return frame


def make_validation(set_name: str, model: str) -> pd.DataFrame:
    same = set_name == "batch-change"
    rows = [
        {
            "set": set_name,
            "model": name,
            "case": "bert train 2 -> 8",
            "group": group,
            "device": "NVIDIA A100 80GB PCIe",
            "source": "recorded at batch 2" if same else "NVIDIA H100 80GB HBM3",
            "quantity": quantity,
            "measured_s": 1.0,
            "predicted_s": predicted_s,
            "low_s": 0.9,
            "high_s": 1.2,
            "oracle_s": None,
            "extrapolated": 0.0,
        }
        for name, group, quantity, predicted_s in (
            (model, "train", "end_to_end", 1.1),
            (model, "train", "operator_sum", 0.98),
            (model, "train forward", "operator_sum", 3.0),
            ("other", "train", "end_to_end", 5.0),
        )
    ]
    frame = pd.DataFrame(rows, columns=tables.VALIDATION.names)
    return frame.astype({"oracle_s": "float64"})


def make_evidence(**changes: Any) -> dict[str, Any]:
    """Return one row of ``EVIDENCE``: a step that was measured here."""
    row: dict[str, Any] = dict.fromkeys(EVIDENCE.names, "")
    row |= {
        "figure": "fig08",
        "evidence": "measured here",
        "panel": "a panel",
        "label": "net",
        "case": "c",
        "workload": "net",
        "family": "DDP",
        "plan": "ddp2",
        "ranks": 2,
        "micro_batches": 0,
        "batch": 8,
        "quantity": "step time",
        "measured_s": 1.0,
        "predicted_s": 1.1,
        "low_s": 0.9,
        "high_s": 1.3,
        "status": "ok",
    }
    return row | changes


def write(frame: pd.DataFrame, name: str, path: Path) -> str:
    tables.write_table(frame, name, path)
    return str(path)


def write_files(folder: Path) -> dict[str, list[str]]:
    """Write every table and return the files by their kind, as the rule names them."""
    from evaluation.published.published_cases import make_case

    experiments = ("replicas", "shards", "stages")
    profile = make_profile(experiments)
    timelines = []
    for name in experiments:
        timeline = profile[profile["experiment"] == name].drop(columns="experiment")
        timelines.append(write(timeline, "timeline", folder / f"timelines/{name}/timeline.parquet"))
    cases = pd.DataFrame(
        [
            make_case("public-ddp", "ddp4", 1.0, 1.02, platform="dgx, NVIDIA A100-SXM4-80GB"),
            make_case("public-tp", "tp4", 2.0, 1.9, platform="dgx, NVIDIA A100-SXM4-80GB"),
            make_case("public-pp", "gpipe4-m1", 3.0, 3.6, platform="dgx, NVIDIA A100-SXM4-80GB"),
            make_case("alone", "single", 1.0, 1.0, workload="alone", platform="one, NVIDIA A40"),
        ],
        columns=tables.PUBLISHED_CASES.names,
    )
    numbers = [f.name for f in tables.PUBLISHED_CASES if f.type == tables.FLOAT]
    cases = cases.astype(dict.fromkeys(numbers, "float64"))
    return {
        "errors": [write(make_errors(), "errors", folder / "error.parquet")],
        "profiles": [write(profile, "rank_timelines", folder / "rank_timelines.parquet")],
        "timelines": timelines,
        "predictions": [write(make_sweep(), "sweep_results", folder / "net.parquet")],
        "validation": [
            write(make_validation(name, model), "validation", folder / f"{name}.parquet")
            for name, model in (("batch-change", "shipped"), ("new-gpu", "ours"))
        ],
        "published": [write(cases, "published_cases", folder / "h100-4gpu.parquet")],
    }
