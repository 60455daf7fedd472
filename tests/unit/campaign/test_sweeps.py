import gzip
import json
import types

import pytest
from captured import TRANSFORMER
from trioflow.base.errors import InputError
from trioflow.base.provenance import read_json
from trioflow.campaign import call, sweeps
from trioflow.campaign.call import count_device_events, run_workload
from trioflow.campaign.items import OPERATIONS, list_points
from trioflow.campaign.packing import _write
from trioflow.campaign.sweeps import (
    BATCH,
    REPEATS,
    CudaStopwatch,
    HostStopwatch,
    Timing,
    build_case,
    choose_repeats,
    list_work,
    run_sweep,
)
from trioflow.trace.profile.merge import RAW_FILES

torch = pytest.importorskip("torch", reason="a campaign needs torch (extra [capture])")


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
    alone |= dict.fromkeys(("device_copy", "device_fill", "host_to_device", "device_to_host"), "copy")
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
    rows, facts = run_sweep("item", "gemm", "fp32", [{"m": -1, "n": 4, "k": 4}, good], "cpu", tmp_path)
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
    monkeypatch.setattr(sweeps, "single_precision", lambda kind: switches.append(kind) or real(kind))
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


class Device:
    """Counts what is queued on a pretended CUDA device; time passes as work is queued."""

    def __init__(self, cache_bytes=0):
        self.now_ms, self.log, self.made = 0.0, [], []
        self.cache_bytes = cache_bytes
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at_ms = device.now_ms
                device.log.append("event")

            def elapsed_time(self, other):
                return other.at_ms - self.at_ms

        class Scratch:
            def zero_(self):
                device.now_ms += 100.0
                device.log.append("flush")

        def empty(size, dtype, device):
            self.made.append(size)
            return Scratch()

        self.cuda = types.SimpleNamespace(
            Event=Event,
            synchronize=lambda: self.log.append("wait"),
            current_device=lambda: 0,
            get_device_properties=lambda _: types.SimpleNamespace(
                **({"L2_cache_size": cache_bytes} if cache_bytes else {})
            ),
            _sleep=lambda cycles: self.log.append("hold"),
        )
        self.torch = types.SimpleNamespace(cuda=self.cuda, empty=empty, int8=torch.int8)

    def work(self):
        self.now_ms += 0.25
        self.log.append("work")


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(sweeps, "torch", made.torch)
    return made


def test_events_time_the_work_alone_after_a_flush(device):
    watch = CudaStopwatch()
    device.log.clear()
    timing = watch.measure(device.work)
    assert set(timing.times_ns) == {250_000}, "neither flush nor hold count"
    assert timing.timer == "cuda_event"
    timed = device.log[device.log.index("hold") :]
    assert timed[:5] == ["hold", "flush", "event", "work", "event"]
    assert timed.count("flush") == len(timing.times_ns) == REPEATS[1]
    assert timed.count("hold") == -(-REPEATS[1] // BATCH), "one hold a batch"
    assert timed[-1] == "wait"


def test_a_torch_without_the_private_hold_still_measures(device):
    del device.cuda._sleep
    assert set(CudaStopwatch().measure(device.work).times_ns) == {250_000}


@pytest.mark.parametrize(("cache", "expected"), [(0, 256 << 20), (60 << 20, 120 << 20)])
def test_the_flush_covers_the_cache_where_its_size_is_known(monkeypatch, cache, expected):
    made = Device(cache)
    monkeypatch.setattr(sweeps, "torch", made.torch)
    CudaStopwatch()
    assert made.made == [expected]


def test_the_host_stopwatch_waits_for_the_device():
    calls = []
    timing = HostStopwatch(0.001, lambda: calls.append("wait")).measure(lambda: calls.append("work"))
    assert calls[:2] == ["work", "wait"]
    assert calls.count("work") == calls.count("wait")
    assert timing.timer == "perf_counter"
    assert min(timing.times_ns) > 0


def test_repeats_keep_to_the_budget_between_least_and_most():
    assert choose_repeats(1e-6, 0.06) == REPEATS[1]
    assert choose_repeats(10.0, 0.06) == REPEATS[0]
    assert choose_repeats(0.006, 0.06) == 10
    assert choose_repeats(0.0, 0.06) == REPEATS[1]


def test_columns_are_quartiles_of_the_repeats():
    columns = Timing([40, 10, 20, 30, 50], 7, "cuda_event").columns()
    assert columns == {
        "repeats": 5,
        "median_ns": 30,
        "min_ns": 10,
        "lower_quartile_ns": 20,
        "upper_quartile_ns": 40,
        "host_ns": 7,
        "timer": "cuda_event",
    }


def test_a_capture_is_packed_with_its_figures(tmp_path):
    result, files = run_workload(TRANSFORMER, 2, "cpu", True, tmp_path / "made")
    assert set(files) == set(RAW_FILES)
    assert result.facts["batch"] == 2
    assert result.facts["precision"] == "fp32"
    assert result.facts["device_events"] == 0
    for name, content in files.items():
        content.restore(tmp_path / name)
    assert read_json(tmp_path / "environment.json")["step_time_s"] == result.facts["step_time_s"] > 0
    profile = gzip.decompress((tmp_path / "made/kineto.json.gz").read_bytes())
    assert gzip.decompress((tmp_path / "kineto.json.gz").read_bytes()) == profile, "byte for byte"


def test_on_a_gpu_peak_memory_and_a_profile_without_kernels_are_told(tmp_path, monkeypatch):
    calls = []
    cuda = call.torch.cuda
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda: 100)
    monkeypatch.setattr(cuda, "max_memory_reserved", lambda: 200)
    monkeypatch.setattr(call, "_check_weights", lambda row, device: None)
    real = call.capture_workload

    def capture(row, batch, folder, device, **steps):
        assert (device, calls) == ("cuda", ["reset"])
        real(row, batch, folder, device="cpu", **steps)

    monkeypatch.setattr(call, "capture_workload", capture)
    result, _ = run_workload(TRANSFORMER, 2, "cuda", True, tmp_path)
    expected = {"peak_allocated_bytes": 100, "peak_reserved_bytes": 200}
    assert expected.items() <= result.facts.items()
    assert expected.items() <= read_json(tmp_path / "environment.json").items()
    assert "no kernels" in result.facts["warning"]


def test_kernels_copies_and_fills_count_as_device_events_as_pytorch_writes_them(tmp_path):
    with torch.profiler.profile() as profiler:
        torch.ones(1).add_(1)
    profiler.export_chrome_trace(str(tmp_path / "p.json"))
    text = (tmp_path / "p.json").read_text()
    assert '"cat": "cpu_op"' in text, "how categories are written"
    made = "".join(f'"cat": "{c}", ' for c in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op"))
    assert count_device_events(made.encode()) == 3


@pytest.mark.parametrize("describable", [True, False])
def test_weights_that_cannot_fit_are_refused_even_where_the_model_cannot_be_described(monkeypatch, describable):
    if not describable:
        monkeypatch.setattr(call, "build_workload", lambda *_, **__: 1 / 0)
    row = {**TRANSFORMER, "hidden": 262_144, "layers": 20}
    with pytest.raises(MemoryError, match=r"weights, gradients and optimizer take .* at least"):
        call._check_weights(row, "cpu")
    call._check_weights(TRANSFORMER, "cpu")
