"""The wheel as somebody else installs it: whole, typed, and without PyTorch."""

import email
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from project_copy import ROOT

QUESTION = ["simulate", "gpt2-tiny-b8", "--plan", "ddp", "--ranks", "2", "--platform", "cpu2-gloo", "--json"]
WITHOUT_TORCH = """
import pathlib
import sys

for name in ("torch", "torchvision", "transformers", "snakemake", "seaborn", "matplotlib", "sklearn"):
    sys.modules[name] = None
import trioflow
from trioflow.cli import main

assert pathlib.Path.cwd() in pathlib.Path(trioflow.__file__).parents, "another trioflow was imported"
sys.exit(main())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = ["pyproject.toml", "README.md", "LICENSE"]
    files += subprocess.run(
        ["git", "ls-files", "workflow/trioflow", "workflow/trioflow_evaluation"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", folder, source], check=True)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_the_library_and_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        facts = next(name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = email.message_from_bytes(archive.read(facts))
    library = ROOT / "workflow"
    wanted = {
        str(path.relative_to(library))
        for path in library.glob("trioflow*/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == wanted
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["License-Expression"] == "MIT" and metadata["Requires-Python"] == ">=3.11"
    needed = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert not any(line.startswith(("torch", "snakemake", "seaborn")) for line in needed)


@pytest.mark.slow
def test_an_installed_wheel_answers_without_pytorch_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *QUESTION],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["step_time_s"] > 0 and list((place / "trioflow").glob("py.typed"))


@pytest.mark.slow
def test_wheel_and_source_archive_can_be_published(wheel: Path, tmp_path: Path) -> None:
    """As the package index and a reader of its page would look at them; the archive builds the same wheel."""
    tools = tmp_path / "tools"
    pip = [sys.executable, "-m", "pip", "--quiet"]
    install = [*pip, "install", "--no-deps", "--target", tools, "--requirement"]
    found = subprocess.run([*install, ROOT / "envs/package.lock"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"twine cannot be installed: {found.stderr.strip()[-200:]}")
    build = "import setuptools.build_meta as build; build.build_sdist('dist')"
    source = wheel.parent / "source"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    archive = next((source / "dist").glob("*.tar.gz"))
    # W009: the evaluation is a package of its own beside the library.
    checks = ["check_wheel_contents", "--ignore", "W009", wheel]
    for words in (["twine", "check", "--strict", wheel, archive], checks):
        run = subprocess.run(
            [sys.executable, "-m", *words], env={**os.environ, "PYTHONPATH": str(tools)}, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout + run.stderr
    again = tmp_path / "again"
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", again, archive], check=True)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(next(again.glob("*.whl"))) as other:
        assert set(one.namelist()) == set(other.namelist())


def find_python(version: str) -> str:
    """Return a Python of this version that runs here, pyenv's ones too; skip where there is none."""
    name, kept = f"python{version}", Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for program in (shutil.which(name), *kept.glob(f"versions/{version}.*/bin/{name}")):
        if program and not subprocess.run([program, "--version"], capture_output=True).returncode:
            return str(program)
    pytest.skip(f"there is no Python {version}")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_answers_in_a_clean_environment(wheel: Path, tmp_path: Path, version: str) -> None:
    """With whatever versions of its needs pip finds today, and nothing else."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip("the other tests run on it")
    subprocess.run([find_python(version), "-m", "venv", tmp_path / "clean"], check=True)
    programs = tmp_path / "clean/bin"
    install = [programs / "python", "-m", "pip", "install", "--quiet", wheel]
    found = subprocess.run(install, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"what the package needs cannot be installed: {found.stderr.strip()[-300:]}")
    run = subprocess.run(
        [programs / "trioflow", *QUESTION],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["step_time_s"] > 0
    assert not list((tmp_path / "clean").glob("lib/*/site-packages/torch*"))
