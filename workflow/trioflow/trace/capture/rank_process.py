"""The process that is measured: alone on its machine, one thread on a core of its own, memory that stays mapped."""

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
    """Make the C allocator keep freed memory for the rest of the process; return what is missing, in words.

    glibc returns large blocks at once, so that every step touches fresh pages: up to a third of a
    step here. GPUs' caching allocators keep theirs too.
    """
    try:
        library = ctypes.CDLL(None)
        done = library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)
    except (OSError, AttributeError, TypeError):
        done = False
    return [] if done else ["the C allocator returns freed memory: page faults add to step times"]


@contextmanager
def pinned_to(core_index: int) -> Iterator[tuple[int | None, list[str]]]:
    """Run one thread on a core of its own, where allowed: yields it, or None, and warnings for the report."""
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
    """Hold the machine's measurement lock, which the system frees with the process (``what`` runs, for messages).

    ``TRIOFLOW_LOCK_FOLDER`` moves it, for tests. Raises MeasurementError when another measurement
    of the user runs.
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
