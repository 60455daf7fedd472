"""Build the task graph of every rank from the trace of one and a plan; `extrapolate` is the door.

In: the operators of one rank's step with their times on the device that is asked about (recorded, or predicted by
``costmodel.choices``), a plan, a batch and a platform. Out: a `TaskGraph` (of representatives where ranks do the
same) whose metadata hold memory and how far compute may be off. Collectives and messages have sizes here and no times:
``network`` gives them.

Eager sends (`release_sends`) are messages that move once they are sent, whether or not their receiver waits for them.
MPI and gloo keep small messages in a buffer, NCCL what its channels' buffers hold where it does not write into the
receiver's memory. A receive becomes an arrival, matched with the send, beside its rank's work, and in its place a wait
of no length. A sender is busy until its message has arrived; arrivals from one sender keep their order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field, structs

from trioflow.base.columns import ABSENT, Columns
from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import find_rank_program, find_traits
from trioflow.base.precision_recipes import MEGATRON
from trioflow.base.provenance import read_json
from trioflow.base.runs import find_firsts, number_keys
from trioflow.base.units import format_bytes, ns_to_s, s_to_ns
from trioflow.costmodel.choices import choose_times, find_launch_s, mention_launches, times_interval
from trioflow.costmodel.features import OperatorModel
from trioflow.costmodel.uncertainty import (
    ALONE,
    BATCH,
    COLLECTIVES,
    CONTEXT,
    PIPELINE,
    UNANCHORED,
    Anchoring,
    StepAnchor,
    Uncertainty,
    combine_intervals,
    describe_anchor,
    least_half_width,
)
from trioflow.hardware.machine import Device
from trioflow.hardware.platform import load_platform
from trioflow.parallel.memory.peak import (
    LIKELY,
    count_needed,
    count_room,
    estimate_memory,
    find_fullest,
    load_survival,
    recall_memory,
    take_curves,
)
from trioflow.parallel.model_graph import ModelGraph, of_model
from trioflow.parallel.plan import Stages, check_plan, choose_stages, describe_plan, fit_framework
from trioflow.parallel.programs.builder import ProgramBuilder, RankProgram
from trioflow.parallel.programs.offload import check_host, plan_activations, size_update
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.programs.stages import StageWorks
from trioflow.parallel.programs.units import UnitRank
from trioflow.parallel.reference import OperatorTimes, PricedModel, Reference, choose_reference, without_communication
from trioflow.parallel.schedules.build import plan_schedule
from trioflow.parallel.schedules.table import FORWARD_ONLY, TRAIN, WORDS, Schedule, check_mode
from trioflow.parallel.splits.context import time_rings
from trioflow.parallel.splits.pipeline import BALANCES
from trioflow.parallel.splits.sharding import describe_units, partition_stages, split_updates
from trioflow.parallel.splits.tensor_parallel import split_for_plan
from trioflow.parallel.splits.tensor_split import TensorSplit, describe_routing, prepare_split
from trioflow.parallel.task_graph import GraphMetadata, TaskGraph, TimesOrigin
from trioflow.tables import PHASES
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace, load_trace

ARRIVALS = "arrivals"
"""What streams of arrivals are called; the second and later ones of a rank have a number behind it."""


def release_sends(graph: TaskGraph, largest_bytes: float) -> TaskGraph:
    """Return a graph, folded as this one, whose messages of at most ``largest_bytes`` and of no given duration are eager."""
    if not largest_bytes or "recv" not in graph.kinds:
        return graph
    if graph.fold is not None and graph.fold.coarser is None:
        return TaskGraph.of_fold(structs.replace(graph.fold, graph=_release(graph.fold.graph, largest_bytes)))
    return _release(graph, largest_bytes)


def _release(graph: TaskGraph, largest_bytes: float) -> TaskGraph:
    tasks = graph.task_columns
    eager = (
        tasks["kind"].isin(["recv"]) & (tasks["message_bytes"] != ABSENT) & (tasks["message_bytes"] <= largest_bytes)
    )
    # Each arrival stands before its wait.
    place = np.arange(tasks.rows) + np.cumsum(eager)
    wait = place[eager]
    new = tasks.take(np.repeat(np.arange(tasks.rows), 1 + eager))
    changed = {name: new[name].copy() for name in ("match_id", "peer", "message_bytes", "duration_s")}
    for name, column in changed.items():
        column[wait] = 0.0 if name == "duration_s" else ABSENT
    released = new.assign(
        task_id=np.arange(new.rows),
        stream=new["stream"].put(wait - 1, _name_arrivals(tasks.take(eager))),
        kind=new["kind"].put(wait, ["host"] * len(wait)),
        name=new["name"].put(wait, [f"wait for {name}" for name in tasks["name"].take(eager).tolist()]),
        **changed,
    )
    waits = graph.wait_columns
    waiting, awaited = np.append(place[waits["task_id"]], wait), np.append(place[waits["depends_on"]], wait - 1)
    order = np.argsort(waiting, kind="stable")
    sorted_waits = Columns({"task_id": waiting[order], "depends_on": awaited[order]})
    return TaskGraph(released, sorted_waits, graph.metadata)


def _name_arrivals(receives: Columns) -> list[str]:
    """Return the stream of each arrival: one for each stream and sender of a rank, numbered in the order in which they come first."""
    rank, stream, peer = receives["rank"], receives["stream"], receives["peer"]
    lane = number_keys((rank * len(stream.words) + stream.codes) * (int(peer.max(initial=0)) + 2) + peer + 1)
    of_rank = rank[find_firsts(lane)]  # of each lane
    order = np.argsort(of_rank, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order)) - np.searchsorted(of_rank[order], of_rank[order])
    return [f"{ARRIVALS} {n}" if n else ARRIVALS for n in number[lane].tolist()]


def holds_host(plan: Plan, framework: str) -> bool:
    """Return whether the host waits for its device behind each message (Megatron Core, ``batch_p2p_sync``)."""
    return framework == MEGATRON and find_traits(plan.schedule).waits == "each"


class NoRoomError(PlanError):
    """A plan's ranks more likely run out of memory than not; ``memory``: what they hold, as of ``memory.peak``."""

    def __init__(self, memory: list[dict[str, Any]]) -> None:
        super().__init__("the plan more likely runs out of memory than not")
        self.memory = memory


