"""The tables of half precision and FP8 that ship (`build_tensor_products`): single products, layers of experts, attention.

Fitted to aiconfigurator's public tables of inference engines, a table for each GPU that it publishes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from msgspec import structs
from trioflow.base.errors import InputError
from trioflow.base.provenance import write_json
from trioflow.costmodel.features import FEATURES, Floats, to_json
from trioflow.costmodel.fits.curves import SHORTEST_S, choose_least, solve_nonnegative, split_groups
from trioflow.costmodel.operators.curves import (
    NO_TILES,
    PRODUCTS,
    TILE_SETS,
    Curve,
    fill_device,
    join_times,
    problem_sizes,
    rounded,
    work_matrix,
)
from trioflow.costmodel.operators.precision import (
    FORMAT,
    KIND,
    SCALED,
    SHIPPED_FILE,
    VERSIONS,
    AttentionTable,
    ExpertBand,
    ProductTable,
    TensorTables,
    attention_terms,
)
from trioflow.costmodel.uncertainty import COVERAGE
from trioflow.datasets.catalogue import HALF_ATTENTION, HALF_EXPERTS, HALF_PRODUCTS, SINGLE_PRODUCTS, load_catalogue
from trioflow.hardware.machine import DeviceSheet, find_device, load_device

_RESULT_BYTES = 2

_FACTOR_BYTES = {"bfloat16": 2, "fp8": 1, "fp8_block": 1}
"""Of an element of a product's factors, by what the tables call their format; its result is in bf16."""


