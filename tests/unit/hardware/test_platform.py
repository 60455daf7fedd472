import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from trioflow.base import provenance
from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import SHIPPED, Device, Link, Routing, load_device
from trioflow.hardware.platform import describe_unmeasured, list_platforms, load_platform

REPOSITORY = Path(__file__).parents[3]


def sourced(value: object) -> dict[str, object]:
    return {"value": value, "source": "a test"}


def describe() -> dict[str, Any]:
    """Return the content of a valid file."""
    return {
        "name": "two",
        "device": {
            "name": "chip",
            "kind": "cpu",
            "memory_bytes": sourced(1e9),
            "peak_flop_per_s": {"fp32": sourced(1e12)},
        },
        "ranks": 2,
        "links": [
            {"from": "rank0", "to": "rank1", "bandwidth_bytes_per_s": sourced(1e9), "latency_s": sourced(1e-6)},
            {"from": "rank1", "to": "rank0", "bandwidth_bytes_per_s": sourced(2e9), "latency_s": sourced(0)},
        ],
        "communication_on_compute_stream": True,
    }


def write(folder: Path, content: object) -> Path:
    path = folder / "two.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_explicit_links_are_read(tmp_path: Path) -> None:
    content = describe()
    content["host"] = {"tensor_parallel_forward_s": sourced(2e-5)}
    content["collectives"] = "gloo 2.13.0"
    platform = load_platform(write(tmp_path, content))
    assert platform.links == (Link("rank0", "rank1", 1e9, 1e-6), Link("rank1", "rank0", 2e9, 0.0))
    assert platform.device == Device("chip", "cpu", 1_000_000_000, {"fp32": 1e12}, None)
    assert platform.communication_on_compute_stream
    assert platform.host == {"tensor_parallel_forward_s": 2e-5}
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


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    text = yaml.safe_dump(describe()).replace("value: 1000000000.0", "value: 312e9")
    assert load_platform(write(tmp_path, text)).device.memory_bytes == 312 * 10**9


def test_any_number_of_ranks_where_the_file_says_so(tmp_path: Path) -> None:
    content = describe()
    del content["links"]
    content["ranks"] = "any"
    content["topology"] = {"builder": "ring", "bandwidth_bytes_per_s": sourced(1e9), "latency_s": sourced(0.0)}
    path = write(tmp_path, content)
    assert len(load_platform(path, ranks=16).links) == 32
    with pytest.raises(PlatformError, match="'any' is not a number of ranks here"):
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


def with_topology(**topology: object) -> dict[str, Any]:
    content = describe()
    del content["links"]
    content["topology"] = topology
    return content


LINK = {"bandwidth_bytes_per_s": sourced(1e9), "latency_s": sourced(0.0)}
NVSWITCH = {"builder": "nvswitch", **LINK}


def ring(**more: Any) -> dict[str, Any]:
    """Return the content of a valid file: four ranks in a ring, both ways."""
    return {**with_topology(builder="ring", **LINK), "ranks": 4, **more}


def change(place: str, value: object) -> dict[str, Any]:
    """Return the content of a valid file with another value at a place."""
    content = inner = describe()
    *path, last = place.split(".")
    for part in path:
        inner = inner[int(part) if isinstance(inner, list) else part]
    inner[int(last) if isinstance(inner, list) else last] = value
    return content


def degrade(**entry: object) -> dict[str, Any]:
    content = with_topology(builder="switch", **LINK)
    content["topology"]["latency_s"] = {**sourced(1e-6), "measured": False}
    return {**content, "ranks": 3, "degraded": [{"from": "rank1", "to": "switch", **entry}]}


