"""Collectives measured over whole nodes: the public figure, what ships of it, and the times it gives."""

import math
import os
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.costmodel.collectives.between_nodes import NODES_FILE, NodeCurve, find_between_nodes
from trioflow.costmodel.collectives.platform import load_platform_collectives
from trioflow.costmodel.operators.model import SHIPPED_MODELS
from trioflow.datasets.catalogue import NODE_BANDWIDTHS, load_catalogue
from trioflow.hardware.platform import load_platform
from trioflow.network.across_nodes import NodeGroups
from trioflow.network.routing import Router
from trioflow_evaluation.fits.collectives import (
    NODE_RATES,
    NODES_PLATFORM,
    SLOW_NODES,
    build_between_nodes,
    name_network,
    read_node_bandwidths,
)

SIZE = 256_000_000


@pytest.mark.parametrize("name", [NODES_PLATFORM, SLOW_NODES])
def test_what_ships_is_what_the_jobs_measured(name, tmp_path):
    mirror = os.environ.get("TRIOFLOW_DATA_MIRROR")
    if not mirror or not load_catalogue().held_files(mirror, NODE_BANDWIDTHS):
        pytest.skip("the public runs are not at hand")
    built = build_between_nodes(mirror, tmp_path / NODES_FILE, name)
    assert built.read_bytes() == (SHIPPED_MODELS / name / NODES_FILE).read_bytes()


def test_jobs_are_told_apart_by_what_a_step_of_their_rings_takes(tmp_path):
    """Two jobs on the fast network, one on the slow one, one without NVLink, one on a node."""
    file = tmp_path / load_catalogue().select_files(NODE_BANDWIDTHS)[0].key
    file.parent.mkdir(parents=True)
    with pytest.raises(InputError, match="no runs of nanotron"):
        read_node_bandwidths(tmp_path, NODES_PLATFORM)
    jobs = [(1, 250.0), (16, 120.0), (16, 130.0), (16, 27.0), (16, 20.0)]
    table = pd.DataFrame(jobs, columns=["nodes", "AllGather (GB/s)"])
    for names in NODE_RATES.values():
        table[names[1]] = table["AllGather (GB/s)"]
        table[names[0]] = [250.0, 250.0, 250.0, 250.0, 42.0]
    table.to_csv(file, index=False)
    wire_bytes = 256e6 * 127 / 128
    for name, rate in ((NODES_PLATFORM, 125e9), (SLOW_NODES, 27e9)):
        found = read_node_bandwidths(tmp_path, name)
        assert found.curves["all_gather"].nodes == (1, 16)
        assert found.curves["all_gather"].time_s[1] == pytest.approx(wire_bytes / rate, rel=1e-5)
        assert found.curves["all_reduce"].time_s[1] == pytest.approx(
            2 * wire_bytes / rate, rel=1e-5
        )
    assert [name_network(nodes, 42.0 if rate == 20 else 250.0, rate) for nodes, rate in jobs] == [
        "one node", "fast", "fast", "slow", "no NVLink",
    ]  # fmt: skip
    table.drop(columns="AllReduce (GB/s)").to_csv(file, index=False)
    with pytest.raises(InputError, match="no column 'AllReduce"):
        read_node_bandwidths(tmp_path, NODES_PLATFORM)


@cache
def load_cluster(name=SLOW_NODES):
    platform = load_platform(name, 512)
    path = SHIPPED_MODELS / str(platform.node_collectives) / "collectives.json"
    return platform, load_platform_collectives(path), Router(platform.links)


def plan(collective, size, nodes, per_node=8, measured=None):
    groups = NodeGroups(*load_cluster())
    if measured is not None:
        groups._measured = measured
    group = tuple(8 * node + place for node in range(nodes) for place in range(per_node))
    assert groups.holds(group)
    return groups.plan(collective, size, group).time


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_measured_node_counts_are_met_and_left_out_ones_held_by_the_band(collective):
    measured = find_between_nodes(SLOW_NODES)
    curve = measured.curves[collective]
    errors = []
    for place, nodes in enumerate(curve.nodes[1:], start=1):
        found = plan(collective, SIZE, nodes)
        assert found.time_s == pytest.approx(curve.time_s[place], rel=1e-6)
        assert found.low_s <= 1.01 * curve.low_s[place] or collective == "all_reduce"
        assert found.high_s >= 0.99 * curve.high_s[place]
        assert found.confidence == "interpolated"
        if 1 < place < len(curve.nodes) - 1:
            kept = [
                tuple(v for n, v in enumerate(values) if n != place)
                for values in (curve.nodes, curve.time_s, curve.low_s, curve.high_s)
            ]
            cut = replace(measured, curves={**measured.curves, collective: NodeCurve(*kept)})
            left_out = plan(collective, SIZE, nodes, measured=cut)
            errors.append(abs(left_out.time_s / curve.time_s[place] - 1))
            assert left_out.low_s <= curve.time_s[place] <= left_out.high_s
    assert sum(errors) / len(errors) < 0.2


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
def test_times_grow_with_size_nodes_and_ranks_sharing_a_card(collective):
    for nodes, per_node in ((2, 1), (4, 8), (64, 2)):
        times = [plan(collective, size, nodes, per_node) for size in (1000, 10**6, SIZE, 10**9)]
        assert all(a.time_s < b.time_s for a, b in pairwise(times))
        assert all(one.low_s <= one.time_s <= one.high_s for one in times)
        more = plan(collective, SIZE, min(2 * nodes, 64), per_node)
        assert more.time_s >= times[2].time_s
    assert plan(collective, SIZE, 8, 4).confidence == "extrapolated"


