"""The page of cost models: every model on every measured case, from models that never saw it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from trioflow import __version__, tables
from trioflow.errors import InputError
from trioflow.provenance import atomic_path
from trioflow.report import style
from trioflow.report.html import (
    Cell,
    Column,
    render_figure,
    render_page,
    render_paragraph,
    render_table,
)
from trioflow.report.metrics import interval_score
from trioflow.report.wording import NOTHING, write_percent, write_signed_percent

TITLE = "trioflow: cost models against measurements"
INTRODUCTION = (
    "Every case of the public measurements that each set names, none left out, predicted by every model "
    "from data that does not hold the judged row. Error is predicted over measured less one; the "
    "oracle is the sum of the measured operators of the target: what a perfect model of operators "
    "would say. Baselines stand in the same table."
)
GROUPING = ["set", "quantity", "group"]
METRICS: dict[str, str] = {
    "cases": "number of cases",
    "mean_absolute_error": "mean of the absolute relative error",
    "median_absolute_error": "median of the absolute relative error",
    "worst_error": "signed relative error of the worst case",
    "bias": "mean of the signed relative error; positive when predictions are too slow",
    "oracle_mean_absolute_error": "mean absolute relative error of the measured operators' sum",
    "coverage": "share of cases whose measured value lies in the interval; 0.8 is the aim",
    "mean_relative_width": "mean width of the interval over the measured value",
    "interval_score": "mean interval score for 80 % over the measured value; smaller is better",
    "extrapolated": "share of the time predicted outside the fitted range",
}


def read_validation(files: Iterable[str | Path]) -> pd.DataFrame:
    """Return the cases of several files as one table.

    Raises
    ------
    InputError
        When there is none.
    TableError
        When a file breaks the schema.
    """
    frames = [tables.read_table(file, "validation") for file in files]
    if not frames or all(frame.empty for frame in frames):
        raise InputError("no validation case to report")
    return pd.concat(frames, ignore_index=True)


def summarise_validation(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the ``METRICS`` of every model in every group of every set.

    Parameters
    ----------
    cases : DataFrame
        Columns of ``tables.VALIDATION``.

    Returns
    -------
    DataFrame
        Columns set, quantity, group, model and those of ``METRICS``; within a
        group the best mean absolute error first.
    """
    rows = []
    for key, part in cases.groupby([*GROUPING, "model"], sort=True):
        rows.append({**dict(zip([*GROUPING, "model"], key, strict=True)), **_summarise(part)})
    frame = pd.DataFrame(rows, columns=[*GROUPING, "model", *METRICS])
    return frame.sort_values([*GROUPING, "mean_absolute_error", "model"], ignore_index=True)


def _summarise(part: pd.DataFrame) -> dict[str, Any]:
    """Return the metrics of one model in one group."""
    measured = part["measured_s"].to_numpy(dtype=float)
    signed = part["predicted_s"].to_numpy(dtype=float) / measured - 1
    low, high = (part[name].to_numpy(dtype=float) for name in ("low_s", "high_s"))
    known = np.isfinite(low) & np.isfinite(high)
    oracle = part["oracle_s"].to_numpy(dtype=float) / measured - 1
    oracle = np.abs(oracle[np.isfinite(oracle)])
    worst = int(np.argmax(np.abs(signed)))
    told: dict[str, Any] = {
        "cases": len(part),
        "mean_absolute_error": float(np.abs(signed).mean()),
        "median_absolute_error": float(np.median(np.abs(signed))),
        "worst_error": float(signed[worst]),
        "bias": float(signed.mean()),
        "oracle_mean_absolute_error": float(oracle.mean()) if len(oracle) else None,
        "extrapolated": float(part["extrapolated"].mean()),
    }
    low, high, measured = low[known], high[known], measured[known]
    if not len(measured):
        return told | dict.fromkeys(("coverage", "mean_relative_width", "interval_score"))
    return told | {
        "coverage": float(((low <= measured) & (measured <= high)).mean()),
        "mean_relative_width": float(((high - low) / measured).mean()),
        "interval_score": float((interval_score(low, high, measured) / measured).mean()),
    }


