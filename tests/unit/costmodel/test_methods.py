"""Operator models by name."""

from dataclasses import replace

import pytest
from trioflow.base.errors import InputError, PlatformError
from trioflow.costmodel.operators.methods import (
    METHOD_NAMES,
    ProportionalModel,
    RecordedModel,
    fit_named_model,
    make_unfitted_model,
)
from trioflow.costmodel.operators.model import fit_operator_model

from costmodel.gpu_synthetic import make_gpu_traces

SHEETED = "NVIDIA A100 80GB PCIe"


def on_a_gpu():
    return [
        replace(trace, facts=replace(trace.facts, device_name=SHEETED))
        for trace in make_gpu_traces()
    ]


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_name_fits(method):
    model, table = fit_named_model(on_a_gpu(), method)
    assert model.device_name == SHEETED and len(table)
    assert model.method == ("regression" if method == "auto" else method)


def test_a_processor_is_fitted_by_regression():
    traces = make_gpu_traces()
    assert fit_named_model(traces)[0] == fit_operator_model(traces, method="regression")[0]
    with pytest.raises(PlatformError, match="made-up GPU"):
        fit_named_model(traces, "tile")


def test_unknown_names_are_told_the_known_ones():
    with pytest.raises(InputError, match=r"tilt.*tile"):
        fit_named_model(on_a_gpu(), "tilt")
    with pytest.raises(InputError, match="no trace"):
        fit_named_model([], "tile")
    with pytest.raises(InputError, match="recorded, proportional"):
        make_unfitted_model("linear", on_a_gpu())


def test_recorded_times_alone_make_a_model():
    traces = on_a_gpu()
    assert isinstance(make_unfitted_model("recorded", traces), RecordedModel)
    assert make_unfitted_model("proportional", traces) == ProportionalModel(SHEETED)
