"""One task graph under many sets of times at once: what synchronised ranks lose when their times differ.

Each task and exchange of a simulated step is multiplied, in each draw, by a factor; who waits for whom is worked out
once. Links are not shared anew: flows take from one another what they did in that step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError, SimulationError
from trioflow.engine.program import Floats, Ints, collect_waits, count_up, number_lanes
from trioflow.parallel.folded import list_runs
from trioflow.parallel.task_graph import TaskGraph

MOST_TASKS = 4_000_000
"""Tasks of all ranks up to which steps are drawn: rank by rank, as none is like another any more."""
_BLOCK_NUMBERS = 32_000_000
"""Instants of tasks that are held at once [numbers of 8 bytes]."""


def check_size(tasks: int) -> None:
    """Refuse, with InputError, to draw a step of more tasks than ``MOST_TASKS``."""
    if tasks > MOST_TASKS:
        raise InputError(
            f"a step of {tasks:,} tasks is too large to draw: {MOST_TASKS:,} are the most",
            fix="ask for fewer ranks or micro-batches, or leave --draws out",
        )


@dataclass(frozen=True, eq=False)
class Drawn:
    """What draws came to.

    ``step_s`` [draws] [s]; ``wait_s``: mean over draws of what each task waits for the others of its exchange [tasks]
    [s]; ``late``: in how many draws the others waited for it [tasks].
    """

    step_s: Floats
    wait_s: Floats
    late: Ints


@dataclass(frozen=True, eq=False)
class _Level:
    """Tasks whose exchanges wait for no other of the level, in the order of their items."""

    tasks: Ints  # [tasks of the level]
    firsts: Ints  # where those of each item begin in ``tasks`` [items]
    items: Ints  # items, each an exchange or a task by itself [items]
    waits: Ints  # which places of ``tasks`` wait for anything [waiting]
    awaited: Ints  # items that they wait for, one after the other [pairs]
    first_awaited: Ints  # where those of each begin [waiting]
    shared: bool  # whether any item has several members


class DrawnGraph:
    """Who waits for whom in a simulated step, ready for any number of draws.

    ``item_of``: exchange, or task by itself, that each task is [tasks]; ``lengths_s``: of each item from when its last
    member was ready [items] [s]. Raises InputError above ``MOST_TASKS`` tasks, SimulationError when tasks wait for
    ever.
    """

    def __init__(self, graph: TaskGraph, timeline: pd.DataFrame) -> None:
        check_size(len(timeline))
        count = len(timeline)
        match = timeline["match_id"].to_numpy(dtype=np.int64, na_value=-1)
        keys = np.where(match >= 0, match, -1 - np.arange(count))
        _, self.item_of = np.unique(keys, return_inverse=True)
        start_s, end_s = (timeline[name].to_numpy(dtype=np.float64) for name in ("start_s", "end_s"))
        self.lengths_s = np.zeros(int(self.item_of.max(initial=-1)) + 1)
        self.lengths_s[self.item_of] = end_s - start_s
        self._levels = list(_find_levels(self.item_of, *collect_waits(graph, number_lanes(timeline))))

    def run(self, groups: Ints, factors: Floats, own: Callable[[int], Floats] | None = None) -> Drawn:
        """Return steps in which each item takes its length times its group's factor.

        ``groups``: row of ``factors`` [groups, draws] of each item [items]; ``own``: a draw's number to further factors
        [items].
        """
        draws = factors.shape[1]
        step_s = np.zeros(draws)
        wait_s, late = np.zeros(len(self.item_of)), np.zeros(len(self.item_of), dtype=np.int64)
        width = max(1, _BLOCK_NUMBERS // max(1, len(self.lengths_s)))
        for first in range(0, draws, width):
            chosen = slice(first, first + width)
            lengths_s = self.lengths_s[:, None]
            if own is not None:
                block = range(first, min(first + width, draws))
                factor = np.stack([own(draw) for draw in block], axis=1)
                factor *= lengths_s
                lengths_s = factor
            shared = np.ascontiguousarray(factors[:, chosen])
            ends_s = self._run_block(lengths_s, groups, shared, wait_s, late)
            step_s[chosen] = ends_s.max(axis=0, initial=0.0)
        return Drawn(step_s, wait_s / max(1, draws), late)

    def _run_block(self, lengths_s: Floats, groups: Ints, factors: Floats, wait_s: Floats, late: Ints) -> Floats:
        """Return when each item ends in each draw [items, draws] [s]; add to waits and lateness."""
        ends_s = np.zeros((len(self.lengths_s), factors.shape[1]))
        for level in self._levels:
            ready_s = np.zeros((len(level.tasks), factors.shape[1]))
            if len(level.awaited):
                ready_s[level.waits] = np.maximum.reduceat(ends_s[level.awaited], level.first_awaited, axis=0)
            start_s = ready_s
            if level.shared:
                start_s = np.maximum.reduceat(ready_s, level.firsts, axis=0)
                self._note_waits(level, ready_s, start_s, wait_s, late)
            items = level.items
            ends_s[items] = start_s + lengths_s[items] * factors[groups[items]]
        return ends_s

    def _note_waits(self, level: _Level, ready_s: Floats, start_s: Floats, wait_s: Floats, late: Ints) -> None:
        members = np.diff(np.append(level.firsts, len(level.tasks)))
        waited_s = np.repeat(start_s, members, axis=0) - ready_s
        anyone = np.maximum.reduceat(waited_s, level.firsts, axis=0) > 0
        wait_s[level.tasks] += waited_s.sum(axis=1)
        late[level.tasks] += ((waited_s == 0) & np.repeat(anyone, members, axis=0)).sum(axis=1)


def _find_levels(item_of: Ints, waiting: Ints, awaited: Ints) -> Iterator[_Level]:
    """Sort items into levels, each of those whose tasks wait for items of levels before only."""
    tasks, items = len(item_of), int(item_of.max(initial=-1)) + 1
    by_item = np.argsort(item_of, kind="stable")
    first_task = count_up(np.bincount(item_of, minlength=items))
    order = np.argsort(waiting, kind="stable")
    awaited_items, first_pair = (item_of[awaited][order], count_up(np.bincount(waiting, minlength=tasks)))
    order = np.argsort(awaited_items, kind="stable")
    followers = item_of[waiting[np.argsort(waiting, kind="stable")]][order]
    first_follower = count_up(np.bincount(awaited_items, minlength=items))
    missing = np.bincount(item_of[waiting], minlength=items)
    level, done = np.flatnonzero(missing == 0), 0
    while len(level):
        done += len(level)
        yield _make_level(level, by_item, first_task, awaited_items, first_pair)
        found = followers[_list_chosen(first_follower, level)]
        np.subtract.at(missing, found, 1)
        level = np.unique(found[missing[found] == 0])
    if done < items:
        raise SimulationError(f"{items - done} tasks wait for each other and never start")


def _make_level(items: Ints, by_item: Ints, first_task: Ints, awaited_items: Ints, first_pair: Ints) -> _Level:
    members = first_task[items + 1] - first_task[items]
    tasks = by_item[_list_chosen(first_task, items)]
    pairs = first_pair[tasks + 1] - first_pair[tasks]
    waits = np.flatnonzero(pairs)
    return _Level(
        tasks,
        np.cumsum(members) - members,
        items,
        waits,
        awaited_items[_list_chosen(first_pair, tasks)],
        (np.cumsum(pairs) - pairs)[waits],
        bool((members > 1).any()),
    )


def _list_chosen(firsts: Ints, chosen: Ints) -> Ints:
    """Return the places of some of consecutive runs, one run after the other; ``firsts`` is of ``count_up``."""
    return list_runs(firsts[chosen], firsts[chosen + 1] - firsts[chosen])
