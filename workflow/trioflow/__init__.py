"""trioflow: predict a training step on many GPUs from an operator trace of one.

What Python users call is in ``__all__``; docs/python.md shows it. Each name is imported when it is
first used, so that ``trioflow --version`` and the rules load nothing that they do not need; type
checkers read the imports below that never run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioflow.base.errors import TrioflowError
    from trioflow.base.plan_row import Plan
    from trioflow.costmodel.choices import load_named_platform
    from trioflow.hardware.machine import Platform
    from trioflow.parallel.plan import make_plan, named_plan
    from trioflow.prediction.answer import Prediction
    from trioflow.prediction.assembly import predict
    from trioflow.prediction.fitting import find_largest
    from trioflow.prediction.known import models, platforms
    from trioflow.prediction.step import Options
    from trioflow.report.charts import plot
    from trioflow.sweeps.best_plans import plan
    from trioflow.sweeps.search import SearchResult, search
    from trioflow.trace.store import Trace, load_trace

__version__ = "0.1.0"

_HOMES = {
    "Options": "prediction.step",
    "Plan": "base.plan_row",
    "Platform": "hardware.machine",
    "Prediction": "prediction.answer",
    "Trace": "trace.store",
    "SearchResult": "sweeps.search",
    "TrioflowError": "base.errors",
    "find_largest": "prediction.fitting",
    "load_named_platform": "costmodel.choices",
    "load_trace": "trace.store",
    "plan": "sweeps.best_plans",
    "make_plan": "parallel.plan",
    "models": "prediction.known",
    "named_plan": "parallel.plan",
    "platforms": "prediction.known",
    "plot": "report.charts",
    "predict": "prediction.assembly",
    "search": "sweeps.search",
}
"""The module of each public name."""

__all__ = [
    "Options",
    "Plan",
    "Platform",
    "Prediction",
    "SearchResult",
    "Trace",
    "TrioflowError",
    "find_largest",
    "load_named_platform",
    "load_trace",
    "make_plan",
    "models",
    "named_plan",
    "plan",
    "platforms",
    "plot",
    "predict",
    "search",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
