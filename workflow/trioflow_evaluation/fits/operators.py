"""The published operator measurements of each GPU, and the models that ship, fitted to them.

Which GPUs and models there are follows from the catalogue, of which a folder may hold a part.
NeuSight's single operators are forward ones in fp32, measured alone and hence with the launch that
a step hides. Its columns M, N, K of matrix products are rows, length of the sum, and columns of the
result: (M x N) (N x K).

Source: S. Lee et al., NeuSight, ASPLOS 2025; https://github.com/sitar-lab/NeuSight,
``scripts/asplos/data/dataset``.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from msgspec import structs
from trioflow.base.errors import InputError
from trioflow.base.provenance import digest_file
from trioflow.base.units import us_to_ns
from trioflow.costmodel.fits.operators import DeviceData, DeviceLimits, drop_equal, fit_device_data, fit_device_model
from trioflow.costmodel.operators.model import OperatorCostModel
from trioflow.datasets.catalogue import MODEL_TABLES, SINGLE_OPERATORS, STEP_TRACES, load_catalogue
from trioflow.hardware.machine import find_device
from trioflow.trace.store import Trace

DATASET = Path("sitar-lab+NeuSight/scripts/asplos/data/dataset")
TRAIN, TEST = "train", "test"
_TRAINED = ("linear", "bmm", "conv", "add", "mul", "relu", "gelu", "softmax", "ln")
_TESTED = ("linear", "bmm", "elem", "softmax", "ln")
"""Files of the published test part; the others there repeat their rows."""

_FLOAT_BYTES = 4
_UNARY = {"addu": "add", "mulu": "mul", "divu": "div", "powu": "pow"}
_NORMS = {"ln": "layer_norm"}
Shapes = list[list[int]]
COLUMNS = (
    "op_id",
    "name",
    "phase",
    "module",
    "device_ns",
    "flop",
    "read_bytes",
    "write_bytes",
    "batch_flop",
    "batch_read_bytes",
    "batch_write_bytes",
    "input_shapes",
    "output_shapes",
    "dtype",
)


def benchmark_files(data_folder: str | Path, part: str, device: str) -> list[Path]:
    """Return the files of the part ``train`` or ``test`` that hold rows of a device, in order."""
    folder = Path(data_folder) / DATASET
    files = (
        [folder / TEST / f"{name}.csv" for name in _TESTED]
        if part == TEST
        else [folder / TRAIN / "collect" / name / "p2.1.0" / f"{device}.csv" for name in _TRAINED]
    )
    on_disk = set(load_catalogue().held_files(data_folder, SINGLE_OPERATORS))
    return [file for file in files if file in on_disk]


def load_benchmarks(data_folder: str | Path, device: str, parts: tuple[str, ...] = (TRAIN, TEST)) -> pd.DataFrame:
    """Read a device's single operators as ``tables.OPERATORS`` and ``part``; empty without any.

    Repeated measurements became their median. Raises InputError when a file lacks a column or
    holds a wrong value.
    """
    frames = [
        _read(file, device).assign(part=part) for part in parts for file in benchmark_files(data_folder, part, device)
    ]
    if not any(len(frame) for frame in frames):
        return pd.DataFrame({name: [] for name in (*COLUMNS, "part")})
    joined = pd.concat(frames, ignore_index=True)
    return joined.assign(op_id=range(len(joined)))[[*COLUMNS, "part"]]


def without_workload(data: DeviceData, workload: str) -> DeviceData:
    """Return a device's data without a workload and without the single operators of its shapes."""
    out = (data.rows["workload"] == workload).to_numpy()
    new = np.cumsum(~out) - 1  # places of the rows that stay
    unique = data.unique[(data.unique["workload"] != workload).to_numpy()]
    return replace(
        data,
        rows=data.rows[~out].reset_index(drop=True),
        unique=unique.assign(row=new[unique["row"]]),
        stands_in=new[data.stands_in[~out]],
        pairs=new[data.pairs[~out[data.pairs].any(axis=1)]],
        alone=drop_equal(data.alone, data.rows[out]),
    )


