"""Closed forms against the messages themselves, executed one by one.

Which algorithm does which collective, and what is refused.

Shapes of the message tables: waits, steps, bytes, trees, memory.
"""

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from msgspec import structs
from oracles.closed_form import closed_form_s
from oracles.replay import Wiring, execute_schedule
from trioflow.base.errors import InputError
from trioflow.costmodel.collectives.model import COLLECTIVES as MEASURED
from trioflow.costmodel.collectives.model import wire_factor
from trioflow.network.algorithms.builders import binary_parents, build_ring, count_levels, second_binary_parents
from trioflow.network.algorithms.catalogue import (
    ALGORITHMS,
    SUPPORTED,
    build_message_schedule,
    choose_algorithm,
    count_switches,
    list_algorithm_words,
    read_algorithms,
    spell_algorithm,
)
from trioflow.network.algorithms.pattern import WITH_BARRIER, MessageSchedule, assemble, order_connections

PAIRS = [(name, known) for name, collectives in SUPPORTED.items() for known in collectives]
BLOCK_BYTES = 7.0
RANKS = (2, 3, 4, 5, 6, 7, 8, 12)
LATENCIES = (3.0, 100.0)
ONLY_LINKS = {"bidirectional_ring", "binary_tree", "double_binary_tree"}


def build(collective: str, ranks: int, algorithm: str, chunks: int, per_node: int | None = None) -> MessageSchedule:
    """A schedule whose blocks are whole bytes, so that times are exact."""
    switches = [f"s{i}" for i in range(count_switches(collective, algorithm, ranks, per_node))]

    def of(size: float) -> MessageSchedule:
        return build_message_schedule(
            collective, ranks, size, algorithm=algorithm, chunks=chunks, ranks_per_node=per_node, switches=switches
        )

    if collective == "barrier":
        return of(0)
    return of(BLOCK_BYTES / of(1.0).contents.block_bytes)


def duration(latency: float) -> Callable[[int, int, float], float]:
    return lambda source, target, size: latency + size


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("wiring", ["links", "ports"])
@pytest.mark.parametrize(("algorithm", "collective"), PAIRS)
def test_every_formula_is_what_its_messages_take(algorithm: str, collective: str, wiring: Wiring, chunks: int) -> None:
    for ranks, latency in itertools.product((2,) if collective == "send" else RANKS, LATENCIES):
        schedule = build(collective, ranks, algorithm, chunks)
        formula = partial(
            closed_form_s,
            collective,
            ranks,
            schedule.message_bytes,
            latency,
            1.0,
            algorithm=algorithm,
            chunks=chunks,
            wiring=wiring,
        )
        if not has_formula(algorithm, collective, ranks, chunks, wiring):
            with pytest.raises(InputError, match="no exact formula"):
                formula()
            continue
        assert execute_schedule(schedule, duration(latency), wiring) == pytest.approx(formula())
        if wiring == "links":
            ordered = order_connections(schedule)
            assert execute_schedule(ordered, duration(latency)) == pytest.approx(formula())


def has_formula(algorithm: str, collective: str, ranks: int, chunks: int, wiring: Wiring) -> bool:
    """Which cases the module says it covers."""
    if collective == "barrier":
        chunks = 1
    ports, whole = wiring == "ports", ranks & (ranks - 1) == 0
    both_ways = collective in ("all_reduce", "barrier")
    if algorithm == "halving_doubling":
        if collective in ("broadcast", "reduce"):
            return not ports or chunks == 1
        folds = collective in ("all_reduce", "scatter", "gather") and not whole
        return chunks == 1 and not (ports and folds)
    if algorithm == "chain":
        return not (ports and both_ways and chunks > 1)
    if algorithm == "bidirectional_ring" and ranks == 2:
        return True
    return not (ports and algorithm in ONLY_LINKS)


