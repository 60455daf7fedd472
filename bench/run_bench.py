"""Measure the speeds that trioflow promises and write them as a table: `make bench`.

    .venv/bin/python bench/run_bench.py [GROUP...]

Wall times on the machine at hand, the median of several repeats; in-process and
warm, but for the commands, which start a new process as a user does. All groups
together write docs/bench.md and docs/bench.tsv; some of them only print. The
sweep takes about half of the time and both cores, all others one core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from bench_commands import bench_cold, bench_first_answer
from bench_engine import bench_engines, bench_extrapolation, bench_messages
from bench_scale import bench_scale
from bench_stages import bench_profiles, bench_results
from bench_sweep import bench_search, bench_sweep
from bench_timeline import bench_timeline
from page import write_page
from rows import Row, list_rows

DOCS = Path(__file__).resolve().parents[1] / "docs"
GROUPS: dict[str, Callable[[], Iterable[Row]]] = {
    "cold": bench_cold,
    "first-answer": bench_first_answer,
    "extrapolation": bench_extrapolation,
    "engines": bench_engines,
    "messages": bench_messages,
    "scale": bench_scale,
    "timeline": bench_timeline,
    "profiles": bench_profiles,
    "results": bench_results,
    "search": bench_search,
    "sweep": bench_sweep,
}


def main(chosen: list[str]) -> int:
    """Run groups by name, all of them without names; write the page after all."""
    unknown = [name for name in chosen if name not in GROUPS]
    if unknown:
        print(f"no group {unknown[0]!r}; choose of {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    found = [row for name in chosen or GROUPS for row in list_rows(GROUPS[name]())]
    if not chosen:
        write_page(found, DOCS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
