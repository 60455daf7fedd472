"""``trioflow simulate``: a prediction, and what it rests on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.cli.choices import choose_collectives, choose_graph
from trioflow.cli.network import CHANGED, is_changed, spell_network
from trioflow.cli.text import format_facts, format_table
from trioflow.engine.networks import DEFAULT_NETWORK
from trioflow.engine.simulate import CONFIDENCES, Result, simulate_interval
from trioflow.errors import InputError
from trioflow.export.counters import can_count_links
from trioflow.hardware.platform import OFFLOAD_RATES, describe_unmeasured
from trioflow.parallel.memory import find_fullest
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.breakdown import WAYS, build_breakdown
from trioflow.report.experiment import choose_traced, write_step
from trioflow.trace.store import Trace
from trioflow.units import format_bytes, format_time

PERFETTO_ENDINGS = (".json", ".json.gz")
"""Of files that hold a timeline for Perfetto."""


@dataclass(frozen=True)
class Answer:
    """What ``trioflow simulate`` says: the figures by name, the timeline, the breakdown asked for."""

    told: dict[str, Any]
    result: Result
    breakdown: pd.DataFrame | None
    graph: TaskGraph
    trace: Trace

    @property
    def timeline(self) -> pd.DataFrame:
        """Tasks of all ranks, made when they are asked for."""
        return self.result.timeline

    def write_timeline(self, path: str | Path) -> None:
        """Write the timeline, as a table or for Perfetto."""
        if str(path).endswith(".parquet"):
            tables.write_table(self.timeline, "timeline", path)
        else:
            write_step(self.result, self.graph, self.trace, path)


def predict(options: argparse.Namespace, *, record_links: bool = False) -> Answer:
    """Return the answer of ``trioflow simulate``; with the links' rates, where the network tells them."""
    graph, platform, times = choose_graph(options)
    trace, batch = times.traces[0], int(graph.metadata["batch"])
    collectives = choose_collectives(options, platform)
    warnings = list(times.warnings)
    if graph.kinds & {"collective", "send"} and collectives is None:
        warnings.append(
            f"no measured collectives for {platform.name}: ring closed form over its data-sheet links"
        )
        warnings += [told for told in [describe_unmeasured(platform)] if told]
    guessed = [key for key in platform.unmeasured if key.startswith(OFFLOAD_RATES)]
    if graph.metadata["plan"]["offload"] != "none" and guessed:
        warnings.append(
            f"rates of the host of {platform.name} were never measured: peaks of data sheets"
        )
    network = spell_network(getattr(options, "network", DEFAULT_NETWORK))
    if collectives is not None and is_changed(options):
        warnings.append(CHANGED)
    fold: str | bool = False if getattr(options, "no_fold", False) else "auto"
    result = simulate_interval(
        graph, platform, collectives, network=network, fold=fold,
        record_links=record_links and can_count_links(network),
    )  # fmt: skip
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
        "memory": graph.metadata["memory"],
        "mode": graph.metadata["mode"],
        "samples_per_s": batch / summary["step_time_s"],
        "folded": summary["folded"],
        "unfolded_reason": summary["unfolded_reason"],
        "warnings": list(dict.fromkeys([*warnings, *summary["warnings"]])),
    }
    by = getattr(options, "by", None)
    breakdown = None
    traced = choose_traced(times.traces, graph.metadata)
    if by:
        breakdown = build_breakdown(graph, result.timeline, traced, by, options.depth)
    return Answer(told, result, breakdown, graph, traced)


def run_simulate(options: argparse.Namespace) -> None:
    """Predict a step and print it."""
    check_timeline(options.timeline)
    check_breakdown(options)
    answer = predict(options, record_links=str(options.timeline or "").endswith(PERFETTO_ENDINGS))
    told, breakdown = answer.told, answer.breakdown
    if options.timeline:
        answer.write_timeline(options.timeline)
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
            ("filled by", describe_filling(told["memory"])),
            ("step time", f"{format_time(told['step_time_s'])}  ({interval}; {told['confidence']})"),
            ("throughput", f"{told['samples_per_s']:.3g} samples/s"),
            ("compute", f"{format_time(told['compute_s'])} on the busiest rank"),
            ("communication", f"{format_time(told['communication_s'])}, "
             f"of which {format_time(told['exposed_communication_s'])} exposed"),
            ("simulated", f"{told['events']} events in {format_time(told['simulator_wall_s'])}"
             f"{' (one of identical ranks each)' if told['folded'] else ''}"),
            ("timeline", options.timeline or ""),
            ("breakdown", options.breakdown or ""),
        ])
    )  # fmt: skip
    if breakdown is not None:
        print(f"\n{format_breakdown(breakdown, told['step_time_s'])}")
    for warning in told["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)


def describe_filling(memory: Sequence[dict[str, Any]]) -> str:
    """Return what fills the fullest rank at its peak, the largest first, and when that is."""
    fullest = find_fullest(memory)
    parts = [
        f"{category.replace('_', ' ')} {format_bytes(size)}"
        for category, size in fullest["categories"].items()
        if size >= fullest["peak_bytes"] / 100
    ]
    rank = f"rank {fullest['ranks'][0]}, " if len(memory) > 1 else ""
    return f"{', '.join(parts)} ({rank}{fullest['when']})"


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


def check_timeline(path: str | None) -> None:
    """Refuse a path that no timeline can be written to, before anything is computed.

    Raises
    ------
    InputError
        When the ending is unknown or the folder is missing.
    """
    if path is None:
        return
    if not Path(path).parent.is_dir():
        raise InputError(f"--timeline {path}: no folder {Path(path).parent}", fix="make it first")
    if not path.endswith((".parquet", *PERFETTO_ENDINGS)):
        raise InputError(
            f"--timeline {path}: unknown ending",
            fix="use .parquet, or .json or .json.gz for Perfetto",
        )
