import numpy as np
import pytest
from trioflow.trace.profile.steps import EVENT_NS, StepTimes


def step(device, host, tail, events, host_events):
    arrays = [np.array(a, dtype=float) for a in (device, host, events, host_events)]
    total = arrays[0].sum() + arrays[1].sum() + tail
    return StepTimes(arrays[0], arrays[1], tail, arrays[2], arrays[3], total)


def test_the_profiler_s_time_goes_by_events_not_by_duration():
    # 10 events cost 1 us each: eight of them in the short operator.
    times = step([100_000, 50_000], [0, 0], 0, [2, 8], [0, 0])
    clean = times.without_overhead(140_000 / 1e9)
    assert clean.device_ns.tolist() == [98_000, 42_000]


def test_the_parts_always_sum_to_the_step():
    times = step([100_000, 3_000], [5_000, 1_000], 500, [1, 40], [2, 2])
    for target_ns in (20_000, 90_000, 109_500, 200_000):
        clean = times.without_overhead(target_ns / 1e9)
        total = clean.device_ns.sum() + clean.cpu_ns.sum() + clean.tail_ns
        assert total == pytest.approx(target_ns, abs=5)


def test_drift_is_no_overhead():
    # The machine was half as fast: both operators keep their proportion but for 2 us an event.
    times = step([1_000_000, 100_000], [0, 0], 0, [1, 1], [0, 0])
    clean = times.without_overhead(550_000 / 1e9)
    expected = (100_000 - EVENT_NS) / (1_000_000 - EVENT_NS)
    assert clean.device_ns[1] / clean.device_ns[0] == pytest.approx(expected, rel=1e-4)


def test_a_faster_profiled_step_is_stretched():
    clean = step([60, 40], [0, 0], 0, [1, 1], [0, 0]).without_overhead(200 / 1e9)
    assert clean.device_ns.tolist() == [120, 80]
