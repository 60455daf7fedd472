import pytest
from trioflow.trace.tensors import count_flop, may_multiply


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
        # 5 steps of 2 samples, two layers in two directions of 6 units with 4 gates, from 4 inputs
        (
            "aten::lstm",
            [
                (5, 2, 4),
                (4, 2, 6),
                (4, 2, 6),
                *2 * [(24, 4), (24, 6), (24,), (24,)],
                *2 * [(24, 12), (24, 6), (24,), (24,)],
            ],
            [(5, 2, 12), (4, 2, 6), (4, 2, 6)],
            2 * 5 * 2 * 4 * 6 * 2 * ((4 + 6) + (12 + 6)),
        ),
        # packed: 9 steps of all samples together, with states of three dimensions
        ("aten::gru", [(9, 4), (3,), (1, 3, 6), (18, 4), (18, 6)], [(9, 6)], 2 * 9 * 18 * 10),
        (
            "aten::_cudnn_rnn_backward",
            [(5, 2, 4), (24, 4), (24, 6), (24,), (24,), (288,), (1, 2, 6), (5, 2, 6), (5, 2, 6)],
            [],
            2 * (2 * 5 * 2 * 24 * (4 + 6)),
        ),
        # the states of one layer have two dimensions, as its matrices have
        (
            "aten::mkldnn_rnn_layer",
            [(5, 2, 4), (24, 4), (24, 6), (24,), (24,), (2, 6), (2, 6)],
            [(5, 2, 6)],
            2 * 5 * 2 * 24 * (4 + 6),
        ),
        # 12 rows shared out among 3 experts, whose matrices are 5 x 7
        ("aten::_grouped_mm", [(12, 5), (3, 5, 7), (3,)], [(12, 7)], 2 * 12 * 5 * 7),
        ("aten::_grouped_mm", [(3, 4, 5), (3, 5, 7)], [(3, 4, 7)], 2 * 3 * 4 * 5 * 7),
        # the gradient of the experts' matrices: the 12 rows are summed over, in 3 groups
        ("aten::_grouped_mm", [(5, 12), (12, 7), (3,)], [(3, 5, 7)], 2 * 5 * 12 * 7),
        # groups of columns
        ("aten::_grouped_mm", [(3, 4, 5), (5, 12), (3,)], [(4, 12)], 2 * 4 * 5 * 12),
        ("aten::_scaled_mm", [(3, 5), (5, 7), (), ()], [(3, 7)], 2 * 3 * 5 * 7),
        # each of 2 x 8 x 5 x 5 inputs meets 3 x 3 weights of each of 4 results
        ("aten::conv_transpose2d", [(2, 8, 5, 5), (8, 4, 3, 3)], [(2, 4, 11, 11)], 28_800),
        ("aten::convolution", [(2, 8, 5, 5), (8, 4, 3, 3)], [(2, 4, 11, 11)], 28_800),
        # as many channels on both sides: the larger result tells
        ("aten::convolution", [(2, 8, 5, 5), (8, 8, 3, 3)], [(2, 8, 11, 11)], 57_600),
        ("aten::convolution", [(2, 8, 11, 11), (8, 8, 3, 3)], [(2, 8, 5, 5)], 57_600),
        (
            "aten::convolution_backward",
            [(2, 4, 11, 11), (2, 8, 5, 5), (8, 4, 3, 3)],
            [(2, 8, 5, 5), (8, 4, 3, 3), (4,)],
            2 * 28_800,
        ),
    ],
)
def test_closed_forms(name, inputs, outputs, flop):
    assert count_flop(name, inputs, outputs) == flop


def test_operators_without_a_formula_say_so():
    assert count_flop("aten::add", [(3, 3), (3, 3)], [(3, 3)]) is None


def test_shapes_that_do_not_fit_give_none():
    assert count_flop("aten::mm", [(3, 5)], [(3, 7)]) is None


def test_transposed_convolutions_of_a_profile_alone_count_once():
    """Of them a profile holds constants and no results."""
    import torch
    from trioflow.trace.profile.events import Event, find_shapes, sum_flop

    for groups, stride in ((1, 2), (2, 1), (2, 3)):
        layer = torch.nn.ConvTranspose2d(8, 8, 3, stride=stride, padding=1, groups=groups)
        x = torch.randn(2, 8, 5, 5)
        shapes = [list(x.shape), list(layer.weight.shape), [8], *[[]] * 6]
        constants = ["", "", "", *map(str, (layer.stride, layer.padding, layer.dilation))]
        constants = [c.replace("(", "[").replace(")", "]") for c in constants]
        call = Event(
            "aten::convolution",
            "cpu_op",
            0,
            1,
            1,
            None,
            None,
            details={
                "shapes": shapes,
                "types": ["float"] * 3 + ["ScalarList"] * 3 + ["Scalar"] * 3,
                "values": [*constants, "True", "[0, 0]", str(groups)],
            },
        )
        assert sum_flop(call, find_shapes) == 2 * x.numel() * layer.weight[0].numel()


@pytest.mark.parametrize(
    ("name", "kernels", "told"),
    [
        ("mine::grouped_gemm", [], True),
        ("aten::_some_attention_forward", [], True),
        ("mine::layer", ["void cutlass::Kernel<x>", "k"], True),
        ("mine::layer", ["void fbgemm_gpu::permute<float>"], False),
        ("fbgemm::permute", ["linearize_index_kernel"], False),
        ("aten::upsample_bilinear2d", [], False),
        ("aten::comm", [], False),
    ],
)
def test_what_may_be_a_product_is_told_by_whole_words_or_kernels(name, kernels, told):
    assert may_multiply(name, kernels) is told
