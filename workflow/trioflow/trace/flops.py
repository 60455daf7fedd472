"""Floating-point operations of one operator, from its shapes; multiply and add count as two.

As PyTorch's ``torch.utils.flop_counter``: only matrix products, convolutions and attention count.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from math import prod

from trioflow.trace.profile.profiler_fields import load_fields

Shape = Sequence[int]
_Formula = Callable[[Sequence[Shape], Sequence[Shape]], int]


def _matmul(left: Shape, right: Shape) -> int:
    """2 x (elements of the left matrix) x (columns of the right one)."""
    return 2 * prod(left) * (right[-1] if len(right) > 1 else 1)


def _linear(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return 2 * prod(inputs[0]) * inputs[1][0]


def _is_transposed(large: Shape, small: Shape, weight: Shape) -> bool:
    """Recognize a transposed convolution by its weight, whose first dimension is then the input's (``small``).

    Where input and result have as many channels: if the result is larger.
    """
    if large[1] == small[1] == weight[0]:
        return prod(large[2:]) > prod(small[2:])
    return weight[0] == small[1]


def _transposed(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """2 x input elements x weight elements per input channel: each is scattered by its filters."""
    return 2 * prod(inputs[0]) * prod(inputs[1][1:])


def _convolution(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """2 x output elements x weight elements per output channel (groups included)."""
    if _is_transposed(outputs[0], inputs[0], inputs[1]):
        return _transposed(inputs, outputs)
    return 2 * prod(outputs[0]) * prod(inputs[1][1:])


def _convolution_backward(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Gradient of the input and of the weight: each as many as the forward; absent ones none."""
    gradient, given, weight = inputs[:3]
    wanted = sum(1 for shape in outputs[:2] if prod(shape) > 0 and len(shape) > 1)
    return wanted * _convolution([given, weight], [gradient])


def _grouped(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Products of groups: each row of the left side, or column of the right one, is in one group.

    A side of two dimensions holds all groups behind one another, one of three a matrix a group;
    groups of rows, of columns or of the inner dimension are together as large as that dimension.
    """
    left, right = inputs[:2]
    return 2 * prod(left[1:] if len(left) > len(right) else left) * right[-1]


def _recurrent(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """2 x steps x samples x elements of all weight matrices: each is applied once a step.

    Of layers, directions, gates and projections alike; biases and states are not matrices, packed
    sequences have one dimension for steps and samples.
    """
    steps = prod(inputs[0][:-1])
    return 2 * steps * sum(prod(s) for s in inputs[1:] if len(s) == 2 and s[0] != steps)


def _recurrent_layer(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count one layer in one direction: its two matrices follow its input."""
    return _recurrent(inputs[:3], outputs)


def _twice(forward: _Formula) -> _Formula:
    """Gradients of the input and of the weights: twice the forward."""
    return lambda inputs, outputs: 2 * forward(inputs, outputs)


def _attention(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Scores and mixture: 2 x batch x heads x queries x keys x (head + value size)."""
    query, key, value = inputs[:3]
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_of_rows(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count attention where heads follow positions: batch x positions x heads x size."""
    batch, queries, heads, size = inputs[0]
    return 2 * batch * heads * queries * inputs[1][1] * (size + inputs[2][3])


def _attention_backward(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Five products: scores again, and gradients of value, mixture, query, key."""
    query, key, value = inputs[1:4]
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


_OPERATORS: tuple[tuple[_Formula, str], ...] = (
    (lambda inputs, _: _matmul(inputs[0], inputs[1]), "mm bmm matmul mv _scaled_mm _int_mm"),
    (lambda inputs, _: _matmul(inputs[1], inputs[2]), "addmm addmm_ baddbmm addbmm addmv"),
    (_grouped, "_grouped_mm _scaled_grouped_mm"),
    (_linear, "linear"),
    (
        _convolution,
        "conv1d conv2d conv3d convolution _convolution convolution_overrideable cudnn_convolution"
        " cudnn_convolution_relu miopen_convolution mkldnn_convolution _slow_conv2d_forward _conv_depthwise2d",
    ),
    (
        _transposed,
        "conv_transpose1d conv_transpose2d conv_transpose3d cudnn_convolution_transpose miopen_convolution_transpose",
    ),
    (_convolution_backward, "convolution_backward"),
    (_recurrent, "lstm gru rnn_tanh rnn_relu _cudnn_rnn miopen_rnn"),
    (_recurrent_layer, "mkldnn_rnn_layer"),
    (_twice(_recurrent), "_cudnn_rnn_backward miopen_rnn_backward"),
    (_twice(_recurrent_layer), "mkldnn_rnn_layer_backward"),
    (_attention_of_rows, "_flash_attention_forward _efficient_attention_forward flash_attn::_flash_attn_forward"),
    (
        _attention,
        "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu",
    ),
    (
        _attention_backward,
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward"
        " _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward",
    ),
)
FORMULAS: dict[str, _Formula] = {
    name if "::" in name else f"aten::{name}": formula for formula, names in _OPERATORS for name in names.split()
}


def count_flop(name: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int | None:
    """Return the operations of one ATen operator from its tensors' shapes, or None where no formula applies."""
    formula = FORMULAS.get(name)
    if formula is None:
        return None
    try:
        return formula(inputs, outputs)
    except (IndexError, ValueError):
        return None


def may_multiply(name: str, kernels: Iterable[str] = ()) -> bool:
    """Recognize an operator whose work may be a product by a word of its name or by its kernels'."""
    words = load_fields()["products"]
    parts = set(re.split(r"[^a-z0-9]+", name.rpartition("::")[2].lower()))
    kernel = re.compile("|".join(words["kernels"]))
    return not parts.isdisjoint(words["operators"]) or any(kernel.search(one.lower()) for one in kernels)
