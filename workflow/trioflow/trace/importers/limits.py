"""Sizes beyond which a source is broken rather than large."""

from __future__ import annotations

from pathlib import Path

from trioflow.errors import TraceError
from trioflow.trace.store import Trace

MOST_ELEMENTS = 1 << 40
"""Elements of one tensor: a trillion, more than any device holds."""

_MOST_WORK = 1 << 60


def check_work(trace: Trace, file: str | Path) -> None:
    """Refuse a trace whose numbers do not fit the operator table.

    Raises
    ------
    TraceError
        When an operator, or all of them, has more operations or bytes than
        any step.
    """
    for column in ("flop", "read_bytes", "write_bytes"):
        numbers = [int(number) for number in trace.operators[column]]
        if sum(numbers) >= _MOST_WORK:
            place = max(range(len(numbers)), key=numbers.__getitem__)
            raise TraceError(
                f"operator {place} ({trace.operators['name'][place]}) has {column} {numbers[place]}, "
                "more than any step", file=file, fix="correct the shapes of its tensors",
            )  # fmt: skip
