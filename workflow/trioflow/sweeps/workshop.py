"""Predicts scenarios one after the other and keeps what the next one can use again."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from trioflow.costmodel.choices import (
    choose_times,
    find_collectives,
    load_collectives,
    load_named_platform,
)
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.engine.certainty import CONFIDENCES
from trioflow.engine.compilation import is_repaid
from trioflow.engine.networks import DEFAULT_NETWORK
from trioflow.engine.simulate import simulate, simulate_interval
from trioflow.errors import InputError, TrioflowError
from trioflow.experiments import Plan
from trioflow.hardware.machine import Platform
from trioflow.network.collectives import CollectiveCost
from trioflow.network.measured_links import hold_to_links
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.remembered import Memory, remembering
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.step import load_traces
from trioflow.sweeps.memo_model import MemoModel
from trioflow.sweeps.parameters import PLAN_COLUMNS, resolve_batch, resolve_plan
from trioflow.trace.store import Trace
from trioflow.units import format_bytes

OK, OUT_OF_MEMORY, INFEASIBLE = "ok", "out of memory", "infeasible"
STATUSES = (OK, OUT_OF_MEMORY, INFEASIBLE)
"""What becomes of a scenario: a time, a plan that does not fit the device, one that cannot be."""
MOST_GRAPHS = 16
"""Graphs that are kept: those of one plan on several devices."""
NUMBERS = (
    "step_time_s", "low_s", "high_s", "busy_s", "compute_s", "communication_s",
    "exposed_communication_s", "events",
)  # fmt: skip
"""What a simulation's summary adds to a row; absent where nothing is simulated."""


