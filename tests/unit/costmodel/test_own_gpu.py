"""A GPU of one's own: a sheet given by path is as good as one that ships, and each of its numbers counts."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from trioflow.base.errors import PlatformError
from trioflow.base.yaml_files import read_yaml
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.hardware.device_sheet import (
    OWN,
    SHIPPED,
    DeviceSheet,
    find_device,
    find_sheet,
    list_devices,
    load_device,
)
from trioflow.hardware.machine import Device
from trioflow.hardware.platform import load_platform, save_platform
from trioflow.prediction.assembly import time_operators
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.sizes import LanguageModel, LanguageStep
from trioflow.trace.store import Trace

MODEL = LanguageModel("dense", 1, 2048, 16, 16, 128, 8192, 32000)
BOX = """\
name: box
device: {sheet: SHEET}
ranks: 2
topology:
  builder: switch
  bandwidth_bytes_per_s: {value: 12.0e9, source: a test}
  latency_s: {value: 1.0e-6, source: a test}
communication_on_compute_stream: false
"""


def content_of(sheet: str, **changes: Any) -> dict[str, Any]:
    return {**read_yaml(SHIPPED / f"{sheet}.yaml", PlatformError), **changes}


@cache
def trace(precision: str) -> Trace:
    return make_trace(MODEL, LanguageStep(1024, 1, precision))


def timed(device: DeviceSheet | str, precision: str) -> DeviceTimes:
    return time_operators(trace(precision), device)


def compute_s(device: DeviceSheet | str, precision: str) -> float:
    return timed(device, precision).traces[0].facts.step_time_s


@pytest.mark.parametrize("name", list_devices())
def test_a_sheet_by_path_is_the_shipped_one(name: str, tmp_path: Path) -> None:
    """Each shipped sheet under its own name, and as if trioflow did not know it, computes what it did."""
    precision = "bf16" if load_device(name).runs_on_tensor_cores("bf16") else "fp32"
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(content_of(name)))
    (tmp_path / "box.yaml").write_text(BOX.replace("SHEET", "own.yaml"))
    platform = load_platform(tmp_path / "box.yaml")
    assert compute_s(platform.device.described, precision) == compute_s(name, precision)
    save_platform(platform, tmp_path / "saved.yaml")
    assert load_platform(tmp_path / "saved.yaml").device == platform.device


def test_an_unknown_gpu_needs_no_name_that_ships() -> None:
    own = load_device(content_of("h100-sxm", name="x1", driver_names=["Maker X1"]))
    for precision in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        near = compute_s(own, precision) / compute_s("h100-sxm", precision)
        assert near == pytest.approx(1.0, rel=0.15), precision
    assert compute_s(own, "bf16") < compute_s(own, "tf32") < compute_s(own, "fp32")
    assert timed(own, "bf16").confidence == "extrapolated"


ASKED = {
    "memory_bandwidth_bytes_per_s": "bf16", "power_limit_w": "fp32",
    "sustained_compute": "bf16",
    **{f"peak_flop_per_s.{name}": name for name in ("fp32", "tf32", "fp16", "bf16", "fp8")},
}  # fmt: skip
"""What a number of a sheet is for: the precision of a step that it changes."""


@pytest.mark.parametrize("names", [{}, {"name": "x1", "driver_names": ["Maker X1"]}])
def test_every_number_of_a_sheet_changes_an_answer_or_is_said_not_to(names: dict[str, Any]) -> None:
    """Halved in turn, also under the name of a shipped sheet."""
    content = content_of("h100-sxm", **names, title="a board of one's own")
    own = load_device(content)
    (said,) = own.list_doubts()
    for key in own.numbers:
        half = copy.deepcopy(content)
        entry: Any = half
        for part in key.split("."):
            entry = entry[part]
        entry["value"] = (
            entry["value"] // 2 if isinstance(entry["value"], int) else entry["value"] / 2
        )
        if key == "memory_bytes":
            del half["usable_memory_bytes"]
        changed = load_device(half)
        if key in ASKED:
            change = compute_s(changed, ASKED[key]) / compute_s(own, ASKED[key])
            assert abs(change - 1) > 0.001, key
        elif "memory" in key:
            assert Device.of(changed).memory_bytes < 0.6 * Device.of(own).memory_bytes, key
        else:
            assert key in said


def test_tensor_cores_are_known_by_their_rates(tmp_path: Path) -> None:
    """An RTX 4090 in five lines computes halves on tensor cores, and faster than an L4."""
    four = {key: {"value": value, "source": "a test"} for key, value in (
        ("memory_bytes", 24e9), ("memory_bandwidth_bytes_per_s", 1008e9))}  # fmt: skip
    peaks = {key: {"value": value, "source": "a test"} for key, value in (
        ("fp32", 82.6e12), ("fp16", 165.2e12), ("bf16", 165.2e12), ("fp8", 330.3e12))}  # fmt: skip
    sheet = {"name": "x2", "driver_names": ["Maker X2"], **four, "peak_flop_per_s": peaks}
    own = load_device(sheet)
    assert compute_s(own, "bf16") < min(compute_s(own, "fp32"), compute_s("l4", "bf16"))
    assert compute_s(own, "fp8") < compute_s(own, "bf16")
    equal = {**peaks, "tf32": peaks["fp32"]}
    slow = load_device(
        {**sheet, "peak_flop_per_s": equal, "tensor_core_precisions": ["tf32", "bf16"]}
    )
    assert compute_s(slow, "tf32") < 1.05 * compute_s(slow, "fp32"), "vector units are there too"
    none = load_device({**sheet, "tensor_core_precisions": []})
    assert compute_s(none, "bf16") > compute_s(own, "bf16")


def test_numbers_of_a_device_in_a_platform_s_file_count_too(tmp_path: Path) -> None:
    def load(bandwidth: float, name: str = "NVIDIA H100 80GB HBM3") -> DeviceSheet | str:
        device = {
            "name": name, "kind": "gpu", "memory_bytes": {"value": 80e9, "source": "a test"},
            "peak_flop_per_s": {"fp32": {"value": 67e12, "source": "a test"}},
            "memory_bandwidth_bytes_per_s": {"value": bandwidth, "source": "a test"},
        }  # fmt: skip
        content = {**yaml.safe_load(BOX), "device": device}
        (tmp_path / "box.yaml").write_text(yaml.safe_dump(content))
        return load_platform(tmp_path / "box.yaml").device.described

    assert compute_s(load(3350e9), "bf16") == compute_s("h100-sxm", "bf16")
    assert compute_s(load(1675e9), "bf16") > 1.2 * compute_s("h100-sxm", "bf16")
    assert compute_s(load(1675e9, "Maker X3"), "fp32") > compute_s(load(3350e9, "Maker X3"), "fp32")


def test_a_broken_sheet_of_another_gpu_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / OWN).mkdir(parents=True)
    (tmp_path / OWN / "mine.yaml").write_text("name: mine\ndriver_names: [Maker X4]\n")
    (tmp_path / OWN / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    assert compute_s("h100-sxm", "bf16") > 0
    with pytest.raises(PlatformError, match=r"mine\.yaml"):
        find_sheet("Maker X4")
    with pytest.raises(PlatformError, match="did you mean NVIDIA H100"):
        find_device("NVIDIA H100 80GB HBM")


def test_a_sheet_of_one_s_own_folder_does_not_change_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shipped models were fitted on the GPU of the shipped sheet, whatever a user calls his."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / OWN).mkdir(parents=True)
    slow = {"value": 500e9, "source": "a test"}
    slower = content_of("h100-sxm", memory_bandwidth_bytes_per_s=slow)
    (tmp_path / OWN / "h100-sxm.yaml").write_text(yaml.safe_dump(slower))
    assert compute_s("NVIDIA H100 80GB HBM3", "bf16") > 2 * compute_s(
        load_device("h100-sxm"), "bf16"
    )
