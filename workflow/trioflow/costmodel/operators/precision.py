"""Operator times of steps in bf16 and fp16, whose products run on tensor cores, from models that were fitted in fp32.

`in_precision` is the door: it wraps a model into a `PrecisionModel`. Public operator times of whole training steps are
in fp32 and tf32. For steps in bf16 or fp16 the products, which tensor cores then compute many times faster, come from
tables of single bf16 products (`ProductTable`), fused attention from tables of its own (`AttentionTable`), convolutions
from the GPU whose convolutions were measured on tensor cores; all keep the share of the roofline that they reached
there. Everything else moves bytes, and its bytes are those of the precision already.

Grouped products of experts are priced as that many dense products of an expert's mean size. The only
public tables of them time whole layers of an inference engine's fused kernel (gate and up as one
product, activation, down, sum over a token's experts), tuned for some shapes and not for others.
Nothing is fitted to them: measured over predicted time of their layers is the band of every grouped
product.

Fused attention has its forward pass by tables, its gradient by published ratios. The tables are those of causal
attention of inference engines: FlashAttention 2 on A100 and L40S, FlashAttention 3 on Hopper, TensorRT-LLM's kernels on
Blackwell. PyTorch's own operators run FlashAttention 2 on Hopper and cuDNN's kernel, as fast as the tables', on
Blackwell, unless the step or an operator's name says otherwise.

References
----------
PyTorch, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (``check_prefer_cudnn_attention``: since 2.13, with a
cuDNN above 9.15, cuDNN comes first on Hopper too: ``--attention cudnn``); torchtitan, ``models/attention.py``.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cache, cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from trioflow.base.columns import Columns, as_columns
from trioflow.costmodel.features import (
    FEATURES,
    SHIPPED_MODELS,
    Floats,
    OperatorModel,
    RowCostModel,
    RowModel,
    Rows,
    base_class,
    plain_operator_name,
    read_model_file,
)
from trioflow.costmodel.new_gpu.carry import load_new_gpu_model, scale_rows
from trioflow.costmodel.new_gpu.rules import DEFAULT_RULE, Exponents, reachable_share
from trioflow.costmodel.operators.curves import (
    NOTHING_S,
    PRODUCT_CLASSES,
    PRODUCTS,
    Curve,
    Flags,
    class_positions,
    read_columns,
    sized_rows,
    work_matrix,
)
from trioflow.costmodel.operators.model import (
    OperatorCostModel,
    RowTimes,
    load_shipped_models,
    rescale_rows,
    resize_rows,
    roofline_times,
    with_times,
)
from trioflow.costmodel.uncertainty import ASSUMED_FACTOR, combine_intervals, find_band
from trioflow.hardware.machine import SUSTAINED_COMPUTE, DeviceSheet, find_device, load_device

SHAPE = (
    "attention_flop",
    "attention_queries",
    "attention_keys",
    "attention_size",
    "attention_heads",
    "attention_groups",
    "attention_share",
    "attention_backward",
    "attention_version",
)
"""Columns: FLOPs of one head of one sample, its queries, keys and size, heads of a sample, keys' heads
over queries' heads, the share of queries times keys that is computed, whether it is the gradient,
a version of ``VERSIONS``. 0 for no attention. Of a deterministic gradient the flag is ``DETERMINISTIC``."""

BLOCK = 128.0
"""Queries that one block of threads takes; the last wave of blocks is as long as a full one."""
HALF_BYTES = 2
VERSIONS = {"flash2": 2.0, "flash3": 3.0, "cudnn": 3.0}
"""What a step may run, and what stands for it: FlashAttention 2, or a kernel as fast as the tables'; 0 where PyTorch chooses."""
NAMED = {"flash_attn_3": 3.0, "cudnn_attention": 3.0, "flash_attn::": 2.0}
"""Versions by what is in the names of operators."""
DETERMINISTIC = 1.5
"""Times that the gradient takes in deterministic mode: Megatron-LM's functional tests of 7 B with it and without."""
BACKWARD_FLOP, BACKWARD_SHARES = 2.5, (0.63, 0.73)
"""Five products against two; shares of the peak that the backward and the forward pass reach on an
A100 (T. Dao, FlashAttention-2, arXiv 2307.08691, abstract and section 4.1)."""


