"""Scenarios of a sweep: cut into jobs, and predicted one after the other, keeping what the next one can use again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from trioflow import tables
from trioflow.base.derived import Derives, derived
from trioflow.base.errors import InputError, TrioflowError, spell_keywords
from trioflow.base.experiments import Plan
from trioflow.base.units import format_apart, format_time
from trioflow.costmodel.choices import DeviceTimes, find_own_model
from trioflow.hardware.machine import DeviceSheet, Platform
from trioflow.network.across_nodes import INTER_NODE, open_platform
from trioflow.parallel.model_graph import ModelGraph
from trioflow.parallel.splits.tensor_split import set_routing
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.assembly import TIMES, build_graph, join_step, predict_step
from trioflow.prediction.question import (
    DEFAULTS,
    STEP_WORDS,
    Options,
    Question,
    Traces,
    count_samples,
    cut_micro_batches,
    find_model,
    load_traces,
    time_operators,
)
from trioflow.prediction.step import Step
from trioflow.sweeps.description import (
    PARAMETERS,
    PLAN_COLUMNS,
    Sweep,
    load_sweep,
    read_assumptions,
    resolve_batch,
    resolve_plan,
)
from trioflow.trace.store import MEMBERS, Trace

OK, OUT_OF_MEMORY, INFEASIBLE = "ok", "out of memory", "infeasible"
"""What becomes of a scenario: a time, a plan that does not fit the device, one that cannot be."""
_MOST_PLATFORMS = 16
"""Platforms that are kept, with what plans their collectives."""
_MOST_GRAPHS = 16
"""Graphs that are kept: those of one plan on several devices."""
_OF_RUNS = ("network", "compute_scale", "communication_scale", "rank_spread", "seed")
"""Parameters that matter only when a step runs."""
PREDICTED = (*TIMES, "events", "samples_per_s", "confidence")
"""What a prediction adds to a row; absent where nothing is simulated."""


class PredictionCache(Derives):
    """Traces, platforms, cost models and graphs, each loaded or built once.

    A file that cannot be read raises TrioflowError at the first scenario that needs it; a scenario's own fault goes
    into its row. A name not in ``traces`` or ``platforms`` is a shipped one's or a path; ``graphs`` counts those built.
    ``steps``: what is asked of a language model's step, by trace (``STEP_WORDS``); ``routing``: of all traces;
    ``inter_node``: as for ``network.across_nodes.open_platform``.
    """

    def __init__(
        self,
        traces: Mapping[str, Traces] | None = None,
        platforms: Mapping[str, Platform | str | Path] | None = None,
        *,
        interval: bool = True,
        inter_node: Mapping[str, Any] | None = None,
        steps: Mapping[str, Mapping[str, Any]] | None = None,
        routing: Mapping[str, Any] | None = None,
    ) -> None:
        self.trace_files, self.platform_files = dict(traces or {}), dict(platforms or {})
        self.interval, self.inter_node = interval, dict(inter_node or {})
        self.graphs = 0
        self.steps, self.routing = dict(steps or {}), routing

    @derived()
    def load_traces(self, name: str, samples: int | None = None) -> list[Trace]:
        """Return the traces of a name; of a language model the one of a micro-batch of ``samples``, by default one."""
        files = self.trace_files.get(name, name)
        if samples and (not find_model(files) or samples == self.load_traces(name)[0].facts.batch):
            return self.load_traces(name)
        step = {**self.steps.get(name, {}), **({"batch": samples} if samples else {})}
        traces = load_traces(files, fixed=True, **step)
        return [ModelGraph.of(set_routing(trace, self.routing)) for trace in traces]

    def name_step(self, name: str, step: Mapping[str, Any]) -> str:
        """Return a name for a language model's trace under what is asked of its step; that of the trace without."""
        if not step:
            return name
        key = f"{name} {json.dumps(step)}"
        self.trace_files[key] = self.trace_files.get(name, name)
        self.steps[key] = {**self.steps.get(name, {}), **step}
        return key

    @derived(most=_MOST_PLATFORMS)
    def load_platform(self, /, name: str, ranks: int, **inter_node: Any) -> Platform:
        """Return a platform with a number of ranks, with the network between nodes as measured."""
        file = self.platform_files.get(name, name)
        if isinstance(file, Platform) and file.ranks < ranks:
            raise InputError(f"{name} has {file.ranks} ranks, not {ranks}", fix="load it with more of them")
        if isinstance(file, Platform):
            file = replace(file, ranks=ranks)
        return open_platform(file, ranks, **{**self.inter_node, **inter_node})

    def time_operators(
        self,
        trace: str,
        device: DeviceSheet | str,
        cost_model: str = "",
        override: str = "",
        samples: int | None = None,
    ) -> DeviceTimes:
        """Return traces of ``load_traces`` with a device's times, and the model of its operators."""
        return self._time(self.load_traces(trace, samples), device, cost_model, override)

    @derived()
    def _time(self, traces: list[Trace], device: DeviceSheet | str, cost_model: str, override: str) -> DeviceTimes:
        return time_operators(traces, device, Options(cost_model=cost_model or None, override=override or None))

    def build_graph(
        self,
        times: DeviceTimes,
        key: Sequence[Any],
        plan: Plan,
        batch: int,
        platform: Platform,
        options: Options = DEFAULTS,
    ) -> tuple[str, TaskGraph]:
        """Return a plan's graph and the digest of what it was built from; the last ones are kept.

        ``key`` says what ``times`` are of (trace, cost model, override) and what ``options`` are; of the platform the host
        costs count.
        """
        device = platform.device
        numbers = dict(device.sheet.numbers) if device.sheet else {}
        described = [*key, device.name, device.memory_bytes, numbers, dict(platform.host), asdict(plan), batch]
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
        return digest, self._build(digest, times, plan, batch, platform, options)

    @derived(lambda digest, *described: digest, most=_MOST_GRAPHS)
    def _build(
        self, digest: str, times: DeviceTimes, plan: Plan, batch: int, platform: Platform, options: Options
    ) -> TaskGraph:
        host = platform.host_of(plan, times.traces[0].facts.recipe.framework)
        graph = build_graph(times, plan, batch=batch, host=host, options=options, device=platform.device)
        self.graphs += 1
        return graph

    def prepare(
        self, times: DeviceTimes, graph: TaskGraph, platform: Platform, options: Options = DEFAULTS, **changes: Any
    ) -> Step:
        """Return the step of a graph, with the platform's own collectives unless the options name others."""
        metadata = graph.metadata
        return join_step(graph, Question(times, metadata.plan, metadata.batch, platform, replace(options, **changes)))

    def predict(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a scenario, number ``number`` in the column ``scenario``: ``tables.SWEEP_RESULTS``."""
        settled, step = self._settle(values)
        row = {"scenario": number, **values, **settled}
        if step is None:
            return row
        try:
            changes = {
                "network": values["network"],
                "communication_scale": values["communication_scale"] * step.options.communication_scale,
                "compute_scale": step.options.scale_compute(draw_scales(values, step.platform.ranks)).compute_scale,
            }
            prediction = predict_step(step.replace_options(**changes))
            summary, rate = prediction.simulated.result.summary, prediction.samples_per_s
            row |= {name: getattr(summary, name) for name in (*TIMES, "events")}
            return row | {"samples_per_s": rate, "confidence": prediction.confidence, "status": OK}
        except TrioflowError as error:
            return row | _refuse(error)

    @derived(lambda values: tuple(v for name, v in values.items() if name not in _OF_RUNS), most=_MOST_GRAPHS)
    def _settle(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], Step | None]:
        """Return what is known of a scenario before it runs, the same for all on one graph, and its step; none where nothing runs."""
        name = str(values["trace"])
        # A file that cannot be read is the sweep's fault, not a scenario's.
        model = find_model(self.trace_files.get(name, name))
        workload = name if model else self.load_traces(name)[0].facts.workload
        self.load_platform(values["platform"], 1)
        row: dict[str, Any] = {"workload": workload, "status": INFEASIBLE, "reason": "", **dict.fromkeys(_ABSENT)}
        try:
            options = Options(interval=self.interval, **read_assumptions(values))
            language_step = {word: value for word, value in options.language_step.items() if value is not None}
            trace = self.name_step(name, language_step)
            facts = self.load_traces(trace)[0].facts
            plan = resolve_plan(values)
            batch = resolve_batch(values, plan, facts.batch)
            if not (values["micro_batches"] or values["accumulate"] > 1 or options.last_batch):
                plan = cut_micro_batches(model, plan, batch, values["micro_batch"] or None, options.mode)
            row |= {name: getattr(plan, name) for name in PLAN_COLUMNS}
            row |= {"ranks": plan.ranks, "batch": batch, "samples": batch // plan.data, "workload": facts.workload}
            platform = self.load_platform(values["platform"], plan.ranks, **options.inter_node)
            key = [trace, *(values[name] for name in ("cost_model", "override", *OF_GRAPH))]
            fitted = key[1] or find_own_model(platform) or ""
            times = self.time_operators(trace, platform.device.described, fitted, key[2], count_samples(plan, batch))
            digest, graph = self.build_graph(times, key, plan, batch, platform, options)
            step = self.prepare(times, graph, platform, options)
        except TrioflowError as error:
            return row | _refuse(error), None
        room = platform.device.memory_bytes
        row |= {
            "device_name": platform.device.name,
            "plan_text": graph.metadata.plan_text,
            "graph": digest,
            "peak_memory_bytes": step.known_peak_bytes,
            "memory_bytes": room,
        }
        if step.fits_memory is False:
            needed = format_apart(step.wanted_bytes + step.outside_bytes, room)
            return row | {"status": OUT_OF_MEMORY, "reason": f"{needed[0]} do not fit {needed[1]}"}, None
        return row, step


def _refuse(error: TrioflowError) -> dict[str, Any]:
    """Return the row of an infeasible scenario: why, without the file, whose path is local to this machine."""
    words = [error.problem, error.fix] if isinstance(error, InputError) else [str(error)]
    reason = spell_keywords("; ".join(filter(None, words)))
    return {**dict.fromkeys(_ABSENT), "status": INFEASIBLE, "reason": reason}


OF_GRAPH = ("anchor", "stages", "mode", "last_batch", "routing")
"""Assumptions that decide a graph, beside what the trace is asked."""
_ABSENT = (*PREDICTED, "peak_memory_bytes", "memory_bytes", "device_name", "plan_text", "graph")
"""Columns that a scenario without a graph or a time leaves empty."""


def draw_scales(values: Mapping[str, Any], ranks: int) -> float | list[float]:
    """Return the factor on compute times: one for all ranks, or one drawn for each.

    Normal logarithms of standard deviation ``rank_spread``: half of the ranks are slower than predicted. A seed gives
    the first ranks the same whatever their number.
    """
    scale = float(values["compute_scale"])
    if not values["rank_spread"]:
        return scale
    drawn = np.random.default_rng(int(values["seed"])).standard_normal(ranks)
    factors: list[float] = (scale * np.exp(values["rank_spread"] * drawn)).tolist()
    return factors


TABLE = "sweep_results"
_REPORT_EVERY_S = 5.0
"""How often a job says how far it has come."""


def simulate_sweep(description: str | Path, digest: str, target: str | Path, size: int = 0) -> None:
    """Predict the scenarios of one chunk into ``target``, a Parquet file of ``tables.SWEEP_RESULTS``, whole or not.

    They are numbered from 0 in the chunk's order, so that the file stays right when others come or go. Raises
    TrioflowError when there is no such chunk, a scenario's file is missing or broken, or the table cannot be written.
    """
    sweep = load_sweep(description)
    chunk = find_chunk(sweep, digest, size)
    rows = _predict_chunk(sweep, chunk)
    with written(target):
        tables.write_table(rows, TABLE, target, {"sweep": sweep.name, "chunk": digest})


def _predict_chunk(sweep: Sweep, chunk: Chunk) -> pd.DataFrame:
    """Return the rows of a chunk, numbered from 0; says on standard output how far it has come."""
    cache = PredictionCache(sweep.traces, sweep.platforms, interval=sweep.interval)
    began_s = reported_s = time.monotonic()
    rows = []
    count = len(chunk.numbers)
    print(f"sweep {sweep.name}, chunk {chunk.digest}: {count} scenarios", flush=True)
    for place, values in enumerate(sweep.scenarios[list(chunk.numbers)]):
        rows.append(cache.predict(place, values))
        now_s = time.monotonic()
        if now_s - reported_s >= _REPORT_EVERY_S or place + 1 == count:
            reported_s = now_s
            print(
                f"{place + 1} of {count} scenarios, {cache.graphs} graphs, "
                f"{sum(row['status'] != OK for row in rows)} without a time, "
                f"after {format_time(now_s - began_s)}",
                flush=True,
            )
    return make_frame(rows)


def make_frame(rows: Sequence[dict[str, object]]) -> pd.DataFrame:
    """Return rows as a frame of ``tables.SWEEP_RESULTS``."""
    frame: pd.DataFrame = pa.Table.from_pylist(rows, tables.SWEEP_RESULTS).to_pandas(
        types_mapper={tables.INT: pd.Int64Dtype()}.get
    )
    return frame


@contextmanager
def written(target: str | Path) -> Iterator[None]:
    """Turn what keeps a block from writing, an OSError such as of a full disk, into one sentence of InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}",
            file=target,
            fix="make room, then start Snakemake again: what is finished is kept",
        ) from None


