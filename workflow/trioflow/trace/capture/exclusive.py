"""One measurement at a time on a machine: two would disturb each other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trioflow.errors import MeasurementError


@contextmanager
def exclusive_measurement(what: str) -> Iterator[None]:
    """Hold the machine's measurement lock; the system frees it when the process ends.

    ``TRIOFLOW_LOCK_FOLDER`` moves the lock out of the system's temporary
    folder, for tests, whose times mean nothing.

    Parameters
    ----------
    what : str
        What is about to run, for the error's text.

    Raises
    ------
    MeasurementError
        When another capture or measurement of the same user is running.
    """
    try:
        import fcntl
    except ImportError:  # a system without file locks: nothing to hold
        yield
        return
    owner = os.getuid() if hasattr(os, "getuid") else 0
    folder = os.environ.get("TRIOFLOW_LOCK_FOLDER") or tempfile.gettempdir()
    path = Path(folder) / f"trioflow-measurement-{owner}.lock"
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MeasurementError(
                f"{what}: another capture or measurement is running on this machine; "
                "wait for it, since two at once would disturb each other's times"
            ) from None
        yield
