"""A simulated step as files: its timeline, what is made of it, curves over time, its summary, and a trace for Perfetto.

`build_critical_path` finds the chain of tasks that the step waits for, `measure_links` how its links were used.
`simulate_experiment` writes the files of an experiment of the workflow, `write_step` any step's. `write_perfetto` writes
Chrome's JSON trace events, which Perfetto opens (https://ui.perfetto.dev, or any copy of it).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.errors import InputError, SimulationError
from trioflow.base.provenance import atomic_path, read_json, write_json
from trioflow.base.units import NS_PER_S, NS_PER_US
from trioflow.costmodel.collectives.model import load_collective_model
from trioflow.costmodel.uncertainty import CAPTURES, pool_captures
from trioflow.engine.program import Floats, Ints, collect_waits, number_lanes
from trioflow.engine.result import LinkTraffic, Result
from trioflow.hardware.machine import name_link
from trioflow.network.networks import ContentionFreeNetwork, FairShareNetwork, find_network
from trioflow.parallel.task_graph import TaskGraph, read_tasks
from trioflow.prediction.assembly import Prediction, predict_step
from trioflow.prediction.breakdown import WAYS
from trioflow.prediction.step import SessionAnchor, load_experiment
from trioflow.tables import LINKS, STREAMS
from trioflow.trace.facts import Facts


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


Piece: TypeAlias = "str | pa.Array"
"""A part of every event of a kind: the same text in all, or a column of texts."""

CHUNK = 1 << 17
"""Events made into text at a time: what they take stays small beside the timeline."""
LEVEL = 2
"""Of compression: further levels take longer than all else together and save a fifth."""
_HEAD, _TAIL = b'{"displayTimeUnit":"ms","traceEvents":[', b"]}\n"
_FRACTIONS = pa.array([f".{number:03d}" for number in range(NS_PER_US)])


def _round_to_ns(times_s: pd.Series[float]) -> Ints:
    """Return times in whole nanoseconds [s to ns], as ``units.s_to_ns`` does one."""
    return np.rint(times_s.to_numpy(np.float64) * NS_PER_S).astype(np.int64)


def _write_integers(values: Ints) -> pa.Array:
    """Return whole numbers as text."""
    return pc.cast(pa.array(values), pa.string())


def _write_microseconds(times_ns: Ints) -> pa.Array:
    """Return times [ns] as text in microseconds, every digit of them."""
    whole, rest = np.divmod(times_ns, NS_PER_US)
    return pc.binary_join_element_wise(_write_integers(whole), _FRACTIONS.take(pa.array(rest)), "")


def _write_texts(values: Iterable[Any]) -> pa.Array:
    """Return texts in quotes, as JSON writes them."""
    codes, texts = pd.factorize(pd.Series(values, dtype="str"), use_na_sentinel=False)
    return pa.array([json.dumps(str(text)) for text in texts], pa.string()).take(pa.array(codes))


def _write_argument(name: str, values: pd.Series[Any]) -> pa.Array:
    """Return ``,"name":value`` where there is a value, and nothing elsewhere."""
    absent = (values.isna() | (values.astype("str") == "")).to_numpy(dtype=bool)
    if not absent.all() and pd.api.types.is_numeric_dtype(values):
        text = _write_integers(values.to_numpy(dtype=np.int64, na_value=0))
    else:
        text = _write_texts(values)
    return pc.if_else(pa.array(absent), "", pc.binary_join_element_wise(f',"{name}":', text, ""))


def _join_pieces(pieces: Sequence[Piece]) -> bytes:
    """Return events, one after the other, each begun by a comma."""
    return "".join(pc.binary_join_element_wise(",{", *pieces, "}", "").to_pylist()).encode()


def _cut_rows(count: int) -> Iterator[slice]:
    """Yield the rows of a table piece by piece."""
    for begin in range(0, count, CHUNK):
        yield slice(begin, min(begin + CHUNK, count))


def _write_events(path: str | Path, texts: Iterable[bytes]) -> None:
    """Write events, texts of `_join_pieces`, as a trace, atomically; compressed when the name ends in ``.gz``."""
    events = filter(None, texts)
    with atomic_path(path) as temporary, ExitStack() as opened:
        stream: Any = opened.enter_context(temporary.open("wb"))
        if str(path).endswith(".gz"):
            stream = opened.enter_context(gzip.GzipFile("", "wb", LEVEL, stream, mtime=0))
        stream.write(_HEAD + next(events, b"")[1:])  # the first event has no comma before it
        stream.writelines(events)
        stream.write(_TAIL)


MEASURED = " (measured)"
PATH_PROCESS, _PATH_THREAD, LINK_PROCESS = "critical path", "what the step waits for", "links"
"""Processes that are not ranks: what the step waits for, and the rates of the links."""

_ARGUMENTS = ("kind", "phase", "message_bytes", "micro_batch", "stage", "match_id")
_THREADS_PER_PROCESS = 1000
_PATH_PID = 1
_FIRST_PID = 2
"""Of rank 0; every rank has two numbers, for its prediction and its measurement. Process 0 is the
idle process to Perfetto."""


def write_perfetto(
    timeline: pd.DataFrame,
    path: str | Path,
    measured: pd.DataFrame | None = None,
    *,
    counters: pd.DataFrame | None = None,
    critical_path: pd.DataFrame | None = None,
) -> None:
    """Write a timeline, and a measured one beside it, as a Chrome JSON trace.

    ``timeline``: columns of ``tables.TIMELINE``. ``path``: target file; compressed when its name ends in ``.gz``. Equal
    tables give equal bytes. ``measured``: the same columns (others are ignored); each of its ranks appears below the
    simulated one as a process of its own, "rank 0 (measured)". ``counters``: curves: ``rank`` (null for a link),
    ``counter`` (its name), ``unit``, ``time_s`` [s] and ``value``, which holds from then on, to whole units.
    ``critical_path``: columns of ``tables.CRITICAL_PATH``; shown as a process of its own.

    One process per rank, one thread per stream, one slice per task. Arrows lead from a send to its recv and along the
    members of a collective in rank order. Perfetto counts in whole nanoseconds, so starts and ends are rounded to them,
    each for itself: tasks that touch still touch.
    """
    _write_events(path, _describe(timeline, measured, counters, critical_path))


def _describe(
    timeline: pd.DataFrame,
    measured: pd.DataFrame | None,
    counters: pd.DataFrame | None,
    critical_path: pd.DataFrame | None,
) -> Iterator[bytes]:
    """Yield the text of all events, part by part."""
    if critical_path is not None and len(critical_path):
        yield from _describe_path(critical_path)
    yield from _describe_timeline(timeline, "")
    if measured is not None:
        yield from _describe_timeline(measured, MEASURED)
    if counters is not None and len(counters):
        last = timeline["rank"].max() if len(timeline) else 0
        yield from _describe_counters(counters, _FIRST_PID + 2 * (int(last) + 1))


def _describe_timeline(timeline: pd.DataFrame, suffix: str) -> Iterator[bytes]:
    """Yield the names of processes and threads, then slices, then arrows."""
    if timeline.empty:
        return
    ranks = timeline["rank"].to_numpy(dtype=np.int64)
    start_ns, end_ns = _round_to_ns(timeline["start_s"]), _round_to_ns(timeline["end_s"])
    codes, stream_names = pd.factorize(timeline["stream"])
    streams = [str(name) for name in stream_names]
    lane = _assign_lanes(ranks * len(streams) + codes, start_ns, end_ns)
    keys, thread = _find_threads(ranks, codes, lane, streams)
    pids = _FIRST_PID + 2 * keys[:, 0] + (1 if suffix else 0)
    index = np.arange(len(keys)) - np.searchsorted(keys[:, 0], keys[:, 0]) + 1
    # Perfetto calls the thread with its process's number the main thread.
    tids = pids * max(_THREADS_PER_PROCESS, int(index.max()) + 1) + index
    yield _name_threads(keys, pids, tids, index, streams, suffix)
    tasks = timeline.assign(pid=pids[thread], tid=tids[thread], start_ns=start_ns, end_ns=end_ns)
    for rows in _cut_rows(len(tasks)):
        yield _describe_tasks(tasks.iloc[rows])
    yield from _describe_arrows(tasks, suffix)


def _assign_lanes(key: Ints, start_ns: Ints, end_ns: Ints) -> Ints:
    """Return the lane of every task within its stream, ``key``, from 0, by when it runs [tasks] [ns].

    Measured tasks of one stream may overlap, and Perfetto drops slices that do without one lying inside the other: such
    a slice moves to the next lane.
    """
    lanes = np.zeros(len(key), dtype=np.int64)
    order = np.lexsort((-end_ns, start_ns, key))
    same = key[order[1:]] == key[order[:-1]]
    # In the order of starts, where any two overlap, two neighbours do.
    crowded = np.unique(key[order[1:]][same & (start_ns[order[1:]] < end_ns[order[:-1]])])
    chosen = order[np.isin(key[order], crowded)]
    open_ends: dict[int, list[list[int]]] = {}
    columns = (values[chosen].tolist() for values in (key, start_ns, end_ns))
    for row, stream, start, end in zip(chosen.tolist(), *columns, strict=True):
        ends = open_ends.setdefault(stream, [])
        lane = 0
        while lane < len(ends) and not _fits(ends[lane], start, end):
            lane += 1
        if lane == len(ends):
            ends.append([])
        ends[lane].append(end)
        lanes[row] = lane
    return lanes


def _fits(open_ends: list[int], start_ns: int, end_ns: int) -> bool:
    """Close the slices of a lane that ended, and say if another fits on or beside the rest."""
    while open_ends and open_ends[-1] <= start_ns:
        open_ends.pop()
    return not open_ends or end_ns <= open_ends[-1]


def _find_threads(ranks: Ints, codes: Ints, lane: Ints, streams: list[str]) -> tuple[Ints, Ints]:
    """Return rank, stream and lane of every thread from top to bottom, and the thread of each task."""
    order = sorted(range(len(streams)), key=lambda code: _order_stream(streams[code]))
    lanes = int(lane.max(initial=0)) + 1
    numbers = (ranks * len(streams) + np.argsort(order)[codes]) * lanes + lane
    threads, row_of = np.unique(numbers, return_inverse=True)
    above, place = np.divmod(threads // lanes, len(streams))
    keys = np.stack([above, np.array(order)[place], threads % lanes], axis=1)
    return keys, row_of


def _order_stream(stream: str) -> tuple[int, str]:
    known = stream in STREAMS
    return (STREAMS.index(stream) if known else len(STREAMS), stream)


def _name_threads(keys: Ints, pids: Ints, tids: Ints, places: Ints, streams: list[str], suffix: str) -> bytes:
    """Return the names of processes and threads, and their order; ``keys``: rank, stream and lane [threads, 3]."""
    events: list[dict[str, Any]] = []
    # Perfetto sorts processes by their names, as texts.
    width = len(str(keys[:, 0].max()))
    rows = zip(keys.tolist(), pids, tids, places, strict=True)
    for (rank, code, lane), pid, tid, index in rows:
        if index == 1:
            events += _name_process(int(pid), f"rank {rank:0{width}d}{suffix}")
        name = streams[code] if lane == 0 else f"{streams[code]} {lane + 1}"
        events += _name_thread(int(pid), int(tid), name, int(index))
    return _write_names(events)


def _name_process(pid: int, name: str) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "args": {"name": name}, "pid": pid},
        {"ph": "M", "name": "process_sort_index", "args": {"sort_index": pid}, "pid": pid},
    ]


def _name_thread(pid: int, tid: int, name: str, index: int) -> list[dict[str, Any]]:
    thread = {"pid": pid, "tid": tid}
    return [
        {"ph": "M", "name": "thread_name", "args": {"name": name}, **thread},
        {"ph": "M", "name": "thread_sort_index", "args": {"sort_index": index}, **thread},
    ]


def _write_names(events: list[dict[str, Any]]) -> bytes:
    return b"".join(b"," + json.dumps(one, separators=(",", ":")).encode() for one in events)


def _describe_tasks(tasks: pd.DataFrame, arguments: Sequence[str] = _ARGUMENTS) -> bytes:
    """Return one slice per task, in the order of the rows; ``pid``, ``tid``, ``start_ns`` and ``end_ns``: where it stands."""
    start_ns, end_ns = (tasks[name].to_numpy() for name in ("start_ns", "end_ns"))
    pieces: list[Piece] = [
        '"ph":"X","name":',
        _write_texts(tasks["name"]),
        ',"cat":',
        _write_texts(tasks["phase"].where(tasks["phase"] != "", tasks["kind"])),
        ',"pid":',
        _write_integers(tasks["pid"].to_numpy()),
        ',"tid":',
        _write_integers(tasks["tid"].to_numpy()),
        ',"ts":',
        _write_microseconds(start_ns),
        ',"dur":',
        _write_microseconds(end_ns - start_ns),
        ',"args":{"task_id":',
        _write_integers(tasks["task_id"].to_numpy(np.int64)),
        *(_write_argument(name, tasks[name]) for name in arguments),
        "}",
    ]
    return _join_pieces(pieces)


def _describe_arrows(timeline: pd.DataFrame, suffix: str) -> Iterator[bytes]:
    """Yield an arrow from each send to its recv, and along each collective's members."""
    joined = np.flatnonzero(timeline["match_id"].notna().to_numpy(dtype=bool))
    match = timeline["match_id"].to_numpy(dtype=np.int64, na_value=0)[joined]
    ranks = timeline["rank"].to_numpy(dtype=np.int64)[joined]
    receives = (timeline["kind"] == "recv").to_numpy(dtype=bool)[joined]
    order = np.lexsort((joined, ranks, receives, match))
    along = match[order[1:]] == match[order[:-1]]
    tails, heads = joined[order[:-1][along]], joined[order[1:][along]]
    # In the middle of a slice: at its edge an arrow's end could bind to a neighbour.
    pids, tids, start_ns, end_ns = (timeline[name].to_numpy() for name in ("pid", "tid", "start_ns", "end_ns"))
    middle_ns = start_ns + (end_ns - start_ns) // 2
    for rows in _cut_rows(len(tails)):
        # Perfetto joins two ends by category, name and a whole number; others it drops.
        number = _write_integers(np.arange(rows.start, rows.stop))
        for end, task in (('"ph":"s"', tails[rows]), ('"ph":"f","bp":"e"', heads[rows])):
            yield _join_pieces(
                [
                    f'{end},"cat":"match","name":"match{suffix}","id":',
                    number,
                    ',"pid":',
                    _write_integers(pids[task]),
                    ',"tid":',
                    _write_integers(tids[task]),
                    ',"ts":',
                    _write_microseconds(middle_ns[task]),
                ]
            )


