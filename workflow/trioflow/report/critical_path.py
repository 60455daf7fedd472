"""What a step waits for, summed up: by kind of work and rank, and by module."""

from __future__ import annotations

import numpy as np
import pandas as pd

from trioflow.engine.timeline import COMMUNICATION_KINDS
from trioflow.prediction.breakdown import DEPTH, cut_path
from trioflow.report.wording import join_words, write_percent
from trioflow.tables import records

LEAST_SHARE = 0.02
"""Parts below this share of the step are told together."""
_WORDS = {"compute": "compute", "memcpy": "copies", "host": "host time"}


def sum_up_path(path: pd.DataFrame) -> pd.DataFrame:
    """Sum up a critical path by kind of work and rank.

    Parameters
    ----------
    path : DataFrame
        Columns of ``tables.CRITICAL_PATH``.

    Returns
    -------
    DataFrame
        ``work`` (such as "backward compute" or "all_reduce"), ``rank`` (null
        for communication, which several ranks share), ``tasks``, ``time_s``
        [s], ``share`` of the step; the largest first.
    """
    communicates = path["kind"].isin(COMMUNICATION_KINDS)
    words = (path["phase"] + " " + path["kind"].map(_WORDS).fillna("")).str.strip()
    # A collective's first word tells which it is; a message goes by either of its ends.
    names = path["name"].str.split().str[0].where(path["kind"] == "collective", "messages")
    named = path.assign(
        work=words.where(~communicates, names),
        rank=path["rank"].astype("Int64").mask(communicates),
    )
    return _sum_up(named, ["work", "rank"])


def sum_up_modules(path: pd.DataFrame, depth: int = DEPTH) -> pd.DataFrame:
    """Sum up the operators of a critical path by module.

    Parameters
    ----------
    path : DataFrame
        Columns of ``tables.CRITICAL_PATH``.
    depth : int
        Parts of a module's path that rows are told apart by.

    Returns
    -------
    DataFrame
        ``module``, ``tasks``, ``time_s`` [s], ``share`` of the step; the
        largest first. What has no module is left out.
    """
    inside = path[path["module"] != ""]
    names = [cut_path(name, depth) for name in inside["module"]]
    return _sum_up(
        inside.assign(module=pd.Series(names, index=inside.index, dtype="str")), ["module"]
    )


def _sum_up(path: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    lasts_s = path["end_s"] - path["start_s"]
    groups = path.assign(time_s=lasts_s).groupby(keys, sort=True, dropna=False)
    found = groups.agg(tasks=("task_id", "size"), time_s=("time_s", "sum"), share=("share", "sum"))
    return found.reset_index().sort_values(
        "share", ascending=False, kind="stable", ignore_index=True
    )


def describe_path(path: pd.DataFrame) -> str:
    """Say in a sentence or two what a step waits for.

    Parameters
    ----------
    path : DataFrame
        Columns of ``tables.CRITICAL_PATH``, at least one row.
    """
    found = sum_up_path(path)
    told = found[found["share"] >= LEAST_SHARE]
    parts = []
    for row in records(told):
        of_rank = "" if row["rank"] is None else f" of rank {row['rank']}"
        parts.append(f"{write_percent(row['share'], 0)} {row['work']}{of_rank}")
    rest = 1.0 - float(told["share"].sum())
    if rest >= LEAST_SHARE / 2:
        parts.append(f"{write_percent(rest, 0)} other")
    ranks = path["rank"].to_numpy()
    crossings = int(np.count_nonzero(ranks[1:] != ranks[:-1]))
    sentence = f"What the step waits for, from its start to its end: {join_words(parts)}."
    if path["rank"].nunique() > 1:
        often = {1: "once", 2: "twice"}.get(crossings, f"{crossings} times")
        sentence += f" This critical path passes from one rank to another {often}."
    return sentence
