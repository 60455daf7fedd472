"""The cost model of operators."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.costmodel.operators.class_curves import collect_rows, pair_rows
from trioflow.costmodel.operators.model import (
    METHODS,
    OperatorCostModel,
    fit_operator_model,
    load_operator_model,
)

from costmodel.synthetic import law_s, make_operators, make_trace, make_traces

SIZES = ["flop", "read_bytes", "write_bytes"]


@pytest.fixture(scope="module")
def model() -> OperatorCostModel:
    return fit(make_traces())


@pytest.fixture(scope="module")
def noisy() -> OperatorCostModel:
    return fit(make_traces(noise=0.1))


def fit(traces: list, method: str = "regression") -> OperatorCostModel:
    found, _ = fit_operator_model(traces, method=method)
    assert isinstance(found, OperatorCostModel)
    return found


def test_known_law_is_recovered_on_an_unseen_batch(model: OperatorCostModel) -> None:
    operators = make_operators([64, 128, 256], batch=9)
    found = model.predict(operators)
    expected = [law_s(o.name, o.flop, o.read_bytes + o.write_bytes) for o in operators.itertuples()]
    assert found["time_s"].to_numpy() == pytest.approx(expected, rel=1e-3)
    assert not found["extrapolated"].any()


def test_rescaling_keeps_what_is_special_about_an_operator(model: OperatorCostModel) -> None:
    recorded, target = make_operators([64, 128], 4), make_operators([64, 128], 16)
    slow = recorded.assign(device_ns=recorded["device_ns"] * 3)
    plain, tripled = model.rescale(recorded, target), model.rescale(slow, target)
    assert tripled["time_s"].to_numpy() == pytest.approx(3 * plain["time_s"].to_numpy())
    assert plain["time_s"].to_numpy() == pytest.approx(target["device_ns"] * 1e-9, rel=1e-3)


def test_rescaling_does_not_make_the_constant_part_grow(model: OperatorCostModel) -> None:
    recorded = make_operators([128], 4)
    adds = recorded["name"] == "aten::add"
    target = recorded.assign(**{name: recorded[name] * 10 for name in SIZES})
    ratio = model.rescale(recorded, target)["time_s"] / (recorded["device_ns"] * 1e-9)
    assert (ratio[adds] > 1.0).all()
    assert (ratio[adds] < 9.0).all()
    views = recorded["name"] == "aten::t"
    assert ratio[views].to_numpy() == pytest.approx(1.0, rel=1e-12)


def test_unchanged_sizes_return_the_recorded_time_exactly(noisy: OperatorCostModel) -> None:
    operators = make_operators([64, 4000], 16, noise=0.3)
    assert noisy.predict(operators)["extrapolated"].any()
    target = operators.copy()
    target.loc[3:, "flop"] = target.loc[3:, "flop"] * 2
    found = noisy.rescale(operators, target)
    same = (operators[SIZES] == target[SIZES]).all(axis=1)
    assert same.any()
    assert not same.all()
    exact = (operators["device_ns"] / 1_000_000_000)[same]
    for column in ("time_s", "low_s", "high_s"):
        assert (found.loc[same, column] == exact).all()
    assert not found.loc[same, "extrapolated"].any()
    assert found.loc[~same & (operators["flop"] > 0), "extrapolated"].any()
    assert (found.loc[~same, "low_s"] < found.loc[~same, "high_s"]).all()


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


def test_extrapolation_is_said(model: OperatorCostModel) -> None:
    operators = make_operators([2048], 16)
    found = model.predict(operators)["extrapolated"]
    assert found[operators["name"] != "aten::t"].all()
    unknown = operators.assign(name="aten::cumsum")
    assert model.predict(unknown)["extrapolated"].all()
    target = operators.assign(flop=operators["flop"] * 2)
    assert model.rescale(operators, target)["extrapolated"][operators["flop"] > 0].all()


def test_unknown_classes_fall_back_to_the_phase(model: OperatorCostModel) -> None:
    unknown = make_operators([64, 256], 8).assign(name="vendor::new_kernel")
    found = model.predict(unknown)
    assert (found["time_s"] > 0).all()
    moved = unknown["read_bytes"] > 0
    assert found["time_s"][moved].max() > found["time_s"][moved].min()


def test_rescale_interval_widens_with_the_distance(noisy: OperatorCostModel) -> None:
    operators = make_operators([128], 4)
    widths = []
    for factor in (2, 4, 8):
        target = operators.assign(**{name: operators[name] * factor for name in SIZES})
        found = noisy.rescale(operators, target)[operators["name"] == "aten::linear"]
        assert (found["low_s"] <= found["time_s"]).all()
        assert (found["time_s"] <= found["high_s"]).all()
        widths.append(float((found["high_s"] / found["low_s"]).iloc[0]))
    assert 1.0 < widths[0] < widths[1] < widths[2]


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


def test_step_interval_is_wide_and_labelled_with_little_data(noisy: OperatorCostModel) -> None:
    pair = make_traces(noise=0.1)[:2]
    alone = fit(pair)
    assert alone.step_interval_basis().startswith("one workload only")
    assert alone.step_interval()[1] > noisy.step_interval()[1]
    single = fit(pair[:1])
    assert single.step_interval() == pytest.approx((0.5, 2.0))
    assert single.step_interval_basis().startswith("assumed")
    target = pair[0].operators.assign(flop=pair[0].operators["flop"] * 2)
    found = single.rescale(pair[0].operators, target)
    changed = target["flop"] != pair[0].operators["flop"]
    assert (found["high_s"] > found["time_s"])[changed].all()
    assert (found["high_s"] == found["low_s"])[~changed].all()


def test_rescale_bands_come_from_sizes_that_changed(noisy: OperatorCostModel) -> None:
    assert ("gemm", "forward") in noisy.rescale_bands
    assert ("view", "forward") in noisy.predict_bands
    assert ("view", "forward") not in noisy.rescale_bands


def test_captures_of_one_batch_are_no_pair() -> None:
    twice = [make_trace("one", [64, 128], 4, noise=0.1, seed=seed) for seed in (1, 2)]
    assert pair_rows(collect_rows(twice)).empty
    thrice = collect_rows([*twice, make_trace("one", [64, 128], 8)])
    pairs = pair_rows(thrice)
    # Two captures against the third, both ways, sixteen operators each.
    assert len(pairs) == 2 * 2 * 16
    batches = set(
        zip(
            thrice.loc[pairs["recorded"], "batch"],
            thrice.loc[pairs["target"], "batch"],
            strict=True,
        )
    )
    assert batches == {(4, 8), (8, 4)}


def test_fit_table_reports_every_class() -> None:
    traces = make_traces(noise=0.05)
    _, table = fit_operator_model(traces)
    tables.validate(tables.to_arrow(table, "operator_fit"), "operator_fit")
    assert table["operators"].sum() == sum(len(trace.operators) for trace in traces)
    assert table["time_share"].sum() == pytest.approx(1.0)
    gemm = table[(table["operator_class"] == "gemm") & (table["phase"] == "forward")].iloc[0]
    assert gemm["driver"] in ("flop", "read_bytes", "write_bytes")
    assert gemm["r_squared"] > 0.9
    assert abs(gemm["held_out_error"]) < 0.2
    assert 0 < gemm["held_out_absolute_error"] < 0.3


def test_driver_is_the_feature_that_decides() -> None:
    traces = make_traces()
    for trace in traces:
        trace.operators["device_ns"] = trace.operators["write_bytes"] * 3 + 1000
    _, table = fit_operator_model(traces)
    assert set(table.loc[table["operator_class"] == "gemm", "driver"]) == {"write_bytes"}


def test_held_out_errors_are_null_for_one_workload() -> None:
    _, table = fit_operator_model(make_traces()[:2])
    assert table["held_out_error"].isna().all()
    assert table["held_out_absolute_error"].isna().all()


def test_held_out_errors_come_from_other_workloads() -> None:
    traces = make_traces()
    for trace in traces[:2]:
        trace.operators["device_ns"] *= 4
    _, table = fit_operator_model(traces)
    assert (table.loc[table["operator_class"] == "gemm", "held_out_absolute_error"] > 0.1).all()


def test_workload_names_do_not_matter() -> None:
    traces = make_traces(noise=0.1)
    renamed = make_traces(noise=0.1)
    names = {"narrow": "zebra", "middle": "apple", "wide": "mango"}
    for trace in renamed:
        trace.facts = replace(trace.facts, workload=names[trace.facts.workload])
    operators = make_operators([77], 6)
    a, b = fit(traces).predict(operators), fit(renamed).predict(operators)
    assert a["time_s"].to_numpy() == pytest.approx(b["time_s"].to_numpy(), rel=1e-9)


@pytest.mark.parametrize("method", sorted(METHODS))
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
    pd.testing.assert_frame_equal(
        first.rescale(operators, target), again.rescale(operators, target)
    )
    assert again.step_interval() == first.step_interval()
    assert json.loads((tmp_path / "a.json").read_text())["method"] == method


def test_file_is_stamped_and_readable(model: OperatorCostModel, tmp_path: Path) -> None:
    source = tmp_path / "operators.parquet"
    source.write_bytes(b"rows")
    model.save(tmp_path / "model.json", inputs=[source])
    content = json.loads((tmp_path / "model.json").read_text())
    assert list(content["provenance"]["inputs"]) == [f"{tmp_path.name}/operators.parquet"]
    assert content["facts"]["traces"] == [
        f"{name}-b{batch}" for name in ("middle", "narrow", "wide") for batch in (16, 4)
    ]
    kinds = {(entry["operator_class"], entry["phase"]) for entry in content["classes"]}
    assert {("gemm", "forward"), ("convolution/dense", "backward"), ("*", "*")} <= kinds


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
def test_damaged_files_are_named(
    model: OperatorCostModel, tmp_path: Path, change: dict, text: str
) -> None:
    path = tmp_path / "model.json"
    model.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=text) as error:
        load_operator_model(path)
    assert "model.json" in str(error.value)


def test_negative_coefficients_in_a_file_are_refused(
    model: OperatorCostModel, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    model.save(path)
    content = json.loads(path.read_text())
    content["classes"][0]["curve"]["coefficients"][0] = -1.0
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="negative"):
        load_operator_model(path)


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="no operator to fit"):
        fit_operator_model([])
    trace = make_trace("one", [64], 4)
    with pytest.raises(InputError, match="no operator model is called 'magic'"):
        fit_operator_model([trace], method="magic")
    with pytest.raises(TableError, match="no column device_ns"):
        fit_operator_model([make_broken(trace, drop="device_ns")])
    with pytest.raises(TableError, match="row 2, column device_ns"):
        fit_operator_model([make_broken(trace, device_ns=-4)])
    with pytest.raises(TableError, match="row 2, column phase"):
        fit_operator_model([make_broken(trace, phase="sideways")])
    other = make_trace("two", [64], 4)
    other.facts = replace(other.facts, device_name="another")
    with pytest.raises(InputError, match="several devices in one fit: another; made up"):
        fit_operator_model([trace, other])


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
