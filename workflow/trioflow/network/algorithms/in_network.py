"""In-network algorithms: a switch sums or copies what passes through it."""

from __future__ import annotations

import numpy as np

from trioflow.network.algorithms.pattern import (
    SUMS_OR_COPIES,
    Algorithm,
    Pattern,
    concatenate,
    fill,
    make_messages,
    one_each,
)


def _build_in_network(collective: str, members: int, chunks: int) -> Pattern:
    """Return a collective of one message up to a switch and one down per rank (and chunk, once it is complete).

    all_reduce: whole vectors up, the sum down. reduce_scatter: up all but a rank's own part, down the others' sum of
    it. all_gather: own part up, all others down. broadcast: up from the root, down to the others; reduce the other way.

    References: R. L. Graham and others, SHArP, COMHPC 2016, doi:10.1109/COMHPC.2016.006.
    """
    rank, switch = np.arange(members), members
    blocks = members * chunks
    own, every = one_each(members, chunks), fill(blocks, -1)
    others = (rank[:, None] + np.arange(1, members)) % members
    ends = {"origin": every, "destination": every}
    up_parts, down_parts, width = rank[:, None], others, members
    senders, receivers = rank, rank
    sums_up = sums_down = False
    if collective == "all_gather":
        ends["origin"] = own
    elif collective == "reduce_scatter":
        up_parts, down_parts = others, rank[:, None]
        sums_up = sums_down = True
        ends["destination"] = own
    else:
        width, root = 1, fill(chunks, 0)
        ends = {"origin": fill(chunks, -1), "destination": fill(chunks, -1)}
        sums_up = collective != "broadcast"
        if collective == "broadcast":
            senders, receivers, ends["origin"] = rank[:1], rank[1:], root
        elif collective == "reduce":
            senders, receivers, ends["destination"] = rank[1:], rank[:1], root
            sums_down = True
        up_parts = np.zeros((len(senders), 1), dtype=np.int64)
        down_parts = np.zeros((len(receivers), 1), dtype=np.int64)
    up = make_messages(0, senders, switch, up_parts, chunks=chunks, lag=1, reduces=sums_up)
    down = make_messages(1, switch, receivers, down_parts, chunks=chunks, lag=1, reduces=sums_down)
    return Pattern(
        members,
        concatenate([up, down]),
        ends["origin"],
        ends["destination"],
        width * chunks,
        switches=1,
    )


ALGORITHMS = (
    Algorithm(
        "in_network",
        _build_in_network,
        (*SUMS_OR_COPIES, "reduce_scatter", "all_gather"),
        switches=1,
    ),
)
