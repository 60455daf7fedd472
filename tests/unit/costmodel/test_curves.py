"""Forms of operator cost and the classes that share them."""

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.intervals import (
    ASSUMED_FACTOR,
    LEFT_OUT_OPERATORS,
    NEAREST_DISTANCE,
    WIDEST_FACTOR,
    Band,
    find_band,
    fit_bands,
    fit_step_band,
)
from trioflow.costmodel.operators.class_curves import (
    ANY,
    find_class,
    fit_class_curves,
    lookup_order,
)
from trioflow.costmodel.operators.curves import FORMS, Curve, driver_of, fit_curve

RANDOM = np.random.default_rng(5)
SIZES = np.exp(RANDOM.uniform(5, 20, size=(60, 3)))


def make_rows(entries: list[tuple[str, str, float, float]]) -> pd.DataFrame:
    """Rows of (class, phase, bytes, seconds)."""
    frame = pd.DataFrame(entries, columns=["operator_class", "phase", "read_bytes", "time_s"])
    return frame.assign(flop=0.0, write_bytes=0.0)


def test_linear_recovers_slopes_and_never_goes_negative() -> None:
    times = 3e-6 + SIZES @ np.array([1e-12, 2e-10, 5e-10])
    curve = fit_curve("linear", SIZES, times)
    assert curve.coefficients == pytest.approx([3e-6, 1e-12, 2e-10, 5e-10], rel=1e-6)
    falling = fit_curve("linear", SIZES, 1e-3 / SIZES[:, 0])
    assert min(falling.coefficients) >= 0


def test_roofline_takes_the_larger_of_compute_and_memory() -> None:
    data = SIZES[:, 1] + SIZES[:, 2]
    times = 5e-6 + np.maximum(SIZES[:, 0] * 2e-11, data * 1e-10)
    curve = fit_curve("roofline", SIZES, times)
    assert curve.predict(SIZES) == pytest.approx(times, rel=1e-6)
    summed = fit_curve("linear", SIZES, times)
    assert np.abs(summed.predict(SIZES) / times - 1).max() > 0.05


def test_power_recovers_exponents() -> None:
    times = 1e-3 * (1 + SIZES[:, 0]) ** 0.3 * (1 + SIZES[:, 1]) ** 0.2
    curve = fit_curve("power", SIZES, times)
    assert curve.coefficients == pytest.approx([1e-3, 0.3, 0.2, 0.0], abs=1e-6)


def test_driver_uses_one_feature_only() -> None:
    times = 1e-6 + SIZES[:, 2] * 1e-9 + SIZES[:, 0] * 1e-13
    assert driver_of(SIZES, times) == 2
    curve = fit_curve("driver", SIZES, times)
    assert curve.coefficients[1] == curve.coefficients[2] == 0.0
    assert curve.coefficients[3] == pytest.approx(1e-9, rel=0.01)


def test_driver_of_equal_or_constant_features_is_the_first() -> None:
    same = np.column_stack([SIZES[:, 0]] * 3)
    assert driver_of(same, SIZES[:, 0]) == 0
    assert driver_of(np.ones((5, 3)), np.arange(5.0)) == 0


@pytest.mark.parametrize("form", sorted({*FORMS} - {"overlapped"}))
def test_scaling_a_curve_scales_every_time(form: str) -> None:
    curve = fit_curve(form, SIZES, 1e-6 + SIZES[:, 1] * 1e-9)
    assert curve.scaled(2.5).predict(SIZES) == pytest.approx(2.5 * curve.predict(SIZES))


def test_lookup_goes_from_narrow_to_wide() -> None:
    assert list(lookup_order("convolution/dense", "forward")) == [
        ("convolution/dense", "forward"),
        ("convolution", "forward"),
        (ANY, "forward"),
        (ANY, ANY),
    ]
    assert next(lookup_order("gemm", "backward")) == ("gemm", "backward")


def test_rare_class_borrows_the_shape_and_keeps_its_level() -> None:
    common = [("gemm", "forward", size, 1e-5 + 1e-9 * size) for size in (1e3, 1e4, 1e5, 1e6)]
    curves = fit_class_curves(make_rows([*common, ("norm", "forward", 1e5, 1e-3)]), "linear")
    rare = curves["norm", "forward"]
    assert (rare.shape_of, rare.rows) == ("* forward", 1)
    sizes = np.array([[0.0, 1e5, 0.0], [0.0, 2e5, 0.0]])
    at_size, at_double = rare.curve.predict(sizes)
    assert at_size == pytest.approx(1e-3)
    assert 1e-3 < at_double < 2e-3


def test_equal_sizes_do_not_decide_a_shape() -> None:
    common = [("gemm", "forward", size, 1e-9 * size) for size in (1e3, 1e4, 1e5, 1e6)]
    same = [("norm", "forward", 1e5, 2e-4)] * 10
    curves = fit_class_curves(make_rows(common + same), "linear")
    assert curves["norm", "forward"].shape_of == "* forward"
    grown = curves["norm", "forward"].curve.predict(np.array([[0.0, 1e5, 0.0], [0.0, 1e6, 0.0]]))
    assert grown[1] > 2 * grown[0]


