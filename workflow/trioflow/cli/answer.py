"""``trioflow simulate``: a prediction, and what it rests on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.cli.choices import read_options
from trioflow.cli.text import format_facts, format_table
from trioflow.errors import InputError
from trioflow.export.counters import can_count_links
from trioflow.export.step_files import write_step
from trioflow.parallel.memory import find_fullest
from trioflow.prediction.answer import Prediction
from trioflow.prediction.assembly import predict
from trioflow.prediction.breakdown import WAYS
from trioflow.units import format_bytes, format_time

PERFETTO_ENDINGS = (".json", ".json.gz")
"""Of files that hold a timeline for Perfetto."""


def predict_options(options: argparse.Namespace, *, record_links: bool = False) -> Prediction:
    """Return the prediction that a command line asks for; with the links' rates, where the network has them."""
    plan, platform, assumed = read_options(options)
    recorded = replace(assumed, record_links=record_links and can_count_links(assumed.network))
    return predict(options.trace, plan, platform, batch=options.batch, options=recorded)


def write_timeline(prediction: Prediction, path: str) -> None:
    """Write a timeline, as a table or for Perfetto."""
    if path.endswith(".parquet"):
        tables.write_table(prediction.timeline, "timeline", path)
    else:
        write_step(prediction, path)


def run_simulate(options: argparse.Namespace) -> None:
    """Predict a step and print it."""
    check_timeline(options.timeline)
    check_breakdown(options)
    prediction = predict_options(
        options, record_links=str(options.timeline or "").endswith(PERFETTO_ENDINGS)
    )
    told, breakdown = prediction.to_dict(), None
    if options.by:
        breakdown = prediction.breakdown(options.by, options.depth)
    if options.timeline:
        write_timeline(prediction, options.timeline)
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
            ("without session", describe_unanchored(told)),
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


def describe_unanchored(told: dict[str, Any]) -> str:
    """Return the step without the session's anchor; empty where there is none."""
    if "trace_only_step_time_s" not in told:
        return ""
    return f"{format_time(told['trace_only_step_time_s'])}, from the trace alone"


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
