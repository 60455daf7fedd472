"""A decoder-only language model by its sizes: what decides the work of a training step, and nothing else.

A `LanguageModel` has the sizes, a `LanguageStep` says how a step of it is run; a `Configuration` is what a file says:
the model, and where it says so how it is trained. A network that is no such decoder is a `ConfiguredModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.precision_recipes import (
    COLOSSALAI,
    DEEPSPEED,
    DEFAULT_RECIPE,
    MEGATRON,
    NANOTRON,
    PYTORCH,
    RECIPES,
    choose_recipe,
)
from trioflow.base.settings import OPTIMIZERS
from trioflow.trace.facts import Facts

USUAL_SEQUENCE = 8192
"""Tokens of a sample of today's pre-training, for models that take as many."""


@dataclass(frozen=True)
class Configuration:
    """A model, and what else its configuration settles.

    ``step``: what is said of a ``LanguageStep``; ``degrees``: of a plan's columns, the data degree
    left out; ``accumulate``: micro-batches, where the file counts them instead of ``global_batch``;
    ``stages``: blocks of each as the framework cuts them, empty to be balanced; ``notes``: what
    changes work and is not followed; ``optimizer_instances``: groups of replicas that each share the optimizer;
    ``max_positions``: the longest sequence that the model takes, 0 where nothing says; ``ignored_window``: tokens that
    attention would read where it reads all, 0 where nothing says.
    """

    model: LanguageModel
    step: Mapping[str, Any] = field(default_factory=dict)
    degrees: Mapping[str, Any] = field(default_factory=dict)
    global_batch: int | None = None
    accumulate: int | None = None
    stages: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    optimizer_instances: int = 1
    max_positions: int = 0
    ignored_window: int = 0

    @property
    def usual_sequence(self) -> int:
        """Tokens of a sample where nobody says: the longest that the model takes, up to `USUAL_SEQUENCE`."""
        return min(self.max_positions or self.model.longest or USUAL_SEQUENCE, USUAL_SEQUENCE)

    def count_shard(self, replicas: int) -> int:
        """Return the replicas of a group that shares the optimizer, 1 where all do; InputError where none fits."""
        size, rest = divmod(replicas, self.optimizer_instances)
        if self.optimizer_instances > 1 and (rest or size < 2):
            raise InputError(
                f"{replicas} replicas do not make {self.optimizer_instances} groups that share the optimizer",
                place="num-distributed-optimizer-instances",
            )
        return size if self.optimizer_instances > 1 else 1

    def name_stages(self) -> list[list[str]] | None:
        """Return the units of each pipeline stage, embedding first, head last; None where trioflow is to balance them."""
        if not self.stages:
            return None
        ends = list(accumulate(self.stages))
        named = [[f"{BLOCKS}.{i}" for i in range(end - size, end)] for size, end in zip(self.stages, ends, strict=True)]
        named[0].insert(0, EMBEDDING)
        named[-1].append(HEAD)
        return named


@dataclass(frozen=True)
class ConfiguredModel:
    """A network that is no decoder of our own: its ``config.json``, of which another library builds it.

    ``content``: the file's text; ``kind``: its ``model_type``, or its class in diffusers.
    """

    name: str
    kind: str
    content: str
    file: str


@dataclass(frozen=True)
class ConfigurationFile:
    """A file that may configure a model or its training: how the model is called, its path and its text.

    ``content``: of JSON, YAML or TOML; empty for a text, and where it is no object.
    """

    name: str
    file: str
    text: str
    content: Mapping[str, Any]


_NORMS = ("rms", "layer", "layer-no-bias")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "squared_relu")
POSITIONS = ("rotary", "learned", "none")
EMBEDDING, BLOCKS, HEAD = "embedding", "model.layers", "head"
"""A model's pipeline units: what is before its blocks, the blocks with their numbers, what is behind them."""
_OPTIONAL = (
    "longest",
    "experts",
    "experts_per_token",
    "shared_feed_forward",
    "latent",
    "query_latent",
    "rotary_size",
    "value_size",
    "dense_layers",
    "dense_feed_forward",
    "window",
)


