"""The links of a platform file: listed or built, degraded where it says so, and checked; a platform as such a file."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from trioflow.base.errors import PlatformError, suggest
from trioflow.hardware.machine import (
    EAGER,
    SLOWDOWN,
    TIES,
    Device,
    Link,
    Platform,
    is_rank_node,
    name_link,
    name_rank_node,
)
from trioflow.hardware.topologies.registry import build_topology
from trioflow.hardware.topologies.wiring import find_nodes, read_rank


def build_links(content: Mapping[str, Any], ranks: int, file: str | Path) -> list[Link]:
    """Return the links that a platform file's content, checked against the schema, describes.

    Raises PlatformError when a link cannot be simulated or read two ways, a degraded or failed link
    does not exist, or bytes cannot get from a rank to another.
    """
    if "links" in content:
        links = [
            Link(
                entry["from"],
                entry["to"],
                float(entry["bandwidth_bytes_per_s"]["value"]),
                float(entry["latency_s"]["value"]),
            )
            for entry in content["links"]
        ]
    else:
        shared = {
            key: content[key] for key in ("nodes", "ranks_per_node") if content.get(key) is not None
        }
        links = build_topology(content["topology"], ranks, file, shared=shared)
    _check_ends(links, file, "links." if "links" in content else "topology, link ")
    links = _degrade_links(links, content.get("degraded", []), file)
    _check_failed(links, content, file)
    failed = set(list_failed_links(content))
    working = [link for link in links if (link.source, link.target) not in failed]
    _check_ranks(working, ranks, file, "links" if "links" in content else "topology")
    return links


def list_failed_links(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the failed links of a platform file's content, as source and target."""
    found: list[tuple[str, str]] = []
    for entry in content.get("failed_links", []):
        found.append((entry["from"], entry["to"]))
        if entry.get("both_ways", False):
            found.append((entry["to"], entry["from"]))
    return found


def _check_failed(links: list[Link], content: Mapping[str, Any], file: str | Path) -> None:
    known = {(link.source, link.target) for link in links}
    for number, entry in enumerate(content.get("failed_links", [])):
        for source, target in list_failed_links({"failed_links": [entry]}):
            if (source, target) not in known:
                raise PlatformError(
                    f"no link leads from {source} to {target}", file=file,
                    place=f"failed_links.{number}", fix=_offer_link(links, source, target),
                )  # fmt: skip


def _degrade_links(
    links: list[Link], entries: Iterable[Mapping[str, Any]], file: str | Path
) -> list[Link]:
    """Return links with those ``degraded`` slower, or gone at ``factor`` 0; PlatformError where one is unknown or twice."""
    places = {(link.source, link.target): place for place, link in enumerate(links)}
    changed: dict[int, Link | None] = {}
    for number, entry in enumerate(entries):
        ends = [(entry["from"], entry["to"])]
        if entry.get("both_ways", False):
            ends.append((entry["to"], entry["from"]))
        for source, target in ends:
            where = f"degraded.{number}"
            if (source, target) not in places:
                raise PlatformError(
                    f"no link leads from {source} to {target}", file=file, place=where,
                    fix=_offer_link(links, source, target),
                )  # fmt: skip
            place = places[source, target]
            if place in changed:
                raise PlatformError(
                    f"the link from {source} to {target} is degraded twice", file=file,
                    place=where, fix="keep one entry, with the factors multiplied",
                )  # fmt: skip
            changed[place] = _degrade(links[place], entry)
    kept = (changed.get(place, link) for place, link in enumerate(links))
    return [link for link in kept if link is not None]


def _degrade(link: Link, entry: Mapping[str, Any]) -> Link | None:
    factor = float(entry["factor"]["value"])
    slower = float(entry["latency_factor"]["value"]) if "latency_factor" in entry else 1.0
    if factor == 0:
        return None
    bandwidth_bytes_per_s = link.bandwidth_bytes_per_s * factor
    return Link(link.source, link.target, bandwidth_bytes_per_s, link.latency_s * slower)


def _offer_link(links: list[Link], source: str, target: str) -> str:
    targets = [link.target for link in links if link.source == source]
    if targets:
        close = difflib.get_close_matches(target, targets, n=1, cutoff=0.0)
        return f"from {source} one leads to {close[0]}"
    nodes = find_nodes(links)
    return suggest(source, nodes).rstrip() or f"nodes are {', '.join(nodes[:8])}"


def _check_ends(links: list[Link], file: str | Path, place: str) -> None:
    """Refuse a link that a network could not simulate or would read two ways."""
    seen: set[tuple[str, str]] = set()
    for number, link in enumerate(links):
        ends = (link.source, link.target)
        problem, fix = "", ""
        if link.bandwidth_bytes_per_s < 1.0:
            problem = f"{link.bandwidth_bytes_per_s} bytes/s from {link.source} to {link.target}"
            fix = "write 1 byte/s or more, or list it under failed_links"
        elif link.source == link.target:
            problem, fix = f"joins {link.source} to itself", "leave it out"
        elif ends in seen:
            problem = f"a second link from {link.source} to {link.target}"
            fix = "write one link with the bandwidths added"
        if problem:
            raise PlatformError(problem, file=file, place=f"{place}{number}", fix=fix)
        seen.add(ends)
    for node in find_nodes(links):
        rank = read_rank(node)
        if rank >= 0 and node != name_rank_node(rank):
            raise PlatformError(
                f"{node!r} is not the name of a rank", file=file, place=place.partition(",")[0].strip("."),
                fix=f"write {name_rank_node(rank)}",
            )  # fmt: skip


def _check_ranks(links: list[Link], ranks: int, file: str | Path, place: str) -> None:
    """Refuse ranks without a link, and such as bytes cannot reach."""
    if ranks == 1:
        return
    names = [name_rank_node(rank) for rank in range(ranks)]
    nodes = set(find_nodes(links))
    lonely = next((name for name in names if name not in nodes), None)
    if lonely:
        raise PlatformError(
            f"no link reaches {lonely}", file=file, place=place,
            fix=f"name the {ranks} ranks rank0 to rank{ranks - 1} and join each of them",
        )  # fmt: skip
    onward: dict[str, list[str]] = {}
    backward: dict[str, list[str]] = {}
    for link in links:
        onward.setdefault(link.source, []).append(link.target)
        backward.setdefault(link.target, []).append(link.source)
    for graph, words in ((onward, "from rank0 to {}"), (backward, "from {} to rank0")):
        reached = _reach(graph, names[0])
        cut_off = next((name for name in names if name not in reached), None)
        if cut_off:
            raise PlatformError(
                f"no route leads {words.format(cut_off)}", file=file, place=place,
                fix="links are directed: write one each way, or leave fewer of them out",
            )  # fmt: skip


def _reach(graph: Mapping[str, list[str]], start: str) -> set[str]:
    reached, todo = {start}, [start]
    while todo:
        for node in graph.get(todo.pop(), ()):
            if node not in reached:
                reached.add(node)
                todo.append(node)
    return reached


def describe_platform(platform: Platform, path: str | Path) -> dict[str, Any]:
    """Turn a platform into a file's content; PlatformError where a number has no source."""

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
    sheet = device.sheet
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
    if sheet is not None and device == Device.of(sheet):
        described = {"sheet": sheet.name if sheet.is_shipped else dict(sheet.content)}
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
        EAGER: number(eager, EAGER) if (eager := platform.eager_send_bytes) else None,
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

    Its own source, else those of the topology's parameters that may be meant.
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
