"""One node as NCCL found it: the file that ``NCCL_TOPO_DUMP_FILE`` names, and what an ``nccl.conf`` makes of it."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import Link, name_rank_node
from trioflow.hardware.topologies.grids import check_positive, join, join_all, list_reached, read_file

_SWITCH_CLASS = "0x068000"
"""PCI class of NVSwitches, as ``tclass`` of an NVLink says it."""
_SPEED = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*GT/s")
_CODED = ((5.0, 8 / 10), (32.0, 128 / 130), (64.0, 242 / 256))
"""Fastest lane [GT/s] and share of its bits that are data, by the generations of PCI Express."""
_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
"""Values of NCCL_P2P_LEVEL by their old numbers; NVL has none."""
_MEASURED = "give collectives measured with it: nccl-tests, trioflow fit-collectives, --collectives"
_CARDS = "describe the network between nodes with the cards that it leaves: nics_per_node, edge_list"
_NOT_FOLLOWED: Mapping[str, tuple[str, str]] = {
    "NCCL_ALGO": ("", "say --algorithm ring, tree or double-tree to send the messages of one"),
    **dict.fromkeys(("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_NET"), ("", _CARDS)),
    "NCCL_IB_DISABLE": ("0", _CARDS),
    "NCCL_SHM_DISABLE": ("0", _MEASURED),
    **dict.fromkeys(
        (
            "NCCL_PROTO",
            "NCCL_MAX_NCHANNELS",
            "NCCL_MIN_NCHANNELS",
            "NCCL_MAX_CTAS",
            "NCCL_MIN_CTAS",
            "NCCL_NTHREADS",
            "NCCL_BUFFSIZE",
            "NCCL_NVLS_ENABLE",
            "NCCL_COLLNET_ENABLE",
            "NCCL_CROSS_NIC",
            "NCCL_NET_GDR_LEVEL",
            "NCCL_MAX_P2P_NCHANNELS",
            "NCCL_IB_QPS_PER_CONNECTION",
        ),
        ("", _MEASURED),
    ),
}
"""Variables that change times and are not followed: the value that changes nothing, and what to do instead."""


def build_nccl_file(
    ranks: int,
    *,
    topology_file: Path,
    conf_file: Path | None = None,
    nvlink_bandwidth_bytes_per_s: float | None = None,
    nvlink_latency_s: float = 0.0,
    pcie_latency_s: float = 0.0,
    socket_bandwidth_bytes_per_s: float | None = None,
) -> list[Link]:
    """Build the links of a node from NCCL's own description.

    ``ranks``: GPUs of the node, as many as the file has; rank i is the i-th by ``dev``.
    ``topology_file``: what NCCL wrote (``NCCL_TOPO_DUMP_FILE=node.xml`` in the environment of any
    run). ``conf_file``: the ``nccl.conf`` of the runs, whose ``NCCL_P2P_DISABLE`` and
    ``NCCL_P2P_LEVEL`` are followed; what else changes times, ``list_doubts`` says.
    ``nvlink_bandwidth_bytes_per_s``: one NVLink, a direction (the file has their number alone);
    ``nvlink_latency_s``, ``pcie_latency_s``: a link of each kind; ``socket_bandwidth_bytes_per_s``:
    between two processors, a direction, where GPUs of several have no NVLinks. Raises PlatformError
    when the file is not NCCL's, holds another number of GPUs, or lacks a rate that nothing gives.

    Nodes: the GPUs, all NVSwitches as one, as for NCCL; where NVLinks do not join all GPUs, also
    the switches and processors of PCI Express above them. Links: one each way for the NVLinks of
    two nodes together, and for each step up the bus. Network cards are left out: what joins nodes
    is the topology around this one.

    Source: NVIDIA/nccl, ``src/graph/xml.cc`` and ``topo.cc``; its documentation, "Environment
    Variables".
    """
    root = _parse(topology_file)
    gpus = _find_gpus(root, ranks, topology_file)
    level = _read_level({} if conf_file is None else _read_conf(conf_file), conf_file)
    links = []
    for (one, other), count in sorted(_count_nvlinks(gpus).items()) if level != "LOC" else ():
        given, what = nvlink_bandwidth_bytes_per_s, "one link, one direction"
        rate = _ask_rate(given, "nvlink", "NVLinks", what, topology_file)
        links += join(one, other, count * rate, nvlink_latency_s)
    reached = list_reached((link[:2] for link in links), name_rank_node(0))
    if reached.issuperset(map(name_rank_node, range(ranks))):
        return links
    below = _list_pcie(root, gpus, pcie_latency_s, topology_file, level in ("LOC", "NVL"))
    links += [link for below_cpu in below.values() for link in below_cpu]
    sockets = [cpu for cpu, below_cpu in below.items() if below_cpu]
    if len(sockets) > 1:
        given, has = socket_bandwidth_bytes_per_s, f"GPUs on {len(sockets)} processors"
        rate = _ask_rate(given, "socket", has, "between two, one direction", topology_file)
        links += join_all(sockets, rate, pcie_latency_s)
    return links


def _list_pcie(
    root: Element, gpus: dict[str, tuple[str, Element]], latency_s: float, path: Path, apart: bool
) -> dict[str, list[Link]]:
    """Return the links of PCI Express below each processor; without access to each other's memory bytes turn there."""
    names = {f"cpu{number}": cpu for number, cpu in enumerate(root.iter("cpu"))}
    return {name: list(_hang(cpu, (name, name), gpus, latency_s, path, apart)) for name, cpu in names.items()}