class AttentionTable(Struct, frozen=True):
    """Fitted causal attention of one GPU."""

    # A launch [s], computing [s/flop], exponentials [s], bytes of queries and results and of keys
    # and values [s/byte], a row of queries [s], a token [s], a key that one block passes [s].
    coefficients: tuple[float, ...]
    # Times that FlashAttention 2 takes of the table's kernel, least and most; 1 where it is the table's.
    version_2: tuple[float, float]
    pytorch_version: float  # Of ``VERSIONS``: what PyTorch's own operators run
    low_log: float  # 80 % of held-out logarithms of measured over predicted time
    high_log: float
    rows: int  # Shapes that it was fitted to
    largest_flop: float  # Of the largest of them [flop]
    # Mean absolute relative error of those of ``LARGE_FLOP`` or more whose number and size of heads
    # were left out.
    held_out_error: float
    sm_count: int  # Multiprocessors of the GPU

    def predict(self, rows: Rows) -> Floats:
        """Return the time [s] of rows with the columns ``SHAPE``, whose ``flop`` is what is computed.

        The gradient's computing takes 2.5 times the forward's FLOPs at its share of the peak in
        relation to the forward's; all else of it moves as many times more.
        """
        shape = read_columns(rows, SHAPE)
        each = np.where(shape[:, 0] > 0, shape[:, 0], 1.0)
        heads = np.asarray(rows["flop"], np.float64) / each
        queries, keys, size, of_sample, groups, share = shape[:, 1:7].T
        terms = attention_terms(heads, queries, keys, size, of_sample, groups, share, self.sm_count)
        terms = terms * np.asarray(self.coefficients)
        terms[:, 1:3] *= np.where(self._runs_2(rows), sum(self.version_2) / 2, 1.0)[:, None]
        backward = BACKWARD_FLOP * BACKWARD_SHARES[1] / BACKWARD_SHARES[0] * shape[:, 7]
        return np.asarray(terms.sum(axis=1) * np.where(shape[:, 7] > 0, backward, 1.0), np.float64)

    def _runs_2(self, rows: Rows) -> npt.NDArray[np.bool_]:
        version = np.asarray(rows["attention_version"], np.float64)
        return np.asarray(np.where(version == 0, self.pytorch_version, version) == VERSIONS["flash2"])

    def spread(self, rows: Rows) -> tuple[Floats, Floats]:
        """Return the logarithms of the interval's ends of rows, published ratios included."""
        least, most = (math.log(2 * end / sum(self.version_2)) ** 2 for end in self.version_2)
        older = self._runs_2(rows)
        ratio = math.log(BACKWARD_SHARES[1] / BACKWARD_SHARES[0]) ** 2 * (np.asarray(rows["attention_backward"]) > 0)
        return -np.sqrt(self.low_log**2 + least * older + ratio), np.sqrt(self.high_log**2 + most * older + ratio)


def attention_columns(
    operators: Rows, causal: bool, version: float = 0.0, deterministic: bool = False
) -> dict[str, Floats]:
    """Return the columns ``SHAPE`` of operators; zeros where there is none.

    A causal kernel computes half of queries times keys, where there are as many of both. ``version``: what runs
    where names do not say so.
    """
    names = operators["name"].tolist()
    shapes = np.zeros((len(names), len(SHAPE)))
    if "input_shapes" in operators:
        for row, (name, given) in enumerate(zip(names, operators["input_shapes"].tolist(), strict=True)):
            if "attention" in name or "flash_attn" in name:
                shapes[row] = _describe(name, given, causal, version, deterministic)
    return dict(zip(SHAPE, shapes.T, strict=True))


def _describe(name: str, given: object, causal: bool, version: float, deterministic: bool) -> tuple[float, ...]:
    """Return one operator's columns from its name and the shapes of its inputs."""
    if given is None or isinstance(given, float):
        return (0.0,) * len(SHAPE)
    shapes = [tuple(int(size) for size in shape) for shape in given]  # type: ignore[attr-defined]
    backward = plain_operator_name(name)[1]
    images = [shape for shape in shapes if len(shape) == 4][backward : backward + 3]
    if len(images) < 3:
        return (0.0,) * len(SHAPE)
    query, key, value = images
    # PyTorch's own kernels take samples, heads, positions; the library's samples, positions, heads.
    by_rows = plain_operator_name(name)[0] in ("flash_attention_forward", "efficient_attention_forward")
    heads, place = (2, 1) if by_rows or "flash_attn" in name else (1, 2)
    products = (3 * query[3] + 2 * value[3]) if backward else (query[3] + value[3])
    share = 0.5 if causal and query[place] == key[place] else 1.0
    return (
        2.0 * query[place] * key[place] * products * share,
        float(query[place]),
        float(key[place]),
        (query[3] + value[3]) / 2,
        float(query[heads]),
        key[heads] / max(query[heads], 1),
        share,
        backward * (DETERMINISTIC if deterministic else 1.0),
        version or next((number for word, number in NAMED.items() if word in name), 0.0),
    )


