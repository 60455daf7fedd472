from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from trioflow import provenance
from trioflow.errors import PlatformError
from trioflow.hardware.platform import (
    Device,
    Link,
    Platform,
    list_platforms,
    load_platform,
    save_platform,
)

REPOSITORY = Path(__file__).parents[3]


def sourced(value: object) -> dict[str, object]:
    return {"value": value, "source": "a test"}


def describe() -> dict[str, Any]:
    """Return the content of a valid file."""
    return {
        "name": "two",
        "device": {
            "name": "chip", "kind": "cpu", "memory_bytes": sourced(1e9),
            "peak_flop_per_s": {"fp32": sourced(1e12)},
        },
        "ranks": 2,
        "links": [
            {"from": "rank0", "to": "rank1", "bandwidth_bytes_per_s": sourced(1e9), "latency_s": sourced(1e-6)},
            {"from": "rank1", "to": "rank0", "bandwidth_bytes_per_s": sourced(2e9), "latency_s": sourced(0)},
        ],
        "communication_on_compute_stream": True,
    }  # fmt: skip


def write(folder: Path, content: object) -> Path:
    path = folder / "two.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_explicit_links_are_read(tmp_path: Path) -> None:
    content = describe()
    content["host"] = {"tensor_parallel_operator_s": sourced(2e-5)}
    content["collectives"] = "gloo 2.13.0"
    platform = load_platform(write(tmp_path, content))
    assert platform.links == (Link("rank0", "rank1", 1e9, 1e-6), Link("rank1", "rank0", 2e9, 0.0))
    assert platform.device == Device("chip", "cpu", 1_000_000_000, {"fp32": 1e12}, None)
    assert platform.communication_on_compute_stream
    assert platform.host == {"tensor_parallel_operator_s": 2e-5}
    assert platform.collectives == "gloo 2.13.0"
    assert platform.sources["links.rank0->rank1.latency_s"] == "a test"


@pytest.mark.parametrize(
    ("name", "ranks", "bf16", "memory_bandwidth", "link"),
    [
        ("a40x2-pcie", 2, 149.7e12, 696e9, 31.5e9),
        ("a100x4-nvlink", 4, 312e12, 2039e9, 300e9),
        ("h100x8-nvlink", 8, 989e12, 3350e9, 450e9),
    ],
)
def test_shipped_platforms_hold_the_data_sheets(
    name: str, ranks: int, bf16: float, memory_bandwidth: float, link: float
) -> None:
    platform = load_platform(name)
    assert platform.ranks == ranks
    assert platform.device.peak_flop_per_s["bf16"] == bf16
    assert platform.device.memory_bandwidth_bytes_per_s == memory_bandwidth
    assert {entry.bandwidth_bytes_per_s for entry in platform.links} == {link}
    assert "data sheet" in platform.sources["device.peak_flop_per_s.bf16"]
    latency_sources = [text for key, text in platform.sources.items() if key.endswith("latency_s")]
    assert latency_sources and all("never measured" in text for text in latency_sources)


def test_fewer_ranks_keep_the_machine() -> None:
    whole, part = load_platform("h100x8-nvlink"), load_platform("h100x8-nvlink", ranks=3)
    assert part.ranks == 3
    assert part.links == whole.links


@pytest.mark.parametrize("name", ["a40x2-pcie", "a100x4-nvlink", "h100x8-nvlink"])
def test_saved_platform_reads_back_equal_and_same_bytes(name: str, tmp_path: Path) -> None:
    platform = load_platform(name)
    save_platform(platform, tmp_path / "one.yaml")
    again = load_platform(tmp_path / "one.yaml")
    assert dataclasses.replace(again, sources={}) == dataclasses.replace(platform, sources={})
    first = platform.links[0]
    key = f"links.{first.source}->{first.target}.latency_s"
    assert again.sources[key] == platform.sources["topology.latency_s"]
    save_platform(again, tmp_path / "two.yaml")
    assert (tmp_path / "one.yaml").read_bytes() == (tmp_path / "two.yaml").read_bytes()


def test_one_source_may_speak_for_all_keys_below_it(tmp_path: Path) -> None:
    platform = Platform(
        "this-machine", Device("chip", "cpu", 10**9, {"fp32": 1e12}), 2,
        (Link("rank0", "rank1", 1e9, 1e-5), Link("rank1", "rank0", 1e9, 1e-5)),
        host={"tensor_parallel_operator_s": 1e-5},
        sources={"device": "guessed", "links": "measured sends", "host": "measured"},
    )  # fmt: skip
    save_platform(platform, tmp_path / "this.yaml")
    again = load_platform(tmp_path / "this.yaml")
    assert again.sources["links.rank1->rank0.bandwidth_bytes_per_s"] == "measured sends"
    without = dataclasses.replace(platform, sources={"device": "guessed", "links": "measured"})
    with pytest.raises(PlatformError, match=r"host\.tensor_parallel_operator_s.*no source"):
        save_platform(without, tmp_path / "other.yaml")
    assert not (tmp_path / "other.yaml").exists()


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    text = yaml.safe_dump(describe()).replace("value: 1000000000.0", "value: 312e12")
    assert load_platform(write(tmp_path, text)).device.memory_bytes == 312 * 10**12