def _describe_path(path: pd.DataFrame) -> Iterator[bytes]:
    """Yield the critical path as a process of one thread."""
    tid = _PATH_PID * _THREADS_PER_PROCESS + 1
    yield _write_names([*_name_process(_PATH_PID, PATH_PROCESS), *_name_thread(_PATH_PID, tid, _PATH_THREAD, 1)])
    names = path["name"].astype("str") + ", rank " + path["rank"].astype("str")
    limits = {"start_ns": _round_to_ns(path["start_s"]), "end_ns": _round_to_ns(path["end_s"])}
    tasks = path.assign(name=names, pid=_PATH_PID, tid=tid, **limits)
    for rows in _cut_rows(len(tasks)):
        yield _describe_tasks(tasks.iloc[rows], ("rank", "module", "reason"))


def _describe_counters(counters: pd.DataFrame, link_pid: int) -> Iterator[bytes]:
    """Yield curves: those of a rank in its process, those of links in one of their own."""
    of_link = counters["rank"].isna().to_numpy(dtype=bool)
    ranks = counters["rank"].to_numpy(dtype=np.int64, na_value=0)
    pids = np.where(of_link, link_pid, _FIRST_PID + 2 * ranks)
    if of_link.any():
        yield _write_names(_name_process(link_pid, LINK_PROCESS))
    time_ns = _round_to_ns(counters["time_s"])
    values = np.rint(counters["value"].to_numpy(np.float64)).astype(np.int64)
    for rows in _cut_rows(len(counters)):
        yield _join_pieces(
            [
                '"ph":"C","name":',
                _write_texts(counters["counter"].iloc[rows]),
                ',"pid":',
                _write_integers(pids[rows]),
                ',"ts":',
                _write_microseconds(time_ns[rows]),
                ',"args":{',
                _write_texts(counters["unit"].iloc[rows]),
                ":",
                _write_integers(values[rows]),
                "}",
            ]
        )


