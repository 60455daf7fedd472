"""What the error of each experiment is made of: parts of the step, with measured values in place of predicted ones.

`build_attribution` is the door of a run of this machine, whose experiments are predicted again with something changed
(`Change`) or taken from their measurement; `explain_cases` of any cases. Sensitivities say what moves a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import read_json, stamp
from trioflow.costmodel.choices import Collectives
from trioflow.costmodel.collectives.model import CollectiveTime
from trioflow.costmodel.uncertainty import RATIO, TIMER, UNANCHORED
from trioflow.engine.result import join_lanes, measure_lanes, merge_lanes, select_communication, subtract_lanes
from trioflow.hardware.machine import Platform
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.assembly import Prediction, predict_step
from trioflow.prediction.question import Options
from trioflow.prediction.step import Factors, SessionAnchor, Step, apply_factors, load_experiment
from trioflow.report.errors import measured_steps
from trioflow.report.intervals import cover
from trioflow.tables import FLOAT, PHASES, TEXT, column

SERIAL, FULL = "none", "full"
"""Overlap of collectives with compute, where a sensitivity sets it."""


@dataclass(frozen=True)
class Settings:
    """What a sensitivity changes; the prediction itself has none changed."""

    anchor: str = TIMER  # one of ``costmodel.uncertainty.ANCHOR_WAYS``
    copies: float = 1.0  # factor on copies into and out of gradient buckets
    vocabulary: bool = True  # whether tensor parallelism cuts embedding and head
    # none: collectives wait for compute and compute for them. full: neither waits. Empty: as the
    # platform has it.
    overlap: str = ""
    # compute, bandwidth, latency: factors on compute times, and on the bandwidth and the latency of
    # measured collectives.
    compute: float = 1.0
    bandwidth: float = 1.0
    latency: float = 1.0
    method: str = ""  # way to predict collectives; the platform's own where empty
    # host, sharing: factors on the host's costs of parallel plans, and on what ranks lose by
    # computing at the same time; of cases that have them.
    host: float = 1.0
    sharing: float = 1.0

    def arrange(self, platform: Platform) -> Platform:
        """Return a platform with the overlap of these settings."""
        if not self.overlap:
            return platform
        return replace(platform, communication_on_compute_stream=self.overlap == SERIAL)


@dataclass(frozen=True)
class ScaledCollectives:
    """Measured collectives with another bandwidth or latency."""

    base: Collectives  # as measured
    # bandwidth, latency: factors; a collective's latency is its time for an empty message.
    bandwidth: float
    latency: float

    def time_s(self, collective: str, ranks: int, message_bytes: float) -> CollectiveTime:
        """Return the changed time of a collective, its interval in proportion."""
        predicted = self.base.time_s(collective, ranks, message_bytes)
        start_s = min(self.base.time_s(collective, ranks, 0).time_s, predicted.time_s)
        time_s = start_s * self.latency + (predicted.time_s - start_s) / self.bandwidth
        factor = time_s / predicted.time_s if predicted.time_s else 1.0
        return CollectiveTime(time_s, predicted.low_s * factor, predicted.high_s * factor, predicted.confidence)


CAUSES = pa.schema(
    [
        column("set", TEXT, "set of cases"),
        column("case", TEXT, "name of the case"),
        column(
            "role",
            TEXT,
            "part, a share of the predicted step; replaced, a model exchanged for measured values; sensitivity, a parameter changed; growth, a class of operators at another batch",
        ),
        column("parameter", TEXT, "what the part is, was exchanged or was changed"),
        column("setting", TEXT, "how it was changed; empty for a part"),
        column("time_s", FLOAT, "the part, or the step predicted so", "s"),
    ]
)
"""Rows of ``results/published/<set>-causes.parquet`` and ``results/report/causes.parquet``."""

PART, REPLACED, SENSITIVITY, GROWTH = "part", "replaced", "sensitivity", "growth"
_MEASURED_ALONE = "measured on one such GPU at the same batch"


class _ExplainedCase(Protocol):
    """A case that can be predicted again with something changed."""

    def has(self, need: str) -> bool:
        """Return whether the case has what a change needs; of what it does not know, nothing."""

    def predict(self) -> Prediction:
        """Return the prediction with its parts."""

    def predict_changed(self, settings: Settings) -> float:
        """Return the step with something changed [s]."""


@dataclass(frozen=True)
class Change:
    """One change of a sensitivity."""

    # parameter, setting: what is changed and how, in words.
    parameter: str
    setting: str
    settings: Settings  # the changed settings
    # What a case must have (``ExplainedCase.has``): communication, collectives, overlap, serial,
    # replicas, shards, anchor, session, sharing, host, or nothing.
    needs: str = ""


CHANGES: tuple[Change, ...] = (
    Change("compute time", "x 0.9", Settings(compute=0.9)),
    Change("compute time", "x 1.1", Settings(compute=1.1)),
    Change("bandwidth of collectives", "x 0.8", Settings(bandwidth=0.8), "communication"),
    Change("bandwidth of collectives", "x 1.25", Settings(bandwidth=1.25), "communication"),
    Change("latency of collectives", "x 0.5", Settings(latency=0.5), "communication"),
    Change("latency of collectives", "x 2", Settings(latency=2.0), "communication"),
    Change("overlap of collectives and compute", "none", Settings(overlap=SERIAL), "overlap"),
    Change("overlap of collectives and compute", "full", Settings(overlap=FULL), "serial"),
    Change("model of collectives", "NCCL's formula", Settings(method="nccl"), "collectives"),
    Change("model of collectives", "one bandwidth", Settings(method="one-bandwidth"), "collectives"),
    Change("copies of gradients", "none", Settings(copies=0.0), "replicas"),
    Change("copies of gradients", "x 2", Settings(copies=2.0), "replicas"),
    Change("cut of embedding and head", "none", Settings(vocabulary=False), "shards"),
    Change("anchor at the step of one GPU", "one factor", Settings(anchor=RATIO), "anchor"),
    Change("anchor at the step of one GPU", "none", Settings(anchor=UNANCHORED), "anchor"),
    Change("anchor at the session's steps of one rank", "none", Settings(anchor=UNANCHORED), "session"),
    Change("slowdown of ranks that compute at once", "none", Settings(sharing=0.0), "sharing"),
    Change("slowdown of ranks that compute at once", "x 2", Settings(sharing=2.0), "sharing"),
    Change("host's costs of parallel plans", "none", Settings(host=0.0), "host"),
    Change("host's costs of parallel plans", "x 2", Settings(host=2.0), "host"),
)
"""In the order of the table. The sizes of the steps are conventions, equal for all sets."""


def explain_cases(cases: Iterable[tuple[str, str, _ExplainedCase, float | None]]) -> pd.DataFrame:
    """Return parts, replacements and sensitivities (``CAUSES``) of cases: set, name, case, the step with measured compute [s]."""
    rows = []
    for set_name, name, case, oracle_s in cases:
        predicted = case.predict()
        compute_s, exposed_s = predicted.compute_s, predicted.exposed_communication_s
        causes = [
            (PART, "compute", "", compute_s),
            (PART, "communication that no compute hides", "", exposed_s),
            (PART, "waiting", "", max(predicted.step_time_s - compute_s - exposed_s, 0.0)),
        ]
        if oracle_s is not None and not pd.isna(oracle_s):
            causes.append((REPLACED, "compute", _MEASURED_ALONE, float(oracle_s)))
        causes += [
            (SENSITIVITY, change.parameter, change.setting, case.predict_changed(change.settings))
            for change in CHANGES
            if not change.needs or case.has(change.needs)
        ]
        rows += [(set_name, name, *row) for row in causes]
    return pd.DataFrame(rows, columns=CAUSES.names)


COMPUTE, COMMUNICATION, OVERLAP, HOST = "compute", "communication", "overlap", "host"
MODELS = (COMPUTE, COMMUNICATION, OVERLAP, HOST)
"""Models of a step that measured values can stand in for."""
_SAME = 1e-9
"""Steps closer than this relative to each other are the same."""
_FREE = 1e-9
"""Factor on communication that costs nothing; bandwidths are divided by it."""


@dataclass(frozen=True)
class LiveCase:
    """One experiment: its task graph as extrapolated, the machine and the session's anchor."""

    step: Step  # on the measured machine, without the anchor and without an interval
    anchor: SessionAnchor  # of the session that measured the experiment
    factors: list[Factors]  # the anchor's factors on each rank's phases, as the prediction has them
    host_share: NDArray[np.float64]  # part of a task's duration that is the host's

    @classmethod
    def load(
        cls,
        graph_folder: str | Path,
        platform: str | Path,
        collectives: str | Path,
        session: str | Path,
        traces: Sequence[str | Path],
    ) -> LiveCase:
        """Read an experiment, as ``prediction.step.load_experiment`` does; TrioflowError where a file is missing or wrong."""
        step, anchor = load_experiment(graph_folder, platform, collectives, session, traces)
        factors = step.settle(anchor)
        host_s = step.trace.operators["cpu_ns"].to_numpy(np.float64) * 1e-9
        if step.trace.facts.device == "cuda":
            host_s = np.zeros_like(host_s)  # there the host has tasks of its own
        plain = replace(step, anchor=None, options=Options(interval=False))
        return cls(plain, anchor, factors, share_host(step.graph, host_s))

    @property
    def graph(self) -> TaskGraph:
        """The task graph before the anchor."""
        return self.step.graph

    @cached_property
    def anchored(self) -> TaskGraph:
        """The graph that the prediction simulates."""
        return apply_factors(self.graph, self.factors)

    @cached_property
    def hides(self) -> bool:
        """Whether the plan lets anything run beside a collective."""
        serial, full = (self.predict_changed(Settings(overlap=overlap)) for overlap in (SERIAL, FULL))
        return serial > full * (1 + _SAME)

    def has(self, need: str) -> bool:
        """Return whether the experiment has what a change needs; see ``Change``."""
        kinds = set(self.graph.tasks["kind"])
        on_stream = self.step.platform.communication_on_compute_stream
        return {
            "communication": bool(kinds & {"collective", "send"}),
            "overlap": self.hides and not on_stream,
            "serial": self.hides and on_stream,
            "replicas": "memcpy" in kinds,
            "session": True,
            "sharing": len(self.factors) > 1,
            "host": len(self.factors) > 1 and "host" in kinds,
        }.get(need, False)

    def predict(self) -> Prediction:
        """Return the prediction with its parts."""
        return self._predict(self.anchored)

    def _predict(self, graph: TaskGraph, **changes: Any) -> Prediction:
        """Return the prediction of another graph, with fields of the step changed."""
        return predict_step(replace(self.step, graph=graph, **changes))

    def predict_changed(self, settings: Settings) -> float:
        """Return the step with something changed [s]."""
        graph = (
            TaskGraph(self.graph.tasks.copy(), self.graph.dependencies, self.graph.metadata)
            if settings.anchor == UNANCHORED
            else apply_factors(self.graph, self._share(settings.sharing))
        )
        kind = graph.tasks["kind"]
        graph.tasks["duration_s"] *= np.select(
            [kind == "host", kind == "memcpy"], [settings.host, settings.copies], 1.0
        )
        collectives: Any = self.step.collectives
        if (settings.bandwidth, settings.latency) != (1.0, 1.0):
            collectives = ScaledCollectives(collectives, settings.bandwidth, settings.latency)
        return self._predict(
            graph,
            platform=settings.arrange(self.step.platform),
            collectives=collectives,
            options=replace(self.step.options, compute_scale=settings.compute),
        ).step_time_s

    def _share(self, sharing: float) -> list[Factors]:
        """Return the factors with what ranks lose by computing at once changed, never below none.

        In noisy sessions a step among busy ranks may have been far faster than alone.
        """
        if sharing == 1.0:
            return self.factors
        quiet = self.anchor.quiet
        return [
            {phase: max(0.0, quiet[phase] + sharing * (factor[phase] - quiet[phase])) for phase in PHASES}
            for factor in self.factors
        ]

    def list_replaceable(self, measured: MeasuredParts | None) -> list[str]:
        """Return the models that measured values can stand in for."""
        if measured is None:
            return []
        known = {
            COMPUTE: bool(measured.compute_s),
            HOST: bool(measured.host_s),
            COMMUNICATION: measured.exchanges_s is not None and self.exchanges_s > 0,
            OVERLAP: measured.hidden is not None and self.hides,
        }
        return [model for model in MODELS if known[model]]

    @cached_property
    def exchanges_s(self) -> float:
        """Own time of all predicted collectives and messages together [s]."""
        timeline = self.predict().timeline
        moved = timeline[select_communication(timeline)]
        own_s = (moved["end_s"] - moved["start_s"]).groupby(moved["match_id"]).min()
        return float(own_s.sum())

    def predict_replaced(self, measured: MeasuredParts, models: Collection[str]) -> float:
        """Return the step with ``measured`` values in place of some models (``list_replaceable``) [s].

        Operators of a rank and phase take the measured time together, as do all exchanges, and a
        rank's host. The measured share of collectives that operators hid costs nothing, the rest
        waits for compute.
        """
        graph = self._replace_durations(measured, models)
        platform, scale = self.step.platform, 1.0
        if COMMUNICATION in models:
            scale = float(measured.exchanges_s or 0.0) / self.exchanges_s
        if OVERLAP in models:
            platform = Settings(overlap=SERIAL).arrange(platform)
            scale *= 1.0 - float(measured.hidden or 0.0)
        scale = max(scale, _FREE)
        options = replace(self.step.options, communication_scale=scale)
        return self._predict(graph, platform=platform, options=options).step_time_s

    def _replace_durations(self, measured: MeasuredParts, models: Collection[str]) -> TaskGraph:
        tasks = self.anchored.tasks.copy()
        duration_s = tasks["duration_s"].to_numpy(np.float64)
        host_s = np.nan_to_num(duration_s * self.host_share)  # an exchange has no duration yet
        work_s = duration_s - host_s
        if COMPUTE in models:
            work = tasks["kind"].isin(("compute", "memcpy"))
            for key, at in tasks[work].groupby(["rank", "phase"]).indices.items():
                chosen = np.flatnonzero(work)[at]
                whole_s, known_s = work_s[chosen].sum(), measured.compute_s.get(key, 0.0)  # type: ignore[call-overload]
                if whole_s > 0 and known_s > 0:
                    work_s[chosen] *= known_s / whole_s
        if HOST in models:
            for rank, at in tasks.groupby("rank").indices.items():
                whole_s, known_s = host_s[at].sum(), measured.host_s.get(int(str(rank)))
                if whole_s > 0 and known_s is not None:
                    host_s[at] *= known_s / whole_s
        tasks["duration_s"] = work_s + host_s
        return TaskGraph(tasks, self.graph.dependencies, self.graph.metadata)


