"""The cost model of operators.

Classes and features of operators.

Matrix products told from shapes, and how they grow.

Operator models by name.

Models that fit nothing.

Operator models of other packages.

Least squares of the fits: signs, equal columns, near ties.
"""

import json
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from trioflow import tables
from trioflow.base.errors import InputError, PlatformError, TableError
from trioflow.cli import main
from trioflow.costmodel.features import (
    ENTRY_POINTS,
    OperatorModel,
    base_class,
    class_of_name,
    classify,
    convolution_kind,
    feature_matrix,
    find_operator_model,
)
from trioflow.costmodel.fits.curves import choose_least, collect_rows, pair_rows, solve_nonnegative, split_groups
from trioflow.costmodel.fits.operators import GPU_METHODS, METHOD_NAMES, METHODS, fit_named_model
from trioflow.costmodel.operators.curves import PRODUCTS, product_columns, rounded, scale_products
from trioflow.costmodel.operators.model import OperatorCostModel, load_operator_model, load_shipped_models
from trioflow_evaluation.fits.operator_baselines import ProportionalModel, batch_ratio, fit_recorded

from costmodel.gpu_synthetic import make_gpu_trace, make_gpu_traces, make_step
from costmodel.synthetic import law_s, make_operators, make_trace, make_traces


@pytest.fixture(scope="module")
def model() -> OperatorCostModel:
    return fit(make_traces())


@pytest.fixture(scope="module")
def noisy() -> OperatorCostModel:
    return fit(make_traces(noise=0.1))


def fit(traces: list, method: str = "regression") -> OperatorCostModel:
    found, _ = fit_named_model(traces, method=method)
    assert isinstance(found, OperatorCostModel)
    return found


def test_known_law_is_recovered_on_an_unseen_batch(model: OperatorCostModel) -> None:
    operators = make_operators([64, 128, 256], batch=9)
    found = model.predict(operators)
    expected = [law_s(o.name, o.flop, o.read_bytes + o.write_bytes) for o in operators.itertuples()]
    assert found["time_s"].to_numpy() == pytest.approx(expected, rel=1e-3)
    assert not found["extrapolated"].any()


def test_index_follows_the_operators(model: OperatorCostModel) -> None:
    operators = make_operators([64], 4).iloc[::-1].set_index(pd.Index([f"o{i}" for i in range(8)]))
    assert model.predict(operators).index.equals(operators.index)
    assert model.rescale(operators, operators).index.equals(operators.index)
    with pytest.raises(TableError, match="different rows"):
        model.rescale(operators, operators.iloc[1:])


def test_empty_tables_are_legal(model: OperatorCostModel) -> None:
    empty = tables.empty("operators")
    assert list(model.predict(empty).columns) == ["time_s", "low_s", "high_s", "extrapolated"]
    assert model.rescale(empty, empty).empty


def test_intervals_cover_most_of_what_noise_does(noisy: OperatorCostModel) -> None:
    operators = make_operators([100, 150, 200, 300], 8, noise=0.1, seed=99)
    found = noisy.predict(operators)
    recorded = operators["device_ns"] * 1e-9
    inside = (recorded >= found["low_s"]) & (recorded <= found["high_s"])
    assert 0.6 <= inside.mean() <= 1.0
    assert ((found["high_s"] - found["low_s"]) / found["time_s"]).median() < 1.0


def test_step_interval_rests_on_left_out_workloads(noisy: OperatorCostModel) -> None:
    for kind in ("rescale", "predict"):
        low, high = noisy.step_interval(kind)
        assert 0 < low < 1 < high
        assert low * high == pytest.approx(1.0)
    assert noisy.step_interval_basis() == "whole workloads left out; 3 workloads, 6 steps"
    with pytest.raises(InputError, match="'guess'"):
        noisy.step_interval("guess")


