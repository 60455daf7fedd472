"""Workloads that can be captured and measured: model, data, loss, optimizer; `build_workload` is the door.

A row of a table goes in, a `Workload` comes out, built from the row with a seed; nothing is
downloaded. The family ``transformer``, GPT-2-like or BERT-like, is built here from sizes alone.

`adapt_model` freezes parameters and puts low-rank adapters (LoRA) beside frozen linear layers. They have PEFT's names
and arithmetic: what ``lora_A.default`` and ``lora_B.default`` make is scaled and added to
the result of ``base_layer``. Those of a model in half precision without main weights are in fp32.

Language models of transformers are built from published configurations (`build_transformers`).
Every model has its language-modelling head and its published dropout. Attention
is PyTorch's ``scaled_dot_product_attention`` for all of them. It is called
without a mask: the sequences here are neither padded nor packed, and the check
for that in transformers reads values back from the device, which neither a
step on a GPU nor a model without values should wait for.
A whole model hands more than activations from block to block (positions,
masks); these modules compute the rest anew in every stage.

References
----------
E. J. Hu et al., LoRA, arXiv 2106.09685. PEFT 0.17: ``tuners/lora/layer.py`` (``Linear.forward``),
``tuners/tuners_utils.py`` (``cast_adapter_dtype``), ``utils/constants.py`` (default targets).

Optimizers go by name, and number formats (`Precision`) are switched on inside a step and nowhere else.
fp32 is strict: TF32 is off for matrix products and for cuDNN, where PyTorch's
default leaves it on for convolutions. tf32 switches it on for both; it is
nothing on a CPU. bf16 and fp16 are autocast: weights stay in single
precision, and what autocast leaves in single precision is computed strictly.
fp16 also scales the loss, as its small gradients would vanish otherwise. The
other recipes of `trioflow.base.precision_recipes` hold the model itself in bf16.

``adamw`` leaves the optimizer's implementation to PyTorch (on a GPU one call over
many tensors, on a CPU a loop over parameters); ``adamw-foreach`` and
``adamw-fused`` insist on one.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import filter as filter_names
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function

from trioflow.base.errors import InputError
from trioflow.base.precision_recipes import PrecisionRecipe, choose_recipe
from trioflow.base.provenance import read_own_records
from trioflow.base.settings import CONFIGURED, FAMILIES, LANGUAGE, OPTIMIZERS
from trioflow.trace.language.decoder import build_language_model
from trioflow.trace.language.sizes import split_adapters
from trioflow.trace.workloads.configured import (
    ROTARY,
    build_configured,
    cut_units,
    import_transformers,
    instantiate,
    quiet,
    split_by_name,
)
from trioflow.trace.workloads.recipe import (
    FUNCTIONS,
    WorkloadRecipe,
    build_torchvision,
    build_user_model,
    make_tokens,
    mean_cross_entropy,
    need_flag,
    need_size,
    read_size,
)


def choose_optimizer(name: str, target: str) -> str:
    """Return an optimizer in the form in which PyTorch runs it by itself on a kind of processor.

    On a GPU that is one operator over lists of tensors, on a CPU a loop over parameters
    (``torch.optim.optimizer._default_to_fused_or_foreach``).
    """
    return f"{name}-foreach" if target == "cuda" and "-" not in name else name


class MainWeights:
    """An optimizer over fp32 copies of half-precision weights, as Megatron-LM's and nanotron's.

    Backward hands each gradient over in fp32, or the update casts it, the copies are updated, and the
    weights are written from them.
    """

    def __init__(self, name: str, parameters: Iterable[nn.Parameter], in_fp32: bool = True) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        for parameter in self.parameters:
            parameter.grad_dtype = torch.float32 if in_fp32 else parameter.dtype
        self.main = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = make_optimizer(name, self.main)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in (*self.parameters, *self.main):
            parameter.grad = None

    def step(self) -> None:
        """Update the copies, then the weights from them."""
        with record_function("Optimizer.step#main gradients"):
            for main, parameter in zip(self.main, self.parameters, strict=True):
                kept = parameter.grad
                main.grad = kept if kept is None or kept.dtype == main.dtype else kept.float()
        self.optimizer.step()
        with torch.no_grad(), record_function("Optimizer.step#main weights"):
            torch._foreach_copy_(self.parameters, self.main)


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer (of `trioflow.base.experiments.OPTIMIZERS`) with a small rate: the data are random."""
    algorithm, _, variant = name.partition("-")
    flags: dict[str, Any] = {variant: True} if variant else {}
    if algorithm == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **flags)
    kind = torch.optim.Adam if algorithm == "adam" else torch.optim.AdamW
    return kind(parameters, lr=1e-4, **flags)


