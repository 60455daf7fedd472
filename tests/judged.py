"""Tables of what was predicted of public data: read where the workflow has judged it, else made.

``TRIOFLOW_JUDGED`` names the results of a run of ``snakemake validation published`` with this very
library; ``.ci/run`` has one, so nothing is judged twice.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Judged = TypeVar("Judged")


def read_or_make(path: str, read: Callable[[Path], Judged], make: Callable[[], Judged]) -> Judged:
    """Return what a run has left at a path below its results; without a run, make it."""
    results = os.environ.get("TRIOFLOW_JUDGED")
    return read(Path(results) / path) if results else make()
