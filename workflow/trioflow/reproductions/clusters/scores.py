"""How far predicted peaks of memory and steps are off; without torch, for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow import tables
from trioflow.base.provenance import stamp
from trioflow.costmodel.steps import find_node_residual
from trioflow.hardware.device_sheet import load_device
from trioflow.parallel.memory.peak import count_outside
from trioflow.report.pages import write_percent
from trioflow.report.scores import share_in_order
from trioflow.reproductions.chances import score_pairs
from trioflow.reproductions.tables import CLUSTER_MEMORY, CLUSTER_STEPS
from trioflow.sweeps.search_space import Prediction

RAN, FITTED, FAILED = "ran", "ran, fitted on", "failed"
TOO_FEW, TOO_MUCH, OTHER = "too few micro-batches", "out of memory", "other"
"""Why a run may have failed: nanotron refuses fewer micro-batches than stages less one."""

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


def exceeds_room(rows: pd.DataFrame, column: str) -> pd.Series:
    """Return which runs hold more in a column [bytes] than an H100 has beside context and communicators."""
    card = load_device(CARD).usable_memory_bytes
    degrees = rows[["data", "tensor", "pipeline"]].itertuples(index=False)
    room = np.array([card - count_outside(groups) for groups in degrees], np.float64)
    return rows[column] > room


def score_memory(cases: pd.DataFrame) -> pd.DataFrame:
    """Return how far the peaks are off, by set and model (``parameters`` 0 for all).

    ``median_error`` and ``error_90`` are of what the allocator holds, ``allocated_median`` of what
    it hands out; ``refused`` counts runs that ``simulate`` calls out of memory.
    """
    ran = cases[cases["set"] != FAILED]
    groups = [("all runs", 0.0, ran)]
    groups += [(name, 0.0, ran[ran["set"] == name]) for name in (FITTED, RAN)]
    held = ran[ran["set"] == RAN]
    for parameters in sorted(held["parameters"].unique().tolist()):
        groups.append((RAN, parameters, held[held["parameters"] == parameters]))
    groups = [group for group in groups if len(group[2])]
    return pd.DataFrame([_score(name, size, rows) for name, size, rows in groups])


def _score(name: str, parameters: float, rows: pd.DataFrame) -> dict[str, Any]:
    measured = rows["measured_bytes"].to_numpy()
    held, given = (
        np.abs(rows[column].to_numpy() / measured - 1)
        for column in ("reserved_bytes", "allocated_bytes")
    )
    return {
        "set": name,
        "parameters": parameters,
        "runs": len(rows),
        "median_error": float(np.median(held)),
        "error_90": float(np.quantile(held, 0.9)),
        "allocated_median": float(np.median(given)),
        "refused": int(exceeds_room(rows, "fullest_bytes").sum()),
    }


def score_steps(cases: pd.DataFrame) -> pd.DataFrame:
    """Return `score_group` of simulated steps by set, model and number of nodes; ``in_order`` is of the expected ones.

    A refused run has no prediction: it is outside of everything.
    """
    fast = f"MFU above {write_percent(FAST, 0)}"
    groups = [("all runs", cases), (fast, cases[cases["mfu"] > FAST])]
    groups += [(name, cases[cases["set"] == name]) for name in (FITTED, RAN)]
    few = cases["nodes"] <= 2
    groups += [("1 and 2 nodes", cases[few])]
    groups += [("1 and 2 nodes, not fitted on", cases[few & (cases["set"] == RAN)])]
    groups += [("one stage", cases[cases["pipeline"] == 1])]
    groups += [("stages, one GPU each", cases[(cases["pipeline"] > 1) & (cases["tensor"] == 1)])]
    split = (cases["pipeline"] > 1) & (cases["tensor"] > 1)
    groups += [("stages of several GPUs, 1 node", cases[split & (cases["nodes"] == 1)])]
    groups += [("stages of several GPUs, more nodes", cases[_is_split_across_nodes(cases)])]
    groups += [(f"{p:g} B", rows) for p, rows in cases.groupby("parameters")]
    for nodes in sorted(cases["nodes"].unique().tolist()):
        word = "node" if nodes == 1 else "nodes"
        groups.append((f"{nodes} {word}", cases[cases["nodes"] == nodes]))
    scored = []
    for name, rows in groups:
        if len(rows):
            expected = score_group(name, rows.assign(predicted_s=rows["expected_s"]))
            of_expected = {
                "expected_error": expected["median_error"],
                "in_order": expected["in_order"],
            }
            scored.append(score_group(name, rows) | of_expected)
    return pd.DataFrame(scored)


def _is_split_across_nodes(cases: pd.DataFrame) -> pd.Series:
    """Return which runs have a pipeline whose stages are of several GPUs each, on several nodes."""
    return (cases["pipeline"] > 1) & (cases["tensor"] > 1) & (cases["nodes"] > 1)


def score_group(name: str, rows: pd.DataFrame) -> dict[str, Any]:
    """Return the errors of some runs' ``predicted_s``: a row of :func:`score_steps`."""
    measured = rows["measured_s"].to_numpy()
    error = np.nan_to_num(np.abs(rows["predicted_s"].to_numpy() / measured - 1), nan=np.inf)
    inside = (rows["low_s"].to_numpy() <= measured) & (measured <= rows["high_s"].to_numpy())
    return {
        "group": name,
        "runs": len(rows),
        "median_error": float(np.median(error)),
        **{f"within_{most}": float((error <= most / 100).mean()) for most in (10, 20, 50)},
        "covered": float(inside.mean()),
        "in_order": share_in_order(rows, ["parameters", "nodes"]),
    }


