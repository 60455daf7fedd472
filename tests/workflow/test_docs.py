"""Every command of the documents, run as it stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project_copy import ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = sorted(path for path in (ROOT / "docs").glob("*.md") if "```sh" in path.read_text())


def test_commands_are_marked_so_that_they_run() -> None:
    """A block without a language would be read by nobody: not coloured, not run."""
    for path in (ROOT / "docs").glob("*.md"):
        for language, text in FENCE.findall(path.read_text()):
            assert language, f"{path.name}: ```sh runs, ```text does not:\n{text}"
    assert len(RUN) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda path: path.stem)
def test_the_commands_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    """In a folder with the project's files, as a user's clone is."""
    for name in ("Snakefile", "config", "rules", "scripts", "envs", "profiles", "workflow"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    environment = {
        **os.environ, "TRIOFLOW": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    blocks = [text for language, text in FENCE.findall(page.read_text()) if language == "sh"]
    script = "set -euo pipefail\n" + "\n".join(blocks)
    if "trioflow retrieve" in script and not os.environ.get("TRIOFLOW_DATA_MIRROR"):
        pytest.skip("TRIOFLOW_DATA_MIRROR is not set: the public data is not at hand")
    run = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
