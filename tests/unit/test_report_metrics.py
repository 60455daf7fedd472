"""The metrics in closed form.

The error table against values worked out by hand, and its refusals.
"""

import pandas as pd
import pytest
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.report.errors import METRICS, build_error_table, build_metrics_table, summarise_errors


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
    return frame.assign(set="live", relative_error=relative, trace_only_error=-0.5, baseline_error=[1.0, -1.0, 0.25])


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


def test_groups_hold_every_experiment_once():
    kinds = {"ddp2": "data parallel", "tp2": "tensor parallel"}
    table = build_metrics_table(errors(), kinds)
    assert table["grouping"].iloc[0] == "all"
    assert table.groupby("grouping")["experiments"].sum().to_dict() == {"all": 3, "plan kind": 3, "workload": 3}
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


EXPERIMENTS = pd.DataFrame(
    [
        {"experiment": "a-ddp2", "set": "live", "workload": "a", "plan": "ddp2", "batch": 8},
        {"experiment": "a-batch2", "set": "live", "workload": "a", "plan": "single", "batch": 2},
    ]
)
MS = 1_000_000


def rows(series, plan, batch, *rounds):
    return [
        {
            "workload": "a",
            "series": series,
            "plan": plan,
            "batch": batch,
            "round": number,
            "rank": rank,
            "step_ns": step_ms * MS,
        }
        for number, steps in enumerate(rounds)
        for rank, step_ms in enumerate(steps)
    ]


def measurements():
    return pd.DataFrame(
        [
            *rows("distributed", "ddp2", 8, (100, 105), (110, 108), (120, 130)),
            *rows("single", "single", 2, (50,), (60,), (40,), (70,)),
            # None of these belongs to an experiment; each would change its median.
            *rows("distributed", "tp2", 8, (999, 999)),
            *rows("distributed", "ddp2", 4, (999, 999)),
            *rows("both_busy", "single", 2, (999, 999)),
        ]
    )


def summary(ranks, step_s, **changes):
    return {
        "step_time_s": step_s,
        "low_s": step_s * 0.9,
        "high_s": step_s * 1.2,
        "trace_only_step_time_s": step_s / 2,
        "baseline_step_time_s": step_s * 2,
        "compute_s": 0.07,
        "communication_s": 0.03,
        "exposed_communication_s": 0.02,
        "confidence": "interpolated",
        "simulator_wall_s": 0.01,
        "warnings": [],
        "ranks": ranks,
        "compute_scale": 1.1,
        **changes,
    }


def summaries(**changes):
    return {"a-ddp2": summary(2, 0.121, **changes), "a-batch2": summary(1, 0.044)}


def test_values_by_hand():
    sessions = {
        "a": {
            "warnings": ["one core only: ranks share it"],
            "library": "gloo 2.13.0",
            "device_names": ["Example CPU", "Example CPU"],
        }
    }
    table = build_error_table(EXPERIMENTS, measurements(), summaries(warnings=["guessed"]), sessions).set_index(
        "experiment"
    )
    assert list(table.index) == ["a-ddp2", "a-batch2"]
    ddp = table.loc["a-ddp2"]
    # Slowest rank of each round: 105, 110, 130 ms.
    assert ddp["measured_s"] == pytest.approx(0.110)
    assert ddp["measured_low_s"] == pytest.approx(0.1075)
    assert ddp["measured_high_s"] == pytest.approx(0.120)
    assert (ddp["rounds"], ddp["ranks"], ddp["batch"]) == (3, 2, 8)
    assert ddp["relative_error"] == pytest.approx(0.1)
    assert ddp["trace_only_error"] == pytest.approx(0.0605 / 0.110 - 1)
    assert ddp["baseline_error"] == pytest.approx(1.2)
    assert (ddp["low_s"], ddp["high_s"]) == pytest.approx((0.1089, 0.1452))
    assert ddp["warnings"].split("\n") == ["guessed", "one core only: ranks share it"]
    assert ddp["source"] == "measured on this machine, gloo 2.13.0, Example CPU"
    # One rank: 40, 50, 60, 70 ms.
    single = table.loc["a-batch2"]
    assert single["measured_s"] == pytest.approx(0.055)
    assert single["relative_error"] == pytest.approx(-0.2)
    assert (single["measured_low_s"], single["measured_high_s"]) == pytest.approx((0.0475, 0.0625))


