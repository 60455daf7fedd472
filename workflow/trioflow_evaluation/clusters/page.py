"""The page of nanotron's runs: steps and memory, predicted beside measured, and why others failed.

Beside what was reached stand aims, and ways that simulate nothing. A section is on Megatron-LM's peaks: how far off, case
by case, and which are refused. Nothing here imports torch.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import KFold, cross_val_predict
from trioflow import tables
from trioflow.base.units import BYTES_PER_GIB
from trioflow.costmodel.uncertainty import COVERAGE
from trioflow.parallel.memory.peak import DOUBTED
from trioflow.report.errors import share_in_order
from trioflow.report.pages import (
    NOTHING,
    Cell,
    Page,
    Section,
    count_reached,
    count_words,
    numbers,
    render_details,
    render_paragraph,
    render_records,
    words,
    write_markdown,
    write_page,
    write_percent,
    write_signed_percent,
)

from trioflow_evaluation.chances import measure_miss, render_chances
from trioflow_evaluation.clusters.parts import plain_model
from trioflow_evaluation.clusters.scores import (
    BEFORE,
    CELL,
    FAST,
    FITTED,
    GPUS_OF_A_NODE,
    RAN,
    SEQUENCE,
    choose_cases,
    judge_order,
    judge_survival,
    mark_crowded,
    score_chances,
    score_steps,
    score_survival,
    split_by_nodes,
    tabulate_reliability,
)
from trioflow_evaluation.evaluate import Reached, evaluate, render_scores
from trioflow_evaluation.tables import CLUSTER_MEMORY, CLUSTER_PEAKS, CLUSTER_RATES, CLUSTER_STEPS

OURS = "trioflow"
CAREFUL = f"plans less than {write_percent(DOUBTED, 0)} likely to fit behind the others, as search ranks"
CONSTANT, TREES, RULE = "constant MFU", "boosted trees", "rule"
ONE_FOR_ALL = "one interval for all"
FOLDS = 10
"""Of the rows that the trees are fitted on, all but one."""
_TOLD = ("parameters", "nodes", "data", "tensor", "pipeline", "zero", "micro_batch", "accumulate")


def predict_steps(cases: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Return every run's step by each way [s].

    The constant MFU is the median of the runs that may be fitted on. The trees (scikit-learn's
    defaults, on the step's logarithm) see nine tenths of all runs, those alike too, which trioflow
    never does.
    """
    at_peak_s = (cases["measured_s"] * cases["mfu"]).to_numpy(np.float64)
    fitted = cases.loc[cases["set"] == FITTED, "mfu"]
    steps_of = {OURS: cases["predicted_s"].to_numpy(np.float64)}
    if len(fitted):
        steps_of[CONSTANT] = at_peak_s / float(fitted.median())
    if len(cases) >= FOLDS:
        features = np.log2(cases[list(_TOLD)].to_numpy(np.float64) + 1)
        trees, folds = HistGradientBoostingRegressor(random_state=0), KFold(FOLDS, shuffle=True, random_state=0)
        steps_of[TREES] = np.exp(cross_val_predict(trees, features, np.log(cases["measured_s"].to_numpy()), cv=folds))
    return steps_of


def score_ways(cases: pd.DataFrame, steps: Mapping[str, NDArray[np.float64]]) -> pd.DataFrame:
    """Return `evaluate.evaluate` of each way, with ``fast_error``, the median above ``scores.FAST``."""
    judged = [(method, cases.assign(predicted_s=predicted_s)) for method, predicted_s in steps.items()]
    fast = evaluate((method, rows[rows["mfu"] > FAST]) for method, rows in judged)
    return evaluate(judged, CELL).assign(fast_error=fast["median_error"])


