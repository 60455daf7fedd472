"""``trioflow retrieve``: public data at its place, verified."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import asdict
from pathlib import Path

from trioflow.base.errors import DatasetError
from trioflow.base.units import format_bytes
from trioflow.cli.output import add_options, format_table
from trioflow.datasets.catalogue import Catalogue, Dataset, load_catalogue
from trioflow.datasets.retrieve import choose_source, retrieve_file

FOLDER = Path("results/data")
"""Where the workflow keeps public data too."""
WIDTH = 100


def add_retrieve(parser: argparse.ArgumentParser) -> None:
    """Add the parser of ``trioflow retrieve``."""
    parser.set_defaults(run=_run_retrieve)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="dataset, first part of several datasets' names, or <owner>+<repository>/<path>",
    )
    parser.add_argument(
        "-o",
        "--output",
        default=str(FOLDER),
        metavar="DIR",
        help="folder to write into, with a mirror's layout (default: %(default)s)",
    )
    add_options(
        parser,
        (
            ("--list", True, "list what there is, or what is in NAME, and exit"),
            ("--datasets", "FILE", "catalogue (default: the one of this checkout)"),
        ),
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
        retrieval = retrieve_file(entry, Path(options.output) / entry.key, **asdict(source))
        print(f"{retrieval.path}  {format_bytes(entry.bytes)}, {retrieval.source}")
    licences = ", ".join(sorted({f"{e.repository} {e.licence}" for e in entries}))
    print(f"licences: {licences}")


def _print_list(catalogue: Catalogue, names: list[str]) -> None:
    """Print all datasets as a table, or all of some: their facts and files."""
    if not names:
        rows = [
            (d.name, str(len(d.files)), format_bytes(_size_bytes(d)), d.licence, d.repository)
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
                print(_indent(f"{title}: {text}"))
        for entry in files:
            print(f"  {entry.key}  {format_bytes(entry.bytes)}")


def _size_bytes(dataset: Dataset) -> int:
    return sum(entry.bytes for entry in dataset.files)


def _indent(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
