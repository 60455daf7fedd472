"""``python -m trioflow.campaign``: run, list or unpack a capture campaign."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch

from trioflow.base.errors import InputError, TrioflowError
from trioflow.base.units import BYTES_PER_MIB
from trioflow.campaign.items import list_items, read_rows
from trioflow.campaign.packing import Limits, unpack_campaign

_START_S = time.monotonic()
"""The call's time counts from here: importing torch takes some of it."""


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="python -m trioflow.campaign",
        description="Capture all workloads and sweep the operators of the device at hand.",
    )
    add = parser.add_argument
    add("--output", help="folder of the packed Parquet files; a call goes on from it")
    add("--minutes", type=float, default=9.0, help="time of this call (default 9)")
    add(
        "--resume",
        action="append",
        default=[],
        metavar="DIR",
        help="folder of an earlier call's output (its items.parquet is enough); may be repeated",
    )
    add("--device", default="auto", choices=["auto", "cuda", "cpu"])
    add("--workloads", help="table of workloads (default: the catalogue that ships)")
    add("--only", default="*", metavar="PATTERN", help="items to do, such as 'sweep-*'")
    add("--quick", action="store_true", help="a few small items, to try it out")
    add("--retry-failed", action="store_true", help="try failed items again")
    add("--state", help="folder of finished items until packed (default: OUTPUT/state)")
    add("--list", action="store_true", help="print the items with estimated times")
    add("--unpack", metavar="DIR", help="restore DIR's captures below OUTPUT, and stop")
    add("--files", type=int, default=8, help="packed files at most (default 8)")
    add("--file-mib", type=float, default=16, help="size of a packed file at most")
    add("--total-mib", type=float, default=60, help="size of all together at most")
    add("--until", type=float, help=argparse.SUPPRESS)  # set when it starts itself anew
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = make_parser().parse_args(words)
    start_s = _START_S if arguments is None else time.monotonic()
    try:
        if options.list:
            return _print_items(options)
        if not options.output:
            raise InputError("no output folder is given", fix="say --output DIR")
        if options.unpack:
            folders = unpack_campaign(options.unpack, options.output)
            print(f"{len(folders)} captures restored below {options.output}")
            return 0
        if not options.minutes > 0:
            raise InputError(f"--minutes {options.minutes} is not positive")
        if options.files < 2:
            raise InputError(f"--files {options.files}: items and sweeps take two", fix="allow more")
        return _campaign(options, words, options.until or start_s + options.minutes * 60)
    except TrioflowError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _print_items(options: argparse.Namespace) -> int:
    device = "cpu" if options.device == "cpu" else "cuda"
    listed = list_items(read_rows(options.workloads), device=device, quick=options.quick)
    items, total_s = [item for item in listed if fnmatch(item.name, options.only)], 0.0
    if not items:
        raise InputError(f"--only {options.only}: no item has such a name", fix="see --list")
    for item in items:
        total_s += item.estimate_s
        print(f"{item.position:4d}  {item.name:44s} {item.estimate_s:6.1f} s  {total_s / 60:6.1f} min")
    print(f"{len(items)} items, {total_s / 60:.0f} minutes by first guesses, corrected as it goes")
    return 0


def _campaign(options: argparse.Namespace, words: list[str], until_s: float) -> int:
    """Run the campaign, and start anew in this process's place where the device was lost."""
    try:
        from trioflow.campaign.call import DeviceLost, run_call
        from trioflow.trace.capture.workload import choose_device
    except ImportError as error:
        raise InputError(
            f"a package that captures need is missing ({error.name or error})",
            fix="use a Python that has torch and all that it needs",
        ) from None
    device = choose_device(options.device)
    sizes = (int(mib * BYTES_PER_MIB) for mib in (options.file_mib, options.total_mib))
    limits = Limits(options.files, *sizes)
    try:
        items = list_items(read_rows(options.workloads), device=device, quick=options.quick)
        return run_call(items, options, device, limits, until_s)
    except DeviceLost:
        print("the device refuses further work: starting anew", file=sys.stderr, flush=True)
    # Open handles to the driver would keep the lost memory allocated in the new process.
    os.closerange(3, 65_536)
    kept = [word for word in words if not word.startswith("--until")]
    command = [sys.executable, "-m", "trioflow.campaign", *kept, f"--until={until_s}"]
    os.execv(sys.executable, command)
    return 1  # not reached: the process is another one now


if __name__ == "__main__":
    raise SystemExit(main())
