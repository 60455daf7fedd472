"""The facts of a trace: what ``trace.json`` says of the step beside its tables; `Facts` has them by name.

``trace.json`` may leave out everything but the first four, and may hold more
than is listed here: what other tools add is kept as it is.

Of a rank of a parallel run they hold its program. ``communication`` has an entry a message (`Call`): ``op_id`` of its
row; ``name``, a collective, ``send`` or ``recv``; ``message_bytes`` as in ``tables.TASKS``; ``dtype``; ``ranks`` of its
group, the root first; ``group``, the communicator; ``asynchronous``, whether the stream goes on beside it; of a send or
recv ``peer`` and, where messages overtake one another, ``tag``. ``program`` has ``rank`` and ``world_size``;
``streams``, the operators of each stream but the first by its number; ``waits``, pairs of an operator and an earlier one
that it waits for beside the order of its stream.

Names, arguments and meaning of calls: the operators ``c10d``, ``_c10d_functional`` and ``_dtensor`` of
PyTorch 2.13 (``torch/csrc/distributed/c10d/Ops.cpp``, ``Functional.cpp``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, defstruct

from trioflow.base.errors import TraceError
from trioflow.base.input_files import check_values
from trioflow.base.precision_recipes import RECIPES, PrecisionRecipe
from trioflow.base.provenance import read_own_table

POINT_TO_POINT = ("send", "recv")


class Call(NamedTuple):
    """A call that communicates, in the words of a trace."""

    collective: str
    whole: str  # argument that holds the whole buffer; empty: the results do
    place: int | None = None  # of that argument, where profiles before PyTorch 2.2 are read by it
    noted: str = ""  # name under which ``record_param_comms`` notes it


CALLS = {
    row["call"]: Call(row["collective"], row["whole"], int(row["place"]) if row["place"] else None, row["noted"] or "")
    for row in read_own_table("trace/facts")
}
"""Calls of ``torch.distributed`` by name; a functional one's may end in ``_`` as well."""


_REQUIRED_FACTS = ("workload", "batch", "device_name", "step_time_s")
STEP_TIME_SOURCES = {
    "un-profiled": "median of steps that ran without the profiler",
    "profiled": "the profiled step's own duration, the profiler's time included",
    "device period": "from one profiled step's end to the next one's on the device, which runs behind the host",
    "busy": "time in which the device was busy: no host time, no idle time",
    "repeated": "a captured step, one of its blocks repeated",
    "predicted": "the sum of operator times that a cost model gave",
    "none": "the trace holds no times",
}
"""What ``step_time_s`` is, by the fact ``step_time_source``."""
UNTIMED = "none"
DIGESTS = "digests"
"""Fact with the SHA-256 of both tables and of the other facts as they were saved; no trace in memory has it."""

