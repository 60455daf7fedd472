"""``trioflow judge``: measured steps beside what ``simulate`` answers, refused ones kept, faults named by cell."""

import json
from pathlib import Path

import pytest
from trioflow.cli.main import main

ALONE = "gpt2-tiny-b8 --platform cpu2-gloo"
DDP = f"{ALONE} --plan ddp --ranks 2 --batch 16"


def write(folder: Path, *rows: str) -> Path:
    path = folder / "cases.tsv"
    path.write_text("\n".join(["case\tsimulate\tmeasured_ms\tsource", *rows]) + "\n")
    return path


def test_errors_and_intervals_are_those_of_simulate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    path = write(tmp_path, f"seven\t{ALONE} --tensor-parallel 7\t410\tme", f"one\t{ALONE}\t410\tme")
    assert main(["judge", str(path)]) == 0
    out = capsys.readouterr().out
    assert "2, 1 of them refused" in out
    assert "refused seven: " in out
    assert "7 ranks were asked for" in out
    assert (
        main(["judge", str(write(tmp_path, f"seven\t{ALONE} --tensor-parallel 7\t410\tme"))]) == 0
    )
    assert "1, 1 of them refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (f"a\t{ALONE} --rankz 2\t410\tme", "column simulate: unrecognized arguments: --rankz 2"),
        ("a\tgpt2-tiny-b8\t410\tme", "column simulate: the following arguments are required"),
        (f"a\t{ALONE} --help\t410\tme", "column simulate: unrecognized arguments: --help"),
        (f'a\t{ALONE} --by "rank\t410\tme', "column simulate: No closing quotation"),
        (f"a\t{ALONE}\tfast\tme", "column measured_ms: 'fast' is not a time; give the median"),
        (f"a\t{ALONE}\t0\tme", "column measured_ms: '0' is not a time"),
        (f"a\t{ALONE}\tinf\tme", "column measured_ms: 'inf' is not a time"),
        (f"a\t{ALONE}\t410\t-", "column source: it is empty; say who measured it"),
    ],
)
def test_a_wrong_cell_is_named_before_anything_is_predicted(
    row: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, f"good\t{ALONE}\t410\tme", row)
    assert main(["judge", str(path)]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert f"{path}, row 2 (line 3), {problem}" in output.err


def test_a_file_without_a_case_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["judge", str(write(tmp_path))]) == 2
    assert "no case stands in it; give a row for each measured step" in capsys.readouterr().err
