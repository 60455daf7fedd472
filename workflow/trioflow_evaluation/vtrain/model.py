"""vTrain's published iteration times, and a step of Megatron on A100s from ten physical parameters and the schedule's graph.

A measured time carries noise. `check_composition` tests relations that hold exactly in a sum of
parts, each looked up or profiled once, and in no measurement.

What one rank of a Megatron GPT computes for a micro-batch (`count_part`: products, bytes, launches, all-reduces) is
counted from the model's sizes alone, operator by operator, for the parts of a
step: a block, the embedding and the head, each forward and backward.

`build_step` makes trioflow's task graph of one Megatron training step, `formula_of` the same graph as a formula of its
times. The graph of a number of stages and micro-batches does not change while times
are fitted. It is built once, and its length is evaluated for all rows and
parameters at once; a test proves it equal to the engine's.

References
----------
J. Bang et al., "vTrain", MICRO 2024; repository VIA-Research/vTrain.
M. Shoeybi et al., Megatron-LM, arXiv 1909.08053: what each tensor-parallel
rank holds, and the two all-reduces of a block in either direction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from trioflow.base.columns import as_columns
from trioflow.base.errors import TableError
from trioflow.base.provenance import read_own_table
from trioflow.base.units import ms_to_s, ns_to_s
from trioflow.costmodel.collectives.model import count_steps, wire_factor
from trioflow.costmodel.features import FEATURES, Floats
from trioflow.costmodel.operators.curves import PRODUCTS
from trioflow.costmodel.operators.precision import ProductTable, load_tensor_tables
from trioflow.engine.program import Ints
from trioflow.engine.result import DrawnGraph
from trioflow.hardware.machine import load_device
from trioflow.parallel.plan import make_plan
from trioflow.parallel.programs.builder import ProgramBuilder, StageWork
from trioflow.parallel.programs.staged import StagedRank
from trioflow.parallel.reference import OperatorTimes
from trioflow.parallel.schedules.build import build_schedule
from trioflow.parallel.splits.pipeline import Bucket
from trioflow.parallel.splits.tensor_split import TensorSplit
from trioflow.parallel.task_graph import TaskGraph

from trioflow_evaluation import DATA
from trioflow_evaluation.fits.collectives import PUBLIC_TABLES
from trioflow_evaluation.tables import CHECKS

PARTS = ("block_forward", "block_backward", "embedding_forward", "embedding_backward", "head_forward", "head_backward")
HALF_BYTES = 2
VOCABULARY = 50257
"""Words of GPT-2's tokenizer; the file does not say which one was used."""
_VOCABULARY_MULTIPLE = 128
"""Megatron-LM fills the vocabulary up to a multiple of this on every tensor-parallel rank."""


_MOVED = tuple(read_own_table(f"{DATA}/vtrain/model/work"))
"""Element-wise work of each part: how many elements it reads and writes, as multiples of a tensor (half precision; a
one-byte mask counts half an element), and how many kernels it takes.
"""
_SUMMED = {"block_forward": 2, "block_backward": 2, "embedding_forward": 1, "head_backward": 1}
"""All-reduces of the micro-batch's activations among tensor ranks."""


@dataclass(frozen=True)
class _PartWork:
    """One part of a step on one rank."""

    products: list[tuple[int, int, int, int]]  # batch, m, n and k of (m x k) (k x n)
    moved_bytes: float  # read and written by everything that is not a product [bytes]
    launches: int  # kernels that the host launches
    all_reduces: int  # tensor-parallel all-reduces of the micro-batch's activations