def test_captures_of_one_batch_are_no_pair() -> None:
    twice = [make_trace("one", [64, 128], 4, noise=0.1, seed=seed) for seed in (1, 2)]
    assert pair_rows(collect_rows(twice)).empty
    thrice = collect_rows([*twice, make_trace("one", [64, 128], 8)])
    pairs = pair_rows(thrice)
    # Two captures against the third, both ways, sixteen operators each.
    assert len(pairs) == 2 * 2 * 16
    batches = set(zip(thrice.loc[pairs["recorded"], "batch"], thrice.loc[pairs["target"], "batch"], strict=True))
    assert batches == {(4, 8), (8, 4)}


def test_workload_names_do_not_matter() -> None:
    traces = make_traces(noise=0.1)
    renamed = make_traces(noise=0.1)
    names = {"narrow": "zebra", "middle": "apple", "wide": "mango"}
    for trace in renamed:
        trace.facts = replace(trace.facts, workload=names[trace.facts.workload])
    operators = make_operators([77], 6)
    a, b = fit(traces).predict(operators), fit(renamed).predict(operators)
    assert a["time_s"].to_numpy() == pytest.approx(b["time_s"].to_numpy(), rel=1e-9)


@pytest.mark.parametrize("method", sorted(METHODS.keys() - GPU_METHODS))
def test_every_method_fits_saves_and_loads(method: str, tmp_path: Path) -> None:
    traces = make_traces(noise=0.05)
    first = fit(traces, method)
    first.save(tmp_path / "a.json")
    again = load_operator_model(tmp_path / "a.json")
    again.save(tmp_path / "b.json")
    fit(traces[::-1], method).save(tmp_path / "c.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "c.json").read_bytes()
    operators, target = make_operators([70, 300], 5), make_operators([70, 300], 11)
    pd.testing.assert_frame_equal(first.predict(operators), again.predict(operators))
    pd.testing.assert_frame_equal(first.rescale(operators, target), again.rescale(operators, target))
    assert again.step_interval() == first.step_interval()
    assert json.loads((tmp_path / "a.json").read_text())["method"] == method


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "other"}, "not an operator cost model"),
        ({"format": 77}, "format 77"),
        ({"features": ["flop"]}, "is not known"),
        ({"classes": []}, "curve of all operators"),
        ({"steps": {}}, "predict"),
    ],
)
def test_damaged_files_are_named(model: OperatorCostModel, tmp_path: Path, change: dict, text: str) -> None:
    path = tmp_path / "model.json"
    model.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=text) as error:
        load_operator_model(path)
    assert "model.json" in str(error.value)


def test_negative_coefficients_in_a_file_are_refused(model: OperatorCostModel, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    model.save(path)
    content = json.loads(path.read_text())
    content["classes"][0]["curve"]["coefficients"][0] = -1.0
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="negative"):
        load_operator_model(path)


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="no operator to fit"):
        fit_named_model([])
    trace = make_trace("one", [64], 4)
    with pytest.raises(InputError, match="no operator model is called 'magic'"):
        fit_named_model([trace], method="magic")
    with pytest.raises(TableError, match="no column device_ns"):
        fit_named_model([make_broken(trace, drop="device_ns")])
    with pytest.raises(TableError, match="row 2, column device_ns"):
        fit_named_model([make_broken(trace, device_ns=-4)])
    with pytest.raises(TableError, match="row 2, column phase"):
        fit_named_model([make_broken(trace, phase="sideways")])
    other = make_trace("two", [64], 4)
    other.facts = replace(other.facts, device_name="another")
    with pytest.raises(InputError, match="several devices in one fit: another; made up"):
        fit_named_model([trace, other])


def make_broken(trace, drop: str | None = None, **cells: object):  # type: ignore[no-untyped-def]
    broken = make_trace("broken", [64], 4)
    if drop:
        broken.operators = broken.operators.drop(columns=drop)
    for name, value in cells.items():
        broken.operators.loc[2, name] = value
    return broken