def _ask_rate(value: float | None, kind: str, has: str, what: str, path: Path) -> float:
    """Return a rate that the file does not hold [bytes/s], from the platform's parameter."""
    name = f"{kind}_bandwidth_bytes_per_s"
    if value is None:
        raise PlatformError(f"has {has} and the platform no {name}", file=path, fix=f"add it: {what}")
    check_positive(name, value)
    return value


def _parse(path: Path) -> Element:
    """Return the root of the file; what declares entities, which NCCL never writes, is refused."""
    text = read_file(path)
    problem = "it declares a document type" if "<!" in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL) else ""
    try:
        root = None if problem else ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        root, problem = None, str(error)
    if root is None or root.tag != "system":
        raise PlatformError(
            f"not a topology of NCCL: {problem or 'its root is no <system>'}",
            file=path,
            fix="give what NCCL_TOPO_DUMP_FILE wrote",
        )
    return root


def _find_gpus(root: Element, ranks: int, path: Path) -> dict[str, tuple[str, Element]]:
    """Return the node and the element of each GPU, by its address on the bus, in order of ``dev``."""
    gpus = [(pci, gpu) for pci in root.iter("pci") if (gpu := pci.find("gpu")) is not None]
    if not gpus:
        raise PlatformError("no GPU stands in it", file=path, fix="give the file of a run with GPUs")
    if len(gpus) != ranks:
        raise PlatformError(
            f"{len(gpus)} GPUs in the file and {ranks} ranks",
            file=path,
            fix=f"write ranks (or ranks_per_node): {len(gpus)}",
        )
    try:
        gpus.sort(key=lambda pair: int(pair[1].get("dev", "")))
    except ValueError:
        raise PlatformError("a <gpu> has no number dev", file=path, fix="dump it again") from None
    return {pci.get("busid", "").lower(): (name_rank_node(rank), gpu) for rank, (pci, gpu) in enumerate(gpus)}


def _count_nvlinks(gpus: dict[str, tuple[str, Element]]) -> Counter[tuple[str, str]]:
    """Return how many NVLinks join two GPUs, or a GPU and the NVSwitches: the larger number of what both list."""
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


def _hang(
    above: Element,
    ends: tuple[str, str],
    gpus: dict[str, tuple[str, Element]],
    latency_s: float,
    path: Path,
    apart: bool,
) -> Iterator[Link]:
    """Yield the links of PCI Express below a processor or switch, where GPUs hang on them.

    ``ends``: its nodes for bytes on their way up and down. ``apart``: whether those of a switch are two, so
    that no bytes turn there.
    """
    for pci in above.findall("pci"):
        if pci.find(".//gpu") is None:
            continue
        address = pci.get("busid", "").lower()
        below = gpus[address][0] if address in gpus else f"pci-{address}"
        two = apart and address not in gpus
        inner = (f"{below}-up", f"{below}-down") if two else (below, below)
        rate = _read_rate(pci, path)
        yield Link(ends[1], inner[1], rate, latency_s)
        yield Link(inner[0], ends[0], rate, latency_s)
        yield from _hang(pci, inner, gpus, latency_s, path, apart)


def _read_conf(path: Path) -> dict[str, str]:
    """Return the variables of an ``nccl.conf`` and their values."""
    variables = {}
    for number, line in enumerate(read_file(path).splitlines(), start=1):
        name, is_given, value = line.partition("=")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not is_given:
            raise PlatformError(
                f"{line.strip()!r} sets no variable", file=path, place=f"line {number}", fix="write NAME=VALUE"
            )
        variables[name.strip()] = value.strip()
    return variables


def _read_level(variables: Mapping[str, str], path: Path | None) -> str:
    """Return the farthest path over which GPUs reach each other, as NCCL_P2P_LEVEL names it; any by default."""
    if variables.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return "LOC"
    word = variables.get("NCCL_P2P_LEVEL", _LEVELS[-1]).upper()
    if word.isascii() and word.isdigit():
        return _LEVELS[min(int(word), len(_LEVELS) - 1)]
    if word not in (*_LEVELS, "NVL"):
        raise PlatformError(
            f"NCCL_P2P_LEVEL={word} is no level", file=path, fix=f"write NVL, {', '.join(_LEVELS)} or a number"
        )
    return word


def list_doubts(topology: Mapping[str, Any], file: str | Path) -> Iterator[str]:
    """Yield what a platform file's topology of this builder has in an ``nccl.conf`` that is not followed."""
    conf_file = topology.get("conf_file")
    for name, given in _read_conf(Path(file).parent / conf_file).items() if conf_file else ():
        same, instead = _NOT_FOLLOWED.get(name, (given, ""))
        if given != same:
            yield f"{name}={given} in {conf_file} is not followed: {instead}"


def _read_rate(pci: Element, path: Path) -> float:
    """Return what a link of PCI Express carries, a direction [bytes/s]."""
    speed, width = _SPEED.match(pci.get("link_speed", "")), pci.get("link_width", "")
    rate = float(speed[1]) if speed else 0.0
    share = next((share for fastest, share in _CODED if rate <= fastest), None)
    if not rate or share is None or not width.isdigit() or not int(width):
        raise PlatformError(
            f"link_speed {pci.get('link_speed', '')!r} and link_width {width!r} of {pci.get('busid')} are no rate",
            file=path,
            fix='write them as NCCL does, such as "16.0 GT/s PCIe" and "16"',
        )
    return rate * 1e9 * int(width) * share / 8
