"""84 GPUs on a wafer: a photonic circuit network against an electrical mesh.

The case study of the TrioSim paper. What it published is a constant here;
the bandwidth of the mesh's links it did not publish, so that is swept.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from trioflow import tables
from trioflow.base.provenance import PACKAGE, stamp
from trioflow.costmodel.device_times import DeviceTimes, prepare_device_times
from trioflow.costmodel.operators.model import load_operator_model
from trioflow.engine.compiled.run import is_repaid, run_program, supports
from trioflow.engine.program import Program, build_program
from trioflow.hardware.machine import Device, Link, Platform, load_device, name_rank_node
from trioflow.hardware.topologies.grids import build_mesh
from trioflow.hardware.topologies.nodes import build_switch
from trioflow.network.collectives import CollectivePlanner
from trioflow.network.networks import AnyNetwork, ContentionFreeNetwork, FairShareNetwork
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.assembly import build_graph
from trioflow.report import style
from trioflow.trace.store import load_trace

from trioflow_evaluation.circuit import CircuitNetwork, CircuitSettings
from trioflow_evaluation.drawing import draw_panels
from trioflow_evaluation.tables import WAFER

TRACES = PACKAGE / "data" / "traces"
"""Operators and tensors captured without a device (``trioflow capture --device meta``)."""
_SHEET = "a100-pcie-80gb"
"""Device of every study, and name of the cost model that times its operators; both ship."""
MODEL = PACKAGE / "data" / "cost_models" / _SHEET / "operators.json"


def list_inputs(traces: list[str]) -> list[Path]:
    """Return the files that a study of some traces rests on."""
    parts = ("operators.parquet", "tensors.parquet", "trace.json")
    return [MODEL, *(TRACES / trace / part for trace in dict.fromkeys(traces) for part in parts)]


def load_timed_trace(name: str) -> DeviceTimes:
    """Return a trace of the studies with predicted times, and the model that gave them; TraceError where there is none."""
    model = load_operator_model(MODEL)
    device_name = load_device(_SHEET).driver_name
    return prepare_device_times([load_trace(TRACES / name)], device_name, {_SHEET: model})


def load_study_device() -> Device:
    """Return the device of every rank of the studies."""
    return Device.of(load_device(_SHEET))


ROWS, COLUMNS = 7, 12
"""84 GPUs; TrioSim paper, photonic case."""
GPUS = ROWS * COLUMNS
PORTS = CircuitSettings().ports
DEVICE_BANDWIDTH_BYTES_PER_S = 484e9
"""All ports of a GPU together; TrioSim paper, photonic case."""
LINK_LATENCY_S = 0.3e-6
"""Never measured: half of the 0.6 us that NCCL 2.30.7 assumes for an NVLink hop of its LL ring
(``src/graph/tuning.cc``), as in the shipped platforms; a circuit crosses two such links."""
MESH_BANDWIDTHS_BYTES_PER_S = (0.5e9, 1e9, 2e9, 5e9, 10e9, 20e9, 50e9, 121e9, 250e9, 484e9)
"""121 GB/s: the 484 GB/s of a GPU on the four links of a mesh; 484 GB/s: all of it on each."""
BUNDLES = (1, 2, 4, 8)
"""Ports that one circuit bundles; the paper does not say how a ring uses the eight."""
PAPER_SHARE = 0.9221
"""Part of the step that is communication: VGG-19 on the electrical mesh, TrioSim paper."""
_HALVINGS = 60


@dataclass(frozen=True)
class WaferCase:
    """A workload, a plan and a batch."""

    trace: str  # folder in ``TRACES``
    samples_per_replica: int
    data: int = GPUS
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 1
    paper_share: float | None = None  # share of communication that the paper reports on its mesh


CASES = (
    WaferCase("vgg19-b128", 128, paper_share=PAPER_SHARE),
    # The paper's batch of 128 in all is not a multiple of 84 ranks; 168 is the nearest from above.
    WaferCase("vgg19-b128", 2, paper_share=PAPER_SHARE),
    WaferCase("resnet50-b128", 128),
    WaferCase("resnet50-b128", 2),
    WaferCase("gpt2-b8", 8),
    WaferCase("gpt2-b8", 8, data=21, tensor=4),
    WaferCase("gpt2-b8", 8, data=21, pipeline=4, micro_batches=4),
    WaferCase("llama-3-2-1b-b4", 4),
)


def trace_ring(rows: int, columns: int) -> list[int]:
    """Return the places of a grid in the order of a closed walk over all of them, neighbours beside each other.

    A ring on them uses each link once. It takes 2 rows or more and an even number of columns.
    """
    walk = []
    for column in range(columns):
        down = list(range(1, rows))
        walk += [row * columns + column for row in (down if column % 2 == 0 else down[::-1])]
    return walk + list(range(columns))[::-1]


def place_ranks(links: Iterable[Link], places: Sequence[int]) -> list[Link]:
    """Put rank k at a place [ranks] of a network whose ranks are called by their places."""
    names = {name_rank_node(place): name_rank_node(rank) for rank, place in enumerate(places)}
    return [link._replace(source=names[link.source], target=names[link.target]) for link in links]


def build_case(case: WaferCase) -> TaskGraph:
    """Return what 84 ranks do in a step of a case."""
    times = load_timed_trace(case.trace)
    plan = make_plan(
        case.data, case.tensor, case.pipeline, micro_batches=case.micro_batches if case.pipeline > 1 else None
    )
    batch = case.samples_per_replica * case.data
    return build_graph(times, plan, batch=batch)


class WaferSteps:
    """Steps of one task graph, what the ranks of a ``rows`` x ``columns`` wafer do, on the networks of the study."""

    def __init__(self, graph: TaskGraph, rows: int = ROWS, columns: int = COLUMNS) -> None:
        self.graph, self.rows, self.columns = graph, rows, columns
        self.ranks = rows * columns
        self._programs: dict[str, Program] = {}
        free = build_switch(self.ranks, 1.0, 0.0)
        unlimited = [link._replace(bandwidth_bytes_per_s=math.inf) for link in free]
        self.ideal_s = self._run("ideal", unlimited, ContentionFreeNetwork(unlimited))

    def run_mesh(self, variant: str, bandwidth_bytes_per_s: float) -> dict[str, Any]:
        """Return a row of the table: a step on the electrical mesh."""
        links = build_mesh(self.ranks, bandwidth_bytes_per_s, LINK_LATENCY_S, rows=self.rows, columns=self.columns)
        places = trace_ring(self.rows, self.columns) if variant == "snake" else range(self.ranks)
        links = place_ranks(links, list(places))
        step_s = self._run(f"mesh {variant}", links, FairShareNetwork(links))
        return self._row("mesh", variant, bandwidth_bytes_per_s, 0, step_s)

    def run_circuits(self, bundle: int) -> list[dict[str, Any]]:
        """Return rows of the table: the first step on circuits, the one after it, and one without reuse."""
        bandwidth = DEVICE_BANDWIDTH_BYTES_PER_S / PORTS * bundle
        links = build_switch(self.ranks, bandwidth, LINK_LATENCY_S)
        rows: list[dict[str, Any]] = []
        circuits: tuple[tuple[str, str], ...] = ()
        for variant in ("first step", "later step", "without reuse"):
            kept = variant != "without reuse"
            settings = CircuitSettings(ports=PORTS // bundle, keep_open=kept)
            network = CircuitNetwork(links, settings, circuits if kept else ())
            step_s = self._run("circuit", links, network)
            row = self._row("circuit", variant, bandwidth, bundle, step_s)
            rows.append(row | {"established": network.established, "torn_down": network.torn_down})
            circuits = network.open_circuits
        return rows

    def find_bandwidth(self, share: float) -> float:
        """Return the bandwidth at which the network adds a share of the mesh's step [bytes/s]."""
        low, high = 1e3, 1e15
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._share(middle) > share else (low, middle)
        return high

    def _share(self, bandwidth_bytes_per_s: float) -> float:
        return float(self.run_mesh("snake", bandwidth_bytes_per_s)["network_share"])

    def _run(self, key: str, links: Sequence[Link], network: AnyNetwork) -> float:
        # Bandwidths are not part of a program, so one serves a whole sweep.
        if key not in self._programs:
            platform = Platform("wafer", load_study_device(), self.ranks, tuple(links))
            self._programs[key] = build_program(self.graph, CollectivePlanner(platform), ranks=self.ranks)
        program = self._programs[key]
        # A program runs at many bandwidths, so what loading the compiled engine takes is shared.
        often = is_repaid(program.events * (len(MESH_BANDWIDTHS_BYTES_PER_S) + _HALVINGS))
        compiled = supports(network) and often
        return float(run_program(program, network, compiled=compiled).end_s.max())

    def _row(self, network: str, variant: str, bandwidth: float, bundle: int, step_s: float) -> dict[str, Any]:
        return {
            "network": network,
            "variant": variant,
            "link_bandwidth_bytes_per_s": bandwidth,
            "ports_per_circuit": bundle,
            "step_s": step_s,
            "ideal_s": self.ideal_s,
            "network_share": 1 - self.ideal_s / step_s,
            "established": 0,
            "torn_down": 0,
        }


