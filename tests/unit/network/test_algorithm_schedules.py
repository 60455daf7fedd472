"""Shapes of the message tables: waits, steps, bytes, trees, memory."""

from dataclasses import replace

import numpy as np
import pytest
from trioflow.costmodel.collectives.model import wire_factor
from trioflow.network.algorithms.builders import (
    binary_parents,
    build_ring,
    count_levels,
    second_binary_parents,
)
from trioflow.network.algorithms.catalogue import SUPPORTED, build_schedule
from trioflow.network.algorithms.pattern import WITH_BARRIER, Schedule, assemble, order_connections

PAIRS = [(name, known) for name, collectives in SUPPORTED.items() for known in collectives]


def build(collective: str, ranks: int, algorithm: str, chunks: int = 1, **rest: object) -> Schedule:
    size = 0 if collective == "barrier" else 5040.0
    switches = ["switch"] if algorithm == "in_network" else []
    return build_schedule(
        collective, ranks, size, algorithm=algorithm, chunks=chunks, switches=switches, **rest
    )  # type: ignore[arg-type]


def waits_of(schedule: Schedule, row: int) -> list[int]:
    return schedule.after[schedule.after_first[row] : schedule.after_first[row + 1]].tolist()


def count_depth(schedule: Schedule) -> int:
    """Messages on the longest chain of waits; joins are none."""
    depth = np.zeros(len(schedule), dtype=int)
    for row in range(len(schedule)):
        before = max((depth[other] for other in waits_of(schedule, row)), default=0)
        depth[row] = before + (schedule.source[row] != schedule.target[row])
    return int(depth.max(initial=0))


def sent_bytes(schedule: Schedule) -> np.ndarray:
    return np.bincount(
        schedule.source, weights=schedule.size_bytes, minlength=len(schedule.endpoints)
    )


def received_bytes(schedule: Schedule) -> np.ndarray:
    return np.bincount(
        schedule.target, weights=schedule.size_bytes, minlength=len(schedule.endpoints)
    )


@pytest.mark.parametrize(("algorithm", "collective"), PAIRS)
def test_a_message_waits_for_its_data_and_for_nothing_else(algorithm: str, collective: str) -> None:
    """Every wait brings, to where the message leaves, a block that it carries."""
    schedule = build(collective, 2 if collective == "send" else 6, algorithm, chunks=2)
    contents = schedule.contents

    def carried(row: int) -> set[int]:
        return set(contents.block[contents.first[row] : contents.first[row + 1]].tolist())

    for row in range(len(schedule)):
        if schedule.joins[row]:
            assert len(waits_of(schedule, row)) > 1 and not carried(row)
            continue
        for other in waits_of(schedule, row):
            bringers = waits_of(schedule, other) if schedule.joins[other] else [other]
            for bringer in bringers:
                assert bringer < row
                assert schedule.target[bringer] == schedule.source[row]
                assert carried(bringer) & carried(row)


@pytest.mark.parametrize(("algorithm", "collective"), PAIRS)
def test_sizes_are_those_of_the_contents(algorithm: str, collective: str) -> None:
    schedule = build(collective, 2 if collective == "send" else 5, algorithm, chunks=3)
    counts = np.diff(schedule.contents.first)
    assert np.array_equal(schedule.size_bytes, counts * schedule.contents.block_bytes)
    assert np.array_equal(counts == 0, schedule.joins)
    assert np.all(np.diff(schedule.step) >= 0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 13])
@pytest.mark.parametrize("algorithm", ["ring", "bidirectional_ring", "direct", "halving_doubling"])
def test_every_rank_sends_and_hears_the_least_that_is_possible(algorithm: str, ranks: int) -> None:
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        if algorithm == "halving_doubling" and collective == "all_reduce" and ranks & (ranks - 1):
            continue  # folds, and so sends more
        schedule = build(collective, ranks, algorithm)
        expected = 5040.0 * wire_factor(collective, ranks)
        assert sent_bytes(schedule) == pytest.approx(np.full(ranks, expected))
        assert received_bytes(schedule) == pytest.approx(np.full(ranks, expected))


@pytest.mark.parametrize("ranks", [3, 6, 7])
def test_folded_ranks_send_their_vector_and_receive_the_result(ranks: int) -> None:
    schedule = build("all_reduce", ranks, "halving_doubling")
    power = 1 << (ranks.bit_length() - 1)
    halving = 2 * 5040.0 * (power - 1) / power
    folded = ranks - power
    expected = [halving + 5040.0] * folded + [halving] * (power - folded) + [5040.0] * folded
    assert sent_bytes(schedule) == pytest.approx(expected)
    assert received_bytes(schedule) == pytest.approx(expected)


@pytest.mark.parametrize("ranks", range(2, 20))
def test_two_trees_send_no_rank_more_than_twice_the_message(ranks: int) -> None:
    one, two = (build("all_reduce", ranks, name) for name in ("binary_tree", "double_binary_tree"))
    assert sent_bytes(one).sum() == sent_bytes(two).sum() == 2 * (ranks - 1) * 5040.0
    assert sent_bytes(two).max() <= 2 * 5040.0 and received_bytes(two).max() <= 2 * 5040.0
    if ranks > 6:
        assert sent_bytes(one).max() == 3 * 5040.0


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_a_switch_takes_one_message_from_each_rank_and_returns_one(ranks: int) -> None:
    schedule = build("all_reduce", ranks, "in_network")
    assert int((~schedule.joins).sum()) == 2 * ranks
    assert sent_bytes(schedule)[:-1] == pytest.approx(np.full(ranks, 5040.0))
    assert sent_bytes(schedule)[-1] == received_bytes(schedule)[-1] == ranks * 5040.0


