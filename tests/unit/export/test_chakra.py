"""Task graphs as Chakra files: read back by hand, and by trioflow, they say the same."""

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import chakra_wire as wire
import pandas as pd
import pytest
from fuzz import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chakra_reader import read_chakra_graph
from same_model import ProportionalModel
from trioflow.base.errors import InputError, TraceError
from trioflow.engine.simulate import simulate
from trioflow.export.rank_files import leave_host, size_trace, write_chakra
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.task_graph import GraphMetadata, TaskGraph, TaskGraphBuilder
from trioflow.tables import records
from trioflow.trace.store import Trace

COLLECTIVE_NUMBERS = {
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
    "reduce_scatter_block": 8,
    "barrier": 9,
}
PLANS = {
    "single": make_plan(),
    "ddp": named_plan("ddp", 2),
    "tp": named_plan("tp", 2),
    "tp-layers": named_plan("tp-layers", 2),
    "gpipe": named_plan("gpipe", 2, 4),
    "data2-tensor2": make_plan(data=2, tensor=2),
    "all": make_plan(data=2, tensor=2, pipeline=2),
}


def exact(frame):
    """Rows of a table, durations apart."""
    return records(frame.drop(columns=[c for c in ("duration_s",) if c in frame]))


def waits(graph):
    """All that each task waits for, at any distance."""
    tasks = records(graph.tasks, "task_id", "rank", "stream")
    direct = {row["task_id"]: set() for row in tasks}
    last = {}
    for row in tasks:
        stream = (row["rank"], row["stream"])
        if stream in last:
            direct[row["task_id"]].add(last[stream])
        last[stream] = row["task_id"]
    for task, other in graph.dependencies.itertuples(index=False):
        direct[task].add(other)
    reached = {}
    for task in sorted(direct):
        reached[task] = direct[task].union(*(reached[other] for other in direct[task]))
    return reached


def check_round_trip(graph, prefix, source=None):
    files = write_chakra(graph, prefix, source)
    back = read_chakra_graph(prefix)
    assert exact(back.tasks) == exact(graph.tasks)
    assert waits(back) == waits(graph)
    check_durations(graph, back)
    return files


def check_durations(graph, back):
    """Each within 1 us of what it was, and the sum over a stream up to any task too."""
    both = graph.tasks[["rank", "stream", "duration_s"]].assign(back_s=back.tasks["duration_s"])
    assert (both["duration_s"].isna() == both["back_s"].isna()).all()
    timed = both.dropna()
    assert ((timed["duration_s"] - timed["back_s"]).abs() <= 1.001e-6).all()
    for _, lane in timed.groupby(["rank", "stream"]):
        off_s = (lane["duration_s"] - lane["back_s"]).cumsum().abs()
        assert off_s.max() <= 0.501e-6


def check_nodes(path, tasks):
    """What a consumer relies on: ids, dependencies, types and attributes, read by hand."""
    metadata, nodes = wire.read(path)
    seen = set()
    for node in nodes:
        task = tasks[node["id"]]
        assert node["id"] not in seen
        assert set(node["data_deps"]) <= seen, "a dependency that does not come before"
        assert set(node["ctrl_deps"]) <= set(node["data_deps"])
        seen.add(node["id"])
        kind = {"collective": 7, "send": 5, "recv": 6}.get(task["kind"], 4)
        assert (node["type"], node["name"]) == (kind, task["name"])
        assert node["kinds"]["is_cpu_op"] == "bool_val"
        assert node["attr"]["is_cpu_op"] == (task["stream"] == "host")
        if kind != 4:
            assert 7 not in node["fields"] and 6 not in node["fields"], "the network decides it"
            assert node["kinds"]["comm_size"] == "int64_val"
    assert seen == {t["task_id"] for t in tasks.values() if t["rank"] == metadata["trioflow.rank"]}
    return nodes


@pytest.mark.parametrize("name", PLANS)
def test_round_trip_of_plans(name, transformer_trace, tmp_path):
    plan = PLANS[name]
    graph = extrapolate(transformer_trace, plan, ProportionalModel())
    source = size_trace([transformer_trace], plan, graph.metadata.batch)
    files = check_round_trip(graph, tmp_path / "step", source)
    assert [f.name for f in files] == [*(f"step.{rank}.et" for rank in range(plan.ranks)), "step.comm_groups.json"]
    tasks = {row["task_id"]: row for row in records(graph.tasks)}
    groups = json.loads(files[-1].read_text())
    for file in files[:-1]:
        for node in check_nodes(file, tasks):
            check_message(node, tasks[node["id"]], groups, plan.ranks)
            check_work(node, tasks[node["id"]], source)


