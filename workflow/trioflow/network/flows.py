"""Flows before they start: one of them, and where those of a collective run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trioflow.hardware.machine import Link
from trioflow.network.fair_share import compute_max_min_rates
from trioflow.network.routing import Router

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FlowSpec:
    """A flow that has no identity yet; see ``interface.Flow`` for the fields."""

    source: str
    target: str
    size_bytes: float
    latency_s: float
    max_rate_bytes_per_s: float = math.inf


class FlowShape:
    """Who sends to whom, and over which links: common to collectives of one kind and group."""

    def __init__(self, pairs: tuple[tuple[str, str], ...], router: Router) -> None:
        self.pairs, self._router = pairs, router

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that the numbers in ``routes`` and ``hops`` stand for."""
        return self._router.links

    @cached_property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """For each flow, the numbers of the links that it crosses."""
        return tuple(self._router.route(source, target) for source, target in self.pairs)

    @cached_property
    def latencies_s(self) -> tuple[float, ...]:
        """Total latency of each route [s]."""
        return tuple(
            sum((self.links[link].latency_s for link in route), 0.0) for route in self.routes
        )

    @cached_property
    def slowest_latency_s(self) -> float:
        """Largest total latency of a route [s]."""
        return max(self.latencies_s)

    @cached_property
    def rates_bytes_per_s(self) -> Floats:
        """Max-min rate of each flow [flows], all moving and nothing else [bytes/s]."""
        capacities = [link.bandwidth_bytes_per_s for link in self._router.links]
        unlimited = [math.inf] * len(self.pairs)
        return np.array(compute_max_min_rates(self.routes, capacities, unlimited))

    @cached_property
    def hops(self) -> Ints:
        """Links of all routes [hops], one route after the other."""
        return np.array([link for route in self.routes for link in route], dtype=np.int64)

    @cached_property
    def first_hops(self) -> Ints:
        """Where the route of each flow begins in ``hops`` [flows + 1]."""
        lengths = np.array([0, *map(len, self.routes)], dtype=np.int64)
        return np.cumsum(lengths, dtype=np.int64)
