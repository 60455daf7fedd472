"""The step times of nanotron's runs, predicted by what ``simulate`` calls, beside what was measured.

The memory of nanotron's runs, predicted by what ``simulate`` calls, beside what was measured.

nanotron's 1,728 runs on 8 to 512 H100, and 1,578 that failed: what they ran, and what was measured.

References
----------
"The Ultra-Scale Playbook" (nanotron), ``assets/data/benchmarks/banner.html``;
nanotron's ``scripts/scaling_benchmarks.py`` (sizes), ``helpers.py``
(``log_throughput``: rank 0 writes ``max_memory_allocated`` and
``max_memory_reserved``, in GiB), ``models/base.py`` (layers of a stage).
"""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.errors import TableError, TrioflowError
from trioflow.base.experiments import Plan
from trioflow.base.precision_recipes import NANOTRON
from trioflow.base.units import BYTES_PER_GIB
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.costmodel.operators.methods import ProportionalModel
from trioflow.engine.compiled.run import load_kernels
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.parallel.plan import make_plan
from trioflow.parallel.remembered import Memory, remembering
from trioflow.prediction.assembly import build_graph, predict, time_operators
from trioflow.prediction.options import Options
from trioflow.reproductions.clusters.scores import (
    FAILED,
    FITTED,
    OTHER,
    RAN,
    SEQUENCE,
    TOO_FEW,
    TOO_MUCH,
    exceeds_room,
    is_fitted_on,
    name_model,
)
from trioflow.reproductions.tables import CLUSTER_MEMORY, CLUSTER_STEPS
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.sizes import LanguageModel, LanguageStep
from trioflow.trace.store import Trace, pipeline_units

DEVICE = "NVIDIA H100 80GB HBM3"
PLATFORM = "p5-h100"
"""Nodes of eight H100 with EFA: what the runs had."""


def judge_memory(runs: Sequence[Run]) -> pd.DataFrame:
    """Return what was measured and predicted of each run: ``CLUSTER_MEMORY``.

    Rank 0 wrote the file: its stage's peak is compared. Under 1F1B further micro-batches than one
    more than the stages change nothing, nor do replicas beyond two without ZeRO: they are not
    built.
    """
    rows: list[dict[str, Any]] = []
    for parameters in dict.fromkeys(run.parameters for run in runs):
        mine = [run for run in runs if run.parameters == parameters]
        with remembering(Memory()):
            rows += _judge_model(mine)
    return pd.DataFrame(rows, columns=CLUSTER_MEMORY.names)


def _judge_model(runs: Iterable[Run]) -> list[dict[str, Any]]:
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    rows = []
    trace = times = None
    platform = load_platform(PLATFORM, 8)
    for run in runs:
        if trace is None:
            trace = trace_run(run)
            times = replace(time_operators(trace, DEVICE), model=_AnyTime(DEVICE))
        assert times is not None
        stages = keep_depth(cut_stages(trace, run), run.pipeline)
        pieces = min(run.accumulate, len(stages) + 1 if len(stages) > 1 else 2)
        data = run.data if run.zero else min(run.data, 2)
        cut = (len(stages), run.pipeline, run.tensor, run.micro_batch, pieces)
        key = (*cut, data, run.zero, run.nodes > 1)
        if key not in known:
            plan = plan_run(run, len(stages), pieces, data)
            options = Options(stages=stages if len(stages) > 1 else None)
            costs = platform.host_of(replace(plan, data=run.data), NANOTRON)
            # Launches change no peak.
            host = {key: cost for key, cost in costs.items() if key.startswith("tensor_parallel")}
            batch = data * pieces * run.micro_batch
            graph = build_graph(times, plan, batch=batch, host=host, options=options)
            memory = graph.metadata.memory
            mine = next(entry for entry in memory if 0 in entry["ranks"])
            known[key] = {
                "allocated_bytes": mine["peak_bytes"],
                **mine["beside"],
                "reserved_bytes": mine["reserved_bytes"],
                "fullest_bytes": max(entry["peak_bytes"] for entry in memory),
                "fullest_reserved_bytes": max(entry["reserved_bytes"] for entry in memory),
            }
        rows.append(_describe_memory(run, known[key]))
    return rows


