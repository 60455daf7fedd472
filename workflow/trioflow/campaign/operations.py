"""The operations that sweeps time, built for a size and an element type."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trioflow.base.errors import InputError

Point = Mapping[str, Any]


@dataclass
class Case:
    """One operation of one size, ready to run."""

    run: Callable[[], Any]  # runs it forward and returns its output, or None
    inputs: list[Tensor]  # what it reads; those that require a gradient are differentiated
    # Floating-point operations forward, multiply and add counted apart; None where no formula
    # applies.
    flop: int | None = None
    phase: str = "forward"
    outputs: list[Tensor] = field(default_factory=list)  # what it writes, where it returns nothing


@dataclass
class Work:
    """One phase of a case: what is timed."""

    phase: str
    run: Callable[[], Any]
    flop: int | None
    read_bytes: int
    write_bytes: int


def list_work(case: Case) -> Iterator[Work]:
    """Yield a case's phases: forward, and backward where it has gradients.

    Backward reads the output's gradient and the inputs, writes theirs, and costs twice the FLOPs
    where all have one.
    """
    output = case.run()
    outputs = [output] if isinstance(output, Tensor) else case.outputs
    yield Work(case.phase, case.run, case.flop, _bytes(case.inputs), _bytes(outputs))
    wanted = [t for t in case.inputs if t.requires_grad]
    if not wanted or not isinstance(output, Tensor):
        return
    gradient = torch.randn_like(output)

    def backward() -> Any:
        return torch.autograd.grad(output, wanted, gradient, retain_graph=True)

    flop = None if case.flop is None else 2 * case.flop
    yield Work(
        "backward", backward, flop, _bytes([gradient, *case.inputs]), _bytes(wanted)
    )  # fmt: skip


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def build_case(operation: str, point: Point, dtype: torch.dtype, device: str) -> Case:
    """Build an operation on random data; InputError where it is unknown, or this torch lacks what the point asks for."""
    if operation not in _BUILDERS:
        raise InputError(
            f"unknown operation {operation!r}", fix=f"use one of {', '.join(_BUILDERS)}"
        )
    return _BUILDERS[operation](point, Data(dtype, device))


@dataclass
class Data:
    """Makes random tensors on the device."""

    dtype: torch.dtype
    device: str

    def floats(self, *shape: int, grad: bool = True) -> Tensor:
        """Return normal values; zeros would run faster than real data on some devices."""
        made = torch.randn(shape, dtype=self.dtype, device=self.device)
        return made.requires_grad_() if grad else made

    def indices(self, limit: int, *shape: int) -> Tensor:
        """Return whole numbers below a limit."""
        return torch.randint(limit, shape, device=self.device)


def _gemm(p: Point, data: Data) -> Case:
    a, b = data.floats(p["m"], p["k"], grad=False), data.floats(p["k"], p["n"], grad=False)
    return Case(lambda: torch.mm(a, b), [a, b], 2 * p["m"] * p["n"] * p["k"])


def _bmm(p: Point, data: Data) -> Case:
    a = data.floats(p["b"], p["m"], p["k"], grad=False)
    b = data.floats(p["b"], p["k"], p["n"], grad=False)
    return Case(lambda: torch.bmm(a, b), [a, b], 2 * p["b"] * p["m"] * p["n"] * p["k"])


def _linear(p: Point, data: Data) -> Case:
    x = data.floats(p["tokens"], p["inputs"])
    weight, bias = data.floats(p["outputs"], p["inputs"]), data.floats(p["outputs"])
    flop = 2 * p["tokens"] * p["inputs"] * p["outputs"]
    return Case(lambda: F.linear(x, weight, bias), [x, weight, bias], flop)


def _conv2d(p: Point, data: Data) -> Case:
    x = data.floats(p["batch"], p["channels"], p["height"], p["width"], grad=False)
    shape = (p["outputs"], p["channels"] // p["groups"], p["kernel"], p["kernel"])
    weight = data.floats(*shape, grad=False)
    if p["layout"] == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
        weight = weight.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    weight.requires_grad_()
    step, padding = p["stride"], p["padding"]
    high = (p["height"] + 2 * padding - p["kernel"]) // step + 1
    wide = (p["width"] + 2 * padding - p["kernel"]) // step + 1
    flop = 2 * p["batch"] * high * wide * weight.numel()
    run = lambda: F.conv2d(x, weight, None, step, padding, 1, p["groups"])  # noqa: E731
    return Case(run, [x, weight], flop)


_BACKENDS = {
    "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH",
    "cudnn": "CUDNN_ATTENTION",
}  # fmt: skip


def choose_backend(name: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what restricts attention to a backend while it is entered; InputError where this torch has none such."""
    if name == "default":
        return nullcontext
    # Not part of every torch's `import torch`; the cuDNN backend is there from 2.5 on.
    attention = importlib.import_module("torch.nn.attention")
    backend = getattr(attention.SDPBackend, _BACKENDS[name], None)
    if backend is None:
        raise InputError(f"this torch has no attention backend {name!r}")

    def restrict() -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = attention.sdpa_kernel(backend)
        return context

    return restrict


