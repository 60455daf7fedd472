"""Measured collectives on platforms whose links were edited."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from trioflow.base.yaml_files import read_yaml
from trioflow.costmodel.choices import find_collectives, load_collectives
from trioflow.costmodel.collectives.model import wire_factor
from trioflow.hardware.machine import Platform, Routing
from trioflow.hardware.platform import SHIPPED, list_platforms, load_platform
from trioflow.network.collectives import RelinkedCollectives, scale_to_links
from trioflow.prediction.assembly import choose_collectives, doubt_collectives
from trioflow.prediction.question import Options

LARGE_BYTES = 1 << 28


def edit(tmp_path: Path, shipped: str, ranks: int | None = None, **changes: object) -> Platform:
    content = read_yaml(SHIPPED / f"{shipped}.yaml")
    path = tmp_path / "edited.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return load_platform(path, ranks)


def scale_inside(name: str, factor: float) -> dict[str, object]:
    topology = read_yaml(SHIPPED / f"{name}.yaml")["topology"]
    topology["inside"]["bandwidth_bytes_per_s"]["value"] *= factor
    return {"topology": topology}


@pytest.mark.parametrize("name", list_platforms())
def test_shipped_platforms_take_their_measurements_as_they_are(name: str) -> None:
    platform = load_platform(name, 2)
    path = find_collectives(platform)
    if path is not None:
        cost = load_collectives(path)
        held = scale_to_links(cost, platform)
        if held is not cost:  # measured on an older GPU's node, and scaled by the rate of the links
            assert isinstance(held, RelinkedCollectives) and held.bandwidth == 2


def test_a_degraded_link_slows_what_was_measured_and_is_never_exceeded(tmp_path: Path) -> None:
    whole = load_platform("a100x4-nvlink")
    link = whole.links[0]
    entry = {"from": link.source, "to": link.target, "factor": {"value": 0.51, "source": "a test"}}
    slow = edit(tmp_path, "a100x4-nvlink", degraded=[entry])
    before, after = choose_collectives(whole), choose_collectives(slow)
    assert isinstance(after, RelinkedCollectives)
    told, was = (one.time_s("all_reduce", 4, LARGE_BYTES) for one in (after, before))
    rate = wire_factor("all_reduce", 4) * LARGE_BYTES / told.time_s
    assert rate < 0.51 * link.bandwidth_bytes_per_s
    assert told.confidence == "uncalibrated"
    assert told.low_s <= was.time_s < told.time_s <= told.high_s
    (warning,) = doubt_collectives(after, slow)
    assert "0.51 times the bandwidth" in warning and "no measurement backs" in warning
    small = [one.time_s("all_reduce", 4, 8).time_s for one in (after, before)]
    assert small[0] == pytest.approx(small[1], rel=0.01)


@pytest.mark.parametrize("factor", [0.6, 10.0])
@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("name", ["dgx-h100", "our-h100"])
def test_other_links_inside_a_node_count_whatever_the_platform_is_called(
    tmp_path: Path, name: str, ranks: int, factor: float
) -> None:
    edited = edit(tmp_path, "dgx-h100", ranks, name=name, **scale_inside("dgx-h100", factor))
    cost = choose_collectives(edited)
    assert isinstance(cost, RelinkedCollectives)
    assert cost.bandwidth == pytest.approx(factor)
    whole = choose_collectives(load_platform("dgx-h100", ranks))
    times = [one.time_s("all_gather", 8, LARGE_BYTES).time_s for one in (cost, whole)]
    assert times[0] / times[1] == pytest.approx(1 / factor, rel=0.15)


def test_one_slow_link_inside_one_of_many_nodes_counts() -> None:
    whole = load_platform("dgx-h100", 64)
    place = next(place for place, link in enumerate(whole.links) if link.source == "node5-nvswitch0")
    slow = list(whole.links)
    slow[place] = slow[place]._replace(bandwidth_bytes_per_s=slow[place].bandwidth_bytes_per_s / 4)
    cost = choose_collectives(replace(whole, links=tuple(slow)))
    assert isinstance(cost, RelinkedCollectives) and cost.bandwidth == 0.25


def test_slower_hops_and_failed_links_count_too() -> None:
    whole = load_platform("dgx1-v100")
    late = tuple(link._replace(latency_s=link.latency_s + 1e-6) for link in whole.links)
    cost = choose_collectives(replace(whole, links=late))
    assert isinstance(cost, RelinkedCollectives) and cost.hop_s >= 1e-6
    assert cost.time_s("all_reduce", 8, 8).time_s > 10e-6
    ends = frozenset({(whole.links[0].source, whole.links[0].target)})
    rerouted = choose_collectives(replace(whole, routing=Routing(failed=ends)))
    assert isinstance(rerouted, RelinkedCollectives)


def test_links_between_nodes_leave_what_was_measured_inside_alone() -> None:
    whole = load_platform("dgx-h100", 16)
    slow = tuple(
        link._replace(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 2)
        if "leaf" in link.source + link.target
        else link
        for link in whole.links
    )
    assert slow != whole.links
    assert not isinstance(choose_collectives(replace(whole, links=slow)), RelinkedCollectives)


def test_collectives_of_another_machine_are_told() -> None:
    platform = load_platform("h100x8-nvlink")
    for named, said in (("a100x4-nvlink", True), ("h100x8-nvlink", False)):
        options = Options(collectives=named)
        cost = choose_collectives(platform, options)
        told = doubt_collectives(cost, platform, options)
        assert any(f"measured on {named}" in text for text in told) == said