DRAWS = 200
"""Draws of each experiment."""


def simulate_experiment(
    graph_folder: str | Path,
    platform: str | Path,
    collectives: str | Path,
    session: str | Path,
    traces: Sequence[str | Path],
    captures: Sequence[str | Path],
    folder: str | Path,
) -> None:
    """Simulate an experiment and write its timeline, what is made of it, and its summary.

    ``graph_folder``, ``platform``, ``collectives``, ``session``, ``traces``: as for ``prediction.step.load_experiment``;
    ``captures``: ``trace.json`` of all of the run's traces,
    whose repeats say how far ranks drift (where none was repeated, the spread of the kind of device does); ``folder``:
    where ``timeline.parquet``, ``critical_path.parquet``, ``links.parquet``, ``breakdown.parquet``,
    ``perfetto.json.gz`` and ``summary.json`` go.
    """
    step, anchor = load_experiment(graph_folder, platform, collectives, session, traces)
    repeats = [Facts.read(read_json(path), path).repeats for path in captures]
    drift = None
    if known := [one for one in repeats if one]:
        curves = load_collective_model(collectives).curves.values()
        drift = pool_captures(known, curves, step.platform.device.kind, CAPTURES).spread
    prediction = predict_step(replace(step, options=replace(step.options, draws=DRAWS, spread=drift)))
    write_simulation(prediction, Path(folder))
    write_json(Path(folder) / "summary.json", _summarize_experiment(prediction, anchor))