def share_host(graph: TaskGraph, host_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the host's part of each task's duration, before any factor; ``host_s``: within each operator's task [s]."""
    tasks = graph.tasks
    duration_s = tasks["duration_s"].to_numpy(np.float64)
    known = (tasks["op_id"].notna() & (tasks["kind"] == "compute")).to_numpy(bool)
    known_s = np.where((tasks["kind"] == "host").to_numpy(bool), duration_s, 0.0)
    known_s[known] = host_s[tasks["op_id"][known].to_numpy(np.int64)]
    share = np.divide(known_s, duration_s, out=np.zeros_like(known_s), where=duration_s > 0)
    return np.asarray(np.minimum(share, 1.0), dtype=np.float64)


@dataclass(frozen=True)
class MeasuredParts:
    """Measured values that can stand in for a model's, at the speed of the median step."""

    factor: float  # median step over the profiled one; every time below is multiplied by it
    compute_s: Mapping[tuple[int, str], float]  # time in operators by rank and phase [s]
    # Time of a rank in which nothing was recorded, up to its last event [s].
    host_s: Mapping[int, float]
    # Own time of all collectives and messages together, waiting for the other ranks left out [s];
    # None where there is none or they cannot be paired.
    exchanges_s: float | None
    hidden: float | None  # share of the collectives' own time in which operators ran beside them


def measure_parts(timeline: pd.DataFrame, measured_s: float, *, beside: bool) -> MeasuredParts | None:
    """Read the parts of a profiled step; none of a step without events.

    ``measured_s``: median of it without a profiler [s]. ``beside``: whether operators may run
    beside collectives; else one recorded during a collective has waited for it. The profiler is
    taken to stretch all parts evenly. A collective's own time is that of the rank that came last
    (the shortest), a message's from when both ends were there; messages pair in order of start
    between two ranks.
    """
    if timeline.empty:
        return None
    factor, moves = measured_s / float(timeline["end_s"].max()), select_communication(timeline)
    moving, computing = timeline[moves], timeline[~moves]
    owns = pd.concat([_own_collectives(timeline), _own_messages(timeline)])
    ends_s, lanes = timeline.groupby("rank")["end_s"].max(), int(timeline["rank"].max()) + 1
    busy, blocking = cover(computing, computing["rank"]), timeline[timeline["kind"] == "collective"]
    known_s = measure_lanes(merge_lanes(join_lanes(busy, cover(moving, moving["rank"]))), lanes)
    idle_s = factor * (ends_s - known_s[ends_s.index.to_numpy(np.int64)])
    compute_s: dict[tuple[int, str], float] = {}
    hidden_s = 0.0
    for phase, part in computing.groupby("phase"):
        spans = cover(part, part["rank"])
        spans = spans if beside else subtract_lanes(spans, cover(blocking, blocking["rank"]))
        spent_s = factor * measure_lanes(spans, lanes)
        compute_s |= {(int(rank), str(phase)): float(spent_s[rank]) for rank in part["rank"].unique()}
    for _, part in owns[owns["collective"]].groupby("number"):  # one of each rank
        own = cover(part, part["rank"])
        hidden_s += float((measure_lanes(own, lanes) - measure_lanes(subtract_lanes(own, busy), lanes)).sum())
    whole_s = float((owns["end_s"] - owns["start_s"])[owns["collective"]].sum())
    first = owns.drop_duplicates(["collective", "number"])
    exchanges_s = float((first["end_s"] - first["start_s"]).sum())
    return MeasuredParts(
        factor,
        compute_s,
        {int(str(rank)): float(time_s) for rank, time_s in idle_s.items()},
        factor * exchanges_s if exchanges_s > 0 else None,
        hidden_s / whole_s if beside and whole_s > 0 else None,
    )


def _number(events: pd.DataFrame) -> pd.DataFrame:
    """Return each rank's events, numbered in order of start."""
    ordered = events.sort_values(["rank", "start_s", "task_id"], kind="stable")
    return ordered.assign(number=ordered.groupby("rank").cumcount())


def _own_collectives(timeline: pd.DataFrame) -> pd.DataFrame:
    """Return each rank's own part of each collective: the end of it, as long as the last rank's."""
    events = _number(timeline[timeline["kind"] == "collective"])
    counts = events.groupby("rank").size()
    if counts.nunique() != 1 or len(counts) != timeline["rank"].nunique():
        events = events.iloc[:0]
    own_s = (events["end_s"] - events["start_s"]).groupby(events["number"]).transform("min")
    return pd.DataFrame(
        {
            "collective": True,
            "number": events["number"],
            "rank": events["rank"],
            "start_s": events["end_s"] - own_s,
            "end_s": events["end_s"],
        }
    )


def _own_messages(timeline: pd.DataFrame) -> pd.DataFrame:
    """Return each message at its receiver, from when both ends were there."""
    ranks = sorted(timeline["rank"].unique())
    sends, receives = (_number(timeline[timeline["kind"] == kind]) for kind in ("send", "recv"))
    if len(ranks) == 2:
        receives = receives.assign(peer=sum(ranks) - receives["rank"])
    else:
        receives = receives.iloc[:0].assign(peer=0)
    pairs = receives.merge(sends, left_on=["peer", "number"], right_on=["rank", "number"], suffixes=("", "_sent"))
    both_s = np.minimum(np.maximum(pairs["start_s"], pairs["start_s_sent"]), pairs["end_s"])
    return pd.DataFrame(
        {
            "collective": False,
            "number": range(len(pairs)),
            "rank": pairs["rank"],
            "start_s": both_s,
            "end_s": pairs["end_s"],
        }
    )


REMAINDER = "remainder"
ATTRIBUTION = pa.schema(
    [
        column("experiment", TEXT, "name of the experiment"),
        column(
            "part",
            TEXT,
            "compute, communication, overlap, host: the model that was exchanged for measured values; remainder: what is left with all of them exchanged",
        ),
        column(
            "signed_time",
            FLOAT,
            "what the model adds to the predicted step beyond what was measured, negative where it is too fast; of an experiment they sum to predicted less measured",
            "s",
        ),
        column("error", FLOAT, "the same over the measured median; of an experiment they sum to its signed error"),
        column("alone_s", FLOAT, "the step predicted with this model alone exchanged", "s", null=True),
        column("measured_by", TEXT, "where the measured values come from"),
        column(
            "profile_factor",
            FLOAT,
            "measured median over the profiled step, by which all profiled times were multiplied",
            null=True,
        ),
    ]
)
"""Rows of ``results/report/attribution.parquet``."""

PROFILE = "profile of one real step"
_ONE_RANK = "the whole step: one rank exchanges nothing"
MACHINE = "this machine"
_LEFT = "predicted less measured, less all above"


def attribute_errors(
    cases: Mapping[str, LiveCase], measured_s: Mapping[str, float], timelines: pd.DataFrame
) -> pd.DataFrame:
    """Divide the error of every experiment among the models behind it: ``ATTRIBUTION``, in the order of ``cases``.

    A model's part is its Shapley value, the mean change of the prediction when measured values
    replace it, over every order: parts sum to the prediction less the one with all models replaced.
    """
    rows: list[dict[str, Any]] = []
    for name, case in cases.items():
        own = timelines[timelines["experiment"] == name].drop(columns="experiment")
        measured = measure_parts(own, measured_s[name], beside=case.hides)
        rows += [{"experiment": name, **row} for row in _attribute(case, measured, measured_s[name])]
    return pd.DataFrame(rows, columns=ATTRIBUTION.names)


def _attribute(case: LiveCase, measured: MeasuredParts | None, measured_s: float) -> list[dict[str, Any]]:
    predicted_s = case.predict().step_time_s
    models = case.list_replaceable(measured)
    if measured is None or not models:
        one_rank = len(case.factors) == 1
        part, words = (COMPUTE, _ONE_RANK) if one_rank else (REMAINDER, _LEFT)
        return [_row(part, predicted_s - measured_s, measured_s, None, words, None)]

    @cache
    def predict(replaced: frozenset[str]) -> float:
        return case.predict_replaced(measured, replaced) if replaced else predicted_s

    rows = [
        _row(model, part_s, measured_s, predict(frozenset([model])), PROFILE, measured.factor)
        for model, part_s in share_change(models, predict).items()
    ]
    left_s = predict(frozenset(models)) - measured_s
    return [*rows, _row(REMAINDER, left_s, measured_s, None, _LEFT, measured.factor)]


def share_change(models: Sequence[str], predict: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """Return each model's mean contribution to a prediction [s] less the one with all ``models`` replaced.

    Its Shapley value; ``predict`` is asked for each set of models several times.
    """
    count = len(models)
    shares = dict.fromkeys(models, 0.0)
    for model in models:
        others = [other for other in models if other != model]
        for size in range(count):
            weight = 1.0 / (count * math.comb(count - 1, size))
            for before in combinations(others, size):
                replaced = frozenset(before)
                shares[model] += weight * (predict(replaced) - predict(replaced | {model}))
    return shares


def _row(
    part: str, signed_s: float, measured_s: float, alone_s: float | None, words: str, factor: float | None
) -> dict[str, Any]:
    return {
        "part": part,
        "signed_time": signed_s,
        "error": signed_s / measured_s,
        "alone_s": alone_s,
        "measured_by": words,
        "profile_factor": factor,
    }


def explain_live(cases: Mapping[str, LiveCase]) -> pd.DataFrame:
    """Return parts and sensitivities of every experiment: ``CAUSES``."""
    return explain_cases(("live", name, case, None) for name, case in cases.items())


def _find(paths: Iterable[Path], file: str, folder: str = "") -> Path:
    """Return a file by its name and its folder's; the last of that name without a folder."""
    matches = [path for path in paths if path.name == file and folder in ("", path.parent.name)]
    if not matches:
        raise InputError(f"{folder or MACHINE} has no {file}", fix="give the files of the whole run as its input")
    return matches[-1]


def build_attribution(
    experiments: Sequence[Mapping[str, Any]], files: Iterable[str | Path], attribution: str | Path, causes: str | Path
) -> pd.DataFrame:
    """Divide the errors of a run and write the parts (``ATTRIBUTION``) and the sensitivities (``CAUSES``).

    ``files``: ``tasks.parquet`` of every experiment, ``trace.json`` of every trace,
    ``session.json``, ``measurements.parquet`` and ``rank_timelines.parquet`` of every workload (in
    folders of those names), ``this-machine.yaml`` and ``collectives.json``; others are ignored.
    Raises InputError, nothing written, when one of an experiment is missing.
    """
    paths = [Path(file) for file in files]
    traces: dict[str, list[Path]] = {}
    for path in paths:
        if path.name == "trace.json":
            traces.setdefault(str(read_json(path)["workload"]), []).append(path.parent)
    cases, measured_s, timelines = {}, {}, {}
    for row in experiments:
        name, workload = str(row["experiment"]), str(row["workload"])
        if workload not in traces:
            raise InputError(f"{workload} has no trace.json", fix="give the files of the whole run as its input")

        cases[name] = LiveCase.load(
            _find(paths, "tasks.parquet", name).parent,
            _find(paths, "this-machine.yaml"),
            _find(paths, "collectives.json"),
            _find(paths, "session.json", workload),
            traces[workload],
        )
        steps = tables.read_table(_find(paths, "measurements.parquet", workload), "measurements")
        measured_s[name] = float(np.median(measured_steps(steps, row, len(cases[name].factors))))
        timelines[workload] = tables.read_table(_find(paths, "rank_timelines.parquet", workload), "rank_timelines")
    for frame in timelines.values():
        frame.attrs = {}
    attributed = attribute_errors(cases, measured_s, pd.concat(timelines.values(), ignore_index=True))
    facts = stamp(paths)
    tables.write_table(attributed, "attribution", attribution, facts, ATTRIBUTION)
    tables.write_table(explain_live(cases), "causes", causes, facts, CAUSES)
    return attributed
