"""ASTRA-sim's ring all-reduce, to the nanosecond, and our own formula beside it.

The times are what astra-sim/astra-sim at 518bd51 (analytical network) printed
for an all-reduce of 100,000,000 bytes on one ring of "50 GB/s" and 500 ns
links. Memory of 1,600 GB/s and an endpoint delay of 10 ns are the only values
that give all four.
"""

import pytest
from oracles.astrasim import LINK_GB_BYTES, compute_link_ns, compute_ring_all_reduce_ns
from oracles.closed_form import closed_form_s
from oracles.replay import execute_schedule
from trioflow.network.algorithms.catalogue import build_message_schedule

MESSAGE_BYTES, LINK_GB_PER_S, LATENCY_NS = 100_000_000, 50.0, 500.0
MEMORY_GB_PER_S, ENDPOINT_NS = 1600.0, 10
PRINTED_NS = {4: 2_937_661, 8: 3_430_822, 64: 3_915_712, 1024: 4_950_307}


@pytest.mark.parametrize(("ranks", "printed_ns"), PRINTED_NS.items())
def test_the_formula_gives_what_astra_sim_printed(ranks: int, printed_ns: int) -> None:
    found_ns = compute_ring_all_reduce_ns(ranks, MESSAGE_BYTES, LINK_GB_PER_S, LATENCY_NS, MEMORY_GB_PER_S, ENDPOINT_NS)
    assert found_ns == printed_ns


def test_no_other_memory_and_endpoint_fit_all_four() -> None:
    fits = [
        (memory, endpoint)
        for memory in range(1500, 1701)
        for endpoint in range(31)
        if all(
            compute_ring_all_reduce_ns(ranks, MESSAGE_BYTES, LINK_GB_PER_S, LATENCY_NS, memory, endpoint) == printed_ns
            for ranks, printed_ns in PRINTED_NS.items()
        )
    ]
    assert fits == [(MEMORY_GB_PER_S, ENDPOINT_NS)]


@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_our_messages_with_its_link_times_give_its_network_share(ranks: int) -> None:
    """Without memory and endpoints, which cost it the rest."""
    part_bytes = MESSAGE_BYTES // ranks
    schedule = build_message_schedule("all_reduce", ranks, part_bytes * ranks, algorithm="ring")
    network_ns = execute_schedule(
        schedule, lambda source, target, size: compute_link_ns(size, LINK_GB_PER_S, LATENCY_NS)
    )
    memory_ns = 3 * (ranks - 1) * int(part_bytes / MEMORY_GB_PER_S)
    assert network_ns + memory_ns + ENDPOINT_NS * (2 * ranks - 1) == PRINTED_NS[ranks]


@pytest.mark.parametrize("ranks", PRINTED_NS)
def test_our_formula_differs_from_its_links_by_the_fractions_it_drops(ranks: int) -> None:
    part_bytes = MESSAGE_BYTES // ranks
    theirs_ns = 2 * (ranks - 1) * compute_link_ns(part_bytes, LINK_GB_PER_S, LATENCY_NS)
    ours_s = closed_form_s(
        "all_reduce", ranks, part_bytes * ranks, LATENCY_NS * 1e-9, LINK_GB_PER_S * LINK_GB_BYTES, algorithm="ring"
    )
    assert 0 <= ours_s * 1e9 - theirs_ns < 2 * (ranks - 1)
