"""Times of the simulator: what is timed is what is predicted."""

from pathlib import Path

import pytest
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.sweeps.description import fill_values
from trioflow.sweeps.workshop import Workshop
from trioflow_evaluation.figures.build import time_simulations
from trioflow_evaluation.tables import SIMULATOR_TIMES

ONE = "description: one\nlist: [{trace: gpt2-tiny-b8, platform: dgx-a100, tensor: %d}]\n"


def test_every_step_is_timed_and_told_with_its_events(tmp_path: Path) -> None:
    description = tmp_path / "one.yaml"
    description.write_text(ONE % 2)
    time_simulations(description, tmp_path / "times.parquet", repeats=2)
    frame = tables.read_table(tmp_path / "times.parquet", "times", schema=SIMULATOR_TIMES)
    row = frame.iloc[0]
    given = fill_values({"trace": "gpt2-tiny-b8", "platform": "dgx-a100", "tensor": 2})
    expected = Workshop().predict(0, given)
    assert (row["step_s"], row["events"]) == (expected["step_time_s"], expected["events"])
    assert (row["family"], row["ranks"], row["repeats"]) == ("TP", 2, 2)
    assert 0 < row["wall_low_s"] <= row["wall_s"] <= row["wall_high_s"] and row["build_s"] > 0


def test_nothing_to_time_is_an_error(tmp_path: Path) -> None:
    description = tmp_path / "none.yaml"
    description.write_text(ONE % 3)
    with pytest.raises(InputError, match="no scenario has a step to time"):
        time_simulations(description, tmp_path / "times.parquet")
    assert not (tmp_path / "times.parquet").exists()