def _read_tables(data_folder: str | Path, datasets: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield aiconfigurator's tables, each with the sheet of its GPU."""
    for file in load_catalogue().held_files(data_folder, datasets):
        table = pd.read_parquet(file)
        yield find_device(str(table["device"].iloc[0])).name, table


def read_tensor_products(
    data_folder: Path, datasets: Sequence[str] = SINGLE_PRODUCTS, kind: str = "bfloat16"
) -> list[pd.DataFrame]:
    """Return matrix products, a table a GPU that aiconfigurator publishes any of; ``kind``: of ``_FACTOR_BYTES``."""
    frames = []
    for device, whole in _read_tables(data_folder, datasets):
        table = whole[whole["gemm_dtype"] == kind]
        if table.empty:
            continue
        medians = table.groupby(["m", "n", "k"], sort=True)["latency"].median().reset_index()
        m, n, k = (medians[key].to_numpy(np.float64) for key in ("m", "n", "k"))
        ones, zeros = np.ones(len(medians)), np.zeros(len(medians))
        values = (ones, m, n, k, ones, zeros, zeros, ones)
        rows = pd.DataFrame(dict(zip(PRODUCTS, values, strict=True)))
        rows["flop"] = 2 * m * n * k
        rows["read_bytes"] = _FACTOR_BYTES[kind] * (m * k + k * n)
        rows["write_bytes"] = _RESULT_BYTES * m * n
        rows["time_s"] = medians["latency"].to_numpy(np.float64) * 1e-3
        texts = {
            "operator_class": "gemm",
            "phase": "forward",
            "device": device,
            "precision": "bf16" if kind == "bfloat16" else "fp8",
        }
        frames.append(rows.assign(count=1, floor_s=0.0, **texts))
    return frames


SPEEDUPS = {"GH100": (1.5, 2.0), "GB100": (1.5, 2.7)}
"""The tables' kernels over FlashAttention 2, by chip: FlashAttention 3 over 2, forward, on an H100 (J. Shah et al., arXiv
2407.08608, abstract); on a B200 FlashAttention 4 over Triton's kernel (T. Zadouri et al., arXiv 2603.05451, abstract, from
memory), which stands for FlashAttention 2 there."""

_PYTORCH_RUNS_2 = "GH100"
"""Chip on which PyTorch's own operators run FlashAttention 2 although there is a faster kernel."""

_LEAST_SEQUENCE = 256

LARGE_FLOP = 1e9
"""Shorter operators last as long as their launch; what they miss by counts little in a step."""

FOLDS = 5

ROUNDS, OUTLIER = 6, 0.15
"""Of the fit; a row that misses by more than the second loses weight."""


def fit_attention(data_folder: str | Path) -> dict[str, AttentionTable]:
    """Fit the attention of every GPU that has a table, by sheet; InputError where there is none.

    A table of one head size takes the ratio of exponentials to products from the others, in proportion to what a
    multiprocessor multiplies in a clock: its exponentials are as many on all of them. Folds leave out a number of
    heads and a size.
    """
    tables = {str(table["device"].iloc[0]): table for table in _read_attention(Path(data_folder))}
    if not tables:
        raise InputError(
            "no table of fused attention",
            file=data_folder,
            fix=f"retrieve the datasets {', '.join(HALF_ATTENTION)} first",
        )
    several = {name for name, table in tables.items() if table["size"].nunique() > 1}
    fitted = {name: _fit_attention_of(name, tables[name], None) for name in sorted(several)}
    ratios = [table.coefficients[2] / table.coefficients[1] / _flop_a_clock(name) for name, table in fitted.items()]
    ratio = float(np.mean(ratios)) if ratios else 0.0
    return fitted | {
        name: _fit_attention_of(name, tables[name], ratio * _flop_a_clock(name))
        for name in sorted(set(tables) - several)
    }


def _flop_a_clock(name: str) -> float:
    sheet = load_device(name)
    return sheet.peak("bf16") / sheet.sm_count / sheet.numbers["boost_clock_hz"]


def _fit_attention_of(name: str, table: pd.DataFrame, ratio: float | None) -> AttentionTable:
    sheet = load_device(name)
    sizes = [table[key].to_numpy(np.float64) for key in ("batch", "sequence", "size", "heads")]
    batch, sequence, size, heads = sizes
    groups = table["groups"].to_numpy(np.float64) / heads
    share = np.full(len(table), 0.5)
    terms = attention_terms(batch * heads, sequence, sequence, size, heads, groups, share, sheet.sm_count)
    time_s = table["time_s"].to_numpy(np.float64)
    folds = table.groupby(["heads", "size"]).ngroup().to_numpy() % FOLDS
    held_out = np.zeros(len(table))
    for known, left in split_groups(folds):
        held_out[left] = terms[left] @ _solve(terms[known], time_s[known], ratio)
    low, high = np.quantile(np.log(time_s / held_out), COVERAGE)
    flop = 2 * batch * heads * sequence**2 * size
    return AttentionTable(
        tuple(float(value) for value in _solve(terms, time_s, ratio)),
        SPEEDUPS.get(sheet.chip, (1.0, 1.0)),
        VERSIONS["flash2" if sheet.chip == _PYTORCH_RUNS_2 else "cudnn"],
        min(rounded(low), 0.0),
        max(rounded(high), 0.0),
        len(table),
        float(flop.max()),
        float(np.abs(held_out / time_s - 1)[flop >= LARGE_FLOP].mean()),
        sheet.sm_count,
    )


def _solve(terms: Floats, time_s: Floats, ratio: float | None) -> Floats:
    """Return the coefficients of the terms; that of exponentials from the ratio where one is given."""
    columns = terms if ratio is None else np.delete(terms, 2, axis=1)
    if ratio is not None:
        columns[:, 1] += ratio * terms[:, 2]
    scale = columns.max(axis=0)
    weights = 1 / time_s
    for _ in range(ROUNDS):
        solution, _ = solve_nonnegative(columns / scale * weights[:, None], time_s * weights)
        missed = np.sum(columns / scale * solution, axis=1) / time_s - 1
        weights = 1 / (time_s * np.sqrt(1 + (missed / OUTLIER) ** 2))
    coefficients = solution / scale
    return coefficients if ratio is None else np.insert(coefficients, 2, ratio * coefficients[1])


def _read_attention(data_folder: Path) -> list[pd.DataFrame]:
    """Return causal bf16 attention without a window of the GPUs that aiconfigurator publishes."""
    frames = []
    for device, table in _read_tables(data_folder, HALF_ATTENTION):
        wanted = (table["attn_dtype"] == "bfloat16") & (table["kv_cache_dtype"] == "bfloat16")
        wanted &= (table["step"] == 0) & (table["isl"] >= _LEAST_SEQUENCE)
        if "window_size" in table.columns:
            wanted &= table["window_size"] == 0
        names = {
            "batch_size": "batch",
            "isl": "sequence",
            "num_heads": "heads",
            "num_key_value_heads": "groups",
            "head_dim": "size",
        }
        rows = table[wanted].rename(columns=names)
        medians = rows.groupby(list(names.values()), sort=True)["latency"].median().reset_index()
        frames.append(medians.assign(time_s=medians["latency"] * 1e-3, device=device))
    return frames


FORM = "overlapped"

_LEAST_ROWS = 256
"""Of a product, or tokens of an expert on average; fewer are those of serving, not of training."""

_MOST_PRODUCTS = 4000

_NO_WORK_FLOP = 1e9
"""Calls not longer than nearly all of those below this time the host, not the GPU."""

_THIN, _CAST_ROUNDS, _CAST_BYTES = 128, 5, 3

_BYTES = 2

_ROUTINGS = ("balanced", "power_law_1.01")
"""The most even first; a table has one of the two."""


def fit_tensor_products(data_folder: str | Path) -> dict[str, ProductTable]:
    """Fit the products of every GPU that has a table, by sheet; InputError where there is none.

    Products from ``LEAST_ROWS`` rows on, thinned to ``_MOST_PRODUCTS``; folds leave out whole
    weight shapes (n, k), and choose padding and overlap inside. A gradient's products are products
    of their own sizes at the forward's rate: no table holds them.
    """
    fitted = {}
    for frame in read_tensor_products(Path(data_folder), HALF_PRODUCTS):
        device = str(frame["device"].iloc[0])
        rows = _thin_out(frame[frame["product_m"] >= _LEAST_ROWS].reset_index(drop=True))
        fitted[device] = _fit_products_of(rows, load_device(device).sm_count)
    if not fitted:
        raise InputError(
            "no table of single products",
            file=data_folder,
            fix=f"retrieve the datasets {', '.join(HALF_PRODUCTS)} first",
        )
    return fitted


def fit_scaled_products(
    data_folder: str | Path, halves: Mapping[str, ProductTable]
) -> dict[str, dict[str, ProductTable]]:
    """Fit products in FP8: by format and GPU's sheet, as `fit_tensor_products`, whose result is ``halves``.

    The calls measured first cast their left factor from bf16 by a scale known beforehand: that is
    found beside the curve, and taken off. A launch takes what it takes in half precision.
    """
    fitted: dict[str, dict[str, ProductTable]] = {}
    for name, kind in SCALED.items():
        for frame in read_tensor_products(Path(data_folder), HALF_PRODUCTS, kind):
            sheet = load_device(str(frame["device"].iloc[0]))
            host_s = frame.loc[frame["flop"] < _NO_WORK_FLOP, "time_s"].quantile(COVERAGE[1])
            kept = (frame["product_m"] >= _LEAST_ROWS) & (frame["product_n"] >= _THIN)
            rows = _thin_out(frame[kept & (frame["time_s"] > host_s)].reset_index(drop=True))
            table = _fit_products_of(rows, sheet.sm_count, sheet)
            launch_s, *rest = table.curve.coefficients
            launch_s = min(launch_s, halves[sheet.name].curve.coefficients[0])
            alone = structs.replace(table, curve=Curve(FORM, (launch_s, *rest)))
            fitted.setdefault(name, {})[sheet.name] = alone
    return fitted


def _thin_out(rows: pd.DataFrame) -> pd.DataFrame:
    places = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_PRODUCTS)).astype(int)
    return rows.iloc[places].reset_index(drop=True)


