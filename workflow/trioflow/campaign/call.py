"""One call of a campaign: take over what is finished, go on in order of value, pack, stop in time.

Workloads are captured as the rule capture does, operators timed by ``campaign.sweeps``; what goes wrong with one item
is recorded and does not end the call.
"""

import gzip
import os
import platform
import signal
import subprocess
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trioflow import __version__
from trioflow.base.errors import InputError, MeasurementError
from trioflow.base.provenance import host_environment, read_json, write_json
from trioflow.base.units import format_bytes, ns_to_s, s_to_ns
from trioflow.campaign.items import Item
from trioflow.campaign.packing import ITEMS_FILE, Content, Limits, Result, State, pack_campaign
from trioflow.campaign.sweeps import free_memory, is_out_of_memory, run_sweep
from trioflow.trace.capture.workload import capture_workload
from trioflow.trace.profile.events import DEVICE, RAW_FILES
from trioflow.trace.workloads.build import build_workload

STEPS = {"warm_up": 5, "timed_steps": 15, "profiled_steps": 5}
QUICK_STEPS = {"warm_up": 1, "timed_steps": 3, "profiled_steps": 2}
SAFETY = 1.25
"""An item is started only when its estimate, longer by this factor, still fits."""
ATTEMPTS = 2
"""An item during which so many calls ended is not tried again."""
_STATES = 3
"""Weights, gradients and one optimizer state: what every step here keeps at least."""
_BLOCK_WEIGHTS = 12
"""Weights of a transformer block over its width squared: 4 of attention, 8 of feed-forward."""
_RATIO_LIMITS, _RECENT = (0.2, 5.0), 4
"""How far what the last items of a group took, over their estimates, may move the estimates of its others."""
_RESERVE_S, _RESERVE_SHARE, _PACK_EVERY_S = 12.0, 0.1, 60.0
"""Time kept for the last packing, and the share of a short call that it is at most; and between two packings."""
_MIXED = ("bf16", "fp16")
_ERROR_CHARACTERS = 2_000


class Stopped(BaseException):
    """The call must end now: a signal, or the time is up. No item's handler may swallow it."""


class DeviceLost(BaseException):
    """The device refuses all further work in this process; a new process may use it again."""


def run_call(items: Sequence[Item], options: Namespace, device: str, limits: Limits, until_s: float) -> int:
    """Do as many items as fit until a time, pack what is finished, and return the exit status (128 and a signal's number).

    ``options``: of the command (``__main__.make_parser``); ``until_s``: when the call must be over, on the monotonic
    clock [s]. Raises InputError when what is to be taken over is no campaign's or another device's, DeviceLost when the
    device refuses further work.
    """
    output, whole_s = Path(options.output), options.minutes * 60
    reserve_s = min(_RESERVE_S, _RESERVE_SHARE * whole_s)
    state = State(options.state or output / "state")
    elsewhere = options.state is not None and (output / "state").is_dir()
    own = [output] if (output / ITEMS_FILE).exists() or elsewhere else []
    for folder in [*own, *map(Path, options.resume)]:
        state.take_over(folder)
    if options.retry_failed and options.until is None:
        state.forget("failed")
    _begin_session(state, device, options.quick)
    chosen = [item for item in items if fnmatch(item.name, options.only)]
    if not chosen:
        raise InputError(f"--only {options.only}: no item has such a name", fix="see --list")
    before = sum(item.name in state.results for item in chosen)
    budget = Budget(until_s - reserve_s, whole_s - reserve_s)
    print(f"{len(chosen)} items, {before} finished before; {budget.left_s():.0f} s to go", flush=True)
    lost, status, too_long = False, 0, list[str]()
    last_pack_s = time.monotonic()

    def after_item() -> None:
        nonlocal last_pack_s
        if time.monotonic() - last_pack_s > _PACK_EVERY_S:
            pack_campaign(items, state, output, limits)
            last_pack_s = time.monotonic()

    try:
        with stopping(budget.left_s()):
            executor = Executor(device, options.quick)
            too_long = run_items(chosen, state, executor, budget, after_item, executor.check_device)
    except DeviceLost:
        lost = True
    except Stopped as stop:
        number = stop.args[0]
        status = 0 if number == signal.SIGALRM else 128 + number
    state.sessions[-1]["clocks_after"] = read_clocks(device)
    state.write_sessions()
    left_out = pack_campaign(items, state, output, limits)
    _summarize(chosen, state, too_long, left_out, output)
    if lost:
        raise DeviceLost
    if not left_out:
        state.discard()
    return status


