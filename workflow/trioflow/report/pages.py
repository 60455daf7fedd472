"""What every page is made of: title, what was run, verdict, an ordered list of sections; all else is the same for all.

A `Page` holds `Section` after `Section`, and `write_page` writes it. Beside them stand the few pieces of HTML that pages
use (tables, figures, paragraphs, lists), and numbers and facts as a reader sees them.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from trioflow import __version__
from trioflow.base.errors import TrioflowError
from trioflow.base.provenance import PACKAGE, atomic_path, digest_file, read_json, read_own_table
from trioflow.base.units import format_bytes, format_count, format_time

SHARES = ("_error", "_overhead", "_fraction", "_share", "drift", "overhead", "overlap", "share")
_MINUS = "\u2212"
NOTHING = "\u2013"


def write_time(time_s: float) -> str:
    """Write a time [s] with three significant digits."""
    return format_time(time_s).replace(" us", " \u00b5s")


def write_percent(share: float | None, digits: int = 1) -> str:
    """Write a share as a percentage; a missing one as a dash."""
    if share is None or math.isnan(share):
        return NOTHING
    return f"{100 * share:.{digits}f} %"


def write_signed_percent(share: float | None, digits: int = 1) -> str:
    """Write a share as a percentage with its sign, a true minus and no negative zero."""
    if share is None or math.isnan(share):
        return NOTHING
    return f"{write_signed(100 * share, digits)} %"


def write_signed(value: float, digits: int = 1) -> str:
    """Write a number with its sign, a true minus and no negative zero."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", _MINUS) if float(text) else f"{0:.{digits}f}"


def write_range(low_s: float, high_s: float) -> str:
    """Write a range of times [s]."""
    low, high = write_time(low_s), write_time(high_s)
    unit = high.rpartition(" ")[2]
    return f"{low.removesuffix(' ' + unit)} to {high}" if low.endswith(" " + unit) else f"{low} to {high}"


def join_words(words: Iterable[str]) -> str:
    """Join words as in a sentence: a, b and c."""
    parts = list(words)
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def count_words(count: int, word: str) -> str:
    """Write a count with its noun in the right number."""
    return f"{count} {word if count == 1 else word + 's'}"


def flatten_facts(facts: Mapping[str, Any], skip: Iterable[str] = ()) -> dict[str, str]:
    """Turn nested facts into dotted names to text, units read from the names; lists of numbers become their range."""
    lines: dict[str, str] = {}
    left_out = set(skip)
    for key, value in facts.items():
        if key in left_out:
            continue
        if isinstance(value, Mapping):
            lines.update({f"{key}.{name}": text for name, text in flatten_facts(value).items()})
        else:
            lines[key] = _write_fact(key, value)
    return lines


def write_label(name: str) -> str:
    """Turn the dotted name of a fact into words; its value carries the unit."""
    for unit in ("_bytes_per_s", "_bytes", "_ns", "_s", "_flop"):
        name = name.removesuffix(unit)
    return name.replace(".", ": ").replace("_", " ")


def _write_fact(name: str, value: Any) -> str:
    """Write one fact; its name gives the unit."""
    if value is None or value in ("", []):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return _write_number(name, value)
    if not isinstance(value, (list, tuple)):
        return str(value)
    return _write_list(name, value)


def _write_list(name: str, value: Sequence[Any]) -> str:
    """Write a list: words one after the other, many numbers as their range."""
    if any(isinstance(item, bool) or not isinstance(item, (int, float)) for item in value):
        if len(value) > 1 and len({str(item) for item in value}) == 1:
            return f"{value[0]} ({len(value)} times)"
        return ", ".join(str(item) for item in value)
    if len(value) <= 4:
        return ", ".join(_write_number(name, item) for item in value)
    ends = _write_number(name, min(value)), _write_number(name, max(value))
    return f"{ends[0]} to {ends[1]} ({len(value)} values)"


_WRITERS: tuple[tuple[tuple[str, ...], Callable[[float], str]], ...] = (
    (("bytes_per_s",), lambda value: f"{format_bytes(value)}/s"),
    (("_s",), write_time),
    (("_ns",), lambda value: f"{value:.0f} ns"),
    (("bytes",), format_bytes),
    (("flop",), lambda value: f"{format_count(value)}flop"),
    (SHARES, write_percent),
)
"""Endings of names, the first that fits deciding."""


