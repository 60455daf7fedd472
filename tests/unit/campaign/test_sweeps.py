import json

import pytest

torch = pytest.importorskip("torch", reason="sweeps need torch (extra [capture])")

from trioflow.base.errors import InputError  # noqa: E402
from trioflow.campaign import sweeps  # noqa: E402
from trioflow.campaign.items import OPERATIONS, list_points  # noqa: E402
from trioflow.campaign.packing import _write  # noqa: E402
from trioflow.campaign.sweeps import (  # noqa: E402
    build_case,
    list_work,
    run_sweep,
)

ALL = [(name, point) for name in OPERATIONS for point in list_points(name, 0, quick=True)]


@pytest.mark.parametrize(("name", "point"), ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_operation_runs_in_every_phase(name, point, dtype):
    works = list(list_work(build_case(name, point, dtype, "cpu")))
    alone = {
        "optimizer": "optimizer",
        "launch": "launch",
        "gemm": "forward",
        "bmm": "forward",
        "matmul_ceiling": "forward",
    }
    alone |= dict.fromkeys(
        ("device_copy", "device_fill", "host_to_device", "device_to_host"), "copy"
    )
    assert [w.phase for w in works] == ([alone[name]] if name in alone else ["forward", "backward"])
    for work in works:
        work.run()
        work.run()
        assert work.read_bytes > 0 or name == "device_fill"
        assert work.write_bytes > 0


@pytest.mark.parametrize("name", ["gemm", "bmm", "linear", "conv2d", "attention"])
def test_flop_agrees_with_the_counter_of_torch(name):
    from torch.utils.flop_counter import FlopCounterMode

    (point,) = list_points(name, 0, quick=True)[:1]
    if name == "attention":
        point = {**point, "backend": "math"}
    forward, *backward = list_work(build_case(name, point, torch.float32, "cpu"))
    with FlopCounterMode(display=False) as counter:
        forward.run()
    assert forward.flop == counter.get_total_flops()
    for work in backward:
        with FlopCounterMode(display=False) as counter:
            work.run()
        assert work.flop == counter.get_total_flops()


def test_bytes_are_those_of_the_tensors():
    point = {"tokens": 16, "inputs": 8, "outputs": 24}
    forward, backward = list_work(build_case("linear", point, torch.bfloat16, "cpu"))
    inputs, output = 2 * (16 * 8 + 24 * 8 + 24), 2 * 16 * 24
    assert (forward.read_bytes, forward.write_bytes) == (inputs, output)
    assert (backward.read_bytes, backward.write_bytes) == (inputs + output, inputs)


def test_rows_fit_the_table_and_name_their_size(tmp_path):
    points = list_points("linear", 0, quick=True)
    rows, facts = run_sweep("item", "linear", "bf16", points, "cpu", tmp_path, quick=True)
    _write(tmp_path / "s.parquet", "sweeps", rows)
    assert [row["phase"] for row in rows] == ["forward", "backward"]
    assert json.loads(rows[0]["shape"]) == points[0]
    assert rows[0]["precision"] == "bf16"
    assert rows[0]["min_ns"] > 0
    assert facts == {"points": 1, "failed_points": []}


def test_a_point_that_fails_does_not_end_the_sweep(tmp_path):
    good = {"m": 4, "n": 4, "k": 4}
    rows, facts = run_sweep(
        "item", "gemm", "fp32", [{"m": -1, "n": 4, "k": 4}, good], "cpu", tmp_path
    )
    assert len(rows) == 1
    (failed,) = facts["failed_points"]
    assert failed["point"]["m"] == -1
    assert "negative" in failed["error"]


def test_a_sweep_without_any_point_left_fails(tmp_path):
    with pytest.raises(RuntimeError, match="negative"):
        run_sweep("item", "gemm", "fp32", [{"m": -1, "n": 4, "k": 4}], "cpu", tmp_path)


def test_memory_that_runs_out_at_one_point_is_given_back(tmp_path, monkeypatch):
    freed, real = [], sweeps.build_case

    def build(operation, point, dtype, device):
        if point["m"] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
        return real(operation, point, dtype, device)

    monkeypatch.setattr(sweeps, "build_case", build)
    monkeypatch.setattr(sweeps, "free_memory", freed.append)
    points = [{"m": 1000, "n": 4, "k": 4}, {"m": 4, "n": 4, "k": 4}]
    rows, _ = run_sweep("item", "gemm", "fp32", points, "cpu", tmp_path, quick=True)
    assert len(rows) == 1
    assert freed == ["cpu"]


def test_tf32_is_switched_for_the_sweep_alone(tmp_path, monkeypatch):
    from trioflow.campaign.sweeps import Case

    seen = []

    def build(operation, point, dtype, device):
        seen.append(dtype)
        x = torch.ones(2)
        return Case(lambda: x + 1, [x])

    monkeypatch.setattr(sweeps, "build_case", build)
    switches = []
    real = sweeps.single_precision
    monkeypatch.setattr(
        sweeps, "single_precision", lambda kind: switches.append(kind) or real(kind)
    )
    for precision in ("tf32", "fp32", "bf16"):
        run_sweep("item", "gemm", precision, [{}], "cpu", tmp_path, quick=True)
    assert switches == ["tf32", "ieee", "ieee"]
    assert seen == [torch.float32, torch.float32, torch.bfloat16]


def test_an_unknown_operation_or_backend_is_refused():
    with pytest.raises(InputError, match="unknown operation 'fft'"):
        build_case("fft", {}, torch.float32, "cpu")


def test_a_backend_that_this_torch_lacks_fails_its_points_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sweeps._BACKENDS, "cudnn", "CUDNN_ATTENTION_OF_A_LATER_TORCH")
    (point,) = list_points("attention", 0, quick=True)
    points = [{**point, "backend": "cudnn"}, {**point, "backend": "math"}]
    rows, facts = run_sweep("item", "attention", "fp32", points, "cpu", tmp_path, quick=True)
    assert {json.loads(row["shape"])["backend"] for row in rows} == {"math"}
    assert "no attention backend 'cudnn'" in facts["failed_points"][0]["error"]


def test_ceilings_count_what_they_move_and_copies_to_the_host_are_timed_by_its_clock(tmp_path):
    copy, fill, there = (
        run_sweep("c", name, "", [{"size_bytes": 4096}], "cpu", tmp_path, quick=True)[0][0]
        for name in ("device_copy", "device_fill", "host_to_device")
    )
    assert (copy["read_bytes"], copy["write_bytes"]) == (4096, 4096) == (4096, there["write_bytes"])
    assert (fill["read_bytes"], fill["write_bytes"]) == (0, 4096)
    (work,) = list_work(build_case("device_to_host", {"size_bytes": 1}, torch.float32, "cpu"))
    assert work.on_host