@contextmanager
def stopping(time_s: float) -> Iterator[None]:
    """Raise Stopped inside the block on a signal, and after some seconds [s]."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = {number: signal.signal(number, stop) for number in numbers}
    # It repeats: an exception raised inside a destructor is swallowed by Python.
    signal.setitimer(signal.ITIMER_REAL, max(time_s, 1e-3), 2.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Budget:
    """The time of one call."""

    deadline_s: float  # when nothing may run any more, on the clock [s]
    whole_s: float
    clock: Callable[[], float] = time.monotonic  # seconds that only go forward [s]

    def left_s(self) -> float:
        """Return the time left [s]."""
        return self.deadline_s - self.clock()


Execute = Callable[[Item, Path], tuple[Result, Mapping[str, Content]]]


def run_items(
    items: Sequence[Item],
    state: State,
    execute: Execute,
    budget: Budget,
    after_item: Callable[[], None] = lambda: None,
    check_device: Callable[[], bool] = lambda: True,
) -> list[str]:
    """Do everything that still fits, most valuable first; return the names of what fits into no call this long.

    Raises Stopped when the call must end (the item in flight is lost), DeviceLost when the device refuses further work.
    """
    too_long = []
    for item in items:
        if item.name in state.results:
            continue
        needed_s = SAFETY * estimate(item, items, state)
        result = refuse(item, items, state)
        if result is None and needed_s > budget.left_s():
            too_long += [item.name] if needed_s > budget.whole_s else []
            continue
        start_s, files = budget.clock(), dict[str, Content]()
        if result is None:
            state.begin(item.name)
            try:
                with state.scratch() as folder:
                    result, made = execute(item, Path(folder))
                    files.update(made)
            except Exception as error:
                result = _describe_error(error, item)
                _drop_frames(error)
            result.time_ns = s_to_ns(budget.clock() - start_s)
        result.session = len(state.sessions) - 1
        state.store(item.name, result, files)
        remark = result.error or str(result.facts.get("warning", ""))
        print(
            f"{item.name}: {result.status} in {ns_to_s(result.time_ns):.1f} s, {max(budget.left_s(), 0.0):.0f} s left"
            + (f": {remark.splitlines()[0]}" if remark else ""),
            flush=True,
        )
        if result.status in ("failed", "out_of_memory") and not check_device():
            raise DeviceLost
        after_item()
    return too_long


def estimate(item: Item, items: Sequence[Item], state: State) -> float:
    """Return how long an item is expected to take [s]: its first guess, as much longer as the last items of its group took."""
    ratios = [
        ns_to_s(state.results[other.name].time_ns) / other.estimate_s
        for other in items
        if other.group == item.group and state.results.get(other.name, _PENDING).status == "done"
    ]
    low, high = _RATIO_LIMITS
    return item.estimate_s * (min(max([low, *ratios[-_RECENT:]]), high) if ratios else 1.0)


_PENDING = Result("pending")


def refuse(item: Item, items: Sequence[Item], state: State) -> Result | None:
    """Return the result of an item that is not worth trying, or None."""
    if state.begun[item.name] >= ATTEMPTS:
        return Result("failed", f"{ATTEMPTS} calls ended while it ran; --retry-failed tries again")
    for other in items if item.kind == "workload" else ():
        mixed = [one.arguments["row"].get("precision") in _MIXED for one in (item, other) if one.kind == item.kind]
        if (
            other.group == item.group
            and mixed in ([True] * 2, [False] * 2)
            and other.arguments["batch"] <= item.arguments["batch"]
            and state.results.get(other.name, _PENDING).status == "out_of_memory"
        ):
            return Result(
                "skipped", f"batch {other.arguments['batch']} already ran out of memory", facts=_describe_request(item)
            )
    return None


def _describe_request(item: Item) -> dict[str, Any]:
    """Return what was asked for, kept also where it failed."""
    if item.kind != "workload":
        return {key: item.arguments.get(key) for key in ("operation", "precision")}
    row = item.arguments["row"]
    return {"workload": row["workload"], "batch": item.arguments["batch"], "precision": row.get("precision")}


def _describe_error(error: Exception, item: Item) -> Result:
    """Return the result of an item that raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}, line {last.lineno}: "
    full = is_out_of_memory(error)
    text = f"{'' if full else place}{type(error).__name__}: {error}".strip()[:_ERROR_CHARACTERS]
    return Result("out_of_memory" if full else "failed", text, facts=_describe_request(item))