def _fit_products_of(rows: pd.DataFrame, sm_count: int, casts_on: DeviceSheet | None = None) -> ProductTable:
    """Fit products; ``casts_on`` says of calls that they cast, and bounds what is left by its peak."""
    work, time_s = work_matrix(rows), rows["time_s"].to_numpy(np.float64)
    flop = rows["flop"].to_numpy(np.float64)
    cast = (rows["product_m"] * rows["product_k"]).to_numpy(np.float64)
    least_s, start_s = np.zeros(len(rows)), 0.0
    if casts_on is None:
        cast = np.zeros(len(rows))
    else:
        least_s = flop / casts_on.peak("fp8")
        start_s = _CAST_BYTES / casts_on.memory_bandwidth_bytes_per_s
    shapes = rows.groupby(["product_n", "product_k"]).ngroup()
    folds = shapes.to_numpy() % FOLDS
    held_out = np.zeros(len(rows))
    for known, left in split_groups(folds):
        given = work[known], time_s[known], cast[known], least_s[known]
        curve, cast_s = _fit_calls(*given, sm_count, start_s)
        held_out[left] = curve.predict(work[left]) + cast_s * cast[left]
    low, high = np.quantile(np.log(time_s / held_out), COVERAGE)
    missed = np.abs(held_out / time_s - 1)
    large = flop >= LARGE_FLOP
    curve, cast_s = _fit_calls(work, time_s, cast, least_s, sm_count, start_s)
    return ProductTable(
        curve,
        min(rounded(low), 0.0),
        max(rounded(high), 0.0),
        len(rows),
        float(flop.max()),
        float(missed.mean()),
        float(missed[large].mean()),
        float(held_out.sum() / time_s.sum() - 1),
        rounded(cast_s),
    )


