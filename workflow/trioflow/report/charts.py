"""Pictures of an answer, and the page that shows them: one file that needs no network, or a notebook's cell.

``Chart.numbers`` holds what a figure draws in base units; axes are in milliseconds or seconds, and in GB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow import __version__
from trioflow.base.errors import InputError, group_warnings, how_to_install
from trioflow.base.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SERIES_COLOURS, SKY, VERMILLION
from trioflow.base.provenance import PACKAGE, atomic_path
from trioflow.base.units import format_bytes, ns_to_s
from trioflow.costmodel.features import classify
from trioflow.export.step_files import count_memory
from trioflow.parallel.memory.peak import LIKELY, describe_probability, find_fullest
from trioflow.prediction.assembly import Prediction
from trioflow.prediction.breakdown import HOUR_S, PARTS
from trioflow.prediction.fitting import split_memory
from trioflow.report.pages import join_words, read_look, write_range, write_time

try:
    from bokeh.embed import json_item
    from bokeh.layouts import column
    from bokeh.models import BoxZoomTool, ColumnDataSource, FixedTicker, HoverTool, Span, WheelZoomTool
    from bokeh.plotting import figure
    from bokeh.resources import Resources
    from jinja2 import Environment, FileSystemLoader
except ImportError:
    raise InputError("pictures need bokeh", fix=how_to_install("ui")) from None

_ROWS, _MOST_BARS, _MOST_CURVES, _NAMED_PLANS = 32, 12_000, 6, 5
"""Rows of a timeline, its bars, ranks whose memory is drawn, and plans of a search that are named, at most."""
_LOOKS = {
    "forward": BLUE,
    "backward": SKY,
    "optimizer": PURPLE,
    "communication": ORANGE,
    "copy": GREEN,
    "host": GREY,
    "other": VERMILLION,
}
"""Colours of a timeline's tasks."""
_LOOK_OF_KIND = {**dict.fromkeys(("collective", "send", "recv"), "communication"), "memcpy": "copy", "host": "host"}
_PART_COLOURS = dict(
    zip(
        PARTS,
        (BLUE, SKY, PURPLE, VERMILLION, GREEN, "#A6761D", ORANGE, "#D6C700", "#B05080", GREY, "#6B6B3A", "#B8B8B8"),
        strict=True,
    )
)
_TEMPLATES = PACKAGE / "data" / "report" / "charts"
_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True)
class Chart:
    """A figure with its title, its caption, what its colours mean, and the numbers that it draws."""

    title: str
    caption: str
    figure: Any
    legend: Mapping[str, str] = field(default_factory=dict)
    numbers: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(frozen=True)
class ChartPage:
    """An answer with its pictures.

    ``verdict``: the answer in a sentence. ``facts``: all of it by name, in words. ``command``: the command that repeats
    it; empty where there is none.
    """

    title: str
    verdict: str
    facts: Sequence[tuple[str, str]]
    charts: Sequence[Chart]
    warnings: Sequence[str] = ()
    command: str = ""

    @property
    def layout(self) -> Any:
        """The figures below one another, for a document of your own."""
        return column([chart.figure for chart in self.charts], sizing_mode="stretch_width")

    def list_items(self) -> list[Any]:
        """Return the figures as JSON that a page's script draws, each into the element ``chart-1`` and so on."""
        return [json_item(chart.figure, f"chart-{place}") for place, chart in enumerate(self.charts, 1)]

    def render(self, template: str = "answer.html") -> str:
        """Return the page as HTML that fetches nothing, or by another template."""
        # Nothing in the data may end the script that it stands in.
        items = json.dumps(self.list_items()).replace("<", "\\u003c") if template == "answer.html" else ""
        return render(template, page=self, warnings=group_warnings(self.warnings), items=items)

    def save(self, path: str | Path) -> None:
        """Write the page into one file, below 3 MB."""
        with atomic_path(Path(path)) as temporary:
            temporary.write_text(self.render(), encoding="utf-8")

    def _repr_html_(self) -> str:
        height = 500 + sum(chart.figure.height + 170 for chart in self.charts)
        return f'<iframe srcdoc="{escape(self.render())}" width="100%" height="{height}" style="border:0"></iframe>'


