"""``trioflow capture``: from a running model, or one without data, to a trace."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError, how_to_install, suggest
from trioflow.base.experiments import Workload, load_workloads
from trioflow.base.settings import INPUT, OPTIMIZERS, PRECISIONS
from trioflow.cli.output import add_options
from trioflow.trace.language.make import CAPTURED_BLOCKS, quieten_profiler
from trioflow.trace.profile.merge import merge_trace
from trioflow.trace.repeat import repeat_layers
from trioflow.trace.store import Trace, describe_step, save_trace, summarise_trace
from trioflow.trace.workloads.catalog import (
    CATALOG,
    change_workload,
    find_workload,
    name_user_model,
)

SHIPPED_WORKLOADS = Path(__file__).parent.parent / "data" / "workloads.tsv"
_OWN_WORKLOADS = Path("config") / "workloads.tsv"


def choose_workload(options: argparse.Namespace) -> dict[str, Any]:
    """Return the workload's row with the command line's changes; InputError where there is none, or one does not fit."""
    keys = ("layers", "sequence", "vocabulary", "precision", "optimizer")
    changes = {key: getattr(options, key, None) for key in keys}
    shape = getattr(options, INPUT, None)
    if ":" in options.workload:
        chosen = name_user_model(options.workload, options.batch)
        return asdict(change_workload(chosen, changes)) | ({INPUT: shape} if shape else {})
    if shape is not None:
        raise InputError(
            f"--input {shape} describes a model of yours, and {options.workload} is not module:function",
            fix="leave it out",
        )
    if options.workloads == CATALOG.stem:
        tables = [CATALOG]
    else:
        own = options.workloads or (_OWN_WORKLOADS if _OWN_WORKLOADS.exists() else None)
        # A project's own row wins over the catalogue's; the shipped example's does not.
        tables = [Path(own), CATALOG] if own else [CATALOG, SHIPPED_WORKLOADS]
    rows: dict[str, Workload] = {}
    for table in reversed(tables):
        rows |= load_workloads(table)
    row = find_workload(rows, options.workload)
    if row is None:
        raise InputError(
            f"no workload {options.workload!r}", file=tables[0],
            fix=f"{suggest(options.workload, rows)}use one of {', '.join(rows)}, a function of yours as module:function,"
            " or add a row and give the table with --workloads",
        )  # fmt: skip
    return asdict(change_workload(row, changes))


def _run_capture(options: argparse.Namespace) -> None:
    """Capture a training step and write it as a trace, the raw profile beside it."""
    if options.world_size is not None:
        _run_capture_rank(options)
        return
    if options.rank is not None:
        raise InputError(
            f"--rank {options.rank} without --world-size", fix="give the number of ranks"
        )
    depth = options.layers
    if depth is not None:
        options.layers = min(depth, CAPTURED_BLOCKS)
    row = choose_workload(options)
    folder = Path(options.output)
    print(f"capturing {row['workload']} at batch {options.batch} ...", file=sys.stderr)
    if options.target and options.device != "meta":
        raise InputError("--target goes with --device meta alone", fix="leave it out")
    trace = _capture(row, options, folder / "raw")
    if depth is not None and depth > CAPTURED_BLOCKS:
        trace = repeat_layers(trace, depth)
    save_trace(trace, folder)
    step = describe_step(summarise_trace(trace, folder.name))
    print(f"{len(trace.operators)} operators; step: {step}\nwritten: {folder}")
    print(f"next: trioflow show {folder}")


def _run_capture_rank(options: argparse.Namespace) -> None:
    """Capture a user's own step as one rank of many and write its program as a trace."""
    if ":" not in options.workload:
        raise InputError(
            f"--world-size runs a sharded step of your own, and {options.workload!r} does not name one",
            fix="name a function that returns it, such as my_models:make_step",
        )
    for name in ("precision", "optimizer"):
        if getattr(options, name) is not None:
            raise InputError(f"--{name} with --world-size: the step chooses it", fix="leave it out")
    row = choose_workload(options)
    rank = options.rank or 0
    print(f"capturing {row['workload']}, rank {rank} of {options.world_size} ...", file=sys.stderr)
    try:
        from trioflow.trace.capture.rank_program import capture_rank
    except ImportError as error:
        raise InputError(
            f"capture needs PyTorch ({error})", fix=how_to_install("capture")
        ) from None
    trace = capture_rank(
        row, options.batch, world_size=options.world_size, rank=rank, device=options.device,
        target=options.target,
    )  # fmt: skip
    folder = Path(options.output)
    save_trace(trace, folder)
    print(
        f"{len(trace.operators)} operators, {len(trace.facts.communication or [])} messages; step: "
        f"{describe_step(summarise_trace(trace, folder.name))}\nwritten: {folder}"
    )
    print(f"next: trioflow simulate {folder} --as-traced --platform NAME")


def _capture(row: dict[str, Any], options: argparse.Namespace, raw: Path) -> Trace:
    """Return the trace of a step that ran, or of one on tensors without data."""
    quieten_profiler()
    try:
        if options.device == "meta":
            from trioflow.trace.capture.meta import capture_meta

            return capture_meta(row, options.batch, target=options.target or "cuda")
        from trioflow.trace.capture.workload import capture_workload
    except ImportError as error:
        raise InputError(
            f"capture needs PyTorch ({error})", fix=how_to_install("capture")
        ) from None
    capture_workload(row, options.batch, raw, device=options.device)
    return merge_trace(raw)


def add_capture(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``capture``."""
    parser.set_defaults(run=_run_capture)
    add_options(parser, (
        ("workload", "WORKLOAD", "by name, such as resnet50 or gpt2, or a function of yours, module:function"),
        ("--batch", (int, "N"), "samples of the step", {"required": True}),
        ("--workloads", "FILE", "table of workloads (default: config/workloads.tsv, then those that ship)"),
        ("--sequence", (int, "N"), "tokens of a sample, instead of the workload's"),
        ("--vocab", (int, "N"), "distinct tokens, instead of the workload's", {"dest": "vocabulary"}),
        ("--input", "SHAPE", "one sample of a model of yours that takes a tensor, such as 3x224x224; one that takes tokens: --sequence, "
         "--vocab"),
        ("--layers", (int, "N"), "depth of the model: two blocks are captured, the last one is repeated"),
        ("--precision", PRECISIONS, "instead of the workload's"),
    ))  # fmt: skip
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, metavar="O",
        help=f"instead of the workload's: {', '.join(OPTIMIZERS)}",
    )  # fmt: skip
    add_options(parser, (
        ("--device", ["cpu", "cuda", "meta", "auto"],
         "default: a GPU where present; meta: the operators that --target runs, without their times, for "
         "models that fit no device", {"default": "auto"}),
        ("--target", ["cuda", "cpu"], "with --device meta or --world-size: whose operators (default: cuda, any GPU's of NVIDIA, for meta; else "
         "those of the device)"),
        ("--world-size", (int, "N"), "run a sharded step of yours as one rank of N under PyTorch's fake process group: module:function "
         "returns the step"),
        ("--rank", (int, "R"), "which rank of N (default: 0)"),
    ))  # fmt: skip
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="folder of the trace to write"
    )
