"""Platform files: read, checked against the schema, and written; `load_platform` is the door.

In a file every number stands beside its source::

    memory_bytes: {value: 80.0e9, source: NVIDIA A100 data sheet}

Its links are listed, or built by a builder by name and its signature, degraded where it says so, and checked. What
measured runs showed of a platform beside its own numbers lies in a file of its own (`correct_platform`).
"""

import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from trioflow.base.errors import PlatformError, suggest
from trioflow.base.plugins import list_plugins, load_plugin
from trioflow.base.provenance import PACKAGE, atomic_path, read_json
from trioflow.base.settings import check_schema
from trioflow.base.yaml_files import read_yaml
from trioflow.hardware.machine import (
    EAGER,
    SLOWDOWN,
    Device,
    InterNode,
    Link,
    Platform,
    Routing,
    describe_inline,
    load_device,
    name_rank_node,
    walk_numbers,
)
from trioflow.hardware.topologies.grids import (
    MOST_PARTS,
    NodeBuilder,
    build_cube_mesh,
    build_double_ring,
    build_edge_list,
    build_mesh,
    build_ring,
    build_torus,
    find_nodes,
    list_reached,
    read_rank,
)
from trioflow.hardware.topologies.nodes import (
    build_dragonfly,
    build_fat_tree,
    build_fully_connected,
    build_node_groups,
    build_nvswitch,
    build_pcie_sockets,
    build_pcie_tree,
    build_rail_optimised,
    build_switch,
)

ENTRY_POINTS = "trioflow.topologies"
"""Group under which a package registers builders: functions of a number of ranks and parameters."""
DOUBT_GROUP = "trioflow.topology_doubts"
"""Group of functions, by their builder's name, that list what of a topology and its files is not followed."""

Builder = Callable[..., list[Link]]

BUILDERS: Mapping[str, Builder] = {
    "fully_connected": build_fully_connected,
    "switch": build_switch,
    "nvswitch": build_nvswitch,
    "ring": build_ring,
    "double_ring": build_double_ring,
    "mesh": build_mesh,
    "torus": build_torus,
    "cube_mesh": build_cube_mesh,
    "pcie_tree": build_pcie_tree,
    "pcie_sockets": build_pcie_sockets,
    "fat_tree": build_fat_tree,
    "dragonfly": build_dragonfly,
    "node_groups": build_node_groups,
    "rail_optimised": build_rail_optimised,
    "edge_list": build_edge_list,
}
"""trioflow's own builders by the name that a platform file gives them, beside those that are registered."""


def find_builder(name: str) -> Builder:
    """Return a builder by its name; trioflow's own come first, so that shipped platforms keep their meaning.

    Raises PlatformError when it is unknown, registered several times, or cannot be loaded or
    called.
    """
    if name in BUILDERS:
        return BUILDERS[name]
    return load_plugin(ENTRY_POINTS, name, BUILDERS, what="builder", error=PlatformError, place="builder")


WORDS = ("builder", "source", "measured")
"""Keys of a topology that are not parameters of its builder."""


def build_topology(
    description: Mapping[str, Any], ranks: int, file: str | Path, *, shared: Mapping[str, Any] | None = None
) -> list[Link]:
    """Build the links that a platform file's ``topology`` describes; paths start at its folder.

    ``description``: a ``builder``'s name and parameters, numbers as ``{value, source}``, choices
    plain, a network within as a topology of its own. ``shared``: values of the whole platform for
    builders that take them. Raises PlatformError, with file and key, when one is unknown, missing
    or of the wrong type, or the builder refuses.
    """
    return _choose_topology(description, file, shared=shared or {})(ranks)


def _list_doubts(topology: Mapping[str, Any], file: str | Path) -> Iterator[str]:
    """Yield what registered builders do not follow of a topology, or of one inside it."""
    name = topology.get("builder")
    if name and name not in BUILDERS and name in list_plugins(DOUBT_GROUP):
        yield from load_plugin(DOUBT_GROUP, name, what="builder")(topology, file)
    for value in topology.values():
        if isinstance(value, dict):
            yield from _list_doubts(value, file)


