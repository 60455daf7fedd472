"""Public measured steps beside predictions of them, and beside what others would predict.

`prepare_case` makes a public case ready: traces, models that never saw its workload, plan and machine. `judge_cases`
predicts such cases, by TrioSim's public rules (`predict_by_triosim`) and by an `AnalyticalModel` too.

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

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from trioflow import tables
from trioflow.base.errors import InputError, TrioflowError
from trioflow.base.experiments import Import, Plan, as_rows, load_imports
from trioflow.base.provenance import read_json, read_table
from trioflow.base.settings import suggest_name
from trioflow.base.units import ms_to_s
from trioflow.costmodel.choices import (
    Collectives,
    DeviceTimes,
    find_collectives,
    load_collectives,
    prepare_device_times,
)
from trioflow.costmodel.collectives.platform import PlatformCollectives
from trioflow.costmodel.features import SHIPPED_MODELS, Floats, OperatorModel, class_of_name, resize_batch
from trioflow.costmodel.operators.model import OperatorCostModel, load_operator_model
from trioflow.costmodel.uncertainty import (
    ALONE,
    ANCHOR_WAYS,
    BATCH,
    COLLECTIVES,
    PIPELINE,
    RATIO,
    RESIDUAL_WAYS,
    SHIPPED,
    TIMER,
    UNANCHORED,
    AnchoredModel,
    StepResidual,
    anchor_step,
    spell_workload,
)
from trioflow.hardware.machine import Device, DeviceSheet, Platform, find_device, load_device
from trioflow.hardware.platform import load_platform
from trioflow.parallel.plan import micro_batch_sizes
from trioflow.parallel.reference import choose_reference
from trioflow.parallel.schedules.build import is_schedule
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.assembly import Prediction, predict, predict_step, prepare_step
from trioflow.prediction.question import CLOSED_FORM, Options, resolve
from trioflow.prediction.step import Step
from trioflow.report.attribution import CAUSES, GROWTH, ScaledCollectives, Settings
from trioflow.report.errors import list_scaling
from trioflow.tables import FLOAT, INT, TEXT, column, records
from trioflow.trace.importers.detect import import_row
from trioflow.trace.store import Trace, tensor_bytes

from trioflow_evaluation import DATA
from trioflow_evaluation.fits.collectives import with_baselines
from trioflow_evaluation.fits.operators import PublishedDevice, load_published
from trioflow_evaluation.published.cases import PublishedRow, load_published_rows, rows_of_set

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
        traces = [self.read_trace(name) for name in names or row.traces]
        return [Trace(t.operators, t.tensors, replace(t.facts, workload=row.workload, tail_s=0.0)) for t in traces]

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
        path = find_collectives(platform)
        machine = replace(platform, device=Device.of(load_device(row.gpu)))
        return machine, load_collectives(path) if path else None


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
        times = self.base.predict(operators)
        return times.assign(**{c: self.factor * times[c] for c in ("time_s", "low_s", "high_s")})

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
        known = {
            "communication": communicates,
            "collectives": communicates,
            "replicas": plan.data > 1,
            "overlap": plan.data > 1,
            "shards": plan.tensor > 1,
            "anchor": self.times.confidence == "measured" and anchor_step(self.reference, RATIO).scale != 1.0,
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
            plan = self.row.made_plan
            if plan.vocabulary_parallel:
                plan = replace(plan, vocabulary_parallel=chosen.vocabulary)
            options = Options(anchor=chosen.anchor, anchor_band=self.band, collectives=self.collectives or CLOSED_FORM)
            times = replace(self.times, model=UpkeepModel(self.times.model, chosen.copies))
            self._steps[key] = prepare_step(resolve(times, plan, self.platform, batch=self.row.batch, options=options))
        return self._steps[key]

    def predict_analytically(self) -> float:
        """Return the step from data sheets alone: rates, links, no overlap lost [s]."""
        precision = str(self.reference.facts.precision or "fp32")
        model = AnalyticalModel.of_sheet(load_device(self.row.gpu), precision)
        return predict(
            replace(self.times, model=model),
            self.row.made_plan,
            self.platform,
            batch=self.row.batch,
            anchor=UNANCHORED,
            collectives=CLOSED_FORM,
            interval=False,
        ).step_time_s

    def predict_like_triosim(self) -> float | None:
        """Return the step by TrioSim's public rules from the same recorded times [s]."""
        step = read_recorded_step(self.reference)
        return predict_by_triosim(step, self.row.made_plan, self.row.batch, self.one_bandwidth())

    def one_bandwidth(self) -> float:
        """Return the machine's one bandwidth for the rules: a large message over its time [bytes/s]."""
        if self.collectives is None or self.row.ranks == 1:
            return float(min(link.bandwidth_bytes_per_s for link in self.platform.links))
        sends = self.row.made_plan.pipeline > 1
        estimate = self.collectives.time_s("send" if sends else "all_reduce", self.row.ranks, LARGE_BYTES)
        return LARGE_BYTES / estimate.time_s

    def _collectives(self, chosen: Settings) -> Any:
        collectives = self.collectives
        if collectives is None:
            return None
        if chosen.method and isinstance(collectives, PlatformCollectives):
            collectives = with_baselines(collectives).using(chosen.method)
        if (chosen.bandwidth, chosen.latency) == (1.0, 1.0):
            return collectives
        return ScaledCollectives(collectives, chosen.bandwidth, chosen.latency)


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