def check_message(node, task, groups, ranks):
    attributes, kinds = node["attr"], node["kinds"]
    if task["kind"] == "collective":
        assert attributes["comm_type"] == COLLECTIVE_NUMBERS[task["name"]]
        assert kinds["comm_type"] == "int64_val"
        members = [int(word) for word in task["group"].split(",")]
        if len(members) == ranks:
            assert "pg_name" not in attributes
        else:
            assert kinds["pg_name"] == "string_val" and int(attributes["pg_name"]) > 0
            assert groups[attributes["pg_name"]] == members
        assert attributes["comm_size"] == task["message_bytes"]
    elif task["kind"] in ("send", "recv"):
        ends = (attributes["comm_src"], attributes["comm_dst"])
        mine = (task["rank"], task["peer"])
        assert ends == (mine if task["kind"] == "send" else mine[::-1])
        assert {kinds[k] for k in ("comm_src", "comm_dst", "comm_tag")} == {"int32_val"}


def check_work(node, task, source):
    if task["kind"] != "compute" or task["op_id"] is None:
        assert "num_ops" not in node["attr"]
        return
    operator = source.operators.loc[task["op_id"]]
    assert node["attr"]["num_ops"] == operator["flop"]
    assert node["attr"]["tensor_size"] == operator["read_bytes"] + operator["write_bytes"]
    assert (node["kinds"]["num_ops"], node["kinds"]["tensor_size"]) == ("int64_val", "uint64_val")


@pytest.mark.parametrize("plan", [PLANS["ddp"], PLANS["gpipe"]], ids=["ddp", "gpipe"])
def test_round_trip_of_a_cnn(plan, cnn_trace, tmp_path):
    graph = extrapolate(cnn_trace, plan, ProportionalModel())
    check_round_trip(graph, tmp_path / "step")


def test_the_work_is_that_of_the_shard_and_the_micro_batch(transformer_trace, tmp_path):
    whole = int(transformer_trace.operators["flop"].sum())

    def flop_of(plan):
        graph = extrapolate(transformer_trace, plan, ProportionalModel())
        source = size_trace([transformer_trace], plan, graph.metadata.batch)
        files = write_chakra(graph, tmp_path / plan.plan, source)
        nodes = [node for file in files[:-1] for node in wire.read(file)[1]]
        return sum(node["attr"].get("num_ops", 0) for node in nodes), nodes

    assert flop_of(PLANS["single"])[0] == whole
    assert flop_of(PLANS["gpipe"])[0] == pytest.approx(whole, rel=1e-6)
    assert flop_of(PLANS["tp"])[0] == pytest.approx(whole, rel=1e-6)
    # Blocks are shared, the head is not.
    assert whole < flop_of(PLANS["tp-layers"])[0] < 2 * whole
    assert all(not node["inputs"] for node in flop_of(PLANS["tp"])[1]), "shapes of the shard differ"


def test_a_send_and_its_recv_share_a_tag_and_no_other_does(transformer_trace, tmp_path):
    graph = extrapolate(transformer_trace, PLANS["gpipe"], ProportionalModel())
    files = write_chakra(graph, tmp_path / "x")
    ends = {}
    for file in files[:-1]:
        for node in wire.read(file)[1]:
            a = node["attr"]
            if "comm_tag" in a:
                key = (a["comm_src"], a["comm_dst"], a["comm_tag"], a["comm_size"])
                ends.setdefault(key, []).append(node["type"])
    assert len(ends) == 8 and all(sorted(types) == [5, 6] for types in ends.values())
    assert len({tag for _, _, tag, _ in ends}) == 8


def test_durations_shorter_than_a_microsecond_add_up(tmp_path):
    builder = TaskGraphBuilder()
    for number in range(10_000):
        builder.add(0, "compute" if number % 2 else "copy", "compute", "tick", duration_s=0.3e-6)
    write_chakra(builder.build(), tmp_path / "x")
    nodes = wire.read(tmp_path / "x.0.et")[1]
    for stream in ("compute", "copy"):
        mine = [n["duration"] for n in nodes if n["attr"]["trioflow.stream"] == stream]
        assert abs(sum(mine) - 1500) <= 1 and set(mine) == {0, 1}


