"""A real, short session of two gloo ranks; what it writes, not how long it took."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from captured import BATCH, TRANSFORMER, with_steady_times
from trioflow.base.errors import MeasurementError
from trioflow.base.provenance import read_json
from trioflow.measure.records import RECORDED_EVENTS, STEP_MARKS, measure_plans
from trioflow.measure.session import calibrate_workload, sweep_sizes
from trioflow.parallel.plan import make_plan
from trioflow.parallel.splits.pipeline import partition_trace
from trioflow.tables import read_table
from trioflow.trace.store import save_trace
from warm_start import Program

torch = pytest.importorskip("torch", reason="measuring needs torch (extra [capture])")

PLANS = [
    replace(make_plan(), plan="single"),
    replace(make_plan(data=2), plan="ddp2"),
    replace(make_plan(tensor=2), plan="tp2"),
    replace(make_plan(pipeline=2), plan="gpipe2"),
    replace(make_plan(pipeline=2, schedule="1f1b"), plan="1f1b2"),
    replace(make_plan(data=2, sharding="fsdp"), plan="fsdp2"),
]
SEVERAL = [plan.plan for plan in PLANS if plan.ranks > 1]
EXPERIMENTS = [
    {"experiment": f"t-{plan.plan}", "set": "live", "workload": "t", "plan": plan.plan, "batch": 2 * BATCH}
    for plan in PLANS
]
ROUNDS = 2


@pytest.fixture(scope="module", autouse=True)
def _warm_ranks():
    """Fork ranks from a process that has torch: `.ci/run` starts them as users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trioflow.measure.session.subprocess", SimpleNamespace(Popen=Program.start_rank))
        yield


@pytest.fixture(scope="module")
def session(tmp_path_factory, transformer_trace):
    folder = tmp_path_factory.mktemp("session")
    save_trace(with_steady_times(transformer_trace), folder / "trace")
    partition_trace([folder / "trace"], [2], folder / "partition.json")
    calibrate_workload(
        TRANSFORMER,
        EXPERIMENTS,
        [asdict(p) for p in PLANS],
        folder / "partition.json",
        folder / "known",
        folder / "record",
        device="cpu",
        warm_up=1,
        rounds=ROUNDS,
    )
    measure_plans(folder / "record/steps.json", folder / "record/events.parquet", folder)
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


def test_what_predictions_may_know_holds_no_step_of_a_plan(session):
    assert {file.name for file in (session / "known").iterdir()} == {"session.json", "collective_samples.parquet"}
    text = (session / "known/session.json").read_text()
    assert not any(name in text for name in ("step_ns", *(f"t-{plan}" for plan in SEVERAL)))


def test_the_sweep_covers_the_model(session, transformer_trace):
    samples = read_table(session / "known/collective_samples.parquet", "collective_samples")
    assert (samples["ranks"] == 2).all()
    assert set(samples["round"]) == set(range(ROUNDS))
    size = sum(g["size_bytes"] for g in transformer_trace.facts.gradients)
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
    facts = read_json(session / "known/session.json")
    anchor = facts["anchors"][str(BATCH)]
    assert len(anchor["busy"]) == 2
    for found in (anchor["single"], *anchor["busy"]):
        assert set(found) == {"step", "forward", "backward", "optimizer"}
        assert all(time_s > 0 for time_s in found.values())
    assert set(facts["host_costs"]) == {
        "tensor_parallel_forward_s",
        "tensor_parallel_backward_s",
        "tensor_parallel_update_s",
        "pipeline_micro_batch_s",
        "data_parallel_step_s",
        "overlap",
        "sharded_forward_s",
        "sharded_backward_s",
    }
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


def test_every_round_has_marks_of_each_micro_batch_on_one_clock(session):
    marks = read_table(session / "step_marks.parquet", "step_marks", schema=STEP_MARKS)
    micro_batches = {plan.plan: max(plan.micro_batches, 1) for plan in PLANS}
    for (name, _, rank), own in marks.groupby(["experiment", "recording", "rank"]):
        count = micro_batches[name.removeprefix("t-")]
        assert set(own["round"]) == set(range(ROUNDS)), name
        for _, one in own.groupby("round"):
            phases = one.groupby("phase")["micro_batch"].apply(sorted).to_dict()
            each = list(range(count))
            assert phases == {"": [0], "forward": each, "backward": each, "optimizer": [0]}, name
            whole = one[one["phase"] == ""].iloc[0]
            assert (one["start_ns"] >= whole["start_ns"]).all() and whole["start_ns"] >= 0
            assert (one["end_ns"] <= whole["end_ns"]).all()
        assert set(own["stage"]) == {rank if "gpipe" in name or "1f1b" in name else 0}
    first = marks[marks["phase"] == ""].groupby(["experiment", "recording", "round"])["start_ns"]
    assert (first.min() == 0).all() and (first.size() == 2).all()
    starts = marks[(marks["experiment"] == "t-gpipe2") & (marks["phase"] == "forward")]
    ends = starts.set_index(["recording", "round", "rank", "micro_batch"])["end_ns"]
    begins = starts.set_index(["recording", "round", "rank", "micro_batch"])["start_ns"]
    for key in (k for k in ends.index if k[2] == 0):
        assert begins[(*key[:2], 1, key[3])] > ends[key], "a stage waits for the one before it"
    assert 0 < read_json(session / "known/session.json")["mark_s"] < 1e-3


def test_events_of_profiled_rounds_lie_in_their_micro_batches_marks(session):
    events = read_table(session / "recorded_events.parquet", "e", schema=RECORDED_EVENTS)
    assert (events["end_s"] >= events["start_s"]).all() and (events["start_s"] >= 0).all()
    assert set(events["rounds"]) <= set(range(1, ROUNDS + 1))
    piped = events[(events["experiment"] == "t-gpipe2") & (events["kind"] == "compute")]
    for rank in (0, 1):
        # The profiler's clock is a little off: at a mark's edge an operator may fall out in one round.
        forward = piped[(piped["rank"] == rank) & (piped["phase"] == "forward")]
        forward = forward[forward["rounds"] == ROUNDS]
        names = forward.dropna(subset="micro_batch").groupby("micro_batch")["name"].apply(list)
        assert len(names) == 2 and abs(len(names[0]) - len(names[1])) <= 1
        assert min(len(names[0]), len(names[1])) > 10
        assert set(forward["stage"].dropna()) == {rank}


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
        calibrate_workload(
            TRANSFORMER, rows, [asdict(p) for p in plans], tmp_path / "none.json", tmp_path, tmp_path, device="cpu"
        )


def test_a_failing_rank_is_an_error_and_leaves_nothing(tmp_path, transformer_trace):
    save_trace(with_steady_times(transformer_trace), tmp_path / "trace")
    partition_trace([tmp_path / "trace"], [2], tmp_path / "partition.json")
    experiments = [{**EXPERIMENTS[1], "batch": 1}]  # one sample for two replicas
    with pytest.raises(MeasurementError, match=r"rank \d failed"):
        calibrate_workload(
            TRANSFORMER,
            experiments,
            [asdict(p) for p in PLANS],
            tmp_path / "partition.json",
            tmp_path / "out",
            tmp_path / "out",
            device="cpu",
            warm_up=1,
            rounds=1,
        )
    assert not (tmp_path / "out").exists()