ANCHORS = pa.schema(
    [
        column("device", TEXT, "GPU"),
        column("workload", TEXT, "model"),
        column("mode", TEXT, "train or inf"),
        column("source_batch", INT, "samples of the recorded step"),
        column("target_batch", INT, "samples of the predicted step"),
        column("measured_s", FLOAT, "the target's measured step", "s"),
        *(
            column(f"{way}_s", FLOAT, f"the step by the anchor {way}, from the source's operators", "s")
            for way in ANCHOR_WAYS
        ),
    ]
)
"""Single-GPU steps predicted from operators of another batch, by each way to anchor; never the judged rows."""

MISSED = 0.2
"""Share of cases that an interval leaves outside."""
FEWEST = 8
"""Single-GPU steps that an interval of the anchor needs."""


def judge_anchored_steps(data_folder: str | Path) -> pd.DataFrame:
    """Judge the ways to anchor (``ANCHORS``) on every ordered pair of batches of one model on one GPU.

    Its operators are rescaled by a model that did not see the workload.
    """
    from trioflow_evaluation.fits.operators import load_published, pair_batches

    rows: list[dict[str, Any]] = []
    for device in load_published(data_folder):
        for one, other in pair_batches(trace for trace in device.traces if trace.facts.measured_end_to_end_s):
            model = device.fit_without(one.facts.workload)
            factor = other.facts.batch / one.facts.batch
            judged = judge_anchors(one, other, model, resize_batch(one.operators, factor))
            rows.append(
                {
                    "device": device.name,
                    "workload": one.facts.workload,
                    "mode": str(one.facts.mode),
                    "source_batch": one.facts.batch,
                    "target_batch": other.facts.batch,
                    "measured_s": judged["measured_s"],
                    **{f"{anchor}_s": judged[anchor] for anchor in ANCHOR_WAYS},
                }
            )
    return pd.DataFrame(rows, columns=ANCHORS.names)


def find_step_band(anchors: pd.DataFrame, workload: str, anchor: str = TIMER) -> tuple[float, float]:
    """Return the 80 % interval of a whole step predicted from its operators, relative to the prediction.

    The errors' quantiles on either side of 1, ``workload`` left out; 1 and 1 where fewer than
    ``FEWEST`` steps were judged.
    """
    others = anchors[anchors["workload"] != workload]
    if len(others) < FEWEST:
        return (1.0, 1.0)
    ratio = np.log(others["measured_s"] / others[f"{anchor}_s"])
    low, high = np.quantile(ratio, [MISSED / 2, 1 - MISSED / 2])
    return float(np.exp(min(low, 0.0))), float(np.exp(max(high, 0.0)))


