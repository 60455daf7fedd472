"""Platform files: read, checked against the schema, and written.

In a file every number stands beside its source::

    memory_bytes: {value: 80.0e9, source: NVIDIA A100 data sheet}
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from trioflow.base.errors import PlatformError, suggest
from trioflow.base.provenance import PACKAGE, atomic_path
from trioflow.base.yaml_files import read_yaml
from trioflow.hardware.device_sheet import describe_inline, load_device
from trioflow.hardware.links import (
    build_links,
    describe_platform,
    find_link_source,
    list_failed_links,
)
from trioflow.hardware.machine import EAGER, SLOWDOWN, Device, Link, Platform, Routing, name_link
from trioflow.hardware.schema import check_schema
from trioflow.hardware.topologies.nccl_file import list_doubts
from trioflow.hardware.topologies.wiring import MOST_PARTS

SCHEMA = PACKAGE / "data" / "platform.schema.json"


def validate_platform(content: Any, path: str | Path) -> None:
    """Check a platform file's content; PlatformError says the shallowest violation of the schema."""
    check_schema(content, SCHEMA, path)


SHIPPED = PACKAGE / "data" / "platforms"
OFFLOAD_RATES = "host.host_"
"""How the keys of rates begin that only plans that offload use."""
_NAMED = 3
"""Keys that the sentence on unmeasured numbers names."""


def list_platforms() -> list[str]:
    """Return the names of the platforms that ship with trioflow, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_platform(name_or_path: str | Path, ranks: int | None = None) -> Platform:
    """Read a platform by the name of a shipped one, or from a file (a path, or ``.yaml`` at the end).

    ``ranks``: of the job, all devices unless given; the links stay those of the whole machine.
    Raises PlatformError when the name is unknown, the file is missing or breaks the schema, its
    topology cannot be built, two links join the same nodes, a failed link does not exist, a rank
    has no link or no route to another, or there are too few devices.
    """
    path = _find(name_or_path)
    content = read_yaml(path, PlatformError)
    if path.parent != SHIPPED:  # the shipped ones are validated by tests
        validate_platform(content, path)
        return _build(content, ranks, path)
    links = _build_shipped_links(path.stem, _choose_ranks(content, ranks, path))
    return _build(content, ranks, path, links)


def save_platform(platform: Platform, path: str | Path) -> None:
    """Write a platform as a file that ``load_platform`` reads, links one by one; PlatformError where a source lacks."""
    content = describe_platform(platform, path)
    validate_platform(content, path)
    _build(content, None, path)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def describe_unmeasured(platform: Platform) -> str:
    """Say which numbers nobody has measured, but for the host's rates that only offloading uses."""
    keys = [key for key in platform.unmeasured if not key.startswith(OFFLOAD_RATES)]
    if not keys:
        return ""
    named = ", ".join(keys[:_NAMED]) + (" and others" if len(keys) > _NAMED else "")
    numbers = "1 number" if len(keys) == 1 else f"{len(keys)} numbers"
    return (
        f"{numbers} of {platform.name} never measured, but assumed or a data sheet's peak: {named}"
    )


