"""Rings: neighbours only, with or without links across."""

from __future__ import annotations

from collections.abc import Sequence

from trioflow.errors import PlatformError
from trioflow.hardware.machine import Link
from trioflow.hardware.topologies.wiring import join_pairs, name_ranks


def build_ring(
    ranks: int, bandwidth_bytes_per_s: float, latency_s: float, *, chords: bool = False
) -> list[Link]:
    """Join every rank to its two neighbours, both ways.

    Parameters
    ----------
    ranks : int
        Devices, n; two make one pair of links, one makes none.
    bandwidth_bytes_per_s : float
        Bandwidth of each link, per direction [bytes/s].
    latency_s : float
        Latency of each link [s].
    chords : bool
        Whether every rank is joined to its most distant one, too.

    Notes
    -----
    Nodes: n. Links: 0 for n = 1, 2 for n = 2, otherwise 2 n; with chords and
    n > 3 another n where n is even (one partner each) and 2 n where it is odd
    (two most distant ranks each). Diameter without chords: floor(n / 2).
    """
    pairs = _pair(name_ranks(ranks), chords)
    return join_pairs(pairs, bandwidth_bytes_per_s, latency_s)


def build_double_ring(
    ranks: int, bandwidth_bytes_per_s: float, latency_s: float, *, chords: bool = False
) -> list[Link]:
    """Make two rings of half the ranks each and join them rank to rank.

    Parameters
    ----------
    ranks : int
        Devices, n, an even number: the first half is one ring, the second
        half the other, and rank r is joined to rank r + n / 2.
    bandwidth_bytes_per_s : float
        Bandwidth of each link, per direction [bytes/s].
    latency_s : float
        Latency of each link [s].
    chords : bool
        Whether either ring has the links across of ``build_ring``.

    Raises
    ------
    PlatformError
        When the number of ranks is odd.

    Notes
    -----
    Nodes: n. Links: those of two rings of n / 2, and n between them.
    Diameter without chords: floor(n / 4) + 1.

    References
    ----------
    Q. Luo et al., Hop: Heterogeneity-aware Decentralized Training, ASPLOS
    2019, arXiv:1902.01064: with chords, its ring-based and double-ring graphs.
    """
    nodes = name_ranks(ranks)
    if ranks % 2:
        raise PlatformError(
            f"{ranks} ranks do not make two equal rings", place="ranks", fix="use an even number"
        )
    one, other = nodes[: ranks // 2], nodes[ranks // 2 :]
    pairs = [*_pair(one, chords), *_pair(other, chords), *zip(one, other, strict=True)]
    return join_pairs(pairs, bandwidth_bytes_per_s, latency_s)


def _pair(nodes: Sequence[str], chords: bool) -> list[tuple[str, str]]:
    """Return every two nodes that a ring joins, once each, lower place first."""
    count = len(nodes)
    reaches = [1, count // 2] if chords else [1]
    places = {
        (min(place, other), max(place, other))
        for reach in reaches
        for place in range(count)
        if (other := (place + reach) % count) != place
    }
    return [(nodes[one], nodes[other]) for one, other in sorted(places)]
