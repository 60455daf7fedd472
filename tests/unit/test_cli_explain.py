"""``trioflow explain``: logs, tables, profiles and nccl-tests, and the platform file that makes predictions right."""

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


def test_a_log_makes_the_platform_of_the_next_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    rows = [f"{n}\t{' '.join(w)}\t{t}\tme" for n, (w, t) in enumerate(zip((ALONE, TWO), times, strict=True))]  # fmt: skip
    path.write_text("\n".join(["case\tsimulate\tmeasured_ms\tsource", *rows]) + "\n")
    judged, explained = run(capsys, "judge", str(path)), run(capsys, "explain", str(path))
    assert {key: explained[key] for key in judged} == judged
    assert explained["cause"] == ""
    assert explained["sentences"] == [
        "nothing deviates by more than the predictions themselves are known to miss"
    ]


def test_a_profile_tells_compute_from_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run(capsys, "explain", str(find_trace("gpt2-tiny-b8")), *ALONE)
    assert [row["row"] for row in answer["explained"]] == [
        "step of the profile",
        "compute of the profile",
    ]
    assert answer["cause"] == ""


NCCL = """# nThread 1 nGpus 8 minBytes 1048576 maxBytes 268435456
# nccl-tests version 2.13.11
# Using devices
{devices}
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
{rows}
"""


def test_nccl_tests_tell_the_network_between_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes, rows = [2**power for power in (20, 24, 28)], []
    for size in sizes:
        words = ("all_gather", "--bytes", str(size), "--ranks", "16", "--platform", "dgx-h100")
        time_us = run(capsys, "collective", *words)["time_s"] * 5e6
        rows.append(f"{size} {size // 4} float none -1 {time_us:.1f} 1 1 0 {time_us:.1f} 1 1 0")
    devices = "\n".join(
        f"#  Rank {n:2d} Group  0 Pid 1 on node{n // 8} device  {n % 8} [0x18] NVIDIA H100 80GB HBM3"
        for n in range(16)
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
