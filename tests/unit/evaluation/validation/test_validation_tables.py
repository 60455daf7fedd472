"""Tables of scores and diagnoses: checked on writing and on reading."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from trioflow.base.errors import TableError
from trioflow.report.scores import CASE_SCORES, score_cases
from trioflow_evaluation.tables import (
    SCHEMAS,
    SUMMARY,
    read_validation_table,
    write_validation_table,
)

from evaluation.validation.test_validation_scores import ROWS


def make_summary() -> pd.DataFrame:
    return score_cases(ROWS.assign(group="g"), ["set", "quantity", "group", "model"])


def test_scores_come_back_as_they_went_in_with_their_inputs(tmp_path: Path) -> None:
    source, path = tmp_path / "cases.parquet", tmp_path / "out/scores.parquet"
    source.write_text("cases")
    write_validation_table(make_summary(), "summary", path, [source])
    pd.testing.assert_frame_equal(
        read_validation_table(path, "summary"), make_summary(), check_dtype=False
    )
    stamp = json.loads(pq.read_schema(path).metadata[b"trioflow"])
    assert list(stamp["inputs"]) == [f"{tmp_path.name}/cases.parquet"]


def test_every_column_has_a_meaning() -> None:
    for schema in SCHEMAS.values():
        for field in schema:
            assert field.metadata[b"meaning"], field.name
    assert SUMMARY.names[-len(CASE_SCORES) :] == list(CASE_SCORES)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (make_summary().drop(columns="cases"), "cases"),
        (make_summary().assign(more=1), "more"),
        (make_summary().assign(bias=None), "bias"),
        (make_summary().assign(cases="many"), "many"),
    ],
)
def test_a_table_that_breaks_its_schema_is_not_written(
    frame: pd.DataFrame, words: str, tmp_path: Path
) -> None:
    with pytest.raises(TableError, match=words):
        write_validation_table(frame, "summary", tmp_path / "scores.parquet")
    assert not list(tmp_path.iterdir())


def test_a_missing_broken_or_foreign_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scores.parquet"
    with pytest.raises(TableError, match="no such file"):
        read_validation_table(path, "summary")
    path.write_text("not Parquet")
    with pytest.raises(TableError, match="not a readable Parquet file"):
        read_validation_table(path, "summary")
    write_validation_table(make_summary(), "summary", path)
    with pytest.raises(TableError, match="not a diagnosed classes table"):
        read_validation_table(path, "diagnosed classes")