class _Step(Struct, frozen=True, kw_only=True):
    """What is asked for, once plan, batch and times to start from are settled."""

    given: list[ModelGraph]
    plan: Plan
    batch: int
    repeated: int  # samples that replicas run once more, to share the batch evenly
    sizes: list[int]  # samples of each micro-batch
    factors: list[float]  # the same, over the traced ones
    schedule: Schedule
    mode: str
    host: dict[str, float]  # the platform's costs [s]
    reference: Reference
    priced: PricedModel
    trace: ModelGraph  # the reference's, prepared for the plan's tensor parallelism
    split: TensorSplit
    times: list[OperatorTimes]  # for each micro-batch
    extrapolated: bool  # whether any operator's time is out of the model's range
    anchor: StepAnchor
    anchoring: Anchoring
    warnings: list[str] = field(default_factory=list)  # what was decided on the way


class _Written(Struct, frozen=True, kw_only=True):
    """The programs of all ranks, and what they were made of."""

    builder: ProgramBuilder
    works: StageWorks
    cut: list[list[str]]
    peaks: list[dict[str, Any]]  # of each rank's memory; none where they were not asked for

    @property
    def peak_bytes(self) -> int:
        """What the fullest rank holds; 0 where nobody asked [bytes]."""
        return int(find_fullest(self.peaks)["peak_bytes"]) if self.peaks else 0


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
    device: Device | None = None,
    must_fit: bool = False,
) -> TaskGraph:
    """Return what every rank does in one training step under a plan.

    Raises PlanError when the plan does not fit the model or the batch; NoRoomError when it ``must_fit`` the device's
    memory and more likely does not.

    ``traces``: one step of the whole model on one rank; further ones of the same workload at other batches help where
    micro-batches are smaller. ``batch``: samples of the whole step; by default every data-parallel replica runs the
    (first) trace's. ``host``: the platform's named host costs [s]; see the platform file's ``host``. ``stages``: units
    of each pipeline stage; or ``count``, for as many layers each; balanced by recorded time by default, by layers where
    ``time`` needs more than a rank's allocator may hold of the ``device``, and ``count`` less. ``schedule``:
    actions of the pipeline's ranks, imported for instance; the plan's own by default. ``mode``: one of
    ``schedules.table.MODES``: the whole step, forward alone, or all but the optimizer. ``last_batch``: whether a batch
    that replicas cannot share evenly is what is left of a data set: ``DistributedSampler`` then repeats samples until
    they can. ``anchoring``: how operators timed one by one beside a measured step are brought to it; others stay.
    ``memory``: whether each rank's peak of memory is worked out too; the metadata hold none without.

    Input copies, the data loader and the first iteration are not part of the step. Messages and sharded operators are
    sized by the first, largest micro-batch, times are those of each.
    """
    given = [without_communication(ModelGraph.of(t)) for t in ([traces] if isinstance(traces, Trace) else traces)]
    plan = fit_framework(plan, given[0])
    step = _settle(given, plan, model, batch, schedule, mode, last_batch, anchoring, dict(host or {}))
    cut = choose_stages(step.trace, plan, stages)
    written = _write_programs(step, cut, memory, device)
    limit_bytes = load_survival().find_limit(LIKELY, count_room(plan, device))
    if stages is None and plan.pipeline > 1 and count_needed(written.peaks) > limit_bytes:
        even_cut = choose_stages(step.trace, plan, BALANCES[1])
        even = written if even_cut == cut else _write_programs(step, even_cut, memory, device)
        if even.peak_bytes < written.peak_bytes:
            step.warnings.append(
                "stages have as many layers each: balanced by time the fullest rank would hold "
                f"{format_bytes(written.peak_bytes)}, more than its device (--stages time does so)"
            )
            written = even
    if must_fit and count_needed(written.peaks) > limit_bytes:
        raise NoRoomError(written.peaks)
    return written.builder.kind.complete(written.builder.build(_describe_graph(step, written)))


