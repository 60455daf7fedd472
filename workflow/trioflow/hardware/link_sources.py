"""A platform as the content of a file, every number beside its source."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import SLOWDOWN, TIES, Link, Platform, is_rank_node, name_link


def describe_platform(platform: Platform, path: str | Path) -> dict[str, Any]:
    """Turn a platform into a file's content; PlatformError when a number has no source."""

    def number(value: float, key: str, found: tuple[str | None, bool] | None = None) -> Any:
        source, measured = found or _find_source(platform, key)
        if source is None:
            raise PlatformError(
                f"{value!r} has no source", file=path, place=key,
                fix=f"give the platform sources[{key!r}]",
            )  # fmt: skip
        entry = {"value": value, "source": source}
        return entry if measured else {**entry, "measured": False}

    device, slowdown = platform.device, platform.compute_slowdown_during_collective
    described: dict[str, Any] = {
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": number(device.memory_bytes, "device.memory_bytes"),
        "peak_flop_per_s": {
            precision: number(peak, f"device.peak_flop_per_s.{precision}")
            for precision, peak in device.peak_flop_per_s.items()
        },
    }
    if device.memory_bandwidth_bytes_per_s is not None:
        key = "memory_bandwidth_bytes_per_s"
        described[key] = number(device.memory_bandwidth_bytes_per_s, f"device.{key}")
    links = []
    for link in platform.links:
        entry: dict[str, Any] = {"from": link.source, "to": link.target}
        for key in ("bandwidth_bytes_per_s", "latency_s"):
            place = f"links.{name_link(link)}.{key}"
            entry[key] = number(getattr(link, key), place, find_link_source(platform, link, key))
        links.append(entry)
    content = {
        "name": platform.name,
        "device": described,
        "ranks": platform.ranks,
        "ranks_per_node": platform.ranks_per_node,
        "links": links,
        "failed_links": [
            {"from": source, "to": target} for source, target in sorted(platform.routing.failed)
        ]
        or None,
        "routing": _describe_routing(platform),
        "communication_on_compute_stream": platform.communication_on_compute_stream,
        SLOWDOWN: number(slowdown, SLOWDOWN) if slowdown != 1 else None,
        "host": {key: number(value, f"host.{key}") for key, value in platform.host.items()},
        "collectives": platform.collectives,
        "node_collectives": platform.node_collectives,
        "between_nodes": platform.between_nodes,
        "notes": platform.notes,
    }
    return {key: value for key, value in content.items() if value not in (None, "", {})}


def _describe_routing(platform: Platform) -> dict[str, Any]:
    """Return how equally good routes are chosen, where that is not the usual way."""
    routing = platform.routing
    if (routing.ties, routing.seed) == (TIES[0], 0):
        return {}
    return {"ties": routing.ties, "seed": routing.seed}


def find_link_source(platform: Platform, link: Link, key: str) -> tuple[str | None, bool]:
    """Return where a link's ``bandwidth_bytes_per_s`` or ``latency_s`` comes from, and whether it was measured.

    Its own source comes first. A built link has that of the topology's parameter it was built from;
    where several parameters may be meant, they are all named.
    """
    source, measured = _find_source(platform, f"links.{name_link(link)}.{key}")
    if source is not None:
        return source, measured
    # "bandwidth_bytes_per_s" also ends "bridge_bandwidth_bytes_per_s", of other links.
    places = sorted(
        place for place in platform.sources if place.startswith("topology.") and place.endswith(key)
    )
    plain = f"topology.{key}"
    if plain in places and len(places) > 1:
        at_rank = is_rank_node(link.source) or is_rank_node(link.target)
        places = [plain] if at_rank else [place for place in places if place != plain]
    if not places:
        return _find_source(platform, plain)
    if len(places) == 1:
        return _find_source(platform, places[0])
    listed = "; ".join(f"{place}: {platform.sources[place]}" for place in places)
    return f"one of {listed}", all(_find_source(platform, place)[1] for place in places)


def _find_source(platform: Platform, key: str) -> tuple[str | None, bool]:
    place = _find_nearest(platform.sources, key)
    source = None if place is None else platform.sources[place]
    return source, _find_nearest(platform.unmeasured, key) is None


def _find_nearest(known: Container[str], key: str) -> str | None:
    """Return a dotted key or the nearest key above it that is known."""
    while key:
        if key in known:
            return key
        key = key.rpartition(".")[0]
    return None
