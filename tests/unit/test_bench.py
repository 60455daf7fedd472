"""The table of speeds: its rows, its page, and that what is shown is what was measured."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trioflow.base.errors import InputError, TableError
from trioflow.base.provenance import read_json

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import bench_cluster  # noqa: E402
import bench_commands  # noqa: E402
import bench_engine  # noqa: E402
import bench_scale  # noqa: E402
import bench_timeline  # noqa: E402
import peers  # noqa: E402
import run_bench  # noqa: E402
import where  # noqa: E402
from graphs import RESNET50, VGG13, make_model_graph  # noqa: E402
from page import list_sections, write_page  # noqa: E402
from rows import Peer, Row  # noqa: E402
from speeds import COLUMNS, describe_speeds, read_speeds, write_speed_rows, write_speeds  # noqa: E402

MEASURED = ROOT / "docs" / "bench.tsv"
measured = pytest.mark.skipif(not MEASURED.exists(), reason="`make bench` was not run")


def test_a_row_compares_with_the_least_that_a_peer_took():
    row = Row("all-reduce", 0.5, peer=Peer("Other", 18.0, "18 to 29 s"), aim=1.0)
    assert row.ratio == 36.0
    record = row.as_record()
    assert tuple(record) == COLUMNS
    assert (record["peer"], record["peer_time"]) == ("Other", "18 to 29 s")
    assert Row("alone", 0.5).ratio is None and Row("alone", 0.5).as_record()["peer_time"] == ""
    assert Row("plain", 2.0, peer=Peer("Other", 3.0)).as_record()["peer_time"] == "3 s"


def test_the_page_shows_every_row_and_says_whose_times_it_cites(tmp_path):
    rows = [
        Row("first", 0.25, aim=0.5, detail="7 events", headline=True),
        Row("rate", 2.5, "M events/s", 3.0),
        Row("long", 12.0, "min", 20.0),
    ]
    write_page(rows, tmp_path)
    text = (tmp_path / "bench.md").read_text()
    assert "| first | **250 ms** (7 events) | 500 ms |" in text
    assert "| rate | 2.5 M events/s | 3 M events/s |" in text and "| long | **12 min** |" in text
    assert peers.SOURCE in text
    assert read_speeds(tmp_path / "bench.tsv")["headline"].tolist() == [True, False, False]


@pytest.mark.parametrize("model", [RESNET50, VGG13], ids=lambda model: model.name)
def test_generated_graphs_are_as_large_as_the_model(model):
    tasks = make_model_graph(model, 2).tasks
    own = tasks[tasks["rank"] == 1]
    assert (own["phase"] == "forward").sum() == model.operators
    assert (own["phase"] == "optimizer").sum() == model.parameters
    collectives = own[own["kind"] == "collective"]
    assert len(collectives) == model.buckets
    assert model.gradient_bytes - collectives["message_bytes"].sum() < model.buckets


EVENTS = {"summary": SimpleNamespace(events=10, simulator_wall_s=0.1, aggregated=1)}
WANTED = {
    "DDP of ResNet-50's size (generated) on 16 ranks, every message": (None, "TrioSim", 5.2),
    "DDP of ResNet-50's size (generated) on 32 ranks, every message": (None, "TrioSim", 28.5),
    "DDP of ResNet-50's size (generated) on 64 ranks, every message": (0.5, "TrioSim", 254.0),
    "DDP of ResNet-50's size (generated) on 64 ranks, 1 single events": (0.05, "TrioSim", 254.0),
    "DDP of VGG-13's size (generated) on 64 ranks, every message": (None, "TrioSim", 8.4),
    "one ring all-reduce on 64 ranks, every message": (None, "ASTRA-sim", 0.04),
    "one ring all-reduce on 256 ranks, every message": (None, "ASTRA-sim", 0.41),
    "one ring all-reduce on 1024 ranks, every message": (1.0, "ASTRA-sim", 8.2),
    "one ring all-reduce on 1024 ranks, 1 single events": (0.01, "ASTRA-sim", 8.2),
    "50 layers with a ring all-reduce each on 64 ranks, every message": (None, "ASTRA-sim", 1.06),
    "50 layers with a ring all-reduce each on 256 ranks, every message": (3.0, "ASTRA-sim", 18.0),
    "50 layers with a ring all-reduce each on 256 ranks, 1 single events": (0.1, "ASTRA-sim", 18.0),
    "50 layers with a ring all-reduce each on 1024 ranks, 1 single events": (0.5, "ASTRA-sim", 280.0),
}
"""Rows with their aim [s] and what another simulator took [s]."""


def run_idle(run: Callable[[], Any], *_: object, **__: object) -> float:
    run()
    return 0.25


def test_every_aim_and_every_other_simulator_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is simulated: the rows alone are looked at."""
    for name in ("make_model_graph", "make_data_parallel_graph", "make_switch", "make_random_messages"):
        monkeypatch.setattr(bench_engine, name, lambda *_: None)
    monkeypatch.setattr(bench_engine, "simulate", lambda *_, **__: SimpleNamespace(**EVENTS))
    monkeypatch.setattr(bench_engine, "time_s", run_idle)
    rows = {row.what: row for row in bench_engine.bench_messages()}
    found = {what: (row.aim, row.peer.name, row.peer.least_s) for what, row in rows.items() if row.peer}
    assert {what: found.get(what) for what in WANTED} == WANTED
    rates = [row for row in bench_engine.bench_engines() if row.aim]
    assert [(row.aim, row.unit, row.headline) for row in rates] == [(3.0, "M events/s", True)]
    told = dict.fromkeys(
        (
            "kept",
            "tasks",
            "events",
            "loop_s",
            "executed",
            "machine_s",
            "build_s",
            "simulate_s",
            "before_gb",
            "built_gb",
            "peak_gb",
        ),
        1,
    )
    scale = [
        row
        for data in bench_scale.DATA
        for row in bench_scale._tell({**told, "ranks": 64 * data, "folded": True}, data)
    ]
    assert {row.aim for row in scale if "simulate GPT-3 175B on 1024 ranks" in row.what} == {2.0}
    assert any("on 16384 ranks" in row.what for row in scale), "growth is shown up to there"
    tasks = bench_timeline.RANKS * (2 * bench_timeline.OPERATORS + bench_timeline.BUCKETS + bench_timeline.UPDATES)
    assert tasks >= 1e6 and bench_timeline.PERFETTO_S == 10.0
    headlines = [row.what for row in (*rows.values(), *rates, *scale) if row.headline]
    assert len(headlines) <= 4, "with the commands and the sweep at most 8"
    assert not any("GPT-3" in what for what in headlines), "quoted from cold, not warm"


