"""The way of every prediction, in calls that are read one after the other.

`resolve` looks up what the question names, and gives each operator its time on the device (`question`).
`prepare_step` writes what every rank does (`build_graph`, by ``parallel.extrapolate``), with memory and uncertainty of
compute, and joins it with the platform and its collectives (`join_step`). `predict_step` runs that, at the ends of its
interval too (``step``, by ``engine.simulate``). The answer is a `Prediction`: the step's time with an interval, its
parts, its memory and what it rests on. `draw_step` repeats a step with other lengths of its work: the distribution of
step times, who waits for whom, and which rank is late.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from msgspec import Struct

from trioflow import __version__
from trioflow.base.arguments import show_fields
from trioflow.base.columns import ABSENT, Columns
from trioflow.base.derived import derived
from trioflow.base.errors import InputError
from trioflow.base.experiments import Plan
from trioflow.base.plugins import load_plugin
from trioflow.base.units import format_apart, format_bytes, format_time
from trioflow.costmodel.choices import MEASURED, DeviceTimes, find_collectives, load_collectives
from trioflow.costmodel.collectives.platform import PlatformCollectives
from trioflow.costmodel.uncertainty import Spread, choose_spread, draw_normals, find_worst, load_calibration
from trioflow.engine.program import Floats, Ints
from trioflow.engine.result import Drawn, DrawnGraph, Result, Summary, check_size
from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.platform import OFFLOAD_RATES, describe_unmeasured
from trioflow.network.across_nodes import describe_inter_node, has_several_nodes
from trioflow.network.collectives import CollectiveCost, LinkCollectives, scale_to_links
from trioflow.parallel.extrapolate import extrapolate, release_sends
from trioflow.parallel.memory.peak import DOUBTED, LIKELY, describe_probability
from trioflow.parallel.plan import AS_TRACED, read_stages
from trioflow.parallel.schedules.table import TRAIN
from trioflow.parallel.splits.pipeline import BALANCES, name_balance
from trioflow.parallel.splits.tensor_split import read_routing, set_routing
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.breakdown import (
    DEPTH,
    build_breakdown,
    describe_rates,
    describe_waits,
    doubt_rate,
    name_group,
    split_step,
)
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
from trioflow.prediction.step import (
    Simulated,
    Step,
    choose_counts,
    extend_step,
    list_rank_scales,
    read_session,
    scale_operators,
)
from trioflow.tables import flatten

if TYPE_CHECKING:
    from trioflow.prediction.keywords import Keywords
if TYPE_CHECKING:
    import pandas as pd


_QUANTILES = (("low_s", 0.1), ("median_s", 0.5), ("high_s", 0.9))
_STEP, _RANK, _MICRO_BATCH, _PASS, _EXCHANGE, _OPERATOR = range(6)


class Draws(Struct, frozen=True, eq=False):
    """A step in all its draws.

    ``step_s``: of consecutive steps of a run, with one seed comparable draw by draw between plans [draws] [s].
    ``source``: where the spread comes from, in words. ``waits``: of each degree whose ranks meet: exchanges of a step,
    what a member waits for the others at one (wait_s: mean over draws and members), and without any spread
    (steady_wait_s). ``late``: of each rank the share of its exchanges in which others waited for it.
    """

    step_s: Floats
    seed: int
    spread: Spread
    source: str
    waits: list[dict[str, Any]]
    late: list[dict[str, Any]]

    @property
    def expected_s(self) -> float:
        """Mean over the draws [s]."""
        return float(self.step_s.mean())

    def beats(self, other: "Draws") -> float:
        """Return the share of draws in which this step is faster, ties by halves; InputError when drawn otherwise."""
        if (self.seed, len(self.step_s)) != (other.seed, len(other.step_s)):
            raise InputError("two steps were drawn apart", fix="draw both with one seed, as often")
        difference_s = self.step_s - other.step_s
        return float((difference_s < 0).mean() + (difference_s == 0).mean() / 2)

    def to_dict(self) -> dict[str, Any]:
        """Return the draws as ``trioflow simulate --draws --json`` prints them."""
        values = {name: float(np.quantile(self.step_s, q)) for name, q in _QUANTILES}
        return {
            "count": len(self.step_s),
            "seed": self.seed,
            "expected_s": self.expected_s,
            **values,
            "spread": asdict(self.spread),
            "source": self.source,
            "waits": self.waits,
            "late": self.late,
        }


def draw_step(
    result: Result, graph: TaskGraph, device_kind: str, draws: int, seed: int, spread: Spread | None = None
) -> Draws:
    """Draw a simulated step, all its ranks one by one whether they were folded or not.

    ``device_kind``, cpu or gpu: whose spread it is, where none is given. Raises InputError when there are too many
    tasks.
    """
    source = "spread as given"
    if spread is None:
        spread, source = choose_spread(device_kind)
    fold = graph.fold
    check_size(graph.kept_tasks.rows if fold is None else fold.task_total)
    plan, timeline = graph.metadata.plan, result.timeline_columns
    drawn_graph = DrawnGraph(graph, timeline)
    groups, factors = _draw_factors(drawn_graph, timeline, plan, draws, seed, spread)
    own = _draw_operators(drawn_graph, timeline, seed, spread.operator_log)
    drawn = drawn_graph.run(groups, factors, own)
    steady = drawn_graph.run(np.zeros_like(groups), np.ones((1, 1)))
    degrees = _name_degrees(graph.task_columns, timeline, plan)
    return Draws(
        drawn.step_s,
        seed,
        spread,
        source,
        _sum_waits((drawn, steady), drawn_graph, degrees),
        _sum_late(drawn, degrees, timeline, draws),
    )


def _draw_factors(
    graph: DrawnGraph, timeline: Columns, plan: Plan, draws: int, seed: int, spread: Spread
) -> tuple[Ints, Floats]:
    """Return which row of factors each item takes, and the factors: passes, then exchanges."""
    phases = timeline["phase"]
    order = np.argsort(np.argsort([*phases.words, ""]))
    keys = [
        timeline["rank"],
        *(np.maximum(timeline[name], 0) for name in ("micro_batch", "stage")),
        order[phases.codes],
    ]
    passes, own = np.unique(np.column_stack(keys), axis=0, return_inverse=True)
    rank, micro_batch, _, _ = passes.T
    replica = rank // plan.tensor // plan.context % plan.data
    steps = draw_normals(seed, _STEP, 0, (draws,), spread.step_autocorrelation)
    logs = np.tile(spread.step_log * steps, (len(passes), 1))
    rank_logs = spread.rank_log * draw_normals(
        seed, _RANK, 0, (int(rank.max(initial=0)) + 1, draws), spread.rank_autocorrelation
    )
    logs += rank_logs[rank]
    pieces = int(micro_batch.max(initial=0)) + 1
    for one in np.unique(replica).tolist():
        drawn = spread.micro_batch_log * draw_normals(seed, _MICRO_BATCH, one, (pieces, draws))
        logs[replica == one] += drawn[micro_batch[replica == one]]
    for one in np.unique(rank).tolist():
        rows = np.flatnonzero(rank == one)
        logs[rows] += spread.pass_log * draw_normals(seed, _PASS, one, (len(rows), draws))
    shared = timeline["match_id"] != ABSENT
    exchanges = np.unique(graph.item_of[shared])
    exchange_logs = spread.exchange_log * draw_normals(seed, _EXCHANGE, 0, (len(exchanges), draws))
    groups = np.zeros(len(graph.lengths_s), dtype=np.int64)
    groups[graph.item_of[~shared]] = own[~shared]
    groups[exchanges] = len(passes) + np.arange(len(exchanges))
    return groups, np.exp(np.concatenate([logs, exchange_logs]))


def _draw_operators(
    graph: DrawnGraph, timeline: Columns, seed: int, deviation: float
) -> Callable[[int], Floats] | None:
    """Return each draw's factors on single operators [items], none where they do not differ.

    Their mean is 1: what a pass takes together was recorded of a whole step.
    """
    if not deviation:
        return None
    single = np.zeros(len(graph.lengths_s), dtype=bool)
    single[graph.item_of[timeline["match_id"] == ABSENT]] = True

    def draw(number: int) -> Floats:
        logs = deviation * draw_normals(seed, _OPERATOR, number, (len(single),))
        return np.where(single, np.exp(logs - deviation**2 / 2), 1.0)

    return draw


def _name_degrees(tasks: Columns, timeline: Columns, plan: Plan) -> Any:
    """Return the degree whose ranks each task meets; empty of tasks by themselves [tasks]."""
    groups = tasks["group"]
    names = np.array([*(name_group(text, plan) for text in groups.words), "pipeline"])[groups.codes]
    return np.where(timeline["match_id"] != ABSENT, names, "")


def _sum_waits(runs: Sequence[Drawn], graph: DrawnGraph, degrees: Any) -> list[dict[str, Any]]:
    sums = []
    for degree in sorted(set(degrees) - {""}):
        members = degrees == degree
        drawn_s, steady_s = (float(one.wait_s[members].mean()) for one in runs)
        sums.append(
            {
                "group": str(degree),
                "exchanges": len(np.unique(graph.item_of[members])),
                "wait_s": drawn_s,
                "steady_wait_s": steady_s,
            }
        )
    return sums


def _sum_late(drawn: Drawn, degrees: Any, timeline: Columns, draws: int) -> list[dict[str, Any]]:
    member = degrees != ""
    rank = timeline["rank"][member]
    late, count = np.bincount(rank, drawn.late[member]), np.bincount(rank)
    return [{"rank": one, "share": float(late[one] / (count[one] * draws))} for one in np.flatnonzero(count).tolist()]


TIMES = ("step_time_s", "low_s", "high_s", "busy_s", "compute_s", "communication_s", "exposed_communication_s")
"""Times of a simulation's summary that a prediction repeats [s]; the interval only where it was asked for."""


