"""The table of speeds: its rows, its page, and that what is shown is what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from trioflow.report.readme import SPEED, markers
from trioflow.report.speeds import COLUMNS, read_speeds, write_speed_rows

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import peers  # noqa: E402
from graphs import RESNET50, VGG13, make_model_graph  # noqa: E402
from page import write_page  # noqa: E402
from rows import Peer, Row  # noqa: E402

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
        Row("rate", 2.5, "M events/s", 3.0), Row("long", 12.0, "min", 20.0),
    ]  # fmt: skip
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


@measured
def test_the_pages_show_what_was_measured():
    speeds = read_speeds(MEASURED)
    assert write_speed_rows(speeds) in (ROOT / "docs" / "bench.md").read_text()
    begin, end = markers(SPEED)
    shown = (ROOT / "README.md").read_text().partition(begin)[2].partition(end)[0].strip()
    headlines = speeds[speeds["headline"]]
    assert shown == write_speed_rows(headlines, details=False), "run `make publish`"
    assert len(headlines) <= 8
