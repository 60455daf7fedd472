"""Small tables like vTrain's for tests: a grid of models and plans, and all-reduces of a straight line."""

from itertools import product

import numpy as np
import pandas as pd
from trioflow_evaluation.vtrain.model import AllReduceCurves, StepModel

PLANS = ((1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (8, 1, 1))
"""Tensor, data and pipeline degrees."""
REDUCES = AllReduceCurves(
    {n: np.array([1e5, 1e10]) for n in (2, 4, 8)}, {n: np.array([5e-5, 0.05 * n]) for n in (2, 4, 8)}
)
"""Measured all-reduces of nowhere."""


def make_rows(
    hidden: tuple[int, ...] = (512, 2048),
    layers: tuple[int, ...] = (4, 8),
    plans: tuple[tuple[int, int, int], ...] = PLANS,
    micro_batch: tuple[int, ...] = (1, 4),
    micro_batches: tuple[int, ...] = (2, 4),
) -> pd.DataFrame:
    """Return a grid of rows, each a second long."""
    rows = [
        {
            "gpus": t * d * p,
            "batch": d * m * size,
            "micro_batch": size,
            "hidden": h,
            "heads": 16,
            "layers": depth,
            "sequence": 512,
            "tensor": t,
            "data": d,
            "pipeline": p,
            "measured_s": 1.0,
            "micro_batches": m,
        }
        for h, depth, (t, d, p), size, m in product(hidden, layers, plans, micro_batch, micro_batches)
    ]
    return pd.DataFrame(rows)


def time_rows(rows: pd.DataFrame, values: np.ndarray, wait: str) -> pd.DataFrame:
    """Return rows with the times that some parameters give them."""
    return rows.assign(measured_s=StepModel.build(rows, REDUCES).predict(values, wait))
