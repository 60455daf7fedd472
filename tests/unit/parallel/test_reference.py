from dataclasses import replace

import pytest
from captured import BATCH
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.costmodel.features import resize_batch
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.parallel.reference import choose_reference
from trioflow.trace.store import Trace


@pytest.fixture
def larger(cnn_trace):
    """The same workload at four times the batch; each operator took three times as long."""
    operators = resize_batch(cnn_trace.operators, 4)
    operators["device_ns"] *= 3
    facts = replace(cnn_trace.facts, batch=4 * BATCH, step_time_s=3 * cnn_trace.facts.step_time_s)
    return Trace(operators, cnn_trace.tensors, facts)


def test_an_exact_batch_is_taken_as_recorded(cnn_trace, larger):
    for trace in (cnn_trace, larger):
        reference = choose_reference([larger, cnn_trace], trace.facts.batch)
        assert reference.trace is trace and reference.operators is trace.operators
        assert reference.shares == {trace.facts.batch: 1.0}


def test_between_two_traces_every_operator_is_interpolated(cnn_trace, larger):
    reference = choose_reference([larger, cnn_trace], 2 * BATCH)
    # One third of the way from 1x to 3x: 5/3 of the time, twice the growing work.
    expected = (cnn_trace.operators["device_ns"] * 5 / 3).round()
    assert (reference.operators["device_ns"] - expected).abs().max() <= 1
    grown = cnn_trace.operators["flop"] + cnn_trace.operators["batch_flop"]
    assert reference.operators["flop"].tolist() == grown.tolist()
    assert reference.batch == 2 * BATCH
    # 2/3 of a short step and 1/3 of one three times as long: 2/3 + 3/3 of it.
    assert reference.shares == pytest.approx({BATCH: 0.4, 4 * BATCH: 0.6})


def test_beyond_all_traces_the_nearest_is_rescaled(cnn_trace, larger):
    reference = choose_reference([cnn_trace, larger], 64 * BATCH)
    assert reference.trace is larger and reference.batch == 4 * BATCH
    graph = extrapolate([larger, cnn_trace], make_plan(), ProportionalModel(), batch=64 * BATCH)
    assert graph.metadata.compute_confidence == "extrapolated"
    between = extrapolate([larger, cnn_trace], make_plan(), ProportionalModel(), batch=2 * BATCH)
    assert between.metadata.compute_confidence == "interpolated"
    assert between.metadata.traced_batches == [BATCH, 4 * BATCH]


def test_traces_that_ran_other_operators_are_not_mixed(cnn_trace, larger):
    other = replace(larger, operators=larger.operators.iloc[:-1])
    reference = choose_reference([other, cnn_trace], 2 * BATCH)
    assert reference.trace is other  # equally near: the larger one
    assert reference.batch == 4 * BATCH


def test_micro_batches_start_from_the_trace_of_their_size(cnn_trace, larger):
    plan = make_plan(pipeline=2, micro_batches=4)
    graph = extrapolate([larger, cnn_trace], plan, ProportionalModel(), batch=4 * BATCH)
    assert graph.metadata.traced_batches == [BATCH]
    operators = graph.tasks[graph.tasks["op_id"].notna() & (graph.tasks["micro_batch"] == 0)]
    recorded = cnn_trace.operators.set_index("op_id")
    took = recorded.loc[operators["op_id"], ["device_ns", "cpu_ns"]].sum(axis=1).to_numpy() / 1e9
    assert operators["duration_s"].to_numpy() == pytest.approx(took)


def test_traces_of_two_workloads_are_refused(cnn_trace, transformer_trace):
    with pytest.raises(PlanError, match="differ in workload"):
        choose_reference([cnn_trace, transformer_trace], 3)
