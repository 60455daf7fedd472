"""Autograd's nodes: whose gradient a node computes, and how many operations that takes.

Some sources keep a whole node of the backward pass as one operator, named
after the node: ``autograd::engine::evaluate_function: ConvolutionBackward0``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trioflow.trace.flops import FORMULAS, Shape, count_flop

_NODE = re.compile(r"(?:.*[:\s])?([A-Za-z_]\w*?)Backward\d*")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

# What an operator leaves in autograd's graph where that is not its own name: it encloses others,
# or a library's own version of it was chosen. Names without namespace; a star for any ending.
LEAVES: dict[str, str] = {
    "linear": "addmm mm bmm mkldnn_linear linear",
    "matmul": "mm bmm mv dot",
    "einsum": "bmm mm",
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d _convolution":
        "convolution convolution_overrideable mkldnn_convolution cudnn_convolution"
        " conv_depthwise3d slow_conv*",
    "batch_norm instance_norm": "native_batch_norm cudnn_batch_norm miopen_batch_norm",
    "layer_norm": "native_layer_norm",
    "group_norm": "native_group_norm",
    "rms_norm": "_fused_rms_norm",
    "dropout feature_dropout": "native_dropout _fused_dropout",
    "cross_entropy_loss": "log_softmax nll_loss nll_loss_nd nll_loss2d",
    "nll_loss_nd": "nll_loss nll_loss2d",
    "max_pool1d max_pool2d max_pool3d": "max_pool*",
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d": "mean adaptive_avg_pool*",
    "adaptive_max_pool1d adaptive_max_pool2d": "adaptive_max_pool*",
    "scaled_dot_product_attention": "scaled_dot_product_* bmm softmax",
    "softmax log_softmax": "softmax log_softmax",
}  # fmt: skip


def _plain(name: str) -> str:
    """Return a name without underscores and capitals, so that spellings compare."""
    return name.replace("_", "").lower()


def _read_leaves() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for operators, nodes in LEAVES.items():
        for operator in operators.split():
            found.setdefault(_plain(operator), []).extend(_plain(n) for n in nodes.split())
    return found


_LEAVES = _read_leaves()


def is_node(name: str) -> bool:
    """Tell whether an operator is a whole node of autograd's graph."""
    return name.startswith("autograd::engine::evaluate_function: ")


def differentiated(name: str) -> str:
    """Return what an operator of the backward pass differentiates.

    Parameters
    ----------
    name : str
        A node (``...: MaxPool2DWithIndicesBackward0``) or an operator
        (``aten::convolution_backward``, ``aten::mm``).

    Returns
    -------
    str
        The operator without namespace: ``max_pool2d_with_indices``,
        ``convolution``, ``mm``.
    """
    found = _NODE.fullmatch(name)
    if found is None:
        return name.rpartition("::")[2].strip("_").split("_backward")[0]
    words = _WORDS.split(re.sub(r"(\d)D", r"\1d", found[1]))
    return "_".join(words).lower()


def backward_name(name: str) -> str:
    """Return the ATen name of a node's work: ``aten::convolution_backward``; other names as is."""
    return f"aten::{differentiated(name)}_backward" if is_node(name) else name


def leaves_node(forward: str, base: str) -> bool:
    """Tell whether a forward operator leaves a node that differentiates `base`.

    Parameters
    ----------
    forward : str
        Name of the forward operator, such as ``aten::cross_entropy_loss``.
    base : str
        From `differentiated`, such as ``nll_loss``.
    """
    own, wanted = _plain(forward.rpartition("::")[2].partition(".")[0]), _plain(base)
    return own == wanted or any(
        wanted.startswith(node[:-1]) if node.endswith("*") else wanted == node
        for node in _LEAVES.get(own, [])
    )


def count_node_flop(
    name: str,
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    forward_flop: int | None,
    wanted: int,
) -> int | None:
    """Return the operations of a node of the backward pass, or None where no formula applies.

    Parameters
    ----------
    name : str
        The node.
    inputs, outputs : sequence of shape
        Its tensors; a gradient that nobody wants has a shape of no elements.
    forward_flop : int, optional
        Operations of the operator that it differentiates.
    wanted : int
        Factors of the product whose gradient is wanted.

    Notes
    -----
    The gradient of each factor of a matrix product is a product as large as
    the product itself. Where the tensors do not fit the formula of the
    operator that the node runs, that of a product is taken.
    """
    if not is_node(name):
        return None
    base = differentiated(name)
    for operator in (f"aten::{base}_backward", f"aten::_{base}_backward"):
        if operator in FORMULAS and (counted := count_flop(operator, inputs, outputs)) is not None:
            return counted
    return wanted * forward_flop if forward_flop else None
