"""Capturing one workload of the campaign and packing what it wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trioflow.base.provenance import read_json, write_json
from trioflow.base.units import format_bytes
from trioflow.campaign.compaction import pack_raw, read_raw
from trioflow.campaign.items import Result
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
