"""Closed forms of a pipeline's throughput, against the engine and against made-up steps."""

import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.platform import BUILDERS
from trioflow_evaluation.distsim.recorded import (
    bubble_throughput,
    compare_throughput,
    split_step,
)
from trioflow_evaluation.vtrain.model import StageTimes, build_step

STAGES = 4


def simulate_steps(counts, forward_s=(1.0,) * STAGES, update_s=0.0) -> pd.DataFrame:
    """Steps of a pipeline of some stages whose backward takes twice as long, by the engine."""
    links = BUILDERS["switch"](STAGES, 1e18, 0.0)
    machine = Platform("fast", Device("chip", "gpu", 10**9, {}), STAGES, tuple(links))
    times = StageTimes(
        [[f] for f in forward_s], [[2 * f] for f in forward_s], [update_s] * STAGES, [0] * STAGES, 1
    )
    steps = [simulate(build_step(times, m), machine).summary.step_time_s for m in counts]
    return pd.DataFrame(
        {
            "micro_batches": counts,
            "batch": counts,
            "step_time_s": steps,
            "pipeline": STAGES,
            "reason": "",
        }
    )


def test_equal_stages_follow_the_bubble_alone() -> None:
    found = compare_throughput(simulate_steps([1, 2, 4, 8, 16]))
    assert found["simulated"].tolist() == pytest.approx(found["ideal"].tolist(), rel=1e-6)
    assert found["ideal"].iloc[0] == 1.0
    assert bubble_throughput(10**9, 4) == pytest.approx(4), "without a bubble all stages work"


def test_unequal_stages_are_as_few_equal_ones_as_the_slowest_allows() -> None:
    rows = simulate_steps([1, 2, 4, 8, 16], forward_s=(1.0, 1.0, 1.0, 2.0))
    parts = split_step(rows)
    assert (parts.further_s, parts.stages) == pytest.approx((6.0, 2.5), rel=1e-6)
    assert parts.once_s == pytest.approx(0, abs=1e-5)
    found = compare_throughput(rows)
    assert [parts.throughput(m) for m in found["micro_batches"]] == pytest.approx(
        found["simulated"].tolist(), rel=1e-6
    )
    assert found["deviation"].iloc[-1] < -0.1


def test_what_the_second_micro_batch_adds_is_told() -> None:
    rows = simulate_steps([1, 2, 4, 8])
    rows.loc[rows["micro_batches"] > 1, "step_time_s"] += 1.5
    parts = split_step(rows)
    assert parts.once_s == pytest.approx(1.5, rel=1e-5)
    assert parts.throughput(1) == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows.assign(step_time_s=[None] * 3, reason="too large"), "too large"),
        (lambda rows: rows[rows["micro_batches"] > 1], "one micro-batch to normalise"),
    ],
)
def test_a_curve_without_times_or_norm_is_refused(change, words) -> None:
    with pytest.raises(InputError, match=words):
        compare_throughput(change(simulate_steps([1, 2, 4])))
    with pytest.raises(InputError, match="not a pipeline"):
        bubble_throughput(0, 4)
