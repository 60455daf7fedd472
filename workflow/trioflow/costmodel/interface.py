"""What a model of operator cost must offer, and how models of other packages are found."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import pandas as pd

from trioflow.base.plugins import load_plugin
from trioflow.costmodel.features import Floats
from trioflow.trace.facts import Facts

ENTRY_POINTS = "trioflow.operator_models"
"""Group under which a package registers a fit function (:class:`OperatorModelFit`) by its name."""


@runtime_checkable
class TraceLike(Protocol):
    """The parts of a trace that a fit reads."""

    @property
    def operators(self) -> pd.DataFrame:
        """Columns of ``tables.OPERATORS``."""

    @property
    def facts(self) -> Facts:
        """What is known of the step: its workload, batch and device at least."""


@runtime_checkable
class OperatorModel(Protocol):
    """A fitted model of operator cost; predictions have ``time_s``, ``low_s``, ``high_s`` (80 %) [s], ``extrapolated``.

    One whose answer depends on an operator's name, shapes and sizes alone may declare ``by_row =
    True``: it is then asked once for equal operators, ``distinct.PLACE`` left aside (:func:`looks_at_rows`).
    """

    def predict(self, operators: pd.DataFrame) -> pd.DataFrame:
        """Predict operators from their names and sizes alone."""

    def rescale(self, operators: pd.DataFrame, target: pd.DataFrame) -> pd.DataFrame:
        """Predict recorded operators at other sizes; unchanged sizes keep the recorded time."""

    def step_interval(self, kind: str = "rescale", distance: float | None = None) -> tuple[float, float]:
        """Return the 80 % interval of a step's compute over its prediction; it may widen with the log ``distance``."""

    def step_interval_basis(self, kind: str = "rescale") -> str:
        """Say in words what the step interval was estimated from."""

    def save(self, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
        """Write the model as JSON."""


@runtime_checkable
class RowModel(OperatorModel, Protocol):
    """A model from which others are derived: it looks at each row by itself."""

    by_row: ClassVar[bool]

    def row_times(self, rows: pd.DataFrame) -> Floats:
        """Predict the time [s] of rows as ``rows.sized_rows`` returns them."""


def looks_at_rows(model: OperatorModel) -> bool:
    """Return whether a model declares that it looks at each operator by itself."""
    return bool(getattr(model, "by_row", False))


class OperatorModelFit(Protocol):
    """A fit function as registered under ``trioflow.operator_models``."""

    def __call__(self, traces: Sequence[TraceLike]) -> tuple[OperatorModel, pd.DataFrame]:
        """Fit traces; return the model and a table of ``tables.OPERATOR_FIT``."""


def find_operator_model(method: str, known: Iterable[str] = ()) -> OperatorModelFit:
    """Return the fit function registered under a name; InputError where none or several are, or it cannot be loaded."""
    return load_plugin(ENTRY_POINTS, method, known, what="operator model")
