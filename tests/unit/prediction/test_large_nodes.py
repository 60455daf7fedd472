"""Nodes of more GPUs than any that was measured: NVL72 takes an eight-GPU node's collectives, and says how far."""

from dataclasses import replace

import pytest
from trioflow.hardware.platform import load_platform
from trioflow.prediction.assembly import choose_collectives

SIZE = 10**9


@pytest.mark.parametrize("per_node", [64, 72])
def test_a_rack_is_one_node_of_measured_collectives(per_node: int) -> None:
    rack = replace(
        load_platform("gb200-nvl72", 2 * per_node),
        ranks_per_node=per_node,
        node_collectives="h200x8-nvlink",
    )
    cost = choose_collectives(rack)
    eight, whole = (cost.time_s("all_reduce", ranks, SIZE) for ranks in (8, per_node))
    assert whole.confidence == "extrapolated"
    assert eight.time_s < whole.time_s < 1.5 * eight.time_s
    assert whole.high_s / whole.low_s > 1.5 * eight.high_s / eight.low_s
    alone = replace(load_platform("gb200-nvl72", per_node), ranks_per_node=None)
    known = choose_collectives(replace(alone, node_collectives="h200x8-nvlink"))
    assert known.time_s("all_reduce", per_node, SIZE) == whole
