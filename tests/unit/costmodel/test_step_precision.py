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
from msgspec import structs
from trioflow.base.errors import InputError
from trioflow.costmodel.choices import PREDICTED, choose_operator_model, time_trace, times_interval
from trioflow.costmodel.fits.operators import fit_device_model
from trioflow.costmodel.new_gpu.carry import derive_operator_model
from trioflow.costmodel.operators.curves import PRODUCTS, sized_rows
from trioflow.costmodel.operators.model import load_shipped_models, roofline_times
from trioflow.costmodel.operators.precision import (
    class_precision,
    in_precision,
    load_tensor_tables,
    measured_convolutions,
    nearest_table,
    sustained_time,
)
from trioflow.costmodel.uncertainty import (
    ANCHOR_WAYS,
    SHIPPED_BAND,
    AnchoredModel,
    Anchoring,
    StepAnchor,
    anchor_step,
    load_band,
)
from trioflow.datasets.catalogue import load_catalogue
from trioflow.hardware.machine import SUSTAINED_COMPUTE, find_sheet, load_device
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace, load_trace
from trioflow_evaluation.fits.half_precision import FORM, fit_tensor_products, judge_experts, save_tensor_tables
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
    return structs.replace(fitted, device_name=A100)


def test_a_table_is_fitted_and_judged_on_left_out_shapes(tables):
    assert list(tables) == ["a100-sxm4-80gb"]
    table = tables["a100-sxm4-80gb"]
    assert table.curve.form == FORM
    assert max(table.held_out_large_error, table.held_out_error) < 0.06
    assert abs(table.held_out_sum_error) < 0.06
    assert table.low_log <= 0 <= table.high_log
    assert table.products == 6**3, "few rows belong to serving, fp8 to another precision"


def test_a_table_survives_its_file(tables, tmp_path):
    known = structs.replace(load_tensor_tables(), tables=tables)
    save_tensor_tables(known, tmp_path / "model.json")
    assert load_tensor_tables(tmp_path / "model.json") == known
    (tmp_path / "other.json").write_text(json.dumps({"kind": "else"}))
    with pytest.raises(InputError, match="not a table of tensor products"):
        load_tensor_tables(tmp_path / "other.json")
    with pytest.raises(InputError, match="no table of single products"):
        fit_tensor_products(tmp_path / "nothing")


@pytest.mark.parametrize("name", sorted(load_tensor_tables().tables))
def test_products_are_monotone_and_at_most_proportional_in_every_size(name):
    table, random = load_tensor_tables().tables[name], np.random.default_rng(7)
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
    tables = load_tensor_tables().tables
    assert set(tables) == {"a100-sxm4-80gb", "h100-sxm", "h200", "b200", "gb200", "l40s"}
    assert (
        set(load_tensor_tables().scaled["fp8"])
        == set(load_tensor_tables().scaled["fp8-block"])
        == set(tables) - {"a100-sxm4-80gb"}
    )
    for name, table in tables.items():
        peak = load_device(name).peak("bf16")
        rows = pd.DataFrame({"flop": [2 * 8192.0**3], "read_bytes": 4 * 8192.0**2, "write_bytes": 2 * 8192.0**2})
        time_s = float(table.predict(rows)[0])
        assert 0.4 * peak < 2 * 8192**3 / time_s < peak


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


def test_the_power_rule_is_what_two_boards_say_and_holds_for_those_left_out():
    """A100 and H100 give its two numbers; others, and a board of less power, are predicted."""
    tables = load_tensor_tables().tables
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


def test_full_precision_and_fitted_half_precision_stay(a100):
    sheet = load_device("a100-sxm4-80gb")
    assert in_precision(a100, sheet, "fp32") is a100
    own = structs.replace(a100, facts={**a100.facts, "precisions": {"gemm": "bf16", "convolution": "fp16"}})
    assert in_precision(own, sheet, "bf16") is own
    assert in_precision(a100, load_device("p100-pcie-16gb"), "fp16") is a100
    assert class_precision(in_precision(a100, sheet, "bf16"), "gemm") == "bf16"


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
        wild = structs.replace(model, curves={key: c.scaled(1e-6) for key, c in model.curves.items()})
        assert wild.predict(operators)["time_s"].to_numpy()[:3] == pytest.approx(least[:3])


def shipped():
    return load_shipped_models()


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
    base = load_shipped_models()["h100-sxm"]
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
    base = load_shipped_models()["h100-sxm"]
    told = judge_anchors(trace, trace, base, trace.operators)
    assert told["timer"] == pytest.approx(told["measured_s"])
    assert told["ratio"] == pytest.approx(told["measured_s"])
    assert told["none"] == pytest.approx(total)


def test_a_step_is_extrapolated_within_its_anchor_and_says_so(tiny):
    total = float(tiny.operators["device_ns"].sum()) * 1e-9
    trace = with_step(tiny, 0.8 * total, 1e-6)
    base = load_shipped_models()["h100-sxm"]
    plan = named_plan("single", 1)
    compute_s = {}
    for way in ANCHOR_WAYS:
        graph = extrapolate(trace, plan, base, anchoring=Anchoring(way))
        told = graph.tasks
        compute_s[way] = float(told.loc[told["kind"] == "compute", "duration_s"].sum())
        assert any("--anchor" in text for text in graph.metadata.warnings) == (way != "none")
        low, high = graph.metadata.uncertainty.compute
        assert (low < 0.95 and high > 1.05) == (way != "none")
    gone_s = compute_s["none"] - np.array([compute_s["timer"], compute_s["ratio"]])
    assert gone_s == pytest.approx(0.2 * total, rel=1e-3)


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
    facts = timed.facts
    assert facts.step_time_s == pytest.approx(real_s, rel=0.05)
    low, high = times_interval(facts)
    assert low < 1 < high
    assert (facts.step_time_source, facts.device_name) == (PREDICTED, DEVICE)
    assert facts.warnings[0] == "first"
    assert "operator times are predicted" in facts.warnings[1]
    assert (timed.operators["cpu_ns"] == 0).all()
    starts = timed.operators["start_ns"] + timed.operators["device_ns"]
    assert (starts.iloc[:-1].to_numpy() == timed.operators["start_ns"].iloc[1:]).all()
    assert (trace.operators["device_ns"] == 0).all(), "the given trace stays"


@pytest.mark.parametrize("kind", [int, float, object])
def test_a_package_says_what_is_extrapolated_in_any_type(kind):
    class Model:
        """An operator model of another package, every seventh of whose times is extrapolated."""

        def predict(self, operators):
            time_s = operators["flop"].astype(float) / 1e13 + 1e-6
            beyond = (operators["op_id"] % 7 == 0).astype(self.kind)
            return pd.DataFrame({"time_s": time_s, "low_s": time_s, "high_s": time_s, "extrapolated": beyond})

        def __init__(self, kind):
            self.kind = kind

        def step_interval(self, kind="rescale", distance=None):
            return 0.8, 1.25

        def step_interval_basis(self, kind="rescale"):
            return "a test"

    wanted, found = (time_trace(load_trace("gpt2-tiny-b8"), Model(one)).facts.predicted_times for one in (bool, kind))
    assert found == wanted and 0 < found["extrapolated_share"] < 1
