"""What the report reads: every file of a run, found by its name and place."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import read_json
from trioflow.costmodel.collectives.model import CollectiveCostModel, load_collective_model
from trioflow.report.attribution import ATTRIBUTION, CAUSES
from trioflow.trace.facts import Facts

_TABLE_FILES = {
    "measurements.parquet": "measurements",
    "rank_timelines.parquet": "rank_timelines",
    "collective_samples.parquet": "collective_samples",
    "timeline.parquet": "timeline",
    "critical_path.parquet": "critical_path",
    "breakdown.parquet": "breakdown",
    "links.parquet": "links",
    "operator_fit.parquet": "operator_fit",
}
OWN_TABLES = {"attribution": ATTRIBUTION, "causes": CAUSES}
"""Tables whose schema stands beside what makes them."""
_JSON_FILES = ("session.json", "summary.json", "trace.json")
_OWN_FILES = {name: f"{name}.parquet" for name in OWN_TABLES}
_SINGLE_FILES = ("operator_fit.parquet", "collectives.json", *_OWN_FILES.values())
"""Files that a run has one of; of the others it has one a workload, experiment or trace."""


@dataclass(frozen=True)
class ReportInputs:
    """Everything that one run left behind for its report."""

    # experiments, plans: rows of the sample sheets.
    experiments: pd.DataFrame
    plans: pd.DataFrame
    # measurements, rank_timelines, collective_samples: tables of all workloads, one after the
    # other.
    measurements: pd.DataFrame
    rank_timelines: pd.DataFrame
    collective_samples: pd.DataFrame
    operator_fit: pd.DataFrame  # columns of ``tables.OPERATOR_FIT``
    collectives: CollectiveCostModel  # fitted collective costs
    # attribution, causes: columns of ``attribution.ATTRIBUTION`` and ``attribution.CAUSES``.
    attribution: pd.DataFrame
    causes: pd.DataFrame
    sessions: dict[str, dict[str, Any]]  # ``session.json`` by workload
    # timelines, critical_paths, breakdowns, links: predicted timeline by experiment, and what was
    # made of it.
    timelines: dict[str, pd.DataFrame]
    critical_paths: dict[str, pd.DataFrame]
    breakdowns: dict[str, pd.DataFrame]
    links: dict[str, pd.DataFrame]
    summaries: dict[str, dict[str, Any]]  # ``summary.json`` by experiment
    traces: dict[str, Facts]  # by trace
    files: list[Path]  # all files read

    @property
    def plan_kinds(self) -> dict[str, str]:
        """Kind of every plan, by its name."""
        return {str(row["plan"]): describe_plan_kind(row) for row in self.plans.to_dict("records")}


def describe_plan_kind(plan: Mapping[Any, Any]) -> str:
    """Name what a plan splits: nothing, the batch, operators, layers, or several of them."""
    kinds = [
        kind
        for column, kind in (("data", "data parallel"), ("tensor", "tensor parallel"), ("pipeline", "pipeline"))
        if int(plan[column]) > 1
    ]
    return " and ".join(kinds) or "one rank"


def load_report_inputs(
    files: Iterable[str | Path], experiments: Sequence[Mapping[str, Any]], plans: Sequence[Mapping[str, Any]]
) -> ReportInputs:
    """Read a run's files, in any order, by their names; their folders say which workload, experiment or trace they are of.

    Raises InputError when a kind of file is missing altogether, or given twice for one place (what
    single experiments lack, ``build_error_table`` finds), TableError when a table breaks its
    schema, TraceError when a trace's facts are damaged.
    """
    files_of = _find_files(files)
    json = {name: {place: read_json(path) for place, path in files_of[name].items()} for name in _JSON_FILES}
    frames = {
        name: {place: tables.read_table(path, schema) for place, path in files_of[name].items()}
        for name, schema in _TABLE_FILES.items()
    }
    own = {
        name: tables.read_table(files_of[_OWN_FILES[name]][""], name, schema=schema)
        for name, schema in OWN_TABLES.items()
    }
    return ReportInputs(
        experiments=pd.DataFrame(list(experiments)),
        plans=pd.DataFrame(list(plans)),
        measurements=_concatenate(frames["measurements.parquet"]),
        rank_timelines=_concatenate(frames["rank_timelines.parquet"]),
        collective_samples=_concatenate(frames["collective_samples.parquet"]),
        operator_fit=frames["operator_fit.parquet"][""],
        collectives=load_collective_model(files_of["collectives.json"][""]),
        attribution=own["attribution"],
        causes=own["causes"],
        sessions=json["session.json"],
        timelines=frames["timeline.parquet"],
        critical_paths=frames["critical_path.parquet"],
        breakdowns=frames["breakdown.parquet"],
        links=frames["links.parquet"],
        summaries=json["summary.json"],
        traces={
            place: Facts.read(content, files_of["trace.json"][place]) for place, content in json["trace.json"].items()
        },
        files=sorted(path for places in files_of.values() for path in places.values()),
    )


def _find_files(files: Iterable[str | Path]) -> dict[str, dict[str, Path]]:
    """Sort files by their name and their folder."""
    files_of: dict[str, dict[str, Path]] = {
        name: {} for name in (*_TABLE_FILES, *_OWN_FILES.values(), *_JSON_FILES, "collectives.json")
    }
    for file in sorted(Path(file) for file in files):
        if file.name not in files_of:
            continue
        place = "" if file.name in _SINGLE_FILES else file.parent.name
        if place in files_of[file.name]:
            raise InputError(f"{file.name} is given twice, also as {files_of[file.name][place]}", file=file)
        files_of[file.name][place] = file
    missing = [name for name, places in files_of.items() if not places]
    if missing:
        raise InputError(f"the report has no {missing[0]}", fix="give the files of the whole run as its input")
    return files_of


def _concatenate(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Put the tables of all places one after the other."""
    parts = [frame.assign() for frame in frames.values()]
    for part in parts:
        # Provenance of one file is not that of the whole; unequal attributes would be dropped anyway.
        part.attrs = {}
    return pd.concat(parts, ignore_index=True)
