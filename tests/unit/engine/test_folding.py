"""Folded simulation of real plans, and of what keeps it from being exact.

Collectives as single events: only where that is exact, to rounding.

Tasks that would not fit into memory are refused before they are made.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from oracles.fold_tables import fold_tables
from oracles.plain_engine import PlainFairShareNetwork
from trioflow.base.errors import InputError, SimulationError
from trioflow.costmodel.collectives.model import load_collective_model
from trioflow.costmodel.features import SHIPPED_MODELS, OperatorModel
from trioflow.costmodel.operators.model import load_operator_model
from trioflow.costmodel.uncertainty import Uncertainty
from trioflow.engine.folding import fold as folding
from trioflow.engine.folding.fold import TooLargeError, check_division, check_expansion, estimate_bytes, refine
from trioflow.engine.simulate import SimulationOptions, _simulate, simulate
from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.platform import BUILDERS, load_platform
from trioflow.hardware.topologies.nodes import build_rail_optimised
from trioflow.network.networks import NETWORKS
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder, load_task_graph
from trioflow.prediction.assembly import predict
from trioflow.prediction.step import simulate_interval
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
    for key in (
        "step_time_s",
        "busy_s",
        "compute_s",
        "communication_s",
        "per_rank",
        "ranks",
        "exposed_communication_s",
        "confidence",
        "warnings",
    ):
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
)
def test_real_plans_fold_on_real_platforms(
    degrees: dict[str, Any], platform: str, collectives: Any, engine: str, trace: Trace, model: OperatorModel
) -> None:
    graph = build(trace, model, **degrees)
    machine = load_platform(platform, graph.metadata.ranks)
    once = simulate(graph, machine, collectives, engine=engine)
    assert once.summary.folded, once.summary.unfolded_reason
    every = simulate(graph, machine, collectives, engine=engine, fold=False)
    assert_same(once, every)
    assert once.summary.events < every.summary.events


def make_units(ranks: int, **changes: Any) -> Platform:
    """Two nodes of two ranks below each set of leaves."""
    links = build_rail_optimised(
        ranks,
        ranks_per_node=2,
        inside=lambda n: BUILDERS["switch"](n, 450e9, 3e-7),
        attach_bandwidth_bytes_per_s=63e9,
        attach_latency_s=1e-6,
        nic_bandwidth_bytes_per_s=5e9,
        nic_latency_s=1e-6,
        spine_latency_s=1e-7,
        nodes_per_leaf=2,
        **changes,
    )
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
    degrees: dict[str, Any], changes: dict[str, Any], classes: int, engine: str, trace: Trace, model: OperatorModel
) -> None:
    """The ring leaves a set at its last node, where all nodes send to the next stage."""
    graph = build(trace, model, **degrees)
    machine = make_units(graph.metadata.ranks, **changes)
    once = simulate(graph, machine, engine=engine)
    assert once.summary.folded, once.summary.unfolded_reason
    assert once.summary.executed_ranks == classes
    assert_same(once, simulate(graph, machine, engine=engine, fold=False))
    uplinks = {k: v for k, v in once.summary.link_bytes.items() if "spine" in k}
    assert any(uplinks.values())


@pytest.mark.parametrize("fold", [True, False])
def test_the_ends_of_an_interval_are_simulations_of_their_own(trace: Trace, model: OperatorModel, fold: bool) -> None:
    """They are made ready together with the nominal one, and say what each alone says."""
    graph = build(trace, model, data=2, tensor=2, pipeline=2, schedule="1f1b")
    machine = load_platform("dgx-h100", 8)
    graph.metadata = replace(graph.metadata, uncertainty=Uncertainty((0.7, 1.6)))
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
    monkeypatch.setattr("trioflow.parallel.task_graph.Fold.expand", None)
    result = simulate(graph, load_platform("h100x8-nvlink", 4))
    assert result.summary.folded and len(result.summary.per_rank) == 4
    assert graph.fold is not None
    assert "compute" in graph.kinds
    with pytest.raises(TypeError):
        _ = result.timeline


def test_a_saved_graph_is_simulated_with_all_its_ranks(trace: Trace, model: OperatorModel, tmp_path: Any) -> None:
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
            rank,
            "communication",
            "collective",
            "all_reduce",
            message_bytes=10**6,
            match_id=first,
            group=f"{first},{first + 1}",
            after=[done],
        )
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
    assert "the network circuit is not known" in reason(alike, network="circuit")


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
    found = refine(flow, link, np.zeros(4, dtype=np.int64), np.array([1.0] * 4 + [2.0, 9.0]))
    assert found is not None
    assert len(set(found.flow_class.tolist())) == 1
    own, shared = found.link_class[0], found.link_class[4]
    assert found.link_class.tolist() == [own] * 4 + [shared, -1]
    flows, links, times = found.count_classes()
    counted = dict(zip(links.tolist(), times.tolist(), strict=True))
    assert counted == {own: 1, shared: 4} and set(flows.tolist()) == {found.flow_class[0]}
    # A wider link sets its flow apart, and the others from it.
    widths = np.array([1.0, 1.0, 1.0, 3.0, 2.0, 9.0])
    apart = refine(flow, link, np.zeros(4, dtype=np.int64), widths)
    assert apart is not None
    assert apart.flow_class[0] == apart.flow_class[1] == apart.flow_class[2] != apart.flow_class[3]


RANKS = 6
SWITCH = Platform("switch", Device("chip", "gpu", 10**9, {}), RANKS, tuple(BUILDERS["switch"](RANKS, 1000.0, 0.013)))


Step = tuple[str, tuple[int, ...], str, int, list[float]]


def make_graph(steps: Sequence[Step]) -> TaskGraph:
    """Collectives in streams, each after a task of its own length on every rank."""
    builder = TaskGraphBuilder()
    for number, (collective, group, stream, size, durations_s) in enumerate(steps):
        for rank in group:
            duration_s = durations_s[rank]
            done = builder.add(rank, "compute", "compute", "op", duration_s=duration_s)
            builder.add(
                rank,
                stream,
                "collective",
                collective,
                message_bytes=size,
                match_id=number,
                group=",".join(map(str, group)),
                after=[done],
            )
    return builder.build()


def compare(graph: TaskGraph, platform: Platform, **options: Any) -> int:
    """Check that single events change nothing but rounding, and return how many there were."""
    every = simulate(graph, platform, algorithms="ring", aggregate=False, **options)
    whole = simulate(graph, platform, algorithms="ring", **options)
    pd.testing.assert_frame_equal(every.timeline, whole.timeline, rtol=1e-12)
    assert every.summary.link_bytes == pytest.approx(whole.summary.link_bytes, rel=1e-12)
    assert every.summary.aggregated == 0
    assert (every.summary.confidence, every.summary.warnings) == (whole.summary.confidence, whole.summary.warnings)
    return int(whole.summary.aggregated)


EVEN = [0.0] * RANKS
ALL = tuple(range(RANKS))


@pytest.mark.parametrize("engine", ["reference", "compiled"])
def test_collectives_of_one_stream_are_single_events(engine: str) -> None:
    graph = make_graph([("all_reduce", ALL, "communication", 1000 + i, EVEN) for i in range(4)])
    assert compare(graph, SWITCH, engine=engine) == 4
    whole = simulate(graph, SWITCH, algorithms="ring", engine=engine).summary
    assert whole.events == 2 * len(graph.tasks)
    every = simulate(graph, SWITCH, algorithms="ring", aggregate=False, engine=engine).summary
    # 4 collectives of 2 (6 - 1) rounds of 6 messages, each of which starts and ends.
    assert every.events == 2 * len(graph.tasks) + 2 * 4 * 10 * 6


@pytest.mark.parametrize("other", ["collective", "message"])
def test_other_traffic_on_the_links_forbids_it(other: str) -> None:
    both: list[Step] = [("all_reduce", ALL, "communication", 3000, EVEN)]
    if other == "collective":
        both.append(("all_reduce", ALL, "other", 3000, EVEN))
    graph = make_graph(both)
    if other == "message":
        builder = TaskGraphBuilder()
        for rank in ALL:
            builder.add(
                rank, "communication", "collective", "all_reduce", message_bytes=3000, match_id=0, group="0,1,2,3,4,5"
            )
        for rank, kind, peer in ((0, "send", 1), (1, "recv", 0)):
            builder.add(rank, kind, kind, kind, message_bytes=9000, match_id=1, peer=peer)
        graph = builder.build()
    assert compare(graph, SWITCH) == 0
    alone = make_graph(both[:1])
    slower, undisturbed = (simulate(one, SWITCH, algorithms="ring").summary.step_time_s for one in (graph, alone))
    assert slower > 1.5 * undisturbed


def test_a_slower_link_forbids_it() -> None:
    """Messages of a round end at different times then, and their order is found one by one."""
    graph = make_graph([("all_reduce", ALL, "communication", 3000, EVEN)])
    first, *others = SWITCH.links
    for changed in (first._replace(bandwidth_bytes_per_s=900.0), first._replace(latency_s=0.02)):
        assert compare(graph, replace(SWITCH, links=(changed, *others))) == 0


def test_networks_of_others_run_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_graph([("all_reduce", ALL, "communication", 3000, EVEN)])

    class Own(PlainFairShareNetwork):
        pass

    monkeypatch.setattr("trioflow.network.networks.NETWORKS", {**NETWORKS, "own": Own})
    assert compare(graph, SWITCH, network="own") == 0


def test_without_algorithms_nothing_is_said_of_single_events() -> None:
    graph = make_graph([("all_reduce", ALL, "communication", 3000, EVEN)])
    plain = simulate(graph, SWITCH).summary
    assert plain.aggregated is None and not {"aggregated", "low_s"} & plain.to_dict().keys()
    told = simulate_interval(graph, SWITCH, algorithms="ring").summary
    assert (told.aggregated, told.low_s) == (1, told.step_time_s)
    with pytest.raises(InputError, match="unknown algorithm 'rings'"):
        simulate(graph, SWITCH, algorithms={"all_reduce": "rings"})


EIGHT = 8


@pytest.fixture
def graph() -> TaskGraph:
    model = load_operator_model(SHIPPED_MODELS / "cpu2-gloo" / "operators.json")
    made = extrapolate(load_trace("gpt2-tiny-b8"), make_plan(data=EIGHT), model, batch=8 * EIGHT)
    assert made.fold is not None
    return made


def test_the_estimate_is_above_what_the_tables_of_all_ranks_take(graph: TaskGraph) -> None:
    assert graph.fold is not None
    said_bytes = estimate_bytes(graph.fold, graph.fold.task_total)
    taken = graph.tasks.memory_usage(deep=True).sum() + graph.dependencies.memory_usage().sum()
    assert taken < said_bytes < 4 * taken


def test_what_does_not_fit_is_told_with_ranks_tasks_and_memory(graph: TaskGraph) -> None:
    fold = graph.fold
    assert fold is not None
    needed_bytes = estimate_bytes(fold, fold.task_total)
    check_expansion(fold, "asked for", available_bytes=needed_bytes)
    told = rf"all {EIGHT} ranks are needed \(asked for\): [\d.]+ k tasks take some [\d.]+ MB .*fewer ranks"
    with pytest.raises(TooLargeError, match=told):
        check_expansion(fold, "asked for", available_bytes=needed_bytes - 1)
    check_division(fold, np.arange(EIGHT), "they differ", available_bytes=needed_bytes)
    with pytest.raises(TooLargeError, match=f"1 of {EIGHT} ranks"):
        check_division(fold, fold.class_of, "they differ", available_bytes=1.0)


def test_a_simulation_that_would_not_fit_ends_before_its_tasks_are_made(
    graph: TaskGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "find_available_bytes", lambda: 1e5)
    platform = load_platform("h100x8-nvlink", EIGHT)
    result = simulate(graph, platform)
    assert result.summary.folded, "what is executed once fits"
    with pytest.raises(TooLargeError, match="a timeline of them is asked for"):
        _ = result.timeline
    with pytest.raises(TooLargeError, match=rf"all {EIGHT} ranks .*not asked for"):
        simulate(graph, platform, fold=False)
    slow = [1.0 + rank for rank in range(EIGHT)]
    with pytest.raises(TooLargeError, match="no two ranks do the same"):
        simulate(graph, platform, compute_scale=slow)
    assert graph.fold is not None, "nothing was expanded"
    assert len(graph.tasks), "whoever asks for the tables gets them"
    assert not simulate(graph, platform, fold=False).summary.folded, "they are there already"


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_groups_of_a_family_may_send_through_a_switch_where_the_first_does_not(trace, sharding):
    """Nodes of three ranks: some groups lie in one node, others over two and send through the switch."""
    machine = replace(load_platform("dgx-a100", 8), ranks_per_node=3)
    asked = {"data": 4, "tensor": 2, "sharding": sharding, "collectives": "closed-form"}
    asked["algorithms"] = {"all_reduce": "hierarchical:ring+in_network"}
    once, every = (predict(trace, platform=machine, fold=fold, **asked).step_time_s for fold in (True, False))
    assert once == every
