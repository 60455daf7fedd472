"""Timing one piece of work: with events on a CUDA device, with the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trioflow.base.units import ns_to_s, s_to_ns

Work = Callable[[], Any]

REPEATS = (5, 24)
"""Timed repeats at least and at most."""
BATCH = 8
"""Repeats handed to the device at once."""
BUDGET_S, QUICK_BUDGET_S = 0.06, 0.002
"""Time for the repeats of one piece of work, where the least number allows it [s]."""
_HOLD_LIMIT_S = 0.1
_CYCLES_PER_S = 2.0e9
"""At least the clock of current devices: a hold is then at least as long as wanted."""
_FLUSH_BYTES = 256 << 20
"""More than any second-level cache so far; used where torch does not say its size."""


@dataclass(frozen=True)
class Timing:
    """Repeated times of one piece of work."""

    times_ns: list[int]  # time of each repeat [ns]
    host_ns: int  # host time to hand the work over once [ns]
    timer: str

    def columns(self) -> dict[str, Any]:
        """Return the timing's columns of the sweep table."""
        low, median, high = statistics.quantiles(self.times_ns, n=4, method="inclusive")
        return {
            "repeats": len(self.times_ns), "median_ns": round(median),
            "min_ns": min(self.times_ns), "lower_quartile_ns": round(low),
            "upper_quartile_ns": round(high), "host_ns": self.host_ns, "timer": self.timer,
        }  # fmt: skip


class HostStopwatch:
    """Times work that is over when it returns, or when ``finish`` has waited for it, in ``budget_s`` [s]."""

    def __init__(self, budget_s: float = BUDGET_S, finish: Work = lambda: None) -> None:
        self.budget_s, self.finish = budget_s, finish

    def measure(self, work: Work) -> Timing:
        """Time some work after running it once."""
        work()
        self.finish()
        first_ns = self._once(work)
        repeats = choose_repeats(ns_to_s(first_ns), self.budget_s)
        times = [self._once(work) for _ in range(repeats)]
        return Timing(times, round(statistics.median(times)), "perf_counter")

    def _once(self, work: Work) -> int:
        start = time.perf_counter_ns()
        work()
        self.finish()
        return time.perf_counter_ns() - start


class CudaStopwatch:
    """Times work on the current CUDA stream with events, in ``budget_s`` [s].

    The device is held busy while the host hands over a batch, so that it never waits between two
    kernels of one repeat; the second-level cache is overwritten before each.
    """

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self.budget_s = budget_s
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # Named by torch from about 2.5 on.
        cache_bytes = int(getattr(properties, "L2_cache_size", 0) or 0)
        size_bytes = 2 * cache_bytes if cache_bytes else _FLUSH_BYTES
        self.scratch = torch.empty(size_bytes, dtype=torch.int8, device="cuda")
        self.events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(REPEATS[1])
        ]
        # An event is made when it is first recorded, which takes longer.
        for pair in self.events:
            for event in pair:
                event.record()
        torch.cuda.synchronize()

    def measure(self, work: Work) -> Timing:
        """Time some work after running it twice."""
        work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        host_s = time.perf_counter() - start
        torch.cuda.synchronize()
        whole_s = time.perf_counter() - start
        repeats, times = choose_repeats(whole_s, self.budget_s), list[int]()
        for first in range(0, repeats, BATCH):
            batch = self.events[: min(BATCH, repeats - first)]
            # Flushing and events take the host some 20 us a repeat as well.
            hold_device((host_s + 2e-5) * len(batch) * 1.3 + 1e-4)
            for before, after in batch:
                self.scratch.zero_()
                before.record()
                work()
                after.record()
            torch.cuda.synchronize()
            # Torch says milliseconds.
            times += [s_to_ns(before.elapsed_time(after) * 1e-3) for before, after in batch]
        return Timing(times, s_to_ns(host_s), "cuda_event")


def hold_device(time_s: float) -> None:
    """Keep the current stream busy for about some time [s], without any memory traffic."""
    # Private in all of torch 2.4 to 2.13; without it short work is timed as the host launches it.
    spin = getattr(torch.cuda, "_sleep", None)
    if spin is not None:
        spin(int(min(time_s, _HOLD_LIMIT_S) * _CYCLES_PER_S))


def choose_repeats(once_s: float, budget_s: float) -> int:
    """Return how often to repeat work that takes so long once [s], within a budget [s]."""
    least, most = REPEATS
    return max(least, min(most, int(budget_s / max(once_s, 1e-9))))


def make_stopwatch(device: str, quick: bool) -> HostStopwatch | CudaStopwatch:
    """Return the stopwatch of a device, ``cuda`` or ``cpu``."""
    budget_s = QUICK_BUDGET_S if quick else BUDGET_S
    return CudaStopwatch(budget_s) if device == "cuda" else HostStopwatch(budget_s)
