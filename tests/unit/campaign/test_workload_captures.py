import gzip

import pytest
from captured import TRANSFORMER
from trioflow.base.provenance import read_json
from trioflow.trace.profile.merge import RAW_FILES

torch = pytest.importorskip("torch", reason="captures need torch (extra [capture])")

from trioflow.campaign import call  # noqa: E402
from trioflow.campaign.call import count_device_events, run_workload  # noqa: E402


def test_a_capture_is_packed_with_its_figures(tmp_path):
    result, files = run_workload(TRANSFORMER, 2, "cpu", True, tmp_path / "made")
    assert set(files) == set(RAW_FILES)
    assert result.facts["batch"] == 2
    assert result.facts["precision"] == "fp32"
    assert result.facts["device_events"] == 0
    for name, content in files.items():
        content.restore(tmp_path / name)
    assert (
        read_json(tmp_path / "environment.json")["step_time_s"] == result.facts["step_time_s"] > 0
    )
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
def test_weights_that_cannot_fit_are_refused_even_where_the_model_cannot_be_described(
    monkeypatch, describable
):
    if not describable:
        monkeypatch.setattr(call, "build_workload", lambda *_, **__: 1 / 0)
    row = {**TRANSFORMER, "hidden": 262_144, "layers": 20}
    with pytest.raises(MemoryError, match=r"weights, gradients and optimizer take .* at least"):
        call._check_weights(row, "cpu")
    call._check_weights(TRANSFORMER, "cpu")
