"""Traces from Chakra files: trioflow's own, those of PyTorch's converter, those of generators, broken ones.

Chakra's messages on the wire, by the published field numbers; broken files name their place.
"""

import gzip
import json
import tracemalloc

import chakra_wire as wire
import pandas as pd
import pytest
from captured import with_steady_times
from google.protobuf.json_format import MessageToDict
from same_model import ProportionalModel
from trioflow.base.errors import InputError, TraceError
from trioflow.cli.main import main
from trioflow.export.rank_files import size_trace, write_chakra
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.splits.pipeline import partition
from trioflow.parallel.task_graph import TaskGraphBuilder
from trioflow.trace.importers.chakra import import_chakra, recognise
from trioflow.trace.importers.chakra_nodes import (
    NODE_TYPES,
    add_attribute,
    new_metadata,
    new_node,
    read_attributes,
    read_messages,
    write_messages,
)
from trioflow.trace.importers.kineto import import_kineto
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.store import load_trace, save_trace

OPTIONS = ImportOptions(gpu="chip", batch=4, precision="fp32")
KINDS = {bool: "bool_val", int: "int64_val", str: "string_val"}
WORK = ("flop", "read_bytes", "write_bytes", "batch_flop")
SAME = ("name", "phase", "kind", *WORK, "input_shapes", "output_shapes", "dtype")


def make(node_id, name="work", kind="COMP_NODE", ctrl=(), data=(), start=0, time=0, io=None, **attrs):
    node = new_node(node_id, name, kind)
    node.ctrl_deps.extend(ctrl)
    node.data_deps.extend(data)
    if start:
        node.start_time_micros = start
    if time:
        node.duration_micros = time
    for side, (values, shapes, types) in (io or {}).items():
        info = getattr(node, side)
        info.values, info.shapes, info.types = str(values), str(shapes), str(types)
    for key, value in attrs.items():
        add_attribute(node, key, KINDS[type(value)], value)
    return node


@pytest.fixture
def load(tmp_path):
    def load(*nodes, options=OPTIONS):
        write_messages(tmp_path / "x.0.et", [new_metadata(), *nodes])
        return import_chakra(tmp_path / "x.0.et", options)

    return load


def columns(trace, *names):
    return {name: trace.operators[name].tolist() for name in names}


def write_own(trace, folder):
    graph = extrapolate(trace, make_plan(), ProportionalModel())
    source = size_trace([trace], make_plan(), graph.metadata.batch)
    return write_chakra(graph, folder / "step", source)[0]


@pytest.fixture(scope="module")
def own_file(transformer_trace, tmp_path_factory):
    return write_own(transformer_trace, tmp_path_factory.mktemp("own"))


def test_the_traced_step_comes_back_from_trioflows_own_file(own_file, transformer_trace, tmp_path):
    assert recognise(own_file)
    trace = import_chakra(own_file, ImportOptions())
    assert columns(trace, *SAME) == columns(transformer_trace, *SAME)
    assert trace.facts.batch == 4
    for fact in ("workload", "device", "device_name", "precision", "units", "tensor_split"):
        assert getattr(trace.facts, fact) == getattr(transformer_trace.facts, fact), fact
    step_s = transformer_trace.facts.step_time_s
    assert trace.facts.step_time_s == pytest.approx(step_s, abs=2e-6)
    for side in ("device_ns", "cpu_ns"):
        apart_ns = (trace.operators[side] - transformer_trace.operators[side]).abs()
        assert apart_ns.max() <= 1001 and apart_ns.mean() < 500
    names = [[g["name"] for g in t.facts.gradients] for t in (trace, transformer_trace)]
    assert names[0] == names[1] and len(names[0]) > 10
    save_trace(trace, tmp_path / "trace")
    assert columns(load_trace(tmp_path / "trace"), *SAME) == columns(trace, *SAME)