def attention_terms(
    heads: Floats,
    queries: Floats,
    keys: Floats,
    size: Floats,
    of_sample: Floats,
    groups: Floats,
    share: Floats,
    sm_count: int,
) -> Floats:
    """Return what the time of attention is made of, shape (rows, 8).

    Every term is monotone in every size and grows at most in proportion to heads.
    """
    waves = np.ceil(heads * np.ceil(queries / BLOCK) / sm_count)
    pairs = waves * sm_count * BLOCK * keys * share
    rows = heads * queries
    moved = 2 * HALF_BYTES * size
    return np.column_stack(
        [
            np.ones(len(heads)),
            4 * pairs * size,
            4 * pairs,
            moved * rows,
            moved * heads * keys * groups,
            rows,
            rows / np.maximum(of_sample, 1.0),
            keys * (heads > 0),
        ]
    )


KIND, FORMAT = "tensor_products", 5
SHIPPED_FILE = SHIPPED_MODELS / "tensor-products" / "model.json"
HALF = ("bf16", "fp16")
"""Precisions that the tables stand for; both run at the same rate on every GPU that has both."""
GROUPED = "gemm/grouped"
"""Kind of operator that the band belongs to."""
SCALED = {"fp8": "fp8", "fp8-block": "fp8_block"}
"""What tables call products in FP8, by format: a scale for each tensor, or for 128 values of a row."""
POWER_RULE = Exponents(power=0.446083965, saturation=2.058899995, short_s=0.0, shape=1.0)
"""Share of the peak of tensor cores that a board's power sustains in a step, by its power limit over the peak rate in half
precision [W per Tflop/s]. Two boards give its two numbers: an A100's computing takes 1.156 times as long in a step as in
the table's loop (``SUSTAINED_COMPUTE``), an H100's 1.40, which of 1.32, 1.40 and 1.48 has the least median and mean error of
nanotron's 91 runs of 1.34 B parameters on 1 and 2 nodes. Boards left out: docs/cost_models.md. An operation in FP8 is
taken to draw half of what one in bf16 draws, in tf32 twice, as their peaks go: a board sustains the same share of each."""


class ProductTable(Struct, frozen=True):
    """Fitted products of one GPU."""

    curve: Curve  # Time of a product from its FLOPs, bytes and sizes
    low_log: float  # 80 % of held-out logarithms of measured over predicted time
    high_log: float
    products: int  # Products that it was fitted to
    largest_flop: float  # Of the largest of them [flop]
    # Mean absolute relative error of products whose weight shape was left out: of all, and of those
    # of ``LARGE_FLOP`` or more.
    held_out_error: float
    held_out_large_error: float
    held_out_sum_error: float  # Signed relative error of the sum of all of them
    # What the calls measured took to bring an element of the left factor into FP8 [s]: no part of
    # what `predict` returns; their errors and bands are those of whole calls.
    cast_s: float = 0.0

    def compute(self, peak_flop_per_s: float) -> float:
        """Return the time of the largest products, of what they take at a peak."""
        return self.curve.coefficients[1] * peak_flop_per_s

    def predict(self, rows: Rows) -> Floats:
        """Return the time [s] of products, columns of ``curves.PRODUCTS`` and sizes."""
        return self.curve.predict(work_matrix(rows))


class ExpertBand(Struct, frozen=True):
    """Measured over predicted time of layers of experts on one GPU."""

    low_log: float  # 80 % of the logarithms
    high_log: float
    median_ratio: float
    layers: int  # Measured layers


