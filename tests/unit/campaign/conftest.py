from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[3] / "workflow"
HEADER = [
    "workload", "family", "model", "batches", "image_size", "sequence", "hidden", "layers", "heads",
    "vocabulary", "causal", "optimizer", "precision",
]  # fmt: skip
TINY = [
    "tiny", "transformer", "gpt2", "4,2", "-", "16", "32", "2", "4", "128", "true", "adamw", "fp32",
]  # fmt: skip
HUGE = ["huge", *TINY[1:3], "1", "-", "2048", "262144", "20", "64", "50257", "true", "adam", "bf16"]


def write_table(path: Path, *rows: list[str]) -> Path:
    path.write_text("".join("\t".join(row) + "\n" for row in (HEADER, *rows)))
    return path


@pytest.fixture
def table(tmp_path):
    """Table with one small workload."""
    return write_table(tmp_path / "workloads.tsv", TINY)


def command(*words: object) -> tuple[list[str], dict[str, str]]:
    environment = {**os.environ, "PYTHONPATH": str(LIBRARY)}
    return [sys.executable, "-m", "trioflow.campaign", *map(str, words)], environment


def run_campaign(*words: object) -> subprocess.CompletedProcess[str]:
    line, environment = command(*words)
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)


def stop_when(line_starts: str, *words: object) -> tuple[int, str]:
    """Start a campaign and terminate it as soon as a line of its output starts like this."""
    line, environment = command(*words)
    with subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        said = ""
        assert process.stdout is not None
        for text in process.stdout:
            said += text
            if text.startswith(line_starts):
                time.sleep(0.3)  # into the item after this one
                process.send_signal(signal.SIGTERM)
                break
        said += process.stdout.read()
        return process.wait(60), said
