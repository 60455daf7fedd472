"""A network in which every message waits before it moves."""

from __future__ import annotations

from msgspec.structs import replace
from trioflow.network.networks import ContentionFreeNetwork, Flow

EXTRA_S = 20e-6
"""What we see on our switch before a message moves [s]."""


class SlowStartNetwork(ContentionFreeNetwork):
    """The contention-free network with some more latency."""

    def start(self, flow: Flow, time_s: float) -> None:
        """Let a flow start, later than its links alone would."""
        super().start(replace(flow, latency_s=flow.latency_s + EXTRA_S), time_s)
