"""What a campaign found on the machine: versions, device, driver, clocks."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from trioflow import __version__
from trioflow.base.errors import MeasurementError
from trioflow.base.provenance import host_environment

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
