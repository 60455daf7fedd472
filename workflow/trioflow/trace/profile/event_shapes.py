"""What a Kineto event alone says of its operator: input shapes, types and constants."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.trace.flops import count_flop
from trioflow.trace.profile.events import Event, is_operator
from trioflow.trace.profile.profiler_fields import element_bytes
from trioflow.trace.tensors import TensorRef

_WEIGHTS: dict[str, tuple[int, ...]] = {
    "aten::conv1d": (1, 2), "aten::conv2d": (1, 2), "aten::conv3d": (1, 2),
    "aten::linear": (1, 2), "aten::embedding": (0,), "aten::layer_norm": (2, 3),
    "aten::batch_norm": (1, 2), "aten::group_norm": (2, 3), "aten::rms_norm": (2,),
}  # fmt: skip
"""Arguments that hold parameters in PyTorch's own modules."""

_STATISTICS: dict[str, tuple[int, ...]] = {"aten::batch_norm": (3, 4)}


def tensors_of_event(event: Event, numbers: Iterator[int]) -> list[TensorRef]:
    """Return the input tensors of an event profiled with shapes; identities are unknown.

    Each use counts as a tensor of its own, with the next of some numbers. Where the operator says
    that an argument is a parameter, so does the reference.
    """
    shapes, types = event.details.get("shapes"), event.details.get("types")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return []
    found = []
    weights = _WEIGHTS.get(event.name, ())
    statistics = _STATISTICS.get(event.name, ())
    for argument, (shape, kind) in enumerate(zip(shapes, types, strict=True)):
        members = shape if kind == "TensorList" else [shape]
        word = kind if kind != "TensorList" else "float"
        size = element_bytes(word)
        if size is None:
            continue
        category = "parameter" if argument in weights else ""
        category = "buffer" if argument in statistics else category
        for sizes in members:
            if _is_shape(sizes):
                number = next(numbers)
                found.append(
                    TensorRef(number, number, size, tuple(sizes), word, argument, category)
                )
    return found


def check_types(events: Iterable[Event], path: Path) -> None:
    """Refuse tensors of an unknown element type, where the profile alone gives the types.

    Raises
    ------
    TraceError
        Names the call and the type.
    """
    for event in events:
        shapes, types = event.details.get("shapes"), event.details.get("types")
        for shape, word in zip(shapes or [], types or [], strict=False):
            if shape and word not in _NO_TENSOR and element_bytes(word) is None:
                raise TraceError(
                    f"unknown element type {word!r} of an argument of {event.name}",
                    file=path, place=f"time {event.start_ns} ns",
                    fix="check the file; a new type's size goes into profiler_fields.json",
                )  # fmt: skip


_NO_TENSOR = ("TensorList", "Scalar", "ScalarList", "")


def _is_shape(sizes: Any) -> bool:
    return isinstance(sizes, list) and all(s.__class__ is int and s >= 0 for s in sizes)


def count_event_flop(event: Event) -> int:
    """Return the FLOPs of the outermost calls that a formula knows, from inputs and constants."""
    if is_operator(event.name):
        inputs = [list(ref.shape) for ref in tensors_of_event(event, count())]
        flop = count_flop(event.name, inputs, _results(event, inputs))
        if flop is not None:
            return flop
    return sum(count_event_flop(child) for child in event.children)


def _results(event: Event, inputs: list[list[int]]) -> list[list[int]]:
    """Return the shapes of a convolution's results, which follow from its constants."""
    if "conv" not in event.name or len(inputs) < 2:
        return []
    constants = [_parse(value) for value in event.details.get("values") or []]
    if event.name.endswith("convolution_backward"):
        mask = constants[-1] if constants and isinstance(constants[-1], list) else [True, True]
        return [shape if wanted else [] for shape, wanted in zip(inputs[1:3], mask, strict=False)]
    places = [place for place, c in enumerate(constants) if isinstance(c, list)][:3]
    shape, weight = inputs[:2]
    dimensions = len(shape) - 2
    if len(places) < 3 or any(len(constants[place]) != dimensions for place in places):
        return []
    stride, padding, dilation = (constants[place] for place in places)
    after = constants[places[2] + 1 :]
    if after and after[0] is True:  # transposed, then what is added to its result, then groups
        added, groups = after[1:3]
        sizes = [
            (shape[2 + d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (weight[2 + d] - 1) + 1
            + added[d]
            for d in range(dimensions)
        ]  # fmt: skip
        return [[shape[0], weight[1] * groups, *sizes]]
    sizes = [
        (shape[2 + d] + 2 * padding[d] - dilation[d] * (weight[2 + d] - 1) - 1) // stride[d] + 1
        for d in range(dimensions)
    ]
    return [[shape[0], weight[0], *sizes]]


def _parse(value: Any) -> Any:
    """Return a constant that a profile writes as text."""
    try:
        return json.loads(str(value).lower())
    except ValueError:
        return None