def test_many_machines_take_waves_of_chunks_and_the_page_says_what_was_measured() -> None:
    costs = bench_cluster.Costs(2.0, 5.0, 0.01, 3.0, 0.4)
    fixed_s = 2.0 + bench_cluster.POLL_S + 5.0 + 3.0
    assert costs.predict_wall_s(0.01, 1000, 100) == fixed_s + 15.0
    assert costs.predict_wall_s(0.01, 1000, 99) == fixed_s + 2 * 15.0
    assert costs.share_lost(0.01, 1000) == pytest.approx(1 / 3)
    found = bench_cluster.Costs(**read_json(bench_cluster.COSTS))
    page = (ROOT / "docs/sweeps.md").read_text()
    assert bench_cluster.describe(found) in page
    assert found.share_lost(found.scenario_s, bench_cluster.choose_size(100_000)) < 0.1
    profile = (ROOT / "profiles/slurm/config.yaml").read_text()
    assert f"slurm-array-limit: {bench_cluster.ARRAY}\n" in profile


def test_a_cold_command_tells_its_own_time_and_memory() -> None:
    large = "x = bytearray(300_000_000); sum(range(3_000_000))"
    spent_s, peak_gb = bench_commands.run_cold([sys.executable, "-c", large])
    assert peak_gb >= 0.3 and spent_s > 0
    assert bench_commands.run_cold([sys.executable, "-c", "pass"])[1] < 0.3
    with pytest.raises(RuntimeError, match="status 3"):
        bench_commands.run_cold([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_command_that_misses_its_aim_says_where_its_time_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "imports" in where.describe_parts("show gpt2-tiny-b8")
    slow = bench_commands.Cold("show gpt2-tiny-b8", 1.0)
    monkeypatch.setattr(bench_commands, "COLD", (slow, slow))
    spent_s = iter((0.9, 1.1))
    monkeypatch.setattr(bench_commands, "run_cold", lambda _: (next(spent_s), 0.1))
    monkeypatch.setattr(bench_commands, "describe_parts", lambda words: f"parts of {words}")
    told = [row.detail for row in bench_commands.bench_cold()]
    assert told == ["", "", "parts of show gpt2-tiny-b8", ""]


def test_every_cold_command_has_a_row_of_time_and_one_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_commands, "run_cold", lambda command: (2.0, 0.5))
    monkeypatch.setattr(bench_commands, "describe_parts", str)
    rows = list(bench_commands.bench_cold())
    assert [row.unit for row in rows] == ["s", "GB"] * len(bench_commands.COLD)
    assert {row.aim for row in rows} == {None, 0.45, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 15.0}
    assert [row.aim for row in rows if row.headline] == [0.45, 1.5, 5.0]


def test_groups_run_alone_by_name_and_all_of_them_write_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"cold", "first-answer", "messages", "scale", "timeline", "search", "sweep"} <= set(run_bench.GROUPS)
    groups = {name: lambda name=name: iter([Row(f"row of {name}", 0.5)]) for name in run_bench.GROUPS}
    monkeypatch.setattr(run_bench, "GROUPS", groups)
    monkeypatch.setattr(run_bench, "DOCS", tmp_path)
    assert run_bench.main(["sweep"]) == 0
    assert capsys.readouterr().out.splitlines() == ["row of sweep: 0.5 s "]
    assert not list(tmp_path.iterdir())
    assert run_bench.main(["weather"]) == 2
    assert "no group 'weather'" in capsys.readouterr().err
    assert run_bench.main([]) == 0
    shown = (tmp_path / "bench.md").read_text()
    assert all(f"| row of {name} | 500 ms |" in shown for name in groups)
    assert len(read_speeds(tmp_path / "bench.tsv")) == len(groups)


