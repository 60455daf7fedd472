"""A GPU predicted from another one: rules by hand, fits of a known law, and what a trace becomes.

A GPU of one's own: a sheet given by path is as good as one that ships, and each of its numbers counts.
"""

import copy
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from msgspec import structs
from trioflow.base.errors import InputError, PlatformError, TableError, TraceError
from trioflow.base.yaml_files import read_yaml
from trioflow.costmodel.choices import DeviceTimes
from trioflow.costmodel.new_gpu.carry import (
    NewGpuBand,
    NewGpuModel,
    derive_operator_model,
    load_new_gpu_model,
    retime_trace,
    scale_trace,
)
from trioflow.costmodel.new_gpu.rules import Exponents, reachable_share
from trioflow.costmodel.uncertainty import RATIO, TIMER, anchor_step
from trioflow.hardware.machine import (
    OWN,
    SHIPPED,
    Device,
    DeviceSheet,
    find_device,
    find_sheet,
    list_devices,
    load_device,
)
from trioflow.hardware.platform import load_platform
from trioflow.prediction.question import time_operators
from trioflow.trace.facts import Facts
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.sizes import LanguageModel, LanguageStep
from trioflow.trace.store import Trace
from trioflow_evaluation.fits.new_gpu import (
    BENCHMARKS,
    Fits,
    describe_pairs,
    fit_exponents,
    leave_out,
    pair_gpus,
    predict_held_out,
)

from costmodel.gpu_synthetic import law_rows
from costmodel.synthetic import make_operators

H100, A100, A40, V100 = (load_device(name) for name in ("h100-sxm", "a100-pcie-80gb", "a40", "v100-pcie-32gb"))
PLAIN = NewGpuModel({}, {}, {})
"""Nothing fitted: shares of the roofline carried over."""


def operators(**columns: Any) -> pd.DataFrame:
    """Return one large matrix product, one addition and one copy from the host."""
    n, elements = 8192, 2**28
    frame = pd.DataFrame(
        {
            "name": ["aten::mm", "aten::add", "aten::copy_"],
            "phase": "forward",
            "kind": ["compute", "compute", "memcpy"],
            "flop": [2 * n**3, 0, 0],
            "read_bytes": [8 * n * n, 8 * elements, 4 * elements],
            "write_bytes": [4 * n * n, 4 * elements, 4 * elements],
            "device_ns": [20_000_000, 2_000_000, 40_000_000],
            "input_shapes": [[[n, n], [n, n]], [[elements]] * 2, [[elements]]],
            "output_shapes": [[[n, n]], [[elements]], [[elements]]],
        }
    )
    return frame.assign(**columns)


def ratios(rule: str, source: Any, target: Any, precision: str = "fp32", **named: Any) -> list[float]:
    frame = operators()
    predicted = scale_trace(frame, source, target, rule=rule, precision=precision, model=PLAIN, **named)
    return list(predicted["time_s"] / (frame["device_ns"] * 1e-9))


def test_ours_carries_the_share_of_the_roofline_over() -> None:
    """Without a fit a product follows the peaks, an addition the bandwidths."""
    found = ratios("ours", H100, A40, floor_s=0.0)
    assert found == pytest.approx([67.0 / 37.4, 3350.0 / 696.0, 1.0], rel=1e-6)


def test_precision_decides_which_peak_counts() -> None:
    assert ratios("ours", H100, A40, "tf32", floor_s=0.0)[0] == pytest.approx(494.7 / 74.8)
    assert ratios("ours", H100, A40, "bf16", floor_s=0.0)[0] == pytest.approx(989.0 / 149.7)
    # A V100 has no tf32: its products run on the vector units.
    assert ratios("ours", H100, V100, "tf32", floor_s=0.0)[0] == pytest.approx(494.7 / 14.0)


def test_nothing_is_faster_than_its_roofline() -> None:
    eager = NewGpuModel({"gemm": Exponents(1.0, 40.0, 1e-8, 1.0)}, {}, {})
    n = 8192
    # On the H100 at 95 % of its peak; the A100 has more power for its peak.
    frame = operators(device_ns=[round(2 * n**3 / 67e12 / 0.95 * 1e9), 2_000_000, 1])
    found = scale_trace(frame, H100, A100, precision="fp32", model=eager, floor_s=0.0)
    assert found["time_s"].iloc[0] == pytest.approx(2 * n**3 / 19.5e12 * 1.0, rel=0.001)