def sweep_case(case: WaferCase) -> list[dict[str, Any]]:
    """Return the rows of one case: both networks, every bandwidth and bundle."""
    steps = WaferSteps(build_case(case))
    degrees = (("data", case.data), ("tensor", case.tensor), ("pipeline", case.pipeline))
    about = {
        "workload": steps.graph.metadata.workload,
        "plan": " x ".join(f"{degree} {name}" for name, degree in degrees if degree > 1),
        "batch": case.samples_per_replica * case.data,
        "samples_per_replica": case.samples_per_replica,
    }
    rows = [
        {"sweep": "link", **steps.run_mesh(variant, bandwidth)}
        for variant in ("snake", "row-major")
        for bandwidth in MESH_BANDWIDTHS_BYTES_PER_S
    ]
    for bundle in BUNDLES:
        rows += [{"sweep": "port", **row} for row in steps.run_circuits(bundle)]
    if case.paper_share is not None:
        bandwidth = steps.find_bandwidth(case.paper_share)
        rows.append({"sweep": "paper", **steps.run_mesh("snake", bandwidth)})
    return [about | row for row in rows]


def study_wafer(table: str | Path, figure: str | Path) -> None:
    """Run the study and write its table (``WAFER``), and its figure (no suffix) as SVG and PNG."""
    rows = pd.DataFrame([row for case in CASES for row in sweep_case(case)])
    tables.write_table(rows, "wafer study", table, stamp(list_inputs([case.trace for case in CASES])), WAFER)
    style.save_figure(draw_wafer(rows), figure)