def _summarize_experiment(prediction: Prediction, anchor: SessionAnchor) -> dict[str, object]:
    """Return an experiment's ``summary.json``: the simulation's summary, and what the report shows beside it."""
    step, simulated, metadata = (prediction.step, prediction.simulated, prediction.step.graph.metadata)
    return {
        **simulated.result.summary.to_dict(),
        "drawn": None if prediction.draws is None else prediction.draws.to_dict(),
        "experiment": metadata.experiment,
        "plan_text": metadata.plan_text,
        "trace_only_step_time_s": simulated.trace_only_s,
        "baseline_step_time_s": metadata.baseline_step_time_s,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "memory": prediction.memory,
        "memory_bytes": step.platform.device.memory_bytes,
        "compute_factors": simulated.factors,
        "anchor_quiet": anchor.quiet,
        "anchor_busy": anchor.busy,
        "confidence": prediction.confidence,
    }


def write_simulation(prediction: Prediction, folder: Path) -> None:
    """Write the timeline of a predicted step, simulated with ``record_links=True``, and what is made of it."""
    parts = [prediction.breakdown(by) for by in WAYS]
    for part in parts:
        part.attrs = {}
    path = write_step(prediction, folder / "perfetto.json.gz")
    frames = {
        "timeline": prediction.timeline,
        "critical_path": path,
        "links": measure_links(prediction.simulated.result),
        "breakdown": pd.concat(parts, ignore_index=True),
    }
    for name, frame in frames.items():
        tables.write_table(frame, name, folder / f"{name}.parquet")