def test_a_trace_from_a_file_can_be_planned_like_the_one_it_came_from(transformer_trace, tmp_path):
    transformer_trace = with_steady_times(transformer_trace)
    trace = import_chakra(write_own(transformer_trace, tmp_path), ImportOptions())
    for plan in (named_plan("ddp", 2), named_plan("tp", 2), named_plan("gpipe", 2)):
        stages = partition(transformer_trace, plan.pipeline)
        ours, theirs = (
            extrapolate(t, plan, ProportionalModel(), stages=stages).tasks for t in (trace, transformer_trace)
        )
        messages = [
            t.loc[t["message_bytes"].notna(), ["rank", "kind", "name", "message_bytes"]] for t in (ours, theirs)
        ]
        assert messages[0].values.tolist() == messages[1].values.tolist()
        times = [t["duration_s"].sum() for t in (ours, theirs)]
        assert times[0] == pytest.approx(times[1], rel=0.01)


@pytest.mark.parametrize("plan", ["ddp", "tp", "gpipe"])
def test_one_rank_of_a_plan_is_a_trace_too(plan, transformer_trace, tmp_path):
    chosen = named_plan(plan, 2)
    graph = extrapolate(transformer_trace, chosen, ProportionalModel())
    source = size_trace([transformer_trace], chosen, graph.metadata.batch)
    file = write_chakra(graph, tmp_path / "x", source)[1]
    trace = import_chakra(file, ImportOptions())
    tasks = graph.tasks[graph.tasks["rank"] == 1]
    messages = tasks[tasks["message_bytes"].notna()]
    told = trace.facts.communication
    assert [m["comm_size_bytes"] for m in told] == messages["message_bytes"].tolist()
    assert [m["name"] for m in told] == [n.split()[0] for n in messages["name"]]
    rows = trace.operators.loc[[m["op_id"] for m in told]]
    assert set(rows["kind"]) == {"collective"} and rows["device_ns"].sum() == 0
    assert trace.facts.step_time_s == pytest.approx(tasks["duration_s"].sum(), abs=2e-6)
    runs = tasks.loc[tasks["op_id"].notna() & (tasks["kind"] == "compute"), "op_id"].astype(int)
    assert trace.operators["flop"].sum() == source.operators["flop"].loc[runs].sum() > 0
    assert any("communicate" in warning for warning in trace.facts.warnings)


def convert(raw, path):
    """Write a captured profile as PyTorch's converter does: callers in ctrl_deps, lists as Python."""
    with gzip.open(raw / "execution_trace.json.gz") as stream:
        nodes = json.load(stream)["nodes"]
    with gzip.open(raw / "kineto.json.gz") as stream:
        events = {
            e["args"]["Record function id"]: e
            for e in json.load(stream)["traceEvents"]
            if "Record function id" in e.get("args", {})
        }
    begin = min(e["ts"] for e in events.values()) - 1
    known = {n["id"] for n in nodes}
    found = []
    for raw_node in sorted(nodes, key=lambda n: n["id"]):
        attrs = {a["name"]: a["value"] for a in raw_node["attrs"]}
        event = events.get(attrs["rf_id"]) if attrs["rf_id"] else None
        start = int(event["ts"] - begin) if event else 0
        time = int(event["ts"] + event["dur"] - begin) - start if event else 0
        parent = [raw_node["ctrl_deps"]] if raw_node["ctrl_deps"] in known else []
        ctrl = [p for p in parent if p != raw_node["id"]]
        io = {side: [raw_node[side][key] for key in ("values", "shapes", "types")] for side in ("inputs", "outputs")}
        found.append(
            make(
                raw_node["id"],
                raw_node["name"],
                ctrl=ctrl,
                data=ctrl,
                start=start,
                time=time,
                io=io,
                is_cpu_op=True,
                seq_id=attrs["seq_id"],
                op_schema=attrs["op_schema"],
                rf_id=attrs["rf_id"],
            )
        )
    write_messages(path, [new_metadata(), *found])


