"""The network between nodes as a user measured it: bus bandwidth and latency instead of the platform's own.

Links between nodes get the measured rate, so that collectives, messages and what shares a card follow it alike; what
was measured on other clusters is left out.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trioflow.base.errors import InputError, suggest
from trioflow.base.units import format_bytes, format_time
from trioflow.costmodel.choices import load_named_platform
from trioflow.costmodel.collectives.methods import RELATIVES
from trioflow.hardware.machine import ALL, InterNode, Platform, name_rank_node
from trioflow.network.fair_share import FlowShape
from trioflow.network.routing import Router

INTER_NODE = ("inter_node_bandwidth", "inter_node_latency_s", "inter_node_bytes")
"""Keyword arguments of `predict` and `search` that say what was measured between nodes."""
TCP = "tcp"
TCP_BYTES_PER_S = 1.2e9
"""What a card moves where NCCL falls back to TCP sockets: Perlmutter's A100 without the plug-in for Slingshot, all-reduce
and all-gather of 42 MB to 2.4 GB over 2 to 8 nodes, 1.15 to 1.24 GB/s (DebarghaG/estimate-train-time)."""

Bandwidth = float | str | Mapping[str, float]
"""Bus bandwidth [bytes/s], the same of some collectives (also as ``all_gather=27e9,all_reduce=52e9``), or ``tcp``."""


def open_platform(
    platform: Platform | str | Path,
    ranks: int,
    inter_node_bandwidth: Bandwidth | None = None,
    inter_node_latency_s: float | None = None,
    inter_node_bytes: float | None = None,
) -> Platform:
    """Return a platform, by name or file with a number of ranks, with the network between nodes that was measured.

    ``inter_node_bandwidth``: bus bandwidth as nccl-tests prints it over the job's whole nodes, all cards of a node
    together [bytes/s]; of large messages, or of those of ``inter_node_bytes``: what is slower there than the links is
    then a latency of each step. ``inter_node_latency_s``: from a GPU to its counterpart in the next node [s]. Raises
    InputError where the platform has no nodes, a number makes no sense, or links inside a node do not allow the rate.
    """
    if not platform:
        raise InputError("no platform was given", fix="name one, such as dgx-h100; `trioflow platforms` lists them")
    if not isinstance(platform, Platform):
        platform = load_named_platform(str(platform), ranks)
    asked = platform.inter_node
    if (inter_node_bandwidth, inter_node_latency_s, inter_node_bytes) != (None, None, None):
        asked = InterNode(
            _read_rates(inter_node_bandwidth),
            inter_node_latency_s,
            inter_node_bytes,
            TCP if inter_node_bandwidth == TCP else "given",
        )
        _check(asked)
    if asked is None or asked.in_links:
        return platform
    if platform.ranks_per_node is None:
        raise InputError(
            f"{platform.name} has no nodes, so nothing lies between them",
            fix="leave --inter-node-* out, or give the platform's file ranks_per_node",
        )
    if platform.ranks <= platform.ranks_per_node:
        return platform
    return _set_links(platform, platform.ranks_per_node, asked)


def _read_rates(bandwidth: Bandwidth | None) -> dict[str, float]:
    """Return bus bandwidths by collective [bytes/s], under ``all`` for all of them; none of TCP's."""
    if bandwidth is None or bandwidth == TCP:
        return {}
    rates: dict[str, float] = {}
    words = bandwidth
    if isinstance(bandwidth, Mapping):
        words = ",".join(f"{name}={rate}" for name, rate in bandwidth.items())
    for name, _, rate in (part.rpartition("=") for part in str(words).split(",")):
        if name not in ("", ALL, *RELATIVES):
            raise InputError(
                f"--inter-node-bandwidth: no collective is called {name!r}",
                fix=f"{suggest(name, RELATIVES)}use one of {', '.join(RELATIVES)}",
            )
        try:
            rates[name or ALL] = float(rate)
        except ValueError:
            raise InputError(
                f"--inter-node-bandwidth {rate!r} is not a rate",
                fix=f"write bytes/s, such as 12.5e9, COLLECTIVE=RATE with commas between, or {TCP}",
            ) from None
    return rates


