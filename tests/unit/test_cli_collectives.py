"""``trioflow collective`` with the models that ship for GPU platforms."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.cli.main import build_parser
from trioflow.costmodel.collectives.methods import METHODS
from trioflow.costmodel.collectives.model import COLLECTIVES
from trioflow.costmodel.collectives.nccl import NcclMachine
from trioflow.costmodel.collectives.platform import fit_platform_collectives


def ask(capsys: pytest.CaptureFixture[str], **options: object) -> dict[str, Any]:
    chosen: dict[str, object] = {"bytes": 25e6, "ranks": 8, "platform": "h100x8-nvlink"} | options
    words = ["collective", str(chosen.pop("collective", "all_reduce")), "--json"]
    for name, value in chosen.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    parsed = build_parser().parse_args(words)
    parsed.run(parsed)
    return json.loads(capsys.readouterr().out)


def test_a_bucket_of_ddp_on_eight_h100(capsys: pytest.CaptureFixture[str]) -> None:
    told = ask(capsys)
    # The published table has 122 us at 16 MiB and 200 us at 32 MiB.
    assert 122e-6 < told["time_s"] < 200e-6
    assert told["low_s"] < told["time_s"] < told["high_s"]
    assert told["confidence"] == "interpolated"
    assert told["algorithm"] == "measured, NCCL 2.29.2 on h100x8-nvlink"


def test_every_algorithm_answers_for_itself(capsys: pytest.CaptureFixture[str]) -> None:
    names = (*METHODS, "ring")
    times = {name: ask(capsys, algorithm=name)["time_s"] for name in names}
    assert len(set(times.values())) == len(names)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_operation_has_a_time(capsys: pytest.CaptureFixture[str], collective: str) -> None:
    ranks = 2 if collective == "send" else 4
    told = ask(capsys, collective=collective, ranks=ranks, platform="a100x4-nvlink")
    derived = collective in ("broadcast", "reduce", "scatter", "gather")
    assert (told["confidence"] == "uncalibrated") == derived
    assert 0 < told["low_s"] < told["time_s"] < told["high_s"]


def test_a_shipped_model_is_found_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    told = ask(capsys, collectives="h200x8-nvlink")
    assert told["algorithm"].endswith("on h200x8-nvlink")


def test_pcie_pairs_have_no_public_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    told = ask(capsys, platform="a40x2-pcie", ranks=2)
    assert (told["algorithm"], told["confidence"], told["low_s"]) == ("ring", "uncalibrated", None)
    with pytest.raises(InputError, match="a40x2-pcie has no measured collectives"):
        ask(capsys, platform="a40x2-pcie", ranks=2, algorithm="nccl")


def test_measured_curves_alone_cannot_be_asked_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ask(capsys, platform="cpu2-gloo", ranks=2)["algorithm"] == "measured curve"
    with pytest.raises(InputError, match="holds measured curves only"):
        ask(capsys, platform="cpu2-gloo", ranks=2, algorithm="nccl")


@pytest.mark.parametrize("spread_ns", [0, 40])
def test_a_measured_size_is_told_as_measured_with_an_interval(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, spread_ns: int
) -> None:
    """Whether repeats of a message differ or not: a table often holds one number twice."""
    sizes = [2**k for k in range(10, 28)]
    rows = [
        (size, round(20_000 + size / 100 * (1 + 0.1 * (k % 2))) + spread_ns * place, place)
        for k, size in enumerate(sizes)
        for place in (0, 1)
    ]
    frame = pd.DataFrame(rows, columns=["message_bytes", "time_ns", "round"]).assign(
        platform="h100x8-nvlink",
        library="NCCL 2.29.2",
        collective="all_reduce",
        ranks=8,
        nodes=1,
        dataset="a test",
    )
    machine = NcclMachine("hopper", "nvlink", 370e9, False)
    path = tmp_path / "mine.json"
    fit_platform_collectives(frame, "h100x8-nvlink", "NCCL 2.29.2", machine).save(path)
    told = ask(capsys, collectives=path, bytes=2**20)
    assert told["algorithm"] == "measured, NCCL 2.29.2 on h100x8-nvlink"
    assert told["confidence"] == "measured" and told["warnings"] == []
    assert told["low_s"] < told["time_s"] < told["high_s"]