def test_habitat_by_hand() -> None:
    frame = operators()
    n, ridge = 8192, 37.4e12 / 696e9
    share = (2 * n**3 / (12 * n * n)) / ridge
    gamma = 0.5 / share
    compute = (1980 / 1740) * (132 / 84)
    wanted = (3350 / 696) ** gamma * compute ** (1 - gamma)
    found = scale_trace(frame, H100, A40, rule="habitat", precision="fp32", model=PLAIN)
    assert found["time_s"].iloc[0] / 20e-3 == pytest.approx(wanted)
    assert found["time_s"].iloc[1] / 2e-3 == pytest.approx(3350 / 696)


def test_there_and_back_is_the_same() -> None:
    """Every rule but the regression inverts."""
    model = NewGpuModel({"gemm": Exponents(0.5, 15.0, 2e-5, 0.8)}, {}, {})
    slow = operators(device_ns=[100_000_000, 3_000_000, 1_000])
    for rule in ("bandwidth", "ours"):
        there = scale_trace(slow, A100, A40, rule=rule, precision="fp32", model=model, floor_s=0.0)
        moved = slow.assign(device_ns=(there["time_s"] * 1e9).round().astype("int64"))
        back = scale_trace(moved, A40, A100, rule=rule, precision="fp32", model=model, floor_s=0.0)
        assert back["time_s"].to_numpy() == pytest.approx(slow["device_ns"] * 1e-9, rel=1e-4)


def test_intervals_are_those_of_the_class_and_wider_for_a_rule_that_misses_more() -> None:
    bands = {"ours": {"gemm": NewGpuBand(math.log(0.8), math.log(1.5), 50), "*": NewGpuBand(-0.1, 0.1, 90)}}
    model = NewGpuModel({}, bands, {"ours": NewGpuBand(-0.2, 0.2, 5)})
    found = scale_trace(operators(), H100, A40, precision="fp32", model=model)
    low, high = found["low_s"] / found["time_s"], found["high_s"] / found["time_s"]
    assert list(low) == pytest.approx([0.8, math.exp(-0.1), 1.0])
    assert list(high) == pytest.approx([1.5, math.exp(0.1), 1.0])
    assert list(found["extrapolated"]) == [True, True, False], "nothing was fitted; copies stay"
    other = scale_trace(operators(), H100, A40, rule="habitat", precision="fp32", model=model)
    assert list(other["high_s"] / other["time_s"])[:2] == pytest.approx([2.0, 2.0]), "assumed"


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(InputError, match="no rule for a new GPU is called 'magic'; known are bandwidth"):
        scale_trace(operators(), H100, A40, rule="magic", precision="fp32", model=PLAIN)
    with pytest.raises(InputError, match="unknown precision 'fp5'"):
        scale_trace(operators(), H100, A40, precision="fp5", model=PLAIN)
    with pytest.raises(TableError, match="no column phase"):
        scale_trace(operators().drop(columns="phase"), H100, A40, precision="fp32", model=PLAIN)


@pytest.fixture(scope="module")
def law_pairs() -> pd.DataFrame:
    return describe_pairs(pair_gpus(law_rows(noise=0.02)))


def test_a_known_law_is_found_on_gpus_that_the_fit_never_saw(law_pairs: pd.DataFrame) -> None:
    held = predict_held_out(law_pairs, "ours")
    error = (held["held_out_s"] / held["target_s"] - 1).abs()
    assert error.mean() < 0.06
    naive = predict_held_out(law_pairs, "bandwidth")
    assert (naive["held_out_s"] / naive["target_s"] - 1).abs().mean() > 5 * error.mean()


