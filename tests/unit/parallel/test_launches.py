"""Host time of eager training: what a launch takes where no trace holds host times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from trioflow import load_trace, make_plan, predict
from trioflow.costmodel.device_times import NO_HOST, host_times
from trioflow.hardware.platform import load_platform
from trioflow.trace.store import Trace


@pytest.fixture(scope="module")
def trace():
    return load_trace("gpt2-b8")


def step_s(trace, launch_s, **degrees):
    platform = load_platform("dgx-h100", 8)
    return predict(
        trace,
        make_plan(**degrees),
        replace(platform, host={**platform.host, "launch_s": launch_s}),
    )


def count_launches(trace):
    work = trace.operators[["flop", "read_bytes", "write_bytes"]]
    return int((work != 0).any(axis=1).sum())


def test_a_step_lasts_as_long_as_its_launches_where_the_device_is_faster(trace):
    launch_s = 1e-3
    bare, held = step_s(trace, 0.0), step_s(trace, launch_s)
    least_s = count_launches(trace) * launch_s
    assert bare.step_time_s < least_s <= held.step_time_s < least_s + bare.step_time_s
    hidden = step_s(trace, 1e-9)
    assert hidden.step_time_s == pytest.approx(bare.step_time_s, rel=0.01)


def test_tensor_ranks_and_micro_batches_launch_as_often_as_one(trace):
    """Twice the tensor ranks halve the device's work and no launch; each micro-batch launches again."""
    launch_s = 1e-3
    one, two = step_s(trace, launch_s), step_s(trace, launch_s, tensor=2)
    assert two.step_time_s >= 0.95 * one.step_time_s


def test_recorded_host_times_stay(trace):
    operators = trace.operators.assign(device_ns=np.int64(1000), cpu_ns=np.int64(7))
    recorded = Trace(operators, trace.tensors, replace(trace.facts, step_time_source="profile"))
    assert host_times(recorded, operators, 1e-4) == pytest.approx(np.full(len(operators), 7e-9))
    predicted = Trace(operators, trace.tensors, replace(trace.facts, step_time_source="predicted"))
    assert host_times(predicted, operators, 1e-4) == pytest.approx(np.full(len(operators), 1e-4))
    assert host_times(predicted, operators, 0.0) == pytest.approx(np.full(len(operators), 7e-9))


def test_the_answer_says_what_a_launch_takes(trace):
    held = " ".join(step_s(trace, 1e-3).warnings)
    assert "the host takes 1e+03 us for each" in held and NO_HOST not in held
    assert NO_HOST in " ".join(step_s(trace, 0.0).warnings)


def test_nanotron_s_cluster_says_it_with_its_source():
    platform = load_platform("p5-h100", 8)
    assert 10e-6 < platform.host["launch_s"] < 200e-6
    assert "1 and 2 nodes" in platform.sources["host.launch_s"]
