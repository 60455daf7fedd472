"""Workloads that can be captured and measured: model, data, loss, optimizer.

A row of a table goes in, a `Workload` comes out, built from the row with a seed; nothing is
downloaded. The family ``transformer``, GPT-2-like or BERT-like, is built here from sizes alone.

Frozen parameters, and low-rank adapters (LoRA) beside frozen linear layers.

Adapters have PEFT's names and arithmetic: what ``lora_A.default`` and ``lora_B.default`` make is scaled and added to
the result of ``base_layer``. Those of a model in half precision without main weights are in fp32.

References
----------
E. J. Hu et al., LoRA, arXiv 2106.09685. PEFT 0.17: ``tuners/lora/layer.py`` (``Linear.forward``),
``tuners/tuners_utils.py`` (``cast_adapter_dtype``), ``utils/constants.py`` (default targets).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import filter as filter_names
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trioflow.base.errors import InputError
from trioflow.base.settings import FAMILIES, LANGUAGE
from trioflow.trace.language.decoder import build_language_model
from trioflow.trace.language.sizes import split_adapters
from trioflow.trace.workloads.precision import (
    MainWeights,
    Precision,
    check_optimizer,
    choose_precision,
)
from trioflow.trace.workloads.recipe import (
    Inputs,
    Recipe,
    make_tokens,
    mean_cross_entropy,
    need_flag,
    need_size,
    read_size,
)
from trioflow.trace.workloads.torchvision_models import FUNCTIONS, build_torchvision
from trioflow.trace.workloads.transformers_models import build_transformers
from trioflow.trace.workloads.user_model import build_user_model

_TARGETS = (
    "q_proj,v_proj",
    "q_proj,kv_b_proj",
    "q_b_proj,kv_b_proj",
    "qkv",
    "c_attn",
    "query,value",
    "query_key_value",
)
"""Targets where none are named, the first that a model has: PEFT's, and alike for latent attention."""
_FUSED = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}
"""Layers that are one product where a recipe fuses them, and the targets that they stand for."""


class LoraLinear(nn.Module):
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer, self.dropout, self.scaling = base, dropout, 1.0
        place: dict[str, Any] = {"bias": False, "dtype": dtype, "device": base.weight.device}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, **place)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, **place)})

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., inputs] to [..., outputs]."""
        result, down = self.base_layer(x), self.lora_A["default"]
        x = x.to(down.weight.dtype)
        if self.dropout:
            x = torch.native_dropout(x, self.dropout, True)[0]
        out: Tensor = result + self.lora_B["default"](down(x)) * self.scaling
        return out.to(result.dtype)


def adapt_model(recipe: Recipe, row: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """Give a model the adapters that its row asks for, and freeze what trains nothing.

    ``lora``: rank of the adapters; ``lora_targets``: names of linear layers, with commas, or ``all-linear`` (all but
    the head); ``lora_dropout``; ``freeze``: patterns of parameters or modules, with commas. ``dtype``: of adapters; by
    default that of the layer. Raises InputError when a word fits nothing.
    """
    model, name = recipe.model, f"workload {row['workload']}"
    if rank := read_size(row, "lora"):
        model.requires_grad_(False)
        dropout = float(row.get("lora_dropout") or 0.0)
        for path, layer in _find_targets(model, str(row.get("lora_targets") or ""), name).items():
            parent, _, child = path.rpartition(".")
            wrapped = LoraLinear(layer, rank, dropout, dtype or layer.weight.dtype)
            setattr(model.get_submodule(parent), child, wrapped)
        rules = recipe.tensor_split | split_adapters(recipe.tensor_split)
        layers = [path for path, m in model.named_modules() if m._parameters]
        recipe.tensor_split.clear()
        recipe.tensor_split |= {p: k for p, k in rules.items() if filter_names(layers, p)}
    for pattern in filter(None, str(row.get("freeze") or "").replace(" ", "").split(",")):
        frozen = [
            parameter
            for path, parameter in model.named_parameters()
            if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")
        ]
        if not frozen:
            paths = list(dict(model.named_parameters()))
            raise InputError(
                f"{name}: freeze {pattern!r} fits no parameter",
                fix=f"use a pattern of a parameter or module, such as {paths[0]} or {paths[-1].rpartition('.')[0]}",
            )
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(f"{name}: every parameter is frozen", fix="leave one that trains")


def _find_targets(model: nn.Module, words: str, name: str) -> dict[str, nn.Linear]:
    """Return the linear layers, by their paths, that get an adapter; a head that is not named gets none."""
    linear = {path: m for path, m in model.named_modules() if type(m) is nn.Linear}
    everything = words == "all-linear"
    for asked in [words] if words else _TARGETS:
        targets = set(filter(None, asked.replace(" ", "").split(",")))
        found = {
            path: layer
            for path, layer in linear.items()
            if (everything and "." in path) or targets & _names_of(path)
        }
        missing = targets - set[str]().union(*map(_names_of, linear)) if not everything else set()
        if found and not missing:
            return found
    known = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in linear))
    raise InputError(
        f"{name}: no linear layer is called {' or '.join(sorted(missing)) if words else 'as PEFT expects'}",
        fix=f"give lora_targets of {known}, or all-linear",
    )


def _names_of(path: str) -> set[str]:
    """Return the words that name a layer: its own, without ``_proj``, and those of the layers that it is made of."""
    last = path.rpartition(".")[2]
    parts = _FUSED.get(last, ())
    return {last, last.removesuffix("_proj"), *parts, *(f"{part}_proj" for part in parts)}


@dataclass(frozen=True)
class _TransformerSizes:
    """Sizes of a transformer: counts, and the sequence length in tokens."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    sequence: int
    causal: bool