def measure_band(anchors: pd.DataFrame) -> dict[str, Any]:
    """Return the file of the interval that ships: as `find_step_band`, over all workloads."""
    low, high = find_step_band(anchors, "")
    return {"low": low, "high": high, "steps": len(anchors), "share_inside": 1 - MISSED}


def list_residuals(anchors: pd.DataFrame, cases: pd.DataFrame) -> list[StepResidual]:
    """Return how far public steps were off that leave what was recorded, by what they leave.

    ``anchors``: another batch, from operators anchored at their own step and alone. Cases on the
    traced GPU show what ranks add, to one GPU's step where that was measured; those without a
    traced GPU (vTrain's) leave none.
    """
    residuals = []
    for row in anchors.to_dict("records"):
        name = f"{row['device']}, {row['mode']}, {row['source_batch']} to {row['target_batch']}"
        for group, anchor in ((BATCH, TIMER), (ALONE, UNANCHORED)):
            error = row[f"{anchor}_s"] / row["measured_s"] - 1
            workload = spell_workload(row["workload"])
            residuals.append(StepResidual(group, "cuda", workload, name, 1, error))
    scaled = list_scaling(cases)
    errors = dict(zip(scaled["case"], 1 / (1 + scaled["error"]) - 1, strict=True))
    for row in cases[(cases["ranks"] > 1) & (cases["source_gpu"] != "")].to_dict("records"):
        error = errors.get(row["case"], row["predicted_s"] / row["measured_s"] - 1)
        group = way_of_plan(row["plan"])
        workload = spell_workload(row["workload"])
        residuals.append(StepResidual(group, "cuda", workload, row["case"], int(row["ranks"]), error))
    return residuals


def way_of_plan(name: str) -> str:
    """Return what a plan of several ranks adds to one rank's step, by the plan's name."""
    word = name.rstrip("0123456789").partition("-m")[0].rstrip("0123456789")
    return PIPELINE if is_schedule(word) else COLLECTIVES


def prepare_set(
    name: str, data_folder: str | Path, imports_file: str | Path, table: str | Path, anchors: pd.DataFrame
) -> tuple[PublishedSource, list[PreparedCase]]:
    """Return the cases of a set, ready to be predicted."""
    rows = rows_of_set(load_published_rows(table), name, table)
    source = PublishedSource.read(data_folder, imports_file, table)
    cases = []
    for row in rows:
        trace = source.read_trace(row.traces[0])
        # Without a step of its own, a trace's operators are all that is known of the step.
        anchor = TIMER if trace.facts.measured_end_to_end_s is not None else UNANCHORED
        band = find_step_band(anchors, published_name(trace), anchor)
        cases.append(prepare_case(row, source, band=band))
    return source, cases


def judge_cases(source: PublishedSource, cases: Sequence[PreparedCase]) -> pd.DataFrame:
    """Return the table ``published_cases`` of some prepared cases."""
    rows = [_judge(case, source, cases) for case in cases]
    frame = pd.DataFrame(rows, columns=tables.PUBLISHED_CASES.names)
    numbers = [f.name for f in tables.PUBLISHED_CASES if f.type == FLOAT]
    return frame.astype(dict.fromkeys(numbers, "float64"))


def _judge(case: PreparedCase, source: PublishedSource, siblings: Sequence[PreparedCase]) -> dict[str, Any]:
    """Return the row of one case."""
    row, prediction = case.row, case.predict()
    measured = read_measured(row, source.data_folder)
    gpu = find_device(source.read_trace(row.traces[0]).facts.device_name)
    return {
        "set": row.set,
        "case": row.case,
        "workload": row.workload,
        "source_gpu": gpu.driver_name,
        "platform": f"{case.platform.name}, {case.platform.device.name}",
        "ranks": row.ranks,
        "plan": row.plan_name,
        "batch": row.batch,
        "mode": row.mode,
        "measured_s": measured.time_s,
        "source": measured.source,
        "spread": None,
        "predicted_s": prediction.step_time_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "confidence": prediction.confidence,
        "oracle_s": _predict_oracle(case, source, siblings),
        "triosim_s": case.predict_like_triosim(),
        "analytical_s": case.predict_analytically(),
        "regression_s": None,
        "learned_from": describe_learning(case),
        "changes": row.changes,
    }


