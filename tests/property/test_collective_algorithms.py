"""Whatever the order of the messages, every rank ends with what the collective promises."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from fuzz import count_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from oracles.replay import Pick, Wiring, check_promise, execute_schedule, replay_schedule
from trioflow.base.errors import SimulationError
from trioflow.network.algorithms.catalogue import SUPPORTED, build_message_schedule, count_switches
from trioflow.network.algorithms.pattern import MessageSchedule, order_connections, pack_waits

FLAT = [(name, known) for name, collectives in SUPPORTED.items() for known in collectives]
NESTED = [
    (f"hierarchical:{inner}+{outer}", collective)
    for inner in SUPPORTED
    for outer in SUPPORTED
    for collective in SUPPORTED[inner]
    if collective in SUPPORTED[outer] and collective != "send"
]


def build(algorithm: str, collective: str, ranks: int, chunks: int, per_node: int | None = None) -> MessageSchedule:
    switches = [f"s{i}" for i in range(count_switches(collective, algorithm, ranks, per_node))]
    return build_message_schedule(
        collective,
        ranks,
        0.0 if collective == "barrier" else 1000.0,
        algorithm=algorithm,
        chunks=chunks,
        ranks_per_node=per_node,
        switches=switches,
    )


@st.composite
def flat_schedules(draw: st.DrawFn) -> MessageSchedule:
    algorithm, collective = draw(st.sampled_from(FLAT))
    ranks = 2 if collective == "send" else draw(st.integers(1, 9))
    return build(algorithm, collective, ranks, draw(st.integers(1, 4)))


@st.composite
def nested_schedules(draw: st.DrawFn) -> MessageSchedule:
    algorithm, collective = draw(st.sampled_from(NESTED))
    nodes, per_node = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return build(algorithm, collective, nodes * per_node, draw(st.integers(1, 3)), per_node)


def at_random(seed: int) -> Pick:
    chance = random.Random(seed)
    return lambda possible: chance.randrange(len(possible))


@settings(max_examples=count_examples(300))
@given(st.one_of(flat_schedules(), nested_schedules()), st.integers(0, 2**32), st.booleans())
def test_any_order_that_respects_the_waits_keeps_the_promise(
    schedule: MessageSchedule, seed: int, ordered: bool
) -> None:
    run = order_connections(schedule) if ordered else schedule
    check_promise(schedule, replay_schedule(run, at_random(seed)))


@pytest.mark.parametrize(("algorithm", "collective"), FLAT)
def test_first_come_last_come_and_random_orders_of_every_pair(algorithm: str, collective: str) -> None:
    for ranks in (2,) if collective == "send" else (2, 3, 4, 5, 6, 8):
        schedule = build(algorithm, collective, ranks, 2)
        for pick in (lambda rows: 0, lambda rows: len(rows) - 1, at_random(ranks)):
            check_promise(schedule, replay_schedule(schedule, pick))


@pytest.mark.parametrize("collective", sorted({collective for _, collective in NESTED}))
def test_every_hierarchy_keeps_the_promise(collective: str) -> None:
    for algorithm in (algorithm for algorithm, known in NESTED if known == collective):
        schedule = build(algorithm, collective, 6, 2, per_node=2)
        check_promise(schedule, replay_schedule(schedule, at_random(6)))


def drop_wait(schedule: MessageSchedule, place: int) -> MessageSchedule:
    rows = np.repeat(np.arange(len(schedule)), np.diff(schedule.after_first))
    keep = np.arange(len(rows)) != place
    first, after = pack_waits(rows[keep].astype(np.int64), schedule.after[keep].astype(np.int64), len(schedule))
    return structs.replace(schedule, after_first=first, after=after)


def implies(schedule: MessageSchedule, row: int, wanted: int) -> bool:
    """Whether a row still waits for another, through others."""
    first, todo, seen = schedule.after_first, [row], set()
    while todo:
        at = todo.pop()
        for other in schedule.after[first[at] : first[at + 1]].tolist():
            if other == wanted:
                return True
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return False


@pytest.mark.parametrize(("algorithm", "collective"), FLAT)
def test_no_wait_can_be_left_out(algorithm: str, collective: str) -> None:
    """Without any one of them, an order that puts off what was waited for goes wrong."""
    schedule = build(algorithm, collective, 2 if collective == "send" else 5, 1)
    rows = np.repeat(np.arange(len(schedule)), np.diff(schedule.after_first))
    for place in range(0, len(rows), max(1, len(rows) // 25)):
        row, late = int(rows[place]), int(schedule.after[place])
        loose = drop_wait(schedule, place)
        if implies(loose, row, late):
            continue

        late_rows = {late}
        if schedule.joins[late]:  # a join brings nothing itself: put off what it stands for
            begin, end = schedule.after_first[late : late + 2]
            late_rows = set(schedule.after[begin:end].tolist())

        def put_off(possible: Sequence[int], late: frozenset[int] = frozenset(late_rows)) -> int:
            return next((i for i, other in enumerate(possible) if other not in late), 0)

        with pytest.raises(SimulationError):
            check_promise(loose, replay_schedule(loose, put_off))


@pytest.mark.parametrize(("algorithm", "collective"), FLAT)
def test_no_message_can_be_left_out(algorithm: str, collective: str) -> None:
    """The proof is one: blocks that lose their way on a message are missed."""
    schedule = build(algorithm, collective, 2 if collective == "send" else 4, 1)
    contents = schedule.contents
    for row in np.flatnonzero(~schedule.joins).tolist():
        lengths = np.diff(contents.first)
        keep = np.repeat(np.arange(len(schedule)) != row, lengths)
        lengths[row] = 0
        first = np.concatenate(([0], np.cumsum(lengths)))
        lost = structs.replace(contents, first=first, block=contents.block[keep])
        broken = structs.replace(schedule, contents=lost)
        with pytest.raises(SimulationError):
            check_promise(broken, replay_schedule(broken, lambda rows: 0))


def test_a_contribution_that_is_added_twice_and_a_ring_of_waits_are_found() -> None:
    schedule = build("binary_tree", "all_reduce", 4, 1)
    target = schedule.target.copy()
    target[target == 0] = 1  # a sum takes another way and comes back
    with pytest.raises(SimulationError):
        wrong = structs.replace(schedule, target=target)
        check_promise(wrong, replay_schedule(wrong, lambda rows: 0))
    row = np.arange(len(schedule), dtype=np.int64)
    first, after = pack_waits(row, np.roll(row, 1), len(row))
    endless = structs.replace(schedule, after_first=first, after=after)
    with pytest.raises(SimulationError, match="wait for ever"):
        replay_schedule(endless, lambda rows: 0)
    with pytest.raises(SimulationError, match="wait for ever"):
        execute_schedule(endless, lambda source, target, size: 1.0)


def test_blocks_that_do_not_make_up_the_message_are_found() -> None:
    schedule = build("ring", "all_gather", 4, 1)
    holdings = replay_schedule(schedule, lambda rows: 0)
    for broken in (structs.replace(schedule, message_bytes=999.0), structs.replace(schedule, collective="all_reduce")):
        with pytest.raises(SimulationError, match="blocks"):
            check_promise(broken, holdings)


@settings(max_examples=count_examples(60))
@given(st.one_of(flat_schedules(), nested_schedules()), st.integers(1, 100), st.integers(1, 100))
def test_one_thing_at_a_time_is_never_faster_than_the_longest_chain(
    schedule: MessageSchedule, latency: int, slowness: int
) -> None:
    def cost(source: int, target: int, size: float) -> float:
        return latency + slowness * size

    ends = np.zeros(len(schedule))
    for row in range(len(schedule)):
        before = schedule.after[schedule.after_first[row] : schedule.after_first[row + 1]]
        spent = 0.0 if schedule.joins[row] else cost(0, 0, float(schedule.size_bytes[row]))
        ends[row] = ends[before].max(initial=0.0) + spent
    chain = ends.max(initial=0.0) * (1 - 1e-9)
    wirings: tuple[Wiring, Wiring] = ("links", "ports")
    assert all(chain <= execute_schedule(schedule, cost, wiring) for wiring in wirings)
