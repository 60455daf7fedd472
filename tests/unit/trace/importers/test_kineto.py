"""Profiles as PyTorch's own tools write them, of several versions, with and without the other file."""

import copy
import gzip
import json
import shutil

import pytest
from trioflow.base.errors import TraceError
from trioflow.trace.importers.detect import detect_format, import_trace
from trioflow.trace.importers.kineto import import_kineto
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile.execution_trace import read_nodes, written_arguments
from trioflow.trace.profile.kineto import read_profile

SAID = ImportOptions(gpu="a CPU", batch=4, precision="fp32")
WORK = (
    "name",
    "phase",
    "module",
    "flop",
    "read_bytes",
    "write_bytes",
    "batch_flop",
    "batch_read_bytes",
    "batch_write_bytes",
    "input_shapes",
    "output_shapes",
)


def read(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def write(path, content):
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def files(raw_cnn):
    return raw_cnn / "kineto.json.gz", raw_cnn / "execution_trace.json.gz"


def assert_same_work(one, other):
    for column in WORK:
        assert one.operators[column].tolist() == other.operators[column].tolist(), column
    sizes = [[(g["size_bytes"], g["ready_after_op_id"]) for g in t.facts.gradients] for t in (one, other)]
    assert sizes[0] == sizes[1]


def test_the_raw_files_alone_hold_what_the_capture_does(files, cnn_trace):
    trace = import_kineto(*files, SAID)
    assert_same_work(trace, cnn_trace)
    assert trace.facts.optimizer == "sgd"
    assert trace.facts.step_time_source == "profiled"
    total_s = (trace.operators["device_ns"].sum() + trace.operators["cpu_ns"].sum()) / 1e9
    assert total_s + trace.facts.tail_s == pytest.approx(trace.facts.step_time_s, rel=1e-4)


def as_pytorch_2_1(kineto, execution_trace):
    """Write both files as PyTorch 2.1 did: whole microseconds, other numbers, flat nodes."""
    base_us = kineto.pop("baseTimeNanoseconds", 0) // 1000 + 1_700_000_000_000_000
    for event in kineto["traceEvents"]:
        if event.get("ph") != "X":
            continue
        end = int(event["ts"]) + base_us + max(int(event["dur"]), 0)
        event["ts"] = int(event["ts"]) + base_us
        event["dur"] = end - event["ts"]
        event["args"] = {k: v for k, v in event["args"].items() if k != "Record function id"}
    nodes = []
    for node in execution_trace["nodes"]:
        attributes = {a["name"]: a["value"] for a in node["attrs"]}
        flat = {"name": node["name"], "id": node["id"], "parent": node["ctrl_deps"], **attributes}
        for side in ("inputs", "outputs"):
            values = node[side]
            flat |= {
                side: values["values"],
                f"{side[:-1]}_shapes": values["shapes"],
                f"{side[:-1]}_types": values["types"],
            }
        nodes.append(flat | {"rf_id": attributes["rf_id"] + 1000 if attributes["rf_id"] else 0})
    return kineto, {"schema": "1.0.1", "nodes": nodes}


def test_the_layout_of_pytorch_2_1_gives_the_same(tmp_path, files, cnn_trace):
    old = as_pytorch_2_1(*(read(f) for f in files))
    paths = [write(tmp_path / name, c) for name, c in zip(("k.json", "e.json"), old, strict=True)]
    assert_same_work(import_kineto(*paths, SAID), cnn_trace)


@pytest.mark.parametrize("schema", ["1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.1.0-chakra.0.0.4"])
def test_the_schemas_between_share_a_layout(tmp_path, files, cnn_trace, schema):
    changed = write(tmp_path / "e.json", read(files[1]) | {"schema": schema})
    assert_same_work(import_kineto(files[0], changed, SAID), cnn_trace)


def test_time_stamps_in_nanoseconds_are_told_by_their_size(tmp_path, files):
    content = read(files[0])
    for event in content["traceEvents"]:
        if event.get("ph") == "X":
            event["ts"] = 1_700_000_000_000_000_000 + round(float(event["ts"]) * 1000)
            event["dur"] = round(float(event["dur"]) * 1000)
    content.pop("baseTimeNanoseconds", None)
    plain, stamped = read_profile(files[0]), read_profile(write(tmp_path / "k.json", content))
    durations = [p.end_ns - p.start_ns for p in (plain, stamped)]
    assert sorted(durations[0]) == sorted(durations[1])


def test_kineto_alone_knows_times_flop_and_gradients(files, cnn_trace):
    alone = import_kineto(files[0], None, SAID)
    for column in ("name", "phase", "flop"):
        assert alone.operators[column].tolist() == cnn_trace.operators[column].tolist(), column
    # Without identities an update is nobody's.
    ours, theirs = (t.operators[t.operators["phase"] != "optimizer"] for t in (alone, cnn_trace))
    assert ours["module"].tolist() == theirs["module"].tolist()
    sizes = [[g["size_bytes"] for g in t.facts.gradients] for t in (alone, cnn_trace)]
    assert sizes[0] == sizes[1]
    assert "no execution trace" in alone.facts.warnings[0]


def test_a_profile_without_shapes_has_times_alone(files, raw_cnn, cnn_trace):
    alone = import_kineto(raw_cnn / "kineto_steps.json.gz", None, SAID)
    assert alone.unshaped_share == 1.0 and not alone.names_results
    assert any("holds no shapes" in warning for warning in alone.facts.warnings)


def test_files_of_different_runs_are_refused(files, raw_transformer):
    with pytest.raises(TraceError, match="the files are of different runs"):
        import_kineto(files[0], raw_transformer / "execution_trace.json.gz", SAID)


@pytest.mark.parametrize(("missing", "flag"), [("gpu", "--gpu"), ("precision", "--precision"), ("batch", "--batch")])
def test_what_no_file_says_is_asked_for(raw_transformer, missing, flag):
    said = {"gpu": "x", "batch": 4, "precision": "fp32"} | {missing: None}
    files = [raw_transformer / n for n in ("kineto.json.gz", "execution_trace.json.gz")]
    with pytest.raises(TraceError, match=f"give it with {flag}"):
        import_trace(files, ImportOptions(**said))


def test_the_two_files_may_come_in_any_order_or_as_their_folder(tmp_path, files):
    for file in files:
        shutil.copy(file, tmp_path / file.name)
    names = [import_trace(s, SAID).operators["name"].tolist() for s in (files, files[::-1], [tmp_path])]
    assert names[0] == names[1] == names[2]
    assert detect_format([tmp_path]) == "kineto"
    assert detect_format([files[0].parent]) == "capture"
    with pytest.raises(TraceError, match="holds no times"):
        import_trace([files[1]], SAID)
    with pytest.raises(TraceError, match="a second Kineto trace"):
        import_trace([files[0], files[0]], SAID)


def schedule(sizes, folder):
    """Profile steps of PyTorch's own schedule, one batch size a step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    path = folder / "steps.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        on_trace_ready=lambda ready: ready.export_chrome_trace(str(path)),
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=len(sizes) - 1),
    ) as profiler:
        for size in sizes:
            optimizer.zero_grad()
            model(torch.randn(size, 8)).pow(2).mean().backward()
            optimizer.step()
            profiler.step()
    return path


def test_several_steps_of_the_profiler_s_schedule_are_averaged(tmp_path):
    trace = import_kineto(schedule([4, 4, 4, 4], tmp_path), None, SAID)
    assert trace.facts.other["profiled_steps"] == 3
    optimizer = trace.operators[trace.operators["phase"] == "optimizer"]
    assert any(name.startswith("aten::_foreach_") for name in optimizer["name"])
    assert trace.facts.optimizer == "adam"
    assert sum(g["size_bytes"] for g in trace.facts.gradients) == 4 * (8 * 16 + 16 + 16 * 4 + 4)


def test_the_signature_tells_what_is_written():
    assert written_arguments("") is None
    assert written_arguments("aten::relu(Tensor self) -> Tensor") == frozenset()
    assert written_arguments("aten::add_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)") == {0}
    fused = "aten::_fused_sgd_(Tensor(a!)[] self, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffer_list, *, float lr)"
    assert written_arguments(fused) == {0, 1, 2}
    assert written_arguments("aten::conv2d(Tensor x, int[2] stride=[0, 0], Tensor(a!)? out=None)") == {2}


def test_a_list_written_in_place_counts_whole():
    import torch
    from trioflow.trace.assemble import ObservedOperator, assemble_trace
    from trioflow.trace.tensors import TensorRef

    schema = str(torch.ops.aten._foreach_add_.List._schema)
    refs = [TensorRef(i, 10 + i, 4, (25,), "float", i // 3) for i in range(6)]
    add = ObservedOperator("aten::_foreach_add_", "optimizer", inputs=refs, written=written_arguments(schema))
    facts = {"workload": "x", "batch": 1, "device_name": "x", "step_time_s": 1.0}
    row = assemble_trace([add], facts).operators.iloc[0]
    assert (row["read_bytes"], row["write_bytes"]) == (600, 300)


def _change(content, change):
    content = copy.deepcopy(content)
    change(content)
    return content


def _node(content, name):
    return next(n for n in content["nodes"] if n["name"] == name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: _node(c, "aten::conv2d")["inputs"]["types"].__setitem__(0, "Tensor(float9)"),
            "unknown element type 'float9'",
        ),
        (
            lambda c: _node(c, "aten::conv2d")["inputs"]["types"].__setitem__(0, "Tensor(double)"),
            "4 bytes for an element of type double",
        ),
        (lambda c: _node(c, "aten::conv2d")["inputs"]["shapes"].pop(), "incomplete node"),
        (lambda c: _node(c, "aten::conv2d")["inputs"]["shapes"].__setitem__(0, [-1, 3]), "fits no memory"),
        (lambda c: c["nodes"].append(dict(c["nodes"][5])), "occurs twice"),
        (lambda c: _node(c, "aten::conv2d").update(ctrl_deps=_node(c, "aten::convolution")["id"]), "encloses itself"),
        (lambda c: c.update(schema="2.0"), "schema '2.0' is not known"),
        (lambda c: [_put_on(n, "cuda:0") for n in c["nodes"][::2]], "no kernel is recorded"),
        (lambda c: [_put_on(n, f"cuda:{i % 2}") for i, n in enumerate(c["nodes"])], "cuda:0, cuda:1"),
    ],
)
def test_a_broken_execution_trace_is_refused(tmp_path, files, change, words):
    path = write(tmp_path / "e.json", _change(read(files[1]), change))
    with pytest.raises(TraceError, match=words) as error:
        import_kineto(files[0], path, SAID)
    assert ".json" in str(error.value)


def _put_on(node, device):
    for side in ("inputs", "outputs"):
        for value, kind in zip(node[side]["values"], node[side]["types"], strict=True):
            if kind.startswith("Tensor(") and isinstance(value, list):
                value[5] = device


def test_reading_nodes_streams_and_keeps_order(files):
    nodes = read_nodes(files[1])
    assert [n.node_id for n in nodes] == sorted(n.node_id for n in nodes)
    assert any(n.name == "aten::conv2d" and n.schema for n in nodes)
