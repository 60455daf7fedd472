"""Where traces and data come from: ``trioflow capture``, ``import``, ``pack`` and ``retrieve``."""

import argparse
import json
import statistics
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from trioflow.base.errors import DatasetError, InputError, how_to_install, suggest
from trioflow.base.experiments import Workload, load_workloads
from trioflow.base.settings import INPUT, OPTIMIZERS, PRECISIONS
from trioflow.base.units import format_bytes, format_time
from trioflow.cli.output import JSON, add_command, format_facts, format_table, print_warnings
from trioflow.datasets.catalogue import Catalogue, load_catalogue
from trioflow.datasets.retrieve import choose_source, retrieve_file
from trioflow.trace.importers.detect import FORMATS, find_rank_files, import_trace, list_known
from trioflow.trace.importers.ranks import ProfiledTimes, RankFile, import_ranks
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.language.make import CAPTURED_BLOCKS, quieten_profiler
from trioflow.trace.profile.merge import merge_trace
from trioflow.trace.repeat import repeat_layers
from trioflow.trace.store import Trace, describe_step, pack_trace, save_trace, summarise_trace
from trioflow.trace.workloads.catalog import CATALOG, change_workload, find_workload, name_user_model

SHIPPED_WORKLOADS = Path(__file__).parent.parent / "data" / "workloads.tsv"
_CAPTURE = "trioflow.trace.capture"
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
            f"no workload {options.workload!r}",
            file=tables[0],
            fix=f"{suggest(options.workload, rows)}use one of {', '.join(rows)}, a function of yours as module:function,"
            " or add a row and give the table with --workloads",
        )
    return asdict(change_workload(row, changes))


def _run_capture(options: argparse.Namespace) -> None:
    """Capture a training step and write it as a trace, the raw profile beside it."""
    if options.world_size is not None:
        _run_capture_rank(options)
        return
    if options.rank is not None:
        raise InputError(f"--rank {options.rank} without --world-size", fix="give the number of ranks")
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
    trace = _find_capture("rank_program", "capture_rank")(
        row, options.batch, world_size=options.world_size, rank=rank, device=options.device, target=options.target
    )
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
    if options.device == "meta":
        capture_meta = _find_capture("meta", "capture_meta")
        return cast("Trace", capture_meta(row, options.batch, target=options.target or "cuda"))
    _find_capture("workload", "capture_workload")(row, options.batch, raw, device=options.device)
    return merge_trace(raw)


def _find_capture(module: str, function: str) -> Callable[..., Any]:
    """Return what captures a step; InputError where PyTorch is missing."""
    try:
        return cast("Callable[..., Any]", getattr(import_module(f"{_CAPTURE}.{module}"), function))
    except ImportError as error:
        raise InputError(f"capture needs PyTorch ({error})", fix=how_to_install("capture")) from None


_FOLDER = ("-o --output", "DIR", "folder of the trace to write", {"required": True})


