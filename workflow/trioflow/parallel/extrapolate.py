"""From the trace of one rank and a plan to the task graph of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.experiments import Plan
from trioflow.base.units import ns_to_s, s_to_ns
from trioflow.costmodel.device_times import host_times, mention_launches, times_interval
from trioflow.costmodel.interface import OperatorModel, looks_at_rows
from trioflow.costmodel.intervals import combine_intervals
from trioflow.costmodel.steps import (
    ALONE,
    BATCH,
    COLLECTIVES,
    PIPELINE,
    Anchoring,
    StepAnchor,
    describe_anchor,
    least_half_width,
)
from trioflow.costmodel.steps import NONE as UNANCHORED
from trioflow.parallel.memory.peak import estimate_memory, find_fullest, take_curves
from trioflow.parallel.plan import (
    Stages,
    check_plan,
    choose_stages,
    describe_plan,
    fit_vocabulary,
    micro_batch_sizes,
    replica_sizes,
)
from trioflow.parallel.programs.builder import ProgramBuilder, RankProgram
from trioflow.parallel.programs.offload import plan_activations, read_host_rates, size_update
from trioflow.parallel.programs.one_process import (
    GatherRank,
    ReplicaRank,
    build_replicas,
    share_host,
)
from trioflow.parallel.programs.sharded import PartitionedRank, UnitRank
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.programs.stages import StageWorks, stages_of_operators
from trioflow.parallel.programs.work import OperatorTimes
from trioflow.parallel.reference import (
    Reference,
    choose_reference,
    predict_operator_times,
    resize_batch,
    without_communication,
)
from trioflow.parallel.remembered import remembered
from trioflow.parallel.schedules.build import Schedule, plan_schedule
from trioflow.parallel.schedules.table import FORWARD_ONLY, TRAIN, WORDS, check_mode
from trioflow.parallel.splits.context import time_blocks
from trioflow.parallel.splits.expert_layers import describe_routing
from trioflow.parallel.splits.sharding import describe_units, partition_optimizer
from trioflow.parallel.splits.tensor_parallel import split_for_plan
from trioflow.parallel.splits.tensor_split import TensorSplit
from trioflow.parallel.splits.updates import predict_updates, split_updates
from trioflow.parallel.splits.vocabulary import prepare_split
from trioflow.parallel.task_graph import GraphMetadata, TaskGraph
from trioflow.tables import PHASES
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace


def extrapolate(
    traces: Trace | Sequence[Trace],
    plan: Plan,
    model: OperatorModel,
    *,
    batch: int | None = None,
    host: Mapping[str, float] | None = None,
    stages: Stages = None,
    schedule: Schedule | None = None,
    mode: str = TRAIN,
    last_batch: bool = False,
    anchoring: Anchoring = Anchoring(),  # noqa: B008
    memory: bool = True,
) -> TaskGraph:
    """Return what every rank does in one training step under a plan.

    Parameters
    ----------
    traces : Trace or sequence of Trace
        One step of the whole model on one rank; further ones of the same
        workload at other batches help where micro-batches are smaller.
    batch : int, optional
        Samples of the whole step; by default every data-parallel replica runs
        the (first) trace's own batch.
    host : mapping, optional
        The platform's named host costs [s]; see the platform file's ``host``.
    stages : sequence of sequence of str or str, optional
        Units of each pipeline stage; or ``count``, for as many layers each;
        balanced by recorded time by default.
    schedule : Schedule, optional
        Actions of the pipeline's ranks, imported for instance; the plan's own
        schedule by default.
    mode : str, optional
        One of ``schedules.table.MODES``: the whole step, forward alone, or all but the
        optimizer.
    last_batch : bool, optional
        Whether a batch that replicas cannot share evenly is what is left of a
        data set: ``DistributedSampler`` then repeats samples until they can.
    anchoring : Anchoring, optional
        How operators that were timed one by one, beside a measured step, are
        brought to that step; other traces stay as they are.
    memory : bool, optional
        Whether each rank's peak of memory is worked out too; the graph's metadata hold none without.

    Raises
    ------
    PlanError
        When the plan does not fit the model or the batch.

    Notes
    -----
    Input copies, the data loader and the first iteration are not part of the
    step. Sizes of messages and of sharded operators are those of the first,
    largest micro-batch where micro-batches differ, times those of each.
    """
    given = [without_communication(t) for t in ([traces] if isinstance(traces, Trace) else traces)]
    plan = fit_vocabulary(plan, given[0])
    batch = given[0].facts.batch * plan.data if batch is None else batch
    repeated = -batch % plan.data if last_batch and plan.replication == "ddp" else 0
    batch += repeated
    check_plan(plan, given[0], batch)
    check_mode(mode, plan)
    sizes = micro_batch_sizes(plan, batch)
    schedule = plan_schedule(plan, len(sizes), schedule, mode)
    reference = choose_reference(given, sizes[0])
    model, anchor = anchoring.change(reference.trace, model)
    trace = prepare_split(reference.trace, plan)
    replicas = replica_sizes(plan, batch) if plan.replication == "dp" else []
    # Of DataParallel, each replica's own samples and the whole batch of the loss.
    counts = [*replicas, batch] if replicas else sizes
    factors = [count / trace.facts.batch for count in counts]
    whole = split_for_plan(trace, plan)
    split = split_updates(trace, plan, whole)
    launch_s = float((host or {}).get("launch_s", 0.0))
    operators = (whole.operators, split.operators)
    times, extrapolated = _predict_times(reference, operators, factors, model, launch_s)
    times, split = _time_rings(times, reference, split, factors, model)
    cut = choose_stages(trace, plan, stages)
    works = StageWorks(trace, plan, model, schedule, factors, mode=mode)
    builder = _set_up_builder(works, split, cut, reference, times, replicas, dict(host or {}))
    builder.add_ranks()
    peaks = []
    if memory:
        stage_of, _ = stages_of_operators(trace, cut)
        peaks = estimate_memory(trace, split.operators, builder, factors, stage_of)
    rescaled = set(factors) != {1.0} or plan.tensor * plan.context > 1 or plan.sharding != "none"
    extrapolated |= works.extrapolated or {reference.batch} != set(sizes)
    operators_s = float(times[0].device_s.sum() + times[0].host_s.sum())
    added = anchoring.interval(anchor), works.interval(operators_s)
    distance = _rescale_distance(times[0], reference, anchor) if rescaled else None
    interval, confidence = _certainty(trace, model, distance, added, works.predicted, extrapolated)
    warnings = [*mention_launches(trace.facts.warnings, launch_s), *describe_anchor(anchor)]
    warnings += [*_size_warnings(schedule, sizes), *_repeat_warnings(repeated, batch, plan)]
    warnings += describe_routing(trace, plan)
    graph = builder.build(
        replace(
            _describe_step(given, reference, plan, batch, mode),
            compute_interval=interval,
            compute_confidence=confidence,
            least_half_log=_least_half_width(reference, plan, sizes, anchoring.way),
            stages=[list(stage) for stage in cut],
            peak_memory_bytes=find_fullest(peaks)["peak_bytes"] if peaks else 0,
            memory_curves=take_curves(peaks),
            memory=peaks,
            warnings=warnings,
        )
    )
    return share_host(graph) if replicas or plan.tensor_style == "gather" else graph


def _set_up_builder(
    works: StageWorks, split: TensorSplit, cut: list[list[str]], reference: Reference,
    times: list[OperatorTimes], replicas: list[int], host: dict[str, float],
) -> ProgramBuilder:  # fmt: skip
    """Return the builder of the ranks' programs: the stages' work, and what replicas and the host share."""
    trace, plan, model = works.trace, works.plan, works.model
    partition, partition_s = None, []
    if plan.sharding == "zero1":
        partition = partition_optimizer(trace, plan.replicas)
        partition_s = predict_updates(reference.operators, split.operators, partition.shares, model)
    stages = works.build(split, cut)
    of_stages = [work.update_shares for work in stages]
    updates_s = predict_updates(reference.operators, split.operators, of_stages, model)
    for work, update_s in zip(stages, updates_s, strict=True):
        work.update_s = update_s
    moves, updates = plan.offload == "activations", plan.offload == "optimizer"
    return ProgramBuilder(
        plan=plan, kind=_kind_of_rank(plan), operators=trace.operators, times=times, schedule=works.schedule, stages=stages,
        split=split, tail_s=float(trace.facts.tail_s or 0.0) * (works.mode == TRAIN), host=host,
        mode=works.mode, factors=works.factors, tied=works.tied, placed=works.placed,
        partition=partition, update_s=partition_s,
        replicas=build_replicas(trace, replicas, works.copies_s) if replicas else None,
        rates=read_host_rates(plan, host),
        offloaded=plan_activations(trace, split.operators) if moves else None,
        update_bytes_per_byte=size_update(trace, 1.0) if updates else 0.0,
    )  # fmt: skip


def _kind_of_rank(plan: Plan) -> type[RankProgram]:
    if plan.tensor_style == "gather":
        return GatherRank
    if plan.replication == "dp":
        return ReplicaRank
    if plan.shards_units:
        return UnitRank
    return PartitionedRank if plan.sharding == "zero1" else StagedRank


def _describe_step(
    given: Sequence[Trace], reference: Reference, plan: Plan, batch: int, mode: str
) -> GraphMetadata:
    """Return the plan, the traces it starts from, and the baseline that shares out the work."""
    share = batch / given[0].facts.batch / plan.ranks
    gathered = f", {describe_units(reference.trace)}" if plan.shards_units else ""
    step_s = float(given[0].facts.step_time_s)
    return GraphMetadata(
        workload=reference.trace.facts.workload,
        plan=plan,
        plan_text=f"{describe_plan(plan, batch)}{gathered}{WORDS[mode]}",
        ranks=plan.ranks,
        batch=batch,
        traced_batches=sorted(reference.shares),
        trace_shares={str(b): part for b, part in reference.shares.items()},
        traced_phases_s={str(t.facts.batch): phase_times(t) for t in given},
        device_name=reference.trace.facts.device_name,
        mode=mode,
        baseline_step_time_s=step_s * share * _part_of_step(given[0], mode),
    )


def _certainty(
    trace: Trace, model: OperatorModel, distance: float | None,
    added: Iterable[tuple[float, float]], predicted: bool, extrapolated: bool,
) -> tuple[tuple[float, float], str]:  # fmt: skip
    """Return interval and confidence of the compute; ``distance`` is None where nothing was rescaled."""
    of_device = times_interval(trace.facts)
    carried = of_device != (1.0, 1.0)
    rescaled = distance is not None
    interval = combine_intervals(
        repeat_interval(trace.facts),
        of_device,
        model.step_interval("rescale", distance) if rescaled else (1.0, 1.0),
        *added,
    )
    return interval, _confidence(rescaled or predicted or carried, extrapolated or carried)


def _least_half_width(
    reference: Reference, plan: Plan, sizes: Sequence[int], way_to_step: str
) -> float:
    """Return the least half width of the step's interval, by what of the step was not recorded."""
    facts = reference.trace.facts
    ways = {
        BATCH: {reference.batch} != set(sizes),
        COLLECTIVES: plan.replicas > 1 or plan.tensor > 1,
        PIPELINE: plan.pipeline > 1,
    }
    left = [way for way, leaves in ways.items() if leaves]
    alone = way_to_step == UNANCHORED or facts.measured_end_to_end_s is None
    if left and alone and facts.step_time_source == "busy":
        left.append(ALONE)
    kind, workload = str(facts.device or "cpu"), str(facts.model or facts.workload)
    return least_half_width(left, kind, workload, plan.ranks)


