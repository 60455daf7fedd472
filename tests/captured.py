"""Small real captures that several tests read; made once a test session."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TRANSFORMER: dict[str, Any] = {
    "workload": "test-transformer",
    "family": "transformer",
    "model": "gpt2",
    "hidden": 32,
    "layers": 2,
    "heads": 4,
    "vocabulary": 128,
    "sequence": 16,
    "causal": True,
    "optimizer": "adamw",
    "precision": "fp32",
}
BERT: dict[str, Any] = {**TRANSFORMER, "workload": "test-bert", "model": "bert", "causal": False}
CNN: dict[str, Any] = {
    "workload": "test-cnn",
    "family": "torchvision",
    "model": "resnet18",
    "image_size": 32,
    "optimizer": "sgd",
    "precision": "fp32",
}
BATCH = 4


def capture_raw(row: dict[str, Any], folder: Path, batch: int = BATCH) -> Path:
    """Capture a workload quickly; the times are too few to mean anything."""
    from trioflow.trace.capture.workload import capture_workload

    capture_workload(row, batch, folder, device="cpu", warm_up=1, timed_steps=2, profiled_steps=2)
    return folder


def make_once(tmp_path_factory: Any, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder of the test session that one worker makes for all of them."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = root / f"shared-{name}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with TemporaryDirectory(dir=root) as draft:
                (Path(draft) / name).mkdir()
                make(Path(draft) / name)
                (Path(draft) / name).rename(folder)
    return folder


def with_steady_times(trace: Any) -> Any:
    """Return a trace whose times follow its work alone, so that no noise decides where it is cut."""
    from dataclasses import replace

    work = trace.operators["flop"] // 10 + trace.operators["read_bytes"] // 10
    steady = trace.operators.assign(device_ns=2_000 + work, cpu_ns=1_000)
    step_s = float((steady["device_ns"] + steady["cpu_ns"]).sum()) / 1e9
    return replace(trace, operators=steady, facts=replace(trace.facts, step_time_s=step_s, tail_s=0.0))