def _write_number(name: str, value: float) -> str:
    """Write a number in the unit that its name says."""
    if not math.isfinite(value):
        return str(value)
    for endings, write in _WRITERS:
        if name.endswith(endings):
            return write(value)
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _write_line(cells: Iterable[Any]) -> str:
    """Return one line of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def write_markdown(headings: Sequence[str], rows: Iterable[Sequence[Any]], left: Sequence[int] = (0,)) -> str:
    """Return a Markdown table; columns that are not ``left`` are set flush right."""
    rules = ["---" if at in left else "---:" for at in range(len(headings))]
    return "\n".join(_write_line(cells) for cells in (headings, rules, *rows))


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str  # plain text
    # What the column is sorted by; the text where left out. Cells with an empty string or a float
    # that is not a number come last.
    sort: float | str | None = None
    detail: str = ""  # smaller second line
    html: str = ""  # ready HTML that replaces the text


_LONG = 36
"""Characters of a cell that wraps; it never gets narrower than it can be read."""
_MEDIUM = 20
"""Characters of a cell that wraps where the table is wider than the page otherwise."""


def render_figure(
    source: str,
    caption: str | Sequence[str],
    alternative: str = "",
    *,
    width_px: int | None = None,
    files: Mapping[str, str] | None = None,
    noted: bool = False,
) -> str:
    """Return a figure; ``source`` and ``files`` (text to address, linked at the end) are relative to the page.

    ``caption``: plain text, or parts, of which the first says what is shown, and is the
    ``alternative`` by default. ``noted``: parts of the picture say what they are
    (``style.add_notes``): an object, of which a pointer can ask.
    """
    sentences = [caption] if isinstance(caption, str) else list(caption)
    files = {**(files or {}), **({"the picture alone": source} if noted else {})}
    links = ", ".join(f'<a href="{escape(to)}">{text}</a>' for text, to in files.items())
    width = f' style="width: {width_px}px; max-width: 100%"' if width_px else ""
    words = escape(alternative or sentences[0])
    shown = (
        f'<object data="{escape(source)}" type="image/svg+xml" role="img" aria-label="{words}">{words}</object>'
        if noted
        else f'<a href="{escape(source)}"><img src="{escape(source)}"{width} alt="{words}"></a>'
    )
    return (
        f'<figure><div class="wide">{shown}</div>'
        f"<figcaption>{escape_text(' '.join(sentences))}{f' ({links})' if links else ''}"
        "</figcaption></figure>"
    )


def read_captions(module: str) -> dict[str, tuple[str, ...]]:
    """Return the captions that a module has in ``data/<module>``, by figure, paragraph by paragraph.

    The first says what the figure shows, the last where it stops being true. Snakemake's own report
    shows the same files.
    """
    return {
        path.stem: tuple(" ".join(part.split()) for part in path.read_text(encoding="utf-8").split("\n\n"))
        for path in sorted((PACKAGE / "data" / module).glob("*.rst"))
    }


def render_paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    attribute = f' class="{escape(kind)}"' if kind else ""
    return f"<p{attribute}>{escape_text(text)}</p>"


def render_list(items: Iterable[str], *, ordered: bool = False, prefix: str = "") -> str:
    """Return a list of plain text; with a prefix, item n has the address ``prefix-n``."""
    lines = []
    for number, item in enumerate(items, 1):
        address = f' id="{escape(prefix)}-{number}"' if prefix else ""
        lines.append(f"<li{address}>{escape_text(item)}</li>")
    tag = "ol" if ordered else "ul"
    return f'<{tag} class="notes">' + "\n".join(lines) + f"</{tag}>"


def render_definitions(entries: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms and their meanings."""
    lines = [f"<dt>{escape(term)}</dt><dd>{escape_text(meaning)}</dd>" for term, meaning in entries]
    return '<dl class="facts">' + "\n".join(lines) + "</dl>"


def render_links(entries: Iterable[tuple[str, str]], label: str) -> str:
    """Return a list of links (address in the page, text)."""
    lines = [f'<li><a href="#{escape(to)}">{escape(text)}</a></li>' for to, text in entries]
    return f'<nav aria-label="{escape(label)}"><ol>' + "\n".join(lines) + "</ol></nav>"


