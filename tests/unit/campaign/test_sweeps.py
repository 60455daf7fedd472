import json
import sys
import types

import pytest
from trioflow import tables
from trioflow.base.errors import InputError, MeasurementError

torch = pytest.importorskip("torch", reason="sweeps need torch (extra [capture])")

from trioflow.campaign import sweeps  # noqa: E402
from trioflow.campaign.sweeps import OPERATIONS, Work, list_points, list_work, run_sweep, time_work  # noqa: E402

COPIES = {"device_copy", "device_fill", "host_to_device", "device_to_host", "launch"}
FORWARD_ALONE = {"gemm", "bmm", "cat"}
ALL = [(name, point) for name in OPERATIONS for point in list_points(name, "quick")]


@pytest.mark.parametrize(("name", "point"), ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_operation_runs_in_every_phase(name, point, dtype):
    works = list_work(name, point, torch.uint8 if name in COPIES else dtype, "cpu")
    alone = {**dict.fromkeys(COPIES, ""), **dict.fromkeys(FORWARD_ALONE, "forward"), "optimizer": "optimizer"}
    assert [work.phase for work in works] == ([alone[name]] if name in alone else ["forward", "backward"])
    for work in works:
        work.run()
        work.run()
        assert work.read or name == "device_fill"
        assert sum(tensor.nbytes for tensor in work.written) > 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_levels_hold_whole_points_and_no_point_twice(name):
    levels = [key for key in ("coarse", "fine", "finest") if key in OPERATIONS[name]]
    points = [json.dumps(point) for level in levels for point in list_points(name, level)]
    assert levels and list_points(name, "quick")
    assert len(points) == len(set(points))


@pytest.mark.parametrize(
    ("name", "point", "flop", "read", "written"),
    [
        ("linear", {"tokens": 16, "inputs": 8, "outputs": 24}, 2 * 16 * 8 * 24, 16 * 8 + 24 * 8 + 24, 16 * 24),
        ("gemm", {"m": 2, "n": 3, "k": 5}, 2 * 2 * 3 * 5, 2 * 5 + 5 * 3, 2 * 3),
        ("softmax", {"rows": 4, "width": 8}, None, 32, 32),
    ],
)
def test_flop_and_bytes_are_those_of_the_tensors(name, point, flop, read, written):
    row = time_work(list_work(name, point, torch.bfloat16, "cpu")[0], "cpu")
    assert (row["flop"], row["read_bytes"], row["write_bytes"]) == (flop, 2 * read, 2 * written)


def test_backward_reads_the_output_s_gradient_too_and_costs_twice():
    forward, backward = list_work("linear", {"tokens": 16, "inputs": 8, "outputs": 24}, torch.float32, "cpu")
    assert sum(t.numel() for t in backward.read) == sum(t.numel() for t in (*forward.read, *forward.written))
    assert time_work(backward, "cpu")["flop"] == 2 * 2 * 16 * 8 * 24


def test_a_sweep_is_a_table_with_its_origin_and_the_sizes_that_failed(tmp_path, monkeypatch):
    points = [{"m": -1, "n": 4, "k": 4}, {"m": 4, "n": 4, "k": 4}]
    monkeypatch.setattr(sweeps, "list_points", lambda *_: points)
    run_sweep("gemm", "bf16", "quick", tmp_path / "t.parquet", "cpu")
    frame = tables.read_table(tmp_path / "t.parquet", "operation_times")
    (row,) = tables.records(frame)
    assert json.loads(row["shape"]) == points[1]
    assert (row["operation"], row["precision"], row["timer"], row["kernels"]) == ("gemm", "bf16", "perf_counter", [])
    assert 0 < row["min_ns"] <= row["lower_quartile_ns"] <= row["median_ns"] <= row["upper_quartile_ns"]
    (failed,) = frame.attrs["failed"]
    assert json.loads(failed["shape"]) == points[0] and "negative" in failed["error"]
    assert frame.attrs["device"] == "cpu" and frame.attrs["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("softmax", "none", "quick"), MeasurementError, "no size of softmax in none"),
        (("fft", "fp32", "quick"), InputError, "no sweep 'fft quick'"),
        (("gemm", "fp32", "quikc"), InputError, "gemm quick"),
        (("gemm", "fp64", "quick"), InputError, "no precision 'fp64'"),
    ],
)
def test_what_cannot_be_timed_leaves_no_file(arguments, error, message, tmp_path):
    with pytest.raises(error, match=message):
        run_sweep(*arguments, tmp_path / "t.parquet", "cpu")
    assert not any(tmp_path.iterdir())


def test_tf32_is_switched_on_for_the_sweep_alone(tmp_path, monkeypatch):
    switched, real = [], sweeps.single_precision
    monkeypatch.setattr(sweeps, "single_precision", lambda kind: switched.append(kind) or real(kind))
    for precision in ("tf32", "fp32", "bf16"):
        run_sweep("softmax", precision, "quick", tmp_path / "t.parquet", "cpu")
    assert switched == ["tf32", "ieee", "ieee"]


@pytest.mark.parametrize(("on_host", "timer"), [(False, "cuda_event"), (True, "perf_counter")])
def test_on_a_gpu_events_time_the_work_and_the_profiler_names_its_kernels(monkeypatch, on_host, timer):
    """Nothing here has a GPU: Triton's timer and the profiler are stand-ins."""
    calls, times_ms = [], [0.25, 0.5, 0.75, 0.25]

    def do_bench(run, **options):
        calls.append(options["return_mode"])
        return times_ms

    def event(name, start, end, kind):
        span = types.SimpleNamespace(start=start, elapsed_us=lambda: end - start)
        return types.SimpleNamespace(name=name, time_range=span, device_type=kind)

    kinds = torch.autograd.DeviceType
    events = [event("second", 7, 9, kinds.CUDA), event("launch", 0, 90, kinds.CPU), event("first", 1, 4, kinds.CUDA)]

    class Profile:
        def __init__(self, activities):
            assert len(activities) == 2

        def __enter__(self):
            return types.SimpleNamespace(events=lambda: events)

        def __exit__(self, *_):
            pass

    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", types.SimpleNamespace(do_bench=do_bench))
    monkeypatch.setattr(sweeps, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    one = torch.ones(2)
    row = time_work(Work("", lambda: one.add_(1), [one], [one], on_host), "cuda")
    assert (row["timer"], row["kernels"], row["kernel_ns"]) == (timer, ["first", "second"], 5000)
    assert calls.count("all") == (not on_host) and "wait" in calls
    if not on_host:
        assert (row["min_ns"], row["median_ns"], row["repeats"]) == (250_000, 375_000, 4)
