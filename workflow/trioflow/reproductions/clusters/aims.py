"""What was aimed at on nanotron's runs beside what was reached: the same lines for page and README; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from trioflow.report.wording import NOTHING, write_percent
from trioflow.reproductions.clusters.baselines import (
    CONSTANT,
    EXPECTED,
    ONE_FOR_ALL,
    OURS,
    RULE,
    TREES,
    choose_plans,
    predict_steps,
    score_intervals,
)
from trioflow.reproductions.clusters.scores import (
    FAILED,
    FAST,
    GPUS_OF_A_NODE,
    ROOM_BYTES,
    TOO_FEW,
    TOO_MUCH,
    find_slow,
    score_group,
    score_memory,
)

FEW_NODES = 16


@dataclass(frozen=True)
class Line:
    """One thing that was judged.

    ``what``: in words.
    ``cases``: how many were judged; none is left out.
    ``value``: what was reached, of 1; for ``counted`` lines a number of cases, for a ``factor``
        itself.
    ``aim``: most that was aimed at, or least where more is ``better``; None without an aim.
    ``others``: what other ways reach.
    ``headline``: what README calls it; empty for what stands in docs alone.
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
        told = [f"{self._write(value)} ({name})" for name, value in (self.others or {}).items()]
        return ", ".join(told) or NOTHING


def judge_aims(memory: pd.DataFrame | None, steps: pd.DataFrame) -> list[Line]:
    """Return what was judged, steps first, then the choice of a plan, then memory.

    ``memory``, ``steps``: of ``reproductions.tables.CLUSTER_MEMORY``, None where only steps were
        judged, and ``CLUSTER_STEPS``.
    """
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
    told = (
        f"What missed, of simulated steps: {len(parts[0])} runs whose tensor groups reach beyond a node (median error {errors[0]}), and {len(slow)} pipelines "
        f"across nodes that took {float(slow['excess_s'].median()):.1f} s more for each micro-batch than predicted ({errors[1]}), which neither bytes nor degrees "
        f"explain; {fast} of both are predicted too fast; expected steps miss them by {sure[0]} and {sure[1]}. The other {len(rest)}: {errors[2]}"
    )  # fmt: skip
    if few.empty:
        return f"{told}."
    error = write_percent(score_group("", few)["median_error"])
    return f"{told}, of which {len(few)} on up to {FEW_NODES} nodes: {error}."


def _judge_steps(cases: pd.DataFrame) -> list[Line]:
    ways = predict_steps(cases)
    told = {way: cases.assign(predicted_s=step_s) for way, step_s in ways.items()}

    def line(what: str, key: str, aim: float | None = None, more: bool = False, least: float = 0.0,
             nodes: int | None = None, headline: str = "", way: str = OURS) -> Line:  # fmt: skip
        chosen = (cases["mfu"] > least) & ((cases["nodes"] <= nodes) if nodes else True)
        found = {way: score_group(way, rows[chosen])[key] for way, rows in told.items()}
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


def _judge_memory(cases: pd.DataFrame) -> list[Line]:
    scores = score_memory(cases).iloc[0]
    ran, failed = cases[cases["set"] != FAILED], cases[cases["set"] == FAILED]
    false = int((ran["fullest_reserved_bytes"] > ROOM_BYTES).sum())
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
