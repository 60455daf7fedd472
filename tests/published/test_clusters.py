"""nanotron's runs: every row is read, and a sample of the peaks is predicted as the page does it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
from trioflow import tables
from trioflow.hardware.platform import load_platform
from trioflow.reproductions.clusters.memory import judge_memory
from trioflow.reproductions.clusters.nanotron import (
    Run,
    cut_stages,
    find_model,
    read_runs,
    trace_run,
)
from trioflow.reproductions.clusters.page import build_clusters_page
from trioflow.reproductions.clusters.scores import FAILED, FITTED, RAN, score_memory
from trioflow.reproductions.tables import CLUSTER_MEMORY

LIMITS = {"median": 0.08, "most": 0.3}
"""Errors that the sample must keep."""


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    told = os.environ.get("TRIOFLOW_DATA_MIRROR")
    if not told:
        pytest.skip("TRIOFLOW_DATA_MIRROR names no mirror of the public data")
    return read_runs(Path(told))


@pytest.fixture(scope="module")
def sample(runs: list[Run]) -> list[Run]:
    """The first run of each tensor and pipeline degree up to 4, and some that failed."""
    small = [r for r in runs if r.parameters == 1.34 and r.tensor <= 4 and r.pipeline <= 4]
    chosen = {(r.tensor, r.pipeline): r for r in reversed(small) if r.ran and r.nodes <= 2}
    return [*chosen.values(), *[r for r in small if not r.ran][:2]]


@pytest.fixture(scope="module")
def cases(sample: list[Run]):
    return judge_memory(sample)


def test_every_run_is_read_and_names_its_ranks(runs: list[Run]) -> None:
    assert Counter(run.ran for run in runs) == {True: 1728, False: 1578}
    assert all(run.data * run.tensor * run.pipeline == 8 * run.nodes for run in runs if run.ran)
    assert all(find_model(run).parameters == pytest.approx(run.parameters * 1e9, rel=0.01)
               for run in runs[:100])  # fmt: skip


def test_the_host_s_time_of_p5_is_that_of_the_runs_that_wait_for_it(runs: list[Run]) -> None:
    """Fitted where fitting is allowed: 1.34 B on 1 and 2 nodes, one sample over 4 and 8 GPUs."""
    bound = [
        run for run in runs
        if run.ran and run.parameters == 1.34 and run.nodes <= 2 and run.tensor in (4, 8)
        and run.pipeline == run.micro_batch == 1
    ]  # fmt: skip
    assert len(bound) == 7
    piece_s = np.median([run.measured_step_s / run.accumulate for run in bound])
    operators = trace_run(bound[0]).operators
    works = (operators[["flop", "read_bytes", "write_bytes"]] > 0).any(axis=1)
    launches = int((works & operators["phase"].isin(["forward", "backward"])).sum())
    shipped = load_platform("p5-h100", 8).host["launch_s"]
    assert shipped == pytest.approx(piece_s / launches, rel=2e-3)


def test_stages_are_nanotron_s(runs: list[Run]) -> None:
    """A stage ends with the block that exceeds its share: 6 layers of 16, not 5, on the first of 4."""
    run = next(r for r in runs if r.parameters == 1.34)
    trace = trace_run(run)
    layers = [len(stage) for stage in cut_stages(trace, replace(run, pipeline=4))]
    assert layers == [1 + 6, 5, 5, 1]
    assert sum(map(len, cut_stages(trace, replace(run, pipeline=16)))) == 18


def test_sampled_peaks_keep_their_limits(cases) -> None:
    ran = cases[cases["set"] != FAILED]
    assert set(ran["set"]) <= {RAN, FITTED} and len(ran) >= 8
    error = np.abs(ran["reserved_bytes"] / ran["measured_bytes"] - 1)
    assert error.median() < LIMITS["median"] and error.max() < LIMITS["most"]
    assert (ran["allocated_bytes"] < ran["reserved_bytes"]).all()
    assert score_memory(cases)["refused"].sum() == 0


def test_the_page_tells_errors_and_why_runs_failed(cases, tmp_path: Path) -> None:
    table, page = tmp_path / "memory.parquet", tmp_path / "clusters.html"
    tables.write_table(cases, "cluster_memory", table, {}, CLUSTER_MEMORY)
    scores = build_clusters_page(table, page)
    text = page.read_text()
    assert "although they ran" in text and "Those that failed" in text
    assert scores["set"].iloc[0] == "all runs"
