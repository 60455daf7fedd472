"""What the command line says about the network, its links and collectives' algorithms."""

import json
from typing import Any

import pytest
from trioflow.base.errors import InputError
from trioflow.cli.main import build_parser

BASE = ["collective", "all_reduce", "--bytes", "16e6"]
DGX = [*BASE, "--ranks", "16", "--platform", "dgx-h100"]
NODE = [*BASE, "--ranks", "8", "--platform", "h100x8-nvlink"]


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    options = build_parser().parse_args([*words, "--json"])
    options.run(options)
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_algorithms_in_chunks_over_any_network(capsys: pytest.CaptureFixture[str]) -> None:
    whole = ask(capsys, *NODE, "--algorithm", "double-tree")
    cut = ask(capsys, *NODE, "--algorithm", "double-tree", "--chunks", "16")
    assert (whole["algorithm"], cut["algorithm"]) == (
        "double_binary_tree",
        "double_binary_tree, 16 chunks",
    )
    assert cut["time_s"] < whole["time_s"], "its levels work at the same time"
    same = ask(capsys, *NODE, "--algorithm", "double-tree", "--chunk-bytes", "500e3")
    assert same["time_s"] == cut["time_s"], "16 MB in two halves of 16 chunks are 500 kB each"
    free = ask(
        capsys,
        *NODE,
        "--algorithm",
        "double-tree",
        "--chunks",
        "16",
        "--network",
        "contention-free",
    )
    assert free["network"] == "contention_free" and free["time_s"] < cut["time_s"]
    assert whole["confidence"] == cut["confidence"] == "uncalibrated"


def test_a_failed_or_degraded_link_changes_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    ring = [*DGX, "--algorithm", "ring"]
    whole = ask(capsys, *ring)["time_s"]
    slow = ask(capsys, *ring, "--degrade-link", "rank7,node0-nic7,0.5")["time_s"]
    assert whole < slow < 2 * whole
    with pytest.raises(
        InputError, match=r"no link leads from rank7 to nic7; from rank7 links lead"
    ):
        ask(capsys, *ring, "--fail-link", "rank7,nic7")
    # Rank 7's NIC is cut off: its bytes cross the node to another rank's, and share that.
    around = ask(capsys, *ring, "--fail-link", "rank7,node0-nic7")["time_s"]
    assert around > whole


def test_measured_times_on_changed_links_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    links = ["--degrade-link", "rank0,switch,0.9"]
    told = ask(capsys, *NODE, *links)
    assert any("no measurement backs" in warning for warning in told["warnings"])
    assert not any("no measurement backs" in warning for warning in ask(capsys, *NODE)["warnings"])
    by_links = ask(capsys, *NODE, *links, "--algorithm", "ring")
    assert not any("no measurement backs" in warning for warning in by_links["warnings"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "spiral"], "unknown algorithm 'spiral'; use one of ring, ring2"),
        (["--algorithm", "rign"], "unknown algorithm 'rign'; did you mean ring"),
        (
            ["--collectives", "h100x8-nvlin"],
            "no collective model is called .* did you mean h100x8-nvlink",
        ),
        (["--chunks", "4"], "chunks without an algorithm"),
        (["--algorithm", "measured", "--chunks", "4"], "measured has no messages to cut"),
        (["--algorithm", "ring", "--chunks", "0"], "--chunks 0 is not positive"),
        (["--algorithm", "ring", "--chunk-bytes", "0.5"], "less than a byte"),
        (["--algorithm", "ring", "--chunks", "2", "--chunk-bytes", "5"], "both given"),
        (["--algorithm", "in-network", "--collectives", "h200x8-nvlink"], "give one of them"),
        (["--routing-seed", "3"], "the first route takes all; say --ties ecmp"),
        (["--fail-link", "rank0"], "'rank0' names no link; write --fail-link FROM,TO"),
        (["--degrade-link", "rank0,switch,half"], "'half' is not a share of a bandwidth"),
        (["--degrade-link", "rank0,switch,0"], "--fail-link takes a link away"),
        (["--fail-link", "gpu0,switch"], "no link leads from gpu0 to switch; nodes are"),
        (["--network", "token-ring"], "no network is called 'token-ring'"),
    ],
)
def test_misfits_are_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ask(capsys, *NODE, *words)


def test_simulate_takes_algorithms_for_all_or_each(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["simulate", "gpt2-tiny-b8", "--plan", "fsdp", "--ranks", "4", "--platform", "dgx-a100"]
    plain = ask(capsys, *base)
    words = ["--algorithm", "all_gather=direct,reduce_scatter=halving-doubling"]
    told = ask(capsys, *base, *words, "--chunks", "2")
    assert told["plan"] == plain["plan"] == "fsdp"
    # Both are as fast as the platform's measurements say, and take other messages for it.
    assert told["events"] > plain["events"]
    assert told["step_time_s"] == pytest.approx(plain["step_time_s"], rel=1e-3)
    with pytest.raises(InputError, match="binary_tree does not do all_gather"):
        ask(capsys, *base, "--algorithm", "tree")
    with pytest.raises(InputError, match="chunks without an algorithm"):
        ask(capsys, *base, "--chunks", "2")
