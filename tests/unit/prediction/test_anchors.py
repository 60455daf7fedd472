from __future__ import annotations

import gzip
import itertools
import json
from dataclasses import asdict, replace

import pandas as pd
import pytest
from same_model import ProportionalModel
from trioflow import tables
from trioflow.engine.simulate import simulate
from trioflow.engine.timeline import measure_concurrency
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraphBuilder
from trioflow.report.experiment import (
    Anchor,
    apply_factors,
    choose_anchor,
    choose_traced,
    settle_contention,
    write_simulation,
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
    metadata = {"ranks": ranks, "trace_shares": shares, "traced_phases_s": TRACED}
    return choose_anchor(SESSION, metadata)


LINKS = (Link("rank0", "rank1", 1e9, 0.0), Link("rank1", "rank0", 1e9, 0.0))
PLATFORM = Platform("two", Device("d", "cpu", 10**9, {}), 2, LINKS)


def test_one_rank_is_anchored_on_the_quiet_step():
    assert anchor_of(1, b4=1.0) == Anchor(phases(1.1, 1.1, 1.1), [phases(1.1, 1.1, 1.1)])


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
    anchor = Anchor(phases(1.0, 1.0, 1.0), [phases(2.0, 2.0, 2.0)] * 2)
    factors = settle_contention(builder.build(), PLATFORM, None, anchor)
    assert factors == [phases(factor, factor, factor)] * 2


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    trace, plan = load_trace("gpt2-tiny-b8"), make_plan(data=2)
    graph = extrapolate(trace, plan, ProportionalModel())
    result = simulate(graph, PLATFORM, record_links=True)
    folder = tmp_path_factory.mktemp("simulated")
    write_simulation(result, graph, trace, folder)
    names = ("timeline", "critical_path", "links", "breakdown")
    frames = {name: tables.read_table(folder / f"{name}.parquet", name) for name in names}
    return trace, graph, result, folder, frames


def test_what_is_made_of_a_step_adds_up_to_it(written):
    trace, _, result, _, frames = written
    step_s = result.summary["step_time_s"]
    path = frames["critical_path"]
    assert path["share"].sum() == pytest.approx(1.0)
    assert path["end_s"].iloc[-1] == step_s and path["start_s"].iloc[0] == 0.0
    assert set(path["module"]) <= {*trace.operators["module"], ""} and (path["module"] != "").any()
    moved = dict(zip(frames["links"]["link"], frames["links"]["bytes"], strict=True))
    assert moved == pytest.approx(result.summary["link_bytes"]) and min(moved.values()) > 0
    breakdown = frames["breakdown"]
    assert breakdown["by"].unique().tolist() == ["rank", "stage", "module"]
    gradient_bytes = sum(entry["size_bytes"] for entry in trace.facts["gradients"])
    for by, ranks in (("rank", 2), ("stage", 1), ("module", 1)):
        assert (
            breakdown.loc[breakdown["by"] == by, "gradient_bytes"].sum() == ranks * gradient_bytes
        )
    for row, told in zip(tables.records(breakdown), result.summary["per_rank"], strict=False):
        for name in ("compute_s", "communication_s", "exposed_communication_s"):
            assert row[name] == pytest.approx(told[name])
        assert row["idle_s"] == pytest.approx(step_s - told["busy_s"])


def test_the_perfetto_trace_holds_tasks_path_memory_and_rates(written):
    _, graph, result, folder, frames = written
    events = json.loads(gzip.decompress((folder / "perfetto.json.gz").read_bytes()))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(graph.tasks) + len(frames["critical_path"])
    curves = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in curves} == {"memory", *result.summary["link_bytes"]}
    held = [event["args"]["bytes"] for event in curves if event["name"] == "memory"]
    assert max(held) == graph.metadata["memory"][0]["peak_bytes"]
    ranks = {event["pid"] for event in curves if event["name"] == "memory"}
    assert ranks < {event["pid"] for event in slices} and len(ranks) == 2
    # The area under a link's curve is what it moved.
    for link, moved in result.summary["link_bytes"].items():
        own = [(e["ts"] / 1e6, e["args"]["bytes/s"]) for e in curves if e["name"] == link]
        area = sum(rate * (after - begin) for (begin, rate), (after, _) in itertools.pairwise(own))
        assert area == pytest.approx(moved, rel=1e-3)


def test_modules_come_from_the_trace_that_the_graph_names():
    trace = load_trace("gpt2-tiny-b8")
    small = replace(trace, facts={**trace.facts, "batch": 2})
    for batch, found in ((4, small), (16, trace)):  # two replicas
        metadata = {"plan": asdict(make_plan(data=2)), "batch": batch}
        assert choose_traced([trace, small], metadata) is found