def _drop_frames(error: BaseException | None) -> None:
    """Empty the frames of a failure and of what led to it: their tensors could not be freed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Executor:
    """Does items, each with the device's memory free of the one before."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick = device, quick
        if device == "cuda":  # an idle device runs at a fraction of its clock
            block, until_s = torch.randn(4096, 4096, device="cuda"), time.monotonic() + 1.0
            while time.monotonic() < until_s:
                torch.mm(block, block)
                torch.cuda.synchronize()

    def __call__(self, item: Item, folder: Path) -> tuple[Result, Mapping[str, Content]]:
        """Do one item; temporary files go into the folder."""
        free_memory(self.device)
        arguments = item.arguments
        if item.kind == "workload":
            return run_workload(arguments["row"], arguments["batch"], self.device, self.quick, folder)
        swept = (arguments["operation"], arguments["precision"], arguments["points"])
        rows, facts = run_sweep(item.name, *swept, self.device, folder, self.quick)
        return Result(facts=facts, rows=rows), {}

    def check_device(self) -> bool:
        """Return whether the device still works, after freeing what a failed item held."""
        if self.device != "cuda":
            return True
        try:
            free_memory(self.device)
            torch.ones(1, device="cuda").add_(1)
            torch.cuda.synchronize()
        except Exception:  # after an illegal access every call of this process fails
            return False
        return True


def run_workload(
    row: Mapping[str, Any], batch: int, device: str, quick: bool, folder: Path
) -> tuple[Result, dict[str, Content]]:
    """Capture a workload and return its main figures and raw files; peak memory is that of all steps."""
    _check_weights(row, device)
    cuda = device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    capture_workload(row, batch, folder, device=device, **(QUICK_STEPS if quick else STEPS))
    peaks = {
        "peak_allocated_bytes": int(torch.cuda.max_memory_allocated()) if cuda else 0,
        "peak_reserved_bytes": int(torch.cuda.max_memory_reserved()) if cuda else 0,
    }
    path = folder / "environment.json"
    environment = {**read_json(path), **(peaks if cuda else {})}
    write_json(path, environment)  # beside the other facts, so that they reach the merged trace
    facts = {"workload": row["workload"], "batch": batch, "precision": row.get("precision")}
    facts |= {"step_time_s": environment["step_time_s"], **(peaks if cuda else {})}
    files = {}
    for raw in (folder / name for name in RAW_FILES if (folder / name).exists()):
        content = raw.read_bytes()
        content = gzip.decompress(content) if raw.suffix == ".gz" else content
        files[raw.name] = Content.of(content)
        if raw.name == "kineto.json.gz":
            facts["device_events"] = count_device_events(content)
    if cuda and not facts.get("device_events"):
        facts["warning"] = "the profile holds no kernels: may this user profile the device?"
    return Result(facts=facts), files


def count_device_events(profile: bytes) -> int:
    """Return how many kernels, copies and fills a Kineto profile holds, as PyTorch writes it."""
    return sum(profile.count(f'"cat": "{category}"'.encode()) for category in DEVICE)


def _check_weights(row: Mapping[str, Any], device: str) -> None:
    """Refuse a model whose weights, gradients and one optimizer state do not fit: MemoryError."""
    if device == "cuda":
        there_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        there_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A transformer block of the row's own sizes has at least these, in single precision.
    size = 4 * _BLOCK_WEIGHTS * int(row.get("layers") or 0) * int(row.get("hidden") or 0) ** 2
    if _STATES * size <= there_bytes:
        try:
            weights = build_workload(row, device="meta").model.parameters()
            size = max(size, sum(int(p.numel()) * int(p.element_size()) for p in weights))
        except Exception:  # a model that cannot be described beforehand may still be trained
            pass
    if _STATES * size > there_bytes:
        raise MemoryError(
            f"out of memory: weights, gradients and optimizer take {format_bytes(_STATES * size)}"
            f" at least, the device has {format_bytes(there_bytes)}"
        )


