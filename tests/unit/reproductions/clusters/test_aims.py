"""What was aimed at on nanotron's runs: each line counts every case, and README shows the same lines."""

from __future__ import annotations

import html
import math
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("sklearn")
from trioflow.costmodel.steps import NodeResidual
from trioflow.reproductions.clusters import scores
from trioflow.reproductions.clusters.page import (
    Line,
    describe_causes,
    judge_aims,
    render_aims,
    score_intervals,
)
from trioflow.reproductions.clusters.scores import (
    FAILED,
    FITTED,
    OTHER,
    RAN,
    TOO_FEW,
    TOO_MUCH,
    mark_crowded,
    score_chances,
    score_steps,
)
from trioflow.reproductions.intervals import describe_clusters

GIB = 2**30


def make_steps() -> pd.DataFrame:
    """Six runs in two cells: right, 20 % and 60 % off on one node, refused and 10 % off on four."""
    rows = [
        # nodes, tensor, measured, predicted, mfu
        (1, 1, 1.0, 1.0, 0.4), (1, 2, 2.0, 2.4, 0.3), (1, 4, 5.0, 2.0, 0.05),
        (4, 1, 1.0, None, 0.2), (4, 2, 2.0, 1.8, 0.2), (4, 4, 4.0, 4.4, 0.09),
    ]  # fmt: skip
    cases = pd.DataFrame(rows, columns=["nodes", "tensor", "measured_s", "predicted_s", "mfu"])
    same = {
        "parameters": 1.34,
        "data": 1,
        "pipeline": 1,
        "zero": 0,
        "micro_batch": 1,
        "accumulate": 4,
        "stages": 1,
        "blocks": 18,
    }
    ends = {"low_s": cases["predicted_s"] * 0.95, "high_s": cases["predicted_s"] * 1.05}
    fitted = cases["nodes"].le(2).map({True: FITTED, False: RAN})
    return cases.assign(**same, **ends, set=fitted, expected_s=cases["predicted_s"])


