"""The sizes that sweeps measure, coarse to fine, by the names that results carry; plain data, no torch.

Those of training steps, by orders of magnitude at level 0 and between them at 1 and 2.
"""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

Point = dict[str, Any]

MATRIX_OPERATIONS = ("gemm", "linear", "conv2d", "attention", "bmm")
"""Operations that matrix units run: measured in TF32 too."""

OPERATIONS = (
    *MATRIX_OPERATIONS, "layer_norm", "batch_norm", "softmax", "elementwise", "optimizer",
    "reduction", "embedding", "cross_entropy", "max_pool2d", "cat",
)  # fmt: skip
"""All operations, most useful first."""

_MEBI = 1 << 20


def count_levels(operation: str) -> int:
    """Return how many levels an operation has, coarse to fine."""
    return 3 if operation in ("gemm", "linear", "conv2d", "attention") else 2


def list_points(operation: str, level: int, quick: bool = False) -> list[Point]:
    """Return the sizes of one level (0 the coarsest) of an operation's sweep; levels do not overlap."""
    if quick:
        return _QUICK[operation]
    seen = [p for lower in range(level) for p in _POINTS[operation](lower)]
    fresh: list[Point] = []
    for point in _POINTS[operation](level):
        if point not in seen and point not in fresh:
            fresh.append(point)
    return fresh


def _gemm(level: int) -> list[Point]:
    if level == 0:
        sizes = [(s, s, s) for s in (256, 1024, 2048, 4096, 8192)]
        sizes += [(8192, 768, 768), (8192, 3072, 768), (128, 4096, 25088), (16, 4096, 4096)]
    elif level == 1:
        sizes = list(product((128, 512, 2048, 8192), (128, 512, 2048, 8192), (64, 512, 4096)))
    else:
        sizes = _scattered((16, 16_384), (16, 16_384), (16, 8_192), count=48)
    return [{"m": m, "n": n, "k": k} for m, n, k in sizes]


