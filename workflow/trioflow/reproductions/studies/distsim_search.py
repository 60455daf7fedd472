"""DistSim's search: 15 plans of a 48-layer BERT on 4 nodes of 4 A10, beside what it predicted and measured.

DistSim (CF 2023) publishes the machine, the depth, the global batch, the three
numbers below and the plan of the best and the worst. What it does not publish
is assumed here: hidden size 1024 and 16 heads (BERT-Large's), 512 tokens,
fp32, Adam; 1F1B with one sample a micro-batch; embedding, head and loss shared
by vocabulary, as Megatron-LM does; one NIC of 100 Gb/s a node. Since nothing is
known of its network, communication is taken as fast as assumed and two to four
times as slow. None of this is fitted.

References
----------
G. Lu et al., DistSim: a performance model of large-scale hybrid distributed DNN
training, Computing Frontiers 2023.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from trioflow import tables
from trioflow.sweeps.chunk_job import make_frame
from trioflow.sweeps.parameters import fill_values
from trioflow.sweeps.workshop import Workshop

TRACE, PLATFORM = "bert-48-b4", "a10x16-4nodes"
RANKS, BATCH = 16, 16
SCALES = (1.0, 2.0, 3.0, 4.0)
"""Communication times over those of the assumed network."""


class Published(NamedTuple):
    """A plan as DistSim gives it: degrees, and steps a second predicted and measured."""

    tensor: int
    pipeline: int
    data: int
    predicted_per_s: float
    measured_per_s: float


BEST = Published(1, 8, 2, 2.94, 2.97)
WORST = Published(16, 1, 1, 0.398, 0.396)
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


def predict_distsim(scales: tuple[float, ...] = SCALES) -> pd.DataFrame:
    """Return the plans' steps: rows of ``tables.SWEEP_RESULTS``, 15 for each speed of the network."""
    workshop = Workshop()
    rows: list[dict[str, Any]] = []
    for scale in scales:
        for tensor, pipeline, data in list_degrees():
            given: dict[str, Any] = {
                "trace": TRACE, "platform": PLATFORM, "batch": BATCH, "data": data,
                "tensor": tensor, "pipeline": pipeline, "communication_scale": scale,
                "vocabulary_parallel": tensor > 1,
            }  # fmt: skip
            if pipeline > 1:
                given |= {"schedule": "1f1b", "micro_batches": BATCH // data}
            rows.append(workshop.predict(len(rows), fill_values(given)))
    return make_frame(rows)


def name_plan(row: Any) -> str:
    """Return a plan as DistSim writes it, such as 1M8P2D."""
    return f"{row['tensor']}M{row['pipeline']}P{row['data']}D"


def order_plans(rows: pd.DataFrame) -> list[str]:
    """Return the names of the plans at one speed of the network, the fastest first; ties as they come."""
    return [
        name_plan(row) for row in tables.records(rows.sort_values("step_time_s", kind="stable"))
    ]


def compare_distsim(rows: pd.DataFrame) -> list[str]:
    """Say for each speed of the network which plans are first and last, and how far apart.

    ``rows``: from `predict_distsim`.
    """
    published = [f"{one.tensor}M{one.pipeline}P{one.data}D" for one in (BEST, WORST)]
    lines = [
        f"DistSim: best {published[0]}, worst {published[1]}, "
        f"{PREDICTED_RATIO} times predicted, {MEASURED_RATIO} times measured"
    ]
    for scale, case in rows.groupby("communication_scale"):
        names = order_plans(case)
        ratio = case["step_time_s"].max() / case["step_time_s"].min()
        place = names.index(published[0]) + 1
        lines.append(
            f"communication x {scale:g}: best {names[0]}, worst {names[-1]}, {ratio:.3f} times; "
            f"DistSim's best is number {place} of {len(names)}, its worst number "
            f"{names.index(published[1]) + 1}; order {' '.join(names)}"
        )
    return lines


def study_distsim_search(table: str | Path, figure: str | Path) -> None:
    """Run the study; print the order of the plans, write its table, and its figure as SVG and PNG.

    ``table``: Parquet file of ``tables.SWEEP_RESULTS``; ``figure``: figure, without suffix.
    """
    from trioflow.report.style import save_figure
    from trioflow.reproductions.studies.study_figures import draw_distsim_search

    rows = predict_distsim()
    print("\n".join(compare_distsim(rows)))
    tables.write_table(rows, "sweep_results", table, {"study": "DistSim's search"})
    save_figure(draw_distsim_search(rows), figure)
