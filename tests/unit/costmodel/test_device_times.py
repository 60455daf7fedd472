"""Traces and a model for the device that is asked about, whatever was traced.

Single operators of NeuSight's layout.
"""

import math
from dataclasses import replace

import pandas as pd
import pytest
from msgspec import structs
from trioflow.base.errors import InputError, PlatformError
from trioflow.costmodel.choices import (
    choose_operator_model,
    load_overrides,
    nearest_model,
    prepare_device_times,
    times_interval,
)
from trioflow.costmodel.fits.operators import fit_device_model
from trioflow.costmodel.new_gpu.rules import TENSOR_CLASSES
from trioflow.costmodel.operators.curves import sized_rows
from trioflow.costmodel.operators.model import load_shipped_models
from trioflow.hardware.machine import find_device, load_device
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace
from trioflow_evaluation.fits.operators import DATASET, load_benchmarks

from costmodel.gpu_synthetic import LIMITS, make_gpu_traces, make_step

A100 = "NVIDIA A100 80GB PCIe"
H100 = "NVIDIA H100 80GB HBM3"
A40 = "NVIDIA A40"
CPU = "a processor"


def make_trace(device=A100, batch=4, *, timed=True, **facts):
    operators = make_step(640, batch).assign(kind="compute", cpu_ns=0)
    if not timed:
        operators["device_ns"] = 0
    told = {
        "workload": "new",
        "batch": batch,
        "device": "cuda",
        "device_name": device,
        "precision": "fp32",
        "step_time_s": operators["device_ns"].sum() * 1e-9,
        "step_time_source": "busy" if timed else "none",
    }
    return Trace(operators, pd.DataFrame(), Facts(**(told | facts)))


@pytest.fixture(scope="module")
def a100():
    fitted = fit_device_model(make_gpu_traces(), LIMITS, method="tile")[0]
    return structs.replace(fitted, device_name=A100)


def test_the_traced_device_keeps_its_times(a100):
    trace = make_trace()
    found = prepare_device_times([trace], A100, {"own": a100})
    assert found.traces == [trace] and found.model is a100
    assert (found.confidence, found.warnings) == ("measured", [])
    assert found.model_text.startswith("own (tile), anchored")
    assert times_interval(found.traces[0].facts) == (1.0, 1.0)


def test_classes_timed_call_by_call_lose_what_a_launch_takes(a100):
    """In a step the launch is the host's; a trace that was timed call by call holds it, and keeps the model that does."""
    called = structs.replace(a100, facts={**a100.facts, "timed": {"elementwise": "calls", "gemm": "kernels"}})
    small = pd.DataFrame(
        {
            "name": ["aten::add", "aten::mm"],
            "phase": "forward",
            "module": "m",
            "flop": [0, 2 * 64**3],
            "read_bytes": 2 * 4 * 64**2,
            "write_bytes": 4 * 64**2,
            "dtype": "float",
            "input_shapes": [[[64, 64], [64, 64]]] * 2,
            "output_shapes": [[[64, 64]]] * 2,
        }
    )
    alone_s, queued_s = (
        prepare_device_times([trace], A100, {"own": called}).model.predict(small)["time_s"]
        for trace in (make_trace(timer_floor_s=5e-6), make_trace())
    )
    assert alone_s[0] > 4e-6 > 3e-6 > queued_s[0] > 1e-6
    assert queued_s[1] == alone_s[1]
    large = small.assign(read_bytes=small["read_bytes"] * 300, write_bytes=small["write_bytes"] * 300)
    times = [model.predict(large)["time_s"][0] for model in (called, called.in_steps())]
    assert times[0] - times[1] == pytest.approx(alone_s[0] - queued_s[0], rel=1e-3)


