"""Folded simulation of real plans, and of what keeps it from being exact."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracles.fold_tables import fold_tables
from trioflow.base.errors import InputError, SimulationError
from trioflow.costmodel.collectives.model import load_collective_model
from trioflow.costmodel.interface import OperatorModel
from trioflow.costmodel.operators.model import SHIPPED_MODELS, load_operator_model
from trioflow.engine import planning
from trioflow.engine.folding.fold import fold_program
from trioflow.engine.folding.traffic import divide
from trioflow.engine.simulate import SimulationOptions, _simulate, simulate, simulate_interval
from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.platform import BUILDERS, load_platform
from trioflow.hardware.topologies.nodes import build_rail_optimised
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.folded import FoldedTaskGraph
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder, load_task_graph
from trioflow.trace.store import Trace, load_trace

COLLECTIVES = load_collective_model(SHIPPED_MODELS / "cpu2-gloo" / "collectives.json")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace("gpt2-tiny-b8")


@pytest.fixture(scope="module")
def model() -> OperatorModel:
    return load_operator_model(SHIPPED_MODELS / "cpu2-gloo" / "operators.json")


def build(trace: Trace, model: OperatorModel, **degrees: Any) -> TaskGraph:
    plan = make_plan(**degrees)
    return extrapolate(trace, plan, model, batch=8 * plan.data)


def assert_same(once: Any, every: Any) -> None:
    assert not every.summary.folded
    assert once.timeline.equals(every.timeline)
    for key in ("step_time_s", "busy_s", "compute_s", "communication_s", "per_rank", "ranks",
                "exposed_communication_s", "confidence", "warnings"):  # fmt: skip
        assert getattr(once.summary, key) == getattr(every.summary, key)
    moved, known = once.summary.link_bytes, every.summary.link_bytes
    assert moved.keys() == known.keys()
    np.testing.assert_allclose(list(moved.values()), list(known.values()), rtol=1e-12)


@pytest.mark.parametrize("engine", ["reference", "compiled"])
@pytest.mark.parametrize(
    ("degrees", "platform", "collectives"),
    [
        ({"data": 4}, "h100x8-nvlink", COLLECTIVES),
        ({"data": 2, "tensor": 2}, "a100x4-nvlink", None),
        ({"data": 2, "tensor": 4, "pipeline": 2, "schedule": "1f1b"}, "dgx-h100", None),
        ({"data": 8, "pipeline": 2, "schedule": "zero-bubble"}, "dgx-a100", COLLECTIVES),
        ({"data": 4, "sharding": "fsdp"}, "h100x8-nvlink", None),
        ({"data": 16, "sharding": "hsdp", "shard": 8}, "dgx-h100", None),
    ],
)  # fmt: skip
def test_real_plans_fold_on_real_platforms(
    degrees: dict[str, Any],
    platform: str,
    collectives: Any,
    engine: str,
    trace: Trace,
    model: OperatorModel,
) -> None:
    graph = build(trace, model, **degrees)
    machine = load_platform(platform, graph.metadata.ranks)
    once = simulate(graph, machine, collectives, engine=engine)
    assert once.summary.folded, once.summary.unfolded_reason
    every = simulate(graph, machine, collectives, engine=engine, fold=False)
    assert_same(once, every)
    assert once.summary.events < every.summary.events


@pytest.mark.parametrize(
    ("degrees", "platform", "classes"),
    [
        # The replicas' ring stays in the node behind every other rank, and leaves it behind the rest.
        ({"data": 8, "tensor": 2}, "dgx-a100", 2),
        ({"data": 4, "tensor": 4, "pipeline": 2, "schedule": "1f1b"}, "dgx-h100", 4),
    ],
)
def test_places_in_a_node_that_differ_divide_classes(
    degrees: dict[str, Any], platform: str, classes: int, trace: Trace, model: OperatorModel
) -> None:
    graph = build(trace, model, **degrees)
    machine = load_platform(platform, graph.metadata.ranks)
    once = simulate(graph, machine, engine="compiled")
    assert once.summary.folded, once.summary.unfolded_reason
    assert once.summary.executed_ranks == classes
    assert_same(once, simulate(graph, machine, engine="compiled", fold=False))


def make_units(ranks: int, **changes: Any) -> Platform:
    """Two nodes of two ranks below each set of leaves."""
    links = build_rail_optimised(
        ranks, ranks_per_node=2, inside=lambda n: BUILDERS["switch"](n, 450e9, 3e-7),
        attach_bandwidth_bytes_per_s=63e9, attach_latency_s=1e-6, nic_bandwidth_bytes_per_s=5e9,
        nic_latency_s=1e-6, spine_latency_s=1e-7, nodes_per_leaf=2, **changes,
    )  # fmt: skip
    return Platform("units", Device("chip", "gpu", 10**11, {}), ranks, tuple(links))


@pytest.mark.parametrize("engine", ["reference", "compiled"])
@pytest.mark.parametrize(
    ("degrees", "changes", "classes"),
    [
        ({"data": 8, "tensor": 2}, {}, 1),
        ({"data": 4, "tensor": 2, "pipeline": 2, "schedule": "1f1b"}, {}, 2),
        ({"data": 4, "tensor": 2, "pipeline": 2, "schedule": "1f1b"}, {"oversubscription": 2}, 4),
    ],
)
def test_leaf_sets_stay_alike_below_uplinks_that_hold_nobody_back(
    degrees: dict[str, Any], changes: dict[str, Any], classes: int, engine: str, trace: Trace,
    model: OperatorModel,
) -> None:  # fmt: skip
    """The ring leaves a set at its last node, where all nodes send to the next stage."""
    graph = build(trace, model, **degrees)
    machine = make_units(graph.metadata.ranks, **changes)
    once = simulate(graph, machine, engine=engine)
    assert once.summary.folded, once.summary.unfolded_reason
    assert once.summary.executed_ranks == classes
    assert_same(once, simulate(graph, machine, engine=engine, fold=False))
    uplinks = {k: v for k, v in once.summary.link_bytes.items() if "spine" in k}
    assert any(uplinks.values())


def test_the_interval_folds_too(trace: Trace, model: OperatorModel) -> None:
    graph = build(trace, model, data=4)
    machine = load_platform("h100x8-nvlink", 4)
    once = simulate_interval(graph, machine, COLLECTIVES)
    every = simulate_interval(graph, machine, COLLECTIVES, fold=False)
    assert_same(once, every)
    for key in ("low_s", "high_s"):
        assert getattr(once.summary, key) == getattr(every.summary, key)


@pytest.mark.parametrize("fold", [True, False])
def test_the_ends_of_an_interval_are_simulations_of_their_own(
    trace: Trace, model: OperatorModel, fold: bool
) -> None:
    """They are made ready together with the nominal one, and say what each alone says."""
    graph = build(trace, model, data=2, tensor=2, pipeline=2, schedule="1f1b")
    machine = load_platform("dgx-h100", 8)
    graph.metadata = replace(graph.metadata, compute_interval=(0.7, 1.6), least_half_log=0.0)
    told = simulate_interval(graph, machine, COLLECTIVES, fold=fold).summary
    assert told.folded == fold
    for bound, factor in (("low_s", 0.7), ("high_s", 1.6)):
        options = SimulationOptions(fold=fold).scale_compute(factor)
        alone = _simulate(graph, machine, COLLECTIVES, options, bound)
        assert getattr(told, bound) == alone.summary.step_time_s
    assert told.low_s < told.step_time_s < told.high_s


def test_folding_needs_no_table_of_all_ranks(
    trace: Trace, model: OperatorModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does the command, unless a timeline or a breakdown is asked for."""
    graph = build(trace, model, data=4)
    monkeypatch.setattr("trioflow.parallel.folded.Fold.expand", None)
    result = simulate(graph, load_platform("h100x8-nvlink", 4))
    assert result.summary.folded and len(result.summary.per_rank) == 4
    assert isinstance(graph, FoldedTaskGraph) and graph.fold is not None
    assert "compute" in graph.kinds
    with pytest.raises(TypeError):
        _ = result.timeline