@cache
def _read_parts() -> dict[str, str]:
    """Return what every page holds: Bokeh's library, styles and scripts."""
    library = "\n".join(Resources(mode="inline", components=["bokeh"], minified=True).js_raw)
    files = {"css": "charts.css", "js": "charts.js", "ui": "ui.js"}
    own = {name: (_TEMPLATES / file).read_text(encoding="utf-8") for name, file in files.items()}
    return {"library": library, "look": read_look("css"), "version": __version__, **own}


def render(template: str, **values: Any) -> str:
    """Return a page by its template; values are escaped."""
    known = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text: str = known.get_template(template).render(**_read_parts(), **values)
    return text


def plot(*predictions: Prediction, command: str = "", run: Mapping[str, Any] | None = None) -> ChartPage:
    """Return the page of a prediction, or of two plans side by side with why the first beats the second.

    ``run``: what a run of many tokens takes, of ``breakdown.describe_run``.
    """
    if not 1 <= len(predictions) <= 2:
        raise InputError(f"{len(predictions)} predictions in one page", fix="give one, or two to compare")
    first, *others = predictions
    memory_bytes = first.step.platform.device.memory_bytes
    charts = [draw_parts(dict(zip("AB", predictions, strict=False)) if others else {"": first})]
    if others:
        charts.append(draw_gap(first, others[0]))
    charts.append(draw_timeline(first))
    if first.task_graph.metadata.memory_curves:
        fullest = find_fullest(first.memory)
        charts += [
            draw_memory(first),
            draw_filling({fullest["ranks"][0]: fullest}, first.step.outside_bytes, memory_bytes),
        ]
    if first.step.platform.device.memory_bandwidth_bytes_per_s:
        charts.append(draw_roofline(first))
    facts = [*_list_rates(first, run or {}), *((name, text) for name, text in first.list_facts() if name != "warning")]
    plans = [("plan A", first.title), ("plan B", others[0].title)] if others else []
    verdict = explain_gap(first, others[0])[0] if others else _judge(first)
    return ChartPage(first.title, verdict, [*plans, *facts], charts, first.warnings, command)


def plot_search(answer: Mapping[str, Any], *predictions: Prediction, command: str = "") -> ChartPage:
    """Return the page of a search: its plans by time, memory and cost; the best two side by side by their predictions."""
    rows = pd.DataFrame(answer["ranking"])
    title = f"Plans for {answer['workload']} on {join_words(map(str, answer['ranks']))} ranks of {answer['platform']}"
    if rows.empty:
        return ChartPage(title, "No plan fits.", [], [], answer["warnings"], command)
    best = rows.iloc[0]
    interval = write_range(best["low_s"], best["high_s"])
    verdict = f"The best of {answer['plans']} plans is {best['plan_text']}: a step takes {write_time(best['step_time_s'])} (80 % interval {interval})."
    facts = [(f"plan {place}", _describe_row(row)) for place, row in enumerate(answer["ranking"][:_NAMED_PLANS], 1)]
    rows["gpu_s"] = rows["ranks"] * rows["expected_s"]
    columns = [("cost_per_step", "cost per step", 1.0), ("peak_memory_bytes", "memory per GPU [GB]", _GIGA)]
    if rows["ranks"].nunique() > 1:
        columns.insert(0, ("gpu_s", "GPU-seconds per step", 1.0))
    charts = [draw_front(rows, *one) for one in columns if one[0] in rows and rows[one[0]].notna().all()]
    if len(predictions) > 1:
        charts += plot(*predictions).charts
    return ChartPage(title, verdict, facts, charts, answer["warnings"], command)


def _describe_row(row: Mapping[str, Any]) -> str:
    text = f"{row['plan_text']}: {write_time(row['step_time_s'])} ({write_range(row['low_s'], row['high_s'])})"
    text += f", {row['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU" if "tokens_per_s_per_gpu" in row else ""
    if run := row.get("run"):
        text += f", {run['time_s'] / HOUR_S / 24:,.1f} days" + (f" for {run['cost']:,.0f}" if "cost" in run else "")
    return text + (f", {row['fit_probability']:.0%} likely to fit" if row["fit_probability"] is not None else "")


