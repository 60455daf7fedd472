import pytest
from trioflow.base.errors import InputError
from trioflow.network.algorithms.catalogue import (
    ALGORITHMS,
    list_algorithm_words,
    read_algorithms,
    spell_algorithm,
)


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
