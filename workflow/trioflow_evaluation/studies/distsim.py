"""DistSim's two simulated studies: its search among 15 plans of a 48-layer BERT, and GPT 145B over the batch.

DistSim (CF 2023) publishes of the search the machine (4 nodes of 4 A10), the depth, the global batch,
the three numbers below and the plan of the best and the worst. What it does not publish is assumed
here: hidden size 1024 and 16 heads (BERT-Large's), 512 tokens, fp32, Adam; 1F1B with one sample a
micro-batch; embedding, head and loss shared by vocabulary, as Megatron-LM does; one NIC of 100 Gb/s a
node. Since nothing is known of its network, communication is taken as fast as assumed and two to four
times as slow. None of this is fitted.

GPT 145B runs in 8 tensor x 16 pipeline parts on 128 GPUs, from shapes alone; DistSim simulates it
beside Megatron-LM's published curve. The model's sizes are in the catalogue (arXiv 2104.04473, table
1). Chosen here: DGX A100 nodes, one sample a micro-batch, the vocabulary shared and activations
computed again as Megatron-LM does. No time was recorded: all come from the shipped cost model of the
A100, which was never calibrated on such a step.

References
----------
G. Lu et al., DistSim: a performance model of large-scale hybrid distributed DNN training, Computing
Frontiers 2023.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from trioflow import tables
from trioflow.base.experiments import load_workloads
from trioflow.base.provenance import PACKAGE
from trioflow.report import style
from trioflow.sweeps.description import fill_values
from trioflow.sweeps.scenarios import PredictionCache, make_frame
from trioflow.trace.repeat import repeat_layers
from trioflow.trace.store import Trace, load_trace, save_trace
from trioflow.trace.workloads.catalog import CATALOG

from trioflow_evaluation.drawing import draw_lines

TRACE, PLATFORM = "bert-48-b4", "a10x16-4nodes"
RANKS, BATCH = 16, 16
_SCALES = (1.0, 2.0, 3.0, 4.0)
"""Communication times over those of the assumed network."""


class PublishedPlan(NamedTuple):
    """A plan as DistSim gives it: degrees, and steps a second predicted and measured."""

    tensor: int
    pipeline: int
    data: int
    predicted_per_s: float
    measured_per_s: float


BEST = PublishedPlan(1, 8, 2, 2.94, 2.97)
WORST = PublishedPlan(16, 1, 1, 0.398, 0.396)
PREDICTED_RATIO, MEASURED_RATIO = 7.379, 7.488
"""DistSim's best over worst plan."""


def list_degrees() -> list[tuple[int, int, int]]:
    """Return the 15 products of tensor, pipeline and data degree, powers of two each."""
    powers = [1, 2, 4, 8, 16]
    return [
        (tensor, pipeline, RANKS // (tensor * pipeline))
        for tensor in powers
        for pipeline in powers
        if tensor * pipeline <= RANKS
    ]


def predict_distsim(scales: tuple[float, ...] = _SCALES) -> pd.DataFrame:
    """Return the plans' steps: rows of ``tables.SWEEP_RESULTS``, 15 for each speed of the network."""
    cache = PredictionCache()
    rows: list[dict[str, Any]] = []
    for scale in scales:
        for tensor, pipeline, data in list_degrees():
            given: dict[str, Any] = {
                "trace": TRACE,
                "platform": PLATFORM,
                "batch": BATCH,
                "data": data,
                "tensor": tensor,
                "pipeline": pipeline,
                "communication_scale": scale,
                "vocabulary_parallel": tensor > 1,
            }
            if pipeline > 1:
                given |= {"schedule": "1f1b", "micro_batches": BATCH // data}
            rows.append(cache.predict(len(rows), fill_values(given)))
    return make_frame(rows)


def name_plan(row: Any) -> str:
    """Return a plan as DistSim writes it, such as 1M8P2D."""
    return f"{row['tensor']}M{row['pipeline']}P{row['data']}D"


def study_distsim_search(table: str | Path, figure: str | Path) -> None:
    """Write the table (``SWEEP_RESULTS``), and the figure (no suffix) as SVG and PNG."""
    rows = predict_distsim()
    tables.write_table(rows, "sweep_results", table, {"study": "DistSim's search"})
    style.save_figure(draw_distsim_search(rows), figure)


def draw_distsim_search(rows: pd.DataFrame) -> Figure:
    """Draw steps a second of every plan at each speed of the network, plans in the order of the fastest one.

    With its 80 % interval, and DistSim's two published plans as measured.
    """
    rates = 1 / rows[["step_time_s", "low_s", "high_s"]]
    scale = rows["communication_scale"]
    drawn = rows.assign(
        plan=[name_plan(row) for row in tables.records(rows)],
        rate=rates["step_time_s"],
        low=rates["high_s"],
        high=rates["low_s"],
        network=("communication x " + scale.map("{:g}".format)).mask(scale == 1, "network as assumed"),
    ).sort_values(["communication_scale", "step_time_s"])
    published = [
        {"plan": name_plan(one._asdict()), "rate": one.measured_per_s, "network": "measured by DistSim"}
        for one in (BEST, WORST)
    ]
    both = pd.concat([drawn, pd.DataFrame(published)])
    return draw_lines(both, "rate", "plan", "network", "steps/s", interval=("low", "high"))


WORKLOAD, _GPT_PLATFORM = "gpt-145b", "dgx-a100"
TENSOR, PIPELINE, DATA = 8, 16, 1
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
BLOCKS = PACKAGE / "data" / "traces" / "gpt-145b-b1"
"""Two blocks: ``trioflow capture gpt-145b --batch 1 --layers 2 --device meta``."""


def build_shapes() -> Trace:
    """Return the whole model's operators without times: the shipped blocks, the last one repeated."""
    row = load_workloads(CATALOG)[WORKLOAD]
    assert row.layers is not None, "the catalogue gives the model's depth"
    return repeat_layers(load_trace(BLOCKS), row.layers)


def choose_schedule(micro_batches: int, pipeline: int = PIPELINE) -> str:
    """Return 1F1B, or GPipe, which takes as long, where PyTorch's 1F1B would have too few micro-batches."""
    return "1f1b" if micro_batches >= pipeline else "gpipe"


def predict_throughput(
    counts: Sequence[int] = MICRO_BATCHES, tensor: int = TENSOR, pipeline: int = PIPELINE
) -> pd.DataFrame:
    """Return the steps of all batches: rows of ``tables.SWEEP_RESULTS``."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        save_trace(build_shapes(), folder)
        cache = PredictionCache({BLOCKS.name: [folder]}, interval=False)
        for count in counts:
            given = {
                "trace": BLOCKS.name,
                "platform": _GPT_PLATFORM,
                "batch": count * DATA,
                "data": DATA,
                "tensor": tensor,
                "pipeline": pipeline,
                "micro_batches": count,
                "schedule": choose_schedule(count, pipeline),
                "vocabulary_parallel": True,
                "recompute": "full",
            }
            rows.append(cache.predict(len(rows), fill_values(given)))
    return make_frame(rows)


def write_throughput(table: str | Path) -> None:
    """Write the steps of all batches as Parquet (``tables.SWEEP_RESULTS``)."""
    tables.write_table(predict_throughput(), "sweep_results", table, {"study": "DistSim's GPT 145B"})
