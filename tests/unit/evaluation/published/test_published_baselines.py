"""Baselines by hand: TrioSim's rules, data sheets."""

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.operators.model import load_operator_model, shipped_operator_models
from trioflow.hardware.device_sheet import load_device
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.trace.store import Trace, load_trace
from trioflow_evaluation.published.prediction import (
    AnalyticalModel,
    RecordedStep,
    UpkeepModel,
    predict_by_triosim,
    read_recorded_step,
)

STEP = RecordedStep(
    time_s=np.array([0.4, 0.1, 0.2, 0.3]),
    output_bytes=np.array([1e9, 2e9, 4e9, 8e9]),
    tagged=np.array([True, False, True, False]),
    forward=np.array([True, True, False, False]),
    parameter_bytes=6.5e9,
    batch=2,
)


@pytest.fixture(scope="module")
def tiny():
    return load_trace("gpt2-tiny-b8")


def test_triosim_s_replicas_hide_the_all_reduce_or_add_it():
    assert predict_by_triosim(STEP, named_plan("ddp", 4), 8) == pytest.approx(1.0)
    added = predict_by_triosim(STEP, named_plan("ddp", 4), 8, overlap=False)
    assert added == pytest.approx(1.0 + 6.5 / 65)


def test_triosim_s_batch_scales_times_and_parameters_alike():
    twice = predict_by_triosim(STEP, named_plan("ddp", 4), 16, overlap=False)
    assert twice == pytest.approx(2 * (1.0 + 6.5 / 65))


def test_triosim_s_shards_divide_what_is_tagged_and_move_its_outputs():
    told = predict_by_triosim(STEP, named_plan("tp", 2), 2, 1e10)
    assert told == pytest.approx(0.4 + 0.6 / 2 + 5 / 2 / 10)


def test_triosim_s_stages_send_the_results_of_their_last_operators():
    told = predict_by_triosim(STEP, named_plan("gpipe", 2, 1), 2, 1e10)
    assert told == pytest.approx(1.0 + (1 + 4) / 10)


def test_triosim_s_rules_know_neither_micro_batches_nor_products_of_degrees():
    assert predict_by_triosim(STEP, named_plan("gpipe", 2, 2), 2) is None
    assert predict_by_triosim(STEP, make_plan(2, 2), 4) is None
    with pytest.raises(InputError, match="is not a bandwidth"):
        predict_by_triosim(STEP, named_plan("ddp", 2), 4, 0.0)


def test_triosim_s_tags_are_products_that_read_a_parameter(tiny):
    step = read_recorded_step(tiny)
    operators = tiny.operators[tiny.operators["device_ns"] > 0].reset_index(drop=True)
    assert step.time_s.sum() == pytest.approx(tiny.operators["device_ns"].sum() * 1e-9)
    tagged = set(operators.loc[step.tagged, "name"])
    assert "aten::linear" in tagged
    assert not any("gelu" in name or "layer_norm" in name for name in tagged)
    with pytest.raises(InputError, match="recorded times"):
        read_recorded_step(Trace(tiny.operators.assign(device_ns=0), tiny.tensors, tiny.facts))


def test_a_data_sheet_adds_work_over_peak_and_bytes_over_bandwidth():
    sheet = load_device("h100-sxm")
    operators = pd.DataFrame(
        {"flop": [10**12, 0], "read_bytes": [10**9, 5], "write_bytes": [10**9, 5]}
    )
    told = AnalyticalModel.of_sheet(sheet, "tf32").predict(operators)
    wanted = 1e12 / sheet.peak("tf32") + 2e9 / sheet.memory_bandwidth_bytes_per_s
    assert told["time_s"][0] == pytest.approx(wanted)
    other = AnalyticalModel.of_sheet(sheet, "tf32").rescale(operators, operators * 2)
    assert other["time_s"][0] == pytest.approx(2 * wanted)


def test_what_is_predicted_is_upkeep(tiny):
    base = load_operator_model(shipped_operator_models()["h100-sxm"])
    model = UpkeepModel(base, 3.0)
    told, alone = model.predict(tiny.operators), base.predict(tiny.operators)
    assert told["time_s"].to_numpy() == pytest.approx(3 * alone["time_s"].to_numpy())
    assert model.rescale(tiny.operators, tiny.operators).equals(
        base.rescale(tiny.operators, tiny.operators)
    )
