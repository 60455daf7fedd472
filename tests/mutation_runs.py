"""Mutations of a whole profiled run: what another setting, version or rank would have written.

Each changes many entries of one profile in the same way. No value of them is a possible one
in place of another: whatever changes a total must be refused or said.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections.abc import Callable
from typing import Any

from mutation_kinds import Made, Maker, Sheet
from small_step import small_step

STEPS = 3
APART_US, APART_IDS = 2000, 100
DEVICE, RUNTIME = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
MARK, MARKS = "ProfilerStep#", ("ProfilerStep#", "trioflow: step")
REST = "the rest of the run"
OLD = {
    "cpu_op": "Operator", "kernel": "Kernel", "cuda_runtime": "Runtime", "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
}  # fmt: skip
OLD_CALLS = (MARK, "Optimizer.", "autograd::")
"""Annotations that PyTorch wrote among the operators before 1.10."""


def parallel_steps() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the profile of three steps that reduce their gradient beside backward, and a graph.

    The execution trace is of the first step.
    """
    profile, graph = small_step()
    step = [*profile["traceEvents"], *_all_reduce()]
    graph["nodes"] += [
        {
            **copy.deepcopy(graph["nodes"][1]), "id": 70 + place, "name": name, "ctrl_deps": parent,
            "attrs": [{"name": "rf_id", "type": "", "value": 60 + place},
                      {"name": "seq_id", "type": "", "value": -1},
                      {"name": "tid", "type": "", "value": 2},
                      {"name": "op_schema", "type": "", "value": ""}],
        }
        for place, (name, parent) in enumerate((("c10d::allreduce_", 10), ("record_param_comms", 70)))
    ]  # fmt: skip
    events = []
    for number in range(STEPS):
        for event in copy.deepcopy(step):
            event["ts"] += number * APART_US
            event["name"] = event["name"].replace(f"{MARK}1", f"{MARK}{number + 1}")
            for key in ("External id", "Record function id", "correlation"):
                if key in event["args"]:
                    event["args"][key] += number * APART_IDS
            events.append(event)
    profile["deviceProperties"][0]["name"] = "NVIDIA H100 80GB HBM3"
    return {**profile, "traceEvents": events}, graph


