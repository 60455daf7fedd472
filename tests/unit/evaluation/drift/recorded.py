"""Steps of a small job, played rank by rank, in the columns of StragglerAnalysis."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

REPLICAS, MICRO_BATCHES = 2, 3
Call = tuple[str, int]
"""Kind of operation and its number in the step."""


def list_calls(stage: int) -> list[Call]:
    """Return what a rank of two stages calls, first all forward passes, then all backward ones."""
    calls: list[Call] = [("params-all-gather", 0)]
    for m in range(MICRO_BATCHES):
        forward = [("forward-compute", m)]
        calls += [("forward-recv", m), *forward] if stage else [*forward, ("forward-send", m)]
    for m in range(MICRO_BATCHES):
        backward = [("backward-compute", m)]
        calls += [*backward, ("backward-send", m)] if stage else [("backward-recv", m), *backward]
    tail = ("embedding-grads-all-reduce", "grads-reduce-scatter", "optimizer-clip-main-grad", "optimizer")
    return calls + [(name, 0) for name in tail]


def name_members(call: Call, stage: int, replica: int) -> list[tuple[int, int]]:
    """Return stage and replica of all who take part in a call."""
    name = call[0]
    if name.endswith("compute") or name == "optimizer":
        return [(stage, replica)]
    if name in ("params-all-gather", "grads-reduce-scatter"):
        return [(stage, one) for one in range(REPLICAS)]
    if name == "optimizer-clip-main-grad":
        return [(one, other) for one in range(2) for other in range(REPLICAS)]
    return [(0, replica), (1, replica)]


def play_step(rng: np.random.Generator, slow: dict[tuple[int, int], float]) -> list[dict[str, Any]]:
    """Return the operations of one step; ``slow``: factor on the compute of a stage's replica."""
    places = [(stage, replica) for stage in range(2) for replica in range(REPLICAS)]
    programs = {place: list_calls(place[0]) for place in places}
    now_s = dict.fromkeys(places, 0.0)
    rows: list[dict[str, Any]] = []

    def pair(call: Call) -> Call:
        return (call[0].replace("send", "").replace("recv", ""), call[1])

    while any(programs.values()):
        for place in places:
            if not programs[place]:
                continue
            call = programs[place][0]
            members = name_members(call, *place)
            if any(not programs[m] or pair(programs[m][0]) != pair(call) for m in members):
                continue
            start_s = {m: now_s[m] + 1e-3 * rng.uniform() for m in members}
            lasting_s = rng.uniform(0.9, 1.1) * (0.1 if "compute" in call[0] else 0.01)
            if "compute" in call[0]:
                lasting_s *= slow.get(place, 1.0)
            end_s = max(start_s.values()) + lasting_s
            for member in members:
                stage, replica = member
                kind, number = programs[member].pop(0)
                rows.append(
                    {
                        "dp_rank": replica,
                        "stage": stage,
                        "rank": stage * REPLICAS + replica,
                        "optype": kind,
                        "start_ts": start_s[member],
                        "duration": end_s - start_s[member],
                        "seq_id": number,
                    }
                )
                now_s[member] = end_s
    return rows


def write_job(path: Path, steps: int = 12, slow: dict[tuple[int, int], float] | None = None) -> pd.DataFrame:
    """Write a job, and return its rows."""
    rng = np.random.default_rng(2)
    rows = [{"step": 10 + n, **row} for n in range(steps) for row in play_step(rng, slow or {})]
    frame = pd.DataFrame(rows).astype({"optype": "category"})
    frame.to_parquet(path)
    return frame
