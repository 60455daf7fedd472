"""The compiled kernels and the folder that keeps them from one run to the next."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

KERNELS = "trioflow.engine.kernels"
_SOURCES = ("kernels.py", "flow_kernels.py", "heap_kernels.py", "layout.py")
_loaded: dict[str, Any] = {}

UNLOADED_FROM_EVENTS = 250_000
"""From here on loading kept kernels (0.3 s) costs less than the plain engine's time."""
UNCOMPILED_FROM_EVENTS = 4_000_000
"""From here on even compiling them (5 to 10 s, once) does."""
LOADED_FROM_EVENTS = 2_000
"""From here on loaded kernels are faster than the plain engine."""


def is_repaid(events: int) -> bool:
    """Tell whether the compiled engine answers sooner than the plain one, start-up included.

    Parameters
    ----------
    events : int
        Events of the program.

    Notes
    -----
    The limits are where the two break even on the machine of ``docs/bench.md``;
    either engine gives the same bits.
    """
    if KERNELS in _loaded:
        return events >= LOADED_FROM_EVENTS
    if events < UNLOADED_FROM_EVENTS:
        return False
    return events >= UNCOMPILED_FROM_EVENTS or is_kept()


def is_kept() -> bool:
    """Tell whether an earlier run left its compiled kernels for this one."""
    folder = find_cache_folder()
    return folder is not None and any(folder.rglob("*.nbc"))


def find_cache_folder() -> Path | None:
    """Return the folder for compiled kernels, or None where there is no home for one.

    Notes
    -----
    A folder of the user (``NUMBA_CACHE_DIR``, else ``trioflow`` in
    ``XDG_CACHE_HOME`` or ``~/.cache``), never of the installation, which may
    be read-only or shared. Its name holds the digest of the kernels and the
    versions of numba and Python, so one of another version is never read.
    """
    base = os.environ.get("NUMBA_CACHE_DIR")
    if not base:
        home = os.environ.get("XDG_CACHE_HOME")
        try:
            base = str((Path(home) if home else Path.home() / ".cache") / "trioflow")
        except RuntimeError:
            return None
    source = b"".join(Path(__file__).with_name(name).read_bytes() for name in _SOURCES)
    digest = hashlib.sha256(source).hexdigest()[:16]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Path(base) / f"trioflow-{digest}-numba-{metadata.version('numba')}-python-{python}"


def execute(state: Any) -> None:
    """Run the kernels on a state, compiling them where nothing (readable) was kept.

    Parameters
    ----------
    state : layout.State
        A program laid out; holds when its tasks ran afterwards.

    Notes
    -----
    A damaged cache shows before the first event. It is removed and made anew,
    and where that fails too, the kernels are compiled for this process only.
    """
    kernels = _import_kernels()
    kernel = _loaded.get(KERNELS)
    if kernel is None:
        kernel = _loaded[KERNELS] = _keep(kernels.execute)
    try:
        kernel(state)
        return
    except Exception:
        if kernel.signatures:
            raise
    folder = find_cache_folder()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    kernel = _loaded[KERNELS] = _keep(kernels.compile_kernel(kernel.py_func))
    try:
        kernel(state)
    except Exception:
        kernel = _loaded[KERNELS] = kernels.compile_kernel(kernel.py_func)
        kernel(state)


def _import_kernels() -> Any:
    from trioflow.engine import kernels  # Not at the top: it imports numba.

    return kernels


def _keep(kernel: Any) -> Any:
    """Let numba keep a compiled kernel in the cache folder, where one can be written."""
    from numba import config

    folder, configured = find_cache_folder(), config.CACHE_DIR
    if folder is not None:
        config.CACHE_DIR = str(folder)
    try:
        kernel.enable_caching()
    except RuntimeError:
        pass  # No folder can be written: this process compiles for itself.
    finally:
        config.CACHE_DIR = configured
    return kernel
