"""What a source of traces may leave unsaid."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trioflow.base.errors import TraceError
from trioflow.base.settings import PRECISIONS

_COUNTS = {"batch": "samples", "world_size": "ranks"}


@dataclass(frozen=True)
class ImportOptions:
    """Facts that the user gives because a source does not hold them."""

    gpu: str | None = None  # name of the traced device, as its driver gives it
    batch: int | None = None  # samples of the traced step
    precision: str | None = None  # fp32, tf32, bf16 or fp16
    # Optimizer of the step; ``none`` for a forward and backward without one.
    optimizer: str | None = None
    repeat_layers: int | None = None  # depth of the model, where the source holds one layer
    workload: str | None = None  # name for what was traced
    world_size: int | None = None  # ranks of the run that the source is one rank of

    def need(self, name: str, source: str | Path, found: str | int | None = None) -> str | int:
        """Return a fact that was given, or else what the source itself says.

        Raises TraceError when neither knows it, they contradict each other, or a batch is not a
        positive whole number.
        """
        given: str | int | None = getattr(self, name)
        flag = f"--{name.replace('_', '-')}"
        if given is not None and found is not None and str(given) != str(found):
            raise TraceError(
                f"the source says {name.replace('_', ' ')} {found}, {flag} says {given}",
                file=source,
                fix=f"leave {flag} out or correct it",
            )
        value = given if given is not None else found
        if value is None:
            raise TraceError(
                f"the source does not say the {name.replace('_', ' ')}", file=source, fix=f"give it with {flag}"
            )
        if name in _COUNTS and (value.__class__ is not int or int(value) < 1):
            raise TraceError(
                f"{value!r:.40} is not a number of {_COUNTS[name]}",
                file=source,
                place=name.replace("_", " "),
                fix=f"give it with {flag}",
            )
        return value

    def need_precision(self, source: str | Path, found: str | None = None) -> str:
        """Return the precision as `need` does; TraceError besides where it is none that is predicted."""
        precision = str(self.need("precision", source, found))
        if precision not in PRECISIONS:
            raise TraceError(f"unknown precision {precision!r}", file=source, fix=f"use one of {', '.join(PRECISIONS)}")
        return precision
