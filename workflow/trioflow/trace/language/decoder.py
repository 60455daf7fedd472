"""The decoder-only network that a configuration describes, as PyTorch runs it; `build_language_model` is the door.

Modules have the names that models of the Llama family share in transformers, so that plans find the layers to
split. Fused layers are Megatron Core's: one product for queries, keys and values, group by group of heads, another for
gate and up.

Kernels beside the products go by the words of ``--fusion`` (`Kernels`): what PyTorch runs, or what stands for a fused
one. A fused kernel is an operator that moves as many bytes: normalisation without a mean stands as PyTorch's layer
normalisation without a bias, the rotation of queries and keys as one multiplication by a table, a fused gated
activation as a product of gate and up, in Megatron Core's fused layers as ``glu``.

References
----------
transformers, ``models/llama/modeling_llama.py`` (``LlamaRMSNorm``, ``apply_rotary_pos_emb``) and
``loss/loss_utils.py``: the passes of eager PyTorch. Liger-Kernel, ``ops/fused_linear_cross_entropy.py``: the
head's products with the loss, a piece of the tokens at a time.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trioflow.trace.language.sizes import (
    BLOCKS,
    CHUNKED,
    COMPILE,
    EAGER,
    EMBEDDING,
    FUSED,
    GRADIENTS,
    HEAD,
    LAYERS,
    LIGER,
    LanguageModel,
)
from trioflow.trace.workloads.recipe import WorkloadRecipe, make_tokens, need_size

_EPSILON = 1e-6
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}


class Kernels(NamedTuple):
    """Words of ``--attention``, ``--fusion`` and ``--loss``."""

    attention: str
    fusion: str
    loss: str

    @property
    def fused_layers(self) -> bool:
        """Whether layers that read the same are one product."""
        return self.fusion in (LAYERS, GRADIENTS)

    def make_norm(self, sizes: LanguageModel, width: int) -> nn.Module:
        """Return the normalisation of a model's activations."""
        if sizes.norm == "rms" and self.fusion == EAGER:
            return _EagerNorm(width)
        return nn.LayerNorm(width, bias=sizes.norm == "layer")

    def rotate(self, x: Tensor, table: Tensor) -> Tensor:
        """Return x [batch, sequence, heads, size] rotated by positions; the table stands for cosines and sines alike."""
        if self.fusion != EAGER:
            return x * table
        x, table, half = x.transpose(1, 2), table.transpose(0, 1), x.shape[-1] // 2
        straight = x * table
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return (straight + turned * table).transpose(1, 2)

    def activation(self, sizes: LanguageModel) -> Callable[[Tensor], Tensor]:
        """Return the feed-forward layer's activation; none before a gate's product that stands for both."""
        if sizes.gated and self.fusion in (COMPILE, LIGER):
            return lambda x: x
        return _ACTIVATIONS[sizes.activation]

    def measure_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the head's result; in single precision whatever the model's is."""
        if self.loss == CHUNKED:
            return scores
        if self.loss == FUSED:
            return torch.ops.trioflow.cross_entropy(scores.flatten(0, -2), targets.flatten())[0]
        return F.cross_entropy(scores.flatten(0, -2).float(), targets.flatten())


class _EagerNorm(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """Root-mean-square normalisation, operator by operator and in fp32 as transformers computes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPSILON)
        return self.weight * wide.to(x.dtype)


