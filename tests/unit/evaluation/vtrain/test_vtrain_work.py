from dataclasses import replace

import pytest
from trioflow.costmodel.operators.half_tables import shipped_tensor_products
from trioflow_evaluation.vtrain.data import (
    PARTS,
    VOCABULARY,
    Shape,
    count_parameters,
    count_part,
    index_shapes,
    predict_products,
    tabulate_work,
)
from trioflow_evaluation.vtrain.model import DEVICE
from vtrain_rows import make_rows

SHAPE = Shape(hidden=1024, heads=16, sequence=512, tensor=1, micro_batch=2)


def count_flop(shape: Shape, part: str) -> int:
    return sum(2 * b * m * n * k for b, m, n, k in count_part(shape, part).products)


def test_a_block_has_the_flops_of_its_closed_form() -> None:
    tokens, hidden = SHAPE.tokens, SHAPE.hidden
    expected = 24 * tokens * hidden**2 + 4 * tokens * SHAPE.sequence * hidden
    assert count_flop(SHAPE, "block_forward") == expected
    assert count_flop(SHAPE, "block_backward") == 2 * expected


@pytest.mark.parametrize("part", PARTS)
def test_tensor_ranks_share_the_products_and_not_the_normalisations(part: str) -> None:
    whole, shard = count_part(SHAPE, part), count_part(replace(SHAPE, tensor=4), part)
    flop = count_flop(replace(SHAPE, tensor=4), part)  # padding of the vocabulary apart
    assert flop == pytest.approx(count_flop(SHAPE, part) / 4, rel=0.01)
    assert shard.moved_bytes <= whole.moved_bytes
    if part.startswith("block"):
        assert shard.moved_bytes > whole.moved_bytes / 4
    assert whole.all_reduces == 0 and shard.launches == whole.launches


def test_a_block_adds_up_activations_twice_in_either_direction() -> None:
    shape = replace(SHAPE, tensor=2)
    assert [count_part(shape, part).all_reduces for part in PARTS] == [2, 2, 1, 0, 0, 1]
    assert shape.activation_bytes == 2 * 1024 * 1024


def test_the_vocabulary_is_filled_up_on_every_rank() -> None:
    for tensor in (1, 2, 4, 8):
        shard = replace(SHAPE, tensor=tensor).vocabulary
        assert shard % 128 == 0
        assert 0 <= shard * tensor - VOCABULARY < 128 * tensor


def test_products_take_longer_with_more_samples() -> None:
    table = shipped_tensor_products()[DEVICE]
    shapes = [SHAPE, replace(SHAPE, micro_batch=4)]
    work = tabulate_work(shapes, table)
    block = PARTS.index("block_forward")
    assert work.product_s[0, block] < work.product_s[1, block] < 2.2 * work.product_s[0, block]
    assert predict_products([], table) == 0.0
    one = predict_products([(1, 1024, 1024, 1024)], table)
    assert predict_products([(1, 1024, 1024, 1024)] * 3, table) == pytest.approx(3 * one)


def test_stages_hold_every_block_once_and_the_ends_their_tables() -> None:
    rows = make_rows(hidden=(1024,), layers=(8,), plans=((1, 1, 1), (1, 1, 2), (2, 1, 2)))
    held = count_parameters(rows)
    table = replace(SHAPE, tensor=1).vocabulary * 1024
    blocks = 8 * (12 * 1024**2 + 13 * 1024)
    of = rows["tensor"] * 10 + rows["pipeline"]
    assert held[of == 11] == pytest.approx(blocks + 2 * table) or held.shape[1] == 2
    assert held[of == 11, 0] == pytest.approx(blocks + 2 * table)
    assert (held[of == 11, 1] == 0).all()
    assert held[of == 12] == pytest.approx(blocks / 2 + table)
    shard = replace(SHAPE, tensor=2).vocabulary * 1024
    assert held[of == 22] == pytest.approx(blocks / 4 + shard)


def test_rows_are_sorted_into_their_shapes() -> None:
    rows = make_rows()
    shapes, place = index_shapes(rows)
    assert len(shapes) == len(set(shapes)) == 2 * 3 * 2
    for number in (0, 7, len(rows) - 1):
        shape = shapes[place[number]]
        assert (shape.hidden, shape.tensor, shape.micro_batch) == tuple(
            rows.loc[number, ["hidden", "tensor", "micro_batch"]]
        )