class Workshop:
    """Traces, platforms, cost models and graphs, each loaded or built once.

    Parameters
    ----------
    traces : mapping of str to sequence of str or Trace
        Files of each trace by its name, or traces; a name that is not here is a shipped
        trace's or a path.
    platforms : mapping of str to str
        Platform files by name, likewise.
    interval : bool
        Whether every scenario has an interval.

    Attributes
    ----------
    graphs : int
        Graphs built so far.

    Raises
    ------
    TrioflowError
        Where a file cannot be read, at the first scenario that needs it; what
        is wrong with a scenario itself goes into its row.
    """

    def __init__(
        self,
        traces: Mapping[str, Sequence[str | Trace]] | None = None,
        platforms: Mapping[str, str] | None = None,
        *,
        interval: bool = True,
    ) -> None:
        self.trace_files, self.platform_files = dict(traces or {}), dict(platforms or {})
        self.interval = interval
        self.graphs = 0
        self._traces: dict[str, list[Trace]] = {}
        self._platforms: dict[tuple[str, int], Platform] = {}
        self._collectives: dict[tuple[Path, int], tuple[Platform, CollectiveCost]] = {}
        self._times: dict[tuple[str, ...], DeviceTimes] = {}
        self._graphs: OrderedDict[str, TaskGraph] = OrderedDict()
        self._events, self._loaded = 0, False
        self.memory = Memory()

    def load_traces(self, name: str) -> list[Trace]:
        """Return the traces of a name."""
        if name not in self._traces:
            self._traces[name] = load_traces(self.trace_files.get(name, [name]))
        return self._traces[name]

    def load_platform(self, name: str, ranks: int) -> Platform:
        """Return a platform with a number of ranks."""
        if (name, ranks) not in self._platforms:
            file = self.platform_files.get(name, name)
            self._platforms[name, ranks] = load_named_platform(file, ranks)
        return self._platforms[name, ranks]

    def load_collectives(self, platform: Platform) -> CollectiveCost | None:
        """Return a platform's measured collectives, or None where there are none."""
        path = find_collectives(platform)
        if path is None:
            return None
        key = (path, id(platform))
        if key not in self._collectives:
            # The platform is kept with it, so that no other gets its identity.
            self._collectives[key] = platform, hold_to_links(load_collectives(path), platform)
        return self._collectives[key][1]

    def time_operators(
        self, trace: str, device_name: str, cost_model: str = "", override: str = ""
    ) -> DeviceTimes:
        """Return traces with a device's times and a model that remembers its answers."""
        key = (trace, device_name, cost_model, override)
        if key not in self._times:
            times = choose_times(
                self.load_traces(trace), device_name, cost_model or None, override or None
            )
            times.model = MemoModel(times.model)
            self._times[key] = times
        return self._times[key]

    def build_graph(
        self, times: DeviceTimes, key: Sequence[Any], plan: Plan, batch: int, platform: Platform
    ) -> tuple[str, TaskGraph]:
        """Return a plan's graph and the digest of what it was built from.

        Parameters
        ----------
        times : DeviceTimes
            Operators on the platform's device.
        key : sequence
            What ``times`` are of: trace, cost model, override.
        plan, batch, platform
            As in ``extrapolate``; of the platform the host costs count.
        """
        told = [*key, platform.device.name, dict(platform.host), asdict(plan), batch]
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
        if digest in self._graphs:
            self._graphs.move_to_end(digest)
            return digest, self._graphs[digest]
        with remembering(self.memory):
            graph = extrapolate(times.traces, plan, times.model, batch=batch, host=platform.host)
        self.graphs += 1
        self._graphs[digest] = graph
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return digest, graph

    def simulate(
        self, graph: TaskGraph, platform: Platform, *, interval: bool, **how: Any
    ) -> dict[str, Any]:
        """Return the summary of a simulation with the platform's own collectives.

        Parameters
        ----------
        graph, platform
            As for ``engine.simulate.simulate``.
        interval : bool
            Whether ``low_s`` and ``high_s`` are asked for.
        **how
            Further arguments of it.

        Notes
        -----
        Loading the compiled engine pays for a large graph, or for many small
        ones: it is loaded once as many events have gone through the plain one
        as would have repaid it. Both give the same bits.
        """
        run = simulate_interval if interval else simulate
        loads = not self._loaded and how.get("network", DEFAULT_NETWORK) == DEFAULT_NETWORK
        if loads and is_repaid(self._events):
            self._loaded = True
            how["engine"] = "compiled"
        summary = run(graph, platform, self.load_collectives(platform), **how).summary
        self._events += int(summary["events"]) * (3 if interval else 1)
        return summary

    def predict(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a scenario: ``tables.SWEEP_RESULTS``.

        Parameters
        ----------
        number : int
            Goes into the column ``scenario``.
        values : mapping
            A value for every parameter; see ``parameters.fill_values``.
        """
        traces = self.load_traces(values["trace"])
        self.load_platform(values["platform"], 1)
        row: dict[str, Any] = {
            "scenario": number, **values, "workload": str(traces[0].facts["workload"]),
            "status": INFEASIBLE, "reason": "", **dict.fromkeys(_ABSENT),
        }  # fmt: skip
        try:
            plan = resolve_plan(values)
            batch = resolve_batch(values, plan, int(traces[0].facts["batch"]))
            row |= {name: getattr(plan, name) for name in PLAN_COLUMNS}
            row |= {"ranks": plan.ranks, "batch": batch, "samples": batch // plan.data}
            return row | self._simulate(values, plan, batch)
        except TrioflowError as error:
            # Without the file, which is a path of this machine.
            told = [error.problem, error.fix] if isinstance(error, InputError) else [str(error)]
            return row | {"status": INFEASIBLE, "reason": "; ".join(filter(None, told))}

    def _simulate(self, values: Mapping[str, Any], plan: Plan, batch: int) -> dict[str, Any]:
        """Return what a scenario comes to."""
        platform = self.load_platform(values["platform"], plan.ranks)
        key = [values[name] for name in ("trace", "cost_model", "override")]
        times = self.time_operators(key[0], platform.device.name, key[1], key[2])
        digest, graph = self.build_graph(times, key, plan, batch, platform)
        peak, room = int(graph.metadata["peak_memory_bytes"]), platform.device.memory_bytes
        told: dict[str, Any] = {
            "device_name": platform.device.name,
            "plan_text": graph.metadata["plan_text"],
            "graph": digest,
            "peak_memory_bytes": peak,
            "memory_bytes": room,
        }
        if peak > room:
            reason = f"{format_bytes(peak)} do not fit {format_bytes(room)}"
            return told | {"status": OUT_OF_MEMORY, "reason": reason}
        summary = self.simulate(
            graph, platform, interval=self.interval, network=values["network"],
            compute_scale=draw_scales(values, plan.ranks),
            communication_scale=values["communication_scale"],
        )  # fmt: skip
        confidences = [
            graph.metadata["compute_confidence"],
            summary["confidence"],
            times.confidence,
        ]
        step_s = summary["step_time_s"]
        return told | {name: summary.get(name) for name in NUMBERS} | {
            "status": OK,
            "samples_per_s": batch / step_s if step_s else None,
            "confidence": max(confidences, key=CONFIDENCES.index),
        }  # fmt: skip


_ABSENT = (
    *NUMBERS, "samples_per_s", "peak_memory_bytes", "memory_bytes", "device_name", "plan_text",
    "graph", "confidence",
)  # fmt: skip
"""Columns that a scenario without a graph or a time leaves empty."""


def draw_scales(values: Mapping[str, Any], ranks: int) -> float | list[float]:
    """Return the factor on compute times: one for all ranks, or one drawn for each.

    Notes
    -----
    The logarithms are normal with the standard deviation ``rank_spread``, so
    that half of the ranks are slower than predicted; the same seed gives the
    same factors to the first ranks whatever their number.
    """
    scale = float(values["compute_scale"])
    if not values["rank_spread"]:
        return scale
    drawn = np.random.default_rng(int(values["seed"])).standard_normal(ranks)
    factors: list[float] = (scale * np.exp(values["rank_spread"] * drawn)).tolist()
    return factors
