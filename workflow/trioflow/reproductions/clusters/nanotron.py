"""nanotron's 1,728 runs on 8 to 512 H100, and 1,578 that failed: what they ran, and what was measured.

References
----------
"The Ultra-Scale Playbook" (nanotron), ``assets/data/benchmarks/banner.html``;
nanotron's ``scripts/scaling_benchmarks.py`` (sizes), ``helpers.py``
(``log_throughput``: rank 0 writes ``max_memory_allocated`` and
``max_memory_reserved``, in GiB), ``models/base.py`` (layers of a stage).
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from trioflow.base.errors import TableError
from trioflow.base.experiments import Plan
from trioflow.base.units import BYTES_PER_GIB
from trioflow.parallel.plan import make_plan
from trioflow.reproductions.clusters.scores import SEQUENCE, name_model
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.sizes import LanguageModel, LanguageStep
from trioflow.trace.store import Trace, pipeline_units

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