_MOST_LAYERS = 512
"""Four times those of the deepest models that are trained."""


@dataclass(frozen=True)
class LanguageModel:
    """A decoder-only transformer, dense or with experts in all blocks but the first ones.

    ``positions``, ``norm``, ``activation``: one of `POSITIONS`, `NORMS` (rms has no mean, layer-no-bias no bias) and
        `ACTIVATIONS`; ``longest``: positions that a learned table holds, 0 without one.
    ``kv_heads``, ``head_size``: heads of keys and values; width of a head's queries and keys.
    ``feed_forward``: width inside the feed-forward layer, of one expert where there are several; ``gated``: whether a
        second product gates its activation (SwiGLU).
    ``vocabulary``: rows of the token embedding, padding included; ``tied``: the head's weight is the embedding's.
    ``query_bias``, ``output_bias``, ``feed_forward_bias``, ``router_bias``: biases of query, key and value; of
        attention's output; of the feed-forward layer; of the router's product.
    ``query_norm``: whether each head's queries and keys are normalised; of latent attention, the latent vectors.
    ``dropout``, ``attention_dropout``: probabilities of dropping a residual, and a weight of attention.
    ``experts``, ``experts_per_token``: of a block, and those that a router chooses for each token; 0 for a dense model.
    ``shared_feed_forward``: width of an expert that every token passes besides; 0 without one.
    ``dense_layers``, ``dense_feed_forward``: first blocks without experts, and the width of their feed-forward layer.
    ``latent``, ``query_latent``: width of the latent vector that a token's keys and values are made from, and of that of
        its queries; 0 for plain attention, and for queries made in one product.
    ``rotary_size``, ``value_size``: of latent attention the part of ``head_size`` that is rotated, one key for all heads,
        and the width of a head's values; 0 without it.
    ``window``: tokens that attention reads in every other block, from the first on; 0 where all read all.
    ``sinks``: whether each head has a learned score that takes part in the softmax and reads nothing.

    Latent attention is that of DeepSeek-V2 (arXiv 2405.04434, section 2.1); windows and sinks are those of gpt-oss
    (arXiv 2508.10925, section 2.3).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    positions: str = "rotary"
    longest: int = 0
    norm: str = "rms"
    activation: str = "silu"
    gated: bool = True
    query_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    query_norm: bool = False
    tied: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    shared_feed_forward: int = 0
    router_bias: bool = False
    dense_layers: int = 0
    dense_feed_forward: int = 0
    latent: int = 0
    query_latent: int = 0
    rotary_size: int = 0
    value_size: int = 0
    window: int = 0
    sinks: bool = False

    @property
    def embedding_parameters(self) -> int:
        """Parameters of token and position tables, and of a head of its own."""
        tables = 1 if self.tied else 2
        return (tables * self.vocabulary + self.longest) * self.hidden

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, the last."""
        return self._count_block(self.experts)

    @property
    def dense_block(self) -> LanguageModel:
        """The model whose every block is as the first ones, without experts."""
        return replace(
            self,
            feed_forward=self.dense_feed_forward or self.feed_forward,
            experts=0,
            experts_per_token=0,
            shared_feed_forward=0,
            router_bias=False,
            dense_layers=0,
            dense_feed_forward=0,
        )

    @property
    def values(self) -> int:
        """Width of a head's values."""
        return self.value_size or self.head_size

    def _count_block(self, experts: int) -> int:
        """Return parameters of one block of which only so many experts count."""
        router = (self.hidden + self.router_bias) * self.experts if self.experts else 0
        feed_forward = self._count_feed_forward(self.feed_forward) * (experts if self.experts else 1)
        feed_forward += self._count_feed_forward(self.shared_feed_forward) if self.shared_feed_forward else 0
        return self._attention_parameters + router + feed_forward + 2 * self._norm_parameters

    @property
    def _attention_parameters(self) -> int:
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        made = self.heads * self.values
        total = made * self.hidden + self.hidden * self.output_bias + self.heads * self.sinks
        if not self.latent:
            total += self.hidden * (queries + 2 * keys) + (queries + 2 * keys) * self.query_bias
            return total + 2 * self.head_size * self.query_norm
        norms = 2 if self.norm == "layer" else 1
        total += (self.query_latent or self.hidden) * queries + self.hidden * self.query_latent
        total += self.hidden * (self.latent + self.rotary_size)
        total += self.latent * (queries - self.heads * self.rotary_size + made)
        return total + norms * (self.latent + self.query_latent) * self.query_norm

    def _count_feed_forward(self, width: int) -> int:
        inside = 2 if self.gated else 1
        return (inside + 1) * self.hidden * width + (inside * width + self.hidden) * self.feed_forward_bias

    @property
    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def parameters(self) -> int:
        """All parameters, a tied weight once."""
        blocks = (self.layers - self.dense_layers) * self.block_parameters
        if self.dense_layers:
            blocks += self.dense_layers * self.dense_block.block_parameters
        return self.embedding_parameters + blocks + self._norm_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes: all but those of the experts not chosen for it."""
        unused = self.block_parameters - self._count_block(self.experts_per_token)
        return self.parameters - (self.layers - self.dense_layers) * unused

    def flop_per_token(self, sequence: int) -> float:
        """Return a training step's model FLOPs a token: 6 x active parameters + 12 x layers x width x sequence.

        As the PaLM paper (arXiv 2204.02311, appendix B) and nanotron count: all parameters that a
        token passes, embeddings too; attention in full, causal or not; nothing computed again. The
        width is heads x head size, of latent attention the mean of keys' and values'; a window
        counts as a sequence of twice its tokens, half of which is computed too.
        """
        windowed = -(-self.layers // 2) if self.window else 0
        read = (self.layers - windowed) * sequence + windowed * min(2 * self.window, sequence)
        return 6.0 * self.active_parameters + 6.0 * self.heads * (self.head_size + self.values) * read

    def describe(self) -> str:
        """Return the sizes that a user would compare, in words."""
        share = f" ({self.kv_heads} of keys and values)" if self.kv_heads != self.heads else ""
        active = f", {self.active_parameters / 1e9:.2f} B active" if self.experts else ""
        experts = (
            f"{self.experts} experts ({self.experts_per_token} a token"
            f"{f', a shared one of {self.shared_feed_forward}' if self.shared_feed_forward else ''}) of "
            if self.experts
            else ""
        )
        latent = f" from a latent vector of {self.latent}" if self.latent else ""
        dense = f" (the first {self.dense_layers} without experts)" if self.dense_layers else ""
        return (
            f"{self.parameters / 1e9:.2f} B parameters{active}: {self.layers} layers{dense}, hidden {self.hidden}, "
            f"{self.heads} heads{share} of {self.head_size}{latent}, {experts}feed-forward {self.feed_forward}"
            f"{' gated' if self.gated else ''}, vocabulary {self.vocabulary}{', tied' if self.tied else ''}"
        )

    def check(self, place: str) -> LanguageModel:
        """Return the model if a network can have these sizes (of the file ``place``).

        Raises InputError when one is not positive, a word is unknown, or heads do not divide.
        """
        words = {"norm": _NORMS, "activation": ACTIVATIONS, "positions": POSITIONS}
        for cell in fields(self):
            value: Any = getattr(self, cell.name)
            if cell.name in words and value not in words[cell.name]:
                raise InputError(f"{cell.name} {value!r} is not one of {', '.join(words[cell.name])}", file=place)
            least = 0 if cell.name in _OPTIONAL else 1
            if cell.type in (int, "int") and value < least:
                raise InputError(f"{cell.name} {value} is below {least}", file=place)
        sizes = (self.rotary_size, self.value_size)
        refused = (
            (self.layers > _MOST_LAYERS, f"{self.layers:,} layers, and {_MOST_LAYERS:,} are the most"),
            (self.heads % self.kv_heads, f"{self.kv_heads} heads of keys and values do not divide {self.heads} heads"),
            (
                not min(self.experts, 1) <= self.experts_per_token <= self.experts,
                f"{self.experts_per_token} experts a token cannot be chosen of {self.experts}",
            ),
            (
                self.dense_layers
                and not (self.experts and self.dense_layers < self.layers and self.dense_feed_forward),
                f"{self.dense_layers} first blocks without experts, of {self.layers} with {self.experts} experts"
                f" and a feed-forward layer of {self.dense_feed_forward}",
            ),
            (
                self.latent and not (0 < self.rotary_size < self.head_size and self.value_size),
                f"latent attention with rotary_size and value_size {sizes} of {self.head_size}",
            ),
            (not self.latent and (self.query_latent or any(sizes)), "sizes of latent attention without a latent width"),
            (
                (self.positions == "learned") != (self.longest > 0),
                f"{self.positions} positions with a table of {self.longest}",
            ),
        )
        for problem in (text for impossible, text in refused if impossible):
            raise InputError(problem, file=place)
        return self


def read_language_model(facts: Facts) -> tuple[LanguageModel, int] | None:
    """Return the model and the tokens of a sample that a trace's facts say; None where they do not."""
    described = facts.language_model
    if not described:
        return None
    names = [cell.name for cell in fields(LanguageModel)]
    return LanguageModel(**{name: described[name] for name in names if name in described}), int(described["sequence"])


