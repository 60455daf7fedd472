"""The data of a figure, from the tables that its rule names."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import stamp
from trioflow.prediction.answer import predict_step
from trioflow.prediction.assembly import build_graph
from trioflow.reproductions.figures import catalogue
from trioflow.reproductions.figures.catalogue import (
    Figure,
    describe_averages,
    find_family,
)
from trioflow.reproductions.figures.drawings import (
    draw_evidence,
    draw_hop,
    draw_shares,
    draw_speeds,
    draw_wafer,
)
from trioflow.reproductions.figures.points import (
    BUSY,
    STEP,
    list_live_rows,
    list_live_shares,
    list_predicted_rows,
    list_predicted_shares,
    list_published_rows,
    list_validation_rows,
    read_live_errors,
    save_column_figure,
    use_busy_time,
)
from trioflow.reproductions.tables import (
    EVIDENCE,
    HOP,
    ONLY_SIMULATED,
    SHARES,
    SIMULATOR_TIMES,
    WAFER,
)
from trioflow.sweeps.chunks import list_chunk_files, make_frame
from trioflow.sweeps.description import Sweep, load_sweep
from trioflow.sweeps.parameters import resolve_batch, resolve_plan
from trioflow.sweeps.workshop import OK, Workshop

Files = Mapping[str, Sequence[str]]
"""Files by the name of the rule's input: errors, profiles, timelines, predictions, validation,
published, study, times."""
SCHEMAS: dict[str, pa.Schema] = {
    catalogue.ERRORS: EVIDENCE, catalogue.ORDER: EVIDENCE, catalogue.SHARES: SHARES,
    catalogue.SPEED: SIMULATOR_TIMES, catalogue.WAFER: WAFER, catalogue.HOP: HOP,
}  # fmt: skip
"""Table of each form of figure."""
LIVE = "gloo on this CPU"


def build_figure_data(
    name: str, files: Files, plans: Sequence[Mapping[str, Any]] = ()
) -> pd.DataFrame:
    """Return what a figure (``catalogue.PREFIX`` before it with public data) draws, columns of ``SCHEMAS`` of its form.

    Raises InputError when it is unknown, or a set that it needs has no row; the sentence names
    both.
    """
    figure = catalogue.find_figure(name)
    try:
        if figure.form in (catalogue.ERRORS, catalogue.ORDER):
            return _build_evidence(figure, name, files, plans)
        if figure.form == catalogue.SHARES:
            return _build_shares(figure, files, plans)
        kind = "times" if figure.form == catalogue.SPEED else "study"
        frame = tables.read_table(_take_one(files, kind), kind, schema=SCHEMAS[figure.form])
        if frame.empty:
            raise InputError("no row", file=_take_one(files, kind), fix="make the table again")
        return frame
    except InputError as error:
        raise type(error)(
            f"{name}: {error.problem}", file=error.file, place=error.place, fix=error.fix
        ) from None


def _build_evidence(
    figure: Figure, name: str, files: Files, plans: Sequence[Mapping[str, Any]]
) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    if figure.live:
        errors = read_live_errors(_take_one(files, "errors"), plans, figure.families)
        live = list_live_rows(errors, LIVE, figure.live_label)
        if figure.busy:
            live = use_busy_time(live, _read_profiles(files), _read_timelines(files))
        rows += live
    if name.startswith(catalogue.PREFIX):
        rows += _list_public(figure, files)
    if figure.scenarios:
        quantity = BUSY if figure.busy else STEP
        rows += list_predicted_rows(
            files.get("predictions", []),
            quantity=quantity,
            label=figure.label,
            series=figure.series,
        )
    named = [{"figure": figure.name, **row} for row in rows]
    # Beside what was only simulated they are drawn where the figure measures nothing.
    measured = {row["evidence"] for row in rows} - {ONLY_SIMULATED}
    drawn = measured or {ONLY_SIMULATED}
    named = [
        {**row, "paper": describe_averages(row) if row["evidence"] in drawn else ""}
        for row in named
    ]
    return pd.DataFrame(named, columns=EVIDENCE.names)


def _list_public(figure: Figure, files: Files) -> list[dict[str, Any]]:
    """Return the rows of public measurements."""
    rows = []
    for set_name in figure.validation:
        matching = [f for f in files.get("validation", []) if Path(f).stem == set_name]
        if not matching:
            raise InputError(f"the set {set_name} is missing", fix="run `snakemake validation`")
        rows += list_validation_rows(matching[0], set_name)
    if figure.published:
        found = list_published_rows(files.get("published", []), figure.families)
        if figure.form == catalogue.ORDER:
            found = keep_rivals(found)
        rows += found
    return rows


def keep_rivals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cases whose training was measured under several plans; InputError where there is none."""
    keys = [(row["panel"], row["workload"], row["device"], row["ranks"]) for row in rows]
    plans: dict[tuple[Any, ...], set[str]] = {}
    for key, row in zip(keys, rows, strict=True):
        plans.setdefault(key, set()).add(row["plan"])
    found = [
        {**row, "label": row["workload"], "series": _describe_plan(row)}
        for key, row in zip(keys, rows, strict=True)
        if len(plans[key]) > 1
    ]
    if not found:
        raise InputError("no public training was measured under several plans")
    return found


