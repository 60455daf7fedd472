"""NeuSight's measurements of single operators, as operator tables.

Each row is one forward operator in fp32, measured alone and hence with the
launch that a step hides. The columns M, N, K of matrix products are rows,
length of the sum, and columns of the result: (M x N) (N x K).

References
----------
S. Lee et al., NeuSight, ASPLOS 2025; https://github.com/sitar-lab/NeuSight,
``scripts/asplos/data/dataset``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow.datasets.catalogue import SINGLE_OPERATORS, load_catalogue
from trioflow.errors import InputError
from trioflow.units import us_to_ns

DATASET = Path("sitar-lab+NeuSight/scripts/asplos/data/dataset")
TRAIN, TEST = "train", "test"
TRAINED = ("linear", "bmm", "conv", "add", "mul", "relu", "gelu", "softmax", "ln")
TESTED = ("linear", "bmm", "elem", "softmax", "ln")
"""Files of the published test part; the others there repeat their rows."""

FLOAT_BYTES = 4
_UNARY = {"addu": "add", "mulu": "mul", "divu": "div", "powu": "pow"}
_NORMS = {"ln": "layer_norm"}
Shapes = list[list[int]]
COLUMNS = (
    "op_id", "name", "phase", "module", "device_ns", "flop", "read_bytes", "write_bytes",
    "batch_flop", "batch_read_bytes", "batch_write_bytes", "input_shapes", "output_shapes", "dtype",
)  # fmt: skip


def benchmark_files(data_folder: str | Path, part: str, device: str) -> list[Path]:
    """Return the files of a published part that hold rows of a device, in order.

    Parameters
    ----------
    data_folder : path
        Retrieved data or a mirror of it.
    part : str
        ``train`` or ``test``.
    device : str
        As its driver names it; the files' names say it too.
    """
    folder = Path(data_folder) / DATASET
    if part == TEST:
        files = [folder / TEST / f"{name}.csv" for name in TESTED]
    else:
        files = [folder / TRAIN / "collect" / n / "p2.1.0" / f"{device}.csv" for n in TRAINED]
    held = set(load_catalogue().held_files(data_folder, SINGLE_OPERATORS))
    return [file for file in files if file in held]


def load_benchmarks(
    data_folder: str | Path, device: str, parts: tuple[str, ...] = (TRAIN, TEST), most: int = 0
) -> pd.DataFrame:
    """Read the single operators that were measured on a device.

    Parameters
    ----------
    data_folder : path
        Retrieved data or a mirror of it.
    device : str
        As its driver names it, such as ``NVIDIA H100 80GB HBM3``.
    parts : tuple of str
        Published parts to read.
    most : int
        Rows kept of each file, evenly spaced; 0 for all.

    Returns
    -------
    DataFrame
        Columns of ``tables.OPERATORS`` that a model reads; ``part`` besides.
        Repeated measurements of one operator became their median. Empty where
        the device was not measured.

    Raises
    ------
    InputError
        When a file lacks a column or holds a wrong value.
    """
    frames = []
    for part in parts:
        for file in benchmark_files(data_folder, part, device):
            frame = _read(file, device)
            if most and len(frame) > most:
                frame = frame.iloc[np.linspace(0, len(frame) - 1, most).astype(int)]
            frames.append(frame.assign(part=part))
    if not any(len(frame) for frame in frames):
        return pd.DataFrame({name: [] for name in (*COLUMNS, "part")})
    joined = pd.concat(frames, ignore_index=True)
    return joined.assign(op_id=range(len(joined)))[[*COLUMNS, "part"]]


def _read(file: Path, device: str) -> pd.DataFrame:
    """Return the rows of one file that belong to a device."""
    table = pd.read_csv(file, encoding="utf-8-sig", low_memory=False)
    kind = "conv" if "Input_Channel" in table else "product" if "K" in table else "rows"
    sizes = {
        "conv": ["B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding"],
        "product": ["B", "M", "N", "K"],
        "rows": ["B", "H"],
    }[kind]  # fmt: skip
    needed = ["OPName", "Latency", "Device", *sizes]
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise InputError(f"column {missing[0]} is missing", file=file, fix="retrieve it again")
    table = table.loc[table["Device"] == device, needed]
    numbers = table[["Latency", *sizes]].apply(pd.to_numeric, errors="coerce")
    wrong = np.flatnonzero(~((numbers > 0) | (numbers.columns == "Padding")).all(axis=1))
    if len(wrong):
        raise InputError(
            "a size or time is not a positive number", file=file,
            place=f"line {table.index[wrong[0]] + 2}", fix="retrieve it again",
        )  # fmt: skip
    medians = table.groupby(["OPName", *sizes], sort=True)["Latency"].median().reset_index()
    describe = _DESCRIBE[kind]
    operators = [
        describe(str(name), [int(size) for size in values])
        for name, *values in medians[["OPName", *sizes]].itertuples(index=False)
    ]
    frame = pd.DataFrame(operators)
    if len(frame):
        frame["device_ns"] = [us_to_ns(ms * 1e3) for ms in medians["Latency"]]
        frame = frame.assign(phase="forward", module="", dtype="float")
        for name in ("flop", "read_bytes", "write_bytes"):
            frame[f"batch_{name}"] = frame[name]
    return frame


def _operator(name: str, flop: int, inputs: Shapes, output: list[int]) -> dict[str, Any]:
    def size(shape: list[int]) -> int:
        return int(np.prod(shape, dtype=np.int64)) * FLOAT_BYTES

    return {
        "name": f"aten::{name}", "flop": flop, "input_shapes": inputs, "output_shapes": [output],
        "read_bytes": sum(size(shape) for shape in inputs), "write_bytes": size(output),
    }  # fmt: skip


def _describe_product(name: str, sizes: list[int]) -> dict[str, Any]:
    batch, rows, inner, columns = sizes
    flop = 2 * batch * rows * inner * columns
    if name == "linear":
        return _operator(name, flop, [[rows, inner], [columns, inner], [columns]], [rows, columns])
    shapes = [[batch, rows, inner], [batch, inner, columns]]
    return _operator(name, flop, shapes, [batch, rows, columns])


def _describe_convolution(_: str, sizes: list[int]) -> dict[str, Any]:
    batch, channels, results, kernel, size, stride, padding = sizes
    side = (size + 2 * padding - kernel) // stride + 1
    flop = 2 * batch * results * side**2 * channels * kernel**2
    data, weight = [batch, channels, size, size], [results, channels, kernel, kernel]
    return _operator("conv2d", flop, [data, weight], [batch, results, side, side])


def _describe_rows(name: str, sizes: list[int]) -> dict[str, Any]:
    rows, width = sizes
    if name in _NORMS:
        return _operator(_NORMS[name], 0, [[rows, width], [width], [width]], [rows, width])
    two = name in _UNARY.values()
    return _operator(_UNARY.get(name, name), 0, [[rows, width]] * (1 + two), [rows, width])


_DESCRIBE: dict[str, Callable[[str, list[int]], dict[str, Any]]] = {
    "conv": _describe_convolution, "product": _describe_product, "rows": _describe_rows,
}  # fmt: skip
