"""What a run found, in a few sentences, and the words under its figures.

``workflow/report/*.rst`` hold the same words for Snakemake's report; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from trioflow.report.errors import INTERVAL_COVERAGE, summarise_errors
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


CAPTIONS: dict[str, tuple[str, str, str]] = {
    "predicted_vs_measured": (
        "Predicted and measured step time of every experiment, none left out.",
        "Left, both times. Right, the same relative to the measured median: the grey bar holds the "
        "middle half of the measured rounds, the blue dot is the prediction with its 80 % "
        "interval (an arrow: it goes on beyond the axis), and the figures at the edge are its signed error "
        "(positive: predicted too slow). A row says its numbers to a pointer that rests on it.",
        "Limit: the quartiles show how one session varied, not how another day or machine would.",
    ),
    "error_by_plan": (
        "Signed error of every experiment by workload and parallel plan.",
        "Blue cells were predicted too fast, red ones too slow; several batches of one cell stand "
        "one under the other and the colour is their mean. The bars average the absolute error of "
        "a column or a row.",
        "Limit: a mean over few experiments says little about a workload that is not among them.",
    ),
    "attribution": (
        "What the error of every experiment is made of.",
        "Each model is exchanged for what the profile of one real step measured: operators (compute), "
        "collectives and messages (communication), the share of them that operators ran beside (overlap), the "
        "host's own time. A bar to the right is a model that makes the prediction too slow, to the left too fast; "
        "the diamond is the signed error, the sum of the bars. The hatched remainder is left when all are exchanged.",
        "Limit: one profiled step stands for all, and parts that the spread of the rounds covers say nothing.",
    ),
    "sensitivity": (
        "What a change of one parameter of the platform does to all experiments.",
        "Left, the mean change of the predicted step over the experiments that have the parameter; right, their mean "
        "absolute error with the change, and as a stroke without it. Simulated only.",
        "Limit: the sizes of the changes are conventions, not what a parameter is likely to miss by.",
    ),
    "collective_curve": (
        "Measured collectives against the two ways to describe them.",
        "Above, time against message size: every measured round, the piecewise table that the "
        "simulation uses, and the best single line of start-up time plus bytes over bandwidth. "
        "Below, how far rounds and line lie from the table. A round lost in noise added less than the compute "
        "before it varied; it counts as 1 ns, below the axis.",
        "Limit: the table goes through the medians of these very samples, so the lower panel shows "
        "their spread and not the error at a size that was not measured.",
    ),
    "operator_fit": (
        "The operator regressions: what each class of operators costs and how well it is predicted.",
        "Left, the share of the fitted time. Right, the error on workloads that the fit never saw: "
        "the bar is the mean absolute error of single operators weighted by time, the dot the error "
        "of their sum, in which single errors cancel.",
        "Limit: classes that only one workload has cannot be held out and show no error.",
    ),
    "timeline": (
        "Predicted and measured timeline of each rank on one time axis.",
        "One lane a stream, predicted above measured, coloured by phase; communication, hatched, has two: "
        "exposed, where the rank computes nothing meanwhile, and hidden, where it does. "
        "The time that a lane is busy stands at its end. The purple line runs under the tasks of the "
        "critical path, that the predicted step waits for. Operators too thin to see are merged with "
        "their neighbours; the busy time is computed before merging. A bar says what it is to a pointer that rests on it.",
        "Limit: the measured timeline is a profile of a single step, and profiling slows it; the "
        "dashed line is the median of the steps without a profiler.",
    ),
}