HIERARCHIES = [
    (inner, outer, collective)
    for inner, outer in itertools.product(SUPPORTED, SUPPORTED)
    for collective in SUPPORTED[inner]
    if collective in SUPPORTED[outer] and collective != "send"
]


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 3)])
def test_a_hierarchy_takes_the_sum_of_its_phases(nodes: int, per_node: int) -> None:
    ranks = nodes * per_node
    for inner, outer, collective in HIERARCHIES:
        algorithm = f"hierarchical:{inner}+{outer}"
        schedule = build(collective, ranks, algorithm, 1, per_node)
        node_switches = nodes if inner == "in_network" else 0

        def cost(source: int, target: int, size: float, node_switches: int = node_switches) -> float:
            far = max(source, target)
            same_node = source // per_node == target // per_node and far < ranks
            inside = same_node or ranks <= far < ranks + node_switches
            return 3.0 + size if inside else 10.0 + 4.0 * size

        expected = closed_form_s(
            collective,
            ranks,
            schedule.message_bytes,
            3.0,
            1.0,
            algorithm=algorithm,
            ranks_per_node=per_node,
            outer_latency_s=10.0,
            outer_bandwidth_bytes_per_s=0.25,
        )
        assert execute_schedule(schedule, cost) == pytest.approx(expected), algorithm


def test_chunks_let_the_phases_of_a_hierarchy_overlap() -> None:
    """NCCL's tree: chains in the nodes, two trees between; cut small, the pipeline fills."""
    times = []
    for chunks in (1, 8):
        schedule = build_message_schedule(
            "all_reduce", 16, 1e6, algorithm="hierarchical:chain+double_binary_tree", ranks_per_node=4, chunks=chunks
        )
        times.append(execute_schedule(schedule, duration(1.0)))
    assert times[1] < 0.4 * times[0]


def test_a_hierarchy_without_a_formula_is_refused_and_one_level_is_the_flat_one() -> None:
    def take(ranks_per_node: int, chunks: int = 1, wiring: Wiring = "links") -> float:
        return closed_form_s(
            "all_reduce",
            8,
            80.0,
            1.0,
            2.0,
            algorithm="hierarchical",
            ranks_per_node=ranks_per_node,
            chunks=chunks,
            wiring=wiring,
            outer_latency_s=5.0,
            outer_bandwidth_bytes_per_s=1.0,
        )

    for bad in ({"chunks": 2}, {"wiring": "ports"}):
        with pytest.raises(InputError, match="no exact formula"):
            take(4, **bad)  # type: ignore[arg-type]
    assert take(8) == 14 * (1 + 10 / 2)
    assert take(1) == 14 * (5 + 10 / 1)


def test_textbook_times() -> None:
    """Written out by hand: 8 ranks, 80 bytes, latency 1, bandwidth 2."""

    def take(collective: str, algorithm: str, chunks: int = 1) -> float:
        return closed_form_s(collective, 8, 80.0, 1.0, 2.0, algorithm=algorithm, chunks=chunks)

    assert take("all_reduce", "ring") == 2 * 7 * (1 + 5)
    assert take("all_reduce", "bidirectional_ring") == 2 * 7 * (1 + 2.5)
    assert take("all_reduce", "halving_doubling") == 2 * 3 * 1 + 2 * 80 * 7 / 8 / 2
    assert take("all_reduce", "binary_tree") == 2 * 3 * (1 + 40)
    assert take("all_reduce", "binary_tree", chunks=10) == (2 * 3 + 9) * (1 + 4)
    assert take("all_reduce", "double_binary_tree", chunks=10) == (2 * 3 + 9) * (1 + 2)
    assert take("all_reduce", "direct") == 2 * (1 + 5)
    assert take("all_reduce", "in_network") == 2 * (1 + 40)
    assert take("broadcast", "ring", chunks=4) == (7 + 3) * (1 + 10)
    assert take("all_to_all", "direct") == 1 + 5