@pytest.mark.parametrize(
    ("name", "size", "members", "written"),
    [
        ("all_reduce", 1000, 4, 1000),
        ("reduce_scatter", 1000, 4, 1000),
        ("all_gather", 1000, 4, 250),
        ("all_gather", 1001, 4, 251),
        ("all_gather", 999, 3, 333),
        ("broadcast", 10, 2, 10),
        ("all_to_all", 64, 4, 64),
    ],
)
def test_comm_size_is_the_shard_of_an_all_gather_and_the_input_of_others(name, size, members, written, tmp_path):
    """The closed form that matches ASTRA-sim moves m = floor(S/N) bytes of comm_size S a message."""
    builder = TaskGraphBuilder()
    match, group = builder.new_match(), ",".join(map(str, range(members)))
    for rank in range(members):
        builder.add(rank, "communication", "collective", name, message_bytes=size, group=group, match_id=match)
    graph = builder.build()
    check_round_trip(graph, tmp_path / "x")
    for rank in range(members):
        (node,) = wire.read(tmp_path / f"x.{rank}.et")[1]
        assert node["attr"]["comm_size"] == written
        assert node["attr"]["comm_type"] == COLLECTIVE_NUMBERS[name]


def two_groups():
    builder = TaskGraphBuilder()
    for group in ([0, 2], [1, 3], [0, 1, 2, 3], [3, 2, 1, 0]):
        match = builder.new_match()
        for rank in group:
            builder.add(
                rank,
                "communication",
                "collective",
                "all_reduce",
                message_bytes=8,
                group=",".join(map(str, group)),
                match_id=match,
            )
    return builder.build()


def test_groups_are_numbered_from_one_and_written_beside(tmp_path):
    files = write_chakra(two_groups(), tmp_path / "x")
    assert json.loads(files[-1].read_text()) == {"1": [0, 2], "2": [1, 3], "3": [3, 2, 1, 0]}
    names = [n["attr"].get("pg_name") for n in wire.read(files[0])[1]]
    assert names == ["1", None, "3"]


def test_host_tasks_run_beside_the_device(tmp_path):
    builder = TaskGraphBuilder()
    launch = builder.add(0, "host", "host", "launch aten::mm", duration_s=5e-6)
    builder.add(0, "compute", "compute", "aten::mm", duration_s=7e-6, after=[launch])
    builder.add(0, "compute", "host", "hooks", duration_s=1e-6)
    write_chakra(builder.build(), tmp_path / "x")
    nodes = wire.read(tmp_path / "x.0.et")[1]
    assert [n["attr"]["is_cpu_op"] for n in nodes] == [True, False, False]
    assert [n["data_deps"] for n in nodes] == [[], [0], [1]]
    assert [n["ctrl_deps"] for n in nodes] == [[], [], [1]]
    assert [n["duration"] for n in nodes] == [5, 7, 1]


def test_without_the_host_tasks_wait_for_what_it_waited_for(tmp_path):
    builder = TaskGraphBuilder()
    first = builder.add(0, "compute", "compute", "aten::mm", duration_s=7e-6)
    looked = builder.add(0, "receive", "recv", "recv forward", message_bytes=8, peer=1, match_id=0)
    launch = builder.add(0, "host", "host", "launch", duration_s=5e-6, after=[looked, first])
    builder.add(0, "host", "host", "launch", duration_s=5e-6)
    later = builder.add(0, "host", "host", "launch", duration_s=5e-6)
    builder.add(0, "compute", "compute", "aten::mm", duration_s=1e-6, after=[later])
    builder.add(1, "send", "send", "send forward", message_bytes=8, peer=0, match_id=0)
    graph = leave_host(builder.build(GraphMetadata(ranks=2)))
    assert launch == 2 and graph.tasks["task_id"].tolist() == [0, 1, 2, 3]
    assert graph.dependencies.to_numpy().tolist() == [[2, 0], [2, 1]]
    write_chakra(graph, tmp_path / "x")
    nodes = wire.read(tmp_path / "x.0.et")[1]
    assert [n["attr"]["is_cpu_op"] for n in nodes] == [False] * 3
    assert nodes[2]["data_deps"] == [0, 1]


