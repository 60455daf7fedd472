"""A GPT-2-like and BERT-like transformer, built from sizes alone.

The query, key and value weights are fused per head, as in Megatron-LM, so that
a column split of the fused weight gives each tensor-parallel rank whole heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TransformerSizes:
    """Sizes of a transformer: counts, and the sequence length in tokens."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    causal: bool


class Embedding(nn.Module):
    """Token plus learned position embedding; BERT-like ones are normalised."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.position = nn.Embedding(sizes.sequence, sizes.hidden)
        self.norm = nn.Identity() if sizes.causal else nn.LayerNorm(sizes.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, sequence] to activations [batch, sequence, hidden]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.norm(self.token(tokens) + self.position(positions))
        return embedded


class Attention(nn.Module):
    """Self-attention whose head count follows its (possibly sharded) weight."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.head_size = sizes.hidden // sizes.heads
        self.causal = sizes.causal
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.projection = nn.Linear(sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each sequence of x [batch, sequence, hidden]."""
        batch, sequence, _ = x.shape
        fused = self.qkv(x).view(batch, sequence, -1, 3, self.head_size)
        query, key, value = (part.transpose(1, 2) for part in fused.unbind(3))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return out


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.hidden, 4 * sizes.hidden)
        self.activation = nn.GELU(approximate="tanh" if sizes.causal else "none")
        self.down = nn.Linear(4 * sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of x [batch, sequence, hidden] alone."""
        out: Tensor = self.down(self.activation(self.up(x)))
        return out


class Block(nn.Module):
    """One layer: normalisation before (GPT-2) or after (BERT) each half."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.norm_before = sizes.causal
        self.norm1 = nn.LayerNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.norm2 = nn.LayerNorm(sizes.hidden)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and feed-forward with residuals to x [batch, sequence, hidden]."""
        if self.norm_before:
            x = x + self.attention(self.norm1(x))
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        out: Tensor = self.norm2(x + self.feed_forward(x))
        return out


class Head(nn.Module):
    """Prediction of every token; BERT-like models transform once more before it."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.transform = (
            nn.Identity()
            if sizes.causal
            else nn.Sequential(nn.Linear(sizes.hidden, sizes.hidden), nn.GELU())
        )
        self.norm = nn.LayerNorm(sizes.hidden)
        self.vocabulary = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations [batch, sequence, hidden] to logits [batch, sequence, vocabulary]."""
        logits: Tensor = self.vocabulary(self.norm(self.transform(x)))
        return logits


class Transformer(nn.Module):
    """Embedding, blocks, head; the head's weight is not tied to the embedding's."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.embedding = Embedding(sizes)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.head = Head(sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, sequence] to logits [batch, sequence, vocabulary]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits
