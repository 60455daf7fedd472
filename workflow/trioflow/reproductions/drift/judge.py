"""Judged: what half of a recorded job's steps say of the other half's, and what made its steps slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from math import factorial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.costmodel.spread import draw_normals, fit_spread
from trioflow.engine.program import Floats
from trioflow.reproductions.drift.jobs import COMPUTE, EXCHANGE, HOST, PASSES, Job

DRAWS = 2000
QUANTILES = (0.1, 0.5, 0.9)
DRAWN, JOINT = "drawn", "drawn, a step's parts together"
ONE_TIME, REPEATED = "one time an operation", "the steps seen"
WAYS = (JOINT, DRAWN, ONE_TIME, REPEATED)
"""Predictions: draws in which what a step shares comes with its host and exchanges, or by itself;
medians alone; and the quantiles of the steps that all are made from."""
STAGES, RANKS, MICRO_BATCHES = "stages", "ranks", "micro-batches and steps"
COMMUNICATION, HOSTS = "communication", "host"
PARTS = (STAGES, RANKS, MICRO_BATCHES, COMMUNICATION, HOSTS)
"""What may make a step slower than its ideal: each is one player of `attribute_slowdown`."""


def split_steps(count: int) -> dict[str, NDArray[np.bool_]]:
    """Return, by name, which steps a prediction may see; the others are predicted."""
    number = np.arange(count)
    return {
        "even steps": number % 2 == 0, "odd steps": number % 2 == 1,
        "first half": number < count // 2, "second half": number >= count // 2,
    }  # fmt: skip


def judge_halves(job: Job, draws: int = DRAWS) -> pd.DataFrame:
    """Return predictions of each half of a job's steps from the other: columns of ``tables.DRIFT_HALVES``."""
    rows = []
    for name, seen in split_steps(len(job.step_s)).items():
        medians_s = _find_medians(job, seen)
        by_way = {
            JOINT: draw_steps(job, seen, draws, together=True),
            DRAWN: draw_steps(job, seen, draws),
            ONE_TIME: job.play(medians_s[:, None]),
            REPEATED: job.step_s[seen],
        }
        measured = np.quantile(job.step_s[~seen], QUANTILES)
        for way, step_s in by_way.items():
            predicted = np.quantile(step_s, QUANTILES)
            rows.append({
                "job": job.name, "seen": name, "steps": int((~seen).sum()), "way": way,
                **{f"measured_{q * 100:.0f}_s": m for q, m in zip(QUANTILES, measured, strict=True)},
                **{f"predicted_{q * 100:.0f}_s": p for q, p in zip(QUANTILES, predicted, strict=True)},
                "distance": _measure_distance(step_s, job.step_s[~seen]),
            })  # fmt: skip
    return pd.DataFrame(rows)


def draw_steps(job: Job, seen: NDArray[np.bool_], draws: int, together: bool = False) -> Floats:
    """Return steps drawn from the medians and the spread of those that were seen [draws] [s].

    Passes take their rank's median times what is drawn. All else is taken whole from one of the
    steps, as its parts depend on one another; so is what passes share in a step, where ``together``
    says so.
    """
    steps = np.flatnonzero(seen)
    spread, _ = fit_spread(job.list_passes(steps), job.list_exchanges(steps), lasting=False)
    items = job.items
    chosen, passes = np.random.default_rng(0).choice(steps, draws), _find_passes(items)
    drawn_s, medians_s = job.item_s[:, chosen], _find_medians(job, seen)[passes, None]
    own = items[passes].reset_index(drop=True)
    parts = (
        (0.0 if together else spread.step_log, np.zeros(len(own), dtype=np.int64)),
        (spread.rank_log, own.groupby("rank").ngroup()),
        (spread.micro_batch_log, own.groupby(["replica", "micro_batch"]).ngroup()),
        (spread.pass_log, np.arange(len(own))),
    )
    logs = np.zeros((len(own), draws))
    for number, (deviation, group) in enumerate(parts):
        own_group = np.asarray(group)
        normals = draw_normals(0, number, 0, (int(own_group.max()) + 1, draws))
        logs += deviation * normals[own_group]
    if together:
        logs += np.log(job.item_s[passes][:, chosen] / medians_s).mean(axis=0)
    drawn_s[passes] = medians_s * np.exp(logs)
    return job.play(drawn_s)


