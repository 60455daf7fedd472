"""Step times and memory of nanotron's runs, predicted by what ``simulate`` calls, beside what was measured.

`judge_steps` and `judge_memory` are the doors. `read_runs` reads 1,765 runs on 8 to 512 H100, and 2,339 that failed: what
they ran, and what was measured.

References
----------
"The Ultra-Scale Playbook" (nanotron), whose sweep Rapid-LLM publishes whole; nanotron's ``scripts/scaling_benchmarks.py`` (sizes), ``helpers.py``
(``log_throughput``: rank 0 writes ``max_memory_allocated`` and
``max_memory_reserved``, in GiB), ``models/base.py`` (layers of a stage).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from trioflow.base.errors import InputError, TrioflowError
from trioflow.base.experiments import Plan
from trioflow.base.precision_recipes import NANOTRON
from trioflow.base.units import BYTES_PER_GIB
from trioflow.costmodel.choices import DeviceTimes
from trioflow.engine.compiled.run import load_kernels
from trioflow.hardware.machine import InterNode, Platform
from trioflow.hardware.platform import load_platform
from trioflow.parallel.memory.peak import count_wanted
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.assembly import build_graph, predict
from trioflow.prediction.question import Options, time_operators
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.sizes import LanguageModel, LanguageStep
from trioflow.trace.store import Trace, pipeline_units

from trioflow_evaluation.clusters.parts import extend_steps, name_part
from trioflow_evaluation.clusters.scores import (
    BEFORE,
    FAILED,
    FITTED,
    GPUS_OF_A_NODE,
    RAN,
    RAN_OUT,
    SEQUENCE,
    SUCCEEDED,
    is_fitted_on,
    name_model,
)
from trioflow_evaluation.fits.collectives import (
    FAST,
    MESSAGE_BYTES,
    NO_NVLINK,
    NODE_RATES,
    NODES_PLATFORM,
    SLOW_NODES,
    name_network,
    read_cluster_runs,
)
from trioflow_evaluation.fits.operator_baselines import ProportionalModel
from trioflow_evaluation.tables import CLUSTER_MEMORY, CLUSTER_STEPS

DEVICE = "NVIDIA H100 80GB HBM3"
PLATFORM = NODES_PLATFORM
"""Nodes of eight H100 with EFA: what the runs had."""


HOPELESS = 1.4
"""A peak so many times the card's memory: a run that needs more still needs no estimate of its own."""


def judge_memory(runs: Sequence[Run]) -> pd.DataFrame:
    """Return what was measured and predicted of each run that succeeded or ran out of memory: ``CLUSTER_MEMORY``.

    Other failures, plans that the model does not allow among them, are left out: memory does not explain them.
    Rank 0 wrote the file: its stage's peak is compared. Under 1F1B further micro-batches than one
    more than the stages change nothing, nor do replicas beyond two without ZeRO: they are not
    built. nanotron's peak of what is handed out is that of the update: it forgets the peak behind the last backward.
    """
    runs = [run for run in runs if run.status in (SUCCEEDED, RAN_OUT)]
    rows: dict[int, dict[str, Any]] = {}
    for model in sorted({(run.hidden, run.key_values, run.vocabulary) for run in runs}):
        of_model = [i for i, run in enumerate(runs) if (run.hidden, run.key_values, run.vocabulary) == model]
        of_model.sort(
            key=lambda i: (runs[i].tensor, runs[i].pipeline, runs[i].data, runs[i].micro_batch, runs[i].accumulate)
        )
        rows |= zip(of_model, _judge_model([runs[i] for i in of_model]), strict=True)
    return pd.DataFrame([rows[i] for i in range(len(runs))], columns=CLUSTER_MEMORY.names)


def _judge_model(runs: Sequence[Run]) -> list[dict[str, Any]]:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    trace, rows = trace_run(runs[0]), []
    times = replace(time_operators(trace, DEVICE), model=_AnyTime())
    for run in runs:
        stages = keep_depth(cut_stages(trace, run), run.pipeline)
        pieces = min(run.accumulate, len(stages) + 1 if len(stages) > 1 else 2)
        data = run.data if run.zero else min(run.data, 2)
        platform = _load_nodes(name_platform(run), 1)
        cut = (len(stages), run.pipeline, run.tensor, data, run.zero, run.nodes > 1, platform.name)
        key = (*cut, run.micro_batch, pieces)
        if key not in known:
            for other, of_other in known.items():
                if (
                    other[:-2] == cut
                    and other[-2] <= key[-2]
                    and other[-1] <= key[-1]
                    and of_other["fullest_bytes"] > HOPELESS * platform.device.memory_bytes
                ):
                    known[key] = {**of_other, "least": True}
                    break
            else:
                plan = plan_run(run, len(stages), pieces, data)
                options = Options(stages=stages if len(stages) > 1 else None)
                costs = platform.host_of(replace(plan, data=run.data), NANOTRON)
                # Launches change no peak.
                host = {key: cost for key, cost in costs.items() if key.startswith("tensor_parallel")}
                batch = data * pieces * run.micro_batch
                graph = build_graph(times, plan, batch=batch, host=host, options=options, device=platform.device)
                known[key] = _size_graph(graph)
        rows.append(
            {
                **_describe(run),
                "status": run.status,
                "measured_bytes": run.measured_bytes,
                "measured_update_bytes": run.allocated_bytes,
                **known[key],
            }
        )
    return rows