@pytest.mark.parametrize("algorithm", ["direct", "ring", "halving_doubling"])
def test_roots_and_pairs_move_the_textbook_bytes(algorithm: str) -> None:
    ranks, size = 6, 5040.0
    part = size / ranks
    for collective, ends in (("scatter", sent_bytes), ("gather", received_bytes)):
        assert ends(build(collective, ranks, algorithm))[0] == pytest.approx(5 * part)
    if algorithm != "halving_doubling":
        hops = {"direct": 1, "ring": 3}[algorithm]  # 1 to 5 hops each, 3 on average
        moved = sent_bytes(build("all_to_all", ranks, algorithm))
        assert moved == pytest.approx(np.full(ranks, 5 * part * hops))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16])
def test_steps_on_the_longest_chain_are_the_textbooks(ranks: int) -> None:
    def depth(algorithm: str, collective: str = "all_reduce") -> int:
        return count_depth(build(collective, ranks, algorithm))

    log = (ranks - 1).bit_length()
    assert depth("ring") == depth("chain") == depth("bidirectional_ring") == 2 * (ranks - 1)
    for collective in ("reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather"):
        assert depth("ring", collective) == ranks - 1
    assert depth("binary_tree") == depth("double_binary_tree") == 2 * log
    assert depth("direct") == depth("in_network") == 2
    assert depth("direct", "all_to_all") == depth("direct", "barrier") == 1
    folds = 2 if ranks & (ranks - 1) else 0
    assert depth("halving_doubling") == 2 * (ranks.bit_length() - 1) + folds


def test_chunks_of_a_chain_overlap() -> None:
    schedule = order_connections(build("broadcast", 5, "ring", chunks=7))
    assert count_depth(schedule) == (5 - 1) + (7 - 1)
    assert count_depth(build("broadcast", 5, "ring", chunks=7)) == 5 - 1


def test_a_connection_carries_one_message_after_the_other_and_waits_stay() -> None:
    schedule = build("all_reduce", 4, "bidirectional_ring", chunks=3)
    ordered = order_connections(schedule)
    last: dict[tuple[int, int, int], int] = {}
    for row in range(len(schedule)):
        key = (int(schedule.source[row]), int(schedule.target[row]), int(schedule.channel[row]))
        expected = set(waits_of(schedule, row)) | ({last[key]} if key in last else set())
        assert set(waits_of(ordered, row)) == expected
        last[key] = row
    assert len(last) == 8


@pytest.mark.parametrize(
    "collective", [name for name in SUPPORTED["ring"] if name not in ("broadcast", "reduce")]
)
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_waits_that_rings_state_are_those_found_from_the_contents(
    collective: str, chunks: int
) -> None:
    pattern = build_ring(collective, 6, chunks)
    assert pattern.previous is not None
    stated, found = (
        assemble(one, "ring", collective, tuple(range(6)), 36.0)
        for one in (pattern, replace(pattern, previous=None))
    )
    assert len(stated) == len(found)
    assert [waits_of(stated, row) for row in range(len(stated))] == [
        waits_of(found, row) for row in range(len(found))
    ]


@pytest.mark.parametrize(
    ("ranks", "parents"),
    [
        (2, [-1, 0]),
        (5, [-1, 2, 4, 2, 0]),
        (8, [-1, 2, 4, 2, 0, 6, 4, 6]),
        (10, [-1, 2, 4, 2, 8, 6, 4, 6, 0, 8]),
    ],
)
def test_the_binary_tree_is_nccls(ranks: int, parents: list[int]) -> None:
    assert binary_parents(ranks).tolist() == parents


@pytest.mark.parametrize("ranks", range(1, 70))
def test_the_two_trees_are_shallow_and_share_no_inner_rank(ranks: int) -> None:
    first, second = binary_parents(ranks), second_binary_parents(ranks)
    inner = []
    for parent in (first, second):
        assert int(count_levels(parent).max()) == (ranks - 1).bit_length()
        children = np.bincount(parent[parent >= 0], minlength=ranks)
        assert children.max(initial=0) <= 2
        inner.append(set(np.flatnonzero(children == 2)))
    assert not inner[0] & inner[1], "a rank would send up to three times its half twice"


def test_a_ring_of_1024_fits_in_a_hundred_megabytes_and_waits_once_per_message() -> None:
    schedule = build_schedule("all_reduce", 1024, 1e8, algorithm="ring")
    assert len(schedule) == 2 * 1024 * 1023 == 2_095_104
    assert len(schedule.after) == len(schedule) - 1024
    assert schedule.nbytes < 100e6
    assert schedule.size_bytes.sum() == pytest.approx(1e8 * 2 * 1023)


def test_waits_grow_with_the_messages_because_of_joins() -> None:
    schedule = build("all_reduce", 64, "direct")
    assert int(schedule.joins.sum()) == 64
    assert len(schedule.after) == 2 * 64 * 63, "64 * 63 * 63 more without joins"


@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_sizes_scale_exactly_by_powers_of_two(factor: float) -> None:
    for algorithm, collective in PAIRS:
        if collective != "barrier":
            ranks = 2 if collective == "send" else 7
            switches = ["s"] if algorithm == "in_network" else []
            sizes = [
                build_schedule(
                    collective, ranks, size, algorithm=algorithm, switches=switches
                ).size_bytes
                for size in (1000.0, 1000.0 * factor)
            ]
            assert np.array_equal(sizes[0] * factor, sizes[1])


def test_the_list_of_pairs_is_not_empty_for_any_collective() -> None:
    assert {collective for _, collective in PAIRS} == set(WITH_BARRIER)