def test_the_host_may_not_wait_for_itself_later():
    builder = TaskGraphBuilder()
    builder.add(0, "compute", "compute", "aten::mm", duration_s=1e-6, after=[1])
    builder.add(0, "host", "host", "launch", duration_s=1e-6)
    with pytest.raises(InputError, match="task 0 waits for the host's later task 1"):
        leave_host(builder.build())


@pytest.mark.parametrize(
    "plan",
    [
        named_plan("ddp", 2),
        named_plan("tp", 2),
        make_plan(data=2, sharding="fsdp"),
        make_plan(pipeline=2, micro_batches=4, schedule="1f1b", recompute="full"),
        make_plan(pipeline=2, micro_batches=4, schedule="gpipe", tensor=2),
    ],
    ids=lambda plan: plan.plan,
)
def test_without_the_host_a_step_is_that_of_a_host_that_takes_no_time(plan, transformer_trace):
    facts = replace(transformer_trace.facts, device="cuda")
    trace = Trace(transformer_trace.operators, transformer_trace.tensors, facts)
    graph = extrapolate(trace, plan, ProportionalModel(), host={"launch_pytorch_s": 1e-5})
    device = leave_host(graph)
    assert "host" not in set(device.tasks["stream"]) and "host" in set(graph.tasks["stream"])
    quick = graph.tasks.assign(duration_s=graph.tasks["duration_s"].where(graph.tasks["stream"] != "host", 0.0))
    platform = load_platform("dgx-h100", plan.ranks)
    both = [
        simulate(one, platform).summary.step_time_s
        for one in (TaskGraph(quick, graph.dependencies, graph.metadata), device)
    ]
    assert both[1] == pytest.approx(both[0], rel=1e-12)


def test_equal_graphs_give_equal_bytes(transformer_trace, tmp_path):
    graph = extrapolate(transformer_trace, PLANS["gpipe"], ProportionalModel())
    source = size_trace([transformer_trace], PLANS["gpipe"], graph.metadata.batch)
    one, two = (write_chakra(graph, tmp_path / name / "x", source) for name in ("a", "b"))
    assert [f.read_bytes() for f in one] == [f.read_bytes() for f in two]
    write_chakra(graph, tmp_path / "a" / "x", source)  # over its own files
    assert [f.read_bytes() for f in one] == [f.read_bytes() for f in two]


durations = st.one_of(st.integers(0, 3_000_000).map(lambda ns: ns / 1e9), st.just(0.0))
steps = st.one_of(
    st.tuples(st.sampled_from(["compute", "copy", "host"]), st.integers(0, 2), durations),
    st.tuples(st.just("message"), st.permutations(range(3)), st.integers(0, 1 << 40)),
    st.tuples(
        st.sampled_from(sorted(COLLECTIVE_NUMBERS)),
        st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
        st.integers(0, 1 << 40),
    ),
)


@st.composite
def graphs(draw):
    """Random programs of three ranks: tasks wait for earlier ones of their own rank."""
    builder, of_rank = TaskGraphBuilder(), {0: [], 1: [], 2: []}

    def add(rank, *words, **columns):
        earlier = of_rank[rank]
        after = draw(st.lists(st.sampled_from(earlier), max_size=2)) if earlier else []
        earlier.append(builder.add(rank, *words, after=after, **columns))

    for kind, where, amount in draw(st.lists(steps, max_size=14)):
        if kind in ("compute", "copy", "host"):
            task = {"copy": "memcpy"}.get(kind, kind)
            add(where, kind, task, kind, duration_s=amount, phase="forward", micro_batch=1)
        elif kind == "message":
            source, target = where[:2]
            both = {"message_bytes": amount, "match_id": builder.new_match()}
            add(source, "send", "send", "send forward", peer=target, **both)
            add(target, "receive", "recv", "recv forward", peer=source, **both)
        else:
            both = {"message_bytes": amount, "match_id": builder.new_match()}
            for rank in where:
                add(rank, "communication", "collective", kind, group=",".join(map(str, where)), **both)
    return builder.build(GraphMetadata(ranks=3))


@settings(max_examples=count_examples(60))
@given(graphs())
def test_round_trip_of_random_graphs(graph):
    with tempfile.TemporaryDirectory() as folder:
        files = check_round_trip(graph, Path(folder) / "x")
        tasks = {row["task_id"]: row for row in records(graph.tasks)}
        for file in files[:-1]:
            check_nodes(file, tasks)