def _size_graph(graph: TaskGraph) -> dict[str, Any]:
    """Return what is predicted of rank 0 and of the fullest rank; ``CLUSTER_MEMORY`` says what."""
    memory, curves = graph.metadata.memory, graph.metadata.memory_curves
    stage, curve = next(pair for pair in zip(memory, curves, strict=True) if 0 in pair[0]["ranks"])
    phases = graph.tasks.loc[graph.tasks["rank"] == 0, "phase"].to_numpy()
    places, held_bytes = np.array(curve["places"]), np.array(curve["bytes"])
    behind = int(np.flatnonzero(phases == "backward")[-1]) + 1
    first = int(np.searchsorted(places, behind, side="right")) - 1
    return {
        "allocated_bytes": stage["peak_bytes"],
        "update_bytes": int(held_bytes[first:].max()),
        **stage["beside"],
        "reserved_bytes": count_wanted(stage),
        "fullest_bytes": max(entry["peak_bytes"] for entry in memory),
        "fullest_reserved_bytes": max(map(count_wanted, memory)),
        "least": False,
    }


class _AnyTime(ProportionalModel):
    """Times that cost little: no peak depends on how long operators take, only on their order."""

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Return a second for each operator."""
        return pd.DataFrame({"time_s": 1.0, "low_s": 1.0, "high_s": 1.0, "extrapolated": False}, index=operators.index)


def keep_depth(stages: Sequence[Sequence[str]], pipeline: int) -> list[list[str]]:
    """Return as many stages as the run has, whatever lies on the last ones.

    Where the head ends nanotron's last but one stage, rank 0 still holds a micro-batch for the last
    one: such a stage gets the last unit of a later one that has several.
    """
    deep = [list(stage) for stage in stages]
    while len(deep) < pipeline:
        several = [i for i, stage in enumerate(deep) if i and len(stage) > 1]
        if not several:
            break
        deep.insert(several[-1] + 1, [deep[several[-1]].pop()])
    return deep


PRECISION = "nanotron-bf16"
_SIZES = {
    2048: (16, 32, 8192),
    3072: (28, 32, 8192),
    4096: (32, 32, 14336),
    8192: (80, 64, 28672),
    16384: (126, 128, 53248),
}
"""Layers, heads and feed-forward of nanotron's models, by hidden size."""
_TIED_BELOW = 10_000


Run = Any
"""One row of the file, its columns as `read_runs` calls them.

``hidden``, ``key_values`` (heads) and ``vocabulary`` name the model; ``accumulate`` counts a replica's micro-batches;
``rates``: what the job's collectives reach inside a node and over all its ranks, by operation [GB/s]; ``ran``: whether it
came to its end; ``parameters`` to three digits [1e9]; ``network``: which one the job had; ``set``, ``part``: where it is
judged. What the file does not give is not a number.
"""