def test_another_gpu_gets_times_by_the_rule_and_the_model_too(a100):
    trace = make_trace(precision="bf16")
    found = prepare_device_times([trace], A40, {"own": a100})
    ratio = found.traces[0].facts.step_time_s / trace.facts.step_time_s
    assert ratio > 1.2, "half the rate, a third of the bandwidth"
    low, high = times_interval(found.traces[0].facts)
    assert low < 0.9 and high > 1.1
    assert found.confidence == "uncalibrated", "no operator of an A40, or of its chip, was measured"
    assert found.model.device_name == A40
    assert "new GPU: NVIDIA A40 from NVIDIA A100" in found.model_text
    assert any("no cost model of NVIDIA A40" in warning for warning in found.warnings)
    assert any("new GPU" in warning for warning in found.traces[0].facts.warnings)


@pytest.mark.parametrize(
    ("device", "word"),
    [
        ("NVIDIA H100 PCIe", "extrapolated"),
        ("NVIDIA B200", "extrapolated"),
        (A40, "uncalibrated"),
        ("AMD Instinct MI300X", "uncalibrated"),
        ("NVIDIA A10", "uncalibrated"),
    ],
)
def test_a_chip_of_which_nothing_was_measured_is_uncalibrated(a100, device, word):
    """Whether times are predicted or carried over; a trace of the GPU itself is a measurement."""
    for trace in (make_trace(precision="bf16"), make_trace("none", timed=False)):
        found = prepare_device_times([trace], device, {"own": a100})
        assert found.confidence == word
        assert any("ever measured" in one for one in found.warnings) == (word == "uncalibrated")
    own = prepare_device_times([make_trace(device, precision="bf16")], device, {"own": a100})
    assert own.confidence == "extrapolated"


def test_a_model_of_the_target_is_preferred(a100):
    other = structs.replace(a100, device_name=H100)
    found = prepare_device_times([make_trace()], H100, {"a": a100, "h": other})
    assert found.model is other and found.warnings == []
    assert found.confidence == "extrapolated"
    assert found.traces[0].facts.step_time_s < make_trace().facts.step_time_s


def test_a_device_without_a_sheet_only_lends(a100):
    mine = structs.replace(a100, device_name=CPU)
    found = prepare_device_times([make_trace()], CPU, {"mine": mine, "a": a100})
    assert found.confidence == "uncalibrated"
    assert found.model is a100, "recorded times are rescaled by the model of their own device"
    assert "compute times are those of the traced device" in found.warnings[-1]
    assert times_interval(found.traces[0].facts) == (1.0, 1.0)


def test_without_times_the_model_gives_them(a100):
    found = prepare_device_times([make_trace("none", timed=False)], A100, {"own": a100})
    real_s = make_trace().facts.step_time_s
    assert found.traces[0].facts.step_time_s == pytest.approx(real_s, rel=0.05)
    assert found.confidence == "extrapolated"
    low, high = times_interval(found.traces[0].facts)
    assert (low, high) == pytest.approx(a100.step_interval("predict"))


def test_without_times_on_a_gpu_that_nobody_measured(a100):
    found = prepare_device_times([make_trace("none", timed=False)], A40, {"own": a100})
    assert found.traces[0].facts.device_name == A40
    low, high = times_interval(found.traces[0].facts)
    base_low, base_high = a100.step_interval("predict")
    assert low < base_low and high > base_high, "the rule's error comes on top"
    rule = found.model.model.step_interval("ours")
    expected = math.hypot(math.log(base_high), math.log(rule[1]))
    assert math.log(high) == pytest.approx(expected)


def test_a_view_takes_no_time_on_a_gpu(a100):
    trace = make_trace("none", timed=False)
    work = ["flop", "read_bytes", "write_bytes"]
    trace.operators.loc[0, work] = 0
    found = prepare_device_times([trace], A100, {"own": a100})
    assert found.traces[0].operators["device_ns"].iloc[0] == 0
    assert (found.traces[0].operators["device_ns"].iloc[1:] > 0).all()