_OF_ONE_GPU = ("workload", "platform", "gpu", "mode", "traces")
"""What a row shares with that of one of its GPUs, at the same batch a GPU."""


def _predict_oracle(case: PreparedCase, source: PublishedSource, siblings: Sequence[PreparedCase]) -> float | None:
    """Return the prediction with measured compute [s]; None where nobody measured it, and of tensor parallelism.

    From a trace of the measured GPU at the rank's own batch, or by the factor of one GPU's measured
    step at the same batch.
    """
    row, plan = case.row, case.row.made_plan
    if plan.tensor > 1:
        return None
    rows = [one.row for one in siblings]
    names = {name for one in rows if one.workload == row.workload for name in one.traces}
    for name in sorted(names):
        trace = source.read_trace(name)
        same = find_device(trace.facts.device_name).name == row.gpu
        if same and trace.facts.batch == case.rank_batch:
            if (name,) == row.traces:
                return case.predict().step_time_s
            return prepare_case(row, source, traces=(name,)).predict().step_time_s
    alone = next(
        (
            one
            for one in siblings
            if all(getattr(one.row, key) == getattr(row, key) for key in _OF_ONE_GPU)
            and one.row.ranks == 1
            and one.row.batch * row.ranks == row.batch
        ),
        None,
    )
    if alone is None or plan.data == 1:
        return None
    measured_s = read_measured(alone.row, source.data_folder).time_s
    return case.predict_changed(Settings(compute=measured_s / alone.predict().step_time_s))


def describe_learning(case: PreparedCase) -> str:
    """Say what was fitted on what for a case."""
    reference = case.reference.facts
    parts = [f"operators: {case.times.model_text}; the traced GPU's model without {case.row.workload}"]
    if case.times.confidence == "measured" and reference.measured_end_to_end_s is not None:
        parts.append(f"step of one GPU at batch {reference.batch} given")
    if case.row.ranks > 1:
        name = "ring over the platform's nominal links"
        if case.collectives is not None:
            name = f"{getattr(case.collectives, 'platform', case.platform.name)}, public nccl-tests tables"
        parts.append(f"collectives: {name}")
    return "; ".join(parts)


THROUGHPUT = DATA / "resnet50_throughput.tsv"
"""Published throughput; a row a GPU and number of GPUs, each with its source."""
_THROUGHPUT_WORD = "throughput of "


class MeasuredStep(NamedTuple):
    """A measured step: no source gives repeats."""

    time_s: float
    source: str  # file that says it


def read_measured(row: PublishedRow, data_folder: str | Path) -> MeasuredStep:
    """Return the measured time of a row: NeuSight's sidecar (``e2e_latency`` [ms]) or the shipped table of throughputs.

    Raises InputError when file or entry is missing or holds no positive time.
    """
    if row.measured.startswith(_THROUGHPUT_WORD):
        return _read_throughput(row.measured.removeprefix(_THROUGHPUT_WORD), row)
    file = Path(data_folder) / row.measured
    try:
        content = read_json(file)
    except (OSError, ValueError, TrioflowError) as error:
        raise InputError(
            f"the measured time of {row.case} cannot be read ({type(error).__name__})",
            file=file,
            fix="run `snakemake published`, which retrieves it",
        ) from None
    value = content.get("e2e_latency") if isinstance(content, dict) else None
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{value!r} is not a time", file=file, place="e2e_latency")
    return MeasuredStep(ms_to_s(float(value)), row.measured)


