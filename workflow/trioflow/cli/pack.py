"""``trioflow pack``: a trace in one file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trioflow.trace.store import pack_trace
from trioflow.units import format_bytes


def add_pack(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command."""
    parser = commands.add_parser(
        "pack", help="put a trace into one file, to use it wherever a TRACE is asked for"
    )
    parser.set_defaults(run=run_pack)
    parser.add_argument("trace", metavar="TRACE", help="folder of a trace, or a shipped one's name")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object for programs")


def run_pack(options: argparse.Namespace) -> None:
    """Pack a trace and say what the file holds."""
    manifest: dict[str, Any] = pack_trace(options.trace, options.output)
    if options.json:
        print(json.dumps({**manifest, "file": options.output}, sort_keys=True))
        return
    told = manifest["provenance"]
    size = format_bytes(Path(options.output).stat().st_size)
    print(
        f"{options.output}: {told['workload']} at batch {told['batch']} "
        f"on {told['device_name']}, {size}, digest {manifest['digest'][:16]}"
    )
