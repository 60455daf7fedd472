"""Device sheets: every number has a source, and the numbers agree with each other.

Numbers that cannot be are refused where they enter, and slips of units are asked about.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from trioflow.base.errors import InputError, PlatformError, TraceError
from trioflow.base.yaml_files import read_yaml
from trioflow.cli.main import main
from trioflow.costmodel.choices import find_collectives
from trioflow.hardware import machine
from trioflow.hardware.machine import (
    SHIPPED,
    Device,
    DeviceSheet,
    Link,
    Platform,
    find_device,
    find_sheet,
    is_processor,
    list_devices,
    load_device,
    read_name,
)
from trioflow.hardware.platform import list_platforms, load_platform
from trioflow.prediction.breakdown import describe_run
from trioflow.trace.facts import check_facts

FOUR_NUMBERS = """\
name: rtx-3080
driver_names: [NVIDIA GeForce RTX 3080]
memory_bytes: {value: 24.0e9, source: the box}
memory_bandwidth_bytes_per_s: {value: 936.0e9, source: the box}
peak_flop_per_s:
  fp32: {value: 35.6e12, source: the box}
  fp16: {value: 71.2e12, source: the box}
tensor_core_precisions: [fp16]
"""
REPOSITORY = Path(__file__).parents[3]
DUE = {
    "a40",
    "a100-pcie-40gb",
    "a100-pcie-80gb",
    "a100-sxm4-40gb",
    "a100-sxm4-80gb",
    "h100-sxm",
    "h100-pcie",
    "h200",
    "v100-pcie-32gb",
    "v100-sxm2-32gb",
    "l4",
    "b200",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "rtx-pro-6000",
    "rtx-pro-6000-server",
    "a10g",
    "gh200",
    "mi250x",
    "mi325x",
    "mi355x",
    "b300",
}
LANES = {
    "Volta": 64,
    "GA100": 64,
    "GP100": 64,
    "Turing": 64,
    "GP104": 128,
    "GA102": 128,
    "Ada": 128,
    "Hopper": 128,
    "Blackwell": 128,
    "CDNA2": 64,
    "CDNA3": 128,
    "CDNA4": 128,
}
"""fp32 lanes of a multiprocessor, by chip or architecture; a lane multiplies and adds in a clock."""


def sheets() -> list[DeviceSheet]:
    return [load_device(name) for name in list_devices()]


def test_the_devices_asked_for_ship() -> None:
    assert set(list_devices()) >= DUE
    for name in list_devices():
        assert load_device(name).name == name


def test_every_number_is_positive_and_has_a_source() -> None:
    for name in list_devices():
        content = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
        sheet = load_device(name)
        numbers = [
            sheet.memory_bytes,
            sheet.memory_bandwidth_bytes_per_s,
            sheet.numbers["l2_bytes"],
            sheet.sm_count,
            sheet.numbers["boost_clock_hz"],
            sheet.power_limit_w,
            *sheet.peak_flop_per_s.values(),
        ]
        assert all(number > 0 for number in numbers), name
        expected = (
            len(numbers)
            + 2 * ("nvlink" in content)
            + sum(name in content for name in ("usable_memory_bytes", "sustained_compute"))
        )
        assert 0.9 < sheet.usable_memory_bytes / sheet.memory_bytes < 1.1, name
        assert len(sheet.sources) == expected, name
        assert all(len(source) > 20 for source in sheet.sources.values()), name


@pytest.mark.parametrize("sheet", sheets(), ids=lambda sheet: sheet.name)
def test_the_fp32_peak_is_lanes_times_clock(sheet: DeviceSheet) -> None:
    """SMs x lanes x 2 flop x boost clock is the sheet's rate within 1.5 %."""
    lanes = LANES.get(sheet.chip) or LANES.get(sheet.architecture, 0)
    assert lanes, f"add {sheet.architecture} to LANES: the fp32 lanes of one of its multiprocessors"
    derived = sheet.sm_count * lanes * 2 * sheet.numbers["boost_clock_hz"]
    assert sheet.peak_flop_per_s["fp32"] == pytest.approx(derived, rel=0.015)


