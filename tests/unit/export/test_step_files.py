"""What is written of a simulated step."""

import gzip
import itertools
import json

import pytest
from same_model import ProportionalModel
from trioflow import tables
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.export.step_files import write_simulation
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.parallel.plan import make_plan
from trioflow.prediction.assembly import predict
from trioflow.trace.store import load_trace

LINKS = (Link("rank0", "rank1", 1e9, 0.0), Link("rank1", "rank0", 1e9, 0.0))
PLATFORM = Platform("two", Device("d", "cpu", 10**9, {}), 2, LINKS)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    trace, plan = load_trace("gpt2-tiny-b8"), make_plan(data=2)
    times = DeviceTimes([trace], ProportionalModel(), "proportional")
    prediction = predict(times, plan, PLATFORM, record_links=True)
    folder = tmp_path_factory.mktemp("simulated")
    write_simulation(prediction, folder)
    names = ("timeline", "critical_path", "links", "breakdown")
    frames = {name: tables.read_table(folder / f"{name}.parquet", name) for name in names}
    return trace, prediction.task_graph, prediction.simulated.result, folder, frames


def test_what_is_made_of_a_step_adds_up_to_it(written):
    trace, _, result, _, frames = written
    step_s = result.summary.step_time_s
    path = frames["critical_path"]
    assert path["share"].sum() == pytest.approx(1.0)
    assert path["end_s"].iloc[-1] == step_s and path["start_s"].iloc[0] == 0.0
    assert set(path["module"]) <= {*trace.operators["module"], ""} and (path["module"] != "").any()
    moved = dict(zip(frames["links"]["link"], frames["links"]["bytes"], strict=True))
    assert moved == pytest.approx(result.summary.link_bytes) and min(moved.values()) > 0
    breakdown = frames["breakdown"]
    assert breakdown["by"].unique().tolist() == ["rank", "stage", "module"]
    gradient_bytes = sum(entry["size_bytes"] for entry in trace.facts.gradients)
    for by, ranks in (("rank", 2), ("stage", 1), ("module", 1)):
        assert (
            breakdown.loc[breakdown["by"] == by, "gradient_bytes"].sum() == ranks * gradient_bytes
        )
    for row, told in zip(tables.records(breakdown), result.summary.per_rank, strict=False):
        for name in ("compute_s", "communication_s", "exposed_communication_s"):
            assert row[name] == pytest.approx(getattr(told, name))
        assert row["idle_s"] == pytest.approx(step_s - told.busy_s)


def test_the_perfetto_trace_holds_tasks_path_memory_and_rates(written):
    _, graph, result, folder, frames = written
    events = json.loads(gzip.decompress((folder / "perfetto.json.gz").read_bytes()))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(graph.tasks) + len(frames["critical_path"])
    curves = [event for event in events if event["ph"] == "C"]
    assert {event["name"] for event in curves} == {"memory", *result.summary.link_bytes}
    held = [event["args"]["bytes"] for event in curves if event["name"] == "memory"]
    assert max(held) == graph.metadata.memory[0]["peak_bytes"]
    ranks = {event["pid"] for event in curves if event["name"] == "memory"}
    assert ranks < {event["pid"] for event in slices} and len(ranks) == 2
    # The area under a link's curve is what it moved.
    for link, moved in result.summary.link_bytes.items():
        own = [(e["ts"] / 1e6, e["args"]["bytes/s"]) for e in curves if e["name"] == link]
        area = sum(rate * (after - begin) for (begin, rate), (after, _) in itertools.pairwise(own))
        assert area == pytest.approx(moved, rel=1e-3)
