"""Which memory is which: the profiler names freed memory's ids again."""

import pytest
from trioflow.trace.tensors import MadeInside, TensorRef, TensorTracker

BATCH = 2


def tensor(number, storage, *shape):
    return TensorRef(number, storage, 4, shape, "float", 0)


@pytest.mark.parametrize("result", [20, 50], ids=["where the passing copy lay", "elsewhere"])
def test_what_is_kept_follows_the_batch_wherever_the_result_comes_to_lie(result):
    """Attention scales its keys, copies them for backward, and drops the scaled ones.

    A result that then takes their place has their id (as once in some twenty captures).
    """
    keys = tensor(1, 10, BATCH, 8)
    scaled, kept = tensor(2, 20, BATCH, 8), tensor(3, 30, BATCH, 8)
    made = tensor(4, result, BATCH, 4)
    tracker = TensorTracker()
    inside = [
        MadeInside(scaled, (keys,)),
        MadeInside(kept),
        MadeInside(kept, (kept, scaled)),
        MadeInside(kept, (scaled,)),
        MadeInside(made, (kept,)),
    ]
    tracker.visit("aten::attention", "forward", [keys], [made], inside)
    weight, gradient = tensor(5, 60, 8, 4), tensor(6, 70, 8, 4)
    backward = tracker.visit("aten::mm", "backward", [kept, made], [gradient], [])
    tracker.visit("aten::_fused_sgd_", "optimizer", [weight, gradient], [], [])
    tracker.classify(BATCH)
    assert [tracker.scales(index) for index in backward.inputs] == [True, True]
    assert not tracker.scales(backward.outputs[0])
    ids = tracker.table({})["storage_id"]
    assert len(set(ids)) == 5  # keys, kept, result, gradient, weight


def test_a_number_that_the_program_wraps_is_not_the_result_whose_ids_it_has():
    tracker = TensorTracker()
    one, freed = tensor(1, 10, BATCH, 8), tensor(2, 20, BATCH, 8)
    counter, number = tensor(3, 30), tensor(2, 20)
    tracker.visit("aten::relu", "forward", [one], [freed], [])
    use = tracker.visit("aten::add_", "forward", [counter, number], [counter], [])
    tracker.visit("aten::relu", "forward", [one], [tensor(4, 40, BATCH, 8)], [])
    tracker.classify(BATCH)
    assert tracker.table({})["producer_op_id"].isna()[use.inputs[1]]
