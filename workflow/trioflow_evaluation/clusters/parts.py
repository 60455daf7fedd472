"""Parts of nanotron's runs that are judged by themselves: a model at a tensor degree, which share operators' times."""

from collections.abc import Callable
from typing import Any

MODELS = (1.34, 3.57, 8.86, 70.6, 78.7, 80.0, 467.0, 469.0)
"""Parameters of nanotron's models [1e9]."""
TENSOR_DEGREES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def name_part(parameters: float, tensor: int) -> str:
    """Return the part that a run of a model at a tensor degree is in."""
    return f"{parameters:g}b-tensor{tensor}"


PARTS = tuple(name_part(model, tensor) for model in MODELS for tensor in TENSOR_DEGREES)


def plain_model(name: str) -> str:
    """Return a model's name on Megatron-Bridge's pages without what a release says of its routing."""
    return name.partition(" (")[0]


def extend_steps(simulate: Callable[[Any], Any], pieces: float, most: int, fewer: int) -> Any:
    """Return the step of so many micro-batches; of more than ``most`` those and ``fewer`` are simulated: each adds the same."""
    if pieces <= most:
        return simulate(pieces)
    full = simulate(most)
    return full + (full - simulate(fewer)) * ((pieces - most) / (most - fewer))
