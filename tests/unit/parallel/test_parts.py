import itertools

import pytest
from captured import BATCH
from hypothesis import given
from hypothesis import strategies as st
from trioflow.base.errors import PlanError
from trioflow.base.provenance import read_json
from trioflow.parallel.splits.pipeline import (
    assign_units,
    balance_stages,
    build_buckets,
    partition,
    partition_trace,
)
from trioflow.trace.store import Trace, load_trace, pipeline_units, save_trace

MIB = 2**20


def gradients(*sizes):
    return [
        {"name": f"p{i}", "size_bytes": size, "ready_after_op_id": 10 * i}
        for i, size in enumerate(sizes)
    ]


def test_a_bucket_closes_after_it_reaches_its_limit():
    buckets = build_buckets(gradients(MIB // 2, MIB, 10 * MIB, 20 * MIB, 3 * MIB), MIB, 25 * MIB)
    assert [b.size_bytes for b in buckets] == [MIB // 2 + MIB, 30 * MIB, 3 * MIB]
    assert [b.ready_after_op_id for b in buckets] == [10, 30, 40]
    assert buckets[1].names == ("p2", "p3")


def test_one_large_gradient_is_a_large_bucket():
    buckets = build_buckets(gradients(400 * MIB, 1), MIB, 25 * MIB)
    assert [b.size_bytes for b in buckets] == [400 * MIB, 1]


def test_no_gradients_make_no_bucket():
    assert build_buckets([], MIB, MIB) == []


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 50), st.integers(1, 200))
def test_buckets_hold_every_gradient_once_in_order(sizes, first, limit):
    buckets = build_buckets(gradients(*sizes), first, limit)
    assert [n for b in buckets for n in b.names] == [f"p{i}" for i in range(len(sizes))]
    for index, bucket in enumerate(buckets[:-1]):
        bound = limit if index else first
        assert bucket.size_bytes >= bound
        assert bucket.size_bytes - bucket.sizes_bytes[-1] < bound


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.integers(1, 4))
def test_stages_are_cut_as_well_as_any_cut(times, stages):
    if len(times) < stages:
        with pytest.raises(PlanError):
            balance_stages(times, stages)
        return
    sizes = balance_stages(times, stages)
    assert sum(sizes) == len(times) and min(sizes) >= 1 and len(sizes) == stages

    def longest(cuts):
        edges = [0, *cuts, len(times)]
        return max(sum(times[a:b]) for a, b in itertools.pairwise(edges))

    best = min(longest(c) for c in itertools.combinations(range(1, len(times)), stages - 1))
    mine = longest(list(itertools.accumulate(sizes))[:-1])
    assert mine == pytest.approx(best)


def test_every_operator_has_a_unit_in_order(cnn_trace):
    units = assign_units(cnn_trace)
    forward = units[: (cnn_trace.operators["phase"] == "forward").sum()]
    assert (forward[1:] >= forward[:-1]).all()
    assert set(units) == set(range(len(pipeline_units(cnn_trace))))


def test_the_partition_file_says_what_a_real_run_needs(tmp_path, cnn_trace):
    save_trace(cnn_trace, tmp_path / "trace")
    partition_trace([tmp_path / "trace"], [1, 2, 3], tmp_path / "partition.json")
    content = read_json(tmp_path / "partition.json")
    assert set(content["stages"]) == {"2", "3"}
    assert content["stages"]["3"] == partition(cnn_trace, 3)
    assert [u for stage in content["stages"]["2"] for u in stage] == list(pipeline_units(cnn_trace))
    assert content["traced_steps_s"] == {str(BATCH): cnn_trace.facts.step_time_s}
    assert content["parameter_bytes"] == sum(g["size_bytes"] for g in cnn_trace.facts.gradients)


def with_times(trace, phases):
    """Return the trace with a millisecond for each operator of some phases, none for the others."""
    operators = trace.operators.copy()
    operators["device_ns"] = operators["phase"].isin(phases).astype("int64") * 1_000_000
    operators["cpu_ns"] = operators["cpu_ns"] * 0
    return Trace(operators, trace.tensors, trace.facts)


def test_the_optimizer_decides_no_stage():
    trace = load_trace("gpt2-b8")
    assert trace.operators.query("phase == 'optimizer'")["module"].nunique() == 1, "one for all"
    alone = partition(with_times(trace, ["forward", "backward"]), 6)
    assert partition(with_times(trace, ["forward", "backward", "optimizer"]), 6) == alone
    assert max(map(len, alone)) <= 3


def test_a_trace_without_times_is_cut_by_layers():
    trace = with_times(load_trace("gpt2-b8"), [])
    stages = partition(trace, 6)
    assert stages == partition(trace, 6, "count")
    assert max(map(len, stages)) == 3
