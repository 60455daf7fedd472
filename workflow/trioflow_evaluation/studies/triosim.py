"""The TrioSim paper's case studies: 84 GPUs on a wafer, and what workers gain that do not wait for all their neighbours.

The wafer's photonic circuit network is compared with an electrical mesh. What the paper published is a constant here; the
bandwidth of the mesh's links it did not publish, so that is swept (`study_wafer`). Hop is decentralised training on
ring-based and double-ring graphs, whose workers wait for their neighbours only (`simulate_hop`); `study_hop` sweeps its
backup workers, which the paper studies, and the rest of its protocol.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from trioflow import tables
from trioflow.base.errors import SimulationError
from trioflow.base.provenance import PACKAGE, stamp
from trioflow.base.units import ns_to_s
from trioflow.costmodel.choices import DeviceTimes, prepare_device_times
from trioflow.costmodel.operators.model import load_operator_model
from trioflow.engine.compiled.run import is_repaid, run_program, supports
from trioflow.engine.program import Program, build_program
from trioflow.hardware.machine import Device, Link, Platform, load_device, name_rank_node
from trioflow.hardware.topologies.grids import build_double_ring, build_mesh, build_ring
from trioflow.hardware.topologies.nodes import build_switch
from trioflow.network.collectives import CollectivePlanner
from trioflow.network.networks import AnyNetwork, ContentionFreeNetwork, FairShareNetwork
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraph
from trioflow.prediction.assembly import build_graph
from trioflow.report import style
from trioflow.trace.store import load_trace

from trioflow_evaluation.circuit import CircuitNetwork, CircuitSettings
from trioflow_evaluation.drawing import draw_lines, draw_panels
from trioflow_evaluation.tables import HOP, WAFER

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
    rows += [{"sweep": "port", **row} for bundle in BUNDLES for row in steps.run_circuits(bundle)]
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


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Edge = tuple[int, int]
_ARRIVED, _COMPUTED = 0, 1
_Phase = Literal["computes", "awaits updates", "awaits tokens", "has finished"]


@dataclass(frozen=True)
class HopSettings:
    """The rules that all workers follow."""

    # Tokens of a queue at the start; how many iterations a worker may be ahead of one that it sends
    # to.
    max_gap: int = 8
    backup_workers: int = 0  # updates of an iteration that a worker need not wait for
    staleness: int = 0  # iterations that an update may be old
    max_jump: int = 1  # iterations that a worker which is behind enters at once; 1 never skips
    behind: int = 2  # iterations that all neighbours must be ahead before a worker skips


@dataclass(frozen=True, eq=False)
class HopRun:
    """What came of a run."""

    # Start of each iteration [workers, iterations] [s]; NaN for one that was skipped.
    start_s: Floats
    finish_s: Floats  # when each worker had finished the last iteration [workers] [s]
    computed: Ints  # iterations that each worker computed and did not skip [workers]
    dropped: int  # updates that arrived too late to be of use
    largest_gap: int  # most iterations that a worker was ahead of one that it sends to
    largest_staleness: int  # most iterations that an update was old when a worker relied on it

    @property
    def time_s(self) -> float:
        """When the last worker had finished [s]."""
        return float(self.finish_s.max())


def simulate_hop(
    sending_s: Mapping[Edge, float], compute_s: Floats, settings: HopSettings, *, latency_s: float = 0.0
) -> HopRun:
    """Simulate decentralised training on a graph of workers.

    ``sending_s``: for each edge, the time that an update occupies its link [s]; ``compute_s``:
    [workers, iterations] [s]; ``latency_s``: from the end of the sending to the arrival [s]. Raises
    SimulationError when the settings let nobody move.

    A worker computes, sends its update, tagged with the iteration, to every receiver, and waits
    until all senders but ``backup_workers`` have sent one at most ``staleness`` iterations older
    than its own (a later one counts too; the common start is that of iteration -1). Then it takes a
    token from the queue that each receiver keeps for it, and enters the next iteration, which puts
    a token into every queue of its own.

    Links are independent; on one, updates follow one another. Tokens take no time. A worker whose
    receivers are all at least ``behind`` iterations ahead enters that of the slowest, at most
    ``max_jump`` further on, takes the tokens of all and sends nothing for those skipped (never the
    last); it refreshes its parameters from updates that are there. At one time: arrivals, ends of
    computation as scheduled, then workers, the lowest number that can move first.

    Source: Q. Luo et al., Hop: Heterogeneity-aware Decentralized Training, ASPLOS 2019,
    arXiv:1902.01064.
    """
    return _Training(sending_s, compute_s, settings, latency_s).run()


class _Training:
    """State of one run."""

    def __init__(
        self, sending_s: Mapping[Edge, float], compute_s: Floats, settings: HopSettings, latency_s: float
    ) -> None:
        self.sending_s, self.latency_s, self.settings = dict(sending_s), latency_s, settings
        self.compute_s: list[list[float]] = compute_s.tolist()
        self.workers, self.iterations = compute_s.shape
        edges = sorted(sending_s)
        self.receivers = [[b for a, b in edges if a == w] for w in range(self.workers)]
        self.senders = [[a for a, b in edges if b == w] for w in range(self.workers)]
        self.entered = [0] * self.workers
        self.phase: list[_Phase] = ["awaits tokens"] * self.workers
        # Of each worker's senders, in their order; and where each edge is in there.
        self.newest = [[-1] * len(senders) for senders in self.senders]
        self.place = {edge: self.senders[edge[1]].index(edge[0]) for edge in edges}
        self.outgoing = [[edge for edge in edges if edge[0] == w] for w in range(self.workers)]
        self.free_s = dict.fromkeys(edges, 0.0)
        self.start_s = np.full(compute_s.shape, math.nan)
        self.finish_s = np.full(self.workers, math.nan)
        self.dropped = self.largest_gap = self.largest_staleness = 0
        self.heap: list[tuple[float, int, int, Edge, int]] = []
        self.sequence = 0

    def run(self) -> HopRun:
        """Run until everyone has finished."""
        self.move_on(set(range(self.workers)), 0.0)
        while self.heap:
            now_s, asking = self.heap[0][0], set()
            while self.heap and self.heap[0][0] == now_s:
                _, kind, _, edge, tag = heapq.heappop(self.heap)
                if kind == _ARRIVED:
                    self.receive(edge, tag)
                else:
                    self.send(edge[0], now_s)
                asking.add(edge[1])
            self.move_on(asking, now_s)
        if np.isnan(self.finish_s).any():
            waiting = [f"worker {w} {self.phase[w]}" for w in np.flatnonzero(np.isnan(self.finish_s))]
            raise SimulationError(f"Hop: deadlock: {', '.join(waiting)}")
        computed = np.count_nonzero(~np.isnan(self.start_s), axis=1)
        return HopRun(self.start_s, self.finish_s, computed, self.dropped, self.largest_gap, self.largest_staleness)

    def schedule(self, time_s: float, kind: int, edge: Edge, tag: int) -> None:
        heapq.heappush(self.heap, (time_s, kind, self.sequence, edge, tag))
        self.sequence += 1

    def send(self, worker: int, now_s: float) -> None:
        """End a computation: the update goes out, behind those still on their way."""
        self.phase[worker] = "awaits updates"
        tag, free_s = self.entered[worker] - 1, self.free_s
        for edge in self.outgoing[worker]:
            sent_s = free_s[edge] = max(now_s, free_s[edge]) + self.sending_s[edge]
            self.schedule(sent_s + self.latency_s, _ARRIVED, edge, tag)

    def receive(self, edge: Edge, tag: int) -> None:
        """Keep an update, or drop it when its receiver can no longer use it."""
        receiver = edge[1]
        goes_on = self.phase[receiver] in ("awaits tokens", "has finished")
        oldest = self.entered[receiver] - 1 + goes_on - self.settings.staleness
        self.dropped += tag < oldest
        self.newest[receiver][self.place[edge]] = tag

    def move_on(self, asking: set[int], now_s: float) -> None:
        """Let those go on who may; who enters an iteration gives tokens to others, who ask then."""
        phase = self.phase
        while asking:
            worker = min(asking)
            asking.remove(worker)
            if phase[worker] == "awaits updates" and self.has_updates(worker):
                last = self.entered[worker] == self.iterations
                phase[worker] = "has finished" if last else "awaits tokens"
                if last:
                    self.finish_s[worker] = now_s
            if phase[worker] == "awaits tokens" and self.enter(worker, now_s):
                asking.update(self.senders[worker])

    def has_updates(self, worker: int) -> bool:
        """Return whether enough updates are there that are new enough."""
        oldest = self.entered[worker] - 1 - self.settings.staleness
        newest = self.newest[worker]
        used = [tag for tag in newest if tag >= oldest]
        if len(used) < len(newest) - self.settings.backup_workers:
            return False
        if used:
            staleness = self.entered[worker] - 1 - min(used)
            self.largest_staleness = max(self.largest_staleness, staleness)
        return True

    def enter(self, worker: int, now_s: float) -> bool:
        """Enter the next iteration, or a later one, when its tokens are there."""
        entered, settings = self.entered, self.settings
        own, jump, least = entered[worker], 1, 0
        receivers = self.receivers[worker]
        if receivers:
            least = min([entered[receiver] for receiver in receivers]) - own
        if least >= settings.behind:
            jump = min(least, settings.max_jump, self.iterations - own)
        if receivers and settings.max_gap + least < jump:
            return False
        entered[worker] = own + jump
        iteration = own + jump - 1
        if receivers:
            self.largest_gap = max(self.largest_gap, jump - least)
        self.phase[worker] = "computes"
        self.start_s[worker, iteration] = now_s
        end_s = now_s + self.compute_s[worker][iteration]
        self.schedule(end_s, _COMPUTED, (worker, worker), iteration)
        return True


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
_GRAPHS = {"ring-based": build_ring, "double-ring": build_double_ring}
GRAPHS = tuple(_GRAPHS)
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


def build_workers(graph: str, workers: int = WORKERS) -> list[Edge]:
    """Return who sends to whom: ring-based, or two such rings joined worker to worker.

    Ring-based: a ring, both ways, and an edge from each worker to the most distant one (TrioSim
    paper, Hop case).
    """
    ends = ((link.source, link.target) for link in _GRAPHS[graph](workers, 1.0, 0.0, chords=True))
    return [(int(a.removeprefix("rank")), int(b.removeprefix("rank"))) for a, b in ends]


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

    Equal seeds give equal factors, whatever graph and bandwidth.
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
    else:  # moments
        hit = generator.random(compute.shape) < 1 / compute.shape[0]
        compute = compute * np.where(hit, generator.uniform(1.0, SLOWEST, compute.shape), 1.0)
    return {edge: float(time_s) for edge, time_s in sending.items()}, compute


def sweep_hop(
    work: HopWork,
    bandwidths_bytes_per_s: Sequence[float] = _BANDWIDTHS_BYTES_PER_S,
    seeds: Sequence[int] = _SEEDS,
    iterations: int = ITERATIONS,
) -> pd.DataFrame:
    """Run every graph, slow-down, seed, bandwidth (of links not slowed [bytes/s]) and variant: ``HOP``."""
    rows = []
    for graph, slowed, bandwidth, seed in product(GRAPHS, SLOWED, bandwidths_bytes_per_s, seeds):
        times = draw_times(
            work, build_workers(graph), slowed, seed, bandwidth_bytes_per_s=bandwidth, iterations=iterations
        )
        about = {"graph": graph, "slowed": slowed, "seed": seed, "bandwidth_bytes_per_s": bandwidth}
        rows += [about | row for row in _run_variants(work, *times)]
    return pd.DataFrame(rows)


def _run_variants(work: HopWork, sending_s: Mapping[Edge, float], compute_s: Floats) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    standard_s = 0.0
    for variant, settings in VARIANTS.items():
        run = simulate_hop(sending_s, compute_s, settings, latency_s=LATENCY_S)
        standard_s = standard_s or run.time_s
        rows.append({"variant": variant, **_describe(run, settings, work, standard_s)})
    return rows


def _describe(run: HopRun, settings: HopSettings, work: HopWork, standard_s: float) -> dict[str, Any]:
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
    tables.write_table(rows, "hop study", table, stamp(list_inputs([TRACE]), seeds=list(_SEEDS)), HOP)
    style.save_figure(draw_speedups(rows, SHOWN_BANDWIDTH_BYTES_PER_S), speedup)
    style.save_figure(draw_bandwidths(rows), bandwidth)


def draw_speedups(rows: pd.DataFrame, bandwidth_bytes_per_s: float) -> Figure:
    """Draw the speed-up of every variant over the standard rules (``HOP``) at one bandwidth, a dot a seed."""
    shown = rows[rows["bandwidth_bytes_per_s"] == bandwidth_bytes_per_s]
    shown = shown[shown["variant"] != shown["variant"].iloc[0]]
    lines = "slow " + shown["slowed"] + ": " + shown["variant"]
    order = shown["slowed"].map({name: at for at, name in enumerate(SLOWED)})
    drawn = shown.assign(line=lines, order=order).sort_values("order", kind="stable")
    label = "speed-up over the standard rules, same graph and factors"
    return draw_lines(drawn, "speedup", "line", "graph", label, middle=1.0)


def draw_bandwidths(rows: pd.DataFrame) -> Figure:
    """Draw the speed-up of every variant (``HOP``) against the bandwidth: medians over seeds, a panel a graph and cause."""
    keys = ["graph", "slowed", "variant", "bandwidth_bytes_per_s"]
    median = rows.groupby(keys, sort=False)["speedup"].median().reset_index()
    drawn = median.assign(
        gb=median["bandwidth_bytes_per_s"] / 1e9, panel=median["graph"] + "\nslow " + median["slowed"]
    )
    labels = ("bandwidth of a link that is not slowed [GB/s]", "speed-up over the standard rules")
    return draw_panels(
        drawn, "gb", "speedup", "variant", "panel", labels, columns=len(SLOWED), seconds=False, curves=True
    )
