"""What every kind of workload hands to the door: a `Recipe` of model, data and loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trioflow.base.errors import InputError
from trioflow.base.settings import NOTHING

Inputs: TypeAlias = "Tensor | tuple[Any, ...] | dict[str, Any]"
"""What a model is called with: one argument, several, or several by name."""

_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass
class Recipe:
    """A model with its data, its loss and the places where it can be cut."""

    model: nn.Module  # whole model, in training mode; on the CPU unless it was built elsewhere
    # (samples, seed, device, by default cpu) to synthetic (inputs, targets), on ``meta`` shapes only. Inputs that are a tuple are the
    # model's arguments, those that are a dict its named ones: see ``capture.training_step.call_model``.
    make_batch: Callable[..., tuple[Inputs, Any]]
    loss: Callable[[Any, Any], Tensor]  # (outputs, targets) to one number
    # Pipeline units in order, each with the modules that it runs (``"<flatten>"`` is a function between modules); empty
    # where the model cannot be cut into a chain.
    units: dict[str, list[str]] = field(default_factory=dict)
    # Module pattern to ``"column"`` or ``"row"``: the Megatron split.
    tensor_split: dict[str, str] = field(default_factory=dict)
    # Unit's name to a module that maps the unit before to the unit after; without it a unit runs
    # its modules one after the other.
    make_unit: Callable[[str], nn.Module] | None = None
    notes: tuple[str, ...] = ()  # what of the model does not run
    # Paths of blocks that stand for others, with how many each is of the whole model, which has so many parameters.
    repeats: dict[str, int] = field(default_factory=dict)
    parameters: int = 0


_MOST_DIGITS = 15


def read_size(row: Mapping[str, Any], column: str) -> int | None:
    """Return a size of a row (table, JSON or a trace's text); None where it says nothing, InputError where it is none."""
    cell = row.get(column)
    if cell is None or str(cell) in (*NOTHING, "None"):
        return None
    if not str(cell).isdecimal() or len(str(cell)) > _MOST_DIGITS or int(cell) < 1:
        raise InputError(f"workload {row['workload']}: {column} {cell!r:.40} is not a whole number from 1 on")
    return int(cell)


def need_size(row: Mapping[str, Any], column: str) -> int:
    """Return a size that the family cannot do without; InputError where the row does not give it."""
    size = read_size(row, column)
    if size is None:
        raise InputError(
            f"workload {row['workload']}: the family {row['family']} needs {column}", fix=f"give the row a {column}"
        )
    return size


def need_flag(row: Mapping[str, Any], column: str) -> bool:
    """Return a yes or no that the family cannot do without; InputError where the row gives neither."""
    cell = str(row.get(column)).lower()
    if cell not in _WORDS:
        raise InputError(f"workload {row['workload']}: {column} {row.get(column)!r} is neither true nor false")
    return _WORDS[cell]


def make_images(
    shape: Sequence[int], classes: int, batch: int, seed: int, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return synthetic inputs [batch, *shape], such as images of the shape 3, 224, 224, and their classes [batch]."""
    if torch.device(device).type == "meta":
        images = torch.empty(batch, *shape, device=device)
        return images, torch.empty(batch, dtype=torch.long, device=device)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, *shape, generator=generator, device="cpu")
    return images.to(device), _make_labels((batch,), classes, generator, device)


def make_tokens(sequence: int, vocabulary: int, batch: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return synthetic tokens and the tokens to predict, both [batch, sequence]."""
    generator = torch.Generator().manual_seed(seed)
    inputs = _make_labels((batch, sequence), vocabulary, generator, device)
    return inputs, _make_labels((batch, sequence), vocabulary, generator, device)


def _make_labels(shape: tuple[int, ...], choices: int, generator: torch.Generator, device: str) -> Tensor:
    """Return random whole numbers below ``choices``; on the meta device only their shape."""
    if torch.device(device).type == "meta":
        return torch.empty(shape, dtype=torch.long, device=device)
    return torch.randint(choices, shape, generator=generator, device="cpu").to(device)


def mean_cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of scores [..., classes], transformers' wrapping taken off, against targets [...]."""
    scores = outputs if isinstance(outputs, Tensor) else outputs.logits
    return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())
