"""``trioflow capture`` and ``trioflow import``: from a running model or a raw profile to a trace."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trioflow.errors import InputError
from trioflow.experiments import load_workloads
from trioflow.trace.merge import merge_trace, merge_trace_folder
from trioflow.trace.store import save_trace

SHIPPED_WORKLOADS = Path(__file__).parent.parent / "data" / "workloads.tsv"
OWN_WORKLOADS = Path("config") / "workloads.tsv"


def choose_workload(options: argparse.Namespace) -> dict[str, Any]:
    """Return the workload's row with the command line's changes.

    Raises
    ------
    InputError
        When the table has no such row, or a change does not fit it.
    """
    table = options.workloads or (OWN_WORKLOADS if OWN_WORKLOADS.exists() else SHIPPED_WORKLOADS)
    rows = load_workloads(table)
    if options.workload not in rows:
        raise InputError(
            f"no workload {options.workload!r}", file=table,
            fix=f"use one of {', '.join(rows)}, or add a row and give the table with --workloads",
        )  # fmt: skip
    row = asdict(rows[options.workload])
    for key in ("sequence", "precision", "optimizer"):
        value = getattr(options, key)
        if value is not None:
            if row[key] is None:
                raise InputError(f"--{key}: workload {options.workload} has none")
            row[key] = value
    return row


def run_capture(options: argparse.Namespace) -> None:
    """Capture a training step and write it as a trace, the raw profile beside it."""
    row = choose_workload(options)
    try:
        from trioflow.trace.capture import capture_workload
    except ImportError as error:
        raise InputError(
            f"capture needs PyTorch ({error})", fix="install it: pip install 'trioflow[capture]'"
        ) from None
    folder = Path(options.output)
    print(f"capturing {row['workload']} at batch {options.batch} ...", file=sys.stderr)
    capture_workload(row, options.batch, folder / "raw", device=options.device)
    trace = merge_trace(folder / "raw")
    save_trace(trace, folder)
    step_ms = trace.facts["step_time_s"] * 1e3
    print(f"{len(trace.operators)} operators, step {step_ms:.1f} ms; written: {folder}")
    print(f"next: trioflow show {folder}")


def run_import(options: argparse.Namespace) -> None:
    """Merge a raw profile into a trace."""
    merge_trace_folder(options.source, options.output)
    print(f"written: {options.output}\nnext: trioflow show {options.output}")