def extrapolate_experiment(
    trace_folders: Sequence[str | Path],
    operator_model: str | Path,
    partition_file: str | Path,
    platform: str | Path,
    experiment: Mapping[str, Any],
    plan: Mapping[str, Any],
    folder: str | Path,
) -> None:
    """Write the task graph of one experiment into a folder; ``experiment`` and ``plan`` are rows of the tables."""
    chosen, machine = Plan(**plan), load_platform(Path(platform))
    traces = [load_trace(trace) for trace in trace_folders]
    times = choose_times(traces, machine.device.described, operator_model, None)
    graph = extrapolate(
        times.traces,
        chosen,
        times.model,
        batch=int(experiment["batch"]),
        host=machine.host,
        stages=read_json(partition_file)["stages"].get(str(chosen.stages)),
    )
    origin = TimesOrigin(times.model_text, times.confidence, list(times.warnings))
    graph.metadata = replace(graph.metadata, experiment=str(experiment["experiment"]), operator_times=origin)
    graph.save(folder)


def _settle(
    given: list[ModelGraph],
    plan: Plan,
    model: OperatorModel,
    batch: int | None,
    schedule: Schedule | None,
    mode: str,
    last_batch: bool,
    anchoring: Anchoring,
    host: dict[str, float],
) -> _Step:
    """Settle the batch, its micro-batches and their schedule; split the model and predict its operators."""
    batch = given[0].facts.batch * plan.data if batch is None else batch
    repeated = -batch % plan.data if last_batch and plan.replication == "ddp" else 0
    batch += repeated
    sizes = check_plan(plan, given[0], batch)
    check_mode(mode, plan)
    schedule = plan_schedule(plan, len(sizes), schedule, mode)
    reference = choose_reference(given, sizes[0])
    model, anchor = anchoring.change(reference.trace, model)
    priced = reference.price(model)
    trace = prepare_split(reference.trace, plan)
    factors = [n / trace.facts.batch for n in _kind_of_rank(plan).list_samples(plan, batch) or sizes]
    split = split_updates(trace, plan, split_for_plan(trace, plan))
    times, extrapolated = priced.predict_times(split, factors, find_launch_s(host, reference.trace.facts))
    times, split = time_rings(times, reference, split, factors, model)
    return _Step(
        given=given,
        plan=plan,
        batch=batch,
        repeated=repeated,
        sizes=sizes,
        factors=factors,
        schedule=schedule,
        mode=mode,
        host=host,
        reference=reference,
        priced=priced,
        trace=trace,
        split=split,
        times=times,
        extrapolated=extrapolated,
        anchor=anchor,
        anchoring=anchoring,
    )