@pytest.mark.parametrize("raw", ["raw_transformer", "raw_cnn"])
def test_a_converted_profile_is_the_profile(raw, request, tmp_path):
    folder = request.getfixturevalue(raw)
    convert(folder, tmp_path / "x.et")
    assert recognise(tmp_path / "x.et")
    ours = import_chakra(tmp_path / "x.et", OPTIONS)
    theirs = import_kineto(folder / "kineto.json.gz", folder / "execution_trace.json.gz", OPTIONS)
    assert len(ours.operators) > 100
    for name in (*SAME, "batch_read_bytes", "input_ids", "output_ids", "module"):
        assert columns(ours, name) == columns(theirs, name), name
    joined = [t.operators["forward_op_id"].fillna(-1).tolist() for t in (ours, theirs)]
    assert joined[0] == joined[1] and max(joined[0]) > 0
    assert ours.facts.gradients == theirs.facts.gradients
    assert ours.facts.step_time_s == pytest.approx(theirs.facts.step_time_s, abs=5e-6)
    apart = (ours.operators["device_ns"] - theirs.operators["device_ns"]).abs()
    assert apart.max() <= 1000
    assert ours.facts.step_time_source == "profiled"


def tensor(number, shape):
    size = 1
    for part in shape:
        size *= part
    return [number, number, 0, size, 4, "cuda:0"]


def matmul(left, right, out, **sides):
    values = [tensor(*left), tensor(*right)]
    return {
        "inputs": (values, [list(left[1]), list(right[1])], ["Tensor(float)"] * 2),
        "outputs": ([tensor(*out)], [list(out[1])], ["Tensor(float)"]),
    }


def gpu_nodes():
    """A linear layer, its gradient's all-reduce and a copy, on one device with two streams."""
    cpu = {"is_cpu_op": True}
    gpu = {"is_cpu_op": False}
    big, weight, small, out = (1, (4, 8)), (2, (16, 8)), (4, (8, 16)), (3, (4, 16))
    return [
        make(1, "ProfilerStep#1", start=10, time=1000, **cpu),
        make(2, "aten::linear", ctrl=[1], start=20, time=100, io=matmul(big, weight, out), **cpu),
        make(3, "aten::mm", ctrl=[2], start=30, time=50, io=matmul(big, small, out), **cpu),
        make(4, "gemm_kernel", ctrl=[3], data=[3], start=200, time=300, stream=7, **gpu),
        make(5, "aten::relu", ctrl=[1], start=130, time=20, **cpu),
        make(6, "relu_kernel", ctrl=[5], data=[5, 4], start=500, time=40, stream=7, **gpu),
        make(7, "c10d::allreduce_", ctrl=[1], start=160, time=20, **cpu),
        make(
            8,
            "ncclDevKernel_AllReduce",
            "COMM_COLL_NODE",
            ctrl=[7],
            data=[7],
            start=510,
            time=400,
            stream=13,
            comm_type=0,
            comm_size=4096,
            pg_name="3",
            **gpu,
        ),
        make(9, "Optimizer.step#SGD.step", ctrl=[1], start=190, time=100, **cpu),
        make(10, "aten::add_", ctrl=[9], start=200, time=20, **cpu),
        make(11, "add_kernel", ctrl=[10], data=[10], start=920, time=10, stream=7, **gpu),
        make(
            13,
            "ncclDevKernel_SendRecv",
            "COMM_SEND_NODE",
            start=905,
            time=90,
            stream=13,
            comm_size=8,
            comm_dst=1,
            **gpu,
        ),
        make(12, "fill", "MEM_STORE_NODE", start=930, time=7, stream=7, **gpu),
    ]


def test_kernels_belong_to_the_operator_that_launched_them(load):
    trace = load(*gpu_nodes())
    rows = columns(trace, "name", "phase", "kind", "device_ns", "kernels", "flop")
    assert rows["name"] == ["aten::linear", "aten::relu", "all_reduce", "aten::add_", "send", "kernel::fill"]
    assert rows["phase"] == ["forward", "forward", "forward", "optimizer", "forward", "forward"]
    assert rows["kind"] == ["compute", "compute", "collective", "compute", "collective", "memcpy"]
    assert rows["device_ns"] == [300_000, 40_000, 0, 10_000, 0, 7_000]
    assert rows["kernels"] == [1, 1, 0, 1, 1, 1]
    assert rows["flop"][0] == 2 * 4 * 8 * 16
    assert trace.facts.device == "cuda" and trace.facts.optimizer == "unknown"
    assert trace.facts.communication == [
        {"op_id": 2, "name": "all_reduce", "comm_size_bytes": 4096, "group": "3"},
        {"op_id": 4, "name": "send", "comm_size_bytes": 8, "group": ""},
    ]


