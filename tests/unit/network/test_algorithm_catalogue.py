"""Which algorithm does which collective, and what is refused."""

import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.collectives.model import COLLECTIVES as MEASURED
from trioflow.network.algorithms.catalogue import (
    ALGORITHMS,
    SUPPORTED,
    build_schedule,
    choose_algorithm,
    count_switches,
)
from trioflow.network.algorithms.pattern import WITH_BARRIER


def test_every_measured_collective_and_the_barrier_can_be_built() -> None:
    assert set(WITH_BARRIER) == {*MEASURED, "barrier"}
    for collective in WITH_BARRIER:
        schedule = build_schedule(collective, 2, 0 if collective == "barrier" else 8)
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
            build_schedule(collective, 2, 0 if collective == "barrier" else 8, algorithm=algorithm)
        text = str(caught.value)
        assert text.startswith(f"{algorithm} does not do {collective}")
        for known in SUPPORTED[algorithm]:
            assert known in text
        assert "direct" in text, "which algorithms do it"


@pytest.mark.parametrize(
    ("collective", "algorithm", "ranks", "per_node", "words"),
    [
        ("all_redude", None, 4, None, "unknown collective 'all_redude'; use one of all_reduce"),
        (
            "all_reduce",
            "rign",
            4,
            None,
            r"unknown algorithm 'rign'; did you mean ring\? use one of ring",
        ),
        ("all_reduce", "hierarchical:ring", 4, 2, "write hierarchical:INNER\\+OUTER"),
        ("all_reduce", "hierarchical:ring+rign", 4, 2, "write hierarchical:INNER\\+OUTER"),
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
        build_schedule(**(usual | arguments))  # type: ignore[arg-type]


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
    schedule = build_schedule(
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
    schedule = build_schedule("all_reduce", [7, 3, 5], 9)
    assert schedule.endpoints == (7, 3, 5) and schedule.ranks == 3
    assert {(int(a), int(b)) for a, b in zip(schedule.source, schedule.target, strict=True)} == {
        (0, 1),
        (1, 2),
        (2, 0),
    }
    for algorithm in SUPPORTED:
        assert len(build_schedule("all_reduce", [4], 9, algorithm=algorithm)) == 0


def test_hierarchical_takes_no_inner_level_that_cannot_give_back(monkeypatch):
    """An all_reduce inside a node would be added twice: it has to reduce and hand out again."""
    monkeypatch.setitem(SUPPORTED, "whole", ("all_reduce",))
    with pytest.raises(
        InputError, match="whole inside a node does neither reduce_scatter nor both"
    ):
        choose_algorithm("all_reduce", "hierarchical:whole+ring", 8, 4)
    for able in (("all_reduce", "reduce_scatter"), ("all_reduce", "reduce", "broadcast")):
        monkeypatch.setitem(SUPPORTED, "whole", able)
        name = "hierarchical:whole+ring"
        assert choose_algorithm("all_reduce", name, 8, 4) == name