def _write_programs(step: _Step, cut: list[list[str]], memory: bool, device: Device | None) -> _Written:
    """Write what every rank does in stages of some units, and what it holds."""
    trace, plan, split, factors = step.trace, step.plan, step.split, step.factors
    works = StageWorks(trace, plan, step.priced, step.schedule, factors, mode=step.mode)
    builder = _set_up_builder(step, works, cut)
    builder.add_ranks()
    peaks: list[dict[str, Any]] = []
    if memory and step.mode == TRAIN:
        peaks = recall_memory(trace, plan, factors)
    if memory and not peaks and trace.names_results:
        peaks = estimate_memory(trace, split, builder, factors, cut, device)
    return _Written(builder=builder, works=works, cut=cut, peaks=peaks)


def _set_up_builder(step: _Step, works: StageWorks, cut: list[list[str]]) -> ProgramBuilder:
    """Return the builder of the ranks' programs: the stages' work, and what replicas and the host share."""
    trace, plan, split, priced, host = step.trace, step.plan, step.split, step.priced, step.host
    kind = _kind_of_rank(plan)
    stages = works.build(split, cut)
    stages_of = [works.schedule.stages_of_rank(rank) for rank in range(plan.pipeline)]
    partitions = partition_stages(trace, plan, works.placed, stages_of)
    partition_s = [priced.predict_updates(split, one.shares) for one in partitions]
    of_stages = [work.update_shares for work in stages]
    updates_s = priced.predict_updates(split, of_stages)
    for work, update_s in zip(stages, updates_s, strict=True):
        work.update_s = update_s
    check_host(plan, host)
    moves, updates = plan.offload == "activations", plan.offload == "optimizer"
    return ProgramBuilder(
        plan=plan,
        kind=kind,
        operators=trace.operator_columns,
        times=step.times,
        schedule=works.schedule,
        stages=stages,
        split=split,
        recipe=trace.facts.recipe,
        # A CPU has no streams: PyTorch's are empty there, and every call runs to its end.
        streams=trace.facts.device != "cpu",
        tail_s=float(trace.facts.tail_s or 0.0) * (works.mode == TRAIN),
        host=host,
        messages_hold_host=holds_host(plan, trace.facts.recipe.framework),
        mode=works.mode,
        factors=works.factors,
        tied=works.tied,
        placed=works.placed,
        partitions=partitions,
        update_s=partition_s,
        shared=kind.share(works),
        offloaded=plan_activations(trace, split.operators) if moves else None,
        update_bytes_per_byte=size_update(trace, 1.0) if updates else 0.0,
    )


def _kind_of_rank(plan: Plan) -> type[RankProgram]:
    registered: type[RankProgram] | None = find_rank_program(plan)
    return registered or (UnitRank if plan.shards_units else StagedRank)


def _describe_graph(step: _Step, written: _Written) -> GraphMetadata:
    """Return the plan, the traces it starts from, how sure its compute is, and its memory."""
    plan, reference, trace = step.plan, step.reference, step.trace
    first = step.given[0]
    share = step.batch / first.facts.batch / plan.ranks
    gathered = f", {describe_units(reference.trace)}" if plan.shards_units else ""
    launch_s = find_launch_s(step.host, trace.facts)
    warnings = [*mention_launches(trace.facts.warnings, launch_s, trace.facts), *describe_anchor(step.anchor)]
    warnings += [*_list_warnings(step), *describe_routing(trace, plan), *step.warnings]
    baseline_s = float(first.facts.step_time_s) * share * _part_of_step(first, step.mode)
    return GraphMetadata(
        workload=reference.trace.facts.workload,
        plan=plan,
        plan_text=f"{describe_plan(plan, step.batch)}{gathered}{WORDS[step.mode]}",
        ranks=plan.ranks,
        batch=step.batch,
        traced_batch=reference.trace.facts.batch,
        trace_shares={str(b): part for b, part in reference.shares.items()},
        traced_phases_s={str(t.facts.batch): phase_times(t) for t in step.given},
        device_name=reference.trace.facts.device_name,
        mode=step.mode,
        baseline_step_time_s=baseline_s,
        uncertainty=_estimate_uncertainty(step, written),
        stages=[list(stage) for stage in written.cut],
        peak_memory_bytes=written.peak_bytes,
        memory_curves=take_curves(written.peaks),
        memory=written.peaks,
        warnings=warnings,
    )