def write_step(prediction: Prediction, path: str | Path) -> pd.DataFrame:
    """Write a predicted step as a Perfetto trace, with its critical path (returned), memory and the rates of its links.

    Without ``record_links=True`` there are no rates.
    """
    graph, timeline = prediction.task_graph, prediction.timeline
    modules = prediction.step.trace.operators["module"].tolist()
    waited = build_critical_path(graph, timeline, modules)
    counters = count_memory(graph.metadata.memory_curves, timeline)
    result = prediction.simulated.result
    if result.traffic is not None:
        counters = pd.concat([counters, count_link_rates(result)], ignore_index=True)
    write_perfetto(timeline, path, counters=counters, critical_path=waited)
    return waited


_LINK_UNIT = "bytes/s"
MEMORY, _MEMORY_UNIT = "memory", "bytes"
_MOST_POINTS = 2000
"""Points of a rank's memory curve; longer ones keep the most of each stretch."""
_HELD_BY_DEVICE = ("compute", "memcpy", "host")


def can_count_links(network: str) -> bool:
    """Return whether a network, named as for ``networks.find_network``, can be simulated with ``record_links=True``."""
    return find_network(network) in (FairShareNetwork, ContentionFreeNetwork)


def count_link_rates(result: Result) -> pd.DataFrame:
    """Return the rate of every link that bytes moved over [bytes/s], as ``write_perfetto`` takes curves; ``rank`` is null.

    Raises InputError when the result was not simulated with ``record_links=True``.
    """
    rates = link_rates(result)
    return pd.DataFrame(
        {
            "rank": pd.array([None] * len(rates), dtype="Int64"),
            "counter": rates["link"],
            "unit": _LINK_UNIT,
            "time_s": rates["time_s"],
            "value": rates["rate_bytes_per_s"],
        }
    )


