"""What a prediction of a public case starts from: traces, models that never saw its workload, the machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from trioflow.costmodel.choices import (
    SHIPPED_MODELS,
    Collectives,
    find_collectives,
    load_collectives,
)
from trioflow.costmodel.device_fit import DeviceData, fit_device_data
from trioflow.costmodel.device_times import DeviceTimes, prepare_device_times
from trioflow.costmodel.interface import RowModel
from trioflow.costmodel.operators import load_operator_model
from trioflow.costmodel.published_data import PublishedDevice, load_published
from trioflow.errors import InputError
from trioflow.experiments import Import, as_rows, load_imports
from trioflow.hardware.device_sheet import find_device, load_device
from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.platform import load_platform
from trioflow.reproductions.published.rows import PublishedRow
from trioflow.settings import suggest_name
from trioflow.trace.importers.detect import import_row
from trioflow.trace.store import Trace

SHIPPED_METHOD = "shipped"


@dataclass
class PublishedSource:
    """Public traces and measurements, read once for many cases."""

    data_folder: Path
    imports: dict[str, Import]  # rows of ``imports.tsv``
    table_folder: Path  # where the table of cases lies; platforms given as files are beside it
    _traces: dict[str, Trace] = field(default_factory=dict, repr=False)
    _devices: dict[str, PublishedDevice] = field(default_factory=dict, repr=False)
    _fit_data: dict[str, DeviceData] = field(default_factory=dict, repr=False)
    _fitted: dict[tuple[str, str], RowModel] = field(default_factory=dict, repr=False)

    @classmethod
    def read(
        cls, data_folder: str | Path, imports_file: str | Path, table: str | Path
    ) -> PublishedSource:
        """Return the source of a table of cases."""
        return cls(Path(data_folder), load_imports(imports_file), Path(table).parent)

    def read_trace(self, name: str) -> Trace:
        """Return a row of ``imports.tsv`` as a trace.

        Raises
        ------
        InputError
            When there is no such row, or its files are not here.
        """
        if name not in self.imports:
            raise InputError(
                f"no trace is called {name!r}", place="imports.tsv",
                fix=suggest_name(name, self.imports),
            )  # fmt: skip
        if name not in self._traces:
            entry = self.imports[name]
            files = [self.data_folder / file for file in entry.files]
            missing = next((file for file in files if not file.is_file()), None)
            if missing is not None:
                raise InputError("no such file", file=missing, fix="run `snakemake published`")
            self._traces[name] = import_row(files, as_rows([entry])[0])
        return self._traces[name]

    def traces_of(self, row: PublishedRow, names: tuple[str, ...] | None = None) -> list[Trace]:
        """Return a row's traces under one workload's name."""
        found = [self.read_trace(name) for name in names or row.traces]
        return [
            Trace(t.operators, t.tensors, replace(t.facts, workload=row.workload, tail_s=0.0))
            for t in found
        ]

    def published_device(self, name: str) -> PublishedDevice:
        """Return everything public that was measured on a GPU."""
        if name not in self._devices:
            self._devices[name] = load_published(self.data_folder, [name])[0]
        return self._devices[name]

    def keep_device(self, device: PublishedDevice) -> None:
        """Remember what was read of a GPU, and let go of the data of others."""
        self._fit_data.clear()
        self._devices[device.name] = device

    def fit_without(self, device_name: str, workload: str) -> RowModel:
        """Return the form of model that ships, fitted to a GPU's other workloads.

        The single operators of the workload's sizes are left out with it.
        """
        if device_name not in self._fit_data:
            device = self.published_device(device_name)
            self._fit_data[device_name] = DeviceData.prepare(
                device.traces, device.limits, device.benchmarks()
            )
        data, key = self._fit_data[device_name], (device_name, workload)
        if key not in self._fitted:
            self._fitted[key], _ = fit_device_data(data.without(workload), SHIPPED_METHOD)
        return self._fitted[key]

    @cached_property
    def shipped_models(self) -> dict[str, RowModel]:
        """The GPUs' models that ship, by their folder."""
        paths = sorted(SHIPPED_MODELS.glob("*/operators.json"))
        models = {path.parent.name: load_operator_model(path) for path in paths}
        return {name: m for name, m in models.items() if getattr(m, "method", "") == SHIPPED_METHOD}

    def device_times(self, traces: list[Trace], gpu: str) -> DeviceTimes:
        """Return traces with the times of a GPU, and its operator model without their workload.

        ``traces``: one workload on one GPU; ``gpu``: sheet of the GPU that is asked about.

        Notes
        -----
        The traced GPU's model is fitted without the workload. Models of other
        GPUs are those that ship, whose data hold the workload on no GPU but
        the traced one or not at all; the rule for new GPUs is the shipped one,
        fitted to pairs of GPUs in which one trace alone never occurs.
        """
        traced = find_device(traces[0].facts.device_name)
        key = published_name(traces[0])
        models = {**self.shipped_models, traced.name: self.fit_without(traced.driver_name, key)}
        return prepare_device_times(traces, load_device(gpu).driver_name, models)

    def load_machine(self, row: PublishedRow) -> tuple[Platform, Collectives | None]:
        """Return a row's platform with its GPU and ranks, and the platform's measured collectives."""
        name: str | Path = row.platform
        if str(name).endswith((".yaml", ".yml")):
            name = self.table_folder / str(name)
        platform = load_platform(name, row.ranks)
        sheet = load_device(row.gpu)
        device = Device(
            sheet.driver_name, "gpu", sheet.memory_bytes, dict(sheet.peak_flop_per_s),
            sheet.memory_bandwidth_bytes_per_s,
        )  # fmt: skip
        path = find_collectives(platform)
        return replace(platform, device=device), load_collectives(path) if path else None


def published_name(trace: Trace) -> str:
    """Return the workload's name in the published data: what a fit leaves out."""
    told = str(trace.facts.model or "")
    return told or trace.facts.workload


def list_anchored_pairs(device: PublishedDevice) -> list[tuple[Trace, Trace]]:
    """Return every ordered pair of batches of a model whose whole steps were measured on a GPU."""
    known = [t for t in device.traces if t.facts.measured_end_to_end_s]
    return [
        (a, b) for a in known for b in known
        if a.facts.batch != b.facts.batch
        and (a.facts.workload, a.facts.mode) == (b.facts.workload, b.facts.mode)
    ]  # fmt: skip