def test_a_saved_graph_is_simulated_with_all_its_ranks(
    trace: Trace, model: OperatorModel, tmp_path: Any
) -> None:
    graph = build(trace, model, data=2, tensor=2, pipeline=2, schedule="1f1b")
    machine = load_platform("h100x8-nvlink", 8)
    once = simulate(graph, machine)
    graph.save(tmp_path)
    again = simulate(load_task_graph(tmp_path), machine)
    assert "does not say" in again.summary.unfolded_reason
    assert again.timeline.equals(once.timeline)


def test_changed_tables_are_simulated_as_they_are(trace: Trace, model: OperatorModel) -> None:
    machine = load_platform("h100x8-nvlink", 4)
    graph = build(trace, model, data=4)
    before = simulate(graph, machine)
    graph.tasks.loc[0, "duration_s"] += 1.0
    after = simulate(graph, machine)
    assert after.summary.step_time_s > before.summary.step_time_s + 0.9
    # The timeline of the first is the one that was simulated.
    assert before.timeline["end_s"].max() == before.summary.step_time_s


def make_pairs(durations_s: list[float]) -> TaskGraph:
    """Pairs of ranks that compute and then reduce together."""
    builder = TaskGraphBuilder()
    for rank, duration_s in enumerate(durations_s):
        first = rank - rank % 2
        done = builder.add(rank, "compute", "compute", "op", duration_s=duration_s)
        builder.add(
            rank, "communication", "collective", "all_reduce", message_bytes=10**6, match_id=first,
            group=f"{first},{first + 1}", after=[done],
        )  # fmt: skip
    return builder.build()


