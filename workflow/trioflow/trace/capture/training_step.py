"""The training step that is captured on one rank and measured on many."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
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

    ``batch``: samples on this rank; ``phases_ns``: the last step's forward (with loss), backward
    and optimizer on the host's clock [ns].
    """

    def __init__(
        self,
        workload: Workload,
        model: torch.nn.Module,
        batch: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.workload, self.model, self.device = workload, model, device
        self.inputs, self.targets = workload.make_batch(batch, seed, str(device))
        self.optimizer = workload.make_optimizer(model.parameters())
        self.scaler = workload.precision.make_scaler(device)
        self.phases_ns: dict[str, int] = {}

    def __call__(self) -> None:
        """Run the step."""
        with self.workload.precision.arithmetic():
            self._run()

    def _run(self) -> None:
        marks = [time.perf_counter_ns()]
        self.optimizer.zero_grad()
        with self.workload.precision.forward(self.device):
            outputs = call_model(self.model, self.inputs)
            loss = self.scaler.scale(self.workload.loss(outputs, self.targets))
        # Outputs kept any longer would stand beside the gradients.
        del outputs
        marks.append(time.perf_counter_ns())
        loss.backward()
        marks.append(time.perf_counter_ns())
        self._update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        marks.append(time.perf_counter_ns())
        spans = [after - before for before, after in itertools.pairwise(marks)]
        self.phases_ns = dict(zip(PHASES, spans, strict=True))

    def _update(self) -> None:
        """Run the optimizer; with scaled gradients only if all of them are finite."""
        if not self.scaler.is_enabled():
            self.optimizer.step()
            return
        with record_function(_SCALING):
            self.scaler.step(self.optimizer)
            self.scaler.update()
