"""What was aimed at on nanotron's runs: each line counts every case, and README shows the same lines."""

import html
import math

import pandas as pd
import pytest

pytest.importorskip("sklearn")
from page_numbers import describe_clusters
from trioflow_evaluation.clusters.page import (
    Line,
    describe_causes,
    judge_aims,
    render_aims,
    score_intervals,
)
from trioflow_evaluation.clusters.scores import (
    BEFORE,
    FAILED,
    FITTED,
    RAN,
    mark_crowded,
    score_chances,
    score_steps,
)

GIB = 2**30


def make_steps() -> pd.DataFrame:
    """Six runs in two cells: right, 20 % and 60 % off on one node, refused and 10 % off on four; one on two to fit on."""
    rows = [
        # nodes, tensor, measured, predicted, mfu
        (1, 1, 1.0, 1.0, 0.4), (1, 2, 2.0, 2.4, 0.3), (1, 4, 5.0, 2.0, 0.05),
        (4, 1, 1.0, None, 0.2), (4, 2, 2.0, 1.8, 0.2), (4, 4, 4.0, 4.4, 0.09),
        (2, 1, 1.0, 1.5, 0.3),
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
        "network": "fast",
    }
    ends = {"low_s": cases["predicted_s"] * 0.95, "high_s": cases["predicted_s"] * 1.05}
    fitted = cases["nodes"].eq(2).map({True: FITTED, False: RAN})
    return cases.assign(**same, **ends, set=fitted)


def make_memory() -> pd.DataFrame:
    """Three runs, one of which no card should hold, two that ran out of memory, and two that failed otherwise."""
    rows = [
        (RAN, "Success", 10, 10.2, 12), (RAN, "Success", 10, 12, 90), (FITTED, "Success", 20, 20, 30),
        (FAILED, "OOM", None, 90, 95), (FAILED, "OOM", None, 9, 9), (FAILED, "Other", None, 9, 9),
        (FAILED, "Other", None, 90, 99),
    ]  # fmt: skip
    names = ["set", "status", "measured_bytes", "reserved_bytes", "fullest_bytes"]
    cases = pd.DataFrame(rows, columns=names)
    for name in names[2:]:
        cases[name] = cases[name] * GIB
    degrees = {"nodes": 1, "tensor": [1, 2, 4, 1, 2, 4, 8], "data": 1, "pipeline": 1, "zero": 0}
    return cases.assign(
        parameters=1.34, **degrees, micro_batch=1, accumulate=4, allocated_bytes=cases["reserved_bytes"],
        fullest_reserved_bytes=cases["fullest_bytes"], update_bytes=GIB, measured_update_bytes=1.25 * GIB,
    )  # fmt: skip


@pytest.fixture(scope="module")
def lines() -> dict[str, Line]:
    return {line.what: line for line in judge_aims(make_memory(), make_steps())}


def test_every_line_counts_all_cases(lines: dict[str, Line]) -> None:
    assert lines["step, median error: tensor groups inside a node"].cases == 6
    assert lines["step, median error: tensor groups inside a node"].value == pytest.approx(0.15)
    assert lines["step, median error: MFU above 10 %"].cases == 4
    assert lines["step, median error: all of these"].cases == 6
    assert lines["steps within 10 %"].value == pytest.approx(2 / 6), "a refused run is missed"
    assert lines["measured step inside the 80 % interval"].value == pytest.approx(1 / 6)
    ends = lines["runs whose odds say rightly whether they survive, their model left out"]
    assert ends.cases == 5 and ends.value == pytest.approx(3 / 5) and not ends.reached
    assert lines["reserved peak, median error"].value == pytest.approx(0.02)
    assert lines["allocated peak of the update, median error"].value == pytest.approx(0.2)


