"""How far predicted peaks of memory and steps are off; without torch, for the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.provenance import stamp
from trioflow.hardware.device_sheet import load_device
from trioflow.parallel.memory.peak import count_outside
from trioflow.parallel.memory.survival import DOUBTED, Survival, load_survival
from trioflow.report.pages import write_percent
from trioflow.report.scores import share_in_order
from trioflow.reproductions.chances import score_pairs
from trioflow.reproductions.tables import CLUSTER_MEMORY, CLUSTER_STEPS
from trioflow.sweeps.search_space import Prediction

RAN, FITTED, FAILED = "ran", "ran, fitted on", "failed"
BEFORE = "pipelines before their fix"
"""Runs of nanotron's pipelines before its engine was mended: reported, neither fitted on nor among the others."""
SUCCEEDED, RAN_OUT = "Success", "OOM"
"""How a job ended, beside other failures, which memory does not explain."""

CARD = "h100-sxm"
"""Sheet of the runs' GPU."""
GPUS_OF_A_NODE = 8
SEQUENCE = 4096
"""Tokens of a sample."""
FAST = 0.1
"""Model FLOPs utilisation above which a run is one that someone would repeat."""


SCHEMAS = {"cluster_memory": CLUSTER_MEMORY, "cluster_steps": CLUSTER_STEPS}


def join_parts(paths: Sequence[str | Path], name: str, output: str | Path) -> None:
    """Write the tables of all parts of the runs as one; ``name`` is one of ``SCHEMAS``."""
    schema = SCHEMAS[name]
    parts = [tables.read_table(path, name, schema) for path in paths]
    cases = pd.concat([part for part in parts if len(part)], ignore_index=True)
    tables.write_table(cases, name, output, stamp(paths), schema)


def name_model(parameters: float) -> str:
    """Return the workload of a model of so many parameters [1e9]."""
    return f"nanotron-{parameters:g}b"


def is_fitted_on(parameters: float, nodes: int) -> bool:
    """Return whether runs of a model on so many nodes may be fitted on: 1.34 B on 1 and 2."""
    return parameters == 1.34 and nodes <= 2


def list_needs(cases: pd.DataFrame) -> NDArray[np.float64]:
    """Return what each run's fullest rank is handed out, what its allocator wants, and the room on an H100 [3, runs] [bytes]."""
    card = load_device(CARD).usable_memory_bytes
    degrees = cases[["data", "tensor", "pipeline"]].itertuples(index=False)
    room = [card - count_outside(groups) for groups in degrees]
    return np.array([cases["fullest_bytes"], cases["fullest_reserved_bytes"], room], np.float64)


def find_odds(needs: NDArray[np.float64], survival: Survival | None = None) -> NDArray[np.float64]:
    """Return the probability of each run to survive (``needs``: `list_needs`), by the shipped numbers by default."""
    known, (peak, wanted, room) = survival or load_survival(), needs
    return known.find_probabilities(peak + known.kept_share * (wanted - peak), room)


def score_steps(cases: pd.DataFrame) -> pd.DataFrame:
    """Return `score_group` of steps by set, network, how the plan lies on nodes, model and number of nodes.

    A refused run has no prediction: it is outside of everything.
    """
    mended = judge_order(cases)
    groups = [("all runs", cases), (BEFORE, cases[cases["set"] == BEFORE])]
    groups += [("all others", mended), (FITTED, cases[cases["set"] == FITTED])]
    fast = f"MFU above {write_percent(FAST, 0)}"
    groups += [(fast, mended[mended["mfu"] > FAST])]
    groups += [(name, mended[chosen]) for name, chosen in split_by_nodes(mended).items()]
    groups += [(f"network: {name}", rows) for name, rows in mended.groupby("network")]
    groups += [(f"{p:g} B", rows) for p, rows in mended.groupby("parameters")]
    groups += [
        (f"{n} {'node' if n == 1 else 'nodes'}", rows) for n, rows in mended.groupby("nodes")
    ]
    return pd.DataFrame([score_group(name, rows) for name, rows in groups if len(rows)])


def split_by_nodes(cases: pd.DataFrame) -> dict[str, pd.Series]:
    """Return which runs are of each way to lie on nodes."""
    several, beyond = cases["nodes"] > 1, cases["tensor"] > GPUS_OF_A_NODE
    chained = several & (cases["pipeline"] > 1) & ~beyond
    return {
        "on one node": ~several, "replicas over nodes": several & ~chained & ~beyond,
        "pipelines over nodes": chained, "tensor groups beyond a node": beyond,
    }  # fmt: skip


def score_group(name: str, rows: pd.DataFrame) -> dict[str, Any]:
    """Return the errors of some runs' ``predicted_s``: a row of :func:`score_steps`."""
    measured = rows["measured_s"].to_numpy()
    signed = rows["predicted_s"] / rows["measured_s"] - 1
    error = signed.abs().fillna(np.inf)
    inside = (rows["low_s"].to_numpy() <= measured) & (measured <= rows["high_s"].to_numpy())
    return {
        "group": name,
        "runs": len(rows),
        "median_error": float(error.median()),
        **{f"within_{most}": float((error <= most / 100).mean()) for most in (10, 20, 50)},
        "bias": float(signed.median()),
        "covered": float(inside.mean()),
        "width": float(((rows["high_s"] - rows["low_s"]) / measured).mean()),
        "in_order": share_in_order(rows, CELL),
    }


def mark_crowded(memory: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the steps of runs with ``crowded``: whether they are less likely to fit an H100 than `survival.DOUBTED`."""
    key = [*_PLAN, "micro_batch", "accumulate"]
    sizes = ["fullest_bytes", "fullest_reserved_bytes"]
    held = memory.loc[memory["set"] != FAILED, [*key, *sizes]].drop_duplicates(key)
    found = steps[key].merge(held, how="left", on=key).fillna(dict.fromkeys(sizes, 0.0))
    return steps.assign(crowded=find_odds(list_needs(found)) < DOUBTED)


def score_chances(cases: pd.DataFrame) -> pd.DataFrame:
    """Return `chances.score_pairs` of runs of one model on as many nodes of one network."""
    return score_pairs(
        [
            (Prediction(row["predicted_s"], 0.0, 0.0), row["measured_s"])
            for row in cell.sort_values("predicted_s").to_dict("records")
        ]
        for _, cell in judge_order(cases).dropna(subset="predicted_s").groupby(CELL)
    )


CELL = ["parameters", "nodes", "network"]
"""What runs share that somebody would choose among."""
_PLAN = ["parameters", "nodes", "data", "tensor", "pipeline", "zero"]


def judge_order(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the runs whose order and choice are judged: all but pipelines before their fix."""
    return cases[cases["set"] != BEFORE]


def find_repeated(cases: pd.DataFrame) -> pd.DataFrame:
    """Return runs of one configuration that was measured several times: ``fastest_s``, ``slowest_s``."""
    groups = cases.groupby([*_PLAN, "micro_batch", "accumulate"])["measured_s"]
    found = groups.agg(runs="size", fastest_s="min", slowest_s="max").reset_index()
    return found[found["runs"] > 1].reset_index(drop=True)
