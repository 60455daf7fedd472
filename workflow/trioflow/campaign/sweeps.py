"""Timing single operations at the sizes of one level of ``data/campaign/sweeps.toml``, and naming the kernels that they run."""

import gc
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from timeit import repeat, timeit
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from trioflow.base.errors import InputError, MeasurementError, suggest
from trioflow.base.provenance import host_environment, read_own_records, stamp
from trioflow.base.units import s_to_ns, us_to_ns
from trioflow.tables import write_table
from trioflow.trace.capture.workload import choose_device, device_name, exclusive_measurement
from trioflow.trace.workloads.build import make_optimizer, single_precision

Point = Mapping[str, Any]

OPERATIONS = read_own_records("campaign/sweeps")
TYPES = {
    "none": torch.uint8,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Element type of each precision; copies have none."""
HOST_REPEATS, WARM_UP_MS, TIMED_MS = 9, 10, 60
"""Repeats on the host's clock; time for warming up and repeats on the device's [ms]."""
_CLOCKS = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw,power.limit"


@dataclass(frozen=True)
class Work:
    """One phase of an operation of one size: what is timed."""

    phase: str
    run: Callable[[], Any]
    read: list[Tensor]
    written: list[Tensor]
    on_host: bool = False  # timed by the host's clock: a copy of pageable memory keeps the host


def list_points(operation: str, level: str) -> list[dict[str, Any]]:
    """Return the sizes of one level of an operation's sweep; InputError where there is no such operation or level."""
    if level not in OPERATIONS.get(operation, ()):
        known = [f"{name} {key}" for name, spec in OPERATIONS.items() for key in spec if isinstance(spec[key], tuple)]
        sweep = f"{operation} {level}"
        raise InputError(f"no sweep {sweep!r}", fix=f"{suggest(sweep, known)}see data/campaign/sweeps.toml")
    spec = OPERATIONS[operation]
    return [
        dict(zip(spec["sizes"], values, strict=True))
        for grid in spec[level]
        for values in product(*(axis if isinstance(axis, list) else [axis] for axis in grid))
    ]


def list_work(operation: str, point: Point, dtype: torch.dtype, device: str) -> list[Work]:
    """Return the phases of an operation of one size, ready to run: forward, and backward where it has gradients."""
    build = _BUILDERS.get(operation, _call_function)
    return list(build(OPERATIONS[operation], point, dtype, device))


def _call_function(spec: Mapping[str, Any], point: Point, dtype: torch.dtype, device: str) -> Iterator[Work]:
    """Yield the phases of a function of PyTorch's."""

    def look_up(word: Any) -> Any:
        return point.get(word, word) if isinstance(word, str) else word

    tensors = dict[str, Tensor]()
    for name, sizes in spec["tensors"].items():
        shape = [look_up(size) for size in sizes]
        if name in spec.get("indices", ()):
            tensors[name] = torch.randint(look_up(spec["indices"][name]), shape, device=device)
            continue
        made = torch.randn(shape, dtype=torch.float32 if name in spec.get("fp32", ()) else dtype, device=device)
        if point.get("layout") == "channels_last":
            made = made.to(memory_format=torch.channels_last)
        tensors[name] = made.requires_grad_(name not in spec.get("constants", ()))
    function, backend = resolve_name(spec["function"].format(**point)), point.get("backend", "default")
    options = {
        name: [look_up(word) for word in value] if isinstance(value, list) else look_up(value)
        for name, value in spec.get("options", {}).items()
    }

    def forward() -> Tensor:
        with nullcontext() if backend == "default" else sdpa_kernel(getattr(SDPBackend, backend)):
            result: Tensor = function(**tensors, **options)
            return result

    output, inputs = forward(), list(tensors.values())
    yield Work("forward", forward, inputs, [output])
    if wanted := [tensor for tensor in inputs if tensor.requires_grad]:
        gradient = torch.randn_like(output)

        def backward() -> Any:
            return torch.autograd.grad(output, wanted, gradient, retain_graph=True)

        yield Work("backward", backward, [gradient, *inputs], wanted)


def _copy(spec: Mapping[str, Any], point: Point, dtype: torch.dtype, device: str) -> Iterator[Work]:
    """Yield a copy between the host (pinned or pageable memory) and the device, or within it; without a source a fill."""
    pinned, places = bool(point.get("pinned")), {"host": "cpu", "device": device}
    read, written = (
        torch.zeros(point["size_bytes"], dtype=dtype, device=places[place], pin_memory=pinned and place == "host")
        for place in (spec.get("source", "device"), spec["target"])
    )
    if "source" not in spec:
        yield Work("", lambda: written.fill_(1), [], [written])
    else:
        on_host = spec["source"] != spec["target"]
        yield Work("", lambda: written.copy_(read, non_blocking=pinned), [read], [written], on_host)


def _launch(spec: Mapping[str, Any], point: Point, dtype: torch.dtype, device: str) -> Iterator[Work]:
    """Yield nothing, one tiny kernel, or many in a row."""
    one = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(point["launches"] if point["kernel"] == "add" else 0):
            one.add_(1)

    yield Work("", run, [one], [one])


def _cat(spec: Mapping[str, Any], point: Point, dtype: torch.dtype, device: str) -> Iterator[Work]:
    parts = [torch.randn(point["elements"], dtype=dtype, device=device) for _ in range(point["tensors"])]
    yield Work("forward", lambda: torch.cat(parts), parts, [torch.cat(parts)])


def _optimizer(spec: Mapping[str, Any], point: Point, dtype: torch.dtype, device: str) -> Iterator[Work]:
    shape = (point["tensors"], point["elements"])
    weights = [row.clone() for row in torch.randn(shape, dtype=dtype, device=device)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = make_optimizer(point["optimizer"], weights)
    optimizer.step()  # makes the state
    state = [one for kept in optimizer.state.values() for one in kept.values() if isinstance(one, Tensor) and one.dim()]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    yield Work("optimizer", optimizer.step, [*weights, *gradients, *state], [*weights, *state])


_BUILDERS = {
    **dict.fromkeys(("device_copy", "device_fill", "host_to_device", "device_to_host"), _copy),
    "launch": _launch,
    "cat": _cat,
    "optimizer": _optimizer,
}


def run_sweep(operation: str, precision: str, level: str, path: str | Path, device: str = "auto") -> None:
    """Time every size of one level of an operation, forward and backward, and write the table ``operation_times``.

    A size that fails (no such kernel, not enough memory) is noted in the file's metadata. Raises InputError where there is
    no such operation, level or precision, MeasurementError where every size fails.
    """
    device, points = choose_device(device), list_points(operation, level)
    if precision not in TYPES:
        raise InputError(f"no precision {precision!r}", fix=f"use one of {', '.join(TYPES)}")
    torch.manual_seed(0)
    rows, failed = list[dict[str, Any]](), list[dict[str, Any]]()
    with exclusive_measurement("sweep"), single_precision("tf32" if precision == "tf32" else "ieee"):
        if device == "cuda":  # an idle device runs at a fraction of its clock
            block = torch.randn(4096, 4096, device=device)
            timeit(lambda: torch.mm(block, block).sum().item(), number=200)
        for point in points:
            shape = {"operation": operation, "precision": precision, "shape": json.dumps(point)}
            try:
                rows += [
                    {**shape, **time_work(work, device)}
                    for work in list_work(operation, point, TYPES[precision], device)
                ]
            except Exception as error:
                failed.append({**shape, "error": f"{type(error).__name__}: {error}"[:300]})
                print(failed[-1])
            gc.collect()
            if device == "cuda":
                torch.cuda.synchronize()  # raises when the device is lost
                torch.cuda.empty_cache()
    if not rows:
        raise MeasurementError(f"no size of {operation} in {precision} could be timed: {failed[-1]['error']}")
    origin = stamp(
        torch=str(torch.__version__),
        device=device,
        device_name=device_name(device),
        host=host_environment(),
        driver=query_driver() if device == "cuda" else {},
        failed=failed,
    )
    write_table(pd.DataFrame(rows), "operation_times", path, origin)


def time_work(work: Work, device: str) -> dict[str, Any]:
    """Return the columns of ``operation_times`` of some work, after running it twice.

    The device's own times come from CUDA events, its second-level cache overwritten before each repeat; without a device,
    and where the host waits, from the host's clock.
    """
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None

    def once() -> None:
        work.run()
        finish()

    with FlopCounterMode(display=False) as counter:
        once()
    once()
    host_s = timeit(work.run, number=1)
    finish()
    timer = "perf_counter" if device == "cpu" or work.on_host else "cuda_event"
    if timer == "perf_counter":
        times_s = repeat(once, number=1, repeat=HOST_REPEATS)
    else:
        from triton.testing import do_bench  # comes with PyTorch's builds for CUDA

        times_s = [ms * 1e-3 for ms in do_bench(work.run, warmup=WARM_UP_MS, rep=TIMED_MS, return_mode="all")]
    least, low, middle, high = (s_to_ns(float(time)) for time in np.quantile(times_s, [0, 0.25, 0.5, 0.75]))
    return {
        "phase": work.phase,
        "flop": counter.get_total_flops() or None,
        "read_bytes": sum(tensor.nbytes for tensor in work.read),
        "write_bytes": sum(tensor.nbytes for tensor in work.written),
        "repeats": len(times_s),
        "median_ns": middle,
        "min_ns": least,
        "lower_quartile_ns": low,
        "upper_quartile_ns": high,
        "host_ns": s_to_ns(host_s),
        "timer": timer,
        **(_name_kernels(once) if device == "cuda" else {"kernel_ns": None, "kernels": []}),
    }


def _name_kernels(run: Callable[[], None]) -> dict[str, Any]:
    """Return what ran on the device, in order, and how long all of it took, cache not flushed."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    events = sorted(
        (event for event in profiler.events() or () if event.device_type == DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    took_us = sum(event.time_range.elapsed_us() for event in events)
    return {"kernel_ns": us_to_ns(took_us), "kernels": [event.name for event in events]}


def query_driver() -> dict[str, str]:
    """Return the driver's version, clocks, temperature and power as its tool says them; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, f"--query-gpu={_CLOCKS}", "--format=csv,noheader", "--id=0"]
    line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    return dict(zip(_CLOCKS.split(","), line.strip().split(", "), strict=False))