def split_adapters(rules: Mapping[str, str]) -> dict[str, str]:
    """Return the rules of tensor parallelism of the parts of adapted layers, from those of the layers.

    Of an adapter beside a column split the second product is cut as that, beside a row split the first.
    """
    kinds: dict[str, str] = {}
    for pattern, kind in rules.items():
        cut = "lora_B" if kind == "column" else "lora_A"
        kinds |= {f"{pattern}.base_layer": kind, f"{pattern}.{cut}.*": kind}
    return kinds


FLASH, FLASH_2, CUDNN = "flash", "flash2", "cudnn"
ATTENTIONS = (FLASH, FLASH_2, "flash3", CUDNN, "fused-softmax", "eager")
"""flash is what PyTorch's own operator runs, FlashAttention 2 up to Hopper and cuDNN's kernel on Blackwell; flash2 and flash3
are that version everywhere, nanotron's flash-attn is the second. cudnn is what Transformer Engine prefers on Hopper and
newer (``get_attention_backend``), as fast as flash3, and as flash elsewhere. None of them keeps scores. fused-softmax keeps them in half precision, one kernel scaling, masking and normalising
them, as Megatron-LM and Transformer Engine do without flash; eager keeps them in fp32, as transformers does."""
EAGER, COMPILE, LIGER = "eager", "compile", "liger"
FLASH_ATTN, LAYERS, GRADIENTS = "flash-attn", "layers", "gradients"
FUSIONS = (EAGER, COMPILE, LIGER, FLASH_ATTN, LAYERS, GRADIENTS)
"""eager: PyTorch runs operator by operator what transformers writes: an RMS norm and a rotation are several passes, in
fp32 and in the model's format, a SwiGLU is two, the loss is computed of scores cast to fp32. compile: norm, rotation,
SwiGLU and loss are one kernel each way, as torch.compile's Inductor fuses them. liger: as Liger-Kernel, which computes
the head's product with the loss besides, a piece at a time. flash-attn: norm and rotation are its kernels, SwiGLU and
loss PyTorch's, as in nanotron. layers: queries, keys and values are one product, gate and up another, and norm,
rotation and gated activation are one kernel each, as in Megatron Core and Transformer Engine. gradients: products of
weights' gradients add to the main gradients besides (gradient accumulation fusion)."""
FUSED, CHUNKED = "fused", "chunked"
LOSSES = (EAGER, FUSED, CHUNKED)
"""eager: the loss is computed of scores cast to fp32, which backward holds besides; fused: one kernel each way reads the
scores and keeps a number per token; chunked: with the head's product, a piece at a time, no scores beyond a piece."""
_OWN_LOSSES = {COMPILE: FUSED, LIGER: CHUNKED}
_OWN_ATTENTIONS = {PYTORCH: FLASH, MEGATRON: CUDNN, NANOTRON: FLASH_2, DEEPSPEED: FLASH_2, COLOSSALAI: FLASH_2}
_OWN_FUSIONS = {PYTORCH: EAGER, MEGATRON: GRADIENTS, NANOTRON: FLASH_ATTN, DEEPSPEED: LAYERS, COLOSSALAI: LAYERS}


