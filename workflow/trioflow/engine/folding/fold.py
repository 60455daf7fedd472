"""Identical ranks executed once, where that changes no bit of the result.

A folded run executes a *quotient* of the simulated system: one task for each class of tasks, one exchange for each
class of exchanges, one flow for each class of flows, one link for each class of links. It says what the whole system
does under this condition.

*Ranks.* Ranks of a class have the same tasks in the same order, of the same durations, with the same dependencies, none
of them on other ranks. Where one takes part in an exchange, all do, each in an exchange of its own group, at the same
place of its program; the groups of one family have as many members of each class (see ``parallel.folded.Fold``). All
ranks of a class are equally fast.

*Costs.* The planner makes the same of every group of a family: as many flows, with the same sizes, latencies and caps;
or the same pattern of messages.

*Links.* Flows and links fall into classes such that all links of a class are as wide and are crossed by as many flows
of each class, all flows of a class cross the same number of links of each class, and the flows of every group of a
family are of the same classes, as often. Flows are counted as if all groups did their exchange at once, which they do:
see below. The coarsest such classes are found (``folding.links.divide``), and checked.

*Argument.* By induction over the phases of an event (flows that move or end, tasks that end, tasks that start) at one
time: tasks of a class, exchanges of a class and flows of a class are in the same state in the whole system, and that is
the state of their stand-in in the quotient. A task becomes ready when what it waits for has ended, which is of the same
classes for all tasks of a class. An exchange starts when the last member is ready: its members' classes are those of
every exchange of its class, so all exchanges of a class start at the same time, and so do their flows, at the same
latency. Max-min rates come from progressive filling: a link's share is its free bandwidth over the flows that still
rise on it. In the quotient a flow crosses a class's link as often as flows of its class cross one of the links, so the
counts, the free bandwidths (the same level is taken off as often) and the shares are the same numbers, and so is the
lowest of them; the flows that stop at it are whole classes. Components of flows that share links correspond, since
every link of a class meets the same classes of flows, and flows outside a component do not touch its bits
(``compute_max_min_rates``). A flow's end comes from the same operations on the same numbers, so it has the same bits;
an exchange ends with its last flow, and the classes of its flows are those of every exchange of its class. Nothing here
depends on the order of events at one time, and neither does when tasks run (``engine.compiled.kernels``). Bytes on links are
sums over the same flows, but in another order: they agree to rounding.

Classes that do not fulfil this are divided (``folded_grid.split_fold``): ranks whose speeds, or whose groups' costs or
flows differ. Where no two ranks are left in one class, all ranks are executed.

Where replicas lie on several leaf sets of a cluster, the ring of a stage leaves a set at its last node, where it shares
the uplink with what all its nodes send to the next stage. Were that uplink shared, these messages could be slowed
otherwise than their neighbours', hence the ring's next flow, and so on from node to node, and every node of a set would
be a class of its own. But an uplink as wide as all that leads to it holds nobody back (``fair_share.find_slack``). Such
links are left out of the sharing in every run, folded or not, so that both have the same bits, and out of the division
into classes (GPT-3 175B on 4,096 ranks of dgx-h100, 8 tensor x 8 pipeline x 64 data: 8 classes instead of 256). Bytes
on them are those of the flows that cross them. Where leaves are oversubscribed or have several spines, uplinks are
shared and the classes stay apart.

Only trioflow's own networks, whose rules these are, take part. A collective of an algorithm keeps all its messages: its
flows are not of one class, and those of different groups of a family differ in their place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from trioflow.base.errors import SimulationError
from trioflow.base.machine_memory import find_available_bytes
from trioflow.base.units import format_bytes, format_count
from trioflow.engine.exchanges import ExchangeRows, Exchanges, Plan, Planner
from trioflow.engine.folding.traffic import CannotFoldError, FoldedTraffic, GroupsDifferError, fold_plans
from trioflow.engine.program import Case, Ints, Program, build_program, change_case, check_scale
from trioflow.hardware.machine import Link, Platform
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.networks import AnyNetwork, ContentionFreeNetwork
from trioflow.parallel.folded import Fold, split_fold

MOST_SPLITS = 20
"""Divisions of the classes after which folding is given up."""


@dataclass(frozen=True, eq=False)
class FoldedProgram:
    """The quotient of a program, and the way back."""

    fold: Fold  # classes of ranks
    # Tasks of the representatives, with one exchange for each class; with the times of each case
    programs: list[Program]
    traffic: FoldedTraffic  # classes of flows and links

    def stretch(self, factor: float) -> FoldedProgram:
        """Return it with communication that takes a factor as long: what is alike stays so. SimulationError when not positive."""
        check_scale(factor, "communication_scale")
        if factor == 1:
            return self
        programs = [p.change_times(p.durations_s, p.exchanges.stretch(factor)) for p in self.programs]
        return FoldedProgram(self.fold, programs, self.traffic.narrow(factor))

    def make_network(self, kind: type[AnyNetwork], make_whole: Callable[[], AnyNetwork]) -> AnyNetwork:
        """Return an unused network of the classes of links, of the kind of the whole one."""
        if self.traffic.crossings is None:
            return make_whole()
        return kind(self.traffic.links)  # type: ignore[call-arg]

    def spread_bytes(
        self, link_bytes: Mapping[tuple[str, str], float], links: Sequence[Link]
    ) -> dict[tuple[str, str], float]:
        """Return the bytes on every link from those on the links of the classes [bytes]."""
        crossings = self.traffic.crossings
        if crossings is None:
            return dict(link_bytes)
        moved = [link_bytes[link.source, link.target] for link in self.traffic.links]
        # No flow crosses a link of no class, but where it takes no part in sharing.
        of_link = np.array([*moved, 0.0])[crossings.link_class]
        slack = self.traffic.slack
        if slack is not None:
            of_link += np.bincount(slack.link, np.array(moved)[slack.counter], minlength=len(of_link))
        return {(link.source, link.target): size for link, size in zip(links, of_link.tolist(), strict=True)}


def fold_program(
    fold: Fold, cases: Sequence[Case], network: type[AnyNetwork], slack: frozenset[int], platform: Platform
) -> FoldedProgram:
    """Return the quotient of a task graph on a platform: the same for all cases, so alike in each.

    ``network``: how flows share links; ``slack``: links that take no part in sharing.

    Raises CannotFoldError, which says why that would not be exact, SimulationError as ``build_program``, TooLargeError
    where classes divide into more than fit into memory.
    """
    if network not in (FairShareNetwork, ContentionFreeNetwork):
        raise CannotFoldError(f"the network {network.__name__} is not known to treat like flows alike")
    if fold.ranks > platform.ranks:
        raise CannotFoldError("the platform has too few ranks")
    for case in cases:
        fold = _split_speeds(fold, case.compute_scale)
    planners = [case.planner for case in cases]
    reason = "no two ranks do the same"
    for _ in range(MOST_SPLITS):
        if len(fold.representatives) == fold.ranks:
            raise CannotFoldError(reason)
        try:
            exchanges, traffic = _fold_exchanges(fold, planners, platform.links, slack)
        except GroupsDifferError as difference:
            reason = str(difference)
            check_division(fold, difference.of_group, reason)
            alike = np.zeros(fold.ranks, dtype=np.int64)
            fold = split_fold(fold, alike, difference.of_group)
            continue
        program = build_program(
            fold.graph,
            exchanges[0],
            ranks=platform.ranks,
            compute_scale=cases[0].compute_scale,
            communication_on_compute_stream=platform.communication_on_compute_stream,
        )
        others = zip(exchanges[1:], cases[1:], strict=True)
        changed = [change_case(program, fold.graph, *other, platform.ranks) for other in others]
        return FoldedProgram(fold, [program, *changed], traffic)
    raise CannotFoldError(reason)


_ROWS: WeakKeyDictionary[Fold, ExchangeRows] = WeakKeyDictionary()
"""Of graphs that are simulated on several networks."""


def _fold_exchanges(
    fold: Fold, planners: Sequence[Planner], links: Sequence[Link], slack: frozenset[int]
) -> tuple[list[Exchanges], FoldedTraffic]:
    """Return, by each planner, one exchange of each class; and what they put on the links."""
    rows = _ROWS.get(fold) or _ROWS.setdefault(fold, ExchangeRows(fold.graph.tasks))
    if rows.find_odd().any():
        raise CannotFoldError("the tasks of an exchange do not fit together")
    match_ids = fold.graph.tasks["match_id"].to_numpy(dtype=np.int64, na_value=-1)
    family_of = fold.family_of[match_ids[rows.task[rows.first[:-1]]]]
    plan_of, firsts = rows.number_plans(family_of)
    asked = [(rows.read_collective(match), rows.read_size(match), int(family_of[match])) for match in firsts.tolist()]
    traffic = fold_plans(asked, fold.families, planners, links, slack)
    exchanges = []
    for plans in traffic.plans:
        confidences = [
            (collective, len(fold.families[family].groups[0]), plan.confidence)
            for (collective, _, family), plan in zip(asked, plans, strict=True)
        ]
        made: list[Plan] = list(plans)
        exchanges.append(rows.assemble(made, plan_of, confidences, traffic.warnings, 1.0))
    return exchanges, traffic


def _split_speeds(fold: Fold, scale: float | Sequence[float]) -> Fold:
    if isinstance(scale, int | float):
        return fold
    scales = np.array([float(value) for value in scale])[: fold.ranks]
    if len(scales) < fold.ranks:
        raise CannotFoldError("not every rank has a compute_scale")
    if (scales == scales[fold.representatives[fold.class_of]]).all():
        return fold
    return split_fold(fold, np.unique(scales, return_inverse=True)[1], {})


_PEAK_OVER_TABLES = 2.5
"""Peak of memory of expanding and simulating, over the tables that are kept of each rank: 391 over
156 bytes a task, measured on 2.7 million tasks of GPT-3 175B (8 tensor x 8 pipeline x 2 data)."""


class TooLargeError(SimulationError):
    """Tasks that would not fit into memory."""


def check_expansion(fold: Fold, reason: str, available_bytes: float | None = None) -> None:
    """Refuse to make all ranks' tasks where they would not fit into memory; TooLargeError names ranks, tasks and memory."""
    _check(fold, fold.ranks, fold.task_total, reason, available_bytes)


