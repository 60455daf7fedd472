"""The order of compute actions of each kind of pipeline schedule.

Idle cells (None) stand where PyTorch puts them. Each builder takes the ranks ``p``, the micro-batches ``m`` and the
stages of a rank ``v``, and returns a row a rank.

References: PyTorch 2.13 ``torch/distributed/pipelining/schedules.py``. Y. Huang et al., GPipe, arXiv 1811.06965; D.
Narayanan et al., arXiv 2104.04473 (1F1B, interleaved); P. Qi et al., Zero bubble, arXiv 2401.10241; J. Lamy-Poirier,
Breadth-first pipeline parallelism, arXiv 2211.05953; C. Kim et al., torchgpipe, arXiv 2004.09910 (``Pipe`` and its
recomputation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from trioflow.base.errors import PlanError
from trioflow.parallel.schedules.table import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    OVERLAP_F_B,
    Action,
    Row,
)


def _order_gpipe(p: int, m: int, v: int) -> list[Row]:
    """Run all forwards, then all backwards, micro-batches in the same order."""
    return [
        (
            *(Action(rank, FORWARD, i) for i in range(m)),
            *(Action(rank, BACKWARD, i) for i in range(m)),
        )
        for rank in range(p)
    ]


def _order_gpipe_recompute(p: int, m: int, v: int) -> list[Row]:
    """Follow the old ``Pipe`` with ``checkpoint="except_last"``: backwards from the last micro-batch, to which each is tied.

    All but the last one's, whose activations are kept, first run the forward again.
    """
    rows: list[Row] = []
    for rank in range(p):
        row = [Action(rank, FORWARD, i) for i in range(m)] + [Action(rank, BACKWARD, m - 1)]
        for i in reversed(range(m - 1)):
            row += [Action(rank, FORWARD, i), Action(rank, BACKWARD, i)]
        rows.append(tuple(row))
    return rows


def _order_1f1b(p: int, m: int, v: int) -> list[Row]:
    """Run as many forwards as ranks are left, then a backward and a forward in turn.

    With fewer micro-batches than ranks no rank gets to take turns: Megatron-LM
    (``forward_backward_pipelining_without_interleaving``) runs that, PyTorch refuses it.
    """
    rows: list[Row] = []
    for rank in range(p):
        ahead = min(p - rank, m)
        row = [Action(rank, FORWARD, i) for i in range(ahead)]
        for i in range(m):
            row.append(Action(rank, BACKWARD, i))
            if i + ahead < m:
                row.append(Action(rank, FORWARD, i + ahead))
        rows.append(tuple(row))
    return rows


def _micro_batches_of_a_round(name: str, p: int, m: int) -> int:
    """Return how many micro-batches a stage takes before the rank's next stage has its turn."""
    rounds = max(1, m // p)
    if m % rounds:
        raise PlanError(
            f"{name}: {m} micro-batches do not divide into {rounds} rounds on {p} ranks",
            fix=f"use a multiple of {p} micro-batches",
        )
    return m // rounds


def _turns(rank: int, p: int, m: int, v: int, size: int, last_first: bool) -> list[tuple[int, int]]:
    """Return (stage, micro-batch) in the order in which a rank's stages take rounds of ``size``."""
    result = []
    for turn in range(m * v):
        local = turn // size % v
        stage = (v - 1 - local if last_first else local) * p + rank
        result.append((stage, turn // (size * v) * size + turn % size))
    return result


def _order_interleaved(p: int, m: int, v: int) -> list[Row]:
    """Run forwards two hops ahead of the last rank, then forward and backward in turn."""
    size = _micro_batches_of_a_round("interleaved", p, m)
    rows: list[Row] = []
    for rank in range(p):
        forwards = [Action(s, FORWARD, i) for s, i in _turns(rank, p, m, v, size, False)]
        backwards = [Action(s, BACKWARD, i) for s, i in _turns(rank, p, m, v, size, True)]
        ahead = min((v - 1) * size + 2 * (p - 1 - rank), m * v)
        row: list[Action | None] = [None] * rank + forwards[:ahead]
        if ahead:  # idle until the first backward has come up from the last rank
            row += [None] * (v * p + 2 * (p - 1 - rank) - ahead - rank)
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            row += [forward, backward]
        for backward in backwards[m * v - ahead :]:
            row += [None, backward]
        rows.append(tuple(row))
    return rows


def _order_zero_bubble(p: int, m: int, v: int) -> list[Row]:
    """Interleave with I and W apart; rank r runs its W r micro-batches later (ZB1P)."""
    size = _micro_batches_of_a_round("zero-bubble", p, m)
    rows: list[Row] = []
    for rank in range(p):
        forwards = [Action(s, FORWARD, i) for s, i in _turns(rank, p, m, v, size, False)]
        turns = _turns(rank, p, m, v, size, True)
        ahead = min((v - 1) * size + p - 1 - rank, m * v)
        row: list[Action | None] = [None] * rank + forwards[:ahead]
        if ahead:
            row += [None] * (p - rank - 1)
        for turn, (stage, micro_batch) in enumerate(turns):
            row += forwards[ahead + turn : ahead + turn + 1]
            row.append(Action(stage, BACKWARD_INPUT, micro_batch))
            if turn >= rank:
                row.append(Action(turns[turn - rank][0], BACKWARD_WEIGHT, turns[turn - rank][1]))
        row += [Action(s, BACKWARD_WEIGHT, i) for s, i in turns[max(m * v - rank, 0) :]]
        rows.append(tuple(row))
    return _delay_forwards(rows)


def _delay_forwards(rows: list[Row]) -> list[Row]:
    """Let every forward idle until the stage before it has run in an earlier slot."""
    done: set[Action] = set()
    places = [0] * len(rows)
    result: list[list[Action | None]] = [[] for _ in rows]
    while any(place < len(row) for place, row in zip(places, rows, strict=True)):
        now = []
        for rank, row in enumerate(rows):
            if places[rank] == len(row):
                continue
            action = row[places[rank]]
            if action and action.kind == FORWARD and action.stage:
                before = Action(action.stage - 1, FORWARD, action.micro_batch)
                if before not in done:
                    result[rank].append(None)
                    continue
            places[rank] += 1
            result[rank].append(action)
            if action:
                now.append(action)
        done.update(now)
    return [tuple(row) for row in result]


def _number(tokens: Iterable[tuple[int, str]]) -> list[Action]:
    """Give each (stage, kind) its micro-batches in the order in which it occurs."""
    count: Counter[tuple[int, str]] = Counter()
    row = []
    for token in tokens:
        row.append(Action(*token, count[token]))
        count[token] += 1
    return row


def _order_zbv(p: int, m: int, v: int) -> list[Row]:
    """Fill the bubble on a V: a rank's second stage mirrors its first, so the last meets the loss; absent slots idle."""
    enough = max(2 * p - 1, m)
    rows: list[Row] = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        late = p - rank
        tokens = [(down, FORWARD)] * (2 * late - 1) + [(up, FORWARD), (down, FORWARD)] * rank
        tokens += [(up, FORWARD), (up, BACKWARD_INPUT), (up, BACKWARD_WEIGHT)] * late
        steady = enough - p  # second-stage forwards that are still to come
        forwards = enough - (2 * p - rank - 1)
        for turn in range(steady):
            tokens += [(down, FORWARD)] * (turn < forwards)
            tokens += [(down, BACKWARD_INPUT), (down, BACKWARD_WEIGHT)]
            tokens += [(up, FORWARD), (up, BACKWARD_INPUT), (up, BACKWARD_WEIGHT)]
        tokens += [(down, BACKWARD_INPUT), (up, BACKWARD_INPUT)] * rank
        tokens += [(down, BACKWARD_INPUT), (down, BACKWARD_WEIGHT)] * late
        tokens += [(up, BACKWARD_WEIGHT)] * rank + [(down, BACKWARD_WEIGHT)] * rank
        row = [a if (a.micro_batch or 0) < m else None for a in _number(tokens)]
        rows.append((*[None] * rank, *row))
    return rows


def _order_looped_bfs(p: int, m: int, v: int) -> list[Row]:
    """Take all micro-batches through a rank's first stage, then through its next, and back."""
    rows: list[Row] = []
    for rank in range(p):
        stages = range(rank, p * v, p)
        row: list[Action | None] = [None] * rank
        row += [Action(stage, FORWARD, i) for stage in stages for i in range(m)]
        row += [None] * (2 * (p - 1 - rank))
        row += [
            Action(stage, BACKWARD, i) for stage in reversed(stages) for i in reversed(range(m))
        ]
        rows.append(tuple(row))
    return rows


class _Folded:
    """A row of DualPipeV in the making: it numbers micro-batches and remembers open W."""

    def __init__(self) -> None:
        self.row: list[Action | None] = []
        self.count: Counter[tuple[int, str]] = Counter()
        self.open: list[Action] = []

    def _next(self, stage: int, kind: str) -> Action:
        direction = FORWARD if kind == FORWARD else BACKWARD
        number = self.count[stage, direction]
        self.count[stage, direction] += 1
        if kind == BACKWARD_INPUT:
            self.open.append(Action(stage, BACKWARD_WEIGHT, number))
        return Action(stage, kind, number)

    def add(self, stage: int, kind: str) -> None:
        self.row.append(self._next(stage, kind))

    def add_weight(self) -> None:
        self.row += [self.open.pop(0)] if self.open else []

    def overlap(self, forward: int, backward: int) -> None:
        parts = (self._next(forward, FORWARD), self._next(backward, BACKWARD))
        self.row.append(Action(-1, OVERLAP_F_B, None, parts))


def _order_dualpipev(p: int, m: int, v: int) -> list[Row]:
    """Overlap a forward with a backward of the other arm of the V (DeepSeek's DualPipe, folded)."""
    if m < 2 * p:
        raise PlanError(
            f"dualpipev: {m} micro-batches are fewer than the {2 * p} stages",
            fix=f"use {2 * p} micro-batches or more",
        )
    return [_fold_row(rank, p, m) for rank in range(p)]


def _fold_row(rank: int, p: int, m: int) -> Row:
    down, up, late = rank, 2 * p - 1 - rank, p - 1 - rank
    made = _Folded()
    for _ in range(2 * late):
        made.add(down, FORWARD)
    for _ in range(rank + 1):
        made.add(down, FORWARD)
        made.add(up, FORWARD)
    for _ in range(late):
        made.add(up, BACKWARD_INPUT)
        made.add_weight()
        made.add(up, FORWARD)
    for turn in range(m - 2 * p + rank + 1):
        if turn == 0 and late == 0:  # the last rank starts without an overlap
            made.add(down, FORWARD)
            made.add(up, BACKWARD)
        else:
            made.overlap(down, up)
        made.overlap(up, down)
    for _ in range(late):
        made.add(up, BACKWARD)
        made.overlap(up, down)
    # Of the last backwards the second half leaves its W for the end.
    for turn in range(2 * (rank + 1)):
        kind = BACKWARD_INPUT if turn >= rank + 1 else BACKWARD
        made.add(down if turn % 2 else up, kind)
    for _ in range(late):
        made.add_weight()
        made.add(down, BACKWARD_INPUT)
    for _ in range(rank + 1):
        made.add_weight()
    return tuple(made.row)


ORDERS = {
    "gpipe": _order_gpipe, "gpipe-recompute": _order_gpipe_recompute, "1f1b": _order_1f1b,
    "interleaved": _order_interleaved, "looped-bfs": _order_looped_bfs,
    "zero-bubble": _order_zero_bubble, "zbv": _order_zbv, "dualpipev": _order_dualpipev,
}  # fmt: skip
