"""Curves beside a timeline: what a rank holds, when its device gets there.

What is written of a simulated step.
"""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from same_model import ProportionalModel
from trioflow import tables
from trioflow.costmodel.choices import DeviceTimes
from trioflow.engine.simulate import simulate
from trioflow.export import step_files
from trioflow.export.step_files import count_memory, write_perfetto, write_simulation
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.prediction.assembly import predict
from trioflow.trace.store import load_trace


def make_timeline(*rows: dict[str, Any]) -> pd.DataFrame:
    defaults = {"kind": "compute", "name": "work", "phase": "", "stream": "compute", "rank": 0}
    frame = pd.DataFrame(
        [{**defaults, "task_id": number, **row} for number, row in enumerate(rows)], columns=tables.TIMELINE.names
    )
    return frame.convert_dtypes()


def pair(kinds: tuple[str, str], ranks: tuple[int, int]) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "kind": kind,
            "name": kind,
            "stream": kind,
            "start_s": 1e-6,
            "end_s": 3e-6,
            "match_id": 5,
            "message_bytes": 64,
        }
        for kind, rank in zip(kinds, ranks, strict=True)
    ]


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def names(events: list[dict[str, Any]], what: str) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == what]


def test_slices_carry_what_the_task_is(tmp_path: Path) -> None:
    timeline = make_timeline({"start_s": 0.001, "end_s": 0.0035, "phase": "forward", "micro_batch": 2, "stage": 1})
    write_perfetto(timeline, tmp_path / "t.json")
    [task] = [event for event in read(tmp_path / "t.json") if event["ph"] == "X"]
    assert (task["ts"], task["dur"], task["name"], task["cat"]) == (1000, 2500, "work", "forward")
    assert task["args"] == {"task_id": 0, "kind": "compute", "phase": "forward", "micro_batch": 2, "stage": 1}


def test_processes_are_ranks_and_threads_are_streams_in_order(tmp_path: Path) -> None:
    streams = ["zzz", "host", "compute", "communication", "copy", "send", "receive"]
    rows = [{"rank": 1, "stream": name, "start_s": 0.0, "end_s": 1.0} for name in streams]
    rows.append({"rank": 0, "start_s": 0.0, "end_s": 1.0})
    write_perfetto(make_timeline(*rows), tmp_path / "t.json", make_timeline(*rows[-1:]))
    events = read(tmp_path / "t.json")
    assert names(events, "process_name") == ["rank 0", "rank 1", "rank 0 (measured)"]
    assert names(events, "thread_name") == [
        "compute",
        "compute",
        "communication",
        "send",
        "receive",
        "copy",
        "host",
        "zzz",
        "compute",
    ]
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
        {"start_s": 0.0, "end_s": 4.0},
        {"start_s": 1.0, "end_s": 2.0},
        {"start_s": 3.0, "end_s": 5.0},
        {"start_s": 5.0, "end_s": 6.0},
    ]
    write_perfetto(make_timeline({"start_s": 0.0, "end_s": 1.0}), tmp_path / "t.json", make_timeline(*rows))
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


