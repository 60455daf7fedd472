"""trioflow: predict a training step on many GPUs from an operator trace of one.

What Python users call is in ``__all__``; docs/python.md shows it. Each name is imported when it is
first used, so that ``trioflow --version`` and the rules load nothing that they do not need. A type
checker sees the types where a name is imported from its home, such as ``trioflow.prediction.assembly``:
importing all homes here would make one circle of the whole library.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Options": "prediction.options",
    "Plan": "plan_row",
    "Platform": "hardware.machine",
    "Prediction": "prediction.answer",
    "Trace": "trace.store",
    "TrioflowError": "errors",
    "load_named_platform": "costmodel.choices",
    "load_trace": "trace.store",
    "make_plan": "parallel.plan",
    "named_plan": "parallel.plan",
    "predict": "prediction.assembly",
    "search": "sweeps.search",
}
"""The module of each public name."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
