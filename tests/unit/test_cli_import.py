"""``trioflow import`` as a user types it."""

import json
from dataclasses import replace

import pytest
from trioflow.cli.main import main
from trioflow.trace.facts import UNTIMED
from trioflow.trace.store import Trace, load_trace, save_trace


def test_a_profile_becomes_a_trace_that_can_be_shown_and_simulated(tmp_path, raw_cnn, capsys):
    files = [str(raw_cnn / name) for name in ("kineto.json.gz", "execution_trace.json.gz")]
    out = str(tmp_path / "trace")
    said = ["--gpu", "some CPU", "--batch", "4", "--precision", "fp32", "--workload", "mine"]
    assert main(["import", *files, *said, "-o", out]) == 0
    told = capsys.readouterr().out
    assert "mine, batch 4" in told
    assert f"next: trioflow show {out}" in told
    assert load_trace(out).facts.source == "Kineto and execution trace"
    assert main(["show", out, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["workload"] == "mine"
    assert shown["coverage"] > 0.5
    plan = ["--plan", "ddp", "--ranks", "2", "--platform", "cpu2-gloo", "--json"]
    assert main(["simulate", out, *plan]) == 0
    assert json.loads(capsys.readouterr().out)["communication_s"] > 0


def test_a_captured_folder_is_recognised(tmp_path, raw_cnn, cnn_trace):
    assert main(["import", str(raw_cnn), "-o", str(tmp_path / "t")]) == 0
    assert load_trace(tmp_path / "t").facts.source == "capture"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.json", "no such file or folder"),
        ("text.txt", "not a source that trioflow knows"),
        ("empty", "not a source that trioflow knows"),
        ("cut.json", "not a complete JSON file"),
    ],
)
def test_a_bad_source_is_one_sentence_and_status_2(tmp_path, capsys, source, words):
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.json").write_text('{"schemaVersion": 1, "traceEvents": [{"ph": "X", "ca')
    assert main(["import", str(tmp_path / source), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert source in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_trace_without_times_is_timed_by_the_platform_s_model(tmp_path, cnn_trace, capsys):
    facts = replace(cnn_trace.facts, step_time_source=UNTIMED, step_time_s=0.0)
    operators = cnn_trace.operators.assign(device_ns=0, cpu_ns=0)
    save_trace(Trace(operators, cnn_trace.tensors, facts), tmp_path / "t")
    words = ["simulate", str(tmp_path / "t"), "--plan", "ddp", "--ranks", "2"]
    assert main([*words, "--platform", "cpu2-gloo", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step_time_s"] > 0 and told["confidence"] == "extrapolated"
    assert any("operator times are predicted" in warning for warning in told["warnings"])
