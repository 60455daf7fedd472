"""The metrics in closed form."""

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.report.errors import (
    METRICS,
    build_metrics_table,
    interval_score,
    summarise_errors,
)


def errors():
    frame = pd.DataFrame(
        [
            # name, workload, plan, measured, quartiles, predicted, interval
            ("a-1", "a", "ddp2", 1.0, 0.9, 1.2, 1.1, 0.9, 1.3),
            ("a-2", "a", "tp2", 2.0, 1.9, 2.1, 1.6, 1.2, 1.8),
            ("b-1", "b", "ddp2", 4.0, 3.8, 4.2, 4.2, 4.0, 4.4),
        ],
        columns=[
            "experiment",
            "workload",
            "plan",
            "measured_s",
            "measured_low_s",
            "measured_high_s",
            "simulated_s",
            "low_s",
            "high_s",
        ],
    )
    relative = frame["simulated_s"] / frame["measured_s"] - 1
    return frame.assign(
        set="live", relative_error=relative, trace_only_error=-0.5, baseline_error=[1.0, -1.0, 0.25]
    )


def test_summary_in_closed_form():
    found = summarise_errors(errors())
    assert set(found) == set(METRICS)
    assert found["experiments"] == 3
    # Signed errors: +10 %, -20 %, +5 %.
    assert found["mean_absolute_error"] == pytest.approx(0.35 / 3)
    assert found["median_absolute_error"] == pytest.approx(0.1)
    assert (found["worst_error"], found["worst_experiment"]) == (pytest.approx(-0.2), "a-2")
    assert found["bias"] == pytest.approx(-0.05 / 3)
    # Ends belong to the interval and to the spread: the third case lies on one of each.
    assert found["coverage"] == pytest.approx(2 / 3)
    assert found["within_spread"] == pytest.approx(2 / 3)
    assert found["mean_relative_width"] == pytest.approx((0.4 + 0.3 + 0.1) / 3)
    # Widths plus 2 / 0.2 times the miss of 0.2 s in the second case, over the measured step.
    assert found["interval_score"] == pytest.approx((0.4 + (0.6 + 10 * 0.2) / 2 + 0.1) / 3)
    assert found["trace_only_mean_absolute_error"] == pytest.approx(0.5)
    assert found["baseline_mean_absolute_error"] == pytest.approx(0.75)


def test_interval_score_is_proper():
    # The expected score of a standard normal is smallest at its own central quantiles.
    draws = np.random.default_rng(1).normal(size=40_000)

    def score(half):
        return interval_score(np.full_like(draws, -half), np.full_like(draws, half), draws).mean()

    own = score(1.2816)
    assert own < score(1.0) and own < score(1.6)


def test_groups_hold_every_experiment_once():
    kinds = {"ddp2": "data parallel", "tp2": "tensor parallel"}
    table = build_metrics_table(errors(), kinds)
    assert table["grouping"].iloc[0] == "all"
    assert table.groupby("grouping")["experiments"].sum().to_dict() == {
        "all": 3,
        "plan kind": 3,
        "workload": 3,
    }
    groups = table.set_index("group")
    assert groups.loc["data parallel", "mean_absolute_error"] == pytest.approx(0.075)
    assert groups.loc["b", "worst_experiment"] == "b-1"
    two = build_metrics_table(errors().assign(set=["x", "x", "y"]), kinds)
    assert list(two.loc[two["grouping"] == "set", "experiments"]) == [2, 1]


def test_refusals():
    with pytest.raises(InputError, match="no experiment"):
        summarise_errors(errors().head(0))
    with pytest.raises(InputError, match="no plan named 'tp2'"):
        build_metrics_table(errors(), {"ddp2": "data parallel"})
    with pytest.raises(InputError, match="cannot cover"):
        interval_score(np.zeros(1), np.ones(1), np.ones(1), coverage=1.0)