@dataclass(frozen=True)
class LanguageStep:
    """A training step of a language model on one device.

    ``precision``: a recipe of `trioflow.base.precision_recipes`. ``attention`` (one of
    `ATTENTIONS`) and ``fusion`` (of `FUSIONS`), empty: what the recipe's framework does: cudnn and
    gradients for Megatron Core's, flash2 for nanotron's, with flash-attn, and DeepSpeed's, with layers, flash and eager
    for PyTorch's own. ``cuda_graphs``: whether the host launches a block's forward, and its backward,
    as one CUDA graph each. ``deterministic``: whether attention adds its gradients in a fixed order.
    ``freeze``: patterns of parameters or modules that do not train, with commas.
    ``lora``: rank of adapters, 0 for none, beside the linear layers ``lora_targets`` (names with commas, or
    all-linear; PEFT's default if empty), which drop ``lora_dropout`` of what they read; all else is frozen then.
    ``loss``: one of `LOSSES`; empty: what ``fusion`` fuses of it. ``optimizer``: one of `base.settings.OPTIMIZERS`.
    """

    sequence: int
    batch: int = 1
    precision: str = DEFAULT_RECIPE
    attention: str = ""
    fusion: str = ""
    optimizer: str = "adamw-fused"
    cuda_graphs: bool = False
    deterministic: bool = False
    freeze: str = ""
    lora: int = 0
    lora_targets: str = ""
    lora_dropout: float = 0.0
    loss: str = ""

    def __post_init__(self) -> None:
        for name, least in (("sequence", 1), ("batch", 1), ("lora", 0)):
            if getattr(self, name) < least:
                raise InputError(f"--{name} {getattr(self, name)} is below {least}")
        if not 0 <= self.lora_dropout < 1:
            raise InputError(f"--lora-dropout {self.lora_dropout} is not a share below 1")
        if not self.lora and (self.lora_targets or self.lora_dropout):
            raise InputError("--lora-targets or --lora-dropout without --lora", fix="give --lora 8")
        choose_recipe(self.precision)
        for flag, value, words in (
            ("--attention", self.attention, ("", *ATTENTIONS)),
            ("--fusion", self.fusion, ("", *FUSIONS)),
            ("--optimizer", self.optimizer, OPTIMIZERS),
            ("--loss", self.loss, ("", *LOSSES)),
        ):
            if value not in words:
                raise InputError(f"{flag}: unknown word {value!r}", fix=f"use {', '.join(filter(None, words))}")

    def settle(self) -> LanguageStep:
        """Return the step with the kernels that the recipe's framework runs where none are named.

        Raises InputError when products are to add to main gradients that it does not have.
        """
        recipe = choose_recipe(self.precision)
        if self.fusion == GRADIENTS and not recipe.adds_gradients:
            fusing = ", ".join(name for name, one in RECIPES.items() if one.adds_gradients)
            raise InputError(
                f"--fusion {GRADIENTS}: with --precision {self.precision} no product adds to main gradients",
                fix=f"use --fusion {LAYERS}, or --precision {fusing}",
            )
        fusion = self.fusion or _OWN_FUSIONS[recipe.framework]
        # No fused kernel of Transformer Engine's takes fp32.
        wide = recipe.framework == MEGATRON and not recipe.casts_model
        return replace(
            self,
            attention=self.attention or (EAGER if wide else _OWN_ATTENTIONS[recipe.framework]),
            fusion=fusion,
            loss=self.loss or _OWN_LOSSES.get(fusion, EAGER),
        )
