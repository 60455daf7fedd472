"""Optimizers by name, each as PyTorch chooses to run it or as one says.

``adamw`` leaves the implementation to PyTorch (on a GPU one call over many
tensors, on a CPU a loop over parameters); ``adamw-foreach`` and
``adamw-fused`` insist on one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from trioflow.errors import InputError
from trioflow.workload_words import OPTIMIZERS


def check_optimizer(name: str, workload: str) -> str:
    """Return an optimizer's name if it is known.

    Raises
    ------
    InputError
        When it is not.
    """
    if name not in OPTIMIZERS:
        raise InputError(
            f"workload {workload}: unknown optimizer {name!r}",
            fix=f"use one of {', '.join(OPTIMIZERS)}",
        )
    return name


def choose_optimizer(name: str, target: str) -> str:
    """Return an optimizer in the form in which PyTorch runs it by itself on a kind of processor.

    On a GPU that is one operator over lists of tensors, on a CPU a loop over
    parameters (``torch.optim.optimizer._default_to_fused_or_foreach``).
    """
    return f"{name}-foreach" if target == "cuda" and "-" not in name else name


class MainWeights:
    """An optimizer over fp32 copies of half-precision weights, fed with fp32 gradients.

    As Megatron-LM's and nanotron's: backward hands each gradient over in fp32,
    the optimizer updates the copies, and the weights are written from them.

    Parameters
    ----------
    name : str
        One of `trioflow.experiments.OPTIMIZERS`.
    parameters : iterable of Parameter
        Weights in half precision.
    """

    def __init__(self, name: str, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        for parameter in self.parameters:
            parameter.grad_dtype = torch.float32
        self.main = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = make_optimizer(name, self.main)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in (*self.parameters, *self.main):
            parameter.grad = None

    def step(self) -> None:
        """Update the copies, then the weights from them."""
        for main, parameter in zip(self.main, self.parameters, strict=True):
            main.grad = parameter.grad
        self.optimizer.step()
        with torch.no_grad(), record_function("Optimizer.step#main weights"):
            torch._foreach_copy_(self.parameters, self.main)


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer over some parameters.

    Learning rates are small: the data are random, and only the work matters.

    Parameters
    ----------
    name : str
        One of `trioflow.experiments.OPTIMIZERS`.
    parameters : iterable of Parameter
        What it updates.
    """
    algorithm, _, variant = name.partition("-")
    flags: dict[str, Any] = {variant: True} if variant else {}
    if algorithm == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **flags)
    kind = torch.optim.Adam if algorithm == "adam" else torch.optim.AdamW
    return kind(parameters, lr=1e-4, **flags)
