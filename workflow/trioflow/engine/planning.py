"""What turns a graph's collectives into flows or messages: its plan's word, or the caller's; and one by itself."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from trioflow.base.experiments import Plan
from trioflow.engine.compiled.run import is_repaid, run_program
from trioflow.engine.exchanges import Exchanges, Planner
from trioflow.engine.folding.fold import FoldedProgram, fold_program
from trioflow.engine.program import Case, Program
from trioflow.hardware.machine import Link, Platform, is_rank_node, narrow_links
from trioflow.network.algorithms.catalogue import Algorithms, read_algorithms, spell_algorithm
from trioflow.network.collectives import Bound, CollectiveCost, CollectivePlanner
from trioflow.network.fair_share import FairShareNetwork, find_slack
from trioflow.network.message_planner import Chunks, CollectiveMessages, MessagePlanner, RunAlone
from trioflow.network.networks import AnyNetwork
from trioflow.parallel.folded import Fold
from trioflow.parallel.remembered import Memory, kept

T = TypeVar("T")


def choose_algorithms(
    plan: Plan, algorithms: Algorithms | None, chunks: Chunks | None
) -> tuple[Algorithms | None, Chunks]:
    """Return the algorithms and chunks asked for (short names too), or the graph's plan; InputError when one is unknown."""
    if algorithms is None and plan.algorithms != "none":
        algorithms = plan.algorithms
    if isinstance(algorithms, str):
        algorithms = read_algorithms(algorithms)
    elif algorithms is not None:
        algorithms = {name: spell_algorithm(word) for name, word in algorithms.items()}
    if chunks is None:
        chunks = Chunks(plan.chunks, float(plan.chunk_bytes) or math.inf)
    return algorithms, chunks


def make_planner(
    platform: Platform, collectives: CollectiveCost | None, bound: Bound, algorithms: Algorithms | None, chunks: Chunks
) -> Planner:
    """Return what turns collectives into messages, or flows without an algorithm; InputError as ``MessagePlanner``."""
    if algorithms is None:
        return keep_planner(platform, collectives, bound)
    return _keep_messages(platform, collectives, bound, algorithms, chunks)


MOST_USES = 256
"""A planner is made anew after so many simulations, so that what it remembers has an end."""
PLANNERS, MESSAGES = Memory(12, MOST_USES), Memory(3, MOST_USES)
"""Planners of a few platforms, for the three ends of an interval each; of messages the three ends only: their tables are large."""


@kept(MESSAGES)
def _keep_messages(
    platform: Platform, collectives: CollectiveCost | None, bound: Bound, algorithms: Algorithms, chunks: Chunks
) -> Planner:
    run_alone = make_run_alone(platform)
    return MessagePlanner(platform, algorithms, run_alone, collectives, bound, chunks)


@kept(PLANNERS)
def keep_planner(platform: Platform, collectives: CollectiveCost | None, bound: Bound) -> CollectivePlanner:
    """Return the planner of a platform object, the same one always: finding routes takes longer than a folded simulation."""
    if bound == "time_s":
        return CollectivePlanner(platform, collectives, bound)
    return keep_planner(platform, collectives, "time_s").rebound(bound)


@kept(Memory(3))
def name_links(platform: Platform) -> list[tuple[tuple[str, str], str]]:
    """Return the ends of a platform's links in their order, and how a summary calls each link."""
    ends = sorted({(link.source, link.target) for link in platform.links})
    return [(pair, f"{pair[0]}->{pair[1]}") for pair in ends]


def keep_folded(fold: Fold, cases: Sequence[Case], network: AnyNetwork, platform: Platform) -> FoldedProgram:
    """Return the quotient of a graph on a platform, the same however fast its links are; errors as ``fold_program``."""
    slack: frozenset[int] = getattr(network, "slack", frozenset())
    of_cases = [(case.planner, case.compute_scale) for case in cases]
    return _keep_folded(fold, of_cases, type(network), slack, platform)


@kept(Memory(2))  # one graph on two networks, as consecutive scenarios of a sweep ask for
def _keep_folded(
    fold: Fold, cases: Sequence[tuple[Any, ...]], network: type[AnyNetwork], slack: frozenset[int], platform: Platform
) -> FoldedProgram:
    return fold_program(fold, [Case(*one) for one in cases], network, slack, platform)


@kept(Memory(3))
def keep_slack(platform: Platform) -> frozenset[int]:
    """Return the links of a platform that hold no flow between ranks back: see `find_slack`."""
    return find_slack(platform.links, is_rank_node)


@kept(Memory(12))
def keep_links(platform: Platform, factor: float) -> Sequence[Link]:
    """Return the links of a platform of which each moves a ``factor``th of the bytes."""
    return narrow_links(platform.links, factor)


def make_run_alone(platform: Platform) -> RunAlone:
    """Return what runs a collective by itself, its messages sharing the platform's links."""

    def run(plan: CollectiveMessages) -> float:
        program = _make_program(plan)
        network = FairShareNetwork(platform.links, platform.routing)
        compiled = is_repaid(program.events)
        return float(run_program(program, network, compiled=compiled).end_s[0])

    return run


def _make_program(plan: CollectiveMessages) -> Program:
    """Return a program of one task, which stands for all members of the collective."""
    one, none = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    ends = np.array([0, 1], dtype=np.int64)
    exchanges = Exchanges(one, one, ends, [plan], one, np.zeros(1), [], [])
    name = plan.pattern.collective
    return Program(
        one,
        one,
        ["alone"],
        pd.Series([name], dtype="str"),
        pd.Series(["collective"], dtype="str"),
        np.zeros(1),
        none,
        none,
        exchanges,
    )
