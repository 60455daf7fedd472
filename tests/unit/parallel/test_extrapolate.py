from dataclasses import replace

import pytest
from captured import BATCH
from few_facts import few_facts
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.costmodel.intervals import combine_intervals
from trioflow.parallel.extrapolate import extrapolate, repeat_interval
from trioflow.parallel.plan import describe_plan, make_plan, named_plan
from trioflow.parallel.task_graph import load_task_graph
from trioflow.tables import records
from trioflow.trace.store import Trace

MODEL = ProportionalModel()


def compute_s(graph, rank):
    tasks = graph.tasks[(graph.tasks["rank"] == rank) & (graph.tasks["kind"] == "compute")]
    return tasks["duration_s"].sum()


def test_one_rank_at_the_traced_batch_is_the_trace(cnn_trace):
    graph = extrapolate(cnn_trace, make_plan(), MODEL)
    assert graph.tasks["duration_s"].sum() == pytest.approx(cnn_trace.facts.step_time_s, rel=1e-4)
    assert graph.tasks["kind"].isin(["compute", "host"]).all()
    assert graph.metadata.compute_confidence == "measured"
    low, high = graph.metadata.compute_interval
    assert low <= 1.0 <= high


def test_intervals_of_independent_errors_add_in_quadrature():
    assert combine_intervals((1.0, 1.0), (0.9, 1.2)) == pytest.approx((0.9, 1.2))
    low, high = combine_intervals((0.9, 1.2), (0.9, 1.2))
    assert low == pytest.approx(0.9**2**0.5) and high == pytest.approx(1.2**2**0.5)
    assert repeat_interval(few_facts(step_times_s=[1.0] * 9)) == (1.0, 1.0)
    assert repeat_interval(few_facts(step_times_s=[1.0, 2.0, 3.0]))[0] == pytest.approx(0.6)


def test_fixed_parts_do_not_grow_with_the_batch(cnn_trace):
    one = extrapolate(cnn_trace, make_plan(), MODEL)
    four = extrapolate(cnn_trace, make_plan(), MODEL, batch=4 * BATCH)
    for phase in ("forward", "backward", "optimizer"):
        before, after = (
            g.tasks[g.tasks["phase"] == phase]["duration_s"].sum() for g in (one, four)
        )
        if phase == "optimizer":
            assert after == pytest.approx(before)
        else:
            assert 1.5 * before < after < 4 * before


def test_micro_batches_share_out_the_work(cnn_trace):
    plan = make_plan(pipeline=2, micro_batches=2)
    graph = extrapolate(cnn_trace, plan, MODEL)
    whole = extrapolate(cnn_trace, make_plan(), MODEL)
    operators = graph.tasks[graph.tasks["op_id"].notna()]
    # Each stage runs its operators once a micro-batch, the optimizer once.
    runs = operators.groupby("op_id").size()
    phase = operators.groupby("op_id")["phase"].first()
    assert (runs[phase != "optimizer"] == 2).all()
    assert (runs[phase == "optimizer"] == 1).all()
    assert set(runs.index) == set(range(len(cnn_trace.operators)))
    names = set(graph.tasks["name"])
    assert {"gradient accumulation", "gradient scaling"} <= names
    assert compute_s(graph, 0) + compute_s(graph, 1) > compute_s(whole, 0)


def test_a_pipeline_waits_for_what_it_receives(transformer_trace):
    graph = extrapolate(transformer_trace, make_plan(pipeline=2, micro_batches=2), MODEL)
    tasks = graph.tasks.set_index("task_id")
    waits = {}
    for row in records(graph.dependencies):
        waits.setdefault(row["task_id"], set()).add(row["depends_on"])
    for direction, receiver in (("forward", 1), ("backward", 0)):
        received = tasks[(tasks["kind"] == "recv") & (tasks["name"] == f"recv {direction}")]
        assert received["rank"].tolist() == [receiver] * 2
        for task_id in received.index:
            followers = [t for t, needed in waits.items() if task_id in needed]
            assert tasks.loc[followers, "stream"].tolist() == ["compute"]
            match = tasks[tasks["match_id"] == tasks.at[task_id, "match_id"]]
            assert sorted(match["kind"]) == ["recv", "send"]
            assert match["message_bytes"].nunique() == 1


