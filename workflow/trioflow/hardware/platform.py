"""Platform files: read, checked against the schema, and written.

In a file every number stands beside its source::

    memory_bytes: {value: 80.0e9, source: NVIDIA A100 data sheet}
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trioflow.errors import PlatformError
from trioflow.hardware.machine import (
    Device,
    Link,
    Platform,
    is_rank_node,
    name_link,
    name_rank_node,
)
from trioflow.hardware.schema import validate_platform
from trioflow.hardware.topology import BUILDERS
from trioflow.hardware.yaml_numbers import StrictLoader
from trioflow.provenance import PACKAGE, atomic_path

__all__ = [
    "Device", "Link", "Platform", "is_rank_node", "list_platforms", "load_platform", "name_link",
    "name_rank_node", "save_platform",
]  # fmt: skip

SHIPPED = PACKAGE / "data" / "platforms"


def list_platforms() -> list[str]:
    """Return the names of the platforms that ship with trioflow, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_platform(name_or_path: str | Path, ranks: int | None = None) -> Platform:
    """Read a platform, by the name of a shipped one or from a file.

    Parameters
    ----------
    name_or_path : str or path
        A shipped name, or a path that ends in ``.yaml`` or ``.yml`` or holds
        a folder.
    ranks : int, optional
        Ranks of the job; all devices of the machine unless given. The links
        stay those of the whole machine.

    Raises
    ------
    PlatformError
        When the name is unknown (the known ones are listed), the file is
        missing or breaks the schema, two links join the same nodes, a rank
        has no link, or more ranks are asked for than the machine has.
    """
    path = _find(name_or_path)
    try:
        content = yaml.load(path.read_text(), Loader=StrictLoader)
    except FileNotFoundError:
        raise PlatformError("no such file", file=path) from None
    except OSError as error:
        raise PlatformError(f"cannot be read: {error.strerror}", file=path) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise PlatformError(f"not readable as YAML: {problem}", file=path) from None
    validate_platform(content, path)
    return _build(content, ranks, path)


def save_platform(platform: Platform, path: str | Path) -> None:
    """Write a platform as a file that ``load_platform`` reads, links listed one by one.

    The links are written as they are, so that a platform loaded for fewer
    ranks than its machine has is saved with that number of ranks.

    Raises
    ------
    PlatformError
        When a number has no source, or the file would break the schema.
    """
    content = _describe(platform, path)
    validate_platform(content, path)
    _build(content, None, path)
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def _find(name_or_path: str | Path) -> Path:
    """Tell a file from a shipped name."""
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    known = list_platforms()
    if text not in known:
        close = difflib.get_close_matches(text, known, n=1)
        raise PlatformError(
            f"no platform is called {text!r}",
            fix=(f"did you mean {close[0]}? " if close else "")
            + f"known are {', '.join(known)}; a file of your own is given by its path",
        )
    return SHIPPED / f"{text}.yaml"


def _build(content: dict[str, Any], ranks: int | None, path: str | Path) -> Platform:
    """Make the values from a file's checked content."""
    numbers = dict(_walk_numbers(content))
    for place, entry in numbers.items():
        if not math.isfinite(entry["value"]):
            raise PlatformError(
                f"{entry['value']!r} is not finite", file=path, place=place, fix="write a number"
            )
    available = _choose_ranks(content, ranks, path)
    device = content["device"]
    bandwidth = device.get("memory_bandwidth_bytes_per_s")
    if "links" in content:
        links = [
            Link(
                entry["from"],
                entry["to"],
                _number(entry["bandwidth_bytes_per_s"]),
                _number(entry["latency_s"]),
            )
            for entry in content["links"]
        ]
    else:
        topology = dict(content["topology"])
        builder = BUILDERS[topology.pop("builder")]
        links = builder(available, **{key: entry["value"] for key, entry in topology.items()})
    _check_links(links, available, path)
    return Platform(
        name=content["name"],
        device=Device(
            name=device["name"],
            kind=device["kind"],
            memory_bytes=int(device["memory_bytes"]["value"]),
            peak_flop_per_s={k: _number(v) for k, v in device["peak_flop_per_s"].items()},
            memory_bandwidth_bytes_per_s=None if bandwidth is None else _number(bandwidth),
        ),
        ranks=available if ranks is None else ranks,
        links=tuple(
            Link(e.source, e.target, float(e.bandwidth_bytes_per_s), float(e.latency_s))
            for e in links
        ),
        communication_on_compute_stream=content["communication_on_compute_stream"],
        host={key: _number(entry) for key, entry in content.get("host", {}).items()},
        collectives=content.get("collectives"),
        sources={place: entry["source"] for place, entry in numbers.items()},
        notes=content.get("notes", ""),
    )