def test_what_is_fitted_never_sees_the_left_out_chip_or_workload(law_pairs: pd.DataFrame) -> None:
    spoiled = law_pairs.copy()
    touched = (spoiled["source_chip"] == "GH100") | (spoiled["target_chip"] == "GH100")
    spoiled.loc[touched, "target_s"] *= 7.0
    clean = fit_exponents(leave_out(law_pairs, "GH100", None))
    assert fit_exponents(leave_out(spoiled, "GH100", None)) == clean
    known: Fits = {}
    fit_exponents(law_pairs, known)
    assert fit_exponents(leave_out(law_pairs, "GH100", None), known) == clean
    assert fit_exponents(spoiled) != fit_exponents(law_pairs)
    assert leave_out(law_pairs, None, BENCHMARKS).empty


def test_a_model_survives_its_file(tmp_path: Any) -> None:
    model = load_new_gpu_model()
    model.save(tmp_path / "model.json")
    assert load_new_gpu_model(tmp_path / "model.json") == model
    (tmp_path / "bad.json").write_text('{"kind": "new_gpu_model", "format": 3}')
    with pytest.raises(InputError, match=r"bad\.json.*incomplete or damaged"):
        load_new_gpu_model(tmp_path / "bad.json")
    (tmp_path / "other.json").write_text('{"kind": "operator_cost_model"}')
    with pytest.raises(InputError, match="not a new-GPU model"):
        load_new_gpu_model(tmp_path / "other.json")


def gpu_trace(**facts: Any) -> Trace:
    table = make_operators([64, 128], batch=8)
    table = table.assign(start_ns=table["device_ns"].cumsum() - table["device_ns"], kind="compute")
    busy = float(table["device_ns"].sum()) * 1e-9
    told: dict[str, Any] = {
        "workload": "toy",
        "batch": 8,
        "device_name": "NVIDIA H100 80GB HBM3",
        "device": "cuda",
        "precision": "tf32",
        "step_time_s": busy + 1e-4,
        "step_times_s": [busy, busy + 2e-4],
        "busy_s": busy,
        "measured_end_to_end_s": 1.0,
        "gradients": [],
        "warnings": ["older"],
        **facts,
    }
    return Trace(table, pd.DataFrame(), Facts(**told))


def test_operators_timed_one_by_one_are_anchored_on_a_new_gpu_too() -> None:
    """A timer that shows 5 us where nothing runs is taken off before the step is carried over."""
    plain, timed = gpu_trace(), gpu_trace(timer_floor_s=5e-6)
    step_s = float(plain.operators["device_ns"].sum()) * 1e-9
    for trace in (plain, timed):
        trace.facts = replace(trace.facts, measured_end_to_end_s=step_s)
    timed.operators["device_ns"] += 5000 * (timed.operators["device_ns"] > 0)
    for way in (TIMER, RATIO):
        moved = retime_trace(timed, A40)
        found = anchor_step(moved, way).apply(moved.operators["device_ns"].to_numpy() * 1e-9)
        wanted = retime_trace(plain, A40).facts.measured_end_to_end_s
        assert found.sum() == pytest.approx(wanted, rel=0.01)
        assert moved.operators["device_ns"].sum() * 1e-9 > 1.001 * found.sum()


def test_exponents_are_half_believed_beyond_what_was_fitted() -> None:
    steep = Exponents(1.0, 15.0, 1e-8, 1.0)
    bounded = structs.replace(steep, least_power=8.0)
    power = np.array([2.0, 8.0, 12.0])
    free, held = (reachable_share(power, law) for law in (steep, bounded))
    assert held[1:] == pytest.approx(free[1:])
    assert free[0] < held[0] < free[1]
    assert held[0] == pytest.approx(reachable_share(np.array([4.0]), steep)[0])


def test_another_batch_is_never_surer_than_on_gpus_left_out() -> None:
    class Sure:
        device_name = "NVIDIA H100 80GB HBM3"

        def step_interval(self, kind: str, distance: float | None) -> tuple[float, float]:
            return 0.98, 1.02

    derived = derive_operator_model(Sure(), A40, precision="fp32")  # type: ignore[arg-type]
    band = load_new_gpu_model().resized
    assert band is not None and band.workloads >= 3 and band.steps >= 30
    low, high = derived.step_interval("rescale", np.log(4.0))
    assert high == pytest.approx(np.exp(band.half_at(np.log(4.0)))) and high > 1.1
    assert low == pytest.approx(1 / high)


