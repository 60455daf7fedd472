"""The catalogue: what it may hold, how it is asked, and that it is what the mirror holds."""

import csv
import re
from collections import Counter
from pathlib import Path

import pytest
from trioflow.base import provenance
from trioflow.base.errors import DatasetError
from trioflow.datasets import catalogue as module
from trioflow.datasets.catalogue import CATALOGUE, load_catalogue

REPOSITORY = Path(__file__).parents[3]
SHA = "ab" * 32
SMALL = f"""\
base_url: https://raw.example/
datasets:
  one/first:
    about: something
    units: ms
    repository: some/data
    commit: "{"01" * 20}"
    licence: MIT
    files:
      - path: a/b.csv
        bytes: 5
        sha256: "{SHA}"
  one/second:
    about: something else
    units: us
    traps: none
    repository: some/data
    commit: "{"23" * 20}"
    licence: Apache-2.0
    files:
      - path: c d.csv
        bytes: 6
        sha256: "{SHA}"
      - path: e.csv
        bytes: 0
        sha256: "{SHA}"
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "datasets.yaml"
    file.write_text(SMALL)
    return file


def test_files_inherit_what_their_dataset_says(small: Path) -> None:
    found = load_catalogue(small)
    assert (found.base_url, found.lfs_url) == ("https://raw.example", "")
    entry = found.find_file("some+data/c d.csv")
    assert (entry.dataset, entry.licence, entry.bytes) == ("one/second", "Apache-2.0", 6)
    assert entry.address == f"some/data/{'23' * 20}/c%20d.csv"


def test_files_are_selected_by_dataset_by_family_and_by_name(small: Path) -> None:
    found = load_catalogue(small)
    keys = [entry.key for entry in found.files()]
    assert [entry.key for entry in found.select_files(["one"])] == keys
    assert [e.key for e in found.select_files(["one/second", "some+data/e.csv"])] == keys[1:]
    assert found.select_files([]) == []


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("one/frist", "did you mean one/first?"),
        ("onee", "did you mean one?"),
        ("one/", "did you mean one?"),
        ("zzz", "known are one, one/first, one/second"),
        ("", "known are one, one/first, one/second"),
        ("some+data/a/b.cvs", "did you mean some+data/a/b.csv?"),
        ("q+q", "names start with one of some+data"),
    ],
)
def test_a_misspelt_name_gets_the_likely_one(small: Path, name: str, fix: str) -> None:
    with pytest.raises(DatasetError) as caught:
        load_catalogue(small).select_files([name])
    assert str(caught.value).startswith(f"{small}: no ")
    assert repr(name) in str(caught.value) and str(caught.value).endswith(fix)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "licence: MIT",
            "license: MIT",
            ["datasets.one/first", "one/first.license: unknown key", "did you mean licence?"],
        ),
        ("    units: ms\n", "", ["datasets.one/first", "the key 'units' is missing"]),
        ("bytes: 5", "bytes: -5", ["files.0.bytes", "-5 is below 0"]),
        ("bytes: 5", "bytes: five", ["files.0.bytes", "'five' is not of type integer"]),
        (SHA, SHA[1:], ["files.0.sha256", SHA[1:]]),
        ("01" * 20, "main", ["datasets.one/first.commit", "'main'", "full hash"]),
        ("some/data", "https://some/data", ["repository", "https"]),
        ("https://raw.example", "file:///raw", ["base_url", "file:///raw"]),
        ("https://raw.example", "https://me:pass@raw.example", ["base_url"]),
        ("one/first", "First", ["datasets", "'First'"]),
        ("one/first", "5", ["datasets", "5 is not of type string"]),
        ("one/second", "one/first", ["the key 'one/first' is written twice"]),
        ("path: e.csv", "path: c d.csv", ["some+data/c d.csv is listed twice", "one/second"]),
        ("path: e.csv", "path: a/b.csv", ["listed twice", "in one/first and one/second"]),
        ("path: e.csv", "path: a", ["some+data/a is a file and the folder of another"]),
        ("base_url:", "\tbase_url:", ["not readable as YAML"]),
        (SMALL, "[]", ["[] is not of type object"]),
        (SMALL, "", ["None is not of type object"]),
    ],
)
def test_a_broken_catalogue_is_refused_with_its_place(small: Path, old: str, new: str, words: list[str]) -> None:
    assert old in SMALL
    small.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(DatasetError) as caught:
        load_catalogue(small)
    assert str(small) in str(caught.value) and "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "path", ["../x", "a/../x", "/x", "a//x", "./x", "a/.", "a/", "..", "a\\\\b", "a{b}", "<results>"]
)
def test_no_path_leads_out_of_its_folder_or_is_a_wildcard(small: Path, path: str) -> None:
    small.write_text(SMALL.replace("path: e.csv", f'path: "{path}"'))
    with pytest.raises(DatasetError, match=r"files\.1\.path"):
        load_catalogue(small)


@pytest.mark.parametrize("path", ["a b (1) [x].csv", "...", "a..b/.c", "é %+?#.csv"])
def test_other_paths_are_fine(small: Path, path: str) -> None:
    small.write_text(SMALL.replace("path: e.csv", f'path: "{path}"'))
    assert load_catalogue(small).find_file(f"some+data/{path}").path == path


def test_a_missing_catalogue_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetError, match=r"nowhere\.yaml: cannot be read"):
        load_catalogue(tmp_path / "nowhere.yaml")
    with pytest.raises(DatasetError, match=r"^datasets: cannot be read"):
        load_catalogue(tmp_path / "nowhere.yaml", "datasets")
    monkeypatch.setattr(module, "CATALOGUE", tmp_path / "nowhere.yaml")
    with pytest.raises(DatasetError, match=r"no catalogue.*--datasets FILE"):
        load_catalogue()


def test_an_edited_catalogue_is_read_again(small: Path) -> None:
    load_catalogue(small)
    small.write_text(SMALL.replace("bytes: 5", "bytes: 50"))
    assert load_catalogue(small).find_file("some+data/a/b.csv").bytes == 50


def test_the_shipped_catalogue_tells_what_each_dataset_is() -> None:
    found = load_catalogue()
    assert found.file == CATALOGUE == REPOSITORY / "workflow/resources/datasets.yaml"
    for dataset in found.datasets.values():
        for text in (dataset.about, dataset.units, dataset.traps):
            assert "\n" not in text
        assert len(dataset.about.split()) > 5 and dataset.units
    assert sum(1 for _ in found.files()) == 602


def test_the_page_on_data_names_every_repository_with_its_licence() -> None:
    page = (REPOSITORY / "docs/data.md").read_text()
    rows = dict(re.findall(r"^\| `([^`]+/[^`]+)` \| ([^ |]+) \|", page, re.MULTILINE))
    assert rows == {entry.repository: entry.licence for entry in load_catalogue().files()}
    families = {name.partition("/")[0] for name in load_catalogue().datasets}
    for word in [*families, "TRIOFLOW_DATA_MIRROR", "TRIOFLOW_DATA_URL", "https_proxy"]:
        assert f"`{word}`" in page


def test_every_entry_is_what_the_mirror_holds(mirror: Path) -> None:
    for entry in load_catalogue().files():
        file = mirror / entry.key
        assert file.stat().st_size == entry.bytes, entry.key
        assert provenance.digest_file(file) == entry.sha256, entry.key


def test_every_entry_is_in_the_mirrors_list_which_may_have_more(mirror: Path) -> None:
    listing = mirror / "MANIFEST.csv"
    if not listing.exists():
        pytest.skip("the mirror has no MANIFEST.csv")
    with listing.open() as stream:
        rows = [
            (
                row["repo"],
                row["commit"],
                row["path"],
                int(row["bytes"]),
                row["sha256"],
                row["license"].partition(" ")[0],
            )
            for row in csv.DictReader(stream)
        ]
    entries = [(e.repository, e.commit, e.path, e.bytes, e.sha256, e.licence) for e in load_catalogue().files()]
    assert Counter(entries) <= Counter(rows)