@pytest.mark.parametrize(("latency", "bandwidth"), [(-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_impossible_links_are_refused(latency: float, bandwidth: float) -> None:
    with pytest.raises(InputError, match="a link of"):
        closed_form_s("all_reduce", 4, 1.0, latency, bandwidth)
    with pytest.raises(InputError, match="not negative"):
        closed_form_s("all_reduce", 4, -1.0, 0.0, 1.0)


def test_every_measured_collective_and_the_barrier_can_be_built() -> None:
    assert set(WITH_BARRIER) == {*MEASURED, "barrier"}
    for collective in WITH_BARRIER:
        schedule = build_message_schedule(collective, 2, 0 if collective == "barrier" else 8)
        assert len(schedule) > 0 and schedule.algorithm == choose_algorithm(collective, None, 2)


def test_the_default_is_the_ring_and_plain_sends_where_each_pair_has_its_own_data() -> None:
    chosen = {collective: choose_algorithm(collective, None, 2) for collective in WITH_BARRIER}
    plain = {"scatter", "gather", "all_to_all", "send"}
    assert {name for name, algorithm in chosen.items() if algorithm == "direct"} == plain
    assert {chosen[name] for name in set(WITH_BARRIER) - plain} == {"ring"}


@pytest.mark.parametrize("algorithm", SUPPORTED)
def test_an_unsupported_pair_is_refused_with_what_is_supported(algorithm: str) -> None:
    for collective in set(WITH_BARRIER) - set(SUPPORTED[algorithm]):
        with pytest.raises(InputError) as caught:
            build_message_schedule(collective, 2, 0 if collective == "barrier" else 8, algorithm=algorithm)
        text = str(caught.value)
        assert text.startswith(f"{algorithm} does not do {collective}")
        for known in SUPPORTED[algorithm]:
            assert known in text
        assert "direct" in text, "which algorithms do it"


@pytest.mark.parametrize(
    ("collective", "algorithm", "ranks", "per_node", "words"),
    [
        ("all_redude", None, 4, None, "unknown collective 'all_redude'; use one of all_reduce"),
        ("all_reduce", "rign", 4, None, r"unknown algorithm 'rign'; did you mean ring\? use one of ring"),
        ("all_reduce", "hierarchical:ring", 4, 2, "or hierarchical:INNER\\+OUTER"),
        ("all_reduce", "hierarchical:ring+rign", 4, 2, "or hierarchical:INNER\\+OUTER"),
        ("all_reduce", "hierarchical", 4, None, "4 ranks do not fill nodes of None"),
        ("all_reduce", "hierarchical", 6, 4, "6 ranks do not fill nodes of 4"),
        ("all_to_all", "hierarchical:ring+halving_doubling", 4, 2, "halving_doubling does not do"),
        ("send", "hierarchical", 2, 1, "hierarchical does not do send; for send use direct"),
        ("send", None, 3, None, "send with 3 ranks; give it two ranks"),
        ("all_reduce", None, 0, None, "give it at least one rank"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(
    collective: str, algorithm: str | None, ranks: int, per_node: int | None, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        choose_algorithm(collective, algorithm, ranks, per_node)


def test_a_hierarchy_of_one_level_is_that_level() -> None:
    def choose(per_node: int) -> str:
        return choose_algorithm("all_reduce", "hierarchical:direct+binary_tree", 8, per_node)

    assert choose(8) == "direct"
    assert choose(1) == "binary_tree"
    assert choose(4) == "hierarchical:direct+binary_tree"
    assert choose_algorithm("all_to_all", "hierarchical", 8, 2) == "hierarchical:direct+direct"
    assert "hierarchical" in ALGORITHMS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"group": [0, 1, 0]}, "a rank comes twice"),
        ({"message_bytes": -1}, "not negative"),
        ({"message_bytes": float("nan")}, "not negative"),
        ({"message_bytes": float("inf")}, "not negative"),
        ({"chunks": 0}, "at least one"),
        ({"collective": "barrier", "message_bytes": 4}, "a barrier moves no data"),
        ({"algorithm": "in_network"}, "name 1 different switches"),
        ({"switches": ["switch"]}, "it takes no switches"),
        ({"group": 1 << 15}, "more than .* fewer ranks"),
        ({"collective": "all_to_all", "algorithm": "ring", "group": 1 << 10}, "fewer ranks"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, object], words: str) -> None:
    usual = {"collective": "all_reduce", "group": 4, "message_bytes": 8}
    with pytest.raises(InputError, match=words):
        build_message_schedule(**(usual | arguments))  # type: ignore[arg-type]


def test_switches_are_one_per_node_and_one_between() -> None:
    def count(algorithm: str, ranks: int = 12) -> int:
        return count_switches("all_reduce", algorithm, ranks, 4)

    assert count("ring") == 0
    assert count("in_network") == 1
    assert count("in_network", ranks=1) == 0
    assert count("hierarchical:in_network+ring") == 3
    assert count("hierarchical:ring+in_network") == 1
    assert count("hierarchical:in_network+in_network") == 4


def test_inner_switches_serve_their_own_node_and_the_outer_one_all() -> None:
    schedule = build_message_schedule(
        "all_reduce",
        [10, 11, 20, 21],
        8,
        algorithm="hierarchical:in_network+in_network",
        ranks_per_node=2,
        switches=["a", "b", "top"],
    )
    ends = schedule.endpoints
    moves = ~schedule.joins
    pairs = zip(schedule.source[moves], schedule.target[moves], strict=True)
    partners: dict[object, set[object]] = {}
    for source, target in pairs:
        partners.setdefault(ends[target], set()).add(ends[source])
    assert partners["a"] == {10, 11} and partners["b"] == {20, 21}
    assert partners["top"] == {10, 11, 20, 21}


def test_the_group_says_who_the_members_are_and_a_group_of_one_is_silent() -> None:
    schedule = build_message_schedule("all_reduce", [7, 3, 5], 9)
    assert schedule.endpoints == (7, 3, 5) and schedule.ranks == 3
    assert {(int(a), int(b)) for a, b in zip(schedule.source, schedule.target, strict=True)} == {(0, 1), (1, 2), (2, 0)}
    for algorithm in SUPPORTED:
        assert len(build_message_schedule("all_reduce", [4], 9, algorithm=algorithm)) == 0


def test_hierarchical_takes_no_inner_level_that_cannot_give_back(monkeypatch):
    """An all_reduce inside a node would be added twice: it has to reduce and hand out again."""
    monkeypatch.setitem(SUPPORTED, "whole", ("all_reduce",))
    with pytest.raises(InputError, match="whole inside a node does neither reduce_scatter nor both"):
        choose_algorithm("all_reduce", "hierarchical:whole+ring", 8, 4)
    for able in (("all_reduce", "reduce_scatter"), ("all_reduce", "reduce", "broadcast")):
        monkeypatch.setitem(SUPPORTED, "whole", able)
        name = "hierarchical:whole+ring"
        assert choose_algorithm("all_reduce", name, 8, 4) == name


def test_every_word_that_is_offered_is_understood_and_names_every_algorithm_once() -> None:
    words = list_algorithm_words()
    assert sorted(map(spell_algorithm, words)) == sorted(ALGORITHMS)
    assert {"ring2", "tree", "double-tree", "halving-doubling", "in-network"} < set(words)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("ring", "ring"),
        ("ring2", "bidirectional_ring"),
        ("halving_doubling", "halving_doubling"),
        ("hierarchical", "hierarchical"),
        ("hierarchical:ring2+double-tree", "hierarchical:bidirectional_ring+double_binary_tree"),
    ],
)
def test_short_and_long_names(word: str, name: str) -> None:
    assert spell_algorithm(word) == name


@pytest.mark.parametrize(
    "word",
    [
        "",
        "rings",
        "hierarchical:",
        "hierarchical:ring",
        "hierarchical:ring+star",
        "ring:tree",
        "hierarchical:ring+ring+ring",
    ],
)
def test_other_words_are_refused_with_the_known_ones(word: str) -> None:
    with pytest.raises(InputError, match=r"unknown algorithm .*use one of ring, ring2"):
        spell_algorithm(word)


def test_one_for_all_or_one_each() -> None:
    assert read_algorithms("double-tree") == "double_binary_tree"
    found = read_algorithms("all_reduce=tree, all-gather=direct")
    assert found == {"all_reduce": "binary_tree", "all_gather": "direct"}
    for text, message in (
        ("all_reduce=ring,tree", "'tree' gives no collective an algorithm"),
        ("all_gossip=ring", "'all_gossip=ring' gives no collective an algorithm"),
        ("all_reduce=ring,all_reduce=tree", "all_reduce has two algorithms"),
        ("all_reduce=", "unknown algorithm ''"),
    ):
        with pytest.raises(InputError, match=message):
            read_algorithms(text)


def build_rounds(collective: str, ranks: int, algorithm: str, chunks: int = 1, **rest: object) -> MessageSchedule:
    size = 0 if collective == "barrier" else 5040.0
    switches = ["switch"] if algorithm == "in_network" else []
    return build_message_schedule(
        collective, ranks, size, algorithm=algorithm, chunks=chunks, switches=switches, **rest
    )  # type: ignore[arg-type]


def waits_of(schedule: MessageSchedule, row: int) -> list[int]:
    return schedule.after[schedule.after_first[row] : schedule.after_first[row + 1]].tolist()


def count_depth(schedule: MessageSchedule) -> int:
    """Messages on the longest chain of waits; joins are none."""
    depth = np.zeros(len(schedule), dtype=int)
    for row in range(len(schedule)):
        before = max((depth[other] for other in waits_of(schedule, row)), default=0)
        depth[row] = before + (schedule.source[row] != schedule.target[row])
    return int(depth.max(initial=0))


def sent_bytes(schedule: MessageSchedule) -> np.ndarray:
    return np.bincount(schedule.source, weights=schedule.size_bytes, minlength=len(schedule.endpoints))


def received_bytes(schedule: MessageSchedule) -> np.ndarray:
    return np.bincount(schedule.target, weights=schedule.size_bytes, minlength=len(schedule.endpoints))


@pytest.mark.parametrize(("algorithm", "collective"), PAIRS)
def test_a_message_waits_for_its_data_and_for_nothing_else(algorithm: str, collective: str) -> None:
    """Every wait brings, to where the message leaves, a block that it carries."""
    schedule = build_rounds(collective, 2 if collective == "send" else 6, algorithm, chunks=2)
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
    schedule = build_rounds(collective, 2 if collective == "send" else 5, algorithm, chunks=3)
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
        schedule = build_rounds(collective, ranks, algorithm)
        expected = 5040.0 * wire_factor(collective, ranks)
        assert sent_bytes(schedule) == pytest.approx(np.full(ranks, expected))
        assert received_bytes(schedule) == pytest.approx(np.full(ranks, expected))


@pytest.mark.parametrize("ranks", [3, 6, 7])
def test_folded_ranks_send_their_vector_and_receive_the_result(ranks: int) -> None:
    schedule = build_rounds("all_reduce", ranks, "halving_doubling")
    power = 1 << (ranks.bit_length() - 1)
    halving = 2 * 5040.0 * (power - 1) / power
    folded = ranks - power
    expected = [halving + 5040.0] * folded + [halving] * (power - folded) + [5040.0] * folded
    assert sent_bytes(schedule) == pytest.approx(expected)
    assert received_bytes(schedule) == pytest.approx(expected)


@pytest.mark.parametrize("ranks", range(2, 20))
def test_two_trees_send_no_rank_more_than_twice_the_message(ranks: int) -> None:
    one, two = (build_rounds("all_reduce", ranks, name) for name in ("binary_tree", "double_binary_tree"))
    assert sent_bytes(one).sum() == sent_bytes(two).sum() == 2 * (ranks - 1) * 5040.0
    assert sent_bytes(two).max() <= 2 * 5040.0 and received_bytes(two).max() <= 2 * 5040.0
    if ranks > 6:
        assert sent_bytes(one).max() == 3 * 5040.0


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_a_switch_takes_one_message_from_each_rank_and_returns_one(ranks: int) -> None:
    schedule = build_rounds("all_reduce", ranks, "in_network")
    assert int((~schedule.joins).sum()) == 2 * ranks
    assert sent_bytes(schedule)[:-1] == pytest.approx(np.full(ranks, 5040.0))
    assert sent_bytes(schedule)[-1] == received_bytes(schedule)[-1] == ranks * 5040.0


@pytest.mark.parametrize("algorithm", ["direct", "ring", "halving_doubling"])
def test_roots_and_pairs_move_the_textbook_bytes(algorithm: str) -> None:
    ranks, size = 6, 5040.0
    part = size / ranks
    for collective, ends in (("scatter", sent_bytes), ("gather", received_bytes)):
        assert ends(build_rounds(collective, ranks, algorithm))[0] == pytest.approx(5 * part)
    if algorithm != "halving_doubling":
        hops = {"direct": 1, "ring": 3}[algorithm]  # 1 to 5 hops each, 3 on average
        moved = sent_bytes(build_rounds("all_to_all", ranks, algorithm))
        assert moved == pytest.approx(np.full(ranks, 5 * part * hops))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16])