def add_capture(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``capture``."""
    add_command(
        parser,
        _run_capture,
        {
            "": (
                ("workload", "WORKLOAD", "by name, such as resnet50 or gpt2, or a function of yours, module:function"),
                ("--batch", (int, "N"), "samples of the step", {"required": True}),
                ("--workloads", "FILE", "table of workloads (default: config/workloads.tsv, then those that ship)"),
                ("--sequence", (int, "N"), "tokens per sample, instead of the workload's"),
                ("--vocab", (int, "N"), "distinct tokens, instead of the workload's", {"dest": "vocabulary"}),
                (
                    "--input",
                    "SHAPE",
                    "one sample of a model of yours that takes a tensor, such as 3x224x224; one that takes tokens: --sequence, "
                    "--vocab",
                ),
                ("--layers", (int, "N"), "depth of the model: two blocks are captured, the last one is repeated"),
                ("--precision", PRECISIONS, "instead of the workload's"),
                ("--optimizer", OPTIMIZERS, f"instead of the workload's: {', '.join(OPTIMIZERS)}", {"metavar": "O"}),
                (
                    "--device",
                    ["cpu", "cuda", "meta", "auto"],
                    "default: a GPU where present; meta: the operators that --target runs, without their times, for "
                    "models that fit no device",
                    {"default": "auto"},
                ),
                (
                    "--target",
                    ["cuda", "cpu"],
                    "with --device meta or --world-size: whose operators (default: cuda, any GPU's of NVIDIA, for meta; else "
                    "those of the device)",
                ),
                (
                    "--world-size",
                    (int, "N"),
                    "run a sharded step of yours as one rank of N under PyTorch's fake process group: module:function "
                    "returns the step",
                ),
                ("--rank", (int, "R"), "which rank of N (default: 0)"),
                _FOLDER,
            )
        },
    )


_EPILOG = """sources:
  {known}. Plain or gzipped.
  Kineto traces of all ranks of a parallel run, by name, in a folder or in TensorBoard's: one trace per rank.

example:
  trioflow import kineto.json.gz execution_trace.json --gpu "NVIDIA A40" --batch 32 --precision tf32 -o trace
"""


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's parser."""
    known = textwrap.fill("; ".join(list_known()), 100, subsequent_indent="  ")
    add_command(
        parser,
        _run_import,
        {
            "": (
                ("sources", "SOURCE", "file or folder, see below", {"nargs": "+"}),
                _FOLDER,
                ("--format", FORMATS, "format of the source, instead of detecting it"),
            ),
            "what the source does not say (an error names what is missing)": (
                ("--gpu", "NAME", "traced device, as its driver names it"),
                ("--batch", (int, "N"), "samples of the traced step"),
                ("--precision", ["fp32", "tf32", "bf16", "fp16", "fp64"], None),
                ("--optimizer", "O", "such as adam; none for no optimizer"),
                ("--repeat-layers", (int, "N"), "depth of the model, its last block repeated"),
                ("--world-size", (int, "N"), "ranks of the run that the source is one rank of"),
                ("--workload", "NAME", "name for what was traced"),
            ),
        },
        epilog=_EPILOG.format(known=known),
    )


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
    of_rank = [f for one in ranks.values() for f in (one.kineto, one.execution_trace) if f is not None]
    trace = import_trace(of_rank or options.sources, given, options.format)
    save_trace(trace, options.output)
    row = summarise_trace(trace, Path(options.output).name)
    print(f"{row['workload']}, batch {row['batch']}: {len(trace.operators)} operators, {row['kernels']} kernels")
    print(f"step: {describe_step(row)}")
    print_warnings(trace.facts.warnings)
    print(f"written: {options.output}\nnext: trioflow show {options.output}")


def _import_ranks(ranks: dict[int, RankFile], given: ImportOptions, folder: str) -> None:
    """Write a trace a rank and say how the ranks differ."""
    imported = import_ranks(ranks, given, folder)
    head = ("rank", "step", "compute", "communication", "messages", "bytes")
    print(format_table(head, map(_format_rank, imported)))
    print()
    print(
        format_facts(
            [
                ("step", _format_spread([one.step_s for one in imported])),
                ("compute", _format_spread([one.compute_s for one in imported])),
                ("communication, waiting included", _format_spread([one.communication_s for one in imported])),
            ]
        )
    )
    print_warnings([f"rank {one.rank}: {warning}" for one in imported for warning in one.warnings])
    traced = all(one.messages is not None for one in imported)
    following = f"simulate {folder}/rank-* --as-traced --platform ..." if traced else f"show {folder}/rank-0"
    print(f"written: {folder}/rank-0 to rank-{imported[-1].rank}\nnext: trioflow {following}")


def _format_rank(one: ProfiledTimes) -> tuple[str, ...]:
    times = map(format_time, (one.step_s, one.compute_s, one.communication_s))
    unknown = one.messages is None
    sent = ("not said", "-") if unknown else (str(one.messages), format_bytes(one.message_bytes))
    return (str(one.rank), *times, *sent)


def _format_spread(times: list[float]) -> str:
    middle = statistics.median(times)
    wide = f" ({(max(times) - min(times)) / middle:.0%} of it apart)" if middle else ""
    return f"{format_time(min(times))} to {format_time(max(times))}, median {format_time(middle)}{wide}"


def add_pack(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand to the command."""
    add_command(
        parser,
        _run_pack,
        {
            "": (
                ("trace", "TRACE", "folder of a trace, or a shipped one's name"),
                ("-o --output", "FILE", "file to write", {"required": True}),
            )
        },
        JSON,
    )


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


FOLDER = Path("results/data")
"""Where the workflow keeps public data too."""
WIDTH = 100


def add_retrieve(parser: argparse.ArgumentParser) -> None:
    """Add the parser of ``trioflow retrieve``."""
    add_command(
        parser,
        _run_retrieve,
        {
            "": (
                (
                    "names",
                    "NAME",
                    "dataset, first part of several datasets' names, or <owner>+<repository>/<path>",
                    {"nargs": "*"},
                ),
                (
                    "-o --output",
                    "DIR",
                    "folder to write into, with a mirror's layout (default: %(default)s)",
                    {"default": str(FOLDER)},
                ),
                ("--list", True, "list what there is, or what is in NAME, and exit"),
                ("--datasets", "FILE", "catalogue (default: the one of this checkout)"),
            )
        },
    )


def _run_retrieve(options: argparse.Namespace) -> None:
    """Retrieve files, or list what there is; DatasetError where a name is unknown, or one fails (those before it stay)."""
    catalogue = load_catalogue(options.datasets)
    if options.list:
        _print_list(catalogue, options.names)
        return
    if not options.names:
        raise DatasetError("no dataset was named", fix="`trioflow retrieve --list` prints them")
    entries = catalogue.select_files(options.names)
    source = choose_source(catalogue.base_url, catalogue.lfs_url)
    for entry in entries:
        retrieval = retrieve_file(entry, Path(options.output) / entry.key, source)
        print(f"{retrieval.path}  {format_bytes(entry.bytes)}, {retrieval.source}")
    licences = ", ".join(sorted({f"{e.repository} {e.licence}" for e in entries}))
    print(f"licences: {licences}")


def _print_list(catalogue: Catalogue, names: list[str]) -> None:
    """Print all datasets as a table, or all of some: their facts and files."""
    if not names:
        rows = [
            (d.name, str(len(d.files)), format_bytes(sum(file.bytes for file in d.files)), d.licence, d.repository)
            for d in catalogue.datasets.values()
        ]
        print(format_table(("dataset", "files", "size", "licence", "repository"), rows))
        return
    chosen = {entry.key for entry in catalogue.select_files(names)}
    for dataset in catalogue.datasets.values():
        files = [entry for entry in dataset.files if entry.key in chosen]
        if not files:
            continue
        print(dataset.name)
        for title, text in (
            ("what", dataset.about),
            ("units", dataset.units),
            ("traps", dataset.traps),
            ("source", f"{dataset.repository} at {dataset.commit}, {dataset.licence}"),
        ):
            if text:
                print(textwrap.fill(f"{title}: {text}", WIDTH, initial_indent="  ", subsequent_indent="    "))
        for entry in files:
            print(f"  {entry.key}  {format_bytes(entry.bytes)}")
