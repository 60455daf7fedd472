"""How people write algorithms: short names, hyphens, and one for each collective."""

from __future__ import annotations

from collections.abc import Mapping

from trioflow.errors import InputError
from trioflow.network.algorithms.catalogue import HIERARCHICAL, REGISTERED, SUPPORTED
from trioflow.network.algorithms.pattern import COLLECTIVES

Algorithms = str | Mapping[str, str]
"""Algorithm of each collective, or one for all but sends."""

SHORT = {algorithm.short: name for name, algorithm in REGISTERED.items() if algorithm.short}
"""Short names of algorithms."""


def list_algorithm_words() -> list[str]:
    """Return the words for algorithms, short ones where there are any, as people write them."""
    short = {name: word for word, name in SHORT.items()}
    return [short.get(name, name).replace("_", "-") for name in (*SUPPORTED, HIERARCHICAL)]


def spell_algorithm(word: str) -> str:
    """Return an algorithm's full name.

    Parameters
    ----------
    word : str
        A name of ``catalogue.ALGORITHMS`` or of ``SHORT``, with hyphens or
        underscores, or ``hierarchical:INNER+OUTER`` of two such.

    Raises
    ------
    InputError
        When it is unknown.
    """
    kind, colon, pair = word.strip().replace("-", "_").partition(":")
    if kind == HIERARCHICAL and colon and pair.count("+") == 1:
        return f"{HIERARCHICAL}:{'+'.join(_spell(level, word) for level in pair.split('+'))}"
    if kind == HIERARCHICAL and not colon:
        return HIERARCHICAL
    return _spell(kind if not colon else "", word)


def _spell(name: str, word: str) -> str:
    spelt = SHORT.get(name, name)
    if spelt not in SUPPORTED:
        raise InputError(
            f"unknown algorithm {word!r}",
            fix=f"use one of {', '.join(list_algorithm_words())}, or hierarchical:INNER+OUTER",
        )
    return spelt


def read_algorithms(text: str) -> Algorithms:
    """Return what people wrote about algorithms.

    Parameters
    ----------
    text : str
        One algorithm for all collectives but sends, or some of the form
        ``all_reduce=ring,all_gather=direct``.

    Raises
    ------
    InputError
        When a collective or an algorithm is unknown, or a collective comes twice.
    """
    if "=" not in text:
        return spell_algorithm(text)
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, word = part.partition("=")
        collective = name.strip().replace("-", "_")
        if collective not in COLLECTIVES or not equals:
            raise InputError(
                f"{part.strip()!r} gives no collective an algorithm",
                fix=f"write COLLECTIVE=ALGORITHM with one of {', '.join(COLLECTIVES)}",
            )
        if collective in found:
            raise InputError(f"{collective} has two algorithms", fix="keep one of them")
        found[collective] = spell_algorithm(word)
    return found