def test_level_is_set_by_the_sum_of_the_class() -> None:
    entries = [
        ("norm", "forward", size, 1e-9 * size * factor)
        for size, factor in ((1e3, 1), (1e4, 1), (1e5, 1), (1e8, 3))
    ]
    rows = make_rows(entries)
    curve = fit_class_curves(rows, "linear")["norm", "forward"].curve
    features = rows[["flop", "read_bytes", "write_bytes"]].to_numpy()
    assert curve.predict(features).sum() == pytest.approx(rows["time_s"].sum())


def test_views_cost_the_same_at_every_size() -> None:
    rows = make_rows([("view", "forward", size, 1e-6) for size in (0.0, 10.0, 1e6, 1e7, 1e8)])
    assert fit_class_curves(rows, "linear")["view", "forward"].curve.form == "constant"


def test_a_class_without_a_curve_takes_the_one_most_alike() -> None:
    sizes = (1e3, 1e4, 1e5, 1e6)
    rows = [
        (name, phase, size, 1e-9 * size)
        for size in sizes
        for name, phase in (("memory", "forward"), ("gemm", "forward"), ("gemm", "backward"))
    ]
    curves = fit_class_curves(make_rows(rows), "linear")
    for asked, taken in (
        (("memory", "backward"), ("memory", "forward")),
        (("reshape", "backward"), ("memory", "forward")),
        (("convolution_backward/dense", "backward"), ("gemm", "backward")),
        (("norm", "backward"), (ANY, "backward")),
    ):
        assert find_class(curves, *asked)[0] == taken


def test_find_class_needs_the_widest_curve() -> None:
    with pytest.raises(InputError, match="no curve for gemm in forward"):
        find_class({}, "gemm", "forward")


def test_unchanged_curve_dataclass_predicts_zero_rows() -> None:
    assert Curve("linear", (1.0, 0.0, 0.0, 0.0)).predict(np.zeros((0, 3))).shape == (0,)


def held(residuals: list[float], operator_class: str = "gemm") -> pd.DataFrame:
    return pd.DataFrame(
        {
            "workload": "w",
            "trace": 0,
            "operator_class": operator_class,
            "phase": "forward",
            "time_s": np.exp(residuals) * 1e-3,
            "held_out_s": 1e-3,
        }
    )


def test_bands_are_quantiles_around_zero_and_fall_back() -> None:
    residuals = list(np.linspace(-0.5, 0.3, 81))
    bands = fit_bands(held(residuals), "whole workloads left out")
    band = find_band(bands, "gemm", "forward")
    assert (band.low_log, band.high_log) == pytest.approx((-0.42, 0.22))
    assert find_band(bands, "unheard/of", "forward") == bands[ANY, "forward"]
    doubled = find_band(fit_bands(held(residuals), LEFT_OUT_OPERATORS), "gemm", "forward")
    assert (doubled.low_log, doubled.high_log) == pytest.approx((-0.84, 0.44))
    always_late = fit_bands(held([0.2] * 20), "whole workloads left out")
    assert find_band(always_late, "gemm", "forward").low_log == 0.0


def test_few_residuals_take_the_wider_band_and_none_an_assumed_one() -> None:
    few = pd.concat([held([1.0, -1.0], "norm"), held([0.0] * 40)])
    bands = fit_bands(few, "whole workloads left out")
    assert ("norm", "forward") not in bands
    assert find_band(bands, "norm", "forward") == bands[ANY, "forward"]
    assumed = find_band({}, "gemm", "forward")
    assert np.exp(assumed.high_log) == pytest.approx(ASSUMED_FACTOR)
    assert assumed.residuals == 0


def test_step_band_weighs_workloads_and_not_their_captures() -> None:
    frames = []
    for workload, trace, error in (("a", 0, 0.1), ("a", 1, 0.1), ("a", 2, 0.1), ("b", 3, 0.3)):
        frames.append(held([error]).assign(workload=workload, trace=trace))
    band = fit_step_band(pd.concat(frames), ["trace"], "whole workloads left out")
    # Student's 90 % quantile with two degrees of freedom is 1.8856.
    assert band.half_log == pytest.approx(1.8856 * np.sqrt((0.1**2 + 0.3**2) / 2), rel=1e-4)
    assert (band.workloads, band.steps) == (2, 4)
    nothing = fit_step_band(held([]), ["trace"], "whole workloads left out")
    assert (nothing.workloads, nothing.mean_absolute_error) == (0, None)
    assert nothing.basis.startswith("assumed")


def test_band_grows_with_the_distance_and_ends_somewhere() -> None:
    band = Band(-0.1, 0.2, 10, distance=np.log(4))
    low, high = band.factors(np.log([1.0, 2.0, 4.0, 16.0]))
    assert np.log(low) == pytest.approx([0.0, -0.05, -0.1, -0.2])
    assert np.log(high) == pytest.approx([0.0, 0.1, 0.2, 0.4])
    near = Band(-0.1, 0.2, 10, distance=0.001)
    assert near.factors(np.array([NEAREST_DISTANCE]))[1] == pytest.approx(np.exp(0.2))
    assert near.factors(np.array([1e6]))[1] == pytest.approx(WIDEST_FACTOR)
