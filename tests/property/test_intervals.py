"""No answer that leaves what was recorded is narrower than held-out residuals of its class."""

import math

import numpy as np
import pytest
from fuzz import SHARE
from trioflow.base.errors import PlanError
from trioflow.costmodel.choices import choose_times, load_named_platform
from trioflow.costmodel.uncertainty import BATCH, COLLECTIVES, PIPELINE, load_residuals
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow.prediction.step import simulate_interval
from trioflow.trace.store import load_trace

PLATFORM = "dgx-h100"
PLANS = {
    "ddp": COLLECTIVES,
    "fsdp": COLLECTIVES,
    "zero1": COLLECTIVES,
    "tp": COLLECTIVES,
    "gpipe": PIPELINE,
    "1f1b": PIPELINE,
}


def time_step(trace):
    """Return the trace with the platform's times, which no plan changes; a processor's with its own."""
    device = load_named_platform(PLATFORM, 1).device.name
    if trace.facts.device == "cpu":
        device = trace.facts.device_name
    return choose_times([trace], device, None, None)


def half_width(times, plan, batch=None) -> float:
    """Return the smaller half of a step's interval, as a logarithm."""
    platform = load_named_platform(PLATFORM, plan.ranks)
    told = simulate_interval(extrapolate(times.traces, plan, times.model, batch=batch), platform).summary
    step_s = told.step_time_s
    return min(math.log(step_s / told.low_s), math.log(told.high_s / step_s))


def typical_error(way: str, kind: str, workload: str) -> float:
    """Return the root mean square residual of a way on a kind of device, other workloads' alone."""
    found = [
        one.log_error
        for one in load_residuals()
        if (one.way, one.device_kind) == (way, kind) and one.workload != workload
    ]
    return float(np.sqrt(np.mean(np.square(found))))


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", ["gpt2-tiny-b8", "gpt2-b8", "resnet50-b128"])
def test_ranks_that_were_not_measured_widen_the_interval(name: str, ranks: int) -> None:
    trace = load_trace(name)
    times, kind = time_step(trace), "cpu" if trace.facts.device == "cpu" else "cuda"
    drawn = list(PLANS.items())[ranks // 8 :: 2] if SHARE < 1 else PLANS.items()
    for plan, way in drawn:  # every other one; the other number of ranks takes the rest
        try:
            found = half_width(times, named_plan(plan, ranks))
        except PlanError:
            continue  # A network without layers to split, or with fewer than stages.
        assert found >= typical_error(way, kind, trace.facts.workload), plan


def test_another_batch_widens_the_interval_whatever_the_model_says() -> None:
    """Proportional times claim nothing of their own; the residuals of other batches hold anyway."""
    trace = load_trace("gpt2-tiny-b8")
    least = typical_error(BATCH, "cpu", "gpt2-tiny")
    times = time_step(trace)
    for batch in (1, 7, 9, 64):
        assert half_width(times, named_plan("single", 1), batch) >= least


def test_a_recorded_step_stays_narrow_but_holds_its_repeats() -> None:
    trace = load_trace("gpt2-tiny-b8")
    low, middle, high = np.quantile(trace.facts.step_times_s, [0.1, 0.5, 0.9])
    found = half_width(time_step(trace), named_plan("single", 1))
    assert min(math.log(middle / low), math.log(high / middle)) <= found * (1 + 1e-9) < 0.05
