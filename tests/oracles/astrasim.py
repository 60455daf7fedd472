"""ASTRA-sim's analytical ring all-reduce, in its own units, to compare with."""

import math

LINK_GB_BYTES = 2**30
"""Bytes of what ASTRA-sim's network calls a GB."""
MEMORY_GB_BYTES = 10**9
"""Bytes of what its local memory calls a GB."""


def compute_ring_all_reduce_ns(
    ranks: int,
    message_bytes: int,
    link_gb_per_s: float,
    link_latency_ns: float,
    memory_gb_per_s: float,
    endpoint_delay_ns: int,
) -> int:
    """Return the time that ASTRA-sim gives a ring all-reduce [ns].

    Parameters
    ----------
    ranks : int
        NPUs of the ring.
    message_bytes : int
        Vector of one NPU [bytes]; a remainder that does not divide is lost.
    link_gb_per_s : float
        As its network file says it, in units of ``LINK_GB_BYTES`` per second.
    link_latency_ns : float
        Of one link [ns].
    memory_gb_per_s : float
        As its system file says it, in units of ``MEMORY_GB_BYTES`` per second.
    endpoint_delay_ns : int
        Of its system file [ns].

    Notes
    -----
    2 (n - 1) messages of whole nanoseconds, three passes through memory for
    each of the n - 1 sums, and the endpoint's delay 2 n - 1 times. Only the
    first term is in ``closed_form.closed_form_s``.

    References
    ----------
    astra-sim/astra-sim at 518bd51, analytical network backend: fitted to its
    output, which it equals to the nanosecond.
    """
    part_bytes = message_bytes // ranks
    link_ns = compute_link_ns(part_bytes, link_gb_per_s, link_latency_ns)
    memory_ns = math.floor(part_bytes / (memory_gb_per_s * MEMORY_GB_BYTES) * 1e9)
    return 2 * (ranks - 1) * link_ns + 3 * (ranks - 1) * memory_ns + endpoint_delay_ns * (2 * ranks - 1)


def compute_link_ns(size_bytes: float, link_gb_per_s: float, link_latency_ns: float) -> int:
    """Return what ASTRA-sim gives one message on one link, in whole nanoseconds [ns]."""
    return math.floor(link_latency_ns + size_bytes / (link_gb_per_s * LINK_GB_BYTES) * 1e9)
