from trioflow.report.build import (
    read_conformance,
    render_conformance,
    sum_up_comparisons,
    write_conformance,
)

ABOUT = {"compared": "messages", "plan": "2 data", "model": "gpt2", "against": "ranks over gloo"}


def found(count: int, equal: bool = True, ranks: str = "2") -> dict[str, object]:
    return {**ABOUT, "ranks": ranks, "count": count, "equal": equal}


def test_ranks_of_one_comparison_are_one_row_and_one_difference_spoils_it() -> None:
    rows = sum_up_comparisons([found(3), found(4), found(5, ranks="4"), found(1, False, "4")])
    assert [(row["ranks"], row["count"], row["equal"]) for row in rows] == [
        ("2", 7, True),
        ("4", 6, False),
    ]


def test_what_is_written_is_read_and_shown(tmp_path) -> None:
    path = tmp_path / "table.tsv"
    write_conformance([found(3), found(2, False, "4")], "2.13.0", "2026-11-22", path)
    frame = read_conformance(path)
    assert frame["count"].tolist() == [3, 2] and frame["equal"].tolist() == ["yes", "no"]
    text = render_conformance(frame)
    assert "1 of 2 comparisons with the real PyTorch (2.13.0, 2026-11-22)" in text
    assert "over 5 messages" in text and text.count("<tr>") == 3


def test_the_shipped_table_is_green() -> None:
    frame = read_conformance()
    assert set(frame["equal"]) == {"yes"}
    kinds = {"gpipe", "1f1b", "interleaved"}
    assert kinds <= set(frame["plan"]), "the schedules that are compared cell by cell"
    assert {"gpt2", "resnet18"} <= set(frame["model"])