def make_memory() -> pd.DataFrame:
    rows = [
        (RAN, 10, 10.2, 12, ""), (RAN, 10, 12, 90, ""), (FITTED, 20, 20, 30, ""),
        (FAILED, None, 90, 95, TOO_MUCH), (FAILED, None, 9, 9, TOO_FEW), (FAILED, None, 9, 9, OTHER),
        (FAILED, None, 90, 99, TOO_MUCH),
    ]  # fmt: skip
    names = ["set", "measured_bytes", "reserved_bytes", "fullest_bytes", "reason"]
    cases = pd.DataFrame(rows, columns=names)
    for name in names[1:4]:
        cases[name] = cases[name] * GIB
    degrees = {"nodes": 1, "tensor": [1, 2, 4, 1, 2, 4, 8], "data": 1, "pipeline": 1, "zero": 0}
    return cases.assign(
        parameters=1.34, **degrees, micro_batch=1, accumulate=4, allocated_bytes=cases["reserved_bytes"],
        fullest_reserved_bytes=cases["fullest_bytes"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def lines() -> dict[str, Line]:
    return {line.what: line for line in judge_aims(make_memory(), make_steps())}


def test_every_line_counts_all_cases(lines: dict[str, Line]) -> None:
    assert lines["step, median error: 1 and 2 nodes"].cases == 3
    assert lines["step, median error: 1 and 2 nodes"].value == pytest.approx(0.2)
    assert lines["step, median error: MFU above 10 %"].cases == 4
    assert lines["step, median error: all"].cases == 6
    assert lines["steps within 10 %"].value == pytest.approx(2 / 6), "a refused run is missed"
    assert lines["measured step inside the 80 % interval"].value == pytest.approx(1 / 6)
    assert lines["failed runs that memory explains"].value == pytest.approx(0.5)
    assert lines["runs that ran, called out of memory"].write_value() == "1"
    assert not lines["runs that ran, called out of memory"].reached


def test_an_aim_may_be_a_least(lines: dict[str, Line]) -> None:
    order = lines["pairs of a model's runs on as many nodes in the measured order"]
    assert order.write_aim() == "at least 85 %"
    assert order.reached == (order.value >= 0.85)
    assert Line("", 1, 0.9, 0.85, more=True).reached and not Line("", 1, 0.9, 0.85).reached
    choice = lines["throughput lost by the plan expected to be fastest, mean of cells"]
    assert choice.cases == 2
    assert set(choice.others or {}) == {"simulated step", "rule", "constant MFU"}


def test_order_and_choice_are_those_of_the_expected_steps() -> None:
    """The simulated order is wrong in both cells; expected are the measured steps themselves."""
    cases = make_steps().assign(predicted_s=[3.0, 2.0, 1.0, 3.0, 2.0, 1.0])
    expected = cases.assign(expected_s=cases["measured_s"])
    for steps, order in ((cases.assign(expected_s=cases["predicted_s"]), 0.0), (expected, 1.0)):
        lines = {line.what: line for line in judge_aims(None, steps)}
        found = lines["pairs of a model's runs on as many nodes in the measured order"]
        choice = lines["throughput lost by the plan expected to be fastest, mean of cells"]
        assert found.value == order and (found.others or {})["simulated step"] == 0.0
        assert (choice.value == 0.0) == (order == 1.0)
        assert (choice.others or {})["simulated step"] == pytest.approx((0.8 + 0.75) / 2)
        assert score_steps(steps).set_index("group").loc["all runs", "in_order"] == order


def test_intervals_are_judged_beside_one_for_all() -> None:
    """Of two models each one's naive interval is the other's error; a refused run is outside."""
    cases = pd.concat([make_steps().assign(predicted_s=1.0), make_steps().assign(parameters=80.0)])
    cases = cases.assign(low_s=cases["measured_s"] / 2, high_s=cases["measured_s"] * 2)
    found = score_intervals(cases).set_index("group")
    assert found.loc["all runs", "ours_covered"] == 1.0
    assert found.loc["all runs", "ours_width"] == pytest.approx(4.0)
    assert found.loc["all runs", "ours_score"] == pytest.approx(math.log(4.0))
    assert found.loc["all runs", "naive_covered"] < 11 / 12 and found.loc["one node", "runs"] == 6
    missed = score_intervals(cases.assign(low_s=cases["measured_s"] * 2, high_s=cases["measured_s"] * 4))  # fmt: skip
    assert missed["ours_covered"].eq(0).all()
    assert missed.iloc[0]["ours_score"] == pytest.approx(math.log(2.0) * (1 + 10))


def test_a_plan_whose_allocator_runs_out_is_not_chosen() -> None:
    """The second run's allocator is predicted to hold 90 GB: it is known by its degrees, and passed over."""
    cases = make_steps().assign(expected_s=[1.5, 1.0, 2.0, 1.0, 2.0, 4.0])
    marked = mark_crowded(make_memory(), cases)
    assert marked["crowded"].tolist() == [False, True, *[False] * 4]
    losses = [
        {line.what: line for line in judge_aims(None, runs)}[
            "throughput lost by the plan expected to be fastest, mean of cells"
        ].value
        for runs in (cases, marked)
    ]
    assert losses == [pytest.approx(0.5 / 2), 0.0]


def test_probabilities_are_judged_by_what_runs_over_nodes_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kind of run that is three times as slow one time in four says so; on one node nothing is known of it."""
    logs = (0.0, 0.0, 0.0, math.log(3.0))
    asked: list[Any] = []

    def find(*of: Any) -> NodeResidual:
        asked.append(of)
        return NodeResidual("", 1, False, 4, 9, 0.0, 0.0, 0.0, 0.0, 1.1, logs)

    monkeypatch.setattr(scores, "find_node_residual", find)
    few = make_steps().dropna()
    found = score_chances(few)
    assert found["pairs"].sum() == 3 + 1 and (found["low"] >= 0.5).all()
    assert {one[2:] for one in asked} == {(4, "nanotron-1.34b")}
    groups = {row["low"]: row for row in found.to_dict("records")}
    assert groups[0.99]["won"] == 1.0 and groups[0.99]["pairs"] == 2
    assert groups[0.9]["won"] == 0.0, "2.0 s was expected before 2.4 s, on one node, and was not"
    nodes = groups[0.8]
    assert nodes["won"] == 1.0 and nodes["alone"] > 0.99
    assert nodes["stated"] == pytest.approx(1 - 3 / 16, abs=0.02), (
        "1.8 s before 4.4 s: three pairs of sixteen are not"
    )


def test_fitted_runs_stand_apart() -> None:
    groups = score_steps(make_steps()).set_index("group")["runs"]
    assert groups["1 and 2 nodes"] == groups[FITTED] == 3
    assert "1 and 2 nodes, not fitted on" not in groups and groups[RAN] == 3


def test_readme_and_pages_hold_the_same_lines(lines: dict[str, Line]) -> None:
    result = describe_clusters(list(lines.values()), "Why.")
    ((_, headline),) = result.lines
    page = render_aims(list(lines.values()))
    for line in lines.values():
        assert html.escape(line.what) in page
        bold = f"**{line.write_value()}**" if line.reached else line.write_value()
        assert f"| {line.what} | {line.cases} | {line.write_aim()} | {bold} |" in result.body
        assert not line.headline or f"{line.headline} {bold}" in headline
    assert any(line.reached for line in lines.values()) and result.body.endswith("\n\nWhy.")


def test_what_missed_is_told_by_what_it_has_in_common() -> None:
    cases = make_steps().assign(
        predicted_s=[1.0, 1.8, 5.5, 0.5, 1.8, 1.0], nodes=[1, 2, 2, 4, 4, 4]
    )
    assert describe_causes(cases) == "", "nothing is slow, and no tensor group leaves its node"
    cases = cases.assign(pipeline=[1, 1, 1, 1, 1, 2], tensor=[1, 1, 1, 16, 2, 4])
    told = describe_causes(cases.assign(expected_s=cases["measured_s"] * 1.25))
    assert "expected steps miss them by 25.0 % and 25.0 %" in told
    assert told.startswith(
        "What missed, of simulated steps: 1 runs whose tensor groups reach beyond a node (median error 50.0"
    )
    assert "1 pipelines across nodes that took 0.8 s more" in told and "The other 4: 10.0" in told
    assert "100" in told.split("explain; ")[1].split("of both")[0]