def _predict_times(
    reference: Reference,
    operators: tuple[pd.DataFrame, pd.DataFrame],
    factors: Sequence[float],
    model: OperatorModel,
    launch_s: float,
) -> tuple[list[OperatorTimes], bool]:
    """Return the operators' times for each micro-batch, and whether any is out of the model's range.

    ``operators`` are those of a rank before replicas share out the optimizer's work, and after.
    """
    found = {
        f: _predict_for(reference, *operators, f, model, launch_s) for f in dict.fromkeys(factors)
    }
    return [found[factor][0] for factor in factors], any(beyond for _, beyond in found.values())


def _time_rings(
    times: list[OperatorTimes], reference: Reference, split: TensorSplit,
    factors: Sequence[float], model: OperatorModel,
) -> tuple[list[OperatorTimes], TensorSplit]:  # fmt: skip
    """Return times and split in which attentions that run in blocks take their blocks' times."""
    shares: dict[int, float] = {}
    timed = []
    for one, factor in zip(times, factors, strict=True):
        device_s = one.device_s.copy()
        for op, (first_s, other_s) in time_blocks(reference, split, factor, model).items():
            device_s[op] = first_s + other_s * (split.attentions[op].ranks - 1)
            shares.setdefault(op, first_s / device_s[op] if device_s[op] else 1.0)
        timed.append(replace(one, device_s=device_s))
    return (timed, replace(split, first_blocks=shares)) if shares else (times, split)


