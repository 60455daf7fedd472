"""What runs over nodes took beyond their simulation is found, and never from the judged model."""

from __future__ import annotations

import itertools
import math

import pandas as pd
import pytest
from trioflow.reproductions.clusters.beyond import fit_node_residuals

BLOCK_S, NEIGHBOUR_S, STEP_S = 0.05, 0.4, 0.7
MODELS = {1.34: 18, 3.57: 30, 8.86: 34}


def make_runs() -> pd.DataFrame:
    """Runs of three models that took exactly so much more for each block and neighbour."""
    rows = []
    for (size, blocks), nodes, tensor, stages, pieces in itertools.product(
        MODELS.items(), (4, 16), (4, 16), (1, 2, 4), (2, 16)
    ):
        held = blocks // stages
        more_s = BLOCK_S * held * (tensor > 8) + NEIGHBOUR_S * min(stages - 1, 2)
        flat = stages == 1 and tensor <= 8
        simulated_s = 0.01 * held * pieces
        rows.append(
            {
                "parameters": size,
                "nodes": nodes,
                "tensor": tensor,
                "stages": stages,
                "blocks": held,
                "accumulate": pieces,
                "predicted_s": simulated_s,
                "measured_s": simulated_s + pieces * more_s + STEP_S * flat,
            }
        )
    return pd.DataFrame(rows)


def test_what_a_block_and_a_neighbour_add_is_found_again() -> None:
    found = fit_node_residuals(make_runs())
    assert {one.left_out for one in found} == {"", *(f"nanotron-{size:g}b" for size in MODELS)}
    assert {(one.tensor_nodes, one.chained) for one in found} == {
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    }
    for one in found:
        assert one.block_s == pytest.approx(BLOCK_S * (one.tensor_nodes > 1), rel=0.02)
        assert one.neighbour_s == pytest.approx(NEIGHBOUR_S * one.chained, rel=0.02)
        assert one.step_s == pytest.approx(
            STEP_S * (one.tensor_nodes == 1 and not one.chained), rel=0.02
        )
        assert -0.05 < one.low_log <= 0 <= one.high_log < 0.05


def test_a_model_s_own_runs_change_nothing_of_what_it_is_predicted_by() -> None:
    runs = make_runs()
    slow = runs["parameters"] == 8.86
    slowed = runs.assign(measured_s=runs["measured_s"].where(~slow, 9 * runs["measured_s"]))
    before, after = (
        {
            (one.left_out, one.tensor_nodes, one.chained, one.nodes): one
            for one in fit_node_residuals(found)
        }
        for found in (runs, slowed)
    )
    for key, one in before.items():
        assert (one == after[key]) == (key[0] == "nanotron-8.86b")
        if key[0] == "":
            assert after[key].high_log > math.log(2), "the others' intervals hold it"


def test_refused_runs_and_runs_inside_a_node_do_not_count() -> None:
    runs = make_runs()
    more = runs.assign(nodes=1, measured_s=100.0), runs.assign(predicted_s=math.nan)
    assert fit_node_residuals(pd.concat([runs, *more])) == fit_node_residuals(runs)