def test_tensor_parallel_halves_the_work_of_the_blocks(transformer_trace):
    whole = transformer_trace.operators
    from trioflow.parallel.splits.tensor_parallel import split_operators

    split = split_operators(transformer_trace, 2)
    blocks = whole["module"].str.contains(r"blocks\.\d+\.(?:attention|feed_forward)") & (
        whole["flop"] > 0
    )
    assert blocks.any()
    halves = split.operators.loc[blocks, "flop"] * 2
    assert halves.tolist() == whole.loc[blocks, "flop"].tolist()
    outside = ~whole["module"].str.startswith("blocks")
    for column in ("flop", "read_bytes", "write_bytes"):
        assert split.operators.loc[outside, column].tolist() == whole.loc[outside, column].tolist()
    assert (split.operators["read_bytes"] <= whole["read_bytes"]).all()


def test_tensor_parallel_shards_hold_the_bytes_of_a_smaller_model(transformer_trace):
    """A column split of qkv: whole input and half the weight in, half the output out."""
    from trioflow.parallel.splits.tensor_parallel import split_operators

    row = records(transformer_trace.operators)
    linear = next(r for r in row if r["module"] == "blocks.0.attention.qkv" and r["flop"])
    tokens, hidden = BATCH * 16, 32
    split = split_operators(transformer_trace, 2).operators
    read = 4 * (tokens * hidden + 3 * hidden * hidden // 2 + 3 * hidden // 2)
    assert split.at[linear["op_id"], "read_bytes"] == read
    assert split.at[linear["op_id"], "write_bytes"] == 4 * tokens * 3 * hidden // 2
    assert split.at[linear["op_id"], "batch_read_bytes"] == pytest.approx(
        4 * tokens * hidden, rel=0.4
    )


def test_ranks_of_a_product_have_matching_groups(transformer_trace):
    plan = make_plan(data=2, tensor=2, pipeline=2, micro_batches=2)
    stages = [["embedding", "blocks.0"], ["blocks.1", "head"]]
    graph = extrapolate(transformer_trace, plan, MODEL, batch=2 * BATCH, stages=stages)
    assert sorted(graph.tasks["rank"].unique()) == list(range(8))
    collectives = graph.tasks[graph.tasks["kind"] == "collective"]
    for _, members in collectives.groupby("match_id"):
        group = [int(r) for r in members["group"].iloc[0].split(",")]
        assert members["group"].nunique() == members["message_bytes"].nunique() == 1
        assert sorted(members["rank"]) == group
    groups = set(collectives["group"])
    assert {"0,1", "2,3", "4,5", "6,7"} <= groups  # tensor: neighbours
    assert {"0,2", "1,3", "4,6", "5,7"} <= groups  # data: across them


def test_host_costs_of_the_platform_enter(transformer_trace):
    plain = extrapolate(transformer_trace, make_plan(tensor=2), MODEL)
    costs = {
        "tensor_parallel_forward_s": 1.0,
        "tensor_parallel_backward_s": 10.0,
        "tensor_parallel_update_s": 100.0,
    }
    costly = extrapolate(transformer_trace, make_plan(tensor=2), MODEL, host=costs)
    added = costly.tasks["duration_s"].sum() - plain.tasks["duration_s"].sum()
    split_modules = {
        "blocks.0.attention.qkv",
        "blocks.0.attention.projection",
        "blocks.0.feed_forward.up",
        "blocks.0.feed_forward.down",
    }
    modules = split_modules | {m.replace("0", "1", 1) for m in split_modules}
    operators = transformer_trace.operators
    updates = ((operators["phase"] == "optimizer") & operators["module"].isin(modules)).sum()
    # Two layers with two sums forward and two backward each, on two ranks.
    assert added == pytest.approx(2 * (4 * 1.0 + 4 * 10.0 + updates * 100.0))


def test_a_graph_survives_saving(tmp_path, transformer_trace):
    graph = extrapolate(transformer_trace, make_plan(data=2), MODEL)
    graph.save(tmp_path / "a")
    extrapolate(transformer_trace, make_plan(data=2), MODEL).save(tmp_path / "b")
    for name in ("tasks.parquet", "dependencies.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    loaded = load_task_graph(tmp_path / "a")
    assert records(loaded.tasks) == records(graph.tasks)
    assert loaded.metadata == graph.metadata


def test_given_stages_must_be_the_model_s(transformer_trace):
    plan = make_plan(pipeline=2)
    with pytest.raises(PlanError, match="not the model's units in order"):
        extrapolate(transformer_trace, plan, MODEL, stages=[["head"], ["embedding"]])


@pytest.mark.parametrize(
    ("plan", "batch", "words"),
    [
        (make_plan(data=3), 4, "batch 4 does not divide into 3 replica"),
        (make_plan(pipeline=2, micro_batches=3), 2, "2 samples cannot be cut into 3 micro-batches"),
        (make_plan(tensor=2), 4, "no layers that a tensor split cuts"),
        (make_plan(pipeline=64), 64, "64 stages"),
        (make_plan(), 0, "batch 0 is not positive"),
    ],
)
def test_plans_that_do_not_fit_are_refused(cnn_trace, plan, batch, words):
    with pytest.raises(PlanError, match=words):
        extrapolate(cnn_trace, plan, MODEL, batch=batch)


def test_gradients_are_scaled_after_the_last_send(cnn_trace):
    tasks = extrapolate(cnn_trace, make_plan(pipeline=2, micro_batches=2), MODEL).tasks
    stage = tasks[tasks["rank"] == 1]
    scaling = stage[stage["name"] == "gradient scaling"]["task_id"].iloc[0]
    assert scaling > stage[stage["kind"] == "send"]["task_id"].max()
    alone = extrapolate(cnn_trace, make_plan(pipeline=2, micro_batches=1), MODEL).tasks
    assert "gradient scaling" not in set(alone["name"])


def test_what_is_only_predicted_is_not_called_measured(cnn_trace):
    single = extrapolate(cnn_trace, make_plan(), MODEL)
    assert single.metadata.compute_confidence == "measured"
    assert (
        extrapolate(cnn_trace, make_plan(data=2), MODEL).metadata.compute_confidence
        == "interpolated"
    )


def test_a_trace_without_gradients_cannot_be_data_parallel(cnn_trace):
    facts = replace(cnn_trace.facts, gradients=())
    with pytest.raises(PlanError, match="which gradients there are"):
        extrapolate(replace(cnn_trace, facts=facts), make_plan(data=2), MODEL)


def test_heads_are_not_cut(transformer_trace):
    with pytest.raises(PlanError, match="4 attention heads cannot be shared by 8"):
        extrapolate(transformer_trace, make_plan(tensor=8), MODEL)


def test_plan_names_and_descriptions():
    assert (
        describe_plan(make_plan(data=2, tensor=4), 64)
        == "8 ranks = 2 data x 4 tensor, 32 samples a rank"
    )
    assert describe_plan(make_plan(), 1) == "1 rank, 1 sample a rank"
    assert "4 micro-batches (gpipe)" in describe_plan(named_plan("gpipe", 2, 4), 8)
    with pytest.raises(PlanError, match="no plan is called 'zero9'"):
        named_plan("zero9", 2)
    with pytest.raises(PlanError, match="not 2"):
        named_plan("single", 2)
    with pytest.raises(PlanError, match="without a pipeline"):
        make_plan(micro_batches=4)
    with pytest.raises(PlanError, match="data degree 0"):
        make_plan(data=0)


def test_memory_grows_with_the_batch_and_shrinks_with_stages(cnn_trace):
    def peak(plan, batch):
        return extrapolate(cnn_trace, plan, MODEL, batch=batch).metadata.peak_memory_bytes

    parameters = sum(g["size_bytes"] for g in cnn_trace.facts.gradients)
    one = peak(make_plan(), BATCH)
    assert one > 3 * parameters  # weights, gradients, momentum
    assert peak(make_plan(), 4 * BATCH) > one
    assert peak(make_plan(pipeline=2), BATCH) < one
    assert peak(make_plan(data=2), 2 * BATCH) == pytest.approx(one + parameters)


def test_bucket_limits_are_the_plan_s(cnn_trace):
    plan = replace(make_plan(data=2), first_bucket_bytes=1, bucket_bytes=1)
    graph = extrapolate(cnn_trace, plan, MODEL, batch=2 * BATCH)
    reduces = graph.tasks[(graph.tasks["name"] == "all_reduce") & (graph.tasks["rank"] == 0)]
    sizes = [g["size_bytes"] for g in cnn_trace.facts.gradients]
    assert reduces["message_bytes"].tolist() == sizes  # every gradient alone, in order of readiness


def test_communication_of_the_traced_run_takes_no_time_in_a_plan(cnn_trace):
    operators = cnn_trace.operators.copy()
    chosen = operators.index[operators["phase"] == "backward"][:3]
    operators.loc[chosen, "kind"] = "collective"
    parallel = Trace(operators, cnn_trace.tensors, cnn_trace.facts)
    whole, less = (
        extrapolate(t, make_plan(), MODEL).tasks["duration_s"].sum() for t in (cnn_trace, parallel)
    )
    dropped = operators.loc[chosen, ["device_ns", "cpu_ns"]].to_numpy().sum() / 1e9
    assert whole - less == pytest.approx(dropped)
    assert (
        "3 communication operators"
        in extrapolate(parallel, make_plan(), MODEL).metadata.warnings[-1]
    )
