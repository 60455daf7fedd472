"""The training step that is captured on one rank and measured on many."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from trioflow.tables import PHASES
from trioflow.trace.workloads.build import Workload

_SCALING = "Optimizer.step#gradient scaling"
"""Annotation of fp16's unscaling and checking; it counts as the optimizer's, as its name says."""


def call_model(model: torch.nn.Module, inputs: Any) -> Any:
    """Call a model: a tuple of inputs holds its arguments, a dict its named ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


class TrainingStep:
    """One training step on synthetic data, of a model or a parallel wrapper of it; capture and measurement run the same.

    ``batch``: samples on this rank of each of ``micro_steps``, whose gradients are added up. Of the last step:
    ``marks``, phase and micro-batch, when each forward (with loss), backward and the optimizer began and ended, and ``phases_ns``, their sums
    [ns] on the host's clock.
    """

    def __init__(
        self,
        workload: Workload,
        model: torch.nn.Module,
        batch: int,
        device: torch.device,
        seed: int,
        micro_steps: int = 1,
    ) -> None:
        self.workload, self.model, self.device = workload, model, device
        self.inputs, self.targets = workload.make_batch(batch, seed, str(device))
        self.optimizer = workload.make_optimizer(model.parameters())
        self.scaler = workload.precision.make_scaler(device)
        self.micro_steps = micro_steps
        self.marks: list[tuple[str, int, int, int]] = []

    @property
    def phases_ns(self) -> dict[str, int]:
        """The last step's phases [ns]."""
        spans = dict.fromkeys(PHASES if self.marks else (), 0)
        for phase, _, start_ns, end_ns in self.marks:
            spans[phase] += end_ns - start_ns
        return spans

    def __call__(self) -> None:
        """Run the step."""
        with self.workload.precision.arithmetic():
            self._run()

    def _run(self) -> None:
        self.marks = []
        start = time.perf_counter_ns()
        self.optimizer.zero_grad()
        for number in range(self.micro_steps):
            with self.exchange(number == self.micro_steps - 1):
                with self.workload.precision.forward(self.device):
                    outputs = call_model(self.model, self.inputs)
                    loss = self.workload.loss(outputs, self.targets)
                    loss = self.scaler.scale(loss / self.micro_steps if self.micro_steps > 1 else loss)
                # Outputs kept any longer would stand beside the gradients.
                del outputs
                middle = time.perf_counter_ns()
                loss.backward()
            end = time.perf_counter_ns()
            self.marks += [("forward", number, start, middle), ("backward", number, middle, end)]
            start = end
        self._update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.marks.append(("optimizer", 0, start, time.perf_counter_ns()))

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-step; wrappers exchange gradients in it, or keep them until the ``last``."""
        return nullcontext()

    def _update(self) -> None:
        """Run the optimizer; with scaled gradients only if all of them are finite."""
        if not self.scaler.is_enabled():
            self.optimizer.step()
            return
        with record_function(_SCALING):
            self.scaler.step(self.optimizer)
            self.scaler.update()
