"""From the trace of one rank and a plan to the task graph of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.costmodel.interface import OperatorModel
from trioflow.costmodel.operators import load_operator_model
from trioflow.costmodel.timed_trace import times_interval
from trioflow.errors import PlanError
from trioflow.experiments import Plan
from trioflow.hardware.platform import load_platform
from trioflow.parallel.data_parallel import Bucket, build_buckets
from trioflow.parallel.memory import estimate_peak_memory
from trioflow.parallel.pipeline import assign_units, boundary_bytes, partition
from trioflow.parallel.plan import check_plan, describe_plan
from trioflow.parallel.program import OperatorTimes, ProgramBuilder, StageWork
from trioflow.parallel.reference import choose_reference
from trioflow.parallel.sizing import (
    predict_operator_times,
    resize_batch,
    without_communication,
)
from trioflow.parallel.task_graph import TaskGraph
from trioflow.parallel.tensor_parallel import TensorSplit, is_sharded, split_operators
from trioflow.provenance import read_json
from trioflow.tables import PHASES
from trioflow.trace.store import Trace, load_trace, pipeline_units, tensor_bytes
from trioflow.units import ns_to_s


def extrapolate(
    traces: Trace | Sequence[Trace],
    plan: Plan,
    model: OperatorModel,
    *,
    batch: int | None = None,
    host: Mapping[str, float] | None = None,
    stages: Sequence[Sequence[str]] | None = None,
) -> TaskGraph:
    """Return what every rank does in one training step under a plan.

    Parameters
    ----------
    traces : Trace or sequence of Trace
        One step of the whole model on one rank; further ones of the same
        workload at other batches help where micro-batches are smaller.
    plan : Plan
        Degrees, schedule, micro-batches, bucket limits.
    model : OperatorModel
        Rescales recorded times to other sizes.
    batch : int, optional
        Samples of the whole step; by default every data-parallel replica runs
        the (first) trace's own batch.
    host : mapping, optional
        The platform's named host costs [s]; see ``program.HOST_COSTS``.
    stages : sequence of sequence of str, optional
        Units of each pipeline stage; balanced by recorded time by default.

    Raises
    ------
    PlanError
        When the plan does not fit the model or the batch.

    Notes
    -----
    Input copies, the data loader and the first iteration are not part of the
    step. Micro-batches must be equal.
    """
    given = [without_communication(t) for t in ([traces] if isinstance(traces, Trace) else traces)]
    batch = int(given[0].facts["batch"]) * plan.data if batch is None else batch
    check_plan(plan, given[0], batch)
    samples = batch / (plan.data * plan.micro_batches)
    reference = choose_reference(given, samples)
    trace = reference.trace
    factor = samples / int(trace.facts["batch"])
    split = split_operators(trace, plan.tensor)
    target = resize_batch(split.operators, factor)
    device_s, extrapolated = predict_operator_times(reference.operators, target, model)
    times = OperatorTimes(
        device_s,
        np.array([ns_to_s(t) for t in reference.operators["cpu_ns"]]),
        trace.facts.get("device") == "cuda",
    )
    builder = ProgramBuilder(
        plan, trace.operators, times, float(trace.facts.get("tail_s", 0.0)), dict(host or {})
    )
    builder.sharded_updates = split.sharded_updates
    cut = _choose_stages(trace, plan, stages)
    works = _Works(trace, plan, model, factor)
    builder.add_ranks(_build_stages(trace, plan, split, works, cut))
    rescaled = factor != 1.0 or plan.tensor > 1
    of_device = times_interval(trace.facts)
    beyond = reference.batch != samples or works.extrapolated or of_device != (1.0, 1.0)
    rescaled_by = rescale_distance(device_s, reference.operators)
    interval = combine_intervals(
        repeat_interval(trace.facts),
        of_device,
        model.step_interval("rescale", rescaled_by) if rescaled else (1.0, 1.0),
        works.interval(float(times.device_s.sum() + times.host_s.sum())),
    )
    share = batch / int(given[0].facts["batch"]) / plan.ranks
    return builder.graph.build(
        {
            "workload": trace.facts["workload"],
            "plan": asdict(plan),
            "plan_text": describe_plan(plan, batch),
            "ranks": plan.ranks,
            "batch": batch,
            "traced_batches": sorted(reference.shares),
            "trace_shares": {str(b): part for b, part in reference.shares.items()},
            "traced_phases_s": {str(t.facts["batch"]): phase_times(t) for t in given},
            "device_name": trace.facts["device_name"],
            "baseline_step_time_s": float(given[0].facts["step_time_s"]) * share,
            "compute_interval": list(interval),
            "compute_confidence": _confidence(
                rescaled or works.predicted or of_device != (1.0, 1.0), beyond or extrapolated
            ),
            "stages": [list(stage) for stage in cut],
            "peak_memory_bytes": estimate_peak_memory(trace, plan, batch, cut),
            "warnings": list(trace.facts.get("warnings", [])),
        }
    )


def extrapolate_experiment(
    trace_folders: Sequence[str | Path],
    operator_model: str | Path,
    partition_file: str | Path,
    platform: str | Path,
    experiment: Mapping[str, Any],
    plan: Mapping[str, Any],
    folder: str | Path,
) -> None:
    """Build the task graph of one experiment and write it into a folder.

    Parameters
    ----------
    trace_folders : sequence of path
        Traces of the workload, the one that plans start from first.
    operator_model, partition_file, platform : path
        Fitted operator model, stages and platform file.
    experiment, plan : mapping
        Rows of ``experiments.tsv`` and ``plans.tsv``.
    folder : path
        Where ``tasks.parquet`` and ``dependencies.parquet`` go.
    """
    chosen = Plan(**plan)
    graph = extrapolate(
        [load_trace(path) for path in trace_folders],
        chosen,
        load_operator_model(operator_model),
        batch=int(experiment["batch"]),
        host=load_platform(Path(platform)).host,
        stages=read_json(partition_file)["stages"].get(str(chosen.pipeline)),
    )
    graph.metadata["experiment"] = experiment["experiment"]
    graph.save(folder)


def phase_times(trace: Trace) -> dict[str, float]:
    """Return the traced time of each phase, host time included [s]."""
    total = trace.operators["device_ns"] + trace.operators["cpu_ns"]
    return {
        phase: ns_to_s(float(total[trace.operators["phase"] == phase].sum())) for phase in PHASES
    }


def rescale_distance(device_s: NDArray[np.float64], operators: pd.DataFrame) -> float:
    """Return the logarithm of the rescaled over the recorded compute; 0 where there is none."""
    recorded_s, rescaled_s = ns_to_s(float(operators["device_ns"].sum())), float(device_s.sum())
    return float(np.log(rescaled_s / recorded_s)) if recorded_s > 0 and rescaled_s > 0 else 0.0


def repeat_interval(facts: Mapping[str, Any]) -> tuple[float, float]:
    """Return the 80 % interval of the traced step's repeats, relative to their median."""
    times = facts.get("step_times_s") or []
    if len(times) < 3:
        return (1.0, 1.0)
    low, middle, high = np.quantile(times, [0.1, 0.5, 0.9])
    return (float(low / middle), float(high / middle))


