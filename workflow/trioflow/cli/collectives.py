"""``trioflow collective``: how long one collective takes."""

import argparse
from dataclasses import replace
from math import isfinite
from typing import Any

from trioflow.base.errors import InputError, suggest
from trioflow.base.units import format_bytes, format_time
from trioflow.cli.choices import (
    NETWORK,
    change_platform,
    list_algorithm_options,
    list_inter_node,
    read_chunks,
    spell_network,
)
from trioflow.cli.output import add_command, list_forms, print_warnings, write_output
from trioflow.costmodel.collectives.model import COLLECTIVES, SHIFT
from trioflow.costmodel.collectives.platform import METHODS, PlatformCollectives
from trioflow.engine.result import Result
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Platform
from trioflow.network.across_nodes import LEAST_STEP, describe_inter_node, measures_a_node, open_platform
from trioflow.network.algorithms.catalogue import spell_algorithm
from trioflow.network.collectives import CollectiveCost, LinkCollectives, RelinkedCollectives, compute_wire_bytes
from trioflow.network.message_planner import WHOLE
from trioflow.parallel.task_graph import TaskGraphBuilder
from trioflow.prediction.assembly import choose_collectives, doubt_collectives
from trioflow.prediction.question import Options
from trioflow.prediction.step import simulate_interval

_MOST_BYTES = 10**15
"""Of a rank's buffer: a thousand times more than any memory."""


def add_collective(parser: argparse.ArgumentParser) -> None:
    """Add the parser of ``trioflow collective``."""
    measured = f"; or from the platform's measurements: {', '.join(METHODS)} (default: measured, the ring's closed form where nothing was)"
    add_command(
        parser,
        _run_collective,
        {
            "": (
                ("collective", "NAME", "all_reduce, all_gather, broadcast, ..."),
                (
                    "--bytes",
                    (float, "B"),
                    "bytes of the full buffer, such as 100e6 (all_gather: the gathered result)",
                    {"required": True},
                ),
                ("--ranks", (int, "N"), "ranks of the group", {"required": True}),
                ("--platform", "NAME|FILE", "a shipped platform or a YAML file", {"required": True}),
            )
        },
        list_algorithm_options(measured),
        {"": (("--collectives", "MODEL", "fitted collective model"),)},
        NETWORK,
        list_forms("the collective as one row"),
    )


def _run_collective(options: argparse.Namespace) -> None:
    """Predict one collective and print it."""
    size = round(options.bytes) if isfinite(options.bytes) else 0
    if not 1 <= size <= _MOST_BYTES or options.ranks < 2:
        raise InputError(f"a collective needs --bytes of 1 to {_MOST_BYTES:g} and --ranks of 2 or more")
    if options.collective not in (*COLLECTIVES, SHIFT):
        near = suggest(options.collective, COLLECTIVES)
        raise InputError(
            f"no collective is called {options.collective!r}", fix=f"{near}known are {', '.join(COLLECTIVES)}"
        )
    measured = list_inter_node(options)
    platform = change_platform(open_platform(options.platform, options.ranks, **measured), options)
    # Asked for as a loop of collectives has it, while nobody trains.
    platform = replace(platform, corrections={**platform.corrections, LEAST_STEP: 0.0})
    answer_it = _predict_from_measurements if options.algorithm in (None, *METHODS) else _simulate_messages
    answer = answer_it(options, platform, size)
    if write_output(options.form, answer, [answer]):
        return
    interval = (
        ""
        if answer["low_s"] is None
        else f" (80 % interval {format_time(answer['low_s'])} to {format_time(answer['high_s'])})"
    )
    print(
        f"{options.collective} of {format_bytes(size)} on {options.ranks} ranks of {platform.name}: "
        f"{format_time(answer['time_s'])}{interval}, "
        f"{format_bytes(answer['bus_bandwidth_bytes_per_s'])}/s bus bandwidth "
        f"({answer['algorithm']}; {answer['confidence']})"
    )
    print_warnings(answer["warnings"])


def _predict_from_measurements(options: argparse.Namespace, platform: Platform, size: int) -> dict[str, Any]:
    """Predict from the platform's measurements, or by the ring's closed form where there are none."""
    if read_chunks(options) is not None:
        raise InputError(f"{options.algorithm} has no messages to cut into chunks", fix="say --algorithm ring")
    assumed = Options(collectives=options.collectives)
    cost = choose_collectives(platform, assumed, options.algorithm)
    if options.algorithm and cost is None:
        raise InputError(
            f"{platform.name} has no measured collectives", fix="give --collectives or use --algorithm ring"
        )
    result = _simulate(options, platform, size, cost)
    if cost is None:
        return _summarize(options, platform, size, result, "ring", [])
    algorithm = "ring" if isinstance(cost, LinkCollectives) else "measured curve"
    if isinstance(cost, PlatformCollectives | RelinkedCollectives):
        algorithm = f"{cost.method}, {cost.library} on {cost.platform}"
    if measures_a_node(cost, platform):
        algorithm = f"{algorithm}, and links between nodes"
    warnings = doubt_collectives(cost, platform, assumed)
    return {
        **_summarize(options, platform, size, result, algorithm, warnings),
        "low_s": result.summary.low_s,
        "high_s": result.summary.high_s,
    }


def _simulate_messages(options: argparse.Namespace, platform: Platform, size: int) -> dict[str, Any]:
    """Predict message by message."""
    word = spell_algorithm(options.algorithm)
    if options.collectives:
        raise InputError(
            f"--algorithm {options.algorithm} follows the links, --collectives what was measured",
            fix="give one of them",
        )
    chunks = read_chunks(options) or WHOLE
    result = _simulate(options, platform, size, None, algorithms={options.collective: word}, chunks=chunks)
    cut = f", {chunks.number} chunks" if chunks.number > 1 else ""
    if isfinite(chunks.largest_bytes):
        cut = f", chunks of up to {format_bytes(chunks.largest_bytes)}"
    return _summarize(options, platform, size, result, f"{word}{cut}", [])


def _simulate(
    options: argparse.Namespace, platform: Platform, size: int, cost: CollectiveCost | None, **settings: Any
) -> Result:
    """Run one collective of all ranks."""
    builder = TaskGraphBuilder()
    group, match = ",".join(map(str, range(options.ranks))), builder.new_match()
    for rank in range(options.ranks):
        builder.add(
            rank, "communication", "collective", options.collective, message_bytes=size, group=group, match_id=match
        )
    network = spell_network(options.network)
    if cost is not None:
        return simulate_interval(builder.build(), platform, cost, network=network, **settings)
    return simulate(builder.build(), platform, network=network, **settings)


def _summarize(
    options: argparse.Namespace, platform: Platform, size: int, result: Result, algorithm: str, warnings: list[str]
) -> dict[str, Any]:
    """Return the summary of one collective."""
    time_s = result.summary.step_time_s
    wire = compute_wire_bytes(options.collective, size, options.ranks)
    return {
        "collective": options.collective,
        "message_bytes": size,
        "ranks": options.ranks,
        "platform": platform.name,
        "time_s": time_s,
        "low_s": None,
        "high_s": None,
        "algorithm": algorithm,
        "network": result.summary.network,
        "bus_bandwidth_bytes_per_s": wire / time_s if time_s else 0.0,
        "confidence": result.summary.confidence,
        "warnings": [
            *filter(None, [describe_inter_node(platform)]),
            *warnings,
            *platform.doubts,
            *result.summary.warnings,
        ],
    }