def test_the_last_of_several_steps_is_read(load):
    first = gpu_nodes()
    later = []
    for node in gpu_nodes():
        node.id += 100
        node.start_time_micros += 2000
        for deps in (node.ctrl_deps, node.data_deps):
            deps[:] = [d + 100 for d in deps]
        later.append(node)
    later[1].name = "aten::matmul"
    trace = load(*first, *later)
    assert trace.operators["name"].tolist()[:2] == ["aten::matmul", "aten::relu"]
    assert "the file holds 2 steps: the last one is read" in trace.facts.warnings


def test_a_step_without_a_duration_is_none(load):
    nodes = gpu_nodes()
    nodes[0].duration_micros = 0
    assert len(load(*nodes).operators) == 6


def test_a_generated_graph_is_read_node_by_node(load):
    trace = load(
        make(0, "layer 0", time=10, num_ops=1000, tensor_size=64, is_cpu_op=False),
        make(2, "grad sum", "COMM_COLL_NODE", data=[1], comm_type=7, comm_size=256, is_cpu_op=False),
        make(1, "layer 0 backward", data=[0], time=20, num_ops=2000, is_cpu_op=False),
        make(3, "load", "MEM_LOAD_NODE", data=[2], time=5, tensor_size=128, is_cpu_op=False),
        make(4, "to rank 1", "COMM_SEND_NODE", data=[3], comm_size=9, comm_dst=1, is_cpu_op=False),
    )
    rows = columns(trace, "name", "phase", "kind", "device_ns", *WORK)
    assert rows["name"] == ["layer 0", "layer 0 backward", "reduce_scatter", "load", "send"]
    assert rows["phase"] == ["forward", "backward", "forward", "forward", "forward"]
    assert rows["kind"] == ["compute", "compute", "collective", "memcpy", "collective"]
    assert rows["device_ns"] == [10_000, 20_000, 0, 5_000, 0]
    assert rows["flop"] == rows["batch_flop"] == [1000, 2000, 0, 0, 0]
    assert rows["read_bytes"] == [64, 0, 0, 128, 0] and rows["write_bytes"] == [0, 0, 0, 128, 0]
    assert trace.facts.step_time_s == pytest.approx(35e-6)
    assert trace.facts.step_time_source == "busy"
    assert [m["comm_size_bytes"] for m in trace.facts.communication] == [256, 9]
    assert any("grow with the batch" in warning for warning in trace.facts.warnings)


def test_a_control_dependency_that_leads_nowhere_is_dropped_and_counted(load):
    nodes = [make(n, ctrl=[99, n - 1][: n + 1], time=5, is_cpu_op=False) for n in range(3)]
    trace = load(*nodes)
    assert len(trace.operators) == 3
    assert "3 control dependencies on nodes that are not in the file" in trace.facts.warnings[0]


@pytest.mark.parametrize("form", ["one after another", "a list", "packed"])
def test_the_json_form_is_read_as_the_binary_one(form, load, tmp_path):
    """As ``chakra_jsonizer`` writes it: whole numbers of 64 bits as texts, types by name."""
    binary = load(*gpu_nodes())
    texts = []
    for place, (_, message) in enumerate(read_messages(tmp_path / "x.0.et")):
        content = MessageToDict(message)
        if place:
            content["type"] = next(word for word, n in NODE_TYPES.items() if n == message.type)
        texts.append(json.dumps(content, indent=2))
    text = "".join(texts) if form == "one after another" else f"[{','.join(texts)}]"
    path = tmp_path / "x.0.json"
    path.write_bytes(gzip.compress(text.encode()) if form == "packed" else text.encode())
    assert recognise(path)
    found = import_chakra(path, OPTIONS)
    pd.testing.assert_frame_equal(found.operators, binary.operators)
    assert found.facts.communication == binary.facts.communication
    path.write_text(text[:-3])
    with pytest.raises(TraceError, match=r"x\.0\.json.*(JSON form|is cut)"):
        import_chakra(path, OPTIONS)
    path.write_text('{"workload_graph": []}')
    with pytest.raises(TraceError, match=r'no message of Chakra.s JSON form.*"workload_graph"'):
        import_chakra(path, OPTIONS)


