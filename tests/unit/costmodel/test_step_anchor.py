"""Operators timed one by one, brought to the measured step that they came from."""

import json
from dataclasses import replace

import numpy as np
import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.operators.model import load_operator_model, shipped_operator_models
from trioflow.costmodel.steps import (
    ANCHOR_WAYS,
    SHIPPED_BAND,
    AnchoredModel,
    Anchoring,
    StepAnchor,
    anchor_step,
    describe_anchor,
    load_band,
)
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow.trace.store import Trace, load_trace
from trioflow_evaluation.published.judge import judge_anchors


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
