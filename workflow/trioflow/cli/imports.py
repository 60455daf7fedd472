"""``trioflow import`` and ``trioflow pack``: a trace from another tool's files, and a trace in one file."""

from __future__ import annotations

import argparse
import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

from trioflow.base.units import format_bytes, format_time
from trioflow.cli.output import format_facts, format_table, print_warnings
from trioflow.trace.importers.detect import FORMATS, find_rank_files, import_trace, list_known
from trioflow.trace.importers.options import ImportOptions
from trioflow.trace.importers.ranks import RankFile, RankTimes, import_ranks
from trioflow.trace.store import describe_step, pack_trace, save_trace, summarise_trace

_EPILOG = """sources:
  {known}. Plain or gzipped.
  Kineto traces of all ranks of a parallel run, by name, in a folder or in TensorBoard's: a trace a rank.

example:
  trioflow import kineto.json.gz execution_trace.json --gpu "NVIDIA A40" --batch 32 --precision tf32 -o trace
"""


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's parser."""
    known = textwrap.fill("; ".join(list_known()), 100, subsequent_indent="  ")
    parser.epilog = _EPILOG.format(known=known)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=_run_import)
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help="file or folder, see below")
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="folder of the trace to write"
    )
    parser.add_argument("--format", choices=FORMATS, help="instead of finding it out")
    said = parser.add_argument_group(
        "what the source does not say (an error names what is missing)"
    )
    said.add_argument("--gpu", metavar="NAME", help="traced device, as its driver names it")
    said.add_argument("--batch", type=int, metavar="N", help="samples of the traced step")
    said.add_argument("--precision", choices=["fp32", "tf32", "bf16", "fp16", "fp64"])
    said.add_argument("--optimizer", metavar="O", help="such as adam; none for no optimizer")
    said.add_argument(
        "--repeat-layers", type=int, metavar="N", help="depth of the model, its last block repeated"
    )
    said.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks of the run that the source is one rank of",
    )
    said.add_argument("--workload", metavar="NAME", help="name for what was traced")


def _run_import(options: argparse.Namespace) -> None:
    """Build the trace, write it and say what it holds."""
    given = ImportOptions(
        gpu=options.gpu,
        batch=options.batch,
        precision=options.precision,
        optimizer=options.optimizer,
        repeat_layers=options.repeat_layers,
        workload=options.workload,
        world_size=options.world_size,
    )
    ranks = find_rank_files(options.sources, options.format)
    if len(ranks) > 1:
        _import_ranks(ranks, given, options.output)
        return
    trace = import_trace(_only(ranks) or options.sources, given, options.format)
    save_trace(trace, options.output)
    row = summarise_trace(trace, Path(options.output).name)
    print(
        f"{row['workload']}, batch {row['batch']}: {len(trace.operators)} operators, {row['kernels']} kernels"
    )
    print(f"step: {describe_step(row)}")
    print_warnings(trace.facts.warnings)
    print(f"written: {options.output}\nnext: trioflow show {options.output}")


def _only(ranks: dict[int, RankFile]) -> list[Path]:
    """Return the files of the only rank that several cycles of a profiler are of."""
    return [f for one in ranks.values() for f in (one.kineto, one.execution_trace) if f is not None]


def _import_ranks(ranks: dict[int, RankFile], given: ImportOptions, folder: str) -> None:
    """Write a trace a rank and say how the ranks differ."""
    found = import_ranks(ranks, given, folder)
    head = ("rank", "step", "compute", "communication", "messages", "bytes")
    print(format_table(head, map(_format_rank, found)))
    print()
    print(format_facts([(name, _format_spread(times)) for name, times in _list_spreads(found)]))
    print_warnings([f"rank {one.rank}: {warning}" for one in found for warning in one.warnings])
    traced = all(one.messages is not None for one in found)
    following = (
        f"simulate {folder}/rank-* --as-traced --platform ..."
        if traced
        else f"show {folder}/rank-0"
    )
    print(f"written: {folder}/rank-0 to rank-{found[-1].rank}\nnext: trioflow {following}")


def _format_rank(one: RankTimes) -> tuple[str, ...]:
    times = map(format_time, (one.step_s, one.compute_s, one.communication_s))
    unknown = one.messages is None
    sent = ("not said", "-") if unknown else (str(one.messages), format_bytes(one.message_bytes))
    return (str(one.rank), *times, *sent)


def _list_spreads(found: list[RankTimes]) -> list[tuple[str, list[float]]]:
    return [
        ("step", [one.step_s for one in found]),
        ("compute", [one.compute_s for one in found]),
        ("communication, waiting included", [one.communication_s for one in found]),
    ]


def _format_spread(times: list[float]) -> str:
    middle = statistics.median(times)
    wide = f" ({(max(times) - min(times)) / middle:.0%} of it apart)" if middle else ""
    return f"{format_time(min(times))} to {format_time(max(times))}, median {format_time(middle)}{wide}"


def add_pack(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand to the command."""
    parser.set_defaults(run=_run_pack)
    parser.add_argument("trace", metavar="TRACE", help="folder of a trace, or a shipped one's name")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object for programs")


def _run_pack(options: argparse.Namespace) -> None:
    """Pack a trace and say what the file holds."""
    manifest: dict[str, Any] = pack_trace(options.trace, options.output)
    if options.json:
        print(json.dumps({**manifest, "file": options.output}, sort_keys=True))
        return
    facts = manifest["provenance"]
    size = format_bytes(Path(options.output).stat().st_size)
    print(
        f"{options.output}: {facts['workload']} at batch {facts['batch']} "
        f"on {facts['device_name']}, {size}, digest {manifest['digest'][:16]}"
    )
