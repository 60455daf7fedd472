"""Forward alone, and all but the optimizer: what runs, what is sent, what is held.

Forward alone, and all but the optimizer: what runs, what is sent, what is held.

A platform and a task graph as graphs of networkx.

Eager sends: messages move once they are sent, in every engine, folded or not, and only those that may.

Host time of eager training: what a launch takes where no trace holds host times.
"""

import math
from dataclasses import replace
from typing import Any

import networkx
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from captured import BATCH
from few_facts import few_facts
from same_model import ProportionalModel
from trioflow import load_named_platform, load_trace, predict
from trioflow.base.columns import as_columns
from trioflow.base.errors import PlanError, TableError
from trioflow.base.precision_recipes import MEGATRON, NANOTRON
from trioflow.costmodel.choices import find_launch_s, host_times
from trioflow.costmodel.features import class_of_name, resize_batch
from trioflow.costmodel.uncertainty import combine_intervals
from trioflow.engine.simulate import simulate
from trioflow.export.step_files import build_critical_path
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate, release_sends, repeat_interval
from trioflow.parallel.plan import describe_plan, make_plan, named_plan
from trioflow.parallel.reference import choose_reference
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder, load_task_graph
from trioflow.prediction.assembly import build_graph, join_step, predict_step
from trioflow.prediction.question import Options, Question, load_traces, time_operators
from trioflow.tables import records
from trioflow.tables.schemas import NULLABLE, SCHEMAS, validate
from trioflow.trace.store import Trace

MODEL = ProportionalModel()


def test_one_rank_at_the_traced_batch_is_the_trace(cnn_trace):
    graph = extrapolate(cnn_trace, make_plan(), MODEL)
    assert graph.tasks["duration_s"].sum() == pytest.approx(cnn_trace.facts.step_time_s, rel=1e-4)
    assert graph.tasks["kind"].isin(["compute", "host"]).all()
    assert graph.metadata.uncertainty.confidence == "measured"
    low, high = graph.metadata.uncertainty.compute
    assert low <= 1.0 <= high


def test_intervals_of_independent_errors_add_in_quadrature():
    assert combine_intervals((1.0, 1.0), (0.9, 1.2)) == pytest.approx((0.9, 1.2))
    low, high = combine_intervals((0.9, 1.2), (0.9, 1.2))
    assert low == pytest.approx(0.9**2**0.5) and high == pytest.approx(1.2**2**0.5)
    assert repeat_interval(few_facts(step_times_s=[1.0] * 9)) == (1.0, 1.0)
    assert repeat_interval(few_facts(step_times_s=[1.0, 2.0, 3.0]))[0] == pytest.approx(0.6)