def test_times_from_elsewhere_replace_recorded_ones(a100, tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("name,time_us\ngelu,1000\n")
    trace = make_trace()
    found = prepare_device_times([trace], A100, {"own": a100}, overrides=load_overrides(path))
    operators = found.traces[0].operators
    gelu = operators["name"] == "aten::gelu"
    assert set(operators.loc[gelu, "device_ns"]) == {1_000_000}
    assert (operators.loc[~gelu, "device_ns"] == trace.operators.loc[~gelu, "device_ns"]).all()
    assert found.traces[0].facts.step_time_s == pytest.approx(operators["device_ns"].sum() / 1e9)
    assert found.confidence == "uncalibrated"
    assert "2 operators" in found.traces[0].facts.warnings[-1]
    with pytest.raises(InputError, match="2 traces were given"):
        prepare_device_times([trace, trace], A100, {"own": a100}, overrides=load_overrides(path))


def test_what_cannot_be_timed_is_refused(a100):
    with pytest.raises(InputError, match="no cost model of a processor can predict"):
        prepare_device_times([make_trace("none", timed=False)], CPU, {"own": a100})
    with pytest.raises(InputError, match="some of the traces hold no times"):
        prepare_device_times([make_trace(), make_trace(timed=False)], A100, {"own": a100})
    with pytest.raises(InputError, match="no operator cost model ships"):
        prepare_device_times([make_trace()], A100, {})


def test_the_nearest_model_is_that_of_the_same_chip(a100):
    models = {
        "v100": structs.replace(a100, device_name="Tesla V100-PCIE-32GB"),
        "a100": a100,
        "h100": structs.replace(a100, device_name=H100),
        "cpu": structs.replace(a100, device_name=CPU),
    }
    assert nearest_model(models, find_device("NVIDIA A100-SXM4-40GB"), "fp32") == "a100"
    assert nearest_model(models, find_device("NVIDIA H200"), "bf16") == "h100"
    assert nearest_model({"cpu": models["cpu"]}, find_device("NVIDIA H200"), "bf16") is None


@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "h100-sxm"])
def test_faster_tensor_cores_slow_nothing_that_runs_beside_them(name):
    """The nearest GPU by their peak was another one's: bert's optimizer loop took 1.4 times as long on a faster GPU."""
    sheet, step = load_device(name), make_step(640, 4).assign(kind="compute", cpu_ns=0)
    beside = ~sized_rows(step)["operator_class"].isin(TENSOR_CLASSES).to_numpy()
    times = []
    for scale in (1.0, 1.5, 2.5, 4.0):
        peaks = {
            p: rate * (scale if sheet.runs_on_tensor_cores(p) else 1.0) for p, rate in sheet.peak_flop_per_s.items()
        }
        faster = replace(sheet, name="own", driver_names=("Own GPU",), chip="Own", peak_flop_per_s=peaks)
        model = choose_operator_model(load_shipped_models(), faster, "bf16", on_gpu=True).model
        times.append(model.predict(step)["time_s"][beside].to_numpy())
    assert len(times[0]) and all(one == pytest.approx(times[0]) for one in times)


def test_an_optimizer_s_loop_runs_the_kernels_of_forward_where_only_others_were_measured():
    """On the H100 each took the 34 us of kernels that update many parameters at once, a view too."""
    step = make_step(640, 4).assign(kind="compute", cpu_ns=0)
    step = step[sized_rows(step)["operator_class"].isin(["elementwise", "view"]).to_numpy()]
    assert set(sized_rows(step)["operator_class"]) >= {"elementwise"}
    model = load_shipped_models()["h100-sxm"]
    forward, optimizer = (model.predict(step.assign(phase=phase)) for phase in ("forward", "optimizer"))
    assert optimizer["time_s"].tolist() == forward["time_s"].tolist()