def _fit_calls(
    work: Floats, time_s: Floats, cast: Floats, least_s: Floats, sm_count: int, cast_s: float
) -> tuple[Curve, float]:
    """Return the curve of products, and what casting an element before takes [s], found in turn."""
    if not cast.any():
        return _fit_curve(work, sm_count, time_s), 0.0
    for _ in range(_CAST_ROUNDS):
        net_s = np.maximum(time_s - cast_s * cast, least_s)
        curve = _fit_curve(work, sm_count, net_s)
        each_s, weight = (time_s - curve.predict(work)) / cast, cast / time_s
        order = np.argsort(each_s, kind="stable")
        half = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
        cast_s = max(float(each_s[order][half]), 0.0)
    return curve, cast_s


def judge_experts(
    data_folder: str | Path, predict: Mapping[str, Callable[[pd.DataFrame], Floats]]
) -> dict[str, ExpertBand]:
    """Return the band of every GPU that has tables of experts and of products.

    ``predict``: by sheet: times [s] of products, columns ``FEATURES`` and ``PRODUCTS``.
    """
    judged = {}
    for table in _read_experts(Path(data_folder)):
        name = str(table["device"].iloc[0])
        if name not in predict:
            continue
        ratio = table["time_s"].to_numpy(np.float64) / _price_layers(table, predict[name], name)
        low, high = np.quantile(np.log(ratio), COVERAGE)
        judged[name] = ExpertBand(
            min(rounded(low), 0.0), max(rounded(high), 0.0), rounded(float(np.median(ratio))), len(table)
        )
    return judged


def _read_experts(data_folder: Path) -> list[pd.DataFrame]:
    """Return layers of experts in bf16, on one rank of experts, by GPU: sizes, ``time_s``, ``device``.

    ``rows``: mean tokens of an expert; ``inside``: width inside one (its tensor-parallel share).
    """
    frames = []
    for device, table in _read_tables(data_folder, HALF_EXPERTS):
        routing = next(one for one in _ROUTINGS if (table["distribution"] == one).any())
        wanted = (table["moe_dtype"] == "bfloat16") & (table["moe_ep_size"] == 1)
        chosen = table[wanted & (table["distribution"] == routing)].reset_index(drop=True)
        products = pd.DataFrame(
            {
                "tokens": chosen["num_tokens"],
                "chosen": chosen["topk"],
                "experts": chosen["num_experts"],
                "hidden": chosen["hidden_size"],
                "inside": chosen["inter_size"] / chosen["moe_tp_size"],
                "time_s": chosen["latency"] * 1e-3,
            }
        )
        products["rows"] = products["tokens"] * products["chosen"] / products["experts"]
        frames.append(products[products["rows"] >= _LEAST_ROWS].assign(device=device))
    return frames


def _price_layers(table: pd.DataFrame, predict: Callable[[pd.DataFrame], Floats], device: str) -> Floats:
    """Return the time [s] of each layer: its two products, and the bytes of what is between and behind."""
    columns = ("experts", "rows", "inside", "hidden", "tokens")
    experts, rows, inside, hidden, tokens = (table[c].to_numpy(np.float64) for c in columns)
    both = _grouped(experts, rows, 2 * inside, hidden), _grouped(experts, rows, hidden, inside)
    moved = _BYTES * (experts * rows * (3 * inside + hidden) + tokens * hidden)
    time_s = moved / load_device(device).memory_bandwidth_bytes_per_s
    return np.asarray(time_s + sum(predict(product) for product in both), np.float64)


