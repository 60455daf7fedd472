from __future__ import annotations

import os
import subprocess
import sys
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
    return subprocess.run(line, env=environment, capture_output=True, text=True)
