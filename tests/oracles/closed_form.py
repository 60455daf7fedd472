"""What each algorithm takes on an idle network, written as a formula.

A message of s bytes takes tau(s) = latency + s / bandwidth, links are full
duplex and carry one message after the other. S is the collective's size, n
its ranks, c its chunks. Two wirings:

links
    Every rank has a link of its own to every other (for each channel).
ports
    Every rank has one link to a switch: one message out and one in at a time.
"""

import math
from collections.abc import Callable

from trioflow.base.errors import InputError
from trioflow.network.algorithms.builders import largest_power
from trioflow.network.algorithms.catalogue import (
    HIERARCHICAL,
    Levels,
    check_numbers,
    choose_algorithm,
    is_scattered,
    split_levels,
)

from oracles.replay import Wiring

Tau = Callable[[float], float]


def closed_form_s(
    collective: str,
    ranks: int,
    message_bytes: float,
    latency_s: float,
    bandwidth_bytes_per_s: float,
    *,
    algorithm: str | None = None,
    chunks: int = 1,
    wiring: Wiring = "links",
    ranks_per_node: int | None = None,
    outer_latency_s: float | None = None,
    outer_bandwidth_bytes_per_s: float | None = None,
) -> float:
    """Return the time of one collective that nothing disturbs [s].

    Parameters
    ----------
    collective, message_bytes, algorithm, chunks, ranks_per_node
        As for ``catalogue.build_message_schedule``.
    ranks : int
        Members of the group.
    latency_s : float
        Of one message [s].
    bandwidth_bytes_per_s : float
        Of one link and direction [bytes/s].
    wiring : {"links", "ports"}
        See the module.
    outer_latency_s, outer_bandwidth_bytes_per_s : float, optional
        Between nodes, for hierarchical algorithms [s], [bytes/s]; as within
        when left out.

    Raises
    ------
    InputError
        As ``choose_algorithm``; or when this algorithm has no exact formula
        for these chunks or this wiring.
    """
    name = choose_algorithm(collective, algorithm, ranks, ranks_per_node)
    check_numbers(collective, message_bytes, chunks)
    pieces = 1 if collective == "barrier" else chunks
    tau = _make_tau(latency_s, bandwidth_bytes_per_s)
    outer_tau = _make_tau(
        latency_s if outer_latency_s is None else outer_latency_s,
        bandwidth_bytes_per_s if outer_bandwidth_bytes_per_s is None else outer_bandwidth_bytes_per_s,
    )
    levels = split_levels(name)
    if levels is None:
        between = (algorithm or "").startswith(HIERARCHICAL) and ranks_per_node == 1
        cost = outer_tau if between else tau  # a hierarchy of single ranks has no links inside
        return _time(name, collective, ranks, message_bytes, pieces, cost, wiring)
    if pieces != 1 or wiring != "links":
        raise _refuse(name, collective, pieces, wiring)
    per_node = int(ranks_per_node or 1)
    return _sum_phases(levels, collective, per_node, ranks // per_node, message_bytes, tau, outer_tau)


def _sum_phases(
    levels: Levels, collective: str, per_node: int, nodes: int, size: float, tau: Tau, outer_tau: Tau
) -> float:
    """Return the time of a hierarchy: the sum of its phases, one chunk, each its part of the data.

    all_reduce over nodes of m ranks: reduce_scatter of S within, all_reduce
    of S / m between, all_gather of S within. reduce_scatter: S within, then
    S / m between; all_gather the reverse. scatter over k nodes: S between,
    then S / k within; gather the reverse. The others move S in both phases.
    """
    total_s = 0.0
    for inside, part, share in _list_phases(collective, per_node, nodes, is_scattered(levels)):
        level, count = (levels.inner, per_node) if inside else (levels.outer, nodes)
        cost = tau if inside else outer_tau
        total_s += _time(level, part, count, size * share, 1, cost, "links")
    return total_s


def _make_tau(latency_s: float, bandwidth_bytes_per_s: float) -> Tau:
    if not (0 <= latency_s < math.inf and bandwidth_bytes_per_s > 0):
        raise InputError(
            f"a link of {latency_s!r} s and {bandwidth_bytes_per_s!r} bytes/s",
            fix="give a latency that is not negative and a bandwidth above zero",
        )
    return lambda size_bytes: latency_s + size_bytes / bandwidth_bytes_per_s


def _list_phases(collective: str, per_node: int, nodes: int, scattered: bool) -> list[tuple[bool, str, float]]:
    """Return the phases of a hierarchy: within a node or not, collective, share of the data."""
    if collective in ("all_reduce", "barrier"):
        if scattered:
            return [(True, "reduce_scatter", 1.0), (False, "all_reduce", 1 / per_node), (True, "all_gather", 1.0)]
        return [(True, "reduce", 1.0), (False, "all_reduce", 1.0), (True, "broadcast", 1.0)]
    inside = 1 / nodes if collective in ("scatter", "gather") else 1.0
    across = 1 / per_node if collective in ("reduce_scatter", "all_gather") else 1.0
    return [(True, collective, inside), (False, collective, across)]


def _time(name: str, collective: str, ranks: int, size: float, chunks: int, tau: Tau, wiring: Wiring) -> float:
    if ranks == 1:
        return 0.0
    found = _FORMULAS[name](collective, ranks, size, chunks, tau, wiring)
    if found is None:
        raise _refuse(name, collective, chunks, wiring)
    return found


def _refuse(name: str, collective: str, chunks: int, wiring: str) -> InputError:
    return InputError(
        f"no exact formula for {name} {collective} in {chunks} chunks on {wiring}",
        fix="build the schedule and simulate it, or ask for one chunk on links",
    )


def _ring(collective: str, n: int, size: float, c: int, tau: Tau, wiring: Wiring) -> float | None:
    """One direction; every rank uses one link out and one in, so both wirings agree.

    all_reduce: a link carries 2 (n - 1) c messages of S / (n c) and never
    idles, since chunk k of a step has arrived before its turn comes.
    reduce_scatter, all_gather: half of that. broadcast, reduce: the last of c
    chunks leaves after c - 1 others and passes n - 1 links. scatter: the
    root's link carries (n - 1) c messages, farthest part first; the part for
    distance d waits for n - 1 - d others and takes d hops, n - 1 in all.
    gather is its mirror. all_to_all: the messages of step t hold n - t parts,
    t = 1 to n - 1: n (n - 1) / 2 parts in all.
    """
    if collective in ("broadcast", "reduce"):
        return (n - 2 + c) * tau(size / c)
    if collective == "all_to_all":
        parts = size / (n * c)
        return c * sum(tau((n - step) * parts) for step in range(1, n))
    phases = 2 if collective in ("all_reduce", "barrier") else 1
    return phases * (n - 1) * c * tau(size / (n * c))


def _bidirectional_ring(collective: str, n: int, size: float, c: int, tau: Tau, wiring: Wiring) -> float | None:
    """Two rings with half of the data each on links of their own; one ring for two ranks."""
    if n == 2:
        return _ring(collective, n, size, c, tau, wiring)
    if wiring == "ports":
        return None  # both directions leave through one port, and take turns
    return _ring(collective, n, size / 2, c, tau, wiring)


def _tree(depth: int, collective: str, size: float, c: int, tau: Tau) -> float:
    """Pipelined tree on links: the last chunk leaves after c - 1 others and passes ``depth`` links.

    all_reduce climbs and comes down: 2 depth links.
    """
    levels = 2 * depth if collective in ("all_reduce", "barrier") else depth
    return (levels + c - 1) * tau(size / c)


def _chain(collective: str, n: int, size: float, c: int, tau: Tau, wiring: Wiring) -> float | None:
    """Tree of depth n - 1. A member has one link up and one down.

    With one port, what comes down and what climbs meet at every member, and
    only one chunk, or one way, keeps the formula.
    """
    both_ways = collective in ("all_reduce", "barrier")
    if wiring == "ports" and both_ways and c > 1:
        return None
    return _tree(n - 1, collective, size, c, tau)


def _binary_tree(collective: str, n: int, size: float, c: int, tau: Tau, wiring: Wiring) -> float | None:
    """NCCL's binary tree is ceil(log2 n) deep."""
    return None if wiring == "ports" else _tree((n - 1).bit_length(), collective, size, c, tau)


def _double_binary_tree(collective: str, n: int, size: float, c: int, tau: Tau, wiring: Wiring) -> float | None:
    """Each tree moves S / 2; a common root adds a level above trees of n - 1 ranks.

    About n / 2 pairs of neighbours are joined by both trees. The formula gives
    each tree (channel) its own link there; one shared link is slower.
    """
    if wiring == "ports":
        return None
    both_ways = collective in ("all_reduce", "barrier")
    depth = (n - 1).bit_length() if both_ways else 1 + (n - 2).bit_length()
    return _tree(depth, collective, size / 2, c, tau)


def _halving_doubling(collective: str, n: int, size: float, c: int, tau: Tau, wiring: Wiring) -> float | None:
    """Exchanges of 1, 2, 4, ... parts with one partner at a time.

    all_gather, reduce_scatter and barrier: see ``_circulate``. all_reduce
    does both on p ranks, the largest power of two, after a fold of S and
    before its unfolding: 2 log2 p latencies and 2 S (p - 1) / p bytes, plus
    2 tau(S) unless p = n. With one port the folded rank holds up partners
    that are not folded: no formula then.
    """
    power = largest_power(n)
    if collective in ("broadcast", "reduce", "scatter", "gather"):
        return _binomial(collective, n, size, c, tau, wiring)
    if c != 1 or (collective == "all_reduce" and wiring == "ports" and power != n):
        return None
    if collective == "all_reduce":
        fold_s = 0.0 if power == n else 2 * tau(size)
        return 2 * _circulate(power, size / power, tau, wiring) + fold_s
    return _circulate(n, size / n, tau, wiring)


def _circulate(n: int, part: float, tau: Tau, wiring: Wiring) -> float:
    """All-gather in steps of min(2^s, n - 2^s) parts, which sum to n - 1; or its reverse.

    With one port the steps follow one another: ceil(log2 n) latencies and
    S (n - 1) / n bytes; so they do on links where n is a power of two. For
    any n on links, the last message holds the nearest m = n - q parts, q the
    largest power of two below n, and leaves when its source has them: after
    ceil(log2 m) steps. The time is its arrival or the end of the other steps.
    """

    def full_steps_s(count: int) -> float:
        return sum(tau((1 << step) * part) for step in range(count))

    below = largest_power(n - 1) if n > 1 else 0
    if not below:
        return 0.0
    steps, last_s = below.bit_length() - 1, tau((n - below) * part)
    if wiring == "ports":
        return full_steps_s(steps) + last_s
    return max(full_steps_s(steps), full_steps_s((n - below - 1).bit_length()) + last_s)


def _binomial(collective: str, n: int, size: float, c: int, tau: Tau, wiring: Wiring) -> float | None:
    """Binomial trees. broadcast, reduce: whole vectors; scatter, gather: parts of subtrees.

    On links a rank is as deep as it has bits set: rank 2^h - 1 is the deepest,
    h = floor(log2 n). With one port, the root's last message, to rank 1, is
    the last of ceil(log2 n). scatter and gather: see ``_binomial_parts``.
    """
    if collective in ("broadcast", "reduce"):
        if wiring == "links":
            return _tree(n.bit_length() - 1, collective, size, c, tau)
        return (n - 1).bit_length() * tau(size) if c == 1 else None
    if c != 1 or (wiring == "ports" and largest_power(n) != n):
        return None
    return _binomial_parts(n, size / n, tau)


def _binomial_parts(n: int, part: float, tau: Tau) -> float:
    """Scatter down a binomial tree on links.

    With q the largest power of two below n, rank q gets n - q parts and
    scatters them in turn; ranks below q are the tree of q. The longer counts.
    For n = q 2: log2 n latencies and S (n - 1) / n bytes, with one port too,
    because the root's own messages take just as long.
    """
    if n == 1:
        return 0.0
    below = largest_power(n - 1)
    far_s = tau((n - below) * part) + _binomial_parts(n - below, part, tau)
    return max(far_s, _binomial_parts(below, part, tau))


def _direct(collective: str, n: int, size: float, c: int, tau: Tau, wiring: Wiring) -> float | None:
    """On links all parts travel at once; a port sends its n - 1 one by one.

    Messages hold S / (n c), those of broadcast, reduce and send S / c.
    all_reduce takes two such steps.
    """
    whole = collective in ("broadcast", "reduce", "send")
    rounds = 1 if wiring == "links" else n - 1
    phases = 2 if collective == "all_reduce" else 1
    return phases * rounds * c * tau(size / c if whole else size / (n * c))


def _in_network(collective: str, n: int, size: float, c: int, tau: Tau, wiring: Wiring) -> float | None:
    """Up and down are a pipeline of two: c messages of the longer kind and one of the other.

    Both hold S / c, but reduce_scatter brings up all parts but one and takes
    one down, all_gather the reverse. A rank has one link either way.
    """
    if collective not in ("reduce_scatter", "all_gather"):
        return (c + 1) * tau(size / c)
    one = size / (n * c)
    return c * tau((n - 1) * one) + tau(one)


_FORMULAS: dict[str, Callable[[str, int, float, int, Tau, Wiring], float | None]] = {
    "ring": _ring,
    "bidirectional_ring": _bidirectional_ring,
    "chain": _chain,
    "binary_tree": _binary_tree,
    "double_binary_tree": _double_binary_tree,
    "halving_doubling": _halving_doubling,
    "direct": _direct,
    "in_network": _in_network,
}
