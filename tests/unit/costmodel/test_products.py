"""Matrix products told from shapes, and how they grow."""

import numpy as np
import pandas as pd
import pytest
from trioflow.costmodel.features import classify
from trioflow.costmodel.operators import products
from trioflow.costmodel.operators.products import PRODUCTS, product_columns, scale_products

from costmodel.gpu_synthetic import make_step


def describe(name, inputs, outputs, flop):
    frame = pd.DataFrame(
        {"name": [name], "flop": [flop], "input_shapes": [inputs], "output_shapes": [outputs]}
    )
    return tuple(product_columns(frame, list(classify(frame)))[0])


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "expected"),
    [
        ("aten::linear", [[2, 8, 16], [32, 16], [32]], [[2, 8, 32]], (1, 16, 32, 16, 1, 0, 0)),
        ("aten::addmm", [[32], [16, 8], [8, 32]], [[16, 32]], (1, 16, 32, 8, 1, 0, 0)),
        ("aten::mm", [[16, 8], [8, 32]], [[16, 32]], (1, 16, 32, 8, 1, 0, 0)),
        ("aten::matmul", [[2, 3, 8, 4], [2, 3, 4, 6]], [[2, 3, 8, 6]], (6, 8, 6, 4, 1, 0, 0)),
        (
            "aten::linear_backward",
            [[2, 8, 32], [2, 8, 16], [32, 16]],
            [[2, 8, 16], [32, 16]],
            (1, 16, 32, 16, 0, 1, 1),
        ),
        (
            "autograd::engine::evaluate_function: AddmmBackward0",
            [[128, 10], [128, 64], [10, 64]],
            [[128, 64], [10, 64]],
            (1, 128, 10, 64, 0, 1, 1),
        ),
        (
            "aten::matmul_backward",
            [[6, 8, 6], [6, 8, 4], [6, 4, 6]],
            [[6, 8, 4]],
            (6, 8, 6, 4, 0, 1, 0),
        ),
        (
            "aten::conv2d",
            [[4, 8, 10, 10], [16, 8, 3, 3]],
            [[4, 16, 8, 8]],
            (1, 256, 16, 72, 1, 0, 0),
        ),
        (
            "aten::conv2d",
            [[4, 8, 10, 10], [16, 4, 3, 3]],
            [[4, 16, 8, 8]],
            (2, 256, 8, 36, 1, 0, 0),
        ),
        (
            "aten::convolution_backward",
            [[4, 16, 8, 8], [4, 8, 10, 10], [16, 8, 3, 3]],
            [[4, 8, 10, 10], [16, 8, 3, 3]],
            (1, 256, 16, 72, 0, 1, 1),
        ),
        (
            "aten::convolution_backward",
            [[4, 16, 8, 8], [4, 8, 10, 10], [16, 8, 3, 3]],
            [[16, 8, 3, 3]],
            (1, 256, 16, 72, 0, 0, 1),
        ),
        # Sixty-four rows of four groups; the gradients of rows and of weights are grouped products too.
        ("aten::_grouped_mm", [[64, 8], [4, 8, 32], [4]], [[64, 32]], (4, 16, 32, 8, 1, 0, 0)),
        ("aten::_grouped_mm", [[64, 32], [4, 32, 8], [4]], [[64, 8]], (4, 16, 8, 32, 1, 0, 0)),
        ("aten::_grouped_mm", [[8, 64], [64, 32], [4]], [[4, 8, 32]], (4, 8, 32, 16, 1, 0, 0)),
        ("aten::_grouped_mm", [[4, 8, 16], [16, 64], [4]], [[8, 64]], (4, 8, 16, 16, 1, 0, 0)),
    ],
)
def test_products_are_told_from_shapes(name, inputs, outputs, expected):
    flop = 2 * np.prod(expected[:4]) * sum(expected[4:])
    found = describe(name, inputs, outputs, flop)
    assert found[:7] == expected
    windows = expected[1] * expected[3] * expected[0] / 3200
    assert found[7] == pytest.approx(windows if "conv" in name else 1)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "flop"),
    [
        ("aten::add", [[4, 4], [4, 4]], [[4, 4]], 16),
        ("aten::linear", [[2, 8, 16], [32, 17]], [[2, 8, 32]], 16384),
        ("aten::linear", [[2, 8, 16], [32, 16]], [[2, 8, 32]], 99),
        ("aten::linear", [], [], 16384),
    ],
)
def test_shapes_that_do_not_explain_the_work_are_no_product(name, inputs, outputs, flop):
    assert describe(name, inputs, outputs, flop) == (0,) * len(PRODUCTS)


def test_a_batch_scales_the_dimension_that_carries_it():
    before, after = make_step(512, 2), make_step(512, 7)
    features = ["flop", "read_bytes", "write_bytes"]
    known, expected = (product_columns(f, list(classify(f))) for f in (before, after))
    scaled = scale_products(
        known, before[features].to_numpy(float), after[features].to_numpy(float)
    )
    assert (expected[:, 0] > 0).sum() == 6
    np.testing.assert_array_equal(scaled, expected)


def test_equal_layers_are_looked_at_once(monkeypatch):
    asked = []
    whole = products._scale_one
    monkeypatch.setattr(products, "_scale_one", lambda *row: asked.append(row) or whole(*row))
    before, after = make_step(512, 2), make_step(512, 7)
    features = ["flop", "read_bytes", "write_bytes"]
    known = product_columns(before, list(classify(before)))
    sizes = before[features].to_numpy(float), after[features].to_numpy(float)
    once = scale_products(known, *sizes)
    count = len(asked)
    layers = scale_products(np.tile(known, (80, 1)), *(np.tile(size, (80, 1)) for size in sizes))
    assert len(asked) == 2 * count
    np.testing.assert_array_equal(layers, np.tile(once, (80, 1)))


def test_a_batch_of_convolutions_lengthens_m():
    def features(batch):
        data, weight, result = batch * 512 * 196, 512 * 512 * 9, batch * 512 * 196
        flop = 2 * 2 * batch * 196 * 512 * 512 * 9
        return np.array([[flop, 4.0 * (result + data + weight), 4.0 * (data + weight)]])

    reuse = 9.0
    product = np.array([[1.0, 128 * 196, 512, 4608, 0, 1, 1, reuse]])
    scaled = scale_products(product, features(128), features(512))
    assert scaled[0, :4].tolist() == [1, 512 * 196, 512, 4608]


def test_a_shard_scales_its_own_dimension():
    product = np.array([[1.0, 512, 1024, 256, 1, 0, 0, 1]])

    def features(m, n, k):
        return np.array([[2.0 * m * n * k, 4.0 * (m * k + k * n), 4.0 * m * n]])

    whole = features(512, 1024, 256)
    column = scale_products(product, whole, features(512, 256, 256))
    assert column[0, :4].tolist() == [1, 512, 256, 256]
    row = scale_products(product, whole, features(512, 1024, 64))
    assert row[0, :4].tolist() == [1, 512, 1024, 64]
    both = scale_products(product, whole, features(1536, 256, 256))
    assert both[0, :4].tolist() == [1, 1536, 256, 256]
