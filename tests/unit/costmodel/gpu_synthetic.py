"""Operator tables of a made-up GPU: products in tiles and waves, a launch, bytes."""

import math

import numpy as np
import pandas as pd
from trioflow import tables
from trioflow.costmodel.fits.operators import DeviceLimits
from trioflow.costmodel.new_gpu.rules import Exponents, device_rates, expected_s, size_rows
from trioflow.hardware.machine import load_device
from trioflow.trace.facts import Facts
from trioflow_evaluation.fits.new_gpu import BENCHMARKS

from costmodel.synthetic import FakeTrace

SMS, RATE, BANDWIDTH, LAUNCH_S = 100, 50e12, 2e12, 10e-6
LIMITS = DeviceLimits(SMS, RATE, BANDWIDTH)
DEVICE = "made-up GPU"


def product_s(batch: int, m: int, n: int, k: int) -> float:
    """Return the time [s] of one product: whole waves of 128 x 128 tiles."""
    tiles = batch * math.ceil(m / 128) * math.ceil(n / 128)
    return math.ceil(tiles / SMS) * 2 * 128 * 128 * k * SMS / RATE


def make_step(width: int, batch: int, layers: int = 2, factor: float = 1.0) -> pd.DataFrame:
    """Return linear, attention and element-wise operators of a few equal layers and their gradients."""
    rows = []
    tokens, heads = 256 * batch, width // 64
    x, w, y = [batch, 256, width], [2 * width, width], [batch, 256, 2 * width]
    q, a = [batch, heads, 256, 64], [batch, heads, 256, 256]
    for layer in range(layers):
        made = [
            (
                "aten::linear",
                "forward",
                [x, w, [2 * width]],
                [y],
                [(1, tokens, 2 * width, width)],
                {"read": 2 * width * width + 2 * width},
            ),
            ("aten::matmul", "forward", [q, [batch, heads, 64, 256]], [a], [(batch * heads, 256, 256, 64)], {}),
            ("aten::gelu", "forward", [y], [y], [], {}),
            ("aten::gelu_backward", "backward", [y, y], [y], [], {}),
            (
                "aten::linear_backward",
                "backward",
                [y, x, w],
                [x, w],
                [(1, tokens, width, 2 * width), (1, width, 2 * width, tokens)],
                {"read": 2 * width * width, "write": 2 * width * width},
            ),
            ("aten::add_", "backward", [w, w], [w], [], {"read": 4 * width * width, "write": 2 * width * width}),
        ]
        for name, phase, inputs, outputs, products, fixed in made:
            read, write = (sum(math.prod(s) for s in shapes) for shapes in (inputs, outputs))
            flop = sum(2 * math.prod(product) for product in products)
            time_s = LAUNCH_S + 4 * (read + write) / BANDWIDTH
            time_s = factor * (time_s + sum(product_s(*product) for product in products))
            rows.append(
                {
                    "name": name,
                    "phase": phase,
                    "module": f"layers.{layer}",
                    "flop": flop,
                    "read_bytes": 4 * read,
                    "write_bytes": 4 * write,
                    "batch_flop": flop,
                    "batch_read_bytes": 4 * (read - fixed.get("read", 0)),
                    "batch_write_bytes": 4 * (write - fixed.get("write", 0)),
                    "input_shapes": inputs,
                    "output_shapes": outputs,
                    "device_ns": round(time_s * 1e9),
                    "dtype": "float",
                }
            )
    frame = pd.DataFrame(rows)
    frame["op_id"] = range(len(frame))
    for name in tables.OPERATORS.names:
        if name not in frame.columns:
            frame[name] = 0
    return frame[tables.OPERATORS.names]


def make_gpu_trace(width: int, batch: int, factor: float = 1.0) -> FakeTrace:
    """Return a trace; captures of one width are one workload."""
    facts = Facts(workload=f"model {width}", batch=batch, device_name=DEVICE, precision="fp32", step_time_s=1.0)
    return FakeTrace(make_step(width, batch, factor=factor), facts)


def make_gpu_traces() -> list[FakeTrace]:
    """Return four models at three batches each."""
    return [make_gpu_trace(w, b) for w in (256, 512, 768, 1024) for b in (1, 3, 8)]


LAW = Exponents(0.5, 15.0, 2e-5, 0.8)
LAW_DEVICES = ("a100-pcie-80gb", "v100-pcie-32gb", "h100-sxm", "l4", "t4", "p4")


def law_rows(noise: float = 0.0) -> pd.DataFrame:
    """Return square products on six GPUs that obey LAW, each reaching 90 % of what it can."""
    random = np.random.default_rng(0)
    sizes = [2**power for power in range(8, 14)] * 3
    frame = pd.DataFrame(
        {
            "name": "aten::mm",
            "phase": "forward",
            "flop": [2 * n**3 * (k + 1) for k, n in enumerate(sizes)],
            "read_bytes": [8 * n * n for n in sizes],
            "write_bytes": [4 * n * n for n in sizes],
            "device_ns": 1,
        }
    )
    frames = []
    for name in LAW_DEVICES:
        rows = size_rows(frame)
        data = (rows["read_bytes"] + rows["write_bytes"]).to_numpy(float)
        rates = device_rates(rows, load_device(name), "fp32")
        _, cost = expected_s(rows["flop"].to_numpy(float), data, rates, LAW)
        time_s = cost / 0.9 * np.exp(noise * random.standard_normal(len(rows)))
        frames.append(rows.assign(time_s=time_s, device=name))
    return pd.concat(frames, ignore_index=True).assign(
        workload=BENCHMARKS, case=BENCHMARKS, precision="fp32", floor_s=0.0, count=1
    )
