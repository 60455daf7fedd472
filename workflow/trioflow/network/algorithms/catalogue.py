"""Which algorithm carries out which collective, how people write it, and the one way to build its messages."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trioflow.base.errors import InputError, suggest
from trioflow.network.algorithms import builders
from trioflow.network.algorithms.pattern import (
    WITH_BARRIER,
    Algorithm,
    MessageSchedule,
    Pattern,
    assemble,
    fill,
    make_messages,
)

REGISTERED: dict[str, Algorithm] = {one.name: one for one in builders.ALGORITHMS}
"""Algorithms by name."""
SUPPORTED = {name: algorithm.collectives for name, algorithm in REGISTERED.items()}
"""Collectives of each algorithm; ``hierarchical`` is made of any two of these."""

HIERARCHICAL = "hierarchical"
ALGORITHMS = (*SUPPORTED, HIERARCHICAL)
DEFAULTS = {name: "direct" if name in ("scatter", "gather", "all_to_all", "send") else "ring" for name in WITH_BARRIER}
"""NCCL's habits: rings, and plain sends where each pair of ranks has data of its own."""


class Levels(NamedTuple):
    """The two algorithms of a hierarchical one."""

    inner: str
    outer: str


def choose_algorithm(collective: str, algorithm: str | None, ranks: int, ranks_per_node: int | None = None) -> str:
    """Return the algorithm that a collective will take, spelt out: of ``SUPPORTED``, or ``hierarchical:INNER+OUTER``.

    By default ring; direct for scatter, gather, all_to_all and send; at both levels of a plain ``hierarchical`` too. In
    one node the inner algorithm is all there is, with one rank a node the outer. Raises InputError when a name is
    unknown, the algorithm does not do the collective, or the ranks do not fill whole nodes.
    """
    if collective not in WITH_BARRIER:
        raise InputError(f"unknown collective {collective!r}", fix=f"use one of {', '.join(WITH_BARRIER)}")
    if ranks < 1 or (collective == "send" and ranks != 2):
        need = "two ranks" if collective == "send" else "at least one rank"
        raise InputError(f"{collective} with {ranks} ranks", fix=f"give it {need}")
    name = DEFAULTS[collective] if algorithm is None else spell_algorithm(algorithm)
    if name.partition(":")[0] != HIERARCHICAL:
        _check_supported(name, collective)
        return name
    levels = _parse_levels(name, collective)
    per_node = _check_nodes(ranks, ranks_per_node)
    if per_node == ranks:
        return levels.inner
    return levels.outer if per_node == 1 else f"{HIERARCHICAL}:{levels.inner}+{levels.outer}"


def split_levels(algorithm: str) -> Levels | None:
    """Return the two algorithms of a spelt-out hierarchical one, None for any other."""
    kind, _, pair = algorithm.partition(":")
    return Levels(*pair.split("+")) if kind == HIERARCHICAL else None


def is_scattered(levels: Levels) -> bool:
    """Return whether nodes share out an all_reduce by parts, or leave it to their first ranks."""
    return "reduce_scatter" in SUPPORTED[levels.inner]


def count_switches(collective: str, algorithm: str | None, ranks: int, ranks_per_node: int | None = None) -> int:
    """Return how many switch names ``build_message_schedule`` needs; parameters as ``choose_algorithm``."""
    name = choose_algorithm(collective, algorithm, ranks, ranks_per_node)
    levels = split_levels(name)
    if levels is None:
        return REGISTERED[name].switches if ranks > 1 else 0
    nodes = ranks // int(ranks_per_node or 1)
    return nodes * REGISTERED[levels.inner].switches + REGISTERED[levels.outer].switches


def build_message_schedule(
    collective: str,
    group: Sequence[int] | int,
    message_bytes: float,
    *,
    algorithm: str | None = None,
    chunks: int = 1,
    ranks_per_node: int | None = None,
    switches: Sequence[str] = (),
) -> MessageSchedule:
    """Return the messages of one collective.

    Raises InputError as ``choose_algorithm``; or when a rank comes twice, a number makes no sense, switches are too few
    or too many, or the table would not fit. ``group``: ranks in ring or tree order, node by node; n stands for 0 to n -
    1. The first is the root, and the sender of a send. ``message_bytes``: the whole result of all_gather and gather,
    the whole input of reduce_scatter and scatter, otherwise one rank's buffer, of which all_to_all sends an equal part
    to each rank [bytes]; 0 for a barrier. ``switches``: nodes that compute: one for in_network; hierarchical, one for
    each node where the inner algorithm is in_network, then one if the outer is.
    """
    ranks = tuple(range(group)) if isinstance(group, int) else tuple(group)
    count = len(ranks)
    if len(set(ranks)) != count:
        raise InputError(f"{collective}: a rank comes twice in the group {list(ranks)}")
    name = choose_algorithm(collective, algorithm, count, ranks_per_node)
    needed = count_switches(collective, algorithm, count, ranks_per_node)
    check_numbers(collective, message_bytes, chunks)
    if len(switches) != needed or len(set(switches)) != len(switches):
        raise InputError(
            f"{name} of {count} ranks with the switches {list(switches)}",
            fix=f"name {needed} different switches" if needed else "it takes no switches",
        )
    pieces = 1 if collective == "barrier" else chunks
    pattern = _build_pattern(name, collective, count, pieces, ranks_per_node)
    return assemble(pattern, name, collective, (*ranks, *switches), float(message_bytes))


