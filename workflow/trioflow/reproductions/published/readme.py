"""The README's block on public cases, written from the table of a run and from nothing else."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from trioflow.errors import InputError
from trioflow.report.scores import ORACLE, OURS, score_published
from trioflow.report.wording import NOTHING, write_line, write_percent
from trioflow.reproductions.published.aims import describe_set
from trioflow.reproductions.published.sections import read_aim, score_of
from trioflow.reproductions.readme import replace_block

BLOCK = "published"
MOST_ROWS = 8
_HEADINGS = (
    "public measurements", "cases", "aim", "error", "scaling error", "best other", "80 % interval covers",
)  # fmt: skip


def update_published(readme_path: str | Path, cases: pd.DataFrame) -> bool:
    """Rewrite the README's table of public cases, and nothing else.

    Parameters
    ----------
    readme_path : path
        Holds the lines ``<!-- published:begin -->`` and ``<!-- published:end -->``.
    cases : DataFrame
        Columns of ``tables.PUBLISHED_CASES``.

    Returns
    -------
    bool
        Whether the file changed.

    Raises
    ------
    InputError
        When there is no case, or as ``readme.replace_block``.
    """
    if cases.empty:
        raise InputError("no public case was judged", fix="run `snakemake published`")
    return replace_block(Path(readme_path), BLOCK, write_published_rows(cases))


def write_published_rows(cases: pd.DataFrame) -> str:
    """Return one sentence and a Markdown table with a row for each set, ``MOST_ROWS`` at most."""
    scores = score_published(cases)
    lead = (
        "Mean absolute errors on public measured steps: no case left out, none judged by a fit that saw it; **bold**: aim reached. "
        "`snakemake published` makes `report/published.html` with every case, baseline and cause."
    )
    lines = [lead, "", write_line(_HEADINGS), write_line(["---", *["---:"] * (len(_HEADINGS) - 1)])]
    for name in list(dict.fromkeys(scores["set"]))[:MOST_ROWS]:
        ours = score_of(scores, name, OURS)
        aim, reached = read_aim(scores, name)
        error, scaling = (
            write_percent(ours[key]) for key in ("mean_absolute_error", "scaling_error")
        )
        on_scaling = describe_set(name).aim is None
        if reached:
            error, scaling = (error, f"**{scaling}**") if on_scaling else (f"**{error}**", scaling)
        lines.append(
            write_line(
                [
                    describe_set(name).title, str(int(ours["cases"])), aim, error, scaling,
                    _best_other(scores, name), write_percent(ours["coverage"], 0),
                ]
            )
        )  # fmt: skip
    return "\n".join(lines)


def _best_other(scores: pd.DataFrame, name: str) -> str:
    """Return the smallest error of the others, and whose it is."""
    others = scores[(scores["set"] == name) & ~scores["model"].isin([OURS, ORACLE])]
    if others.empty:
        return NOTHING
    best = others.sort_values(["mean_absolute_error", "model"]).iloc[0]
    return f"{write_percent(float(best['mean_absolute_error']))} ({best['model']})"
