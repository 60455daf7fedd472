"""Rows of the figures (runs of this machine, public cases, predictions that nobody measured), and their panels.

Panels have lines and dots at the width of a paper's column: small, but with no text under seven points.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.experiments import Plan
from trioflow.base.provenance import atomic_path
from trioflow.report import style
from trioflow.report.figures import busy_time
from trioflow.sweeps.description import PLAN_COLUMNS
from trioflow.sweeps.scenarios import OK
from trioflow.tables import records

from trioflow_evaluation.figures.catalogue import PAPER, PIPELINE, SINGLE, find_family, name_plan, read_short_plan
from trioflow_evaluation.tables import MEASURED_HERE, MEASURED_PUBLIC, ONLY_SIMULATED
from trioflow_evaluation.validation.page import SETS

HOST = "host"
"""Kind of the tasks that keep no device busy."""


def read_live_errors(file: str | Path, plans: Sequence[Mapping[str, Any]], families: Sequence[str]) -> pd.DataFrame:
    """Return ``tables.ERRORS`` of some kinds of plans, with ``family`` and ``kind``; InputError where there are none."""
    known = {str(row["plan"]): Plan(**row) for row in plans}
    errors = tables.read_table(file, "errors")
    missing = sorted(set(errors["plan"]) - set(known))
    if missing:
        raise InputError(
            f"plans {', '.join(missing)} are not in the table of plans", file=file, fix="make the report again"
        )
    errors = errors.assign(
        family=[find_family(known[name]) for name in errors["plan"]],
        kind=[name_plan(known[name]) for name in errors["plan"]],
        micro_batches=[known[n].micro_batches if known[n].pipeline > 1 else 0 for n in errors["plan"]],
    )
    chosen = errors[errors["family"].isin(families)].reset_index(drop=True)
    if chosen.empty:
        raise InputError(
            f"no measured experiment with a plan of the kind {' or '.join(families)}",
            file=file,
            fix="add one to the table of experiments",
        )
    return chosen


def list_live_rows(
    errors: pd.DataFrame, panel: str, label: str = "{workload}, {kind}, {batch}"
) -> list[dict[str, Any]]:
    """Return ``EVIDENCE`` rows without the figure's name and the paper's averages; ``label`` has columns in braces."""
    several = errors["kind"].nunique() > 1
    return [
        {
            "evidence": MEASURED_HERE,
            "panel": panel,
            "label": label.format(**row),
            "series": row["kind"] if several else "",
            "case": row["experiment"],
            "workload": row["workload"],
            "source_gpu": "",
            "device": "",
            "family": row["family"],
            "plan": row["plan"],
            "ranks": row["ranks"],
            "micro_batches": row["micro_batches"],
            "batch": row["batch"],
            "quantity": "step time",
            "measured_s": row["measured_s"],
            "predicted_s": row["simulated_s"],
            "low_s": row["low_s"],
            "high_s": row["high_s"],
            "status": "ok",
            "reason": "",
            "confidence": row["confidence"],
            "source": row["source"],
        }
        for row in records(errors)
    ]


def count_busy_s(tasks: pd.DataFrame) -> float:
    """Return the time in which any rank of a step computes or moves data [s]."""
    return busy_time(tasks[tasks["kind"] != HOST])


def use_busy_time(
    rows: Sequence[dict[str, Any]], measured: pd.DataFrame, predicted: Mapping[str, pd.DataFrame]
) -> list[dict[str, Any]]:
    """Return rows with busy times in place of step times, as the paper measures tensor parallelism.

    A profile slows a step, so its busy share is taken, times the measured median; the interval
    keeps its ratio. Raises InputError when a profile or a timeline is missing.
    """
    busy = []
    for row in rows:
        profile = measured[measured["experiment"] == row["case"]]
        if profile.empty or row["case"] not in predicted:
            what = "profile of a real step" if profile.empty else "predicted timeline"
            raise InputError(f"no {what} of {row['case']}", fix="measure and simulate it again")
        timeline = predicted[row["case"]]
        share = count_busy_s(profile) / float(profile["end_s"].max())
        ratio = count_busy_s(timeline) / float(timeline["end_s"].max())
        busy.append(
            row
            | {
                "quantity": "busy time",
                "measured_s": row["measured_s"] * share,
                **{name: row[name] * ratio for name in ("predicted_s", "low_s", "high_s")},
            }
        )
    return busy


_TRAINING = "train"
"""Group of whole training steps in ``tables.VALIDATION``."""
THROUGHPUT = "resnet50 throughput"
"""First words of the group of measured throughputs there."""


def shorten_device(name: str) -> str:
    """Return the name of a GPU without what every line would repeat."""
    words = name.replace("-", " ").split()
    skipped = {"NVIDIA", "Tesla", "HBM3", "SXM4", "80GB"}
    return " ".join(word for word in words if word not in skipped)


def list_validation_rows(file: str | Path, set_name: str) -> list[dict[str, Any]]:
    """Return whole training steps of one GPU of a validation set as ``EVIDENCE``; InputError where our model has none."""
    cases = tables.read_table(file, "validation")
    ours = cases[(cases["set"] == set_name) & (cases["model"] == SETS[set_name].ours)]
    group = ours["group"]
    ours = ours[(group == _TRAINING) | group.str.startswith(THROUGHPUT)]
    if ours.empty:
        raise InputError(f"no whole training step in the set {set_name}", file=file, fix="run `snakemake validation`")
    return [_describe_validation(row) for row in records(ours)]


def _describe_validation(row: dict[str, Any]) -> dict[str, Any]:
    same = row["set"] == "batch-change"
    source_gpu = row["device"] if same else row["source"]
    quantity = {"end_to_end": "whole step", "operator_sum": "operator sum"}[row["quantity"]]
    target = shorten_device(row["device"])
    name = target if same else f"{shorten_device(source_gpu)} to {target}"
    return {
        "evidence": MEASURED_PUBLIC,
        "panel": "one GPU",
        "label": name,
        "series": quantity,
        "case": row["case"],
        "workload": row["case"].split()[0].split("-")[0].rstrip(","),
        "source_gpu": source_gpu,
        "device": row["device"],
        "family": SINGLE,
        "plan": "single",
        "ranks": 1,
        "micro_batches": 0,
        "batch": 0,
        "quantity": quantity,
        **{key: row[key] for key in ("measured_s", "predicted_s", "low_s", "high_s")},
        "status": "ok",
        "reason": "",
        "confidence": "",
        "source": f"public tables of the set {row['set']} ({row['source']})",
    }


def list_published_rows(files: Sequence[str | Path], families: Sequence[str]) -> list[dict[str, Any]]:
    """Return public multi-GPU cases of some kinds of plans as ``EVIDENCE``; InputError where there are none."""
    frames = [tables.read_table(file, "published_cases") for file in files]
    rows = []
    for row in records(pd.concat(frames, ignore_index=True)) if frames else []:
        family, chunks = read_short_plan(row["plan"])
        if family not in families:
            continue
        device = row["platform"].rpartition(", ")[2]
        rows.append(
            {
                "evidence": MEASURED_PUBLIC,
                "panel": f"traced on {'the same GPU' if row['source_gpu'] == device else 'another GPU'}",
                "label": row["case"],
                "series": "",
                "case": row["case"],
                "workload": row["workload"],
                "source_gpu": row["source_gpu"],
                "device": device,
                "family": family,
                "plan": row["plan"],
                "ranks": row["ranks"],
                "micro_batches": chunks,
                "batch": row["batch"],
                "quantity": f"step time, {row['mode']}",
                **{key: row[key] for key in ("measured_s", "predicted_s", "low_s", "high_s")},
                "status": "ok",
                "reason": "",
                "confidence": row["confidence"],
                "source": row["source"],
            }
        )
    if not rows:
        raise InputError(
            f"no public case with a plan of the kind {' or '.join(families)} in"
            f" {', '.join(str(file) for file in files) or 'no file at all'}",
            fix="run `snakemake published`",
        )
    return rows


STEP, BUSY = "step time", "busy time"


def read_plan(row: dict[str, Any]) -> Plan:
    """Return the plan of a row of ``tables.SWEEP_RESULTS``; degrees below one count as one."""
    given = {name: row[name] for name in PLAN_COLUMNS}
    least = {name: max(1, given[name]) for name in ("data", "tensor", "pipeline", "micro_batches")}
    least["data"] = max(least["data"], row["ranks"] // (least["tensor"] * least["pipeline"]))
    return Plan(plan=row["plan_text"] or "", **{**given, **least})


def list_predicted_rows(
    files: Sequence[str | Path], *, quantity: str = STEP, label: str = "{trace}", series: str = "{kind}"
) -> list[dict[str, Any]]:
    """Return predictions (``tables.SWEEP_RESULTS``) without any measurement as ``EVIDENCE``; InputError where there are none.

    Busy times have the step's interval in proportion; ``label`` and ``series`` have columns, kind,
    gpu and gpus in braces.
    """
    frames = [tables.read_table(file, "sweep_results") for file in files]
    listed = [row for frame in frames for row in records(frame)]
    if not listed:
        names = ", ".join(str(file) for file in files) or "no file at all"
        raise InputError(f"no predicted scenario in {names}", fix="mend config/figures")
    return [_describe_prediction(row, quantity, label, series) for row in listed]


def _describe_prediction(row: dict[str, Any], quantity: str, label: str, series: str) -> dict[str, Any]:
    plan = read_plan(row)
    device = row["device_name"] or row["platform"]
    gpu = shorten_device(device)
    words = {**row, "kind": name_plan(plan), "gpu": gpu, "gpus": f"{plan.ranks} {gpu}"}
    ratio = row["busy_s"] / row["step_time_s"] if quantity == BUSY and row["step_time_s"] else 1.0
    times = {"predicted_s": row["step_time_s"], "low_s": row["low_s"], "high_s": row["high_s"]}
    family = find_family(plan)
    return {
        "evidence": ONLY_SIMULATED,
        "panel": "no public measurement",
        "label": label.format(**words),
        "series": series.format(**words),
        "case": row["trace"],
        "workload": row["workload"],
        "source_gpu": "",
        "device": device,
        "family": family,
        "plan": words["kind"],
        "ranks": plan.ranks,
        "micro_batches": plan.micro_batches if family == PIPELINE else 0,
        "batch": row["batch"],
        "quantity": quantity,
        "measured_s": None,
        **{name: None if value is None else value * ratio for name, value in times.items()},
        "status": row["status"],
        "reason": row["reason"],
        "confidence": row["confidence"] or "",
        "source": f"trace {row['trace']}, platform {row['platform']}",
    }


MEASURED, PREDICTED = "measured", "predicted"


COMPUTE = "compute"
"""Kind of the tasks that compute."""


def list_live_shares(errors: pd.DataFrame, profiles: pd.DataFrame) -> list[dict[str, Any]]:
    """Return ``SHARES`` of measured experiments, profile and prediction of each; InputError where a profile is missing."""
    rows = []
    for row in records(errors):
        profile = profiles[profiles["experiment"] == row["experiment"]]
        if profile.empty:
            raise InputError(f"no profile of a real step of {row['experiment']}", fix="measure it again")
        shared = {
            "evidence": MEASURED_HERE,
            "panel": "2 ranks and more",
            "label": f"{row['workload']}, {row['kind']}",
            "case": row["experiment"],
            "plan": row["plan"],
        }
        predicted = _divide(row["compute_s"], row["exposed_communication_s"], row["simulated_s"])
        measured = measure_rank_shares(profile)
        rows += [
            {**shared, "origin": MEASURED, **measured, "source": "profile of a real step"},
            {**shared, "origin": PREDICTED, **predicted, "source": "error.parquet"},
        ]
    return rows


def measure_rank_shares(profile: pd.DataFrame) -> dict[str, float]:
    """Return how the rank that computes most spends a profiled step."""
    end_s = float(profile["end_s"].max())
    shares = []
    for _, tasks in profile.groupby("rank"):
        compute_s = count_busy_s(tasks[tasks["kind"] == COMPUTE])
        shares.append((compute_s, count_busy_s(tasks) - compute_s))
    compute_s, exposed_s = max(shares)
    return _divide(compute_s, exposed_s, end_s)


def list_predicted_shares(files: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Return ``SHARES`` of scenarios that have a step; InputError where there is none."""
    rows = []
    for file in files:
        for row in records(tables.read_table(file, "sweep_results")):
            if row["status"] != OK:
                continue
            plan = name_plan(read_plan(row))
            shares = _divide(row["compute_s"], row["exposed_communication_s"], row["step_time_s"])
            rows.append(
                {
                    "evidence": ONLY_SIMULATED,
                    "panel": "no public measurement",
                    "label": f"{row['trace']}, {plan}",
                    "case": row["trace"],
                    "plan": plan,
                    "origin": PREDICTED,
                    **shares,
                    "source": f"trace {row['trace']}, platform {row['platform']}",
                }
            )
    if not rows:
        names = ", ".join(str(file) for file in files) or "no file at all"
        raise InputError(f"no predicted step in {names}", fix="mend config/figures")
    return rows


