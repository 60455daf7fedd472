"""The engine: kernels on a program's arrays, compiled by numba or as plain Python, and the folder that caches them."""

import hashlib
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from trioflow.base.errors import InputError, SimulationError, how_to_install
from trioflow.engine.compiled import kernels
from trioflow.engine.compiled.state import EVENTS, PIECE, PIECES, RESHARED, make_plain, make_state, settle_rows
from trioflow.engine.program import Execution, Pieces, Program, explain_deadlock
from trioflow.network.collectives import CollectiveFlows
from trioflow.network.networks import NEVER_S, AnyNetwork, ContentionFreeNetwork, FairShareNetwork, Flow, check_flow

_ROOM = 2
"""Pieces of flows for which there is room at first, for every event of a program."""


def supports(network: AnyNetwork) -> bool:
    """Return whether the kernels know how a network shares its links; others are driven flow by flow, uncompiled."""
    return type(network) in (FairShareNetwork, ContentionFreeNetwork)


def run_program(program: Program, network: AnyNetwork, *, compiled: bool) -> Execution:
    """Execute a program; the same bits compiled or not. A network of trioflow's own stays unused.

    Raises SimulationError when tasks wait for each other for ever (names them and their ranks) or a flow could never
    end; InputError where a network that the kernels do not know is to be compiled.
    """
    if compiled and not supports(network):
        raise InputError(
            f"the compiled engine does not know the network {type(network).__name__}",
            fix="choose the engine reference or auto",
        )
    if not compiled:
        _uncompiled["events"] += program.events
    keep = getattr(network, "pieces", None) is not None
    state = _execute(program, network, compiled, _ROOM * program.events if keep else 0)
    if keep and state.count[PIECES] > len(state.pieces):
        # How many there are is only known afterwards; the second run is the same as the first.
        state = _execute(program, network, compiled, int(state.count[PIECES]))
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


def _execute(program: Program, network: AnyNetwork, compiled: bool, pieces: int) -> Any:
    """Run a program to its end and return the arrays; tasks that never end keep ``NEVER_S``."""
    widths: Any = getattr(network, "capacities_bytes_per_s", ())
    state = make_state(program, widths, type(network) is not ContentionFreeNetwork, pieces)
    _check_flows(program, state)
    if compiled:
        run_kernels(state)
        return state
    plain = make_plain(state)
    if supports(network):
        _bind_plain()(plain)
        kept = min(plain.count[PIECES], len(state.pieces))
        settle_rows(plain.pieces[:kept], state.pieces[:kept])
    else:
        driver = _Driver(program, network)
        bind(
            lambda kernel: kernel,
            start_flow=driver.start_flow,
            find_network_s=driver.find_network_s,
            advance_network=driver.advance_network,
        )(plain)
        state = state._replace(pieces=driver.list_pieces())
        plain.count[PIECES] = len(state.pieces)
    for name in ("tasks", "links"):
        settle_rows(getattr(plain, name), getattr(state, name))
    return state._replace(count=plain.count)


def bind(wrap: Callable[[Any], Any], **instead: Callable[..., Any]) -> Any:
    """Return the kernel ``run_kernels`` with every kernel wrapped by ``wrap``, or replaced where ``instead`` names it."""
    scope = dict(vars(kernels))
    for name, kernel in vars(kernels).items():
        if isinstance(kernel, FunctionType):
            scope[name] = wrap(FunctionType(kernel.__code__, scope, name))
    scope.update(instead)
    return scope["execute"]


@cache
def _bind_plain() -> Any:
    return bind(lambda kernel: kernel)


class _Driver:
    """Moves the flows of a program over a network of another package, in place of the kernels' own."""

    def __init__(self, program: Program, network: Any) -> None:
        self._network = network
        self._ends = [ends for plan in program.exchanges.plans for ends in plan.shape.pairs]
        self._owners: list[tuple[int, int, int]] = []

    def start_flow(self, state: Any, exchange: int, flow: int, message: int, size_bytes: float, now_s: float) -> None:
        """Let a flow start; see ``kernels.start_flow``."""
        made, number = state.flows[flow], len(self._owners)
        self._owners.append((exchange, message, flow))
        state.count[EVENTS] += 1
        ends = self._ends[flow]
        self._network.start(Flow(number, *ends, size_bytes, made.latency_s, made.max_rate), now_s)

    def find_network_s(self, _state: Any) -> float:
        """Return when something next happens on the network [s]."""
        return float(self._network.next_event_s())

    def advance_network(self, state: Any, now_s: float) -> None:
        """Let flows end until now."""
        for end in self._network.advance(now_s):
            exchange, message, _ = self._owners[end.flow.flow_id]
            state.count[EVENTS] += 1
            kernels.note_arrival(state, exchange, message)

    def list_pieces(self) -> Any:
        """Return the pieces of flows that the network kept, as rows of the kernels."""
        kept = getattr(self._network, "pieces", None) or ()
        rows = [(*times, number, self._owners[number][2]) for number, *times in kept]
        return np.array(rows, dtype=PIECE)


def _name_bytes(network: AnyNetwork, moved_bytes: list[float]) -> dict[tuple[str, str], float]:
    """Return what moved over each link by its ends; of links side by side, over the last."""
    if not supports(network):
        return dict(network.link_bytes)
    pairs = zip(network.links, moved_bytes, strict=True)  # type: ignore[union-attr]
    return {(link.source, link.target): moved for link, moved in pairs}


def _read_pieces(state: Any) -> Pieces:
    """Return the pieces of flows that were kept."""
    kept = state.pieces[: state.count[PIECES]]
    first, last = state.plans["first_flow"], state.plans["last_flow"]
    plan = np.repeat(np.arange(len(state.plans)), last - first)[kept["flow"]]
    columns = (kept[name].copy() for name in ("begin_s", "end_s", "rate"))
    return Pieces(kept["flow_id"].copy(), plan, kept["flow"] - first[plan], *columns)


