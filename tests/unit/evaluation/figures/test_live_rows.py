"""Rows of runs of this machine, and their busy times."""

from pathlib import Path

import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow_evaluation.figures.points import (
    count_busy_s,
    list_live_rows,
    read_live_errors,
    use_busy_time,
)

from evaluation.figures.figure_cases import make_errors, make_plans, make_profile, write


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(make_errors(), "errors", tmp_path / "error.parquet")


def test_experiments_are_chosen_by_their_plan_and_none_is_left_out(file: str) -> None:
    errors = read_live_errors(file, make_plans(), ("DDP", "PP"))
    assert errors["experiment"].tolist() == ["replicas", "stages"]
    rows = list_live_rows(errors, "here", "{workload}, {batch}")
    assert [row["series"] for row in rows] == ["DDP", "PP, 4 chunks"]
    assert [row["micro_batches"] for row in rows] == [0, 4]
    assert rows[1]["evidence"] == "measured here" and rows[1]["label"] == "model, 4"
    assert (rows[1]["measured_s"], rows[1]["predicted_s"]) == (1.5, 3.0)


def test_a_kind_of_plan_that_was_not_measured_is_named(file: str) -> None:
    with pytest.raises(
        InputError, match="no measured experiment with a plan of the kind DataParallel"
    ):
        read_live_errors(file, make_plans(), ("DataParallel",))
    with pytest.raises(InputError, match="plans two-stages are not in the table of plans"):
        read_live_errors(file, [p for p in make_plans() if p["plan"] != "two-stages"], ("DDP",))


def test_busy_time_is_that_of_any_rank_without_the_host() -> None:
    profile = make_profile(("shards",))
    assert count_busy_s(profile) == 8.0, "0 to 4 and 5 to 9"
    assert count_busy_s(profile[profile["rank"] == 1]) == 6.0
    assert count_busy_s(profile[:0]) == 0.0


def test_busy_times_replace_step_times_and_keep_the_interval_in_proportion(file: str) -> None:
    rows = list_live_rows(read_live_errors(file, make_plans(), ("TP",)), "here")
    profile = make_profile(("shards",))
    timeline = pd.DataFrame(
        {"kind": ["compute", "host"], "start_s": [0.0, 1.1], "end_s": [1.1, 2.2]}
    )
    (row,) = use_busy_time(rows, profile, {"shards": timeline})
    assert row["quantity"] == "busy time"
    assert row["measured_s"] == pytest.approx(2.0 * 0.8)
    assert row["predicted_s"] == pytest.approx(1.1)
    assert row["high_s"] / row["predicted_s"] == pytest.approx(1.3)
    with pytest.raises(InputError, match="no predicted timeline of shards"):
        use_busy_time(rows, profile, {})
    with pytest.raises(InputError, match="no profile of a real step of shards"):
        use_busy_time(rows, profile[:0], {"shards": timeline})
