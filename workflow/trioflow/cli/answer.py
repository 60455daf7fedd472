"""``trioflow simulate`` and ``trioflow collective``: a prediction, and what it rests on."""

from __future__ import annotations

import argparse
import json
import sys
from math import isfinite
from pathlib import Path
from typing import Any

from trioflow import tables
from trioflow.cli.choices import choose_collectives, choose_graph, choose_platform
from trioflow.cli.text import format_facts
from trioflow.costmodel.platform_collectives import PlatformCollectives
from trioflow.engine.simulate import CONFIDENCES, simulate, simulate_interval
from trioflow.errors import InputError
from trioflow.network.collectives import compute_wire_bytes
from trioflow.parallel.task_graph import TaskGraphBuilder
from trioflow.report.perfetto import write_perfetto
from trioflow.units import format_bytes, format_time


def predict(options: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Return the answer of ``trioflow simulate`` and its timeline."""
    graph, platform, times = choose_graph(options)
    trace, batch = times.traces[0], int(graph.metadata["batch"])
    collectives = choose_collectives(options, platform)
    warnings = list(times.warnings)
    if graph.tasks["kind"].isin(("collective", "send")).any() and collectives is None:
        warnings.append(
            f"no measured collectives for {platform.name}: ring closed form over its data-sheet links"
        )
    result = simulate_interval(graph, platform, collectives)
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
        "cost_model": times.model_text,
        "confidence": max(confidences, key=CONFIDENCES.index),
        "peak_memory_bytes": peak,
        "memory_bytes": room,
        "fits_memory": peak <= room,
        "samples_per_s": batch / summary["step_time_s"],
        "folded": False,
        "warnings": list(dict.fromkeys([*warnings, *summary["warnings"]])),
    }
    return told, result.timeline


def run_simulate(options: argparse.Namespace) -> None:
    """Predict a step and print it."""
    writer = choose_writer(options.timeline)
    told, timeline = predict(options)
    if writer:
        writer(timeline)
    if options.json:
        print(json.dumps(told, sort_keys=True))
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
        ])
    )  # fmt: skip
    for warning in told["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)


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
