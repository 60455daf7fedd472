"""What every page is made of: title, what was run, verdict, an ordered list of sections; all else is the same for all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trioflow import __version__
from trioflow.base.errors import TrioflowError
from trioflow.base.provenance import PACKAGE, atomic_path, digest_file, read_json
from trioflow.base.shipped import read_own_table
from trioflow.report.html import (
    Cell,
    Column,
    render_definitions,
    render_details,
    render_links,
    render_paragraph,
    render_table,
)
from trioflow.report.wording import NOTHING, count_words


@dataclass(frozen=True)
class Section:
    """One section of a page."""

    name: str  # its address in the page
    heading: str  # plain text
    # Paragraphs, tables and figures in order, as ``html`` renders them; a section without any is
    # left out of the page and of its contents.
    parts: Sequence[str]
    folded: bool = False  # shown as its heading until that is pressed

    @property
    def body(self) -> str:
        """The parts as one piece of HTML; empty where there is nothing to show."""
        return "\n".join(part for part in self.parts if part)


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str  # plain text
    sections: Sequence[Section]  # in the order of the page
    # headline, verdict: plain text under the title. The first sentence of the one says what was run, and
    # on what; the other is what a reader takes away who reads no further.
    headline: str = ""
    made_from: str = ""  # what stands behind the version in the footer, plain text
    verdict: str = ""
    # The last two sections: words and columns of tables that are explained, and files that were read.
    words: Mapping[str, str] = field(default_factory=dict)
    schemas: Mapping[str, pa.Schema] = field(default_factory=dict)
    files: Iterable[str | Path] = ()


@dataclass(frozen=True)
class _SitePage:
    """One page below ``results/report``."""

    file: str  # its name; all pages lie in one folder
    # title, about: what it is called and what it holds.
    title: str
    command: str  # makes it, and what it needs
    about: str


PAGES = tuple(_SitePage(**row) for row in read_own_table("report/pages/site"))
"""In the order in which they are listed. Pages that were not made yet are listed too, with their command."""
_FILES = frozenset(page.file for page in PAGES)
MADE = "pages.js"
"""Beside the pages: the names of those that exist, as a script that each of them reads."""

UNITS: Mapping[str, str] = {
    "s": "second; every duration in a report's table",
    "ns": "nanosecond, 1e-9 s; measured times on disk, whole numbers",
    "bytes": "byte of 8 bits; kB, MB, GB are powers of 1000, GiB is written out where 1024 is meant",
    "bytes/s": "bytes in a second",
    "flop": "one floating-point operation; an addition and a multiplication are two",
    "1/s": "per second; samples or tokens, as the column says",
}
"""Units of the tables' columns; a column without one is a count, a share (1 is 100 %) or words."""

FILES = {row["table"]: row["place"] for row in read_own_table("report/pages/files")}
"""Where a table lies below the results' folder."""


_INPUTS = ("inputs", "files")
"""Keys of a record under which the files behind a table stand."""


@cache
def read_look(kind: str) -> str:
    """Return what every page looks like (css) and does (js)."""
    return (PACKAGE / "data" / "report" / f"pages.{kind}").read_text(encoding="utf-8")


def render_page(page: Page, file: str = "", made: Iterable[str] = ()) -> str:
    """Return a page that needs nothing from outside; ``made``: the site's pages that exist, linked where no script runs."""
    last = [
        _glossary(page.words, page.schemas),
        provenance_section(page.files) if page.files else None,
    ]
    shown = [section for section in (*page.sections, *last) if section and section.body]
    opening = "\n".join(
        render_paragraph(text, kind)
        for text, kind in ((page.headline, "headline"), (page.verdict, "verdict"))
        if text
    )
    body = "\n".join(map(_render_section, shown))
    others = f'<script src="{MADE}"></script>\n' if file in _FILES else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>\n{read_look('css')}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#content">Skip to the content</a>\n'
        f"{_render_navigation(shown, file, set(made))}\n"
        f'<div class="body">\n<header><h1>{escape(page.title)}</h1>\n{opening}\n</header>\n'
        f'<main id="content">\n{body}\n</main>\n'
        f"<footer>Made by trioflow {escape(__version__ + page.made_from)}.</footer>\n</div>\n"
        f"{others}<script>\n{read_look('js')}</script>\n</body>\n</html>\n"
    )


def _render_section(section: Section) -> str:
    heading = f"<h2>{escape(section.heading)}</h2>"
    inside = (
        f'<details class="fold"><summary>{heading}</summary>\n{section.body}</details>'
        if section.folded
        else f"{heading}\n{section.body}"
    )
    return f'<section id="{escape(section.name)}">{inside}</section>'


def _render_navigation(shown: Sequence[Section], file: str, made: set[str]) -> str:
    """Return the links to all pages (a page not made: its command), this one's contents under its name."""
    links = [(section.name, section.heading) for section in shown]
    contents = render_links(links, "Contents") if links else ""
    lines = []
    for page in PAGES:
        title = escape(page.title)
        if page.file == file:
            name = f'<a href="#content" aria-current="page">{title}</a>{contents}'
        elif page.file in made:
            name = f'<a href="{page.file}">{title}</a>'
        else:
            name = f"<span>{title}</span>"
        kind = "" if page.file == file or page.file in made else ' class="unmade"'
        lines.append(
            f'<li data-page="{page.file}" title="{escape(page.about)}"{kind}>{name}'
            f"<code>{escape(page.command)}</code></li>"
        )
    alone = contents if file not in _FILES else ""
    pages = "\n".join(lines)
    return (
        f'<nav class="side" aria-label="Pages"><details><summary>Pages and contents</summary>\n{alone}'
        f'<ul id="pages">\n{pages}\n</ul></details></nav>'
    )


