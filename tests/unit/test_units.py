import pytest
from trioflow.base.units import format_apart, format_bytes, format_count, format_time, ns_to_s, s_to_ns, us_to_ns


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0.0, "0 s"),
        (1.234, "1.23 s"),
        (0.99964, "1 s"),
        (0.0126, "12.6 ms"),
        (9.9996e-4, "1 ms"),
        (3e-6, "3 us"),
        (-0.002, "-2 ms"),
    ],
)
def test_times_are_readable(time_s, text):
    assert format_time(time_s) == text


def test_sizes_and_counts_have_decimal_prefixes():
    assert [format_bytes(b) for b in (12, 1_500, 25e6, 3e9)] == ["12 B", "1.5 kB", "25 MB", "3 GB"]
    assert [format_count(c) for c in (5, 34.1e9)] == ["5 ", "34.1 G"]


def test_conversions_round_trip():
    assert s_to_ns(ns_to_s(1_234_567_891)) == 1_234_567_891
    assert us_to_ns(0.5) == 500


def test_two_sizes_that_differ_read_differently():
    assert format_apart(80.04e9, 79.96e9) == ("80.04 GB", "79.96 GB")
    assert format_apart(80.1e9, 79.9e9) == ("80.1 GB", "79.9 GB")
    assert format_apart(1e9 + 1, 1e9) == ("1.000000001 GB", "1 GB")
    assert format_apart(5e9, 5e9) == ("5 GB", "5 GB")
