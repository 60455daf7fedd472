"""Classes and features of operators."""

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import TableError
from trioflow.costmodel.features import (
    base_class,
    class_of_name,
    classify,
    convolution_kind,
    feature_matrix,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::mm", "gemm"),
        ("aten::addmm", "gemm"),
        ("aten::linear", "gemm"),
        ("aten::conv2d", "convolution"),
        ("aten::_slow_conv2d_forward", "convolution"),
        ("aten::convolution_backward", "convolution_backward"),
        ("aten::_slow_conv2d_backward", "convolution_backward"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::native_batch_norm_backward", "norm"),
        ("aten::layer_norm", "norm"),
        ("aten::_softmax_backward_data", "softmax"),
        ("aten::nll_loss_forward", "loss"),
        ("aten::cross_entropy_loss", "loss"),
        ("aten::add_", "elementwise"),
        ("aten::add.Tensor", "elementwise"),
        ("aten::__and__", "elementwise"),
        ("aten::threshold_backward", "elementwise"),
        ("aten::sum", "reduction"),
        ("aten::max_pool2d_with_indices_backward", "pooling"),
        ("aten::_adaptive_avg_pool2d_backward", "pooling"),
        ("aten::embedding_dense_backward", "embedding"),
        ("aten::copy_", "memory"),
        ("aten::zero_", "memory"),
        ("aten::cat", "memory"),
        ("aten::select_backward", "memory"),
        ("aten::_unsafe_view", "reshape"),
        ("aten::reshape", "reshape"),
        ("aten::t", "view"),
        ("aten::detach_", "view"),
        ("aten::view", "view"),
        ("aten::_foreach_addcdiv_", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("library::something_new", "other"),
        ("", "other"),
    ],
)
def test_class_follows_from_name(name: str, expected: str) -> None:
    assert class_of_name(name) == expected


@pytest.mark.parametrize(
    ("data", "weight", "result", "expected"),
    [
        ([8, 64, 16, 16], [128, 64, 3, 3], [8, 128, 16, 16], "dense"),
        ([8, 64, 16, 16], [128, 64, 3, 3], [8, 128, 14, 14], "dense"),
        ([8, 64, 16, 16], [128, 64, 3, 3], [8, 128, 8, 8], "strided"),
        ([8, 64, 15, 15], [128, 64, 3, 3], [8, 128, 8, 8], "strided"),
        ([8, 64, 16, 16], [128, 64, 1, 1], [8, 128, 16, 16], "pointwise"),
        ([8, 64, 16, 16], [64, 1, 3, 3], [8, 64, 16, 16], "grouped"),
        ([8, 3, 32, 32], [64, 3, 7, 7], [8, 64, 16, 16], "small_channels"),
        ([8, 64, 16, 16], [128, 64, 3, 3], [], "dense"),
    ],
)
def test_convolution_kinds(
    data: list[int], weight: list[int], result: list[int], expected: str
) -> None:
    assert convolution_kind(data, weight, result) == expected


def test_convolutions_are_told_apart_by_shape() -> None:
    operators = pd.DataFrame(
        {
            "name": ["aten::conv2d", "aten::conv2d", "aten::convolution_backward", "aten::conv2d"],
            "input_shapes": [
                [[8, 64, 16, 16], [64, 64, 1, 1]],
                [[8, 64, 16, 16], [64, 64, 3, 3]],
                [[8, 64, 16, 16], [8, 64, 16, 16], [64, 64, 1, 1]],
                [],
            ],
            "output_shapes": [[[8, 64, 16, 16]], [[8, 64, 16, 16]], [[8, 64, 16, 16]], []],
        },
        index=[4, 2, 9, 7],
    )
    found = classify(operators)
    assert list(found.index) == [4, 2, 9, 7]
    assert list(found) == [
        "convolution/pointwise",
        "convolution/dense",
        "convolution_backward/pointwise",
        "convolution",
    ]
    assert [base_class(c) for c in found][:2] == ["convolution", "convolution"]


def test_classify_needs_names() -> None:
    with pytest.raises(TableError, match="column name"):
        classify(pd.DataFrame({"flop": [1]}))


def test_feature_matrix_keeps_order_and_names_the_bad_row() -> None:
    operators = pd.DataFrame({"write_bytes": [3, 6], "flop": [1, 4], "read_bytes": [2, 5]})
    assert np.array_equal(feature_matrix(operators), [[1, 2, 3], [4, 5, 6]])
    operators.loc[1, "read_bytes"] = -1
    with pytest.raises(TableError, match="row 1, column read_bytes"):
        feature_matrix(operators)
    with pytest.raises(TableError, match="no column flop"):
        feature_matrix(operators.drop(columns="flop"))


def test_feature_matrix_reads_missing_values_as_an_error() -> None:
    operators = pd.DataFrame(
        {"flop": pd.array([1, None], dtype="Int64"), "read_bytes": [1, 2], "write_bytes": [1, 2]}
    )
    with pytest.raises(TableError, match="row 1, column flop"):
        feature_matrix(operators)
