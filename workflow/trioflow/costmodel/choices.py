"""What a question leaves open: which platform a name means, which cost models serve it, and how long operators take there.

`prepare_device_times` chooses the cost model, and where the trace has no times of the device that is asked about, or is
of another one, `time_trace` writes predicted times into a copy of it, in the column ``device_ns`` where recorded ones
stand. From there on they are read as recorded ones are; the trace's facts say that they are predicted, and their interval.
Operators that did the same are predicted once (`predict_distinct`).

What launches take the host (`host_times`) is recorded, or of a platform, kernel by kernel or a CUDA graph at a time.

Operator times may come from elsewhere (`load_overrides`), another simulator's, say, or a vendor's: a CSV file of at most
four columns, ``name`` (of the operator, with or without namespace), ``time_us``, and where they are needed ``phase`` and
``input_shapes`` such as ``[[8, 512], [1024, 512]]``. An operator takes the first row that fits it.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.columns import Columns, Texts
from trioflow.base.errors import InputError, PlatformError, suggest
from trioflow.base.input_files import read_rows, read_text
from trioflow.base.precision_recipes import WORDS
from trioflow.base.provenance import PACKAGE, read_json, read_table
from trioflow.base.units import NS_PER_S
from trioflow.costmodel.collectives.model import NODES_FILE, CollectiveCostModel, load_collective_model
from trioflow.costmodel.collectives.platform import KIND, PlatformCollectives, load_platform_collectives
from trioflow.costmodel.features import (
    FEATURES,
    SHIPPED_MODELS,
    Floats,
    OperatorModel,
    RowModel,
    Rows,
    looks_at_rows,
    price_columns,
    reprice_columns,
)
from trioflow.costmodel.new_gpu.carry import (
    derive_operator_model,
    load_new_gpu_model,
    retime_operators,
    retime_trace,
    round_ns,
)
from trioflow.costmodel.operators.model import OperatorCostModel, load_operator_model, load_shipped_models
from trioflow.costmodel.operators.precision import VERSIONS, class_precision, in_precision, load_tensor_tables
from trioflow.costmodel.uncertainty import WIDEST_FACTOR, combine_intervals
from trioflow.hardware.machine import (
    FALLBACK_PRECISION,
    Device,
    DeviceSheet,
    Platform,
    find_device,
    find_sheet,
    is_processor,
    list_fitting,
    load_device,
    resolve_device,
)
from trioflow.hardware.platform import list_platforms, load_platform
from trioflow.tables import PHASES
from trioflow.trace.facts import UNTIMED, Facts
from trioflow.trace.store import Trace, pipeline_units

_NEEDED = ("name", "time_us")
_OPTIONAL = ("phase", "input_shapes")
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Override:
    """One row: what it fits, and the time [s] that such an operator takes."""

    line: int
    name: str
    time_s: float
    phase: str | None = None
    input_shapes: Shapes | None = None

    def fits(self, name: str, phase: str, shapes: Shapes) -> bool:
        """Return whether an operator is meant."""
        named = name == self.name or name.rpartition("::")[2] == self.name
        return named and self.phase in (None, phase) and self.input_shapes in (None, shapes)

    def describe(self) -> str:
        """Return the row in words."""
        parts = [self.name, self.phase or "", str([list(s) for s in self.input_shapes or ()])]
        return " ".join(part for part in parts if part not in ("", "[]"))


@dataclass(frozen=True)
class Overrides:
    """All rows of a file, in order."""

    rows: tuple[Override, ...]
    file: Path

    def match(self, operators: Rows) -> Floats:
        """Return the given time of every operator [s], NaN without one; InputError names rows that fit none left."""
        columns = [operators[name].tolist() for name in ("name", "phase", "input_shapes")]
        times_s = np.full(len(columns[0]), np.nan)
        used: set[int] = set()
        for place, (name, phase, cell) in enumerate(zip(*columns, strict=True)):
            shapes = tuple(tuple(int(size) for size in shape) for shape in cell)
            row = next((r for r in self.rows if r.fits(str(name), str(phase), shapes)), None)
            if row is not None:
                times_s[place] = row.time_s
                used.add(row.line)
        unused = [row for row in self.rows if row.line not in used]
        if unused:
            listed = "; ".join(f"line {row.line}: {row.describe()}" for row in unused)
            raise InputError(
                f"{len(unused)} of {len(self.rows)} rows fit no operator: {listed}",
                file=self.file,
                fix="name, phase and shapes are those of `trioflow show TRACE --operators`; the first row "
                "that fits is taken",
            )
        return times_s


def load_overrides(path: str | Path) -> Overrides:
    """Read a file of operator times; InputError names file, line and column of what is wrong."""
    file = Path(path)
    rows = tuple(_read(row, line, file) for line, row in read_rows(read_text(file), file, _NEEDED, _OPTIONAL))
    if not rows:
        raise InputError("no row of times", file=file, fix="give at least one operator")
    return Overrides(rows, file)


def _read(cells: dict[str, str], line: int, file: Path) -> Override:
    def wrong(column: str, fix: str) -> InputError:
        return InputError(
            f"{cells.get(column, '')!r:.60} is wrong", file=file, place=f"line {line}, column {column}", fix=fix
        )

    if not cells["name"]:
        raise wrong("name", "give the name of an operator")
    try:
        time_us = float(cells["time_us"])
    except ValueError:
        time_us = math.nan
    if not 0 <= time_us < math.inf:
        raise wrong("time_us", "give a number of microseconds from 0 on")
    phase = cells.get("phase") or None
    if phase is not None and phase not in PHASES:
        raise wrong("phase", f"use one of {', '.join(PHASES)}, or leave it empty")
    shapes = None
    if cells.get("input_shapes"):
        try:
            shapes = tuple(tuple(int(size) for size in shape) for shape in json.loads(cells["input_shapes"]))
        except (ValueError, TypeError, RecursionError):
            raise wrong("input_shapes", "write shapes as [[8, 512], [1024, 512]]") from None
    return Override(line, cells["name"], time_us / 1e6, phase, shapes)


def apply_overrides(operators: Columns, times: Columns, overrides: Overrides) -> Columns:
    """Put given times, with intervals of no width, in place of predicted ones."""
    given = overrides.match(operators)
    changed = ~np.isnan(given)
    ends = {name: np.where(changed, given, times[name]) for name in ("time_s", "low_s", "high_s")}
    return times.assign(**ends, extrapolated=times["extrapolated"] & ~changed)


def override_trace(trace: Trace, overrides: Overrides) -> Trace:
    """Put given times in place of a trace's recorded ones; InputError where a row fits no operator.

    Operators' starts and the step's time move by what changed.
    """
    given = overrides.match(trace.operator_columns)
    changed = ~np.isnan(given)
    before = trace.operator_columns["device_ns"]
    operators = retime_operators(trace.operator_columns, np.where(changed, given, before * 1e-9))
    after = operators["device_ns"]
    gone_s = float((after - before).sum()) * 1e-9
    step_s = max(float(trace.facts.step_time_s) + gone_s, float(after.sum()) * 1e-9)
    share = float(after[changed].sum()) / max(float(after.sum()), 1.0)
    facts = replace(
        trace.facts,
        measured_end_to_end_s=None,
        measured_forward_s=None,
        measured_backward_s=None,
        step_time_s=step_s,
        step_times_s=[],
        warnings=trace.facts.warn(
            f"{int(changed.sum())} operators ({share:.0%} of the compute) have times from "
            f"{overrides.file.name}, without an interval"
        ),
    )
    return trace.replace(facts, operators)


def write_operator_times(trace: Trace) -> str:
    """Return a trace's operators in the format of overrides, longest sum first, mean of equals."""
    frame = trace.operators[["name", "phase", "device_ns"]].assign(
        input_shapes=[
            json.dumps([[int(size) for size in shape] for shape in cell]) for cell in trace.operators["input_shapes"]
        ]
    )
    rows = frame.groupby(["name", "phase", "input_shapes"], sort=True)["device_ns"].agg(["mean", "sum"]).reset_index()
    rows = rows.sort_values("sum", ascending=False, kind="stable")
    rows["time_us"] = rows["mean"] / 1e3
    return rows[["name", "phase", "input_shapes", "time_us"]].to_csv(index=False)


