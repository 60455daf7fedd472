"""Workloads that can be captured and measured: model, data, loss, optimizer.

This is the door: a row of a table goes in, a `Workload` comes out. Everything
is built from the row with a seed; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trioflow.errors import InputError
from trioflow.trace.language.decoder import build_language_model
from trioflow.trace.workloads.optimizers import MainWeights, check_optimizer
from trioflow.trace.workloads.precision import Precision, choose_precision
from trioflow.trace.workloads.recipe import (
    Inputs,
    Recipe,
    make_tokens,
    mean_cross_entropy,
    need_flag,
    need_size,
)
from trioflow.trace.workloads.torchvision_models import FUNCTIONS, build_torchvision
from trioflow.trace.workloads.transformer import Transformer, TransformerSizes
from trioflow.trace.workloads.transformers_models import build_transformers
from trioflow.trace.workloads.user_model import build_user_model
from trioflow.workload_words import FAMILIES, LANGUAGE

_TRANSFORMER_SPLIT = {
    "blocks.*.attention.qkv": "column",
    "blocks.*.attention.projection": "row",
    "blocks.*.feed_forward.up": "column",
    "blocks.*.feed_forward.down": "row",
}


@dataclass
class Workload:
    """A model with what one training step of it needs.

    Attributes
    ----------
    name : str
        Name of the configuration row.
    row : mapping
        The row itself.
    precision : Precision
        Number formats of the step.
    recipe : Recipe
        What its family made of the row.
    """

    name: str
    row: Mapping[str, Any]
    precision: Precision
    recipe: Recipe

    @property
    def model(self) -> nn.Module:
        """Whole model, in training mode; on the CPU unless it was built elsewhere."""
        return self.recipe.model

    @property
    def units(self) -> dict[str, list[str]]:
        """Consecutive pieces that a pipeline can be cut between, with the modules each runs.

        Words in angle brackets, such as ``"<flatten>"``, are functions between
        modules. Empty for a model that is no chain.
        """
        return self.recipe.units

    @property
    def tensor_split(self) -> dict[str, str]:
        """Module pattern to ``"column"`` or ``"row"``: the Megatron split."""
        return self.recipe.tensor_split

    def make_batch(self, batch: int, seed: int, device: str = "cpu") -> tuple[Inputs, Any]:
        """Return synthetic inputs and targets for ``batch`` samples; on ``meta`` shapes only.

        Inputs that are a tuple are the model's arguments, those that are a dict
        its named ones: see `trioflow.trace.capture.training_step.call_model`.
        """
        return self.recipe.make_batch(batch, seed, device)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of outputs against targets, one number."""
        return self.recipe.loss(outputs, targets)

    def make_optimizer(
        self, parameters: Iterable[nn.Parameter]
    ) -> torch.optim.Optimizer | MainWeights:
        """Return the row's optimizer over some parameters, as the precision's recipe runs it."""
        return self.precision.make_optimizer(str(self.row["optimizer"]), parameters)

    def make_stage(self, unit_names: Iterable[str]) -> nn.Sequential:
        """Return the modules of some consecutive units as one pipeline stage."""
        stage = nn.Sequential()
        for unit in unit_names:
            if self.recipe.make_unit:
                stage.add_module(unit.replace(".", "_"), self.recipe.make_unit(unit))
                continue
            for path in self.units[unit]:
                function = FUNCTIONS.get(path)
                module = function() if function else self.model.get_submodule(path)
                stage.add_module(path.replace(".", "_"), module)
        return stage


def build_workload(row: Mapping[str, Any], seed: int = 0, device: str | None = None) -> Workload:
    """Build a workload from its configuration row.

    Parameters
    ----------
    row : mapping
        A row of ``config/workloads.tsv`` or of the shipped catalogue:
        ``workload``, ``family``, ``model``, sizes, ``optimizer`` and
        ``precision``. Text in place of numbers is understood.
    seed : int
        Seed of the initial weights.
    device : str, optional
        Where the weights are made; ``meta`` for shapes without memory. By
        default where PyTorch makes tensors, which is the CPU.

    Raises
    ------
    InputError
        When the family, the model, the optimizer or the precision is unknown,
        or a size is missing or does not fit.
    """
    name, family = str(row["workload"]), str(row["family"])
    if family not in _BUILDERS:
        raise InputError(
            f"workload {name}: unknown family {family!r}", fix=f"use one of {', '.join(FAMILIES)}"
        )
    check_optimizer(str(row["optimizer"]), name)
    precision = choose_precision(str(row.get("precision") or "fp32"), name)
    torch.manual_seed(seed)
    with torch.device(device) if device else nullcontext():
        recipe = _BUILDERS[family](row)
    precision.cast(recipe.model)
    return Workload(name, row, precision, recipe)


def _build_transformer(row: Mapping[str, Any]) -> Recipe:
    numbers = {
        k: need_size(row, k) for k in ("hidden", "layers", "heads", "vocabulary", "sequence")
    }
    if numbers["hidden"] % numbers["heads"]:
        raise InputError(
            f"workload {row['workload']}: hidden {numbers['hidden']} is not a multiple of heads {numbers['heads']}"
        )
    sizes = TransformerSizes(**numbers, causal=need_flag(row, "causal"))
    units = {"embedding": ["embedding"]}
    units |= {f"blocks.{i}": [f"blocks.{i}"] for i in range(sizes.layers)}
    units["head"] = ["head"]

    def make_batch(batch: int, seed: int, device: str) -> tuple[Inputs, Any]:
        return make_tokens(batch, sizes.sequence, sizes.vocabulary, seed, device)

    model = Transformer(sizes).train()
    return Recipe(model, make_batch, mean_cross_entropy, units, dict(_TRANSFORMER_SPLIT))


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Recipe]] = {
    "torchvision": build_torchvision,
    "transformer": _build_transformer,
    "transformers": build_transformers,
    LANGUAGE: build_language_model,
    "user": build_user_model,
}