def test_steps_on_the_longest_chain_are_the_textbooks(ranks: int) -> None:
    def depth(algorithm: str, collective: str = "all_reduce") -> int:
        return count_depth(build_rounds(collective, ranks, algorithm))

    log = (ranks - 1).bit_length()
    assert depth("ring") == depth("chain") == depth("bidirectional_ring") == 2 * (ranks - 1)
    for collective in ("reduce_scatter", "all_gather", "broadcast", "reduce", "scatter", "gather"):
        assert depth("ring", collective) == ranks - 1
    assert depth("binary_tree") == depth("double_binary_tree") == 2 * log
    assert depth("direct") == depth("in_network") == 2
    assert depth("direct", "all_to_all") == depth("direct", "barrier") == 1
    folds = 2 if ranks & (ranks - 1) else 0
    assert depth("halving_doubling") == 2 * (ranks.bit_length() - 1) + folds


def test_a_connection_carries_one_message_after_the_other_and_waits_stay() -> None:
    schedule = build_rounds("all_reduce", 4, "bidirectional_ring", chunks=3)
    ordered = order_connections(schedule)
    last: dict[tuple[int, int, int], int] = {}
    for row in range(len(schedule)):
        key = (int(schedule.source[row]), int(schedule.target[row]), int(schedule.channel[row]))
        expected = set(waits_of(schedule, row)) | ({last[key]} if key in last else set())
        assert set(waits_of(ordered, row)) == expected
        last[key] = row
    assert len(last) == 8


