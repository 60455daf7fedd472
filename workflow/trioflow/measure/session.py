"""A session on this machine: real single-rank, collective and distributed steps, interleaved."""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.errors import MeasurementError
from trioflow.base.experiments import UNIT_SHARDINGS
from trioflow.base.provenance import atomic_path, host_environment, read_json, stamp, write_json
from trioflow.base.units import ns_to_s
from trioflow.trace.capture.workload import exclusive_measurement

TIMEOUT_S = 3600.0
_SMALL_BYTES = (1_000, 16_000, 64_000, 256_000, 1_000_000, 4_000_000)
LARGE_BYTES = (16_000_000, 64_000_000, 256_000_000, 512_000_000)
"""Sizes of the sweep; a session stops at the first one above its model's gradients."""


def sweep_sizes(parameter_bytes: int, sharded: bool = False) -> dict[str, list[int]]:
    """Return the message sizes to sweep for a model of some size [bytes].

    All-reduce carries gradients and goes up to them, and so do all-gather and reduce-scatter where
    a plan shards parameters; the others carry activations and buffers, and stop earlier.
    """
    larger = [s for s in LARGE_BYTES if s >= parameter_bytes][:1]
    large = [s for s in LARGE_BYTES if s < parameter_bytes] + larger
    return {
        "all_reduce": [*_SMALL_BYTES, *large],
        "all_gather": [*_SMALL_BYTES[1::2], *(large if sharded else LARGE_BYTES[:1])],
        **({"reduce_scatter": [*_SMALL_BYTES[1::2], *large]} if sharded else {}),
        "broadcast": [*_SMALL_BYTES[0::2]],
        "send": [*_SMALL_BYTES, LARGE_BYTES[0]],
    }


def calibrate_workload(
    row: Mapping[str, Any],
    experiments: Sequence[Mapping[str, Any]],
    plans: Iterable[Mapping[str, Any]],
    partition: str | Path,
    folder: str | Path,
    record: str | Path,
    *,
    device: str = "auto",
    warm_up: int = 2,
    rounds: int = 15,
    seed: int = 0,
) -> None:
    """Run a workload's session on this machine, and keep apart what predictions may know of it.

    Every round of one group of processes runs each traced step on rank 0 alone and on all ranks at once without
    communication, every experiment, a sweep of collectives, and host costs on tiny models; then some profiled rounds.
    ``folder`` gets what a prediction may know, ``session.json`` (single-rank steps, host costs) and
    ``collective_samples.parquet``; ``record`` what `records.measure_plans` makes the truth of, ``steps.json`` and
    ``events.parquet``.

    ``partition``: JSON of ``parallel.splits.pipeline.partition_trace``; ``device``: ``cpu`` (gloo),
    ``cuda`` (NCCL) or ``auto``; ``warm_up``: rounds not kept. Raises MeasurementError when a rank
    fails, there are too few GPUs, or another measurement runs.
    """
    import torch

    from trioflow.trace.capture.workload import choose_device

    device = choose_device(device)
    by_name = {str(plan["plan"]): dict(plan) for plan in plans}
    ranks = _check_plans(experiments, by_name)
    if device == "cuda" and (count := torch.cuda.device_count()) < ranks:
        raise MeasurementError(
            f"the experiments need {ranks} GPUs and {count} are present; "
            "remove the larger plans from experiments.tsv or set device: cpu"
        )
    facts = read_json(partition)
    sharded = any(p.get("sharding", "none") in UNIT_SHARDINGS for p in by_name.values())
    job: dict[str, Any] = {
        "workload": dict(row),
        "experiments": [dict(e) for e in experiments],
        "plans": by_name,
        "device": device,
        "warm_up": warm_up,
        "rounds": rounds,
        "seed": seed,
        "ranks": ranks,
        "sharded": sharded,
        "stages": facts["stages"],
        "traced_batches": [int(b) for b in facts["traced_steps_s"]],
        "collectives": sweep_sizes(facts["parameter_bytes"], sharded) if ranks > 1 else {},
    }
    with exclusive_measurement("calibrate"), tempfile.TemporaryDirectory() as temporary:
        job["folder"] = temporary
        write_json(Path(temporary) / "job.json", job)
        _run_ranks(ranks, Path(temporary))
        results = [read_json(Path(temporary) / f"result-{r}.json") for r in range(ranks)]
        events = [pd.read_parquet(file) for file in sorted(Path(temporary).glob("events-*.parquet"))]
    _save(job, results, facts, Path(folder))
    steps = [{**step, "workload": str(row["workload"])} for result in results for step in result["steps"]]
    marks = [mark for result in results for mark in result["marks"]]
    write_json(Path(record) / "steps.json", {"steps": steps, "marks": marks})
    columns = [*tables.RANK_TIMELINES.names, "round"]
    measured = pd.concat(events) if events else pd.DataFrame(columns=columns)
    with atomic_path(Path(record) / "events.parquet") as path:
        measured.to_parquet(path)