def test_tasks_that_wait_for_later_ones_are_written_behind_them(tmp_path):
    builder = TaskGraphBuilder()
    builder.add(0, "compute", "compute", "late", duration_s=1.0)
    builder.add(0, "copy", "memcpy", "first", duration_s=1.0)
    graph = builder.build()
    graph.dependencies = pd.DataFrame({"task_id": [0], "depends_on": [1]})
    write_chakra(graph, tmp_path / "x")
    assert [n["id"] for n in wire.read(tmp_path / "x.0.et")[1]] == [1, 0]


def message(**columns):
    both = {"message_bytes": 8, "match_id": 0, "peer": 0, **columns}
    builder = TaskGraphBuilder()
    builder.add(0, "send", "send", "send", **both)
    return builder.build()


def one_task(*words, **columns):
    builder = TaskGraphBuilder()
    builder.add(0, *words, **columns)
    return builder.build()


def linked(*edges):
    builder = TaskGraphBuilder()
    for rank in (0, 0, 1):
        builder.add(rank, f"s{len(edges)}", "compute", "work", duration_s=1.0)
    graph = builder.build()
    graph.dependencies = pd.DataFrame(edges, columns=["task_id", "depends_on"])
    return graph


BAD = {
    "its duration is None": one_task("compute", "compute", "x"),
    "its duration is -1": one_task("compute", "compute", "x", duration_s=-1.0),
    "its duration is inf": one_task("compute", "compute", "x", duration_s=math.inf),
    "no such collective": one_task("c", "collective", "hug", message_bytes=1, match_id=0, group="0"),
    "its group is": one_task("c", "collective", "all_reduce", message_bytes=1, match_id=0, group="1"),
    "has no message_bytes": message(message_bytes=None),
    "has no match_id": message(match_id=None),
    "its peer is 7": message(peer=7),
    "in a circle": linked((0, 1)),
    "of rank 1 waits for task 0 of rank 0": linked((2, 0)),
    "one does not exist": linked((0, 9)),
}


@pytest.mark.parametrize("words", BAD)
def test_what_chakra_cannot_say_is_refused_and_nothing_is_left(words, tmp_path):
    with pytest.raises(InputError, match=words):
        write_chakra(BAD[words], tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_all_ranks_or_none(tmp_path):
    write_chakra(two_groups(), tmp_path / "x")
    before = {f: f.read_bytes() for f in tmp_path.iterdir()}
    broken = two_groups()
    builder = TaskGraphBuilder()
    for rank in range(4):
        builder.add(rank, "compute", "compute", "x", duration_s=1.0 if rank < 3 else -1.0)
    with pytest.raises(InputError, match="of rank 3"):
        write_chakra(builder.build(), tmp_path / "x")
    assert {f: f.read_bytes() for f in tmp_path.iterdir()} == before
    assert len(broken.tasks) == 12


def test_files_of_a_larger_export_are_not_left_among_the_new_ones(tmp_path):
    write_chakra(two_groups(), tmp_path / "x")
    (tmp_path / "xy.7.et").write_bytes(b"")  # another prefix
    with pytest.raises(InputError, match=r"x\.1\.et: this is a file of an export of more than 1"):
        write_chakra(one_task("compute", "compute", "x", duration_s=1.0), tmp_path / "x")


@pytest.mark.parametrize("prefix", ["", "folder/"])
def test_a_prefix_needs_a_name(prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is not a prefix"):
        write_chakra(two_groups(), prefix)
    assert not list(tmp_path.iterdir())


def test_an_empty_graph_has_a_file_without_nodes(tmp_path):
    files = write_chakra(TaskGraphBuilder().build(), tmp_path / "x")
    assert [f.name for f in files] == ["x.0.et", "x.comm_groups.json"]
    metadata, nodes = wire.read(files[0])
    assert nodes == [] and metadata["version"] == "0.0.4"
    assert read_chakra_graph(tmp_path / "x").tasks.empty


def test_reading_refuses_files_of_other_tools(tmp_path):
    files = write_chakra(two_groups(), tmp_path / "x")
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(TraceError, match=r"x\.1\.et: not written by trioflow for this rank"):
        read_chakra_graph(tmp_path / "x")
    files[1].unlink()
    with pytest.raises(TraceError, match=r"x\.1\.et: no such file"):
        read_chakra_graph(tmp_path / "x")
