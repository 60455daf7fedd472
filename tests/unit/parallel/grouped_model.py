"""A small CNN with grouped, depthwise and transposed convolutions; captured by the tests."""

import torch
from torch import nn
from trioflow.trace.workloads.recipe import WorkloadRecipe


def make() -> WorkloadRecipe:
    """Return a chain of three units."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )

    def make_batch(samples, seed, device):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(samples, 3, 8, 8, generator=generator).to(device)
        return images, torch.arange(samples, device=device) % 5

    units = {"first": ["0", "1", "2"], "second": ["3", "4", "5"], "third": ["6", "7", "8"]}
    return WorkloadRecipe(model, make_batch, nn.functional.cross_entropy, units)
