"""A profile of any size: one real profiled step, written out again and again at later times."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

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
    span = 1 + max(
        e["args"][k] for e in events for k in _NUMBERS if isinstance(e["args"].get(k), int)
    )
    written, step = 0, 0
    with Path(target).open("w", encoding="utf-8") as file:
        written += file.write('{"schemaVersion": 1, "traceEvents": [\n')
        while written < size_bytes:
            lines = []
            for event in events:
                args = {
                    k: v + step * span if k in _NUMBERS and isinstance(v, int) and v > 0 else v
                    for k, v in event["args"].items()
                }
                name = f"ProfilerStep#{step}" if event is annotation else event["name"]
                ts = round(float(event["ts"]) - first + step * period, 3)
                lines.append(json.dumps({**event, "name": name, "ts": ts, "args": args}))
            written += file.write((",\n" if step else "") + ",\n".join(lines))
            step += 1
        file.write('\n], "traceName": "large"}\n')
    return step