def ask(*words):
    assert main([str(word) for word in words]) == 0


@pytest.mark.parametrize(
    "plan",
    [
        "--data-parallel 2 --tensor-parallel 2 --pipeline-parallel 2 --micro-batches 4 --ranks 8",
        "--pipeline-parallel 2 --schedule interleaved --micro-batches 4 --stages-per-rank 2 --ranks 2",
        "--plan fsdp --ranks 4",
    ],
)
def test_trioflow_s_own_export_of_all_ranks_runs_as_it_was_simulated(plan, tmp_path, capsys):
    """Streams, groups, tags and what waits for what; times are whole microseconds in the files."""
    asked = ["vgg11-b128" if "tensor" not in plan else "gpt2-tiny-b8", *plan.split()]
    asked += ["--platform", "dgx-a100"]
    ask("simulate", *asked, "--json")
    before = json.loads(capsys.readouterr().out)
    (tmp_path / "set").mkdir()
    ask("export", "chakra", *asked, "-o", tmp_path / "set/step")
    ask("import", tmp_path / "set", "-o", tmp_path / "traces")
    traces = sorted((tmp_path / "traces").iterdir())
    capsys.readouterr()
    ask("simulate", *traces, "--as-traced", "--platform", "dgx-a100", "--json")
    after = json.loads(capsys.readouterr().out)
    assert after["ranks"] == before["ranks"]
    for name in ("step_time_s", "communication_s"):
        assert after[name] == pytest.approx(before[name], rel=2e-3), name


def test_generated_collectives_run_as_traced(tmp_path, capsys):
    """One node a file, as ASTRA-sim's micro-benchmarks are: among all ranks of the set, or of the group beside it."""
    said = ["--gpu", "NVIDIA A100-SXM4-80GB", "--batch", "1", "--precision", "fp32", "-o"]
    (tmp_path / "set").mkdir()
    for rank in range(8):
        write_messages(tmp_path / f"set/all_reduce.{rank}.et", [new_metadata(), SUM])
    ask("import", tmp_path / "set", *said, tmp_path / "ranks")
    ask("import", tmp_path / "set/all_reduce.0.et", *said, tmp_path / "one")
    capsys.readouterr()
    run = ["--as-traced", "--platform", "dgx-a100", "--json"]
    steps = []
    for traces in (sorted((tmp_path / "ranks").iterdir()), [tmp_path / "one"]):
        ask("simulate", *traces, *run)
        steps.append(json.loads(capsys.readouterr().out))
    ask("collective", "all_reduce", "--bytes", 1 << 20, "--ranks", 8, "--platform", "dgx-a100", "--json")
    alone = json.loads(capsys.readouterr().out)
    assert [one["ranks"] for one in steps] == [8, 8]
    assert [one["step_time_s"] for one in steps] == pytest.approx([alone["time_s"]] * 2, rel=1e-6)
    (tmp_path / "set/comm_group.json").write_text('{"1": [0, 2]}')
    grouped = make(7, "sum", "COMM_COLL_NODE", comm_type=2, comm_size=64, pg_name="1", is_cpu_op=False)
    write_messages(tmp_path / "set/all_reduce.0.et", [new_metadata(), grouped])
    (message,) = import_chakra(tmp_path / "set/all_reduce.0.et", OPTIONS).facts.communication
    assert (message["ranks"], message["message_bytes"]) == ([0, 2], 128)
    plan = ["--plan", "single", "--ranks", "1", "--platform", "dgx-a100"]
    assert main(["simulate", str(tmp_path / "one"), *plan]) == 2
    assert "holds messages alone" in capsys.readouterr().err


def test_a_graph_without_times_is_a_trace_without_times(load):
    trace = load(make(0, num_ops=5, is_cpu_op=False), make(1, data=[0], num_ops=5, is_cpu_op=False))
    assert trace.facts.step_time_source == "none" and trace.facts.step_time_s == 0
    assert trace.operators["flop"].tolist() == [5, 5]


