"""The machines that ship: what they are made of, and that their numbers agree with each other."""

import networkx as nx
import pytest
import yaml
from trioflow.base.yaml_files import read_yaml
from trioflow.hardware import machine
from trioflow.hardware.machine import Platform, find_device, validate_sheet
from trioflow.hardware.platform import SHIPPED, list_platforms, load_platform, validate_platform
from trioflow.network.networks import FlowShape
from trioflow.network.routing import Router

DGX = {
    "dgx-a100": (25e9, 20),
    "dgx-h100": (50e9, 32),
    "dgx-h200": (50e9, 32),
    "dgx-b200": (50e9, 32),
    "dgx-b300": (100e9, 32),
}
"""NIC's rate [bytes/s], 200 or 400 Gb/s, and nodes of a scalable unit."""
LANE_GT_PER_S = {"4.0": 16e9, "5.0": 32e9}


def route(platform: Platform, one: int, other: int) -> list[str]:
    routes = Router(platform.links)
    indices = routes.route(f"rank{one}", f"rank{other}")
    return [platform.links[index].target for index in indices]


def test_what_ships_keeps_to_its_schema() -> None:
    """Answers read these files without the check that a user's own go through."""
    for file in sorted(SHIPPED.glob("*.yaml")):
        validate_platform(read_yaml(file), file)
    for file in sorted(machine.SHIPPED.glob("*.yaml")):
        validate_sheet(read_yaml(file), file)


def test_the_machines_asked_for_ship() -> None:
    assert set(list_platforms()) >= {"a40x2-pcie", "a100x4-nvlink", "h100x8-nvlink", "dgx1-v100", *DGX}
    for name in list_platforms():
        assert load_platform(name, 2).name == name


@pytest.mark.parametrize("name", ["a40x2-pcie", "a100x4-nvlink", "h100x8-nvlink", "dgx1-v100", *DGX])
def test_gpus_come_from_sheets_and_no_link_is_called_measured(name: str) -> None:
    content = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    assert set(content["device"]) == {"sheet"}
    platform = load_platform(name, 2)
    built = [key for key in platform.sources if key.startswith(("topology.", "host."))]
    measured = set(built) - set(platform.unmeasured)
    assert set(platform.unmeasured) <= set(built)
    assert all(key.startswith("host.launch_") for key in measured), "only hosts show in profiles"
    assert all(len(source) > 20 for source in platform.sources.values())


@pytest.mark.parametrize("name", ["a100x4-nvlink", "h100x8-nvlink", "dgx1-v100", *DGX])
def test_nvlink_adds_up_to_the_device_s_sheet(name: str) -> None:
    """What leaves a GPU over NVLink, per direction, is half of what its sheet says of both."""
    platform = load_platform(name, 8 if load_platform(name, 2).ranks_per_node else None)
    sheet = find_device(platform.device.name)
    leaving = sum(x.bandwidth_bytes_per_s for x in platform.links if x.source == "rank0")
    assert sheet.numbers["nvlink.bandwidth_bytes_per_s"] == 2 * leaving


def lanes_bytes_per_s(version: str) -> float:
    """16 lanes, 128 of 130 bits carry data."""
    return 16 * LANE_GT_PER_S[version] * 128 / 130 / 8


def test_pcie_rates_follow_from_lanes_and_clock() -> None:
    pair = load_platform("a40x2-pcie")
    for link in pair.links:
        assert link.bandwidth_bytes_per_s == pytest.approx(lanes_bytes_per_s("4.0"), rel=1e-3)
    for name, version in (("dgx-a100", "4.0"), ("dgx-h100", "5.0"), ("dgx-h200", "5.0"), ("dgx-b200", "5.0")):
        links = {(x.source, x.target): x for x in load_platform(name, 16).links}
        attach = links["rank3", "node0-nic3"].bandwidth_bytes_per_s
        assert attach == pytest.approx(lanes_bytes_per_s(version), rel=1e-3)


@pytest.mark.parametrize("name", DGX)
def test_clusters_have_as_many_nodes_as_the_ranks_need(name: str) -> None:
    rate, unit = DGX[name]
    one = load_platform(name, 8)
    assert len(one.links) == 16 and one.ranks_per_node == 8, "a node needs no InfiniBand"
    for ranks in (9, 16, 8 * unit, 8 * unit + 8):
        platform = load_platform(name, ranks)
        nodes, units = -(-ranks // 8), -(-ranks // (8 * unit))
        nics = [x for x in platform.links if "nic" in x.source and "leaf" in x.target]
        assert len(nics) == ranks
        assert {x.bandwidth_bytes_per_s for x in nics} == {rate}
        names = {x.source for x in platform.links}
        assert sum("nvswitch" in node for node in names) == nodes
        assert sum("leaf" in node for node in names) == 8 * units
        assert nx.is_strongly_connected(nx.DiGraph([(x.source, x.target) for x in platform.links]))


def test_rails_are_taken_and_a_node_is_left_over_them_only() -> None:
    platform = load_platform("dgx-h100", 16)
    assert route(platform, 1, 2) == ["node0-nvswitch0", "rank2"]
    assert route(platform, 1, 9) == ["node0-nic1", "leaf0-1", "node1-nic1", "rank9"]
    other = route(platform, 1, 10)
    assert other == ["node0-nic1", "leaf0-1", "spine0", "leaf0-2", "node1-nic2", "rank10"]
    shape = FlowShape((("rank1", "rank9"),), Router(platform.links))
    assert shape.latencies_s == pytest.approx([2.7e-6]), "what NCCL assumes for a network hop"


def test_dgx1_reaches_every_gpu_over_at_most_one_other() -> None:
    platform = load_platform("dgx1-v100")
    hops = {len(route(platform, a, b)) for a in range(8) for b in range(8) if a != b}
    assert hops == {1, 2}
    assert {x.bandwidth_bytes_per_s for x in platform.links} == {25e9, 50e9}
