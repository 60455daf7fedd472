"""Peaks of real steps: found among allocations, set beside predictions, refused where they fail."""

from dataclasses import replace

import pytest
from captured import TRANSFORMER
from trioflow.parallel.plan import make_plan, named_plan

torch = pytest.importorskip("torch", reason="measuring needs torch (extra [capture])")

from oracles import peak_memory  # noqa: E402
from oracles.peak_memory import COLUMNS, MemoryCase, choose_backend, compare_peaks, find_peak, measure_peaks  # noqa: E402
from trioflow.base.errors import MeasurementError  # noqa: E402


def test_the_peak_is_the_largest_sum_inside_the_step():
    changes = [(5, 30), (1, 100), (2, -60), (6, -30), (8, 50), (9, -80)]
    assert find_peak(changes, 3, 7) == 70
    assert find_peak(changes, 3, 8) == 90
    assert find_peak(changes, 0, 9) == 100
    assert find_peak(changes, 3, 4) == 40  # nothing happens: what is there stays


def test_each_rank_has_a_row(monkeypatch):
    memory = [
        {"ranks": [0, 2], "peak_bytes": 110, "categories": {}, "when": "backward"},
        {"ranks": [1], "peak_bytes": 90, "categories": {}, "when": "forward"},
    ]
    plan = make_plan(pipeline=3)
    monkeypatch.setattr(peak_memory, "measure_peaks", lambda case, device: {0: 100, 1: 100, 2: 200})
    table = compare_peaks([MemoryCase(TRANSFORMER, plan, 6, [], memory)])
    assert tuple(table.columns) == COLUMNS
    assert table["relative_error"].round(6).tolist() == [0.1, -0.1, -0.45]
    assert table["when"].tolist() == ["backward", "forward", "backward"]


def test_sharded_units_are_measured_without_gloo_s_threads():
    plans = {"fsdp": "fake", "zero1": "gloo", "ddp": "gloo", "gpipe": "gloo", "single": ""}
    for name, backend in plans.items():
        assert choose_backend(named_plan(name, 1 if name == "single" else 2), "cpu") == backend
    assert choose_backend(named_plan("fsdp", 2), "cuda") == "nccl"


def test_a_plan_that_cannot_be_run_is_refused_with_the_reason():
    plan = replace(named_plan("tp", 2), recompute="full")
    with pytest.raises(MeasurementError, match=r"plan tp: rank 0 failed: .*split modules is not meas"):
        measure_peaks(MemoryCase(TRANSFORMER, plan, 4, [], []))
