from dataclasses import replace

import pandas as pd
import pytest
from trioflow.engine.timeline import measure_concurrency
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import GraphMetadata, TaskGraphBuilder
from trioflow.prediction.step import (
    SessionAnchor,
    apply_factors,
    choose_anchor,
    choose_traced,
    settle_contention,
)
from trioflow.trace.store import load_trace


def phases(forward, backward, optimizer):
    return {"forward": forward, "backward": backward, "optimizer": optimizer}


SESSION = {
    "anchors": {
        "4": {
            "single": phases(1.1, 1.1, 1.1),
            "busy": [phases(1.2, 1.2, 1.2), phases(1.3, 1.3, 2.6)],
        },
        "16": {
            "single": phases(3.0, 3.0, 3.0),
            "busy": [phases(3.2, 3.2, 3.2), phases(3.6, 3.6, 3.6)],
        },
    }
}
TRACED = {"4": phases(1.0, 1.0, 1.0), "16": phases(2.0, 2.0, 2.0)}


def anchor_of(ranks, **shares):
    shares = {batch.removeprefix("b"): share for batch, share in shares.items()}
    metadata = GraphMetadata(ranks=ranks, trace_shares=shares, traced_phases_s=TRACED)
    return choose_anchor(SESSION, metadata)


LINKS = (Link("rank0", "rank1", 1e9, 0.0), Link("rank1", "rank0", 1e9, 0.0))
PLATFORM = Platform("two", Device("d", "cpu", 10**9, {}), 2, LINKS)


def test_one_rank_is_anchored_on_the_quiet_step():
    assert anchor_of(1, b4=1.0) == SessionAnchor(phases(1.1, 1.1, 1.1), [phases(1.1, 1.1, 1.1)])


def test_several_ranks_have_their_own_busy_phases():
    anchor = anchor_of(2, b4=1.0)
    assert anchor.quiet == phases(1.1, 1.1, 1.1)
    assert anchor.busy == [phases(1.2, 1.2, 1.2), phases(1.3, 1.3, 2.6)]


def test_between_two_traces_the_anchors_mix_by_their_share_of_time():
    anchor = anchor_of(2, b4=0.25, b16=0.75)
    assert anchor.quiet["forward"] == pytest.approx(0.25 * 1.1 + 0.75 * 1.5)
    assert anchor.busy[1]["optimizer"] == pytest.approx(0.25 * 2.6 + 0.75 * 1.8)


def test_factors_go_to_their_rank_and_phase():
    builder = TaskGraphBuilder()
    for rank in (0, 1):
        builder.add(rank, "compute", "compute", "a", duration_s=1.0, phase="forward")
        builder.add(rank, "compute", "memcpy", "b", duration_s=1.0, phase="backward")
        builder.add(rank, "compute", "host", "c", duration_s=1.0)
    graph = apply_factors(builder.build(), [phases(2.0, 3.0, 5.0), phases(7.0, 11.0, 13.0)])
    assert graph.tasks["duration_s"].tolist() == [2.0, 5.0, 5.0, 7.0, 13.0, 13.0]


def timeline(*tasks):
    rows = [
        {"rank": r, "stream": "compute", "kind": "compute", "start_s": a, "end_s": b}
        for r, a, b in tasks
    ]
    return pd.DataFrame(rows)


def test_concurrency_is_the_share_of_compute_beside_others():
    assert measure_concurrency(timeline((0, 0.0, 4.0), (1, 3.0, 5.0))) == [0.25, 0.5]
    assert measure_concurrency(timeline((0, 0.0, 1.0), (1, 1.0, 2.0))) == [0.0, 0.0]
    assert measure_concurrency(timeline((0, 0.0, 1.0))) == [0.0]
    three = timeline((0, 0.0, 2.0), (1, 0.0, 1.0), (2, 0.0, 2.0))
    assert measure_concurrency(three) == [0.75, 1.0, 0.75]


@pytest.mark.parametrize(("chained", "factor"), [(False, 2.0), (True, 1.0)])
def test_ranks_slow_each_other_only_while_both_compute(chained, factor):
    builder = TaskGraphBuilder()
    first = builder.add(0, "compute", "compute", "a", duration_s=1.0)
    builder.add(1, "compute", "compute", "b", duration_s=1.0, after=[first] if chained else [])
    anchor = SessionAnchor(phases(1.0, 1.0, 1.0), [phases(2.0, 2.0, 2.0)] * 2)
    factors = settle_contention(builder.build(), PLATFORM, None, anchor)
    assert factors == [phases(factor, factor, factor)] * 2


def test_modules_come_from_the_trace_that_the_graph_names():
    trace = load_trace("gpt2-tiny-b8")
    small = replace(trace, facts=replace(trace.facts, batch=2))
    for batch, found in ((4, small), (16, trace)):  # two replicas
        graph = TaskGraphBuilder().build(GraphMetadata(plan=make_plan(data=2), batch=batch))
        assert choose_traced([trace, small], graph) is found
