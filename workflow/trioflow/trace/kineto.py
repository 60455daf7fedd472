"""Reading Kineto's Chrome trace: operator events, annotations and kernels."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trioflow.errors import TraceError
from trioflow.units import us_to_ns

STEP = "trioflow: step"
"""Annotation that encloses one captured step."""
MODULE = "module: "
"""Prefix of the annotation that encloses one module's forward."""


HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
"""Categories of what runs on a host thread and can enclose one another."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on the device."""


@dataclass(eq=False)
class Event:
    """One timed event; children are the events that it encloses on its thread."""

    name: str
    category: str
    start_ns: int
    end_ns: int
    thread: int
    record_id: int | None
    sequence_number: int | None
    correlation: int | None = None
    children: list[Event] = field(default_factory=list)
    parent: Event | None = None

    def walk(self) -> Iterator[Event]:
        """Yield the event and all that it encloses, in order of start."""
        yield self
        for child in self.children:
            yield from child.walk()

    def ancestors(self) -> Iterator[Event]:
        """Yield what encloses the event, innermost first."""
        above = self.parent
        while above is not None:
            yield above
            above = above.parent


def read_json_trace(path: str | Path) -> Any:
    """Read plain or gzipped JSON.

    Raises
    ------
    TraceError
        When the file is missing, cut short or not JSON.
    """
    try:
        raw = Path(path).read_bytes()
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except FileNotFoundError:
        raise TraceError("no such file", file=path) from None
    except (ValueError, EOFError, OSError) as error:
        raise TraceError(
            f"not a complete JSON file ({error})", file=path, fix="capture it again"
        ) from None


def read_events(path: str | Path) -> list[Event]:
    """Return the complete events of a Kineto trace in order of start, outermost first.

    Raises
    ------
    TraceError
        When the file is no Kineto trace or an event lacks its time.
    """
    content = read_json_trace(path)
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise TraceError("the key traceEvents is missing", file=path, fix="give a Kineto trace")
    events = []
    for row, raw in enumerate(content["traceEvents"]):
        if not isinstance(raw, dict) or raw.get("ph") != "X" or raw.get("cat") is None:
            continue
        try:
            start, duration = float(raw["ts"]), float(raw["dur"])
            thread = raw["tid"] if isinstance(raw["tid"], int) else -1
            arguments = raw.get("args", {})
            events.append(
                Event(
                    str(raw["name"]), str(raw["cat"]), us_to_ns(start), us_to_ns(start + duration),
                    thread, arguments.get("Record function id"),
                    arguments.get("Sequence number"),
                    arguments.get("correlation"),
                )
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"bad event ({error!r})", file=path, place=f"traceEvents[{row}]"
            ) from None
        if duration < 0:
            raise TraceError(
                f"negative duration {duration}", file=path, place=f"traceEvents[{row}]"
            )
    events.sort(key=lambda e: (e.start_ns, -e.end_ns))
    return events


def nest(events: list[Event]) -> list[Event]:
    """Fill ``children`` by containment in time on each host thread; return the outermost events."""
    roots: list[Event] = []
    open_events: dict[int, list[Event]] = {}
    for event in events:
        if event.category not in HOST:
            continue
        stack = open_events.setdefault(event.thread, [])
        while stack and event.start_ns >= stack[-1].end_ns:
            stack.pop()
        if stack:
            event.parent = stack[-1]
            stack[-1].children.append(event)
        else:
            roots.append(event)
        stack.append(event)
    return roots


def is_operator(name: str) -> bool:
    """Tell operators (``library::name``) from autograd nodes, annotations and functions."""
    library, separator, rest = name.partition("::")
    return bool(separator and rest) and library.isidentifier() and library not in _NOT_OPERATORS


_NOT_OPERATORS = ("torch", "autograd")


def find_steps(events: list[Event], path: str | Path) -> list[Event]:
    """Return the annotated steps of nested events, in order.

    On CUDA autograd runs backward on a thread of its own: what other host
    threads did during a step, enclosed by nothing, becomes the step's too.

    Raises
    ------
    TraceError
        When no step is annotated.
    """
    steps = [e for e in events if e.name == STEP and e.category == "user_annotation"]
    if not steps:
        raise TraceError(
            f"no annotation {STEP!r}", file=path, fix="capture with `trioflow capture`"
        )
    loose = [e for e in events if e.parent is None and e.category == "cpu_op"]
    for step in steps:
        for event in loose:
            during = step.start_ns <= event.start_ns and event.end_ns <= step.end_ns
            if during and event.thread != step.thread:
                event.parent = step
                step.children.append(event)
        step.children.sort(key=lambda e: (e.start_ns, -e.end_ns))
    return steps


def outermost_operators(step: Event) -> list[Event]:
    """Return the operators of a step that no other operator encloses, in order of start."""
    found: list[Event] = []
    pending = list(reversed(step.children))
    while pending:
        event = pending.pop()
        if event.category == "cpu_op" and is_operator(event.name):
            found.append(event)
        else:
            pending += reversed(event.children)
    return found
