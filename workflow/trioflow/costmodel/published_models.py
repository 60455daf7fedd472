"""The operator models that ship: fitted to public data, rebuilt by a rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trioflow.costmodel.device_fit import fit_device_model
from trioflow.costmodel.model_file import KIND
from trioflow.costmodel.published_data import load_published
from trioflow.provenance import PACKAGE, read_json

SHIPPED = PACKAGE / "data" / "cost_models"
MODEL_FILE = "operators.json"


def build_operator_models(data_folder: str | Path, output: str | Path) -> list[Path]:
    """Fit the shipped model of every GPU that has published operator measurements.

    Parameters
    ----------
    data_folder : path
        Retrieved data or a mirror of it.
    output : path
        Where ``<device sheet's name>/operators.json`` go.

    Returns
    -------
    list of path
        The files.

    Raises
    ------
    InputError, TraceError
        When the data is missing or wrong.
    """
    written = []
    for device in load_published(data_folder):
        model, _ = fit_device_model(device.traces, device.limits, benchmarks=device.benchmarks())
        facts = {**model.facts, "sources": device.sources()}
        path = Path(output) / device.sheet_name / MODEL_FILE
        replace(model, facts=facts).save(path)
        written.append(path)
    return written


def shipped_operator_models() -> dict[str, Path]:
    """Return the shipped models of GPUs by the name of the device's sheet."""
    found = {}
    for path in sorted(SHIPPED.glob(f"*/{MODEL_FILE}")):
        content = read_json(path)
        if content.get("kind") == KIND and content.get("method") == "shipped":
            found[path.parent.name] = path
    return found


def largest_difference(one: Any, other: Any, place: str = "") -> tuple[float, str]:
    """Return the largest relative difference between two contents of JSON files, and its place.

    Words, missing entries and lengths that differ count as infinitely far apart.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        if set(one) != set(other):
            return float("inf"), f"{place}: {sorted(set(one) ^ set(other))}"
        parts = [(f"{place}.{key}", one[key], other[key]) for key in sorted(one)]
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return float("inf"), f"{place}: {len(one)} and {len(other)} entries"
        parts = [(f"{place}[{n}]", a, b) for n, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, float | int) and isinstance(other, float | int):
        scale = max(abs(one), abs(other))
        return (abs(one - other) / scale if scale else 0.0), place
    else:
        return (0.0 if one == other else float("inf")), place
    found = [largest_difference(a, b, where) for where, a, b in parts]
    return max(found, key=lambda each: each[0], default=(0.0, place))