def _grouped(experts: Floats, m: Floats, n: Floats, k: Floats) -> pd.DataFrame:
    """Return the columns of forward products (m x k) (k x n), one an expert."""
    read, write = experts * (m * k + k * n) * _BYTES, experts * m * n * _BYTES
    ones, none = np.ones(len(m)), np.zeros(len(m))
    work = [2 * experts * m * n * k, read, write, experts, m, n, k, ones, none, none, ones]
    return pd.DataFrame(np.column_stack(work), columns=[*FEATURES, *PRODUCTS])


def build_tensor_products(data_folder: str | Path, path: str | Path = SHIPPED_FILE) -> Path:
    """Fit every table, of products and of attention, judge experts, and write the file that ships."""
    products = fit_tensor_products(data_folder)
    experts = judge_experts(data_folder, {name: one.predict for name, one in products.items()})
    scaled = fit_scaled_products(data_folder, products)
    save_tensor_tables(TensorTables(products, fit_attention(data_folder), experts, scaled), path)
    return Path(path)


def save_tensor_tables(tables: TensorTables, path: str | Path) -> None:
    """Write tables as JSON; equal tables give equal bytes."""
    write_json(path, {"kind": KIND, "format": FORMAT, "basis": "weight shapes left out", **to_json(tables)})


_DEPTHS = (64.0, 128.0, 256.0)
"""What filling and draining the pipeline of a tile costs, in steps along k [elements]."""

_OVERLAPS = (1, 2, 4)
"""Norms in which the times of computing and of moving bytes add up: one after the other (1), ever
better overlapped (2, 4)."""

_PRODUCT_ROUNDS = 8
"""Of the fit of products, which weighs outliers as that of attention does."""

_EDGES = (16.0, 48.0)
"""Costs of loading a tile's edges among which the overlapped fit chooses, as ``_EDGE_COSTS``."""


def _fit_curve(work: Floats, sm_count: float, time_s: Floats) -> Curve:
    """Choose how products fill a device, and fit a time whose compute and memory parts overlap.

    The curve's coefficients: the times of :func:`fit_tiles`; multiprocessors, tile set (``NO_TILES`` for none), edge
    cost, depth and norm of the overlap. Every option is monotone in batch, m, n and k and at most
    doubles with a size. The least mean absolute relative error decides.
    """
    sizes = problem_sizes(work)
    data = work[:, 1] + work[:, 2]
    options: list[Floats] = []
    misses: list[float] = []
    settings = [
        (float(NO_TILES), 0.0),
        *((float(n), e) for n in range(len(TILE_SETS)) if len(TILE_SETS[n]) > 1 for e in _EDGES),
    ]
    for number, edge in settings:
        for depth in _DEPTHS:
            flop = fill_device(sizes, work, sm_count, int(number), edge, depth)
            for norm in _OVERLAPS:
                times = _fit_norm(flop, data, time_s, norm)
                options.append(np.array([*times, sm_count, number, edge, depth, norm], np.float64))
                missed = (join_times(times, flop, data, norm) - time_s) / np.maximum(time_s, SHORTEST_S)
                misses.append(float(np.abs(missed).mean()))
    return Curve(FORM, tuple(options[choose_least(misses)].tolist()))


def _fit_norm(flop: Floats, data: Floats, time_s: Floats, norm: int) -> Floats:
    """Return constant and slopes: linear in them where the norm's own weights are held."""
    known_s = np.maximum(time_s, SHORTEST_S)
    rates = [float(np.max(work / known_s)) for work in (flop, data)]
    times = np.array([time_s.min() / 2, *(1 / rate if rate else 0.0 for rate in rates)])
    best, least = times, np.inf
    for _ in range(_PRODUCT_ROUNDS):
        predicted = join_times(times, flop, data, norm)
        relative = (predicted - time_s) / known_s
        error = float(np.abs(relative).mean())
        if error < least:
            best, least = times, error
        both = np.maximum(predicted - times[0], 1e-30)
        columns = np.stack(  # transposed: what goes over all rows is next to each other
            [
                np.ones(len(flop)),
                flop * math.prod([times[1] * flop / both] * (norm - 1)),
                data * math.prod([times[2] * data / both] * (norm - 1)),
            ]
        )
        scale = columns.max(axis=1)
        scale[scale == 0] = 1.0
        weights = 1 / (known_s * np.sqrt(1 + (relative / OUTLIER) ** 2))
        solution, _ = solve_nonnegative((columns / scale[:, None] * weights).T, time_s * weights)
        times = solution / scale
    return best