def _choose_topology(
    description: Mapping[str, Any], file: str | Path, place: str = "topology", shared: Mapping[str, Any] | None = None
) -> NodeBuilder:
    """Return a builder with its parameters chosen; see ``build_topology``."""
    try:
        builder = find_builder(description["builder"])
    except PlatformError as error:
        raise PlatformError(error.problem, file=file, place=f"{place}.{error.place}", fix=error.fix) from None
    known, hints, free = _read_signature(builder)
    given = {key: value for key, value in description.items() if key not in WORDS}
    extra = {key: value for key, value in (shared or {}).items() if key in known}
    twice = sorted(extra.keys() & given.keys())
    if twice:
        raise PlatformError(
            f"{twice[0]!r} stands beside the topology, too", file=file, place=place, fix="keep one of the two"
        )
    unknown = sorted(given.keys() - known.keys())
    if unknown and not free:
        raise PlatformError(
            f"the builder {description['builder']!r} takes no {unknown[0]!r}",
            file=file,
            place=place,
            fix=f"{suggest(unknown[0], known)}it takes {', '.join(sorted(known))}",
        )
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in {*given, *extra}:
            raise PlatformError(f"the key {name!r} is missing", file=file, place=place, fix=f"add {name!r}")
    values = {key: _convert(value, hints.get(key), file, f"{place}.{key}") for key, value in given.items()}
    path = next((value for value in values.values() if isinstance(value, Path)), None)
    if path is not None and "source" not in description:
        raise PlatformError(
            f"the numbers in {path.name} have no source", file=file, place=place, fix="add source: where they come from"
        )
    return partial(_call, builder, {**extra, **values}, file, place)


def _read_signature(builder: Builder) -> tuple[dict[str, inspect.Parameter], dict[str, Any], bool]:
    """Return a builder's parameters but the ranks, their types, and whether it takes any."""
    try:
        parameters = list(inspect.signature(builder).parameters.values())
        hints = typing.get_type_hints(builder)
    except (NameError, TypeError, ValueError):
        return {}, {}, True
    named = [one for one in parameters[1:] if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    free = any(one.kind is one.VAR_KEYWORD for one in parameters)
    return {one.name: one for one in named}, hints, free


def _convert(value: Any, hint: Any, file: str | Path, place: str) -> Any:
    """Turn what the file holds into what the builder takes; without a type hint, as it is."""
    kinds = _read_kinds(hint)
    if isinstance(value, Mapping) and "builder" in value:
        if not kinds or Callable in kinds:
            return _choose_topology(value, file, place)
        given: Any = f"the topology {value['builder']!r}"
    elif isinstance(value, Mapping):
        given = value["value"]
        if not kinds or float in kinds:
            return given if not kinds else float(given)
        if int in kinds and given == int(given):
            return int(given)
    else:
        given = repr(value)
        if not kinds or type(value) in kinds:
            return value
        if isinstance(value, str) and Path in kinds:
            return Path(file).parent / value
    due = next(words for kind, words in _DUE.items() if kind in kinds)
    raise PlatformError(f"{given} is not possible here", file=file, place=place, fix=f"write {due}")


_DUE: Mapping[Any, str] = {
    float: "{value: the number, source: where it comes from}",
    int: "{value: a whole number, source: where it comes from}",
    Callable: "a topology: {builder: its name, ...}",
    bool: "true or false",
    Path: "the path of a file",
    str: "a text",
    object: "what the builder's documentation says",
}
"""What to write for a parameter, by its type."""


def _read_kinds(hint: Any) -> set[Any]:
    """Return the kinds of value that a parameter's type allows; none where it has none."""
    if hint is None or hint is Any or hint is type(None):
        return set()
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*map(_read_kinds, typing.get_args(hint)))
    return {typing.get_origin(hint) or hint, object}


def _call(builder: Builder, values: Mapping[str, Any], file: str | Path, place: str, ranks: int) -> list[Link]:
    """Run a builder and see to it that an error names the file and that links come out."""
    try:
        links = list(builder(ranks, **values))
    except PlatformError as error:
        if error.file is not None:
            raise
        inner = f"{place}.{error.place}" if error.place else place
        raise PlatformError(error.problem, file=file, place=inner, fix=error.fix) from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        name = getattr(builder, "__name__", "builder")
        raise PlatformError(
            f"{name} failed: {type(error).__name__}: {error}",
            file=file,
            place=place,
            fix="check its parameters against its documentation",
        ) from None
    stray = next((link for link in links if not isinstance(link, Link)), None)
    if stray is not None:
        raise PlatformError(
            f"the builder returned {stray!r}, not a link",
            file=file,
            place=f"{place}.builder",
            fix="let it return hardware.machine.Link",
        )
    return links


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
        shared = {key: content[key] for key in ("nodes", "ranks_per_node") if content.get(key) is not None}
        links = build_topology(content["topology"], ranks, file, shared=shared)
    _check_ends(links, file, "links." if "links" in content else "topology, link ")
    links = _degrade_links(links, content, file)
    failed = {place for place, *_ in _find_listed(links, content, "failed_links", file)}
    working = {link[:2]: None for place, link in enumerate(links) if place not in failed}
    _check_ranks(working, ranks, file, "links" if "links" in content else "topology")
    return links