@pytest.mark.parametrize("collective", [name for name in SUPPORTED["ring"] if name not in ("broadcast", "reduce")])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_waits_that_rings_state_are_those_found_from_the_contents(collective: str, chunks: int) -> None:
    pattern = build_ring(collective, 6, chunks)
    assert pattern.previous is not None
    stated, found = (
        assemble(one, "ring", collective, tuple(range(6)), 36.0)
        for one in (pattern, structs.replace(pattern, previous=None))
    )
    assert len(stated) == len(found)
    assert [waits_of(stated, row) for row in range(len(stated))] == [waits_of(found, row) for row in range(len(found))]


@pytest.mark.parametrize(
    ("ranks", "parents"),
    [(2, [-1, 0]), (5, [-1, 2, 4, 2, 0]), (8, [-1, 2, 4, 2, 0, 6, 4, 6]), (10, [-1, 2, 4, 2, 8, 6, 4, 6, 0, 8])],
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


@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_sizes_scale_exactly_by_powers_of_two(factor: float) -> None:
    for algorithm, collective in PAIRS:
        if collective != "barrier":
            ranks = 2 if collective == "send" else 7
            switches = ["s"] if algorithm == "in_network" else []
            sizes = [
                build_message_schedule(collective, ranks, size, algorithm=algorithm, switches=switches).size_bytes
                for size in (1000.0, 1000.0 * factor)
            ]
            assert np.array_equal(sizes[0] * factor, sizes[1])
