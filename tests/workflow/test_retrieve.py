"""The rule that retrieves public data, run by Snakemake against a server on this machine."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
from project_copy import ROOT, Project
from trioflow.datasets.catalogue import load_catalogue

sys.path.insert(0, str(ROOT / "tests/unit"))

from public_data import server as on

CATALOGUE = "workflow/resources/datasets.yaml"
CONTENT = {"a folder/b [1] (x) 50% #+?.csv": on.make_content(200_000), "plain": on.make_content(40), "empty.txt": b""}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "TRIOFLOW_DATA_MIRROR", "TRIOFLOW_DATA_URL"):
        monkeypatch.delenv(name, raising=False)


def write_catalogue(project: Project, url: str) -> None:
    files = [
        {"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for path, content in CONTENT.items()
    ]
    own = {
        "about": "made up",
        "units": "none",
        "repository": "some/data",
        "commit": on.COMMIT,
        "licence": "MIT",
        "files": files,
    }
    text = json.dumps({"base_url": url, "datasets": {"own/set": own}})
    (project.folder / CATALOGUE).write_text(text)  # JSON is YAML
    project.append("config/config.yaml", "\ndata:\n  groups: [own]\n")


def serve_all(*answers: on.Answer):
    paths = {f"/some/data/{on.COMMIT}/{path}": content for path, content in CONTENT.items()}
    return on.serve(*answers, content=paths)


def retrieved(project: Project) -> dict[str, bytes]:
    folder = project.folder / "results/data"
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_target_retrieves_the_groups_of_the_settings_once(project: Project) -> None:
    with serve_all(on.close) as served:
        write_catalogue(project, served.url)
        project.snakemake("--cores", "1", "data")
    assert retrieved(project) == {f"some+data/{path}": data for path, data in CONTENT.items()}
    assert len(served.asked) == 3, "two files, one of them asked for twice; the empty one needs none"
    log = project.folder / "results/logs/retrieve/some+data/plain.log"
    assert log.read_text() == f"some+data/plain: {served.url}/some/data/{on.COMMIT}/plain, MIT\n"
    assert project.planned("data") == {}

    other = hashlib.sha256(b"another commit's").hexdigest()
    project.edit(CATALOGUE, hashlib.sha256(CONTENT["plain"]).hexdigest(), other)
    assert project.planned("data") == {"data": 1, "retrieve": 1}, "the edited entry, no other"


def test_one_file_is_a_target_and_comes_from_the_mirror_where_there_is_one(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_catalogue(project, "http://127.0.0.1:9")
    for path, content in CONTENT.items():
        file = tmp_path / "mirror/some+data" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    monkeypatch.setenv("TRIOFLOW_DATA_MIRROR", str(tmp_path / "mirror"))
    name = next(iter(CONTENT))
    project.snakemake("--cores", "1", f"results/data/some+data/{name}")
    assert retrieved(project) == {f"some+data/{name}": CONTENT[name]}


def test_a_failure_leaves_one_sentence_and_no_file(project: Project) -> None:
    name = next(iter(CONTENT))
    with serve_all(on.drop_after(70_000), on.status(404), on.status(404)) as served:
        write_catalogue(project, served.url)
        text = project.snakemake("--cores", "1", f"results/data/some+data/{name}", status=1)
        log = (project.folder / f"results/logs/retrieve/some+data/{name}.log").read_text()
        assert len(served.asked) == 3, "Snakemake tries once more"
        assert "the server answers 404" in log and log.strip() in text and "Traceback" not in log
        assert retrieved(project) == {}


@pytest.mark.parametrize(
    ("target", "groups", "words"),
    [
        ("results/data/some+data/plian", "own", ["'some+data/plian'", "did you mean some+data/plain?"]),
        ("data", "onw", ["'onw'", "did you mean own?"]),
        ("data", "Own!", ["config/config.yaml", "data.groups", "'Own!'"]),
    ],
)
def test_a_misspelt_name_gets_the_likely_one(project: Project, target: str, groups: str, words: list[str]) -> None:
    write_catalogue(project, "http://127.0.0.1:9")
    project.edit("config/config.yaml", "[own]", f"['{groups}']")
    text = project.snakemake("--dry-run", target, status=1)
    for word in words:
        assert word in text
    assert f"{CATALOGUE}: no" in text or "Own!" in groups
    assert not (project.folder / "results/data").exists()


def test_nothing_that_runs_by_default_needs_a_network(project: Project) -> None:
    (project.folder / CATALOGUE).write_text("broken")
    assert "retrieve" not in project.planned()


def test_the_shipped_settings_name_datasets_that_there_are(project: Project) -> None:
    files = load_catalogue().select_files(["triosim"])
    assert project.planned("data") == {"data": 1, "retrieve": len(files)}
    assert len(files) == 6