def test_platforms_say_the_same_as_their_device_s_sheet() -> None:
    compared = 0
    for name in list_platforms():
        device = load_platform(name, 2).device
        if device.kind != "gpu":
            continue
        sheet = find_device(device.name)
        assert device.memory_bytes == sheet.usable_memory_bytes, name
        assert device.memory_bandwidth_bytes_per_s == sheet.memory_bandwidth_bytes_per_s, name
        for precision, peak in device.peak_flop_per_s.items():
            assert peak == sheet.peak_flop_per_s[precision], (name, precision)
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA_A100-PCIE-40GB", "a100-pcie-40gb"),
        ("Tesla V100-PCIE-32GB", "v100-pcie-32gb"),
        ("nvidia a40", "a40"),
        ("NVIDIA H200", "h200"),
        ("h200", "h200"),
        ("Tesla V100-DGXS-32GB", "v100-sxm2-32gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("NVIDIA A100-PG509-200", "a100-sxm4-40gb"),
        ("NVIDIA A100-SXM-80GB", "a100-sxm4-80gb"),
        ("NVIDIA H200 141GB HBM3e", "h200"),
        ("GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("MI300X", "mi300x"),
        ("AMD Instinct MI250X / MI250", "mi250x"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GH200 96GB HBM3", "gh200"),
        ("NVIDIA Corporation GH200", "gh200"),
        ("RTX4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("NVIDIA RTX PRO 6000", "rtx-pro-6000"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA A10G", "a10g"),
    ],
)
def test_a_driver_s_name_finds_its_sheet(driver_name: str, name: str) -> None:
    assert find_device(driver_name).name == name


def test_driver_names_are_unique() -> None:
    names = [alias for sheet in sheets() for alias in (sheet.name, *sheet.driver_names)]
    plain = [name.lower().replace("-", " ") for name in names]
    # A sheet may be called as one of its own driver names.
    owners: dict[str, set[str]] = {}
    for sheet in sheets():
        for alias in sheet.driver_names:
            owners.setdefault(alias.lower().replace("-", " "), set()).add(sheet.name)
    assert len(plain) >= 2 * len(list_devices())
    assert all(len(found) == 1 for found in owners.values())


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(PlatformError, match="did you mean NVIDIA H100 80GB HBM3"):
        find_device("NVIDIA H100 80GB HBM")
    with pytest.raises(PlatformError, match="did you mean a40"):
        load_device("a40x")


@pytest.mark.parametrize("sheet", sheets(), ids=lambda sheet: sheet.name)
def test_listed_names_follow_the_rule_too(sheet: DeviceSheet) -> None:
    """What a name says of memory and form factor never contradicts the sheet that lists it."""
    for name in (sheet.name, *sheet.driver_names):
        assert sheet.parts.fits(read_name(name)), name
    others = [other for other in sheets() if other.name != sheet.name]
    assert not any(other.parts.fits(sheet.parts) for other in others)


@pytest.mark.parametrize("name", ["RTX 4090 Laptop GPU", "NVIDIA A100 96GB", "H100 PCIe 40GB", "GH200 144G HBM3e"])
def test_memory_form_and_product_must_not_contradict(name: str) -> None:
    with pytest.raises(PlatformError, match="no data sheet describes"):
        find_device(name)


def test_a_name_of_several_boards_is_not_one() -> None:
    with pytest.raises(PlatformError, match="stands for v100-pcie-16gb and v100-pcie-32gb"):
        find_device("Tesla V100")


def test_an_unknown_gpu_is_asked_for_four_numbers_and_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlatformError) as caught:
        find_device("NVIDIA GeForce RTX 3080")
    for words in ("fp32 and fp16", "bandwidth", "memory [bytes]", "config/devices/rtx-3080.yaml"):
        assert words in str(caught.value)
    path = tmp_path / "config/devices/rtx-3080.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(FOUR_NUMBERS)
    sheet = find_device("NVIDIA GeForce RTX 3080")
    assert (sheet.name, sheet.memory_bytes) == ("rtx-3080", 24_000_000_000)
    assert sheet.peak("bf16") == 35.6e12 and sheet.runs_on_tensor_cores("fp16")
    assert not sheet.runs_on_tensor_cores("fp32")
    assert find_device("GeForce RTX 3080") == sheet, "a name of the same product"
    assert find_device("NVIDIA A40").name == "a40"


