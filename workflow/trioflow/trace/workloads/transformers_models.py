"""Language models of transformers, built from published configurations; nothing is downloaded.

Every model has its language-modelling head and its published dropout. Attention
is PyTorch's ``scaled_dot_product_attention`` for all of them. It is called
without a mask: the sequences here are neither padded nor packed, and the check
for that in transformers reads values back from the device, which neither a
step on a GPU nor a model without values should wait for.

A whole model hands more than activations from block to block (positions,
masks); these modules compute the rest anew in every stage.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from trioflow.base.errors import InputError, how_to_install
from trioflow.base.shipped import read_own_records
from trioflow.trace.workloads.recipe import (
    Recipe,
    make_tokens,
    mean_cross_entropy,
    need_size,
    read_size,
)
from trioflow.trace.workloads.torchvision_models import define_missing_operators

ATTENTION = "trioflow_unmasked_sdpa"
"""Name under which the attention without masks is made known to transformers."""


@dataclass(frozen=True)
class Architecture:
    """A family of models: its classes in transformers and how Megatron splits it."""

    config: str
    model: str
    depth: tuple[str, ...]
    tensor_split: Mapping[str, str]
    longest: str = ""
    encoder_decoder: bool = False


@dataclass(frozen=True)
class Published:
    """A published model: its architecture and what differs from the configuration's defaults."""

    architecture: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = True


_GPT2 = {
    "transformer.h.*.attn.c_attn": "column", "transformer.h.*.attn.c_proj": "row",
    "transformer.h.*.mlp.c_fc": "column", "transformer.h.*.mlp.c_proj": "row",
}  # fmt: skip
_BERT = {
    **{f"bert.encoder.layer.*.attention.self.{part}": "column" for part in ("query", "key", "value")},
    "bert.encoder.layer.*.attention.output.dense": "row",
    "bert.encoder.layer.*.intermediate.dense": "column",
    "bert.encoder.layer.*.output.dense": "row",
}  # fmt: skip
_LLAMA = {
    **{f"model.layers.*.self_attn.{part}_proj": "column" for part in "qkv"},
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column", "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
}  # fmt: skip
_T5 = {
    f"{place}.{part}": kind
    for place, parts in {
        "encoder.block.*.layer.0.SelfAttention": "qkvo",
        "decoder.block.*.layer.0.SelfAttention": "qkvo",
        "decoder.block.*.layer.1.EncDecAttention": "qkvo",
        "encoder.block.*.layer.1.DenseReluDense": ("wi", "wi_0", "wi_1", "wo"),
        "decoder.block.*.layer.2.DenseReluDense": ("wi", "wi_0", "wi_1", "wo"),
    }.items()
    for part in parts
    for kind in ("row" if part.endswith("o") else "column",)
}

_ARCHITECTURES = {
    "gpt2": Architecture("GPT2Config", "GPT2LMHeadModel", ("n_layer",), _GPT2, "n_positions"),
    "bert": Architecture(
        "BertConfig", "BertForMaskedLM", ("num_hidden_layers",), _BERT, "max_position_embeddings"
    ),
    "llama": Architecture(
        "LlamaConfig", "LlamaForCausalLM", ("num_hidden_layers",), _LLAMA, "max_position_embeddings"
    ),
    # Positions are relative, so there is no longest sequence.
    "t5": Architecture(
        "T5Config", "T5ForConditionalGeneration", ("num_layers", "num_decoder_layers"), _T5,
        encoder_decoder=True,
    ),
}  # fmt: skip

MODELS = {
    name: Published(**fields)
    for name, fields in read_own_records("trace/workloads/transformers_models").items()
}
"""The models' own configurations as published beside their weights; defaults are not repeated."""