@remembered
def _predict_for(
    reference: Reference,
    whole: pd.DataFrame,
    operators: pd.DataFrame,
    factor: float,
    model: OperatorModel,
    launch_s: float,
) -> tuple[OperatorTimes, bool]:
    """Return the operators' times for one micro-batch, and whether any is out of the model's range."""
    host_s = host_times(reference.trace, reference.operators, launch_s)
    if operators is whole or not looks_at_rows(model):
        device_s, beyond = _predict_rows(reference, operators, factor, model)
    else:
        # Whatever the replicas, forward and backward are the same.
        device_s = np.empty(len(operators))
        updates = (operators["phase"] == "optimizer").to_numpy(dtype=bool)
        device_s[~updates], beyond = _predict_rows(
            reference, whole, factor, model, ("forward", "backward")
        )
        device_s[updates], beyond_too = _predict_rows(
            reference, operators, factor, model, ("optimizer",)
        )
        beyond |= beyond_too
    return OperatorTimes(device_s, host_s, reference.trace.facts.device == "cuda"), beyond


@remembered
def _predict_rows(
    reference: Reference, operators: pd.DataFrame, factor: float, model: OperatorModel,
    phases: Sequence[str] = PHASES,
) -> tuple[NDArray[np.float64], bool]:  # fmt: skip
    """Return the times of the operators of some phases, and whether any is out of the model's range."""
    target, recorded = resize_batch(operators, factor), reference.operators
    if phases != PHASES:
        chosen = operators["phase"].isin(phases).to_numpy(dtype=bool)
        target, recorded = target[chosen], recorded[chosen]
    return predict_operator_times(recorded, target, model)


