"""What memory is left is the least of what the machine, the groups and the limits leave."""

import resource
from pathlib import Path

import pytest
from trioflow.base import machine_memory
from trioflow.base.machine_memory import find_available_bytes


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that stands for /proc and /sys/fs/cgroup, and no limit of the shell."""
    for name, file in {"_MEMINFO": "meminfo", "_STATUS": "status", "_OWN_GROUPS": "own"}.items():
        monkeypatch.setattr(machine_memory, name, tmp_path / file)
    monkeypatch.setattr(machine_memory, "_GROUPS", tmp_path / "groups")
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: unlimited)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_a_system_that_says_nothing_leaves_it_open(system: Path) -> None:
    assert find_available_bytes() is None


def test_the_machine_and_the_groups_of_version_2_leave_the_least(system: Path) -> None:
    write(system, meminfo="MemTotal: 16000 kB\nMemAvailable:   8000 kB\n", own="0::/user/job\n")
    inner, outer = system / "groups/user/job", system / "groups/user"
    stat = "anon 1\ninactive_file 1000000\n"
    write(inner, memory__max="max\n", memory__current="5000000\n", memory__stat=stat)
    assert find_available_bytes() == 8000 * 1024
    write(outer, memory__max="6000000\n", memory__current="5000000\n", memory__stat=stat)
    assert find_available_bytes() == 2_000_000
    write(inner, memory__max="5500000\n")
    assert find_available_bytes() == 1_500_000


def test_groups_of_version_1_are_heeded(system: Path) -> None:
    write(system, own="5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n")
    write(
        system / "groups/memory/a",
        memory__limit_in_bytes="9000000\n",
        memory__usage_in_bytes="4000000\n",
        memory__stat="total_inactive_file 500000\n",
    )
    assert find_available_bytes() == 5_500_000


def test_the_shells_limit_of_the_address_space_is_heeded(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3_000_000, 3_000_000))
    write(system, status="Name:\tpython\nVmSize:\t    2000 kB\n")
    assert find_available_bytes() == 3_000_000 - 2000 * 1024
    write(system, status="VmSize:\t    4000 kB\n")
    assert find_available_bytes() == 0
