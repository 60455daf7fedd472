"""The published operator measurements of each GPU: traces of whole models, and single operators.

Which GPUs and models there are follows from the catalogue, of which a folder may hold a part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from trioflow.costmodel.benchmarks import TEST, TRAIN, benchmark_files, load_benchmarks
from trioflow.costmodel.device_fit import DeviceLimits
from trioflow.datasets.catalogue import MODEL_TABLES, STEP_TRACES, load_catalogue
from trioflow.errors import InputError
from trioflow.hardware.device_sheet import find_device
from trioflow.provenance import digest_file
from trioflow.trace.importers.detect import import_row
from trioflow.trace.importers.neusight import import_neusight
from trioflow.trace.importers.options import ImportOptions
from trioflow.trace.store import Trace

TRIOSIM_GPU = "NVIDIA H100 80GB HBM3"
"""The GPU of TrioSim's published traces; the raw pair names it, the CSV files do not."""

_RAW_NAME = re.compile(r"profiler_(?P<model>[a-z0-9]+)-.*")


@dataclass(frozen=True)
class PublishedDevice:
    """Everything public that was measured on one GPU.

    Attributes
    ----------
    name : str
        As its driver reports it.
    traces : tuple of Trace
        Their fact ``workload`` is the model's name.
    limits : DeviceLimits
        From the device's sheet.
    """

    name: str
    traces: tuple[Trace, ...]
    limits: DeviceLimits
    folder: Path

    @property
    def sheet_name(self) -> str:
        """Name of the device's sheet, and of the folder of its shipped model."""
        return find_device(self.name).name

    def benchmarks(self, parts: tuple[str, ...] = (TRAIN, TEST)) -> pd.DataFrame:
        """Return the single operators of some published parts."""
        return load_benchmarks(self.folder, self.name, parts)

    def sources(self) -> dict[str, str]:
        """Return the digest of every file that the measurements come from, by relative path."""
        files = {
            Path(str(file)) for trace in self.traces for file in trace.facts.source_files or ()
        }
        for part in (TRAIN, TEST):
            files |= set(benchmark_files(self.folder, part, self.name))
        return {
            file.relative_to(self.folder).as_posix(): digest_file(file)[:16]
            for file in sorted(files)
        }


def load_published(
    data_folder: str | Path, devices: Sequence[str] | None = None
) -> list[PublishedDevice]:
    """Read the published traces of every GPU that has several.

    Parameters
    ----------
    data_folder : path
        Retrieved data or a mirror of it.
    devices : sequence of str, optional
        GPUs to read, as their drivers name them; all by default.

    Raises
    ------
    InputError
        When the folder holds none of it.
    TraceError
        When a file is wrong.
    """
    folder = Path(data_folder)
    traces: dict[str, list[Trace]] = {}
    for path in load_catalogue().held_files(folder, MODEL_TABLES, ".csv"):
        device = find_device(path.parent.name).driver_name
        if devices is None or device in devices:
            traces.setdefault(device, []).append(_neusight(path, device))
    if devices is None or TRIOSIM_GPU in devices:
        traces.setdefault(TRIOSIM_GPU, []).extend(load_triosim(folder))
    found = {device: each for device, each in sorted(traces.items()) if each}
    if not found:
        raise InputError(
            "no published operator measurements here", file=folder, fix="run `snakemake data`"
        )
    return [
        PublishedDevice(device, tuple(each), DeviceLimits.of(device), folder)
        for device, each in found.items()
    ]


def _neusight(path: Path, device: str) -> Trace:
    """Return a table's trace, named by its model."""
    trace = import_neusight(path, ImportOptions())
    files = [path, path.with_suffix(".json")]
    trace.facts = replace(trace.facts, workload=str(trace.facts.model), device_name=device, source_files=files)  # fmt: skip
    return trace


def load_triosim(data_folder: str | Path) -> list[Trace]:
    """Read TrioSim's published traces: its CSV pairs and the raw profile, where they are present."""
    held = load_catalogue().held_files(data_folder, STEP_TRACES)
    said = {"batch": "-", "precision": "tf32", "optimizer": "adam"}
    found = []
    for path in (file for file in held if file.name == "trace.csv"):
        row = {**said, "trace": path.parent.name, "format": "triosim", "gpu": TRIOSIM_GPU}
        files = [path, path.with_name("tensor.csv")]
        found.append((row, files))
    for path in held:
        name = _RAW_NAME.fullmatch(path.stem)
        graph = path.parents[1] / "graph" / path.name.replace("profiler_", "graph_")
        if name and graph in held:
            row = {**said, "trace": name["model"], "format": "kineto", "gpu": "-", "optimizer": "-"}
            found.append((row | {"precision": "-"}, [path, graph]))
    traces = []
    for row, files in found:
        trace = import_row(files, row)
        trace.facts = replace(trace.facts, source_files=files)
        traces.append(trace)
    return traces
