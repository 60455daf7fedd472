"""What a machine is made of: devices with their data sheets, links and host, as frozen values.

A `Platform` is data. It says what every rank's device can do, which directed links join the ranks,
and what the host costs; where each number comes from travels with it in ``sources``.

A `DeviceSheet` is what a GPU's maker says of it, each number beside its source. A sheet is a file
``data/devices/<name>.yaml``, or one of the user's own in ``config/devices/`` of the working folder::

    memory_bytes: {value: 48.0e9, source: NVIDIA A40 data sheet}

Names are read with the words of ``data/device_names.json``; a new spelling is added there. Files are checked against
their JSON schemas: numbers in ranges per quantity, errors in plain words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct, structs

from trioflow.base.derived import Derives
from trioflow.base.errors import PlatformError, suggest
from trioflow.base.plan_row import Plan
from trioflow.base.precision_recipes import NANOTRON
from trioflow.base.provenance import PACKAGE, read_json
from trioflow.base.settings import check_schema
from trioflow.base.yaml_files import read_yaml

if TYPE_CHECKING:
    from networkx import DiGraph


TABLE = PACKAGE / "data" / "device_names.json"

_MEMORY = re.compile(r"\b(\d+) ?g(?:i?b)?\b")


class DeviceName(Struct, frozen=True):
    """The parts of a name."""

    # What is left without vendor, memory and form factor: ``("rtx", "2080", "ti")``.
    product: tuple[str, ...]
    memory_gb: int | None  # Memory in gigabytes; None where the name does not say
    form_factor: str | None  # ``PCIe`` or ``SXM``; None where the name does not say

    def fits(self, other: DeviceName) -> bool:
        """Return whether another name may be this device's: nothing that both say differs."""
        return self.product == other.product and all(
            None in pair or pair[0] == pair[1]
            for pair in ((self.memory_gb, other.memory_gb), (self.form_factor, other.form_factor))
        )


def plain_device_name(name: str) -> str:
    """Return a name without what tools write differently: case, hyphens, underscores."""
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())


def read_name(name: str) -> DeviceName:
    """Take a name apart as a driver, a profile or a sheet writes it: ``Tesla V100-DGXS-32GB``."""
    text = re.sub(r"\b([gr]tx)(\d)", r"\1 \2", plain_device_name(name))
    for board, words in _table()["boards"].items():
        text = re.sub(rf"\b{re.escape(board)}\b", words, text)
    sizes = _MEMORY.findall(text)
    forms: Mapping[str, str] = _table()["form_factors"]
    words = _MEMORY.sub(" ", text).split()
    known = [forms[word] for word in words if word in forms]
    product = tuple(w for w in words if w not in forms and w not in _table()["vendors"])
    return DeviceName(product, int(sizes[0]) if sizes else None, known[0] if known else None)


def is_processor(name: str) -> bool:
    """Return whether a name is that of a processor, not of a GPU."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((?:r|tm)\)", " ", name.lower()))
    return any(word in _table()["processors"] for word in words)


@cache
def _table() -> dict[str, Any]:
    content: dict[str, Any] = read_json(TABLE)
    return content


SHIPPED = PACKAGE / "data" / "devices"
OWN = Path("config") / "devices"
"""Where a user writes the sheet of a GPU that none ships of: in the folder that trioflow runs in."""
SCHEMA = PACKAGE / "data" / "device.schema.json"

_BINARY_GB = 1.1
"""Bytes that are usable over those that a sheet counts: at most 1024**3 of 1e9, and a rounding."""
_ROUNDED = 0.01
"""Relative difference of numbers that two sheets of one GPU round differently."""
_UNREAD = (
    "l2_bytes",
    "sm_count",
    "boost_clock_hz",
    "peak_flop_per_s.fp64",
    "nvlink.generation",
    "nvlink.bandwidth_bytes_per_s",
)
"""Numbers that no prediction reads: multiprocessors and clock are in the peak rates, no step computes in fp64, and links
are the platform's."""
_WITHOUT_TIME = (*_UNREAD, "memory_bytes", "usable_memory_bytes")

FALLBACK_PRECISION = "fp32"
"""What arithmetic runs in where a device lacks the precision asked for."""

