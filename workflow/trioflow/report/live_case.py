"""An experiment of this machine, predicted again with something changed or taken from its measurement."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.costmodel.steps import NONE
from trioflow.engine.timeline import (
    Intervals,
    measure_intervals,
    merge_intervals,
    select_communication,
    subtract_intervals,
)
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.anchors import Factors, SessionAnchor, apply_factors
from trioflow.prediction.answer import Prediction, predict_step
from trioflow.prediction.options import Options
from trioflow.prediction.step import Step, load_experiment
from trioflow.report.causes import FULL, SERIAL, ScaledCollectives, Settings
from trioflow.tables import PHASES

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

    name: str  # the experiment
    step: Step  # on the measured machine, without the anchor and without an interval
    anchor: SessionAnchor  # of the session that measured the experiment
    factors: list[Factors]  # the anchor's factors on each rank's phases, as the prediction has them
    host_share: NDArray[np.float64]  # part of a task's duration that is the host's

    @classmethod
    def load(
        cls, graph_folder: str | Path, platform: str | Path, collectives: str | Path,
        session: str | Path, traces: Sequence[str | Path],
    ) -> LiveCase:  # fmt: skip
        """Read an experiment, as ``experiment.load_experiment`` does; TrioflowError where a file is missing or wrong."""
        step, anchor = load_experiment(graph_folder, platform, collectives, session, traces)
        factors = step.settle(anchor)
        host_s = step.trace.operators["cpu_ns"].to_numpy(np.float64) * 1e-9
        if step.trace.facts.device == "cuda":
            host_s = np.zeros_like(host_s)  # there the host has tasks of its own
        plain = replace(step, anchor=None, options=Options(interval=False))
        return cls(
            str(step.graph.metadata.experiment), plain, anchor, factors,
            share_host(step.graph, host_s),
        )  # fmt: skip

    @property
    def graph(self) -> TaskGraph:
        """The task graph before the anchor."""
        return self.step.graph

    @property
    def set_name(self) -> str:
        """Set of the experiment; all of one run are explained together."""
        return "live"

    @property
    def case_name(self) -> str:
        """Name of the experiment."""
        return self.name

    @cached_property
    def anchored(self) -> TaskGraph:
        """The graph that the prediction simulates."""
        return apply_factors(self.graph, self.factors)

    @cached_property
    def hides(self) -> bool:
        """Whether the plan lets anything run beside a collective."""
        serial, full = (self.predict_changed(Settings(overlap=way)) for way in (SERIAL, FULL))
        return serial > full * (1 + _SAME)

    def has(self, need: str) -> bool:
        """Return whether the experiment has what a change needs; see ``causes.Change``."""
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
        graph = TaskGraph(
            self.graph.tasks.copy(), self.graph.dependencies, self.graph.metadata
        ) if settings.anchor == NONE else apply_factors(self.graph, self._share(settings.sharing))  # fmt: skip
        kind = graph.tasks["kind"]
        graph.tasks["duration_s"] *= np.select(
            [kind == "host", kind == "memcpy"], [settings.host, settings.copies], 1.0
        )
        collectives: Any = self.step.collectives
        if (settings.bandwidth, settings.latency) != (1.0, 1.0):
            collectives = ScaledCollectives(collectives, settings.bandwidth, settings.latency)
        return self._predict(
            graph, platform=settings.arrange(self.step.platform), collectives=collectives,
            options=replace(self.step.options, compute_scale=settings.compute),
        ).step_time_s  # fmt: skip

    def _share(self, sharing: float) -> list[Factors]:
        """Return the factors with what ranks lose by computing at once changed, never below none.

        In noisy sessions a step among busy ranks may have been far faster than alone.
        """
        if sharing == 1.0:
            return self.factors
        quiet = self.anchor.quiet
        return [
            {
                phase: max(0.0, quiet[phase] + sharing * (mine[phase] - quiet[phase]))
                for phase in PHASES
            }
            for mine in self.factors
        ]

    def list_replaceable(self, measured: MeasuredParts | None) -> list[str]:
        """Return the models that measured values can stand in for."""
        if measured is None:
            return []
        known = {
            COMPUTE: bool(measured.compute_s), HOST: bool(measured.host_s),
            COMMUNICATION: measured.exchanges_s is not None and self.exchanges_s > 0,
            OVERLAP: measured.hidden is not None and self.hides,
        }  # fmt: skip
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


def measure_parts(
    timeline: pd.DataFrame, measured_s: float, *, beside: bool
) -> MeasuredParts | None:
    """Read the parts of a profiled step; none of a step without events.

    ``measured_s``: median of it without a profiler [s]. ``beside``: whether operators may run
    beside collectives; else one recorded during a collective has waited for it. The profiler is
    taken to stretch all parts evenly. A collective's own time is that of the rank that came last
    (the shortest), a message's from when both ends were there; messages pair in order of start
    between two ranks.
    """
    if timeline.empty:
        return None
    moves = select_communication(timeline)
    factor = measured_s / float(timeline["end_s"].max())
    owns = pd.concat([_own_collectives(timeline), _own_messages(timeline)])
    compute_s, host_s, hidden_s = {}, {}, 0.0
    for rank in sorted({int(rank) for rank in timeline["rank"]}):
        events = timeline[timeline["rank"] == rank]
        known = moves[timeline.index.get_indexer(events.index)]
        busy, moving = _intervals(events[~known]), _intervals(events[known])
        blocking = _intervals(events[events["kind"] == "collective"])
        host_s[rank] = factor * (
            float(events["end_s"].max()) - measure_intervals(merge_intervals([*busy, *moving]))
        )
        for phase, part in events[~known].groupby("phase"):
            spans = _intervals(part)
            spans = spans if beside else subtract_intervals(spans, blocking)
            compute_s[(rank, str(phase))] = factor * measure_intervals(spans)
        mine = owns[(owns["rank"] == rank) & owns["collective"]]
        for start_s, end_s in zip(mine["start_s"], mine["end_s"], strict=True):
            own: Intervals = [(start_s, end_s)]
            hidden_s += measure_intervals(own) - measure_intervals(subtract_intervals(own, busy))
    whole_s = float((owns["end_s"] - owns["start_s"])[owns["collective"]].sum())
    first = owns.drop_duplicates(["collective", "number"])
    exchanges_s = float((first["end_s"] - first["start_s"]).sum())
    return MeasuredParts(
        factor, compute_s, host_s, factor * exchanges_s if exchanges_s > 0 else None,
        hidden_s / whole_s if beside and whole_s > 0 else None,
    )  # fmt: skip


def _intervals(events: pd.DataFrame) -> Intervals:
    return merge_intervals(zip(events["start_s"], events["end_s"], strict=True))


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
    return pd.DataFrame({
        "collective": True, "number": events["number"], "rank": events["rank"],
        "start_s": events["end_s"] - own_s, "end_s": events["end_s"],
    })  # fmt: skip


def _own_messages(timeline: pd.DataFrame) -> pd.DataFrame:
    """Return each message at its receiver, from when both ends were there."""
    ranks = sorted(timeline["rank"].unique())
    sends, receives = (_number(timeline[timeline["kind"] == kind]) for kind in ("send", "recv"))
    if len(ranks) == 2:
        receives = receives.assign(peer=sum(ranks) - receives["rank"])
    else:
        receives = receives.iloc[:0].assign(peer=0)
    pairs = receives.merge(
        sends, left_on=["peer", "number"], right_on=["rank", "number"], suffixes=("", "_sent")
    )
    both_s = np.minimum(np.maximum(pairs["start_s"], pairs["start_s_sent"]), pairs["end_s"])
    return pd.DataFrame({
        "collective": False, "number": range(len(pairs)), "rank": pairs["rank"],
        "start_s": both_s, "end_s": pairs["end_s"],
    })  # fmt: skip