@remembered
def phase_times(trace: Trace) -> dict[str, float]:
    """Return the traced time of each phase, host time included [s]."""
    total = trace.operators["device_ns"] + trace.operators["cpu_ns"]
    return {
        phase: ns_to_s(float(total[trace.operators["phase"] == phase].sum())) for phase in PHASES
    }


def _part_of_step(trace: Trace, mode: str) -> float:
    times = phase_times(trace)
    run = {TRAIN: PHASES, FORWARD_ONLY: PHASES[:1]}.get(mode, PHASES[:2])
    whole = sum(times.values())
    return sum(times[phase] for phase in run) / whole if whole and mode != TRAIN else 1.0


def _rescale_distance(times: OperatorTimes, reference: Reference, anchor: StepAnchor) -> float:
    """Return the logarithm of the rescaled over the recorded compute; 0 where there is none."""
    recorded_ns = reference.operators["device_ns"].to_numpy(np.float64)
    in_step = StepAnchor(s_to_ns(anchor.timer_s), anchor.scale).apply(recorded_ns)
    recorded_s, rescaled_s = ns_to_s(float(in_step.sum())), float(times.device_s.sum())
    return float(np.log(rescaled_s / recorded_s)) if recorded_s > 0 and rescaled_s > 0 else 0.0


def repeat_interval(facts: Facts) -> tuple[float, float]:
    """Return the 80 % interval of the traced step's repeats, relative to their median."""
    times = facts.step_times_s or []
    if len(times) < 3:
        return (1.0, 1.0)
    low, middle, high = np.quantile(times, [0.1, 0.5, 0.9])
    return (float(low / middle), float(high / middle))


def _confidence(rescaled: bool, extrapolated: bool) -> str:
    if not rescaled:
        return "measured"
    return "extrapolated" if extrapolated else "interpolated"


def _repeat_warnings(repeated: int, batch: int, plan: Plan) -> list[str]:
    if not repeated:
        return []
    return [
        f"{batch - repeated} samples on {plan.data} replicas: DistributedSampler repeats {repeated}, so that"
        f" each runs {batch // plan.data}"
    ]


def _size_warnings(schedule: Schedule, sizes: Sequence[int]) -> list[str]:
    """Warn where PyTorch itself cannot run so few micro-batches, or ones of different sizes."""
    warnings = []
    if schedule.name == "1f1b" and len(sizes) < schedule.stages:
        warnings.append(
            f"{len(sizes)} micro-batches on {schedule.stages} stages under 1f1b: Megatron-LM runs"
            " that, torch.distributed.pipelining (2.13) refuses it"
        )
    if len(set(sizes)) == 1 or schedule.name == "gpipe-recompute":
        return warnings
    return [
        *warnings,
        f"micro-batches of {min(sizes)} and {max(sizes)} samples: torch.distributed.pipelining (2.13)"
        " receives into buffers of one size and would stop",
    ]
