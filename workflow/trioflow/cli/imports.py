"""``trioflow import`` and ``trioflow pack``: a trace from another tool's files, and a trace in one file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trioflow.base.units import format_bytes
from trioflow.cli.output import print_warnings
from trioflow.trace.importers.detect import FORMATS, import_trace
from trioflow.trace.importers.options import ImportOptions
from trioflow.trace.store import pack_trace, save_trace
from trioflow.trace.summary import describe_step, summarise_trace

SOURCES = """sources:
  a Kineto trace (export_chrome_trace), best with the execution trace of the same run
  (ExecutionTraceObserver); a folder that `trioflow capture` filled; TrioSim's folder with trace.csv
  and tensor.csv; a NeuSight table; one rank's Chakra .et file; Nsight Systems' .sqlite. Plain or gzipped.

example:
  trioflow import kineto.json.gz execution_trace.json --gpu "NVIDIA A40" --batch 32 --precision tf32 -o trace
"""


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's parser."""
    parser.epilog, parser.formatter_class = SOURCES, argparse.RawDescriptionHelpFormatter
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
    said.add_argument("--workload", metavar="NAME", help="name for what was traced")


def _run_import(options: argparse.Namespace) -> None:
    """Build the trace, write it and say what it holds."""
    given = ImportOptions(
        gpu=options.gpu, batch=options.batch, precision=options.precision,
        optimizer=options.optimizer, repeat_layers=options.repeat_layers, workload=options.workload,
    )  # fmt: skip
    trace = import_trace(options.sources, given, options.format)
    save_trace(trace, options.output)
    row = summarise_trace(trace, Path(options.output).name)
    print(
        f"{row['workload']}, batch {row['batch']}: {len(trace.operators)} operators, {row['kernels']} kernels"
    )
    print(f"step: {describe_step(row)}")
    print_warnings(trace.facts.warnings)
    print(f"written: {options.output}\nnext: trioflow show {options.output}")


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