INITIAL_SCALE = 128.0
"""What fp16's loss is multiplied with at first.

PyTorch's own 65536 overflows in the first steps and halves until it does not;
meanwhile the optimizer is skipped, and no captured step may be one of those. ResNet-50
with random weights needed 512. The value costs no time.
"""

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """A recipe, and what it switches on."""

    recipe: PrecisionRecipe

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of forward and loss: autocast, or nothing."""
        kind = None if self.recipe.casts_model else _AUTOCAST.get(self.recipe.arithmetic)
        context: AbstractContextManager[Any] = torch.autocast(
            device.type, dtype=kind or torch.bfloat16, enabled=kind is not None
        )
        return context

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return the context of a whole step: what single precision means in it."""
        return single_precision("tf32" if self.recipe.arithmetic == "tf32" else "ieee")

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Return the gradient scaler; for anything but fp16, main weights too (Megatron's own is left out), it does nothing."""
        return torch.amp.GradScaler(
            device.type,
            init_scale=INITIAL_SCALE,
            enabled=self.recipe.arithmetic == "fp16" and not self.recipe.casts_model,
        )

    def cast(self, model: nn.Module) -> None:
        """Bring a model's weights and buffers into the format that forward reads."""
        if self.recipe.casts_model:
            model.to(_AUTOCAST[self.recipe.arithmetic])

    def make_optimizer(self, name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | MainWeights:
        """Return an optimizer over weights, with main weights where the recipe has them."""
        if self.recipe.main_parameter_bytes:
            return MainWeights(name, parameters, self.recipe.gradient_bytes == 4)
        return make_optimizer(name, parameters)

    def describe(self) -> dict[str, str]:
        """Return the facts that a trace keeps of it."""
        facts = {"precision": self.recipe.arithmetic}
        if self.recipe.name != self.recipe.arithmetic:
            facts["precision_recipe"] = self.recipe.name
        return facts


def choose_precision(name: str, workload: str) -> Precision:
    """Return a precision by name; InputError where there is none."""
    return Precision(choose_recipe(name, f"workload {workload}"))


@contextmanager
def single_precision(kind: str) -> Iterator[None]:
    """Let single precision mean ``"ieee"`` or ``"tf32"`` on a GPU (always ``"ieee"`` on a CPU), then as before."""
    backends = torch.backends
    switches = [
        *((holder, kind) for holder in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)),
        *((holder, "ieee") for holder in (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)),
    ]
    before = [holder.fp32_precision for holder, _ in switches]
    try:
        for holder, value in switches:
            holder.fp32_precision = value
        yield
    finally:
        for (holder, _), value in zip(switches, before, strict=True):
            holder.fp32_precision = value


class Architecture(NamedTuple):
    """A family of models: its classes in transformers, its settings of depth and of the longest sequence, its lists of blocks.

    Where there are several lists, the model is no chain: each decoder block reads the encoder's output.
    """

    config: str
    model: str
    depth: tuple[str, ...]
    longest: str
    stacks: tuple[str, ...]


@dataclass(frozen=True)
class PublishedModel:
    """A published model: its architecture and what differs from the configuration's defaults."""

    architecture: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = True


_ARCHITECTURES = {
    "gpt2": Architecture("GPT2Config", "GPT2LMHeadModel", ("n_layer",), "n_positions", ("transformer.h",)),
    "bert": Architecture(
        "BertConfig", "BertForMaskedLM", ("num_hidden_layers",), "max_position_embeddings", ("bert.encoder.layer",)
    ),
    "llama": Architecture(
        "LlamaConfig", "LlamaForCausalLM", ("num_hidden_layers",), "max_position_embeddings", ("model.layers",)
    ),
    # Positions are relative, so there is no longest sequence.
    "t5": Architecture(
        "T5Config",
        "T5ForConditionalGeneration",
        ("num_layers", "num_decoder_layers"),
        "",
        ("encoder.block", "decoder.block"),
    ),
}

MODELS = {name: PublishedModel(**fields) for name, fields in read_own_records("trace/workloads/build").items()}
"""The models' own configurations as published beside their weights; defaults are not repeated."""


def build_transformers(row: Mapping[str, Any]) -> WorkloadRecipe:
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
            f"workload {name}: unknown transformers model {chosen!r}", fix=f"use one of {', '.join(MODELS)}"
        )
    published = MODELS[chosen]
    kind = _ARCHITECTURES[published.architecture]
    sequence, layers = need_size(row, "sequence"), read_size(row, "layers")
    library = import_transformers(name)
    settings = {"use_cache": False, **published.settings}
    settings |= dict.fromkeys(kind.depth, layers) if layers else {}
    with quiet(library):
        config = getattr(library, kind.config)(**settings)
        # A T5 configuration ties the embeddings whatever it says; FLAN-T5's are not tied.
        config.tie_word_embeddings = published.tied
        model = instantiate(library, kind.model, config)
    chain = len(kind.stacks) == 1
    if not chain:
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
    split = split_by_name(model, kind.stacks)
    if not chain:
        make_batch = partial(_make_translations, sequence, int(config.vocab_size))
        return WorkloadRecipe(model, make_batch, mean_cross_entropy, tensor_split=split)
    make_batch = partial(make_tokens, sequence, int(config.vocab_size))
    units = cut_units(model, kind.stacks)
    return WorkloadRecipe(model, make_batch, mean_cross_entropy, units, split, partial(_make_unit, model, units))