def mark_crowded(memory: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return the steps of runs with ``crowded``: whether the predicted allocator holds more than an H100 has."""
    key = [*_PLAN, "micro_batch", "accumulate"]
    held = memory.loc[memory["set"] != FAILED, [*key, "fullest_reserved_bytes"]].drop_duplicates(
        key
    )
    found = steps[key].merge(held, how="left", on=key).fillna({"fullest_reserved_bytes": 0.0})
    return steps.assign(crowded=exceeds_room(found, "fullest_reserved_bytes").to_numpy())


def score_chances(cases: pd.DataFrame) -> pd.DataFrame:
    """Return `chances.score_pairs` of runs of one model on as many nodes, from what other models' runs took."""
    questions = []
    for _, cell in cases.dropna(subset="expected_s").groupby(["parameters", "nodes"]):
        model, nodes = name_model(float(cell["parameters"].iloc[0])), int(cell["nodes"].iloc[0])
        runs = []
        for row in cell.sort_values("expected_s").to_dict("records"):
            tensor_nodes = math.ceil(row["tensor"] / GPUS_OF_A_NODE)
            known = (
                find_node_residual(tensor_nodes, row["stages"] > 1, nodes, model)
                if nodes > 1
                else None
            )
            logs = (0.0,) if known is None else known.logs
            runs.append((Prediction(row["expected_s"], 0.0, 0.0, logs), row["measured_s"]))
        questions.append(runs)
    return score_pairs(questions)


SLOW_S = 0.5
"""A micro-batch more than this beyond its prediction is one of the slow kind: few runs lie near it [s]."""
_PLAN = ["parameters", "nodes", "data", "tensor", "pipeline", "zero"]


def find_slow(cases: pd.DataFrame) -> pd.DataFrame:
    """Return pipelines on several nodes whose stages lie in a node each, and which of them are ``slow``.

    ``excess_s``: of each micro-batch beyond its prediction [s]; ``mixed``: runs alike but for the
    micro-batch are of both kinds.
    """
    inside = (cases["pipeline"] > 1) & (cases["nodes"] > 1) & (cases["tensor"] <= 8)
    rows = cases[inside].dropna(subset="predicted_s")
    excess_s = (rows["measured_s"] - rows["predicted_s"]) / rows["accumulate"]
    rows = rows.assign(excess_s=excess_s, slow=excess_s > SLOW_S)
    return rows.assign(mixed=rows.groupby(_PLAN)["slow"].transform("nunique") > 1)


def find_repeated(cases: pd.DataFrame) -> pd.DataFrame:
    """Return runs of one configuration that was measured several times: ``fastest_s``, ``slowest_s``."""
    groups = cases.groupby([*_PLAN, "micro_batch", "accumulate"])["measured_s"]
    found = groups.agg(runs="size", fastest_s="min", slowest_s="max").reset_index()
    return found[found["runs"] > 1].reset_index(drop=True)
