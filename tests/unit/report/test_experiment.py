from __future__ import annotations

import pandas as pd
import pytest
from trioflow.engine.timeline import measure_concurrency
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.parallel.task_graph import TaskGraphBuilder
from trioflow.report.experiment import Anchor, choose_anchor, settle_contention

SESSION = {
    "anchors": {
        "4": {"traced_step_s": 1.0, "single": 1.1, "busy": [1.2, 1.3]},
        "16": {"traced_step_s": 3.0, "single": 1.5, "busy": [1.6, 1.8]},
    }
}
LINKS = (Link("rank0", "rank1", 1e9, 0.0), Link("rank1", "rank0", 1e9, 0.0))
PLATFORM = Platform("two", Device("d", "cpu", 10**9, {}), 2, LINKS)


def test_one_rank_is_anchored_on_the_quiet_step():
    assert choose_anchor(SESSION, 1, {"4": 1.0}) == Anchor(1.1, [1.1])


def test_several_ranks_have_their_own_busy_steps():
    assert choose_anchor(SESSION, 2, {"16": 1.0}) == Anchor(1.5, [1.6, 1.8])


def test_between_two_traces_the_anchors_mix_by_their_share_of_time():
    anchor = choose_anchor(SESSION, 2, {"4": 0.25, "16": 0.75})
    assert anchor.quiet == pytest.approx(1.4)
    assert anchor.busy == pytest.approx([1.5, 1.675])


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
    scale = settle_contention(builder.build(), PLATFORM, None, Anchor(1.0, [2.0, 2.0]))
    assert scale == [factor, factor]