@dataclass(frozen=True)
class Shape:
    """Sizes of what a rank computes; see ``SHAPE``."""

    hidden: int
    heads: int
    sequence: int
    tensor: int
    micro_batch: int

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.sequence * self.micro_batch

    @property
    def activation_bytes(self) -> float:
        """One activation between blocks [bytes]: what stages send and tensor ranks add up."""
        return float(HALF_BYTES * self.tokens * self.hidden)

    @property
    def vocabulary(self) -> int:
        """Words of one rank's shard."""
        whole = _VOCABULARY_MULTIPLE * self.tensor
        return -(-VOCABULARY // whole) * _VOCABULARY_MULTIPLE


def count_part(shape: Shape, part: str) -> _PartWork:
    """Count one of ``PARTS``; attention is the unfused one, its softmax and dropout over all pairs of tokens.

    Backward has two products of gradients for each product.
    """
    name, _, direction = part.partition("_")
    tokens, hidden, shard = shape.tokens, shape.hidden, shape.hidden // shape.tensor
    heads, sequence = shape.micro_batch * shape.heads // shape.tensor, shape.sequence
    size = hidden // shape.heads
    products = {
        "block": [
            (1, tokens, 3 * shard, hidden),
            (heads, sequence, sequence, size),
            (heads, sequence, size, sequence),
            (1, tokens, hidden, shard),
            (1, tokens, 4 * shard, hidden),
            (1, tokens, hidden, 4 * shard),
        ],
        "head": [(1, tokens, shape.vocabulary, hidden)],
    }.get(name, [])
    if direction == "backward":
        products = [gradient for b, m, n, k in products for gradient in ((b, m, k, n), (b, k, n, m))]
    elements = {
        "whole": tokens * hidden,
        "shard": tokens * shard,
        "pairs": heads * sequence * sequence,
        "scores": tokens * shape.vocabulary,
        "table": shape.vocabulary * hidden,
    }
    part_rows = [row for row in _MOVED if row["part"] == part]
    return _PartWork(
        products,
        sum(float(row["times"]) * HALF_BYTES * elements[row["of"]] for row in part_rows),
        len(products) + sum(int(row["launches"]) for row in part_rows),
        _SUMMED.get(part, 0) if shape.tensor > 1 else 0,
    )


@dataclass(frozen=True)
class WorkTable:
    """The parts of every distinct shape, ready to be timed for many parameters at once."""

    shapes: list[Shape]
    # Shape (shapes, parts); ``product_s`` by the shipped table of single products [s],
    # [bytes].
    product_s: Floats
    moved_bytes: Floats
    launches: Floats
    all_reduces: Floats


def tabulate_work(shapes: Sequence[Shape], table: ProductTable) -> WorkTable:
    """Count the parts of some shapes and time their products by a table of single ones."""
    works = [[count_part(shape, part) for part in PARTS] for shape in shapes]
    numbers = [
        np.array([[float(get(work)) for work in row] for row in works])
        for get in (
            lambda work: predict_products(work.products, table),
            lambda work: work.moved_bytes,
            lambda work: work.launches,
            lambda work: work.all_reduces,
        )
    ]
    return WorkTable(list(shapes), *numbers)


def predict_products(products: Sequence[tuple[int, int, int, int]], table: ProductTable) -> float:
    """Return the time of products one after the other [s]."""
    if not products:
        return 0.0
    frame = pd.DataFrame(products, columns=list(PRODUCTS[:4])).astype(np.float64)
    for name in PRODUCTS[4:]:
        frame[name] = 1.0 if name in ("product_forward", "product_reuse") else 0.0
    batch, m, n, k = (frame[name] for name in PRODUCTS[:4])
    values = (2 * batch * m * n * k, HALF_BYTES * batch * (m * k + k * n), HALF_BYTES * batch * m * n)
    sized = frame.assign(**dict(zip(FEATURES, values, strict=True)))
    return float(table.predict(sized).sum())


def index_shapes(rows: pd.DataFrame) -> tuple[list[Shape], Any]:
    """Return the distinct shapes of some rows, in order, and which one each row has."""
    distinct, place = np.unique(rows[SHAPE].to_numpy(np.int64), axis=0, return_inverse=True)
    return [Shape(*row) for row in distinct.tolist()], place.reshape(-1)


def count_parameters(rows: pd.DataFrame) -> Floats:
    """Return the parameters of every stage of each row, shape (rows, largest pipeline degree).

    A block has 12 h^2 + 13 h; embedding (first stage) and head (last) hold a table each, with one
    stage too, as the file's updates and gradients take that long.
    """
    hidden, pipeline = (rows[name].to_numpy(np.float64) for name in ("hidden", "pipeline"))
    blocks = rows["layers"].to_numpy(np.float64) / pipeline
    shapes, place = index_shapes(rows)
    words = np.array([float(shape.vocabulary) for shape in shapes])[place] * hidden
    parameters = blocks * (12 * hidden**2 + 13 * hidden) / rows["tensor"].to_numpy(np.float64)
    stage = np.arange(int(pipeline.max()))
    first, last = stage[None, :] == 0, stage[None, :] == pipeline[:, None] - 1
    inside = stage[None, :] < pipeline[:, None]
    return np.asarray(np.where(inside, parameters[:, None], 0.0) + words[:, None] * (1.0 * first + last))


GROUPS, PLANS, UNCALIBRATED = "vtrain-a100", "vtrain-a100-plans", "vtrain-a100-uncalibrated"
SETS = (GROUPS, PLANS, UNCALIBRATED)
"""Every row thrice: predicted without its model's size, without its plan, and with nothing fitted."""
FILE = "VIA-Research+vTrain/data/ground_truth_single.csv"
"""Key in a data folder."""
_ALL_REDUCES = "vtrain/all-reduce-a100"
"""Dataset of the all-reduces, given to every prediction and fitted to nothing here."""
COLUMNS: Mapping[str, str] = {
    "# GPUs": "gpus",
    "global batch": "batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tensor",
    "data parallelism": "data",
    "pipeline parallelism": "pipeline",
    "iteration time (ms)": "measured_s",
}
"""Columns of the file, and their names here; times become seconds."""
SHAPE = ["hidden", "heads", "sequence", "tensor", "micro_batch"]
"""Columns that say what one block computes on one rank."""


def read_iteration_times(data_folder: str | Path) -> pd.DataFrame:
    """Read every row of the file of iteration times [s], with ``micro_batches`` of one replica.

    Raises TableError when it is missing, lacks a column or holds a combination that no step can
    have.
    """
    path = Path(data_folder) / FILE
    try:
        frame = pd.read_csv(path, encoding="utf-8-sig")
    except FileNotFoundError:
        raise TableError(
            "no such file", file=path, fix="retrieve vtrain/iteration-times-a100, or name a mirror"
        ) from None
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise TableError(f"no column {', '.join(missing)}", file=path, fix="retrieve it again")
    frame = frame[list(COLUMNS)].rename(columns=COLUMNS)
    frame["measured_s"] = frame["measured_s"].map(ms_to_s)
    frame["micro_batches"] = frame["batch"] // (frame["data"] * frame["micro_batch"])
    _check_rows(frame, path)
    return frame


def _check_rows(frame: pd.DataFrame, path: Path) -> None:
    """Refuse rows whose degrees do not make the step that they name."""
    degrees = frame["tensor"] * frame["data"] * frame["pipeline"]
    whole = frame["data"] * frame["micro_batch"] * frame["micro_batches"]
    wrong = {
        "the degrees' product is not the number of GPUs": degrees != frame["gpus"],
        "the batch is not a whole number of micro-batches": whole != frame["batch"],
        "the layers do not fill the stages evenly": frame["layers"] % frame["pipeline"] != 0,
        "the time is not positive": ~(frame["measured_s"] > 0),
    }
    for problem, wrong_rows in wrong.items():
        if wrong_rows.any():
            row = int(np.flatnonzero(wrong_rows)[0])
            raise TableError(problem, file=path, place=f"row {row}", fix="retrieve it again")


@dataclass(frozen=True)
class AllReduceCurves:
    """Measured all-reduces: straight lines between sizes; beyond, the last bandwidth; below, the least time (latency).

    Ranks not measured: the nearest fewer (else more), as many wire bytes taking as long, the
    shortest time once a ring's step.
    """

    # By number of ranks: sizes [bytes], rising, and their times [s].
    sizes_bytes: Mapping[int, Floats]
    times_s: Mapping[int, Floats]

    def predict(self, ranks: int, size_bytes: Floats) -> Floats:
        """Return the times [s] of messages [bytes] among some ranks; nothing among one."""
        size_bytes = np.asarray(size_bytes, np.float64)
        if ranks == 1:
            return np.zeros_like(size_bytes)
        fewer = [known for known in self.sizes_bytes if known <= ranks]
        known = max(fewer) if fewer else min(self.sizes_bytes)
        sizes, times = self.sizes_bytes[known], self.times_s[known]
        wire = wire_factor("all_reduce", ranks) / wire_factor("all_reduce", known)
        steps = count_steps("all_reduce", ranks) / count_steps("all_reduce", known)
        like = np.interp(size_bytes * wire, sizes, times)
        like *= np.maximum(size_bytes * wire / sizes[-1], 1.0)
        return np.asarray(like + times[0] * (steps - 1.0), np.float64)

    def widen(self, ranks: int) -> float:
        """Return how much wider an interval is, as a logarithm, by doublings beyond the measured ranks."""
        most = max(self.sizes_bytes, default=ranks)
        return max(1.0, math.log2(ranks) / math.log2(most)) if ranks > most else 1.0


def read_all_reduces(data_folder: str | Path, rounds: Iterable[int] = (0, 1)) -> AllReduceCurves:
    """Read the all-reduces measured beside the iteration times, the mean of ``rounds`` (0 out of place, 1 in place).

    Raises TableError when a file is missing or breaks its format.
    """
    sizes, times = {}, {}
    for table in (table for table in PUBLIC_TABLES if table.dataset == _ALL_REDUCES):
        path = Path(data_folder) / table.key
        if not path.exists():
            raise TableError("no such file", file=path, fix=f"retrieve {_ALL_REDUCES}")
        samples = table.read(path)
        samples = samples[samples["round"].isin(list(rounds))]
        points = samples.groupby("message_bytes")["time_ns"].mean()
        ranks = int(samples["ranks"].iloc[0])
        sizes[ranks] = points.index.to_numpy(np.float64)
        times[ranks] = np.array([ns_to_s(time_ns) for time_ns in points])
    return AllReduceCurves(sizes, times)


EXACT_S = 1e-9
"""The file's times have six decimals of a millisecond: a nanosecond."""
_ALL_BUT = {
    "micro_batches": ["hidden", "layers", "tensor", "data", "pipeline", "micro_batch"],
    "data": ["hidden", "layers", "tensor", "pipeline", "micro_batch", "micro_batches"],
}


def check_composition(rows: pd.DataFrame, reduces: AllReduceCurves) -> pd.DataFrame:
    """Test relations between rows: ``CHECKS``; ``reduces``: all-reduces in place, what a table look-up would read."""
    deviations = {
        "a further micro-batch takes always the same time": _bend_of_micro_batches(rows),
        "two replicas take longer than one by the same time, whatever the micro-batches": _spread_of_replicas(rows),
        "two replicas take longer than one by an entry of the all-reduce table": _distance_to_table(rows, reduces),
    }
    listed = [
        (check, len(values), int((values <= EXACT_S).sum()), float(values.max(initial=0.0)))
        for check, values in deviations.items()
    ]
    return pd.DataFrame(listed, columns=CHECKS.names)


def _bend_of_micro_batches(rows: pd.DataFrame) -> Any:
    """Return how far times at 3 or 4 numbers of micro-batches lie off the line through two of them [s]."""
    bends = []
    for _, group in rows.sort_values("micro_batches").groupby(_ALL_BUT["micro_batches"]):
        counts, times = group[["micro_batches", "measured_s"]].to_numpy(np.float64).T
        if len(counts) > 2:
            slope = (times[1] - times[0]) / (counts[1] - counts[0])
            bends.append(np.abs(times - times[0] - slope * (counts - counts[0])).max())
    return np.array(bends)


def _extra_of_replicas(rows: pd.DataFrame) -> pd.DataFrame:
    """Return by how much two replicas take longer than one, of otherwise equal rows."""
    table = rows.pivot_table(index=_ALL_BUT["data"], columns="data", values="measured_s").reindex(columns=[1, 2])
    return (table[2] - table[1]).dropna().rename("extra_s").reset_index()


def _spread_of_replicas(rows: pd.DataFrame) -> Any:
    """Return the range of that time over micro-batches, for each model and plan [s]."""
    extra = _extra_of_replicas(rows)
    spread = extra.groupby(["hidden", "layers", "tensor", "pipeline"])["extra_s"].agg(np.ptp)
    return spread.to_numpy(np.float64)


def _distance_to_table(rows: pd.DataFrame, reduces: AllReduceCurves) -> Any:
    """Return how far that time is from the nearest measured all-reduce among two ranks [s]."""
    times = _extra_of_replicas(rows)["extra_s"].to_numpy(np.float64)
    table = reduces.times_s[2]
    inside = times[times <= table.max()]  # longer ones are beyond the table's largest message
    return np.abs(inside[:, None] - table[None, :]).min(axis=1)


MESSAGE = "message"
"""Column of a message between stages, the same in both directions."""


@dataclass(frozen=True)
class PartTimes:
    """Times of one step, the same on every rank of a stage."""

    # Of each stage its operators', for one micro-batch [s].
    forward_s: Sequence[Sequence[float]]
    backward_s: Sequence[Sequence[float]]
    update_s: Sequence[float]  # of each stage's optimizer [s]
    gradient_bytes: Sequence[int]  # all-reduced by the replicas, one message a stage [bytes]
    send_bytes: int  # from stage to stage for a micro-batch [bytes]


def build_step(times: PartTimes, micro_batches: int, data: int = 1, tensor: int = 1) -> TaskGraph:
    """Return the task graph of all ranks of a step; tensor-parallel all-reduces are part of their operators.

    Gradients travel in one message after a stage's last backward, as Megatron-DeepSpeed sends them:
    nothing computes meanwhile.
    """
    pipeline = len(times.update_s)
    names: list[tuple[str, str]] = []
    seconds: list[float] = []

    def add(name: str, phase: str, durations: Sequence[float]) -> range:
        names.extend((name, phase) for _ in durations)
        seconds.extend(durations)
        return range(len(seconds) - len(durations), len(seconds))

    stages = []
    for stage in range(pipeline):
        work = StageWork(
            add("forward", "forward", times.forward_s[stage]),
            add("backward", "backward", times.backward_s[stage]),
            add("update", "optimizer", [times.update_s[stage]]),
        )
        if data > 1:
            size = int(times.gradient_bytes[stage])
            work.buckets = [Bucket(("gradients",), (size,), work.backward[-1])]
            work.bucket_copy_s, work.bucket_return_s = [0.0], [0.0]
        if stage < pipeline - 1:
            work.send_bytes = [times.send_bytes] * micro_batches
        stages.append(work)
    # PyTorch's 1F1B refuses fewer micro-batches than stages, Megatron-LM's does not: the schedule is given.
    accumulate, pieces = (micro_batches, None) if pipeline == 1 else (1, micro_batches)
    plan = make_plan(data, tensor, pipeline, micro_batches=pieces, accumulate=accumulate)
    device_s = np.array(seconds)
    each = OperatorTimes(device_s, np.zeros_like(device_s), False)
    operators = as_columns(pd.DataFrame(names, columns=["name", "phase"]))
    builder = ProgramBuilder(
        plan=plan,
        kind=StagedRank,
        operators=operators,
        times=[each] * micro_batches,
        stages=stages,
        schedule=build_schedule("1f1b", pipeline, micro_batches),
        split=TensorSplit(operators),
        factors=(1.0,) * micro_batches,
    )
    builder.add_ranks()
    return builder.build()


@dataclass(frozen=True)
class StepFormula:
    """The length of a step's graph as a function of the times of its tasks."""

    # Names of times: ``forward0``, ``backward0``, ``update0`` and so on by stage, then ``message``.
    columns: tuple[str, ...]
    graph: DrawnGraph  # who waits for whom, each task for a second
    column_of: Ints  # column of each of the graph's items; both ends of a message are one

    def evaluate(self, times_s: Floats) -> Floats:
        """Return the length of the step [s], shape (...), from times of shape (columns, ...) [s]."""
        drawn = self.graph.run(self.column_of, times_s.reshape(len(times_s), -1))
        return drawn.step_s.reshape(times_s.shape[1:])


@cache
def formula_of(pipeline: int, micro_batches: int) -> StepFormula:
    """Return the formula of a number of stages and micro-batches, from trioflow's graph of them."""
    ones = [[1.0]] * pipeline
    graph = build_step(PartTimes(ones, ones, [1.0] * pipeline, [0] * pipeline, 1), micro_batches)
    phases = ("forward", "backward", "update")
    columns = (*(f"{phase}{stage}" for stage in range(pipeline) for phase in phases), MESSAGE)
    tasks = graph.tasks
    drawn = DrawnGraph(graph, tasks.assign(start_s=0.0, end_s=1.0))
    names = (tasks["name"] + tasks["rank"].astype(str)).mask(tasks["match_id"].notna(), MESSAGE)
    column_of = np.zeros(len(drawn.lengths_s), dtype=np.int64)
    column_of[drawn.item_of] = names.map(columns.index)
    return StepFormula(columns, drawn, column_of)


DEVICE = "a100-sxm4-80gb"
"""Sheet of the GPU, and shipped table of its products; the file says no more than A100."""
_UPDATE_BYTES = 28
"""Moved for each parameter by Adam in mixed precision: weight and both moments in single precision
read and written, gradient read and weight written in half precision [bytes]."""
SHARPNESS = 16.0
"""How sharply the slower of host and device takes over: the norm that joins them."""
_SOCKET_RANKS = 4
"""GPUs of one processor of the host: larger tensor groups join both."""


def list_fitted_parameters() -> pd.DataFrame:
    """Return the ten parameters, in the order of a vector of their values, with the limits that physics sets.

    Every fit begins at ``start``: a data sheet's or a usual value.
    """
    sheet = load_device(DEVICE)
    peak, memory = sheet.peak("fp16"), sheet.memory_bandwidth_bytes_per_s
    table = load_tensor_tables().tables[DEVICE]
    fastest = 1.0 / table.curve.coefficients[1] / peak  # of the table's slope over FLOPs
    rate = (0.7 * memory, 0.1 * memory, memory)
    rows = [
        ("product_time", "1", "time of GEMMs over the shipped table's", 1.0, fastest, 3.0),
        ("memory_rate", "bytes/s", "rate of everything in a block, embedding or loss that is not a product", *rate),
        ("launch_gap_s", "s", "device time of a kernel beyond its work", 5e-6, 1e-8, 1e-4),
        ("host_launch_s", "s", "host time between launches", 5e-5, 1e-6, 1e-3),
        ("host_tensor_s", "s", "further host time of a launch in a tensor-parallel group", 2e-6, 1e-8, 1e-3),
        (
            "host_sockets_s",
            "s",
            f"further host time of a launch in a tensor-parallel group of more than {_SOCKET_RANKS}",
            2e-6,
            1e-8,
            1e-3,
        ),
        ("reduce_wait_s", "s", "wait at a tensor-parallel all-reduce beyond the measured one's time", 5e-5, 1e-8, 1e-2),
        (
            "head_time",
            "1",
            "time of GEMMs with the vocabulary on one tensor-parallel rank over the shipped table's",
            1.0,
            fastest,
            20.0,
        ),
        ("message_rate", "bytes/s", "messages between stages", 2e10, 1e9, 6e11),
        ("update_rate", "bytes/s", f"optimizer, {_UPDATE_BYTES} bytes a parameter", *rate),
    ]
    return pd.DataFrame(rows, columns=["name", "unit", "meaning", "start", "low", "high"])


NAMES = tuple(list_fitted_parameters()["name"])
WAITS = ("share", "doublings")
"""How the wait at an all-reduce grows with the group: with the share of data that others hold, or
with the doublings of the ranks. A fold chooses by its training rows; all recompute, as the runs do."""


@dataclass
class StepModel:
    """Everything of some rows that does not depend on the parameters."""

    rows: pd.DataFrame  # as ``read_iteration_times`` returns them
    work: WorkTable
    shape_of: Any
    reduce_s: Floats  # tensor-parallel all-reduce of each shape's activations [s]
    # Shape (rows, stages): parameters held, and their gradients' all-reduce [s].
    parameters: Floats
    gradient_s: Floats
    # Factor on the logarithmic interval of each row: above 1 where an all-reduce joins more ranks
    # than were measured.
    widen: Floats
    groups: list[tuple[int, int, Any]]  # rows that share a graph

    @classmethod
    def build(cls, rows: pd.DataFrame, reduces: AllReduceCurves) -> StepModel:
        """Count the work of some rows and look up their all-reduces."""
        rows = rows.reset_index(drop=True)
        shapes, shape_of = index_shapes(rows)
        work = tabulate_work(shapes, load_tensor_tables().tables[DEVICE])
        reduce_s = np.array([reduces.predict(s.tensor, np.array([s.activation_bytes]))[0] for s in shapes])
        parameters = count_parameters(rows)
        gradient_s = np.zeros_like(parameters)
        for data, part in rows.groupby("data"):
            at = part.index.to_numpy()
            gradient_s[at] = reduces.predict(int(str(data)), HALF_BYTES * parameters[at])
        gradient_s[parameters == 0] = 0.0
        most = rows[["tensor", "data"]].max(axis=1)
        widen = np.array([reduces.widen(int(ranks)) for ranks in most])
        return cls(rows, work, shape_of, reduce_s, parameters, gradient_s, widen, _group(rows))

    def select(self, known: Any) -> StepModel:
        """Return the same of some rows alone, by their numbers."""
        rows = self.rows.iloc[known].reset_index(drop=True)
        return StepModel(
            rows,
            self.work,
            self.shape_of[known],
            self.reduce_s,
            self.parameters[known],
            self.gradient_s[known],
            self.widen[known],
            _group(rows),
        )

    def time_parts(self, values: Floats, wait: str) -> Floats:
        """Return the time of each shape's parts for one micro-batch, shape (vectors, shapes, parts) [s].

        ``values``: (vectors, parameters); ``wait``: of ``WAITS``.
        """
        value = {name: values[:, [number], None] for number, name in enumerate(NAMES)}
        work, tensor = self.work, np.array([float(s.tensor) for s in self.work.shapes])[:, None]
        growth = 1.0 - 1.0 / tensor if wait == WAITS[0] else np.log2(tensor)
        head = np.array([part.startswith("head") for part in PARTS])[None, :] & (tensor == 1)
        products_s = work.product_s * np.where(head, value["head_time"], value["product_time"])
        waits_s = work.all_reduces * (self.reduce_s[:, None] + value["reduce_wait_s"] * growth)
        device_s = (
            work.launches * value["launch_gap_s"] + products_s + work.moved_bytes / value["memory_rate"] + waits_s
        )
        launch_s = (
            value["host_launch_s"]
            + value["host_tensor_s"] * (tensor > 1)
            + value["host_sockets_s"] * (tensor > _SOCKET_RANKS)
        )
        host_s = work.launches * launch_s
        slower = np.maximum(device_s, host_s)
        other = np.minimum(device_s, host_s) / slower
        parts_s = np.asarray(slower * (1.0 + other**SHARPNESS) ** (1.0 / SHARPNESS))
        # Declared, not fitted: upstream's sample configuration of Megatron-DeepSpeed recomputes activations.
        parts_s[..., PARTS.index("block_backward")] += parts_s[..., PARTS.index("block_forward")]
        return parts_s

    def _stage_columns(self, values: Floats, parts_s: Floats, pipeline: int, at: Any) -> Floats:
        """Return the times of ``StepFormula.columns`` for some rows, (columns, vectors, rows) [s]."""
        parts = dict(zip(PARTS, np.moveaxis(parts_s, 2, 0), strict=True))
        shape = self.shape_of[at]
        blocks = self.rows["layers"].to_numpy(np.float64)[at] / pipeline
        update_rate = values[:, [NAMES.index("update_rate")]]
        columns = []
        for stage in range(pipeline):
            for direction in ("forward", "backward"):
                time_s = parts[f"block_{direction}"][:, shape] * blocks
                if stage == 0:
                    time_s = time_s + parts[f"embedding_{direction}"][:, shape]
                if stage == pipeline - 1:
                    time_s = time_s + parts[f"head_{direction}"][:, shape]
                columns.append(time_s)
            moved = _UPDATE_BYTES * self.parameters[at, stage]
            columns.append(self.gradient_s[at, stage] + moved / update_rate)
        sent = np.array([s.activation_bytes for s in self.work.shapes])[shape]
        columns.append(sent / values[:, [NAMES.index("message_rate")]])
        return np.stack(columns)

    def predict(self, values: Floats, wait: str) -> Floats:
        """Return the step of every row, shape (rows,) or (vectors, rows) [s], by ``values`` in the order of ``NAMES``."""
        several = np.atleast_2d(values)
        parts_s = self.time_parts(several, wait)
        times = np.zeros((len(several), len(self.rows)))
        for pipeline, micro_batches, at in self.groups:
            columns = self._stage_columns(several, parts_s, pipeline, at)
            times[:, at] = formula_of(pipeline, micro_batches).evaluate(columns)
        return times if np.ndim(values) == 2 else times[0]


def _group(rows: pd.DataFrame) -> list[tuple[int, int, Any]]:
    pairs = rows[["pipeline", "micro_batches"]].to_numpy(np.int64)
    distinct, which = np.unique(pairs, axis=0, return_inverse=True)
    return [(int(p), int(m), np.flatnonzero(which == at)) for at, (p, m) in enumerate(distinct)]