def combine_intervals(*intervals: tuple[float, float]) -> tuple[float, float]:
    """Return the interval of a product of factors with independent errors, around one."""
    spreads = [np.sqrt(sum(np.log(i[side]) ** 2 for i in intervals)) for side in (0, 1)]
    return (float(np.exp(-spreads[0])), float(np.exp(spreads[1])))


def _confidence(rescaled: bool, extrapolated: bool) -> str:
    if not rescaled:
        return "measured"
    return "extrapolated" if extrapolated else "interpolated"


def _choose_stages(
    trace: Trace, plan: Plan, stages: Sequence[Sequence[str]] | None
) -> list[list[str]]:
    """Return the units of each stage, checked against the model's."""
    if plan.pipeline == 1:
        return [list(pipeline_units(trace))]
    if stages is None:
        return partition(trace, plan.pipeline)
    given = [list(stage) for stage in stages]
    flat = [unit for stage in given for unit in stage]
    if len(given) != plan.pipeline or flat != list(pipeline_units(trace)):
        raise PlanError(
            f"the {len(given)} given stages are not the model's units in order, cut into {plan.pipeline}",
            fix=f"cut this list: {', '.join(pipeline_units(trace))}",
        )
    return given


def _stage_of_operators(
    trace: Trace, cut: list[list[str]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the stage and the unit of every operator."""
    if len(cut) == 1:
        nothing = np.zeros(len(trace.operators), dtype=np.int64)
        return nothing, nothing
    stage_of_unit = [stage for stage, units in enumerate(cut) for _ in units]
    unit_of = assign_units(trace)
    return np.array(stage_of_unit, dtype=np.int64)[unit_of], unit_of


def _build_stages(
    trace: Trace, plan: Plan, split: TensorSplit, works: _Works, cut: list[list[str]]
) -> list[StageWork]:
    """Return the work of each stage: its operators, messages, buckets and gradient upkeep."""
    phases = trace.operators["phase"].to_numpy()
    stage_of, unit_of = _stage_of_operators(trace, cut)
    size = tensor_bytes(trace)
    stages: list[StageWork] = []
    for stage in range(plan.pipeline):
        mine = stage_of == stage
        forward, backward, optimizer = (np.flatnonzero(mine & (phases == p)) for p in PHASES)
        work = StageWork(forward, backward, optimizer)
        in_stage = set(np.flatnonzero(mine).tolist())
        work.all_reduces = {
            op: round(sum(size[i] for i in tensors) * works.factor)
            for op, tensors in split.all_reduce_after.items()
            if op in in_stage
        }
        works.add_gradients(work, in_stage)
        if stage < plan.pipeline - 1:
            boundary = sum(len(units) for units in cut[: stage + 1])
            work.send_bytes = round(boundary_bytes(trace, unit_of, boundary) * works.factor)
        stages.append(work)
    return stages


@dataclass
class _Works:
    """What the stages' gradient work is computed from."""

    trace: Trace
    plan: Plan
    model: OperatorModel
    factor: float
    spread_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    predicted: bool = False
    extrapolated: bool = False

    def add_gradients(self, work: StageWork, in_stage: set[int]) -> None:
        """Give a stage its buckets, and the upkeep of its gradients under micro-batches."""
        plan, rules = self.plan, self.trace.facts.get("tensor_split", {})
        gradients = [
            {
                **g,
                "size_bytes": int(g["size_bytes"]) // (plan.tensor if is_sharded(g, rules) else 1),
            }
            for g in self.trace.facts.get("gradients", [])
            if int(g["ready_after_op_id"]) in in_stage
        ]
        if plan.data > 1:
            if not self.trace.facts.get("gradients"):
                raise PlanError(
                    f"plan {plan.plan}: the trace does not say which gradients there are",
                    fix="capture it again, or give trace.json the key gradients",
                )
            work.buckets = build_buckets(gradients, plan.first_bucket_bytes, plan.bucket_bytes)
            work.bucket_copy_s = [self._copy_s(b, "aten::mul") for b in work.buckets]
            work.bucket_return_s = [self._copy_s(b, "aten::copy_") for b in work.buckets]
            work.buffer_bytes = self._buffer_bytes(in_stage)
        sizes = [int(g["size_bytes"]) for g in gradients]
        if plan.micro_batches > 1:
            work.accumulate_s = self._elementwise_s("aten::add_", sizes, 2, plan.micro_batches - 1)
            work.scale_s = self._elementwise_s("aten::div_", sizes, 1)

    def _elementwise_s(self, name: str, sizes: Sequence[int], reads: int, times: int = 1) -> float:
        """Predict one upkeep of gradients, and remember how sure that is."""
        predicted = predict_elementwise(self.model, name, sizes, reads)
        self.spread_s[0] += times * float((predicted["time_s"] - predicted["low_s"]).sum())
        self.spread_s[1] += times * float((predicted["high_s"] - predicted["time_s"]).sum())
        self.predicted |= bool(sizes)
        self.extrapolated |= bool(predicted["extrapolated"].any())
        return float(predicted["time_s"].sum())

    def interval(self, operators_s: float) -> tuple[float, float]:
        """Return what the predicted upkeep adds to the interval of a stage's compute.

        Parameters
        ----------
        operators_s : float
            Time of all operators for one micro-batch [s].
        """
        step_s = operators_s * self.plan.micro_batches / self.plan.pipeline
        below, above = (spread / self.plan.pipeline / step_s for spread in self.spread_s)
        return max(1 - below, 0.01), 1 + above

    def _copy_s(self, bucket: Bucket, name: str) -> float:
        # Like an operator's table row, the target counts as read: a cache fetches it first.
        return self._elementwise_s(name, bucket.sizes_bytes, 2)

    def _buffer_bytes(self, in_stage: set[int]) -> list[int]:
        """Return the broadcasts of the stage's buffers, one an element type [bytes]."""
        size, tensors = tensor_bytes(self.trace), self.trace.tensors
        category, storage = tensors["category"].tolist(), tensors["storage_id"].tolist()
        dtype = tensors["dtype"].tolist()
        groups: dict[str, dict[int, int]] = {}
        for ids in self.trace.operators.loc[sorted(in_stage), "input_ids"]:
            for index in ids:
                if category[index] == "buffer":
                    groups.setdefault(dtype[index], {})[storage[index]] = size[index]
        return [sum(group.values()) for _, group in sorted(groups.items())]


def predict_elementwise(
    model: OperatorModel, name: str, sizes: Sequence[int], reads: int
) -> pd.DataFrame:
    """Predict one element-wise operator over tensors of some sizes [bytes]; see `OperatorModel`.

    Gradients are as large as parameters, and what happens to them is what the
    optimizer's own element-wise operators do: its class predicts them.
    """
    rows = pd.DataFrame(
        {
            "name": name, "phase": "optimizer", "module": "", "flop": 0, "kernels": 0,
            "read_bytes": [reads * size for size in sizes], "write_bytes": sizes,
            "input_shapes": [[[size // 4]] * reads for size in sizes],
            "output_shapes": [[[size // 4]] for size in sizes], "dtype": "float",
        }
    )  # fmt: skip
    return model.predict(rows)
