"""One node as NCCL found it: the file that ``NCCL_TOPO_DUMP_FILE`` names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from trioflow.base.errors import PlatformError
from trioflow.base.input_files import read_text
from trioflow.hardware.machine import Link, name_rank_node
from trioflow.hardware.topologies.wiring import check_positive, join, join_all

_SWITCH_CLASS = "0x068000"
"""PCI class of NVSwitches, as ``tclass`` of an NVLink says it."""
_SPEED = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*GT/s")
_CODED = ((5.0, 8 / 10), (32.0, 128 / 130), (64.0, 242 / 256))
"""Fastest lane [GT/s] and share of its bits that are data, by the generations of PCI Express."""


def build_nccl_file(
    ranks: int,
    *,
    topology_file: Path,
    nvlink_bandwidth_bytes_per_s: float | None = None,
    nvlink_latency_s: float = 0.0,
    pcie_latency_s: float = 0.0,
    socket_bandwidth_bytes_per_s: float | None = None,
) -> list[Link]:
    """Build the links of a node from NCCL's own description.

    Parameters
    ----------
    ranks : int
        GPUs of the node, as many as the file has; rank i is the i-th by ``dev``.
    topology_file : path
        What NCCL wrote: ``NCCL_TOPO_DUMP_FILE=node.xml`` in the environment of any run.
    nvlink_bandwidth_bytes_per_s : float
        One NVLink, a direction; the file has their number alone.
    nvlink_latency_s, pcie_latency_s : float
        A link of each kind, which the file does not hold.
    socket_bandwidth_bytes_per_s : float
        Between two processors, a direction; needed where GPUs of several have no NVLinks.

    Raises
    ------
    PlatformError
        When the file is not NCCL's, holds another number of GPUs, or lacks a rate that no parameter
        gives.

    Notes
    -----
    Nodes: the GPUs, all NVSwitches as one, as for NCCL; where NVLinks do not join all GPUs, also the
    switches and processors of PCI Express above them. Links: one each way for the NVLinks of two
    nodes together, and for each step up the bus. Network cards are left out: what joins nodes is the
    topology around this one.

    Source: NVIDIA/nccl, ``src/graph/xml.cc`` and ``topo.cc``.
    """
    root = _parse(topology_file)
    gpus = _find_gpus(root, ranks, topology_file)
    links = []
    for (one, other), count in sorted(_count_nvlinks(gpus).items()):
        given, what = nvlink_bandwidth_bytes_per_s, "one link, one direction"
        rate = _ask_rate(given, "nvlink", "NVLinks", what, topology_file)
        links += join(one, other, count * rate, nvlink_latency_s)
    if _joins_all(links, ranks):
        return links
    below = {}
    for number, cpu in enumerate(root.iter("cpu")):
        name = f"cpu{number}"
        below[name] = list(_hang(cpu, name, gpus, pcie_latency_s, topology_file))
        links += below[name]
    sockets = [cpu for cpu, found in below.items() if found]
    if len(sockets) > 1:
        given, has = socket_bandwidth_bytes_per_s, f"GPUs on {len(sockets)} processors"
        rate = _ask_rate(given, "socket", has, "between two, one direction", topology_file)
        links += join_all(sockets, rate, pcie_latency_s)
    return links


def _ask_rate(value: float | None, kind: str, has: str, what: str, path: Path) -> float:
    """Return a rate that the file does not hold [bytes/s], from the platform's parameter."""
    name = f"{kind}_bandwidth_bytes_per_s"
    if value is None:
        raise PlatformError(
            f"has {has} and the platform no {name}", file=path, fix=f"add it: {what}"
        )
    check_positive(name, value)
    return value


def _parse(path: Path) -> Element:
    """Return the root of the file; what declares entities, which NCCL never writes, is refused."""
    if not path.exists():
        raise PlatformError(
            "no such file", file=path, fix="a path starts at the platform file's folder"
        )
    text = read_text(path, PlatformError)
    problem = (
        "it declares a document type"
        if "<!" in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        else ""
    )
    try:
        root = None if problem else ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        root, problem = None, str(error)
    if root is None or root.tag != "system":
        raise PlatformError(
            f"not a topology of NCCL: {problem or 'its root is no <system>'}", file=path,
            fix="give what NCCL_TOPO_DUMP_FILE wrote",
        )  # fmt: skip
    return root


