"""Builders of other packages, found as an installed package offers them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import Link
from trioflow.hardware.platform import BUILDERS, find_builder, load_platform

MODULE = '''
from trioflow.hardware.machine import Link


def build_line(ranks: int, bandwidth_bytes_per_s: float, *, skip: int = 1, label: str = "plain"):
    """Join each rank to the one some places on, both ways."""
    ends = [(r, r + 1) for r in range(ranks - 1)]
    if skip > 1:
        ends += [(r, r + skip) for r in range(ranks - skip)]
    return [Link(f"rank{a}", f"rank{b}", bandwidth_bytes_per_s, 0.0)
            for one, other in ends for a, b in ((one, other), (other, one))]


def build_anything(ranks, **parameters):
    return [Link("rank0", "rank1", parameters["speed"], 0.0),
            Link("rank1", "rank0", parameters["speed"], 0.0)]


def build_texts(ranks):
    return ["rank0->rank1"]


def build_broken(ranks):
    return {}["nothing"]


NUMBER = 3
'''

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package on the path as installers leave it."""

    def put(package: str, **entries: str) -> None:
        folder = tmp_path / "site" / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{package}_nets.py").write_text(MODULE)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {package}_nets:{what}\n" for name, what in entries.items())
        (info / "entry_points.txt").write_text(f"[trioflow.topologies]\n{lines}")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, f"{package}_nets", raising=False)

    return put


def sourced(value: float) -> dict[str, object]:
    return {"value": value, "source": "a test"}


def write(folder: Path, **topology: object) -> Path:
    content = {
        "name": "mine",
        "device": {"sheet": "a40"},
        "ranks": 4,
        "topology": topology,
        "communication_on_compute_stream": False,
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_package_s_builder_works_in_a_platform_file(install: Install, tmp_path: Path) -> None:
    install("linekit", line="build_line")
    path = write(tmp_path, builder="line", bandwidth_bytes_per_s=sourced(1e9), skip=sourced(2), label="x")
    platform = load_platform(path)
    assert len(platform.links) == 2 * (3 + 2)
    assert platform.links[0] == Link("rank0", "rank1", 1e9, 0.0)
    assert platform.sources["topology.skip"] == "a test"


def test_a_builder_without_types_takes_what_the_file_says(install: Install, tmp_path: Path) -> None:
    install("freekit", free="build_anything")
    path = write(tmp_path, builder="free", speed=sourced(7))
    path.write_text(path.read_text().replace("ranks: 4", "ranks: 2"))
    assert load_platform(path).links[0].bandwidth_bytes_per_s == 7.0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"skips": sourced(2)}, "topology: the builder 'line' takes no 'skips'; did you mean skip"),
        ({"skip": sourced(1.5)}, r"topology\.skip: 1\.5 is not possible here; write {value: a whole number"),
        ({"skip": True}, r"topology\.skip: True is not possible here"),
        ({"label": sourced(1)}, r"topology\.label: 1 is not possible here; write a text"),
        ({"label": {"builder": "ring"}}, r"topology\.label: the topology 'ring' is not possible here"),
        ({"skip": 2}, r"topology\.skip: 2 has no source; write {value: 2, source"),
        ({"skip": [2]}, r"topology\.skip: \[2\] is not a parameter"),
    ],
)
def test_wrong_parameters_are_named(
    parameters: dict[str, object], message: str, install: Install, tmp_path: Path
) -> None:
    install("linekit", line="build_line")
    path = write(tmp_path, builder="line", bandwidth_bytes_per_s=sourced(1e9), **parameters)
    with pytest.raises(PlatformError, match=message) as caught:
        load_platform(path)
    assert str(path) in str(caught.value)


def test_a_missing_parameter_is_named(install: Install, tmp_path: Path) -> None:
    install("linekit", line="build_line")
    with pytest.raises(PlatformError, match="topology: the key 'bandwidth_bytes_per_s' is missing"):
        load_platform(write(tmp_path, builder="line"))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("build_texts", r"topology\.builder: the builder returned 'rank0->rank1', not a link"),
        ("build_broken", r"topology: build_broken failed: KeyError: 'nothing'"),
        ("NUMBER", r"topology\.builder: the builder 'odd' \(oddkit_nets:NUMBER\) is not a function"),
        ("absent", r"the builder 'odd' \(oddkit_nets:absent\) cannot be loaded"),
    ],
)
def test_a_builder_that_does_not_work_is_named(what: str, message: str, install: Install, tmp_path: Path) -> None:
    install("oddkit", odd=what)
    with pytest.raises(PlatformError, match=message):
        load_platform(write(tmp_path, builder="odd"))


def test_unknown_builders_offer_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(PlatformError) as caught:
        load_platform(write(tmp_path, builder="fat-tree"))
    assert "topology.builder: no builder is called 'fat-tree'" in str(caught.value)
    assert "did you mean fat_tree?" in str(caught.value) and "rail_optimised" in str(caught.value)


def test_no_package_replaces_a_builder_of_trioflow(install: Install) -> None:
    install("linekit", ring="build_line")
    assert find_builder("ring") is BUILDERS["ring"]


def test_a_name_that_two_packages_register_is_refused(install: Install) -> None:
    install("linekit", net="build_line")
    install("freekit", net="build_anything")
    with pytest.raises(PlatformError, match="the builder 'net' is registered 2 times"):
        find_builder("net")
