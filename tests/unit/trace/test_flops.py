from __future__ import annotations

import pytest
from trioflow.trace.flops import count_flop


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "flop"),
    [
        ("aten::mm", [(3, 5), (5, 7)], [(3, 7)], 2 * 3 * 5 * 7),
        ("aten::addmm", [(7,), (3, 5), (5, 7)], [(3, 7)], 2 * 3 * 5 * 7),
        ("aten::bmm", [(2, 3, 5), (2, 5, 7)], [(2, 3, 7)], 2 * 2 * 3 * 5 * 7),
        ("aten::linear", [(2, 3, 5), (7, 5), (7,)], [(2, 3, 7)], 2 * 2 * 3 * 5 * 7),
        # 3x3 over 8 channels, 16 filters, 4x4 results, 2 images
        ("aten::conv2d", [(2, 8, 4, 4), (16, 8, 3, 3)], [(2, 16, 4, 4)], 2 * 2 * 16 * 16 * 8 * 9),
        # depthwise: each filter sees one channel
        ("aten::conv2d", [(2, 8, 4, 4), (8, 1, 3, 3)], [(2, 8, 4, 4)], 2 * 2 * 8 * 16 * 9),
        (
            "aten::convolution_backward",
            [(2, 16, 4, 4), (2, 8, 4, 4), (16, 8, 3, 3)],
            [(2, 8, 4, 4), (16, 8, 3, 3), (16,)],
            2 * (2 * 2 * 16 * 16 * 8 * 9),
        ),
        (
            "aten::scaled_dot_product_attention",
            [(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)],
            [(2, 4, 6, 8)],
            2 * 2 * (2 * 4 * 6 * 5 * 8),
        ),
    ],
)
def test_closed_forms(name, inputs, outputs, flop):
    assert count_flop(name, inputs, outputs) == flop


def test_operators_without_a_formula_say_so():
    assert count_flop("aten::add", [(3, 3), (3, 3)], [(3, 3)]) is None


def test_shapes_that_do_not_fit_give_none():
    assert count_flop("aten::mm", [(3, 5)], [(3, 7)]) is None