def choose_plans(cases: pd.DataFrame, steps: Mapping[str, NDArray[np.float64]]) -> pd.DataFrame:
    """Return throughput lost by the plan that each method expects to be fastest, by model, nodes and network, beside the best.

    A cell is what somebody could choose from: runs of one model on as many nodes of one network, two or more. Where it is
    known how likely each is to fit (``scores.mark_crowded``), a column has the choice of those who put unlikely ones behind.

    The rule takes the smallest tensor, then pipeline degree, then the largest micro-batch; a
    constant MFU expects equal steps, so it loses the mean of the cell.
    """
    rows = []
    for named, cell in cases.assign(**steps).groupby(CELL):
        if len(cell) < 2:
            continue
        best = cell.iloc[int(cell["measured_s"].argmin())]
        row: dict[str, Any] = {**dict(zip(CELL, named, strict=True)), "runs": len(cell)}
        row |= _describe_plan("best", best)
        for method in (method for method in (OURS, TREES) if method in steps):
            known = cell.dropna(subset=method).sort_values(method, kind="stable")
            row[method] = _lose(best["measured_s"], known)
            if method == OURS:
                row |= _describe_plan("chosen", known.iloc[0] if len(known) else None)
                if "crowded" in known:
                    row[CAREFUL] = _lose(best["measured_s"], known.sort_values("crowded", kind="stable"))
        order = ["tensor", "pipeline", "micro_batch"]
        first_s = cell.sort_values(order, ascending=[True, True, False])["measured_s"].iloc[0]
        row[RULE] = 1 - best["measured_s"] / first_s
        row[CONSTANT] = float((1 - best["measured_s"] / cell["measured_s"]).mean())
        rows.append(row)
    return pd.DataFrame(rows)


def _lose(best_s: float, ranked: pd.DataFrame) -> float:
    """Return the share of throughput that is lost by the first of the ranked runs; all of it where there is none."""
    return 1 - best_s / float(ranked["measured_s"].iloc[0]) if len(ranked) else 1.0


def score_intervals(cases: pd.DataFrame) -> pd.DataFrame:
    """Return ``covered``, ``width`` (high over low, median) and ``score`` of 80 % intervals by groups of runs, ours and naive.

    The score is the mean interval score of logarithms (less is better). Naive: the simulated step
    times the quantiles of measured over simulated of all other models' runs. A refused run lies
    outside.
    """
    measured, simulated, *ours = (
        np.log(cases[name].to_numpy(np.float64)) for name in ("measured_s", "predicted_s", "low_s", "high_s")
    )
    naive = np.full((2, len(cases)), np.nan)
    for model in cases["parameters"].unique():
        of_model = (cases["parameters"] == model).to_numpy()
        others = ~of_model if (~of_model).any() else of_model
        ends = np.nanquantile((measured - simulated)[others], COVERAGE)
        naive[:, of_model] = simulated[of_model] + ends[:, None]
    ends_of = {"ours": np.array(ours), "naive": naive}
    rows = []
    groups = {
        "all runs": cases["nodes"] > 0,
        f"MFU above {write_percent(FAST, 0)}": cases["mfu"] > FAST,
        **split_by_nodes(cases),
    }
    for group, mask in groups.items():
        chosen = mask.to_numpy()
        if not chosen.any():
            continue
        row: dict[str, Any] = {"group": group, "runs": int(chosen.sum())}
        for interval, ends in ends_of.items():
            (low, high), truth = ends[:, chosen], measured[chosen]
            outside = np.maximum(low - truth, 0) + np.maximum(truth - high, 0)
            row[f"{interval}_covered"] = float((outside == 0).mean())
            row[f"{interval}_width"] = float(np.exp(np.nanmedian(high - low)))
            row[f"{interval}_score"] = float(np.nanmean(high - low + 2 / _LEFT * outside))
        rows.append(row)
    return pd.DataFrame(rows)


_LEFT = 1 - (COVERAGE[1] - COVERAGE[0])
"""Share that an interval is to leave outside."""


def _describe_plan(which: str, run: pd.Series | None) -> dict[str, Any]:
    if run is None:
        return {which: "all refused", f"{which}_tokens_per_s": 0.0}
    text = " x ".join(f"{int(run[name])}" for name in ("tensor", "pipeline", "data"))
    text += f", micro-batch {int(run['micro_batch'])}, ZeRO {int(run['zero'])}"
    tokens = SEQUENCE * run["micro_batch"] * run["accumulate"] * run["data"]
    return {which: text, f"{which}_tokens_per_s": float(tokens / run["measured_s"])}