def read_runs(data_folder: str | Path, part: str = "") -> list[Run]:
    """Read all runs, or a part's, those that ran first; InputError where the file is missing or lacks a column."""
    file = read_cluster_runs(data_folder)
    lacking = sorted(set(_COLUMNS) - set(file))
    if lacking:
        raise InputError(f"no column {lacking[0]!r}", file=data_folder, fix="retrieve it again")
    runs = (
        file.rename(columns=_COLUMNS)
        .astype({"nodes": int, "accumulate": int})
        .sort_values("status", key=lambda ends: ends != SUCCEEDED, kind="stable")
    )
    rates: Any = [
        {name: (row[inside], row[every]) for name, (inside, every) in NODE_RATES.items()}
        for row in file.loc[runs.index].to_dict("records")
    ]
    # Of runs that failed the heads of keys and values are not known: as many as heads.
    heads = runs["hidden"].map({hidden: heads for hidden, (_, heads, _) in _SIZES.items()})
    runs = runs.assign(
        key_values=runs["key_values"].where(runs["key_values"] > 0, heads).astype(int),
        allocated_bytes=runs["allocated_gib"] * BYTES_PER_GIB,
        measured_bytes=runs["reserved_gib"] * BYTES_PER_GIB,
        measured_step_s=SEQUENCE
        * runs["micro_batch"]
        * runs["accumulate"]
        * runs["data"]
        / (GPUS_OF_A_NODE * runs["nodes"] * runs["gpu_tokens_per_s"]),
        mfu=runs["mfu"] / 100,
        ran=runs["status"] == SUCCEEDED,
        rates=rates,
    )
    sizes, jobs = (
        runs[names].itertuples(index=False) for names in (["hidden", "key_values", "vocabulary"], ["nodes", "rates"])
    )
    runs["parameters"] = [_count_parameters(*size) for size in sizes]
    runs["network"] = [name_network(nodes, *rates["all_gather"]) for nodes, rates in jobs]
    fitted = [is_fitted_on(*run) for run in runs[["parameters", "nodes", "tensor"]].itertuples(index=False)]
    faulty = (runs["pipeline"] > 1) & ~runs["after_fix"].astype(bool)
    runs["set"] = np.select([~runs["ran"], faulty, fitted], [FAILED, BEFORE, FITTED], RAN)
    runs["part"] = [name_part(*run) for run in runs[["parameters", "tensor"]].itertuples(index=False)]
    named = runs.drop(columns=[name for name in runs if not str(name).isidentifier()])
    return list(named[named["part"] == (part or named["part"])].itertuples(index=False, name="Run"))


_COLUMNS = {
    "hidden_size": "hidden",
    "num_kv_heads": "key_values",
    "vocab_size": "vocabulary",
    "nodes": "nodes",
    "mbs": "micro_batch",
    "batch_accum": "accumulate",
    "dp": "data",
    "pp": "pipeline",
    "tp": "tensor",
    "zero_stage": "zero",
    "Mem Alloc (GB)": "allocated_gib",
    "Mem Res (GB)": "reserved_gib",
    "tok/s/gpu": "gpu_tokens_per_s",
    "mfu": "mfu",
    "status": "status",
    "after_pp_fix": "after_fix",
}


def find_run_sizes(run: Run) -> LanguageModel:
    """Return the sizes of a run's model."""
    layers, heads, feed_forward = _SIZES[run.hidden]
    return LanguageModel(
        name_model(run.parameters),
        layers,
        run.hidden,
        heads,
        run.key_values,
        run.hidden // heads,
        feed_forward,
        run.vocabulary,
        tied=feed_forward < _TIED_BELOW,
    )


@cache
def _count_parameters(hidden: int, key_values: int, vocabulary: int) -> float:
    layers, heads, feed_forward = _SIZES[hidden]
    attention = 2 * hidden**2 * (1 + key_values / heads)
    tables = vocabulary * hidden * (1 if feed_forward < _TIED_BELOW else 2)
    total = layers * (attention + 3 * hidden * feed_forward) + tables
    return float(f"{total / 1e9:.3g}")


def join_network(run: Run, platform: Platform) -> Platform:
    """Return a platform as a run's job measured it: its collectives over all nodes, and links inside a node.

    Some jobs' nodes had no NVLink. A ring's step beyond its bytes takes as long on fewer nodes as on all.
    """
    if run.nodes > 1:
        rates = {name: over_nodes * 1e9 for name, (_, over_nodes) in run.rates.items()}
        measured = InterNode(rates, None, MESSAGE_BYTES, "the job's own collectives", in_links=True)
        platform = replace(platform, inter_node=measured)
    if run.network == NO_NVLINK:
        share = run.rates["all_gather"][0] / _NVLINK
        links = [
            one._replace(bandwidth_bytes_per_s=one.bandwidth_bytes_per_s * share)
            if "nvswitch" in one.source + one.target
            else one
            for one in platform.links
        ]
        platform = replace(platform, links=tuple(links))
    return platform


_NVLINK = 263.0
"""All-gather inside a node that has NVLink, median of the jobs on one node [GB/s]."""


def trace_run(run: Run) -> Trace:
    """Return the trace of a run's model, one sample."""
    return make_trace(find_run_sizes(run), LanguageStep(SEQUENCE, 1, PRECISION))


def cut_stages(trace: Trace, run: Run) -> list[list[str]]:
    """Return the units of each stage that has any: a stage ends once the parameters so far (blocks, head) reach its share.

    nanotron's source says "exceed", but where blocks make a share exactly (1.34 B, 2 and 4 stages)
    the runs' memory is that of one block less.
    """
    layers, _, feed_forward = _SIZES[run.hidden]
    units = list(pipeline_units(trace))
    block = 4 * run.hidden**2 + 3 * run.hidden * feed_forward
    costs = [0, *[block] * layers, run.vocabulary * run.hidden]
    stages: list[list[str]] = [[] for _ in range(run.pipeline)]
    number = 0
    for unit, sum_so_far in zip(units, accumulate(costs), strict=True):
        stages[number].append(unit)
        if sum_so_far >= sum(costs) * ((number + 1) / run.pipeline) and number < run.pipeline - 1:
            number += 1
    return [stage for stage in stages if stage]


