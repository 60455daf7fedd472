"""The job of a figure: build its data, draw it, write both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trioflow import tables
from trioflow.provenance import stamp
from trioflow.reproductions.figures import catalogue
from trioflow.reproductions.figures.build import SCHEMAS, Files, build_figure_data
from trioflow.reproductions.figures.column_style import save_column_figure
from trioflow.reproductions.figures.evidence_figure import draw_evidence
from trioflow.reproductions.figures.other_figures import (
    draw_hop,
    draw_shares,
    draw_speeds,
    draw_wafer,
)

DRAWERS = {
    catalogue.ERRORS: draw_evidence, catalogue.ORDER: draw_evidence, catalogue.SHARES: draw_shares,
    catalogue.SPEED: draw_speeds, catalogue.WAFER: draw_wafer, catalogue.HOP: draw_hop,
}  # fmt: skip


def make_figure(
    name: str, files: Files, plans: Sequence[Mapping[str, Any]], target: str | Path
) -> None:
    """Write a figure as PDF, SVG and PNG, and the data that it draws as Parquet.

    Parameters
    ----------
    name, files, plans
        As for ``build.build_figure_data``.
    target : path
        Without suffix.

    Raises
    ------
    InputError
        When a set that the figure needs has no row; nothing is written then.
    TableError
        When a file breaks its schema.
    """
    figure = catalogue.find_figure(name)
    rows = build_figure_data(name, files, plans)
    drawing = DRAWERS[figure.form](figure, rows)
    sources = [file for group in files.values() for file in group]
    tables.write_table(rows, name, f"{target}.parquet", stamp(sources), SCHEMAS[figure.form])
    save_column_figure(drawing, target)
