"""Numbers that cannot be are refused where they enter, and slips of units are asked about."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from trioflow.base.errors import InputError, PlatformError, TraceError
from trioflow.base.yaml_files import read_yaml
from trioflow.cli.main import main
from trioflow.costmodel.choices import find_collectives
from trioflow.hardware.device_sheet import SHIPPED, load_device
from trioflow.hardware.machine import Device, Link, Platform
from trioflow.hardware.platform import load_platform
from trioflow.prediction.language_answer import describe_run
from trioflow.trace.facts import check_facts

SHEET = read_yaml(SHIPPED / "h100-sxm.yaml", PlatformError)
PLATFORM: dict[str, Any] = {
    "name": "box",
    "device": {"sheet": "h100-sxm"},
    "ranks": 2,
    "topology": {
        "builder": "switch",
        "bandwidth_bytes_per_s": {"value": 12e9, "source": "a test"},
        "latency_s": {"value": 1e-6, "source": "a test"},
    },
    "host": {"launch_s": {"value": 5e-6, "source": "a test"}},
    "communication_on_compute_stream": False,
}


def change(content: dict[str, Any], key: str, value: float) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    inner = change(content[first], rest, value) if rest else {"value": value, "source": "a test"}
    return {**content, first: inner}


@pytest.mark.parametrize(
    ("key", "value", "asked"),
    [
        ("memory_bytes", 80, r"GB \(then write 8e\+10\)"),
        ("memory_bytes", 81559, r"MB \(then write 8.1559e\+10\)"),
        ("memory_bandwidth_bytes_per_s", 4000, r"GB/s \(then write 4e\+12\)"),
        ("memory_bandwidth_bytes_per_s", 3.35, r"TB/s \(then write 3.35e\+12\)"),
        ("l2_bytes", 50, r"MB \(then write 5e\+07\)"),
        ("boost_clock_hz", 1980, r"MHz \(then write 1.98e\+09\)"),
        ("boost_clock_hz", 1.98, r"GHz \(then write 1.98e\+09\)"),
        ("power_limit_w", 0.7, r"kW \(then write 700\)"),
        ("peak_flop_per_s.bf16", 80, r"Tflop/s \(then write 8e\+13\)"),
        ("peak_flop_per_s.fp8", 312000, r"Gflop/s \(then write 3.12e\+14\)"),
        ("nvlink.bandwidth_bytes_per_s", 900, r"GB/s \(then write 9e\+11\)"),
        ("sustained_compute", 140, "write 0.5 to 10 times"),
        ("power_limit_w", math.inf, "write 5 to 20000 W"),
        ("peak_flop_per_s.fp32", math.nan, "nan flop/s is far from anything"),
        ("memory_bytes", -80e9, "too small"),
        ("usable_memory_bytes", 100e9, r"1e\+11 bytes can be used of 8e\+10"),
    ],
)
def test_a_sheet_s_slips_of_units_are_asked_about(key: str, value: float, asked: str) -> None:
    with pytest.raises(PlatformError, match=asked) as caught:
        load_device(change(SHEET, key, value), "own.yaml")
    assert "own.yaml" in str(caught.value) and key in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "asked"),
    [
        ("topology.bandwidth_bytes_per_s", 4000, r"GB/s \(then write 4e\+12\)"),
        ("topology.latency_s", 31.5, r"micros \(then write 3.15e-05\)"),
        ("host.launch_s", 5, r"micros \(then write 5e-06\)"),
        ("topology.bandwidth_bytes_per_s", math.nan, "nan is not finite"),
        ("topology.latency_s", math.inf, "inf is not finite"),
        ("compute_slowdown_during_collective", 1e9, "far from anything"),
    ],
)
def test_a_platform_s_slips_of_units_are_asked_about(
    key: str, value: float, asked: str, tmp_path: Path
) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(yaml.safe_dump(PLATFORM))
    assert load_platform(path).ranks == 2
    path.write_text(yaml.safe_dump(change(PLATFORM, key, value)))
    with pytest.raises(PlatformError, match=asked):
        load_platform(path)


@pytest.mark.parametrize(
    ("bandwidth", "latency"),
    [(math.nan, 0.0), (-1.0, 0.0), (0.0, 0.0), (1e9, math.nan), (1e9, -1.0)],
)
def test_objects_are_no_way_around(bandwidth: float, latency: float) -> None:
    links = (Link("rank0", "rank1", bandwidth, latency),)
    with pytest.raises(PlatformError, match=r"links\.rank0->rank1"):
        Platform("box", Device("chip", "gpu", 10**9, {}), 2, links)
    with pytest.raises(PlatformError, match=r"device\.peak_flop_per_s\.fp32"):
        Platform("box", Device("chip", "gpu", 10**9, {"fp32": -1.0}), 2, ())


def test_misspelt_collectives_are_not_left_out(tmp_path: Path) -> None:
    for key in ("node_collectives", "between_nodes"):
        path = tmp_path / "box.yaml"
        path.write_text(yaml.safe_dump({**PLATFORM, key: "h100x8-nvlnk"}))
        with pytest.raises(PlatformError, match=f"{key}: no measured collectives"):
            find_collectives(load_platform(path))


@pytest.mark.parametrize("number", [-1.0, math.nan, math.inf])
def test_price_and_power_of_a_run(number: float) -> None:
    for price, power_w in ((number, None), (None, number)):
        with pytest.raises(InputError, match="expected a number that is 0 or more"):
            describe_run({}, None, price, power_w)


@pytest.mark.parametrize(
    ("fact", "value"), [("tail_s", 1e308), ("step_times_s", [1e300]), ("flop", 10**400)]
)
def test_facts_that_no_step_has(fact: str, value: Any) -> None:
    facts = {"workload": "w", "batch": 1, "device_name": "d", "step_time_s": 1.0}
    check_facts(facts)
    with pytest.raises(TraceError, match=fact):
        check_facts({**facts, fact: value})


def test_arguments_of_too_many_digits(capsys: pytest.CaptureFixture[str]) -> None:
    long = "4" * 400
    for arguments in (
        ["collective", "all_reduce", "--bytes", "1e19", "--ranks", "8", "--platform", "dgx-h100"],
        ["search", "llama-3.2-1b", "--ranks", long, "--platform", "dgx-h100"],
    ):
        assert main(arguments) == 2
        assert len(capsys.readouterr().err) < 300