def _scattered(*limits: tuple[int, int], count: int) -> list[tuple[int, int, int]]:
    """Return log-uniform sizes of a fixed seed; every third one is aligned to nothing."""
    source = random.Random(0)
    chosen = []
    for number in range(count):
        sizes = []
        for low, high in limits:
            size = round(math.exp(source.uniform(math.log(low), math.log(high))))
            sizes.append(size if number % 3 == 0 else max(8, size // 8 * 8))
        chosen.append((sizes[0], sizes[1], sizes[2]))
    return chosen


def _bmm(level: int) -> list[Point]:
    if level == 0:
        sizes = [(b, s, s, 64) for b, s in ((96, 128), (384, 512), (1536, 128), (64, 1024))]
        sizes += [(b, s, 64, s) for b, s in ((96, 128), (384, 512), (64, 1024))]
    else:
        heads = product((12, 48, 192, 768), (64, 256, 1024), (64, 128))
        sizes = [size for b, s, d in heads for size in ((b, s, s, d), (b, s, d, s))]
        sizes = [(b, m, n, k) for b, m, n, k in sizes if b * m * max(n, k) <= 1 << 29]
    return [{"b": b, "m": m, "n": n, "k": k} for b, m, n, k in sizes]


def _linear(level: int) -> list[Point]:
    if level == 0:
        sizes = [(t, 768, w) for t in (512, 4096, 16_384) for w in (768, 3072)]
        sizes += [(128, 25_088, 4096), (128, 4096, 4096), (128, 2048, 1000), (4096, 768, 50_257)]
    elif level == 1:
        widths = ((512, 2048), (1024, 1024), (1024, 4096), (4096, 1024), (2048, 8192))
        sizes = [(t, i, o) for t in (128, 1024, 8192) for i, o in widths]
        sizes += [(t, i, o) for t in (8, 32, 256) for i, o in ((512, 1000), (4096, 4096))]
    else:
        sizes = _scattered((8, 32_768), (64, 8_192), (64, 8_192), count=32)
    return [{"tokens": t, "inputs": i, "outputs": o} for t, i, o in sizes]


_LAYERS = (
    (3, 224, 64, 3, 1), (3, 224, 64, 7, 2), (64, 56, 64, 3, 1), (64, 56, 256, 1, 1),
    (128, 28, 128, 3, 1), (256, 14, 256, 3, 1), (512, 7, 512, 3, 1), (512, 28, 512, 3, 1),
    (1024, 14, 256, 1, 1), (128, 28, 32, 3, 1),
)  # fmt: skip
_MORE_LAYERS = (
    (64, 224, 64, 3, 1), (64, 112, 128, 3, 1), (256, 56, 256, 3, 1), (512, 14, 512, 3, 1),
    (64, 56, 128, 3, 2), (128, 56, 128, 3, 2), (256, 56, 512, 1, 2), (512, 28, 1024, 1, 2),
    (256, 56, 64, 1, 1), (2048, 7, 512, 1, 1), (512, 7, 2048, 1, 1), (256, 56, 128, 1, 1),
    (96, 56, 128, 1, 1), (512, 14, 128, 1, 1), (128, 14, 32, 3, 1), (1024, 7, 128, 1, 1),
)  # fmt: skip


def _conv2d(level: int) -> list[Point]:
    layers, batches = (_LAYERS, (32, 128)) if level == 0 else (_LAYERS, (8, 64, 256))
    sizes = [(b, *layer) for layer in layers for b in batches]
    if level == 1:
        sizes += [(b, *layer) for layer in _MORE_LAYERS for b in (32, 128)]
    layout = "contiguous"
    if level == 2:
        sizes = [(64, *layer) for layer in (*_LAYERS, *_MORE_LAYERS)]
        layout = "channels_last"
    return [
        {
            "batch": b, "channels": c, "height": s, "width": s, "outputs": o, "kernel": k,
            "stride": step, "padding": k // 2, "groups": 1, "layout": layout,
        }
        for b, c, s, o, k, step in sizes
    ]  # fmt: skip


def _attention(level: int) -> list[Point]:
    if level == 0:
        sizes = [(8, 12, s, 64) for s in (128, 512, 2048)] + [(128, 12, 128, 64), (2, 32, 4096, 64)]
        sizes += [(16, 16, 512, 64)]
    elif level == 1:
        sizes = [
            (b, h, s, d)
            for b, h, s, d in product((1, 8, 64), (8, 16), (64, 256, 1024), (64, 128))
            if b * h * s * s <= 1 << 29
        ]
    else:
        sizes = [(8, 12, s, 64) for s in (256, 1024)]
    backends = ("default",) if level < 2 else ("flash", "efficient", "math", "cudnn")
    return [
        {
            "batch": b, "heads": h, "sequence": s, "head_width": d, "causal": causal,
            "backend": backend,
        }
        for b, h, s, d in sizes
        for causal in (True, False)
        for backend in backends
    ]  # fmt: skip


def _rows(level: int) -> list[Point]:
    if level == 0:
        sizes = [(r, w) for r in (512, 8192, 65_536) for w in (768, 4096)]
    else:
        sizes = list(product((128, 2048, 16_384, 131_072), (64, 256, 512, 1024, 2048)))
        sizes += [(1000, 50_257), (8192, 1000)]
    return [{"rows": r, "width": w} for r, w in sizes]


def _batch_norm(level: int) -> list[Point]:
    maps = ((64, 112), (64, 56), (256, 56), (512, 28), (1024, 14), (2048, 7))
    batches = (32, 128) if level == 0 else (8, 64, 256)
    return [{"batch": b, "channels": c, "height": s, "width": s} for b in batches for c, s in maps]


def _elementwise(level: int) -> list[Point]:
    names, sizes = ["relu", "gelu", "add", "copy"], [1 << 14, _MEBI, 1 << 24, 1 << 27]
    if level:
        names += ["mul", "tanh", "silu", "dropout", "cast"]
        sizes = [1 << 10, 1 << 17, _MEBI, 1 << 22, 1 << 24, 1 << 26]
    return [{"function": n, "elements": e} for n in names for e in sizes]


def _reduction(level: int) -> list[Point]:
    names = ("sum", "mean_rows") if level == 0 else ("sum_rows", "sum_columns", "amax", "norm")
    sizes = (
        ((1024, 1024), (16_384, 4096)) if level == 0 else ((256, 1024), (8192, 768), (65_536, 512))
    )
    return [{"function": n, "rows": r, "width": w} for n in names for r, w in sizes]


def _embedding(level: int) -> list[Point]:
    tokens = (4096, 65_536) if level == 0 else (128, 1024, 16_384)
    tables = ((50_257, 768), (32_128, 512)) if level == 0 else ((30_522, 1024), (128_256, 2048))
    return [{"tokens": t, "vocabulary": v, "width": w} for t in tokens for v, w in tables]


def _cross_entropy(level: int) -> list[Point]:
    sizes = (
        ((128, 1000), (4096, 50_257))
        if level == 0
        else ((32, 1000), (1024, 30_522), (8192, 32_128))
    )
    return [{"rows": r, "classes": c} for r, c in sizes]


def _max_pool2d(level: int) -> list[Point]:
    batches = (32, 128) if level == 0 else (8, 256)
    maps = ((64, 112, 3, 2), (64, 224, 2, 2), (512, 28, 2, 2))
    return [
        {"batch": b, "channels": c, "height": s, "width": s, "kernel": k, "stride": step}
        for b in batches
        for c, s, k, step in maps
    ]


def _cat(level: int) -> list[Point]:
    counts = (2, 16) if level == 0 else (4, 32)
    return [{"tensors": n, "elements": e} for n in counts for e in (1 << 16, 1 << 20, 1 << 22)]


def _optimizer(level: int) -> list[Point]:
    names = ("sgd", "adam", "adamw")
    ways = ("foreach", "fused") if level == 0 else ("foreach", "fused", "loop")
    groups = (
        ((16, _MEBI), (160, 1 << 18), (16, 1 << 24))
        if level == 0
        else ((1, 1 << 12), (64, 1 << 12), (64, _MEBI), (300, 1 << 16))
    )
    return [
        {"optimizer": n, "implementation": way, "tensors": t, "elements": e}
        for t, e in groups
        for n in names
        for way in ways
    ]


_POINTS = {
    "gemm": _gemm, "bmm": _bmm, "linear": _linear, "conv2d": _conv2d, "attention": _attention,
    "layer_norm": _rows, "softmax": _rows, "batch_norm": _batch_norm, "elementwise": _elementwise,
    "reduction": _reduction, "embedding": _embedding, "cross_entropy": _cross_entropy,
    "max_pool2d": _max_pool2d, "cat": _cat, "optimizer": _optimizer,
}  # fmt: skip

_QUICK: dict[str, list[Point]] = {
    "gemm": [{"m": 16, "n": 24, "k": 8}, {"m": 64, "n": 64, "k": 64}],
    "bmm": [{"b": 2, "m": 8, "n": 8, "k": 4}],
    "linear": [{"tokens": 16, "inputs": 8, "outputs": 24}],
    "conv2d": [{
        "batch": 2, "channels": 3, "height": 8, "width": 8, "outputs": 4, "kernel": 3,
        "stride": 1, "padding": 1, "groups": 1, "layout": "contiguous",
    }],
    "attention": [{
        "batch": 2, "heads": 2, "sequence": 16, "head_width": 8, "causal": True,
        "backend": "default",
    }],
    "layer_norm": [{"rows": 16, "width": 32}],
    "softmax": [{"rows": 16, "width": 32}],
    "batch_norm": [{"batch": 2, "channels": 4, "height": 4, "width": 4}],
    "elementwise": [
        {"function": n, "elements": 256}
        for n in ("relu", "gelu", "add", "copy", "mul", "tanh", "silu", "dropout", "cast")
    ],
    "reduction": [
        {"function": n, "rows": 8, "width": 16}
        for n in ("sum", "mean_rows", "sum_rows", "sum_columns", "amax", "norm")
    ],
    "embedding": [{"tokens": 16, "vocabulary": 32, "width": 8}],
    "cross_entropy": [{"rows": 8, "classes": 10}],
    "max_pool2d": [{"batch": 2, "channels": 4, "height": 8, "width": 8, "kernel": 2, "stride": 2}],
    "cat": [{"tensors": 2, "elements": 64}],
    "optimizer": [
        {"optimizer": n, "implementation": way, "tensors": 2, "elements": 64}
        for n in ("sgd", "adam", "adamw")
        for way in ("foreach", "fused", "loop")
    ],
}  # fmt: skip
