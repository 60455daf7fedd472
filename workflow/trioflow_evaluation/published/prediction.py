"""One public case predicted: traces, models that never saw its workload, plan and machine in; a step out.

`prepare_case` is the door. Baselines of public cases are TrioSim's public rules (`predict_by_triosim`) and an
`AnalyticalModel`.

What TrioSim's public code (commit 3fb3c06) printed for its VGG-13 trace (held in
``tests/published/test_triosim_traces.py``): times and tensors are proportional to the batch,
parameters too; a replica's optimizer never waits for communication; any all-reduce takes its bytes
over one bandwidth. Pipelines of several micro-batches, which that code lets a device run at once,
are left out.

Sources: Y. Li et al., "TrioSim", ISCA 2025, https://github.com/sarchlab/triosim; G. Lu et al.,
"DistSim", CF 2023: this analytical model missed its measurements by 26.1 % on average and 40.4 % at
worst.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from trioflow.base.errors import InputError
from trioflow.base.experiments import Import, Plan, as_rows, load_imports
from trioflow.base.settings import suggest_name
from trioflow.costmodel.choices import Collectives, find_collectives, load_collectives
from trioflow.costmodel.collectives.platform import PlatformCollectives
from trioflow.costmodel.device_times import DeviceTimes, prepare_device_times
from trioflow.costmodel.features import Floats, OperatorModel, class_of_name
from trioflow.costmodel.files import SHIPPED_MODELS
from trioflow.costmodel.operators.model import OperatorCostModel, load_operator_model
from trioflow.costmodel.uncertainty import RATIO, UNANCHORED, anchor_step
from trioflow.hardware.machine import Device, DeviceSheet, Platform, find_device, load_device
from trioflow.hardware.platform import load_platform
from trioflow.parallel.plan import micro_batch_sizes
from trioflow.parallel.reference import choose_reference
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.answer import Prediction, predict_step
from trioflow.prediction.assembly import predict, prepare_step
from trioflow.prediction.question import CLOSED_FORM, Options, resolve
from trioflow.prediction.step import Step
from trioflow.report.attribution import ScaledCollectives, Settings
from trioflow.tables import records
from trioflow.trace.importers.detect import import_row
from trioflow.trace.store import Trace, tensor_bytes

from trioflow_evaluation.fits.collective_baselines import with_baselines
from trioflow_evaluation.fits.operators import PublishedDevice, load_published
from trioflow_evaluation.published.cases import PublishedRow

_DEFAULT_BANDWIDTH_BYTES_PER_S = 65.0e9
"""What the code takes by default: bytes of an all-reduce or a message over this are its time."""
_TAGGED = ("gemm", "convolution", "convolution_backward")


@dataclass(frozen=True)
class RecordedStep:
    """What the rules read of a trace."""

    time_s: np.ndarray  # recorded times [s]
    output_bytes: np.ndarray  # bytes of all results [bytes]
    # Operators that tensor parallelism divides: products and convolutions that read a parameter,
    # and their gradients.
    tagged: np.ndarray
    forward: np.ndarray  # operators of the forward phase
    parameter_bytes: float  # all parameters [bytes]
    batch: int


def read_recorded_step(trace: Trace) -> RecordedStep:
    """Return what the rules read of a trace; InputError where it holds no times."""
    operators = trace.operators
    timed = operators["device_ns"].to_numpy() > 0
    if not timed.any():
        raise InputError("TrioSim's rules need recorded times", fix="give a trace with times")
    size, category = tensor_bytes(trace), trace.tensors["category"].tolist()
    chosen = operators[timed]
    rows = records(chosen, "op_id", "name", "phase", "input_ids", "output_ids", "forward_op_id")
    tags = dict(_tag(rows, category))
    return RecordedStep(
        chosen["device_ns"].to_numpy(np.float64) * 1e-9,
        np.array([sum(size[i] for i in row["output_ids"]) for row in rows], np.float64),
        np.array([tags[row["op_id"]] for row in rows]),
        (chosen["phase"] == "forward").to_numpy(),
        float(sum(int(entry["size_bytes"]) for entry in trace.facts.gradients)),
        trace.facts.batch,
    )


def _tag(rows: list[dict[str, object]], category: list[str]) -> Iterator[tuple[object, bool]]:
    """Yield each operator's number and whether tensor parallelism divides it."""
    tags: dict[object, bool] = {}
    for row in rows:
        ids = row["input_ids"]
        assert isinstance(ids, list)
        known = any(category[i] == "parameter" for i in ids)
        tag = class_of_name(str(row["name"])) in _TAGGED
        if row["phase"] == "backward":
            known = tags.get(row["forward_op_id"], known)
        tags[row["op_id"]] = tag and known
        yield row["op_id"], tag and known


