"""Matrix products in half precision: fitted tables, and the model that uses them.

Operators timed one by one, brought to the measured step that they came from.

Times for a trace that has none.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.choices import list_models
from trioflow.costmodel.device_times import PREDICTED, choose_operator_model, time_trace
from trioflow.costmodel.new_gpu.carry import derive_operator_model
from trioflow.costmodel.operators.class_curves import sized_rows
from trioflow.costmodel.operators.methods import ProportionalModel, fit_device_model
from trioflow.costmodel.operators.model import load_operator_model, roofline_times, shipped_operator_models
from trioflow.costmodel.operators.precision import (
    PrecisionModel,
    class_precision,
    in_precision,
    load_tensor_products,
    measured_convolutions,
    nearest_table,
    shipped_experts,
    shipped_scaled,
    shipped_tensor_products,
    sustained_time,
)
from trioflow.costmodel.operators.products import PRODUCTS
from trioflow.costmodel.overrides import load_overrides
from trioflow.costmodel.uncertainty import (
    ANCHOR_WAYS,
    SHIPPED_BAND,
    AnchoredModel,
    Anchoring,
    StepAnchor,
    anchor_step,
    describe_anchor,
    load_band,
)
from trioflow.datasets.catalogue import load_catalogue
from trioflow.hardware.machine import SUSTAINED_COMPUTE, find_sheet, load_device
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace, load_trace
from trioflow_evaluation.fits import half_precision
from trioflow_evaluation.fits.half_precision import fit_tensor_products, judge_experts, save_tensor_products
from trioflow_evaluation.published.judge import judge_anchors

from costmodel.gpu_synthetic import DEVICE, LIMITS, make_gpu_traces, make_step

RATE, BANDWIDTH, LAUNCH_S = 250e12, 1.5e12, 3e-6
A100 = "NVIDIA A100 80GB PCIe"


def product_s(m, n, k):
    return LAUNCH_S + max(2 * m * n * k / RATE, 2 * (m * k + k * n + m * n) / BANDWIDTH)


@pytest.fixture
def tables(tmp_path):
    """Write and fit a made-up table of an A100."""
    sizes = [2**power for power in range(8, 14)]
    rows = [
        {
            "device": "NVIDIA A100-SXM4-80GB",
            "gemm_dtype": "bfloat16",
            "m": m,
            "n": n,
            "k": k,
            "latency": product_s(m, n, k) * 1e3,
        }
        for m in [16, *sizes]
        for n in sizes
        for k in sizes
    ]
    rows.append(rows[0] | {"gemm_dtype": "fp8", "latency": 1e6})
    file = tmp_path / load_catalogue().select_files(["aiconfigurator/gemm-a100"])[0].key
    file.parent.mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(file)
    # Another version of the engine, which nobody chose.
    other = file.parents[1] / "99.0" / file.name
    other.parent.mkdir()
    pd.DataFrame(rows).assign(latency=1.0).to_parquet(other)
    return fit_tensor_products(tmp_path)


@pytest.fixture(scope="module")
def a100():
    fitted = fit_device_model(make_gpu_traces(), LIMITS, method="tile")[0]
    return replace(fitted, device_name=A100)


def test_a_table_is_fitted_and_judged_on_left_out_shapes(tables):
    assert list(tables) == ["a100-sxm4-80gb"]
    table = tables["a100-sxm4-80gb"]
    assert table.curve.form == half_precision.FORM
    assert max(table.held_out_large_error, table.held_out_error) < 0.06
    assert abs(table.held_out_sum_error) < 0.06
    assert table.low_log <= 0 <= table.high_log
    assert table.products == 6**3, "few rows belong to serving, fp8 to another precision"


def test_a_table_survives_its_file(tables, tmp_path):
    save_tensor_products(tables, tmp_path / "model.json")
    assert load_tensor_products(tmp_path / "model.json") == tables
    (tmp_path / "other.json").write_text(json.dumps({"kind": "else"}))
    with pytest.raises(InputError, match="not a table of tensor products"):
        load_tensor_products(tmp_path / "other.json")
    with pytest.raises(InputError, match="no table of single products"):
        fit_tensor_products(tmp_path / "nothing")


@pytest.mark.parametrize("name", sorted(shipped_tensor_products()))
def test_products_are_monotone_and_at_most_proportional_in_every_size(name):
    table, random = shipped_tensor_products()[name], np.random.default_rng(7)
    sizes = np.exp(random.uniform(np.log(32), np.log(32768), (400, 4))).round()
    sizes[:, 0] = random.integers(1, 64, 400)

    def time_s(given, gradient):
        batch, m, n, k = given.T
        rows = pd.DataFrame({"flop": 2 * batch * m * n * k})
        rows["read_bytes"], rows["write_bytes"] = 2 * batch * (m * k + k * n), 2 * batch * m * n
        flags = [np.full(400, float(flag)) for flag in (not gradient, gradient, gradient, 1)]
        rows = rows.assign(**dict(zip(PRODUCTS, [batch, m, n, k, *flags], strict=True)))
        return table.predict(rows)

    for gradient in (False, True):
        once = time_s(sizes, gradient)
        for place in range(4):
            doubled, longer = sizes.copy(), sizes.copy()
            doubled[:, place] *= 2
            longer[:, place] += 1
            assert (time_s(longer, gradient) >= once * (1 - 1e-12)).all()
            assert (time_s(doubled, gradient) >= once * (1 - 1e-12)).all()
            assert (time_s(doubled, gradient) <= 2 * once * (1 + 1e-12)).all()


def test_shipped_tables_are_those_of_six_gpus():
    tables = shipped_tensor_products()
    assert set(tables) == {"a100-sxm4-80gb", "h100-sxm", "h200", "b200", "gb200", "l40s"}
    assert set(shipped_scaled("fp8")) == set(shipped_scaled("fp8-block")) == set(tables) - {"a100-sxm4-80gb"}
    for name, table in tables.items():
        peak = load_device(name).peak("bf16")
        rows = pd.DataFrame({"flop": [2 * 8192.0**3], "read_bytes": 4 * 8192.0**2, "write_bytes": 2 * 8192.0**2})
        time_s = float(table.predict(rows)[0])
        assert 0.4 * peak < 2 * 8192**3 / time_s < peak


def test_products_in_half_precision_take_the_tables_time(a100, tables, monkeypatch):
    monkeypatch.setattr("trioflow.costmodel.operators.precision.shipped_tensor_products", lambda: tables)
    sheet = load_device("a100-sxm4-80gb")
    model = in_precision(a100, sheet, "bf16")
    assert isinstance(model, PrecisionModel)
    operators = make_step(1024, 8).assign(kind="compute")
    full, half = a100.predict(operators), model.predict(operators)
    linear = (operators["name"] == "aten::linear").to_numpy()
    row = operators[linear].iloc[0]
    # A linear layer of 2048 tokens, 1024 x 2048.
    data = (row["read_bytes"] + row["write_bytes"]) / BANDWIDTH
    alone = tables["a100-sxm4-80gb"].compute(sheet.peak("bf16"))
    more = (sustained_time(sheet, alone) - alone) * row["flop"] / sheet.peak("bf16")
    expected = LAUNCH_S + max(row["flop"] / RATE, data) + more
    assert half.loc[linear, "time_s"].iloc[0] == pytest.approx(expected, rel=0.06)
    thin = make_linear(16, 8192, 8192)  # which waits for memory, whatever the clock
    alone_s = float(tables["a100-sxm4-80gb"].predict(sized_rows(thin, products=True))[0])
    assert model.predict(thin)["time_s"].iloc[0] == pytest.approx(alone_s, rel=0.02)
    gelu = (operators["name"] == "aten::gelu").to_numpy()
    pd.testing.assert_frame_equal(full[gelu], half[gelu])
    assert not half.loc[linear, "extrapolated"].any()
    batched = (operators["name"] == "aten::matmul").to_numpy()
    assert half.loc[batched, "extrapolated"].all(), "tables hold single products only"
    assert (half["low_s"] <= half["time_s"]).all() and (half["time_s"] <= half["high_s"]).all()


def make_linear(m, n, k):
    """A linear layer in half precision."""
    one = {
        "name": "aten::linear",
        "phase": "forward",
        "flop": 2 * m * n * k,
        "read_bytes": 2 * (m * k + k * n),
        "write_bytes": 2 * m * n,
        "input_shapes": [[m, k], [n, k]],
        "output_shapes": [[m, n]],
    }
    return pd.DataFrame([one])


@pytest.mark.parametrize(
    ("device", "word"),
    [("h100-sxm", "bf16"), ("a100-sxm4-80gb", "bf16"), ("b200", "bf16"), ("h100-sxm", "fp8"), ("b200", "fp8")],
)
def test_computing_takes_longer_in_a_step_than_alone(a100, device, word):
    """By what its board sustains of the peak, whatever the format; not by less than its table says."""
    sheet, scaled = load_device(device), word == "fp8"
    made = make_linear(8192, 8192, 8192).assign(
        name="aten::_scaled_mm" if scaled else "aten::mm", dtype="Float8_e4m3fn" if scaled else "BFloat16"
    )
    made["input_shapes"] = [[[8192, 8192], [8192, 8192]]]
    half = shipped_tensor_products()[device]
    table, peak = shipped_scaled("fp8")[device] if scaled else half, sheet.peak(word)
    alone_s = float(table.predict(sized_rows(made, products=True))[0])
    sustained = sustained_time(sheet, half.compute(sheet.peak("bf16")))
    more_s = max(sustained - table.compute(peak), 0.0) * made["flop"].iloc[0] / peak
    found = in_precision(a100, sheet, "bf16").predict(made)
    assert found["time_s"].iloc[0] == pytest.approx(alone_s + more_s, rel=1e-6)


def test_rescaled_products_in_fp8_are_inside_what_their_table_holds(a100):
    """As predicted ones are: the base, fitted to smaller products in another precision, has no say."""
    made = make_linear(4096, 4096, 4096).assign(name="aten::_scaled_mm", device_ns=200_000)
    made["input_shapes"] = [[[4096, 4096], [4096, 4096]]]
    sizes = {name: made[name] * 2 for name in ("flop", "read_bytes", "write_bytes")}
    model = in_precision(a100, load_device("h100-sxm"), "bf16")
    assert not model.predict(made)["extrapolated"].any()
    assert not model.rescale(made, made.assign(**sizes))["extrapolated"].any()


def test_the_power_rule_is_what_two_boards_say_and_holds_for_those_left_out():
    """A100 and H100 give its two numbers; others, and a board of less power, are predicted."""
    tables = shipped_tensor_products()
    for name, measured in (("a100-sxm4-80gb", SUSTAINED_COMPUTE), ("h100-sxm", 1.40)):
        sheet = load_device(name)
        alone = tables[name].compute(sheet.peak("bf16"))
        assert 1 + sustained_time(sheet, alone) - alone == pytest.approx(measured, abs=1e-5)
        for lines in ({"power_limit_w": math.inf}, {"sustained_compute": SUSTAINED_COMPUTE}):
            assert sustained_time(replace(sheet, **lines), alone) == pytest.approx(alone + SUSTAINED_COMPUTE - 1)
    # 500 W boards of the H100 take 1.7 times as long as tables of single operators say, where 700 W take 1.4.
    weak = replace(sheet, power_limit_w=500.0)
    assert 1 + sustained_time(weak, alone) - alone == pytest.approx(1.7, abs=0.06)
    # Products that kept a B200 at its 1,000 W ran at 0.56 of its peak (aiconfigurator/sustained-b200).
    assert 1 / sustained_time(load_device("b200"), 1.0) == pytest.approx(0.56, rel=0.11)
    watts = [sustained_time(replace(weak, power_limit_w=w), 1.0) for w in (200, 350, 500, 700, 2000)]
    assert watts == sorted(watts, reverse=True) and watts[-1] == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_board_of_less_power_computes_longer_in_every_format(a100, precision):
    sheet = load_device("h100-sxm")
    weak = replace(sheet, power_limit_w=350.0)
    made, times = make_linear(8192, 8192, 8192), []
    for board in (sheet, weak):
        derived = derive_operator_model(a100, board, precision="fp32")
        model = in_precision(derived, board, precision) if precision != "fp32" else derived
        times.append(model.predict(made)["time_s"].iloc[0])
    assert times[1] > 1.2 * times[0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_product_cut_along_its_sum_takes_its_own_time_at_any_batch(a100, ranks):
    """Sixteen times the rows and an eighth of the sum were once taken for more FLOPs on the way there."""
    model = in_precision(a100, load_device("h100-sxm"), "bf16")
    recorded = make_linear(4096, 3072, 8192)
    recorded["device_ns"] = (model.predict(recorded)["time_s"] * 1e9).round().astype(int)
    for batch in (1, 2, 4, 8, 16, 32, 64):
        own = make_linear(4096 * batch, 3072, 8192 // ranks)
        found = model.rescale(recorded, recorded.assign(**own[["flop", "read_bytes", "write_bytes"]]))
        assert found["time_s"].iloc[0] == pytest.approx(model.predict(own)["time_s"].iloc[0], rel=1e-3)


def test_products_of_experts_are_as_uncertain_as_their_measured_layers(a100):
    model = in_precision(a100, load_device("a100-sxm4-80gb"), "bf16")
    shape = {"phase": "forward", "flop": 2 * 8 * 512 * 4096 * 4096, "output_shapes": [[4096, 4096]]}
    rows = [
        {"name": "aten::_grouped_mm", "input_shapes": [[4096, 4096], [8, 4096, 4096], [8]]} | shape,
        {"name": "aten::bmm", "input_shapes": [[8, 512, 4096], [8, 4096, 4096]]} | shape,
    ]
    operators = pd.DataFrame(rows).assign(read_bytes=2 * (4096 + 8 * 4096) * 4096, write_bytes=2 * 4096**2)
    grouped, batched = model.predict(operators).to_dict("records")
    band = shipped_experts()["a100-sxm4-80gb"]
    assert grouped["time_s"] == pytest.approx(batched["time_s"])
    assert grouped["high_s"] == pytest.approx(grouped["time_s"] * math.exp(band.high_log))
    assert grouped["low_s"] == pytest.approx(batched["low_s"])
    assert batched["high_s"] < 1.5 * batched["time_s"]


def test_layers_of_experts_are_compared_with_dense_products(tmp_path):
    sheet = load_device("a100-sxm4-80gb")

    def dense_s(work):
        return work["flop"].to_numpy() / 1e14

    rows = [
        {
            "device": sheet.driver_name,
            "moe_dtype": "bfloat16",
            "moe_ep_size": 1,
            "moe_tp_size": 2,
            "num_tokens": tokens,
            "topk": 2,
            "num_experts": 8,
            "hidden_size": 4096,
            "inter_size": 1024,
            "distribution": "power_law_1.01",
            "latency": 0.0,
        }
        for tokens in (16, 4096, 8192, 16384)
    ]
    for row, slower in zip(rows, (9, 2, 2, 2), strict=True):
        chosen = row["num_tokens"] * row["topk"]
        moved = 2 * (chosen * (3 * 512 + 4096) + row["num_tokens"] * 4096)
        once_s = 6 * chosen * 4096 * 512 / 1e14 + moved / sheet.memory_bandwidth_bytes_per_s
        row["latency"] = 1e3 * slower * once_s
    # What belongs to serving, another routing, format or share of the experts, is left out.
    rows += [
        rows[1] | change | {"latency": 1e6}
        for change in ({"distribution": "power_law_1.2"}, {"moe_dtype": "fp8"}, {"moe_ep_size": 4})
    ]
    file = tmp_path / load_catalogue().select_files(["aiconfigurator/experts-a100"])[0].key
    file.parent.mkdir(parents=True)
    pd.DataFrame(rows).to_parquet(file)
    assert judge_experts(tmp_path, {"another": dense_s}) == {}
    band = judge_experts(tmp_path, {sheet.name: dense_s})[sheet.name]
    assert band.layers == 3
    assert band.median_ratio == pytest.approx(2)
    assert (band.low_log, band.high_log) == (0.0, pytest.approx(math.log(2)))


def test_recorded_times_are_rescaled_with_the_tables_shape(a100, tables, monkeypatch):
    monkeypatch.setattr("trioflow.costmodel.operators.precision.shipped_tensor_products", lambda: tables)
    model = in_precision(a100, load_device("a100-sxm4-80gb"), "fp16")
    one, two = (make_step(1024, batch).assign(kind="compute") for batch in (4, 8))
    target = one.copy()
    for name in ("flop", "read_bytes", "write_bytes"):
        target[name] = two[name]
    found = model.rescale(one, target)
    linear = (one["name"] == "aten::linear").to_numpy()
    before, after = (model.predict(frame)["time_s"][linear].iloc[0] for frame in (one, two))
    recorded = one.loc[linear, "device_ns"].iloc[0] * 1e-9
    assert found.loc[linear, "time_s"].iloc[0] == pytest.approx(recorded * after / before, rel=0.01)
    same = model.rescale(one, one)
    assert same["time_s"].to_numpy() == pytest.approx(one["device_ns"].to_numpy() * 1e-9)


def test_full_precision_and_fitted_half_precision_stay(a100):
    sheet = load_device("a100-sxm4-80gb")
    assert in_precision(a100, sheet, "fp32") is a100
    own = replace(a100, facts={**a100.facts, "precisions": {"gemm": "bf16", "convolution": "fp16"}})
    assert in_precision(own, sheet, "bf16") is own
    assert in_precision(a100, load_device("p100-pcie-16gb"), "fp16") is a100
    assert class_precision(in_precision(a100, sheet, "bf16"), "gemm") == "bf16"


def test_another_gpu_takes_the_nearest_table_by_the_rule(a100):
    derived = derive_operator_model(a100, load_device("a40"), precision="fp32")
    model = in_precision(derived, load_device("a40"), "bf16")
    assert isinstance(model, PrecisionModel) and model.source == "l40s"
    operators = make_step(4096, 8).assign(kind="compute")
    linear = (operators["name"] == "aten::linear").to_numpy()
    here = model.predict(operators)["time_s"][linear].iloc[0]
    there = in_precision(a100, load_device("a100-sxm4-80gb"), "bf16").predict(operators)
    assert here > 1.5 * there["time_s"][linear].iloc[0], "an A40 has half the rate"
    low, high = model.step_interval("predict")
    base = derived.step_interval("predict")
    assert low < base[0] and high > base[1]
    assert math.log(high) == pytest.approx(math.hypot(math.log(base[1]), model.table.high_log))
    assert model.step_interval("rescale", 0.7) == derived.step_interval("rescale", 0.7)


def test_the_nearest_table_is_ones_own_then_the_chips():
    tables = ["a100-sxm4-80gb", "h100-sxm", "h200"]
    assert nearest_table(tables, load_device("h200"), "bf16") == "h200"
    assert nearest_table(tables, load_device("a100-pcie-40gb"), "bf16") == "a100-sxm4-80gb"
    assert nearest_table(tables, load_device("l4"), "bf16") == "a100-sxm4-80gb"
    assert nearest_table([], load_device("l4"), "bf16") is None


def make_convolutions(elem_bytes):
    """Return 3 x 3 convolutions of an image batch, their gradients, and an element-wise operator."""
    rows = []
    for channels, side in ((64, 56), (256, 14)):
        image, weight = [128, channels, side, side], [channels, channels, 3, 3]
        elements, window = 128 * channels * side * side, channels * channels * 9
        flop = 2 * elements * channels * 9
        rows.append(("aten::conv2d", "forward", [image, weight], [image], flop, elements + window, elements))
        rows.append(
            (
                "aten::convolution_backward",
                "backward",
                [image, image, weight],
                [image, weight],
                2 * flop,
                2 * elements + window,
                elements + window,
            )
        )
        rows.append(("aten::relu", "forward", [image], [image], elements, elements, elements))
    names = ["name", "phase", "input_shapes", "output_shapes", "flop", "read_bytes", "write_bytes"]
    frame = pd.DataFrame(rows, columns=names)
    frame[["read_bytes", "write_bytes"]] *= elem_bytes
    return frame.assign(module="m", op_id=range(len(frame)), kind="compute")


@pytest.mark.parametrize("device", ["h100-sxm", "a100-sxm4-80gb", "v100-sxm2-32gb", "mi300x"])
def test_convolutions_keep_their_own_share_of_the_roofline(device):
    sheet, models = load_device(device), shipped()
    model = choose_operator_model(models, sheet.driver_name, "fp16", on_gpu=True).model
    operators = make_convolutions(2)
    found = model.predict(operators)
    rows = sized_rows(operators, products=True)
    least = roofline_times(rows, sheet, "fp16")
    convolution = operators["name"].str.contains("conv").to_numpy()
    share = (least / found["time_s"].to_numpy())[convolution]
    measured = measured_convolutions()
    there = roofline_times(sized_rows(make_convolutions(4), products=True), load_device("h100-sxm"), "tf32")
    reached = (there / measured.predict(make_convolutions(4))["time_s"].to_numpy())[convolution]
    assert (share <= 1 + 1e-9).all()
    assert share == pytest.approx(reached, rel=0.35), "that of the convolutions on tensor cores"
    width = found["high_s"] / found["low_s"]
    assert (width[convolution] > 4).all(), "nobody measured them in half precision"
    assert found["extrapolated"][convolution].all()
    assert (found["time_s"].to_numpy() >= 0.999 * least)[~convolution].all(), "by their bytes"


def test_tf32_is_a_precision_of_its_own():
    models, operators = shipped(), make_step(4096, 8).assign(kind="compute")
    linear = (operators["name"] == "aten::linear").to_numpy()
    for device, slower in (("h100-sxm", 3.0), ("a100-pcie-80gb", 3.0), ("a40", 1.5)):
        sheet = load_device(device)
        full, tf32, half = (
            choose_operator_model(models, sheet.driver_name, word, on_gpu=True).model.predict(
                operators.assign(read_bytes=operators["read_bytes"] * size, write_bytes=operators["write_bytes"] * size)
            )
            for word, size in (("fp32", 2), ("tf32", 2), ("bf16", 1))
        )
        time_s = [frame["time_s"].to_numpy()[linear].sum() for frame in (full, tf32, half)]
        assert time_s[0] > slower * time_s[1], device
        assert time_s[1] / time_s[2] == pytest.approx(2.0, rel=0.2), (
            "half the rate, twice the bytes; what half precision loses in a step is its own line"
        )
        assert (tf32["high_s"] / tf32["low_s"])[linear].min() > 4, "no product was measured in tf32"
        assert tf32["extrapolated"][linear].all()
    v100 = choose_operator_model(models, "Tesla V100-PCIE-32GB", "tf32", on_gpu=True).model
    assert v100.method == "shipped", "its hardware has no tf32"


def test_extrapolated_sizes_stay_inside_the_sheets_bounds():
    """A class that nobody fitted: neither faster than its roofline nor lost far below it."""
    models = shipped()
    operators = pd.DataFrame(
        {
            "name": ["x::unknown", "aten::mm", "aten::topk", "aten::add"],
            "phase": "backward",
            "flop": [10**15, 10**16, 0, 10],
            "read_bytes": [10**6, 10**8, 10**13, 40],
            "write_bytes": [10**6, 10**8, 10**13, 40],
            "module": "m",
            "input_shapes": [[[1]]] * 4,
            "output_shapes": [[[1]]] * 4,
        }
    )
    for name, model in models.items():
        sheet = find_sheet(model.device_name)
        if sheet is None:
            continue
        found = model.predict(operators)
        least = roofline_times(sized_rows(operators, products=True), sheet, "fp32")
        assert found["extrapolated"].iloc[:3].all()
        assert (found["time_s"].to_numpy() >= least * (1 - 1e-9))[:3].all(), name
        assert (found["time_s"].to_numpy() <= 100 * least + 1e-3).all(), name
        wild = replace(model, curves={key: replace(c, curve=c.curve.scaled(1e-6)) for key, c in model.curves.items()})
        assert wild.predict(operators)["time_s"].to_numpy()[:3] == pytest.approx(least[:3])


def shipped():
    return {path.parent.name: load_operator_model(path) for path in list_models()}


@pytest.fixture(scope="module")
def tiny():
    return load_trace("gpt2-tiny-b8")


def with_step(trace: Trace, step_s: float, floor_s: float) -> Trace:
    facts = replace(trace.facts, measured_end_to_end_s=step_s, timer_floor_s=floor_s)
    return Trace(trace.operators, trace.tensors, facts)


def test_the_timer_is_spread_over_operators_up_to_its_floor(tiny):
    time_s = tiny.operators["device_ns"].to_numpy() * 1e-9
    timed = int((time_s > 0).sum())
    excess = 0.25 * float(time_s[time_s > 0].min()) * timed
    anchor = anchor_step(with_step(tiny, time_s.sum() - excess, 1.0))
    assert anchor.timer_s == pytest.approx(excess / timed)
    assert anchor.scale == pytest.approx(1.0)
    floor = excess / timed / 4
    limited = anchor_step(with_step(tiny, time_s.sum() - excess, floor))
    assert limited.timer_s == floor
    left = np.maximum(time_s - floor, 0).sum()
    assert limited.scale * left == pytest.approx(time_s.sum() - excess)
    assert limited.scale < 1


def test_a_step_longer_than_its_operators_is_one_factor(tiny):
    total = float(tiny.operators["device_ns"].sum()) * 1e-9
    assert anchor_step(with_step(tiny, 2 * total, 1e-6)) == StepAnchor(0.0, pytest.approx(2.0))
    assert anchor_step(with_step(tiny, total / 2, 1e-6), "ratio").timer_s == 0
    assert anchor_step(with_step(tiny, total / 2, 1e-6), "none") == StepAnchor()
    assert anchor_step(tiny) == StepAnchor()
    with pytest.raises(InputError, match="unknown anchor"):
        anchor_step(tiny, "guess")


def test_an_anchored_model_takes_the_timer_off_after_rescaling(tiny):
    base = load_operator_model(shipped_operator_models()["h100-sxm"])
    model = AnchoredModel(base, StepAnchor(2e-6, 1.5))
    operators = tiny.operators
    for told, alone in (
        (model.rescale(operators, operators), base.rescale(operators, operators)),
        (model.predict(operators), base.predict(operators)),
    ):
        for column in ("time_s", "low_s", "high_s"):
            wanted = 1.5 * np.maximum(alone[column].to_numpy() - 2e-6, 0)
            assert told[column].to_numpy() == pytest.approx(wanted)
        assert told["extrapolated"].equals(alone["extrapolated"])


def test_every_way_to_anchor_tells_its_own_step_but_none(tiny):
    total = float(tiny.operators["device_ns"].sum()) * 1e-9
    trace = with_step(tiny, 0.9 * total, 1e-6)
    base = load_operator_model(shipped_operator_models()["h100-sxm"])
    told = judge_anchors(trace, trace, base, trace.operators)
    assert told["timer"] == pytest.approx(told["measured_s"])
    assert told["ratio"] == pytest.approx(told["measured_s"])
    assert told["none"] == pytest.approx(total)


def test_a_step_is_extrapolated_within_its_anchor_and_says_so(tiny):
    total = float(tiny.operators["device_ns"].sum()) * 1e-9
    trace = with_step(tiny, 0.8 * total, 1e-6)
    base = load_operator_model(shipped_operator_models()["h100-sxm"])
    plan = named_plan("single", 1)
    compute_s = {}
    for way in ANCHOR_WAYS:
        graph = extrapolate(trace, plan, base, anchoring=Anchoring(way))
        told = graph.tasks
        compute_s[way] = float(told.loc[told["kind"] == "compute", "duration_s"].sum())
        assert any("--anchor" in text for text in graph.metadata.warnings) == (way != "none")
        low, high = graph.metadata.compute_interval
        assert (low < 0.95 and high > 1.05) == (way != "none")
    gone_s = compute_s["none"] - np.array([compute_s["timer"], compute_s["ratio"]])
    assert gone_s == pytest.approx(0.2 * total, rel=1e-3)


def test_a_trace_without_such_a_step_stays_as_it_is(tiny):
    base = load_operator_model(shipped_operator_models()["h100-sxm"])
    model, anchor = Anchoring().change(tiny, base)
    assert model is base
    assert anchor == StepAnchor()
    assert describe_anchor(anchor) == []
    assert Anchoring().interval(anchor) == (1.0, 1.0)
    assert Anchoring(band=(0.9, 1.2)).interval(anchor) == (0.9, 1.2)


def test_the_shipped_interval_says_what_it_was_measured_on():
    low, high = load_band()
    assert 0.8 < low < 1 < high < 1.2
    told = json.loads(SHIPPED_BAND.read_text())
    assert told["steps"] >= 8
    assert told["provenance"]["inputs"]


@pytest.fixture(scope="module")
def model():
    return fit_device_model(make_gpu_traces(), LIMITS, method="tile")[0]


def untimed(width=640, batch=4):
    operators = make_step(width, batch).assign(device_ns=0, cpu_ns=5)
    facts = Facts(
        workload="new",
        batch=batch,
        device="meta",
        device_name="none",
        step_time_s=0.0,
        step_time_source="none",
        warnings=["first"],
    )
    return Trace(operators, pd.DataFrame(), facts)


def test_times_come_with_an_interval_and_a_label(model):
    trace = untimed()
    timed = time_trace(trace, model)
    real_s = make_step(640, 4)["device_ns"].sum() * 1e-9
    assert timed.trace.facts.step_time_s == pytest.approx(real_s, rel=0.05)
    assert timed.low_s < timed.trace.facts.step_time_s < timed.high_s
    facts = timed.trace.facts
    assert (facts.step_time_source, facts.device_name) == (PREDICTED, DEVICE)
    assert facts.warnings[0] == "first"
    assert "all are predicted" in facts.warnings[1]
    assert (timed.trace.operators["cpu_ns"] == 0).all()
    starts = timed.trace.operators["start_ns"] + timed.trace.operators["device_ns"]
    assert (starts.iloc[:-1].to_numpy() == timed.trace.operators["start_ns"].iloc[1:]).all()
    assert (trace.operators["device_ns"] == 0).all(), "the given trace stays"


def test_sizes_outside_the_fit_are_said(model):
    assert ", 0% of them outside" in time_trace(untimed(), model).trace.facts.warnings[1]
    assert ", 0% of them outside" not in time_trace(untimed(4096, 32), model).trace.facts.warnings[1]


def test_given_times_win(model, tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("name,time_us\ngelu,1000\n")
    timed = time_trace(untimed(), model, overrides=load_overrides(path))
    chosen = timed.trace.operators["name"] == "aten::gelu"
    assert set(timed.trace.operators.loc[chosen, "device_ns"]) == {1_000_000}


def test_a_proportion_needs_recorded_times():
    with pytest.raises(InputError, match="recorded"):
        time_trace(untimed(), ProportionalModel())
