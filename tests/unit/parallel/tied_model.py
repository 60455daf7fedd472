"""A small model whose head reads the token embedding's weight; captured by the tests."""

import torch
from torch import nn
from trioflow.trace.workloads.recipe import WorkloadRecipe

WIDTH, WORDS = 32, 128


class Head(nn.Module):
    """A norm and a product with the embedding's weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.vocabulary = nn.Linear(WIDTH, WORDS, bias=False)
        self.vocabulary.weight = embedding.weight

    def forward(self, x):
        return self.vocabulary(self.norm(x))


def make() -> WorkloadRecipe:
    """Return embedding, two blocks and head, four units."""
    embedding = nn.Embedding(WORDS, WIDTH)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(embedding, *blocks, Head(embedding))

    def make_batch(samples, seed, device):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, WORDS, (samples, 8), generator=generator).to(device)
        return tokens, tokens

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    units = {"embedding": ["0"], "first": ["1"], "second": ["2"], "head": ["3"]}
    return WorkloadRecipe(model, make_batch, loss, units)
