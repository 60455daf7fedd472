"""A job's log holds what the job and its processes print, and how it failed."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import subprocess, sys
from trioflow.base.errors import TableError
from trioflow.base.job_log import log_job
with log_job({log!r}):
    print("from Python")
    print("to standard error", file=sys.stderr)
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    {end}
print("after the block")
"""


def run(log: Path, end: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(log=str(log), end=end)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_everything_printed_lands_in_the_log_in_order(tmp_path: Path) -> None:
    log = tmp_path / "new folder" / "job.log"
    result = run(log, "pass")
    assert result.returncode == 0
    lines = log.read_text().splitlines()
    assert sorted(lines) == ["from Python", "from a child", "to standard error"]
    assert lines.index("from a child") == 2, "the parent's lines come before the child's"
    assert result.stdout == "after the block\n" and result.stderr == ""


def test_a_deliberate_error_is_one_sentence_in_the_log_and_on_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    result = run(log, "raise TableError('it is bent', file='t.tsv', place='row 3', fix='straighten it')")
    sentence = "TableError: t.tsv, row 3: it is bent; straighten it\n"
    assert result.returncode == 1
    assert result.stderr == sentence
    assert log.read_text().endswith(sentence)
    assert "Traceback" not in log.read_text()


def test_an_unexpected_error_leaves_its_traceback_in_both(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    result = run(log, "1 / 0")
    assert result.returncode == 1
    for text in (result.stderr, log.read_text()):
        assert "Traceback" in text and text.endswith("ZeroDivisionError: division by zero\n")


def test_an_older_log_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("old\n")
    run(log, "pass")
    assert "old" not in log.read_text()