class _AnyTime(ProportionalModel):
    """Times that cost little: no peak depends on how long operators take, only on their order."""

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Return a second for each operator."""
        times = dict.fromkeys(("time_s", "low_s", "high_s"), 1.0)
        return pd.DataFrame({**times, "extrapolated": False}, index=operators.index)


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


def _describe_memory(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    fitted = is_fitted_on(run.parameters, run.nodes)
    reason = ""
    if not run.ran:
        row = {**found, "data": run.data, "tensor": run.tensor, "pipeline": run.pipeline}
        full = bool(exceeds_room(pd.DataFrame([row]), "fullest_reserved_bytes").iloc[0])
        reason = TOO_MUCH if full else OTHER
        reason = TOO_FEW if run.accumulate < run.pipeline - 1 else reason
    return {
        "set": (FITTED if fitted else RAN) if run.ran else FAILED,
        "parameters": run.parameters, "nodes": run.nodes, "data": run.data, "tensor": run.tensor,
        "pipeline": run.pipeline, "zero": run.zero, "micro_batch": run.micro_batch,
        "accumulate": run.accumulate, "measured_bytes": run.measured_bytes, **found,
        "reason": reason,
    }  # fmt: skip


DATASET = "nanotron/runs-h100"
FILE = "vinjn+nanotron-ultrascale-playbook/assets/data/benchmarks/banner.html"
COLUMNS = (
    "parameters", "nodes", "micro_batch", "accumulate", "data", "pipeline", "tensor", "zero",
    "mfu", "tokens_per_s_per_gpu", "tokens_per_s", "memory",
)  # fmt: skip
"""Of the file's ``customdata``; the runs have two more, words for the chart."""
PRECISION = "nanotron-bf16"
_VOCABULARY = 131072
_SIZES = {
    1.34: (16, 2048, 32, 8192), 3.57: (28, 3072, 32, 8192), 8.86: (32, 4096, 32, 14336),
    80.0: (80, 8192, 64, 28672),
}  # fmt: skip
_TIED_BELOW = 10_000


@dataclass(frozen=True)
class Run:
    """One row of the file: ``parameters`` [1e9] name the model, ``accumulate`` counts a replica's micro-batches.

    What the file does not give (``measured_bytes``; ``measured_step_s``, by its tokens a second) is
    not a number.
    """

    parameters: float
    nodes: int
    micro_batch: int
    accumulate: int
    data: int
    pipeline: int
    tensor: int
    zero: int
    measured_bytes: float
    measured_step_s: float
    mfu: float
    ran: bool


def read_runs(data_folder: str | Path) -> list[Run]:
    """Read all runs, then all that failed; TableError where the file is missing or not the chart that it was."""
    path = Path(data_folder) / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TableError("no such file", file=path, fix=f"retrieve {DATASET}") from None
    begin = text.find("[", text.find("Plotly.newPlot("))
    try:
        ran, failed = json.JSONDecoder().raw_decode(text[begin:])[0][:2]
        rows = [row[: len(COLUMNS)] for row in ran["customdata"]]
        packed = failed["customdata"]
        shape = [int(n) for n in str(packed["shape"]).split(",")]
        others = np.frombuffer(b64decode(packed["bdata"]), "f8").reshape(shape).tolist()
    except (ValueError, KeyError, TypeError) as error:
        raise TableError(f"not the chart of runs: {error}", file=path, fix="retrieve it again") from None  # fmt: skip
    return [_read_row(row, True) for row in rows] + [_read_row(row, False) for row in others]


def _read_row(row: Sequence[float], ran: bool) -> Run:
    said = dict(zip(COLUMNS, row, strict=True))
    nodes, micro_batch, pieces, data, pipeline, tensor, zero = (int(n) for n in row[1:8])
    memory = said["memory"]
    measured = float("nan") if memory is None else float(memory) * BYTES_PER_GIB
    tokens = SEQUENCE * micro_batch * pieces * data
    step_s = tokens / (said["tokens_per_s"] or float("nan"))
    return Run(
        float(said["parameters"]), nodes, micro_batch, pieces, data, pipeline, tensor, zero,
        measured, step_s, said["mfu"] / 100, ran,
    )  # fmt: skip


def find_model(run: Run) -> LanguageModel:
    """Return the sizes of a run's model."""
    layers, hidden, heads, feed_forward = _SIZES[run.parameters]
    return LanguageModel(
        name_model(run.parameters), layers, hidden, heads, heads, hidden // heads,
        feed_forward, _VOCABULARY, tied=feed_forward < _TIED_BELOW,
    )  # fmt: skip


def trace_run(run: Run) -> Trace:
    """Return the trace of a run's model, one sample."""
    return make_trace(find_model(run), LanguageStep(SEQUENCE, 1, PRECISION))


def cut_stages(trace: Trace, run: Run) -> list[list[str]]:
    """Return the units of each stage that has any: a stage ends once the parameters so far (blocks, head) reach its share.

    nanotron's source says "exceed", but where blocks make a share exactly (1.34 B, 2 and 4 stages)
    the runs' memory is that of one block less.
    """
    layers, hidden, _, feed_forward = _SIZES[run.parameters]
    units = list(pipeline_units(trace))
    block = 4 * hidden**2 + 3 * hidden * feed_forward
    costs = [0, *[block] * layers, _VOCABULARY * hidden]
    stages: list[list[str]] = [[] for _ in range(run.pipeline)]
    number = 0
    for unit, sum_so_far in zip(units, accumulate(costs), strict=True):
        stages[number].append(unit)
        if sum_so_far >= sum(costs) * ((number + 1) / run.pipeline) and number < run.pipeline - 1:
            number += 1
    return [stage for stage in stages if stage]


