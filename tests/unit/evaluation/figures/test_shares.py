"""Where a step goes: parts that add up, measured above predicted."""

from pathlib import Path

import pytest
from trioflow.base.errors import InputError
from trioflow_evaluation.figures.points import (
    list_live_shares,
    list_predicted_shares,
    measure_shares,
    read_live_errors,
)

from evaluation.figures.figure_cases import (
    make_errors,
    make_plans,
    make_profile,
    make_sweep,
    write,
)

PARTS = ("compute_share", "communication_share", "idle_share")


def test_the_rank_that_computes_most_is_told() -> None:
    assert measure_shares(make_profile(("one",))) == pytest.approx(
        {"compute_share": 0.6, "communication_share": 0.2, "idle_share": 0.2}
    )


def test_measured_stands_before_predicted(tmp_path: Path) -> None:
    file = write(make_errors(), "errors", tmp_path / "error.parquet")
    errors = read_live_errors(file, make_plans(), ("DDP", "PP"))
    rows = list_live_shares(errors, make_profile(("replicas", "stages")))
    assert [row["origin"] for row in rows] == ["measured", "predicted"] * 2
    assert rows[1]["compute_share"] == pytest.approx(0.6)
    assert rows[1]["communication_share"] == pytest.approx(0.1)
    assert all(sum(row[part] for part in PARTS) == pytest.approx(1) for row in rows)
    with pytest.raises(InputError, match="no profile of a real step of stages"):
        list_live_shares(errors, make_profile(("replicas",)))


def test_scenarios_without_a_step_have_no_parts(tmp_path: Path) -> None:
    file = write(make_sweep(), "sweep_results", tmp_path / "net.parquet")
    rows = list_predicted_shares([file])
    assert [row["case"] for row in rows] == ["net-b8", "net-b8"]
    assert rows[0]["idle_share"] == pytest.approx(0.2)
    assert {row["evidence"] for row in rows} == {"only simulated"}
    file = write(make_sweep()[2:], "sweep_results", tmp_path / "none.parquet")
    with pytest.raises(InputError, match="no predicted step"):
        list_predicted_shares([file])
