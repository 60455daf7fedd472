"""Plans as the figures tell them apart."""

from dataclasses import replace

import pytest
from trioflow_evaluation.figures.catalogue import find_family, name_plan, read_short_plan

from evaluation.figures.figure_cases import PLANS


def test_the_kind_follows_from_the_degrees_and_not_from_the_name() -> None:
    assert [find_family(plan) for plan in PLANS] == ["single", "DDP", "TP", "PP", "sharded"]
    assert find_family(replace(PLANS[1], replication="dp")) == "DataParallel"
    assert find_family(replace(PLANS[1], tensor=2)) == "hybrid"


def test_names_tell_chunks_schedule_and_sharding() -> None:
    assert name_plan(PLANS[3]) == "PP, 4 chunks"
    assert name_plan(replace(PLANS[3], micro_batches=1, schedule="1f1b")) == "PP, 1 chunk, 1f1b"
    assert name_plan(PLANS[4]) == "FSDP" and name_plan(PLANS[2]) == "TP"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("single", ("single", 0)),
        ("ddp4", ("DDP", 0)),
        ("tp4", ("TP", 0)),
        ("dp2", ("DataParallel", 0)),
        ("tp-gather4", ("TP", 0)),
        ("gpipe4-m1", ("PP", 1)),
        ("1f1b4-m8", ("PP", 8)),
        ("t2-d2-p2-m8", ("hybrid", 0)),
        ("anything", ("hybrid", 0)),
    ],
)
def test_a_public_cases_short_plan_is_read(text: str, expected: tuple[str, int]) -> None:
    assert read_short_plan(text) == expected