def _find(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    known = list_platforms()
    if text not in known:
        raise PlatformError(
            f"no platform is called {text!r}",
            fix=f"{suggest(text, known)}known are {', '.join(known)}; a file of your own is given by its path",
        )
    return SHIPPED / f"{text}.yaml"


def _build_links(content: dict[str, Any], ranks: int, path: str | Path) -> tuple[Link, ...]:
    links = build_links(content, ranks, path)
    if {type(number) for link in links for number in link[2:]} <= {float}:
        return tuple(links)
    return tuple(Link(*link[:2], *map(float, link[2:])) for link in links)


@lru_cache(maxsize=4)
def _build_shipped_links(name: str, ranks: int) -> tuple[Link, ...]:
    """Return the links of a shipped platform: the same objects for all who load as much of it."""
    path = SHIPPED / f"{name}.yaml"
    return _build_links(read_yaml(path, PlatformError), ranks, path)


def _build(
    content: dict[str, Any], ranks: int | None, path: str | Path,
    links: tuple[Link, ...] | None = None,
) -> Platform:  # fmt: skip
    numbers = dict(_walk_numbers(content))
    for place, entry in numbers.items():
        if not math.isfinite(entry.get("value", 0)):
            raise PlatformError(
                f"{entry['value']!r} is not finite", file=path, place=place, fix="write a number"
            )
    available = _choose_ranks(content, ranks, path)
    sources = {place: entry["source"] for place, entry in numbers.items()}
    device, device_sources = _build_device(content["device"], path)
    unmeasured = [place for place, entry in numbers.items() if not entry.get("measured", True)]
    if links is None:
        links = _build_links(content, available, path)
    platform = Platform(
        name=content["name"],
        device=device,
        ranks=available if ranks is None else ranks,
        links=links,
        communication_on_compute_stream=content.get("communication_on_compute_stream", False),
        host={key: _number(entry) for key, entry in content.get("host", {}).items()},
        collectives=content.get("collectives"),
        sources={**device_sources, **sources},
        notes=content.get("notes", ""),
        ranks_per_node=_read_ranks_per_node(content),
        node_collectives=content.get("node_collectives"),
        between_nodes=content.get("between_nodes"),
        unmeasured=tuple(sorted(unmeasured)),
        doubts=tuple(list_doubts(content.get("topology", {}), path)),
        compute_slowdown_during_collective=_number(content.get(SLOWDOWN, {"value": 1.0})),
        eager_send_bytes=_number(content.get(EAGER, {"value": 0.0})),
        routing=Routing(**content.get("routing", {}), failed=frozenset(list_failed_links(content))),
    )
    return _explain_degraded(platform, content.get("degraded", []))


def _build_device(content: dict[str, Any], path: str | Path) -> tuple[Device, dict[str, str]]:
    """Return the device, and the sources of its numbers where a sheet holds them."""
    if "sheet" not in content:
        bandwidth = content.get("memory_bandwidth_bytes_per_s")
        device = Device(
            name=content["name"],
            kind=content["kind"],
            memory_bytes=int(content["memory_bytes"]["value"]),
            peak_flop_per_s={k: _number(v) for k, v in content["peak_flop_per_s"].items()},
            memory_bandwidth_bytes_per_s=None if bandwidth is None else _number(bandwidth),
            sheet=describe_inline(content, path) if content["kind"] == "gpu" else None,
        )
        return device, {}
    name = content["sheet"]
    is_file = isinstance(name, str) and name.endswith((".yaml", ".yml"))
    try:
        sheet = load_device(Path(path).parent / name if is_file else name, path)
    except PlatformError as error:
        if error.file is not None:
            raise
        raise PlatformError(error.problem, file=path, place="device.sheet", fix=error.fix) from None
    sources = {
        f"device.{key}": source
        for key, source in sheet.sources.items()
        if key.partition(".")[0]
        in ("memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flop_per_s")
    }
    if "usable_memory_bytes" in sheet.sources:
        sources["device.memory_bytes"] = sheet.sources["usable_memory_bytes"]
    return Device.of(sheet), sources


def _number(entry: dict[str, Any]) -> float:
    return float(entry["value"])


def _choose_ranks(content: dict[str, Any], ranks: int | None, path: str | Path) -> int:
    """Return the devices of the machine, with the job's ranks checked against them."""
    devices = content.get("ranks")
    if "nodes" in content:
        if devices is not None or "ranks_per_node" not in content:
            raise PlatformError(
                "'nodes' goes with 'ranks_per_node', instead of 'ranks'", file=path, place="nodes",
                fix="write nodes and ranks_per_node, or ranks",
            )  # fmt: skip
        devices = content["nodes"] * content["ranks_per_node"]
    if devices is None:
        raise PlatformError("the key 'ranks' is missing", file=path, fix="add 'ranks'")
    if max(ranks or 0, devices if isinstance(devices, int) else 0) > MOST_PARTS:
        raise PlatformError(
            f"{max(ranks or 0, devices if isinstance(devices, int) else 0)} ranks, {MOST_PARTS} are the most",
            file=path, place="ranks", fix="ask for fewer",
        )  # fmt: skip
    if ranks is not None and ranks < 1:
        raise PlatformError(f"{ranks} ranks were asked for", file=path, fix="ask for 1 or more")
    if devices == "any":
        if "links" in content or ranks is None:
            raise PlatformError(
                "'any' is not a number of ranks here", file=path, place="ranks",
                fix="write the number beside links; with a topology, ask for a number of ranks",
            )  # fmt: skip
        return ranks
    if ranks is not None and ranks > devices:
        raise PlatformError(
            f"{ranks} ranks were asked for and {content['name']} has {devices} devices",
            file=path, place="ranks",
            fix=f"ask for {devices} or fewer, or describe a larger machine in a file of your own",
        )  # fmt: skip
    return int(devices)


def _read_ranks_per_node(content: dict[str, Any]) -> int | None:
    found = content.get("ranks_per_node")
    if found is None and isinstance(
        inner := content.get("topology", {}).get("ranks_per_node"), dict
    ):
        found = inner["value"]
    return None if found is None else int(found)


def _explain_degraded(platform: Platform, entries: list[dict[str, Any]]) -> Platform:
    """Add what degraded links have to say to their sources."""
    sources, unmeasured = dict(platform.sources), set(platform.unmeasured)
    for entry in entries:
        ends = [(entry["from"], entry["to"])]
        if entry.get("both_ways", False):
            ends.append((entry["to"], entry["from"]))
        factors = {"bandwidth_bytes_per_s": "factor", "latency_s": "latency_factor"}
        gone = entry["factor"]["value"] == 0
        for source, target in ends if not gone else ():
            link = Link(source, target, 1.0, 0.0)
            for key, factor in factors.items():
                if factor in entry:
                    known, measured = find_link_source(platform, link, key)
                    place = f"links.{name_link(link)}.{key}"
                    change = f"times {entry[factor]['value']}: {entry[factor]['source']}"
                    sources[place] = f"{known}; {change}"
                    if not (measured and entry[factor].get("measured", True)):
                        unmeasured.add(place)
    return replace(platform, sources=sources, unmeasured=tuple(sorted(unmeasured)))


def _walk_numbers(content: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what has a source, a number or all of a topology, under its dotted key."""
    if not isinstance(content, dict):
        return
    if "source" in content and "value" in content:
        yield place, content
        return
    if "source" in content and "builder" in content:
        yield place, content
    for key, entry in content.items():
        if key in ("links", "degraded") and not place:
            for link in entry:
                yield from _walk_numbers(link, f"{key}.{link['from']}->{link['to']}")
        else:
            yield from _walk_numbers(entry, f"{place}.{key}" if place else key)