SUSTAINED_COMPUTE = 1 + (295 / 257 - 1) / (295 / 312)
"""An A100's: 257 of 312 TFLOP/s on random numbers, which draw the
power that training draws, where constant ones reached 295 (H. He, "Strangely, Matrix Multiplications on GPUs Run
Faster When Given Predictable Data", 2024)."""


@dataclass(frozen=True)
class DeviceSheet:
    """A GPU as its maker describes it."""

    name: str  # Name of the sheet
    title: str  # Product name with form factor and memory
    driver_names: tuple[str, ...]  # Names under which drivers report it
    # Boards of one chip share its parts and libraries' kernels. A sheet that leaves them out is of
    # a chip of its own.
    chip: str
    architecture: str
    form_factor: str
    memory_bytes: int  # Memory, by the data sheet [bytes]
    usable_memory_bytes: int  # What the driver reports of it [bytes]
    memory_bandwidth_bytes_per_s: float  # Peak bandwidth of the memory [bytes/s]
    sm_count: int  # Streaming multiprocessors; 1 where the sheet leaves them out: no waves
    # Power that the board may draw [W]; infinite where the sheet leaves it out: no peak is out of
    # reach for lack of it.
    power_limit_w: float
    # Times that computing, at the peak rate, takes in a step of training, of that in a loop of one product; None where
    # the sheet leaves it to the rule from power limit and peak.
    sustained_compute: float | None
    peak_flop_per_s: Mapping[str, float] = field(hash=False)  # Peak dense rate for each precision [flop/s]
    # Precisions whose peak is that of tensor cores; where the sheet leaves them out, those of a
    # peak above the fp32 one.
    tensor_core_precisions: tuple[str, ...] = ()
    # The file's content: what a sheet is made of again.
    content: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)

    @cached_property
    def sources(self) -> Mapping[str, str]:
        """Source of every number by its dotted key."""
        return {place: entry["source"] for place, entry in walk_numbers(self.content)}

    @cached_property
    def numbers(self) -> Mapping[str, float]:
        """Every number that the file gives, by its dotted key, such as ``boost_clock_hz`` or ``nvlink.bandwidth_bytes_per_s``."""
        return {place: float(entry["value"]) for place, entry in walk_numbers(self.content)}

    def list_doubts(self) -> list[str]:
        """Say which numbers of a sheet of one's own have no effect."""
        unread = [key for key in _UNREAD if key in self.numbers and not self.is_shipped]
        text = f"no prediction reads {', '.join(unread)} of the device sheet {self.name}: peak rates say the rest, and links are the platform's"
        return [text] if unread else []

    @cached_property
    def is_shipped(self) -> bool:
        """Whether it is one of trioflow's own, unchanged."""
        return self.name in list_devices() and self == _shipped(self.name)

    @property
    def driver_name(self) -> str:
        """Name that a current driver reports."""
        return self.driver_names[0]

    @property
    def parts(self) -> DeviceName:
        """What the sheet says of product, memory and form factor."""
        own = read_name(self.name)
        return DeviceName(own.product, round(self.memory_bytes / 1e9), self.form_factor or own.form_factor)

    def is_same_gpu(self, other: DeviceSheet) -> bool:
        """Return whether two sheets share a name, and no number that times depend on and both give differs."""
        names = [{plain_device_name(n) for n in (one.name, *one.driver_names)} for one in (self, other)]
        both = [key for key in self.numbers if key in other.numbers and key not in _WITHOUT_TIME]
        return bool(names[0] & names[1]) and all(
            math.isclose(self.numbers[key], other.numbers[key], rel_tol=_ROUNDED) for key in both
        )

    def distance(self, other: DeviceSheet, precision: str) -> tuple[bool, bool, float]:
        """Return how far another GPU is: whether it is another one, of another chip, and by logarithms of rates at a precision."""
        rates = (
            self.memory_bandwidth_bytes_per_s / other.memory_bandwidth_bytes_per_s,
            self.peak(precision) / other.peak(precision),
        )
        apart = sum(abs(math.log(rate)) for rate in rates)
        return not self.is_same_gpu(other), self.chip != other.chip, apart

    def runs_on_tensor_cores(self, precision: str) -> bool:
        """Return whether matrix products of a precision run on tensor cores."""
        return precision in self.tensor_core_precisions

    def peak(self, precision: str) -> float:
        """Return the peak rate of products of a precision [flop/s]; one that the hardware lacks runs in fp32."""
        return self.peak_flop_per_s.get(precision, self.peak_flop_per_s[FALLBACK_PRECISION])


