from __future__ import annotations

import pyarrow as pa
import pytest
from trioflow_evaluation.tables import HOP, WAFER


@pytest.mark.parametrize("schema", [WAFER, HOP])
def test_every_column_says_what_it_means_and_its_unit(schema: pa.Schema) -> None:
    for field in schema:
        assert field.metadata[b"meaning"]
        suffix = {"_bytes_per_s": b"bytes/s", "samples_per_s": b"1/s", "_s": b"s"}
        unit = next((unit for end, unit in suffix.items() if field.name.endswith(end)), b"")
        assert field.metadata[b"unit"] == unit, field.name
