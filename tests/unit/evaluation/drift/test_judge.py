"""Judged: one half of a recorded job from the other, and what made its steps slow."""

from pathlib import Path

import numpy as np
import pytest
from trioflow import tables
from trioflow_evaluation.drift.judge import (
    JOINT,
    PARTS,
    RANKS,
    STAGES,
    WAYS,
    attribute_slowdown,
    describe_drift,
    draw_steps,
    judge_drift,
    judge_halves,
    read_job,
    split_steps,
)
from trioflow_evaluation.tables import DRIFT_CAUSES, DRIFT_HALVES

from .recorded import write_job


def read_small(folder: Path, slow: dict[tuple[int, int], float] | None = None, steps: int = 24):
    write_job(folder / "small.parquet", steps, slow)
    return read_job(folder / "small.parquet")


def test_every_half_is_predicted_in_every_way(tmp_path: Path) -> None:
    judged = judge_halves(read_small(tmp_path), draws=200)
    assert len(judged) == 4 * len(WAYS)
    error = judged["predicted_50_s"] / judged["measured_50_s"] - 1
    assert error[judged["way"] == JOINT].abs().max() < 0.05


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
def test_what_is_slow_is_named(
    tmp_path: Path, slow: dict[tuple[int, int], float], culprit: str
) -> None:
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
    assert page.index("A step&#x27;s parts drawn together") < page.index("<summary>Other ways")
    text = describe_drift(judged, caused)
    assert text.count("\n| small |") == len(judged) + 1
