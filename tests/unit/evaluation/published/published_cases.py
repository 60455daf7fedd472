"""Made-up public cases: two plans and a scaling, with everyone's predictions."""

from typing import Any

import pandas as pd
from trioflow import tables

PLAIN: dict[str, Any] = {
    "set": "h100-4gpu",
    "workload": "model",
    "source_gpu": "NVIDIA A40",
    "platform": "made up",
    "ranks": 4,
    "batch": 4,
    "mode": "whole step",
    "source": "somewhere.json",
    "spread": None,
    "confidence": "interpolated",
    "oracle_s": None,
    "triosim_s": None,
    "analytical_s": None,
    "regression_s": None,
    "learned_from": "nothing",
    "changes": "",
}


def make_case(case: str, plan: str, measured_s: float, predicted_s: float, **other: Any) -> dict[str, Any]:
    """Return a row whose interval is 10 % either way."""
    told = {"case": case, "plan": plan, "measured_s": measured_s, "predicted_s": predicted_s}
    ends = {"low_s": 0.9 * predicted_s, "high_s": 1.1 * predicted_s}
    return {**PLAIN, **told, **ends, **other}


def make_cases() -> pd.DataFrame:
    """Return three plans in the right order for us and in the reverse for the data sheet, and a scaling."""
    rows = [
        make_case("a", "ddp4", 1.0, 1.02, triosim_s=1.2, analytical_s=3.0, oracle_s=1.01),
        make_case("b", "tp4", 2.0, 1.9, triosim_s=1.1, analytical_s=2.0),
        make_case("c", "gpipe4-m1", 3.0, 3.6, triosim_s=4.0, analytical_s=1.0),
        make_case("d", "single", 2.0, 1.0, set="resnet50-a40", ranks=1, batch=8),
        make_case("e", "ddp2", 2.5, 1.0, set="resnet50-a40", ranks=2, batch=16),
    ]
    frame = pd.DataFrame(rows, columns=tables.PUBLISHED_CASES.names)
    numbers = [f.name for f in tables.PUBLISHED_CASES if f.type == tables.FLOAT]
    return frame.astype(dict.fromkeys(numbers, "float64"))