def predict_by_triosim(
    step: RecordedStep,
    plan: Plan,
    batch: int,
    bandwidth_bytes_per_s: float = _DEFAULT_BANDWIDTH_BYTES_PER_S,
    *,
    overlap: bool = True,
) -> float | None:
    """Return the time of a step by TrioSim's public rules [s]; None for a plan that they do not know.

    ``overlap``: false for its standard data parallelism, which adds the all-reduce;
    ``bandwidth_bytes_per_s``: of every collective and message.
    """
    degrees = [d for d in (plan.data, plan.tensor, plan.pipeline) if d > 1]
    if len(degrees) > 1 or plan.sharding != "none" or plan.pieces > 1 or plan.stages_per_rank > 1:
        return None
    factor = batch / plan.data / step.batch
    time_s, bytes_s = factor * step.time_s, factor / bandwidth_bytes_per_s
    whole_s = float(time_s.sum())
    if plan.data > 1 and not overlap:
        return whole_s + step.parameter_bytes * bytes_s
    if plan.tensor > 1:
        cut_s = float(time_s[step.tagged].sum())
        moved = float(step.output_bytes[step.tagged].sum()) / plan.tensor
        return whole_s - cut_s + cut_s / plan.tensor + moved * bytes_s
    if plan.pipeline > 1:
        crossing = sum(_crossing_bytes(step, where, plan.pipeline) for where in (True, False))
        return whole_s + crossing * bytes_s
    return whole_s