def _divide(compute_s: float, exposed_s: float, step_s: float) -> dict[str, float]:
    """Return three shares that add up to one."""
    compute, communication = compute_s / step_s, exposed_s / step_s
    idle = max(0.0, 1.0 - compute - communication)
    return {"compute_share": compute, "communication_share": communication, "idle_share": idle}


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
        axes.set_title(axes.get_title(loc="left"), loc="left", x=(_MARGIN - box.x0) / box.width, ha="left")


def save_column_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure, made inside ``column_style``, as SVG, PNG and PDF, atomically and without dates."""
    written = style.save_figure(figure, path)
    target = Path(f"{path}.pdf")
    # Type 42 fonts stay text that can be searched; many publishers refuse type 3.
    with matplotlib.rc_context({"pdf.fonttype": 42}), atomic_path(target) as temporary:
        figure.savefig(temporary, format="pdf", metadata={"CreationDate": None, "Creator": None})
    return [*written, target]


LINE_IN = 0.132
"""Height of a line of text [inch]."""
DASHES = (0, (3, 1.5))
_COLOURS = (*style.SERIES_COLOURS, style.INK, style.GREY)


def make_points(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return the dots of a panel: ``label`` (its line), ``series`` (its colour), ``x``, a bar's ends ``low`` and ``high``.

    ``measured``: place of an empty diamond; ``papers``: pairs of places of dashed strokes. Places may be missing.
    """
    places = ["x", "low", "high", "measured"]
    points = pd.DataFrame(list(rows), columns=["label", "series", *places, "papers"])
    return points.astype(dict.fromkeys(places, "float64"))