def write_page(path: str | Path, page: Page, site: str | Path | None = None) -> None:
    """Write a page, atomically, and list it in the navigation of the pages beside it.

    ``site``: the folder that the page will lie in, where it is not written there at once; then it is
    listed by the next call of ``list_pages`` for that folder.
    """
    target = Path(path)
    folder = Path(site) if site else target.parent
    text = render_page(page, target.name, _find_pages(folder))
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    if not site and target.name in _FILES:
        list_pages(folder)


def list_pages(folder: str | Path) -> None:
    """Write which pages of the site a folder holds, for the navigation of all of them.

    Several rules end at a time: whoever wrote last looks again, so that no page stays unlisted.
    """
    while True:
        found = _find_pages(Path(folder))
        with atomic_path(Path(folder) / MADE) as temporary:
            temporary.write_text(f"window.trioflowPages = {json.dumps(found)};\n", encoding="utf-8")
        if _find_pages(Path(folder)) == found:
            return


def _find_pages(folder: Path) -> list[str]:
    return [page.file for page in PAGES if (folder / page.file).is_file()]


def count_reached(reached: Iterable[bool | None]) -> str:
    """Say how many aims were reached; None is what has no aim. Nothing where there are none."""
    known = [one for one in reached if one is not None]
    return f"{sum(known)} of {count_words(len(known), 'aim')} reached." if known else ""


def _glossary(words: Mapping[str, str], schemas: Mapping[str, pa.Schema]) -> Section:
    parts = [render_definitions(words.items())] if words else []
    parts.append(render_tables(schemas) if schemas else "")
    return Section("glossary", "Glossary", parts, folded=True)


def provenance_section(files: Iterable[str | Path], words: str = "", parts: int = 2) -> Section:
    """Return the section that lists the files behind a page, after a paragraph about them."""
    listed = render_files_read(files, parts)
    text = render_paragraph(words) if words else ""
    return Section("provenance", "Where the numbers come from", [text, listed], folded=True)


def render_tables(schemas: Mapping[str, pa.Schema]) -> str:
    """Return what the columns of some tables (by name) mean, from their metadata, a folded list each, and the units."""
    used = {_text(field, b"unit") for schema in schemas.values() for field in schema} - {""}
    words = render_paragraph(
        "Columns of the tables behind this page, from the schemas that every table is checked against when it is "
        "written and read. A column without a unit is a count, a share (1 is 100 %) or words."
    )
    units = render_definitions((unit, UNITS.get(unit, unit)) for unit in sorted(used))
    return words + units + "".join(_render_table(name, schemas[name]) for name in schemas)


def _render_table(name: str, schema: pa.Schema) -> str:
    columns = [
        (field.name + (f" [{unit}]" if (unit := _text(field, b"unit")) else ""), _text(field, b"meaning"))
        for field in schema
    ]  # fmt: skip
    place = f": {FILES[name]}" if name in FILES else ""
    return render_details(f"{name.replace('_', ' ')}{place}", render_definitions(columns))


def _text(field: pa.Field, key: bytes) -> str:
    return str((field.metadata or {}).get(key, b"").decode())


def render_files_read(files: Iterable[str | Path], parts: int = 2) -> str:
    """Return the files that a page's numbers come from, folded, those no longer there left out; ``parts``: of their paths."""
    columns = [
        Column("file", "", "folder and name", number=False),
        Column("SHA-256", "first 16 digits", "digest of the content", number=False),
        Column("version", "of trioflow", "that wrote the file, where the file says so", number=False),
        Column("made from", "", "files that it names as its own inputs, with their digests", number=False),
    ]  # fmt: skip
    rows = []
    for file in sorted({Path(file) for file in files if Path(file).is_file()}):
        record = read_record(file)
        behind: dict[str, Any] = next(
            (record[key] for key in _INPUTS if isinstance(record.get(key), dict)), {}
        )
        listed = ", ".join(
            f"{name} {str(digest)[:16]}" for name, digest in sorted(behind.items())[:3]
        )
        more = f" and {len(behind) - 3} more" if len(behind) > 3 else ""
        rows.append([
            Cell("/".join(file.parts[-parts:])), Cell(digest_file(file)[:16]),
            Cell(str(record.get("trioflow_version") or NOTHING)), Cell((listed + more) or NOTHING),
        ])  # fmt: skip
    return render_details(
        f"{count_words(len(rows), 'file')} read", render_table(columns, rows, "Files read")
    )


def read_record(file: Path) -> dict[str, Any]:
    """Return what a file says of its own making; nothing where it says nothing."""
    try:
        if file.suffix == ".parquet":
            raw = (pq.read_schema(file).metadata or {}).get(b"trioflow", b"{}")
            found = json.loads(raw)
        elif file.suffix == ".json":
            found = read_json(file)
        else:
            return {}
    except (OSError, ValueError, TrioflowError, pa.ArrowException):
        return {}
    return found if isinstance(found, dict) else {}