def _read(file: Path, device: str) -> pd.DataFrame:
    table = pd.read_csv(file, encoding="utf-8-sig", low_memory=False)
    kind = "conv" if "Input_Channel" in table else "product" if "K" in table else "rows"
    sizes = {
        "conv": ["B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding"],
        "product": ["B", "M", "N", "K"],
        "rows": ["B", "H"],
    }[kind]
    needed = ["OPName", "Latency", "Device", *sizes]
    missing = [name for name in needed if name not in table.columns]
    if missing:
        raise InputError(f"column {missing[0]} is missing", file=file, fix="retrieve it again")
    table = table.loc[table["Device"] == device, needed]
    numbers = table[["Latency", *sizes]].apply(pd.to_numeric, errors="coerce")
    wrong = np.flatnonzero(~((numbers > 0) | (numbers.columns == "Padding")).all(axis=1))
    if len(wrong):
        raise InputError(
            "a size or time is not a positive number",
            file=file,
            place=f"line {table.index[wrong[0]] + 2}",
            fix="retrieve it again",
        )
    medians = table.groupby(["OPName", *sizes], sort=True)["Latency"].median().reset_index()
    describe = _DESCRIBE[kind]
    operators = [
        describe(str(name), [int(size) for size in values])
        for name, *values in medians[["OPName", *sizes]].itertuples(index=False)
    ]
    frame = pd.DataFrame(operators)
    if len(frame):
        frame["device_ns"] = [us_to_ns(ms * 1e3) for ms in medians["Latency"]]
        growing = {f"batch_{name}": frame[name] for name in ("flop", "read_bytes", "write_bytes")}
        frame = frame.assign(phase="forward", module="", dtype="float", **growing)
    return frame


def _operator(name: str, flop: int, inputs: Shapes, output: list[int]) -> dict[str, Any]:
    def size(shape: list[int]) -> int:
        return math.prod(shape) * _FLOAT_BYTES

    return {
        "name": f"aten::{name}",
        "flop": flop,
        "input_shapes": inputs,
        "output_shapes": [output],
        "read_bytes": sum(size(shape) for shape in inputs),
        "write_bytes": size(output),
    }


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
    "conv": _describe_convolution,
    "product": _describe_product,
    "rows": _describe_rows,
}


_TRIOSIM_GPU = "NVIDIA H100 80GB HBM3"
"""The GPU of TrioSim's published traces; the raw pair names it, the CSV files do not."""

_RAW_NAME = re.compile(r"profiler_(?P<model>[a-z0-9]+)-.*")


@dataclass(frozen=True)
class PublishedDevice:
    """Everything public that was measured on one GPU."""

    name: str  # As its driver reports it
    traces: tuple[Trace, ...]  # Their fact ``workload`` is the model's name
    limits: DeviceLimits  # From the device's sheet
    folder: Path
    _fitted: dict[tuple[str, str], OperatorCostModel] = field(default_factory=dict, repr=False, compare=False)

    def benchmarks(self) -> pd.DataFrame:
        """Return the single operators."""
        return load_benchmarks(self.folder, self.name)

    @cached_property
    def data(self) -> DeviceData:
        """All of it, as fits take it."""
        return DeviceData.prepare(self.traces, self.limits, self.benchmarks())

    def fit_without(self, workload: str, method: str = "shipped") -> OperatorCostModel:
        """Return a form fitted to the other workloads, without single operators of the workload's sizes."""
        if (workload, method) not in self._fitted:
            self._fitted[workload, method], _ = fit_device_data(without_workload(self.data, workload), method)
        return self._fitted[workload, method]

    def sources(self) -> dict[str, str]:
        """Return the digest of every file that the measurements come from, by relative path."""
        files = {Path(str(file)) for trace in self.traces for file in trace.facts.source_files or ()}
        files |= {file for part in (TRAIN, TEST) for file in benchmark_files(self.folder, part, self.name)}
        return {file.relative_to(self.folder).as_posix(): digest_file(file)[:16] for file in sorted(files)}


