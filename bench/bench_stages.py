"""Rows about the workflow's stages: reading profiles, merging, fitting, and a whole run."""

from __future__ import annotations

import gzip
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from bench_commands import TRACE, run_cold
from rows import Row, time_s
from trioflow.costmodel.fits.operators import fit_named_model
from trioflow.trace.profile.merge import merge_trace
from trioflow.trace.store import load_trace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from large_profile import write_large_profile  # noqa: E402

LARGE_BYTES = 1_000_000_000
READ_MB_PER_S, READ_GB = 120.0, 0.5
REPRODUCE_MIN = 20.0
REPRODUCE_CLOCKS = (
    "capture/*",
    "merge/*",
    "fit_operators",
    "partition/*",
    "measure/*",
    "describe_machine",
    "fit_collectives",
    "extrapolate/*",
    "simulate/*",
    "report",
    "describe_traces/traces",
    "attribute",
    "wafer_study",
    "hop_study",
    "distsim_search_study",
    "describe_studies",
)
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
        fit_s = time_s(lambda: fit_named_model(traces), 3)
        yield Row(f"fit the operator model to {len(traces)} traces", fit_s)
    clocks = [sorted((results / "benchmarks").glob(f"{rule}.tsv")) for rule in REPRODUCE_CLOCKS]
    if all(clocks):
        total_s = sum(float(pd.read_csv(path, sep="\t")["s"].sum()) for paths in clocks for path in paths)
        what = "`make reproduce`, sum of its jobs, on 2 cores"
        yield Row(what, total_s / 60, "min", REPRODUCE_MIN)


def bench_profiles() -> Iterator[Row]:
    """Tell the rate and the memory of importing a large Kineto trace, made of one real profiled step, from cold."""
    raw = ROOT / "results" / "traces" / TRACE / "kineto.json.gz"
    if not raw.exists():
        return
    said = ["--gpu", "x", "--batch", "8", "--precision", "fp32", "-o"]
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "large.json", Path(folder) / "large.json.gz"
        steps = write_large_profile(raw, plain, LARGE_BYTES)
        size_mb = plain.stat().st_size / 1e6
        with plain.open("rb") as file, gzip.open(packed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(file, target)
        for path, how in ((plain, ""), (packed, ", packed")):
            command = [sys.executable, "-m", "trioflow", "import", str(path), *said]
            spent_s, peak_gb = run_cold([*command, f"{folder}/trace{how}"])
            what = f"import a Kineto trace of {size_mb:.0f} MB, {steps} steps{how}"
            yield Row(f"{what}, per CPU second from cold", size_mb / spent_s, "MB/s", READ_MB_PER_S, f"{spent_s:.1f} s")
            yield Row(f"{what}, peak memory from cold", peak_gb, "GB", READ_GB)
