"""Every command of the documents, run as it stands.

The notebooks of the documents: whole, and with the outputs of a run.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from project_copy import ROOT
from warm_start import SNAKEMAKE, TORCH, warm_server

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATIENCE_S = 900
RUN = sorted(path for path in (ROOT / "docs").glob("*.md") if "```sh" in path.read_text())
COLD = ("my_cluster", "data")
"""Pages whose commands start their own interpreters; those of the others are forked."""
WARM = {"trioflow": TORCH, "snakemake": SNAKEMAKE}
ASK = """\
#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as relay:
    relay.connect({address!r})
    name = os.path.basename(sys.argv[0])
    order = [name, sys.argv[1:], os.getcwd(), dict(os.environ), os.getpid()]
    relay.sendall(json.dumps(order).encode() + b"\\n")
    sys.exit(int(relay.makefile().readline()))
"""


@contextmanager
def warm_commands(folder: Path) -> Iterator[Path]:
    """Yield a folder with commands of these names, which ask this process to fork the real ones."""
    address = f"\0{folder}"[:100]
    folder.mkdir()
    for name in WARM:
        (folder / name).write_text(ASK.format(python=sys.executable, address=address))
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        server = Thread(target=serve, args=(listener,))
        server.start()
        try:
            yield folder
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # which ends its wait for the next one
            server.join()


def serve(listener: socket.socket) -> None:
    """Fork the programs that are asked for, one after the other, until the listener is shut down."""
    while True:
        try:
            asker, _ = listener.accept()
        except OSError:
            return
        with asker, asker.makefile() as order:
            name, words, folder, environment, process = json.loads(order.readline())
            output = Path(f"/proc/{process}/fd/1")
            program = warm_server(WARM[name]).start(["-m", name, *words], output, folder, environment)
            status = program.server.wait_for(program.number, PATIENCE_S)
            asker.sendall(f"{1 if status is None else status}\n".encode())


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
    blocks = [text for language, text in FENCE.findall(page.read_text()) if language == "sh"]
    script = "set -euo pipefail\n" + "\n".join(blocks)
    if "trioflow retrieve" in script and not os.environ.get("TRIOFLOW_DATA_MIRROR"):
        pytest.skip("TRIOFLOW_DATA_MIRROR is not set: the public data is not at hand")
    with warm_commands(tmp_path / "warm") as warm:
        paths = [*([] if page.stem in COLD else [warm]), Path(sys.executable).parent]
        path = os.pathsep.join([*map(str, paths), os.environ["PATH"]])
        run = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env={**os.environ, "TRIOFLOW": str(ROOT), "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
    assert run.returncode == 0, run.stdout[-4000:]


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
    install = subprocess.run([sys.executable, "-m", "pip", "install", *words], cwd=ROOT, capture_output=True, text=True)
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