def _find_passes(items: pd.DataFrame) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (
        (items["kind"] == COMPUTE) & items["optype"].isin(PASSES)
    ).to_numpy()
    return found


def _find_medians(job: Job, seen: NDArray[np.bool_]) -> Floats:
    """Return the median of each item over the steps seen; of passes that of all passes of the rank [items] [s]."""
    medians_s: Floats = np.median(job.item_s[:, seen], axis=1)
    items, passes = job.items, _find_passes(job.items)
    for _, rows in items[passes].groupby(["rank", "phase"]).groups.items():
        medians_s[rows] = np.median(job.item_s[np.asarray(rows)][:, seen])
    return medians_s


def _measure_distance(one: Floats, other: Floats) -> float:
    """Return the greatest difference of two samples' cumulative shares (Kolmogorov and Smirnov)."""
    at = np.concatenate([one, other])
    shares = (np.searchsorted(np.sort(each), at, side="right") / len(each) for each in (one, other))
    return float(np.abs(np.subtract(*shares)).max())


def attribute_slowdown(job: Job) -> pd.DataFrame:
    """Return what each part costs over the ideal step: columns of ``tables.DRIFT_CAUSES``.

    In the ideal step each pass takes the mean of its phase over all stages, ranks, micro-batches and
    steps, where a rank counts by the others of its stage; each exchange the median of its kind; the
    host's time before each kind of operation its median. A part's share is its Shapley value: the
    mean, over all orders of putting parts right, of what it takes off the median step.
    """
    factors = _list_factors(job)
    known: dict[frozenset[str], float] = {}

    def play(right: frozenset[str]) -> float:
        if right not in known:
            item_s = job.item_s.copy()
            for name in sorted(right):
                item_s = factors[name](item_s)
            known[right] = float(np.median(job.play(item_s)))
        return known[right]

    actual_s, ideal_s = play(frozenset()), play(frozenset(PARTS))
    slowdown_s = actual_s - ideal_s
    rows = [
        {"job": job.name, "part": name, "actual_s": actual_s, "ideal_s": ideal_s,
         "share": _share(name, play) / slowdown_s,
         "alone": (actual_s - play(frozenset([name]))) / slowdown_s}
        for name in PARTS
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _share(name: str, play: Callable[[frozenset[str]], float]) -> float:
    """Return the Shapley value of putting a part right [s]."""
    others = [one for one in PARTS if one != name]
    total = 0.0
    for size in range(len(PARTS)):
        weight = factorial(size) * factorial(len(PARTS) - size - 1) / factorial(len(PARTS))
        for chosen in combinations(others, size):
            right = frozenset(chosen)
            total += weight * (play(right) - play(right | {name}))
    return total


def _list_factors(job: Job) -> Mapping[str, Callable[[Floats], Floats]]:
    """Return what puts each part right: changes of items' times [items, steps]; they commute."""
    items, passes = job.items, _find_passes(job.items)
    own = items[passes]
    whole_s = pd.Series(np.median(job.item_s[passes], axis=1), index=own.index)
    rank_s = whole_s.groupby([own["rank"], own["phase"]]).transform("median")
    stage_s = rank_s.groupby([own["stage"], own["phase"]]).transform("median")
    mean_s = stage_s.groupby(own["phase"]).transform("mean")

    def scale(factor: Any) -> Callable[[Floats], Floats]:
        def change(item_s: Floats) -> Floats:
            changed = item_s.copy()
            changed[passes] = item_s[passes] * factor
            return changed

        return change

    def settle(kind: str) -> Callable[[Floats], Floats]:
        chosen = items.index[items["kind"] == kind]
        typical_s = {
            name: float(np.median(job.item_s[np.asarray(rows)]))
            for name, rows in items.loc[chosen].groupby("optype").groups.items()
        }

        def change(item_s: Floats) -> Floats:
            changed = item_s.copy()
            for name, rows in items.loc[chosen].groupby("optype").groups.items():
                changed[np.asarray(rows)] = typical_s[name]
            return changed

        return change

    return {
        STAGES: scale((mean_s / stage_s).to_numpy()[:, None]),
        RANKS: scale((stage_s / rank_s).to_numpy()[:, None]),
        MICRO_BATCHES: scale(rank_s.to_numpy()[:, None] / job.item_s[passes]),
        COMMUNICATION: settle(EXCHANGE),
        HOSTS: settle(HOST),
    }
