from pathlib import Path

import numpy as np
import pytest
from trioflow.base.errors import TableError
from trioflow_evaluation.vtrain.data import (
    COLUMNS,
    FILE,
    AllReduceCurves,
    read_all_reduces,
    read_iteration_times,
)

ROW = "8,32,4,1024,16,24,1024,2,2,2,219.732754"
CURVES = AllReduceCurves({2: np.array([1e6, 2e6])}, {2: np.array([1e-3, 3e-3])})


def write_rows(folder: Path, *rows: str, header: str = ",".join(COLUMNS)) -> Path:
    path = folder / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([header, *rows]).encode())
    return folder


def test_rows_are_read_in_seconds_behind_the_byte_order_mark(tmp_path: Path) -> None:
    rows = read_iteration_times(write_rows(tmp_path, ROW))
    assert rows.loc[0, "measured_s"] == pytest.approx(0.219732754, rel=1e-12)
    assert rows.loc[0, "gpus"] == 8 and rows.loc[0, "micro_batches"] == 4


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (ROW.replace("8,32", "4,32"), "number of GPUs"),
        (ROW.replace("8,32", "8,33"), "whole number of micro-batches"),
        (ROW.replace("16,24,1024", "16,23,1024"), "fill the stages"),
        (ROW.replace("219.732754", "0"), "not positive"),
    ],
)
def test_an_impossible_row_is_refused_with_its_number(
    tmp_path: Path, row: str, problem: str
) -> None:
    with pytest.raises(TableError, match=problem) as caught:
        read_iteration_times(write_rows(tmp_path, ROW, row))
    assert "row 1" in str(caught.value)


def test_a_missing_file_or_column_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="retrieve vtrain"):
        read_iteration_times(tmp_path)
    with pytest.raises(TableError, match="no column # layers"):
        read_iteration_times(
            write_rows(tmp_path, ROW, header=",".join(COLUMNS).replace("# layers", "depth"))
        )
    with pytest.raises(TableError, match="no such file"):
        read_all_reduces(tmp_path)


def test_all_reduces_lie_on_a_line_and_keep_the_last_bandwidth() -> None:
    times = CURVES.predict(2, np.array([0.5e6, 1.5e6, 8e6]))
    assert times == pytest.approx([1e-3, 2e-3, 12e-3])
    assert CURVES.predict(1, np.array([1e6])) == pytest.approx([0.0])


def test_more_ranks_than_measured_are_extrapolated_and_less_certain() -> None:
    most = max(CURVES.sizes_bytes)
    size = np.array([1e6])
    times = [float(CURVES.predict(ranks, size)[0]) for ranks in (most, 2 * most, 8 * most)]
    assert times[0] < times[1] < times[2]
    assert CURVES.widen(most) == CURVES.widen(2) == 1.0 < CURVES.widen(2 * most)