def _build_pattern(name: str, collective: str, ranks: int, chunks: int, ranks_per_node: int | None) -> Pattern:
    if ranks == 1:
        none = make_messages([], [], [], np.zeros((0, 1)))
        return Pattern(1, none, fill(1, 0), fill(1, 0), 1)
    levels = split_levels(name)
    if levels is None:
        return REGISTERED[name].build(collective, ranks, chunks)
    per_node = int(ranks_per_node or 1)

    def inner(part: str) -> Pattern:
        return REGISTERED[levels.inner].build(part, per_node, chunks)

    def outer(part: str) -> Pattern:
        return REGISTERED[levels.outer].build(part, ranks // per_node, chunks)

    return builders.build_hierarchical(collective, inner, outer, chunks, is_scattered(levels))


def _parse_levels(name: str, collective: str) -> Levels:
    _, colon, pair = name.partition(":")
    default = DEFAULTS[collective]
    levels = pair.split("+") if colon else [default, default]
    if collective == "send":
        raise InputError("hierarchical does not do send", fix=_suggest(collective))
    for level in levels:
        _check_supported(level, collective)
    known = SUPPORTED[levels[0]]
    if collective == "all_reduce" and "reduce_scatter" not in known and not {"reduce", "broadcast"} <= set(known):
        raise InputError(
            f"hierarchical: {levels[0]} inside a node does neither reduce_scatter nor both reduce and broadcast",
            fix="put an algorithm inside that does, such as ring or tree",
        )
    return Levels(*levels)


def _check_supported(name: str, collective: str) -> None:
    if collective not in SUPPORTED[name]:
        raise InputError(
            f"{name} does not do {collective}, only {', '.join(SUPPORTED[name])}", fix=_suggest(collective)
        )


def _suggest(collective: str) -> str:
    able = [name for name, known in SUPPORTED.items() if collective in known]
    return f"for {collective} use {' or '.join(able)}"


def _check_nodes(ranks: int, ranks_per_node: int | None) -> int:
    if ranks_per_node is None or ranks_per_node < 1 or ranks % ranks_per_node:
        raise InputError(
            f"hierarchical: {ranks} ranks do not fill nodes of {ranks_per_node}",
            fix="give ranks_per_node, a divisor of the ranks",
        )
    return ranks_per_node


def check_numbers(collective: str, message_bytes: float, chunks: int) -> None:
    """Refuse, with InputError, a negative or infinite size, a size of a barrier, or less than one chunk."""
    if not 0 <= message_bytes < math.inf:
        raise InputError(f"{collective} of {message_bytes!r} bytes", fix="give a size that is not negative")
    if collective == "barrier" and message_bytes:
        raise InputError(
            f"a barrier moves no data, but message_bytes is {message_bytes!r}", fix="give 0, or use all_reduce"
        )
    if chunks < 1:
        raise InputError(f"{collective} in {chunks} chunks", fix="give at least one")


Algorithms = str | Mapping[str, str]
"""Algorithm of each collective, or one for all but sends."""

_SHORT = {algorithm.short: name for name, algorithm in REGISTERED.items() if algorithm.short}
"""Short names of algorithms."""


def list_algorithm_words() -> list[str]:
    """Return the words for algorithms, short ones where there are any, as people write them."""
    short = {name: word for word, name in _SHORT.items()}
    return [short.get(name, name).replace("_", "-") for name in (*SUPPORTED, HIERARCHICAL)]


def spell_algorithm(word: str) -> str:
    """Return an algorithm's full name, or ``hierarchical:INNER+OUTER``, from a short or hyphened one; InputError if not."""
    kind, colon, pair = word.strip().replace("-", "_").partition(":")
    if kind == HIERARCHICAL and colon and pair.count("+") == 1:
        return f"{HIERARCHICAL}:{'+'.join(_spell(level, word) for level in pair.split('+'))}"
    if kind == HIERARCHICAL and not colon:
        return HIERARCHICAL
    return _spell(kind if not colon else "", word)


def _spell(name: str, word: str) -> str:
    spelt = _SHORT.get(name, name)
    if spelt not in SUPPORTED:
        raise InputError(
            f"unknown algorithm {word!r}",
            fix=f"{suggest(word, list_algorithm_words())}use one of {', '.join(list_algorithm_words())}, "
            "or hierarchical:INNER+OUTER",
        )
    return spelt


def read_algorithms(text: str) -> Algorithms:
    """Return the algorithms of a text, one for all but sends or ``all_reduce=ring,...``; InputError when unknown or repeated."""
    if "=" not in text:
        return spell_algorithm(text)
    algorithms: dict[str, str] = {}
    for part in text.split(","):
        name, equals, word = part.partition("=")
        collective = name.strip().replace("-", "_")
        if collective not in WITH_BARRIER or not equals:
            raise InputError(
                f"{part.strip()!r} gives no collective an algorithm",
                fix=f"write COLLECTIVE=ALGORITHM with one of {', '.join(WITH_BARRIER)}",
            )
        if collective in algorithms:
            raise InputError(f"{collective} has two algorithms", fix="keep one of them")
        algorithms[collective] = spell_algorithm(word)
    return algorithms
