"""The page of case studies: what the simulator says where nothing was measured."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pyarrow as pa

from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import atomic_path, digest_file
from trioflow.report.pages import (
    Cell,
    Column,
    Page,
    Section,
    count_words,
    join_words,
    read_captions,
    render_details,
    render_figure,
    render_paragraph,
    render_table,
    write_page,
)
from trioflow.reproductions.studies.sections import render_distsim, render_hop, render_wafer
from trioflow.reproductions.tables import HOP, WAFER

TITLE = "trioflow: case studies"
FIGURES = "studies"
"""Folder of the figures beside the page."""
CAPTIONS = read_captions("reproductions/studies/page")


class _Study(NamedTuple):
    """A case study: its heading, its table's schema, its figures, and the words before and after them."""

    title: str
    schema: pa.Schema
    figures: tuple[str, ...]
    render: Callable[[pd.DataFrame], tuple[str, str]]


STUDIES: Mapping[str, _Study] = {
    "wafer": _Study("84 GPUs on a photonic wafer", WAFER, ("wafer",), render_wafer),
    "hop": _Study(
        "Hop: decentralised training", HOP, ("hop_speedup", "hop_bandwidth"), render_hop
    ),
    "distsim_search": _Study(
        "DistSim's search for a plan", tables.SCHEMAS["sweep_results"], ("distsim_search",), render_distsim
    ),
}  # fmt: skip
"""By the name of the table."""


def build_study_page(folder: str | Path, page: str | Path) -> None:
    """Write the page of all case studies from ``<study>.parquet`` and figures (SVG) in ``folder``, copied beside it.

    Raises InputError when a table is empty, or a figure is missing.
    """
    source, target = Path(folder), Path(page)
    found = {name: _read(source, name) for name in STUDIES}
    made = _compose(found, source)
    for study in STUDIES.values():
        for figure in study.figures:
            _copy(source / f"{figure}.svg", target.parent / FIGURES / f"{figure}.svg")
    write_page(target, made)


def _read(folder: Path, name: str) -> pd.DataFrame:
    path = folder / f"{name}.parquet"
    rows = tables.read_table(path, name, STUDIES[name].schema)
    if rows.empty:
        raise InputError("the study has no rows", file=path, fix="run `snakemake studies` again")
    for figure in STUDIES[name].figures:
        if not (folder / f"{figure}.svg").is_file():
            raise InputError(
                "no such figure", file=folder / f"{figure}.svg", fix="run `snakemake studies` again"
            )
    return rows


def _copy(source: Path, target: Path) -> None:
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)


def _compose(found: Mapping[str, pd.DataFrame], folder: Path) -> Page:
    runs = join_words(
        f"{count_words(len(rows), 'run')} of {STUDIES[name].title}" for name, rows in found.items()
    )
    sections = []
    for name, study in STUDIES.items():
        words, body = study.render(found[name])
        figures = [
            render_figure(f"{FIGURES}/{figure}.svg", CAPTIONS[figure]) for figure in study.figures
        ]
        sections.append(Section(name, study.title, [words, *figures, body]))
    origin = Section(
        "provenance", "Where the numbers come from", _list_origins(found, folder), folded=True
    )
    return Page(
        TITLE,
        [*sections, origin],
        "Nothing on this page was measured here. Operator times are predicted from shapes, networks and protocols are "
        f"simulated: {runs}. What papers report is cited as such, and nothing was fitted to it.",
    )  # fmt: skip


def _list_origins(found: Mapping[str, pd.DataFrame], folder: Path) -> list[str]:
    """Return the tables of the studies and what they rest on, by name and digest."""
    words = (
        "Every number above is computed from the tables of the studies, which `snakemake studies` makes from traces and cost "
        "models that ship with the library."
    )
    columns = [
        Column("file", "", "folder and name", number=False),
        Column("SHA-256", "first 16 digits", "digest of the content", number=False),
        Column("read by", number=False),
    ]
    lines = []
    for name, rows in found.items():
        table = folder / f"{name}.parquet"
        lines.append([Cell(table.name), Cell(digest_file(table)[:16]), Cell("this page")])
        for path, digest in sorted(rows.attrs.get("inputs", {}).items()):
            lines.append([Cell(path), Cell(digest), Cell(name)])
    files = render_details(f"{len(lines)} files", render_table(columns, lines, "Files read"))
    return [render_paragraph(words), files]
