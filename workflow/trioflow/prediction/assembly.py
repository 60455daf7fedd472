"""How a plan's step is put together, once for all: times of operators, task graph, collectives, warnings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from trioflow.base.arguments import check_argument, check_instance, check_names, show_fields
from trioflow.base.derived import derived
from trioflow.base.errors import InputError, PlanError
from trioflow.base.experiments import Plan
from trioflow.base.plugins import load_plugin
from trioflow.costmodel.choices import MEASURED, choose_times, find_collectives, find_own_model, load_collectives
from trioflow.costmodel.collectives.platform import PlatformCollectives
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.hardware.machine import Device, DeviceSheet, Platform
from trioflow.hardware.platform import OFFLOAD_RATES, describe_unmeasured
from trioflow.network.across_nodes import describe_inter_node, has_several_nodes, open_platform
from trioflow.network.collectives import CollectiveCost, LinkCollectives, scale_to_links
from trioflow.parallel.extrapolate import extrapolate, release_sends
from trioflow.parallel.model_graph import ModelGraph
from trioflow.parallel.plan import AS_TRACED, choose_plan, cut_batch, read_stages
from trioflow.parallel.reference import silence_messages
from trioflow.parallel.schedules.table import TRAIN
from trioflow.parallel.splits.pipeline import BALANCES
from trioflow.parallel.splits.routing import read_routing, set_routing
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.answer import Prediction, predict_step
from trioflow.prediction.step import (
    CLOSED_FORM,
    DEFAULTS,
    SESSION,
    Options,
    Step,
    choose_counts,
    extend_step,
    list_rank_scales,
    read_session,
    scale_operators,
)
from trioflow.trace import store
from trioflow.trace.language.sizes import Configuration, Network
from trioflow.trace.store import Trace, language_models, load_trace, refuse_step

if TYPE_CHECKING:
    from trioflow.prediction.keywords import Keywords

Model = Configuration | Network
"""What traces are made of: a language model, or another library's network."""
Traces = str | Path | Trace | Model | DeviceTimes | Sequence[str | Path | Trace]
"""What a prediction starts from: a trace or its name, several of one workload at other batches, a model, or
traces that have the device's times already, with their cost model."""


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
    return predict_step(prepare_step(model or traces, made, platform, batch=batch, options=chosen))


def cut_micro_batches(
    model: Model | None, plan: Plan, batch: int | None, samples: int | None = None, mode: str = TRAIN
) -> Plan:
    """Return a plan with micro-batches of so many samples; by default of one for a decoder that trains under a plan that takes that.

    ``model``: what `find_model` returns.
    Raises PlanError where the batch does not divide into those that were asked for.
    """
    if batch is None or (samples is None and (mode != TRAIN or not isinstance(model, Configuration))):
        return plan
    try:
        return cut_batch(plan, batch, samples or 1)
    except PlanError:
        if samples is None:
            return plan
        raise


def read_keywords(
    plan: Plan | str | None, ranks: int | None, options: Options, changes: Mapping[str, Any]
) -> tuple[Plan, Options]:
    """Return the plan and the options of a question from Python; TrioflowError where they are unknown or do not go together.

    What both have (schedule, algorithms, chunks) is the plan's where it is a word or a number, else the options'.
    """
    check_instance("options", options, Options)
    of_plan, of_options = Plan.__dataclass_fields__, Options.__dataclass_fields__
    check_names(changes, of_plan.keys() | of_options, "option")
    columns = {
        name: value
        for name, value in changes.items()
        if name in of_plan and (name not in of_options or isinstance(value, str | int))
    }
    rest = {name: value for name, value in changes.items() if name not in columns}
    return choose_plan(plan, ranks, columns), replace(options, **rest)


