"""The language models of transformers as chains of units, for pipelines.

A whole model hands more than activations from block to block (positions,
masks); these modules compute the rest anew in every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class PositionedEmbedding(nn.Module):  # type: ignore[misc]
    """Token plus learned position embedding, then dropout: the entrance of GPT-2."""

    def __init__(self, token: nn.Module, position: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.token, self.position, self.dropout = token, position, dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, sequence] to activations [batch, sequence, hidden]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        embedded: Tensor = self.dropout(self.token(tokens) + self.position(positions))
        return embedded


class Block(nn.Module):  # type: ignore[misc]
    """A transformer block from activations to activations; with rotary positions where it has any."""

    def __init__(self, block: nn.Module, rotary: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, x: Tensor) -> Tensor:
        """Transform activations [batch, sequence, hidden]."""
        extra: dict[str, Any] = {}
        if self.rotary is not None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            extra["position_embeddings"] = self.rotary(x, position_ids=positions)
        out = self.block(x, **extra)
        # Some versions of transformers return a tuple.
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result


@dataclass(frozen=True)
class Stages:
    """A chain of units: their modules, and how to build one of them."""

    units: dict[str, list[str]]
    make_unit: Callable[[str], nn.Module]


def _chain(
    model: nn.Module,
    embedding: list[str],
    blocks: str,
    head: list[str],
    make_embedding: Callable[[], nn.Module],
    rotary: str = "",
) -> Stages:
    """Describe embedding, blocks and head of a model by the paths of their modules."""
    paths = [f"{blocks}.{name}" for name, _ in model.get_submodule(blocks).named_children()]
    units = {"embedding": embedding, **{path: [path] for path in paths}, "head": head}

    def make_unit(unit: str) -> nn.Module:
        if unit == "embedding":
            return make_embedding()
        if unit == "head":
            return nn.Sequential(*(model.get_submodule(path) for path in head))
        return Block(model.get_submodule(unit), model.get_submodule(rotary) if rotary else None)

    return Stages(units, make_unit)


def _gpt2(model: nn.Module) -> Stages:
    paths = [f"transformer.{name}" for name in ("wte", "wpe", "drop")]
    return _chain(
        model, paths, "transformer.h", ["transformer.ln_f", "lm_head"],
        lambda: PositionedEmbedding(*(model.get_submodule(path) for path in paths)),
    )  # fmt: skip


def _bert(model: nn.Module) -> Stages:
    path = "bert.embeddings"
    return _chain(
        model, [path], "bert.encoder.layer", ["cls"], lambda: model.get_submodule(path)
    )  # fmt: skip


def _llama(model: nn.Module) -> Stages:
    token, rotary = "model.embed_tokens", "model.rotary_emb"
    return _chain(
        model, [token, rotary], "model.layers", ["model.norm", "lm_head"],
        lambda: model.get_submodule(token), rotary,
    )  # fmt: skip


STAGES: dict[str, Callable[[nn.Module], Stages]] = {"gpt2": _gpt2, "bert": _bert, "llama": _llama}
"""How to cut a model of each architecture that is a chain."""
