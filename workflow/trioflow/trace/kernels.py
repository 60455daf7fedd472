"""Device kernels of a CUDA profile, joined to the operators that launched them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trioflow.trace.kineto import Event

LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of the host's calls into the driver; a kernel shares its call's correlation."""

Kernels = Mapping[int, list[Event]]


def index_kernels(kernels: Iterable[Event]) -> dict[int, list[Event]]:
    """Return kernels, copies and fills by the correlation of the call that launched them."""
    found: dict[int, list[Event]] = {}
    for kernel in kernels:
        if kernel.correlation is not None:
            found.setdefault(kernel.correlation, []).append(kernel)
    return found


def kernels_of(operator: Event, kernels: Kernels) -> list[Event]:
    """Return the kernels that an operator and what it encloses launched, in order of start."""
    launched = [
        kernel
        for event in operator.walk()
        if event.category in LAUNCHES and event.correlation is not None
        for kernel in kernels.get(event.correlation, [])
    ]
    return sorted(launched, key=lambda kernel: (kernel.start_ns, kernel.end_ns))


def busy_ns(kernels: Iterable[Event]) -> int:
    """Return the time in which at least one of some kernels runs [ns].

    Kernels of one operator may overlap on several streams; their union is the
    time that the device spends in the operator.
    """
    total, reached = 0, 0
    for kernel in sorted(kernels, key=lambda k: k.start_ns):
        start = max(kernel.start_ns, reached) if total else kernel.start_ns
        total += max(kernel.end_ns - start, 0)
        reached = max(reached, kernel.end_ns) if total else kernel.end_ns
    return total