def _attention(p: Point, data: Data) -> Case:
    restrict = choose_backend(p["backend"])
    shape = (p["batch"], p["heads"], p["sequence"], p["head_width"])
    q, k, v = (data.floats(*shape) for _ in range(3))

    def run() -> Tensor:
        with restrict():
            return F.scaled_dot_product_attention(q, k, v, is_causal=p["causal"])

    # The whole square counts, as in PyTorch's own counter: a causal kernel may do half of it.
    flop = 4 * p["batch"] * p["heads"] * p["sequence"] ** 2 * p["head_width"]
    return Case(run, [q, k, v], flop)


def _layer_norm(p: Point, data: Data) -> Case:
    x = data.floats(p["rows"], p["width"])
    weight, bias = data.floats(p["width"]), data.floats(p["width"])
    return Case(lambda: F.layer_norm(x, (p["width"],), weight, bias), [x, weight, bias])


def _softmax(p: Point, data: Data) -> Case:
    x = data.floats(p["rows"], p["width"])
    return Case(lambda: F.softmax(x, -1), [x])


def _batch_norm(p: Point, data: Data) -> Case:
    x = data.floats(p["batch"], p["channels"], p["height"], p["width"])
    # Under autocast weights and running statistics stay in single precision.
    own = Data(torch.float32, data.device)
    weight, bias = own.floats(p["channels"]), own.floats(p["channels"])
    mean = torch.zeros(p["channels"], device=data.device)
    variance = torch.ones(p["channels"], device=data.device)
    run = lambda: F.batch_norm(x, mean, variance, weight, bias, training=True)  # noqa: E731
    return Case(run, [x, weight, bias])


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh, "silu": F.silu, "copy": torch.clone,
    "dropout": lambda x: F.dropout(x, 0.1, training=True),
    "cast": lambda x: x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32),
}  # fmt: skip
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "mul": torch.mul}


def _elementwise(p: Point, data: Data) -> Case:
    x, name = data.floats(p["elements"]), p["function"]
    if name in _UNARY:
        return Case(lambda: _UNARY[name](x), [x])
    y = data.floats(p["elements"])
    return Case(lambda: _BINARY[name](x, y), [x, y])


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum, "mean_rows": lambda x: x.mean(1), "sum_rows": lambda x: x.sum(1),
    "sum_columns": lambda x: x.sum(0), "amax": lambda x: x.amax(1),
    "norm": torch.linalg.vector_norm,
}  # fmt: skip


def _reduction(p: Point, data: Data) -> Case:
    x = data.floats(p["rows"], p["width"])
    return Case(lambda: _REDUCTIONS[p["function"]](x), [x])


def _embedding(p: Point, data: Data) -> Case:
    tokens = data.indices(p["vocabulary"], p["tokens"])
    table = data.floats(p["vocabulary"], p["width"])
    return Case(lambda: F.embedding(tokens, table), [tokens, table])


def _cross_entropy(p: Point, data: Data) -> Case:
    x, targets = data.floats(p["rows"], p["classes"]), data.indices(p["classes"], p["rows"])
    return Case(lambda: F.cross_entropy(x, targets), [x, targets])


def _max_pool2d(p: Point, data: Data) -> Case:
    x = data.floats(p["batch"], p["channels"], p["height"], p["width"])
    return Case(lambda: F.max_pool2d(x, p["kernel"], p["stride"]), [x])


def _cat(p: Point, data: Data) -> Case:
    parts = [data.floats(p["elements"]) for _ in range(p["tensors"])]
    return Case(lambda: torch.cat(parts), parts)


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps, **ways: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, **ways),
    "adam": lambda ps, **ways: torch.optim.Adam(ps, lr=1e-4, **ways),
    "adamw": lambda ps, **ways: torch.optim.AdamW(ps, lr=1e-4, **ways),
}
_STATES = {"sgd": 1, "adam": 2, "adamw": 2}
_WAYS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}


def _optimizer(p: Point, data: Data) -> Case:
    weights = [data.floats(p["elements"]) for _ in range(p["tensors"])]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    # A fused implementation that this version lacks raises here, and the point is recorded so.
    optimizer = _OPTIMIZERS[p["optimizer"]](weights, **_WAYS[p["implementation"]])
    optimizer.step()  # makes the state
    states = weights * _STATES[p["optimizer"]]
    gradients = [w.grad for w in weights if w.grad is not None]
    return Case(
        optimizer.step, [*weights, *gradients, *states], phase="optimizer", outputs=weights + states
    )


_BUILDERS: dict[str, Callable[[Point, Data], Case]] = {
    "gemm": _gemm, "bmm": _bmm, "linear": _linear, "conv2d": _conv2d, "attention": _attention,
    "layer_norm": _layer_norm, "softmax": _softmax, "batch_norm": _batch_norm,
    "elementwise": _elementwise, "reduction": _reduction, "embedding": _embedding,
    "cross_entropy": _cross_entropy, "max_pool2d": _max_pool2d, "cat": _cat,
    "optimizer": _optimizer,
}  # fmt: skip
