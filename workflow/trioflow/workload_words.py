"""The words of a workload's row: families with their sizes, precisions, optimizers.

Needs nothing else, so that a machine that only captures can read them.
"""

from __future__ import annotations

NOTHING = ("", "-")
"""Cells that mean: does not apply to this row."""

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = tuple(
    f"{algorithm}{variant}"
    for algorithm in ("sgd", "adam", "adamw")
    for variant in ("", "-foreach", "-fused")
)
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torchvision": (("image_size",), ()),
    "transformer": (("sequence", "hidden", "layers", "heads", "vocabulary", "causal"), ()),
    "transformers": (("sequence",), ("layers",)),
    "user": ((), ("image_size", "sequence", "hidden", "layers", "heads", "vocabulary", "causal")),
}
"""Sizes that a family needs, and those that it can do without; it has no others."""
LANGUAGE = "language"
"""Family of a model given by its configuration; no table has rows of it."""

SIZES = tuple(dict.fromkeys(c for sizes in FAMILIES.values() for group in sizes for c in group))