def judge_aims(memory: pd.DataFrame | None, steps: pd.DataFrame) -> list[Reached]:
    """Return what was judged: steps (marked by ``scores.mark_crowded``), the choice of a plan, and memory where it was."""
    return [*_judge_steps(steps), *([] if memory is None else _judge_memory(memory))]


def describe_causes(steps: pd.DataFrame) -> str:
    """Return in words how the steps divide: pipelines before their fix, and the others by how they lie on nodes."""
    before, judged = steps[steps["set"] == BEFORE], judge_order(steps)
    parts = {
        f"{BEFORE} (their cause is known, nothing here models it)": before,
        **{name: judged[chosen] for name, chosen in split_by_nodes(judged).items()},
    }
    scores = evaluate((name, rows) for name, rows in parts.items() if len(rows))
    texts = [
        f"{score['group']} {write_percent(score['median_error'])}, bias {write_signed_percent(score['bias'])} ({score['cases']:,} runs)"
        for score in scores.to_dict("records")
    ]
    return f"Median errors: {'; '.join(texts)}."


def _predict_judged(steps: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, NDArray[np.float64]]]:
    """Return the runs that are judged, and their steps by each way [s]; the ways learn from those fitted on, too."""
    after = steps[steps["set"] != BEFORE]
    judged = (after["set"] == RAN).to_numpy()
    return after[judged], {method: step_s[judged] for method, step_s in predict_steps(after).items()}


def _judge_steps(steps: pd.DataFrame) -> list[Reached]:
    cases, steps_of = _predict_judged(steps)
    judged = {method: cases.assign(predicted_s=step_s) for method, step_s in steps_of.items()}
    beyond, fast = cases["tensor"] > GPUS_OF_A_NODE, cases["mfu"] > FAST

    def line(
        what: str, key: str, chosen: pd.Series, aim: float | None = None, more: bool = False, headline: str = ""
    ) -> Reached:
        if not chosen.any():
            return Reached(what, 0, math.nan)
        scores = evaluate(((method, rows[chosen]) for method, rows in judged.items()), CELL)
        score_of = dict(zip(scores["group"], scores[key], strict=True))
        ours = score_of.pop(OURS)
        return Reached(what, int(chosen.sum()), ours, aim, more, others=score_of, headline=headline)

    every, median = beyond | ~beyond, "median_error"
    cells = choose_plans(cases, steps_of)
    losses = {method: float(cells[method].mean()) for method in (TREES, RULE, CONSTANT) if method in cells}
    mfu = f"MFU above {write_percent(FAST, 0)}"
    compared = [
        line(
            "step, median error: tensor groups inside a node",
            median,
            ~beyond,
            0.04,
            headline="median error of steps with tensor groups inside a node",
        ),
        line("step, median error: tensor groups beyond a node", median, beyond, 0.10, headline="beyond"),
        line(f"step, median error: {mfu}", median, fast, 0.15, headline=f"with an {mfu}"),
        line("step, median error: all of these", median, every),
        *(line(f"steps within {most} %", f"within_{most}", every) for most in (10, 20)),
        line(
            "pairs of a model's runs on as many nodes of one network in the measured order",
            "in_order",
            every,
            0.85,
            True,
        ),
    ]
    lines = [one for one in compared if one.cases]
    apart = {"runs that were fitted on": FITTED, BEFORE: BEFORE}
    for name, rows in ((name, steps[steps["set"] == kind]) for name, kind in apart.items()):
        if len(rows):
            error = evaluate([("", rows)])[median][0]
            lines.append(Reached(f"step, median error: {name}", len(rows), error))
    lines += [
        *_judge_intervals(cases),
        *_judge_chances(cases),
        Reached(
            "throughput lost by the plan predicted to be fastest, mean of cells",
            len(cells),
            float(cells[OURS].mean()),
            0.05,
            others=losses,
            headline="throughput lost by running the plan predicted to be fastest",
        ),
    ]
    if CAREFUL in cells:
        lines.append(Reached(f"the same, {CAREFUL}", len(cells), float(cells[CAREFUL].mean())))
    return lines


