"""The notebooks of the documents: whole, and with the outputs of a run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from project_copy import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
VARIES = re.compile(r"0x[0-9a-f]+|(?<= in )[\d.]+ [mu]?s\b")
"""Addresses and what the simulator took."""


def read_cells(path: Path, kind: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def read_outputs(path: Path) -> list[list[str]]:
    """Return what each cell printed or showed as text; of a figure, that there is one."""
    found = []
    for cell in read_cells(path, "code"):
        texts = []
        for output in cell["outputs"]:
            data = output.get("data", {})
            told = output.get("text") or data.get("text/html") or data.get("text/plain") or []
            texts.append(VARIES.sub("...", "".join(told)))
        found.append(texts)
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_was_executed_from_its_top_to_its_end(path: Path) -> None:
    code = read_cells(path, "code")
    assert 6 <= len(code) <= 12
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert not any(output.get("name") == "stderr" for cell in code for output in cell["outputs"])
    assert {output["output_type"] for cell in code for output in cell["outputs"]} <= {
        "stream",
        "execute_result",
        "display_data",
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_text_of_a_notebook_types_no_result_and_ends_with_what_to_believe(path: Path) -> None:
    texts = ["".join(cell["source"]) for cell in read_cells(path, "markdown")]
    for text in texts:
        assert not re.search(r"\d", text.replace("A100", "").replace("V100", "")), text
        assert max(map(len, text.splitlines())) <= 120
        for link in re.findall(r"\]\(([^)#]+)", text):
            assert (path.parent / link).is_file(), link
    assert "## What to believe" in "".join(texts[-2:]) and "](../" in texts[-1]


@pytest.mark.slow
def test_notebooks_say_what_they_say_when_they_are_executed(tmp_path: Path) -> None:
    if not os.environ.get("TRIOFLOW_DATA_MIRROR"):
        pytest.skip("TRIOFLOW_DATA_MIRROR is not set: the public data is not at hand")
    tools = tmp_path / "tools"
    words = ["--quiet", "--no-deps", "--target", tools, "--requirement", "envs/notebooks.lock"]
    install = subprocess.run(
        [sys.executable, "-m", "pip", "install", *words], cwd=ROOT, capture_output=True, text=True
    )
    if install.returncode:
        pytest.skip(f"nbclient cannot be installed: {install.stderr.strip()[-200:]}")
    run = subprocess.run(
        [sys.executable, ROOT / "docs/run_notebooks.py", tmp_path / "executed"],
        env={**os.environ, "PYTHONPATH": str(tools)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        found = read_outputs(tmp_path / "executed" / path.name)
        assert found == read_outputs(path), f"{path.name} is out of date: make notebooks"