def test_captures_with_other_operators_pair_by_identity() -> None:
    traces = make_traces()
    # One capture ran an operator more, in the middle.
    longer = traces[1].operators
    extra = longer.iloc[[5]].assign(name="aten::fill_", module="")
    traces[1].operators = pd.concat([longer.iloc[:5], extra, longer.iloc[5:]], ignore_index=True)
    found = fit(traces)
    assert found.steps["rescale"].steps == 6
    low, high = found.step_interval("rescale")
    assert np.log(high / low) < 0.1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::mm", "gemm"),
        ("aten::addmm", "gemm"),
        ("aten::linear", "gemm"),
        ("aten::conv2d", "convolution"),
        ("aten::_slow_conv2d_forward", "convolution"),
        ("aten::convolution_backward", "convolution_backward"),
        ("aten::_slow_conv2d_backward", "convolution_backward"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::native_batch_norm_backward", "norm"),
        ("aten::layer_norm", "norm"),
        ("aten::_softmax_backward_data", "softmax"),
        ("aten::nll_loss_forward", "loss"),
        ("aten::cross_entropy_loss", "loss"),
        ("aten::add_", "elementwise"),
        ("aten::add.Tensor", "elementwise"),
        ("aten::__and__", "elementwise"),
        ("aten::threshold_backward", "elementwise"),
        ("aten::sum", "reduction"),
        ("aten::max_pool2d_with_indices_backward", "pooling"),
        ("aten::_adaptive_avg_pool2d_backward", "pooling"),
        ("aten::embedding_dense_backward", "embedding"),
        ("aten::copy_", "memory"),
        ("aten::zero_", "memory"),
        ("aten::cat", "memory"),
        ("aten::select_backward", "memory"),
        ("aten::_unsafe_view", "reshape"),
        ("aten::reshape", "reshape"),
        ("aten::t", "view"),
        ("aten::detach_", "view"),
        ("aten::view", "view"),
        ("aten::_foreach_addcdiv_", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("library::something_new", "other"),
        ("", "other"),
    ],
)
def test_class_follows_from_name(name: str, expected: str) -> None:
    assert class_of_name(name) == expected


@pytest.mark.parametrize(
    ("data", "weight", "result", "expected"),
    [
        ([8, 64, 16, 16], [128, 64, 3, 3], [8, 128, 16, 16], "dense"),
        ([8, 64, 16, 16], [128, 64, 3, 3], [8, 128, 14, 14], "dense"),
        ([8, 64, 16, 16], [128, 64, 3, 3], [8, 128, 8, 8], "strided"),
        ([8, 64, 15, 15], [128, 64, 3, 3], [8, 128, 8, 8], "strided"),
        ([8, 64, 16, 16], [128, 64, 1, 1], [8, 128, 16, 16], "pointwise"),
        ([8, 64, 16, 16], [64, 1, 3, 3], [8, 64, 16, 16], "grouped"),
        ([8, 3, 32, 32], [64, 3, 7, 7], [8, 64, 16, 16], "small_channels"),
        ([8, 64, 16, 16], [128, 64, 3, 3], [], "dense"),
    ],
)
def test_convolution_kinds(data: list[int], weight: list[int], result: list[int], expected: str) -> None:
    assert convolution_kind(data, weight, result) == expected


def test_convolutions_are_told_apart_by_shape() -> None:
    operators = pd.DataFrame(
        {
            "name": ["aten::conv2d", "aten::conv2d", "aten::convolution_backward", "aten::conv2d"],
            "input_shapes": [
                [[8, 64, 16, 16], [64, 64, 1, 1]],
                [[8, 64, 16, 16], [64, 64, 3, 3]],
                [[8, 64, 16, 16], [8, 64, 16, 16], [64, 64, 1, 1]],
                [],
            ],
            "output_shapes": [[[8, 64, 16, 16]], [[8, 64, 16, 16]], [[8, 64, 16, 16]], []],
        },
        index=[4, 2, 9, 7],
    )
    found = classify(operators)
    assert found == ["convolution/pointwise", "convolution/dense", "convolution_backward/pointwise", "convolution"]
    assert [base_class(c) for c in found][:2] == ["convolution", "convolution"]