def _check(asked: InterNode) -> None:
    numbers = {f"bandwidth {name}".strip(): rate for name, rate in asked.bus_bandwidth_bytes_per_s.items()}
    numbers |= {"latency": asked.latency_s or 1.0, "bytes": asked.message_bytes or 1.0}
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise InputError(f"--inter-node-{name} {value!r} is not positive")
    if asked.message_bytes is not None and not asked.bus_bandwidth_bytes_per_s:
        raise InputError(
            "--inter-node-bytes is the size of the messages whose bandwidth was measured",
            fix="give --inter-node-bandwidth too",
        )


def _set_links(platform: Platform, per_node: int, asked: InterNode) -> Platform:
    """Return a platform whose links between nodes, those that no route inside a node takes, have the asked rate."""
    router = Router(platform.links, platform.routing)
    names = [name_rank_node(rank) for rank in range(max(platform.ranks, 2 * per_node))]
    known = {link.source for link in platform.links}
    ends = zip(names, names[per_node : 2 * per_node], strict=False)
    shape = FlowShape(tuple((a, b) for a, b in ends if b in known), router)
    nominal = float(shape.rates_bytes_per_s.min()) * per_node
    rates = dict(asked.bus_bandwidth_bytes_per_s)
    if asked.source == TCP:
        alone = FlowShape(shape.pairs[:1], router).rates_bytes_per_s[0]
        rates = {ALL: TCP_BYTES_PER_S * nominal / float(alone)}
    inside = {
        link
        for first in range(0, platform.ranks, per_node)
        for a in range(first, min(first + per_node, platform.ranks))
        for b in range(first, min(first + per_node, platform.ranks))
        for link in router.route(names[a], names[b])
    }
    wanted = max([*rates.values(), nominal if asked.message_bytes or not rates else 0.0])
    kept_s = sum(platform.links[link].latency_s for link in shape.routes[0] if link in inside)
    hop_s = shape.latencies_s[0] - kept_s
    wanted_s = hop_s if asked.latency_s is None else max(asked.latency_s - kept_s, 0.0)
    links = tuple(
        link
        if place in inside
        else link._replace(
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * (wanted / nominal),
            latency_s=link.latency_s * wanted_s / hop_s if hop_s else 0.0,
        )
        for place, link in enumerate(platform.links)
    )
    reached = FlowShape(shape.pairs, Router(links, platform.routing)).rates_bytes_per_s.min()
    if reached * per_node < 0.99 * wanted:
        raise InputError(
            f"{format_bytes(wanted)}/s between nodes, and links inside a node of {platform.name} allow "
            f"{format_bytes(float(reached) * per_node)}/s",
            fix="give the bus bandwidth of a node in bytes/s, or describe its links in a platform file",
        )
    settled = replace(asked, bus_bandwidth_bytes_per_s=rates, in_links=True)
    return replace(platform, links=links, inter_node=settled)


def find_rate(asked: InterNode, collective: str) -> float:
    """Return the bus bandwidth of a collective, or of the most similar one that was measured [bytes/s]."""
    rates = asked.bus_bandwidth_bytes_per_s
    similar = (collective, *RELATIVES.get(collective, ()), ALL, *rates)
    return rates[next(name for name in similar if name in rates)]


def describe_inter_node(platform: Platform) -> str:
    """Say what is taken for the network between nodes where a user gave it; empty elsewhere."""
    asked = platform.inter_node
    if asked is None or platform.ranks <= (platform.ranks_per_node or platform.ranks):
        return ""
    rates = asked.bus_bandwidth_bytes_per_s
    parts = [
        f"{format_bytes(rate)}/s bus bandwidth{f' of {name}' if name != ALL else ''}" for name, rate in rates.items()
    ]
    if asked.message_bytes:
        parts[-1] += f", measured with {format_bytes(asked.message_bytes)}"
    parts += [f"{format_time(asked.latency_s)} a hop"] if asked.latency_s is not None else []
    tcp = f" (TCP sockets, {format_bytes(TCP_BYTES_PER_S)}/s a network card)"
    return f"between nodes as given: {', '.join(parts)}{tcp if asked.source == TCP else ''}, instead of what is known of {platform.name}"