class TensorTables(Struct, frozen=True):
    """What was measured on tensor cores, by the name of the device's sheet."""

    tables: Mapping[str, ProductTable]  # Products in half precision
    attention: Mapping[str, AttentionTable]
    experts: Mapping[str, ExpertBand]  # Grouped products
    scaled: Mapping[str, Mapping[str, ProductTable]]  # Products in a format of ``SCALED``


@cache
def load_tensor_tables(path: str | Path = SHIPPED_FILE) -> TensorTables:
    """Read tables, by default those that ship; InputError where the file is missing or another."""
    return read_model_file(path, KIND, "a table of tensor products", {"format": FORMAT}, TensorTables)


def sustained_time(sheet: DeviceSheet, alone: float) -> float:
    """Return the time that computing takes in a step on a board, of what it takes at the peak of tensor cores.

    As its sheet says, else by ``POWER_RULE``; of a board whose power is unknown as much more than ``alone``,
    a half-precision table's own, as an A100's.
    """
    watts = sheet.power_limit_w * 1e12 / max(map(sheet.peak, HALF))
    if sheet.sustained_compute is not None or math.isinf(watts):
        return alone + (sheet.sustained_compute or SUSTAINED_COMPUTE) - 1.0
    return float(1.0 / reachable_share(np.array([watts]), POWER_RULE)[0])


def nearest_table(tables: Iterable[str], target: DeviceSheet, precision: str) -> str | None:
    """Return the device whose table is nearest to a target: itself, its chip, then by rates."""
    return min(sorted(tables), key=lambda name: load_device(name).distance(target, precision), default=None)


ATTENTION = "attention"
_UNKNOWN_MASK = 2.0
"""Attention of which nobody says whether it is causal is taken to be; without a mask it computes this
many times as much."""
_SINGLE, _CONVOLUTION = "products", "convolutions"
"""With ``SCALED`` and ``ATTENTION``: what prices an operator instead of the base."""
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_TABLE_PRECISION, FP8 = "bf16", "fp8"
ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, FP8: 1}


class TableSource(Struct, frozen=True):
    """Where times on tensor cores come from."""

    sheet: DeviceSheet  # GPU that was measured
    precision: str  # What it was measured in
    row_times: RowTimes  # Its times
    # What each operator, which ran alone in a loop, takes more in a step: of the time that its computing takes at
    # the target's peak.
    more: float = 0.0

    def carry(self, rows: Columns, target: DeviceSheet, precision: str) -> Columns:
        """Return the times of rows on another GPU and in another precision, with the interval of `NewGpuModel`'s rule.

        Bytes are the precision's. Beyond a launch a row keeps its share of the roofline, first at
        the other precision, then on the other GPU (``carry.scale_trace``), never above it.
        Computing alone is slower in a step, by ``more``.
        """
        element = ELEMENT_BYTES[self.precision] / ELEMENT_BYTES[precision]
        there = rows.assign(**{name: rows[name] * element for name in ("read_bytes", "write_bytes")})
        launch_s = self.row_times(rows.assign(**dict.fromkeys((*FEATURES, *PRODUCTS), np.zeros(rows.rows))))
        before = roofline_times(there, self.sheet, self.precision)
        after = roofline_times(rows, self.sheet, precision)
        share = np.divide(after, before, out=np.ones_like(after), where=before > 0)
        time_s = launch_s + np.maximum(self.row_times(there) - launch_s, 0.0) * share
        timed, rule = rows.assign(time_s=time_s), load_new_gpu_model()
        prices = scale_rows(timed, self.sheet, target, DEFAULT_RULE, precision, rule, 0.0)
        prices = with_times(prices, np.maximum(prices["time_s"], roofline_times(rows, target, precision)))
        share = np.minimum(rows["flop"] / target.peak(precision) / np.maximum(prices["time_s"], NOTHING_S), 1.0)
        return with_times(prices, prices["time_s"] * (1.0 + self.more * share))


