"""A real, short session of two gloo ranks; what it writes, not how long it took."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from captured import BATCH, TRANSFORMER
from trioflow.errors import MeasurementError
from trioflow.measure.session import measure_workload, sweep_sizes
from trioflow.parallel.pipeline import partition_trace
from trioflow.parallel.plan import make_plan
from trioflow.provenance import read_json
from trioflow.tables import read_table
from trioflow.trace.store import save_trace

torch = pytest.importorskip("torch", reason="measuring needs torch (extra [capture])")

PLANS = [
    replace(make_plan(), plan="single"), replace(make_plan(data=2), plan="ddp2"),
    replace(make_plan(tensor=2), plan="tp2"), replace(make_plan(pipeline=2), plan="gpipe2"),
    replace(make_plan(pipeline=2, schedule="1f1b"), plan="1f1b2"),
    replace(make_plan(data=2, sharding="fsdp"), plan="fsdp2"),
]  # fmt: skip
SEVERAL = [plan.plan for plan in PLANS if plan.ranks > 1]
EXPERIMENTS = [
    {"experiment": f"t-{plan.plan}", "set": "live", "workload": "t", "plan": plan.plan,
     "batch": 2 * BATCH}
    for plan in PLANS
]  # fmt: skip
ROUNDS = 2


@pytest.fixture(scope="module")
def session(tmp_path_factory, transformer_trace):
    folder = tmp_path_factory.mktemp("session")
    save_trace(transformer_trace, folder / "trace")
    partition_trace([folder / "trace"], [2], folder / "partition.json")
    measure_workload(
        TRANSFORMER, EXPERIMENTS, [asdict(p) for p in PLANS], folder / "partition.json",
        folder, device="cpu", warm_up=1, rounds=ROUNDS,
    )  # fmt: skip
    return folder


def test_every_series_of_every_round_and_rank_is_there(session):
    steps = read_table(session / "measurements.parquet", "measurements")
    counts = steps.groupby(["series", "plan", "batch", "rank"]).size()
    expected = {("single", "single", BATCH, 0), ("distributed", "single", 2 * BATCH, 0)}
    for rank in (0, 1):
        expected.add(("both_busy", "single", BATCH, rank))
        expected |= {("distributed", p, 2 * BATCH, rank) for p in SEVERAL}
    assert set(counts.index) == expected
    assert (counts == ROUNDS).all()
    assert (steps["step_ns"] > 0).all()


def test_the_sweep_covers_the_model(session, transformer_trace):
    samples = read_table(session / "collective_samples.parquet", "collective_samples")
    assert (samples["ranks"] == 2).all()
    assert set(samples["round"]) == set(range(ROUNDS))
    size = sum(g["size_bytes"] for g in transformer_trace.facts["gradients"])
    reduce = samples[samples["collective"] == "all_reduce"]
    assert reduce["message_bytes"].max() >= size
    sweep = sweep_sizes(size, sharded=True)
    for collective, sizes in sweep.items():
        found = samples[samples["collective"] == collective]
        assert sorted(found["message_bytes"].unique()) == sizes
    for collective in ("all_gather", "reduce_scatter"):
        assert sweep[collective][-1] >= size


def test_the_sweep_stops_above_the_gradients():
    assert "reduce_scatter" not in sweep_sizes(1)
    assert sweep_sizes(1)["all_reduce"][-1] == 16_000_000
    assert sweep_sizes(100_000_000)["all_reduce"][-1] == 256_000_000
    assert sweep_sizes(10**12)["all_reduce"][-1] == 512_000_000


def test_the_anchors_and_host_costs_are_stated(session):
    facts = read_json(session / "session.json")
    anchor = facts["anchors"][str(BATCH)]
    assert len(anchor["busy"]) == 2
    for found in (anchor["single"], *anchor["busy"]):
        assert set(found) == {"step", "forward", "backward", "optimizer"}
        assert all(time_s > 0 for time_s in found.values())
    assert set(facts["host_costs"]) == {
        "tensor_parallel_forward_s", "tensor_parallel_backward_s", "tensor_parallel_update_s",
        "pipeline_micro_batch_s", "data_parallel_step_s", "overlap",
        "sharded_forward_s", "sharded_backward_s",
    }  # fmt: skip
    assert all(cost >= 0 for cost in facts["host_costs"].values())


def test_each_rank_s_real_step_is_a_timeline(session):
    timelines = read_table(session / "rank_timelines.parquet", "rank_timelines")
    found = timelines.groupby(["experiment", "rank"])
    assert set(found.groups) == {(f"t-{p}", r) for p in SEVERAL for r in (0, 1)}
    for (name, rank), timeline in found:
        assert (timeline["end_s"] >= timeline["start_s"]).all()
        assert (timeline["stream"] == "communication").any(), (name, rank)
        assert {"forward", "backward", "optimizer"} <= set(timeline["phase"])
    for name in ("t-gpipe2", "t-1f1b2"):
        assert {"send", "recv"} <= set(timelines[timelines["experiment"] == name]["kind"])
    sharded = timelines[timelines["experiment"] == "t-fsdp2"]
    assert {"gloo:all_gather", "gloo:all_reduce"} <= set(sharded["name"])


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        ([make_plan(data=2), make_plan(data=3)], "same number of ranks"),
        ([make_plan(data=2, tensor=2)], "data x tensor together"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(tmp_path, plans, words):
    rows = [{**EXPERIMENTS[0], "experiment": p.plan, "plan": p.plan, "batch": 12} for p in plans]
    with pytest.raises(MeasurementError, match=words):
        measure_workload(
            TRANSFORMER, rows, [asdict(p) for p in plans], tmp_path / "none.json", tmp_path,
            device="cpu",
        )  # fmt: skip


def test_a_failing_rank_is_an_error_and_leaves_nothing(tmp_path, transformer_trace):
    save_trace(transformer_trace, tmp_path / "trace")
    partition_trace([tmp_path / "trace"], [2], tmp_path / "partition.json")
    experiments = [{**EXPERIMENTS[1], "batch": 1}]  # one sample for two replicas
    with pytest.raises(MeasurementError, match=r"rank \d failed"):
        measure_workload(
            TRANSFORMER, experiments, [asdict(p) for p in PLANS], tmp_path / "partition.json",
            tmp_path / "out", device="cpu", warm_up=1, rounds=1,
        )  # fmt: skip
    assert not (tmp_path / "out").exists()