def _make_translations(sequence: int, vocabulary: int, batch: int, seed: int, device: str = "cpu") -> tuple[Any, Any]:
    """Return tokens to read and tokens already written, and those to predict."""
    tokens, targets = make_tokens(2 * sequence, vocabulary, batch, seed, device)
    read, written = tokens[:, :sequence], tokens[:, sequence:]
    inputs = {"input_ids": read.contiguous(), "decoder_input_ids": written.contiguous()}
    return inputs, targets[:, :sequence].contiguous()


class _PositionedEmbedding(nn.Module):
    """Token plus learned position embedding, then dropout: the entrance of GPT-2."""

    def __init__(self, token: nn.Module, position: nn.Module, dropout: nn.Module) -> None:
        super().__init__()
        self.token, self.position, self.dropout = token, position, dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, sequence] to activations [batch, sequence, hidden]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.dropout(self.token(tokens) + self.position(positions))


class LayerBlock(nn.Module):
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
        return out[0] if isinstance(out, tuple) else out


def _make_unit(model: nn.Module, units: Mapping[str, list[str]], unit: str) -> nn.Module:
    """Return the module of one unit of a model that is a chain."""
    modules = [model.get_submodule(path) for path in units[unit]]
    if unit == "embedding":
        return _PositionedEmbedding(*modules) if len(modules) > 2 else modules[0]
    if unit == "head":
        return nn.Sequential(*modules)
    return LayerBlock(modules[0], next((m for path, m in model.named_modules() if path.endswith(ROTARY)), None))


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


def adapt_model(recipe: WorkloadRecipe, row: Mapping[str, Any], dtype: torch.dtype | None) -> None:
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
    for pattern in [words] if words else _TARGETS:
        targets = set(filter(None, pattern.replace(" ", "").split(",")))
        matching = {
            path: layer for path, layer in linear.items() if (everything and "." in path) or targets & _names_of(path)
        }
        missing = targets - set[str]().union(*map(_names_of, linear)) if not everything else set()
        if matching and not missing:
            return matching
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
        return self.norm(self.token(tokens) + self.position(positions))