def test_what_was_measured_with_one_size_is_a_network_for_all() -> None:
    """A gather's hops cost as much whatever they carry; a tree's all-reduce grows with its bytes."""
    assert 0.4 < plan("all_gather", 17 * 10**6, 2).time_s / plan("all_gather", SIZE, 2).time_s < 0.7
    assert plan("all_gather", 5 * 10**6, 64).time_s > 0.8 * plan("all_gather", SIZE, 64).time_s
    measured = find_between_nodes(NODES_PLATFORM)
    for time_s, least, most in ((3e-3, 0.0, 0.25), (10e-3, 0.85, 1.0)):  # a tree's, a ring's
        curve = NodeCurve((1, 16), *((1e-3, time_s) for _ in range(3)))
        cut = replace(measured, curves={**measured.curves, "all_reduce": curve})
        whole, part = (plan("all_reduce", size, 16, measured=cut) for size in (SIZE, SIZE // 16))
        assert whole.time_s == pytest.approx(time_s) and least < part.time_s / time_s < most
    small = plan("all_gather", SIZE // 16, 8)
    assert small.high_s / small.low_s > plan("all_gather", SIZE, 8).high_s / plan("all_gather", SIZE, 8).low_s  # fmt: skip


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_the_fast_network_is_met_but_for_what_its_nodes_gather_faster_than_a_measured_one(
    collective,
):
    """In a loop of collectives, as they were measured, while nobody trains."""
    platform, *others = load_cluster(NODES_PLATFORM)
    groups = NodeGroups(replace(platform, corrections={}), *others)
    curve = find_between_nodes(NODES_PLATFORM).curves[collective]
    for nodes, time_s in zip(curve.nodes[1:], curve.time_s[1:], strict=True):
        group = tuple(range(8 * nodes))
        assert groups.holds(group)
        assert groups.plan(collective, SIZE, group).time.time_s == pytest.approx(time_s, rel=0.16)


def test_a_message_between_nodes_takes_a_step_more_than_the_links():
    groups = NodeGroups(*load_cluster())
    groups.holds((0, 8))
    time = groups.plan("send", 10**8, (0, 8)).time
    assert 10**8 / 50e9 + 20e-6 < time.time_s < 2 * 10**8 / 50e9
    assert "as was measured on p5-h100-slow" in groups.plan("send", 10**8, (0, 8)).warning


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_more_nodes_than_were_measured_are_extrapolated_and_wider_than_held_out_ones(collective):
    """Each measured count is told from half as many nodes; the worst miss of those is what a doubling may cost."""
    measured = find_between_nodes(SLOW_NODES)
    curve, missed = measured.curves[collective], []
    for last in range(2, len(curve.nodes)):
        kept = NodeCurve(
            *(v[:last] for v in (curve.nodes, curve.time_s, curve.low_s, curve.high_s))
        )
        cut = replace(measured, curves={**measured.curves, collective: kept})
        found = plan(collective, SIZE, curve.nodes[last], measured=cut)
        assert found.confidence == "extrapolated"
        missed.append(abs(math.log(curve.time_s[last] / found.time_s)))
    most = curve.nodes[-1]
    inside = plan(collective, SIZE, most)
    assert inside.confidence == "interpolated" and max(missed) > 0.05
    for nodes in (most + 1, 2 * most, 4 * most):
        group = tuple(range(8 * nodes))
        platform = load_platform(SLOW_NODES, 8 * nodes)
        beyond = NodeGroups(platform, load_cluster()[1], Router(platform.links)).plan(
            collective, SIZE, group
        )
        assert (
            beyond.time.confidence == "extrapolated"
            and f"over up to {most} nodes" in beyond.warning
        )
        doublings = max(math.log2(nodes / most), 1)
        assert math.log(beyond.time.high_s / beyond.time.time_s) >= 0.99 * doublings * max(missed)
        assert beyond.time.high_s / beyond.time.time_s > inside.high_s / inside.time_s


def test_clusters_that_nobody_measured_stay_with_their_links():
    assert find_between_nodes("dgx-h100") is None and find_between_nodes("") is None
