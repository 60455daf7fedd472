"""Operator models of other packages."""

from importlib import metadata

import pytest
from trioflow.base import plugins
from trioflow.base.errors import InputError
from trioflow.costmodel.interface import ENTRY_POINTS, OperatorModel, TraceLike, find_operator_model
from trioflow.costmodel.operators.model import fit_operator_model

from costmodel.synthetic import make_traces


def fit_like_ours(traces):  # type: ignore[no-untyped-def]
    return fit_operator_model(traces, method="li")


def register(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    found = [metadata.EntryPoint("mine", value, ENTRY_POINTS) for value in values]

    def entry_points(**wanted: str) -> metadata.EntryPoints:
        assert wanted["group"] == ENTRY_POINTS
        return metadata.EntryPoints(found).select(**wanted)

    monkeypatch.setattr(plugins, "entry_points", entry_points)


def test_registered_model_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, f"{__name__}:fit_like_ours")
    assert find_operator_model("mine") is not None
    model, table = fit_operator_model(make_traces(), method="mine")
    assert isinstance(model, OperatorModel)
    assert model.method == "li"  # type: ignore[attr-defined]
    assert len(table)


def test_unknown_name_lists_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, f"{__name__}:fit_like_ours")
    with pytest.raises(InputError, match="'yours'; known are mine, regression"):
        find_operator_model("yours", ["regression"])


def test_broken_and_double_registrations_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "no_such_module:fit")
    with pytest.raises(InputError, match="no_such_module:fit"):
        find_operator_model("mine")
    register(monkeypatch, f"{__name__}:fit_like_ours", "no_such_module:fit")
    with pytest.raises(InputError, match="registered 2 times"):
        find_operator_model("mine")


def test_what_a_trace_must_have() -> None:
    assert isinstance(make_traces()[0], TraceLike)
