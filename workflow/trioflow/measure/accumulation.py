"""A training step whose gradients are added up over micro-steps before ranks exchange them."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from trioflow.measure.marks import Mark, StepMarks
from trioflow.trace.capture.training_step import TrainingStep, call_model
from trioflow.trace.workloads.build import Workload


class AccumulatingStep(TrainingStep):
    """One step of several forwards and backwards, of which the last one exchanges gradients.

    Parameters
    ----------
    workload, model, device, seed
        As in `TrainingStep`.
    batch : int
        Samples of the whole step on this rank; each micro-step runs its share.
    micro_steps : int
        Forwards and backwards of a step.
    """

    def __init__(
        self, workload: Workload, model: torch.nn.Module, batch: int, device: torch.device,
        seed: int, micro_steps: int,
    ) -> None:  # fmt: skip
        super().__init__(workload, model, batch // micro_steps, device, seed)
        self.micro_steps = micro_steps
        self.marks = StepMarks()

    def _run(self) -> None:
        spans = {"forward": 0, "backward": 0}
        self.marks.clear()
        start = time.perf_counter_ns()
        self.optimizer.zero_grad()
        for number in range(self.micro_steps):
            with self._exchange(number == self.micro_steps - 1):
                with self.workload.precision.forward(self.device):
                    outputs = call_model(self.model, self.inputs)
                    loss = self.workload.loss(outputs, self.targets) / self.micro_steps
                    loss = self.scaler.scale(loss)
                del outputs
                middle = time.perf_counter_ns()
                loss.backward()
            end = time.perf_counter_ns()
            spans["forward"] += middle - start
            spans["backward"] += end - middle
            self.marks.found.append(Mark("forward", number, start, middle))
            self.marks.found.append(Mark("backward", number, middle, end))
            start = end
        self._update()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        end = time.perf_counter_ns()
        self.marks.found.append(Mark("optimizer", 0, start, end))
        self.phases_ns = {**spans, "optimizer": end - start}

    def _exchange(self, last: bool) -> AbstractContextManager[None]:
        """Let the next backward exchange gradients, or keep them."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        elif isinstance(self.model, DistributedDataParallel) and not last:
            kept: AbstractContextManager[None] = self.model.no_sync()
            return kept
        return nullcontext()
