"""What a run found, in a few sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from trioflow.report.metrics import INTERVAL_COVERAGE, summarise_errors
from trioflow.report.wording import (
    count_words,
    join_words,
    write_percent,
    write_signed_percent,
)


def describe_run(
    errors: pd.DataFrame, traces: Mapping[str, Mapping[str, Any]] | None = None
) -> list[str]:
    """Say what was captured, predicted and measured, and how wrong it was.

    Parameters
    ----------
    errors : DataFrame
        Columns of ``tables.ERRORS``, at least one row.
    traces : mapping, optional
        Facts of the traces captured on the reader's machine; without them
        the sentences suit a reader elsewhere.

    Returns
    -------
    list of str
        Sentences, to be joined by the caller.
    """
    ranks = sorted({int(value) for value in errors["ranks"]})
    rounds = sorted({int(value) for value in errors["rounds"]})
    workloads = errors["workload"].nunique()
    steps = count_words(len(errors), "step")
    if traces:
        captured = (
            f"{count_words(len(traces), 'training step')} of {count_words(workloads, 'workload')} "
            f"{'was' if len(traces) == 1 else 'were'} captured on one rank of this machine."
        )
        origin, place = "From these traces", "this machine"
    else:
        captured, place = "", "one machine"
        origin = f"From traces of {count_words(workloads, 'workload')} on one rank"
    spread = ((errors["measured_high_s"] - errors["measured_low_s"]) / errors["measured_s"]).mean()
    found = summarise_errors(errors)
    of_rounds = f"{rounds[0]} rounds" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds"
    sentences = [
        captured,
        f"{origin}, {steps} on {join_words(str(value) for value in ranks)} "
        f"{'rank' if ranks == [1] else 'ranks'} were predicted, and the same {steps} were measured "
        f"on {place} in {of_rounds} each.",
        f"The mean absolute error over all {len(errors)}, none left out, is "
        f"{write_percent(found['mean_absolute_error'])} "
        f"(median {write_percent(found['median_absolute_error'])}, worst "
        f"{write_signed_percent(found['worst_error'])} in {found['worst_experiment']}).",
        f"The middle half of a step's measured rounds spans {write_percent(spread)} of its median "
        "on average.",
    ]
    return [sentence for sentence in sentences if sentence]


def describe_accuracy(errors: pd.DataFrame) -> list[str]:
    """Say how the intervals did, and what simpler predictions would have given."""
    found = summarise_errors(errors)
    return [
        f"The measured median lies in the {100 * INTERVAL_COVERAGE:.0f} % interval of "
        f"{write_percent(found['coverage'], 0)} of the experiments; the intervals are "
        f"{write_percent(found['mean_relative_width'], 0)} of the measured step wide on average.",
        f"{write_percent(found['within_spread'], 0)} of the predictions lie between the quartiles "
        "of their measurement.",
        f"The mean signed error is {write_signed_percent(found['bias'])}.",
        "Without anchoring on single-rank steps of the measuring session the mean absolute error "
        f"is {write_percent(found['trace_only_mean_absolute_error'])} (trace only); dividing the "
        "traced step by its share of the work, with communication free, gives "
        f"{write_percent(found['baseline_mean_absolute_error'])} (baseline).",
    ]