def _judge_intervals(cases: pd.DataFrame) -> list[Reached]:
    row = score_intervals(cases).to_dict("records")[0]
    covered, wide = ({ONE_FOR_ALL: row[name]} for name in ("naive_covered", "naive_width"))
    return [
        Reached(
            "measured step inside the 80 % interval", len(cases), row["ours_covered"], 0.75, more=True, others=covered
        ),
        Reached(
            "median width of the interval, high over low end", len(cases), row["ours_width"], factor=True, others=wide
        ),
    ]


def _judge_chances(cases: pd.DataFrame) -> list[Reached]:
    """Return how far stated probabilities are from shares of pairs."""
    groups = score_chances(cases)
    what = "stated probability that a plan is the faster one, off the share of pairs where it was"
    return [Reached(what, int(groups["pairs"].sum()), measure_miss(groups), 0.05)] if len(groups) else []


def _judge_memory(cases: pd.DataFrame) -> list[Reached]:
    judged = judge_survival(choose_cases(cases))
    scores = score_survival(judged).iloc[0]
    ran = int(scores["sized"])
    return [
        Reached(
            "reserved peak, median error", ran, scores["reserved"], 0.06, headline="median error of reserved memory"
        ),
        Reached("reserved peak, 90th percentile of the error", ran, scores["reserved_90"], 0.10),
        Reached("allocated peak of the update, median error", ran, scores["update"], 0.04),
        Reached(
            "runs whose odds say rightly whether they survive, their model left out",
            len(judged),
            scores["accuracy"],
            0.95,
            more=True,
            headline="runs rightly predicted to survive or to run out of memory",
        ),
    ]


_PEAK_AIM = 0.05
"""Median error of the peaks that was aimed at."""


def score_peaks(cases: pd.DataFrame) -> pd.DataFrame:
    """Return ``median_error``, ``error_90``, ``most`` (absolute) and ``bias`` (signed median) of peaks, by groups of cases."""
    predicted = cases[cases["refused"] == ""]
    groups = [
        ("all that are predicted", predicted),
        *((f"attention {kind}", rows) for kind, rows in predicted.groupby("attention")),
        *(("one stage" if n == 1 else f"{n} stages", rows) for n, rows in predicted.groupby("pipeline")),
        *((f"tensor degree {t}", rows) for t, rows in predicted.groupby("tensor")),
        *((str(device).upper(), rows) for device, rows in predicted.groupby("device")),
        ("some arguments not followed", predicted[predicted["not_followed"] != ""]),
    ]
    return evaluate(((name, rows) for name, rows in groups if len(rows)), quantity="{}_bytes")


def peaks_section(cases: pd.DataFrame) -> Section:
    """Return the section on ``CLUSTER_PEAKS``: scores, why cases are refused, each prediction."""
    scores = score_peaks(cases)
    predicted = int((cases["refused"] == "").sum())
    text = (
        f"Megatron-LM's functional tests log the peak of what the last rank's allocator handed out: {len(cases)} runs on eight A100 or "
        f"H100, {predicted} of them predicted, with nothing fitted; median error {write_percent(scores['median_error'].iloc[0])} "
        f"(aim {write_percent(_PEAK_AIM, 0)}). The prediction is of the same rank, with the workspaces that the test's environment asks for."
    )
    return Section(
        "megatron",
        "Megatron-LM's peaks",
        [
            render_paragraph(text),
            render_details(
                "Errors by kind of run",
                render_scores(
                    scores,
                    "Errors of Megatron-LM's peaks",
                    ("cases", "median_error", "error_90", "most", "bias"),
                    "cases",
                ),
            ),
            _render_refused(cases),
            _render_cases(cases),
        ],
    )


def _render_refused(cases: pd.DataFrame) -> str:
    counted = cases.loc[cases["refused"] != "", "refused"].value_counts()
    fields = [
        words("refused because of", "", "why", lambda entry: entry[0]),
        numbers("cases", "", "how many", "count", lambda entry: entry[1]),
    ]
    title = f"Cases that are refused: {counted.sum()}"
    return render_details(title, render_records(counted.items(), fields, title))


