"""A user's own network between nodes: all that runs over it follows the number, and what stays inside a node does not."""

import json
from pathlib import Path

import pytest
import yaml
from trioflow.base.errors import InputError
from trioflow.cli.main import main
from trioflow.costmodel.collectives.model import wire_factor
from trioflow.hardware.platform import SHIPPED, load_platform
from trioflow.network.inter_node import TCP_BYTES_PER_S, open_platform
from trioflow.parallel.plan import named_plan
from trioflow.prediction.assembly import predict
from trioflow.sweeps.workshop import Workshop

SIZE = 256e6


def ask(capsys: pytest.CaptureFixture[str], collective: str, platform: str, ranks: int, *words: str) -> dict:  # fmt: skip
    asked = ["collective", collective, "--bytes", str(SIZE), "--ranks", str(ranks), "--platform", platform]  # fmt: skip
    main([*asked, *words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("platform", ["p5-h100", "dgx-h100", "dgx-a100", "a10x16-4nodes", "h100x8-nvlink"])  # fmt: skip
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_collectives_have_the_bus_bandwidth_that_was_measured(capsys, platform, collective) -> None:
    """On measured tables and nominal links alike, faster or slower than they say; the interval narrows to it."""
    ranks = 16
    if platform == "h100x8-nvlink":
        with pytest.raises(InputError, match="no nodes"):
            open_platform(platform, 8, 1e9)
        return
    plain = ask(capsys, collective, platform, ranks)
    for rate in (2e9, 12.5e9):
        answer = ask(capsys, collective, platform, ranks, "--inter-node-bandwidth", str(rate))
        assert answer["bus_bandwidth_bytes_per_s"] == pytest.approx(rate, rel=0.06)
        assert any("as given" in text for text in answer["warnings"])
        if answer["low_s"] is not None:
            assert answer["high_s"] / answer["low_s"] < 1.3
            if platform != "p5-h100":  # whose own network was measured as well
                assert answer["high_s"] / answer["low_s"] < plain["high_s"] / plain["low_s"]


def test_the_rate_of_one_size_is_a_latency_of_each_step_beyond_the_links(capsys) -> None:
    """As nanotron's jobs on the slow network: 75 us a step of a ring, whatever its size; each collective has its own."""
    words = ["--inter-node-bandwidth", "all_gather=27e9,all_reduce=52e9", "--inter-node-bytes", str(SIZE)]  # fmt: skip
    for collective, rate in (("all_gather", 27e9), ("reduce_scatter", 27e9), ("all_reduce", 52e9)):
        answer = ask(capsys, collective, "p5-h100", 128, *words)
        assert answer["bus_bandwidth_bytes_per_s"] == pytest.approx(rate, rel=0.01)
    platform = open_platform("p5-h100", 128, {"all_gather": 27e9}, inter_node_bytes=SIZE)
    main(["collective", "all_gather", "--bytes", "1e6", "--ranks", "128", "--platform", "p5-h100", *words, "--json"])  # fmt: skip
    small_s = json.loads(capsys.readouterr().out)["time_s"]
    step_s = SIZE * wire_factor("all_gather", 128) / 27e9 / 127
    assert small_s == pytest.approx(127 * step_s, rel=0.1)
    assert platform.links == load_platform("p5-h100", 128).links, "links are faster than that"


def test_tcp_is_its_rate_times_the_network_cards_of_a_node(capsys) -> None:
    for platform, ranks, cards in (("dgx-h100", 16, 8), ("a10x16-4nodes", 16, 1)):
        answer = ask(capsys, "all_reduce", platform, ranks, "--inter-node-bandwidth", "tcp")
        rate = cards * TCP_BYTES_PER_S
        assert answer["bus_bandwidth_bytes_per_s"] == pytest.approx(rate, rel=0.03)
        assert "TCP sockets" in answer["warnings"][0]


def test_latency_between_nodes_is_each_hop_s(capsys) -> None:
    slow = ask(capsys, "all_gather", "dgx-h100", 64, "--inter-node-latency", "1e-3")
    slower = ask(capsys, "all_gather", "dgx-h100", 64, "--inter-node-latency", "2e-3")
    assert slower["time_s"] - slow["time_s"] == pytest.approx(7e-3, rel=1e-3)
    assert slower["high_s"] / slower["low_s"] < 2.2


def test_steps_plans_and_files_follow_it(tmp_path: Path, capsys, monkeypatch) -> None:
    """One step by keyword, by flag, by file and of a saved platform; a step in one node is left alone."""
    plan = named_plan("ddp", 16)
    asked = {"inter_node_bandwidth": 1e9, "inter_node_latency_s": 1e-4}
    found = predict("gpt2-tiny-b8", plan, "p5-h100", **asked)
    plain = predict("gpt2-tiny-b8", plan, "p5-h100")
    assert found.step_time_s > plain.step_time_s and any("as given" in w for w in found.warnings)
    content = yaml.safe_load((SHIPPED / "p5-h100.yaml").read_text())
    content["inter_node"] = {
        "bus_bandwidth_bytes_per_s": {"all": {"value": 1e9, "source": "nccl-tests"}},
        "latency_s": {"value": 1e-4, "source": "nccl-tests"},
    }
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(content))
    assert predict("gpt2-tiny-b8", plan, path).step_time_s == found.step_time_s
    words = ["--inter-node-bandwidth", "1e9", "--inter-node-latency", "1e-4", "--json"]
    main(["simulate", "gpt2-tiny-b8", "--plan", "ddp", "--ranks", "16", "--platform", "p5-h100", *words])  # fmt: skip
    assert json.loads(capsys.readouterr().out)["step_time_s"] == found.step_time_s
    searched: dict = {}
    monkeypatch.setattr("trioflow.sweeps.search.search_plans", lambda shop, *_, **__: searched.update(shop.inter_node) or 1 / 0)  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        main(["search", "gpt2-tiny-b8", "--ranks", "16", "--platform", "p5-h100", *words])
    assert searched == {"inter_node_bandwidth": "1e9", "inter_node_latency_s": 1e-4, "inter_node_bytes": None}  # fmt: skip
    platform = Workshop(inter_node=asked).load_platform("p5-h100", 16)
    assert platform.links == open_platform(path, 16).links
    alone = named_plan("ddp", 8)
    inside, same = (predict("gpt2-tiny-b8", alone, "p5-h100", **more) for more in (asked, {}))
    assert inside.to_dict()["step_time_s"] == same.to_dict()["step_time_s"]
    assert inside.warnings == same.warnings


@pytest.mark.parametrize(
    ("bandwidth", "more", "words"),
    [
        ("fast", {}, "is not a rate"),
        ("all_gahter=1e9", {}, "did you mean all_gather"),
        (-1.0, {}, "is not positive"),
        (None, {"inter_node_bytes": 1e6}, "give --inter-node-bandwidth too"),
        (None, {"inter_node_latency_s": float("nan")}, "is not positive"),
    ],
)
def test_what_is_no_network_is_refused(bandwidth, more, words: str) -> None:
    with pytest.raises(InputError, match=words):
        open_platform("dgx-h100", 16, bandwidth, **more)
