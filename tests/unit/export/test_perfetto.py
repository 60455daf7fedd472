import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from trioflow import tables
from trioflow.export import step_files
from trioflow.export.step_files import write_perfetto


def make_timeline(*rows: dict[str, Any]) -> pd.DataFrame:
    defaults = {"kind": "compute", "name": "work", "phase": "", "stream": "compute", "rank": 0}
    frame = pd.DataFrame(
        [{**defaults, "task_id": number, **row} for number, row in enumerate(rows)],
        columns=tables.TIMELINE.names,
    )
    return frame.convert_dtypes()


def pair(kinds: tuple[str, str], ranks: tuple[int, int]) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "kind": kind, "name": kind, "stream": kind, "start_s": 1e-6, "end_s": 3e-6,
         "match_id": 5, "message_bytes": 64}
        for kind, rank in zip(kinds, ranks, strict=True)
    ]  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def names(events: list[dict[str, Any]], what: str) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == what]


def test_slices_carry_what_the_task_is(tmp_path: Path) -> None:
    timeline = make_timeline(
        {"start_s": 0.001, "end_s": 0.0035, "phase": "forward", "micro_batch": 2, "stage": 1}
    )
    write_perfetto(timeline, tmp_path / "t.json")
    [task] = [event for event in read(tmp_path / "t.json") if event["ph"] == "X"]
    assert (task["ts"], task["dur"], task["name"], task["cat"]) == (1000, 2500, "work", "forward")
    assert task["args"] == {
        "task_id": 0, "kind": "compute", "phase": "forward", "micro_batch": 2, "stage": 1,
    }  # fmt: skip


def test_processes_are_ranks_and_threads_are_streams_in_order(tmp_path: Path) -> None:
    streams = ["zzz", "host", "compute", "communication", "copy", "send", "receive"]
    rows = [{"rank": 1, "stream": name, "start_s": 0.0, "end_s": 1.0} for name in streams]
    rows.append({"rank": 0, "start_s": 0.0, "end_s": 1.0})
    write_perfetto(make_timeline(*rows), tmp_path / "t.json", make_timeline(*rows[-1:]))
    events = read(tmp_path / "t.json")
    assert names(events, "process_name") == ["rank 0", "rank 1", "rank 0 (measured)"]
    assert names(events, "thread_name") == [
        "compute",
        "compute", "communication", "send", "receive", "copy", "host", "zzz",
        "compute",
    ]  # fmt: skip
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    by_name = {e["args"]["name"]: order[e["pid"]] for e in events if e["name"] == "process_name"}
    assert by_name["rank 0"] < by_name["rank 0 (measured)"] < by_name["rank 1"]
    threads = [event["tid"] for event in events if event["name"] == "thread_name"]
    assert len(set(threads)) == len(threads)
    assert not set(threads) & set(order), "a thread with its process's number is its main thread"


@pytest.mark.parametrize(
    ("kinds", "ranks", "first", "last"),
    [
        (("recv", "send"), (0, 1), "send", "recv"),
        (("send", "recv"), (0, 1), "send", "recv"),
        (("collective", "collective"), (1, 0), "collective", "collective"),
    ],
)
def test_arrows_lead_from_send_to_recv_and_along_the_ranks(
    kinds: tuple[str, str], ranks: tuple[int, int], first: str, last: str, tmp_path: Path
) -> None:
    write_perfetto(make_timeline(*pair(kinds, ranks)), tmp_path / "t.json")
    events = read(tmp_path / "t.json")
    owner = {event["tid"]: event for event in events if event["ph"] == "X"}
    [tail] = [event for event in events if event["ph"] == "s"]
    [head] = [event for event in events if event["ph"] == "f"]
    assert (tail["id"], tail["name"], tail["cat"]) == (head["id"], head["name"], head["cat"])
    assert (owner[tail["tid"]]["name"], owner[head["tid"]]["name"]) == (first, last)
    if first == "collective":
        assert tail["pid"] < head["pid"]
    for end in (tail, head):
        task = owner[end["tid"]]
        assert task["ts"] < end["ts"] < task["ts"] + task["dur"]


def test_arrows_of_simulated_and_measured_do_not_mix(tmp_path: Path) -> None:
    timeline = make_timeline(*pair(("send", "recv"), (0, 1)))
    write_perfetto(timeline, tmp_path / "t.json", timeline)
    arrows = [event for event in read(tmp_path / "t.json") if event["ph"] in "sf"]
    keys = [(event["cat"], event["name"], event["id"]) for event in arrows]
    assert len(arrows) == 4 and len(set(keys)) == 2


def test_touching_tasks_still_touch_after_rounding(tmp_path: Path) -> None:
    edges = [number * 1e-6 / 7 for number in range(50)]
    rows = [{"start_s": a, "end_s": b} for a, b in itertools.pairwise(edges)]
    write_perfetto(make_timeline(*rows), tmp_path / "t.json")
    tasks = [event for event in read(tmp_path / "t.json") if event["ph"] == "X"]
    ends = [round(1000 * task["ts"]) + round(1000 * task["dur"]) for task in tasks]
    assert ends[:-1] == [round(1000 * task["ts"]) for task in tasks[1:]]