def list_devices() -> list[str]:
    """Return the names of the sheets that ship with trioflow, sorted."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_device(name_or_path: str | Path | Mapping[str, Any], file: str | Path = "") -> DeviceSheet:
    """Read a sheet by the name of a shipped one, from a file (a path, or a name that ends in ``.yaml``), or from content.

    ``file``: where content stands.
    """
    if isinstance(name_or_path, Mapping):
        validate_sheet(name_or_path, file)
        return _build(name_or_path, file)
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml")):
        return _read(Path(name_or_path))
    if text not in list_devices():
        raise PlatformError(
            f"no device sheet is called {text!r}",
            fix=f"{suggest(text, list_devices())}known are {', '.join(list_devices())}; a sheet of your own is given by "
            "its path",
        )
    return _shipped(text)


def resolve_device(device: DeviceSheet | str) -> tuple[str, DeviceSheet | None]:
    """Return a device's name and its sheet; one that is given by its name alone is looked up."""
    if isinstance(device, DeviceSheet):
        return device.driver_name, device
    return device, find_sheet(device)


def find_device(name: str, own: bool = True) -> DeviceSheet:
    """Return the sheet of a device by its driver's name or its own; the user's sheets (``OWN``) come first.

    Case, spaces, hyphens and underscores do not matter. A name not listed means the sheet of the
    same product whose memory and form factor it does not contradict. Raises PlatformError, with the
    numbers to write and where, when none or several fit.
    """
    fitting = list_fitting(name, own)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise PlatformError(
            f"{name!r} stands for {' and '.join(sheet.name for sheet in fitting)}",
            fix="give the name with its memory and form factor, as the driver reports it",
        )
    known = [path.stem for path in OWN.glob("*.y*ml")]
    known += [_shipped(each).driver_name for each in list_devices()]
    file = OWN / f"{'-'.join(read_name(name).product) or 'my-gpu'}.yaml"
    raise PlatformError(
        f"no data sheet describes {name!r}",
        fix=f"{suggest(name, known)}write its peak rates in fp32 and fp16 [flop/s], its memory bandwidth [bytes/s] and its "
        f"memory [bytes] into {file}, as docs/my_cluster.md shows",
    )


def list_fitting(name: str, own: bool = True) -> list[DeviceSheet]:
    """Return the sheet that has a name, or those that it may stand for; only the likely ones are read."""
    wanted, parts = plain_device_name(name), read_name(name)
    for sheet in _read_likely([wanted], own):
        if wanted in map(plain_device_name, (sheet.name, *sheet.driver_names)):
            return [sheet]
    sheets = _read_likely(parts.product, own) if parts.product else ()
    return [sheet for sheet in sheets if sheet.parts.fits(parts)]


def find_sheet(device_name: str, own: bool = True) -> DeviceSheet | None:
    """Return the sheet of a device, or None; a processor has none but the user's own.

    ``own``: whether the user's sheets (``OWN``) are asked, and first: not for what was measured elsewhere.
    """
    if is_processor(device_name) and not (own and any(OWN.glob("*.y*ml"))):
        return None
    fitting = list_fitting(device_name, own)
    return fitting[0] if len(fitting) == 1 else None


def _read_likely(words: Iterable[str], own: bool) -> Iterator[DeviceSheet]:
    """Yield the sheets whose text holds all words, the user's first: a broken one that names another GPU is not read."""
    for path in sorted(OWN.glob("*.y*ml")) if own else ():
        text = plain_device_name(path.read_text(encoding="utf-8", errors="replace"))
        if all(word in text for word in words):
            yield _read(path)
    for name in list_devices():
        if all(word in _shipped_words(name) for word in words):
            yield _shipped(name)


