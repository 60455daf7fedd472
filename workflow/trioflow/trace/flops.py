"""Floating-point operations of one operator, from its shapes.

Multiply and add count as two. The same conventions as PyTorch's
``torch.utils.flop_counter``: only matrix products, convolutions and attention
count; element-wise work is bound by memory and counts as none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

Shape = Sequence[int]
Formula = Callable[[Sequence[Shape], Sequence[Shape]], int]


def _matmul(left: Shape, right: Shape) -> int:
    """2 x (elements of the left matrix) x (columns of the right one)."""
    return 2 * prod(left) * (right[-1] if len(right) > 1 else 1)


def _mm(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return _matmul(inputs[0], inputs[1])


def _addmm(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return _matmul(inputs[1], inputs[2])


def _linear(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return 2 * prod(inputs[0]) * inputs[1][0]


def _convolution(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """2 x output elements x weight elements per output channel (groups included)."""
    return 2 * prod(outputs[0]) * prod(inputs[1][1:])


def _convolution_backward(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Gradient of the input and of the weight: each as many as the forward; absent ones none."""
    gradient, _, weight = inputs[:3]
    wanted = sum(1 for shape in outputs[:2] if prod(shape) > 0 and len(shape) > 1)
    return wanted * 2 * prod(gradient) * prod(weight[1:])


def _attention(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Scores and mixture: 2 x batch x heads x queries x keys x (head + value size)."""
    query, key, value = inputs[:3]
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Five products: scores again, and gradients of value, mixture, query, key."""
    query, key, value = inputs[1:4]
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


FORMULAS: dict[str, Formula] = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::matmul": _mm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _addmm,
    "aten::linear": _linear,
    "aten::conv1d": _convolution,
    "aten::conv2d": _convolution,
    "aten::conv3d": _convolution,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::scaled_dot_product_attention": _attention,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}


def count_flop(name: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int | None:
    """Return the operations of one operator, or None where no formula applies.

    Parameters
    ----------
    name : str
        ATen operator.
    inputs, outputs : sequence of shape
        Shapes of the tensor arguments and results, in order.
    """
    formula = FORMULAS.get(name)
    if formula is None:
        return None
    try:
        return formula(inputs, outputs)
    except (IndexError, ValueError):
        return None