def _render_cases(cases: pd.DataFrame) -> str:
    fields = [
        words("case", "", "the test", "case"),
        words("GPU", "", "eight of them", lambda row: row["device"].upper()),
        words(
            "data x tensor x pipeline",
            "",
            "degrees",
            lambda row: f"{row['data']} x {row['tensor']} x {row['pipeline']}",
        ),
        numbers("measured", "GiB", "peak of the last rank", _gib_cell, "measured_bytes"),
        numbers("predicted", "GiB", "the same", _gib_cell, "predicted_bytes"),
        numbers("error", "", "signed", "signed", "error"),
        words("not followed", "", "arguments that simulate warns of", "not_followed"),
    ]
    predicted = cases[cases["refused"] == ""]
    errors = predicted["predicted_bytes"].astype(float) / predicted["measured_bytes"] - 1
    rows = predicted.assign(error=errors).sort_values("error", key=abs, ascending=False)
    title = f"Every prediction: {count_words(len(rows), 'case')}, the worst first"
    return render_details(title, render_records(rows, fields, title))


def _gib_cell(size_bytes: float) -> Cell:
    return Cell(f"{size_bytes / BYTES_PER_GIB:.2f}")


TITLE = "trioflow: nanotron's runs on 8 to 512 H100"
_LOSS_AIM = 0.05
"""Mean loss of throughput that was aimed at."""
_STEPS = (
    "Each step as simulate predicts it on p5-h100, or p5-h100-slow where the job had slow hosts, with the collectives that the run's own job "
    "measured (256 MB over all its ranks and inside a node). Fitted on runs of the 1.34 B model on 1 and 2 nodes (tensor groups beyond a node "
    "with slow hosts: on 4): the host's time per launch, compute time in a step relative to tables of single operators, and the time of exchanges. "
    f"{BEFORE[0].upper()}{BEFORE[1:]} are a group of their own: nanotron's engine took a second more per micro-batch until it was fixed."
)
_LEAD = (
    "Steps and memory of language models on 8 to 512 H100, as nanotron ran them, beside what trioflow predicts "
    "for each run from its configuration alone; none is left out."
)
_WORDS = {
    "held": "what the allocator holds: what it hands out, for fragmentation a share of what of it comes and goes in a step, and without a pipeline the inputs of a micro-batch's reduce-scatters",
    "handed out": "the peak of what the allocator hands out, with nothing fitted",
}


_STEP_SCORES = ("cases", "median_error", "bias", "within_10", "within_20", "within_50", "covered", "width", "in_order")


def build_clusters_page(memory: str | Path, steps: str | Path, peaks: str | Path, page: str | Path) -> None:
    """Write the page from Parquet files of ``CLUSTER_MEMORY``, ``CLUSTER_STEPS`` and ``CLUSTER_PEAKS``."""
    cases = tables.read_table(memory, "cluster_memory", CLUSTER_MEMORY)
    timed = mark_crowded(cases, tables.read_table(steps, "cluster_steps", CLUSTER_STEPS))
    tests = tables.read_table(peaks, "cluster_peaks", CLUSTER_PEAKS)
    lines = judge_aims(cases, timed)
    content = [
        Section("aims", "Aims and what was reached", [render_aims(lines), render_paragraph(describe_causes(timed))]),
        Section(
            "steps",
            "Steps",
            [
                render_paragraph(_STEPS),
                render_scores(score_steps(timed), "Errors of the steps", _STEP_SCORES, "runs of"),
                render_details(
                    "Intervals, and which of two plans is faster",
                    _render_intervals(timed)
                    + render_chances(score_chances(timed), "one model's runs on as many nodes"),
                ),
                _render_crowded(timed),
            ],
        ),
        Section("choice", "Which plan to take", [_render_choice(timed)]),
        Section("memory", "Memory of the runs, and who survives", [_render_survival(cases)]),
        peaks_section(tests),
    ]
    listed = ", ".join(
        f"{line.headline} {line.write_value()}" for line in lines if line.headline and line.aim is not None
    )
    made = Page(
        TITLE,
        content,
        _LEAD,
        made_from=" from nanotron's own table of runs",
        verdict=f"{count_reached(line.reached for line in lines)} {listed[:1].upper()}{listed[1:]}.",
        words=_WORDS,
        schemas={"cluster_memory": CLUSTER_MEMORY, "cluster_steps": CLUSTER_STEPS, "cluster_peaks": CLUSTER_PEAKS},
        files=[memory, steps, peaks],
    )
    write_page(page, made)


