"""Measured rounds of each experiment beside the steps drawn for it: quantiles, and how far apart both lie."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError
from trioflow.report.errors import measured_steps
from trioflow.report.inputs import ReportInputs
from trioflow.report.pages import (
    join_words,
    numbers,
    render_paragraph,
    render_records,
    words,
    write_percent,
    write_signed_percent,
)
from trioflow.tables import records

QUANTILES = {"low_s": 0.1, "median_s": 0.5, "high_s": 0.9}
"""What ``Draws.to_dict`` calls them."""


def compare_rounds(errors: pd.DataFrame, inputs: ReportInputs) -> pd.DataFrame:
    """Return each experiment's ``QUANTILES`` of its rounds (``measured_``) and draws (``drawn_``) [s].

    Raises InputError when an experiment was not drawn.
    """
    rows = []
    for row in errors.to_dict("records"):
        name = str(row["experiment"])
        drawn = inputs.summaries[name].get("drawn")
        if not isinstance(drawn, dict) or not all(key in drawn for key in QUANTILES):
            raise InputError(
                f"experiment {name!r}: its summary has no draws",
                fix="simulate it again with this version",
            )
        steps_s = measured_steps(inputs.measurements, row, int(row["ranks"]))
        rows.append({
            "experiment": name, "rounds": len(steps_s),
            **{f"measured_{key}": float(np.quantile(steps_s, share)) for key, share in QUANTILES.items()},
            **{f"drawn_{key}": float(drawn[key]) for key in QUANTILES},
        })  # fmt: skip
    return pd.DataFrame(rows)


def _find_error(row: Any, key: str) -> float:
    return float(row[f"drawn_{key}"] / row[f"measured_{key}"] - 1)


def render_rounds(rounds: pd.DataFrame) -> str:
    """Return in words and as a table how measured rounds and draws compare (``compare_rounds``)."""
    rows = records(rounds)
    misses = []
    for key, quantile in QUANTILES.items():
        error = np.array([_find_error(row, key) for row in rows])
        misses.append(
            f"of the {100 * quantile:.0f} % quantile {write_percent(float(np.abs(error).mean()))} "
            f"({write_signed_percent(float(error.mean()))} signed)"
        )
    measured, drawn = (
        float((rounds[f"{way}_high_s"] / rounds[f"{way}_low_s"] - 1).median())
        for way in ("measured", "drawn")
    )
    text = (
        "Drawn: the predicted step with times that differ from rank to rank and operator to operator as those of the "
        "captures do (docs/spread.md); no measured step of an experiment is in it. Mean absolute errors: "
        f"{join_words(misses)}. In the median experiment four fifths of the rounds span {write_percent(measured)}, "
        f"four fifths of the draws {write_percent(drawn)}. A capture runs one rank alone: what ranks that are all busy "
        "at once, and the rest of the machine, take from one another differs from round to round, too, and is not drawn."
    )
    fields = [
        words("experiment", "", "", "experiment"),
        *(
            numbers(f"{100 * quantile:.0f} %", way, "quantile of the step", "time", f"{way}_{key}")
            for key, quantile in QUANTILES.items()
            for way in ("measured", "drawn")
        ),
        *(
            numbers(
                f"{100 * quantile:.0f} %",
                "error",
                "drawn over measured, less 1",
                "signed",
                partial(_find_error, key=key),
            )
            for key, quantile in QUANTILES.items()
        ),
    ]
    return render_paragraph(text) + render_records(rows, fields, "Rounds and draws")