def _estimate_uncertainty(step: _Step, written: _Written) -> Uncertainty:
    """Return how far the step may be off: of its compute by what it rests on, of the step by what was not recorded."""
    plan, facts, works, times = step.plan, step.trace.facts, written.works, step.times[0]
    rescaled = set(works.factors) != {1.0} or plan.tensor * plan.context > 1 or plan.sharding != "none"
    of_device, of_size = times_interval(facts), (1.0, 1.0)
    carried = of_device != (1.0, 1.0)
    if rescaled:
        distance = _rescale_distance(times, step.reference, step.anchor)
        of_size = step.priced.model.step_interval("rescale", distance)
    interval = combine_intervals(
        repeat_interval(facts),
        of_device,
        of_size,
        step.anchoring.interval(step.anchor),
        works.interval(float(times.device_s.sum() + times.host_s.sum())),
    )
    beyond = step.extrapolated or works.extrapolated or carried
    beyond |= {step.reference.batch} != set(step.sizes)
    confidence = "extrapolated" if beyond else "interpolated"
    least = _least_half_width(step.reference, plan, step.sizes, step.anchoring.way)
    first_call_s = float(step.reference.trace.facts.first_call_s or 0.0) * len(step.sizes)
    if not (rescaled or works.predicted or carried):
        confidence = "measured"
    return Uncertainty(interval, confidence, least, first_call_s)


def _least_half_width(reference: Reference, plan: Plan, sizes: Sequence[int], way_to_step: str) -> float:
    """Return the least half width of the step's interval, by what of the step was not recorded."""
    facts = reference.trace.facts
    departures = {
        BATCH: {reference.batch} != set(sizes),
        COLLECTIVES: plan.replicas > 1 or plan.tensor > 1,
        PIPELINE: plan.pipeline > 1,
        CONTEXT: plan.context > 2,
    }
    left = [name for name, leaves in departures.items() if leaves]
    alone = way_to_step == UNANCHORED or facts.measured_end_to_end_s is None
    if left and alone and facts.step_time_source == "busy":
        left.append(ALONE)
    kind, workload = str(facts.device or "cpu"), str(facts.model or facts.workload)
    return least_half_width(left, kind, workload, plan.ranks)


@of_model
def phase_times(trace: ModelGraph) -> dict[str, float]:
    """Return the traced time of each phase, host time included [s]."""
    operators = trace.operator_columns
    total = operators["device_ns"] + operators["cpu_ns"]
    return {phase: ns_to_s(float(total[operators["phase"].isin([phase])].sum())) for phase in PHASES}


def _part_of_step(trace: Trace, mode: str) -> float:
    times = phase_times(trace)
    run = {TRAIN: PHASES, FORWARD_ONLY: PHASES[:1]}.get(mode, PHASES[:2])
    whole = sum(times.values())
    return sum(times[phase] for phase in run) / whole if whole and mode != TRAIN else 1.0


def _rescale_distance(times: OperatorTimes, reference: Reference, anchor: StepAnchor) -> float:
    """Return the logarithm of the rescaled over the recorded compute; 0 where there is none."""
    recorded_ns = reference.operators["device_ns"].astype(np.float64)
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


def _list_warnings(step: _Step) -> list[str]:
    """Return what PyTorch itself runs otherwise, or not: samples run twice, few micro-batches, ones of different sizes."""
    sizes, stages, traits = step.sizes, step.schedule.stages, step.schedule.traits
    cases = {
        f"{len(sizes)} micro-batches on {stages} stages under 1f1b: Megatron-LM runs"
        " that, torch.distributed.pipelining (2.13) refuses it": traits.waits == "each" and len(sizes) < stages,
        f"micro-batches of {min(sizes)} and {max(sizes)} samples: torch.distributed.pipelining (2.13)"
        " receives into buffers of one size and would stop": len(set(sizes)) > 1 and not traits.one_process,
        f"{step.batch - step.repeated} samples on {step.plan.data} replicas: DistributedSampler repeats"
        f" {step.repeated}, so that each runs {step.batch // step.plan.data}": step.repeated,
    }
    return [text for text, holds in cases.items() if holds]