def render_aims(lines: Sequence[Reached]) -> str:
    """Return each aim beside what was reached, and what other ways reach."""
    fields = [
        words("judged", "", "over all cases, none left out", lambda line: line.what),
        numbers("cases", "", "how many", "count", lambda line: line.cases),
        numbers("aim", "", "at most, unless it says otherwise", Cell, lambda line: line.write_aim()),
        numbers(
            "trioflow", "", "what was reached", lambda line: Cell(line.write_value(), line.value), lambda line: line
        ),
        words("aim reached", "", "", lambda line: line.write_reached()),
        words("others", "", "what they reach; the trees saw nine tenths of the runs", lambda line: line.write_others()),
    ]
    return render_records(lines, fields, "Aims")


def _render_intervals(cases: pd.DataFrame) -> str:
    """Return how well the intervals hold beside one interval for all."""
    fields = [
        words("runs of", "", "which", "group"),
        numbers("runs", "", "how many", "count", "runs"),
        *(
            numbers(title, name, meaning, cell, f"{key}_{title}")
            for key, name in (("ours", "trioflow"), ("naive", ONE_FOR_ALL))
            for title, meaning, cell in (
                ("covered", "measured step inside the 80 % interval", "percent"),
                ("width", "high over low end, median", "short"),
                ("score", "mean interval score of logarithms, less is better", "short"),
            )
        ),
    ]
    return render_records(score_intervals(cases), fields, "80 % intervals")


def _render_choice(cases: pd.DataFrame) -> str:
    """Return errors and choices of trioflow and of ways that simulate nothing."""
    cases, steps = _predict_judged(cases)
    cells, scores = choose_plans(cases, steps), score_ways(cases, steps)
    methods = [method for method in (OURS, TREES, RULE, CONSTANT) if method in cells]
    mean = ", ".join(f"{method} {write_percent(cells[method].mean())}" for method in methods)
    text = (
        f"Throughput lost beside the best measured run by taking the plan that is predicted to be fastest, in the mean over {len(cells)} cells: "
        f"{mean} (aim {write_percent(_LOSS_AIM, 0)}). The rule takes the smallest tensor, then pipeline degree; a constant MFU any plan. The trees "
        "are fitted on nine tenths of these very runs, the constant MFU on the runs that may be fitted on."
    )
    shown = ("median_error", "fast_error", "mean_error", "within_20", "in_order")
    return (
        render_paragraph(text)
        + render_scores(scores, "Methods to predict a step", shown, "way")
        + _render_cells(cells, methods)
    )


def _render_cells(cells: pd.DataFrame, methods: list[str]) -> str:
    """Return the choice of each model and number of nodes."""
    fields = [
        numbers("parameters", "1e9", "model", "plain", "parameters"),
        numbers("nodes", "", "of 8 GPUs", "count", "nodes"),
        words("network", "", "that the jobs had", "network"),
        numbers("runs", "", "measured plans", "count", "runs"),
        words("best", "t x p x d", "fastest measured plan: tensor, pipeline, data", "best"),
        numbers("best", "tokens/s", "its throughput, measured", "count", lambda row: round(row["best_tokens_per_s"])),
        words("chosen", "t x p x d", "plan that is predicted to be fastest", "chosen"),
        numbers(
            "chosen", "tokens/s", "its throughput, measured", "count", lambda row: round(row["chosen_tokens_per_s"])
        ),
        *(
            numbers("loss", method, "of throughput beside the best measured run", "percent", method)
            for method in methods
        ),
    ]
    title = "The choice for each model and number of nodes"
    return render_details(title, render_records(cells, fields, title))


