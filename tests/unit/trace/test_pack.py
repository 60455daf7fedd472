"""A trace in one file: the same bytes each time, the same trace back, and nothing damaged gets through."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from trioflow.base.errors import InputError, TraceError
from trioflow.cli import main
from trioflow.trace.store import MANIFEST, MEMBERS, find_trace, load_trace, open_pack, pack_trace, read_pack

TRACE = "gpt2-tiny-b8"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    file = tmp_path / "site-a" / "trace.zip"
    file.parent.mkdir()
    pack_trace(TRACE, file)
    return file


def rewrite(file: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Write a pack again with other members, each with a checksum that zip accepts."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def edit_manifest(**entries: object) -> Callable[[dict[str, bytes]], object]:
    def change(members: dict[str, bytes]) -> None:
        members[MANIFEST] = json.dumps({**json.loads(members[MANIFEST]), **entries}).encode()

    return change


def test_a_pack_holds_the_same_trace_and_says_where_it_comes_from(packed: Path) -> None:
    one, other = load_trace(TRACE), load_trace(packed)
    assert other.facts == one.facts
    pd.testing.assert_frame_equal(other.operators, one.operators)
    pd.testing.assert_frame_equal(other.tensors, one.tensors)
    for name in MEMBERS:
        assert open_pack(packed)[name] == (find_trace(TRACE) / name).read_bytes()
    with zipfile.ZipFile(packed) as archive:
        told = json.loads(archive.read(MANIFEST))["provenance"]
    assert told["workload"] == "gpt2-tiny" and told["batch"] == 8 and told["host"]


def test_packing_again_or_a_pack_gives_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    pack_trace(TRACE, tmp_path / "again.zip")
    pack_trace(packed, tmp_path / "copy.zip")
    expected = packed.read_bytes()
    assert (tmp_path / "again.zip").read_bytes() == expected
    assert (tmp_path / "copy.zip").read_bytes() == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update({"trace.json": m["trace.json"] + b" "}), "trace.json: differs from its digest"),
        (lambda m: m.pop("tensors.parquet"), "tensors.parquet"),
        (lambda m: m.update({"../escape": b""}), "../escape"),
        (lambda m: m.pop(MANIFEST), "pack.json is missing"),
        (lambda m: m.update({MANIFEST: b"{"}), "not valid JSON"),
        (edit_manifest(version=2), "version 2"),
        (edit_manifest(format="holiday pictures"), "no pack of a trace"),
        (edit_manifest(digest="0"), "digest of all members"),
        (edit_manifest(files={}), "does not list its members"),
    ],
)
def test_what_was_changed_on_the_way_is_refused(
    packed: Path, change: Callable[[dict[str, bytes]], object], words: str
) -> None:
    rewrite(packed, change)
    with pytest.raises(TraceError) as caught:
        read_pack(packed)
    assert words in str(caught.value) and str(packed) in str(caught.value)


@pytest.mark.parametrize("kept", [0, 100, 0.5, -1])
def test_a_file_cut_off_anywhere_is_refused(packed: Path, kept: float) -> None:
    content = packed.read_bytes()
    packed.write_bytes(content[: int(kept * len(content)) if 0 < kept < 1 else int(kept)])
    with pytest.raises(TraceError, match="not a readable pack"):
        read_pack(packed)


def test_every_flipped_byte_of_the_content_is_found(packed: Path) -> None:
    content = bytearray(packed.read_bytes())
    for place in range(200, len(content) - 400, len(content) // 23):
        damaged = bytearray(content)
        damaged[place] ^= 0x40
        packed.write_bytes(damaged)
        with pytest.raises(InputError):
            read_pack(packed)


def test_a_target_that_cannot_be_written_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such folder"):
        pack_trace(TRACE, tmp_path / "missing" / "trace.zip")
    with pytest.raises(TraceError, match="this is a folder"):
        pack_trace(TRACE, tmp_path)
    with pytest.raises(TraceError, match="no trace here"):
        pack_trace(tmp_path, tmp_path / "trace.zip")
    assert not list(tmp_path.iterdir())


def test_the_command_packs_and_every_command_takes_a_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "trace.zip")
    assert main(["pack", TRACE, "-o", file, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["files"]) == set(MEMBERS) and told["file"] == file
    answers = []
    for trace in (TRACE, file):
        assert main(["show", trace, "--json"]) == 0
        assert main(["simulate", trace, "--platform", "cpu2-gloo", "--plan", "single", "--json"]) == 0
        shown, simulated = capsys.readouterr().out.splitlines()
        answers.append((shown, json.loads(simulated) | {"simulator_wall_s": 0}))
    assert answers[0] == answers[1]
    Path(file).write_bytes(Path(file).read_bytes()[:5000])
    assert main(["show", file]) == 2
    assert "pack the trace again" in capsys.readouterr().err
