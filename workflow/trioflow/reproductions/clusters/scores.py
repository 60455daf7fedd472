"""How far predicted peaks of memory are off, by set and model; without torch, for the page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

ROOM_BYTES = 80e9
"""Of an H100's memory what a data sheet promises [bytes]."""
RAN, FITTED, FAILED = "ran", "ran, fitted on", "failed"
TOO_FEW, TOO_MUCH, OTHER = "too few micro-batches", "out of memory", "other"
"""Why a run may have failed: nanotron refuses fewer micro-batches than stages less one."""


def score_memory(cases: pd.DataFrame) -> pd.DataFrame:
    """Return how far the peaks are off, by set and model.

    Returns
    -------
    DataFrame
        ``set``, ``parameters`` (0 for all), ``runs``; median and 90th
        percentile of the absolute relative error of what the allocator holds
        (``median_error``, ``error_90``) and of what it hands out
        (``allocated_median``); ``refused``, runs that ``simulate`` calls out
        of memory.
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
        "set": name, "parameters": parameters, "runs": len(rows),
        "median_error": float(np.median(held)), "error_90": float(np.quantile(held, 0.9)),
        "allocated_median": float(np.median(given)),
        "refused": int((rows["fullest_bytes"] > ROOM_BYTES).sum()),
    }  # fmt: skip
