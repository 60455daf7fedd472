"""Planners are kept for the next simulation on the same platform object, and no longer."""

import pytest
from trioflow.engine import planning
from trioflow.engine.planning import MOST_KEPT, keep_planner, make_planner
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.network.message_planner import WHOLE, Chunks


@pytest.fixture
def platform() -> Platform:
    return load_platform("a100x4-nvlink", 2)


def test_one_platform_has_one_planner_for_each_end_of_an_interval(platform: Platform) -> None:
    first = keep_planner(platform, None, "time_s")
    assert keep_planner(platform, None, "time_s") is first
    low = keep_planner(platform, None, "low_s")
    assert low is not first
    assert low.router is first.router, "no bound changes a route: each is found once"
    assert low.build("all_reduce", 8, (0, 1)).shape is first.build("all_reduce", 8, (0, 1)).shape
    assert keep_planner(load_platform("a100x4-nvlink", 2), None, "time_s") is not first
    assert keep_planner(platform, None, "time_s") is first


def test_what_is_kept_has_an_end(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    first = keep_planner(platform, None, "time_s")
    for _ in range(MOST_KEPT["planner"]):
        keep_planner(load_platform("a100x4-nvlink", 2), None, "time_s")
    assert len(planning._shelves["planner"]) == MOST_KEPT["planner"]
    assert keep_planner(platform, None, "time_s") is not first, "it was the longest unused"
    monkeypatch.setattr(planning, "MOST_USES", 3)
    used = [keep_planner(platform, None, "high_s") for _ in range(4)]
    assert used[0] is used[2] and used[3] is not used[0]


def test_a_platform_that_is_gone_leaves_its_identity_to_nobody(platform: Platform) -> None:
    keep_planner(platform, None, "time_s")
    for (identity, _, _), kept in planning._shelves["planner"].items():
        assert id(kept.made_from[0]) == identity


def test_those_that_plan_messages_are_kept_for_the_same_question_only(platform: Platform) -> None:
    first = make_planner(platform, None, "time_s", "ring", WHOLE)
    assert make_planner(platform, None, "time_s", "ring", WHOLE) is first
    others = [
        make_planner(platform, None, "time_s", {"all_reduce": "ring"}, WHOLE),
        make_planner(platform, None, "time_s", "ring", Chunks(2)),
        make_planner(platform, None, "low_s", "ring", WHOLE),
    ]
    assert first not in others and len(set(map(id, others))) == 3
    assert len(planning._shelves["messages"]) == MOST_KEPT["messages"]
    assert make_planner(platform, None, "time_s", "ring", WHOLE) is not first
