"""A release names its version in every place at once, and the conda recipe asks for what the package asks for."""

import datetime
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import trioflow
import yaml
from project_copy import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from release import change_files

DAY = datetime.date(2027, 2, 3)
PLACES = ("workflow/trioflow/__init__.py", "CITATION.cff", "envs/conda/meta.yaml", "CHANGELOG.md", "pyproject.toml")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in PLACES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def release(project: Path, version: str) -> dict[str, str]:
    for path, text in change_files(project, version, DAY).items():
        path.write_text(text, encoding="utf-8")
    return {name: (project / name).read_text(encoding="utf-8") for name in PLACES}


def test_a_release_changes_the_version_everywhere_and_nothing_else(project: Path) -> None:
    before = {name: (ROOT / name).read_text(encoding="utf-8") for name in PLACES}
    after = release(project, "7.2.0")
    assert '__version__ = "7.2.0"' in after[PLACES[0]]
    citation = yaml.safe_load(after["CITATION.cff"])
    assert (citation["version"], citation["date-released"]) == ("7.2.0", DAY)
    assert '{% set version = "7.2.0" %}' in after["envs/conda/meta.yaml"]
    assert "## 7.2.1, unreleased\n\n## 7.2.0, 2027-02-03\n" in after["CHANGELOG.md"]
    for name in PLACES:
        lines = set(before[name].splitlines()) ^ set(after[name].splitlines())
        assert len(lines) <= 4 and all(re.search(r"version|date-released|^## ", line) for line in lines), name
    again = release(project, "7.3.0")
    assert again["CITATION.cff"].count("date-released") == 1
    assert "## 7.3.1, unreleased\n\n## 7.3.0, 2027-02-03\n\n## 7.2.0, 2027-02-03\n" in again["CHANGELOG.md"]


def test_a_release_writes_the_projects_address_wherever_it_stands(project: Path) -> None:
    texts = change_files(project, "7.2.0", DAY, "https://host.example/owner/trioflow")
    assert not any("example.org" in text for text in texts.values())
    urls = tomllib.loads(texts[project / "pyproject.toml"])["project"]["urls"]
    assert urls["Issues"] == "https://host.example/owner/trioflow/issues"
    with pytest.raises(ValueError, match="is no address"):
        change_files(project, "7.2.0", DAY, "github.com/owner")


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.2", "is no version"), ("v1.0.0", "is no version"), ("0.0.9", "does not come after"), ("", "is no version")],
)
def test_a_wrong_version_changes_nothing(project: Path, version: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        change_files(project, version, DAY)


def test_a_version_is_released_once(project: Path) -> None:
    release(project, "7.2.0")
    with pytest.raises(ValueError, match=r"7\.2\.0 does not come after 7\.2\.0"):
        change_files(project, "7.2.0", DAY)


def test_a_file_without_its_version_is_named(project: Path) -> None:
    file = project / "envs/conda/meta.yaml"
    file.write_text(file.read_text().replace("set version", "set number"))
    with pytest.raises(ValueError, match=r"meta\.yaml names its version 0 times"):
        change_files(project, "7.2.0", DAY)


def test_the_recipe_is_the_packages() -> None:
    text = (ROOT / "envs/conda/meta.yaml").read_text(encoding="utf-8")
    version = re.search(r'{% set version = "(.*)" %}', text)
    assert version is not None and version[1] == trioflow.__version__
    plain = text.replace(version[0], "").replace("{{ version }}", version[1]).replace("{{ PYTHON }}", "python")
    recipe = yaml.safe_load(plain)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [f"python{project['requires-python']}", *project["dependencies"]]
    assert [need.replace(" ", "", 1) for need in recipe["requirements"]["run"]] == needs
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]
    assert recipe["build"]["entry_points"] == [f"{name} = {target}" for name, target in project["scripts"].items()]