def prepare_step(
    traces: Traces,
    plan: Plan,
    platform: Platform | str | Path,
    *,
    batch: int | None = None,
    options: Options = DEFAULTS,
) -> Step:
    """Put a plan's step together, with `predict`'s arguments; TrioflowError when anything of it does not fit."""
    check_instance("plan", plan, Plan, "make one by trioflow.named_plan or trioflow.make_plan")
    batch = batch if batch is None else check_argument("batch", batch, "int")
    platform = open_platform(platform, plan.ranks, **options.inter_node)
    options = replace(options, cost_model=options.cost_model or find_own_model(platform))
    if options.as_traced:
        return _prepare_traced(traces, plan, platform, options)
    if not isinstance(traces, DeviceTimes):
        traces, batch = _open_models(traces, plan, batch, options)
    times = time_operators(traces, platform.device.described, options)
    host = platform.host_of(plan, times.traces[0].facts.recipe.framework)
    batch = times.traces[0].facts.batch * plan.data if batch is None else batch

    def put_together(part: Plan, chosen: Options) -> Step:
        graph = build_graph(
            times,
            part,
            batch=batch * part.micro_batches // plan.micro_batches,
            host=host,
            options=chosen,
            device=platform.device,
        )
        return join_step(graph, times, platform, options)

    counts = choose_counts(plan, batch, len(times.traces[0].operators), options)
    if counts is None:
        return put_together(plan, options)
    more = put_together(replace(plan, micro_batches=counts[1]), options)
    same = replace(options, stages=more.graph.metadata.stages)
    fewer = put_together(replace(plan, micro_batches=counts[0]), same)
    return extend_step(fewer, more, plan, batch)


GRAPH_GROUP = "trioflow.graphs"
"""Entry points of what builds task graphs without a plan: functions of traces, ranks and the platform's host costs."""


def _prepare_traced(traces: Traces, plan: Plan, platform: Platform, options: Options) -> Step:
    """Put together what the ranks of a traced run do, on as many ranks as the plan has."""
    loaded = [silence_messages(trace) for trace in load_traces(traces)]
    times = time_operators(loaded, platform.device.described, options)
    build = load_plugin(GRAPH_GROUP, AS_TRACED, what="builder of task graphs")
    graph = build(times.traces, ranks=plan.ranks, host=platform.host)
    return join_step(graph, times, platform, options)


def join_step(graph: TaskGraph, times: DeviceTimes, platform: Platform, options: Options = DEFAULTS) -> Step:
    """Put a task graph of ``build_graph``, with the platform's host costs, together with the platform that runs it.

    Raises InputError when there is no such model of collectives, operator or rank, or a session does not anchor the
    step.
    """
    collectives = choose_collectives(platform, options)
    anchor = None
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


def time_operators(traces: Traces, device: DeviceSheet | str, options: Options = DEFAULTS) -> DeviceTimes:
    """Return traces with a device's times, and the operator model for it; errors as ``costmodel.choices.choose_times``."""
    if isinstance(traces, DeviceTimes):
        return traces
    loaded = load_traces(traces, **options.language_step)
    times = choose_times(loaded, device, options.cost_model, options.override)
    return replace(times, traces=[ModelGraph.of(trace) for trace in times.traces])


def _open_models(traces: Traces, plan: Plan, batch: int | None, options: Options) -> tuple[Traces, int | None]:
    """Return traces, those of language models made for the micro-batch that a plan runs, and the step's samples.

    Without ``batch`` every micro-batch of a language model has one sample.
    """
    model = find_model(traces)
    if model is None:
        return load_traces(traces, **options.language_step, fixed=True), batch
    samples = 1 if batch is None else count_samples(plan, batch)
    step = {"batch": samples, **options.language_step}
    trace: Trace = language_models().trace_of(model, step)
    return trace, samples * plan.data * plan.pieces if batch is None else batch


def find_model(traces: Traces) -> Model | None:
    """Return the model that traces are to be made of, by name or configuration; None for traces that are there."""
    if isinstance(traces, Sequence) and not isinstance(traces, str) and len(traces) == 1:
        traces = traces[0]
    if isinstance(traces, str | Path):
        return store.find_model(traces)
    return traces if isinstance(traces, Model) else None


def count_samples(plan: Plan, batch: int) -> int:
    """Return for how many samples a language model's trace is made: a micro-batch's, 1 where they are not of one size."""
    parts = plan.data * plan.pieces
    return 1 if batch % parts else batch // parts


def load_traces(traces: Traces, *, fixed: bool = False, **step: Any) -> list[Trace]:
    """Return traces, loaded by name or, with ``step``, of a language model.

    ``fixed``: whether a step may not be asked for of traces that are loaded already. Raises TraceError as
    ``trace.store.load_trace``; InputError when there is no trace.
    """
    if isinstance(traces, DeviceTimes):
        return traces.traces
    if isinstance(traces, Model):
        return [language_models().trace_of(traces, step)]
    several = [traces] if isinstance(traces, str | Path | Trace) else traces
    if not several:
        raise InputError("no traces", fix="give one trace or more")
    for one in several if fixed else ():
        if isinstance(one, Trace):
            refuse_step(step, one.facts.workload)
    return [one if isinstance(one, Trace) else load_trace(one, **step) for one in several]


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
