"""Files of users: whatever they hold, reading ends in their content or in one sentence, soon."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.base.input_files import DEEPEST, LARGEST_JSON_BYTES, parse_cells, read_text
from trioflow.base.provenance import atomic_path, read_json
from trioflow.base.settings import read_cells
from trioflow.base.yaml_files import LARGEST_BYTES, read_yaml
from trioflow.costmodel.choices import load_overrides
from trioflow.formats.nccl_tests import import_nccl_tests
from trioflow.hardware.machine import load_device
from trioflow.hardware.platform import load_platform
from trioflow.hardware.topologies.grids import read_edge_list
from trioflow.parallel.plan import read_stages
from trioflow.parallel.schedules.build import read_schedule
from trioflow.sweeps.description import load_sweep
from trioflow.trace.importers.chakra_nodes import read_messages
from trioflow.trace.importers.detect import import_trace
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile import kineto
from trioflow.trace.profile.kineto import MOST_EXPANSION, read_profile
from trioflow.trace.store import read_pack

READERS: dict[str, Callable[[Path], Any]] = {
    "text": read_text,
    "json": read_json,
    "yaml": read_yaml,
    "platform": load_platform,
    "sheet": lambda path: load_device(str(path)),
    "sweep": load_sweep,
    "edges": read_edge_list,
    "cells": lambda path: read_cells(path, ["a"], {}),
    "stages": read_stages,
    "schedule": read_schedule,
    "overrides": load_overrides,
    "log": lambda path: import_nccl_tests([path], "dgx-a100"),
    "pack": read_pack,
    "parquet": lambda path: tables.read_table(path, "operators"),
    "chakra": lambda path: list(read_messages(path)),
    "profile": read_profile,
    "import": lambda path: import_trace([path], ImportOptions()),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_and_a_device_are_refused_before_they_are_opened(name: str, tmp_path: Path) -> None:
    pipe, device = tmp_path / "pipe.yaml", tmp_path / "zero.yaml"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for path in (pipe, device):
        with pytest.raises(InputError, match=rf"{path.name}.*not a regular file"):
            READERS[name](path)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", [b"\x80", b'{"traceEvents": [{"name": "\x80"}]}', b'{"Type": 59, "a": "\x80"}\n'])
def test_bytes_that_are_no_text_are_refused(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "broken.txt").write_bytes(content)
    with pytest.raises(InputError, match=r"broken\.txt"):
        READERS[name](tmp_path / "broken.txt")


def test_sizes_are_bounded_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as stream:
        stream.truncate(LARGEST_JSON_BYTES + 1)  # a hole: it takes no room on the disk
    with pytest.raises(InputError, match=r"large\.json: it is larger than 67.1 MB"):
        read_json(path)
    with pytest.raises(InputError, match=r"large\.json: it is larger than 2.1 MB"):
        read_yaml(path)
    assert path.stat().st_size > LARGEST_BYTES


DEEP = DEEPEST + 1
BROKEN_JSON = {
    "[" * 100_000: "nested too deeply",
    "[" * DEEP + "]" * DEEP: f"nested too deeply, {DEEPEST} levels",
    '{"a": {"b": 1, "c": 2, "b": 3}}': "the key 'b' is written twice",
    '{"a": [1, {"b": NaN}]}': "a.1.b: nan is not finite",
    '{"a": [1, -1e999]}': "a.1: -inf is not finite",
    "1" * 5000: "not valid JSON",
    "{": "not valid JSON",
    "\udcff": "not UTF-8",
}


DOUBLING = "".join(f"k{n}: &k{n} [*k{n - 1}, *k{n - 1}]\n" for n in range(1, 40))
BROKEN_YAML = {
    f"k0: &k0 [x]\n{DOUBLING}": "aliases stand for too many values",
    "a: &a {x: 1}\n"
    + "".join(
        f"b{n}: &b{n} {{<<: [{', '.join(['*a' if not n else f'*b{n - 1}'] * 9)}]}}\n" for n in range(9)
    ): "aliases stand for too many values",
    "a: &a [*a]": "an alias lies within what it names",
    "[" * 100_000: "nested too deeply",
    "[" * DEEP + "]" * DEEP: "nested too deeply",
    "a: 1\na: 2": "the key 'a' is written twice",
    "a: {b: .nan}": "a.b: nan is not finite",
    "a: [1e999]": "a.0: inf is not finite",
    "a: 2001-13-45": "not readable as YAML",
    f"a: {'1' * 5000}": "not readable as YAML",
    "a: !!python/object:os.system x": "not readable as YAML",
    "a: \x00": "not readable as YAML",
}


BROKEN = [
    (load_platform, "some.yaml", "topology: {0: 1}", "a key is no text"),
    *((read_json, "some.json", text, words) for text, words in BROKEN_JSON.items()),
    *((read_yaml, "some.yaml", text, words) for text, words in BROKEN_YAML.items()),
]


@pytest.mark.parametrize(("read", "name", "text", "words"), BROKEN, ids=range(len(BROKEN)))
def test_what_a_file_must_not_hold_is_refused_in_a_sentence(
    read: Callable[[Path], Any], name: str, text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match=words) as error:
        read(path)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_yaml_keeps_what_people_use(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text("a: &a {x: 31.5e9}\nb: {y: 1e-6}\nc: [*a, *a]\n")
    assert read_yaml(path)["c"] == [{"x": 31.5e9}] * 2
    assert load_platform("dgx-h100", 8).ranks == 8


def test_an_open_quote_is_told_with_its_line() -> None:
    with pytest.raises(InputError, match=r"t\.csv, line 2: not a comma-separated file"):
        parse_cells('a,b\n1,"2\n', "t.csv")
    assert parse_cells('a\n\n"b\nc"\nd\n', "t.csv")[2:] == [(3, ["b\nc"]), (5, ["d"])]


def test_a_table_that_unpacks_to_more_than_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "many.parquet"
    pq.write_table(pa.table({"op_id": pa.array(range(1000), pa.int64())}), path)
    monkeypatch.setattr(tables.schemas, "find_available_bytes", lambda: 20_000)
    with pytest.raises(TableError, match=r"many\.parquet: its 1 k values take some .* 20 kB are free"):
        tables.read_table(path, "operators")


@pytest.mark.parametrize(
    ("begin", "read"),
    [(b'{"traceEvents": [', read_profile), (b'{"version": "0.0.4"}', lambda path: list(read_messages(path)))],
)
def test_a_file_that_unpacks_without_end_is_refused(
    begin: bytes, read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kineto, "CHUNK", 1 << 17)
    monkeypatch.setattr(kineto, "LONGEST", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(begin + b'{"ph":"M"},' * 1_000_000 + b"{}]}"))
    with pytest.raises(InputError, match=f"unpacks to more than {MOST_EXPANSION} times its size"):
        read(path)


def test_new_files_take_the_users_permissions(tmp_path: Path) -> None:
    path, before = tmp_path / "new.txt", os.umask(0o027)
    try:
        with atomic_path(path) as temporary:
            temporary.write_text("x")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
