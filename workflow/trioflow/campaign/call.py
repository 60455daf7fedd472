"""One call of a campaign: take over what is finished, go on, pack, stop in time.

What a campaign found on the machine: versions, device, driver, clocks.

What the device can do at best: copies, matrix products, host copies, launches.

Capturing one workload of the campaign and packing what it wrote.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trioflow import __version__
from trioflow.base.errors import InputError, MeasurementError
from trioflow.base.provenance import host_environment, read_json, write_json
from trioflow.base.units import format_bytes, s_to_ns
from trioflow.campaign.compaction import pack_raw, read_raw
from trioflow.campaign.items import Item, Result, State
from trioflow.campaign.packing import ITEMS_FILE, Limits, Pack, load_pack, pack_campaign
from trioflow.campaign.runner import Budget, DeviceLost, Runner, Stopped
from trioflow.campaign.sweeps import (
    BUDGET_S,
    DTYPES,
    QUICK_BUDGET_S,
    HostStopwatch,
    Timing,
    Work,
    arithmetic,
    free_memory,
    hold_device,
    make_row,
    make_stopwatch,
    run_sweep,
)
from trioflow.trace.capture.workload import capture_workload
from trioflow.trace.profile.events import DEVICE, RAW_FILES
from trioflow.trace.workloads.build import build_workload

STEPS = {"warm_up": 5, "timed_steps": 15, "profiled_steps": 5}
_STATES = 3
"""Weights, gradients and one optimizer state: what every step here keeps at least."""
_BLOCK_WEIGHTS = 12
"""Weights of a transformer block over its width squared: 4 of attention, 8 of feed-forward."""
_PROFILE = "kineto.json.gz"
_QUICK_STEPS = {"warm_up": 1, "timed_steps": 3, "profiled_steps": 2}


def run_workload(
    row: Mapping[str, Any], batch: int, device: str, quick: bool, folder: Path
) -> Result:
    """Capture a workload and return its packed files and its main figures; peak memory is that of all steps."""
    steps = _QUICK_STEPS if quick else STEPS
    _check_weights(row, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    capture_workload(row, batch, folder, device=device, **steps)
    facts = {"workload": row["workload"], "batch": batch, "precision": row.get("precision")}
    facts |= _peak_memory() if device == "cuda" else {}
    path = folder / "environment.json"
    environment = read_json(path)
    # Beside the other facts of the capture, so that they reach the merged trace.
    write_json(path, {**environment, **{k: v for k, v in facts.items() if k.startswith("peak_")}})
    facts["step_time_s"] = environment["step_time_s"]
    facts["steps"] = sum(steps.values()) + 2  # two more: one thrown away, one with shapes
    files = {}
    for name in RAW_FILES:
        if (folder / name).exists():
            content = read_raw(folder / name)
            files[name] = pack_raw(content)
            if name == _PROFILE:
                facts["device_events"] = count_device_events(content)
    if device == "cuda" and not facts.get("device_events"):
        facts["warning"] = "the profile holds no kernels: may this user profile the device?"
    return Result(facts=facts, files=files)


def count_device_events(profile: Mapping[str, Any]) -> int:
    """Return how many kernels, copies and fills a profile holds."""
    events = profile.get("traceEvents", [])
    return sum(isinstance(e, dict) and e.get("cat") in DEVICE for e in events)


def _check_weights(row: Mapping[str, Any], device: str) -> None:
    """Refuse a model whose weights, gradients and one optimizer state fill the host's memory: MemoryError."""
    least_bytes = _STATES * _count_weight_bytes(row)
    if device == "cuda":
        there_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        there_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if least_bytes > there_bytes:
        raise MemoryError(
            f"out of memory: weights, gradients and optimizer take {format_bytes(least_bytes)}"
            f" at least, the device has {format_bytes(there_bytes)}"
        )


def _count_weight_bytes(row: Mapping[str, Any]) -> int:
    """Return the size of a model's weights without making them [bytes]; a lower bound of it."""
    # A transformer block of the row's own sizes has at least these, in single precision.
    size = 4 * _BLOCK_WEIGHTS * int(row.get("layers") or 0) * int(row.get("hidden") or 0) ** 2
    try:
        model = build_workload(row, device="meta").model
    except Exception:  # a model that cannot be described beforehand may still be trained
        return size
    return max(size, sum(int(p.numel()) * int(p.element_size()) for p in model.parameters()))


