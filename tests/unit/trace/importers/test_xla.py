"""Profiles of XLA, written by hand as JAX writes them."""

import gzip
import json
import re

import pytest
from trioflow.base.errors import TraceError
from trioflow.cli.main import main
from trioflow.trace.importers import xla
from trioflow.trace.importers.detect import detect_format, import_trace
from trioflow.trace.importers.sources import ImportOptions

CPU = ImportOptions(gpu="a CPU", batch=32, precision="fp32")
H100 = ImportOptions(gpu="NVIDIA H100 80GB HBM3", batch=32, precision="bf16")
RUN = "plugins/profile/2026_01_05_10_00_00"
GPU, HOST = 1, 701
STREAM, SIDE, STEPS, OPS, PYTHON = 13, 14, 3, 4, 5


def name_lane(process, lane, name):
    return {"ph": "M", "pid": process, "tid": lane, "name": "thread_name", "args": {"name": name}}


def name_process(process, name):
    return {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}


def event(process, lane, name, ts, dur, /, **arguments):
    return {"ph": "X", "pid": process, "tid": lane, "name": name, "ts": ts, "dur": dur, "args": arguments}


def kernel(name, op, ts, dur, path="", lane=STREAM, process=GPU, **arguments):
    return event(process, lane, name, ts, dur, hlo_module="jit_step", hlo_op=op, name=path, **arguments)


LANES = [
    name_process(GPU, "/device:GPU:0"),
    name_process(HOST, "/host:CPU"),
    name_lane(GPU, STREAM, "Stream #13(Compute)"),
    name_lane(GPU, SIDE, "Stream #14(Compute)"),
    name_lane(GPU, STEPS, "Steps"),
    name_lane(GPU, OPS, "XLA Ops"),
    name_lane(HOST, PYTHON, "python"),
]
FORWARD, BACKWARD = "jit(step)/jvp(loss)/dot_general", "jit(step)/transpose(jvp(loss))/dot_general"


def on_gpu(at, number=0, late=0.0):
    """Return a step on a GPU: two kernels of one product, backward, an all-reduce beside it, the update."""
    return [
        event(GPU, STEPS, str(number), at, 100),
        event(GPU, OPS, "dot.1", at, 90, hlo_op="dot.1"),
        kernel("sgemm", "dot.1", at, 20 + late, FORWARD, flops="4096"),
        kernel("splitk", "dot.1", at + 25, 5, FORWARD),
        kernel("sgemm", "dot.2", at + 30, 30, BACKWARD),
        kernel("ncclDevKernel_AllReduce", "all-reduce-start.1", at + 40, 40, BACKWARD, SIDE),
        kernel("loop_fusion", "fusion.7", at + 80, 10.5, "jit(step)/sub"),
    ]


def write(tmp_path, *events, name="host.trace.json.gz", lanes=LANES):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": [*lanes, *events, {}]}
    path.write_bytes(gzip.compress(json.dumps(said).encode()))
    return path


def on_cpu(at, number, *, extra=()):
    """Return a step on a processor: a loop that encloses a product, and a fusion."""
    return [
        event(HOST, PYTHON, "train", at, 100, step_num=str(number)),
        kernel("while.1", "while.1", at + 10, 50, process=HOST, lane=PYTHON + 1),
        kernel("dot.1", "dot.1", at + 20, 30, process=HOST, lane=PYTHON + 1),
        kernel("fusion", "fusion", at + 70, 10, process=HOST, lane=PYTHON + 1),
        *extra,
    ]


def test_kernels_of_a_gpu_are_joined_by_operation_and_timed_by_the_median_step(tmp_path):
    steps = [one for n, late in enumerate((9.0, 0.0, 0.0)) for one in on_gpu(1000 * n, n, late)]
    path = write(tmp_path, *steps)
    assert detect_format([path]) == "xla"
    trace = import_trace([path], H100)
    columns = ("name", "phase", "kind", "device_ns", "kernels", "flop")
    assert [*zip(*(trace.operators[c].tolist() for c in columns), strict=True)] == [
        ("dot.1", "forward", "compute", 25_000, 2, 4096),
        ("dot.2", "backward", "compute", 30_000, 1, 0),
        ("all-reduce-start.1", "backward", "collective", 40_000, 1, 0),
        ("fusion.7", "optimizer", "compute", 10_500, 1, 0),
    ]
    facts = trace.facts
    assert facts.step_time_s == pytest.approx(65.5e-6) and facts.step_time_source == "busy"
    assert (facts.other["profiled_step_s"], facts.other["profiled_steps"]) == (pytest.approx(100e-6), 3)
    assert any("the GPU computes 66% of the profiled step" in said for said in facts.warnings)
    assert any(said.startswith("1 operations communicate") for said in facts.warnings)


def test_a_profile_that_is_cut_anywhere_says_so(tmp_path):
    """A list of fewer events that was closed again lacks the empty one that XLA's profiler ends with."""
    path = write(tmp_path, *(one for n, late in enumerate((9.0, 0.0, 0.0)) for one in on_gpu(1000 * n, n, late)))
    content = json.loads(gzip.decompress(path.read_bytes()))
    known = set(import_trace([path], H100).facts.warnings)
    for count in range(len(content["traceEvents"])):
        short = content | {"traceEvents": content["traceEvents"][:count]}
        path.write_bytes(gzip.compress(json.dumps(short).encode()))
        try:
            assert set(import_trace([path], H100).facts.warnings) - known, count
        except TraceError:
            continue
    text = json.dumps(content)
    for place in range(0, len(text), 50):
        path.write_bytes(gzip.compress(text[:place].encode()))
        with pytest.raises(TraceError):
            import_trace([path], H100)


