"""The least width of a step's interval, from steps that were held out."""

import math
from pathlib import Path

import pytest
from scipy.special import stdtrit
from trioflow.costmodel import uncertainty
from trioflow.costmodel.uncertainty import (
    ALONE,
    ASSUMED_FACTOR,
    BATCH,
    COLLECTIVES,
    COVERAGE,
    PIPELINE,
    RESIDUAL_WAYS,
    StepResidual,
    least_half_width,
    load_residuals,
    student_quantile,
)
from trioflow_evaluation.published.judge import write_residuals


def use(monkeypatch: pytest.MonkeyPatch, *rows: StepResidual) -> None:
    uncertainty._half_of_way.cache_clear()
    monkeypatch.setattr(uncertainty, "load_residuals", lambda: rows)


@pytest.fixture(autouse=True)
def fresh():
    uncertainty._half_of_way.cache_clear()
    yield
    uncertainty._half_of_way.cache_clear()


def off(way: str, kind: str, workload: str, error: float, ranks: int = 2) -> StepResidual:
    return StepResidual(way, kind, workload, "case", ranks, error)


def test_every_way_has_residuals_of_several_workloads_with_their_provenance() -> None:
    assert {one.way for one in load_residuals()} == set(RESIDUAL_WAYS)
    for way in RESIDUAL_WAYS:
        rows = [one for one in load_residuals() if one.way == way]
        assert len({one.workload for one in rows}) >= 3
        assert all(one.case and -1 < one.error < math.inf for one in rows)
        assert all(0 < least_half_width([way], kind, "new", 2) < 0.5 for kind in ("cpu", "cuda"))


def test_a_recorded_step_has_no_least_width_and_ways_add_up() -> None:
    assert least_half_width([], "cuda", "new", 1) == 0.0
    alone, batch = (least_half_width([way], "cuda", "new") for way in (ALONE, BATCH))
    assert least_half_width([ALONE, BATCH], "cuda", "new") == pytest.approx(math.hypot(alone, batch))


def test_residuals_of_the_workload_itself_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    use(
        monkeypatch,
        *(off(BATCH, "cpu", name, error) for name, error in (("a", 0.01), ("b", 0.01), ("the-judged", 0.5))),
    )
    assert least_half_width([BATCH], "cpu", "the_judged") < 0.02
    assert least_half_width([BATCH], "cpu", "new") > 0.3
    use(monkeypatch, off(BATCH, "cpu", "the-judged", 0.5))
    assert least_half_width([BATCH], "cpu", "the-judged") == math.log(ASSUMED_FACTOR)


def test_a_kind_of_device_with_one_workload_is_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [off(COLLECTIVES, "cpu", "a", 0.2), off(COLLECTIVES, "cpu", "b", 0.2)]
    use(monkeypatch, *rows, off(COLLECTIVES, "cuda", "a", 0.01))
    assert least_half_width([COLLECTIVES], "cuda", "new", 2) > 0.1
    use(monkeypatch, *rows, *(off(COLLECTIVES, "cuda", name, 0.01) for name in "ab"))
    assert least_half_width([COLLECTIVES], "cuda", "new", 2) < 0.05


def test_more_ranks_than_measured_are_less_certain() -> None:
    few, most, more = (least_half_width([PIPELINE], "cuda", "new", n) for n in (2, 4, 16))
    assert few == most and more == pytest.approx(2 * most)


def test_residuals_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "residuals.tsv"
    write_residuals(load_residuals(), path)
    assert load_residuals(path) == load_residuals()


def test_students_quantiles_are_scipys() -> None:
    for freedom in range(1, 60):
        quantile = float(stdtrit(freedom, COVERAGE[1]))
        assert student_quantile(freedom) == pytest.approx(quantile, rel=1e-12)