def measure_height(points: pd.DataFrame) -> float:
    """Return the height of a panel's contents in lines of text: more for many series."""
    series = points.groupby("label")["series"].nunique()
    return float(len(series) * max(1.0, 0.6 * series.max() + 0.1))


def draw_points(axes: Any, points: pd.DataFrame, series: Sequence[str]) -> None:
    """Draw :func:`make_points`: lines from the top as their labels first appear, colours by the places in ``series``."""
    labels = points.groupby("label", sort=False)["series"]
    order = labels.transform(lambda names: pd.factorize(names)[0])
    lines = list(dict.fromkeys(points["label"]))
    place = points["label"].map(lines.index) + (order + 0.5) / labels.transform("nunique") - 0.5
    for name, part in points.assign(place=place).groupby("series", sort=False):
        at = series.index(str(name))
        colour, marker = _COLOURS[at % len(_COLOURS)], style.MARKERS[at % len(style.MARKERS)]
        look: dict[str, Any] = {"color": colour, "linestyle": "none", "markersize": 3.6}
        bars, gone = part.dropna(subset=["low", "high"]), part[part["x"].isna()]
        axes.hlines(
            bars["place"],
            bars["low"],
            bars["high"],
            color=colour,
            alpha=0.35,
            linewidth=3.0,
            label="80 % interval" * bool(len(bars)),
        )
        axes.plot(part["x"], part["place"], marker=marker, label=name, **look)
        if len(gone):  # an empty line that is not clipped would take room
            axes.plot(
                [0.02] * len(gone),
                gone["place"],
                marker="x",
                clip_on=False,
                transform=axes.get_yaxis_transform(),
                label="does not fit, or cannot be done",
                **look,
            )
    axes.plot(
        points["measured"],
        place,
        "d",
        markersize=4.2,
        markerfacecolor="white",
        markeredgecolor=style.INK,
        label="measured" * bool(points["measured"].notna().any()),
    )
    strokes = [(at, pair) for at, pairs in zip(place, points["papers"], strict=True) for pair in pairs]
    for at, pair in strokes:
        axes.vlines(pair, at - 0.4, at + 0.4, color=style.INK, linestyle=DASHES, linewidth=0.9, label=PAPER)
    axes.set(yticks=range(len(lines)), yticklabels=lines, ylim=(len(lines) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def spread_places(axes: Any, points: pd.DataFrame, *, errors: bool) -> None:
    """Give every mark room: equally far to both sides of zero where the axis holds ``errors``, else on a logarithmic one."""
    ends = [place for pairs in points["papers"] for pair in pairs for place in pair]
    if errors:
        reach = 1.12 * max([1e-9, *points["x"].abs().dropna(), *map(abs, ends)])
        axes.set_xlim(-reach, reach)
        axes.axvline(0.0, color=style.INK, linewidth=0.8, zorder=1)
        return
    values = points[["x", "low", "high", "measured"]].to_numpy(np.float64).ravel()
    values = values[values > 0]
    if not len(values):
        return
    margin = max(1.06, (values.max() / values.min()) ** 0.04)
    low, high = float(values.min() / margin), float(values.max() * margin)
    axes.set(xscale="log", xlim=(low, high))
    style.spread_ticks(axes.xaxis, low, high, most=4)
    style.show_seconds(axes.xaxis)
