"""Rows about the workflow's stages: reading profiles, merging, fitting, and a whole run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from bench_commands import TRACE
from rows import Row, time_s
from trioflow.costmodel.operators.model import fit_operator_model
from trioflow.trace.importers.kineto import import_kineto
from trioflow.trace.importers.options import ImportOptions
from trioflow.trace.profile.kineto import read_profile
from trioflow.trace.profile.merge import merge_trace
from trioflow.trace.store import load_trace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from large_profile import write_large_profile  # noqa: E402

LARGE_BYTES = 1_000_000_000
READ_MB_PER_S = 120.0
REPRODUCE_MIN = 20.0
REPRODUCE_CLOCKS = (
    "capture/*", "merge/*", "fit_operators", "partition/*", "measure/*", "describe_machine",
    "fit_collectives", "extrapolate/*", "simulate/*", "report", "describe_traces/traces",
    "attribute", "wafer_study", "hop_study", "distsim_search_study", "describe_studies",
)  # fmt: skip
"""Where the rules that `make reproduce` runs leave their clocks."""


def bench_results() -> Iterator[Row]:
    """Time stages on the results of a workflow run, and add up the run's own clock."""
    results = ROOT / "results"
    raw = results / "traces" / TRACE
    if raw.exists():
        size = sum(f.stat().st_size for f in raw.iterdir()) / 1e6
        merge_s = time_s(lambda: merge_trace(raw), 3)
        yield Row(f"merge one raw profile ({size:.1f} MB packed)", merge_s)
    tables = sorted(results.glob("operator_tables/*/trace.json"))
    if tables:
        traces = [load_trace(path.parent) for path in tables]
        fit_s = time_s(lambda: fit_operator_model(traces), 3)
        yield Row(f"fit the operator model to {len(traces)} traces", fit_s)
    clocks = [sorted((results / "benchmarks").glob(f"{rule}.tsv")) for rule in REPRODUCE_CLOCKS]
    if all(clocks):
        total_s = sum(
            float(pd.read_csv(path, sep="\t")["s"].sum()) for paths in clocks for path in paths
        )
        what = "`make reproduce`, sum of its jobs, on 2 cores"
        yield Row(what, total_s / 60, "min", REPRODUCE_MIN)


def bench_profiles() -> Iterator[Row]:
    """Time reading a large Kineto trace, made of one real profiled step."""
    raw = ROOT / "results" / "traces" / TRACE / "kineto.json.gz"
    if not raw.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        steps = write_large_profile(raw, path, LARGE_BYTES)
        size_mb = path.stat().st_size / 1e6
        options = ImportOptions(gpu="x", batch=8, precision="fp32")
        times_s = {
            verb: time_s(run, 1, warm_up=False)
            for verb, run in (
                ("read", lambda: read_profile(path)),
                ("import", lambda: import_kineto(path, None, options)),
            )
        }
    for verb, taken_s in times_s.items():
        what = f"{verb} a Kineto trace of {size_mb:.0f} MB, {steps} steps"
        yield Row(what, size_mb / taken_s, "MB/s", READ_MB_PER_S, f"{taken_s:.1f} s")