def _list_ends(entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return source and target of an entry's link, and of the one back where it stands for both ways."""
    ends = [(entry["from"], entry["to"]), (entry["to"], entry["from"])]
    return ends if entry.get("both_ways", False) else ends[:1]


def _find_listed(
    links: list[Link], content: Mapping[str, Any], key: str, file: str | Path
) -> Iterator[tuple[int, Mapping[str, Any], str]]:
    """Yield the place of each link that a platform file lists under a key, its entry and where that stands.

    Raises PlatformError where a link does not exist.
    """
    listed = content.get(key, [])
    places = {(link.source, link.target): place for place, link in enumerate(links)} if listed else {}
    for number, entry in enumerate(listed):
        for source, target in _list_ends(entry):
            if (source, target) not in places:
                raise PlatformError(
                    f"no link leads from {source} to {target}",
                    file=file,
                    place=f"{key}.{number}",
                    fix=_offer_link(links, source, target),
                )
            yield places[source, target], entry, f"{key}.{number}"


def _degrade_links(links: list[Link], content: Mapping[str, Any], file: str | Path) -> list[Link]:
    """Return links with those ``degraded`` slower, or gone at ``factor`` 0; PlatformError where one is unknown or twice."""
    changed: dict[int, Link] = {}
    for place, entry, where in _find_listed(links, content, "degraded", file):
        link = links[place]
        if place in changed:
            raise PlatformError(
                f"the link from {link.source} to {link.target} is degraded twice",
                file=file,
                place=where,
                fix="keep one entry, with the factors multiplied",
            )
        factors = _number(entry["factor"]), _number(entry.get("latency_factor", {"value": 1.0}))
        changed[place] = Link(*link[:2], *(one * by for one, by in zip(link[2:], factors, strict=True)))
    kept = [changed.get(place, link) for place, link in enumerate(links)] if changed else links
    return [link for link in kept if link.bandwidth_bytes_per_s > 0]


def _offer_link(links: list[Link], source: str, target: str) -> str:
    targets = [link.target for link in links if link.source == source]
    if targets:
        import difflib  # only for a message

        close = difflib.get_close_matches(target, targets, n=1, cutoff=0.0)
        return f"from {source} one leads to {close[0]}"
    nodes = find_nodes(links)
    return suggest(source, nodes).rstrip() or f"nodes are {', '.join(nodes[:8])}"


def _check_ends(links: list[Link], file: str | Path, place: str) -> None:
    """Refuse a link that a network could not simulate or would read two ways."""
    seen: set[tuple[str, str]] = set()
    for number, (source, target, bandwidth, _) in enumerate(links):
        if bandwidth >= 1.0 and source != target and (source, target) not in seen:
            seen.add((source, target))
            continue
        problem, fix = f"a second link from {source} to {target}", "write one link with the bandwidths added"
        if bandwidth < 1.0:
            problem = f"{bandwidth} bytes/s from {source} to {target}"
            fix = "write 1 byte/s or more, or list it under failed_links"
        elif source == target:
            problem, fix = f"joins {source} to itself", "leave it out"
        raise PlatformError(problem, file=file, place=f"{place}{number}", fix=fix)
    for node in find_nodes(links):
        rank = read_rank(node)
        if rank >= 0 and node != name_rank_node(rank):
            raise PlatformError(
                f"{node!r} is not the name of a rank",
                file=file,
                place=place.partition(",")[0].strip("."),
                fix=f"write {name_rank_node(rank)}",
            )


def _check_ranks(links: Collection[tuple[str, str]], ranks: int, file: str | Path, place: str) -> None:
    """Refuse ranks without a link, and such as bytes cannot reach; ``links``: source and target of each that works."""
    if ranks == 1:
        return
    names = [name_rank_node(rank) for rank in range(ranks)]
    nodes = set(chain(*links))
    lonely = next((name for name in names if name not in nodes), None)
    if lonely:
        raise PlatformError(
            f"no link reaches {lonely}",
            file=file,
            place=place,
            fix=f"name the {ranks} ranks rank0 to rank{ranks - 1} and join each of them",
        )
    back = [(target, source) for source, target in links]
    one_way = any(ends not in links for ends in back)
    for directed, words in ((links, "from rank0 to {}"), (back if one_way else (), "from {} to rank0")):
        reached = list_reached(directed, names[0]) if directed else nodes
        cut_off = next((name for name in names if name not in reached), None)
        if cut_off:
            raise PlatformError(
                f"no route leads {words.format(cut_off)}",
                file=file,
                place=place,
                fix="links are directed: write one each way, or leave fewer of them out",
            )


RATES = "bus_bandwidth_bytes_per_s"
"""Key of a file's ``inter_node``."""


def _read_inter_node(content: Mapping[str, Any]) -> InterNode | None:
    rates = {name: _number(entry) for name, entry in content.get(RATES, {}).items()}
    others: dict[str, Any] = {key: _number(entry) for key, entry in content.items() if key != RATES}
    return InterNode(rates, **others) if content else None


SCHEMA = PACKAGE / "data" / "platform.schema.json"


def validate_platform(content: Any, path: str | Path) -> None:
    """Check a platform file's content; PlatformError says the shallowest violation of the schema."""
    check_schema(content, read_json(SCHEMA), path, PlatformError)


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
    path = find_file(name_or_path)
    if path.parent == SHIPPED:
        return _load_shipped(path.stem, ranks)
    content = read_yaml(path, PlatformError)
    validate_platform(content, path)
    return _build(content, ranks, path)


def write_content(content: dict[str, Any], path: str | Path) -> None:
    """Write a platform file's content, which ``load_platform`` reads; PlatformError where it breaks the schema."""
    validate_platform(content, path)
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
    return f"{numbers} of {platform.name} never measured, but assumed or a data sheet's peak: {named}"


def find_file(name_or_path: str | Path) -> Path:
    """Return the file of a platform by name or path; PlatformError where no platform has the name."""
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


@lru_cache(maxsize=4)
def _load_shipped(name: str, ranks: int | None) -> Platform:
    """Return a shipped platform, validated by tests: the same one, with its routes, for all who load as much of it."""
    path = SHIPPED / f"{name}.yaml"
    return _build(read_yaml(path, PlatformError), ranks, path)


def _build(content: dict[str, Any], ranks: int | None, path: str | Path) -> Platform:
    numbers = dict(walk_numbers(content))
    for place, entry in numbers.items():
        if not math.isfinite(entry.get("value", 0)):
            raise PlatformError(f"{entry['value']!r} is not finite", file=path, place=place, fix="write a number")
    available = _choose_ranks(content, ranks, path)
    sources = {place: entry["source"] for place, entry in numbers.items()}
    device, device_sources = _build_device(content["device"], path)
    unmeasured = [place for place, entry in numbers.items() if not entry.get("measured", True)]
    return Platform(
        name=content["name"],
        device=device,
        ranks=available if ranks is None else ranks,
        links=tuple(build_links(content, available, path)),
        communication_on_compute_stream=content.get("communication_on_compute_stream", False),
        host={key: _number(entry) for key, entry in content.get("host", {}).items()},
        collectives=content.get("collectives"),
        sources={**device_sources, **sources},
        notes=content.get("notes", ""),
        ranks_per_node=_read_ranks_per_node(content),
        node_collectives=content.get("node_collectives"),
        between_nodes=content.get("between_nodes"),
        inter_node=_read_inter_node(content.get("inter_node", {})),
        unmeasured=tuple(sorted(unmeasured)),
        doubts=tuple(_list_doubts(content.get("topology", {}), path)),
        compute_slowdown_during_collective=_number(content.get(SLOWDOWN, {"value": 1.0})),
        corrections={key: _number(one) for key, one in content.get("corrections", {}).items()},
        eager_send_bytes=_number(content.get(EAGER, {"value": 0.0})),
        routing=Routing(
            **content.get("routing", {}),
            failed=frozenset(ends for entry in content.get("failed_links", []) for ends in _list_ends(entry)),
        ),
    )


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
        if key.partition(".")[0] in ("memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flop_per_s")
    }
    if "usable_memory_bytes" in sheet.sources:
        sources["device.memory_bytes"] = sheet.sources["usable_memory_bytes"]
    return Device.of(sheet), sources