def _check_flows(program: Program, state: Any) -> None:
    """Refuse a program with a flow that no network could finish; see ``network.networks.check_flow``."""
    flows = state.flows
    columns = (flows["size_bytes"], flows["latency_s"], state.plans["block_bytes"])
    finite = [(column >= 0) & (column < math.inf) for column in columns]
    if all(np.all(one) for one in (*finite, flows["max_rate"] > 0)):
        return
    for plan in program.exchanges.plans:
        sizes_bytes = plan.sizes_bytes if isinstance(plan, CollectiveFlows) else plan.block_bytes
        each = np.broadcast_arrays(sizes_bytes, plan.latencies_s, plan.max_rates_bytes_per_s)
        for number, (ends, *numbers) in enumerate(zip(plan.shape.pairs, *each, strict=True)):
            check_flow(Flow(number, *ends, *map(float, numbers)), 0.0, 0.0)


KERNELS = kernels.__name__
_SOURCES = ("kernels.py", "state.py")
_loaded: dict[str, Any] = {}
_uncompiled = Counter[str]()
"""Events that ran uncompiled in this process: together they may repay loading the compiled kernels."""

UNLOADED_FROM_EVENTS = 40_000
"""From here on loading cached kernels (0.2 to 0.3 s) costs less than running them uncompiled (5 us an event)."""
UNCOMPILED_FROM_EVENTS = 600_000
"""From here on even compiling them (5 to 10 s, once) does."""
LOADED_FROM_EVENTS = 500
"""From here on loaded kernels are faster."""


def is_repaid(events: int) -> bool:
    """Return whether the compiled engine answers sooner, start-up included; limits from the machine of ``docs/bench.md``.

    It is loaded, too, once as many events went through uncompiled kernels as would have repaid it.
    """
    if KERNELS in _loaded:
        return events >= LOADED_FROM_EVENTS
    events += _uncompiled["events"]
    if not has_numba() or events < UNLOADED_FROM_EVENTS:
        return False
    return events >= UNCOMPILED_FROM_EVENTS or is_kept()


@cache
def has_numba() -> bool:
    """Return whether numba, of the extra ``fast``, is installed; without it every simulation runs uncompiled."""
    return find_spec("numba") is not None


def load_kernels() -> None:
    """Take the compiled engine from here on, even where one simulation would not repay its start."""
    if not has_numba():
        raise InputError("the compiled engine needs numba", fix=how_to_install("fast"))
    if KERNELS not in _loaded:
        _loaded[KERNELS] = _keep(_bind_compiled())


def is_kept() -> bool:
    """Return whether an earlier run left its compiled kernels for this one."""
    folder = find_cache_folder()
    return folder is not None and any(folder.rglob("*.nbc"))


def find_cache_folder() -> Path | None:
    """Return the user's folder for compiled kernels, or None where there is no home for one.

    None too without numba. ``NUMBA_CACHE_DIR``, else ``trioflow`` in ``XDG_CACHE_HOME`` or ``~/.cache``: an installation may be read-only or
    shared. Its name holds the digest of the kernels and the versions of numba and Python.
    """
    if not has_numba():
        return None
    from importlib import metadata

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


def run_kernels(state: Any) -> None:
    """Run the kernels on a state, compiling them where nothing (readable) was kept.

    A damaged cache shows before the first event: it is made anew, or else kernels are compiled for this process only.
    """
    load_kernels()
    kernel = _loaded[KERNELS]
    try:
        kernel(state)
        return
    except Exception:
        if kernel.signatures:
            raise
    folder = find_cache_folder()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    kernel = _loaded[KERNELS] = _keep(_compile(kernel.py_func))
    try:
        kernel(state)
    except Exception:
        kernel = _loaded[KERNELS] = _compile(kernel.py_func)
        kernel(state)


def _bind_compiled() -> Any:
    return bind(_compile)


def _compile(kernel: FunctionType) -> Any:
    """Let numba compile a kernel when it is first called."""
    from numba import njit

    # No fastmath: it would change the order of floating-point operations. Nothing is allocated there, so numba need not
    # count references, which would take nine tenths of the time. Wrappers for Python take half of the time to compile;
    # only ``run_kernels`` is called from there.
    is_part = kernel.__name__ != "execute"
    return njit(error_model="numpy", _nrt=False, no_cpython_wrapper=is_part, no_cfunc_wrapper=is_part)(kernel)


def _keep(kernel: Any) -> Any:
    """Let numba keep a compiled kernel in the cache folder, where one can be written."""
    from numba import config

    folder, configured = find_cache_folder(), config.CACHE_DIR
    if folder is not None:
        config.CACHE_DIR = str(folder)
    try:
        kernel.enable_caching()
        kernel._cache.load_overload = partial(_load_kept, kernel._cache)
        kernel._cache.save_overload = partial(_save_kept, kernel._cache.save_overload)
    except RuntimeError:
        pass  # No folder can be written: this process compiles for itself.
    finally:
        config.CACHE_DIR = configured
    return kernel


def _save_kept(save: Any, signature: Any, kernel: Any) -> None:
    """Cache a kernel if the disk has room for it."""
    with suppress(OSError):
        save(signature, kernel)


def _load_kept(cache: Any, signature: Any, context: Any) -> Any:
    """Load a kernel as numba's own cache does, without the rules of its compiler: 0.3 s of modules."""
    with cache._guard_against_spurious_io_errors():
        return cache._load_overload(signature, context)