def _check_plans(experiments: Sequence[Mapping[str, Any]], plans: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the session's number of ranks; refuse plans that it cannot measure."""
    sizes: dict[int, str] = {}
    for experiment in experiments:
        plan = plans[str(experiment["plan"])]
        degrees = [k for k in ("data", "tensor", "pipeline") if int(plan[k]) > 1]
        if len(degrees) > 1:
            raise MeasurementError(f"{experiment['experiment']}: {' x '.join(degrees)} together is not measured yet")
        sizes.setdefault(
            (int(plan["data"]) * int(plan["tensor"]) * int(plan["pipeline"])), str(experiment["experiment"])
        )
    several = {count: name for count, name in sizes.items() if count > 1}
    if len(several) > 1:
        named = ", ".join(f"{name} on {count}" for count, name in sorted(several.items()))
        raise MeasurementError(
            f"the experiments of one workload need the same number of ranks, not {named}; "
            "give them workloads of their own"
        )
    return max(sizes, default=1)


def _run_ranks(ranks: int, folder: Path) -> None:
    """Start one process a rank, wait for all, stop the others when one fails."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault("KINETO_LOG_LEVEL", "99")
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "trioflow.measure.worker", str(folder / "job.json"), str(rank)], env=environment
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + TIMEOUT_S
    try:
        codes: list[int | None] = [None]
        while None in codes:
            time.sleep(0.2)
            codes = [process.poll() for process in processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed or time.monotonic() > deadline:
                what = f"rank {failed[0]} failed" if failed else f"no end after {TIMEOUT_S:.0f} s"
                raise MeasurementError(f"{what}; its own message stands above")
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()


def _save(job: dict[str, Any], results: list[dict[str, Any]], facts: dict[str, Any], folder: Path) -> None:
    """Write the samples of collectives and the session's facts."""
    import torch

    name = str(job["workload"]["workload"])
    backend = "nccl" if job["device"] == "cuda" else "gloo"
    library = f"{backend}, torch {torch.__version__}"
    tables.write_table(
        _reduce_samples(results, job["ranks"], library), "collective_samples", folder / "collective_samples.parquet"
    )
    write_json(
        folder / "session.json",
        {
            **stamp(torch=str(torch.__version__), seed=job["seed"]),
            "workload": name,
            "library": library,
            "device": job["device"],
            "device_names": [r["device_name"] for r in results],
            "memory_bytes": min(r["memory_bytes"] for r in results),
            "ranks": job["ranks"],
            "rounds": job["rounds"],
            "mark_s": max(r["mark_s"] for r in results),
            "cores": [r["core"] for r in results],
            "stages": job["stages"],
            "anchors": {
                batch: _anchors(results, int(batch), float(traced)) for batch, traced in facts["traced_steps_s"].items()
            },
            "host_costs": pd.DataFrame([s for r in results for s in r["host"]]).median().clip(lower=0.0).to_dict(),
            "host": host_environment(),
            "warnings": sorted({w for r in results for w in r["warnings"]}),
        },
    )


def _anchors(results: list[dict[str, Any]], batch: int, traced_s: float) -> dict[str, Any]:
    """Return the session's single-rank steps of a traced batch: medians [s], whole and by phase.

    ``single`` with one rank busy, ``busy`` of each rank with all at once.
    """

    def medians(result: dict[str, Any], series: str) -> dict[str, float]:
        own = [s for s in result["steps"] if s["series"] == series and s["batch"] == batch]
        phases = {phase: statistics.median(ns_to_s(s["phases_ns"][phase]) for s in own) for phase in tables.PHASES}
        return {"step": statistics.median(ns_to_s(s["step_ns"]) for s in own), **phases}

    return {
        "traced_step_s": traced_s,
        "single": medians(results[0], "single"),
        "busy": [medians(r, "both_busy") for r in results] if len(results) > 1 else [],
    }


def _reduce_samples(results: list[dict[str, Any]], ranks: int, library: str) -> pd.DataFrame:
    """Return one time for each collective sample: the shortest over ranks (the last does not wait), a message's longest."""
    columns = ["collective", "message_bytes", "round"]
    samples = pd.DataFrame([s for r in results for s in r["collectives"]], columns=[*columns, "time_ns"])
    grouped = samples.groupby(columns, as_index=False, sort=True)["time_ns"]
    frame, longest = grouped.min(), grouped.max()
    sends = frame["collective"] == "send"
    frame.loc[sends, "time_ns"] = longest.loc[sends, "time_ns"]
    frame["platform"], frame["library"] = "this-machine", library
    frame["ranks"] = np.where(sends, 2, ranks)
    for column in ("message_bytes", "round", "time_ns", "ranks"):
        frame[column] = frame[column].astype("int64")
    ordered: pd.DataFrame = frame[tables.COLLECTIVE_SAMPLES.names]
    return ordered
