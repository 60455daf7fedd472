"""Traces that the studies start from, with predicted operator times of an A100."""

from __future__ import annotations

from pathlib import Path

from trioflow.costmodel.device_times import DeviceTimes, prepare_device_times
from trioflow.costmodel.operators import load_operator_model
from trioflow.hardware.device_sheet import load_device
from trioflow.hardware.machine import Device
from trioflow.trace.store import load_trace

TRACES = Path(__file__).parents[2] / "data" / "traces"
"""Operators and tensors captured without a device (``trioflow capture --device meta``)."""
SHEET = "a100-pcie-80gb"
"""Device of every study, and name of the cost model that times its operators; both ship."""
MODEL = Path(__file__).parents[2] / "data" / "cost_models" / SHEET / "operators.json"


def list_inputs(traces: list[str]) -> list[Path]:
    """Return the files that a study of some traces rests on."""
    parts = ("operators.parquet", "tensors.parquet", "trace.json")
    return [MODEL, *(TRACES / trace / part for trace in dict.fromkeys(traces) for part in parts)]


def load_timed_trace(name: str) -> DeviceTimes:
    """Return a trace of the studies with predicted times, and the model that gave them.

    Raises
    ------
    TraceError
        When there is no such trace.
    """
    model = load_operator_model(MODEL)
    device_name = load_device(SHEET).driver_name
    return prepare_device_times([load_trace(TRACES / name)], device_name, {SHEET: model})


def load_study_device() -> Device:
    """Return the device of every rank of the studies."""
    sheet = load_device(SHEET)
    return Device(sheet.driver_name, "gpu", sheet.memory_bytes, dict(sheet.peak_flop_per_s))
