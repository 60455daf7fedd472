"""The glossary, the pages and the files read: taken from what they tell of, so that they cannot drift."""

import re
from html import escape
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from trioflow import __version__, tables
from trioflow.base.provenance import digest_file, stamp, write_json
from trioflow.report.inputs import OWN_TABLES
from trioflow.report.pages import (
    FILES,
    PAGES,
    UNITS,
    Page,
    Section,
    escape_text,
    read_record,
    render_files_read,
    render_page,
    render_tables,
)

ROOT = Path(__file__).parents[3]


def test_every_column_of_every_table_is_told_with_its_unit():
    text = render_tables(tables.SCHEMAS)
    for schema in tables.SCHEMAS.values():
        for field in schema:
            unit = field.metadata[b"unit"].decode()
            name = field.name + (f" [{unit}]" if unit else "")
            assert (
                f"<dt>{name}</dt><dd>{escape_text(field.metadata[b'meaning'].decode())}</dd>"
                in text
            )


def test_every_unit_has_a_meaning_and_only_units_that_are_used_are_told():
    used = {f.metadata[b"unit"].decode() for schema in tables.SCHEMAS.values() for f in schema}
    assert used - {""} <= set(UNITS)
    only = pa.schema([pa.field("a", pa.int64(), metadata={"unit": "flop", "meaning": "work"})])
    text = render_tables({"one": only})
    assert "<dt>flop</dt>" in text and "<dt>ns</dt>" not in text and "<dt>a [flop]</dt>" in text


def test_places_are_those_of_tables_that_rules_write():
    known = {*tables.SCHEMAS, *OWN_TABLES, "anchors"}
    assert set(FILES) <= known
    rules = "\n".join(path.read_text() for path in sorted((ROOT / "rules").rglob("*.smk")))
    for places in FILES.values():
        for place in places.split(", "):
            name = Path(place).name
            pattern = re.sub("<[a-z]+>", '[^"/]+', re.escape(name))
            stem = re.escape(name.removesuffix(".parquet"))
            assert re.search(rf'{pattern}|"{stem}"', rules) or "traces" in name, place


def test_every_page_names_all_pages_with_the_command_that_makes_them():
    text = render_page(Page("t", [Section("one", "One", ["<p>1</p>"])]))
    for page in PAGES:
        assert f"<span>{escape(page.title)}</span>" in text
        assert f"<code>{page.command}</code>" in text
    assert len({page.file for page in PAGES}) == len(PAGES)
    rules = "\n".join(path.read_text() for path in sorted((ROOT / "rules").rglob("*.smk")))
    for page in PAGES:
        target = page.command.rpartition(" ")[2]
        assert target == "reproduce" or f"\nrule {target}:\n" in rules, page.command


def test_files_are_told_with_digest_version_and_what_they_were_made_from(tmp_path):
    source = tmp_path / "in/source.json"
    write_json(source, {"trioflow_version": "0.0.1"})
    table = tmp_path / "out/cases.parquet"
    schema = pa.schema([pa.field("a", pa.int64(), metadata={"unit": "", "meaning": "x"})])
    tables.write_table(pd.DataFrame({"a": [1]}), "cases", table, stamp([source]), schema)
    plain = tmp_path / "out/notes.txt"
    plain.write_text("x")
    text = render_files_read([table, source, plain, tmp_path / "gone.parquet"])
    assert "3 files read" in text
    for file in (source, table, plain):
        assert f"{file.parent.name}/{file.name}" in text and digest_file(file)[:16] in text
    assert __version__ in text and "0.0.1" in text
    assert f"in/source.json {digest_file(source)[:16]}" in text
    assert "gone" not in text


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_a_file_that_says_nothing_of_itself_is_no_error(tmp_path, content):
    for name in ("a.json", "a.parquet", "a.bin"):
        (tmp_path / name).write_text(content)
        assert read_record(tmp_path / name) == {}