@cache
def _shipped_words(name: str) -> str:
    """Return a sheet's text to look for a name in: reading all sheets as YAML takes a tenth of a second."""
    return plain_device_name((SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"))


@cache
def _shipped(name: str) -> DeviceSheet:
    return _read(SHIPPED / f"{name}.yaml")


def _read(path: Path) -> DeviceSheet:
    content = read_yaml(path, PlatformError)
    if path.parent != SHIPPED:  # the shipped ones are validated by tests
        validate_sheet(content, path)
    return _build(content, path)


def validate_sheet(content: Any, path: str | Path) -> None:
    """Check a device sheet's content; PlatformError says the shallowest violation, or memory that cannot be used."""
    check_schema(content, read_json(SCHEMA), path, PlatformError)
    memory, usable = (content.get(key, {}) for key in ("memory_bytes", "usable_memory_bytes"))
    # Makers count in powers of ten what drivers report in powers of two.
    most = memory["value"] * _BINARY_GB
    if usable.get("value", 0) > most:
        raise PlatformError(
            f"{usable['value']:g} bytes can be used of {memory['value']:g}",
            file=path,
            place="usable_memory_bytes",
            fix=f"write what the driver reports, {most:g} or less",
        )


def walk_numbers(content: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what has a source, a number or all of a topology, under its dotted key."""
    if not isinstance(content, dict):
        return
    if "source" in content and ("value" in content or "builder" in content):
        yield place, content
    for key, entry in content.items() if "value" not in content else ():
        if key in ("links", "degraded") and not place:
            for link in entry:
                yield from walk_numbers(link, f"{key}.{link['from']}->{link['to']}")
        else:
            yield from walk_numbers(entry, f"{place}.{key}" if place else key)


def describe_inline(content: Mapping[str, Any], path: str | Path) -> DeviceSheet | None:
    """Return the sheet of a GPU whose numbers a platform's file gives: those of its name's sheet, but for these.

    None where no sheet fits the name, and memory bandwidth or fp32's peak are not given.
    """
    known = find_sheet(content["name"])
    base: Mapping[str, Any] = {"name": content["name"], "driver_names": [content["name"]]}
    if known is not None:
        base = known.content
    kept = {key: entry for key, entry in content.items() if key not in ("name", "kind")}
    if known is not None:
        del kept["memory_bytes"]  # what is free of it, not what the maker says
    peaks = {**base.get("peak_flop_per_s", {}), **content["peak_flop_per_s"]}
    merged = {**base, **kept, "peak_flop_per_s": peaks}
    if FALLBACK_PRECISION not in peaks or "memory_bandwidth_bytes_per_s" not in merged:
        return None
    return _build(merged, path)


def _build(content: Mapping[str, Any], path: str | Path) -> DeviceSheet:
    values = {place: entry["value"] for place, entry in walk_numbers(content)}
    peaks = {name: float(values[f"peak_flop_per_s.{name}"]) for name in content["peak_flop_per_s"]}
    fast = [n for n, peak in peaks.items() if peak > peaks[FALLBACK_PRECISION]]
    tensor = tuple(content.get("tensor_core_precisions", fast))
    lacking = sorted(set(tensor) - set(peaks))
    if lacking:
        raise PlatformError(
            f"tensor cores of {lacking[0]} have no peak",
            file=path,
            place="tensor_core_precisions",
            fix=f"add peak_flop_per_s.{lacking[0]}",
        )
    return DeviceSheet(
        name=content["name"],
        title=content.get("title", content["name"]),
        driver_names=tuple(content["driver_names"]),
        chip=content.get("chip", content["name"]),
        architecture=content.get("architecture", ""),
        form_factor=content.get("form_factor", ""),
        memory_bytes=int(values["memory_bytes"]),
        usable_memory_bytes=int(values.get("usable_memory_bytes", values["memory_bytes"])),
        memory_bandwidth_bytes_per_s=float(values["memory_bandwidth_bytes_per_s"]),
        sm_count=int(values.get("sm_count", 1)),
        power_limit_w=float(values.get("power_limit_w", math.inf)),
        sustained_compute=values.get("sustained_compute"),
        peak_flop_per_s=peaks,
        tensor_core_precisions=tensor,
        content=content,
    )


SLOWDOWN = "compute_slowdown_during_collective"
EAGER = "eager_send_bytes"
"""Names of a platform's numbers that may be left out."""
TIES = ("first", "ecmp")
"""What becomes of equally good routes; see ``Routing``."""


class Device(Struct, frozen=True):
    """The device of every rank.

    ``peak_flop_per_s``: dense, by precision [flop/s]; ``memory_bandwidth_bytes_per_s``: None where
    unknown [bytes/s]; ``sheet``: the GPU as its maker describes it, None where nobody gave one.
    """

    name: str
    kind: str
    memory_bytes: int
    peak_flop_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float | None = None
    sheet: DeviceSheet | None = None

    @classmethod
    def of(cls, sheet: DeviceSheet) -> Device:
        """Return the GPU of a sheet."""
        return cls(
            sheet.driver_name,
            "gpu",
            sheet.usable_memory_bytes,
            dict(sheet.peak_flop_per_s),
            sheet.memory_bandwidth_bytes_per_s,
            sheet,
        )

    def keep_free(self, share: float) -> Device:
        """Return the device with less memory to use."""
        return structs.replace(self, memory_bytes=int(self.memory_bytes * (1 - share)))

    @property
    def described(self) -> DeviceSheet | str:
        """What cost models are chosen by: the sheet, or the name of a device that has none."""
        return self.sheet or self.name


class Link(NamedTuple):
    """A directed link between two network nodes (full duplex is two links); ``latency_s``: before the first byte arrives."""

    source: str
    target: str
    bandwidth_bytes_per_s: float
    latency_s: float


def narrow_links(links: Sequence[Link], factor: float) -> Sequence[Link]:
    """Return links of which each moves a ``factor``th of the bytes."""
    if factor == 1:
        return links
    return [Link(one.source, one.target, one.bandwidth_bytes_per_s / factor, one.latency_s) for one in links]


@dataclass(frozen=True)
class Routing:
    """How bytes find their way over the links; see ``network.routing.Router``.

    ``ties`` (first, ecmp): of equally good routes the first takes all, or they share the pairs of
        nodes among them (equal-cost multi-path).
    ``seed``: another one spreads the pairs in another way; ``ecmp`` only.
    ``failed``: links, as source and target, that no route takes.
    """

    ties: str = "first"
    seed: int = 0
    failed: frozenset[tuple[str, str]] = frozenset()


ALL = "all"
"""Collectives that are not named, of `InterNode`."""


class InterNode(Struct, frozen=True):
    """What a user measured between the nodes of a machine.

    ``bus_bandwidth_bytes_per_s``: as nccl-tests prints it over whole nodes, by collective, or of ``ALL``
        [bytes/s]; none where only the latency was measured.
    ``latency_s``: from a GPU to its counterpart in the next node [s]; the links' own where None.
    ``message_bytes``: of the collectives measured [bytes]; large ones where None.
    ``source``: where the numbers come from.
    ``in_links``: whether the platform's links have these numbers.
    """

    bus_bandwidth_bytes_per_s: Mapping[str, float]
    latency_s: float | None = None
    message_bytes: float | None = None
    source: str = "given"
    in_links: bool = False


@dataclass(frozen=True, repr=False)
class Platform(Derives):
    """A machine: devices, links, host costs, and where the numbers come from.

    ``name``: name of the platform.
    ``device``: the device of every rank; all ranks have the same.
    ``ranks``: ranks of the job, at most the devices of the machine.
    ``links``: directed links. Rank r is the node ``rank<r>``; every other node (a switch, a host
        bridge) has any other name.
    ``communication_on_compute_stream``: whether a collective keeps the device from computing.
    ``host``: named costs of the host, such as ``tensor_parallel_forward_s`` [s].
    ``collectives``: communication library whose measured curves fit, with its version.
    ``sources``: source of every number, by dotted key: ``device.memory_bytes``,
        ``device.peak_flop_per_s.bf16``, ``links.rank0->rank1.bandwidth_bytes_per_s``,
        ``host.<name>``. A key covers all keys below it, so ``links`` may speak for every link.
    ``notes``: what a reader of a prediction must know.
    ``ranks_per_node``: ranks of a node, which ranks fill in order; None where the machine is one
        node or its nodes are not known.
    ``node_collectives``: shipped cost model of collectives inside such a node.
    ``between_nodes``: shipped measurements of collectives over several such nodes.
    ``inter_node``: the network between nodes as a user measured it; see ``network.across_nodes``.
    ``unmeasured``: keys, as in ``sources`` and as far-reaching, of the numbers that nobody has
        measured on such a machine: assumed ones and peaks of data sheets.
    ``doubts``: what its files say that nothing here follows.
    ``routing``: how bytes find their way, and which links have failed.
    ``compute_slowdown_during_collective``: time of compute while its device takes part in a
        collective, over its time alone; 1 where nobody knows better.
    ``corrections``: what measured runs showed beside all this: factors on times by component
        (compute, communication, between_nodes), what a ring's step between nodes takes longer
        (``between_nodes_step_s``) and at least (``between_nodes_least_step_s``) [s], ``outside_bytes`` [bytes].
    ``eager_send_bytes``: largest message between two ranks that does not wait for its receiver
        [bytes]; see ``parallel.extrapolate``.
    """

    name: str
    device: Device
    ranks: int
    links: tuple[Link, ...]
    communication_on_compute_stream: bool = False
    host: Mapping[str, float] = field(default_factory=dict)
    collectives: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: str = ""
    ranks_per_node: int | None = None
    node_collectives: str | None = None
    between_nodes: str | None = None
    inter_node: InterNode | None = None
    unmeasured: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    routing: Routing = Routing()
    compute_slowdown_during_collective: float = 1.0
    eager_send_bytes: float = 0.0
    corrections: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse numbers that no machine has, NaN among them: PlatformError."""
        device, inf = self.device, math.inf
        for place, value in (
            ("device.memory_bytes", device.memory_bytes),
            ("device.memory_bandwidth_bytes_per_s", device.memory_bandwidth_bytes_per_s or 1.0),
            *((f"device.peak_flop_per_s.{key}", peak) for key, peak in device.peak_flop_per_s.items()),
        ):
            if not 0 < value < inf:
                raise PlatformError(f"{self.name}: {value!r} is not positive", place=place)
        for link in self.links:
            if not (link[2] > 0 and 0 <= link[3] < inf):
                raise PlatformError(
                    f"{self.name}: {link[2]!r} bytes/s after {link[3]!r} s is no link",
                    place=f"links.{name_link(link)}",
                    fix="give a positive bandwidth, and a latency of 0 or more",
                )

    def __repr__(self) -> str:
        return f"<Platform {self.name}: {self.ranks} x {self.device.name}, {len(self.links)} links>"

    def to_networkx(self) -> DiGraph:
        """Return the machine as a graph: an edge is a link with its fields."""
        import networkx

        graph = networkx.DiGraph(name=self.name)
        graph.add_edges_from((*link[:2], link._asdict()) for link in self.links)
        return graph

    def host_of(self, plan: Plan, framework: str) -> dict[str, float]:
        """Return the host's costs under a plan of a framework (``PrecisionRecipe.framework``).

        In a nanotron run on several nodes each exchange of a tensor group takes ``exchange_per_rank_s`` longer per rank
        of the group, and ``exchange_per_rank_beyond_node_s`` on top where the group itself spans several nodes.
        """
        host = dict(self.host)
        each_s, beyond_s = (host.pop(f"exchange_per_rank{where}_s", 0.0) for where in ("", "_beyond_node"))
        each_s += beyond_s if plan.tensor > (self.ranks_per_node or plan.tensor) else 0.0
        if framework == NANOTRON and plan.ranks > (self.ranks_per_node or plan.ranks):
            for key in ("tensor_parallel_forward_s", "tensor_parallel_backward_s"):
                host[key] = host.get(key, 0.0) + plan.tensor * each_s
        return host


def name_rank_node(rank: int) -> str:
    """Return the name of the network node that a rank is."""
    return f"rank{rank}"


def is_rank_node(node: str) -> bool:
    """Return whether a network node is a rank."""
    return node.startswith("rank") and node[4:].isdecimal()


def name_link(link: Link) -> str:
    """Return the key of a link in statistics and sources, such as ``rank0->rank1``."""
    return f"{link.source}->{link.target}"