def plot_scaling(answer: Mapping[str, Any], command: str = "") -> ChartPage:
    """Return the page of ``trioflow scaling``: throughput and MFU against GPUs."""
    rows = pd.DataFrame(answer["rows"])
    first, last = rows.iloc[0], rows.iloc[-1]
    verdict = f"The scaling efficiency from {first['ranks']} to {last['ranks']} GPUs is {last['efficiency']:.0%}."
    column, label = ("mfu", "MFU") if rows["mfu"].notna().all() else ("efficiency", "throughput per GPU")
    charts = [draw_scaling(rows, "rate", f"{answer['unit']}/s", linear=True), draw_scaling(rows, column, label)]
    facts = [("plan", f"{first['plan_text']} to {last['plan_text']}"), ("confidence", str(last["confidence"]))]
    return ChartPage(
        f"{answer['workload']} on {answer['platform']}", verdict, facts, charts, answer["warnings"], command
    )


def plot_memory(answer: Mapping[str, Any], command: str = "") -> ChartPage:
    """Return the page of ``prediction.fitting.answer_memory``."""
    facts, charts = [("plan", answer["plan_text"])], []
    verdict = "The memory is not estimated: the trace does not record operator outputs."
    if answer["fit_probability"] is not None:
        size = format_bytes(answer["wanted_bytes"] + answer["outside_bytes"])
        room = format_bytes(answer["memory_bytes"])
        verdict = f"The fullest rank uses {size} of {room}: {describe_probability(answer['fit_probability'])}."
        facts.append(("peak", answer["fullest_rank"]["when"]))
        facts += [(describe_probability(row["fit_probability"]), f"with {row['flags']}") for row in answer["changes"]]
        entries = {entry["ranks"][0]: entry for entry in (answer["fullest_rank"], answer["last_rank"])}
        charts.append(draw_filling(entries, answer["outside_bytes"], answer["memory_bytes"]))
    title = f"Memory of {answer['workload']} on {answer['platform']}"
    return ChartPage(title, verdict, facts, charts, answer["warnings"], command)


def _judge(prediction: Prediction) -> str:
    """Return the answer in a sentence or two."""
    interval = write_range(prediction.low_s, prediction.high_s)
    time = write_time(prediction.step_time_s)
    text = f"A step takes {time} (80 % interval {interval}, {prediction.confidence})."
    if prediction.fit_probability is None:
        return text
    return f"{text} It {'fits' if prediction.fit_probability >= LIKELY else 'does not fit'} the memory."