class Embedding(nn.Module):
    """Token plus learned position embedding; BERT-like ones are normalised."""

    def __init__(self, sizes: _TransformerSizes) -> None:
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

    def __init__(self, sizes: _TransformerSizes) -> None:
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

    def __init__(self, sizes: _TransformerSizes) -> None:
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

    def __init__(self, sizes: _TransformerSizes) -> None:
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

    def __init__(self, sizes: _TransformerSizes) -> None:
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


class _Transformer(nn.Module):
    """Embedding, blocks, head; the head's weight is not tied to the embedding's."""

    def __init__(self, sizes: _TransformerSizes) -> None:
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


_TRANSFORMER_SPLIT = {
    "blocks.*.attention.qkv": "column",
    "blocks.*.attention.projection": "row",
    "blocks.*.feed_forward.up": "column",
    "blocks.*.feed_forward.down": "row",
}


@dataclass
class Workload:
    """A model with what one training step of it needs."""

    name: str  # name of the configuration row
    row: Mapping[str, Any]  # the row itself
    precision: Precision  # number formats of the step
    recipe: Recipe  # what its family made of the row

    @property
    def model(self) -> nn.Module:
        """Whole model, in training mode; on the CPU unless it was built elsewhere."""
        return self.recipe.model

    @property
    def units(self) -> dict[str, list[str]]:
        """Consecutive pieces that a pipeline can be cut between, with the modules each runs.

        Words in angle brackets, such as ``"<flatten>"``, are functions between modules. Empty for a
        model that is not a chain.
        """
        return self.recipe.units

    @property
    def tensor_split(self) -> dict[str, str]:
        """Module pattern to ``"column"`` or ``"row"``: the Megatron split."""
        return self.recipe.tensor_split

    def make_batch(self, batch: int, seed: int, device: str = "cpu") -> tuple[Inputs, Any]:
        """Return synthetic inputs and targets for ``batch`` samples; on ``meta`` shapes only.

        Inputs that are a tuple are the model's arguments, those that are a dict its named ones: see
        `trioflow.trace.capture.training_step.call_model`.
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
    """Build a workload from its row (``config/workloads.tsv`` or the catalogue; text in place of numbers is understood).

    ``device``: where weights are made, ``meta`` for shapes without memory; by default PyTorch's.
    Raises InputError when family, model, optimizer or precision is unknown, or a size is missing or
    does not fit.
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
        half = precision.recipe.casts_model and not precision.recipe.main_parameter_bytes
        adapt_model(recipe, row, torch.float32 if half else None)
    return Workload(name, row, precision, recipe)


def _build_transformer(row: Mapping[str, Any]) -> Recipe:
    numbers = {
        k: need_size(row, k) for k in ("hidden", "layers", "heads", "vocabulary", "sequence")
    }
    if numbers["hidden"] % numbers["heads"]:
        raise InputError(
            f"workload {row['workload']}: hidden {numbers['hidden']} is not a multiple of heads {numbers['heads']}"
        )
    sizes = _TransformerSizes(**numbers, causal=need_flag(row, "causal"))
    units = {"embedding": ["embedding"]}
    units |= {f"blocks.{i}": [f"blocks.{i}"] for i in range(sizes.layers)}
    units["head"] = ["head"]

    def make_batch(batch: int, seed: int, device: str) -> tuple[Inputs, Any]:
        return make_tokens(batch, sizes.sequence, sizes.vocabulary, seed, device)

    model = _Transformer(sizes).train()
    return Recipe(model, make_batch, mean_cross_entropy, units, dict(_TRANSFORMER_SPLIT))


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Recipe]] = {
    "torchvision": build_torchvision,
    "transformer": _build_transformer,
    "transformers": build_transformers,
    LANGUAGE: build_language_model,
    "user": build_user_model,
}