def test_more_events_than_a_piece_of_text_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_files, "CHUNK", 7)
    rows = [
        {"start_s": n * 1e-6, "end_s": n * 1e-6, "rank": n % 3, "match_id": n // 3, "kind": "collective"}
        for n in range(60)
    ]
    timeline = make_timeline(*rows)
    write_perfetto(timeline, tmp_path / "t.json")
    events = read(tmp_path / "t.json")
    assert [e["args"]["task_id"] for e in events if e["ph"] == "X"] == list(range(60))
    arrows = [[e["id"] for e in events if e["ph"] == end] for end in "sf"]
    assert arrows[0] == arrows[1] == list(range(40)), "two arrows along each three members"


def test_curves_go_to_their_rank_or_to_the_links(tmp_path: Path) -> None:
    counters = pd.DataFrame(
        {
            "rank": pd.array([None, None, 1], dtype="Int64"),
            "counter": ["a->b", "a->b", "memory"],
            "unit": ["bytes/s", "bytes/s", "bytes"],
            "time_s": [0.5e-6, 1e-6, 0.0],
            "value": [2.5e9, 0.0, 3.0],
        }
    )
    rows = [{"rank": rank, "start_s": 0.0, "end_s": 1.0} for rank in (0, 1)]
    write_perfetto(make_timeline(*rows), tmp_path / "t.json", counters=counters)
    events = read(tmp_path / "t.json")
    names_of = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    curves = [(names_of[e["pid"]], e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert curves == [
        ("links", "a->b", 0.5, {"bytes/s": 2_500_000_000}),
        ("links", "a->b", 1, {"bytes/s": 0}),
        ("rank 1", "memory", 0, {"bytes": 3}),
    ]


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


def make_counted(*rows: tuple[int, str, float]) -> pd.DataFrame:
    """Return tasks by rank, kind and start."""
    return pd.DataFrame(rows, columns=["rank", "kind", "start_s"])


def read_counters(found: pd.DataFrame, rank: int) -> list[tuple[float, float]]:
    own = found[found["rank"] == rank]
    assert set(own["counter"]) <= {"memory"} and set(own["unit"]) <= {"bytes"}
    return list(zip(own["time_s"], own["value"], strict=True))


def test_a_change_is_shown_when_the_device_begins_its_task() -> None:
    timeline = make_counted(
        (1, "compute", 0.0), (0, "compute", 1.0), (0, "collective", 9.0), (0, "compute", 3.0), (1, "compute", 2.0)
    )
    curves = [
        {"ranks": [0], "places": [0, 1, 2], "bytes": [10, 20, 5]},
        {"ranks": [1], "places": [0, 1, 7], "bytes": [1, 2, 3]},
    ]
    found = count_memory(curves, timeline)
    # A collective that ends late does not hold back what computation does meanwhile.
    assert read_counters(found, 0) == [(1.0, 10.0), (1.0, 20.0), (3.0, 5.0)]
    assert read_counters(found, 1) == [(0.0, 1.0), (2.0, 2.0)], "there is no eighth task"
    assert count_memory([], timeline).empty


def test_long_curves_keep_the_most_of_each_stretch_and_the_end() -> None:
    held = np.random.default_rng(0).integers(1, 10**6, 997)
    timeline = make_counted(*((0, "compute", float(n)) for n in range(997)))
    curve = {"ranks": [0], "places": list(range(997)), "bytes": held.tolist()}
    found = count_memory([curve], timeline, most_points=50)
    assert len(found) == 50
    assert found["value"].max() == held.max() and found["value"].iloc[-1] == held[-1]
    times_s = found["time_s"].tolist()
    for begin, end, value in zip(times_s, [*times_s[1:], 997.0], found["value"], strict=True):
        assert value == held[int(begin) : int(end)].max()


@pytest.mark.parametrize("degrees", [{"data": 2}, {"pipeline": 2, "schedule": "1f1b"}, {"data": 2, "sharding": "fsdp"}])
def test_the_top_of_each_curve_is_the_peak_of_its_rank(degrees: dict[str, Any]) -> None:
    graph = extrapolate(load_trace("gpt2-tiny-b8"), make_plan(**degrees), ProportionalModel())
    result = simulate(graph, load_platform("h100x8-nvlink", 2))
    found = count_memory(graph.metadata.memory_curves, result.timeline)
    for entry in graph.metadata.memory:
        assert "curve" not in entry
        for rank in entry["ranks"]:
            own = found[found["rank"] == rank]
            assert own["value"].max() == pytest.approx(entry["peak_bytes"], abs=len(entry["categories"]))
            assert own["time_s"].is_monotonic_increasing
            assert own["time_s"].max() <= result.summary.step_time_s


LINKS = (Link("rank0", "rank1", 1e9, 0.0), Link("rank1", "rank0", 1e9, 0.0))
PLATFORM = Platform("two", Device("d", "cpu", 10**9, {}), 2, LINKS)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    trace, plan = load_trace("gpt2-tiny-b8"), make_plan(data=2)
    times = DeviceTimes([trace], ProportionalModel(), "proportional")
    prediction = predict(times, plan, PLATFORM, record_links=True)
    folder = tmp_path_factory.mktemp("simulated")
    write_simulation(prediction, folder)
    names = ("timeline", "critical_path", "links", "breakdown")
    frames = {name: tables.read_table(folder / f"{name}.parquet", name) for name in names}
    return trace, prediction.task_graph, prediction.simulated.result, folder, frames


def test_what_is_made_of_a_step_adds_up_to_it(written):
    trace, _, result, _, frames = written
    step_s = result.summary.step_time_s
    path = frames["critical_path"]
    assert path["share"].sum() == pytest.approx(1.0)
    assert path["end_s"].iloc[-1] == step_s and path["start_s"].iloc[0] == 0.0
    assert set(path["module"]) <= {*trace.operators["module"], ""} and (path["module"] != "").any()
    moved = dict(zip(frames["links"]["link"], frames["links"]["bytes"], strict=True))
    assert moved == pytest.approx(result.summary.link_bytes) and min(moved.values()) > 0
    breakdown = frames["breakdown"]
    assert breakdown["by"].unique().tolist() == ["rank", "stage", "module"]
    gradient_bytes = sum(entry["size_bytes"] for entry in trace.facts.gradients)
    for by, ranks in (("rank", 2), ("stage", 1), ("module", 1)):
        assert breakdown.loc[breakdown["by"] == by, "gradient_bytes"].sum() == ranks * gradient_bytes
    for row, told in zip(tables.records(breakdown), result.summary.per_rank, strict=False):
        for name in ("compute_s", "communication_s", "exposed_communication_s"):
            assert row[name] == pytest.approx(getattr(told, name))
        assert row["idle_s"] == pytest.approx(step_s - told.busy_s)


def test_the_perfetto_trace_holds_tasks_path_memory_and_rates(written):
    _, graph, result, folder, frames = written
    events = json.loads(gzip.decompress((folder / "perfetto.json.gz").read_bytes()))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(graph.tasks) + len(frames["critical_path"])
    curves = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in curves} == {"memory", *result.summary.link_bytes}
    held = [event["args"]["bytes"] for event in curves if event["name"] == "memory"]
    assert max(held) == graph.metadata.memory[0]["peak_bytes"]
    ranks = {event["pid"] for event in curves if event["name"] == "memory"}
    assert ranks < {event["pid"] for event in slices} and len(ranks) == 2
    # The area under a link's curve is what it moved.
    for link, moved in result.summary.link_bytes.items():
        own = [(e["ts"] / 1e6, e["args"]["bytes/s"]) for e in curves if e["name"] == link]
        area = sum(rate * (after - begin) for (begin, rate), (after, _) in itertools.pairwise(own))
        assert area == pytest.approx(moved, rel=1e-3)
