"""``trioflow export``, as a user types it."""

import argparse
import gzip
import json

import pytest
from oracles.chakra_reader import read_chakra_graph
from trioflow.base.errors import InputError, PlanError, TrioflowError
from trioflow.cli.export import add_export

TRACE, PLATFORM = "gpt2-tiny-b8", "cpu2-gloo"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words):
    parser = argparse.ArgumentParser()
    add_export(parser)
    options = parser.parse_args([*map(str, words)])
    options.run(options)


def test_chakra_files_without_the_host(tmp_path, capsys):
    words = ("chakra", "gpt2-b8", "--plan", "ddp", "--ranks", 2, "--platform", "dgx-h100")
    run(*words, "-o", "all/step")
    run(*words, "--device-only", "-o", "device/step")
    assert "the host is left out: a step that its launches hold back" in capsys.readouterr().err
    both = [read_chakra_graph(f"{folder}/step").tasks for folder in ("all", "device")]
    names = [tasks["name"][tasks["stream"] != "host"].tolist() for tasks in both]
    assert names[0] == names[1] and len(both[0]) > len(both[1]) == len(names[1])


def test_perfetto_is_simulates_timeline(tmp_path, capsys):
    words = (TRACE, "--plan", "tp", "--ranks", 2, "--platform", PLATFORM)
    run("perfetto", *words, "-o", "x.json.gz")
    content = json.loads(gzip.decompress((tmp_path / "x.json.gz").read_bytes()))
    events = content["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(process.values()) == ["critical path", "links", "rank 0", "rank 1"]
    slices = [e for e in events if e["ph"] == "X" and process[e["pid"]] != "critical path"]
    assert f"{len(slices)} tasks in x.json.gz" in capsys.readouterr().out
    from trioflow.cli.main import main

    assert main(["simulate", *map(str, words), "--timeline", "y.json.gz"]) == 0
    assert (tmp_path / "y.json.gz").read_bytes() == (tmp_path / "x.json.gz").read_bytes()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("perfetto", TRACE, "--platform", PLATFORM, "-o", "x.txt"), InputError),
        (("chakra", TRACE, "--platform", PLATFORM, "-o", "x/"), InputError),
        (("chakra", TRACE, "--plan", "ddp", "--platform", PLATFORM, "-o", "x"), PlanError),
        (("chakra", "none", "--platform", PLATFORM, "-o", "x"), TrioflowError),
    ],
)
def test_bad_words_are_refused_and_nothing_is_left(words, error, tmp_path):
    with pytest.raises(error) as raised:
        run(*words)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())