def _peak_memory() -> dict[str, int]:
    return {
        "peak_allocated_bytes": int(torch.cuda.max_memory_allocated()),
        "peak_reserved_bytes": int(torch.cuda.max_memory_reserved()),
    }


_KIBI, _MEBI = 1 << 10, 1 << 20
LAUNCHES = 500
"""Launches in a row; fewer than a device queues, so that the host does not wait."""


def run_ceiling(item: str, part: str, device: str, quick: bool) -> Result:
    """Measure one part of the device's ceilings."""
    torch.manual_seed(0)
    rows, facts = _PARTS[part](device, quick)
    return Result(facts=facts, rows=[{**row, "item": item} for row in rows])


Rows = list[dict[str, Any]]


def _row(
    name: str, phase: str, shape: dict[str, Any], timing: Timing, **more: Any
) -> dict[str, Any]:
    """Return a row of one ceiling; the precision, FLOPs and bytes are given where they apply."""
    work = Work(
        phase, lambda: None, more.get("flop"), more.get("read_bytes", 0), more.get("write_bytes", 0)
    )
    return make_row("", name, more.get("precision", ""), shape, work, timing.columns())


def _copy(device: str, quick: bool) -> tuple[Rows, dict[str, Any]]:
    """Measure copies and fills inside the device's memory."""
    watch, rows = make_stopwatch(device, quick), Rows()
    sizes = [64 * _KIBI, _MEBI] if quick else [64 * _KIBI << (2 * n) for n in range(8)]
    for size in sizes:
        source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        for name, work, read in (
            ("device_copy", partial(target.copy_, source), size),
            ("device_fill", partial(target.fill_, 1), 0),
        ):
            timing, shape = watch.measure(work), {"size_bytes": size}
            rows.append(_row(name, "copy", shape, timing, read_bytes=read, write_bytes=size))
    best = max(
        (r["read_bytes"] + r["write_bytes"]) / r["median_ns"] * 1e9
        for r in rows
        if r["operation"] == "device_copy"
    )
    return rows, {"device_copy_bytes_per_s": best}


def _matmul(device: str, quick: bool) -> tuple[Rows, dict[str, Any]]:
    """Measure large matrix products in every precision."""
    watch, rows, best = make_stopwatch(device, quick), Rows(), dict[str, float]()
    precisions = ("tf32", "bf16", "fp16", "fp32") if device == "cuda" else ("fp32", "bf16")
    for precision in precisions:
        dtype = DTYPES[precision]
        for size in (64, 128) if quick else (4096, 8192):
            a = torch.randn(size, size, dtype=dtype, device=device)
            b = torch.randn(size, size, dtype=dtype, device=device)
            with arithmetic(precision):
                timing = watch.measure(partial(torch.mm, a, b))
            flop, moved = 2 * size**3, a.numel() * a.element_size()
            shape = {"m": size, "n": size, "k": size}
            rows.append(
                _row(
                    "matmul_ceiling", "forward", shape, timing, precision=precision, flop=flop,
                    read_bytes=2 * moved, write_bytes=moved,
                )
            )  # fmt: skip
            rate = flop / rows[-1]["median_ns"] * 1e9
            best[precision] = max(best.get(precision, 0.0), rate)
    return rows, {"matmul_flop_per_s": best}


def _host_copies(device: str, quick: bool) -> tuple[Rows, dict[str, Any]]:
    """Measure copies between host and device, from pinned and from pageable memory."""
    rows, best = Rows(), dict[str, float]()
    # A copy of pageable memory keeps the host: its clock sees the same for all four.
    watch = HostStopwatch(
        QUICK_BUDGET_S if quick else BUDGET_S,
        torch.cuda.synchronize if device == "cuda" else lambda: None,
    )
    sizes = [4 * _KIBI, _MEBI] if quick else [4 * _KIBI << (2 * n) for n in range(9)]
    for size in sizes:
        there = torch.zeros(size, dtype=torch.uint8, device=device)
        for pinned in (True, False) if device == "cuda" else (False,):
            here = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
            for name, target, source in (
                ("host_to_device", there, here), ("device_to_host", here, there),
            ):  # fmt: skip
                timing = watch.measure(partial(target.copy_, source, non_blocking=pinned))
                shape = {"size_bytes": size, "pinned": pinned}
                row = _row(name, "copy", shape, timing, read_bytes=size, write_bytes=size)
                rows.append(row)
                key = f"{name}_{'pinned' if pinned else 'pageable'}_bytes_per_s"
                best[key] = max(best.get(key, 0.0), size / row["median_ns"] * 1e9)
    free_memory(device)
    return rows, best


