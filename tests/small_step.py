"""A step on a GPU, written by hand: a linear layer with its gradients and one update, both files.

Times, ids, launches and shapes agree with one another, as a profiler's do.
"""

import copy
import itertools
from math import prod
from typing import Any

Tensor = tuple[int, tuple[int, ...]]
DEVICE = "cuda:0"
X, WEIGHT, TURNED, OUT, ZERO = (1, (8, 6)), (2, (4, 6)), (12, (6, 4)), (3, (8, 4)), (4, (8, 4))
SLOPE, GRADIENT, CLIPPED = (5, (8, 4)), (6, (4, 6)), (7, (8, 4))
STORAGES = {12: 2}

# Depth, name, inputs, results, kernel [us] (0 for none), sequence number, signature's mark.
CALLS: list[tuple[int, str, list[Tensor], list[Tensor], int, int | None, str]] = [
    (0, "ProfilerStep#1", [], [], 0, None, ""),
    (1, "aten::linear", [X, WEIGHT], [OUT], 0, None, ""),
    (2, "aten::t", [WEIGHT], [TURNED], 0, 3, "(a)"),
    (2, "aten::mm", [X, TURNED], [OUT], 40, 4, ""),
    (1, "aten::relu", [OUT], [ZERO], 5, 5, ""),
    (1, "aten::ones_like", [ZERO], [SLOPE], 3, None, ""),
    (1, "autograd::engine::evaluate_function: ReluBackward0", [], [], 0, 5, ""),
    (2, "ReluBackward0", [SLOPE], [CLIPPED], 0, 5, ""),
    (3, "aten::threshold_backward", [SLOPE, ZERO], [CLIPPED], 6, None, ""),
    (1, "autograd::engine::evaluate_function: MmBackward0", [], [], 0, 4, ""),
    (2, "MmBackward0", [CLIPPED], [GRADIENT], 0, 4, ""),
    (3, "aten::mm", [(13, (4, 8)), X], [GRADIENT], 45, None, ""),
    (1, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", [], [], 0, None, ""),
    (2, "torch::autograd::AccumulateGrad", [GRADIENT], [], 0, None, ""),
    (3, "aten::detach", [GRADIENT], [(14, (4, 6))], 0, None, "(a)"),
    (1, "Optimizer.step#SGD.step", [], [], 0, None, ""),
    (2, "aten::add_", [WEIGHT, GRADIENT], [WEIGHT], 4, None, "(a!)"),
]
STORAGES |= {13: 7, 14: 6}


def _value(tensor: Tensor) -> list[Any]:
    number, shape = tensor
    return [number, STORAGES.get(number, number) + 100, 0, prod(shape), 4, DEVICE]


def _node(number: int, parent: int, call: Any) -> dict[str, Any]:
    _, name, inputs, outputs, _, sequence, mark = call
    operator = name.startswith("aten::")
    schema = f"{name}(Tensor{mark} self, Tensor other) -> Tensor" if operator else ""
    attributes = {"rf_id": number, "seq_id": -1 if sequence is None else sequence, "tid": 1, "op_schema": schema}
    return {
        "id": number + 10,
        "name": name,
        "ctrl_deps": parent + 10,
        **{
            side: {
                "values": [_value(t) for t in tensors],
                "shapes": [list(t[1]) for t in tensors],
                "types": ["Tensor(float)"] * len(tensors),
            }
            for side, tensors in (("inputs", inputs), ("outputs", outputs))
        },
        "attrs": [{"name": k, "type": "", "value": v} for k, v in attributes.items()],
    }


def _begin_and_end() -> list[tuple[int, int]]:
    """Return when each call starts and ends [us]: ten for its start, ten for its end."""
    spans, stack, clock = [[0, 0] for _ in CALLS], [], 1000
    for place, call in enumerate(CALLS):
        while len(stack) > call[0]:
            clock += 10
            spans[stack.pop()][1] = clock
        clock += 10
        spans[place][0] = clock
        stack.append(place)
        clock += 10 if call[4] else 0
    while stack:
        clock += 10
        spans[stack.pop()][1] = clock
    return [(a, b) for a, b in spans]


def small_step() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a profile and the execution trace of the same step."""
    events, nodes, above = [], [], {-1: 0}
    correlations = itertools.count(501)
    ready = 0  # when the device is free
    for number, (call, (begin, end)) in enumerate(zip(CALLS, _begin_and_end(), strict=True), 1):
        depth, name, inputs, _, kernel_us, sequence, _ = call
        above[depth] = number
        nodes.append(_node(number, above[depth - 1], call))
        annotation = "::" not in name or name.startswith("Optimizer")
        annotation &= not name.endswith("Backward0")
        args: dict[str, Any] = {"External id": number + 900, "Record function id": number}
        if not annotation:
            args |= {"Input Dims": [list(t[1]) for t in inputs], "Input type": ["float"] * len(inputs)}
        if sequence is not None:
            args["Sequence number"] = sequence
        host = {"ph": "X", "pid": 1, "tid": 1, "ts": begin, "dur": end - begin, "name": name}
        events.append({**host, "cat": "user_annotation" if annotation else "cpu_op", "args": args})
        if kernel_us:
            number_of_launch = next(correlations)
            ready = max(ready, begin + 45)
            events.append(
                {
                    **host,
                    "ts": begin + 2,
                    "dur": 4,
                    "name": "cudaLaunchKernel",
                    "cat": "cuda_runtime",
                    "args": {"correlation": number_of_launch, "External id": number + 900},
                }
            )
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": 7,
                    "ts": ready,
                    "dur": kernel_us,
                    "cat": "kernel",
                    "name": f"kernel_{number}",
                    "args": {"correlation": number_of_launch, "External id": number + 900, "device": 0, "stream": 7},
                }
            )
            ready += kernel_us + 4
    header = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "a GPU"}]}
    root = _node(0, 0, (0, "[pytorch|profiler|execution_trace|thread]", [], [], 0, None, ""))
    graph = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": [root, *nodes]}
    return {**header, "traceEvents": events}, graph


_STEPS, _APART_US, _APART_IDS = 3, 2000, 100


def parallel_steps() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the profile of three steps that reduce their gradient beside backward, and a graph.

    The execution trace is of the first step.
    """
    profile, graph = small_step()
    step = [*profile["traceEvents"], *_all_reduce()]
    graph["nodes"] += [
        {
            **copy.deepcopy(graph["nodes"][1]),
            "id": 70 + place,
            "name": name,
            "ctrl_deps": parent,
            "attrs": [
                {"name": "rf_id", "type": "", "value": 60 + place},
                {"name": "seq_id", "type": "", "value": -1},
                {"name": "tid", "type": "", "value": 2},
                {"name": "op_schema", "type": "", "value": ""},
            ],
        }
        for place, (name, parent) in enumerate((("c10d::allreduce_", 10), ("record_param_comms", 70)))
    ]
    events = []
    for number in range(_STEPS):
        for event in copy.deepcopy(step):
            event["ts"] += number * _APART_US
            event["name"] = event["name"].replace("ProfilerStep#1", f"ProfilerStep#{number + 1}")
            for key in ("External id", "Record function id", "correlation"):
                if key in event["args"]:
                    event["args"][key] += number * _APART_IDS
            events.append(event)
    profile["deviceProperties"][0]["name"] = "NVIDIA H100 80GB HBM3"
    return {**profile, "traceEvents": events}, graph


def _all_reduce() -> list[dict[str, Any]]:
    """Return a collective on a thread and a stream of its own, which runs beside a product."""
    host = {"ph": "X", "pid": 1, "tid": 2}
    shapes = {"Input Dims": [], "Input type": []}
    said = {
        "Collective name": "allreduce",
        "Group size": 8,
        "dtype": "Float",
        "In msg nelems": 24,
        "Out msg nelems": 24,
    }
    return [
        {
            **host,
            "ts": 1200,
            "dur": 40,
            "name": "c10d::allreduce_",
            "cat": "cpu_op",
            "args": {"External id": 960, "Record function id": 60, **shapes},
        },
        {
            **host,
            "ts": 1205,
            "dur": 30,
            "name": "record_param_comms",
            "cat": "cpu_op",
            "args": {"External id": 961, "Record function id": 61, **shapes, **said},
        },
        {
            **host,
            "ts": 1210,
            "dur": 4,
            "name": "cudaLaunchKernel",
            "cat": "cuda_runtime",
            "args": {"correlation": 560, "External id": 961},
        },
        {
            "ph": "X",
            "pid": 0,
            "tid": 20,
            "ts": 1220,
            "dur": 400,
            "cat": "kernel",
            "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "args": {"correlation": 560, "External id": 961, "device": 0, "stream": 20, **said},
        },
    ]
