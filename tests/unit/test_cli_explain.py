"""``trioflow explain``: logs, tables, profiles and nccl-tests, and the platform file that makes predictions right.

``trioflow judge``: measured steps beside what ``simulate`` answers, refused ones kept, faults named by cell.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from trioflow.cli.main import main
from trioflow.trace.store import find_trace

ALONE = ["gpt2-tiny-b8", "--platform", "cpu2-gloo"]
TWO = [*ALONE, "--plan", "ddp", "--ranks", "2", "--batch", "16"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_log_makes_the_platform_of_the_next_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = run(capsys, "simulate", *TWO)["step_time_s"]
    (tmp_path / "run.log").write_text(f"step 1: {before * 3} s\n" * 5)
    platform = tmp_path / "fitted.yaml"
    words = (str(tmp_path / "run.log"), *TWO, "--output", str(platform))
    answer = run(capsys, "explain", *words)
    assert answer["cases"][0]["predicted_s"] == before
    assert answer["cause"]
    assert answer["explained"][0]["explained_s"] == pytest.approx(3 * before, rel=0.1)
    after = run(capsys, "simulate", *[w.replace("cpu2-gloo", str(platform)) for w in TWO])
    assert after["step_time_s"] == pytest.approx(answer["explained"][0]["explained_s"], rel=5e-3)
    assert main(["explain", *words]) == 0
    shown = capsys.readouterr().out
    assert answer["sentences"][0] in shown
    assert f"written: {platform}" in shown


def test_a_table_is_judged_and_explained_and_judge_is_its_first_half(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [run(capsys, "simulate", *words)["step_time_s"] * 1e3 for words in (ALONE, TWO)]
    path = tmp_path / "cases.tsv"
    rows = [f"{n}\t{' '.join(w)}\t{t}\tme" for n, (w, t) in enumerate(zip((ALONE, TWO), times, strict=True))]
    path.write_text("\n".join(["case\tsimulate\tmeasured_ms\tsource", *rows]) + "\n")
    judged, explained = run(capsys, "judge", str(path)), run(capsys, "explain", str(path))
    assert {key: explained[key] for key in judged} == judged
    assert explained["cause"] == ""
    assert explained["sentences"] == ["nothing deviates by more than the predictions themselves are known to miss"]


def test_a_profile_tells_compute_from_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run(capsys, "explain", str(find_trace("gpt2-tiny-b8")), *ALONE)
    assert [row["row"] for row in answer["explained"]] == ["step of the profile", "compute of the profile"]
    assert answer["cause"] == ""


NCCL = """# nThread 1 nGpus 8 minBytes 1048576 maxBytes 268435456
# nccl-tests version 2.13.11
# Using devices
{devices}
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
{rows}
"""


def test_nccl_tests_tell_the_network_between_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes, rows = [2**power for power in (20, 24, 28)], []
    for size in sizes:
        words = ("all_gather", "--bytes", str(size), "--ranks", "16", "--platform", "dgx-h100")
        time_us = run(capsys, "collective", *words)["time_s"] * 5e6
        rows.append(f"{size} {size // 4} float none -1 {time_us:.1f} 1 1 0 {time_us:.1f} 1 1 0")
    devices = "\n".join(
        f"#  Rank {n:2d} Group  0 Pid 1 on node{n // 8} device  {n % 8} [0x18] NVIDIA H100 80GB HBM3" for n in range(16)
    )
    path = tmp_path / "all_gather_perf.log"
    path.write_text(NCCL.format(devices=devices, rows="\n".join(rows)))
    answer = run(capsys, "explain", str(path), "--platform", "dgx-h100")
    assert answer["cause"] == "network"
    assert answer["sentences"][0].startswith("between nodes this job moved ")
    for row in answer["explained"]:
        assert row["explained_s"] == pytest.approx(row["measured_s"], rel=0.3)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["{log}"], "the run's machine is missing; add --platform NAME|FILE"),
        (["{table}", *ALONE], "the table's rows hold what was run; leave the rest out"),
        (["{log}", *ALONE, "--output", "fit.json"], "--output fit.json: unknown ending"),
        (["{log}", "--platform", "cpu2-gloo"], "no TRACE was given"),
        (["{nothing}", *ALONE], "no such file"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    (tmp_path / "log").write_text("step 1: 2 s\n")
    (tmp_path / "table").write_text("case\tsimulate\tmeasured_ms\tsource\n")
    paths = {name: tmp_path / name for name in ("log", "table", "nothing")}
    assert main(["explain", *(word.format(**paths) for word in words)]) == 2
    assert problem in capsys.readouterr().err


ONE_RANK = "gpt2-tiny-b8 --platform cpu2-gloo"
DDP = f"{ONE_RANK} --plan ddp --ranks 2 --batch 16"


def write(folder: Path, *rows: str) -> Path:
    path = folder / "cases.tsv"
    path.write_text("\n".join(["case\tsimulate\tmeasured_ms\tsource", *rows]) + "\n")
    return path


def test_errors_and_intervals_are_those_of_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *DDP.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    inside, outside = answer["step_time_s"] * 1e3, answer["high_s"] * 2e3
    path = write(tmp_path, f"in\t{DDP}\t{inside}\tme", f"out\t{DDP}\t{outside}\tme")
    assert main(["judge", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["cases"]
    assert [first[key] for key in ("predicted_s", "low_s", "high_s", "confidence")] == [
        answer[key] for key in ("step_time_s", "low_s", "high_s", "confidence")
    ]
    assert first["error"] == pytest.approx(0, abs=1e-12)
    assert second["error"] == pytest.approx(inside / outside - 1)
    assert (first["covered"], second["covered"]) == (True, False)
    summary = found["summary"]
    assert (summary["cases"], summary["refused"], summary["coverage"]) == (2, 0, 0.5)
    assert summary["worst_case"] == "out"
    assert summary["mean_absolute_error"] == pytest.approx(-second["error"] / 2)
    assert summary["bias"] == pytest.approx(second["error"] / 2)


def test_a_refused_case_keeps_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, f"seven\t{ONE_RANK} --tensor-parallel 7\t410\tme", f"one\t{ONE_RANK}\t410\tme")
    assert main(["judge", str(path)]) == 0
    out = capsys.readouterr().out
    assert "2, 1 of them refused" in out
    assert "refused seven: " in out
    assert "7 ranks were asked for" in out
    assert main(["judge", str(write(tmp_path, f"seven\t{ONE_RANK} --tensor-parallel 7\t410\tme"))]) == 0
    assert "1, 1 of them refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (f"a\t{ONE_RANK} --rankz 2\t410\tme", "column simulate: unrecognized arguments: --rankz 2"),
        ("a\tgpt2-tiny-b8\t410\tme", "column simulate: no GPUs were given"),
        (f"a\t{ONE_RANK} --help\t410\tme", "column simulate: unrecognized arguments: --help"),
        (f'a\t{ONE_RANK} --by "rank\t410\tme', "column simulate: No closing quotation"),
        (f"a\t{ONE_RANK}\tfast\tme", "column measured_ms: 'fast' is not a time; give the median"),
        (f"a\t{ONE_RANK}\t0\tme", "column measured_ms: '0' is not a time"),
        (f"a\t{ONE_RANK}\tinf\tme", "column measured_ms: 'inf' is not a time"),
        (f"a\t{ONE_RANK}\t410\t-", "column source: it is empty; say who measured it"),
    ],
)
def test_a_wrong_cell_is_named_before_anything_is_predicted(
    row: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, f"good\t{ONE_RANK}\t410\tme", row)
    assert main(["judge", str(path)]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert f"{path}, row 2 (line 3), {problem}" in output.err


def test_a_file_without_a_case_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", str(write(tmp_path))]) == 2
    assert "no case stands in it; give a row for each measured step" in capsys.readouterr().err