def plan_run(run: Run, stages: int, pieces: int, data: int) -> Plan:
    """Return a run's plan, with some stages, micro-batches and replicas."""
    columns: dict[str, Any] = (
        {"pipeline": stages, "schedule": "1f1b", "micro_batches": pieces} if stages > 1 else {"accumulate": pieces}
    )
    split = run.tensor > 1
    return make_plan(
        data,
        run.tensor,
        sequence_parallel=split,
        vocabulary_parallel=split,
        sharding="distributed" if run.zero and data > 1 else "none",
        **columns,
    )


def judge_steps(runs: Iterable[Run]) -> pd.DataFrame:
    """Return ``CLUSTER_STEPS`` of each run that ran; a refused plan has no prediction, and counts as missed."""
    load_kernels()
    rows: dict[int, dict[str, Any]] = {}
    ran = dict(enumerate(run for run in runs if run.ran))
    for parameters in dict.fromkeys(run.parameters for run in ran.values()):
        of_size = [place for place, run in ran.items() if run.parameters == parameters]
        # Runs that share routes, then split operators, then micro-batches, one after the other.
        of_size.sort(key=lambda place: (ran[place].nodes, ran[place].tensor, ran[place].micro_batch))
        times = time_operators(trace_run(ran[of_size[0]]), DEVICE)
        for place in of_size:
            run = ran[place]
            rows[place] = _describe(run) | _predict(run, times, load_own_platform(run))
    return pd.DataFrame([rows[place] for place in ran], columns=CLUSTER_STEPS.names)


def name_platform(run: Run) -> str:
    """Return the platform that a run had: pipelines without NVLink ran among those on the slow network; fast where none was measured."""
    return PLATFORM if run.nodes == 1 or run.network == FAST else SLOW_NODES


def load_own_platform(run: Run) -> Platform:
    """Return the platform that a run had, as its job measured it."""
    return join_network(run, _load_nodes(name_platform(run), run.nodes))


@cache
def _load_nodes(name: str, nodes: int) -> Platform:
    return load_platform(name, GPUS_OF_A_NODE * nodes)


def _predict(run: Run, times: DeviceTimes, platform: Platform) -> dict[str, Any]:
    """Return a run's step as measured, as predicted with the ends of its interval [s], or why its plan is refused."""
    stages = cut_stages(times.traces[0], run)
    predicted = dict.fromkeys(_TIMES, math.nan)
    refused = ""
    try:
        predicted |= zip(_TIMES, predict_run(run, times, platform).tolist(), strict=True)
    except TrioflowError as error:
        refused = str(error)
    return {
        "measured_s": run.measured_step_s,
        "mfu": run.mfu,
        "network": run.network,
        **predicted,
        "stages": len(stages),
        "refused": refused,
    }


_TIMES = ("predicted_s", "low_s", "high_s")


def _describe(run: Run) -> dict[str, Any]:
    """Return what the tables of memory and of steps both say of a run."""
    return {
        name: getattr(run, name)
        for name in ("set", "parameters", "nodes", "data", "tensor", "pipeline", "zero", "micro_batch", "accumulate")
    }


def predict_run(run: Run, times: DeviceTimes, platform: Platform, interval: bool = True) -> NDArray[np.float64]:
    """Return a run's step and the ends of its 80 % interval [s]; without ``interval`` they are the step.

    In a full pipeline every micro-batch adds the same: of more than two a stage and two, so many
    and two fewer are simulated.
    """
    stages = cut_stages(times.traces[0], run)
    simulate = partial(simulate_pieces, run, times, platform, stages, interval=interval)
    most = 2 * len(stages) + 2
    return np.asarray(extend_steps(simulate, run.accumulate, most, most - 2), np.float64)


def simulate_pieces(
    run: Run, times: DeviceTimes, platform: Platform, stages: Sequence[list[str]], pieces: int, interval: bool = True
) -> NDArray[np.float64]:
    """Return a run's step with so many micro-batches, and the ends of its interval [s]."""
    plan = plan_run(run, len(stages), pieces, run.data)
    options = Options(stages=list(stages) if len(stages) > 1 else None, memory=False, interval=interval)
    batch = run.data * pieces * run.micro_batch
    prediction = predict(times, plan, platform, batch=batch, options=options)
    return np.array([prediction.step_time_s, prediction.low_s, prediction.high_s])
