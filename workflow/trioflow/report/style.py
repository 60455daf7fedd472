"""One look for all figures: palette, sizes, and files that are the same on every run."""

import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

from trioflow.base.errors import InputError
from trioflow.base.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SERIES_COLOURS, SKY, VERMILLION
from trioflow.base.provenance import atomic_path

__all__ = ["BLUE", "GREEN", "GREY", "INK", "ORANGE", "PURPLE", "SERIES_COLOURS", "SKY", "VERMILLION"]
"""The palette, for whoever draws."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH_IN = 8.6
"""Width of a figure [inch]; shown at 860 CSS pixels or less its text is about 9 points."""

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#DDDDDD",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "trioflow",
    "path.simplify": False,
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply the look of the report inside the block and nowhere else."""
    with matplotlib.rc_context({**sns.axes_style("whitegrid"), **_STYLE}):
        yield


def new_figure(height_in: float, width_in: float = WIDTH_IN) -> Figure:
    """Return an empty figure [inch] that draws without a screen."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def refuse_nothing(rows: pd.DataFrame, problem: str) -> None:
    """Refuse to draw a table without a row: InputError."""
    if rows.empty:
        raise InputError(problem)


Note = tuple[tuple[float, float, float, float], str]
"""Left, lower, right and upper end of a place in an axes' data, and what a pointer that rests there is told."""


def add_notes(axes: Any, notes: Iterable[Note]) -> None:
    """Let parts of a figure say what they are, where its SVG file is shown by itself or as an object."""
    kept = axes.figure.__dict__.setdefault("trioflow_notes", [])
    kept += [(axes, place, text) for place, text in notes]


def _write_notes(figure: Figure) -> str:
    """Return the notes of a figure that was laid out, as transparent shapes of its SVG."""
    scale, height = 72 / figure.dpi, 72 * figure.get_figheight()
    lines = []
    for axes, (left, low, right, high), text in figure.__dict__.get("trioflow_notes", ()):
        ends = scale * axes.transData.transform([(left, low), (right, high)])
        (x, y), (wide, tall) = ends.min(axis=0), np.ptp(ends, axis=0)
        lines.append(
            f'<rect x="{x:.1f}" y="{height - y - tall:.1f}" width="{max(wide, 0.5):.1f}" height="{tall:.1f}">'
            f"<title>{escape(text)}</title></rect>"
        )
    look = "<style>#notes rect:hover { stroke: #222; stroke-width: .7; }</style>"
    return f'{look}<g id="notes" fill-opacity="0">{"".join(lines)}</g>\n' if lines else ""


def save_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure, made inside ``figure_style``, as SVG and PNG (returned), atomically and without dates."""
    written = []
    with figure_style():
        # Lay out once for both files: it takes longer than drawing.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for suffix, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            target = Path(f"{path}.{suffix}")
            with atomic_path(target) as temporary:
                figure.savefig(temporary, format=suffix, dpi=160, metadata=metadata)
                notes = _write_notes(figure) if suffix == "svg" else ""
                if notes:
                    drawn = temporary.read_text(encoding="utf-8").removesuffix("</svg>\n")
                    temporary.write_text(f"{drawn}{notes}</svg>\n", encoding="utf-8")
            written.append(target)
    return written


def save_figures(folder: Path, figures: Iterable[tuple[str, Figure]]) -> dict[str, str]:
    """Write a page's figures once all are drawn; return their names to SVG files as seen from beside the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as draft:
        for name, figure in figures:
            save_figure(figure, Path(draft) / name)
            names.append(name)
        for file in sorted(Path(draft).iterdir()):
            file.replace(folder / file.name)
    return {name: f"{folder.name}/{name}.svg" for name in names}


def show_seconds(axis: Any) -> None:
    """Label the ticks of an axis that holds seconds, with a prefix where one helps."""
    axis.set_major_formatter(EngFormatter(unit="s"))


def show_bytes(axis: Any) -> None:
    """Label the ticks of an axis that holds bytes, with decimal prefixes."""
    axis.set_major_formatter(EngFormatter(unit="B"))


def spread_ticks(axis: Any, low: float, high: float, most: int = 5) -> None:
    """Put 1-2-5 ticks on a logarithmic axis, at most ``most`` of them and none nearer than then, so that labels never touch."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**d for d in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        apart = np.diff(np.log(ticks)) * (most + 1)
        if len(ticks) <= most and (apart >= math.log(high / low)).all():
            break
    ticks = ticks[:: math.ceil(len(ticks) / most) or 1]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