def test_classify_needs_names() -> None:
    with pytest.raises(TableError, match="column name"):
        classify(pd.DataFrame({"flop": [1]}))


def test_feature_matrix_keeps_order_and_names_the_bad_row() -> None:
    operators = pd.DataFrame({"write_bytes": [3, 6], "flop": [1, 4], "read_bytes": [2, 5]})
    assert np.array_equal(feature_matrix(operators), [[1, 2, 3], [4, 5, 6]])
    operators.loc[1, "read_bytes"] = -1
    with pytest.raises(TableError, match="row 1, column read_bytes"):
        feature_matrix(operators)
    with pytest.raises(TableError, match="no column flop"):
        feature_matrix(operators.drop(columns="flop"))


def test_feature_matrix_reads_missing_values_as_an_error() -> None:
    operators = pd.DataFrame({"flop": pd.array([1, None], dtype="Int64"), "read_bytes": [1, 2], "write_bytes": [1, 2]})
    with pytest.raises(TableError, match="row 1, column flop"):
        feature_matrix(operators)


def describe(name, inputs, outputs, flop):
    frame = pd.DataFrame({"name": [name], "flop": [flop], "input_shapes": [inputs], "output_shapes": [outputs]})
    return tuple(product_columns(frame, list(classify(frame)))[0])


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "expected"),
    [
        ("aten::linear", [[2, 8, 16], [32, 16], [32]], [[2, 8, 32]], (1, 16, 32, 16, 1, 0, 0)),
        ("aten::addmm", [[32], [16, 8], [8, 32]], [[16, 32]], (1, 16, 32, 8, 1, 0, 0)),
        ("aten::mm", [[16, 8], [8, 32]], [[16, 32]], (1, 16, 32, 8, 1, 0, 0)),
        ("aten::matmul", [[2, 3, 8, 4], [2, 3, 4, 6]], [[2, 3, 8, 6]], (6, 8, 6, 4, 1, 0, 0)),
        ("aten::linear_backward", [[2, 8, 32], [2, 8, 16], [32, 16]], [[2, 8, 16], [32, 16]], (1, 16, 32, 16, 0, 1, 1)),
        (
            "autograd::engine::evaluate_function: AddmmBackward0",
            [[128, 10], [128, 64], [10, 64]],
            [[128, 64], [10, 64]],
            (1, 128, 10, 64, 0, 1, 1),
        ),
        ("aten::matmul_backward", [[6, 8, 6], [6, 8, 4], [6, 4, 6]], [[6, 8, 4]], (6, 8, 6, 4, 0, 1, 0)),
        ("aten::conv2d", [[4, 8, 10, 10], [16, 8, 3, 3]], [[4, 16, 8, 8]], (1, 256, 16, 72, 1, 0, 0)),
        ("aten::conv2d", [[4, 8, 10, 10], [16, 4, 3, 3]], [[4, 16, 8, 8]], (2, 256, 8, 36, 1, 0, 0)),
        (
            "aten::convolution_backward",
            [[4, 16, 8, 8], [4, 8, 10, 10], [16, 8, 3, 3]],
            [[4, 8, 10, 10], [16, 8, 3, 3]],
            (1, 256, 16, 72, 0, 1, 1),
        ),
        (
            "aten::convolution_backward",
            [[4, 16, 8, 8], [4, 8, 10, 10], [16, 8, 3, 3]],
            [[16, 8, 3, 3]],
            (1, 256, 16, 72, 0, 0, 1),
        ),
        # Sixty-four rows of four groups; the gradients of rows and of weights are grouped products too.
        ("aten::_grouped_mm", [[64, 8], [4, 8, 32], [4]], [[64, 32]], (4, 16, 32, 8, 1, 0, 0)),
        ("aten::_grouped_mm", [[64, 32], [4, 32, 8], [4]], [[64, 8]], (4, 16, 8, 32, 1, 0, 0)),
        ("aten::_grouped_mm", [[8, 64], [64, 32], [4]], [[4, 8, 32]], (4, 8, 32, 16, 1, 0, 0)),
        ("aten::_grouped_mm", [[4, 8, 16], [16, 64], [4]], [[8, 64]], (4, 8, 16, 16, 1, 0, 0)),
    ],
)
def test_products_are_told_from_shapes(name, inputs, outputs, expected):
    flop = 2 * np.prod(expected[:4]) * sum(expected[4:])
    found = describe(name, inputs, outputs, flop)
    assert found[:7] == expected
    windows = expected[1] * expected[3] * expected[0] / 3200
    assert found[7] == pytest.approx(windows if "conv" in name else 1)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "flop"),
    [
        ("aten::add", [[4, 4], [4, 4]], [[4, 4]], 16),
        ("aten::linear", [[2, 8, 16], [32, 17]], [[2, 8, 32]], 16384),
        ("aten::linear", [[2, 8, 16], [32, 16]], [[2, 8, 32]], 99),
        ("aten::linear", [], [], 16384),
    ],
)
def test_shapes_that_do_not_explain_the_work_are_no_product(name, inputs, outputs, flop):
    assert describe(name, inputs, outputs, flop) == (0,) * len(PRODUCTS)