def test_host_nodes_are_host_time_before_the_device(tmp_path):
    builder = TaskGraphBuilder()
    for name in ("aten::mm", "aten::add"):
        launch = builder.add(0, "host", "host", f"launch {name}", duration_s=5e-6)
        builder.add(0, "compute", "compute", name, duration_s=7e-6, after=[launch])
    builder.add(0, "compute", "host", "host: end of step", duration_s=3e-6)
    trace = import_chakra(write_chakra(builder.build(), tmp_path / "x")[0], OPTIONS)
    rows = columns(trace, "name", "device_ns", "cpu_ns")
    assert rows == {"name": ["aten::mm", "aten::add"], "device_ns": [7000] * 2, "cpu_ns": [5000] * 2}
    assert trace.facts.tail_s == pytest.approx(3e-6)


@pytest.mark.parametrize(
    "write", [str, json.dumps, lambda v: str(v).replace("0.5", "nan")], ids=["python", "json", "nan"]
)
def test_tensors_are_read_as_python_or_json_writes_them(write, load):
    values = [[tensor(1, (2, 3)), tensor(2, (3,))], 0.5, "text"]
    node = make(0, "aten::cat", is_cpu_op=False)
    node.inputs.values = write(values)
    node.inputs.shapes = write([[[2, 3], [3]], [], []])
    node.inputs.types = write(["GenericList[Tensor(float),Tensor(float)]", "Double", "String"])
    assert load(node).operators["input_shapes"].tolist() == [[[2, 3], [3]]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ImportOptions(gpu="chip", precision="fp32"), "does not say the batch; give it with --batch"),
        (ImportOptions(batch=4, precision="fp32"), "--gpu"),
        (ImportOptions(batch=4, gpu="chip"), "--precision"),
        (ImportOptions(batch=4, gpu="chip", precision="fp3"), "unknown precision 'fp3'"),
    ],
)
def test_what_the_file_does_not_say_is_asked_for(options, words, load):
    with pytest.raises(TraceError) as error:
        load(make(0, time=1, is_cpu_op=False), options=options)
    assert words in str(error.value)


def shaped(**sides):
    full = {"values": "[[1, 1, 0, 6, 4, '']]", "shapes": "[[2, 3]]", "types": "['Tensor(float)']"}
    node = make(7, is_cpu_op=False, time=1)
    for key, text in (full | sides).items():
        setattr(node.inputs, key, text)
    return node