def _number(entry: dict[str, Any]) -> float:
    return float(entry["value"])


def _choose_ranks(content: dict[str, Any], ranks: int | None, path: str | Path) -> int:
    """Return the devices of the machine, with the job's ranks checked against them."""
    devices = content["ranks"]
    if ranks is not None and ranks < 1:
        raise PlatformError(f"{ranks} ranks were asked for", file=path, fix="ask for 1 or more")
    if devices == "any":
        if "links" in content or ranks is None:
            raise PlatformError(
                "'any' is no number of ranks here", file=path, place="ranks",
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


def _check_links(links: list[Link], ranks: int, path: str | Path) -> None:
    """Refuse what a network could not simulate or would read two ways."""
    seen: set[tuple[str, str]] = set()
    nodes: set[str] = set()
    for number, link in enumerate(links):
        ends = (link.source, link.target)
        problem, fix = "", ""
        if link.source == link.target:
            problem, fix = f"joins {link.source} to itself", "leave it out"
        elif ends in seen:
            problem = f"a second link from {link.source} to {link.target}"
            fix = "write one link with the bandwidths added"
        if problem:
            raise PlatformError(problem, file=path, place=f"links.{number}", fix=fix)
        seen.add(ends)
        nodes.update(ends)
    if ranks == 1:
        return
    lonely = [name_rank_node(rank) for rank in range(ranks) if name_rank_node(rank) not in nodes]
    if lonely:
        raise PlatformError(
            f"no link reaches {lonely[0]}", file=path, place="links",
            fix=f"name the {ranks} ranks rank0 to rank{ranks - 1} and join each of them",
        )  # fmt: skip


def _walk_numbers(content: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every number with its source under its dotted key."""
    if not isinstance(content, dict):
        return
    if "source" in content and "value" in content:
        yield place, content
        return
    for key, entry in content.items():
        if key == "links":
            for link in entry:
                yield from _walk_numbers(link, f"links.{link['from']}->{link['to']}")
        else:
            yield from _walk_numbers(entry, f"{place}.{key}" if place else key)


def _describe(platform: Platform, path: str | Path) -> dict[str, Any]:
    """Turn a platform into a file's content."""

    def number(value: float, key: str, topology_key: str = "") -> dict[str, Any]:
        source = _source_of(platform, key) or _source_of(platform, topology_key)
        if source is None:
            raise PlatformError(
                f"{value!r} has no source", file=path, place=key,
                fix=f"give the platform sources[{key!r}]",
            )  # fmt: skip
        return {"value": value, "source": source}

    device = platform.device
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
            # A built link's numbers have the source of the topology's parameter.
            bridge = "" if is_rank_node(link.source) or is_rank_node(link.target) else "bridge_"
            place = f"links.{name_link(link)}.{key}"
            entry[key] = number(getattr(link, key), place, f"topology.{bridge}{key}")
        links.append(entry)
    content = {
        "name": platform.name,
        "device": described,
        "ranks": platform.ranks,
        "links": links,
        "communication_on_compute_stream": platform.communication_on_compute_stream,
        "host": {key: number(value, f"host.{key}") for key, value in platform.host.items()},
        "collectives": platform.collectives,
        "notes": platform.notes,
    }
    return {key: value for key, value in content.items() if value not in (None, "", {})}


def _source_of(platform: Platform, key: str) -> str | None:
    """Return the source of a dotted key, or of the nearest key above it."""
    while key:
        if key in platform.sources:
            return platform.sources[key]
        key = key.rpartition(".")[0]
    return None