def count_memory(
    curves: Sequence[Mapping[str, Any]], timeline: pd.DataFrame, most_points: int = _MOST_POINTS
) -> pd.DataFrame:
    """Return what every rank holds over time [bytes], as ``write_perfetto`` takes curves.

    ``curves``: ``memory_curves`` of the task graph's metadata; ``timeline``: ``tables.TIMELINE`` of the same graph. Above
    ``most_points`` of a rank neighbours are joined and keep their most.

    Memory is handed out in the order of the program (``parallel.memory.profile``): a change is shown when the device
    begins its task; of communication, whose streams run ahead or behind, at the latest begin of computation before it.
    """
    order = np.argsort(timeline["rank"].to_numpy(np.int64), kind="stable")
    rank = timeline["rank"].to_numpy(np.int64)[order]
    start_s = timeline["start_s"].to_numpy(np.float64)[order]
    computes = timeline["kind"].isin(_HELD_BY_DEVICE).to_numpy(dtype=bool)[order]
    shown_s = np.where(computes, start_s, 0.0)
    ranks, times_s, values = [], [], []
    for curve in curves:
        places = np.asarray(curve["places"], dtype=np.int64)
        held_bytes = np.asarray(curve["bytes"], dtype=np.int64)
        places, held_bytes = _thin(places, held_bytes, most_points)
        for one in curve["ranks"]:
            first, last = np.searchsorted(rank, [one, one + 1])
            known = places < last - first
            reached_s = np.maximum.accumulate(shown_s[first:last])[places[known]]
            ranks.append(np.full(len(reached_s), one, dtype=np.int64))
            times_s.append(reached_s)
            values.append(held_bytes[known])
    none = np.zeros(0)
    return pd.DataFrame(
        {
            "rank": pd.array(np.concatenate([none.astype(np.int64), *ranks]), dtype="Int64"),
            "counter": MEMORY,
            "unit": _MEMORY_UNIT,
            "time_s": np.concatenate([none, *times_s]),
            "value": np.concatenate([none, *values]),
        }
    )


def _thin(
    places: NDArray[np.int64], held_bytes: NDArray[np.int64], most_points: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join neighbours until there are few enough points; each shows the most of its stretch, the last the end."""
    if len(places) <= most_points:
        return places, held_bytes
    firsts = np.unique(np.linspace(0, len(places) - 1, most_points).astype(np.int64))
    return places[firsts], np.maximum.reduceat(held_bytes, firsts)
