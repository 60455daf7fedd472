"""Operator times from elsewhere."""

import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.choices import apply_overrides, load_overrides

OPERATORS = pd.DataFrame(
    {
        "name": ["aten::linear", "aten::linear", "aten::gelu"],
        "phase": ["forward", "backward", "forward"],
        "input_shapes": [[[8, 4], [2, 4]], [[8, 2]], [[8, 2]]],
    },
    index=["a", "b", "c"],
)
TIMES = pd.DataFrame(
    {"time_s": [1.0, 2.0, 3.0], "low_s": 0.5, "high_s": 4.0, "extrapolated": True}, index=OPERATORS.index
)


def write(tmp_path, text):
    path = tmp_path / "times.csv"
    path.write_text(text)
    return path


def test_the_first_row_that_fits_is_taken(tmp_path):
    text = 'name,phase,input_shapes,time_us\nlinear,forward,"[[8, 4], [2, 4]]",5\naten::linear,,,7\n'
    found = apply_overrides(OPERATORS, TIMES, load_overrides(write(tmp_path, text)))
    assert found["time_s"].tolist() == pytest.approx([5e-6, 7e-6, 3.0])
    assert found["extrapolated"].tolist() == [False, False, True]
    assert (found["low_s"] == found["high_s"]).tolist() == [True, True, False]
    assert found.index.equals(TIMES.index)
    assert TIMES["time_s"].tolist() == [1.0, 2.0, 3.0], "the given table stays"


def test_rows_that_fit_nothing_are_named(tmp_path):
    text = 'name,input_shapes,time_us\ngelu,"[[9, 9]]",1\nlinear,,2\naten::tanh,,3\n'
    with pytest.raises(InputError) as caught:
        load_overrides(write(tmp_path, text)).match(OPERATORS)
    message = str(caught.value)
    assert "2 of 3 rows" in message
    assert "line 2: gelu [[9, 9]]" in message
    assert "line 4: aten::tanh" in message


def test_a_row_behind_a_wider_one_is_never_taken(tmp_path):
    with pytest.raises(InputError, match="line 3"):
        load_overrides(write(tmp_path, "name,phase,time_us\nlinear,,1\nlinear,backward,2\n")).match(OPERATORS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name\nlinear\n", "'time_us' is missing"),
        ("name,time_us,speed\nlinear,1,2\n", "'speed'"),
        ("name,time_us\nlinear,fast\n", "line 2, column time_us"),
        ("name,time_us\nlinear,-1\n", "column time_us"),
        ("name,time_us\nlinear,nan\n", "column time_us"),
        ("name,time_us\n,1\n", "column name"),
        ("name,time_us\nlinear,1,2\n", "line 2: 3 cells and 2 columns"),
        ("name,phase,time_us\nlinear,sideways,1\n", "column phase"),
        ('name,input_shapes,time_us\nlinear,"[8, x]",1\n', "column input_shapes"),
        ("name,time_us\n", "no row"),
        ("", "'name' is missing"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_overrides(write(tmp_path, text))


def test_a_missing_file(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_overrides(tmp_path / "none.csv")