def _read_throughput(device: str, row: PublishedRow) -> MeasuredStep:
    entries = {(entry["device"], int(entry["gpus"])): entry for entry in read_table(THROUGHPUT)}
    entry = entries.get((device, row.ranks))
    if entry is None:
        known = ", ".join(sorted({name for name, _ in entries}))
        problem = f"no throughput of {row.ranks} x {device!r}"
        raise InputError(problem, file=THROUGHPUT, fix=f"use {known}")
    if int(entry["batch_per_gpu"]) * row.ranks != row.batch:
        raise InputError(
            f"{row.case} asks for {row.batch} samples, measured were "
            f"{entry['batch_per_gpu']} on each of {row.ranks} GPUs",
            file=THROUGHPUT,
        )
    return MeasuredStep(row.batch / float(entry["images_per_s"]), entry["source"])


PROPORTIONAL, RESCALED = "in proportion to the batch", "as predicted"


def explain_growth(cases: Sequence[PreparedCase]) -> pd.DataFrame:
    """Return each class's time at the measured batch, in proportion to it and as predicted: ``CAUSES``, role ``GROWTH``.

    Of cases whose ranks compute whole steps, at another batch than their trace's and without an
    anchor, on rank 0.
    """
    rows = []
    for case in cases:
        plan = case.row.made_plan
        same = case.rank_batch == case.reference.facts.batch
        if plan.tensor > 1 or plan.pipeline > 1 or same or case.has("anchor"):
            continue
        for key, times in _measure_growth(case).iterrows():
            head = (case.row.set, case.row.case, GROWTH, str(key))
            rows += [(*head, method, float(times[method])) for method in (PROPORTIONAL, RESCALED)]
    return pd.DataFrame(rows, columns=CAUSES.names)


def _measure_growth(case: PreparedCase) -> pd.DataFrame:
    """Return the times of every phase and class on rank 0, by ``PROPORTIONAL`` and ``RESCALED`` [s]."""
    operators = case.reference.operators
    tasks = case.task_graph.tasks
    of_rank = tasks[(tasks["rank"] == 0) & tasks["op_id"].notna()]
    times_s = of_rank.groupby(of_rank["op_id"].astype(np.int64))["duration_s"].sum()
    recorded_s = operators["device_ns"].to_numpy(np.float64) * 1e-9
    factor = case.rank_batch / case.reference.facts.batch
    names = [
        f"{phase}: {class_of_name(str(name))}"
        for phase, name in zip(operators["phase"], operators["name"], strict=True)
    ]
    frame = pd.DataFrame(
        {
            "class": names,
            PROPORTIONAL: factor * recorded_s,
            RESCALED: times_s.reindex(range(len(operators))).fillna(0.0).to_numpy(),
        }
    )
    sums = frame.groupby("class")[[PROPORTIONAL, RESCALED]].sum()
    return sums.sort_values(PROPORTIONAL, ascending=False, kind="stable")


def judge_anchors(source: Trace, target: Trace, model: OperatorModel, resized: pd.DataFrame) -> dict[str, Any]:
    """Return ``measured_s`` of a target's step and what each of ``ANCHOR_WAYS`` predicts from another batch's operators."""
    answers: dict[str, Any] = {"measured_s": float(target.facts.measured_end_to_end_s or 0.0)}
    for option in ANCHOR_WAYS:
        anchored = AnchoredModel(model, anchor_step(source, option)).rescale(source.operators, resized)
        answers[option] = float(anchored["time_s"].sum())
    return answers


def write_residuals(residuals: Iterable[StepResidual], path: Path = SHIPPED) -> None:
    """Write residuals as `load_residuals` reads them, in the order of the ways."""
    lines = [
        "# Predicted over measured steps, less 1, by what of them was not recorded (make publish; none left out).",
        "# cpu: trioflow's own runs over gloo on one machine, those of docs/errors.md. cuda: public measurements;",
        "# batch and alone from every pair of NeuSight's single-GPU steps, the others from docs of the public page;",
        "# resnet50 (Lambda's throughputs): n GPUs over one. No operator model saw the workload of its row.",
        "way\tdevice_kind\tworkload\tcase\tranks\terror",
    ]
    lines += [
        f"{one.way}\t{one.device_kind}\t{one.workload}\t{one.case}\t{one.ranks}\t{one.error:.4f}"
        for one in sorted(residuals, key=lambda one: RESIDUAL_WAYS.index(one.way))
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