def build_transformers(row: Mapping[str, Any]) -> Recipe:
    """Build a model of transformers (a key of `MODELS`) with random weights.

    ``sequence`` [tokens]; ``layers`` where the depth is not the published one, in each half of an
    encoder-decoder, which reads and predicts as many tokens. Tied heads would lie in a pipeline's
    first and last stage; encoder-decoders have no pipeline units: each decoder block reads the
    encoder's output. Raises InputError when the model is unknown, its sequence too long or
    transformers not installed.
    """
    name, chosen = str(row["workload"]), str(row["model"])
    if chosen not in MODELS:
        raise InputError(
            f"workload {name}: unknown transformers model {chosen!r}",
            fix=f"use one of {', '.join(MODELS)}",
        )
    published = MODELS[chosen]
    kind = _ARCHITECTURES[published.architecture]
    sequence, layers = need_size(row, "sequence"), read_size(row, "layers")
    library = _import_transformers(name)
    settings = {"use_cache": False, **published.settings}
    settings |= dict.fromkeys(kind.depth, layers) if layers else {}
    with _quiet(library):
        config = getattr(library, kind.config)(**settings)
        # A T5 configuration ties the embeddings whatever it says; FLAN-T5's are not tied.
        config.tie_word_embeddings = published.tied
        model = _instantiate(library, kind.model, config)
    if kind.encoder_decoder:
        # Untying the head also unties the two halves' tables, which published models share.
        model.set_input_embeddings(model.get_input_embeddings())
    if not published.tied:
        # Random scores of unit size: the library's are so large that the softmax underflows,
        # and denormal numbers make a backward on a CPU several times as long.
        nn.init.normal_(model.get_output_embeddings().weight, std=config.hidden_size**-0.5)
    if kind.longest and sequence > getattr(config, kind.longest):
        raise InputError(
            f"workload {name}: {chosen} reads at most {getattr(config, kind.longest)} tokens, not {sequence}",
            fix="use a shorter sequence",
        )
    split = {p: k for p, k in kind.tensor_split.items() if _matches(model, p)}
    if kind.encoder_decoder:
        batches = _encoder_decoder_batches(sequence, int(config.vocab_size))
        return Recipe(model, batches, mean_cross_entropy, tensor_split=split)
    stages = STAGES[published.architecture](model)

    def make_batch(batch: int, seed: int, device: str) -> tuple[Any, Any]:
        return make_tokens(batch, sequence, int(config.vocab_size), seed, device)

    return Recipe(model, make_batch, mean_cross_entropy, stages.units, split, stages.make_unit)


def _encoder_decoder_batches(
    sequence: int, vocabulary: int
) -> Callable[[int, int, str], tuple[Any, Any]]:
    """Return what draws tokens to read, tokens already written and tokens to predict."""

    def make_batch(batch: int, seed: int, device: str) -> tuple[Any, Any]:
        tokens, targets = make_tokens(batch, 2 * sequence, vocabulary, seed, device)
        read, written = tokens[:, :sequence], tokens[:, sequence:]
        inputs = {"input_ids": read.contiguous(), "decoder_input_ids": written.contiguous()}
        return inputs, targets[:, :sequence].contiguous()

    return make_batch


def _matches(model: nn.Module, pattern: str) -> bool:
    """Return whether a pattern names a module; gated and plain feed-forwards differ."""
    try:
        model.get_submodule(pattern.replace("*", "0"))
    except AttributeError:
        return False
    return True


def _import_transformers(workload: str) -> ModuleType:
    """Import transformers, whose models import torchvision where installed: that has to be importable first."""
    try:
        define_missing_operators()
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"workload {workload}: transformers is not installed ({error})",
            fix=how_to_install("capture"),
        ) from None


def _instantiate(library: ModuleType, name: str, config: Any) -> nn.Module:
    """Build a model in single precision whose attention takes no mask."""
    kind = getattr(library, name)
    attention = "eager"
    if kind._supports_sdpa:
        module = importlib.import_module("transformers.integrations.sdpa_attention")
        library.AttentionInterface.register(ATTENTION, module.sdpa_attention_forward)
        attention = ATTENTION
    model: nn.Module = kind._from_config(config, attn_implementation=attention)
    return model.float().train()


@contextmanager
def _quiet(library: ModuleType) -> Iterator[None]:
    """Silence remarks about text generation, which never happens here."""
    logging = library.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


class _PositionedEmbedding(nn.Module):  # type: ignore[misc]
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
        lambda: _PositionedEmbedding(*(model.get_submodule(path) for path in paths)),
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
