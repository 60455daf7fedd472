"""Synthetic operator tables whose cost follows a known law."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from trioflow import tables
from trioflow.trace.facts import Facts

CONSTANT_S = {"aten::linear": 20e-6, "aten::add": 4e-6, "aten::conv2d": 50e-6, "aten::t": 2e-6}
PER_FLOP_S = {"aten::linear": 1e-11, "aten::conv2d": 2e-11}
PER_BYTE_S = {"aten::linear": 1e-10, "aten::add": 2e-10, "aten::conv2d": 1e-10}


@dataclass
class FakeTrace:
    """As much of a trace as a fit reads."""

    operators: pd.DataFrame
    facts: Facts


def law_s(name: str, flop: float, data_bytes: float) -> float:
    """Return the time [s] that the synthetic law gives."""
    return CONSTANT_S[name] + PER_FLOP_S.get(name, 0.0) * flop + PER_BYTE_S.get(name, 0.0) * data_bytes


def make_operators(widths: list[int], batch: int, noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Return layers of linear, add, convolution and view, forward and backward.

    The parts that read weights do not grow with the batch.
    """
    random = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for phase in ("forward", "backward"):
        for layer, width in enumerate(widths):
            rows += [
                _row(
                    "aten::linear",
                    phase,
                    layer,
                    2 * batch * width * width,
                    4 * (batch * width + width * width),
                    4 * batch * width,
                    [],
                ),
                _row("aten::add", phase, layer, 0, 8 * batch * width, 4 * batch * width, []),
                _row(
                    "aten::conv2d",
                    phase,
                    layer,
                    2 * batch * 64 * width * 9 * 16,
                    4 * (batch * width * 64 + 16 * width * 9),
                    4 * batch * 16 * 64,
                    [[batch, width, 8, 8], [16, width, 3, 3]],
                ),
                _row("aten::t", phase, layer, 0, 0, 0, []),
            ]
    frame = pd.DataFrame(rows)
    times = [law_s(row.name, row.flop, row.read_bytes + row.write_bytes) for row in frame.itertuples(index=False)]
    factors = np.exp(noise * random.standard_normal(len(frame)))
    frame["device_ns"] = np.rint(np.array(times) * factors * 1e9).astype("int64")
    frame["op_id"] = range(len(frame))
    for name in tables.OPERATORS.names:
        if name not in frame.columns:
            frame[name] = 0
    frame["output_shapes"] = [[[batch, 16, 8, 8]] if shapes else [] for shapes in frame["input_shapes"]]
    return frame[tables.OPERATORS.names]


def _row(
    name: str, phase: str, layer: int, flop: int, read: int, write: int, shapes: list[list[int]]
) -> dict[str, Any]:
    return {
        "name": name,
        "phase": phase,
        "module": f"layers.{layer}",
        "flop": flop,
        "read_bytes": read,
        "write_bytes": write,
        "input_shapes": shapes,
    }


def make_trace(workload: str, widths: list[int], batch: int, noise: float = 0.0, seed: int = 0) -> FakeTrace:
    """Return a trace of the synthetic law."""
    return FakeTrace(
        make_operators(widths, batch, noise, seed),
        Facts(workload=workload, batch=batch, device_name="made up", step_time_s=1.0),
    )


def make_traces(noise: float = 0.0) -> list[FakeTrace]:
    """Return three workloads at two batches each."""
    widths = {"narrow": [32, 48, 64, 96], "middle": [64, 128, 192, 256], "wide": [128, 256, 384, 512]}
    return [
        make_trace(name, sizes, batch, noise, seed=7 * number + batch)
        for number, (name, sizes) in enumerate(widths.items())
        for batch in (4, 16)
    ]
