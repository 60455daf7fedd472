"""Tables of a simulated step: the chain of tasks that it waits for, and how its links were used."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.errors import InputError, SimulationError
from trioflow.engine.program import Floats, Ints, collect_waits, number_lanes
from trioflow.engine.result import LinkTraffic, Result
from trioflow.hardware.machine import name_link
from trioflow.parallel.task_graph import TaskGraph, read_tasks
from trioflow.tables import LINKS


def build_critical_path(graph: TaskGraph, timeline: pd.DataFrame, modules: Sequence[str] = ()) -> pd.DataFrame:
    """Describe the chain of tasks that the step waits for: ``tables.CRITICAL_PATH``, by time.

    Walked back from the task that ends last; each starts when the one before it ends. Of an exchange the member that
    was ready last stands for it; ties go to the lowest ``task_id``. Raises SimulationError when the timeline is not the
    graph's.
    """
    walked = np.array(_walk_back(graph, timeline), dtype=np.int64).reshape(-1, 2)
    tasks, awaited = walked.T
    rows = timeline.take(tasks).reset_index(drop=True)
    before = timeline.take(np.maximum(awaited, 0))
    same = np.ones(len(tasks), dtype=bool)
    for column in ("rank", "stream"):
        same &= rows[column].to_numpy() == before[column].to_numpy()
    step_s = float(timeline["end_s"].max()) if len(timeline) else 0.0
    operators = graph.task_columns["op_id"][tasks]
    known = (operators >= 0) & (operators < len(modules))
    names = np.array([*modules, ""], dtype=object)
    path: pd.DataFrame = rows.assign(
        module=names[np.where(known, operators, len(modules))],
        waited_for=pd.array(awaited, dtype="Int64"),
        reason=np.where(awaited < 0, "start", np.where(same, "stream", "dependency")),
        share=(rows["end_s"] - rows["start_s"]) / (step_s or 1.0),
    )
    path["waited_for"] = path["waited_for"].where(awaited >= 0)
    return path.reindex(columns=tables.CRITICAL_PATH.names)


def _walk_back(graph: TaskGraph, timeline: pd.DataFrame) -> list[tuple[int, int]]:
    """Return the tasks of the critical path, each with the task that it waited for or -1."""
    if not np.array_equal(timeline["task_id"].to_numpy(), graph.task_columns["task_id"]):
        raise SimulationError("the timeline and the task graph have different tasks")
    if timeline.empty:
        return []
    end_s = timeline["end_s"].to_numpy(np.float64)
    exchange = _number_exchanges(timeline)
    waiting, awaited = collect_waits(graph, number_lanes(read_tasks(timeline)))
    count = len(end_s)
    # Of what an exchange waits for, the latest; then the first task, then the first member.
    latest_s = np.full(count, -np.inf)
    np.maximum.at(latest_s, exchange[waiting], end_s[awaited])
    kept = end_s[awaited] == latest_s[exchange[waiting]]
    waiting, awaited = waiting[kept], awaited[kept]
    before = np.full(count, count)
    np.minimum.at(before, exchange[waiting], awaited)
    kept = awaited == before[exchange[waiting]]
    member = np.full(count, count)
    np.minimum.at(member, exchange[waiting[kept]], waiting[kept])
    path: list[tuple[int, int]] = []
    task = int(np.argmax(end_s))
    while True:
        joined = exchange[task]
        if before[joined] == count:
            path.append((task, -1))
            return path[::-1]
        path.append((int(member[joined]), int(before[joined])))
        task = before[joined]


def _number_exchanges(timeline: pd.DataFrame) -> NDArray[np.int64]:
    """Return the first task of each task's exchange, or the task itself [tasks]."""
    own = np.arange(len(timeline), dtype=np.int64)
    matches = timeline["match_id"]
    joined = np.flatnonzero(matches.notna().to_numpy(dtype=bool))
    codes = pd.factorize(matches.to_numpy(dtype=np.int64, na_value=-1)[joined])[0]
    firsts = np.unique(codes, return_index=True)[1]
    own[joined] = joined[firsts[codes]]
    return own


_FRACTION_BITS = 52
"""Rates are added up as whole numbers of this fraction of a link's bandwidth, so sums are exact."""


