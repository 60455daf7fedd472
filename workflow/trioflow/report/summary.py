"""What a run found, in a few sentences, and the words under its figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from trioflow.report.errors import INTERVAL_COVERAGE, summarise_errors
from trioflow.report.html import read_captions
from trioflow.report.wording import count_words, join_words, write_percent, write_signed_percent
from trioflow.trace.facts import Facts


def describe_run(errors: pd.DataFrame) -> list[str]:
    """Say in sentences, for a reader elsewhere, what was predicted and measured, and how wrong it was (``tables.ERRORS``)."""
    return [
        f"From traces of {count_words(errors['workload'].nunique(), 'workload')} on one rank, "
        f"{_name_steps(errors)} were predicted, and the same "
        f"{count_words(len(errors), 'step')} were measured on one machine in {_name_rounds(errors)} each.",
        describe_error(errors),
        _describe_spread(errors),
    ]


def describe_own_run(
    errors: pd.DataFrame,
    traces: Mapping[str, Facts],
    sessions: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Say what was run on the reader's own machine, and first of all what machine that is."""
    return [
        f"{_name_steps(errors).capitalize()} of {count_words(errors['workload'].nunique(), 'workload')} were predicted "
        f"and measured on this machine: {_name_machine(sessions)}.",
        f"The predictions come from {count_words(len(traces), 'training step')} captured on one rank; each of the "
        f"same {count_words(len(errors), 'step')} was measured in {_name_rounds(errors)}.",
        _describe_spread(errors),
    ]


def _name_machine(sessions: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the devices that ranks ran on, what carried their messages, and that there was no GPU."""
    found = []
    for session in sessions.values():
        names = [str(name) for name in session["device_names"]]
        library = str(session["library"]).partition(",")[0]
        gpu = "" if session["device"] == "cuda" else ", no GPU"
        devices = ", ".join(f"{names.count(name)} \u00d7 {name}" for name in dict.fromkeys(names))
        found.append(f"{devices}, messages over {library}{gpu}")
    return join_words(dict.fromkeys(found))


def _name_steps(errors: pd.DataFrame) -> str:
    ranks = sorted({int(value) for value in errors["ranks"]})
    noun = "rank" if ranks == [1] else "ranks"
    return f"{count_words(len(errors), 'step')} on {join_words(map(str, ranks))} {noun}"


def _name_rounds(errors: pd.DataFrame) -> str:
    rounds = sorted({int(value) for value in errors["rounds"]})
    return f"{rounds[0]} rounds" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds"


def describe_error(errors: pd.DataFrame) -> str:
    """Say how wrong the predictions are, in one sentence."""
    found = summarise_errors(errors)
    return (
        f"The mean absolute error over all {len(errors)}, none left out, is "
        f"{write_percent(found['mean_absolute_error'])} "
        f"(median {write_percent(found['median_absolute_error'])}, worst "
        f"{write_signed_percent(found['worst_error'])} in {found['worst_experiment']})."
    )


def _describe_spread(errors: pd.DataFrame) -> str:
    spread = ((errors["measured_high_s"] - errors["measured_low_s"]) / errors["measured_s"]).mean()
    return f"The middle half of a step's measured rounds spans {write_percent(spread)} of its median on average."


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


CAPTIONS = read_captions("report/summary")