class ShardedAttention(nn.Module):
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
        return self.projection(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class TransformerBlock(nn.Module):
    """One layer: normalisation before (GPT-2) or after (BERT) each half; inside it is four times as wide."""

    def __init__(self, sizes: _TransformerSizes) -> None:
        super().__init__()
        self.norm_before = sizes.causal
        self.norm1 = nn.LayerNorm(sizes.hidden)
        self.attention = ShardedAttention(sizes)
        self.norm2 = nn.LayerNorm(sizes.hidden)
        self.feed_forward = _chain_modules(
            up=nn.Linear(sizes.hidden, 4 * sizes.hidden),
            activation=nn.GELU(approximate="tanh" if sizes.causal else "none"),
            down=nn.Linear(4 * sizes.hidden, sizes.hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and feed-forward with residuals to x [batch, sequence, hidden]."""
        if self.norm_before:
            x = x + self.attention(self.norm1(x))
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed_forward(x))


def _chain_modules(**modules: nn.Module) -> nn.Sequential:
    """Return modules that run one after the other, by their names."""
    return nn.Sequential(OrderedDict(modules))


def _make_transformer(sizes: _TransformerSizes) -> nn.Module:
    """Return embedding, blocks and head, which BERT-like models transform before; its weight is not the embedding's."""
    hidden = sizes.hidden
    transform = nn.Identity() if sizes.causal else nn.Sequential(nn.Linear(hidden, hidden), nn.GELU())
    return _chain_modules(
        embedding=Embedding(sizes),
        blocks=nn.Sequential(*(TransformerBlock(sizes) for _ in range(sizes.layers))),
        head=_chain_modules(
            transform=transform, norm=nn.LayerNorm(hidden), vocabulary=nn.Linear(hidden, sizes.vocabulary, bias=False)
        ),
    )


_TRANSFORMER_SPLIT = {
    "blocks.*.attention.qkv": "column",
    "blocks.*.attention.projection": "row",
    "blocks.*.feed_forward.up": "column",
    "blocks.*.feed_forward.down": "row",
}


@dataclass(kw_only=True)
class Workload(WorkloadRecipe):
    """A model with what one training step of it needs: what its family made of a row, and the row."""

    name: str  # name of the configuration row
    row: Mapping[str, Any]  # the row itself
    precision: Precision  # number formats of the step

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | MainWeights:
        """Return the row's optimizer over some parameters, as the precision's recipe runs it."""
        return self.precision.make_optimizer(str(self.row["optimizer"]), parameters)

    def make_stage(self, unit_names: Iterable[str]) -> nn.Sequential:
        """Return the modules of some consecutive units as one pipeline stage."""
        stage = nn.Sequential()
        for unit in unit_names:
            if self.make_unit:
                stage.add_module(unit.replace(".", "_"), self.make_unit(unit))
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
        raise InputError(f"workload {name}: unknown family {family!r}", fix=f"use one of {', '.join(FAMILIES)}")
    if row["optimizer"] not in OPTIMIZERS:
        raise InputError(
            f"workload {name}: unknown optimizer {row['optimizer']!r}", fix=f"use one of {', '.join(OPTIMIZERS)}"
        )
    precision = choose_precision(str(row.get("precision") or "fp32"), name)
    torch.manual_seed(seed)
    with torch.device(device) if device else nullcontext():
        recipe = _BUILDERS[family](row)
        precision.cast(recipe.model)
        half = precision.recipe.casts_model and not precision.recipe.main_parameter_bytes
        adapt_model(recipe, row, torch.float32 if half else None)
    return Workload(**vars(recipe), name=name, row=row, precision=precision)


def _build_transformer(row: Mapping[str, Any]) -> WorkloadRecipe:
    numbers = {k: need_size(row, k) for k in ("hidden", "layers", "heads", "vocabulary", "sequence")}
    if numbers["hidden"] % numbers["heads"]:
        raise InputError(
            f"workload {row['workload']}: hidden {numbers['hidden']} is not a multiple of heads {numbers['heads']}"
        )
    sizes = _TransformerSizes(**numbers, causal=need_flag(row, "causal"))
    units = {"embedding": ["embedding"]}
    units |= {f"blocks.{i}": [f"blocks.{i}"] for i in range(sizes.layers)}
    units["head"] = ["head"]

    make_batch = partial(make_tokens, sizes.sequence, sizes.vocabulary)
    model = _make_transformer(sizes).train()
    return WorkloadRecipe(model, make_batch, mean_cross_entropy, units, dict(_TRANSFORMER_SPLIT))


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], WorkloadRecipe]] = {
    "torchvision": build_torchvision,
    "transformer": _build_transformer,
    "transformers": build_transformers,
    LANGUAGE: build_language_model,
    CONFIGURED: build_configured,
    "user": build_user_model,
}
