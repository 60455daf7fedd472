"""Workloads that can be captured and measured: model, data, loss, optimizer.

Everything is built from a configuration row with a seed; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trioflow.errors import InputError
from trioflow.trace.torchvision_compat import import_torchvision_models
from trioflow.trace.transformer import Transformer, TransformerSizes

CLASSES = 1000
"""Classes of an image classifier, as in ImageNet."""

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
    model : Module
        Whole model on the CPU, in training mode.
    units : dict of str to list of str
        Consecutive pieces a pipeline can be cut between: unit name to the
        modules that it runs in order; ``"<flatten>"`` is a plain flatten.
    tensor_split : dict of str to str
        Module pattern to ``"column"`` or ``"row"``: the Megatron split.
    """

    name: str
    row: Mapping[str, Any]
    model: nn.Module
    units: dict[str, list[str]]
    tensor_split: dict[str, str]

    def make_batch(self, batch: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """Return synthetic inputs and targets for ``batch`` samples."""
        generator = torch.Generator().manual_seed(seed)
        if self.row["family"] == "torchvision":
            size = int(self.row["image_size"])
            inputs = torch.randn(batch, 3, size, size, generator=generator)
            targets = torch.randint(CLASSES, (batch,), generator=generator)
        else:
            shape = (batch, int(self.row["sequence"]))
            inputs = torch.randint(int(self.row["vocabulary"]), shape, generator=generator)
            targets = torch.randint(int(self.row["vocabulary"]), shape, generator=generator)
        return inputs.to(device), targets.to(device)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of outputs [..., classes] against targets [...]."""
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the row's optimizer over some parameters."""
        if self.row["optimizer"] == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-4)
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

    def make_stage(self, unit_names: Iterable[str]) -> nn.Sequential:
        """Return the modules of some consecutive units as one pipeline stage."""
        stage = nn.Sequential()
        for unit in unit_names:
            for path in self.units[unit]:
                module = nn.Flatten(1) if path == "<flatten>" else self.model.get_submodule(path)
                stage.add_module(path.replace(".", "_"), module)
        return stage


def build_workload(row: Mapping[str, Any], seed: int = 0) -> Workload:
    """Build a workload from its configuration row.

    Parameters
    ----------
    row : mapping
        A row of ``config/workloads.tsv``: ``workload``, ``family``, ``model``,
        sizes, ``optimizer`` and ``precision``.
    seed : int
        Seed of the initial weights.

    Raises
    ------
    InputError
        When the family or the model is unknown, or a size does not fit.
    """
    torch.manual_seed(seed)
    name, family = str(row["workload"]), str(row["family"])
    if str(row["optimizer"]) not in ("sgd", "adamw"):
        raise InputError(
            f"workload {name}: unknown optimizer {row['optimizer']!r}", fix="use sgd or adamw"
        )
    if str(row.get("precision", "fp32")) not in ("fp32", "bf16"):
        raise InputError(
            f"workload {name}: unknown precision {row['precision']!r}", fix="use fp32 or bf16"
        )
    if family == "transformer":
        return _build_transformer(name, row)
    if family == "torchvision":
        return _build_torchvision(name, row)
    raise InputError(
        f"workload {name}: unknown family {family!r}", fix="use torchvision or transformer"
    )


def _build_transformer(name: str, row: Mapping[str, Any]) -> Workload:
    numbers = {k: int(row[k]) for k in ("hidden", "layers", "heads", "vocabulary", "sequence")}
    if numbers["hidden"] % numbers["heads"]:
        raise InputError(
            f"workload {name}: hidden {numbers['hidden']} is not a multiple of heads {numbers['heads']}"
        )
    sizes = TransformerSizes(**numbers, causal=str(row["causal"]).lower() in ("true", "1", "yes"))
    units = {"embedding": ["embedding"]}
    units |= {f"blocks.{i}": [f"blocks.{i}"] for i in range(sizes.layers)}
    units["head"] = ["head"]
    return Workload(name, row, Transformer(sizes).train(), units, dict(_TRANSFORMER_SPLIT))


def _build_torchvision(name: str, row: Mapping[str, Any]) -> Workload:
    models, chosen = import_torchvision_models(), str(row["model"])
    known = [m for m in models.list_models(module=models) if m.startswith(("resnet", "vgg"))]
    if chosen not in known:
        raise InputError(
            f"workload {name}: unknown torchvision model {chosen!r}",
            fix=f"use one of {', '.join(known)}",
        )
    model: nn.Module = models.get_model(chosen, weights=None, num_classes=CLASSES).train()
    units: dict[str, list[str]] = {}
    if chosen.startswith("resnet"):
        units["stem"] = ["conv1", "bn1", "relu", "maxpool"]
        for layer in ("layer1", "layer2", "layer3", "layer4"):
            blocks = model.get_submodule(layer)
            units |= {f"{layer}.{i}": [f"{layer}.{i}"] for i, _ in blocks.named_children()}
        units["head"] = ["avgpool", "<flatten>", "fc"]
    else:
        paths = [f"features.{i}" for i, _ in model.get_submodule("features").named_children()]
        paths += ["avgpool", "<flatten>"]
        paths += [f"classifier.{i}" for i, _ in model.get_submodule("classifier").named_children()]
        # A unit ends where a convolution or a linear layer begins the next one.
        for path in paths:
            heavy = path != "<flatten>" and any(
                True for _ in model.get_submodule(path).parameters()
            )
            if heavy or not units:
                units[path] = []
            units[list(units)[-1]].append(path)
    return Workload(name, row, model, units, {})