def test_an_aim_may_be_a_least(lines: dict[str, Line]) -> None:
    order = lines["pairs of a model's runs on as many nodes of one network in the measured order"]
    assert order.write_aim() == "at least 85 %"
    assert order.reached == (order.value >= 0.85)
    assert Line("", 1, 0.9, 0.85, more=True).reached and not Line("", 1, 0.9, 0.85).reached
    choice = lines["throughput lost by the plan predicted to be fastest, mean of cells"]
    assert choice.cases == 2
    assert set(choice.others or {}) == {"rule", "constant MFU"}


def test_intervals_are_judged_beside_one_for_all() -> None:
    """Of two models each one's naive interval is the other's error; a refused run is outside."""
    cases = pd.concat([make_steps().assign(predicted_s=1.0), make_steps().assign(parameters=80.0)])
    cases = cases.assign(low_s=cases["measured_s"] / 2, high_s=cases["measured_s"] * 2)
    found = score_intervals(cases).set_index("group")
    assert found.loc["all runs", "ours_covered"] == 1.0
    assert found.loc["all runs", "ours_width"] == pytest.approx(4.0)
    assert found.loc["all runs", "ours_score"] == pytest.approx(math.log(4.0))
    assert (
        found.loc["all runs", "naive_covered"] < 11 / 12 and found.loc["on one node", "runs"] == 6
    )
    missed = score_intervals(cases.assign(low_s=cases["measured_s"] * 2, high_s=cases["measured_s"] * 4))  # fmt: skip
    assert missed["ours_covered"].eq(0).all()
    assert missed.iloc[0]["ours_score"] == pytest.approx(math.log(2.0) * (1 + 10))


def test_a_plan_whose_allocator_runs_out_is_not_chosen() -> None:
    """The second run's allocator is predicted to hold 90 GB: it is known by its degrees, and passed over."""
    cases = make_steps().assign(predicted_s=[1.5, 1.0, 2.0, 1.0, 2.0, 4.0, 1.0])
    marked = mark_crowded(make_memory(), cases)
    assert marked["crowded"].tolist() == [False, True, *[False] * 5]
    losses = [
        {line.what: line for line in judge_aims(None, runs)}[
            "throughput lost by the plan predicted to be fastest, mean of cells"
        ].value
        for runs in (cases, marked)
    ]
    assert losses == [pytest.approx(0.5 / 2), 0.0]


def test_probabilities_are_of_runs_that_somebody_could_choose_among() -> None:
    found = score_chances(make_steps().dropna())
    assert found["pairs"].sum() == 3 + 1 and (found["low"] >= 0.5).all()
    one = make_steps().dropna().assign(network=list("abcdef"))
    assert score_chances(one).empty, "each on a network of its own"


def test_pipelines_before_their_fix_are_reported_and_judged_with_nothing() -> None:
    cases = make_steps()
    broken = cases.assign(set=BEFORE, predicted_s=0.01, low_s=0.0, high_s=0.02)
    alone, both = (
        {one.what: one for one in judge_aims(None, rows)}
        for rows in (cases, pd.concat([cases, broken]))
    )
    assert both.pop(f"step, median error: {BEFORE}").value > 0.9
    assert both == alone


def test_fitted_runs_stand_apart() -> None:
    groups = score_steps(make_steps()).set_index("group")["cases"]
    assert groups[FITTED] == 1 and groups["on one node"] == 3 and groups["all others"] == 6
    assert BEFORE not in groups


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


def test_causes_name_each_way_to_lie_on_nodes() -> None:
    cases = make_steps().assign(pipeline=[1, 1, 1, 1, 1, 2, 1], tensor=[1, 1, 1, 16, 2, 4, 1])
    text = describe_causes(pd.concat([cases, cases[:1].assign(set=BEFORE, predicted_s=0.1)]))
    assert f"{BEFORE} (their cause is known, nothing here models it) 90.0" in text
    assert "on one node 20.0" in text and "pipelines over nodes 10.0" in text
    assert "tensor groups beyond a node" in text