def _describe_plan(row: Mapping[str, Any]) -> str:
    """Return a public case's kind of plan, as ``catalogue.name_plan`` names a live one's."""
    chunks = row["micro_batches"]
    return (
        f"{row['family']}, {chunks} chunk{'s' if chunks > 1 else ''}" if chunks else row["family"]
    )


def _build_shares(figure: Figure, files: Files, plans: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    errors = read_live_errors(_take_one(files, "errors"), plans, figure.families)
    rows = list_live_shares(errors, _read_profiles(files))
    rows += sorted(
        list_predicted_shares(files.get("predictions", [])), key=lambda row: str(row["case"])
    )
    return pd.DataFrame([{"figure": figure.name, **row} for row in rows], columns=SHARES.names)


def _take_one(files: Files, kind: str) -> str:
    """Return the only file of a kind."""
    found = list(files.get(kind, []))
    if not found:
        raise InputError(f"no file of its {kind}", fix="start the figure by its workflow target")
    return found[0]


def _read_profiles(files: Files) -> pd.DataFrame:
    """Return the profiles of real steps, all workloads."""
    frames = [tables.read_table(file, "rank_timelines") for file in files.get("profiles", [])]
    return pd.concat(frames, ignore_index=True) if frames else tables.empty("rank_timelines")


def _read_timelines(files: Files) -> dict[str, pd.DataFrame]:
    """Return the predicted timelines by experiment, which is the name of a file's folder."""
    return {
        Path(file).parent.name: tables.read_table(file, "timeline")
        for file in files.get("timelines", [])
    }


_DRAWERS = {
    catalogue.ERRORS: draw_evidence, catalogue.ORDER: draw_evidence, catalogue.SHARES: draw_shares,
    catalogue.SPEED: draw_speeds, catalogue.WAFER: draw_wafer, catalogue.HOP: draw_hop,
}  # fmt: skip


def make_figure(
    name: str, files: Files, plans: Sequence[Mapping[str, Any]], target: str | Path
) -> None:
    """Write a figure as PDF, SVG and PNG, and what it draws (``build_figure_data``) as Parquet; ``target`` has no suffix."""
    figure = catalogue.find_figure(name)
    rows = build_figure_data(name, files, plans)
    drawing = _DRAWERS[figure.form](figure, rows)
    sources = [file for group in files.values() for file in group]
    tables.write_table(rows, name, f"{target}.parquet", stamp(sources), SCHEMAS[figure.form])
    save_column_figure(drawing, target)


def predict_scenarios(description: str | Path, target: str | Path) -> pd.DataFrame:
    """Predict every scenario of a sweep's description, and write ``tables.SWEEP_RESULTS``; InputError where it is wrong."""
    sweep = load_sweep(description)
    workshop = _make_workshop(sweep)
    rows = [workshop.predict(number, values) for number, values in enumerate(sweep.scenarios)]
    frame = make_frame(rows)
    files = list_chunk_files(sweep, range(len(sweep.scenarios)))
    tables.write_table(frame, "sweep_results", target, stamp([description, *files]))
    return frame


def _make_workshop(sweep: Sweep) -> Workshop:
    """Return what predicts the scenarios of a description."""
    return Workshop(sweep.traces, sweep.platforms, interval=sweep.interval)


REPEATS = 5
"""Runs whose median is taken; one more goes before them, which loads what is loaded once."""


def time_simulations(
    description: str | Path, target: str | Path, repeats: int = REPEATS
) -> pd.DataFrame:
    """Time every scenario of a description that has a step, and write ``SIMULATOR_TIMES``; InputError where none has.

    In one warm process: starting and loading do not count; extrapolation is timed apart.
    """
    sweep = load_sweep(description)
    workshop = _make_workshop(sweep)
    rows = []
    for values in sweep.scenarios:
        if workshop.predict(0, values)["status"] == OK:
            rows.append(_time_scenario(workshop, values, repeats))
    if not rows:
        raise InputError("no scenario has a step to time", file=description, fix="mend it")
    frame = pd.DataFrame(rows, columns=SIMULATOR_TIMES.names)
    tables.write_table(frame, "simulator times", target, stamp([description]), SIMULATOR_TIMES)
    return frame


def _time_scenario(workshop: Workshop, values: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Return a row of ``SIMULATOR_TIMES``."""
    traces = workshop.load_traces(values["trace"])
    plan = resolve_plan(values)
    batch = resolve_batch(values, plan, traces[0].facts.batch)
    platform = workshop.load_platform(values["platform"], plan.ranks)
    times = workshop.time_operators(values["trace"], platform.device.name)
    built_s, walls_s = [], []
    for _ in range(repeats + 1):
        began_s = time.perf_counter()
        graph = build_graph(times, plan, batch=batch, host=platform.host)
        halfway_s = time.perf_counter()
        prediction = predict_step(workshop.prepare(times, graph, platform, interval=False))
        walls_s.append(time.perf_counter() - halfway_s)
        built_s.append(halfway_s - began_s)
    walls_s = walls_s[1:]
    return {
        "trace": values["trace"], "workload": traces[0].facts.workload, "family": find_family(plan),
        "plan": graph.metadata.plan_text, "ranks": plan.ranks, "events": prediction.events,
        "repeats": repeats, "build_s": statistics.median(built_s[1:]), "wall_s": statistics.median(walls_s),
        "wall_low_s": min(walls_s), "wall_high_s": max(walls_s), "step_s": prediction.step_time_s,
    }  # fmt: skip
