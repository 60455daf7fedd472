"""The compiled engine: the rules of the reference on arrays, and the folder that keeps its kernels."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from trioflow.base.errors import InputError, SimulationError
from trioflow.engine.compiled.state import EVENTS, PIECES, RESHARED, make_state
from trioflow.engine.exchanges import Plan
from trioflow.engine.program import Execution, Pieces, Program, explain_deadlock
from trioflow.engine.reference import run_reference
from trioflow.network.collectives import CollectiveFlows
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.interface import NEVER_S, Network
from trioflow.network.message_planner import CollectiveRounds
from trioflow.network.networks import ContentionFreeNetwork

_ROOM = 2
"""Pieces of flows for which there is room at first, for every event of a program."""


def supports(network: Network) -> bool:
    """Return whether the compiled engine knows how a network shares its links."""
    return type(network) in (FairShareNetwork, ContentionFreeNetwork)


def run_compiled(program: Program, network: Network) -> Execution:
    """Execute a program; the result equals that of ``run_reference`` bit for bit. The network stays unused.

    Raises SimulationError as ``run_reference``, in the same words; InputError for a network that only that one drives.
    """
    if not isinstance(network, FairShareNetwork | ContentionFreeNetwork) or not supports(network):
        raise InputError(
            f"the compiled engine does not know the network {type(network).__name__}",
            fix="choose the engine reference or auto",
        )
    if not all(_can_end(plan) for plan in program.exchanges.plans):
        return run_reference(program, network)  # It says which flow has what wrong.
    shared, widths = isinstance(network, FairShareNetwork), network.capacities_bytes_per_s
    keep = network.pieces is not None
    state = make_state(program, widths, shared, _ROOM * program.events if keep else 0)
    execute(state)
    if keep and state.count[PIECES] > len(state.pieces):
        # How many there are is only known afterwards; the second run is the same as the first.
        state = make_state(program, widths, shared, int(state.count[PIECES]))
        execute(state)
    start_s, end_s = state.tasks["start_s"].copy(), state.tasks["end_s"].copy()
    if (end_s == NEVER_S).any():
        raise SimulationError(explain_deadlock(program, end_s))
    return Execution(
        start_s,
        end_s,
        int(state.count[EVENTS]),
        _name_bytes(network, state.links["moved_bytes"].tolist()),
        int(state.count[RESHARED]),
        _read_pieces(state) if keep else None,
    )


def _name_bytes(
    network: FairShareNetwork | ContentionFreeNetwork, moved_bytes: list[float]
) -> dict[tuple[str, str], float]:
    """Return what moved over each link by its ends; of links side by side, over the last."""
    ends = network.link_bytes
    if len(ends) == len(moved_bytes):  # The usual case: the names are there already.
        return dict(zip(ends, moved_bytes, strict=True))
    pairs = zip(network.links, moved_bytes, strict=True)
    return {(link.source, link.target): moved for link, moved in pairs}


def _read_pieces(state: Any) -> Pieces:
    """Return the pieces of flows that were kept."""
    kept = state.pieces[: state.count[PIECES]]
    first, last = state.plans["first_flow"], state.plans["last_flow"]
    plan = np.repeat(np.arange(len(state.plans)), last - first)[kept["flow"]]
    columns = (kept[name].copy() for name in ("begin_s", "end_s", "rate"))
    return Pieces(kept["flow_id"].copy(), plan, kept["flow"] - first[plan], *columns)


def _can_end(plan: Plan) -> bool:
    """Return whether a network would take all flows of a plan; see ``interface.check_flow``."""
    if isinstance(plan, CollectiveRounds):
        return True
    sizes_bytes = plan.sizes_bytes if isinstance(plan, CollectiveFlows) else plan.block_bytes
    known = [(column >= 0) & (column < math.inf) for column in (sizes_bytes, plan.latencies_s)]
    return all(np.all(one) for one in (*known, plan.max_rates_bytes_per_s > 0))


KERNELS = "trioflow.engine.compiled.kernels"
_SOURCES = ("kernels.py", "state.py")
_loaded: dict[str, Any] = {}

UNLOADED_FROM_EVENTS = 150_000
"""From here on loading kept kernels (0.1 s) costs less than the plain engine's time."""
UNCOMPILED_FROM_EVENTS = 4_000_000
"""From here on even compiling them (5 to 10 s, once) does."""
LOADED_FROM_EVENTS = 2_000
"""From here on loaded kernels are faster than the plain engine."""


def is_repaid(events: int) -> bool:
    """Return whether the compiled engine answers sooner, start-up included; limits from the machine of ``docs/bench.md``."""
    if KERNELS in _loaded:
        return events >= LOADED_FROM_EVENTS
    if events < UNLOADED_FROM_EVENTS:
        return False
    return events >= UNCOMPILED_FROM_EVENTS or is_kept()


def load_kernels() -> None:
    """Take the compiled engine from here on, even where one simulation would not repay its start."""
    if KERNELS not in _loaded:
        _loaded[KERNELS] = _keep(_import_kernels().execute)


def is_kept() -> bool:
    """Return whether an earlier run left its compiled kernels for this one."""
    folder = find_cache_folder()
    return folder is not None and any(folder.rglob("*.nbc"))


def find_cache_folder() -> Path | None:
    """Return the user's folder for compiled kernels, or None where there is no home for one.

    ``NUMBA_CACHE_DIR``, else ``trioflow`` in ``XDG_CACHE_HOME`` or ``~/.cache``: an installation may be read-only or
    shared. Its name holds the digest of the kernels and the versions of numba and Python.
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

    A damaged cache shows before the first event: it is made anew, or else kernels are compiled for this process only.
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
    from trioflow.engine.compiled import kernels

    return kernels


def _keep(kernel: Any) -> Any:
    """Let numba keep a compiled kernel in the cache folder, where one can be written."""
    from numba import config

    folder, configured = find_cache_folder(), config.CACHE_DIR
    if folder is not None:
        config.CACHE_DIR = str(folder)
    try:
        kernel.enable_caching()
        kernel._cache.load_overload = partial(_load_kept, kernel._cache)
    except RuntimeError:
        pass  # No folder can be written: this process compiles for itself.
    finally:
        config.CACHE_DIR = configured
    return kernel


def _load_kept(cache: Any, signature: Any, context: Any) -> Any:
    """Load a kernel as numba's own cache does, without the rules of its compiler: 0.3 s of modules."""
    with cache._guard_against_spurious_io_errors():
        return cache._load_overload(signature, context)