def _all_reduce() -> list[dict[str, Any]]:
    """Return a collective on a thread and a stream of its own, which runs beside a product."""
    host = {"ph": "X", "pid": 1, "tid": 2}
    shapes = {"Input Dims": [], "Input type": []}
    said = {"Collective name": "allreduce", "Group size": 8, "dtype": "Float",
            "In msg nelems": 24, "Out msg nelems": 24}  # fmt: skip
    return [
        {**host, "ts": 1200, "dur": 40, "name": "c10d::allreduce_", "cat": "cpu_op",
         "args": {"External id": 960, "Record function id": 60, **shapes}},
        {**host, "ts": 1205, "dur": 30, "name": "record_param_comms", "cat": "cpu_op",
         "args": {"External id": 961, "Record function id": 61, **shapes, **said}},
        {**host, "ts": 1210, "dur": 4, "name": "cudaLaunchKernel", "cat": "cuda_runtime",
         "args": {"correlation": 560, "External id": 961}},
        {"ph": "X", "pid": 0, "tid": 20, "ts": 1220, "dur": 400, "cat": "kernel",
         "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "args": {"correlation": 560, "External id": 961, "device": 0, "stream": 20, **said}},
    ]  # fmt: skip


def _each(
    sheet: Sheet, change: Callable[[dict[str, Any]], dict[str, Any] | None], note: str
) -> Made | None:
    """Write the profile with every timed event changed; None leaves one out."""
    places: dict[int, list[Any]] = {}
    for place, entry in enumerate(sheet.entries):
        if entry.get("ph") != "X":
            continue
        after = change(pickle.loads(pickle.dumps(entry)))  # deepcopy takes ten times as long
        if after != entry:
            places[place] = [] if after is None else [after]
    return (sheet.render(places), f"{note}: {len(places)} events", REST) if places else None


def _communication_renamed(chance: random.Random, sheet: Sheet) -> Made | None:
    """Rename kernels; then also the calls; then also what their metadata say."""
    depth = chance.randrange(1, 4)

    def change(event: dict[str, Any]) -> dict[str, Any]:
        if event["cat"] in DEVICE and "nccl" in event["name"]:
            event["name"] = "mover"
        elif depth > 1 and event["name"].startswith(("c10d::", "record_param_comms")):
            event["name"] = "mine::move"
        if depth > 2:
            event.get("args", {}).pop("Collective name", None)
        return event

    what = ("kernels", "kernels and calls", "kernels, calls and metadata")[depth - 1]
    return _each(sheet, change, f"communication renamed, {what}")


def _device_removed(chance: random.Random, sheet: Sheet) -> Made | None:
    gone = chance.choice([DEVICE, DEVICE + RUNTIME, ("kernel",)])
    return _each(sheet, lambda e: None if e.get("cat") in gone else e, f"{', '.join(gone)} removed")


def _marks_removed(chance: random.Random, sheet: Sheet) -> Made | None:
    """Remove the annotations of all steps, also those of the optimizer, or also all others."""
    words = chance.choice([MARKS, (*MARKS, "Optimizer."), None])

    def change(event: dict[str, Any]) -> dict[str, Any] | None:
        named = event["name"].startswith(words) if words else event["cat"] == "user_annotation"
        return None if named else event

    return _each(sheet, change, f"annotations removed: {', '.join(words) if words else 'all'}")


def _empty_step(chance: random.Random, sheet: Sheet) -> Made | None:
    marks = [(i, e) for i, e in enumerate(sheet.entries) if e.get("name", "").startswith(MARK)]
    marks = [(i, e) for i, e in marks if e.get("ph") == "X"]
    if not marks:
        return None
    place, last = max(marks, key=lambda pair: pair[1]["ts"])
    further = {**last, "name": f"{MARK}99", "ts": last["ts"] + last["dur"] + 1, "args": {}}
    further["dur"] = chance.choice([0, 1, 500])
    return sheet.render({place: [last, further]}), f"{further['dur']} us of an empty step", REST


def _one_side(chance: random.Random, sheet: Sheet) -> Made | None:
    """Remove the annotations of steps and of collectives from one rank's file of a pair."""
    if not sheet.paired:
        return None
    words = chance.choice([MARKS, (*MARKS, "record_param_comms"), ("c10d::", "record_param_comms")])
    if sheet.form == "profile":
        return _each(
            sheet, lambda e: None if e["name"].startswith(words) else e, f"{words} removed"
        )
    gone = {n["id"]: n for n in sheet.entries if n["name"].startswith(words)}
    places: dict[int, list[Any]] = {}
    for place, node in enumerate(sheet.entries):
        key = "ctrl_deps" if "ctrl_deps" in node else "parent"
        above = node[key]
        while above in gone:
            above = gone[above][key]
        if node["id"] in gone or above != node[key]:
            places[place] = [] if node["id"] in gone else [{**node, key: above}]
    return (sheet.render(places), f"{words} removed", REST) if gone else None


def _launched_before(chance: random.Random, sheet: Sheet) -> Made | None:
    """Give kernels, or copies of them, numbers below the first launch's."""
    numbers = [
        e["args"]["correlation"] for e in sheet.entries
        if e.get("cat") in RUNTIME and e.get("args", {}).get("correlation")
    ]  # fmt: skip
    kernels = [i for i, e in enumerate(sheet.entries) if e.get("cat") == "kernel"]
    if not numbers or not kernels or min(numbers) < 2:
        return None
    count = min(chance.choice([1, 3]), len(kernels), min(numbers) - 1)
    twice = chance.random() < 0.5
    places = {}
    for number, place in enumerate(chance.sample(kernels, count), 1):
        kernel = copy.deepcopy(sheet.entries[place])
        kernel["args"]["correlation"] = min(numbers) - number
        kernel["args"].pop("External id", None)
        kernel["ts"] += 1 if twice else 0
        places[place] = [sheet.entries[place], kernel] if twice else [kernel]
    return sheet.render(places), f"{count} kernels, {'added' if twice else 'moved'}", REST


def _device_changed(chance: random.Random, sheet: Sheet) -> Made | None:
    """Give all kernels, or those after some time, another device's number."""
    kernels = [e for e in sheet.entries if "device" in e.get("args", {}) and e.get("cat") in DEVICE]
    if not kernels:
        return None
    since = chance.choice([min, max])(e["ts"] for e in kernels)

    def change(event: dict[str, Any]) -> dict[str, Any]:
        if event.get("cat") in DEVICE and event["ts"] >= since:
            event["args"]["device"] = 2
        return event

    return _each(sheet, change, f"device 2 from {since} us on")


def _old_categories(chance: random.Random, sheet: Sheet) -> Made | None:
    def change(event: dict[str, Any]) -> dict[str, Any]:
        event["cat"] = OLD.get(event["cat"], event["cat"])
        if event["cat"] == "user_annotation" and event["name"].startswith(OLD_CALLS):
            event["cat"] = "Operator"
        return event

    return _each(sheet, change, "categories of PyTorch 1.8")


_PROFILE: dict[str, Maker] = {
    "communication renamed": _communication_renamed,
    "device events removed": _device_removed,
    "steps' annotations removed": _marks_removed,
    "empty last step": _empty_step,
    "one file's annotations removed": _one_side,
    "launched before the profile": _launched_before,
    "device id changed": _device_changed,
    "old categories": _old_categories,
}
RUN: dict[str, dict[str, Maker]] = {
    "profile": _PROFILE,
    "graph": {"one file's annotations removed": _one_side},
}


def parallel_files(profile_name: str, graph_name: str) -> dict[str, bytes]:
    """Return the files of `parallel_steps`."""
    profile, graph = parallel_steps()
    return {profile_name: json.dumps(profile).encode(), graph_name: json.dumps(graph).encode()}