def test_a_shard_scales_its_own_dimension():
    product = np.array([[1.0, 512, 1024, 256, 1, 0, 0, 1]])

    def features(m, n, k):
        return np.array([[2.0 * m * n * k, 4.0 * (m * k + k * n), 4.0 * m * n]])

    whole = features(512, 1024, 256)
    column = scale_products(product, whole, features(512, 256, 256))
    assert column[0, :4].tolist() == [1, 512, 256, 256]
    row = scale_products(product, whole, features(512, 1024, 64))
    assert row[0, :4].tolist() == [1, 512, 1024, 64]
    both = scale_products(product, whole, features(1536, 256, 256))
    assert both[0, :4].tolist() == [1, 1536, 256, 256]


SHEETED = "NVIDIA A100 80GB PCIe"


def on_a_gpu():
    return [replace(trace, facts=replace(trace.facts, device_name=SHEETED)) for trace in make_gpu_traces()]


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_name_fits(method):
    model, table = fit_named_model(on_a_gpu(), method)
    assert model.device_name == SHEETED and len(table)
    assert model.method == ("regression" if method == "auto" else method)


def test_a_processor_is_fitted_by_regression():
    traces = make_gpu_traces()
    assert fit_named_model(traces)[0] == fit_named_model(traces, method="regression")[0]
    with pytest.raises(PlatformError, match="made-up GPU"):
        fit_named_model(traces, "tile")


def test_unknown_names_are_told_the_known_ones():
    with pytest.raises(InputError, match=r"tilt.*tile"):
        fit_named_model(on_a_gpu(), "tilt")
    with pytest.raises(InputError, match="no trace"):
        fit_named_model([], "tile")


def test_proportional_scales_fixed_operators_too():
    before, after = make_step(256, 2), make_step(256, 6)
    assert batch_ratio(before, after) == 3
    found = ProportionalModel().rescale(before, after)
    assert found["time_s"].to_numpy() == pytest.approx(3e-9 * before["device_ns"].to_numpy())
    with pytest.raises(InputError, match="recorded"):
        ProportionalModel().predict(before)
    with pytest.raises(TableError, match="batch_flop"):
        ProportionalModel().rescale(before.drop(columns="batch_flop"), after)


def test_proportional_keeps_the_time_of_the_same_batch():
    before = make_step(256, 2)
    found = ProportionalModel().rescale(before, before)
    assert found["time_s"].to_numpy() == pytest.approx(1e-9 * before["device_ns"].to_numpy())
    assert not found["extrapolated"].any()


