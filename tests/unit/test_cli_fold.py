"""``trioflow simulate`` executes identical ranks once, unless told not to."""

import json
from pathlib import Path
from typing import Any

import pytest
from trioflow import tables
from trioflow.cli.main import main

WORDS = [
    "simulate",
    "gpt2-tiny-b8",
    "--data-parallel",
    "2",
    "--tensor-parallel",
    "2",
    "--platform",
    "h100x8-nvlink",
]


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*WORDS, "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_folding_is_told_and_changes_no_figure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = [tmp_path / "once.parquet", tmp_path / "every.parquet"]
    once = ask(capsys, "--timeline", str(paths[0]))
    every = ask(capsys, "--timeline", str(paths[1]), "--no-fold")
    assert (once["folded"], once["unfolded_reason"]) == (True, "")
    assert (every["folded"], every["unfolded_reason"]) == (False, "not asked for")
    assert every["events"] > 3 * once["events"]
    apart = {"folded", "unfolded_reason", "events", "simulator_wall_s"}
    assert {k: v for k, v in once.items() if k not in apart} == {
        k: v for k, v in every.items() if k not in apart
    }
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert set(tables.read_table(paths[0], "timeline")["rank"]) == {0, 1, 2, 3}


def test_no_table_of_all_ranks_is_made_for_the_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioflow.parallel.folded.Fold.expand", None)
    assert ask(capsys)["folded"]
    assert main(WORDS) == 0
    assert "(identical ranks simulated once)" in capsys.readouterr().out
