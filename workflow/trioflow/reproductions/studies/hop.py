"""Hop on ring-based and double-ring graphs: what backup workers and their kin gain.

The case study of the TrioSim paper, and the rest of Hop's protocol beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.errors import SimulationError
from trioflow.base.provenance import stamp
from trioflow.base.units import ns_to_s
from trioflow.hardware.machine import Link
from trioflow.hardware.topologies.grids import build_double_ring, build_ring
from trioflow.report import style
from trioflow.reproductions.studies.contraction import list_inputs, load_timed_trace
from trioflow.reproductions.studies.hop_simulation import (
    Edge,
    Floats,
    HopRun,
    HopSettings,
    simulate_hop,
)
from trioflow.reproductions.tables import HOP

TRACE = "vgg11-b128"
"""VGG-11, batch 128; TrioSim paper, Hop case."""
WORKERS = 8
_SEEDS = tuple(range(8))
"""Eight random slow-downs, as in the paper; the draws are ours."""
SLOWEST = 10.0
"""A factor is drawn evenly between 1 and this; TrioSim paper, Hop case."""
ITERATIONS = 100
LATENCY_S = 5e-6
"""From the end of a sending to the arrival: assumed, and nothing beside the sendings."""
_BANDWIDTHS_BYTES_PER_S = (1.25e9, 5e9, 12.5e9, 50e9)
"""10, 40, 100 and 400 Gb/s; which one the paper took is not known here."""
SHOWN_BANDWIDTH_BYTES_PER_S = 12.5e9
GRAPHS = ("ring-based", "double-ring")
SLOWED = ("sending", "links", "GPUs", "moments")
"""What a worker's factor slows: all that it sends; its links both ways; its computation; or every
single computation by a factor of its own with the probability 1 / workers."""
STANDARD = "standard"
VARIANTS: Mapping[str, HopSettings] = {
    STANDARD: HopSettings(),
    "backup 1": HopSettings(backup_workers=1),
    "backup 1, gap 2": HopSettings(backup_workers=1, max_gap=2),
    "staleness 2": HopSettings(staleness=2),
    "staleness 5": HopSettings(staleness=5),
    "backup 1, skip": HopSettings(backup_workers=1, max_jump=8),
    "staleness 5, skip": HopSettings(staleness=5, max_jump=8),
}


@dataclass(frozen=True)
class HopWork:
    """What one iteration is, where nothing is slowed."""

    compute_s: float  # computation of an iteration [s]
    update_bytes: int  # one update: all gradients [bytes]
    batch: int  # samples of an iteration of one worker


def load_work() -> HopWork:
    """Return the work of an iteration of the traced workload, at predicted times."""
    timed = load_timed_trace(TRACE).traces[0]
    update_bytes = sum(int(gradient["size_bytes"]) for gradient in timed.facts.gradients)
    compute_s = ns_to_s(float(timed.operators["device_ns"].sum()))
    return HopWork(compute_s, update_bytes, timed.facts.batch)


def build_graph(graph: str, workers: int = WORKERS) -> list[Edge]:
    """Return who sends to whom: ring-based, or two such rings joined worker to worker; SimulationError for other graphs.

    Ring-based: a ring, both ways, and an edge from each worker to the most distant one (TrioSim
    paper, Hop case).
    """
    links: Sequence[Link]
    if graph == "ring-based":
        links = build_ring(workers, 1.0, 0.0, chords=True)
    elif graph == "double-ring":
        links = build_double_ring(workers, 1.0, 0.0, chords=True)
    else:
        raise SimulationError(f"Hop: no graph is called {graph!r}; known are {', '.join(GRAPHS)}")
    return [(_read_rank(link.source), _read_rank(link.target)) for link in links]


def _read_rank(node: str) -> int:
    return int(node.removeprefix("rank"))


def draw_times(
    work: HopWork,
    edges: Sequence[Edge],
    slowed: str,
    seed: int,
    *,
    bandwidth_bytes_per_s: float,
    workers: int = WORKERS,
    iterations: int = ITERATIONS,
) -> tuple[dict[Edge, float], Floats]:
    """Return the time of an update on each edge and of each computation [workers, iterations] [s], slowed at random.

    Equal seeds give equal factors, whatever graph and bandwidth. Raises SimulationError when
    nothing is called ``slowed``.
    """
    generator = np.random.default_rng(seed)
    factors = generator.uniform(1.0, SLOWEST, workers)
    sending = dict.fromkeys(edges, work.update_bytes / bandwidth_bytes_per_s)
    compute = np.full((workers, iterations), work.compute_s)
    if slowed == "sending":
        sending = {edge: time_s * factors[edge[0]] for edge, time_s in sending.items()}
    elif slowed == "links":
        sending = {edge: time_s * max(factors[list(edge)]) for edge, time_s in sending.items()}
    elif slowed == "GPUs":
        compute = compute * factors[:, np.newaxis]
    elif slowed == "moments":
        compute = compute * _draw_moments(generator, compute.shape)
    else:
        raise SimulationError(f"Hop: nothing is called {slowed!r}; known are {', '.join(SLOWED)}")
    return {edge: float(time_s) for edge, time_s in sending.items()}, compute


def _draw_moments(generator: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Draw a factor for each iteration; most are 1."""
    hit = generator.random(shape) < 1 / shape[0]
    return np.where(hit, generator.uniform(1.0, SLOWEST, shape), 1.0)