def _find_gpus(root: Element, ranks: int, path: Path) -> dict[str, tuple[str, Element]]:
    """Return the node and the element of each GPU, by its address on the bus, in order of ``dev``."""
    found = [(pci, gpu) for pci in root.iter("pci") if (gpu := pci.find("gpu")) is not None]
    if not found:
        raise PlatformError(
            "no GPU stands in it", file=path, fix="give the file of a run with GPUs"
        )
    if len(found) != ranks:
        raise PlatformError(
            f"{len(found)} GPUs in the file and {ranks} ranks", file=path,
            fix=f"write ranks (or ranks_per_node): {len(found)}",
        )  # fmt: skip
    try:
        found.sort(key=lambda pair: int(pair[1].get("dev", "")))
    except ValueError:
        raise PlatformError("a <gpu> has no number dev", file=path, fix="dump it again") from None
    return {
        pci.get("busid", "").lower(): (name_rank_node(rank), gpu)
        for rank, (pci, gpu) in enumerate(found)
    }


def _count_nvlinks(gpus: dict[str, tuple[str, Element]]) -> Counter[tuple[str, str]]:
    """Return how many NVLinks join two GPUs, or a GPU and the NVSwitches.

    Both GPUs of a pair list their links: the larger number counts.
    """
    seen: Counter[tuple[str, str]] = Counter()
    for name, gpu in gpus.values():
        for link in gpu.iter("nvlink"):
            count = int(link.get("count", "0")) if link.get("count", "0").isdigit() else 0
            target = gpus.get(link.get("target", "").lower())
            if target is not None:
                seen[name, target[0]] += count
            elif link.get("tclass", "").startswith(_SWITCH_CLASS):
                seen[name, "nvswitch"] += count
    pairs: Counter[tuple[str, str]] = Counter()
    for (one, other), count in seen.items():
        key = (one, other) if other == "nvswitch" or one < other else (other, one)
        pairs[key] = max(pairs[key], count)
    return +pairs


def _joins_all(links: list[Link], ranks: int) -> bool:
    """Whether links lead from the first rank to all others."""
    beyond: dict[str, list[str]] = {}
    for link in links:
        beyond.setdefault(link.source, []).append(link.target)
    reached, todo = {name_rank_node(0)}, [name_rank_node(0)]
    while todo:
        new = set(beyond.get(todo.pop(), ())) - reached
        reached |= new
        todo += new
    return all(name_rank_node(rank) in reached for rank in range(ranks))


def _hang(
    above: Element, name: str, gpus: dict[str, tuple[str, Element]], latency_s: float, path: Path
) -> Iterator[Link]:
    """Yield the links of PCI Express below a processor or switch, where GPUs hang on them."""
    for pci in above.findall("pci"):
        if pci.find(".//gpu") is None:
            continue
        address = pci.get("busid", "").lower()
        below = gpus[address][0] if address in gpus else f"pci-{address}"
        yield from join(name, below, _read_rate(pci, path), latency_s)
        yield from _hang(pci, below, gpus, latency_s, path)


def _read_rate(pci: Element, path: Path) -> float:
    """Return what a link of PCI Express carries, a direction [bytes/s]."""
    speed, width = _SPEED.match(pci.get("link_speed", "")), pci.get("link_width", "")
    rate = float(speed[1]) if speed else 0.0
    share = next((share for fastest, share in _CODED if rate <= fastest), None)
    if not rate or share is None or not width.isdigit() or not int(width):
        raise PlatformError(
            f"link_speed {pci.get('link_speed', '')!r} and link_width {width!r} of {pci.get('busid')} are no rate",
            file=path, fix='write them as NCCL does, such as "16.0 GT/s PCIe" and "16"',
        )  # fmt: skip
    return rate * 1e9 * int(width) * share / 8