def _number(entry: Mapping[str, Any]) -> float:
    return float(entry["value"])


def _choose_ranks(content: dict[str, Any], ranks: int | None, path: str | Path) -> int:
    """Return the devices of the machine, with the job's ranks checked against them."""
    devices = content.get("ranks")
    if "nodes" in content:
        if devices is not None or "ranks_per_node" not in content:
            raise PlatformError(
                "'nodes' goes with 'ranks_per_node', instead of 'ranks'",
                file=path,
                place="nodes",
                fix="write nodes and ranks_per_node, or ranks",
            )
        devices = content["nodes"] * content["ranks_per_node"]
    if devices is None:
        raise PlatformError("the key 'ranks' is missing", file=path, fix="add 'ranks'")
    if max(ranks or 0, devices if isinstance(devices, int) else 0) > MOST_PARTS:
        raise PlatformError(
            f"{max(ranks or 0, devices if isinstance(devices, int) else 0)} ranks, {MOST_PARTS} are the most",
            file=path,
            place="ranks",
            fix="ask for fewer",
        )
    if ranks is not None and ranks < 1:
        raise PlatformError(f"{ranks} ranks were asked for", file=path, fix="ask for 1 or more")
    if devices == "any":
        if "links" in content or ranks is None:
            raise PlatformError(
                "'any' is not a number of ranks here",
                file=path,
                place="ranks",
                fix="write the number beside links; with a topology, ask for a number of ranks",
            )
        return ranks
    if ranks is not None and ranks > devices:
        raise PlatformError(
            f"{ranks} ranks were asked for and {content['name']} has {devices} devices",
            file=path,
            place="ranks",
            fix=f"ask for {devices} or fewer, or describe a larger machine in a file of your own",
        )
    return int(devices)


