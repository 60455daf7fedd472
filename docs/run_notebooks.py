"""Execute the notebooks of docs/notebooks, in place or into a folder: `make notebooks` does the first.

Usage: run_notebooks.py [FOLDER]. Each runs in an empty folder of its own, with this interpreter's packages and
commands, and an error in a cell ends it. What varies from run to run (clocks, versions) is not kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOKS = Path(__file__).with_name("notebooks")
PATIENCE_S = 600


def run_notebook(source: Path, target: Path) -> None:
    """Execute one and write it with its outputs."""
    notebook = nbformat.read(source, as_version=4)
    with TemporaryDirectory() as folder:
        # Nothing is read from or left in the folders of whoever calls it.
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            os.environ[name] = str(Path(folder) / "jupyter")
        place = Path(folder) / "place"
        place.mkdir()
        NotebookClient(
            notebook,
            timeout=PATIENCE_S,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(place)}},
            config=Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"}),
        ).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, target)


def main() -> None:
    """Execute all of them."""
    targets = Path(sys.argv[1]) if sys.argv[1:] else NOTEBOOKS
    targets.mkdir(parents=True, exist_ok=True)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for source in sorted(NOTEBOOKS.glob("*.ipynb")):
        run_notebook(source, targets / source.name)


if __name__ == "__main__":
    main()