def test_a_graph_survives_saving(tmp_path, transformer_trace):
    graph = extrapolate(transformer_trace, make_plan(data=2), MODEL)
    graph.save(tmp_path / "a")
    extrapolate(transformer_trace, make_plan(data=2), MODEL).save(tmp_path / "b")
    for name in ("tasks.parquet", "dependencies.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    loaded = load_task_graph(tmp_path / "a")
    assert records(loaded.tasks) == records(graph.tasks)
    assert loaded.metadata == graph.metadata


@pytest.mark.parametrize(("table", "column"), [(t, c) for t, columns in NULLABLE.items() for c in columns])
def test_a_negative_number_is_refused_where_numbers_may_be_missing(tmp_path, table, column):
    blank = {"int64": 0, "double": 0.0, "string": "", "bool": False}
    words = {"phase": "forward", "category": "activation", "kind": "compute"}
    row = {cell.name: words.get(cell.name, blank.get(str(cell.type), [])) for cell in SCHEMAS[table]}
    frame = pd.DataFrame([row])
    arrow = pa.Table.from_pandas(frame, SCHEMAS[table], preserve_index=False)
    validate(arrow, table)
    frame[column] = -1
    arrow = pa.Table.from_pandas(frame, SCHEMAS[table], preserve_index=False)
    with pytest.raises(TableError, match=f"row 0, column {column}: -1 is negative"):
        validate(arrow, table)
    with pytest.raises(TableError, match=f"row 0, column {column}: -1 is negative; leave the cell empty"):
        as_columns(frame, NULLABLE[table])


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


def test_a_trace_without_gradients_cannot_be_data_parallel(cnn_trace):
    facts = replace(cnn_trace.facts, gradients=())
    with pytest.raises(PlanError, match="which gradients there are"):
        extrapolate(replace(cnn_trace, facts=facts), make_plan(data=2), MODEL)


def test_heads_are_not_cut(transformer_trace):
    with pytest.raises(PlanError, match="TP8 does not divide 4 heads"):
        extrapolate(transformer_trace, make_plan(tensor=8), MODEL)


def test_plan_names_and_descriptions():
    assert describe_plan(make_plan(data=2, tensor=4), 64) == "DP2 x TP4, mbs 32"
    assert describe_plan(make_plan(), 1) == "1 GPU, mbs 1"
    assert "GPipe, mbs 2, 4 micro-batches" in describe_plan(named_plan("gpipe", 2, 4), 8)
    with pytest.raises(PlanError, match="no plan is called 'zero9'"):
        named_plan("zero9", 2)
    with pytest.raises(PlanError, match="not 2"):
        named_plan("single", 2)


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
    whole, less = (extrapolate(t, make_plan(), MODEL).tasks["duration_s"].sum() for t in (cnn_trace, parallel))
    dropped = operators.loc[chosen, ["device_ns", "cpu_ns"]].to_numpy().sum() / 1e9
    assert whole - less == pytest.approx(dropped)
    assert "3 communication operators" in extrapolate(parallel, make_plan(), MODEL).metadata.warnings[-1]


def test_what_does_not_go_together_is_refused(transformer_trace):
    with pytest.raises(PlanError, match="unknown mode 'test'; use one of train, forward, forward-b"):
        extrapolate(transformer_trace, make_plan(), MODEL, mode="test")
    with pytest.raises(PlanError, match="mode forward of DataParallel is not simulated; use repli"):
        extrapolate(transformer_trace, named_plan("dp", 2), MODEL, mode="forward")


def test_the_last_batch_of_a_data_set_is_filled_up(transformer_trace):
    plan = make_plan(data=2, pipeline=2, micro_batches=2)
    with pytest.raises(PlanError, match="batch 9 does not divide into 2 replica"):
        extrapolate(transformer_trace, plan, MODEL, batch=9)
    filled = extrapolate(transformer_trace, plan, MODEL, batch=9, last_batch=True)
    whole = extrapolate(transformer_trace, plan, MODEL, batch=10)
    assert filled.tasks.equals(whole.tasks)
    said = "9 samples on 2 replicas: DistributedSampler repeats 1, so that each runs 5"
    assert said in filled.metadata.warnings
    even = extrapolate(transformer_trace, plan, MODEL, batch=10, last_batch=True)
    assert even.metadata == whole.metadata


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
        assert reference.trace.facts is trace.facts and reference.operators is reference.trace.operator_columns
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
    assert reference.trace.facts is larger.facts and reference.batch == 4 * BATCH
    graph = extrapolate([larger, cnn_trace], make_plan(), ProportionalModel(), batch=64 * BATCH)
    assert graph.metadata.uncertainty.confidence == "extrapolated"
    between = extrapolate([larger, cnn_trace], make_plan(), ProportionalModel(), batch=2 * BATCH)
    assert between.metadata.uncertainty.confidence == "interpolated"
    assert between.metadata.traced_batch == 4 * BATCH and set(between.metadata.trace_shares) == {
        str(BATCH),
        str(4 * BATCH),
    }


def test_traces_that_ran_other_operators_are_not_mixed(cnn_trace, larger):
    other = replace(larger, operators=larger.operators.iloc[:-1])
    reference = choose_reference([other, cnn_trace], 2 * BATCH)
    assert reference.trace.facts is other.facts  # equally near: the larger one
    assert reference.batch == 4 * BATCH


def test_traces_of_two_workloads_are_refused(cnn_trace, transformer_trace):
    with pytest.raises(PlanError, match="differ in workload"):
        choose_reference([cnn_trace, transformer_trace], 3)


def test_a_platform_is_a_graph_whose_edges_are_its_links():
    platform = load_named_platform("dgx-h100", 16)
    graph = platform.to_networkx()
    assert graph.number_of_edges() == len(platform.links)
    path = networkx.shortest_path(graph, "rank0", "rank8", weight="latency_s")
    speeds = [graph.edges[edge]["bandwidth_bytes_per_s"] for edge in networkx.utils.pairwise(path)]
    assert min(speeds) == 50e9, "the network card is the narrowest link between nodes"


def test_the_longest_path_of_a_rank_alone_is_its_simulated_step():
    trace, platform = load_trace("gpt2-tiny-b8"), load_named_platform("cpu2-gloo", 1)
    tasks = extrapolate(trace, make_plan(), ProportionalModel())
    graph = tasks.to_networkx()
    for source, _, edge in graph.edges(data=True):
        edge["seconds"] = graph.nodes[source]["duration_s"]
    path = networkx.dag_longest_path(graph, "seconds")
    longest = sum(graph.nodes[task]["duration_s"] for task in path)
    assert longest == pytest.approx(simulate(tasks, platform).timeline["end_s"].max())


SIZE = 1_000_000


def two_ranks(receiver_s: float = 5.0) -> Any:
    """Rank 0 computes 1 s, sends, computes 1 s; rank 1 computes ``receiver_s``, receives, computes 1 s."""
    graph = TaskGraphBuilder()
    match = graph.new_match()
    first = graph.add(0, "compute", "compute", "a", duration_s=1.0)
    send = graph.add(0, "send", "send", "send", after=[first], match_id=match, peer=1, message_bytes=SIZE)
    graph.add(0, "compute", "compute", "b", after=[send], duration_s=1.0)
    before = graph.add(1, "compute", "compute", "c", duration_s=receiver_s)
    recv = graph.add(1, "receive", "recv", "recv", after=[before], match_id=match, peer=0, message_bytes=SIZE)
    graph.add(1, "compute", "compute", "d", after=[recv], duration_s=1.0)
    return graph.build()


@pytest.fixture(scope="module")
def platform() -> Platform:
    return load_platform("dgx-a100", 8)


def test_messages_of_a_given_duration_stay_whatever_the_limit() -> None:
    graph = two_ranks()
    given = graph.tasks.assign(message_bytes=pd.array([None] * len(graph.tasks), dtype="Int64"))
    timed = TaskGraph(given, graph.dependencies, graph.metadata)
    for largest_bytes in (1e30, math.inf):
        assert len(release_sends(timed, largest_bytes).tasks) == len(graph.tasks)
        assert len(release_sends(graph, largest_bytes).tasks) == len(graph.tasks) + 1


@pytest.mark.parametrize("engine", ["reference", "compiled"])
def test_a_sender_is_free_once_its_message_has_arrived(platform: Platform, engine: str) -> None:
    graph = two_ranks()
    waiting = simulate(graph, platform, engine=engine).timeline
    flow_s = float(waiting["end_s"].iloc[1] - 5.0)
    assert waiting["end_s"].tolist()[2] == pytest.approx(6.0 + flow_s)
    eager = release_sends(graph, SIZE)
    found = simulate(eager, platform, engine=engine).timeline.set_index("name")
    ends = {name: float(found.loc[name, "end_s"]) for name in found.index}
    assert ends["send"] == ends["recv"] == pytest.approx(1.0 + flow_s)
    assert ends["b"] == pytest.approx(2.0 + flow_s), "the sender goes on"
    assert ends["wait for recv"] == 5.0 and ends["d"] == 6.0, "what had arrived costs nothing"
    path = build_critical_path(eager, simulate(eager, platform, engine=engine).timeline)
    assert path["name"].tolist() == ["c", "d"]


def test_a_receiver_that_is_early_waits_as_before(platform: Platform) -> None:
    graph = two_ranks(receiver_s=0.5)
    eager = release_sends(graph, SIZE)
    ends = [simulate(one, platform).summary.step_time_s for one in (graph, eager)]
    assert ends[0] == ends[1] > 2.0


def test_larger_messages_and_none_wait(platform: Platform) -> None:
    graph = two_ranks()
    assert release_sends(graph, 0) is graph
    left = release_sends(graph, SIZE - 1)
    pd.testing.assert_frame_equal(left.tasks, graph.tasks)
    assert len(release_sends(graph, SIZE).tasks) == len(graph.tasks) + 1


@pytest.mark.parametrize(
    "plan",
    [
        {"pipeline": 2, "data": 2, "schedule": "1f1b", "micro_batches": 4},
        {"pipeline": 2, "data": 2, "tensor": 2, "schedule": "gpipe", "micro_batches": 4},
        {"pipeline": 2, "data": 4, "schedule": "interleaved", "micro_batches": 4, "stages_per_rank": 2},
    ],
)
def test_identical_ranks_executed_once_are_all_ranks_executed(platform: Platform, plan: dict[str, Any]) -> None:
    traces = load_traces(["gpt2-tiny-b8"])
    times = time_operators(traces, platform.device.name)
    made = make_plan(plan.pop("data"), **plan)
    graph = build_graph(times, made, batch=64)
    assert graph.fold is not None
    eager = release_sends(graph, 1e12)
    assert eager.fold is not None
    folded = simulate(eager, platform, fold=True)
    assert folded.summary.folded
    whole = simulate(eager, platform, fold=False, engine="reference")
    assert not whole.summary.folded
    pd.testing.assert_frame_equal(folded.timeline, whole.timeline)
    rendezvous = simulate(build_graph(times, made, batch=64), platform)
    assert whole.summary.step_time_s <= rendezvous.summary.step_time_s * (1 + 1e-9)


def test_the_platform_says_which_messages_are_eager(platform: Platform) -> None:
    times = time_operators(load_traces(["gpt2-tiny-b8"]), platform.device.name)
    plan = make_plan(2, pipeline=2, schedule="1f1b", micro_batches=4)
    asked = Options(interval=True, draws=3)
    answers = [
        predict_step(join_step(build_graph(times, plan, batch=16), Question(times, plan, 16, one, asked))).to_dict()
        for one in (platform, replace(platform, eager_send_bytes=1e9))
    ]
    assert answers[1]["step_time_s"] <= answers[0]["step_time_s"]
    assert answers[1]["events"] > answers[0]["events"]
    assert answers[1]["draws"]["expected_s"] <= answers[0]["draws"]["expected_s"]


@pytest.fixture(scope="module")
def trace():
    return load_trace("gpt2-b8")


def step_s(trace, launch_s, **degrees):
    platform = load_platform("dgx-h100", 8)
    return predict(trace, make_plan(**degrees), replace(platform, host={**platform.host, "launch_pytorch_s": launch_s}))


def count_launches(trace):
    """Views run no kernel, nor does reading a step's number (`aten::item`), which lies on the host."""
    work = trace.operators[["flop", "read_bytes", "write_bytes"]]
    views = trace.operators["name"].map(class_of_name) == "view"
    return int(((work != 0).any(axis=1) & ~views).sum())


def test_a_step_lasts_as_long_as_its_launches_where_the_device_is_faster(trace):
    launch_s = 1e-3
    bare, held = step_s(trace, 0.0), step_s(trace, launch_s)
    least_s = count_launches(trace) * launch_s
    assert bare.step_time_s < least_s <= held.step_time_s < least_s + bare.step_time_s
    hidden = step_s(trace, 1e-9)
    assert hidden.step_time_s == pytest.approx(bare.step_time_s, rel=0.01)


def test_recorded_host_times_stay(trace):
    operators = trace.operators.assign(device_ns=np.int64(1000), cpu_ns=np.int64(7))
    recorded = Trace(operators, trace.tensors, replace(trace.facts, step_time_source="profile"))
    assert host_times(recorded, operators, 1e-4) == pytest.approx(np.full(len(operators), 7e-9))
    predicted = Trace(operators, trace.tensors, replace(trace.facts, step_time_source="predicted"))
    assert host_times(predicted, operators, 1e-4) == pytest.approx(np.full(len(operators), 1e-4))
    assert host_times(predicted, operators, 0.0) == pytest.approx(np.full(len(operators), 7e-9))


@pytest.mark.parametrize("name", ["p5-h100", "dgx-h100", "dgx-h200", "dgx-a100"])
def test_machines_say_what_a_launch_takes_each_framework_with_its_source(name):
    platform = load_platform(name, 8)
    launches = {framework: platform.host[f"launch_{framework}_s"] for framework in ("pytorch", "megatron", "nanotron")}
    assert all(10e-6 < launch_s < 200e-6 for launch_s in launches.values())
    # Megatron's and nanotron's Python does more for each kernel than PyTorch's own.
    assert launches["pytorch"] < min(launches["megatron"], launches["nanotron"])
    assert all(platform.sources[f"host.launch_{framework}_s"] for framework in launches)


@pytest.mark.parametrize(
    ("recipe", "launch_s"),
    [(None, 1.0), ("fsdp2-mixed", 1.0), ("megatron-bf16", 2.0), ("fp8", 2.0), ("nanotron-bf16", 3.0)],
)
def test_the_recipe_s_framework_decides_what_a_launch_takes(trace, recipe, launch_s):
    facts = replace(trace.facts, precision_recipe=recipe)
    host = {"launch_megatron_s": 2.0, "launch_nanotron_s": 3.0, "launch_s": 1.0}
    assert find_launch_s(host, facts) == launch_s
    assert find_launch_s({**host, "launch_pytorch_s": 4.0}, facts) == (4.0 if launch_s == 1.0 else launch_s)
    assert find_launch_s({}, facts) == 0.0


def test_megatron_s_host_waits_for_each_message_of_a_pipeline(trace):
    """Each of 4 micro-batches and 1 more stage launches anew; elsewhere the host runs ahead while the device waits."""
    facts = replace(trace.facts, precision_recipe="megatron-bf16")
    of_megatron = Trace(trace.operators, trace.tensors, facts)
    platform = load_platform("dgx-h100", 8)
    launch_s, steps = 1e-3, []
    plan = make_plan(pipeline=4, schedule="1f1b", micro_batches=4)
    for one, key in ((trace, "launch_pytorch_s"), (of_megatron, "launch_megatron_s")):
        held = replace(platform, host={**platform.host, key: launch_s})
        steps.append(predict(one, plan, held).step_time_s)
    # Of stages as long as one another, 4 micro-batches pass 4 at a time one after the other.
    least_s = count_launches(trace) * launch_s * (4 + 4 - 1) / 4 / 2
    assert steps[1] > max(1.2 * steps[0], least_s)


def test_an_exchange_of_a_tensor_group_keeps_the_host_on_several_slow_nodes(trace):
    """Once for each rank of the group; one node does not pay it, nor does the fast network."""
    assert "exchange_per_rank_s" not in load_platform("p5-h100", 32).host
    platform = load_platform("p5-h100-slow", 32)
    inside_s, beyond_s = (platform.host[f"exchange_per_rank{end}_s"] for end in ("", "_beyond_node"))
    key = "tensor_parallel_forward_s"
    for degrees, wanted_s in (
        ({"data": 2, "tensor": 4, "pipeline": 4}, 4 * inside_s),
        ({"data": 4, "tensor": 2, "pipeline": 4}, 2 * inside_s),
        ({"data": 8, "tensor": 4}, 4 * inside_s),
        ({"data": 2, "tensor": 16}, 16 * (inside_s + beyond_s)),
        ({"tensor": 4, "pipeline": 2}, 0),
    ):
        host = platform.host_of(make_plan(**degrees), NANOTRON)
        assert host.get(key, 0.0) == pytest.approx(wanted_s)
        assert not any(name.startswith("exchange") for name in host)
        assert key not in platform.host_of(make_plan(**degrees), MEGATRON)
    facts = replace(trace.facts, precision_recipe="nanotron-bf16")
    of_nanotron = Trace(trace.operators, trace.tensors, facts)
    plan = make_plan(data=2, tensor=4, pipeline=4, schedule="1f1b", micro_batches=8)
    slow, fast = (
        predict(
            of_nanotron,
            plan,
            replace(platform, host={**platform.host, "exchange_per_rank_s": some_s}),
            batch=128,
            memory=False,
        ).step_time_s
        for some_s in (0.01, 0.0)
    )
    assert slow > fast + 8 * 4 * 0.01
