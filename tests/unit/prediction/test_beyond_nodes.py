"""What real runs over nodes took beyond their simulation: who is told, and what the answer says."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from trioflow.cli import main
from trioflow.costmodel import steps
from trioflow.costmodel.choices import load_named_platform
from trioflow.costmodel.steps import NodeResidual
from trioflow.parallel.plan import make_plan
from trioflow.prediction.anchors import doubt_nodes
from trioflow.prediction.assembly import predict
from trioflow.sweeps.search import search_plans
from trioflow.sweeps.workshop import Workshop
from trioflow.trace.store import load_trace

TRACE = "gpt2-tiny-b8"
BLOCK_S, NEIGHBOUR_S, STEP_S, LOW, HIGH = 0.25, 1.5, 2.5, math.log(0.5), math.log(4.0)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch):
    """One residual for each way to lie on nodes."""
    rows = tuple(
        NodeResidual(
            "",
            nodes,
            chained,
            2,
            9,
            BLOCK_S * (nodes > 1),
            NEIGHBOUR_S * chained,
            STEP_S * (nodes == 1 and not chained),
            LOW,
            HIGH,
        )
        for nodes, chained in ((1, True), (2, False), (2, True), (1, False))
    )
    monkeypatch.setattr(steps, "load_node_residuals", lambda: rows)
    steps.find_node_residual.cache_clear()
    yield rows
    steps.find_node_residual.cache_clear()


@pytest.mark.parametrize(
    ("platform", "degrees", "excess_s", "said"),
    [
        ("p5-h100", {"data": 64}, None, ""),
        ("p5-h100", {"data": 2, "pipeline": 4}, None, ""),
        (
            "p5-h100",
            {"tensor": 16},
            6 * BLOCK_S,
            "tensor groups of 16 ranks reach beyond a node of 8",
        ),
        ("p5-h100", {"data": 4, "tensor": 16, "accumulate": 3}, 18 * BLOCK_S, "for each block"),
        (
            "p5-h100",
            {"data": 8, "pipeline": 2, "micro_batches": 4},
            4 * NEIGHBOUR_S,
            "pipelines over several nodes",
        ),
        (
            "p5-h100",
            {"data": 4, "pipeline": 4, "micro_batches": 4},
            8 * NEIGHBOUR_S,
            "for each neighbouring stage",
        ),
        (
            "p5-h100",
            {"tensor": 16, "pipeline": 2, "micro_batches": 4},
            24 * BLOCK_S + 4 * NEIGHBOUR_S,
            "block and",
        ),
        (
            "dgx-h100",
            {"data": 8, "pipeline": 2, "micro_batches": 4},
            0.0,
            "often took about a second more",
        ),
        (
            "dgx-h100",
            {"tensor": 16, "pipeline": 2, "micro_batches": 4},
            24 * BLOCK_S,
            "reach beyond a node",
        ),
    ],
)
def test_what_is_expected_follows_how_the_plan_lies_on_nodes(
    known, platform: str, degrees: dict[str, int], excess_s: float | None, said: str
) -> None:
    schedule = {"schedule": "1f1b"} if "pipeline" in degrees else {}
    plan, machine, facts = (
        make_plan(**degrees, **schedule),
        load_named_platform(platform, 64),
        load_trace(TRACE).facts,
    )
    found = doubt_nodes(plan, machine, 6, facts)
    assert (None if found is None else found.excess_s) == excess_s
    assert said in (found.text if found else "")
    megatron = doubt_nodes(plan, machine, 6, replace(facts, precision_recipe="megatron-bf16"))
    elsewhere = doubt_nodes(plan, load_named_platform("dgx-h100", 64), 6, facts)
    assert megatron == elsewhere, "another framework's is as another cluster's"


def test_replicas_of_nanotron_s_that_lie_on_several_nodes_take_what_its_runs_took(known) -> None:
    machine, facts = load_named_platform("p5-h100", 64), load_trace(TRACE).facts
    nanotron = replace(facts, precision_recipe="nanotron-bf16")
    found = doubt_nodes(make_plan(8, tensor=8, accumulate=4), machine, 6, nanotron)
    assert found is not None and found.excess_s == STEP_S
    assert "replicas on several nodes: 9 real runs of that kind took 2.5 s more" in found.text
    assert doubt_nodes(make_plan(8), machine, 6, nanotron) is None, "one node"
    assert doubt_nodes(make_plan(64), load_named_platform("dgx-h100", 64), 6, nanotron) is None


def test_the_answer_holds_the_simulated_and_the_expected_step(known, capsys) -> None:
    plan = make_plan(data=8, pipeline=2, micro_batches=4, schedule="1f1b")
    found = predict(TRACE, plan, "p5-h100", batch=64)
    bare = predict(TRACE, plan, "dgx-h100", batch=64)
    expected_s = found.step_time_s + 4 * NEIGHBOUR_S
    assert found.expected_s == pytest.approx(expected_s) and bare.expected_s == bare.step_time_s
    assert (found.low_s, found.high_s) == pytest.approx((expected_s * 0.5, expected_s * 4))
    told, silent = found.to_dict(), bare.to_dict()
    assert told["expected_s"] == found.expected_s and "expected_s" not in silent
    assert told["samples_per_s"] == pytest.approx(64 / expected_s)
    assert any("9 real runs of that kind took" in warning for warning in found.warnings)
    assert "simulated, " in repr(found) and "expected (80 %" in repr(found)
    words = "--data-parallel 8 --pipeline-parallel 2 --micro-batches 4 --schedule 1f1b --batch 64"
    asked = ["simulate", TRACE, "--platform", "p5-h100", *words.split()]
    assert main(asked) == 0
    assert " expected " in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expected_s"] == pytest.approx(expected_s)


def test_elsewhere_the_interval_holds_both_ends() -> None:
    """Nobody measured tensor groups over nodes of other clusters: from the simulation's low end on."""
    trace, plan = "gpt-145b-b1", make_plan(data=2, tensor=16)
    doubted = doubt_nodes(plan, load_named_platform("dgx-h100", 32), 80, load_trace(trace).facts)
    assert doubted is not None and not doubted.own and doubted.excess_s > 0
    found = predict(trace, plan, "dgx-h100", memory=False)
    assert found.low_s < found.step_time_s < found.expected_s < found.high_s


def test_a_search_ranks_by_what_is_expected(known) -> None:
    replicas = make_plan(16)
    stages = make_plan(data=8, pipeline=2, micro_batches=2, schedule="1f1b")
    for plans in ([replicas, stages], [stages, replicas]):
        found = search_plans(Workshop(), TRACE, "p5-h100", 16, 64, plans=plans)
        assert [row["pipeline"] for row in found.ranking] == [1, 2]
        first, second = found.ranking
        assert first["expected_s"] == first["step_time_s"]
        assert second["expected_s"] == pytest.approx(second["step_time_s"] + 2 * NEIGHBOUR_S)
        low, high = found.outline_error
        assert -0.2 < low <= high < 0.2, "outlines hold it too"