def draw_validation(summary: pd.DataFrame, name: str) -> Figure:
    """Draw the mean absolute error of every model in every group of one set."""
    part = summary[summary["set"] == name].copy()
    part["where"] = part["quantity"].str.replace("_", " ") + ", " + part["group"]
    part["per cent"] = 100 * part["mean_absolute_error"].astype(float)
    with style.figure_style():
        figure = style.new_figure(1.2 + 0.3 * part["where"].nunique())
        axes = figure.subplots()
        sns.stripplot(
            part, x="per cent", y="where", hue="model", ax=axes, jitter=False, dodge=False, size=7,
            hue_order=sorted(part["model"].unique()),
        )  # fmt: skip
        axes.set_xscale("symlog", linthresh=10)
        axes.set_xlim(left=0)
        axes.set_ylabel("")
        axes.set_xlabel("mean absolute error [%], logarithmic above 10")
        axes.grid(axis="y")
        sns.move_legend(axes, "upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def build_validation_page(
    files: Sequence[str | Path], page: str | Path, table: str | Path
) -> pd.DataFrame:
    """Write the page, its figures and the table of metrics.

    Parameters
    ----------
    files : sequence of path
        Parquet files of ``tables.VALIDATION``.
    page, table : path
        HTML page and CSV file to write; figures go into ``figures`` beside the page.

    Returns
    -------
    DataFrame
        From `summarise_validation`.
    """
    cases = read_validation(files)
    summary = summarise_validation(cases)
    parts = []
    for name in dict.fromkeys(summary["set"]):
        stem = Path(page).parent / "figures" / f"validation-{name}"
        svg = style.save_figure(draw_validation(summary, name), stem)[0]
        place = svg.relative_to(Path(page).parent).as_posix()
        caption = f"Mean absolute error of each model on the set {name}; left is better."
        parts += [
            f"<h2>{escape(name)}</h2>",
            render_figure(place, caption, caption),
            _render(summary, name),
        ]
    body = (
        f"<header><h1>{escape(TITLE)}</h1>\n{render_paragraph(INTRODUCTION, 'headline')}</header>\n<main>"
        + "\n".join(parts)
        + f"</main>\n<footer>Made by trioflow {escape(__version__)}.</footer>"
    )
    with atomic_path(table) as temporary:
        summary.to_csv(temporary, index=False, float_format="%.6g")
    with atomic_path(page) as temporary:
        temporary.write_text(render_page(TITLE, body), encoding="utf-8")
    return summary


def _render(summary: pd.DataFrame, name: str) -> str:
    """Return the table of one set."""
    columns = [
        Column("group", "quantity", "part of the set that is averaged by itself", number=False),
        Column("model", "", "model that predicted", number=False),
        Column("cases", "", METRICS["cases"]),
        Column("error", "mean absolute", METRICS["mean_absolute_error"]),
        Column("median", "absolute", METRICS["median_absolute_error"]),
        Column("worst", "signed", METRICS["worst_error"]),
        Column("bias", "signed mean", METRICS["bias"]),
        Column("oracle", "mean absolute", METRICS["oracle_mean_absolute_error"]),
        Column("coverage", "aim 80 %", METRICS["coverage"]),
        Column("width", "of the interval", METRICS["mean_relative_width"]),
        Column("score", "of the interval", METRICS["interval_score"]),
        Column("extrapolated", "share", METRICS["extrapolated"]),
    ]
    rows = []
    for row in summary[summary["set"] == name].to_dict("records"):
        cells = [
            Cell(str(row["group"]), None, str(row["quantity"]).replace("_", " ")),
            Cell(str(row["model"])),
            Cell(str(row["cases"]), float(row["cases"])),
        ]
        for metric in list(METRICS)[1:-1]:
            write = write_signed_percent if metric in ("worst_error", "bias") else write_percent
            cells.append(_cell(row[metric], write))
        rows.append([*cells, _cell(row["extrapolated"], write_percent)])
    return render_table(columns, rows, f"Cases of the set {name}")


def _cell(value: Any, write: Any) -> Cell:
    """Return a number's cell; a dash where there is none."""
    if value is None or not np.isfinite(value):
        return Cell(NOTHING, "")
    return Cell(write(value), float(value))
