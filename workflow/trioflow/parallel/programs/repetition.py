"""Tasks of a micro-batch that are those of an earlier one of its size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trioflow.parallel.programs.builder import RankProgram
from trioflow.parallel.task_graph import Mark


class _Recorded(NamedTuple):
    """Tasks that ran for a micro-batch, and the rank's state behind them."""

    begin: Mark
    end: Mark
    exchanges: list[tuple[Any, ...]]  # keys of their exchanges
    last: int | None
    launched: int | None
    waits: list[int]


class Repetition:
    """Copies the tasks of a rank's actions from one micro-batch to others of the same size.

    Attributes
    ----------
    exchanged : list of tuple
        Keys of the exchanges that the rank has joined since a recording began; the fourth part of
        each is the micro-batch.
    """

    def __init__(self, rank: RankProgram) -> None:
        self.rank = rank
        self.exchanged: list[tuple[Any, ...]] = []
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}

    def run(
        self, what: tuple[Any, ...], operators: Sequence[int], micro_batch: int,
        run: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Run an action's operators one by one, or copy all but the first from another micro-batch.

        The first one waits for what the action has to wait for, the others for it and one another.
        """
        rank, graph = self.rank, self.rank.program.graph
        for op_id in operators[:1]:
            run(op_id)
        if len(operators) < 2:
            return
        key = (*what, rank.program.factors[micro_batch])
        found = self._recorded.get(key)
        if found is None:
            begin, self.exchanged = graph.mark(), []
            for op_id in operators[1:]:
                run(op_id)
            state = (list(self.exchanged), rank.last, rank.launched, list(rank.waits))
            self._recorded[key] = _Recorded(begin, graph.mark(), *state)
            return
        match = rank.program.match
        matches = [match(*key[:3], micro_batch, *key[4:]) for key in found.exchanges]
        shift = graph.repeat(found.begin, found.end, matches, micro_batch)
        rank.last = None if found.last is None else found.last + shift
        rank.launched = None if found.launched is None else found.launched + shift
        rank.waits = [task + shift for task in found.waits]
