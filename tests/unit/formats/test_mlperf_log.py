"""Logs of MLPerf Training as measured steps: lines as mlperf_logging writes them, with numbers of our own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from trioflow.base.errors import InputError
from trioflow.cli.main import main
from trioflow.formats.logs import read_logged_steps

ALONE = "gpt2-tiny-b8 --platform cpu2-gloo"
HEADER = "case\tsimulate\tmeasured_ms\tsource"


def line(key: str, time_ms: float = 0, value: Any = None, prefix: str = "0: ", **metadata: Any) -> str:
    said = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": "POINT_IN_TIME",
        "key": key,
        "value": value,
        "metadata": {"file": "train.py", "lineno": 1, **metadata},
    }
    return f"{prefix}:::MLLOG {json.dumps(said)}"


def stats(**value: float) -> str:
    return line("tracked_stats", value=value, step=1)


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "result_0.txt"
    path.write_text("\n".join(["some other output", *lines]) + "\n")
    return path


BATCH = line("global_batch_size", value=8)


def test_step_times_are_taken_as_they_stand_without_the_first(tmp_path: Path) -> None:
    times = [9.0, 0.5, 0.4, 0.6, 0.45]
    found = read_logged_steps(write(tmp_path, *(stats(train_step_time=t, loss=3.0) for t in times)))
    assert (found.median_s, found.values, found.way, found.batch) == (0.475, 4, "train_step_time", None)
    assert 0.4 <= found.low_s < found.median_s < found.high_s <= 0.6


def test_a_rate_counts_samples_of_the_global_batch(tmp_path: Path) -> None:
    found = read_logged_steps(write(tmp_path, BATCH, stats(throughput=16.0), stats(throughput=20.0)))
    assert (found.median_s, found.values, found.way, found.batch) == (0.45, 2, "throughput", 8)


def test_blocks_and_epochs_leave_evaluations_out(tmp_path: Path) -> None:
    block = [
        line("block_start", 0, samples_count=80),
        line("eval_start", 3000),
        line("eval_stop", 4000),
        line("block_stop", 6000, samples_count=160),
    ]
    found = read_logged_steps(write(tmp_path, BATCH, *block))
    assert (found.median_s, found.values, found.way) == (0.5, 1, "block")
    epochs = [
        line("train_samples", value=80),
        line("epoch_start", 0, epoch_num=1),
        line("epoch_stop", 4000, epoch_num=1),
    ]
    found = read_logged_steps(write(tmp_path, BATCH, *epochs))
    assert (found.median_s, found.way) == (0.4, "epoch")
    both = [line("block_start", 0, epoch_count=2), *epochs, line("block_stop", 9000)]
    found = read_logged_steps(write(tmp_path, BATCH, *both))
    assert (found.median_s, found.way) == (0.45, "block")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no line tells the time of a step; give a log with Megatron-LM"),
        ([line("run_start")], "no train_step_time, throughput, block or epoch gives a step, and no global_batch_size"),
        ([stats(throughput=3.0)], "and no global_batch_size"),
        ([BATCH, line("block_start", 0), line("block_stop", 5, samples_count=80)], "block or epoch gives a step;"),
        (
            [BATCH, line("global_batch_size", value=16)],
            "line 3: global_batch_size is 8 and 16; give the log of one run",
        ),
        ([stats(train_step_time=-1.0)], "line 2: train_step_time is -1.0; leave the line out"),
        ([stats(train_step_time=10**400)], "line 2: train_step_time is 1000"),
        ([BATCH, stats(throughput=1e-320)], "line 3: throughput is 1e-320; leave the line out"),
        ([line("run_start", 10**400)], "line 2: time_ms is 1000"),
        (
            [BATCH, line("block_start", 0, samples_count=-1.7e308), line("block_stop", 5, samples_count=1.7e308)],
            "block or epoch gives a step;",
        ),
        ([BATCH[:-9]], "line 2: not valid JSON"),
        (["0: :::MLLOG [1]"], "line 2: it has no key"),
        ([':::MLLOG {"key": "run_start", "time_ms": "now"}'], "line 2: time_ms is 'now'"),
        (
            [
                BATCH,
                stats(throughput=16000.0),
                line("block_start", 0, samples_count=0),
                line("block_stop", 5000, samples_count=80),
            ],
            "a step takes 500 us by throughput and 500 ms by block; write the measured step as a number",
        ),
    ],
)
def test_a_log_that_gives_no_step_is_refused(tmp_path: Path, lines: list[str], words: str) -> None:
    path = write(tmp_path, *lines)
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        read_logged_steps(path)
    assert str(caught.value).startswith(str(path))


def test_judge_takes_a_log_beside_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, BATCH, *(stats(train_step_time=t) for t in (9.0, 0.4, 0.42, 0.44)))
    cases = tmp_path / "cases.tsv"
    cases.write_text(f"{HEADER}\none\t{ALONE}\tresult_0.txt\tme\n")
    assert main(["judge", str(cases)]) == 0
    assert "measured one: median of 3 by train_step_time, quartiles 400 ms to 440 ms" in capsys.readouterr().out
    assert main(["judge", str(cases), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["cases"][0]
    assert row["measured_s"] == 0.42 and row["measured_steps"]["values"] == 3
    assert row["error"] == pytest.approx(row["predicted_s"] / 0.42 - 1)


def test_a_log_of_another_batch_is_not_judged_against(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, line("global_batch_size", value=16), stats(train_step_time=0.4))
    cases = tmp_path / "cases.tsv"
    cases.write_text(f"{HEADER}\none\t{ALONE}\tresult_0.txt\tme\n")
    assert main(["judge", str(cases)]) == 0
    assert "steps have 16 samples, the predicted one 8; write --batch 16" in capsys.readouterr().out
    cases.write_text(f"{HEADER}\none\t{ALONE}\tbroken.txt\tme\n")
    (tmp_path / "broken.txt").write_text("nothing")
    assert main(["judge", str(cases)]) == 2
    assert "broken.txt: no line tells the time of a step" in capsys.readouterr().err
