"""The few pieces of HTML that pages are made of: tables, figures, paragraphs, lists."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any, NamedTuple

import pandas as pd

from trioflow.base.provenance import PACKAGE
from trioflow.report.wording import NOTHING, write_percent, write_signed_percent, write_time


@dataclass(frozen=True)
class Column:
    """Heading of a table's column."""

    title: str  # plain text
    detail: str = ""  # smaller second line: the unit, or what stands in brackets
    meaning: str = ""  # shown when the pointer rests on the heading
    number: bool = True  # whether the cells are numbers, set flush right


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


def render_table(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], caption: str = ""
) -> str:
    """Return a table that sorts when a heading is pressed and scrolls by itself when too wide."""
    heads = "".join(
        f'<th scope="col"{_class(column)}{_title(column.meaning)}><span>{escape(column.title)}</span>'
        + (f"<small>{escape(column.detail)}</small>" if column.detail else "")
        + "</th>"
        for column in columns
    )
    lines = []
    for row in rows:
        cells = []
        for number, (column, cell) in enumerate(zip(columns, row, strict=True)):
            tag = 'th scope="row"' if number == 0 else "td"
            sort = cell.text if cell.sort is None else cell.sort
            content = cell.html or escape_text(cell.text)
            content += f"<small>{escape_text(cell.detail)}</small>" if cell.detail else ""
            cells.append(
                f'<{tag}{_class(column, cell)} data-sort="{escape(_sort_key(sort))}">'
                f"{content}</{tag.split(maxsplit=1)[0]}>"
            )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = f"<caption>{escape_text(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide"><table class="sortable">{head}<thead><tr>{heads}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


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
        path.stem: tuple(
            " ".join(part.split()) for part in path.read_text(encoding="utf-8").split("\n\n")
        )
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


def _class(column: Column, cell: Cell | None = None) -> str:
    if column.number:
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
number_cell, short_cell, plain_cell = (
    partial(_cell, text.format) for text in ("{:.3f}", "{:.2f}", "{:g}")
)
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

    column: Column
    read: Callable[[Any], Cell]


def words(title: str, detail: str, meaning: str, read: str | Callable[[Any], Any]) -> Field:
    """Return a column of text: a key of the records, or a function of one that returns text or a cell."""
    column = Column(title, detail, meaning, number=False)
    return Field(column, lambda row: _as_cell(row[read] if isinstance(read, str) else read(row)))


CELLS: Mapping[str, Callable[[Any], Cell]] = {
    "bandwidth": bandwidth_cell, "count": count_cell, "number": number_cell, "percent": percent_cell, "plain": plain_cell,
    "ratio": ratio_cell, "short": short_cell, "signed": signed_cell, "time": time_cell,
}  # fmt: skip
Kind = str | Callable[[Any], Cell]
"""How a column's numbers are written: a key of ``CELLS``, or what makes a cell of one."""


def numbers(
    title: str, detail: str, meaning: str, kind: Kind, read: str | Callable[[Any], Any]
) -> Field:
    """Return a column of numbers: a key of the records, or a function of one."""
    cell = CELLS[kind] if isinstance(kind, str) else kind
    return Field(
        Column(title, detail, meaning),
        lambda row: cell(row[read] if isinstance(read, str) else read(row)),
    )


def _as_cell(value: Any) -> Cell:
    return value if isinstance(value, Cell) else Cell(str(value))


def list_numbers(
    meanings: Mapping[str, str], heads: Iterable[tuple[str, str, Kind, str]]
) -> list[Field]:
    """Return columns of numbers: title, detail, kind and key of each; ``meanings``: by key."""
    return [numbers(title, detail, meanings[key], kind, key) for title, detail, kind, key in heads]


def render_records(
    records: Iterable[Any] | pd.DataFrame, fields: Sequence[Field], caption: str = ""
) -> str:
    """Return a table with a row for each record, or each row of a frame."""
    listed = records.to_dict("records") if isinstance(records, pd.DataFrame) else records
    rows = [[field.read(record) for field in fields] for record in listed]
    return render_table([field.column for field in fields], rows, caption)
