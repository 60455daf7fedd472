"""Timing the points of one sweep, and naming the kernels that they run."""

from __future__ import annotations

import gc
import json
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trioflow.base.units import us_to_ns
from trioflow.campaign.items import Result
from trioflow.campaign.operations import Work, build_case, list_work
from trioflow.campaign.runner import is_out_of_memory
from trioflow.campaign.stopwatch import CudaStopwatch, HostStopwatch, make_stopwatch
from trioflow.trace.profile.events import DEVICE, LAUNCHES
from trioflow.trace.workloads.precision import single_precision

DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
"""Element type of each precision."""

PROFILED = 3
"""Profiled repeats of each point."""


def make_row(
    item: str,
    operation: str,
    precision: str,
    point: Mapping[str, Any],
    work: Work,
    columns: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a row of the sweep table, its kernels not known yet."""  # fmt: skip
    return {
        "item": item, "operation": operation, "phase": work.phase, "precision": precision,
        "shape": json.dumps(dict(point)), "flop": work.flop, "read_bytes": work.read_bytes,
        "write_bytes": work.write_bytes, **columns, "kernel_ns": None, "kernels": [],
    }  # fmt: skip


def run_sweep(
    item: str,
    operation: str,
    precision: str,
    points: Iterable[Mapping[str, Any]],
    device: str,
    folder: Path,
    quick: bool = False,
) -> Result:
    """Time every point of a sweep, forward and backward.

    A point that fails (no such kernel, not enough memory) is noted in the
    result's facts and does not end the sweep; when all fail, the last error does.
    """  # fmt: skip
    torch.manual_seed(0)
    with arithmetic(precision):
        return _run_points(item, operation, precision, points, device, folder, quick)


def arithmetic(precision: str) -> AbstractContextManager[None]:
    """Return the context in which single precision means what a sweep's precision says."""
    return single_precision("tf32" if precision == "tf32" else "ieee")


def _run_points(
    item: str,
    operation: str,
    precision: str,
    points: Iterable[Mapping[str, Any]],
    device: str,
    folder: Path,
    quick: bool,
) -> Result:
    """Time the points and name their kernels."""  # fmt: skip
    dtype = DTYPES[precision]
    watch, rows, failed = (
        make_stopwatch(device, quick),
        list[dict[str, Any]](),
        list[dict[str, Any]](),
    )
    timed: list[tuple[Mapping[str, Any], list[dict[str, Any]]]] = []
    last: Exception | None = None
    for point in points:
        try:
            found = _time_point(item, operation, precision, point, watch, dtype, device)
        except Exception as error:
            if device == "cuda":
                torch.cuda.synchronize()  # raises when the device is lost: then the item fails
            failed.append({"point": dict(point), "error": f"{type(error).__name__}: {error}"[:300]})
            last = error.with_traceback(None)
            if is_out_of_memory(error):
                free_memory(device)
            continue
        rows += found
        timed.append((point, found))
    if last is not None and not rows:
        raise last
    facts: dict[str, Any] = {"points": len(timed), "failed_points": failed}
    if device == "cuda":
        try:
            _name_kernels(operation, timed, dtype, device, folder)
        except Exception as error:
            torch.cuda.synchronize()
            facts["kernels_missing"] = f"{type(error).__name__}: {error}"[:300]
    return Result(facts=facts, rows=rows)


def _time_point(
    item: str,
    operation: str,
    precision: str,
    point: Mapping[str, Any],
    watch: CudaStopwatch | HostStopwatch,
    dtype: torch.dtype,
    device: str,
) -> list[dict[str, Any]]:
    """Return a point's rows, one a phase."""  # fmt: skip
    rows = []
    for work in list_work(build_case(operation, point, dtype, device)):
        columns = watch.measure(work.run).columns()
        rows.append(make_row(item, operation, precision, point, work, columns))
    return rows


def _name_kernels(
    operation: str,
    timed: list[tuple[Mapping[str, Any], list[dict[str, Any]]]],
    dtype: torch.dtype,
    device: str,
    folder: Path,
) -> None:
    """Profile all points once more, a few repeats each, and add their kernels to the rows.

    One profile for all of them, since starting it takes longer than a point;
    times come from events all the same, which the profiler does not stretch.
    """  # fmt: skip
    trace, number, targets = folder / "kernels.json", 0, dict[str, dict[str, Any]]()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for point, rows in timed:
            phases = {row["phase"]: row for row in rows}
            for work in list_work(build_case(operation, point, dtype, device)):
                work.run()  # the kernel's choice and its memory belong to no window
                window = f"trioflow: point {number}"
                targets[window], number = phases[work.phase], number + 1
                for _ in range(PROFILED):
                    with record_function(window):
                        work.run()
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    for window, (kernel_ns, names) in kernels_by_window(events, set(targets)).items():
        targets[window]["kernel_ns"], targets[window]["kernels"] = kernel_ns, names


def free_memory(device: str) -> None:
    """Give the device's memory back that nothing refers to any more."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def kernels_by_window(
    events: Iterable[Mapping[str, Any]], windows: set[str]
) -> dict[str, tuple[int, list[str]]]:
    """Return each window's kernel time, median over its repeats [ns], and the kernels of its last one in order of launch.

    ``windows``: names of annotations of a Kineto profile, which do not overlap. A kernel belongs to
    the one in which the host launched it, on any thread: host times alone are compared.
    """
    complete = [e for e in events if isinstance(e, Mapping) and e.get("ph") == "X"]
    spans = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"]))
        for e in complete
        if e.get("cat") == "user_annotation" and e.get("name") in windows
    )
    kernels: dict[int, list[Mapping[str, Any]]] = {}
    for event in complete:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in DEVICE and correlation is not None:
            kernels.setdefault(correlation, []).append(event)
    starts = [start for start, _, _ in spans]
    launched: list[list[tuple[float, Mapping[str, Any]]]] = [[] for _ in spans]
    for event in complete:
        if event.get("cat") not in LAUNCHES:
            continue
        place = bisect_right(starts, float(event["ts"])) - 1
        if place >= 0 and float(event["ts"]) <= spans[place][1]:
            for kernel in kernels.get(event.get("args", {}).get("correlation"), []):
                launched[place].append((float(event["ts"]), kernel))
    found: dict[str, tuple[int, list[str]]] = {}
    for name in sorted(windows):
        repeats = [launched[n] for n, span in enumerate(spans) if span[2] == name and launched[n]]
        if repeats:
            times = [sum(us_to_ns(float(k["dur"])) for _, k in repeat) for repeat in repeats]
            last = sorted(repeats[-1], key=lambda pair: pair[0])
            found[name] = (round(statistics.median(times)), [str(k["name"]) for _, k in last])
    return found
