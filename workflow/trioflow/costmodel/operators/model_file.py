"""The file of an operator cost model: JSON, never code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE, read_json, stamp, write_json
from trioflow.costmodel.features import FEATURES
from trioflow.costmodel.intervals import Band, StepBand
from trioflow.costmodel.operators.class_curves import ANY, ClassCurve, Key
from trioflow.costmodel.operators.curves import FORMS, Curve

SHIPPED_MODELS = PACKAGE / "data" / "cost_models"
"""A folder for each platform or device."""
KIND = "operator_cost_model"
FORMAT = 1
Parsed = TypeVar("Parsed")


class _Content(Protocol):
    """What of a model goes into the file."""

    @property
    def method(self) -> str: ...
    @property
    def device_name(self) -> str: ...
    @property
    def curves(self) -> Mapping[Key, ClassCurve]: ...
    @property
    def predict_bands(self) -> Mapping[Key, Band]: ...
    @property
    def rescale_bands(self) -> Mapping[Key, Band]: ...
    @property
    def steps(self) -> Mapping[str, StepBand]: ...
    @property
    def class_errors(self) -> Mapping[Key, Mapping[str, float | None]]: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...
    @property
    def products(self) -> bool: ...


def write_model(model: _Content, path: str | Path, inputs: Iterable[str | Path] = ()) -> None:
    """Write a model with its classes in order, and the stamp of what it was fitted from."""
    keys = sorted({*model.curves, *model.predict_bands, *model.rescale_bands})
    write_json(
        path,
        {
            "kind": KIND,
            "format": FORMAT,
            "method": model.method,
            "device_name": model.device_name,
            "features": list(FEATURES),
            "classes": [_class_to_json(model, key) for key in keys],
            "steps": {kind: band.to_json() for kind, band in model.steps.items()},
            "facts": dict(model.facts),
            "products": model.products,
            "provenance": stamp(inputs, device_name=model.device_name, method=model.method),
        },
    )


def _class_to_json(model: _Content, key: Key) -> dict[str, Any]:
    """Return one class and phase; parts that it borrows from a wider class are null."""
    curve = model.curves.get(key)
    band, rescale_band = model.predict_bands.get(key), model.rescale_bands.get(key)
    fitted = None
    if curve is not None:
        fitted = {
            "form": curve.curve.form,
            "coefficients": list(curve.curve.coefficients),
            "valid_range": {
                name: [low, high]
                for name, low, high in zip(FEATURES, curve.low, curve.high, strict=True)
            },
            "rows": curve.rows,
            "driver": curve.driver,
            "shape_of": curve.shape_of,
        }
    return {
        "operator_class": key[0],
        "phase": key[1],
        "curve": fitted,
        "predict_band": None if band is None else asdict(band),
        "rescale_band": None if rescale_band is None else asdict(rescale_band),
        "held_out": dict(model.class_errors.get(key, {})),
    }


def read_model(path: str | Path) -> dict[str, Any]:
    """Return the fields of a model; InputError where the file is missing, incomplete or another."""
    known = {"format": FORMAT, "features": list(FEATURES)}
    return read_content(path, KIND, "an operator cost model", known, _fields)


def read_content(
    path: str | Path,
    kind: str,
    what: str,
    known: Mapping[str, Any],
    parse: Callable[[dict[str, Any]], Parsed],
) -> Parsed:
    """Read a model file by its ``kind`` (``what`` in words), with entries ``known`` that must agree."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise InputError(f"not {what}", file=path, fix="give a file that a fit wrote")
    if any(content.get(key) != value for key, value in known.items()):
        found = " with ".join(f"{key} {content.get(key)!r}" for key in known)
        raise InputError(
            f"{found} is not known", file=path, place=next(iter(known)),
            fix="fit the model again with this version of trioflow",
        )  # fmt: skip
    try:
        return parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"incomplete or damaged ({error!r})", file=path, fix="fit the model again"
        ) from None


def _fields(content: Mapping[str, Any]) -> dict[str, Any]:
    curves: dict[Key, ClassCurve] = {}
    bands: dict[str, dict[Key, Band]] = {"predict_band": {}, "rescale_band": {}}
    errors: dict[Key, dict[str, float | None]] = {}
    for entry in content["classes"]:
        key = (str(entry["operator_class"]), str(entry["phase"]))
        if entry["curve"] is not None:
            curves[key] = _curve(entry["curve"])
        for name, found in bands.items():
            if entry[name] is not None:
                found[key] = _band(entry[name])
        if entry["held_out"]:
            errors[key] = {
                str(k): None if v is None else float(v) for k, v in entry["held_out"].items()
            }
    if (ANY, ANY) not in curves:
        raise ValueError("the curve of all operators is missing")
    return {
        "method": str(content["method"]),
        "device_name": str(content["device_name"]),
        "curves": curves,
        "predict_bands": bands["predict_band"],
        "rescale_bands": bands["rescale_band"],
        "steps": {kind: _step(content["steps"][kind]) for kind in ("predict", "rescale")},
        "class_errors": errors,
        "facts": dict(content["facts"]),
        "products": bool(content.get("products", False)),
    }


def _curve(entry: Mapping[str, Any]) -> ClassCurve:
    form, coefficients = str(entry["form"]), tuple(float(v) for v in entry["coefficients"])
    if form not in FORMS or len(coefficients) != FORMS[form].coefficients:
        raise ValueError(f"form {form!r} with {len(coefficients)} coefficients")
    if not all(math.isfinite(v) and v >= 0 for v in coefficients):
        raise ValueError("a coefficient is negative or not a number")
    ranges = [entry["valid_range"][name] for name in FEATURES]
    return ClassCurve(
        Curve(form, coefficients),
        tuple(float(low) for low, _ in ranges),
        tuple(float(high) for _, high in ranges),
        int(entry["rows"]),
        str(entry["driver"]),
        str(entry["shape_of"]),
    )


def _band(entry: Mapping[str, Any]) -> Band:
    return Band(
        float(entry["low_log"]),
        float(entry["high_log"]),
        int(entry["residuals"]),
        float(entry["distance"]),
    )


def _step(entry: Mapping[str, Any]) -> StepBand:
    error = entry["mean_absolute_error"]
    return StepBand(
        float(entry["half_log"]),
        int(entry["workloads"]),
        int(entry["steps"]),
        None if error is None else float(error),
        str(entry["basis"]),
        float(entry.get("distance", 0.0)),
    )