def _read_ranks_per_node(content: dict[str, Any]) -> int | None:
    count = content.get("ranks_per_node")
    if count is None and isinstance(inner := content.get("topology", {}).get("ranks_per_node"), dict):
        count = inner["value"]
    return None if count is None else int(count)


Corrections = Mapping[str, float]
"""Numbers by component: factors on times, seconds or bytes where the name ends so."""
MICRO_BATCH, EXCHANGE = "micro_batch_s", "exchange_per_rank_s"
"""What is added to the host's costs of the same names [s]."""
_LONGEST = 256
"""Characters of a file's name."""


def correct_platform(platform: Platform, corrections: Corrections) -> Platform:
    """Return a platform with numbers that measured runs showed, beside or in place of its own."""
    values = dict(corrections)
    launches = values.pop("launches", 1.0)
    host = {key: value * launches if key.startswith("launch") else value for key, value in platform.host.items()}
    host |= {key: host.get(key, 0.0) + values.pop(key) for key in (MICRO_BATCH, EXCHANGE) if key in values}
    own = dict(platform.corrections)
    own |= {
        key: value + own.get(key, 0.0) if key.endswith(("_s", "_bytes")) else value * own.get(key, 1.0)
        for key, value in values.items()
    }
    return replace(platform, host=host, corrections=own)


def save_corrected(name_or_path: str | Path, corrections: Mapping[str, float], path: str | Path, source: str) -> None:
    """Write a platform's file again, with numbers that runs showed: of ``corrections``, launches and micro-batches as host costs.

    Files that it names are named by their whole path.
    """
    origin = find_file(name_or_path)
    content = _name_files(read_yaml(origin, PlatformError), origin.parent)
    host, own = content.setdefault("host", {}), content.setdefault("corrections", {})
    for key, value in corrections.items():
        if key == "launches":
            launches = {name: one for name, one in host.items() if name.startswith("launch")}
            host |= {
                name: {"value": one["value"] * value, "source": f"{source}, {value:.3g} times: {one['source']}"}
                for name, one in launches.items()
            }
            continue
        place = host if key in (MICRO_BATCH, EXCHANGE) else own
        before = place.get(key, {}).get("value", 0.0 if key.endswith(("_s", "_bytes")) else 1.0)
        after = before + value if key.endswith(("_s", "_bytes")) else before * value
        place[key] = {"value": after, "source": source}
    write_content({key: one for key, one in content.items() if one != {}}, path)


def _name_files(content: Any, folder: Path) -> Any:
    """Return a file's content in which files beside it are named by their whole path."""
    if isinstance(content, dict):
        return {key: _name_files(one, folder) for key, one in content.items()}
    is_file = isinstance(content, str) and len(content) < _LONGEST and "." in content
    return str((folder / content).resolve()) if is_file and (folder / content).is_file() else content
