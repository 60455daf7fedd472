"""Scenarios predicted as the command line predicts them, with nothing built or loaded twice."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import PlatformError, TraceError
from trioflow.cli import main
from trioflow.costmodel.choices import number_rows, rescale_distinct
from trioflow.costmodel.uncertainty import AnchoredModel, StepAnchor
from trioflow.sweeps.description import fill_values
from trioflow.sweeps.scenarios import INFEASIBLE, OK, OUT_OF_MEMORY, PredictionCache, draw_scales
from trioflow.trace.store import load_trace

TRACE = "gpt2-tiny-b8"
ONE = {"trace": TRACE, "platform": "cpu2-gloo"}


def predict(given: Mapping[str, Any], cache: PredictionCache | None = None) -> dict[str, Any]:
    return (cache or PredictionCache()).predict(0, fill_values({**ONE, **given}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 2}, ["--data-parallel", "2"]),
        ({"ranks": 2, "tensor": 2, "batch": 4}, ["--tensor-parallel", "2", "--batch", "4"]),
        (
            {"pipeline": 2, "schedule": "1f1b", "micro_batches": 4, "platform": "dgx-a100"},
            ["--pipeline-parallel", "2", "--schedule", "1f1b", "--micro-batches", "4"],
        ),
        ({"data": 4, "sharding": "fsdp", "platform": "dgx-h100"}, ["--data-parallel", "4", "--sharding", "fsdp"]),
    ],
)
def test_a_scenario_is_what_simulate_says(
    given: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    row = predict(given)
    platform = given.get("platform", "cpu2-gloo")
    assert main(["simulate", "gpt2-tiny-b8", "--platform", platform, "--json", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert row["status"] == OK and row["reason"] == ""
    for name in (
        "step_time_s",
        "low_s",
        "high_s",
        "busy_s",
        "compute_s",
        "exposed_communication_s",
        "ranks",
        "batch",
        "peak_memory_bytes",
        "confidence",
        "plan_text",
        "workload",
        "events",
    ):
        assert row[name] == told[name], name


def test_what_cannot_be_is_a_row_with_the_reason(tmp_path: Path) -> None:
    row = predict({"ranks": 3, "tensor": 3, "platform": "dgx-a100"})
    assert row["status"] == INFEASIBLE and "TP3 does not divide" in row["reason"]
    assert row["step_time_s"] is None and row["ranks"] == 3
    row = predict({"ranks": 4})
    assert row["status"] == INFEASIBLE and "cpu2-gloo has 2 devices" in row["reason"]
    assert "/" not in row["reason"], "paths differ from machine to machine"
    row = predict({"ranks": 2, "batch": 2000})
    assert row["status"] == OUT_OF_MEMORY and "do not fit" in row["reason"]
    assert row["step_time_s"] is None and row["peak_memory_bytes"] > row["memory_bytes"] > 0


def test_what_no_scenario_can_mend_stops_the_job(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace here"):
        predict({"trace": "own"}, PredictionCache({"own": [str(tmp_path)]}))
    with pytest.raises(PlatformError, match="no such file"):
        predict({"platform": "own"}, PredictionCache({}, {"own": str(tmp_path / "own.yaml")}))


def test_graphs_and_predictions_are_shared_where_they_are_equal() -> None:
    cache = PredictionCache(interval=False)
    given = {"ranks": 4, "platform": "dgx-a100"}
    rows = [predict({**given, "communication_scale": scale}, cache) for scale in (1.0, 1000.0, 1.0)]
    assert cache.graphs == 1
    assert rows[0] == rows[2] and rows[1]["step_time_s"] > rows[0]["step_time_s"]
    assert rows[0]["low_s"] is None, "no interval was asked for"
    predict({**given, "ranks": 8}, cache)
    assert cache.graphs == 2


def test_rows_do_not_depend_on_what_came_before() -> None:
    given = [{"ranks": 2, "tensor": 2}, {"ranks": 2}, {"ranks": 2, "batch": 4}, {"ranks": 1}]
    together = PredictionCache()
    ahead = [predict(one, together) for one in given]
    together = PredictionCache()
    back = [predict(one, together) for one in reversed(given)]
    alone = [predict(one) for one in given]
    assert ahead == back[::-1] == alone


def test_ranks_draw_their_factors_from_the_seed() -> None:
    assert draw_scales(fill_values({**ONE, "compute_scale": 3.0}), 4) == 3.0
    values = fill_values({**ONE, "rank_spread": 0.1, "seed": 5, "compute_scale": 2.0})
    few, many = draw_scales(values, 2), draw_scales(values, 4)
    assert isinstance(few, list) and isinstance(many, list)
    assert many[:2] == few and len(set(many)) == 4
    assert draw_scales({**values, "seed": 6}, 2) != few
    spread = {"ranks": 2, "rank_spread": 0.3, "seed": 1}
    rows = [predict(spread), predict(spread), predict({**spread, "seed": 2}), predict({"ranks": 2})]
    times = [row["step_time_s"] for row in rows]
    assert times[0] == times[1] and len(set(times)) == 3
    slow = {"ranks": 2, "slow_ranks": "1 1.5"}
    plain, scaled, drawn = (
        predict({**slow, **more})["compute_s"] for more in ({}, {"compute_scale": 2.0}, {"rank_spread": 0.1, "seed": 1})
    )
    assert scaled == pytest.approx(2 * plain) and drawn != plain, "a slow rank left out the other factors"


class Foreign:
    """A model that declares nothing, and may look at a frame as a whole."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        self.rows.append(len(operators))
        return pd.DataFrame({"time_s": 1.0 / len(operators), "extrapolated": False}, index=operators.index)


class Own(Foreign):
    by_row = True


def test_equal_rows_are_asked_for_once_where_a_model_declares_that_it_looks_at_rows() -> None:
    operators = load_trace("gpt2-b8").operator_columns
    for model, rows in ((Foreign(), operators.rows), (Own(), len(set(number_rows(operators))))):
        rescale_distinct(model, operators, operators.assign(flop=np.zeros(operators.rows)))  # type: ignore[arg-type]
        assert model.rows == [rows]
        declares = AnchoredModel(model, StepAnchor(0.0, 1.0)).by_row  # type: ignore[arg-type]
        assert declares == isinstance(model, Own)