@dataclass(frozen=True, repr=False)
class Prediction:
    """A predicted training step.

    ``step``: what was asked: task graph before a session's anchor, platform, traces, options. ``simulated``: what the
    simulation of it gave.
    """

    step: Step
    simulated: Simulated

    @property
    def _summary(self) -> Summary:
        return self.simulated.result.summary

    @property
    def step_time_s(self) -> float:
        """Time of the step [s]."""
        return self._summary.step_time_s

    @property
    def low_s(self) -> float:
        """Low end of the 80 % interval [s]; the step itself where no interval was asked for."""
        low_s = self._summary.low_s
        return self.step_time_s if low_s is None else low_s

    @property
    def high_s(self) -> float:
        """High end of the 80 % interval [s]; the step itself where no interval was asked for."""
        high_s = self._summary.high_s
        return self.step_time_s if high_s is None else high_s

    @property
    def samples_per_s(self) -> float | None:
        """Samples that a second of steps trains on; None of a step that takes no time."""
        return self.task_graph.metadata.batch / self.step_time_s if self.step_time_s else None

    @property
    def compute_s(self) -> float:
        """Time in which the busiest rank computes [s]."""
        return self._summary.compute_s

    @property
    def communication_s(self) -> float:
        """Time in which a rank communicates [s]."""
        return self._summary.communication_s

    @property
    def exposed_communication_s(self) -> float:
        """Communication that no compute hides [s]."""
        return self._summary.exposed_communication_s

    @property
    def events(self) -> int:
        """Starts and ends of tasks and flows that were simulated."""
        return self._summary.events

    @property
    def confidence(self) -> str:
        """The worst of operators' times, their rescaling, collectives and judged steps of its kind: one of ``CONFIDENCES``."""
        words: list[str] = [
            self.task_graph.metadata.uncertainty.confidence,
            self._summary.confidence,
            self.step.confidence,
            load_calibration()[self.step.kind][1],
        ]
        return find_worst(words)

    @property
    def memory(self) -> list[dict[str, Any]]:
        """Peak of each group of ranks that are alike, by category [bytes], and when it is reached."""
        return self.task_graph.metadata.memory

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak memory of the fullest rank [bytes]; None where no memory is estimated."""
        return self.step.known_peak_bytes

    @property
    def fits_memory(self) -> bool | None:
        """Whether the step more likely fits its devices than not; None where no memory is estimated."""
        return self.step.fits_memory

    @property
    def fit_probability(self) -> float | None:
        """Probability that no rank runs out of memory; None where no memory is estimated."""
        return self.step.fit_probability

    @property
    def task_graph(self) -> TaskGraph:
        """What every rank does, as it was simulated."""
        return self.simulated.graph

    @property
    def timeline(self) -> "pd.DataFrame":
        """When every task of every rank ran: columns of ``tables.TIMELINE``."""
        return self.simulated.result.timeline

    @property
    def warnings(self) -> list[str]:
        """What the reader must know, each once."""
        warnings = [*self.step.warnings, *self._summary.warnings]
        warnings += doubt_rate(self._rates)
        likely = self.fit_probability
        if likely is not None and likely < DOUBTED:
            warnings.insert(
                0,
                (
                    f"{'out of memory' if likely < LIKELY else 'memory'}: the step is {describe_probability(likely)} a rank's device, whose allocator "
                    f"would hold {format_bytes(self.step.wanted_bytes)}; recompute, offload, shard over more ranks or take a smaller micro-batch "
                    "(trioflow memory says which of these suffice)"
                ),
            )
        return list(dict.fromkeys(warnings))

    @cached_property
    def draws(self) -> Draws | None:
        """The step in many draws of its spread; None where none were asked for.

        Raises InputError as ``draw_step``.
        """
        options, simulated = self.step.options, self.simulated
        if not options.draws:
            return None
        return draw_step(
            simulated.result,
            simulated.graph,
            self.step.platform.device.kind,
            options.draws,
            options.seed,
            options.spread,
        )

    @property
    def provenance(self) -> dict[str, Any]:
        """What the prediction rests on: version, traces, cost model, collectives, platform's sources."""
        step = self.step
        known = ("workload", "batch", "device_name", "step_time_source")
        return {
            "trioflow_version": __version__,
            "traces": [{key: getattr(trace.facts, key) for key in known} for trace in step.traces],
            "cost_model": step.cost_model,
            "collectives": "ring closed form"
            if isinstance(step.collectives, LinkCollectives | None)
            else str(getattr(step.collectives, "platform", type(step.collectives).__name__)),
            "platform": step.platform.name,
            "sources": dict(step.platform.sources),
            "anchor": step.options.anchor,
        }

    def breakdown(self, by: str = "module", depth: int = DEPTH) -> "pd.DataFrame":
        """Return where the step goes by rank, stage or module: columns of ``tables.BREAKDOWN``.

        Raises InputError as ``breakdown.build_breakdown``.
        """
        timeline = self.simulated.result.timeline_columns
        return build_breakdown(self.task_graph, timeline, self.step.trace, by, depth)

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Where the step goes, by ``breakdown.PARTS`` that take any of it [s]: means over the ranks, their sum is the step."""
        executed = self.simulated.result.executed
        waits = describe_waits(executed, self.task_graph.metadata.plan)
        return split_step(executed, self.step.trace, waits, self.step_time_s)

    def plot(self) -> Any:
        """Return the prediction's page of pictures, which a notebook shows and ``save("answer.html")`` writes; needs bokeh."""
        return import_module("trioflow").plot(self)

    def to_frame(self) -> "pd.DataFrame":
        """Return the prediction as one row, as ``trioflow simulate --output csv`` prints it: several make a table by pandas' ``concat``."""
        return flatten([self.to_dict()])

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as ``trioflow simulate --json`` prints it."""
        step, summary, metadata = self.step, self._summary, self.task_graph.metadata
        times = {key: getattr(summary, key) for key in (*TIMES, "ranks", "events", "simulator_wall_s")}
        answer = {
            **{key: value for key, value in times.items() if value is not None},
            "workload": step.traces[0].facts.workload,
            "batch": metadata.batch,
            "plan": metadata.plan.plan,
            "plan_text": metadata.plan_text,
            "platform": step.platform.name,
            "network": summary.network,
            "cost_model": step.cost_model,
            "confidence": self.confidence,
            "peak_memory_bytes": self.peak_memory_bytes,
            "outside_bytes": None if self.fits_memory is None else step.outside_bytes,
            "memory_bytes": step.platform.device.memory_bytes,
            "fits_memory": self.fits_memory,
            "fit_probability": self.fit_probability,
            "memory": self.memory,
            "mode": metadata.mode,
            **self._describe_stages(),
            "samples_per_s": self.samples_per_s,
            "folded": summary.folded,
            "unfolded_reason": summary.unfolded_reason,
            "warnings": self.warnings,
            **self.describe_language(),
        }
        if self.draws is not None:
            answer |= {"draws": self.draws.to_dict()}
        if self.simulated.trace_only_s is not None:
            answer |= {"anchor": step.options.anchor, "trace_only_step_time_s": self.simulated.trace_only_s}
        return answer

    def _describe_stages(self) -> dict[str, Any]:
        """Return how many units each stage of a pipeline holds, and what cut them; nothing without one."""
        stages, wanted = self.task_graph.metadata.stages, self.step.options.stages
        if len(stages) < 2:
            return {}
        balanced = wanted is None or wanted in BALANCES
        cut = name_balance(self.step.trace, str(wanted or "") or None) if balanced else "given"
        return {"stage_units": [len(stage) for stage in stages], "stages_by": cut}

    def describe_language(self) -> dict[str, Any]:
        """Return tokens/s, MFU and what ranks wait for; nothing of a step that has no tokens."""
        plan = self.task_graph.metadata.plan
        if self.step.fewer is not None or not self._rates:  # the timeline is not the whole step's
            return self._rates
        return self._rates | describe_waits(self.simulated.result.executed, plan)

    @cached_property
    def _rates(self) -> dict[str, Any]:
        """Tokens/s and MFU; nothing of a step that has no tokens."""
        metadata, facts = self.task_graph.metadata, self.step.traces[0].facts
        if metadata.mode != TRAIN:
            return {}
        return describe_rates(facts, metadata.batch, self.step_time_s, self._summary.ranks, self.step.platform.device)

    def __repr__(self) -> str:
        return "\n".join([f"Prediction of {self.title}", *(f"  {a:<16}{b}" for a, b in self.list_facts())])

    def _repr_html_(self) -> str:
        import html

        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in self.list_facts()
        )
        return f"<table><caption>{html.escape(self.title)}</caption>{rows}</table>"

    @property
    def title(self) -> str:
        """What was predicted: the workload, the platform and the plan."""
        workload, name = self.step.traces[0].facts.workload, self.step.platform.name
        return f"{workload} on {name}: {self.task_graph.metadata.plan_text}"

    def list_facts(self) -> list[tuple[str, str]]:
        """Return the answer as names and words, its warnings last."""
        return [
            (
                "step time",
                f"{format_time(self.step_time_s)} (80 % interval"
                f" {format_time(self.low_s)} to {format_time(self.high_s)}; {self.confidence})",
            ),
            ("compute", f"{format_time(self.compute_s)} on the busiest GPU"),
            (
                "communication",
                f"{format_time(self.communication_s)}, of which {format_time(self.exposed_communication_s)} exposed",
            ),
            (
                "peak memory",
                describe_memory(
                    self.step.peak_memory_bytes,
                    self.step.outside_bytes,
                    self.step.platform.device.memory_bytes,
                    self.fit_probability,
                    self.step.wanted_bytes,
                ),
            ),
            ("operator times", self.step.cost_model),
            *(("warning", warning) for warning in self.warnings),
        ]


def describe_memory(
    peak_bytes: int, outside_bytes: int, memory_bytes: int, probability: float | None, reserved_bytes: int = 0
) -> str:
    """Return what the device holds at most, its size and the probability that it suffices."""
    if probability is None:
        return "not estimated"
    needed, room = format_apart(max(peak_bytes, reserved_bytes) + outside_bytes, memory_bytes)
    reserved = f", {format_bytes(reserved_bytes)} reserved" * (reserved_bytes > peak_bytes)
    parts = f" ({format_bytes(peak_bytes)} allocated{reserved} + {format_bytes(outside_bytes)} CUDA context/NCCL)"
    verdict = "OUT OF MEMORY, " * (probability < LIKELY) + describe_probability(probability)
    return f"{needed} of {room} per GPU{parts * bool(outside_bytes)}: {verdict}"


def predict_step(step: Step) -> Prediction:
    """Return the prediction of a step that was put together before; errors as ``engine.simulate.simulate``."""
    return Prediction(step, step.simulate())


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


def prepare_step(question: Question, must_fit: bool = False) -> Step:
    """Write what every rank does, and put it together with the platform; TrioflowError where plan, model and batch do not fit.

    ``must_fit``: whether a plan that more likely runs out of memory than not is refused as soon as that is known
    (``NoRoomError``), where all micro-batches are written.
    """
    times, plan, batch, options = question.times, question.plan, question.batch, question.options
    if options.as_traced:
        build = load_plugin(GRAPH_GROUP, AS_TRACED, what="builder of task graphs")
        return join_step(build(times.traces, ranks=plan.ranks, host=question.platform.host), question)

    def put_together(part: Plan, chosen: Options, must_fit: bool = False) -> Step:
        graph = build_graph(
            times,
            part,
            batch=batch * part.micro_batches // plan.micro_batches,
            host=question.host,
            options=chosen,
            device=question.platform.device,
            must_fit=must_fit,
        )
        return join_step(graph, question)

    counts = choose_counts(plan, batch, times.traces[0].operator_columns.rows, options)
    if counts is None:
        return put_together(plan, options, must_fit)
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
        options = options.scale_compute([*scales, *[1.0] * (platform.ranks - len(scales))])
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
    must_fit: bool = False,
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
        must_fit=must_fit,
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
    collectives = load_collectives(path, method)
    if isinstance(collectives, PlatformCollectives):
        one_node = platform.ranks if platform.node_collectives else 1
        collectives = collectives.in_nodes_of(platform.ranks_per_node or one_node)
    return scale_to_links(collectives, platform) if _is_of(collectives, platform, given) else collectives


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
    return [warning for warning in doubts if warning]


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
    return [warning for warning in doubts if warning]