def _list_rates(prediction: Prediction, run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what follows from the step's time, each with its 80 % interval."""
    rates, step_s = prediction.describe_language(), prediction.step_time_s
    ends = [step_s / end for end in (prediction.high_s, prediction.low_s) if end]

    def spread(value: float, form: str, *, slower: bool = False) -> str:
        low, high = sorted(value / end if slower else value * end for end in ends)
        return f"{value:{form}} (80 % interval {low:{form}} to {high:{form}}; {prediction.confidence})"

    known = [
        ("tokens_per_s", "tokens/s", ",.0f"),
        ("tokens_per_s_per_gpu", "tokens/s per GPU", ",.0f"),
        ("mfu", "MFU", ".1%"),
    ]
    facts = [(label, spread(rates[name], form)) for name, label, form in known if name in rates]
    if "budget" in run:
        return [*facts, ("tokens", spread(run["tokens"], ",.3g")), ("cost", f"{run['cost']:,.0f}")]
    if run:
        facts.append(("days", spread(run["time_s"] / HOUR_S / 24, ",.1f", slower=True)))
    return facts + ([("cost", spread(run["cost"], ",.0f", slower=True))] if "cost" in run else [])


def explain_gap(one: Prediction, other: Prediction) -> tuple[str, dict[str, float]]:
    """Return why the faster of two plans is faster, in a sentence, and the second's parts less the first's [s]."""
    names = [name for name in PARTS if name in one.parts_s or name in other.parts_s]
    gaps = {name: other.parts_s.get(name, 0.0) - one.parts_s.get(name, 0.0) for name in names}
    gap_s = other.step_time_s - one.step_time_s
    fast, slow, sign = ("A", "B", 1) if gap_s >= 0 else ("B", "A", -1)
    ordered = sorted(gaps, key=lambda name: -sign * gaps[name])
    less = [f"{write_time(abs(gaps[name]))} less on {name}" for name in ordered if sign * gaps[name] > abs(gap_s) / 10]
    more = [
        f"{write_time(abs(gaps[name]))} more on {name}"
        for name in ordered[::-1]
        if sign * gaps[name] < -abs(gap_s) / 10
    ]
    times = sorted([one.step_time_s, other.step_time_s])
    text = f"{fast} takes {write_time(times[0])} and {slow} {write_time(times[1])}: {fast} is {times[1] / times[0] - 1:.1%} faster"
    text += f", as it spends {join_words(less[:3])}" if less else ""
    text += f"; it spends {join_words(more[:3])}" if more else ""
    overlaps = max(one.low_s, other.low_s) <= min(one.high_s, other.high_s)
    return f"{text}.{' Their 80 % intervals overlap.' if overlaps else ''}", gaps


def new_figure(height: int, **options: Any) -> Any:
    """Return an empty figure as wide as its page; dragging across it zooms."""
    tools = "xbox_zoom,xpan,reset,save"
    drawn = figure(height=height, sizing_mode="stretch_width", tools=tools, toolbar_location="above", **options)
    wheel = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    drawn.add_tools(wheel)
    drawn.toolbar.active_drag, drawn.toolbar.active_scroll = drawn.select_one(BoxZoomTool), wheel
    drawn.toolbar.logo = None
    drawn.background_fill_color = drawn.border_fill_color = drawn.outline_line_color = None
    drawn.min_border_right = 18
    drawn.axis.axis_label_text_font_style, drawn.axis.axis_label_text_font_size = "normal", "13px"
    drawn.axis.major_label_text_font_size, drawn.axis.minor_tick_line_color = "12px", None
    return drawn


def name_ticks(axis: Any, labels: Mapping[float, str]) -> None:
    """Write words at some places of an axis, and nowhere else."""
    axis.ticker = FixedTicker(ticks=list(labels))
    axis.major_label_overrides = dict(labels)


def _name_rows(drawn: Any, labels: Mapping[float, str]) -> None:
    """Write words beside the rows of a figure."""
    name_ticks(drawn.yaxis, labels)
    drawn.ygrid.grid_line_color = None


def add_hover(drawn: Any, shapes: Any, **tips: str) -> None:
    """Show some of a shape's columns under the pointer."""
    drawn.add_tools(
        HoverTool(renderers=[shapes], tooltips=[(name.replace("_", " "), tip) for name, tip in tips.items()])
    )


def _scale_time(longest_s: float) -> tuple[float, str]:
    """Return what seconds are multiplied by for an axis, and its unit."""
    return (1e3, "ms") if longest_s < 10 else (1.0, "s")


def draw_parts(predictions: Mapping[str, Prediction]) -> Chart:
    """Draw where the steps of some plans go, a bar each, by ``breakdown.PARTS``."""
    rows = [
        {"plan": name or "this plan", "part": part, "time_s": time_s, "share": time_s / one.step_time_s}
        for name, one in predictions.items()
        for part, time_s in one.parts_s.items()
    ]
    numbers = pd.DataFrame(rows, columns=["plan", "part", "time_s", "share"])
    scale, unit = _scale_time(max(one.step_time_s for one in predictions.values()))
    place = {name: -float(at) for at, name in enumerate(dict.fromkeys(numbers["plan"]))}
    sizes, label = numbers["time_s"] * scale, f"step time [{unit}]"
    drawn = _draw_bars(numbers["plan"].map(place), sizes, numbers["part"], _PART_COLOURS, label, unit)
    low, high = ([getattr(one, end) * scale for one in predictions.values()] for end in ("low_s", "high_s"))
    drawn.segment(low, list(place.values()), high, list(place.values()), line_width=2, tags=["ink"])
    _name_rows(drawn, {at: name if len(place) > 1 else "" for name, at in place.items()})
    caption = (
        "Averages over the GPUs. Communication is the exposed part only, by parallel dimension; idle time is the pipeline "
        "bubble and waiting for slower GPUs. The line is the step's 80 % interval."
    )
    legend = {part: _PART_COLOURS[part] for part in PARTS if part in set(numbers["part"])}
    return Chart("Where the step goes", caption, drawn, legend, numbers)


def draw_gap(one: Prediction, other: Prediction) -> Chart:
    """Draw what the second plan takes longer than the first, part by part."""
    text, gaps = explain_gap(one, other)
    scale, unit = _scale_time(max(map(abs, gaps.values())))
    rows = {-float(place): name for place, name in enumerate(gaps)}
    colours = [BLUE if gap_s >= 0 else VERMILLION for gap_s in gaps.values()]
    drawn = new_figure(90 + 26 * len(gaps), x_axis_label=f"B minus A [{unit}]")
    bars = drawn.hbar(y=list(rows), right=[gap_s * scale for gap_s in gaps.values()], height=0.7, color=colours)
    add_hover(drawn, bars, difference=f"@right{{0.00}} {unit}")
    _name_rows(drawn, rows)
    legend = {"A takes less": BLUE, "A takes more": VERMILLION}
    return Chart(
        "Why one plan is faster", text, drawn, legend, pd.DataFrame({"part": list(gaps), "b_less_a_s": gaps.values()})
    )


def draw_front(rows: pd.DataFrame, column: str, label: str, unit: float) -> Chart:
    """Draw plans by the time of a step and what else they take; ``rows`` of a search's ranking."""
    scale, second = _scale_time(float(rows["high_s"].max()))
    colours = np.where(rows["crowded"], VERMILLION, np.where(rows["pareto"], BLUE, GREY))
    source = ColumnDataSource(
        {
            "x": rows["step_time_s"] * scale,
            "low": rows["low_s"] * scale,
            "high": rows["high_s"] * scale,
            "y": rows[column] / unit,
            "colour": colours,
            "plan": rows["plan_text"],
            "place": [str(place) if place <= _NAMED_PLANS else "" for place in range(1, len(rows) + 1)],
        }
    )
    drawn = new_figure(340, x_axis_label=f"step time [{second}]", y_axis_label=label)
    drawn.segment("low", "y", "high", "y", color="colour", alpha=0.5, source=source)
    dots = drawn.scatter("x", "y", size=11, color="colour", source=source)
    drawn.text("x", "y", text="place", x_offset=6, y_offset=-5, text_font_size="12px", tags=["ink"], source=source)
    add_hover(drawn, dots, plan="@plan", time=f"@x{{0.000}} {second}", other=f"@y{{0.000}} {label}")
    legend = {"Pareto-optimal": BLUE, "another plan is better": GREY, "may not fit": VERMILLION}
    shown = {word: colour for word, colour in legend.items() if colour in colours}
    names = [
        "plan_text",
        "ranks",
        "step_time_s",
        "low_s",
        "high_s",
        column,
        "tokens_per_s_per_gpu",
        "mfu",
        "fit_probability",
    ]
    caption = (
        "Plans are numbered by their place in the ranking, with the 80 % interval of the step time; lower left is best."
    )
    numbers = rows[[name for name in dict.fromkeys(names) if name in rows]]
    return Chart(f"{label[0].upper()}{label[1:].partition(' [')[0]} against time", caption, drawn, shown, numbers)


def draw_scaling(rows: pd.DataFrame, column: str, label: str, *, linear: bool = False) -> Chart:
    """Draw a rate against the number of GPUs with its 80 % interval; ``linear``: with what the first would give on more."""
    ranks = rows["ranks"].to_numpy(float)
    low, high = (rows[column] * rows["step_time_s"] / rows[end] for end in ("high_s", "low_s"))
    y_type = "log" if linear else "linear"
    drawn = new_figure(320, x_axis_label="GPUs", y_axis_label=label, x_axis_type="log", y_axis_type=y_type)
    drawn.varea(ranks, low, high, fill_color=BLUE, fill_alpha=0.2)
    drawn.line(ranks, rows[column], color=BLUE, line_width=2)
    fits = rows["fit_probability"].isna() | (rows["fit_probability"] >= LIKELY)
    colours = np.where(fits, BLUE, VERMILLION)
    source = ColumnDataSource({"x": ranks, "y": rows[column], "colour": colours, "plan": rows["plan_text"]})
    dots = drawn.scatter("x", "y", size=10, color="colour", source=source)
    add_hover(drawn, dots, GPUs="@x", plan="@plan", **{label.replace("/", "_per_"): "@y{0.000 a}"})
    legend = {"predicted, with its 80 % interval": BLUE} | (
        {} if fits.all() else {"does not fit the memory": VERMILLION}
    )
    if linear:
        drawn.line(ranks, ranks / ranks[0] * rows[column].iloc[0], line_dash="dashed", tags=["ink"])
    else:
        drawn.y_range.start, drawn.y_range.end = 0, 1.1 * float(high.max())
    name_ticks(drawn.xaxis, {count: f"{int(count)}" for count in ranks})
    caption = "The dashed line is ideal scaling from the smallest run." if linear else "Ideal scaling is a level line."
    return Chart(f"{label} by GPUs", caption, drawn, legend, rows)


def draw_timeline(prediction: Prediction) -> Chart:
    """Draw when tasks run, a row for each stream of ranks that do different things."""
    executed = prediction.simulated.result.executed
    bars = merge_tasks(executed.timeline)
    scale, unit = _scale_time(prediction.step_time_s)
    rows = list(dict.fromkeys(zip(bars["rank"], bars["stream"], strict=True)))
    place = {row: -float(at) for at, row in enumerate(rows)}
    columns = {
        "y": np.array([place[row] for row in zip(bars["rank"], bars["stream"], strict=True)], dtype=np.float32),
        "left": bars["start_s"].to_numpy() * scale,
        "right": bars["end_s"].to_numpy() * scale,
        "colour": bars["look"].map(_LOOKS).tolist(),
        "name": bars["name"].tolist(),
    }
    drawn = new_figure(100 + 22 * max(len(rows), 3), x_axis_label=f"time [{unit}]", y_axis_label="rank and stream")
    source = ColumnDataSource(columns)
    # Outlined, as many are narrower than a pixel.
    shapes = drawn.hbar(y="y", left="left", right="right", height=0.8, color="colour", line_width=0.6, source=source)
    add_hover(drawn, shapes, task="@name", begin=f"@left{{0.000}} {unit}", end=f"@right{{0.000}} {unit}")
    short = {"communication": "comm."}
    _name_rows(drawn, {at: f"{rank} {short.get(stream, stream)}" for (rank, stream), at in place.items()})
    shown, ranks = len(set(bars["rank"])), prediction.task_graph.metadata.ranks
    rest = " The others do the same as one of these." if shown == len(set(executed.like.tolist())) < ranks else ""
    caption = (
        f"{shown} of {ranks} ranks are shown.{rest} "
        "Zoom by dragging across, or with Ctrl and the mouse wheel; the circular arrow resets the view."
    )
    used = set(bars["look"])
    return Chart("When it runs", caption, drawn, {look: colour for look, colour in _LOOKS.items() if look in used})


def merge_tasks(timeline: pd.DataFrame, most: int = _MOST_BARS) -> pd.DataFrame:
    """Return a timeline's bars: ``rank``, ``stream``, ``look`` (colour), ``name``, ``tasks``, ``start_s``, ``end_s``.

    Of more than ``most`` tasks, short neighbours of a row become one bar, of ``tasks`` tasks.
    """
    frame = timeline[timeline["end_s"] > timeline["start_s"]]
    phase = frame["phase"].where(frame["phase"].isin(list(_LOOKS)), "other")
    frame = frame.assign(look=frame["kind"].map(_LOOK_OF_KIND).fillna(phase))
    frame = frame.sort_values(["rank", "stream", "start_s"], kind="stable")
    ranks, streams = frame["rank"].unique(), max(frame["stream"].nunique(), 1)
    shown = ranks[np.unique(np.linspace(0, max(len(ranks) - 1, 0), max(_ROWS // streams, 1)).astype(int))[: len(ranks)]]
    frame = frame[frame["rank"].isin(shown)]
    row = frame.groupby(["rank", "stream"], sort=False).ngroup().to_numpy()
    look = frame["look"].astype("category").cat.codes.to_numpy()
    start_s, end_s = frame["start_s"].to_numpy(float), frame["end_s"].to_numpy(float)
    step_s, short_s, bar = float(end_s.max(initial=0.0)), 0.0, np.arange(len(frame))
    while len(bar) and bar[-1] >= most:
        short_s = 2 * short_s or step_s / 1e5
        apart = np.diff(row) != 0
        if short_s < step_s:
            long = end_s - start_s > short_s
            apart |= (np.diff(look) != 0) | long[1:] | long[:-1] | (start_s[1:] - end_s[:-1] > short_s)
        elif short_s > 4 * step_s:
            break
        bar = np.append(0, np.cumsum(apart))
    first = {name: (name, "first") for name in ("rank", "stream", "look", "name")}
    ends = {"tasks": ("name", "size"), "start_s": ("start_s", "min"), "end_s": ("end_s", "max")}
    bars = frame.groupby(bar).agg(**first, **ends)
    labels = zip(bars["name"], bars["tasks"], strict=True)
    bars["name"] = [name if tasks == 1 else f"{name} and {tasks - 1} more" for name, tasks in labels]
    return bars.reset_index(drop=True)


def draw_memory(prediction: Prediction) -> Chart:
    """Draw what the ranks' allocators hold over the step, against what a GPU has."""
    executed, step = prediction.simulated.result.executed, prediction.step
    curves = count_memory(prediction.task_graph.metadata.memory_curves, executed.timeline)
    peaks = curves.groupby("rank")["value"].max().sort_values(ascending=False, kind="stable")
    scale, unit = _scale_time(prediction.step_time_s)
    drawn = new_figure(300, x_axis_label=f"time [{unit}]", y_axis_label="memory per GPU [GB]")
    legend = {}
    for colour, rank in zip(SERIES_COLOURS, peaks.index[:_MOST_CURVES], strict=False):
        curve = curves[curves["rank"] == rank]
        times = np.append(curve["time_s"], prediction.step_time_s) * scale
        sizes = np.append(curve["value"], curve["value"].iloc[-1]) / _GIGA
        line = drawn.step(times, sizes, mode="after", color=colour, line_width=1.6)
        add_hover(drawn, line, rank=str(rank), memory="@y{0.0} GB")
        legend[f"rank {rank}"] = colour
    room = (step.platform.device.memory_bytes - step.outside_bytes) / _GIGA
    drawn.add_layout(mark_limit(room, "width"))
    drawn.y_range.start, drawn.y_range.end = 0, 1.08 * max(room, peaks.max() / _GIGA)
    caption = (
        f"The fullest ranks; the dashed line is the GPU's memory minus CUDA context and communicators "
        f"({room:.1f} GB). The allocator reserves somewhat more than is allocated."
    )
    return Chart("Memory over the step", caption, drawn, legend, peaks.rename("peak_bytes").reset_index())


def draw_filling(entries: Mapping[int, Mapping[str, Any]], outside_bytes: int, memory_bytes: int) -> Chart:
    """Draw what fills some ranks' memory at their peak, a bar each; ``entries`` of ``Prediction.memory`` by rank."""
    rows = [
        {"rank": rank, "part": name, "size_bytes": size}
        for rank, entry in entries.items()
        for (_, name), size in split_memory(entry, outside_bytes).items()
    ]
    numbers = pd.DataFrame(rows)
    names = list(dict.fromkeys(numbers["part"]))
    legend = dict(zip(names, [*SERIES_COLOURS, "#A6761D", GREY, "#B8B8B8", "#D6C700"], strict=False))
    place = {rank: -float(at) for at, rank in enumerate(entries)}
    drawn = _draw_bars(
        numbers["rank"].map(place), numbers["size_bytes"] / _GIGA, numbers["part"], legend, "memory [GB]", "GB"
    )
    drawn.add_layout(mark_limit(memory_bytes / _GIGA, "height"))
    drawn.x_range.start, drawn.x_range.end = (
        0,
        1.05 * max(memory_bytes, numbers.groupby("rank")["size_bytes"].sum().max()) / _GIGA,
    )
    _name_rows(drawn, {at: f"rank {rank}" for rank, at in place.items()})
    caption = f"At the peak, reached in {next(iter(entries.values()))['when']}; the dashed line is the GPU's memory."
    return Chart("What fills the memory", caption, drawn, legend, numbers)


def mark_limit(place: float, dimension: str) -> Any:
    """Return a dashed line across a figure."""
    return Span(location=place, dimension=dimension, line_dash="dashed", line_width=2, level="overlay", tags=["ink"])


def _draw_bars(
    y: pd.Series, sizes: pd.Series, parts: pd.Series, colours: Mapping[str, str], label: str, unit: str
) -> Any:
    """Return a figure of bars whose parts follow one another; ``y`` [parts] is the place of each one's bar."""
    ends = sizes.groupby(y.to_numpy()).cumsum()
    columns = {"y": y, "left": ends - sizes, "right": ends, "size": sizes, "colour": parts.map(colours), "part": parts}
    drawn = new_figure(110 + 46 * y.nunique(), x_axis_label=label)
    source = ColumnDataSource({name: np.asarray(values) for name, values in columns.items()})
    bars = drawn.hbar(y="y", left="left", right="right", height=0.7, color="colour", line_color=None, source=source)
    add_hover(drawn, bars, part="@part", size=f"@size{{0.00}} {unit}")
    return drawn


def draw_roofline(prediction: Prediction) -> Chart:
    """Draw how near each class of operators comes to what the GPU's compute and memory allow."""
    trace, device = prediction.step.trace, prediction.step.platform.device
    work = trace.operators.assign(operator_class=classify(trace.operators))
    work["bytes"] = work["read_bytes"] + work["write_bytes"]
    sums = work.groupby("operator_class", sort=False)[["device_ns", "flop", "bytes"]].sum().astype(float)
    time_s = ns_to_s(1) * sums["device_ns"]
    rows = pd.DataFrame(
        {
            "flop_per_byte": sums["flop"] / sums["bytes"],
            "flop_per_s": sums["flop"] / time_s,
            "bytes_per_s": sums["bytes"] / time_s,
            "time_share": time_s / (time_s.sum() or 1.0),
        }
    )
    numbers = rows[rows["time_share"] > 0].sort_values("time_share", ascending=False).reset_index()
    rows = numbers[(numbers["flop_per_s"] > 0) & (numbers["bytes_per_s"] > 0)]
    peaks, precision = device.peak_flop_per_s, str(trace.facts.precision)
    precision = precision if precision in peaks else max(peaks, key=lambda name: peaks[name])
    peak = peaks[precision]
    bandwidth = float(device.memory_bandwidth_bytes_per_s or 0.0)
    ridge = peak / bandwidth
    low, high = min(rows["flop_per_byte"].min(), ridge) / 4, max(rows["flop_per_byte"].max(), ridge) * 4
    axes = {"x_axis_type": "log", "y_axis_type": "log"}
    drawn = new_figure(340, x_axis_label="FLOP per byte of memory traffic", y_axis_label="TFLOP/s", **axes)
    drawn.line([low, ridge, high], [low * bandwidth / _TERA, peak / _TERA, peak / _TERA], line_width=2, tags=["ink"])
    drawn.x_range.start, drawn.x_range.end = low, high
    legend = dict(zip(rows["operator_class"], [*SERIES_COLOURS, "#A6761D", GREY, *[GREY] * len(rows)], strict=False))
    source = ColumnDataSource(
        {
            "x": rows["flop_per_byte"],
            "y": rows["flop_per_s"] / _TERA,
            "size": 9 + 30 * np.sqrt(rows["time_share"]),
            "colour": list(legend.values()),
            "name": rows["operator_class"],
            "share": rows["time_share"],
        }
    )
    dots = drawn.scatter("x", "y", size="size", color="colour", fill_alpha=0.75, source=source)
    add_hover(drawn, dots, operators="@name", rate="@y{0.0} TFLOP/s", share_before_the_split="@share{0.0 %}")
    caption = (
        "Operators by class, as one GPU runs the whole model, before the plan divides it among GPUs; dot size is the share of "
        f"their time. Attention counts in full, also where a causal mask halves it. The line is the data sheet's roofline: "
        f"{peak / _TERA:.0f} TFLOP/s in {precision}, {bandwidth / _TERA:.2f} TB/s. Classes without FLOPs are in the table only."
    )
    return Chart("How near to the GPU's limits", caption, drawn, legend, numbers)
