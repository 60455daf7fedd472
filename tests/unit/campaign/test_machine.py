import types

import pytest

torch = pytest.importorskip("torch", reason="describing the device needs torch")

from trioflow.base.errors import MeasurementError  # noqa: E402
from trioflow.campaign import call  # noqa: E402


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU of a torch that does not name the cache and has no NCCL."""
    properties = types.SimpleNamespace(multi_processor_count=132, total_memory=150_000_000_000)
    cuda = types.SimpleNamespace(
        current_device=lambda: 0,
        get_device_properties=lambda _: properties,
        get_device_name=lambda: "NVIDIA Pretended",
        get_device_capability=lambda: (9, 0),
        device_count=lambda: 1,
    )
    monkeypatch.setattr(call.torch, "cuda", cuda)
    return cuda


def test_a_gpu_is_described_by_what_this_torch_knows(gpu, monkeypatch):
    monkeypatch.setattr(call, "_query", lambda *names: "580.1")
    facts = call.describe_machine("cuda")
    assert facts["device_name"] == "NVIDIA Pretended"
    assert facts["sm_count"] == 132
    assert facts["capability"] == "9.0"
    assert facts["l2_cache_bytes"] is None
    assert facts["nccl"] is None
    assert facts["driver"] == "580.1"


def test_a_device_that_cannot_be_used_is_one_sentence(gpu):
    def refuse(_):
        raise RuntimeError("CUDA driver initialization failed")

    gpu.get_device_properties = refuse
    with pytest.raises(MeasurementError, match="cannot be used: CUDA driver initialization failed"):
        call.describe_machine("cuda")


def test_clocks_are_paired_with_their_names_and_empty_without_the_tool(monkeypatch):
    values = "1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 30, 75.1 W, 700.00 W"
    monkeypatch.setattr(call, "_query", lambda *names: values)
    clocks = call.read_clocks("cuda")
    assert clocks["clocks.sm"] == "1980 MHz"
    assert clocks["power.limit"] == "700.00 W"
    assert call.read_clocks("cpu") == {}

    def missing(*names):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(call, "_query", missing)
    assert call.read_clocks("cuda") == {}