def load_published(data_folder: str | Path, devices: Sequence[str] | None = None) -> list[PublishedDevice]:
    """Read the published traces of every GPU that has several, or of ``devices`` by drivers' names."""
    folder = Path(data_folder)
    traces: dict[str, list[Trace]] = {}
    for path in load_catalogue().held_files(folder, MODEL_TABLES, ".csv"):
        device = find_device(path.parent.name).driver_name
        if devices is None or device in devices:
            traces.setdefault(device, []).append(_neusight(path, device))
    if devices is None or _TRIOSIM_GPU in devices:
        traces.setdefault(_TRIOSIM_GPU, []).extend(_load_triosim(folder))
    by_device = {device: each for device, each in sorted(traces.items()) if each}
    if not by_device:
        raise InputError("no published operator measurements here", file=folder, fix="run `snakemake data`")
    return [PublishedDevice(device, tuple(each), DeviceLimits.of(device), folder) for device, each in by_device.items()]


def pair_batches(traces: Iterable[Trace]) -> Iterator[tuple[Trace, Trace]]:
    """Yield every two steps of one workload and mode at different batches, in both orders."""
    for one, other in permutations(traces, 2):
        alike = (one.facts.workload, one.facts.mode) == (other.facts.workload, other.facts.mode)
        if alike and one.facts.batch != other.facts.batch:
            yield one, other


def _neusight(path: Path, device: str) -> Trace:
    from trioflow.trace.importers.neusight import import_neusight
    from trioflow.trace.importers.sources import ImportOptions

    trace = import_neusight(path, ImportOptions())
    files = [path, path.with_suffix(".json")]
    trace.facts = replace(trace.facts, workload=str(trace.facts.model), device_name=device, source_files=files)
    return trace


def _load_triosim(data_folder: str | Path) -> list[Trace]:
    """Read TrioSim's published traces: its CSV pairs and the raw profile, where they are present."""
    from trioflow.trace.importers.detect import import_row  # every reader, which predictions need not

    on_disk = load_catalogue().held_files(data_folder, STEP_TRACES)
    given = {"batch": "-", "precision": "tf32", "optimizer": "adam"}
    loaded = []
    for path in (file for file in on_disk if file.name == "trace.csv"):
        row = {**given, "trace": path.parent.name, "format": "triosim", "gpu": _TRIOSIM_GPU}
        files = [path, path.with_name("tensor.csv")]
        loaded.append((row, files))
    for path in on_disk:
        name = _RAW_NAME.fullmatch(path.stem)
        graph = path.parents[1] / "graph" / path.name.replace("profiler_", "graph_")
        if name and graph in on_disk:
            row = {**given, "trace": name["model"], "format": "kineto", "gpu": "-", "optimizer": "-"}
            loaded.append((row | {"precision": "-"}, [path, graph]))
    traces = []
    for row, files in loaded:
        trace = import_row(files, row)
        trace.facts = replace(trace.facts, source_files=files)
        traces.append(trace)
    return traces


_MODEL_FILE = "operators.json"


def build_operator_models(data_folder: str | Path, output: str | Path) -> list[Path]:
    """Fit every GPU with published measurements into ``<device sheet's name>/operators.json``."""
    written = []
    for device in load_published(data_folder):
        model, _ = fit_device_model(device.traces, device.limits, benchmarks=device.benchmarks())
        facts = {**model.facts, "sources": device.sources()}
        path = Path(output) / find_device(device.name).name / _MODEL_FILE
        structs.replace(model, facts=facts).save(path)
        written.append(path)
    return written
