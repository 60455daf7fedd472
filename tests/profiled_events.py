"""Events of a Kineto profile, written by hand."""

import json

from trioflow.trace.profile.kineto import read_profile
from trioflow.trace.profile.steps import find_spans, load_step


def event(name, category, ts, dur, tid=1, **arguments):
    """Return one complete event; times in us."""
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "tid": tid, "args": arguments}


def load(tmp_path, events, number=0):
    """Write a profile of some events and load one of its steps."""
    path = tmp_path / "kineto.json"
    path.write_text(json.dumps({"traceEvents": events}))
    profile = read_profile(path)
    return load_step(profile, find_spans(profile)[number])
