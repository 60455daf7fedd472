"""Recorded jobs: a task graph that repeats each step, and the spread that ships.

Judged: one half of a recorded job from the other, and what made its steps slow.
"""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from trioflow import tables
from trioflow.base.errors import TableError
from trioflow.costmodel.uncertainty import load_spreads
from trioflow_evaluation.drift.judge import (
    JOBS_FOLDER,
    JOINT,
    METHODS,
    PARTS,
    RANKS,
    STAGES,
    attribute_slowdown,
    describe_drift,
    draw_steps,
    fit_jobs,
    fit_spread,
    judge_drift,
    judge_halves,
    read_job,
    split_steps,
    write_spreads,
)
from trioflow_evaluation.tables import DRIFT_CAUSES, DRIFT_HALVES

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


def test_the_spread_that_ships_is_that_of_the_public_jobs(mirror: Path, tmp_path: Path) -> None:
    known = [one for one in load_spreads() if one.device_kind == "gpu"]
    write_spreads(fit_jobs(mirror / JOBS_FOLDER / f"{one.job}.parquet" for one in known), tmp_path / "spread.tsv")
    for one, found in zip(known, load_spreads(tmp_path / "spread.tsv"), strict=True):
        assert asdict(found.spread) == pytest.approx(asdict(one.spread), rel=2e-3)
        assert replace(found, spread=one.spread) == one


def read_small(folder: Path, slow: dict[tuple[int, int], float] | None = None, steps: int = 24):
    write_job(folder / "small.parquet", steps, slow)
    return read_job(folder / "small.parquet")


def test_every_half_is_predicted_in_every_way(tmp_path: Path) -> None:
    judged = judge_halves(read_small(tmp_path), draws=200)
    assert len(judged) == 4 * len(METHODS)
    error = judged["predicted_50_s"] / judged["measured_50_s"] - 1
    assert error[judged["method"] == JOINT].abs().max() < 0.05


def test_a_prediction_sees_its_half_alone(tmp_path: Path) -> None:
    job = read_small(tmp_path)
    seen = split_steps(len(job.step_s))["first half"]
    first = draw_steps(job, seen, 50)
    job.item_s[:, ~seen] *= 100
    job.step_s[~seen] *= 100
    assert np.array_equal(draw_steps(job, seen, 50), first)


@pytest.mark.parametrize(
    ("slow", "culprit"),
    [({(1, 0): 2.0, (1, 1): 2.0}, STAGES), ({(0, 1): 2.0}, RANKS)],
    ids=["a long stage", "a slow rank"],
)
def test_what_is_slow_is_named(tmp_path: Path, slow: dict[tuple[int, int], float], culprit: str) -> None:
    causes = attribute_slowdown(read_small(tmp_path, slow)).set_index("part")["share"]
    assert causes.sum() == pytest.approx(1.0)
    assert set(causes.index) == set(PARTS)
    assert causes.idxmax() == culprit


def test_the_page_and_its_tables(tmp_path: Path) -> None:
    write_job(tmp_path / "small.parquet", slow={(1, 0): 2.0, (1, 1): 2.0})
    halves, causes = tmp_path / "halves.parquet", tmp_path / "causes.parquet"
    judge_drift([tmp_path / "small.parquet"], halves, causes, tmp_path / "drift.html")
    judged = tables.read_table(halves, "drift_halves", DRIFT_HALVES)
    caused = tables.read_table(causes, "drift_causes", DRIFT_CAUSES)
    page = (tmp_path / "drift.html").read_text()
    assert all(name in page for name in ("second half", "Kolmogorov", "small.parquet", *PARTS))
    verdict = page.partition('class="verdict">')[2].partition("</p>")[0]
    assert verdict.count("(aim ") == 2, "what is aimed at stands beside what was reached"
    assert page.index("A step&#x27;s parts sampled together") < page.index("<summary>Other methods")
    text = describe_drift(judged, caused)
    assert text.count("\n| small |") == len(judged) + 1