class PrecisionModel(RowCostModel, Struct, frozen=True, dict=True):
    """Predicts operators of a step in tf32, bf16 or fp16 on one GPU; `in_precision` makes it."""

    base: RowModel  # Of the GPU; predicts all but products and convolutions
    sheet: DeviceSheet
    precision: str  # tf32, bf16 or fp16
    # Sheets of the GPUs whose tables of products and of fused attention are used, None where the base's own are of this
    # precision; and whose convolutions were measured on tensor cores, None likewise.
    source: str | None
    attention_source: str | None
    convolutions: OperatorCostModel | None
    causal: bool | None = None  # Whether attention masks what follows; None where nobody says
    # Version of attention's kernel (``VERSIONS``), 0 where nobody says, and whether it is deterministic.
    kernel: tuple[float, bool] = (0.0, False)

    @cached_property
    def table(self) -> ProductTable | None:
        """Products in this precision."""
        return load_tensor_tables().tables[self.source] if self.source else None

    @cached_property
    def attention(self) -> AttentionTable | None:
        """Fused attention in this precision."""
        return load_tensor_tables().attention[self.attention_source] if self.attention_source else None

    @property
    def device_name(self) -> str:
        """Name of the GPU, as its driver reports it."""
        return self.base.device_name

    @property
    def method(self) -> str:
        """Method of the base, and where products and convolutions come from."""
        parts = [self.base.method]
        if self.table is not None:
            parts.append(f"{self.precision} GEMMs of {self.source}")
        if self.attention is not None:
            parts.append(f"attention of {self.attention_source}")
        if self.convolutions is not None:
            measured = find_device(self.convolutions.device_name, own=False).name
            parts.append(f"convolutions by the roofline share of {measured}")
        return "; ".join(parts)

    def price(self, operators: Columns) -> Columns:
        """Predict operators from their names and sizes; see ``OperatorModel``."""
        rows = self._with_attention(sized_rows(operators, products=True), operators)
        prices = {name: column.copy() for name, column in self.base.price(operators).items()}
        for chosen, priced in self._parts(rows):
            for name in ("time_s", "low_s", "high_s"):
                prices[name][chosen] = priced[name]
            prices["extrapolated"][chosen] = self._outside(rows.take(chosen))
        return Columns(prices)

    def reprice(self, operators: Columns, target: Columns) -> Columns:
        """Predict recorded operators at other sizes; unchanged sizes keep the recorded time."""
        prices = self.base.reprice(operators, target)
        sizing = resize_rows(operators, target, products=True)
        rows, resized = (self._with_attention(each, operators) for each in (sizing.rows, sizing.resized))
        sizing = structs.replace(sizing, rows=rows, resized=resized)
        known = self._kinds(rows) != ""
        outside = np.where(known, self._outside(resized) & ~sizing.unchanged, prices["extrapolated"])
        return with_times(prices, rescale_rows(sizing, self.row_times, waves=False)).assign(extrapolated=outside)

    def row_times(self, rows: Rows) -> Floats:
        """Predict the time [s] of rows as ``curves.sized_rows`` returns them."""
        columns = as_columns(rows)
        times = self.base.row_times(columns).copy()
        for chosen, priced in self._parts(columns):
            times[chosen] = priced["time_s"]
        return times

    def step_interval(self, kind: str = "rescale", distance: float | None = None) -> tuple[float, float]:
        """Return the base's interval of a step; ``predict`` joins the spread of the table's products.

        Either end is at least as far away as an A100's sustained rate: by more the table's products were slowed.
        """
        interval = self.base.step_interval(kind, distance)
        if kind != "predict" or self.table is None:
            return interval
        low, high = self._spread(self.table.low_log, self.table.high_log, _TABLE_PRECISION)
        least, most = combine_intervals(interval, (math.exp(low), math.exp(high)))
        return min(least, 1.0 / SUSTAINED_COMPUTE), max(most, SUSTAINED_COMPUTE)

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say what the step interval was estimated from."""
        basis = self.base.step_interval_basis(kind)
        if kind != "predict" or self.table is None:
            return basis
        return f"{basis}; {self.table.products} products of {self.source}, weight shapes left out"

    def _parts(self, rows: Columns) -> Iterable[tuple[Flags, Columns]]:
        """Yield the rows that are not the base's, with ``time_s``, ``low_s`` and ``high_s`` [s]."""
        kinds = self._kinds(rows)
        prices = {ATTENTION: self._price_attention, _CONVOLUTION: self._price_convolutions}
        for kind in sorted({*kinds.tolist()} - {""}):
            chosen = kinds == kind
            price = prices.get(kind, partial(self._price_products, kind))
            yield chosen, price(rows.take(chosen))

    def _kinds(self, rows: Columns) -> npt.NDArray[np.str_]:
        """Return what prices each row: a format of ``SCALED``, a table of products or attention, convolutions, or nothing.

        Products need known sizes; attention of unknown shapes counts as a product.
        """
        classes = rows["operator_class"]

        def based(*names: str) -> Flags:
            rows_of: Flags = classes.holds(lambda name: base_class(name) in names)
            return rows_of

        computes, sized = rows["flop"] > 0, rows[PRODUCTS[0]] > 0
        tabled, fused = self.table is not None, computes & (rows.get("attention_flop", 0.0) > 0)
        formats = [classes.isin([f"gemm/{kind}", f"{GROUPED}/{kind}"]) for kind in SCALED]
        products = sized & based(*PRODUCT_CLASSES - _CONVOLUTIONS) | computes & based(ATTENTION)
        convolutions = computes & based(*_CONVOLUTIONS) & (self.convolutions is not None)
        chosen = [*(tabled & sized & named for named in formats), fused, tabled & products, convolutions]
        return np.select(chosen, [*SCALED, ATTENTION, _SINGLE, _CONVOLUTION], "")

    def _price_products(self, kind: str, rows: Columns) -> Columns:
        """Price products by the table of a format of ``SCALED``, or else of half precision."""
        assert self.table is not None and self.source is not None
        name, table, measured, precision = self.source, self.table, _TABLE_PRECISION, self.precision
        ends = self._spread(table.low_log, table.high_log, measured)
        if kind in SCALED:
            tables = load_tensor_tables().scaled[kind]
            name = str(nearest_table(tables, self.sheet, FP8))
            table, measured, precision = tables[name], FP8, FP8
            ends = table.low_log, table.high_log
        # Grouped products' intervals hold what layers of experts missed.
        grouped, experts = rows["operator_class"].holds(lambda c: c.startswith(GROUPED)), load_tensor_tables().experts
        low, high = (np.full(rows.rows, end) for end in ends)
        if grouped.any():
            low = np.where(grouped, np.minimum(low, experts[name].low_log), low)
            high = np.where(grouped, np.maximum(high, experts[name].high_log), high)
        source = TableSource(load_device(name), measured, table.predict, self._more(table, name, measured))
        priced = self._price(source, rows, low, high, precision)
        if kind in SCALED or source.sheet.is_same_gpu(self.sheet):
            return priced
        # No longer than this GPU's vector units take: tensor cores are beside them.
        ratio = np.minimum(self.base.row_times(rows) / np.maximum(priced["time_s"], NOTHING_S), 1.0)
        return Columns({name: column * ratio for name, column in priced.items()})

    def _price_attention(self, rows: Columns) -> Columns:
        assert self.attention is not None
        more = self._more(self.table, str(self.source)) if self.table is not None else 0.0
        source = TableSource(load_device(str(self.attention_source)), _TABLE_PRECISION, self.attention.predict, more)
        masked = rows.assign(flop=rows["flop"] * rows["attention_share"])
        log_factor = math.log(_UNKNOWN_MASK) if self.causal is None else 0.0
        low, high = self.attention.spread(masked)
        return self._price(source, masked, low, np.hypot(high, log_factor), self.precision)

    def _price_convolutions(self, rows: Columns) -> Columns:
        model = self.convolutions
        assert model is not None
        measured = str(class_precision(model, "convolution"))
        source = TableSource(find_device(model.device_name, own=False), measured, model.row_times)
        low, high = np.zeros(rows.rows), np.zeros(rows.rows)
        for name, phase, at in class_positions(rows):
            band = find_band(model.predict_bands, name, phase)
            low[at], high[at] = self._spread(band.low_log, band.high_log, measured)
        return self._price(source, rows, low, high, self.precision)

    def _more(self, table: ProductTable, name: str, measured: str = _TABLE_PRECISION) -> float:
        """Return how much more computing takes in a step than in a table's loop, at the peak's rate."""
        alone = table.compute(load_device(name).peak(measured))
        half = self.table.compute(load_device(str(self.source)).peak(_TABLE_PRECISION)) if self.table else alone
        return max(sustained_time(self.sheet, half) - alone, 0.0)

    def _price(self, source: TableSource, rows: Columns, low_log: Floats, high_log: Floats, precision: str) -> Columns:
        """Return the times of rows with the interval of the source and of carrying them over."""
        prices = source.carry(rows, self.sheet, precision)
        time_s = prices["time_s"]
        low, high = (
            np.exp(sign * np.hypot(np.log(prices[end] / time_s), log))
            for sign, end, log in ((-1, "low_s", low_log), (1, "high_s", high_log))
        )
        return Columns({"time_s": time_s, "low_s": time_s * low, "high_s": time_s * high})

    def _spread(self, low_log: float, high_log: float, measured: str) -> tuple[float, float]:
        """Return a measured spread, joined with an assumed one where the precision is another."""
        if _same_rate(measured, self.precision):
            return low_log, high_log
        assumed = math.log(ASSUMED_FACTOR)
        return -math.hypot(low_log, assumed), math.hypot(high_log, assumed)

    def _with_attention(self, rows: Columns, operators: Columns) -> Columns:
        """Return rows with the shapes of fused attention, where a table of it is used."""
        if self.attention is None:
            return rows
        return rows.assign(**attention_columns(operators, self.causal is not False, *self.kernel))

    def _outside(self, rows: Columns) -> Flags:
        """Return which products no table holds: batched, convolutions, gradients of attention, the largest."""
        classes, flop = rows["operator_class"], rows["flop"]
        inside = classes.isin(["gemm"]) & (flop <= (0.0 if self.table is None else self.table.largest_flop))
        for kind in SCALED if self.table is not None else ():
            tables = load_tensor_tables().scaled[kind]
            name = nearest_table(tables, self.sheet, FP8)
            if name and load_device(name).is_same_gpu(self.sheet):
                inside |= classes.isin([f"gemm/{kind}"]) & (flop <= tables[name].largest_flop)
        if self.attention is not None:
            forward = (self._kinds(rows) == ATTENTION) & (rows["attention_backward"] == 0)
            inside |= forward & (flop <= self.attention.largest_flop)
        return np.asarray(~inside | (not _same_rate(_TABLE_PRECISION, self.precision)), dtype=bool)