Entry = Mapping[str, Any]
"""A gradient, parameter or unit, as ``trace.json`` lists it; `_KINDS` says what each must hold."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a traced step; None where nobody said it.

    Each field is a key of ``trace.json`` and has its name there.

    ``workload``, ``batch``, ``device_name``: what ran, how many samples of it, and the device as
        its driver names it.
    ``step_time_s``, ``step_time_source``: the step [s], and what that is: a key of
        `STEP_TIME_SOURCES`.
    ``step_times_s``: steps without the profiler [s].
    ``repeats``: how much profiled steps differ from one another; see ``profile.steps.measure_repeats``.
    ``busy_s``, ``span_ns``, ``tail_s``, ``first_call_s``: when the device was busy, each operator
        from its first to its last kernel, host time after the last operator, and of one call that
        takes most of the step.
    ``measured_end_to_end_s``, ``measured_forward_s``, ``measured_backward_s``,
        ``timer_floor_s``: the whole model as its source timed it, beside
        operators timed one by one.
    ``gradients``: one entry a parameter, in the order in which they become ready.
    ``parameters``, ``buffers``, ``units``, ``tensor_split``, ``attention_heads``, ``row``: the
        model: what it holds, between which modules a pipeline cuts it, how tensor parallelism
        does, and the row of the workload's table.
    ``recorded_memory``: what the device's allocator handed out and reserved at most (``peak_bytes``,
        ``reserved_bytes``), as the profiler's ``[memory]`` events say.
    ``unjoined``, ``warnings``: what could not be joined, and all that a reader must know; a
        sentence each.
    ``communication``, ``program``: messages of a rank of a parallel run, and what of its operators
        waits for what; ``trioflow.sharded.as_traced`` reads both.
    ``language_model``: sizes of a language model that was built from its configuration.
    ``routing``: how its experts are taken to share tokens where not equally; see ``parallel.splits.tensor_split``.
    ``new_gpu``, ``predicted_times``: interval and origin of times that were carried over from
        another GPU, or that a model gave.
    ``source_files``: paths of the files read.
    ``other``: what else ``trace.json`` holds, which nothing here computes with: ``inputs`` (digests of the files read),
        ``target``, ``host``, ``seed``, ``trioflow_version``, ``profiled_step_s``, ``profiled_steps`` and
        ``profiler_overhead`` (how much longer that is, relative), ``span_s`` (of all operators), ``host_only_s`` (host
        time of modules without kernels), ``busy_over_measured``, and counts: ``backward_operators_joined``,
        ``operators_without_tensors``, ``device_events``, ``streams``.
    """

    workload: str
    batch: int
    device_name: str
    step_time_s: float
    gradients: Sequence[Entry] = field(default_factory=list)
    warnings: Sequence[str] = field(default_factory=list)
    source: str | None = None
    device: str | None = None
    precision: str | None = None
    precision_recipe: str | None = None
    optimizer: str | None = None
    causal_attention: bool | None = None
    mode: str | None = None
    model: str | None = None
    row: Mapping[str, str] | None = None
    torch: str | None = None
    source_files: Sequence[str | Path] | None = None
    step_time_source: str | None = None
    step_times_s: Sequence[float] | None = None
    repeats: Mapping[str, Any] | None = None
    busy_s: float | None = None
    span_ns: Sequence[int] | None = None
    tail_s: float | None = None
    first_call_s: float | None = None
    recorded_memory: Mapping[str, int] | None = None
    measured_end_to_end_s: float | None = None
    measured_forward_s: float | None = None
    measured_backward_s: float | None = None
    timer_floor_s: float | None = None
    operators: int | None = None
    flop: int | None = None
    joined_share: float | None = None
    unjoined: Sequence[str] | None = None
    communication: Sequence[Entry] | None = None
    program: Mapping[str, Any] | None = None
    parameters: Sequence[Entry] | None = None
    buffers: Sequence[Entry] | None = None
    units: Sequence[Entry] | None = None
    tensor_split: Mapping[str, str] | None = None
    tensor_split_by_name: bool | None = None
    attention_heads: Sequence[int] | None = None
    tp_flagged: Sequence[int] | None = None
    repeated: Sequence[Entry] | None = None
    language_model: Mapping[str, Any] | None = None
    routing: Mapping[str, Any] | None = None
    new_gpu: Mapping[str, Any] | None = None
    predicted_times: Mapping[str, Any] | None = None
    other: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, content: Mapping[str, Any], file: str | Path | None = None) -> Facts:
        """Return the facts of what ``trace.json`` holds, checked; TraceError as `check_facts`."""
        check_facts(content, file)
        known = {name: value for name, value in content.items() if value is not None}
        other = {name: known.pop(name) for name in list(known) if name not in NAMES}
        return cls(**known, other=other)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``trace.json``: every fact that somebody said."""
        values = {name: getattr(self, name) for name in NAMES}
        kept = {name: value for name, value in values.items() if value is not None}
        lists = {name: list(value) for name, value in kept.items() if isinstance(value, tuple)}
        return {**kept, **lists, **self.other}

    @property
    def recipe(self) -> PrecisionRecipe:
        """What is held, exchanged and updated in which format; single precision if nobody said."""
        return RECIPES.get(self.precision_recipe or self.precision or "", RECIPES["fp32"])

    @property
    def reduced_width(self) -> float:
        """Bytes of a gradient as it is exchanged, over those of its weight in the trace."""
        return self._width_of(self.recipe.reduce_bytes)

    @property
    def kept_width(self) -> float:
        """Bytes of a gradient as the optimizer reads it, over those of its weight in the trace."""
        return self._width_of(self.recipe.gradient_bytes)

    def _width_of(self, elem_bytes: int) -> float:
        widths = {int(entry.get("elem_bytes", 4)) for entry in self.parameters or []}
        casts = self.recipe.casts_model and len(widths) == 1
        return elem_bytes / widths.pop() if casts else 1.0

    def warn(self, *sentences: str) -> list[str]:
        """Return the warnings with some more."""
        return [*self.warnings, *sentences]


NAMES = frozenset(one.name for one in fields(Facts)) - {"other"}
"""Keys of ``trace.json`` that have a field."""


def check_facts(facts: Mapping[str, Any], file: str | Path | None = None) -> None:
    """Check the facts that every later stage relies on.

    Raises TraceError when one is missing, of another type or not finite, the batch is no positive
    whole number, a timed step takes no time, or a list's entry lacks what a plan needs.
    """
    check_values(dict(facts), file or "trace.json", TraceError)
    for name in _REQUIRED_FACTS:
        if name not in facts:
            raise TraceError(f"the fact {name!r} is missing", file=file, fix="capture it again")
    for name, value in facts.items():
        kind = _KINDS.get(name, _Time if name.endswith("_s") and not isinstance(value, list) else object)
        try:  # a number of numpy's is one of Python's, too
            msgspec.convert(float(value) if isinstance(value, float) else value, kind)
        except (msgspec.ValidationError, OverflowError) as error:
            problem, _, inside = str(error).partition(" - at `$")
            raise TraceError(
                f"{value!r:.40} is not a possible value: {problem}", file=file, place=name + inside.rstrip("`")
            ) from None
    source, step_s = facts.get("step_time_source", "un-profiled"), facts["step_time_s"]
    if source not in STEP_TIME_SOURCES:
        raise TraceError(
            f"{source!r:.40} is not one of {', '.join(STEP_TIME_SOURCES)}", file=file, place="step_time_source"
        )
    if step_s is None or (step_s == 0) != (source == UNTIMED):
        raise TraceError(f"{step_s!r} is not a step time", file=file, place="step_time_s")


def _entries(optional: Mapping[str, tuple[Any, Any]] | None = None, **members: Any) -> Any:
    """Return the type of a list whose entries hold some members, and perhaps others; ``optional``: types and defaults."""
    may = [(name, *kind) for name, kind in (optional or {}).items()]
    return list[defstruct("Entry", [*members.items(), *may], kw_only=True)]  # type: ignore[misc]


_Number = Annotated[float, Meta(ge=-1e30, le=1e30)] | None
"""More than any count."""
_Time = Annotated[float, Meta(ge=0, le=1e7)] | None
"""Four months [s]; what ends in ``_s`` is one."""
_Texts = dict[str, str] | None
_Shape = list[Annotated[int, Meta(ge=0)]]
_ELEMENT = {"elem_bytes": (Annotated[int, Meta(ge=1)], 1)}
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("workload", "device_name"), str),
    "batch": Annotated[int, Meta(ge=1)],
    **dict.fromkeys(
        (
            "device",
            "precision",
            "optimizer",
            "source",
            "mode",
            "model",
            "torch",
            "trioflow_version",
            "step_time_source",
        ),
        str | None,
    ),
    **dict.fromkeys(("joined_share", "seed", "profiler_overhead", "operators", "flop", "device_events"), _Number),
    **dict.fromkeys(("step_times_s", "span_ns"), list[Annotated[float, Meta(ge=0, le=1e16)]] | None),
    **dict.fromkeys(("tensor_split", "row", "inputs", "digests"), _Texts),
    **dict.fromkeys(("host", "language_model", "program", "recorded_memory", "repeats"), dict | None),
    "gradients": _entries(name=str, module=str, size_bytes=Annotated[int, Meta(ge=1)], ready_after_op_id=int),
    "parameters": _entries(_ELEMENT, name=str, shape=_Shape),
    "units": _entries(name=str, modules=Annotated[list[str], Meta(min_length=1)]),
    "buffers": _entries({**_ELEMENT, "shape": (_Shape, [])}, name=str),
    "repeated": _entries(block=str, copies=int),
    **dict.fromkeys(("warnings", "unjoined"), list[str]),
}
"""What facts are, where they are there, and what the entries of lists must hold."""