@measured
def test_the_pages_show_what_was_measured():
    speeds = read_speeds(MEASURED)
    assert "\n".join(list_sections(speeds)) in (ROOT / "docs" / "bench.md").read_text()
    headlines = speeds[speeds["headline"]]
    assert 0 < len(headlines) <= 8
    (told,) = describe_speeds(speeds).lines
    assert f"- [{told[0]}](bench.md): {told[1]} <!-- speed -->" in (ROOT / "docs/accuracy.md").read_text(), (
        "run `make publish`"
    )


def speed(**fields):
    row = {
        "what": "answer",
        "value": 1.5,
        "unit": "s",
        "aim": 2.0,
        "detail": "many | events",
        "peer": "",
        "peer_time": "",
        "ratio": None,
        "headline": True,
    }
    return {**row, **fields}


def test_rows_of_speeds_have_aims_and_peers_and_readme_their_range(tmp_path):
    table = tmp_path / "bench.tsv"
    rows = [
        speed(),
        speed(what="slow", value=2.5),
        speed(what="hidden", ratio=9e9, headline=False),
        speed(what="rate", unit="M events/s", value=3.25, aim=3.0),
        speed(what="low rate", unit="M events/s", value=2.5, aim=3.0),
        speed(what="peer", value=0.004, aim=None, peer="Other", peer_time="18 to 29 s", ratio=4500.0),
        speed(what="near", value=9.0, aim=None, peer="Other", peer_time="18 s", ratio=2.0),
    ]
    write_speeds(rows, table)
    lines = write_speed_rows(read_speeds(table)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    nobody = "\u2013"
    assert cells[1] == ["slow", "2.5 s (many \\| events)", "2 s", nobody]
    assert [row[1].partition(" (")[0] for row in cells] == [
        "**1.5 s**",
        "2.5 s",
        "**1.5 s**",
        "**3.25 M events/s**",
        "2.5 M events/s",
        "4 ms",
        "9 s",
    ]
    assert cells[5][2:] == [nobody, "Other 18 to 29 s: 4500"]
    told = describe_speeds(read_speeds(table))
    assert told.page == "bench.md" and told.lines == [
        (
            "Speeds",
            "**3.25 M events/s** on one core, 2.5 M events/s on one core, Other take 2 to 4,500 times as long for the same graphs",
        )
    ]
    write_speeds([speed(headline=False)], table)
    with pytest.raises(InputError, match="no speed is a headline"):
        describe_speeds(read_speeds(table))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "its columns are not"),
        ("what\tvalue\n", "its columns are not"),
        ("\t".join(COLUMNS) + "\nx\tsoon\ts\t\t\t\t\t\t\n", "row 0, column value: 'soon' is not a number"),
        ("\t".join(COLUMNS) + "\nx\t\ts\t\t\t\t\t\t\n", "'' is not a number"),
    ],
)
def test_a_table_of_speeds_of_another_kind_is_refused(text, told, tmp_path):
    (tmp_path / "t.tsv").write_text(text)
    with pytest.raises(TableError, match=told):
        read_speeds(tmp_path / "t.tsv")
    with pytest.raises(TableError, match="no such file"):
        read_speeds(tmp_path / "none.tsv")
