"""GPT 145B in 8 tensor x 16 pipeline parts on 128 GPUs: steps over the number of micro-batches, from shapes alone.

DistSim (CF 2023) simulates this model beside Megatron-LM's published curve. The
model's sizes are in the catalogue (arXiv 2104.04473, table 1). Chosen here: DGX
A100 nodes, one sample a micro-batch, the vocabulary shared and activations
computed again as Megatron-LM does. No time was recorded: all come from the
shipped cost model of the A100, which was never calibrated on such a step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.experiments import load_workloads
from trioflow.sweeps.chunk_job import make_frame
from trioflow.sweeps.parameters import fill_values
from trioflow.sweeps.workshop import Workshop
from trioflow.trace.repeat import repeat_layers
from trioflow.trace.store import Trace, load_trace, save_trace
from trioflow.trace.workloads.catalog import CATALOG

WORKLOAD, PLATFORM = "gpt-145b", "dgx-a100"
TENSOR, PIPELINE, DATA = 8, 16, 1
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
BLOCKS = Path(__file__).parents[2] / "data" / "traces" / "gpt-145b-b1"
"""Two blocks: ``trioflow capture gpt-145b --batch 1 --layers 2 --device meta``."""


def build_shapes() -> Trace:
    """Return the whole model's operators without times: the shipped blocks, the last one repeated."""
    row = load_workloads(CATALOG)[WORKLOAD]
    assert row.layers is not None, "the catalogue gives the model's depth"
    return repeat_layers(load_trace(BLOCKS), row.layers)


def choose_schedule(micro_batches: int, pipeline: int = PIPELINE) -> str:
    """Return 1F1B, or GPipe where PyTorch's 1F1B would have too few micro-batches.

    Notes
    -----
    With fewer micro-batches than stages both take the same time: no stage has
    work to bring forward.
    """
    return "1f1b" if micro_batches >= pipeline else "gpipe"


def predict_throughput(
    counts: Sequence[int] = MICRO_BATCHES, tensor: int = TENSOR, pipeline: int = PIPELINE
) -> pd.DataFrame:
    """Return the steps of all batches: rows of ``tables.SWEEP_RESULTS``."""
    workshop = Workshop(interval=False)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        save_trace(build_shapes(), folder)
        for count in counts:
            given = {
                "trace": folder, "platform": PLATFORM, "batch": count * DATA, "data": DATA,
                "tensor": tensor, "pipeline": pipeline, "micro_batches": count,
                "schedule": choose_schedule(count, pipeline), "vocabulary_parallel": True,
                "recompute": "full",
            }  # fmt: skip
            row = workshop.predict(len(rows), fill_values(given))
            rows.append(row | {"trace": BLOCKS.name})
    return make_frame(rows)


def write_throughput(table: str | Path) -> None:
    """Write the steps of all batches as Parquet (``tables.SWEEP_RESULTS``)."""
    tables.write_table(
        predict_throughput(), "sweep_results", table, {"study": "DistSim's GPT 145B"}
    )