def draw_wafer(rows: pd.DataFrame) -> Figure:
    """Draw the step on both networks (``WAFER``), a panel a case, over the bandwidth of the mesh's links.

    In units of the step on a network that takes no time; circuits, which have no such bandwidth, are level lines.
    """
    ports = rows["ports_per_circuit"].astype(str) + "-port circuits, " + rows["variant"]
    paper = rows["sweep"] == "paper"
    drawn = rows.assign(
        slower=rows["step_s"] / rows["ideal_s"],
        gb=rows["link_bandwidth_bytes_per_s"] / 1e9,
        network=ports.mask(rows["network"] == "mesh", "mesh, " + rows["variant"]).mask(paper, _PAPER),
        panel=rows["workload"] + ", " + rows["samples_per_replica"].astype(str) + " samples\n" + rows["plan"],
    )
    ends = drawn.loc[drawn["sweep"] == "link", "gb"].agg(["min", "max"])
    bundles = {0, drawn["ports_per_circuit"].max(), drawn.query("ports_per_circuit > 0")["ports_per_circuit"].min()}
    circuits = drawn[(rows["network"] == "circuit") & drawn["ports_per_circuit"].isin(bundles)]
    level = [circuits.assign(gb=end) for end in ends]
    labels = ("bandwidth of a mesh link, per direction [GB/s]", "step time / step time without network")
    return draw_panels(
        pd.concat([drawn[rows["network"] == "mesh"], *level]),
        "gb",
        "slower",
        "network",
        "panel",
        labels,
        columns=2,
        seconds=False,
        curves=True,
    )


_PAPER = "the paper's share on the mesh"