def test_step_of_one_rank_measured_among_the_experiments_comes_first():
    own = pd.DataFrame(rows("distributed", "single", 2, (80,), (90,)))
    frame = pd.concat([measurements(), own])
    table = build_error_table(EXPERIMENTS, frame, summaries())
    assert table["measured_s"].iloc[1] == pytest.approx(0.085)


def test_turns_of_one_round_are_steps_of_their_own():
    frame = measurements()
    ddp = frame[(frame["plan"] == "ddp2") & (frame["batch"] == 8)]
    table = build_error_table(EXPERIMENTS, pd.concat([frame, ddp.assign(step_ns=ddp["step_ns"] * 2)]), summaries())
    # 105, 110, 130 and twice as much: never the slower turn alone.
    assert table["measured_s"].iloc[0] == pytest.approx((0.130 + 0.210) / 2)
    assert table["rounds"].iloc[0] == 6


def test_table_follows_its_schema(tmp_path):
    path = tmp_path / "error.parquet"
    tables.write_table(build_error_table(EXPERIMENTS, measurements(), summaries()), "errors", path)
    assert len(tables.read_table(path, "errors")) == len(EXPERIMENTS)


def test_no_experiment_gives_an_empty_table():
    table = build_error_table(EXPERIMENTS.head(0), measurements(), {})
    assert table.empty and list(table.columns) == tables.ERRORS.names


@pytest.mark.parametrize("gone", ["a-ddp2", "a-batch2"])
def test_missing_simulation_is_named(gone):
    kept = {name: value for name, value in summaries().items() if name != gone}
    with pytest.raises(InputError, match=f"'{gone}' has no simulation"):
        build_error_table(EXPERIMENTS, measurements(), kept)


@pytest.mark.parametrize(("gone", "series"), [("a-ddp2", "distributed"), ("a-batch2", "single")])
def test_missing_measurement_is_named(gone, series):
    frame = measurements()
    with pytest.raises(InputError, match=f"'{gone}'.*has no measurement"):
        build_error_table(EXPERIMENTS, frame[frame["series"] != series], summaries())


def test_round_without_a_rank_is_refused():
    frame = measurements()
    lost = (frame["plan"] == "ddp2") & (frame["round"] == 1) & (frame["rank"] == 1)
    with pytest.raises(InputError, match="'a-ddp2': round 1 lacks"):
        build_error_table(EXPERIMENTS, frame[~lost], summaries())


def test_other_ranks_than_simulated_are_refused():
    frame = measurements()
    with pytest.raises(InputError, match="2 ranks simulated but 1 measured"):
        build_error_table(EXPERIMENTS, frame[frame["rank"] == 0], summaries())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"low_s": 0.2, "high_s": 0.1}, "interval ends before it begins"),
        ({"confidence": "sure"}, "confidence 'sure'"),
        ({"step_time_s": float("nan")}, "no number 'step_time_s'"),
        ({"step_time_s": 0.0}, "simulated_s is 0.0"),
        ({"exposed_communication_s": None}, "no number 'exposed_communication_s'"),
    ],
)
def test_senseless_summary_is_refused(change, words):
    with pytest.raises(InputError, match=words):
        build_error_table(EXPERIMENTS, measurements(), summaries(**change))


def test_doubled_and_unlisted_experiments_are_refused():
    twice = pd.concat([EXPERIMENTS, EXPERIMENTS.head(1)])
    with pytest.raises(InputError, match="'a-ddp2' is listed twice"):
        build_error_table(twice, measurements(), summaries())
    with pytest.raises(InputError, match="not listed as an experiment: a-batch2"):
        build_error_table(EXPERIMENTS.head(1), measurements(), summaries())
