"""Which engine is repaid, and that no state of the cache folder breaks a run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trioflow.engine.compiled import run as compiled
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Platform
from trioflow.parallel.task_graph import TaskGraphBuilder

PROGRAM = """
import sys
from trioflow.engine.compiled import run as compiled
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Platform
from trioflow.parallel.task_graph import TaskGraphBuilder
builder = TaskGraphBuilder()
for duration_s in (1.0, 2.0):
    builder.add(0, "compute", "compute", "op", duration_s=duration_s)
platform = Platform("one", Device("chip", "gpu", 1, {}), 1, ())
result = simulate(builder.build(), platform, engine=sys.argv[1])
print(
    result.summary.step_time_s, "numba" in sys.modules, compiled.is_kept(),
    "numba.np.arrayobj" in sys.modules,  # of the compiler
)
"""


def run_program(engine: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, engine],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_loaded", {})
    monkeypatch.setattr(compiled, "_uncompiled", Counter())
    found = compiled.find_cache_folder()
    assert found is not None
    assert found.parent == tmp_path
    return found


def test_small_answers_do_not_wait_for_numba(tmp_path: Path) -> None:
    step_time_s, imported, *_ = run_program("auto", NUMBA_CACHE_DIR=str(tmp_path))
    assert (step_time_s, imported) == ("3.0", "False")
    assert list(tmp_path.iterdir()) == []


def test_is_repaid(folder: Path) -> None:
    assert not compiled.is_kept()
    assert not compiled.is_repaid(compiled.UNCOMPILED_FROM_EVENTS - 1)
    assert compiled.is_repaid(compiled.UNCOMPILED_FROM_EVENTS)
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "kernels.execute.1.nbc").touch()
    assert compiled.is_kept()
    assert not compiled.is_repaid(compiled.UNLOADED_FROM_EVENTS - 1)
    assert compiled.is_repaid(compiled.UNLOADED_FROM_EVENTS)
    builder = TaskGraphBuilder()
    builder.add(0, "compute", "compute", "op", duration_s=1.0)
    platform = Platform("one", Device("chip", "gpu", 1, {}), 1, ())
    assert simulate(builder.build(), platform, engine="reference").summary.events > 0
    assert compiled.is_repaid(compiled.UNLOADED_FROM_EVENTS - 1), "with what ran uncompiled before"


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert compiled.find_cache_folder() is None
    assert not compiled.is_kept()


class Kernel:
    """Stands in for a compiled function: fails so many times before it runs."""

    def __init__(self, made: list[Kernel], failures: int) -> None:
        made.append(self)
        self.made, self.failures = made, failures
        self.py_func, self.signatures, self.ran = self, [], 0
        self._cache = SimpleNamespace(save_overload=None)

    def enable_caching(self) -> None:
        if self.failures == 3:
            raise RuntimeError("no locator available")

    def __call__(self, state: Any) -> None:
        if self.failures:
            raise EOFError("Ran out of input")
        self.ran += 1


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_damaged_cache_is_made_anew_or_done_without(
    damaged: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Kernel] = []

    monkeypatch.setattr(compiled, "_bind_compiled", lambda: Kernel(made, damaged))
    monkeypatch.setattr(compiled, "_compile", lambda kernel: Kernel(made, kernel.failures - 1))
    folder.mkdir(parents=True)
    (folder / "broken").touch()
    for _ in range(2):
        compiled.run_kernels(None)
    assert [kernel.ran for kernel in made] == [0] * damaged + [2]
    assert folder.exists() == (damaged == 0)


@pytest.mark.slow
def test_kept_kernels_are_found_mended_and_done_without(tmp_path: Path) -> None:
    """The real numba: first run, second run, damaged files, and a folder nobody can make."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert run_program("compiled", **cache) == ["3.0", "True", "True", "True"]
    kept = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*.nb?")}
    assert sorted(path.suffix for path in kept) == [".nbc", ".nbi"]
    assert run_program("compiled", **cache) == ["3.0", "True", "True", "False"]
    assert all(path.read_bytes() == content for path, content in kept.items())
    for path, content in kept.items():
        path.write_bytes(content[: len(content) // 2])
        assert run_program("compiled", **cache) == ["3.0", "True", "True", "True"]
        assert path.stat().st_size > len(content) // 2, "made anew"
    (tmp_path / "file").touch()
    nowhere = {"NUMBA_CACHE_DIR": str(tmp_path / "file"), "HOME": str(tmp_path / "file")}
    assert run_program("compiled", **nowhere)[:2] == ["3.0", "True"]
