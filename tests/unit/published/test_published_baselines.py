"""Baselines by hand: TrioSim's rules, data sheets; and the anchor at a measured step."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from trioflow.costmodel.operators import load_operator_model
from trioflow.costmodel.published_models import shipped_operator_models
from trioflow.errors import InputError, PlanError
from trioflow.hardware.device_sheet import load_device
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.published.analytical import AnalyticalModel
from trioflow.published.step_anchor import AnchoredModel, StepAnchor, anchor_step, judge_anchors
from trioflow.published.tensor_rules import LAYERS, VOCABULARY, split_like_megatron
from trioflow.published.triosim_rules import (
    RecordedStep,
    predict_by_triosim,
    read_recorded_step,
)
from trioflow.trace.store import Trace, load_trace

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
    with pytest.raises(InputError, match="no bandwidth"):
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
    told = AnalyticalModel(sheet, "tf32").predict(operators)
    wanted = 1e12 / sheet.peak("tf32") + 2e9 / sheet.memory_bandwidth_bytes_per_s
    assert told["time_s"][0] == pytest.approx(wanted)
    other = AnalyticalModel(sheet, "tf32").rescale(operators, operators * 2)
    assert other["time_s"][0] == pytest.approx(2 * wanted)


def with_step(trace: Trace, step_s: float, floor_s: float) -> Trace:
    facts = {**trace.facts, "measured_end_to_end_s": step_s, "timer_floor_s": floor_s}
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
    with pytest.raises(InputError, match="no way to anchor"):
        anchor_step(tiny, "guess")


def test_an_anchored_model_takes_the_timer_off_after_rescaling(tiny):
    base = load_operator_model(shipped_operator_models()["h100-sxm"])
    model = AnchoredModel(base, 2e-6)
    operators = tiny.operators
    wanted = np.maximum(base.rescale(operators, operators)["time_s"] - 2e-6, 0)
    assert model.rescale(operators, operators)["time_s"].to_numpy() == pytest.approx(
        wanted.to_numpy()
    )


def test_what_is_predicted_is_upkeep():
    base = load_operator_model(shipped_operator_models()["h100-sxm"])
    rows = pd.DataFrame(
        {
            "name": ["aten::mul"], "phase": ["forward"], "flop": [0], "kernels": [0], "module": [""],
            "read_bytes": [4096], "write_bytes": [4096], "input_shapes": [[[1024]]],
            "output_shapes": [[[1024]]], "dtype": ["float"],
        }
    )  # fmt: skip
    told = AnchoredModel(base).predict(rows)["time_s"][0]
    assert told == base.predict(rows)["time_s"][0]
    assert AnchoredModel(base, copies=3.0).predict(rows)["time_s"][0] == pytest.approx(3 * told)


def test_every_way_to_anchor_tells_its_own_step_but_none(tiny):
    total = float(tiny.operators["device_ns"].sum()) * 1e-9
    trace = with_step(tiny, 0.9 * total, 1e-6)
    base = load_operator_model(shipped_operator_models()["h100-sxm"])
    told = judge_anchors(trace, trace, base, trace.operators)
    assert told["timer"] == pytest.approx(told["measured_s"])
    assert told["ratio"] == pytest.approx(told["measured_s"])
    assert told["none"] == pytest.approx(total)


def renamed(trace: Trace, modules: dict[str, str]) -> Trace:
    named = trace.operators["module"].map(lambda module: modules.get(module, ""))
    return Trace(trace.operators.assign(module=named), trace.tensors, trace.facts)


def test_megatron_s_rules_are_those_whose_modules_the_trace_has(tiny):
    first = str(tiny.operators["module"][tiny.operators["module"] != ""].iloc[0])
    trace = renamed(tiny, {first: "transformer.h.3.mlp.c_fc"})
    told = split_like_megatron(trace).facts["tensor_split"]
    assert told == {"transformer.h.*.mlp.c_fc": "column"}
    assert not set(LAYERS) & set(VOCABULARY)
    with pytest.raises(PlanError, match="no module of"):
        split_like_megatron(renamed(tiny, {first: "lm_head"}))