def check_division(fold: Fold, of_group: Mapping[int, Ints], reason: str, available_bytes: float | None = None) -> None:
    """Refuse, with TooLargeError as ``check_expansion``, to divide classes of ranks into more than fit into memory.

    Counts the classes that follow from the groups at once; what follows from them can divide further.
    """
    classes = fold.class_of
    for number, codes in of_group.items():
        label = np.append(codes, -1)[fold.families[number].group_of] + 1
        pairs = classes * (int(label.max(initial=0)) + 1) + label
        classes = np.unique(pairs, return_inverse=True)[1].reshape(-1).astype(np.int64)
    stand_in = np.unique(classes, return_index=True)[1]
    tasks = int(fold.task_counts[fold.class_of[stand_in]].sum())
    _check(fold, len(stand_in), tasks, reason, available_bytes)


def _check(fold: Fold, ranks: int, tasks: int, reason: str, available_bytes: float | None) -> None:
    needed_bytes = estimate_bytes(fold, tasks)
    free_bytes = find_available_bytes() if available_bytes is None else available_bytes
    if free_bytes is None or needed_bytes <= free_bytes:
        return
    whose = f"all {ranks} ranks" if ranks == fold.ranks else f"{ranks} of {fold.ranks} ranks"
    raise TooLargeError(
        f"the tasks of {whose} are needed ({reason}): {format_count(tasks).strip()} tasks take some "
        f"{format_bytes(needed_bytes)} of memory, and {format_bytes(free_bytes)} are free; ask for fewer ranks or a "
        "platform on which they are alike, leave --no-fold and timelines of all ranks out, or use a machine with more memory"
    )


def estimate_bytes(fold: Fold, tasks: int) -> float:
    """Return the memory of so many tasks at most while made and simulated, in proportion to the kept ranks' tables [bytes].

    Messages of algorithms and parts of flows come on top.
    """
    kept = fold.graph
    tables_bytes = kept.tasks.memory_usage(deep=True).sum() + kept.dependencies.memory_usage().sum()
    return _PEAK_OVER_TABLES * float(tables_bytes) / max(len(kept.tasks), 1) * tasks
