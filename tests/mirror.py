"""The public data of tests: what lies in the folder that TRIOFLOW_DATA_MIRROR names; without it they are skipped."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from trioflow.datasets.catalogue import load_catalogue


def find_mirror() -> Path:
    """Return the folder of the public data."""
    folder = os.environ.get("TRIOFLOW_DATA_MIRROR")
    if not folder:
        pytest.skip("TRIOFLOW_DATA_MIRROR is not set: the public data is not at hand")
    return Path(folder)


def find_public(names: Iterable[str], ending: str = "", least: int = 1) -> list[Path]:
    """Return the files of datasets, families or single files that the mirror holds, ``least`` of them or more."""
    files = load_catalogue().held_files(find_mirror(), names, ending)
    if len(files) < least:
        pytest.skip(f"the mirror lacks {names} {ending}")
    return files
