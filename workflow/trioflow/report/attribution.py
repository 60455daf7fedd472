"""How much of each experiment's error comes from which model: measured values in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import read_json, stamp
from trioflow.report.causes import CAUSES, explain_cases
from trioflow.report.errors import measured_steps
from trioflow.report.live_case import COMPUTE, LiveCase, MeasuredParts, measure_parts
from trioflow.tables import FLOAT, TEXT, column

REMAINDER = "remainder"
ATTRIBUTION = pa.schema([
    column("experiment", TEXT, "name of the experiment"),
    column("part", TEXT, "compute, communication, overlap, host: the model that was exchanged for measured values; remainder: what is left with all of them exchanged"),
    column("signed_time", FLOAT, "what the model adds to the predicted step beyond what was measured, negative where it is too fast; of an experiment they sum to predicted less measured", "s"),
    column("error", FLOAT, "the same over the measured median; of an experiment they sum to its signed error"),
    column("alone_s", FLOAT, "the step predicted with this model alone exchanged", "s", null=True),
    column("measured_by", TEXT, "where the measured values come from"),
    column("profile_factor", FLOAT, "measured median over the profiled step, by which all profiled times were multiplied", null=True),
])  # fmt: skip
"""Rows of ``results/report/attribution.parquet``."""

PROFILE = "profile of one real step"
_ONE_RANK = "the whole step: one rank exchanges nothing"
MACHINE = "this machine"
_LEFT = "predicted less measured, less all above"


def attribute_errors(
    cases: Mapping[str, LiveCase], measured_s: Mapping[str, float], timelines: pd.DataFrame
) -> pd.DataFrame:
    """Divide the error of every experiment among the models behind it: ``ATTRIBUTION``, in the order of ``cases``.

    A model's part is its Shapley value, the mean change of the prediction when measured values
    replace it, over every order: parts sum to the prediction less the one with all models replaced.
    """
    rows: list[dict[str, Any]] = []
    for name, case in cases.items():
        own = timelines[timelines["experiment"] == name].drop(columns="experiment")
        measured = measure_parts(own, measured_s[name], beside=case.hides)
        for row in _attribute(case, measured, measured_s[name]):
            rows.append({"experiment": name, **row})
    return pd.DataFrame(rows, columns=ATTRIBUTION.names)


def _attribute(
    case: LiveCase, measured: MeasuredParts | None, measured_s: float
) -> list[dict[str, Any]]:
    predicted_s = case.predict().step_time_s
    models = case.list_replaceable(measured)
    if measured is None or not models:
        one_rank = len(case.factors) == 1
        part, words = (COMPUTE, _ONE_RANK) if one_rank else (REMAINDER, _LEFT)
        return [_row(part, predicted_s - measured_s, measured_s, None, words, None)]
    known: dict[frozenset[str], float] = {}

    def predict(replaced: Collection[str]) -> float:
        key = frozenset(replaced)
        if key not in known:
            known[key] = case.predict_replaced(measured, key) if key else predicted_s
        return known[key]

    rows = [
        _row(model, part_s, measured_s, predict([model]), PROFILE, measured.factor)
        for model, part_s in share_change(models, predict).items()
    ]
    left_s = predict(models) - measured_s
    return [*rows, _row(REMAINDER, left_s, measured_s, None, _LEFT, measured.factor)]


def share_change(
    models: Sequence[str], predict: Callable[[Collection[str]], float]
) -> dict[str, float]:
    """Return each model's mean contribution to a prediction [s] less the one with all ``models`` replaced."""
    count = len(models)
    shares = dict.fromkeys(models, 0.0)
    for model in models:
        others = [other for other in models if other != model]
        for size in range(count):
            weight = 1.0 / (count * math.comb(count - 1, size))
            for before in combinations(others, size):
                shares[model] += weight * (predict(before) - predict([*before, model]))
    return shares


def _row(
    part: str, signed_s: float, measured_s: float, alone_s: float | None, words: str,
    factor: float | None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "part": part, "signed_time": signed_s, "error": signed_s / measured_s, "alone_s": alone_s,
        "measured_by": words, "profile_factor": factor,
    }  # fmt: skip


def explain_live(cases: Mapping[str, LiveCase]) -> pd.DataFrame:
    """Return parts and sensitivities of every experiment: ``causes.CAUSES``."""
    return explain_cases(list(cases.values()), [None] * len(cases))


def _find(places: Mapping[tuple[str, str], Path], file: str, folder: str) -> Path:
    """Return a file of a folder of that name."""
    if (file, folder) not in places:
        raise InputError(
            f"{folder} has no {file}", fix="give the files of the whole run as its input"
        )
    return places[(file, folder)]


def build_attribution(
    experiments: Sequence[Mapping[str, Any]],
    files: Iterable[str | Path],
    attribution: str | Path,
    causes: str | Path,
) -> pd.DataFrame:
    """Divide the errors of a run and write the parts (``ATTRIBUTION``) and the sensitivities (``causes.CAUSES``).

    ``files``: ``tasks.parquet`` of every experiment, ``trace.json`` of every trace,
    ``session.json``, ``measurements.parquet`` and ``rank_timelines.parquet`` of every workload (in
    folders of those names), ``this-machine.yaml`` and ``collectives.json``; others are ignored.
    Raises InputError, nothing written, when one of an experiment is missing.
    """
    paths = [Path(file) for file in files]
    places = {(path.name, path.parent.name): path for path in paths}
    machine = {(path.name, MACHINE): path for path in paths}
    traces: dict[str, list[Path]] = {}
    for path in paths:
        if path.name == "trace.json":
            traces.setdefault(str(read_json(path)["workload"]), []).append(path.parent)
    cases, measured_s, timelines = {}, {}, {}
    for row in experiments:
        name, workload = str(row["experiment"]), str(row["workload"])
        if workload not in traces:
            raise InputError(
                f"{workload} has no trace.json", fix="give the files of the whole run as its input"
            )

        cases[name] = LiveCase.load(
            _find(places, "tasks.parquet", name).parent, _find(machine, "this-machine.yaml", MACHINE),
            _find(machine, "collectives.json", MACHINE), _find(places, "session.json", workload), traces[workload],
        )  # fmt: skip
        steps = tables.read_table(_find(places, "measurements.parquet", workload), "measurements")
        measured_s[name] = float(np.median(measured_steps(steps, row, len(cases[name].factors))))
        timelines[workload] = tables.read_table(
            _find(places, "rank_timelines.parquet", workload), "rank_timelines"
        )
    for frame in timelines.values():
        frame.attrs = {}
    found = attribute_errors(cases, measured_s, pd.concat(timelines.values(), ignore_index=True))
    facts = stamp(paths)
    tables.write_table(found, "attribution", attribution, facts, ATTRIBUTION)
    tables.write_table(explain_live(cases), "causes", causes, facts, CAUSES)
    return found
