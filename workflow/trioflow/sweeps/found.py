"""What a search for plans found: those tried together, those simulated, in order, and what became of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trioflow.base.experiments import Plan
from trioflow.engine.result import CONFIDENCES
from trioflow.prediction.drawn import Draws
from trioflow.sweeps.search_space import Fates, Prediction, probability_faster

_ALIKE_SHARE = 0.01
"""Bucket sizes of a plan whose outlined steps differ by no more count as alike."""


class Candidate(NamedTuple):
    """A plan with what its outline says: step [s], and memory at least [bytes]."""

    time_s: float
    plan: Plan
    least_bytes: int


class Variants(NamedTuple):
    """A plan with its best bucket size by the outline, and the same plan with other ones, in order."""

    best: Candidate
    others: tuple[Candidate, ...] = ()

    def compare_buckets(self) -> dict[str, Any]:
        """Return what a row says of the plan's other bucket sizes: all, and how many are as good."""
        most_s = self.best.time_s * (1 + _ALIKE_SHARE)
        return {
            "other_buckets": [
                {"bucket_bytes": other.plan.bucket_bytes, "outlined_s": other.time_s}
                for other in self.others
            ],
            "alike_buckets": sum(other.time_s <= most_s for other in self.others),
        }


def group_variants(candidates: Sequence[Candidate]) -> list[Variants]:
    """Put plans together that differ in the size of their buckets alone, by the best outline; the fastest is given first."""
    groups: dict[Plan, list[Candidate]] = {}
    for candidate in candidates:
        key = replace(candidate.plan, first_bucket_bytes=0, bucket_bytes=0)
        groups.setdefault(key, []).append(candidate)
    return [Variants(group[0], tuple(group[1:])) for group in groups.values()]


@dataclass
class Simulated:
    """A plan simulated in full, and what it is compared by."""

    row: dict[str, Any]
    prediction: Prediction
    candidate: Candidate
    steady_s: float  # Expected without draws [s]
    draws: Draws | None = None


@dataclass
class Found:
    """What a search found.

    ``ranking``: of ``simulated``, the fastest first by ``expected_s`` [s], behind them those whose allocator is
    expected to run out (``crowded``), each with its best bucket size; ``other_buckets`` lists the others
    (``bucket_bytes`` [bytes], ``outlined_s`` [s]), ``alike_buckets`` counts those within a hundredth. ``dropped``:
    plans that do not fit the memory, with the reason. ``fates``: what became of all plans, by family. ``left_out``:
    kinds of plans not looked at. ``outlined``: plans whose step was outlined. ``outline_error``: least and greatest
    outlined over simulated step, less 1. ``confidence``, ``model_text``: of the operators' times.
    """

    simulated: list[Simulated] = field(default_factory=list)
    ranking: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    fates: Fates = field(default_factory=Fates)
    left_out: list[str] = field(default_factory=list)
    outlined: int = 0
    outline_error: tuple[float, float] = (0.0, 0.0)
    confidence: str = CONFIDENCES[0]
    model_text: str = ""
    warnings: list[str] = field(default_factory=list)

    def rank(self) -> None:
        """Put the simulated plans in order, each with the probability that the first one beats it."""
        self.simulated.sort(key=lambda one: (one.row["crowded"], one.prediction.time_s))
        self.ranking = []
        for one in self.simulated:
            first = self.simulated[0]
            beaten = probability_faster(first.prediction, one.prediction)
            row = {**one.row, "first_faster_probability": beaten}
            if one.draws is not None and first.draws is not None:
                row["first_faster_drawn"] = first.draws.beats(one.draws)
            self.ranking.append(row)
        ratios = [one.candidate.time_s / one.steady_s - 1 for one in self.simulated]
        if ratios:
            self.outline_error = (min(ratios), max(ratios))
        self.warnings = list(dict.fromkeys(self.warnings))


def join_found(found: Sequence[Found], recipes: Sequence[str | None]) -> Found:
    """Return what was found under each of some precision recipes as one, ranked together."""
    if len(found) == 1:
        return found[0]
    joined = Found(
        simulated=[one for each in found for one in each.simulated],
        dropped=[entry for each in found for entry in each.dropped],
        left_out=found[0].left_out,
        outlined=sum(each.outlined for each in found),
        confidence=max((each.confidence for each in found), key=CONFIDENCES.index),
        model_text="; ".join(dict.fromkeys(each.model_text for each in found)),
        warnings=[warning for each in found for warning in each.warnings],
    )
    for each, recipe in zip(found, recipes, strict=True):
        joined.fates.add(each.fates)
        for entry in each.dropped:
            entry["precision"] = recipe
    joined.rank()
    return joined
