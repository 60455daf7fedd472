"""Recorded jobs: a task graph that repeats each step, and the spread that ships."""

import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import TableError
from trioflow.costmodel.spread import load_spreads
from trioflow_evaluation.drift.judge import (
    JOBS_FOLDER,
    fit_jobs,
    fit_spread,
    read_job,
    write_spreads,
)

from .recorded import write_job


def test_what_each_task_took_gives_every_step_again(tmp_path: Path) -> None:
    rows = write_job(tmp_path / "small.parquet")
    job = read_job(tmp_path / "small.parquet")
    wanted = (rows["start_ts"] + rows["duration"]).groupby(rows["step"]).max().to_numpy()
    assert job.step_s == pytest.approx(wanted)
    assert job.play(job.item_s) == pytest.approx(wanted, rel=1e-9)
    assert (job.name, job.ranks) == ("small", 4)


def test_exchanges_are_counted_from_their_last_member(tmp_path: Path) -> None:
    write_job(tmp_path / "small.parquet", slow={(1, 0): 5.0})
    times_s = read_job(tmp_path / "small.parquet").list_exchanges()["time_s"]
    assert times_s.between(0.009, 0.0111).all()


def test_a_slow_rank_is_found(tmp_path: Path) -> None:
    write_job(tmp_path / "small.parquet", slow={(1, 0): 5.0})
    job = read_job(tmp_path / "small.parquet")
    assert len(job.list_passes()) == 4 * 3 * 2 * 12
    assert job.list_passes(slice(0, 5))["step"].unique().tolist() == [10, 11, 12, 13, 14]
    _, slow = fit_spread(job.list_passes(), job.list_exchanges())
    assert slow in ([], [2])  # Of two replicas nobody can say which one is slow.


@pytest.mark.parametrize("damage", ["column", "operation", "time"])
def test_a_damaged_job_is_refused_by_its_file(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "small.parquet"
    rows = write_job(path, steps=3)
    if damage == "column":
        rows = rows.drop(columns="stage")
    elif damage == "operation":
        rows = rows.drop(index=7)
    else:
        rows.loc[4, "duration"] = np.nan
    pd.DataFrame(rows).to_parquet(path)
    with pytest.raises(TableError, match=r"small.parquet"):
        read_job(path)


def test_the_spread_that_ships_is_that_of_the_public_jobs(tmp_path: Path) -> None:
    mirror = os.environ.get("TRIOFLOW_DATA_MIRROR")
    if not mirror:
        pytest.skip("TRIOFLOW_DATA_MIRROR is not set: the public data is not at hand")
    known = [one for one in load_spreads() if one.device_kind == "gpu"]
    write_spreads(
        fit_jobs(Path(mirror) / JOBS_FOLDER / f"{one.job}.parquet" for one in known),
        tmp_path / "spread.tsv",
    )
    for one, found in zip(known, load_spreads(tmp_path / "spread.tsv"), strict=True):
        assert asdict(found.spread) == pytest.approx(asdict(one.spread), rel=2e-3)
        assert replace(found, spread=one.spread) == one
