"""The way of every prediction, in calls that are read one after the other.

`resolve` looks up what the question names, and gives each operator its time on the device (`question`).
`prepare_step` writes what every rank does (`build_graph`, by ``parallel.extrapolate``), with memory and uncertainty of
compute, and joins it with the platform and its collectives (`join_step`). ``answer.predict_step`` runs that, at the
ends of its interval too (``step``, by ``engine.simulate``).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from trioflow.base.arguments import show_fields
from trioflow.base.derived import derived
from trioflow.base.errors import InputError
from trioflow.base.experiments import Plan
from trioflow.base.plugins import load_plugin
from trioflow.costmodel.choices import MEASURED, find_collectives, load_collectives
from trioflow.costmodel.collectives.platform import PlatformCollectives
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.platform import OFFLOAD_RATES, describe_unmeasured
from trioflow.network.across_nodes import describe_inter_node, has_several_nodes
from trioflow.network.collectives import CollectiveCost, LinkCollectives, scale_to_links
from trioflow.parallel.extrapolate import extrapolate, release_sends
from trioflow.parallel.plan import AS_TRACED, read_stages
from trioflow.parallel.splits.pipeline import BALANCES
from trioflow.parallel.splits.routing import read_routing, set_routing
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.answer import Prediction, predict_step
from trioflow.prediction.question import (
    CLOSED_FORM,
    DEFAULTS,
    SESSION,
    Options,
    Question,
    Traces,
    cut_micro_batches,
    find_model,
    read_keywords,
    resolve,
)
from trioflow.prediction.step import Step, choose_counts, extend_step, list_rank_scales, read_session, scale_operators

if TYPE_CHECKING:
    from trioflow.prediction.keywords import Keywords


@show_fields(Options, Plan)
def predict(
    traces: Traces,
    plan: Plan | str | None = None,
    platform: Platform | str | Path = "",
    *,
    ranks: int | None = None,
    batch: int | None = None,
    options: Options = DEFAULTS,
    **changes: "Unpack[Keywords]",
) -> Prediction:
    """Predict a training step: what ``trioflow simulate`` answers.

    Raises TrioflowError when anything of it does not fit: one sentence with the likely fix.

    ``traces``: one step of the whole model on one rank, loaded or by name, or a language model's name or configuration;
    further ones of the same workload at other batches help where micro-batches are smaller. ``plan``: a name, such as
    ``"fsdp"``, on a number of ``ranks``, or a ``Plan``; without one a single rank, or what degrees among the keywords
    say. ``platform``: the machine, by name, by file or as an object with at least the plan's ranks. ``batch``: samples
    of the whole step, which a language model under a plan by name computes one by one; by default every replica runs the
    (first) trace's own batch. ``options``: everything else that is
    assumed. ``changes``: columns of the plan, such as ``tensor=4``, and fields of the options, such as
    ``precision="megatron-bf16"``.
    """
    made, chosen = read_keywords(plan, ranks, options, changes)
    model = find_model(traces)
    if not (isinstance(plan, Plan) or changes.keys() & {"accumulate", "micro_batches"} or chosen.last_batch):
        made = cut_micro_batches(model, made, batch, mode=chosen.mode)
    question = resolve(model or traces, made, platform, batch=batch, options=chosen)
    return predict_step(prepare_step(question))


def prepare_step(question: Question) -> Step:
    """Write what every rank does, and put it together with the platform; TrioflowError where plan, model and batch do not fit."""
    times, plan, batch, options = question.times, question.plan, question.batch, question.options
    if options.as_traced:
        build = load_plugin(GRAPH_GROUP, AS_TRACED, what="builder of task graphs")
        return join_step(build(times.traces, ranks=plan.ranks, host=question.platform.host), question)

    def put_together(part: Plan, chosen: Options) -> Step:
        graph = build_graph(
            times,
            part,
            batch=batch * part.micro_batches // plan.micro_batches,
            host=question.host,
            options=chosen,
            device=question.platform.device,
        )
        return join_step(graph, question)

    counts = choose_counts(plan, batch, times.traces[0].operator_columns.rows, options)
    if counts is None:
        return put_together(plan, options)
    more = put_together(replace(plan, micro_batches=counts[1]), options)
    same = replace(options, stages=more.graph.metadata.stages)
    fewer = put_together(replace(plan, micro_batches=counts[0]), same)
    return extend_step(fewer, more, plan, batch)


GRAPH_GROUP = "trioflow.graphs"
"""Entry points of what builds task graphs without a plan: functions of traces, ranks and the platform's host costs."""


def join_step(graph: TaskGraph, question: Question) -> Step:
    """Put a task graph of ``build_graph``, with the platform's host costs, together with the platform that runs it.

    Raises InputError when there is no such model of collectives, operator or rank, or a session does not anchor the
    step.
    """
    times, platform, options = question.times, question.platform, question.options
    collectives, anchor = choose_collectives(platform, options), None
    if options.anchor == SESSION:
        path = options.session or _find_session(graph.metadata.workload)
        anchor = read_session(path, graph.metadata, times.traces, platform)
    corrections = platform.corrections
    compute = [("*", corrections["compute"])] if "compute" in corrections else []
    if options.operator_scales or compute:
        graph = scale_operators(graph, [*options.operator_scales, *compute])
    if options.slow_ranks:
        scales = list_rank_scales(options.slow_ranks, graph.metadata.ranks)
        options = replace(options, compute_scale=[*scales, *[1.0] * (platform.ranks - len(scales))])
    warnings = [*options.what_if, *times.warnings, *_list_doubts(graph, platform, collectives, options)]
    slower = options.communication_scale * corrections.get("communication", 1.0)
    options = replace(options, communication_scale=slower)
    return Step(
        release_sends(graph, platform.eager_send_bytes),
        platform,
        collectives,
        times.traces,
        options,
        times.model_text,
        times.confidence,
        tuple(warnings),
        anchor,
    )