@cache
def plan_sweep(description: str, size: int) -> dict[str, list[str]]:
    """Return the files that each chunk needs, shipped ones apart, by the chunk's digest; InputError as ``load_sweep``."""
    sweep = load_sweep(description)
    return {chunk.digest: list_chunk_files(sweep, chunk.numbers) for chunk in cut_chunks(sweep, size)}


SIMULATED_ONLY = (
    *("platform", "network", "collectives", *INTER_NODE, "operator_scales", "slow_ranks"),
    *("compute_scale", "communication_scale", "rank_spread", "seed"),
)
"""Parameters that leave operators and their sizes alone: scenarios that differ in these only stay together."""
_PACK_ENDINGS = (".zip", ".trace")
"""What a pack that is not there yet is recognised by."""
_FIRST = ("trace", *STEP_WORDS, "cost_model", "override", "tensor", "samples", "micro_batches", "batch")
"""Parameters that decide the sizes of operators, the most expensive to have again first."""
_GRAPH = (*_FIRST, *(name for name in PARAMETERS if name not in _FIRST and name not in SIMULATED_ONLY))
"""Parameters that decide a graph, the device apart."""
JOBS, LEAST_CHUNK, LARGEST_CHUNK = 16, 64, 8192
"""Of a sweep whose chunks nobody sized: jobs at least, and scenarios of each; docs/sweeps.md says why."""


