"""The kernels of a decoder beside its products, by the words of ``--fusion``: what PyTorch runs, or what stands for a fused one.

A fused kernel is an operator that moves as many bytes: normalisation without a mean stands as PyTorch's layer
normalisation without a bias, the rotation of queries and keys as one multiplication by a table, a fused gated
activation as a product of gate and up, in Megatron Core's fused layers as ``glu``.

References
----------
transformers, ``models/llama/modeling_llama.py`` (``LlamaRMSNorm``, ``apply_rotary_pos_emb``) and
``loss/loss_utils.py``: the passes of eager PyTorch. Liger-Kernel, ``ops/fused_linear_cross_entropy.py``: the
head's products with the loss, a piece of the tokens at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trioflow.trace.language.sizes import (
    CHUNKED,
    COMPILE,
    EAGER,
    FUSED,
    GRADIENTS,
    LAYERS,
    LIGER,
    LanguageModel,
)

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
def _cross_entropy_backward(
    gradient: Tensor, scores: Tensor, targets: Tensor, sums: Tensor
) -> Tensor:
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


def measure_head_loss(x: Tensor, weight: Tensor, meant: Tensor) -> Tensor:
    """Return the mean cross-entropy of tokens x [tokens, hidden], their scores never in memory together."""
    # A trace joins backward to the last call before autograd's node, so that one has to read the weight.
    loss: Tensor = _HeadLoss.apply(x, weight.flatten(0, 0), meant)
    return loss