def test_a_gpu_never_gets_a_processors_model(a100):
    cpu = structs.replace(a100, device_name=CPU)
    unknown = "NVIDIA GeForce RTX 3070"
    models = {"cpu": cpu, "a": a100}
    for trace, target in (
        (make_trace(unknown), unknown),
        (make_trace(unknown), A100),
        (make_trace(unknown), CPU),
        (make_trace("none", timed=False), unknown),
    ):
        with pytest.raises(PlatformError, match=r"config/devices/rtx-3070\.yaml"):
            prepare_device_times([trace], target, models)
    with pytest.raises(InputError, match="no cost model of a GPU for NVIDIA A40: cpu"):
        prepare_device_times([make_trace()], A40, {"cpu": cpu})
    own = structs.replace(a100, device_name=unknown)
    assert prepare_device_times([make_trace(unknown)], unknown, models | {"b": own}).model is own
    for name in ("Tesla V100-DGXS-32GB", "GeForce RTX 2080 Ti", "NVIDIA A100-PG509-200"):
        found = prepare_device_times([make_trace(name)], name, models)
        assert found.model.base is a100 and found.confidence == "extrapolated"


DEVICE = "Tesla V100-PCIE-32GB"
CONV = "OPName,Latency,Device,B,Input_Channel,Output_Channel,Kernel_Szie,Input_Size,Stride,Padding\n"


def write(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / DATASET / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_shapes_and_times(tmp_path):
    folder = write(
        tmp_path,
        {
            "test/linear.csv": "OPName,Latency,Device,B,M,N,K\n"
            f"linear,0.5,{DEVICE},1,8,16,32\nlinear,0.7,{DEVICE},1,8,16,32\n"
            "linear,9,another,1,8,16,32\n",
            "test/elem.csv": f"OPName,Latency,Device,B,H\naddu,0.1,{DEVICE},4,5\nadd,0.2,{DEVICE},4,5\n",
            f"train/collect/conv/p2.1.0/{DEVICE}.csv": CONV
            + f"conv,1,{DEVICE},2,3,8,3,7,2,1\nconv,1,{DEVICE},2,3,8,3,7,1,0\n",
        },
    )
    found = load_benchmarks(folder, DEVICE).set_index("name", append=True)
    assert found["part"].tolist() == ["train", "train", "test", "test", "test"]
    linear = found.xs("aten::linear", level=1).iloc[0]
    assert linear["device_ns"] == 600_000, "the median of the repeats"
    assert linear["input_shapes"] == [[8, 16], [32, 16], [32]], "N is the length of the sum"
    assert linear["flop"] == 2 * 8 * 16 * 32
    shapes = found.xs("aten::add", level=1)["input_shapes"].tolist()
    assert sorted(map(len, shapes)) == [1, 2]
    outputs = found.xs("aten::conv2d", level=1)["output_shapes"].tolist()
    assert outputs == [[[2, 8, 5, 5]], [[2, 8, 4, 4]]]
    rows = sized_rows(found.reset_index("name"), products=True)
    assert (rows["product_batch"] > 0).sum() == 3


def test_a_file_that_the_catalogue_does_not_name_is_not_read(tmp_path):
    text = "OPName,Latency,Device,B,H\nadd,1,NVIDIA L4,1,1\n"
    folder = write(tmp_path, {"train/collect/add/p2.1.0/NVIDIA L4.csv": text})
    assert load_benchmarks(folder, "NVIDIA L4").empty


def test_a_device_without_rows(tmp_path):
    folder = write(tmp_path, {"test/elem.csv": "OPName,Latency,Device,B,H\nadd,1,x,1,1\n"})
    assert load_benchmarks(folder, DEVICE).empty


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("OPName,Latency,Device,B\nadd,1,x,1\n", "'?H'? is missing"),
        (f"OPName,Latency,Device,B,H\nadd,0,{DEVICE},1,1\n", "line 2"),
        (f"OPName,Latency,Device,B,H\nadd,1,{DEVICE},1,wide\n", "line 2"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        load_benchmarks(write(tmp_path, {"test/elem.csv": text}), DEVICE)
