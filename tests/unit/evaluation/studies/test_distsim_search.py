"""DistSim's search for a plan, with what it does not publish assumed: order and ratio."""

import pandas as pd
import pytest
from trioflow.hardware.platform import load_platform
from trioflow_evaluation.studies.distsim import (
    BEST,
    MEASURED_RATIO,
    PLATFORM,
    PREDICTED_RATIO,
    WORST,
    draw_distsim_search,
    list_degrees,
    name_plan,
    predict_distsim,
)


def test_the_plans_are_the_fifteen_of_sixteen_ranks() -> None:
    found = list_degrees()
    assert len(set(found)) == 15 and all(t * p * d == 16 for t, p, d in found)
    assert BEST[:3] in found and WORST[:3] in found


def test_what_is_published_is_consistent() -> None:
    """The ratios are those of unrounded times: the rounded ones allow them."""
    assert BEST.predicted_per_s / WORST.predicted_per_s == pytest.approx(PREDICTED_RATIO, rel=0.005)
    assert BEST.measured_per_s / WORST.measured_per_s == pytest.approx(MEASURED_RATIO, rel=0.005)


def test_the_machine_says_what_was_assumed() -> None:
    machine = load_platform(PLATFORM, 16)
    assert (machine.ranks, machine.ranks_per_node, machine.device.name) == (16, 4, "NVIDIA A10")
    assert all("DistSim" in machine.sources[key] for key in machine.sources if "nics" in key)
    assert len(machine.unmeasured) >= 8


def make_rows() -> pd.DataFrame:
    rows = [
        {
            "tensor": t,
            "pipeline": p,
            "data": d,
            "communication_scale": scale,
            "step_time_s": (1 + t + scale * t / p),
            "low_s": 0.9 * t,
            "high_s": 9.0 * t,
        }
        for scale in (1.0, 2.0)
        for t, p, d in list_degrees()
    ]
    return pd.DataFrame(rows)


def test_the_figure_shows_every_plan_at_every_speed() -> None:
    axes = draw_distsim_search(make_rows()).axes[0]
    dots = [float(x) for one in axes.collections for x, _ in one.get_offsets()]
    assert {BEST.measured_per_s, WORST.measured_per_s} <= set(dots) and len(dots) >= 2 * 15 + 2
    ticks = [tick.get_text() for tick in axes.get_yticklabels()]
    assert len(ticks) == 15 and ticks[0] == "1M16P1D"


@pytest.mark.slow
def test_with_a_network_half_as_fast_the_last_is_distsims_and_its_best_is_among_the_first() -> None:
    rows = predict_distsim((2.0,)).sort_values("step_time_s")
    assert rows["status"].tolist() == ["ok"] * 15
    names = [name_plan(row) for _, row in rows.iterrows()]
    assert names[-1] == "16M1P1D" and "1M8P2D" in names[:3]
    assert rows["step_time_s"].max() / rows["step_time_s"].min() > 3
