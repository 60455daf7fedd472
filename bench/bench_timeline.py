"""Rows about a timeline of a million tasks: the Perfetto trace, the critical path, the tables."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from graphs import make_data_parallel_graph, make_switch
from rows import Row, time_s
from trioflow.engine.simulate import simulate
from trioflow.export.step_files import (
    build_critical_path,
    count_link_rates,
    count_memory,
    measure_links,
    write_perfetto,
)
from trioflow.tables import write_table

RANKS, OPERATORS, BUCKETS, UPDATES = 128, 3000, 50, 1800
"""A step of a million tasks: forward and backward of all operators, buckets, updates."""
PERFETTO_S = 10.0


def bench_timeline() -> Iterator[Row]:
    """Time what is made of a timeline of a million tasks."""
    graph = make_data_parallel_graph(RANKS, OPERATORS, BUCKETS, 10**9, UPDATES)
    result = simulate(graph, make_switch(RANKS), engine="compiled", record_links=True)
    timeline = result.timeline
    path, rates = build_critical_path(graph, timeline), count_link_rates(result)
    memory = count_memory(_make_curve(len(timeline) // RANKS), timeline)
    curves = pd.concat([memory, rates], ignore_index=True)
    size = f"{len(timeline)} tasks on {RANKS} ranks"
    with tempfile.TemporaryDirectory() as folder:
        trace, table = Path(folder) / "t.json.gz", Path(folder) / "t.parquet"
        whole_s = time_s(lambda: write_perfetto(timeline, trace, counters=curves, critical_path=path), 3)
        told = (
            f"{trace.stat().st_size / 1e6:.0f} MB, with arrows, critical path, {len(rates)} rates of links and "
            f"{len(memory)} points of memory"
        )
        yield Row(f"write the Perfetto trace of {size}", whole_s, aim=PERFETTO_S, detail=told)
        write_s = time_s(lambda: write_table(timeline, "timeline", table), 3)
        yield Row(f"write the timeline of {size} as Parquet", write_s)
    path_s = time_s(lambda: build_critical_path(graph, timeline), 3)
    yield Row(f"find the critical path of {size}", path_s, detail=f"{len(path)} tasks long")
    links_s = time_s(lambda: measure_links(result), 3)
    yield Row(f"measure the links of {size}", links_s)


def _make_curve(tasks: int) -> list[dict[str, Any]]:
    """Return a curve that changes at every task, all ranks alike: up in forward, down in backward."""
    held = [10**6 * min(place, tasks - place) for place in range(tasks)]
    return [{"ranks": list(range(RANKS)), "places": list(range(tasks)), "bytes": held}]