REFUSED = [
    (change("rank", 2), r"rank: unknown key 'rank'; did you mean ranks\?"),
    (change("device.kind", "tpu"), r"device\.kind: 'tpu' is not one of cpu, gpu"),
    (change("device.memory_bytes", 1e9), r"device\.memory_bytes: 1000000000\.0 has no source; write"),
    (change("device.memory_bytes", {"value": 1}), "device.memory_bytes: the key 'source' is missing"),
    (change("links.0.latency_s", sourced(-1)), r"links\.0\.latency_s\.value: -1 is below 0"),
    (change("links.0.bandwidth_bytes_per_s", sourced(0)), r"bandwidth_bytes_per_s\.value: 0 is not above 0"),
    (change("links.0.bandwidth_bytes_per_s", sourced(float("nan"))), "nan is not finite"),
    (change("links.0.to", "rank0"), r"links\.0: joins rank0 to itself"),
    (change("links.1", None), r"links\.1: None is not of type object"),
    (change("ranks", 3), r"no link reaches rank2; name the 3 ranks rank0 to rank2"),
    (change("ranks", 0), r"ranks: 0 is not a number of ranks"),
    (change("topology", {}), "exactly one of the keys 'links' and 'topology' is due"),
    (change("host", {"Cost": sourced(1)}), "host.Cost: unknown key 'Cost'"),
    (change("host", {"pipeline_microbatch_s": sourced(1)}), "did you mean pipeline_micro_batch_s"),
    (change("communication_on_compute_stream", "yes"), "'yes' is not of type boolean"),
    (
        with_topology(**{"builder": "ring", **LINK, "latency_s": sourced(-1)}),
        r"topology\.latency_s\.value: -1 is below 0",
    ),
    (
        with_topology(**{"builder": "ring", **LINK, "bandwidth_bytes_per_s": 5}),
        r"topology\.bandwidth_bytes_per_s: 5 has no source",
    ),
    (with_topology(**{"builder": "ring", **LINK, "latency_s": sourced(float("inf"))}), "inf is not finite"),
    (with_topology(**{"builder": "rings", **LINK}), r"topology\.builder: no builder is called 'rings'"),
    (with_topology(**{**LINK}), "topology: the key 'builder' is missing"),
    (
        with_topology(**{"builder": "mesh", **LINK, "rows": sourced(2), "columns": sourced(2)}),
        r"topology\.rows: 2 rows x 2 columns make 4 places for 2 ranks",
    ),
    (
        with_topology(**{"builder": "mesh", **LINK, "rows": sourced(1.5), "columns": sourced(2)}),
        r"topology\.rows: 1\.5 is not possible here",
    ),
    (
        with_topology(**{"builder": "ring", **LINK, "chords": sourced(1)}),
        r"topology\.chords: 1 is not possible here; write true or false",
    ),
    (with_topology(**{"builder": "edge_list", "edges_file": "x.csv"}), "x.csv have no source; add source"),
    (with_topology(**{"builder": "edge_list", "edges_file": "x.csv", "source": "s"}), r"x\.csv: no such file"),
    (
        with_topology(**{"builder": "node_groups", "ranks_per_node": sourced(1), "inside": NVSWITCH}),
        "topology: the key 'between' is missing",
    ),
    (
        with_topology(
            **{
                "builder": "node_groups",
                "ranks_per_node": sourced(1),
                "between": NVSWITCH,
                "inside": {"builder": "ring", **LINK, "chord": True},
            }
        ),
        r"topology\.inside: the builder 'ring' takes no 'chord'; did you mean chords",
    ),
    (
        with_topology(
            **{
                "builder": "node_groups",
                "ranks_per_node": sourced(1),
                "inside": NVSWITCH,
                "between": {"builder": "cube_mesh", **LINK},
                "attach_latency_s": sourced(0),
                "attach_bandwidth_bytes_per_s": sourced(1e9),
            }
        ),
        r"topology\.between\.ranks: a cube mesh has 8 ranks, not 2",
    ),
    (
        with_topology(
            **{"builder": "node_groups", "ranks_per_node": sourced(1), "inside": sourced(1), "between": NVSWITCH}
        ),
        r"topology\.inside: 1 is not possible here; write a topology",
    ),
    (degrade(**{"factor": sourced(1.5)}), r"degraded\.0\.factor\.value: 1\.5 is above 1; write 1 or"),
    (degrade(**{"factor": 0.5}), r"degraded\.0\.factor: 0\.5 has no source"),
    (degrade(), r"degraded\.0: the key 'factor' is missing"),
    (
        degrade(**{"factor": sourced(1), "to": "switches"}),
        r"degraded\.0: no link leads from rank1 to switches; from rank1 one leads to switch",
    ),
    (degrade(**{"factor": sourced(1), "from": "rank11"}), "no link leads from rank11.*did you mean rank1"),
    ("a: [", "not readable as YAML"),
    ("name: a\nname: b\n", "the key 'name' is written twice"),
    (change("links", [*describe()["links"], describe()["links"][0]]), r"links\.2: a second link from rank0 to rank1"),
    (change("links.0.to", "rank01"), "links: 'rank01' is not the name of a rank; write rank1"),
    (change("links", describe()["links"][:1]), "links: no route leads from rank1 to rank0"),
    (
        with_topology(builder="switch", **LINK, ranks_per_bridge=sourced(2)),
        "'switch' takes no 'ranks_per_bridge'; it takes",
    ),
    (
        with_topology(builder="pcie_tree", **LINK, ranks_per_bridge=sourced(2)),
        "the key 'bridge_bandwidth_bytes_per_s' is missing",
    ),
    (degrade(factor=sourced(0), both_ways=True), "topology: no link reaches rank1"),
    (degrade(factor=sourced(0)), "topology: no route leads from rank1 to rank0"),
    ({**degrade(), "degraded": degrade(factor=sourced(0.5))["degraded"] * 2}, r"degraded\.1: .*degraded twice"),
    (change("device", {"sheet": "a41"}), r"two\.yaml, device\.sheet: no device sheet.*mean a40"),
    (change("device", {"sheet": "other/a40.yaml"}), r"other/a40\.yaml: no such file"),
    (
        change("device", {"sheet": "other/a40.yaml", "name": "chip"}),
        r"device.name: unknown key 'name'; known are sheet",
    ),
    (ring(routing={"ties": "random"}), r"routing\.ties: 'random' is not one of first, ecmp"),
    (ring(routing={"seed": 1}), "routing: the key 'ties' is missing"),
    (ring(routing={"ties": "ecmp", "seed": -1}), r"routing\.seed: -1 is below 0"),
    (
        ring(failed_links=[{"from": "rank0", "to": "rank2"}]),
        r"failed_links\.0: no link leads from rank0 to rank2; from rank0 one leads to",
    ),
    (
        ring(failed_links=[{"from": "rank0", "to": "rank1", "both_ways": True}, {"from": "rank1", "to": "rank2"}]),
        "no route leads from rank1 to rank0",
    ),
]


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_errors_name_file_key_value_and_fix(content: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(PlatformError, match=message) as caught:
        load_platform(path)
    assert str(tmp_path) in str(caught.value)
    told = ";" in str(caught.value) and caught.value.fix
    assert told or isinstance(content, str) or "a40" in message, "a fix is due"


def test_ties_seed_and_failed_links_are_read(tmp_path: Path) -> None:
    content = ring(
        routing={"ties": "ecmp", "seed": 3}, failed_links=[{"from": "rank0", "to": "rank1", "both_ways": True}]
    )
    platform = load_platform(write(tmp_path, content))
    failed = frozenset({("rank0", "rank1"), ("rank1", "rank0")})
    assert platform.routing == Routing("ecmp", 3, failed)
    assert len(platform.links) == 8, "failed links stay links"
    plain = load_platform(write(tmp_path, ring()))
    assert plain.routing == Routing("first", 0, frozenset()), "the first route takes all"


def test_nodes_and_their_ranks_stand_beside_a_topology(tmp_path: Path) -> None:
    content = with_topology(
        builder="node_groups",
        inside=NVSWITCH,
        between={"builder": "ring", **LINK},
        attach_bandwidth_bytes_per_s=sourced(1e9),
        attach_latency_s=sourced(0.0),
    )
    content |= {"ranks": 12, "ranks_per_node": 4}
    platform = load_platform(write(tmp_path, content))
    assert platform.ranks_per_node == 4
    assert sum(link.target.endswith("nic0") for link in platform.links) == 12 + 2 * 3
    del content["ranks"]
    with pytest.raises(PlatformError, match="the key 'ranks' is missing"):
        load_platform(write(tmp_path, content))
    content["nodes"] = 3
    assert load_platform(write(tmp_path, content)) == platform
    assert load_platform(write(tmp_path, content), ranks=5).links == platform.links
    content["topology"]["ranks_per_node"] = sourced(4)
    with pytest.raises(PlatformError, match="'ranks_per_node' stands beside the topology, too"):
        load_platform(write(tmp_path, content))
    del content["ranks_per_node"]
    with pytest.raises(PlatformError, match="'nodes' goes with 'ranks_per_node'"):
        load_platform(write(tmp_path, content))
    del content["nodes"]
    again = load_platform(write(tmp_path, {**content, "ranks": 12}))
    assert again.links == platform.links and again.ranks_per_node == 4


def test_links_from_a_file_beside_the_platform(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "links.tsv").write_text(
        "source\ttarget\tbandwidth_bytes_per_s\tlatency_s\nrank0\trank1\t5e9\t1e-6\n"
    )
    content = with_topology(
        builder="edge_list", edges_file="nets/links.tsv", both_ways=True, source="our sweep", measured=False
    )
    platform = load_platform(write(tmp_path, content))
    assert [link.bandwidth_bytes_per_s for link in platform.links] == [5e9, 5e9]
    assert platform.sources["topology"] == "our sweep" and platform.unmeasured == ("topology",)


def test_what_was_never_measured_is_said(tmp_path: Path) -> None:
    content = describe()
    content["links"][1]["latency_s"]["measured"] = False
    content["links"][1]["bandwidth_bytes_per_s"]["measured"] = True
    platform = load_platform(write(tmp_path, content))
    assert platform.unmeasured == ("links.rank1->rank0.latency_s",)
    assert describe_unmeasured(platform) == (
        "1 number of two never measured, but assumed or a data sheet's peak: links.rank1->rank0.latency_s"
    )
    assert describe_unmeasured(load_platform(write(tmp_path, describe()))) == ""
    assert "10 numbers of dgx-h100 never" in describe_unmeasured(load_platform("dgx-h100", 16))


def test_degraded_links_keep_their_place_and_tell_their_source(tmp_path: Path) -> None:
    whole = load_platform(write(tmp_path, {**degrade(), "degraded": []}))
    content = degrade(factor=sourced(0.25), latency_factor=sourced(3), both_ways=True)
    platform = load_platform(write(tmp_path, content))
    changed = {
        (new.source, new.target): (new.bandwidth_bytes_per_s, new.latency_s)
        for old, new in zip(whole.links, platform.links, strict=True)
        if old != new
    }
    slow = (0.25e9, pytest.approx(3e-6))
    assert changed == {("rank1", "switch"): slow, ("switch", "rank1"): slow}
    assert platform.sources["degraded.rank1->switch.factor"] == "a test"
    assert platform.unmeasured == ("topology.latency_s",)
    one_way = load_platform(write(tmp_path, degrade(factor=sourced(0.25))))
    assert sum(a != b for a, b in zip(whole.links, one_way.links, strict=True)) == 1


def test_a_failed_link_is_gone_and_must_leave_a_way(tmp_path: Path) -> None:
    content = degrade(factor=sourced(0))
    content["topology"]["builder"] = "ring"
    content["degraded"][0]["to"] = "rank2"
    assert len(load_platform(write(tmp_path, content)).links) == 5
    content["degraded"].append({"from": "rank0", "to": "rank2", "factor": sourced(0)})
    with pytest.raises(PlatformError, match="no route leads from rank0 to rank2"):
        load_platform(write(tmp_path, content))


def test_a_device_comes_from_its_sheet(tmp_path: Path) -> None:
    content = {**describe(), "device": {"sheet": "a40"}}
    platform = load_platform(write(tmp_path, content))
    sheet = load_device("a40")
    assert platform.device == Device.of(sheet) and platform.device.sheet == sheet
    assert platform.sources["device.memory_bytes"] == sheet.sources["usable_memory_bytes"]
    assert "device.sm_count" not in platform.sources
    own = (SHIPPED / "a40.yaml").read_text().replace(f"value: {sheet.usable_memory_bytes}", "value: 47.0e9")
    (tmp_path / "mine.yaml").write_text(own)
    content["device"] = {"sheet": "mine.yaml"}
    path = write(tmp_path, content)
    assert load_platform(path).device.memory_bytes == 47 * 10**9


@pytest.mark.parametrize("ranks", [0, 9])
def test_ranks_beyond_the_machine_are_refused(ranks: int) -> None:
    with pytest.raises(PlatformError, match=f"{ranks} ranks were asked for"):
        load_platform("h100x8-nvlink", ranks=ranks)


def test_as_much_of_a_shipped_platform_has_the_same_links() -> None:
    """Those of a thousand nodes are built once, whoever asks."""
    one, same = load_platform("dgx-h100", 24), load_platform("dgx-h100", 24)
    assert one.links is same.links
    assert len(load_platform("dgx-h100", 32).links) > len(one.links)


@pytest.mark.parametrize(("name", "objects"), [("platform", 19), ("device", 5), ("datasets", 4)])
def test_the_workflow_has_the_package_s_schemas_and_they_are_closed(name: str, objects: int) -> None:
    text = (provenance.PACKAGE / f"data/{name}.schema.json").read_text()
    assert text == (REPOSITORY / f"workflow/schemas/{name}.schema.json").read_text()
    todo, found = [json.loads(text)], []
    while todo:
        node = todo.pop()
        found += [node] if isinstance(node, dict) and node.get("type") == "object" else []
        todo += node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    assert len(found) == objects and all("additionalProperties" in node for node in found)