@torch.library.custom_op("trioflow::cross_entropy", mutates_args=())  # type: ignore[untyped-decorator]
def _cross_entropy(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy and each token's sum of exponentials, as one kernel that reads the scores once."""
    sums = scores.float().logsumexp(-1)
    return F.cross_entropy(scores.float(), targets), sums


@_cross_entropy.register_fake  # type: ignore[untyped-decorator]
def _(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    sums = scores.new_empty(scores.shape[:-1], dtype=torch.float32)
    return scores.new_empty((), dtype=torch.float32), sums


@torch.library.custom_op("trioflow::cross_entropy_backward", mutates_args=())  # type: ignore[untyped-decorator]
def _cross_entropy_backward(gradient: Tensor, scores: Tensor, targets: Tensor, sums: Tensor) -> Tensor:
    """Return the gradient of the scores, as one kernel that reads and writes them once."""
    shares = (scores.float() - sums[:, None]).exp()
    shares[torch.arange(len(targets), device=targets.device), targets] -= 1
    return (shares * (gradient / len(targets))).to(scores.dtype)


@_cross_entropy_backward.register_fake  # type: ignore[untyped-decorator]
def _(gradient: Tensor, scores: Tensor, targets: Tensor, sums: Tensor) -> Tensor:
    return torch.empty_like(scores)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
    return torch.ops.trioflow.cross_entropy_backward(gradient, *ctx.saved_tensors), None


_cross_entropy.register_autograd(_differentiate, setup_context=_keep)


class _HeadLoss(torch.autograd.Function):  # type: ignore[misc]
    """The head's product and the loss behind it, a piece of the tokens at a time, with both gradients at once.

    No more scores are in memory than those of a piece, whose tokens are a power of two, so many pieces as the
    vocabulary is wider than the model: Liger-Kernel's rule.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, meant: Tensor) -> Tensor:
        """Return the mean cross-entropy of tokens x [tokens, hidden]."""
        gradient, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        tokens, pieces = len(x), -(-weight.shape[0] // weight.shape[1])
        size = 1 << (-(-tokens // pieces) - 1).bit_length()
        loss = x.new_zeros((), dtype=torch.float32)
        for start in range(0, tokens, size):
            part, right = x[start : start + size], meant[start : start + size]
            scores = torch.mm(part, weight.t())
            one, sums = torch.ops.trioflow.cross_entropy(scores, right)
            loss = loss + one
            scores = torch.ops.trioflow.cross_entropy_backward(one, scores, right, sums)
            gradient[start : start + size] = torch.mm(scores, weight)
            of_weight.addmm_(scores.t(), part)
        ctx.save_for_backward(gradient, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor, None]:
        """Scale what forward made."""
        gradient, of_weight = ctx.saved_tensors
        above = above.to(gradient.dtype)
        return gradient * above, of_weight * above, None


_SOFTMAX = "fused-softmax"
_WORDS = {"attention": "flash", "fusion": EAGER, "loss": EAGER}
_FUSED: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("flash", "flash2", "flash3"), nullcontext),
    "cudnn": partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION),
}


def _drop(x: Tensor, share: float) -> Tensor:
    """Drop a share of x as a GPU does, which keeps a byte an element; `F.dropout` elsewhere keeps a number."""
    return torch.native_dropout(x, share, True)[0] if share else x


class DecoderAttention(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """Causal attention; flash keeps no scores, eager computes them in fp32 as transformers does.

    With fused-softmax one kernel scales, masks and normalises the scores in the model's own format. Attention within
    a window stands as causal attention within pieces of twice its tokens: as many scores, and nothing moved more. A
    sink is a factor of each head's result, one pass over it, as where a kernel returns the sums of its exponentials.
    """

    def __init__(self, sizes: LanguageModel, kernels: Kernels, rotation: Tensor | None, window: int = 0) -> None:
        super().__init__()
        self.sizes, self.kernels, self.window = sizes, kernels, window
        self._make_projections(sizes)
        self.o_proj = nn.Linear(sizes.heads * sizes.values, sizes.hidden, bias=sizes.output_bias)
        if sizes.sinks:
            self.sinks = nn.Parameter(torch.empty(sizes.heads))
        self.register_buffer("rotation", rotation, persistent=False)

    def _make_projections(self, sizes: LanguageModel) -> None:
        """Make what yields queries, keys and values."""
        make = partial(nn.Linear, sizes.hidden, bias=sizes.query_bias)
        queries, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
        if self.kernels.fused_layers:
            self.qkv_proj = make(queries + 2 * keys)
        else:
            self.q_proj, self.k_proj, self.v_proj = make(queries), make(keys), make(keys)
        if sizes.query_norm:
            self.q_norm = self.kernels.make_norm(sizes, sizes.head_size)
            self.k_norm = self.kernels.make_norm(sizes, sizes.head_size)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each [batch, sequence, heads, size]."""
        rotation = self.rotation
        if self.kernels.fused_layers:
            groups = self.sizes.heads // self.sizes.kv_heads
            made = self.qkv_proj(x).view(*x.shape[:2], -1, groups + 2, self.sizes.head_size)
            query, key, value = made.split([groups, 1, 1], 3)
            rotation = None if rotation is None else rotation.unsqueeze(1)
        else:
            query, key, value = (
                project(x).view(*x.shape[:2], -1, self.sizes.head_size)
                for project in (self.q_proj, self.k_proj, self.v_proj)
            )
        if self.sizes.query_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            query, key = (self.kernels.rotate(part, rotation) for part in (query, key))
        if self.kernels.fused_layers:
            return tuple(part.flatten(2, 3) for part in (query, key, value))
        return query, key, value

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each sequence of x [batch, sequence, hidden]."""
        batch, sequence, _ = x.shape
        parts = self._project(x)
        if self.window:
            read = _find_piece(sequence, 2 * self.window)
            parts = tuple(part.reshape(-1, read, *part.shape[2:]) for part in parts)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = self._attend(query, key, value).transpose(1, 2).reshape(batch, sequence, -1)
        if self.sizes.sinks:
            mixed = (mixed.view(batch, sequence, -1, self.sizes.values) * self.sinks[:, None]).flatten(2)
        return self.o_proj(mixed)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dropped, groups = self.sizes.attention_dropout, self.sizes.heads // self.sizes.kv_heads
        if self.kernels.attention in _FUSED:
            with _FUSED[self.kernels.attention]():
                return F.scaled_dot_product_attention(
                    query, key, value, dropout_p=dropped, is_causal=True, enable_gqa=groups > 1
                )
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.matmul(query, key.transpose(2, 3))
        if self.kernels.attention == _SOFTMAX:
            weights = F.softmax(scores, dim=-1)
        else:
            scores = scores / math.sqrt(self.sizes.head_size)
            scores = scores + scores.new_empty(scores.shape[-2:])
            weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(_drop(weights, dropped), value)


def _find_piece(sequence: int, least: int) -> int:
    """Return the shortest piece of at least so many tokens that a sequence divides into."""
    return next((n for n in range(least, sequence) if sequence % n == 0), sequence)


class LatentAttention(DecoderAttention):
    """Attention whose keys and values are made from one latent vector a token, and one rotated key of all heads."""

    def _make_projections(self, sizes: LanguageModel) -> None:
        queries = sizes.heads * sizes.head_size
        if sizes.query_latent:
            self.q_a_proj = nn.Linear(sizes.hidden, sizes.query_latent, bias=False)
            self.q_b_proj = nn.Linear(sizes.query_latent, queries, bias=False)
        else:
            self.q_proj = nn.Linear(sizes.hidden, queries, bias=False)
        self.kv_a_proj = nn.Linear(sizes.hidden, sizes.latent + sizes.rotary_size, bias=False)
        made = sizes.head_size - sizes.rotary_size + sizes.values
        self.kv_b_proj = nn.Linear(sizes.latent, sizes.heads * made, bias=False)
        if sizes.query_norm:
            self.kv_a_layernorm = self.kernels.make_norm(sizes, sizes.latent)
            if sizes.query_latent:
                self.q_a_layernorm = self.kernels.make_norm(sizes, sizes.query_latent)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        sizes = self.sizes
        plain = sizes.head_size - sizes.rotary_size
        if sizes.query_latent:
            narrow = self.q_a_proj(x)
            query = self.q_b_proj(self.q_a_layernorm(narrow) if sizes.query_norm else narrow)
        else:
            query = self.q_proj(x)
        query = query.view(*x.shape[:2], sizes.heads, -1)
        latent, rotated = self.kv_a_proj(x).split([sizes.latent, sizes.rotary_size], -1)
        if sizes.query_norm:
            latent = self.kv_a_layernorm(latent)
        made = self.kv_b_proj(latent).view(*x.shape[:2], sizes.heads, -1)
        key, value = made.split([plain, sizes.values], -1)
        rotated = rotated.unsqueeze(2)
        if self.rotation is not None:
            before, turned = query.split([plain, sizes.rotary_size], -1)
            query = torch.cat((before, self.kernels.rotate(turned, self.rotation)), -1)
            rotated = self.kernels.rotate(rotated, self.rotation)
        key = torch.cat((key, rotated.expand(-1, -1, sizes.heads, -1)), -1)
        return query, key, value


class FeedForward(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """Two linear layers with an activation between them, gated by a third one or not."""

    def __init__(self, sizes: LanguageModel, kernels: Kernels) -> None:
        super().__init__()
        _make_feed_forward(self, partial(nn.Linear, bias=sizes.feed_forward_bias), sizes, kernels)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of x [batch, sequence, hidden] alone."""
        return self.down_proj(_activate(self, x))


def _make_feed_forward(
    layer: nn.Module, make: Callable[[int, int], nn.Module], sizes: LanguageModel, kernels: Kernels
) -> None:
    """Give a feed-forward layer, or one of experts, its linear layers."""
    if sizes.gated and kernels.fused_layers:
        layer.gate_up_proj = make(sizes.hidden, 2 * sizes.feed_forward)
    else:
        if sizes.gated:
            layer.gate_proj = make(sizes.hidden, sizes.feed_forward)
        layer.up_proj = make(sizes.hidden, sizes.feed_forward)
    layer.down_proj = make(sizes.feed_forward, sizes.hidden)
    layer.activate = kernels.activation(sizes)


def _activate(layer: nn.Module, x: Tensor, *ends: Tensor) -> Tensor:
    """Return what goes into a layer's last product; ``ends``: where each expert's rows end."""
    if hasattr(layer, "gate_up_proj"):
        return F.glu(layer.gate_up_proj(x, *ends))
    if hasattr(layer, "gate_proj"):
        return layer.activate(layer.gate_proj(x, *ends)) * layer.up_proj(x, *ends)
    return layer.activate(layer.up_proj(x, *ends))


class GroupedLinear(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """A linear layer of each expert, all computed by one grouped product in half precision."""

    shard_dimension = 1
    """FSDP2 cuts each expert's matrix, as torchtitan does: there are fewer experts than ranks."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inputs, outputs))
        if bias:
            self.bias = nn.Parameter(torch.empty(experts, 1, outputs))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows [tokens x chosen, inputs], sorted by expert, each group by its own weight.

        The first expert's bias stands for each one's own: as many bytes.
        """
        made: Tensor = torch._grouped_mm(rows, self.weight, offs=ends)
        return made + self.bias[0] if hasattr(self, "bias") else made


class Experts(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """Feed-forward layers of which a router chooses some for each token; no token is dropped.

    Tokens are copied once an expert and sorted by expert, multiplied group by
    group, weighted and added up: PyTorch's own operators, as torchtitan runs
    them. How many rows each expert has changes no shape.
    """

    def __init__(self, sizes: LanguageModel, kernels: Kernels) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.experts, bias=sizes.router_bias)
        make = partial(GroupedLinear, sizes.experts, bias=sizes.feed_forward_bias)
        _make_feed_forward(self, make, sizes, kernels)
        if sizes.shared_feed_forward:
            shared = replace(sizes, feed_forward=sizes.shared_feed_forward)
            self.shared = FeedForward(shared, kernels)
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of x [batch, sequence, hidden] by its experts."""
        tokens = x.flatten(0, 1)
        scores = F.softmax(self.gate(tokens), dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.sizes.experts_per_token, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.histc(chosen.flatten().float(), self.sizes.experts, 0, self.sizes.experts)
        ends = counts.cumsum(0, dtype=torch.int32)
        source = order // self.sizes.experts_per_token
        rows = tokens.index_select(0, source)
        made = self.down_proj(_activate(self, rows, ends), ends) * weights.flatten().index_select(0, order).unsqueeze(
            1
        ).to(rows.dtype)
        out = torch.zeros_like(tokens, dtype=made.dtype).index_add(0, source, made).view_as(x)
        return out + self.shared(x) if self.sizes.shared_feed_forward else out


class DecoderBlock(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """One layer: attention and feed-forward, each normalised before and added to the residual."""

    def __init__(self, sizes: LanguageModel, kernels: Kernels, rotation: Tensor | None, number: int) -> None:
        super().__init__()
        self.input_layernorm = kernels.make_norm(sizes, sizes.hidden)
        attention = LatentAttention if sizes.latent else DecoderAttention
        self.self_attn = attention(sizes, kernels, rotation, 0 if number % 2 else sizes.window)
        self.post_attention_layernorm = kernels.make_norm(sizes, sizes.hidden)
        if number < sizes.dense_layers:
            sizes = sizes.dense_block
        self.mlp = (Experts if sizes.experts else FeedForward)(sizes, kernels)
        self.dropout = sizes.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Transform activations [batch, sequence, hidden]."""
        x = x + _drop(self.self_attn(self.input_layernorm(x)), self.dropout)
        return x + _drop(self.mlp(self.post_attention_layernorm(x)), self.dropout)


class Decoder(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """Everything below the head."""

    def __init__(self, sizes: LanguageModel, sequence: int, kernels: Kernels) -> None:
        super().__init__()
        rotation = None
        if sizes.positions == "rotary":
            rotation = torch.empty(sequence, 1, sizes.rotary_size or sizes.head_size)
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        if sizes.positions == "learned":
            self.embed_positions = nn.Embedding(sizes.longest, sizes.hidden)
        self.layers = nn.ModuleList(DecoderBlock(sizes, kernels, rotation, number) for number in range(sizes.layers))
        self.norm = kernels.make_norm(sizes, sizes.hidden)
        self.dropout = sizes.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, sequence] to activations [batch, sequence, hidden]."""
        x = self.embed_tokens(tokens)
        if hasattr(self, "embed_positions"):
            x = x + self.embed_positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = _drop(x, self.dropout)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Head(nn.Linear):  # type: ignore[misc]  # mypy does not read torch
    """The product that scores all words, with the loss behind it where one kernel computes both."""

    def __init__(self, sizes: LanguageModel, kernels: Kernels) -> None:
        super().__init__(sizes.hidden, sizes.vocabulary, bias=False)
        self.kernels = kernels

    def forward(self, x: Tensor, meant: Tensor) -> Tensor:
        """Score each of x [batch, sequence, hidden], or measure the loss of the words meant."""
        if self.kernels.loss == CHUNKED:
            tokens, words = x.flatten(0, 1), meant.flatten()
            # A trace joins backward to the last call before autograd's node, so that one has to read the weight.
            return _HeadLoss.apply(tokens, self.weight.flatten(0, 0), words)
        return super().forward(x)


class LanguageNetwork(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """Decoder and head."""

    def __init__(self, sizes: LanguageModel, sequence: int, kernels: Kernels) -> None:
        super().__init__()
        self.model = Decoder(sizes, sequence, kernels)
        self.lm_head = Head(sizes, kernels)
        self.config = SimpleNamespace(num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads)
        if sizes.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, sequence] to what the kernels make a loss of."""
        return self.lm_head(self.model(tokens), tokens)


_SPLIT = {
    **{f"model.layers.*.self_attn.{part}_proj": "column" for part in ("q", "k", "v", "qkv", "q_b", "kv_b")},
    "model.layers.*.self_attn.o_proj": "row",
    **{
        f"model.layers.*.mlp.{shared}{part}_proj": "row" if part == "down" else "column"
        for shared in ("", "shared.")
        for part in ("gate", "up", "gate_up", "down")
    },
}
"""Megatron's cut."""


def build_language_model(row: Mapping[str, Any]) -> WorkloadRecipe:
    """Build a decoder from a row of a workload.

    ``language_model``: a `LanguageModel`'s fields as JSON; ``sequence`` [tokens], ``attention``,
    ``fusion``, ``loss``: a `LanguageStep`'s; ``layers``: the depth to build.
    """
    layers = need_size(row, "layers")
    sizes = LanguageModel(**json.loads(str(row["language_model"])) | {"layers": layers})
    sequence = need_size(row, "sequence")
    words = (str(row.get(key) or usual) for key, usual in _WORDS.items())
    kernels = Kernels(*words)
    embedding = ["model.embed_tokens"]
    if sizes.positions == "learned":
        embedding.append("model.embed_positions")
    units = {EMBEDDING: embedding}
    units |= {f"{BLOCKS}.{i}": [f"{BLOCKS}.{i}"] for i in range(layers)}
    units[HEAD] = ["model.norm", "lm_head"]

    model = LanguageNetwork(sizes, sequence, kernels).train()
    modules = [name for name, _ in model.named_modules()]
    split = {p: k for p, k in _SPLIT.items() if any(fnmatchcase(name, p) for name in modules)}
    make_batch = partial(make_tokens, sequence, sizes.vocabulary)
    return WorkloadRecipe(model, make_batch, kernels.measure_loss, units, split)
