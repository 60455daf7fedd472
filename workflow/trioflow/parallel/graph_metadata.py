"""Where a task graph comes from: plan, traces, how sure its compute is, and its memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from trioflow.base.errors import InputError, TableError
from trioflow.base.plan_row import Plan
from trioflow.parallel.plan import make_plan


@dataclass(frozen=True)
class TimesOrigin:
    """What the operators' times of an experiment rest on."""

    # As of ``costmodel.choices.DeviceTimes``
    cost_model: str
    confidence: str
    warnings: list[str]  # its warnings


@dataclass(frozen=True, kw_only=True)
class GraphMetadata:
    """Where a task graph comes from; the defaults are those of a graph put together by hand, of which nothing is known.

    ``mode`` is of ``schedules.table.MODES``, ``batch`` of the whole step; ``trace_shares`` is the share of the step
    that each traced batch decides, ``traced_phases_s`` traced time by phase at each batch [s], ``baseline_step_time_s``
    the traced step shared out evenly by samples and ranks [s]. ``compute_interval`` holds the factors of an 80 %
    interval, ``least_half_log`` the step's least half width as a logarithm, without ``first_call_s`` [s]; ``peak_memory_bytes`` is the fullest
    rank's, ``memory`` and ``memory_curves`` see ``memory.estimate_memory`` and ``take_curves``. ``experiment`` and
    ``operator_times`` (what times rest on) are of an experiment of the workflow.
    """

    workload: str = ""
    device_name: str = ""
    plan: Plan = field(default_factory=make_plan)
    plan_text: str = ""
    mode: str = "train"
    ranks: int = 1
    batch: int = 0
    traced_batches: list[int] = field(default_factory=list)
    trace_shares: dict[str, float] = field(default_factory=dict)
    traced_phases_s: dict[str, dict[str, float]] = field(default_factory=dict)
    baseline_step_time_s: float = 0.0
    compute_interval: tuple[float, float] = (1.0, 1.0)
    compute_confidence: str = "measured"
    least_half_log: float = 0.0
    first_call_s: float = 0.0
    stages: list[list[str]] = field(default_factory=list)
    peak_memory_bytes: int = 0
    memory: list[dict[str, Any]] = field(default_factory=list)
    memory_curves: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    experiment: str | None = None
    operator_times: TimesOrigin | None = None

    def __post_init__(self) -> None:
        interval = self.compute_interval
        numbers = [value for value in interval if isinstance(value, int | float)]
        if not len(numbers) == len(interval) == 2 or not 0 < interval[0] <= interval[1] < math.inf:
            raise InputError(
                f"{interval!r} is not an interval of compute factors",
                place="compute_interval",
                fix="give a low and a high factor, such as [0.9, 1.1]",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON holds of it: an experiment's entries only where it is one's."""
        found = {cell.name: getattr(self, cell.name) for cell in fields(self)}
        found |= {"plan": asdict(self.plan), "compute_interval": list(self.compute_interval)}
        if self.operator_times is not None:
            found["operator_times"] = asdict(self.operator_times)
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], file: str | Path) -> GraphMetadata:
        """Return what a file's metadata say; TableError when a key is missing, unknown or of the wrong kind or value."""
        if not raw:
            return UNKNOWN
        found = _read_cells(cls, raw, ("experiment", "operator_times"), file, "metadata")
        columns = [cell.name for cell in fields(Plan) if cell.default is not MISSING]
        found["plan"] = Plan(**_read_cells(Plan, found["plan"], columns, file, "metadata plan"))
        if "operator_times" in found:
            cells = found["operator_times"]
            cells = _read_cells(TimesOrigin, cells, (), file, "metadata operator_times")
            found["operator_times"] = TimesOrigin(**cells)
        try:
            return cls(**{**found, "compute_interval": tuple(found["compute_interval"])})
        except InputError as error:
            place = f"metadata {error.place}"
            raise TableError(error.problem, file=file, place=place, fix=_REMAKE) from None


UNKNOWN = GraphMetadata()
"""Of a graph that was put together by hand."""
_REMAKE = "make the task graph again"
_IN_JSON: dict[Any, tuple[Any, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (int, float),
    str: (str,),
    list: (list,),
    tuple: (list,),
    dict: (dict,),
    Plan: (dict,),
    str | None: (str,),
    TimesOrigin | None: (dict,),
}
"""Types of a JSON value by the type of the attribute that it becomes."""


def _read_cells(
    kind: type[Any], raw: Mapping[str, Any], optional: Collection[str], file: str | Path, place: str
) -> dict[str, Any]:
    """Return the entries of a JSON object that a dataclass is made from, each of its type."""
    hints = get_type_hints(kind)
    for key in raw:
        if key not in hints:
            raise TableError(f"unknown key {key!r}", file=file, place=place, fix=_REMAKE)
    for name, hint in hints.items():
        if name not in raw:
            if name in optional:
                continue
            raise TableError(f"no key {name!r}", file=file, place=place, fix=_REMAKE)
        expected = _IN_JSON.get(get_origin(hint)) or _IN_JSON[hint]
        value = raw[name]
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            raise TableError(
                f"{value!r:.60} does not have the type {expected[0].__name__}",
                file=file,
                place=f"{place} {name}",
                fix=_REMAKE,
            )
    return dict(raw)
