import types

import pytest

torch = pytest.importorskip("torch", reason="sweeps need torch (extra [capture])")

from trioflow.campaign import sweeps  # noqa: E402
from trioflow.campaign.sweeps import (  # noqa: E402
    BATCH,
    REPEATS,
    CudaStopwatch,
    HostStopwatch,
    Timing,
    choose_repeats,
)


class Device:
    """Counts what is queued on a pretended CUDA device; time passes as work is queued."""

    def __init__(self, cache_bytes=0):
        self.now_ms, self.log, self.made = 0.0, [], []
        self.cache_bytes = cache_bytes
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at_ms = device.now_ms
                device.log.append("event")

            def elapsed_time(self, other):
                return other.at_ms - self.at_ms

        class Scratch:
            def zero_(self):
                device.now_ms += 100.0
                device.log.append("flush")

        def empty(size, dtype, device):
            self.made.append(size)
            return Scratch()

        self.cuda = types.SimpleNamespace(
            Event=Event,
            synchronize=lambda: self.log.append("wait"),
            current_device=lambda: 0,
            get_device_properties=lambda _: types.SimpleNamespace(
                **({"L2_cache_size": cache_bytes} if cache_bytes else {})
            ),
            _sleep=lambda cycles: self.log.append("hold"),
        )
        self.torch = types.SimpleNamespace(cuda=self.cuda, empty=empty, int8=torch.int8)

    def work(self):
        self.now_ms += 0.25
        self.log.append("work")


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(sweeps, "torch", made.torch)
    return made


def test_events_time_the_work_alone_after_a_flush(device):
    watch = CudaStopwatch()
    device.log.clear()
    timing = watch.measure(device.work)
    assert set(timing.times_ns) == {250_000}, "neither flush nor hold count"
    assert timing.timer == "cuda_event"
    timed = device.log[device.log.index("hold") :]
    assert timed[:5] == ["hold", "flush", "event", "work", "event"]
    assert timed.count("flush") == len(timing.times_ns) == REPEATS[1]
    assert timed.count("hold") == -(-REPEATS[1] // BATCH), "one hold a batch"
    assert timed[-1] == "wait"


def test_a_torch_without_the_private_hold_still_measures(device):
    del device.cuda._sleep
    assert set(CudaStopwatch().measure(device.work).times_ns) == {250_000}


@pytest.mark.parametrize(("cache", "expected"), [(0, 256 << 20), (60 << 20, 120 << 20)])
def test_the_flush_covers_the_cache_where_its_size_is_known(monkeypatch, cache, expected):
    made = Device(cache)
    monkeypatch.setattr(sweeps, "torch", made.torch)
    CudaStopwatch()
    assert made.made == [expected]


def test_the_host_stopwatch_waits_for_the_device():
    calls = []
    timing = HostStopwatch(0.001, lambda: calls.append("wait")).measure(
        lambda: calls.append("work")
    )
    assert calls[:2] == ["work", "wait"]
    assert calls.count("work") == calls.count("wait")
    assert timing.timer == "perf_counter"
    assert min(timing.times_ns) > 0


def test_repeats_keep_to_the_budget_between_least_and_most():
    assert choose_repeats(1e-6, 0.06) == REPEATS[1]
    assert choose_repeats(10.0, 0.06) == REPEATS[0]
    assert choose_repeats(0.006, 0.06) == 10
    assert choose_repeats(0.0, 0.06) == REPEATS[1]


def test_columns_are_quartiles_of_the_repeats():
    columns = Timing([40, 10, 20, 30, 50], 7, "cuda_event").columns()
    assert columns == {
        "repeats": 5,
        "median_ns": 30,
        "min_ns": 10,
        "lower_quartile_ns": 20,
        "upper_quartile_ns": 40,
        "host_ns": 7,
        "timer": "cuda_event",
    }
