"""The paper's averages: which of them stands beside which case."""

from typing import Any

import pytest
from trioflow_evaluation.figures.catalogue import (
    DATA_PARALLEL,
    DDP,
    PIPELINE,
    SINGLE,
    TENSOR,
    describe_averages,
    find_averages,
    load_averages,
)

from evaluation.figures.figure_cases import make_evidence


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"figure": "fig06", "family": SINGLE, "device": "NVIDIA A40"}, [0.0110]),
        ({"figure": "fig06", "family": SINGLE, "device": ""}, [0.0110, 0.0325]),
        ({"figure": "fig07", "family": DATA_PARALLEL}, [0.0739]),
        ({"figure": "fig07", "family": DDP}, []),
        (
            {"figure": "fig08", "family": DDP, "device": "NVIDIA A100-SXM4-80GB", "ranks": 8},
            [0.0273],
        ),
        ({"figure": "fig09", "family": TENSOR, "ranks": 2}, [0.0454]),
        ({"figure": "fig10", "family": PIPELINE, "ranks": 2, "micro_batches": 4}, [0.1510]),
        ({"figure": "fig10", "family": PIPELINE, "ranks": 8, "micro_batches": 2}, [0.0658, 0.0896]),
        ({"figure": "fig11", "family": TENSOR, "source_gpu": "A", "device": "B"}, [0.0907]),
        ({"figure": "fig11", "family": DDP, "source_gpu": "B", "device": "B"}, [0.0669]),
        ({"figure": "fig12", "family": DDP}, []),
    ],
)
def test_the_nearest_averages_are_found(told: dict[str, Any], expected: list[float]) -> None:
    assert [one.error for one in find_averages(make_evidence(**told))] == expected


def test_words_carry_the_numbers() -> None:
    row = make_evidence(figure="fig08", family=DDP, device="NVIDIA A40")
    assert describe_averages(row) == "DDP, 2 A40: 2.91 %"
    assert all(0 < one.error < 0.2 for one in load_averages()), "shares, not per cents"