def _crossing_bytes(step: RecordedStep, forward: bool, stages: int) -> float:
    """Return the results of each stage's last operator; stages hold equally many operators."""
    sent = step.output_bytes[step.forward == forward]
    ends = [stage * len(sent) // stages for stage in range(1, stages)]
    return float(sum(sent[end - 1] for end in ends if end))


@dataclass(frozen=True)
class AnalyticalModel:
    """A device by its rates alone: an operator model without coefficients."""

    # Rate of arithmetic [flop/s] and bandwidth of memory [bytes/s].
    flop_per_s: float
    bytes_per_s: float
    device_name: str  # device that the rates are of
    source: str
    by_row: ClassVar[bool] = True

    @classmethod
    def of_sheet(cls, sheet: DeviceSheet, precision: str) -> AnalyticalModel:
        """Return the model of a data sheet, with products in a precision."""
        peak = sheet.peak(precision)
        return cls(peak, sheet.memory_bandwidth_bytes_per_s, sheet.driver_name, "data-sheet rates")

    def time_operators(self, operators: pd.DataFrame) -> Floats:
        """Return work over rate plus bytes over bandwidth [s], shape (operators,)."""
        flop = operators["flop"].to_numpy(np.float64)
        moved = (operators["read_bytes"] + operators["write_bytes"]).to_numpy(np.float64)
        return flop / self.flop_per_s + moved / self.bytes_per_s

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Return the operators' times, without an interval."""
        time_s = self.time_operators(operators)
        columns = {"time_s": time_s, "low_s": time_s, "high_s": time_s, "extrapolated": False}
        return pd.DataFrame(columns, index=operators.index)

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Return the same at the target's sizes; recorded times do not count."""
        return self.predict(target)

    def step_interval(self, kind: str = "rescale", distance: float | None = None) -> tuple[float, float]:
        """Return no interval: rates say nothing of their error."""
        return (1.0, 1.0)

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Return that the interval rests on nothing."""
        return f"none: {self.source}"


_SHIPPED_METHOD = "shipped"


@dataclass
class PublishedSource:
    """Public traces and measurements, read once for many cases."""

    data_folder: Path
    imports: dict[str, Import]  # rows of ``imports.tsv``
    table_folder: Path  # where the table of cases lies; platforms given as files are beside it
    _traces: dict[str, Trace] = field(default_factory=dict, repr=False)
    _devices: dict[str, PublishedDevice] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, data_folder: str | Path, imports_file: str | Path, table: str | Path) -> PublishedSource:
        """Return the source of a table of cases."""
        return cls(Path(data_folder), load_imports(imports_file), Path(table).parent)

    def read_trace(self, name: str) -> Trace:
        """Return a row of ``imports.tsv`` as a trace; InputError where the row or its files are missing."""
        if name not in self.imports:
            raise InputError(f"no trace is called {name!r}", place="imports.tsv", fix=suggest_name(name, self.imports))
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
        return [Trace(t.operators, t.tensors, replace(t.facts, workload=row.workload, tail_s=0.0)) for t in found]

    def published_device(self, name: str) -> PublishedDevice:
        """Return everything public that was measured on a GPU."""
        if name not in self._devices:
            self._devices[name] = load_published(self.data_folder, [name])[0]
        return self._devices[name]

    @cached_property
    def shipped_models(self) -> dict[str, OperatorCostModel]:
        """The GPUs' models that ship, by their folder."""
        paths = sorted(SHIPPED_MODELS.glob("*/operators.json"))
        models = {path.parent.name: load_operator_model(path) for path in paths}
        return {name: m for name, m in models.items() if m.method == _SHIPPED_METHOD}

    def device_times(self, traces: list[Trace], gpu: str) -> DeviceTimes:
        """Return one workload's traces with the times of a GPU (by its sheet), and its operator model without the workload.

        Models of other GPUs are those that ship, whose data hold the workload on no GPU but the
        traced one or not at all; so is the rule for new GPUs, fitted to pairs in which one trace
        alone never occurs.
        """
        traced = find_device(traces[0].facts.device_name)
        key = published_name(traces[0])
        models = {**self.shipped_models, traced.name: self.published_device(traced.driver_name).fit_without(key)}
        return prepare_device_times(traces, load_device(gpu).driver_name, models)

    def load_machine(self, row: PublishedRow) -> tuple[Platform, Collectives | None]:
        """Return a row's platform with its GPU and ranks, and the platform's measured collectives."""
        name: str | Path = row.platform
        if str(name).endswith((".yaml", ".yml")):
            name = self.table_folder / str(name)
        platform = load_platform(name, row.ranks)
        device = Device.of(load_device(row.gpu))
        path = find_collectives(platform)
        return replace(platform, device=device), load_collectives(path) if path else None


def published_name(trace: Trace) -> str:
    """Return the workload's name in the published data: what a fit leaves out."""
    return str(trace.facts.model or "") or trace.facts.workload


LARGE_BYTES = 512 * 1024 * 1024
"""A message whose time is bandwidth alone: what the baseline's one bandwidth is read from [bytes]."""


@dataclass(frozen=True)
class UpkeepModel:
    """An operator model with dearer or cheaper copies into and out of gradient buckets."""

    # Of the GPU. A trace's own operators are rescaled; what a plan asks to be predicted is upkeep
    # (`parallel.reference.PricedModel.predict_elementwise`).
    base: OperatorModel
    factor: float

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Predict upkeep from its sizes, and change it."""
        found = self.base.predict(operators)
        return found.assign(**{c: self.factor * found[c] for c in ("time_s", "low_s", "high_s")})

    def __getattr__(self, name: str) -> Any:
        """Everything else is the base's."""
        return getattr(self.base, name)


@dataclass
class PreparedCase:
    """A row with its traces in the measured GPU's times, and its machine."""

    row: PublishedRow
    times: DeviceTimes
    platform: Platform
    collectives: Collectives | None
    # Interval of a whole step predicted from its operators, relative to the step.
    band: tuple[float, float] = (1.0, 1.0)
    _steps: dict[tuple[str, float, bool], Step] = field(default_factory=dict, repr=False)

    @property
    def rank_batch(self) -> int:
        """Samples that a rank computes at a time."""
        return micro_batch_sizes(self.row.made_plan, self.row.batch)[0]

    @property
    def reference(self) -> Trace:
        """The trace that the prediction starts from."""
        return choose_reference(self.times.traces, self.rank_batch).trace

    def has(self, need: str) -> bool:
        """Return whether the case has what a change needs; see ``report.attribution.Change``."""
        plan = self.row.made_plan
        communicates = self.collectives is not None and plan.ranks > 1
        own = self.times.confidence == "measured"
        known = {
            "communication": communicates,
            "collectives": communicates,
            "replicas": plan.data > 1,
            "overlap": plan.data > 1,
            "shards": plan.tensor > 1,
            "anchor": own and anchor_step(self.reference, RATIO).scale != 1.0,
        }
        return known.get(need, False)

    def predict(self) -> Prediction:
        """Simulate the step, with its interval and parts."""
        return predict_step(self._step(Settings()))

    @property
    def task_graph(self) -> TaskGraph:
        """The step that the prediction simulates."""
        return self._step(Settings()).graph

    def predict_changed(self, settings: Settings) -> float:
        """Return the step with something changed [s]."""
        step = self._step(settings)
        options = replace(step.options, compute_scale=settings.compute, interval=False)
        changed = replace(
            step, platform=settings.arrange(self.platform), collectives=self._collectives(settings), options=options
        )
        return predict_step(changed).step_time_s

    def _step(self, chosen: Settings) -> Step:
        """Return the step under some settings of its graph."""
        key = (chosen.anchor, chosen.copies, chosen.vocabulary)
        if key not in self._steps:
            model = UpkeepModel(self.times.model, chosen.copies)
            plan = self.row.made_plan
            if plan.vocabulary_parallel:
                plan = replace(plan, vocabulary_parallel=chosen.vocabulary)
            options = Options(anchor=chosen.anchor, anchor_band=self.band, collectives=self.collectives or CLOSED_FORM)
            times = replace(self.times, model=model)
            self._steps[key] = prepare_step(resolve(times, plan, self.platform, batch=self.row.batch, options=options))
        return self._steps[key]

    def predict_analytically(self) -> float:
        """Return the step from data sheets alone: rates, links, no overlap lost [s]."""
        sheet = load_device(self.row.gpu)
        precision = str(self.reference.facts.precision or "fp32")
        model = AnalyticalModel.of_sheet(sheet, precision)
        times = replace(self.times, model=model)
        return predict(
            times,
            self.row.made_plan,
            self.platform,
            batch=self.row.batch,
            anchor=UNANCHORED,
            collectives=CLOSED_FORM,
            interval=False,
        ).step_time_s

    def predict_like_triosim(self) -> float | None:
        """Return the step by TrioSim's public rules from the same recorded times [s]."""
        plan = self.row.made_plan
        step = read_recorded_step(self.reference)
        return predict_by_triosim(step, plan, self.row.batch, self.one_bandwidth())

    def one_bandwidth(self) -> float:
        """Return the machine's one bandwidth for the rules: a large message over its time [bytes/s]."""
        if self.collectives is None or self.row.ranks == 1:
            return float(min(link.bandwidth_bytes_per_s for link in self.platform.links))
        sends = self.row.made_plan.pipeline > 1
        estimate = self.collectives.time_s("send" if sends else "all_reduce", self.row.ranks, LARGE_BYTES)
        return LARGE_BYTES / estimate.time_s

    def _collectives(self, chosen: Settings) -> Any:
        found = self.collectives
        if found is None:
            return None
        if chosen.method and isinstance(found, PlatformCollectives):
            found = with_baselines(found).using(chosen.method)
        if (chosen.bandwidth, chosen.latency) == (1.0, 1.0):
            return found
        return ScaledCollectives(found, chosen.bandwidth, chosen.latency)


def prepare_case(
    row: PublishedRow,
    source: PublishedSource,
    *,
    traces: tuple[str, ...] | None = None,
    band: tuple[float, float] = (1.0, 1.0),
) -> PreparedCase:
    """Read what a row's prediction starts from; ``traces``: the oracle's, ``band``: of a whole step, relative."""
    given = source.traces_of(row, traces)
    platform, collectives = source.load_machine(row)
    return PreparedCase(row, source.device_times(given, row.gpu), platform, collectives, band)
