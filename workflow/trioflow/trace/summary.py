"""What a trace holds, in one row: its source, its size, and how much of the device's time it explains."""

from __future__ import annotations

from typing import Any

from trioflow.base.units import format_time, ns_to_s
from trioflow.tables import PHASES
from trioflow.trace.facts import STEP_TIME_SOURCES, UNTIMED
from trioflow.trace.store import Trace

SEPARATOR = "; "


def coverage_of_trace(trace: Trace) -> float | None:
    """Return the share of the measured time that operators with a name explain.

    Of kernels' time on a device of its own, of the step on a CPU; None without times, 1 where
    nothing else was timed.
    """
    facts = trace.facts
    source = facts.step_time_source
    if source == UNTIMED:
        return None
    if facts.device == "cuda" and facts.joined_share is not None:
        return float(facts.joined_share)
    if source == "busy":
        return 1.0
    return ns_to_s(float(trace.operators["device_ns"].sum())) / float(facts.step_time_s)


def summarise_trace(trace: Trace, name: str) -> dict[str, Any]:
    """Return a row of ``tables.TRACES``, called ``name``."""
    operators, facts = trace.operators, trace.facts
    counts = operators["phase"].value_counts()
    unjoined = list(facts.unjoined or [])
    return {
        "trace": name,
        "workload": facts.workload,
        "source": str(facts.source or "capture"),
        "device": facts.device_name,
        "batch": facts.batch,
        "precision": str(facts.precision or ""),
        "optimizer": str(facts.optimizer or ""),
        "step_time_source": str(facts.step_time_source or "un-profiled"),
        "step_time_s": float(facts.step_time_s),
        **{f"{phase}_operators": int(counts.get(phase, 0)) for phase in PHASES},
        "kernels": int(operators["kernels"].sum()),
        "device_s": ns_to_s(float(operators["device_ns"].sum())),
        "coverage": coverage_of_trace(trace),
        "flop": sum(operators["flop"].tolist()),
        "read_bytes": int(operators["read_bytes"].sum()),
        "write_bytes": int(operators["write_bytes"].sum()),
        "parameter_bytes": sum(int(g["size_bytes"]) for g in facts.gradients),
        "not_joined": SEPARATOR.join(unjoined),
        "warnings": SEPARATOR.join(w for w in facts.warnings if w not in unjoined),
    }


def describe_step(row: dict[str, Any]) -> str:
    """Say how long a summarised step took, by which clock, and how much of it operators explain."""
    source = row["step_time_source"]
    if source == UNTIMED:
        return "no times: a cost model has to give them"
    return (
        f"{format_time(row['step_time_s'])} ({STEP_TIME_SOURCES[source]}); "
        f"{format_time(row['device_s'])} in operators, coverage {row['coverage']:.1%}"
    )