def _render_crowded(cases: pd.DataFrame) -> str:
    """Return what runs took that were not likely to fit."""
    rows = cases[cases["crowded"]].dropna(subset="predicted_s")
    if rows.empty:
        return ""
    factor = (rows["measured_s"] / rows["predicted_s"]).quantile([0.1, 0.5, 0.9])
    return render_paragraph(
        f"{len(rows)} runs ran although they were less likely to fit than {write_percent(DOUBTED, 0)}. They took {factor[0.5]:.1f} times the "
        f"predicted step (median; {factor[0.1]:.1f} to {factor[0.9]:.1f} in eight of ten). search puts such plans behind the others."
    )


def _render_survival(cases: pd.DataFrame) -> str:
    """Return how well the odds foretell how runs ended."""
    judged = judge_survival(choose_cases(cases))
    scores = [
        words("model", "", "which runs: all, a model's, those fitted on, pipelines before their fix", "group"),
        numbers("succeeded", "", "runs that came to their end", "count", "survived"),
        numbers("ran out", "", "runs labelled out of memory", "count", "failed"),
        numbers("odds right", "", "share on the right side of a half", "percent", "accuracy"),
        numbers("Brier score", "", "mean squared miss of the odds", "plain", lambda row: round(row["brier"], 3)),
        numbers("sizes", "", "runs whose sizes are judged", "count", "sized"),
        numbers("reserved", "", "median error of what the allocator holds", "percent", "reserved"),
        numbers("90th percentile", "", "of that error", "percent", "reserved_90"),
        numbers("update", "", "median error of the update's allocated peak", "percent", "update"),
    ]
    bins = [
        numbers("runs", "", "how many", "count", "runs"),
        numbers("odds", "", "their mean odds", "percent", "odds"),
        numbers("survived", "", "share that came to their end", "percent", "survived"),
    ]
    return render_records(score_survival(judged), scores, "Odds of survival") + render_records(
        tabulate_reliability(judged), bins, "What odds come to"
    )


BRIDGE_TITLE = "trioflow: Megatron-Bridge's rates on H100"
_BRIDGE_LEAD = (
    "Tokens a second of language models on 8 to 1,024 H100, as Megatron-Bridge's own pages report them, beside what "
    "trioflow predicts for each row from its recipe."
)
_RATE_SCORES = ("median_error", "most", "bias", "covered", "in_order")
_RATE_AIM = 0.15
"""Median error that was aimed at."""
_ASKED = (
    "training",
    "model",
    "gpus",
    "batch",
    "micro_batch",
    "sequence",
    "fsdp",
    "tensor",
    "pipeline",
    "context",
    "stages_per_rank",
    "expert",
)
"""What rows of several releases share where they ask for the same."""


def score_rates(cases: pd.DataFrame) -> pd.DataFrame:
    """Return how far the predicted rates (``CLUSTER_RATES``) are off, of all and by model; missing where none is predicted.

    ``in_order`` counts pairs of one model's rows that ask for different things, their medians over
    releases.
    """
    groups = [("all", cases), *cases.groupby(cases["model"].map(plain_model), sort=True)]
    known = [(str(name), rows[rows["refused"] == ""]) for name, rows in groups]
    return evaluate(known, quantity="{}_tokens_per_s").assign(
        cases=[len(rows) for _, rows in groups], in_order=[_share_in_order(rows) for _, rows in known]
    )


def _share_in_order(rows: pd.DataFrame) -> float:
    """Return the share of a model's pairs of rows that are predicted in the measured order."""
    rates = {"measured_tokens_per_s": "measured_s", "predicted_tokens_per_s": "predicted_s"}
    medians = rows.rename(columns=rates).groupby(list(_ASKED))[list(rates.values())].median()
    return share_in_order(medians.reset_index().assign(of=lambda frame: frame["model"].map(plain_model)), ["of"])


def build_bridge_page(rates: str | Path, page: str | Path) -> None:
    """Write the page; ``rates``: Parquet file of ``trioflow_evaluation.tables.CLUSTER_RATES``."""
    cases = tables.read_table(rates, "cluster_rates", CLUSTER_RATES)
    content = [
        Section(
            "scores",
            "How far off",
            [render_scores(score_rates(cases), "Errors of the rates", ("cases", "predicted", *_RATE_SCORES), "model")],
        ),
        Section("rows", "Every row", [_render_rates(cases)]),
        Section("refused", "Rows that are not predicted", [_render_refused_rates(cases)]),
    ]
    made = Page(
        BRIDGE_TITLE,
        content,
        _BRIDGE_LEAD,
        made_from=" from Megatron-Bridge's own performance pages",
        verdict=summarize_rates(cases),
        schemas={"cluster_rates": CLUSTER_RATES},
        files=[rates],
    )
    write_page(page, made)


