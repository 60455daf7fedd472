"""Who sends to whom in a collective that is flows from its start to its end."""

from __future__ import annotations

from collections.abc import Sequence

Pairs = list[tuple[int, int]]


def pair_group(collective: str, group: Sequence[int]) -> Pairs:
    """Return ring neighbours, a chain from or to the root, or everyone with everyone.

    Parameters
    ----------
    collective : str
        Any.
    group : sequence of int
        Ranks in ring order; the first is the root or sender.
    """
    if len(group) < 2:
        return []
    if collective == "all_to_all":
        return [(a, b) for a in group for b in group if a != b]
    if collective == "scatter":
        return [(group[0], b) for b in group[1:]]
    if collective == "gather":
        return [(a, group[0]) for a in group[1:]]
    ring = list(zip(group, (*group[1:], group[0]), strict=True))
    if collective in ("broadcast", "send"):
        return ring[:-1]
    return ring[1:] if collective == "reduce" else ring