def test_overlapping_measured_tasks_get_lanes_and_nested_ones_do_not(tmp_path: Path) -> None:
    rows = [
        {"start_s": 0.0, "end_s": 4.0}, {"start_s": 1.0, "end_s": 2.0}, {"start_s": 3.0, "end_s": 5.0},
        {"start_s": 5.0, "end_s": 6.0},
    ]  # fmt: skip
    write_perfetto(make_timeline({"start_s": 0.0, "end_s": 1.0}), tmp_path / "t.json",
                   make_timeline(*rows))  # fmt: skip
    events = read(tmp_path / "t.json")
    assert names(events, "thread_name") == ["compute", "compute", "compute 2"]
    lanes = [event["tid"] for event in events if event["ph"] == "X"][1:]
    assert lanes[0] == lanes[1] == lanes[3] != lanes[2]


def test_ranks_sort_as_texts_and_many_streams_keep_their_own_threads(tmp_path: Path) -> None:
    rows = [{"rank": rank, "start_s": 0.0, "end_s": 1.0} for rank in (2, 10)]
    rows += [{"rank": 2, "stream": f"send {n}", "start_s": 0.0, "end_s": 1.0} for n in range(1500)]
    write_perfetto(make_timeline(*rows), tmp_path / "t.json")
    events = read(tmp_path / "t.json")
    assert names(events, "process_name") == ["rank 02", "rank 10"]
    threads = [event["tid"] for event in events if event["name"] == "thread_name"]
    assert len(threads) == len(set(threads)) == 1502


def test_names_with_quotes_and_lines_stay_json(tmp_path: Path) -> None:
    told = 'say "x"\n\u00e9\\'
    write_perfetto(make_timeline({"start_s": 0.0, "end_s": 1.0, "name": told}), tmp_path / "t.json")
    assert [e["name"] for e in read(tmp_path / "t.json") if e["ph"] == "X"] == [told]


def test_more_events_than_a_piece_of_text_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_files, "CHUNK", 7)
    rows = [{"start_s": n * 1e-6, "end_s": n * 1e-6, "rank": n % 3, "match_id": n // 3,
             "kind": "collective"} for n in range(60)]  # fmt: skip
    timeline = make_timeline(*rows)
    write_perfetto(timeline, tmp_path / "t.json")
    events = read(tmp_path / "t.json")
    assert [e["args"]["task_id"] for e in events if e["ph"] == "X"] == list(range(60))
    arrows = [[e["id"] for e in events if e["ph"] == end] for end in "sf"]
    assert arrows[0] == arrows[1] == list(range(40)), "two arrows along each three members"


def test_curves_go_to_their_rank_or_to_the_links(tmp_path: Path) -> None:
    counters = pd.DataFrame({
        "rank": pd.array([None, None, 1], dtype="Int64"), "counter": ["a->b", "a->b", "memory"],
        "unit": ["bytes/s", "bytes/s", "bytes"], "time_s": [0.5e-6, 1e-6, 0.0],
        "value": [2.5e9, 0.0, 3.0],
    })  # fmt: skip
    rows = [{"rank": rank, "start_s": 0.0, "end_s": 1.0} for rank in (0, 1)]
    write_perfetto(make_timeline(*rows), tmp_path / "t.json", counters=counters)
    events = read(tmp_path / "t.json")
    names_of = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    curves = [(names_of[e["pid"]], e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert curves == [
        ("links", "a->b", 0.5, {"bytes/s": 2_500_000_000}), ("links", "a->b", 1, {"bytes/s": 0}),
        ("rank 1", "memory", 0, {"bytes": 3}),
    ]  # fmt: skip


def test_the_critical_path_is_a_process_of_its_own(tmp_path: Path) -> None:
    timeline = make_timeline({"start_s": 0.0, "end_s": 1e-6, "phase": "forward"})
    path = timeline.assign(module="h.0", waited_for=None, reason="start", share=1.0)
    write_perfetto(timeline, tmp_path / "t.json", critical_path=path)
    events = read(tmp_path / "t.json")
    assert names(events, "process_name") == ["critical path", "rank 0"]
    shown, task = [e for e in events if e["ph"] == "X"]
    assert (shown["name"], shown["ts"], shown["dur"]) == ("work, rank 0", 0, 1)
    assert shown["args"] == {"task_id": 0, "rank": 0, "module": "h.0", "reason": "start"}
    assert shown["pid"] != task["pid"]


def test_same_bytes_again_and_compressed_equals_plain(tmp_path: Path) -> None:
    timeline = make_timeline(*pair(("send", "recv"), (0, 1)))
    for name in ("a.json", "a.json.gz", "b.json.gz"):
        write_perfetto(timeline, tmp_path / name)
    packed = (tmp_path / "a.json.gz").read_bytes()
    assert packed == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "a.json").read_bytes()
    assert packed[4:8] == b"\0\0\0\0", "the time of writing is in the file"


def test_empty_timeline(tmp_path: Path) -> None:
    write_perfetto(tables.empty("timeline"), tmp_path / "t.json")
    assert read(tmp_path / "t.json") == []
