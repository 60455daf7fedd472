"""``trioflow retrieve``, through its own parser."""

import argparse
import hashlib
from pathlib import Path

import pytest
from trioflow.base.errors import DatasetError
from trioflow.cli.traces import add_retrieve
from trioflow.datasets import catalogue

from . import server as on

CONTENT = {"a b.csv": on.make_content(300), "c.csv": on.make_content(7)}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "TRIOFLOW_DATA_MIRROR", "TRIOFLOW_DATA_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def datasets(tmp_path: Path) -> Path:
    lines = [
        "base_url: http://data.example",
        "datasets:",
        "  own/set:",
        "    about: two small files",
        "    units: ms",
        "    repository: some/data",
        f'    commit: "{on.COMMIT}"',
        "    licence: MIT",
        "    files:",
    ]
    for path, content in CONTENT.items():
        digest = hashlib.sha256(content).hexdigest()
        lines.append(f'      - {{path: {path}, bytes: {len(content)}, sha256: "{digest}"}}')
    file = tmp_path / "datasets.yaml"
    file.write_text("\n".join(lines))
    return file


def run(*arguments: object) -> None:
    parser = argparse.ArgumentParser()
    add_retrieve(parser)
    options = parser.parse_args([*map(str, arguments)])
    options.run(options)


def test_it_retrieves_a_dataset_into_a_folder_that_is_a_mirror_then(
    tmp_path: Path, datasets: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = {f"/some/data/{on.COMMIT}/{path}": content for path, content in CONTENT.items()}
    first, second = tmp_path / "first", tmp_path / "second"
    with on.serve(content=served) as server:
        monkeypatch.setenv("TRIOFLOW_DATA_URL", server.url)
        run("own", "-o", first, "--datasets", datasets)
    said = capsys.readouterr().out
    assert {f.name: f.read_bytes() for f in (first / "some+data").iterdir()} == CONTENT
    assert server.url in said and "some/data MIT" in said

    monkeypatch.setenv("TRIOFLOW_DATA_MIRROR", str(first))
    run("own/set", "-o", second, "--datasets", datasets)
    assert {f.name: f.read_bytes() for f in (second / "some+data").iterdir()} == CONTENT
    run("some+data/c.csv", "-o", second, "--datasets", datasets)
    assert "already there" in capsys.readouterr().out
    assert len(server.asked) == 2


def test_it_lists_what_there_is(datasets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--list", "--datasets", datasets)
    table = capsys.readouterr().out
    assert "own/set" in table and "MIT" in table and "307 B" in table
    run("--list", "some+data/c.csv", "--datasets", datasets)
    facts = capsys.readouterr().out
    assert "two small files" in facts and on.COMMIT in facts and "units: ms" in facts
    assert "c.csv" in facts and "a b.csv" not in facts


def test_it_lists_the_shipped_catalogue_within_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    run("--list")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(catalogue.load_catalogue().datasets)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no dataset was named", "--list"]),
        (["own/sett"], ["'own/sett'", "did you mean own/set?"]),
        (["--list", "onw"], ["'onw'", "did you mean own?"]),
    ],
)
def test_it_says_what_is_wrong(tmp_path: Path, datasets: Path, arguments: list[str], words: list[str]) -> None:
    with pytest.raises(DatasetError) as caught:
        run(*arguments, "-o", tmp_path / "out", "--datasets", datasets)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_without_a_checkout_it_asks_for_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "CATALOGUE", tmp_path / "nowhere.yaml")
    with pytest.raises(DatasetError, match="--datasets FILE"):
        run("triosim")
