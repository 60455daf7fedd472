import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from warm_start import TORCH, warm_server

LIBRARY = Path(__file__).parents[3] / "workflow"
PATIENCE_S = 600
"""A call that takes longer hangs; how long one takes is up to the machine."""
CALL = "from trioflow.campaign.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
HEADER = [
    "workload",
    "family",
    "model",
    "batches",
    "image_size",
    "sequence",
    "hidden",
    "layers",
    "heads",
    "vocabulary",
    "causal",
    "optimizer",
    "precision",
]
TINY = ["tiny", "transformer", "gpt2", "4,2", "-", "16", "32", "2", "4", "128", "true", "adamw", "fp32"]
HUGE = ["huge", *TINY[1:3], "1", "-", "2048", "262144", "20", "64", "50257", "true", "adam", "bf16"]


def write_table(path: Path, *rows: list[str]) -> Path:
    path.write_text("".join("\t".join(row) + "\n" for row in (HEADER, *rows)))
    return path


@pytest.fixture
def table(tmp_path):
    """Table with one small workload."""
    return write_table(tmp_path / "workloads.tsv", TINY)


@dataclass(frozen=True)
class Call:
    """How a call of the campaign ended, and all that it wrote."""

    returncode: int
    said: str


def run_campaign(*words: object, code: str = "") -> Call:
    """Call the campaign in a process of its own, after some code that changes it."""
    with TemporaryDirectory() as folder:
        script = Path(folder) / "call.py"
        script.write_text(f"import sys\n{code}\n{CALL}")
        environment = {**os.environ, "PYTHONPATH": str(LIBRARY)}
        program = warm_server(TORCH).start(
            [str(script), *map(str, words)], Path(folder) / "said", Path.cwd(), environment
        )
        return Call(*program.finish(PATIENCE_S))