def test_a_processor_is_known_by_its_name() -> None:
    names = ("AMD EPYC, one core", "Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz", "a processor")
    assert all(is_processor(name) for name in names)
    assert not any(is_processor(name) for sheet in sheets() for name in sheet.driver_names)
    assert not is_processor("NVIDIA GeForce RTX 3080")


def test_what_follows_from_the_numbers() -> None:
    h100, v100, p4 = load_device("h100-sxm"), load_device("v100-pcie-32gb"), load_device("p4")
    assert v100.peak("tf32") == v100.peak("fp32"), "a V100 has no tf32"
    assert v100.tensor_core_precisions and not v100.runs_on_tensor_cores("tf32")
    assert h100.runs_on_tensor_cores("tf32") and not h100.runs_on_tensor_cores("fp32")
    assert not p4.tensor_core_precisions


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sm_count: {value: 84, ", "sm_count: {value: 0, ", "sm_count.value"),
        ("sm_count:", "sm_counts:", "sm_count"),
        ("memory_bytes: {value: 48.0e9, ", "memory_bytes: {", "memory_bytes"),
        ("driver_names:\n  - NVIDIA A40\n  - A40\n", "", "the key 'driver_names' is missing"),
        ("[tf32, fp16, bf16]", "[tf32, fp16, bf16, fp8]", "tensor cores of fp8 have no peak"),
        ("sm_count: {value: 84, ", "sm_count: {value: .inf, ", "sm_count"),
        ("  fp32: {value: 37.4e12", "  fp31: {value: 37.4e12", "peak_flop_per_s"),
        ("name: a40\n", "name: a40\nname: a40\n", "written twice"),
    ],
)
def test_broken_sheets_are_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = (SHIPPED / "a40.yaml").read_text()
    assert old in text
    path = tmp_path / "a40.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(PlatformError, match=message) as caught:
        load_device(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="no such file"):
        load_device(tmp_path / "none.yaml")


def test_a_name_reads_its_own_sheet_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    build = machine._read
    monkeypatch.setattr(machine, "_read", lambda path: read.append(path.stem) or build(path))
    for sheet in map(load_device, list_devices()):
        for name in (sheet.name, *sheet.driver_names):
            read.clear()
            machine._shipped.cache_clear()
            assert find_device(name.upper()) == sheet
            assert sheet.name in read and len(read) <= 4, name


def test_no_sheet_is_read_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list_devices():
        sheet = load_device(name)
        assert not any(is_processor(each) for each in (sheet.name, *sheet.driver_names)), name
    monkeypatch.setattr("trioflow.hardware.machine._read", None)
    assert find_sheet("AMD EPYC, one core") is None


def test_a_users_sheet_of_a_processor_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioflow.hardware.machine.OWN", tmp_path)
    text = FOUR_NUMBERS.replace("NVIDIA GeForce RTX 3080", "AMD EPYC")
    (tmp_path / "epyc.yaml").write_text(text.replace("name: rtx-3080", "name: epyc"))
    sheet = find_sheet("AMD EPYC")
    assert sheet is not None and sheet.name == "epyc"


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
        ("memory_bytes", -80e9, "is not above 0"),
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
def test_a_platform_s_slips_of_units_are_asked_about(key: str, value: float, asked: str, tmp_path: Path) -> None:
    path = tmp_path / "box.yaml"
    path.write_text(yaml.safe_dump(PLATFORM))
    assert load_platform(path).ranks == 2
    path.write_text(yaml.safe_dump(change(PLATFORM, key, value)))
    with pytest.raises(PlatformError, match=asked):
        load_platform(path)


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [(math.nan, 0.0), (-1.0, 0.0), (0.0, 0.0), (1e9, math.nan), (1e9, -1.0)]
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


@pytest.mark.parametrize(("fact", "value"), [("tail_s", 1e308), ("step_times_s", [1e300]), ("flop", 10**400)])
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
