from pathlib import Path

import pytest
from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import Link
from trioflow.hardware.topologies.nccl_file import build_edge_list, read_edge_list

HEADER = "source,target,bandwidth_bytes_per_s,latency_s\n"


def write(folder: Path, text: str, name: str = "links.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_rows_become_directed_links_in_their_order(tmp_path: Path) -> None:
    text = HEADER + "rank1,core.A/0,2e9,0\nrank0,rank1,1e9,1e-6\n"
    assert read_edge_list(write(tmp_path, text)) == [
        Link("rank1", "core.A/0", 2e9, 0.0),
        Link("rank0", "rank1", 1e9, 1e-6),
    ]


def test_tabs_any_order_of_columns_comments_spaces_and_windows_files(tmp_path: Path) -> None:
    text = (
        "\ufeff# measured with care\r\n\r\nlatency_s\ttarget\tsource\tbandwidth_bytes_per_s\r\n"
        "1e-6\t spine \trank0\t5\r\n\r\n  # between\r\n2e-6\trank1\trank0\t6\r\n"
    )
    assert read_edge_list(write(tmp_path, text)) == [
        Link("rank0", "spine", 5.0, 1e-6),
        Link("rank0", "rank1", 6.0, 2e-6),
    ]


def test_both_ways_doubles_every_row(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "rank0,rank1,1e9,1e-6\n")
    one = Link("rank0", "rank1", 1e9, 1e-6)
    assert build_edge_list(2, edges_file=path, both_ways=True) == [
        one,
        Link("rank1", "rank0", 1e9, 1e-6),
    ]
    assert build_edge_list(2, edges_file=path) == [one]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no links"),
        (HEADER, "holds no links"),
        (
            "source,target,latency_s\na,b,1\n",
            "line 1: the column 'bandwidth_bytes_per_s' is missing",
        ),
        (
            "source,target,bandwidth,latency_s\na,b,1,1\n",
            "line 1: unknown column 'bandwidth'; did you mean bandwidth_bytes_per_s",
        ),
        ("source,source,target,bandwidth_bytes_per_s,latency_s\na,a,b,1,1\n", "stands twice"),
        (HEADER + "rank0,rank1,1e9\n", "line 2: 3 cells and 4 columns"),
        (
            HEADER + "\nrank0,rank1,fast,0\n",
            "line 3, column bandwidth_bytes_per_s: 'fast' is not a number; write a plain number",
        ),
        (
            HEADER + "rank0,rank1,0,0\n",
            "bandwidth_bytes_per_s: 0 is out of range; write more than 0",
        ),
        (
            HEADER + "rank0,rank1,1,-1e-6\n",
            "column latency_s: -1e-6 is out of range; write 0 or more",
        ),
        (HEADER + "rank0,rank1,inf,0\n", "inf is out of range"),
        (HEADER + "rank0,rank1,1,nan\n", "nan is out of range"),
        (HEADER + ",rank1,1,0\n", "line 2, column source: '' is not the name of a node"),
        (HEADER + "rank0,my switch,1,0\n", "'my switch' is not the name of a node"),
        (
            HEADER + "rank0,rank01,1,0\n",
            "column target: 'rank01' is not the name of a rank; write rank1",
        ),
        (HEADER + "rank0,rank0,1,0\n", "line 2: the link joins rank0 to itself"),
        (HEADER + "a,b,1,0\n# x\na,b,2,0\n", "line 4: a second link from a to b, after line 2"),
    ],
)
def test_errors_name_file_line_and_column(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(PlatformError) as caught:
        read_edge_list(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value) and caught.value.fix


def test_both_ways_and_a_row_back_contradict(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "a,b,1,0\nb,a,2,0\n")
    assert len(read_edge_list(path)) == 2
    with pytest.raises(PlatformError, match=r"line 3: a second link.*or leave both_ways out"):
        read_edge_list(path, both_ways=True)


@pytest.mark.parametrize(
    ("ranks", "text", "message"),
    [
        (2, "rank0,rank7,1,0\n", "rank7 is named and the platform has 2 ranks"),
        (3, "rank0,rank1,1,0\n", "no link reaches rank2; name the 3 ranks rank0 to rank2"),
        (2, "rank0,Rank1,1,0\n", "no link reaches rank1; did you mean Rank1"),
    ],
)
def test_the_ranks_are_those_of_the_platform(
    ranks: int, text: str, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, HEADER + text)
    with pytest.raises(PlatformError) as caught:
        build_edge_list(ranks, edges_file=path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match=r"none\.csv: no such file"):
        read_edge_list(tmp_path / "none.csv")
    with pytest.raises(PlatformError, match="cannot be read"):
        read_edge_list(tmp_path)
    path = tmp_path / "book.csv"
    path.write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(PlatformError, match="not UTF-8"):
        read_edge_list(path)