def test_any_number_of_ranks_where_the_file_says_so(tmp_path: Path) -> None:
    content = describe()
    del content["links"]
    content["ranks"] = "any"
    content["topology"] = {
        "builder": "ring", "bandwidth_bytes_per_s": sourced(1e9), "latency_s": sourced(0.0),
    }  # fmt: skip
    path = write(tmp_path, content)
    assert len(load_platform(path, ranks=16).links) == 32
    with pytest.raises(PlatformError, match="'any' is no number of ranks here"):
        load_platform(path)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(PlatformError) as caught:
        load_platform("a100x4")
    assert "did you mean a100x4-nvlink?" in str(caught.value)
    for name in list_platforms():
        assert name in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match=r"nowhere\.yaml: no such file"):
        load_platform(tmp_path / "nowhere.yaml")


def set_key(content: dict[str, Any], place: str, value: object) -> None:
    *path, last = place.split(".")
    for part in path:
        content = content[int(part) if isinstance(content, list) else part]
    content[last] = value


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("rank", 2, r"unknown key 'rank'; did you mean 'ranks'\? the keys are"),
        (
            "device.kind",
            "tpu",
            r"device\.kind: 'tpu' is not possible here; choose one of \['cpu', 'gpu'\]",
        ),
        ("device.memory_bytes", 1e9, r"device\.memory_bytes: 1000000000\.0 has no source; write"),
        ("device.memory_bytes", {"value": 1}, "device.memory_bytes: the key 'source' is missing"),
        ("links.0.latency_s", sourced(-1), r"links\.0\.latency_s\.value: -1 is too small"),
        ("links.0.bandwidth_bytes_per_s", sourced(0), r"bandwidth_bytes_per_s\.value: 0 is too"),
        ("links.0.bandwidth_bytes_per_s", sourced(float("nan")), "nan is not finite"),
        ("links.0.to", "rank0", r"links\.0: joins rank0 to itself"),
        ("links.1", None, r"links\.1: None is not of the type object"),
        ("ranks", 3, r"no link reaches rank2; name the 3 ranks rank0 to rank2"),
        ("ranks", 0, r"ranks: 0 is no number of ranks"),
        ("topology", {}, "exactly one of the keys 'links' and 'topology' is due"),
        ("host", {"Cost": sourced(1)}, "host: 'Cost' does not match"),
        ("communication_on_compute_stream", "yes", "'yes' is not of the type boolean"),
    ],
)
def test_errors_name_file_key_value_and_fix(
    place: str, value: object, message: str, tmp_path: Path
) -> None:
    content = describe()
    if place == "links.1":
        content["links"][1] = value
    else:
        set_key(content, place, value)
    path = write(tmp_path, content)
    with pytest.raises(PlatformError, match=message) as caught:
        load_platform(path)
    assert str(path) in str(caught.value)
    assert ";" in str(caught.value), "a fix is due"


def test_second_link_between_the_same_nodes_is_refused(tmp_path: Path) -> None:
    content = describe()
    content["links"].append(content["links"][0])
    with pytest.raises(PlatformError, match=r"links\.2: a second link from rank0 to rank1"):
        load_platform(write(tmp_path, content))


def test_only_the_tree_takes_bridges(tmp_path: Path) -> None:
    content = describe()
    del content["links"]
    content["topology"] = {
        "builder": "switch", "bandwidth_bytes_per_s": sourced(1e9), "latency_s": sourced(0.0),
        "ranks_per_bridge": sourced(2),
    }  # fmt: skip
    with pytest.raises(PlatformError, match="topology: 'ranks_per_bridge' is not possible here"):
        load_platform(write(tmp_path, content))
    content["topology"]["builder"] = "pcie_tree"
    with pytest.raises(PlatformError, match="the key 'bridge_bandwidth_bytes_per_s' is missing"):
        load_platform(write(tmp_path, content))


@pytest.mark.parametrize("ranks", [0, 9])
def test_ranks_beyond_the_machine_are_refused(ranks: int) -> None:
    with pytest.raises(PlatformError, match=f"{ranks} ranks were asked for"):
        load_platform("h100x8-nvlink", ranks=ranks)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not readable as YAML"), ("name: a\nname: b\n", "the key 'name' is written twice")],
)
def test_broken_yaml_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match=message):
        load_platform(write(tmp_path, text))


def test_schema_of_the_workflow_is_the_package_s_own() -> None:
    package = provenance.PACKAGE / "data" / "platform.schema.json"
    workflow = REPOSITORY / "workflow" / "schemas" / "platform.schema.json"
    assert package.read_bytes() == workflow.read_bytes()


def test_schema_is_closed_everywhere() -> None:
    schema = json.loads((provenance.PACKAGE / "data" / "platform.schema.json").read_text())
    todo, objects = [schema], 0
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            if node.get("type") == "object":
                objects += 1
                assert "additionalProperties" in node
            todo += node.values()
        elif isinstance(node, list):
            todo += node
    assert objects == 9