PREDICTED = "predicted"
"""The fact ``step_time_source`` of a trace whose times a model gave."""
NO_HOST = "; host time is not part of them"
"""How the warning of such times ends where the platform does not say what a launch takes."""


def host_times(trace: Trace, operators: Rows, launch_s: float) -> Floats:
    """Return the host time of some of a trace's operators [s]: recorded, or ``launch_s`` of each predicted one.

    A view has none then: PyTorch's host time of it is a small part of a kernel's. Of a CUDA graph, which a block's
    forward or backward is (``cuda_graphs`` of the language model), the first one launches all.
    """
    if trace.facts.step_time_source == PREDICTED and launch_s:
        launched = np.asarray(operators["device_ns"]) > 0
        if (trace.facts.language_model or {}).get("cuda_graphs"):
            launched &= ~_find_replayed(trace, operators, launched)
        return np.where(launched, launch_s, 0.0)
    return np.asarray(operators["cpu_ns"], np.float64) / NS_PER_S


def _find_replayed(trace: Trace, operators: Rows, launched: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which operators are in a block's CUDA graph, but not the first of it that is ``launched``."""
    place = {path: n for n, paths in enumerate(pipeline_units(trace).values(), 1) for path in paths}
    blocks = {n for path, n in place.items() if path.rpartition(".")[2].isdigit()}
    modules = operators["module"].tolist()
    known = {m: next((n for path, n in place.items() if f"{m}.".startswith(f"{path}.")), 0) for m in set(modules)}
    block = np.array([known[m] * (known[m] in blocks) for m in modules], dtype=np.int64)
    runs = np.flatnonzero(launched)
    code = block[runs] * len(PHASES) + np.array([*map(PHASES.index, operators["phase"].tolist())])[runs]
    first = np.diff(code, prepend=-1) != 0
    replayed = block > 0
    replayed[runs[first]] = False
    return replayed


def find_launch_s(host: Mapping[str, float], facts: Facts) -> float:
    """Return what a launch takes the host of a platform where the step's framework runs [s]; 0 where nobody knows.

    ``host``: the platform's named costs; ``launch_s`` is that of every framework without one of its own.
    """
    return float(host.get(f"launch_{facts.recipe.framework}_s", host.get("launch_s", 0.0)))


def mention_launches(warnings: Sequence[str], launch_s: float, facts: Facts) -> list[str]:
    """Return warnings that say what a launch was taken to last, in place of saying that none was."""
    mention = f"; kernel-launch overhead {launch_s * 1e6:.3g} us ({WORDS[facts.recipe.framework]}; docs/platforms.md)"
    return [text.replace(NO_HOST, mention) if launch_s else text for text in warnings]


PLACE = ("op_id", "module", "start_ns", "cpu_ns", "input_ids", "output_ids", "sequence_number", "forward_op_id")
"""Columns that say where and when an operator ran, and not what it did."""
_FEW = 64
"""Operators from which on looking for equal ones takes less than asking for all."""


def predict_distinct(model: OperatorModel, operators: Columns) -> Columns:
    """Return what ``model.predict`` says of operators."""
    if not looks_at_rows(model) or operators.rows < _FEW:
        return price_columns(model, operators)
    first, place = find_distinct(operators)
    return price_columns(model, operators.take(first)).take(place)


def rescale_distinct(model: OperatorModel, operators: Columns, target: Columns) -> Columns:
    """Return what ``model.rescale`` says of recorded operators at other sizes."""
    if not looks_at_rows(model) or operators.rows < _FEW:
        return reprice_columns(model, operators, target)
    # Sizes alone make the target another one: its names and shapes are the recorded operators'.
    sizes = {
        name: column for name, column in target.items() if getattr(column, "dtype", None) in (np.int64, np.float64)
    }
    first, place = find_distinct(operators, Columns(sizes))
    return reprice_columns(model, operators.take(first), target.take(first)).take(place)


def find_distinct(*tables: Columns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first of all equal rows, and for each row which of these it equals [operators].

    ``tables``: of as many operators; rows are equal where they are in each of them.
    """
    numbers = number_rows(*tables)
    return np.unique(numbers, return_index=True)[1].astype(np.int64), numbers


def number_rows(*tables: Columns) -> NDArray[np.int64]:
    """Return a number for each row, equal for rows that say that the same was done, from 0 in their order [operators].

    Lists are compared as text.
    """
    cells = [_number_cells(table[name]) for table in tables for name in table if name not in PLACE]
    places: dict[bytes, int] = {}
    rows = map(bytes, np.ascontiguousarray(np.column_stack(cells)))
    return np.array([places.setdefault(row, len(places)) for row in rows], dtype=np.int64)


def _number_cells(column: NDArray[Any] | Texts) -> NDArray[Any]:
    """Return a number for each cell, equal for equal ones."""
    if isinstance(column, Texts):
        return column.codes
    return column if column.dtype.kind in "biuf" else Texts.of(map(str, column)).codes


def time_trace(
    trace: Trace,
    model: OperatorModel,
    *,
    device_name: str | None = None,
    overrides: Overrides | None = None,
    device: str = "cuda",
) -> Trace:
    """Return a trace with predicted times; its own, if any, are not read.

    ``device_ns`` of every operator is predicted, ``cpu_ns`` is 0; the step takes their sum, whose interval joins the held-out error of whole steps predicted from shapes with that of
    operators never measured alike: those err together. On a GPU what moves no byte launches
    nothing; host time is not part of it. Raises InputError when the model cannot predict, or an
    override fits no operator.
    """
    operators = trace.operator_columns
    times = predict_distinct(model, operators)
    if device == "cuda":
        works = np.any([operators[name] for name in FEATURES], axis=0)
        times = times.assign(**{name: times[name] * works for name in ("time_s", "low_s", "high_s")})
    if overrides is not None:
        times = apply_overrides(operators, times, overrides)
    total_s = float(times["time_s"].sum())
    low, high = combine_intervals(model.step_interval("predict"), _beyond(times, total_s))
    device_name = device_name or str(getattr(model, "device_name", "unknown"))
    device_ns = round_ns(times["time_s"])
    ends = np.cumsum(device_ns)
    operators = operators.assign(device_ns=device_ns, cpu_ns=np.zeros_like(device_ns), start_ns=ends - device_ns)
    share = float(times["time_s"][times["extrapolated"]].sum()) / max(total_s, 1e-12)
    basis = model.step_interval_basis("predict")
    unread = "operator times are predicted"
    if device == "cuda" and trace.facts.device == "cpu" and trace.facts.step_time_source != UNTIMED:
        unread = f"recorded times are a processor's ({trace.facts.device_name}); operator times are predicted"
    facts = replace(
        trace.facts,
        device=device,
        device_name=device_name,
        step_time_s=float(ends[-1]) / 1e9 if len(ends) else 0.0,
        step_time_source=PREDICTED,
        step_times_s=[],
        predicted_times={"interval": [low, high], "basis": basis, "extrapolated_share": share},
        warnings=trace.facts.warn(f"{unread} for {device_name}, {share:.0%} of them by extrapolation{NO_HOST}"),
    )
    return trace.replace(facts, operators)


def _beyond(times: Columns, total_s: float) -> tuple[float, float]:
    """Return the interval, relative to the sum, of all extrapolated operators at the same ends."""
    beyond = times.take(times["extrapolated"])
    if not total_s or not beyond.rows:
        return 1.0, 1.0
    below_s = float((beyond["time_s"] - beyond["low_s"]).sum())
    above_s = float((beyond["high_s"] - beyond["time_s"]).sum())
    return max(1.0 - below_s / total_s, 1.0 / WIDEST_FACTOR), 1.0 + above_s / total_s


def times_interval(facts: Facts) -> tuple[float, float]:
    """Return the relative 80 % interval of times carried over or predicted; (1, 1) where recorded."""
    low, high = (facts.predicted_times or facts.new_gpu or {"interval": (1.0, 1.0)})["interval"]
    return float(low), float(high)


_EXTRAPOLATED, UNCALIBRATED = "extrapolated", "uncalibrated"
_GROUPED_SHARE = 0.05
"""Share of a step's compute from which on grouped products decide the word: as of collectives, a convention."""


@dataclass
class DeviceTimes:
    """What a plan on a device is built from."""

    traces: list[Trace]  # With the times of the device asked for, as far as anything gives them
    model: OperatorModel  # Rescales them to other sizes
    model_text: str  # Name and method of the model, and what the times rest on
    # measured, extrapolated (another GPU's trace or no recorded time, with an interval from devices
    # or workloads left out) or uncalibrated (another processor's, from elsewhere, or of a GPU of
    # whose chip nothing was ever measured).
    confidence: str = "measured"
    warnings: list[str] = field(default_factory=list)  # What the reader must know

    def doubt(self, confidence: str, warning: str = "") -> None:
        """Lower the confidence, and say why."""
        if self.confidence != UNCALIBRATED:
            self.confidence = confidence
        if warning:
            self.warnings.append(warning)


def prepare_device_times(
    traces: Sequence[Trace],
    device: DeviceSheet | str,
    models: Mapping[str, OperatorCostModel],
    *,
    overrides: Overrides | None = None,
) -> DeviceTimes:
    """Bring traces to the device that is asked about, and choose the cost model.

    ``traces``: one workload, all recorded or none. ``device``: its sheet, or the name of one without. A GPU without a model gets that of the nearest
    GPU (``nearest_model``), carried over by the new-GPU rule, as recorded times of another GPU are;
    a processor gets another's, with a warning. Times of a processor are not read for a GPU, and
    stay on another processor, with a warning. ``overrides`` need exactly one trace. Raises
    InputError when no model fits or can time an untimed trace, PlatformError when a GPU has neither
    model nor sheet, TraceError when another GPU's trace does not say its precision.
    """
    if not models:
        raise InputError("no operator cost model ships", fix="give one with --cost-model")
    if overrides is not None and len(traces) > 1:
        raise InputError(
            f"{len(traces)} traces were given with operator times from elsewhere",
            file=overrides.file,
            fix="give the one trace whose sizes the times are for",
        )
    if traces[0].facts.timer_floor_s is None:
        models = {name: model.in_steps() for name, model in models.items()}
    device_name, sheet = resolve_device(device)
    on_processor = traces[0].facts.device == "cpu" and sheet is not None
    untimed = [on_processor or trace.facts.step_time_source == UNTIMED for trace in traces]
    if any(untimed) and not all(untimed):
        raise InputError("some of the traces hold no times", fix="give traces with times, or without")
    precision = str(traces[0].facts.precision or FALLBACK_PRECISION)
    _check_scaled(traces[0].facts, device_name, sheet)
    traced = traces[0].facts.device_name
    traced_sheet = find_sheet(traced)
    same = _is_same(traced, traced_sheet, device_name, sheet)
    carried = not (untimed[0] or same or None in (sheet, traced_sheet))
    lent = not (untimed[0] or same or carried)
    # Times that stay those of the traced device are rescaled by that device's model.
    on_gpu = not is_processor(device_name) if untimed[0] else traces[0].facts.device == "cuda"
    times = choose_operator_model(
        models, traced if lent else device, precision, on_gpu, find_mask(traces[0]), find_kernel(traces[0])
    )
    if sheet is not None and (untimed[0] or carried) and sheet.chip not in measured_chips():
        times.doubt(
            UNCALIBRATED,
            f"no operator of {device_name}, nor of another board of its chip, was ever measured: times rest on its data "
            "sheet and other GPUs' operators",
        )
    if untimed[0]:
        _doubt_precision(times, precision)
        _time(times, traces, device_name, sheet, overrides)
        return times
    times.traces = list(traces)
    if carried and sheet is not None:
        times.traces = [retime_trace(trace, sheet) for trace in traces]
        times.doubt(_EXTRAPOLATED)
    if lent:
        times.doubt(UNCALIBRATED, f"compute times are those of the traced device ({traced}), not of {device_name}")
    times.model_text += ", anchored on the recorded times" + (f" of {traced}" if carried else "")
    if overrides is not None:
        times.traces = [override_trace(times.traces[0], overrides)]
        times.doubt(UNCALIBRATED)
    return times


def _check_scaled(facts: Facts, device_name: str, sheet: DeviceSheet | None) -> None:
    """Refuse a step in FP8 on what has no tensor cores for it: InputError."""
    if facts.recipe.products and not (sheet and sheet.runs_on_tensor_cores("fp8")):
        raise InputError(
            f"--precision {facts.recipe.name}: {device_name} has no tensor cores for FP8",
            fix="use --precision megatron-bf16, or a platform of Hopper or newer GPUs, such as dgx-h100",
        )


def _doubt_precision(times: DeviceTimes, precision: str) -> None:
    """Say so where the model knows matrix products in another precision than the trace's."""
    fitted = class_precision(times.model, "gemm")
    if fitted not in (None, precision):
        times.doubt(
            _EXTRAPOLATED,
            f"the cost model knows GEMMs in {fitted}, and the trace's run in {precision}: "
            "their times are those of the former",
        )


def _time(
    times: DeviceTimes,
    traces: Sequence[Trace],
    device_name: str,
    sheet: DeviceSheet | None,
    overrides: Overrides | None,
) -> None:
    if sheet is None and times.confidence == UNCALIBRATED:
        raise InputError(
            f"the trace holds no times, and no cost model of {device_name} can predict them",
            fix="choose a platform whose device has one, give one with --cost-model, or capture the "
            "workload on a device",
        )
    times.traces = [
        time_trace(
            trace, times.model, device_name=device_name, overrides=overrides, device="cpu" if sheet is None else "cuda"
        )
        for trace in traces
    ]
    times.model_text += ", from shapes"
    times.doubt(_EXTRAPOLATED if overrides is None else UNCALIBRATED)
    operators = times.traces[0].operator_columns
    grouped = operators["name"].holds(lambda name: "grouped_mm" in name)
    if operators["device_ns"][grouped].sum() > _GROUPED_SHARE * operators["device_ns"].sum():
        times.doubt(
            UNCALIBRATED,
            "grouped matmuls of experts were never measured in training: priced as dense ones, and"
            " their interval is that of an inference engine's fused kernel",
        )


def choose_operator_model(
    models: Mapping[str, OperatorCostModel],
    device: DeviceSheet | str,
    precision: str,
    on_gpu: bool,
    causal: bool | None = None,
    kernel: tuple[float, bool] = (0.0, False),
) -> DeviceTimes:
    """Return the model of a device, or what comes nearest; without traces yet.

    Raises InputError when a GPU has only processors' models. Raises PlatformError when it has
    neither model nor sheet.
    """
    device_name, sheet = resolve_device(device)
    for name, model in models.items():
        if _is_same(model.device_name, model.sheet, device_name, sheet):
            own: RowModel = model if sheet is None else in_precision(model, sheet, precision, causal, kernel)
            return DeviceTimes([], own, f"{name} ({own.method})")
    if sheet is not None:
        # Products on tensor cores come from a table; what is carried over is the rest.
        elsewhere = FALLBACK_PRECISION if sheet.runs_on_tensor_cores(precision) else precision
        nearest = nearest_model(models, sheet, elsewhere)
        if nearest is not None:
            derived = derive_operator_model(models[nearest], sheet, precision=elsewhere)
            carried = in_precision(derived, sheet, precision, causal, kernel)
            times = DeviceTimes([], carried, f"{nearest} ({carried.method})")
            times.doubt(
                _EXTRAPOLATED,
                f"no cost model of {device_name}: that of {derived.source.driver_name} is transferred; a capture on the GPU "
                "itself would replace it",
            )
            return times
    if sheet is not None:
        raise InputError(
            f"no cost model of a GPU for {device_name}: {', '.join(models)} is of a processor",
            fix="leave --cost-model out, or give one of a GPU",
        )
    if on_gpu:
        find_device(device_name)  # it says what to write down, and where
    # A processor lends its shape to processors; a GPU model is the last resort.
    name = ([name for name, model in models.items() if model.sheet is None] or list(models))[-1]
    times = DeviceTimes([], models[name], f"{name} ({models[name].method}), of another device")
    times.doubt(
        UNCALIBRATED,
        f"no cost model of {device_name}: recorded times are rescaled with the shape of "
        f"{models[name].device_name}'s; fit one with `trioflow fit`",
    )
    return times


@cache
def measured_chips() -> frozenset[str]:
    """Return the chips of GPUs of which any operator was measured: what models and rules that ship are fitted to."""
    half = load_tensor_tables()
    tables = (half.tables, half.attention, load_new_gpu_model().facts["devices"])
    return frozenset(load_device(name).chip for name in chain(*tables))


def find_kernel(trace: Trace) -> tuple[float, bool]:
    """Return the version of attention's kernel that a language model's step names, else 0, and whether it is deterministic."""
    model = trace.facts.language_model or {}
    return VERSIONS.get(str(model.get("attention")), 0.0), bool(model.get("deterministic"))


def find_mask(trace: Trace) -> bool | None:
    """Return whether a trace's attention is causal, as its capture or its workload says; None unknown."""
    if trace.facts.causal_attention is not None:
        return trace.facts.causal_attention
    return {"true": True, "false": False}.get(str((trace.facts.row or {}).get("causal")).lower())


def nearest_model(models: Mapping[str, OperatorCostModel], target: DeviceSheet, precision: str) -> str | None:
    """Return the model whose GPU is nearest to a target (a board of the same chip first); None without a GPU's model.

    Nearest by the logarithms of memory bandwidth and peak rate at the precision.
    """
    known = {name: model.sheet for name, model in models.items() if model.sheet}
    return min(known, key=lambda name: known[name].distance(target, precision)[1:], default=None)


def _is_same(measured: str, measured_sheet: DeviceSheet | None, device_name: str, sheet: DeviceSheet | None) -> bool:
    """Return whether the device that was measured is the one asked about."""
    if sheet is not None and measured_sheet is not None:
        return measured_sheet.is_same_gpu(sheet)
    return measured in (device_name, *(sheet.driver_names if sheet else ()))


MEASURED = Path("results")
"""Where a workflow run in this folder leaves what it measured."""
THIS_MACHINE = "this-machine"
_USUAL = PACKAGE / "data" / "usual_platforms.tsv"

Collectives = CollectiveCostModel | PlatformCollectives


def find_platform(name: str) -> str | Path:
    """Return what ``load_platform`` takes; PlatformError for a ``this-machine`` never measured here."""
    if name != THIS_MACHINE:
        return name
    path = MEASURED / "platforms" / f"{THIS_MACHINE}.yaml"
    if not path.exists():
        raise PlatformError(
            "this machine has not been measured in this folder",
            file=path,
            fix=f"run `make reproduce`, or use one of {', '.join(list_platforms())}",
        )
    return path


def load_named_platform(name: str, ranks: int) -> Platform:
    """Return a platform by name, file or its GPU (``H100``: on its usual platform); ``this-machine`` is the workflow's own.

    A GPU that no shipped platform has gets the links and the host of one of its form (``usual_platforms.tsv``).
    """
    usual = find_usual_platform(name)
    if usual is None and not _names_platform(name):
        gpus = dict.fromkeys(
            row["gpu"].partition("-sxm")[0].partition("-pcie")[0].upper() for row in read_table(_USUAL)
        )
        raise PlatformError(
            f"no GPU or platform is called {name!r}",
            fix=f"{suggest(name, [*gpus, *list_platforms()])}known GPUs are {', '.join(gpus)}; `trioflow platforms` lists "
            "platforms; docs/my_cluster.md says how to describe a GPU and a cluster of your own",
        )
    if usual is None:
        return load_platform(find_platform(name), ranks)
    sheet, place = usual
    platform = load_platform(place, ranks)
    if platform.device.sheet is not None and platform.device.sheet.name == sheet.name:
        return platform
    warning = f"trioflow has no platform with {sheet.driver_name}: links and host are those of {place}"
    return replace(platform, device=Device.of(sheet), doubts=(*platform.doubts, warning))


def find_usual_platform(name: str) -> tuple[DeviceSheet, str] | None:
    """Return the sheet and the usual platform of the GPU that a name stands for; None for a platform's name or file."""
    if _names_platform(name):
        return None
    fitting = {sheet.name: sheet for word in (name, f"RTX {name}") for sheet in list_fitting(word)}
    return next(((fitting[row["gpu"]], row["platform"]) for row in read_table(_USUAL) if row["gpu"] in fitting), None)


def _names_platform(name: str) -> bool:
    """Return whether a name is a platform's or a file's; else it can only be a GPU's."""
    return name == THIS_MACHINE or name in list_platforms() or name.endswith((".yaml", ".yml")) or "/" in name


def read_gpus(text: str) -> tuple[int, str]:
    """Return the number and the name in ``256xH100``; the name is a GPU, a platform or a platform's file.

    Raises InputError where it is written otherwise.
    """
    count, sign, name = str(text).partition("x")
    if not (count.isascii() and count.isdigit() and len(count) < 10 and int(count) and sign and name):
        raise InputError(
            f"--gpus {text!r:.60} is not a number and a name of GPUs", fix="write for example 256xH100 or 8xdgx-a100"
        )
    return int(count), name


def find_collectives(platform: Platform, named: str | None = None) -> Path | None:
    """Return the file of a platform's measured collectives (``named``: a file or shipped folder instead), or None.

    Groups on several nodes are planned from those inside a node by ``network.across_nodes``. Raises
    InputError when ``named`` is neither.
    """
    if named:
        shipped = SHIPPED_MODELS / named / "collectives.json"
        if "/" not in named and not Path(named).exists() and not shipped.exists():
            raise _refuse_name(named, "collective model", "collectives.json", ["closed-form"], "fit-collectives")
        return Path(named) if Path(named).exists() or not shipped.exists() else shipped
    folder = MEASURED / "cost_models" if platform.name == THIS_MACHINE else SHIPPED_MODELS
    name = platform.name
    if platform.node_collectives:
        name = platform.node_collectives
    path = folder / name / "collectives.json"
    for key, file in (("node_collectives", "collectives.json"), ("between_nodes", NODES_FILE)):
        word = getattr(platform, key)
        if word and not (folder / word / file).exists():
            known = [each.parent.name for each in sorted(folder.glob(f"*/{file}"))]
            raise PlatformError(
                f"no measured collectives are called {word!r}",
                place=key,
                fix=f"{suggest(word, known)}use one of {', '.join(known)}",
            )
    return path if path.exists() else None


def load_collectives(path: Path, method: str | None = None) -> Collectives:
    """Read either kind of collective model; InputError where the model lacks the method."""
    content = read_json(path)
    if isinstance(content, dict) and content.get("kind") == KIND:
        model = load_platform_collectives(path)
        return model.using(method) if method else model
    if method not in (None, "measured"):
        raise InputError(
            "holds measured curves only",
            file=path,
            fix=f"leave --algorithm {method} out, or fit a platform with `trioflow fit-collectives`",
        )
    return load_collective_model(path)


def choose_times(
    traces: Sequence[Trace], device: DeviceSheet | str, cost_model: str | Path | None, override: str | Path | None
) -> DeviceTimes:
    """Return the traces with a device's times, and the operator model for it.

    ``cost_model``: a file, a shipped model's name or ``this-machine`` as measured in this folder; by default chosen among
    those that ship. ``override``: a file of operator times. Raises as
    ``prepare_device_times``, and InputError when a file holds no model or no times.
    """
    overrides = load_overrides(override) if override else None
    named = str(cost_model or "")
    models = {named: load_operator_model(find_operator_model_file(named))} if named else load_shipped_models()
    return prepare_device_times(traces, device, models, overrides=overrides)


_OWN = MEASURED / "cost_models" / THIS_MACHINE / "operators.json"


def find_own_model(platform: Platform) -> str | None:
    """Return ``this-machine``, as for ``choose_times``, of that platform where its operators were measured in this folder."""
    return THIS_MACHINE if platform.name == THIS_MACHINE and _OWN.exists() else None


def find_operator_model_file(name: str) -> Path:
    """Return the file of an operator model by path or shipped name, or as measured here; InputError where there is none."""
    shipped = _OWN if name == THIS_MACHINE else SHIPPED_MODELS / name / "operators.json"
    if "/" not in name and shipped.exists():
        return shipped
    if not Path(name).exists():
        raise _refuse_name(name, "cost model", "operators.json", [], "fit")
    return Path(name)


def _refuse_name(name: str, what: str, file: str, others: Iterable[str], command: str) -> InputError:
    """Return the error of a model that is neither among the shipped ones nor a file."""
    words = [*(path.parent.name for path in sorted(SHIPPED_MODELS.glob(f"*/{file}"))), *others]
    return InputError(
        f"no {what} is called {name!r}, and there is no such file",
        fix=f"{suggest(name, words)}use one of {', '.join(words)}, or a file of `trioflow {command}`",
    )
