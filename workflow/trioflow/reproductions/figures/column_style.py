"""The look of figures that fit a column of a paper: small, but with no text under seven points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from trioflow.provenance import atomic_path
from trioflow.report import style

COLUMN_IN = 3.4
"""Width of a column [inch]."""
SMALLEST_PT = 7.0
"""Size of the smallest text [points]."""
_MARGIN = 0.012
"""Place of a title, in widths of the figure."""

_SIZES: dict[str, Any] = {
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": SMALLEST_PT,
    "ytick.labelsize": SMALLEST_PT,
    "legend.fontsize": SMALLEST_PT,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.0,
    "xtick.major.pad": 1.5,
    "ytick.major.pad": 2.0,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.0,
    "legend.labelspacing": 0.3,
}


@contextmanager
def column_style() -> Iterator[None]:
    """Apply the report's palette and fonts at the sizes of a column."""
    with style.figure_style(), matplotlib.rc_context(_SIZES):
        yield


def new_column_figure(height_in: float) -> Figure:
    """Return an empty figure as wide as a column; its height is in inches."""
    return style.new_figure(height_in, COLUMN_IN)


def align_titles(figure: Figure, panels: Iterable[Any]) -> None:
    """Move panels' titles to the left edge of the figure, over the labels of their lines."""
    figure.draw_without_rendering()
    for axes in panels:
        box = axes.get_position()
        axes.set_title(
            axes.get_title(loc="left"), loc="left", x=(_MARGIN - box.x0) / box.width, ha="left"
        )


def save_column_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure as SVG, PNG and PDF, atomically and without dates.

    ``figure``: made inside ``column_style``; ``path``: target without suffix.
    """
    written = style.save_figure(figure, path)
    target = Path(f"{path}.pdf")
    # Type 42 fonts stay text that can be searched; many publishers refuse type 3.
    with matplotlib.rc_context({"pdf.fonttype": 42}), atomic_path(target) as temporary:
        figure.savefig(temporary, format="pdf", metadata={"CreationDate": None, "Creator": None})
    return [*written, target]