SUM = make(7, "sum", "COMM_COLL_NODE", comm_type=0, comm_size=1 << 20, is_cpu_op=False)
BAD = {
    "node id 7 occurs twice": [make(7), make(7)],
    "node 7 'work': it depends on node 9, which is not in the file": [make(7, data=[9])],
    "node 7 'work': it waits, in a circle, for itself": [make(7, ctrl=[7])],
    "in a circle": [make(5), make(6, data=[8, 5]), make(7, ctrl=[6]), make(8, data=[7])],
    "node 7, message 1, byte 8: 0 is not a node type": [make(7, kind="INVALID_NODE")],
    "duration_micros is negative (-5)": [make(7, time=(1 << 64) - 5)],
    "start_time_micros is negative (-1)": [make(7, start=(1 << 64) - 1)],
    "node 8 'work': it starts 2000000000000 microseconds after node 7": [
        make(7, start=1),
        make(8, start=2 * 10**12 + 1),
    ],
    "4611686018427387904 of 'work' is more than any step": [make(n, num_ops=1 << 62) for n in range(3)],
    "fits no memory": [shaped(shapes=str([[1 << 40, 1 << 40]]))],
    "are not a node time": [make(7, time=1 << 60)],
    "node 7 'work': num_ops is -1": [make(7, num_ops=-1)],
    "node 7 'work': num_ops is 'many'": [make(7, num_ops="many")],
    "node 7 'sum': comm_type is 12": [make(7, "sum", "COMM_COLL_NODE", comm_type=12)],
    "node 7 'sum': comm_type is None": [make(7, "sum", "COMM_COLL_NODE")],
    "the file holds no operator": [make(7, kind="METADATA_NODE")],
    "it holds messages alone, and nothing says how many ranks": [SUM],
    "node 7 'work': its inputs are not a list of tensors": [shaped(values="[[")],
    "'{}' is not a list": [shaped(values="{}")],
    "unknown element type 'floot'": [shaped(types="['Tensor(floot)']")],
    "8 bytes for an element of type float": [shaped(values="[[1, 1, 0, 6, 8, '']]")],
    "of shape [2, -3] fits no memory": [shaped(shapes="[[2, -3]]")],
    "argument 2 is shorter": [shaped(types="[]", shapes="[[1], [2]]", values="[1, 2]")],
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_graph_is_refused_by_node(words, load):
    with pytest.raises(TraceError) as error:
        load(*BAD[words])
    text = str(error.value)
    assert "x.0.et" in text and "\n" not in text
    if "argument" not in words:
        assert words in text


def test_calls_nested_beyond_reason_are_refused(load):
    with pytest.raises(TraceError, match="more than 400 calls enclose it"):
        load(*(make(n, "aten::x", ctrl=[n - 1] if n else [], start=1, is_cpu_op=True) for n in range(2000)))


def test_other_files_are_not_recognised(tmp_path):
    texts = [b"", b"{}", b'{"traceEvents": []}', b"a,b\n1,2\n", bytes(range(256)), b"\x00" * 50]
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.json"
        path.write_bytes(text)
        assert not recognise(path), text
    assert not recognise(tmp_path) and not recognise(tmp_path / "none")


def survive(path, data):
    """Import some bytes; tell whether they were taken."""
    path.write_bytes(data)
    try:
        import_chakra(path, OPTIONS)
    except (TraceError, InputError):
        return False
    return True


def test_a_file_cut_anywhere_is_refused_unless_between_messages(load, tmp_path):
    load(*gpu_nodes())
    data = (tmp_path / "x.0.et").read_bytes()
    ends = {0}
    for message in wire.messages(tmp_path / "x.0.et"):
        ends.add(max(ends) + len(wire.varint(len(message))) + len(message))
    places = {*range(0, len(data), 3), *ends}
    taken = {end for end in places if survive(tmp_path / "y.et", data[:end])}
    assert taken < ends and len(data) in taken


# et_def.proto: field of each kind of value, and the wire type that its type has.
NUMBERS = {
    "double": (3, 1.5),
    "float": (5, 0.25),
    "int32": (7, 7),
    "int64": (9, 1 << 40),
    "uint32": (11, 5),
    "uint64": (13, 1 << 63),
    "sint32": (15, -3),
    "sint64": (17, -(1 << 40)),
    "fixed32": (19, 9),
    "fixed64": (21, 11),
    "sfixed32": (23, 4),
    "sfixed64": (25, 6),
    "bool": (27, True),
    "string": (29, "text"),
    "bytes": (31, b"raw"),
}


def example():
    node = new_node(300, "aten::mm", "COMP_NODE")
    node.ctrl_deps.append(1)
    node.data_deps.extend([1, 299])
    node.start_time_micros, node.duration_micros = 12, 345
    node.inputs.values, node.inputs.shapes, node.inputs.types = "[1]", "[[2]]", "['Tensor(float)']"
    node.outputs.values = "[2]"
    add_attribute(node, "is_cpu_op", "bool_val", False)
    add_attribute(node, "num_ops", "int64_val", 1 << 40)
    add_attribute(node, "involved_dim", "bool_list", [True, False])
    return node


def test_a_node_has_the_published_field_numbers(tmp_path):
    path = tmp_path / "x.et"
    write_messages(path, [new_metadata(), example()])
    metadata, (node,) = wire.read(path)
    assert metadata == {"version": "0.0.4"}
    assert (node["id"], node["name"], node["type"]) == (300, "aten::mm", 4)
    assert (node["ctrl_deps"], node["data_deps"]) == ([1], [1, 299])
    assert (node["start"], node["duration"]) == (12, 345)
    assert node["inputs"] == {"values": "[1]", "shapes": "[[2]]", "types": "['Tensor(float)']"}
    assert node["outputs"] == {"values": "[2]"}
    assert node["attr"] == {"is_cpu_op": False, "num_ops": 1 << 40, "involved_dim": [True, False]}
    # A consumer asks which field of the oneof is set: false and 0 must be on the wire too.
    assert node["kinds"]["is_cpu_op"] == "bool_val"


@pytest.mark.parametrize("kind", NUMBERS)
def test_every_kind_of_value_has_its_field_for_one_and_for_a_list(kind, tmp_path):
    number, value = NUMBERS[kind]
    node = new_node(0, "", "COMP_NODE")
    add_attribute(node, "one", f"{kind}_val", value)
    add_attribute(node, "many", f"{kind}_list", [value, value])
    add_attribute(node, "none", f"{kind}_list", [])
    write_messages(tmp_path / "x.et", [new_metadata(), node])
    _, raw = wire.messages(tmp_path / "x.et")
    attributes = [dict(wire.fields(v)) for n, v in wire.fields(raw) if n == 10]
    assert [set(a) - {1} for a in attributes] == [{number}, {number + 1}, {number + 1}]
    assert {n for n, _ in wire.fields(attributes[1][number + 1])} == {1}
    (_, back) = [m for _, m in read_messages(tmp_path / "x.et")]
    assert read_attributes(back) == {"one": value, "many": [value, value], "none": []}


def test_a_file_written_by_hand_is_read(tmp_path):
    attribute = b"\x0a\x09comm_size\x48\x80\x08"  # name=1, int64_val=9: 1024
    node = b"\x08\x05\x12\x01n\x18\x07\x22\x01\x03\x52" + bytes([len(attribute)]) + attribute
    data = b"\x07\x0a\x050.0.4" + bytes([len(node)]) + node
    (tmp_path / "x.et").write_bytes(data)
    (_, head), (place, read) = read_messages(tmp_path / "x.et")
    assert head.version == "0.0.4" and place == "message 1, byte 8"
    assert (read.id, read.name, read.type, list(read.ctrl_deps)) == (5, "n", 7, [3])
    assert read_attributes(read) == {"comm_size": 1024}


def test_an_empty_message_is_not_the_end(tmp_path):
    (tmp_path / "x.et").write_bytes(b"\x00\x00\x02\x18\x04")
    assert [m.ByteSize() for _, m in read_messages(tmp_path / "x.et")] == [0, 0, 2]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\x05ab", "message 0, byte 0: this is not a GlobalMetadata message"),
        (b"\x00\xff", "message 1, byte 1: this is not a Node message"),
        (b"\xff" * 20, "message 0, byte 0: this is not"),
        (b'{"nodes": [' + b" " * 200, "this is not a GlobalMetadata message"),
        (b"\x00\x03\x98\x06\x01", "message 1, byte 1: this is not a Node message: it has fields that schema 0.0.4"),
        (b"\x00\x03\x12\x01\xff", "message 1, byte 1: this is not a Node message"),
    ],
)
def test_what_is_no_chakra_file_is_refused_with_its_place(data, words, tmp_path):
    (tmp_path / "x.et").write_bytes(data)
    with pytest.raises(TraceError) as error:
        list(read_messages(tmp_path / "x.et"))
    assert words in str(error.value) and "x.et" in str(error.value)
    assert error.value.fix


def test_a_length_beyond_any_node_is_refused_before_it_fills_the_memory(tmp_path):
    path = tmp_path / "x.et"
    with path.open("wb") as stream:
        stream.write(b"\x00\x80\x80\x80\x80\x01")  # 256 MiB follow, all holes
        stream.truncate((1 << 28) + 100)
    tracemalloc.start()
    with pytest.raises(TraceError, match="is not a Chakra node"):
        list(read_messages(path))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path, words in ((tmp_path / "none.et", "no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(TraceError, match=words):
            list(read_messages(path))


def test_reading_holds_one_message_at_a_time(tmp_path):
    path = tmp_path / "x.et"
    large = new_node(1, "x" * 100_000, "COMP_NODE")
    write_messages(path, [new_metadata(), *[large] * 100])
    tracemalloc.start()
    count = sum(1 for _ in read_messages(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 101 and peak < 1_000_000 < path.stat().st_size / 5
