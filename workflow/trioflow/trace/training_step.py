"""The training step that is captured on one rank and measured on many."""

from __future__ import annotations

import itertools
import time

import torch

from trioflow.tables import PHASES
from trioflow.trace.workloads import Workload


class TrainingStep:
    """One whole training step on synthetic data, of a model or of a parallel wrapper of it.

    Capture and measurement run the same one.

    Parameters
    ----------
    workload : Workload
        Gives the data, the loss, the optimizer and the precision.
    model : Module
        What is trained, on its device.
    batch : int
        Samples of the step on this rank.
    device : torch.device
        Where the data goes.
    seed : int
        Seed of the data.

    Attributes
    ----------
    phases_ns : dict of str to int
        How long forward (the loss included), backward and optimizer of the
        last step took on the host's clock [ns].
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
        self.mixed = str(workload.row.get("precision", "fp32")) == "bf16"
        self.phases_ns: dict[str, int] = {}

    def __call__(self) -> None:
        """Run the step."""
        marks = [time.perf_counter_ns()]
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.mixed):
            loss = self.workload.loss(self.model(self.inputs), self.targets)
        marks.append(time.perf_counter_ns())
        loss.backward()
        marks.append(time.perf_counter_ns())
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        marks.append(time.perf_counter_ns())
        spans = [after - before for before, after in itertools.pairwise(marks)]
        self.phases_ns = dict(zip(PHASES, spans, strict=True))
