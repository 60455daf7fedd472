"""A profile of any size: one real profiled step, written out again and again at later times."""

import gzip
import json
from pathlib import Path
from typing import Any

_NUMBERS = ("Record function id", "External id", "Sequence number", "correlation")


def write_large_profile(source: str | Path, target: str | Path, size_bytes: int) -> int:
    """Write steps of the profiler's schedule, each the events of one real step; return how many.

    Times and numbers grow from step to step as they do in a real profile.
    """
    raw = Path(source).read_bytes()
    content = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    events = [e for e in content["traceEvents"] if e.get("ph") == "X" and "cat" in e]
    annotation = next(e for e in events if e["name"] == "trioflow: step")
    first = min(float(e["ts"]) for e in events)
    period = round(max(float(e["ts"]) + float(e["dur"]) for e in events) - first) + 10
    span = 1 + max(e["args"][k] for e in events for k in _NUMBERS if isinstance(e["args"].get(k), int))
    template, numbers = _make_template(events, annotation, first, period, span)
    written, step = 0, 0
    with Path(target).open("w", encoding="utf-8") as file:
        written += file.write('{"schemaVersion": 1, "traceEvents": [\n')
        while written < size_bytes:
            values = [round(begin + step * growth, 3) for begin, growth in numbers]
            written += file.write((",\n" if step else "") + template % (*values,))
            step += 1
        file.write('\n], "traceName": "large"}\n')
    return step


def _make_template(
    events: list[dict[str, Any]], annotation: dict[str, Any], first: float, period: int, span: int
) -> tuple[str, list[tuple[float, int]]]:
    """Return a step's text with a place for each number that grows, and their first values and growth."""
    numbers: list[tuple[float, int]] = []

    def place(begin: float, growth: int) -> str:
        numbers.append((begin, growth))
        return "\0"

    lines = []
    for event in events:
        row = dict(event)
        for key, value in event.items():  # in the order in which they are written
            if key == "ts":
                row[key] = place(round(float(value) - first, 3), period)
            elif key == "name" and event is annotation:
                row[key] = "ProfilerStep#" + place(0, 1)
            elif key == "args":
                row[key] = {
                    k: place(v, span) if k in _NUMBERS and isinstance(v, int) and v > 0 else v for k, v in value.items()
                }
        lines.append(json.dumps(row))
    text = ",\n".join(lines).replace("%", "%%")
    return text.replace('"\\u0000"', "%s").replace("\\u0000", "%s"), numbers
