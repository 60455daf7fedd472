"""Where an aim is missed: which measurements make up the error. Sums only, no guesses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from trioflow.costmodel.collectives import wire_factor
from trioflow.reproductions.validation.aims import SETS, Aim
from trioflow.reproductions.validation.collectives import QUANTITY, SET, parse_case

FEWEST_RANKS = 3
"""Numbers of ranks that show whether a bus bandwidth follows them."""

_SHARE = 0.01
"""Classes of operators that move a case by less than this are not shown."""


def select_cases(cases: pd.DataFrame, aim: Aim) -> pd.DataFrame:
    """Return the cases of an aim as our model predicted them, with signed errors.

    Columns of ``tables.VALIDATION``; ``error`` (predicted over measured less one), ``oracle_error``
    (the same of the oracle), ``beside_oracle`` (predicted over oracle less one), ``part`` (device
    and, where a source names one, dataset).
    """
    rows = cases[
        (cases["set"] == aim.set)
        & (cases["model"] == SETS[aim.set].ours)
        & (cases["quantity"] == aim.quantity)
        & cases["group"].isin(aim.groups)
    ].reset_index(drop=True)
    dataset = rows["source"].str.partition("; ")[2]
    return rows.assign(
        error=rows["predicted_s"] / rows["measured_s"] - 1.0,
        oracle_error=rows["oracle_s"] / rows["measured_s"] - 1.0,
        beside_oracle=rows["predicted_s"] / rows["oracle_s"] - 1.0,
        part=rows["device"] + ("; " + dataset).where(dataset != "", ""),
    )


def split_error(rows: pd.DataFrame) -> pd.DataFrame:
    """Split a mean absolute error by where the measurements come from.

    ``rows``: from :func:`select_cases`.

    One row a part, the largest contribution first: ``part``, ``cases``, ``error`` (mean absolute),
    ``bias``, ``points`` (what it adds to the mean over all parts), ``without`` (mean over the other
    parts), ``oracle_cases``, ``oracle_error`` and ``beside_oracle`` (mean absolute).
    """
    total, found = float(rows["error"].abs().sum()), []
    for part, group in rows.groupby("part", sort=True):
        mine, rest = float(group["error"].abs().sum()), len(rows) - len(group)
        found.append(
            {
                "part": str(part), "cases": len(group), "error": mine / len(group),
                "bias": float(group["error"].mean()), "points": mine / len(rows),
                "without": (total - mine) / rest if rest else np.nan,
                "oracle_cases": int(group["oracle_error"].count()),
                "oracle_error": float(group["oracle_error"].abs().mean()),
                "beside_oracle": float(group["beside_oracle"].abs().mean()),
            }
        )  # fmt: skip
    frame = pd.DataFrame(found).sort_values(["points", "part"], ascending=(False, True))
    return frame.reset_index(drop=True)


def split_case(cases: pd.DataFrame, row: dict[Any, Any]) -> pd.DataFrame:
    """Split the error of one sum of operators by class.

    ``cases``: all cases; those of quantity ``operator`` named after the sum's case. ``row``: a row
    of :func:`select_cases`.

    ``group`` (class and phase), ``measured_s``, ``predicted_s``, ``points`` (their difference over
    the measured sum of all), ``measured_growth`` and ``predicted_growth`` (the class at the target
    over the class as recorded at the source; missing where the pair was not judged the other way
    round); empty where the case has no operators.
    """
    mine = _operators_of(cases, row, str(row["case"]))
    if mine.empty:
        return pd.DataFrame()
    sums = mine.groupby("group", sort=True)[["measured_s", "predicted_s"]].sum()
    sums["points"] = (sums["predicted_s"] - sums["measured_s"]) / float(mine["measured_s"].sum())
    back = _operators_of(cases, row, _turn(str(row["case"])))
    recorded = back.groupby("group", sort=True)["measured_s"].sum().reindex(sums.index)
    sums["measured_growth"] = sums["measured_s"] / recorded
    sums["predicted_growth"] = sums["predicted_s"] / recorded
    order = sums["points"].abs().sort_values(ascending=False, kind="stable").index
    ordered = sums.loc[order].reset_index()
    return ordered[ordered["points"].abs() >= _SHARE].reset_index(drop=True)


def _operators_of(cases: pd.DataFrame, row: dict[Any, Any], case: str) -> pd.DataFrame:
    """Return the single operators of a case, as the row's model predicted them."""
    found: pd.DataFrame = cases[
        (cases["set"] == row["set"])
        & (cases["model"] == row["model"])
        & (cases["device"] == row["device"])
        & (cases["quantity"] == "operator")
        & cases["case"].str.startswith(f"{case}: ")
    ]
    return found


def _turn(case: str) -> str:
    """Return the name of a pair the other way round: ``x 8 -> 2`` for ``x 2 -> 8``."""
    start, _, target = case.partition(" -> ")
    name, _, source = start.rpartition(" ")
    return f"{name} {target} -> {source}"


def measure_bus_bandwidths(cases: pd.DataFrame) -> pd.DataFrame:
    """Return what each number of ranks made of the largest message that all of them sent.

    ``cases``: all cases; those of the set ``collectives`` within one node are read.

    ``part`` (as :func:`select_cases`), ``collective``, ``message_bytes``, and for every number of
    ranks measured anywhere a column with its bus bandwidth [bytes/s]; missing where not measured.

    Notes
    -----
    A model that goes by the number of ranks supposes that the machine's bus
    bandwidth follows it smoothly; this is what it was instead.
    """
    aim = Aim(SET, QUANTITY, "", tuple(sorted(set(cases.loc[cases["set"] == SET, "group"]))))
    rows = select_cases(cases, aim)
    messages = [parse_case(str(case)) for case in rows["case"]]
    told = pd.DataFrame(messages, columns=["collective", "ranks", "nodes", "message_bytes"])
    rows = pd.concat([rows[["part", "measured_s"]], told], axis=1)
    rows = rows[(rows["nodes"] == 1) & (rows["collective"] != "send")]
    keys = ["part", "collective", "message_bytes"]
    times = rows.groupby([*keys, "ranks"], sort=True)["measured_s"].median().unstack()
    found = []
    for (part, collective), group in times.groupby(level=["part", "collective"], sort=True):
        common = group.dropna(axis="columns", how="all").dropna()
        if common.shape[1] < FEWEST_RANKS or common.empty:
            continue
        size = float(common.index.get_level_values("message_bytes").max())
        last = common.xs(size, level="message_bytes").iloc[0]
        entry: dict[Any, Any] = {"part": part, "collective": collective, "message_bytes": size}
        for ranks, time_s in zip(last.index.tolist(), last.tolist(), strict=True):
            entry[int(ranks)] = wire_factor(str(collective), int(ranks)) * size / time_s
        found.append(entry)
    names = [*keys, *(int(ranks) for ranks in times.columns.tolist())]
    return pd.DataFrame(found, columns=names).dropna(axis="columns", how="all")
