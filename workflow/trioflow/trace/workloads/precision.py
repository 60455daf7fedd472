"""Optimizers by name, and the number formats of a training step, switched on inside it and nowhere else.

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

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from trioflow.base.precision_recipes import PrecisionRecipe, choose_recipe


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
