"""What was aimed at on nanotron's runs beside what was reached, and by ways that simulate nothing; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import KFold

from trioflow.costmodel.intervals import COVERAGE
from trioflow.report.pages import NOTHING, write_percent
from trioflow.reproductions.chances import measure_miss
from trioflow.reproductions.clusters.scores import (
    FAILED,
    FAST,
    FITTED,
    GPUS_OF_A_NODE,
    SEQUENCE,
    TOO_FEW,
    TOO_MUCH,
    exceeds_room,
    find_slow,
    score_chances,
    score_group,
    score_memory,
)

OURS, EXPECTED = "trioflow", "trioflow, expected"
"""The simulated step, and the one that is expected where other models' runs over nodes took more."""
CONSTANT, TREES, RULE = "constant MFU", "boosted trees", "rule"
ONE_FOR_ALL = "one interval for all"
FOLDS = 10
"""Of the rows that the trees are fitted on, all but one."""
_TOLD = (
    "parameters", "nodes", "data", "tensor", "pipeline", "zero", "micro_batch", "accumulate",
)  # fmt: skip


def predict_steps(cases: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Return every run's step by each way [s].

    The constant MFU is the median of the runs that may be fitted on. The trees (scikit-learn's
    defaults, on the step's logarithm) see nine tenths of all runs, those alike too, which trioflow
    never does.
    """
    at_peak_s = (cases["measured_s"] * cases["mfu"]).to_numpy(np.float64)
    fitted = cases.loc[cases["set"] == FITTED, "mfu"]
    found = {OURS: cases["predicted_s"].to_numpy(np.float64)}
    found[EXPECTED] = cases["expected_s"].to_numpy(np.float64)
    if len(fitted):
        found[CONSTANT] = at_peak_s / float(fitted.median())
    if len(cases) >= FOLDS:
        features, logs = (
            np.log2(cases[list(_TOLD)].to_numpy(np.float64) + 1),
            np.log(cases["measured_s"]),
        )
        trees_s = np.empty(len(cases))
        for known, asked in KFold(FOLDS, shuffle=True, random_state=0).split(features):
            model = HistGradientBoostingRegressor(random_state=0)
            model.fit(features[known], logs.to_numpy()[known])
            trees_s[asked] = np.exp(model.predict(features[asked]))
        found[TREES] = trees_s
    return found


def score_ways(cases: pd.DataFrame, steps: Mapping[str, NDArray[np.float64]]) -> pd.DataFrame:
    """Return `scores.score_group` of each way, ``mean_error``, and ``fast_error``, the median above ``scores.FAST``."""
    rows = []
    for way, predicted_s in steps.items():
        judged = cases.assign(predicted_s=predicted_s)
        error = (judged["predicted_s"] / judged["measured_s"] - 1).abs()
        fast = error[judged["mfu"] > FAST].fillna(np.inf).median()
        rows.append(
            {"way": way, **score_group(way, judged), "mean_error": error.mean(), "fast_error": fast}
        )
    return pd.DataFrame(rows)


def choose_plans(cases: pd.DataFrame, steps: Mapping[str, NDArray[np.float64]]) -> pd.DataFrame:
    """Return throughput lost by the plan that each way expects to be fastest, by model and nodes, beside the best measured.

    The rule takes the smallest tensor, then pipeline degree, then the largest micro-batch; a
    constant MFU expects equal steps, so it loses the mean of the cell.
    """
    rows = []
    for (parameters, nodes), cell in cases.assign(**steps).groupby(["parameters", "nodes"]):
        best = cell.iloc[int(cell["measured_s"].argmin())]
        row: dict[str, Any] = {"parameters": parameters, "nodes": nodes, "runs": len(cell)}
        row |= _describe_plan("best", best)
        for way in (way for way in (OURS, EXPECTED, TREES) if way in steps):
            known = cell.dropna(subset=way)
            if way == EXPECTED and "crowded" in known and not known["crowded"].all():
                known = known[~known["crowded"]]
            chosen = known.iloc[int(known[way].argmin())] if len(known) else None
            row[way] = 1.0 if chosen is None else 1 - best["measured_s"] / chosen["measured_s"]
            if way == EXPECTED:
                row |= _describe_plan("chosen", chosen)
        order = ["tensor", "pipeline", "micro_batch"]
        first_s = cell.sort_values(order, ascending=[True, True, False])["measured_s"].iloc[0]
        row[RULE] = 1 - best["measured_s"] / first_s
        row[CONSTANT] = float((1 - best["measured_s"] / cell["measured_s"]).mean())
        rows.append(row)
    return pd.DataFrame(rows)


def score_intervals(cases: pd.DataFrame) -> pd.DataFrame:
    """Return ``covered``, ``width`` (high over low, median) and ``score`` of 80 % intervals by groups of runs, ours and naive.

    The score is the mean interval score of logarithms (less is better). Naive: the simulated step
    times the quantiles of measured over simulated of all other models' runs. A refused run lies
    outside.
    """
    measured, simulated, *ours = (
        np.log(cases[name].to_numpy(np.float64)) for name in ("measured_s", "predicted_s", "low_s", "high_s")
    )  # fmt: skip
    naive = np.full((2, len(cases)), np.nan)
    for model in cases["parameters"].unique():
        mine = (cases["parameters"] == model).to_numpy()
        others = ~mine if (~mine).any() else mine
        ends = np.nanquantile((measured - simulated)[others], COVERAGE)
        naive[:, mine] = simulated[mine] + ends[:, None]
    ways = {"ours": np.array(ours), "naive": naive}
    rows = []
    for group, chosen in _group_by_nodes(cases).items():
        row: dict[str, Any] = {"group": group, "runs": int(chosen.sum())}
        for way, ends in ways.items():
            (low, high), truth = ends[:, chosen], measured[chosen]
            outside = np.maximum(low - truth, 0) + np.maximum(truth - high, 0)
            row[f"{way}_covered"] = float((outside == 0).mean())
            row[f"{way}_width"] = float(np.exp(np.nanmedian(high - low)))
            row[f"{way}_score"] = float(np.nanmean(high - low + 2 / _LEFT * outside))
        rows.append(row)
    return pd.DataFrame(rows)


def _group_by_nodes(cases: pd.DataFrame) -> dict[str, NDArray[np.bool_]]:
    """Return which runs are of each group; all first, none of them empty."""
    several, beyond = cases["nodes"] > 1, cases["tensor"] > GPUS_OF_A_NODE
    chained = several & (cases["pipeline"] > 1) & ~beyond
    groups = {
        "all runs": cases["nodes"] > 0, f"MFU above {FAST:.0%}".replace("%", " %"): cases["mfu"] > FAST,
        "one node": ~several, "replicas over nodes": several & ~chained & ~beyond,
        "pipelines over nodes": chained, "tensor groups beyond a node": beyond,
    }  # fmt: skip
    return {name: chosen.to_numpy() for name, chosen in groups.items() if chosen.any()}


_LEFT = 1 - (COVERAGE[1] - COVERAGE[0])
"""Share that an interval is to leave outside."""


def _describe_plan(which: str, run: pd.Series | None) -> dict[str, Any]:
    if run is None:
        return {which: "all refused", f"{which}_tokens_per_s": 0.0}
    text = " x ".join(f"{int(run[name])}" for name in ("tensor", "pipeline", "data"))
    text += f", micro-batch {int(run['micro_batch'])}, ZeRO {int(run['zero'])}"
    tokens = SEQUENCE * run["micro_batch"] * run["accumulate"] * run["data"]
    return {which: text, f"{which}_tokens_per_s": float(tokens / run["measured_s"])}


FEW_NODES = 16


@dataclass(frozen=True)
class Line:
    """One thing that was judged: ``value`` reached, of 1 (a number of cases where ``counted``, or a ``factor``).

    ``aim`` is the most, or with ``more`` the least; ``headline`` is what README calls it, empty for
    what stands in docs alone.
    """

    what: str
    cases: int
    value: float
    aim: float | None = None
    more: bool = False
    counted: bool = False
    factor: bool = False
    others: Mapping[str, float] | None = None
    headline: str = ""

    @property
    def reached(self) -> bool:
        """Whether there is an aim and it is reached."""
        if self.aim is None:
            return False
        return self.value >= self.aim if self.more else self.value <= self.aim

    def write_value(self) -> str:
        """Return what was reached in words."""
        return self._write(self.value)

    def _write(self, value: float) -> str:
        if self.factor:
            return f"{value:.1f}"
        return f"{value:.0f}" if self.counted else write_percent(value)

    def write_aim(self) -> str:
        """Return the aim in words."""
        if self.aim is None:
            return NOTHING
        if self.counted:
            return f"{self.aim:.0f}"
        return f"{'at least ' if self.more else ''}{write_percent(self.aim, 0)}"

    def write_others(self) -> str:
        """Return what other ways reach in words."""
        texts = [f"{self._write(value)} ({name})" for name, value in (self.others or {}).items()]
        return ", ".join(texts) or NOTHING


def judge_aims(memory: pd.DataFrame | None, steps: pd.DataFrame) -> list[Line]:
    """Return what was judged: steps (marked by ``scores.mark_crowded``), the choice of a plan, and memory where it was."""
    return [*_judge_steps(steps), *([] if memory is None else _judge_memory(memory))]


def describe_causes(steps: pd.DataFrame) -> str:
    """Return in words what the runs that missed have in common."""
    beyond, chains = steps["tensor"] > GPUS_OF_A_NODE, find_slow(steps)
    slow = chains[chains["slow"]]
    rest = steps[~beyond & ~steps.index.isin(slow.index)]
    parts = [steps[beyond], slow, rest]
    errors = [write_percent(score_group("", rows)["median_error"]) for rows in parts if len(rows)]
    if len(errors) < len(parts):
        return ""
    few, missed = rest[rest["nodes"] <= FEW_NODES], pd.concat(parts[:2])
    fast = write_percent((missed["predicted_s"] < missed["measured_s"]).mean(), 0)
    expected = steps.assign(predicted_s=steps["expected_s"])
    sure = [write_percent(score_group("", expected.loc[rows.index])["median_error"]) for rows in parts[:2]]  # fmt: skip
    text = (
        f"What missed, of simulated steps: {len(parts[0])} runs whose tensor groups reach beyond a node (median error {errors[0]}), and {len(slow)} pipelines "
        f"across nodes that took {float(slow['excess_s'].median()):.1f} s more for each micro-batch than predicted ({errors[1]}), which neither bytes nor degrees "
        f"explain; {fast} of both are predicted too fast; expected steps miss them by {sure[0]} and {sure[1]}. The other {len(rest)}: {errors[2]}"
    )  # fmt: skip
    if few.empty:
        return f"{text}."
    error = write_percent(score_group("", few)["median_error"])
    return f"{text}, of which {len(few)} on up to {FEW_NODES} nodes: {error}."


def _judge_steps(cases: pd.DataFrame) -> list[Line]:
    ways = predict_steps(cases)
    judged = {way: cases.assign(predicted_s=step_s) for way, step_s in ways.items()}

    def line(what: str, key: str, aim: float | None = None, more: bool = False, least: float = 0.0,
             nodes: int | None = None, headline: str = "", way: str = OURS) -> Line:  # fmt: skip
        chosen = (cases["mfu"] > least) & ((cases["nodes"] <= nodes) if nodes else True)
        found = {way: score_group(way, rows[chosen])[key] for way, rows in judged.items()}
        ours = found.pop(way)
        others = {_NAMES[way].get(name, name): value for name, value in found.items()}
        return Line(what, int(chosen.sum()), ours, aim, more, others=others, headline=headline)

    cells = choose_plans(cases, ways)
    losses = {
        way: float(cells[way].mean()) for way in (OURS, TREES, RULE, CONSTANT) if way in cells
    }
    losses = {_NAMES[EXPECTED].get(way, way): loss for way, loss in losses.items()}
    return [
        line("step, median error: 1 and 2 nodes", "median_error", 0.10, nodes=2,
             headline="median error of steps on 1 and 2 nodes"),
        line(f"step, median error: MFU above {write_percent(FAST, 0)}", "median_error", 0.15, least=FAST,
             headline=f"with an MFU above {write_percent(FAST, 0)}"),
        line("step, median error: all", "median_error", headline="of all"),
        *(line(f"steps within {most} %", f"within_{most}") for most in (10, 20, 50)),
        line("pairs of a model's runs on as many nodes in the measured order", "in_order", 0.85, more=True,
             way=EXPECTED),
        *_judge_intervals(cases),
        *_judge_chances(cases),
        Line("throughput lost by the plan expected to be fastest, mean of cells", len(cells),
             float(cells[EXPECTED].mean()), 0.05, others=losses, headline="throughput lost by the plan chosen"),
    ]  # fmt: skip


_NAMES = {OURS: {EXPECTED: "expected step"}, EXPECTED: {OURS: "simulated step"}}
"""What a line calls trioflow's other step."""


def _judge_intervals(cases: pd.DataFrame) -> list[Line]:
    scores = score_intervals(cases).to_dict("records")
    lines = []
    for row in scores[:2]:
        what, runs = ("" if row["group"] == "all runs" else f", {row['group']}"), int(row["runs"])
        covered, wide = ({ONE_FOR_ALL: row[name]} for name in ("naive_covered", "naive_width"))
        lines += [
            Line(f"measured step inside the 80 % interval{what}", runs, row["ours_covered"], 0.8, more=True, others=covered),
            Line(f"median width of the interval, high over low end{what}", runs, row["ours_width"], factor=True, others=wide),
        ]  # fmt: skip
    return lines


def _judge_chances(cases: pd.DataFrame) -> list[Line]:
    """Return how far stated probabilities are from shares of pairs, over all pairs and of the sure ones."""
    groups = score_chances(cases)
    lines = []
    for what, rows in (("", groups), (", pairs above 90 %", groups[groups["low"] >= 0.9])):
        if len(rows):
            off, alone = (measure_miss(rows, name) for name in ("stated", "alone"))
            lines.append(
                Line(f"probability that a plan is the faster one, stated beside the share of pairs where it was{what}",
                     int(rows["pairs"].sum()), off, 0.05, others={"without runs over nodes": alone})
            )  # fmt: skip
    return lines


def _judge_memory(cases: pd.DataFrame) -> list[Line]:
    scores = score_memory(cases).iloc[0]
    ran, failed = cases[cases["set"] != FAILED], cases[cases["set"] == FAILED]
    false = int(exceeds_room(ran, "fullest_reserved_bytes").sum())
    shares = failed["reason"].value_counts(normalize=True)
    return [
        Line("peak memory, median error", len(ran), scores["median_error"], 0.05,
             headline="median error of peak memory"),
        Line("peak memory, 90th percentile of the error", len(ran), scores["error_90"], 0.10),
        Line("runs that ran, called out of memory", len(ran), int(scores["refused"]), 0, counted=True),
        Line("runs that ran whose predicted allocator holds more than the card has", len(ran), false,
             counted=True),
        Line("failed runs that memory explains", len(failed), float(shares.get(TOO_MUCH, 0.0))),
        Line("failed runs with too few micro-batches for nanotron", len(failed),
             float(shares.get(TOO_FEW, 0.0))),
    ]  # fmt: skip