def escape_text(text: str) -> str:
    """Escape plain text for HTML, and keep each number on one line with its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|[nm\u00b5]?s|[kMGT]?B)(?!\w))", "&nbsp;", escape(text))


def render_details(title: str, body: str) -> str:
    """Return ready HTML that stays folded until its title is pressed; nothing for no HTML."""
    return f"<details><summary>{escape_text(title)}</summary>{body}</details>" if body else ""


def _class(field: "Field", cell: Cell | None = None) -> str:
    if field.number:
        return ' class="number"'
    letters = 0 if cell is None else len(cell.text)
    return ' class="long"' if letters > _LONG else ' class="medium"' if letters > _MEDIUM else ""


def _title(meaning: str) -> str:
    return f' title="{escape(meaning)}"' if meaning else ""


def _sort_key(value: float | str) -> str:
    """Return the text that the script sorts by: a number in full, or the words; nothing sorts last."""
    if isinstance(value, str):
        return value
    return "" if math.isnan(value) else repr(float(value))


def _cell(write: Callable[[float], str], value: Any, detail: str = "") -> Cell:
    """Return a number's cell; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return Cell(NOTHING, "")
    return Cell(write(float(value)), float(value), detail)


percent_cell = partial(_cell, write_percent)
signed_cell = partial(_cell, write_signed_percent)
"""Cells of a share, as a percentage, and with its sign."""
time_cell = partial(_cell, write_time)
"""Cell of a time [s]."""
number_cell, short_cell, plain_cell = (partial(_cell, text.format) for text in ("{:.3f}", "{:.2f}", "{:g}"))
"""Cells of a plain number: with three digits, with two, with as few as it needs."""
ratio_cell = partial(_cell, "{:.2f} times".format)
"""Cell of a factor."""
bandwidth_cell = partial(_cell, lambda rate: f"{rate / 1e9:.3g}")
"""Cell of a bandwidth [bytes/s], in GB/s."""


def oracle_cell(value: Any, detail: str) -> Cell:
    """Return the cell of an oracle's error; a dash where the oracle is what was measured."""
    return percent_cell(value or None, detail)


def part_cell(part: str) -> Cell:
    """Return the cell of a place of measurement: the device, below it the dataset."""
    device, _, dataset = part.partition("; ")
    return Cell(device, part, dataset)


def count_cell(value: Any) -> Cell:
    """Return the cell of a count."""
    return Cell(str(int(value)), float(value))


def itself(record: Any) -> Any:
    """Return the record, for a column whose cell is made of several of its values."""
    return record


class Field(NamedTuple):
    """One column of a table of records: its heading, and how a record becomes its cell."""

    title: str  # plain text
    detail: str  # smaller second line: the unit, or what stands in brackets
    meaning: str  # shown when the pointer rests on the heading
    read: Callable[[Any], Cell]
    number: bool = True  # whether the cells are numbers, set flush right


def words(title: str, detail: str, meaning: str, read: str | Callable[[Any], Any]) -> Field:
    """Return a column of text: a key of the records, or a function of one that returns text or a cell."""
    return Field(
        title, detail, meaning, lambda row: _as_cell(row[read] if isinstance(read, str) else read(row)), number=False
    )


CELLS: Mapping[str, Callable[[Any], Cell]] = {
    "bandwidth": bandwidth_cell,
    "count": count_cell,
    "number": number_cell,
    "percent": percent_cell,
    "plain": plain_cell,
    "ratio": ratio_cell,
    "short": short_cell,
    "signed": signed_cell,
    "time": time_cell,
}
Kind = str | Callable[[Any], Cell]
"""How a column's numbers are written: a key of ``CELLS``, or what makes a cell of one."""


def numbers(title: str, detail: str, meaning: str, kind: Kind, read: str | Callable[[Any], Any]) -> Field:
    """Return a column of numbers: a key of the records, or a function of one."""
    cell = CELLS[kind] if isinstance(kind, str) else kind
    return Field(title, detail, meaning, lambda row: cell(row[read] if isinstance(read, str) else read(row)))


def _as_cell(value: Any) -> Cell:
    return value if isinstance(value, Cell) else Cell(str(value))


def list_numbers(meanings: Mapping[str, str], heads: Iterable[tuple[str, str, Kind, str]]) -> list[Field]:
    """Return columns of numbers: title, detail, kind and key of each; ``meanings``: by key."""
    return [numbers(title, detail, meanings[key], kind, key) for title, detail, kind, key in heads]


