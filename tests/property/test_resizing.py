"""Times are monotone in the batch and at most in proportion to it: every model, shape and precision."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from fuzz import SHARE
from hypothesis import given, settings
from hypothesis import strategies as st
from trioflow.costmodel.choices import choose_operator_model
from trioflow.costmodel.features import FEATURES, resize_batch
from trioflow.costmodel.operators.curves import FORMS, Curve
from trioflow.costmodel.operators.model import OperatorCostModel, Resizing, load_shipped_models, rescale_rows
from trioflow.hardware.machine import load_device
from trioflow.trace.store import load_trace

BATCHES = (0.5, 1, 1.5, 2, 3, 4, 12)
"""Over the recorded one."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
DERIVED = ("a40", "mi300x", "v100-sxm2-32gb")
"""GPUs without a model of their own."""
STRIDE = max(1, round(1 / SHARE))
"""A precision takes every such GPU, the four begin at different ones: all GPUs where ``TRIOFLOW_FUZZ`` is 1."""
ROUNDING = 1e-3
"""FLOPs and bytes are whole numbers; small operators feel it."""


@pytest.fixture(scope="module")
def models() -> dict[str, OperatorCostModel]:
    return load_shipped_models()


@pytest.fixture(scope="module")
def operators() -> pd.DataFrame:
    """Return every distinct operator of a convolutional network and of a language model."""
    frames = []
    for name in ("resnet50-b128", "gpt2-b8"):
        frame = load_trace(name).operators
        shapes = frame["input_shapes"].map(lambda value: str([list(one) for one in value]))
        first = ~frame.assign(shapes=shapes)[["name", "phase", "shapes"]].duplicated()
        frames.append(frame[first.to_numpy()])
    found = pd.concat(frames, ignore_index=True)
    return found[found["batch_read_bytes"] + found["batch_write_bytes"] > 64].reset_index(drop=True)


def check(times: dict[float, np.typing.NDArray[np.float64]], what: str) -> None:
    for one in times:
        for other in times:
            if one < other:
                ratio = times[other] / times[one]
                assert (ratio >= 1 - ROUNDING).all(), f"{what}: {one} to {other} falls"
                assert (ratio <= other / one * (1 + ROUNDING)).all() or other % one, (
                    f"{what}: {one} to {other} grows by more than the batch"
                )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_times_follow_the_batch(precision: str, models: dict[str, OperatorCostModel], operators: pd.DataFrame) -> None:
    recorded = operators.assign(device_ns=100_000)
    names = [str(model.device_name) for model in models.values()]
    devices = [*names, *(load_device(name).driver_name for name in DERIVED)]
    for device in devices[PRECISIONS.index(precision) % STRIDE :: STRIDE]:
        model = choose_operator_model(models, device, precision, on_gpu=True).model
        times = {
            batch: model.rescale(recorded, resize_batch(recorded, batch))["time_s"].to_numpy() for batch in BATCHES
        }
        assert times[1] == pytest.approx(1e-4)
        check(times, f"{device} in {precision}")


FORM = st.sampled_from(["cached", "linear", "roofline"])
NUMBER = st.floats(0, 3, allow_subnormal=False)


@settings(deadline=None, max_examples=30)
@given(FORM, st.lists(NUMBER, min_size=4, max_size=4), st.tuples(*[st.integers(0, 10**9)] * 6))
def test_whatever_the_curve_doubling_stays_between_one_and_two(
    form: str, coefficients: list[float], sizes: tuple[int, ...]
) -> None:
    """Caches that overflow grow faster than the size; a step may not."""
    if not all(sizes[:3]):
        sizes = (*(max(size, 1) for size in sizes[:3]), *sizes[3:])
    curve = Curve(form, tuple(coefficients[: FORMS[form].coefficients]))
    first, growing = np.array(sizes[:3], np.float64), np.array(sizes[3:], np.float64)

    def at(batch: float) -> float:
        frames = [
            pd.DataFrame([first + growing * b], columns=list(FEATURES)).assign(operator_class="memory", phase="forward")
            for b in (1.0, batch)
        ]
        same = np.array([batch == 1.0 or not growing.any()])
        sizing = Resizing(*frames, same, np.array([1.0]))

        def times(rows: pd.DataFrame) -> Any:
            return curve.predict(rows[list(FEATURES)].to_numpy(np.float64))

        return float(rescale_rows(sizing, times)[0])

    found = [at(batch) for batch in (0.5, 1.0, 2.0, 4.0, 16.0)]
    assert all(np.isfinite(found))
    for one, other, growth in zip(found[:-1], found[1:], (2, 2, 2, 4), strict=True):
        assert one * (1 - 1e-9) <= other <= one * growth * (1 + 1e-9)
