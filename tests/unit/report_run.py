"""A made-up run on disk, shaped like a real one, for the tests of the report."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from trioflow import tables
from trioflow.base.provenance import write_json
from trioflow.costmodel.fits.collectives import fit_collective_model
from trioflow.report.attribution import ATTRIBUTION, CAUSES, PROFILE

PLANS = [
    {
        "plan": plan,
        "data": data,
        "tensor": tensor,
        "pipeline": pipeline,
        "schedule": schedule,
        "micro_batches": micro,
        "first_bucket_bytes": 1_048_576,
        "bucket_bytes": 26_214_400,
    }
    for plan, data, tensor, pipeline, schedule, micro in (
        ("single", 1, 1, 1, "none", 1),
        ("ddp2", 2, 1, 1, "none", 1),
        ("tp2", 1, 2, 1, "none", 1),
        ("gpipe2-m2", 1, 1, 2, "gpipe", 2),
        ("gpipe2-m4", 1, 1, 2, "gpipe", 4),
    )
]
WORKLOADS = [
    # workload, batch, single-rank step [s], operators, parameters
    ("resnet18", 16, 0.181, 640, 11_689_512),
    ("vgg11", 16, 0.332, 140, 28_144_010),
    ("gpt2-tiny", 8, 0.412, 1450, 5_291_008),
    ("bert-tiny", 8, 0.268, 1180, 5_358_848),
]
FACTORS = {"single": 0.55, "ddp2": 1.28, "tp2": 0.71, "gpipe2-m2": 0.74, "gpipe2-m4": 0.66}
ENVIRONMENT = {
    "system": "Linux",
    "machine": "x86_64",
    "cpu_model": "Example CPU at 2.10GHz",
    "cpu_count": 2,
    "python": "3.11.4",
}


def experiments_of(workloads: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for workload, batch, *_ in workloads:
        for plan in (row["plan"] for row in PLANS):
            if plan == "tp2" and workload not in ("gpt2-tiny", "bert-tiny"):
                continue
            size = batch // 2 if plan == "single" else batch * 2 if plan == "ddp2" else batch
            name = f"{workload}-batch{size}" if plan == "single" else f"{workload}-{plan}"
            rows.append({"experiment": name, "set": "live", "workload": workload, "plan": plan, "batch": size})
    return rows


def timeline_rows(
    step_s: float, ranks: int, plan: str, operators: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(rank, stream, kind, name, phase, start, end, size=None, match=None):
        rows.append(
            {
                "task_id": len(rows),
                "rank": rank,
                "stream": stream,
                "kind": kind,
                "name": name,
                "phase": phase,
                "start_s": start,
                "end_s": end,
                "message_bytes": size,
                "match_id": match,
                "micro_batch": None,
                "stage": None,
            }
        )

    buckets = 6 if plan == "ddp2" else 0
    share = {"dd": 0.72, "tp": 0.8, "gp": 0.62, "si": 0.97}[plan[:2]]
    for rank in range(ranks):
        lengths = rng.lognormal(0, 1.3, operators)
        lengths *= share * step_s / lengths.sum()
        cursor = 0.33 * step_s * (rank if plan.startswith("gpipe") else 0)
        gap = (step_s - cursor) * max(1 - share - cursor / step_s, 0.02) / operators
        for number, length in enumerate(lengths):
            where = number / operators
            phase = "forward" if where < 0.33 else "backward" if where < 0.9 else "optimizer"
            add(rank, "compute", "compute", "aten::addmm", phase, cursor, cursor + length)
            cursor += length
            if plan == "tp2" and number % max(operators // 16, 1) == 0:
                add(
                    rank,
                    "communication",
                    "collective",
                    "all_reduce",
                    phase,
                    cursor,
                    cursor + 0.006 * step_s,
                    2_097_152,
                    number,
                )
                cursor += 0.006 * step_s
            cursor += gap * rng.uniform(0.5, 1.5)
        for bucket in range(buckets):
            start = (0.5 + 0.07 * bucket) * step_s
            add(
                rank,
                "communication",
                "collective",
                "all_reduce",
                "backward",
                start,
                start + 0.06 * step_s,
                26_214_400,
                bucket,
            )
        if plan.startswith("gpipe"):
            kind, stream = ("send", "send") if rank == 0 else ("recv", "receive")
            for micro in range(4):
                start = (0.08 + 0.08 * micro) * step_s
                add(rank, stream, kind, kind, "forward", start, start + 0.012 * step_s, 802_816, micro)
    return rows


def as_table(rows: list[dict[str, Any]], name: str) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=tables.SCHEMAS[name].names)
    for field in tables.SCHEMAS[name]:
        if field.type == tables.INT:
            frame[field.name] = frame[field.name].astype("Int64")
        elif field.type == tables.FLOAT:
            frame[field.name] = frame[field.name].astype("float64")
    return frame


def write_run(
    folder: Path,
    workloads: list[Any] | None = None,
    scale: float = 1.0,
    experiments: list[dict[str, Any]] | None = None,
) -> list[Path]:
    """Write every file that the report reads; ``scale`` shrinks the number of operators."""
    rng = np.random.default_rng(20261121)
    workloads = workloads or WORKLOADS
    experiments = experiments or experiments_of(workloads)
    files: list[Path] = []
    results = folder / "results"
    for workload, batch, step_s, operators, parameters in workloads:
        mine = [row for row in experiments if row["workload"] == workload]
        operators = max(int(operators * scale), 12)
        files += write_measurements(results, workload, batch, step_s, mine, operators, rng)
        files += write_trace(results, workload, batch, step_s, operators, parameters, rng)
        for row in mine:
            files += write_simulation(results, row, step_s, operators, rng)
    files += write_causes(results, experiments)
    return [*files, *write_cost_models(results, rng)]


def write_causes(results, experiments):
    """Write what the errors are made of; the parts are made up and sum to nothing in particular."""
    home = results / "attributed"
    parts, causes = [], []
    for number, row in enumerate(experiments):
        name = row["experiment"]
        sizes = {"compute": -0.03, "communication": 0.01 * number, "host": 0.0, "remainder": 0.02}
        if row["plan"] == "single":
            sizes = {"compute": 0.05}
        parts += [
            {
                "experiment": name,
                "part": part,
                "signed_time": 0.3 * size,
                "error": size,
                "alone_s": 0.3 if part != "remainder" else None,
                "measured_by": PROFILE,
                "profile_factor": None if row["plan"] == "single" else 0.98,
            }
            for part, size in sizes.items()
        ]
        causes += [
            {
                "set": "live",
                "case": name,
                "role": "sensitivity",
                "parameter": "compute time",
                "setting": f"x {factor}",
                "time_s": 0.3 * factor,
            }
            for factor in (0.9, 1.1)
        ]
    tables.write_table(
        pd.DataFrame(parts, columns=ATTRIBUTION.names), "attribution", home / "attribution.parquet", schema=ATTRIBUTION
    )
    tables.write_table(pd.DataFrame(causes), "causes", home / "causes.parquet", schema=CAUSES)
    return [home / "attribution.parquet", home / "causes.parquet"]


def write_measurements(results, workload, batch, step_s, experiments, operators, rng):
    home = results / "measurements" / workload
    rows, profile = [], []

    def add(series, plan, size, ranks, base_s):
        for number in range(12):
            drift = 1 + 0.06 * np.sin(number / 2) + rng.normal(0, 0.02)
            for rank in range(ranks):
                step_ns = round(base_s * drift * (1 + rng.normal(0, 0.004)) * 1e9)
                rows.append(
                    {
                        "workload": workload,
                        "series": series,
                        "plan": plan,
                        "batch": size,
                        "round": number,
                        "rank": rank,
                        "step_ns": step_ns,
                    }
                )

    add("single", "single", batch, 1, step_s)
    add("both_busy", "single", batch, 2, step_s * 1.1)
    for row in experiments:
        ranks = 1 if row["plan"] == "single" else 2
        true_s = step_s * FACTORS[row["plan"]]
        series = "distributed"
        add(series, row["plan"], row["batch"], ranks, true_s)
        if ranks == 1:
            continue  # a session profiles only steps of several ranks
        for event in timeline_rows(true_s * 1.04, ranks, row["plan"], operators, rng):
            profile.append({"experiment": row["experiment"], **event})
    tables.write_table(as_table(rows, "measurements"), "measurements", home / "measurements.parquet")
    tables.write_table(as_table(profile, "rank_timelines"), "rank_timelines", home / "rank_timelines.parquet")
    samples = []
    for collective, factor in (("all_reduce", 1.0), ("all_gather", 0.6), ("send", 0.4)):
        for size in (1024, 16_384, 262_144, 1_048_576, 4_194_304, 26_214_400):
            for number in range(8):
                time_s = factor * (3.2e-4 + size * (0.7e-9 if size < 2e6 else 1.1e-9))
                time_ns = round(time_s * rng.lognormal(0, 0.09) * 1e9)
                samples.append(
                    {
                        "platform": "this-machine",
                        "library": "gloo, torch 2.13.0+cpu",
                        "collective": collective,
                        "ranks": 2,
                        "message_bytes": size,
                        "round": number,
                        "time_ns": time_ns,
                    }
                )
    tables.write_table(
        as_table(samples, "collective_samples"), "collective_samples", home / "collective_samples.parquet"
    )
    write_json(
        home / "session.json",
        {
            "trioflow_version": "0.1.0",
            "torch": "2.13.0+cpu",
            "seed": 0,
            "workload": workload,
            "library": "gloo, torch 2.13.0+cpu",
            "device": "cpu",
            "ranks": 2,
            "rounds": 12,
            "memory_bytes": 8_000_000_000,
            "device_names": ["Example CPU, one core"] * 2,
            "cores": [0, 1],
            "stages": {"2": [0, 1, 1]},
            "anchors": {
                str(batch): {
                    "traced_step_s": step_s,
                    "single": phases(step_s * 1.02),
                    "busy": [phases(step_s * 1.1), phases(step_s * 1.12)],
                }
            },
            "host_costs": {"data_parallel_step_s": 3.1e-4, "overlap": 0.03},
            "host": ENVIRONMENT,
            "warnings": ["could not pin the process to core 1: not permitted"] if workload == "vgg11" else [],
        },
    )
    names = ("measurements", "rank_timelines", "collective_samples")
    return [*(home / f"{name}.parquet" for name in names), home / "session.json"]


def phases(step_s):
    return {"step": step_s, "forward": 0.3 * step_s, "backward": 0.6 * step_s, "optimizer": 0.1 * step_s}


def write_trace(results, workload, batch, step_s, operators, parameters, rng):
    path = results / "operator_tables" / f"{workload}-b{batch}" / "trace.json"
    write_json(
        path,
        {
            "workload": workload,
            "batch": batch,
            "step_time_s": step_s,
            "step_times_s": [step_s * (1 + rng.normal(0, 0.02)) for _ in range(7)],
            "profiled_step_s": step_s * 1.09,
            "profiler_overhead": 0.09,
            "device_name": "Example CPU at 2.10GHz, 1 thread",
            "torch": "2.13.0",
            "parameters": [{"name": "all", "shape": [parameters], "elem_bytes": 4}],
            "flop": parameters * 6 * batch * 40,
            "operators": operators,
            "warnings": [],
        },
    )
    return [path]


def write_simulation(results, row, step_s, operators, rng):
    home = results / "timelines" / row["experiment"]
    ranks = 1 if row["plan"] == "single" else 2
    guess_s = step_s * FACTORS[row["plan"]] * (1 + rng.normal(0.01, 0.06))
    events = timeline_rows(guess_s, ranks, row["plan"], operators, rng)
    timeline = as_table(events, "timeline")
    tables.write_table(timeline, "timeline", home / "timeline.parquet")
    path = timeline[(timeline["rank"] == 0) & (timeline["stream"] == "compute")].assign(
        module="blocks.0", waited_for=None, reason="stream", share=1 / operators
    )
    write_made(home, path, ranks, guess_s)
    exposed_s = 0.0 if ranks == 1 else guess_s * 0.12
    write_json(
        home / "summary.json",
        {
            "step_time_s": guess_s,
            "low_s": guess_s * 0.9,
            "high_s": guess_s * 1.11,
            "trace_only_step_time_s": guess_s * 0.9,
            "baseline_step_time_s": step_s / ranks,
            "compute_s": guess_s * 0.8,
            "communication_s": exposed_s * 1.5,
            "exposed_communication_s": exposed_s,
            "simulator_wall_s": 0.031,
            "confidence": "extrapolated" if row["plan"] == "tp2" else "interpolated",
            "warnings": ["4 of 1180 operators lie outside the fitted range"] if row["plan"] == "tp2" else [],
            "ranks": ranks,
            "compute_scale": 1.08,
            "drawn": {"low_s": guess_s * 0.98, "median_s": guess_s * 1.01, "high_s": guess_s * 1.05},
            "memory_bytes": 8_000_000_000,
            "memory": [
                {
                    "ranks": list(range(ranks)),
                    "peak_bytes": 800_000_000,
                    "when": "backward of h: aten::mm",
                    "categories": {"activation": 600_000_000, "optimizer_state": 200_000_000},
                }
            ],
        },
    )
    made = ("timeline", "critical_path", "breakdown", "links")
    return [*(home / f"{name}.parquet" for name in made), home / "summary.json"]


def write_made(home, path, ranks, step_s):
    """Write what is made of a simulated timeline."""
    path = path.reindex(columns=tables.CRITICAL_PATH.names)
    tables.write_table(path, "critical_path", home / "critical_path.parquet")
    half = {"compute_s": step_s / 2, "forward_s": step_s / 2, "backward_s": 0.0, "optimizer_s": 0.0}
    breakdown = [
        {
            "by": by,
            "name": name,
            "ranks": 1,
            "operators": 3,
            **half,
            "gradient_bytes": 4096,
            **({"output_shapes": [[8, 4]]} if by == "module" else {"idle_s": step_s / 2}),
        }
        for by, name in (
            *(("rank", str(rank)) for rank in range(ranks)),
            ("stage", "0"),
            ("module", "blocks.0"),
            ("module", ""),
        )
    ]
    tables.write_table(as_table(breakdown, "breakdown"), "breakdown", home / "breakdown.parquet")
    links = [
        {
            "link": link,
            "bytes": 1e6 * (ranks - 1),
            "busy_s": 0.1 * step_s,
            "utilisation": 0.05,
            "peak_flows": ranks - 1,
            "peak_utilisation": 0.5,
            "bandwidth_bytes_per_s": 3e9,
        }
        for link in ("rank0->rank1", "rank1->rank0")
    ]
    tables.write_table(as_table(links, "links"), "links", home / "links.parquet")


def write_cost_models(results, rng):
    home = results / "cost_models" / "this-machine"
    classes = [
        ("convolution", "forward", "flop"),
        ("convolution", "backward", "flop"),
        ("matrix product", "forward", "flop"),
        ("matrix product", "backward", "flop"),
        ("normalisation", "forward", "read_bytes"),
        ("element-wise", "forward", "write_bytes"),
        ("element-wise", "backward", "write_bytes"),
        ("pooling", "forward", "read_bytes"),
        ("softmax", "forward", "write_bytes"),
        ("embedding", "backward", "write_bytes"),
        ("optimizer", "optimizer", "read_bytes"),
        ("view", "forward", "read_bytes"),
    ]
    share = np.sort(rng.dirichlet(np.full(len(classes), 0.6)))[::-1]
    rows = [
        {
            "operator_class": name,
            "phase": phase,
            "driver": driver,
            "operators": int(rng.integers(8, 900)),
            "r_squared": float(rng.uniform(0.8, 1)),
            "time_share": float(share[i]),
            "held_out_error": float(rng.normal(0, 0.12)),
            "held_out_absolute_error": float(rng.uniform(0.05, 0.4)),
        }
        for i, (name, phase, driver) in enumerate(classes)
    ]
    rows[-1].update(r_squared=None, held_out_error=None, held_out_absolute_error=None)
    path = home / "operator_fit.parquet"
    tables.write_table(as_table(rows, "operator_fit"), "operator_fit", path)
    samples = [
        tables.read_table(file, "collective_samples")
        for file in sorted((results / "measurements").glob("*/collective_samples.parquet"))
    ]
    fit_collective_model(pd.concat(samples, ignore_index=True)).save(home / "collectives.json")
    return [path, home / "collectives.json"]