def _begin_session(state: State, device: str, quick: bool) -> None:
    """Note what this call found, and refuse to mix devices."""
    machine = describe_machine(device)
    for session in state.sessions:
        before, now = session["machine"]["device_name"], machine["device_name"]
        if before != now or session["quick"] != quick:
            raise InputError(
                f"what is finished comes from {before!r}, this device is {now!r}"
                if before != now
                else "items of --quick have the names of full ones and cannot be mixed with them",
                fix="start in an empty output folder",
            )
    state.sessions.append({"machine": machine, "quick": quick, "clocks_before": read_clocks(device)})
    state.write_sessions()


def _summarize(
    items: Sequence[Item], state: State, too_long: list[str], left_out: Mapping[str, str], output: Path
) -> None:
    """Print what is finished, what is left and where it lies."""
    finished = sum(item.name in state.results for item in items)
    sizes = (f"{file.name} {format_bytes(file.stat().st_size)}" for file in sorted(output.glob("*.parquet")))
    print(
        f"{finished} of {len(items)} items finished; in {output}: {', '.join(sizes)}",
        *(f"not in any call this long: {name}; give it more --minutes" for name in too_long),
        *(f"left out of the packed files: {name}: {why}" for name, why in left_out.items()),
        sep="\n",
    )
    if finished < len(items):
        print("call it again with the same --output, or with --resume, to go on")


_PACKAGES = ("torchvision", "transformers", "numpy", "pandas", "pyarrow", "msgspec", "triton")
_PROPERTIES = {
    "multi_processor_count": "sm_count",
    "total_memory": "memory_bytes",
    "L2_cache_size": "l2_cache_bytes",
    "max_threads_per_multi_processor": "threads_per_sm",
    "clock_rate": "clock_khz",
    "shared_memory_per_multiprocessor": "shared_memory_per_sm_bytes",
    "warp_size": "warp_size",
    "regs_per_multiprocessor": "registers_per_sm",
    "memory_clock_rate": "memory_clock_khz",
    "memory_bus_width": "memory_bus_bits",
}
"""Torch names some of them from about 2.5 on; before, they are simply not known."""
_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "temperature.gpu", "power.draw", "power.limit")


def describe_machine(device: str) -> dict[str, Any]:
    """Return the versions and the device that were found; what cannot be found is None. MeasurementError without a device."""
    facts: dict[str, Any] = {
        "trioflow": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{package: _try(metadata.version, package) for package in _PACKAGES},
        "device": device,
        "host": host_environment(),
        "cpu_affinity": _try(lambda: len(os.sched_getaffinity(0))),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
        "cuda": torch.version.cuda,
        "cudnn": _try(torch.backends.cudnn.version),
        "nccl": _try(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
        "driver": _try(_query, "driver_version") if device == "cuda" else None,
    }
    if device != "cuda":
        return {**facts, "device_name": str(facts["host"]["cpu_model"])}
    try:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    except Exception as error:
        raise MeasurementError(f"the CUDA device cannot be used: {error}") from None
    return {
        **facts,
        "device_name": str(torch.cuda.get_device_name()),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "devices": torch.cuda.device_count(),
        **{ours: getattr(properties, theirs, None) for theirs, ours in _PROPERTIES.items()},
    }


def read_clocks(device: str) -> dict[str, str]:
    """Return clocks, temperature and power as the driver's tool says them; empty without one."""
    line = _try(_query, *_CLOCKS) if device == "cuda" else None
    return dict(zip(_CLOCKS, line.split(", "), strict=False)) if line else {}


def _query(*names: str) -> str:
    """Ask the driver's tool, which only reads here."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return run.stdout.strip()


def _try(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return an answer, or None where this version or machine has none."""
    try:
        return question(*arguments)
    except Exception:
        return None
