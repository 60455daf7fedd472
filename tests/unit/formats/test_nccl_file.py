"""A node from the file that NCCL_TOPO_DUMP_FILE names."""

from pathlib import Path

import pytest
import yaml
from trioflow.base.errors import PlatformError
from trioflow.cli import main
from trioflow.formats.nccl_file import build_nccl_file
from trioflow.hardware.platform import load_platform

GEN4 = 16e9 * 16 * 128 / 130 / 8
"""Sixteen lanes of PCI Express 4.0, a direction [bytes/s]."""


def write_node(path: Path, nvlinks: dict[int, str], gpus: int = 4, speed: str = "16.0 GT/s PCIe") -> Path:
    """Two processors, a switch with half of the GPUs and a network card each; GPUs listed from the last on."""
    cpus = []
    for cpu in range(2):
        inside = "".join(
            f'<pci busid="0000:{dev:02X}:00.0" class="0x030200" link_speed="{speed}" link_width="16">'
            f'<gpu dev="{dev}" sm="80" rank="{dev}" gdr="1">{nvlinks.get(dev, "")}</gpu></pci>'
            for dev in reversed(range(cpu * gpus // 2, (cpu + 1) * gpus // 2))
        )
        cpus.append(
            f'<cpu numaid="{cpu}" arch="x86_64"><pci busid="0000:a{cpu}:00.0" class="0x060400" link_speed="{speed}" '
            f'link_width="16">{inside}<pci busid="0000:b{cpu}:00.0" link_speed="" link_width="0"><nic>'
            f'<net name="mlx5_{cpu}" speed="200000"/></nic></pci></pci></cpu>'
        )
    path.write_text(f'<!-- dumped --><system version="1">{"".join(cpus)}</system>')
    return path


def nvlink(target: str, count: int, kind: str = "0x030200") -> str:
    return f'<nvlink target="{target}" count="{count}" tclass="{kind}"/>'


def as_table(links):
    return {(link.source, link.target): (link.bandwidth_bytes_per_s, link.latency_s) for link in links}


def test_gpus_hang_on_their_switches_and_processors(tmp_path):
    file = write_node(tmp_path / "node.xml", {})
    links = as_table(build_nccl_file(4, topology_file=file, pcie_latency_s=5e-7, socket_bandwidth_bytes_per_s=3e10))
    up = {
        ("rank0", "pci-0000:a0:00.0"),
        ("rank1", "pci-0000:a0:00.0"),
        ("rank2", "pci-0000:a1:00.0"),
        ("rank3", "pci-0000:a1:00.0"),
        ("pci-0000:a0:00.0", "cpu0"),
        ("pci-0000:a1:00.0", "cpu1"),
    }
    assert {pair for pair in links if pair[0] != "cpu0" or pair[1] != "cpu1"} - {("cpu1", "cpu0")} == (
        up | {(b, a) for a, b in up}
    )
    assert links["rank2", "pci-0000:a1:00.0"] == (pytest.approx(GEN4), 5e-7)
    assert links["cpu0", "cpu1"] == links["cpu1", "cpu0"] == (3e10, 5e-7)


def test_nvswitches_are_one_and_nothing_else_is_built(tmp_path):
    to_switches = nvlink("0000:c0:00.0", 5, "0x068000") + nvlink("0000:c1:00.0", 4, "0x068000")
    file = write_node(tmp_path / "node.xml", dict.fromkeys(range(4), to_switches))
    links = as_table(build_nccl_file(4, topology_file=file, nvlink_bandwidth_bytes_per_s=25e9, nvlink_latency_s=3e-7))
    assert len(links) == 8 and set(links.values()) == {(9 * 25e9, 3e-7)}
    assert {pair[1] for pair in links if pair[0].startswith("rank")} == {"nvswitch"}


def test_direct_nvlinks_count_once_and_pairs_keep_pci_express(tmp_path):
    pairs = {0: nvlink("0000:01:00.0", 12), 1: nvlink("0000:00:00.0", 12)}
    file = write_node(tmp_path / "node.xml", pairs)
    links = as_table(
        build_nccl_file(4, topology_file=file, nvlink_bandwidth_bytes_per_s=25e9, socket_bandwidth_bytes_per_s=3e10)
    )
    assert links["rank0", "rank1"] == links["rank1", "rank0"] == (12 * 25e9, 0.0)
    assert ("rank2", "pci-0000:a1:00.0") in links


def test_a_platform_of_nodes_takes_it_inside(tmp_path, capsys):
    write_node(tmp_path / "node.xml", dict.fromkeys(range(4), nvlink("0000:c0:00.0", 12, "0x068000")))
    number = {"value": 25e9, "source": "here"}
    inside = {
        "builder": "nccl_file",
        "topology_file": "node.xml",
        "nvlink_bandwidth_bytes_per_s": number,
        "source": "dumped",
    }
    content = {
        "name": "ours",
        "device": {"sheet": "a100-sxm4-80gb"},
        "ranks": 4,
        "topology": inside,
        "communication_on_compute_stream": False,
    }
    file = tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump(content))
    assert len(load_platform(file).links) == 8
    ask = ["simulate", "gpt2-b8", "--plan", "ddp", "--ranks", "4", "--platform", str(file), "--batch", "32"]
    assert main([*ask]) == 0
    assert "step time" in capsys.readouterr().out
    file.write_text(yaml.safe_dump(content | {"ranks": 8}))
    with pytest.raises(PlatformError, match=r"4 GPUs in the file and 8 ranks"):
        load_platform(file)


def test_nccl_conf_says_over_what_gpus_reach_each_other(tmp_path, capsys):
    to_switches = nvlink("0000:c0:00.0", 5, "0x068000")
    file, conf = (write_node(tmp_path / "node.xml", dict.fromkeys(range(4), to_switches)), tmp_path / "nccl.conf")
    rates = {"nvlink_bandwidth_bytes_per_s": 25e9, "socket_bandwidth_bytes_per_s": 3e10}

    def build(text):
        conf.write_text(text)
        return as_table(build_nccl_file(4, topology_file=file, conf_file=conf, **rates))

    linked = build("# ours\n\nNCCL_DEBUG=INFO\n")
    assert {pair[1] for pair in linked if pair[0] == "rank0"} == {"nvswitch"}
    assert build("NCCL_P2P_LEVEL=NVL") == build("NCCL_P2P_LEVEL=3") == linked
    apart = build("NCCL_P2P_DISABLE = 1")
    assert build("NCCL_P2P_LEVEL=loc") == apart and "nvswitch" not in {pair[1] for pair in apart}
    up, down = "pci-0000:a0:00.0-up", "pci-0000:a0:00.0-down"
    assert {("rank0", up), (up, "cpu0"), ("cpu0", down), (down, "rank1")} <= apart.keys()
    assert ("rank0", down) not in apart and (up, "rank1") not in apart, "bytes turn at the processor"
    write_node(file, {})
    assert build("NCCL_P2P_LEVEL=NVL") == apart, "no NVLink joins them"
    with pytest.raises(PlatformError, match=r"NCCL_P2P_LEVEL=FAR is no level; write NVL, LOC"):
        build("NCCL_P2P_LEVEL=far")
    with pytest.raises(PlatformError, match=r"nccl.conf, line 2: 'NCCL_PROTO' sets no variable"):
        build("NCCL_DEBUG=INFO\nNCCL_PROTO\n")
    number = {"value": 3e10, "source": "here"}
    topology = {
        "builder": "nccl_file",
        "topology_file": "node.xml",
        "conf_file": "nccl.conf",
        "socket_bandwidth_bytes_per_s": number,
        "source": "dumped",
    }
    content = {
        "name": "ours",
        "device": {"sheet": "a40"},
        "ranks": 4,
        "topology": topology,
        "communication_on_compute_stream": False,
    }
    (tmp_path / "ours.yaml").write_text(yaml.safe_dump(content))
    conf.write_text("NCCL_IB_HCA=mlx5_0\nNCCL_PROTO=Simple\nNCCL_ALGO=Ring\nNCCL_IB_DISABLE=0\nNCCL_P2P_DISABLE=0")
    doubts = load_platform(tmp_path / "ours.yaml").doubts
    assert [doubt.partition("=")[0] for doubt in doubts] == ["NCCL_IB_HCA", "NCCL_PROTO", "NCCL_ALGO"]
    ask = ["all_reduce", "--bytes", "1e6", "--ranks", "4", "--platform", str(tmp_path / "ours.yaml")]
    assert main(["collective", *ask]) == 0
    assert "NCCL_ALGO=Ring in nccl.conf is not followed: say --algorithm ring" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<system/>", "no GPU stands in it"),
        ("<graphs/>", "its root is no <system>"),
        ("<system>", "not a topology of NCCL"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><system/>', "document type"),
        ('<system><pci busid="1"><gpu sm="80"/></pci></system>', "no number dev"),
    ],
)
def test_what_is_not_nccls_is_refused(tmp_path, content, words):
    file = tmp_path / "node.xml"
    file.write_text(content)
    with pytest.raises(PlatformError, match=words) as caught:
        build_nccl_file(1, topology_file=file)
    assert str(file) in str(caught.value)


def test_rates_that_nobody_gave_are_asked_for(tmp_path):
    file = write_node(tmp_path / "node.xml", {0: nvlink("0000:01:00.0", 12)})
    with pytest.raises(PlatformError, match="no nvlink_bandwidth_bytes_per_s"):
        build_nccl_file(4, topology_file=file)
    write_node(file, {})
    with pytest.raises(PlatformError, match="no socket_bandwidth_bytes_per_s"):
        build_nccl_file(4, topology_file=file)
    write_node(file, {}, speed="")
    with pytest.raises(PlatformError, match="link_speed '' and link_width '16' of 0000:"):
        build_nccl_file(4, topology_file=file)
    with pytest.raises(PlatformError, match="no such file"):
        build_nccl_file(4, topology_file=tmp_path / "none.xml")
