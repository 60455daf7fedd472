"""A step in many draws of its spread: its distribution, who waits for whom, and which rank is late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError
from trioflow.base.plan_row import Plan
from trioflow.costmodel.spread import Spread, choose_spread, draw_normals
from trioflow.engine.draws import Drawn, DrawnGraph, check_size
from trioflow.engine.program import Floats, Ints
from trioflow.engine.result import Result
from trioflow.parallel.folded import FoldedTaskGraph
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.language_answer import name_group

_QUANTILES = (("low_s", 0.1), ("median_s", 0.5), ("high_s", 0.9))
_STEP, _RANK, _MICRO_BATCH, _PASS, _EXCHANGE, _OPERATOR = range(6)


@dataclass(frozen=True, eq=False)
class Draws:
    """A step in all its draws.

    ``step_s``: of consecutive steps of a run, with one seed comparable draw by draw between plans [draws] [s].
    ``source``: where the spread comes from, in words. ``waits``: of each degree whose ranks meet: exchanges of a step,
    what a member waits for the others at one (wait_s: mean over draws and members), and without any spread
    (steady_wait_s). ``late``: of each rank the share of its exchanges in which others waited for it.
    """

    step_s: Floats
    seed: int
    spread: Spread
    source: str
    waits: list[dict[str, Any]]
    late: list[dict[str, Any]]

    @property
    def expected_s(self) -> float:
        """Mean over the draws [s]."""
        return float(self.step_s.mean())

    def beats(self, other: Draws) -> float:
        """Return the share of draws in which this step is faster, ties by halves; InputError when drawn otherwise."""
        if (self.seed, len(self.step_s)) != (other.seed, len(other.step_s)):
            raise InputError("two steps were drawn apart", fix="draw both with one seed, as often")
        difference_s = self.step_s - other.step_s
        return float((difference_s < 0).mean() + (difference_s == 0).mean() / 2)

    def to_dict(self) -> dict[str, Any]:
        """Return the draws as ``trioflow simulate --draws --json`` prints them."""
        found = {name: float(np.quantile(self.step_s, q)) for name, q in _QUANTILES}
        return {
            "count": len(self.step_s),
            "seed": self.seed,
            "expected_s": self.expected_s,
            **found,
            "spread": asdict(self.spread),
            "source": self.source,
            "waits": self.waits,
            "late": self.late,
        }


def draw_step(
    result: Result, graph: TaskGraph, device_kind: str, draws: int, seed: int, spread: Spread | None = None
) -> Draws:
    """Draw a simulated step, all its ranks one by one whether they were folded or not.

    ``device_kind``, cpu or gpu: whose spread it is, where none is given. Raises InputError when there are too many
    tasks.
    """
    source = "spread as given"
    if spread is None:
        spread, source = choose_spread(device_kind)
    fold = graph.fold if isinstance(graph, FoldedTaskGraph) else None
    check_size(len(graph.tasks) if fold is None else fold.task_total)
    plan, timeline = graph.metadata.plan, result.timeline
    drawn_graph = DrawnGraph(graph, timeline)
    groups, factors = _draw_factors(drawn_graph, timeline, plan, draws, seed, spread)
    own = _draw_operators(drawn_graph, timeline, seed, spread.operator_log)
    drawn = drawn_graph.run(groups, factors, own)
    steady = drawn_graph.run(np.zeros_like(groups), np.ones((1, 1)))
    degrees = _name_degrees(graph.tasks, timeline, plan)
    return Draws(
        drawn.step_s,
        seed,
        spread,
        source,
        _sum_waits((drawn, steady), drawn_graph, degrees),
        _sum_late(drawn, degrees, timeline, draws),
    )


def _draw_factors(
    graph: DrawnGraph, timeline: pd.DataFrame, plan: Plan, draws: int, seed: int, spread: Spread
) -> tuple[Ints, Floats]:
    """Return which row of factors each item takes, and the factors: passes, then exchanges."""
    ranks = timeline["rank"].to_numpy(dtype=np.int64)
    micro_batch = timeline["micro_batch"].to_numpy(dtype=np.int64, na_value=0)
    keys = pd.DataFrame(
        {
            "rank": ranks,
            "micro_batch": micro_batch,
            "stage": timeline["stage"].to_numpy(dtype=np.int64, na_value=0),
            "phase": pd.factorize(timeline["phase"], sort=True)[0],
        }
    )
    own = keys.groupby(list(keys)).ngroup().to_numpy(dtype=np.int64)
    passes = keys.assign(own=own).drop_duplicates("own").sort_values("own")
    replica = passes["rank"].to_numpy() // plan.tensor // plan.context % plan.data
    steps = draw_normals(seed, _STEP, 0, (draws,), spread.step_autocorrelation)
    logs = np.tile(spread.step_log * steps, (len(passes), 1))
    rank_logs = spread.rank_log * draw_normals(
        seed, _RANK, 0, (int(ranks.max(initial=0)) + 1, draws), spread.rank_autocorrelation
    )
    logs += rank_logs[passes["rank"].to_numpy()]
    pieces = int(micro_batch.max(initial=0)) + 1
    for one in np.unique(replica).tolist():
        drawn = spread.micro_batch_log * draw_normals(seed, _MICRO_BATCH, one, (pieces, draws))
        logs[replica == one] += drawn[passes["micro_batch"].to_numpy()[replica == one]]
    own_rank = passes["rank"].to_numpy()
    for one in np.unique(own_rank).tolist():
        rows = np.flatnonzero(own_rank == one)
        logs[rows] += spread.pass_log * draw_normals(seed, _PASS, one, (len(rows), draws))
    shared = timeline["match_id"].notna().to_numpy()
    exchanges = np.unique(graph.item_of[shared])
    exchange_logs = spread.exchange_log * draw_normals(seed, _EXCHANGE, 0, (len(exchanges), draws))
    groups = np.zeros(len(graph.lengths_s), dtype=np.int64)
    groups[graph.item_of[~shared]] = own[~shared]
    groups[exchanges] = len(passes) + np.arange(len(exchanges))
    return groups, np.exp(np.concatenate([logs, exchange_logs]))


def _draw_operators(
    graph: DrawnGraph, timeline: pd.DataFrame, seed: int, deviation: float
) -> Callable[[int], Floats] | None:
    """Return each draw's factors on single operators [items], none where they do not differ.

    Their mean is 1: what a pass takes together was recorded of a whole step.
    """
    if not deviation:
        return None
    single = np.zeros(len(graph.lengths_s), dtype=bool)
    single[graph.item_of[timeline["match_id"].isna().to_numpy()]] = True

    def draw(number: int) -> Floats:
        logs = deviation * draw_normals(seed, _OPERATOR, number, (len(single),))
        return np.where(single, np.exp(logs - deviation**2 / 2), 1.0)

    return draw


def _name_degrees(tasks: pd.DataFrame, timeline: pd.DataFrame, plan: Plan) -> Any:
    """Return the degree whose ranks each task meets; empty of tasks by themselves [tasks]."""
    known = {text: name_group(str(text), plan) for text in tasks["group"].dropna().unique()}
    names = tasks["group"].map(known).astype(object).fillna("pipeline").to_numpy(dtype=str)
    return np.where(timeline["match_id"].notna().to_numpy(), names, "")


def _sum_waits(runs: Sequence[Drawn], graph: DrawnGraph, degrees: Any) -> list[dict[str, Any]]:
    found = []
    for degree in sorted(set(degrees) - {""}):
        members = degrees == degree
        drawn_s, steady_s = (float(one.wait_s[members].mean()) for one in runs)
        found.append(
            {
                "group": str(degree),
                "exchanges": len(np.unique(graph.item_of[members])),
                "wait_s": drawn_s,
                "steady_wait_s": steady_s,
            }
        )
    return found


def _sum_late(drawn: Drawn, degrees: Any, timeline: pd.DataFrame, draws: int) -> list[dict[str, Any]]:
    member = degrees != ""
    rank = timeline["rank"].to_numpy(dtype=np.int64)[member]
    late, count = np.bincount(rank, drawn.late[member]), np.bincount(rank)
    return [{"rank": one, "share": float(late[one] / (count[one] * draws))} for one in np.flatnonzero(count).tolist()]
