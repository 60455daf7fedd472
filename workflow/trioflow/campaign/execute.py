"""Doing one item on the device at hand."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from trioflow.campaign.ceilings import run_ceiling
from trioflow.campaign.items import Item
from trioflow.campaign.state import Result
from trioflow.campaign.sweeps import free_memory, run_sweep
from trioflow.campaign.workload_captures import run_workload

WARM_UP_S = 1.0


def raise_clocks(time_s: float) -> None:
    """Keep the device busy for a while [s]: an idle one runs at a fraction of its clock."""
    block = torch.randn(4096, 4096, device="cuda")
    until = time.monotonic() + time_s
    while time.monotonic() < until:
        torch.mm(block, block)
        torch.cuda.synchronize()


class Executor:
    """Does items, each with the device's memory free of the one before.

    Parameters
    ----------
    device : {"cuda", "cpu"}
        Where.
    quick : bool
        Few repeats and small sizes.
    """

    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick = device, quick
        if device == "cuda":
            raise_clocks(0.05 if quick else WARM_UP_S)

    def __call__(self, item: Item, folder: Path) -> Result:
        """Do one item; temporary files go into the folder."""
        free_memory(self.device)
        arguments = item.arguments
        if item.kind == "ceiling":
            return run_ceiling(item.name, arguments["part"], self.device, self.quick)
        if item.kind == "sweep":
            return run_sweep(
                item.name, arguments["operation"], arguments["precision"], arguments["points"],
                self.device, folder, self.quick,
            )  # fmt: skip
        return run_workload(arguments["row"], arguments["batch"], self.device, self.quick, folder)

    def check_device(self) -> bool:
        """Tell whether the device still works, after freeing what a failed item held."""
        if self.device != "cuda":
            return True
        try:
            free_memory(self.device)
            torch.ones(1, device="cuda").add_(1)
            torch.cuda.synchronize()
        except Exception:  # after an illegal access every call of this process fails
            return False
        return True