def _find_session(workload: str) -> Path:
    """Return the session that measured a workload in this folder; InputError when there is none."""
    path = MEASURED / "calibration" / workload / "session.json"
    if not path.exists():
        raise InputError(
            f"no session of {workload} was measured in this folder",
            file=path,
            fix="run `make reproduce`, give the session's file, or leave the anchor out",
        )
    return path


def build_graph(
    times: DeviceTimes,
    plan: Plan,
    *,
    batch: int | None = None,
    host: Mapping[str, float] | None = None,
    options: Options = DEFAULTS,
    device: Device | None = None,
) -> TaskGraph:
    """Return what every rank does in a plan's step; PlanError when the plan does not fit the model or the batch."""
    stages = options.stages
    if stages is not None and plan.stages == 1:
        raise InputError("stages of a plan without a pipeline", fix="leave them out")
    if isinstance(stages, str) and stages not in BALANCES:
        stages = read_stages(stages)
    routing = read_routing(options.routing, options.seed)
    return extrapolate(
        [set_routing(trace, routing) for trace in times.traces],
        plan,
        times.model,
        batch=batch,
        host=host,
        stages=stages,
        schedule=options.schedule,
        mode=options.mode,
        last_batch=options.last_batch,
        anchoring=options.anchoring,
        memory=options.memory,
        device=device,
    )


def choose_collectives(
    platform: Platform, options: Options = DEFAULTS, method: str | None = None
) -> CollectiveCost | None:
    """Return the model of collectives, or None for the ring's closed form; the platform's own measured ones by default.

    Raises InputError when there is no such model, or it cannot predict by the method.
    """
    given = options.collectives
    if given == CLOSED_FORM:
        return None
    if given is not None and not isinstance(given, str | Path):
        return given
    return _open_collectives(platform, None if given is None else str(given), method)


@derived()
def _open_collectives(platform: Platform, given: str | None, method: str | None) -> CollectiveCost | None:
    path = find_collectives(platform, given)
    if path is None:
        return LinkCollectives(platform) if (given, method) == (None, None) and has_several_nodes(platform) else None
    found = load_collectives(path, method)
    if isinstance(found, PlatformCollectives):
        one_node = platform.ranks if platform.node_collectives else 1
        found = found.in_nodes_of(platform.ranks_per_node or one_node)
    return scale_to_links(found, platform) if _is_of(found, platform, given) else found


def doubt_collectives(collectives: CollectiveCost | None, platform: Platform, options: Options = DEFAULTS) -> list[str]:
    """Return what to say of measured collectives whose machine, or its links, is another one."""
    if collectives is None:
        return []
    doubts = [str(getattr(collectives, "warning", ""))]
    if not _is_of(collectives, platform, options.collectives):
        measured = getattr(collectives, "platform", options.collectives)
        doubts.append(
            f"the collectives given were measured on {measured}, and the platform is {platform.name}: "
            "their times are taken as they are"
        )
    return [doubt for doubt in doubts if doubt]


def _is_of(collectives: CollectiveCost, platform: Platform, given: CollectiveCost | str | Path | None) -> bool:
    """Return whether collectives are the platform's own, by the name that they were found or made under."""
    if given is None or not isinstance(given, str | Path):
        return True
    names = (platform.name, platform.node_collectives)
    return str(given) in names or getattr(collectives, "platform", None) in names


def _list_doubts(
    graph: TaskGraph, platform: Platform, collectives: CollectiveCost | None, options: Options
) -> list[str]:
    """Return what was never measured of links, collectives and host, where the step needs it."""
    sheet, sends = platform.device.sheet, bool(graph.kinds & {"collective", "send"})
    corrected = ", ".join(f"{key} {value:.3g}" for key, value in platform.corrections.items())
    guessed = any(key.startswith(OFFLOAD_RATES) for key in platform.unmeasured)
    unmeasured = (
        f"no measured collectives for {platform.name}: ring closed form over its data-sheet links",
        describe_unmeasured(platform),
    )
    doubts = [
        *(sheet.list_doubts() if sheet else ()),
        *((*platform.doubts, describe_inter_node(platform)) if sends else ()),
        *(unmeasured if sends and isinstance(collectives, LinkCollectives | None) else ()),
        f"measured runs corrected {platform.name}: {corrected} (docs/healthy.md)" if corrected else "",
        f"rates of the host of {platform.name} were never measured: peaks of data sheets"
        if graph.metadata.plan.offload != "none" and guessed
        else "",
        *doubt_collectives(collectives, platform, options),
    ]
    return [doubt for doubt in doubts if doubt]
