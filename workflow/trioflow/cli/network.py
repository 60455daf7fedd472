"""Arguments on the network: how flows share links, their ways, and collectives' algorithms."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.experiments import Plan
from trioflow.cli.output import add_options
from trioflow.hardware.machine import TIES, Link, Platform
from trioflow.network.algorithms.catalogue import list_algorithm_words, read_algorithms
from trioflow.network.inter_node import INTER_NODE, TCP_BYTES_PER_S
from trioflow.network.message_planner import Chunks
from trioflow.network.networks import DEFAULT_NETWORK, NETWORKS


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the network, and what becomes of its links."""
    parser.add_argument(
        "--network", default=DEFAULT_NETWORK, metavar="NAME",
        help=f"{', '.join(NETWORKS)}, or one that a package registers, such as circuit (default: {DEFAULT_NETWORK})",
    )  # fmt: skip
    add_inter_node_arguments(parser)
    ways = parser.add_argument_group("ways over the network")
    add_options(ways, (
        ("--ties", TIES, "of equally good routes the first takes all, or pairs of ranks share them (default: "
         "what the platform says, else first)"),
        ("--routing-seed", (int, "N"), "another one shares them in another way"),
        ("--fail-link", "FROM,TO", "a directed link that no route takes; may come several times", {"action": "append"}),
        ("--degrade-link", "FROM,TO,FACTOR", "a directed link of which so much of the bandwidth is left; may come several times", {"action": "append"}),
    ))  # fmt: skip


def add_inter_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a user measured between nodes."""
    measured = parser.add_argument_group("the network between nodes, as you measured it")
    add_options(measured, (
        ("--inter-node-bandwidth", "B", "bus bandwidth of large messages over your nodes, as nccl-tests prints it, all network cards of a node "
         "together, not per GPU [bytes/s], such as 12.5e9 (12.5 GB/s); all_gather=27e9,all_reduce=52e9 for each collective; or tcp: NCCL "
         f"fell back to TCP sockets, {TCP_BYTES_PER_S / 1e9:g} GB/s a network card as measured on a cluster (default: what is known of the platform)"),
        ("--inter-node-latency", (float, "S"), "from a GPU to its counterpart in the next node [s]", {"dest": "inter_node_latency_s"}),
        ("--inter-node-bytes", (float, "S"), "size of the messages whose bandwidth was measured over as many nodes as the job has [bytes], such as "
         "256e6: where links are faster, each step of a collective takes the rest, whatever its size"),
    ))  # fmt: skip


def list_inter_node(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured between nodes, for ``network.inter_node.open_platform``."""
    return {name: getattr(options, name, None) for name in INTER_NODE}


def add_algorithm_arguments(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add the algorithm of collectives and the chunks of its messages."""
    words = ", ".join(list_algorithm_words())
    add_options(parser, (
        ("--algorithm", "NAME", f"message by message: {words}, hierarchical:INNER+OUTER{more}"),
        ("--chunks", (int, "N"), "pieces that each of its messages is cut into"),
        ("--chunk-bytes", (float, "B"), "or how large a piece is at most [bytes]"),
    ))  # fmt: skip


def spell_network(name: str) -> str:
    """Return a network's name; trioflow's own may be written with hyphens."""
    spelt = name.replace("-", "_")
    return spelt if spelt in NETWORKS else name


def change_platform(platform: Platform, options: argparse.Namespace) -> Platform:
    """Return a platform with the ways and links asked for; InputError where a link does not exist or a factor is wrong."""
    routing = platform.routing
    if getattr(options, "ties", None):
        routing = replace(routing, ties=options.ties)
    if getattr(options, "routing_seed", None) is not None:
        if routing.ties == TIES[0]:
            raise InputError(
                f"--routing-seed {options.routing_seed} changes nothing: the first route takes all",
                fix="say --ties ecmp as well",
            )
        routing = replace(routing, seed=options.routing_seed)
    known = {(link.source, link.target): place for place, link in enumerate(platform.links)}
    failed = set(routing.failed)
    for text in getattr(options, "fail_link", None) or ():
        failed.add(_read_ends(text, text.split(","), "--fail-link FROM,TO", known))
    links = list(platform.links)
    for text in getattr(options, "degrade_link", None) or ():
        *ends, factor = text.split(",")
        place = known[_read_ends(text, ends, "--degrade-link FROM,TO,FACTOR", known)]
        links[place] = _degrade(links[place], text, factor)
    routing = replace(routing, failed=frozenset(failed))
    return replace(platform, routing=routing, links=tuple(links))


def _read_ends(
    text: str, parts: list[str], form: str, known: dict[tuple[str, str], int]
) -> tuple[str, str]:
    """Return a link's source and target."""
    if len(parts) != 2:
        raise InputError(f"{text!r} names no link", fix=f"write {form}")
    source, target = parts
    if (source, target) not in known:
        targets = sorted(end for start, end in known if start == source)
        raise InputError(
            f"no link leads from {source} to {target}",
            fix=f"from {source} links lead to {', '.join(targets[:8])}" if targets
            else f"nodes are {', '.join(dict.fromkeys(start for start, _ in known))}"[:200],
        )  # fmt: skip
    return source, target


def _degrade(link: Link, text: str, factor: str) -> Link:
    try:
        left = float(factor)
    except ValueError:
        left = math.nan
    if not 0 < left <= 1:
        raise InputError(
            f"--degrade-link {text}: {factor!r} is not a share of a bandwidth",
            fix="write a number above 0 and up to 1; --fail-link takes a link away",
        )
    return link._replace(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * left)


def read_chunks(options: argparse.Namespace) -> Chunks | None:
    """Return the chunks that the command line asks for, or None; InputError where both, without an algorithm, or senseless."""
    number, largest_bytes = options.chunks, options.chunk_bytes
    if number is None and largest_bytes is None:
        return None
    if number is not None and largest_bytes is not None:
        raise InputError("--chunks and --chunk-bytes were both given", fix="give one of them")
    if options.algorithm is None:
        raise InputError("chunks without an algorithm", fix="say --algorithm ring, for example")
    if number is not None and number < 1:
        raise InputError(f"--chunks {number} is not positive")
    if largest_bytes is not None and not 1 <= largest_bytes < math.inf:
        raise InputError(f"--chunk-bytes {largest_bytes:g} is less than a byte, or no number")
    return Chunks(number or 1, largest_bytes or math.inf)


def set_algorithms(plan: Plan, options: argparse.Namespace) -> Plan:
    """Return a plan with the algorithms and chunks asked for; InputError where a word is unknown or chunks make no sense."""
    chunks = read_chunks(options) if hasattr(options, "chunks") else None
    word = getattr(options, "algorithm", None)
    if word is not None:
        read_algorithms(word)
        plan = replace(plan, algorithms=word)
    if chunks is not None:
        largest_bytes = 0 if chunks.largest_bytes == math.inf else int(chunks.largest_bytes)
        plan = replace(plan, chunks=chunks.number, chunk_bytes=largest_bytes)
    return plan
