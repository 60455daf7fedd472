from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trioflow.campaign.compaction import decode_column, encode_column, from_columns, to_columns

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(0, 10**9).map(lambda n: n / 1000),
)
OBJECTS = st.dictionaries(st.sampled_from(["ts", "dur", "name", "tid"]), SCALARS)
ROWS = st.lists(
    st.one_of(
        OBJECTS,
        st.builds(lambda o, a: {**o, "args": a}, OBJECTS, st.one_of(OBJECTS, SCALARS)),
        SCALARS,
    )
)


def exact(value):
    """Text that tells 1, 1.0 and True apart, and the order of keys."""
    return json.dumps(value)


@given(ROWS)
def test_rows_come_back_exactly(rows):
    packed = json.loads(json.dumps(to_columns(rows)))
    back = from_columns(packed)
    assert len(back) == len(rows)
    for before, after in zip(rows, back, strict=True):
        assert before == after
        assert exact(before) == exact(after) or isinstance(before, dict)


@given(st.lists(SCALARS))
def test_columns_come_back_exactly(values):
    packed = json.loads(json.dumps(encode_column(values)))
    assert exact(decode_column(packed)) == exact(values)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([5, 6, 8], "differences"),
        ([0.5, 1.25, 4440220176.531], "thousandths"),
        ([0.1234567], "values"),
        ([1739425750467006.125], "values"),
        ([True, False], "values"),
        ([1, 2.0], "values"),
    ],
)
def test_only_what_is_exact_is_encoded(values, kind):
    assert list(encode_column(values)) == [kind]


def test_counting_numbers_become_small():
    assert encode_column([1000, 1001, 1003]) == {"differences": [1000, 1, 2]}