def test_recorded_knows_the_same_shapes_only():
    model = fit_recorded([make_gpu_trace(256, 2), make_gpu_trace(256, 2, 3.0)])
    same = make_step(256, 2)
    found = model.predict(same)
    assert found["time_s"].to_numpy() == pytest.approx(2e-9 * same["device_ns"].to_numpy(), rel=1e-3)
    assert (found["low_s"] == found["high_s"]).all()
    # The judge of left-out workloads asks which operators were recorded.
    assert (model.known(same) == found["time_s"]).all() and np.isnan(model.known(make_step(256, 4))).any()
    with pytest.raises(InputError, match="aten::linear was never recorded"):
        model.predict(make_step(256, 4))
    with pytest.raises(InputError, match="10 operators change their size"):
        model.rescale(same, make_step(256, 4))
    assert model.rescale(same, same)["time_s"].sum() == pytest.approx(same["device_ns"].sum() * 1e-9)


def fit_like_ours(traces):  # type: ignore[no-untyped-def]
    return fit_named_model(traces, method="li")


def register(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    found = [metadata.EntryPoint("mine", value, ENTRY_POINTS) for value in values]

    def entry_points(**wanted: str) -> metadata.EntryPoints:
        assert wanted["group"] == ENTRY_POINTS
        return metadata.EntryPoints(found).select(**wanted)

    monkeypatch.setattr(metadata, "entry_points", entry_points)


def test_registered_model_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, f"{__name__}:fit_like_ours")
    assert find_operator_model("mine") is not None
    model, table = fit_named_model(make_traces(), method="mine")
    assert isinstance(model, OperatorModel)
    assert model.method == "li"  # type: ignore[attr-defined]
    assert len(table)


def test_unknown_name_lists_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, f"{__name__}:fit_like_ours")
    with pytest.raises(InputError, match="'yours'; known are mine, regression"):
        find_operator_model("yours", ["regression"])


def test_broken_and_double_registrations_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "no_such_module:fit")
    with pytest.raises(InputError, match="no_such_module:fit"):
        find_operator_model("mine")
    register(monkeypatch, f"{__name__}:fit_like_ours", "no_such_module:fit")
    with pytest.raises(InputError, match="registered 2 times"):
        find_operator_model("mine")


def test_coefficients_are_not_negative_and_columns_of_nothing_stay_out() -> None:
    column = np.array([1.0, 2.0, 4.0])
    columns = np.column_stack([np.zeros(3), column, column])
    solution, residual = solve_nonnegative(columns, 3 * column)
    assert (solution >= 0).all() and solution[0] == 0
    assert solution.sum() == pytest.approx(3) and residual == pytest.approx(0, abs=1e-12)
    solution, residual = solve_nonnegative(columns, -column)
    assert (solution == 0).all() and residual == pytest.approx(np.linalg.norm(column))


def test_near_ties_go_to_the_earlier() -> None:
    assert choose_least([1.0, 0.9995]) == 0
    assert choose_least([1.0, 0.9]) == 1
    assert choose_least([1.0, 0.9, 0.8999]) == 1
    assert rounded(1 / 3, 3) == 0.333


def test_a_fit_without_scikit_learn_says_what_to_install_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.model_selection", None)
    assert main(["fit", "gpt2-tiny-b8", "-o", str(tmp_path / "model.json")]) == 2
    said = capsys.readouterr().err
    assert "fits need scikit-learn" in said and "[fit]" in said
    assert not any(tmp_path.iterdir())


def test_a_lone_group_is_known_and_left_out():
    (known, left_out), *more = split_groups(np.zeros(3))
    assert not more and known.tolist() == left_out.tolist() == [0, 1, 2]
    splits = [(known.tolist(), left.tolist()) for known, left in split_groups(np.array(["b", "a", "b"]))]
    assert splits == [([0, 2], [1]), ([1], [0, 2])]


def test_what_a_timer_takes_is_no_part_of_a_step():
    """Convolutions, which only benchmarks have on the A100 80GB and the V100, took 130 us whatever they computed."""
    models = [
        model for model in load_shipped_models().values() if {*model.facts.get("timed", {}).values()} == {"calls"}
    ]
    assert {model.device_name for model in models} >= {"NVIDIA A100 80GB PCIe", "Tesla V100-PCIE-32GB"}
    assert max(curve.coefficients[0] for model in models for curve in model.in_steps().curves.values()) < 25e-6