def in_precision(
    model: RowModel,
    sheet: DeviceSheet,
    precision: str,
    causal: bool | None = None,
    kernel: tuple[float, bool] = (0.0, False),
) -> RowModel:
    """Return a model for steps of a precision: itself, or with products and convolutions of it.

    Classes fitted in the precision (fact ``precisions``) stay as they are, and so does a model of a
    GPU without tensor cores for it. A step that says fp32 is left to the model too: what a library
    calls fp32 convolutions are tf32 where nobody switched that off. ``causal``: None where unknown.
    ``kernel``: of attention, as of `PrecisionModel`.
    """
    if not sheet.runs_on_tensor_cores(precision) or precision not in ELEMENT_BYTES:
        return model
    fitted = class_precision(model, "gemm")
    own = _same_rate(fitted, precision) or (fitted is None and precision not in HALF)
    source = None if own else nearest_table(load_tensor_tables().tables, sheet, precision)
    measured = class_precision(model, "convolution")
    convolutions = None if _same_rate(measured, precision) else measured_convolutions()
    if source is None and convolutions is None:
        return model
    attention = load_tensor_tables().attention if precision in HALF and source is not None else {}
    fused = nearest_table(attention, sheet, precision)
    return PrecisionModel(model, sheet, precision, source, fused, convolutions, causal, kernel)


@cache
def measured_convolutions() -> OperatorCostModel | None:
    """Return the shipped model whose convolutions were measured on tensor cores; None without one."""
    for model in load_shipped_models().values():
        precision = class_precision(model, "convolution")
        if precision and model.sheet and model.sheet.runs_on_tensor_cores(precision):
            return model
    return None


def _same_rate(one: str | None, other: str) -> bool:
    """Return whether products of two precisions run at one rate: the same, or both halves."""
    return one == other or (one in HALF and other in HALF)


def class_precision(model: OperatorModel, operator_class: str) -> str | None:
    """Return the precision that a class of products was fitted in; None where it does not say."""
    if isinstance(model, PrecisionModel):
        return model.precision
    known = dict(getattr(model, "facts", None) or {}).get("precisions") or {}
    base = getattr(model, "base", None)  # of a model carried over from another GPU
    if not known and base is not None and operator_class == "gemm":
        return class_precision(base, operator_class)
    precision = known.get(operator_class)
    return str(precision) if precision else None
