import pytest
from trioflow.trace.importers.triosim import count_node_flop, differentiated, is_node, leaves_node

NODE = "autograd::engine::evaluate_function: "


@pytest.mark.parametrize(
    ("name", "base"),
    [
        (NODE + "ConvolutionBackward0", "convolution"),
        (NODE + "MaxPool2DWithIndicesBackward0", "max_pool2d_with_indices"),
        (NODE + "CudnnBatchNormBackward0", "cudnn_batch_norm"),
        (NODE + "MeanBackward1", "mean"),
        ("AddmmBackward0", "addmm"),
        ("aten::convolution_backward", "convolution"),
        ("aten::_softmax_backward_data", "softmax"),
        ("aten::mm", "mm"),
    ],
)
def test_a_node_names_what_it_differentiates(name, base):
    assert differentiated(name) == base


def test_an_operator_is_not_a_node():
    assert is_node(NODE + "ConvolutionBackward0") and not is_node("aten::mm")


@pytest.mark.parametrize(
    ("forward", "base", "expected"),
    [
        ("aten::relu_", "relu", True),
        ("aten::conv2d", "convolution", True),
        ("aten::linear", "addmm", True),
        ("aten::cross_entropy_loss", "nll_loss", True),
        ("aten::max_pool2d", "max_pool2d_with_indices", True),
        ("aten::max_pool2d", "relu", False),
        ("aten::relu", "addmm", False),
        ("aten::scaled_dot_product_attention", "scaled_dot_product_efficient_attention", True),
    ],
)
def test_operators_leave_their_own_nodes(forward, base, expected):
    assert leaves_node(forward, base) is expected


def test_work_of_nodes():
    gradient, data, weight = (2, 5, 8, 8), (2, 3, 8, 8), (5, 3, 3, 3)
    one = 2 * 2 * 5 * 64 * 27
    shapes = [gradient, data, weight]
    convolution = NODE + "ConvolutionBackward0"
    assert count_node_flop(convolution, shapes, [data, weight, (5,)], one, 2) == 2 * one
    assert count_node_flop(convolution, shapes, [(), weight, (5,)], one, 1) == one
    # The tensors of a product's node need not be those of the product.
    assert count_node_flop(NODE + "AddmmBackward0", [(4, 3)], [(3, 4)], 48, 2) == 96
    assert count_node_flop(NODE + "ReluBackward0", [(4,)], [(4,)], None, 1) is None
    attention = NODE + "ScaledDotProductEfficientAttentionBackward0"
    heads = (1, 2, 16, 8)
    assert count_node_flop(attention, [heads] * 4, [heads] * 3, 1, 3) == 2 * 2 * 16 * 16 * 5 * 8
    assert count_node_flop("aten::mm", [(2, 2), (2, 2)], [(2, 2)], 1, 1) is None