def measure_links(result: Result) -> pd.DataFrame:
    """Return how every link was used: ``tables.LINKS``, in the platform's order, of a result with ``record_links=True``.

    Busy while bytes move, not while a latency passes; utilisation is of what could have moved in the whole step. Where
    a measured collective is faster than the links allow, its bytes are too few (see ``CollectivePlanner.build``).
    Raises InputError when the result holds no traffic.
    """
    traffic = _read_traffic(result)
    link, time_s, rates, flows = _sweep(traffic)
    count = len(traffic.links)
    widths = np.array([one.bandwidth_bytes_per_s for one in traffic.links], dtype=np.float64)
    peak_flows, peak_rates, busy_s = np.zeros(count, np.int64), np.zeros(count), np.zeros(count)
    np.maximum.at(peak_flows, link, flows)
    np.maximum.at(peak_rates, link, rates)
    # The last instant of a link leaves no flow on it, so no time between two links is counted.
    lasting_s = np.append(np.diff(time_s), 0.0) * (flows > 0)
    np.add.at(busy_s, link, lasting_s)
    possible_bytes = widths * traffic.step_time_s
    used = np.divide(traffic.link_bytes, possible_bytes, out=np.zeros(count), where=possible_bytes > 0)
    table = pd.DataFrame(
        {
            "link": pd.Series([name_link(one) for one in traffic.links], dtype="str"),
            "bytes": traffic.link_bytes,
            "busy_s": busy_s,
            "utilisation": used,
            "peak_flows": peak_flows,
            "peak_utilisation": peak_rates / widths,
            "bandwidth_bytes_per_s": widths,
        }
    )
    ordered: pd.DataFrame = table[LINKS.names]
    return ordered


def link_rates(result: Result) -> pd.DataFrame:
    """Return how fast bytes moved over every link at every time, of a result with ``record_links=True``.

    ``link`` (text), ``time_s`` [s], ``rate_bytes_per_s`` [bytes/s] and ``flows``: a row for each instant at which
    either changes, by link and time, which holds until the next; outside nothing moves. Raises InputError when the
    result holds no traffic.
    """
    traffic = _read_traffic(result)
    link, time_s, rates, flows = _sweep(traffic)
    names = pd.array([name_link(one) for one in traffic.links], dtype="str")
    return pd.DataFrame(
        {"link": pd.Series(names.take(link), dtype="str"), "time_s": time_s, "rate_bytes_per_s": rates, "flows": flows}
    )


def _read_traffic(result: Result) -> LinkTraffic:
    if result.traffic is None:
        raise InputError("the simulation did not keep what crossed the links", fix="simulate with record_links=True")
    return result.traffic


def _sweep(traffic: LinkTraffic) -> tuple[Ints, Floats, Floats, Ints]:
    """Return each change of a link: its number, when, and the rate and flows from then on."""
    widths = np.array([one.bandwidth_bytes_per_s for one in traffic.links], dtype=np.float64)
    exponents = np.frexp(widths)[1] - _FRACTION_BITS
    parts = np.rint(np.ldexp(traffic.rate_bytes_per_s, -exponents[traffic.link])).astype(np.int64)
    link = np.concatenate([traffic.link, traffic.link])
    time_s = np.concatenate([traffic.begin_s, traffic.end_s])
    changes, counts = np.concatenate([parts, -parts]), np.repeat([1, -1], len(parts))
    order = np.lexsort((time_s, link))
    link, time_s = link[order], time_s[order]
    # All that happens to a link at one time is one change.
    last = np.append((np.diff(link) != 0) | (np.diff(time_s) != 0), True)[: len(link)]
    rates, flows = np.cumsum(changes[order])[last], np.cumsum(counts[order])[last]
    link, time_s = link[last], time_s[last]
    # Sums end at zero on every link, so the one before a link's first change is zero too.
    moves = (np.diff(rates, prepend=0) != 0) | (np.diff(flows, prepend=0) != 0)
    link, time_s, rates, flows = link[moves], time_s[moves], rates[moves], flows[moves]
    return link, time_s, np.ldexp(rates.astype(np.float64), exponents[link]), flows
