"""The platform file of the machine that the sessions ran on."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow.base.provenance import read_json
from trioflow.costmodel.collectives.model import load_collective_model
from trioflow.hardware.machine import name_rank_node
from trioflow.hardware.platform import write_content

_OVERLAP_COUNTS = 0.5
"""Communication counts as running beside compute when this share of it hides there."""

LARGE_BYTES = 16_000_000
_SWEEP = "collective sweep of the sessions, median"
_HOST = "tiny wrapped models of the sessions, median"


def describe_machine(sessions: Iterable[str | Path], collectives: str | Path, path: str | Path) -> None:
    """Write the measured platform of this machine.

    Links join every two ranks with the best measured rate and the shortest message; collectives
    follow their own curves, and share the links only when something else uses them. Host costs and
    overlap are medians over the sessions (``session.json``).
    """
    facts = [read_json(session) for session in sessions]
    ranks = max(int(f["ranks"]) for f in facts)
    device = str(facts[0]["device"])
    medians = pd.DataFrame([f["host_costs"] for f in facts]).median().sort_index()
    costs = {str(name): float(cost_s) for name, cost_s in medians.items()}
    overlap = costs.pop("overlap", 0.0)
    memory = "driver" if device == "cuda" else "operating system, shared evenly by the ranks"
    content = {
        "name": "this-machine",
        "device": {
            "name": str(facts[0]["device_names"][0]),
            "kind": "gpu" if device == "cuda" else "cpu",
            "memory_bytes": _source(int(facts[0]["memory_bytes"]), memory),
            "peak_flop_per_s": {},
        },
        "ranks": ranks,
        "links": _describe_links(load_collective_model(collectives), ranks),
        "communication_on_compute_stream": overlap < _OVERLAP_COUNTS,
        "host": {name: _source(cost_s, _HOST) for name, cost_s in costs.items()},
        "collectives": str(facts[0]["library"]),
        "notes": f"measured by the workflow; {overlap:.0%} of an all-reduce hides behind compute",
    }
    write_content(content, path)


def _source(value: float, source: str) -> dict[str, Any]:
    return {"value": value, "source": source}


def _describe_links(model: Any, ranks: int) -> list[dict[str, Any]]:
    """Return a link in each direction between every two ranks."""
    if ranks == 1:
        return []
    latency_s = model.time_s("send", ranks, 1).time_s
    rates = []
    for collective, share in (("send", 1.0), ("all_reduce", 2 * (ranks - 1) / ranks)):
        time_s = model.time_s(collective, ranks, LARGE_BYTES).time_s
        rates.append(share * LARGE_BYTES / max(time_s - latency_s, 1e-9))
    numbers = {"bandwidth_bytes_per_s": max(rates), "latency_s": latency_s}
    return [
        {"from": one, "to": other, **{name: _source(value, _SWEEP) for name, value in numbers.items()}}
        for one, other in itertools.permutations(map(name_rank_node, range(ranks)), 2)
    ]