def _launch(device: str, quick: bool) -> tuple[Rows, dict[str, Any]]:
    """Measure what launching costs the host and the least that a kernel takes."""
    one = torch.zeros(1, device=device)
    count = 50 if quick else LAUNCHES
    watch = make_stopwatch(device, quick)
    timings = {
        "event_floor": watch.measure(lambda: None),
        "tiny_kernel": watch.measure(lambda: one.add_(1)),
        "host_launch": _time_each(lambda: one.add_(1), count, device),
    }
    if device == "cuda":
        timings["host_launch_empty"] = _time_each(lambda: hold_device(0.0), count, device)
        timings["device_launch_spacing"] = _time_spacing(lambda: one.add_(1), count)
    rows = [_row(name, "launch", {"launches": count}, t) for name, t in timings.items()]
    return rows, {f"{row['operation']}_s": row["median_ns"] * 1e-9 for row in rows}


def _time_each(launch: Callable[[], Any], count: int, device: str) -> Timing:
    """Return the host's time of one launch while the device lags behind, from several rows of them."""
    times = []
    for _ in range(6):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(count):
            launch()
        times.append((time.perf_counter_ns() - start) // count)
    if device == "cuda":
        torch.cuda.synchronize()
    return Timing(times[1:], times[-1], "perf_counter")


def _time_spacing(launch: Callable[[], Any], count: int) -> Timing:
    """Return the device's time between two kernels that are queued already."""
    times = []
    for _ in range(6):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        hold_device(count * 2e-5)
        before.record()
        for _ in range(count):
            launch()
        after.record()
        torch.cuda.synchronize()
        times.append(s_to_ns(before.elapsed_time(after) * 1e-3 / count))
    return Timing(times[1:], 0, "cuda_event")


_PARTS: dict[str, Callable[[str, bool], tuple[Rows, dict[str, Any]]]] = {
    "copy": _copy, "matmul": _matmul, "host_copies": _host_copies, "launch": _launch,
}  # fmt: skip


_PACKAGES = ("torchvision", "transformers", "numpy", "pandas", "pyarrow", "triton")
_PROPERTIES = {
    "multi_processor_count": "sm_count",
    "total_memory": "memory_bytes",
    # Torch names these from about 2.5 on; before, they are simply not known here.
    "L2_cache_size": "l2_cache_bytes",
    "max_threads_per_multi_processor": "threads_per_sm",
    "shared_memory_per_multiprocessor": "shared_memory_per_sm_bytes",
    "regs_per_multiprocessor": "registers_per_sm",
    "warp_size": "warp_size",
    "clock_rate": "clock_khz",
    "memory_clock_rate": "memory_clock_khz",
    "memory_bus_width": "memory_bus_bits",
}
_CLOCKS = (
    "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "temperature.gpu", "power.draw",
    "power.limit",
)  # fmt: skip


def describe_machine(device: str) -> dict[str, Any]:
    """Return the versions and the device that were found; what cannot be found is None."""
    facts: dict[str, Any] = {
        "trioflow": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{package: _version(package) for package in _PACKAGES},
        "device": device,
        "host": host_environment(),
        "cpu_affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        or os.environ.get("PYTORCH_ALLOC_CONF"),
        "cuda": torch.version.cuda,
        "cudnn": _try(torch.backends.cudnn.version),
        "nccl": _try(_nccl),
        "driver": _try(_driver) if device == "cuda" else None,
    }
    return facts | (_describe_gpu() if device == "cuda" else {"device_name": _cpu_name()})


def _describe_gpu() -> dict[str, Any]:
    """Describe the current device; the first use of it, so it fails here if it cannot be used."""
    try:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    except Exception as error:
        raise MeasurementError(f"the CUDA device cannot be used: {error}") from None
    facts = {ours: _try(getattr, properties, theirs) for theirs, ours in _PROPERTIES.items()}
    return {
        "device_name": str(torch.cuda.get_device_name()),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "devices": torch.cuda.device_count(),
        **facts,
    }


def read_clocks(device: str) -> dict[str, str]:
    """Return clocks, temperature and power as the driver's tool says them; empty without one."""
    if device != "cuda":
        return {}
    line = _try(_query, _CLOCKS)
    return dict(zip(_CLOCKS, line.split(", "), strict=False)) if line else {}


def _query(names: tuple[str, ...]) -> str:
    """Ask the driver's tool, which only reads here."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "--id=0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return run.stdout.strip()


def _driver() -> str:
    kernel_module = Path("/proc/driver/nvidia/version")
    if kernel_module.exists():
        found = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", kernel_module.read_text())
        if found:
            return found.group(1)
    return _query(("driver_version",))


def _nccl() -> str:
    # Older builds return one number, newer ones a tuple; builds without CUDA have neither.
    import torch.cuda.nccl

    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _cpu_name() -> str:
    return str(host_environment()["cpu_model"])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _try(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return an answer, or None where this version or machine has none."""
    try:
        return question(*arguments)
    except Exception:
        return None


__all__ = ["CallSettings", "DeviceLost", "run_call"]

_RESERVE_S, _RESERVE_SHARE = 12.0, 0.1
"""Time kept for the last packing, and the share of a short call that it is at most."""

_PACK_EVERY_S = 60.0
"""A call that is killed outright leaves packed files no older than this and one item."""


class _Signals:
    """Ends the call on a signal or when its time is up, by raising ``Stopped`` in the main thread."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.muted = False

    def receive(self, number: int, _: FrameType | None) -> None:
        """Note the signal and stop whatever runs."""
        self.received = self.received or number
        if not self.muted:
            raise Stopped

    @contextmanager
    def heeded(self, time_s: float) -> Iterator[None]:
        """Heed signals inside the block, the alarm after some seconds [s] among them."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
        before = {number: signal.signal(number, self.receive) for number in numbers}
        # It repeats: an exception raised inside a destructor is swallowed by Python.
        signal.setitimer(signal.ITIMER_REAL, max(time_s, 1e-3), 2.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class CallSettings:
    """How one call runs."""

    output: Path  # where the packed files go; those of an earlier call are taken over
    device: str
    until_s: float  # when the call must be over, on the monotonic clock [s]
    whole_s: float
    only: str = "*"  # pattern of the names of the items to do
    # Where finished items lie until they are packed; below the output by default.
    state_folder: str | None = None
    resume: Sequence[str] = ()  # outputs of earlier calls to take over
    limits: Limits = field(default_factory=Limits)
    # Few repeats and small sizes; forget failures of earlier calls.
    quick: bool = False
    retry_failed: bool = False


def run_call(items: Sequence[Item], settings: CallSettings) -> int:
    """Do as many items as fit until a time, pack what is finished, and return the exit status (128 and a signal's number).

    Raises InputError when what is to be taken over is no campaign's or another device's, DeviceLost
    when the device refuses further work.
    """
    output, device = settings.output, settings.device
    reserve_s = min(_RESERVE_S, _RESERVE_SHARE * settings.whole_s)
    state = State(settings.state_folder or output / "state")
    _take_over(state, output, settings.resume)
    if settings.retry_failed:
        state.forget(("failed",))
    _begin_session(state, device, settings.quick)
    budget = Budget(time.monotonic, settings.until_s - reserve_s, settings.whole_s - reserve_s)
    chosen = [item for item in items if fnmatch(item.name, settings.only)]
    before = sum(item.name in state.results for item in chosen)
    _print_line(f"{len(chosen)} items, {before} finished before; {budget.left_s():.0f} s to go")
    signals, executor = _Signals(), Executor(device, settings.quick)
    packer = _Packer(items, state, output, settings.limits, signals)
    runner = Runner(
        chosen, state, executor, budget, check_device=executor.check_device, notify=_print_line,
        after_item=packer.pack_now_and_then,
    )  # fmt: skip
    lost, too_long = False, list[str]()
    with signals.heeded(budget.left_s()):
        try:
            too_long = runner.run()
        except DeviceLost:
            lost = True
        except Stopped:
            pass
        signals.muted = True  # nothing may stop the last packing
        _end_session(state, device)
        pack = packer.pack()
    _summarize(chosen, state, too_long, pack, output)
    if lost:
        raise DeviceLost
    if not pack.left_out:
        state.discard()
    ended_by = signals.received
    return 128 + ended_by if ended_by in (signal.SIGTERM, signal.SIGINT) else 0


class _Packer:
    """Packs from time to time, and at the end."""

    def __init__(
        self, items: Sequence[Item], state: State, output: Path, limits: Limits, signals: _Signals
    ) -> None:
        self.items, self.state, self.output, self.limits = items, state, output, limits
        self.signals, self.packed_at_s = signals, time.monotonic()

    def pack_now_and_then(self) -> None:
        """Pack when the last time is long ago; stop where a swallowed signal asked for it."""
        if self.signals.received is not None:
            raise Stopped
        if time.monotonic() - self.packed_at_s > _PACK_EVERY_S:
            self.pack()

    def pack(self) -> Pack:
        """Pack all that is finished."""
        pack = pack_campaign(self.items, self.state, self.output, self.limits)
        self.packed_at_s = time.monotonic()
        return pack


def _take_over(state: State, output: Path, resume: Sequence[str]) -> None:
    """Take over the output's own packed files and earlier outputs."""
    for folder in (output, *map(Path, resume)):
        own = folder == output
        if (folder / "state" / "items").is_dir() and folder / "state" != state.folder:
            state.take_over(State(folder / "state"))
            own = True  # the packed files beside it may be missing
        if not own or (folder / ITEMS_FILE).exists():
            load_pack(folder, state)


def _begin_session(state: State, device: str, quick: bool) -> None:
    """Note what this call found, and refuse to mix devices."""
    machine = describe_machine(device)
    for session in state.sessions:
        before, now = session["machine"]["device_name"], machine["device_name"]
        if before != now:
            raise InputError(
                f"what is finished comes from {before!r}, this device is {now!r}",
                fix="start in an empty output folder",
            )
        if session["quick"] != quick:
            raise InputError(
                "items of --quick have the names of full ones and cannot be mixed with them",
                fix="start in an empty output folder",
            )
    state.sessions.append(
        {"machine": machine, "quick": quick, "clocks_before": read_clocks(device)}
    )
    state.write_sessions()


def _end_session(state: State, device: str) -> None:
    state.sessions[-1]["clocks_after"] = read_clocks(device)
    state.write_sessions()


def _print_line(line: str) -> None:
    print(line, flush=True)


def _summarize(
    items: Sequence[Item], state: State, too_long: list[str], pack: Pack, output: Path
) -> None:
    """Print what is finished, what is left and where it lies."""
    finished = sum(item.name in state.results for item in items)
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(pack.files.items()))
    print(f"{finished} of {len(items)} items finished; in {output}: {sizes}")
    for name in too_long:
        print(f"not in any call this long: {name}; give it more --minutes")
    for name, why in pack.left_out.items():
        print(f"left out of the packed files: {name}: {why}")
    if finished < len(items):
        print("call it again with the same --output, or with --resume, to go on")


_WARM_UP_S = 1.0


def _raise_clocks(time_s: float) -> None:
    """Keep the device busy for a while [s]: an idle one runs at a fraction of its clock."""
    block = torch.randn(4096, 4096, device="cuda")
    until = time.monotonic() + time_s
    while time.monotonic() < until:
        torch.mm(block, block)
        torch.cuda.synchronize()


class Executor:
    """Does items, each with the device's memory free of the one before."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick = device, quick
        if device == "cuda":
            _raise_clocks(0.05 if quick else _WARM_UP_S)

    def __call__(self, item: Item, folder: Path) -> Result:
        """Do one item; temporary files go into the folder."""
        free_memory(self.device)
        arguments = item.arguments
        if item.kind == "ceiling":
            return run_ceiling(item.name, arguments["part"], self.device, self.quick)
        if item.kind == "sweep":
            return run_sweep(
                item.name, arguments["operation"], arguments["precision"], arguments["points"],
                self.device, folder, self.quick,
            )  # fmt: skip
        return run_workload(arguments["row"], arguments["batch"], self.device, self.quick, folder)

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
