import pyarrow as pa
import pytest
from trioflow.report.errors import CASE_SCORES
from trioflow_evaluation.tables import HOP, SCHEMAS, SUMMARY, WAFER


@pytest.mark.parametrize("schema", [WAFER, HOP])
def test_every_column_says_what_it_means_and_its_unit(schema: pa.Schema) -> None:
    for field in schema:
        assert field.metadata[b"meaning"]
        suffix = {"_bytes_per_s": b"bytes/s", "samples_per_s": b"1/s", "_s": b"s"}
        unit = next((unit for end, unit in suffix.items() if field.name.endswith(end)), b"")
        assert field.metadata[b"unit"] == unit, field.name


def test_scores_and_diagnoses_say_what_they_mean() -> None:
    assert all(field.metadata[b"meaning"] for schema in SCHEMAS.values() for field in schema)
    assert SUMMARY.names[-len(CASE_SCORES) :] == list(CASE_SCORES)
