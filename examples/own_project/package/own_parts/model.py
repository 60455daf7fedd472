"""A small mixer: tokens mix over positions, then over features."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

POSITIONS, FEATURES, CLASSES = 64, 128, 10


class Block(nn.Module):
    """Mixes positions, then features, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Sequential(nn.LayerNorm(POSITIONS), nn.Linear(POSITIONS, POSITIONS))
        self.features = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 4 * FEATURES), nn.GELU(), nn.Linear(4 * FEATURES, FEATURES)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, positions, features] for the same."""
        x = x + self.positions(x.transpose(1, 2)).transpose(1, 2)
        return x + self.features(x)


class Mixer(nn.Module):
    """Four blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores [batch, classes]."""
        return self.head(self.blocks(x).mean(dim=1))


class Recipe(NamedTuple):
    """What trioflow asks of a model: see ``trioflow.trace.workloads.recipe``."""

    model: nn.Module

    @property
    def units(self) -> dict[str, list[str]]:
        """Where a pipeline may cut: name of each piece, and the modules that it runs."""
        blocks = {f"block{i}": [f"blocks.{i}"] for i in range(4)}
        return {**blocks, "head": ["head"]}

    def make_batch(self, batch: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
        """Return inputs [batch, positions, features] and classes [batch]."""
        chance = torch.Generator().manual_seed(seed)
        inputs = torch.randn(batch, POSITIONS, FEATURES, generator=chance)
        targets = torch.randint(CLASSES, (batch,), generator=chance)
        return inputs.to(device), targets.to(device)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy."""
        return nn.functional.cross_entropy(outputs, targets)


def make_mixer() -> Recipe:
    """Return the model with its inputs and its loss."""
    return Recipe(Mixer())
