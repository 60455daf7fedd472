"""What a campaign found on the machine: versions, device, driver, clocks.

What the device can do at best: copies, matrix products, host copies, launches.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trioflow import __version__
from trioflow.base.errors import MeasurementError
from trioflow.base.provenance import host_environment
from trioflow.base.units import s_to_ns
from trioflow.campaign.items import Result
from trioflow.campaign.operations import Work
from trioflow.campaign.stopwatch import (
    BUDGET_S,
    QUICK_BUDGET_S,
    HostStopwatch,
    Timing,
    hold_device,
    make_stopwatch,
)
from trioflow.campaign.sweeps import DTYPES, arithmetic, free_memory, make_row

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
