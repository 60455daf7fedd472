from __future__ import annotations

import pytest
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Platform
from trioflow.hardware.topologies.grids import build_ring
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraphBuilder
from trioflow.trace.store import load_trace
from trioflow_evaluation.studies.wafer import (
    contract_graph,
    load_study_device,
    load_timed_trace,
)


@pytest.mark.parametrize(
    ("data", "tensor", "pipeline"), [(4, 1, 1), (1, 4, 1), (2, 1, 2), (2, 2, 1)]
)
@pytest.mark.parametrize("bandwidth", [1e8, 1e11])
def test_the_step_stays_the_same_with_far_fewer_tasks(
    data: int, tensor: int, pipeline: int, bandwidth: float
) -> None:
    times = load_timed_trace("gpt2-b8")
    times.traces[0] = load_trace("gpt2-tiny-b8") if bandwidth > 1e9 else times.traces[0]
    # The shipped trace has host times, which stay; the other has none, and loses its host tasks.
    graph = extrapolate(times.traces, make_plan(data, tensor, pipeline), times.model)
    fewer = contract_graph(graph)
    platform = Platform("ring", load_study_device(), 4, tuple(build_ring(4, bandwidth, 1e-6)))
    for network in ("fair_share", "contention_free"):
        one, other = (simulate(g, platform, network=network).summary for g in (graph, fewer))
        assert other.step_time_s == pytest.approx(one.step_time_s, rel=1e-9)
        assert other.link_bytes == one.link_bytes
        assert other.compute_s == pytest.approx(one.compute_s, rel=1e-9)
    assert len(fewer.tasks) < len(graph.tasks) / (20 if bandwidth < 1e9 else 1)


def test_what_others_wait_for_stays_a_task_of_its_own() -> None:
    builder = TaskGraphBuilder()
    host = builder.add(0, "host", "host", "launch", duration_s=0.0)
    first = builder.add(0, "compute", "compute", "a", duration_s=1.0, after=[host], op_id=0)
    second = builder.add(0, "compute", "compute", "b", duration_s=2.0, op_id=1)
    third = builder.add(0, "compute", "compute", "c", duration_s=4.0, op_id=2)
    builder.add(1, "compute", "compute", "d", duration_s=8.0, after=[second])
    found = contract_graph(builder.build())
    assert found.tasks["name"].tolist() == ["a", "c", "d"]
    assert found.tasks["duration_s"].tolist() == [3.0, 4.0, 8.0]
    assert found.tasks["op_id"].isna().tolist() == [True, False, True]
    pairs = set(found.dependencies.itertuples(index=False, name=None))
    assert pairs == {(1, 0), (2, 0)}
    assert (first, third) == (1, 3)


def test_a_host_task_that_takes_time_is_kept() -> None:
    builder = TaskGraphBuilder()
    host = builder.add(0, "host", "host", "launch", duration_s=0.5)
    builder.add(0, "compute", "compute", "a", duration_s=1.0, after=[host])
    assert contract_graph(builder.build()).tasks["kind"].tolist() == ["host", "compute"]
