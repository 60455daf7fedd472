"""What the nodes of a torch.fx graph run: their operators, their parameters, what backward reads.

All of it is about PyTorch's functions and modules, nothing about a model.
"""

from __future__ import annotations

CONTAINERS = frozenset({"split", "chunk", "unbind", "tensor_split"})
"""Methods that return a tuple of views; a getitem takes each one out."""

VIEWS = frozenset({
    "view", "view_as", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "expand_as",
    "select", "narrow", "detach", "getitem", "unflatten",
})  # fmt: skip
"""Functions and methods whose result is memory of their first argument: they launch no kernel."""

CONVERSIONS = frozenset({
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "bool", "long", "int", "cuda",
})  # fmt: skip
"""Methods that copy only where the element type changes."""

OPERATORS = {
    "truediv": "div", "floordiv": "floor_divide", "getitem": "slice", "iadd": "add_",
    "imul": "mul_", "type": "to", "float": "to", "half": "to", "bfloat16": "to", "double": "to",
    "neg": "neg", "invert": "bitwise_not",
}  # fmt: skip
"""ATen names of functions and methods where they differ."""

MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Linear": ("linear", ("weight", "bias")),
    "LayerNorm": ("layer_norm", ("weight", "bias")),
    "Embedding": ("embedding", ("weight",)),
    "Dropout": ("native_dropout", ()),
    "Tanh": ("tanh", ()), "ReLU": ("relu", ()), "GELU": ("gelu", ()), "SiLU": ("silu", ()),
    "Sigmoid": ("sigmoid", ()), "Softmax": ("softmax", ()), "LogSoftmax": ("log_softmax", ()),
    "Identity": ("alias", ()), "Flatten": ("flatten", ()),
}  # fmt: skip
"""Leaf modules: their operator and the parameters that they own."""

IDENTITY_MODULES = frozenset({"Identity"})
"""Modules that hand their input on."""

_OUTPUT, _INPUTS, _MASK, _NOTHING = "output", "inputs", "mask", "nothing"
_SAVED = {
    "softmax": _OUTPUT, "log_softmax": _OUTPUT, "tanh": _OUTPUT, "relu": _OUTPUT,
    "sigmoid": _OUTPUT, "exp": _OUTPUT, "sqrt": _OUTPUT, "native_dropout": _MASK,
    "add": _NOTHING, "sub": _NOTHING, "neg": _NOTHING, "sum": _NOTHING, "mean": _NOTHING,
    "cat": _NOTHING,
}  # fmt: skip
_BACKWARD = {
    "softmax": "aten::_softmax_backward_data",
    "log_softmax": "aten::_log_softmax_backward_data",
    "layer_norm": "aten::native_layer_norm_backward",
    "embedding": "aten::embedding_dense_backward",
    "relu": "aten::threshold_backward",
}


def saved_for_backward(base: str, tensors: int) -> str:
    """Return what an operator's gradient reads besides the gradient of its result.

    Parameters
    ----------
    base : str
        Operator without namespace.
    tensors : int
        Number of tensors among its arguments.

    Returns
    -------
    str
        ``output``, ``inputs``, ``mask`` or ``nothing``.
    """
    if base in ("mul", "div") and tensors < 2:  # a number of the program costs no memory
        return _NOTHING
    return _SAVED.get(base, _INPUTS)


def backward_operator(base: str) -> str:
    """Return the ATen name of the gradient of an operator (without namespace)."""
    return _BACKWARD.get(base, f"aten::{base}_backward")
