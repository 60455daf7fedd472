"""Numbers, facts and captions as the reader sees them."""

import pytest
from trioflow.report import pages


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1234, "+12.3 %"), (-0.05, "\u22125.0 %"), (-0.0001, "0.0 %"), (float("nan"), "\u2013")],
)
def test_signed_percent(value, text):
    assert pages.write_signed_percent(value) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0.0, "0 s"),
        (0.9996, "1 s"),
        (0.0123, "12.3 ms"),
        (3e-6, "3 \u00b5s"),
        (1234.0, "1.23e+03 s"),
    ],
)
def test_time(time_s, text):
    assert pages.write_time(time_s) == text


def test_range_writes_a_common_unit_once():
    assert pages.write_range(0.1, 0.12) == "100 to 120 ms"
    assert pages.write_range(0.9, 1.2) == "900 ms to 1.2 s"


def test_facts_take_their_unit_from_their_name():
    facts = {
        "environment": {"cpu_count": 2, "pinned": False},
        "step_s": 0.25,
        "size_bytes": 2_000_000,
        "drift": 0.061,
        "times_s": [0.1, 0.2, 0.3, 0.4, 0.5],
        "names": ["a", "b"],
        "devices": ["x", "x"],
        "none": None,
        "warnings": ["left out"],
    }
    assert pages.flatten_facts(facts, skip=("warnings",)) == {
        "environment.cpu_count": "2",
        "environment.pinned": "no",
        "step_s": "250 ms",
        "size_bytes": "2 MB",
        "drift": "6.1 %",
        "times_s": "100 ms to 500 ms (5 values)",
        "names": "a, b",
        "devices": "x (2 times)",
        "none": "\u2013",
    }


def test_lists_of_words():
    assert pages.join_words(["a"]) == "a"
    assert pages.join_words(["a", "b", "c"]) == "a, b and c"
    assert pages.count_words(1, "rank") == "1 rank"