def render_records(records: Iterable[Any] | pd.DataFrame, fields: Sequence[Field], caption: str = "") -> str:
    """Return a table with a row for each record, or each row of a frame.

    It sorts when a heading is pressed and scrolls by itself when too wide.
    """
    heads = "".join(
        f'<th scope="col"{_class(field)}{_title(field.meaning)}><span>{escape(field.title)}</span>'
        + (f"<small>{escape(field.detail)}</small>" if field.detail else "")
        + "</th>"
        for field in fields
    )
    lines = []
    for record in records.to_dict("records") if isinstance(records, pd.DataFrame) else records:
        cells = []
        for number, one in enumerate(fields):
            tag, cell = "td" if number else 'th scope="row"', one.read(record)
            sort = cell.text if cell.sort is None else cell.sort
            content = cell.html or escape_text(cell.text)
            content += f"<small>{escape_text(cell.detail)}</small>" if cell.detail else ""
            cells.append(
                f'<{tag}{_class(one, cell)} data-sort="{escape(_sort_key(sort))}">'
                f"{content}</{tag.split(maxsplit=1)[0]}>"
            )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = f"<caption>{escape_text(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide"><table class="sortable">{head}<thead><tr>{heads}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


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
    last = [_glossary(page.words, page.schemas), provenance_section(page.files) if page.files else None]
    shown = [section for section in (*page.sections, *last) if section and section.body]
    opening = "\n".join(
        render_paragraph(text, kind) for text, kind in ((page.headline, "headline"), (page.verdict, "verdict")) if text
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
        pages = _find_pages(Path(folder))
        with atomic_path(Path(folder) / MADE) as temporary:
            temporary.write_text(f"window.trioflowPages = {json.dumps(pages)};\n", encoding="utf-8")
        if _find_pages(Path(folder)) == pages:
            return


def _find_pages(folder: Path) -> list[str]:
    return [page.file for page in PAGES if (folder / page.file).is_file()]


def count_reached(reached: Iterable[bool | None]) -> str:
    """Say how many aims were reached; None is what has no aim. Nothing where there are none."""
    known = [one for one in reached if one is not None]
    return f"{sum(known)} of {count_words(len(known), 'aim')} reached." if known else ""


def _glossary(words: Mapping[str, str], schemas: Mapping[str, pa.Schema]) -> Section:
    parts = [render_definitions(words.items()) if words else "", render_tables(schemas) if schemas else ""]
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
    ]
    place = f": {FILES[name]}" if name in FILES else ""
    return render_details(f"{name.replace('_', ' ')}{place}", render_definitions(columns))


def _text(field: pa.Field, key: bytes) -> str:
    return str((field.metadata or {}).get(key, b"").decode())


def render_files_read(files: Iterable[str | Path], parts: int = 2) -> str:
    """Return the files that a page's numbers come from, folded, those no longer there left out; ``parts``: of their paths."""
    listed = [(file, read_record(file)) for file in sorted({Path(file) for file in files if Path(file).is_file()})]
    fields = [
        words("file", "", "folder and name", lambda one: "/".join(one[0].parts[-parts:])),
        words("SHA-256", "first 16 digits", "digest of the content", lambda one: digest_file(one[0])[:16]),
        words(
            "version",
            "of trioflow",
            "that wrote the file, where the file says so",
            lambda one: one[1].get("trioflow_version") or NOTHING,
        ),
        words(
            "made from",
            "",
            "files that it names as its own inputs, with their digests",
            lambda one: _list_inputs(one[1]),
        ),
    ]
    return render_details(f"{count_words(len(listed), 'file')} read", render_records(listed, fields, "Files read"))


def _list_inputs(record: Mapping[str, Any]) -> str:
    """Return the files behind a table, and their digests; a dash where its record names none."""
    behind: dict[str, Any] = next((record[key] for key in _INPUTS if isinstance(record.get(key), dict)), {})
    listed = ", ".join(f"{name} {str(digest)[:16]}" for name, digest in sorted(behind.items())[:3])
    return listed + (f" and {len(behind) - 3} more" if len(behind) > 3 else "") or NOTHING


def read_record(file: Path) -> dict[str, Any]:
    """Return what a file says of its own making; nothing where it says nothing."""
    try:
        if file.suffix == ".parquet":
            raw = (pq.read_schema(file).metadata or {}).get(b"trioflow", b"{}")
            record = json.loads(raw)
        elif file.suffix == ".json":
            record = read_json(file)
        else:
            return {}
    except (OSError, ValueError, TrioflowError, pa.ArrowException):
        return {}
    return record if isinstance(record, dict) else {}
