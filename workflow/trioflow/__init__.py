"""trioflow: predict a training step on many GPUs from an operator trace of one.

What Python users call is in ``__all__``; docs/python.md shows it. Each name is imported when it is
first used, so that ``trioflow --version`` and the rules load nothing that they do not need; type
checkers read ``__init__.pyi``, which ``make docs`` writes from ``HOMES``.
"""

from importlib import import_module

__version__ = "0.1.0"

HOMES = {
    "Options": "prediction.question",
    "Plan": "base.plan_row",
    "Platform": "hardware.machine",
    "Prediction": "prediction.assembly",
    "Trace": "trace.store",
    "SearchResult": "sweeps.search",
    "TrioflowError": "base.errors",
    "find_largest": "prediction.fitting",
    "load_named_platform": "costmodel.choices",
    "load_trace": "trace.store",
    "plan": "sweeps.search",
    "make_plan": "parallel.plan",
    "models": "prediction.known",
    "named_plan": "parallel.plan",
    "platforms": "prediction.known",
    "plot": "report.charts",
    "predict": "prediction.assembly",
    "search": "sweeps.search",
}
"""The module of each public name."""

__all__ = sorted(HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
