"""What nanotron's runs on several nodes took beyond their simulated steps, for steps that lie there alike.

Each model's runs are left out in turn: what ships for a prediction of that model comes from the
others, and so do the widths of all intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.costmodel.intervals import COVERAGE, MIN_RESIDUALS
from trioflow.costmodel.steps import NodeResidual
from trioflow.reproductions.clusters.scores import GPUS_OF_A_NODE, name_model

_ROUNDS = 20
"""Turns in which what blocks and what neighbours add settle."""
_DECILES = np.arange(5, 100, 10) / 100
_FARTHEST = 9
"""Doublings of the nodes that a class may borrow runs over: all."""


def fit_node_residuals(cases: pd.DataFrame) -> list[NodeResidual]:
    """Return what ships as ``costmodel.steps.BEYOND_NODES``, from ``CLUSTER_STEPS``; of a refused run nothing counts."""
    runs = _count(cases.dropna(subset="predicted_s"))
    models = sorted(runs["parameters"].unique())
    return [
        one
        for left_out in (None, *models)
        for one in _fit_without(runs[runs["parameters"] != left_out], left_out)
    ]


def _count(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the runs on several nodes with their blocks and neighbours, times micro-batches, and plain steps."""
    tensor_nodes = np.ceil(cases["tensor"] / GPUS_OF_A_NODE).astype(int)
    chained = cases["stages"] > 1
    counted = cases.assign(
        tensor_nodes=tensor_nodes,
        chained=chained,
        all_blocks=np.where(tensor_nodes > 1, cases["blocks"] * cases["accumulate"], 0),
        neighbours=np.where(chained, np.minimum(cases["stages"] - 1, 2) * cases["accumulate"], 0),
        steps=np.where(chained | (tensor_nodes > 1), 0, 1),
    )
    beyond: pd.DataFrame = counted[cases["nodes"] > 1]
    return beyond


def _fit_without(runs: pd.DataFrame, left_out: float | None) -> Iterator[NodeResidual]:
    """Yield the residual of each way to lie on nodes, from the runs that count."""
    kinds = sorted(set(zip(runs["tensor_nodes"], runs["chained"], runs["nodes"], strict=True)))
    name = "" if left_out is None else name_model(left_out)
    for tensor_nodes, chained, nodes in kinds:
        alike = runs[(runs["tensor_nodes"] == tensor_nodes) & (runs["chained"] == chained)]
        near = _take_near(alike, nodes)
        missed = _hold_out(near)
        low, high = np.quantile(missed, COVERAGE)
        yield NodeResidual(
            name,
            int(tensor_nodes),
            bool(chained),
            int(nodes),
            len(near),
            *_fit(near),
            min(float(low), 0.0),
            max(float(high), 0.0),
            tuple(np.quantile(missed, _DECILES).tolist()),
        )


def _take_near(runs: pd.DataFrame, nodes: int) -> pd.DataFrame:
    """Return the runs on so many nodes; of other numbers too, where there are few or of one model."""
    far = (np.log2(runs["nodes"]) - math.log2(nodes)).abs()
    near = runs
    for most in range(_FARTHEST + 1):
        near = runs[far <= most]
        if len(near) >= MIN_RESIDUALS and near["parameters"].nunique() > 1:
            break
    return near


def _hold_out(runs: pd.DataFrame) -> NDArray[np.float64]:
    """Return the logarithms of measured over expected steps, each model's expected by the others."""
    found = []
    for parameters, mine in runs.groupby("parameters"):
        others = runs[runs["parameters"] != parameters]
        expected_s = expect(mine, *_fit(others if len(others) else mine))
        found.append(np.log(mine["measured_s"].to_numpy() / expected_s))
    return np.concatenate(found)


_COUNTED = ("all_blocks", "neighbours", "steps")


def expect(runs: pd.DataFrame, *each_s: float) -> NDArray[np.float64]:
    """Return the expected steps [s]: what was simulated, and so much for each block, neighbour and step."""
    found = runs["predicted_s"].to_numpy(np.float64).copy()
    for name, one_s in zip(_COUNTED, each_s, strict=True):
        found += one_s * runs[name].to_numpy(np.float64)
    return found


def _fit(runs: pd.DataFrame) -> tuple[float, float, float]:
    """Return what a block, a neighbour and a step add [s]: least sum of the errors' absolute logarithms.

    Half of the runs lie above, as some take many times as long. Where a class has both, each is
    found in turn with the other held.
    """
    counts = [runs[name].to_numpy(np.float64) for name in _COUNTED]
    used = [place for place, count in enumerate(counts) if count.any()]
    found: list[tuple[float, list[float]]] = []
    for first in used:
        each_s = [0.0] * len(counts)
        for _ in range(_ROUNDS if len(used) > 1 else 1):
            for place in sorted(used, key=lambda one: one != first):
                rest_s = expect(runs, *[one * (i != place) for i, one in enumerate(each_s)])
                each_s[place] = _fit_one(runs["measured_s"].to_numpy(), rest_s, counts[place])
        missed = np.log(runs["measured_s"].to_numpy() / expect(runs, *each_s))
        found.append((float(np.abs(missed).sum()), each_s))
    block_s, neighbour_s, step_s = min(found)[1]
    return block_s, neighbour_s, step_s


def _fit_one(
    measured_s: NDArray[np.float64], rest_s: NDArray[np.float64], count: NDArray[np.float64]
) -> float:
    """Return what each of so many adds [s] to the rest: the least sum of logarithms meets some run exactly."""
    tried = np.unique(np.maximum((measured_s - rest_s) / count, 0.0))
    logs = np.log(measured_s / (rest_s + tried[:, None] * count))
    return float(tried[np.abs(logs).sum(axis=1).argmin()])