def test_reasons_are_told() -> None:
    machine = load_platform("h100x8-nvlink", 4)

    def reason(graph: TaskGraph, platform: Platform = machine, **options: Any) -> str:
        summary = simulate(fold_tables(graph), platform, **options).summary
        assert not summary.folded
        return str(summary.unfolded_reason)

    alike = make_pairs([1.0] * 4)
    assert simulate(fold_tables(alike), machine).summary.folded
    assert reason(alike, compute_scale=[1.0, 1.5, 2.0, 1.2]) == "no two ranks do the same"
    scale = [1.0, 1.0, 2.0, 2.0]
    assert simulate(fold_tables(alike), machine, compute_scale=scale).summary.folded
    assert "CircuitNetwork" in reason(alike, network="circuit")


def test_what_is_wrong_is_told_of_all_ranks() -> None:
    machine = load_platform("h100x8-nvlink", 4)
    graph = make_pairs([1.0] * 4)
    for task in range(0, 8, 2):  # Each rank's first task waits for its second one.
        graph.dependencies.loc[len(graph.dependencies)] = [task, task + 1]
    with pytest.raises(SimulationError, match=r"tasks of rank 0, 1, 2, 3 wait for each other"):
        simulate(fold_tables(graph), machine)
    with pytest.raises(SimulationError, match="rank 3 and the platform has 3 ranks"):
        simulate(fold_tables(make_pairs([1.0] * 4)), load_platform("h100x8-nvlink", 3))
    with pytest.raises(InputError, match="fold='never'"):
        simulate(make_pairs([1.0] * 4), machine, fold="never")


def test_a_link_that_flows_of_a_class_share_counts_them_all() -> None:
    """Four flows over a link of their own each and one link that all share."""
    flow = np.repeat(np.arange(4), 2)
    link = np.array([0, 4, 1, 4, 2, 4, 3, 4])
    found = divide(flow, link, np.zeros(4, dtype=np.int64), np.array([1.0] * 4 + [2.0, 9.0]))
    assert found is not None
    assert len(set(found.flow_class.tolist())) == 1
    own, shared = found.link_class[0], found.link_class[4]
    assert found.link_class.tolist() == [own] * 4 + [shared, -1]
    flows, links, times = found.count_classes()
    counted = dict(zip(links.tolist(), times.tolist(), strict=True))
    assert counted == {own: 1, shared: 4} and set(flows.tolist()) == {found.flow_class[0]}
    # A wider link sets its flow apart, and the others from it.
    widths = np.array([1.0, 1.0, 1.0, 3.0, 2.0, 9.0])
    apart = divide(flow, link, np.zeros(4, dtype=np.int64), widths)
    assert apart is not None
    assert apart.flow_class[0] == apart.flow_class[1] == apart.flow_class[2] != apart.flow_class[3]


def test_one_graph_is_folded_once_however_fast_its_links_are_said_to_be(
    trace: Trace, model: OperatorModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, platform = build(trace, model, data=16), load_platform("dgx-a100", 16)
    made = []
    monkeypatch.setattr(
        planning,
        "fold_program",
        lambda *given, **named: made.append(1) or fold_program(*given, **named),
    )
    asked: list[dict[str, Any]] = [
        {"network": network, "communication_scale": scale}
        for network in ("fair_share", "contention_free") for scale in (1.0, 3.0, 0.5)
    ]  # fmt: skip
    told = [simulate(graph, platform, COLLECTIVES, **one) for one in asked]
    assert all(one.summary.folded for one in told) and len(made) == 2, "once on each network"
    simulate(graph, platform, COLLECTIVES, compute_scale=2.0)
    simulate(graph, load_platform("dgx-a100", 16), COLLECTIVES)
    assert len(made) == 4, "other times and another platform are other questions"
    for one, options in zip(told, asked, strict=True):
        assert_same(one, simulate(graph, platform, COLLECTIVES, **options, fold=False))