def sweep_hop(
    work: HopWork,
    bandwidths_bytes_per_s: Sequence[float] = _BANDWIDTHS_BYTES_PER_S,
    seeds: Sequence[int] = _SEEDS,
    iterations: int = ITERATIONS,
) -> pd.DataFrame:
    """Run every graph, slow-down, seed, bandwidth (of links not slowed [bytes/s]) and variant: ``HOP``."""
    rows = []
    for graph in GRAPHS:
        edges = build_graph(graph)
        for slowed in SLOWED:
            for bandwidth in bandwidths_bytes_per_s:
                for seed in seeds:
                    times = draw_times(
                        work, edges, slowed, seed, bandwidth_bytes_per_s=bandwidth,
                        iterations=iterations,
                    )  # fmt: skip
                    about = {
                        "graph": graph, "slowed": slowed, "seed": seed,
                        "bandwidth_bytes_per_s": bandwidth,
                    }  # fmt: skip
                    rows += [about | row for row in _run_variants(work, *times)]
    return pd.DataFrame(rows)


def _run_variants(
    work: HopWork, sending_s: Mapping[Edge, float], compute_s: Floats
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    standard_s = 0.0
    for variant, settings in VARIANTS.items():
        run = simulate_hop(sending_s, compute_s, settings, latency_s=LATENCY_S)
        standard_s = standard_s or run.time_s
        rows.append({"variant": variant, **_describe(run, settings, work, standard_s)})
    return rows


def _describe(
    run: HopRun, settings: HopSettings, work: HopWork, standard_s: float
) -> dict[str, Any]:
    iterations = run.start_s.shape[1]
    computed = int(run.computed.sum())
    return {
        "backup_workers": settings.backup_workers,
        "staleness": settings.staleness,
        "max_gap": settings.max_gap,
        "max_jump": settings.max_jump,
        "iterations": iterations,
        "time_s": run.time_s,
        "iteration_s": run.time_s / iterations,
        "samples_per_s": computed * work.batch / run.time_s,
        "speedup": standard_s / run.time_s,
        "computed_share": computed / run.start_s.size,
        "dropped": run.dropped,
        "largest_gap": run.largest_gap,
        "largest_staleness": run.largest_staleness,
    }


def study_hop(table: str | Path, speedup: str | Path, bandwidth: str | Path) -> None:
    """Run the study and write its table (``HOP``) and its figures (no suffix), each as SVG and PNG."""
    rows = sweep_hop(load_work())
    tables.write_table(
        rows, "hop study", table, stamp(list_inputs([TRACE]), seeds=list(_SEEDS)), HOP
    )
    style.save_figure(draw_speedups(rows, SHOWN_BANDWIDTH_BYTES_PER_S), speedup)
    style.save_figure(draw_bandwidths(rows), bandwidth)


_SLOWED = {
    "sending": "slow sending (a factor a worker)",
    "links": "slow links, both ways (a factor a worker)",
    "GPUs": "slow GPUs (a factor a worker)",
    "moments": "slow moments (a factor an iteration)",
}


def draw_speedups(rows: pd.DataFrame, bandwidth_bytes_per_s: float) -> Figure:
    """Draw the speed-up of every variant over the standard rules (``HOP``) at one bandwidth.

    A panel for each thing that is slowed: one dot a seed, a line at the median, both graphs beside
    each other.
    """
    shown = rows[rows["bandwidth_bytes_per_s"] == bandwidth_bytes_per_s]
    shown = shown[shown["variant"] != shown["variant"].iloc[0]]
    graphs = list(dict.fromkeys(rows["graph"]))
    palette = dict(zip(graphs, style.SERIES_COLOURS, strict=False))
    with style.figure_style():
        figure = style.new_figure(5.6)
        panels = figure.subplots(2, 2, sharey=True).ravel()
        for axes, (slowed, title) in zip(panels, _SLOWED.items(), strict=True):
            part = shown[shown["slowed"] == slowed]
            common = {
                "data": part, "x": "speedup", "y": "variant", "hue": "graph", "ax": axes,
                "palette": palette, "legend": False,
            }  # fmt: skip
            sns.stripplot(**common, dodge=True, size=4.5, alpha=0.75, jitter=False)
            sns.pointplot(
                **common, dodge=0.4, estimator="median", errorbar=None, linestyle="none",
                marker="|", markersize=10, markeredgewidth=2.2,
            )  # fmt: skip
            axes.axvline(1, color=style.INK, linewidth=1)
            axes.set_title(title, fontsize=9.5)
            axes.set_ylabel("")
            axes.set_xlabel("")
            axes.set_xlim(left=min(0.95, part["speedup"].min() - 0.05))
            axes.grid(axis="x", visible=True)
        figure.supxlabel("speed-up over the standard rules, same graph and factors", fontsize=9.5)
        handles = [
            Line2D([], [], marker="o", linestyle="none", color=colour, label=graph)
            for graph, colour in palette.items()
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def draw_bandwidths(rows: pd.DataFrame) -> Figure:
    """Draw the speed-up of every variant (``HOP``) against the bandwidth: medians over seeds, a row of panels a graph."""
    keys = ["graph", "slowed", "variant", "bandwidth_bytes_per_s"]
    median = rows.groupby(keys, sort=False)["speedup"].median().reset_index()
    median["gb"] = median["bandwidth_bytes_per_s"] / 1e9
    graphs, variants = list(dict.fromkeys(rows["graph"])), list(dict.fromkeys(rows["variant"]))
    colours = dict(zip(variants, (style.INK, *style.SERIES_COLOURS), strict=False))
    markers = dict(zip(variants, style.MARKERS, strict=False))
    with style.figure_style():
        figure = style.new_figure(5.4)
        panels = figure.subplots(len(graphs), len(_SLOWED), sharex=True, sharey=True, squeeze=False)
        for line, graph in zip(panels, graphs, strict=True):
            for axes, slowed in zip(line, _SLOWED, strict=True):
                part = median[(median["graph"] == graph) & (median["slowed"] == slowed)]
                sns.lineplot(
                    part, x="gb", y="speedup", hue="variant", style="variant", ax=axes,
                    palette=colours, markers=markers, dashes=False, legend=False, markersize=5,
                )  # fmt: skip
                axes.set_xscale("log")
                style.spread_ticks(axes.xaxis, part["gb"].min(), part["gb"].max(), most=4)
                axes.xaxis.set_major_formatter("{x:g}")
                axes.set_title(f"{graph}\nslow {slowed}", fontsize=9.5)
                axes.tick_params(labelbottom=True, labelleft=True)
                axes.set_xlabel("")
                axes.set_ylabel("")
        figure.supxlabel("bandwidth of a link that is not slowed [GB/s]", fontsize=9.5)
        figure.supylabel("speed-up over the standard rules", fontsize=9.5)
        handles = [
            Line2D([], [], color=colours[name], marker=markers[name], markersize=5, label=name)
            for name in variants
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure
