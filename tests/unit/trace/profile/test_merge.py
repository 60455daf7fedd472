import gzip
import json
import shutil
from math import prod

import numpy as np
import pytest
from trioflow.base.errors import TableError, TraceError
from trioflow.tables import read_table, records, write_table
from trioflow.trace.consistency import tensor_bytes
from trioflow.trace.profile.merge import merge_trace, merge_trace_folder
from trioflow.trace.profile.steps import measure_repeats
from trioflow.trace.store import load_trace

TRACES = ["transformer_trace", "cnn_trace", "bert_trace"]


@pytest.fixture(params=TRACES)
def trace(request):
    return request.getfixturevalue(request.param)


def test_operator_times_and_host_times_sum_to_the_unprofiled_step(trace):
    operators = trace.operators
    total_s = (operators["device_ns"].sum() + operators["cpu_ns"].sum()) / 1e9
    assert total_s + trace.facts.tail_s == pytest.approx(trace.facts.step_time_s, rel=1e-4)


def test_operators_follow_one_another_without_overlap(trace):
    start = trace.operators["start_ns"].to_numpy()
    end = start + trace.operators["device_ns"].to_numpy()
    assert (start[1:] == end[:-1] + trace.operators["cpu_ns"].to_numpy()[1:]).all()


def test_every_parameter_has_its_gradient_under_its_own_name(trace):
    gradients, parameters = trace.facts.gradients, trace.facts.parameters
    assert sorted(g["name"] for g in gradients) == sorted(p["name"] for p in parameters)
    sizes = {p["name"]: prod(p["shape"]) * p["elem_bytes"] for p in parameters}
    assert all(g["size_bytes"] == sizes[g["name"]] for g in gradients)
    ready = [g["ready_after_op_id"] for g in gradients]
    assert ready == sorted(ready)


def test_categories_add_up_to_the_model(trace):
    sizes = np.array(tensor_bytes(trace))
    parameter_bytes = sum(prod(p["shape"]) * p["elem_bytes"] for p in trace.facts.parameters)
    for category in ("parameter", "gradient"):
        mine = trace.tensors[trace.tensors["category"] == category]
        whole = {}
        for row in records(mine, "tensor_id", "storage_id"):
            size = int(sizes[row["tensor_id"]])
            whole[row["storage_id"]] = max(size, whole.get(row["storage_id"], 0))
        assert sum(whole.values()) == parameter_bytes, category


def test_backward_operators_with_work_are_joined_to_their_forward(trace):
    backward = trace.operators[
        (trace.operators["phase"] == "backward") & (trace.operators["flop"] > 0)
    ]
    assert len(backward) > 0
    assert backward["forward_op_id"].notna().all()
    phases = trace.operators["phase"]
    assert (phases.loc[backward["forward_op_id"].astype(int)] == "forward").all()
    assert (backward["module"] != "").all()


def test_optimizer_operators_know_their_module(trace):
    optimizer = trace.operators[trace.operators["phase"] == "optimizer"]
    modules = {g["module"] for g in trace.facts.gradients}
    assert set(optimizer["module"]) - {""} == modules
    assert (optimizer["batch_flop"] == 0).all()
    assert (optimizer["batch_read_bytes"] == 0).all()


def test_flop_agrees_with_pytorch_s_own_counter(trace):
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from trioflow.trace.workloads.build import build_workload

    workload = build_workload(trace.facts.row)
    inputs, targets = workload.make_batch(trace.facts.batch, 0)
    # The math attention decomposes into products that the counter knows.
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        workload.loss(workload.model(inputs), targets).backward()
    attention = trace.operators[
        trace.operators["name"].str.contains("scaled_dot_product")
        & (trace.operators["phase"] == "backward")
    ]
    # A fused backward computes the scores again: one product in five.
    extra = int(attention["flop"].sum()) // 5
    assert trace.facts.flop - extra == counter.get_total_flops()


def test_what_grows_with_the_batch_is_what_grows(tmp_path_factory, transformer_trace):
    from captured import BATCH, TRANSFORMER, capture_raw

    double = merge_trace(capture_raw(TRANSFORMER, tmp_path_factory.mktemp("double"), 2 * BATCH))
    one, two = transformer_trace.operators, double.operators
    assert one["name"].tolist() == two["name"].tolist()
    for column in ("flop", "read_bytes", "write_bytes"):
        predicted = one[column] + one[f"batch_{column}"]
        assert predicted.tolist() == two[column].tolist(), column


def test_a_trace_of_one_sample_grows_too(tmp_path_factory):
    from captured import TRANSFORMER, capture_raw

    one = merge_trace(capture_raw(TRANSFORMER, tmp_path_factory.mktemp("one"), 1)).operators
    four = merge_trace(capture_raw(TRANSFORMER, tmp_path_factory.mktemp("four"), 4)).operators
    assert (one["flop"] + 3 * one["batch_flop"]).tolist() == four["flop"].tolist()
    grown = (one["read_bytes"] + 3 * one["batch_read_bytes"]).sum()
    assert grown == pytest.approx(four["read_bytes"].sum(), rel=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": "4"}, "batch: '4' is not a possible value"),
        ({"step_time_s": 0}, "not a step time"),
        ({"device_name": None}, "device_name"),
    ],
)
def test_an_environment_that_misleads_is_refused(tmp_path, raw_cnn, change, words):
    shutil.copytree(raw_cnn, tmp_path / "raw")
    path = tmp_path / "raw" / "environment.json"
    content = json.loads(path.read_text()) | change
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    with pytest.raises(TraceError, match=words):
        merge_trace_folder(tmp_path / "raw", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_trace_survives_saving(tmp_path, raw_transformer, transformer_trace):
    merge_trace_folder(raw_transformer, tmp_path / "a")
    merge_trace_folder(raw_transformer, tmp_path / "b")
    for name in ("operators.parquet", "tensors.parquet", "trace.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    loaded = load_trace(tmp_path / "a")
    assert loaded.facts.to_dict() == json.loads(json.dumps(transformer_trace.facts.to_dict()))
    assert records(loaded.operators) == records(transformer_trace.operators)
    assert records(loaded.tensors) == records(transformer_trace.tensors)


def _broken(tmp_path, raw, name, change):
    folder = tmp_path / "raw"
    shutil.copytree(raw, folder)
    content = json.loads(gzip.decompress((folder / name).read_bytes()))
    change(content)
    (folder / name).write_bytes(gzip.compress(json.dumps(content).encode()))
    return folder


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("kineto.json.gz", lambda c: c.pop("traceEvents"), ["traceEvents", "missing"]),
        ("kineto.json.gz", lambda c: c.update(traceEvents=[]), ["holds no operator"]),
        ("kineto.json.gz", lambda c: c["traceEvents"][9].pop("dur"), ["traceEvents[9]"]),
        ("kineto.json.gz", lambda c: c["traceEvents"][9].update(dur=-1), ["negative"]),
        ("execution_trace.json.gz", lambda c: c.update(schema="0.9"), ["0.9", "schema"]),
        ("execution_trace.json.gz", lambda c: c["nodes"].append(c["nodes"][3]), ["twice"]),
        ("execution_trace.json.gz", lambda c: c["nodes"][4].pop("inputs"), ["nodes[4]"]),
    ],
)
def test_a_broken_profile_is_refused_by_name(tmp_path, raw_cnn, name, change, words):
    folder = _broken(tmp_path, raw_cnn, name, change)
    with pytest.raises(TraceError) as error:
        merge_trace_folder(folder, tmp_path / "out")
    assert all(word in str(error.value) for word in [name, *words])
    assert not (tmp_path / "out").exists()


def test_a_truncated_profile_is_refused(tmp_path, raw_cnn):
    shutil.copytree(raw_cnn, tmp_path / "raw")
    path = tmp_path / "raw" / "kineto.json.gz"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(TraceError, match=r"kineto\.json\.gz.*not a complete JSON"):
        merge_trace(tmp_path / "raw")


def test_a_trace_of_another_version_is_refused(tmp_path, transformer_trace):
    write_table(transformer_trace.tensors, "tensors", tmp_path / "tensors.parquet")
    with pytest.raises(TableError, match="not a operators table"):
        read_table(tmp_path / "tensors.parquet", "operators")


def test_without_the_light_profile_the_single_step_is_used(tmp_path, raw_cnn, cnn_trace):
    shutil.copytree(raw_cnn, tmp_path / "raw")
    (tmp_path / "raw" / "kineto_steps.json.gz").unlink()
    trace = merge_trace(tmp_path / "raw")
    assert trace.operators["name"].tolist() == cnn_trace.operators["name"].tolist()
    assert trace.facts.profiled_step_s != cnn_trace.facts.profiled_step_s


def make_steps(step: float, phase: float, operator: float, steps: int = 400) -> np.ndarray:
    """Times of 60 operators of three lengths, half of them of each phase, in many steps [ns]."""
    rng, phases = np.random.default_rng(4), np.arange(60) // 30
    logs = (
        step * rng.standard_normal((steps, 1)) + phase * rng.standard_normal((steps, 2))[:, phases]
    )
    nominal = np.tile([1e5, 3e5, 9e5], 20)
    return nominal * np.exp(logs + operator * rng.standard_normal((steps, 60)))


@pytest.mark.parametrize(
    "parts", [(0.05, 0.0, 0.1), (0.0, 0.05, 0.1), (0.03, 0.04, 0.0), (0.0, 0.0, 0.2)]
)
def test_repeats_are_told_apart_by_what_they_share(parts):
    phases = ["forward"] * 30 + ["backward"] * 30
    found = measure_repeats(make_steps(*parts), phases, ["aten::mm", "aten::add", "aten::mm"] * 20)
    told = [found[name] for name in ("step_log", "pass_log", "operator_log")]
    assert told == pytest.approx(parts, abs=0.02)
    assert abs(found["autocorrelation"]) < 0.15 and found["steps"] == 400
    assert set(found["operators"]) == {"aten::mm", "aten::add"}
    assert measure_repeats(make_steps(*parts, steps=1), phases, phases) is None


def test_a_capture_of_several_light_steps_says_how_much_they_differ(tmp_path, raw_cnn, cnn_trace):
    found = cnn_trace.facts.repeats
    assert found["steps"] == 2 and found["operator_log"] > 0
    assert "aten::convolution_backward" in found["operators"]
    shutil.copytree(raw_cnn, tmp_path / "raw")
    (tmp_path / "raw" / "kineto_steps.json.gz").unlink()
    assert merge_trace(tmp_path / "raw").facts.repeats is None
