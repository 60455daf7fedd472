import pandas as pd
import pytest
from trioflow import tables
from trioflow.report.sections import describe_path, sum_up_modules, sum_up_path


def make_path(*rows: tuple[int, str, str, str, str, float]) -> pd.DataFrame:
    """Rank, kind, name, phase, module and length [s] of tasks, one after the other."""
    found, begin_s = [], 0.0
    total_s = sum(row[-1] for row in rows)
    for number, (rank, kind, name, phase, module, lasts_s) in enumerate(rows):
        found.append(
            {
                "task_id": number,
                "rank": rank,
                "stream": "compute",
                "kind": kind,
                "name": name,
                "phase": phase,
                "module": module,
                "start_s": begin_s,
                "end_s": begin_s + lasts_s,
                "reason": "stream",
                "share": lasts_s / total_s,
            }
        )
        begin_s += lasts_s
    return pd.DataFrame(found, columns=tables.CRITICAL_PATH.names)


PATH = make_path(
    (0, "compute", "mm", "forward", "h.0.a", 1.0),
    (0, "host", "launch", "", "", 0.05),
    (0, "collective", "all_reduce of bucket 0", "backward", "", 3.0),
    (1, "collective", "all_reduce of bucket 1", "backward", "", 0.9),
    (1, "compute", "mm", "backward", "h.0.b", 4.0),
    (1, "recv", "recv", "forward", "", 0.5),
    (1, "memcpy", "copy", "backward", "h.1", 0.45),
)


def test_work_is_summed_by_kind_and_rank_and_communication_without_a_rank() -> None:
    found = tables.records(sum_up_path(PATH))
    assert [(row["work"], row["rank"], row["tasks"]) for row in found] == [
        ("backward compute", 1, 1),
        ("all_reduce", None, 2),
        ("forward compute", 0, 1),
        ("messages", None, 1),
        ("backward copies", 1, 1),
        ("host time", 0, 1),
    ]
    assert found[1]["time_s"] == pytest.approx(3.9) and found[1]["share"] == pytest.approx(
        3.9 / 9.9
    )
    assert sum(row["share"] for row in found) == pytest.approx(1.0)


def test_modules_are_told_apart_to_a_depth() -> None:
    found = sum_up_modules(PATH)
    assert found["module"].tolist() == ["h.0", "h.1"]
    assert found["time_s"].tolist() == pytest.approx([5.0, 0.45])
    assert sum_up_modules(PATH, depth=3)["module"].tolist() == ["h.0.b", "h.0.a", "h.1"]


def test_the_sentence_tells_the_large_parts_and_the_rest_together() -> None:
    assert describe_path(PATH) == (
        "What the step waits for, from its start to its end: 40 % backward compute of rank 1, "
        "39 % all_reduce, 10 % forward compute of rank 0, 5 % messages and 5 % backward copies of "
        "rank 1. This critical path passes from one rank to another once."
    )
    alone = make_path(*[(0, "compute", "mm", "forward", f"m{n}", 1.0) for n in range(3)])
    assert describe_path(alone).endswith("end: 100 % forward compute of rank 0.")