@dataclass(frozen=True)
class Chunk:
    """Scenarios of one job."""

    # Of all that the job depends on: its scenarios, the files behind their names, and whether there
    # are intervals. The name of its file.
    digest: str
    # Numbers of its scenarios in the sweep, in the order in which they run
    numbers: tuple[int, ...]


def choose_size(count: int) -> int:
    """Return a chunk's default size: at least `JOBS` jobs of 64 to 8192, doubled so that edits seldom cut anew."""
    size = LEAST_CHUNK
    while size * JOBS < count and size < LARGEST_CHUNK:
        size *= 2
    return size


def cut_chunks(sweep: Sweep, size: int = 0) -> list[Chunk]:
    """Cut the scenarios of a sweep into chunks of at most ``size``; the description's own goes before, `choose_size` for 0.

    Sorted so that those of one graph, then of one set of operator sizes, follow one another. A chunk also ends where,
    at least half full, the digest of a group says so: places that stay when scenarios come or go elsewhere, so most
    finished chunks of an edited sweep are kept.
    """
    scenarios = sweep.scenarios
    size = sweep.chunk or size or choose_size(len(scenarios))
    graph = scenarios.rank(_GRAPH)
    keys = [*graph, *scenarios.rank(SIMULATED_ONLY)]
    order = np.lexsort(keys[::-1]) if keys else np.arange(len(scenarios))
    follows = np.zeros(len(scenarios) - 1, dtype=bool)
    for rank in graph:
        follows |= rank[order[1:]] != rank[order[:-1]]
    # Places behind the last scenario of each graph
    ends = np.flatnonzero(follows) + 1
    graphs = [[values[name] for name in _GRAPH] for values in scenarios[order[ends - 1].tolist()]]
    chunks: list[Chunk] = []
    first = 0
    while first < len(order):
        last = min(first + size, len(order))
        low, high = np.searchsorted(ends, [first + (size + 1) // 2, last])
        for end, key in zip(ends[low:high], graphs[low:high], strict=True):
            if hashlib.sha256(json.dumps(key).encode()).digest()[0] < 32:
                last = int(end)
                break
        numbers = tuple(order[first:last].tolist())
        chunks.append(Chunk(_digest_chunk(sweep, numbers), numbers))
        first = last
    return chunks


def find_chunk(sweep: Sweep, digest: str, size: int = 0) -> Chunk:
    """Return the chunk of a digest; InputError when there is none: the description changed since the job was planned."""
    for chunk in cut_chunks(sweep, size):
        if chunk.digest == digest:
            return chunk
    raise InputError(
        f"the sweep {sweep.name} has no chunk {digest}: its description changed after the run was planned",
        fix="start Snakemake again",
    )


def list_chunk_files(sweep: Sweep, numbers: Sequence[int]) -> list[str]:
    """Return the files that some scenarios need, those that ship apart."""
    used = sweep.scenarios[list(numbers)].different
    traces = sorted({*used("trace")} & set(sweep.traces))
    files = [part for name in traces for path in sweep.traces[name] for part in _list_parts(path)]
    platforms = sorted({*used("platform")} & set(sweep.platforms))
    files += [sweep.platforms[name] for name in platforms]
    return [*files, *sorted({*used("override")} - {""})]


def list_sweep_files(description: str | Path) -> list[str]:
    """Return the files that all scenarios of a description need, those that ship apart."""
    sweep = load_sweep(description)
    return list_chunk_files(sweep, range(len(sweep.scenarios)))


def _list_parts(trace: str) -> list[str]:
    """Return the files of a trace: the pack, or those of the folder, which may still have to be made."""
    packed = Path(trace).is_file() or Path(trace).suffix in _PACK_ENDINGS
    if packed and not Path(trace).is_dir():
        return [trace]
    return [f"{trace}/{name}" for name in MEMBERS]


def _digest_chunk(sweep: Sweep, numbers: Sequence[int]) -> str:
    used = sweep.scenarios[list(numbers)].list_columns()
    files = {
        "traces": {name: sweep.traces.get(name) for name in used["trace"]},
        "platforms": {name: sweep.platforms.get(name) for name in used["platform"]},
    }
    text = json.dumps([len(numbers), used, files, sweep.interval], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