def test_tensorboard_s_folder_of_a_processor_s_run(tmp_path, capsys):
    """A loop counts by its body; what the host does between operations is its own time."""
    write(tmp_path, *on_cpu(0, 0), *on_cpu(200, 1), name=f"{RUN}/host.trace.json.gz", lanes=LANES[1:2])
    write(tmp_path, *on_cpu(0, 0), name=f"{RUN}/perfetto_trace.json.gz", lanes=LANES[1:2])
    (tmp_path / RUN / "host.xplane.pb").write_bytes(b"proto")
    said = ["--gpu", "a CPU", "--batch", "32", "--precision", "fp32", "-o", str(tmp_path / "t")]
    assert main(["import", str(tmp_path), *said]) == 0
    assert "host, batch 32: 2 operators" in capsys.readouterr().out
    trace = import_trace([tmp_path], CPU)
    assert trace.operators["name"].tolist() == ["dot.1", "fusion"]
    assert trace.operators["device_ns"].tolist() == [30_000, 10_000]
    assert trace.facts.step_time_s == pytest.approx(100e-6)
    assert trace.facts.tail_s == pytest.approx(60e-6)
    assert any("all count as forward" in said for said in trace.facts.warnings)


def test_perfetto_s_copy_is_read_where_it_is_alone_and_a_folder_without_a_profile_refused(tmp_path):
    write(tmp_path, *on_cpu(0, 0), name="r/perfetto_trace.json.gz", lanes=LANES[1:2])
    assert import_trace([tmp_path / "r"], CPU).facts.other["profiled_steps"] == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"empty: no file of XLA's profiler; give the \.trace"):
        import_trace([tmp_path / "empty"], CPU, "xla")


def test_a_step_that_ran_other_operations_is_left_out(tmp_path):
    more = [kernel("copy", "copy.1", 60, 5, process=HOST, lane=PYTHON + 1)]
    path = write(tmp_path, *on_cpu(0, 0, extra=more), *on_cpu(200, 1), *on_cpu(400, 2), lanes=LANES[1:2])
    assert import_trace([path], CPU).facts.other["profiled_steps"] == 2


@pytest.mark.parametrize(
    ("events", "lanes", "words"),
    [
        (
            on_gpu(0),
            [name_process(GPU, "/device:TPU:0")],
            "of a TPU, of which trioflow has no data sheet; record the step on a GPU",
        ),
        (
            on_cpu(0, 0)[1:],
            LANES[1:2],
            "the profile marks no steps; wrap each step in jax.profiler.StepTraceAnnotation",
        ),
        (on_cpu(0, 0)[:1], LANES[1:2], "no operation of XLA ran"),
        (
            [*on_cpu(0, 0)[1:], event(HOST, PYTHON, "train", 500, 9, step_num="1")],
            LANES[1:2],
            "no step holds an operation",
        ),
        ([*on_cpu(0, 0), *on_cpu(200, 1)[:3]], LANES[1:2], "1 of 2 steps ran other operations than the last"),
        ([kernel("x", "x", "soon", 1)], LANES, "traceEvents[7].ts: it cannot be read: Expected `float`, got `str`"),
        ([kernel("x", "x", 10**400, 1)], LANES, "Number out of range"),
        ([kernel("x", "x", 0, -1.5)], LANES, "no call begins at 0.0 and takes -1.5"),
        ([{"ph": "M", "name": "process_name"}], LANES, "traceEvents[7]: the event cannot be read: 'name'"),
        ([3], LANES, "traceEvents[7]: it cannot be read: Expected `object`, got `int`"),
    ],
    ids=lambda value: "",
)
def test_what_is_missing_is_asked_for_and_what_is_broken_is_named(tmp_path, events, lanes, words):
    path = write(tmp_path, *events, lanes=lanes)
    with pytest.raises(TraceError, match=re.escape(words)) as caught:
        import_trace([path], CPU)
    assert str(caught.value).startswith(str(path))


def test_a_cut_file_several_hosts_and_a_full_profile_are_refused(tmp_path, monkeypatch, capsys):
    path = write(tmp_path, *on_cpu(0, 0), lanes=LANES[1:2])
    with pytest.raises(TraceError, match="--gpu names NVIDIA H100 80GB HBM3, and the profile holds no device"):
        import_trace([path], H100)
    monkeypatch.setattr(xla, "_MOST_EVENTS", 4)
    with pytest.raises(TraceError, match="it holds 4 events: the profiler drops what is beyond a million"):
        import_trace([path], CPU)
    whole = path.read_bytes()
    path.write_bytes(gzip.compress(gzip.decompress(whole)[:-40]))
    said = ["--gpu", "a CPU", "--batch", "32", "--precision", "fp32", "-o", str(tmp_path / "out")]
    assert main(["import", str(path), *said]) == 2
    assert "not a complete JSON file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "other.trace.json.gz").write_bytes(whole)
    with pytest.raises(TraceError, match=r"2 hosts: host\.trace\.json\.gz, other\.trace\.json\.gz; give one"):
        import_trace([tmp_path], CPU)