def summarize_rates(cases: pd.DataFrame) -> str:
    """Return a sentence on what was judged and reached."""
    score = score_rates(cases).iloc[0]
    return (
        f"Megatron-Bridge's {len(cases)} rows of H100, {score['predicted']} of them predicted on dgx-h100, with nothing fitted: median error "
        f"{write_percent(score['median_error'])} (aim {write_percent(_RATE_AIM, 0)}), at most {write_percent(score['most'])}, median "
        f"signed error {write_percent(score['bias'])}; {write_percent(score['covered'])} of the measured rates lie inside the "
        f"80 % interval, {write_percent(score['in_order'])} of a model's pairs are in the measured order."
    )


def _render_rates(cases: pd.DataFrame) -> str:
    fields = [
        words("model", "", "as the page calls it", "model"),
        words("release", "", "NeMo container", "release"),
        words("training", "", "its kind", "training"),
        numbers("GPUs", "", "H100", "count", "gpus"),
        numbers("batch", "samples", "of a step", "count", "batch"),
        words("degrees", "", "as the row says", write_degrees),
        numbers("measured", "tokens/s", "per GPU", _rate_cell, "measured_tokens_per_s"),
        numbers("predicted", "tokens/s", "per GPU", _rate_cell, "predicted_tokens_per_s"),
        numbers("low", "tokens/s", "80 % interval", _rate_cell, "low_tokens_per_s"),
        numbers("high", "tokens/s", "80 % interval", _rate_cell, "high_tokens_per_s"),
        numbers("error", "", "signed", "signed", "error"),
    ]
    known = cases[cases["refused"] == ""]
    rows = known.assign(error=known["predicted_tokens_per_s"] / known["measured_tokens_per_s"] - 1)
    return render_records(rows.sort_values(["model", "release"]), fields, "Every prediction")


def _rate_cell(value: float) -> Cell:
    return Cell(f"{value:,.0f}", value)


def _render_refused_rates(cases: pd.DataFrame) -> str:
    fields = [
        words("model", "", "as the page calls it", "model"),
        words("release", "", "NeMo container", "release"),
        words("degrees", "", "as the row says", write_degrees),
        numbers("measured", "tokens/s", "per GPU", _rate_cell, "measured_tokens_per_s"),
        words("why", "", "it is not predicted", "refused"),
    ]
    rows = cases[cases["refused"] != ""].sort_values(["model", "release"])
    return render_records(rows, fields, "Rows that are not predicted")


def write_degrees(row: dict[str, Any]) -> str:
    """Return a row's degrees in words."""
    names = {
        "tensor": "tensor",
        "pipeline": "pipeline",
        "stages_per_rank": "stages a rank",
        "context": "context",
        "expert": "expert",
        "fsdp": "FSDP",
    }
    return ", ".join(f"{text} {row[name]}" for name, text in names.items() if row[name] > 1) or NOTHING


def write_rates_table(cases: pd.DataFrame) -> str:
    """Return the Markdown tables of docs: what was judged, by model, and why other rows were not."""
    scores = [
        (row["group"], row["cases"], row["predicted"], *(write_percent(row[name]) for name in _RATE_SCORES))
        for row in score_rates(cases).to_dict("records")
    ]
    refused = [
        (", ".join(sorted(set(rows["model"]))), len(rows), why)
        for why, rows in cases[cases["refused"] != ""].groupby("refused")
    ]
    heads = ("model", "rows", "predicted", "median error", "most", "bias", "covered", "in order")
    return "\n\n".join(
        [
            summarize_rates(cases),
            write_markdown(heads, scores),
            write_markdown(("not predicted", "rows", "why"), refused, left=(0, 2)),
        ]
    )
