"""``trioflow simulate`` and ``trioflow collective``: a prediction, and what it rests on."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.cli.choices import choose_collectives, choose_graph, choose_platform
from trioflow.cli.text import format_facts, format_table
from trioflow.costmodel.platform_collectives import PlatformCollectives
from trioflow.engine.simulate import CONFIDENCES, DEFAULT_NETWORK, simulate, simulate_interval
from trioflow.errors import InputError
from trioflow.hardware.platform import describe_unmeasured
from trioflow.network.collectives import compute_wire_bytes
from trioflow.parallel.task_graph import TaskGraphBuilder
from trioflow.report.breakdown import WAYS, build_breakdown
from trioflow.report.perfetto import write_perfetto
from trioflow.units import format_bytes, format_time


@dataclass(frozen=True)
class Answer:
    """What ``trioflow simulate`` says: the figures by name, the timeline, the breakdown asked for."""

    told: dict[str, Any]
    timeline: pd.DataFrame
    breakdown: pd.DataFrame | None


def predict(options: argparse.Namespace) -> Answer:
    """Return the answer of ``trioflow simulate``."""
    graph, platform, times = choose_graph(options)
    trace, batch = times.traces[0], int(graph.metadata["batch"])
    collectives = choose_collectives(options, platform)
    warnings = list(times.warnings)
    if graph.tasks["kind"].isin(("collective", "send")).any() and collectives is None:
        warnings.append(
            f"no measured collectives for {platform.name}: ring closed form over its data-sheet links"
        )
        warnings += [told for told in [describe_unmeasured(platform)] if told]
    network = getattr(options, "network", DEFAULT_NETWORK)
    result = simulate_interval(graph, platform, collectives, network=network)
    peak, room = int(graph.metadata["peak_memory_bytes"]), platform.device.memory_bytes
    if peak > room:
        warnings.insert(0, "out of memory: the step does not fit a rank's device")
    summary = result.summary
    confidences = [graph.metadata["compute_confidence"], summary["confidence"], times.confidence]
    keys = ("step_time_s", "low_s", "high_s", "busy_s", "compute_s", "communication_s",
            "exposed_communication_s", "ranks", "events", "simulator_wall_s")  # fmt: skip
    told = {
        **{key: summary[key] for key in keys},
        "workload": trace.facts["workload"],
        "batch": batch,
        "plan": graph.metadata["plan"]["plan"],
        "plan_text": graph.metadata["plan_text"],
        "platform": platform.name,
        "network": network,
        "cost_model": times.model_text,
        "confidence": max(confidences, key=CONFIDENCES.index),
        "peak_memory_bytes": peak,
        "memory_bytes": room,
        "fits_memory": peak <= room,
        "samples_per_s": batch / summary["step_time_s"],
        "folded": False,
        "warnings": list(dict.fromkeys([*warnings, *summary["warnings"]])),
    }
    by = getattr(options, "by", None)
    breakdown = None
    if by:
        breakdown = build_breakdown(graph, result.timeline, trace, by, options.depth)
    return Answer(told, result.timeline, breakdown)


def run_simulate(options: argparse.Namespace) -> None:
    """Predict a step and print it."""
    writer = choose_writer(options.timeline)
    check_breakdown(options)
    answer = predict(options)
    told, breakdown = answer.told, answer.breakdown
    if writer:
        writer(answer.timeline)
    if options.breakdown and breakdown is not None:
        tables.write_table(breakdown, "breakdown", options.breakdown)
    if options.json:
        rows = {} if breakdown is None else {"breakdown": tables.records(breakdown)}
        print(json.dumps(told | rows, sort_keys=True))
        return
    memory = (
        f"{format_bytes(told['peak_memory_bytes'])} of {format_bytes(told['memory_bytes'])} a rank"
    )
    verdict = "fits" if told["fits_memory"] else "OUT OF MEMORY"
    interval = f"80 % interval {format_time(told['low_s'])} to {format_time(told['high_s'])}"
    print(f"{told['workload']} on {told['platform']}: {told['plan_text']}")
    print(
        format_facts([
            ("cost model", told["cost_model"]),
            ("peak memory", f"{memory}: {verdict}"),
            ("step time", f"{format_time(told['step_time_s'])}  ({interval}; {told['confidence']})"),
            ("throughput", f"{told['samples_per_s']:.3g} samples/s"),
            ("compute", f"{format_time(told['compute_s'])} on the busiest rank"),
            ("communication", f"{format_time(told['communication_s'])}, "
             f"of which {format_time(told['exposed_communication_s'])} exposed"),
            ("simulated", f"{told['events']} events in {format_time(told['simulator_wall_s'])}"),
            ("timeline", options.timeline or ""),
            ("breakdown", options.breakdown or ""),
        ])
    )  # fmt: skip
    if breakdown is not None:
        print(f"\n{format_breakdown(breakdown, told['step_time_s'])}")
    for warning in told["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)


def check_breakdown(options: argparse.Namespace) -> None:
    """Refuse what makes no breakdown, before anything is computed.

    Raises
    ------
    InputError
        When a file is asked for without ``--by``, does not end in
        ``.parquet``, or has no folder.
    """
    path = options.breakdown
    if options.depth < 1:
        raise InputError(f"--depth {options.depth} is not positive")
    if not path:
        return
    if not options.by:
        raise InputError(f"--breakdown {path} without --by", fix=f"say --by {'|'.join(WAYS)}")
    if not path.endswith(".parquet"):
        raise InputError(f"--breakdown {path}: unknown ending", fix="use .parquet")
    if not Path(path).parent.is_dir():
        raise InputError(f"--breakdown {path}: no folder {Path(path).parent}", fix="make it first")


def format_breakdown(breakdown: pd.DataFrame, step_time_s: float) -> str:
    """Return a breakdown as text, times with their share of the step."""

    def share(time_s: float | None) -> str:
        if time_s is None or pd.isna(time_s):
            return "-"
        return f"{format_time(time_s)} {time_s / step_time_s:6.1%}" if step_time_s else "-"

    def size(value: int | None) -> str:
        return "-" if value is None or pd.isna(value) or not value else format_bytes(value)

    rows = [
        (
            row["name"] or "(outside)", str(row["ranks"]), share(row["compute_s"]),
            share(row["communication_s"]), share(row["exposed_communication_s"]), share(row["idle_s"]),
            size(row["message_bytes"]), size(row["gradient_bytes"]),
            " ".join("x".join(map(str, shape)) for shape in row["output_shapes"] or []) or "-",
        )
        for row in tables.records(breakdown)
    ]  # fmt: skip
    head = [
        "ranks",
        "compute",
        "communication",
        "exposed",
        "idle",
        "messages",
        "gradients",
        "output",
    ]
    columns = [breakdown["by"].iloc[0] if len(breakdown) else "name", *head]
    kept = [0, *(i for i in range(1, len(columns)) if any(row[i] != "-" for row in rows))]
    return format_table(
        tuple(columns[i] for i in kept), [tuple(row[i] for i in kept) for row in rows], left=1
    )


def choose_writer(path: str | None) -> Any:
    """Return a function that writes a timeline to a path, or None without a path.

    Raises
    ------
    InputError
        When the ending is unknown, before anything is computed.
    """
    if path is None:
        return None
    if not Path(path).parent.is_dir():
        raise InputError(f"--timeline {path}: no folder {Path(path).parent}", fix="make it first")
    if path.endswith(".parquet"):
        return lambda timeline: tables.write_table(timeline, "timeline", path)
    if path.endswith((".json", ".json.gz")):
        return lambda timeline: write_perfetto(timeline, Path(path))
    raise InputError(
        f"--timeline {path}: unknown ending", fix="use .parquet, or .json or .json.gz for Perfetto"
    )


def run_collective(options: argparse.Namespace) -> None:
    """Predict one collective and print it."""
    size = round(options.bytes) if isfinite(options.bytes) else 0
    if size < 1 or options.ranks < 2:
        raise InputError("a collective needs --bytes of 1 or more and --ranks of 2 or more")
    platform = choose_platform(options.platform, options.ranks)
    cost = None if options.algorithm == "ring" else choose_collectives(options, platform)
    if options.algorithm not in (None, "ring") and cost is None:
        raise InputError(
            f"{platform.name} has no measured collectives",
            fix="give --collectives or use --algorithm ring",
        )
    builder = TaskGraphBuilder()
    group, match = ",".join(map(str, range(options.ranks))), builder.new_match()
    for rank in range(options.ranks):
        builder.add(
            rank, "communication", "collective", options.collective,
            message_bytes=size, group=group, match_id=match,
        )  # fmt: skip
    summary = simulate(builder.build(), platform, cost).summary
    time_s = summary["step_time_s"]
    low_s, high_s = None, None
    algorithm = "ring"
    if cost is not None:
        answer = cost.time_s(options.collective, options.ranks, size)
        low_s, high_s = answer.low_s, answer.high_s
        algorithm = "measured curve"
        if isinstance(cost, PlatformCollectives):
            algorithm = f"{cost.method}, {cost.library} on {cost.platform}"
    wire = compute_wire_bytes(options.collective, size, options.ranks)
    told = {
        "collective": options.collective,
        "message_bytes": size,
        "ranks": options.ranks,
        "platform": platform.name,
        "time_s": time_s,
        "low_s": low_s,
        "high_s": high_s,
        "algorithm": algorithm,
        "bus_bandwidth_bytes_per_s": wire / time_s if time_s else 0.0,
        "confidence": summary["confidence"] if cost else "uncalibrated",
        "warnings": summary["warnings"],
    }
    if options.json:
        print(json.dumps(told, sort_keys=True))
        return
    interval = ""
    if low_s is not None and high_s is not None:
        interval = f" (80 % interval {format_time(low_s)} to {format_time(high_s)})"
    print(
        f"{options.collective} of {format_bytes(size)} on {options.ranks} ranks of {platform.name}: "
        f"{format_time(time_s)}{interval}, {format_bytes(told['bus_bandwidth_bytes_per_s'])}/s bus bandwidth "
        f"({told['algorithm']}; {told['confidence']})"
    )
    for warning in told["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
