"""The process that is measured: alone on its machine, one thread on a core of its own, memory that stays mapped."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trioflow.base.errors import MeasurementError

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER_BYTES = 2**31 - 1


def keep_freed_memory() -> list[str]:
    """Make the C allocator keep freed memory for the rest of the process, where it can.

    By default glibc returns large blocks to the system at once, so that every step touches fresh
    pages: on a virtual machine that took up to a third of a step here, and varied from run to run.
    GPUs' caching allocators keep their memory too. Capture and measurement both do this.

    Returns what is missing, in words for the report; empty when it worked.
    """
    try:
        library = ctypes.CDLL(None)
        done = library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)
    except (OSError, AttributeError, TypeError):
        done = False
    return [] if done else ["the C allocator returns freed memory: page faults add to step times"]


@contextmanager
def pinned_to(core_index: int) -> Iterator[tuple[int | None, list[str]]]:
    """Run one thread on one core of its own, where the system allows it.

    Yields ``core``: the core, or None when the process could not be pinned; ``warnings``: what is
    missing, in words for the report.
    """
    warnings: list[str] = []
    threads, core, before = torch.get_num_threads(), None, None
    torch.set_num_threads(1)
    if hasattr(os, "sched_getaffinity"):
        before = sorted(os.sched_getaffinity(0))
        core = before[core_index % len(before)]
        if core_index >= len(before):
            warnings.append(f"only {len(before)} core(s) available: ranks share core {core}")
        try:
            os.sched_setaffinity(0, {core})
        except OSError as error:
            warnings.append(f"could not pin the process to core {core}: {error.strerror}")
            core = None
    else:
        warnings.append("this system has no processor affinity: the process is not pinned")
    try:
        yield core, warnings
    finally:
        torch.set_num_threads(threads)
        if before is not None and core is not None:
            os.sched_setaffinity(0, set(before))


@contextmanager
def exclusive_measurement(what: str) -> Iterator[None]:
    """Hold the machine's measurement lock; the system frees it when the process ends.

    ``TRIOFLOW_LOCK_FOLDER`` moves the lock out of the system's temporary folder, for tests, whose
    times mean nothing.

    ``what``: what is about to run, for the error's text. Raises MeasurementError when another
    capture or measurement of the same user is running.
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