def plan_run(run: Run, stages: int, pieces: int, data: int) -> Plan:
    """Return a run's plan, with some stages, micro-batches and replicas."""
    columns: Mapping[str, Any] = (
        {"pipeline": stages, "schedule": "1f1b", "micro_batches": pieces}
        if stages > 1
        else {"accumulate": pieces}
    )
    split = run.tensor > 1
    return make_plan(
        data, run.tensor, sequence_parallel=split, vocabulary_parallel=split,
        sharding="distributed" if run.zero and data > 1 else "none", **columns,
    )  # fmt: skip


def judge_steps(runs: Iterable[Run]) -> pd.DataFrame:
    """Return ``CLUSTER_STEPS`` of each run that ran; a refused plan has no prediction, and counts as missed."""
    load_kernels()
    rows: dict[int, dict[str, Any]] = {}
    ran = dict(enumerate(run for run in runs if run.ran))
    for parameters in dict.fromkeys(run.parameters for run in ran.values()):
        mine = [place for place, run in ran.items() if run.parameters == parameters]
        # Runs that share routes, then split operators, then micro-batches, one after the other.
        mine.sort(key=lambda place: (ran[place].nodes, ran[place].tensor, ran[place].micro_batch))
        platforms = {n: load_platform(PLATFORM, 8 * n) for n in {ran[i].nodes for i in mine}}
        times = time_operators(trace_run(ran[mine[0]]), DEVICE)
        known: dict[Run, dict[str, Any]] = {}
        with remembering(Memory()):
            for place in mine:
                asked = replace(ran[place], measured_bytes=0.0, measured_step_s=0.0, mfu=0.0)
                if asked not in known:
                    known[asked] = _predict(asked, times, platforms[asked.nodes])
                rows[place] = _describe(ran[place]) | known[asked]
    return pd.DataFrame([rows[place] for place in ran], columns=CLUSTER_STEPS.names)


def _predict(run: Run, times: DeviceTimes, platform: Platform) -> dict[str, Any]:
    """Return a run's step, the expected one and the ends of its interval [s], or why its plan is refused."""
    stages = cut_stages(times.traces[0], run)
    found = dict.fromkeys(_TIMES, math.nan)
    refused = ""
    try:
        found |= zip(_TIMES, predict_run(run, times, platform).tolist(), strict=True)
    except TrioflowError as error:
        refused = str(error)
    return {**found, "stages": len(stages), "blocks": max(map(len, stages)), "refused": refused}


_TIMES = ("predicted_s", "expected_s", "low_s", "high_s")


def _describe(run: Run) -> dict[str, Any]:
    return {
        "set": FITTED if is_fitted_on(run.parameters, run.nodes) else RAN,
        "parameters": run.parameters, "nodes": run.nodes, "data": run.data, "tensor": run.tensor,
        "pipeline": run.pipeline, "zero": run.zero, "micro_batch": run.micro_batch,
        "accumulate": run.accumulate, "measured_s": run.measured_step_s, "mfu": run.mfu,
    }  # fmt: skip


def predict_run(run: Run, times: DeviceTimes, platform: Platform) -> NDArray[np.float64]:
    """Return a run's step, the expected one and the ends of its 80 % interval [s].

    In a full pipeline every micro-batch adds the same: of more than two a stage and two, so many
    and two fewer are simulated.
    """
    stages = cut_stages(times.traces[0], run)
    most = 2 * len(stages) + 2
    if run.accumulate <= most:
        return simulate_pieces(run, times, platform, stages, run.accumulate)
    full = simulate_pieces(run, times, platform, stages, most)
    each = (full - simulate_pieces(run, times, platform, stages, most - 2)) / 2
    return full + each * (run.accumulate - most)


def simulate_pieces(
    run: Run, times: DeviceTimes, platform: Platform, stages: Sequence[list[str]], pieces: int
) -> NDArray[np.float64]:
    """Return a run's step with so many micro-batches, the expected one and the ends of its interval [s]."""
    plan = plan_run(run, len(stages), pieces, run.data)
    options = Options(stages=list(stages) if len(stages) > 1 else None, memory=False)
    batch = run.data * pieces * run.micro_batch
    found = predict(times, plan, platform, batch=batch, options=options)
    return np.array([found.step_time_s, found.expected_s, found.low_s, found.high_s])
