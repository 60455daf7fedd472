from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from trioflow.errors import TableError
from trioflow.studies.study_tables import HOP, WAFER, write_study_table
from trioflow.tables import FLOAT, TEXT

SCHEMA = pa.schema(
    [pa.field("name", TEXT, nullable=False), pa.field("time_s", FLOAT, nullable=False)]
)


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        ({"name": ["a"]}, "missing or unknown: time_s"),
        ({"name": ["a"], "time_s": [1.0], "more": [2]}, "missing or unknown: more"),
        ({"name": ["a"], "time_s": ["soon"]}, "not a table of the study"),
        ({"name": ["a"], "time_s": [float("nan")]}, "not a table of the study: .*time_s.* 1 null"),
    ],
)
def test_a_table_that_breaks_its_schema_is_not_written(
    tmp_path: Path, frame: dict[str, list[object]], told: str
) -> None:
    with pytest.raises(TableError, match=told):
        write_study_table(pd.DataFrame(frame), SCHEMA, tmp_path / "table.parquet", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("schema", [WAFER, HOP])
def test_every_column_says_what_it_means_and_its_unit(schema: pa.Schema) -> None:
    for field in schema:
        assert field.metadata[b"meaning"]
        suffix = {"_bytes_per_s": b"bytes/s", "samples_per_s": b"1/s", "_s": b"s"}
        unit = next((unit for end, unit in suffix.items() if field.name.endswith(end)), b"")
        assert field.metadata[b"unit"] == unit, field.name
