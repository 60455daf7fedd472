"""Public measured steps beside predictions of them, and beside what others would predict."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from trioflow import tables
from trioflow.base.errors import InputError, TrioflowError
from trioflow.base.provenance import read_json, read_table
from trioflow.base.units import ms_to_s
from trioflow.costmodel.features import OperatorModel, class_of_name, resize_batch
from trioflow.costmodel.uncertainty import (
    ALONE,
    ANCHOR_WAYS,
    BATCH,
    COLLECTIVES,
    PIPELINE,
    RESIDUAL_WAYS,
    SHIPPED,
    TIMER,
    UNANCHORED,
    AnchoredModel,
    StepResidual,
    anchor_step,
    spell_workload,
)
from trioflow.hardware.machine import find_device
from trioflow.parallel.schedules.build import is_schedule
from trioflow.report.attribution import CAUSES, GROWTH, Settings
from trioflow.report.scores import list_scaling
from trioflow.tables import FLOAT, INT, TEXT, column
from trioflow.trace.store import Trace

from trioflow_evaluation import DATA
from trioflow_evaluation.published.cases import PublishedRow, load_published_rows, rows_of_set
from trioflow_evaluation.published.prediction import PreparedCase, PublishedSource, prepare_case, published_name

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
                    **{f"{way}_s": judged[way] for way in ANCHOR_WAYS},
                }
            )
    return pd.DataFrame(rows, columns=ANCHORS.names)


def find_step_band(anchors: pd.DataFrame, workload: str, way: str = TIMER) -> tuple[float, float]:
    """Return the 80 % interval of a whole step predicted from its operators, relative to the prediction.

    The errors' quantiles on either side of 1, ``workload`` left out; 1 and 1 where fewer than
    ``FEWEST`` steps were judged.
    """
    others = anchors[anchors["workload"] != workload]
    if len(others) < FEWEST:
        return (1.0, 1.0)
    ratio = np.log(others["measured_s"] / others[f"{way}_s"])
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
    found = []
    for row in anchors.to_dict("records"):
        name = f"{row['device']}, {row['mode']}, {row['source_batch']} to {row['target_batch']}"
        for way, anchor in ((BATCH, TIMER), (ALONE, UNANCHORED)):
            error = row[f"{anchor}_s"] / row["measured_s"] - 1
            workload = spell_workload(row["workload"])
            found.append(StepResidual(way, "cuda", workload, name, 1, error))
    scaled = list_scaling(cases)
    errors = dict(zip(scaled["case"], 1 / (1 + scaled["error"]) - 1, strict=True))
    for row in cases[(cases["ranks"] > 1) & (cases["source_gpu"] != "")].to_dict("records"):
        error = errors.get(row["case"], row["predicted_s"] / row["measured_s"] - 1)
        way = way_of_plan(row["plan"])
        workload = spell_workload(row["workload"])
        found.append(StepResidual(way, "cuda", workload, row["case"], int(row["ranks"]), error))
    return found


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
        way = TIMER if trace.facts.measured_end_to_end_s is not None else UNANCHORED
        band = find_step_band(anchors, published_name(trace), way)
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
        "spread": measured.spread,
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


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step."""

    time_s: float
    source: str  # file that says it
    # Half the range of repeats over their median; None where the source gives one number only.
    spread: float | None = None


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
            rows += [(*head, way, float(times[way])) for way in (PROPORTIONAL, RESCALED)]
    return pd.DataFrame(rows, columns=CAUSES.names)


def _measure_growth(case: PreparedCase) -> pd.DataFrame:
    """Return the times of every phase and class on rank 0, by ``PROPORTIONAL`` and ``RESCALED`` [s]."""
    operators = case.reference.operators
    tasks = case.task_graph.tasks
    mine = tasks[(tasks["rank"] == 0) & tasks["op_id"].notna()]
    times_s = mine.groupby(mine["op_id"].astype(np.int64))["duration_s"].sum()
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
    found = frame.groupby("class")[[PROPORTIONAL, RESCALED]].sum()
    return found.sort_values(PROPORTIONAL, ascending=False, kind="stable")


def judge_anchors(source: Trace, target: Trace, model: OperatorModel, resized: pd.DataFrame) -> dict[str, Any]:
    """Return ``measured_s`` of a target's step and what each of ``ANCHOR_WAYS`` predicts from another batch's operators."""
    answers: dict[str, Any] = {"measured_s": float(target.facts.measured_end_to_end_s or 0.0)}
    for way in ANCHOR_WAYS:
        anchor = anchor_step(source, way)
        anchored = AnchoredModel(model, anchor).rescale(source.operators, resized)
        answers[way] = float(anchored["time_s"].sum())
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
    for one in sorted(residuals, key=lambda one: RESIDUAL_WAYS.index(one.way)):
        lines.append(f"{one.way}\t{one.device_kind}\t{one.workload}\t{one.case}\t{one.ranks}\t{one.error:.4f}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