def test_a_trace_of_the_same_gpu_is_itself() -> None:
    trace = gpu_trace()
    assert retime_trace(trace, H100) is trace


def test_traces_that_tell_nothing_are_refused() -> None:
    with pytest.raises(TraceError, match="does not say its precision"):
        retime_trace(gpu_trace(precision=None), A40)
    assert retime_trace(gpu_trace(precision=None), A40, precision="fp32").facts.new_gpu
    with pytest.raises(TraceError, match="holds no times"):
        retime_trace(gpu_trace(step_time_source="none"), A40)
    with pytest.raises(TraceError, match="themselves predicted"):
        retime_trace(retime_trace(gpu_trace(), A40), A100)
    with pytest.raises(PlatformError, match="no data sheet describes 'cpu'"):
        retime_trace(gpu_trace(device_name="cpu"), A40)


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


def test_an_unknown_gpu_needs_no_name_that_ships() -> None:
    own = load_device(content_of("h100-sxm", name="x1", driver_names=["Maker X1"]))
    for precision in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        near = compute_s(own, precision) / compute_s("h100-sxm", precision)
        assert near == pytest.approx(1.0, rel=0.15), precision
    assert compute_s(own, "bf16") < compute_s(own, "tf32") < compute_s(own, "fp32")
    assert timed(own, "bf16").confidence == "extrapolated"


ASKED = {
    "memory_bandwidth_bytes_per_s": "bf16",
    "power_limit_w": "fp32",
    "sustained_compute": "bf16",
    **{f"peak_flop_per_s.{name}": name for name in ("fp32", "tf32", "fp16", "bf16", "fp8")},
}
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
        entry["value"] = entry["value"] // 2 if isinstance(entry["value"], int) else entry["value"] / 2
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
    four = {
        key: {"value": value, "source": "a test"}
        for key, value in (("memory_bytes", 24e9), ("memory_bandwidth_bytes_per_s", 1008e9))
    }
    peaks = {
        key: {"value": value, "source": "a test"}
        for key, value in (("fp32", 82.6e12), ("fp16", 165.2e12), ("bf16", 165.2e12), ("fp8", 330.3e12))
    }
    sheet = {"name": "x2", "driver_names": ["Maker X2"], **four, "peak_flop_per_s": peaks}
    own = load_device(sheet)
    assert compute_s(own, "bf16") < min(compute_s(own, "fp32"), compute_s("l4", "bf16"))
    assert compute_s(own, "fp8") < compute_s(own, "bf16")
    equal = {**peaks, "tf32": peaks["fp32"]}
    slow = load_device({**sheet, "peak_flop_per_s": equal, "tensor_core_precisions": ["tf32", "bf16"]})
    assert compute_s(slow, "tf32") < 1.05 * compute_s(slow, "fp32"), "vector units are there too"
    none = load_device({**sheet, "tensor_core_precisions": []})
    assert compute_s(none, "bf16") > compute_s(own, "bf16")


def test_numbers_of_a_device_in_a_platform_s_file_count_too(tmp_path: Path) -> None:
    def load(bandwidth: float, name: str = "NVIDIA H100 80GB HBM3") -> DeviceSheet | str:
        device = {
            "name": name,
            "kind": "gpu",
            "memory_bytes": {"value": 80e9, "source": "a test"},
            "peak_flop_per_s": {"fp32": {"value": 67e12, "source": "a test"}},
            "memory_bandwidth_bytes_per_s": {"value": bandwidth, "source": "a test"},
        }
        content = {**yaml.safe_load(BOX), "device": device}
        (tmp_path / "box.yaml").write_text(yaml.safe_dump(content))
        return load_platform(tmp_path / "box.yaml").device.described

    assert compute_s(load(3350e9), "bf16") == compute_s("h100-sxm", "bf16")
    assert compute_s(load(1675e9), "bf16") > 1.2 * compute_s("h100-sxm", "bf16")
    assert compute_s(load(1675e9, "Maker X3"), "fp32") > compute_s(load(3350e9, "Maker X3"), "fp32")


def test_a_broken_sheet_of_another_gpu_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert compute_s("NVIDIA H100 80GB HBM3", "bf16") > 2 * compute_s(load_device("h100-sxm"), "bf16")
